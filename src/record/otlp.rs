//! Sends spans to a collector: OTLP over HTTP, in protobuf.
//!
//! A bounded queue and one task. Spans are made there, from finished requests, so that a request
//! pays nothing for them but its place in the queue. Batches leave once a second or when they are
//! large; one that the collector does not take is tried again for a while and then lost and
//! counted. Nobody waits for the collector.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, RETRY_AFTER, USER_AGENT};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::request_record::SharedRecord;
use super::settings::OtlpSettings;
use super::spans::spans_of;
use super::trace::Sampling;
use crate::clock::Clock;
use crate::dial::Dial;
use crate::types::Tick;

/// Requests that may wait to become spans.
const WAITING: usize = 2048;

/// A batch leaves with so many requests, or after [`TOGETHER`].
const LARGE_BATCH: usize = 512;

/// How long a request may wait for others to leave with.
const TOGETHER: Duration = Duration::from_secs(1);

/// How often the queue is emptied meanwhile.
const COLLECTS: Duration = Duration::from_millis(50);

/// How long the collector may take for an answer, connecting included.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often a batch is tried, with a pause that doubles from the first.
const TRIES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause that a collector may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// More than any answer of a collector is read of no one.
const LONGEST_ANSWER: usize = 64 * 1024;

/// How often an error that goes on is logged.
const TELLS: Duration = Duration::from_secs(60);

/// The recorder's end of the queue.
#[derive(Clone, Debug)]
pub struct SpanSender {
    sender: mpsc::Sender<SharedRecord>,
    spans: Arc<SpanCounts>,
    sampling: Sampling,
}

/// Spans by what became of them, since somebody last asked.
#[derive(Debug, Default)]
pub(super) struct SpanCounts {
    pub(super) exported: AtomicU64,
    pub(super) queue_full: AtomicU64,
    pub(super) export_failed: AtomicU64,
    pub(super) rejected: AtomicU64,
}

/// The collector's end of the queue; see [`SpanExporter::run`].
#[derive(Debug)]
pub struct SpanExporter {
    records: mpsc::Receiver<SharedRecord>,
    spans: Arc<SpanCounts>,
    settings: OtlpSettings,
    resource: Resource,
}

/// A queue in front of a collector. `instance` tells this process from others of its service.
#[must_use]
pub fn spans(settings: OtlpSettings, instance: u128) -> (SpanSender, SpanExporter) {
    let (sender, records) = mpsc::channel(WAITING);
    let spans = Arc::<SpanCounts>::default();
    let sampling = settings.sampling;
    let resource = resource(&settings, instance);
    (SpanSender { sender, spans: Arc::clone(&spans), sampling }, SpanExporter { records, spans, settings, resource })
}

impl SpanSender {
    /// Hands a request over that has a trace, or counts its spans as dropped.
    pub(super) fn write(&self, record: SharedRecord) {
        let spans = 1 + record.attempts.len() as u64;
        if self.sender.try_send(record).is_err() {
            self.spans.queue_full.fetch_add(spans, Ordering::Relaxed);
        }
    }

    pub(super) fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    pub(super) fn spans(&self) -> &SpanCounts {
        &self.spans
    }
}

/// Why a batch was not taken.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("no connection: {0}")]
    Dial(#[source] io::Error),
    #[error("it does not answer in HTTP: {0}")]
    Http(#[source] hyper::Error),
    #[error("it was silent for {PATIENCE:?}")]
    Silent,
    #[error("it answers {status}")]
    Status {
        status: StatusCode,
        /// How long it asks to be left alone.
        retry_after: Option<Duration>,
    },
}

impl ExportError {
    /// Whether the same batch may be taken later, by the specification of OTLP.
    fn is_passing(&self) -> bool {
        match self {
            ExportError::Dial(_) | ExportError::Http(_) | ExportError::Silent => true,
            ExportError::Status { status, .. } => matches!(status.as_u16(), 429 | 502 | 503 | 504),
        }
    }

    fn retry_after(&self) -> Option<Duration> {
        match self {
            ExportError::Status { retry_after, .. } => *retry_after,
            ExportError::Dial(_) | ExportError::Http(_) | ExportError::Silent => None,
        }
    }
}

impl SpanExporter {
    /// Exports until the last [`SpanSender`] is gone, and what it left then once more.
    pub async fn run(mut self, dial: Arc<dyn Dial>, clock: Clock) {
        let mut collector = CollectorConn { dial, clock, settings: self.settings.clone(), open: None };
        let (mut records, mut told) = (Vec::new(), None);
        while self.collect(&mut records, clock).await {
            let spans: Vec<Span> = records
                .drain(..)
                .filter_map(|record| record.trace.as_deref().map(|trace| spans_of(&record, trace)))
                .flatten()
                .collect();
            self.export(spans, &mut collector, &mut told).await;
        }
    }

    /// Takes a batch. False: there is none, and there will be none.
    async fn collect(&mut self, records: &mut Vec<SharedRecord>, clock: Clock) -> bool {
        if self.records.recv_many(records, WAITING).await == 0 {
            return false;
        }
        let until = clock.now() + TOGETHER;
        while records.len() < LARGE_BATCH && clock.now() < until && !self.records.is_closed() {
            clock.sleep_until(Some(until.min(clock.now() + COLLECTS))).await;
            if !self.records.is_empty() {
                self.records.recv_many(records, WAITING).await;
            }
        }
        true
    }

    async fn export(&self, spans: Vec<Span>, collector: &mut CollectorConn, told: &mut Option<Tick>) {
        let count = spans.len() as u64;
        let body = Bytes::from(self.request(spans).encode_to_vec());
        let (clock, mut pause) = (collector.clock, FIRST_PAUSE);
        for attempt in 1..=TRIES {
            let error = match collector.post(&body).await {
                Ok(answer) => {
                    let rejected = self.taken(&answer, count);
                    if rejected > 0 {
                        self.tell(clock, told, &format!("it rejects {rejected} of {count} spans"));
                    }
                    return;
                }
                Err(error) => error,
            };
            self.tell(clock, told, &error.to_string());
            // What is left at the end of the process is tried once.
            if attempt == TRIES || !error.is_passing() || self.records.is_closed() {
                break;
            }
            let asked = error.retry_after().map_or(pause, |asked| asked.min(LONGEST_PAUSE));
            // Gateways that lost their collector together must not come back together.
            clock.sleep_until(Some(clock.now() + asked.mul_f64(rand::random_range(0.8..1.2)))).await;
            pause *= 2;
        }
        self.spans.export_failed.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts a batch that was taken; how many spans of it were not.
    fn taken(&self, answer: &[u8], count: u64) -> u64 {
        let partial = ExportTraceServiceResponse::decode(answer).ok().and_then(|answer| answer.partial_success);
        let rejected = partial.map_or(0, |partial| u64::try_from(partial.rejected_spans).unwrap_or(0)).min(count);
        self.spans.rejected.fetch_add(rejected, Ordering::Relaxed);
        self.spans.exported.fetch_add(count - rejected, Ordering::Relaxed);
        rejected
    }

    fn tell(&self, clock: Clock, told: &mut Option<Tick>, error: &str) {
        let now = clock.now();
        if told.is_none_or(|told| now >= told + TELLS) {
            *told = Some(now);
            let collector = self.settings.address.authority();
            tracing::warn!(%collector, error, "spans are not taken by the collector");
        }
    }

    fn request(&self, spans: Vec<Span>) -> ExportTraceServiceRequest {
        let scope = InstrumentationScope {
            name: "goodput".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, schema_url: String::new() }];
        let resource = Some(self.resource.clone());
        ExportTraceServiceRequest {
            resource_spans: vec![ResourceSpans { resource, scope_spans, schema_url: String::new() }],
        }
    }
}

/// Who sends: the attributes of the settings stand in place of the gateway's own.
fn resource(settings: &OtlpSettings, instance: u128) -> Resource {
    let own = [
        ("service.name", "goodput".to_owned()),
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", format!("{instance:032x}")),
    ];
    let own = own.into_iter().filter(|(key, _)| settings.resource.iter().all(|(stated, _)| stated != key));
    let stated = settings.resource.iter().map(|(key, value)| (key.as_str(), value.clone()));
    let attribute = |(key, value): (&str, String)| KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(Value::StringValue(value)) }),
        ..KeyValue::default()
    };
    Resource { attributes: own.chain(stated).map(attribute).collect(), ..Resource::default() }
}

/// The connection to the collector: one, kept open between batches.
struct CollectorConn {
    dial: Arc<dyn Dial>,
    clock: Clock,
    settings: OtlpSettings,
    open: Option<CollectorHttp>,
}

struct CollectorHttp {
    sender: SendRequest<Full<Bytes>>,
    /// Drives the connection; ends it when dropped.
    _task: JoinSet<hyper::Result<()>>,
}

impl CollectorConn {
    /// Posts a batch; the body of the answer, if it was taken.
    async fn post(&mut self, body: &Bytes) -> Result<Bytes, ExportError> {
        let deadline = self.clock.now() + PATIENCE;
        let clock = self.clock;
        tokio::select! {
            done = self.exchange(body) => done,
            () = clock.sleep_until(Some(deadline)) => {
                self.open = None;
                Err(ExportError::Silent)
            }
        }
    }

    async fn exchange(&mut self, body: &Bytes) -> Result<Bytes, ExportError> {
        // One that the collector has closed meanwhile is told by the first try.
        if let Some(mut open) = self.open.take()
            && let Ok(answer) = self.send(&mut open, body).await
        {
            return self.finish(open, answer).await;
        }
        let mut open = self.connect().await?;
        let answer = self.send(&mut open, body).await.map_err(ExportError::Http)?;
        self.finish(open, answer).await
    }

    async fn connect(&self) -> Result<CollectorHttp, ExportError> {
        let OtlpSettings { address, roots, .. } = &self.settings;
        let io = self.dial.dial(address, roots.as_ref()).await.map_err(ExportError::Dial)?;
        let (sender, connection) = http1::handshake(TokioIo::new(io)).await.map_err(ExportError::Http)?;
        let mut task = JoinSet::new();
        task.spawn(connection);
        Ok(CollectorHttp { sender, _task: task })
    }

    async fn send(
        &self,
        open: &mut CollectorHttp,
        body: &Bytes,
    ) -> hyper::Result<http::Response<hyper::body::Incoming>> {
        open.sender.ready().await?;
        let OtlpSettings { address, headers, .. } = &self.settings;
        let mut request = Request::post(format!("{}/v1/traces", address.base))
            .header(HOST, address.authority())
            .header(USER_AGENT, concat!("goodput/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, "application/x-protobuf")
            .body(Full::new(body.clone()))
            .expect("the settings' check has seen the path and the host");
        for (name, value) in headers {
            request.headers_mut().insert(name.clone(), value.clone());
        }
        open.sender.send_request(request).await
    }

    async fn finish(
        &mut self,
        open: CollectorHttp,
        answer: http::Response<hyper::body::Incoming>,
    ) -> Result<Bytes, ExportError> {
        let status = answer.status();
        let retry_after = answer.headers().get(RETRY_AFTER).and_then(seconds);
        let read = Limited::new(answer.into_body(), LONGEST_ANSWER).collect().await;
        let body = read.map(http_body_util::Collected::to_bytes);
        if body.is_ok() {
            self.open = Some(open);
        }
        match status.is_success() {
            true => Ok(body.unwrap_or_default()),
            false => Err(ExportError::Status { status, retry_after }),
        }
    }
}

/// Whole seconds; a date is as good as nothing here.
fn seconds(value: &HeaderValue) -> Option<Duration> {
    value.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::{Outcome, Verdict};
    use crate::record::settings::OtlpSettings;
    use crate::record::tests::{finished, samples};
    use crate::record::trace::{RequestTrace, SpanId, TraceContext, TraceId};
    use crate::record::{RecordSinks, Recorder, RequestRecord};
    use crate::route::settings::{EngineAddress, Scheme};

    fn settings() -> OtlpSettings {
        let address = EngineAddress { scheme: Scheme::Http, host: "c".into(), port: 4318, base: "".into(), name: None };
        let sampling = Sampling { ratio: 1.0, follow_parent: true };
        let resource = vec![("service.name".to_owned(), "edge".to_owned()), ("zone".to_owned(), "b".to_owned())];
        OtlpSettings { address, headers: Vec::new(), roots: None, sampling, resource }
    }

    fn traced() -> RequestRecord {
        let context = TraceContext {
            trace: TraceId([1; 16]),
            span: SpanId([2; 8]),
            parent: None,
            link: None,
            sampled: true,
            state: None,
        };
        let trace = RequestTrace::new(context, Duration::from_secs(1));
        RequestRecord { trace: Some(Box::new(trace)), ..finished(Verdict::bare(Outcome::Met)) }
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_queue_has_no_room_for_is_counted_in_spans() {
        let (sender, exporter) = spans(settings(), 7);
        let sinks = RecordSinks { spans: Some(sender), ..RecordSinks::default() };
        let recorder = Recorder::with_sinks(Clock::start(), sinks);
        (0..WAITING + 3).for_each(|_| recorder.note(traced()));
        assert_eq!(samples(&recorder)["goodput_spans_total{result=\"queue_full\"}"], 6.0);
        drop(exporter);
    }

    #[test]
    fn attributes_of_the_settings_stand_in_place_of_the_gateways_own() {
        let resource = resource(&settings(), 0xAB);
        let keys: Vec<_> = resource.attributes.iter().map(|attribute| attribute.key.as_str()).collect();
        assert_eq!(keys, ["service.version", "service.instance.id", "service.name", "zone"]);
    }
}

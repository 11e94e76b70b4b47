//! Sends spans to a collector: OTLP over HTTP, in protobuf.
//!
//! A bounded queue and one task. Spans are made there, from finished requests, so that a request
//! pays nothing for them but its place in the queue. Batches leave once a second or when they are
//! large; one that the collector does not take is tried again for a while and then lost and
//! counted. Nobody waits for the collector.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message;
use tokio::sync::mpsc;

use super::http_client::{HttpClient, HttpError, HttpServer};
use super::request_record::SharedRecord;
use super::settings::OtlpSettings;
use super::spans::spans_of;
use super::trace::Sampling;
use crate::clock::Clock;
use crate::dial::Dial;
use crate::types::Tick;

/// The path of traces below the collector's own.
const TRACES: &str = "/v1/traces";

/// Requests that may wait to become spans.
const WAITING: usize = 2048;

/// Requests of a batch that is sent before [`TOGETHER`] has passed.
const LARGE_BATCH: usize = 512;

/// How long a request may wait for others to leave with.
const TOGETHER: Duration = Duration::from_secs(1);

/// How often the queue is emptied meanwhile.
const COLLECTS: Duration = Duration::from_millis(50);

/// Time limit of a response of the collector, connecting included.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often a batch is tried, with a pause that doubles from the first.
const TRIES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause that a collector may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Longest response of a collector that is read, in bytes.
const LONGEST_ANSWER: usize = 64 * 1024;

/// Interval at which a lasting error is logged again.
const TELLS: Duration = Duration::from_secs(60);

/// The recorder's end of the queue.
#[derive(Clone, Debug)]
pub struct SpanSender {
    sender: mpsc::Sender<SharedRecord>,
    spans: Arc<SpanCounts>,
    sampling: Sampling,
}

/// Spans by result, since the last read.
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

/// A queue to a collector. `instance` distinguishes this process from others of its service.
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

/// Whether the same batch may be accepted later, by the specification of OTLP.
fn is_passing(error: &HttpError) -> bool {
    match error {
        HttpError::Dial(_) | HttpError::Http(_) | HttpError::Silent(_) => true,
        HttpError::Status { status, .. } => matches!(status.as_u16(), 429 | 502 | 503 | 504),
        HttpError::Body(_) => false,
    }
}

fn retry_after(error: &HttpError) -> Option<Duration> {
    match error {
        HttpError::Status { retry_after, .. } => *retry_after,
        HttpError::Dial(_) | HttpError::Http(_) | HttpError::Silent(_) | HttpError::Body(_) => None,
    }
}

impl SpanExporter {
    /// Exports until the last [`SpanSender`] is dropped, and then exports the rest.
    pub async fn run(mut self, dial: Arc<dyn Dial>, clock: Clock) {
        let OtlpSettings { address, headers, roots, .. } = self.settings.clone();
        let server = HttpServer { address, headers, roots, timeout: PATIENCE, longest: LONGEST_ANSWER };
        let mut collector = HttpClient::new(dial, clock, server);
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

    /// Collects a batch. False if the channel is closed and empty.
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

    async fn export(&self, spans: Vec<Span>, collector: &mut HttpClient, told: &mut Option<Tick>) {
        let count = spans.len() as u64;
        let body = Bytes::from(self.request(spans).encode_to_vec());
        let (clock, mut pause) = (collector.clock(), FIRST_PAUSE);
        for attempt in 1..=TRIES {
            let error = match collector.post(TRACES, "application/x-protobuf", &body).await {
                // Accepted, with a response too long to matter.
                Err(HttpError::Body(_)) => {
                    self.taken(&[], count);
                    return;
                }
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
            // At the end of the process a batch is tried only once.
            if attempt == TRIES || !is_passing(&error) || self.records.is_closed() {
                break;
            }
            let asked = retry_after(&error).map_or(pause, |asked| asked.min(LONGEST_PAUSE));
            // Jitter, because gateways that lost their collector together must not return together.
            clock.sleep_until(Some(clock.now() + asked.mul_f64(rand::random_range(0.8..1.2)))).await;
            pause *= 2;
        }
        self.spans.export_failed.fetch_add(count, Ordering::Relaxed);
    }

    /// Counts an accepted batch; some of its spans may have been rejected.
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

/// Attributes of the sender: those of the settings replace the gateway's own.
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

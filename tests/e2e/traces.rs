//! Traces of a real process: to a collector behind a socket that decodes the real protobuf, and as
//! exemplars in a real Prometheus.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;

use crate::gateway::{Gateway, Setup, sum_where};
use crate::parts::{find, with_parts};
use crate::processes::{CHAT, stream_of};
use crate::prometheus::Prometheus;
use crate::running::{Running, get, post, until};

/// A batch as it came.
#[derive(Clone)]
pub struct Batch {
    pub head: String,
    pub body: Vec<u8>,
}

impl Batch {
    fn spans(&self) -> Vec<Span> {
        let batch = ExportTraceServiceRequest::decode(&self.body[..]).expect("protobuf");
        let scopes = batch.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).collect()
    }

    /// Number of client requests among the spans.
    pub fn requests(&self) -> usize {
        self.spans().iter().filter(|span| span.kind() == SpanKind::Server).count()
    }
}

/// A collector that takes everything.
pub struct Collector {
    pub url: String,
    batches: Arc<Mutex<Vec<Batch>>>,
}

impl Collector {
    pub fn start() -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound"));
        let batches = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&batches);
        // Ends with the process, when no more connections come.
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let kept = Arc::clone(&kept);
                std::thread::spawn(move || serve(connection, &kept));
            }
        });
        Collector { url, batches }
    }

    pub fn taken(&self) -> Vec<Batch> {
        self.batches.lock().expect("nobody panics with it").clone()
    }

    fn spans(&self) -> Vec<Span> {
        self.taken().iter().flat_map(Batch::spans).collect()
    }
}

/// Takes batches until the connection is closed.
fn serve(mut connection: TcpStream, kept: &Mutex<Vec<Batch>>) {
    let mut reader = BufReader::new(connection.try_clone().expect("a second handle"));
    loop {
        let (mut head, mut length) = (String::new(), 0);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if let Some(stated) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = stated.trim().parse().expect("a number");
            }
            if line == "\r\n" {
                break;
            }
            head.push_str(&line);
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).expect("the body is whole");
        kept.lock().expect("nobody panics with it").push(Batch { head, body });
        let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
        if connection.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

fn exported(gateway: &Gateway) -> f64 {
    let page = get(&gateway.admin, "/metrics").unwrap_or_default();
    sum_where(&page, "goodput_spans_total", "result=\"exported\"")
}

#[test]
fn spans_of_a_real_process_reach_a_collector_also_at_its_end() {
    let (engine, collector) = (Running::engine(&["--speed", "20"]), Collector::start());
    let more = format!("telemetry: {{otlp: {{endpoint: \"{}/v1/traces\", ratio: 1}}}}\n", collector.url);
    let mut gateway = Gateway::start(&Setup { engines: &[&engine], more: &more, ..Setup::default() });
    for _ in 0..3 {
        assert!(post(&gateway.running.url, CHAT, "", &stream_of(2)).is_ok());
    }
    until("they are exported", || (exported(&gateway) == 6.0).then_some(()));
    assert!(post(&gateway.running.url, CHAT, "", &stream_of(2)).is_ok());
    gateway.running.signal("TERM");
    assert_eq!(gateway.running.exit_code(), Some(0));
    let spans = collector.spans();
    assert_eq!(spans.len(), 8, "{spans:#?}");
    for pair in spans.chunks(2) {
        let [request, attempt] = pair else { panic!("two of each") };
        assert_eq!((request.name.as_str(), attempt.name.as_str()), ("chat sim", "POST /v1/chat/completions"));
        assert_eq!((&attempt.trace_id, &attempt.parent_span_id), (&request.trace_id, &request.span_id));
        let names: Vec<_> = request.events.iter().map(|event| event.name.as_str()).collect();
        assert_eq!(names, ["admitted", "first_token", "finish"]);
        let times = request.events.iter().map(|event| event.time_unix_nano);
        let all: Vec<_> =
            [request.start_time_unix_nano].into_iter().chain(times).chain([request.end_time_unix_nano]).collect();
        assert!(all.is_sorted(), "{all:?}");
    }
}

#[test]
fn a_real_prometheus_leads_from_a_bucket_to_the_trace() {
    with_parts("exemplars", || {
        let binary = find("prometheus", "install it: apt-get install prometheus")?;
        let (engine, collector) = (Running::engine(&["--speed", "4"]), Collector::start());
        let more = format!("telemetry: {{otlp: {{endpoint: \"{}\", ratio: 1}}}}\n", collector.url);
        let gateway = Gateway::start(&Setup { engines: &[&engine], more: &more, ..Setup::default() });
        assert!(post(&gateway.running.url, CHAT, "", &stream_of(4)).is_ok());
        until("it is exported", || (exported(&gateway) == 2.0).then_some(()));
        let trace: String = collector.spans()[0].trace_id.iter().map(|byte| format!("{byte:02x}")).collect();
        let prometheus = Prometheus::with(&binary, &gateway.admin, &["--enable-feature=exemplar-storage"]);
        let path = "/api/v1/query_exemplars?query=goodput_time_to_first_token_seconds_bucket&start=0&end=9999999999";
        let found = prometheus.ask(path, |answer| {
            let exemplar = &answer["data"][0]["exemplars"][0];
            Some(exemplar["labels"]["trace_id"].as_str()?.to_owned())
        });
        assert_eq!(found, trace);
        Ok(())
    });
}

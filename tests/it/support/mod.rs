//! A gateway to test: settings from YAML, engines that play scripts behind in-memory pipes,
//! virtual time, and everything it writes down.

mod dialects;
mod network;
mod page;
mod reply;
pub mod scripted_engine;
mod socket;
mod yaml;

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::support::scripted_engine::{Script, ScriptedEngine};
use bytes::Bytes;
use goodput::accept::Drain;
use goodput::clock::Clock;
use goodput::config::{self, Environment, Settings};
use goodput::gateway::{Gateway, GatewayDeps};
use goodput::record::{self, Format, RecordSinks, Recorder, access};
use goodput::route::probe::Probes;
use goodput::types::{ClientState, Tick};
use http::{Method, Request};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::AsyncWrite;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

pub use dialects::dialects;
pub use network::Network;
pub use page::Page;
pub use reply::{Reply, Whole, millis};
pub use socket::{Client, h2_next, h2_post};
pub use yaml::Yaml;

/// Header fields, name and value.
pub type Fields = &'static [(&'static str, &'static str)];

pub const CHAT: &str = "/v1/chat/completions";

pub const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub const fn at(millis: u64) -> Tick {
    Tick::from_millis(millis)
}

/// A gateway and its surroundings. [`House::end`] checks the laws that hold for every test.
pub struct House {
    pub clock: Clock,
    pub gateway: Gateway,
    pub network: Network,
    drain: Drain,
    recorder: Recorder,
    lines: Lines,
    seats: AbortHandle,
    has_ended: bool,
}

impl House {
    /// A gateway with these settings and no engine yet.
    pub fn new(yaml: &Yaml) -> Self {
        let clock = Clock::start();
        let (access, writer) = access::lines();
        let lines = Lines::default();
        tokio::spawn(writer.run(lines.clone(), clock));
        let (network, settings) = (Network::default(), settings(yaml));
        let mut sinks = RecordSinks { access: Some(access), ..RecordSinks::default() };
        if let Some(journal) = &settings.journal {
            let (sender, writer) = record::journal(journal.clone(), [7; 32]);
            tokio::spawn(writer.run(clock));
            sinks.journal = Some(sender);
        }
        if let Some(otlp) = &settings.otlp {
            let (sender, exporter) = record::spans(otlp.clone(), 7);
            tokio::spawn(exporter.run(Arc::new(network.clone()), clock));
            sinks.spans = Some(sender);
        }
        let recorder = Recorder::with_sinks(clock, sinks);
        if let Some(prometheus) = settings.prometheus.clone() {
            recorder.expect_prometheus();
            let dial = Arc::new(network.clone());
            tokio::spawn(record::PrometheusReader::new(prometheus, dial, recorder.clone(), clock).run());
        }
        let materials = GatewayDeps { clock, dial: Arc::new(network.clone()), recorder: recorder.clone(), seed: 7 };
        let gateway = Gateway::new(settings, materials);
        let seats = tokio::spawn(gateway.clone().run_seat_sync()).abort_handle();
        House { clock, gateway, network, drain: Drain::new(), recorder, lines, seats, has_ended: false }
    }

    /// The default settings, and an engine `e1` that plays this script for every request.
    pub fn playing(script: Script) -> (Self, ScriptedEngine) {
        Self::playing_with(&Yaml::default(), script)
    }

    pub fn playing_with(yaml: &Yaml, script: Script) -> (Self, ScriptedEngine) {
        let house = House::new(yaml);
        let engine = house.engine("e1", vec![script]);
        (house, engine)
    }

    /// Engines `e1`, `e2` ... of pool `a`: whichever is asked first plays the first script, the
    /// next request gets the next one, and the last one stays.
    pub fn many(yaml: &Yaml, count: usize, scripts: Vec<Script>) -> (Self, Vec<ScriptedEngine>) {
        let hosts: Vec<String> = (1..=count).map(|number| format!("e{number}")).collect();
        let names: Vec<&str> = hosts.iter().map(String::as_str).collect();
        let house = House::new(&yaml.clone().engines_of_first(&names));
        let (turn, scripts) = (Arc::new(AtomicUsize::new(0)), Arc::new(scripts));
        let engine = |host: &String| {
            let (turn, scripts) = (Arc::clone(&turn), Arc::clone(&scripts));
            let engine = ScriptedEngine::new(house.clock, move |_| {
                scripts[turn.fetch_add(1, Ordering::Relaxed).min(scripts.len() - 1)].clone()
            });
            house.network.engine(host, &engine);
            engine
        };
        let engines = hosts.iter().map(engine).collect();
        (house, engines)
    }

    /// An engine that plays these scripts in turn; the last one stays.
    pub fn engine(&self, host: &str, scripts: Vec<Script>) -> ScriptedEngine {
        let engine = ScriptedEngine::in_turn(self.clock, scripts);
        self.network.engine(host, &engine);
        engine
    }

    /// A request of the chat path with this body.
    pub async fn chat(&self, body: Value) -> Reply {
        self.post(CHAT, body).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Reply {
        self.send(Ask::post(path, body)).await
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(Ask::of(Method::GET, path)).await
    }

    /// Any request.
    pub async fn send(&self, ask: Ask) -> Reply {
        let request = ask.request();
        Reply::new(self.gateway.handle(request).await, self.clock)
    }

    /// A request whose body comes as any other body does.
    pub async fn send_body<B>(&self, request: Request<B>) -> Reply
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Reply::new(self.gateway.handle(request).await, self.clock)
    }

    pub async fn sleep(&self, length: Duration) {
        self.clock.sleep_until(Some(self.clock.now() + length)).await;
    }

    pub fn reload(&self, yaml: &Yaml) {
        self.gateway.reload(settings(yaml));
    }

    /// Looks at the engines of the settings, as a running gateway does, until dropped.
    pub fn probe(&self) -> Probes {
        let probes = Probes::new(self.gateway.fleet.clone(), Arc::new(self.network.clone()), self.clock, 7);
        probes.apply_settings(&self.gateway.live.load().settings.pools);
        probes
    }

    /// The first `count` access lines.
    pub async fn lines(&self, count: usize) -> Vec<Line> {
        self.lines.at_least(count).await
    }

    /// The only access line.
    pub async fn line(&self) -> Line {
        let mut lines = self.lines(1).await;
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.remove(0)
    }

    /// States of a pool's engines, by name.
    pub fn states(&self, pool: &str) -> Vec<&'static str> {
        let view = self.gateway.fleet.view(self.clock.now());
        let pool = view.into_iter().find(|view| view.pool.as_str() == pool).expect("a pool of this name");
        pool.engines.iter().map(|engine| engine.state.as_str()).collect()
    }

    pub fn page(&self) -> Page {
        self.gateway.report_engines();
        self.gateway.report_seats();
        self.gateway.report_store();
        self.gateway.report_levels();
        Page::read(self.recorder.page(Format::Text))
    }

    /// The page of metrics, in OpenMetrics.
    pub fn open_page(&self) -> String {
        self.recorder.page(Format::OpenMetrics)
    }

    /// All access lines as written.
    pub fn written(&self) -> String {
        self.lines.text()
    }

    /// Seats in use and waiting requests, over all pools.
    pub fn crowd(&self) -> (usize, usize) {
        let numbers = self.gateway.pool_queues.all().into_iter().map(|(_, pool_queue)| pool_queue.numbers());
        numbers.fold((0, 0), |(taken, waiting), now| (taken + now.taken, waiting + now.waiting))
    }

    /// The end of a test: one line per request, `met + missed + excluded = finished`, nothing
    /// in flight, no work left at any engine, no seat taken, nothing reserved.
    pub async fn end(mut self) {
        self.has_ended = true;
        assert_eq!(self.recorder.open_visits(), 0, "visits are open");
        let page = self.page();
        let sum = |name, labels: &[(&str, &str)]| page.sum(name, labels);
        let finished = |outcome| sum("goodput_requests_finished_total", &[("outcome", outcome)]);
        let (met, missed, excluded) = (finished("met"), finished("missed"), finished("excluded"));
        let all = sum("goodput_requests_finished_total", &[]);
        assert!((met + missed + excluded - all).abs() < f64::EPSILON);
        let lines = self.lines.at_least(all as usize).await;
        let of = |outcome| lines.iter().filter(|line| line.outcome() == outcome).count() as f64;
        assert_eq!((of("met"), of("missed"), of("excluded"), lines.len() as f64), (met, missed, excluded, all));
        assert_eq!(sum("slo_total", &[]), met + missed);
        assert_eq!(sum("slo_met_total", &[]), met);
        assert_eq!(sum("goodput_slo_missed_total", &[]), missed);
        assert_eq!(sum("goodput_slo_excluded_total", &[]), excluded);
        assert_eq!(sum("goodput_in_flight", &[]), 0.0);
        assert_eq!(sum("goodput_overdue", &[]), 0.0);
        assert_eq!(sum("goodput_queue_depth", &[]), 0.0);
        assert_eq!(sum("goodput_seats_taken", &[]), 0.0);
        assert_eq!(self.crowd(), (0, 0), "seats are taken, or somebody waits");
        for tenant in self.gateway.live.load().settings.tenants.iter() {
            assert_eq!(self.gateway.limiter.running(&tenant.id), 0, "a reservation of {} is open", tenant.id);
        }
        assert!(page.count("goodput_in_flight", &[]) > 0);
        for pool in self.gateway.fleet.view(self.clock.now()) {
            for engine in pool.engines {
                assert_eq!((engine.requests, engine.work.0), (0, 0), "work is left at {}", engine.engine);
            }
        }
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.seats.abort();
        assert!(self.has_ended || std::thread::panicking(), "a test forgot `House::end`");
    }
}

fn settings(yaml: &Yaml) -> Settings {
    let text = yaml.text();
    config::load(&text, &Nothing).unwrap_or_else(|problems| panic!("{problems:#?}\n{text}"))
}

/// No environment; a file `name` holds `sk-NAME`.
struct Nothing;

impl Environment for Nothing {
    fn variable(&self, _name: &str) -> Option<String> {
        None
    }

    fn file(&self, path: &Path) -> io::Result<Vec<u8>> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        Ok(format!("sk-{}", name.to_uppercase()).into_bytes())
    }
}

/// A request to be sent.
pub struct Ask {
    request: http::request::Builder,
    body: Bytes,
    client: ClientState,
}

impl Ask {
    pub fn of(method: Method, target: &str) -> Self {
        let request = Request::builder().method(method).uri(target).header("host", "gateway");
        Ask { request, body: Bytes::new(), client: ClientState::default() }
    }

    pub fn post(target: &str, body: Value) -> Self {
        Self::raw(target, body.to_string())
    }

    pub fn raw(target: &str, body: impl Into<Bytes>) -> Self {
        let body = body.into();
        let ask = Ask::of(Method::POST, target).header("content-type", "application/json");
        let ask = ask.header("content-length", &body.len().to_string());
        Ask { body, ..ask }
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.request = self.request.header(name, value);
        self
    }

    /// With these bytes as they are: no header is set.
    pub fn with_body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// With this client's side of the connection.
    pub fn client(mut self, client: &ClientState) -> Self {
        self.client = client.clone();
        self
    }

    fn request(self) -> Request<http_body_util::combinators::BoxBody<Bytes, io::Error>> {
        let body = Full::new(self.body).map_err(|never| match never {}).boxed();
        let mut request = self.request.body(body).expect("a request");
        request.extensions_mut().insert(self.client);
        request
    }
}

/// A chat request that asks for a stream and, like most clients, for no usage.
pub fn stream() -> Value {
    json!({"model": "m1", "stream": true, "messages": [{"role": "user", "content": "hi"}]})
}

/// A chat request that asks for a stream with usage: nothing is injected.
pub fn stream_with_usage() -> Value {
    let mut body = stream();
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// A chat request for a non-streaming response.
pub fn unary() -> Value {
    json!({"model": "m1", "messages": [{"role": "user", "content": "hi"}]})
}

/// One access line.
#[derive(Clone, Debug)]
pub struct Line(pub Value);

impl Line {
    pub fn outcome(&self) -> &str {
        self.0["outcome"].as_str().expect("an outcome")
    }

    /// `met`, `missed(reason)`, `excluded(reason)`.
    pub fn verdict(&self) -> String {
        match self.0["reason"].as_str() {
            Some(reason) => format!("{}({reason})", self.outcome()),
            None => self.outcome().to_owned(),
        }
    }

    /// Whether the client left before its response was complete, for any reason.
    pub fn has_left(&self) -> bool {
        ["excluded(client_cancel)", "missed(canceled_late)"].contains(&self.verdict().as_str())
    }

    pub fn text(&self, field: &str) -> &str {
        self.0[field].as_str().unwrap_or("-")
    }

    pub fn number(&self, field: &str) -> Option<f64> {
        assert!(self.0.get(field).is_some(), "no field {field}");
        self.0[field].as_f64()
    }

    pub fn ttft(&self) -> Option<f64> {
        self.number("ttft_ms")
    }

    pub fn tpot(&self) -> Option<f64> {
        self.number("tpot_ms")
    }

    pub fn e2e(&self) -> Option<f64> {
        self.number("e2e_ms")
    }

    /// Input and output tokens.
    pub fn tokens(&self) -> (Option<u64>, Option<u64>) {
        (self.0["input_tokens"].as_u64(), self.0["output_tokens"].as_u64())
    }
}

/// Destination of access lines.
#[derive(Clone, Default)]
struct Lines(Arc<Sheet>);

#[derive(Default)]
struct Sheet {
    bytes: Mutex<Vec<u8>>,
    changed: Notify,
}

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.bytes.lock().clone()).expect("UTF-8")
    }

    fn all(&self) -> Vec<Line> {
        self.text().lines().map(|line| Line(serde_json::from_str(line).expect("JSON"))).collect()
    }

    async fn at_least(&self, count: usize) -> Vec<Line> {
        let there = async {
            loop {
                let changed = self.0.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if memchr::memchr_iter(b'\n', &self.0.bytes.lock()).count() >= count {
                    return self.all();
                }
                changed.await;
            }
        };
        // An hour of virtual time, which passes at once if nothing else can happen.
        let in_time = tokio::time::timeout(Duration::from_secs(3600), there).await;
        in_time.unwrap_or_else(|_| panic!("{} access lines came, not {count}", self.all().len()))
    }
}

impl AsyncWrite for Lines {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.bytes.lock().extend_from_slice(bytes);
        self.0.changed.notify_waiters();
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

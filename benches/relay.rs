//! Cost of the gateway, compared with a bare hyper relay on the same work in the same run.
//!
//! `cargo bench` starts a bare relay and `goodput serve` as processes of their own, an engine
//! and clients in this one, and prints CPU per streamed event (with and without observation; of
//! few fast streams and of many slow ones, once all are open), CPU per small request, and
//! bytes per idle open stream. Only ratios are meaningful, because both sides pay for the same
//! loopback sockets on the same machine. They alternate, and each figure is the median of its runs.
//! `-- --json` prints JSON.

use std::convert::Infallible;
use std::io::Write as _;
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use goodput::clock::Clock;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Interval;

/// Runs of each proxy.
const TURNS: usize = 3;
/// Concurrent streams, events of each, and the interval between events.
const STREAMS: usize = 100;
const EVENTS: usize = 100;
const PACE: Duration = Duration::from_millis(20);
/// Few fast streams and many slow ones with the same total event rate, and the time for which they
/// are measured once all are open.
const FEW_FAST: (usize, Duration) = (200, Duration::from_millis(20));
const MANY_SLOW: (usize, Duration) = (2000, Duration::from_millis(200));
const STANDING: Duration = Duration::from_secs(3);
/// Connections of the closed loop of small requests, and how long it runs.
const CONNECTIONS: usize = 8;
const LOOP: Duration = Duration::from_millis(1500);
/// Idle streams held open.
const IDLE: usize = 1000;

const OBSERVED: &str = "/v1/chat/completions";
/// A path whose responses are relayed without observation.
const UNOBSERVED: &str = "/v1/audio/speech";

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    match arguments.iter().position(|argument| argument == "--bare-relay") {
        Some(at) => runtime.block_on(bare_relay(arguments[at + 1].clone())),
        // `cargo test --all-targets` runs benches, too, without this.
        None if !has("--bench") => Ok(()),
        None => runtime.block_on(compare(has("--json"))),
    }
}

/// Cost of one proxy, run by run.
#[derive(Debug, Default)]
struct Cost {
    event_micros: Vec<f64>,
    unobserved_event_micros: Vec<f64>,
    few_fast_micros: Vec<f64>,
    many_slow_micros: Vec<f64>,
    request_micros: Vec<f64>,
    idle_stream_bytes: Vec<f64>,
}

async fn compare(json: bool) -> Result<(), Failure> {
    let engine = TcpListener::bind("127.0.0.1:0").await?;
    let at = engine.local_addr()?;
    tokio::spawn(serve_engine(engine));
    let (mut bare, mut ours) = (Cost::default(), Cost::default());
    for _ in 0..TURNS {
        measure(Proxy::bare(at)?, &mut bare).await?;
        measure(Proxy::goodput(at)?, &mut ours).await?;
    }
    let rows = [
        ("CPU per streamed event, us", bare.event_micros, ours.event_micros),
        ("  the same, not observed, us", bare.unobserved_event_micros, ours.unobserved_event_micros),
        ("  200 streams, 50/s each, us", bare.few_fast_micros, ours.few_fast_micros),
        ("  2,000 streams, 5/s each, us", bare.many_slow_micros, ours.many_slow_micros),
        ("CPU per small request, us", bare.request_micros, ours.request_micros),
        ("bytes per idle open stream", bare.idle_stream_bytes, ours.idle_stream_bytes),
    ];
    let rows = rows.map(|(what, bare, ours)| (what, median(bare), median(ours)));
    if json {
        let row = |(what, bare, ours): (&str, f64, f64)| serde_json::json!({"what": what.trim(), "bare_relay": bare, "goodput": ours, "ratio": ours / bare});
        println!("{}", serde_json::Value::from_iter(rows.map(row)));
        return Ok(());
    }
    println!("{:<32} {:>12} {:>12} {:>7}", "", "bare relay", "goodput", "ratio");
    for (what, bare, ours) in rows {
        println!("{what:<32} {bare:>12.1} {ours:>12.1} {:>7.2}", ours / bare);
    }
    Ok(())
}

fn median(mut turns: Vec<f64>) -> f64 {
    turns.sort_by(f64::total_cmp);
    turns[turns.len() / 2]
}

async fn measure(proxy: Proxy, cost: &mut Cost) -> Result<(), Failure> {
    let at = proxy.ready().await?;
    let clock = Clock::start();
    let events = (STREAMS * EVENTS) as f64;
    cost.event_micros.push(proxy.micros_of(streams(at, OBSERVED)).await? / events);
    cost.unobserved_event_micros.push(proxy.micros_of(streams(at, UNOBSERVED)).await? / events);
    cost.few_fast_micros.push(standing(&proxy, FEW_FAST).await?);
    cost.many_slow_micros.push(standing(&proxy, MANY_SLOW).await?);
    let before = proxy.cpu_micros()?;
    let requests = small_requests(at, clock).await?;
    cost.request_micros.push((proxy.cpu_micros()? - before) / requests as f64);
    let resident = proxy.resident_bytes()?;
    let held = idle_streams(at).await?;
    cost.idle_stream_bytes.push((proxy.resident_bytes()? - resident) / IDLE as f64);
    drop(held);
    Ok(())
}

/// A proxy process.
struct Proxy {
    process: Child,
    at: SocketAddr,
    /// Its settings file, removed with it.
    settings: Option<std::path::PathBuf>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(settings) = &self.settings {
            let _ = std::fs::remove_file(settings);
        }
    }
}

impl Proxy {
    fn bare(engine: SocketAddr) -> Result<Self, Failure> {
        let at = free_address()?;
        let process =
            Command::new(std::env::current_exe()?).args(["--bare-relay", &format!("{at}/{engine}")]).spawn()?;
        Ok(Proxy { process, at, settings: None })
    }

    /// The gateway with its defaults: access lines are written, usage is requested.
    fn goodput(engine: SocketAddr) -> Result<Self, Failure> {
        let at = free_address()?;
        let path = std::env::temp_dir().join(format!("goodput-bench-{}.yaml", std::process::id()));
        let mut file = std::fs::File::create(&path)?;
        write!(
            file,
            "listen: {{address: \"{at}\"}}\nadmin: off\nslo_classes:\n  - slo_class: chat\n    objectives:\n      \
             ttft_seconds: {{threshold: 1, attainment: 0.95}}\n      tpot_seconds: {{threshold: 0.05, attainment: 0.95}}\n    \
             joint_attainment_target: 0.92\n    window: 28d\ndefault_class: chat\npools:\n  - pool: main\n    engines: \
             [{{url: \"http://{engine}\"}}]\n    engine: {{kind: vllm}}\nroutes:\n  - {{model: [m], pools: [main]}}\n"
        )?;
        let mut serve = Command::new(env!("CARGO_BIN_EXE_goodput"));
        serve.args(["serve", "-c"]).arg(&path).stdout(Stdio::null()).env("RUST_LOG", "error");
        Ok(Proxy { process: serve.spawn()?, at, settings: Some(path) })
    }

    /// Waits until a request succeeds, and fills the connection pools.
    async fn ready(&self) -> Result<SocketAddr, Failure> {
        for _ in 0..200 {
            if let Ok(response) = ask(self.at, OBSERVED, false).await
                && response.status().is_success()
            {
                response.into_body().collect().await?;
                return Ok(self.at);
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        Err("the proxy did not start".into())
    }

    async fn micros_of(&self, work: impl Future<Output = Result<(), Failure>>) -> Result<f64, Failure> {
        let before = self.cpu_micros()?;
        work.await?;
        Ok(self.cpu_micros()? - before)
    }

    /// User and system time of its running threads.
    fn cpu_micros(&self) -> Result<f64, Failure> {
        let mut nanos = 0.0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.process.id()))? {
            // A thread may end between the two reads.
            let Ok(spent) = std::fs::read_to_string(task?.path().join("schedstat")) else { continue };
            nanos += spent.split(' ').next().unwrap_or_default().parse::<f64>()?;
        }
        Ok(nanos / 1000.0)
    }

    fn resident_bytes(&self) -> Result<f64, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? * 1024.0)
    }
}

fn free_address() -> Result<SocketAddr, Failure> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

// The clients.

async fn ask(at: SocketAddr, path: &str, streams: bool) -> Result<Response<Incoming>, Failure> {
    Ok(sender(at).await?.send_request(request(path, streams, EVENTS, PACE)).await?)
}

/// A connection on which requests can be sent.
async fn sender(at: SocketAddr) -> Result<SendRequest<Full<Bytes>>, Failure> {
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(connect(at).await?)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

async fn connect(at: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(at).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// `max_tokens` is the number of events, `pace_ms` the interval between them.
fn request(path: &str, streams: bool, events: usize, pace: Duration) -> Request<Full<Bytes>> {
    let pace = pace.as_millis();
    let body = format!(
        "{{\"model\":\"m\",\"stream\":{streams},\"max_tokens\":{events},\"pace_ms\":{pace},\"messages\":[{{\"role\":\"user\",\"content\":\"How are you?\"}}]}}"
    );
    let request = Request::post(path).header("host", "bench").header("content-type", "application/json");
    request.body(Full::from(body)).expect("a fixed request")
}

async fn streams(at: SocketAddr, path: &'static str) -> Result<(), Failure> {
    let mut all = JoinSet::new();
    for _ in 0..STREAMS {
        all.spawn(async move {
            let response = ask(at, path, true).await?;
            let length = response.into_body().collect().await?.to_bytes().len();
            if length < EVENTS * EVENT.len() { Err::<(), Failure>("an answer is not whole".into()) } else { Ok(()) }
        });
    }
    while let Some(done) = all.join_next().await {
        done??;
    }
    Ok(())
}

/// CPU per event of `streams` streams at this pace, measured once all are open.
async fn standing(proxy: &Proxy, (streams, pace): (usize, Duration)) -> Result<f64, Failure> {
    let (begun, events) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut all = JoinSet::new();
    for n in 0..streams {
        let (at, begun, events) = (proxy.at, Arc::clone(&begun), Arc::clone(&events));
        all.spawn(async move {
            // Starts are spread, so that their events are spread as well.
            tokio::time::sleep(Duration::from_secs(1) * n as u32 / streams as u32).await;
            let mut sender = sender(at).await?;
            let mut body = sender.send_request(request(OBSERVED, true, 10_000, pace)).await?.into_body();
            body.frame().await.ok_or("a stream ended")??;
            begun.fetch_add(1, Relaxed);
            while body.frame().await.transpose()?.is_some() {
                events.fetch_add(1, Relaxed);
            }
            Err::<(), Failure>("a stream ended".into())
        });
    }
    while begun.load(Relaxed) < streams {
        tokio::select! {
            Some(ended) = all.join_next() => ended??,
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
    }
    let (before, seen) = (proxy.cpu_micros()?, events.load(Relaxed));
    tokio::time::sleep(STANDING).await;
    let per_event = (proxy.cpu_micros()? - before) / (events.load(Relaxed) - seen) as f64;
    match all.try_join_next() {
        Some(ended) => Err(ended?.expect_err("no stream ends well")),
        None => Ok(per_event),
    }
}

/// Number of requests of a closed loop.
async fn small_requests(at: SocketAddr, clock: Clock) -> Result<usize, Failure> {
    let end = clock.now() + LOOP;
    let mut all = JoinSet::new();
    for _ in 0..CONNECTIONS {
        all.spawn(async move {
            let mut sender = sender(at).await?;
            let mut count = 0;
            while clock.now() < end {
                sender.ready().await?;
                let response = sender.send_request(request(OBSERVED, false, 1, PACE)).await?;
                response.into_body().collect().await?;
                count += 1;
            }
            Ok::<usize, Failure>(count)
        });
    }
    let mut count = 0;
    while let Some(done) = all.join_next().await {
        count += done??;
    }
    Ok(count)
}

/// Streams that got their first event and stay idle afterwards.
async fn idle_streams(at: SocketAddr) -> Result<Vec<Incoming>, Failure> {
    let mut held = Vec::with_capacity(IDLE);
    for _ in 0..IDLE {
        let mut sender = sender(at).await?;
        let mut body = sender.send_request(request(OBSERVED, true, 0, PACE)).await?.into_body();
        body.frame().await.ok_or("an idle stream ended")??;
        held.push(body);
    }
    Ok(held)
}

// The engine.

const EVENT: &str = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
const LAST: &str = "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
const WHOLE: &str = "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"word\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"total_tokens\":10}}";

async fn serve_engine(listener: TcpListener) -> Result<(), Failure> {
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let serve =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(answer));
        tokio::spawn(serve);
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Answer>, Failure> {
    let body = request.into_body().collect().await?.to_bytes();
    let wanted: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let response = Response::builder();
    if wanted["stream"] != true {
        return Ok(response.header("content-type", "application/json").body(Answer::Whole(Full::from(WHOLE)))?);
    }
    let left = usize::try_from(wanted["max_tokens"].as_u64().unwrap_or_default())?;
    let pace = tokio::time::interval(Duration::from_millis(wanted["pace_ms"].as_u64().ok_or("no pace")?));
    Ok(response.header("content-type", "text/event-stream").body(Answer::Events { left, pace })?)
}

/// A response of the engine.
enum Answer {
    Whole(Full<Bytes>),
    /// Paced events; with a count of 0 it sends one and stays idle.
    Events {
        left: usize,
        pace: Interval,
    },
    /// Idle without an end.
    Silence,
    /// Complete.
    Over,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let (event, next): (Bytes, _) = match &mut *self {
            Answer::Whole(whole) => return Pin::new(whole).poll_frame(cx),
            Answer::Silence => return Poll::Pending,
            Answer::Over => return Poll::Ready(None),
            Answer::Events { left: 0, .. } => (EVENT.into(), Some(Answer::Silence)),
            Answer::Events { left, pace } => {
                ready!(pace.poll_tick(cx));
                *left -= 1;
                if *left > 0 { (EVENT.into(), None) } else { ([EVENT, LAST].concat().into(), Some(Answer::Over)) }
            }
        };
        if let Some(next) = next {
            *self = next;
        }
        Poll::Ready(Some(Ok(Frame::data(event))))
    }
}

// The bare relay: hyper on both sides, one engine connection per client connection.

async fn bare_relay(places: String) -> Result<(), Failure> {
    let (at, engine) = places.split_once('/').ok_or("two addresses")?;
    let (listener, engine) = (TcpListener::bind(at).await?, engine.parse::<SocketAddr>()?);
    loop {
        let (client, _) = listener.accept().await?;
        client.set_nodelay(true)?;
        tokio::spawn(async move {
            let io = TokioIo::new(connect(engine).await?);
            let (sender, connection) = hyper::client::conn::http1::handshake::<_, Incoming>(io).await?;
            tokio::spawn(connection);
            let sender = tokio::sync::Mutex::new(sender);
            let relay = service_fn(|request: Request<Incoming>| async {
                let mut sender = sender.lock().await;
                sender.ready().await?;
                sender.send_request(request).await
            });
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(client), relay).await?;
            Ok::<(), Failure>(())
        });
    }
}

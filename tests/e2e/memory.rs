//! Memory of a gateway by the system's measure: the highest resident memory of its own process, under hostile
//! clients and engines. docs/operations.md ("How much memory does it need?") states these bounds.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::gateway::{Gateway, Setup};
use crate::running::authority;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Memory of a connection, its request and their tasks, beside bodies and responses.
const PER_REQUEST: usize = 48 * KIB;
/// Memory that no measurement attributes: code executed for the first time, allocator caches.
const SLACK: usize = 12 * MIB;

/// An engine inside the test: responds to every POST with the same pieces, once permitted.
struct Engine {
    url: String,
    asked: Arc<AtomicUsize>,
    may: watch::Sender<bool>,
}

type Pieces = Arc<dyn Fn() -> Vec<Bytes> + Send + Sync>;

impl Engine {
    async fn start(may: bool, pieces: impl Fn() -> Vec<Bytes> + Send + Sync + 'static) -> Engine {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound"));
        let (may, waits) = watch::channel(may);
        let asked = Arc::new(AtomicUsize::new(0));
        let (count, pieces): (_, Pieces) = (Arc::clone(&asked), Arc::new(pieces));
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(answer(socket, Arc::clone(&count), waits.clone(), Arc::clone(&pieces)));
            }
        });
        Engine { url, asked, may }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    fn go(&self) {
        self.may.send_replace(true);
    }
}

/// One request on one connection. A client that leaves ends it.
async fn answer(mut socket: TcpStream, asked: Arc<AtomicUsize>, mut may: watch::Receiver<bool>, pieces: Pieces) {
    let (head, mut rest) = read_head(&mut socket).await;
    if !head.starts_with("POST") {
        let _ = socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
        return;
    }
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let length: usize = length.expect("the gateway knows how long a body is");
    let mut space = vec![0; 64 * KIB];
    while rest < length {
        match socket.read(&mut space).await {
            Ok(count @ 1..) => rest += count,
            _ => return,
        }
    }
    asked.fetch_add(1, Ordering::Relaxed);
    if may.wait_for(|may| *may).await.is_err() {
        return;
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
    let mut written = socket.write_all(head.as_bytes()).await;
    for piece in pieces() {
        if written.is_err() {
            return;
        }
        written = socket.write_all(&piece).await;
    }
}

/// A head, and the number of body bytes that came with it.
async fn read_head(socket: &mut TcpStream) -> (String, usize) {
    let mut seen = Vec::new();
    loop {
        if let Some(end) = seen.windows(4).position(|four| four == b"\r\n\r\n") {
            return (String::from_utf8_lossy(&seen[..end]).into_owned(), seen.len() - end - 4);
        }
        let mut space = [0; 4096];
        match socket.read(&mut space).await {
            Ok(count @ 1..) => seen.extend_from_slice(&space[..count]),
            Ok(0) | Err(_) => return (String::new(), 0),
        }
    }
}

fn events(texts: impl IntoIterator<Item = String>) -> Vec<Bytes> {
    texts.into_iter().map(|text| Bytes::from(format!("data: {text}\n\n"))).collect()
}

fn short_answer() -> Vec<Bytes> {
    let token = r#"{"choices":[{"index":0,"text":"a","delta":{"content":"a"},"finish_reason":"stop"}]}"#;
    events([token.to_owned(), "[DONE]".to_owned()])
}

/// A gateway, its memory after a first request, and its address.
struct Measured {
    gateway: Gateway,
    before: usize,
}

impl Measured {
    /// In front of this engine.
    async fn start(engine: &Engine, setup: Setup<'_>) -> Measured {
        let addresses = [engine.url.as_str()];
        // Without access lines, which would be most of the output. (`more` may continue the routes.)
        let more = format!("{}\ntelemetry: {{access_log: off}}\n", setup.more);
        let gateway =
            Gateway::start(&Setup { addresses: &addresses, more: &more, health: "off", log: "warn", ..setup });
        let before = memory(&gateway, "VmRSS");
        Measured { gateway, before }
    }

    fn address(&self) -> String {
        authority(&self.gateway.running.url).to_owned()
    }

    /// Growth of the highest resident memory since the first request.
    fn grown(&self) -> usize {
        memory(&self.gateway, "VmHWM").saturating_sub(self.before)
    }

    /// It has never grown by more than this, and still serves.
    #[track_caller]
    fn stays_within(&self, most: usize, what: &str) {
        let grown = self.grown();
        eprintln!("{what}: {} KiB, of {} KiB", grown / KIB, most / KIB);
        assert!(grown <= most, "{what}: it grew by {} KiB, which may be {} KiB", grown / KIB, most / KIB);
    }
}

fn memory(gateway: &Gateway, what: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", gateway.running.id())).expect("it runs");
    let line = status.lines().find(|line| line.starts_with(what)).expect("the system tells");
    let kib: usize = line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number");
    kib * KIB
}

/// The bytes of a request.
fn asking(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: it\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Sends a request and reads the head of its response. Returns 0 if the connection was reset before, which
/// happens when a request is rejected while its body is still arriving.
async fn ask(address: String, request: Vec<u8>) -> (u16, TcpStream) {
    let mut socket = TcpStream::connect(address).await.expect("it listens");
    // Refused in the middle of a body, it does not read the rest.
    let _ = socket.write_all(&request).await;
    let (head, _) = read_head(&mut socket).await;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_default(), socket)
}

/// Sends all requests at once, waits until each was answered or has reached the engine, then lets the engine
/// respond. Returns the statuses.
async fn ask_all(address: &str, requests: Vec<Vec<u8>>, engine: &Engine) -> Vec<u16> {
    let mut asking = JoinSet::new();
    let all = requests.len();
    for request in requests {
        asking.spawn(ask(address.to_owned(), request));
    }
    let mut answered = Vec::new();
    while answered.len() + engine.asked() < all {
        tokio::select! {
            Some(one) = asking.join_next() => answered.push(one.expect("no panic").0),
            () = pause() => {}
        }
    }
    engine.go();
    while let Some(one) = asking.join_next().await {
        answered.push(one.expect("no panic").0);
    }
    answered
}

/// Another process cannot wake us: it is looked at again, and not too often.
async fn pause() {
    let _ = tokio::time::timeout(Duration::from_millis(20), std::future::pending::<()>()).await;
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if holds() {
            return;
        }
        pause().await;
    }
    panic!("it never came true that {what}");
}

fn gzip(body: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, body.as_bytes()).expect("memory");
    encoder.finish().expect("memory")
}

/// Text that hardly compresses, so that a body of it is not a decompression bomb.
fn noise(length: usize) -> String {
    let word = |number: u64| format!("{:016x}", blake(number));
    (0..length.div_ceil(16) as u64).map(word).collect()
}

fn blake(number: u64) -> u64 {
    let hash = blake3::hash(&number.to_le_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("32 bytes"))
}

fn filled(head: &str, item: &str, tail: &str, length: usize) -> String {
    format!("{head}{}{tail}", item.repeat(length / item.len()))
}

/// A body of 2 MiB of such items.
fn many(head: &str, item: &str, tail: &str) -> String {
    filled(&format!("{{\"model\":\"sim\",{head}"), item, tail, 2 * MIB - 200)
}

/// Replay of C94: bodies that are small on the wire and grow in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn c94_bodies_that_unfold_into_prompts_and_switches_take_next_to_nothing() {
    let engine = Engine::start(true, short_answer).await;
    let measured = Measured::start(&engine, Setup::default()).await;
    let x = noise(300_000);
    let head = |rest: &str| format!("{{\"model\":\"sim\",\"x\":\"{x}\",{rest}");
    let unfolded = 24 * MIB;
    let bodies = [
        filled(&head("\"echo\":true,\"prompt\":[\"\""), ",\"\"", "]}", unfolded),
        filled(&head("\"prompt\":[[]"), ",[]", "],\"echo\":true}", unfolded),
        filled(&head("\"chat_template_kwargs\":{\"y\":1"), ",\"thinking\":true", "}}", unfolded),
        filled(&head("\"reasoning\":{\"y\":1"), ",\"effort\":null", "}}", unfolded),
        filled(&head("\"metadata\":{\"y\":1"), ",\"\":\"\"", "}}", unfolded),
    ];
    let gz = "content-encoding: gzip\r\n";
    let mut requests = Vec::new();
    for body in bodies {
        let request = asking("/v1/completions", gz, &gzip(&body));
        assert!(request.len() < MIB, "{} bytes on the wire", request.len());
        requests.extend([request.clone(), request]);
    }
    let statuses = ask_all(&measured.address(), requests.clone(), &engine).await;
    assert!(statuses.contains(&400) && statuses.iter().all(|status| matches!(status, 400 | 0)), "{statuses:?}");
    // Sent bytes may wait in the connections; little else is held.
    let sent = requests.iter().map(Vec::len).sum::<usize>();
    measured.stays_within(sent + requests.len() * PER_REQUEST + SLACK, "bodies that unfold");
}

/// C94: everything derived from a body is within `max_bodies`.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn c94_bodies_and_derived_data_stay_within_their_budget() {
    let engine = Engine::start(false, short_answer).await;
    let listen = "max_body: 2MiB, max_bodies: 8MiB";
    let measured = Measured::start(&engine, Setup { listen, ..Setup::default() }).await;
    let text = noise(2 * MIB - 100);
    let plain = format!("{{\"model\":\"sim\",\"prompt\":\"{text}\",\"echo\":true}}");
    let coded = gzip(&plain);
    let shapes = [
        asking("/v1/completions", "", plain.as_bytes()),
        asking("/v1/completions", "content-encoding: gzip\r\n", &coded),
        asking("/v1/completions", "", &plain.as_bytes()[..60 * KIB]),
        asking(
            "/v1/completions",
            "content-encoding: zstd\r\n",
            &zstd::encode_all(plain.as_bytes(), 1).expect("memory"),
        ),
        asking(
            "/v1/chat/completions",
            "",
            many("\"messages\":[{}", ",{\"role\":\"user\",\"content\":\"\"}", "]}").as_bytes(),
        ),
        asking("/v1/chat/completions", "", many("\"tools\":[{}", ",{\"function\":{\"name\":\"f\"}}", "]}").as_bytes()),
        asking("/v1/chat/completions", "", many("\"x\":[0", ",[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]", "]}").as_bytes()),
        asking("/v1/chat/completions", "", format!("{{\"model\":\"sim\",\"x\":{}", "[".repeat(MIB)).as_bytes()),
        asking("/v1/chat/completions", "", many("\"a\":1", ",\"b\":1", "}").as_bytes()),
        asking(
            "/v1/responses",
            "",
            many("\"input\":[{}", ",{\"type\":\"item_reference\",\"id\":\"\"}", "]}").as_bytes(),
        ),
        asking(
            "/v1/messages",
            "",
            many("\"max_tokens\":1,\"system\":[{}", ",{\"type\":\"text\",\"text\":\"\"}", "]}").as_bytes(),
        ),
        asking("/v1/embeddings", "", many("\"input\":[[1]", ",[1,2,3]", "]}").as_bytes()),
    ];
    let requests: Vec<_> = (0..48).map(|number| shapes[number % shapes.len()].clone()).collect();
    let statuses = ask_all(&measured.address(), requests.clone(), &engine).await;
    let count = |status: u16| statuses.iter().filter(|one| **one == status).count();
    // The engine's response is invalid for `/v1/embeddings`, so a 502 reached the engine too.
    let admitted = count(200) + count(502);
    assert!(admitted >= 1 && count(503) >= 1, "{statuses:?}");
    assert!(admitted <= 4, "more than fit: {statuses:?}");
    assert_eq!(admitted + count(503) + count(400) + count(0), requests.len(), "{statuses:?}");
    // One body always continues, and received bytes are read before they are counted.
    let most = 8 * MIB + 2 * 2 * MIB + requests.len() * (PER_REQUEST + 64 * KIB) + SLACK;
    measured.stays_within(most, "bodies within their budget");
}

/// Replay of C94: a coding asks for its window with its first bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn c94_windows_of_decoders_are_inside_the_budget() {
    let engine = Engine::start(true, short_answer).await;
    let listen = "max_body: 16MiB, max_bodies: 16MiB, body_timeout: 30s";
    let measured = Measured::start(&engine, Setup { listen, ..Setup::default() }).await;
    // A frame with a window of 8 MiB whose first block is to have 128 KiB, of which few come.
    let frame = [&[0x28, 0xB5, 0x2F, 0xFD, 0x00, (23 - 10) << 3, 0x00, 0x00, 0x10][..], &[b' '; 1000]].concat();
    let mut request = asking("/v1/chat/completions", "content-encoding: zstd\r\n", &[b' '; 200 * KIB]);
    let head = request.len() - 200 * KIB;
    request.truncate(head);
    request.extend(frame);
    let mut asking = JoinSet::new();
    for _ in 0..40 {
        asking.spawn(ask(measured.address(), request.clone()));
    }
    // One or two of them fit, and wait for the rest of their bodies.
    for _ in 0..37 {
        let (status, _) = asking.join_next().await.expect("most are refused").expect("no panic");
        assert!(matches!(status, 503 | 0), "{status}");
    }
    measured.stays_within(16 * MIB + 9 * MIB + 40 * PER_REQUEST + SLACK, "windows of decoders");
}

/// Replay of C94: 8 connections of HTTP/2 with 250 bodies of 60 KiB each.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn c94_short_bodies_on_http2_are_inside_the_budget_too() {
    let engine = Engine::start(false, short_answer).await;
    let listen = "max_body: 1MiB, max_bodies: 1MiB";
    let measured = Measured::start(&engine, Setup { listen, ..Setup::default() }).await;
    let body = Bytes::from(format!("{{\"model\":\"sim\",\"user\":\"{}\"}}", "u".repeat(60 * KIB)));
    let mut asking = JoinSet::new();
    for _ in 0..8 {
        let io = TcpStream::connect(measured.address()).await.expect("it listens");
        let handshake = http2::Builder::new(TokioExecutor::new()).handshake(TokioIo::new(io)).await;
        let (sender, connection) = handshake.expect("a handshake");
        tokio::spawn(connection);
        for _ in 0..250 {
            let (mut sender, body) = (sender.clone(), body.clone());
            asking.spawn(async move {
                let request = Request::post("http://it/v1/chat/completions").header("content-type", "application/json");
                let sent = sender.send_request(request.body(Full::<Bytes>::from(body)).expect("a request")).await;
                sent.map_or(0, |answer| answer.status().as_u16())
            });
        }
    }
    let mut statuses = Vec::new();
    while statuses.len() + engine.asked() < 8 * 250 {
        tokio::select! {
            Some(status) = asking.join_next() => statuses.push(status.expect("no panic")),
            () = pause() => {}
        }
    }
    assert!((8..40).contains(&engine.asked()), "{} fit", engine.asked());
    // Memory of HTTP/2 itself: bodies not yet read, and streams with the state of their requests.
    let streams = 8 * 250 * 4 * KIB;
    measured.stays_within(MIB + 8 * 2 * MIB + streams + SLACK, "short bodies on HTTP/2");
    engine.go();
    while let Some(status) = asking.join_next().await {
        statuses.push(status.expect("no panic"));
    }
    assert!(statuses.iter().all(|status| matches!(status, 200 | 503)), "{statuses:?}");
}

/// Long events, long tails of events that never end, and many choices.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn responses_use_little_memory_whatever_the_engine_sends() {
    let choice = |index: usize| format!(r#"{{"choices":[{{"index":{index},"text":"a","finish_reason":null}}]}}"#);
    let long = |length: usize| format!(r#"{{"choices":[{{"index":0,"text":"{}"}}]}}"#, "x".repeat(length));
    type Make = Arc<dyn Fn() -> Vec<Bytes> + Send + Sync>;
    let cases: [(&str, usize, Make); 4] = [
        ("long events", 96 * KIB, Arc::new(move || events([long(2 * MIB), long(70 * KIB), long(60 * KIB)]))),
        ("an event that never ends", 96 * KIB, {
            Arc::new(|| {
                [vec![Bytes::from_static(b"data: {\"x\":\"")], vec![Bytes::from("y".repeat(64 * KIB)); 32]].concat()
            })
        }),
        ("many choices", 2048 * 400, Arc::new(move || events((0..2048).map(choice)))),
        ("choices that nobody asked for", 16 * 400, Arc::new(move || events((0..6_000).map(choice)))),
    ];
    for (what, each, make) in cases {
        let engine = Engine::start(true, move || make()).await;
        let measured = Measured::start(&engine, Setup::default()).await;
        let n = if what == "many choices" { 2048 } else { 1 };
        let body = Bytes::from(format!("{{\"model\":\"sim\",\"prompt\":\"p\",\"stream\":true,\"n\":{n}}}"));
        let mut reading = JoinSet::new();
        for _ in 0..40 {
            let request = asking("/v1/completions", "connection: close\r\n", &body);
            let address = measured.address();
            reading.spawn(async move {
                let (status, mut socket) = ask(address, request).await;
                let mut space = vec![0; 64 * KIB];
                while let Ok(1..) = socket.read(&mut space).await {}
                status
            });
        }
        while let Some(status) = reading.join_next().await {
            assert_eq!(status.expect("no panic"), 200);
        }
        measured.stays_within(40 * (each + 64 * KIB + PER_REQUEST) + SLACK, what);
    }
}

/// Clients that refuse to read, on both versions.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn c115_a_client_that_does_not_read_uses_the_documented_memory() {
    let token = format!(r#"{{"choices":[{{"index":0,"delta":{{"content":"{}"}}}}]}}"#, "t".repeat(60_000));
    let pieces = move || {
        // Of several lengths this one holds most.
        let event = Bytes::from(format!("data: {token}\n\n"));
        vec![event; 100]
    };
    let body = br#"{"model":"sim","messages":[],"stream":true}"#;
    for over_http2 in [false, true] {
        let engine = Engine::start(true, pieces.clone()).await;
        let measured = Measured::start(&engine, Setup::default()).await;
        let clients = 60;
        let (mut silent, mut streams) = (Vec::new(), Vec::new());
        if over_http2 {
            let io = TcpStream::connect(measured.address()).await.expect("it listens");
            let handshake = http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(MIB as u32)
                .initial_connection_window_size(1 << 30)
                .handshake(TokioIo::new(io))
                .await;
            let (mut sender, connection) = handshake.expect("a handshake");
            tokio::spawn(connection);
            for _ in 0..clients {
                let request = Request::post("http://it/v1/chat/completions").header("content-type", "application/json");
                let request = request.body(Full::<Bytes>::from(Bytes::from_static(body))).expect("a request");
                streams.push(sender.send_request(request).await.expect("a head"));
            }
        } else {
            for _ in 0..clients {
                let (status, socket) = ask(measured.address(), asking("/v1/chat/completions", "", body)).await;
                assert_eq!(status, 200);
                silent.push(socket);
            }
        }
        // Memory is stable once it has not grown for a while.
        let (mut last, mut same) = (0, 0);
        until("it grows no more", || {
            let now = measured.grown();
            same = if now == last { same + 1 } else { 0 };
            last = now;
            same >= 25
        })
        .await;
        let (what, most) = match over_http2 {
            true => ("HTTP/2 clients that do not read", 448 * KIB),
            false => ("HTTP/1 clients that do not read", 256 * KIB),
        };
        measured.stays_within(clients * most + SLACK, what);
        for stream in streams.iter_mut() {
            assert!(stream.body_mut().frame().await.is_some(), "it goes on once it is read");
        }
    }
}

/// Requests that wait for a seat hold their bodies, which count.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_that_wait_are_inside_the_budget_of_bodies() {
    let engine = Engine::start(false, short_answer).await;
    let setup =
        Setup { listen: "max_body: 4MiB, max_bodies: 4MiB", pool: "max_concurrency_per_engine: 1", ..Setup::default() };
    let measured = Measured::start(&engine, setup).await;
    let body = format!("{{\"model\":\"sim\",\"user\":\"{}\"}}", "u".repeat(32 * KIB));
    let mut asked = JoinSet::new();
    for _ in 0..400 {
        asked.spawn(ask(measured.address(), asking("/v1/chat/completions", "", body.as_bytes())));
    }
    // One runs, about 127 wait, the others are refused for the memory that those hold.
    let mut statuses = Vec::new();
    while statuses.len() < 400 - 128 {
        statuses.push(asked.join_next().await.expect("most are refused").expect("no panic").0);
    }
    assert!(statuses.iter().all(|status| matches!(status, 503 | 0)), "{statuses:?}");
    measured.stays_within(4 * MIB + 400 * (PER_REQUEST + 32 * KIB) + SLACK, "requests that wait");
    engine.go();
    while let Some(one) = asked.join_next().await {
        statuses.push(one.expect("no panic").0);
    }
    assert!(statuses.contains(&200), "{statuses:?}");
}

/// Names that clients make up leave nothing behind: keys, models, sessions, ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stored_data_do_not_grow_with_names_chosen_by_clients() {
    let engine = Engine::start(true, || {
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}"#;
        [short_answer(), events([usage.to_owned()])].concat()
    })
    .await;
    let (hash, hashed) = ("k".to_owned(), blake3::hash(b"k").to_hex());
    let more = format!(
        "  - {{model: \"*\", pools: [main]}}\ntenants:\n  - tenant: acme\n    keys: [{{blake3: \"{hashed}\"}}]\n    \
         limits: {{tokens_per_minute: 100000000, requests_per_minute: 1000000, models: {{sim: {{concurrent_requests: 500}}}}}}\n"
    );
    let measured =
        Measured::start(&engine, Setup { more: &more, pool: "balance: session_affinity", ..Setup::default() }).await;
    let ask_names = async |from: usize, count: usize| {
        for number in from..from + count {
            let key = if number % 4 == 0 { format!("made-up-{number}") } else { hash.clone() };
            let long = format!("{}-{number}", "m".repeat(900));
            // Of models that were served some names are remembered, which the documents say.
            let model = if number % 10 == 0 { long.as_str() } else { "sim" };
            let headers = format!(
                "authorization: Bearer {key}\r\nx-session-id: {long}\r\nx-request-id: id-{number}\r\nconnection: close\r\n"
            );
            let body = format!(
                "{{\"model\":\"{model}\",\"user\":\"{long}\",\"metadata\":{{\"{long}\":\"{long}\"}},\"messages\":[{{\"content\":\"{long}\"}}],\"stream\":true}}"
            );
            let (status, mut socket) =
                ask(measured.address(), asking("/v1/chat/completions", &headers, body.as_bytes())).await;
            assert!(matches!(status, 200 | 401), "{status}");
            let mut rest = Vec::new();
            let _ = socket.read_to_end(&mut rest).await;
        }
    };
    ask_names(0, 300).await;
    let first = measured.grown();
    ask_names(300, 900).await;
    let further = measured.grown() - first;
    eprintln!("names: {} KiB, and then {} KiB", first / KIB, further / KIB);
    assert!(further <= MIB / 2, "900 names more took {} KiB", further / KIB);
}

//! The listener over real sockets, in real time: each test waits for a condition.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use goodput::accept::settings::{Listen, Tls};
use goodput::accept::{ConnectionServer, Drain, DrainPhase, IncomingRequest, Listener};
use goodput::clock::Clock;
use goodput::types::{ClientState, DisconnectReason};
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Requests that arrived at the service.
#[derive(Default)]
struct Seen {
    heads: AtomicUsize,
    bodies: AtomicUsize,
}

/// A running listener with a service like a gateway's: rejects invalid requests, reads the body and returns
/// its length. `/stream` streams the data that the test sends.
struct House {
    address: SocketAddr,
    drain: Drain,
    door: ConnectionServer,
    seen: Arc<Seen>,
    feed: mpsc::Sender<Bytes>,
    cut: mpsc::UnboundedReceiver<Option<DisconnectReason>>,
    serving: JoinHandle<()>,
}

type Reply = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

struct Fed {
    feed: mpsc::Receiver<Bytes>,
    side: ClientState,
    cut: mpsc::UnboundedSender<Option<DisconnectReason>>,
}

impl Body for Fed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.side.drain_is_over() {
            return Poll::Ready(None);
        }
        self.feed.poll_recv(cx).map(|data| data.map(|data| Ok(Frame::data(data))))
    }
}

impl Drop for Fed {
    fn drop(&mut self) {
        let _ = self.cut.send(self.side.severed());
    }
}

async fn serve(listen: Listen) -> House {
    let drain = Drain::new();
    let listener = Listener::bind(&listen, drain.clone(), Clock::start()).await.unwrap();
    let (address, door) = (listener.address(), listener.door());
    let (feed, fed) = mpsc::channel(64);
    let (told, cut) = mpsc::unbounded_channel();
    let seen = Arc::new(Seen::default());
    let fed = Arc::new(std::sync::Mutex::new(Some(fed)));
    let notes = Arc::clone(&seen);
    let service = tower::service_fn(move |IncomingRequest { head, body, .. }: IncomingRequest| {
        let (notes, fed, told) = (Arc::clone(&notes), Arc::clone(&fed), told.clone());
        async move {
            notes.heads.fetch_add(1, Ordering::SeqCst);
            if let Err(refused) = head.check(64 << 10, 100) {
                return Ok::<_, Infallible>(whole(refused.status(), refused.advice()));
            }
            if head.uri.path() == "/stream" {
                let feed = fed.lock().unwrap().take().expect("one stream a house");
                let side = body.client().clone();
                return Ok(Response::new(Fed { feed, side, cut: told }.boxed_unsync()));
            }
            match body.collect().await {
                Ok(body) => {
                    notes.bodies.fetch_add(1, Ordering::SeqCst);
                    Ok(whole(StatusCode::OK, &format!("{} bytes", body.to_bytes().len())))
                }
                Err(_) => Ok(whole(StatusCode::BAD_REQUEST, "broken body")),
            }
        }
    });
    let serving = tokio::spawn(listener.serve(service));
    House { address, drain, door, seen, feed, cut, serving }
}

fn whole(status: StatusCode, text: &str) -> Response<Reply> {
    let mut response = Response::new(Full::new(Bytes::copy_from_slice(text.as_bytes())).boxed_unsync());
    *response.status_mut() = status;
    if status != StatusCode::OK {
        response.headers_mut().insert("connection", "close".parse().unwrap());
    }
    response
}

fn local() -> Listen {
    Listen { address: SocketAddr::from(([127, 0, 0, 1], 0)), ..Listen::default() }
}

impl House {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends these bytes and reads until the server closes.
    async fn ask(&self, bytes: &[u8]) -> String {
        let mut client = self.connect().await;
        // The server may close before it has read everything, which is a valid response.
        let _ = client.write_all(bytes).await;
        let mut text = Vec::new();
        let _ = client.read_to_end(&mut text).await;
        String::from_utf8_lossy(&text).into_owned()
    }
}

/// A deadline for tests that wait: reached only when something is wrong.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(120), future).await.unwrap_or_else(|_| panic!("still waiting: {what}"))
}

fn post(lines: &str, body: &str) -> Vec<u8> {
    format!("POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\n{lines}\r\n{body}").into_bytes()
}

#[tokio::test]
async fn forbidden_requests_are_rejected_before_their_body_is_read() {
    let house = serve(Listen { max_head: 16 << 10, header_timeout: Duration::from_millis(300), ..local() }).await;
    let long = "a".repeat(20_000);
    let smuggled = "0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: g\r\n\r\n";
    let cl = "Content-Length: 2\r\n";
    let te = "Transfer-Encoding: chunked\r\n";
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("no host", b"POST /v1/x HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        ("two hosts", post(&format!("Host: evil\r\n{cl}"), "{}")),
        ("a bad host", b"POST /v1/x HTTP/1.1\r\nHost: a b/@c?d\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        (
            "another authority",
            b"POST http://evil.invalid/v1/x HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec(),
        ),
        ("CONNECT", b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n".to_vec()),
        ("TRACE", b"TRACE /v1/x HTTP/1.1\r\nHost: g\r\n\r\n".to_vec()),
        ("HTTP/2.0 in words", b"POST /v1/x HTTP/2.0\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        ("http/1.1", b"POST /v1/x http/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        ("HTTP/0.9", b"POST /v1/x\r\n\r\n".to_vec()),
        (
            "HTTP/1.0 with a coding",
            b"POST /v1/x HTTP/1.0\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n".to_vec(),
        ),
        ("xchunked", post(&format!("Transfer-Encoding: xchunked\r\n{cl}"), "{}")),
        ("a space before the colon", post(&format!("Transfer-Encoding : chunked\r\n{cl}"), "{}")),
        ("two codings", post(&format!("{te}Transfer-Encoding: x\r\n{cl}"), "{}")),
        ("chunked twice", post("Transfer-Encoding: chunked, chunked\r\n", "2\r\n{}\r\n0\r\n\r\n")),
        ("gzip inside chunked", post("Transfer-Encoding: gzip, chunked\r\n", "2\r\n{}\r\n0\r\n\r\n")),
        ("chunked with a parameter", post(&format!("Transfer-Encoding: chunked;q=1\r\n{cl}"), "{}")),
        ("identity", post(&format!("Transfer-Encoding: identity\r\n{cl}"), "{}")),
        ("an empty coding", post(&format!("Transfer-Encoding: \r\n{cl}"), "{}")),
        ("a folded line", post(&format!("Transfer-Encoding:\r\n chunked\r\n{cl}"), "{}")),
        ("a bare CR", post(&format!("X: y\rTransfer-Encoding: chunked\r\n{cl}"), "{}")),
        ("two lengths", post("Content-Length: 2\r\nContent-Length: 5\r\n", "{}")),
        ("a signed length", post("Content-Length: +2\r\n", "{}")),
        ("a list of lengths", post("Content-Length: 2, 5\r\n", "{}")),
        ("no length in the length", post("Content-Length: \r\n", "{}")),
        ("a huge length", post("Content-Length: 18446744073709551617\r\n", "{}")),
        ("a NUL", post(&format!("X-A: a\0b\r\n{cl}"), "{}")),
        ("a control byte", post(&format!("X-A: a\u{1}b\r\n{cl}"), "{}")),
        ("a name with a space", post(&format!("X A: b\r\n{cl}"), "{}")),
        ("no colon", post(&format!("BrokenLine\r\n{cl}"), "{}")),
        ("no name", post(&format!(": b\r\n{cl}"), "{}")),
        ("a space in the target", b"POST /v1/x /y HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        (
            "a control byte in the target",
            b"POST /v1/x?a=\x01 HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec(),
        ),
        ("a fragment", b"POST /v1/x#y HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        ("a fragment behind a query", b"POST /v1/x?a=b#y HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        ("a fragment of a URL", b"POST http://g/v1/x# HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        ("an odd method", b"PO(ST /v1/x HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
        ("an odd expectation", post(&format!("Expect: 200-ok\r\n{cl}"), "{}")),
        ("a head too long", post(&format!("X-A: {long}\r\n{cl}"), "{}")),
        (
            "a target too long",
            format!("POST /v1/x?{long} HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{{}}").into_bytes(),
        ),
        ("too many lines", post(&format!("{}{cl}", "X-A: b\r\n".repeat(101)), "{}")),
        ("a length beside chunks that are none", post(&format!("{te}{cl}"), &format!("{{}}{smuggled}"))),
        ("a hex prefix", post(te, "0x2\r\n{}\r\n0\r\n\r\n")),
        ("a signed chunk", post(te, "+2\r\n{}\r\n0\r\n\r\n")),
        ("a chunk without a size", post(te, "\r\n{}\r\n0\r\n\r\n")),
        ("a chunk of 2^68", post(te, "10000000000000002\r\n{}\r\n0\r\n\r\n")),
        ("a chunk too long", post(te, "2\r\n{}XX\r\n0\r\n\r\n")),
        ("endless extensions", post(te, &format!("2;{}\r\n{{}}\r\n0\r\n\r\n", "e".repeat(100_000)))),
        ("endless trailers", post(te, &format!("2\r\n{{}}\r\n0\r\n{}\r\n", "X-A: b\r\n".repeat(20_000)))),
    ];
    for (name, bytes) in cases {
        let text = soon(name, house.ask(&bytes)).await;
        let refused = text.is_empty() || text.starts_with("HTTP/1.1 4") || text.starts_with("HTTP/1.1 501");
        assert!(refused || text.starts_with("HTTP/1.0 4"), "{name}: {text}");
        assert_eq!(house.seen.bodies.load(Ordering::SeqCst), 0, "{name}: {text}");
    }
}

#[tokio::test]
async fn permitted_requests_are_served() {
    let house = serve(local()).await;
    let te = "Transfer-Encoding: CHUNKED\r\n";
    for (name, bytes) in [
        ("a length", post("Content-Length: 2\r\n", "{}")),
        ("the same length twice", post("Content-Length: 2\r\nContent-Length: 2\r\n", "{}")),
        ("chunks", post(te, "1\r\n{\r\n1;a=b\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n")),
        (
            "old text in a value",
            [&post("X-A: ", "")[..post("X-A: ", "").len() - 2], b"\xff\xfe\r\nContent-Length: 2\r\n\r\n{}"].concat(),
        ),
        (
            "an absolute target",
            b"POST http://g/v1/x HTTP/1.1\r\nHost: g\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}".to_vec(),
        ),
        ("HTTP/1.0", b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}".to_vec()),
    ] {
        let text = soon(name, house.ask(&bytes)).await;
        assert!(text.contains(" 200 OK\r\n") && text.ends_with("2 bytes"), "{name}: {text}");
    }
}

#[tokio::test]
async fn a_length_beside_chunks_is_refused_and_the_connection_closes() {
    let house = serve(local()).await;
    let mut bytes =
        b"POST /v1/x HTTP/1.1\r\nHost: g\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    bytes.extend_from_slice(b"2\r\n{}\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: g\r\n\r\n");
    let text = soon("the close", house.ask(&bytes)).await;
    assert!(text.starts_with("HTTP/1.1 400 ") && text.contains("connection: close"), "{text}");
    assert_eq!((text.matches("HTTP/1.1 ").count(), house.seen.heads.load(Ordering::SeqCst)), (1, 0));
}

#[tokio::test]
async fn an_expected_continue_is_given_when_the_body_is_read() {
    let house = serve(local()).await;
    let mut client = house.connect().await;
    client.write_all(&post("Expect: 100-continue\r\nContent-Length: 2\r\n", "")).await.unwrap();
    let mut first = [0; 25];
    soon("100", client.read_exact(&mut first)).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"{}").await.unwrap();
    let mut rest = String::new();
    soon("the answer", client.read_to_string(&mut rest)).await.unwrap();
    assert!(rest.ends_with("2 bytes"), "{rest}");
}

#[tokio::test]
async fn silence_and_half_a_preface_end_with_the_header_timeout() {
    let house = serve(Listen { header_timeout: Duration::from_millis(200), ..local() }).await;
    for first in [&b""[..], b"PRI * HTTP/2.0\r\n", b"GET / HTTP/1.1\r\nHost:"] {
        let text = soon("the close", house.ask(first)).await;
        assert_eq!(text, "");
    }
    assert_eq!(house.seen.heads.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_and_the_body_gets_the_reason() {
    let mut house = serve(Listen { write_stall: Duration::from_millis(400), ..local() }).await;
    let mut client = house.connect().await;
    client.write_all(b"GET /stream HTTP/1.1\r\nHost: g\r\n\r\n").await.unwrap();
    let piece = Bytes::from(vec![b'x'; 256 * 1024]);
    let (feed, cut) = (house.feed.clone(), &mut house.cut);
    soon("the cut", async {
        tokio::select! {
            why = cut.recv() => assert_eq!(why, Some(Some(DisconnectReason::WriteStall))),
            () = async { while feed.send(piece.clone()).await.is_ok() {} std::future::pending().await } => {}
        }
    })
    .await;
    drop(client);
}

#[tokio::test]
async fn a_drain_stops_accepting_and_lets_a_stream_end() {
    let mut house = serve(local()).await;
    let mut idle = house.connect().await;
    idle.write_all(b"GET /v1/x HTTP/1.1\r\nHost: g\r\n\r\n").await.unwrap();
    let mut some = [0; 16];
    soon("the first answer", idle.read_exact(&mut some)).await.unwrap();
    let mut client = house.connect().await;
    client.write_all(b"GET /stream HTTP/1.1\r\nHost: g\r\n\r\n").await.unwrap();
    house.feed.send(Bytes::from_static(b"one;")).await.unwrap();
    let mut text = String::new();
    while !text.contains("one;") {
        let mut some = [0; 256];
        let n = soon("the first piece", client.read(&mut some)).await.unwrap();
        text.push_str(std::str::from_utf8(&some[..n]).unwrap());
    }
    house.drain.advance(DrainPhase::Draining);
    let mut rest = Vec::new();
    soon("the idle one closes", idle.read_to_end(&mut rest)).await.unwrap();
    soon("no more newcomers", async {
        while TcpStream::connect(house.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    house.feed.send(Bytes::from_static(b"two;")).await.unwrap();
    let (gone, _) = mpsc::channel(1);
    drop(std::mem::replace(&mut house.feed, gone));
    soon("the stream ends", client.read_to_string(&mut text)).await.unwrap();
    assert!(text.contains("two;") && text.ends_with("\r\n0\r\n\r\n"), "{text}");
    drop(client);
    soon("the listener ends", house.serving).await.unwrap();
    assert_eq!(house.cut.recv().await, Some(None));
}

#[tokio::test]
async fn with_all_connections_taken_a_newcomer_waits_for_one_to_end() {
    let house = serve(Listen { max_connections: 1, ..local() }).await;
    let first = house.connect().await;
    let mut second = house.connect().await;
    second.write_all(&post("Content-Length: 2\r\n", "{}")).await.unwrap();
    let mut byte = [0];
    tokio::select! {
        biased;
        read = second.read(&mut byte) => panic!("served beside the first: {read:?}"),
        () = async { for _ in 0..100 { tokio::task::yield_now().await; } } => {}
    }
    drop(first);
    let mut text = String::new();
    soon("its turn", second.read_to_string(&mut text)).await.unwrap();
    assert!(text.ends_with("2 bytes"), "{text}");
}

/// Requests a response on a kept connection.
async fn kept(client: &mut TcpStream) {
    client.write_all(b"POST /v1/x HTTP/1.1\r\nHost: g\r\nContent-Length: 2\r\n\r\n{}").await.unwrap();
    answered(client).await;
}

/// Reads the response to a request with a body of two bytes.
async fn answered(client: &mut TcpStream) {
    let mut text = Vec::new();
    while !text.ends_with(b"2 bytes") {
        let mut some = [0; 512];
        let read = soon("an answer", client.read(&mut some)).await.unwrap();
        assert!(read > 0, "closed after {:?}", String::from_utf8_lossy(&text));
        text.extend_from_slice(&some[..read]);
    }
}

#[tokio::test]
async fn c92_the_longest_idle_connection_ends_for_a_newcomer() {
    let header_timeout = Duration::from_secs(600);
    let house = serve(Listen { max_connections: 3, header_timeout, ..local() }).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(house.connect().await);
    }
    // The second has been idle longest, then the first; the third is in the middle of its head.
    kept(&mut clients[1]).await;
    kept(&mut clients[0]).await;
    clients[2].write_all(b"POST /v1/x HTTP/1.1\r\nHos").await.unwrap();
    for (ends, stays) in [(1, vec![0]), (0, vec![])] {
        let mut newcomer = house.connect().await;
        newcomer.write_all(&post("Content-Length: 2\r\n", "{}")).await.unwrap();
        let mut text = String::new();
        soon("its place", newcomer.read_to_string(&mut text)).await.unwrap();
        assert!(text.ends_with("2 bytes"), "{text}");
        assert_eq!(soon("its end", clients[ends].read(&mut [0; 8])).await.unwrap(), 0, "the longest idle one");
        for stays in stays {
            kept(&mut clients[stays]).await;
        }
        // A place is free now: take it, so that the next connection needs it again.
        let mut filler = house.connect().await;
        filler.write_all(b"POST /v1/x HTTP/1.1\r\nHos").await.unwrap();
        clients.push(filler);
    }
}

#[tokio::test]
async fn an_address_at_its_limit_gets_no_further_connection() {
    let header_timeout = Duration::from_secs(600);
    let house = serve(Listen { max_connections_per_address: Some(2), header_timeout, ..local() }).await;
    let busy = async || {
        let mut client = house.connect().await;
        client.write_all(b"POST /v1/x HTTP/1.1\r\nHos").await.unwrap();
        client
    };
    let (mut first, second) = (busy().await, busy().await);
    let mut third = house.connect().await;
    assert!(matches!(soon("it is closed", third.read(&mut [0; 8])).await, Ok(0) | Err(_)));
    // One that is idle ends in favour of the next.
    first.write_all(b"t: g\r\nContent-Length: 2\r\n\r\n{}").await.unwrap();
    answered(&mut first).await;
    let mut fourth = house.connect().await;
    kept(&mut fourth).await;
    assert_eq!(soon("its end", first.read(&mut [0; 8])).await.unwrap(), 0);
    drop((second, fourth));
}

#[tokio::test]
async fn a_waiting_connection_is_served_once_the_limit_is_raised() {
    let house = serve(Listen { max_connections: 1, ..local() }).await;
    let _first = house.connect().await;
    let mut second = house.connect().await;
    second.write_all(&post("Content-Length: 2\r\nConnection: close\r\n", "{}")).await.unwrap();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    house.door.set_limits(&Listen { max_connections: 2, ..local() }).await.unwrap();
    let mut text = String::new();
    soon("its turn beside the first", second.read_to_string(&mut text)).await.unwrap();
    assert!(text.ends_with("2 bytes"), "{text}");
}

#[tokio::test]
async fn cleartext_http2_works_with_prior_knowledge() {
    let house = serve(local()).await;
    let io = TokioIo::new(house.connect().await);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    let driver = tokio::spawn(connection);
    for _ in 0..3 {
        let request = Request::post("http://g/v1/x").body(Full::new(Bytes::from_static(b"{}"))).unwrap();
        let response = soon("an answer", sender.send_request(request)).await.unwrap();
        assert_eq!(response.version(), http::Version::HTTP_2);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "2 bytes");
    }
    house.drain.advance(DrainPhase::Draining);
    soon("GOAWAY ends it", driver).await.unwrap().unwrap();
    soon("the listener ends", house.serving).await.unwrap();
}

mod tls {
    use rustls::pki_types::CertificateDer;
    use rustls::{ClientConfig, RootCertStore};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::client::TlsStream;

    use super::*;

    struct Made {
        dir: tempfile::TempDir,
        tls: Tls,
        roots: Vec<CertificateDer<'static>>,
    }

    impl Made {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let tls = Tls { certificate_file: dir.path().join("c.pem"), private_key_file: dir.path().join("k.pem") };
            let mut made = Made { dir, tls, roots: Vec::new() };
            made.renew();
            made
        }

        fn renew(&mut self) {
            let pair = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
            std::fs::write(&self.tls.certificate_file, pair.cert.pem()).unwrap();
            std::fs::write(&self.tls.private_key_file, pair.signing_key.serialize_pem()).unwrap();
            self.roots.push(pair.cert.der().clone());
        }

        async fn connect(&self, house: &House, alpn: &[&[u8]]) -> TlsStream<TcpStream> {
            let mut roots = RootCertStore::empty();
            for root in &self.roots {
                roots.add(root.clone()).unwrap();
            }
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
            let mut config = config.with_root_certificates(roots).with_no_client_auth();
            config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
            let name = ServerName::try_from("localhost").unwrap();
            let io = house.connect().await;
            soon("the handshake", TlsConnector::from(Arc::new(config)).connect(name, io)).await.unwrap()
        }
    }

    fn leaf(stream: &TlsStream<TcpStream>) -> Vec<u8> {
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    }

    #[tokio::test]
    async fn http2_is_chosen_by_alpn_and_http1_without_it() {
        let made = Made::new();
        let house = serve(Listen { tls: Some(made.tls.clone()), ..local() }).await;
        let stream = made.connect(&house, &[b"h2", b"http/1.1"]).await;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let executor = hyper_util::rt::TokioExecutor::new();
        let handshake = hyper::client::conn::http2::handshake(executor, TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.unwrap();
        let _driver = tokio::spawn(connection);
        let request = Request::post("https://localhost/v1/x").body(Full::new(Bytes::from_static(b"{}"))).unwrap();
        let response = soon("an answer", sender.send_request(request)).await.unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "2 bytes");
        let mut stream = made.connect(&house, &[]).await;
        stream.write_all(&post("Content-Length: 2\r\n", "{}")).await.unwrap();
        let mut text = String::new();
        soon("an answer", stream.read_to_string(&mut text)).await.unwrap();
        assert!(text.ends_with("2 bytes"), "{text}");
    }

    #[tokio::test]
    async fn a_client_that_speaks_another_version_than_it_agreed_to_is_not_served() {
        let made = Made::new();
        let house = serve(Listen { tls: Some(made.tls.clone()), ..local() }).await;
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
        for (agreed, said) in [(&b"h2"[..], post("Content-Length: 2\r\n", "{}")), (b"http/1.1", preface)] {
            let mut stream = made.connect(&house, &[agreed]).await;
            stream.write_all(&said).await.unwrap();
            let mut answer = Vec::new();
            let _ = soon("the close", stream.read_to_end(&mut answer)).await;
            assert_eq!(String::from_utf8_lossy(&answer), "");
        }
    }

    #[tokio::test]
    async fn a_renewed_certificate_greets_newcomers_and_an_open_stream_lives_on() {
        let mut made = Made::new();
        let house = serve(Listen { tls: Some(made.tls.clone()), ..local() }).await;
        let stream = made.connect(&house, &[b"http/1.1"]).await;
        let old = leaf(&stream);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let _driver = tokio::spawn(connection);
        let request = Request::get("/stream").header("host", "localhost").body(Empty::<Bytes>::new()).unwrap();
        let mut body = soon("the head", sender.send_request(request)).await.unwrap().into_body();
        house.feed.send(Bytes::from_static(b"before")).await.unwrap();
        let first = soon("before", body.frame()).await.unwrap().unwrap();
        assert_eq!(first.into_data().unwrap(), "before");
        made.renew();
        house.door.set_limits(&Listen { tls: Some(made.tls.clone()), ..local() }).await.unwrap();
        assert_ne!(leaf(&made.connect(&house, &[b"http/1.1"]).await), old);
        house.feed.send(Bytes::from_static(b"after")).await.unwrap();
        let second = soon("after", body.frame()).await.unwrap().unwrap();
        assert_eq!(second.into_data().unwrap(), "after");
        assert!(made.dir.path().exists());
    }

    #[tokio::test]
    async fn a_handshake_that_never_ends_is_closed_with_the_header_timeout() {
        let made = Made::new();
        let limit = Duration::from_millis(200);
        let house = serve(Listen { tls: Some(made.tls.clone()), header_timeout: limit, ..local() }).await;
        for first in [&b""[..], &[0x16, 0x03, 0x01, 0x02, 0x00]] {
            assert_eq!(soon("the close", house.ask(first)).await, "");
        }
        let text = soon("an alert", house.ask(b"GET / HTTP/1.1\r\nHost: g\r\n\r\n")).await;
        assert!(!text.contains("HTTP"), "{text}");
    }
}

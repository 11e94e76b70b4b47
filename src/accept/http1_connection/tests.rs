//! Requests cut anywhere, responses in all framings, and all their endings.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Body;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use parking_lot::Mutex;
use proptest::prelude::*;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};

use super::writer::WriteBuffer;
use super::{MOST_PIPELINED, ReadState, SMALL_READ};

use crate::accept::settings::Listen;
use crate::accept::{BodyError, ConnectionServer, Drain, DrainPhase, IncomingRequest, RequestBody};
use crate::clock::Clock;
use crate::http1::{Framing, ResponseFraming};
use crate::types::ClientState;

type Reply = UnsyncBoxBody<Bytes, std::io::Error>;

/// What the service saw of a request: method and target, and its body or error.
type Sight = (String, Result<Vec<u8>, BodyError>);

type Seen = Arc<Mutex<Vec<Sight>>>;

struct House {
    door: ConnectionServer,
    drain: Drain,
    seen: Seen,
}

/// A response of these pieces, of unknown length.
fn pieces(pieces: impl IntoIterator<Item = &'static [u8], IntoIter: Send + 'static>) -> Reply {
    let frames = pieces.into_iter().map(|piece| Ok(http_body::Frame::data(Bytes::from_static(piece))));
    StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync()
}

fn whole(text: impl Into<Bytes>) -> Reply {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

fn answer_to(path: &str, length: usize) -> Response<Reply> {
    let (status, body) = match path {
        "/stream" => (StatusCode::OK, pieces([b"data: a\n\n".as_slice(), b"", b"data: b\n\n"])),
        "/large" => (StatusCode::OK, whole(vec![b'x'; 300_000])),
        "/long" => {
            let frames = (0..3).map(|_| Ok(http_body::Frame::data(Bytes::from(vec![b'y'; 40_000]))));
            (StatusCode::OK, StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync())
        }
        "/nothing" => (StatusCode::NO_CONTENT, whole("")),
        "/odd" => (StatusCode::from_u16(299).unwrap(), whole("odd")),
        _ => (StatusCode::OK, whole(format!("{length} bytes"))),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    if path == "/close" {
        response.headers_mut().insert("connection", "close".parse().unwrap());
    }
    response
}

impl House {
    fn new(listen: &Listen) -> Self {
        let drain = Drain::new();
        House { door: ConnectionServer::new(listen, None, drain.clone(), Clock::start()), drain, seen: Seen::default() }
    }

    fn connect(&self, pipe: usize) -> DuplexStream {
        let (ours, theirs) = tokio::io::duplex(pipe);
        let (door, seen) = (self.door.clone(), Arc::clone(&self.seen));
        let service = tower::service_fn(move |IncomingRequest { head, body, .. }: IncomingRequest| {
            let seen = Arc::clone(&seen);
            async move {
                let told = format!("{} {}", head.method, head.uri);
                let path = head.uri.path().to_owned();
                if path == "/unread" {
                    return Ok::<_, Infallible>(answer_to(&path, 0));
                }
                let body = body.collect().await.map(|body| body.to_bytes().to_vec());
                let status = if body.is_err() { StatusCode::BAD_REQUEST } else { StatusCode::OK };
                let length = body.as_ref().map_or(0, Vec::len);
                seen.lock().push((told, body));
                let mut response = answer_to(&path, length);
                if status != StatusCode::OK {
                    *response.status_mut() = status;
                }
                Ok(response)
            }
        });
        tokio::spawn(async move { door.serve(theirs, service).await });
        ours
    }

    /// Sends these pieces and reads until the connection ends or is quiet.
    async fn ask(&self, said: &[&[u8]]) -> String {
        let mut client = self.connect(1 << 20);
        for piece in said {
            client.write_all(piece).await.unwrap();
            settle().await;
        }
        quiet(&mut client).await
    }

    fn seen(&self) -> Vec<Sight> {
        self.seen.lock().clone()
    }
}

async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

/// What has arrived once all ready tasks have run.
async fn quiet(client: &mut DuplexStream) -> String {
    let mut heard = Vec::new();
    let mut space = [0; 4096];
    loop {
        settle().await;
        let read = tokio::select! {
            biased;
            read = client.read(&mut space) => read.unwrap_or(0),
            () = settle() => 0,
        };
        if read == 0 {
            return String::from_utf8_lossy(&heard).into_owned();
        }
        heard.extend_from_slice(&space[..read]);
    }
}

/// The text without its date.
fn undated(text: &str) -> String {
    text.split("\r\n").filter(|line| !line.starts_with("date: ")).collect::<Vec<_>>().join("\r\n")
}

const GET: &[u8] = b"GET /a HTTP/1.1\r\nhost: g\r\n\r\n";

#[tokio::test(start_paused = true)]
async fn an_answer_of_known_length_states_it_and_one_of_unknown_length_comes_in_chunks() {
    let house = House::new(&Listen::default());
    assert_eq!(undated(&house.ask(&[GET]).await), "HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n0 bytes");
    let stream = house.ask(&[b"GET /stream HTTP/1.1\r\nhost: g\r\n\r\n"]).await;
    let chunks = "9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n";
    assert_eq!(undated(&stream), format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{chunks}"));
    let nothing = house.ask(&[b"GET /nothing HTTP/1.1\r\nhost: g\r\n\r\n"]).await;
    assert_eq!(undated(&nothing), "HTTP/1.1 204 No Content\r\n\r\n");
    let odd = house.ask(&[b"GET /odd HTTP/1.1\r\nhost: g\r\n\r\n"]).await;
    assert_eq!(undated(&odd), "HTTP/1.1 299 \r\ncontent-length: 3\r\n\r\nodd");
    let head = house.ask(&[b"HEAD /a HTTP/1.1\r\nhost: g\r\n\r\n"]).await;
    assert_eq!(undated(&head), "HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n");
}

#[tokio::test(start_paused = true)]
async fn long_pieces_come_whole_through_a_narrow_pipe() {
    for (path, length, framing) in [("/large", 300_000, "content-length: 300000"), ("/long", 120_000, "chunked")] {
        let house = House::new(&Listen::default());
        let mut client = house.connect(1000);
        client
            .write_all(format!("GET {path} HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.unwrap();
        let text = String::from_utf8(all).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(framing) && head.contains("connection: close"), "{head}");
        assert_eq!(body.matches(['x', 'y']).count(), length);
        assert!(path == "/large" || body.starts_with("9c40\r\nyyy") && body.ends_with("yyy\r\n0\r\n\r\n"));
    }
}

#[tokio::test(start_paused = true)]
async fn old_clients_get_no_chunks_and_keep_the_connection_only_where_they_ask() {
    let house = House::new(&Listen::default());
    let old = house.ask(&[b"GET /stream HTTP/1.0\r\n\r\n", GET]).await;
    assert_eq!(undated(&old), "HTTP/1.0 200 OK\r\nconnection: close\r\n\r\ndata: a\n\ndata: b\n\n");
    let kept = house.ask(&[b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", GET]).await;
    let first = "HTTP/1.0 200 OK\r\ncontent-length: 7\r\nconnection: keep-alive\r\n\r\n0 bytes";
    assert!(undated(&kept).starts_with(first) && kept.matches("200 OK").count() == 2, "{kept}");
}

#[tokio::test(start_paused = true)]
async fn a_connection_ends_where_one_side_says_so_and_behind_what_was_not_read() {
    for said in [
        &b"GET /close HTTP/1.1\r\nhost: g\r\n\r\n"[..],
        b"GET /a HTTP/1.1\r\nhost: g\r\nconnection: x, Close\r\n\r\n",
        b"POST /unread HTTP/1.1\r\nhost: g\r\ncontent-length: 9\r\n\r\n{",
        b"POST /unread HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
    ] {
        let house = House::new(&Listen::default());
        let text = house.ask(&[said, GET]).await;
        assert_eq!(text.matches("HTTP/1.1 ").count(), 1, "{text}");
        assert!(text.contains("connection: close\r\n"), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_is_answered_and_ends_the_connection() {
    let house = House::new(&Listen { max_head: 8 << 10, max_header_lines: 5, ..Listen::default() });
    let long = format!("GET /{} HTTP/1.1\r\nhost: g\r\n\r\n", "a".repeat(9000));
    let lines = format!("GET /a HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(6));
    for (said, status) in [
        (&b"GET /a\r\n\r\n"[..], "400 Bad Request"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "400 Bad Request"),
        (b"GET /a HTTP/3.0\r\n\r\n", "400 Bad Request"),
        (b"POST /a HTTP/1.1\r\nhost: g\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", "400 Bad Request"),
        (b"POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", "400 Bad Request"),
        (long.as_bytes(), "431 Request Header Fields Too Large"),
        (lines.as_bytes(), "431 Request Header Fields Too Large"),
    ] {
        let text = house.ask(&[said, GET]).await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
        assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")) && head.contains("connection: close"), "{head}");
        assert!(head.contains("x-goodput-reason: bad_head") && head.contains("x-request-id: req-"), "{head}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["type"], "invalid_request_error");
    }
    let text = house.ask(&[b"POST /v1/messages HTTP/1.1\r\nno colon\r\n\r\n"]).await;
    assert!(text.contains("\"type\":\"error\""), "the shape of the path: {text}");
    assert_eq!(house.seen(), []);
}

#[tokio::test(start_paused = true)]
async fn a_target_longer_than_any_is_refused_as_that() {
    let house = House::new(&Listen { max_head: 1 << 20, ..Listen::default() });
    let text = house.ask(&[format!("GET /{} HTTP/1.1\r\nhost: g\r\n\r\n", "a".repeat(70_000)).as_bytes()]).await;
    assert!(text.starts_with("HTTP/1.1 414 URI Too Long\r\n"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_within_its_request_is_seen_to_leave() {
    for said in [
        &b"POST /a HTTP/1.1\r\nhost: g\r\ncontent-length: 9\r\n\r\n{"[..],
        b"POST /a HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{",
    ] {
        let house = House::new(&Listen::default());
        let mut client = house.connect(4096);
        client.write_all(said).await.unwrap();
        settle().await;
        client.shutdown().await.unwrap();
        assert_eq!(quiet(&mut client).await, "");
        assert_eq!(house.seen(), [], "the service's future was dropped");
    }
}

#[tokio::test(start_paused = true)]
async fn a_broken_framing_reaches_the_service_as_that() {
    let house = House::new(&Listen::default());
    let text =
        house.ask(&[b"POST /a HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n", b"zz\r\n"]).await;
    assert!(text.starts_with("HTTP/1.1 400 "), "{text}");
    assert_eq!(house.seen(), [("POST /a".to_owned(), Err(BodyError::Framing))]);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_has_come_is_not_asked_for_again() {
    let house = House::new(&Listen::default());
    let head = "POST /a HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n";
    let text = house.ask(&[format!("{head}{{}}").as_bytes()]).await;
    assert!(text.starts_with("HTTP/1.1 200 OK"), "{text}");
    let text = house.ask(&[head.as_bytes(), b"{}"]).await;
    assert!(text.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK"), "{text}");
}

/// A transport that accepts everything and sends it at the second flush, as TLS does over a full
/// socket.
#[derive(Default)]
struct HoldsBack {
    taken: usize,
    flushes: usize,
}

impl AsyncWrite for HoldsBack {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.taken += bytes.len();
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.flushes += 1;
        if self.flushes == 1 { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[test]
fn what_the_transport_holds_back_is_flushed_until_it_is_out() {
    let (mut out, mut io, mut cx) = (WriteBuffer::default(), HoldsBack::default(), Context::from_waker(Waker::noop()));
    out.piece(Bytes::from(vec![b'x'; 300_000]), &mut ResponseFraming::ToEnd);
    assert!(out.poll(Pin::new(&mut io), &mut cx).is_pending());
    assert_eq!((io.taken, out.len()), (300_000, 0));
    assert!(out.poll(Pin::new(&mut io), &mut cx).is_ready());
    assert!(out.poll(Pin::new(&mut io), &mut cx).is_ready());
    assert_eq!(io.flushes, 2, "nothing is owed any more");
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_does_not_keep_what_its_body_was_read_into() {
    for framing in [Framing::Length(200_000), Framing::CHUNKED] {
        let (mut ours, theirs) = tokio::io::duplex(1 << 20);
        let mut sent = match framing {
            Framing::Length(_) => vec![b'x'; 200_000],
            _ => [b"30d40\r\n".to_vec(), vec![b'x'; 200_000], b"\r\n0\r\n\r\n".to_vec()].concat(),
        };
        sent.extend_from_slice(b"GET /next");
        ours.write_all(&sent).await.unwrap();
        let mut theirs = pin!(theirs);
        let (mut read_state, mut out) = (ReadState::new(), WriteBuffer::default());
        let mut body = RequestBody::new(read_state.begin(framing, false), ClientState::default());
        let read = poll_fn(|cx| {
            loop {
                match Pin::new(&mut body).poll_frame(cx) {
                    Poll::Ready(Some(frame)) => drop(frame.unwrap()),
                    Poll::Ready(None) => return Poll::Ready(()),
                    Poll::Pending => drop(ready!(read_state.feed(theirs.as_mut(), &mut out, cx))),
                }
            }
        });
        read.await;
        assert!(read_state.buffer.starts_with(b"GET /next") || read_state.buffer.is_empty());
        assert!(read_state.buffer.capacity() <= SMALL_READ, "{}", read_state.buffer.capacity());
    }
}

/// A transport that counts reads which brought something.
struct CountedReads {
    io: DuplexStream,
    count: usize,
}

impl AsyncRead for CountedReads {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        ready!(Pin::new(&mut self.io).poll_read(cx, room))?;
        self.count += 1;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for CountedReads {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// A service that reads a long body in slices lets others go on between them: what comes meanwhile is read
/// in few large pieces, and no more than is kept ahead.
#[tokio::test(start_paused = true)]
async fn a_body_that_is_not_awaited_for_a_moment_is_read_in_large_pieces() {
    const LENGTH: usize = 1 << 20;
    let (mut ours, io) = tokio::io::duplex(2 * LENGTH);
    ours.write_all(&vec![b'x'; LENGTH]).await.unwrap();
    let mut theirs = pin!(CountedReads { io, count: 0 });
    let (mut read_state, mut out) = (ReadState::new(), WriteBuffer::default());
    let mut body = RequestBody::new(read_state.begin(Framing::Length(LENGTH as u64), false), ClientState::default());
    let mut left = LENGTH;
    let read = poll_fn(|cx| {
        while left > 0 {
            assert!(read_state.watch(theirs.as_mut(), false, cx).is_pending());
            assert!(read_state.buffer.len() <= MOST_PIPELINED && read_state.buffer.capacity() <= 2 * MOST_PIPELINED);
            match Pin::new(&mut body).poll_frame(cx) {
                Poll::Ready(frame) => left -= frame.unwrap().unwrap().into_data().unwrap().len(),
                Poll::Pending => drop(ready!(read_state.feed(theirs.as_mut(), &mut out, cx))),
            }
        }
        Poll::Ready(())
    });
    read.await;
    assert!(theirs.count <= 2 * LENGTH / MOST_PIPELINED + 4, "{} reads", theirs.count);
}

#[tokio::test(start_paused = true)]
async fn half_a_head_that_came_with_the_request_before_it_has_the_time_of_a_head() {
    let limits =
        Listen { header_timeout: Duration::from_secs(5), idle_timeout: Duration::from_secs(20), ..Listen::default() };
    let house = House::new(&limits);
    let mut client = house.connect(4096);
    let clock = Clock::start();
    client.write_all(&[GET, b"GET /b HT"].concat()).await.unwrap();
    client.read_to_end(&mut Vec::new()).await.unwrap();
    assert_eq!(clock.now().as_nanos() / 1_000_000_000, 5);
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_an_idle_connection_also_within_a_head() {
    for said in [&b""[..], b"GET /a HTT", GET] {
        let house = House::new(&Listen::default());
        let mut client = house.connect(4096);
        client.write_all(said).await.unwrap();
        quiet(&mut client).await;
        house.drain.advance(DrainPhase::Draining);
        settle().await;
        assert_eq!(client.read(&mut [0; 8]).await.unwrap(), 0, "{}", said.escape_ascii());
    }
}

/// A valid request, and what the service must see of it.
fn request() -> impl Strategy<Value = (Vec<u8>, Sight)> {
    let body = prop::collection::vec(any::<u8>(), 0..60);
    (body, prop::sample::select(vec!["length", "chunks", "none"]), 1usize..20, "[a-z]{1,8}").prop_map(
        |(body, framing, size, path)| {
            let mut bytes = format!("POST /{path} HTTP/1.1\r\nhost: g\r\nx-some: thing\r\n").into_bytes();
            let body = if framing == "none" { Vec::new() } else { body };
            match framing {
                "length" => {
                    bytes.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
                    bytes.extend_from_slice(&body);
                }
                "chunks" => {
                    bytes.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
                    for chunk in body.chunks(size) {
                        bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                        bytes.extend_from_slice(chunk);
                        bytes.extend_from_slice(b"\r\n");
                    }
                    bytes.extend_from_slice(b"0\r\n\r\n");
                }
                _ => bytes.extend_from_slice(b"\r\n"),
            }
            (bytes, (format!("POST /{path}"), Ok(body)))
        },
    )
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(future)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn requests_one_behind_the_other_are_the_same_however_they_are_cut(
        requests in prop::collection::vec(request(), 1..4),
        cuts in prop::collection::vec(1usize..40, 1..40),
    ) {
        let bytes: Vec<u8> = requests.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
        let wanted: Vec<_> = requests.into_iter().map(|(_, seen)| seen).collect();
        let mut said = Vec::new();
        let mut rest = &bytes[..];
        for cut in cuts.iter().cycle() {
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            said.push(now);
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        let house = House::new(&Listen::default());
        let text = run(house.ask(&said));
        prop_assert_eq!(house.seen(), wanted.clone());
        let lengths: Vec<String> = wanted.iter().map(|(_, body)| format!("{} bytes", body.as_ref().unwrap().len())).collect();
        prop_assert_eq!(text.matches("200 OK").count(), wanted.len());
        for length in lengths {
            prop_assert!(text.contains(&length));
        }
    }

    #[test]
    fn no_bytes_make_it_panic(
        said in prop::collection::vec(
            prop_oneof![
                Just(b"POST /a HTTP/1.1\r\n".to_vec()),
                Just(b"host: g\r\n".to_vec()),
                Just(b"content-length: 3\r\n".to_vec()),
                Just(b"transfer-encoding: chunked\r\n".to_vec()),
                Just(b"\r\n".to_vec()),
                Just(b"3\r\nabc\r\n".to_vec()),
                prop::collection::vec(any::<u8>(), 0..12),
            ],
            0..12,
        ),
    ) {
        let house = House::new(&Listen::default());
        let said: Vec<&[u8]> = said.iter().map(Vec::as_slice).collect();
        run(async {
            let mut client = house.connect(1 << 16);
            for piece in said {
                let _ = client.write_all(piece).await;
                settle().await;
            }
            quiet(&mut client).await;
            drop(client);
            settle().await;
        });
    }
}

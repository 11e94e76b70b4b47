//! Connections over in-memory pipes, in virtual time.

use std::future::poll_fn;

use http_body_util::BodyExt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};

use super::*;
use crate::dial::{PipeDial, PipeListener, Scheme};
use crate::forward::attempt::{AttemptRequest, start};
use crate::route::settings::EngineSource;

struct Bench {
    network: PipeDial,
    engine: PipeListener,
    lines: Arc<ConnPool>,
    clock: Clock,
    pool: PoolSettings,
    to: Arc<EngineAddress>,
}

const AT: &str = "e:8000";

impl Bench {
    fn new() -> Self {
        let network = PipeDial::new();
        let engine = network.listen(AT);
        let to = EngineAddress { scheme: Scheme::Http, host: "e".into(), port: 8000, base: "".into(), name: None };
        let pool = PoolSettings::with_defaults("p".into(), EngineSource::Static(vec![to.clone()]));
        let to = Arc::new(to);
        let clock = Clock::start();
        let lines = Arc::new(ConnPool::new(Arc::new(network.clone()), clock));
        Bench { network, engine, lines, clock, pool, to }
    }

    async fn take(&self) -> PooledConn {
        self.lines.take(&self.pool, &self.to.id(), &self.to).await.unwrap()
    }

    /// A connection whose response has come and ended, and the engine's end of it.
    async fn used(&mut self) -> DuplexStream {
        let line = self.take().await;
        let mut engine = self.engine.accept().await;
        let ask = tokio::spawn(ask(line));
        read_request(&mut engine).await;
        engine.write_all(ANSWER).await.unwrap();
        assert_eq!(ask.await.unwrap().unwrap(), b"ok");
        settle().await;
        engine
    }

    /// Result of a request answered with these bytes on a fresh connection that the engine then
    /// closes.
    async fn answered_with(&mut self, bytes: &'static [u8]) -> Result<Vec<u8>, String> {
        let line = self.lines.fresh(&self.pool, &self.to.id(), &self.to).await.unwrap();
        let mut engine = self.engine.accept().await;
        let ask = tokio::spawn(ask(line));
        read_request(&mut engine).await;
        // An engine whose write is cut off is not a test failure.
        let _ = engine.write_all(bytes).await;
        drop(engine);
        ask.await.unwrap()
    }

    fn idle(&self) -> usize {
        self.lines.idle(&self.pool.id, &self.to.id())
    }

    async fn sleep(&self, millis: u64) {
        self.clock.sleep_until(Some(self.clock.now() + Duration::from_millis(millis))).await;
    }
}

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const STREAM: &[u8] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n";

fn request(body: &[&'static [u8]]) -> RequestWriter {
    request_of(body.iter().map(|frame| Bytes::from_static(frame)).collect())
}

fn request_of(body: Vec<Bytes>) -> RequestWriter {
    RequestWriter::post("", "/v1/chat/completions", [("host", &b"e:8000"[..])].into_iter(), body.into())
}

/// Sends a small request and reads the whole response.
async fn ask(line: PooledConn) -> Result<Vec<u8>, String> {
    let answer = line.send(request(&[b"{", b"}"])).await.map_err(|failed| format!("{:?}", failed.why))?;
    let body = answer.body.collect().await.map_err(|broken| format!("{broken:?}"))?;
    Ok(body.to_bytes().to_vec())
}

/// Reads a request with a stated length; returns the head in lower case.
async fn read_request(engine: &mut DuplexStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(engine.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    engine.read_exact(&mut body).await.unwrap();
    head
}

/// The response to a small request on an idle connection, polled again only when
/// woken.
async fn begun(lines: Arc<ConnPool>, pool: PoolSettings, to: Arc<EngineAddress>) -> Vec<u8> {
    let (at, engine, request) = (lines.clock.now(), to.id(), request(&[b"{", b"}"]));
    let mut call = Some(AttemptRequest { lines, pool: Arc::new(pool), engine, address: to, request, fresh: false, at });
    let mut opening = poll_fn(|cx| Poll::Ready(start(call.take().unwrap(), cx))).await;
    let mut waits = opening.waits();
    assert!(waits);
    let answer = poll_fn(|cx| match std::mem::take(&mut waits) {
        true => Poll::Pending,
        false => Pin::new(&mut opening).poll(cx),
    });
    answer.await.unwrap().body.collect().await.unwrap().to_bytes().to_vec()
}

/// Runs every task that is ready.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

/// Waits until the gateway has closed its end.
async fn closed(engine: &mut DuplexStream) {
    let mut rest = Vec::new();
    engine.read_to_end(&mut rest).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_line_whose_answer_ended_whole_is_used_again() {
    let mut bench = Bench::new();
    let mut engine = bench.used().await;
    assert_eq!(bench.idle(), 1);
    let line = bench.take().await;
    assert!(line.is_reused());
    let ask = tokio::spawn(ask(line));
    read_request(&mut engine).await;
    engine.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n").await.unwrap();
    assert_eq!(ask.await.unwrap().unwrap(), b"ok");
    settle().await;
    assert_eq!((bench.idle(), bench.network.dials(AT)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_answer_on_a_line_that_was_quiet_is_heard_whenever_it_comes() {
    let mut bench = Bench::new();
    let mut engine = bench.used().await;
    for (millis, pieces) in [(0, 1), (0, ANSWER.len()), (700, 1), (700, 3)] {
        let answer = tokio::spawn(begun(bench.lines.clone(), bench.pool.clone(), bench.to.clone()));
        read_request(&mut engine).await;
        for piece in ANSWER.chunks(ANSWER.len().div_ceil(pieces)) {
            bench.sleep(millis).await;
            engine.write_all(piece).await.unwrap();
        }
        assert_eq!(answer.await.unwrap(), b"ok", "{millis} {pieces}");
        settle().await;
    }
    assert_eq!(bench.network.dials(AT), 1);
}

#[tokio::test(start_paused = true)]
async fn where_no_descriptor_is_left_an_idle_line_gives_its_own() {
    let mut bench = Bench::new();
    let mut idle = bench.used().await;
    bench.network.lack(1);
    let fresh = bench.lines.fresh(&bench.pool, &bench.to.id(), &bench.to).await;
    assert!(fresh.is_ok());
    closed(&mut idle).await;
    assert_eq!((bench.idle(), bench.network.dials(AT)), (0, 3));
    bench.network.lack(1);
    let failed = bench.lines.fresh(&bench.pool, &bench.to.id(), &bench.to).await;
    assert!(failed.is_err_and(|failed| failed.is_ours()), "nothing was idle");
    assert_eq!(bench.network.dials(AT), 4);
}

#[tokio::test(start_paused = true)]
async fn a_line_is_not_used_again_after_four_seconds() {
    let mut bench = Bench::new();
    let mut engine = bench.used().await;
    bench.sleep(3_999).await;
    assert_eq!(bench.idle(), 1);
    bench.lines.sweep();
    assert_eq!(bench.idle(), 1);
    bench.sleep(1).await;
    assert!(!bench.take().await.is_reused());
    closed(&mut engine).await;
    assert_eq!(bench.network.dials(AT), 2);
}

#[tokio::test(start_paused = true)]
async fn the_sweeper_closes_what_nobody_takes() {
    let mut bench = Bench::new();
    let lines = bench.lines.clone();
    let sweeper = tokio::spawn(async move { lines.run_sweeper().await });
    let before = bench.clock.now();
    let mut engine = bench.used().await;
    closed(&mut engine).await;
    let lived = bench.clock.now() - before;
    assert!(lived >= IDLE && lived <= IDLE + Duration::from_secs(1), "{lived:?}");
    assert!(bench.lines.homes.read().is_empty());
    sweeper.abort();
}

#[tokio::test(start_paused = true)]
async fn a_line_that_the_engine_closed_is_left_alone() {
    let mut bench = Bench::new();
    drop(bench.used().await);
    settle().await;
    assert!(!bench.take().await.is_reused());
}

#[tokio::test(start_paused = true)]
async fn c44_a_close_of_a_reused_line_before_any_byte_is_told_apart() {
    let mut bench = Bench::new();
    for after in ["", "HTTP/1.1 2"] {
        let mut engine = bench.used().await;
        let line = bench.take().await;
        let send = tokio::spawn(line.send(request(&[b"{}"])));
        read_request(&mut engine).await;
        engine.write_all(after.as_bytes()).await.unwrap();
        drop(engine);
        let failed = send.await.unwrap().err().unwrap();
        let bytes_seen = after.len() as u64;
        assert_eq!(failed, SendError { why: ResponseError::Closed, reused: true, bytes_seen });
        assert_eq!(failed.is_stale(), after.is_empty());
    }
    // On a fresh connection the same is a failure of the engine.
    let line = bench.lines.fresh(&bench.pool, &bench.to.id(), &bench.to).await.unwrap();
    let mut engine = bench.engine.accept().await;
    let send = tokio::spawn(line.send(request(&[b"{}"])));
    read_request(&mut engine).await;
    drop(engine);
    assert!(!send.await.unwrap().err().unwrap().is_stale());
}

#[tokio::test(start_paused = true)]
async fn c48_a_request_dropped_before_its_answer_closes_the_connection() {
    let mut bench = Bench::new();
    let line = bench.take().await;
    let mut engine = bench.engine.accept().await;
    let send = tokio::spawn(line.send(request(&[b"{}"])));
    read_request(&mut engine).await;
    send.abort();
    let left = bench.clock.now();
    closed(&mut engine).await;
    assert_eq!(bench.clock.now(), left);
}

#[tokio::test(start_paused = true)]
async fn c47_a_request_dropped_while_its_body_is_being_written_closes_the_connection() {
    let mut bench = Bench::new();
    let line = bench.take().await;
    let mut engine = bench.engine.accept().await;
    let frames = std::iter::repeat_n(Bytes::from(vec![b'x'; 100_000]), 20).collect();
    let send = tokio::spawn(line.send(request_of(frames)));
    engine.read_u8().await.unwrap();
    settle().await;
    send.abort();
    let mut rest = Vec::new();
    engine.read_to_end(&mut rest).await.unwrap();
    assert!(rest.len() < 2_000_000, "never whole");
}

#[tokio::test(start_paused = true)]
async fn c47_an_answer_dropped_midway_closes_the_connection() {
    let mut bench = Bench::new();
    let line = bench.take().await;
    let mut engine = bench.engine.accept().await;
    let send = tokio::spawn(line.send(request(&[b"{}"])));
    read_request(&mut engine).await;
    engine.write_all(STREAM).await.unwrap();
    let mut answer = send.await.unwrap().unwrap();
    assert_eq!(answer.body.frame().await.unwrap().unwrap().into_data().unwrap(), "hello");
    drop(answer);
    closed(&mut engine).await;
    assert_eq!(bench.idle(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_waits_for_its_engine_holds_no_read_buffer() {
    let mut bench = Bench::new();
    let line = bench.take().await;
    let mut engine = bench.engine.accept().await;
    let sent = tokio::spawn(line.send(request(&[b"{}"])));
    read_request(&mut engine).await;
    engine.write_all(STREAM).await.unwrap();
    let mut body = sent.await.unwrap().unwrap().body;
    let held = |body: &UpstreamBody| body.line.as_ref().unwrap().wire.buffer.capacity();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    // Its bytes are in the client's hands, so that they cannot become the room of what comes next.
    assert!(poll_fn(|cx| Poll::Ready(Pin::new(&mut body).poll_frame(cx).is_pending())).await);
    assert_eq!(held(&body), 0);
    engine.write_all(b"3\r\nyou").await.unwrap();
    let second = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!((&first[..], &second[..]), (&b"hello"[..], &b"you"[..]));
    drop((first, second));
    engine.write_all(b"\r").await.unwrap();
    assert!(poll_fn(|cx| Poll::Ready(Pin::new(&mut body).poll_frame(cx).is_pending())).await);
    assert_eq!(held(&body), 0, "between events, too");
    engine.write_all(b"\n0\r\n\r\n").await.unwrap();
    assert!(body.frame().await.is_none());
    settle().await;
    assert_eq!(bench.idle(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_answer_before_the_request_was_read_is_passed_on_and_the_line_is_not_used_again() {
    let mut bench = Bench::new();
    let line = bench.take().await;
    let mut engine = bench.engine.accept().await;
    let frames = std::iter::repeat_n(Bytes::from(vec![b'x'; 100_000]), 20).collect();
    let send = tokio::spawn(line.send(request_of(frames)));
    engine.read_u8().await.unwrap();
    engine.write_all(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
    let answer = send.await.unwrap().unwrap();
    assert_eq!(answer.head.status, 413);
    assert_eq!(answer.body.collect().await.unwrap().to_bytes(), "{}");
    settle().await;
    assert_eq!(bench.idle(), 0);
    closed(&mut engine).await;
}

/// Reads pass; every write fails.
struct Deaf(BoxedIo);

impl AsyncRead for Deaf {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test(start_paused = true)]
async fn a_line_on_which_a_request_could_not_be_written_is_not_used_again_however_late_the_answer() {
    let mut bench = Bench::new();
    let mut line = bench.take().await;
    let mut engine = bench.engine.accept().await;
    let io = std::mem::replace(&mut line.wire.io, Box::new(tokio::io::empty()));
    line.wire.io = Box::new(Deaf(io));
    let ask = tokio::spawn(ask(line));
    settle().await;
    engine.write_all(ANSWER).await.unwrap();
    assert_eq!(ask.await.unwrap().unwrap(), b"ok");
    settle().await;
    assert_eq!(bench.idle(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_unasked_second_answer_reaches_nobody() {
    let mut bench = Bench::new();
    let poisoned = [ANSWER, b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nPOISON"].concat();
    let line = bench.take().await;
    let mut engine = bench.engine.accept().await;
    let ask = tokio::spawn(ask(line));
    read_request(&mut engine).await;
    engine.write_all(&poisoned).await.unwrap();
    assert_eq!(ask.await.unwrap().unwrap(), b"ok");
    settle().await;
    assert!(!bench.take().await.is_reused());
    // The same if it arrives later, while the connection is idle.
    let mut engine = bench.engine.accept().await;
    drop(engine);
    engine = bench.used().await;
    engine.write_all(ANSWER).await.unwrap();
    settle().await;
    assert!(!bench.take().await.is_reused());
}

#[tokio::test(start_paused = true)]
async fn however_many_lines_have_something_unasked_on_them_none_is_used() {
    let mut bench = Bench::new();
    let mut engines = Vec::new();
    for _ in 0..300 {
        let line = bench.lines.fresh(&bench.pool, &bench.to.id(), &bench.to).await.unwrap();
        let mut engine = bench.engine.accept().await;
        let ask = tokio::spawn(ask(line));
        read_request(&mut engine).await;
        engines.push((engine, ask));
    }
    for (engine, ask) in &mut engines {
        engine.write_all(ANSWER).await.unwrap();
        assert_eq!(ask.await.unwrap().unwrap(), b"ok");
    }
    settle().await;
    for (engine, _) in &mut engines {
        engine.write_all(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 6\r\n\r\nPOISON").await.unwrap();
    }
    settle().await;
    assert_eq!(bench.idle(), 300);
    // Checking all of them exceeds a task's budget for one poll.
    let line = tokio::spawn({
        let (lines, pool, to) = (Arc::clone(&bench.lines), bench.pool.clone(), bench.to.clone());
        async move { lines.take(&pool, &to.id(), &to).await.unwrap().is_reused() }
    });
    assert!(!line.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn interim_answers_have_an_end() {
    let mut bench = Bench::new();
    let flood: &'static [u8] = Box::leak(b"HTTP/1.1 102 Processing\r\n\r\n".repeat(4000).into_boxed_slice());
    assert_eq!(bench.answered_with(flood).await, Err("HeadTooLarge".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn answers_that_cannot_be_trusted_are_refused() {
    let mut bench = Bench::new();
    for bytes in [
        &b"\x16\x03\x01 this is not http at all\r\n\r\n"[..],
        b"<html>hello</html>\n",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 1000 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 -200 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: foo\r\nConnection: Upgrade\r\n\r\nTUNNEL",
        b"HTTP/1.1 200 OK\r\nBrokenHeaderLine\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX-A : b\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX-A: a\0b\r\nContent-Length: 2\r\n\r\nok",
    ] {
        let result = bench.answered_with(bytes).await;
        assert_eq!(result, Err("Garbage".into()), "{}", String::from_utf8_lossy(bytes));
    }
    assert_eq!(bench.idle(), 0);
}

#[tokio::test(start_paused = true)]
async fn odd_answers_that_can_be_read_are_passed_on() {
    let mut bench = Bench::new();
    for bytes in [
        &b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nok"[..],
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\n\r\nok",
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ] {
        let result = bench.answered_with(bytes).await;
        assert_eq!(result, Ok(b"ok".to_vec()), "{}", String::from_utf8_lossy(bytes));
    }
}

#[tokio::test(start_paused = true)]
async fn a_broken_body_is_an_error_never_an_end() {
    let mut bench = Bench::new();
    for (bytes, expected) in [
        (&b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"[..], "Closed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "Closed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n400\r\nok", "Closed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\nno chunk\r\n0\r\n\r\n", "Framing"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nfffffffffffffffffff\r\nabc", "Framing"),
    ] {
        let result = bench.answered_with(bytes).await;
        assert_eq!(result, Err(expected.into()), "{}", String::from_utf8_lossy(bytes));
    }
}

/// Writes until the other end closes or accepts no more; returns the number of bytes accepted.
async fn pour(engine: &mut DuplexStream, bytes: &[u8]) -> usize {
    let mut taken = 0;
    let pouring = async {
        while taken < bytes.len() {
            match engine.write(&bytes[taken..]).await {
                Ok(some) => taken += some,
                Err(_) => break,
            }
        }
    };
    let _ = tokio::time::timeout(Duration::from_millis(1), pouring).await;
    taken
}

#[tokio::test(start_paused = true)]
async fn two_megabytes_of_header_are_refused_before_they_are_read() {
    let mut bench = Bench::new();
    let many: String = (0..20_000).map(|n| format!("X-{n}: {}\r\n", "v".repeat(100))).collect();
    let long = format!("X-A: {}\r\n", "v".repeat(2_000_000));
    for header in [many, long] {
        let line = bench.take().await;
        let mut engine = bench.engine.accept().await;
        let send = tokio::spawn(line.send(request(&[b"{}"])));
        read_request(&mut engine).await;
        let head = format!("HTTP/1.1 200 OK\r\n{header}Content-Length: 2\r\n\r\nok");
        assert!(pour(&mut engine, head.as_bytes()).await <= 4 * BUFFER, "cut off");
        let failed = send.await.unwrap().err().unwrap();
        assert_eq!(failed.why, ResponseError::HeadTooLarge);
        assert!(failed.bytes_seen <= 2 * BUFFER as u64);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_not_read_does_not_pile_up() {
    let mut bench = Bench::new();
    let line = bench.take().await;
    let mut engine = bench.engine.accept().await;
    let send = tokio::spawn(line.send(request(&[b"{}"])));
    read_request(&mut engine).await;
    engine.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 50000000\r\n\r\n").await.unwrap();
    let _answer = send.await.unwrap().unwrap();
    assert!(pour(&mut engine, &vec![b'x'; 50_000_000]).await < 1_000_000);
}

#[tokio::test(start_paused = true)]
async fn a_line_goes_back_only_behind_an_answer_that_lets_it_stay() {
    for (answer, keep_alive) in [
        (&b"HTTP/1.1 204 No Content\r\ncontent-length: 2\r\n\r\n"[..], true),
        (b"HTTP/1.1 200 OK\r\nconnection: x, Close\r\ncontent-length: 2\r\n\r\nok", false),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", false),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok", true),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", true),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nHTTP", false),
    ] {
        let mut bench = Bench::new();
        let line = bench.take().await;
        let mut engine = bench.engine.accept().await;
        let ask = tokio::spawn(ask(line));
        read_request(&mut engine).await;
        engine.write_all(answer).await.unwrap();
        ask.await.unwrap().unwrap();
        assert_eq!(bench.idle(), usize::from(keep_alive), "{}", answer.escape_ascii());
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_written_as_it_is() {
    let mut bench = Bench::new();
    for length in [2, 5_000, 200_000] {
        let body: Vec<u8> = (0..length).map(|n| b'a' + (n % 26) as u8).collect();
        let frames: Vec<Bytes> = body.chunks(999).map(Bytes::copy_from_slice).chain([Bytes::new()]).collect();
        let fields = [("host", &b"e"[..]), ("x-id", b"a b")].into_iter();
        let line = bench.lines.fresh(&bench.pool, &bench.to.id(), &bench.to).await.unwrap();
        let mut engine = bench.engine.accept().await;
        let send = tokio::spawn(line.send(RequestWriter::post("/base", "/v1/x?y=z", fields, frames.into())));
        let head = format!("POST /base/v1/x?y=z HTTP/1.1\r\nhost: e\r\nx-id: a b\r\ncontent-length: {length}\r\n\r\n");
        let mut sent = vec![0; head.len() + length];
        engine.read_exact(&mut sent).await.unwrap();
        assert!(sent == [head.as_bytes(), &body].concat());
        send.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_does_not_come_about_ends_at_its_limit() {
    let bench = Bench::new();
    bench.network.silence(AT);
    let failed = bench.lines.take(&bench.pool, &bench.to.id(), &bench.to).await.err().unwrap();
    assert_eq!(failed.0.kind(), io::ErrorKind::TimedOut);
    assert_eq!(bench.clock.now(), Tick::from_millis(2_000));
    bench.network.fail(AT, io::ErrorKind::ConnectionRefused);
    let failed = bench.lines.take(&bench.pool, &bench.to.id(), &bench.to).await.err().unwrap();
    assert_eq!(failed.0.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test(start_paused = true)]
async fn lines_of_older_settings_do_not_come_back() {
    let mut bench = Bench::new();
    let _engine = bench.used().await;
    let elsewhere = Arc::new(EngineAddress { name: Some("other".into()), ..(*bench.to).clone() });
    let line = bench.lines.take(&bench.pool, &bench.to.id(), &elsewhere).await.unwrap();
    assert!(!line.is_reused());
    assert_eq!(bench.idle(), 0);
}

#[tokio::test(start_paused = true)]
async fn no_more_than_a_bounded_number_of_lines_idle() {
    let mut bench = Bench::new();
    let mut engines = Vec::new();
    let mut answers = Vec::new();
    for _ in 0..MOST_IDLE + 3 {
        let line = bench.take().await;
        let mut engine = bench.engine.accept().await;
        let send = tokio::spawn(line.send(request(&[b"{}"])));
        read_request(&mut engine).await;
        engine.write_all(ANSWER).await.unwrap();
        answers.push(send.await.unwrap().unwrap());
        engines.push(engine);
    }
    for answer in answers {
        answer.body.collect().await.unwrap();
    }
    assert_eq!(bench.idle(), MOST_IDLE);
    for engine in &mut engines[..3] {
        closed(engine).await;
    }
}

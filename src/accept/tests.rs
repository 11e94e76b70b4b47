//! Whole connections over in-memory pipes, in virtual time.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::task::JoinHandle;

use super::settings::Listen;
use super::{ConnectionServer, Drain, DrainPhase, IncomingRequest};
use crate::clock::Clock;
use crate::http1::ResponseHeaders;
use crate::types::{ClientState, DisconnectReason, Tick};

const GET: &[u8] = b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n";
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Behaviour of a response body.
#[derive(Clone, Copy)]
enum Act {
    /// `ok`, and the end.
    Short,
    /// Five pieces of two bytes.
    Few,
    /// Pieces of this size without end.
    Endless(usize),
    /// One piece, then nothing until the drain limit, then a last piece.
    UntilDrained,
    /// One piece, then an error.
    Breaks,
    /// One piece, then a panic.
    Panics,
}

/// How a body ended.
#[derive(Default)]
struct Seen {
    sides: Mutex<Vec<ClientState>>,
    severed: Mutex<Vec<(Option<DisconnectReason>, bool, Tick)>>,
    /// Bytes polled from endless bodies.
    asked: AtomicUsize,
    /// Bodies dropped by a panic.
    panics: AtomicUsize,
}

struct Played {
    act: Act,
    given: usize,
    side: ClientState,
    clock: Clock,
    seen: Arc<Seen>,
}

impl ResponseHeaders for Played {}

impl Body for Played {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let first = self.given == 0;
        self.given += 1;
        let data = |bytes: Bytes| Poll::Ready(Some(Ok(Frame::data(bytes))));
        match self.act {
            Act::Short if first => data(Bytes::from_static(b"ok")),
            Act::Few if self.given <= 5 => data(Bytes::from_static(b"ok")),
            Act::Short | Act::Few => Poll::Ready(None),
            Act::Endless(size) => {
                self.seen.asked.fetch_add(size, Ordering::Relaxed);
                data(Bytes::from(vec![b'x'; size]))
            }
            Act::UntilDrained | Act::Breaks | Act::Panics if first => data(Bytes::from_static(b"data: a\n\n")),
            Act::Breaks => Poll::Ready(Some(Err(std::io::Error::other("engine went away")))),
            Act::Panics => panic!("a body of a test"),
            Act::UntilDrained if self.side.drain_is_over() => {
                self.act = Act::Short;
                self.given = 1;
                data(Bytes::from_static(b"data: last\n\n"))
            }
            Act::UntilDrained => Poll::Pending,
        }
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        let now = self.clock.now();
        self.seen.panics.fetch_add(usize::from(std::thread::panicking()), Ordering::Relaxed);
        self.seen.severed.lock().push((self.side.severed(), self.side.is_limited(now), now));
    }
}

struct House {
    door: ConnectionServer,
    drain: Drain,
    clock: Clock,
    seen: Arc<Seen>,
}

impl House {
    fn new() -> Self {
        let (clock, drain) = (Clock::start(), Drain::new());
        let limits = Listen { idle_timeout: Duration::from_secs(60), ..Listen::default() };
        let door = ConnectionServer::new(&limits, None, drain.clone(), clock);
        House { door, drain, clock, seen: Arc::default() }
    }

    /// A client, and the connection's task, which returns the moment of its end.
    fn connect(&self, act: Act, pipe: usize) -> (DuplexStream, JoinHandle<Tick>) {
        let (ours, theirs) = tokio::io::duplex(pipe);
        let (door, clock, seen) = (self.door.clone(), self.clock, Arc::clone(&self.seen));
        let service = tower::service_fn(move |request: IncomingRequest| {
            assert_ne!(request.head.uri.path(), "/panic", "a service of a test");
            let side = request.body.client().clone();
            seen.sides.lock().push(side.clone());
            let body = Played { act, given: 0, side, clock, seen: Arc::clone(&seen) };
            async move { Ok::<_, Infallible>(Response::new(body)) }
        });
        let task = tokio::spawn(async move {
            door.serve(theirs, service).await;
            clock.now()
        });
        (ours, task)
    }

    async fn wait(&self, millis: u64) {
        self.clock.sleep_until(Some(self.clock.now() + Duration::from_millis(millis))).await;
    }

    fn side(&self) -> ClientState {
        self.seen.sides.lock().last().expect("a request came").clone()
    }

    fn last_end(&self) -> (Option<DisconnectReason>, bool, Tick) {
        *self.seen.severed.lock().last().expect("a body ended")
    }
}

const fn at(millis: u64) -> Tick {
    Tick::from_millis(millis)
}

async fn answer(client: &mut DuplexStream) -> String {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n0\r\n\r\n") {
        let mut byte = [0];
        assert_eq!(client.read(&mut byte).await.unwrap(), 1, "closed after {:?}", String::from_utf8_lossy(&text));
        text.push(byte[0]);
    }
    String::from_utf8(text).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_silent_connection_is_closed_after_the_header_timeout() {
    let house = House::new();
    let (_client, task) = house.connect(Act::Short, 4096);
    assert_eq!(task.await.unwrap(), at(10_000));
}

#[tokio::test(start_paused = true)]
async fn half_a_preface_or_a_dripping_head_does_not_stretch_the_header_timeout() {
    let house = House::new();
    let (mut half, first) = house.connect(Act::Short, 4096);
    half.write_all(&PREFACE[..12]).await.unwrap();
    let (mut slow, second) = house.connect(Act::Short, 4096);
    slow.write_all(b"POST / HTTP/1.1\r\nhost: g\r\nx-a: ").await.unwrap();
    for _ in 0..9 {
        house.wait(1000).await;
        slow.write_all(b"a").await.unwrap();
    }
    assert_eq!((first.await.unwrap(), second.await.unwrap()), (at(10_000), at(10_000)));
}

#[tokio::test(start_paused = true)]
async fn between_requests_the_idle_limit_runs_and_then_the_head_limit_again() {
    let house = House::new();
    let (mut client, task) = house.connect(Act::Short, 4096);
    client.write_all(GET).await.unwrap();
    answer(&mut client).await;
    house.wait(55_000).await;
    client.write_all(GET).await.unwrap();
    answer(&mut client).await;
    house.wait(50_000).await;
    client.write_all(b"GET /hea").await.unwrap();
    assert_eq!(task.await.unwrap(), at(115_000), "10 s after the first byte of a head that never ended");
    let (mut client, task) = house.connect(Act::Short, 4096);
    client.write_all(GET).await.unwrap();
    answer(&mut client).await;
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    assert_eq!(house.clock.now(), at(175_000), "60 s after the answer");
    drop(client);
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn pipelined_requests_are_answered_in_order() {
    let house = House::new();
    let (mut client, _task) = house.connect(Act::Short, 65_536);
    client.write_all(&GET.repeat(5)).await.unwrap();
    for _ in 0..5 {
        assert!(answer(&mut client).await.starts_with("HTTP/1.1 200 OK\r\n"));
    }
    assert_eq!(house.seen.sides.lock().len(), 5);
}

/// Whatever was pipelined, a further request or garbage.
#[tokio::test(start_paused = true)]
async fn c99_a_client_that_leaves_is_seen_to_leave_behind_all_that_it_sent_ahead() {
    let ahead: [(&str, Vec<u8>); 4] = [
        ("nothing", Vec::new()),
        ("70 kB", vec![b'x'; 70_000]),
        ("64 KiB", vec![b'x'; 64 * 1024]),
        ("many requests", GET.repeat(100_000)),
    ];
    for (what, ahead) in ahead {
        for (act, pipe) in [(Act::UntilDrained, 4096), (Act::UntilDrained, 1 << 20), (Act::Endless(100), 4096)] {
            let house = House::new();
            let (mut client, task) = house.connect(act, pipe);
            client.write_all(GET).await.unwrap();
            house.wait(50).await;
            client.write_all(&ahead).await.unwrap();
            let left = house.clock.now();
            drop(client);
            assert!(task.await.unwrap().since(left) <= Duration::from_millis(100), "{what}");
            assert_eq!(house.seen.severed.lock().len(), 1, "{what}: nothing that came ahead was begun");
        }
    }
}

/// Discarded pipelined bytes are not answered: the response says `close`, and the connection ends.
#[tokio::test(start_paused = true)]
async fn a_client_that_sends_too_much_ahead_gets_its_answer_and_then_the_end() {
    let house = House::new();
    let (mut client, task) = house.connect(Act::UntilDrained, 1 << 20);
    client.write_all(GET).await.unwrap();
    house.wait(1).await;
    client.write_all(&GET.repeat(10_000)).await.unwrap();
    house.wait(1).await;
    house.drain.advance(DrainPhase::Over);
    let mut text = Vec::new();
    client.read_to_end(&mut text).await.unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with("data: last\n\n\r\n0\r\n\r\n") && text.matches("HTTP/1.1 ").count() == 1, "{text}");
    drop(client);
    task.await.unwrap();
}

/// A panic before the handler gets the request: the client gets a 500, and the connection continues.
#[tokio::test(start_paused = true)]
async fn a_panic_before_the_handler_is_an_answer_on_http1() {
    let house = House::new();
    let (mut client, _task) = house.connect(Act::Short, 4096);
    client.write_all(b"GET /panic HTTP/1.1\r\nhost: g\r\n\r\n").await.unwrap();
    let mut text = String::new();
    while !text.contains("\"code\":\"internal\"") {
        let mut some = [0; 512];
        let read = client.read(&mut some).await.unwrap();
        assert!(read > 0, "{text}");
        text.push_str(std::str::from_utf8(&some[..read]).unwrap());
    }
    assert!(text.starts_with("HTTP/1.1 500 ") && text.contains("x-goodput-reason: internal\r\n"), "{text}");
    client.write_all(GET).await.unwrap();
    assert!(answer(&mut client).await.contains("200 OK"));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_is_limited_after_100_ms_and_cut_after_the_write_stall() {
    let house = House::new();
    let (mut client, task) = house.connect(Act::Endless(1000), 4096);
    client.write_all(GET).await.unwrap();
    house.wait(100).await;
    assert!(!house.side().is_limited(house.clock.now()));
    house.wait(1).await;
    assert!(house.side().is_limited(house.clock.now()));
    assert_eq!(house.side().refused_since(), Some(at(0)));
    assert_eq!(task.await.unwrap(), at(30_000));
    assert_eq!(house.last_end(), (Some(DisconnectReason::WriteStall), true, at(30_000)));
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_that_takes_something_every_100_ms_is_not_limited() {
    let house = House::new();
    let (mut client, task) = house.connect(Act::Endless(1000), 4096);
    client.write_all(GET).await.unwrap();
    let mut some = [0; 512];
    for _ in 0..600 {
        house.wait(100).await;
        client.read_exact(&mut some).await.unwrap();
    }
    assert!(!house.side().is_limited(house.clock.now()));
    drop(client);
    task.await.unwrap();
    assert_eq!(house.last_end().0, None, "the client left; nobody cut it");
}

#[tokio::test(start_paused = true)]
async fn a_short_refusal_then_a_long_one_leaves_the_mark_even_when_reading_goes_on() {
    let house = House::new();
    let (mut client, _task) = house.connect(Act::Endless(1000), 4096);
    client.write_all(GET).await.unwrap();
    house.wait(250).await;
    let mut some = [0; 4096];
    client.read_exact(&mut some).await.unwrap();
    tokio::task::yield_now().await;
    let side = house.side();
    house.wait(1).await;
    assert_eq!(side.refused_since(), None, "a new stretch counts after 100 ms");
    assert!(side.is_limited(house.clock.now()));
}

#[tokio::test(start_paused = true)]
async fn the_total_limit_cuts_a_client_that_does_not_read() {
    let house = House::new();
    let (mut client, task) = house.connect(Act::Endless(1000), 4096);
    client.write_all(GET).await.unwrap();
    tokio::task::yield_now().await;
    house.side().set_total_deadline(at(7000));
    // The deadline was unknown when the stretch began; the retry after 100 ms sees it.
    assert_eq!(task.await.unwrap(), at(7000));
    assert_eq!(house.last_end(), (Some(DisconnectReason::Total), true, at(7000)));
}

#[tokio::test(start_paused = true)]
async fn a_broken_body_ends_the_connection_without_a_last_chunk() {
    let house = House::new();
    let (mut client, task) = house.connect(Act::Breaks, 4096);
    client.write_all(GET).await.unwrap();
    let mut text = String::new();
    client.read_to_string(&mut text).await.unwrap();
    task.await.unwrap();
    assert!(!text.ends_with("0\r\n\r\n"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn what_a_refused_client_still_sends_does_not_reset_the_answer() {
    let house = House::new();
    let (mut client, task) = house.connect(Act::Short, 4096);
    client.write_all(b"POST / HTTP/1.1\r\nhost: g\r\ncontent-length: 100000\r\n\r\n").await.unwrap();
    answer(&mut client).await;
    client.write_all(&[b'x'; 50_000]).await.unwrap();
    assert_eq!(task.await.unwrap(), at(2000), "read and thrown away for two seconds");
}

#[tokio::test(start_paused = true)]
async fn a_drain_closes_the_idle_at_once_and_tells_the_open_ones_at_its_limit() {
    let house = House::new();
    let (mut idle, idle_task) = house.connect(Act::Short, 4096);
    idle.write_all(GET).await.unwrap();
    answer(&mut idle).await;
    let (mut open, open_task) = house.connect(Act::UntilDrained, 4096);
    open.write_all(GET).await.unwrap();
    house.wait(1000).await;
    house.drain.advance(DrainPhase::Draining);
    assert_eq!(idle.read(&mut [0; 16]).await.unwrap(), 0);
    drop(idle);
    assert_eq!(idle_task.await.unwrap(), at(1000));
    house.wait(5000).await;
    house.drain.advance(DrainPhase::Over);
    let text = answer(&mut open).await;
    assert!(text.contains("data: last\n\n"), "{text}");
    drop(open);
    assert_eq!(open_task.await.unwrap(), at(6000));
    assert_eq!(house.last_end(), (None, false, at(6000)));
}

#[tokio::test(start_paused = true)]
async fn what_is_left_after_the_last_words_is_cut() {
    let house = House::new();
    let (mut client, task) = house.connect(Act::Endless(1000), 4096);
    client.write_all(GET).await.unwrap();
    house.wait(10).await;
    for phase in [DrainPhase::Draining, DrainPhase::Over] {
        house.drain.advance(phase);
        house.wait(10).await;
    }
    house.drain.advance(DrainPhase::Cut);
    assert_eq!(task.await.unwrap(), at(30));
    assert_eq!(house.last_end().0, Some(DisconnectReason::Drain));
}

mod http2 {
    use h2::client::{self, ResponseFuture, SendRequest};
    use h2::{Reason, RecvStream};
    use tokio::sync::Notify;

    use super::*;

    async fn connect(house: &House, act: Act) -> (SendRequest<Bytes>, JoinHandle<()>, JoinHandle<Tick>) {
        let (client, task) = house.connect(act, 65_536);
        let mut builder = client::Builder::new();
        let (sender, connection) = builder.initial_connection_window_size(1 << 20).handshake(client).await.unwrap();
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        (sender.ready().await.unwrap(), driver, task)
    }

    /// A client that accepts no byte of a response until the test lets it.
    async fn connect_shut(house: &House, act: Act) -> (SendRequest<Bytes>, Arc<Notify>, JoinHandle<Tick>) {
        let (client, task) = house.connect(act, 65_536);
        let mut builder = client::Builder::new();
        let (sender, mut connection) = builder.initial_window_size(0).handshake(client).await.unwrap();
        let opens = Arc::new(Notify::new());
        let told = Arc::clone(&opens);
        tokio::spawn(async move {
            tokio::select! {
                _ = &mut connection => return,
                () = told.notified() => connection.set_initial_window_size(65_535).unwrap(),
            }
            let _ = connection.await;
        });
        (sender.ready().await.unwrap(), opens, task)
    }

    fn send(sender: &mut SendRequest<Bytes>) -> ResponseFuture {
        let request = Request::builder().uri("http://g/health").body(()).unwrap();
        sender.send_request(request, true).unwrap().0
    }

    async fn ask(sender: &mut SendRequest<Bytes>) -> RecvStream {
        send(sender).await.unwrap().into_body()
    }

    async fn end_of(body: &mut RecvStream) -> Option<Reason> {
        loop {
            match body.data().await {
                Some(Ok(data)) => body.flow_control().release_capacity(data.len()).unwrap(),
                Some(Err(error)) => return error.reason(),
                None => return None,
            }
        }
    }

    /// Behind unread bodies of other streams, as far as the windows allow them to be sent.
    #[tokio::test(start_paused = true)]
    async fn c99_a_client_that_leaves_is_seen_to_leave_behind_what_it_sent_on_other_streams() {
        let house = House::new();
        let (mut sender, driver, task) = connect(&house, Act::UntilDrained).await;
        let _body = ask(&mut sender).await;
        let mut uploads = Vec::new();
        for _ in 0..4 {
            let request = Request::builder().method("POST").uri("http://g/upload").body(()).unwrap();
            let (_, mut upload) = sender.send_request(request, false).unwrap();
            upload.send_data(Bytes::from(vec![b'x'; 1 << 20]), false).unwrap();
            uploads.push(upload);
        }
        house.wait(50).await;
        assert_eq!(house.seen.sides.lock().len(), 5);
        driver.abort();
        house.wait(1).await;
        assert_eq!(house.seen.severed.lock().len(), 5);
        assert_eq!(task.await.unwrap(), at(50));
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_before_the_handler_ends_its_stream_only() {
        let house = House::new();
        let (mut sender, _driver, _task) = connect(&house, Act::UntilDrained).await;
        let mut others = Vec::new();
        for _ in 0..20 {
            others.push(ask(&mut sender).await);
        }
        let request = Request::builder().uri("http://g/panic").body(()).unwrap();
        let response = sender.send_request(request, true).unwrap().0.await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["x-goodput-reason"]),
            (500, &"internal".parse().unwrap())
        );
        let mut body = response.into_body();
        assert!(body.data().await.unwrap().unwrap().starts_with(b"{\"error\""));
        assert_eq!(house.seen.severed.lock().len(), 0, "the others go on");
        house.drain.advance(DrainPhase::Over);
        for mut other in others {
            assert_eq!(end_of(&mut other).await, None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_streams_is_closed_after_the_idle_limit() {
        let house = House::new();
        let (mut sender, driver, task) = connect(&house, Act::Short).await;
        assert_eq!(end_of(&mut ask(&mut sender).await).await, None);
        driver.await.unwrap();
        assert_eq!(house.clock.now(), at(60_000));
        drop(sender);
        task.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_preface_without_a_request_is_closed_after_the_header_timeout() {
        let house = House::new();
        let (_sender, driver, task) = connect(&house, Act::Short).await;
        assert_eq!(task.await.unwrap(), at(10_000));
        driver.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_not_taken_is_limited_and_reset_and_the_others_live_on() {
        let house = House::new();
        let (mut sender, _driver, _task) = connect(&house, Act::Endless(100_000)).await;
        let mut stuck = ask(&mut sender).await;
        house.wait(101).await;
        let side = house.side();
        assert!(side.is_limited(house.clock.now()));
        let mut other = ask(&mut sender).await;
        for _ in 0..300 {
            house.wait(100).await;
            let data = other.data().await.unwrap().unwrap();
            other.flow_control().release_capacity(data.len()).unwrap();
        }
        assert_eq!(side.severed(), Some(DisconnectReason::WriteStall));
        assert!(end_of(&mut stuck).await.is_some(), "reset");
        assert_eq!(house.side().severed(), None);
        assert!(other.data().await.unwrap().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_whose_client_never_opens_a_window_is_limited_and_reset_too() {
        let house = House::new();
        let (mut sender, _opens, _task) = connect_shut(&house, Act::Endless(100)).await;
        let mut stuck = ask(&mut sender).await;
        house.wait(101).await;
        assert!(house.side().is_limited(house.clock.now()));
        house.wait(29_898).await;
        assert_eq!((house.side().severed(), house.seen.severed.lock().len()), (None, 0));
        house.wait(2).await;
        assert_eq!(house.last_end(), (Some(DisconnectReason::WriteStall), true, at(30_000)));
        assert!(end_of(&mut stuck).await.is_some(), "reset");
        let asked = house.seen.asked.load(Ordering::Relaxed);
        assert!((65_536..65_536 + 200).contains(&asked), "{asked}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_kept_whole_ends_before_its_client_takes_it() {
        let house = House::new();
        let (mut sender, opens, _task) = connect_shut(&house, Act::Few).await;
        let mut body = ask(&mut sender).await;
        house.wait(1).await;
        assert_eq!(house.last_end(), (None, false, at(0)));
        house.side().set_total_deadline(at(7000));
        house.wait(20_000).await;
        opens.notify_one();
        let mut text = Vec::new();
        while let Some(data) = body.data().await {
            text.extend_from_slice(&data.unwrap());
        }
        assert_eq!((text.as_slice(), house.clock.now()), (&b"okokokokok"[..], at(20_001)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_kept_whole_and_never_taken_is_reset_too() {
        let house = House::new();
        let (mut sender, _opens, _task) = connect_shut(&house, Act::Few).await;
        let mut body = ask(&mut sender).await;
        assert!(end_of(&mut body).await.is_some(), "reset");
        assert_eq!(house.clock.now(), at(30_000));
        assert_eq!((house.last_end(), house.seen.severed.lock().len()), ((None, false, at(0)), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_opens_its_window_late_gets_all_of_a_long_answer() {
        let house = House::new();
        let (mut sender, opens, _task) = connect_shut(&house, Act::Endless(1000)).await;
        let mut body = ask(&mut sender).await;
        house.wait(5000).await;
        opens.notify_one();
        let mut got = 0;
        while got < 350_000 {
            let data = body.data().await.unwrap().unwrap();
            assert!(data.iter().all(|byte| *byte == b'x'));
            body.flow_control().release_capacity(data.len()).unwrap();
            got += data.len();
        }
        let ahead = house.seen.asked.load(Ordering::Relaxed) - got;
        assert!(ahead <= 3 * 65_536, "{ahead}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_hears_of_the_drain_limit_while_its_clients_window_is_shut() {
        let house = House::new();
        let (mut sender, _opens, _task) = connect_shut(&house, Act::UntilDrained).await;
        let _body = ask(&mut sender).await;
        house.wait(500).await;
        house.drain.advance(DrainPhase::Over);
        house.wait(1).await;
        assert_eq!(house.last_end(), (None, true, at(500)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_while_the_window_is_shut_ends_its_stream_only_and_its_body_sees_why() {
        let house = House::new();
        let (mut sender, opens, _task) = connect_shut(&house, Act::Panics).await;
        let mut body = ask(&mut sender).await;
        opens.notify_one();
        assert!(end_of(&mut body).await.is_some(), "reset");
        assert_eq!((house.last_end(), house.seen.panics.load(Ordering::Relaxed)), ((None, false, at(0)), 1));
        assert_eq!(send(&mut sender).await.unwrap().status(), 200, "the connection lives on");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_ends_a_body_at_once_while_the_window_is_shut() {
        for act in [Act::UntilDrained, Act::Endless(1000)] {
            let house = House::new();
            let (mut sender, _opens, _task) = connect_shut(&house, act).await;
            let body = ask(&mut sender).await;
            house.wait(500).await;
            drop(body);
            house.wait(1).await;
            assert_eq!(house.last_end(), (None, true, at(500)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_whose_engine_is_silent_is_not_limited() {
        let house = House::new();
        let (mut sender, _driver, _task) = connect(&house, Act::UntilDrained).await;
        let _body = ask(&mut sender).await;
        house.wait(45_000).await;
        assert!(!house.side().is_limited(house.clock.now()));
        assert_eq!(house.side().refused_since(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_taken_slowly_is_neither_limited_nor_cut() {
        let house = House::new();
        let (mut sender, _driver, _task) = connect(&house, Act::Endless(1000)).await;
        let mut body = ask(&mut sender).await;
        for _ in 0..900 {
            house.wait(90).await;
            let data = body.data().await.unwrap().unwrap();
            body.flow_control().release_capacity(data.len()).unwrap();
        }
        let side = house.side();
        assert_eq!(side.severed(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_piece_reaches_the_client_whole() {
        let house = House::new();
        let (mut sender, _driver, _task) = connect(&house, Act::Endless(100_000)).await;
        let mut body = ask(&mut sender).await;
        let mut got = 0;
        while got < 350_000 {
            let data = body.data().await.unwrap().unwrap();
            body.flow_control().release_capacity(data.len()).unwrap();
            got += data.len();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_broken_body_resets_its_stream() {
        let house = House::new();
        let (mut sender, _driver, _task) = connect(&house, Act::Breaks).await;
        let mut body = ask(&mut sender).await;
        assert_eq!(body.data().await.unwrap().unwrap(), "data: a\n\n", "the reset takes nothing along");
        assert_eq!(end_of(&mut body).await, Some(Reason::INTERNAL_ERROR));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_resets_a_stream_ends_its_body_at_once() {
        let house = House::new();
        let (mut sender, _driver, _task) = connect(&house, Act::UntilDrained).await;
        let body = ask(&mut sender).await;
        house.wait(500).await;
        drop(body);
        house.wait(1).await;
        assert_eq!(house.last_end(), (None, false, at(500)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_lets_streams_end_tells_them_at_its_limit_and_cuts_the_rest() {
        let house = House::new();
        let (mut sender, driver, task) = connect(&house, Act::UntilDrained).await;
        let mut body = ask(&mut sender).await;
        house.drain.advance(DrainPhase::Draining);
        house.wait(5000).await;
        assert!(!task.is_finished());
        house.drain.advance(DrainPhase::Over);
        let mut text = Vec::new();
        while let Some(data) = body.data().await {
            text.extend_from_slice(&data.unwrap());
        }
        assert_eq!(text, b"data: a\n\ndata: last\n\n");
        drop((sender, body));
        driver.await.unwrap();
        assert_eq!(task.await.unwrap(), at(5000));

        let house = House::new();
        let (mut sender, driver, task) = connect(&house, Act::Endless(1000)).await;
        let _body = ask(&mut sender).await;
        house.wait(200).await;
        house.drain.advance(DrainPhase::Over);
        house.wait(1000).await;
        house.drain.advance(DrainPhase::Cut);
        driver.await.unwrap();
        task.await.unwrap();
        assert_eq!(house.last_end().0, Some(DisconnectReason::Drain));
    }
}

//! HTTP/1.1 connections to engines, kept for a short while.
//!
//! One small stack of idle lines per engine, the last one used first. A line belongs to one
//! request at a time and comes back only when the answer's body ended whole and the request's
//! body was sent whole; dropped at any other moment it closes the connection at once, which
//! is how an engine learns of a cancel. Lines are not used again after four seconds: engines
//! close theirs after five.
//!
//! What hyper's errors do not tell is counted underneath it: whether any byte of an answer
//! came before a connection broke. Answers whose framing cannot be trusted are refused here.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::TRANSFER_ENCODING;
use http::{Request, Response, StatusCode, response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, RwLock};
use tokio::task::JoinHandle;

use crate::clock::Clock;
use crate::dial::{Dial, EngineAddress, Roots};
use crate::route::retry::Happened;
use crate::route::settings::Pool;
use crate::units::{EngineId, PoolId, Tick};

mod counted;
mod frames;
use counted::{Counted, Meter};
pub use frames::Frames;

/// An idle line is not used again after this: uvicorn and llama.cpp close at five seconds.
pub const IDLE: Duration = Duration::from_secs(4);

/// Idle lines kept per engine; more are closed, the oldest first.
pub const MOST_IDLE: usize = 512;

/// An answer's head may be this large, and one read or write buffer of a line.
const BUFFER: usize = 64 * 1024;

/// All idle lines of the gateway.
pub struct Lines {
    dial: Arc<dyn Dial>,
    clock: Clock,
    homes: RwLock<Map<PoolId, Map<EngineId, Arc<Home>>>>,
}

type Map<K, V> = HashMap<K, V, ahash::RandomState>;

/// The idle lines of one engine.
struct Home {
    clock: Clock,
    idle: Mutex<Idle>,
}

struct Idle {
    /// Where the lines go, and a number that changes with it: lines of older numbers do not
    /// come back.
    to: EngineAddress,
    roots: Option<Roots>,
    turn: u64,
    /// Oldest first.
    lines: VecDeque<(Tick, Link)>,
}

/// A connection, owned by whoever may use it. Its task ends with it.
struct Link {
    sender: SendRequest<Frames>,
    meter: Arc<Meter>,
    task: JoinHandle<()>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A connection to an engine, for one request.
#[must_use]
pub struct Line {
    link: Link,
    home: Arc<Home>,
    turn: u64,
    reused: bool,
}

/// No connection to the engine could be made.
#[derive(Debug, thiserror::Error)]
#[error("no connection")]
pub struct ConnectFailed(#[source] pub io::Error);

/// Why no answer came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// The engine closed or reset the connection.
    Closed,
    /// What came is not HTTP, or not framed in a way that can be trusted.
    Garbage,
    /// The head of the answer was larger than 64 KiB or had more than 100 lines.
    HeadTooLarge,
}

/// A request got no answer on this line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no answer: {why:?} after {bytes_seen} bytes (reused: {reused})")]
pub struct SendFailed {
    /// Why.
    pub why: NoAnswer,
    /// Whether the line had served a request before.
    pub reused: bool,
    /// Bytes that came since the request was sent.
    pub bytes_seen: u64,
}

impl SendFailed {
    /// The engine had given the idle connection up before our request reached it.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.why == NoAnswer::Closed && self.reused && self.bytes_seen == 0
    }

    /// What the rules of retries make of it.
    #[must_use]
    pub fn happened(&self) -> Happened {
        if self.is_stale() { Happened::StaleLine } else { Happened::Broken }
    }
}

/// An engine's answer. Its body owns the line.
pub type Answered = Response<EngineBody>;

/// The body of an engine's answer.
pub struct EngineBody {
    inner: Incoming,
    line: Option<Line>,
}

/// An answer's body broke off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyBroken {
    /// The engine closed or reset the connection before the body's end.
    #[error("the engine closed the connection before the end of its answer")]
    Closed,
    /// The body's framing cannot be read.
    #[error("the framing of the engine's answer is broken")]
    Framing,
}

impl Lines {
    /// No line yet.
    #[must_use]
    pub fn new(dial: Arc<dyn Dial>, clock: Clock) -> Self {
        Lines { dial, clock, homes: RwLock::default() }
    }

    /// A line to this engine: an idle one, else a fresh one.
    ///
    /// # Errors
    /// No connection within the pool's `connect_timeout`.
    pub async fn take(&self, pool: &Pool, engine: &EngineId, to: &EngineAddress) -> Result<Line, ConnectFailed> {
        let home = self.home(pool, engine, to);
        match home.pop(to, pool.roots.as_ref()) {
            Ok(line) => Ok(line),
            Err(turn) => self.open(pool, to, home, turn).await,
        }
    }

    /// A line to this engine that stands already, if there is one.
    #[must_use]
    pub fn standing(&self, pool: &Pool, engine: &EngineId, to: &EngineAddress) -> Option<Line> {
        self.home(pool, engine, to).pop(to, pool.roots.as_ref()).ok()
    }

    /// A line that nobody used before.
    ///
    /// # Errors
    /// No connection within the pool's `connect_timeout`.
    pub async fn fresh(&self, pool: &Pool, engine: &EngineId, to: &EngineAddress) -> Result<Line, ConnectFailed> {
        let home = self.home(pool, engine, to);
        let turn = home.idle.lock().turn_to(to, pool.roots.as_ref());
        self.open(pool, to, home, turn).await
    }

    /// Closes what has been idle for too long, and forgets engines without lines.
    pub fn sweep(&self) {
        let now = self.clock.now();
        let mut expired = Vec::new();
        let mut homes = self.homes.write();
        for engines in homes.values_mut() {
            engines.retain(|_, home| {
                let mut idle = home.idle.lock();
                idle.expire(now, &mut expired);
                !idle.lines.is_empty() || Arc::strong_count(home) > 1
            });
        }
        homes.retain(|_, engines| !engines.is_empty());
    }

    /// Sweeps once a second, for ever. The owner of the lines runs it and drops it.
    pub async fn keep_swept(&self) {
        loop {
            self.clock.sleep_until(Some(self.clock.now() + Duration::from_secs(1))).await;
            self.sweep();
        }
    }

    /// Idle lines to an engine.
    #[must_use]
    pub fn idle(&self, pool: &PoolId, engine: &EngineId) -> usize {
        let homes = self.homes.read();
        let home = homes.get(pool).and_then(|engines| engines.get(engine));
        home.map_or(0, |home| home.idle.lock().lines.len())
    }

    fn home(&self, pool: &Pool, engine: &EngineId, to: &EngineAddress) -> Arc<Home> {
        let known = self.homes.read().get(&pool.id).and_then(|engines| engines.get(engine)).cloned();
        known.unwrap_or_else(|| {
            let mut homes = self.homes.write();
            let engines = homes.entry(pool.id.clone()).or_default();
            let new = || Arc::new(Home::new(self.clock, to, pool.roots.as_ref()));
            engines.entry(engine.clone()).or_insert_with(new).clone()
        })
    }

    async fn open(&self, pool: &Pool, to: &EngineAddress, home: Arc<Home>, turn: u64) -> Result<Line, ConnectFailed> {
        let deadline = self.clock.now() + pool.connect_timeout;
        let io = tokio::select! {
            io = self.dial.dial(to, pool.roots.as_ref()) => io.map_err(ConnectFailed)?,
            () = self.clock.sleep_until(Some(deadline)) => {
                return Err(ConnectFailed(io::ErrorKind::TimedOut.into()));
            }
        };
        let meter = Arc::new(Meter::default());
        let io = TokioIo::new(Counted::new(io, meter.clone()));
        let handshake = http1::Builder::new().max_buf_size(BUFFER).handshake(io).await;
        let (sender, connection) = handshake.map_err(|error| ConnectFailed(io::Error::other(error)))?;
        // How the connection ends is told to whoever waits for its answer.
        let task = tokio::spawn(connection.map(drop));
        Ok(Line { link: Link { sender, meter, task }, home, turn, reused: false })
    }
}

impl Home {
    fn new(clock: Clock, to: &EngineAddress, roots: Option<&Roots>) -> Self {
        let idle = Idle { to: to.clone(), roots: roots.cloned(), turn: 0, lines: VecDeque::new() };
        Home { clock, idle: Mutex::new(idle) }
    }

    /// The line that became idle last, if it can be used; else the number for a new one.
    fn pop(self: &Arc<Self>, to: &EngineAddress, roots: Option<&Roots>) -> Result<Line, u64> {
        let now = self.clock.now();
        let mut useless = Vec::new();
        let mut idle = self.idle.lock();
        let turn = idle.turn_to(to, roots);
        idle.expire(now, &mut useless);
        let mut busy = Vec::new();
        let found = loop {
            match idle.lines.pop_back() {
                None => break None,
                Some((_, link)) if link.sender.is_closed() => useless.push(link),
                // Its task has not yet seen that nothing came behind the last answer.
                Some((since, link)) if !link.sender.is_ready() => busy.push((since, link)),
                Some((_, link)) => break Some(link),
            }
        };
        idle.lines.extend(busy.into_iter().rev());
        drop(idle);
        found.map(|link| Line { link, home: self.clone(), turn, reused: true }).ok_or(turn)
    }

    fn put(&self, link: Link, turn: u64) {
        let now = self.clock.now();
        let mut useless = Vec::new();
        let mut idle = self.idle.lock();
        if idle.turn == turn {
            idle.expire(now, &mut useless);
            idle.lines.push_back((now, link));
            if idle.lines.len() > MOST_IDLE {
                useless.extend(idle.lines.pop_front().map(|(_, link)| link));
            }
        }
        drop(idle);
    }
}

impl Idle {
    /// Lines go here from now on; those that go elsewhere are closed.
    fn turn_to(&mut self, to: &EngineAddress, roots: Option<&Roots>) -> u64 {
        let same_roots = match (&self.roots, roots) {
            (None, None) => true,
            (Some(old), Some(new)) => Arc::ptr_eq(old, new) || old == new,
            _ => false,
        };
        if !same_roots || self.to != *to {
            self.to = to.clone();
            self.turn += 1;
            self.lines.clear();
        }
        self.roots = roots.cloned();
        self.turn
    }

    /// Moves lines that are too old out, to be closed outside the lock.
    fn expire(&mut self, now: Tick, expired: &mut Vec<Link>) {
        while self.lines.front().is_some_and(|(since, _)| now - *since >= IDLE) {
            expired.extend(self.lines.pop_front().map(|(_, link)| link));
        }
    }
}

impl Line {
    /// Whether it served a request before.
    #[must_use]
    pub fn is_reused(&self) -> bool {
        self.reused
    }

    /// Sends a request (origin-form target, `host` set); the future waits for the head of its
    /// answer. Interim answers (1xx) are skipped. Dropping the future closes the connection.
    ///
    /// # Errors
    /// The connection broke, or the answer cannot be trusted; the connection is closed.
    pub fn send(mut self, mut request: Request<Frames>) -> impl Future<Output = Result<Answered, SendFailed>> + Send {
        let before = self.link.meter.begin();
        request.body_mut().tell(self.link.meter.clone());
        // The request is on its way before the future begins: no copy of it waits in there.
        let sent = self.link.sender.send_request(request);
        async move { self.answered(sent.await, before) }
    }

    fn answered(self, result: hyper::Result<Response<Incoming>>, before: u64) -> Result<Answered, SendFailed> {
        let failed = |why, line: &Line| SendFailed {
            why,
            reused: line.reused,
            bytes_seen: line.link.meter.received.load(Ordering::Acquire) - before,
        };
        match result {
            Ok(answer) => {
                let (head, body) = answer.into_parts();
                if !is_trusted(&head) {
                    return Err(failed(NoAnswer::Garbage, &self));
                }
                let mut body = EngineBody { inner: body, line: Some(self) };
                if body.inner.is_end_stream() {
                    body.give_back();
                }
                Ok(Response::from_parts(head, body))
            }
            // It never left: whatever came on the line before is no answer to it.
            Err(error) if error.is_canceled() => Err(SendFailed { bytes_seen: 0, ..failed(NoAnswer::Closed, &self) }),
            Err(error) if error.is_parse_too_large() => Err(failed(NoAnswer::HeadTooLarge, &self)),
            Err(error) if error.is_parse() => Err(failed(NoAnswer::Garbage, &self)),
            Err(_) => Err(failed(NoAnswer::Closed, &self)),
        }
    }
}

/// hyper reads a body of unknown coding to the connection's end, and takes a switch of
/// protocols for an answer. We asked for neither.
fn is_trusted(head: &response::Parts) -> bool {
    let mut codings = head.headers.get_all(TRANSFER_ENCODING).iter();
    let chunked_or_none = match (codings.next(), codings.next()) {
        (None, _) => true,
        (Some(coding), None) => coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"),
        _ => false,
    };
    chunked_or_none && head.status != StatusCode::SWITCHING_PROTOCOLS
}

impl EngineBody {
    /// The body ended whole: the line may serve another request, if ours has left it whole.
    fn give_back(&mut self) {
        let Some(Line { link, home, turn, .. }) = self.line.take() else { return };
        if link.meter.sent_whole.load(Ordering::Acquire) && !link.sender.is_closed() {
            home.put(link, turn);
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = BodyBroken;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyBroken>>> {
        Poll::Ready(match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            Some(Ok(frame)) => {
                if self.inner.is_end_stream() {
                    self.give_back();
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                self.line = None;
                Some(Err(broken(&error)))
            }
            None => {
                self.give_back();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

fn broken(error: &hyper::Error) -> BodyBroken {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => BodyBroken::Framing,
        _ => BodyBroken::Closed,
    }
}

#[cfg(test)]
mod tests;

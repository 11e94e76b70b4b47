//! A pool of HTTP/1.1 connections to engines, kept for a few seconds.
//!
//! One small stack of idle connections per engine, last used first. A connection serves one request at a
//! time and returns only after the response's body ended completely and the request's body was sent
//! completely; dropped at any other moment it is closed at once, which is how an engine learns of a
//! cancel. Connections are not reused after four seconds idle, because engines close theirs after
//! five.
//!
//! A connection has no task of its own: it is written and read by the task that waits for the response,
//! in the same poll that passes the response on. Requests are not pipelined, so little of HTTP is needed:
//! `request_writer` writes a request, and the codec ([`http1`](crate::http1)) reads a response and rejects one
//! whose framing cannot be trusted.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::response;
use http_body::{Body, Frame, SizeHint};
use parking_lot::{Mutex, RwLock};

use crate::clock::Clock;
use crate::dial::{BoxedIo, Dial, EngineAddress, Roots, is_lack, is_refusal};
use crate::http1::{Content, Decoded, Framing, FramingError, ResponseHead, ResponseHeadError, take_response_head};
use crate::route::settings::PoolSettings;
use crate::types::{EngineId, PoolId, Tick};

mod connection;
mod request_writer;
use connection::UpstreamConn;
pub use request_writer::RequestWriter;

/// Longest idle time of a reused connection: uvicorn and llama.cpp close at five seconds.
pub const IDLE: Duration = Duration::from_secs(4);

/// Most idle connections per engine; the oldest are closed first.
pub const MOST_IDLE: usize = 512;

/// Most bytes per read.
const BUFFER: usize = 64 * 1024;

/// All idle connections of the gateway.
pub struct ConnPool {
    dial: Arc<dyn Dial>,
    clock: Clock,
    homes: RwLock<ConnsByPool>,
}

/// By pool (few, so a list) and engine.
type ConnsByPool = Vec<(PoolId, HashMap<EngineId, Arc<EngineConns>, ahash::RandomState>)>;

/// The idle connections of one engine.
struct EngineConns {
    clock: Clock,
    idle: Mutex<IdleConns>,
}

struct IdleConns {
    /// Address of the connections, and a generation that changes with it; connections of older generations
    /// are not returned.
    to: Arc<EngineAddress>,
    roots: Option<Roots>,
    turn: u64,
    /// Oldest first.
    lines: VecDeque<(Tick, Box<UpstreamConn>)>,
}

/// A connection to an engine for one request.
#[must_use]
pub struct PooledConn {
    /// Boxed because it passes through many owners per request.
    wire: Box<UpstreamConn>,
    home: Arc<EngineConns>,
    turn: u64,
    reused: bool,
}

/// A connection still to be made, with its place in the pool.
#[must_use]
pub struct ConnSlot {
    home: Arc<EngineConns>,
    turn: u64,
}

/// No connection to the engine.
#[derive(Debug, thiserror::Error)]
#[error("no connection")]
pub struct ConnectFailed(#[source] pub io::Error);

impl ConnectFailed {
    /// Whether the gateway itself could open no connection, so that the engine was not contacted.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        is_lack(&self.0)
    }

    /// Whether the connection was refused.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        is_refusal(&self.0)
    }
}

/// Why no response came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseError {
    /// The engine closed or reset the connection.
    Closed,
    /// Not HTTP, or not framed in a way that can be trusted.
    Garbage,
    /// The response head was larger than 64 KiB or had more than 100 lines.
    HeadTooLarge,
}

impl From<ResponseHeadError> for ResponseError {
    fn from(error: ResponseHeadError) -> Self {
        match error {
            ResponseHeadError::Garbage => ResponseError::Garbage,
            ResponseHeadError::TooLarge => ResponseError::HeadTooLarge,
        }
    }
}

/// A request without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no answer: {why:?} after {bytes_seen} bytes (reused: {reused})")]
pub struct SendError {
    /// Why.
    pub why: ResponseError,
    /// Whether the connection had served a request before.
    pub reused: bool,
    /// Bytes received since the request was sent.
    pub bytes_seen: u64,
}

impl SendError {
    /// Whether the engine had closed the idle connection before the request reached it.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.why == ResponseError::Closed && self.reused && self.bytes_seen == 0
    }
}

/// An engine's response.
pub struct UpstreamResponse {
    /// Its head, shared with the connection, which derives the next head from it: mostly equal, and then
    /// without a copy.
    pub head: Arc<response::Parts>,
    /// Properties of the body by the header fields.
    pub content: Content,
    /// Its body, which owns the connection.
    pub body: UpstreamBody,
}

/// The body of an engine's response.
pub struct UpstreamBody {
    framing: Framing,
    /// `None` once returned or closed.
    line: Option<PooledConn>,
    /// The rest of the request that was not written when the response came.
    unsent: Option<Box<RequestWriter>>,
    /// Whether the connection may be reused afterwards.
    keep_alive: bool,
}

/// A response body ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyBroken {
    /// The engine closed or reset the connection before the body's end.
    #[error("the engine closed the connection before the end of its answer")]
    Closed,
    /// Invalid body framing.
    #[error("the framing of the engine's answer is broken")]
    Framing,
}

impl ConnPool {
    /// A pool without connections.
    #[must_use]
    pub fn new(dial: Arc<dyn Dial>, clock: Clock) -> Self {
        ConnPool { dial, clock, homes: RwLock::default() }
    }

    /// A connection to this engine: idle or fresh.
    #[cfg(test)]
    async fn take(
        &self,
        pool: &PoolSettings,
        engine: &EngineId,
        to: &Arc<EngineAddress>,
    ) -> Result<PooledConn, ConnectFailed> {
        let checkout_idle =
            std::future::poll_fn(|cx| Poll::Ready(self.checkout_idle(pool, engine, to, self.clock.now(), cx)));
        match checkout_idle.await {
            Ok(line) => Ok(line),
            Err(place) => self.open(pool, to, place).await,
        }
    }

    /// An idle connection to this engine, with nothing to read. Registers the task to be woken by input.
    ///
    /// # Errors
    /// The slot for a new connection if there is none.
    pub fn checkout_idle(
        &self,
        pool: &PoolSettings,
        engine: &EngineId,
        to: &Arc<EngineAddress>,
        at: Tick,
        cx: &mut Context<'_>,
    ) -> Result<PooledConn, ConnSlot> {
        let home = self.home(pool, engine, to);
        home.pop(to, pool.roots.as_ref(), at, cx).map_err(|turn| ConnSlot { home, turn })
    }

    /// The slot for a new connection.
    pub fn slot(&self, pool: &PoolSettings, engine: &EngineId, to: &Arc<EngineAddress>) -> ConnSlot {
        let home = self.home(pool, engine, to);
        let turn = home.idle.lock().turn_to(to, pool.roots.as_ref());
        ConnSlot { home, turn }
    }

    /// A new connection.
    #[cfg(test)]
    async fn fresh(
        &self,
        pool: &PoolSettings,
        engine: &EngineId,
        to: &Arc<EngineAddress>,
    ) -> Result<PooledConn, ConnectFailed> {
        self.open(pool, to, self.slot(pool, engine, to)).await
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// No connection within the pool's `connect_timeout`.
    pub async fn open(
        &self,
        pool: &PoolSettings,
        to: &EngineAddress,
        place: ConnSlot,
    ) -> Result<PooledConn, ConnectFailed> {
        let deadline = self.clock.now() + pool.connect_timeout;
        let io = tokio::select! {
            io = self.dial(pool, to) => io.map_err(ConnectFailed)?,
            () = self.clock.sleep_until(Some(deadline)) => {
                return Err(ConnectFailed(io::ErrorKind::TimedOut.into()));
            }
        };
        Ok(PooledConn { wire: Box::new(UpstreamConn::new(io)), home: place.home, turn: place.turn, reused: false })
    }

    /// Dials. If the process has no file descriptor left, idle connections are closed to free some.
    async fn dial(&self, pool: &PoolSettings, to: &EngineAddress) -> io::Result<BoxedIo> {
        match self.dial.dial(to, pool.roots.as_ref()).await {
            Err(error) if is_lack(&error) && self.close_old() > 0 => self.dial.dial(to, pool.roots.as_ref()).await,
            came => came,
        }
    }

    /// Closes the older half of each engine's idle connections; returns how many.
    fn close_old(&self) -> usize {
        let mut old = Vec::new();
        for home in self.homes.read().iter().flat_map(|(_, engines)| engines.values()) {
            let mut idle = home.idle.lock();
            let half = idle.lines.len().div_ceil(2);
            old.extend(idle.lines.drain(..half));
        }
        old.len()
    }

    /// Closes connections that were idle for too long, and removes engines without any.
    pub fn sweep(&self) {
        let now = self.clock.now();
        let mut expired = Vec::new();
        let mut homes = self.homes.write();
        for (_, engines) in homes.iter_mut() {
            engines.retain(|_, home| {
                let mut idle = home.idle.lock();
                idle.expire(now, &mut expired);
                !idle.lines.is_empty() || Arc::strong_count(home) > 1
            });
        }
        homes.retain(|(_, engines)| !engines.is_empty());
    }

    /// Sweeps once a second, forever. The pool's owner runs and drops it.
    pub async fn run_sweeper(&self) {
        loop {
            self.clock.sleep_until(Some(self.clock.now() + Duration::from_secs(1))).await;
            self.sweep();
        }
    }

    /// Number of idle connections to an engine.
    #[must_use]
    pub fn idle(&self, pool: &PoolId, engine: &EngineId) -> usize {
        let homes = self.homes.read();
        let home = known(&homes, pool, engine);
        home.map_or(0, |home| home.idle.lock().lines.len())
    }

    fn home(&self, pool: &PoolSettings, engine: &EngineId, to: &Arc<EngineAddress>) -> Arc<EngineConns> {
        let home = known(&self.homes.read(), &pool.id, engine).cloned();
        home.unwrap_or_else(|| {
            let mut homes = self.homes.write();
            let place = homes.iter().position(|(known, _)| *known == pool.id).unwrap_or_else(|| {
                homes.push((pool.id.clone(), HashMap::default()));
                homes.len() - 1
            });
            let new = || Arc::new(EngineConns::new(self.clock, to, pool.roots.as_ref()));
            homes[place].1.entry(engine.clone()).or_insert_with(new).clone()
        })
    }
}

fn known<'a>(homes: &'a ConnsByPool, pool: &PoolId, engine: &EngineId) -> Option<&'a Arc<EngineConns>> {
    homes.iter().find(|(known, _)| known == pool)?.1.get(engine)
}

impl EngineConns {
    fn new(clock: Clock, to: &Arc<EngineAddress>, roots: Option<&Roots>) -> Self {
        let idle = IdleConns { to: Arc::clone(to), roots: roots.cloned(), turn: 0, lines: VecDeque::new() };
        EngineConns { clock, idle: Mutex::new(idle) }
    }

    /// The connection that became idle last, if usable; else the generation for a new one.
    fn pop(
        self: &Arc<Self>,
        to: &Arc<EngineAddress>,
        roots: Option<&Roots>,
        at: Tick,
        cx: &mut Context<'_>,
    ) -> Result<PooledConn, u64> {
        let mut useless = Vec::new();
        let mut idle = self.idle.lock();
        let turn = idle.turn_to(to, roots);
        idle.expire(at, &mut useless);
        let found = loop {
            match idle.lines.pop_back() {
                None => break None,
                Some((_, mut wire)) => match wire.is_reusable(cx) {
                    true => break Some(wire),
                    false => useless.push(wire),
                },
            }
        };
        drop(idle);
        found.map(|wire| PooledConn { wire, home: self.clone(), turn, reused: true }).ok_or(turn)
    }

    fn checkin(&self, wire: Box<UpstreamConn>, turn: u64) {
        let now = self.clock.now();
        let mut useless = Vec::new();
        let mut idle = self.idle.lock();
        if idle.turn == turn {
            idle.expire(now, &mut useless);
            idle.lines.push_back((now, wire));
            if idle.lines.len() > MOST_IDLE {
                useless.extend(idle.lines.pop_front().map(|(_, wire)| wire));
            }
        }
        drop(idle);
    }
}

impl IdleConns {
    /// Sets the address; connections to another one are closed.
    fn turn_to(&mut self, to: &Arc<EngineAddress>, roots: Option<&Roots>) -> u64 {
        let same_roots = match (&self.roots, roots) {
            (None, None) => true,
            (Some(old), Some(new)) => Arc::ptr_eq(old, new) || old == new,
            _ => false,
        };
        let is_same = Arc::ptr_eq(&self.to, to) || self.to == *to;
        if !same_roots || !is_same {
            self.to = Arc::clone(to);
            self.turn += 1;
            self.lines.clear();
        }
        self.roots = roots.cloned();
        self.turn
    }

    /// Moves expired connections out, to be closed outside the lock.
    #[expect(clippy::vec_box, reason = "they are in their boxes already")]
    fn expire(&mut self, now: Tick, expired: &mut Vec<Box<UpstreamConn>>) {
        while self.lines.front().is_some_and(|(since, _)| now - *since >= IDLE) {
            expired.extend(self.lines.pop_front().map(|(_, wire)| wire));
        }
    }
}

impl PooledConn {
    /// Whether it served a request before.
    #[cfg(test)]
    fn is_reused(&self) -> bool {
        self.reused
    }

    /// Sends a request; the future resolves to the response's head. Interim responses (1xx) are
    /// skipped. Dropping the future closes the connection.
    pub fn send(self, request: RequestWriter) -> PendingResponse {
        let before = self.wire.received;
        PendingResponse { line: Some(self), unsent: Some(request), stuck: false, before, interim: 0 }
    }
}

/// A request until its response head has come. Fails with [`SendError`] if the connection broke or the
/// response cannot be trusted; the connection is then closed.
#[must_use = "nothing is written before it is polled"]
pub struct PendingResponse {
    /// `None` once done.
    line: Option<PooledConn>,
    /// `None` once everything was written, or cannot be.
    unsent: Option<RequestWriter>,
    /// Whether the rest could not be written.
    stuck: bool,
    /// Bytes received on the connection before this request.
    before: u64,
    /// Bytes of interim responses.
    interim: usize,
}

impl PendingResponse {
    /// Writes what can be written now.
    pub fn write(&mut self, cx: &mut Context<'_>) {
        // An engine may respond before it has read everything, and then close; a failed write does not
        // matter as long as a response comes.
        if let (Some(unsent), Some(line)) = (&mut self.unsent, &mut self.line)
            && let Poll::Ready(written) = unsent.poll(&mut line.wire.io, cx)
        {
            self.unsent = None;
            self.stuck = written.is_err();
        }
    }

    /// Whether the rest of the request could not be written.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.stuck
    }
}

impl Future for PendingResponse {
    type Output = Result<UpstreamResponse, SendError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        this.write(cx);
        let wire = &mut this.line.as_mut().expect("not polled after it was ready").wire;
        loop {
            let failed = match ready!(wire.poll_read(cx)) {
                Ok(0) | Err(_) => ResponseError::Closed,
                Ok(_) => match take_response_head(&mut wire.buffer, &mut this.interim, &mut wire.known) {
                    Ok(None) => continue,
                    Ok(Some(head)) => {
                        let ResponseHead { parts, content, framing, keep_alive } = head;
                        let unsent = this.unsent.take().map(Box::new);
                        let keep_alive = keep_alive && !this.stuck;
                        let mut body = UpstreamBody { framing, line: this.line.take(), unsent, keep_alive };
                        body.give_back_at_end();
                        return Poll::Ready(Ok(UpstreamResponse { head: parts, content, body }));
                    }
                    Err(why) => why.into(),
                },
            };
            let bytes_seen = wire.received - this.before;
            let reused = this.line.take().is_some_and(|line| line.reused);
            return Poll::Ready(Err(SendError { why: failed, reused, bytes_seen }));
        }
    }
}

impl UpstreamBody {
    /// Returns the connection once the body has ended completely, if the whole request was written and no
    /// bytes follow the response.
    fn give_back_at_end(&mut self) {
        if !self.framing.is_over() {
            return;
        }
        let Some(PooledConn { mut wire, home, turn, .. }) = self.line.take() else { return };
        if self.keep_alive && self.unsent.is_none() && wire.buffer.is_empty() {
            wire.shrink();
            home.checkin(wire, turn);
        }
    }

    /// Continues to write a request whose response came early.
    fn write_on(&mut self, cx: &mut Context<'_>) {
        if let (Some(unsent), Some(line)) = (&mut self.unsent, &mut self.line)
            && let Poll::Ready(written) = unsent.poll(&mut line.wire.io, cx)
        {
            self.unsent = None;
            self.keep_alive &= written.is_ok();
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = BodyBroken;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyBroken>>> {
        let this = &mut *self;
        this.write_on(cx);
        let broken = loop {
            let Some(line) = &mut this.line else { return Poll::Ready(None) };
            match this.framing.step(&mut line.wire.buffer) {
                Ok(Decoded::Data(bytes)) => {
                    this.give_back_at_end();
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Ok(Decoded::End) => {
                    this.give_back_at_end();
                    return Poll::Ready(None);
                }
                Ok(Decoded::More) => match ready!(line.wire.poll_read(cx)) {
                    Ok(0) if this.framing == Framing::ToEnd => {
                        this.line = None;
                        return Poll::Ready(None);
                    }
                    Ok(0) => break BodyBroken::Closed,
                    Ok(_) => {}
                    Err(error) => break broken(&error),
                },
                Err(FramingError) => break BodyBroken::Framing,
            }
        };
        this.line = None;
        Poll::Ready(Some(Err(broken)))
    }

    fn is_end_stream(&self) -> bool {
        self.line.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.framing {
            Framing::Length(left) => SizeHint::with_exact(left),
            Framing::Chunked(_) | Framing::ToEnd => SizeHint::default(),
        }
    }
}

fn broken(error: &io::Error) -> BodyBroken {
    match error.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => BodyBroken::Framing,
        _ => BodyBroken::Closed,
    }
}

#[cfg(test)]
mod tests;

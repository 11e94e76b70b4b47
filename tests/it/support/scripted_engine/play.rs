//! Plays scripts over connections.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::ReadBuf;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::request::{Head, take_body, take_head};
use super::wire::{PipeEnd, Wire, pipe};
use super::{EngineLog, Received, Script, Step};
use goodput::clock::Clock;
use goodput::types::Tick;

/// Capacity of an in-memory connection per direction: enough for heads and events, small enough for
/// back-pressure.
const PIPE_CAPACITY: usize = 64 * 1024;

type ScriptFor = Arc<dyn Fn(&Received) -> Script + Send + Sync>;

/// An engine that plays a script for each request. Clones share it; its connections end when the last one is
/// dropped.
#[derive(Clone)]
pub struct ScriptedEngine {
    part: EngineShared,
    tasks: Arc<Mutex<JoinSet<()>>>,
}

/// State shared by an engine's connections.
#[derive(Clone)]
struct EngineShared {
    clock: Clock,
    answers: ScriptFor,
    log: EngineLog,
}

impl ScriptedEngine {
    /// An engine whose script is a function of the request.
    pub fn new(clock: Clock, answers: impl Fn(&Received) -> Script + Send + Sync + 'static) -> Self {
        let part = EngineShared { clock, answers: Arc::new(answers), log: EngineLog::default() };
        ScriptedEngine { part, tasks: Arc::default() }
    }

    /// An engine with one script for all requests.
    #[must_use]
    pub fn always(clock: Clock, script: Script) -> Self {
        ScriptedEngine::new(clock, move |_| script.clone())
    }

    /// An engine that plays the scripts in turn, and then the last one again. Without scripts it is
    /// silent.
    #[must_use]
    pub fn in_turn(clock: Clock, scripts: Vec<Script>) -> Self {
        ScriptedEngine::new(clock, move |request| {
            let last = scripts.len().saturating_sub(1);
            scripts.get(request.number.min(last)).cloned().unwrap_or_else(|| Script::new().silence())
        })
    }

    /// The requests received so far.
    #[must_use]
    pub fn log(&self) -> &EngineLog {
        &self.part.log
    }

    /// Opens an in-memory connection and returns the caller's end.
    #[must_use]
    pub fn connect(&self) -> PipeEnd {
        let (ours, theirs) = pipe(PIPE_CAPACITY);
        self.serve(ours);
        theirs
    }

    /// Serves a connection in its own task.
    pub fn serve(&self, wire: impl Wire) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(converse(self.part.clone(), wire));
    }

    /// Listens on a free loopback port.
    ///
    /// # Errors
    /// Binding errors.
    pub async fn listen(&self) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let part = self.part.clone();
        self.tasks.lock().spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let _ = socket.set_nodelay(true);
                while connections.try_join_next().is_some() {}
                connections.spawn(converse(part.clone(), socket));
            }
        });
        Ok(address)
    }
}

/// Serves one connection: request, script, request, ...
async fn converse<W: Wire>(part: EngineShared, wire: W) {
    let number = part.log.opened();
    let mut line = EngineConnection { wire, inbox: BytesMut::new(), peer_left: false, part, number };
    while let Some(request) = line.serve().await {
        let script = (line.part.answers)(&request);
        match line.play(&request, &script).await {
            PlayEnd::Through => {}
            PlayEnd::Left => break,
            PlayEnd::Closed => return line.ended(),
            PlayEnd::Reset => {
                line.ended();
                return line.wire.reset();
            }
        }
    }
    line.part.log.peer_closed(number, line.part.clock.now());
}

/// How a script ended.
enum PlayEnd {
    /// Completed; another request may come.
    Through,
    /// The peer closed the connection.
    Left,
    /// The script closed the connection.
    Closed,
    /// The script reset the connection.
    Reset,
}

/// One connection. Its read side is always watched, so that the peer's closing is seen at
/// once.
struct EngineConnection<W> {
    wire: W,
    inbox: BytesMut,
    peer_left: bool,
    part: EngineShared,
    number: usize,
}

impl<W: Wire> EngineConnection<W> {
    /// Reads one complete request; `None` once the peer has closed.
    async fn serve(&mut self) -> Option<Received> {
        let head = loop {
            match take_head(&mut self.inbox) {
                Some(head) => break head,
                None => self.read().await?,
            }
        };
        let head_at = self.part.clock.now();
        let (raw_body, body) = loop {
            match take_body(&head.body, &mut self.inbox) {
                Some(body) => break body,
                None => self.read().await?,
            }
        };
        let Head { method, target, headers, bytes: head, .. } = head;
        let (connection, body_at) = (self.number, self.part.clock.now());
        let (number, on_connection) = (0, 0);
        let received = Received {
            number,
            connection,
            on_connection,
            method,
            target,
            headers,
            head,
            body,
            raw_body,
            head_at,
            body_at,
        };
        Some(self.part.log.note(received))
    }

    async fn play(&mut self, request: &Received, script: &Script) -> PlayEnd {
        for step in script.steps() {
            let stayed = match step {
                Step::Write(bytes) => self.write(bytes).await,
                Step::Wait(length) => self.stay_until(Some(self.part.clock.now() + *length)).await,
                Step::Until(length) => self.stay_until(Some(request.body_at + *length)).await,
                Step::Silence => self.stay_until(None).await,
                Step::Close => {
                    let _ = tokio::io::AsyncWriteExt::shutdown(&mut self.wire).await;
                    return PlayEnd::Closed;
                }
                Step::Reset => return PlayEnd::Reset,
                Step::Expect(text) if request.contains(text) => Some(()),
                Step::Expect(text) => {
                    self.part.log.complain(format!("request {} does not contain {text:?}", request.number));
                    return PlayEnd::Reset;
                }
            };
            if stayed.is_none() {
                return PlayEnd::Left;
            }
        }
        PlayEnd::Through
    }

    /// Waits for more bytes.
    async fn read(&mut self) -> Option<()> {
        let before = self.inbox.len();
        poll_fn(|cx| {
            self.poll_inbox(cx);
            if self.peer_left || self.inbox.len() > before { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        // Bytes received together with the end count; the end is found at the next read.
        (self.inbox.len() > before).then_some(())
    }

    /// Waits until a moment (`None`: forever); `None` if the peer closes before.
    async fn stay_until(&mut self, at: Option<Tick>) -> Option<()> {
        let clock = self.part.clock;
        let mut moment = pin!(clock.sleep_until(at));
        poll_fn(|cx| {
            self.poll_inbox(cx);
            if self.peer_left {
                return Poll::Ready(None);
            }
            moment.as_mut().poll(cx).map(Some)
        })
        .await
    }

    /// Writes and flushes; `None` if the peer closes before.
    async fn write(&mut self, bytes: &Bytes) -> Option<()> {
        let mut rest = &bytes[..];
        poll_fn(|cx| {
            self.poll_inbox(cx);
            while !rest.is_empty() && !self.peer_left {
                match Pin::new(&mut self.wire).poll_write(cx, rest) {
                    Poll::Ready(Ok(taken)) if taken > 0 => {
                        self.part.log.wrote(self.number, taken);
                        rest = &rest[taken..];
                    }
                    Poll::Ready(_) => self.peer_left = true,
                    Poll::Pending => return Poll::Pending,
                }
            }
            if self.peer_left {
                return Poll::Ready(None);
            }
            Pin::new(&mut self.wire).poll_flush(cx).map(|flushed| flushed.ok())
        })
        .await
    }

    /// Reads available bytes and notices the peer's closing.
    fn poll_inbox(&mut self, cx: &mut Context<'_>) {
        let mut space = [0; 8 * 1024];
        while !self.peer_left {
            let mut buffer = ReadBuf::new(&mut space);
            match Pin::new(&mut self.wire).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => self.inbox.extend_from_slice(buffer.filled()),
                Poll::Ready(_) => self.peer_left = true,
                Poll::Pending => return,
            }
        }
    }

    fn ended(&self) {
        self.part.log.ended(self.number, self.part.clock.now());
    }
}

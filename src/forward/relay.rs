//! An answer that is being relayed: the engine's body on one side, what may pass to the client
//! on the other, the observer beside it, and every limit that runs meanwhile.
//!
//! The same value is driven twice: by [`Relay::hold`] while the head is held, and by
//! [`ReplyBody`](super::ReplyBody) afterwards. No channel and no task lies between the two
//! connections: a client that does not read stops the reading of the engine.
//!
//! A relay ends exactly once and hands one [`RelayEnd`] to its [`RelayEvents`]: from there `gateway`
//! judges, records, and gives everything back.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::response;
use http_body::{Body, SizeHint};

use super::ahead::KEEPALIVE;
use super::behind::AbandonedRelay;
use super::deadlines::{DeadlineAction, Deadlines};
use super::headers::{self, Content, Media};
use super::limit_refusal;
use super::lines::{UpstreamBody, UpstreamResponse};
use super::open::{ConnectError, ConnectingAttempt};
use super::own::GatewayHeaders;
use super::settings::Timeouts;
use crate::clock::{Alarm, Alarms, Clock};
use crate::framing::HeaderSink;
use crate::judge::ProgressCell;
use crate::observe::{Ending, InBandError, Observer, PieceInfo, Reader, Timeline, TimeoutKind};
use crate::refuse::Rejection;
use crate::rewrite::EventGate;
use crate::route::Signals;
use crate::units::{ClientState, Dialect, DisconnectReason, RequestId, Tick};

/// A preamble (role events, comments) longer than this is let go without a token.
const HELD_PREAMBLE: usize = 64 * 1024;

/// May stand in front of a stream, and nowhere else: readers would take it for part of a line.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// What stands in front of the engine's first piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamStart {
    /// Nothing yet.
    Open,
    /// Comments of ours.
    BehindComments,
    /// The piece has come.
    Over,
}

/// How a relay ended.
pub struct RelayEnd {
    /// Everything seen of the answer.
    pub timeline: Timeline,
    /// The gateway's own reason, where an engine that was waited for behind a head of our own
    /// gave no stream.
    pub refusal: Option<Rejection>,
    /// The request was still waiting for a connection to the engine.
    pub never_sent: bool,
}

/// The head of an engine's answer.
pub struct UpstreamHead {
    /// As it came.
    pub parts: Arc<response::Parts>,
    /// What its fields say.
    pub content: Content,
}

impl UpstreamHead {
    /// A head of our own.
    #[must_use]
    pub fn of(parts: Arc<response::Parts>) -> Self {
        let content = Content::of(&parts.headers);
        UpstreamHead { parts, content }
    }
}

/// Who keeps what a request holds while its answer is relayed: its visit, its share of an
/// engine's work.
pub trait RelayEvents: Send {
    /// The first token came.
    fn first_token(&mut self, at: Tick);
    /// The relay has ended: called exactly once.
    fn end(self: Box<Self>, ended: RelayEnd);
}

/// What a relay needs besides the observer and the engine's body.
pub struct RelayConfig {
    /// The clock.
    pub clock: Clock,
    /// Where its timer comes from.
    pub alarms: Arc<Alarms>,
    /// The client's side of the connection.
    pub client: ClientState,
    /// Decides which bytes may pass.
    pub gate: EventGate,
    /// How the body is read.
    pub reader: Reader,
    /// All limits that run.
    pub deadlines: Deadlines,
    /// The class's limits, for the lengths.
    pub timeouts: Arc<Timeouts>,
    /// Told of token events, for the gauge of overdue requests.
    pub pulse: ProgressCell,
    /// How error events are written.
    pub dialect: Dialect,
    /// The id that the client knows.
    pub request_id: RequestId,
    /// Told of signs of life of the engine.
    pub signals: Arc<Signals>,
}

/// Why a held answer will not speak. Nothing of it has been forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldError {
    /// An in-band error came before any token; the answer can still be relayed.
    Error(InBandError),
    /// The body ended cleanly, unfinished and without a token.
    Truncated,
    /// The engine's connection broke.
    Broken,
    /// A limit fired.
    TimedOut(TimeoutKind),
    /// The drain limit passed.
    Drained,
}

/// The answer ends abnormally: its connection (or stream) is to be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the answer could not be completed")]
pub struct TruncatedBody;

/// See the module.
pub struct Relay {
    parts: RelayConfig,
    /// `None` once the relay has ended.
    observer: Option<Observer>,
    engine: UpstreamState,
    beginning: StreamStart,
    ready: VecDeque<Bytes>,
    ready_bytes: usize,
    alarm: Alarm,
    /// The last poll gave the client something that says anything: until the next one the client was
    /// waited for. Or the head of an answer that is no event stream has just come. Either way the
    /// silence begins when the engine is next waited for.
    gave: bool,
    /// The last bytes of the engine said something, if only in a comment.
    spoke: bool,
    keeper: Option<Box<dyn RelayEvents>>,
    /// The engine's head, and what stands there beside its fields; until the first bytes go out. A long
    /// stream does not keep the place.
    head: Option<Box<(UpstreamHead, GatewayHeaders)>>,
    /// The body ended in the middle of an event, which went out as it is.
    tail_is_out: bool,
    /// Set where the answer must end abnormally.
    broken: bool,
}

/// The engine's side.
enum UpstreamState {
    /// Its head has not arrived; ours went out by time. Boxed, as it is rare and larger than the rest.
    Opening(Box<ConnectingAttempt>),
    /// Its body is being read.
    Speaking(UpstreamBody),
    /// It has ended.
    Over,
}

/// What the engine's side did.
enum UpstreamEvent {
    /// Bytes came at this moment; what may pass is in `ready`.
    Bytes(Tick),
    /// The body ended as its framing says.
    Clean,
    /// Broken framing, reset.
    Broken,
    /// Behind a head of ours: no stream came.
    NoStream(Rejection),
    /// Something is due.
    Due(DeadlineAction),
    /// The drain limit passed.
    Cut,
}

impl Relay {
    /// A relay of `engine`'s body, whose head has arrived.
    #[must_use]
    pub fn new(parts: RelayConfig, observer: Observer, engine: UpstreamBody) -> Box<Self> {
        Self::of(parts, observer, UpstreamState::Speaking(engine))
    }

    /// A relay behind a head of our own: the engine has not sent its head yet. Begins with a
    /// comment, since bytes are what the head went out for; unless it is known when the next one
    /// is due, since the head went ahead.
    #[must_use]
    pub fn waiting(parts: RelayConfig, observer: Observer, opening: ConnectingAttempt) -> Box<Self> {
        let mut relay = Self::of(parts, observer, UpstreamState::Opening(Box::new(opening)));
        relay.parts.deadlines.hold = None;
        relay.beginning = StreamStart::BehindComments;
        if relay.parts.deadlines.keepalive.is_none() {
            relay.offer(KEEPALIVE);
            relay.comment_later();
        }
        relay
    }

    /// Comments go on from here.
    pub(super) fn comments_from(&mut self, next: Tick) {
        if let Some(due) = self.parts.deadlines.keepalive.as_mut() {
            *due = next;
        }
    }

    /// In a box from the start: it is large, and passes through many hands.
    fn of(parts: RelayConfig, observer: Observer, engine: UpstreamState) -> Box<Self> {
        let alarm = parts.alarms.alarm();
        // One piece at a time is the rule.
        let ready = VecDeque::with_capacity(1);
        Box::write(
            Box::new_uninit(),
            Relay {
                parts,
                observer: Some(observer),
                engine,
                beginning: StreamStart::Open,
                ready,
                ready_bytes: 0,
                alarm,
                gave: false,
                spoke: true,
                keeper: None,
                head: None,
                tail_is_out: false,
                broken: false,
            },
        )
    }

    /// Holds the answer until it speaks: its first token, its finish, 64 KiB of preamble, or
    /// the end of the class's patience; for an answer that is no event stream, its first bytes.
    ///
    /// Says when it was heard: nothing is waited for between that and the present moment.
    ///
    /// # Errors
    /// [`HoldError`] where it will not.
    pub async fn hold(&mut self) -> Result<Tick, HoldError> {
        if !self.streams() {
            self.parts.deadlines.token_came();
            self.gave = true;
            return std::future::poll_fn(|cx| self.poll_first_bytes(cx)).await;
        }
        std::future::poll_fn(|cx| self.poll_hold(cx)).await
    }

    /// The head of an answer that is no event stream came: from now on silence is what counts.
    /// Enough for a failure, whose status says all that the next step depends on.
    pub fn head_came(&mut self) {
        self.parts.deadlines.token_came();
        self.parts.deadlines.heard(self.parts.clock.now(), self.parts.timeouts.idle);
    }

    /// An answer that is no event stream: its head is not worth relaying before its framing has
    /// shown that a body follows. What has come already is looked at: where it breaks off there,
    /// nothing of it has to go out.
    fn poll_first_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Result<Tick, HoldError>> {
        let mut heard_at = None;
        while self.ready_bytes < HELD_PREAMBLE && !matches!(self.engine, UpstreamState::Over) {
            let heard = match self.poll_engine(cx) {
                Poll::Pending if self.ready.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(heard) => heard,
            };
            match heard {
                UpstreamEvent::Bytes(at) => heard_at = Some(at),
                UpstreamEvent::Broken | UpstreamEvent::NoStream(_) => return Poll::Ready(Err(HoldError::Broken)),
                UpstreamEvent::Due(DeadlineAction::Limit(limit)) => {
                    return Poll::Ready(Err(HoldError::TimedOut(limit)));
                }
                UpstreamEvent::Cut => return Poll::Ready(Err(HoldError::Drained)),
                UpstreamEvent::Clean => {
                    self.engine = UpstreamState::Over;
                    break;
                }
                UpstreamEvent::Due(
                    DeadlineAction::Hold | DeadlineAction::Keepalive | DeadlineAction::Finish | DeadlineAction::Over,
                ) => break,
            }
        }
        Poll::Ready(Ok(heard_at.unwrap_or_else(|| self.parts.clock.now())))
    }

    fn poll_hold(&mut self, cx: &mut Context<'_>) -> Poll<Result<Tick, HoldError>> {
        loop {
            let at = match ready!(self.poll_engine(cx)) {
                UpstreamEvent::Bytes(at) => at,
                UpstreamEvent::Clean => {
                    let at = self.parts.clock.now();
                    self.take_tail(at);
                    self.engine = UpstreamState::Over;
                    return Poll::Ready(self.spoke_to_the_end().map(|()| at));
                }
                UpstreamEvent::Broken | UpstreamEvent::NoStream(_) => return Poll::Ready(Err(HoldError::Broken)),
                UpstreamEvent::Due(DeadlineAction::Limit(limit)) => {
                    return Poll::Ready(Err(HoldError::TimedOut(limit)));
                }
                UpstreamEvent::Cut => return Poll::Ready(Err(HoldError::Drained)),
                UpstreamEvent::Due(DeadlineAction::Finish) => {
                    self.let_finish_go();
                    continue;
                }
                UpstreamEvent::Due(DeadlineAction::Hold | DeadlineAction::Keepalive | DeadlineAction::Over) => {
                    self.let_go();
                    return Poll::Ready(Ok(self.parts.clock.now()));
                }
            };
            match self.seen().error() {
                Some(error) if !error.after_first_token => return Poll::Ready(Err(HoldError::Error(error))),
                _ if self.seen().has_token() || self.seen().is_finished() => return Poll::Ready(Ok(at)),
                _ if self.ready_bytes > HELD_PREAMBLE => {
                    self.let_go();
                    return Poll::Ready(Ok(at));
                }
                _ => {}
            }
        }
    }

    /// The body ended while it was held.
    fn spoke_to_the_end(&self) -> Result<(), HoldError> {
        match self.seen().error() {
            Some(error) if !error.after_first_token => Err(HoldError::Error(error)),
            _ if self.seen().is_finished() || self.seen().has_token() => Ok(()),
            _ => Err(HoldError::Truncated),
        }
    }

    /// The head goes out without a token: from now on errors are events.
    pub fn let_go(&mut self) {
        self.parts.deadlines.hold = None;
        self.comment_later();
    }

    /// A panic was caught in the relay: the answer is lost, and it is our fault.
    pub(super) fn panicked(&mut self) {
        self.ready.clear();
        self.ready_bytes = 0;
        self.close(Ending::Panicked, None);
    }

    fn comment_later(&mut self) {
        let next = self.parts.timeouts.keepalive.map(|every| self.parts.clock.now() + every);
        self.parts.deadlines.keepalive = next;
    }

    /// Whether a token has come.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.observer.as_ref().is_some_and(Observer::has_token)
    }

    /// Whether the engine has shown that it serves the request: the first token of a stream
    /// (or its end without one), the head of any other answer.
    #[must_use]
    pub fn has_spoken(&self) -> bool {
        !self.streams() || self.observer.as_ref().is_some_and(|seen| seen.has_token() || seen.is_finished())
    }

    fn streams(&self) -> bool {
        self.parts.reader == Reader::Events
    }

    /// Hands the relay what it is to give back at its end. `at`: the present moment.
    pub fn keep(&mut self, mut keeper: Box<dyn RelayEvents>, at: Tick) {
        self.parts.deadlines.hold = None;
        if self.has_token() {
            keeper.first_token(at);
        }
        self.keeper = Some(keeper);
        // A body that is known to be empty is never polled.
        let is_empty = match &self.engine {
            UpstreamState::Speaking(body) => body.is_end_stream(),
            UpstreamState::Over => self.ready.is_empty(),
            UpstreamState::Opening(_) => false,
        };
        if is_empty && !self.streams() {
            self.take_tail(at);
            self.finish_clean();
        }
    }

    /// What stands in the head: the engine's fields, as far as they pass, and our own.
    pub fn begins_with(&mut self, head: UpstreamHead, own: GatewayHeaders) {
        self.head = Some(Box::new((head, own)));
    }

    pub(super) fn pass_fields(&self, to: &mut impl FnMut(&HeaderName, &HeaderValue)) {
        if let Some((head, _)) = self.head.as_deref() {
            let length = self.size_hint().exact();
            headers::for_client(&head.parts.headers, head.content, length).for_each(|(name, value)| to(name, value));
        }
    }

    pub(super) fn add_fields(&self, head: &mut impl HeaderSink) {
        if let Some((_, own)) = self.head.as_deref() {
            own.add_to(head);
        }
    }

    /// The next bytes for the client.
    pub(super) fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, TruncatedBody>>> {
        loop {
            // Before the last bytes are given: a body of known length is not polled again.
            if matches!(self.engine, UpstreamState::Over) && self.observer.is_some() {
                self.finish_clean();
            }
            if let Some(bytes) = self.ready.pop_front() {
                self.ready_bytes -= bytes.len();
                self.gave |= self.spoke;
                // It is out.
                self.head = None;
                return Poll::Ready(Some(Ok(bytes)));
            }
            if self.broken {
                self.broken = false;
                return Poll::Ready(Some(Err(TruncatedBody)));
            }
            if self.observer.is_none() {
                return Poll::Ready(None);
            }
            match ready!(self.poll_engine(cx)) {
                UpstreamEvent::Bytes(_) => {}
                UpstreamEvent::Clean => {
                    self.take_tail(self.parts.clock.now());
                    self.engine = UpstreamState::Over;
                }
                UpstreamEvent::Broken => self.fail(Ending::Broken, &Rejection::StreamIncomplete),
                UpstreamEvent::NoStream(refusal) => self.no_stream(refusal),
                UpstreamEvent::Due(DeadlineAction::Limit(limit)) => match self.unconnected() {
                    Some(refusal) => self.no_stream(refusal),
                    None => {
                        let refusal = limit_refusal(&self.parts.timeouts, limit, self.streams());
                        self.fail(Ending::TimedOut(limit), &refusal);
                    }
                },
                UpstreamEvent::Due(DeadlineAction::Keepalive | DeadlineAction::Hold) => self.comment(),
                UpstreamEvent::Due(DeadlineAction::Finish) => self.let_finish_go(),
                UpstreamEvent::Due(DeadlineAction::Over) => self.end_it(),
                UpstreamEvent::Cut => self.fail(Ending::Drained, &Rejection::DrainCut),
            }
        }
    }

    /// Whether nothing is left to give.
    pub(super) fn is_over(&self) -> bool {
        self.observer.is_none() && self.ready.is_empty() && !self.broken
    }

    /// Bytes left to give, where the framing of a body that is no event stream tells.
    #[must_use]
    pub fn size_hint(&self) -> SizeHint {
        let held = self.ready_bytes as u64;
        let left = match &self.engine {
            UpstreamState::Speaking(engine) if !self.streams() => engine.size_hint().exact(),
            UpstreamState::Speaking(_) | UpstreamState::Opening(_) => None,
            UpstreamState::Over if self.streams() => self.observer.is_none().then_some(0),
            UpstreamState::Over => Some(0),
        };
        left.map_or_else(SizeHint::default, |left| SizeHint::with_exact(left + held))
    }

    fn seen(&self) -> &Observer {
        self.observer.as_ref().expect("a relay watches until it ends")
    }

    /// The engine's side, one step. Looks for bytes before it looks at the timer, so that a
    /// late poll never takes bytes that are there for silence.
    fn poll_engine(&mut self, cx: &mut Context<'_>) -> Poll<UpstreamEvent> {
        let streams = self.streams();
        if let UpstreamState::Opening(opening) = &mut self.engine
            && let Poll::Ready(opened) = Pin::new(&mut **opening).poll(cx)
        {
            match stream_of(opened) {
                Ok(body) => self.engine = UpstreamState::Speaking(body),
                Err(refusal) => return Poll::Ready(UpstreamEvent::NoStream(refusal)),
            }
        }
        while let UpstreamState::Speaking(engine) = &mut self.engine {
            match Pin::new(&mut *engine).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let Ok(bytes) = frame.into_data() else { continue };
                    // A body of known length is never polled to its end.
                    let whole = !streams && engine.is_end_stream();
                    let at = self.hear(bytes);
                    if whole {
                        self.take_tail(at);
                        self.engine = UpstreamState::Over;
                    }
                    return Poll::Ready(UpstreamEvent::Bytes(at));
                }
                Poll::Ready(Some(Err(_))) => return Poll::Ready(UpstreamEvent::Broken),
                Poll::Ready(None) => return Poll::Ready(UpstreamEvent::Clean),
                Poll::Pending => break,
            }
        }
        if matches!(self.engine, UpstreamState::Over) {
            return Poll::Ready(UpstreamEvent::Clean);
        }
        if self.parts.client.drain_is_over() {
            return Poll::Ready(UpstreamEvent::Cut);
        }
        self.poll_timer(cx).map(UpstreamEvent::Due)
    }

    /// Bytes came: one clock read, the observer and the gate see them, what may pass is ready. Says
    /// when.
    fn hear(&mut self, frame: Bytes) -> Tick {
        let at = self.parts.clock.now();
        let Some(observer) = self.observer.as_mut() else { return at };
        let limited = self.parts.client.limited_since(at);
        if let Some(since) = limited {
            observer.limit_gaps(since);
        }
        let had_token = observer.has_token();
        let (gate, pulse, beginning) = (&mut self.parts.gate, &self.parts.pulse, &mut self.beginning);
        let mut has_token = false;
        let mut gather = Batch::new(frame.clone(), &mut self.ready, &mut self.ready_bytes);
        observer.frame(frame, at, &mut |piece: Bytes, note: &PieceInfo| {
            has_token |= note.token;
            // Behind that only a first token is waited for.
            if note.token && (limited.is_none() || !had_token) {
                pulse.token(at, note.visible);
            }
            let began = std::mem::replace(beginning, StreamStart::Over);
            gate.pass(piece, note, &mut |mut passed| {
                if began == StreamStart::BehindComments && passed.starts_with(BYTE_ORDER_MARK) {
                    passed = passed.slice(BYTE_ORDER_MARK.len()..);
                }
                gather.add(passed);
            });
        });
        gather.flush();
        if has_token {
            self.parts.signals.is_alive(at);
        }
        self.parts.pulse.finished(observer.is_finished());
        if let Some(broke) = observer.itl_broke() {
            self.parts.pulse.itl_broke(broke);
        }
        if self.parts.reader != Reader::Events {
            self.parts.deadlines.heard(at, self.parts.timeouts.idle);
            return at;
        }
        self.parts.deadlines.finish_waits(self.parts.gate.holds_finish(), at);
        self.parts.deadlines.finished(observer.finished_at());
        self.spoke = observer.last_activity() == Some(at);
        if observer.has_token() {
            if self.spoke {
                self.parts.deadlines.heard(at, self.parts.timeouts.idle);
            }
            if !had_token {
                self.token_came(at);
            }
        }
        at
    }

    fn token_came(&mut self, at: Tick) {
        self.parts.deadlines.token_came();
        if let Some(keeper) = self.keeper.as_mut() {
            keeper.first_token(at);
        }
    }

    /// A body that ended cleanly: its tail is read as an event and goes out as it is.
    fn take_tail(&mut self, at: Tick) {
        let Some(observer) = self.observer.as_mut() else { return };
        let had_token = observer.has_token();
        // Of a long event nothing is held: all of its tail has passed.
        self.tail_is_out |= observer.long_event_is_out();
        let (gate, ready, count) = (&mut self.parts.gate, &mut self.ready, &mut self.ready_bytes);
        let tail_is_out = &mut self.tail_is_out;
        let mut add = |passed: Bytes| {
            *count += passed.len();
            ready.push_back(passed);
        };
        observer.clean_end(at, &mut |piece: Bytes, note: &PieceInfo| {
            *tail_is_out |= !gate.hides(note);
            gate.pass(piece, note, &mut add);
        });
        gate.rest(&mut add);
        if !had_token && observer.has_token() {
            self.token_came(at);
        }
    }

    /// The engine's body ended as its framing says. An answer that is nevertheless unfinished
    /// gets an error event of ours.
    fn finish_clean(&mut self) {
        let complete = self.seen().is_finished() || self.seen().error().is_some();
        if self.parts.reader == Reader::Events && !complete {
            if self.tail_is_out {
                self.offer(Bytes::from_static(b"\n\n"));
            }
            self.offer(self.error_event(&Rejection::StreamIncomplete));
        }
        self.close(Ending::Clean, None);
    }

    /// The engine failed, or a limit ended the answer: an incomplete tail is dropped and an
    /// error event follows; where that is impossible the answer ends abnormally. One that was
    /// finished, or has its error already, just ends.
    fn fail(&mut self, ending: Ending, refusal: &Rejection) {
        self.let_finish_go();
        let seen = self.seen();
        if self.parts.reader != Reader::Events || seen.long_event_is_out() {
            self.broken = true;
        } else if !seen.is_finished() && seen.error().is_none() {
            let event = self.error_event(refusal);
            self.offer(event);
        }
        self.close(ending, None);
    }

    /// The finish event has waited for long enough, or nothing will come behind it.
    fn let_finish_go(&mut self) {
        self.parts.deadlines.finish = None;
        if let Some(event) = self.parts.gate.let_finish_go() {
            self.offer(event);
        }
    }

    /// The answer is over, but the engine holds its body open: what it does with its connection is
    /// waited for no longer.
    fn end_it(&mut self) {
        self.let_finish_go();
        self.observer.iter_mut().for_each(Observer::stop);
        self.close(Ending::Clean, None);
    }

    /// Behind a head of ours no stream came.
    fn no_stream(&mut self, refusal: Rejection) {
        let event = self.error_event(&refusal);
        self.offer(event);
        self.close(Ending::Broken, Some(refusal));
    }

    /// What a limit that passes now means where the engine does not have the request yet.
    fn unconnected(&self) -> Option<Rejection> {
        match &self.engine {
            UpstreamState::Opening(opening) => opening.unconnected().map(|failed| failed.refusal()),
            UpstreamState::Speaking(_) | UpstreamState::Over => None,
        }
    }

    /// A comment keeps idle-killing hops awake; never inside an event that is partly out.
    fn comment(&mut self) {
        self.parts.deadlines.hold = None;
        if !self.seen().long_event_is_out() {
            self.offer(KEEPALIVE);
            if self.beginning == StreamStart::Open {
                self.beginning = StreamStart::BehindComments;
            }
        }
        self.comment_later();
    }

    fn error_event(&self, refusal: &Rejection) -> Bytes {
        refusal.event(self.parts.dialect, &self.parts.request_id, self.seen().last_sequence_number())
    }

    fn offer(&mut self, bytes: Bytes) {
        self.ready_bytes += bytes.len();
        self.ready.push_back(bytes);
    }

    /// Ends the relay, once: the engine's line is dropped (and closed, unless its body ended
    /// whole), and the keeper gets the timeline.
    fn close(&mut self, ending: Ending, refusal: Option<Rejection>) {
        let never_sent = self.unconnected().is_some();
        self.engine = UpstreamState::Over;
        self.alarm.rest();
        let Some(observer) = self.observer.as_mut() else { return };
        let at = self.parts.clock.now();
        if let Some(since) = self.parts.client.limited_since(at) {
            observer.limit_gaps(since);
        }
        if observer.is_finished() {
            self.parts.signals.is_alive(at);
        }
        if let Some(keeper) = self.keeper.take() {
            keeper.end(RelayEnd { timeline: observer.last_look(ending, at), refusal, never_sent });
        }
        self.observer = None;
    }

    /// What is still to be read behind the finish, if anything is.
    fn rest(&mut self, ending: Ending) -> Option<AbandonedRelay> {
        self.observer.as_ref()?.finished_without_usage()?;
        if !matches!(self.engine, UpstreamState::Speaking(_)) {
            return None;
        }
        let UpstreamState::Speaking(engine) = std::mem::replace(&mut self.engine, UpstreamState::Over) else {
            return None;
        };
        let (clock, keeper, mut observer) = (self.parts.clock, self.keeper.take(), self.observer.take()?);
        let at = clock.now();
        if let Some(since) = self.parts.client.limited_since(at) {
            observer.limit_gaps(since);
        }
        Some(AbandonedRelay { clock, engine, observer, keeper, ending, at })
    }

    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<DeadlineAction> {
        loop {
            // While nobody polls us the idle limit does not run: the silence begins when somebody
            // listens to it.
            let may_be_idle = self.parts.deadlines.idle.is_some() || !self.streams();
            if std::mem::take(&mut self.gave) && may_be_idle {
                self.parts.deadlines.heard(self.parts.clock.now(), self.parts.timeouts.idle);
            }
            let deadlines = &self.parts.deadlines;
            if self.alarm.stands(cx, |ring| !deadlines.any_before(ring)) {
                return Poll::Pending;
            }
            let Some(next) = self.parts.deadlines.next() else { return Poll::Pending };
            ready!(self.alarm.poll(next, cx));
            let now = self.parts.clock.now();
            if self.parts.deadlines.idle.is_some_and(|idle| idle <= now) && self.listens_late(now) {
                continue;
            }
            if let Some(due) = self.parts.deadlines.due(now) {
                return Poll::Ready(due);
            }
        }
    }

    /// The idle limit would have passed at `now`, but does not run while the client refuses bytes:
    /// whether it runs from a later moment.
    fn listens_late(&mut self, now: Tick) -> bool {
        let client = &self.parts.client;
        let listens = if client.refused_since().is_some() { Some(now) } else { client.resumed_at() };
        let idle = self.parts.timeouts.idle;
        let is_later = listens.filter(|since| *since + idle > now);
        if let Some(since) = is_later {
            self.parts.deadlines.heard(since, idle);
        }
        is_later.is_some()
    }
}

impl Drop for Relay {
    /// Dropped before its end: the client left, or its connection was cut.
    fn drop(&mut self) {
        let ending = match self.parts.client.severed() {
            _ if std::thread::panicking() => Ending::Panicked,
            Some(DisconnectReason::WriteStall | DisconnectReason::Total) => Ending::WriteStalled,
            Some(DisconnectReason::Drain) => Ending::Drained,
            None => Ending::Left,
        };
        if self.observer.is_some()
            && let Ending::Left | Ending::WriteStalled = ending
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
            && let Some(rest) = self.rest(ending)
        {
            runtime.spawn(rest.read());
        }
        self.close(ending, None);
    }
}

/// The stream behind a head of our own, if one came.
fn stream_of(opened: Result<UpstreamResponse, ConnectError>) -> Result<UpstreamBody, Rejection> {
    let UpstreamResponse { head, content, body } = opened.map_err(|failed| failed.refusal())?;
    match head.status.is_success() {
        // Our head names no coding: such bytes would be noise to the client.
        true if content.is_coded => Err(Rejection::EngineCoded),
        true if content.media == Media::Events => Ok(body),
        _ => Err(Rejection::EngineAnswered { status: head.status.as_u16() }),
    }
}

/// Joins pieces that lie side by side in one frame, so that what came in one read leaves in
/// one write.
struct Batch<'a> {
    frame: Bytes,
    run: Range<usize>,
    ready: &'a mut VecDeque<Bytes>,
    count: &'a mut usize,
}

impl<'a> Batch<'a> {
    fn new(frame: Bytes, ready: &'a mut VecDeque<Bytes>, count: &'a mut usize) -> Self {
        Batch { frame, run: 0..0, ready, count }
    }

    fn add(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        let Some(start) = self.place_of(&piece) else {
            self.flush();
            *self.count += piece.len();
            self.ready.push_back(piece);
            return;
        };
        if start != self.run.end || self.run.is_empty() {
            self.flush();
            self.run = start..start;
        }
        self.run.end += piece.len();
    }

    /// Where in the frame a piece lies, if it does.
    fn place_of(&self, piece: &Bytes) -> Option<usize> {
        let start = (piece.as_ptr() as usize).checked_sub(self.frame.as_ptr() as usize)?;
        (start + piece.len() <= self.frame.len()).then_some(start)
    }

    fn flush(&mut self) {
        let run = std::mem::replace(&mut self.run, 0..0);
        if !run.is_empty() {
            *self.count += run.len();
            self.ready.push_back(self.frame.slice(run));
        }
    }
}

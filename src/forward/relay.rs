//! Relays a response: the engine's body on one side, the client on the other, the observer beside it, and
//! all running time limits.
//!
//! The same value is polled by [`Relay::hold_until_first_token`] while the head is held, and by
//! [`ReplyBody`](super::ReplyBody) afterwards. There is no channel or task between the two
//! connections: a client that does not read stops the reading from the engine.
//!
//! A relay ends exactly once and passes one [`RelayEnd`] to its [`RelayEvents`], where `gateway`
//! judges, records and releases everything.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http::response;
use http_body::{Body, SizeHint};

use super::abandoned_relay::AbandonedRelay;
use super::attempt::{ConnectError, ConnectingAttempt};
use super::conn_pool::{UpstreamBody, UpstreamResponse};
use super::deadlines::{DeadlineAction, Deadlines};
use super::early_head_body::KEEPALIVE;
use super::gateway_headers::GatewayHeaders;
use super::headers;
use super::limit_refusal;
use super::relay_events::{RelayEnd, RelayEvents};
use super::settings::Timeouts;
use crate::clock::{Alarm, Alarms, Clock};
use crate::http1::{Content, HeaderSink, Media};
use crate::judge::ProgressCell;
use crate::observe::{Ending, InBandError, Observer, PieceInfo, ResponseFormat, TimeoutKind};
use crate::reject::Rejection;
use crate::rewrite::EventGate;
use crate::route::EngineSignals;
use crate::types::{ClientState, Dialect, DisconnectReason, RequestId, Tick};

/// Longest preamble (role events, comments) held without a token, bytes.
const HELD_PREAMBLE: usize = 64 * 1024;

/// A body that begins as an error is waited for up to this length.
const LONGEST_ERROR: usize = 16 * 1024;

/// Allowed only at the beginning of a stream: elsewhere readers would take it for part of a line.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Bytes sent before the engine's first piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamStart {
    /// Nothing.
    Open,
    /// Keepalive comments.
    BehindComments,
    /// The first piece was sent.
    Over,
}

/// The head of an engine's response.
pub struct UpstreamHead {
    /// As received.
    pub parts: Arc<response::Parts>,
    /// Properties of its body.
    pub content: Content,
}

impl UpstreamHead {
    /// An engine's head, or one made by the gateway.
    #[must_use]
    pub fn of(parts: Arc<response::Parts>) -> Self {
        let content = Content::of(&parts.headers);
        UpstreamHead { parts, content }
    }
}

/// Parameters of a relay besides the observer and the engine's body.
pub struct RelayConfig {
    /// The clock.
    pub clock: Clock,
    /// Source of its timer.
    pub alarms: Arc<Alarms>,
    /// The client's read state.
    pub client: ClientState,
    /// Filters the bytes.
    pub gate: EventGate,
    /// How the body is read.
    pub reader: ResponseFormat,
    /// The running time limits.
    pub deadlines: Deadlines,
    /// The class's time limits.
    pub timeouts: Arc<Timeouts>,
    /// Receives token events, for the gauge of overdue requests.
    pub progress_cell: ProgressCell,
    /// Format of error events.
    pub dialect: Dialect,
    /// The request id known to the client.
    pub request_id: RequestId,
    /// Receives signs of life of the engine.
    pub signals: Arc<EngineSignals>,
    /// Whether the engine got the pool's key, so that its rejection does not concern the client.
    pub key_is_ours: bool,
}

/// Why a held response did not start. Nothing of it was forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldError {
    /// An in-band error came before any token; the response can still be relayed.
    Error(InBandError),
    /// The body ended cleanly but unfinished and without a token.
    Truncated,
    /// The engine's connection failed.
    Broken,
    /// A limit fired.
    TimedOut(TimeoutKind),
    /// The drain limit passed.
    Drained,
}

/// The response is incomplete; its connection or stream must be aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the answer could not be completed")]
pub struct TruncatedBody;

/// Relays one response; see the module.
pub struct Relay {
    parts: RelayConfig,
    /// `None` once the relay has ended.
    observer: Option<Observer>,
    engine: UpstreamState,
    beginning: StreamStart,
    ready: VecDeque<Bytes>,
    ready_bytes: usize,
    alarm: Alarm,
    /// Whether the last poll returned bytes to the client, so that the time until the next poll is the
    /// client's; also set when the head of a response that is not an event stream has just come. The
    /// idle limit then starts at the next wait for the engine.
    gave: bool,
    /// Whether the engine's last bytes were activity, including comments.
    spoke: bool,
    subscriber: Option<Box<dyn RelayEvents>>,
    /// The engine's head and the gateway's headers until the first bytes are sent. Boxed, so that a long
    /// stream does not keep the memory.
    head: Option<Box<(UpstreamHead, GatewayHeaders)>>,
    /// The body ended within an event, which was sent incomplete.
    tail_is_out: bool,
    /// Set if the response must be aborted.
    broken: bool,
    /// Code by which the engine rejected a key that is not the client's: neither it nor later bytes pass.
    refused_key: Option<u16>,
    /// When the engine's body ended completely.
    ended_at: Option<Tick>,
}

/// State of the engine's side.
enum UpstreamState {
    /// Its head has not arrived, ours was sent early. Boxed because it is rare and large.
    Opening(Box<ConnectingAttempt>),
    /// Its body is being read.
    Speaking(UpstreamBody),
    /// It has ended.
    Over,
}

/// An event of the engine's side.
enum UpstreamEvent {
    /// Bytes came at this moment; the filtered ones are in `ready`.
    Bytes(Tick),
    /// The body ended by its framing.
    Clean,
    /// Invalid framing or reset.
    Broken,
    /// No stream came behind an early head.
    NoStream(Rejection),
    /// A deadline passed.
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

    /// A relay behind an early head, before the engine's head. Starts with a comment, because the head was
    /// sent early in order to send bytes, unless the time of the next comment is already
    /// known.
    #[must_use]
    pub fn waiting(parts: RelayConfig, observer: Observer, opening: ConnectingAttempt) -> Box<Self> {
        let mut relay = Self::of(parts, observer, UpstreamState::Opening(Box::new(opening)));
        relay.parts.deadlines.hold = None;
        relay.beginning = StreamStart::BehindComments;
        if relay.parts.deadlines.keepalive.is_none() {
            relay.offer(KEEPALIVE);
            relay.schedule_keepalive();
        }
        relay
    }

    /// Sets the time of the next comment.
    pub(super) fn comments_from(&mut self, next: Tick) {
        if let Some(due) = self.parts.deadlines.keepalive.as_mut() {
            *due = next;
        }
    }

    /// Boxed from the start because it is large and passes through many owners.
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
                subscriber: None,
                head: None,
                tail_is_out: false,
                broken: false,
                refused_key: None,
                ended_at: None,
            },
        )
    }

    /// Holds the response until it starts: its first token, its finish, 64 KiB of preamble, or the class's
    /// `hold_head`; for a response that is not an event stream, its first bytes.
    ///
    /// Returns the moment, which is current because nothing is awaited after it.
    ///
    /// # Errors
    /// [`HoldError`] if it will not start.
    pub async fn hold_until_first_token(&mut self) -> Result<Tick, HoldError> {
        if !self.streams() {
            self.parts.deadlines.token_came();
            self.gave = true;
            return std::future::poll_fn(|cx| self.poll_first_bytes(cx)).await;
        }
        std::future::poll_fn(|cx| self.poll_hold(cx)).await
    }

    /// The head of a response that is not an event stream came, so the idle limit starts. A failed response
    /// needs no more, because the next step depends on its status alone.
    pub fn head_came(&mut self) {
        self.parts.deadlines.token_came();
        self.parts.deadlines.heard(self.parts.clock.now(), self.parts.timeouts.idle);
    }

    /// For a response that is not an event stream: holds the head until body bytes show that its framing is
    /// valid. Bytes that have already arrived are examined, so that a response that breaks off there is not
    /// forwarded at all.
    fn poll_first_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Result<Tick, HoldError>> {
        let mut heard_at = None;
        while self.ready_bytes < HELD_PREAMBLE && !matches!(self.engine, UpstreamState::Over) {
            let heard = match self.poll_engine(cx) {
                Poll::Pending if self.ready.is_empty() || self.may_refuse_key() => return Poll::Pending,
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
                    self.take_tail(self.parts.clock.now());
                    self.engine = UpstreamState::Over;
                    break;
                }
                UpstreamEvent::Due(
                    DeadlineAction::Hold | DeadlineAction::Keepalive | DeadlineAction::Finish | DeadlineAction::Over,
                ) => break,
            }
        }
        match self.seen().error() {
            Some(error) if self.parts.key_is_ours && error.refuses_key() => Poll::Ready(Err(HoldError::Error(error))),
            _ => Poll::Ready(Ok(heard_at.unwrap_or_else(|| self.parts.clock.now()))),
        }
    }

    /// Whether the JSON body so far may be a rejection of a key that is not the client's. A body that begins
    /// as an error is buffered completely.
    fn may_refuse_key(&self) -> bool {
        let is_json = self.parts.key_is_ours && self.parts.reader == ResponseFormat::Json;
        is_json && self.ready_bytes < LONGEST_ERROR && may_be_error(self.ready.iter().flatten().copied())
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
                    self.release_head();
                    return Poll::Ready(Ok(self.parts.clock.now()));
                }
            };
            match self.seen().error() {
                Some(error) if !error.after_first_token => return Poll::Ready(Err(HoldError::Error(error))),
                _ if self.seen().has_token() || self.seen().is_finished() => return Poll::Ready(Ok(at)),
                _ if self.ready_bytes > HELD_PREAMBLE => {
                    self.release_head();
                    return Poll::Ready(Ok(at));
                }
                _ => {}
            }
        }
    }

    /// The body ended while held.
    fn spoke_to_the_end(&self) -> Result<(), HoldError> {
        match self.seen().error() {
            Some(error) if !error.after_first_token => Err(HoldError::Error(error)),
            _ if self.seen().is_finished() || self.seen().has_token() => Ok(()),
            _ => Err(HoldError::Truncated),
        }
    }

    /// Releases the head without a token; errors become events from now on.
    pub fn release_head(&mut self) {
        self.parts.deadlines.hold = None;
        self.schedule_keepalive();
    }

    /// A panic was caught in the relay: the response is lost through the gateway's fault.
    pub(super) fn panicked(&mut self) {
        self.ready.clear();
        self.ready_bytes = 0;
        self.close(Ending::Panicked, None);
    }

    fn schedule_keepalive(&mut self) {
        let next = self.parts.timeouts.keepalive.map(|every| self.parts.clock.now() + every);
        self.parts.deadlines.keepalive = next;
    }

    /// Whether a token has come.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.observer.as_ref().is_some_and(Observer::has_token)
    }

    /// Whether the engine has shown that it serves the request: the first token of a stream (or its end
    /// without one), or the head of another response.
    #[must_use]
    pub fn has_spoken(&self) -> bool {
        !self.streams() || self.observer.as_ref().is_some_and(|seen| seen.has_token() || seen.is_finished())
    }

    fn streams(&self) -> bool {
        self.parts.reader == ResponseFormat::Events
    }

    /// Sets the receiver of the relay's events. `at`: the present moment.
    pub fn subscribe(&mut self, mut subscriber: Box<dyn RelayEvents>, at: Tick) {
        self.parts.deadlines.hold = None;
        if self.has_token() {
            subscriber.first_token(at);
        }
        self.subscriber = Some(subscriber);
        // A body known to be empty is never polled.
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

    /// Sets the headers: the engine's that pass, and the gateway's own.
    pub fn begins_with(&mut self, head: UpstreamHead, own: GatewayHeaders) {
        self.head = Some(Box::new((head, own)));
    }

    pub(super) fn upstream_headers(&self, to: &mut impl FnMut(&HeaderName, &HeaderValue)) {
        if let Some((head, _)) = self.head.as_deref() {
            let length = self.size_hint().exact();
            headers::for_client(&head.parts.headers, head.content, length).for_each(|(name, value)| to(name, value));
        }
    }

    pub(super) fn gateway_headers(&self, head: &mut impl HeaderSink) {
        if let Some((_, own)) = self.head.as_deref() {
            own.add_to(head);
        }
    }

    /// The next bytes for the client.
    pub(super) fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, TruncatedBody>>> {
        loop {
            if let Some(code) = self.refused_key.take() {
                self.let_finish_go();
                self.no_stream(Rejection::EngineAnswered { status: code });
            }
            // Before the last bytes are given: a body of known length is not polled again.
            if matches!(self.engine, UpstreamState::Over) && self.observer.is_some() {
                self.finish_clean();
            }
            if let Some(bytes) = self.ready.pop_front() {
                self.ready_bytes -= bytes.len();
                self.gave |= self.spoke;
                // The head was sent.
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

    /// Whether nothing is left to return.
    pub(super) fn is_over(&self) -> bool {
        self.observer.is_none() && self.ready.is_empty() && !self.broken
    }

    /// Remaining bytes, if the framing of a body that is not an event stream states them.
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

    /// One step of the engine's side. Checks for bytes before the timer, so that a late poll does not take
    /// available bytes for silence.
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
                    // A body of known length is not polled to its end.
                    let whole = !streams && engine.is_end_stream();
                    let at = self.on_bytes(bytes);
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

    /// Handles received bytes: one clock read, then observer and gate; the filtered bytes are ready. Returns
    /// the moment.
    fn on_bytes(&mut self, frame: Bytes) -> Tick {
        let at = self.parts.clock.now();
        let Some(observer) = self.observer.as_mut() else { return at };
        let limited = self.parts.client.limited_since(at);
        if let Some(since) = limited {
            observer.limit_gaps(since);
        }
        let had_token = observer.has_token();
        let (gate, progress_cell, beginning) = (&mut self.parts.gate, &self.parts.progress_cell, &mut self.beginning);
        let (key_is_ours, refused_key) = (self.parts.key_is_ours, &mut self.refused_key);
        let mut has_token = false;
        let mut gather = Batch::new(frame.clone(), &mut self.ready, &mut self.ready_bytes);
        observer.frame(frame, at, &mut |piece: Bytes, note: &PieceInfo| {
            if note.error.is_some() {
                *refused_key = refused_key.or(note.refused_key().filter(|_| key_is_ours));
            }
            if refused_key.is_some() {
                return;
            }
            has_token |= note.token;
            // Once limited, only a first token matters.
            if note.token && (limited.is_none() || !had_token) {
                progress_cell.token(at, note.visible);
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
        self.parts.progress_cell.finished(observer.is_finished());
        if let Some(broke) = observer.itl_broke() {
            self.parts.progress_cell.itl_broke(broke);
        }
        if self.parts.reader != ResponseFormat::Events {
            // Audio, a transcript, a list of numbers: without tokens any bytes are a sign of life.
            self.parts.signals.is_alive(at);
            self.parts.deadlines.heard(at, self.parts.timeouts.idle);
            return at;
        }
        if self.parts.gate.holds_finish() {
            self.parts.deadlines.finish_waits(at, self.parts.signals.moves_members());
        } else {
            self.parts.deadlines.finish = None;
        }
        if self.parts.gate.has_moved() {
            self.parts.signals.has_moved_members();
        }
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
        if let Some(subscriber) = self.subscriber.as_mut() {
            subscriber.first_token(at);
        }
    }

    /// Handles the tail of a cleanly ended body: parsed as an event and passed on unchanged.
    fn take_tail(&mut self, at: Tick) {
        self.ended_at = Some(at);
        let Some(observer) = self.observer.as_mut() else { return };
        let had_token = observer.has_token();
        // Nothing of a long event is held: its tail was already sent.
        self.tail_is_out |= observer.long_event_is_out();
        let (gate, ready, count) = (&mut self.parts.gate, &mut self.ready, &mut self.ready_bytes);
        let tail_is_out = &mut self.tail_is_out;
        let (key_is_ours, refused_key) = (self.parts.key_is_ours, &mut self.refused_key);
        let mut add = |passed: Bytes| {
            *count += passed.len();
            ready.push_back(passed);
        };
        observer.clean_end(at, &mut |piece: Bytes, note: &PieceInfo| {
            *refused_key = refused_key.or(note.refused_key().filter(|_| key_is_ours));
            if refused_key.is_some() {
                return;
            }
            *tail_is_out |= !gate.hides(note);
            gate.pass(piece, note, &mut add);
        });
        gate.rest(&mut add);
        if !had_token && observer.has_token() {
            self.token_came(at);
        }
    }

    /// The engine's body ended by its framing. An unfinished response gets an error
    /// event.
    fn finish_clean(&mut self) {
        let complete = self.seen().is_finished() || self.seen().error().is_some();
        if self.parts.reader == ResponseFormat::Events && !complete {
            if self.tail_is_out {
                self.offer(Bytes::from_static(b"\n\n"));
            }
            self.offer(self.error_event(&Rejection::StreamIncomplete));
        }
        self.close(Ending::Clean, None);
    }

    /// The engine failed or a limit ended the response: an incomplete tail is dropped and an error event
    /// follows; if that is impossible the response is aborted. A response that was finished, or already
    /// has its error, just ends.
    fn fail(&mut self, ending: Ending, refusal: &Rejection) {
        self.let_finish_go();
        let seen = self.seen();
        if self.parts.reader != ResponseFormat::Events || seen.long_event_is_out() {
            self.broken = true;
        } else if !seen.is_finished() && seen.error().is_none() {
            let event = self.error_event(refusal);
            self.offer(event);
        }
        self.close(ending, None);
    }

    /// Releases the held finish event: its time is over, or nothing follows.
    fn let_finish_go(&mut self) {
        self.parts.deadlines.finish = None;
        if let Some(event) = self.parts.gate.let_finish_go() {
            self.offer(event);
        }
    }

    /// Ends a finished response whose engine keeps its body
    /// open.
    fn end_it(&mut self) {
        self.let_finish_go();
        self.observer.iter_mut().for_each(Observer::stop);
        self.close(Ending::Clean, None);
    }

    /// After an early head no stream came, or one whose content does not concern the client.
    fn no_stream(&mut self, refusal: Rejection) {
        let of_our_key = match (&refusal, &self.subscriber) {
            (Rejection::EngineAnswered { status }, Some(subscriber)) => subscriber.refused_key(*status),
            _ => None,
        };
        let refusal = of_our_key.unwrap_or(refusal);
        let event = self.error_event(&refusal);
        self.offer(event);
        self.close(Ending::Broken, Some(refusal));
    }

    /// The rejection for a limit that passes before the engine has the request.
    fn unconnected(&self) -> Option<Rejection> {
        match &self.engine {
            UpstreamState::Opening(opening) => opening.unconnected().map(|failed| failed.refusal()),
            UpstreamState::Speaking(_) | UpstreamState::Over => None,
        }
    }

    /// Writes a comment against idle timeouts of proxies; never within an event that was partly sent.
    fn comment(&mut self) {
        self.parts.deadlines.hold = None;
        if !self.seen().long_event_is_out() {
            self.offer(KEEPALIVE);
            if self.beginning == StreamStart::Open {
                self.beginning = StreamStart::BehindComments;
            }
        }
        self.schedule_keepalive();
    }

    fn error_event(&self, refusal: &Rejection) -> Bytes {
        refusal.event(self.parts.dialect, &self.parts.request_id, self.seen().last_sequence_number())
    }

    fn offer(&mut self, bytes: Bytes) {
        self.ready_bytes += bytes.len();
        self.ready.push_back(bytes);
    }

    /// Ends the relay, once: releases the engine's connection (closed unless its body ended completely) and
    /// reports the timeline.
    fn close(&mut self, ending: Ending, refusal: Option<Rejection>) {
        let never_sent = self.unconnected().is_some();
        self.engine = UpstreamState::Over;
        self.alarm.rest();
        let Some(observer) = self.observer.as_mut() else { return };
        let at = self.ended_at.unwrap_or_else(|| self.parts.clock.now());
        if let Some(since) = self.parts.client.limited_since(at) {
            observer.limit_gaps(since);
        }
        if observer.is_finished() {
            self.parts.signals.is_alive(at);
        }
        if let Some(subscriber) = self.subscriber.take() {
            subscriber.end(RelayEnd { timeline: observer.last_look(ending, at), refusal, never_sent });
        }
        self.observer = None;
    }

    /// The rest to read after the finish for its usage, if any.
    fn rest(&mut self, ending: Ending) -> Option<AbandonedRelay> {
        self.observer.as_ref()?.finished_without_usage()?;
        if !matches!(self.engine, UpstreamState::Speaking(_)) {
            return None;
        }
        let UpstreamState::Speaking(engine) = std::mem::replace(&mut self.engine, UpstreamState::Over) else {
            return None;
        };
        let (clock, subscriber, mut observer) = (self.parts.clock, self.subscriber.take(), self.observer.take()?);
        let at = clock.now();
        if let Some(since) = self.parts.client.limited_since(at) {
            observer.limit_gaps(since);
        }
        Some(AbandonedRelay { clock, engine, observer, subscriber, ending, at })
    }

    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<DeadlineAction> {
        loop {
            // The idle limit is suspended while nothing polls the relay, and starts when it is
            // polled.
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

    /// The idle limit would have passed at `now`, but is suspended while the client does not read: whether it
    /// runs from a later moment.
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
    /// Dropped before its end: the client left, or its connection was closed.
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

/// Whether a JSON body may be an error by its beginning. White space is none: engines that keep a
/// connection awake by it are not held back.
fn may_be_error(body: impl Iterator<Item = u8>) -> bool {
    const BEGINNINGS: [&str; 8] = [
        "{\"error",
        "{\"object\":\"error",
        "{\"type\":\"error",
        "{\"code",
        "{\"detail",
        "{\"exception",
        "{\"message",
        "{\"status",
    ];
    let begun: Vec<u8> = body.filter(|byte| !byte.is_ascii_whitespace()).take(BEGINNINGS[1].len()).collect();
    let fits = |beginning: &str| begun.starts_with(beginning.as_bytes()) || beginning.as_bytes().starts_with(&begun);
    !begun.is_empty() && BEGINNINGS.into_iter().any(fits)
}

/// The stream behind a head of our own, if one came.
fn stream_of(opened: Result<UpstreamResponse, ConnectError>) -> Result<UpstreamBody, Rejection> {
    let UpstreamResponse { head, content, body } = opened.map_err(|failed| failed.refusal())?;
    match head.status.is_success() {
        // The early head names no coding, so coded bytes would be noise to the client.
        true if content.is_coded => Err(Rejection::EngineCoded),
        true if content.media == Media::Events => Ok(body),
        _ => Err(Rejection::EngineAnswered { status: head.status.as_u16() }),
    }
}

/// Joins adjacent pieces of one frame, so that one read leaves in
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

    /// Offset of a piece within the frame, if it is part of it.
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

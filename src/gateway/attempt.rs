//! One attempt: asks one engine, holds its head until the first token, and says how it went.
//!
//! What comes after a failure is not decided here (`retries`).

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderValue, RETRY_AFTER};

use super::admission::{AdmissionGuard, FreeSeat};
use super::promise::PoolHandle;
use super::reply;
use super::upstream::{UpstreamRequest, Upstreams};
use crate::admit::levels::{Kind, Kinds};
use crate::admit::queue::Reading;
use crate::forward::deadlines::earlier;
use crate::forward::headers::{self, Content, EngineHeaders, Hop, Media, RequestMeta};
use crate::forward::lines::{RequestWriter, UpstreamResponse};
use crate::forward::{
    AttemptRequest, ConnectError, ConnectErrorKind, ConnectingAttempt, DeadlineAction, Deadlines, HoldError, Relay,
    RelayConfig, UpstreamHead, limit_refusal, open,
};
use crate::observe::{Expect, Observer, Reader, TimeoutKind};
use crate::record::trace::OutgoingTrace;
use crate::refuse::Rejection;
use crate::rewrite::{self, EditPlan, Edits, EventGate, ReasoningEdit};
use crate::route::retry::{self, Attempts, Happened, Injection};
use crate::route::settings::{EngineAddress, EngineKind};
use crate::route::{DepartureWatch, Signals, Work};
use crate::units::{Dialect, EngineId, PoolId, Tick};

/// Where an attempt went.
#[derive(Clone, Debug)]
pub struct AttemptTarget {
    /// The pool.
    pub pool: PoolId,
    /// The pool's name, as responses show it.
    pub shown: Option<HeaderValue>,
    /// The engine.
    pub engine: EngineId,
    /// The client's own credential went along.
    pub credential_forwarded: bool,
    /// It belongs to another pool, which was passed over or left.
    pub is_away: bool,
}

/// What one attempt came to.
pub(super) enum AttemptResult {
    /// It speaks, from this moment: a first token, a whole head of a good answer, or the end of patience.
    Speaks(Box<HeldResponse>, Tick),
    /// It failed before the first forwarded byte: what happened, and the answer to be relayed
    /// if nothing better comes, or what is said instead of one.
    Failed(Happened, Result<Box<HeldResponse>, Rejection>),
    /// A limit of the class or the drain limit ended it.
    Ended(Rejection),
}

/// An engine's answer, with nothing forwarded yet.
pub struct HeldResponse {
    /// The head for the client.
    pub head: UpstreamHead,
    /// The body.
    pub relay: Box<Relay>,
    /// The engine's share of work, given back when this is dropped.
    pub work: Option<Box<Work>>,
    /// Which engine gave it.
    pub place: AttemptTarget,
    /// When the engine was asked.
    pub dispatched: Tick,
    /// Whether something was injected into its body.
    pub injection: Injection,
    /// What overload levels changed in its body.
    pub degraded: Kinds,
}

/// A further pool that takes a request whose engine is going away.
pub(super) struct Exit {
    /// Which of the route.
    pub(super) at: usize,
    /// The seat that it takes there; none where it needs none.
    pub(super) spare: Option<FreeSeat>,
}

/// One attempt at one engine.
pub(super) struct Attempt<'a> {
    pub(super) request: &'a UpstreamRequest<'a>,
    pub(super) upstreams: &'a Upstreams<'a>,
    pub(super) bound: &'a PoolHandle,
    pub(super) place: &'a AttemptTarget,
    pub(super) address: &'a Arc<EngineAddress>,
    pub(super) host: &'a Option<HeaderValue>,
    pub(super) may_inject: bool,
    pub(super) injection_proven: bool,
    /// An overload level may lower the output cap.
    pub(super) may_cap: bool,
    pub(super) fresh: bool,
    /// What is heard of the engine.
    pub(super) signals: &'a Arc<Signals>,
    /// There may be somebody to go on to where the engine goes away.
    pub(super) watches: bool,
    /// The attempts up to this one.
    pub(super) so_far: &'a Attempts,
    /// Which pool of the route this is.
    pub(super) at: usize,
    /// What the engine is told of the request's trace.
    pub(super) trace: Option<&'a OutgoingTrace>,
}

/// When and with what an engine was asked.
#[derive(Clone, Copy)]
struct Dispatch {
    dispatched: Tick,
    injection: Injection,
    degraded: Kinds,
}

impl Dispatch {
    /// What an answer means that is no success.
    fn answered(self, status: u16, retry_after: Option<Duration>) -> Happened {
        let happened = Happened::answer(status, retry_after, self.injection);
        if self.degraded.has(Kind::CapOutput) { happened.with_lowered_cap(status) } else { happened }
    }
}

/// What came of waiting for a head.
enum HeadResult {
    Came(UpstreamResponse),
    Failed(ConnectError),
    /// No head within `hold_head`: the gateway sends its own, and waits on behind it.
    Ours,
    /// The engine is going away, and another one takes the request.
    Departs,
    Ended(Rejection),
}

impl Attempt<'_> {
    /// Asks the engine. A failure comes back with what it means for the next attempt; `exit` is set
    /// if a further pool takes the request over.
    pub(super) async fn run(
        &self,
        work: &mut Option<Box<Work>>,
        held: &mut AdmissionGuard,
        exit: &mut Option<Exit>,
        deadlines: Deadlines,
        dispatched: Tick,
    ) -> AttemptResult {
        let mut watch = self.watches.then(|| DepartureWatch::new(self.signals));
        let edits = self.edits();
        let asked = Dispatch { dispatched, injection: self.injection(&edits), degraded: degraded(&edits) };
        let mut opening = poll_fn(|cx| Poll::Ready(open(self.call(&edits, dispatched), cx))).await;
        if self.request.has_head() {
            let every = self.request.context.policy.class.timeouts.keepalive;
            let deadlines = Deadlines { keepalive: every.map(|every| dispatched + every), ..deadlines };
            return self.wait_behind_early_head(opening, &edits, deadlines, work.take(), held, asked);
        }
        match self.wait_for_head(&mut opening, work, held, (&mut watch, exit), deadlines, dispatched).await {
            HeadResult::Failed(failed) => {
                if failed.why == ConnectErrorKind::Refused {
                    self.bound.yard.departs(&self.place.engine);
                }
                AttemptResult::Failed(happened(&failed), Err(failed.refusal()))
            }
            HeadResult::Departs => self.departed(),
            HeadResult::Ended(refusal) => AttemptResult::Ended(refusal),
            HeadResult::Ours => self.wait_behind_early_head(opening, &edits, deadlines, work.take(), held, asked),
            HeadResult::Came(UpstreamResponse { head, body }) => {
                let (status, head) = (head.status, UpstreamHead::of(head));
                let reader = self.reader(status, head.content);
                let relay =
                    Relay::new(self.parts(reader, &edits, deadlines), self.observer(reader, status.as_u16()), body);
                let mut spoke = Box::write(Box::new_uninit(), self.spoke(head, relay, asked));
                if !status.is_success() {
                    spoke.relay.head_came();
                    let retry_after = self.retry_after(&spoke.head.parts);
                    return self.failed(asked.answered(status.as_u16(), retry_after), status.as_u16(), spoke);
                }
                let Some(speaks) = self.hold(&mut spoke.relay, watch.as_mut(), exit).await else {
                    return self.departed();
                };
                match speaks {
                    Ok(at) => {
                        spoke.work = work.take();
                        AttemptResult::Speaks(spoke, at)
                    }
                    Err(HoldError::Error(error)) => self.failed(asked.answered(error.code, None), error.code, spoke),
                    Err(HoldError::Truncated | HoldError::Broken) => {
                        AttemptResult::Failed(Happened::Broken, Err(Rejection::StreamIncomplete))
                    }
                    Err(HoldError::TimedOut(limit)) => AttemptResult::Ended(self.limit(limit)),
                    Err(HoldError::Drained) => AttemptResult::Ended(Rejection::DrainCut),
                }
            }
        }
    }

    /// An answer that is no success. What an engine says of the pool's own key is nothing to the
    /// client: it learns that the gateway is set up wrongly, and so does the operator.
    fn failed(&self, happened: Happened, code: u16, answer: Box<HeldResponse>) -> AttemptResult {
        let settings = &self.bound.settings;
        let is_of_our_key = matches!(code, 401 | 403)
            && !self.place.credential_forwarded
            && (!settings.forward_authorization || settings.api_key.is_some());
        if !is_of_our_key {
            return AttemptResult::Failed(happened, Ok(answer));
        }
        if self.signals.is_to_tell_of_key(self.upstreams.clock.now()) {
            let (pool, engine, has_key) = (&self.place.pool, &self.place.engine, settings.api_key.is_some());
            tracing::warn!(
                %pool, %engine, status = code, has_key,
                "an engine refuses the pool's key: set `engine.api_key_file` to a file with the key that it wants"
            );
        }
        AttemptResult::Failed(
            happened,
            Err(Rejection::EngineKeyRefused { pool: self.place.pool.clone(), status: code }),
        )
    }

    /// The engine is going away, and nothing has come of its answer.
    fn departed(&self) -> AttemptResult {
        AttemptResult::Failed(Happened::Departing, Err(Rejection::EngineReset { pool: self.place.pool.clone() }))
    }

    /// Holds an answer as [`Relay::hold`] does. None where the engine is going away meanwhile and
    /// another one takes the request.
    async fn hold(
        &self,
        relay: &mut Relay,
        watch: Option<&mut DepartureWatch>,
        exit: &mut Option<Exit>,
    ) -> Option<Result<Tick, HoldError>> {
        let Some(watch) = watch else { return Some(relay.hold().await) };
        let mut holding = pin!(relay.hold());
        poll_fn(|cx| match holding.as_mut().poll(cx) {
            Poll::Ready(held) => Poll::Ready(Some(held)),
            Poll::Pending if self.departs(watch, exit, cx) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Whether the engine is going away and another one takes the request: of its pool, else of a
    /// further one of the route, for which `exit` is set then. Taken from the retry budget.
    fn departs(&self, watch: &mut DepartureWatch, exit: &mut Option<Exit>, cx: &Context<'_>) -> bool {
        while watch.poll(cx).is_ready() {
            let now = self.upstreams.clock.now();
            if self.bound.yard.lets_depart(self.so_far, now) {
                return true;
            }
            *exit = self.exit(now);
            if exit.is_some() {
                return true;
            }
        }
        false
    }

    /// A further pool that takes the request now.
    fn exit(&self, now: Tick) -> Option<Exit> {
        let (request, fleet) = (self.request, self.upstreams.fleet);
        if !self.so_far.may_go_on(now) {
            return None;
        }
        let further = request.context.routed.pools.iter().enumerate().skip(self.at + 1);
        further.filter(|(_, pool)| fleet.available(pool, now) > 0).find_map(|(at, pool)| {
            let spare = match request.cursor {
                None => None,
                Some(cursor) => Some(FreeSeat::of(request.context.policy.pool(pool), cursor.ask)?),
            };
            fleet.grants_retry(pool, now).then_some(Exit { at, spare })
        })
    }

    /// The engine is waited for behind a head of ours: from now on it has the request.
    fn wait_behind_early_head(
        &self,
        opening: ConnectingAttempt,
        edits: &Edits,
        deadlines: Deadlines,
        work: Option<Box<Work>>,
        held: &mut AdmissionGuard,
        asked: Dispatch,
    ) -> AttemptResult {
        if opening.is_connected() {
            held.dispatched(work.as_deref());
        }
        let parts = self.parts(Reader::Events, edits, deadlines);
        let relay = Relay::waiting(parts, self.observer(Reader::Events, 200), opening);
        let spoke = self.spoke(UpstreamHead::of(Arc::new(reply::our_head())), relay, asked);
        AttemptResult::Speaks(Box::new(HeldResponse { work, ..spoke }), self.upstreams.clock.now())
    }

    /// When the engine should have read the prompt of a request whose first token nobody sees,
    /// where that matters to those that wait.
    fn estimate_prefill_end(&self, work: Option<&Work>, dispatched: Tick) -> Option<Tick> {
        let is_limited = self.bound.is_limited() && self.bound.settings.queue.reading != Reading::NoLimit;
        let matters = is_limited && !self.request.context.streams();
        work.filter(|_| matters).map(|work| dispatched + work.time_to_read())
    }

    fn spoke(&self, head: UpstreamHead, relay: Box<Relay>, asked: Dispatch) -> HeldResponse {
        let Dispatch { dispatched, injection, degraded } = asked;
        HeldResponse { head, relay, work: None, place: self.place.clone(), dispatched, injection, degraded }
    }

    /// What is changed in the body for this engine.
    fn edits(&self) -> Edits {
        let (request, pool) = (self.request, &self.bound.settings);
        if request.context.is_fixed() {
            return Edits::default();
        }
        let takes_usage =
            matches!(request.context.dialect(), Dialect::Chat | Dialect::Completions) && request.context.streams();
        let inject = self.may_inject && takes_usage;
        let takes_priority = self.may_inject && pool.engine_priority && knows_priority(request.context.dialect());
        let plan = EditPlan {
            model: request.context.alias,
            engine_priority: takes_priority.then_some(request.engine_priority),
            lowered_cap: request.context.overload.cap().filter(|_| self.may_cap).map(|cap| cap.0),
            thinking: self.thinking(),
            inject_usage: inject && pool.inject.usage,
            continuous_usage: inject && pool.inject.continuous_usage,
            heeds_continuous_alone: pool.kind == EngineKind::Sglang,
        };
        rewrite::edits(request.context.facts(), request.context.dialect(), &plan)
    }

    /// A switch is injected as anything else, and only where the engine takes such.
    fn thinking(&self) -> ReasoningEdit {
        match self.bound.settings.kind {
            _ if !self.request.context.overload.without_reasoning() || !self.may_inject => ReasoningEdit::AsAsked,
            EngineKind::Generic => ReasoningEdit::Less,
            _ => ReasoningEdit::LessByTemplate,
        }
    }

    fn injection(&self, edits: &Edits) -> Injection {
        match edits.without_injection.is_some() {
            false => Injection::None,
            true if self.injection_proven => Injection::Proven,
            true => Injection::Unproven,
        }
    }

    fn call(&self, edits: &Edits, at: Tick) -> AttemptRequest {
        let request = self.request;
        let sent = RequestMeta {
            inspected: request.context.is_judged,
            decoded: request.context.body.was_coded,
            names_hop_fields: request.context.arrived.head.has_connection(),
        };
        let engine = EngineHeaders {
            fixed: &self.bound.fixed_headers,
            forward_authorization: self.bound.settings.forward_authorization,
            host: self.host.as_ref(),
        };
        let hop = Hop {
            id: &request.upstream_id,
            address: request.context.arrived.client.address(),
            version: request.context.arrived.head.version,
            trace: self.trace.map(|trace| (&trace.parent[..], trace.state.as_deref())),
        };
        let fields = headers::for_engine(&request.context.arrived.head.headers, &engine, sent, hop);
        let body = rewrite::apply(request.context.body.frames.as_slice(), &edits.splices);
        AttemptRequest {
            lines: Arc::clone(self.upstreams.lines),
            pool: Arc::clone(&self.bound.settings),
            engine: self.place.engine.clone(),
            address: Arc::clone(self.address),
            // The engine's path prefix stands before the client's own path and query.
            request: RequestWriter::new(
                request.context.arrived.head.method.as_str(),
                &self.address.base,
                request.context.target().as_str(),
                fields,
                body,
            ),
            fresh: self.fresh,
            at,
        }
    }

    async fn wait_for_head(
        &self,
        opening: &mut ConnectingAttempt,
        work: &mut Option<Box<Work>>,
        held: &mut AdmissionGuard,
        (watch, exit): (&mut Option<DepartureWatch>, &mut Option<Exit>),
        mut deadlines: Deadlines,
        dispatched: Tick,
    ) -> HeadResult {
        let ours = self.request.context.streams() && self.request.context.policy.class.timeouts.keepalive.is_some();
        if !ours {
            deadlines.hold = None;
        }
        let mut read = self.estimate_prefill_end(work.as_deref(), dispatched);
        let (clock, mut alarm) = (self.upstreams.clock, self.upstreams.alarms.alarm());
        // It has begun in this turn.
        let mut waits = opening.waits();
        poll_fn(|cx| {
            let opened = match std::mem::take(&mut waits) {
                true => Poll::Pending,
                false => Pin::new(&mut *opening).poll(cx),
            };
            if opening.is_connected() {
                held.dispatched(work.as_deref());
            }
            if let Poll::Ready(opened) = opened {
                return Poll::Ready(opened.map_or_else(HeadResult::Failed, HeadResult::Came));
            }
            if watch.as_mut().is_some_and(|watch| self.departs(watch, exit, cx)) {
                return Poll::Ready(HeadResult::Departs);
            }
            loop {
                let next = earlier(deadlines.next(), read);
                let rings = next.is_some_and(|next| alarm.poll(next, cx).is_ready());
                if rings {
                    let now = clock.now();
                    if let Some(due) = deadlines.due(now) {
                        return Poll::Ready(self.due(due, opening));
                    }
                    if read.take_if(|read| *read <= now).is_some() {
                        held.first_token();
                        work.iter_mut().for_each(|work| work.first_token(now));
                    }
                }
                if self.request.context.arrived.client.drain_is_over() {
                    return Poll::Ready(HeadResult::Ended(Rejection::DrainCut));
                }
                if !rings {
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    /// What it means that something is due while no head has come.
    #[cold]
    fn due(&self, due: DeadlineAction, opening: &ConnectingAttempt) -> HeadResult {
        match due {
            DeadlineAction::Limit(limit) => match opening.unconnected() {
                Some(failed) => HeadResult::Failed(failed),
                None => HeadResult::Ended(self.limit(limit)),
            },
            DeadlineAction::Hold | DeadlineAction::Keepalive | DeadlineAction::Finish | DeadlineAction::Over => {
                HeadResult::Ours
            }
        }
    }

    fn limit(&self, limit: TimeoutKind) -> Rejection {
        limit_refusal(&self.request.context.policy.class.timeouts, limit, self.request.context.streams())
    }

    /// Content type and coding choose the reader.
    fn reader(&self, status: StatusCode, content: Content) -> Reader {
        let generates = self.request.context.dialect().generates();
        if !status.is_success() {
            Reader::Opaque
        } else if content.is_coded {
            if generates {
                self.upstreams.fleet.answers_coded(&self.place.pool, &self.place.engine);
            }
            Reader::Coded
        } else if generates && content.media == Media::Events {
            Reader::Events
        } else if content.media == Media::Events {
            Reader::Aside
        } else if self.request.context.endpoint.answers_json() || content.media == Media::Json {
            Reader::Json
        } else {
            Reader::Opaque
        }
    }

    fn observer(&self, reader: Reader, status: u16) -> Observer {
        let request = self.request;
        let learned = || request.context.learned.tokens_per_event(&self.place.engine);
        let ratio = if reader == Reader::Events { learned() } else { 1.0 };
        request.pulse.expects(ratio);
        let expect = Expect::of(request.context.dialect(), request.context.facts(), request.context.start, ratio);
        let mut observer = Observer::new(expect, reader, status, request.context.policy.watch.clone());
        observer.knows(&self.bound.moulds);
        observer
    }

    fn parts(&self, reader: Reader, edits: &Edits, deadlines: Deadlines) -> RelayConfig {
        let request = self.request;
        RelayConfig {
            clock: self.upstreams.clock,
            alarms: Arc::clone(self.upstreams.alarms),
            client: request.context.arrived.client.clone(),
            gate: EventGate::new(edits.usage_injected, edits.continuous_injected),
            reader,
            deadlines,
            timeouts: Arc::clone(&request.context.policy.timeouts),
            pulse: request.pulse.clone(),
            dialect: request.context.dialect(),
            request_id: request.context.arrived.id.clone(),
            signals: Arc::clone(self.signals),
        }
    }

    fn retry_after(&self, head: &http::response::Parts) -> Option<Duration> {
        retry::retry_after(head.headers.get(RETRY_AFTER)?, self.upstreams.clock.wall())
    }
}

/// What overload levels changed in the body.
fn degraded(edits: &Edits) -> Kinds {
    let mut kinds = Kinds::default();
    if edits.cap_lowered {
        kinds.add(Kind::CapOutput);
    }
    if edits.reasoning_off {
        kinds.add(Kind::ReasoningOff);
    }
    kinds
}

/// The dialects in which vLLM reads a `priority`.
const fn knows_priority(dialect: Dialect) -> bool {
    matches!(dialect, Dialect::Chat | Dialect::Completions | Dialect::Responses)
}

fn happened(failed: &ConnectError) -> Happened {
    match failed.why {
        ConnectErrorKind::NoConnection | ConnectErrorKind::Refused => Happened::ConnectFailed,
        ConnectErrorKind::Lack => Happened::Lacking,
        ConnectErrorKind::Stale => Happened::StaleLine,
        ConnectErrorKind::Reset | ConnectErrorKind::Garbage => Happened::Broken,
    }
}

//! One attempt: sends the request to one engine, holds the response head until the first token, and
//! reports the result. What follows a failure is decided in `retries`.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderValue, RETRY_AFTER};

use super::admission::{AdmissionGuard, FreeSeat};
use super::local_reply;
use super::snapshot::PoolHandle;
use super::upstream::{UpstreamRequest, Upstreams};
use crate::admit::overload_control::{ActionKind, ActionKinds};
use crate::admit::queue::PrefillBudget;
use crate::forward::conn_pool::{RequestWriter, UpstreamResponse};
use crate::forward::deadlines::earlier;
use crate::forward::headers::{EngineHeaders, Hop, RequestLines, RequestMeta, TraceFields};
use crate::forward::{
    AttemptRequest, ConnectError, ConnectErrorKind, ConnectingAttempt, DeadlineAction, Deadlines, HoldError, Relay,
    RelayConfig, UpstreamHead, limit_refusal, start,
};
use crate::http1::{Content, Media};
use crate::observe::{Observer, ResponseExpectation, ResponseFormat, TimeoutKind};
use crate::record::trace::OutgoingTrace;
use crate::reject::Rejection;
use crate::rewrite::{self, EditPlan, Edits, EventGate, ReasoningEdit};
use crate::route::retry::{self, AttemptOutcome, Attempts, Injection};
use crate::route::settings::{EngineAddress, EngineKind, PoolSettings};
use crate::route::{DepartureWatch, EngineSignals, WorkGuard};
use crate::types::{Dialect, EngineId, PoolId, Tick};

/// Destination of an attempt.
#[derive(Clone, Debug)]
pub struct AttemptTarget {
    /// The pool.
    pub pool: PoolId,
    /// The pool's name as a header value.
    pub shown: Option<HeaderValue>,
    /// The engine.
    pub engine: EngineId,
    /// What the engine sees of a credential.
    pub credential: EngineCredential,
    /// It belongs to another pool, which was passed over or left.
    pub is_away: bool,
}

/// The credential that an engine sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineCredential {
    /// The client's own.
    Client,
    /// None: that of the client would go along.
    Awaited,
    /// The pool's.
    Pool,
    /// None: the pool has no key.
    Missing,
}

impl EngineCredential {
    /// What an engine says of it is nothing to the client.
    const fn is_ours(self) -> bool {
        matches!(self, EngineCredential::Pool | EngineCredential::Missing)
    }
}

impl AttemptTarget {
    /// What a client is told in place of this code, if the engine says it of the pool's own key.
    pub(super) fn refused_key(&self, code: u16) -> Option<Rejection> {
        (self.credential.is_ours() && matches!(code, 401 | 403))
            .then(|| Rejection::EngineKeyRefused { pool: self.pool.clone(), status: code })
    }

    /// Tells the operator of it, once a minute for each engine.
    pub(super) fn tell_of_refused_key(&self, status: u16, signals: &EngineSignals, now: Tick) {
        if signals.is_to_tell_of_key(now) {
            let (pool, engine, has_key) = (&self.pool, &self.engine, self.credential == EngineCredential::Pool);
            tracing::warn!(
                %pool, %engine, status, has_key,
                "an engine refuses the pool's key: set `engine.api_key_file` to a file with the key that it wants"
            );
        }
    }
}

/// What one attempt came to.
pub(super) enum AttemptResult {
    /// The response starts at this moment: a first token, the head of a good response, or the end of `hold_head`.
    Speaks(Box<HeldResponse>, Tick),
    /// It failed before the first forwarded byte: the outcome, and the response or rejection to send if no
    /// further attempt succeeds.
    Failed(AttemptOutcome, Result<Box<HeldResponse>, Rejection>),
    /// A class limit or the drain limit ended it.
    Ended(Rejection),
}

impl AttemptResult {
    /// The HTTP status of the response of a failed attempt, if it has one.
    pub(super) fn failed_status(&self) -> Option<u16> {
        match self {
            AttemptResult::Failed(_, Ok(answer)) => Some(answer.head.parts.status.as_u16()),
            AttemptResult::Failed(_, Err(_)) | AttemptResult::Speaks(..) | AttemptResult::Ended(_) => None,
        }
    }
}

/// An engine's response of which nothing was forwarded yet.
pub struct HeldResponse {
    /// The head for the client.
    pub head: UpstreamHead,
    /// The body.
    pub relay: Box<Relay>,
    /// The engine's share of work, released when dropped.
    pub work: Option<Box<WorkGuard>>,
    /// The engine.
    pub place: AttemptTarget,
    /// When the request was dispatched.
    pub dispatched: Tick,
    /// Whether its body had injected members.
    pub injection: Injection,
    /// Overload actions applied to its body.
    pub degraded: ActionKinds,
}

/// A further pool that takes over a request whose engine is going away.
pub(super) struct Exit {
    /// Index in the route.
    pub(super) at: usize,
    /// Its seat there; `None` if none is needed.
    pub(super) spare: Option<FreeSeat>,
}

/// The inputs of one attempt.
pub(super) struct Attempt<'a> {
    pub(super) request: &'a UpstreamRequest<'a>,
    pub(super) upstreams: &'a Upstreams<'a>,
    pub(super) bound: &'a PoolHandle,
    pub(super) place: &'a AttemptTarget,
    pub(super) address: &'a Arc<EngineAddress>,
    pub(super) host: &'a Option<HeaderValue>,
    pub(super) may_inject: bool,
    pub(super) injection_proven: bool,
    /// Whether an overload level may lower the output cap.
    pub(super) may_cap: bool,
    pub(super) fresh: bool,
    /// Signs of life of the engine.
    pub(super) signals: &'a Arc<EngineSignals>,
    /// Whether another engine could take over if this one goes away.
    pub(super) watches: bool,
    /// Attempts so far, this one included.
    pub(super) so_far: &'a Attempts,
    /// Index of the pool in the route.
    pub(super) at: usize,
    /// What the engine is told of the request's trace.
    pub(super) trace: Option<&'a OutgoingTrace>,
}

/// The fields of a client as they go to the engines of a pool: kept with the client's head, which most
/// clients repeat.
struct PassedFields {
    /// What they were made for.
    pool: Arc<PoolSettings>,
    sent: RequestMeta,
    address: Option<Box<str>>,
    lines: RequestLines,
}

impl PassedFields {
    fn of(attempt: &Attempt<'_>) -> Self {
        let Attempt { request, bound, .. } = attempt;
        let arrived = request.context.arrived;
        let engine =
            EngineHeaders { fixed: &bound.fixed_headers, forward_authorization: bound.settings.forward_authorization };
        let (sent, address) = (attempt.meta(), arrived.client.address());
        let hop = Hop { address, version: arrived.head.version };
        let lines = RequestLines::of(&arrived.head.headers, &engine, sent, hop);
        PassedFields { pool: Arc::clone(&bound.settings), sent, address: address.map(Box::from), lines }
    }

    /// Whether an attempt would make the same of the same head. (A pool's own fields come from its
    /// settings alone.)
    fn are_for(&self, attempt: &Attempt<'_>) -> bool {
        Arc::ptr_eq(&self.pool, &attempt.bound.settings)
            && self.sent == attempt.meta()
            && self.address.as_deref() == attempt.request.context.arrived.client.address()
    }
}

/// When and with which injection an engine was sent the request.
#[derive(Clone, Copy)]
struct Dispatch {
    dispatched: Tick,
    injection: Injection,
    degraded: ActionKinds,
}

impl Dispatch {
    /// The outcome of an unsuccessful status.
    fn answered(self, status: u16, retry_after: Option<Duration>) -> AttemptOutcome {
        let happened = AttemptOutcome::answer(status, retry_after, self.injection);
        if self.degraded.has(ActionKind::CapOutput) { happened.with_lowered_cap(status) } else { happened }
    }
}

/// Result of waiting for a head.
enum HeadResult {
    Came(UpstreamResponse),
    Failed(ConnectError),
    /// No head within `hold_head`: the gateway sends its own and continues to wait.
    Ours,
    /// The engine is going away, and another one takes over.
    Departs,
    Ended(Rejection),
}

impl Attempt<'_> {
    /// Sends the request to the engine. Sets `exit` if a further pool takes the request
    /// over.
    pub(super) async fn run(
        &self,
        work: &mut Option<Box<WorkGuard>>,
        held: &mut AdmissionGuard,
        exit: &mut Option<Exit>,
        deadlines: Deadlines,
        dispatched: Tick,
    ) -> AttemptResult {
        let mut watch = self.watches.then(|| DepartureWatch::new(self.signals));
        let edits = self.edits();
        let asked = Dispatch { dispatched, injection: self.injection(&edits), degraded: degraded(&edits) };
        let mut opening = poll_fn(|cx| Poll::Ready(start(self.call(&edits, dispatched), cx))).await;
        if self.request.has_head() {
            let every = self.request.context.policy.class.timeouts.keepalive;
            let deadlines = Deadlines { keepalive: every.map(|every| dispatched + every), ..deadlines };
            return self.wait_behind_early_head(opening, &edits, deadlines, work.take(), held, asked);
        }
        let watched = (&mut watch, &mut *exit);
        match await_in_place!(self.wait_for_head(&mut opening, work, held, watched, deadlines, dispatched)) {
            HeadResult::Failed(failed) => {
                if failed.why == ConnectErrorKind::Refused {
                    self.bound.live_pool.departs(&self.place.engine);
                }
                AttemptResult::Failed(happened(&failed), Err(failed.refusal()))
            }
            HeadResult::Departs => self.departed(),
            HeadResult::Ended(refusal) => AttemptResult::Ended(refusal),
            HeadResult::Ours => self.wait_behind_early_head(opening, &edits, deadlines, work.take(), held, asked),
            HeadResult::Came(UpstreamResponse { head, content, body }) => {
                let (status, head) = (head.status, UpstreamHead { parts: head, content });
                let reader = self.reader(status, head.content);
                let relay =
                    Relay::new(self.parts(reader, &edits, deadlines), self.observer(reader, status.as_u16()), body);
                let mut spoke = Box::write(Box::new_uninit(), self.spoke(head, relay, asked));
                if !status.is_success() {
                    spoke.relay.head_came();
                    let retry_after = self.retry_after(&spoke.head.parts);
                    return self.failed(asked.answered(status.as_u16(), retry_after), status.as_u16(), spoke);
                }
                let Some(speaks) = self.hold_until_first_token(&mut spoke.relay, watch.as_mut(), exit).await else {
                    return self.departed();
                };
                match speaks {
                    Ok(at) => {
                        spoke.work = work.take();
                        AttemptResult::Speaks(spoke, at)
                    }
                    Err(HoldError::Error(error)) => self.failed(asked.answered(error.code, None), error.code, spoke),
                    Err(HoldError::Truncated | HoldError::Broken) => {
                        AttemptResult::Failed(AttemptOutcome::Broken, Err(Rejection::StreamIncomplete))
                    }
                    Err(HoldError::TimedOut(limit)) => AttemptResult::Ended(self.limit(limit)),
                    Err(HoldError::Drained) => AttemptResult::Ended(Rejection::DrainCut),
                }
            }
        }
    }

    /// Handles an unsuccessful response. An engine's rejection of the pool's own key is the operator's concern:
    /// the client gets a 502, the log a warning.
    fn failed(&self, happened: AttemptOutcome, code: u16, answer: Box<HeldResponse>) -> AttemptResult {
        match self.place.refused_key(code) {
            None => AttemptResult::Failed(happened, Ok(answer)),
            Some(refused) => {
                self.place.tell_of_refused_key(code, self.signals, self.upstreams.clock.now());
                AttemptResult::Failed(happened, Err(refused))
            }
        }
    }

    /// The engine is going away before any of its response was used.
    fn departed(&self) -> AttemptResult {
        AttemptResult::Failed(AttemptOutcome::Departing, Err(Rejection::EngineReset { pool: self.place.pool.clone() }))
    }

    /// Holds a response as [`Relay::hold_until_first_token`] does. `None` if the engine goes away meanwhile and another one takes
    /// over.
    async fn hold_until_first_token(
        &self,
        relay: &mut Relay,
        watch: Option<&mut DepartureWatch>,
        exit: &mut Option<Exit>,
    ) -> Option<Result<Tick, HoldError>> {
        let Some(watch) = watch else { return Some(relay.hold_until_first_token().await) };
        let mut holding = pin!(relay.hold_until_first_token());
        poll_fn(|cx| match holding.as_mut().poll(cx) {
            Poll::Ready(held) => Poll::Ready(Some(held)),
            Poll::Pending if self.departs(watch, exit, cx) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Whether the engine is going away and another one takes over: of its pool, else of a further pool of the
    /// route, for which `exit` is set. Draws on the retry budget.
    fn departs(&self, watch: &mut DepartureWatch, exit: &mut Option<Exit>, cx: &Context<'_>) -> bool {
        while watch.poll(cx).is_ready() {
            let now = self.upstreams.clock.now();
            if self.bound.live_pool.lets_depart(self.so_far, now) {
                return true;
            }
            *exit = self.exit(now);
            if exit.is_some() {
                return true;
            }
        }
        false
    }

    /// A further pool with room for the request.
    fn exit(&self, now: Tick) -> Option<Exit> {
        let (request, fleet) = (self.request, self.upstreams.fleet);
        if !self.so_far.may_go_on(now) {
            return None;
        }
        let further = request.context.routed.pools.iter().enumerate().skip(self.at + 1);
        further.filter(|(_, pool)| fleet.available(pool, now) > 0).find_map(|(at, pool)| {
            let spare = match request.cursor {
                None => None,
                Some(cursor) => Some(FreeSeat::of(request.context.policy.pool(pool), cursor.queue_request)?),
            };
            fleet.grants_retry(pool, now).then_some(Exit { at, spare })
        })
    }

    /// Waits for the engine behind an early head; the engine has the request from now on.
    fn wait_behind_early_head(
        &self,
        opening: ConnectingAttempt,
        edits: &Edits,
        deadlines: Deadlines,
        work: Option<Box<WorkGuard>>,
        held: &mut AdmissionGuard,
        asked: Dispatch,
    ) -> AttemptResult {
        if opening.is_connected() {
            held.dispatched(work.as_deref());
        }
        let parts = self.parts(ResponseFormat::Events, edits, deadlines);
        let relay = Relay::waiting(parts, self.observer(ResponseFormat::Events, 200), opening);
        let spoke = self.spoke(UpstreamHead::of(Arc::new(local_reply::our_head())), relay, asked);
        AttemptResult::Speaks(Box::new(HeldResponse { work, ..spoke }), self.upstreams.clock.now())
    }

    /// Estimated end of prefill for a request whose first token is not observable, if waiting requests depend
    /// on it.
    fn estimate_prefill_end(&self, work: Option<&WorkGuard>, dispatched: Tick) -> Option<Tick> {
        let is_limited = self.bound.is_limited() && self.bound.settings.queue.reading != PrefillBudget::NoLimit;
        let matters = is_limited && !self.request.context.streams();
        work.filter(|_| matters).map(|work| dispatched + work.time_to_read())
    }

    fn spoke(&self, head: UpstreamHead, relay: Box<Relay>, asked: Dispatch) -> HeldResponse {
        let Dispatch { dispatched, injection, degraded } = asked;
        HeldResponse { head, relay, work: None, place: self.place.clone(), dispatched, injection, degraded }
    }

    /// The edits of the body for this engine.
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

    /// Reasoning switches are injected, and only for engines that accept injections.
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
        let head = &request.context.arrived.head;
        let made;
        let fields = match head.memo::<PassedFields>().filter(|known| known.are_for(self)) {
            Some(known) => known,
            None => {
                made = Arc::new(PassedFields::of(self));
                head.keep_memo(&made);
                &made
            }
        };
        let trace = self.trace.map(|trace| TraceFields { parent: &trace.parent[..], state: trace.state.as_deref() });
        let body = rewrite::apply(request.context.body.frames.as_slice(), &edits.splices);
        AttemptRequest {
            lines: Arc::clone(self.upstreams.lines),
            pool: Arc::clone(&self.bound.settings),
            engine: self.place.engine.clone(),
            address: Arc::clone(self.address),
            // The engine's path prefix precedes the client's path and query.
            request: RequestWriter::new(
                head.method.as_str(),
                &self.address.base,
                &request.context.target(),
                |head| fields.lines.put(head, self.host.as_ref(), &request.upstream_id, trace),
                body,
            ),
            fresh: self.fresh,
            at,
        }
    }

    /// What is told of the request beside its fields.
    fn meta(&self) -> RequestMeta {
        RequestMeta {
            inspected: self.request.context.is_judged,
            decoded: self.request.context.body.was_coded,
            reads: self.request.context.endpoint.is_of_engine(),
            names_hop_fields: self.request.context.arrived.head.has_connection(),
            traced: self.trace.is_some(),
        }
    }

    async fn wait_for_head(
        &self,
        opening: &mut ConnectingAttempt,
        work: &mut Option<Box<WorkGuard>>,
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
        // It was started in this turn.
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

    /// Effect of a deadline while no head has come.
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

    /// Chooses the reader by content type and coding.
    fn reader(&self, status: StatusCode, content: Content) -> ResponseFormat {
        let generates = self.request.context.dialect().generates();
        if !status.is_success() {
            ResponseFormat::Opaque
        } else if content.is_coded {
            if generates {
                self.upstreams.fleet.mark_compressed(&self.place.pool, &self.place.engine);
            }
            ResponseFormat::Coded
        } else if generates && content.media == Media::Events {
            ResponseFormat::Events
        } else if content.media == Media::Events {
            ResponseFormat::Aside
        } else if self.request.context.endpoint.answers_json() || content.media == Media::Json {
            ResponseFormat::Json
        } else {
            ResponseFormat::Opaque
        }
    }

    fn observer(&self, reader: ResponseFormat, status: u16) -> Observer {
        let request = self.request;
        let learned = || request.context.learned.tokens_per_event(&self.place.engine);
        let ratio = if reader == ResponseFormat::Events { learned() } else { 1.0 };
        request.progress_cell.set_tokens_per_event(ratio);
        let expect =
            ResponseExpectation::of(request.context.dialect(), request.context.facts(), request.context.start, ratio);
        let mut observer = Observer::new(expect, reader, status, request.context.policy.watch.clone());
        observer.use_templates(&self.bound.templates);
        observer
    }

    fn parts(&self, reader: ResponseFormat, edits: &Edits, deadlines: Deadlines) -> RelayConfig {
        let request = self.request;
        RelayConfig {
            clock: self.upstreams.clock,
            alarms: Arc::clone(self.upstreams.alarms),
            client: request.context.arrived.client.clone(),
            gate: EventGate::new(edits.usage_injected, edits.continuous_injected),
            reader,
            deadlines,
            timeouts: Arc::clone(&request.context.policy.timeouts),
            progress_cell: request.progress_cell.clone(),
            dialect: request.context.dialect(),
            request_id: request.context.arrived.id.clone(),
            signals: Arc::clone(self.signals),
            key_is_ours: self.place.credential.is_ours(),
        }
    }

    fn retry_after(&self, head: &http::response::Parts) -> Option<Duration> {
        retry::retry_after(head.headers.get(RETRY_AFTER)?, self.upstreams.clock.wall())
    }
}

/// Overload actions applied to the body.
fn degraded(edits: &Edits) -> ActionKinds {
    let mut kinds = ActionKinds::default();
    if edits.cap_lowered {
        kinds.add(ActionKind::CapOutput);
    }
    if edits.reasoning_off {
        kinds.add(ActionKind::ReasoningOff);
    }
    kinds
}

/// The dialects in which vLLM reads `priority`.
const fn knows_priority(dialect: Dialect) -> bool {
    matches!(dialect, Dialect::Chat | Dialect::Completions | Dialect::Responses)
}

fn happened(failed: &ConnectError) -> AttemptOutcome {
    match failed.why {
        ConnectErrorKind::NoConnection | ConnectErrorKind::Refused => AttemptOutcome::ConnectFailed,
        ConnectErrorKind::Lack => AttemptOutcome::Lacking,
        ConnectErrorKind::Stale => AttemptOutcome::StaleConnection,
        ConnectErrorKind::Reset | ConnectErrorKind::Garbage => AttemptOutcome::Broken,
    }
}

//! The loop over engines: asks one, and the pure rules of `route::retry` what comes next.

use std::borrow::Cow;
use std::future::poll_fn;
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderValue, RETRY_AFTER};
use http::uri::PathAndQuery;

use super::admission::{AdmissionGuard, FreeSeat, PoolCursor};
use super::promise::{ClassPolicy, PoolHandle};
use super::reply;
use crate::accept::ParsedHead as Request;
use crate::admit::levels::{Kind, Kinds};
use crate::admit::queue::Reading;
use crate::clock::{Alarms, Clock};
use crate::forward::deadlines::earlier;
use crate::forward::headers::{self, Content, EngineHeaders, Hop, Media, RequestMeta};
use crate::forward::lines::{ConnPool, RequestWriter, UpstreamResponse};
use crate::forward::{
    AttemptRequest, ConnectError, ConnectErrorKind, ConnectingAttempt, DeadlineAction, Deadlines, HoldError, Relay,
    RelayConfig, UpstreamHead, limit_refusal, open,
};
use crate::inspect::{Facts, ModelRatios};
use crate::judge::{NonStreaming, Objective, Objectives, ProgressCell};
use crate::observe::{Expect, Observer, Reader, TimeoutKind};
use crate::record::{ActiveRequest, Retry};
use crate::refuse::Rejection;
use crate::rewrite::{self, EditPlan, Edits, EventGate, ReasoningEdit};
use crate::route::retry::{Attempts, Happened, Injection, Next};
use crate::route::settings::{Balance, EngineAddress, EngineKind, Pool};
use crate::route::{self, Aims, Choice, DepartureWatch, Fleet, Routed, Signals, Size, TenantKey, Want, Work, retry};
use crate::units::{ClientState, Dialect, Endpoint, EngineId, PoolId, RequestId, Tick, Tokens};

/// What one request asks of engines. Everything that stays the same over its attempts.
pub struct UpstreamRequest<'a> {
    /// The class's promise, with the request's own targets.
    pub promise: &'a ClassPolicy,
    /// Where the request may go.
    pub routed: &'a Routed,
    /// Where in its route it has been let in.
    pub first: usize,
    /// The pool in its route where it belongs: what another one, which was asked instead, finds
    /// wrong with it is no word about the client.
    pub home: usize,
    /// Its way along the pools of its route; none where no pool has seats.
    pub walk: Option<&'a PoolCursor<'a>>,
    /// What its body said.
    pub facts: &'a Facts,
    /// Its path.
    pub endpoint: Endpoint,
    /// Its answer is judged.
    pub is_judged: bool,
    /// Path and query, for the engine.
    pub target: &'a PathAndQuery,
    /// Its head, as it came.
    pub head: &'a Request,
    /// Its body, as it came (decoded).
    pub frames: &'a [bytes::Bytes],
    /// The body wore a content coding, which is gone.
    pub was_coded: bool,
    /// No byte of the body may be changed (multipart).
    pub fixed: bool,
    /// The model's name behind an alias.
    pub alias: Option<&'a str>,
    /// Whose request it is, as far as breakers tell tenants apart.
    pub tenant: TenantKey,
    /// Work that it brings, estimated.
    pub size: Size,
    /// The most output tokens that an overload level leaves it.
    pub cap: Option<Tokens>,
    /// An overload level sends it without extended reasoning.
    pub without_reasoning: bool,
    /// Its `priority`, for engines that schedule by it.
    pub engine_priority: i64,
    /// When its head had been parsed.
    pub arrival: Tick,
    /// Where its objectives run from.
    pub start: Tick,
    /// The present moment, where nothing was waited for since it was looked at.
    pub begins: Option<Tick>,
    /// The id that the client knows.
    pub id: &'a RequestId,
    /// The id that engines see: unique.
    pub upstream_id: Cow<'a, [u8]>,
    /// The client's side.
    pub client: &'a ClientState,
    /// What is known of its model.
    pub learned: &'a ModelRatios,
    /// Told of token events.
    pub pulse: ProgressCell,
}

/// The parts of the house that attempts need.
pub struct Upstreams<'a> {
    /// The clock.
    pub clock: Clock,
    /// Its timers.
    pub alarms: &'a Arc<Alarms>,
    /// All engines.
    pub fleet: &'a Arc<Fleet>,
    /// Their connections.
    pub lines: &'a Arc<ConnPool>,
}

/// An answer that has begun to speak, or the last one that an engine gave.
pub struct SelectedResponse {
    /// The answer.
    pub answer: Box<HeldResponse>,
    /// The attempts so far.
    pub attempts: Box<Attempts>,
    /// When it began to speak.
    pub at: Tick,
    /// The head went out by time: nothing has shown yet that the engine serves the request.
    pub unproven: bool,
    /// It is a failure that the attempts have dealt with: the last answer there was.
    pub has_failed: bool,
}

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
enum AttemptResult {
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

/// Asks engines until one speaks or nothing is left (`docs/semantics.md`, section 5).
///
/// # Errors
/// A refusal of ours where no attempt gave an answer.
pub async fn first_willing_engine(
    ask: &UpstreamRequest<'_>,
    yard: &Upstreams<'_>,
    held: &mut AdmissionGuard,
    visit: &mut ActiveRequest,
) -> Result<SelectedResponse, Rejection> {
    let deadlines = ask.deadlines();
    let until = earlier(deadlines.first_token, deadlines.total).unwrap_or(Tick::from_nanos(u64::MAX));
    let pools = &ask.routed.pools;
    let first = &pools[ask.first];
    // Once more where nobody could be asked: a breaker turns traffic to others, and where there
    // are none it must not turn it away.
    let order = (ask.first..pools.len()).map(|at| (at, false)).chain((0..pools.len()).map(|at| (at, true)));
    let first_bound = ask.promise.pool(first);
    let mut attempts = AttemptsGuard::new(yard, first_bound, until, ask.tenant);
    let mut last = FallbackResponse::default();
    let mut here = ask.first;

    // What made a further attempt necessary: it is counted once an engine is found for it.
    let mut behind: Option<Happened> = None;
    // An engine has said that it has too much to do.
    let mut pushed_back = false;
    // It has been given a seat in the next pool as if it had come there first.
    let mut has_seat = false;
    // Where it goes because its engine is going away, with all that it needs there.
    let mut exit: Option<Exit> = None;

    for (at, early) in order {
        let pool = &pools[at];
        let bound = if at == ask.first { first_bound } else { ask.promise.pool(pool) };
        if early && attempts.count() > 0 && exit.is_none() {
            break;
        }
        // Passed over while it waited for a seat, or because another one takes it.
        if (!early && at < here) || exit.as_ref().is_some_and(|exit| exit.at != at) {
            continue;
        }
        let is_let_in = exit.is_some();
        // Inside a pool the seat is kept; in another one only a seat that nobody wants is taken.
        let spare = match (exit.take(), ask.walk.filter(|_| at != here)) {
            (Some(exit), _) => exit.spare,
            (None, None) => None,
            (None, Some(walk)) => match FreeSeat::of(bound, walk.ask) {
                None => continue,
                spare => spare,
            },
        };
        // The clock is read where something was waited for, and not in between.
        let mut now = ask.begins.filter(|_| attempts.count() == 0).unwrap_or_else(|| yard.clock.now());
        // Before anything is taken or counted there: what is denied leaves no trace in this pool.
        let is_first = std::mem::take(&mut has_seat) || behind.is_none() || is_let_in;
        if !is_first && !yard.fleet.grants_retry(pool, now) {
            break;
        }
        if let Some(spare) = spare {
            held.takes(spare);
        }
        here = at;
        attempts.enter(&bound.settings);
        attempts.keep_off(ask.model().and_then(|model| bound.yard.engines_without(model)));
        if early {
            attempts.pass_breakers();
        }
        let mut begins = !early;
        let spill = 'pool: loop {
            let (want, begins) = (ask.want(&bound.settings, now), std::mem::take(&mut begins));
            let Some(choice) = bound.yard.choose(&mut attempts, want, ask.facts.prefix_blocks(), begins, now) else {
                yard.fleet.settle(pool, &mut attempts, now);
                break behind.is_none_or(|happened| spills(happened, &attempts));
            };
            let Choice { engine, address, host, may_inject, injection_proven, has_neighbours, work } = choice;
            let signals = Arc::clone(work.signals());
            let mut work = Some(work);
            let credential_forwarded = ask.forwards_credential(bound);
            // A pool that is down is nobody's: then the other one's word counts.
            let has_place = |home: &PoolId| pushed_back || yard.fleet.available(home, now) > 0;
            let is_away = here != ask.home && has_place(&pools[ask.home]);
            let place =
                AttemptTarget { pool: pool.clone(), shown: bound.shown.clone(), engine, credential_forwarded, is_away };
            visit.attempts(pool, place.engine.clone());
            if let Some(happened) = behind.take() {
                visit.retries(reason_of(happened));
            }
            // Behind a head of ours nothing can be asked again, nor can a line that has gone stale.
            let mut fresh = ask.has_head();
            loop {
                // A refusal of what was injected could not be undone behind a head of ours.
                let is_safe = injection_proven || !ask.has_head();
                let may_inject = may_inject && is_safe && !attempts.without_injection();
                let attempt = Attempt {
                    ask,
                    yard,
                    bound,
                    place: &place,
                    address: &address,
                    host: &host,
                    may_inject,
                    injection_proven,
                    may_cap: !attempts.without_cap(),
                    fresh,
                    signals: &signals,
                    watches: has_neighbours || here + 1 < pools.len(),
                    so_far: &attempts,
                    at: here,
                };
                let tried = attempt.make(&mut work, held, &mut exit, deadlines, now).await;
                now = match tried {
                    AttemptResult::Speaks(_, at) => at,
                    AttemptResult::Failed(..) | AttemptResult::Ended(_) => yard.clock.now(),
                };
                let happened = match tried {
                    AttemptResult::Speaks(spoke, _) => {
                        if spoke.relay.has_spoken() {
                            yard.fleet.succeeded_in(&bound.yard, &mut attempts, spoke.injection, now);
                        }
                        attempts.commit();
                        return Ok(SelectedResponse::of(spoke, attempts.take(), now, false));
                    }
                    // Nothing more has happened; what was held back counts, as the attempts end here.
                    AttemptResult::Ended(refusal) => return Err(refusal),
                    AttemptResult::Failed(happened, _) if is_away && happened.refuses() => {
                        last.passed_over(ask);
                        happened
                    }
                    AttemptResult::Failed(happened, answer) => {
                        last.note(answer);
                        happened
                    }
                };
                pushed_back |= matches!(happened, Happened::PushBack { .. });
                match yard.fleet.failed(pool, &mut attempts, happened, now) {
                    Next::SameFresh => {
                        visit.retries(Retry::StaleConnection);
                        fresh = true;
                    }
                    Next::SameWithoutInjection | Next::SameWithoutCap => {
                        visit.retries(Retry::Injection);
                        fresh = false;
                    }
                    Next::Another => {
                        behind = Some(happened);
                        continue 'pool;
                    }
                    Next::Relay | Next::GiveUp => {
                        behind = Some(happened);
                        if exit.is_some() {
                            break 'pool true;
                        }
                        // An overload level may have put the pool where it belongs behind this one.
                        let belongs_behind = is_away && happened.refuses() && here < ask.home;
                        break 'pool belongs_behind || spills(happened, &attempts);
                    }
                }
            }
        };
        if !spill || now >= until {
            break;
        }
        let Some(walk) = ask.walk.filter(|_| attempts.is_unheard()) else { continue };
        held.sits(None);
        match walk.house.seat_behind(walk, at, visit).await {
            Some(Ok(seated)) => {
                visit.admitted(seated.since.unwrap_or(now));
                held.sits(seated.seat);
                (here, has_seat) = (seated.first, true);
            }
            // It has waited: that is what it is told about.
            Some(Err(refusal)) if yard.clock.now() > now => return Err(refusal),
            Some(Err(_)) | None => break,
        }
    }
    last.settle(ask, attempts.take(), yard.clock.now())
}

/// The attempts of a request that has no answer yet. Dropped, the client has left: what was
/// held back about the engines until the next attempt would be known counts now.
struct AttemptsGuard<'a> {
    yard: &'a Upstreams<'a>,
    attempts: Option<Box<Attempts>>,
}

impl<'a> AttemptsGuard<'a> {
    fn new(yard: &'a Upstreams<'a>, first: &PoolHandle, until: Tick, tenant: TenantKey) -> Self {
        // In a box from the start: they are large, and go through many hands.
        let attempts = Box::write(Box::new_uninit(), Attempts::new(&first.settings, until).of_tenant(tenant));
        AttemptsGuard { yard, attempts: Some(attempts) }
    }

    fn take(mut self) -> Box<Attempts> {
        self.attempts.take().expect("only this takes them, and it takes their holder with it")
    }
}

impl Deref for AttemptsGuard<'_> {
    type Target = Attempts;
    fn deref(&self) -> &Attempts {
        self.attempts.as_deref().expect("there until they are taken")
    }
}

impl DerefMut for AttemptsGuard<'_> {
    fn deref_mut(&mut self) -> &mut Attempts {
        self.attempts.as_deref_mut().expect("there until they are taken")
    }
}

impl Drop for AttemptsGuard<'_> {
    fn drop(&mut self) {
        if let Some(mut attempts) = self.attempts.take() {
            let pool = attempts.pool().clone();
            self.yard.fleet.settle(&pool, &mut attempts, self.yard.clock.now());
        }
    }
}

/// Whether the next pool of the route may be asked: this one could not be reached, or has
/// pushed back with all it has. What looks like the request's own doing goes nowhere else.
fn spills(happened: Happened, attempts: &Attempts) -> bool {
    matches!(happened, Happened::ConnectFailed | Happened::PushBack { .. }) && !attempts.failed_alike()
}

/// A further pool that takes a request whose engine is going away.
struct Exit {
    /// Which of the route.
    at: usize,
    /// The seat that it takes there; none where it needs none.
    spare: Option<FreeSeat>,
}

/// How a further attempt is counted.
fn reason_of(happened: Happened) -> Retry {
    match happened {
        Happened::ConnectFailed => Retry::ConnectFailed,
        Happened::PushBack { .. } => Retry::PushBack,
        Happened::Departing => Retry::Departing,
        _ => Retry::Fault,
    }
}

/// The last answer that an engine gave, and what is said if there is none.
#[derive(Default)]
struct FallbackResponse {
    kept: Option<Box<HeldResponse>>,
    refusal: Option<Rejection>,
    /// Either is from an attempt.
    is_known: bool,
}

impl FallbackResponse {
    /// A pool where the request does not belong refused it: what was said before stands, and where
    /// nothing was, that its own pool has no place for it.
    fn passed_over(&mut self, ask: &UpstreamRequest<'_>) {
        if !self.is_known {
            let pool = ask.routed.pools[ask.home].clone();
            self.refusal = Some(Rejection::QueueTimeout { pool, retry_after: None });
        }
    }

    fn note(&mut self, answer: Result<Box<HeldResponse>, Rejection>) {
        self.is_known = true;
        match answer {
            Ok(answer) => self.kept = Some(answer),
            Err(refusal) => self.refusal = Some(refusal),
        }
    }

    fn settle(
        self,
        ask: &UpstreamRequest<'_>,
        attempts: Box<Attempts>,
        at: Tick,
    ) -> Result<SelectedResponse, Rejection> {
        let nobody = || Rejection::NoEngine { pool: ask.routed.pools[ask.home].clone() };
        match self.kept {
            Some(kept) => Ok(SelectedResponse::of(kept, attempts, at, true)),
            None => Err(self.refusal.unwrap_or_else(nobody)),
        }
    }
}

impl SelectedResponse {
    fn of(answer: Box<HeldResponse>, attempts: Box<Attempts>, at: Tick, has_failed: bool) -> Self {
        let unproven = !answer.relay.has_spoken();
        SelectedResponse { answer, attempts, at, unproven, has_failed }
    }
}

impl UpstreamRequest<'_> {
    fn streams(&self) -> bool {
        self.facts.streams()
    }

    fn dialect(&self) -> Dialect {
        self.endpoint.dialect()
    }

    /// The client has its head already: it waited for longer than heads are held.
    fn has_head(&self) -> bool {
        self.walk.is_some_and(PoolCursor::has_head)
    }

    /// The model's name as engines know it.
    fn model(&self) -> Option<&str> {
        self.alias.or_else(|| self.facts.model.as_ref().map(|field| &*field.value))
    }

    /// What it asks of an engine of this pool.
    fn want(&self, pool: &Pool, at: Tick) -> Want {
        let Objectives { ttft, tpot, e2e, .. } = &*self.promise.objectives;
        let threshold = |objective: &Option<Objective>| objective.map(|objective| objective.threshold);
        let aims = match self.streams() {
            true => Aims { ttft: threshold(ttft), tpot: threshold(tpot), e2e: threshold(e2e) },
            false => Aims { e2e: self.promise.objectives.whole_budget(self.size.decode.0), ..Aims::NONE },
        };
        let objectives = &self.promise.objectives;
        let is_judged = self.streams() || objectives.non_streaming == NonStreaming::Judged;
        let whole = threshold(e2e).filter(|_| is_judged);
        let key = match &pool.balance {
            Balance::LeastWork | Balance::RoundRobin => 0,
            Balance::PrefixAffinity => self.facts.prefix_hash,
            Balance::SessionAffinity { header } => {
                self.head.headers.get(header).map_or(0, |session| route::key_of(session.as_bytes()))
            }
        };
        Want { size: self.size, aims, whole, spent: at - self.start, key }
    }

    /// All limits run from arrival, over all attempts.
    fn deadlines(&self) -> Deadlines {
        let limits = &self.promise.class.timeouts;
        let head = if self.streams() { limits.first_token } else { limits.response_head };
        Deadlines {
            total: Some(self.arrival + limits.total),
            first_token: Some(self.arrival + head),
            hold: Some(self.arrival + limits.hold_head),
            ..Deadlines::default()
        }
    }

    fn forwards_credential(&self, bound: &PoolHandle) -> bool {
        let forward_authorization = bound.settings.forward_authorization;
        let engine = EngineHeaders { fixed: &bound.fixed_headers, forward_authorization, host: None };
        headers::forwards_credential(&self.head.headers, &engine)
    }
}

/// One attempt at one engine.
struct Attempt<'a> {
    ask: &'a UpstreamRequest<'a>,
    yard: &'a Upstreams<'a>,
    bound: &'a PoolHandle,
    place: &'a AttemptTarget,
    address: &'a Arc<EngineAddress>,
    host: &'a Option<HeaderValue>,
    may_inject: bool,
    injection_proven: bool,
    /// An overload level may lower the output cap.
    may_cap: bool,
    fresh: bool,
    /// What is heard of the engine.
    signals: &'a Arc<Signals>,
    /// There may be somebody to go on to where the engine goes away.
    watches: bool,
    /// The attempts up to this one.
    so_far: &'a Attempts,
    /// Which pool of the route this is.
    at: usize,
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
    async fn make(
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
        if self.ask.has_head() {
            let every = self.ask.promise.class.timeouts.keepalive;
            let deadlines = Deadlines { keepalive: every.map(|every| dispatched + every), ..deadlines };
            return self.behind_our_head(opening, &edits, deadlines, work.take(), held, asked);
        }
        match self.await_head(&mut opening, work, held, (&mut watch, exit), deadlines, dispatched).await {
            HeadResult::Failed(failed) => {
                if failed.why == ConnectErrorKind::Refused {
                    self.bound.yard.departs(&self.place.engine);
                }
                AttemptResult::Failed(happened(&failed), Err(failed.refusal()))
            }
            HeadResult::Departs => self.departed(),
            HeadResult::Ended(refusal) => AttemptResult::Ended(refusal),
            HeadResult::Ours => self.behind_our_head(opening, &edits, deadlines, work.take(), held, asked),
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
        if self.signals.is_to_tell_of_key(self.yard.clock.now()) {
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
            let now = self.yard.clock.now();
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
        let (ask, fleet) = (self.ask, self.yard.fleet);
        if !self.so_far.may_go_on(now) {
            return None;
        }
        let further = ask.routed.pools.iter().enumerate().skip(self.at + 1);
        further.filter(|(_, pool)| fleet.available(pool, now) > 0).find_map(|(at, pool)| {
            let spare = match ask.walk {
                None => None,
                Some(walk) => Some(FreeSeat::of(ask.promise.pool(pool), walk.ask)?),
            };
            fleet.grants_retry(pool, now).then_some(Exit { at, spare })
        })
    }

    /// The engine is waited for behind a head of ours: from now on it has the request.
    fn behind_our_head(
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
        AttemptResult::Speaks(Box::new(HeldResponse { work, ..spoke }), self.yard.clock.now())
    }

    /// When the engine should have read the prompt of a request whose first token nobody sees,
    /// where that matters to those that wait.
    fn read_unseen(&self, work: Option<&Work>, dispatched: Tick) -> Option<Tick> {
        let is_limited = self.bound.is_limited() && self.bound.settings.queue.reading != Reading::NoLimit;
        let matters = is_limited && !self.ask.streams();
        work.filter(|_| matters).map(|work| dispatched + work.time_to_read())
    }

    fn spoke(&self, head: UpstreamHead, relay: Box<Relay>, asked: Dispatch) -> HeldResponse {
        let Dispatch { dispatched, injection, degraded } = asked;
        HeldResponse { head, relay, work: None, place: self.place.clone(), dispatched, injection, degraded }
    }

    /// What is changed in the body for this engine.
    fn edits(&self) -> Edits {
        let (ask, pool) = (self.ask, &self.bound.settings);
        if ask.fixed {
            return Edits::default();
        }
        let takes_usage = matches!(ask.dialect(), Dialect::Chat | Dialect::Completions) && ask.streams();
        let inject = self.may_inject && takes_usage;
        let takes_priority = self.may_inject && pool.engine_priority && knows_priority(ask.dialect());
        let plan = EditPlan {
            model: ask.alias,
            engine_priority: takes_priority.then_some(ask.engine_priority),
            lowered_cap: ask.cap.filter(|_| self.may_cap).map(|cap| cap.0),
            thinking: self.thinking(),
            inject_usage: inject && pool.inject.usage,
            continuous_usage: inject && pool.inject.continuous_usage,
            heeds_continuous_alone: pool.kind == EngineKind::Sglang,
        };
        rewrite::edits(ask.facts, ask.dialect(), &plan)
    }

    /// A switch is injected as anything else, and only where the engine takes such.
    fn thinking(&self) -> ReasoningEdit {
        match self.bound.settings.kind {
            _ if !self.ask.without_reasoning || !self.may_inject => ReasoningEdit::AsAsked,
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
        let ask = self.ask;
        let sent = RequestMeta {
            inspected: ask.is_judged,
            decoded: ask.was_coded,
            names_hop_fields: ask.head.has_connection(),
        };
        let engine = EngineHeaders {
            fixed: &self.bound.fixed_headers,
            forward_authorization: self.bound.settings.forward_authorization,
            host: self.host.as_ref(),
        };
        let hop = Hop { id: &ask.upstream_id, address: ask.client.address(), version: ask.head.version };
        let fields = headers::for_engine(&ask.head.headers, &engine, sent, hop);
        let body = rewrite::apply(ask.frames, &edits.splices);
        AttemptRequest {
            lines: Arc::clone(self.yard.lines),
            pool: Arc::clone(&self.bound.settings),
            engine: self.place.engine.clone(),
            address: Arc::clone(self.address),
            // The engine's path prefix stands before the client's own path and query.
            request: RequestWriter::new(
                ask.head.method.as_str(),
                &self.address.base,
                ask.target.as_str(),
                fields,
                body,
            ),
            fresh: self.fresh,
            at,
        }
    }

    async fn await_head(
        &self,
        opening: &mut ConnectingAttempt,
        work: &mut Option<Box<Work>>,
        held: &mut AdmissionGuard,
        (watch, exit): (&mut Option<DepartureWatch>, &mut Option<Exit>),
        mut deadlines: Deadlines,
        dispatched: Tick,
    ) -> HeadResult {
        let ours = self.ask.streams() && self.ask.promise.class.timeouts.keepalive.is_some();
        if !ours {
            deadlines.hold = None;
        }
        let mut read = self.read_unseen(work.as_deref(), dispatched);
        let (clock, mut alarm) = (self.yard.clock, self.yard.alarms.alarm());
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
                if self.ask.client.drain_is_over() {
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
        limit_refusal(&self.ask.promise.class.timeouts, limit, self.ask.streams())
    }

    /// Content type and coding choose the reader.
    fn reader(&self, status: StatusCode, content: Content) -> Reader {
        let generates = self.ask.dialect().generates();
        if !status.is_success() {
            Reader::Opaque
        } else if content.is_coded {
            if generates {
                self.yard.fleet.answers_coded(&self.place.pool, &self.place.engine);
            }
            Reader::Coded
        } else if generates && content.media == Media::Events {
            Reader::Events
        } else if content.media == Media::Events {
            Reader::Aside
        } else if self.ask.endpoint.answers_json() || content.media == Media::Json {
            Reader::Json
        } else {
            Reader::Opaque
        }
    }

    fn observer(&self, reader: Reader, status: u16) -> Observer {
        let ask = self.ask;
        let learned = || ask.learned.tokens_per_event(&self.place.engine);
        let ratio = if reader == Reader::Events { learned() } else { 1.0 };
        ask.pulse.expects(ratio);
        let expect = Expect::of(ask.dialect(), ask.facts, ask.start, ratio);
        let mut observer = Observer::new(expect, reader, status, ask.promise.watch.clone());
        observer.knows(&self.bound.moulds);
        observer
    }

    fn parts(&self, reader: Reader, edits: &Edits, deadlines: Deadlines) -> RelayConfig {
        let ask = self.ask;
        RelayConfig {
            clock: self.yard.clock,
            alarms: Arc::clone(self.yard.alarms),
            client: ask.client.clone(),
            gate: EventGate::new(edits.usage_injected, edits.continuous_injected),
            reader,
            deadlines,
            timeouts: Arc::clone(&ask.promise.timeouts),
            pulse: ask.pulse.clone(),
            dialect: ask.dialect(),
            request_id: ask.id.clone(),
            signals: Arc::clone(self.signals),
        }
    }

    fn retry_after(&self, head: &http::response::Parts) -> Option<Duration> {
        retry::retry_after(head.headers.get(RETRY_AFTER)?, self.yard.clock.wall())
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

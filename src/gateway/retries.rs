//! The retry loop: tries engines along the route until one gives a response.
//!
//! One attempt is in `attempt`; what follows a failure is decided by the pure rules of `route::retry`. The
//! loop has three levels, each a function: the pools of the route ([`send_with_retries`]), the engines of a
//! pool (`try_pool`), and the tries of one engine
//! (`try_engine`).

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::admission::{AdmissionGuard, FreeSeat};
use super::attempt::{Attempt, AttemptResult, AttemptTarget, EngineCredential, Exit, HeldResponse};
use super::snapshot::PoolHandle;
use super::upstream::{UpstreamRequest, Upstreams};
use crate::forward::Deadlines;
use crate::forward::deadlines::earlier;
use crate::record::{ActiveRequest, AttemptFailure, Retry};
use crate::reject::Rejection;
use crate::route::retry::{AttemptOutcome, Attempts, RetryDecision};
use crate::route::{PickedEngine, TenantKey};
use crate::types::{EngineId, PoolId, Tick};

/// A response that has started, or the last one that an engine gave.
pub struct SelectedResponse {
    /// The response.
    pub answer: Box<HeldResponse>,
    /// The attempts so far.
    pub attempts: Box<Attempts>,
    /// When it started.
    pub at: Tick,
    /// Whether the head was released by time, so that nothing has shown yet that the engine serves the request.
    pub unproven: bool,
    /// Whether it is a failure already reported to the breaker: the last response there was.
    pub has_failed: bool,
}

/// Tries engines until one gives a response or none is left (`docs/semantics.md`, section 5).
///
/// # Errors
/// The gateway's rejection, if no attempt gave a response.
pub async fn send_with_retries(
    request: &UpstreamRequest<'_>,
    upstreams: &Upstreams<'_>,
    held: &mut AdmissionGuard,
    active: &mut ActiveRequest,
) -> Result<SelectedResponse, Rejection> {
    let mut retries = RetryLoop::new(request, upstreams, held, active);
    let pools = request.context.routed.pools.len();
    // Second pass: if every engine is ejected, breakers are bypassed. A breaker may divert traffic but must
    // not drop it.
    let first_pass = (request.first..pools).map(|at| (at, Pass::First));
    for (at, pass) in first_pass.chain((0..pools).map(|at| (at, Pass::PastBreakers))) {
        match retries.enter_pool(at, pass) {
            PoolEntry::Entered => {}
            PoolEntry::Skipped => continue,
            PoolEntry::Over => break,
        }
        match await_in_place!(retries.try_pool(at, pass))? {
            PoolResult::Selected(selected) => return Ok(selected),
            PoolResult::Left { may_spill: false } => break,
            PoolResult::Left { may_spill: true } if retries.now >= retries.until => break,
            PoolResult::Left { may_spill: true } => {}
        }
        if !retries.queue_behind(at).await? {
            break;
        }
    }
    retries.give_up()
}

/// Which engines a pass may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Those whose breaker is closed.
    First,
    /// All, because the first pass found none.
    PastBreakers,
}

/// Whether a pool of the route is tried.
enum PoolEntry {
    /// Yes; its seat is taken if needed.
    Entered,
    /// No: the request skipped it while waiting, or it has no free seat.
    Skipped,
    /// No further pool may be tried.
    Over,
}

/// Result of trying the engines of one pool.
enum PoolResult {
    /// A response.
    Selected(SelectedResponse),
    /// No other engine of it is tried.
    Left {
        /// Whether the next pool may be tried.
        may_spill: bool,
    },
}

/// Result of trying one engine.
enum EngineResult {
    /// A response.
    Selected(SelectedResponse),
    /// Another engine of the pool may be tried.
    Another,
    /// No other engine of the pool is tried.
    LeavePool {
        /// Whether the next pool may be tried.
        may_spill: bool,
    },
}

/// The retry state of one request.
struct RetryLoop<'a> {
    request: &'a UpstreamRequest<'a>,
    upstreams: &'a Upstreams<'a>,
    held: &'a mut AdmissionGuard,
    active: &'a mut ActiveRequest,
    deadlines: Deadlines,
    /// No attempt begins after this.
    until: Tick,
    attempts: AttemptsGuard<'a>,
    /// The response if no attempt succeeds.
    fallback: FallbackResponse,
    /// Index of the pool in which it has its seat.
    here: usize,
    /// The failure that requires a further attempt; counted once an engine is found for it.
    behind: Option<AttemptOutcome>,
    /// Whether an engine has pushed back.
    pushed_back: bool,
    /// Whether it queued for its seat in the next pool, like a request that came there first.
    has_seat: bool,
    /// The further pool that takes over because the engine is going away.
    exit: Option<Exit>,
    /// The current moment; the clock is read after waits only.
    now: Tick,
}

impl<'a> RetryLoop<'a> {
    fn new(
        request: &'a UpstreamRequest<'a>,
        upstreams: &'a Upstreams<'a>,
        held: &'a mut AdmissionGuard,
        active: &'a mut ActiveRequest,
    ) -> Self {
        let deadlines = request.deadlines();
        let until = earlier(deadlines.first_token, deadlines.total).unwrap_or(Tick::from_nanos(u64::MAX));
        let first = request.context.policy.pool(&request.context.routed.pools[request.first]);
        RetryLoop {
            request,
            upstreams,
            held,
            active,
            deadlines,
            until,
            attempts: AttemptsGuard::new(upstreams, first, until, request.context.tenant_key()),
            fallback: FallbackResponse::default(),
            here: request.first,
            behind: None,
            pushed_back: false,
            has_seat: false,
            exit: None,
            now: request.begins.unwrap_or(request.context.arrived.arrival),
        }
    }

    /// Enters a pool: takes a seat there, and a share of its retry budget.
    fn enter_pool(&mut self, at: usize, pass: Pass) -> PoolEntry {
        let (request, pool) = (self.request, &self.request.context.routed.pools[at]);
        let bound = request.context.policy.pool(pool);
        if pass == Pass::PastBreakers && self.attempts.count() > 0 && self.exit.is_none() {
            return PoolEntry::Over;
        }
        let is_passed_over = pass == Pass::First && at < self.here;
        if is_passed_over || self.exit.as_ref().is_some_and(|exit| exit.at != at) {
            return PoolEntry::Skipped;
        }
        let is_taken_over = self.exit.is_some();
        // Within a pool the seat is kept; in another one only a free seat is taken.
        let spare = match (self.exit.take(), request.cursor.filter(|_| at != self.here)) {
            (Some(exit), _) => exit.spare,
            (None, None) => None,
            (None, Some(cursor)) => match FreeSeat::of(bound, cursor.queue_request) {
                None => return PoolEntry::Skipped,
                spare => spare,
            },
        };
        if request.begins.is_none() || self.attempts.count() > 0 {
            self.now = self.upstreams.clock.now();
        }
        // Before anything is taken or counted, so that a denied retry leaves no trace in this pool.
        let is_first = std::mem::take(&mut self.has_seat) || self.behind.is_none() || is_taken_over;
        if !is_first && !self.upstreams.fleet.grants_retry(pool, self.now) {
            return PoolEntry::Over;
        }
        if let Some(spare) = spare {
            self.held.swap_seat(spare);
        }
        self.here = at;
        self.attempts.enter(&bound.settings);
        self.attempts.keep_off(request.context.model.and_then(|model| bound.live_pool.engines_without(model)));
        if pass == Pass::PastBreakers {
            self.attempts.pass_breakers();
        }
        PoolEntry::Entered
    }

    /// Tries the engines of a pool one after the other.
    async fn try_pool(&mut self, at: usize, pass: Pass) -> Result<PoolResult, Rejection> {
        let (request, pool) = (self.request, &self.request.context.routed.pools[at]);
        let bound = request.context.policy.pool(pool);
        let mut begins = pass == Pass::First;
        loop {
            let (pick, begins) = (request.pick(&bound.settings, self.now), std::mem::take(&mut begins));
            let prefix = request.context.facts().prefix_blocks();
            let Some(choice) = bound.live_pool.choose(&mut self.attempts, pick, prefix, begins, self.now) else {
                self.upstreams.fleet.settle(pool, &mut self.attempts, self.now);
                let may_spill = self.behind.is_none_or(|happened| may_leave_pool(happened, &self.attempts));
                return Ok(PoolResult::Left { may_spill });
            };
            match await_in_place!(self.try_engine(bound, choice))? {
                EngineResult::Selected(selected) => return Ok(PoolResult::Selected(selected)),
                EngineResult::Another => {}
                EngineResult::LeavePool { may_spill } => return Ok(PoolResult::Left { may_spill }),
            }
        }
    }

    /// Tries one engine; again if its connection was stale, or without injection if that was
    /// refused.
    async fn try_engine(&mut self, bound: &PoolHandle, choice: PickedEngine) -> Result<EngineResult, Rejection> {
        let request = self.request;
        let PickedEngine { engine, address, host, may_inject, injection_proven, has_neighbours, work } = choice;
        let place = self.place(bound, engine);
        let signals = Arc::clone(work.signals());
        let mut work = Some(work);
        let trace = self.active.begin_attempt(&place.pool, place.engine.clone(), self.now);
        if let Some(happened) = self.behind.take() {
            self.active.retries(reason_of(happened));
        }
        // Behind an early head neither an injection nor a stale connection could be retried.
        let mut fresh = request.has_head();
        loop {
            let is_safe = injection_proven || !request.has_head();
            let attempt = Attempt {
                request,
                upstreams: self.upstreams,
                bound,
                place: &place,
                address: &address,
                host: &host,
                may_inject: may_inject && is_safe && !self.attempts.without_injection(),
                injection_proven,
                may_cap: !self.attempts.without_cap(),
                fresh,
                signals: &signals,
                watches: has_neighbours || self.here + 1 < request.context.routed.pools.len(),
                so_far: &self.attempts,
                at: self.here,
                trace: trace.as_deref(),
            };
            let result = await_in_place!(attempt.run(&mut work, self.held, &mut self.exit, self.deadlines, self.now));
            let status = result.failed_status();
            let happened = match self.keep_result(bound, &place, result)? {
                AttemptVerdict::Selected(selected) => return Ok(EngineResult::Selected(selected)),
                AttemptVerdict::Failed(happened) => happened,
            };
            match self.upstreams.fleet.failed(&place.pool, &mut self.attempts, happened, self.now) {
                RetryDecision::SameFresh => {
                    self.active.retries(Retry::StaleConnection);
                    fresh = true;
                }
                RetryDecision::SameWithoutInjection | RetryDecision::SameWithoutCap => {
                    self.active.retries(Retry::Injection);
                    fresh = false;
                }
                RetryDecision::Another => {
                    self.leave_engine(happened, status);
                    return Ok(EngineResult::Another);
                }
                RetryDecision::Relay | RetryDecision::GiveUp => {
                    self.leave_engine(happened, status);
                    return Ok(EngineResult::LeavePool { may_spill: self.may_spill(place.is_away, happened) });
                }
            }
        }
    }

    /// No further try of this engine.
    fn leave_engine(&mut self, happened: AttemptOutcome, status: Option<u16>) {
        self.active.attempt_failed(AttemptFailure { at: self.now, what: happened.as_str(), status });
        self.behind = Some(happened);
    }

    /// Destination of this attempt.
    fn place(&self, bound: &PoolHandle, engine: EngineId) -> AttemptTarget {
        let request = self.request;
        let pools = &request.context.routed.pools;
        // If the request's own pool is down, the other pool's response counts like its own.
        let has_place = |home: &PoolId| self.pushed_back || self.upstreams.fleet.available(home, self.now) > 0;
        AttemptTarget {
            pool: pools[self.here].clone(),
            shown: bound.shown.clone(),
            engine,
            credential: match &bound.settings {
                _ if request.forwards_credential(bound) => EngineCredential::Client,
                pool if pool.api_key.is_some() => EngineCredential::Pool,
                pool if pool.forward_authorization => EngineCredential::Awaited,
                _ => EngineCredential::Missing,
            },
            is_away: self.here != request.context.home() && has_place(&pools[request.context.home()]),
        }
    }

    /// Evaluates an attempt's result: the response, or the fallback.
    fn keep_result(
        &mut self,
        bound: &PoolHandle,
        place: &AttemptTarget,
        result: AttemptResult,
    ) -> Result<AttemptVerdict, Rejection> {
        self.now = match result {
            AttemptResult::Speaks(_, at) => at,
            AttemptResult::Failed(..) | AttemptResult::Ended(_) => self.upstreams.clock.now(),
        };
        let happened = match result {
            AttemptResult::Speaks(spoke, at) => {
                if spoke.relay.has_spoken() {
                    self.upstreams.fleet.succeeded_in(&bound.live_pool, &mut self.attempts, spoke.injection, at);
                }
                self.attempts.commit();
                return Ok(AttemptVerdict::Selected(SelectedResponse::of(spoke, self.attempts.take(), at, false)));
            }
            // No further attempt: reports held-back outcomes.
            AttemptResult::Ended(rejection) => return Err(rejection),
            AttemptResult::Failed(happened, _) if place.is_away && happened.refuses() => {
                self.fallback.passed_over(self.request);
                happened
            }
            AttemptResult::Failed(happened, answer) => {
                self.fallback.note(answer);
                happened
            }
        };
        self.pushed_back |= matches!(happened, AttemptOutcome::PushBack { .. });
        Ok(AttemptVerdict::Failed(happened))
    }

    /// Whether the next pool may be tried after this failure.
    fn may_spill(&self, is_away: bool, happened: AttemptOutcome) -> bool {
        // An overload level may have moved the request's own pool behind this one.
        let belongs_behind = is_away && happened.refuses() && self.here < self.request.context.home();
        self.exit.is_some() || belongs_behind || may_leave_pool(happened, &self.attempts)
    }

    /// Queues for a seat in a pool after `at`, if no engine has had the request yet. False if none has
    /// room.
    async fn queue_behind(&mut self, at: usize) -> Result<bool, Rejection> {
        let Some(cursor) = self.request.cursor.filter(|_| self.attempts.is_unheard()) else { return Ok(true) };
        self.held.set_seat(None);
        match cursor.gateway.seat_behind(cursor, at, self.active).await {
            Some(Ok(seated)) => {
                self.active.admitted(seated.since.unwrap_or(self.now));
                self.held.set_seat(seated.seat);
                (self.here, self.has_seat) = (seated.first, true);
                Ok(true)
            }
            // If it waited in the second queue, that queue's error is reported.
            Some(Err(rejection)) if self.upstreams.clock.now() > self.now => Err(rejection),
            Some(Err(_)) | None => Ok(false),
        }
    }

    /// The last response of an engine, or a rejection if there was none.
    fn give_up(mut self) -> Result<SelectedResponse, Rejection> {
        let (attempts, at) = (self.attempts.take(), self.upstreams.clock.now());
        self.fallback.settle(self.request, attempts, at)
    }
}

/// An attempt's result as far as the loop depends on it.
enum AttemptVerdict {
    Selected(SelectedResponse),
    Failed(AttemptOutcome),
}

/// The attempts of a request without a response. When dropped because the client left, outcomes held back
/// until the next attempt are reported.
struct AttemptsGuard<'a> {
    upstreams: &'a Upstreams<'a>,
    attempts: Option<Box<Attempts>>,
}

impl<'a> AttemptsGuard<'a> {
    fn new(upstreams: &'a Upstreams<'a>, first: &PoolHandle, until: Tick, tenant: TenantKey) -> Self {
        // Boxed from the start, because they are large and passed through many functions.
        let attempts = Box::write(Box::new_uninit(), Attempts::new(&first.settings, until).of_tenant(tenant));
        AttemptsGuard { upstreams, attempts: Some(attempts) }
    }

    /// Called once, at the end of the loop.
    fn take(&mut self) -> Box<Attempts> {
        self.attempts.take().expect("the loop ends where they are taken")
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
            self.upstreams.fleet.settle(&pool, &mut attempts, self.upstreams.clock.now());
        }
    }
}

/// Whether the next pool may be tried: this one could not be reached, or pushed back on all engines.
/// Failures that look like the request's own fault are not spread.
fn may_leave_pool(happened: AttemptOutcome, attempts: &Attempts) -> bool {
    matches!(happened, AttemptOutcome::ConnectFailed | AttemptOutcome::PushBack { .. }) && !attempts.failed_alike()
}

/// The retry reason of an outcome.
fn reason_of(happened: AttemptOutcome) -> Retry {
    match happened {
        AttemptOutcome::ConnectFailed => Retry::ConnectFailed,
        AttemptOutcome::PushBack { .. } => Retry::PushBack,
        AttemptOutcome::Departing => Retry::Departing,
        _ => Retry::Fault,
    }
}

/// The last response that an engine gave, or the rejection if there is none.
#[derive(Default)]
struct FallbackResponse {
    kept: Option<Box<HeldResponse>>,
    refusal: Option<Rejection>,
    /// Whether either comes from an attempt.
    is_known: bool,
}

impl FallbackResponse {
    /// A fallback pool refused it: an earlier response or rejection stands, otherwise the request's own pool
    /// has no room.
    fn passed_over(&mut self, request: &UpstreamRequest<'_>) {
        if !self.is_known {
            let pool = request.context.routed.pools[request.context.home()].clone();
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
        request: &UpstreamRequest<'_>,
        attempts: Box<Attempts>,
        at: Tick,
    ) -> Result<SelectedResponse, Rejection> {
        let nobody = || Rejection::NoEngine { pool: request.context.routed.pools[request.context.home()].clone() };
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

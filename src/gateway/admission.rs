//! Admission of a request: the tenant's limits first, then a seat (`seat`).
//!
//! [`AdmissionGuard`] holds the reservation and the seat. It lives with the request, first in the
//! handler's future and then in the response body, and releases both when dropped: settled if the
//! response's timeline is known, by the rules for a disconnected client otherwise.

use std::borrow::Cow;
use std::time::Duration;

use super::charge::{self, ServiceSpeed, Unseen};
use super::request::{RequestContext, plausible_choices};
use super::snapshot::{PoolHandle, SettingsSnapshot};
use super::state::GatewayState;
use crate::admit::Reservation;
use crate::admit::limit::settings::OverLimit;
use crate::admit::limit::{LimitExceeded, Output, Used, Wanted};
use crate::admit::pool_queue::Seat;
use crate::admit::queue::{Deadline, LimitState, QueueRequest};
use crate::admit::redis::Denied;
use crate::clock::Clock;
use crate::inspect::Facts;
use crate::judge::{JudgeContext, Objective, Objectives, Progress, breaks_at};
use crate::observe::Timeline;
use crate::record::ActiveRequest;
use crate::reject::Rejection;
use crate::route::{Prediction, WorkEstimate, WorkGuard};
use crate::types::{ApiPath, TenantId, Tick, Tokens};

/// Resources held by a request until its end.
#[derive(Debug)]
pub struct AdmissionGuard {
    clock: Clock,
    /// Boxed because it is large, and absent without limits.
    metered: Option<Box<Metered>>,
    seat: Option<Seat>,
    prompt: Tokens,
    /// Whether an engine was sent the request, so that a client that leaves has used the prompt.
    dispatched: bool,
}

/// A reservation, and the inputs of its final charge.
#[derive(Debug)]
struct Metered {
    reservation: Reservation,
    /// Whether the path's tokens are charged, unlike `tokenize` and the like.
    costs_tokens: bool,
    /// Whether it asks for a stream of tokens.
    streams: bool,
    unseen: Unseen,
    /// Of the last dispatched attempt.
    pace: Option<ServiceSpeed>,
}

impl Metered {
    fn unseen(&self, at: Tick) -> Tokens {
        self.pace.as_ref().map_or(Tokens::ZERO, |pace| self.unseen.by(pace, at))
    }

    fn settle(self, used: Used, at: Tick) {
        self.reservation.settle(if self.costs_tokens { used } else { Used::default() }, at);
    }
}

impl AdmissionGuard {
    /// The guard of a request that waits for its seat.
    #[must_use]
    pub fn new(allowed: ReservedTokens, prompt: Tokens, clock: Clock) -> Self {
        AdmissionGuard { clock, metered: allowed.metered, seat: None, prompt, dispatched: false }
    }

    /// Sets the seat, if it needs one.
    pub fn set_seat(&mut self, seat: Option<Seat>) {
        self.seat = seat;
    }

    /// Records that it was dispatched to an engine with this share of work.
    pub fn dispatched(&mut self, work: Option<&WorkGuard>) {
        self.dispatched = true;
        let Some((metered, work)) = self.metered.as_deref_mut().zip(work) else { return };
        let is_new = metered.pace.is_none_or(|pace| pace.dispatched != work.dispatched());
        if is_new && metered.unseen.most > Tokens::ZERO {
            metered.pace = Some(ServiceSpeed::of(work.dispatched(), work.prediction(), || work.time_to_read()));
        }
    }

    /// Records the first token, which means that the prompt was prefilled.
    pub fn first_token(&mut self) {
        if let Some(seat) = &mut self.seat {
            seat.prefill_done();
        }
    }

    /// Moves to a seat in another pool.
    pub fn swap_seat(&mut self, spare: FreeSeat) {
        self.seat = spare.0;
    }

    /// Charges a response that ended, and releases the seat. `never_sent`: its last attempt was still
    /// connecting.
    pub fn settle(mut self, timeline: &Timeline, case: &JudgeContext, refusal: Option<&Rejection>, never_sent: bool) {
        let metered = self.metered.take();
        let unseen = |at| metered.as_ref().map_or(Tokens::ZERO, |metered| metered.unseen(at));
        let used = charge::of_answer(timeline, case, refusal, self.prompt, unseen);
        let used = used.filter(|_| self.dispatched || !never_sent);
        if let Some((metered, used)) = metered.zip(used) {
            metered.settle(used, timeline.end);
        }
        if let Some(seat) = self.seat.take() {
            seat.settle(used.map_or(Tokens::ZERO, |used| used.input + used.output));
        }
    }

    /// The gateway ended it before a response was relayed. A time limit is charged like a disconnect; other
    /// failures are free.
    pub fn refused(&mut self, refusal: &Rejection) {
        if !refusal.is_time_limit() {
            self.metered = None;
            self.seat = None;
        }
    }
}

/// A free seat in another pool; no seat is needed if the pool has no
/// limit.
#[derive(Debug)]
#[must_use = "dropped at once it is nobody's"]
pub struct FreeSeat(Option<Seat>);

impl FreeSeat {
    /// `None` if no seat of the pool is free.
    pub fn of(pool: &PoolHandle, queue_request: &QueueRequest) -> Option<FreeSeat> {
        let Some(pool_queue) = &pool.pool_queue else { return Some(FreeSeat(None)) };
        pool_queue.take_free_seat(queue_request).map(|seat| FreeSeat(Some(seat)))
    }
}

impl Drop for AdmissionGuard {
    /// The client left before a response was relayed, or a time limit fired.
    fn drop(&mut self) {
        if !self.dispatched || std::thread::panicking() {
            return;
        }
        if let Some(metered) = self.metered.take() {
            let now = self.clock.now();
            // The head of a stream is held until its first token, so none has come.
            let output = if metered.streams { Tokens::ZERO } else { metered.unseen(now) };
            metered.settle(Used { input: self.prompt, output }, now);
        }
        if let Some(seat) = self.seat.take() {
            seat.settle(self.prompt);
        }
    }
}

/// The reservation of a request with its tenant's limits.
pub struct ReservedTokens {
    metered: Option<Box<Metered>>,
    /// Whether the request is within them.
    pub limit_state: LimitState,
    /// When that was decided: later than the body's last byte if a store had to be asked.
    pub at: Tick,
}

/// The reservation: the prompt, plus the stated cap or the class's assumed output over all choices; no
/// tokens on paths that only count them.
#[must_use]
pub fn wanted(facts: &Facts, endpoint: ApiPath, objectives: &Objectives, prompt: Tokens) -> Wanted {
    if !endpoint.costs_tokens() {
        return Wanted::A_REQUEST;
    }
    let choices = facts.choices();
    let output = match facts.caps.largest() {
        Some(cap) => Output::Stated(cap.times(choices)),
        None if endpoint.generates() => Output::Assumed(objectives.default_output().times(choices)),
        None => Output::Assumed(Tokens::ZERO),
    };
    Wanted { input: prompt, output }
}

impl RequestContext<'_> {
    /// Position in the queue: behind others if the tenant is over a limit or an overload level defers the
    /// class.
    pub(super) fn limit_state(&self, by_limits: LimitState, active: &mut ActiveRequest) -> LimitState {
        if by_limits == LimitState::OverLimit {
            active.mark_over_limit();
        }
        if self.overload.defers(active) { LimitState::OverLimit } else { by_limits }
    }

    /// Expected output per choice. A stated cap counts only up to the class's assumption, so that an absurd
    /// cap does not weigh on others.
    fn output(&self) -> Tokens {
        if !self.endpoint.generates() {
            return Tokens::ZERO;
        }
        let expected = self.objectives.default_output();
        let expected = self.overload.cap().map_or(expected, |cap| cap.min(expected));
        self.facts().caps.largest().map_or(expected, |cap| cap.min(expected))
    }

    /// Expected work. The number of choices is limited to a plausible one.
    fn work(&self) -> Tokens {
        self.prompt + self.output().times(plausible_choices(self.facts()))
    }

    /// The request's position in the queue.
    ///
    /// `usual` is the usual output length of responses with this E2E objective.
    fn queue_request(
        &self,
        limit_state: LimitState,
        predicted: Option<Prediction>,
        usual: impl Fn(Duration) -> Option<u64>,
    ) -> QueueRequest {
        let class = &self.policy.class;
        let limits = &class.timeouts;
        let head = if self.streams() { limits.first_token } else { limits.response_head };
        let own_limits = self.start + head.min(limits.total);
        QueueRequest {
            tenant: self.tenant.clone(),
            priority: class.priority,
            arrival: self.start,
            deadline: self
                .deadline(predicted.unwrap_or(Prediction { ttft: Duration::ZERO, tpot: Duration::ZERO }), usual),
            tokens: self.work(),
            prompt: self.uncached,
            timeout_at: own_limits.min(self.body.complete + class.queue.max_wait),
            when_hopeless: class.queue.when_hopeless,
            limit_state,
        }
    }

    /// The deadline for the queue: the class's own, or a later one by the request's own targets, which never
    /// make it earlier.
    fn deadline(&self, predicted: Prediction, usual: impl Fn(Duration) -> Option<u64>) -> Deadline {
        let class = &*self.policy.objectives;
        let objectives = if std::ptr::eq(class, &*self.objectives) {
            Cow::Borrowed(class)
        } else {
            let ttft = later(class.ttft, self.objectives.ttft);
            let tpot = later(class.tpot, self.objectives.tpot);
            Cow::Owned(Objectives { ttft, tpot, ..class.clone() })
        };
        if let Some(ttft) = objectives.ttft.filter(|_| self.streams_tokens()) {
            return Deadline::FirstToken { within: ttft.threshold, lead: predicted.ttft };
        }
        let case = JudgeContext { stated_cap: self.facts().caps.largest(), ..JudgeContext::of(self.dialect()) };
        let waiting = Progress::waiting(self.start, true, self.streams_tokens());
        match breaks_at(&waiting, &objectives, &case) {
            Some(moment) => {
                let usual = objectives.e2e.and_then(|e2e| usual(e2e.threshold)).unwrap_or(u64::MAX);
                let further = u32::try_from(self.output().0.saturating_sub(1).min(usual)).unwrap_or(u32::MAX);
                let service = predicted.ttft + predicted.tpot.saturating_mul(further);
                Deadline::Whole { within: moment - self.start, service }
            }
            None => Deadline::Whenever,
        }
    }
}

fn later(own: Option<Objective>, asked: Option<Objective>) -> Option<Objective> {
    let own = own?;
    Some(asked.filter(|asked| asked.threshold > own.threshold).unwrap_or(own))
}

impl GatewayState {
    /// Reserves all limits of the request's tenant together.
    ///
    /// # Errors
    /// A limit is exhausted and the tenant's settings say `reject`; the request can never fit; or the limits
    /// store is unavailable.
    pub(super) async fn reserve(
        &self,
        live: &SettingsSnapshot,
        request: &RequestContext<'_>,
        at: Tick,
    ) -> Result<ReservedTokens, Rejection> {
        if !live.is_metered {
            return Ok(ReservedTokens { metered: None, limit_state: LimitState::WithinLimits, at });
        }
        let wanted = wanted(request.facts(), request.endpoint, &request.objectives, request.prompt);
        let reserved = self.reserve_of(live, request.tenant, request.model.unwrap_or_default(), &wanted, at).await?;
        let limit_state = if reserved.is_some() { LimitState::WithinLimits } else { LimitState::OverLimit };
        let metered = reserved.map(|reservation| {
            let choices = plausible_choices(request.facts());
            let lowered =
                request.overload.cap().map_or(wanted.output.tokens(), |cap| cap.times(request.facts().choices()));
            let most = if request.endpoint.generates() { wanted.output.tokens() } else { Tokens::ZERO };
            Box::new(Metered {
                reservation,
                costs_tokens: request.endpoint.costs_tokens(),
                streams: request.streams_tokens(),
                unseen: Unseen { most: most.min(lowered), choices },
                pace: None,
            })
        });
        Ok(ReservedTokens { metered, limit_state, at: self.clock.now() })
    }

    /// Counts a request that the gateway answers itself, without tokens.
    ///
    /// # Errors As [`reserve`](Self::reserve).
    pub(super) async fn count_own(
        &self,
        live: &SettingsSnapshot,
        tenant: &TenantId,
        at: Tick,
    ) -> Result<(), Rejection> {
        if let Some(reservation) = self.reserve_of(live, tenant, "", &Wanted::A_REQUEST, at).await? {
            reservation.settle(Used::default(), at);
        }
        Ok(())
    }

    /// `None` if the limit is exhausted and the tenant's settings say `demote`.
    async fn reserve_of(
        &self,
        live: &SettingsSnapshot,
        tenant: &TenantId,
        model: &str,
        wanted: &Wanted,
        at: Tick,
    ) -> Result<Option<Reservation>, Rejection> {
        match self.limiter.reserve(tenant, model, wanted, at).await {
            Ok(reservation) => Ok(Some(reservation)),
            Err(Denied::Unavailable) => Err(Rejection::LimitsStoreUnavailable),
            Err(Denied::Exhausted(LimitExceeded::NeverFits { limit, scope, need, most })) => {
                Err(Rejection::RequestExceedsLimit { limit, scope, need, most })
            }
            Err(Denied::Exhausted(LimitExceeded::Retryable { .. }))
                if live.when_over_limit(tenant) == OverLimit::Demote =>
            {
                Ok(None)
            }
            Err(Denied::Exhausted(LimitExceeded::Retryable { limit_status, retry_after })) => {
                Err(Rejection::RateLimitExceeded { limit_status, retry_after })
            }
        }
    }

    /// The request's entry for a queue.
    pub(super) fn queue_request(&self, request: &RequestContext<'_>, limit_state: LimitState) -> QueueRequest {
        let (pool, at) = (&request.routed.pools[0], request.body.complete);
        let lead = WorkEstimate { prefill: request.uncached, ..request.size };
        request.queue_request(limit_state, self.fleet.predict(pool, lead, at), |limit| {
            self.fleet.usual_length(pool, limit)
        })
    }
}

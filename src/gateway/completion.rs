//! The end of a request: what happens when its response body ends, or when there is none.
//!
//! `Gateway::serve` shows how a request begins, this file how it ends. The order is always the same:
//!
//! 1. engine effects: breaker, latency model and token ratios learn from the response (`engine_effects`);
//! 2. settle: the tenant's reservation is charged, the seat is released (`admission`, `charge`);
//! 3. judge: the timeline is compared with the class's objectives;
//! 4. record: one `RequestRecord`, from which every metric and the access line are derived.
//!
//! A request ends in exactly one of four ways ([`RequestGuard`]):
//!
//! - the body of a relayed response ends: [`Completion`], called by `forward::Relay`;
//! - the gateway rejects it before any response: [`RequestGuard::reject`];
//! - the gateway answers it itself: [`RequestGuard::answered`];
//! - it is dropped: the client disconnected while it waited, or the thread panicked.
//!
//! Without a relayed response steps 1 and 2 happen in the drops of the attempts and of the
//! `AdmissionGuard`. Nothing else in `gateway` or `record` judges.

use std::ops::{Deref, DerefMut};

use super::attempt::AttemptTarget;
use super::relay_context::RelayContext;
use crate::forward::{RelayEnd, RelayEvents};
use crate::judge::{Excluded, JudgeContext, Missed, Outcome, Verdict, judge, judge_left, judge_refused, of_code};
use crate::observe::{Ending, Observer, ObserverOptions, ResponseExpectation, ResponseFormat, Timeline};
use crate::record::{ActiveRequest, LEFT, RequestEnd};
use crate::reject::Rejection;
use crate::route::WorkGuard;
use crate::route::retry::{Attempts, Injection};
use crate::types::{DisconnectReason, Tick};

/// A request whose response is being relayed; owns everything that it holds.
pub(super) struct Completion {
    pub(super) context: Box<RelayContext>,
    pub(super) active: RequestGuard,
    /// The engine of the last attempt.
    pub(super) place: AttemptTarget,
    pub(super) attempts: Box<Attempts>,
    /// The engine's share of work; released at the end.
    pub(super) work: Option<Box<WorkGuard>>,
    /// An injection not confirmed by a token yet, if the head was sent early.
    pub(super) unproven: Option<Injection>,
    /// Whether the response is a failure that the retry loop has already reported to the breaker.
    pub(super) has_failed: bool,
}

impl RelayEvents for Completion {
    fn first_token(&mut self, at: Tick) {
        if let Some(work) = self.work.as_mut() {
            work.first_token(at);
        }
        if let Some(injection) = self.unproven.take() {
            let gateway = &self.context.gateway;
            let now = gateway.clock.now();
            gateway.fleet.succeeded(&self.place.pool, &mut self.attempts, injection, now);
        }
        self.attempts.first_token();
        self.context.held.first_token();
    }

    fn refused_key(&self, code: u16) -> Option<Rejection> {
        self.place.refused_key(code)
    }

    /// The body ended: by its last event, an error, a limit, or because it was dropped.
    fn end(mut self: Box<Self>, ended: RelayEnd) {
        let RelayEnd { timeline, refusal, never_sent } = ended;
        let rejection = refusal.as_ref();
        // 1. Engine effects.
        if let Some(Rejection::EngineKeyRefused { status, .. }) = rejection
            && let Some(work) = &self.work
        {
            self.place.tell_of_refused_key(*status, work.signals(), timeline.end);
        }
        self.check_model(&timeline, rejection);
        self.report_to_engine(&timeline, rejection);
        self.learn_ratios(&timeline);
        let Completion { context, active, .. } = *self;
        // 2. Settle.
        let case = active.promise().map_or(JudgeContext::of(context.request.endpoint.dialect()), |policy| policy.case);
        context.held.settle(&timeline, &case, rejection, never_sent);
        // 3. Judge, 4. record.
        let verdict = judge_response(&active, &timeline, rejection);
        active.record_response(verdict, timeline, rejection);
    }
}

/// An accepted request that was not recorded yet. Every way to its end consumes it; a drop means that the
/// client disconnected or the thread panicked.
#[derive(Debug)]
#[must_use = "dropped, it is recorded as a client that disconnected"]
pub(crate) struct RequestGuard(Option<ActiveRequest>);

impl RequestGuard {
    /// Guards a new request.
    pub(crate) fn new(active: ActiveRequest) -> Self {
        RequestGuard(Some(active))
    }

    /// The gateway rejected it before a response was relayed.
    pub(crate) fn reject(self, rejection: &Rejection) {
        let end = self.now();
        let verdict = judge_rejection(&self, rejection.outcome(), end);
        let status = if self.early_head().is_some() { 200 } else { rejection.status().as_u16() };
        self.record(RequestEnd { verdict, status, end, left: false, timeline: None, rejection: Some(rejection) });
    }

    /// The gateway answered it itself: models, health.
    pub(crate) fn answered(self, status: u16) {
        let (verdict, end) = (Verdict::bare(Outcome::Excluded(Excluded::Unjudged)), self.now());
        self.record(RequestEnd { verdict, status, end, left: false, timeline: None, rejection: None });
    }

    /// The body of its relayed response ended.
    pub(crate) fn record_response(self, verdict: Verdict, timeline: Timeline, rejection: Option<&Rejection>) {
        let left = timeline.ending == Ending::Left && timeline.finish.is_none();
        let (status, end) = (timeline.status, timeline.end);
        self.record(RequestEnd { verdict, status, end, left, timeline: Some(timeline), rejection });
    }

    fn record(mut self, end: RequestEnd<'_>) {
        if let Some(active) = self.0.take() {
            active.finish(end);
        }
    }
}

impl Deref for RequestGuard {
    type Target = ActiveRequest;
    fn deref(&self) -> &ActiveRequest {
        self.0.as_ref().expect("only the end takes it, and it takes the guard with it")
    }
}

impl DerefMut for RequestGuard {
    fn deref_mut(&mut self) -> &mut ActiveRequest {
        self.0.as_mut().expect("only the end takes it, and it takes the guard with it")
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        if let Some(active) = self.0.take() {
            let end = if std::thread::panicking() { panicked(&active) } else { disconnected(&active) };
            active.finish(end);
        }
    }
}

/// The verdict on a relayed response. `rejection`: the head was sent early, and no stream
/// followed.
pub(crate) fn judge_response(active: &ActiveRequest, timeline: &Timeline, rejection: Option<&Rejection>) -> Verdict {
    match (rejection, active.promise()) {
        (None, Some(policy)) => judge(timeline, &policy.objectives, &policy.case),
        (None, None) => Verdict::bare(Outcome::Excluded(Excluded::Unjudged)),
        (Some(Rejection::EngineAnswered { status }), Some(policy)) => {
            judge_rejection(active, of_code(*status, &policy.case), timeline.end)
        }
        (Some(rejection), _) => judge_rejection(active, rejection.outcome(), timeline.end),
    }
}

/// The verdict on a request that ended with this outcome before any response.
fn judge_rejection(active: &ActiveRequest, outcome: Outcome, at: Tick) -> Verdict {
    match active.progress() {
        Some((policy, progress)) => judge_refused(outcome, &progress, &policy.objectives, &policy.case, at),
        // Also before its class is known.
        None if active.is_unjudged() && matches!(outcome, Outcome::Missed(_)) => {
            Verdict::bare(Outcome::Excluded(Excluded::Unjudged))
        }
        None => Verdict::bare(outcome),
    }
}

/// The end of a request during which the gateway panicked.
fn panicked(active: &ActiveRequest) -> RequestEnd<'static> {
    let end = active.now();
    let verdict = judge_rejection(active, Outcome::Missed(Missed::Internal), end);
    let status = if active.early_head().is_some() { 200 } else { 500 };
    RequestEnd { verdict, status, end, left: false, timeline: None, rejection: Some(&Rejection::Internal) }
}

/// The end of a request whose client disconnected, or was disconnected, before any response.
fn disconnected(active: &ActiveRequest) -> RequestEnd<'static> {
    let end = active.now();
    let early_head = active.early_head();
    let severed = early_head.and_then(|client| client.severed());
    let (verdict, left) = if severed == Some(DisconnectReason::Drain) {
        // It never left the gateway's queue, and its client was gone.
        (judge_rejection(active, Rejection::Draining.outcome(), end), false)
    } else {
        match judge_unread_early_head(active, severed, end) {
            Some(verdict) => (verdict, severed.is_none()),
            None => (judge_disconnect(active, end), true),
        }
    };
    let status = if early_head.is_some() { 200 } else { LEFT };
    RequestEnd { verdict, status, end, left, timeline: None, rejection: None }
}

/// The verdict on a client that left while its request waited.
fn judge_disconnect(active: &ActiveRequest, at: Tick) -> Verdict {
    match active.progress() {
        Some((policy, progress)) => judge_left(&progress, &policy.objectives, &policy.case, at),
        None => Verdict::bare(Outcome::Excluded(Excluded::ClientCancel)),
    }
}

/// The verdict on a client that did not read the comments behind an early head, as on any stream without a
/// token. `None` if it did read.
fn judge_unread_early_head(active: &ActiveRequest, severed: Option<DisconnectReason>, at: Tick) -> Option<Verdict> {
    let (policy, since) = (active.promise()?, active.early_head()?.limited_since(at)?);
    let expect = ResponseExpectation::stream(policy.case.dialect, policy.start);
    let mut observer = Observer::new(expect, ResponseFormat::Events, 200, ObserverOptions::default());
    observer.limit_gaps(since);
    let ending = if severed.is_some() { Ending::WriteStalled } else { Ending::Left };
    Some(judge(&observer.end(ending, at), &policy.objectives, &policy.case))
}

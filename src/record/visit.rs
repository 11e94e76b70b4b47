//! One request in the house: from its arrival to its one [`RequestRecord`].
//!
//! A [`ActiveRequest`] collects what becomes known and ends exactly once: [`ActiveRequest::end`] with the
//! timeline of a relayed answer, [`ActiveRequest::refuse`], [`ActiveRequest::answered`] for what the gateway
//! serves itself, or its drop. A drop means that the client left while it waited, and is
//! judged by the rules for that; a drop in a panic is a fault of ours.

use std::sync::Arc;
use std::time::Duration;

use crate::admit::levels::{Degraded, Kind, Kinds};
use crate::judge::{
    Case, Excluded, Missed, Objectives, Outcome, Progress, ProgressCell, Verdict, judge, judge_left, judge_refused,
    of_code,
};
use crate::observe::{Ending, Expect, Observer, Reader, Timeline, Watch};
use crate::refuse::Rejection;
use crate::units::{
    ClassId, ClientState, DisconnectReason, Endpoint, EngineId, LengthBucket, PoolId, RequestId, TenantId, Tick, Tokens,
};

use super::finished::{RequestRecord, Retry, RetryCounts};
use super::open::InFlightRequest;
use super::{LEFT, Recorder};

/// What applies to a request once its class is known.
#[derive(Clone, Debug)]
pub struct RequestPolicy {
    /// The class.
    pub class: ClassId,
    /// The rule that chose it.
    pub rule: Arc<str>,
    /// Where they run from.
    pub start: Tick,
    /// What the class promises this request, its own targets included.
    pub objectives: Arc<Objectives>,
    /// How long the prompt is.
    pub length: LengthBucket,
    /// The prompt estimate.
    pub prompt: Tokens,
    /// It asks for a stream.
    pub streamed: bool,
    /// Choices that the answer should have.
    pub choices: u64,
    /// Edges by which the gaps of its answer are counted.
    pub gap_edges: Arc<[Duration]>,
    /// What else bears on the judgement.
    pub case: Case,
}

/// See the module.
#[derive(Debug)]
#[must_use = "a visit that is dropped is a client that left"]
pub struct ActiveRequest {
    recorder: Recorder,
    open: Arc<InFlightRequest>,
    draft: Option<Box<RequestFields>>,
}

/// What is known so far.
#[derive(Debug)]
struct RequestFields {
    request_id: RequestId,
    endpoint: Option<Endpoint>,
    /// It came to a path whose answers are not judged.
    is_unjudged: bool,
    tenant: Option<TenantId>,
    promise: Option<RequestPolicy>,
    model: Option<Arc<str>>,
    pool: Option<PoolId>,
    engine: Option<EngineId>,
    attempts: u32,
    retries: RetryCounts,
    arrival: Tick,
    body_complete: Option<Tick>,
    /// How long the client let the gateway wait for it.
    client_wait: Duration,
    admitted: Option<Tick>,
    spilled: bool,
    degraded: Degraded,
    /// A head of the gateway's own went ahead: the client's side behind it.
    ahead: Option<ClientState>,
    /// Its client left before the answer was whole.
    left: bool,
    /// The path or model that it asked for in vain, as it may be shown.
    asked: Option<Box<str>>,
}

impl ActiveRequest {
    pub(super) fn new(recorder: Recorder, open: Arc<InFlightRequest>, request_id: RequestId, arrival: Tick) -> Self {
        let draft = RequestFields {
            request_id,
            endpoint: None,
            is_unjudged: false,
            tenant: None,
            promise: None,
            model: None,
            pool: None,
            engine: None,
            attempts: 0,
            retries: RetryCounts::default(),
            arrival,
            body_complete: None,
            client_wait: Duration::ZERO,
            admitted: None,
            spilled: false,
            degraded: Degraded::default(),
            ahead: None,
            left: false,
            asked: None,
        };
        ActiveRequest { recorder, open, draft: Some(Box::write(Box::new_uninit(), draft)) }
    }

    fn draft(&self) -> &RequestFields {
        self.draft.as_deref().expect("only the end takes the draft, and it takes the visit with it")
    }

    fn draft_mut(&mut self) -> &mut RequestFields {
        self.draft.as_deref_mut().expect("only the end takes the draft, and it takes the visit with it")
    }

    /// When the request arrived.
    #[must_use]
    pub fn arrival(&self) -> Tick {
        self.draft().arrival
    }

    /// The id that correlates it.
    #[must_use]
    pub fn request_id(&self) -> &RequestId {
        &self.draft().request_id
    }

    /// Its client, as far as that may stop reading.
    pub fn read_by(&self, client: &ClientState) {
        self.open.pulse.read_by(client);
    }

    /// Which of our paths it came to, and whether answers there are judged.
    pub fn comes_to(&mut self, endpoint: Endpoint, is_judged: bool) {
        let draft = self.draft_mut();
        (draft.endpoint, draft.is_unjudged) = (Some(endpoint), !is_judged);
    }

    /// It asks for a path or model that is not served: shown as far as a line may show it.
    #[cold]
    pub fn asks_for_unknown(&mut self, shown: &str) {
        self.draft_mut().asked = Some(shown.into());
    }

    /// Who asks.
    pub fn belongs_to(&mut self, tenant: TenantId) {
        self.draft_mut().tenant = Some(tenant);
    }

    /// The last byte of the body was read; for so long the client had sent nothing while the gateway
    /// stood ready to read it.
    pub fn uploaded(&mut self, at: Tick, client_wait: Duration) {
        let draft = self.draft_mut();
        (draft.body_complete, draft.client_wait) = (Some(at), client_wait);
    }

    /// The class that applies, and what comes with it.
    pub fn promised(&mut self, promise: RequestPolicy) {
        self.open.standing.lock().promise = Some(promise.clone());
        self.draft_mut().promise = Some(promise);
    }

    /// The route: the model as it names it, and its first pool.
    pub fn routed(&mut self, model: Arc<str>, pool: PoolId) {
        self.draft_mut().model = Some(model);
        self.stands(pool, false);
    }

    /// It waits in the queue of this pool.
    pub fn waits(&mut self, pool: &PoolId) {
        self.stands(pool.clone(), true);
    }

    /// It stands in this pool: said once more where a scrape looks.
    fn stands(&mut self, pool: PoolId, waits: bool) {
        self.draft_mut().pool = Some(pool.clone());
        let mut standing = self.open.standing.lock();
        (standing.pool, standing.waits) = (Some(pool), waits);
    }

    /// The request left the queue.
    pub fn admitted(&mut self, at: Tick) {
        self.draft_mut().admitted = Some(at);
    }

    /// When it left the queue last.
    #[must_use]
    pub fn admitted_at(&self) -> Option<Tick> {
        self.draft().admitted
    }

    /// It no longer waits: it was called to its seat.
    pub fn called(&mut self) {
        self.open.standing.lock().waits = false;
    }

    /// The queue before was too long: it goes on to this pool of its route.
    pub fn spills(&mut self, pool: &PoolId) {
        self.draft_mut().spilled = true;
        self.stands(pool.clone(), false);
    }

    /// A head of the gateway's own went out while it waits: its client has a 200.
    pub fn head_went_ahead(&mut self, client: &ClientState) {
        self.draft_mut().ahead = Some(client.clone());
    }

    /// It is served beyond its tenant's own limit.
    pub fn goes_beyond_its_limit(&mut self) {
        if let Some(case) = self.case_mut() {
            case.over_limit = true;
        }
        if let Some(promise) = &mut self.open.standing.lock().promise {
            promise.case.over_limit = true;
        }
    }

    /// So many overload levels of its class are in force, and this is the cap that they set.
    pub fn at_level(&mut self, level: usize, cap: Option<Tokens>) {
        let degraded = &mut self.draft_mut().degraded;
        (degraded.level, degraded.cap) = (level, cap);
    }

    /// An overload level does this to it.
    pub fn degraded(&mut self, kind: Kind) {
        self.draft_mut().degraded.kinds.add(kind);
        if let (Kind::CapOutput, Some(case)) = (kind, self.case_mut()) {
            case.cap_lowered = true;
        }
    }

    /// What overload levels have done to it.
    #[must_use]
    pub fn degradation(&self) -> Kinds {
        self.draft().degraded.kinds
    }

    /// An attempt begins.
    pub fn attempts(&mut self, pool: &PoolId, engine: EngineId) {
        let draft = self.draft_mut();
        draft.attempts += 1;
        draft.engine = Some(engine);
        if draft.pool.as_ref() != Some(pool) {
            self.stands(pool.clone(), false);
        }
    }

    /// What made another attempt necessary.
    pub fn retries(&mut self, why: Retry) {
        self.draft_mut().retries[why as usize] += 1;
    }

    /// What bears on the judgement and became known later: a lowered cap, a credential that
    /// was forwarded, a model that no engine has served.
    pub fn case_mut(&mut self) -> Option<&mut Case> {
        self.draft_mut().promise.as_mut().map(|promise| &mut promise.case)
    }

    /// What applies to it, once it has a class.
    #[must_use]
    pub fn promise(&self) -> Option<&RequestPolicy> {
        self.draft().promise.as_ref()
    }

    /// Where the relay leaves its token events, so that overdue requests can be counted.
    #[must_use]
    pub fn pulse(&self) -> ProgressCell {
        self.open.pulse.clone()
    }

    /// The relayed answer ended.
    pub fn end(mut self, timeline: Timeline) {
        let Some(mut draft) = self.draft.take() else { return };
        let verdict = match &draft.promise {
            Some(promise) => judge(&timeline, &promise.objectives, &promise.case),
            None => Verdict::bare(Outcome::Excluded(Excluded::Unjudged)),
        };
        draft.left = has_left(&timeline);
        let (status, end) = (timeline.status, timeline.end);
        self.close(draft, verdict, status, end, Some(timeline), None);
    }

    /// The relayed head was the gateway's own, and no stream followed it.
    pub fn end_refused(mut self, timeline: Timeline, refusal: &Rejection) {
        let Some(mut draft) = self.draft.take() else { return };
        let outcome = match (refusal, &draft.promise) {
            (Rejection::EngineAnswered { status }, Some(promise)) => of_code(*status, &promise.case),
            _ => refusal.outcome(),
        };
        let verdict = draft.refused(outcome, timeline.end);
        draft.left = has_left(&timeline);
        let (status, end) = (timeline.status, timeline.end);
        self.close(draft, verdict, status, end, Some(timeline), Some(refusal));
    }

    /// The gateway turned it away before any answer was relayed.
    pub fn refuse(mut self, refusal: &Rejection) {
        if let Some(draft) = self.draft.take() {
            let at = self.recorder.now();
            let verdict = draft.refused(refusal.outcome(), at);
            let status = if draft.ahead.is_some() { 200 } else { refusal.status().as_u16() };
            self.close(draft, verdict, status, at, None, Some(refusal));
        }
    }

    /// The gateway answered itself: models, health.
    pub fn answered(mut self, status: u16) {
        if let Some(draft) = self.draft.take() {
            let verdict = Verdict::bare(Outcome::Excluded(Excluded::Unjudged));
            let at = self.recorder.now();
            self.close(draft, verdict, status, at, None, None);
        }
    }

    /// Dropped: the client left, or the gateway panicked.
    fn abandoned(&self, mut draft: Box<RequestFields>, panicking: bool) {
        let at = self.recorder.now();
        let ahead = draft.ahead.is_some();
        let severed = draft.ahead.as_ref().and_then(ClientState::severed);
        let verdict = if panicking {
            draft.refused(Outcome::Missed(Missed::Internal), at)
        } else if severed == Some(DisconnectReason::Drain) {
            // It never left our queue, and nobody was there to be told.
            draft.refused(Rejection::Draining.outcome(), at)
        } else {
            let limited = draft.limited(severed, at);
            draft.left = limited.is_none() || severed.is_none();
            limited.unwrap_or_else(|| draft.left(at))
        };
        let status = match (ahead, panicking) {
            (true, _) => 200,
            (false, true) => 500,
            (false, false) => LEFT,
        };
        self.close(draft, verdict, status, at, None, panicking.then_some(&Rejection::Internal));
    }

    fn close(
        &self,
        draft: Box<RequestFields>,
        verdict: Verdict,
        status: u16,
        end: Tick,
        timeline: Option<Timeline>,
        refusal: Option<&Rejection>,
    ) {
        let promise = draft.promise;
        let over_limit = promise.as_ref().is_some_and(|promise| promise.case.over_limit);
        let cap_lowered = promise.as_ref().is_some_and(|promise| promise.case.cap_lowered);
        let (length, prompt) = promise.as_ref().map_or_else(Default::default, |p| (p.length, p.prompt));
        let (class, rule, gap_edges) = match promise {
            Some(promise) => (Some(promise.class), Some(promise.rule), Some(promise.gap_edges)),
            None => (None, None, None),
        };
        let finished = Box::new_uninit();
        self.recorder.note(Box::write(
            finished,
            RequestRecord {
                request_id: draft.request_id,
                endpoint: draft.endpoint,
                tenant: draft.tenant,
                class,
                rule,
                model: draft.model,
                pool: draft.pool,
                engine: draft.engine,
                attempts: draft.attempts,
                retries: draft.retries,
                status,
                left: draft.left,
                length,
                prompt,
                arrival: draft.arrival,
                body_complete: draft.body_complete,
                client_wait: draft.body_complete.map(|_| draft.client_wait),
                admitted: draft.admitted,
                end,
                verdict,
                timeline,
                gap_edges,
                refusal: refusal.map(Rejection::code),
                limited: refusal.and_then(Rejection::limit).map(|standing| (standing.limit, standing.scope)),
                over_limit,
                spilled: draft.spilled,
                degraded: draft.degraded,
                cap_lowered,
                asked: draft.asked,
            },
        ));
    }
}

fn has_left(timeline: &Timeline) -> bool {
    timeline.ending == Ending::Left && timeline.finish.is_none()
}

impl RequestFields {
    fn progress(&self, promise: &RequestPolicy) -> Progress<'static> {
        Progress::waiting(promise.start, self.body_complete.is_some(), promise.streamed)
    }

    fn refused(&self, outcome: Outcome, at: Tick) -> Verdict {
        match &self.promise {
            Some(promise) => judge_refused(outcome, &self.progress(promise), &promise.objectives, &promise.case, at),
            // Also where its class was not known yet.
            None if self.is_unjudged && matches!(outcome, Outcome::Missed(_)) => {
                Verdict::bare(Outcome::Excluded(Excluded::Unjudged))
            }
            None => Verdict::bare(outcome),
        }
    }

    /// The verdict on a client that did not read what came behind a head that went ahead: as on
    /// any stream of which no token has come.
    fn limited(&self, severed: Option<DisconnectReason>, at: Tick) -> Option<Verdict> {
        let (promise, since) = (self.promise.as_ref()?, self.ahead.as_ref()?.limited_since(at)?);
        let expect = Expect::stream(promise.case.dialect, promise.start);
        let mut seen = Observer::new(expect, Reader::Events, 200, Watch::default());
        seen.limit_gaps(since);
        let ending = if severed.is_some() { Ending::WriteStalled } else { Ending::Left };
        Some(judge(&seen.end(ending, at), &promise.objectives, &promise.case))
    }

    fn left(&self, at: Tick) -> Verdict {
        match &self.promise {
            Some(promise) => judge_left(&self.progress(promise), &promise.objectives, &promise.case, at),
            None => Verdict::bare(Outcome::Excluded(Excluded::ClientCancel)),
        }
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        if let Some(draft) = self.draft.take() {
            self.abandoned(draft, std::thread::panicking());
        }
        self.recorder.closed(&self.open);
    }
}

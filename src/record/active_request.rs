//! One request in flight: its known fields, and its place in the in-flight
//! gauge.
//!
//! An [`ActiveRequest`] collects and does not judge: `gateway::completion` decides how the request
//! ended and passes one [`RequestEnd`], from which, with the fields, the one [`RequestRecord`] is made.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};

use crate::admit::overload_control::{ActionKind, ActionKinds, AppliedActions};
use crate::judge::{JudgeContext, Progress, ProgressCell, Verdict};
use crate::observe::Timeline;
use crate::reject::Rejection;
use crate::types::{ApiPath, ClientState, EngineId, PoolId, RequestId, TenantId, Tick, Tokens};

use super::Recorder;
use super::in_flight::InFlightRequest;
use super::request_policy::RequestPolicy;
use super::request_record::{AttemptFailure, AttemptRecord, PromptShape, RequestRecord, Retry, RetryCounts};
use super::trace::{OutgoingTrace, RequestTrace, SpanId};

/// A request in flight; see the module.
#[derive(Debug)]
#[must_use = "a request that is dropped without `finish` leaves no record"]
pub struct ActiveRequest {
    gauge: InFlightGuard,
    fields: Box<RequestFields>,
}

/// The request's place in the in-flight gauge; released when dropped.
#[derive(Debug)]
struct InFlightGuard {
    recorder: Recorder,
    open: Arc<InFlightRequest>,
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.recorder.closed(&self.open);
    }
}

/// The end of a request, judged by `gateway::completion`.
#[derive(Debug)]
pub struct RequestEnd<'a> {
    /// Outcome and objectives.
    pub verdict: Verdict,
    /// The HTTP status sent to the client.
    pub status: u16,
    /// The moment of the end.
    pub end: Tick,
    /// Whether the client left before the response was complete.
    pub left: bool,
    /// The observed response, if one was relayed.
    pub timeline: Option<Timeline>,
    /// The gateway's own rejection, if any.
    pub rejection: Option<&'a Rejection>,
}

/// The fields known so far.
#[derive(Debug)]
struct RequestFields {
    request_id: RequestId,
    endpoint: Option<ApiPath>,
    /// Whether its path is not judged.
    is_unjudged: bool,
    tenant: Option<TenantId>,
    promise: Option<RequestPolicy>,
    model: Option<Arc<str>>,
    pool: Option<PoolId>,
    engine: Option<EngineId>,
    attempts: Vec<AttemptRecord>,
    retries: RetryCounts,
    arrival: Tick,
    body_complete: Option<Tick>,
    /// How long the gateway waited for its body.
    client_wait: Duration,
    /// Present if a journal is kept.
    prompt_shape: Option<Box<PromptShape>>,
    admitted: Option<Tick>,
    spilled: bool,
    degraded: AppliedActions,
    /// The client of a response head that the gateway sent early.
    ahead: Option<ClientState>,
    /// The unknown path or model it asked for, escaped and shortened.
    asked: Option<Box<str>>,
    /// Present if spans are exported.
    trace: Option<Box<RequestTrace>>,
}

impl ActiveRequest {
    pub(super) fn new(recorder: Recorder, open: Arc<InFlightRequest>, request_id: RequestId, arrival: Tick) -> Self {
        let fields = RequestFields {
            request_id,
            endpoint: None,
            is_unjudged: false,
            tenant: None,
            promise: None,
            model: None,
            pool: None,
            engine: None,
            attempts: Vec::new(),
            retries: RetryCounts::default(),
            arrival,
            body_complete: None,
            client_wait: Duration::ZERO,
            prompt_shape: None,
            admitted: None,
            spilled: false,
            degraded: AppliedActions::default(),
            ahead: None,
            asked: None,
            trace: None,
        };
        ActiveRequest { gauge: InFlightGuard { recorder, open }, fields: Box::write(Box::new_uninit(), fields) }
    }

    /// When the request arrived.
    #[must_use]
    pub fn arrival(&self) -> Tick {
        self.fields.arrival
    }

    /// The id shared by response and access line.
    #[must_use]
    pub fn request_id(&self) -> &RequestId {
        &self.fields.request_id
    }

    /// Begins its trace, or continues the one of these headers, if spans are exported.
    pub fn begin_trace(&mut self, headers: &HeaderMap) {
        let recorder = &self.gauge.recorder;
        if let Some(sampling) = recorder.sampling() {
            // A repeated header is ignored, because it is ambiguous.
            let only = |name: &str| {
                let mut values = headers.get_all(name).iter();
                values.next().filter(|_| values.next().is_none()).map(HeaderValue::as_bytes)
            };
            let context = sampling.begin(only("traceparent"), only("tracestate"), rand::random());
            let arrival = recorder.0.clock.wall().saturating_sub(recorder.now().since(self.fields.arrival));
            self.fields.trace = Some(Box::new(RequestTrace::new(context, arrival)));
        }
    }

    /// The model name and the kind of the engines, for its trace.
    pub fn traced_to<'m>(&mut self, names: impl FnOnce() -> (Option<&'m str>, &'static str)) {
        if let Some(trace) = &mut self.fields.trace {
            let (model, provider) = names();
            (trace.model, trace.provider) = (model.map(Box::from), Some(provider));
        }
    }

    /// Sets the API path, and whether its responses are judged.
    pub fn set_endpoint(&mut self, endpoint: ApiPath, is_judged: bool) {
        let fields = &mut *self.fields;
        (fields.endpoint, fields.is_unjudged) = (Some(endpoint), !is_judged);
    }

    /// Sets the unknown path or model it asked for, escaped and shortened.
    #[cold]
    pub fn asks_for_unknown(&mut self, shown: &str) {
        self.fields.asked = Some(shown.into());
    }

    /// Sets the tenant.
    pub fn set_tenant(&mut self, tenant: TenantId) {
        self.fields.tenant = Some(tenant);
    }

    /// Records the time of the body's last byte, and the time in which the gateway waited for bytes that the
    /// client did not send.
    pub fn uploaded(&mut self, at: Tick, client_wait: Duration) {
        let fields = &mut *self.fields;
        (fields.body_complete, fields.client_wait) = (Some(at), client_wait);
    }

    /// Sets the prompt for the journal; `shape` is called only if one is kept.
    pub fn prompt_is(&mut self, shape: impl FnOnce() -> PromptShape) {
        if self.gauge.recorder.has_journal() {
            self.fields.prompt_shape = Some(Box::new(shape()));
        }
    }

    /// Sets the class and its policy.
    pub fn set_policy(&mut self, promise: RequestPolicy) {
        self.gauge.open.standing.lock().promise = Some(promise.clone());
        self.fields.promise = Some(promise);
    }

    /// Sets the route: the model as named there, and the first pool.
    pub fn routed(&mut self, model: Arc<str>, pool: PoolId) {
        self.fields.model = Some(model);
        self.set_pool(pool, false);
    }

    /// Records that it waits in the queue of this pool.
    pub fn queued(&mut self, pool: &PoolId) {
        self.set_pool(pool.clone(), true);
    }

    /// Sets its pool, also for the scrape.
    fn set_pool(&mut self, pool: PoolId, waits: bool) {
        self.fields.pool = Some(pool.clone());
        let mut standing = self.gauge.open.standing.lock();
        (standing.pool, standing.waits) = (Some(pool), waits);
    }

    /// Records when it left the queue.
    pub fn admitted(&mut self, at: Tick) {
        self.fields.admitted = Some(at);
    }

    /// When it last left the queue.
    #[must_use]
    pub fn admitted_at(&self) -> Option<Tick> {
        self.fields.admitted
    }

    /// Records that it got a seat.
    pub fn dequeued(&mut self) {
        self.gauge.open.standing.lock().waits = false;
    }

    /// Records that it spilled to this pool of its route because of the previous queue.
    pub fn spilled(&mut self, pool: &PoolId) {
        self.fields.spilled = true;
        self.set_pool(pool.clone(), false);
    }

    /// Records that the gateway sent a 200 head early, while the request waits.
    pub fn head_went_ahead(&mut self, client: &ClientState) {
        self.fields.ahead = Some(client.clone());
    }

    /// Records that it is served beyond its tenant's limit.
    pub fn mark_over_limit(&mut self) {
        if let Some(case) = self.case_mut() {
            case.over_limit = true;
        }
        if let Some(promise) = &mut self.gauge.open.standing.lock().promise {
            promise.case.over_limit = true;
        }
    }

    /// Records the number of its class's overload levels in force, and the cap they set.
    pub fn at_level(&mut self, level: usize, cap: Option<Tokens>) {
        let degraded = &mut self.fields.degraded;
        (degraded.level, degraded.cap) = (level, cap);
    }

    /// Records an overload action applied to it.
    pub fn degraded(&mut self, kind: ActionKind) {
        self.fields.degraded.kinds.add(kind);
        if let (ActionKind::CapOutput, Some(case)) = (kind, self.case_mut()) {
            case.cap_lowered = true;
        }
    }

    /// The overload actions applied to it.
    #[must_use]
    pub fn degradation(&self) -> ActionKinds {
        self.fields.degraded.kinds
    }

    /// Begins an attempt; returns the trace context for its engine.
    pub fn begin_attempt(&mut self, pool: &PoolId, engine: EngineId, begin: Tick) -> Option<Box<OutgoingTrace>> {
        let fields = &mut *self.fields;
        let outgoing = fields.trace.as_ref().map(|trace| {
            let span = SpanId::from_chance(rand::random());
            (span, Box::new(trace.context.outgoing(span)))
        });
        let (span, outgoing) = outgoing.unzip();
        fields.engine = Some(engine.clone());
        if fields.attempts.is_empty() {
            // One is the rule.
            fields.attempts = Vec::with_capacity(1);
        }
        fields.attempts.push(AttemptRecord { pool: pool.clone(), engine, begin, failure: None, span });
        if fields.pool.as_ref() != Some(pool) {
            self.set_pool(pool.clone(), false);
        }
        outgoing
    }

    /// The attempt under way failed, and its engine is left.
    pub fn attempt_failed(&mut self, failure: AttemptFailure) {
        if let Some(attempt) = self.fields.attempts.last_mut() {
            attempt.failure = Some(failure);
        }
    }

    /// Records the reason of a retry.
    pub fn retries(&mut self, why: Retry) {
        self.fields.retries[why as usize] += 1;
    }

    /// Inputs of the judgement that become known later: a lowered cap, a forwarded credential, a model that
    /// no engine has served.
    pub fn case_mut(&mut self) -> Option<&mut JudgeContext> {
        self.fields.promise.as_mut().map(|promise| &mut promise.case)
    }

    /// Its policy, once classified.
    #[must_use]
    pub fn promise(&self) -> Option<&RequestPolicy> {
        self.fields.promise.as_ref()
    }

    /// Cell in which the relay records token events, for the gauge of overdue requests.
    #[must_use]
    pub fn progress_cell(&self) -> ProgressCell {
        self.gauge.open.progress_cell.clone()
    }

    /// Its progress while waiting for a response, once classified.
    #[must_use]
    pub fn progress(&self) -> Option<(&RequestPolicy, Progress<'static>)> {
        let policy = self.promise()?;
        Some((policy, Progress::waiting(policy.start, self.fields.body_complete.is_some(), policy.streamed)))
    }

    /// Whether its path is not judged.
    #[must_use]
    pub fn is_unjudged(&self) -> bool {
        self.fields.is_unjudged
    }

    /// The client of a response head that the gateway sent early.
    #[must_use]
    pub fn early_head(&self) -> Option<&ClientState> {
        self.fields.ahead.as_ref()
    }

    /// The current moment.
    #[must_use]
    pub fn now(&self) -> Tick {
        self.gauge.recorder.now()
    }

    /// Writes the one [`RequestRecord`], then removes the request from the in-flight gauge.
    pub fn finish(self, end: RequestEnd<'_>) {
        let ActiveRequest { gauge, fields } = self;
        let RequestEnd { verdict, status, end, left, timeline, rejection } = end;
        let promise = fields.promise;
        let over_limit = promise.as_ref().is_some_and(|promise| promise.case.over_limit);
        let cap_lowered = promise.as_ref().is_some_and(|promise| promise.case.cap_lowered);
        let (length, prompt) = promise.as_ref().map_or_else(Default::default, |p| (p.length, p.prompt));
        let (streamed, choices) = promise.as_ref().map_or((false, 1), |p| (p.streamed, p.choices));
        let stated_cap = promise.as_ref().and_then(|p| p.case.stated_cap);
        let (class, rule, gap_edges) = match promise {
            Some(promise) => (Some(promise.class), Some(promise.rule), Some(promise.gap_edges)),
            None => (None, None, None),
        };
        let finished = Box::new_uninit();
        gauge.recorder.note(Box::write(
            finished,
            RequestRecord {
                request_id: fields.request_id,
                endpoint: fields.endpoint,
                tenant: fields.tenant,
                class,
                rule,
                model: fields.model,
                pool: fields.pool,
                engine: fields.engine,
                attempts: fields.attempts,
                retries: fields.retries,
                status,
                left,
                streamed,
                choices,
                stated_cap,
                length,
                prompt,
                prompt_shape: fields.prompt_shape,
                arrival: fields.arrival,
                body_complete: fields.body_complete,
                client_wait: fields.body_complete.map(|_| fields.client_wait),
                admitted: fields.admitted,
                end,
                verdict,
                timeline,
                gap_edges,
                refusal: rejection.map(Rejection::code),
                limited: rejection.and_then(Rejection::limit).map(|standing| (standing.limit, standing.scope)),
                over_limit,
                spilled: fields.spilled,
                degraded: fields.degraded,
                cap_lowered,
                asked: fields.asked,
                trace: fields.trace,
            },
        ));
    }
}

//! One request in flight: the fields that become known of it, and its place in the in-flight
//! gauge.
//!
//! An [`ActiveRequest`] collects and does not judge: `gateway::completion` decides how the request
//! ended and hands over one [`RequestEnd`]. From that and the fields the one [`RequestRecord`] is made.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue};

use crate::admit::levels::{Degraded, Kind, Kinds};
use crate::judge::{Case, Objectives, Progress, ProgressCell, Verdict};
use crate::observe::Timeline;
use crate::refuse::Rejection;
use crate::units::{ClassId, ClientState, Endpoint, EngineId, LengthBucket, PoolId, RequestId, TenantId, Tick, Tokens};

use super::Recorder;
use super::finished::{PromptShape, RequestRecord, Retry, RetryCounts};
use super::open::InFlightRequest;
use super::trace::{AttemptFailure, OutgoingTrace, RequestTrace};

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
#[must_use = "a request that is dropped without `finish` leaves no record"]
pub struct ActiveRequest {
    gauge: InFlightGuard,
    fields: Box<RequestFields>,
}

/// The request's place in the in-flight gauge, until this is dropped.
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

/// The end of a request, as `gateway::completion` judged it.
#[derive(Debug)]
pub struct RequestEnd<'a> {
    /// The outcome, and which objectives held.
    pub verdict: Verdict,
    /// The HTTP status that the client received.
    pub status: u16,
    /// The moment of the end.
    pub end: Tick,
    /// The client left before the response was whole.
    pub left: bool,
    /// The measured response, where one was relayed.
    pub timeline: Option<Timeline>,
    /// The gateway's own error, where it made one.
    pub rejection: Option<&'a Rejection>,
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
    /// Where a journal is kept.
    prompt_shape: Option<Box<PromptShape>>,
    admitted: Option<Tick>,
    spilled: bool,
    degraded: Degraded,
    /// A head of the gateway's own went ahead: the client's side behind it.
    ahead: Option<ClientState>,
    /// The path or model that it asked for in vain, as it may be shown.
    asked: Option<Box<str>>,
    /// Where spans are exported.
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
            attempts: 0,
            retries: RetryCounts::default(),
            arrival,
            body_complete: None,
            client_wait: Duration::ZERO,
            prompt_shape: None,
            admitted: None,
            spilled: false,
            degraded: Degraded::default(),
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

    /// The id that correlates it.
    #[must_use]
    pub fn request_id(&self) -> &RequestId {
        &self.fields.request_id
    }

    /// Its client, as far as that may stop reading.
    pub fn read_by(&self, client: &ClientState) {
        self.gauge.open.pulse.read_by(client);
    }

    /// Begins its trace, or goes on in that of these headers, where spans are exported.
    pub fn begin_trace(&mut self, headers: &HeaderMap) {
        let recorder = &self.gauge.recorder;
        if let Some(sampling) = recorder.sampling() {
            // Two of either are as good as none: nobody can say which one is meant.
            let only = |name: &str| {
                let mut values = headers.get_all(name).iter();
                values.next().filter(|_| values.next().is_none()).map(HeaderValue::as_bytes)
            };
            let context = sampling.begin(only("traceparent"), only("tracestate"), rand::random());
            let arrival = recorder.0.clock.wall().saturating_sub(recorder.now().since(self.fields.arrival));
            self.fields.trace = Some(Box::new(RequestTrace::new(context, arrival)));
        }
    }

    /// The model as engines know it, and the kind of the engines that it goes to, for its trace.
    pub fn traced_to<'m>(&mut self, names: impl FnOnce() -> (Option<&'m str>, &'static str)) {
        if let Some(trace) = &mut self.fields.trace {
            let (model, provider) = names();
            (trace.model, trace.provider) = (model.map(Box::from), Some(provider));
        }
    }

    /// The attempt that runs failed.
    pub fn attempt_failed(&mut self, at: Tick, failure: AttemptFailure) {
        if let Some(trace) = &mut self.fields.trace {
            trace.attempt_failed(at, failure);
        }
    }

    /// What the engine of the attempt that runs is told of the trace.
    #[must_use]
    pub fn outgoing_trace(&self) -> Option<Box<OutgoingTrace>> {
        self.fields.trace.as_ref()?.outgoing().map(Box::new)
    }

    /// Which of our paths it came to, and whether answers there are judged.
    pub fn comes_to(&mut self, endpoint: Endpoint, is_judged: bool) {
        let fields = &mut *self.fields;
        (fields.endpoint, fields.is_unjudged) = (Some(endpoint), !is_judged);
    }

    /// It asks for a path or model that is not served: shown as far as a line may show it.
    #[cold]
    pub fn asks_for_unknown(&mut self, shown: &str) {
        self.fields.asked = Some(shown.into());
    }

    /// Who asks.
    pub fn belongs_to(&mut self, tenant: TenantId) {
        self.fields.tenant = Some(tenant);
    }

    /// The last byte of the body was read; for so long the client had sent nothing while the gateway
    /// stood ready to read it.
    pub fn uploaded(&mut self, at: Tick, client_wait: Duration) {
        let fields = &mut *self.fields;
        (fields.body_complete, fields.client_wait) = (Some(at), client_wait);
    }

    /// The prompt, for the journal: `shape` is made only where one is kept.
    pub fn prompt_is(&mut self, shape: impl FnOnce() -> PromptShape) {
        if self.gauge.recorder.has_journal() {
            self.fields.prompt_shape = Some(Box::new(shape()));
        }
    }

    /// The class that applies, and what comes with it.
    pub fn promised(&mut self, promise: RequestPolicy) {
        self.gauge.open.standing.lock().promise = Some(promise.clone());
        self.fields.promise = Some(promise);
    }

    /// The route: the model as it names it, and its first pool.
    pub fn routed(&mut self, model: Arc<str>, pool: PoolId) {
        self.fields.model = Some(model);
        self.stands(pool, false);
    }

    /// It waits in the queue of this pool.
    pub fn waits(&mut self, pool: &PoolId) {
        self.stands(pool.clone(), true);
    }

    /// It stands in this pool: said once more where a scrape looks.
    fn stands(&mut self, pool: PoolId, waits: bool) {
        self.fields.pool = Some(pool.clone());
        let mut standing = self.gauge.open.standing.lock();
        (standing.pool, standing.waits) = (Some(pool), waits);
    }

    /// The request left the queue.
    pub fn admitted(&mut self, at: Tick) {
        self.fields.admitted = Some(at);
    }

    /// When it left the queue last.
    #[must_use]
    pub fn admitted_at(&self) -> Option<Tick> {
        self.fields.admitted
    }

    /// It no longer waits: it was called to its seat.
    pub fn called(&mut self) {
        self.gauge.open.standing.lock().waits = false;
    }

    /// The queue before was too long: it goes on to this pool of its route.
    pub fn spills(&mut self, pool: &PoolId) {
        self.fields.spilled = true;
        self.stands(pool.clone(), false);
    }

    /// A head of the gateway's own went out while it waits: its client has a 200.
    pub fn head_went_ahead(&mut self, client: &ClientState) {
        self.fields.ahead = Some(client.clone());
    }

    /// It is served beyond its tenant's own limit.
    pub fn goes_beyond_its_limit(&mut self) {
        if let Some(case) = self.case_mut() {
            case.over_limit = true;
        }
        if let Some(promise) = &mut self.gauge.open.standing.lock().promise {
            promise.case.over_limit = true;
        }
    }

    /// So many overload levels of its class are in force, and this is the cap that they set.
    pub fn at_level(&mut self, level: usize, cap: Option<Tokens>) {
        let degraded = &mut self.fields.degraded;
        (degraded.level, degraded.cap) = (level, cap);
    }

    /// An overload level does this to it.
    pub fn degraded(&mut self, kind: Kind) {
        self.fields.degraded.kinds.add(kind);
        if let (Kind::CapOutput, Some(case)) = (kind, self.case_mut()) {
            case.cap_lowered = true;
        }
    }

    /// What overload levels have done to it.
    #[must_use]
    pub fn degradation(&self) -> Kinds {
        self.fields.degraded.kinds
    }

    /// An attempt begins.
    pub fn attempts(&mut self, pool: &PoolId, engine: EngineId, at: Tick) {
        let fields = &mut *self.fields;
        fields.attempts += 1;
        if let Some(trace) = &mut fields.trace {
            trace.attempt(pool.clone(), engine.clone(), at, rand::random());
        }
        fields.engine = Some(engine);
        if fields.pool.as_ref() != Some(pool) {
            self.stands(pool.clone(), false);
        }
    }

    /// What made another attempt necessary.
    pub fn retries(&mut self, why: Retry) {
        self.fields.retries[why as usize] += 1;
    }

    /// What bears on the judgement and became known later: a lowered cap, a credential that
    /// was forwarded, a model that no engine has served.
    pub fn case_mut(&mut self) -> Option<&mut Case> {
        self.fields.promise.as_mut().map(|promise| &mut promise.case)
    }

    /// What applies to it, once it has a class.
    #[must_use]
    pub fn promise(&self) -> Option<&RequestPolicy> {
        self.fields.promise.as_ref()
    }

    /// Where the relay leaves its token events, so that overdue requests can be counted.
    #[must_use]
    pub fn pulse(&self) -> ProgressCell {
        self.gauge.open.pulse.clone()
    }

    /// How far it had come while it waited for a response, once it has a class.
    #[must_use]
    pub fn progress(&self) -> Option<(&RequestPolicy, Progress<'static>)> {
        let policy = self.promise()?;
        Some((policy, Progress::waiting(policy.start, self.fields.body_complete.is_some(), policy.streamed)))
    }

    /// It came to a path whose responses are not judged.
    #[must_use]
    pub fn is_unjudged(&self) -> bool {
        self.fields.is_unjudged
    }

    /// The client's side behind a head that the gateway sent ahead of the response.
    #[must_use]
    pub fn early_head(&self) -> Option<&ClientState> {
        self.fields.ahead.as_ref()
    }

    /// The present moment.
    #[must_use]
    pub fn now(&self) -> Tick {
        self.gauge.recorder.now()
    }

    /// Writes the one [`RequestRecord`], then takes the request out of the in-flight gauge.
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

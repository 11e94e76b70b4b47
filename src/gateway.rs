//! The life of one request, told once, top to bottom.
//!
//! Only this room knows the order of the others. [`Gateway`] is the `tower::Service` of all
//! connections; `Gateway::serve` is the story: read the head, find the tenant, read and
//! understand the body, classify, route, reserve what its tenant's limits allow, wait for a
//! seat, ask engines until one speaks. What a request holds (its visit, its reservation and
//! seat, its share of an engine's work) then moves into the body of its answer (`response`),
//! and is given back where that body ends (`completion`). Where a head has to go ahead while a request waits for
//! its seat, the whole story moves there as it is (`early`).

mod admission;
mod attempt;
mod charge;
mod client_wait;
pub(crate) mod completion;
mod degrade;
mod early;
mod engine_effects;
mod house;
mod mark;
mod models;
mod promise;
mod reply;
mod request_body;
mod response;
mod retries;
mod strangers;
mod upstream;

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode};
use http_body::Body;

pub use admission::wanted;
pub use degrade::{LevelView, OverloadBoard, OverrideError};
pub use early::ServeFuture;
pub use house::{Gateway, GatewayDeps};
pub use promise::{ClassPolicy, PoolHandle, SettingsSnapshot};
pub use request_body::{BufferedBody, read_whole};

use crate::accept::{BoxError, IncomingRequest, ParsedHead, made_id};
use crate::admit::queue::Standing;
use crate::classify::{Classified, ClassifyInput as ClassAsk, TargetHeaders};
use crate::config::Settings;
use crate::forward::headers::is_fit_id;
use crate::forward::{GatewayHeaders, ReplyBody};
use crate::identify::{AuthError, Identity};
use crate::inspect::Facts;
use crate::judge::{self, Case, Objectives};
use crate::record::{self, ActiveRequest};
use crate::refuse::Rejection;
use crate::route::{self, Routed, Size, TenantKey};
use crate::units::{ClassId, ClientState, Endpoint, InvalidHead, LengthBucket, PathError, RequestId, Tick, Tokens};
use admission::{AdmissionGuard, AdmissionRequest, PoolCursor};
use completion::RequestGuard;
use early::{EarlyHead, EarlyHeadSlot};
use request_body::{BodyLimits, BodyReadError};
use response::{RelayContext, RequestSummary};
use retries::{SelectedResponse, send_with_retries};
use upstream::{UpstreamRequest, Upstreams};

/// The longest query. Behind an engine's path prefix it must still be a URI, of which none is
/// longer than 65,534 bytes.
const LONGEST_QUERY: usize = 32 * 1024;

/// How serving a request went on.
enum Served {
    /// The gateway answers itself; such paths are not judged.
    Own(Response<ReplyBody>),
    /// An engine speaks.
    Answer(Box<RelayContext>, SelectedResponse),
}

/// Why serving a request ended early.
enum EarlyEnd {
    /// The gateway refuses.
    Refused(Rejection),
    /// The client left.
    Left,
}

impl From<Rejection> for EarlyEnd {
    #[cold]
    fn from(refusal: Rejection) -> Self {
        EarlyEnd::Refused(refusal)
    }
}

/// What is known of a request from its head alone.
struct Arrived {
    head: Arc<ParsedHead>,
    at: Tick,
    /// When its head had been read: later, where it had to wait for that.
    read: Tick,
    id: RequestId,
    /// The id is our own, and unique.
    id_is_made: bool,
    client: ClientState,
    /// Where a head may go ahead of the answer; none where none does.
    outlet: Option<EarlyHeadSlot>,
}

impl Arrived {
    /// What the client is told: an event where it has its head already.
    fn refused(&self, refusal: &Rejection, class: Option<&ClassId>) -> Response<ReplyBody> {
        let shape = Endpoint::shape_of_unknown(self.head.uri.path());
        if self.outlet.as_ref().is_some_and(EarlyHeadSlot::is_out) {
            let dialect = self.head.endpoint().map_or(shape, Endpoint::dialect);
            return reply::event(refusal, dialect, &self.id);
        }
        reply::refusal(refusal, shape, &self.id, class)
    }
}

impl tower::Service<IncomingRequest> for Gateway {
    type Response = Response<ReplyBody>;
    type Error = Infallible;
    type Future = ServeFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, IncomingRequest { head, body, since }: IncomingRequest) -> Self::Future {
        let client = body.client().clone();
        self.handling(head, since, client, body)
    }
}

impl Gateway {
    /// Answers one request, of a client that is told of in its extensions, if at all. Never fails:
    /// what goes wrong is an answer, and exactly one `RequestRecord`.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<ReplyBody>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (head, body) = request.into_parts();
        let client = head.extensions.get::<ClientState>().cloned().unwrap_or_default();
        let Ok(response) = self.handling(Arc::new(ParsedHead::new(head)), None, client, body).await;
        response
    }

    /// One snapshot of the settings, kept to the end of the request.
    fn handling<B>(&self, head: Arc<ParsedHead>, since: Option<Tick>, client: ClientState, body: B) -> ServeFuture
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let live = self.live.load_full();
        let outlet = live.heads_go_ahead.then(EarlyHeadSlot::default);
        let arrived = self.arrived(head, since, client, outlet.clone());
        // The future is large: written into its box it is never moved. That holds as long as its
        // arguments lie together in it: with the body as one of its own it was made on the stack.
        let serving = Box::write(Box::new_uninit(), self.clone().handled(live, (arrived, body)));
        ServeFuture::new(Box::into_pin(serving), outlet, self.clock)
    }

    async fn handled<B>(self, live: Arc<SettingsSnapshot>, (arrived, body): (Arrived, B)) -> Response<ReplyBody>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        // Pinned where it is made: it is large, and what catches panics would move it twice.
        let answer = pin!(self.answer(&live, &arrived, body));
        // A panic drops the visit while the thread unwinds, which records it as `internal`.
        let answered = AssertUnwindSafe(answer).catch_unwind().await;
        answered.unwrap_or_else(|_| arrived.refused(&Rejection::Internal, None))
    }

    fn arrived(
        &self,
        head: Arc<ParsedHead>,
        since: Option<Tick>,
        client: ClientState,
        outlet: Option<EarlyHeadSlot>,
    ) -> Arrived {
        // Waiting to be read is part of the time it takes.
        let read = self.clock.now();
        let at = since.unwrap_or(read);
        let kept = head.request_id().filter(|value| is_fit_id(value));
        let kept = kept.and_then(|value| value.to_str().ok()).map(RequestId::from);
        let id_is_made = kept.is_none();
        let id = kept.unwrap_or_else(made_id);
        Arrived { head, at, read, id, id_is_made, client, outlet }
    }

    async fn answer<B>(&self, live: &Arc<SettingsSnapshot>, arrived: &Arrived, body: B) -> Response<ReplyBody>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if let Err(why) = check_head(live, &arrived.head) {
            self.recorder.doorstep().refused_head(why);
            let refusal = Rejection::BadHead { status: why.status().as_u16(), advice: why.advice() };
            return arrived.refused(&refusal, None);
        }
        let mut visit = RequestGuard::new(self.recorder.open(arrived.id.clone(), arrived.at));
        visit.read_by(&arrived.client);
        match self.serve(live, &mut visit, arrived, body).await {
            Ok(Served::Own(mut response)) => {
                GatewayHeaders::of(&arrived.id).add_to(response.headers_mut());
                visit.answered(response.status().as_u16());
                response
            }
            Ok(Served::Answer(context, spoken)) => context.relay(spoken, visit),
            Err(EarlyEnd::Refused(refusal)) => {
                let class = visit.promise().map(|promise| &promise.class);
                let mut response = arrived.refused(&refusal, class);
                reply::degraded(response.headers_mut(), visit.degradation());
                visit.reject(&refusal);
                response
            }
            Err(EarlyEnd::Left) => {
                drop(visit);
                reply::json(StatusCode::BAD_REQUEST, Bytes::new())
            }
        }
    }

    async fn serve<B>(
        &self,
        live: &Arc<SettingsSnapshot>,
        visit: &mut ActiveRequest,
        arrived: &Arrived,
        body: B,
    ) -> Result<Served, EarlyEnd>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let &Arrived { ref head, at: arrival, read, ref id, ref client, .. } = arrived;
        let endpoint = endpoint_of(&live.settings, head).inspect_err(|refusal| {
            if *refusal == Rejection::UnknownPath {
                visit.asks_for_unknown(&self.strangers.path(head.uri.path(), read));
            }
        })?;
        let is_judged = live.settings.judges(endpoint);
        visit.comes_to(endpoint, is_judged);
        if endpoint.path() == "/health" {
            return Ok(Served::Own(self.health()));
        }
        if self.is_draining() {
            return Err(Rejection::Draining.into());
        }
        let who = live.settings.keyring.find(&head.headers).map_err(unknown)?;
        visit.belongs_to(who.tenant.clone());
        if !endpoint.is_relayed() {
            if live.is_metered {
                self.count_own(live, &who.tenant, read).await?;
            }
            return match self.models(live, &who, endpoint, head) {
                Ok(models) => Ok(Served::Own(models)),
                Err(unknown) => {
                    visit.asks_for_unknown(&self.strangers.model(&unknown, read));
                    Err(Rejection::ModelNotFound.into())
                }
            };
        }

        let listen = &live.settings.listen;
        let (max_body, timeout) = (listen.max_body, listen.body_timeout);
        let (bodies, max_bodies) = (&self.bodies, listen.max_bodies);
        let with_prefix = live.asks_for_prefixes;
        let is_coded = head.has_coding();
        let terms = BodyLimits { bodies, max_bodies, max_body, timeout, arrival, read, with_prefix, is_coded };
        let upload = match endpoint.is_of_engine() {
            true => BufferedBody::none(read),
            false => request_body::read(body, &head.headers, endpoint, terms, client, &self.clock).await?,
        };
        visit.uploaded(upload.complete, upload.client_wait);
        refuse_what_is_not_served(&upload)?;

        let model = upload.facts.model.as_ref().map(|field| &field.value);
        let alias = model.and_then(|name| live.settings.routes.alias(name));
        if alias.is_some() && upload.is_form {
            return Err(Rejection::AliasInForm.into());
        }
        let served_model = alias.or(model.map(|name| &**name));
        let learned = self.ratios.of(served_model);
        let prompt = upload.facts.prompt.tokens(learned.bytes_per_token());
        let classified = classify(live, &who, head, endpoint, &upload, served_model, prompt)?;
        let promise = live.promise(&classified.class);
        let objectives = objectives_of(promise, head);
        let start = match objectives.upload {
            judge::UploadRule::Excluded => arrival + upload.client_wait,
            judge::UploadRule::Counted => arrival,
        };
        visit.promised(record::RequestPolicy {
            class: classified.class,
            rule: classified.rule,
            start,
            objectives: Arc::clone(&objectives),
            length: bucket_of(live, &upload, prompt),
            prompt,
            streamed: upload.facts.streams(),
            choices: upload.facts.choices(),
            gap_edges: Arc::clone(&promise.watch.gap_edges),
            case: Case {
                judged_path: is_judged,
                stated_cap: upload.facts.caps.largest(),
                names_stored: upload.facts.names_stored,
                ..Case::of(endpoint.dialect())
            },
        });
        let routed = match endpoint.is_of_engine() {
            true => live.settings.routes.any(&promise.class.id).ok_or(Rejection::ModelNotFound)?,
            false => route(&live.settings, served_model, &promise.class.id).inspect_err(|_| {
                if let Some(model) = served_model {
                    visit.asks_for_unknown(&self.strangers.model(model, upload.complete));
                }
            })?,
        };
        visit.routed(routed.model_label.clone(), routed.pools[0].clone());
        let relief = self.relief(&promise.class.id);
        relief.is_told(visit);
        let routed = relief.rerouted(routed, promise.class.priority, visit, upload.complete)?;
        client.set_total_deadline(arrival + promise.class.timeouts.total);

        let wish = AdmissionRequest {
            tenant: &who.tenant,
            model: served_model,
            endpoint,
            facts: &upload.facts,
            prompt,
            promise,
            objectives: &objectives,
            cap: relief.cap(),
            uncached: self.fleet.uncached(&routed.pools[0], prompt, upload.facts.prefix_blocks()),
            arrival,
            start,
            complete: upload.complete,
        };
        let allowed = match live.is_metered {
            true => self.reserve(live, &wish, upload.complete).await?,
            false => admission::ReservedTokens::unmetered(upload.complete),
        };
        if self.loops.has_sent(id) {
            return Err(Rejection::LoopDetected.into());
        }
        let (mut standing, allowed_at) = (allowed.standing, allowed.at);
        if standing == Standing::OverLimit {
            visit.goes_beyond_its_limit();
        }
        if relief.defers(visit) {
            standing = Standing::OverLimit;
        }
        let size = size_of(&upload.facts, endpoint, prompt, &objectives, relief.cap());
        let lead = Size { prefill: wish.uncached, ..size };
        let predicted = || self.fleet.predict(&routed.pools[0], lead, upload.complete);
        let usual = |limit| self.fleet.usual_length(&routed.pools[0], limit);
        let seat = live.has_seats.then(|| wish.ask(standing, predicted(), usual));
        let mut held = AdmissionGuard::new(allowed, prompt, self.clock);
        let outlet = arrived.outlet.as_ref().filter(|_| wish.streams());
        let early = outlet.zip(promise.class.timeouts.keepalive).map(|(outlet, every)| EarlyHead {
            outlet,
            due: arrival + promise.class.timeouts.hold_head,
            every,
            id,
            class: promise.shown.as_ref(),
            is_messages: endpoint.is_of_messages(),
            client,
        });
        let walk =
            seat.as_ref().map(|ask| PoolCursor { house: self, promise, pools: &routed.pools, ask, client, early });
        let (first, admitted, begins) = match &walk {
            None => (0, allowed_at, Some(allowed_at)),
            Some(walk) => {
                let seated = self.seat(walk, visit).await?;
                held.sits(seated.seat);
                (seated.first, seated.since.unwrap_or(allowed_at), None)
            }
        };
        visit.admitted(admitted);

        let target = target_of(endpoint, head);
        let (upstream_id, tagged) = self.loops.tag(id, arrived.id_is_made);
        let ask = UpstreamRequest {
            promise,
            routed: &routed,
            first,
            home: relief.home(&routed.pools),
            walk: walk.as_ref(),
            facts: &upload.facts,
            endpoint,
            is_judged,
            target: &target,
            head,
            frames: &upload.frames,
            was_coded: upload.was_coded,
            fixed: upload.is_form || endpoint.is_of_engine(),
            alias,
            tenant: TenantKey(route::key_of(who.tenant.as_str().as_bytes())),
            size,
            cap: relief.cap(),
            without_reasoning: relief.without_reasoning(),
            engine_priority: standing.engine_priority(promise.class.priority),
            arrival,
            start,
            begins,
            id,
            upstream_id,
            client,
            learned: &learned,
            pulse: visit.pulse(),
        };
        let yard = Upstreams { clock: self.clock, alarms: &self.alarms, fleet: &self.fleet, lines: &self.lines };
        let spoken = match send_with_retries(&ask, &yard, &mut held, visit).await {
            Ok(spoken) => spoken,
            Err(refusal) => {
                held.refused(&refusal);
                return Err(refusal.into());
            }
        };
        let request = RequestSummary {
            endpoint,
            model: alias.map(Arc::from).or_else(|| model.cloned()),
            class: promise.shown.clone(),
            is_named: routed.literal,
            prompt: upload.facts.prompt,
            queued: visit.admitted_at().unwrap_or(admitted).since(upload.complete),
            learned,
            _tagged: tagged,
        };
        let kept = upload.facts.held_for_answer();
        let body = (kept > 0).then(|| upload.share.reduced_to(kept));
        Ok(Served::Answer(Box::new(RelayContext { gateway: self.clone(), request, held, _body: body }), spoken))
    }

    fn health(&self) -> Response<ReplyBody> {
        if self.is_draining() {
            reply::json(StatusCode::SERVICE_UNAVAILABLE, Bytes::from_static(b"{\"status\":\"draining\"}"))
        } else {
            reply::json(StatusCode::OK, Bytes::from_static(b"{\"status\":\"ok\"}"))
        }
    }
}

/// Whether a head may become a request.
fn check_head(live: &SettingsSnapshot, head: &ParsedHead) -> Result<(), InvalidHead> {
    if head.uri.query().is_some_and(|query| query.len() > LONGEST_QUERY) {
        return Err(InvalidHead::TargetTooLong);
    }
    head.check(live.settings.listen.max_head, live.settings.listen.max_header_lines)
}

fn endpoint_of(settings: &Settings, head: &ParsedHead) -> Result<Endpoint, Rejection> {
    match head.endpoint() {
        Ok(endpoint) if endpoint.is_of_engine() && !settings.engine_paths.contains(&endpoint) => {
            Err(Rejection::UnknownPath)
        }
        Ok(endpoint) => Ok(endpoint),
        Err(PathError::Method { allow }) => match Endpoint::of_engines_at(head.uri.path()) {
            Some(endpoint) if !settings.engine_paths.contains(&endpoint) => Err(Rejection::UnknownPath),
            _ => Err(Rejection::MethodNotAllowed { allow }),
        },
        Err(PathError::Path) => Err(Rejection::UnknownPath),
    }
}

fn classify(
    live: &SettingsSnapshot,
    who: &Identity,
    head: &ParsedHead,
    endpoint: Endpoint,
    upload: &BufferedBody,
    model: Option<&str>,
    prompt: Tokens,
) -> Result<Classified, Rejection> {
    let ask = ClassAsk {
        who,
        headers: &head.headers,
        path: endpoint.path(),
        facts: Some(&upload.facts),
        model,
        prompt_tokens: prompt,
    };
    let may_use = |class: &ClassId| live.settings.tenants.may_use(&who.tenant, class);
    let not_allowed = |_| Rejection::ClassNotAllowed { class: live.settings.default_class.clone() };
    live.settings.rules.class_of(&ask, may_use).map_err(not_allowed)
}

fn bucket_of(live: &SettingsSnapshot, upload: &BufferedBody, prompt: Tokens) -> LengthBucket {
    if upload.facts.prompt.is_known { live.settings.buckets.of(prompt) } else { LengthBucket::Unknown }
}

fn unknown(unknown: AuthError) -> Rejection {
    match unknown {
        AuthError::Missing => Rejection::MissingKey,
        AuthError::Unknown => Rejection::UnknownKey,
        AuthError::TwoKeys => Rejection::TwoKeys,
    }
}

fn refuse_what_is_not_served(upload: &BufferedBody) -> Result<(), Rejection> {
    match &*upload.facts {
        facts if facts.background => Err(Rejection::BackgroundRefused),
        facts if facts.steers => Err(Rejection::TransferRefused),
        _ => Ok(()),
    }
}

/// The pools that serve a model to a class.
///
/// # Errors
/// No route does.
pub fn route(settings: &Settings, model: Option<&str>, class: &ClassId) -> Result<Routed, Rejection> {
    let missing = || if model.is_none() { Rejection::ModelMissing } else { Rejection::ModelNotFound };
    settings.routes.find(model, class).ok_or_else(missing)
}

/// The class's objectives, with the targets that the request sets for itself.
fn objectives_of(promise: &ClassPolicy, head: &ParsedHead) -> Arc<Objectives> {
    let targets = promise.class.target_headers.read(&head.headers);
    if targets.ttft.is_none() && targets.tpot.is_none() {
        return Arc::clone(&promise.objectives);
    }
    let may_loosen = promise.class.target_headers == TargetHeaders::MayLoosen;
    Arc::new(promise.objectives.with_targets(targets.ttft, targets.tpot, may_loosen))
}

/// The work that a request brings: its prompt, and the output that is expected of it.
fn size_of(facts: &Facts, endpoint: Endpoint, prompt: Tokens, objectives: &Objectives, cap: Option<Tokens>) -> Size {
    if !endpoint.dialect().generates() {
        return Size { prefill: prompt, decode: Tokens::ZERO };
    }
    let each = facts.caps.largest().unwrap_or_else(|| objectives.default_output());
    let each = cap.map_or(each, |cap| each.min(cap)).min(MOST_OUTPUT);
    Size { prefill: prompt, decode: each.times(admission::plausible_choices(facts)) }
}

/// Output of a choice that counts as work for an engine: more than any model's context holds. An
/// engine refuses more, but until then it would have made all other work on it look like none.
const MOST_OUTPUT: Tokens = Tokens(1 << 20);

/// Path and query for the engine: the path as the documentation writes it, the query as it came.
fn target_of(endpoint: Endpoint, head: &ParsedHead) -> PathAndQuery {
    match head.uri.path_and_query() {
        Some(target) if target.path() == endpoint.path() => target.clone(),
        Some(target) => {
            let query = target.query().map_or_else(String::new, |query| format!("?{query}"));
            PathAndQuery::try_from([endpoint.path(), &query].concat()).expect("a path of ours, a query that was parsed")
        }
        None => PathAndQuery::from_static(endpoint.path()),
    }
}

impl From<BodyReadError> for EarlyEnd {
    #[cold]
    fn from(unread: BodyReadError) -> Self {
        match unread {
            BodyReadError::Refused(refusal) => EarlyEnd::Refused(refusal),
            BodyReadError::Left => EarlyEnd::Left,
        }
    }
}

//! The life of one request, from top to bottom.
//!
//! Only this module knows the order of the others. [`Gateway`] is the `tower::Service` of all
//! connections; `Gateway::serve` shows the first half of a request, up to the first token of its
//! response, and `completion` the second half, when the response body ends.
//!
//! # Sequence of a request
//!
//! ```text
//! accept            gateway                    admit, route, forward        engine
//!   |  call(request)  |                                 |                      |
//!   |---------------->| ArrivedRequest: id, arrival     |                      |
//!   |                 | serve:                          |                      |
//!   |                 |   keyring.find     -> tenant    |                      |
//!   |<--- read body --|   request_body     -> Facts     |                      |
//!   |                 |   request::context -> class, route, overload levels    |
//!   |                 |   reserve ---------- tokens --->| admit::limit         |
//!   |                 |   seat ------------- queue ---->| admit::queue         |
//!   |                 |   send_with_retries:            |                      |
//!   |                 |     choose engine ------------->| route                |
//!   |                 |     Attempt::run -------------->| forward::start ----->|
//!   |                 |     hold until the first token  |<---- head, body -----|
//!   |<-- Response ----|   RelayContext::relay           |                      |
//!   |                                                   |                      |
//!   |--- poll_frame: forward::Relay passes events, observe reads them -------->|
//!   |                                                   |                      |
//!   |  end of the body: Relay calls Completion::end     |                      |
//!   |                 | completion: engine effects, settle, judge, record      |
//! ```
//!
//! Control is inverted in four places, which the calls downwards do not show:
//!
//! - **End of the body.** `serve` returns at the first token. From then on the client's connection
//!   drives the request by polling the response body (`forward::Relay`, an `http_body::Body`), which
//!   owns whatever the request holds. Its end, whichever it is (last event, error, timeout, trailers,
//!   or `Drop`), calls `forward::RelayEvents::end`, which `completion::Completion` implements.
//! - **Client disconnect.** A cancelled request is only seen by a drop: the connection drops the future
//!   of `serve`, or the response body. Before the first token `completion::RequestGuard` records the drop; the
//!   reservation and the seat go with `admission::AdmissionGuard`, the engine's share of work with
//!   `route::WorkGuard`.
//! - **Early head.** A class with `keepalive_seconds` promises a response head after `hold_head`, also
//!   while the request still waits in a queue. [`ServeFuture`] then returns a `200` and moves the
//!   future of `serve`, as it is, into the response body (`forward::EarlyHeadBody`), where it goes on;
//!   errors are server-sent events from then on. An engine that sends no head in time is waited for in
//!   the same way, but inside the relay (`Attempt::wait_behind_early_head`).
//! - **HTTP/2 executor.** `accept` runs each HTTP/2 stream as a future of its own, because limits on a
//!   client that does not read cannot be enforced inside a body that is not polled. That executor,
//!   and the write-stall timer of HTTP/1.1, drop the future from outside and leave the reason in
//!   `types::ClientState`, which the relay and `completion` read.

/// Awaits a large future where it was built, because `.await` moves it first: some 100 instructions for one of a
/// kilobyte.
macro_rules! await_in_place {
    ($future:expr) => {{
        let future = std::pin::pin!($future);
        future.await
    }};
}

mod admission;
mod attempt;
mod charge;
mod client_wait;
pub(crate) mod completion;
mod early_head;
mod engine_effects;
mod exchange;
mod local_reply;
mod loop_guard;
mod manual_drain;
mod models;
mod overload;
mod overload_board;
mod relay_context;
mod request;
mod request_body;
mod response;
mod retries;
mod seat;
mod snapshot;
mod state;
mod unknown_names;
mod upstream;

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body::Body;

pub use admission::wanted;
pub use early_head::ServeFuture;
pub use overload::{LevelView, OverrideError};
pub use overload_board::OverloadBoard;
pub use request::route;
pub use request_body::{BufferedBody, read_whole};
pub use snapshot::{ClassPolicy, PoolHandle, SettingsSnapshot};
pub use state::{Gateway, GatewayDeps};

use crate::accept::{BoxError, IncomingRequest, new_request_id};
use crate::forward::headers::is_fit_id;
use crate::forward::{GatewayHeaders, ReplyBody};
use crate::http1::ParsedHead;
use crate::identify::Identity;
use crate::record::ActiveRequest;
use crate::reject::Rejection;
use crate::types::{ApiPath, ClassId, ClientState, RequestId, Tick};
use admission::AdmissionGuard;
use completion::RequestGuard;
use early_head::EarlyHeadSlot;
use relay_context::{RelayContext, RequestSummary};
use request::ArrivedRequest;
use request_body::BodyReadError;
use retries::{SelectedResponse, send_with_retries};
use seat::{Admitted, PoolCursor};
use upstream::{UpstreamRequest, Upstreams};

/// Result of serving a request.
enum Served {
    /// The gateway's own response; such paths are not judged.
    Own(Response<ReplyBody>),
    /// An engine's response.
    Relayed(Box<RelayContext>, SelectedResponse),
}

/// Early end of a request.
enum EarlyEnd {
    /// Rejected by the gateway.
    Rejected(Rejection),
    /// The client disconnected.
    Left,
}

impl From<Rejection> for EarlyEnd {
    #[cold]
    fn from(rejection: Rejection) -> Self {
        EarlyEnd::Rejected(rejection)
    }
}

impl From<BodyReadError> for EarlyEnd {
    #[cold]
    fn from(error: BodyReadError) -> Self {
        match error {
            BodyReadError::Refused(rejection) => EarlyEnd::Rejected(rejection),
            BodyReadError::Left => EarlyEnd::Left,
        }
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
        self.start(head, since, client, body)
    }
}

impl Gateway {
    /// Serves one request, whose extensions may hold its client's state. Never fails: an error is a response,
    /// and exactly one `RequestRecord`.
    pub async fn handle<B>(&self, request: Request<B>) -> Response<ReplyBody>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let (head, body) = request.into_parts();
        let client = head.extensions.get::<ClientState>().cloned().unwrap_or_default();
        let Ok(response) = self.start(Arc::new(ParsedHead::new(head)), None, client, body).await;
        response
    }

    /// Starts serving with one snapshot of the settings, kept to the end of the request.
    fn start<B>(&self, head: Arc<ParsedHead>, since: Option<Tick>, client: ClientState, body: B) -> ServeFuture
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let live = self.live.load_full();
        let early_head = live.heads_go_ahead.then(EarlyHeadSlot::default);
        let arrived = self.arrived(head, since, client, early_head.clone());
        // The future is large, so it is constructed in its box. Its arguments must form one tuple: with the body
        // as a separate argument it was built on the stack and copied.
        let serving = Box::write(Box::new_uninit(), self.clone().catch_panics(live, (arrived, body)));
        ServeFuture::new(Box::into_pin(serving), early_head, self.clock)
    }

    fn arrived(
        &self,
        head: Arc<ParsedHead>,
        since: Option<Tick>,
        client: ClientState,
        early_head: Option<EarlyHeadSlot>,
    ) -> ArrivedRequest {
        // The wait to be read is part of the request's time.
        let read = self.clock.now();
        let arrival = since.unwrap_or(read);
        let kept = head.request_id().filter(|value| is_fit_id(value));
        let kept = kept.and_then(|value| value.to_str().ok()).map(RequestId::from);
        let id_is_made = kept.is_none();
        let id = kept.unwrap_or_else(new_request_id);
        ArrivedRequest { head, arrival, read, id, id_is_made, client, early_head }
    }

    async fn catch_panics<B>(
        self,
        live: Arc<SettingsSnapshot>,
        (arrived, body): (ArrivedRequest, B),
    ) -> Response<ReplyBody>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        // Pinned in place, because it is large and `catch_unwind` would move it twice.
        let answer = pin!(self.answer(&live, &arrived, body));
        // A panic drops the request's guard during unwinding, which records it as `internal`.
        let answered = AssertUnwindSafe(answer).catch_unwind().await;
        answered.unwrap_or_else(|_| arrived.reject(&Rejection::Internal, None))
    }

    async fn answer<B>(&self, live: &Arc<SettingsSnapshot>, arrived: &ArrivedRequest, body: B) -> Response<ReplyBody>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if let Err(why) = request::check_head(live, &arrived.head) {
            self.recorder.listener_stats().refused_head(why);
            let rejection = Rejection::BadHead { status: why.status().as_u16(), advice: why.advice() };
            return arrived.reject(&rejection, None);
        }
        let active = self.recorder.open(arrived.id.clone(), arrived.arrival, arrived.client.clone());
        let mut active = RequestGuard::new(active);
        active.begin_trace(&arrived.head.headers);
        match await_in_place!(self.serve(live, &mut active, arrived, body)) {
            Ok(Served::Relayed(context, selected)) => context.relay(selected, active),
            Ok(Served::Own(mut response)) => {
                GatewayHeaders::of(&arrived.id).add_to(response.headers_mut());
                active.answered(response.status().as_u16());
                response
            }
            Err(EarlyEnd::Rejected(rejection)) => {
                let class = active.promise().map(|policy| &policy.class);
                let mut response = arrived.reject(&rejection, class);
                local_reply::degraded(response.headers_mut(), active.degradation());
                active.reject(&rejection);
                response
            }
            Err(EarlyEnd::Left) => {
                drop(active);
                local_reply::json(StatusCode::BAD_REQUEST, Bytes::new())
            }
        }
    }

    /// Serves a request from its head to the first token.
    async fn serve<B>(
        &self,
        live: &SettingsSnapshot,
        active: &mut ActiveRequest,
        arrived: &ArrivedRequest,
        body: B,
    ) -> Result<Served, EarlyEnd>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let endpoint = self.endpoint(live, active, arrived)?;
        if endpoint.path() == "/health" {
            return Ok(Served::Own(self.health()));
        }
        if self.is_draining() {
            return Err(Rejection::Draining.into());
        }
        let who = self.identify(live, active, arrived)?;
        if !endpoint.is_relayed() {
            return self.list_models(live, active, arrived, &who, endpoint).await;
        }

        let body = await_in_place!(self.read_body(live, arrived, endpoint, body))?;
        active.uploaded(body.complete, body.client_wait);
        request::check_facts(&body.facts)?;
        let request = self.context(live, active, arrived, &who, endpoint, &body)?;
        arrived.client.set_total_deadline(request.start + request.policy.class.timeouts.total);

        let reserved = self.reserve(live, &request, body.complete).await?;
        if self.loops.has_sent(&arrived.id) {
            return Err(Rejection::LoopDetected.into());
        }
        let (limit_state, reserved_at) = (request.limit_state(reserved.limit_state, active), reserved.at);
        let queue_request = live.has_seats.then(|| self.queue_request(&request, limit_state));
        let mut held = AdmissionGuard::new(reserved, request.charged_prompt(), self.clock);
        let cursor = queue_request.as_ref().map(|queue_request| PoolCursor::new(self, &request, queue_request));
        let (admitted, begins) = match &cursor {
            None => (Admitted::AT_ONCE, Some(reserved_at)),
            Some(cursor) => (self.seat(cursor, active).await?, None),
        };
        active.admitted(admitted.since.unwrap_or(reserved_at));
        held.set_seat(admitted.seat);

        let (upstream_id, tagged) = self.loops.tag(&arrived.id, arrived.id_is_made);
        let upstream = UpstreamRequest {
            context: &request,
            cursor: cursor.as_ref(),
            first: admitted.first,
            begins,
            upstream_id,
            engine_priority: limit_state.engine_priority(request.policy.class.priority),
            progress_cell: active.progress_cell(),
        };
        let parts = Upstreams { clock: self.clock, alarms: &self.alarms, fleet: &self.fleet, lines: &self.lines };
        let sent = await_in_place!(send_with_retries(&upstream, &parts, &mut held, active));
        let selected = sent.inspect_err(|rejection| held.refused(rejection))?;
        let summary = RequestSummary::of(request, active.admitted_at().unwrap_or(reserved_at), tagged);
        Ok(Served::Relayed(RelayContext::new(self, summary, held, body), selected))
    }

    /// Reads the body within its limits. Engines' own paths have none.
    async fn read_body<B>(
        &self,
        live: &SettingsSnapshot,
        arrived: &ArrivedRequest,
        endpoint: ApiPath,
        body: B,
    ) -> Result<BufferedBody, BodyReadError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if endpoint.is_of_engine() {
            return Ok(BufferedBody::none(arrived.read));
        }
        let limits = self.body_limits(live, arrived);
        let headers = &arrived.head.headers;
        await_in_place!(request_body::read(body, headers, endpoint, limits, &arrived.client, &self.clock))
    }

    /// The models that a tenant may use. Counted against its limits, at no tokens.
    async fn list_models(
        &self,
        live: &SettingsSnapshot,
        active: &mut ActiveRequest,
        arrived: &ArrivedRequest,
        who: &Identity,
        endpoint: ApiPath,
    ) -> Result<Served, EarlyEnd> {
        if live.is_metered {
            self.count_own(live, &who.tenant, arrived.read).await?;
        }
        match self.models(live, who, endpoint, &arrived.head) {
            Ok(models) => Ok(Served::Own(models)),
            Err(unknown) => {
                active.asks_for_unknown(&self.unknown_names.model(&unknown, arrived.read));
                Err(Rejection::ModelNotFound.into())
            }
        }
    }

    fn health(&self) -> Response<ReplyBody> {
        if self.is_draining() {
            local_reply::json(StatusCode::SERVICE_UNAVAILABLE, Bytes::from_static(b"{\"status\":\"draining\"}"))
        } else {
            local_reply::json(StatusCode::OK, Bytes::from_static(b"{\"status\":\"ok\"}"))
        }
    }
}

impl ArrivedRequest {
    /// The response to a rejected request; an event if the client already has its head.
    fn reject(&self, rejection: &Rejection, class: Option<&ClassId>) -> Response<ReplyBody> {
        let shape = ApiPath::shape_of_unknown(self.head.uri.path());
        if self.early_head.as_ref().is_some_and(EarlyHeadSlot::is_out) {
            let dialect = self.head.endpoint().map_or(shape, ApiPath::dialect);
            return local_reply::event(rejection, dialect, &self.id);
        }
        local_reply::refusal(rejection, shape, &self.id, class)
    }
}

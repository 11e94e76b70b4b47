//! The admin port: metrics, liveness, readiness, attainment, reload, status page.
//!
//! | path | answer |
//! | --- | --- |
//! | `GET /livez` | 200 while the process responds |
//! | `GET /readyz` | 200 from the first valid settings until the shutdown, then 503 |
//! | `GET /metrics` | Prometheus text 0.0.4; OpenMetrics 1.0 if the `Accept` header prefers it |
//! | `GET /slo` | attainment of each class, as JSON |
//! | `GET /status` | the complete status, as JSON |
//! | `GET /` | the status page; `GET /events` updates an open page, `GET /assets/..` are its files |
//! | `POST /-/drain` | drains an engine, for a time or until it is put back; only with a token |
//! | `POST /-/degrade` | sets the overload level of a class, for a time or until it is returned; only with a token |
//! | `POST /-/reload` | reloads the settings: 200 with the keys that need a restart, or 409 with all problems |
//!
//! With a token configured, everything but the two probes requires it: as a bearer token, or, for reading only, as the
//! password of HTTP Basic, which browsers support. Without a token, everything but the two probes must be addressed by
//! a name in [`Hosts`]. Requests from pages of other sites change nothing, and settings are read at most once a second.
//! Data come through [`AdminView`]; this module stores and counts nothing. `cli` serves the router on a listener of
//! `accept`, with its limits on time and size.

mod assets;
mod drain;
mod drill;
mod events;
mod guard;
mod negotiate;
mod page;
mod pages;
mod reloads;
pub mod status;

pub use drain::DrainOrder;
pub use guard::Hosts;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::BoxFuture;
use http::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, VARY, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use self::events::LivePage;
use self::guard::is_cross_site_write;
use self::pages::MetricsPages;
use self::reloads::Reloads;
use self::status::{EngineStatus, GatewayStatus};
use crate::clock::Clock;
use crate::http1::ResponseHeaders;
use crate::record::HistorySpan;
use crate::route::DrainError;
use tokio::sync::Semaphore;

/// Data and actions of the admin port.
pub trait AdminView: Send + Sync + 'static {
    /// The metrics page, in OpenMetrics or in text 0.0.4. Called on a thread that may be kept busy.
    fn metrics(&self, openmetrics: bool) -> String;

    /// Whether new clients may be sent here.
    fn is_ready(&self) -> bool;

    /// SLO status of each class.
    fn slo(&self) -> SloBody;

    /// The complete status, with the histories of classes over this span. Called on a blocking thread.
    fn status(&self, span: HistorySpan) -> GatewayStatus;

    /// Drains an engine, or puts it back.
    ///
    /// # Errors No such engine, or the last one of its pool.
    fn drain(&self, order: &DrainOrder) -> Result<EngineStatus, DrainError>;

    /// Sets the overload level of a class for this long, or until it is returned to automatic control
    /// (`None`).
    ///
    /// # Errors Unknown class, or a level that it does not have.
    fn force_level(
        &self,
        class: &str,
        level: Option<usize>,
        length: Option<Duration>,
    ) -> Result<Degradation, LevelError>;

    /// Counts this many test misses in the class `drill`.
    fn drill(&self, misses: u64);

    /// Reloads the settings, and returns the keys that need a restart. The error is all problems, one line
    /// each.
    fn reload(&self) -> BoxFuture<'_, Reloaded>;
}

/// Result of a reload: the keys that need a restart, or all problems.
pub type Reloaded = Result<Vec<&'static str>, Vec<String>>;

/// The body of `GET /slo`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SloBody {
    /// Source of the figures, if they may cover all gateways.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Every class, in the order of the settings.
    pub classes: Vec<ClassStanding>,
}

/// SLO status of a class over its window.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClassStanding {
    /// The class.
    pub class: String,
    /// The length of the window in seconds.
    pub window_seconds: u64,
    /// Counted part of the window: less until the class has existed for that long.
    pub covered_seconds: u64,
    /// Unix time in seconds from which on requests are counted.
    pub since_unix_seconds: u64,
    /// Source of the counts: `process`, `file` (this gateway over its restarts) or `prometheus` (all
    /// gateways).
    #[serde(default)]
    pub source: Cow<'static, str>,
    /// The share of judged requests that must be met.
    pub target: f64,
    /// Requests met in the window.
    pub met: u64,
    /// Requests judged (met and missed) in the window.
    pub total: u64,
    /// `met / total`; absent while nothing was judged.
    pub attainment: Option<f64>,
    /// The share of the window's error budget that is left; negative when overspent.
    pub budget_remaining: Option<f64>,
    /// How many times too fast the budget is spent, by window.
    pub burn_rate: Vec<BurnRate>,
    /// The same by prompt length, lengths of which anything was judged.
    pub lengths: Vec<LengthStanding>,
    /// Observed lengths against those that the class assumes.
    pub workload_drift: Vec<DriftStanding>,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests waiting for a seat.
    pub waiting: u64,
    /// Requests in flight that have already broken an objective.
    pub overdue: u64,
    /// Its overload level; absent for a class that has none.
    pub degradation: Option<Degradation>,
}

/// SLO status of one prompt length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LengthStanding {
    /// `short`, `medium`, `long`, or `unknown`.
    pub length: Cow<'static, str>,
    /// Requests met in the class's window.
    pub met: u64,
    /// Requests judged in it.
    pub total: u64,
    /// `met / total`.
    pub attainment: Option<f64>,
    /// The share of the error budget that is left; negative when overspent.
    pub budget_remaining: f64,
    /// How many times too fast the budget is spent, by window.
    pub burn_rate: Vec<BurnRate>,
}

/// A percentile of lengths against the assumed one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DriftStanding {
    /// `input` or `output`.
    pub direction: Cow<'static, str>,
    /// `p50` or `p95`.
    pub percentile: Cow<'static, str>,
    /// Observed by assumed.
    pub ratio: f64,
    /// Advice, if the workload has changed.
    pub advice: Option<String>,
}

/// Overload level of a class, and the last measurements.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Degradation {
    /// Levels in force.
    pub level: usize,
    /// Levels that it has.
    pub levels: usize,
    /// Actions in force.
    pub actions: Vec<String>,
    /// Whether it was set by hand.
    pub forced: bool,
    /// Remaining seconds of a manual setting; absent without a limit or without a setting.
    pub forced_for_seconds: Option<u64>,
    /// Burn rate of the last minute, without shed requests; absent if too few were judged.
    pub burn_rate: Option<f64>,
    /// Expected wait for a seat; absent if unknown.
    pub queue_wait_seconds: Option<f64>,
    /// Requests that wait in front of its first pool.
    pub queue_depth: u64,
}

/// Why a level could not be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LevelError {
    /// Unknown class.
    UnknownClass,
    /// The class has only this many levels.
    TooHigh(usize),
}

/// A burn rate over one window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BurnRate {
    /// The window's length in seconds.
    pub window_seconds: u64,
    /// How many of these are counted; the rate is that of these.
    pub covered_seconds: u64,
    /// 1 spends the budget exactly by the end of the class's window.
    pub rate: f64,
}

/// Access control of the port.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Whoever shows this.
    pub token: Option<SecretString>,
    /// Host names accepted without a token.
    pub hosts: Hosts,
}

/// The routes of the operators' port.
pub fn router(view: Arc<dyn AdminView>, access: Access, clock: Clock) -> Router {
    let reloads = Arc::new(Reloads::new(clock));
    let reload = move |State(view): SharedView| {
        let reloads = Arc::clone(&reloads);
        async move { told(reloads.run(|| view.reload()).await) }
    };
    let has_token = access.token.is_some();
    let live = Arc::new(LivePage::new(Arc::clone(&view), clock, has_token));
    let events = Arc::clone(&live);
    let pages = Arc::new(MetricsPages::new(clock));
    let status_turn = Arc::new(Semaphore::new(1));
    let guarded = Router::new()
        .route("/", get(move |request| live.page(request)))
        .route("/events", get(move |request| events.events(request)))
        .route("/status", get(move |view, request| status(view, request, Arc::clone(&status_turn))))
        .route("/assets/{name}", get(assets::file))
        .route("/metrics", get(move |view, headers| metrics(view, headers, Arc::clone(&pages))))
        .route("/slo", get(slo))
        .route("/-/reload", post(reload))
        .route("/-/degrade", if has_token { post(degrade) } else { post(not_without_token) })
        .route("/-/drain", if has_token { post(drain::drain) } else { post(not_without_token) })
        .route("/-/drill", if has_token { post(drill::drill) } else { post(not_without_token) })
        .layer(middleware::from_fn_with_state(Arc::new(access), keep_out));
    Router::new()
        .route("/livez", get(|| async { plain(StatusCode::OK, "alive\n") }))
        .route("/readyz", get(ready))
        .merge(guarded)
        .fallback(|| async {
            plain(
                StatusCode::NOT_FOUND,
                "no such page; there are /, /status, /metrics, /slo, /livez, /readyz, and POST /-/reload, /-/degrade, /-/drain and /-/drill\n",
            )
        })
        .with_state(view)
}

type SharedView = State<Arc<dyn AdminView>>;

/// Answers here bring no fields of their own.
impl ResponseHeaders for axum::body::Body {}

async fn ready(State(view): SharedView) -> Response {
    if view.is_ready() {
        plain(StatusCode::OK, "ready\n")
    } else {
        plain(StatusCode::SERVICE_UNAVAILABLE, "not ready: starting or leaving\n")
    }
}

async fn metrics(State(view): SharedView, headers: HeaderMap, pages: Arc<MetricsPages>) -> Response {
    let openmetrics = negotiate::prefers_openmetrics(&headers);
    let is_coded = negotiate::takes_gzip(&headers);
    let kind = if openmetrics { negotiate::OPENMETRICS } else { negotiate::TEXT };
    let Some(page) = pages.make(move || view.metrics(openmetrics), is_coded).await else {
        return plain(StatusCode::INTERNAL_SERVER_ERROR, "the page could not be made; the log says why\n");
    };
    let fields = [(CONTENT_TYPE, kind), (VARY, "accept, accept-encoding")];
    let mut response = (fields, axum::body::Body::new(page)).into_response();
    if is_coded {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

async fn slo(State(view): SharedView) -> Response {
    let body = serde_json::to_vec(&view.slo());
    let body = body.expect("names and numbers are always JSON");
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")], body).into_response()
}

fn told(reloaded: Reloaded) -> Response {
    match reloaded {
        Ok(waiting) => {
            let waits = |key| format!("{key} changes only with a restart: the old value holds until then\n");
            let waiting: String = waiting.into_iter().map(waits).collect();
            (StatusCode::OK, [(CONTENT_TYPE, PLAIN)], format!("reloaded\n{waiting}")).into_response()
        }
        Err(problems) => {
            let text = format!("not reloaded, the old settings stay:\n{}\n", problems.join("\n"));
            (StatusCode::CONFLICT, [(CONTENT_TYPE, PLAIN)], text).into_response()
        }
    }
}

/// Seconds that a level can be set for: a week. What is forgotten for longer is a setting.
const LONGEST: u64 = 7 * 24 * 60 * 60;

/// The longest body of `POST /-/degrade`.
const LONGEST_WISH: usize = 4096;

async fn degrade(State(view): SharedView, request: Request) -> Response {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct LevelRequest {
        class: String,
        level: serde_json::Value,
        for_seconds: Option<serde_json::Value>,
    }
    let body = axum::body::to_bytes(request.into_body(), LONGEST_WISH).await.unwrap_or_default();
    let wanted: Option<LevelRequest> = serde_json::from_slice(&body).ok();
    let level = |wanted: &LevelRequest| match &wanted.level {
        serde_json::Value::String(word) if word == "auto" => Some(None),
        other => other.as_u64().and_then(|level| usize::try_from(level).ok()).map(Some),
    };
    let length = |wanted: &LevelRequest, level: Option<usize>| match &wanted.for_seconds {
        None => Some(None),
        Some(seconds) => {
            let seconds = seconds.as_u64().filter(|seconds| level.is_some() && (1..=LONGEST).contains(seconds));
            seconds.map(|seconds| Some(Duration::from_secs(seconds)))
        }
    };
    let read = wanted.and_then(|wanted| {
        let level = level(&wanted)?;
        let length = length(&wanted, level)?;
        Some((wanted, level, length))
    });
    let Some((wanted, level, length)) = read else {
        let text = "send {\"class\": NAME, \"level\": NUMBER}, or \"auto\" as the level; \
                    \"for_seconds\": 1 to 604800 beside a number gives it an end\n";
        return plain(StatusCode::BAD_REQUEST, text);
    };
    match view.force_level(&wanted.class, level, length) {
        Ok(now) => {
            let body = serde_json::to_vec(&now).expect("names and numbers are always JSON");
            ([(CONTENT_TYPE, "application/json")], body).into_response()
        }
        Err(LevelError::UnknownClass) => plain(StatusCode::NOT_FOUND, "no class has this name; see /slo\n"),
        Err(LevelError::TooHigh(most)) => {
            let text = format!("this class has {most} levels: its `degrade` in the settings says which\n");
            (StatusCode::CONFLICT, [(CONTENT_TYPE, PLAIN)], text).into_response()
        }
    }
}

/// Actions that affect clients require credentials.
async fn not_without_token() -> Response {
    plain(StatusCode::FORBIDDEN, "what changes something needs a token: set admin.token_file and restart\n")
}

async fn status(State(view): SharedView, request: Request, turn: Arc<Semaphore>) -> Response {
    let Some(span) = events::span_of(&request) else { return events::unknown_span() };
    let _turn = turn.acquire_owned().await;
    let made = tokio::task::spawn_blocking(move || serde_json::to_vec(&view.status(span)));
    let Ok(Ok(body)) = made.await else {
        return plain(StatusCode::INTERNAL_SERVER_ERROR, "the status could not be made; the log says why\n");
    };
    ([(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")], body).into_response()
}

const PLAIN: &str = "text/plain; charset=utf-8";

fn plain(status: StatusCode, text: &'static str) -> Response {
    (status, [(CONTENT_TYPE, PLAIN)], text).into_response()
}

async fn keep_out(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    if is_cross_site_write(request.method(), request.headers()) {
        return plain(StatusCode::FORBIDDEN, "a page of another site may not change anything here\n");
    }
    if access.token.is_none() && !access.hosts.are_named(request.uri(), request.headers()) {
        let text = "this port is not known under that name: ask for localhost, or for a name in admin.hosts, \
                    or set admin.token_file\n";
        return plain(StatusCode::FORBIDDEN, text);
    }
    // A browser sends stored Basic credentials with requests from any page, so they permit reading only.
    let looks = request.method().is_safe();
    if let Some(token) = &access.token
        && !carries(request.headers(), token, looks)
    {
        return unauthorized(looks);
    }
    let mut response = next.run(request).await;
    // A wrong method needs no body, but must name the allowed ones.
    if response.status() == StatusCode::METHOD_NOT_ALLOWED {
        let allow = response.headers().get(ALLOW).cloned();
        response = plain(StatusCode::METHOD_NOT_ALLOWED, "another method is needed here\n");
        if let Some(allow) = allow {
            response.headers_mut().insert(ALLOW, allow);
        }
    }
    response
}

fn unauthorized(looks: bool) -> Response {
    let text = if looks {
        "send the token of admin.token_file: Authorization: Bearer ..., or, in a browser, as the password\n"
    } else {
        "send the token of admin.token_file: Authorization: Bearer ...\n"
    };
    let mut response = plain(StatusCode::UNAUTHORIZED, text);
    let headers = response.headers_mut();
    headers.append(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    if looks {
        headers.append(WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"goodput\", charset=\"UTF-8\""));
    }
    response
}

/// Whether the token was sent, as a bearer token or, if allowed, as the password of any user.
fn carries(headers: &HeaderMap, token: &SecretString, basic_will_do: bool) -> bool {
    let mut sent = headers.get_all(AUTHORIZATION).iter();
    let (Some(only), None) = (sent.next(), sent.next()) else { return false };
    let Some((scheme, sent)) = only.to_str().ok().and_then(|value| value.split_once(' ')) else { return false };
    let sent = sent.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return is_the_token(sent.as_bytes(), token);
    }
    if !basic_will_do || !scheme.eq_ignore_ascii_case("basic") {
        return false;
    }
    let Ok(pair) = STANDARD.decode(sent) else { return false };
    let colon = pair.iter().position(|byte| *byte == b':');
    colon.is_some_and(|colon| is_the_token(&pair[colon + 1..], token))
}

/// Compared by hash, so that the timing reveals neither a matching prefix nor the length.
fn is_the_token(sent: &[u8], token: &SecretString) -> bool {
    let (sent, right) = (blake3::hash(sent), blake3::hash(token.expose_secret().as_bytes()));
    bool::from(sent.as_bytes().ct_eq(right.as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use axum::body::Body;
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;

    struct Shown {
        ready: bool,
        problems: Vec<String>,
        /// Makes the page of metrics, in OpenMetrics or not.
        page: Box<dyn Fn(bool) -> String + Send + Sync>,
    }

    impl Default for Shown {
        fn default() -> Self {
            let page = |openmetrics| if openmetrics { "# EOF\n".to_owned() } else { "slo_total 0\n".to_owned() };
            Shown { ready: true, problems: Vec::new(), page: Box::new(page) }
        }
    }

    impl AdminView for Shown {
        fn metrics(&self, openmetrics: bool) -> String {
            (self.page)(openmetrics)
        }

        fn is_ready(&self) -> bool {
            self.ready
        }

        fn slo(&self) -> SloBody {
            let burn_rate = vec![BurnRate { window_seconds: 3600, covered_seconds: 60, rate: 0.5 }];
            let class =
                ClassStanding { class: "<chat>".to_owned(), met: 9, total: 10, burn_rate, ..ClassStanding::default() };
            SloBody { note: None, classes: vec![class] }
        }

        fn status(&self, span: HistorySpan) -> GatewayStatus {
            let class = |standing| status::ClassStatus { standing, ..status::ClassStatus::default() };
            let classes = self.slo().classes.into_iter().map(class).collect();
            GatewayStatus {
                ready: self.ready,
                history_span: span.as_str().to_owned(),
                classes,
                ..GatewayStatus::default()
            }
        }

        fn drain(&self, order: &DrainOrder) -> Result<EngineStatus, DrainError> {
            let drained_for_seconds = order.length.map(|length| length.as_secs());
            match (order.pool.as_str(), order.engine.as_str()) {
                ("main", "last") if order.drain && !order.may_empty_pool => Err(DrainError::LastEngine),
                ("main", "a" | "last") => Ok(EngineStatus {
                    engine: order.engine.to_string(),
                    drained: order.drain,
                    drained_for_seconds,
                    ..EngineStatus::default()
                }),
                ("main", _) => Err(DrainError::UnknownEngine),
                _ => Err(DrainError::UnknownPool),
            }
        }

        fn force_level(
            &self,
            class: &str,
            level: Option<usize>,
            length: Option<Duration>,
        ) -> Result<Degradation, LevelError> {
            let forced_for_seconds = length.map(|length| length.as_secs());
            match (class, level) {
                ("chat", None) => Ok(Degradation { level: 1, levels: 2, ..Degradation::default() }),
                ("chat", Some(level)) if level <= 2 => {
                    Ok(Degradation { level, levels: 2, forced: true, forced_for_seconds, ..Degradation::default() })
                }
                ("chat", Some(_)) => Err(LevelError::TooHigh(2)),
                _ => Err(LevelError::UnknownClass),
            }
        }

        fn drill(&self, _: u64) {}

        fn reload(&self) -> BoxFuture<'_, Reloaded> {
            let problems = self.problems.clone();
            Box::pin(async move { if problems.is_empty() { Ok(vec!["listen.address"]) } else { Err(problems) } })
        }
    }

    fn access(token: Option<&str>) -> Access {
        Access { token: token.map(SecretString::from), ..Access::default() }
    }

    struct Answered {
        status: u16,
        kind: String,
        text: String,
    }

    async fn ask(shown: Shown, token: Option<&str>, method: &str, path: &str, line: Option<(&str, &str)>) -> Answered {
        let mut request = Request::builder().method(method).uri(path);
        if let Some((name, value)) = line {
            request = request.header(name, value);
        }
        let router = router(Arc::new(shown), access(token), Clock::start());
        answered(router.oneshot(request.body(Body::empty()).unwrap()).await.unwrap()).await
    }

    async fn answered(response: Response) -> Answered {
        let status = response.status().as_u16();
        let kind = response.headers().get(CONTENT_TYPE).map_or("", |kind| kind.to_str().unwrap()).to_owned();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        Answered { status, kind, text: String::from_utf8(body.to_vec()).unwrap() }
    }

    fn good() -> Shown {
        Shown::default()
    }

    #[tokio::test]
    async fn the_probes_need_no_token_and_tell_readiness_apart_from_life() {
        let leaving = || Shown { ready: false, ..Shown::default() };
        assert_eq!(ask(good(), Some("t"), "GET", "/readyz", None).await.status, 200);
        assert_eq!(ask(leaving(), Some("t"), "GET", "/readyz", None).await.status, 503);
        assert_eq!(ask(leaving(), Some("t"), "GET", "/livez", None).await.status, 200);
    }

    #[tokio::test]
    async fn everything_else_asks_for_the_token_where_there_is_one() {
        for path in ["/metrics", "/slo", "/status", "/", "/assets/status.css"] {
            assert_eq!(ask(good(), None, "GET", path, None).await.status, 200, "{path}");
            assert_eq!(ask(good(), Some("t"), "GET", path, None).await.status, 401, "{path}");
            let right = Some(("authorization", "bearer t"));
            assert_eq!(ask(good(), Some("t"), "GET", path, right).await.status, 200, "{path}");
        }
        for wrong in ["Bearer tt", "Bearer", "t", "Basic t", "Bearer "] {
            let answered = ask(good(), Some("t"), "POST", "/-/reload", Some(("authorization", wrong))).await;
            assert_eq!(answered.status, 401, "{wrong}");
        }
    }

    #[tokio::test]
    async fn a_browser_is_asked_for_the_token_and_sends_it_as_a_password() {
        let basic = |pair: &str| format!("Basic {}", STANDARD.encode(pair));
        for (pair, status) in [("anybody:t", 200), (":t", 200), ("t:", 401), ("t", 401), ("a:t:t", 401), ("a:T", 401)] {
            for path in ["/", "/slo", "/metrics"] {
                let line = basic(pair);
                let answered = ask(good(), Some("t"), "GET", path, Some(("authorization", &line))).await;
                assert_eq!(answered.status, status, "{pair} {path}");
            }
        }
        let with_colon = basic("a:x:y");
        assert_eq!(ask(good(), Some("x:y"), "GET", "/", Some(("authorization", &with_colon))).await.status, 200);
        for nonsense in ["Basic", "Basic ", "Basic %%", "basic dDp0"] {
            let answered = ask(good(), Some("t"), "GET", "/", Some(("authorization", nonsense))).await;
            assert_eq!(answered.status, if nonsense == "basic dDp0" { 200 } else { 401 }, "{nonsense}");
        }
        let asked = |method: &'static str, path: &'static str| async move {
            let router = router(Arc::new(good()), access(Some("t")), Clock::start());
            let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
            let response = router.oneshot(request).await.unwrap();
            let asks =
                response.headers().get_all(WWW_AUTHENTICATE).iter().map(|value| value.to_str().unwrap().to_owned());
            asks.collect::<Vec<_>>()
        };
        assert_eq!(asked("GET", "/").await, ["Bearer", "Basic realm=\"goodput\", charset=\"UTF-8\""]);
        assert_eq!(asked("POST", "/-/reload").await, ["Bearer"]);
    }

    /// Another site's page can make a browser send stored credentials.
    #[tokio::test]
    async fn nothing_is_changed_by_what_a_browser_sends_of_itself() {
        let line = format!("Basic {}", STANDARD.encode("a:t"));
        for path in ["/-/reload", "/-/degrade", "/-/drain", "/-/drill"] {
            assert_eq!(
                ask(good(), Some("t"), "POST", path, Some(("authorization", &line))).await.status,
                401,
                "{path}"
            );
        }
        assert_eq!(degrade(Some("t"), &line, r#"{"class":"chat","level":2}"#).await.status, 401);
    }

    #[tokio::test]
    async fn the_metrics_are_text_unless_openmetrics_is_preferred() {
        let text = ask(good(), None, "GET", "/metrics", None).await;
        assert_eq!((text.kind.as_str(), text.text.as_str()), (negotiate::TEXT, "slo_total 0\n"));
        let accept = Some(("accept", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
        let open = ask(good(), None, "GET", "/metrics", accept).await;
        assert_eq!((open.kind.as_str(), open.text.as_str()), (negotiate::OPENMETRICS, "# EOF\n"));
    }

    #[tokio::test]
    async fn the_metrics_are_gzip_where_the_scraper_takes_it() {
        let request = Request::get("/metrics").header("accept-encoding", "gzip").body(Body::empty()).unwrap();
        let response = router(Arc::new(good()), Access::default(), Clock::start()).oneshot(request).await.unwrap();
        assert_eq!(response.headers()[CONTENT_ENCODING], "gzip");
        assert_eq!(response.headers()[VARY], "accept, accept-encoding");
        assert_eq!(response.headers()[CONTENT_TYPE], negotiate::TEXT);
        let page = response.into_body().collect().await.unwrap().to_bytes();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(&page[..]), &mut text).unwrap();
        assert_eq!(text, "slo_total 0\n");
    }

    async fn status_of(router: &Router, path: &str) -> u16 {
        let request = Request::get(path).body(Body::empty()).unwrap();
        router.clone().oneshot(request).await.unwrap().status().as_u16()
    }

    /// C115: the page is ready only after another request was served by the only thread.
    #[tokio::test]
    async fn c115_others_are_served_while_a_page_is_made() {
        let (served, waits) = std::sync::mpsc::channel();
        let waits = std::sync::Mutex::new(waits);
        let page = move |_| {
            let waited = waits.lock().unwrap().recv_timeout(Duration::from_secs(60));
            waited.map(|()| "slo_total 1\n".to_owned()).expect("nobody else was served")
        };
        let router =
            router(Arc::new(Shown { page: Box::new(page), ..Shown::default() }), Access::default(), Clock::start());
        let others = async {
            let ready = status_of(&router, "/readyz").await;
            served.send(()).unwrap();
            ready
        };
        assert_eq!(tokio::join!(status_of(&router, "/metrics"), others), (200, 200));
    }

    #[tokio::test]
    async fn a_page_that_cannot_be_made_is_a_500_and_the_next_one_comes() {
        let is_second = std::sync::atomic::AtomicBool::new(false);
        let page = move |_| {
            assert!(is_second.swap(true, std::sync::atomic::Ordering::Relaxed), "on purpose");
            String::new()
        };
        let router =
            router(Arc::new(Shown { page: Box::new(page), ..Shown::default() }), Access::default(), Clock::start());
        assert_eq!((status_of(&router, "/metrics").await, status_of(&router, "/metrics").await), (500, 200));
    }

    #[tokio::test]
    async fn attainment_is_json_and_a_page() {
        let json = ask(good(), None, "GET", "/slo", None).await;
        let read: serde_json::Value = serde_json::from_str(&json.text).unwrap();
        assert_eq!(read["classes"][0]["class"], "<chat>");
        let expected = serde_json::json!({"window_seconds": 3600, "covered_seconds": 60, "rate": 0.5});
        assert_eq!(read["classes"][0]["burn_rate"][0], expected);
        assert_eq!(read["classes"][0]["attainment"], serde_json::Value::Null);
        let page = ask(good(), None, "GET", "/", None).await;
        assert!(page.text.contains("&lt;chat&gt;") && !page.text.contains("<chat>"), "{}", page.text);
    }

    #[tokio::test]
    async fn a_reload_tells_every_problem_and_what_waits_for_a_restart() {
        let answered = ask(good(), None, "POST", "/-/reload", None).await;
        let waits = "reloaded\nlisten.address changes only with a restart: the old value holds until then\n";
        assert_eq!((answered.status, answered.text.as_str()), (200, waits));
        assert_eq!(ask(good(), None, "GET", "/-/reload", None).await.status, 405);
        let problems = vec!["pools[0]: no engines".to_owned(), "routes: none".to_owned()];
        let bad = Shown { problems, ..Shown::default() };
        let answered = ask(bad, None, "POST", "/-/reload", None).await;
        assert_eq!(answered.status, 409);
        assert!(answered.text.contains("pools[0]: no engines\nroutes: none\n"), "{}", answered.text);
    }

    /// A site's name that leads here, and a form of another site, on a port without a token.
    #[tokio::test]
    async fn c101_what_a_browser_can_be_made_to_send_is_refused_without_a_token() {
        for (method, path) in
            [("GET", "/slo"), ("GET", "/"), ("GET", "/metrics"), ("POST", "/-/reload"), ("HEAD", "/slo")]
        {
            let foreign = ask(good(), None, method, path, Some(("host", "evil.example"))).await;
            assert_eq!(foreign.status, 403, "{method} {path}");
            assert!(method == "HEAD" || foreign.text.contains("admin.hosts"), "{}", foreign.text);
            let local = ask(good(), None, method, path, Some(("host", "localhost:9090"))).await;
            assert_eq!(local.status, 200, "{method} {path}");
            let known = ask(good(), Some("t"), method, path, Some(("host", "evil.example"))).await;
            assert_eq!(known.status, 401, "with a token the name says nothing");
        }
        for path in ["/livez", "/readyz"] {
            assert_eq!(ask(good(), None, "GET", path, Some(("host", "10.0.0.5:9090"))).await.status, 200, "a probe");
        }
        for line in [("origin", "http://evil.example"), ("sec-fetch-site", "cross-site"), ("origin", "null")] {
            assert_eq!(ask(good(), None, "POST", "/-/reload", Some(line)).await.status, 403, "{line:?}");
            assert_eq!(
                ask(good(), None, "GET", "/slo", Some(line)).await.status,
                200,
                "to look is the browser's to forbid"
            );
        }
    }

    /// RFC 9110 section 8.6: the length that a GET would have.
    #[tokio::test]
    async fn c93_a_head_of_the_metrics_tells_their_length() {
        let router = router(Arc::new(good()), Access::default(), Clock::start());
        let request = Request::builder().method("HEAD").uri("/metrics").body(Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        assert_eq!(response.headers()[http::header::CONTENT_LENGTH], "slo_total 0\n".len().to_string());
    }

    async fn degrade(token: Option<&str>, bearer: &str, body: &str) -> Answered {
        let request = Request::builder().method("POST").uri("/-/degrade").header("authorization", bearer);
        let request = request.body(Body::from(body.to_owned())).unwrap();
        answered(router(Arc::new(good()), access(token), Clock::start()).oneshot(request).await.unwrap()).await
    }

    #[tokio::test]
    async fn a_level_is_set_by_hand_only_with_the_token() {
        let wanted = r#"{"class":"chat","level":2}"#;
        assert_eq!(degrade(None, "Bearer t", wanted).await.status, 403, "none is configured");
        assert_eq!(degrade(Some("t"), "Bearer x", wanted).await.status, 401);
        let set = degrade(Some("t"), "Bearer t", wanted).await;
        assert_eq!((set.status, set.kind.as_str()), (200, "application/json"));
        assert!(set.text.contains(r#""level":2,"levels":2"#) && set.text.contains(r#""forced":true"#), "{}", set.text);
        assert!(set.text.contains(r#""forced_for_seconds":null"#), "it stands until it is handed back: {}", set.text);
        for seconds in [1, 604_800] {
            let wanted = format!(r#"{{"class":"chat","level":2,"for_seconds":{seconds}}}"#);
            let set = degrade(Some("t"), "Bearer t", &wanted).await;
            assert!(set.text.contains(&format!(r#""forced_for_seconds":{seconds}"#)), "{}", set.text);
        }
        let back = degrade(Some("t"), "Bearer t", r#"{"class":"chat","level":"auto"}"#).await;
        assert!(back.text.contains(r#""forced":false"#), "{}", back.text);
        assert_eq!(ask(good(), Some("t"), "GET", "/-/degrade", Some(("authorization", "Bearer t"))).await.status, 405);
    }

    #[tokio::test]
    async fn a_drill_counts_so_many_misses_and_needs_the_token() {
        let view = Arc::new(CountingView::default());
        let post = async |token: Option<&str>, bearer: &str, body: &str| {
            let request = Request::post("/-/drill").header("authorization", bearer).body(Body::from(body.to_owned()));
            let router = router(Arc::clone(&view) as Arc<dyn AdminView>, access(token), Clock::start());
            answered(router.oneshot(request.unwrap()).await.unwrap()).await
        };
        let right = r#"{"misses":20}"#;
        assert_eq!(post(None, "Bearer t", right).await.status, 403, "none is configured");
        assert_eq!(post(Some("t"), "Bearer x", right).await.status, 401);
        for wrong in ["", "{}", r#"{"misses":0}"#, r#"{"misses":10001}"#, r#"{"misses":1.5}"#, r#"{"misses":1,"x":1}"#]
        {
            assert_eq!(post(Some("t"), "Bearer t", wrong).await.status, 400, "{wrong}");
        }
        assert_eq!(view.misses.load(Ordering::Relaxed), 0);
        let done = post(Some("t"), "Bearer t", right).await;
        assert_eq!((done.status, done.text.as_str()), (200, r#"{"class":"drill","misses":20}"#));
        assert_eq!(view.misses.load(Ordering::Relaxed), 20);
    }

    #[tokio::test]
    async fn a_wish_that_cannot_be_is_told_so() {
        for bad in
            ["", "{}", "[]", r#"{"class":"chat"}"#, r#"{"class":"chat","level":-1}"#, r#"{"class":"chat","level":1.5}"#]
        {
            assert_eq!(degrade(Some("t"), "Bearer t", bad).await.status, 400, "{bad}");
        }
        for bad in [r#"{"class":"chat","level":"off"}"#, r#"{"class":"chat","level":1,"for":"1h"}"#] {
            assert_eq!(degrade(Some("t"), "Bearer t", bad).await.status, 400, "{bad}");
        }
        for length in ["0", "604801", "-1", "1.5", "\"60\"", "null", "1e99"] {
            let wanted = format!(r#"{{"class":"chat","level":1,"for_seconds":{length}}}"#);
            let answered = degrade(Some("t"), "Bearer t", &wanted).await;
            // null is as good as nothing.
            assert_eq!(answered.status, if length == "null" { 200 } else { 400 }, "{length}");
        }
        let endless = degrade(Some("t"), "Bearer t", r#"{"class":"chat","level":"auto","for_seconds":60}"#).await;
        assert!(endless.status == 400 && endless.text.contains("for_seconds"), "{}", endless.text);
        assert_eq!(degrade(Some("t"), "Bearer t", &" ".repeat(5000)).await.status, 400);
        assert_eq!(degrade(Some("t"), "Bearer t", r#"{"class":"x","level":1}"#).await.status, 404);
        let high = degrade(Some("t"), "Bearer t", r#"{"class":"chat","level":3}"#).await;
        assert_eq!(high.status, 409);
        assert!(high.text.contains("has 2 levels"), "{}", high.text);
    }

    async fn drain(token: Option<&str>, bearer: &str, body: &str) -> Answered {
        let request = Request::builder().method("POST").uri("/-/drain").header("authorization", bearer);
        let request = request.body(Body::from(body.to_owned())).unwrap();
        answered(router(Arc::new(good()), access(token), Clock::start()).oneshot(request).await.unwrap()).await
    }

    #[tokio::test]
    async fn an_engine_is_drained_and_put_back_only_with_the_token() {
        let order = r#"{"pool":"main","engine":"a","drain":true,"for_seconds":900}"#;
        assert_eq!(drain(None, "Bearer t", order).await.status, 403, "none is configured");
        assert_eq!(drain(Some("t"), "Bearer x", order).await.status, 401);
        let drained = drain(Some("t"), "Bearer t", order).await;
        assert_eq!((drained.status, drained.kind.as_str()), (200, "application/json"));
        assert!(drained.text.contains(r#""drained":true,"drained_for_seconds":900"#), "{}", drained.text);
        let back = drain(Some("t"), "Bearer t", r#"{"pool":"main","engine":"a","drain":false}"#).await;
        assert!(back.text.contains(r#""drained":false"#), "{}", back.text);
    }

    #[tokio::test]
    async fn a_drain_that_cannot_be_is_told_so() {
        for bad in [
            "",
            "[]",
            r#"{"pool":"main","engine":"a"}"#,
            r#"{"pool":"main","engine":"a","drain":1}"#,
            r#"{"pool":"main","engine":"a","drain":true,"for":"1h"}"#,
            r#"{"pool":"main","engine":"a","drain":true,"for_seconds":0}"#,
            r#"{"pool":"main","engine":"a","drain":true,"for_seconds":604801}"#,
            r#"{"pool":"main","engine":"a","drain":false,"for_seconds":60}"#,
        ] {
            assert_eq!(drain(Some("t"), "Bearer t", bad).await.status, 400, "{bad}");
        }
        for (order, status, told) in [
            (r#"{"pool":"x","engine":"a","drain":true}"#, 404, "no pool"),
            (r#"{"pool":"main","engine":"x","drain":true}"#, 404, "no engine"),
            (r#"{"pool":"main","engine":"last","drain":true}"#, 409, "may_empty_pool"),
            (r#"{"pool":"main","engine":"last","drain":true,"may_empty_pool":true}"#, 200, "last"),
        ] {
            let answered = drain(Some("t"), "Bearer t", order).await;
            assert_eq!(answered.status, status, "{order}");
            assert!(answered.text.contains(told), "{}", answered.text);
        }
    }

    #[tokio::test]
    async fn the_page_allows_nothing_inline_and_its_files_are_kept_by_their_build() {
        let router = router(Arc::new(good()), Access::default(), Clock::start());
        let get = |path: String| {
            let router = router.clone();
            async move { router.oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap() }
        };
        let page = get("/".to_owned()).await;
        let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert!(policy.contains("frame-ancestors 'none'") && policy.contains("form-action 'none'"), "{policy}");
        for (path, kept) in [
            (format!("/assets/status.js?{}", *assets::BUILD), true),
            ("/assets/status.js".to_owned(), false),
            ("/assets/status.css?old".to_owned(), false),
        ] {
            let file = get(path.clone()).await;
            let cache = file.headers()[CACHE_CONTROL].to_str().unwrap();
            assert_eq!((file.status().as_u16(), cache.contains("immutable")), (200, kept), "{path}");
        }
        assert_eq!(get("/assets/other.js".to_owned()).await.status(), 404);
        for path in ["/", "/events", "/status"] {
            assert_eq!(get(format!("{path}?span=year")).await.status(), 400, "{path}");
        }
        let day = get("/status?span=day".to_owned()).await.into_body().collect().await.unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&day).contains(r#""history_span":"day""#));
    }

    /// The events of an open page until these have come; virtual time passes meanwhile.
    async fn events_until(body: &mut Body, text: &mut String, wanted: &str) {
        while !text.contains(wanted) {
            let frame = body.frame().await.expect("it goes on").expect("it does not break");
            text.push_str(std::str::from_utf8(&frame.into_data().unwrap()).unwrap());
        }
    }

    /// Counts looks, which it reports as the requests that were met, and the misses of drills.
    #[derive(Default)]
    struct CountingView {
        looks: AtomicU64,
        misses: AtomicU64,
    }

    impl AdminView for CountingView {
        fn metrics(&self, _: bool) -> String {
            String::new()
        }

        fn is_ready(&self) -> bool {
            true
        }

        fn slo(&self) -> SloBody {
            SloBody::default()
        }

        fn status(&self, _: HistorySpan) -> GatewayStatus {
            let met = self.looks.fetch_add(1, Ordering::Relaxed) + 1;
            let standing =
                ClassStanding { class: "chat".to_owned(), met: 7000 + met, total: 9000, ..Default::default() };
            let classes = vec![status::ClassStatus { standing, ..Default::default() }];
            GatewayStatus { ready: true, classes, ..GatewayStatus::default() }
        }

        fn drain(&self, _: &DrainOrder) -> Result<EngineStatus, DrainError> {
            Err(DrainError::UnknownPool)
        }

        fn force_level(&self, _: &str, _: Option<usize>, _: Option<Duration>) -> Result<Degradation, LevelError> {
            Err(LevelError::UnknownClass)
        }

        fn drill(&self, misses: u64) {
            self.misses.fetch_add(misses, Ordering::Relaxed);
        }

        fn reload(&self) -> BoxFuture<'_, Result<Vec<&'static str>, Vec<String>>> {
            Box::pin(async { Ok(Vec::new()) })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_page_is_told_all_parts_at_first_and_then_what_changed() {
        let clock = Clock::start();
        let router = router(Arc::new(CountingView::default()), Access::default(), clock);
        let response = router.oneshot(Request::get("/events").body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.headers()[CONTENT_TYPE], "text/event-stream");
        let mut body = response.into_body();
        let mut text = String::new();
        events_until(&mut body, &mut text, "event: actions\n").await;
        assert!(text.starts_with("retry: 2000\nevent: build\ndata: "), "{text}");
        for part in ["gateway", "classes", "budgets", "pools", "tenants", "misses"] {
            assert!(text.contains(&format!("event: {part}\ndata: <")), "{part}: {text}");
        }
        let mut more = String::new();
        events_until(&mut body, &mut more, "7\u{202f}002 of").await;
        assert_eq!(clock.now(), crate::types::Tick::from_millis(2000));
        assert!(more.contains("event: classes\n") && !more.contains("event: pools\n"), "{more}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_page_asks_anew_after_ten_minutes_and_frees_its_place() {
        let clock = Clock::start();
        let router = router(Arc::new(CountingView::default()), Access::default(), clock);
        let open = || router.clone().oneshot(Request::get("/events").body(Body::empty()).unwrap());
        let mut bodies = Vec::new();
        for _ in 0..32 {
            bodies.push(open().await.unwrap().into_body());
        }
        let (mut body, mut text) = (bodies.pop().unwrap(), String::new());
        events_until(&mut body, &mut text, "event: renew\ndata: -\n\n").await;
        assert_eq!(clock.now(), crate::types::Tick::from_millis(600_000));
        assert_eq!(open().await.unwrap().status(), 503, "it has its place until its end");
        assert!(body.frame().await.is_none());
        assert_eq!(open().await.unwrap().status(), 200);
    }

    #[tokio::test(start_paused = true)]
    async fn who_looks_at_the_same_time_shares_one_look_and_too_many_are_turned_away() {
        let view = Arc::new(CountingView::default());
        let router = router(Arc::clone(&view) as Arc<dyn AdminView>, Access::default(), Clock::start());
        let open = || router.clone().oneshot(Request::get("/events").body(Body::empty()).unwrap());
        let mut bodies = Vec::new();
        for _ in 0..32 {
            let response = open().await.unwrap();
            assert_eq!(response.status(), 200);
            bodies.push(response.into_body());
        }
        for body in &mut bodies {
            events_until(body, &mut String::new(), "event: actions\n").await;
        }
        assert_eq!(view.looks.load(Ordering::Relaxed), 1);
        let refused = open().await.unwrap();
        assert_eq!((refused.status().as_u16(), refused.headers().contains_key("retry-after")), (503, true));
        bodies.pop();
        assert_eq!(open().await.unwrap().status(), 200, "one went");
    }

    #[tokio::test]
    async fn an_unknown_page_is_a_404_with_or_without_a_token() {
        assert_eq!(ask(good(), Some("t"), "GET", "/debug", None).await.status, 404);
    }
}

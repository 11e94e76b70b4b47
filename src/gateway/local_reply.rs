//! Responses made by the gateway itself.

use bytes::Bytes;
use http::header::{
    ALLOW, CONNECTION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::{Response, StatusCode};

use super::overload;
use crate::admit::limit::LimitStatus;
use crate::admit::overload_control::ActionKinds;
use crate::forward::header_names::{X_GOODPUT_DEGRADED, X_GOODPUT_REASON};
use crate::forward::headers::UNBUFFERED;
use crate::forward::{GatewayHeaders, ReplyBody};
use crate::http1::HeaderSink;
use crate::reject::Rejection;
use crate::types::{ClassId, Dialect, RequestId, seconds_up};

/// A JSON response.
pub fn json(status: StatusCode, body: Bytes) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::whole(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The head sent early.
#[must_use]
pub fn our_head() -> http::response::Parts {
    let (mut head, ()) = Response::new(()).into_parts();
    head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    head.headers.extend(UNBUFFERED.iter().cloned());
    head
}

/// A rejection for a client that already has its head.
pub fn event(refusal: &Rejection, dialect: Dialect, id: &RequestId) -> Response<ReplyBody> {
    Response::new(ReplyBody::whole(refusal.event(dialect, id, None)))
}

/// A rejection.
pub fn refusal(refusal: &Rejection, shape: Dialect, id: &RequestId, class: Option<&ClassId>) -> Response<ReplyBody> {
    let mut response = json(refusal.status(), refusal.body(shape, id));
    let headers = response.headers_mut();
    headers.insert(X_GOODPUT_REASON, HeaderValue::from_static(refusal.code()));
    if refusal.status() == StatusCode::UNAUTHORIZED {
        // RFC 9110 section 15.5.2. `x-api-key` has no authentication scheme to name.
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"goodput\""));
    }
    if let Some(seconds) = refusal.retry_after() {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(limit_status) = refusal.limit() {
        rate_limit(headers, limit_status);
    }
    if let Some(allow) = refusal.allow() {
        headers.insert(ALLOW, HeaderValue::from_static(allow));
    }
    if refusal.closes() {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    let class = class.and_then(|class| HeaderValue::from_str(class.as_str()).ok());
    GatewayHeaders { class, is_messages: shape == Dialect::Messages, ..GatewayHeaders::of(id) }.add_to(headers);
    response
}

/// `x-ratelimit-*`: the limit that refused, its remainder, and when it is full again.
fn rate_limit(headers: &mut HeaderMap, limit_status: &LimitStatus) {
    let [limit, remaining, reset] = match limit_status.limit.unit() {
        "tokens" => RATE_LIMIT_TOKENS,
        _ => RATE_LIMIT_REQUESTS,
    };
    headers.insert(limit, HeaderValue::from(limit_status.most));
    headers.insert(remaining, HeaderValue::from(limit_status.remaining));
    if let Some(until) = limit_status.reset {
        let seconds = seconds_up(until);
        headers.extend(HeaderValue::try_from(format!("{seconds}s")).ok().map(|value| (reset, value)));
    }
}

const RATE_LIMIT_TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];
const RATE_LIMIT_REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];

/// Overload actions applied to the request, if any.
pub fn degraded(headers: &mut HeaderMap, kinds: ActionKinds) {
    if let Some(shown) = overload::degradation_header(kinds) {
        headers.add(X_GOODPUT_DEGRADED, |value| value.extend_from_slice(shown.as_bytes()));
    }
}

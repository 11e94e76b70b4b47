//! Names of headers that the gateway reads or sets.

use http::header::HeaderName;

/// Correlates request, response, log line and span.
pub const REQUEST_ID: &str = "x-request-id";
/// The request's class.
pub const X_SLO_CLASS: &str = "x-slo-class";
/// The pool whose engine answered.
pub const X_GOODPUT_POOL: &str = "x-goodput-pool";
/// Overload actions applied to the request.
pub const X_GOODPUT_DEGRADED: &str = "x-goodput-degraded";
/// Machine-readable reason of a rejection.
pub const GOODPUT_REASON: &str = "x-goodput-reason";
/// [`GOODPUT_REASON`] as a header name.
pub const X_GOODPUT_REASON: HeaderName = HeaderName::from_static(GOODPUT_REASON);
/// Queue and upstream time (W3C Server Timing).
pub const SERVER_TIMING: &str = "server-timing";
/// The address of the client's connection.
pub const X_FORWARDED_FOR: &str = "x-forwarded-for";
/// The proxies that a request passed.
pub const VIA: &str = "via";
/// The trace that a request belongs to, and the sender's span (W3C Trace Context).
pub const TRACEPARENT: &str = "traceparent";
/// Vendor-specific part of the trace context.
pub const TRACESTATE: &str = "tracestate";
/// Tells nginx not to buffer.
pub const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// Header for an API key at Anthropic and vLLM.
pub const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Header for an API key at Azure.
pub const API_KEY: HeaderName = HeaderName::from_static("api-key");

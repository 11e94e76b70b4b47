//! Rejections: every early end of a request, with the client's message, the log text and the outcome.
//!
//! One [`Rejection`] per way to end without (or inside) an engine's response. Its row has the log text, the
//! code, the status and the outcome, and [`Rejection::message`] the client's text, so that a new one cannot
//! leave any of them out. The client's text says what to do next and reveals nothing internal; the log text
//! ([`Display`]) has the values that decided. Codes are listed in
//! `docs/errors.md`.
//!
//! [`Display`]: std::fmt::Display

mod body;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;

use crate::admit::limit::{LimitKind, LimitScope, LimitStatus};
use crate::inspect::Unreadable;
use crate::judge::{Excluded, JudgeContext, Missed, Outcome, of_code};
use crate::types::{ClassId, Dialect, PoolId, RequestId};

macro_rules! refusals {
    ($($(#[$meta:meta])* $name:ident $({ $($field:ident: $type:ty = $sample:expr),* })?
        = $code:literal, $status:ident, $outcome:ident($reason:ident);)*) => {
        /// Why a request ended early.
        #[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
        pub enum Rejection {
            $(
                $(#[$meta])*
                $name $({
                    $(#[doc = concat!("See the text of [`Rejection::", stringify!($name), "`].")] $field: $type),*
                })?,
            )*
        }

        impl Rejection {
            /// Every code, in the order of the documentation.
            pub const CODES: &'static [&'static str] = &[$($code,)*];

            /// The stable, machine-readable code: in the body, and as `x-goodput-reason`.
            #[must_use]
            pub const fn code(&self) -> &'static str {
                match self { $(refusals!(@pattern $name $({ $($field),* })?) => $code,)* }
            }

            /// The status and the outcome of its row.
            const fn answer(&self) -> (StatusCode, Outcome) {
                match self {
                    $(refusals!(@pattern $name $({ $($field),* })?) => {
                        (StatusCode::$status, Outcome::$outcome($outcome::$reason))
                    })*
                }
            }

            /// One of each kind with example values, for documentation and tests.
            #[must_use]
            pub fn samples() -> Vec<Rejection> {
                vec![$(Rejection::$name $({ $($field: $sample),* })?,)*]
            }
        }
    };
    (@pattern $name:ident { $($field:ident),* }) => { Rejection::$name { .. } };
    (@pattern $name:ident) => { Rejection::$name };
}

refusals! {
    /// Unknown path.
    #[error("no endpoint has this path")]
    UnknownPath = "unknown_path", NOT_FOUND, Excluded(InvalidRequest);
    /// Known path, other method; `allow` is the value of `Allow`.
    #[error("this path takes {allow}")]
    MethodNotAllowed { allow: &'static str = "POST" } = "method_not_allowed", METHOD_NOT_ALLOWED, Excluded(InvalidRequest);
    /// A head that violates the request rules.
    #[error("a head that is refused: {advice}")]
    BadHead { status: u16 = 400, advice: &'static str = "send exactly one valid Host header" } = "bad_head", BAD_REQUEST, Excluded(InvalidRequest);
    /// Behind an early head, an engine responded with this status instead of a stream.
    #[error("an engine answered with {status} behind a head of ours")]
    EngineAnswered { status: u16 = 500 } = "engine_answered", BAD_GATEWAY, Missed(UpstreamError);
    /// Behind an early head, an engine responded with a content coding that the head does not
    /// name.
    #[error("an engine answered in a content coding behind a head of ours")]
    EngineCoded = "engine_coded", BAD_GATEWAY, Missed(Unparseable);
    /// An engine rejected the pool's key, or requires one and the pool has none.
    #[error("an engine of pool {pool} answered {status}: it refuses the pool's own key")]
    EngineKeyRefused { pool: PoolId = PoolId::from("chat"), status: u16 = 401 } = "engine_key_refused", BAD_GATEWAY, Missed(UpstreamError);
    /// Tenants are configured and the request carries no key.
    #[error("no API key")]
    MissingKey = "missing_key", UNAUTHORIZED, Excluded(Unauthorized);
    /// The key belongs to no tenant.
    #[error("an unknown API key")]
    UnknownKey = "unknown_key", UNAUTHORIZED, Excluded(Unauthorized);
    /// `authorization` and `x-api-key` have different keys, or one of them is repeated.
    #[error("two different API keys")]
    TwoKeys = "two_keys", UNAUTHORIZED, Excluded(Unauthorized);
    /// The tenant may use none of the applicable classes.
    #[error("class {class} is not open to this tenant")]
    ClassNotAllowed { class: ClassId = ClassId::from("chat") } = "class_not_allowed", FORBIDDEN, Excluded(Unauthorized);
    /// The body exceeds the limit, as announced or as read.
    #[error("the body is longer than {limit} bytes")]
    BodyTooLarge { limit: u64 = 67_108_864 } = "body_too_large", PAYLOAD_TOO_LARGE, Excluded(InvalidRequest);
    /// The decoded body exceeds the limit.
    #[error("the body decodes to more than {limit} bytes")]
    DecodedTooLarge { limit: u64 = 67_108_864 } = "decoded_too_large", PAYLOAD_TOO_LARGE, Excluded(InvalidRequest);
    /// The body did not arrive in time.
    #[error("the body did not arrive within {limit:?}")]
    BodyTimeout { limit: Duration = Duration::from_secs(60) } = "body_timeout", REQUEST_TIMEOUT, Excluded(SlowUpload);
    /// The upload was incomplete or its framing invalid.
    #[error("the body broke off")]
    BodyBroken = "body_broken", BAD_REQUEST, Excluded(InvalidRequest);
    /// The body is invalid or ambiguous.
    #[error("unreadable body: {why}")]
    UnreadableBody { why: Unreadable = Unreadable::NotAnObject } = "unreadable_body", BAD_REQUEST, Excluded(InvalidRequest);
    /// A content coding other than gzip, zstd and identity.
    #[error("unsupported content coding")]
    UnsupportedCoding = "unsupported_coding", UNSUPPORTED_MEDIA_TYPE, Excluded(InvalidRequest);
    /// A compressed body that cannot be decoded.
    #[error("the body cannot be decoded as its content-encoding says")]
    UndecodableBody = "undecodable_body", BAD_REQUEST, Excluded(InvalidRequest);
    /// A multipart form that cannot be parsed up to its `model`.
    #[error("unreadable multipart form")]
    UnreadableForm = "unreadable_form", BAD_REQUEST, Excluded(InvalidRequest);
    /// A multipart form names a model by an alias, which cannot be edited there.
    #[error("a model alias in a multipart form")]
    AliasInForm = "alias_in_form", BAD_REQUEST, Excluded(InvalidRequest);
    /// `background: true` (Responses).
    #[error("a background response was asked for")]
    BackgroundRefused = "background_refused", BAD_REQUEST, Excluded(InvalidRequest);
    /// `kv_transfer_params` or another field of the body that steers routing.
    #[error("the body moves caches between engines, or chooses one")]
    TransferRefused = "transfer_refused", BAD_REQUEST, Excluded(InvalidRequest);
    /// The request came back under an id with which an engine has a request now.
    #[error("the request has come back to this gateway: an engine's address leads here")]
    LoopDetected = "loop_detected", LOOP_DETECTED, Excluded(InvalidRequest);
    /// The body names no readable model, and no route accepts any.
    #[error("no readable model, and no route for any model")]
    ModelMissing = "model_missing", NOT_FOUND, Excluded(InvalidRequest);
    /// No route serves the model.
    #[error("no route for this model")]
    ModelNotFound = "model_not_found", NOT_FOUND, Excluded(InvalidRequest);
    /// A limit of the tenant is exhausted.
    #[error("{} of the {} is used up: {} of {} left", limit_status.limit, limit_status.scope, limit_status.remaining, limit_status.most)]
    RateLimitExceeded { limit_status: LimitStatus = TOKENS_USED_UP, retry_after: Option<u64> = Some(5) } = "rate_limit_exceeded", TOO_MANY_REQUESTS, Excluded(RateLimited);
    /// More than a limit of the tenant can ever hold.
    #[error("{limit} of the {scope} holds {most} at most, and {need} are asked for")]
    RequestExceedsLimit { limit: LimitKind = LimitKind::Tokens, scope: LimitScope = LimitScope::Tenant, need: u64 = 5000, most: u64 = 1000 } = "request_exceeds_limit", BAD_REQUEST, Excluded(InvalidRequest);
    /// The limits store is unavailable, and the settings say `closed`.
    #[error("the limits store is unavailable")]
    LimitsStoreUnavailable = "limits_store_unavailable", SERVICE_UNAVAILABLE, Missed(Internal);
    /// The pool's queue is full, and no other request may be evicted.
    #[error("the queue of pool {pool} is full")]
    QueueFull { pool: PoolId = PoolId::from("chat"), retry_after: Option<u64> = Some(3) } = "queue_full", SERVICE_UNAVAILABLE, Missed(Shed);
    /// Evicted from a full queue by another request.
    #[error("pushed out of the full queue of pool {pool}")]
    PushedOut { pool: PoolId = PoolId::from("chat"), retry_after: Option<u64> = Some(3) } = "pushed_out", SERVICE_UNAVAILABLE, Missed(Shed);
    /// It waited in the queue for too long.
    #[error("no seat of pool {pool} came free in time")]
    QueueTimeout { pool: PoolId = PoolId::from("chat"), retry_after: Option<u64> = Some(3) } = "queue_timeout", SERVICE_UNAVAILABLE, Missed(Shed);
    /// Its deadline is infeasible, and its class sheds such requests.
    #[error("no seat of pool {pool} would come free in time to keep the promise")]
    Hopeless { pool: PoolId = PoolId::from("chat"), retry_after: Option<u64> = Some(3) } = "hopeless", SERVICE_UNAVAILABLE, Missed(Shed);
    /// An overload level of a class of higher priority reserves every pool of its route.
    #[error("kept off its pools by an overload level of class {class}")]
    OverloadShed { class: ClassId = ClassId::from("chat"), retry_after: Option<u64> = Some(3) } = "overload_shed", SERVICE_UNAVAILABLE, Missed(Shed);
    /// The memory for request bodies is exhausted.
    #[error("request bodies hold as much memory as `listen.max_bodies` lets them")]
    BodiesFull = "bodies_full", SERVICE_UNAVAILABLE, Missed(Shed);
    /// No engine of the routed pools is available.
    #[error("no engine of pool {pool} is available")]
    NoEngine { pool: PoolId = PoolId::from("chat") } = "no_engine", SERVICE_UNAVAILABLE, Missed(UpstreamUnavailable);
    /// No engine that was tried could be connected to (TCP or TLS).
    #[error("no connection to any engine of pool {pool}")]
    ConnectFailed { pool: PoolId = PoolId::from("chat") } = "connect_failed", BAD_GATEWAY, Missed(UpstreamUnavailable);
    /// The gateway has no file descriptor left for a connection to an engine.
    #[error("no file descriptor is left for a connection to pool {pool}; raise the limit of open files (`ulimit -n`, `LimitNOFILE`), or lower `listen.max_connections` and `http2_max_streams`")]
    OutOfSockets { pool: PoolId = PoolId::from("chat") } = "out_of_sockets", SERVICE_UNAVAILABLE, Missed(Internal);
    /// The engine's connection ended before a response.
    #[error("an engine of pool {pool} closed the connection before it answered")]
    EngineReset { pool: PoolId = PoolId::from("chat") } = "engine_reset", BAD_GATEWAY, Missed(UpstreamUnavailable);
    /// The engine's response is not HTTP.
    #[error("an engine of pool {pool} answered with something that is not HTTP")]
    EngineGarbage { pool: PoolId = PoolId::from("chat") } = "engine_garbage", BAD_GATEWAY, Missed(UpstreamError);
    /// No first token within the class's limit.
    #[error("no first token within {limit:?}")]
    FirstTokenTimeout { limit: Duration = Duration::from_secs(120) } = "first_token_timeout", GATEWAY_TIMEOUT, Missed(TimeoutFirstToken);
    /// No head of a non-streaming response within the class's limit.
    #[error("no response head within {limit:?}")]
    ResponseHeadTimeout { limit: Duration = Duration::from_secs(1800) } = "response_head_timeout", GATEWAY_TIMEOUT, Missed(TimeoutFirstToken);
    /// The engine sent nothing for too long within its response.
    #[error("silence for {limit:?} in the middle of an answer")]
    IdleTimeout { limit: Duration = Duration::from_secs(30) } = "idle_timeout", GATEWAY_TIMEOUT, Missed(TimeoutIdle);
    /// The response did not end within the class's total limit.
    #[error("the answer did not end within {limit:?}")]
    TotalTimeout { limit: Duration = Duration::from_secs(1800) } = "total_timeout", GATEWAY_TIMEOUT, Missed(TimeoutTotal);
    /// The engine's response ended before it was complete.
    #[error("the answer ended before it was complete")]
    StreamIncomplete = "stream_incomplete", BAD_GATEWAY, Missed(Truncated);
    /// The request arrived while the gateway drains.
    #[error("the gateway is draining")]
    Draining = "draining", SERVICE_UNAVAILABLE, Missed(Shed);
    /// The drain limit cut a running response.
    #[error("the drain limit cut a running answer")]
    DrainCut = "drain_cut", SERVICE_UNAVAILABLE, Missed(Internal);
    /// A failure of the gateway.
    #[error("internal error")]
    Internal = "internal", INTERNAL_SERVER_ERROR, Missed(Internal);
}

const TOKENS_USED_UP: LimitStatus = LimitStatus {
    limit: LimitKind::Tokens,
    scope: LimitScope::Tenant,
    most: 600,
    per_minute: Some(600),
    remaining: 0,
    reset: Some(Duration::from_secs(60)),
};

impl Rejection {
    /// The HTTP status, if no head was sent yet.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        if let Rejection::BadHead { status, .. } = self
            && let Ok(status) = StatusCode::from_u16(*status)
        {
            return status;
        }
        self.answer().0
    }

    /// Whether a time limit of the class ended it while an engine had it.
    #[must_use]
    pub const fn is_time_limit(&self) -> bool {
        matches!(
            self,
            Rejection::FirstTokenTimeout { .. }
                | Rejection::ResponseHeadTimeout { .. }
                | Rejection::IdleTimeout { .. }
                | Rejection::TotalTimeout { .. }
        )
    }

    /// The outcome, before the rules for requests that are not judged.
    #[must_use]
    pub const fn outcome(&self) -> Outcome {
        match self {
            Rejection::EngineAnswered { status } => of_code(*status, &JudgeContext::of(Dialect::Chat)),
            _ => self.answer().1,
        }
    }

    /// Seconds for `Retry-After`; `None` unless known to be true.
    #[must_use]
    pub const fn retry_after(&self) -> Option<u64> {
        match self {
            // Another replica accepts it at once.
            Rejection::Draining => Some(1),
            Rejection::RateLimitExceeded { retry_after, .. }
            | Rejection::QueueFull { retry_after, .. }
            | Rejection::PushedOut { retry_after, .. }
            | Rejection::QueueTimeout { retry_after, .. }
            | Rejection::Hopeless { retry_after, .. }
            | Rejection::OverloadShed { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// The client's text: what to do next, nothing internal.
    #[must_use]
    pub fn message(&self) -> Cow<'static, str> {
        match self {
            Rejection::UnknownPath => "Unknown path. Check the base URL; the OpenAI and Anthropic paths start with /v1.".into(),
            Rejection::MethodNotAllowed { allow } => format!("This path takes {allow}. Send the request with that method.").into(),
            Rejection::BadHead { advice, .. } => format!("Invalid request head: {advice}. Then try again.").into(),
            Rejection::EngineAnswered { status: 200..=299 } => "The engine did not return the stream that had been started. Send the request without streaming, or try again later.".into(),
            Rejection::EngineAnswered { status } => format!("The engine refused the request with status {status}. Correct the request, or try again later.").into(),
            Rejection::EngineKeyRefused { .. } => "The engine does not accept the gateway's own key. Your key is not the problem; tell your operator.".into(),
            Rejection::EngineCoded => "The engine compressed its response, which cannot be passed on here. Try again; if it persists, tell your operator.".into(),
            Rejection::MissingKey => "An API key is needed. Send it as \"Authorization: Bearer <key>\" or \"x-api-key: <key>\".".into(),
            Rejection::UnknownKey => "This API key is not known. Check it, or ask your operator for a new one.".into(),
            Rejection::TwoKeys => "The request carries two different API keys. Send one, in Authorization or in x-api-key.".into(),
            Rejection::ClassNotAllowed { class } => format!("Your key may not use the class \"{class}\" that applies to this request. Ask your operator to allow it.").into(),
            Rejection::BodyTooLarge { limit } => format!("The body is longer than {limit} bytes. Send a shorter one.").into(),
            Rejection::DecodedTooLarge { limit } => format!("The decoded body is longer than {limit} bytes. Send a shorter one.").into(),
            Rejection::BodyTimeout { limit } => format!("The body did not arrive within {} s. Send it again over a faster connection.", seconds(*limit)).into(),
            Rejection::BodyBroken => "The body is incomplete. Send the whole request again.".into(),
            Rejection::UnreadableBody { why } => format!("The request body cannot be used: {why}. Correct it and send it again.").into(),
            Rejection::UnsupportedCoding => "This content-encoding is not supported. Send the body as gzip, zstd, or without any.".into(),
            Rejection::UndecodableBody => "The body does not match its content-encoding. Send it again, or without one.".into(),
            Rejection::UnreadableForm => "The multipart form cannot be read, or does not have exactly one \"model\" field. Correct it and send it again.".into(),
            Rejection::AliasInForm => "This model name is an alias, which does not work in a multipart form. Use the model's own name.".into(),
            Rejection::BackgroundRefused => "Background responses are not supported. Send the request without \"background\": true.".into(),
            Rejection::TransferRefused => "Parameters that move caches between engines, or choose an engine, are not accepted from clients. Leave out kv_transfer_params, ec_transfer_params, disaggregated_params, bootstrap_*, *dp_rank, data_parallel_rank, and what does the same in nvext.".into(),
            Rejection::ModelMissing => "The request names no model. Set \"model\" to one listed by GET /v1/models.".into(),
            Rejection::ModelNotFound => "This model is not served here. Use one listed by GET /v1/models.".into(),
            Rejection::RateLimitExceeded { limit_status, retry_after: Some(seconds) } => {
                format!("Your limit {} is used up ({}, {} left). Try again in {seconds} s{}.", named(limit_status.limit, limit_status.scope), sized(limit_status), limit_status.remaining, or_less(limit_status.limit)).into()
            }
            Rejection::RateLimitExceeded { limit_status, retry_after: None } => {
                format!("Your limit {} of {} is reached. Try again when one of your running requests has ended.", named(limit_status.limit, limit_status.scope), limit_status.most).into()
            }
            Rejection::RequestExceedsLimit { limit, scope, need, most } => {
                format!("This request may need {need}, and your limit {} never holds more than {most}. Lower its output cap, shorten it, or ask your operator for a higher limit.", named(*limit, *scope)).into()
            }
            Rejection::LimitsStoreUnavailable => "Your limits cannot be checked at present. Try again in a moment.".into(),
            Rejection::QueueFull { retry_after, .. } => format!("All engines are busy and the queue is full. {}", again(*retry_after)).into(),
            Rejection::PushedOut { retry_after, .. } => format!("Requests of higher priority took this one's place in the queue. {}", again(*retry_after)).into(),
            Rejection::QueueTimeout { retry_after, .. } => format!("The request could not be started in time: the engines are busy. {}", again(*retry_after)).into(),
            Rejection::Hopeless { retry_after, .. } => format!("The engines are too busy to respond in time. {}", again(*retry_after)).into(),
            Rejection::OverloadShed { retry_after, .. } => format!("The engines are reserved for requests of higher priority. {}", again(*retry_after)).into(),
            Rejection::BodiesFull => "The gateway has no memory left for large requests. Try again in a moment, or send a shorter one.".into(),
            Rejection::NoEngine { .. } => "No engine for this model is available at present. Try again in a moment.".into(),
            Rejection::ConnectFailed { .. } => "The engines for this model could not be reached. Try again in a moment.".into(),
            Rejection::OutOfSockets { .. } => "The gateway has reached its limit of open connections. Try again in a moment.".into(),
            Rejection::EngineReset { .. } => "The engine closed the connection before it responded. Try again.".into(),
            Rejection::EngineGarbage { .. } => "The engine's response is invalid. Try again.".into(),
            Rejection::FirstTokenTimeout { limit } => format!("The engine produced no first token within {} s. Try again later, or with a shorter prompt.", seconds(*limit)).into(),
            Rejection::ResponseHeadTimeout { limit } => format!("The engine did not respond within {} s. Try again later, or use streaming.", seconds(*limit)).into(),
            Rejection::IdleTimeout { limit } => format!("The engine sent nothing for {} s in the middle of its response. Try again.", seconds(*limit)).into(),
            Rejection::TotalTimeout { limit } => format!("The response did not end within {} s. Ask for fewer tokens.", seconds(*limit)).into(),
            Rejection::LoopDetected => "This request came back to the gateway that forwarded it: there is a loop. Tell your operator; if you chose its x-request-id yourself, choose another one.".into(),
            Rejection::StreamIncomplete => "The response ended before it was complete. Try again.".into(),
            Rejection::Draining => "This gateway is shutting down. Send the request again; another one will take it.".into(),
            Rejection::DrainCut => "This gateway ended the response because it is shutting down. Send the request again.".into(),
            Rejection::Internal => "Internal error of the gateway. Try again; if it persists, give your operator the request id.".into(),
        }
    }

    /// The field of the body at fault.
    #[must_use]
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Rejection::UnreadableBody { why: Unreadable::Repeated { field } | Unreadable::WrongType { field, .. } } => {
                Some(field)
            }
            Rejection::ModelMissing | Rejection::ModelNotFound | Rejection::AliasInForm => Some("model"),
            Rejection::BackgroundRefused => Some("background"),
            _ => None,
        }
    }

    /// The state of the limit that refused, for the `x-ratelimit` headers.
    #[must_use]
    pub const fn limit(&self) -> Option<&LimitStatus> {
        match self {
            Rejection::RateLimitExceeded { limit_status, .. } => Some(limit_status),
            _ => None,
        }
    }

    /// The value of `Allow`.
    #[must_use]
    pub const fn allow(&self) -> Option<&'static str> {
        match self {
            Rejection::MethodNotAllowed { allow } => Some(allow),
            _ => None,
        }
    }

    /// Whether the connection closes after the response.
    #[must_use]
    pub const fn closes(&self) -> bool {
        matches!(
            self,
            Rejection::Draining
                | Rejection::BadHead { .. }
                | Rejection::BodyTooLarge { .. }
                | Rejection::DecodedTooLarge { .. }
                | Rejection::BodyTimeout { .. }
                | Rejection::BodyBroken
        )
    }

    /// The response's JSON body in the dialect's format.
    #[must_use]
    pub fn body(&self, shape: Dialect, request_id: &RequestId) -> Bytes {
        body::body(self, shape, request_id)
    }

    /// The error as an event within a started stream, blank line included. `sequence_number`: that of the last
    /// event (Responses).
    #[must_use]
    pub fn event(&self, dialect: Dialect, request_id: &RequestId, sequence_number: Option<u64>) -> Bytes {
        body::event(self, dialect, request_id, sequence_number)
    }
}

/// A limit by its name in the settings.
fn named(limit: LimitKind, scope: LimitScope) -> String {
    match scope {
        LimitScope::Tenant => limit.to_string(),
        LimitScope::Model => format!("{limit} for this model"),
    }
}

/// The size of a limit.
fn sized(LimitStatus { most, per_minute, .. }: &LimitStatus) -> String {
    match per_minute {
        Some(rate) if rate == most => format!("{rate} a minute"),
        Some(rate) => format!("{rate} a minute, {most} at once"),
        None => format!("{most} at once"),
    }
}

/// What a client can do instead of waiting.
const fn or_less(limit: LimitKind) -> &'static str {
    match limit {
        LimitKind::Tokens => ", or ask for fewer tokens",
        LimitKind::InputTokens => ", or shorten the prompt",
        LimitKind::OutputTokens => ", or lower the output cap",
        LimitKind::Requests | LimitKind::ConcurrentRequests => "",
    }
}

/// When to retry.
fn again(seconds: Option<u64>) -> String {
    seconds.map_or_else(|| "Try again later.".to_owned(), |seconds| format!("Try again in {seconds} s."))
}

/// A limit for clients: an integer where possible.
fn seconds(limit: Duration) -> String {
    let millis = limit.as_millis();
    if millis.is_multiple_of(1000) { (millis / 1000).to_string() } else { format!("{:.3}", limit.as_secs_f64()) }
}

//! The shapes in which each dialect writes an error.

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

use crate::types::{Dialect, RequestId};

use super::Rejection;

/// A whole JSON body.
pub(super) fn body(refusal: &Rejection, shape: Dialect, request_id: &RequestId) -> Bytes {
    let value = match shape {
        Dialect::Messages => messages(refusal, request_id),
        Dialect::Chat | Dialect::Completions | Dialect::Responses | Dialect::Plain => openai(refusal, request_id),
    };
    Bytes::from(value.to_string())
}

/// One event of a stream.
pub(super) fn event(refusal: &Rejection, dialect: Dialect, request_id: &RequestId, last: Option<u64>) -> Bytes {
    let (name, value) = match dialect {
        Dialect::Chat | Dialect::Completions | Dialect::Plain => ("", openai(refusal, request_id)),
        Dialect::Messages => ("event: error\n", messages(refusal, request_id)),
        Dialect::Responses => ("event: error\n", responses(refusal, request_id, last)),
    };
    Bytes::from(format!("{name}data: {value}\n\n"))
}

fn openai(refusal: &Rejection, request_id: &RequestId) -> Value {
    json!({"error": {
        "message": refusal.message(),
        "type": openai_type(refusal),
        "param": refusal.param(),
        "code": refusal.code(),
        "request_id": request_id.as_str(),
    }})
}

fn messages(refusal: &Rejection, request_id: &RequestId) -> Value {
    let error = json!({"type": messages_type(refusal), "message": refusal.message(), "code": refusal.code()});
    json!({"type": "error", "error": error, "request_id": request_id.as_str()})
}

fn responses(refusal: &Rejection, request_id: &RequestId, last: Option<u64>) -> Value {
    json!({
        "type": "error",
        "code": refusal.code(),
        "message": refusal.message(),
        "param": null,
        "sequence_number": last.map_or(0, |last| last.saturating_add(1)),
        "request_id": request_id.as_str(),
    })
}

/// OpenAI's names of error kinds. A fault of an engine is `upstream_error`, to distinguish it from a fault of
/// the gateway.
fn openai_type(refusal: &Rejection) -> &'static str {
    match refusal.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::BAD_GATEWAY => "upstream_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    }
}

/// The Messages dialect's names of error kinds.
fn messages_type(refusal: &Rejection) -> &'static str {
    match refusal.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

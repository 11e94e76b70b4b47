//! Headers that the gateway adds to a response.

use std::time::Duration;

use http::header::HeaderValue;

use super::header_names::{REQUEST_ID, SERVER_TIMING, X_GOODPUT_DEGRADED, X_GOODPUT_POOL, X_SLO_CLASS};
use crate::http1::HeaderSink;
use crate::types::RequestId;
use crate::types::decimal::push_thousandths;

/// The gateway's own response headers, as far as known.
#[derive(Debug)]
pub struct GatewayHeaders {
    /// The request id, valid as a header.
    pub id: RequestId,
    /// Whether the dialect also uses `request-id` (Messages).
    pub is_messages: bool,
    /// The request's class.
    pub class: Option<HeaderValue>,
    /// The pool whose engine answered.
    pub pool: Option<HeaderValue>,
    /// Overload actions applied to the request.
    pub degraded: Option<HeaderValue>,
    /// Time in the gateway's queue, and from there to the engine's first byte.
    pub times: Option<[Duration; 2]>,
}

impl GatewayHeaders {
    /// With the id only.
    #[must_use]
    pub fn of(id: &RequestId) -> Self {
        GatewayHeaders { id: id.clone(), is_messages: false, class: None, pool: None, degraded: None, times: None }
    }

    /// Adds them to a head.
    pub fn add_to(&self, head: &mut impl HeaderSink) {
        head.add(REQUEST_ID, |value| value.extend_from_slice(self.id.as_str().as_bytes()));
        if self.is_messages {
            head.add("request-id", |value| value.extend_from_slice(self.id.as_str().as_bytes()));
        }
        let known = [(X_SLO_CLASS, &self.class), (X_GOODPUT_POOL, &self.pool), (X_GOODPUT_DEGRADED, &self.degraded)];
        for (name, known) in known {
            if let Some(known) = known {
                head.add(name, |value| value.extend_from_slice(known.as_bytes()));
            }
        }
        if let Some([queue, upstream]) = self.times {
            head.add(SERVER_TIMING, |value| {
                value.extend_from_slice(b"queue;dur=");
                push_thousandths(value, micros(queue));
                value.extend_from_slice(b", upstream;dur=");
                push_thousandths(value, micros(upstream));
            });
        }
    }
}

/// Whether only the gateway sets this header, so that an engine's is dropped. (An engine's own
/// `server-timing` passes beside ours.)
pub(super) fn is_ours(name: &str) -> bool {
    // First letters of all of them. A name with `_` counts as one with `-`, because some readers treat them
    // alike.
    if !matches!(name.as_bytes().first(), Some(b'x' | b'r')) {
        return false;
    }
    if name.contains('_') {
        return is_ours(&name.replace('_', "-"));
    }
    let Some(rest) = name.strip_prefix("x-") else { return name == "request-id" };
    // Dispatches on the first byte, so that an ordinary header costs one or two comparisons.
    match rest.as_bytes().first() {
        Some(b'g') => rest.starts_with("goodput-"),
        Some(b'r') => name == REQUEST_ID || is_of_a_limit(rest),
        Some(b's') => rest.starts_with("slo-"),
        _ => false,
    }
}

/// Whether it is an `x-ratelimit-...` header: an engine's limits concern the gateway, and tenants get their
/// own under the same names.
fn is_of_a_limit(rest: &str) -> bool {
    let Some(rest) = rest.strip_prefix("ratelimit-") else { return false };
    let mut words = rest.splitn(2, '-');
    let is_known = |word: Option<&str>, of: &[&str]| word.is_some_and(|word| of.contains(&word));
    is_known(words.next(), &["limit", "remaining", "reset"]) && is_known(words.next(), &["tokens", "requests"])
}

fn micros(length: Duration) -> u64 {
    length.as_secs() * 1_000_000 + u64::from(length.subsec_micros())
}

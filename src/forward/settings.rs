//! Time limits of a class.

use std::time::Duration;

/// Time limits of one request, and intervals while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From `arrival` to the first token of a stream, over all attempts.
    pub first_token: Duration,
    /// Longest silence of an engine after the first token (JSON bodies: after the head).
    pub idle: Duration,
    /// From `arrival` to the end of the response.
    pub total: Duration,
    /// From `arrival` to the head of a non-streaming response, over all attempts.
    pub response_head: Duration,
    /// How long after `arrival` a head and its preamble may be held.
    pub hold_head: Duration,
    /// Interval of keepalive comments once the head was sent; `None`: never.
    pub keepalive: Option<Duration>,
}

impl Default for Timeouts {
    /// `{first_token: 120s, idle: 120s, total: 30m}`, `response_head` as `total`,
    /// `hold_head: 10s`, no keepalive.
    fn default() -> Self {
        let total = Duration::from_secs(30 * 60);
        Timeouts {
            first_token: Duration::from_secs(120),
            idle: Duration::from_secs(120),
            total,
            response_head: total,
            hold_head: Duration::from_secs(10),
            keepalive: None,
        }
    }
}

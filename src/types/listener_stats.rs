//! Counters of what a listener refuses before it becomes a request: invalid heads, and connections
//! beyond the limit per peer address. The metrics page reads them; nothing else counts these events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::StatusCode;

/// Reason for refusing a request head, the same over HTTP/1.1 and HTTP/2. The connection closes with
/// the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidHead {
    /// Not HTTP grammar (RFC 9112).
    Malformed,
    /// An HTTP version that is not supported.
    Version,
    /// A `Content-Length` that is not a decimal number, or two different ones.
    Length,
    /// `Transfer-Encoding` beside `Content-Length`.
    TwoFramings,
    /// A transfer coding other than `chunked`, once.
    TransferCoding,
    /// A target that is neither an absolute path nor an `http(s)` URL.
    Target,
    /// A target or query beyond the length limit.
    TargetTooLong,
    /// Larger than `max_head`.
    TooLarge,
    /// More header lines than `max_header_lines`.
    TooManyLines,
    /// `CONNECT` or `TRACE`.
    Method,
    /// `Host` missing, repeated, invalid, or different from the target's authority.
    Host,
    /// An expectation other than `100-continue`.
    Expectation,
}

impl InvalidHead {
    /// Every reason, in the order of the documentation.
    pub const ALL: [InvalidHead; 12] = [
        InvalidHead::Malformed,
        InvalidHead::Version,
        InvalidHead::Length,
        InvalidHead::TwoFramings,
        InvalidHead::TransferCoding,
        InvalidHead::Target,
        InvalidHead::TargetTooLong,
        InvalidHead::TooLarge,
        InvalidHead::TooManyLines,
        InvalidHead::Method,
        InvalidHead::Host,
        InvalidHead::Expectation,
    ];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            InvalidHead::Malformed => "malformed",
            InvalidHead::Version => "version",
            InvalidHead::Length => "content_length",
            InvalidHead::TwoFramings => "two_framings",
            InvalidHead::TransferCoding => "transfer_coding",
            InvalidHead::Target => "target",
            InvalidHead::TargetTooLong => "target_too_long",
            InvalidHead::TooLarge => "too_large",
            InvalidHead::TooManyLines => "too_many_lines",
            InvalidHead::Method => "method",
            InvalidHead::Host => "host",
            InvalidHead::Expectation => "expectation",
        }
    }

    /// The status of the response.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            InvalidHead::Malformed
            | InvalidHead::Version
            | InvalidHead::Length
            | InvalidHead::TwoFramings
            | InvalidHead::Target
            | InvalidHead::Host
            | InvalidHead::Expectation => StatusCode::BAD_REQUEST,
            InvalidHead::TargetTooLong => StatusCode::URI_TOO_LONG,
            InvalidHead::TooLarge | InvalidHead::TooManyLines => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            InvalidHead::Method | InvalidHead::TransferCoding => StatusCode::NOT_IMPLEMENTED,
        }
    }

    /// Text for the client: what to do instead.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            InvalidHead::Malformed => {
                "it is not what RFC 9112 calls a request; send a request line and header fields without folded lines"
            }
            InvalidHead::Version => "speak HTTP/1.1, or HTTP/2 from the first byte",
            InvalidHead::Length => "send one Content-Length in decimal digits",
            InvalidHead::TwoFramings => "send Content-Length or Transfer-Encoding, not both",
            InvalidHead::TransferCoding => {
                "send the body with Content-Length, or with Transfer-Encoding: chunked alone"
            }
            InvalidHead::Target => {
                "send the path of an endpoint as the request target, for example /v1/chat/completions"
            }
            InvalidHead::TargetTooLong => "send a shorter target: parameters belong into the body",
            InvalidHead::TooLarge => "send shorter header fields and a shorter target",
            InvalidHead::TooManyLines => "send fewer header lines",
            InvalidHead::Method => "CONNECT and TRACE are not served; send POST or GET",
            InvalidHead::Host => "send exactly one valid Host header, the same as in the request target",
            InvalidHead::Expectation => "leave out the Expect header, or send Expect: 100-continue",
        }
    }
}

/// The counters of one listener. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ListenerStats(Arc<BadHeadCounts>);

#[derive(Debug, Default)]
struct BadHeadCounts {
    bad_heads: [AtomicU64; InvalidHead::ALL.len()],
    crowded: AtomicU64,
}

impl ListenerStats {
    /// Counts a refused head.
    pub fn refused_head(&self, why: InvalidHead) {
        self.0.bad_heads[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection closed because its peer address has reached the limit.
    pub fn refused_connection(&self) {
        self.0.crowded.fetch_add(1, Ordering::Relaxed);
    }

    /// Heads refused so far, by label value.
    #[must_use]
    pub fn bad_heads(&self) -> [(&'static str, u64); InvalidHead::ALL.len()] {
        InvalidHead::ALL.map(|why| (why.as_str(), self.0.bad_heads[why as usize].load(Ordering::Relaxed)))
    }

    /// Connections closed so far because of the limit per peer address.
    #[must_use]
    pub fn refused_connections(&self) -> u64 {
        self.0.crowded.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_counted_at_its_own_place() {
        let listener_stats = ListenerStats::default();
        for (times, why) in InvalidHead::ALL.into_iter().enumerate() {
            (0..times).for_each(|_| listener_stats.refused_head(why));
        }
        let expected = InvalidHead::ALL.map(InvalidHead::as_str).into_iter().zip(0..).collect::<Vec<_>>();
        assert_eq!(listener_stats.bad_heads().to_vec(), expected);
    }
}

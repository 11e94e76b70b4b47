//! What ends at a listener before it becomes a request: heads that are refused, connections that
//! one address has too many of. Counted here for the metrics page, and nowhere else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::StatusCode;

/// Why a request head is refused, over HTTP/1.1 and HTTP/2 alike. The connection closes with the
/// response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidHead {
    /// It breaks the grammar.
    Malformed,
    /// A version of HTTP that is not spoken here.
    Version,
    /// A `Content-Length` that is no number, or two that differ.
    Length,
    /// `Transfer-Encoding` beside `Content-Length`.
    TwoFramings,
    /// A transfer coding other than `chunked`, once.
    TransferCoding,
    /// A target that is neither a path nor an `http(s)` URL.
    Target,
    /// A target or a query longer than any is.
    TargetTooLong,
    /// Larger than `max_head`.
    TooLarge,
    /// More header lines than `max_header_lines`.
    TooManyLines,
    /// `CONNECT` or `TRACE`.
    Method,
    /// No host, more than one, one that is none, or one that differs from the target's.
    Host,
    /// An expectation other than `100-continue`.
    Expectation,
}

impl InvalidHead {
    /// All of them, in the order of the documentation.
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

    /// What the client is told: what to do instead.
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

/// The counts of one listener. Cheap to clone: all clones are one.
#[derive(Clone, Debug, Default)]
pub struct Doorstep(Arc<BadHeadCounts>);

#[derive(Debug, Default)]
struct BadHeadCounts {
    bad_heads: [AtomicU64; InvalidHead::ALL.len()],
    crowded: AtomicU64,
}

impl Doorstep {
    /// A head was refused.
    pub fn refused_head(&self, why: InvalidHead) {
        self.0.bad_heads[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// A connection was closed at once: its address has as many as it may.
    pub fn refused_connection(&self) {
        self.0.crowded.fetch_add(1, Ordering::Relaxed);
    }

    /// Heads refused so far, by the label value of the reason.
    #[must_use]
    pub fn bad_heads(&self) -> [(&'static str, u64); InvalidHead::ALL.len()] {
        InvalidHead::ALL.map(|why| (why.as_str(), self.0.bad_heads[why as usize].load(Ordering::Relaxed)))
    }

    /// Connections closed at once so far.
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
        let doorstep = Doorstep::default();
        for (times, why) in InvalidHead::ALL.into_iter().enumerate() {
            (0..times).for_each(|_| doorstep.refused_head(why));
        }
        let expected = InvalidHead::ALL.map(InvalidHead::as_str).into_iter().zip(0..).collect::<Vec<_>>();
        assert_eq!(doorstep.bad_heads().to_vec(), expected);
    }
}

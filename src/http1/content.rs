//! Properties of a body's content by its header fields.

use http::header::{CONNECTION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};

use super::framing::elements;

/// Properties of a response body given by its headers.
#[derive(Clone, Copy, Debug)]
pub struct Content {
    /// The first `Content-Type`.
    pub media: Media,
    /// Whether it has a content coding other than identity.
    pub is_coded: bool,
    /// Whether there is a `Connection`, which may name further headers.
    pub(crate) has_connection: bool,
}

/// Media type: case-insensitive, parameters ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Media {
    /// `text/event-stream`.
    Events,
    /// `application/json`, or a `+json` suffix.
    Json,
    /// Anything else, or absent.
    Other,
}

impl Content {
    /// Reads these headers in one pass.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Self {
        let (mut kind, mut is_coded, mut has_connection) = (None, false, false);
        for (name, value) in headers {
            if *name == CONTENT_TYPE {
                kind.get_or_insert(value);
            } else if *name == CONTENT_ENCODING {
                is_coded |= elements(value.as_bytes())
                    .any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"));
            } else if *name == CONNECTION {
                has_connection = true;
            }
        }
        Content { media: kind.map_or(Media::Other, Media::of), is_coded, has_connection }
    }
}

impl Media {
    fn of(kind: &HeaderValue) -> Self {
        let kind = kind.as_bytes();
        let essence = kind.split(|byte| *byte == b';').next().unwrap_or(kind).trim_ascii();
        let suffix = &essence[essence.len().saturating_sub(b"+json".len())..];
        if essence.eq_ignore_ascii_case(b"text/event-stream") {
            Media::Events
        } else if essence.eq_ignore_ascii_case(b"application/json") || suffix.eq_ignore_ascii_case(b"+json") {
            Media::Json
        } else {
            Media::Other
        }
    }
}

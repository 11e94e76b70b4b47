//! Parses the head of an engine's response and its body framing. Anything that two parsers could read
//! differently is rejected.

use std::mem::MaybeUninit;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Response, StatusCode, Version, response};
use hyper::ext::ReasonPhrase;

use super::{BUFFER, ResponseError};
use crate::forward::headers::Content;
use crate::http1::{self, CacheableHead, Framing, HeadCache};

/// Most bytes of interim responses before a response.
const MOST_INTERIM: usize = 64 * 1024;

/// Most lines of a head.
const MOST_LINES: usize = 100;

/// The head of a final response.
#[derive(Clone, Debug)]
pub(super) struct ResponseHead {
    pub parts: Arc<response::Parts>,
    /// Properties of the body by the header fields. Every head derived from this one has the same decisive
    /// values ([`http1::HeadCache`]).
    pub content: Content,
    pub framing: Framing,
    /// Whether the connection may be reused.
    pub keep_alive: bool,
}

impl CacheableHead for ResponseHead {
    fn fields_mut(&mut self, _: bool) -> &mut HeaderMap {
        &mut Arc::make_mut(&mut self.parts).headers
    }
}

/// Takes the head of a response to a `POST` out of the buffer once it is complete. `interim` counts the
/// bytes of interim responses before it; `known` caches the previous
/// head.
pub(super) fn take(
    buffer: &mut BytesMut,
    interim: &mut usize,
    known: &mut HeadCache<ResponseHead>,
) -> Result<Option<ResponseHead>, ResponseError> {
    loop {
        if let Some((known, fit)) = known.find(buffer, BUFFER) {
            buffer.advance(fit.length);
            let mut head = known.clone();
            if let (Framing::Length(length), Some(stated)) = (&mut head.framing, fit.stated) {
                *length = stated;
            }
            return Ok(Some(head));
        }
        let Some(Parsed { mut parts, said, text, lines }) = parse(buffer)? else { return Ok(None) };
        buffer.advance(text.len());
        match parts.status.as_u16() {
            // No upgrade was requested.
            101 => return Err(ResponseError::Garbage),
            100..=199 => {
                *interim += text.len();
                if *interim > MOST_INTERIM {
                    return Err(ResponseError::HeadTooLarge);
                }
            }
            _ => {
                let framing = said.framing(&parts)?;
                let keep_alive = said.keep_alive(parts.version) && framing != Framing::ToEnd;
                // The version towards the client is negotiated separately.
                parts.version = Version::HTTP_11;
                let content = Content::of(&parts.headers);
                let head = ResponseHead { parts: Arc::new(parts), content, framing, keep_alive };
                if !is_bodiless(head.parts.status) {
                    known.learn(&head, &head.parts.headers, &text, lines);
                }
                return Ok(Some(head));
            }
        }
    }
}

/// Whether responses with this status have no body, whatever length they state.
fn is_bodiless(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

/// A parsed head.
struct Parsed {
    parts: response::Parts,
    said: ResponseFields,
    text: Bytes,
    lines: usize,
}

fn parse(buffer: &[u8]) -> Result<Option<Parsed>, ResponseError> {
    let mut lines = [const { MaybeUninit::uninit() }; MOST_LINES];
    let mut answer = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let length = match parser.parse_response_with_uninit_headers(&mut answer, buffer, &mut lines) {
        Ok(httparse::Status::Complete(length)) if length <= BUFFER => length,
        Ok(httparse::Status::Partial) if buffer.len() < BUFFER => return Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => return Err(ResponseError::HeadTooLarge),
        Err(_) => return Err(ResponseError::Garbage),
    };
    // Copies the head alone, because its headers would otherwise keep the whole buffer alive.
    let text = Bytes::copy_from_slice(&buffer[..length]);
    let mut parts = Response::new(()).into_parts().0;
    // `http` accepts codes up to 999, which have no meaning (RFC 9110 section 15).
    let code = answer.code.filter(|code| (100..=599).contains(code));
    parts.status = code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(ResponseError::Garbage)?;
    parts.version = if answer.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let reason = answer.reason.filter(|reason| parts.status.canonical_reason() != Some(reason));
    if let Some(reason) = reason.and_then(|reason| ReasonPhrase::try_from(reason.as_bytes()).ok()) {
        parts.extensions.insert(reason);
    }
    parts.headers = HeaderMap::with_capacity(answer.headers.len() + FIELDS_OF_OURS);
    let mut said = ResponseFields::default();
    for line in answer.headers.iter() {
        let at = line.value.as_ptr() as usize - buffer.as_ptr() as usize;
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| ResponseError::Garbage)?;
        let value = HeaderValue::from_maybe_shared(text.slice(at..at + line.value.len()));
        let value = value.map_err(|_| ResponseError::Garbage)?;
        said.hear(&name, value.as_bytes())?;
        parts.headers.append(name, value);
    }
    let lines = answer.headers.len();
    Ok(Some(Parsed { parts, said, text, lines }))
}

/// Headers that the gateway adds to an event stream.
const FIELDS_OF_OURS: usize = 2;

/// Header fields about body and connection.
#[derive(Default)]
struct ResponseFields {
    /// Number of transfer codings, and whether the only one is `chunked`.
    codings: u8,
    is_chunked: bool,
    length: Option<u64>,
    closes: bool,
    keeps_alive: bool,
}

impl ResponseFields {
    fn hear(&mut self, name: &HeaderName, value: &[u8]) -> Result<(), ResponseError> {
        if *name == TRANSFER_ENCODING {
            self.codings = self.codings.saturating_add(1);
            self.is_chunked = value.trim_ascii().eq_ignore_ascii_case(b"chunked");
        } else if *name == CONTENT_LENGTH {
            // Repeated equal values are allowed.
            for text in http1::elements(value) {
                let stated = http1::stated_length(text).ok_or(ResponseError::Garbage)?;
                if *self.length.get_or_insert(stated) != stated {
                    return Err(ResponseError::Garbage);
                }
            }
        } else if *name == CONNECTION {
            self.closes |= http1::lists_token(value, "close");
            self.keeps_alive |= http1::lists_token(value, "keep-alive");
        }
        Ok(())
    }

    fn framing(&self, head: &response::Parts) -> Result<Framing, ResponseError> {
        match self.codings {
            _ if is_bodiless(head.status) => Ok(Framing::EMPTY),
            0 => Ok(self.length.map_or(Framing::ToEnd, Framing::Length)),
            1 if self.is_chunked && head.version == Version::HTTP_11 => Ok(Framing::CHUNKED),
            _ => Err(ResponseError::Garbage),
        }
    }

    /// Whether the connection stays open after this response. Not if it states a length that does not apply,
    /// because the engine may mean something else (RFC 9112 section 6.3).
    fn keep_alive(&self, version: Version) -> bool {
        let is_clear = self.codings == 0 || self.length.is_none();
        is_clear && !self.closes && (version == Version::HTTP_11 || self.keeps_alive)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::http1::mutations::changes;

    const LINES: [&str; 9] = [
        "date: Mon, 30 Nov 2026 00:00:00 GMT",
        "content-length: 12",
        "server: uvicorn",
        "content-length: 12",
        "connection: keep-alive",
        "transfer-encoding: chunked",
        "set-cookie: a",
        "x-empty:",
        "set-cookie: b",
    ];

    const STATUSES: [&str; 5] =
        ["1.1 200 OK", "1.0 200 OK", "1.1 204 No Content", "1.1 200 Fine", "1.1 103 Early Hints"];

    /// Heads with some of the lines, in order.
    fn heads() -> impl Strategy<Value = String> {
        let status = prop::sample::select(&STATUSES[..]);
        (status, prop::sample::subsequence(&LINES[..], 0..LINES.len())).prop_map(|(status, lines)| {
            lines.iter().fold(format!("HTTP/{status}\r\n"), |head, line| head + line + "\r\n") + "\r\n"
        })
    }

    fn taken(bytes: &[u8], known: &mut HeadCache<ResponseHead>) -> (String, usize, usize) {
        let (mut buffer, mut interim) = (BytesMut::from(bytes), 0);
        let taken = take(&mut buffer, &mut interim, known);
        (format!("{taken:?}"), buffer.len(), interim)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn a_head_is_read_alike_whatever_was_read_before_it(head in heads(), changes in changes()) {
            let mut known = HeadCache::default();
            for _ in 0..3 {
                taken(head.as_bytes(), &mut known);
            }
            for next in changes.of(&head) {
                prop_assert_eq!(taken(&next, &mut known), taken(&next, &mut HeadCache::default()), "{}", next.escape_ascii());
            }
        }
    }

    #[test]
    fn heads_that_repeat_are_known_behind_interim_ones_too() {
        let mut known = HeadCache::default();
        for (length, is_known) in [("5", false), ("5", false), ("5", true), ("17", true)] {
            let head = format!("HTTP/1.1 200 OK\r\ndate: {length}\r\ncontent-length: {length}\r\n\r\n");
            assert_eq!(known.find(head.as_bytes(), BUFFER).is_some(), is_known);
            let bytes = format!("HTTP/1.1 103 Early Hints\r\n\r\n{head}");
            let (mut buffer, mut interim) = (BytesMut::from(bytes.as_bytes()), 0);
            let taken = take(&mut buffer, &mut interim, &mut known).unwrap().unwrap();
            assert_eq!((taken.framing, interim), (Framing::Length(length.parse().unwrap()), 28));
            assert_eq!((&taken.parts.headers["date"], buffer.len()), (&HeaderValue::from_static(length), 0));
        }
    }
}

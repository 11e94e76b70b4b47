//! Parses the head of an engine's response and its body framing. Anything that two parsers could read
//! differently is rejected.

use std::mem::MaybeUninit;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Response, StatusCode, Version, response};
use hyper::ext::ReasonPhrase;

use super::content::Content;
use super::framing::Framing;
use super::framing_headers::{FramingHeaders, InvalidLength, LengthSyntax, is_bodiless};
use super::head_cache::{CacheableHead, HeadCache};

/// Largest response head, bytes.
const LARGEST: usize = 64 * 1024;

/// Most bytes of interim responses before a response.
const MOST_INTERIM: usize = 64 * 1024;

/// Most lines of a head.
const MOST_LINES: usize = 100;

/// A response head that is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseHeadError {
    /// Not HTTP, or not framed in a way that can be trusted.
    Garbage,
    /// Larger than 64 KiB, or more than 100 lines.
    TooLarge,
}

/// The head of a final response.
#[derive(Clone, Debug)]
pub struct ResponseHead {
    /// The head.
    pub parts: Arc<response::Parts>,
    /// Properties of the body by the header fields. Every head derived from this one has the same decisive
    /// values ([`HeadCache`]).
    pub content: Content,
    /// The body's framing.
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
/// bytes of interim responses before it; `known` caches the previous head.
///
/// # Errors
/// Why the head is rejected.
pub fn take_response_head(
    buffer: &mut BytesMut,
    interim: &mut usize,
    known: &mut HeadCache<ResponseHead>,
) -> Result<Option<ResponseHead>, ResponseHeadError> {
    loop {
        if let Some((known, fit)) = known.find(buffer, LARGEST) {
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
            101 => return Err(ResponseHeadError::Garbage),
            100..=199 => {
                *interim += text.len();
                if *interim > MOST_INTERIM {
                    return Err(ResponseHeadError::TooLarge);
                }
            }
            _ => {
                let framing = said.response_framing(parts.status, parts.version);
                let framing = framing.ok_or(ResponseHeadError::Garbage)?;
                let keep_alive = said.keeps_connection(parts.version) && framing != Framing::ToEnd;
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

/// A parsed head.
struct Parsed {
    parts: response::Parts,
    said: FramingHeaders,
    text: Bytes,
    lines: usize,
}

fn parse(buffer: &[u8]) -> Result<Option<Parsed>, ResponseHeadError> {
    let mut lines = [const { MaybeUninit::uninit() }; MOST_LINES];
    let mut answer = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let length = match parser.parse_response_with_uninit_headers(&mut answer, buffer, &mut lines) {
        Ok(httparse::Status::Complete(length)) if length <= LARGEST => length,
        Ok(httparse::Status::Partial) if buffer.len() < LARGEST => return Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => return Err(ResponseHeadError::TooLarge),
        Err(_) => return Err(ResponseHeadError::Garbage),
    };
    // Copies the head alone, because its headers would otherwise keep the whole buffer alive.
    let text = Bytes::copy_from_slice(&buffer[..length]);
    let mut parts = Response::new(()).into_parts().0;
    // `http` accepts codes up to 999, which have no meaning (RFC 9110 section 15).
    let code = answer.code.filter(|code| (100..=599).contains(code));
    parts.status = code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(ResponseHeadError::Garbage)?;
    parts.version = if answer.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let reason = answer.reason.filter(|reason| parts.status.canonical_reason() != Some(reason));
    if let Some(reason) = reason.and_then(|reason| ReasonPhrase::try_from(reason.as_bytes()).ok()) {
        parts.extensions.insert(reason);
    }
    parts.headers = HeaderMap::with_capacity(answer.headers.len() + FIELDS_OF_OURS);
    let mut said = FramingHeaders::default();
    for line in answer.headers.iter() {
        let at = line.value.as_ptr() as usize - buffer.as_ptr() as usize;
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| ResponseHeadError::Garbage)?;
        let value = HeaderValue::from_maybe_shared(text.slice(at..at + line.value.len()));
        let value = value.map_err(|_| ResponseHeadError::Garbage)?;
        let is_kept = said.read(&name, value.as_bytes(), LengthSyntax::List);
        if is_kept.map_err(|InvalidLength| ResponseHeadError::Garbage)? {
            parts.headers.append(name, value);
        }
    }
    let lines = answer.headers.len();
    Ok(Some(Parsed { parts, said, text, lines }))
}

/// Headers that the gateway adds to an event stream.
const FIELDS_OF_OURS: usize = 2;

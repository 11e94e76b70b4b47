//! Parses a request head and its body framing.

use std::mem::MaybeUninit;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Uri, Version};
use memchr::{memchr, memmem};

use super::framing::Framing;
use super::framing_headers::{FramingHeaders, InvalidLength, LengthSyntax};
use super::head_cache::{CacheableHead, HeadCache};
use super::parsed_head::ParsedHead;
use crate::types::InvalidHead;

/// Header lines parsed without a heap-allocated table.
const USUAL_LINES: usize = 100;

/// Longest target that `http` can represent.
const LONGEST_TARGET: usize = u16::MAX as usize - 1;

/// Longest API path, method included.
const LONGEST_PATH: usize = 256;

/// Limits of a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Bytes.
    pub head: usize,
    /// Header lines.
    pub lines: usize,
}

/// A parsed request head.
#[derive(Clone, Debug)]
pub struct RequestHead {
    /// The head.
    pub head: Arc<ParsedHead>,
    /// The body's framing.
    pub framing: Framing,
    /// Whether the connection may be reused.
    pub keeps: bool,
    /// Whether the client waits for `100 Continue` before it sends the body.
    pub awaits_continue: bool,
}

impl CacheableHead for RequestHead {
    fn fields_mut(&mut self, only_length: bool) -> &mut HeaderMap {
        Arc::make_mut(&mut self.head).fields_mut(only_length)
    }
}

/// Takes a request head out of the buffer once it is complete. `looked_at` is the number of bytes already
/// known not to contain its end; `known` caches the previous head. After a rejected head the connection
/// closes, because the start of the next request is unknown.
///
/// # Errors
/// Why the head is rejected.
pub fn take_request_head(
    buffer: &mut BytesMut,
    looked_at: &mut usize,
    known: &mut HeadCache<RequestHead>,
    limits: HeadLimits,
) -> Result<Option<RequestHead>, InvalidHead> {
    if !may_be_whole(buffer, *looked_at) {
        return partial(buffer, looked_at, limits);
    }
    if let Some((known, fit)) = known.find(buffer, limits.head) {
        *looked_at = 0;
        buffer.advance(fit.length);
        let mut asked = known.clone();
        if let Some(stated) = fit.stated {
            asked.framing = Framing::Length(stated);
        }
        return Ok(Some(asked));
    }
    let read = match limits.lines {
        USUAL_LINES => read(buffer, known, &mut [const { MaybeUninit::uninit() }; USUAL_LINES]),
        lines => read(buffer, known, &mut vec![const { MaybeUninit::uninit() }; lines]),
    };
    match read? {
        Some((length, _)) if length > limits.head => Err(InvalidHead::TooLarge),
        Some((length, asked)) => {
            *looked_at = 0;
            buffer.advance(length);
            Ok(Some(asked))
        }
        None => partial(buffer, looked_at, limits),
    }
}

/// More bytes are needed.
fn partial(buffer: &[u8], looked_at: &mut usize, limits: HeadLimits) -> Result<Option<RequestHead>, InvalidHead> {
    *looked_at = buffer.len();
    if buffer.len() < limits.head { Ok(None) } else { Err(InvalidHead::TooLarge) }
}

/// The path of an unparsable head, as far as recognisable, for the format of the rejection.
pub fn path_of_unread(buffer: &[u8]) -> &str {
    let line = buffer[..buffer.len().min(LONGEST_PATH)].split(|byte| *byte == b'\n').next().unwrap_or_default();
    let path = line.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    std::str::from_utf8(path).unwrap_or_default()
}

/// Whether the end of a head may be in the new bytes. Without this check a head that arrives byte by byte
/// would be parsed once per byte.
fn may_be_whole(buffer: &[u8], looked_at: usize) -> bool {
    let new = &buffer[looked_at.saturating_sub(2).min(buffer.len())..];
    match looked_at {
        0 => !buffer.is_empty(),
        _ => memmem::find(new, b"\n\r\n").is_some() || memmem::find(new, b"\n\n").is_some(),
    }
}

/// Parses a head at the start of `bytes` and returns its length.
fn read<'a>(
    bytes: &'a [u8],
    known: &mut HeadCache<RequestHead>,
    lines: &mut [MaybeUninit<httparse::Header<'a>>],
) -> Result<Option<(usize, RequestHead)>, InvalidHead> {
    let mut head = httparse::Request::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let length = match parser.parse_request_with_uninit_headers(&mut head, bytes, lines) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(InvalidHead::TooManyLines),
        Err(httparse::Error::Version) => return Err(InvalidHead::Version),
        Err(_) => return Err(InvalidHead::Malformed),
    };
    // Copies the head alone, because its headers would otherwise keep the body's buffer alive.
    let text = Bytes::copy_from_slice(&bytes[..length]);
    let part = |part: &[u8]| {
        let at = part.as_ptr() as usize - bytes.as_ptr() as usize;
        text.slice(at..at + part.len())
    };
    let mut parts = Request::new(()).into_parts().0;
    parts.method =
        Method::from_bytes(head.method.unwrap_or_default().as_bytes()).map_err(|_| InvalidHead::Malformed)?;
    let target = head.path.unwrap_or_default().as_bytes();
    if target.len() > LONGEST_TARGET {
        return Err(InvalidHead::TargetTooLong);
    }
    // `http` would take a fragment away, which no target has (RFC 9112 section 3.2).
    if memchr(b'#', target).is_some() {
        return Err(InvalidHead::Target);
    }
    parts.uri = Uri::from_maybe_shared(part(target)).map_err(|_| InvalidHead::Malformed)?;
    parts.version = if head.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    parts.headers = HeaderMap::with_capacity(head.headers.len());
    let mut said = FramingHeaders::default();
    for line in head.headers.iter() {
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| InvalidHead::Malformed)?;
        if said.read(&name, line.value, LengthSyntax::Number).map_err(|InvalidLength| InvalidHead::Length)? {
            let value = HeaderValue::from_maybe_shared(part(line.value)).map_err(|_| InvalidHead::Malformed)?;
            parts.headers.append(name, value);
        }
    }
    let framing = said.request_framing(parts.version)?;
    let keeps = said.keeps_connection(parts.version);
    let awaits_continue = said.awaits_continue(parts.version, &framing);
    let asked = RequestHead { head: Arc::new(ParsedHead::framed(parts, &said)), framing, keeps, awaits_continue };
    known.learn(&asked, &asked.head.headers, &text, head.headers.len());
    Ok(Some((length, asked)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: HeadLimits = HeadLimits { head: 400, lines: USUAL_LINES };

    #[test]
    fn what_was_made_of_a_head_stays_while_only_its_length_is_another() {
        let mut known = HeadCache::default();
        let mut next = |id: &str, length: u8| {
            let head = format!("POST /a HTTP/1.1\r\nhost: g\r\nx-id: {id}\r\ncontent-length: {length}\r\n\r\n");
            let head = take_request_head(&mut BytesMut::from(head.as_bytes()), &mut 0, &mut known, LIMITS)
                .unwrap()
                .unwrap()
                .head;
            let memo = head.memo::<u8>().copied();
            head.keep_memo(&Arc::new(length));
            (memo, head)
        };
        // Nobody keeps the first head; the second one is known from then on.
        assert_eq!([1, 2, 3, 40].map(|length| next("a", length).0), [None, None, Some(2), Some(2)]);
        assert_eq!([5, 6].map(|length| next("b", length).0), [None, None], "another value in each");
        assert_eq!([7, 8].map(|length| next("a", length).0), [None, Some(7)], "its own again");
        // A head that is still in use keeps its cached value.
        let (memo, served) = next("a", 9);
        assert_eq!((memo, next("b", 9).0, served.memo::<u8>()), (Some(7), None, Some(&7)));
        assert_eq!(served.memo::<u16>(), None);
    }

    #[test]
    fn a_head_still_being_served_keeps_its_values_and_limits_hold_for_known_heads() {
        let mut known = HeadCache::default();
        let head = |id: &str| format!("POST /a HTTP/1.1\r\nhost: g\r\nx-id: {id}\r\n\r\n");
        let mut next =
            |id: &str| take_request_head(&mut head(id).as_bytes().into(), &mut 0, &mut known, LIMITS).unwrap().unwrap();
        let served = ["a", "a", "b", "c"].map(&mut next);
        assert_eq!(served.map(|request| request.head.headers["x-id"].clone()), ["a", "a", "b", "c"]);
        let long = head(&"x".repeat(LIMITS.head));
        assert!(known.find(long.as_bytes(), usize::MAX).is_some());
        let taken = take_request_head(&mut long.as_bytes().into(), &mut 0, &mut known, LIMITS);
        assert_eq!(taken.err(), Some(InvalidHead::TooLarge));
    }
}

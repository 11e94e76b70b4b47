//! Parses a request head and its body framing.

use std::mem::MaybeUninit;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Method, Request, Uri, Version};
use memchr::{memchr, memmem};

use crate::accept::ParsedHead;
use crate::http1::{self, CacheableHead, Framing, HeadCache};
use crate::types::InvalidHead;

/// Header lines parsed without a heap-allocated table.
const USUAL_LINES: usize = 100;

/// Longest target that `http` can represent.
const LONGEST_TARGET: usize = u16::MAX as usize - 1;

/// Longest API path, method included.
const LONGEST_PATH: usize = 256;

/// Limits of a head.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadLimits {
    /// Bytes.
    pub head: usize,
    pub lines: usize,
}

/// A parsed request head.
#[derive(Clone, Debug)]
pub(super) struct RequestHead {
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
/// closes, because the start of the next request is
/// unknown.
pub(super) fn take(
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
pub(super) fn path_of_unread(buffer: &[u8]) -> &str {
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
        if said.hear(&name, line.value)? {
            let value = HeaderValue::from_maybe_shared(part(line.value)).map_err(|_| InvalidHead::Malformed)?;
            parts.headers.append(name, value);
        }
    }
    let framing = said.framing(parts.version)?;
    let keeps = said.keeps(parts.version);
    let awaits_continue = said.expects && parts.version == Version::HTTP_11 && !framing.is_over();
    let asked = RequestHead { head: Arc::new(ParsedHead::new(parts)), framing, keeps, awaits_continue };
    known.learn(&asked, &asked.head.headers, &text, head.headers.len());
    Ok(Some((length, asked)))
}

/// Header fields about body and connection.
#[derive(Default)]
struct FramingHeaders {
    /// Number of transfer codings, and whether the last is `chunked` alone.
    codings: u8,
    is_chunked: bool,
    length: Option<u64>,
    closes: bool,
    keeps_alive: bool,
    expects: bool,
}

impl FramingHeaders {
    /// Whether the line is kept; a repeated equal length is not.
    fn hear(&mut self, name: &HeaderName, value: &[u8]) -> Result<bool, InvalidHead> {
        if *name == TRANSFER_ENCODING {
            self.codings = self.codings.saturating_add(1);
            self.is_chunked = value.eq_ignore_ascii_case(b"chunked");
        } else if *name == CONTENT_LENGTH {
            let stated = http1::stated_length(value).ok_or(InvalidHead::Length)?;
            return match self.length.replace(stated) {
                None => Ok(true),
                Some(before) if before == stated => Ok(false),
                Some(_) => Err(InvalidHead::Length),
            };
        } else if *name == CONNECTION {
            self.closes |= http1::lists_token(value, "close");
            self.keeps_alive |= http1::lists_token(value, "keep-alive");
        } else if *name == EXPECT {
            self.expects = value.eq_ignore_ascii_case(b"100-continue");
        }
        Ok(true)
    }

    /// The body's framing. With an unknown coding nothing is read: `strict` rejects the request and the
    /// connection closes. `Content-Length` beside a coding is rejected because another parser may follow it
    /// (RFC 9112 section 6.3).
    fn framing(&self, version: Version) -> Result<Framing, InvalidHead> {
        match self.codings {
            0 => Ok(Framing::Length(self.length.unwrap_or(0))),
            _ if self.length.is_some() => Err(InvalidHead::TwoFramings),
            _ if version == Version::HTTP_10 => Err(InvalidHead::Malformed),
            1 if self.is_chunked => Ok(Framing::CHUNKED),
            _ => Ok(Framing::EMPTY),
        }
    }

    /// False if the body's end is unknown.
    fn keeps(&self, version: Version) -> bool {
        let is_clear = self.codings == 0 || self.codings == 1 && self.is_chunked;
        is_clear && !self.closes && (version == Version::HTTP_11 || self.keeps_alive)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::http1::mutations::changes;

    const LIMITS: HeadLimits = HeadLimits { head: 400, lines: USUAL_LINES };

    const LINES: [&str; 10] = [
        "host: g",
        "content-length: 12",
        "x-id: a b",
        "accept: */*",
        "connection: keep-alive",
        "transfer-encoding: chunked",
        "expect: 100-continue",
        "accept: text/plain",
        "x-empty:",
        "content-length: 12",
    ];

    /// Heads with some of the lines, in order.
    fn heads() -> impl Strategy<Value = String> {
        (prop::sample::subsequence(&LINES[..], 0..LINES.len()), any::<bool>()).prop_map(|(lines, is_old)| {
            let version = if is_old { "1.0" } else { "1.1" };
            lines.iter().fold(format!("POST /a HTTP/{version}\r\n"), |head, line| head + line + "\r\n") + "\r\n"
        })
    }

    #[test]
    fn what_was_made_of_a_head_stays_while_only_its_length_is_another() {
        let mut known = HeadCache::default();
        let mut next = |id: &str, length: u8| {
            let head = format!("POST /a HTTP/1.1\r\nhost: g\r\nx-id: {id}\r\ncontent-length: {length}\r\n\r\n");
            let head = take(&mut BytesMut::from(head.as_bytes()), &mut 0, &mut known, LIMITS).unwrap().unwrap().head;
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

    fn taken(bytes: &[u8], known: &mut HeadCache<RequestHead>) -> (String, usize, usize) {
        let (mut buffer, mut looked_at) = (BytesMut::from(bytes), 0);
        let taken = take(&mut buffer, &mut looked_at, known, LIMITS);
        (format!("{taken:?}"), buffer.len(), looked_at)
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
    fn heads_that_repeat_are_known_and_their_limits_hold() {
        let mut known = HeadCache::default();
        let head = |length: &str, id: &str| {
            format!("POST /a HTTP/1.1\r\nhost: g\r\ncontent-length: {length}\r\nx-id: {id}\r\n\r\n")
        };
        for (length, id, is_known) in [("5", "a", false), ("5", "a", false), ("5", "a", true), ("17", "b", true)] {
            let head = head(length, id);
            assert_eq!(known.find(head.as_bytes(), LIMITS.head).is_some(), is_known);
            let asked = take(&mut head.as_bytes().into(), &mut 0, &mut known, LIMITS).unwrap().unwrap();
            assert_eq!(asked.framing, Framing::Length(length.parse().unwrap()));
            assert_eq!(asked.head.headers["x-id"], id);
        }
        let mut next =
            |id: &str| take(&mut head("5", id).as_bytes().into(), &mut 0, &mut known, LIMITS).unwrap().unwrap();
        let (still_read, other) = (next("c"), next("d"));
        assert_eq!([still_read, other].map(|asked| asked.head.headers["x-id"].clone()), ["c", "d"]);
        let long = head("5", &"x".repeat(LIMITS.head));
        assert!(known.find(long.as_bytes(), usize::MAX).is_some());
        assert_eq!(take(&mut long.as_bytes().into(), &mut 0, &mut known, LIMITS).err(), Some(InvalidHead::TooLarge));
    }
}

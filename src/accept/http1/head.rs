//! The head of a client's request: what it says, and how its body is framed.

use std::mem::MaybeUninit;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Method, Request, Uri, Version};
use memchr::memmem;

use crate::accept::ParsedHead;
use crate::framing::{self, CacheableHead, Framing, HeadCache};
use crate::units::InvalidHead;

/// Lines that a head may have without a table of its own on the heap.
const USUAL_LINES: usize = 100;

/// Longest target that `http` can hold.
const LONGEST_TARGET: usize = u16::MAX as usize - 1;

/// Where a path of ours ends at the latest, its method included.
const LONGEST_PATH: usize = 256;

/// The limits on a head.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadLimits {
    /// In bytes.
    pub head: usize,
    pub lines: usize,
}

/// A request whose head has come.
#[derive(Clone, Debug)]
pub(super) struct RequestHead {
    pub head: Arc<ParsedHead>,
    /// How its body ends.
    pub framing: Framing,
    /// The connection may serve another request behind it.
    pub keeps: bool,
    /// The client sends the body when it has heard `100 Continue`.
    pub awaits_continue: bool,
}

impl CacheableHead for RequestHead {
    fn fields_mut(&mut self, only_length: bool) -> &mut HeaderMap {
        Arc::make_mut(&mut self.head).fields_mut(only_length)
    }
}

/// Takes the head of a request out of what has come in, once it is whole. `looked_at` is how
/// much of it was seen to hold no end of a head before; `known` is what is known of the heads
/// before it. Behind one that is refused the connection ends: where the next request would begin is
/// not known.
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

/// More has to come.
fn partial(buffer: &[u8], looked_at: &mut usize, limits: HeadLimits) -> Result<Option<RequestHead>, InvalidHead> {
    *looked_at = buffer.len();
    if buffer.len() < limits.head { Ok(None) } else { Err(InvalidHead::TooLarge) }
}

/// The path of a head that cannot be read, as far as there is one: for the shape of the refusal.
pub(super) fn path_of_unread(buffer: &[u8]) -> &str {
    let line = buffer[..buffer.len().min(LONGEST_PATH)].split(|byte| *byte == b'\n').next().unwrap_or_default();
    let path = line.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
    std::str::from_utf8(path).unwrap_or_default()
}

/// Whether the end of a head may stand in what has come since it was looked at last. Without
/// this a head that comes byte by byte would be read once for each byte.
fn may_be_whole(buffer: &[u8], looked_at: usize) -> bool {
    let new = &buffer[looked_at.saturating_sub(2).min(buffer.len())..];
    match looked_at {
        0 => !buffer.is_empty(),
        _ => memmem::find(new, b"\n\r\n").is_some() || memmem::find(new, b"\n\n").is_some(),
    }
}

/// Reads a head at the beginning of these bytes, and says how long it is.
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
    // A copy of the head alone: fields that outlive it would hold the body, too.
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

/// What the fields of a head say about the body and the connection.
#[derive(Default)]
struct FramingHeaders {
    /// Lines that name a transfer coding, and whether the last of them is `chunked` alone.
    codings: u8,
    is_chunked: bool,
    length: Option<u64>,
    closes: bool,
    keeps_alive: bool,
    expects: bool,
}

impl FramingHeaders {
    /// Whether the line is to be kept: a length that is stated again is not.
    fn hear(&mut self, name: &HeaderName, value: &[u8]) -> Result<bool, InvalidHead> {
        if *name == TRANSFER_ENCODING {
            self.codings = self.codings.saturating_add(1);
            self.is_chunked = value.eq_ignore_ascii_case(b"chunked");
        } else if *name == CONTENT_LENGTH {
            let stated = framing::stated_length(value).ok_or(InvalidHead::Length)?;
            return match self.length.replace(stated) {
                None => Ok(true),
                Some(before) if before == stated => Ok(false),
                Some(_) => Err(InvalidHead::Length),
            };
        } else if *name == CONNECTION {
            self.closes |= framing::names(value, "close");
            self.keeps_alive |= framing::names(value, "keep-alive");
        } else if *name == EXPECT {
            self.expects = value.eq_ignore_ascii_case(b"100-continue");
        }
        Ok(true)
    }

    /// Where the body ends. Of a coding that we do not know nothing is read: `strict` refuses
    /// the request, and the connection ends. A length beside a coding is what another reader may
    /// go by (RFC 9112 section 6.3).
    fn framing(&self, version: Version) -> Result<Framing, InvalidHead> {
        match self.codings {
            0 => Ok(Framing::Length(self.length.unwrap_or(0))),
            _ if self.length.is_some() => Err(InvalidHead::TwoFramings),
            _ if version == Version::HTTP_10 => Err(InvalidHead::Malformed),
            1 if self.is_chunked => Ok(Framing::CHUNKED),
            _ => Ok(Framing::EMPTY),
        }
    }

    /// Behind a body that is not understood nothing can be.
    fn keeps(&self, version: Version) -> bool {
        let is_clear = self.codings == 0 || self.codings == 1 && self.is_chunked;
        is_clear && !self.closes && (version == Version::HTTP_11 || self.keeps_alive)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::framing::changes::changes;

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

    /// A head of some of the lines, in their order.
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
        // One that is still being served keeps what was made of it.
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

//! Writes heads, and the framing of bodies.

use http::header::{CONNECTION, CONTENT_LENGTH, DATE, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Version, response};
use hyper::ext::ReasonPhrase;

use super::framing::{lists_token, stated_length};
use super::framing_headers::is_bodiless;
use super::response_headers::ResponseHeaders;
use crate::types::decimal::push_number;

/// Tells a client to send its body.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Ends the data of a chunk.
pub const CHUNK_END: &[u8] = b"\r\n";
/// Ends a chunked body.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
/// Ends a chunk and its body.
pub const CHUNK_END_AND_LAST: &[u8] = b"\r\n0\r\n\r\n";

/// Framing of a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseFraming {
    /// No body, or none may be sent.
    None,
    /// This many bytes are to come.
    Length(u64),
    /// In chunks.
    Chunked,
    /// Ends with the connection.
    ToEnd,
}

/// How to answer the current request.
#[derive(Clone, Copy, Debug)]
pub struct ResponseMode {
    /// The request's version.
    pub version: Version,
    /// Whether it was a `HEAD`.
    pub is_head: bool,
    /// Whether the connection may be reused.
    pub keeps: bool,
}

/// Appends a header line.
#[inline]
pub fn put_line(head: &mut Vec<u8>, name: &str, value: &[u8]) {
    head.extend_from_slice(name.as_bytes());
    head.extend_from_slice(b": ");
    head.extend_from_slice(value);
    head.extend_from_slice(b"\r\n");
}

fn put_length(head: &mut Vec<u8>, length: u64) {
    head.extend_from_slice(b"content-length: ");
    push_number(head, length);
    head.extend_from_slice(b"\r\n");
}

/// Appends the head of a request to the target `prefix` + `target`, with a body of this length.
pub fn put_request_head(
    head: &mut Vec<u8>,
    method: &str,
    [prefix, target]: [&str; 2],
    put_fields: impl FnOnce(&mut Vec<u8>),
    length: u64,
) {
    head.extend_from_slice(method.as_bytes());
    head.push(b' ');
    head.extend_from_slice(prefix.as_bytes());
    head.extend_from_slice(target.as_bytes());
    head.extend_from_slice(b" HTTP/1.1\r\n");
    put_fields(head);
    put_length(head, length);
    head.extend_from_slice(b"\r\n");
}

/// Appends a response head with the headers of its body, which has this length if known. Returns the body's
/// framing, and whether the connection may be reused.
pub fn put_response_head(
    out: &mut Vec<u8>,
    head: &response::Parts,
    body: &impl ResponseHeaders,
    length: Option<u64>,
    manners: ResponseMode,
    date: &[u8],
) -> (ResponseFraming, bool) {
    let ResponseMode { version, is_head, keeps } = manners;
    let has_none = is_bodiless(head.status);
    let stated = || stated_length(head.headers.get(CONTENT_LENGTH)?.as_bytes());
    // The body of a HEAD response is empty; its length is that of the GET.
    let length = if is_head { stated().or(length) } else { length.or_else(stated) };
    let framed = match length {
        _ if has_none => ResponseFraming::None,
        Some(length) => ResponseFraming::Length(length),
        None if version == Version::HTTP_11 => ResponseFraming::Chunked,
        None => ResponseFraming::ToEnd,
    };
    let mut keeps = keeps && framed != ResponseFraming::ToEnd;
    out.extend_from_slice(if version == Version::HTTP_10 { b"HTTP/1.0 " } else { b"HTTP/1.1 " });
    out.extend_from_slice(head.status.as_str().as_bytes());
    out.push(b' ');
    match head.extensions.get::<ReasonPhrase>() {
        Some(reason) => out.extend_from_slice(reason.as_bytes()),
        None => out.extend_from_slice(head.status.canonical_reason().unwrap_or_default().as_bytes()),
    }
    out.extend_from_slice(b"\r\n");
    let (mut says_connection, mut says_date) = (false, false);
    let mut field = |name: &HeaderName, value: &HeaderValue| {
        if *name == CONTENT_LENGTH || *name == TRANSFER_ENCODING {
            return;
        }
        if *name == CONNECTION {
            says_connection = true;
            keeps &= !lists_token(value.as_bytes(), "close");
        }
        says_date |= *name == DATE;
        put_line(out, name.as_str(), value.as_bytes());
    };
    head.headers.iter().for_each(|(name, value)| field(name, value));
    body.upstream_headers(&mut field);
    body.gateway_headers(out);
    match framed {
        ResponseFraming::Length(length) => put_length(out, length),
        ResponseFraming::Chunked => put_line(out, "transfer-encoding", b"chunked"),
        ResponseFraming::None | ResponseFraming::ToEnd => {}
    }
    if !says_date {
        put_line(out, "date", date);
    }
    match version {
        _ if says_connection => {}
        Version::HTTP_10 if keeps => put_line(out, "connection", b"keep-alive"),
        _ if !keeps => put_line(out, "connection", b"close"),
        _ => {}
    }
    out.extend_from_slice(b"\r\n");
    (if is_head { ResponseFraming::None } else { framed }, keeps)
}

/// Appends the size line of a chunk.
pub fn put_chunk_size(out: &mut Vec<u8>, size: usize) {
    let digits = (usize::BITS - (size | 1).leading_zeros()).div_ceil(4);
    for place in (0..digits).rev() {
        out.push(b"0123456789abcdef"[(size >> (4 * place)) & 0xF]);
    }
    out.extend_from_slice(b"\r\n");
}

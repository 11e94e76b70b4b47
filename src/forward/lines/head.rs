//! The head of an engine's answer: what it says, and how its body is framed. What two readers
//! could read in two ways is garbage.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Response, StatusCode, Version, response};
use hyper::ext::ReasonPhrase;

use super::framing::Framing;
use super::{BUFFER, NoAnswer};

/// Lines that a head may have.
const MOST_LINES: usize = 100;

/// The head of an answer that is no interim one.
pub(super) struct Head {
    pub parts: response::Parts,
    pub framing: Framing,
    /// The connection may serve another request.
    pub stays: bool,
}

/// Takes the head of an answer to a `POST` out of what has come in, once it is whole.
pub(super) fn take(buffer: &mut BytesMut) -> Result<Option<Head>, NoAnswer> {
    loop {
        let Some(parts) = parse(buffer)? else { return Ok(None) };
        match parts.status.as_u16() {
            // We asked for no other protocol.
            101 => return Err(NoAnswer::Garbage),
            100..=199 => {}
            _ => {
                let framing = framing_of(&parts)?;
                let stays = stays(&parts) && framing != Framing::ToEnd;
                return Ok(Some(Head { parts, framing, stays }));
            }
        }
    }
}

fn parse(buffer: &mut BytesMut) -> Result<Option<response::Parts>, NoAnswer> {
    let mut lines = [const { MaybeUninit::uninit() }; MOST_LINES];
    let mut answer = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let length = match parser.parse_response_with_uninit_headers(&mut answer, buffer, &mut lines) {
        Ok(httparse::Status::Complete(length)) if length <= BUFFER => length,
        Ok(httparse::Status::Partial) if buffer.len() < BUFFER => return Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => return Err(NoAnswer::HeadTooLarge),
        Err(_) => return Err(NoAnswer::Garbage),
    };
    // A copy of the head alone: fields that outlive it would hold the whole buffer.
    let text = Bytes::copy_from_slice(&buffer[..length]);
    let mut parts = Response::new(()).into_parts().0;
    parts.status = answer.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(NoAnswer::Garbage)?;
    parts.version = if answer.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let reason = answer.reason.filter(|reason| parts.status.canonical_reason() != Some(reason));
    if let Some(reason) = reason.and_then(|reason| ReasonPhrase::try_from(reason.as_bytes()).ok()) {
        parts.extensions.insert(reason);
    }
    parts.headers = HeaderMap::with_capacity(answer.headers.len() + FIELDS_OF_OURS);
    for line in answer.headers.iter() {
        let at = line.value.as_ptr() as usize - buffer.as_ptr() as usize;
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| NoAnswer::Garbage)?;
        let value = HeaderValue::from_maybe_shared(text.slice(at..at + line.value.len()));
        parts.headers.append(name, value.map_err(|_| NoAnswer::Garbage)?);
    }
    buffer.advance(length);
    Ok(Some(parts))
}

/// What the gateway adds to the fields before they go to the client.
const FIELDS_OF_OURS: usize = 6;

fn framing_of(head: &response::Parts) -> Result<Framing, NoAnswer> {
    if matches!(head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
        return Ok(Framing::EMPTY);
    }
    let mut codings = head.headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(stated_length(&head.headers)?.map_or(Framing::ToEnd, Framing::Length)),
        (Some(coding), None)
            if coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") && head.version == Version::HTTP_11 =>
        {
            Ok(Framing::CHUNKED)
        }
        _ => Err(NoAnswer::Garbage),
    }
}

/// A length may be stated more than once, if it is the same.
fn stated_length(headers: &HeaderMap) -> Result<Option<u64>, NoAnswer> {
    let mut length = None;
    for value in headers.get_all(CONTENT_LENGTH) {
        for text in value.as_bytes().split(|byte| *byte == b',') {
            let stated = digits(text.trim_ascii()).ok_or(NoAnswer::Garbage)?;
            if *length.get_or_insert(stated) != stated {
                return Err(NoAnswer::Garbage);
            }
        }
    }
    Ok(length)
}

fn digits(text: &[u8]) -> Option<u64> {
    let all_digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(text).ok().filter(|_| all_digits)?.parse().ok()
}

/// Whether the engine keeps the connection open behind this answer.
fn stays(head: &response::Parts) -> bool {
    let says = |what: &[u8]| {
        let values = head.headers.get_all(CONNECTION).iter();
        let mut tokens = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
        tokens.any(|token| token.trim_ascii().eq_ignore_ascii_case(what))
    };
    !says(b"close") && (head.version == Version::HTTP_11 || says(b"keep-alive"))
}

//! The head of an engine's answer: what it says, and how its body is framed. What two readers
//! could read in two ways is garbage.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Response, StatusCode, Version, response};
use hyper::ext::ReasonPhrase;

use super::{BUFFER, NoAnswer};
use crate::framing::{self, Framing};

/// What interim answers may take before an answer.
const MOST_INTERIM: usize = 64 * 1024;

/// Lines that a head may have.
const MOST_LINES: usize = 100;

/// The head of an answer that is no interim one.
pub(super) struct Head {
    pub parts: response::Parts,
    pub framing: Framing,
    /// The connection may serve another request.
    pub stays: bool,
}

/// Takes the head of an answer to a `POST` out of what has come in, once it is whole. `interim`
/// counts the bytes of interim answers before it.
pub(super) fn take(buffer: &mut BytesMut, interim: &mut usize) -> Result<Option<Head>, NoAnswer> {
    loop {
        let before = buffer.len();
        let Some((mut parts, said)) = parse(buffer)? else { return Ok(None) };
        match parts.status.as_u16() {
            // We asked for no other protocol.
            101 => return Err(NoAnswer::Garbage),
            100..=199 => {
                *interim += before - buffer.len();
                if *interim > MOST_INTERIM {
                    return Err(NoAnswer::HeadTooLarge);
                }
            }
            _ => {
                let framing = said.framing(&parts)?;
                let stays = said.stays(parts.version) && framing != Framing::ToEnd;
                // The client is spoken to in a version of its own.
                parts.version = Version::HTTP_11;
                return Ok(Some(Head { parts, framing, stays }));
            }
        }
    }
}

fn parse(buffer: &mut BytesMut) -> Result<Option<(response::Parts, Said)>, NoAnswer> {
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
    let mut said = Said::default();
    for line in answer.headers.iter() {
        let at = line.value.as_ptr() as usize - buffer.as_ptr() as usize;
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|_| NoAnswer::Garbage)?;
        let value = HeaderValue::from_maybe_shared(text.slice(at..at + line.value.len()));
        let value = value.map_err(|_| NoAnswer::Garbage)?;
        said.hear(&name, value.as_bytes())?;
        parts.headers.append(name, value);
    }
    buffer.advance(length);
    Ok(Some((parts, said)))
}

/// What the gateway adds to the fields before they go to the client.
const FIELDS_OF_OURS: usize = 6;

/// What the fields of a head say about the body and the connection.
#[derive(Default)]
struct Said {
    /// Lines that name a transfer coding, and whether one of them is `chunked` alone.
    codings: u8,
    is_chunked: bool,
    length: Option<u64>,
    closes: bool,
    keeps_alive: bool,
}

impl Said {
    fn hear(&mut self, name: &HeaderName, value: &[u8]) -> Result<(), NoAnswer> {
        if *name == TRANSFER_ENCODING {
            self.codings = self.codings.saturating_add(1);
            self.is_chunked = value.trim_ascii().eq_ignore_ascii_case(b"chunked");
        } else if *name == CONTENT_LENGTH {
            // It may be stated more than once, if it is the same.
            for text in framing::elements(value) {
                let stated = framing::stated_length(text).ok_or(NoAnswer::Garbage)?;
                if *self.length.get_or_insert(stated) != stated {
                    return Err(NoAnswer::Garbage);
                }
            }
        } else if *name == CONNECTION {
            self.closes |= framing::names(value, "close");
            self.keeps_alive |= framing::names(value, "keep-alive");
        }
        Ok(())
    }

    fn framing(&self, head: &response::Parts) -> Result<Framing, NoAnswer> {
        match self.codings {
            _ if matches!(head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) => Ok(Framing::EMPTY),
            0 => Ok(self.length.map_or(Framing::ToEnd, Framing::Length)),
            1 if self.is_chunked && head.version == Version::HTTP_11 => Ok(Framing::CHUNKED),
            _ => Err(NoAnswer::Garbage),
        }
    }

    /// Whether the engine keeps the connection open behind this answer. Where it states a length
    /// that does not count, it may not mean what we read (RFC 9112 section 6.3).
    fn stays(&self, version: Version) -> bool {
        let is_clear = self.codings == 0 || self.length.is_none();
        is_clear && !self.closes && (version == Version::HTTP_11 || self.keeps_alive)
    }
}

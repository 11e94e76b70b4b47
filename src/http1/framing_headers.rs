//! What header fields say of a message's framing and of its connection, for both directions (RFC 9112,
//! sections 6.3 and 9.3).
//!
//! A message whose end two parsers could see in different places is rejected here, or ends its
//! connection.

use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, TRANSFER_ENCODING};
use http::{StatusCode, Version};

use super::framing::{Framing, elements, lists_token, stated_length};
use crate::types::InvalidHead;

/// The fields that decide, read in one pass.
#[derive(Debug, Default)]
pub(super) struct FramingHeaders {
    pub hosts: u8,
    codings: u8,
    /// Whether the last transfer coding is `chunked` alone.
    is_chunked: bool,
    length: Option<u64>,
    closes: bool,
    keeps_alive: bool,
    /// Whether the last expectation is `100-continue`, and whether there is any other.
    continues: bool,
    pub expects_otherwise: bool,
}

/// How `Content-Length` may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LengthSyntax {
    /// One number (requests).
    Number,
    /// A list of equal numbers, as servers behind a joining proxy send it (RFC 9110 section 8.6).
    List,
}

/// A `Content-Length` that is not decimal, or two different ones.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InvalidLength;

/// Whether messages with this status have no body, whatever length they state.
pub(super) fn is_bodiless(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

impl FramingHeaders {
    /// Reads the fields of a head that another parser has framed (HTTP/2), so that its length is not
    /// considered.
    pub fn of(headers: &HeaderMap) -> Self {
        let mut said = FramingHeaders::default();
        headers.iter().for_each(|(name, value)| said.note(name, value.as_bytes()));
        said
    }

    /// Reads a line. False if it is dropped because it repeats a length.
    pub fn read(&mut self, name: &HeaderName, value: &[u8], lengths: LengthSyntax) -> Result<bool, InvalidLength> {
        if *name == CONTENT_LENGTH {
            return self.read_length(value, lengths);
        }
        self.note(name, value);
        Ok(true)
    }

    fn note(&mut self, name: &HeaderName, value: &[u8]) {
        if *name == HOST {
            self.hosts = self.hosts.saturating_add(1);
        } else if *name == TRANSFER_ENCODING {
            self.codings = self.codings.saturating_add(1);
            self.is_chunked = value.eq_ignore_ascii_case(b"chunked");
        } else if *name == CONNECTION {
            self.closes |= lists_token(value, "close");
            self.keeps_alive |= lists_token(value, "keep-alive");
        } else if *name == EXPECT {
            self.continues = value.eq_ignore_ascii_case(b"100-continue");
            self.expects_otherwise |= !self.continues;
        }
    }

    fn read_length(&mut self, value: &[u8], lengths: LengthSyntax) -> Result<bool, InvalidLength> {
        let is_first = self.length.is_none();
        let mut one = |text: &[u8]| {
            let stated = stated_length(text).ok_or(InvalidLength)?;
            if *self.length.get_or_insert(stated) == stated { Ok(()) } else { Err(InvalidLength) }
        };
        match lengths {
            LengthSyntax::Number => one(value)?,
            LengthSyntax::List => elements(value).try_for_each(one)?,
        }
        Ok(is_first)
    }

    /// Whether the body is framed by `chunked` alone, if by a coding at all. Another coding would reach the
    /// engine as a body that was not inspected.
    pub fn has_plain_coding(&self) -> bool {
        self.codings == 0 || self.codings == 1 && self.is_chunked
    }

    /// Framing of a request's body. With an unknown coding nothing is read: the request rules reject it and
    /// the connection closes. `Content-Length` beside a coding is rejected because another parser may follow
    /// it.
    pub fn request_framing(&self, version: Version) -> Result<Framing, InvalidHead> {
        match self.codings {
            0 => Ok(Framing::Length(self.length.unwrap_or(0))),
            _ if self.length.is_some() => Err(InvalidHead::TwoFramings),
            _ if version == Version::HTTP_10 => Err(InvalidHead::Malformed),
            _ if self.has_plain_coding() => Ok(Framing::CHUNKED),
            _ => Ok(Framing::EMPTY),
        }
    }

    /// Framing of a response to a `POST` or `GET`; `None` if its end is uncertain because of a transfer coding.
    pub fn response_framing(&self, status: StatusCode, version: Version) -> Option<Framing> {
        match self.codings {
            _ if is_bodiless(status) => Some(Framing::EMPTY),
            0 => Some(self.length.map_or(Framing::ToEnd, Framing::Length)),
            _ if self.has_plain_coding() && version == Version::HTTP_11 => Some(Framing::CHUNKED),
            _ => None,
        }
    }

    /// Whether the connection stays open after this message. Not if it states a length that does not apply,
    /// because its sender may mean something else.
    pub fn keeps_connection(&self, version: Version) -> bool {
        let is_clear = self.codings == 0 || self.has_plain_coding() && self.length.is_none();
        is_clear && !self.closes && (version == Version::HTTP_11 || self.keeps_alive)
    }

    /// Whether the client waits for `100 Continue` before it sends its body.
    pub fn awaits_continue(&self, version: Version, framing: &Framing) -> bool {
        self.continues && version == Version::HTTP_11 && !framing.is_over()
    }
}

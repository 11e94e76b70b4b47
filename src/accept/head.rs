//! The head of a request, and what is seen of it where it is read.

use std::ops::Deref;

use http::header::{CONNECTION, CONTENT_ENCODING, HeaderMap, HeaderValue};
use http::request::Parts;

use super::id::X_REQUEST_ID;
use super::strict;
use crate::units::{Endpoint, InvalidHead, PathError};

/// A request's head. What is asked of every head is looked for once. It holds also for a head that
/// is made of this one with other values ([`framing::HeadCache`](crate::framing::HeadCache)): its target and
/// the names of its fields are the same, and so are the values that decide on anything here.
#[derive(Clone, Debug)]
pub struct ParsedHead {
    parts: Parts,
    refused: Option<InvalidHead>,
    endpoint: Result<Endpoint, PathError>,
    has_id: bool,
    has_coding: bool,
    has_connection: bool,
}

impl ParsedHead {
    /// A head that has been read.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let refused = strict::check(&parts).err();
        let has = |name| parts.headers.contains_key(name);
        let endpoint = Endpoint::find(parts.method.as_str(), parts.uri.path());
        let (has_id, has_coding, has_connection) = (has(X_REQUEST_ID), has(CONTENT_ENCODING), has(CONNECTION));
        ParsedHead { refused, endpoint, has_id, has_coding, has_connection, parts }
    }

    /// Checks it: [`InvalidHead`] says for what.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn check(&self, max_head: usize, max_header_lines: usize) -> Result<(), InvalidHead> {
        strict::check_size(&self.parts, max_head, max_header_lines)?;
        self.refused.map_or(Ok(()), Err)
    }

    /// Which endpoint serves it.
    ///
    /// # Errors
    /// None does.
    pub fn endpoint(&self) -> Result<Endpoint, PathError> {
        self.endpoint
    }

    /// The id that its client gave it.
    #[must_use]
    pub fn request_id(&self) -> Option<&HeaderValue> {
        if self.has_id { self.parts.headers.get(X_REQUEST_ID) } else { None }
    }

    /// Whether its body wears a content coding.
    #[must_use]
    pub fn has_coding(&self) -> bool {
        self.has_coding
    }

    /// Whether it may name fields of its connection.
    #[must_use]
    pub fn has_connection(&self) -> bool {
        self.has_connection
    }

    /// Its fields, to give some of them other values.
    pub(super) fn fields_mut(&mut self) -> &mut HeaderMap {
        &mut self.parts.headers
    }

    pub(super) fn into_parts(self) -> Parts {
        self.parts
    }
}

impl Deref for ParsedHead {
    type Target = Parts;
    fn deref(&self) -> &Parts {
        &self.parts
    }
}

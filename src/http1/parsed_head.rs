//! The head of a request, with derived values that are cached.

use std::any::Any;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use http::header::{CONNECTION, CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;

use super::framing_headers::FramingHeaders;
use super::request_rules;
use crate::types::{ApiPath, InvalidHead, PathError};

/// The request id header of requests and responses.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A request's head. Properties needed for every head are derived once, and remain valid for a head that
/// differs only in free values ([`HeadCache`](super::HeadCache)), because the target, the
/// header names and all values used here are then equal.
#[derive(Clone, Debug)]
pub struct ParsedHead {
    parts: Parts,
    refused: Option<InvalidHead>,
    endpoint: Result<ApiPath, PathError>,
    has_id: bool,
    has_coding: bool,
    has_connection: bool,
    /// See [`ParsedHead::memo`].
    memo: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl ParsedHead {
    /// Derives the properties of a head that another parser has framed.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let said = FramingHeaders::of(&parts.headers);
        Self::framed(parts, &said)
    }

    /// Derives the properties of a head. `said`: by its headers.
    pub(super) fn framed(parts: Parts, said: &FramingHeaders) -> Self {
        let refused = request_rules::check(&parts, said).err();
        let has = |name| parts.headers.contains_key(name);
        let endpoint = ApiPath::find(parts.method.as_str(), parts.uri.path());
        let (has_id, has_coding, has_connection) = (has(X_REQUEST_ID), has(CONTENT_ENCODING), has(CONNECTION));
        ParsedHead { refused, endpoint, has_id, has_coding, has_connection, parts, memo: OnceLock::new() }
    }

    /// Checks it against the request rules.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self, max_head: usize, max_header_lines: usize) -> Result<(), InvalidHead> {
        request_rules::check_size(&self.parts, max_head, max_header_lines)?;
        self.refused.map_or(Ok(()), Err)
    }

    /// The API path that serves it.
    ///
    /// # Errors
    /// None does.
    pub fn endpoint(&self) -> Result<ApiPath, PathError> {
        self.endpoint
    }

    /// The client's request id.
    #[must_use]
    pub fn request_id(&self) -> Option<&HeaderValue> {
        if self.has_id { self.parts.headers.get(X_REQUEST_ID) } else { None }
    }

    /// Whether its body has a content coding.
    #[must_use]
    pub fn has_coding(&self) -> bool {
        self.has_coding
    }

    /// Whether it has a `Connection` header.
    #[must_use]
    pub fn has_connection(&self) -> bool {
        self.has_connection
    }

    /// The cached value of a head with the same fields, apart from the length of the body.
    #[must_use]
    pub fn memo<T: Any>(&self) -> Option<&T> {
        self.memo.get()?.downcast_ref()
    }

    /// Caches a value derived from this head's fields, apart from the length of the body, for the next equal
    /// head.
    pub fn keep_memo<T: Any + Send + Sync>(self: &Arc<Self>, made: &Arc<T>) {
        // Only a head that its connection keeps, too, has a next one.
        if Arc::strong_count(self) > 1 {
            let _first_stays = self.memo.set(Arc::clone(made) as Arc<dyn Any + Send + Sync>);
        }
    }

    /// Its headers, to replace some of their values. `only_length`: none but the body's length.
    pub(super) fn fields_mut(&mut self, only_length: bool) -> &mut HeaderMap {
        if !only_length {
            self.memo.take();
        }
        &mut self.parts.headers
    }

    /// Its parts.
    #[must_use]
    pub fn into_parts(self) -> Parts {
        self.parts
    }
}

impl Deref for ParsedHead {
    type Target = Parts;
    fn deref(&self) -> &Parts {
        &self.parts
    }
}

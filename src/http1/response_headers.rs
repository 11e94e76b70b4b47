//! Response headers that a body adds to the head in front of it.
//!
//! A response body may carry a few headers that need no map because they are written directly to an
//! HTTP/1 connection. HTTP/2 takes its headers from a map.

use bytes::Bytes;
use http::Response;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http_body::Body;
use http_body_util::Empty;
use http_body_util::combinators::UnsyncBoxBody;

/// A response body that may add headers to its head. The caller makes sure that the head has none of
/// the names that must not be repeated.
pub trait ResponseHeaders: Body<Data = Bytes> {
    /// Passes on headers that were received from an engine. None by default.
    fn upstream_headers(&self, _to: &mut impl FnMut(&HeaderName, &HeaderValue)) {}

    /// Adds headers made by the gateway. None by default.
    fn gateway_headers(&self, _head: &mut impl HeaderSink) {}
}

impl<E> ResponseHeaders for UnsyncBoxBody<Bytes, E> {}

impl ResponseHeaders for Empty<Bytes> {}

/// A destination for headers.
pub trait HeaderSink {
    /// Appends a header whose value is written by `write`. The name must be in lower case.
    fn add(&mut self, name: &'static str, write: impl FnOnce(&mut Vec<u8>));
}

/// Header lines of an HTTP/1 head.
impl HeaderSink for Vec<u8> {
    fn add(&mut self, name: &'static str, write: impl FnOnce(&mut Vec<u8>)) {
        self.extend_from_slice(name.as_bytes());
        self.extend_from_slice(b": ");
        let from = self.len();
        write(self);
        debug_assert!(HeaderValue::from_bytes(&self[from..]).is_ok(), "a value of {name} that is none");
        self.extend_from_slice(b"\r\n");
    }
}

impl HeaderSink for HeaderMap {
    fn add(&mut self, name: &'static str, write: impl FnOnce(&mut Vec<u8>)) {
        let mut value = Vec::new();
        write(&mut value);
        if let Ok(value) = HeaderValue::from_maybe_shared(Bytes::from(value)) {
            self.append(HeaderName::from_static(name), value);
        }
    }
}

/// Moves the body's headers into the head, for callers that read headers from the map.
pub fn with_fields<B: ResponseHeaders>(answer: Response<B>) -> Response<B> {
    let (mut head, body) = answer.into_parts();
    body.upstream_headers(&mut |name, value| {
        head.headers.append(name, value.clone());
    });
    body.gateway_headers(&mut head.headers);
    Response::from_parts(head, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_maps_hold_the_same() {
        fn put(fields: &mut impl HeaderSink) {
            fields.add("a", |value| value.extend_from_slice(b"1"));
            fields.add("b-c", |_| {});
            fields.add("a", |value| value.extend_from_slice(b"2, 3"));
        }
        let (mut lines, mut map) = (b"x: y\r\n".to_vec(), HeaderMap::new());
        map.insert("a", HeaderValue::from_static("0"));
        put(&mut lines);
        put(&mut map);
        assert_eq!(lines, b"x: y\r\na: 1\r\nb-c: \r\na: 2, 3\r\n");
        assert_eq!(map.get_all("a").iter().collect::<Vec<_>>(), ["0", "1", "2, 3"]);
        assert_eq!(map["b-c"], "");
    }
}

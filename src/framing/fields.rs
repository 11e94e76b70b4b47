//! Fields of a head that come with the body behind it.
//!
//! Whoever answers a request may know a few fields that no map has to hold: they are written
//! straight into what goes out on an HTTP/1 connection. HTTP/2 takes its fields from a map.

use bytes::Bytes;
use http::Response;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http_body::Body;
use http_body_util::Empty;
use http_body_util::combinators::UnsyncBoxBody;

/// A body of an answer, which may bring fields for the head in front of it. They stand beside those
/// that the head has: it has none of their names that must not be there twice.
pub trait ResponseHeaders: Body<Data = Bytes> {
    /// Gives those that stand in somebody else's head, and pass from there. As a rule there are none.
    fn pass_fields(&self, _to: &mut impl FnMut(&HeaderName, &HeaderValue)) {}

    /// Adds the others to a head. As a rule there are none.
    fn add_fields(&self, _head: &mut impl HeaderSink) {}
}

impl<E> ResponseHeaders for UnsyncBoxBody<Bytes, E> {}

impl ResponseHeaders for Empty<Bytes> {}

/// Where the fields of a head are put.
pub trait HeaderSink {
    /// Puts one more there, whose value is written by `write`. The name is in lower case.
    fn add(&mut self, name: &'static str, write: impl FnOnce(&mut Vec<u8>));
}

/// The lines of an HTTP/1 head.
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

/// Puts a line into an HTTP/1 head.
pub fn put_line(head: &mut Vec<u8>, name: &str, value: &[u8]) {
    head.extend_from_slice(name.as_bytes());
    head.extend_from_slice(b": ");
    head.extend_from_slice(value);
    head.extend_from_slice(b"\r\n");
}

/// An answer whose head has the fields of its body too, for those who take them from there.
pub fn with_fields<B: ResponseHeaders>(answer: Response<B>) -> Response<B> {
    let (mut head, body) = answer.into_parts();
    body.pass_fields(&mut |name, value| {
        head.headers.append(name, value.clone());
    });
    body.add_fields(&mut head.headers);
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

//! Moves members of a hidden event into the event before it.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::json::{self, Interest, Literal, Nest, Scalar, Sink};
use crate::observe::sse::EventFields;

/// The event with those top-level members of `hidden` that it lacks appended as written, except `usage`
/// and members that every event has. Unchanged if either is not a JSON object on one line.
pub(super) fn with_members_of(event: Bytes, hidden: &[u8]) -> Bytes {
    let (Some(own), Some(others)) = (EventMembers::of(&event), EventMembers::of(hidden)) else { return event };
    let is_new = |name: &[u8]| !STAYS.contains(&name) && own.all.iter().all(|member| member.name != name);
    let mut new = others.all.iter().filter(|member| is_new(&member.name)).peekable();
    let Some(at) = own.all.last().map(|member| member.value_past).filter(|_| new.peek().is_some()) else {
        return event;
    };
    let mut whole = BytesMut::with_capacity(event.len() + hidden.len());
    whole.extend_from_slice(&event[..at]);
    for member in new {
        let between = &hidden[member.behind..member.key_at];
        whole.extend_from_slice(if between.starts_with(b",") { between } else { b"," });
        whole.extend_from_slice(&hidden[member.key_at..member.value_past]);
    }
    whole.extend_from_slice(&event[at..]);
    whole.freeze()
}

/// Members that identify an event; an engine never moves them.
const STAYS: [&[u8]; 6] = [b"usage", b"choices", b"id", b"object", b"created", b"model"];

/// Offsets of the top-level members of an event's data.
#[derive(Debug, Default)]
struct EventMembers {
    all: Vec<EventMember>,
    /// End of the last value.
    behind: usize,
    key: Vec<u8>,
    key_at: usize,
}

#[derive(Debug)]
struct EventMember {
    name: Vec<u8>,
    /// End of the preceding value, or of the bracket.
    behind: usize,
    key_at: usize,
    value_past: usize,
}

impl EventMembers {
    fn of(event: &[u8]) -> Option<EventMembers> {
        let fields = EventFields::of(event);
        let (data, start) = (fields.data?, fields.data_at?);
        let mut members = EventMembers::default();
        json::walk_answer(&data, &mut members).ok()?;
        for member in &mut members.all {
            let EventMember { behind, key_at, value_past, .. } = member;
            for at in [behind, key_at, value_past] {
                *at += start;
            }
        }
        Some(members)
    }

    fn value_ends(&mut self, past: usize) {
        let behind = std::mem::replace(&mut self.behind, past);
        let name = std::mem::take(&mut self.key);
        self.all.push(EventMember { name, behind, key_at: self.key_at, value_past: past });
    }
}

impl Sink for EventMembers {
    fn open(&mut self, nest: Nest, at: usize, depth: usize) -> Interest {
        if depth == 0 {
            self.behind = at + 1;
        }
        if depth == 0 && nest == Nest::Object { Interest::Read } else { Interest::Skip }
    }

    fn close(&mut self, _: Nest, past: usize, depth: usize) {
        if depth == 1 {
            self.value_ends(past);
        }
    }

    fn begin(&mut self, what: Scalar, at: usize, _: usize) -> Interest {
        if what != Scalar::Key {
            return Interest::Skip;
        }
        self.key.clear();
        self.key_at = at;
        Interest::Read
    }

    fn piece(&mut self, decoded: &[u8]) {
        self.key.extend_from_slice(decoded);
    }

    fn end(&mut self, what: Scalar, past: usize, depth: usize) {
        if what != Scalar::Key && depth == 1 {
            self.value_ends(past);
        }
    }

    fn scalar(&mut self, what: Scalar, decoded: &[u8], place: Range<usize>, depth: usize) {
        if what == Scalar::Key {
            self.key_at = place.start;
            self.key = decoded.to_vec();
        } else if depth == 1 {
            self.value_ends(place.end);
        }
    }

    fn literal(&mut self, what: Literal, at: usize, depth: usize) {
        if depth == 1 {
            self.value_ends(at + what.word().len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(event: &str, hidden: &str) -> String {
        let event = Bytes::from(format!("event: x\r\ndata:{event}\r\n\r\n"));
        let left = with_members_of(event, format!("data: {hidden}\n\n").as_bytes());
        let left = String::from_utf8(left.to_vec()).unwrap();
        left.strip_prefix("event: x\r\ndata:").unwrap().strip_suffix("\r\n\r\n").unwrap().to_owned()
    }

    #[test]
    fn only_members_unique_to_the_removed_event_are_put_back_unchanged() {
        for (event, hidden, whole) in [
            (r#"{"a":1}"#, r#"{"a":2,"usage":{"b":1},"b":{"c":[1, 2]}}"#, r#"{"a":1,"b":{"c":[1, 2]}}"#),
            (r#"{ "a": 1 }"#, r#"{"usage": 3, "b": NaN, "c": null}"#, r#"{ "a": 1, "b": NaN, "c": null }"#),
            (r#"{"a":null}"#, r#"{"b":"\u0041" ,"a":1,"usage":1}"#, r#"{"a":null,"b":"\u0041"}"#),
            (r#"{"a":1}"#, r#"{"\u0061":2,"usage":1}"#, r#"{"a":1}"#),
            (r#"{"a":1}"#, r#"{"usage":1}"#, r#"{"a":1}"#),
            (r#"{}"#, r#"{"b":1}"#, r#"{}"#),
            (r#"{"a":1}"#, r#"["b"]"#, r#"{"a":1}"#),
            (r#"{"a":1}"#, r#"{"b":1"#, r#"{"a":1}"#),
            (r#"{"a":1"#, r#"{"b":1}"#, r#"{"a":1"#),
        ] {
            assert_eq!(moved(event, hidden), whole, "{hidden}");
        }
        let lines = Bytes::from_static(b"data: {\"a\":\ndata: 1}\n\n");
        assert_eq!(with_members_of(lines.clone(), b"data: {\"b\":1}\n\n"), lines);
    }
}

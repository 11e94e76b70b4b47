//! Which bytes of an answer may pass.
//!
//! What the gateway asked an engine for on its own account is invisible to the client: the
//! usage event that it injected is taken out again, and so are the usage members of other
//! events where it injected `continuous_usage_stats`. All other bytes pass as they came.
//!
//! Decided: where only `include_usage` was injected, usage that stands on an event *with* a
//! choice stays (some engines write it on their last content or finish event). Clients that
//! did not ask for it ignore a member they do not know, and taking it out would mean editing
//! an event that carries text. An event in which an error stands is never taken out.
//!
//! Not done: a member inside an event longer than [`HELD`](crate::observe::sse::HELD), which
//! leaves before its end is known, stays where it is.

use bytes::{Bytes, BytesMut};
use memchr::memmem;

use crate::json::{self, Interest, Literal, Nest, Scalar, Sink};
use crate::observe::sse::Fields;
use crate::observe::{Note, UsageSeat};

/// Lets the bytes of one answer pass, but for what the gateway itself caused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventGate {
    hide_usage: bool,
    strip_continuous: bool,
}

impl EventGate {
    /// A gate that takes out usage-only events (`hide_usage`: the gateway injected
    /// `include_usage`, and the client did not ask for it), and usage members beside a
    /// choice (`strip_continuous`: it injected `continuous_usage_stats`).
    #[must_use]
    pub const fn new(hide_usage: bool, strip_continuous: bool) -> Self {
        EventGate { hide_usage, strip_continuous }
    }

    /// What of this piece may pass.
    pub fn pass(&mut self, bytes: Bytes, note: &Note) -> Option<Bytes> {
        if note.part || note.error.is_some() {
            return Some(bytes);
        }
        if note.usage == UsageSeat::Alone {
            return (!self.hide_usage).then_some(bytes);
        }
        Some(if self.strip_continuous { without_usage(bytes) } else { bytes })
    }
}

/// The event without the `usage` members of its data.
fn without_usage(event: Bytes) -> Bytes {
    let cuts = usage_members(&event);
    if cuts.is_empty() {
        return event;
    }
    let mut left = BytesMut::with_capacity(event.len());
    let mut kept = 0;
    for (at, past) in cuts {
        left.extend_from_slice(&event[kept..at]);
        kept = past;
    }
    left.extend_from_slice(&event[kept..]);
    left.freeze()
}

/// Where the `usage` members of the event's data stand. Data on several lines, which no
/// engine writes, is left alone.
fn usage_members(event: &[u8]) -> Vec<(usize, usize)> {
    let may_be_there = memmem::find(event, b"usage").is_some() || memmem::find(event, b"\\u").is_some();
    if !may_be_there {
        return Vec::new();
    }
    let mark = if event.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
    let fields = Fields::of(&event[mark..]);
    let (Some(data), Some(start)) = (fields.data, fields.data_at) else { return Vec::new() };
    let mut finder = Finder::default();
    if json::walk(&data, &mut finder).is_err() {
        return Vec::new();
    }
    finder.cuts.iter().map(|(at, past)| (mark + start + at, mark + start + past)).collect()
}

/// Finds the top-level members named `usage`, each with one comma beside it.
#[derive(Debug, Default)]
struct Finder {
    /// Ranges to cut out, ascending and disjoint.
    cuts: Vec<(usize, usize)>,
    /// End of the last member that stays; 0 before the first.
    kept_to: usize,
    /// The present member's key: where it begins, and whether it is `usage` so far.
    key_at: usize,
    key_len: usize,
    is_usage: bool,
    /// Members cut since the last one that stays.
    pending: bool,
}

impl Finder {
    /// The present top-level member ended.
    fn member_ends(&mut self, past: usize) {
        if !self.is_usage {
            if self.pending && self.kept_to == 0 {
                // Only cut members stood in front: the comma goes with them.
                self.cuts[0].1 = self.key_at;
            }
            self.pending = false;
            self.kept_to = past;
        } else if self.kept_to == 0 {
            if !self.pending {
                self.cuts.push((self.key_at, past));
            } else if let Some(cut) = self.cuts.last_mut() {
                cut.1 = past;
            }
            self.pending = true;
        } else {
            match self.cuts.last_mut() {
                Some(cut) if self.pending => cut.1 = past,
                _ => self.cuts.push((self.kept_to, past)),
            }
            self.pending = true;
        }
    }
}

impl Sink for Finder {
    fn open(&mut self, _: Nest, _: usize, depth: usize) -> Interest {
        if depth == 0 { Interest::Read } else { Interest::Skip }
    }

    fn close(&mut self, _: Nest, past: usize, depth: usize) {
        if depth == 1 {
            self.member_ends(past);
        }
    }

    fn begin(&mut self, what: Scalar, at: usize, _: usize) -> Interest {
        if what != Scalar::Key {
            return Interest::Skip;
        }
        (self.key_at, self.key_len, self.is_usage) = (at, 0, true);
        Interest::Read
    }

    fn piece(&mut self, decoded: &[u8]) {
        let rest = b"usage".get(self.key_len..).unwrap_or_default();
        self.is_usage &= rest.starts_with(decoded);
        self.key_len += decoded.len();
    }

    fn lone_surrogate(&mut self) {
        self.is_usage = false;
    }

    fn end(&mut self, what: Scalar, past: usize, depth: usize) {
        if what == Scalar::Key {
            self.is_usage &= self.key_len == b"usage".len();
        } else if depth == 1 {
            self.member_ends(past);
        }
    }

    fn literal(&mut self, what: Literal, at: usize, depth: usize) {
        if depth == 1 {
            self.member_ends(at + what.word().len());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::observe::{Expect, Observer, Reader, Watch};
    use crate::units::{Dialect, Tick};

    /// What passes the gate of a chat stream, seen by an observer as it is in the gateway.
    fn passed(gate: EventGate, stream: &str) -> String {
        let mut gate = gate;
        let mut out = Vec::new();
        let mut observer =
            Observer::new(Expect::stream(Dialect::Chat, Tick::ZERO), Reader::Events, 200, Watch::default());
        let mut pass = |piece: Bytes, note: &Note| out.extend(gate.pass(piece, note).unwrap_or_default());
        observer.frame(Bytes::copy_from_slice(stream.as_bytes()), Tick::ZERO, &mut pass);
        observer.clean_end(Tick::ZERO, &mut pass);
        String::from_utf8(out).unwrap()
    }

    const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"usage\"}}]}\n\n";
    const FINISH: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    const FINISH_WITH_USAGE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"completion_tokens\":1}}\n\n";
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":1}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn c66_the_injected_usage_event_is_taken_out_and_nothing_else() {
        let stream = [ROLE, TOKEN, FINISH, USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &stream), [ROLE, TOKEN, FINISH, DONE].concat());
        assert_eq!(passed(EventGate::new(false, false), &stream), stream);
        let several = [TOKEN, FINISH, USAGE, TOKEN, FINISH, USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &several), [TOKEN, FINISH, TOKEN, FINISH, DONE].concat());
        let last = [TOKEN, FINISH, USAGE.trim_end()].concat();
        assert_eq!(passed(EventGate::new(true, false), &last), [TOKEN, FINISH].concat());
    }

    #[test]
    fn c66_usage_on_a_finish_event_stays_where_only_the_usage_event_was_injected() {
        let stream = [TOKEN, FINISH_WITH_USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &stream), stream);
        assert_eq!(passed(EventGate::new(true, true), &stream), [TOKEN, FINISH, DONE].concat());
        assert_eq!(passed(EventGate::new(false, true), &stream), [TOKEN, FINISH, DONE].concat());
    }

    #[test]
    fn c66_a_client_that_asked_for_the_usage_event_keeps_it() {
        let stream = [TOKEN, FINISH_WITH_USAGE, USAGE, DONE].concat();
        assert_eq!(passed(EventGate::new(false, true), &stream), [TOKEN, FINISH, USAGE, DONE].concat());
    }

    #[test]
    fn events_without_choices_or_with_an_error_are_none_of_ours() {
        let preamble = "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n";
        let null = "data: {\"choices\":[],\"usage\":null}\n\n";
        let error = "data: {\"error\":{\"code\":500},\"usage\":{\"completion_tokens\":1}}\n\n";
        let stream = [": hi\n\n", preamble, null, error, DONE].concat();
        assert_eq!(passed(EventGate::new(true, false), &stream), stream);
    }

    fn stripped(data: &str) -> String {
        let event = format!("event: x\r\ndata:{data}\r\n: usage\r\n\r\n");
        let note = Note { usage: UsageSeat::WithChoice, ..Note::default() };
        let left = EventGate::new(false, true).pass(Bytes::from(event), &note).unwrap();
        let left = String::from_utf8(left.to_vec()).unwrap();
        let left = left.strip_prefix("event: x\r\ndata:").unwrap();
        left.strip_suffix("\r\n: usage\r\n\r\n").unwrap().to_owned()
    }

    #[test]
    fn the_usage_member_goes_with_one_comma() {
        for (data, left) in [
            (r#"{"usage":null}"#, "{}"),
            (r#"{"usage":{"a":[1,{"usage":2}]}}"#, "{}"),
            (r#"{ "usage" : 1 , "b":2}"#, r#"{ "b":2}"#),
            (r#"{"a":1,"usage":"x"}"#, r#"{"a":1}"#),
            (r#"{"a":1 , "usage":{} , "b":2 }"#, r#"{"a":1 , "b":2 }"#),
            (r#"{"usage":1,"usage":2,"a":{"usage":3}}"#, r#"{"a":{"usage":3}}"#),
            (r#"{"a":"usage","usage":1,"usage":2}"#, r#"{"a":"usage"}"#),
            (r#"{"usage":1,"a":1,"usage":2,"b":1,"usage":3}"#, r#"{"a":1,"b":1}"#),
            (r#"{"usage":1,"usage":true}"#, "{}"),
            (r#"{"us\u0061ge":1,"a":1}"#, r#"{"a":1}"#),
            (r#"{"usages":1,"usag":2,"":3}"#, r#"{"usages":1,"usag":2,"":3}"#),
            (r#"{"a":1e400,"b":"\ud83d","usage":1}"#, r#"{"a":1e400,"b":"\ud83d"}"#),
            (r#"[{"usage":1}]"#, r#"[{"usage":1}]"#),
            (r#"{"usage":1"#, r#"{"usage":1"#),
        ] {
            assert_eq!(stripped(data), left, "{data}");
        }
    }

    fn member() -> impl Strategy<Value = String> {
        let key = prop_oneof![Just("usage"), Just("a"), Just("usag\\u0065"), Just("b c")];
        let value = prop_oneof![
            Just("1"),
            Just("null"),
            Just("\"usage\\\"\""),
            Just("{\"usage\":[1,{}]}"),
            Just("[]"),
            Just("-0.5e3")
        ];
        (key, value, "[ ]?").prop_map(|(key, value, space)| format!("{space}\"{key}\"{space}:{space}{value}{space}"))
    }

    proptest! {
        #[test]
        fn what_is_left_is_the_object_without_its_usage(members in proptest::collection::vec(member(), 0..7)) {
            let data = format!("{{{}}}", members.join(","));
            let left = stripped(&data);
            let mut expected: Value = serde_json::from_str(&data).unwrap();
            expected.as_object_mut().unwrap().remove("usage");
            prop_assert_eq!(serde_json::from_str::<Value>(&left).unwrap(), expected);
            // Members that stay, stay as they were written.
            let kept: Vec<&str> =
                members.iter().filter(|m| !m.trim().starts_with("\"usag")).map(|m| m.trim()).collect();
            for member in kept {
                prop_assert!(left.contains(member));
            }
        }
    }
}

//! Removes `usage` members from events, either complete or passing in
//! pieces.
//!
//! Of a passing event only undecided bytes are held: a comma and key until the key is known not to be
//! `usage`, a `usage` member until its end. Beyond [`MOST_HELD`] bytes, if the data line ends before
//! its object, or if it is not JSON, the rest passes unchanged.

use bytes::{Bytes, BytesMut};
use memchr::{memchr, memchr2, memmem};

use crate::json::{self, Interest, Literal, Nest, Scalar, Sink, Tokenizer};
use crate::observe::sse::EventFields;

/// Most bytes of a long event held; engines write far less there.
const MOST_HELD: usize = 4 * 1024;

/// Returns the event without the `usage` members of its data.
pub(super) fn without_usage(event: Bytes) -> Bytes {
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

/// Ranges of the `usage` members in the event's data. Multi-line data, which no engine writes, is left
/// unchanged.
fn usage_members(event: &[u8]) -> Vec<(usize, usize)> {
    let may_be_there = memmem::find(event, b"usage").is_some() || memmem::find(event, b"\\u").is_some();
    if !may_be_there {
        return Vec::new();
    }
    let mark = if event.starts_with(MARK) { MARK.len() } else { 0 };
    let fields = EventFields::of(&event[mark..]);
    let (Some(data), Some(start)) = (fields.data, fields.data_at) else { return Vec::new() };
    let mut finder = UsageFinder::default();
    if json::walk_answer(&data, &mut finder).is_err() {
        return Vec::new();
    }
    finder.cuts.iter().map(|(at, past)| (mark + start + at, mark + start + past)).collect()
}

/// The byte-order mark allowed at the start of a stream.
const MARK: &[u8] = b"\xEF\xBB\xBF";

/// A long event passing in pieces.
#[derive(Debug)]
pub(super) struct OversizedEdit {
    at: ScanState,
    /// The field name of the current line so far.
    name: Vec<u8>,
    tokenizer: Tokenizer,
    finder: UsageFinder,
    /// Bytes of the data so far; the last of them are held because it is undecided whether they
    /// stay.
    seen: usize,
    held: Vec<u8>,
}

/// Position of the next byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ScanState {
    /// In a field name.
    #[default]
    Name,
    /// After the colon of the first `data` line, where one space may follow.
    BeforeData,
    /// In its value.
    Data,
    /// In an earlier line of another field.
    Ignored,
    /// After the data: everything passes.
    Behind,
}

impl Default for OversizedEdit {
    /// At the first byte of an event.
    fn default() -> Self {
        OversizedEdit {
            at: ScanState::default(),
            name: Vec::new(),
            tokenizer: Tokenizer::of_answer(),
            finder: UsageFinder::default(),
            seen: 0,
            held: Vec::new(),
        }
    }
}

impl OversizedEdit {
    /// Adds a piece and returns the bytes that may pass now.
    pub(super) fn pass(&mut self, piece: Bytes) -> Bytes {
        if self.at == ScanState::Behind {
            return piece;
        }
        if self.at == ScanState::Data && self.held.is_empty() && memchr2(b'\n', b'\r', &piece).is_none() {
            // Most pieces pass unchanged.
            self.read(&piece);
            if self.finder.cuts.is_empty() && self.finder.doubt.is_none() {
                return piece;
            }
            let mut passed = Vec::with_capacity(piece.len());
            self.decide(&piece, &mut passed);
            return passed.into();
        }
        let mut passed = Vec::with_capacity(self.held.len() + piece.len());
        let mut rest = &piece[..];
        while !rest.is_empty() && self.at != ScanState::Behind {
            let end = memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
            self.within_line(&rest[..end], &mut passed);
            if let Some(line_end) = rest.get(end) {
                self.line_ends(&mut passed);
                passed.push(*line_end);
            }
            rest = rest.get(end + 1..).unwrap_or_default();
        }
        passed.extend_from_slice(rest);
        passed.into()
    }

    /// Ends the event and returns the held bytes.
    pub(super) fn finish(self) -> Bytes {
        self.held.into()
    }

    fn within_line(&mut self, mut line: &[u8], passed: &mut Vec<u8>) {
        if self.at == ScanState::Name {
            let colon = memchr(b':', line);
            let name = &line[..colon.unwrap_or(line.len())];
            let room = (MARK.len() + b"data".len() + 1).saturating_sub(self.name.len());
            self.name.extend_from_slice(&name[..name.len().min(room)]);
            let Some(colon) = colon else { return passed.extend_from_slice(line) };
            passed.extend_from_slice(&line[..=colon]);
            line = &line[colon + 1..];
            let name = self.name.strip_prefix(MARK).unwrap_or(&self.name);
            self.at = if name == b"data" { ScanState::BeforeData } else { ScanState::Ignored };
        }
        if self.at == ScanState::BeforeData && !line.is_empty() {
            self.at = ScanState::Data;
            if let Some(value) = line.strip_prefix(b" ") {
                passed.push(b' ');
                line = value;
            }
        }
        if self.at == ScanState::Data {
            self.read(line);
            self.decide(line, passed);
        } else {
            passed.extend_from_slice(line);
        }
    }

    fn line_ends(&mut self, passed: &mut Vec<u8>) {
        self.name.clear();
        match self.at {
            ScanState::BeforeData | ScanState::Data => self.give_up(passed),
            ScanState::Name | ScanState::Ignored => self.at = ScanState::Name,
            ScanState::Behind => {}
        }
    }

    fn read(&mut self, data: &[u8]) {
        self.seen += data.len();
        if self.tokenizer.push(data, &mut self.finder).is_err() {
            self.finder.doubt = None;
            self.at = ScanState::Behind;
        }
    }

    /// Passes the bytes known to stay and holds the undecided ones.
    fn decide(&mut self, data: &[u8], passed: &mut Vec<u8>) {
        self.held.extend_from_slice(data);
        let mut sent = self.seen - self.held.len();
        let held = std::mem::take(&mut self.held);
        let mut rest = &held[..];
        let mut take = |to: usize| {
            let (taken, left) = rest.split_at(to - sent);
            (rest, sent) = (left, to);
            taken
        };
        for (at, past) in self.finder.cuts.drain(..) {
            passed.extend_from_slice(take(at));
            take(past);
        }
        passed.extend_from_slice(take(self.finder.doubt.unwrap_or(self.seen)));
        self.held = rest.to_vec();
        if self.held.len() > MOST_HELD {
            self.give_up(passed);
        }
    }

    /// Passes all held bytes and everything that follows.
    fn give_up(&mut self, passed: &mut Vec<u8>) {
        passed.append(&mut self.held);
        self.at = ScanState::Behind;
    }
}

/// Finds top-level members named `usage`, each with one adjacent comma.
#[derive(Debug, Default)]
struct UsageFinder {
    /// Ranges to cut, ascending and disjoint.
    cuts: Vec<(usize, usize)>,
    /// Start of the undecided bytes.
    doubt: Option<usize>,
    /// A member that stays was seen.
    keeps: bool,
    /// The current member's key: its offset, and whether it matches `usage` so far.
    key_at: usize,
    key_len: usize,
    is_usage: bool,
}

impl UsageFinder {
    /// The current member stays.
    fn stays(&mut self) {
        self.is_usage = false;
        let Some(from) = self.doubt.take() else { return };
        if !std::mem::replace(&mut self.keeps, true) && from < self.key_at {
            // Only removed members precede it, so the comma is removed too.
            self.cuts.push((from, self.key_at));
        }
    }

    /// The current top-level member ended.
    fn member_ends(&mut self, past: usize) {
        if let Some(from) = self.doubt.filter(|_| self.is_usage) {
            self.cuts.push((from, past));
        }
        self.doubt = Some(past);
    }
}

impl Sink for UsageFinder {
    fn open(&mut self, nest: Nest, _: usize, depth: usize) -> Interest {
        if depth == 0 && nest == Nest::Object { Interest::Read } else { Interest::Skip }
    }

    fn close(&mut self, _: Nest, past: usize, depth: usize) {
        match depth {
            0 => self.doubt = None,
            1 => self.member_ends(past),
            _ => {}
        }
    }

    fn begin(&mut self, what: Scalar, at: usize, _: usize) -> Interest {
        if what != Scalar::Key {
            return Interest::Skip;
        }
        (self.key_at, self.key_len, self.is_usage) = (at, 0, true);
        self.doubt.get_or_insert(at);
        Interest::Read
    }

    fn piece(&mut self, decoded: &[u8]) {
        let rest = b"usage".get(self.key_len..).unwrap_or_default();
        self.key_len += decoded.len();
        if !rest.starts_with(decoded) {
            self.stays();
        }
    }

    fn lone_surrogate(&mut self) {
        self.stays();
    }

    fn end(&mut self, what: Scalar, past: usize, depth: usize) {
        if what == Scalar::Key {
            if self.key_len != b"usage".len() {
                self.stays();
            }
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

    fn in_pieces(event: &[u8], size: usize) -> Vec<u8> {
        let mut passing = OversizedEdit::default();
        let mut left = Vec::new();
        for piece in event.chunks(size) {
            left.extend_from_slice(&passing.pass(Bytes::copy_from_slice(piece)));
        }
        left.extend_from_slice(&passing.finish());
        left
    }

    fn stripped(data: &str) -> String {
        let event = format!("event: x\r\ndata:{data}\r\n: usage\r\n\r\n");
        let whole = without_usage(Bytes::from(event.clone()));
        for size in [1, 2, 3, 7, event.len()] {
            assert_eq!(in_pieces(event.as_bytes(), size), whole, "{data} in pieces of {size}");
        }
        let left = String::from_utf8(whole.to_vec()).unwrap();
        let left = left.strip_prefix("event: x\r\ndata:").unwrap();
        left.strip_suffix("\r\n: usage\r\n\r\n").unwrap().to_owned()
    }

    #[test]
    fn the_usage_member_is_removed_with_one_comma() {
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
        fn the_rest_is_the_object_without_its_usage(members in proptest::collection::vec(member(), 0..7)) {
            let data = format!("{{{}}}", members.join(","));
            let left = stripped(&data);
            let mut expected: Value = serde_json::from_str(&data).unwrap();
            expected.as_object_mut().unwrap().remove("usage");
            prop_assert_eq!(serde_json::from_str::<Value>(&left).unwrap(), expected);
            // Members that stay are unchanged.
            let kept: Vec<&str> =
                members.iter().filter(|m| !m.trim().starts_with("\"usag")).map(|m| m.trim()).collect();
            for member in kept {
                prop_assert!(left.contains(member));
            }
        }
    }

    #[test]
    fn an_oversized_event_is_held_only_while_undecided() {
        let mut passing = OversizedEdit::default();
        let mut passed = |piece: &'static str| {
            let left = passing.pass(Bytes::from_static(piece.as_bytes()));
            String::from_utf8(left.to_vec()).unwrap()
        };
        assert_eq!(passed("id: 1\ndata: {\"a\":\"xy"), "id: 1\ndata: {\"a\":\"xy");
        assert_eq!(passed("z\",\"us"), "z\"");
        assert_eq!(passed("er\":[1"), ",\"user\":[1");
        assert_eq!(passed("], \"usage\": {\"b\":"), "]");
        assert_eq!(passed("2} , \"c\""), " , \"c\"");
        assert_eq!(passed(":0}\n\n"), ":0}\n\n");
    }

    #[test]
    fn data_that_is_no_object_or_too_long_passes_unchanged() {
        let spaces = " ".repeat(2 * MOST_HELD);
        for data in [
            "[{\"usage\":1},2]".to_owned(),
            "{\"a\":1,\ndata: \"usage\":2}".to_owned(),
            "{\"a\":1,\"usage\":{\ndata: \"b\":2}}".to_owned(),
            "{\"a\":1,\"usage\":}".to_owned(),
            "[DONE]".to_owned(),
            format!("{{\"a\":1{spaces},\"usage\":2}}"),
            format!("{{\"a\":1,\"usage\":[{spaces}]}}"),
        ] {
            let event = format!("data: {data}\n\n");
            for size in [1, 5, 1000] {
                assert_eq!(in_pieces(event.as_bytes(), size), event.as_bytes(), "{data}");
            }
        }
        let marked = b"\xEF\xBB\xBFdata:{\"usage\":1}\n\n";
        assert_eq!(in_pieces(marked, 2), b"\xEF\xBB\xBFdata:{}\n\n");
    }
}

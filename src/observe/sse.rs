//! Server-sent events (WHATWG rules), split without copying.
//!
//! [`EventScanner`] finds the ends of events: a blank line, with LF, CRLF or CR as line ends,
//! mixed and split over reads. An event within one frame is a slice of that frame; one that spans frames
//! is held and joined; one longer than [`HELD`] is passed on in pieces. Nothing is lost, duplicated or
//! reordered: the pieces and the held tail are exactly the bytes received. [`EventFields`] parses the
//! lines of a whole event.

use std::borrow::Cow;

use bytes::Bytes;
use memchr::{memchr2, memchr2_iter, memrchr2};

/// Longest incomplete event held, bytes; a longer one is passed on as it comes.
pub const HELD: usize = 64 * 1024;

/// Kind of piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// A whole event (or a block of comments) with its blank line and all line ends directly
    /// after it.
    Event,
    /// Line ends between events, such as the LF of a CRLF whose CR ended an event.
    Blank,
    /// A piece of a long event other than its last.
    Part,
    /// The last piece of a long event.
    LastPart,
}

/// Splits a byte stream into whole events.
#[derive(Clone, Debug, Default)]
pub struct EventScanner {
    /// The incomplete event.
    tail: Vec<u8>,
    /// Last byte of the incomplete event, if any.
    last: Option<u8>,
    /// Whether part of the incomplete event was passed on.
    is_long: bool,
    saw_line: bool,
}

impl EventScanner {
    /// A scanner at the first byte of a stream.
    #[must_use]
    pub const fn new() -> Self {
        EventScanner { tail: Vec::new(), last: None, is_long: false, saw_line: false }
    }

    /// Returns the next piece of the frame. `None` means that the frame is used up and its rest is held as
    /// the start of an event.
    pub fn next(&mut self, frame: &mut Bytes) -> Option<(Cut, Bytes)> {
        self.saw_line = false;
        if frame.is_empty() {
            return None;
        }
        if self.is_between_events() {
            let blank = run_of_line_ends(frame);
            if blank > 0 {
                return Some((Cut::Blank, frame.split_to(blank)));
            }
        }
        match end_of_event(self.last, frame) {
            Ok(past) => Some(self.complete(frame.split_to(past))),
            Err(saw_line) => self.keep(frame, saw_line),
        }
    }

    /// Whether the next byte begins an event (or is a line end between two).
    #[must_use]
    pub const fn is_between_events(&self) -> bool {
        self.last.is_none()
    }

    /// Whether the last frame ended a meaningful line (such as a comment) of an incomplete
    /// event.
    #[must_use]
    pub const fn saw_line(&self) -> bool {
        self.saw_line
    }

    /// Ends the input: returns the incomplete event, if any.
    pub fn finish(&mut self) -> Option<(Cut, Bytes)> {
        let (is_long, is_empty) = (self.is_long, self.is_between_events());
        (self.last, self.is_long) = (None, false);
        let tail = Bytes::from(std::mem::take(&mut self.tail));
        if is_long { Some((Cut::LastPart, tail)) } else { (!is_empty).then_some((Cut::Event, tail)) }
    }

    /// Whether part of an incomplete event was passed on.
    #[must_use]
    pub const fn long_event_is_out(&self) -> bool {
        self.is_long
    }

    /// Held bytes of the incomplete event.
    #[must_use]
    pub fn held(&self) -> usize {
        self.tail.capacity()
    }

    fn complete(&mut self, rest: Bytes) -> (Cut, Bytes) {
        self.last = None;
        if std::mem::take(&mut self.is_long) {
            return (Cut::LastPart, rest);
        }
        if self.tail.is_empty() {
            return (Cut::Event, rest);
        }
        let mut whole = std::mem::take(&mut self.tail);
        whole.extend_from_slice(&rest);
        (Cut::Event, Bytes::from(whole))
    }

    fn keep(&mut self, frame: &mut Bytes, saw_line: bool) -> Option<(Cut, Bytes)> {
        if !self.is_long && self.tail.len() + frame.len() > HELD {
            self.is_long = true;
            if !self.tail.is_empty() {
                // The frame itself follows as the next piece.
                return Some((Cut::Part, Bytes::from(std::mem::take(&mut self.tail))));
            }
        }
        self.last = frame.last().copied().or(self.last);
        if self.is_long {
            return Some((Cut::Part, std::mem::take(frame)));
        }
        let held = self.tail.len();
        self.tail.extend_from_slice(frame);
        self.saw_line = saw_line && self.says_something_since(held);
        frame.clear();
        None
    }

    /// Whether a meaningful line ended after that many held bytes. Checked only when a line has ended, so
    /// that bytes arriving one by one are not scanned again and again.
    fn says_something_since(&self, held: usize) -> bool {
        let start = memrchr2(b'\n', b'\r', &self.tail[..held]).map_or(0, |end| end + 1);
        let end = memrchr2(b'\n', b'\r', &self.tail).map_or(start, |end| end.max(start));
        says_something(&self.tail[start..end])
    }
}

/// Whether any of these lines is a comment or part of an event that a client acts on. `id`, `retry` and
/// unknown fields are not.
#[must_use]
pub fn says_something(lines: &[u8]) -> bool {
    let lines = lines.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(lines);
    let says = |line: &[u8]| matches!(line.first(), Some(b':' | b'd' | b'e'));
    says(lines) || lines.split(|&byte| is_line_end(byte)).any(says)
}

const fn is_line_end(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

fn run_of_line_ends(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|&&byte| is_line_end(byte)).count()
}

/// End of the event in `bytes`, where `last` is the preceding byte; else whether a line end was
/// seen.
fn end_of_event(last: Option<u8>, bytes: &[u8]) -> Result<usize, bool> {
    let mut saw_line = false;
    for at in memchr2_iter(b'\n', b'\r', bytes) {
        let before = if at == 0 { last } else { Some(bytes[at - 1]) };
        if before.is_some_and(|before| is_line_end(before) && (before, bytes[at]) != (b'\r', b'\n')) {
            return Ok(at + 1 + run_of_line_ends(&bytes[at + 1..]));
        }
        saw_line = true;
    }
    Err(saw_line)
}

/// The relevant fields of a whole event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventFields<'a> {
    /// The last `event` field.
    pub event: &'a [u8],
    /// The `data` lines joined by LF; borrowed if there is only one.
    pub data: Option<Cow<'a, [u8]>>,
    /// Offset of the data, if there is exactly one `data` line.
    pub data_at: Option<usize>,
    /// The last `error` field. Not in the standard, but older engines report failures in it.
    pub error: Option<&'a [u8]>,
}

impl<'a> EventFields<'a> {
    /// Parses the lines of an event. The caller strips a byte-order mark, which only the first event of a
    /// stream may have.
    #[must_use]
    pub fn of(event: &'a [u8]) -> Self {
        let mut fields = EventFields::default();
        let mut start = 0;
        while start < event.len() {
            let end = memchr2(b'\n', b'\r', &event[start..]).map_or(event.len(), |length| start + length);
            match field(&event[start..end]) {
                (b"event", value) => fields.event = value,
                (b"data", value) => fields.add_data(value, end - value.len()),
                (b"error", value) => fields.error = Some(value),
                _ => {}
            }
            start = end + 1;
        }
        fields
    }

    fn add_data(&mut self, value: &'a [u8], at: usize) {
        let Some(data) = &mut self.data else {
            (self.data, self.data_at) = (Some(Cow::Borrowed(value)), Some(at));
            return;
        };
        self.data_at = None;
        let data = data.to_mut();
        data.push(b'\n');
        data.extend_from_slice(value);
    }
}

/// Name and value of one line. A comment has an empty name.
fn field(line: &[u8]) -> (&[u8], &[u8]) {
    let Some(colon) = memchr::memchr(b':', line) else { return (line, b"") };
    let value = &line[colon + 1..];
    (&line[..colon], value.strip_prefix(b" ").unwrap_or(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(frames: &[&[u8]]) -> Vec<(Cut, Vec<u8>)> {
        let (mut scanner, mut pieces) = (EventScanner::new(), Vec::new());
        for frame in frames {
            let mut frame = Bytes::copy_from_slice(frame);
            while let Some((cut, bytes)) = scanner.next(&mut frame) {
                pieces.push((cut, bytes.to_vec()));
            }
        }
        if let Some((cut, bytes)) = scanner.finish() {
            pieces.push((cut, bytes.to_vec()));
        }
        pieces
    }

    fn events(frames: &[&[u8]]) -> Vec<Vec<u8>> {
        let all = cut(frames).into_iter();
        all.filter(|(cut, _)| *cut == Cut::Event).map(|(_, bytes)| bytes).collect()
    }

    #[test]
    fn c01_lf_crlf_and_cr_end_lines_also_mixed() {
        for end in ["\n\n", "\r\n\r\n", "\r\r", "\n\r", "\r\n\n", "\r\n\r", "\n\r\n"] {
            let stream = format!("data: a{end}data: b{end}");
            let found = events(&[stream.as_bytes()]);
            assert_eq!(found.len(), 2, "{end:?}");
            assert_eq!(EventFields::of(&found[1]).data.as_deref(), Some(&b"b"[..]), "{end:?}");
        }
    }

    #[test]
    fn c01_a_crlf_split_over_two_reads_is_one_line_end() {
        assert_eq!(events(&[b"data: a\r", b"\nevent: x\r\n\r\n"]).len(), 1);
        assert_eq!(events(&[b"data: a\r\n\r", b"\ndata: b\n\n"]).len(), 2);
    }

    #[test]
    fn c01_an_event_ended_by_cr_cr_does_not_wait_for_more() {
        let piece = EventScanner::new().next(&mut Bytes::from_static(b"data: a\r\r"));
        assert_eq!(piece.map(|(cut, _)| cut), Some(Cut::Event));
        let late = cut(&[b"data: a\r\n\r", b"\n", b"data: b\n\n"]);
        assert_eq!(late[1], (Cut::Blank, b"\n".to_vec()));
    }

    #[test]
    fn a_nul_at_the_end_of_a_read_is_a_byte_like_any_other() {
        assert_eq!(cut(&[b"\0"]), [(Cut::Event, b"\0".to_vec())]);
        let whole = b"data: a\0\ndata: b\n\n";
        assert_eq!(cut(&[&whole[..8], &whole[8..]]), [(Cut::Event, whole.to_vec())]);
    }

    #[test]
    fn c02_one_space_behind_the_colon_is_optional_and_no_more() {
        for (line, value) in [("data:x", "x"), ("data: x", "x"), ("data:  x", " x"), ("data", ""), ("data:", "")] {
            assert_eq!(EventFields::of(line.as_bytes()).data.as_deref(), Some(value.as_bytes()), "{line}");
        }
    }

    #[test]
    fn several_data_lines_are_joined_and_unknown_fields_ignored() {
        let fields = EventFields::of(b": c\nid: 7\ndata: a\nretry:5\nevent: one\ndata:b\ndatax: c\nevent: two\n\n");
        assert_eq!(fields.data.as_deref(), Some(&b"a\nb"[..]));
        assert_eq!(fields.event, b"two");
        assert_eq!(EventFields::of(b": only a comment\n\n"), EventFields::default());
        assert_eq!(EventFields::of(b"error: a\nerror:b\n\n").error, Some(&b"b"[..]));
    }

    #[test]
    fn a_whole_event_is_a_slice_of_its_frame() {
        let mut frame = Bytes::from_static(b"data: a\n\ndata: b\n\n");
        let (range, mut scanner) = (frame.as_ptr_range(), EventScanner::new());
        for _ in 0..2 {
            let (_, bytes) = scanner.next(&mut frame).unwrap();
            assert!(range.contains(&bytes.as_ptr()));
        }
    }

    #[test]
    fn c06_a_long_event_streams_through() {
        let long = [b"data: ".to_vec(), vec![b'x'; 3 * HELD], b"\n\n".to_vec()].concat();
        let frames: Vec<&[u8]> = long.chunks(4096).collect();
        let (mut scanner, mut out, mut parts, mut held) = (EventScanner::new(), 0, 0, 0);
        for (sent, frame) in frames.iter().enumerate() {
            let mut left = Bytes::copy_from_slice(frame);
            while let Some((cut, bytes)) = scanner.next(&mut left) {
                out += bytes.len();
                parts += usize::from(matches!(cut, Cut::Part | Cut::LastPart));
            }
            held = held.max((sent * 4096 + frame.len()) - out);
            assert_eq!(scanner.long_event_is_out(), out > 0 && out < long.len());
        }
        assert!(held <= HELD);
        assert_eq!(out, long.len());
        assert!(parts > 10);
    }

    #[test]
    fn a_completed_line_of_an_unfinished_event_is_reported() {
        let mut scanner = EventScanner::new();
        for (bytes, saw_line) in [
            (": ping\n", true),
            ("i", false),
            ("d: 1\n", false),
            ("id: 2\nretry: 3\nx", false),
            ("\r:", false),
            (" late", false),
            ("\n", true),
            ("id: 4\n", false),
            ("dat", false),
        ] {
            assert_eq!(scanner.next(&mut Bytes::from_static(bytes.as_bytes())), None);
            assert_eq!(scanner.saw_line(), saw_line);
        }
    }

    proptest! {
        #[test]
        fn pieces_are_the_bytes_and_events_do_not_depend_on_the_cuts(
            text in "(data: ?[ab:]{0,4}|: c|event:x|\n|\r|\r\n|\n\n|\r\n\r\n){0,24}",
            sizes in proptest::collection::vec(1usize..7, 1..40),
        ) {
            let bytes = text.as_bytes();
            let (mut frames, mut rest, mut sizes) = (Vec::new(), bytes, sizes.iter().cycle());
            while !rest.is_empty() {
                let (frame, behind) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
                frames.push(frame);
                rest = behind;
            }
            let pieces = cut(&frames);
            let joined: Vec<u8> = pieces.iter().flat_map(|(_, piece)| piece.clone()).collect();
            prop_assert_eq!(joined, bytes);
            let fields = |all: Vec<Vec<u8>>| -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
                let each = all.iter().map(|event| EventFields::of(event));
                each.map(|f| (f.event.to_vec(), f.data.map(Cow::into_owned))).collect()
            };
            prop_assert_eq!(fields(events(&frames)), fields(events(&[bytes])));
        }
    }
}

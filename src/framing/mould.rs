//! The shortcut for heads that repeat.
//!
//! Who sends many messages on one connection sends nearly the same head with each: what differs
//! is a length, a date, an id. A [`HeadTemplate`] is made of a head that was read in full. What fits is
//! equal to that head in every byte outside of the values of its fields. A value that differs is
//! one that [`HeaderValue`] takes, without white space at its ends, and ends where its line does;
//! so a full reading would find the same names with these values, and nothing else. A value that
//! frames the message, says whom it is for or what its body is must be the same; only the length may be
//! another.
//! What does not fit is read in full.

use std::mem;

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue,
    TRANSFER_ENCODING,
};
use memchr::memchr;

use super::stated_length;

/// Heads that are longer than this, or have more lines, are not worth keeping.
const LARGEST: usize = 1024;
const MOST_LINES: usize = 24;

/// After so many heads in a row of which none fitted, no more moulds are made.
const MOST_IN_VAIN: u8 = 8;

/// What a head is read into.
pub trait CacheableHead: Clone {
    /// Its fields, to give some of them other values. `only_length`: none but the body's length.
    fn fields_mut(&mut self, only_length: bool) -> &mut HeaderMap;
}

/// The last head of a connection that was read in full, by which the next ones are known. One
/// that is alone on its connection is not kept.
pub struct HeadCache<H> {
    last: Option<Box<CachedHead<H>>>,
    /// Heads in a row that were read in full.
    in_full: u8,
}

struct CachedHead<H> {
    mould: HeadTemplate,
    /// The head that was read in full, with the values of the last one that fitted.
    head: H,
    /// A bit for each line whose value is not that of the mould.
    filled: u32,
}

impl<H> Default for HeadCache<H> {
    fn default() -> Self {
        HeadCache { last: None, in_full: 0 }
    }
}

impl<H: CacheableHead> HeadCache<H> {
    /// The head at the beginning of these bytes, if it is known, and not longer than that. It is
    /// the last one itself, with other values where some differ.
    pub fn find(&mut self, bytes: &[u8], longest: usize) -> Option<(&H, HeadMatch)> {
        let CachedHead { mould, head, filled } = &mut **self.last.as_mut()?;
        let mut fit = mould.fit(bytes).filter(|fit| fit.length <= longest)?;
        let changed = mem::take(&mut fit.changed);
        if *filled != 0 || !changed.is_empty() {
            let is_length = |line: usize| mould.slots[line].kind == SlotKind::Length;
            let only_length = changed.iter().all(|(line, _)| is_length(*line))
                && (0..mould.slots.len()).all(|line| *filled & 1 << line == 0 || is_length(line));
            *filled = mould.fill(head.fields_mut(only_length), changed, *filled);
        }
        self.in_full = 1;
        Some((head, fit))
    }

    /// A head of so many lines was read in full. The values of its fields are slices of its text.
    pub fn learn(&mut self, head: &H, fields: &HeaderMap, text: &Bytes, lines: usize) {
        self.in_full = self.in_full.saturating_add(1);
        let is_worth_it = (2..=MOST_IN_VAIN).contains(&self.in_full);
        let mould = is_worth_it.then(|| HeadTemplate::of(fields, text, lines)).flatten();
        self.last = mould.map(|mould| Box::new(CachedHead { mould, head: head.clone(), filled: 0 }));
    }
}

/// A head that fitted.
#[derive(Debug, Default)]
pub struct HeadMatch {
    /// In bytes.
    pub length: usize,
    /// The length of the body, where it states another one.
    pub stated: Option<u64>,
    /// Values that differ, by the number of their lines.
    changed: Vec<(usize, HeaderValue)>,
}

/// A head, and where the values of its fields stand.
#[derive(Debug)]
struct HeadTemplate {
    text: Bytes,
    slots: Box<[ValueSlot]>,
}

/// A value.
#[derive(Debug)]
struct ValueSlot {
    from: u16,
    to: u16,
    kind: SlotKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotKind {
    /// It may be another.
    Free,
    /// It may be another length.
    Length,
    /// It must be the same.
    Fixed,
}

impl HeadTemplate {
    /// None of a head with lines that are no fields, or that stand in another order.
    fn of(fields: &HeaderMap, text: &Bytes, lines: usize) -> Option<Self> {
        if text.len() > LARGEST || lines > MOST_LINES || fields.len() != lines {
            return None;
        }
        let mut slots: Vec<ValueSlot> = Vec::with_capacity(lines);
        for (name, value) in fields {
            let from = (value.as_bytes().as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
            let to = from + value.len();
            let kind = kind_of(name)?;
            let is_in_order = slots.last().map_or(0, |slot| usize::from(slot.to)) < from;
            let is_second_length = kind == SlotKind::Length && slots.iter().any(|slot| slot.kind == SlotKind::Length);
            if value.is_empty() || !is_in_order || to >= text.len() || is_second_length {
                return None;
            }
            slots.push(ValueSlot { from: from as u16, to: to as u16, kind });
        }
        Some(HeadTemplate { text: text.clone(), slots: slots.into() })
    }

    fn fit(&self, bytes: &[u8]) -> Option<HeadMatch> {
        if bytes.starts_with(&self.text) {
            return Some(HeadMatch { length: self.text.len(), ..HeadMatch::default() });
        }
        let mut fit = HeadMatch::default();
        let (mut rest, mut known) = (bytes, 0);
        for (line, slot) in self.slots.iter().enumerate() {
            let (from, to) = (usize::from(slot.from), usize::from(slot.to));
            // With the byte behind it: a longer value only begins like this one.
            if let Some(behind) = rest.strip_prefix(&self.text[known..=to]) {
                (rest, known) = (behind, to + 1);
                continue;
            }
            let behind_name = rest.strip_prefix(&self.text[known..from])?;
            let end = memchr(b'\r', &behind_name[..behind_name.len().min(LARGEST)])?;
            let (value, behind) = behind_name.split_at(end);
            let is_trimmed = !value.is_empty() && value.trim_ascii().len() == value.len();
            match slot.kind {
                SlotKind::Fixed => return None,
                _ if !is_trimmed => return None,
                SlotKind::Length => fit.stated = Some(stated_length(value)?),
                SlotKind::Free => {}
            }
            fit.changed.push((line, HeaderValue::from_bytes(value).ok()?));
            (rest, known) = (behind, to);
        }
        let behind = rest.strip_prefix(&self.text[known..])?;
        fit.length = bytes.len() - behind.len();
        Some(fit)
    }

    /// Gives these lines their values, and those that have had others since (`filled`) their own again.
    /// Says which lines have others now.
    fn fill(&self, fields: &mut HeaderMap, changed: Vec<(usize, HeaderValue)>, filled: u32) -> u32 {
        let mut now = 0;
        let mut changed = changed.into_iter().peekable();
        for (line, (place, slot)) in fields.values_mut().zip(&self.slots).enumerate() {
            if let Some((_, value)) = changed.next_if(|(at, _)| *at == line) {
                *place = value;
                now |= 1 << line;
            } else if filled & 1 << line != 0 {
                let own = self.text.slice(usize::from(slot.from)..usize::from(slot.to));
                *place = HeaderValue::from_maybe_shared(own).expect("it was a value when it was read");
            }
        }
        now
    }
}

/// None where more depends on a value than its own line.
fn kind_of(name: &HeaderName) -> Option<SlotKind> {
    let fixed = [CONNECTION, HOST, TRANSFER_ENCODING, CONTENT_TYPE, CONTENT_ENCODING];
    match name {
        name if *name == EXPECT => None,
        name if *name == CONTENT_LENGTH => Some(SlotKind::Length),
        name if fixed.contains(name) => Some(SlotKind::Fixed),
        _ => Some(SlotKind::Free),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "POST / HTTP/1.1\r\nhost: g\r\nx-id:  a b\r\ncontent-length: 12\r\nconnection: x\r\n\r\n";

    /// The fields of a head whose lines end in CRLF.
    fn fields(text: &Bytes) -> (HeaderMap, usize) {
        let mut fields = HeaderMap::new();
        let lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').skip(1).filter(|line| line.len() > 1).collect();
        for line in &lines {
            let colon = line.iter().position(|byte| *byte == b':').unwrap();
            let value = text.slice_ref(line[colon + 1..].trim_ascii());
            fields.append(
                HeaderName::from_bytes(&line[..colon]).unwrap(),
                HeaderValue::from_maybe_shared(value).unwrap(),
            );
        }
        (fields, lines.len())
    }

    impl CacheableHead for HeaderMap {
        fn fields_mut(&mut self, _: bool) -> &mut HeaderMap {
            self
        }
    }

    fn learn(known: &mut HeadCache<HeaderMap>, head: &str) {
        let text = Bytes::copy_from_slice(head.as_bytes());
        let (fields, lines) = fields(&text);
        known.learn(&fields, &fields, &text, lines);
    }

    type Fields = Vec<(String, String)>;

    /// What is found in `bytes` by who has read `head` twice: the length of the head, of its
    /// body, and its fields.
    fn found(head: &str, bytes: &str) -> Option<(usize, Option<u64>, Fields)> {
        let mut known = HeadCache::default();
        learn(&mut known, head);
        learn(&mut known, head);
        let (fields, fit) = known.find(bytes.as_bytes(), usize::MAX)?;
        let (length, stated) = (fit.length, fit.stated);
        let field = |(name, value): (&HeaderName, &HeaderValue)| {
            (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        Some((length, stated, fields.iter().map(field).collect()))
    }

    fn with_value(from: &str, to: &str) -> String {
        HEAD.replacen(from, to, 1)
    }

    #[test]
    fn a_head_that_differs_in_values_is_found_with_those_values() {
        for (from, to, stated, id, length) in [
            ("", "", None, "a b", "12"),
            ("a b", "a", None, "a", "12"),
            ("a b", "another:\t\u{e9}\"x\"", None, "another:\t\u{e9}\"x\"", "12"),
            ("12", "1", Some(1), "a b", "1"),
            ("12", "123", Some(123), "a b", "123"),
        ] {
            let bytes = with_value(from, to);
            let expected = [("host", "g"), ("x-id", id), ("content-length", length), ("connection", "x")];
            let (taken, said, fields) = found(HEAD, &format!("{bytes}{{\"body\": 1}}\r\n\r\n")).unwrap();
            assert_eq!((taken, said), (bytes.len(), stated));
            assert_eq!(fields, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        }
    }

    #[test]
    fn a_value_that_was_another_meanwhile_is_its_own_again() {
        let mut known = HeadCache::default();
        learn(&mut known, HEAD);
        learn(&mut known, HEAD);
        for (id, length) in [("a b", "12"), ("c", "12"), ("c", "7"), ("a b", "7"), ("a b", "12"), ("d", "12")] {
            let bytes = HEAD.replacen("a b", id, 1).replacen("12", length, 1);
            let (fields, _) = known.find(bytes.as_bytes(), usize::MAX).unwrap();
            assert_eq!(["x-id", "content-length", "host"].map(|name| &fields[name]), [id, length, "g"]);
        }
    }

    #[test]
    fn what_says_more_than_another_value_is_read_in_full() {
        for (from, to) in [
            ("POST /", "POST /a"),
            ("HTTP/1.1", "HTTP/1.0"),
            ("host: g", "host: h"),
            ("connection: x", "connection: close"),
            ("a b", ""),
            ("a b", "a b "),
            ("a b", "\ta"),
            ("a b", "a\nb: c"),
            ("a b", "a\rb"),
            ("a b", "a\r\nb: c"),
            ("a b", "a\r\n b"),
            ("a b", "a\0"),
            ("x-id", "x-ip"),
            ("x-id", "X-Id"),
            ("x-id:", "x-id :"),
            ("12", "1 2"),
            ("12", "+2"),
            ("12", "1, 1"),
            ("12", ""),
            ("12", "99999999999999999999"),
            ("12\r\n", "12\n"),
            ("12\r\n", "12\r\n\r\n"),
            ("12\r\n", "12\r\ncontent-length: 12\r\n"),
            ("\r\n\r\n", "\r\n"),
        ] {
            let bytes = with_value(from, to);
            assert_eq!(found(HEAD, &bytes), None, "{bytes:?}");
        }
        for end in 0..HEAD.len() {
            assert_eq!(found(HEAD, &HEAD[..end]), None, "{end}");
        }
    }

    #[test]
    fn no_mould_is_made_of_heads_on_which_more_depends_or_that_are_large() {
        let head = |lines: &str| format!("HTTP/1.1 200 OK\r\n{lines}\r\n");
        for lines in [
            "expect: 100-continue\r\n",
            "a:\r\n",
            "content-length: 1\r\ncontent-length: 1\r\n",
            "a: 1\r\nb: 2\r\na: 3\r\n",
            &"a: 1\r\n".repeat(MOST_LINES + 1),
            &format!("a: {}\r\n", "1".repeat(LARGEST)),
        ] {
            assert_eq!(found(&head(lines), &head(lines)), None, "{lines}");
        }
        for lines in ["", "a: 1\r\na: 2\r\nb: 3\r\n"] {
            assert!(found(&head(lines), &head(lines)).is_some(), "{lines}");
        }
    }

    #[test]
    fn one_head_alone_is_not_kept_and_heads_that_never_fit_are_given_up() {
        let mut known = HeadCache::default();
        learn(&mut known, HEAD);
        assert!(known.find(HEAD.as_bytes(), usize::MAX).is_none());
        for _ in 2..=MOST_IN_VAIN {
            learn(&mut known, HEAD);
            assert!(known.last.is_some());
        }
        assert!(known.find(HEAD.as_bytes(), usize::MAX).is_some(), "which is worth trying on");
        for _ in 2..=MOST_IN_VAIN {
            learn(&mut known, HEAD);
            assert!(known.last.is_some());
        }
        learn(&mut known, HEAD);
        assert!(known.last.is_none());
    }
}

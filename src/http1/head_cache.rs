//! A cache of the last head on a connection.
//!
//! Consecutive messages on one connection mostly have the same head, except for a length, a date or an
//! id. A [`HeadTemplate`] is made from a fully parsed head. Later bytes match it if they are equal
//! outside the field values, and each differing value is a valid [`HeaderValue`] without surrounding
//! white space that ends at its line end; a full parse would thus give the same names with these
//! values. Values that frame the message or address it must be equal, except the length. Heads that
//! do not match are parsed in full.
//!
//! About 6,000 -> 1,100 instructions per head (`docs/performance.md`).

use std::mem;

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue,
    TRANSFER_ENCODING,
};
use memchr::memchr;

use super::stated_length;

/// Longer heads, or heads with more lines, are not cached.
const LARGEST: usize = 1024;
const MOST_LINES: usize = 24;

/// After this many consecutive misses no more templates are made.
const MOST_IN_VAIN: u8 = 8;

/// A parsed head.
pub trait CacheableHead: Clone {
    /// Its headers, to replace some of their values. `only_length`: none but the body's length.
    fn fields_mut(&mut self, only_length: bool) -> &mut HeaderMap;
}

/// The last fully parsed head of a connection, as a template for the next ones. The first head of a
/// connection is not cached, because it may be the only one.
pub struct HeadCache<H> {
    last: Option<Box<CachedHead<H>>>,
    /// Consecutive heads that were parsed in full.
    in_full: u8,
}

struct CachedHead<H> {
    template: HeadTemplate,
    /// The parsed head, with the values of the last match.
    head: H,
    /// One bit per line whose value differs from the template's.
    filled: u32,
}

impl<H> Default for HeadCache<H> {
    fn default() -> Self {
        HeadCache { last: None, in_full: 0 }
    }
}

impl<H: CacheableHead> HeadCache<H> {
    /// Returns the cached head if `bytes` starts with it (at most `longest` bytes), with changed header
    /// values replaced.
    pub fn find(&mut self, bytes: &[u8], longest: usize) -> Option<(&H, HeadMatch)> {
        let CachedHead { template, head, filled } = &mut **self.last.as_mut()?;
        let mut fit = template.fit(bytes).filter(|fit| fit.length <= longest)?;
        let changed = mem::take(&mut fit.changed);
        if *filled != 0 || !changed.is_empty() {
            let is_length = |line: usize| template.slots[line].kind == SlotKind::Length;
            let only_length = changed.iter().all(|(line, _)| is_length(*line))
                && (0..template.slots.len()).all(|line| *filled & 1 << line == 0 || is_length(line));
            *filled = template.fill(head.fields_mut(only_length), changed, *filled);
        }
        self.in_full = 1;
        Some((head, fit))
    }

    /// Caches a fully parsed head of `lines` lines. The values of `fields` must be slices of `text`.
    pub fn learn(&mut self, head: &H, fields: &HeaderMap, text: &Bytes, lines: usize) {
        self.in_full = self.in_full.saturating_add(1);
        let is_worth_it = (2..=MOST_IN_VAIN).contains(&self.in_full);
        let template = is_worth_it.then(|| HeadTemplate::of(fields, text, lines)).flatten();
        self.last = template.map(|template| Box::new(CachedHead { template, head: head.clone(), filled: 0 }));
    }
}

/// A matched head.
#[derive(Debug, Default)]
pub struct HeadMatch {
    /// Length of the head, bytes.
    pub length: usize,
    /// The body's length, if it differs from the template's.
    pub stated: Option<u64>,
    /// Changed values, by line number.
    changed: Vec<(usize, HeaderValue)>,
}

/// A head, and the positions of its field values.
#[derive(Debug)]
struct HeadTemplate {
    text: Bytes,
    slots: Box<[ValueSlot]>,
}

/// One field value.
#[derive(Debug)]
struct ValueSlot {
    from: u16,
    to: u16,
    kind: SlotKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotKind {
    /// May differ.
    Free,
    /// May be another length.
    Length,
    /// Must be equal.
    Fixed,
}

impl HeadTemplate {
    /// None if the head has lines that are not fields, or fields in another order than the map.
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
            // Includes the byte behind the value, because a longer value may begin like this one.
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

    /// Sets the changed values, and restores the template's values of the lines in `filled`. Returns the
    /// lines that now differ.
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

/// None if other lines depend on this value.
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

    /// Result of a cache that has parsed `head` twice, for `bytes`: head length, body length, and
    /// fields.
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
    fn no_template_is_made_of_heads_on_which_more_depends_or_that_are_large() {
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

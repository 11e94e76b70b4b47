//! Templates of repeated events and response bodies.
//!
//! Most events differ from the previous one only in their text and in numbers: a sequence number, a
//! choice's index, token counts. A [`Template`] holds all other bytes of an event that was parsed in
//! full. An event matches if those bytes are equal, each text is the inside of one non-empty JSON string,
//! and each number is a number; a full parse would then find the same values in the same places. Text
//! that looks like a key or a finish reason cannot mislead it, because it cannot leave its string without
//! an unescaped quote. Events that do not match are parsed in full.
//!
//! A template shared with other responses leaves out every string except the few words that identify the
//! kind of object, so it keeps nothing of a prompt or a response.

use std::ops::Range;

use crate::json;

use super::parsed_event::Reason;
use super::usage::UsageCounts;

/// Larger events or bodies get no template.
const LARGEST: usize = 1024;
const LARGEST_SHARED: usize = 2048;

/// More placeholders make a template not worth matching.
const MOST: usize = 32;

/// Longer finish reasons are parsed in full.
const LONGEST_REASON: usize = 32;

/// A part that may differ between events or bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placeholder {
    /// The text that makes the event a token event; in a body, visible text. Not empty.
    Text,
    /// Text of a body whose bytes are not counted. Not empty.
    Hidden,
    /// A string without meaning here, which differs between responses but not within a stream.
    Label,
    /// A finish reason. Not empty.
    Finish,
    /// A number without meaning here.
    Ignored,
    /// The choice's index.
    Index,
    /// Responses: the event's sequence number.
    Sequence,
    /// A count of `usage`.
    Input,
    Output,
    Cached,
    Reasoning,
    CacheRead,
    CacheWritten,
}

/// The placeholders of one event or body, in order.
#[derive(Clone, Debug)]
pub(super) struct Placeholders {
    found: [(u32, u32, Placeholder); MOST],
    len: usize,
    /// The bytes between the placeholders must not be shared with other responses.
    is_private: bool,
}

impl Default for Placeholders {
    fn default() -> Self {
        Placeholders { found: [(0, 0, Placeholder::Ignored); MOST], len: 0, is_private: false }
    }
}

impl Placeholders {
    /// Adds a placeholder at the range `at`.
    pub(super) fn add(&mut self, slot: Placeholder, at: Range<usize>) {
        match (self.found.get_mut(self.len), u32::try_from(at.end)) {
            (Some(free), Ok(end)) => {
                *free = (at.start as u32, end, slot);
                self.len += 1;
            }
            _ => self.forget(),
        }
    }

    /// Marks the positions as unknown, so that no template is made.
    pub(super) fn forget(&mut self) {
        self.len = MOST + 1;
    }

    /// Marks the bytes between the placeholders as private to this response.
    pub(super) fn keep_private(&mut self) {
        self.is_private = true;
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Marks the text placeholders from index `from` on as hidden.
    pub(super) fn hide(&mut self, from: usize) {
        for (.., slot) in
            self.found.iter_mut().take(self.len).skip(from).filter(|(.., slot)| *slot == Placeholder::Text)
        {
            *slot = Placeholder::Hidden;
        }
    }

    fn all(&self) -> Option<&[(u32, u32, Placeholder)]> {
        self.found.get(..self.len)
    }
}

/// The placeholder values of an event or body that matched a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TemplateMatch {
    /// Length of the event, bytes.
    pub(super) length: usize,
    pub(super) index: Option<u64>,
    pub(super) sequence_number: Option<u64>,
    pub(super) counts: UsageCounts,
    /// Bytes of visible text.
    pub(super) bytes: u64,
    pub(super) finish: Option<Reason>,
}

/// All bytes of an event or body except its placeholders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    bytes: Box<[u8]>,
    /// Positions in `bytes` of the placeholders, and their kinds.
    slots: Box<[(u32, Placeholder)]>,
}

impl Template {
    /// Makes a template of an event with one text; placeholder positions count from `data_at`. The first
    /// template of a stream is `tight`: it also requires equal indices and meaningless numbers, which holds
    /// for most streams and is faster to compare.
    pub(super) fn of(event: &[u8], data_at: usize, slots: &Placeholders, is_tight: bool) -> Option<Template> {
        let slots = slots.all()?;
        let texts = slots.iter().filter(|(.., slot)| *slot == Placeholder::Text).count();
        if event.len() > LARGEST || texts != 1 {
            return None;
        }
        let stay = |slot| match slot {
            Placeholder::Label | Placeholder::Finish => true,
            Placeholder::Ignored | Placeholder::Index => is_tight,
            _ => false,
        };
        Template::cast(event, data_at, slots, stay)
    }

    /// Makes a template shared with other responses, of an event or a whole body.
    pub(super) fn shared(whole: &[u8], data_at: usize, slots: &Placeholders) -> Option<Template> {
        let slots = slots.all().filter(|_| !slots.is_private)?;
        Template::cast(whole, data_at, slots, |_| false).filter(|template| template.bytes.len() <= LARGEST_SHARED)
    }

    fn cast(
        whole: &[u8],
        data_at: usize,
        slots: &[(u32, u32, Placeholder)],
        stays: impl Fn(Placeholder) -> bool,
    ) -> Option<Template> {
        let mut bytes = Vec::with_capacity(whole.len().min(LARGEST_SHARED));
        let (mut places, mut kept) = (Vec::with_capacity(slots.len()), 0);
        for (start, end, slot) in slots.iter().filter(|(.., slot)| !stays(*slot)) {
            bytes.extend_from_slice(whole.get(kept..data_at + *start as usize)?);
            places.push((bytes.len() as u32, *slot));
            kept = data_at + *end as usize;
        }
        bytes.extend_from_slice(whole.get(kept..)?);
        Some(Template { bytes: bytes.into(), slots: places.into() })
    }

    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.bytes.len() + size_of_val(&*self.slots)
    }

    #[cfg(test)]
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// Matches an event at the start of `bytes` that differs only in its non-empty text and its
    /// numbers.
    pub(super) fn fits(&self, bytes: &[u8]) -> Option<TemplateMatch> {
        let mut fit = TemplateMatch::default();
        let rest = self.fill(bytes, &mut fit)?.strip_prefix(self.tail())?;
        // Further line ends would belong to this event.
        if matches!(rest.first(), Some(b'\n' | b'\r')) {
            return None;
        }
        fit.length = bytes.len() - rest.len();
        Some(fit)
    }

    /// Matches a whole event or body that differs only in its placeholders. Compares the end first, because
    /// an incomplete or different one mostly ends differently, which is cheaper to notice than a long
    /// text.
    pub(super) fn fits_whole(&self, bytes: &[u8]) -> Option<TemplateMatch> {
        let (mut fit, tail) = (TemplateMatch::default(), self.tail());
        let is_whole = bytes.ends_with(tail) && self.fill(bytes, &mut fit)?.len() == tail.len();
        is_whole.then_some(fit)
    }

    /// Reads the placeholders and returns the bytes behind the last one.
    #[inline]
    fn fill<'a>(&self, bytes: &'a [u8], fit: &mut TemplateMatch) -> Option<&'a [u8]> {
        let (mut rest, mut fixed) = (bytes, 0);
        for (at, slot) in &self.slots {
            let at = *at as usize;
            rest = rest.strip_prefix(&self.bytes[fixed..at])?;
            fixed = at;
            rest = fit.take(*slot, rest)?;
        }
        Some(rest)
    }

    /// Positions of the placeholders in a matching event.
    pub(super) fn slots_in(&self, event: &[u8]) -> Option<Placeholders> {
        let (mut slots, mut at, mut fixed) = (Placeholders::default(), 0, 0);
        for (place, slot) in &self.slots {
            let start = at + *place as usize - fixed;
            fixed = *place as usize;
            at = event.len() - TemplateMatch::default().take(*slot, event.get(start..)?)?.len();
            slots.add(*slot, start..at);
        }
        Some(slots)
    }

    /// The bytes behind the last placeholder.
    fn tail(&self) -> &[u8] {
        &self.bytes[self.slots.last().map_or(0, |(at, _)| *at as usize)..]
    }
}

impl TemplateMatch {
    /// Reads one placeholder and returns the bytes behind it.
    #[inline(always)]
    fn take<'a>(&mut self, slot: Placeholder, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let place = match slot {
            Placeholder::Text | Placeholder::Hidden | Placeholder::Label => {
                let (decoded, rest) = behind_text(bytes)?;
                self.bytes += if slot == Placeholder::Text { decoded as u64 } else { 0 };
                return (decoded > 0 || slot == Placeholder::Label).then_some(rest);
            }
            Placeholder::Finish => {
                let (reason, rest) = word(bytes)?;
                self.finish = Reason::of(reason);
                return Some(rest);
            }
            Placeholder::Ignored => return behind_number(bytes),
            Placeholder::Index => &mut self.index,
            Placeholder::Sequence => &mut self.sequence_number,
            Placeholder::Input => &mut self.counts.input,
            Placeholder::Output => &mut self.counts.output,
            Placeholder::Cached => &mut self.counts.cached,
            Placeholder::Reasoning => &mut self.counts.reasoning,
            Placeholder::CacheRead => &mut self.counts.cache_read,
            Placeholder::CacheWritten => &mut self.counts.cache_written,
        };
        let (count, rest) = count(bytes)?;
        *place = Some(count);
        Some(rest)
    }
}

/// Digits of the longest count that is read: few enough never to overflow.
const MOST_DIGITS: usize = 18;

/// How many digits the count has with which the bytes begin.
fn digits(bytes: &[u8]) -> Option<usize> {
    let digits = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    is_count(bytes, digits).then_some(digits)
}

/// Whether the first `digits` bytes are a count.
fn is_count(bytes: &[u8], digits: usize) -> bool {
    (1..=MOST_DIGITS).contains(&digits) && (bytes[0] != b'0' || digits == 1)
}

/// A count, and the bytes behind it.
fn count(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (mut count, mut digits) = (0, 0);
    while let Some(digit @ b'0'..=b'9') = bytes.get(digits) {
        if digits == MOST_DIGITS {
            return None;
        }
        count = count * 10 + u64::from(digit - b'0');
        digits += 1;
    }
    is_count(bytes, digits).then(|| (count, &bytes[digits..]))
}

/// The bytes behind a number of any kind.
fn behind_number(bytes: &[u8]) -> Option<&[u8]> {
    match digits(bytes) {
        Some(digits) if !matches!(bytes.get(digits), Some(b'.' | b'e' | b'E')) => bytes.get(digits..),
        _ => match json::number_run(bytes) {
            0 => None,
            length => bytes.get(length..),
        },
    }
}

/// A short non-empty word without escapes, and the bytes behind it, from its closing quote on.
fn word(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, is_ascii) = json::plain_run(bytes);
    let is_word = is_ascii && (1..=LONGEST_REASON).contains(&length) && bytes.get(length) == Some(&b'"');
    is_word.then(|| bytes.split_at(length))
}

/// Decoded length of the inside of a JSON string, and the bytes behind it, from its closing quote
/// on.
#[inline(always)]
fn behind_text(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (mut at, mut decoded, mut is_ascii) = (0, 0, true);
    loop {
        let (plain, plain_is_ascii) = json::plain_run(&bytes[at..]);
        at += plain;
        decoded += plain;
        is_ascii &= plain_is_ascii;
        match bytes.get(at)? {
            b'"' => break,
            b'\\' => {
                let (length, stands_for) = escape(&bytes[at + 1..])?;
                at += 1 + length;
                decoded += stands_for;
            }
            _ => return None,
        }
    }
    let (inside, rest) = bytes.split_at(at);
    (is_ascii || std::str::from_utf8(inside).is_ok()).then_some((decoded, rest))
}

/// Raw and decoded length of the escape behind a backslash.
fn escape(behind: &[u8]) -> Option<(usize, usize)> {
    match behind.first()? {
        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some((1, 1)),
        b'u' => match (unit(behind)?, behind.get(5..)) {
            (0xD800..=0xDBFF, Some([b'\\', low @ ..])) if matches!(unit(low), Some(0xDC00..=0xDFFF)) => Some((11, 4)),
            // A lone surrogate decodes to the replacement character, which has three bytes as well.
            (unit, _) => Some((5, char::from_u32(unit).map_or(3, char::len_utf8))),
        },
        _ => None,
    }
}

/// The UTF-16 unit spelled by `u` and four digits.
fn unit(escape: &[u8]) -> Option<u32> {
    let [b'u', digits @ ..] = escape.first_chunk::<5>()? else { return None };
    digits.iter().try_fold(0, |unit, digit| Some(unit << 4 | char::from(*digit).to_digit(16)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A template of an event in which `TEXT` is the text and `7` the number.
    fn template(event: &str, number: Placeholder) -> Template {
        let mut slots = Placeholders::default();
        let mut found = [("TEXT", Placeholder::Text), ("7", number)].map(|(part, slot)| (event.find(part), part, slot));
        found.sort_by_key(|(at, ..)| *at);
        for (at, part, slot) in found {
            if let Some(at) = at {
                slots.add(slot, at - 2..at - 2 + part.len());
            }
        }
        Template::of(event.as_bytes(), 2, &slots, false).unwrap()
    }

    #[test]
    fn only_the_text_may_differ() {
        let template = template("data: {\"a\":\"TEXT\",\"finish_reason\":null}\n\n", Placeholder::Ignored);
        let fits = |text: &str| template.fits(text.as_bytes()).is_some_and(|fit| fit.length == text.len());
        assert!(fits("data: {\"a\":\"x\",\"finish_reason\":null}\n\n"));
        assert!(fits("data: {\"a\":\"\\\"finish_reason\\\":\\\"stop\\\"\",\"finish_reason\":null}\n\n"));
        assert!(fits("data: {\"a\":\"\\ud83d\",\"finish_reason\":null}\n\n"));
        assert!(!fits("data: {\"a\":\"\",\"finish_reason\":null}\n\n"));
        assert!(!fits("data: {\"a\":\"x\",\"finish_reason\":\"stop\"}\n\n"));
        assert!(!fits("data: {\"a\":\"x\",\"finish_reason\":\"stop\",\"b\":\"\",\"finish_reason\":null}\n\n"));
        assert!(!fits("data: {\"a\":\"\\\",\"finish_reason\":null}\n\n"));
        assert!(!fits("data: {\"a\":\"x\ny\",\"finish_reason\":null}\n\n"));
        assert!(!fits("data: {\"a\":\"x\\q\",\"finish_reason\":null}\n\n"));
        assert!(!fits("data: {\"a\":\"\\u12g4\",\"finish_reason\":null}\n\n"));
        assert!(!fits("data: {\"a\":\"x\",\"finish_reason\":null}\n\n\n"));
        assert!(!fits("data: {\"a\":\"x\",\"finish_reason\":null}\n"));
        assert!(template.fits("data: {\"a\":\"\u{e9}\",\"finish_reason\":null}\n\n".as_bytes()).is_some());
        assert!(template.fits(b"data: {\"a\":\"\xe9\",\"finish_reason\":null}\n\n").is_none());
    }

    #[test]
    fn bytes_after_the_event_are_left() {
        let template = template("data: {\"a\":\"TEXT\"}\n\n", Placeholder::Ignored);
        let fit = template.fits(b"data: {\"a\":\"abc\"}\n\ndata: {\"a\":\"d\"}\n\n").unwrap();
        assert_eq!(fit.length, "data: {\"a\":\"abc\"}\n\n".len());
    }

    #[test]
    fn a_number_on_either_side_may_differ_too() {
        let behind = template("data: {\"d\":\"TEXT\",\"n\":7}\n\n", Placeholder::Sequence);
        let number = |event: &str| behind.fits(event.as_bytes()).map(|fit| fit.sequence_number);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":1234}\n\n"), Some(Some(1234)));
        assert_eq!(number("data: {\"d\":\"y\",\"n\":01}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":1.5}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"\",\"n\":8}\n\n"), None);
        let before = template("data: {\"n\":7,\"d\":\"TEXT\"}\n\n", Placeholder::Output);
        let number = |event: &str| before.fits(event.as_bytes()).map(|fit| fit.counts.output);
        assert_eq!(number("data: {\"n\":10,\"d\":\"y\"}\n\n"), Some(Some(10)));
        assert_eq!(number("data: {\"n\":0,\"d\":\"y\"}\n\n"), Some(Some(0)));
        assert_eq!(number("data: {\"n\":-1,\"d\":\"y\"}\n\n"), None);
        assert_eq!(number("data: {\"n\":1e5,\"d\":\"y\"}\n\n"), None);
    }
}

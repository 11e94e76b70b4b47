//! The shortcut for the steady state of a stream.
//!
//! Most events differ from their predecessor only in the text they carry, and in numbers: a
//! sequence number, a choice's index, counts of tokens. A [`Mould`] is made from an event
//! that was read in full: all its bytes but those. What fits is equal to that event in every
//! other byte; what stands in the place of the text is the inside of one non-empty JSON
//! string, and in the place of a number a number. So a full reading would find the same
//! things in the same places. There is nothing to search for and nothing to be fooled by:
//! text that looks like a key or a finish reason cannot leave its string without a bare
//! quote. What does not fit is read in full.

use std::ops::Range;

use crate::json;

/// Events longer than this are not worth keeping.
const LARGEST: usize = 1024;

/// More slots than this make a mould not worth trying.
const MOST: usize = 12;

/// What may differ from event to event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// The text that makes the event a token.
    Text,
    /// A number that decides nothing.
    Ignored,
    /// The index of the choice.
    Index,
    /// Responses: the number of the event.
    Sequence,
    /// A count of `usage`.
    Input,
    Output,
    Cached,
    Reasoning,
    CacheRead,
    CacheWritten,
}

/// The slots of one event: where each stands, in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    found: [(u32, u32, Slot); MOST],
    len: usize,
    texts: usize,
}

impl Default for Slots {
    fn default() -> Self {
        Slots { found: [(0, 0, Slot::Ignored); MOST], len: 0, texts: 0 }
    }
}

impl Slots {
    /// What stands at `at` may differ.
    pub(super) fn add(&mut self, slot: Slot, at: Range<usize>) {
        if let Some(free) = self.found.get_mut(self.len)
            && at.end <= LARGEST
        {
            *free = (at.start as u32, at.end as u32, slot);
        }
        self.len += 1;
        self.texts += usize::from(slot == Slot::Text);
    }

    /// Nothing is known of where the slots stand.
    pub(super) fn forget(&mut self) {
        self.texts = 0;
    }
}

/// An event that a mould fitted: how long it is, and its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fit {
    pub(super) length: usize,
    pub(super) index: Option<u64>,
    pub(super) sequence_number: Option<u64>,
    pub(super) input: Option<u64>,
    pub(super) output: Option<u64>,
    pub(super) cached: Option<u64>,
    pub(super) reasoning: Option<u64>,
    pub(super) cache_read: Option<u64>,
    pub(super) cache_written: Option<u64>,
}

/// All bytes of an event but its text and its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mould {
    bytes: Box<[u8]>,
    /// Where in `bytes` something was taken out, and what.
    slots: Box<[(u32, Slot)]>,
}

impl Mould {
    /// Makes a mould of an event that has one text; the slots are counted from `data_at`. The
    /// first mould of a stream is `tight`: it takes for granted that an index and numbers
    /// that decide nothing stay, which is true of most streams and quicker to compare.
    pub(super) fn of(event: &[u8], data_at: usize, slots: &Slots, is_tight: bool) -> Option<Mould> {
        if event.len() > LARGEST || slots.len > MOST || slots.texts != 1 {
            return None;
        }
        let (mut bytes, mut places, mut kept) = (Vec::with_capacity(event.len()), Vec::with_capacity(slots.len), 0);
        for (start, end, slot) in &slots.found[..slots.len] {
            if is_tight && matches!(slot, Slot::Ignored | Slot::Index) {
                continue;
            }
            let (start, end) = (data_at + *start as usize, data_at + *end as usize);
            bytes.extend_from_slice(event.get(kept..start)?);
            places.push((bytes.len() as u32, *slot));
            kept = end;
        }
        bytes.extend_from_slice(event.get(kept..)?);
        Some(Mould { bytes: bytes.into(), slots: places.into() })
    }

    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.bytes.len() + size_of_val(&*self.slots)
    }

    /// Whether `bytes` begin with an event that differs from the mould's only in its text,
    /// which is not empty, and in its numbers.
    pub(super) fn fits(&self, bytes: &[u8]) -> Option<Fit> {
        let (mut fit, mut rest, mut fixed) = (Fit::default(), bytes, 0);
        for (at, slot) in &self.slots {
            let at = *at as usize;
            rest = rest.strip_prefix(&self.bytes[fixed..at])?;
            fixed = at;
            rest = if *slot == Slot::Text { behind_text(rest)? } else { behind_number(rest, fit.place(*slot))? };
        }
        rest = rest.strip_prefix(&self.bytes[fixed..])?;
        // More line ends would belong to this event, too.
        if matches!(rest.first(), Some(b'\n' | b'\r')) {
            return None;
        }
        fit.length = bytes.len() - rest.len();
        Some(fit)
    }
}

impl Fit {
    fn place(&mut self, slot: Slot) -> Option<&mut Option<u64>> {
        match slot {
            Slot::Text | Slot::Ignored => None,
            Slot::Index => Some(&mut self.index),
            Slot::Sequence => Some(&mut self.sequence_number),
            Slot::Input => Some(&mut self.input),
            Slot::Output => Some(&mut self.output),
            Slot::Cached => Some(&mut self.cached),
            Slot::Reasoning => Some(&mut self.reasoning),
            Slot::CacheRead => Some(&mut self.cache_read),
            Slot::CacheWritten => Some(&mut self.cache_written),
        }
    }
}

/// What stands behind a count, small enough never to overflow, which goes to `place`.
fn behind_number<'a>(bytes: &'a [u8], place: Option<&mut Option<u64>>) -> Option<&'a [u8]> {
    let digits = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if !(1..=18).contains(&digits) || (bytes[0] == b'0' && digits > 1) {
        return None;
    }
    let (digits, rest) = bytes.split_at(digits);
    if let Some(place) = place {
        *place = Some(digits.iter().fold(0, |count, digit| count * 10 + u64::from(digit - b'0')));
    }
    Some(rest)
}

/// What stands behind the inside of a JSON string that is not empty: its closing quote
/// first.
fn behind_text(bytes: &[u8]) -> Option<&[u8]> {
    let (mut at, mut is_ascii) = (0, true);
    loop {
        let (plain, plain_is_ascii) = json::plain_run(&bytes[at..]);
        at += plain;
        is_ascii &= plain_is_ascii;
        match bytes.get(at)? {
            b'"' => break,
            b'\\' => at += 1 + escape(&bytes[at + 1..])?,
            _ => return None,
        }
    }
    let (inside, rest) = bytes.split_at(at);
    let is_text = at > 0 && (is_ascii || std::str::from_utf8(inside).is_ok());
    is_text.then_some(rest)
}

/// Bytes of the escape behind a backslash.
fn escape(bytes: &[u8]) -> Option<usize> {
    match bytes.first()? {
        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(1),
        b'u' => bytes.get(1..5)?.iter().all(u8::is_ascii_hexdigit).then_some(5),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mould of an event in which `TEXT` is the text and `7` the number of the slot.
    fn mould(event: &str, number: Slot) -> Mould {
        let mut slots = Slots::default();
        let mut found = [("TEXT", Slot::Text), ("7", number)].map(|(part, slot)| (event.find(part), part, slot));
        found.sort_by_key(|(at, ..)| *at);
        for (at, part, slot) in found {
            if let Some(at) = at {
                slots.add(slot, at - 2..at - 2 + part.len());
            }
        }
        Mould::of(event.as_bytes(), 2, &slots, false).unwrap()
    }

    #[test]
    fn only_the_text_may_differ() {
        let mould = mould("data: {\"a\":\"TEXT\",\"finish_reason\":null}\n\n", Slot::Ignored);
        let fits = |text: &str| mould.fits(text.as_bytes()).is_some_and(|fit| fit.length == text.len());
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
        assert!(mould.fits("data: {\"a\":\"\u{e9}\",\"finish_reason\":null}\n\n".as_bytes()).is_some());
        assert!(mould.fits(b"data: {\"a\":\"\xe9\",\"finish_reason\":null}\n\n").is_none());
    }

    #[test]
    fn what_follows_the_event_is_left() {
        let mould = mould("data: {\"a\":\"TEXT\"}\n\n", Slot::Ignored);
        let fit = mould.fits(b"data: {\"a\":\"abc\"}\n\ndata: {\"a\":\"d\"}\n\n").unwrap();
        assert_eq!(fit.length, "data: {\"a\":\"abc\"}\n\n".len());
    }

    #[test]
    fn a_number_on_either_side_may_differ_too() {
        let behind = mould("data: {\"d\":\"TEXT\",\"n\":7}\n\n", Slot::Sequence);
        let number = |event: &str| behind.fits(event.as_bytes()).map(|fit| fit.sequence_number);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":1234}\n\n"), Some(Some(1234)));
        assert_eq!(number("data: {\"d\":\"y\",\"n\":01}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":1.5}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"\",\"n\":8}\n\n"), None);
        let before = mould("data: {\"n\":7,\"d\":\"TEXT\"}\n\n", Slot::Output);
        let number = |event: &str| before.fits(event.as_bytes()).map(|fit| fit.output);
        assert_eq!(number("data: {\"n\":10,\"d\":\"y\"}\n\n"), Some(Some(10)));
        assert_eq!(number("data: {\"n\":0,\"d\":\"y\"}\n\n"), Some(Some(0)));
        assert_eq!(number("data: {\"n\":-1,\"d\":\"y\"}\n\n"), None);
        assert_eq!(number("data: {\"n\":1e5,\"d\":\"y\"}\n\n"), None);
    }
}

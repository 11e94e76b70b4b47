//! The shortcut for what is nearly always the same: the events of a stream, the whole answers
//! and the streams of an engine.
//!
//! Most events differ from their predecessor only in the text they carry, and in numbers: a
//! sequence number, a choice's index, counts of tokens. A [`Template`] is made from an event
//! that was read in full: all its bytes but those. What fits is equal to that event in every
//! other byte; what stands in the place of the text is the inside of one non-empty JSON
//! string, and in the place of a number a number. So a full reading would find the same
//! things in the same places. There is nothing to search for and nothing to be fooled by:
//! text that looks like a key or a finish reason cannot leave its string without a bare
//! quote. What does not fit is read in full.
//!
//! A mould that other answers see, of a whole body or an event, leaves out every string, but for
//! the few words that say what kind of object it is: nothing of a prompt or an answer stays in it.

use std::ops::Range;

use crate::json;

use super::sight::Reason;
use super::usage::UsageCounts;

/// Moulds larger than this are not worth keeping.
const LARGEST: usize = 1024;
const LARGEST_SHARED: usize = 2048;

/// More slots than this make a mould not worth trying.
const MOST: usize = 32;

/// A finish reason that is longer is read in full.
const LONGEST_REASON: usize = 32;

/// What may differ from event to event, or from body to body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placeholder {
    /// The text that makes the event a token; in a body visible text. Not empty.
    Text,
    /// Text of a body whose bytes do not count. Not empty.
    Hidden,
    /// A string that decides nothing: another in the next answer, the same in the next event.
    Label,
    /// Why an answer ended. Not empty.
    Finish,
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

/// The slots of one event or body: where each stands, in order.
#[derive(Clone, Debug)]
pub(super) struct Placeholders {
    found: [(u32, u32, Placeholder); MOST],
    len: usize,
    /// What stands between the slots is not for other answers' moulds.
    is_private: bool,
}

impl Default for Placeholders {
    fn default() -> Self {
        Placeholders { found: [(0, 0, Placeholder::Ignored); MOST], len: 0, is_private: false }
    }
}

impl Placeholders {
    /// What stands at `at` may differ.
    pub(super) fn add(&mut self, slot: Placeholder, at: Range<usize>) {
        match (self.found.get_mut(self.len), u32::try_from(at.end)) {
            (Some(free), Ok(end)) => {
                *free = (at.start as u32, end, slot);
                self.len += 1;
            }
            _ => self.forget(),
        }
    }

    /// Nothing is known of where the slots stand: no mould can be made.
    pub(super) fn forget(&mut self) {
        self.len = MOST + 1;
    }

    /// What stands between the slots may be the answer's own: no other answer sees it.
    pub(super) fn keep_private(&mut self) {
        self.is_private = true;
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The text from slot number `from` on turned out to be hidden.
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

/// What stood in the slots of an event or body that a mould fitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TemplateMatch {
    /// How long the event is.
    pub(super) length: usize,
    pub(super) index: Option<u64>,
    pub(super) sequence_number: Option<u64>,
    pub(super) counts: UsageCounts,
    /// Bytes of visible text.
    pub(super) bytes: u64,
    pub(super) finish: Option<Reason>,
}

/// All bytes of an event or body but those of its slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    bytes: Box<[u8]>,
    /// Where in `bytes` something was taken out, and what.
    slots: Box<[(u32, Placeholder)]>,
}

impl Template {
    /// Makes a mould of an event that has one text; the slots are counted from `data_at`. The
    /// first mould of a stream is `tight`: it takes for granted that an index and numbers
    /// that decide nothing stay, which is true of most streams and quicker to compare.
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

    /// Makes a mould that other answers see, of an event or of a whole body.
    pub(super) fn shared(whole: &[u8], data_at: usize, slots: &Placeholders) -> Option<Template> {
        let slots = slots.all().filter(|_| !slots.is_private)?;
        Template::cast(whole, data_at, slots, |_| false).filter(|mould| mould.bytes.len() <= LARGEST_SHARED)
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

    /// Whether `bytes` begin with an event that differs from the mould's only in its text,
    /// which is not empty, and in its numbers.
    pub(super) fn fits(&self, bytes: &[u8]) -> Option<TemplateMatch> {
        let mut fit = TemplateMatch::default();
        let rest = self.fill(bytes, &mut fit)?.strip_prefix(self.tail())?;
        // More line ends would belong to this event, too.
        if matches!(rest.first(), Some(b'\n' | b'\r')) {
            return None;
        }
        fit.length = bytes.len() - rest.len();
        Some(fit)
    }

    /// Whether `bytes` are a whole event or body that differs from the mould's only in its slots.
    /// One that is not whole, or of another shape, mostly ends otherwise: that is seen before a
    /// long text is.
    pub(super) fn fits_whole(&self, bytes: &[u8]) -> Option<TemplateMatch> {
        let (mut fit, tail) = (TemplateMatch::default(), self.tail());
        let is_whole = bytes.ends_with(tail) && self.fill(bytes, &mut fit)?.len() == tail.len();
        is_whole.then_some(fit)
    }

    /// Takes what stands in the slots, and says what stands behind the last one.
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

    /// Where in an event that fits the slots stand.
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

    /// The bytes behind the last slot.
    fn tail(&self) -> &[u8] {
        &self.bytes[self.slots.last().map_or(0, |(at, _)| *at as usize)..]
    }
}

impl TemplateMatch {
    /// Takes what stands in a slot, and says what stands behind it.
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

/// Whether so many digits at the beginning of these bytes are a count.
fn is_count(bytes: &[u8], digits: usize) -> bool {
    (1..=MOST_DIGITS).contains(&digits) && (bytes[0] != b'0' || digits == 1)
}

/// A count, and what stands behind it.
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

/// What stands behind a number of any kind.
fn behind_number(bytes: &[u8]) -> Option<&[u8]> {
    match digits(bytes) {
        Some(digits) if !matches!(bytes.get(digits), Some(b'.' | b'e' | b'E')) => bytes.get(digits..),
        _ => match json::number_run(bytes) {
            0 => None,
            length => bytes.get(length..),
        },
    }
}

/// A short plain word that is not empty, and what stands behind it: its closing quote first.
fn word(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, is_ascii) = json::plain_run(bytes);
    let is_word = is_ascii && (1..=LONGEST_REASON).contains(&length) && bytes.get(length) == Some(&b'"');
    is_word.then(|| bytes.split_at(length))
}

/// How many bytes the inside of a JSON string stands for, and what stands behind it: its
/// closing quote first.
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

/// Bytes of the escape behind a backslash, and those it stands for.
fn escape(behind: &[u8]) -> Option<(usize, usize)> {
    match behind.first()? {
        b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some((1, 1)),
        b'u' => match (unit(behind)?, behind.get(5..)) {
            (0xD800..=0xDBFF, Some([b'\\', low @ ..])) if matches!(unit(low), Some(0xDC00..=0xDFFF)) => Some((11, 4)),
            // Half a pair reads as the replacement character, which has three bytes, too.
            (unit, _) => Some((5, char::from_u32(unit).map_or(3, char::len_utf8))),
        },
        _ => None,
    }
}

/// The unit of UTF-16 that `u` and four digits spell.
fn unit(escape: &[u8]) -> Option<u32> {
    let [b'u', digits @ ..] = escape.first_chunk::<5>()? else { return None };
    digits.iter().try_fold(0, |unit, digit| Some(unit << 4 | char::from(*digit).to_digit(16)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mould of an event in which `TEXT` is the text and `7` the number of the slot.
    fn mould(event: &str, number: Placeholder) -> Template {
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
        let mould = mould("data: {\"a\":\"TEXT\",\"finish_reason\":null}\n\n", Placeholder::Ignored);
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
        let mould = mould("data: {\"a\":\"TEXT\"}\n\n", Placeholder::Ignored);
        let fit = mould.fits(b"data: {\"a\":\"abc\"}\n\ndata: {\"a\":\"d\"}\n\n").unwrap();
        assert_eq!(fit.length, "data: {\"a\":\"abc\"}\n\n".len());
    }

    #[test]
    fn a_number_on_either_side_may_differ_too() {
        let behind = mould("data: {\"d\":\"TEXT\",\"n\":7}\n\n", Placeholder::Sequence);
        let number = |event: &str| behind.fits(event.as_bytes()).map(|fit| fit.sequence_number);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":1234}\n\n"), Some(Some(1234)));
        assert_eq!(number("data: {\"d\":\"y\",\"n\":01}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"y\",\"n\":1.5}\n\n"), None);
        assert_eq!(number("data: {\"d\":\"\",\"n\":8}\n\n"), None);
        let before = mould("data: {\"n\":7,\"d\":\"TEXT\"}\n\n", Placeholder::Output);
        let number = |event: &str| before.fits(event.as_bytes()).map(|fit| fit.counts.output);
        assert_eq!(number("data: {\"n\":10,\"d\":\"y\"}\n\n"), Some(Some(10)));
        assert_eq!(number("data: {\"n\":0,\"d\":\"y\"}\n\n"), Some(Some(0)));
        assert_eq!(number("data: {\"n\":-1,\"d\":\"y\"}\n\n"), None);
        assert_eq!(number("data: {\"n\":1e5,\"d\":\"y\"}\n\n"), None);
    }
}

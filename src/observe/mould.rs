//! The shortcut for the steady state of a stream.
//!
//! Most events differ from their predecessor only in the text they carry (and, in the
//! Responses dialect, in a sequence number). A [`Mould`] is made from an event that was read
//! in full: all its bytes but those. An event that fits is equal to that one in every other
//! byte, and what stands in the place of the text is the inside of one non-empty JSON
//! string; so a full reading of it would find the same things in the same places. There is
//! nothing to search for and nothing to be fooled by: text that looks like a key or a finish
//! reason cannot leave its string without a bare quote. What does not fit is read in full.

use std::ops::Range;

/// Events longer than this are not worth keeping.
const LARGEST: usize = 1024;

/// All bytes of an event but its text and its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mould {
    bytes: Box<[u8]>,
    /// Where in `bytes` the text was taken out.
    text_at: usize,
    /// Where in `bytes` the number was taken out.
    number_at: Option<usize>,
}

/// An event that fitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    /// The number, where the mould has one.
    pub(super) number: Option<u64>,
}

impl Mould {
    /// Makes a mould of an event, given where its text (quotes excluded) and its number
    /// stand.
    pub(super) fn of(event: &[u8], text: &Range<usize>, number: Option<&Range<usize>>) -> Option<Mould> {
        let nothing = text.end..text.end;
        let number_range = number.unwrap_or(&nothing);
        let (first, second) = if number_range.start < text.start { (number_range, text) } else { (text, number_range) };
        if event.len() > LARGEST || first.end > second.start || second.end > event.len() {
            return None;
        }
        let kept = [&event[..first.start], &event[first.end..second.start], &event[second.end..]];
        let taken_before_text = if number_range.start < text.start { number_range.len() } else { 0 };
        let taken_before_number = if text.start < number_range.start { text.len() } else { 0 };
        Some(Mould {
            bytes: kept.concat().into_boxed_slice(),
            text_at: text.start - taken_before_text,
            number_at: number.map(|number| number.start - taken_before_number),
        })
    }

    #[cfg(test)]
    pub(super) fn length(&self) -> usize {
        self.bytes.len()
    }

    /// Whether an event differs from the mould's only in its text and number, the text not
    /// being empty.
    pub(super) fn fits(&self, event: &[u8]) -> Option<Fit> {
        let (head, tail) = self.bytes.split_at(self.text_at);
        match self.number_at {
            None => is_text(event.strip_prefix(head)?.strip_suffix(tail)?).then_some(Fit { number: None }),
            Some(at) if at <= self.text_at => {
                let rest = event.strip_prefix(&head[..at])?;
                let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
                let text = rest[digits..].strip_prefix(&head[at..])?.strip_suffix(tail)?;
                is_text(text).then_some(Fit { number: Some(count(&rest[..digits])?) })
            }
            Some(at) => {
                let (between, behind) = tail.split_at(at - self.text_at);
                let rest = event.strip_prefix(head)?.strip_suffix(behind)?;
                let digits = rest.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
                let (front, digits) = rest.split_at(rest.len() - digits);
                is_text(front.strip_suffix(between)?).then_some(Fit { number: Some(count(digits)?) })
            }
        }
    }
}

/// A count as JSON spells it, small enough never to overflow.
fn count(digits: &[u8]) -> Option<u64> {
    if !(1..=18).contains(&digits.len()) || (digits[0] == b'0' && digits.len() > 1) {
        return None;
    }
    Some(digits.iter().fold(0, |count, digit| count * 10 + u64::from(digit - b'0')))
}

/// Whether this is the inside of a JSON string that is not empty.
fn is_text(mut inside: &[u8]) -> bool {
    if inside.is_empty() {
        return false;
    }
    let mut is_ascii = true;
    let whole = inside;
    while let [byte, rest @ ..] = inside {
        inside = match (byte, rest) {
            (b'"' | 0..0x20, _) => return false,
            (b'\\', [b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't', rest @ ..]) => rest,
            (b'\\', [b'u', a, b, c, d, rest @ ..]) if [a, b, c, d].iter().all(|x| x.is_ascii_hexdigit()) => rest,
            (b'\\', _) => return false,
            _ => rest,
        };
        is_ascii &= byte.is_ascii();
    }
    is_ascii || std::str::from_utf8(whole).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mould(event: &str, text: &str, number: Option<&str>) -> Mould {
        let find = |part: &str| event.find(part).map(|at| at..at + part.len()).unwrap();
        let number = number.map(|number| {
            let key = find(number);
            key.end - 1..key.end
        });
        Mould::of(event.as_bytes(), &find(text), number.as_ref()).unwrap()
    }

    #[test]
    fn only_the_text_may_differ() {
        let mould = mould("data: {\"a\":\"TEXT\",\"finish_reason\":null}\n\n", "TEXT", None);
        let fits = |text: &str| mould.fits(text.as_bytes()).is_some();
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
    }

    #[test]
    fn a_number_on_either_side_may_differ_too() {
        let behind = mould("data: {\"d\":\"TEXT\",\"n\":7}\n\n", "TEXT", Some("\"n\":7"));
        assert_eq!(behind.fits(b"data: {\"d\":\"y\",\"n\":1234}\n\n"), Some(Fit { number: Some(1234) }));
        assert_eq!(behind.fits(b"data: {\"d\":\"y\",\"n\":01}\n\n"), None);
        assert_eq!(behind.fits(b"data: {\"d\":\"y\",\"n\":}\n\n"), None);
        assert_eq!(behind.fits(b"data: {\"d\":\"\",\"n\":8}\n\n"), None);
        let before = mould("data: {\"n\":7,\"d\":\"TEXT\"}\n\n", "TEXT", Some("\"n\":7"));
        assert_eq!(before.fits(b"data: {\"n\":10,\"d\":\"y\"}\n\n"), Some(Fit { number: Some(10) }));
        assert_eq!(before.fits(b"data: {\"n\":-1,\"d\":\"y\"}\n\n"), None);
        assert_eq!(before.fits(b"data: {\"n\":1.5,\"d\":\"y\"}\n\n"), None);
    }
}

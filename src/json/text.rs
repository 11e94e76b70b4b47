//! Inside strings: plain runs in bulk, UTF-8 over the edges of frames.

/// How far the text in front of the next quote, backslash or control character reaches, and
/// whether all of it is ASCII.
///
/// Long text is what bodies are made of, so it is looked at 32 bytes at a time (a loop that
/// the compiler turns into vector code); short runs between escapes are seen in one word;
/// byte by byte go only the last few of a slice.
#[inline(always)]
pub(super) fn plain_run(bytes: &[u8]) -> (usize, bool) {
    let (mut len, mut high) = (0, 0);
    for word in bytes[..bytes.len().min(SHORT)].as_chunks().0 {
        let word = u64::from_le_bytes(*word);
        let stop = stops(word);
        if stop != 0 {
            high |= high_in_front(word, stop);
            return (len + place(stop), high & HIGH == 0);
        }
        high |= word;
        len += 8;
    }
    let (len, is_ascii) = if len == SHORT { long_run(bytes, len) } else { last_run(bytes, len) };
    (len, is_ascii && high & HIGH == 0)
}

/// Runs up to this length are looked at word by word.
const SHORT: usize = 48;

/// A run that is known to be plain up to `from`: how far it reaches, and whether it is ASCII
/// from there on.
#[inline(never)]
fn long_run(bytes: &[u8], from: usize) -> (usize, bool) {
    let (mut len, mut is_ascii, mut high) = (from, true, 0);
    while let Some(chunk) = bytes[len..].first_chunk::<32>() {
        let (mut stop, mut all) = (0u8, 0u8);
        for &byte in chunk {
            stop |= u8::from(is_stop(byte));
            all |= byte;
        }
        if stop != 0 {
            break;
        }
        is_ascii &= all.is_ascii();
        len += 32;
    }
    while let Some(word) = bytes[len..].first_chunk() {
        let word = u64::from_le_bytes(*word);
        let stop = stops(word);
        if stop != 0 {
            high |= high_in_front(word, stop);
            return (len + place(stop), is_ascii && high & HIGH == 0);
        }
        high |= word;
        len += 8;
    }
    let (len, last_is_ascii) = last_run(bytes, len);
    (len, is_ascii && last_is_ascii && high & HIGH == 0)
}

/// The last bytes of a slice, fewer than eight: one word, filled up with what stops.
#[inline(never)]
fn last_run(bytes: &[u8], from: usize) -> (usize, bool) {
    let rest = &bytes[from..];
    let mut word = [b'"'; 8];
    word[..rest.len()].copy_from_slice(rest);
    let word = u64::from_le_bytes(word);
    let stop = stops(word);
    (from + place(stop), high_in_front(word, stop) == 0)
}

/// Text that nobody wants to see, escapes of two bytes included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// Its bytes as they are written.
    pub(super) len: usize,
    /// Bytes of the text that they stand for.
    pub(super) decoded: usize,
    pub(super) is_ascii: bool,
}

/// How far text reaches in front of the next quote, control character, escape of another kind
/// or escape that the slice cuts. (Also in front of one among the last bytes of the slice:
/// that one is left to the reader of single escapes.)
///
/// Never inlined: its loop needs all the registers there are.
#[inline(never)]
pub(super) fn stretch(bytes: &[u8]) -> Stretch {
    let (mut len, mut escapes, mut high) = (0, 0, 0);
    while let Some(word) = bytes[len..].first_chunk() {
        let word = u64::from_le_bytes(*word);
        let stop = stops(word);
        if stop == 0 {
            high |= word;
            len += 8;
            continue;
        }
        high |= high_in_front(word, stop);
        len += place(stop);
        if !begins_with_short_escape(&bytes[len..]) {
            return Stretch { len, decoded: len - escapes, is_ascii: high & HIGH == 0 };
        }
        len += 2;
        escapes += 1;
    }
    let (len, is_ascii) = last_run(bytes, len);
    Stretch { len, decoded: len - escapes, is_ascii: is_ascii && high & HIGH == 0 }
}

fn begins_with_short_escape(bytes: &[u8]) -> bool {
    matches!(bytes, [b'\\', byte, ..] if UNESCAPED[usize::from(*byte)] != 0)
}

/// What the letter behind a backslash stands for; 0 where it stands for nothing by itself.
pub(super) const UNESCAPED: [u8; 256] = {
    let mut table = [0; 256];
    let pairs = *b"\"\"\\\\//b\x08f\x0Cn\nr\rt\t";
    let mut i = 0;
    while i < pairs.len() {
        table[pairs[i] as usize] = pairs[i + 1];
        i += 2;
    }
    table
};

const fn is_stop(byte: u8) -> bool {
    byte < 0x20 || byte == b'"' || byte == b'\\'
}

const ONES: u64 = 0x0101_0101_0101_0101;
const HIGH: u64 = 0x8080_8080_8080_8080;

/// The high bit of every stop byte. Bits above the lowest one may be false, because a
/// subtraction borrows; only the lowest is used. (A quote is the one byte besides the control
/// characters that is less than 0x21 once its second bit is flipped.)
const fn stops(word: u64) -> u64 {
    let control_or_quote = (word ^ (ONES * 0x02)).wrapping_sub(ONES * 0x21);
    let backslash = (word ^ (ONES * b'\\' as u64)).wrapping_sub(ONES);
    (control_or_quote | backslash) & !word & HIGH
}

/// How many bytes of a word stand in front of the first stop.
const fn place(stops: u64) -> usize {
    stops.trailing_zeros() as usize / 8
}

/// The high bits of the bytes in front of the first stop. (What `stops` holds above it falls
/// on bytes that have none.)
const fn high_in_front(word: u64, stops: u64) -> u64 {
    word & (stops - 1) & HIGH
}

/// A character that a frame's edge has cut: how many bytes it still needs, and between
/// which bounds the next one must lie (RFC 3629).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Utf8 {
    need: u8,
    low: u8,
    high: u8,
}

impl Utf8 {
    /// No character is cut.
    pub(super) const WHOLE: Utf8 = Utf8 { need: 0, low: 0, high: 0 };

    pub(super) const fn is_whole(self) -> bool {
        self.need == 0
    }

    /// Takes the next byte; false if it cannot stand here.
    pub(super) const fn step(&mut self, byte: u8) -> bool {
        if self.need > 0 {
            let fits = self.low <= byte && byte <= self.high;
            (self.need, self.low, self.high) = (self.need - 1, 0x80, 0xBF);
            return fits;
        }
        (self.need, self.low, self.high) = match byte {
            0x00..=0x7F => (0, 0, 0),
            0xC2..=0xDF => (1, 0x80, 0xBF),
            0xE0 => (2, 0xA0, 0xBF),
            0xED => (2, 0x80, 0x9F),
            0xE1..=0xEF => (2, 0x80, 0xBF),
            0xF0 => (3, 0x90, 0xBF),
            0xF1..=0xF3 => (3, 0x80, 0xBF),
            0xF4 => (3, 0x80, 0x8F),
            _ => return false,
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_fast_run_is_the_last_run(bytes in proptest::collection::vec(any::<u8>(), 0..90), calm in any::<bool>()) {
            let bytes: Vec<u8> = bytes.into_iter().map(|b| if calm && is_stop(b) { b'a' } else { b }).collect();
            let slow = bytes.iter().position(|&b| is_stop(b)).unwrap_or(bytes.len());
            prop_assert_eq!(plain_run(&bytes), (slow, bytes[..slow].is_ascii()));
        }

        #[test]
        fn a_stretch_is_runs_and_short_escapes(text in r#"([a-z ]{0,12}|é|\\\\n|\\\\"|\\\\u0041|\\\\x|"|\n){0,12}"#) {
            let bytes = text.as_bytes();
            let Stretch { len, decoded, is_ascii } = stretch(bytes);
            let (mut at, mut escapes) = (0, 0);
            while at < len {
                let (run, _) = plain_run(&bytes[at..len]);
                at += run;
                if at < len {
                    prop_assert!(begins_with_short_escape(&bytes[at..]));
                    (at, escapes) = (at + 2, escapes + 1);
                }
            }
            prop_assert_eq!((at, decoded, is_ascii), (len, len - escapes, bytes[..len].is_ascii()));
            // It stops at what stops it, or close to the end.
            let stops = bytes.get(len).is_none_or(|byte| is_stop(*byte));
            prop_assert!(stops && (len + 8 > bytes.len() || !begins_with_short_escape(&bytes[len..])));
        }

        #[test]
        fn stepping_agrees_with_the_standard_library(bytes in proptest::collection::vec(0x70u8.., 0..6)) {
            let mut utf8 = Utf8::default();
            let stepped = bytes.iter().all(|&b| utf8.step(b));
            match std::str::from_utf8(&bytes) {
                Ok(_) => prop_assert!(stepped && utf8.is_whole()),
                Err(e) if e.error_len().is_none() => prop_assert!(stepped && !utf8.is_whole()),
                Err(_) => prop_assert!(!stepped),
            }
        }
    }
}

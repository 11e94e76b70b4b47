//! String content: plain text in blocks, and UTF-8 characters cut by frame edges.
//!
//! Bodies consist mostly of long strings. Text is compared 16 bytes at a time, one result bit per byte
//! (SSE2 and NEON; `wide` emulates it elsewhere). Text with escapes is handled as 64-bit masks over
//! 64 bytes, and the usual escapes (`\"`, `\\`, `\n`) cost no branch each, because a branch predictor
//! cannot learn where escapes stand.

use wide::u8x16;

/// Length of the text before the next quote, backslash or control character, and whether it is all
/// ASCII.
#[inline(always)]
pub(super) fn plain_run(bytes: &[u8]) -> (usize, bool) {
    let (mut len, mut high) = (0, 0);
    loop {
        let lane = match bytes[len..].first_chunk() {
            Some(whole) => ByteBlock::of(whole),
            None => ByteBlock::of(&filled_up(&bytes[len..])),
        };
        let stops = lane.stops().to_bitmask();
        if stops != 0 {
            let place = stops.trailing_zeros();
            high |= lane.high() & ((1 << place) - 1);
            return (len + place as usize, high == 0);
        }
        high |= lane.high();
        len += LANE;
    }
}

const LANE: usize = 16;

/// Bytes compared together.
#[derive(Clone, Copy)]
struct ByteBlock(u8x16);

impl ByteBlock {
    #[inline(always)]
    fn of(bytes: &[u8; LANE]) -> Self {
        ByteBlock(u8x16::new(*bytes))
    }

    #[inline(always)]
    fn are(self, byte: u8) -> u8x16 {
        self.0.simd_eq(u8x16::splat(byte))
    }

    #[inline(always)]
    fn are_control(self) -> u8x16 {
        self.0.min(u8x16::splat(0x1F)).simd_eq(self.0)
    }

    #[inline(always)]
    fn stops(self) -> u8x16 {
        self.are(b'"') | self.are(b'\\') | self.are_control()
    }

    /// One bit for each non-ASCII byte.
    #[inline(always)]
    fn high(self) -> u32 {
        self.0.to_bitmask()
    }
}

/// Decodes text that has only complete two-byte escapes. `take` is called per piece and returns whether
/// it wants more.
///
/// Always copies a fixed number of bytes before each escape, so that no branch depends on where escapes
/// stand.
pub(super) fn unescape(raw: &[u8], mut take: impl FnMut(&[u8]) -> bool) {
    let (mut to, mut written, mut read) = ([0; PIECE + 2 * BLOCK], 0, 0);
    while read < raw.len() {
        let filled;
        let from: &[u8; 2 * BLOCK] = match raw[read..].first_chunk() {
            Some(whole) => whole,
            None => {
                filled = filled_up(&raw[read..]);
                &filled
            }
        };
        let Some(block) = from.first_chunk() else { return };
        let all = escapes_begin(bits(lanes(block).map(|lane| lane.are(b'\\'))));
        // An escape that begins with the block's last byte is left for the next block.
        let len = (raw.len() - read).min(BLOCK - usize::from(all & LAST != 0));
        let (mut begins, mut at) = (all & !LAST, 0);
        while begins != 0 {
            let place = begins.trailing_zeros() as usize;
            begins &= begins - 1;
            copy_half(from, at, &mut to, written);
            if place - at > BLOCK / 2 {
                copy_half(from, at + BLOCK / 2, &mut to, written + BLOCK / 2);
            }
            written += place - at;
            to[written] = UNESCAPED[usize::from(from[place + 1])];
            (written, at) = (written + 1, place + 2);
        }
        copy_half(from, at, &mut to, written);
        copy_half(from, at + BLOCK / 2, &mut to, written + BLOCK / 2);
        written += len - at;
        read += len;
        if written >= PIECE {
            if !take(&to[..written]) {
                return;
            }
            written = 0;
        }
    }
    take(&to[..written]);
}

/// Smallest piece of decoded bytes passed on.
const PIECE: usize = 512;

#[inline(always)]
fn copy_half(from: &[u8; 2 * BLOCK], at: usize, to: &mut [u8; PIECE + 2 * BLOCK], written: usize) {
    const HALF: usize = BLOCK / 2;
    to[written..written + HALF].copy_from_slice(&from[at..at + HALF]);
}

/// The last bytes of a slice, padded with control characters, which stop the scan.
#[inline(never)]
fn filled_up<const N: usize>(rest: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..rest.len()].copy_from_slice(rest);
    bytes
}

/// Text whose content is not needed, two-byte escapes included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlainRun {
    /// Raw length, bytes.
    pub(super) len: usize,
    /// Decoded length, bytes.
    pub(super) decoded: usize,
    pub(super) is_ascii: bool,
}

/// Length of the text before the next quote, control character, other escape, or escape cut by the end
/// of the slice.
///
/// Never inlined because its loop needs all registers.
#[inline(never)]
pub(super) fn stretch(bytes: &[u8]) -> PlainRun {
    let (mut len, mut escapes, mut is_ascii) = (0, 0, true);
    loop {
        let filled;
        let block: &[u8; BLOCK] = match bytes[len..].first_chunk() {
            Some(whole) => whole,
            None => {
                filled = filled_up(&bytes[len..]);
                &filled
            }
        };
        let lanes = lanes(block);
        let [a, b, c, d] = lanes;
        if (a.stops() | b.stops() | c.stops() | d.stops()).to_bitmask() == 0 {
            is_ascii &= ByteBlock(a.0 | b.0 | c.0 | d.0).high() == 0;
            len += BLOCK;
            continue;
        }
        let quotes = bits(lanes.map(|lane| lane.are(b'"')));
        let backslashes = bits(lanes.map(|lane| lane.are(b'\\')));
        let begins = escapes_begin(backslashes);
        let escaped = begins << 1;
        let usual = quotes | backslashes | bits(lanes.map(|lane| lane.are(b'n')));
        let unknown = first_unknown(block, escaped & !usual) >> 1;
        // The second byte of an escape that begins with the last byte is not in the block.
        let cut = begins & LAST;
        let stops = (quotes & !escaped) | bits(lanes.map(|lane| lane.are_control())) | unknown | cut;
        let place = stops.trailing_zeros();
        let in_front = if stops == 0 { u64::MAX } else { (1 << place) - 1 };
        len += place as usize;
        escapes += (begins & in_front).count_ones() as usize;
        is_ascii &= bits(lanes.map(|lane| lane.0)) & in_front == 0;
        if stops != cut {
            return PlainRun { len, decoded: len - escapes, is_ascii };
        }
    }
}

const BLOCK: usize = 4 * LANE;
const LAST: u64 = 1 << (BLOCK - 1);

#[inline(always)]
fn lanes(block: &[u8; BLOCK]) -> [ByteBlock; 4] {
    let lanes = block.as_chunks().0;
    [ByteBlock::of(&lanes[0]), ByteBlock::of(&lanes[1]), ByteBlock::of(&lanes[2]), ByteBlock::of(&lanes[3])]
}

/// One bit for each byte of a block.
#[inline(always)]
fn bits(lanes: [u8x16; 4]) -> u64 {
    let [a, b, c, d] = lanes.map(|lane| u64::from(lane.to_bitmask()));
    a | (b << 16) | (c << 32) | (d << 48)
}

/// The backslashes that begin an escape: in a run of backslashes every other one.
#[inline(always)]
fn escapes_begin(backslashes: u64) -> u64 {
    if backslashes & (backslashes << 1) == 0 {
        return backslashes;
    }
    let (mut begins, mut rest) = (0, backslashes);
    while rest != 0 {
        let first = rest & rest.wrapping_neg();
        begins |= first;
        rest &= !(first | (first << 1));
    }
    begins
}

/// Bit of the first byte that is not a valid two-byte escape's second byte; 0 if there is none.
#[inline(always)]
fn first_unknown(block: &[u8; BLOCK], escaped: u64) -> u64 {
    let mut rest = escaped;
    while rest != 0 && UNESCAPED[usize::from(block[rest.trailing_zeros() as usize])] != 0 {
        rest &= rest - 1;
    }
    rest & rest.wrapping_neg()
}

/// The character meant by the byte behind a backslash; 0 where the escape is not a two-byte one.
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

/// A character cut by a frame's edge: the bytes it still needs, and the bounds of the next one
/// (RFC 3629).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Utf8 {
    need: u8,
    low: u8,
    high: u8,
}

impl Utf8 {
    /// No pending character.
    pub(super) const WHOLE: Utf8 = Utf8 { need: 0, low: 0, high: 0 };

    pub(super) const fn is_whole(self) -> bool {
        self.need == 0
    }

    /// Takes the next byte; false if it is invalid here.
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

    const fn is_stop(byte: u8) -> bool {
        byte < 0x20 || byte == b'"' || byte == b'\\'
    }

    fn begins_with_short_escape(bytes: &[u8]) -> bool {
        matches!(bytes, [b'\\', byte, ..] if UNESCAPED[usize::from(*byte)] != 0)
    }

    /// `stretch`, byte by byte.
    fn slow_stretch(bytes: &[u8]) -> PlainRun {
        let (mut len, mut decoded) = (0, 0);
        while len < bytes.len() {
            len += match &bytes[len..] {
                rest if begins_with_short_escape(rest) => 2,
                [byte, ..] if !is_stop(*byte) => 1,
                _ => break,
            };
            decoded += 1;
        }
        PlainRun { len, decoded, is_ascii: bytes[..len].is_ascii() }
    }

    #[test]
    fn an_escape_is_found_at_any_position() {
        for escape in
            [r"\n", r"\\", r#"\""#, r"\/", r"\t", r"\u00e9", r"\x", "\\\n", "\\", "\"", "\n", "é", r"\\\\\\n", r"\\\"]
        {
            for place in 0..200 {
                for behind in [0, 1, 15, 16, 63, 64, 130] {
                    let text = ["a".repeat(place).as_str(), escape, "b".repeat(behind).as_str()].concat();
                    assert_eq!(stretch(text.as_bytes()), slow_stretch(text.as_bytes()), "{text:?}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn the_fast_run_is_the_last_run(bytes in proptest::collection::vec(any::<u8>(), 0..90), calm in any::<bool>()) {
            let bytes: Vec<u8> = bytes.into_iter().map(|b| if calm && is_stop(b) { b'a' } else { b }).collect();
            let slow = bytes.iter().position(|&b| is_stop(b)).unwrap_or(bytes.len());
            prop_assert_eq!(plain_run(&bytes), (slow, bytes[..slow].is_ascii()));
        }

        #[test]
        fn a_stretch_is_runs_and_short_escapes(text in r#"([a-z ]{0,30}|é|(\\\\){1,5}|\\[n"/trbf]){0,60}(\\u0041|\\x|"|\n|\\)?[a-z]{0,70}"#) {
            prop_assert_eq!(stretch(text.as_bytes()), slow_stretch(text.as_bytes()));
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

//! Small values on their way out of a body: bounded text, and whole numbers.

/// A name, string or number whose pieces come one by one. Keeps at most as much as its
/// reader said it would look at, so that a client cannot make it grow.
#[derive(Debug, Default)]
pub(super) struct Kept {
    text: Vec<u8>,
    most: usize,
    is_over: bool,
    has_lone_surrogate: bool,
    has_fraction: bool,
}

/// A name, string or number that has been read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said<'a> {
    text: &'a [u8],
    is_over: bool,
    has_lone_surrogate: bool,
    has_fraction: bool,
}

/// What a number says where a whole one is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whole {
    /// Zero or more.
    Count(u64),
    /// A whole number beyond 64 bits.
    Beyond,
    /// A whole number below zero.
    Negative,
    /// Written with a point or an exponent, which engines read as a float.
    Fraction,
}

impl Kept {
    pub(super) fn begin(&mut self, most: usize) {
        self.text.clear();
        self.most = most;
        (self.is_over, self.has_lone_surrogate, self.has_fraction) = (false, false, false);
    }

    pub(super) fn push(&mut self, piece: &[u8]) {
        if self.text.len() + piece.len() > self.most {
            self.is_over = true;
        } else {
            self.text.extend_from_slice(piece);
        }
    }

    pub(super) fn push_number(&mut self, piece: &[u8]) {
        self.has_fraction |= has_fraction(piece);
        self.push(piece);
        if self.text.is_empty() {
            self.text.push(piece.first().copied().unwrap_or(b'0'));
        }
    }

    pub(super) fn push_lone_surrogate(&mut self) {
        self.has_lone_surrogate = true;
    }

    pub(super) fn said(&self) -> Said<'_> {
        Said {
            text: &self.text,
            is_over: self.is_over,
            has_lone_surrogate: self.has_lone_surrogate,
            has_fraction: self.has_fraction,
        }
    }
}

impl<'a> Said<'a> {
    /// What stands in one piece, without escapes.
    pub(super) const fn at_once(text: &'a [u8], most: usize) -> Said<'a> {
        Said { text, is_over: text.len() > most, has_lone_surrogate: false, has_fraction: false }
    }

    pub(super) const fn has_lone_surrogate(self) -> bool {
        self.has_lone_surrogate
    }

    /// The decoded bytes of a name; a byte that no text contains for one that nobody looks at.
    pub(super) const fn name(self) -> &'a [u8] {
        if self.is_over || self.has_lone_surrogate { b"\xFF" } else { self.text }
    }

    /// The text, unless it is longer than anybody looks at or no text at all.
    pub(super) fn text(self) -> Option<&'a str> {
        if self.is_over || self.has_lone_surrogate { None } else { std::str::from_utf8(self.text).ok() }
    }

    pub(super) fn whole(self) -> Whole {
        if self.has_fraction || has_fraction(self.text) {
            return Whole::Fraction;
        }
        let (is_negative, digits) = match self.text {
            [b'-', digits @ ..] => (true, digits),
            digits => (false, digits),
        };
        let count = digits
            .iter()
            .try_fold(0u64, |count, digit| count.checked_mul(10)?.checked_add(u64::from(digit.wrapping_sub(b'0'))));
        match count {
            Some(count) if !self.is_over && (count == 0 || !is_negative) => Whole::Count(count),
            _ if is_negative => Whole::Negative,
            _ => Whole::Beyond,
        }
    }
}

fn has_fraction(number: &[u8]) -> bool {
    number.iter().any(|byte| matches!(byte, b'.' | b'e' | b'E'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(pieces: &[&str]) -> Whole {
        let mut kept = Kept::default();
        kept.begin(24);
        pieces.iter().for_each(|piece| kept.push_number(piece.as_bytes()));
        kept.said().whole()
    }

    #[test]
    fn whole_numbers_are_told_from_all_others() {
        assert_eq!(whole(&["1", "2"]), Whole::Count(12));
        assert_eq!(whole(&["-0"]), Whole::Count(0));
        assert_eq!(whole(&["18446744073709551615"]), Whole::Count(u64::MAX));
        assert_eq!(whole(&["18446744073709551616"]), Whole::Beyond);
        assert_eq!(whole(&["9".repeat(1000).as_str()]), Whole::Beyond);
        assert_eq!(whole(&["-", "9".repeat(1000).as_str()]), Whole::Negative);
        assert_eq!(whole(&[format!("-{}", "9".repeat(1000)).as_str()]), Whole::Negative);
        for fraction in ["1.0", "1e2", "0E0", "-1.5"] {
            assert_eq!(whole(&[fraction]), Whole::Fraction);
        }
        assert_eq!(whole(&["9".repeat(1000).as_str(), ".5"]), Whole::Fraction);
    }
}

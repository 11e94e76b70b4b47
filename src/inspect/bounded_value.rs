//! Bounded copies of small values of a body, and integer parsing.

/// A name, string or number assembled from pieces. Keeps at most as many bytes as its reader needs, so
/// that a client cannot make it grow.
#[derive(Debug, Default)]
pub(super) struct BoundedValue {
    text: Vec<u8>,
    most: usize,
    is_over: bool,
    has_lone_surrogate: bool,
    has_fraction: bool,
}

/// A complete name, string or number.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScalarValue<'a> {
    text: &'a [u8],
    is_over: bool,
    has_lone_surrogate: bool,
    has_fraction: bool,
}

/// The value of a number where an integer is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IntegerValue {
    /// A non-negative integer.
    Count(u64),
    /// An integer beyond 64 bits.
    Beyond,
    /// -1, which means "none" for some counts.
    MinusOne,
    /// Another negative integer.
    Negative,
    /// Not an integer.
    Fraction,
}

impl BoundedValue {
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

    pub(super) fn said(&self) -> ScalarValue<'_> {
        ScalarValue {
            text: &self.text,
            is_over: self.is_over,
            has_lone_surrogate: self.has_lone_surrogate,
            has_fraction: self.has_fraction,
        }
    }
}

impl<'a> ScalarValue<'a> {
    /// A value that arrived whole and without escapes.
    pub(super) const fn at_once(text: &'a [u8], most: usize) -> ScalarValue<'a> {
        ScalarValue { text, is_over: text.len() > most, has_lone_surrogate: false, has_fraction: false }
    }

    pub(super) const fn has_lone_surrogate(self) -> bool {
        self.has_lone_surrogate
    }

    /// The decoded bytes of a name; a byte that occurs in no text if the name was not kept.
    pub(super) const fn name(self) -> &'a [u8] {
        if self.is_over || self.has_lone_surrogate { b"\xFF" } else { self.text }
    }

    /// The text, if complete and valid.
    pub(super) fn text(self) -> Option<&'a str> {
        if self.is_over || self.has_lone_surrogate { None } else { std::str::from_utf8(self.text).ok() }
    }

    pub(super) fn whole(self) -> IntegerValue {
        // Nearly all are a few digits.
        if !self.is_over && (1..=18).contains(&self.text.len()) && self.text.iter().all(u8::is_ascii_digit) {
            let push = |count: u64, digit: &u8| 10 * count + u64::from(digit - b'0');
            return IntegerValue::Count(self.text.iter().fold(0, push));
        }
        let (is_negative, number) = match self.text {
            [b'-', number @ ..] => (true, number),
            number => (false, number),
        };
        let size = match self.has_fraction || has_fraction(number) {
            false => Magnitude::of(number, 0),
            // The part that was not kept may be a fraction.
            true if self.is_over => Magnitude::Fraction,
            true => Magnitude::of_float(number),
        };
        match size {
            Magnitude::Fraction => IntegerValue::Fraction,
            Magnitude::Count(count) if !self.is_over && (count == 0 || !is_negative) => IntegerValue::Count(count),
            Magnitude::Count(1) if !self.is_over => IntegerValue::MinusOne,
            _ if is_negative => IntegerValue::Negative,
            _ => IntegerValue::Beyond,
        }
    }
}

/// An unsigned number.
enum Magnitude {
    Count(u64),
    /// Beyond 64 bits.
    Beyond,
    Fraction,
}

impl Magnitude {
    /// Parses digits followed by `zeros` zeros.
    fn of(digits: &[u8], zeros: u32) -> Magnitude {
        let push = |count: u64, digit: &u8| count.checked_mul(10)?.checked_add(u64::from(digit.wrapping_sub(b'0')));
        let count = match digits.iter().try_fold(0, push) {
            Some(0) => Some(0),
            count => count.zip(10u64.checked_pow(zeros)).and_then(|(count, tens)| count.checked_mul(tens)),
        };
        count.map_or(Magnitude::Beyond, Magnitude::Count)
    }

    /// A number with a point or an exponent: engines accept `100.0` and `1e2` as 100.
    fn of_float(number: &[u8]) -> Magnitude {
        let at = number.iter().position(|byte| matches!(byte, b'e' | b'E')).unwrap_or(number.len());
        let (mantissa, exponent) = (&number[..at], number.get(at + 1..).unwrap_or(b"0"));
        let point = mantissa.iter().position(|byte| *byte == b'.').unwrap_or(mantissa.len());
        let (whole, part) = (&mantissa[..point], mantissa.get(point + 1..).unwrap_or_default());
        let mut digits = [whole, part].concat();
        let exponent = std::str::from_utf8(exponent).ok().and_then(|exponent| exponent.parse::<i32>().ok());
        // The mantissa has few digits, so an unparsable exponent is far beyond them.
        let exponent = exponent.unwrap_or(if number.get(at + 1) == Some(&b'-') { i32::MIN } else { i32::MAX });
        let zeros = i64::from(exponent) - part.len() as i64;
        let behind_point = usize::try_from(-zeros).unwrap_or(0);
        let all_zero = |digits: &[u8]| digits.iter().all(|digit| *digit == b'0');
        let kept = digits.len().saturating_sub(behind_point);
        if !all_zero(&digits[kept..]) {
            return Magnitude::Fraction;
        }
        digits.truncate(kept);
        Magnitude::of(&digits, u32::try_from(zeros.max(0)).unwrap_or(u32::MAX))
    }
}

fn has_fraction(number: &[u8]) -> bool {
    number.iter().any(|byte| matches!(byte, b'.' | b'e' | b'E'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(pieces: &[&str]) -> IntegerValue {
        let mut kept = BoundedValue::default();
        kept.begin(24);
        pieces.iter().for_each(|piece| kept.push_number(piece.as_bytes()));
        kept.said().whole()
    }

    #[test]
    fn integers_are_distinguished_from_other_numbers() {
        assert_eq!(whole(&["1", "2"]), IntegerValue::Count(12));
        assert_eq!(whole(&["-0"]), IntegerValue::Count(0));
        assert_eq!(whole(&["18446744073709551615"]), IntegerValue::Count(u64::MAX));
        assert_eq!(whole(&["18446744073709551616"]), IntegerValue::Beyond);
        assert_eq!(whole(&["9".repeat(1000).as_str()]), IntegerValue::Beyond);
        assert_eq!(whole(&["-", "9".repeat(1000).as_str()]), IntegerValue::Negative);
        assert_eq!(whole(&[format!("-{}", "9".repeat(1000)).as_str()]), IntegerValue::Negative);
        assert_eq!(
            (whole(&["-1"]), whole(&["-2"]), whole(&["-10"])),
            (IntegerValue::MinusOne, IntegerValue::Negative, IntegerValue::Negative)
        );
        assert_eq!(whole(&["9".repeat(1000).as_str(), ".5"]), IntegerValue::Fraction);
    }

    #[test]
    fn c88_a_float_with_an_integer_value_is_an_integer() {
        for (float, count) in [
            ("100.0", 100),
            ("1e2", 100),
            ("1.5E1", 15),
            ("1.50e+1", 15),
            ("1200e-2", 12),
            ("0E0", 0),
            ("0e999999999999", 0),
            ("0.000e-5", 0),
            ("-0.0", 0),
            ("1844674407370955161.5e1", u64::MAX),
        ] {
            assert_eq!(whole(&[float]), IntegerValue::Count(count), "{float}");
        }
        for fraction in ["1.5", "-1.5", "1e-1", "0.1", "100.01", "15e-2", "1e-999999999999", "1.00000001e7"] {
            assert_eq!(whole(&[fraction]), IntegerValue::Fraction, "{fraction}");
        }
        for beyond in ["1e400", "1e20", "1.5e999999999999", "1844674407370955161.6e1"] {
            assert_eq!(whole(&[beyond]), IntegerValue::Beyond, "{beyond}");
        }
        assert_eq!((whole(&["-1.0"]), whole(&["-1e0"])), (IntegerValue::MinusOne, IntegerValue::MinusOne));
        assert_eq!((whole(&["-2.0"]), whole(&["-1e400"])), (IntegerValue::Negative, IntegerValue::Negative));
        assert_eq!(whole(&["100", ".0"]), IntegerValue::Count(100));
    }
}

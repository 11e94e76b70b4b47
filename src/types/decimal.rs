//! Decimal and hexadecimal digits without `fmt`, because every request writes several numbers.

/// Appends `value` in decimal.
pub fn push_number(text: &mut Vec<u8>, value: u64) {
    if value >= 1000 {
        return push_large(text, value);
    }
    // Most values are small: three digits are always copied (no call) and then truncated.
    let (digits, length) = match value {
        0..10 => ([digit(value), 0, 0], 1),
        10..100 => ([digit(value / 10), digit(value), 0], 2),
        _ => ([digit(value / 100), digit(value / 10), digit(value)], 3),
    };
    let end = text.len() + length;
    text.extend_from_slice(&digits);
    text.truncate(end);
}

/// The last digit of a number.
const fn digit(value: u64) -> u8 {
    b'0' + (value % 10) as u8
}

/// Separate from the short path so that its buffer is set up only here.
#[inline(never)]
fn push_large(text: &mut Vec<u8>, value: u64) {
    text.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

/// Appends `value` thousandths as a number with three decimals.
pub fn push_thousandths(text: &mut Vec<u8>, value: u64) {
    if value == 0 {
        // Most of what is counted so are waits, and most waits are none.
        return text.extend_from_slice(b"0.000");
    }
    push_number(text, value / 1000);
    let decimals = value % 1000;
    text.extend_from_slice(&[b'.', digit(decimals / 100), digit(decimals / 10), digit(decimals)]);
}

/// Writes the lowest decimal digits of `value`, right-aligned, filling `room`.
pub fn put_digits(room: &mut [u8], mut value: u64) {
    for digit in room.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

/// Writes two hexadecimal digits per byte until `room` is full.
pub fn put_hex(room: &mut [u8], bytes: &[u8]) {
    for (digits, byte) in room.chunks_exact_mut(2).zip(bytes) {
        digits.copy_from_slice(&HEX[usize::from(*byte)]);
    }
}

/// The two hexadecimal digits of each byte.
const HEX: [[u8; 2]; 256] = {
    let digits = b"0123456789abcdef";
    let mut hex = [[0; 2]; 256];
    let mut byte = 0;
    while byte < hex.len() {
        hex[byte] = [digits[byte >> 4], digits[byte & 15]];
        byte += 1;
    }
    hex
};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_are_two_digits_each(bytes in prop::collection::vec(any::<u8>(), 0..20)) {
            let mut room = vec![b'x'; 2 * bytes.len()];
            put_hex(&mut room, &bytes);
            let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            prop_assert_eq!(room, digits.into_bytes());
        }

        #[test]
        fn digits_are_those_of_the_formatter(value in any::<u64>(), small in 0u64..1000, digits in 1usize..=20) {
            for value in [value, small, 0, u64::MAX] {
                let (mut number, mut thousandths, mut lowest) = (Vec::new(), Vec::new(), vec![b'x'; digits]);
                push_number(&mut number, value);
                push_thousandths(&mut thousandths, value);
                put_digits(&mut lowest, value);
                prop_assert_eq!(number, value.to_string().into_bytes());
                prop_assert_eq!(thousandths, format!("{}.{:03}", value / 1000, value % 1000).into_bytes());
                let all = format!("{value:020}");
                prop_assert_eq!(lowest, &all.as_bytes()[20 - digits..]);
            }
        }
    }
}

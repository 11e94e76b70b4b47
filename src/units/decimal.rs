//! Numbers as decimal digits, for what every request writes: a general formatter takes ten
//! times as long for them.

/// Appends a number.
pub fn push_number(text: &mut Vec<u8>, value: u64) {
    let (digits, from) = digits_of(value);
    text.extend_from_slice(&digits[from.min(19)..]);
}

/// Appends the last `count` decimal digits of a number, at most 20, zeros in front included.
pub fn push_digits(text: &mut Vec<u8>, value: u64, count: usize) {
    let (digits, _) = digits_of(value);
    text.extend_from_slice(&digits[20 - count.min(20)..]);
}

/// All 20 digits, and where the first one stands that is not a leading zero.
fn digits_of(mut value: u64) -> ([u8; 20], usize) {
    let (mut digits, mut from) = ([b'0'; 20], 20);
    while value > 0 {
        from -= 1;
        digits[from] = b'0' + (value % 10) as u8;
        value /= 10;
    }
    (digits, from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn digits_are_those_of_the_formatter(value in any::<u64>(), small in 0u64..1000, digits in 1usize..=20) {
            for value in [value, small, 0, u64::MAX] {
                let (mut number, mut cut) = (Vec::new(), Vec::new());
                push_number(&mut number, value);
                push_digits(&mut cut, value, digits);
                prop_assert_eq!(number, value.to_string().into_bytes());
                let padded = format!("{value:020}");
                prop_assert_eq!(cut, &padded.as_bytes()[20 - digits..]);
            }
        }
    }
}

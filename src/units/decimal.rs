//! Numbers as decimal digits, for what every request writes: a general formatter takes ten
//! times as long for them.

/// Appends a number.
pub fn push_number(text: &mut Vec<u8>, value: u64) {
    let (digits, from) = digits_of(value);
    text.extend_from_slice(&digits[from.min(19)..]);
}

/// Appends a number of thousandths as a number with three decimals.
pub fn push_thousandths(text: &mut Vec<u8>, value: u64) {
    let (mut digits, from) = digits_of(value);
    let point = digits.len() - 3;
    let fraction = [digits[point], digits[point + 1], digits[point + 2]];
    digits[point] = b'.';
    text.extend_from_slice(&digits[from.min(point - 1)..=point]);
    text.extend_from_slice(&fraction);
}

/// Writes the lowest decimal digits of a number, as many as there is room for.
pub fn put_digits(room: &mut [u8], mut value: u64) {
    for digit in room.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
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

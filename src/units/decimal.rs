//! Numbers as decimal digits, for what every request writes: a general formatter takes ten
//! times as long for them.

/// Appends a number.
pub fn push_number(text: &mut String, value: u64) {
    let digits = value.checked_ilog10().map_or(1, |log| log as usize + 1);
    push_digits(text, value, digits);
}

/// Appends the last `digits` decimal digits of a number, at most 20, zeros in front included.
pub fn push_digits(text: &mut String, mut value: u64, digits: usize) {
    let mut written = [b'0'; 20];
    let written = &mut written[..digits.min(20)];
    for digit in written.iter_mut().rev() {
        *digit += (value % 10) as u8;
        value /= 10;
    }
    text.push_str(std::str::from_utf8(written).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn digits_are_those_of_the_formatter(value in any::<u64>(), small in 0u64..1000, digits in 1usize..=20) {
            for value in [value, small, 0, u64::MAX] {
                let (mut number, mut cut) = (String::new(), String::new());
                push_number(&mut number, value);
                push_digits(&mut cut, value, digits);
                prop_assert_eq!(&number, &value.to_string());
                let padded = format!("{value:020}");
                prop_assert_eq!(cut.as_str(), &padded[20 - digits..]);
            }
        }
    }
}

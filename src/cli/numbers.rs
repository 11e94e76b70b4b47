//! Parsers of command line numbers within a range.

/// Parses a number from `LEAST` to `MOST` thousandths.
///
/// # Errors The text is not such a number.
pub fn within<const LEAST: u32, const MOST: u32>(text: &str) -> Result<f64, String> {
    let (least, most) = (f64::from(LEAST) / 1000.0, f64::from(MOST) / 1000.0);
    match text.parse::<f64>() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        Ok(number) => Err(format!("{number} is out of range: write a number from {least} to {most}")),
        Err(_) => Err(format!("this is not a number; write one from {least} to {most}")),
    }
}

/// Parses an integer of at least 1.
///
/// # Errors The text is not such a number.
pub fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "write an integer from 1 on".to_owned())
}

//! Scalar types of the settings: texts, numbers, durations, sizes, words.

use std::time::Duration;

use bytesize::ByteSize;
use schemars::{Schema, json_schema};

use super::problem::nearest;
use super::spanned_yaml::Value;
use super::walk::{FromScalar, ScalarError, is_off, quoted};

impl FromScalar for String {
    const EXPECTED: &'static str = "a text";

    fn take(value: &Value, _: bool) -> Result<Self, ScalarError> {
        match value {
            Value::Text(text) if text.is_empty() => {
                Err(ScalarError::value("is empty", "write a text, or remove the key"))
            }
            Value::Text(text) => Ok(text.clone()),
            _ => Err(ScalarError::Type),
        }
    }
    fn schema() -> Schema {
        json_schema!({"type": "string", "minLength": 1})
    }
}

/// A text that no problem shows.
#[derive(Clone)]
pub(super) struct RedactedText(pub String);

impl std::fmt::Debug for RedactedText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hidden")
    }
}

impl FromScalar for RedactedText {
    const EXPECTED: &'static str = "a text";
    const HIDDEN: bool = true;

    fn take(value: &Value, loose: bool) -> Result<Self, ScalarError> {
        String::take(value, loose).map(RedactedText)
    }
    fn schema() -> Schema {
        String::schema()
    }
}

impl FromScalar for bool {
    const EXPECTED: &'static str = "true or false";

    fn take(value: &Value, loose: bool) -> Result<Self, ScalarError> {
        match value {
            Value::Bool(value) => Ok(*value),
            Value::Text(text) if loose && text == "true" => Ok(true),
            Value::Text(text) if loose && text == "false" => Ok(false),
            Value::Text(text) => {
                Err(ScalarError::value(format!("{} is not a boolean", quoted(text)), "write true or false"))
            }
            _ => Err(ScalarError::Type),
        }
    }
    fn schema() -> Schema {
        json_schema!({"type": "boolean"})
    }
}

impl FromScalar for u64 {
    const EXPECTED: &'static str = "an integer";

    fn take(value: &Value, loose: bool) -> Result<Self, ScalarError> {
        let whole =
            |text: String| ScalarError::value(format!("{text} is not a non-negative integer"), "write an integer");
        match value {
            Value::Int(number) => u64::try_from(*number).map_err(|_| whole(number.to_string())),
            Value::Float(number) => Err(whole(number.to_string())),
            Value::Text(text) if loose => text.trim().parse().map_err(|_| ScalarError::Type),
            _ => Err(ScalarError::Type),
        }
    }
    fn schema() -> Schema {
        json_schema!({"type": "integer", "minimum": 0})
    }
}

impl FromScalar for f64 {
    const EXPECTED: &'static str = "a number";

    fn take(value: &Value, loose: bool) -> Result<Self, ScalarError> {
        let number = match value {
            Value::Int(number) => *number as f64,
            Value::Float(number) => *number,
            Value::Text(text) if loose => text.trim().parse().map_err(|_| ScalarError::Type)?,
            _ => return Err(ScalarError::Type),
        };
        let finite = number.is_finite();
        if finite { Ok(number) } else { Err(ScalarError::value("is not finite", "write a number, or remove the key")) }
    }
    fn schema() -> Schema {
        json_schema!({"type": "number"})
    }
}

impl FromScalar for Duration {
    const EXPECTED: &'static str = "a duration such as 300ms, 10s, 2m, 1h or 28d";

    fn take(value: &Value, _: bool) -> Result<Self, ScalarError> {
        match value {
            Value::Int(number) => Err(without_unit(&number.to_string())),
            Value::Float(number) => Err(without_unit(&number.to_string())),
            Value::Text(text) => length(text).ok_or_else(|| match text.trim().parse::<f64>() {
                Ok(_) => without_unit(text.trim()),
                Err(_) => ScalarError::value(
                    format!("{} is not a duration", quoted(text)),
                    format!("write {}", Self::EXPECTED),
                ),
            }),
            _ => Err(ScalarError::Type),
        }
    }
    fn schema() -> Schema {
        json_schema!({"title": "duration", "type": "string", "pattern": r"^\s*([0-9]+(\.[0-9]+)?(ms|s|m|h|d|w))+\s*$", "examples": ["10s", "300ms", "28d"]})
    }
}

fn without_unit(number: &str) -> ScalarError {
    // No guess, because a plausible unit for one key is wrong for the next.
    ScalarError::value(format!("{number} has no unit"), "put one behind it: ms, s, m, h, d or w")
}

/// Parses `1h30m`: numbers with units. `None` also beyond 100 years.
fn length(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    let mut nanos = 0u128;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let letters = rest[digits..].find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len() - digits);
        let (number, unit) = (&rest[..digits], &rest[digits..digits + letters]);
        let unit: u128 = match unit {
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "d" => 86_400_000_000_000,
            "w" => 604_800_000_000_000,
            _ => return None,
        };
        nanos = nanos.checked_add(scaled(number, unit)?)?;
        rest = &rest[digits + letters..];
    }
    let years = 100 * 366 * 86_400_000_000_000u128;
    (nanos <= years).then(|| Duration::new((nanos / 1_000_000_000) as u64, (nanos % 1_000_000_000) as u32))
}

/// A decimal number times a unit, without floating-point rounding.
fn scaled(number: &str, unit: u128) -> Option<u128> {
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if part.len() > 9 || (number.contains('.') && part.is_empty()) {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    let part_value: u128 = if part.is_empty() { 0 } else { part.parse().ok()? };
    whole.checked_mul(unit)?.checked_add(part_value * unit / 10u128.pow(part.len() as u32))
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SizeScalar(pub u64);

impl FromScalar for SizeScalar {
    const EXPECTED: &'static str = "a size such as 64MiB or a number of bytes";

    fn take(value: &Value, _: bool) -> Result<Self, ScalarError> {
        let wrong =
            |text: String| ScalarError::value(format!("{text} is not a size"), format!("write {}", Self::EXPECTED));
        match value {
            Value::Int(number) => u64::try_from(*number).map(SizeScalar).map_err(|_| wrong(number.to_string())),
            Value::Float(number) => Err(wrong(number.to_string())),
            Value::Text(text) => match text.trim().parse::<ByteSize>() {
                Ok(size) => Ok(SizeScalar(size.as_u64())),
                Err(_) => Err(wrong(quoted(text))),
            },
            _ => Err(ScalarError::Type),
        }
    }
    fn schema() -> Schema {
        json_schema!({"title": "size", "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\s*[0-9.]+\s*[A-Za-z]*\s*$"}], "examples": ["64MiB"]})
    }
}

/// Concurrent requests per engine: a number, or `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConcurrencyScalar {
    Number(u64),
    Auto,
}

impl FromScalar for ConcurrencyScalar {
    const EXPECTED: &'static str = "an integer, or auto";

    fn take(value: &Value, loose: bool) -> Result<Self, ScalarError> {
        match value {
            Value::Text(text) if text == "auto" => Ok(ConcurrencyScalar::Auto),
            _ => u64::take(value, loose).map(ConcurrencyScalar::Number).map_err(|unfit| unfit.or("or auto")),
        }
    }
    fn schema() -> Schema {
        json_schema!({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]})
    }
}

/// Outstanding prompt tokens per engine: a number, `auto` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptTokens {
    Number(u64),
    Auto,
    Off,
}

impl FromScalar for PromptTokens {
    const EXPECTED: &'static str = "an integer, auto, or off";

    fn take(value: &Value, loose: bool) -> Result<Self, ScalarError> {
        match value {
            Value::Text(text) if text == "auto" => Ok(PromptTokens::Auto),
            value if is_off(value) => Ok(PromptTokens::Off),
            Value::Bool(_) => Err(ScalarError::value("is true", format!("write {}", Self::EXPECTED))),
            _ => u64::take(value, loose).map(PromptTokens::Number).map_err(|unfit| unfit.or("auto, or off")),
        }
    }
    fn schema() -> Schema {
        json_schema!({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", "off", false]}]})
    }
}

/// An enum with one word per variant.
pub(super) trait EnumScalar: Sized + Copy + 'static {
    /// The words.
    const WORDS: &'static [(&'static str, Self)];
    /// Other allowed spellings, as written.
    const BESIDES: &'static [&'static str] = &[];

    /// The words only.
    fn words() -> impl Iterator<Item = &'static str> {
        Self::WORDS.iter().map(|(word, _)| *word)
    }
}

/// One of a closed set of words.
#[derive(Clone, Copy, Debug)]
pub(super) struct EnumWord<T>(pub T);

impl<T: EnumScalar> FromScalar for EnumWord<T> {
    const EXPECTED: &'static str = "one of the words of this key";

    fn take(value: &Value, _: bool) -> Result<Self, ScalarError> {
        let words = || T::words();
        let list = || words().chain(T::BESIDES.iter().copied()).collect::<Vec<_>>().join(", ");
        let known = |text: &str| T::WORDS.iter().find(|(word, _)| *word == text).map(|(_, found)| EnumWord(*found));
        if let Some(off) = known("off").filter(|_| is_off(value)) {
            return Ok(off);
        }
        let Value::Text(text) = value else {
            let wrong = match value {
                Value::Bool(value) => format!("is {value}"),
                other => format!("is {}", other.kind()),
            };
            // YAML 1.1 tools turn some words into booleans.
            let quotes = if known("on").is_some() { "; `on` in quotes where it became true" } else { "" };
            return Err(ScalarError::value(wrong, format!("write one of: {}{quotes}", list())));
        };
        if let Some(found) = known(text) {
            return Ok(found);
        }
        let way_out = match nearest(text, words()) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("write one of: {}", list()),
        };
        Err(ScalarError::value(format!("{} is not a valid value", quoted(text)), way_out))
    }
    fn schema() -> Schema {
        let mut words: Vec<serde_json::Value> = T::words().map(Into::into).collect();
        if T::words().any(|word| word == "off") {
            words.push(false.into());
        }
        json_schema!({"enum": words})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_of_time() {
        let table = [
            ("300ms", Some(Duration::from_millis(300))),
            ("1.5s", Some(Duration::from_millis(1500))),
            ("0s", Some(Duration::ZERO)),
            (" 2m ", Some(Duration::from_secs(120))),
            ("1h30m", Some(Duration::from_secs(5400))),
            ("28d", Some(Duration::from_secs(28 * 86400))),
            ("4w", Some(Duration::from_secs(28 * 86400))),
            ("0.05s", Some(Duration::from_millis(50))),
            ("", None),
            ("s", None),
            ("10", None),
            ("-1s", None),
            ("1.s", None),
            ("1..5s", None),
            ("10 s", None),
            ("10sec", None),
            ("1e3s", None),
            ("99999999999999999999999999d", None),
            ("40000d", None),
        ];
        for (text, expected) in table {
            assert_eq!(length(text), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_breaks_the_reading_of_a_length(text in "\\PC{0,12}|[0-9.]{1,12}(ms|s|m|h|d|w)") {
            let _ = length(&text);
        }

        #[test]
        fn milliseconds_are_read_exactly(n in 0u64..1_000_000_000) {
            prop_assert_eq!(length(&format!("{n}ms")), Some(Duration::from_millis(n)));
        }
    }

    #[test]
    fn sizes() {
        let size = |text: &str| SizeScalar::take(&Value::Text(text.into()), false).ok().map(|size| size.0);
        assert_eq!(size("64MiB"), Some(64 << 20));
        assert_eq!(size("64 KiB"), Some(64 << 10));
        assert_eq!([size("1MB"), size("1M"), size("1mb")], [Some(1_000_000); 3]);
        assert_eq!([size("1kB"), size("64Ki"), size("1gib")], [Some(1000), Some(64 << 10), Some(1 << 30)]);
        assert_eq!(size("many"), None);
        assert_eq!(SizeScalar::take(&Value::Int(512), false).unwrap(), SizeScalar(512));
        assert!(SizeScalar::take(&Value::Int(-1), false).is_err());
    }
}

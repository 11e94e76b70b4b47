//! Pieces of PromQL: selectors, lengths of time, numbers.

use std::fmt::Write as _;
use std::time::Duration;

/// A length of time as Prometheus writes it: `10m`, `1h30m`, `28d`, `500ms`.
#[must_use]
pub fn duration(length: Duration) -> String {
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];
    let mut left = length.as_millis();
    let mut text = String::new();
    for (unit, name) in units {
        if left >= unit {
            write!(text, "{}{name}", left / unit).expect("writing into a string cannot fail");
            left %= unit;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// A number with at most six digits behind the point.
pub(super) fn number(value: f64) -> String {
    let rounded = format!("{value:.6}");
    rounded.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A share in per cent: `81.6 %`.
pub(super) fn percent(share: f64) -> String {
    let rounded = format!("{:.3}", share * 100.0);
    format!("{} %", rounded.trim_end_matches('0').trim_end_matches('.'))
}

/// A condition on a label.
#[derive(Clone, Copy, Debug)]
pub(super) enum Matcher<'a> {
    Is(&'a str, &'a str),
    Not(&'a str, &'a str),
    AnyOf(&'a str, &'a [&'a str]),
    /// A regular expression of our own.
    Matches(&'a str, &'a str),
}

impl Matcher<'_> {
    fn write(&self) -> String {
        match self {
            Matcher::Is(label, value) => format!("{label}={}", quoted(value)),
            Matcher::Not(label, value) => format!("{label}!={}", quoted(value)),
            Matcher::Matches(label, regex) => format!("{label}=~{}", quoted(regex)),
            Matcher::AnyOf(label, [one]) => format!("{label}={}", quoted(one)),
            Matcher::AnyOf(label, values) => {
                let values: Vec<String> = values.iter().map(|value| in_regex(value)).collect();
                format!("{label}=~{}", quoted(&values.join("|")))
            }
        }
    }
}

/// A selector of series: `slo_total{class="chat"}`.
pub(super) fn selector(name: &str, matchers: &[Matcher<'_>]) -> String {
    if matchers.is_empty() {
        return name.to_owned();
    }
    let all: Vec<String> = matchers.iter().map(Matcher::write).collect();
    format!("{name}{{{}}}", all.join(","))
}

fn quoted(value: &str) -> String {
    format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// The value as a regular expression that matches it alone.
fn in_regex(value: &str) -> String {
    let special = |c: char| "\\.+*?()|[]{}^$".contains(c);
    value.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_time_are_written_as_prometheus_reads_them() {
        let of = |millis| duration(Duration::from_millis(millis));
        assert_eq!(
            [0, 500, 4000, 120_000, 450_000, 5_400_000, 2_419_200_000].map(of),
            ["0s", "500ms", "4s", "2m", "7m30s", "1h30m", "28d"]
        );
    }

    #[test]
    fn numbers_have_no_noise_behind_them() {
        assert_eq!([0.816_000_000_1, 10.0, 0.0134_4, 1e-9].map(number), ["0.816", "10", "0.01344", "0"]);
        assert_eq!([0.92, 0.999, 1.0, 0.816].map(percent), ["92 %", "99.9 %", "100 %", "81.6 %"]);
    }

    #[test]
    fn names_cannot_leave_their_quotes_or_match_others() {
        assert_eq!(selector("a", &[]), "a");
        assert_eq!(selector("a", &[Matcher::Is("b", "c\"d\\e")]), r#"a{b="c\"d\\e"}"#);
        assert_eq!(selector("a", &[Matcher::AnyOf("b", &["x.y"])]), r#"a{b="x.y"}"#);
        assert_eq!(selector("a", &[Matcher::AnyOf("b", &["x.y", "z"])]), r#"a{b=~"x\\.y|z"}"#);
        assert_eq!(selector("a", &[Matcher::Not("b", "c")]), r#"a{b!="c"}"#);
    }
}

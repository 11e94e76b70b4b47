//! Numbers as the status page writes them.

use jiff::Timestamp;
use maud::{Markup, html};

/// Placeholder of an absent value.
pub(super) const NOTHING: &str = "–";

/// A share with as many digits as it needs: `92 %`, `99.95 %`.
pub(super) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    let text = format!("{percent:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text} %")
}

/// A share where a tenth of a percent matters little.
pub(super) fn rough_percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent.abs() < 9.95 && percent.fract() != 0.0 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

/// A latency: `42 ms`, `1.25 s`, `75 s`.
pub(super) fn latency(seconds: f64) -> String {
    match seconds {
        s if s < 0.000_95 => format!("{:.2} ms", s * 1000.0),
        s if s < 0.009_95 => format!("{:.1} ms", s * 1000.0),
        s if s < 0.999_5 => format!("{:.0} ms", s * 1000.0),
        s if s < 9.995 => format!("{s:.2} s"),
        s if s < 99.95 => format!("{s:.1} s"),
        s => format!("{s:.0} s"),
    }
}

/// A length of time, rounded down to the largest unit of which it has two.
pub(super) fn length(seconds: u64) -> String {
    let units = [(24 * 60 * 60, "d"), (60 * 60, "h"), (60, "min")];
    let fits = units.into_iter().find(|(unit, _)| seconds >= 2 * unit);
    fits.map_or_else(|| format!("{seconds} s"), |(unit, name)| format!("{} {name}", seconds / unit))
}

/// The length of a window, exactly: `5 min`, `1 h`, `28 d`.
pub(super) fn window(seconds: u64) -> String {
    let units = [(24 * 60 * 60, "d"), (60 * 60, "h"), (60, "min")];
    let fits = units.into_iter().find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit));
    fits.map_or_else(|| format!("{seconds} s"), |(unit, name)| format!("{} {name}", seconds / unit))
}

/// A count with its thousands apart.
pub(super) fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A count in a few letters: `950`, `12.3k`, `4.0M`.
pub(super) fn short_count(count: u64) -> String {
    match count {
        0..1_000 => count.to_string(),
        1_000..100_000 => format!("{:.1}k", count as f64 / 1e3),
        100_000..1_000_000 => format!("{:.0}k", count as f64 / 1e3),
        1_000_000..100_000_000 => format!("{:.1}M", count as f64 / 1e6),
        _ => format!("{:.0}M", count as f64 / 1e6),
    }
}

/// A moment, as the time of day in UTC; the script makes the viewer's own of it.
pub(super) fn moment(unix_seconds: f64) -> Markup {
    let whole = Timestamp::from_second(unix_seconds as i64).unwrap_or(Timestamp::UNIX_EPOCH);
    let full = whole.to_string();
    let time = full.get(11..19).unwrap_or_default().to_owned();
    html! { time datetime=(full) { (time) " UTC" } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_that_they_need() {
        assert_eq!([0.92, 0.999, 0.9995, 1.0, 0.87654].map(percent), ["92 %", "99.9 %", "99.95 %", "100 %", "87.65 %"]);
        assert_eq!([0.834, 0.05, 0.034, -2.5, 1.0].map(rough_percent), ["83 %", "5 %", "3.4 %", "-250 %", "100 %"]);
        let latencies = [0.0004, 0.0051, 0.042, 0.9994, 0.9996, 1.234, 12.34, 75.0, 130.2].map(latency);
        assert_eq!(
            latencies,
            ["0.40 ms", "5.1 ms", "42 ms", "999 ms", "1.00 s", "1.23 s", "12.3 s", "75.0 s", "130 s"]
        );
        assert_eq!([59, 7300, 119, 120].map(length), ["59 s", "2 h", "119 s", "2 min"]);
        assert_eq!([300, 3600, 28 * 86_400, 90].map(window), ["5 min", "1 h", "28 d", "90 s"]);
        assert_eq!(
            [7, 999, 1000, 1_234_567].map(count),
            ["7", "999", "1\u{202f}000", "1\u{202f}234\u{202f}567"].map(str::to_owned)
        );
        assert_eq!([950, 12_345, 240_000, 4_000_000].map(short_count), ["950", "12.3k", "240k", "4.0M"]);
        let moment = moment(1_700_000_000.9).into_string();
        assert_eq!(moment, "<time datetime=\"2023-11-14T22:13:20Z\">22:13:20 UTC</time>");
    }
}

//! Queries for the counts of classes over all gateways: series of the recording rules, or the counters
//! without them.

use std::time::Duration;

use super::promql::{Matcher, duration, selector};
use super::rules::{BASE_RATE, DIRECT};

/// Windows up to this come from the counters themselves, as in the rules.
#[must_use]
pub fn is_counted_directly(window: Duration) -> bool {
    window <= DIRECT
}

/// Judged and missed requests over a window as the rules record them: labels `__name__`, `class`, and for the
/// counts of one prompt length `length`.
#[must_use]
pub fn recorded_counts(window: Duration, select: &[(String, String)]) -> String {
    let name = format!("class(_length)?:slo_(judged|missed):increase{}", duration(window));
    let series = selector("", &matchers(&[Matcher::Matches("__name__", &name)], select));
    format!("sum by (__name__, class, length) ({series})")
}

/// Judged and met requests over a window from the counters: labels `counted` (`judged`, `met`), `class` and
/// `length`.
#[must_use]
pub fn counted(window: Duration, select: &[(String, String)]) -> String {
    let one = |metric: &str, counted: &str| {
        let series = selector(metric, &matchers(&[], select));
        let sum = format!("sum by (class, length) (increase({series}[{}]))", duration(window));
        format!("label_replace({sum}, \"counted\", \"{counted}\", \"\", \"\")")
    };
    format!("{} or {}", one("slo_total", "judged"), one("slo_met_total", "met"))
}

/// When each class was first seen within a window, in Unix seconds: to the twenty minutes over four weeks, and
/// to a quarter of a minute within the last hour.
#[must_use]
pub fn first_seen(is_recorded: bool, window: Duration, select: &[(String, String)]) -> String {
    let metric =
        if is_recorded { format!("class:slo_judged:rate{}", duration(BASE_RATE)) } else { "slo_total".to_owned() };
    let series = selector(&metric, &matchers(&[], select));
    let step = (window / 2000).max(Duration::from_secs(15));
    let step = Duration::from_secs(step.as_secs());
    let since = |range: Duration, step: Duration| {
        format!("min_over_time(timestamp({series})[{}:{}])", duration(range), duration(step))
    };
    let hour = Duration::from_secs(3600).min(window);
    format!("min by (class) ({} or {})", since(window, step), since(hour, Duration::from_secs(15)))
}

fn matchers<'a>(own: &[Matcher<'a>], select: &'a [(String, String)]) -> Vec<Matcher<'a>> {
    let further = select.iter().map(|(label, value)| Matcher::Is(label, value));
    own.iter().copied().chain(further).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_name_what_the_rules_record_and_what_the_gateway_counts() {
        let day = Duration::from_secs(86_400);
        let select = [("cluster".to_owned(), "e\"u".to_owned())];
        assert_eq!(
            recorded_counts(28 * day, &select),
            "sum by (__name__, class, length) ({__name__=~\"class(_length)?:slo_(judged|missed):increase28d\",cluster=\"e\\\"u\"})"
        );
        assert_eq!(
            counted(day / 24, &[]),
            "label_replace(sum by (class, length) (increase(slo_total[1h])), \"counted\", \"judged\", \"\", \"\") or \
             label_replace(sum by (class, length) (increase(slo_met_total[1h])), \"counted\", \"met\", \"\", \"\")"
        );
        assert_eq!(
            first_seen(true, 28 * day, &[]),
            "min by (class) (min_over_time(timestamp(class:slo_judged:rate8m)[28d:20m9s]) or \
             min_over_time(timestamp(class:slo_judged:rate8m)[1h:15s]))"
        );
        assert!(is_counted_directly(day / 24) && !is_counted_directly(day / 4));
    }
}

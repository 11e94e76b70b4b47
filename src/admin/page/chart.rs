//! Charts of the status page, as SVG without script and inline style.
//!
//! Labels are HTML beside them, because the charts are stretched to the available width.

use maud::{Markup, html};

use super::text::{count, latency};
use crate::admin::status::{HistoryStatus, MissStatus};

const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 96.0;
const BARS: f64 = 36.0;
/// Most bars of a plot; each shows one point or several.
const COLUMNS: usize = 60;
/// The shortest distance of two points, in seconds.
const POINT: f64 = 10.0;
/// The lowest share of a budget that a plot shows.
const LOWEST: f64 = -1.0;

/// Lengths of time that a plot of a young process may show.
const DOMAINS: [u64; 19] = [
    120, 300, 600, 900, 1_200, 1_800, 2_700, 3_600, 7_200, 10_800, 14_400, 21_600, 28_800, 43_200, 64_800, 86_400,
    172_800, 604_800, 1_209_600,
];

/// The length of time that is plotted, in seconds: the whole span, or, while little of it is known, the next
/// round length.
pub(super) fn domain(points: &[HistoryStatus], span_seconds: u64) -> u64 {
    let known = points.first().zip(points.last()).map_or(0.0, |(first, last)| last.unix_seconds - first.unix_seconds);
    let round = DOMAINS.into_iter().find(|length| *length as f64 >= known);
    round.map_or(span_seconds, |length| length.min(span_seconds))
}

/// A plot of the budget, in words and as a chart.
pub(super) struct BudgetPlot {
    /// The share at the lower edge.
    pub bottom: f64,
    /// The picture.
    pub svg: Markup,
}

/// The share of the budget that was left, over the length of a span that ends now.
pub(super) fn budget(points: &[HistoryStatus], span_seconds: f64, label: &str) -> BudgetPlot {
    let shares = points.iter().filter_map(|point| point.budget_remaining);
    let lowest = shares.fold(1.0, f64::min).max(LOWEST);
    // Extends the scale to a quarter overspent, so that the zero line is visible before it is crossed.
    let bottom = if lowest < 0.0 { LOWEST } else { -0.1 };
    let end = points.last().map_or(0.0, |point| point.unix_seconds);
    let x = |point: &HistoryStatus| (WIDTH - (end - point.unix_seconds) / span_seconds.max(1.0) * WIDTH).max(0.0);
    let y = |share: f64| (1.0 - share.clamp(bottom, 1.0)) / (1.0 - bottom) * HEIGHT;
    let mut line = String::new();
    let mut first = None;
    for point in points {
        let Some(share) = point.budget_remaining else { continue };
        first.get_or_insert(x(point));
        line.push_str(&format!("{:.1},{:.1} ", x(point), y(share)));
    }
    let area = first.map(|first| format!("{first:.1},{:.1} {line}{WIDTH},{:.1}", y(0.0), y(0.0)));
    let svg = html! {
        svg.plot viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } preserveAspectRatio="none" role="img" aria-label=(label) {
            line.grid x1="0" x2=(WIDTH) y1=(y(1.0)) y2=(y(1.0)) {}
            line.grid x1="0" x2=(WIDTH) y1=(y(0.5)) y2=(y(0.5)) {}
            @if let Some(area) = &area {
                polygon.area points=(area) {}
            }
            line.zero x1="0" x2=(WIDTH) y1=(y(0.0)) y2=(y(0.0)) {}
            @if !line.is_empty() {
                polyline.line points=(line.trim_end()) {}
            }
        }
    };
    BudgetPlot { bottom, svg }
}

/// Requests met and missed over the same span, in columns.
pub(super) fn outcomes(points: &[HistoryStatus], span_seconds: f64, label: &str) -> (u64, Markup) {
    let end = points.last().map_or(0.0, |point| point.unix_seconds);
    let mut columns = vec![(0, 0); ((span_seconds / POINT) as usize).clamp(12, COLUMNS)];
    for point in points {
        let age = ((end - point.unix_seconds) / span_seconds.max(1.0) * columns.len() as f64).max(0.0) as usize;
        let Some(column) = columns.len().checked_sub(age + 1).and_then(|at| columns.get_mut(at)) else { continue };
        *column = (column.0 + point.met, column.1 + point.judged - point.met);
    }
    let most = columns.iter().map(|(met, missed)| met + missed).max().unwrap_or(0);
    let step = WIDTH / columns.len() as f64;
    let high = |requests: u64| requests as f64 / most.max(1) as f64 * BARS;
    let svg = html! {
        svg.bars viewBox={ "0 0 " (WIDTH) " " (BARS) } preserveAspectRatio="none" role="img" aria-label=(label) {
            @for (at, (met, missed)) in columns.into_iter().enumerate().filter(|(_, (met, missed))| met + missed > 0) {
                g {
                    title { (count(met)) " met, " (count(missed)) " missed" }
                    rect.met x=(round(at as f64 * step + 1.0)) width=(step - 2.0)
                        y=(round(BARS - high(met + missed))) height=(round(high(met + missed))) {}
                    @if missed > 0 {
                        rect.missed x=(round(at as f64 * step + 1.0)) width=(step - 2.0)
                            y=(round(BARS - high(met + missed))) height=(round(high(missed).max(1.5))) {}
                    }
                }
            }
        }
    };
    (most, svg)
}

/// A piece of a request's time.
pub(super) struct TimelineSegment {
    /// `upload`, `queue`, `attempt`, `failed`, `tokens`, `rest`.
    pub kind: &'static str,
    /// Text of the plot.
    pub text: String,
    /// From the request's arrival, in milliseconds.
    pub begin: f64,
    /// Likewise.
    pub end: f64,
}

/// The time of a request, piece by piece.
pub(super) fn timeline_segments(miss: &MissStatus) -> Vec<TimelineSegment> {
    let mut all = Vec::new();
    let mut add = |kind: &'static str, text: String, begin: f64, end: f64| {
        if end > begin {
            let text = format!("{text}: {}", latency((end - begin) / 1000.0));
            all.push(TimelineSegment { kind, text, begin, end });
        }
    };
    let end = miss.end_ms;
    let uploaded = miss.body_complete_ms.unwrap_or(end);
    add("upload", "upload".to_owned(), 0.0, uploaded);
    let first_pick = miss.attempts.first().map(|attempt| attempt.begin_ms);
    let left_queue = match (miss.admitted_ms, first_pick) {
        (Some(admitted), Some(first)) => admitted.min(first),
        (Some(admitted), None) => admitted,
        (None, Some(first)) => first,
        (None, None) => end,
    };
    add("queue", "queue".to_owned(), uploaded, left_queue);
    for (at, attempt) in miss.attempts.iter().enumerate() {
        let next = miss.attempts.get(at + 1).map(|next| next.begin_ms);
        let name = format!("attempt {} at {}", at + 1, attempt.engine);
        match (attempt.failed_ms, next) {
            (Some(failed), next) => {
                let how = attempt.failure.as_deref().unwrap_or("failed");
                add("failed", format!("{name}, {how}"), attempt.begin_ms, failed);
                if let Some(next) = next {
                    add("queue", "between attempts".to_owned(), failed, next);
                }
            }
            (None, Some(next)) => add("attempt", name, attempt.begin_ms, next),
            (None, None) => {
                let until = miss.first_token_ms.unwrap_or(end);
                add("attempt", format!("{name}, to the first token"), attempt.begin_ms, until);
            }
        }
    }
    if let Some(first) = miss.first_token_ms {
        let last = miss.last_token_ms.unwrap_or(first).max(first).min(end);
        add("tokens", "tokens".to_owned(), first, last);
        add("rest", "to the end".to_owned(), last, end);
    }
    all
}

/// The same as a chart, with the TTFT deadline.
pub(super) fn waterfall(miss: &MissStatus, ttft_seconds: Option<f64>) -> Markup {
    let timeline_segments = timeline_segments(miss);
    let total = miss.end_ms.max(0.001);
    let x = |ms: f64| (ms / total * WIDTH).clamp(0.0, WIDTH);
    let promised = ttft_seconds.map(|seconds| miss.client_wait_ms.unwrap_or(0.0) + seconds * 1000.0);
    let promised = promised.filter(|ms| *ms < total);
    let words: Vec<&str> = timeline_segments.iter().map(|segment| segment.text.as_str()).collect();
    let label = if words.is_empty() { "no time at all".to_owned() } else { words.join(", ") };
    html! {
        svg.waterfall viewBox={ "0 0 " (WIDTH) " 14" } preserveAspectRatio="none" role="img" aria-label=(label) {
            @for segment in &timeline_segments {
                rect class=(segment.kind) x=(round(x(segment.begin))) y="1" height="12"
                    width=(round((x(segment.end) - x(segment.begin)).max(1.5))) {
                    title { (segment.text) }
                }
            }
            @if let Some(ms) = promised {
                line.promised x1=(round(x(ms))) x2=(round(x(ms))) y1="0" y2="14" {
                    title { "the first token was promised by here" }
                }
            }
        }
    }
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::AttemptStatus;

    fn point(unix_seconds: f64, met: u64, judged: u64, budget_remaining: Option<f64>) -> HistoryStatus {
        HistoryStatus { unix_seconds, met, judged, budget_remaining }
    }

    #[test]
    fn a_budget_without_judgement_has_no_line_and_one_that_is_overdrawn_shows_below_zero() {
        let empty = budget(&[point(10.0, 0, 0, None)], 3600.0, "none");
        assert!(!empty.svg.into_string().contains("polyline"));
        let points = [point(0.0, 1, 1, Some(1.0)), point(1800.0, 0, 9, Some(-0.5)), point(3600.0, 0, 9, Some(-7.0))];
        let plot = budget(&points, 3600.0, "chat");
        let svg = plot.svg.into_string();
        assert_eq!(plot.bottom, -1.0);
        assert!(svg.contains("points=\"0.0,0.0 300.0,72.0 600.0,96.0\""), "{svg}");
        assert!(svg.contains("role=\"img\" aria-label=\"chat\""), "{svg}");
    }

    #[test]
    fn a_young_process_fills_its_plots() {
        let known = |seconds| [point(1000.0, 0, 0, None), point(1000.0 + seconds, 0, 0, None)];
        let hour = 3600;
        assert_eq!([0.0, 119.0, 121.0, 3000.0].map(|seconds| domain(&known(seconds), hour)), [120, 120, 300, 3600]);
        let month = 28 * 86_400;
        assert_eq!([100_000.0, 1e6, 2e6].map(|seconds| domain(&known(seconds), month)), [172_800, 1_209_600, month]);
        assert_eq!(domain(&[], 90), 90);
    }

    #[test]
    fn requests_fall_into_columns_by_their_age() {
        let points = [point(60.0, 3, 3, None), point(3590.0, 0, 2, None), point(3600.0, 4, 5, None)];
        let (most, svg) = outcomes(&points, 3600.0, "chat");
        let svg = svg.into_string();
        assert_eq!(most, 7, "what is of the last minute stands together");
        assert!(svg.contains("4 met, 3 missed") && svg.contains("3 met, 0 missed"), "{svg}");
        assert_eq!(svg.matches("class=\"missed\"").count(), 1);
        assert_eq!(outcomes(&[], 3600.0, "none").0, 0);
    }

    fn miss() -> MissStatus {
        let attempt = |engine: &str, begin_ms, failed: Option<(f64, &str)>| AttemptStatus {
            pool: "main".to_owned(),
            engine: engine.to_owned(),
            begin_ms,
            failed_ms: failed.map(|(ms, _)| ms),
            failure: failed.map(|(_, how)| how.to_owned()),
        };
        MissStatus {
            body_complete_ms: Some(20.0),
            admitted_ms: Some(120.0),
            attempts: vec![attempt("a:1", 120.0, Some((150.0, "push_back"))), attempt("b:1", 160.0, None)],
            first_token_ms: Some(1400.0),
            last_token_ms: Some(2400.0),
            end_ms: 2500.0,
            ..MissStatus::default()
        }
    }

    #[test]
    fn the_time_of_a_request_is_told_without_holes() {
        let all = timeline_segments(&miss());
        let kinds: Vec<_> = all.iter().map(|segment| (segment.kind, segment.begin, segment.end)).collect();
        let expected = [
            ("upload", 0.0, 20.0),
            ("queue", 20.0, 120.0),
            ("failed", 120.0, 150.0),
            ("queue", 150.0, 160.0),
            ("attempt", 160.0, 1400.0),
            ("tokens", 1400.0, 2400.0),
            ("rest", 2400.0, 2500.0),
        ];
        assert_eq!(kinds, expected);
        assert_eq!(all[2].text, "attempt 1 at a:1, push_back: 30 ms");
        let shed = MissStatus { body_complete_ms: Some(3.0), end_ms: 500.0, ..MissStatus::default() };
        let kinds: Vec<_> = timeline_segments(&shed).iter().map(|segment| (segment.kind, segment.end)).collect();
        assert_eq!(kinds, [("upload", 3.0), ("queue", 500.0)], "it never left the queue");
        let cut = MissStatus { body_complete_ms: None, end_ms: 70.0, ..MissStatus::default() };
        assert_eq!(timeline_segments(&cut).len(), 1, "its body never came");
    }

    #[test]
    fn the_promised_moment_stands_in_the_picture_where_it_was_passed() {
        let svg = waterfall(&miss(), Some(1.25)).into_string();
        assert!(svg.contains("class=\"promised\" x1=\"300\""), "{svg}");
        assert!(svg.contains("aria-label=\"upload: 20 ms, queue: 100 ms, attempt 1"), "{svg}");
        assert!(!waterfall(&miss(), Some(60.0)).into_string().contains("promised"));
        assert!(waterfall(&MissStatus::default(), None).into_string().contains("no time at all"));
    }
}

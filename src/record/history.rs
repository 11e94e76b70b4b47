//! History of a class for plots, of bounded size.
//!
//! Three spans of [`POINTS`] points each: the last hour, the last day, and the class's window. Memory grows
//! neither with traffic nor with time. Pure: moments are arguments.

use std::collections::VecDeque;
use std::time::Duration;

use super::burn::JudgedCount;
use crate::types::Tick;

/// Points of each span.
const POINTS: u32 = 360;

/// How often [`ClassHistory::sample`] is to be called: one point of the last hour.
pub(super) const SAMPLED_EVERY: Duration = Duration::from_secs(10);

const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A time span of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HistorySpan {
    /// The last hour.
    #[default]
    Hour,
    /// The last day.
    Day,
    /// The class's window.
    Window,
}

impl HistorySpan {
    /// All of them.
    pub const ALL: [HistorySpan; 3] = [HistorySpan::Hour, HistorySpan::Day, HistorySpan::Window];

    /// The name of it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            HistorySpan::Hour => "hour",
            HistorySpan::Day => "day",
            HistorySpan::Window => "window",
        }
    }
}

/// Counts between two moments, and the remaining budget at the second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HistoryPoint {
    /// The second moment.
    pub at: Tick,
    /// Requests met and judged since the point before.
    pub count: JudgedCount,
    /// Remaining share of the budget; `None` before the first judged request.
    pub budget_left: Option<f64>,
}

/// The history of one class.
#[derive(Debug)]
pub(super) struct ClassHistory {
    spans: [SampledSpan; 3],
}

#[derive(Debug)]
struct SampledSpan {
    length: Duration,
    since: Tick,
    next: Tick,
    fresh: JudgedCount,
    points: VecDeque<HistoryPoint>,
}

impl ClassHistory {
    /// The history of a class with this window, from `since` on.
    pub(super) fn new(window: Duration, since: Tick) -> Self {
        ClassHistory { spans: [HOUR, DAY, window].map(|length| SampledSpan::new(length, since)) }
    }

    /// Sets the window; a different length restarts that span.
    pub(super) fn set_window(&mut self, window: Duration, at: Tick) {
        let own = &mut self.spans[HistorySpan::Window as usize];
        if own.length != window {
            *own = SampledSpan::new(window, at);
        }
    }

    /// A judged request ended.
    pub(super) fn note(&mut self, met: bool) {
        for span in &mut self.spans {
            span.fresh.judged += 1;
            span.fresh.met += u64::from(met);
        }
    }

    /// Adds the points that are due, with the current budget.
    pub(super) fn sample(&mut self, budget_left: Option<f64>, at: Tick) {
        self.spans.iter_mut().for_each(|span| span.sample(budget_left, at));
    }

    /// The length of a span, and its points with one for this moment behind them.
    pub(super) fn span(&self, span: HistorySpan, budget_left: Option<f64>, at: Tick) -> (Duration, Vec<HistoryPoint>) {
        let span = &self.spans[span as usize];
        let now = HistoryPoint { at, count: span.fresh, budget_left };
        let live = span.points.iter().copied().filter(|point| point.at + span.length >= at);
        (span.length, live.chain([now]).collect())
    }
}

impl SampledSpan {
    fn new(length: Duration, since: Tick) -> Self {
        let mut span =
            SampledSpan { length, since, next: since, fresh: JudgedCount::default(), points: VecDeque::new() };
        span.next = since + span.step();
        span
    }

    fn step(&self) -> Duration {
        (self.length / POINTS).max(Duration::from_millis(1))
    }

    fn sample(&mut self, budget_left: Option<f64>, at: Tick) {
        if at < self.next {
            return;
        }
        let count = std::mem::take(&mut self.fresh);
        self.points.push_back(HistoryPoint { at, count, budget_left });
        if self.points.len() > POINTS as usize {
            self.points.pop_front();
        }
        // Due at whole steps, so that a late call delays no other.
        let steps = at.since(self.since).as_nanos() / self.step().as_nanos() + 1;
        self.next = self.since + self.step() * u32::try_from(steps).unwrap_or(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(28 * 24 * 60 * 60);

    fn seconds(n: u64) -> Tick {
        Tick::from_millis(n * 1000)
    }

    fn judged(points: &[HistoryPoint]) -> u64 {
        points.iter().map(|point| point.count.judged).sum()
    }

    #[test]
    fn a_point_every_ten_seconds_tells_what_was_counted_since_the_one_before() {
        let mut history = ClassHistory::new(WINDOW, seconds(5));
        for second in 5..65 {
            history.note(second % 2 == 0);
            history.sample(Some(0.5), seconds(second));
        }
        let (length, points) = history.span(HistorySpan::Hour, Some(0.25), seconds(65));
        assert_eq!(length, HOUR);
        assert_eq!(points.iter().map(|point| point.at).collect::<Vec<_>>(), [15, 25, 35, 45, 55, 65].map(seconds));
        assert_eq!(points[1].count, JudgedCount { met: 5, judged: 10 });
        assert_eq!(points.last().unwrap().budget_left, Some(0.25), "the last one is of this moment");
        assert_eq!(judged(&points), 60);
        assert_eq!(history.span(HistorySpan::Window, None, seconds(65)).1.len(), 1, "its first step is two hours");
    }

    #[test]
    fn a_year_takes_as_much_room_as_an_hour() {
        let mut history = ClassHistory::new(WINDOW, Tick::ZERO);
        let year = 365 * 24 * 60 * 60;
        for second in (0..year).step_by(60) {
            history.note(true);
            history.sample(Some(1.0), seconds(second));
        }
        for span in &history.spans {
            assert!(span.points.len() <= POINTS as usize, "{}", span.points.len());
        }
        let (length, points) = history.span(HistorySpan::Day, Some(1.0), seconds(year));
        assert!(points.len() > 350 && points[0].at + length >= seconds(year));
        let counted = judged(&points);
        // One per minute; the oldest point also covers the time before it.
        assert!((1440..=1444).contains(&counted), "{counted}");
    }

    #[test]
    fn after_a_pause_one_point_tells_of_all_of_it() {
        let mut history = ClassHistory::new(WINDOW, Tick::ZERO);
        history.note(false);
        history.sample(None, seconds(1000));
        history.sample(None, seconds(1001));
        history.sample(None, seconds(1010));
        let (_, points) = history.span(HistorySpan::Hour, None, seconds(1012));
        assert_eq!(points.iter().map(|point| point.at).collect::<Vec<_>>(), [1000, 1010, 1012].map(seconds));
        assert_eq!(points[0].count.judged, 1);
    }

    #[test]
    fn another_window_begins_anew_and_the_other_spans_go_on() {
        let mut history = ClassHistory::new(HOUR, Tick::ZERO);
        history.note(true);
        history.set_window(HOUR, seconds(1));
        assert_eq!(judged(&history.span(HistorySpan::Window, None, seconds(2)).1), 1);
        history.set_window(WINDOW, seconds(3));
        assert_eq!(judged(&history.span(HistorySpan::Window, None, seconds(4)).1), 0);
        assert_eq!(judged(&history.span(HistorySpan::Day, None, seconds(4)).1), 1);
    }
}

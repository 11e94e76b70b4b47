//! Which burn of a budget is worth a page or a ticket, and over which windows.
//!
//! A burn rate is bounded: a class that misses every request burns 1 / (1 - target), 12.5 at a target of 92 %.
//! Fixed thresholds such as 14.4 can therefore never be crossed for low targets, and those
//! close below the bound only in a total outage. Each tier states the share of the budget
//! that may be used within its window, and how far the threshold may lie between the budget and a total outage:
//!
//! ```text
//! b  = min(c W / w, 1 + k (1/B - 1))     burn rate
//! e* = b B <= B + k (1 - B)              miss ratio
//! ```
//!
//! with the budget `B` = 1 - target, the class's window `W`, the tier's window `w`, its share of the
//! budget `c` and its reach `k`. No tier is below 1.5 times the budget (as far as its reach allows), because a service
//! that just keeps its promise must get no ticket.

use std::time::Duration;

use super::binomial::min_requests;
use super::severity::Severity;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The class window for which the tiers' windows are written; shorter ones scale them.
const USUAL_WINDOW: Duration = Duration::from_secs(28 * 24 * 60 * 60);

/// The shortest long and short window: below it a few scrapes would decide.
const SHORTEST: (Duration, Duration) = (Duration::from_secs(10 * 60), Duration::from_secs(2 * 60));

/// If the fast page needs longer than this in a full outage, the outage tier comes before it.
const SLOW_TO_PAGE: Duration = Duration::from_secs(10 * 60);

/// The lowest burn rate worth an alert.
const FLOOR: f64 = 1.5;

/// How urgent a burn is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BurnTier {
    /// Nearly everything misses.
    Outage,
    /// The budget is gone within a day or two.
    Fast,
    /// The budget is gone within a week.
    Slow,
    /// The budget will not last: seen over a day.
    Day,
    /// The same, seen over three days.
    ThreeDays,
}

/// A tier's parameters, for a class window of 28 days.
struct TierShape {
    tier: BurnTier,
    severity: Severity,
    long: Duration,
    short: Duration,
    /// `c`; none: only the reach counts.
    share: Option<f64>,
    /// `k`.
    reach: f64,
    /// Reach of the floor: more than `k` only if the floor applies first.
    floor_reach: f64,
}

const TIERS: [TierShape; 5] = [
    TierShape {
        tier: BurnTier::Outage,
        severity: Severity::Page,
        long: SHORTEST.0,
        short: SHORTEST.1,
        share: None,
        reach: 0.8,
        floor_reach: 0.8,
    },
    TierShape {
        tier: BurnTier::Fast,
        severity: Severity::Page,
        long: HOUR,
        short: Duration::from_secs(5 * 60),
        share: Some(0.02),
        reach: 0.5,
        floor_reach: 0.5,
    },
    TierShape {
        tier: BurnTier::Slow,
        severity: Severity::Page,
        long: Duration::from_secs(6 * 60 * 60),
        short: Duration::from_secs(30 * 60),
        share: Some(0.05),
        reach: 0.3,
        floor_reach: 0.3,
    },
    TierShape {
        tier: BurnTier::Day,
        severity: Severity::Ticket,
        long: DAY,
        short: Duration::from_secs(2 * 60 * 60),
        share: Some(0.1),
        reach: 0.1,
        floor_reach: 0.1,
    },
    TierShape {
        tier: BurnTier::ThreeDays,
        severity: Severity::Ticket,
        long: Duration::from_secs(3 * 24 * 60 * 60),
        short: Duration::from_secs(6 * 60 * 60),
        share: Some(0.1),
        reach: 0.1,
        floor_reach: 0.5,
    },
];

impl BurnTier {
    /// The value of the label `tier`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            BurnTier::Outage => "outage",
            BurnTier::Fast => "fast",
            BurnTier::Slow => "slow",
            BurnTier::Day => "day",
            BurnTier::ThreeDays => "three_days",
        }
    }
}

/// A tier as it applies to one class.
#[derive(Clone, Debug, PartialEq)]
pub struct BurnAlert {
    /// Which tier it is.
    pub tier: BurnTier,
    /// Whom it reaches.
    pub severity: Severity,
    /// The window over which the threshold must be crossed.
    pub long: Duration,
    /// The window over which it must still be crossed: clears the alert soon after a recovery.
    pub short: Duration,
    /// The burn rate above which it fires.
    pub burn: f64,
    /// The same as a miss ratio.
    pub miss_ratio: f64,
    /// Requests that the long window must hold.
    pub min_requests: u64,
}

impl BurnAlert {
    /// Time in which a steady miss ratio crosses the threshold, after a time without misses; `None` if never.
    #[must_use]
    pub fn time_to_fire(&self, miss_ratio: f64) -> Option<Duration> {
        (miss_ratio > self.miss_ratio).then(|| self.long.mul_f64(self.miss_ratio / miss_ratio))
    }

    /// A class must have been seen longer ago than this: as long as a full outage takes to
    /// cross the threshold. A range over a younger series is only as long as the series.
    #[must_use]
    pub fn seen_before(&self) -> Duration {
        Duration::from_secs(self.long.mul_f64(self.miss_ratio.min(1.0)).as_secs())
    }

    fn of(shape: &TierShape, budget: f64, window: Duration) -> Self {
        let scale = (window.as_secs_f64() / USUAL_WINDOW.as_secs_f64()).min(1.0);
        let long = rounded(shape.long.mul_f64(scale)).max(SHORTEST.0);
        let short = rounded(shape.short.mul_f64(scale)).max(SHORTEST.1);
        let bound = |reach: f64| 1.0 + reach * (1.0 / budget - 1.0);
        let by_share = shape.share.map_or(f64::INFINITY, |share| share * window.as_secs_f64() / long.as_secs_f64());
        let burn = by_share.min(bound(shape.reach)).max(FLOOR.min(bound(shape.floor_reach)));
        let miss_ratio = burn * budget;
        let min_requests = min_requests(budget, miss_ratio);
        BurnAlert { tier: shape.tier, severity: shape.severity, long, short, burn, miss_ratio, min_requests }
    }
}

/// The burn alerts of a class that may miss the share `budget` within `window`, the most urgent first. A class that may miss nothing has no burn rate, and none of them.
#[must_use]
pub fn burn_alerts(budget: f64, window: Duration) -> Vec<BurnAlert> {
    if budget <= 0.0 {
        return Vec::new();
    }
    let mut all: Vec<BurnAlert> = TIERS.iter().map(|shape| BurnAlert::of(shape, budget, window)).collect();
    let fast_is_slow = all[1].time_to_fire(1.0).is_none_or(|time| time > SLOW_TO_PAGE);
    if !fast_is_slow {
        all.remove(0);
    }
    // Windows that have shrunk to the same length differ only in their thresholds: the lower one fires first.
    let doubled = |alert: &BurnAlert, other: &BurnAlert| {
        let is_alike = (alert.severity, alert.long) == (other.severity, other.long) && alert.tier != other.tier;
        is_alike && (other.miss_ratio, other.tier) < (alert.miss_ratio, alert.tier)
    };
    let kept = all.iter().filter(|alert| !all.iter().any(|other| doubled(alert, other)));
    kept.cloned().collect()
}

/// To whole minutes, and to half ones below ten.
fn rounded(length: Duration) -> Duration {
    let step = if length < 10 * MINUTE { 30.0 } else { 60.0 };
    Duration::from_secs_f64((length.as_secs_f64() / step).round() * step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(target: f64, days: u32) -> Vec<BurnAlert> {
        burn_alerts(1.0 - target, days * DAY)
    }

    fn ratios(alerts: &[BurnAlert]) -> Vec<f64> {
        alerts.iter().map(|alert| (alert.miss_ratio * 1e4).round() / 1e4).collect()
    }

    fn minutes(length: Option<Duration>) -> f64 {
        (length.unwrap().as_secs_f64() / 6.0).round() / 10.0
    }

    #[test]
    fn a_target_of_92_percent_over_28_days() {
        let alerts = of(0.92, 28);
        assert_eq!(ratios(&alerts), [0.816, 0.54, 0.356, 0.172, 0.12]);
        assert_eq!(alerts.iter().map(|alert| alert.min_requests).collect::<Vec<_>>(), [4, 10, 23, 157, 734]);
        let first_page = alerts.iter().filter_map(|alert| alert.time_to_fire(1.0)).min();
        assert_eq!(minutes(first_page), 8.2);
        assert_eq!(alerts[0].time_to_fire(0.816), None);
        assert_eq!(minutes(alerts[1].time_to_fire(0.6)), 54.0);
    }

    #[test]
    fn a_high_target_burns_fast_enough_without_the_outage_tier() {
        let alerts = of(0.999, 28);
        assert_eq!(alerts[0].tier, BurnTier::Fast);
        assert_eq!(ratios(&alerts), [0.0134, 0.0056, 0.0028, 0.0015]);
        assert_eq!(alerts[0].min_requests, 298);
        assert_eq!(minutes(alerts[0].time_to_fire(1.0)), 0.8);
    }

    #[test]
    fn windows_of_a_week_are_a_quarter_as_long_down_to_ten_minutes() {
        let windows: Vec<(u64, u64)> =
            of(0.95, 7).iter().map(|alert| (alert.long.as_secs(), alert.short.as_secs())).collect();
        let minutes = |long: u64, short: f64| (long * 60, (short * 60.0) as u64);
        let week = [minutes(15, 2.0), minutes(90, 7.5), minutes(360, 30.0), minutes(1080, 90.0)];
        assert_eq!(windows, week, "the fast page takes 7.9 minutes: no outage tier");
        assert_eq!(of(0.9, 90)[2].long, 6 * HOUR, "longer ones stretch nothing");
    }

    #[test]
    fn no_budget_has_no_burn() {
        assert!(of(1.0, 28).is_empty());
    }

    #[test]
    fn windows_that_shrink_to_one_leave_the_lower_threshold() {
        let alerts = burn_alerts(0.08, HOUR);
        let pages: Vec<&BurnAlert> = alerts.iter().filter(|alert| alert.severity == Severity::Page).collect();
        assert_eq!(pages.len(), 1, "{alerts:?}");
        assert_eq!(alerts.len(), 2, "{alerts:?}");
    }

    proptest! {
        #[test]
        fn every_threshold_can_be_crossed_and_none_by_keeping_the_promise(
            target in 0.01_f64..0.99999,
            hours in 1_u32..(366 * 24),
        ) {
            let budget = 1.0 - target;
            for alert in burn_alerts(budget, hours * HOUR) {
                prop_assert!(alert.miss_ratio > budget * 1.000_001 && alert.miss_ratio < 1.0, "{alert:?}");
                prop_assert!(alert.short < alert.long, "{alert:?}");
                prop_assert!(alert.min_requests < u64::MAX, "{alert:?}");
                let reach = if alert.tier == BurnTier::Outage { 0.8 } else { 0.5 };
                prop_assert!(alert.miss_ratio <= budget + reach * (1.0 - budget) + 1e-9, "{alert:?}");
            }
        }

        #[test]
        fn a_full_outage_pages_within_ten_minutes(target in 0.05_f64..0.9999, days in 1_u32..366) {
            let alerts = burn_alerts(1.0 - target, days * DAY);
            let pages = alerts.iter().filter(|alert| alert.severity == Severity::Page);
            let first = pages.filter_map(|alert| alert.time_to_fire(1.0)).min().unwrap();
            prop_assert!(first <= SLOW_TO_PAGE, "{first:?} {alerts:?}");
        }
    }
}

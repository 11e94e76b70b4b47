//! How sure an attainment is: Wilson's interval, and when enough requests have been seen. Pure.
//!
//! The interval is Wilson's score interval (E. B. Wilson, 1927), which stays inside 0 to 1 and holds its
//! level near both. Misses of a queue come in bursts, so the requests of a run are worth fewer independent ones:
//! [`correlation_time`] says how many times fewer, and the interval is taken over that many. A run that is shorter than
//! the bursts of its queue cannot know them; so a share below its target is believed only where the run is long against
//! what it shows of them, or where the backlog grows as no backlog does that a service keeps up with ([`grows`]).
//!
//! A run that is looked at often enough shows whatever one hopes for. So it is looked at only at sizes fixed
//! before it begins, and each look has its share of the error that is allowed for all of them (Bonferroni).

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

/// A range that holds the true share with the confidence asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShareInterval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Wilson's score interval for `share`, seen over `n` independent requests. The interval [0, 1] for none.
#[must_use]
pub fn wilson(share: f64, n: f64, confidence: f64) -> ShareInterval {
    if n <= 0.0 {
        return ShareInterval { low: 0.0, high: 1.0 };
    }
    let z = two_sided_z(confidence);
    let z2 = z * z;
    let middle = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = z / (1.0 + z2 / n) * (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
    // Rounding may move the ends slightly beyond the exact values at shares of 0 and 1.
    ShareInterval { low: (middle - half).clamp(0.0, share), high: (middle + half).clamp(share, 1.0) }
}

/// The score that a standard normal value stays within, on both sides, with this probability.
#[must_use]
pub fn two_sided_z(confidence: f64) -> f64 {
    Normal::standard().inverse_cdf(1.0 - (1.0 - confidence.clamp(0.0, 1.0 - 1e-12)) / 2.0)
}

/// Requests after which a share near `p` has this standard error: p(1-p)/n.
#[must_use]
pub fn samples_for(p: f64, standard_error: f64) -> u64 {
    (p * (1.0 - p) / (standard_error * standard_error)).ceil().max(1.0) as u64
}

/// Points of a sequence whose correlation is reckoned; longer ones are averaged in blocks.
const MOST_POINTS: usize = 512;

/// Safety on the correlation time, which short sequences show too small.
const CORRELATION_MARGIN: f64 = 1.5;

/// Requests, in correlation times, over which a share below its target is distinguishable from one long burst
/// of misses.
const RESOLVED_AFTER: f64 = 30.0;

/// How many values of this sequence weigh as much as one independent value: its integrated autocorrelation time, at
/// least 1, by the initial monotone sequence of pairs (C. J. Geyer, 1992). A sequence that is shorter than its true time
/// shows a part of it.
#[must_use]
pub fn correlation_time(values: &[f64]) -> f64 {
    let n = values.len();
    let mean = values.iter().sum::<f64>() / n.max(1) as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / n.max(1) as f64;
    if n < 4 || variance <= 0.0 {
        return 1.0;
    }
    let block = n.div_ceil(MOST_POINTS);
    let points: Vec<f64> =
        values.chunks_exact(block).map(|block| block.iter().sum::<f64>() / block.len() as f64 - mean).collect();
    let at = |lag: usize| {
        points.iter().zip(&points[lag..]).map(|(early, late)| early * late).sum::<f64>() / points.len() as f64
    };
    let of_blocks = at(0);
    let (mut sum, mut smallest) = (0.0, f64::INFINITY);
    for lag in (0..points.len() - 1).step_by(2) {
        let pair = at(lag) + at(lag + 1);
        if pair <= 0.0 {
            break;
        }
        smallest = pair.min(smallest);
        sum += smallest;
    }
    // The variance of block means is that of values, and what values of a block have in common.
    (block as f64 * (2.0 * sum - of_blocks) / variance).max(1.0)
}

/// Ranks, from 0; equal values have the mean of theirs.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    for same in order.chunk_by(|a, b| values[*a] == values[*b]) {
        let middle = from as f64 + (same.len() - 1) as f64 / 2.0;
        same.iter().for_each(|place| ranks[*place] = middle);
        from += same.len();
    }
    ranks
}

/// Requests of a run in the order of their arrival, as far as an interval needs them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcomes {
    met: Vec<bool>,
    latencies: Vec<f64>,
}

impl Outcomes {
    /// Adds a judged request: whether it was met, and its latency in seconds (infinite without one).
    pub fn push(&mut self, met: bool, latency: f64) {
        self.met.push(met);
        self.latencies.push(latency);
    }

    /// Adds those of another run behind these.
    pub fn append(&mut self, other: &Outcomes) {
        self.met.extend_from_slice(&other.met);
        self.latencies.extend_from_slice(&other.latencies);
    }

    /// Requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.met.len()
    }

    /// Whether no request was added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.met.is_empty()
    }

    /// Requests that were met.
    #[must_use]
    pub fn met(&self) -> usize {
        self.met.iter().filter(|met| **met).count()
    }

    /// The first requests, in the order of their arrival.
    #[must_use]
    pub fn first(&self, count: usize) -> Outcomes {
        let count = count.min(self.len());
        Outcomes { met: self.met[..count].to_vec(), latencies: self.latencies[..count].to_vec() }
    }

    /// The share that was met.
    #[must_use]
    pub fn attainment(&self) -> f64 {
        share_of(&self.met)
    }

    /// Requests that weigh as much as one independent request, the longer of two times: that of outcomes, and that of
    /// latencies, by their ranks. A queue shows in its latencies that its requests depend on each other long before the
    /// first miss.
    fn correlation(&self) -> f64 {
        let outcomes: Vec<f64> = self.met.iter().map(|met| f64::from(u8::from(*met))).collect();
        correlation_time(&outcomes).max(correlation_time(&ranks(&self.latencies)))
    }

    /// Independent requests that these are worth.
    #[must_use]
    pub fn effective(&self) -> f64 {
        self.len() as f64 / (CORRELATION_MARGIN * self.correlation())
    }

    /// Whether they are many against the time over which they depend on each other: misses are then not one burst.
    #[must_use]
    pub fn is_resolved(&self) -> bool {
        self.len() as f64 >= RESOLVED_AFTER * self.correlation()
    }

    /// Wilson's interval of the attainment.
    #[must_use]
    pub fn interval(&self, confidence: f64) -> ShareInterval {
        wilson(self.attainment(), self.effective(), confidence)
    }
}

fn share_of(met: &[bool]) -> f64 {
    met.iter().filter(|met| **met).count() as f64 / met.len().max(1) as f64
}

/// Result of evaluating a run against its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The interval lies above the target.
    Above,
    /// The interval lies below the target.
    Below,
    /// It holds the target: more requests are needed.
    Open,
}

/// Sample sizes at which a run is looked at, fixed before it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Looks {
    sizes: Vec<u64>,
    /// Confidence of the interval of each look.
    confidence: f64,
}

impl Looks {
    /// Looks at `first` requests, at twice as many, and so on, and last at `last`. Together they call a run whose
    /// truth is the target something else with probability `1 - confidence` at most.
    #[must_use]
    pub fn doubling(first: u64, last: u64, confidence: f64) -> Self {
        let sizes = std::iter::successors(Some(first.max(1)), |size| size.checked_mul(2));
        let mut sizes: Vec<u64> = sizes.take_while(|size| *size < last).collect();
        sizes.push(last.max(1));
        let confidence = 1.0 - (1.0 - confidence) / sizes.len() as f64;
        Looks { sizes, confidence }
    }

    /// The sizes, ascending.
    #[must_use]
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// Confidence of each look.
    #[must_use]
    pub fn confidence(&self) -> f64 {
        self.confidence
    }

    /// Evaluates these requests against the target.
    #[must_use]
    pub fn decide(&self, seen: &Outcomes, target: f64) -> Decision {
        let interval = seen.interval(self.confidence);
        if interval.low > target {
            Decision::Above
        } else if interval.high < target && seen.is_resolved() {
            Decision::Below
        } else {
            Decision::Open
        }
    }
}

/// Whether this growth of the backlog over this many arrivals shows an overloaded service. Under a
/// sustainable load the growth is at most that of a random walk with the variation of the gaps between
/// arrivals (squared coefficient; 1 for Poisson) and as much again for service times.
#[must_use]
pub fn grows(growth: f64, arrivals: f64, variation: f64, confidence: f64) -> bool {
    growth > 1.0 + two_sided_z(confidence) * (arrivals * (variation.max(1.0) + 1.0)).sqrt()
}

/// The difference of two shares, Newcombe's hybrid score interval (method 10, 1998), and whether it is more than
/// chance would make.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShareDifference {
    /// Second share minus first.
    pub difference: f64,
    /// Lower end of its interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Two-sided p-value of the pooled test that both shares are equal.
    pub p_value: f64,
}

/// Compares two shares, each with the number of independent requests behind it.
#[must_use]
pub fn difference(first: (f64, f64), second: (f64, f64), confidence: f64) -> ShareDifference {
    let ((p1, n1), (p2, n2)) = (first, second);
    let (one, two) = (wilson(p1, n1, confidence), wilson(p2, n2, confidence));
    let difference = p2 - p1;
    let low = difference - ((p2 - two.low).powi(2) + (one.high - p1).powi(2)).sqrt();
    let high = difference + ((two.high - p2).powi(2) + (p1 - one.low).powi(2)).sqrt();
    let pooled = (p1 * n1 + p2 * n2) / (n1 + n2);
    let error = (pooled * (1.0 - pooled) * (1.0 / n1 + 1.0 / n2)).sqrt();
    let p_value = if error > 0.0 { 2.0 * Normal::standard().sf((difference / error).abs()) } else { 1.0 };
    ShareDifference { difference, low, high, p_value }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Fewest requests after which an interval over exactly this share clears the target.
    fn clears_after(share: f64, target: f64) -> u64 {
        (1..100_000).find(|n| wilson(share, *n as f64, 0.95).low > target).unwrap()
    }

    #[test]
    fn wilson_agrees_with_published_values_and_with_the_requests_that_a_difference_takes() {
        // Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
        for (met, n, low, high) in [
            (81.0, 263.0, 0.2553, 0.3662),
            (15.0, 148.0, 0.0624, 0.1605),
            (0.0, 20.0, 0.0, 0.1611),
            (1.0, 29.0, 0.0061, 0.1718),
        ] {
            let found = wilson(met / n, n, 0.95);
            assert!((found.low - low).abs() < 1e-4 && (found.high - high).abs() < 1e-4, "{met} of {n}: {found:?}");
        }
        assert!((112..=120).contains(&clears_after(0.97, 0.92)), "{}", clears_after(0.97, 0.92));
        assert!((2_820..=2_835).contains(&clears_after(0.93, 0.92)), "{}", clears_after(0.93, 0.92));
        assert_eq!(wilson(0.5, 0.0, 0.95), ShareInterval { low: 0.0, high: 1.0 });
    }

    #[test]
    fn samples_follow_from_the_standard_error() {
        assert_eq!(samples_for(0.95, 0.0154), 201, "about 1.5 points at 200 requests");
        assert_eq!(samples_for(0.92, 0.01), 736);
    }

    /// Outcomes of this share, in bursts of equal ones whose latencies are alike.
    fn sequence(chance: &mut StdRng, share: f64, burst: usize, count: usize) -> Outcomes {
        let mut all = Outcomes::default();
        while all.len() < count {
            let latency = chance.random::<f64>();
            (0..burst).for_each(|_| all.push(latency < share, latency));
        }
        all.first(count)
    }

    /// The share of 300 runs whose first decision that is not `Open` is this one, and the mean size at which it
    /// falls.
    fn decisions(share: f64, target: f64, burst: usize, of: Decision) -> (f64, f64) {
        let looks = Looks::doubling(100, 1600, 0.95);
        let mut chance = StdRng::seed_from_u64(5);
        let (mut found, mut sizes) = (0.0, 0.0);
        for _ in 0..300 {
            let all = sequence(&mut chance, share, burst, 1600);
            let look = |size: &u64| (*size, looks.decide(&all.first(*size as usize), target));
            let decided = looks.sizes().iter().map(look).find(|(_, decision)| *decision != Decision::Open);
            if let Some((size, _)) = decided.filter(|(_, decision)| *decision == of) {
                found += 1.0;
                sizes += size as f64;
            }
        }
        (found / 300.0, sizes / f64::max(found, 1.0))
    }

    fn wrong(burst: usize) -> f64 {
        decisions(0.92, 0.92, burst, Decision::Above).0 + decisions(0.92, 0.92, burst, Decision::Below).0
    }

    #[test]
    fn looking_often_does_not_make_a_run_on_its_target_look_better_or_worse() {
        assert!(wrong(1) < 0.05, "{}", wrong(1));
    }

    #[test]
    fn a_run_far_from_its_target_ends_early_and_one_near_it_takes_long() {
        let (found, size) = decisions(0.97, 0.92, 1, Decision::Above);
        assert!(found > 0.95 && size < 600.0, "{found} {size}");
        let (found, _) = decisions(0.93, 0.92, 1, Decision::Above);
        assert!(found < 0.6, "{found}");
        let (found, size) = decisions(0.6, 0.92, 1, Decision::Below);
        assert!(found > 0.95 && size < 200.0, "{found} {size}");
    }

    #[test]
    fn misses_that_come_in_bursts_weigh_less() {
        let mut chance = StdRng::seed_from_u64(9);
        let worth = |chance: &mut StdRng, burst| 4_000.0 / sequence(chance, 0.9, burst, 4_000).effective();
        assert!(worth(&mut chance, 1) < 3.0);
        assert!((4.0..25.0).contains(&worth(&mut chance, 10)));
        assert_eq!(correlation_time(&[1.0; 1000]), 1.0);
        assert!(wrong(10) < 0.05, "{}", wrong(10));
    }

    #[test]
    fn the_correlation_time_of_a_process_that_is_known_is_found() {
        let mut chance = StdRng::seed_from_u64(2);
        for (memory, count) in [(0.0, 400), (0.5, 400), (0.9, 4_000), (0.98, 40_000)] {
            let mut value = 0.0;
            let values: Vec<f64> = (0..count)
                .map(|_| {
                    value = memory * value + chance.random::<f64>() - 0.5;
                    value
                })
                .collect();
            // Of a first-order process: (1 + a) / (1 - a).
            let truth = (1.0 + memory) / (1.0 - memory);
            let found = correlation_time(&values);
            assert!((0.7 * truth..1.8 * truth).contains(&found), "{memory}: {found}, not {truth}");
        }
        assert_eq!(ranks(&[5.0, 1.0, 5.0, f64::INFINITY]), [1.5, 0.0, 1.5, 3.0]);
    }

    #[test]
    fn a_backlog_grows_where_more_comes_than_goes_and_not_where_it_only_wanders() {
        assert!(grows(60.0, 100.0, 1.0, 0.99) && !grows(30.0, 100.0, 1.0, 0.99));
        assert!(grows(200.0, 1000.0, 1.0, 0.99), "a fifth more than it carries");
        assert!(!grows(60.0, 100.0, 9.0, 0.99), "bursts make it wander farther");
    }

    #[test]
    fn a_difference_is_significant_where_its_interval_leaves_zero_out() {
        // Newcombe, Statistics in Medicine 17 (1998), method 10: 56 of 70 against 48 of 80.
        let found = difference((48.0 / 80.0, 80.0), (56.0 / 70.0, 70.0), 0.95);
        assert!((found.difference - 0.2).abs() < 1e-9);
        assert!((found.low - 0.0524).abs() < 1e-3 && (found.high - 0.3339).abs() < 1e-3, "{found:?}");
        assert!((found.p_value - 0.0081).abs() < 1e-3, "{found:?}");
        assert_eq!(difference((1.0, 50.0), (1.0, 60.0), 0.95).p_value, 1.0);
    }

    proptest! {
        #[test]
        fn an_interval_holds_its_share_and_narrows_with_requests(share in 0.0..=1.0_f64, n in 1.0..1e6_f64) {
            let (narrow, wide) = (wilson(share, n * 2.0, 0.95), wilson(share, n, 0.95));
            prop_assert!(0.0 <= wide.low && wide.low <= share && share <= wide.high && wide.high <= 1.0);
            prop_assert!(narrow.high - narrow.low <= wide.high - wide.low + 1e-12);
            let sure = wilson(share, n, 0.999);
            prop_assert!(sure.low <= wide.low && wide.high <= sure.high);
        }

        #[test]
        fn looks_grow_and_end_where_they_are_told(first in 1..1000_u64, last in 1..100_000_u64) {
            let looks = Looks::doubling(first, last, 0.95);
            prop_assert!(looks.sizes().is_sorted() && looks.sizes().last() == Some(&last));
            prop_assert!(looks.confidence() >= 0.95);
        }
    }
}

//! Whether a run has settled: the slope test of requests in flight and of TTFT. Pure.
//!
//! A run at a rate that the service cannot hold has no attainment: its queue grows for as long as it runs, and a
//! longer run gives a worse number. Such a run shows a trend; a run whose caches are still filling shows one, too.

use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

/// Parts into which a run is cut; the trend is that of their means.
const PARTS: usize = 20;

/// A slope that chance makes less often than this is one.
const SIGNIFICANT_SLOPE: f64 = 0.01;

/// The same of a drift.
const SIGNIFICANT_DRIFT: f64 = 0.05;

/// A change over the run of at least this share of its mean matters.
const MATTERS: f64 = 0.25;

/// The trend of a quantity over a run, tested in two ways, because two kinds of runs do not settle. Caches that
/// fill make a line with noise around it: its slope is tested. A queue that grows is a sum of steps,
/// which wanders around no line: the mean of its steps is tested. In a run that holds, steps cancel out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trend {
    /// Mean over the run.
    pub mean: f64,
    /// Fitted change from the beginning of the run to its end.
    pub change: f64,
    /// How often chance alone makes such a slope (two-sided), the correlation of neighbouring parts
    /// considered.
    pub slope_p_value: f64,
    /// How often chance alone makes such a difference of end and beginning out of such steps (two-sided).
    pub drift_p_value: f64,
}

impl Trend {
    /// The trend of values over time, between two moments. `None` if there are too few values.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = (f64, f64)>, from: f64, to: f64) -> Option<Self> {
        let mut sums = [(0.0, 0_u32); PARTS];
        for (at, value) in values {
            let part = (at - from) / (to - from) * PARTS as f64;
            if part >= 0.0 && part < PARTS as f64 {
                let (sum, count) = &mut sums[part as usize];
                *sum += value;
                *count += 1;
            }
        }
        let filled = sums.iter().enumerate().filter(|(_, (_, count))| *count > 0);
        let means: Vec<(f64, f64)> = filled.map(|(at, (sum, count))| (at as f64, sum / f64::from(*count))).collect();
        (means.len() >= PARTS / 2).then(|| Self::of_means(&means))
    }

    fn of_means(means: &[(f64, f64)]) -> Self {
        let n = means.len() as f64;
        let mean_x = means.iter().map(|(x, _)| x).sum::<f64>() / n;
        let mean = means.iter().map(|(_, y)| y).sum::<f64>() / n;
        let spread: f64 = means.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
        let slope = means.iter().map(|(x, y)| (x - mean_x) * (y - mean)).sum::<f64>() / spread;
        let residuals: Vec<f64> = means.iter().map(|(x, y)| y - mean - slope * (x - mean_x)).collect();
        let steps: Vec<f64> = means.windows(2).map(|pair| pair[1].1 - pair[0].1).collect();
        Trend {
            mean,
            change: slope * PARTS as f64,
            slope_p_value: slope_p_value(slope, spread, &residuals),
            drift_p_value: drift_p_value(&steps),
        }
    }

    /// Whether the quantity has not settled: its change is neither random nor below `least`, the smallest
    /// relevant change.
    #[must_use]
    pub fn is_moving(&self, least: f64) -> bool {
        let is_no_chance = self.slope_p_value < SIGNIFICANT_SLOPE || self.drift_p_value < SIGNIFICANT_DRIFT;
        is_no_chance && self.change.abs() >= (MATTERS * self.mean.abs()).max(least)
    }
}

/// A t-test of a least-squares slope, over a sample as large as the residuals' correlation leaves it.
fn slope_p_value(slope: f64, spread: f64, residuals: &[f64]) -> f64 {
    let n = residuals.len() as f64;
    let squares: f64 = residuals.iter().map(|residual| residual * residual).sum();
    let lagged: f64 = residuals.windows(2).map(|pair| pair[0] * pair[1]).sum();
    let correlation = if squares > 0.0 { (lagged / squares).clamp(0.0, 0.9) } else { 0.0 };
    let effective = (n * (1.0 - correlation) / (1.0 + correlation)).max(4.0);
    let error = (squares / (effective - 2.0) / spread * (n / effective)).sqrt();
    two_sided_t(slope, error, effective - 2.0)
}

/// A t-test that steps have a mean of zero.
fn drift_p_value(steps: &[f64]) -> f64 {
    let n = steps.len() as f64;
    let mean = steps.iter().sum::<f64>() / n;
    let variance = steps.iter().map(|step| (step - mean).powi(2)).sum::<f64>() / (n - 1.0);
    two_sided_t(mean, (variance / n).sqrt(), n - 1.0)
}

fn two_sided_t(value: f64, error: f64, freedom: f64) -> f64 {
    if error <= 1e-9 * value.abs() {
        // Without noise every change other than zero is significant.
        return if value == 0.0 { 1.0 } else { 0.0 };
    }
    StudentsT::new(0.0, 1.0, freedom).map_or(1.0, |law| 2.0 * law.sf((value / error).abs()))
}

/// Requests in flight at evenly spaced moments, by the times at which requests began and ended; an end may be
/// infinite.
#[must_use]
pub fn in_flight(requests: &[(f64, f64)], from: f64, to: f64) -> Vec<(f64, f64)> {
    let samples = PARTS * 10;
    let step = (to - from) / samples as f64;
    let mut changes = vec![0_i64; samples + 1];
    for (begin, end) in requests {
        // A request is counted at the moments from its beginning on, until before its end.
        let first = ((begin - from) / step).ceil().clamp(0.0, samples as f64) as usize;
        let after = ((end - from) / step).ceil().clamp(0.0, samples as f64) as usize;
        changes[first] += 1;
        changes[after] -= 1;
    }
    let mut open = 0;
    let at = |number: usize| from + step * number as f64;
    changes[..samples]
        .iter()
        .enumerate()
        .map(|(number, change)| {
            open += change;
            (at(number), open as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Requests of an M/M/1 queue at this load (service takes a second), by Lindley's recursion: when they came
    /// and when they were done.
    fn queue(load: f64, count: usize, seed: u64) -> Vec<(f64, f64)> {
        let mut chance = StdRng::seed_from_u64(seed);
        let mut draw = move || -(1.0 - chance.random::<f64>()).ln();
        let (mut at, mut free) = (0.0, 0.0_f64);
        let mut next = || {
            at += draw() / load;
            free = free.max(at) + draw();
            (at, free)
        };
        (0..count).map(|_| next()).collect()
    }

    /// In how many of 100 runs the requests in flight, or the times in the system, seem to move.
    fn alarms(load: f64, count: usize) -> usize {
        let is_alarm = |seed: &u64| {
            let requests = queue(load, count, *seed);
            let (from, to) = (requests[count / 5].0, requests[count - 1].0);
            let open = Trend::of(in_flight(&requests, from, to), from, to).unwrap();
            let times = requests.iter().map(|(begin, end)| (*begin, end - begin));
            open.is_moving(2.0) || Trend::of(times, from, to).unwrap().is_moving(0.5)
        };
        (0..100).filter(is_alarm).count()
    }

    #[test]
    fn a_queue_that_holds_is_seldom_called_unsteady_and_one_that_grows_is_nearly_always() {
        for (load, count) in [(0.3, 300), (0.7, 1000), (0.9, 3000)] {
            assert!(alarms(load, count) <= 5, "{load} {count}: {}", alarms(load, count));
        }
        for (load, count) in [(1.1, 3000), (1.3, 1000), (2.0, 200)] {
            assert!(alarms(load, count) >= 90, "{load} {count}: {}", alarms(load, count));
        }
    }

    #[test]
    fn in_flight_counts_those_between_their_beginning_and_their_end() {
        let open = in_flight(&[(0.0, 10.0), (4.0, 6.0), (5.0, f64::INFINITY), (20.0, 30.0)], 0.0, 10.0);
        let at = |moment: f64| open.iter().find(|(at, _)| (at - moment).abs() < 1e-9).unwrap().1;
        assert_eq!([at(0.0), at(3.95), at(4.0), at(5.0), at(6.0), at(9.95)], [1.0, 1.0, 2.0, 3.0, 2.0, 2.0]);
    }

    #[test]
    fn a_flat_line_does_not_move_and_a_ramp_does() {
        let line = |slope: f64| {
            Trend::of((0..1000).map(|at| (f64::from(at), 5.0 + slope * f64::from(at))), 0.0, 1000.0).unwrap()
        };
        assert!(!line(0.0).is_moving(0.0));
        assert!(line(0.01).is_moving(2.0) && line(-0.004).is_moving(2.0));
        assert!(!line(0.001).is_moving(2.0), "too little to mind");
        assert!((line(0.01).change - 10.0).abs() < 0.1);
        assert_eq!(Trend::of([(1.0, 2.0)], 0.0, 1000.0), None);
    }
}

//! What differs between two sweeps, and whether it is more than chance. Pure.
//!
//! Goodput is compared by where each repetition crosses its target: a t-test on the logarithms, which allows both sweeps their
//! own variance (Welch, 1947). Attainments at rates that both have measured are compared as shares, over the independent requests
//! that they are worth; of several such tests some would be significant by chance, so their p-values are adjusted (Holm,
//! 1979).

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

use crate::load::interval::{ShareDifference, difference};
use crate::load::result::{ClassResult, PointResult};
use crate::load::summary::SweepSummary;
use crate::load::sweep::{CacheResult, GoodputStatus};

/// Significance level.
const LEVEL: f64 = 0.05;

/// A sweep held against the first one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Index of the sweep; the first one has 0.
    pub run: usize,
    /// Differences of the workloads, which make figures incomparable.
    pub different_workloads: Vec<String>,
    /// Sweeps that were cut short, or measured another model or path.
    pub remarks: Vec<String>,
    /// Goodput, for each cache state that both have.
    pub goodput: Vec<GoodputChange>,
    /// Attainments at common rates.
    pub rates: Vec<RateChange>,
}

/// How goodput changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GoodputChange {
    /// Cache state.
    pub cache: String,
    /// Goodput of the first sweep, where it is a number.
    pub first: Option<f64>,
    /// Goodput of the other one.
    pub second: Option<f64>,
    /// Ratio of the means of the repetitions (geometric).
    pub ratio: Option<f64>,
    /// Lower end of its 95 % interval.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
    /// Two-sided p-value of no difference.
    pub p_value: Option<f64>,
    /// Whether the difference is significant.
    pub significant: bool,
    /// In words.
    pub text: String,
}

/// How an attainment changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RateChange {
    /// Cache state.
    pub cache: String,
    /// Requests per second.
    pub rate: f64,
    /// Class.
    pub class: String,
    /// Attainment of the first sweep.
    pub first: f64,
    /// Attainment of the other one.
    pub second: f64,
    /// Difference with its interval and unadjusted p-value.
    pub difference: ShareDifference,
    /// p-value, adjusted for all rates and classes of this comparison.
    pub adjusted_p_value: f64,
    /// Whether the difference is significant.
    pub significant: bool,
}

/// Holds every sweep against the first.
#[must_use]
pub fn compare(sweeps: &[SweepSummary]) -> Vec<Comparison> {
    let Some((first, others)) = sweeps.split_first() else { return Vec::new() };
    (1..).zip(others).map(|(run, other)| Comparison::of(run, first, other)).collect()
}

impl Comparison {
    fn of(run: usize, first: &SweepSummary, second: &SweepSummary) -> Self {
        let mut remarks = Vec::new();
        for sweep in [first, second].into_iter().filter(|sweep| !sweep.complete) {
            let why = sweep.ended_by.as_deref().unwrap_or("unknown");
            remarks.push(format!("the sweep of {} was cut short ({why})", sweep.started));
        }
        let (ours, theirs) = (&first.target, &second.target);
        if ours.path != theirs.path || ours.stream != theirs.stream {
            remarks.push("the sweeps used different paths, or only one of them streamed".to_owned());
        }
        if first.fleet != second.fleet {
            remarks
                .push("the sweeps had different numbers of replicas or GPUs; rates are those of the whole".to_owned());
        }
        let pairs: Vec<(&CacheResult, &CacheResult)> = first
            .results
            .iter()
            .filter_map(|ours| Some((ours, second.results.iter().find(|theirs| theirs.cache == ours.cache)?)))
            .collect();
        let mut rates: Vec<RateChange> = pairs.iter().flat_map(|(ours, theirs)| rate_changes(ours, theirs)).collect();
        adjust(&mut rates);
        Comparison {
            run,
            different_workloads: first.workload.differences(&second.workload),
            remarks,
            goodput: pairs.iter().map(|(ours, theirs)| GoodputChange::of(ours, theirs)).collect(),
            rates,
        }
    }
}

impl GoodputChange {
    fn of(first: &CacheResult, second: &CacheResult) -> Self {
        let number = |result: &CacheResult| result.goodput.requests_per_second;
        let mut change = GoodputChange {
            cache: first.cache.as_str().to_owned(),
            first: number(first),
            second: number(second),
            ratio: None,
            low: None,
            high: None,
            p_value: None,
            significant: false,
            text: String::new(),
        };
        let published = |result: &CacheResult| result.goodput.status == GoodputStatus::Published;
        if !published(first) || !published(second) {
            change.text = "nothing can be said: not both have a goodput".to_owned();
            return change;
        }
        let logs =
            |result: &CacheResult| -> Vec<f64> { result.goodput.repetitions.iter().map(|rate| rate.ln()).collect() };
        let Some(welch) = welch(&logs(first), &logs(second)) else {
            change.text = "nothing can be said: too few repetitions".to_owned();
            return change;
        };
        let (ratio, low, high) = (welch.difference.exp(), welch.low.exp(), welch.high.exp());
        change.significant = welch.p_value < LEVEL;
        change.text = format!(
            "{ratio:.2} times the goodput [{low:.2}, {high:.2}], p = {:.3}: {}",
            welch.p_value,
            if change.significant { "significant" } else { "no significant difference" }
        );
        (change.ratio, change.low, change.high) = (Some(ratio), Some(low), Some(high));
        change.p_value = Some(welch.p_value);
        change
    }
}

/// The difference of two means, with its interval.
struct MeanDifference {
    difference: f64,
    low: f64,
    high: f64,
    p_value: f64,
}

/// Welch's t-test; `None` of fewer than two values on a side.
fn welch(first: &[f64], second: &[f64]) -> Option<MeanDifference> {
    if first.len() < 2 || second.len() < 2 {
        return None;
    }
    let moments = |values: &[f64]| {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
        (mean, variance / n, n)
    };
    let ((m1, v1, n1), (m2, v2, n2)) = (moments(first), moments(second));
    let difference = m2 - m1;
    let error = (v1 + v2).sqrt();
    if error <= 1e-12 {
        // Repetitions that agree to the last digit leave no doubt.
        let p_value = if difference.abs() < 1e-12 { 1.0 } else { 0.0 };
        return Some(MeanDifference { difference, low: difference, high: difference, p_value });
    }
    let freedom = (v1 + v2).powi(2) / (v1 * v1 / (n1 - 1.0) + v2 * v2 / (n2 - 1.0));
    let law = StudentsT::new(0.0, 1.0, freedom).ok()?;
    let half = law.inverse_cdf(1.0 - LEVEL / 2.0) * error;
    let p_value = 2.0 * law.sf((difference / error).abs());
    Some(MeanDifference { difference, low: difference - half, high: difference + half, p_value })
}

/// Rates that differ by rounding only.
const SAME_RATE: f64 = 1e-6;

fn rate_changes(first: &CacheResult, second: &CacheResult) -> Vec<RateChange> {
    let same = |rate: f64| move |point: &&PointResult| (point.rate / rate - 1.0).abs() < SAME_RATE;
    let mut changes = Vec::new();
    for ours in &first.points {
        let Some(theirs) = second.points.iter().find(same(ours.rate)) else { continue };
        for (a, b) in ours.classes.iter().zip(&theirs.classes).filter(|(a, b)| a.class == b.class) {
            let (Some(one), Some(two)) = (share_of(a), share_of(b)) else { continue };
            let difference = difference(one, two, 1.0 - LEVEL);
            changes.push(RateChange {
                cache: first.cache.as_str().to_owned(),
                rate: ours.rate,
                class: a.class.clone(),
                first: one.0,
                second: two.0,
                difference,
                adjusted_p_value: difference.p_value,
                significant: false,
            });
        }
    }
    changes
}

/// An attainment, and the independent requests that it rests on.
fn share_of(class: &ClassResult) -> Option<(f64, f64)> {
    Some((class.attainment?, class.effective_samples.max(1.0)))
}

/// Holm's step-down adjustment.
fn adjust(changes: &mut [RateChange]) {
    let count = changes.len();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|a, b| changes[*a].difference.p_value.total_cmp(&changes[*b].difference.p_value));
    let mut highest = 0.0_f64;
    for (step, at) in order.into_iter().enumerate() {
        highest = highest.max(changes[at].difference.p_value * (count - step) as f64).min(1.0);
        changes[at].adjusted_p_value = highest;
        changes[at].significant = highest < LEVEL;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_of_means_is_welchs() {
        // By hand: means 2 and 5, variances 1 and 4, 3 values each.
        let found = welch(&[1.0, 2.0, 3.0], &[3.0, 5.0, 7.0]).unwrap();
        assert!((found.difference - 3.0).abs() < 1e-12);
        // t = 3 / sqrt(5/3) = 2.3238 with (25/9) / (1/18 + 16/18) = 2.9412 degrees of freedom.
        assert!((found.p_value - 0.1042).abs() < 5e-4, "{}", found.p_value);
        assert!(found.low < 0.0 && found.high > 6.0);
        assert!(welch(&[1.0], &[2.0, 3.0]).is_none());
        assert_eq!(welch(&[1.0, 1.0], &[1.0, 1.0]).unwrap().p_value, 1.0);
        assert_eq!(welch(&[1.0, 1.0], &[2.0, 2.0]).unwrap().p_value, 0.0);
    }

    #[test]
    fn several_tests_need_more_than_one() {
        let change = |p_value| RateChange {
            cache: "cold".to_owned(),
            rate: 1.0,
            class: "chat".to_owned(),
            first: 0.9,
            second: 0.8,
            difference: ShareDifference { difference: -0.1, low: -0.2, high: 0.0, p_value },
            adjusted_p_value: p_value,
            significant: false,
        };
        let mut changes = [change(0.04), change(0.01), change(0.03)];
        adjust(&mut changes);
        let adjusted = changes.map(|change| (change.adjusted_p_value * 100.0).round());
        assert_eq!(adjusted, [6.0, 3.0, 6.0]);
    }
}

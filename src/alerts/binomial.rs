//! How many requests an alert needs before it may believe a ratio.

use libm::lgamma;

/// The probability with which a service that misses exactly its budget may cross a threshold by
/// chance.
const FALSE_ALARM: f64 = 1e-4;

/// The fewest requests from which on a service that misses exactly the share `budget` of its
/// requests shows a miss ratio above `threshold` with a probability below 1e-4, for this number of requests and
/// every larger one.
///
/// From the exact tail of the binomial distribution. With a threshold at or below the budget no number
/// is enough: `u64::MAX`.
#[must_use]
pub fn min_requests(budget: f64, threshold: f64) -> u64 {
    if budget <= 0.0 {
        return 1;
    }
    if threshold <= budget {
        return u64::MAX;
    }
    let mut enough = 1;
    for misses in 1_u64.. {
        // The most requests for which this number of misses exceeds the threshold, because the tail is
        // largest there.
        let requests = (misses as f64 / threshold - 1e-9).ceil() as u64 - 1;
        if chernoff(requests as f64, budget, threshold) < FALSE_ALARM {
            return enough;
        }
        if requests >= misses && tail(requests, misses, budget) >= FALSE_ALARM {
            enough = requests + 1;
        }
    }
    unreachable!("the bound falls with the number of requests")
}

/// P(X >= misses) of `requests` that miss with probability `p` each: the sum of the terms, which fall
/// from the first on because it lies above the mean.
fn tail(requests: u64, misses: u64, p: f64) -> f64 {
    let (n, first) = (requests as f64, misses as f64);
    let ways = lgamma(n + 1.0) - lgamma(first + 1.0) - lgamma(n - first + 1.0);
    let mut term = (ways + first * p.ln() + (n - first) * (-p).ln_1p()).exp();
    let mut sum = 0.0;
    for k in misses..=requests {
        sum += term;
        if term < 1e-12 * sum {
            break;
        }
        term *= (requests - k) as f64 / (k + 1) as f64 * p / (1.0 - p);
    }
    sum
}

/// Chernoff's bound on the tail above the share `threshold`, exp(-n D(threshold || p)).
fn chernoff(requests: f64, p: f64, threshold: f64) -> f64 {
    let met = if threshold >= 1.0 { 0.0 } else { (1.0 - threshold) * ((1.0 - threshold) / (1.0 - p)).ln() };
    (-requests * (threshold * (threshold / p).ln() + met)).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_figures_of_two_well_known_targets() {
        let of = |threshold: f64| min_requests(0.08, threshold);
        assert_eq!([0.816, 0.54, 0.356, 0.172, 0.12].map(of), [4, 10, 23, 157, 734]);
        assert_eq!(min_requests(0.001, 0.01344), 298);
    }

    #[test]
    fn a_budget_of_nothing_needs_one_request_and_a_threshold_inside_the_budget_has_no_number() {
        assert_eq!(min_requests(0.0, 0.5), 1);
        assert_eq!(min_requests(0.08, 0.08), u64::MAX);
    }

    /// The same by adding up every term.
    fn plain_tail(requests: u64, misses: u64, p: f64) -> f64 {
        let mut term = (1.0 - p).powi(requests as i32);
        let mut below = 0.0;
        for i in 0..misses {
            below += term;
            term *= (requests - i) as f64 / (i + 1) as f64 * p / (1.0 - p);
        }
        1.0 - below
    }

    proptest! {
        #[test]
        fn it_is_the_smallest_number_from_which_on_chance_stays_below(budget in 0.01_f64..0.5, reach in 0.2_f64..0.9) {
            let threshold = budget + reach * (1.0 - budget);
            let enough = min_requests(budget, threshold);
            let chance = |requests: u64| {
                let misses = (requests as f64 * threshold + 1e-9).floor() as u64 + 1;
                if misses > requests { 0.0 } else { plain_tail(requests, misses, budget) }
            };
            for more in 0..60 {
                prop_assert!(chance(enough + more) < FALSE_ALARM * 1.001, "{enough} + {more}");
            }
            prop_assert!(enough == 1 || chance(enough - 1) >= FALSE_ALARM * 0.999, "{enough} - 1");
        }
    }
}

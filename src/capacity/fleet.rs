//! Size of a fleet: concurrency, replicas for the peak, headroom and redundancy.

use serde::Serialize;

/// Mean number of requests in the system: arrival rate times mean time in it.
///
/// Source: Little (1961), A Proof for the Queuing Formula L = lambda W.
#[must_use]
pub fn concurrency(rate: f64, seconds: f64) -> f64 {
    rate * seconds
}

/// Mean time from start to finish in seconds: the first token, and `output` tokens at the mean pace.
///
/// Source: DistServe (Zhong et al., OSDI 2024), section 2: latency = TTFT + TPOT x generated tokens. (One token
/// more than TPOT's own definition counts; the difference is one step.)
#[must_use]
pub fn e2e(ttft: f64, tpot: f64, output: f64) -> f64 {
    ttft + tpot * output
}

/// Mean context of a running sequence in tokens: its prompt and half of its output.
#[must_use]
pub fn mean_context(input: f64, output: f64) -> f64 {
    input + output / 2.0
}

/// Number of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FleetSize {
    /// Replicas that the peak needs, as a fraction.
    pub exact: f64,
    /// The same in whole replicas.
    pub for_peak: u32,
    /// The same with spares.
    pub total: u32,
}

impl FleetSize {
    /// Replicas for a peak rate, each of them planned for `headroom` x `goodput`; `spare` more for N+k.
    ///
    /// Source: the planning step of goodput-based sizing: peak / (goodput x utilisation factor), rounded up, plus
    /// redundancy.
    #[must_use]
    pub fn of(peak: f64, goodput: f64, headroom: f64, spare: u32) -> FleetSize {
        FleetSize::of_share(peak / (goodput * headroom), spare)
    }

    /// From the number of replicas that are needed as a fraction.
    #[must_use]
    pub fn of_share(exact: f64, spare: u32) -> FleetSize {
        // A quotient that is whole but for rounding needs no further replica.
        let for_peak = ((exact - 1e-9).ceil() as u32).max(1);
        FleetSize { exact, for_peak, total: for_peak.saturating_add(spare) }
    }
}

/// Peak rate by the goodput of so many replicas: 1 is the knee. `None` without replicas.
#[must_use]
pub fn utilisation(peak: f64, goodput: f64, replicas: u32) -> Option<f64> {
    (replicas > 0).then(|| peak / (goodput * f64::from(replicas)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_quotient_needs_no_further_replica_and_a_little_more_does() {
        let size = |peak| FleetSize::of(peak, 8.0, 0.7, 1);
        // 5.6 x 3 is 16.799999999999997.
        assert_eq!((size(16.8).for_peak, size(16.8).total), (3, 4));
        assert_eq!(size(16.9).for_peak, 4);
        assert_eq!(size(0.001).for_peak, 1, "a class without traffic still needs one");
    }

    #[test]
    fn utilisation_is_of_the_knee_and_needs_a_replica() {
        assert_eq!(utilisation(30.0, 8.0, 6), Some(0.625));
        assert_eq!(utilisation(30.0, 8.0, 0), None);
    }
}

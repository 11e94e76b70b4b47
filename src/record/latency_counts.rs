//! Latencies counted in geometric buckets, for quantiles that are right to within 5 %.

use std::time::Duration;

const GROWTH: f64 = 1.1;
/// The upper edge of the first bucket.
const FIRST: f64 = 0.000_1;
/// Up to 1,080 s.
const BUCKETS: usize = 170;

/// How many latencies fell into each bucket. Empty, it takes no memory.
#[derive(Clone, Debug, Default)]
pub(super) struct LatencyCounts(Vec<u32>);

impl LatencyCounts {
    pub(super) fn note(&mut self, latency: Duration) {
        self.0.resize(BUCKETS, 0);
        let exact = (latency.as_secs_f64().max(FIRST) / FIRST).ln() / GROWTH.ln();
        let count = &mut self.0[(exact.round() as usize).min(BUCKETS - 1)];
        *count = count.saturating_add(1);
    }

    pub(super) fn add(&mut self, other: &LatencyCounts) {
        if !other.0.is_empty() {
            self.0.resize(BUCKETS, 0);
        }
        self.0.iter_mut().zip(&other.0).for_each(|(sum, more)| *sum = sum.saturating_add(*more));
    }

    /// The latency that a share `q` does not exceed; `None` without counts.
    pub(super) fn quantile(&self, q: f64) -> Option<Duration> {
        let total: u64 = self.0.iter().copied().map(u64::from).sum();
        let rank = ((q * total as f64).ceil() as u64).max(1);
        let mut seen = 0;
        let reached = self.0.iter().position(|count| {
            seen += u64::from(*count);
            seen >= rank
        });
        reached.map(|bucket| Duration::from_secs_f64(FIRST * GROWTH.powi(bucket as i32)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_within_five_percent() {
        let (mut even, mut odd) = (LatencyCounts::default(), LatencyCounts::default());
        assert_eq!(even.quantile(0.5), None);
        for millis in 1..=2000 {
            let counts = if millis % 2 == 0 { &mut even } else { &mut odd };
            counts.note(Duration::from_millis(millis));
        }
        let mut all = LatencyCounts::default();
        all.add(&even);
        all.add(&odd);
        for (q, exact) in [(0.5, 1.0), (0.95, 1.9), (1.0, 2.0), (0.0, 0.001)] {
            let told = all.quantile(q).unwrap().as_secs_f64();
            assert!((told / exact - 1.0).abs() <= 0.05, "{q}: {told} for {exact}");
        }
    }

    #[test]
    fn the_shortest_and_the_longest_have_a_bucket() {
        let mut counts = LatencyCounts::default();
        counts.note(Duration::ZERO);
        counts.note(Duration::from_secs(1 << 40));
        assert!(counts.quantile(0.1).unwrap() <= Duration::from_micros(100));
        assert!(counts.quantile(1.0).unwrap() > Duration::from_secs(900));
    }
}

//! Percentiles of any number of latencies in a fixed amount of memory.

use crate::load::quantiles::{MeasureQuantiles, Percentile};

/// Shortest distinguished latency, in seconds.
const SHORTEST: f64 = 1e-5;

/// Width of a bucket: 1 %, so that a percentile is off by half of it at most.
const WIDTH: f64 = 1.01;

/// Buckets: the last one begins at 43 hours.
const BUCKETS: usize = 2350;

/// Counts of latencies in buckets that are 1 % wide.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyHistogram {
    counts: Vec<u64>,
    values: u64,
    sum: f64,
    unreached: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        LatencyHistogram { counts: vec![0; BUCKETS], values: 0, sum: 0.0, unreached: 0 }
    }
}

impl LatencyHistogram {
    /// Adds a latency in seconds.
    pub fn push(&mut self, seconds: f64) {
        let bucket = ((seconds.max(SHORTEST) / SHORTEST).ln() / WIDTH.ln()) as usize;
        self.counts[bucket.min(BUCKETS - 1)] += 1;
        self.values += 1;
        self.sum += seconds;
    }

    /// Adds a request that failed before the latency was reached: it counts as the slowest.
    pub fn push_unreached(&mut self) {
        self.unreached += 1;
    }

    fn percentile(&self, share: f64) -> Percentile {
        if !Percentile::has_enough((self.values + self.unreached) as usize, share) {
            return Percentile::TooFew;
        }
        self.at(share).map_or(Percentile::NotReached, Percentile::Seconds)
    }

    /// The latency that this share of requests does not exceed, however few they are; `None` if that request
    /// did not reach the point.
    #[must_use]
    pub fn at(&self, share: f64) -> Option<f64> {
        let rank = ((share * (self.values + self.unreached) as f64).ceil() as u64).max(1);
        let mut below = 0;
        let found = self.counts.iter().position(|count| {
            below += count;
            below >= rank
        });
        found.map(|bucket| SHORTEST * WIDTH.powf(bucket as f64 + 0.5))
    }

    /// Its percentiles.
    #[must_use]
    pub fn quantiles(&self) -> MeasureQuantiles {
        MeasureQuantiles {
            n: (self.values + self.unreached) as usize,
            not_reached: self.unreached as usize,
            mean: (self.values > 0).then(|| self.sum / self.values as f64),
            p50: self.percentile(0.5),
            p90: self.percentile(0.9),
            p95: self.percentile(0.95),
            p99: self.percentile(0.99),
        }
    }
}

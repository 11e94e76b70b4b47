//! Compares the observed lengths with the class's workload assumption.
//!
//! Lengths are counted in buckets that grow by 10 %, so a quantile is accurate to 5 %. Two generations of
//! half an hour: a quantile covers the last 30 to 60 minutes.

use std::time::Duration;

use crate::types::{Tick, Tokens};

const GROWTH: f64 = 1.1;
const BUCKETS: usize = 170;
/// A percentile that is off the assumed one by more than this factor, in either direction, is another workload.
pub const DRIFT_FACTOR: f64 = 1.5;

const GENERATION: Duration = Duration::from_secs(30 * 60);

/// Fewest lengths for a meaningful 95th percentile.
const ENOUGH: u64 = 20;

/// Recent lengths.
#[derive(Debug)]
pub struct LengthHistogram {
    present: Box<[u32]>,
    past: Box<[u32]>,
    since: Tick,
}

impl Default for LengthHistogram {
    fn default() -> Self {
        let empty = || vec![0; BUCKETS].into_boxed_slice();
        LengthHistogram { present: empty(), past: empty(), since: Tick::ZERO }
    }
}

impl LengthHistogram {
    /// Records the length of a request that ended at `at`.
    pub fn note(&mut self, length: Tokens, at: Tick) {
        self.turn(at);
        let count = &mut self.present[bucket_of(length)];
        *count = count.saturating_add(1);
    }

    /// The length that a share `q` of the requests stayed at or below; `None` if too few were
    /// seen.
    pub fn quantile(&mut self, q: f64, at: Tick) -> Option<f64> {
        self.turn(at);
        let counts = self.present.iter().zip(&self.past).map(|(a, b)| u64::from(*a) + u64::from(*b));
        let total: u64 = counts.clone().sum();
        if total < ENOUGH {
            return None;
        }
        let rank = (q * total as f64).ceil() as u64;
        let mut seen = 0;
        let reached = counts.into_iter().position(|count| {
            seen += count;
            seen >= rank
        });
        reached.map(middle_of)
    }

    fn turn(&mut self, at: Tick) {
        let age = at.since(self.since);
        if age < GENERATION {
            return;
        }
        self.past = std::mem::replace(&mut self.present, vec![0; BUCKETS].into());
        if age >= 2 * GENERATION {
            self.past.fill(0);
        }
        self.since = at;
    }
}

fn bucket_of(length: Tokens) -> usize {
    let exact = (length.0.max(1) as f64).ln() / GROWTH.ln();
    (exact.round() as usize).min(BUCKETS - 1)
}

fn middle_of(bucket: usize) -> f64 {
    GROWTH.powi(bucket as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_within_five_percent() {
        let mut lengths = LengthHistogram::default();
        for n in 1..=1000 {
            lengths.note(Tokens(n), Tick::from_millis(n));
        }
        let at = Tick::from_millis(1001);
        for (q, exact) in [(0.5, 500.0), (0.95, 950.0)] {
            let told = lengths.quantile(q, at).unwrap();
            assert!((told / exact - 1.0).abs() <= 0.05, "{q}: {told} for {exact}");
        }
    }

    #[test]
    fn few_lengths_say_nothing_and_old_ones_are_forgotten() {
        let mut lengths = LengthHistogram::default();
        (0..19).for_each(|_| lengths.note(Tokens(7), Tick::ZERO));
        assert_eq!(lengths.quantile(0.5, Tick::ZERO), None);
        lengths.note(Tokens(7), Tick::ZERO);
        assert!(lengths.quantile(0.5, Tick::ZERO + GENERATION).is_some());
        assert_eq!(lengths.quantile(0.5, Tick::ZERO + 3 * GENERATION), None);
    }

    #[test]
    fn the_longest_length_has_a_bucket() {
        let mut lengths = LengthHistogram::default();
        (0..20).for_each(|_| lengths.note(Tokens(u64::MAX), Tick::ZERO));
        assert!(lengths.quantile(0.95, Tick::ZERO).unwrap() > 1e6);
    }
}

//! Arrival processes: when requests are sent. Pure; the same seed gives the same times.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Gamma};
use serde::{Deserialize, Serialize};

/// How arrivals are spread in time, whatever their rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "process", rename_all = "snake_case")]
pub enum ArrivalProcess {
    /// Independent users: gaps are exponential.
    Poisson,
    /// Gaps follow a gamma distribution whose shape is `burstiness`: 1 is Poisson, less is burstier, more is
    /// steadier. Their coefficient of variation is `1 / sqrt(burstiness)`. The parameter has the meaning that it has in
    /// `vllm bench serve`.
    Gamma {
        /// Shape of the distribution, above 0.
        burstiness: f64,
    },
    /// Equal gaps.
    Constant,
    /// The gaps of a recorded trace, stretched or compressed to the rate that is asked for. Where the trace
    /// ends it begins again.
    Trace {
        /// Name of the trace.
        name: String,
        /// Arrivals in it.
        arrivals: usize,
        /// Coefficient of variation of its gaps: 1 for Poisson, more where it is burstier.
        variation: f64,
        /// Gaps between its arrivals, in seconds; not written to the summary.
        #[serde(skip)]
        gaps: Vec<f64>,
    },
}

/// Why an arrival process cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidArrivals {
    /// A burstiness that is not a positive number.
    #[error("a burstiness of {0} describes no arrivals; give a number above 0 (1 is Poisson, 0.25 is bursty)")]
    Burstiness(f64),
    /// Too few timestamps.
    #[error("a trace needs at least two arrivals that are apart in time; this one has {0} timestamps")]
    Short(usize),
    /// Timestamps that do not grow.
    #[error("timestamp {number} of the trace ({at}) lies before the one above it; sort the trace by time")]
    Unsorted {
        /// Its number, from 1.
        number: usize,
        /// Its value, in seconds.
        at: f64,
    },
    /// A timestamp that is not a number.
    #[error("timestamp {0} of the trace is not a finite number")]
    NotFinite(usize),
}

impl ArrivalProcess {
    /// Gamma arrivals.
    ///
    /// # Errors
    /// `burstiness` is not a positive number.
    pub fn gamma(burstiness: f64) -> Result<Self, InvalidArrivals> {
        let is_sound = burstiness.is_finite() && burstiness > 0.0;
        if is_sound { Ok(ArrivalProcess::Gamma { burstiness }) } else { Err(InvalidArrivals::Burstiness(burstiness)) }
    }

    /// The arrivals of a trace, by its timestamps in seconds.
    ///
    /// # Errors
    /// Timestamps that are not finite, not in order, or fewer than two different ones.
    pub fn trace(name: &str, timestamps: &[f64]) -> Result<Self, InvalidArrivals> {
        if let Some(at) = timestamps.iter().position(|at| !at.is_finite()) {
            return Err(InvalidArrivals::NotFinite(at + 1));
        }
        if let Some(at) = timestamps.windows(2).position(|pair| pair[1] < pair[0]) {
            return Err(InvalidArrivals::Unsorted { number: at + 2, at: timestamps[at + 1] });
        }
        let gaps: Vec<f64> = timestamps.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len().max(1) as f64;
        if mean <= 0.0 {
            return Err(InvalidArrivals::Short(timestamps.len()));
        }
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        let (arrivals, variation) = (timestamps.len(), variance.sqrt() / mean);
        Ok(ArrivalProcess::Trace { name: name.to_owned(), arrivals, variation, gaps })
    }

    /// Arrivals at `rate` requests per second, for ever; the first one after one gap.
    #[must_use]
    pub fn at_rate(&self, rate: f64, seed: u64) -> ArrivalTimes {
        let gaps = match self {
            ArrivalProcess::Poisson => GapSource::Exponential,
            // A shape and a scale above 0 are always a distribution.
            ArrivalProcess::Gamma { burstiness } => {
                Gamma::new(*burstiness, 1.0 / burstiness).map_or(GapSource::Exponential, GapSource::Gamma)
            }
            ArrivalProcess::Constant => GapSource::Constant,
            ArrivalProcess::Trace { gaps, .. } => {
                let mean = gaps.iter().sum::<f64>() / gaps.len().max(1) as f64;
                GapSource::Trace { gaps: gaps.clone(), next: 0, mean }
            }
        };
        ArrivalTimes { gaps, rate, chance: StdRng::seed_from_u64(seed), at: 0.0 }
    }
}

/// The send times of a run, from its start.
#[derive(Debug)]
pub struct ArrivalTimes {
    gaps: GapSource,
    rate: f64,
    chance: StdRng,
    at: f64,
}

/// Gaps of mean 1.
#[derive(Debug)]
enum GapSource {
    Exponential,
    Gamma(Gamma<f64>),
    Constant,
    Trace { gaps: Vec<f64>, next: usize, mean: f64 },
}

impl Iterator for ArrivalTimes {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let gap = match &mut self.gaps {
            GapSource::Exponential => -(1.0 - self.chance.random::<f64>()).ln(),
            GapSource::Gamma(law) => law.sample(&mut self.chance),
            GapSource::Constant => 1.0,
            GapSource::Trace { gaps, next, mean } => {
                let gap = *gaps.get(*next)? / *mean;
                *next = (*next + 1) % gaps.len();
                gap
            }
        };
        self.at += gap / self.rate;
        Duration::try_from_secs_f64(self.at).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gaps(process: &ArrivalProcess, rate: f64, count: usize) -> Vec<f64> {
        let mut before = 0.0;
        let times = process.at_rate(rate, 11).take(count);
        times.map(|at| at.as_secs_f64() - std::mem::replace(&mut before, at.as_secs_f64())).collect()
    }

    /// Mean, and coefficient of variation.
    fn moments(gaps: &[f64]) -> (f64, f64) {
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn every_process_keeps_its_rate_and_has_its_own_spread() {
        let trace = ArrivalProcess::trace("t", &[5.0, 5.0, 5.0, 9.0]).unwrap();
        for (process, spread) in [
            (ArrivalProcess::Poisson, 1.0),
            (ArrivalProcess::gamma(1.0).unwrap(), 1.0),
            (ArrivalProcess::gamma(0.25).unwrap(), 2.0),
            (ArrivalProcess::gamma(4.0).unwrap(), 0.5),
            (ArrivalProcess::Constant, 0.0),
            (trace, 2.0_f64.sqrt()),
        ] {
            for rate in [0.5, 40.0] {
                let (mean, variation) = moments(&gaps(&process, rate, 30_000));
                assert!((mean * rate - 1.0).abs() < 0.03, "{process:?} at {rate}: {mean}");
                assert!((variation - spread).abs() < 0.05 * spread + 1e-5, "{process:?} at {rate}: {variation}");
            }
        }
    }

    #[test]
    fn arrivals_that_cannot_be_are_refused_with_a_way_out() {
        for burstiness in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(ArrivalProcess::gamma(burstiness).is_err());
        }
        let refused = |times: &[f64]| ArrivalProcess::trace("t", times).unwrap_err();
        assert_eq!(refused(&[]), InvalidArrivals::Short(0));
        assert_eq!(refused(&[1.0, 1.0]), InvalidArrivals::Short(2));
        assert_eq!(refused(&[1.0, f64::NAN]), InvalidArrivals::NotFinite(2));
        assert_eq!(refused(&[1.0, 3.0, 2.0]), InvalidArrivals::Unsorted { number: 3, at: 2.0 });
    }

    proptest! {
        #[test]
        fn times_never_go_back_and_depend_on_the_seed_alone(
            burstiness in 0.05..20.0_f64,
            rate in 0.01..5000.0_f64,
            seed: u64,
        ) {
            let process = ArrivalProcess::gamma(burstiness).unwrap();
            let times: Vec<_> = process.at_rate(rate, seed).take(200).collect();
            prop_assert!(times.is_sorted());
            prop_assert_eq!(times, process.at_rate(rate, seed).take(200).collect::<Vec<_>>());
        }
    }
}

//! Distributions of prompt and output lengths: fitted, recorded, correlated. Pure.

use rand::Rng;
use rand_distr::{Distribution, StandardNormal};
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal};

/// A distribution of lengths in tokens. Every length is at least 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "distribution", rename_all = "snake_case")]
pub enum TokenLengths {
    /// One length.
    Fixed {
        /// In tokens.
        tokens: u64,
    },
    /// Log-normal with these quantiles.
    Lognormal {
        /// Median.
        p50: f64,
        /// 95th percentile.
        p95: f64,
    },
    /// Recorded lengths, each as likely as the others.
    Recorded {
        /// Name of the file.
        name: String,
        /// Its shape, for the summary.
        shape: LengthShape,
        /// Ascending; not written to the summary.
        #[serde(skip)]
        sorted: Vec<u64>,
    },
}

/// Shape of recorded lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LengthShape {
    /// How many there are.
    pub count: usize,
    /// Mean.
    pub mean: f64,
    /// 5th percentile.
    pub p5: u64,
    /// Median.
    pub p50: u64,
    /// 95th percentile.
    pub p95: u64,
    /// 99th percentile.
    pub p99: u64,
}

impl LengthShape {
    fn of_sorted(sorted: &[u64]) -> Self {
        let at = |share: f64| {
            let rank = (share * sorted.len() as f64).ceil() as usize;
            sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
        };
        let mean = sorted.iter().map(|length| *length as f64).sum::<f64>() / sorted.len().max(1) as f64;
        LengthShape { count: sorted.len(), mean, p5: at(0.05), p50: at(0.5), p95: at(0.95), p99: at(0.99) }
    }

    fn of(lengths: impl Iterator<Item = u64>) -> Self {
        let mut sorted: Vec<u64> = lengths.collect();
        sorted.sort_unstable();
        Self::of_sorted(&sorted)
    }
}

/// Why lengths cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidLengths {
    /// A length of nothing.
    #[error("a length must be at least 1 token, and {0} is not")]
    TooShort(f64),
    /// Quantiles the wrong way around.
    #[error("p95 ({p95}) is below p50 ({p50}); the 95th percentile is the larger one")]
    Crossed {
        /// Median.
        p50: f64,
        /// 95th percentile.
        p95: f64,
    },
    /// A correlation that none can be.
    #[error("a correlation of {0} cannot be; give a number from -1 to 1")]
    Correlation(f64),
    /// No lengths in a record.
    #[error("there is no length in it")]
    Empty,
}

impl TokenLengths {
    /// Log-normal lengths; a constant if the quantiles are equal.
    ///
    /// # Errors Quantiles that are not lengths, or in the wrong order.
    pub fn lognormal(p50: f64, p95: f64) -> Result<Self, InvalidLengths> {
        for quantile in [p50, p95] {
            if !quantile.is_finite() || quantile < 1.0 {
                return Err(InvalidLengths::TooShort(quantile));
            }
        }
        if p95 < p50 {
            return Err(InvalidLengths::Crossed { p50, p95 });
        }
        Ok(TokenLengths::Lognormal { p50, p95 })
    }

    /// Recorded lengths.
    ///
    /// # Errors
    /// There are none, or one of them is 0.
    pub fn recorded(name: &str, mut lengths: Vec<u64>) -> Result<Self, InvalidLengths> {
        lengths.sort_unstable();
        match lengths.first() {
            None => Err(InvalidLengths::Empty),
            Some(0) => Err(InvalidLengths::TooShort(0.0)),
            Some(_) => {
                let shape = LengthShape::of_sorted(&lengths);
                Ok(TokenLengths::Recorded { name: name.to_owned(), shape, sorted: lengths })
            }
        }
    }

    /// The length at a standard normal score: the quantile of the same probability.
    #[must_use]
    pub fn of_score(&self, score: f64) -> u64 {
        match self {
            TokenLengths::Fixed { tokens } => (*tokens).max(1),
            TokenLengths::Lognormal { p50, p95 } => {
                let sigma = (p95 / p50).ln() / z_of(0.95);
                // Casts saturate beyond the range.
                ((p50.ln() + sigma * score).exp().round() as u64).max(1)
            }
            TokenLengths::Recorded { sorted, .. } => {
                let share = standard_normal().cdf(score);
                let at = (share * sorted.len() as f64) as usize;
                sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(1)
            }
        }
    }

    /// Mean length, of lengths that no bound cuts.
    #[must_use]
    pub fn mean(&self) -> f64 {
        match self {
            TokenLengths::Fixed { tokens } => *tokens as f64,
            TokenLengths::Lognormal { p50, p95 } => {
                let sigma = (p95 / p50).ln() / z_of(0.95);
                p50 * (sigma * sigma / 2.0).exp()
            }
            TokenLengths::Recorded { shape, .. } => shape.mean,
        }
    }
}

/// Prompt and output lengths of one class of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LengthModel {
    /// Two distributions, tied by a Gaussian copula: their normal scores have this correlation, their own
    /// shapes stay as they are.
    Fitted {
        /// Prompt tokens.
        input: TokenLengths,
        /// Output tokens.
        output: TokenLengths,
        /// Correlation of the normal scores, -1 to 1; 0: independent.
        correlation: f64,
    },
    /// Pairs from a trace, in its order; where it ends it begins again.
    Pairs {
        /// Name of the trace.
        name: String,
        /// Shape of its prompts, for the summary.
        input: LengthShape,
        /// Shape of its outputs, for the summary.
        output: LengthShape,
        /// Prompt and output tokens; not written to the summary.
        #[serde(skip)]
        pairs: Vec<(u64, u64)>,
    },
}

impl LengthModel {
    /// Two distributions with this correlation.
    ///
    /// # Errors
    /// The correlation is outside -1 to 1.
    pub fn fitted(input: TokenLengths, output: TokenLengths, correlation: f64) -> Result<Self, InvalidLengths> {
        if !(-1.0..=1.0).contains(&correlation) {
            return Err(InvalidLengths::Correlation(correlation));
        }
        Ok(LengthModel::Fitted { input, output, correlation })
    }

    /// Pairs of prompt and output tokens.
    ///
    /// # Errors
    /// There are none, or a length is 0.
    pub fn pairs(name: &str, pairs: Vec<(u64, u64)>) -> Result<Self, InvalidLengths> {
        if pairs.is_empty() {
            return Err(InvalidLengths::Empty);
        }
        if pairs.iter().any(|(input, output)| *input == 0 || *output == 0) {
            return Err(InvalidLengths::TooShort(0.0));
        }
        let input = LengthShape::of(pairs.iter().map(|(input, _)| *input));
        let output = LengthShape::of(pairs.iter().map(|(_, output)| *output));
        Ok(LengthModel::Pairs { name: name.to_owned(), input, output, pairs })
    }

    /// Prompt and output tokens of the request with this number.
    pub fn draw(&self, number: u64, chance: &mut impl Rng) -> (u64, u64) {
        match self {
            LengthModel::Fitted { input, output, correlation } => {
                let (first, second): (f64, f64) = (StandardNormal.sample(chance), StandardNormal.sample(chance));
                let tied = correlation * first + (1.0 - correlation * correlation).max(0.0).sqrt() * second;
                (input.of_score(first), output.of_score(tied))
            }
            LengthModel::Pairs { pairs, .. } => pairs[(number % pairs.len() as u64) as usize],
        }
    }

    /// Mean output length.
    #[must_use]
    pub fn mean_output(&self) -> f64 {
        match self {
            LengthModel::Fitted { output, .. } => output.mean(),
            LengthModel::Pairs { output, .. } => output.mean,
        }
    }
}

fn standard_normal() -> Normal {
    Normal::standard()
}

/// The score below which this share of a standard normal distribution lies.
fn z_of(share: f64) -> f64 {
    standard_normal().inverse_cdf(share)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    fn drawn(model: &LengthModel, count: u64) -> Vec<(u64, u64)> {
        let mut chance = StdRng::seed_from_u64(3);
        (0..count).map(|number| model.draw(number, &mut chance)).collect()
    }

    fn quantile(mut values: Vec<u64>, share: f64) -> f64 {
        values.sort_unstable();
        values[(share * values.len() as f64) as usize] as f64
    }

    #[test]
    fn a_fitted_lognormal_has_the_quantiles_and_the_mean_that_it_was_fitted_to() {
        let input = TokenLengths::lognormal(900.0, 6000.0).unwrap();
        let model = LengthModel::fitted(input.clone(), TokenLengths::Fixed { tokens: 7 }, 0.0).unwrap();
        let lengths: Vec<u64> = drawn(&model, 40_000).into_iter().map(|(input, _)| input).collect();
        assert!((quantile(lengths.clone(), 0.5) / 900.0 - 1.0).abs() < 0.03);
        assert!((quantile(lengths.clone(), 0.95) / 6000.0 - 1.0).abs() < 0.04);
        // exp(mu + sigma^2 / 2) with sigma = ln(6000 / 900) / 1.6449.
        assert!((input.mean() - 1749.7).abs() < 1.0, "{}", input.mean());
        let mean = lengths.iter().sum::<u64>() as f64 / lengths.len() as f64;
        assert!((mean / input.mean() - 1.0).abs() < 0.03, "{mean}");
    }

    /// Spearman's rank correlation: for a Gaussian copula it is 6/pi asin(rho / 2).
    fn rank_correlation(pairs: &[(u64, u64)]) -> f64 {
        let ranks = |of: fn(&(u64, u64)) -> u64| {
            let mut order: Vec<usize> = (0..pairs.len()).collect();
            order.sort_by_key(|at| of(&pairs[*at]));
            let mut ranks = vec![0.0; pairs.len()];
            order.iter().enumerate().for_each(|(rank, at)| ranks[*at] = rank as f64);
            ranks
        };
        let (a, b) = (ranks(|pair| pair.0), ranks(|pair| pair.1));
        let middle = (pairs.len() - 1) as f64 / 2.0;
        let over: f64 = a.iter().zip(&b).map(|(a, b)| (a - middle) * (b - middle)).sum();
        let under: f64 = a.iter().map(|a| (a - middle) * (a - middle)).sum();
        over / under
    }

    #[test]
    fn the_copula_ties_lengths_and_leaves_each_distribution_as_it_is() {
        let lengths = || TokenLengths::lognormal(1000.0, 8000.0).unwrap();
        for rho in [-0.8, 0.0, 0.6, 1.0] {
            let pairs = drawn(&LengthModel::fitted(lengths(), lengths(), rho).unwrap(), 20_000);
            let expected = 6.0 / std::f64::consts::PI * (rho / 2.0_f64).asin();
            assert!((rank_correlation(&pairs) - expected).abs() < 0.02, "{rho}");
            let outputs = pairs.iter().map(|pair| pair.1).collect();
            assert!((quantile(outputs, 0.5) / 1000.0 - 1.0).abs() < 0.06, "{rho}");
        }
    }

    #[test]
    fn recorded_lengths_come_as_often_as_they_were_recorded() {
        let recorded = TokenLengths::recorded("r", vec![30, 10, 10, 20]).unwrap();
        let model = LengthModel::fitted(recorded, TokenLengths::Fixed { tokens: 1 }, 0.0).unwrap();
        let drawn = drawn(&model, 20_000);
        let share = |length| drawn.iter().filter(|pair| pair.0 == length).count() as f64 / drawn.len() as f64;
        assert!((share(10) - 0.5).abs() < 0.02 && (share(20) - 0.25).abs() < 0.02 && (share(30) - 0.25).abs() < 0.02);
    }

    #[test]
    fn a_summary_says_what_recorded_lengths_are_like_without_listing_them() {
        let recorded = TokenLengths::recorded("r", (1..=100).collect()).unwrap();
        let text = serde_json::to_string(&recorded).unwrap();
        assert!(text.contains(r#""shape":{"count":100,"mean":50.5,"p5":5,"p50":50,"p95":95,"p99":99}"#), "{text}");
        assert!(!text.contains("sorted"));
    }

    #[test]
    fn pairs_come_in_the_order_of_their_trace_and_begin_again() {
        let model = LengthModel::pairs("t", vec![(1, 2), (3, 4)]).unwrap();
        assert_eq!(drawn(&model, 3), [(1, 2), (3, 4), (1, 2)]);
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        assert_eq!(TokenLengths::lognormal(10.0, 5.0), Err(InvalidLengths::Crossed { p50: 10.0, p95: 5.0 }));
        assert!(TokenLengths::lognormal(f64::NAN, 5.0).is_err() && TokenLengths::lognormal(0.0, 5.0).is_err());
        assert_eq!(TokenLengths::recorded("r", vec![]), Err(InvalidLengths::Empty));
        assert!(TokenLengths::recorded("r", vec![0, 4]).is_err());
        assert!(LengthModel::pairs("t", vec![(1, 0)]).is_err() && LengthModel::pairs("t", vec![]).is_err());
        let fixed = || TokenLengths::Fixed { tokens: 1 };
        assert!(
            LengthModel::fitted(fixed(), fixed(), 1.1).is_err()
                && LengthModel::fitted(fixed(), fixed(), f64::NAN).is_err()
        );
    }

    proptest! {
        #[test]
        fn a_higher_score_is_never_a_shorter_length(
            p50 in 1.0..1e5_f64,
            factor in 1.0..50.0_f64,
            recorded in proptest::collection::vec(1..100_000_u64, 1..50),
            scores in (-9.0..9.0_f64, -9.0..9.0_f64),
        ) {
            let (low, high) = (scores.0.min(scores.1), scores.0.max(scores.1));
            let fitted = TokenLengths::lognormal(p50, p50 * factor).unwrap();
            for lengths in [fitted, TokenLengths::recorded("r", recorded).unwrap()] {
                prop_assert!(lengths.of_score(low) >= 1);
                prop_assert!(lengths.of_score(low) <= lengths.of_score(high));
            }
        }
    }
}

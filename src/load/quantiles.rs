//! Percentiles that cannot flatter. Pure.
//!
//! A percentile is printed only where at least ten requests lie beyond it (1,000 requests for a p99), and requests that
//! never reached the point count as the slowest ones: an overloaded service does not get better by
//! failing.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Requests beyond a percentile, at the least.
const BEYOND: f64 = 10.0;

/// A percentile, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Percentile {
    /// In seconds.
    Seconds(f64),
    /// Too few requests for it.
    TooFew,
    /// The request at this percentile never reached the point.
    NotReached,
}

const TOO_FEW: &str = "n too small";
const NOT_REACHED: &str = "not reached";

impl Percentile {
    /// Of ascending values and of requests that reached none.
    #[must_use]
    pub fn of(sorted: &[f64], unreached: usize, share: f64) -> Self {
        let n = sorted.len() + unreached;
        if !Percentile::has_enough(n, share) {
            return Percentile::TooFew;
        }
        let rank = (share * n as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).map_or(Percentile::NotReached, |value| Percentile::Seconds(*value))
    }

    /// Whether ten of `n` requests lie beyond the percentile.
    pub(super) fn has_enough(n: usize, share: f64) -> bool {
        // A hair of slack: 1 - 0.99 is a little more than 0.01.
        (n as f64) * (1.0 - share) >= BEYOND - 1e-6
    }

    /// In seconds, if there is one.
    #[must_use]
    pub fn seconds(self) -> Option<f64> {
        match self {
            Percentile::Seconds(seconds) => Some(seconds),
            Percentile::TooFew | Percentile::NotReached => None,
        }
    }
}

impl std::fmt::Display for Percentile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Percentile::Seconds(seconds) if *seconds < 1.0 => write!(f, "{:.3} ms", seconds * 1e3),
            Percentile::Seconds(seconds) => write!(f, "{seconds:.3} s"),
            Percentile::TooFew => f.write_str(TOO_FEW),
            Percentile::NotReached => f.write_str(NOT_REACHED),
        }
    }
}

/// A number, or the words that say why there is none.
impl Serialize for Percentile {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Percentile::Seconds(seconds) => to.serialize_f64(*seconds),
            Percentile::TooFew => to.serialize_str(TOO_FEW),
            Percentile::NotReached => to.serialize_str(NOT_REACHED),
        }
    }
}

impl<'de> Deserialize<'de> for Percentile {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Seconds(f64),
            Words(String),
        }
        match Written::deserialize(from)? {
            Written::Seconds(seconds) => Ok(Percentile::Seconds(seconds)),
            Written::Words(words) if words == TOO_FEW => Ok(Percentile::TooFew),
            Written::Words(words) if words == NOT_REACHED => Ok(Percentile::NotReached),
            Written::Words(words) => Err(serde::de::Error::custom(format!("{words:?} is no percentile"))),
        }
    }
}

/// The percentiles of one measure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasureQuantiles {
    /// Requests of which the measure is defined, or that failed before it was.
    pub n: usize,
    /// Of these, requests that never reached it.
    pub not_reached: usize,
    /// Mean of those that reached it; absent where none did.
    #[serde(default)]
    pub mean: Option<f64>,
    /// Median.
    pub p50: Percentile,
    /// 90th percentile.
    pub p90: Percentile,
    /// 95th percentile.
    pub p95: Percentile,
    /// 99th percentile.
    pub p99: Percentile,
}

impl MeasureQuantiles {
    /// Of these values, in any order.
    #[must_use]
    pub fn of(mut values: Vec<f64>, unreached: usize) -> Self {
        values.sort_by(f64::total_cmp);
        let mean = (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let at = |share| Percentile::of(&values, unreached, share);
        MeasureQuantiles {
            n: values.len() + unreached,
            not_reached: unreached,
            mean,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(count: usize, unreached: usize) -> MeasureQuantiles {
        MeasureQuantiles::of((1..=count).rev().map(|value| value as f64).collect(), unreached)
    }

    #[test]
    fn a_p99_needs_a_thousand_requests() {
        assert_eq!((of(999, 0).p99, of(1000, 0).p99), (Percentile::TooFew, Percentile::Seconds(990.0)));
        assert_eq!((of(199, 0).p95, of(200, 0).p95), (Percentile::TooFew, Percentile::Seconds(190.0)));
        assert_eq!((of(19, 0).p50, of(20, 0).p50), (Percentile::TooFew, Percentile::Seconds(10.0)));
        assert_eq!(of(0, 0).p50, Percentile::TooFew);
    }

    #[test]
    fn requests_that_failed_are_the_slowest_ones() {
        let found = of(940, 60);
        assert_eq!((found.p50, found.p90), (Percentile::Seconds(500.0), Percentile::Seconds(900.0)));
        assert_eq!((found.p95, found.n, found.not_reached), (Percentile::NotReached, 1000, 60));
        assert_eq!((found.mean, of(0, 3).mean), (Some(470.5), None), "a mean is of those that came");
    }

    #[test]
    fn a_percentile_is_written_as_a_number_or_in_words() {
        let text = serde_json::to_string(&of(200, 0)).unwrap();
        assert!(text.contains(r#""p95":190.0,"p99":"n too small""#), "{text}");
        assert_eq!(serde_json::from_str::<MeasureQuantiles>(&text).unwrap(), of(200, 0));
        assert!(serde_json::from_str::<Percentile>("\"soon\"").is_err());
    }
}

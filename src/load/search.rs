//! The search for the knee: the highest rate that still clears the target. Pure.
//!
//! Rates grow geometrically while they clear and shrink while they do not; between the highest that clears and the
//! lowest that does not, the search halves (geometrically) until the two are as close as asked. Nothing is
//! interpolated: the knee is a rate that was measured.

/// Start, precision and bounds of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchSettings {
    /// First rate, in requests per second.
    pub start: f64,
    /// Factor between the rates of the ramp, above 1.
    pub growth: f64,
    /// The search ends where the lowest rate that fails is at most this share above the highest that clears.
    pub tolerance: f64,
    /// Lowest rate that is tried.
    pub lowest: f64,
    /// Highest rate that is tried.
    pub highest: f64,
}

/// Position of the knee.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Knee {
    /// Between two rates.
    Between {
        /// Highest rate that clears.
        clears: f64,
        /// Lowest rate that fails.
        fails: f64,
    },
    /// At or above the highest rate that may be tried.
    Above(f64),
    /// Below the lowest rate that may be tried.
    Below(f64),
}

/// A search on its way.
#[derive(Clone, Debug)]
pub struct KneeSearch {
    settings: SearchSettings,
    clears: Option<f64>,
    fails: Option<f64>,
}

impl KneeSearch {
    /// A search that has seen nothing.
    #[must_use]
    pub fn new(settings: SearchSettings) -> Self {
        KneeSearch { settings, clears: None, fails: None }
    }

    /// The rate to measure next; `None` once the knee is found.
    #[must_use]
    pub fn next_rate(&self) -> Option<f64> {
        let SearchSettings { start, growth, tolerance, lowest, highest } = self.settings;
        match (self.clears, self.fails) {
            (None, None) => Some(start.clamp(lowest, highest)),
            (Some(clears), None) => (clears < highest).then(|| (clears * growth).min(highest)),
            (None, Some(fails)) => (fails > lowest).then(|| (fails / growth).max(lowest)),
            // A hair of slack, because halving reaches the tolerance only nearly.
            (Some(clears), Some(fails)) => (fails / clears > 1.0 + tolerance + 1e-9).then(|| (clears * fails).sqrt()),
        }
    }

    /// Records the result at a rate.
    pub fn note(&mut self, rate: f64, is_clear: bool) {
        if is_clear {
            self.clears = Some(self.clears.map_or(rate, |known| known.max(rate)));
        } else {
            self.fails = Some(self.fails.map_or(rate, |known| known.min(rate)));
        }
    }

    /// The position of the knee, as far as known; `None` before the first measurement.
    #[must_use]
    pub fn knee(&self) -> Option<Knee> {
        match (self.clears, self.fails) {
            (Some(clears), Some(fails)) => Some(Knee::Between { clears, fails }),
            (Some(clears), None) => Some(Knee::Above(clears)),
            (None, Some(fails)) => Some(Knee::Below(fails)),
            (None, None) => None,
        }
    }
}

/// The rate at which one repetition crosses its target, on the straight line between the last rate up to which it
/// cleared and the next one. `points`: rates, ascending, with how far the attainment there lies above the target;
/// `None` where it is no number, because the run did not settle. Of a repetition that never failed it is the last rate, of
/// one that never cleared the first; `None` without any.
#[must_use]
pub fn crossing(points: &[(f64, Option<f64>)]) -> Option<f64> {
    let clears = |margin: Option<f64>| margin.is_some_and(|margin| margin >= 0.0);
    let Some(fails) = points.iter().position(|(_, margin)| !clears(*margin)) else {
        return points.last().map(|(rate, _)| *rate);
    };
    let Some((low, Some(above))) = fails.checked_sub(1).map(|before| points[before]) else {
        return points.first().map(|(rate, _)| *rate);
    };
    let (high, below) = points[fails];
    let share = below.map_or(0.0, |below| above / (above - below));
    Some(low + (high - low) * share)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn settings() -> SearchSettings {
        SearchSettings { start: 1.0, growth: 2.0, tolerance: 0.03, lowest: 0.01, highest: 1000.0 }
    }

    fn searched(settings: SearchSettings, knee: f64) -> (Option<Knee>, usize) {
        let mut search = KneeSearch::new(settings);
        let mut tries = 0;
        while let Some(rate) = search.next_rate() {
            search.note(rate, rate <= knee);
            tries += 1;
            assert!(tries < 100, "the search does not end");
        }
        (search.knee(), tries)
    }

    #[test]
    fn the_ramp_ends_at_what_may_be_tried() {
        assert_eq!(searched(settings(), 1e9).0, Some(Knee::Above(1000.0)));
        assert_eq!(searched(settings(), 0.001).0, Some(Knee::Below(0.01)));
        assert_eq!(KneeSearch::new(settings()).knee(), None);
    }

    #[test]
    fn a_repetition_crosses_its_target_between_two_rates() {
        let points = [(4.0, Some(0.07)), (8.0, Some(0.02)), (9.0, Some(-0.08)), (16.0, Some(-0.8))];
        assert!((crossing(&points).unwrap() - 8.2).abs() < 1e-9);
        assert_eq!(crossing(&points[..2]), Some(8.0), "it never failed");
        assert_eq!(crossing(&points[2..]), Some(9.0), "it never cleared");
        assert_eq!(crossing(&[(4.0, Some(0.07)), (5.0, None)]), Some(4.0), "it did not settle there");
        assert_eq!(crossing(&[]), None);
    }

    proptest! {
        #[test]
        fn any_knee_is_found_within_the_tolerance_in_few_steps(
            knee in 0.02..900.0_f64,
            start in 0.01..1000.0_f64,
            growth in 1.2..4.0_f64,
            tolerance in 0.01..0.2_f64,
        ) {
            let settings = SearchSettings { start, growth, tolerance, ..settings() };
            let (found, tries) = searched(settings, knee);
            let Some(Knee::Between { clears, fails }) = found else { panic!("{found:?}") };
            prop_assert!(clears <= knee && knee < fails && fails / clears <= 1.0 + tolerance + 1e-6);
            let ramp = (1000.0_f64 / 0.01).ln() / growth.ln();
            prop_assert!((tries as f64) < ramp + 10.0);
        }

        #[test]
        fn a_noisy_search_ends_too(verdicts in proptest::collection::vec(any::<bool>(), 200)) {
            let mut search = KneeSearch::new(settings());
            let mut verdicts = verdicts.into_iter();
            while let Some(rate) = search.next_rate() {
                prop_assert!((0.01..=1000.0).contains(&rate));
                search.note(rate, verdicts.next().unwrap());
            }
        }
    }
}

//! The rate at which prompt tokens are dispatched to a pool's engines.

/// A token bucket over prompt tokens, and a bound on the prompt tokens outstanding at one engine.
///
/// The bucket refills at the rate at which the engines can prefill without breaking the TPOT of the
/// sequences that run there. While it is positive, prompts are dispatched up to `most` tokens ahead of an
/// engine; at zero or below only up to `least`, so that the engine never runs dry; below `-behind` none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillPace {
    /// Refill rate, tokens per second: the share of the engines' time that the classes leave for prefill.
    /// Infinite where no class has a TPOT objective that prefill could break.
    pub per_second: f64,
    /// Rate, tokens per second, up to which requests beyond their tenant's usual share are dispatched. An
    /// engine kept busy by those alone still answers the others quickly.
    pub spare: f64,
    /// Capacity of the bucket, tokens.
    pub burst: f64,
    /// Largest debt of the bucket, tokens.
    pub behind: f64,
    /// Largest number of prompt tokens ahead of one engine.
    pub most: f64,
    /// The same bound while the bucket is empty.
    pub least: f64,
}

impl PrefillPace {
    /// The sum, value by value.
    #[must_use]
    pub fn plus(&self, other: &PrefillPace) -> PrefillPace {
        self.with(other, |own, other| own + other)
    }

    /// All values multiplied by this.
    #[must_use]
    pub fn times(&self, factor: f64) -> PrefillPace {
        self.with(self, |own, _| own * factor)
    }

    /// Whether it can be a pace: no value is negative or no number, and only rates are infinite.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let rates = [self.per_second, self.spare].iter().all(|rate| *rate >= 0.0);
        rates && [self.burst, self.behind, self.most, self.least].iter().all(|size| size.is_finite() && *size >= 0.0)
    }

    fn with(&self, other: &PrefillPace, of: impl Fn(f64, f64) -> f64) -> PrefillPace {
        PrefillPace {
            per_second: of(self.per_second, other.per_second),
            spare: of(self.spare, other.spare),
            burst: of(self.burst, other.burst),
            behind: of(self.behind, other.behind),
            most: of(self.most, other.most),
            least: of(self.least, other.least),
        }
    }
}

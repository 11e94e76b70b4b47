//! Settings of a tenant's limits, complete and checked.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use super::{LimitKind, LimitScope};

/// What happens to a request beyond its tenant's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OverLimit {
    /// It is rejected.
    #[default]
    Reject,
    /// It is served behind all others, while there is room.
    Demote,
}

/// The limits of one tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Over all its requests.
    pub whole: Allowance,
    /// Additionally, over its requests for one model, by the name after aliasing.
    pub models: BTreeMap<Arc<str>, Allowance>,
}

impl Limits {
    /// Whether this is limited, for the tenant or for one of its models.
    #[must_use]
    pub fn has(&self, limit: LimitKind, scope: LimitScope) -> bool {
        match scope {
            LimitScope::Tenant => self.whole.has(limit),
            LimitScope::Model => self.models.values().any(|model| model.has(limit)),
        }
    }

    /// Whether nothing is limited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.models.values().all(Allowance::is_empty)
    }
}

/// Limits of one scope; `None` means unlimited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowance {
    /// Prompt and output tokens together.
    pub tokens: Option<Rate>,
    /// Prompt tokens.
    pub input_tokens: Option<Rate>,
    /// Output tokens.
    pub output_tokens: Option<Rate>,
    /// Requests.
    pub requests: Option<Rate>,
    /// Concurrent requests.
    pub concurrent_requests: Option<NonZeroU64>,
}

impl Allowance {
    /// Whether nothing is limited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Allowance::default()
    }

    fn has(&self, limit: LimitKind) -> bool {
        match limit {
            LimitKind::ConcurrentRequests => self.concurrent_requests.is_some(),
            of_rate => self.rate(of_rate).is_some(),
        }
    }

    /// The rate of one limit; `None` for `concurrent_requests`.
    pub(in super::super::super) fn rate(&self, limit: LimitKind) -> Option<Rate> {
        match limit {
            LimitKind::Tokens => self.tokens,
            LimitKind::InputTokens => self.input_tokens,
            LimitKind::OutputTokens => self.output_tokens,
            LimitKind::Requests => self.requests,
            LimitKind::ConcurrentRequests => None,
        }
    }
}

/// An amount per minute with a burst. Both are from 1 to 2^53, the range in which YAML and JSON parsers
/// agree on numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    per_minute: u64,
    burst: u64,
}

impl Rate {
    /// Largest rate and burst.
    pub const MOST: u64 = 1 << 53;

    /// `per_minute` with a bucket of `burst`, by default one minute's amount.
    pub fn new(per_minute: u64, burst: Option<u64>) -> Result<Self, OutOfRange> {
        let burst = burst.unwrap_or(per_minute);
        let all_in_range = [per_minute, burst].iter().all(|number| (1..=Self::MOST).contains(number));
        if all_in_range { Ok(Rate { per_minute, burst }) } else { Err(OutOfRange) }
    }

    /// Refill per minute.
    #[must_use]
    pub const fn per_minute(self) -> u64 {
        self.per_minute
    }

    /// Capacity.
    #[must_use]
    pub const fn burst(self) -> u64 {
        self.burst
    }
}

/// A rate or burst out of range; zero would never admit anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a limit must lie between 1 and 2^53; leave it out if there is none")]
pub struct OutOfRange;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_lies_between_one_and_two_to_the_53() {
        assert_eq!(Rate::new(0, None), Err(OutOfRange));
        assert_eq!(Rate::new(1, Some(0)), Err(OutOfRange));
        assert_eq!(Rate::new(Rate::MOST + 1, None), Err(OutOfRange));
        assert_eq!(Rate::new(1, Some(u64::MAX)), Err(OutOfRange));
        let rate = Rate::new(Rate::MOST, None).unwrap();
        assert_eq!((rate.per_minute(), rate.burst()), (Rate::MOST, Rate::MOST));
        assert_eq!(Rate::new(60, Some(5)).unwrap().burst(), 5);
    }
}

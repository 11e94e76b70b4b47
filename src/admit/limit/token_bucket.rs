//! One token bucket in integer arithmetic.
//!
//! Stores what is *spent* rather than what is left: a changed limit then needs no conversion, and debt is
//! an amount above the burst. The spent amount decays at the rate, down to zero. A token is divided into
//! grains such that one nanosecond of a rate of `r` per minute is exactly `r` grains, so nothing is rounded
//! and nothing drifts.

use std::time::Duration;

use super::settings::Rate;
use crate::types::Tick;

/// Grains per token: nanoseconds per minute.
const GRAINS: u128 = 60_000_000_000;
const NANOS_IN_A_SECOND: u128 = 1_000_000_000;
const GRAINS_IN_A_MICRO: u128 = 1_000;

/// The state of one rate limit.
#[derive(Clone, Debug)]
pub(in super::super) struct TokenBucket {
    rate: Rate,
    /// In grains, at the moment `as_of`.
    spent: u128,
    as_of: Tick,
    /// A limit removed by a reload keeps counting without refusing, so that restoring it neither refunds nor
    /// double-charges.
    enforced: bool,
}

impl TokenBucket {
    /// A full bucket.
    pub fn new(rate: Rate, at: Tick) -> Self {
        TokenBucket { rate, spent: 0, as_of: at, enforced: true }
    }

    /// A bucket whose state another process reports: whole tokens spent, and sixty-millionths of a token (the
    /// refill of one microsecond at one per minute).
    pub fn told(rate: Rate, whole: u64, micros: u64, at: Tick) -> Self {
        let spent = u128::from(whole) * GRAINS + u128::from(micros) * GRAINS_IN_A_MICRO;
        TokenBucket { rate, spent, as_of: at, enforced: true }
    }

    /// The rate, if enforced.
    pub fn enforced(&self) -> Option<Rate> {
        self.enforced.then_some(self.rate)
    }

    /// Sets the limit, or `None` to stop enforcing it. The spent amount is kept.
    pub fn change(&mut self, rate: Option<Rate>, at: Tick) {
        self.pass(at);
        self.enforced = rate.is_some();
        self.rate = rate.unwrap_or(self.rate);
    }

    /// Whole seconds from `at` until `need` fits without refunds; `None` if it fits now.
    pub fn wait(&self, need: u64, at: Tick) -> Option<u64> {
        let full = u128::from(self.rate.burst()) * GRAINS;
        let over = self.spent_at(at).saturating_add(u128::from(need) * GRAINS).saturating_sub(full);
        if !self.enforced || over == 0 {
            return None;
        }
        // The other process's clock may be ahead; the refill starts only there.
        let ahead = self.as_of.since(at).as_nanos() * self.flow();
        let seconds = over.saturating_add(ahead).div_ceil(self.flow() * NANOS_IN_A_SECOND);
        Some(u64::try_from(seconds).unwrap_or(u64::MAX).max(1))
    }

    /// Reserves `need`: counts as spent, and decays, from now on.
    pub fn take(&mut self, need: u64, at: Tick) {
        self.settle(0, need, at);
    }

    /// Replaces `held` by `used` in one step, because the part of `held` that has decayed must not be charged
    /// again.
    pub fn settle(&mut self, held: u64, used: u64, at: Tick) {
        self.pass(at);
        self.give_back(held.saturating_sub(used));
        self.spent = self.spent.saturating_add(u128::from(used.saturating_sub(held)) * GRAINS);
    }

    /// Refunds what was held. Needs no moment, because refund and decay commute: both end at
    /// zero.
    pub fn give_back(&mut self, held: u64) {
        self.spent = self.spent.saturating_sub(u128::from(held) * GRAINS);
    }

    /// Whole tokens left; 0 if in debt.
    pub fn remaining(&self, at: Tick) -> u64 {
        let full = u128::from(self.rate.burst()) * GRAINS;
        u64::try_from(full.saturating_sub(self.spent_at(at)) / GRAINS).unwrap_or(u64::MAX)
    }

    /// Whole tokens spent including debt, rounded up.
    pub fn spent(&self, at: Tick) -> u64 {
        u64::try_from(self.spent_at(at).div_ceil(GRAINS)).unwrap_or(u64::MAX)
    }

    /// Time until the bucket is full without refunds.
    pub fn until_full(&self, at: Tick) -> Duration {
        let nanos = self.spent_at(at).div_ceil(self.flow());
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).saturating_add(self.as_of.since(at))
    }

    /// Grains decaying per nanosecond.
    fn flow(&self) -> u128 {
        u128::from(self.rate.per_minute())
    }

    fn spent_at(&self, at: Tick) -> u128 {
        self.spent.saturating_sub(at.since(self.as_of).as_nanos() * self.flow())
    }

    fn pass(&mut self, at: Tick) {
        self.spent = self.spent_at(at);
        self.as_of = self.as_of.max(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(per_minute: u64) -> TokenBucket {
        TokenBucket::new(Rate::new(per_minute, None).unwrap(), Tick::ZERO)
    }

    #[test]
    fn a_rate_that_divides_nothing_evenly_does_not_drift() {
        let mut bucket = bucket(7);
        bucket.take(7, Tick::ZERO);
        // A thousand reads between, each applying the decay so far.
        for step in 1..=1000_u64 {
            bucket.take(0, Tick::from_nanos(step * 59_999_999));
        }
        assert_eq!(bucket.remaining(Tick::from_nanos(59_999_999_999)), 6);
        assert_eq!(bucket.remaining(Tick::from_millis(60_000)), 7);
    }

    #[test]
    fn what_is_held_and_flew_off_is_not_charged_again() {
        let mut bucket = bucket(600);
        bucket.take(500, Tick::ZERO);
        bucket.settle(500, 500, Tick::from_millis(50_000));
        assert_eq!(bucket.remaining(Tick::from_millis(50_000)), 600);
    }

    #[test]
    fn a_moment_behind_the_books_waits_for_them_too() {
        let mut bucket = bucket(60);
        bucket.take(60, Tick::from_millis(1500));
        assert_eq!(bucket.wait(1, Tick::from_millis(1500)), Some(1));
        assert_eq!(bucket.wait(1, Tick::from_millis(1000)), Some(2), "500 ms behind, one second to flow");
        assert_eq!(bucket.wait(1, Tick::from_millis(2500)), None);
    }

    #[test]
    fn a_moment_behind_the_books_lets_nothing_flow_twice() {
        let mut bucket = bucket(60);
        bucket.take(60, Tick::from_millis(10_000));
        bucket.take(0, Tick::from_millis(5_000));
        assert_eq!(bucket.remaining(Tick::from_millis(10_000)), 0);
    }

    #[test]
    fn numbers_at_the_ends_saturate() {
        let mut slow = bucket(1);
        for _ in 0..100 {
            slow.settle(0, u64::MAX, Tick::ZERO);
        }
        assert_eq!(slow.remaining(Tick::ZERO), 0);
        assert_eq!(slow.wait(u64::MAX, Tick::ZERO), Some(u64::MAX));
        assert_eq!(slow.until_full(Tick::ZERO), Duration::from_nanos(u64::MAX));
        slow.spent = u128::MAX;
        slow.settle(0, u64::MAX, Tick::from_nanos(u64::MAX));
        assert!(slow.wait(1, Tick::ZERO).is_some());
        let mut fast = bucket(Rate::MOST);
        fast.take(Rate::MOST, Tick::ZERO);
        assert_eq!(fast.wait(Rate::MOST, Tick::ZERO), Some(60));
        assert_eq!(fast.remaining(Tick::from_nanos(u64::MAX)), Rate::MOST);
    }
}

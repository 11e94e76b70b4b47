//! One token bucket, in whole numbers.
//!
//! It is kept as what is *spent*, not as what is left: then a changed limit needs no sum (what
//! was spent simply stays), and debt is a spent amount above the burst. Spent flows off with
//! the rate, down to zero. A token is cut into grains so fine that one nanosecond of a rate of
//! `r` a minute is exactly `r` of them; nothing is rounded, so nothing drifts.

use std::time::Duration;

use super::settings::Rate;
use crate::units::Tick;

/// Grains in a token: nanoseconds in a minute.
const GRAINS: u128 = 60_000_000_000;
const NANOS_IN_A_SECOND: u128 = 1_000_000_000;
const GRAINS_IN_A_MICRO: u128 = 1_000;

/// The state of one limit by rate.
#[derive(Clone, Debug)]
pub(in super::super) struct Meter {
    rate: Rate,
    /// In grains, as of that moment.
    spent: u128,
    as_of: Tick,
    /// A limit that a reload took away goes on counting, so that it can come back without a
    /// gift or a double charge to those who ran meanwhile; it refuses nobody.
    enforced: bool,
}

impl Meter {
    /// A full bucket.
    pub fn new(rate: Rate, at: Tick) -> Self {
        Meter { rate, spent: 0, as_of: at, enforced: true }
    }

    /// A bucket of which somebody else says what is spent: whole tokens, and millionths of a
    /// minute's flow of one token (the microseconds that one a minute would need for it).
    pub fn told(rate: Rate, whole: u64, micros: u64, at: Tick) -> Self {
        let spent = u128::from(whole) * GRAINS + u128::from(micros) * GRAINS_IN_A_MICRO;
        Meter { rate, spent, as_of: at, enforced: true }
    }

    /// The rate, if it holds.
    pub fn enforced(&self) -> Option<Rate> {
        self.enforced.then_some(self.rate)
    }

    /// The limit as it is from now on, `None` if there is none any more. What was spent stays.
    pub fn change(&mut self, rate: Option<Rate>, at: Tick) {
        self.pass(at);
        self.enforced = rate.is_some();
        self.rate = rate.unwrap_or(self.rate);
    }

    /// Whole seconds from `at` until `need` fits, if nothing is given back; `None`: it fits now.
    pub fn wait(&self, need: u64, at: Tick) -> Option<u64> {
        let full = u128::from(self.rate.burst()) * GRAINS;
        let over = self.spent_at(at).saturating_add(u128::from(need) * GRAINS).saturating_sub(full);
        if !self.enforced || over == 0 {
            return None;
        }
        // Somebody else's moment may be ahead of ours; the flow begins only there.
        let ahead = self.as_of.since(at).as_nanos() * self.flow();
        let seconds = over.saturating_add(ahead).div_ceil(self.flow() * NANOS_IN_A_SECOND);
        Some(u64::try_from(seconds).unwrap_or(u64::MAX).max(1))
    }

    /// Sets `need` aside: from here on it counts as spent, and flows off like that.
    pub fn take(&mut self, need: u64, at: Tick) {
        self.settle(0, need, at);
    }

    /// Puts `used` in the place of what was `held`: one step, because what is held and has
    /// flown off meanwhile must not be charged again.
    pub fn settle(&mut self, held: u64, used: u64, at: Tick) {
        self.pass(at);
        self.give_back(held.saturating_sub(used));
        self.spent = self.spent.saturating_add(u128::from(used.saturating_sub(held)) * GRAINS);
    }

    /// Returns what was held. Needs no moment: to give back and then to let flow comes to the
    /// same as the other way round, since both end at zero.
    pub fn give_back(&mut self, held: u64) {
        self.spent = self.spent.saturating_sub(u128::from(held) * GRAINS);
    }

    /// Whole tokens left; debt is none.
    pub fn remaining(&self, at: Tick) -> u64 {
        let full = u128::from(self.rate.burst()) * GRAINS;
        u64::try_from(full.saturating_sub(self.spent_at(at)) / GRAINS).unwrap_or(u64::MAX)
    }

    /// Whole tokens spent, debt included, rounded up.
    pub fn spent(&self, at: Tick) -> u64 {
        u64::try_from(self.spent_at(at).div_ceil(GRAINS)).unwrap_or(u64::MAX)
    }

    /// How long until the bucket is full, if nothing is given back.
    pub fn until_full(&self, at: Tick) -> Duration {
        let nanos = self.spent_at(at).div_ceil(self.flow());
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).saturating_add(self.as_of.since(at))
    }

    /// Grains that flow off in a nanosecond.
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

    fn meter(per_minute: u64) -> Meter {
        Meter::new(Rate::new(per_minute, None).unwrap(), Tick::ZERO)
    }

    #[test]
    fn a_rate_that_divides_nothing_evenly_does_not_drift() {
        let mut meter = meter(7);
        meter.take(7, Tick::ZERO);
        // A thousand looks in between, each settling the flow so far.
        for step in 1..=1000_u64 {
            meter.take(0, Tick::from_nanos(step * 59_999_999));
        }
        assert_eq!(meter.remaining(Tick::from_nanos(59_999_999_999)), 6);
        assert_eq!(meter.remaining(Tick::from_millis(60_000)), 7);
    }

    #[test]
    fn what_is_held_and_flew_off_is_not_charged_again() {
        let mut meter = meter(600);
        meter.take(500, Tick::ZERO);
        meter.settle(500, 500, Tick::from_millis(50_000));
        assert_eq!(meter.remaining(Tick::from_millis(50_000)), 600);
    }

    #[test]
    fn a_moment_behind_the_books_waits_for_them_too() {
        let mut meter = meter(60);
        meter.take(60, Tick::from_millis(1500));
        assert_eq!(meter.wait(1, Tick::from_millis(1500)), Some(1));
        assert_eq!(meter.wait(1, Tick::from_millis(1000)), Some(2), "500 ms behind, one second to flow");
        assert_eq!(meter.wait(1, Tick::from_millis(2500)), None);
    }

    #[test]
    fn a_moment_behind_the_books_lets_nothing_flow_twice() {
        let mut meter = meter(60);
        meter.take(60, Tick::from_millis(10_000));
        meter.take(0, Tick::from_millis(5_000));
        assert_eq!(meter.remaining(Tick::from_millis(10_000)), 0);
    }

    #[test]
    fn numbers_at_the_ends_saturate() {
        let mut slow = meter(1);
        for _ in 0..100 {
            slow.settle(0, u64::MAX, Tick::ZERO);
        }
        assert_eq!(slow.remaining(Tick::ZERO), 0);
        assert_eq!(slow.wait(u64::MAX, Tick::ZERO), Some(u64::MAX));
        assert_eq!(slow.until_full(Tick::ZERO), Duration::from_nanos(u64::MAX));
        slow.spent = u128::MAX;
        slow.settle(0, u64::MAX, Tick::from_nanos(u64::MAX));
        assert!(slow.wait(1, Tick::ZERO).is_some());
        let mut fast = meter(Rate::MOST);
        fast.take(Rate::MOST, Tick::ZERO);
        assert_eq!(fast.wait(Rate::MOST, Tick::ZERO), Some(60));
        assert_eq!(fast.remaining(Tick::from_nanos(u64::MAX)), Rate::MOST);
    }
}

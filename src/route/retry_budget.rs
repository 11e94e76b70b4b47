//! Retry budget of a pool: a share of its recent requests, and at least a small floor, so that a quiet pool
//! can still fail over and a broken one is not buried under
//! retries.

use crate::types::Tick;

use super::settings::Retries;

const SECONDS: usize = 11;

/// Requests and retries of the last ten seconds, in slots of one second.
///
/// Conservative at the edge of the window: requests are counted over at most ten seconds, retries over at
/// least ten, so that no ten seconds exceed the settings.
#[derive(Clone, Debug)]
pub struct RetryBudget {
    share: f64,
    floor: u32,
    second: u64,
    requests: [u32; SECONDS],
    retries: [u32; SECONDS],
}

impl RetryBudget {
    /// An unused budget.
    #[must_use]
    pub fn new(settings: &Retries) -> Self {
        let (share, floor) = (settings.share, settings.floor_per_10s);
        RetryBudget { share, floor, second: 0, requests: [0; SECONDS], retries: [0; SECONDS] }
    }

    /// Sets limits after a reload; the spent part is kept.
    pub fn apply_settings(&mut self, settings: &Retries) {
        (self.share, self.floor) = (settings.share, settings.floor_per_10s);
    }

    /// Records a request.
    pub fn request(&mut self, at: Tick) {
        let now = self.turn_to(at);
        self.requests[now] = self.requests[now].saturating_add(1);
    }

    /// Takes one retry, if any is left.
    #[must_use]
    pub fn draw(&mut self, at: Tick) -> bool {
        let now = self.turn_to(at);
        let oldest = (now + 1) % SECONDS;
        let sum = |counts: &[u32; SECONDS]| counts.iter().map(|&count| u64::from(count)).sum::<u64>();
        let requests = sum(&self.requests) - u64::from(self.requests[oldest]);
        let allowed = ((requests as f64 * self.share) as u64).max(u64::from(self.floor));
        let granted = sum(&self.retries) < allowed;
        self.retries[now] += u32::from(granted);
        granted
    }

    /// The slot of this second; slots of skipped seconds are cleared. An earlier moment counts in the current
    /// second.
    fn turn_to(&mut self, at: Tick) -> usize {
        let second = (at.as_nanos() / 1_000_000_000).max(self.second);
        let gone = (second - self.second).min(SECONDS as u64);
        for step in 1..=gone {
            let slot = ((self.second + step) % SECONDS as u64) as usize;
            (self.requests[slot], self.retries[slot]) = (0, 0);
        }
        if gone == SECONDS as u64 {
            (self.requests, self.retries) = ([0; SECONDS], [0; SECONDS]);
        }
        self.second = second;
        (second % SECONDS as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn budget() -> RetryBudget {
        RetryBudget::new(&Retries::default())
    }

    #[test]
    fn a_quiet_pool_may_retry_ten_times_in_ten_seconds() {
        let mut budget = budget();
        let at = Tick::from_millis(500);
        assert_eq!((0..20).filter(|_| budget.draw(at)).count(), 10);
        assert!(!budget.draw(at + Duration::from_secs(9)));
        assert!(budget.draw(at + Duration::from_secs(11)));
    }

    #[test]
    fn a_busy_pool_may_retry_a_fifth_of_its_requests() {
        let mut budget = budget();
        let at = Tick::from_millis(3_000);
        (0..1000).for_each(|_| budget.request(at));
        assert_eq!((0..1000).filter(|_| budget.draw(at)).count(), 200);
        assert_eq!((0..1000).filter(|_| budget.draw(at + Duration::from_secs(60))).count(), 10);
    }

    #[test]
    fn a_reload_does_not_refill_the_budget() {
        let mut budget = budget();
        let at = Tick::from_millis(1);
        while budget.draw(at) {}
        budget.apply_settings(&Retries { floor_per_10s: 12, ..Retries::default() });
        assert_eq!((0..20).filter(|_| budget.draw(at)).count(), 2);
    }

    proptest! {
        #[test]
        fn no_ten_seconds_ever_see_more_retries_than_allowed(
            steps in proptest::collection::vec((0u64..1500, any::<bool>()), 1..400),
            floor in 0u32..4,
        ) {
            let mut budget = RetryBudget::new(&Retries { floor_per_10s: floor, share: 0.2, ..Retries::default() });
            let (mut requests, mut granted) = (Vec::new(), Vec::new());
            let mut at = Tick::ZERO;
            for (pause, is_request) in steps {
                at = at + Duration::from_millis(pause);
                if is_request {
                    budget.request(at);
                    requests.push(at);
                } else if budget.draw(at) {
                    granted.push(at);
                    let recent = |all: &[Tick]| all.iter().filter(|&&t| at - t < Duration::from_secs(10)).count() as u64;
                    let allowed = (recent(&requests) / 5).max(u64::from(floor));
                    prop_assert!(recent(&granted) <= allowed, "{} granted, {} allowed", recent(&granted), allowed);
                }
            }
        }
    }
}

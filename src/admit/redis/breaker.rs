//! Circuit breaker of the store.

use std::time::Duration;

use crate::types::Tick;

/// Consecutive failures that open it.
const FAILURES: u32 = 3;
/// First and longest open time; doubled after each failed
/// trial.
const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(4);

/// State of the breaker. Unless closed, no request waits for the store, and trials are made beside the
/// requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreBreaker {
    /// Calls are made; counts failures since the last success.
    Closed { failures: u32 },
    /// No calls before `until`.
    Open { until: Tick, pause: Duration },
    /// A trial is in flight.
    Trying { pause: Duration },
}

impl StoreBreaker {
    /// Starts with a trial, because nothing is known of the store.
    pub fn new(at: Tick) -> Self {
        StoreBreaker::Open { until: at, pause: FIRST }
    }

    pub fn is_closed(self) -> bool {
        matches!(self, StoreBreaker::Closed { .. })
    }

    /// Records a call's result. True if it opened the breaker.
    pub fn call_ended(&mut self, is_good: bool, at: Tick) -> bool {
        let StoreBreaker::Closed { failures } = self else { return false };
        *failures = if is_good { 0 } else { *failures + 1 };
        let opens = *failures >= FAILURES;
        if opens {
            *self = StoreBreaker::Open { until: at + FIRST, pause: FIRST };
        }
        opens
    }

    /// The connection is lost: the next call is a trial on a new one, at once.
    pub fn connection_lost(&mut self, at: Tick) {
        *self = StoreBreaker::Open { until: at, pause: FIRST };
    }

    /// When the next trial is due, if one is.
    pub fn trial_at(self) -> Option<Tick> {
        match self {
            StoreBreaker::Open { until, .. } => Some(until),
            StoreBreaker::Closed { .. } | StoreBreaker::Trying { .. } => None,
        }
    }

    /// A trial starts.
    pub fn trial_begins(&mut self) {
        if let StoreBreaker::Open { pause, .. } = *self {
            *self = StoreBreaker::Trying { pause };
        }
    }

    /// Records a trial's result.
    pub fn trial_ended(&mut self, is_good: bool, at: Tick) {
        let StoreBreaker::Trying { pause } = *self else { return };
        let pause_after = (pause * 2).min(LONGEST);
        *self = if is_good {
            StoreBreaker::Closed { failures: 0 }
        } else {
            StoreBreaker::Open { until: at + pause, pause: pause_after }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Tick {
        Tick::from_millis(millis)
    }

    fn closed() -> StoreBreaker {
        let mut breaker = StoreBreaker::new(Tick::ZERO);
        breaker.trial_begins();
        breaker.trial_ended(true, Tick::ZERO);
        assert!(breaker.is_closed());
        breaker
    }

    #[test]
    fn it_opens_after_three_failures_in_a_row_and_not_after_three_in_all() {
        let mut breaker = closed();
        for _ in 0..5 {
            assert!(!breaker.call_ended(false, ms(1)));
            assert!(!breaker.call_ended(false, ms(1)));
            assert!(!breaker.call_ended(true, ms(1)));
        }
        assert!(!breaker.call_ended(false, ms(2)));
        assert!(!breaker.call_ended(false, ms(2)));
        assert!(breaker.call_ended(false, ms(2)), "the third");
        assert!(!breaker.call_ended(false, ms(3)), "a late one of before changes nothing");
        assert_eq!(breaker.trial_at(), Some(ms(252)));
    }

    #[test]
    fn trials_come_less_and_less_often_until_one_succeeds() {
        let mut breaker = closed();
        (0..3).for_each(|_| assert!(!breaker.call_ended(false, ms(0)) || breaker.trial_at().is_some()));
        let mut pauses = Vec::new();
        for _ in 0..7 {
            let due = breaker.trial_at().unwrap();
            breaker.trial_begins();
            assert_eq!(breaker.trial_at(), None, "one at a time");
            breaker.trial_ended(false, due);
            pauses.push(breaker.trial_at().unwrap().since(due).as_millis());
        }
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 4000, 4000]);
        breaker.trial_begins();
        breaker.trial_ended(true, ms(60_000));
        assert!(breaker.is_closed());
        (0..3).for_each(|_| assert!(!breaker.call_ended(false, ms(60_000)) || breaker.trial_at().is_some()));
        assert_eq!(breaker.trial_at(), Some(ms(60_250)), "and begins anew");
    }
}

//! Takes an engine out for a while after several faults, then lets one request try.

use super::settings::BreakerLimits;
use crate::units::Tick;

/// The circuit breaker of one engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Breaker {
    /// Takes traffic; remembers recent faults.
    #[default]
    Clear,
    /// Takes traffic; these faults are recent, oldest first.
    Marked(Vec<Tick>),
    /// Takes none before `until`.
    Open {
        /// When one request may try.
        until: Tick,
    },
    /// The time is over: the next request tries, alone.
    Ready,
    /// One request tries; its result decides.
    Trying,
}

impl Breaker {
    /// The engine had a fault.
    pub fn fault(&mut self, limits: &BreakerLimits, at: Tick) {
        let mut recent = match std::mem::take(self) {
            Breaker::Clear => Vec::new(),
            Breaker::Marked(faults) => faults,
            open @ Breaker::Open { .. } => {
                *self = open;
                return;
            }
            Breaker::Ready | Breaker::Trying => {
                *self = Breaker::Open { until: at + limits.open };
                return;
            }
        };
        recent.retain(|&fault| at - fault < limits.within);
        recent.push(at);
        *self = if recent.len() >= limits.faults.max(1) as usize {
            Breaker::Open { until: at + limits.open }
        } else {
            Breaker::Marked(recent)
        };
    }

    /// The engine answered well: a try that succeeds closes the breaker. True where it did.
    pub fn well(&mut self) -> bool {
        let closes = matches!(self, Breaker::Trying | Breaker::Ready);
        if closes {
            *self = Breaker::Clear;
        }
        closes
    }

    /// Whether a request may go to this engine now. Turns an open breaker whose time is over
    /// into one that is ready to try.
    pub fn may_take(&mut self, at: Tick) -> bool {
        if matches!(self, Breaker::Open { until } if *until <= at) {
            *self = Breaker::Ready;
        }
        !matches!(self, Breaker::Open { .. } | Breaker::Trying)
    }

    /// A request goes to this engine. True if it is the one that tries.
    pub fn begin(&mut self) -> bool {
        let tries = matches!(self, Breaker::Ready);
        if tries {
            *self = Breaker::Trying;
        }
        tries
    }

    /// The request that tried ended without a result (its client left, the engine pushed
    /// back): another may try.
    pub fn inconclusive(&mut self) {
        if matches!(self, Breaker::Trying) {
            *self = Breaker::Ready;
        }
    }

    /// A health check saw the engine come back: no need to wait the time out.
    pub fn may_try_now(&mut self) {
        if matches!(self, Breaker::Open { .. }) {
            *self = Breaker::Ready;
        }
    }

    /// Whether it takes none: open, or one request tries.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self, Breaker::Open { .. } | Breaker::Trying)
    }

    /// Whether one request tries.
    #[must_use]
    pub fn is_trying(&self) -> bool {
        matches!(self, Breaker::Trying)
    }

    /// When an open breaker lets the next request try.
    #[must_use]
    pub fn opens_until(&self) -> Option<Tick> {
        match self {
            Breaker::Open { until } => Some(*until),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const LIMITS: BreakerLimits =
        BreakerLimits { faults: 3, within: Duration::from_secs(10), open: Duration::from_secs(5) };

    fn ms(millis: u64) -> Tick {
        Tick::from_millis(millis)
    }

    #[test]
    fn enough_faults_close_together_open_it() {
        let mut breaker = Breaker::default();
        breaker.fault(&LIMITS, ms(0));
        breaker.fault(&LIMITS, ms(4_000));
        assert!(breaker.may_take(ms(4_000)));
        breaker.fault(&LIMITS, ms(9_999));
        assert!(!breaker.may_take(ms(9_999)));
        assert_eq!(breaker.opens_until(), Some(ms(14_999)));
    }

    #[test]
    fn faults_far_apart_never_open_it() {
        let mut breaker = Breaker::default();
        for second in 0..100 {
            breaker.fault(&LIMITS, ms(second * 5_000));
            assert!(breaker.may_take(ms(second * 5_000)));
        }
    }

    #[test]
    fn one_request_tries_and_decides() {
        let mut breaker = Breaker::Open { until: ms(100) };
        assert!(!breaker.may_take(ms(99)));
        assert!(breaker.may_take(ms(100)));
        assert!(breaker.begin());
        assert!(!breaker.may_take(ms(200)), "only one");
        let mut failed = breaker.clone();
        failed.fault(&LIMITS, ms(200));
        assert_eq!(failed, Breaker::Open { until: ms(5_200) });
        breaker.well();
        assert_eq!(breaker, Breaker::Clear);
    }

    #[test]
    fn a_try_whose_client_left_lets_another_try() {
        let mut breaker = Breaker::Trying;
        breaker.inconclusive();
        assert!(breaker.may_take(ms(0)));
        assert!(breaker.begin());
    }
}

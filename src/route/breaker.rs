//! Takes an engine out for a while after several faults, then lets one request try.
//!
//! Faults that one tenant's requests met alone do not open it while the engine answers another
//! tenant well: what a tenant can bring about by what it sends is no proof against the engine.
//! Where only one tenant uses an engine (or nobody has keys), its faults are all there is, and
//! they count.

use std::time::Duration;

use super::settings::BreakerLimits;
use crate::units::Tick;

/// A tenant, as far as a breaker tells them apart: a hash of its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TenantKey(pub u64);

/// A fault, and whose request met it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    at: Tick,
    tenant: TenantKey,
}

/// Who was answered well last: the last two tenants, each with its last good answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answered([Option<(TenantKey, Tick)>; 2]);

impl Answered {
    /// A tenant was answered well.
    pub fn note(&mut self, tenant: TenantKey, at: Tick) {
        if self.0[0].is_some_and(|(last, _)| last != tenant) {
            self.0[1] = self.0[0];
        }
        self.0[0] = Some((tenant, at));
    }

    /// Whether another tenant than this one was, within this time.
    fn another_within(&self, tenant: TenantKey, length: Duration, at: Tick) -> bool {
        self.0.iter().flatten().any(|&(other, when)| other != tenant && at.since(when) < length)
    }

    /// The last good answer to anybody.
    #[must_use]
    pub fn last(&self) -> Option<Tick> {
        self.0[0].map(|(_, at)| at)
    }
}

/// The circuit breaker of one engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Breaker {
    /// Takes traffic; remembers recent faults.
    #[default]
    Clear,
    /// Takes traffic; these faults are recent, oldest first.
    Marked(Vec<Fault>),
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
    /// The engine had a fault at a request of this tenant. `answered`: whom it answered well lately.
    pub fn fault(&mut self, limits: &BreakerLimits, tenant: TenantKey, answered: &Answered, at: Tick) {
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
        recent.retain(|fault| at - fault.at < limits.within);
        recent.push(Fault { at, tenant });
        let most = limits.faults.max(1) as usize;
        *self = if recent.len() >= most && !is_one_tenants_doing(&recent, answered, limits.within, at) {
            Breaker::Open { until: at + limits.open }
        } else {
            // More say no more.
            recent.drain(..recent.len().saturating_sub(most));
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

/// Whether all of these faults are of one tenant, and another one was answered well meanwhile.
fn is_one_tenants_doing(faults: &[Fault], answered: &Answered, within: Duration, at: Tick) -> bool {
    let Some(Fault { tenant, .. }) = faults.first().copied() else { return false };
    faults.iter().all(|fault| fault.tenant == tenant) && answered.another_within(tenant, within, at)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: BreakerLimits =
        BreakerLimits { faults: 3, within: Duration::from_secs(10), open: Duration::from_secs(5) };

    fn ms(millis: u64) -> Tick {
        Tick::from_millis(millis)
    }

    const ONE: TenantKey = TenantKey(1);
    const OTHER: TenantKey = TenantKey(2);

    fn fault(breaker: &mut Breaker, at: Tick) {
        breaker.fault(&LIMITS, ONE, &Answered::default(), at);
    }

    #[test]
    fn one_tenants_faults_open_nothing_while_another_is_answered_well() {
        let (mut breaker, mut answered) = (Breaker::default(), Answered::default());
        for second in 0..60 {
            let at = ms(second * 1_000);
            answered.note(OTHER, at);
            answered.note(ONE, at);
            breaker.fault(&LIMITS, ONE, &answered, at);
            assert!(breaker.may_take(at), "at {second} s");
        }
        assert!(matches!(&breaker, Breaker::Marked(faults) if faults.len() == 3), "and nothing piles up");
        let mut met_by_both = breaker.clone();
        met_by_both.fault(&LIMITS, OTHER, &answered, ms(59_500));
        assert!(!met_by_both.may_take(ms(59_500)), "what two of them meet is the engine's");
        breaker.fault(&LIMITS, ONE, &answered, ms(69_900));
        breaker.fault(&LIMITS, ONE, &answered, ms(69_950));
        breaker.fault(&LIMITS, ONE, &answered, ms(69_960));
        assert!(!breaker.may_take(ms(69_960)), "the other one has had no good answer for ten seconds");
    }

    #[test]
    fn enough_faults_close_together_open_it() {
        let mut breaker = Breaker::default();
        fault(&mut breaker, ms(0));
        fault(&mut breaker, ms(4_000));
        assert!(breaker.may_take(ms(4_000)));
        fault(&mut breaker, ms(9_999));
        assert!(!breaker.may_take(ms(9_999)));
        assert_eq!(breaker.opens_until(), Some(ms(14_999)));
    }

    #[test]
    fn faults_far_apart_never_open_it() {
        let mut breaker = Breaker::default();
        for second in 0..100 {
            fault(&mut breaker, ms(second * 5_000));
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
        fault(&mut failed, ms(200));
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

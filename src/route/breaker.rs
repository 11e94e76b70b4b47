//! Circuit breaker: takes an engine out for a while after several faults, then admits one trial request.
//!
//! Faults met by one tenant's requests alone do not open it while the engine serves another tenant well,
//! because a tenant may cause them by what it sends. If only one tenant uses an engine (or nobody has
//! keys), its faults are the only evidence and count.

use std::time::Duration;

use super::settings::BreakerLimits;
use crate::types::Tick;

/// Hash of a tenant's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TenantKey(pub u64);

/// A fault, and the tenant whose request met it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineFault {
    at: Tick,
    tenant: TenantKey,
}

/// Recent successes: the last two tenants, each with its last successful response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecentSuccesses([Option<(TenantKey, Tick)>; 2]);

impl RecentSuccesses {
    /// Records a successful response.
    pub fn note(&mut self, tenant: TenantKey, at: Tick) {
        if self.0[0].is_some_and(|(last, _)| last != tenant) {
            self.0[1] = self.0[0];
        }
        self.0[0] = Some((tenant, at));
    }

    /// Whether another tenant had one within this time.
    fn another_within(&self, tenant: TenantKey, length: Duration, at: Tick) -> bool {
        self.0.iter().flatten().any(|&(other, when)| other != tenant && at.since(when) < length)
    }

    /// The last successful response of any tenant.
    #[must_use]
    pub fn last(&self) -> Option<Tick> {
        self.0[0].map(|(_, at)| at)
    }
}

/// State of one engine's breaker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Breaker {
    /// Closed, without recent faults.
    #[default]
    Clear,
    /// Closed, with these recent faults, oldest first.
    Marked(Vec<EngineFault>),
    /// Open: takes no request before `until`.
    Open {
        /// When a trial may start.
        until: Tick,
    },
    /// The open time is over: the next request is the trial.
    Ready,
    /// A trial is in flight; its result decides.
    Trying,
}

impl Breaker {
    /// Records a fault of this tenant's request. `answered`: recent successes of the engine.
    pub fn fault(&mut self, limits: &BreakerLimits, tenant: TenantKey, answered: &RecentSuccesses, at: Tick) {
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
        recent.push(EngineFault { at, tenant });
        let most = limits.faults.max(1) as usize;
        *self = if recent.len() >= most && !is_one_tenants_doing(&recent, answered, limits.within, at) {
            Breaker::Open { until: at + limits.open }
        } else {
            // Further faults carry no more information.
            recent.drain(..recent.len().saturating_sub(most));
            Breaker::Marked(recent)
        };
    }

    /// Records a success: closes the breaker after a trial. True if it did.
    pub fn well(&mut self) -> bool {
        let closes = matches!(self, Breaker::Trying | Breaker::Ready);
        if closes {
            *self = Breaker::Clear;
        }
        closes
    }

    /// Whether a request may be sent now. An open breaker whose time is over becomes ready for a
    /// trial.
    pub fn may_take(&mut self, at: Tick) -> bool {
        if matches!(self, Breaker::Open { until } if *until <= at) {
            *self = Breaker::Ready;
        }
        !matches!(self, Breaker::Open { .. } | Breaker::Trying)
    }

    /// A request is sent. True if it is the trial.
    pub fn begin(&mut self) -> bool {
        let tries = matches!(self, Breaker::Ready);
        if tries {
            *self = Breaker::Trying;
        }
        tries
    }

    /// The trial ended without evidence (its client left, the engine pushed back): another one may
    /// start.
    pub fn inconclusive(&mut self) {
        if matches!(self, Breaker::Trying) {
            *self = Breaker::Ready;
        }
    }

    /// A health check saw the engine come back, so the open time ends.
    pub fn may_try_now(&mut self) {
        if matches!(self, Breaker::Open { .. }) {
            *self = Breaker::Ready;
        }
    }

    /// Whether it takes no request: open, or with a trial in flight.
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self, Breaker::Open { .. } | Breaker::Trying)
    }

    /// Whether a trial is in flight.
    #[must_use]
    pub fn is_trying(&self) -> bool {
        matches!(self, Breaker::Trying)
    }

    /// When an open breaker admits a trial.
    #[must_use]
    pub fn opens_until(&self) -> Option<Tick> {
        match self {
            Breaker::Open { until } => Some(*until),
            _ => None,
        }
    }
}

/// Whether all of these faults are one tenant's while another was served well.
fn is_one_tenants_doing(faults: &[EngineFault], answered: &RecentSuccesses, within: Duration, at: Tick) -> bool {
    let Some(EngineFault { tenant, .. }) = faults.first().copied() else { return false };
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
        breaker.fault(&LIMITS, ONE, &RecentSuccesses::default(), at);
    }

    #[test]
    fn one_tenants_faults_open_nothing_while_another_is_answered_well() {
        let (mut breaker, mut answered) = (Breaker::default(), RecentSuccesses::default());
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

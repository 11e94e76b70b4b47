//! Usual demand of tenants: a tenant whose demand rises suddenly queues behind the others.
//!
//! A tenant's usual rate, in expected tokens per second and per priority, is an exponential mean over
//! [`MEMORY`]. A tenant is not restricted while it demands less than [`SUDDEN`] times as much, or more
//! in a burst (a token bucket): a limit of 1.2 times the usual rate at any time cost
//! tenants without a flood up to 3 points of attainment. A tenant that empties the bucket *floods*
//! until it has refilled by a third: then [`GROWTH`] times its usual rate is served normally, and the rest
//! behind all others while there is room. A flood thus uses only capacity that
//! others leave, however well its single requests could be met.
//!
//! Service beyond the usual rate before the detection is an advance: its tenant is served behind all
//! others until its usual rate has repaid it. Others with time, such as batch, thus recover what a flood
//! took from them, and detection may be slow enough to spare ordinary bursts. With a bucket half as deep
//! and no repayment, bursts of a mix without floods cost 3 % of its goodput at load 0.8, and a threefold
//! flood cost one tenant 13 points.
//!
//! It also changes the usual rate only slowly: the rate of a tenant whose demand stays higher grows by its
//! entitlement, twofold in 70 minutes, also before the flood is detected. If the demand of the other tenants
//! together grows, it may grow as much.
//!
//! No tenant is restricted in the first half minute, while no usual rate is known, or where there are no
//! others to protect. An unknown tenant starts with a small part of the total.

use std::collections::HashMap;
use std::time::Duration;

use crate::types::{Priority, TenantId, Tick};

/// Time constant of the usual rate, seconds.
const MEMORY: u64 = 300;
/// Time constant of the recent rate of all tenants, seconds.
const LATELY: u64 = 60;
/// Multiple of the usual rate that is not unusual.
const SUDDEN: f64 = 2.0;
/// Seconds of that rate allowed in a burst.
const BURST: f64 = 12.0;
/// Additional burst: this many standard deviations of the random demand in this many seconds, for
/// independent arrivals of varying size. The variance is rate x seconds x size-weighted mean size (a
/// compound Poisson process). Without it a tenant with few large requests would look like a flood every
/// other minute.
const BY_CHANCE: (f64, f64) = (3.0, 60.0);
/// Part of the bucket that must have refilled to end a flood.
const OVER: f64 = 0.3;
/// Multiple of the usual rate served normally during a flood, so that the usual rate can grow.
const GROWTH: f64 = 1.05;
/// Seconds of the usual rate served normally at once during a flood.
const HELD: f64 = 2.0;
/// Limit of learning: multiple of the usual rate, plus this many requests at once. Otherwise a flood would
/// be learned before it is detected.
const LEARNED: (f64, f64) = (1.1, 4.0);
/// Decay of the size sums per request.
const FADE: f64 = 0.98;
/// Part of the total allowed to a new tenant.
const NEWCOMER: f64 = 0.05;
/// Variation of the others' demand that is not growth.
const BY_THEMSELVES: f64 = 1.4;
/// Largest growth allowed to a tenant because the others grow.
const MOST_GROWTH: f64 = 10.0;
/// Time before any rate is usual.
const LEARNING: Duration = Duration::from_secs(30);
/// Part of the total demand from which others are protected.
const OTHERS: f64 = 0.05;
/// Most tenants tracked; further ones are treated as new.
const TENANTS: usize = 8192;

/// Usual demand of one pool's tenants.
#[derive(Clone, Debug, Default)]
pub(super) struct SurgeDetector {
    since: Option<Tick>,
    tenants: HashMap<TenantId, TenantUsage>,
    all: DecayingSum,
    /// Recent demand of all tenants, within or not.
    lately: DecayingSum<LATELY>,
}

#[derive(Clone, Debug, Default)]
struct TenantUsage {
    all: DecayingSum,
    lately: DecayingSum<LATELY>,
    of: [PriorityUsage; Priority::ALL.len()],
}

#[derive(Clone, Copy, Debug, Default)]
struct PriorityUsage {
    usual: DecayingSum,
    /// Tokens left before a flood is detected; negative by the excess.
    credit: f64,
    floods: bool,
    /// During a flood: tokens still served normally; negative until the advance is repaid.
    held: f64,
    /// Tokens served normally beyond the usual rate.
    advance: f64,
    /// Tokens that may still be learned.
    learned: f64,
    /// Decaying sums of sizes and of their squares.
    sizes: (f64, f64),
    at: Option<Tick>,
}

/// Classification of a request against its tenant's usual demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SurgeVerdict {
    is_usual: bool,
    /// Whether it counts in the usual rate.
    teaches: bool,
}

/// Exponentially decaying sum of tokens.
#[derive(Clone, Copy, Debug, Default)]
struct DecayingSum<const SECONDS: u64 = MEMORY> {
    tokens: f64,
    at: Tick,
}

impl<const SECONDS: u64> DecayingSum<SECONDS> {
    fn note(&mut self, tokens: f64, at: Tick) {
        self.tokens = self.now(at) + tokens;
        self.at = self.at.max(at);
    }

    fn now(&self, at: Tick) -> f64 {
        self.tokens * (-at.since(self.at).as_secs_f64() / SECONDS as f64).exp()
    }

    /// Tokens per second, for a mean of this age.
    fn rate(&self, age: f64, at: Tick) -> f64 {
        let memory = SECONDS as f64;
        self.now(at) / (memory * (1.0 - (-age / memory).exp())).max(1.0)
    }
}

impl SurgeDetector {
    /// Whether a request would be within its tenant's usual demand; counts nothing.
    pub fn would_take(&self, tenant: &TenantId, priority: Priority, tokens: u64, at: Tick) -> bool {
        let age = self.since.map_or(Duration::ZERO, |since| at.since(since));
        let seconds = age.as_secs_f64().max(1.0);
        let whole = self.all.rate(seconds, at);
        let known = self.tenants.get(tenant);
        let others = whole - known.map_or(0.0, |known| known.all.rate(seconds, at));
        let lately = self.lately.rate(seconds, at) - known.map_or(0.0, |known| known.lately.rate(seconds, at));
        let growth = growth(lately, others);
        let mut share = known.map_or(PriorityUsage::default(), |known| known.of[priority as usize]);
        let asked = share.asks(tokens as f64, growth, seconds, whole, at);
        asked.is_usual || age < LEARNING || others < OTHERS * whole
    }

    /// Whether a request is within its tenant's usual demand; counts it if so.
    pub fn takes(&mut self, tenant: &TenantId, priority: Priority, tokens: u64, at: Tick) -> bool {
        let since = *self.since.get_or_insert(at);
        let (age, cost) = (at.since(since), tokens as f64);
        let seconds = age.as_secs_f64().max(1.0);
        let whole = self.all.rate(seconds, at);
        if self.tenants.len() >= TENANTS && !self.tenants.contains_key(tenant) {
            self.forget(at);
        }
        let known = self.tenants.entry(tenant.clone()).or_default();
        let others = whole - known.all.rate(seconds, at);
        let lately = self.lately.rate(seconds, at) - known.lately.rate(seconds, at);
        let growth = growth(lately, others);
        known.lately.note(cost, at);
        self.lately.note(cost, at);
        let asked = known.of[priority as usize].asks(cost, growth, seconds, whole, at);
        let is_free = age < LEARNING || others < OTHERS * whole;
        if asked.teaches || is_free {
            known.of[priority as usize].usual.note(cost, at);
            known.all.note(cost, at);
            self.all.note(cost, at);
        }
        asked.is_usual || is_free
    }

    /// Forgets the half of the tenants with the lowest recent demand.
    fn forget(&mut self, at: Tick) {
        let mut sums: Vec<f64> = self.tenants.values().map(|tenant| tenant.all.now(at)).collect();
        let middle = sums.len() / 2;
        let median = *sums.select_nth_unstable_by(middle, f64::total_cmp).1;
        self.tenants.retain(|_, tenant| tenant.all.now(at) > median);
    }
}

/// Growth of the others' demand relative to usual.
fn growth(lately: f64, usual: f64) -> f64 {
    (lately / usual.max(1e-9) / BY_THEMSELVES).clamp(1.0, MOST_GROWTH)
}

impl PriorityUsage {
    fn asks(&mut self, cost: f64, growth: f64, age: f64, whole: f64, at: Tick) -> SurgeVerdict {
        let usual = (growth * self.usual.rate(age, at)).max(NEWCOMER * whole);
        let passed = self.at.replace(at).map_or(f64::INFINITY, |before| at.since(before).as_secs_f64());
        self.sizes = (FADE * self.sizes.0 + cost, FADE * self.sizes.1 + cost * cost);
        let typical = self.sizes.1 / self.sizes.0.max(1.0);
        let filled = |bucket: f64, rate: f64, depth: f64| (bucket + rate * passed).min(depth);
        self.held = filled(self.held, GROWTH * usual, HELD * usual + typical);
        self.learned = filled(self.learned, LEARNED.0 * usual, LEARNED.1 * typical);
        self.advance = (self.advance - usual * passed).max(0.0);
        self.detect(cost, SUDDEN * usual, typical, passed);
        let is_usual = !self.floods || take(&mut self.held, cost);
        self.advance += if is_usual { cost } else { 0.0 };
        SurgeVerdict { is_usual, teaches: is_usual && take(&mut self.learned, cost) }
    }

    /// Updates flood detection; demand counts whether it is served or not.
    fn detect(&mut self, cost: f64, rate: f64, typical: f64, passed: f64) {
        let depth = BURST * rate + BY_CHANCE.0 * (rate * BY_CHANCE.1 * typical).sqrt();
        let before = (self.credit + rate * passed).min(depth);
        self.credit = (before - cost).max(-depth);
        if before <= 0.0 && !self.floods {
            (self.floods, self.held) = (true, -self.advance);
        } else if self.credit > OVER * depth {
            self.floods = false;
        }
    }
}

/// Takes the cost from a bucket that is not empty.
fn take(bucket: &mut f64, cost: f64) -> bool {
    let takes = *bucket > 0.0;
    if takes {
        *bucket -= cost;
    }
    takes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks for `rate` requests of a hundred tokens per second for this many seconds; returns the share
    /// within usual demand.
    fn asks(shares: &mut SurgeDetector, tenant: &str, from: u64, seconds: u64, rate: u64) -> f64 {
        let tenant = TenantId::from(tenant);
        let within = (0..seconds * rate).filter(|n| {
            let at = Tick::from_millis(from * 1000 + n * 1000 / rate);
            shares.takes(&tenant, Priority::Normal, 100, at)
        });
        within.count() as f64 / (seconds * rate) as f64
    }

    #[test]
    fn a_tenant_that_asks_for_as_much_as_ever_is_within_and_a_flood_is_not() {
        for times in [3, 30] {
            let mut shares = SurgeDetector::default();
            for minute in 0..10 {
                assert!(asks(&mut shares, "steady", 60 * minute, 60, 10) > 0.999);
                assert!(asks(&mut shares, "sudden", 60 * minute, 60, 10) > 0.999);
            }
            let flood = asks(&mut shares, "sudden", 600, 120, 10 * times);
            assert!(flood < 1.7 / times as f64, "{times}: {flood}");
            assert!(asks(&mut shares, "steady", 600, 120, 10) > 0.999);
        }
    }

    #[test]
    fn what_a_flood_had_before_it_was_detected_is_made_up_for() {
        for times in [3, 30] {
            let mut shares = SurgeDetector::default();
            for minute in 0..10 {
                asks(&mut shares, "steady", 60 * minute, 60, 10);
                asks(&mut shares, "sudden", 60 * minute, 60, 10);
            }
            // Three minutes of its usual rate are 1,800 requests; detection alone takes half a minute of thrice that.
            let had = asks(&mut shares, "sudden", 600, 180, 10 * times) * 1800.0 * times as f64;
            assert!((1_500.0..1_900.0).contains(&had), "{times}: {had}");
        }
    }

    #[test]
    fn a_burst_is_no_flood() {
        let mut shares = SurgeDetector::default();
        asks(&mut shares, "others", 0, 600, 20);
        asks(&mut shares, "bursts", 0, 600, 4);
        for burst in 0..10 {
            assert!(asks(&mut shares, "bursts", 600 + 16 * burst, 4, 10) > 0.999);
            assert!(asks(&mut shares, "bursts", 604 + 16 * burst, 12, 2) > 0.999);
        }
    }

    #[test]
    fn alone_and_at_first_nobody_is_held_to_anything() {
        let mut shares = SurgeDetector::default();
        assert!(asks(&mut shares, "only", 0, 300, 1) > 0.999);
        assert!(asks(&mut shares, "only", 300, 60, 50) > 0.999);
        let mut shares = SurgeDetector::default();
        assert!(asks(&mut shares, "a", 0, 29, 1) > 0.999 && asks(&mut shares, "b", 0, 29, 50) > 0.999);
    }

    #[test]
    fn a_newcomer_begins_with_a_part_of_the_whole_and_grows_into_more() {
        let mut shares = SurgeDetector::default();
        asks(&mut shares, "others", 0, 600, 10);
        let early = asks(&mut shares, "new", 600, 60, 5);
        assert!((0.05..0.5).contains(&early), "{early}");
        let mut late = 0.0;
        for minute in 0..360 {
            asks(&mut shares, "others", 660 + 60 * minute, 60, 10);
            late = asks(&mut shares, "new", 660 + 60 * minute, 60, 5);
        }
        assert!(late > 0.9, "after six hours: {late}");
    }

    #[test]
    fn what_is_remembered_has_a_bound() {
        let mut shares = SurgeDetector::default();
        for n in 0..3 * TENANTS as u64 {
            let _ = shares.takes(&TenantId::from(format!("t{n}").as_str()), Priority::Low, 10, Tick::from_millis(n));
        }
        assert!(shares.tenants.len() <= TENANTS);
    }
}

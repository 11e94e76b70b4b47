//! What tenants usually ask for: whoever suddenly asks for much more goes behind those who do not.
//!
//! A tenant's usual rate, in tokens of expected work per second and for each priority, is an
//! exponential mean over [`MEMORY`]. Nobody is held to it who asks for less than [`SUDDEN`] times as much,
//! or for more in a burst (a token bucket), because whom that hits has done nothing unusual: held to 1.2 times
//! their usual rates at any time, tenants without any flood lost up to three promises of a hundred. Whoever
//! empties the bucket *floods*, until it has filled again by a third: then [`GROWTH`] times its usual rate is
//! served as ever, and the rest behind everybody else while there is room. So a flood, however well its single
//! requests could be met, takes from others only what they leave.
//!
//! It teaches little either: the usual rate of a tenant that keeps asking for more grows by what it is
//! entitled to, twofold in 70 minutes, and by no more, also before it is found to flood. If the others together
//! ask for more than usual, so may it.
//!
//! Nobody is held to a usual rate in the first half minute, when none is known, and where there are no other
//! tenants to protect. A tenant that was never seen before begins with a small part of the whole.

use std::collections::HashMap;
use std::time::Duration;

use crate::units::{Priority, TenantId, Tick};

/// The time over which a rate is usual.
const MEMORY: u64 = 300;
/// The seconds over which is looked whether all tenants ask for more.
const LATELY: u64 = 60;
/// Up to so many times its usual rate a tenant asks for nothing unusual.
const SUDDEN: f64 = 1.5;
/// Seconds of that which it may ask for at once.
const BURST: f64 = 8.0;
/// And so many standard deviations of what it asks for by chance in so many seconds, where requests come
/// independently of each other and differ in size: the variance of that is rate x seconds x the mean size
/// weighed by size (a compound Poisson process). Without this a tenant of few and large requests would
/// look like a flood every other minute.
const BY_CHANCE: (f64, f64) = (3.0, 60.0);
/// The part of its bucket that is full again when a flood is over.
const OVER: f64 = 0.3;
/// What is served as ever of a flood, in usual rates: so what is usual can grow.
const GROWTH: f64 = 1.05;
/// Seconds of the usual rate that a flood is served at once as ever.
const HELD: f64 = 2.0;
/// How fast what is usual learns at most, in usual rates, beside so many requests at once: else it would learn
/// a flood before it is found to be one.
const LEARNED: (f64, f64) = (1.1, 4.0);
/// What a request leaves of the sums of those before it.
const FADE: f64 = 0.98;
/// The part of all that a new tenant may ask for.
const NEWCOMER: f64 = 0.05;
/// Others vary by as much without growing.
const BY_THEMSELVES: f64 = 1.4;
/// If all others ask for more, a tenant may too: at most so many times.
const MOST_GROWTH: f64 = 10.0;
/// Nothing is usual before.
const LEARNING: Duration = Duration::from_secs(30);
/// Others are protected if they ask for this part of all.
const OTHERS: f64 = 0.05;
/// More tenants than this are not told apart from new ones.
const TENANTS: usize = 8192;

/// What the tenants of one pool usually ask for.
#[derive(Clone, Debug, Default)]
pub(super) struct UsualShares {
    since: Option<Tick>,
    tenants: HashMap<TenantId, Tenant>,
    all: Mean,
    /// What was asked for lately, within or not.
    lately: Mean<LATELY>,
}

#[derive(Clone, Debug, Default)]
struct Tenant {
    all: Mean,
    lately: Mean<LATELY>,
    of: [Share; Priority::ALL.len()],
}

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    usual: Mean,
    /// Tokens that it may still ask for before that is a flood; below zero as far as it went beyond.
    credit: f64,
    floods: bool,
    /// Of a flood, tokens that are served as ever.
    held: f64,
    /// Tokens that what is usual may still learn.
    learned: f64,
    /// Sums of sizes and of their squares, which fade with each request.
    sizes: (f64, f64),
    at: Option<Tick>,
}

/// What a request is, beside what its tenant usually asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    is_usual: bool,
    /// It counts in what is usual.
    teaches: bool,
}

/// A sum of tokens that decays over so many seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Mean<const SECONDS: u64 = MEMORY> {
    tokens: f64,
    at: Tick,
}

impl<const SECONDS: u64> Mean<SECONDS> {
    fn note(&mut self, tokens: f64, at: Tick) {
        self.tokens = self.now(at) + tokens;
        self.at = self.at.max(at);
    }

    fn now(&self, at: Tick) -> f64 {
        self.tokens * (-at.since(self.at).as_secs_f64() / SECONDS as f64).exp()
    }

    /// Tokens per second, of a mean that began so long ago.
    fn rate(&self, age: f64, at: Tick) -> f64 {
        let memory = SECONDS as f64;
        self.now(at) / (memory * (1.0 - (-age / memory).exp())).max(1.0)
    }
}

impl UsualShares {
    /// Whether a request would be within what its tenant usually asks for; nothing is counted.
    pub fn would_take(&self, tenant: &TenantId, rank: Priority, tokens: u64, at: Tick) -> bool {
        let age = self.since.map_or(Duration::ZERO, |since| at.since(since));
        let seconds = age.as_secs_f64().max(1.0);
        let whole = self.all.rate(seconds, at);
        let known = self.tenants.get(tenant);
        let others = whole - known.map_or(0.0, |known| known.all.rate(seconds, at));
        let lately = self.lately.rate(seconds, at) - known.map_or(0.0, |known| known.lately.rate(seconds, at));
        let growth = growth(lately, others);
        let mut share = known.map_or(Share::default(), |known| known.of[rank as usize]);
        let asked = share.asks(tokens as f64, growth, seconds, whole, at);
        asked.is_usual || age < LEARNING || others < OTHERS * whole
    }

    /// Whether a request is within what its tenant usually asks for; counts it if so.
    pub fn takes(&mut self, tenant: &TenantId, rank: Priority, tokens: u64, at: Tick) -> bool {
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
        let asked = known.of[rank as usize].asks(cost, growth, seconds, whole, at);
        let is_free = age < LEARNING || others < OTHERS * whole;
        if asked.teaches || is_free {
            known.of[rank as usize].usual.note(cost, at);
            known.all.note(cost, at);
            self.all.note(cost, at);
        }
        asked.is_usual || is_free
    }

    /// Forgets the half of the tenants that asked for least lately.
    fn forget(&mut self, at: Tick) {
        let mut sums: Vec<f64> = self.tenants.values().map(|tenant| tenant.all.now(at)).collect();
        let middle = sums.len() / 2;
        let median = *sums.select_nth_unstable_by(middle, f64::total_cmp).1;
        self.tenants.retain(|_, tenant| tenant.all.now(at) > median);
    }
}

/// How many times as much as usual the others ask for.
fn growth(lately: f64, usual: f64) -> f64 {
    (lately / usual.max(1e-9) / BY_THEMSELVES).clamp(1.0, MOST_GROWTH)
}

impl Share {
    fn asks(&mut self, cost: f64, growth: f64, age: f64, whole: f64, at: Tick) -> Asked {
        let usual = (growth * self.usual.rate(age, at)).max(NEWCOMER * whole);
        let passed = self.at.replace(at).map_or(f64::INFINITY, |before| at.since(before).as_secs_f64());
        self.sizes = (FADE * self.sizes.0 + cost, FADE * self.sizes.1 + cost * cost);
        let typical = self.sizes.1 / self.sizes.0.max(1.0);
        let filled = |bucket: f64, rate: f64, depth: f64| (bucket + rate * passed).min(depth);
        self.held = filled(self.held, GROWTH * usual, HELD * usual + typical);
        self.learned = filled(self.learned, LEARNED.0 * usual, LEARNED.1 * typical);
        self.detect(cost, SUDDEN * usual, typical, passed);
        let is_usual = !self.floods || take(&mut self.held, cost);
        Asked { is_usual, teaches: is_usual && take(&mut self.learned, cost) }
    }

    /// Whether it floods: what it asks for is counted whether it is served or not.
    fn detect(&mut self, cost: f64, rate: f64, typical: f64, passed: f64) {
        let depth = BURST * rate + BY_CHANCE.0 * (rate * BY_CHANCE.1 * typical).sqrt();
        let before = (self.credit + rate * passed).min(depth);
        self.credit = (before - cost).max(-depth);
        if before <= 0.0 && !self.floods {
            (self.floods, self.held) = (true, 0.0);
        } else if self.credit > OVER * depth {
            self.floods = false;
        }
    }
}

/// Takes the cost of a request from a bucket that holds something.
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

    /// Asks for `rate` requests of a hundred tokens per second for so many seconds; the share that was
    /// within.
    fn asks(shares: &mut UsualShares, tenant: &str, from: u64, seconds: u64, rate: u64) -> f64 {
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
            let mut shares = UsualShares::default();
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
    fn a_burst_is_no_flood() {
        let mut shares = UsualShares::default();
        asks(&mut shares, "others", 0, 600, 20);
        asks(&mut shares, "bursts", 0, 600, 4);
        for burst in 0..10 {
            assert!(asks(&mut shares, "bursts", 600 + 16 * burst, 4, 10) > 0.999);
            assert!(asks(&mut shares, "bursts", 604 + 16 * burst, 12, 2) > 0.999);
        }
    }

    #[test]
    fn alone_and_at_first_nobody_is_held_to_anything() {
        let mut shares = UsualShares::default();
        assert!(asks(&mut shares, "only", 0, 300, 1) > 0.999);
        assert!(asks(&mut shares, "only", 300, 60, 50) > 0.999);
        let mut shares = UsualShares::default();
        assert!(asks(&mut shares, "a", 0, 29, 1) > 0.999 && asks(&mut shares, "b", 0, 29, 50) > 0.999);
    }

    #[test]
    fn a_newcomer_begins_with_a_part_of_the_whole_and_grows_into_more() {
        let mut shares = UsualShares::default();
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
        let mut shares = UsualShares::default();
        for n in 0..3 * TENANTS as u64 {
            let _ = shares.takes(&TenantId::from(format!("t{n}").as_str()), Priority::Low, 10, Tick::from_millis(n));
        }
        assert!(shares.tenants.len() <= TENANTS);
    }
}

//! The lease of one limit: tokens or concurrent requests granted by the store and not used yet.
//!
//! A request draws from the lease; only if it is too small the store is called. A call asks for the need
//! plus the use of the last [`WINDOW`], up to the [`most`] of a lease, so that a busy limit costs a few
//! calls a second, and little lies idle at one gateway while another one has none.
//!
//! When a grant has taken the last of a scarce limit, its refill is left to the other gateways: this one
//! asks again when each of them could have taken as much. All waits are randomised. Without both, gateways
//! with equal loads that ask in the same order in every round split the refill by their distances: 75, 17
//! and 8 % were measured for three, and 98, 1 and 1 % for large requests.

use std::time::Duration;

use super::lua_call::COUNT_LIFE;
use crate::admit::limit::settings::Rate;
use crate::admit::limit::token_bucket::TokenBucket;
use crate::types::Tick;

/// Time that a lease lasts at the current use.
const WINDOW: Duration = Duration::from_millis(250);

/// All leases of a limit together are at most its burst divided by this, if `replicas` is
/// right.
const PART: u64 = 16;

/// Longest time for which a result about the store's remainder is trusted without a call; at least half of
/// it.
pub(super) const MEMORY: Duration = Duration::from_millis(250);

/// Additional time where other gateways go first; with [`MEMORY`] below the second that a rejection names
/// at least.
pub(super) const TURN: Duration = Duration::from_millis(600);

/// The same for concurrent requests, whose ends cannot be predicted.
const SHORT_MEMORY: Duration = Duration::from_millis(20);

/// A scarce limit is called again when it has this part of a minute's refill beyond the need, on average.
/// Otherwise each token that refills would cost a call.
const LOT: u64 = 1200;

/// Largest number that the store can represent.
const MOST: u64 = Rate::MOST;

/// Largest lease of a limit with this burst.
pub(super) fn most(burst: u64, replicas: u32) -> u64 {
    burst / (PART * u64::from(replicas.max(1)))
}

/// The lease of a rate limit.
#[derive(Clone, Debug)]
pub(super) struct TokenLease {
    pub rate: Rate,
    most: u64,
    lot: u64,
    /// Number of other gateways.
    others: u64,
    /// Granted and unused.
    left: u64,
    /// Used beyond the grants and not reported.
    owed: u64,
    /// Used by requests admitted without the store and not reported.
    unheard: u64,
    /// Drawn since the last call.
    drawn: u64,
    /// Asked for beyond the need at the last call.
    ahead: u64,
    told: Option<StoreBalance>,
    /// State of the random generator of [`TokenLease::chance`].
    seed: u64,
}

/// The store's state as last reported; a lower bound, because others may have returned leases. Kept as long
/// as the limit, to tell a store that lost its data.
#[derive(Clone, Debug)]
struct StoreBalance {
    token_bucket: TokenBucket,
    /// Creation time of that state.
    begun: u64,
    /// Until when requests are rejected by it without a call.
    until: Tick,
    /// The amount worth a call.
    lot: u64,
}

impl TokenLease {
    /// `seed` should differ between gateways.
    pub fn new(rate: Rate, replicas: u32, seed: u64, at: Tick) -> Self {
        let (most, lot, others, left, owed, unheard, drawn, ahead) = (0, 0, 0, 0, 0, 0, 0, 0);
        let mut lease = TokenLease { rate, most, lot, others, left, owed, unheard, drawn, ahead, told: None, seed };
        lease.change(rate, replicas, at);
        lease
    }

    pub fn change(&mut self, rate: Rate, replicas: u32, at: Tick) {
        self.most = most(rate.burst(), replicas);
        self.lot = (rate.per_minute() / LOT / u64::from(replicas.max(1))).min(self.most);
        self.others = u64::from(replicas.max(1)) - 1;
        self.rate = rate;
        if let Some(told) = &mut self.told {
            told.token_bucket.change(Some(rate), at);
            told.until = at;
        }
    }

    /// What a request takes: an estimate beyond the bucket takes all of it.
    pub fn clipped(&self, need: u64) -> u64 {
        need.min(self.rate.burst())
    }

    pub fn has(&self, need: u64) -> bool {
        self.left >= need
    }

    pub fn draw(&mut self, need: u64) {
        self.left = self.left.saturating_sub(need);
        self.used(need);
    }

    /// Records an amount granted directly to a request.
    pub fn used(&mut self, need: u64) {
        self.drawn = self.drawn.saturating_add(need);
    }

    /// Settles a request. While the store is unavailable, refunds are not lent
    /// again.
    pub fn settle(&mut self, held: u64, used: u64, lend: bool) {
        let (back, more) = (held.saturating_sub(used), used.saturating_sub(held));
        let pays = self.owed.min(back);
        self.owed -= pays;
        if lend {
            self.left = self.left.saturating_add(back - pays).min(MOST);
        }
        let paid = self.left.min(more);
        self.left -= paid;
        self.owed = self.owed.saturating_add(more - paid).min(MOST);
    }

    /// Settles a request admitted without the store.
    pub fn used_unheard(&mut self, used: u64) {
        self.unheard = self.unheard.saturating_add(used).min(MOST);
    }

    /// Unreported usage, at most what this gateway's own limiter still counts as spent
    /// (`spent_here`).
    pub fn tell_unheard(&mut self, spent_here: u64) -> u64 {
        std::mem::take(&mut self.unheard).min(spent_here)
    }

    /// Seconds until a request fits, as far as known here; `None` if the store must be called. The lease does
    /// not shorten it, because the client may come to another gateway
    /// next.
    pub fn known_wait(&self, need: u64, at: Tick) -> Option<u64> {
        let StoreBalance { token_bucket, lot, .. } = self.told.as_ref().filter(|told| at < told.until)?;
        let short = need.checked_sub(self.left).filter(|short| *short > 0)?;
        let enough = short.saturating_add(*lot).min(self.rate.burst());
        token_bucket.wait(enough, at).map(|_| token_bucket.wait(need, at).unwrap_or(1))
    }

    /// Seconds until it fits, by the last result.
    pub fn told_wait(&self, need: u64, at: Tick) -> Option<u64> {
        self.told.as_ref()?.token_bucket.wait(need, at)
    }

    /// Whole tokens left here and in the store, and the time until full.
    pub fn level(&self, at: Tick) -> (u64, Duration) {
        let told = self.told.as_ref().map(|told| (told.token_bucket.remaining(at), told.token_bucket.until_full(at)));
        let (there, until_full) = told.unwrap_or_default();
        (there.saturating_add(self.left).min(self.rate.burst()), until_full)
    }

    /// The same; `None` until the store has told anything.
    pub fn told_level(&self, at: Tick) -> Option<(u64, Duration)> {
        self.told.as_ref().map(|_| self.level(at))
    }

    /// How much to ask for beyond the need, after this long since the last call.
    pub fn ask_ahead(&mut self, since: Duration) -> u64 {
        let shortest = Duration::from_millis(10);
        let paced = u128::from(self.drawn) * WINDOW.as_nanos() / since.max(shortest).as_nanos();
        let paced = u64::try_from(paced).unwrap_or(u64::MAX);
        self.drawn = 0;
        self.ahead = paced.max(self.ahead / 2).min(self.most);
        self.ahead
    }

    /// The whole lease to return, and the debt: both are sent with a call.
    pub fn hand_over(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.left), std::mem::take(&mut self.owed))
    }

    /// The excess of the lease and the debt, if any.
    pub fn tidy(&mut self, is_idle: bool) -> Option<(u64, u64)> {
        let keep = if is_idle { 0 } else { self.ahead.max(self.most).min(self.left) };
        let back = self.left - keep;
        (back > 0 || self.owed > 0).then(|| {
            self.left = keep;
            (back, std::mem::take(&mut self.owed))
        })
    }

    /// Handles a result from state created at `begun`. `took`: the grant of the request that asked (0 if
    /// rejected), `None` if none asked.
    pub fn granted(&mut self, took: Option<u64>, ahead: u64, token_bucket: TokenBucket, begun: u64, at: Tick) {
        self.left = self.left.saturating_add(ahead).min(MOST);
        let before = self.told.as_ref().map(|told| (told.until, told.lot));
        let (until, lot) = match took {
            Some(took) => {
                self.used(took);
                self.patience(took, ahead, &token_bucket, at)
            }
            None => before.unwrap_or((at, self.lot)),
        };
        self.told = Some(StoreBalance { token_bucket, begun, until, lot });
    }

    /// Until when the result is trusted without a call, and the amount worth one.
    fn patience(&mut self, took: u64, ahead: u64, token_bucket: &TokenBucket, at: Tick) -> (Tick, u64) {
        let chance = self.chance();
        let until = at + MEMORY.mul_f64(f64::midpoint(1.0, chance));
        let lot = (self.lot as f64 * (0.5 + chance)) as u64;
        if took == 0 || token_bucket.remaining(at) >= took.saturating_add(self.lot) {
            return (until, lot);
        }
        let theirs = took.saturating_add(ahead).saturating_mul(self.others);
        let turn = Duration::try_from_secs_f64(theirs as f64 * 60.0 / self.rate.per_minute() as f64);
        (until + turn.unwrap_or(TURN).min(TURN), lot.saturating_add(theirs))
    }

    /// Creation time of the last reported state, and its spent tokens not yet refilled, to report if the store
    /// lost them. Zeros if unknown.
    pub fn remembered(&self, at: Tick) -> (u64, u64) {
        self.told.as_ref().map_or((0, 0), |told| (told.begun, told.token_bucket.spent(at).min(MOST)))
    }

    /// The next random number in [0, 1) (SplitMix64: Steele, Lea and Flood).
    fn chance(&mut self) -> f64 {
        self.seed = self.seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Handles a call without a result. Debts remain; returned leases are not spent again, because the return
    /// may have happened.
    pub fn lost(&mut self, back: u64, owed: u64, unheard: u64, untouched: bool) {
        self.owed = self.owed.saturating_add(owed).min(MOST);
        self.used_unheard(unheard);
        if untouched {
            self.settle(back, 0, true);
        }
    }

    pub fn left(&self) -> u64 {
        self.left
    }

    pub fn is_empty(&self) -> bool {
        self.left == 0 && self.owed == 0
    }
}

/// The lease of a concurrency limit.
#[derive(Clone, Debug)]
pub(super) struct ConcurrencyLease {
    pub most: u64,
    spare: u64,
    /// How many may run here, by the store's last result.
    granted: u64,
    stated: Tick,
    full_until: Tick,
}

impl ConcurrencyLease {
    pub fn new(most: u64, replicas: u32, at: Tick) -> Self {
        let mut seats = ConcurrencyLease { most, spare: 0, granted: 0, stated: at, full_until: at };
        seats.change(most, replicas);
        seats
    }

    pub fn change(&mut self, places: u64, replicas: u32) {
        let places = places.min(MOST);
        (self.most, self.spare) = (places, most(places, replicas));
    }

    pub fn has_room(&self, running: u64) -> bool {
        self.granted > running
    }

    /// Whether all are known to be in use, here and elsewhere.
    pub fn is_known_full(&self, at: Tick) -> bool {
        at < self.full_until
    }

    /// How many to ask for beyond the need.
    pub fn ask_ahead(&self) -> u64 {
        self.spare
    }

    /// A call reports how many run; until its result none may start.
    pub fn hand_over(&mut self, running: u64) {
        self.granted = self.granted.min(running);
    }

    /// Whether the store should be told how many run: too many are leased, or its record of running ones would
    /// expire.
    pub fn is_untidy(&self, running: u64, is_idle: bool, at: Tick) -> bool {
        let spare = if is_idle { 0 } else { self.spare };
        let forgets = (running > 0 || self.granted > 0) && at.since(self.stated) >= COUNT_LIFE / 3;
        forgets || self.granted > running.saturating_add(spare)
    }

    /// Handles a result. `refused`: a request was rejected.
    pub fn granted(&mut self, ours: u64, refused: bool, at: Tick) {
        (self.granted, self.stated) = (ours, at);
        self.full_until = if refused { at + SHORT_MEMORY } else { at };
    }

    /// Whether nothing is held here, and nothing recorded there.
    pub fn is_empty(&self) -> bool {
        self.granted == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(per_minute: u64) -> TokenLease {
        TokenLease::new(Rate::new(per_minute, None).unwrap(), 3, 1, Tick::ZERO)
    }

    fn full(lease: &TokenLease, spent: u64, at: Tick) -> TokenBucket {
        TokenBucket::told(lease.rate, spent, 0, at)
    }

    #[test]
    fn a_lease_is_a_quarter_second_of_use_and_never_more_than_its_part_of_the_burst() {
        let mut lease = lease(600_000);
        assert_eq!(lease.ask_ahead(Duration::from_secs(9)), 0, "who used nothing needs nothing ahead");
        lease.used(4000);
        assert_eq!(lease.ask_ahead(Duration::from_millis(500)), 2000);
        assert_eq!(lease.ask_ahead(Duration::from_millis(500)), 1000, "it sinks by halves");
        lease.used(4000);
        assert_eq!(lease.ask_ahead(Duration::ZERO), 12_500, "600,000 / 16 / 3");
        assert_eq!((most(15, 1), most(16, 1), most(Rate::MOST, 3)), (0, 1, Rate::MOST / 48));
    }

    #[test]
    fn debt_is_paid_from_what_is_here_before_the_store_hears_of_it() {
        let mut lease = lease(600_000);
        lease.granted(None, 100, full(&lease, 0, Tick::ZERO), 1, Tick::ZERO);
        lease.draw(60);
        lease.settle(60, 90, true);
        assert_eq!((lease.left, lease.owed), (10, 0));
        lease.settle(0, 25, true);
        assert_eq!((lease.left, lease.owed), (0, 15));
        lease.settle(40, 20, true);
        assert_eq!((lease.left, lease.owed), (5, 0));
        lease.settle(40, 20, false);
        assert_eq!(lease.left, 5, "nothing is lent again while the store is away");
        lease.settle(u64::MAX, 0, true);
        lease.settle(0, u64::MAX, true);
        assert!(lease.left <= MOST && lease.owed <= MOST);
    }

    #[test]
    fn what_a_lost_call_carried_is_neither_spent_again_nor_forgiven() {
        let mut lease = lease(600_000);
        lease.granted(None, 100, full(&lease, 0, Tick::ZERO), 1, Tick::ZERO);
        let (back, owed) = lease.hand_over();
        lease.settle(0, 30, true);
        lease.lost(back, owed, 0, false);
        assert_eq!((lease.left, lease.owed), (0, 30));
        let (back, owed) = lease.hand_over();
        lease.lost(back + 50, owed, 0, true);
        assert_eq!((lease.left, lease.owed), (20, 0), "a call that did nothing carried nothing");
    }

    #[test]
    fn what_was_let_in_without_the_store_is_told_as_far_as_it_has_not_flown_off() {
        let mut lease = lease(600_000);
        lease.used_unheard(100);
        lease.used_unheard(50);
        assert_eq!(lease.tell_unheard(120), 120);
        assert_eq!(lease.tell_unheard(120), 0, "once");
        lease.lost(0, 0, 120, false);
        assert_eq!(lease.tell_unheard(500), 120, "unless nobody heard it");
    }

    #[test]
    fn what_the_store_has_is_known_for_a_while() {
        let mut lease = lease(60_000);
        let believed = |lease: &TokenLease, spent| {
            let token_bucket = full(lease, spent, Tick::ZERO);
            Some(StoreBalance { token_bucket, begun: 1, until: Tick::ZERO + MEMORY, lot: lease.lot })
        };
        lease.told = believed(&lease, 60_000);
        assert_eq!(lease.known_wait(1500, Tick::ZERO), Some(2));
        assert_eq!(lease.known_wait(200, Tick::from_millis(100)), Some(1), "100 have dripped in");
        assert_eq!(lease.known_wait(84, Tick::from_millis(100)), None);
        assert_eq!(
            lease.known_wait(85, Tick::from_millis(100)),
            Some(1),
            "it fits, but a lot of 16 is worth waiting for"
        );
        assert_eq!(lease.known_wait(1500, Tick::from_millis(250)), None, "forgotten");
        lease.told = believed(&lease, 100);
        assert_eq!(lease.known_wait(60_000, Tick::from_millis(99)), Some(1));
        assert_eq!(lease.known_wait(60_000, Tick::from_millis(100)), None, "no more can be waited for than the burst");
    }

    #[test]
    fn no_two_answers_are_believed_for_the_same_time() {
        let mut lease = lease(60_000);
        let told: Vec<(u64, Tick)> = (0..100)
            .map(|_| {
                lease.granted(Some(0), 0, full(&lease, 60_000, Tick::ZERO), 1, Tick::ZERO);
                lease.told.as_ref().map(|told| (told.lot, told.until)).unwrap()
            })
            .collect();
        assert!(told.iter().all(|(lot, _)| (8..24).contains(lot)), "16, more or less: {told:?}");
        let within = Tick::from_millis(125)..Tick::from_millis(250);
        assert!(told.iter().all(|(_, until)| within.contains(until)));
        assert!(told.windows(2).all(|pair| pair[0].1 != pair[1].1));
    }

    #[test]
    fn who_took_the_last_of_a_scarce_limit_lets_the_others_go_first() {
        let mut lease = lease(60_000);
        let mut after = |took, ahead, spent| {
            let token_bucket = full(&lease, spent, Tick::ZERO);
            lease.granted(Some(took), ahead, token_bucket, 1, Tick::ZERO);
            lease.told.as_ref().map(|told| (told.lot, told.until)).unwrap()
        };
        let (lot, until) = after(100, 50, 60_000);
        assert!((308..324).contains(&lot), "twice 150, and 16 more or less: {lot}");
        assert!(until > Tick::from_millis(425) && until < Tick::from_millis(550), "300 ms later: {until:?}");
        assert!(after(100, 50, 59_800).0 < 24, "enough is left for all");
        assert!(after(0, 0, 60_000).0 < 24, "who got nothing does not wait for others");
        let (_, until) = after(30_000, 0, 60_000);
        assert!(until < Tick::from_millis(850), "a refusal names a second at least: {until:?}");
    }

    #[test]
    fn what_the_store_had_is_remembered_as_long_as_it_has_not_flown_off() {
        let mut lease = lease(60_000);
        assert_eq!(lease.remembered(Tick::ZERO), (0, 0));
        lease.granted(None, 0, full(&lease, 70_000, Tick::ZERO), 7, Tick::ZERO);
        assert_eq!(lease.remembered(Tick::from_millis(1500)), (7, 68_500), "debt, too");
        lease.change(Rate::new(120_000, None).unwrap(), 3, Tick::from_millis(2000));
        assert_eq!(lease.remembered(Tick::from_millis(3000)), (7, 66_000), "under a changed limit");
        assert_eq!(lease.remembered(Tick::from_millis(60_000)), (7, 0));
    }

    #[test]
    fn idle_and_superfluous_tokens_go_home() {
        let mut lease = lease(600_000);
        lease.granted(None, 12_500, full(&lease, 0, Tick::ZERO), 1, Tick::ZERO);
        assert_eq!(lease.tidy(false), None);
        lease.settle(4000, 0, true);
        assert_eq!(lease.tidy(false), Some((4000, 0)));
        assert_eq!(lease.tidy(true), Some((12_500, 0)));
        assert!(lease.is_empty());
        lease.settle(0, 7, true);
        assert_eq!(lease.tidy(false), Some((0, 7)));
    }

    #[test]
    fn places_are_kept_ahead_only_where_there_are_many() {
        let (few, many) = (ConcurrencyLease::new(4, 3, Tick::ZERO), ConcurrencyLease::new(960, 3, Tick::ZERO));
        assert_eq!((few.ask_ahead(), many.ask_ahead()), (0, 20));
        let mut seats = few;
        seats.granted(2, false, Tick::ZERO);
        assert!(seats.has_room(1) && !seats.has_room(2));
        assert!(seats.is_untidy(1, false, Tick::ZERO), "one is free and others may want it");
        assert!(!seats.is_untidy(2, false, Tick::from_millis(4999)));
        assert!(seats.is_untidy(2, false, Tick::from_millis(5000)), "said again long before it is forgotten");
        seats.granted(2, true, Tick::from_millis(5000));
        assert!(seats.is_known_full(Tick::from_millis(5019)) && !seats.is_known_full(Tick::from_millis(5020)));
    }
}

//! One tenant's leases, and the calls to the store about them.
//!
//! Pure: moments are arguments and nothing waits. A request [`draw`](Account::draw)s; if the leases are not
//! enough it becomes a [`Sent`] call, of which one per tenant is in flight, whose result comes back to
//! [`answered`](Account::answered) or [`lost`](Account::lost).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ahash::RandomState;

use super::lease::{Pot, Seats};
use super::wire::{Answer, Bucket, COUNT_LIFE, Call, Places};
use crate::admit::limit::book::{BY_RATE, Held};
use crate::admit::limit::meter::Meter;
use crate::admit::limit::settings::{Allowance, Limits};
use crate::admit::limit::{Exhausted, Limit, Scope, Standing, Used, Wanted};
use crate::units::Tick;

/// Idle time after which leases are returned.
const IDLE: Duration = Duration::from_secs(1);

/// Redis keys expire after twice the refill time plus this.
const GRACE: Duration = Duration::from_secs(60);
/// Longest key life.
pub(super) const LONGEST_LIFE: Duration = Duration::from_secs(400 * 24 * 60 * 60);

/// Most scopes handled by one call.
const SHELVES_IN_A_CALL: usize = 8;

/// Amounts held of the tenant's leases, and of its model's.
pub(super) type HeldOfBoth = [Held; 2];

/// A request for the store.
#[derive(Clone, Debug)]
pub(super) struct Want {
    /// The model's name.
    pub model: Arc<str>,
    pub wanted: Wanted,
}

/// Result of drawing from the leases.
#[derive(Debug, PartialEq)]
pub(super) enum Drawn {
    /// Everything needed was here.
    Held(HeldOfBoth),
    /// Rejected without calling the store.
    Refused(Exhausted),
    /// The store must be called.
    Ask,
}

/// A call in flight.
#[derive(Debug)]
pub(super) struct Sent {
    pub call: Call,
    want: Option<Want>,
    /// Scope (`None`: the tenant's own) and limit of each bucket.
    buckets: Vec<(Option<Arc<str>>, usize)>,
    /// Scope of each concurrency limit.
    places: Vec<Option<Arc<str>>>,
    /// Scopes whose unreported usage the call reports.
    told: Vec<Option<Arc<str>>>,
}

impl Sent {
    /// Whether a request waits for the result.
    pub fn is_asked(&self) -> bool {
        self.want.is_some()
    }

    /// Whether the result comes from other state than remembered, so that the store lost its data.
    pub fn shows_a_loss(&self, answer: &Answer) -> bool {
        let is_lost = |bucket: &Bucket| bucket.begun != 0 && bucket.begun != answer.begun && bucket.remembered > 0;
        self.call.buckets.iter().any(is_lost)
    }
}

/// The leases of one tenant.
#[derive(Debug)]
pub(super) struct Account {
    key: Arc<str>,
    gateway: Arc<str>,
    whole: Shelf,
    models: HashMap<Arc<str>, Shelf, RandomState>,
    key_life: Duration,
    last_call: Tick,
    last_draw: Tick,
}

/// The leases of one scope.
#[derive(Debug)]
struct Shelf {
    scope: Scope,
    fields: [Arc<str>; BY_RATE.len() + 1],
    pots: [Option<Pot>; BY_RATE.len()],
    seats: Option<Seats>,
    /// Requests running here, however admitted.
    running: u64,
    /// The store was unavailable: usage meanwhile must be reported, and whether it lost its data is
    /// unknown.
    untold: bool,
}

impl Account {
    pub fn new(key: Arc<str>, gateway: Arc<str>, limits: &Limits, replicas: u32, at: Tick) -> Self {
        let mut account = Account {
            key,
            gateway,
            whole: Shelf::new(None),
            models: HashMap::default(),
            key_life: GRACE,
            last_call: at,
            last_draw: at,
        };
        account.change(limits, replicas, at);
        account
    }

    /// Sets the limits. Leases of removed limits are dropped.
    pub fn change(&mut self, limits: &Limits, replicas: u32, at: Tick) {
        self.whole.change(&self.gateway, &limits.whole, replicas, at);
        self.models.retain(|model, _| limits.models.contains_key(model));
        for (model, allowance) in &limits.models {
            let shelf = self.models.entry(Arc::clone(model)).or_insert_with(|| Shelf::new(Some(model)));
            shelf.change(&self.gateway, allowance, replicas, at);
        }
        let longest = self.shelves().flat_map(Shelf::pots).map(|(_, pot)| {
            let minutes = pot.rate.burst() as f64 / pot.rate.per_minute() as f64;
            Duration::try_from_secs_f64(minutes * 120.0).unwrap_or(LONGEST_LIFE)
        });
        self.key_life = longest.fold(COUNT_LIFE, Duration::max).saturating_add(GRACE).min(LONGEST_LIFE);
    }

    /// Takes what a request needs, if available here.
    pub fn draw(&mut self, model: &str, wanted: &Wanted, at: Tick) -> Drawn {
        let shelves = || std::iter::once(&self.whole).chain(self.models.get(model));
        if let Err(never) = shelves().try_for_each(|shelf| shelf.can_ever_hold(wanted)) {
            return Drawn::Refused(never);
        }
        if !shelves().all(|shelf| shelf.has(wanted)) {
            let mut known = shelves().map(|shelf| shelf.known_full(at)).chain([Exhausted::for_the_longest(
                shelves().filter_map(|shelf| shelf.longest_wait(wanted, at, Pot::known_wait)),
            )]);
            return known.find_map(|known| known).map_or(Drawn::Ask, Drawn::Refused);
        }
        self.last_draw = at;
        let of_whole = self.whole.draw(wanted);
        let of_model = self.models.get_mut(model).map(|shelf| shelf.draw(wanted));
        Drawn::Held([of_whole, of_model.unwrap_or_default()])
    }

    /// Records a request admitted without the store.
    pub fn runs(&mut self, model: &str) {
        self.each_of(model, |_, shelf| shelf.running = shelf.running.saturating_add(1));
    }

    /// Records the end of a request. `held`: what it held from the store, if anything; `lend`: the store is
    /// available. True if the store should be told soon.
    pub fn ended(&mut self, model: &str, held: Option<&HeldOfBoth>, used: Option<&Used>, lend: bool) -> bool {
        let mut is_urgent = false;
        let last = self.last_call;
        self.each_of(model, |index, shelf| {
            shelf.running = shelf.running.saturating_sub(1);
            match (held, used) {
                (Some(held), used) => shelf.settle(&held[index], used, lend),
                (None, Some(used)) => shelf.used_unheard(used),
                (None, None) => {}
            }
            let seats = shelf.seats.as_ref();
            is_urgent |= seats.is_some_and(|seats| seats.is_untidy(shelf.running, false, last));
        });
        is_urgent
    }

    /// The call for a request that needs the store. `behind`: others of this tenant wait too. `spent_here`: the
    /// state of this gateway's own limiter.
    pub fn call<'a>(
        &mut self,
        want: Want,
        behind: impl Iterator<Item = &'a Want> + Clone,
        spent_here: &[Standing],
        at: Tick,
    ) -> Sent {
        let since = at.since(self.last_call);
        let mut sent = self.empty_call();
        let names = [None, self.models.get_key_value(&want.model).map(|(model, _)| Arc::clone(model))];
        for (index, name) in names.into_iter().enumerate().filter(|(index, name)| *index == 0 || name.is_some()) {
            let mates = || behind.clone().filter(|mate| index == 0 || mate.model == want.model);
            let Some(shelf) = self.shelf_mut(name.as_ref()) else { continue };
            shelf.untold = false;
            sent.told.push(name.clone());
            for (place, limit) in BY_RATE.into_iter().enumerate() {
                let Some(pot) = &mut shelf.pots[place] else { continue };
                let waiting = mates().map(|mate| pot.clipped(mate.wanted.of(limit)));
                let waiting = waiting.fold(0, u64::saturating_add).min(pot.rate.burst());
                let need = pot.clipped(want.wanted.of(limit));
                let besides = pot.ask_ahead(since).max(waiting);
                let (back, owed) = pot.hand_over();
                let unheard = pot.tell_unheard(spent(spent_here, shelf.scope, limit));
                let bucket = Bucket { back, owed, need, besides, unheard, ..shelf.bucket(place, at) };
                sent.buckets.push((name.clone(), place));
                sent.call.buckets.push(bucket);
            }
            let running = shelf.running;
            if let Some(seats) = &mut shelf.seats {
                let besides = seats.ask_ahead().max(mates().count() as u64);
                seats.hand_over(running);
                let places = Places { need: 1, besides, ..shelf.places() };
                sent.places.push(name.clone());
                sent.call.places.push(places);
            }
        }
        self.last_call = at;
        sent.want = Some(want);
        sent
    }

    /// A maintenance call: returns idle leases, reports debts and running requests, and after an outage the
    /// usage meanwhile and the last known state. `None` if there is nothing to do. `everything`: keep nothing,
    /// because this gateway leaves. `spent_here`: the state of this gateway's own limiter for one model.
    pub fn tidy(&mut self, everything: bool, spent_here: impl Fn(&str) -> Vec<Standing>, at: Tick) -> Option<Sent> {
        let is_idle = everything || at.since(self.last_draw) >= IDLE;
        let mut sent = self.empty_call();
        let mut shelves = 0;
        for name in std::iter::once(None).chain(self.models.keys().cloned().map(Some)).collect::<Vec<_>>() {
            let Some(shelf) = self.shelf_mut(name.as_ref()) else { continue };
            let before = sent.call.buckets.len() + sent.call.places.len();
            let spent_here = std::mem::take(&mut shelf.untold).then(|| {
                sent.told.push(name.clone());
                spent_here(name.as_deref().unwrap_or_default())
            });
            for (place, limit) in BY_RATE.into_iter().enumerate() {
                let Some(pot) = &mut shelf.pots[place] else { continue };
                let (back, owed) = pot.tidy(is_idle).unwrap_or_default();
                let unheard = spent_here.as_ref().map_or(0, |all| pot.tell_unheard(spent(all, shelf.scope, limit)));
                let bucket = Bucket { back, owed, unheard, ..shelf.bucket(place, at) };
                if back == 0 && owed == 0 && unheard == 0 && (spent_here.is_none() || bucket.remembered == 0) {
                    continue;
                }
                sent.buckets.push((name.clone(), place));
                sent.call.buckets.push(bucket);
            }
            let running = shelf.running;
            if let Some(seats) = shelf.seats.as_mut().filter(|seats| seats.is_untidy(running, is_idle, at)) {
                seats.hand_over(running);
                sent.places.push(name.clone());
                sent.call.places.push(shelf.places());
            }
            shelves += usize::from(sent.call.buckets.len() + sent.call.places.len() > before);
            if shelves == SHELVES_IN_A_CALL {
                break;
            }
        }
        (shelves > 0).then_some(sent)
    }

    /// The store is available again and must be told what it may not know.
    pub fn came_back(&mut self) {
        self.whole.untold = true;
        self.models.values_mut().for_each(|shelf| shelf.untold = true);
    }

    /// Handles the result of a call: what its request holds, or why it was rejected. `None` if no request asked,
    /// or it must ask again because the refusing limit was changed meanwhile.
    pub fn answered(&mut self, sent: Sent, answer: &Answer, at: Tick) -> Option<Result<HeldOfBoth, Exhausted>> {
        let Sent { call, want, buckets, places, .. } = sent;
        for (((name, place), bucket), level) in buckets.iter().zip(&call.buckets).zip(&answer.buckets) {
            let pot = self.shelf_mut(name.as_ref()).and_then(|shelf| shelf.pots[*place].as_mut());
            let Some(pot) = pot else { continue };
            let meter = Meter::told(pot.rate, level.whole, level.micros, at);
            let took = want.is_some().then_some(if answer.granted { bucket.need } else { 0 });
            pot.granted(took, level.besides, meter, answer.begun, at);
        }
        for ((name, asked), count) in places.iter().zip(&call.places).zip(&answer.places) {
            let seats = self.shelf_mut(name.as_ref()).and_then(|shelf| shelf.seats.as_mut());
            let Some(seats) = seats else { continue };
            let taken = count.others.saturating_add(asked.running).saturating_add(asked.need);
            seats.granted(count.ours, taken > asked.most, at);
        }
        let want = want?;
        if !answer.granted {
            return self.refused(&want, at).map(Err);
        }
        self.last_draw = at;
        self.runs(&want.model);
        let mut held = HeldOfBoth::default();
        for ((name, place), bucket) in buckets.iter().zip(&call.buckets) {
            held[usize::from(name.is_some())][*place] = bucket.need;
        }
        Some(Ok(held))
    }

    /// Handles the result of a call whose request has gone: the grant becomes a lease.
    pub fn answered_to_nobody(&mut self, sent: Sent, answer: &Answer, at: Tick) {
        let model = sent.want.as_ref().map(|want| Arc::clone(&want.model));
        if let (Some(model), Some(Ok(held))) = (model, self.answered(sent, answer, at)) {
            self.ended(&model, Some(&held), None, true);
        }
    }

    /// Handles a call without a result. `untouched`: it certainly had no effect.
    pub fn lost(&mut self, sent: Sent, untouched: bool) {
        for ((name, place), bucket) in sent.buckets.iter().zip(&sent.call.buckets) {
            let pot = self.shelf_mut(name.as_ref()).and_then(|shelf| shelf.pots[*place].as_mut());
            if let Some(pot) = pot {
                pot.lost(bucket.back, bucket.owed, bucket.unheard, untouched);
            }
        }
        for name in &sent.told {
            if let Some(shelf) = self.shelf_mut(name.as_ref()) {
                shelf.untold = true;
            }
        }
    }

    /// Whether there is nothing to report to the store.
    pub fn is_quiet(&self) -> bool {
        self.shelves().all(|shelf| {
            let seats = shelf.seats.as_ref().is_none_or(|seats| seats.is_empty() && shelf.running == 0);
            seats && !shelf.untold && shelf.pots().all(|(_, pot)| pot.is_empty())
        })
    }

    /// Requests running here.
    pub fn running(&self) -> u64 {
        self.whole.running
    }

    /// Whether any limit counts this tenant's requests for the model.
    pub fn limits(&self, model: &str) -> bool {
        let mut shelves = std::iter::once(&self.whole).chain(self.models.get(model));
        shelves.any(|shelf| shelf.seats.is_some() || shelf.pots().next().is_some())
    }

    /// The state of a share, reported as the limit of which it is one, because that is what the tenant has
    /// agreed to.
    pub fn of_the_whole(&self, model: &str, share: Standing) -> Standing {
        let shelf = match share.scope {
            Scope::Tenant => Some(&self.whole),
            Scope::Model => self.models.get(model),
        };
        let Some(shelf) = shelf else { return share };
        let rate = shelf.pots().find(|(limit, _)| *limit == share.limit).map(|(_, pot)| pot.rate);
        match (rate, shelf.seats.as_ref().filter(|_| share.limit == Limit::ConcurrentRequests)) {
            (Some(rate), _) => Standing { most: rate.burst(), per_minute: Some(rate.per_minute()), ..share },
            (None, Some(seats)) => Standing { most: seats.most, ..share },
            // The limit was removed meanwhile.
            (None, None) => share,
        }
    }

    /// Where the limits of one scope (`None`: the tenant's own) stand by the store's last word. Left out
    /// is what the store has not told; requests at the same time are those of this gateway.
    pub fn standings(&self, model: Option<&str>, at: Tick) -> Vec<Standing> {
        let shelf = match model {
            None => Some(&self.whole),
            Some(model) => self.models.get(model),
        };
        let Some(shelf) = shelf else { return Vec::new() };
        let by_rate = shelf.pots().filter_map(|(limit, pot)| {
            let (remaining, reset) = pot.told_level(at)?;
            let (most, per_minute) = (pot.rate.burst(), Some(pot.rate.per_minute()));
            Some(Standing { limit, scope: shelf.scope, most, per_minute, remaining, reset: Some(reset) })
        });
        let places = shelf.seats.as_ref().map(|seats| {
            let (limit, remaining) = (Limit::ConcurrentRequests, seats.most.saturating_sub(shelf.running));
            Standing { limit, scope: shelf.scope, most: seats.most, per_minute: None, remaining, reset: None }
        });
        by_rate.chain(places).collect()
    }

    /// Unused leased tokens of the tenant's own limits.
    pub fn unspent(&self) -> u64 {
        self.whole.pots().map(|(_, pot)| pot.left()).fold(0, u64::saturating_add)
    }

    /// Why the store rejected, by the current limits. `None` if these would not have.
    fn refused(&self, want: &Want, at: Tick) -> Option<Exhausted> {
        let shelves = || std::iter::once(&self.whole).chain(self.models.get(&want.model));
        let full = shelves().find_map(|shelf| shelf.known_full(at));
        let longest = || {
            Exhausted::for_the_longest(
                shelves().filter_map(|shelf| shelf.longest_wait(&want.wanted, at, Pot::told_wait)),
            )
        };
        full.or_else(longest)
    }

    fn empty_call(&self) -> Sent {
        let call = Call {
            key: Arc::clone(&self.key),
            gateway: Arc::clone(&self.gateway),
            key_life: self.key_life,
            ..Call::default()
        };
        Sent { call, want: None, buckets: Vec::new(), places: Vec::new(), told: Vec::new() }
    }

    fn shelves(&self) -> impl Iterator<Item = &Shelf> {
        std::iter::once(&self.whole).chain(self.models.values())
    }

    fn shelf_mut(&mut self, name: Option<&Arc<str>>) -> Option<&mut Shelf> {
        match name {
            None => Some(&mut self.whole),
            Some(model) => self.models.get_mut(model),
        }
    }

    /// The scopes of a request for this model, with their index in [`HeldOfBoth`].
    fn each_of(&mut self, model: &str, mut act: impl FnMut(usize, &mut Shelf)) {
        act(0, &mut self.whole);
        if let Some(shelf) = self.models.get_mut(model) {
            act(1, shelf);
        }
    }
}

impl Shelf {
    fn new(model: Option<&Arc<str>>) -> Self {
        let names = Limit::ALL.map(|limit| match model {
            None => Arc::from(format!("all/{limit}")),
            Some(model) => Arc::from(format!("model/{limit}/{model}")),
        });
        let scope = if model.is_none() { Scope::Tenant } else { Scope::Model };
        Shelf { scope, fields: names, pots: Default::default(), seats: None, running: 0, untold: false }
    }

    fn change(&mut self, gateway: &str, allowance: &Allowance, replicas: u32, at: Tick) {
        for ((pot, limit), field) in self.pots.iter_mut().zip(BY_RATE).zip(&self.fields) {
            match (&mut *pot, allowance.rate(limit)) {
                (Some(pot), Some(rate)) => pot.change(rate, replicas, at),
                (_, rate) => *pot = rate.map(|rate| Pot::new(rate, replicas, seed_of(gateway, field), at)),
            }
        }
        match (&mut self.seats, allowance.concurrent_requests) {
            (Some(seats), Some(most)) => seats.change(most.get(), replicas),
            (seats, most) => *seats = most.map(|most| Seats::new(most.get(), replicas, at)),
        }
    }

    fn can_ever_hold(&self, wanted: &Wanted) -> Result<(), Exhausted> {
        for (limit, pot) in self.pots() {
            let (need, most) = (wanted.of(limit), pot.rate.burst());
            if need > most && wanted.is_stated(limit) {
                return Err(Exhausted::ForEver { limit, scope: self.scope, need, most });
            }
        }
        Ok(())
    }

    fn has(&self, wanted: &Wanted) -> bool {
        let seats = self.seats.as_ref().is_none_or(|seats| seats.has_room(self.running));
        seats && self.pots().all(|(limit, pot)| pot.has(pot.clipped(wanted.of(limit))))
    }

    fn draw(&mut self, wanted: &Wanted) -> Held {
        self.running = self.running.saturating_add(1);
        let mut held = Held::default();
        for ((held, pot), limit) in held.iter_mut().zip(&mut self.pots).zip(BY_RATE) {
            if let Some(pot) = pot {
                *held = pot.clipped(wanted.of(limit));
                pot.draw(*held);
            }
        }
        held
    }

    fn settle(&mut self, held: &Held, used: Option<&Used>, lend: bool) {
        for ((held, pot), limit) in held.iter().zip(&mut self.pots).zip(BY_RATE) {
            if let Some(pot) = pot {
                pot.settle(*held, used.map_or(0, |used| used.of(limit)), lend);
            }
        }
    }

    fn used_unheard(&mut self, used: &Used) {
        for (pot, limit) in self.pots.iter_mut().zip(BY_RATE) {
            if let Some(pot) = pot {
                pot.used_unheard(used.of(limit));
            }
        }
    }

    /// The concurrency limit, if known to be full.
    fn known_full(&self, at: Tick) -> Option<Exhausted> {
        let seats = self.seats.as_ref().filter(|seats| !seats.has_room(self.running) && seats.is_known_full(at))?;
        let (limit, most) = (Limit::ConcurrentRequests, seats.most);
        let standing = Standing { limit, scope: self.scope, most, per_minute: None, remaining: 0, reset: None };
        Some(Exhausted::ForNow { standing, retry_after: None })
    }

    /// The limit with the longest wait, and the wait in whole seconds.
    fn longest_wait(
        &self,
        wanted: &Wanted,
        at: Tick,
        wait: fn(&Pot, u64, Tick) -> Option<u64>,
    ) -> Option<(u64, Standing)> {
        let waits = self.pots().filter_map(|(limit, pot)| {
            let wait = wait(pot, pot.clipped(wanted.of(limit)), at)?;
            let (remaining, reset) = pot.level(at);
            let (most, per_minute) = (pot.rate.burst(), Some(pot.rate.per_minute()));
            Some((wait, Standing { limit, scope: self.scope, most, per_minute, remaining, reset: Some(reset) }))
        });
        waits.reduce(|longest, next| if next.0 > longest.0 { next } else { longest })
    }

    fn pots(&self) -> impl Iterator<Item = (Limit, &Pot)> {
        BY_RATE.into_iter().zip(&self.pots).filter_map(|(limit, pot)| Some((limit, pot.as_ref()?)))
    }

    fn bucket(&self, place: usize, at: Tick) -> Bucket {
        let field = Arc::clone(&self.fields[place]);
        let Some(pot) = &self.pots[place] else { return Bucket { field, ..Bucket::default() } };
        let (begun, remembered) = pot.remembered(at);
        let (per_minute, burst) = (pot.rate.per_minute(), pot.rate.burst());
        Bucket { field, per_minute, burst, begun, remembered, ..Bucket::default() }
    }

    fn places(&self) -> Places {
        let most = self.seats.as_ref().map_or(0, |seats| seats.most);
        let field = Arc::clone(&self.fields[BY_RATE.len()]);
        Places { field, most, running: self.running, ..Places::default() }
    }
}

/// Seed of one limit at one gateway (FNV-1a).
fn seed_of(gateway: &str, field: &str) -> u64 {
    let bytes = gateway.bytes().chain(field.bytes());
    bytes.fold(0xCBF2_9CE4_8422_2325, |seed, byte| (seed ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// Spent amount of a limit in this gateway's own limiter.
fn spent(standings: &[Standing], scope: Scope, limit: Limit) -> u64 {
    let own = standings.iter().find(|standing| (standing.scope, standing.limit) == (scope, limit));
    own.map_or(0, |own| own.most.saturating_sub(own.remaining))
}

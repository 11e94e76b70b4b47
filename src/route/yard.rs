//! One pool of the fleet: its engines, the tree that keeps the best at hand, and the one lock
//! around them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::Budget;
use super::affinity;
use super::breaker::TenantKey;
use super::engine::{Engine, Report};
use super::fleet::{REMEMBERED, Size, Want};
use super::health::{Change, Checked};
use super::latency::{Aims, Prediction};
use super::listed::{EngineList, Listed};
use super::retry::{Attempts, Effect, Rest};
use super::seats::{Evidence, Lengths, Promised};
use super::settings::{Balance, Concurrency, EngineAddress, Engines, Pool};
use super::tournament::{Key, Rank, Tournament};
use super::view::{EngineState, EngineView, PoolView};
use crate::locks::{Mutex, RwLock};
use crate::units::{Endpoint, EngineId, PoolId, Tick, Tokens};

mod panic;

/// One pool: its engines, and the lock around them.
#[derive(Debug)]
pub struct Yard {
    id: PoolId,
    pub(super) inner: Mutex<Inner>,
    served: RwLock<Vec<(Endpoint, Models)>>,
    /// Which engines list which models.
    pub(super) listed: RwLock<Listed>,
}

/// Names of models.
type Models = HashSet<Box<str>, ahash::RandomState>;

#[derive(Debug)]
pub(super) struct Inner {
    settings: Arc<Pool>,
    shared: Arc<Shared>,
    /// What the seats of `auto` must keep.
    pub promised: Promised,
    /// How long the answers are whose class promises time to the end.
    pub lengths: Lengths,
    /// Seats that the engines give, before they are divided among gateways.
    seats: u64,
    pub retired: Option<Tick>,
    pub engines: Vec<Option<Engine>>,
    pub places: HashMap<EngineId, usize, ahash::RandomState>,
    tree: Tournament,
    pub wakes: BinaryHeap<Reverse<(Tick, usize)>>,
    pub budget: Budget,
    chance: u64,
    turn: u64,
    /// Tokens of a typical request, and the figure that keys are made with: it follows in
    /// large steps, so that keys made at different times can be compared.
    average: f64,
    typical: f64,
}

/// Engines whose chances are compared.
const CANDIDATES: usize = 4;
/// One request in so many goes to an engine picked blindly.
const EXPLORES: u64 = 100;
/// So often is looked for one that takes requests.
const BLIND_TRIES: usize = 4;

/// A chance in steps of a twentieth: smaller differences are not believed.
fn twentieths(chance: f64) -> u32 {
    (chance * 20.0).round() as u32
}

/// The part of the time to the first token that may pass with prompts read before one's own.
const READ_BEFORE: f64 = 0.25;
/// Fewer prompt tokens do not fill a step of an engine.
const LEAST_READING: u64 = 512;

/// What all pools know.
#[derive(Debug)]
pub(super) struct Shared {
    /// Gateways that share the engines, at least 1.
    pub gateways: AtomicU32,
    /// Counts changes in the number of seats of any pool.
    pub seat_changes: AtomicU64,
}

impl Default for Shared {
    fn default() -> Self {
        Shared { gateways: AtomicU32::new(1), seat_changes: AtomicU64::new(0) }
    }
}

impl Shared {
    pub fn gateways(&self) -> NonZeroU32 {
        NonZeroU32::new(self.gateways.load(Ordering::Relaxed)).unwrap_or(NonZeroU32::MIN)
    }
}

/// What a pool remembers of models that its engines served, at most.
const SERVED_NAMES: usize = 4096;

/// Tokens of a typical request before any was seen.
const TYPICAL_AT_FIRST: f64 = 512.0;

/// Engine metrics older than this many scrape intervals are no longer believed.
const STALE_AFTER: u32 = 3;

impl Yard {
    pub(super) fn new(settings: Arc<Pool>, shared: Arc<Shared>, chance: u64) -> Arc<Self> {
        Arc::new(Yard {
            id: settings.id.clone(),
            inner: Mutex::new(Inner {
                budget: Budget::new(&settings.retries),
                settings,
                shared,
                promised: Promised::default(),
                lengths: Lengths::default(),
                seats: 0,
                retired: None,
                engines: Vec::new(),
                places: HashMap::default(),
                tree: Tournament::default(),
                wakes: BinaryHeap::new(),
                chance,
                turn: 0,
                average: TYPICAL_AT_FIRST,
                typical: TYPICAL_AT_FIRST,
            }),
            served: RwLock::default(),
            listed: RwLock::default(),
        })
    }

    pub(super) fn has_served(&self, endpoint: Endpoint, model: &str) -> bool {
        self.served.read().iter().any(|(served, models)| *served == endpoint && models.contains(model))
    }

    pub(super) fn note_served(&self, endpoint: Endpoint, model: &str) {
        if self.has_served(endpoint, model) {
            return;
        }
        let mut served = self.served.write();
        if served.iter().map(|(_, models)| models.len()).sum::<usize>() >= SERVED_NAMES {
            return;
        }
        match served.iter_mut().find(|(served, _)| *served == endpoint) {
            Some((_, models)) => drop(models.insert(model.into())),
            None => served.push((endpoint, std::iter::once(Box::from(model)).collect())),
        }
    }

    /// The engines that a request for this model is kept off: others of the pool list it.
    #[must_use]
    pub fn engines_without(&self, model: &str) -> Option<EngineList> {
        self.listed.read().without(model)
    }

    /// Some engine's list of models has changed, or the engines have.
    pub(super) fn relist(&self) {
        // Locked first, so that of two changes the later one is what stays.
        let mut listed = self.listed.write();
        let inner = self.inner.lock();
        let engines: Vec<_> = inner.present().map(|(_, engine)| (engine.id.clone(), engine.models.clone())).collect();
        drop(inner);
        *listed = Listed::of(&engines);
    }

    /// Whether an attempt of which nothing has come may leave its engine, which is going away, for
    /// another one: there is one, and the retry budget has room, of which this takes.
    #[must_use]
    pub fn lets_depart(&self, attempts: &Attempts, at: Tick) -> bool {
        let mut inner = self.inner.lock();
        inner.wake(at);
        attempts.may_go_on(at) && inner.has_another(attempts, at) && inner.budget.draw(at)
    }

    /// An engine is going away: whoever waits for it is told.
    pub fn departs(&self, engine: &EngineId) {
        // Outside of the lock: tasks are woken.
        let signals = self.with_engine(engine, |engine| Arc::clone(&engine.signals));
        if let Some(signals) = signals {
            signals.goes_away();
        }
    }

    pub(super) fn with_engine<T>(&self, engine: &EngineId, note: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        let mut inner = self.inner.lock();
        let place = *inner.places.get(engine)?;
        inner.engines[place].as_mut().map(note)
    }

    /// What there is to show; `None` of a pool that went long ago.
    pub(super) fn view(&self, at: Tick) -> Option<PoolView> {
        let mut inner = self.inner.lock();
        if inner.is_forgotten(at) {
            return None;
        }
        inner.wake(at);
        inner.forget_the_long_gone(at);
        let retired = inner.retired;
        let mut engines: Vec<_> = inner.engines.iter().flatten().map(|engine| show(engine, retired, at)).collect();
        engines.sort_by(|a, b| a.engine.cmp(&b.engine));
        Some(PoolView { pool: self.id.clone(), engines, is_named: retired.is_none() })
    }
}

fn show(engine: &Engine, retired: Option<Tick>, at: Tick) -> EngineView {
    let left = engine.left.or(retired);
    let report = engine.fresh_report(at);
    EngineView {
        engine: engine.id.clone(),
        state: if left.is_some() { EngineState::Left } else { engine.state(at) },
        left,
        requests: engine.requests,
        work: engine.work(),
        waiting: report.and_then(|report| report.waiting),
        running: report.and_then(|report| report.running),
        kv_usage: report.and_then(|report| report.kv_usage),
        seats: engine.limit(),
        errors: engine.latency.lock().errors(),
        injection_refused: engine.injection_refused(),
    }
}

/// What an engine of this rank is compared by.
fn key_of(engine: &mut Engine, rank: Rank, balance: &Balance, typical: f64, at: Tick) -> Key {
    match rank {
        Rank::Out => Key::OUT,
        Rank::Cooling => Key { rank, load: engine.cool_until.as_nanos() },
        Rank::Free | Rank::Full => {
            let load = match balance {
                Balance::RoundRobin => engine.last_turn,
                Balance::LeastWork | Balance::PrefixAffinity | Balance::SessionAffinity { .. } => {
                    engine.load(typical, at)
                }
            };
            Key { rank, load }
        }
    }
}

impl Inner {
    pub fn adopt(&mut self, settings: Arc<Pool>, at: Tick) {
        self.retired = None;
        self.budget.adopt(&settings.retries);
        if let Engines::Static(addresses) = &settings.engines {
            let addresses = addresses.clone();
            self.settings = settings;
            self.set_engines(addresses, at);
        } else {
            self.settings = settings;
        }
        (0..self.engines.len()).for_each(|place| self.rekey(place, at));
    }

    pub fn set_engines(&mut self, addresses: Vec<EngineAddress>, at: Tick) {
        let named: HashSet<EngineId> = addresses.iter().map(EngineAddress::id).collect();
        for engine in self.engines.iter_mut().flatten().filter(|engine| !named.contains(&engine.id)) {
            engine.left.get_or_insert(at);
        }
        let starts_empty = self.places.is_empty();
        for address in addresses {
            self.join(address, starts_empty, at);
        }
        self.forget_the_long_gone(at);
        (0..self.engines.len()).for_each(|place| self.rekey(place, at));
    }

    fn join(&mut self, address: EngineAddress, starts_empty: bool, at: Tick) {
        let id = address.id();
        if let Some(&place) = self.places.get(&id)
            && let Some(engine) = self.engines[place].as_mut()
        {
            engine.rejoin(address, at);
            return;
        }
        // The first engines of a pool start together; one that joins others starts slowly.
        let engine = Engine::new(address, (!starts_empty).then_some(at));
        let place = match self.engines.iter().position(Option::is_none) {
            Some(free) => free,
            None => {
                self.engines.push(None);
                self.engines.len() - 1
            }
        };
        self.engines[place] = Some(engine);
        self.places.insert(id, place);
    }

    pub fn present(&self) -> impl Iterator<Item = (usize, &Engine)> {
        let taken = self.engines.iter().enumerate().filter_map(|(place, engine)| Some((place, engine.as_ref()?)));
        taken.filter(|(_, engine)| engine.left.is_none())
    }

    /// Frees the places of engines that left long ago and have nothing to finish.
    fn forget_the_long_gone(&mut self, at: Tick) {
        for place in 0..self.engines.len() {
            let gone =
                |engine: &Engine| engine.requests == 0 && engine.left.is_some_and(|left| at - left >= REMEMBERED);
            if self.engines[place].as_ref().is_some_and(gone)
                && let Some(engine) = self.engines[place].take()
            {
                self.places.remove(&engine.id);
                self.tree.set(place, Key::OUT);
            }
        }
    }

    pub fn is_forgotten(&self, at: Tick) -> bool {
        let busy = self.engines.iter().flatten().any(|engine| engine.requests > 0);
        !busy && self.retired.is_some_and(|retired| at - retired >= REMEMBERED)
    }

    /// Looks again at engines whose time has come: cooled down, breaker over, warmer, stale.
    pub fn wake(&mut self, at: Tick) {
        while let Some(&Reverse((due, place))) = self.wakes.peek() {
            if due > at {
                break;
            }
            self.wakes.pop();
            self.rekey(place, at);
        }
    }

    /// Computes an engine's key anew, and when it will change by time alone.
    fn rekey(&mut self, place: usize, at: Tick) {
        let gateways = self.shared.gateways();
        let key = match self.engines.get_mut(place).and_then(Option::as_mut) {
            None => Key::OUT,
            Some(engine) => {
                engine.follow_limit(self.settings.concurrency, gateways, at);
                let rank = engine.rank(at);
                let given = engine.gives(rank);
                if engine.given != given {
                    self.seats = self.seats + u64::from(given) - u64::from(engine.given);
                    engine.given = given;
                    self.shared.seat_changes.fetch_add(1, Ordering::Release);
                }
                if let Some(due) = engine.next_wake(at)
                    && engine.planned != Some(due)
                {
                    engine.planned = Some(due);
                    self.wakes.push(Reverse((due, place)));
                }
                key_of(engine, rank, &self.settings.balance, self.typical, at)
            }
        };
        self.tree.set(place, key);
    }

    /// Only the load changed: no look at the clock is needed.
    fn reweigh(&mut self, place: usize) {
        let key = self.tree.key(place);
        if matches!(key.rank, Rank::Free | Rank::Full)
            && let Some(engine) = self.engines[place].as_ref()
        {
            let load = match self.settings.balance {
                Balance::RoundRobin => engine.last_turn,
                _ => engine.load_again(self.typical),
            };
            let now = Key { rank: engine.rank_if_able(), load };
            if now != key {
                self.tree.set(place, now);
            }
        }
    }

    /// The seats that this gateway has in the pool; `None`: as many as it likes. One at least,
    /// or nobody would learn that no engine takes anything.
    pub fn seats(&mut self, at: Tick) -> Option<usize> {
        self.wake(at);
        let gateways = match self.settings.concurrency {
            Concurrency::Unlimited => return None,
            Concurrency::Fixed(_) => u64::from(self.shared.gateways().get()),
            Concurrency::Auto => 1,
        };
        let seats = if self.seats == 0 { self.seats_past_breakers(at) } else { self.seats };
        Some(usize::try_from((seats / gateways).max(1)).unwrap_or(usize::MAX))
    }

    /// What an engine reads in [`READ_BEFORE`] of the shortest time to the first token, on the
    /// average of the engines, shared among the gateways.
    pub fn reading(&self) -> Option<Tokens> {
        let ttft = self.promised.ttft?.as_secs_f64();
        let (count, sum) = self
            .present()
            .fold((0u32, 0.0), |(count, sum), (_, engine)| (count + 1, sum + engine.latency.lock().reads_per_second()));
        let each = (READ_BEFORE * ttft * sum / f64::from(count.max(1))) as u64;
        Some(Tokens((each.max(LEAST_READING) / u64::from(self.shared.gateways().get())).max(1)))
    }

    pub fn best_without(&mut self, tried: &[EngineId]) -> Option<usize> {
        if tried.is_empty() {
            return self.pick();
        }
        let hidden: Vec<_> =
            tried.iter().filter_map(|id| self.places.get(id)).map(|&p| (p, self.tree.key(p))).collect();
        hidden.iter().for_each(|&(place, _)| self.tree.set(place, Key::OUT));
        let best = self.pick();
        hidden.into_iter().for_each(|(place, key)| self.tree.set(place, key));
        best
    }

    /// The best place for a request, with the chances of the [`CANDIDATES`] best weighed where
    /// enough was learned of all of them.
    pub fn best_for(&mut self, want: &Want, tried: &[EngineId]) -> Option<usize> {
        if want.key != 0
            && let Some(home) = self.home(want.key, tried)
        {
            return Some(home);
        }
        let best = self.best_without(tried)?;
        let aims = want.aims.after(want.spent);
        let weighs = self.settings.balance != Balance::RoundRobin && aims != Aims::NONE && self.places.len() > 1;
        if !weighs || self.tree.key(best).rank != Rank::Free {
            return Some(best);
        }
        let Some(chance) = self.chance_at(best, want.size, &aims) else { return Some(best) };
        if twentieths(chance) == 20 {
            // Nobody can be better: where all goes well this is all that the look costs.
            return Some(best);
        }
        if self.draw().is_multiple_of(EXPLORES) {
            return Some(self.anyone(tried).unwrap_or(best));
        }
        Some(self.likeliest(best, chance, want.size, &aims, tried))
    }

    /// The engine that a key belongs to, among those that take requests and are not loaded
    /// beyond the bound (see [`affinity`]); a lower bound holds for one that warms up or whose
    /// cache is nearly full.
    fn home(&self, key: u64, tried: &[EngineId]) -> Option<usize> {
        let free = || {
            let taken = self.engines.iter().enumerate().filter_map(|(place, engine)| Some((place, engine.as_ref()?)));
            taken.filter(|(place, engine)| self.tree.key(*place).rank == Rank::Free && !tried.contains(&engine.id))
        };
        let (engines, requests) =
            free().fold((0, 0), |(n, sum), (_, engine)| (n + 1, sum + u64::from(engine.requests)));
        let bound = affinity::bound(requests, engines);
        let able = free().filter(|(_, engine)| engine.is_below(bound));
        able.max_by_key(|(_, engine)| affinity::weight(engine.name_key, key)).map(|(place, _)| place)
    }

    /// Of the best few the one where the request is likeliest to keep its promise. Chances that
    /// differ by less than a twentieth are the same: of those the least loaded one is taken.
    fn likeliest(&mut self, best: usize, chance: f64, size: Size, aims: &Aims, tried: &[EngineId]) -> usize {
        let (mut found, mut most) = (best, twentieths(chance));
        let mut hidden: [Option<(usize, Key)>; CANDIDATES - 1] = [None; CANDIDATES - 1];
        let mut next = Some(best);
        for slot in &mut hidden {
            let Some(place) = next.take() else { break };
            *slot = Some((place, self.tree.key(place)));
            self.tree.set(place, Key::OUT);
            next = self.best_without(tried).filter(|&place| self.tree.key(place).rank == Rank::Free);
            let Some(place) = next else { break };
            match self.chance_at(place, size, aims).map(twentieths) {
                None => {
                    found = best;
                    break;
                }
                Some(more) if more > most => (found, most) = (place, more),
                Some(_) => {}
            }
        }
        hidden.into_iter().flatten().for_each(|(place, key)| self.tree.set(place, key));
        found
    }

    fn chance_at(&self, place: usize, size: Size, aims: &Aims) -> Option<f64> {
        let engine = self.engines[place].as_ref()?;
        engine.latency.lock().chance(&engine.situation(size), size.decode, aims)
    }

    /// An engine picked blindly: so that one which was slow once is looked at again.
    fn anyone(&mut self, tried: &[EngineId]) -> Option<usize> {
        let places = self.engines.len() as u64;
        for _ in 0..BLIND_TRIES {
            let place = (self.draw() % places) as usize;
            let engine = self.engines[place].as_ref().filter(|engine| !tried.contains(&engine.id));
            if engine.is_some() && self.tree.key(place).rank == Rank::Free {
                return Some(place);
            }
        }
        None
    }

    /// What a request of this size would see at the best engine.
    pub fn predict(&mut self, size: Size, at: Tick) -> Option<Prediction> {
        self.wake(at);
        let engine = self.engines[self.tree.best(0)?].as_ref()?;
        engine.latency.lock().predict(&engine.situation(size))
    }

    /// What the end of an answer says about the seats of its engine, where they are found out.
    pub fn note(&mut self, place: usize, evidence: Evidence, at: Tick) {
        if let Some(engine) = self.engines[place].as_mut()
            && engine.auto.note(evidence, at)
        {
            self.rekey(place, at);
        }
    }

    pub fn finds_seats(&self) -> bool {
        self.settings.concurrency == Concurrency::Auto
    }

    pub fn rest(&mut self, attempts: &Attempts, at: Tick) -> Rest {
        let tried = attempts.tried();
        if self.has_another(attempts, at) {
            Rest::Others
        } else if tried.iter().all(|id| Some(id) == tried.first()) {
            Rest::Alone
        } else {
            Rest::Nobody
        }
    }

    pub fn begin(&mut self, place: usize, size: Size, at: Tick) -> bool {
        let total = (size.prefill + size.decode).0 as f64;
        self.average += (total - self.average) / 64.0;
        let average = self.average.max(1.0);
        if average > 2.0 * self.typical || average < 0.5 * self.typical {
            self.typical = average;
            (0..self.engines.len()).for_each(|place| self.rekey(place, at));
        }
        self.turn += 1;
        let turn = self.turn;
        let Some(engine) = self.engines[place].as_mut() else { return false };
        engine.last_turn = turn;
        let tries = engine.begin(size);
        // Whoever asks has looked at what changes by time (`wake`).
        match tries {
            true => self.rekey(place, at),
            false => self.reweigh(place),
        }
        tries
    }

    pub fn requests_at(&self, place: usize) -> u32 {
        self.engines[place].as_ref().map_or(0, |engine| engine.requests)
    }

    pub fn lighten(&mut self, place: usize, size: Size) {
        if let Some(engine) = self.engines[place].as_mut() {
            engine.lighten(size);
        }
        self.reweigh(place);
    }

    pub fn end(&mut self, place: usize, left: Size, tried: bool) {
        let Some(engine) = self.engines[place].as_mut() else { return };
        engine.lighten(left);
        engine.requests = engine.requests.saturating_sub(1);
        if tried && engine.breaker.is_trying() {
            engine.breaker.inconclusive();
            // Whoever asks next looks at this engine again.
            self.wakes.push(Reverse((Tick::ZERO, place)));
        }
        self.reweigh(place);
    }

    pub fn apply(&mut self, effect: &Effect, tenant: TenantKey, at: Tick) {
        let id = match effect {
            Effect::FaultElsewhere(..) => return,
            Effect::Fault(id)
            | Effect::Cool(id, _)
            | Effect::Well(id)
            | Effect::InjectionAccepted(id)
            | Effect::InjectionSwitchedOff(id) => id,
        };
        let Some(&place) = self.places.get(id) else { return };
        let Some(engine) = self.engines[place].as_mut() else { return };
        if engine.feel(effect, self.settings.breaker.as_ref(), tenant, at) {
            self.rekey(place, at);
        }
    }

    pub fn checked(&mut self, engine: &EngineId, checked: Checked, at: Tick) -> Option<Change> {
        let place = *self.places.get(engine)?;
        let change = self.engines[place].as_mut()?.checked(checked, at);
        self.wake(at);
        self.rekey(place, at);
        change
    }

    pub fn reported(&mut self, engine: &EngineId, report: Report, at: Tick) {
        let Some(&place) = self.places.get(engine) else { return };
        let every = self.settings.metrics.as_ref().map_or(Duration::from_secs(2), |scrape| scrape.every);
        let until = at + every * STALE_AFTER;
        if let Some(engine) = self.engines[place].as_mut() {
            engine.reported(report, until);
        }
        // Nobody else may come that would take out what is due.
        self.wake(at);
        self.wakes.push(Reverse((until, place)));
        self.rekey(place, at);
    }

    /// Engines that can take requests, cooling ones included.
    pub fn available(&mut self, at: Tick) -> usize {
        self.wake(at);
        (0..self.engines.len()).filter(|&place| self.tree.key(place).rank != Rank::Out).count()
    }

    /// The best place; equals are parted by chance.
    fn pick(&mut self) -> Option<usize> {
        let drawn = self.draw();
        self.tree.best(drawn)
    }

    /// The next value of the seeded source (splitmix64).
    fn draw(&mut self) -> u64 {
        self.chance = self.chance.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.chance ^ (self.chance >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) >> 16
    }
}

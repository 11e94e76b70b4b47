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
use super::engine::{Engine, Reading, Report};
use super::fleet::{REMEMBERED, Size, Want};
use super::health::{Change, Checked};
use super::latency::{AGREES, Aims, Latency, Lesson, Prediction, StepTime, Usual, answer_weight};
use super::listed::{EngineList, Listed};
use super::retry::{Attempts, Effect, Rest};
use super::seats::{self, Lengths, Paces, Promised};
use super::settings::{Balance, Concurrency, EngineAddress, Engines, Pool};
use super::tournament::{Key, Rank, Tournament};
use super::view::{EngineState, EngineView, PoolView};
use crate::locks::{Mutex, RwLock};
use crate::units::{Endpoint, EngineId, PoolId, PrefillPace, Tick, Tokens};

mod panic;

/// One pool: its engines, and the lock around them.
#[derive(Debug)]
pub struct Yard {
    id: PoolId,
    pub(super) inner: Mutex<Inner>,
    served: RwLock<ServedModels>,
    /// Which engines list which models.
    pub(super) listed: RwLock<Listed>,
}

/// Which models the engines of a pool have served, on which paths.
#[derive(Debug, Default)]
struct ServedModels {
    /// What was noted last: all there is in most pools.
    last: Option<(Endpoint, Box<str>)>,
    all: Vec<(Endpoint, Models)>,
}

impl ServedModels {
    fn has(&self, endpoint: Endpoint, model: &str) -> bool {
        let is_last = self.last.as_ref().is_some_and(|(path, name)| *path == endpoint && **name == *model);
        is_last || self.all.iter().any(|(path, models)| *path == endpoint && models.contains(model))
    }
}

/// Names of models.
type Models = HashSet<Box<str>, ahash::RandomState>;

#[derive(Debug)]
pub(super) struct Inner {
    settings: Arc<Pool>,
    shared: Arc<Shared>,
    /// What the seats of `auto` must keep.
    pub promised: Promised,
    /// The mean steps that keep it.
    pub paces: Paces,
    /// How long the answers are whose class promises time to the end.
    pub lengths: Lengths,
    /// What was learned of engines of which too little was learned yet, as if they were one.
    pub common: Latency,
    /// Who was given a beginning of a prompt last.
    holders: HashMap<u64, u32, ahash::RandomState>,
    /// Seats that the engines give, before they are divided among gateways.
    seats: u64,
    /// Seats of other gateways that these do not use.
    lent: u64,
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

/// Seconds of prefill that an engine may have ahead of it while the pace allows, in the shortest time
/// to a first token; without one, so many seconds.
const PREFILL_AHEAD: (f64, f64) = (0.35, 4.0);
/// The same while the pace is behind: enough for the next step, and little that a more urgent prompt
/// would have to wait for.
const LEAST_AHEAD: (f64, f64) = (0.25, 0.35);
/// The share of the speed at which an engine computes prompts that it is given at most: at all of it the
/// prompts ahead would never become fewer.
const FULL_SPEED: f64 = 0.95;
/// The share of the paces up to which engines are given what tenants send beyond their usual share.
const SPARE_PACE: f64 = 0.7;
/// Fewer prompt tokens do not fill a step of an engine.
const LEAST_READING: f64 = 512.0;
/// Seconds of prefill by which an engine may be ahead of the pace, and behind it.
const BURST: f64 = 0.4;
const BEHIND: f64 = 1.0;
/// Engines that are less slow than this, compared with the quickest, are as it is: so much is error.
const AS_OTHERS: f64 = AGREES;
/// What was learned of an engine counts less with the time since an answer agreed with it: half after this.
const HALF_LIFE: f64 = 60.0;

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

/// Beginnings of prompts of which a pool knows who was given them last; beyond that it begins anew.
const MOST_HOLDERS: usize = 1 << 17;

/// What a pool remembers of models that its engines served, at most.
const SERVED_NAMES: usize = 4096;

/// Prompt tokens of a typical request before any was seen.
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
                paces: Paces::default(),
                lengths: Lengths::default(),
                common: Latency::default(),
                holders: HashMap::default(),
                seats: 0,
                lent: 0,
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
        self.served.read().has(endpoint, model)
    }

    pub(super) fn note_served(&self, endpoint: Endpoint, model: &str) {
        if self.has_served(endpoint, model) {
            return;
        }
        let mut served = self.served.write();
        if served.all.iter().map(|(_, models)| models.len()).sum::<usize>() >= SERVED_NAMES {
            return;
        }
        served.last = Some((endpoint, model.into()));
        match served.all.iter_mut().find(|(path, _)| *path == endpoint) {
            Some((_, models)) => drop(models.insert(model.into())),
            None => served.all.push((endpoint, std::iter::once(Box::from(model)).collect())),
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
                engine.key_is_made();
                engine.follow_limit(self.settings.concurrency, self.settings.seat_bounds, gateways, at);
                let rank = engine.rank(at);
                let given = engine.gives(rank);
                if engine.given != given {
                    self.seats = self.seats + u64::from(given.whole) - u64::from(engine.given.whole);
                    self.lent = self.lent + u64::from(given.lent) - u64::from(engine.given.lent);
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
                // An only engine is compared with nobody.
                _ if self.engines.len() == 1 => key.load,
                Balance::RoundRobin => engine.last_turn,
                _ => engine.load_again(),
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
        let (seats, lent) = match self.seats {
            0 => (self.seats_past_breakers(at), 0),
            seats => (seats, self.lent),
        };
        Some(usize::try_from((seats / gateways + lent).max(1)).unwrap_or(usize::MAX))
    }

    /// Looks at what was learned of the engines: their seats under `auto` follow, and how they compare.
    /// Says how fast prompts may go to them. `None`: nobody queues here, too little was learned, or no
    /// class promises anything.
    pub fn keep_pace(&mut self, at: Tick) -> Option<PrefillPace> {
        let target = self.paces.least(at).or_else(|| self.promised.pace_at_first());
        // One copy, because answers teach what stands behind the lock meanwhile.
        let learned: Vec<_> = self.engines_here().map(|engine| engine.latency.lock().clone()).collect();
        let engines = self.engines.iter_mut().flatten().filter(|engine| engine.left.is_none());
        let speeds = engines.zip(&learned).map(|(engine, learned)| engine.keep_pace(target, learned, &self.common, at));
        let speeds: Vec<_> = speeds.collect();
        let pace = if self.queues() { self.pace(target, &speeds) } else { None };
        self.compare(&learned, at);
        for place in 0..self.engines.len() {
            if self.engines[place].as_ref().is_some_and(Engine::needs_a_key) {
                self.rekey(place, at);
            }
        }
        pace
    }

    /// The engines that have not left, in the order of their places.
    fn engines_here(&self) -> impl Iterator<Item = &Engine> {
        self.present().map(|(_, engine)| engine)
    }

    /// How fast prompts may go to the engines, from the steps and the speed of each.
    fn pace(&self, target: Option<f64>, speeds: &[Option<(StepTime, f64)>]) -> Option<PrefillPace> {
        let (mut known, mut sum) = (0u32, PrefillPace::default());
        let ttft = self.promised.ttft.map(|ttft| ttft.as_secs_f64());
        let within = |(share, without): (f64, f64)| ttft.map_or(without, |ttft| share * ttft);
        let (most, least) = (within(PREFILL_AHEAD), within(LEAST_AHEAD).min(LEAST_AHEAD.1));
        for (engine, speed) in self.engines_here().zip(speeds) {
            let Some((step, speed)) = *speed else { continue };
            // A small token budget keeps an engine from spending all its time on prefill: then its steps
            // allow more than it can do.
            let allowed = 1.0 / step.per_prompt_token.max(1e-7);
            let tokens = allowed.min(speed);
            let share = target.map_or(1.0, |pace| seats::prefill_share(&step, pace, engine.counters.running()));
            let spare =
                target.map_or(1.0, |pace| seats::prefill_share(&step, SPARE_PACE * pace, engine.counters.running()));
            known += 1;
            sum.spare += (spare * allowed).min(FULL_SPEED * speed);
            sum.per_second += (share * allowed).min(FULL_SPEED * speed);
            sum.burst += BURST * tokens;
            sum.behind += BEHIND * tokens;
            sum.most += (most * tokens).max(LEAST_READING);
            sum.least += (least * tokens).max(LEAST_READING);
        }
        let is_promised = target.is_some() || self.promised.ttft.is_some() || self.promised.e2e;
        if known == 0 || !is_promised {
            return None;
        }
        let each = f64::from(known);
        // Those of which nothing is known yet are taken to be like the others.
        let scale = speeds.len() as f64 / each;
        Some(PrefillPace {
            per_second: target.map_or(f64::INFINITY, |_| sum.per_second * scale),
            spare: target.map_or(f64::INFINITY, |_| sum.spare * scale),
            burst: sum.burst * scale,
            behind: sum.behind * scale,
            most: sum.most / each,
            least: sum.least / each,
        })
    }

    /// How slow engines are, compared with the quickest: by the steps that they would make in the batch
    /// and with the prompts of all lately, and by the time to the first token of a typical request with no
    /// other ahead of it, whichever is slower. Within the error of what was learned they are equal, and what no
    /// answer has agreed with lately says little: one that is not asked is soon as the quickest, and stays so as
    /// long as its answers are not what was expected.
    fn compare(&mut self, learned: &[Latency], at: Tick) {
        let count = (learned.len() as f64).max(1.0);
        let batch = 1.0 + self.engines_here().map(|engine| engine.counters.running()).sum::<f64>() / count;
        let prompt = self.engines_here().map(|engine| engine.prompt_per_step).sum::<f64>() / count;
        let usual = Usual { prompt: Tokens(self.typical as u64), batch: batch as u32, prompt_per_step: prompt };
        let common = self.common.service(&usual);
        let all: Vec<_> = learned.iter().map(|latency| latency.service(&usual).or(common)).collect();
        let quickest = all.iter().flatten().copied().reduce(|a, b| (a.0.min(b.0), a.1.min(b.1)));
        let Some(quickest) = quickest else { return };
        for (engine, service) in self.engines.iter_mut().flatten().filter(|engine| engine.left.is_none()).zip(all) {
            let Some(service) = service else { continue };
            let fresh = 0.5f64.powf(at.since(engine.confirmed_at).as_secs_f64() / HALF_LIFE);
            let slowness = (service.0 / quickest.0).max(service.1 / quickest.1).powf(fresh);
            engine.compares(if slowness > AS_OTHERS { slowness } else { 1.0 });
        }
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

    /// The best place for a request: the engine that its key belongs to, else the one that would have the
    /// least to do if it came there, what its cache holds of the prompt left out.
    pub fn best_for(&mut self, want: &Want, blocks: &[u64], tried: &[EngineId]) -> Option<usize> {
        let home = if want.key == 0 { None } else { self.home(want.key, tried) };
        if home.is_some() {
            return home;
        }
        let best = self.best_without(tried)?;
        let looks = self.settings.balance == Balance::LeastWork && !blocks.is_empty();
        if !looks || self.tree.key(best).rank != Rank::Free {
            return Some(best);
        }
        let holder = self.holder_of(blocks).filter(|&place| {
            let engine = self.engines.get(place).and_then(Option::as_ref);
            place != best
                && self.tree.key(place).rank == Rank::Free
                // What a slow engine has cached is no reason to wait for its tokens.
                && engine.is_some_and(|engine| !tried.contains(&engine.id) && engine.slowness <= 1.0)
        });
        let load = |place: usize| {
            let engine = self.engines[place].as_ref().expect("both places are taken");
            let prompt = want.size.prefill;
            engine.load_with(prompt.less(engine.cached(prompt, blocks)))
        };
        Some(holder.filter(|&holder| load(holder) < load(best)).unwrap_or(best))
    }

    /// The engine that was last given the longest known beginning of a prompt.
    fn holder_of(&self, blocks: &[u64]) -> Option<usize> {
        let known = blocks.partition_point(|block| self.holders.contains_key(block));
        blocks[..known].last().and_then(|block| self.holders.get(block)).map(|&place| place as usize)
    }

    /// An engine has computed a prompt.
    pub fn note_prefix(&mut self, place: usize, blocks: &[u64], rest: Tokens, at: Tick) {
        let Some(engine) = self.engines[place].as_mut() else { return };
        engine.prefixes.note(blocks, at);
        engine.prefixes.note_other(rest, at);
        if self.holders.len() + blocks.len() > MOST_HOLDERS {
            self.holders.clear();
        }
        self.holders.extend(blocks.iter().map(|block| (*block, place as u32)));
    }

    /// What the end of an answer tells of its engine's cache: the tokens that were expected there, those
    /// that its usage told, and the times to the first token with them, without them, and as it was.
    pub fn learned_prefix(
        &mut self,
        place: usize,
        expected: Tokens,
        cached: Option<Tokens>,
        times: Option<((Duration, Duration), Duration)>,
        output: Tokens,
        at: Tick,
    ) {
        let Some(engine) = self.engines[place].as_mut() else { return };
        engine.prefixes.note_other(output, at);
        engine.prefixes.observed(expected, cached);
        if let Some(((hit, miss), took)) = times {
            engine.prefixes.timed(hit, miss, took);
        }
    }

    /// Prompt tokens that have to be computed at the engine that holds most of a prompt.
    pub fn uncached(&self, prompt: Tokens, blocks: &[u64]) -> Tokens {
        let holder = self.holder_of(blocks).and_then(|place| self.engines[place].as_ref());
        prompt.less(holder.map_or(Tokens::ZERO, |engine| engine.cached(prompt, blocks)))
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

    /// What a request of this size would see at the best engine: as things are there now, or, where it
    /// will wait in a queue before, with no prompt ahead of its own.
    pub fn predict(&mut self, size: Size, unhindered: bool, at: Tick) -> Option<Prediction> {
        self.wake(at);
        let engine = self.engines[self.tree.best(0)?].as_mut()?;
        let situation = engine.situation(size, at);
        let latency = engine.latency.lock();
        if unhindered { latency.predict_unhindered(&situation) } else { latency.predict(&situation) }
    }

    /// An answer of a class with thresholds ended, dispatched when it had waited for `spent`: the paces
    /// follow.
    pub fn note_outcome(&mut self, lesson: &Lesson, aims: &Aims, whole: Option<Duration>, spent: Duration, at: Tick) {
        let attainment = self.promised.attainment;
        if let (Some(limit), Some(took)) = (aims.tpot, lesson.tpot) {
            self.paces.note(limit, took <= limit, attainment, answer_weight(lesson.further), at);
        }
        let Some((limit, took)) = whole.zip(lesson.e2e) else { return };
        self.lengths.note(limit, lesson.further);
        // An answer that waited for long says nothing about the pace, and so does one that is longer than
        // the pace is for.
        if let Some(length) = self.lengths.of(limit, seats::MOST_ANSWERS)
            && spent * 4 <= limit
            && lesson.further <= length
        {
            self.paces.note_whole(limit, length, spent + took <= limit, attainment, at);
        }
    }

    /// Whether requests wait in front of this pool, because it has a limit.
    pub fn queues(&self) -> bool {
        self.settings.concurrency != Concurrency::Unlimited
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
        let total = size.prefill.0 as f64;
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
        let tries = engine.begin(size, at);
        // Whoever asks has looked at what changes by time (`wake`).
        match tries {
            true => self.rekey(place, at),
            false => self.reweigh(place),
        }
        tries
    }

    /// The first token of a prompt came: what the engine had run until then.
    pub fn first_token(&mut self, place: usize, prompt: Tokens, at: Tick) -> Option<Reading> {
        let engine = self.engines[place].as_mut()?;
        let reading = engine.first_token(prompt, at);
        self.reweigh(place);
        Some(reading)
    }

    /// What an engine has run until now.
    pub fn read_counters(&mut self, place: usize, at: Tick) -> Option<Reading> {
        let engine = self.engines[place].as_mut()?;
        Some(engine.counters.read(at))
    }

    /// A request left an engine. `decoding`: its first token had come.
    pub fn end(&mut self, place: usize, left: Size, decoding: bool, tried: bool) {
        let Some(engine) = self.engines[place].as_mut() else { return };
        engine.lighten(left);
        if decoding {
            engine.counters.ended();
        }
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

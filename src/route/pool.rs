//! One pool of the fleet: its engines, the tree that has the best at hand, and the lock around
//! them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::RetryBudget;
use super::affinity;
use super::breaker::TenantKey;
use super::concurrency::{self, OutputLengths, PoolTargets, StepBudgets};
use super::engine::{CounterReading, Engine, EngineMetrics};
use super::health::{HealthChange, ProbeResult};
use super::latency::{
    AGREES, DecodeSteps, Latency, LatencySample, LoadSnapshot, Prediction, SloTargets, StepTime, TypicalRequest,
    answer_weight,
};
use super::model_listing::{EngineList, ModelListing};
use super::other_gateways::{EngineShare, SeenAnswer};
use super::pick_request::{PickRequest, WorkEstimate};
use super::retry::{Attempts, EngineEffect, RemainingEngines};
use super::settings::{Balance, Concurrency, EngineAddress, EngineSource, PoolSettings};
use super::status::{DrainError, EngineState, EngineView, PoolView};
use super::tournament::{Key, Rank, Tournament};
use crate::sync::{Mutex, RwLock};
use crate::types::{ApiPath, EngineId, PoolId, PrefillPace, Tick, Tokens};

mod panic;

/// One pool with its lock.
#[derive(Debug)]
pub struct Pool {
    id: PoolId,
    pub(super) inner: Mutex<PoolInner>,
    served: RwLock<ServedModels>,
    /// Which engines list which models.
    pub(super) listed: RwLock<ModelListing>,
}

/// Which models the engines of a pool have served, on which paths.
#[derive(Debug, Default)]
struct ServedModels {
    /// What was noted last: all there is in most pools.
    last: Option<(ApiPath, Box<str>)>,
    all: Vec<(ApiPath, ModelNames)>,
}

impl ServedModels {
    fn has(&self, endpoint: ApiPath, model: &str) -> bool {
        let is_last = self.last.as_ref().is_some_and(|(path, name)| *path == endpoint && **name == *model);
        is_last || self.all.iter().any(|(path, models)| *path == endpoint && models.contains(model))
    }
}

/// Model names.
type ModelNames = HashSet<Box<str>, ahash::RandomState>;

#[derive(Debug)]
pub(super) struct PoolInner {
    settings: Arc<PoolSettings>,
    shared: Arc<FleetShared>,
    /// Objectives that `auto` keeps.
    pub targets: PoolTargets,
    /// Tolerated mean step times.
    pub step_budgets: StepBudgets,
    /// Output lengths under E2E objectives.
    pub lengths: OutputLengths,
    /// Latency model of all engines without enough data of their own, as if they were one.
    pub common: Latency,
    /// Engine that was last given each prompt block.
    holders: HashMap<u64, u32, ahash::RandomState>,
    /// Seats of the engines before division among gateways.
    seats: u64,
    /// Seats lent by other gateways.
    lent: u64,
    /// Whether this pool is reported to other gateways.
    tells: bool,
    pub retired: Option<Tick>,
    pub engines: Vec<Option<Engine>>,
    pub places: HashMap<EngineId, usize, ahash::RandomState>,
    tree: Tournament,
    pub wakes: BinaryHeap<Reverse<(Tick, usize)>>,
    pub budget: RetryBudget,
    chance: u64,
    turn: u64,
    /// Tokens of a typical request, and the value used in keys, which follows in large steps so that keys made at
    /// different times are comparable.
    average: f64,
    typical: f64,
}

/// Prefill time that an engine may have ahead while the pace allows, as a share of the shortest TTFT
/// threshold; and in seconds if there is none.
const PREFILL_AHEAD: (f64, f64) = (0.35, 4.0);
/// The same while the pace is behind: enough for the next step, and little that a more urgent prompt would
/// wait for.
const LEAST_AHEAD: (f64, f64) = (0.25, 0.35);
/// Largest share of an engine's prefill speed that is used, because at 1 a backlog would never
/// shrink.
const FULL_SPEED: f64 = 0.95;
/// Share of the pace up to which requests beyond usual demand are dispatched.
const SPARE_PACE: f64 = 0.7;
/// Fewest prompt tokens that fill an engine's step.
const LEAST_READING: f64 = 512.0;
/// Burst of the pace, and its largest debt, in seconds of prefill.
const BURST: f64 = 0.4;
const BEHIND: f64 = 1.0;
/// Ratio to the fastest engine that is within the model's error, and counts as equal.
const AS_OTHERS: f64 = AGREES;
/// Half-life of what was learned since a response last agreed with it, seconds.
const HALF_LIFE: f64 = 60.0;

/// How long a removed engine's numbers are shown.
pub const REMEMBERED: Duration = Duration::from_secs(600);

/// State shared by all pools.
#[derive(Debug)]
pub(super) struct FleetShared {
    /// Number of gateways that share the engines, at least 1.
    pub gateways: AtomicU32,
    /// Counts changes of the seats of any pool.
    pub seat_changes: AtomicU64,
}

impl Default for FleetShared {
    fn default() -> Self {
        FleetShared { gateways: AtomicU32::new(1), seat_changes: AtomicU64::new(0) }
    }
}

impl FleetShared {
    pub fn gateways(&self) -> NonZeroU32 {
        NonZeroU32::new(self.gateways.load(Ordering::Relaxed)).unwrap_or(NonZeroU32::MIN)
    }
}

/// Most prompt blocks with a known engine; beyond that the map is cleared.
const MOST_HOLDERS: usize = 1 << 17;

/// Most models remembered as served.
const SERVED_NAMES: usize = 4096;

/// Initial prompt tokens of a typical request.
const TYPICAL_AT_FIRST: f64 = 512.0;

/// Age of engine metrics, in scrape intervals, at which they are ignored.
const STALE_AFTER: u32 = 3;

impl Pool {
    pub(super) fn new(settings: Arc<PoolSettings>, shared: Arc<FleetShared>, chance: u64) -> Arc<Self> {
        Arc::new(Pool {
            id: settings.id.clone(),
            inner: Mutex::new(PoolInner {
                budget: RetryBudget::new(&settings.retries),
                settings,
                shared,
                targets: PoolTargets::default(),
                step_budgets: StepBudgets::default(),
                lengths: OutputLengths::default(),
                common: Latency::default(),
                holders: HashMap::default(),
                seats: 0,
                lent: 0,
                tells: false,
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

    pub(super) fn has_served(&self, endpoint: ApiPath, model: &str) -> bool {
        self.served.read().has(endpoint, model)
    }

    pub(super) fn note_served(&self, endpoint: ApiPath, model: &str) {
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

    /// The engines to avoid for this model, because others of the pool list it.
    #[must_use]
    pub fn engines_without(&self, model: &str) -> Option<EngineList> {
        self.listed.read().without(model)
    }

    /// Updates the lists of models after a change.
    pub(super) fn relist(&self) {
        // Locked first, so that the later of two changes wins.
        let mut listed = self.listed.write();
        let inner = self.inner.lock();
        let engines: Vec<_> = inner.present().map(|(_, engine)| (engine.id.clone(), engine.models.clone())).collect();
        drop(inner);
        *listed = ModelListing::of(&engines);
    }

    /// Whether an attempt without a response may leave its departing engine: there is another one, and the retry
    /// budget, which is charged, has room.
    #[must_use]
    pub fn lets_depart(&self, attempts: &Attempts, at: Tick) -> bool {
        let mut inner = self.inner.lock();
        inner.wake(at);
        attempts.may_go_on(at) && inner.has_another(attempts, at) && inner.budget.draw(at)
    }

    /// An engine departs: attempts that wait for it are woken.
    pub fn departs(&self, engine: &EngineId) {
        // Outside of the lock, because tasks are woken.
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

    /// Drains an engine for so long (`None`: until it is put back). `may_empty`: also the last one
    /// that takes requests.
    pub(super) fn drain(
        &self,
        engine: &EngineId,
        length: Option<Duration>,
        may_empty: bool,
        at: Tick,
    ) -> Result<EngineView, DrainError> {
        self.by_hand(engine, at, |inner, place| {
            let takes = |place: usize| inner.tree.key(place).rank != Rank::Out;
            if !may_empty && takes(place) && !inner.present().any(|(other, _)| other != place && takes(other)) {
                return Err(DrainError::LastEngine);
            }
            inner.engines[place].iter_mut().for_each(|engine| engine.drain(length, at));
            Ok(())
        })
    }

    /// Puts a drained engine back; one that is not drained stays as it is.
    pub(super) fn put_back(&self, engine: &EngineId, at: Tick) -> Result<EngineView, DrainError> {
        self.by_hand(engine, at, |inner, place| {
            inner.engines[place].iter_mut().for_each(Engine::put_back);
            Ok(())
        })
    }

    fn by_hand(
        &self,
        engine: &EngineId,
        at: Tick,
        change: impl FnOnce(&mut PoolInner, usize) -> Result<(), DrainError>,
    ) -> Result<EngineView, DrainError> {
        let mut inner = self.inner.lock();
        if inner.retired.is_some() {
            return Err(DrainError::UnknownPool);
        }
        inner.wake(at);
        let place = inner.present().find(|(_, present)| present.id == *engine).map(|(place, _)| place);
        let place = place.ok_or(DrainError::UnknownEngine)?;
        change(&mut inner, place)?;
        inner.refresh_key(place, at);
        inner.engines[place].as_ref().map(|engine| engine_view(engine, None, at)).ok_or(DrainError::UnknownEngine)
    }

    /// The pool's status; `None` if it was removed long ago.
    pub(super) fn view(&self, at: Tick) -> Option<PoolView> {
        let mut inner = self.inner.lock();
        if inner.is_forgotten(at) {
            return None;
        }
        inner.wake(at);
        inner.prune_departed(at);
        let retired = inner.retired;
        let mut engines: Vec<_> =
            inner.engines.iter().flatten().map(|engine| engine_view(engine, retired, at)).collect();
        engines.sort_by(|a, b| a.engine.cmp(&b.engine));
        Some(PoolView { pool: self.id.clone(), engines, is_named: retired.is_none() })
    }
}

fn engine_view(engine: &Engine, retired: Option<Tick>, at: Tick) -> EngineView {
    let left = engine.left.or(retired);
    let report = engine.fresh_report(at);
    EngineView {
        engine: engine.id.clone(),
        state: if left.is_some() { EngineState::Left } else { engine.state(at) },
        is_drained: engine.is_drained(at),
        drained_for: engine.drained_for(at),
        left,
        requests: engine.requests,
        work: engine.work(),
        waiting: report.and_then(|report| report.waiting),
        running: report.and_then(|report| report.running),
        elsewhere: engine.elsewhere(at),
        kv_usage: report.and_then(|report| report.kv_usage),
        seats: engine.limit(),
        errors: engine.latency.lock().errors(),
        injection_refused: engine.injection_refused(),
    }
}

/// The sort key of an engine at this rank.
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

impl PoolInner {
    pub fn apply_settings(&mut self, settings: Arc<PoolSettings>, at: Tick) {
        self.retired = None;
        self.budget.apply_settings(&settings.retries);
        if let EngineSource::Static(addresses) = &settings.engines {
            let addresses = addresses.clone();
            self.settings = settings;
            self.set_engines(addresses, at);
        } else {
            self.settings = settings;
        }
        (0..self.engines.len()).for_each(|place| self.refresh_key(place, at));
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
        self.prune_departed(at);
        (0..self.engines.len()).for_each(|place| self.refresh_key(place, at));
    }

    fn join(&mut self, address: EngineAddress, starts_empty: bool, at: Tick) {
        let id = address.id();
        if let Some(&place) = self.places.get(&id)
            && let Some(engine) = self.engines[place].as_mut()
        {
            engine.rejoin(address, at);
            return;
        }
        // The initial engines start together; one that joins later warms up.
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

    /// Frees slots of engines removed long ago that have finished.
    fn prune_departed(&mut self, at: Tick) {
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

    /// Re-evaluates engines that are due: cooled down, breaker time over, warmer, stale report.
    pub fn wake(&mut self, at: Tick) {
        while let Some(&Reverse((due, place))) = self.wakes.peek() {
            if due > at {
                break;
            }
            self.wakes.pop();
            self.refresh_key(place, at);
        }
    }

    /// Recomputes an engine's key, and when it changes with time alone.
    fn refresh_key(&mut self, place: usize, at: Tick) {
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

    /// Recomputes the load only, without reading the clock.
    fn refresh_load(&mut self, place: usize) {
        let key = self.tree.key(place);
        if matches!(key.rank, Rank::Free | Rank::Full)
            && let Some(engine) = self.engines[place].as_ref()
        {
            let load = match self.settings.balance {
                // A single engine has no other to be compared with.
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

    /// This gateway's seats in the pool; `None` means unlimited. At least one, so that an unavailable pool is
    /// tried.
    pub fn seats(&mut self, at: Tick) -> Option<usize> {
        self.wake(at);
        let gateways = match self.settings.concurrency {
            Concurrency::Unlimited => return None,
            Concurrency::Fixed(_) => u64::from(self.shared.gateways().get()),
            Concurrency::Auto => 1,
        };
        let (seats, lent) = match (self.seats, self.lent) {
            (0, 0) => (self.seats_past_breakers(at), 0),
            seats => seats,
        };
        Some(usize::try_from((seats / gateways + lent).max(1)).unwrap_or(usize::MAX))
    }

    /// The prefill pace from what was learned of the engines; also updates seats under `auto` and compares
    /// engines. `None` if nothing queues here, too little was learned, or no class has an
    /// objective.
    pub fn update_pace(&mut self, at: Tick) -> Option<PrefillPace> {
        let target = self.step_budgets.least(at).or_else(|| self.targets.pace_at_first());
        // Copied once, because responses update the locked value meanwhile.
        let learned: Vec<_> = self.engines_here().map(|engine| engine.latency.lock().clone()).collect();
        let engines = self.engines.iter_mut().flatten().filter(|engine| engine.left.is_none());
        let speeds =
            engines.zip(&learned).map(|(engine, learned)| engine.update_pace(target, learned, &self.common, at));
        let speeds: Vec<_> = speeds.collect();
        let pace = if self.queues() { self.pace(target, &speeds) } else { None };
        self.compare(&learned, at);
        for place in 0..self.engines.len() {
            if self.engines[place].as_ref().is_some_and(Engine::needs_a_key) {
                self.refresh_key(place, at);
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
        let ttft = self.targets.ttft.map(|ttft| ttft.as_secs_f64());
        let within = |(share, without): (f64, f64)| ttft.map_or(without, |ttft| share * ttft);
        let (most, least) = (within(PREFILL_AHEAD), within(LEAST_AHEAD).min(LEAST_AHEAD.1));
        for (engine, speed) in self.engines_here().zip(speeds) {
            let Some((step, speed)) = *speed else { continue };
            // A small token budget bounds the prefill speed: the step time then allows more than the engine can
            // do.
            let allowed = 1.0 / step.per_prompt_token.max(1e-7);
            let tokens = allowed.min(speed);
            let share = target.map_or(1.0, |pace| concurrency::prefill_share(&step, pace, engine.counters.running()));
            let spare = target
                .map_or(1.0, |pace| concurrency::prefill_share(&step, SPARE_PACE * pace, engine.counters.running()));
            known += 1;
            sum.spare += (spare * allowed).min(FULL_SPEED * speed);
            sum.per_second += (share * allowed).min(FULL_SPEED * speed);
            sum.burst += BURST * tokens;
            sum.behind += BEHIND * tokens;
            sum.most += (most * tokens).max(LEAST_READING);
            sum.least += (least * tokens).max(LEAST_READING);
        }
        let is_promised = target.is_some() || self.targets.ttft.is_some() || self.targets.e2e;
        if known == 0 || !is_promised {
            return None;
        }
        let each = f64::from(known);
        // Engines without data are assumed to be like the others.
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

    /// Slowness of engines relative to the fastest: by step time in the recent mix, and by TTFT of a typical
    /// request without others ahead, whichever is slower. Differences within the model's error count as equal,
    /// and old knowledge counts less: an unused engine soon looks as fast as the fastest, until its responses
    /// disagree.
    fn compare(&mut self, learned: &[Latency], at: Tick) {
        let count = (learned.len() as f64).max(1.0);
        let batch = 1.0 + self.engines_here().map(|engine| engine.counters.running()).sum::<f64>() / count;
        let prompt = self.engines_here().map(|engine| engine.prompt_per_step).sum::<f64>() / count;
        let usual =
            TypicalRequest { prompt: Tokens(self.typical as u64), batch: batch as u32, prompt_per_step: prompt };
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

    /// The best slot for a request: the engine of its affinity key, else the one with the least load including
    /// the uncached part of its prompt.
    pub fn best_for(&mut self, pick: &PickRequest, blocks: &[u64], tried: &[EngineId]) -> Option<usize> {
        let home = if pick.key == 0 { None } else { self.home(pick.key, tried) };
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
                // A slow engine's cache does not make up for its slow tokens.
                && engine.is_some_and(|engine| !tried.contains(&engine.id) && engine.slowness <= 1.0)
        });
        let load = |place: usize| {
            let engine = self.engines[place].as_ref().expect("both places are taken");
            let prompt = pick.size.prefill;
            engine.load_with(prompt.less(engine.cached(prompt, blocks)))
        };
        Some(holder.filter(|&holder| load(holder) < load(best)).unwrap_or(best))
    }

    /// The engine that was last given the longest known prefix.
    fn holder_of(&self, blocks: &[u64]) -> Option<usize> {
        let known = blocks.partition_point(|block| self.holders.contains_key(block));
        blocks[..known].last().and_then(|block| self.holders.get(block)).map(|&place| place as usize)
    }

    /// Records that an engine has computed a prompt.
    pub fn note_prefix(&mut self, place: usize, blocks: &[u64], rest: Tokens, at: Tick) {
        if self.tells
            && let Some(engine) = self.engines[place].as_mut()
        {
            engine.untold.note(blocks, rest);
        }
        self.hold_prefix(place, blocks, rest, at);
    }

    fn hold_prefix(&mut self, place: usize, blocks: &[u64], rest: Tokens, at: Tick) {
        let Some(engine) = self.engines[place].as_mut() else { return };
        engine.prefixes.note(blocks, at);
        engine.prefixes.note_other(rest, at);
        if self.holders.len() + blocks.len() > MOST_HOLDERS {
            self.holders.clear();
        }
        self.holders.extend(blocks.iter().map(|block| (*block, place as u32)));
    }

    /// Learns from a response about its engine's cache: expected and reported cached tokens, and the first
    /// token's expected times with and without them, and its actual time.
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

    /// Prompt tokens to be computed at the engine that holds most of a prompt.
    pub fn uncached(&self, prompt: Tokens, blocks: &[u64]) -> Tokens {
        let holder = self.holder_of(blocks).and_then(|place| self.engines[place].as_ref());
        prompt.less(holder.map_or(Tokens::ZERO, |engine| engine.cached(prompt, blocks)))
    }

    /// The engine of a key among available ones within the load bound (see [`affinity`]), which is lower while
    /// an engine warms up or its cache is nearly
    /// full.
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

    /// Predicted latency at the best engine: under current conditions, or, for a request that will queue
    /// first, without other prompts ahead.
    pub fn predict(&mut self, size: WorkEstimate, unhindered: bool, at: Tick) -> Option<Prediction> {
        self.wake(at);
        let engine = self.engines[self.tree.best(0)?].as_mut()?;
        let snapshot = engine.snapshot(size, at);
        let latency = engine.latency.lock();
        if unhindered { latency.predict_unhindered(&snapshot) } else { latency.predict(&snapshot) }
    }

    /// Updates the paces with the response of a class with thresholds, dispatched after waiting for
    /// `spent`.
    pub fn note_outcome(
        &mut self,
        sample: &LatencySample,
        targets: &SloTargets,
        whole: Option<Duration>,
        spent: Duration,
        at: Tick,
    ) {
        let attainment = self.targets.attainment;
        // Each gateway sees its part of the responses, and the mean of the paces applies: each response stands for
        // one of each gateway, so that several follow outcomes as quickly as one.
        let heard = || self.engines_here().map(Engine::gateways_heard).max().unwrap_or(0);
        let gateways = 1 + if self.tells { heard() } else { 0 };
        if let (Some(limit), Some(took)) = (targets.tpot, sample.tpot) {
            let weight = answer_weight(sample.further);
            (0..gateways).for_each(|_| self.step_budgets.note(limit, took <= limit, attainment, weight, at));
        }
        let Some((limit, took)) = whole.zip(sample.e2e) else { return };
        self.lengths.note(limit, sample.further);
        // A response that waited long says nothing about the pace, nor does one longer than the pace is meant
        // for.
        if let Some(length) = self.lengths.of(limit, concurrency::MOST_ANSWERS)
            && spent * 4 <= limit
            && sample.further <= length
        {
            let kept = spent + took <= limit;
            (0..gateways).for_each(|_| self.step_budgets.note_whole(limit, length, kept, attainment, at));
        }
    }

    /// Whether requests queue for this pool, because it has a limit.
    pub fn queues(&self) -> bool {
        self.settings.concurrency != Concurrency::Unlimited
    }

    pub fn rest(&mut self, attempts: &Attempts, at: Tick) -> RemainingEngines {
        let tried = attempts.tried();
        if self.has_another(attempts, at) {
            RemainingEngines::Others
        } else if tried.iter().all(|id| Some(id) == tried.first()) {
            RemainingEngines::Alone
        } else {
            RemainingEngines::Nobody
        }
    }

    pub fn begin(&mut self, place: usize, size: WorkEstimate, at: Tick) -> bool {
        let total = size.prefill.0 as f64;
        self.average += (total - self.average) / 64.0;
        let average = self.average.max(1.0);
        if average > 2.0 * self.typical || average < 0.5 * self.typical {
            self.typical = average;
            (0..self.engines.len()).for_each(|place| self.refresh_key(place, at));
        }
        self.turn += 1;
        let turn = self.turn;
        let Some(engine) = self.engines[place].as_mut() else { return false };
        engine.last_turn = turn;
        let tries = engine.begin(size, at);
        // The caller has applied changes with time (`wake`).
        match tries {
            true => self.refresh_key(place, at),
            false => self.refresh_load(place),
        }
        tries
    }

    /// Records a first token; returns the engine's counters.
    pub fn first_token(&mut self, place: usize, prompt: Tokens, at: Tick) -> Option<CounterReading> {
        let engine = self.engines[place].as_mut()?;
        let reading = engine.first_token(prompt, at);
        self.refresh_load(place);
        Some(reading)
    }

    /// The engine's counters now.
    pub fn read_counters(&mut self, place: usize, at: Tick) -> Option<CounterReading> {
        let engine = self.engines[place].as_mut()?;
        Some(engine.counters.read(at))
    }

    /// Records that a request left an engine. `decoding`: it had its first token.
    pub fn end(&mut self, place: usize, left: WorkEstimate, decoding: bool, tried: bool) {
        let Some(engine) = self.engines[place].as_mut() else { return };
        engine.lighten(left);
        if decoding {
            engine.counters.ended();
        }
        engine.requests = engine.requests.saturating_sub(1);
        if tried && engine.breaker.is_trying() {
            engine.breaker.inconclusive();
            // Re-evaluated at the next use.
            self.wakes.push(Reverse((Tick::ZERO, place)));
        }
        self.refresh_load(place);
    }

    /// An engine served a tenant's request.
    pub fn well(&mut self, id: &EngineId, tenant: TenantKey, at: Tick) {
        let Some(&place) = self.places.get(id) else { return };
        if self.engines[place].as_mut().is_some_and(|engine| engine.well(tenant, at)) {
            self.refresh_key(place, at);
        }
    }

    pub fn apply(&mut self, effect: &EngineEffect, tenant: TenantKey, at: Tick) {
        let id = match effect {
            EngineEffect::FaultElsewhere(..) => return,
            EngineEffect::Fault(id)
            | EngineEffect::Cool(id, _)
            | EngineEffect::Well(id)
            | EngineEffect::InjectionAccepted(id)
            | EngineEffect::InjectionSwitchedOff(id) => id,
        };
        let Some(&place) = self.places.get(id) else { return };
        let Some(engine) = self.engines[place].as_mut() else { return };
        if engine.feel(effect, self.settings.breaker.as_ref(), tenant, at) {
            self.refresh_key(place, at);
        }
    }

    pub fn checked(&mut self, engine: &EngineId, checked: ProbeResult, at: Tick) -> Option<HealthChange> {
        let place = *self.places.get(engine)?;
        let change = self.engines[place].as_mut()?.checked(checked, at);
        self.wake(at);
        self.refresh_key(place, at);
        change
    }

    pub fn reported(&mut self, engine: &EngineId, report: EngineMetrics, at: Tick) {
        let Some(&place) = self.places.get(engine) else { return };
        let every = self.settings.metrics.as_ref().map_or(Duration::from_secs(2), |scrape| scrape.every);
        let until = at + every * STALE_AFTER;
        if let Some(engine) = self.engines[place].as_mut() {
            engine.reported(report, until);
        }
        // Applied here, because no later request may come to do it.
        self.wake(at);
        self.wakes.push(Reverse((until, place)));
        self.refresh_key(place, at);
    }

    /// This gateway's requests at the engines, for its report.
    pub fn shares(&mut self, at: Tick) -> Vec<EngineShare> {
        self.tells = true;
        self.engines.iter_mut().flatten().filter(|engine| engine.left.is_none()).map(|it| it.share_told(at)).collect()
    }

    /// Takes what another gateway has at the engines.
    pub fn heard(&mut self, gateway: u64, shares: &[EngineShare], until: Tick, at: Tick) {
        self.wake(at);
        for share in shares {
            let Some(&place) = self.places.get(&share.engine) else { continue };
            if let Some(engine) = self.engines[place].as_mut() {
                engine.heard(gateway, share, until, at);
                self.refresh_key(place, at);
            }
            self.learn_from_others(place, &share.answers, at);
            for prompt in &share.computed {
                self.hold_prefix(place, &prompt.blocks, prompt.rest, at);
            }
        }
    }

    /// Keeps a response for the next report, so that each gateway learns from all.
    pub fn note_answer(
        &mut self,
        place: usize,
        snapshot: &LoadSnapshot,
        ttft: Option<Duration>,
        further: Option<(DecodeSteps, Duration)>,
    ) {
        if self.tells
            && (ttft.is_some() || further.is_some())
            && let Some(engine) = self.engines[place].as_mut()
        {
            engine.untold.note_answer(SeenAnswer { snapshot: *snapshot, ttft, further });
        }
    }

    /// Learns from responses of other gateways.
    fn learn_from_others(&mut self, place: usize, answers: &[SeenAnswer], at: Tick) {
        let Some(engine) = self.engines[place].as_ref() else { return };
        let mut latency = engine.latency.lock();
        for answer in answers {
            let learn = |latency: &mut Latency| {
                if let Some(ttft) = answer.ttft {
                    latency.first_token(&answer.snapshot, ttft);
                }
                if let Some((steps, each)) = &answer.further {
                    latency.further_tokens(steps, *each, at);
                }
            };
            learn(&mut latency);
            if !latency.is_known() {
                learn(&mut self.common);
            }
        }
    }

    /// Engines that can take requests, cooling ones included.
    pub fn available(&mut self, at: Tick) -> usize {
        self.wake(at);
        (0..self.engines.len()).filter(|&place| self.tree.key(place).rank != Rank::Out).count()
    }

    /// The best slot; ties at random.
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

//! Every pool's engines and what is known of them; picks one for a request.
//!
//! Lives as long as the process: a reload of the settings and a change in DNS only say which
//! engines belong to a pool, and what is known of an engine survives both. An engine that
//! left takes no more requests and finishes what it has. One small lock per pool, held for a
//! few lines; choosing costs O(log n) in the number of engines.
//!
//! Who is best: an engine that can take requests before one that pushed back a moment ago;
//! among those by `least_work` (tokens of work) or `round_robin` (longest not asked); equals
//! by chance. If all cool down, the one that is free soonest.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use super::Budget;
use super::engine::{Engine, Report};
use super::health::{Change, Checked};
use super::retry::{Attempts, Effect, Happened, Injection, Next, Rest};
use super::settings::{Balance, EngineAddress, Engines, Pool};
use super::tournament::{Key, Rank, Tournament};
use super::view::{EngineState, EngineView, PoolView};
use crate::units::{Endpoint, EngineId, PoolId, Tick, Tokens};

/// All pools.
#[derive(Debug)]
pub struct Fleet {
    pools: RwLock<HashMap<PoolId, Arc<Yard>>>,
    seed: u64,
}

/// How much work a request is expected to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Prompt tokens.
    pub prefill: Tokens,
    /// Output tokens, all choices.
    pub decode: Tokens,
}

/// An engine picked for a request.
#[derive(Debug)]
pub struct Choice {
    /// Its name.
    pub engine: EngineId,
    /// Where it is.
    pub address: Arc<EngineAddress>,
    /// Whether something may be injected into bodies for it, where the pool's settings say so.
    pub may_inject: bool,
    /// Whether it accepted an injection in the last 60 s.
    pub injection_proven: bool,
    /// Its share of the engine's work; given back when dropped.
    pub work: Work,
}

/// One request's work at an engine. What is left of it leaves the engine's books when this
/// ends, however it ends.
#[derive(Debug)]
#[must_use]
pub struct Work {
    yard: Arc<Yard>,
    place: usize,
    left: Size,
    tries: bool,
}

/// One pool: its engines, and the lock around them.
#[derive(Debug)]
struct Yard {
    id: PoolId,
    inner: Mutex<Inner>,
    served: RwLock<HashMap<&'static str, HashSet<Box<str>>>>,
}

#[derive(Debug)]
struct Inner {
    settings: Arc<Pool>,
    retired: Option<Tick>,
    engines: Vec<Option<Engine>>,
    places: HashMap<EngineId, usize>,
    tree: Tournament,
    wakes: BinaryHeap<Reverse<(Tick, usize)>>,
    budget: Budget,
    chance: u64,
    turn: u64,
    /// Tokens of a typical request, and the figure that keys are made with: it follows in
    /// large steps, so that keys made at different times can be compared.
    average: f64,
    typical: f64,
}

/// What a pool remembers of models that its engines served, at most.
const SERVED_NAMES: usize = 4096;

/// An engine's numbers are shown for this long after it left.
pub const REMEMBERED: Duration = Duration::from_secs(600);

/// Tokens of a typical request before any was seen.
const TYPICAL_AT_FIRST: f64 = 512.0;

/// Engine metrics older than this many scrape intervals are no longer believed.
const STALE_AFTER: u32 = 3;

impl Fleet {
    /// A fleet without pools. `seed` decides between equals.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Fleet { pools: RwLock::default(), seed }
    }

    /// The settings name these pools. What is known of engines that stay is kept. A pool that
    /// is no longer named goes on serving the requests that arrived under the old settings.
    pub fn follow(&self, pools: &[Arc<Pool>], at: Tick) {
        let mut yards = self.pools.write();
        for pool in pools {
            let count = yards.len() as u64;
            let yard = yards.entry(pool.id.clone()).or_insert_with(|| Yard::new(pool.clone(), self.seed ^ count));
            yard.inner.lock().adopt(pool.clone(), at);
        }
        for (id, yard) in yards.iter() {
            if !pools.iter().any(|pool| pool.id == *id) {
                yard.inner.lock().retired.get_or_insert(at);
            }
        }
        yards.retain(|_, yard| !yard.inner.lock().is_forgotten(at));
    }

    /// A pool's engines are these from now on (a DNS name was looked up).
    pub fn set_engines(&self, pool: &PoolId, addresses: Vec<EngineAddress>, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            yard.inner.lock().set_engines(addresses, at);
        }
    }

    /// The engines of a pool that have not left.
    #[must_use]
    pub fn engines(&self, pool: &PoolId) -> Vec<(EngineId, Arc<EngineAddress>)> {
        let list = |yard: Arc<Yard>| {
            let inner = yard.inner.lock();
            inner.present().map(|(_, engine)| (engine.id.clone(), engine.address.clone())).collect()
        };
        self.yard(pool).map(list).unwrap_or_default()
    }

    /// How many engines of a pool can take requests now, cooling ones included.
    #[must_use]
    pub fn available(&self, pool: &PoolId, at: Tick) -> usize {
        let count = |yard: Arc<Yard>| {
            let mut inner = yard.inner.lock();
            inner.wake(at);
            (0..inner.engines.len()).filter(|&place| inner.tree.key(place).rank != Rank::Out).count()
        };
        self.yard(pool).map(count).unwrap_or_default()
    }

    /// A request begins in this pool: the retry budget grows with it.
    pub fn request(&self, pool: &PoolId, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            yard.inner.lock().budget.request(at);
        }
    }

    /// Picks the best engine of the pool that these attempts have not tried, and gives it the
    /// work. `None`: no such engine can take requests.
    #[must_use]
    pub fn choose(&self, pool: &PoolId, attempts: &mut Attempts, size: Size, at: Tick) -> Option<Choice> {
        let yard = self.yard(pool)?;
        let mut inner = yard.inner.lock();
        inner.wake(at);
        let place = inner.best_without(attempts.tried())?;
        let tries = inner.begin(place, size, at);
        let engine = inner.engines[place].as_ref().expect("the tree names only places that are taken");
        attempts.begin(engine.id.clone());
        let choice = Choice {
            engine: engine.id.clone(),
            address: engine.address.clone(),
            may_inject: engine.may_inject(),
            injection_proven: engine.injection_proven(at),
            work: Work { yard: yard.clone(), place, left: size, tries },
        };
        drop(inner);
        Some(choice)
    }

    /// An attempt failed: what comes next, with the pool's retry budget in hand. Effects on
    /// engines are applied.
    #[must_use]
    pub fn failed(&self, pool: &PoolId, attempts: &mut Attempts, happened: Happened, at: Tick) -> Next {
        let Some(yard) = self.yard(pool) else { return attempts.nothing_left() };
        let mut inner = yard.inner.lock();
        inner.wake(at);
        let rest = inner.rest(attempts.tried());
        let step = attempts.next(happened, rest, at, &mut inner.budget);
        inner.apply(step.effects, at);
        step.next
    }

    /// An attempt succeeded: a 2xx whose first token came, or whose head was whole where the
    /// answer is no stream.
    pub fn succeeded(&self, pool: &PoolId, attempts: &mut Attempts, injection: Injection, at: Tick) {
        let effects = attempts.succeeded(injection);
        self.apply(pool, effects, at);
    }

    /// The request is over without a further result: effects held back so far now count.
    pub fn settle(&self, pool: &PoolId, attempts: &mut Attempts, at: Tick) {
        let effects = attempts.settled();
        if !effects.is_empty() {
            self.apply(pool, effects, at);
        }
    }

    /// Notes effects on engines.
    pub fn apply(&self, pool: &PoolId, effects: Vec<Effect>, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            yard.inner.lock().apply(effects, at);
        }
    }

    /// An answer came in a content coding nobody asked for: nothing is injected into bodies
    /// for this engine any more.
    pub fn answers_coded(&self, pool: &PoolId, engine: &EngineId) {
        self.with_engine(pool, engine, |engine| engine.answers_coded());
    }

    /// An engine of this pool served `model` on this path.
    pub fn note_served(&self, pool: &PoolId, endpoint: Endpoint, model: &str) {
        let Some(yard) = self.yard(pool) else { return };
        if yard.has_served(endpoint, model) {
            return;
        }
        let mut served = yard.served.write();
        if served.values().map(HashSet::len).sum::<usize>() < SERVED_NAMES {
            served.entry(endpoint.path()).or_default().insert(model.into());
        }
    }

    /// Whether any engine of this pool has served `model` on this path since the start.
    #[must_use]
    pub fn has_served(&self, pool: &PoolId, endpoint: Endpoint, model: &str) -> bool {
        self.yard(pool).is_some_and(|yard| yard.has_served(endpoint, model))
    }

    /// A health check of an engine ended.
    pub fn checked(&self, pool: &PoolId, engine: &EngineId, checked: Checked, at: Tick) -> Option<Change> {
        let yard = self.yard(pool)?;
        let mut inner = yard.inner.lock();
        let place = *inner.places.get(engine)?;
        let change = inner.engines[place].as_mut()?.checked(checked, at);
        inner.rekey(place, at);
        change
    }

    /// An engine's own metrics were read.
    pub fn reported(&self, pool: &PoolId, engine: &EngineId, report: Report, at: Tick) {
        let Some(yard) = self.yard(pool) else { return };
        let mut inner = yard.inner.lock();
        let Some(&place) = inner.places.get(engine) else { return };
        let every = inner.settings.metrics.as_ref().map_or(Duration::from_secs(2), |scrape| scrape.every);
        let until = at + every * STALE_AFTER;
        if let Some(engine) = inner.engines[place].as_mut() {
            engine.reported(report, until);
        }
        inner.wakes.push(Reverse((until, place)));
        inner.rekey(place, at);
    }

    /// An engine named the models it serves.
    pub fn lists_models(&self, pool: &PoolId, engine: &EngineId, models: Vec<Arc<str>>) {
        self.with_engine(pool, engine, |engine| engine.models = models.into());
    }

    /// The models that the engines of a pool named, sorted, each once.
    #[must_use]
    pub fn models(&self, pool: &PoolId) -> Vec<Arc<str>> {
        let list = |yard: Arc<Yard>| {
            let inner = yard.inner.lock();
            let mut models: Vec<_> = inner.present().flat_map(|(_, engine)| engine.models.iter().cloned()).collect();
            models.sort();
            models.dedup();
            models
        };
        self.yard(pool).map(list).unwrap_or_default()
    }

    /// Everything there is to show, pools and engines by name. Engines that left stay for ten
    /// minutes.
    #[must_use]
    pub fn view(&self, at: Tick) -> Vec<PoolView> {
        let yards: Vec<_> = self.pools.read().values().cloned().collect();
        let mut views: Vec<_> = yards.iter().map(|yard| yard.view(at)).collect();
        views.sort_by(|a, b| a.pool.cmp(&b.pool));
        views
    }

    fn yard(&self, pool: &PoolId) -> Option<Arc<Yard>> {
        self.pools.read().get(pool).cloned()
    }

    fn with_engine(&self, pool: &PoolId, engine: &EngineId, note: impl FnOnce(&mut Engine)) {
        let Some(yard) = self.yard(pool) else { return };
        let mut inner = yard.inner.lock();
        if let Some(&place) = inner.places.get(engine)
            && let Some(engine) = inner.engines[place].as_mut()
        {
            note(engine);
        }
    }
}

impl Work {
    /// The first token came: the prompt has been read.
    pub fn first_token(&mut self) {
        let read = std::mem::take(&mut self.left.prefill);
        if read > Tokens::ZERO {
            self.yard.inner.lock().lighten(self.place, Size { prefill: read, decode: Tokens::ZERO });
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.yard.inner.lock().end(self.place, self.left, self.tries);
    }
}

impl Yard {
    fn new(settings: Arc<Pool>, chance: u64) -> Arc<Self> {
        Arc::new(Yard {
            id: settings.id.clone(),
            inner: Mutex::new(Inner {
                budget: Budget::new(&settings.retries),
                settings,
                retired: None,
                engines: Vec::new(),
                places: HashMap::new(),
                tree: Tournament::default(),
                wakes: BinaryHeap::new(),
                chance,
                turn: 0,
                average: TYPICAL_AT_FIRST,
                typical: TYPICAL_AT_FIRST,
            }),
            served: RwLock::default(),
        })
    }

    fn has_served(&self, endpoint: Endpoint, model: &str) -> bool {
        self.served.read().get(endpoint.path()).is_some_and(|models| models.contains(model))
    }

    fn view(&self, at: Tick) -> PoolView {
        let mut inner = self.inner.lock();
        inner.wake(at);
        inner.forget_the_long_gone(at);
        let retired = inner.retired;
        let mut engines: Vec<_> = inner.engines.iter().flatten().map(|engine| show(engine, retired, at)).collect();
        engines.sort_by(|a, b| a.engine.cmp(&b.engine));
        PoolView { pool: self.id.clone(), engines, is_named: retired.is_none() }
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
        injection_refused: engine.injection_refused(),
    }
}

impl Inner {
    fn adopt(&mut self, settings: Arc<Pool>, at: Tick) {
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

    fn set_engines(&mut self, addresses: Vec<EngineAddress>, at: Tick) {
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

    fn present(&self) -> impl Iterator<Item = (usize, &Engine)> {
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

    fn is_forgotten(&self, at: Tick) -> bool {
        let busy = self.engines.iter().flatten().any(|engine| engine.requests > 0);
        !busy && self.retired.is_some_and(|retired| at - retired >= REMEMBERED)
    }

    /// Looks again at engines whose time has come: cooled down, breaker over, warmer, stale.
    fn wake(&mut self, at: Tick) {
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
        let key = match self.engines.get_mut(place).and_then(Option::as_mut) {
            None => Key::OUT,
            Some(engine) => {
                let rank = engine.rank(at);
                if let Some(due) = engine.next_wake(at)
                    && engine.planned != Some(due)
                {
                    engine.planned = Some(due);
                    self.wakes.push(Reverse((due, place)));
                }
                match rank {
                    Rank::Out => Key::OUT,
                    Rank::Cooling => Key { rank: Rank::Cooling, load: engine.cool_until.as_nanos() },
                    Rank::Free => {
                        let load = match self.settings.balance {
                            Balance::RoundRobin => engine.last_turn,
                            Balance::LeastWork => engine.load(self.typical, at),
                        };
                        Key { rank: Rank::Free, load }
                    }
                }
            }
        };
        self.tree.set(place, key);
    }

    /// Only the load changed: no look at the clock is needed.
    fn reweigh(&mut self, place: usize) {
        let key = self.tree.key(place);
        if key.rank == Rank::Free
            && self.settings.balance == Balance::LeastWork
            && let Some(engine) = self.engines[place].as_ref()
        {
            let load = engine.load_again(self.typical);
            self.tree.set(place, Key { rank: Rank::Free, load });
        }
    }

    fn best_without(&mut self, tried: &[EngineId]) -> Option<usize> {
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

    fn rest(&mut self, tried: &[EngineId]) -> Rest {
        if self.best_without(tried).is_some() {
            Rest::Others
        } else if tried.iter().all(|id| Some(id) == tried.first()) {
            Rest::Alone
        } else {
            Rest::Nobody
        }
    }

    fn begin(&mut self, place: usize, size: Size, at: Tick) -> bool {
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
        self.rekey(place, at);
        tries
    }

    fn lighten(&mut self, place: usize, size: Size) {
        if let Some(engine) = self.engines[place].as_mut() {
            engine.lighten(size);
        }
        self.reweigh(place);
    }

    fn end(&mut self, place: usize, left: Size, tried: bool) {
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

    fn apply(&mut self, effects: Vec<Effect>, at: Tick) {
        let limits = self.settings.breaker;
        for effect in effects {
            let id = match &effect {
                Effect::Fault(id)
                | Effect::Cool(id, _)
                | Effect::Well(id)
                | Effect::InjectionAccepted(id)
                | Effect::InjectionSwitchedOff(id) => id,
            };
            let Some(&place) = self.places.get(id) else { continue };
            let Some(engine) = self.engines[place].as_mut() else { continue };
            engine.feel(&effect, limits.as_ref(), at);
            self.rekey(place, at);
        }
    }

    /// The best place; equals are parted by the next value of the seeded source (splitmix64).
    fn pick(&mut self) -> Option<usize> {
        self.chance = self.chance.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.chance ^ (self.chance >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.tree.best((mixed ^ (mixed >> 31)) >> 16)
    }
}

#[cfg(test)]
mod tests;

//! Every pool's engines and what is known of them; picks one for a request.
//!
//! Lives as long as the process: a reload of the settings and a change in DNS only say which
//! engines belong to a pool, and what is known of an engine survives both. An engine that
//! left takes no more requests and finishes what it has. One small lock per pool, held for a
//! few lines; choosing costs O(log n) in the number of engines.
//!
//! Who is best: an engine that can take requests before one that has as many as it should have
//! at one time (`max_concurrency_per_engine`), and that before one that pushed back a moment
//! ago; among those by `least_work` (tokens of work) or `round_robin` (longest not asked); equals
//! by chance. If all cool down, the one that is free soonest.
//!
//! Under `prefix_affinity` and `session_affinity` a request with a key goes to the key's own
//! engine first, while its load allows ([`affinity`](super::key_of)): that looks at every engine.
//!
//! Where enough was learned of the engines' latency ([`latency`](super::Latency)), a request
//! that is promised something goes, of the four with the least work, to the one where it is
//! likeliest to keep all of it; and one in a hundred goes anywhere, so that an engine which was
//! slow once is not avoided for ever.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::HeaderValue;

use super::engine::{Engine, Report};
use super::health::{Change, Checked};
use super::latency::{Aims, Latency, Lesson, Prediction, Situation};
use super::retry::{Attempts, Effect, Happened, Injection, Next};
use super::seats::{Evidence, Own, Promised, Whole};
use super::settings::{EngineAddress, Pool};
use super::view::PoolView;
use super::yard::{Shared, Yard};
use crate::locks::{Mutex, RwLock};
use crate::units::{Endpoint, EngineId, PoolId, Tick, Tokens};

/// All pools.
#[derive(Debug)]
pub struct Fleet {
    pools: RwLock<HashMap<PoolId, Arc<Yard>, ahash::RandomState>>,
    shared: Arc<Shared>,
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

impl Size {
    /// Nothing is believed to be longer than this, whatever a client states: one absurd cap
    /// would make every other request look like nothing.
    const LONGEST: Tokens = Tokens(1 << 20);

    fn believable(self) -> Size {
        Size { prefill: self.prefill.min(Size::LONGEST), decode: self.decode.min(Size::LONGEST) }
    }
}

/// What a request asks of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// Work that it brings.
    pub size: Size,
    /// What its class is promised.
    pub aims: Aims,
    /// What its class promises for the time to the end, where that is judged.
    pub whole: Option<Duration>,
    /// Time since its arrival.
    pub spent: Duration,
    /// Requests with the same key go to the same engine, while its load allows; 0: to any.
    pub key: u64,
}

impl From<Size> for Want {
    /// So much work, and nothing is promised.
    fn from(size: Size) -> Self {
        Want { size, ..Want::default() }
    }
}

/// An engine picked for a request.
#[derive(Debug)]
pub struct Choice {
    /// Its name.
    pub engine: EngineId,
    /// Where it is.
    pub address: Arc<EngineAddress>,
    /// What `Host` says to it.
    pub host: Option<HeaderValue>,
    /// Whether something may be injected into bodies for it, where the pool's settings say so.
    pub may_inject: bool,
    /// Whether it accepted an injection in the last 60 s.
    pub injection_proven: bool,
    /// Its share of the engine's work; given back when dropped. In a box, as it goes from hand to hand.
    pub work: Box<Work>,
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
    /// What it came into, and when.
    situation: Situation,
    dispatched: Tick,
    aims: Aims,
    whole: Option<Duration>,
    /// The engine's requests at the first token.
    batch: u32,
    latency: Arc<Mutex<Latency>>,
    is_over: bool,
}

/// An engine's numbers are shown for this long after it left.
pub const REMEMBERED: Duration = Duration::from_secs(600);

impl Fleet {
    /// A fleet without pools. `seed` decides between equals.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Fleet { pools: RwLock::default(), shared: Arc::default(), seed }
    }

    /// So many gateways share the engines. Holds for pools that are followed from now on.
    pub fn share_among(&self, gateways: NonZeroU32) {
        self.shared.gateways.store(gateways.get(), Ordering::Relaxed);
    }

    /// The settings name these pools. What is known of engines that stay is kept. A pool that
    /// is no longer named goes on serving the requests that arrived under the old settings.
    pub fn follow(&self, pools: &[Arc<Pool>], at: Tick) {
        let mut yards = self.pools.write();
        for pool in pools {
            let count = yards.len() as u64;
            let new = || Yard::new(pool.clone(), self.shared.clone(), self.seed ^ count);
            let yard = yards.entry(pool.id.clone()).or_insert_with(new);
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
        self.yard(pool).map(|yard| yard.inner.lock().available(at)).unwrap_or_default()
    }

    /// Requests of ours that the pool's engines should work on at one time: the sum over those
    /// that take requests, without the cooling ones, shared among the gateways; one at least.
    /// `None`: as many as there are.
    #[must_use]
    pub fn seats(&self, pool: &PoolId, at: Tick) -> Option<usize> {
        self.yard(pool)?.inner.lock().seats(at)
    }

    /// Grows whenever the seats of any pool have changed: one that was seen before says that
    /// [`Fleet::seats`] need not be asked again. What changes by time alone (an engine cooled
    /// down) shows when the pool is next touched, which its health checks do, too.
    #[must_use]
    pub fn seat_changes(&self) -> u64 {
        self.shared.seat_changes.load(Ordering::Acquire)
    }

    /// Whether the pool's retry budget has room for an attempt that failed in another pool;
    /// takes it.
    #[must_use]
    pub fn grants_retry(&self, pool: &PoolId, at: Tick) -> bool {
        self.yard(pool).is_some_and(|yard| yard.inner.lock().budget.draw(at))
    }

    /// Nobody of any pool could be asked. If breakers are all that keeps this pool's engines from
    /// it, the one that would be ready first may be tried at once: by one request, alone.
    pub fn may_try_early(&self, pool: &PoolId, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            yard.inner.lock().may_try_early(at);
        }
    }

    /// See [`Yard::choose`]; no request begins.
    #[must_use]
    pub fn choose(&self, pool: &PoolId, attempts: &mut Attempts, want: impl Into<Want>, at: Tick) -> Option<Choice> {
        self.yard(pool)?.choose(attempts, want.into(), false, at)
    }

    /// What a request of this size would see now at the pool's best engine; `None` while too
    /// little was learned of it ([`ENOUGH`](super::ENOUGH)), or where nobody takes requests.
    #[must_use]
    pub fn predict(&self, pool: &PoolId, size: Size, at: Tick) -> Option<Prediction> {
        self.yard(pool)?.inner.lock().predict(size.believable(), at)
    }

    /// Prompt tokens that each engine of a pool may have to read at one time, of requests of ours
    /// without a first token: `prefill_tokens_per_engine: auto`. `None`: no class of the pool is
    /// promised a first token, and nothing speaks against reading as much as comes.
    #[must_use]
    pub fn reading(&self, pool: &PoolId) -> Option<Tokens> {
        self.yard(pool)?.inner.lock().reading()
    }

    /// The classes that a pool serves are promised this: what `auto` keeps.
    pub fn hold_to(&self, pool: &PoolId, promised: Promised) {
        if let Some(yard) = self.yard(pool) {
            yard.inner.lock().promised = promised;
        }
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
        drop(inner);
        self.apply(pool, step.effects, at);
        step.next
    }

    /// An attempt succeeded: a 2xx whose first token came, or whose head was whole where the
    /// answer is no stream.
    pub fn succeeded(&self, pool: &PoolId, attempts: &mut Attempts, injection: Injection, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            self.succeeded_in(&yard, attempts, injection, at);
        }
    }

    /// The same, for who has the pool at hand.
    pub fn succeeded_in(&self, yard: &Yard, attempts: &mut Attempts, injection: Injection, at: Tick) {
        self.apply_in(yard, attempts.succeeded(injection), at);
    }

    /// The request is over without a further result: effects held back so far now count.
    pub fn settle(&self, pool: &PoolId, attempts: &mut Attempts, at: Tick) {
        if let Some(effect) = attempts.settled() {
            self.apply(pool, [effect], at);
        }
    }

    /// Notes effects on engines.
    pub fn apply(&self, pool: &PoolId, effects: impl IntoIterator<Item = Effect>, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            self.apply_in(&yard, effects, at);
        }
    }

    fn apply_in(&self, yard: &Yard, effects: impl IntoIterator<Item = Effect>, at: Tick) {
        for effect in effects {
            match effect {
                Effect::FaultElsewhere(pool, engine) => self.apply(&pool, [Effect::Fault(engine)], at),
                _ => yard.inner.lock().apply(&effect, at),
            }
        }
    }

    /// An answer came in a content coding nobody asked for: nothing is injected into bodies
    /// for this engine any more.
    pub fn answers_coded(&self, pool: &PoolId, engine: &EngineId) {
        self.with_engine(pool, engine, |engine| engine.answers_coded());
    }

    /// Whether any engine of this pool has served `model` on this path since the start.
    #[must_use]
    pub fn has_served(&self, pool: &PoolId, endpoint: Endpoint, model: &str) -> bool {
        self.yard(pool).is_some_and(|yard| yard.has_served(endpoint, model))
    }

    /// A health check of an engine ended.
    pub fn checked(&self, pool: &PoolId, engine: &EngineId, checked: Checked, at: Tick) -> Option<Change> {
        self.yard(pool)?.inner.lock().checked(engine, checked, at)
    }

    /// An engine's own metrics were read.
    pub fn reported(&self, pool: &PoolId, engine: &EngineId, report: Report, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            yard.inner.lock().reported(engine, report, at);
        }
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
    /// minutes, with their pool or by themselves.
    #[must_use]
    pub fn view(&self, at: Tick) -> Vec<PoolView> {
        let yards: Vec<_> = self.pools.read().values().cloned().collect();
        let mut views: Vec<_> = yards.iter().filter_map(|yard| yard.view(at)).collect();
        views.sort_by(|a, b| a.pool.cmp(&b.pool));
        views
    }

    /// A pool, for who asks it again and again.
    #[must_use]
    pub fn yard(&self, pool: &PoolId) -> Option<Arc<Yard>> {
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

impl Yard {
    /// Picks the best engine of the pool that these attempts have not tried, and gives it the
    /// work. `None`: no such engine can take requests. The retry budget grows with a request that
    /// `begins` in this pool.
    #[must_use]
    pub fn choose(self: &Arc<Self>, attempts: &mut Attempts, want: Want, begins: bool, at: Tick) -> Option<Choice> {
        let want = Want { size: want.size.believable(), ..want };
        let mut inner = self.inner.lock();
        if begins {
            inner.budget.request(at);
        }
        inner.wake(at);
        let place = inner.best_for(&want, attempts.tried())?;
        let engine = inner.engines[place].as_ref().expect("the tree names only places that are taken");
        let situation = engine.situation(want.size);
        let tries = inner.begin(place, want.size, at);
        let engine = inner.engines[place].as_ref().expect("it was there a line ago");
        attempts.begin(engine.id.clone());
        let work = Box::new(Work {
            yard: Arc::clone(self),
            place,
            left: want.size,
            tries,
            situation,
            dispatched: at,
            aims: want.aims,
            whole: want.whole,
            batch: situation.batch,
            latency: engine.latency.clone(),
            is_over: false,
        });
        let choice = Choice {
            engine: engine.id.clone(),
            address: engine.address.clone(),
            host: engine.host.clone(),
            may_inject: engine.may_inject(),
            injection_proven: engine.injection_proven(at),
            work,
        };
        drop(inner);
        Some(choice)
    }
}

impl Work {
    /// The first token came: the prompt has been read.
    pub fn first_token(&mut self) {
        let read = std::mem::take(&mut self.left.prefill);
        if read > Tokens::ZERO {
            let mut inner = self.yard.inner.lock();
            inner.lighten(self.place, Size { prefill: read, decode: Tokens::ZERO });
            self.batch = inner.requests_at(self.place);
        }
    }

    /// Its engine has served `model` on this path.
    pub fn note_served(&self, endpoint: Endpoint, model: &str) {
        self.yard.note_served(endpoint, model);
    }

    /// When the engine was picked.
    #[must_use]
    pub const fn dispatched(&self) -> Tick {
        self.dispatched
    }

    /// From dispatch until its engine should have read the prompt: by what was learned, before
    /// that by a guess.
    #[must_use]
    pub fn time_to_read(&self) -> Duration {
        self.latency.lock().time_to_read(&self.situation)
    }

    /// What was learned of its engine says about it; `None` while too little was.
    #[must_use]
    pub fn prediction(&self) -> Option<Prediction> {
        self.latency.lock().predict(&self.situation)
    }

    /// The answer ended, whole, and says something about its engine's latency. Learning happens
    /// outside of the pool's lock.
    #[expect(clippy::boxed_local, reason = "it is in its box already, and large")]
    pub fn learned(mut self: Box<Self>, lesson: &Lesson, at: Tick) {
        self.is_over = true;
        let mut inner = self.yard.inner.lock();
        let batch = f64::midpoint(f64::from(self.batch), f64::from(inner.requests_at(self.place)));
        inner.end(self.place, self.left, self.tries);
        if inner.finds_seats() {
            let promised = inner.promised;
            let length = self.whole.and_then(|limit| {
                inner.lengths.note(limit, lesson.further);
                Some((limit, inner.lengths.of(limit, promised.attainment)?))
            });
            let own = {
                let (latency, prompt) = (self.latency.lock(), self.situation.prompt);
                let whole = length.map(|(limit, length)| Whole { limit, length, alone: latency.alone(prompt, length) });
                Own { ttft: self.aims.ttft, reading: latency.reading(prompt), whole }
            };
            if let Some(strain) = promised.strain(lesson, &own) {
                let evidence = Evidence { dispatched: self.dispatched, batch, strain, promised: promised.attainment };
                inner.note(self.place, evidence, at);
            }
        }
        drop(inner);
        if let Some(ttft) = lesson.ttft {
            let mut latency = self.latency.lock();
            latency.first_token(&self.situation, ttft);
            if let Some(tpot) = lesson.tpot {
                latency.further_tokens(batch, tpot);
            }
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.is_over {
            self.yard.inner.lock().end(self.place, self.left, self.tries);
        }
    }
}

#[cfg(test)]
mod orders;
#[cfg(test)]
mod tests;

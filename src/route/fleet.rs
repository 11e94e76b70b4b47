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
//! Under `max_concurrency_per_engine: auto` the learned length of the engines' steps
//! ([`latency`](super::Latency)) says how many requests each may have, how fast prompts may come
//! ([`PrefillPace`]), and which engines are slower than the others. What was learned of an engine fades while
//! it is not asked, so that one which was slow once is asked again within a minute or two.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::HeaderValue;

use super::breaker::TenantKey;
use super::card::ModelCard;
use super::engine::{Engine, Reading, Report};
use super::health::{Change, Checked};
use super::latency::{Aims, Latency, Lesson, Prediction, Situation, Steps};
use super::retry::{Attempts, Effect, Happened, Injection, Next};
use super::seats::Promised;
use super::settings::{EngineAddress, Pool};
use super::signals::Signals;
use super::view::PoolView;
use super::yard::{Shared, Yard};
use crate::locks::{Mutex, RwLock};
use crate::units::{Endpoint, EngineId, PoolId, PrefillPace, Tick, Tokens};

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
    /// The pool has, or has had, other engines.
    pub has_neighbours: bool,
    /// Its share of the engine's work; given back when dropped. In a box, as it goes from hand to hand.
    pub work: Box<Work>,
}

/// A prompt as a prefix cache sees it.
#[derive(Debug)]
struct Prefix {
    /// All of its tokens.
    prompt: Tokens,
    blocks: Box<[u64]>,
    /// Tokens that its engine should have held of it.
    expected: Tokens,
}

/// One request's work at an engine. What is left of it leaves the engine's books when this
/// ends, however it ends.
#[derive(Debug)]
#[must_use]
pub struct Work {
    yard: Arc<Yard>,
    place: usize,
    left: Size,
    prefix: Prefix,
    tries: bool,
    /// What it came into, and when.
    situation: Situation,
    dispatched: Tick,
    aims: Aims,
    whole: Option<Duration>,
    /// From arrival to dispatch.
    spent: Duration,
    /// When the first token came, and what the engine had run until then.
    first: Option<(Tick, Reading)>,
    latency: Arc<Mutex<Latency>>,
    signals: Arc<Signals>,
    is_over: bool,
}

/// Further tokens of an answer in one piece that say something about the pace.
const LONG_WHOLE: u32 = 32;

/// Tokens of a block of a prompt, roughly.
const BLOCK_TOKENS: u64 = 128;

/// The share of answers whose length is usual.
const USUALLY: f64 = 0.9;

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
            yard.relist();
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
            yard.relist();
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

    /// How many engines a pool has.
    #[must_use]
    pub fn engine_count(&self, pool: &PoolId) -> usize {
        self.yard(pool).map_or(0, |yard| yard.inner.lock().present().count())
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

    /// See [`Yard::choose`]; no request begins.
    #[must_use]
    pub fn choose(&self, pool: &PoolId, attempts: &mut Attempts, want: impl Into<Want>, at: Tick) -> Option<Choice> {
        self.yard(pool)?.choose(attempts, want.into(), &[], false, at)
    }

    /// What a request of this size would see at the pool's best engine, once no prompt is ahead of its
    /// own; `None` while too little was learned of it ([`ENOUGH`](super::ENOUGH)), or where nobody takes
    /// requests.
    #[must_use]
    pub fn predict(&self, pool: &PoolId, size: Size, at: Tick) -> Option<Prediction> {
        self.yard(pool)?.inner.lock().predict(size.believable(), true, at)
    }

    /// Output tokens after the first that nine of ten answers stay within whose class promises this time
    /// to the end; `None` while too few were seen.
    #[must_use]
    pub fn usual_length(&self, pool: &PoolId, limit: Duration) -> Option<u64> {
        self.yard(pool)?.inner.lock().lengths.of(limit, USUALLY)
    }

    /// Tokens of a prompt that the engine which holds most of its beginning has still to compute.
    #[must_use]
    pub fn uncached(&self, pool: &PoolId, prompt: Tokens, blocks: &[u64]) -> Tokens {
        if blocks.is_empty() {
            return prompt;
        }
        self.yard(pool).map_or(prompt, |yard| yard.inner.lock().uncached(prompt, blocks))
    }

    /// How fast prompts may go to the engines of a pool: `prefill_tokens_per_engine: auto`. The seats of
    /// `auto` follow what was learned, too: to be asked now and then. `None`: nothing speaks against
    /// sending as much as comes.
    #[must_use]
    pub fn keep_pace(&self, pool: &PoolId, at: Tick) -> Option<PrefillPace> {
        self.yard(pool)?.inner.lock().keep_pace(at)
    }

    /// Engines are compared also where nobody queues: to be asked now and then.
    pub fn compare_engines(&self, at: Tick) {
        let yards: Vec<_> = self.pools.read().values().cloned().collect();
        for yard in yards {
            let mut inner = yard.inner.lock();
            if !inner.queues() {
                let _nobody_queues = inner.keep_pace(at);
            }
        }
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
        let rest = inner.rest(attempts, at);
        let step = attempts.next(happened, rest, at, &mut inner.budget);
        drop(inner);
        self.apply(pool, step.effects, attempts.tenant(), at);
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
        let tenant = attempts.tenant();
        self.apply_in(yard, attempts.succeeded(injection), tenant, at);
    }

    /// The request is over without a further result: effects held back so far now count.
    pub fn settle(&self, pool: &PoolId, attempts: &mut Attempts, at: Tick) {
        if let Some(effect) = attempts.settled() {
            self.apply(pool, [effect], attempts.tenant(), at);
        }
    }

    /// Notes effects of a tenant's request on engines.
    pub fn apply(&self, pool: &PoolId, effects: impl IntoIterator<Item = Effect>, tenant: TenantKey, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            self.apply_in(&yard, effects, tenant, at);
        }
    }

    fn apply_in(&self, yard: &Yard, effects: impl IntoIterator<Item = Effect>, tenant: TenantKey, at: Tick) {
        for effect in effects {
            match effect {
                Effect::FaultElsewhere(pool, engine) => self.apply(&pool, [Effect::Fault(engine)], tenant, at),
                _ => yard.inner.lock().apply(&effect, tenant, at),
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

    /// A health check of an engine ended. One that is going away loses the attempts of which nothing
    /// has come, as far as others can take them.
    pub fn checked(&self, pool: &PoolId, engine: &EngineId, checked: Checked, at: Tick) -> Option<Change> {
        let yard = self.yard(pool)?;
        let change = yard.inner.lock().checked(engine, checked, at);
        if checked.is_departure() {
            yard.departs(engine);
        }
        change
    }

    /// An engine's own metrics were read.
    pub fn reported(&self, pool: &PoolId, engine: &EngineId, report: Report, at: Tick) {
        if let Some(yard) = self.yard(pool) {
            yard.inner.lock().reported(engine, report, at);
        }
    }

    /// An engine named the models it serves.
    pub fn lists_models(&self, pool: &PoolId, engine: &EngineId, models: Vec<Arc<str>>) {
        let Some(yard) = self.yard(pool) else { return };
        let is_news = |engine: &mut Engine| {
            engine.asked_for_models = true;
            let is_news = *engine.models != *models;
            if is_news {
                engine.models = models.into();
            }
            is_news
        };
        if yard.with_engine(engine, is_news) == Some(true) {
            yard.relist();
        }
    }

    /// What an engine says of the models it serves, beside their names.
    pub fn describes_models(&self, pool: &PoolId, engine: &EngineId, cards: Vec<(Arc<str>, ModelCard)>) {
        self.with_engine(pool, engine, |engine| engine.cards = cards.into());
    }

    /// What the engines of a pool say of a model: the first that says anything, and the shortest
    /// context of all.
    #[must_use]
    pub fn model_card(&self, pool: &PoolId, model: &str) -> Option<ModelCard> {
        let yard = self.yard(pool)?;
        let inner = yard.inner.lock();
        let cards = inner.present().flat_map(|(_, engine)| engine.cards.iter());
        let cards = cards.filter(|(name, _)| **name == *model).map(|(_, card)| card.clone());
        cards.reduce(|first, other| {
            let shortest = first.max_model_len.into_iter().chain(other.max_model_len).min();
            ModelCard { max_model_len: shortest, ..first }
        })
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

    /// The same; `None` while some engine has not been asked yet.
    #[must_use]
    pub fn all_models(&self, pool: &PoolId) -> Option<Vec<Arc<str>>> {
        let yard = self.yard(pool)?;
        let inner = yard.inner.lock();
        let all_asked = inner.present().all(|(_, engine)| engine.asked_for_models);
        drop(inner);
        all_asked.then(|| self.models(pool))
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
        if let Some(yard) = self.yard(pool) {
            yard.with_engine(engine, note);
        }
    }
}

impl Yard {
    /// Picks the best engine of the pool that these attempts have not tried, and gives it the
    /// work. `None`: no such engine can take requests. The retry budget grows with a request that
    /// `begins` in this pool.
    #[must_use]
    ///
    /// `blocks` are the hashes of the prompt's beginning, where an engine's prefix cache may matter.
    pub fn choose(
        self: &Arc<Self>,
        attempts: &mut Attempts,
        want: Want,
        blocks: &[u64],
        begins: bool,
        at: Tick,
    ) -> Option<Choice> {
        let want = Want { size: want.size.believable(), ..want };
        let mut inner = self.inner.lock();
        if begins {
            inner.budget.request(at);
        }
        inner.wake(at);
        let place = inner.place_for(&want, blocks, attempts, at)?;
        let engine = inner.engines[place].as_mut().expect("the tree names only places that are taken");
        let expected = engine.prefixes.tokens(engine.prefixes.held(blocks)).min(want.size.prefill);
        let prompt = want.size.prefill;
        let size = Size { prefill: prompt.less(engine.cached(prompt, blocks)), ..want.size };
        let situation = engine.situation(size, at);
        let tries = inner.begin(place, size, at);
        let engine = inner.engines[place].as_ref().expect("it was there a line ago");
        attempts.begin(engine.id.clone());
        let work = Box::new(Work {
            yard: Arc::clone(self),
            place,
            left: size,
            prefix: Prefix { prompt, blocks: blocks.into(), expected },
            tries,
            situation,
            dispatched: at,
            aims: want.aims,
            whole: want.whole,
            spent: want.spent,
            first: None,
            latency: engine.latency.clone(),
            signals: engine.signals.clone(),
            is_over: false,
        });
        let choice = Choice {
            engine: engine.id.clone(),
            address: engine.address.clone(),
            host: engine.host.clone(),
            may_inject: engine.may_inject(),
            injection_proven: engine.injection_proven(at),
            has_neighbours: inner.places.len() > 1,
            work,
        };
        drop(inner);
        Some(choice)
    }
}

impl Work {
    /// The first token came: the prompt has been computed.
    pub fn first_token(&mut self, at: Tick) {
        if self.first.is_none() {
            let prompt = std::mem::take(&mut self.left.prefill);
            let mut inner = self.yard.inner.lock();
            let reading = inner.first_token(self.place, prompt, at);
            if !self.prefix.blocks.is_empty() {
                let rest = self.prefix.prompt.less(Tokens(BLOCK_TOKENS * self.prefix.blocks.len() as u64));
                inner.note_prefix(self.place, &self.prefix.blocks, rest, at);
            }
            drop(inner);
            self.first = reading.map(|reading| (at, reading));
        }
    }

    /// Its engine has served `model` on this path.
    pub fn note_served(&self, endpoint: Endpoint, model: &str) {
        self.yard.note_served(endpoint, model);
    }

    /// What is heard of its engine.
    #[must_use]
    pub const fn signals(&self) -> &Arc<Signals> {
        &self.signals
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
    pub fn learned(mut self: Box<Self>, lesson: &Lesson, at: Tick) {
        self.is_over = true;
        let mut inner = self.yard.inner.lock();
        let ran = inner.read_counters(self.place, at);
        inner.end(self.place, self.left, self.first.is_some(), self.tries);
        if inner.queues() {
            inner.note_outcome(lesson, &self.aims, self.whole, self.spent, at);
        }
        drop(inner);
        let further = self.pace_of(lesson, at).zip(self.first.zip(ran)).map(|(tpot, ((began, first), last))| {
            let elapsed = at.since(began).as_secs_f64();
            let steps = Steps {
                // Not the output tokens: they may be of several choices.
                further: (elapsed / tpot.as_secs_f64().max(1e-6)).round().max(1.0) as u64,
                batch: (last.sequences - first.sequences) / elapsed.max(1e-6),
                prompt: last.prompts - first.prompts,
            };
            (steps, tpot)
        });
        let times = (!self.prefix.blocks.is_empty()).then(|| {
            let latency = self.latency.lock();
            let miss = Situation { prompt: self.prefix.prompt, ..self.situation };
            let hit = Situation { prompt: self.prefix.prompt.less(self.prefix.expected), ..self.situation };
            latency.predict(&hit).zip(latency.predict(&miss)).map(|(hit, miss)| (hit.ttft, miss.ttft))
        });
        if further.is_none() && lesson.ttft.is_none() && times.is_none() {
            // A short answer in one piece.
            return;
        }
        let learn = |latency: &mut Latency| {
            if let Some(ttft) = lesson.ttft {
                latency.first_token(&self.situation, ttft);
            }
            if let Some((steps, tpot)) = &further {
                latency.further_tokens(steps, *tpot, at);
            }
        };
        let mut latency = self.latency.lock();
        learn(&mut latency);
        let is_known = latency.is_known();
        drop(latency);
        if is_known && times.is_none() {
            return;
        }
        let mut inner = self.yard.inner.lock();
        if !is_known {
            learn(&mut inner.common);
        }
        if times.is_some() {
            let (output, prefix) = (Tokens(lesson.further + 1), &self.prefix);
            inner.learned_prefix(
                self.place,
                prefix.expected,
                lesson.cached,
                times.flatten().zip(lesson.ttft),
                output,
                at,
            );
        }
    }
}

impl Work {
    /// Time per further token: as it was seen, or, of an answer that came in one piece and is long, what is
    /// left of its time when its prompt should have been computed.
    fn pace_of(&self, lesson: &Lesson, at: Tick) -> Option<Duration> {
        if lesson.ttft.is_some() {
            return lesson.tpot;
        }
        let further = u32::try_from(lesson.further).ok().filter(|further| *further >= LONG_WHOLE)?;
        Some(at.since(self.first?.0) / further)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.is_over {
            self.yard.inner.lock().end(self.place, self.left, self.first.is_some(), self.tries);
        }
    }
}

#[cfg(test)]
mod orders;
#[cfg(test)]
mod tests;

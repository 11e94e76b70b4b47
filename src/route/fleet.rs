//! All pools' engines, and the choice of one for a request.
//!
//! Lives as long as the process: reloads and DNS changes only say which engines belong to a pool, and the
//! state of an engine survives both. A removed engine takes no new requests and finishes its own. One
//! lock per pool, held briefly; choosing is O(log n) in the number of engines.
//!
//! Ranking: engines that can take requests before those at their concurrency limit
//! (`max_concurrency_per_engine`), and these before those cooling down after push-back; among equals by
//! `least_work` (tokens of work) or `round_robin` (longest unused), ties at random. If all cool down, the
//! one that is free soonest.
//!
//! Under `prefix_affinity` and `session_affinity` a request with a key goes to the key's own engine while
//! its load allows ([`affinity`](super::key_of)), which looks at every engine.
//!
//! Under `max_concurrency_per_engine: auto` the learned step time of the engines
//! ([`latency`](super::Latency)) determines each engine's seats, the prefill pace ([`PrefillPace`]), and
//! which engines are slower than others. What was learned of an engine fades while it is not used, so that
//! an engine that was slow once is used again within a minute or two.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::HeaderValue;

use super::breaker::TenantKey;
use super::concurrency::PoolTargets;
use super::engine::{CounterReading, Engine, EngineMetrics};
use super::health::{HealthChange, ProbeResult};
use super::latency::{DecodeSteps, Latency, LatencySample, LoadSnapshot, Prediction, SloTargets};
use super::model_card::ModelCard;
use super::other_gateways::EngineShare;
use super::pick_request::{PickRequest, WorkEstimate};
use super::pool::{FleetShared, Pool};
use super::retry::{AttemptOutcome, Attempts, EngineEffect, Injection, RetryDecision};
use super::settings::{EngineAddress, PoolSettings};
use super::signals::EngineSignals;
use super::status::{DrainError, EngineView, PoolView};
use crate::sync::{Mutex, RwLock};
use crate::types::{ApiPath, EngineId, PoolId, PrefillPace, Tick, Tokens};

/// All pools.
#[derive(Debug)]
pub struct Fleet {
    pools: RwLock<HashMap<PoolId, Arc<Pool>, ahash::RandomState>>,
    shared: Arc<FleetShared>,
    seed: u64,
}

/// The engine picked for a request.
#[derive(Debug)]
pub struct PickedEngine {
    /// Its name.
    pub engine: EngineId,
    /// Its address.
    pub address: Arc<EngineAddress>,
    /// The value of `Host`.
    pub host: Option<HeaderValue>,
    /// Whether bodies for it may be injected into, as far as the pool's settings say so.
    pub may_inject: bool,
    /// Whether it accepted an injection within 60 s.
    pub injection_proven: bool,
    /// Whether the pool has, or had, other engines.
    pub has_neighbours: bool,
    /// The request's share of its work; released when dropped. Boxed because it is passed on often.
    pub work: Box<WorkGuard>,
}

/// A prompt as seen by a prefix cache.
#[derive(Debug)]
struct PromptPrefixBlocks {
    /// All of its tokens.
    prompt: Tokens,
    blocks: Box<[u64]>,
    /// Tokens expected in the engine's cache.
    expected: Tokens,
}

/// One request's work at an engine. The rest is removed from the engine's load when this is dropped, however
/// the request ends.
#[derive(Debug)]
#[must_use]
pub struct WorkGuard {
    live_pool: Arc<Pool>,
    place: usize,
    left: WorkEstimate,
    prefix: PromptPrefixBlocks,
    tries: bool,
    /// Conditions at dispatch, and when.
    snapshot: LoadSnapshot,
    dispatched: Tick,
    targets: SloTargets,
    whole: Option<Duration>,
    /// From arrival to dispatch.
    spent: Duration,
    /// The first token's moment, and the engine's counters then.
    first: Option<(Tick, CounterReading)>,
    /// The engine's counters at dispatch.
    start: CounterReading,
    latency: Arc<Mutex<Latency>>,
    signals: Arc<EngineSignals>,
    is_over: bool,
}

/// Tokens after the first from which a non-streaming response says something about the pace.
const LONG_WHOLE: u32 = 32;

/// Approximate tokens per prompt block.
const BLOCK_TOKENS: u64 = 128;

/// Share of responses that defines the usual length.
const USUALLY: f64 = 0.9;

impl Fleet {
    /// A fleet without pools. `seed` decides ties.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Fleet { pools: RwLock::default(), shared: Arc::default(), seed }
    }

    /// Sets the number of gateways that share the engines, for pools applied from now on.
    pub fn share_among(&self, gateways: NonZeroU32) {
        self.shared.gateways.store(gateways.get(), Ordering::Relaxed);
    }

    /// Applies the configured pools. The state of remaining engines is kept. A removed pool keeps serving
    /// requests that arrived before.
    pub fn apply_settings(&self, pools: &[Arc<PoolSettings>], at: Tick) {
        let mut live_pools = self.pools.write();
        for pool in pools {
            let count = live_pools.len() as u64;
            let new = || Pool::new(pool.clone(), self.shared.clone(), self.seed ^ count);
            let live_pool = live_pools.entry(pool.id.clone()).or_insert_with(new);
            live_pool.inner.lock().apply_settings(pool.clone(), at);
            live_pool.relist();
        }
        for (id, live_pool) in live_pools.iter() {
            if !pools.iter().any(|pool| pool.id == *id) {
                live_pool.inner.lock().retired.get_or_insert(at);
            }
        }
        live_pools.retain(|_, live_pool| !live_pool.inner.lock().is_forgotten(at));
    }

    /// Sets a pool's engines after a DNS lookup.
    pub fn set_engines(&self, pool: &PoolId, addresses: Vec<EngineAddress>, at: Tick) {
        if let Some(live_pool) = self.live_pool(pool) {
            live_pool.inner.lock().set_engines(addresses, at);
            live_pool.relist();
        }
    }

    /// The present engines of a pool.
    #[must_use]
    pub fn engines(&self, pool: &PoolId) -> Vec<(EngineId, Arc<EngineAddress>)> {
        let list = |live_pool: Arc<Pool>| {
            let inner = live_pool.inner.lock();
            inner.present().map(|(_, engine)| (engine.id.clone(), engine.address.clone())).collect()
        };
        self.live_pool(pool).map(list).unwrap_or_default()
    }

    /// Number of engines of a pool.
    #[must_use]
    pub fn engine_count(&self, pool: &PoolId) -> usize {
        self.live_pool(pool).map_or(0, |live_pool| live_pool.inner.lock().present().count())
    }

    /// Number of engines that can take requests now, cooling ones included.
    #[must_use]
    pub fn available(&self, pool: &PoolId, at: Tick) -> usize {
        self.live_pool(pool).map(|live_pool| live_pool.inner.lock().available(at)).unwrap_or_default()
    }

    /// Seats of a pool for this gateway: the sum over available engines without cooling ones, divided among the
    /// gateways; at least one.
    /// `None` means unlimited.
    #[must_use]
    pub fn seats(&self, pool: &PoolId, at: Tick) -> Option<usize> {
        self.live_pool(pool)?.inner.lock().seats(at)
    }

    /// Changes whenever the seats of any pool change, so that [`Fleet::seats`] need not be called for an equal
    /// value. A change with time alone (an engine cooled down) shows when the pool is next used, also by health
    /// checks.
    #[must_use]
    pub fn seat_changes(&self) -> u64 {
        self.shared.seat_changes.load(Ordering::Acquire)
    }

    /// Takes a retry for an attempt that failed in another pool from this pool's budget, if there is
    /// room.
    #[must_use]
    pub fn grants_retry(&self, pool: &PoolId, at: Tick) -> bool {
        self.live_pool(pool).is_some_and(|live_pool| live_pool.inner.lock().budget.draw(at))
    }

    /// See [`Pool::choose`]; does not count as a new request.
    #[must_use]
    pub fn choose(
        &self,
        pool: &PoolId,
        attempts: &mut Attempts,
        pick: impl Into<PickRequest>,
        at: Tick,
    ) -> Option<PickedEngine> {
        self.live_pool(pool)?.choose(attempts, pick.into(), &[], false, at)
    }

    /// Predicted latency of a request of this size at the pool's best engine without other prompts ahead;
    /// `None` with too little data ([`ENOUGH`](super::ENOUGH)) or without an available
    /// engine.
    #[must_use]
    pub fn predict(&self, pool: &PoolId, size: WorkEstimate, at: Tick) -> Option<Prediction> {
        self.live_pool(pool)?.inner.lock().predict(size.believable(), true, at)
    }

    /// Output tokens after the first that 90 % of responses with this E2E target stay within; `None` with too
    /// little data.
    #[must_use]
    pub fn usual_length(&self, pool: &PoolId, limit: Duration) -> Option<u64> {
        self.live_pool(pool)?.inner.lock().lengths.of(limit, USUALLY)
    }

    /// Prompt tokens that the engine with most of the prefix cached must still compute.
    #[must_use]
    pub fn uncached(&self, pool: &PoolId, prompt: Tokens, blocks: &[u64]) -> Tokens {
        if blocks.is_empty() {
            return prompt;
        }
        self.live_pool(pool).map_or(prompt, |live_pool| live_pool.inner.lock().uncached(prompt, blocks))
    }

    /// The prefill pace of a pool (`prefill_tokens_per_engine: auto`); also updates the seats under `auto`. To
    /// be called periodically. `None` means
    /// unlimited.
    #[must_use]
    pub fn update_pace(&self, pool: &PoolId, at: Tick) -> Option<PrefillPace> {
        self.live_pool(pool)?.inner.lock().update_pace(at)
    }

    /// This gateway's requests at the engines of a pool, for its report to the other gateways.
    #[must_use]
    pub fn shares(&self, pool: &PoolId, at: Tick) -> Vec<EngineShare> {
        self.live_pool(pool).map_or_else(Vec::new, |live_pool| live_pool.inner.lock().shares(at))
    }

    /// Takes what another gateway has at the engines of a pool; it counts until then.
    pub fn heard(&self, pool: &PoolId, gateway: u64, shares: &[EngineShare], until: Tick, at: Tick) {
        if let Some(live_pool) = self.live_pool(pool) {
            live_pool.inner.lock().heard(gateway, shares, until, at);
        }
    }

    /// Compares engines of pools without a queue as well. To be called periodically.
    pub fn compare_engines(&self, at: Tick) {
        let live_pools: Vec<_> = self.pools.read().values().cloned().collect();
        for live_pool in live_pools {
            let mut inner = live_pool.inner.lock();
            if !inner.queues() {
                let _nobody_queues = inner.update_pace(at);
            }
        }
    }

    /// Sets the objectives that `auto` keeps in a pool.
    pub fn set_targets(&self, pool: &PoolId, targets: PoolTargets) {
        if let Some(live_pool) = self.live_pool(pool) {
            live_pool.inner.lock().targets = targets;
        }
    }

    /// Decides what follows a failed attempt, using the pool's retry budget, and applies effects on
    /// engines.
    #[must_use]
    pub fn failed(&self, pool: &PoolId, attempts: &mut Attempts, outcome: AttemptOutcome, at: Tick) -> RetryDecision {
        let Some(live_pool) = self.live_pool(pool) else { return attempts.nothing_left() };
        let mut inner = live_pool.inner.lock();
        inner.wake(at);
        let rest = inner.rest(attempts, at);
        let step = attempts.next(outcome, rest, at, &mut inner.budget);
        drop(inner);
        self.apply(pool, step.effects, attempts.tenant(), at);
        step.next
    }

    /// Records a successful attempt: a 2xx with its first token, or with a complete head if the response is not
    /// a stream.
    pub fn succeeded(&self, pool: &PoolId, attempts: &mut Attempts, injection: Injection, at: Tick) {
        if let Some(live_pool) = self.live_pool(pool) {
            self.succeeded_in(&live_pool, attempts, injection, at);
        }
    }

    /// The same with the pool at hand.
    pub fn succeeded_in(&self, live_pool: &Pool, attempts: &mut Attempts, injection: Injection, at: Tick) {
        let tenant = attempts.tenant();
        match attempts.succeeds_plainly(injection) {
            Some(engine) => live_pool.inner.lock().well(engine, tenant, at),
            None => self.apply_in(live_pool, attempts.succeeded(injection), tenant, at),
        }
    }

    /// The request ended without a further attempt: held-back effects are applied.
    pub fn settle(&self, pool: &PoolId, attempts: &mut Attempts, at: Tick) {
        if let Some(effect) = attempts.settled() {
            self.apply(pool, [effect], attempts.tenant(), at);
        }
    }

    /// Applies effects of a tenant's request on engines.
    pub fn apply(&self, pool: &PoolId, effects: impl IntoIterator<Item = EngineEffect>, tenant: TenantKey, at: Tick) {
        if let Some(live_pool) = self.live_pool(pool) {
            self.apply_in(&live_pool, effects, tenant, at);
        }
    }

    fn apply_in(&self, live_pool: &Pool, effects: impl IntoIterator<Item = EngineEffect>, tenant: TenantKey, at: Tick) {
        for effect in effects {
            match effect {
                EngineEffect::FaultElsewhere(pool, engine) => {
                    self.apply(&pool, [EngineEffect::Fault(engine)], tenant, at)
                }
                _ => live_pool.inner.lock().apply(&effect, tenant, at),
            }
        }
    }

    /// The engine sent an unrequested content coding, so bodies for it are no longer injected
    /// into.
    pub fn mark_compressed(&self, pool: &PoolId, engine: &EngineId) {
        self.with_engine(pool, engine, |engine| engine.mark_compressed());
    }

    /// Whether any engine of this pool has served `model` on this path since start.
    #[must_use]
    pub fn has_served(&self, pool: &PoolId, endpoint: ApiPath, model: &str) -> bool {
        self.live_pool(pool).is_some_and(|live_pool| live_pool.has_served(endpoint, model))
    }

    /// Applies a health check. An engine that is going away loses attempts without a response, as far as others
    /// can take them.
    pub fn checked(&self, pool: &PoolId, engine: &EngineId, checked: ProbeResult, at: Tick) -> Option<HealthChange> {
        let live_pool = self.live_pool(pool)?;
        let change = live_pool.inner.lock().checked(engine, checked, at);
        if checked.is_departure() {
            live_pool.departs(engine);
        }
        change
    }

    /// Applies an engine's metrics.
    pub fn reported(&self, pool: &PoolId, engine: &EngineId, report: EngineMetrics, at: Tick) {
        if let Some(live_pool) = self.live_pool(pool) {
            live_pool.inner.lock().reported(engine, report, at);
        }
    }

    /// Applies an engine's list of models.
    pub fn lists_models(&self, pool: &PoolId, engine: &EngineId, models: Vec<Arc<str>>) {
        let Some(live_pool) = self.live_pool(pool) else { return };
        let is_news = |engine: &mut Engine| {
            engine.asked_for_models = true;
            let is_news = *engine.models != *models;
            if is_news {
                engine.models = models.into();
            }
            is_news
        };
        if live_pool.with_engine(engine, is_news) == Some(true) {
            live_pool.relist();
        }
    }

    /// Applies the details of an engine's models.
    pub fn describes_models(&self, pool: &PoolId, engine: &EngineId, cards: Vec<(Arc<str>, ModelCard)>) {
        self.with_engine(pool, engine, |engine| engine.cards = cards.into());
    }

    /// Details of a model: the first reported values, and the shortest context of
    /// all.
    #[must_use]
    pub fn model_card(&self, pool: &PoolId, model: &str) -> Option<ModelCard> {
        let live_pool = self.live_pool(pool)?;
        let inner = live_pool.inner.lock();
        let cards = inner.present().flat_map(|(_, engine)| engine.cards.iter());
        let cards = cards.filter(|(name, _)| **name == *model).map(|(_, card)| card.clone());
        cards.reduce(|first, other| {
            let shortest = first.max_model_len.into_iter().chain(other.max_model_len).min();
            ModelCard { max_model_len: shortest, ..first }
        })
    }

    /// The models listed by a pool's engines, sorted, without duplicates.
    #[must_use]
    pub fn models(&self, pool: &PoolId) -> Vec<Arc<str>> {
        let list = |live_pool: Arc<Pool>| {
            let inner = live_pool.inner.lock();
            let mut models: Vec<_> = inner.present().flat_map(|(_, engine)| engine.models.iter().cloned()).collect();
            models.sort();
            models.dedup();
            models
        };
        self.live_pool(pool).map(list).unwrap_or_default()
    }

    /// The same; `None` until every engine has been asked.
    #[must_use]
    pub fn all_models(&self, pool: &PoolId) -> Option<Vec<Arc<str>>> {
        let live_pool = self.live_pool(pool)?;
        let inner = live_pool.inner.lock();
        let all_asked = inner.present().all(|(_, engine)| engine.asked_for_models);
        drop(inner);
        all_asked.then(|| self.models(pool))
    }

    /// An operator drains an engine, for so long or until it is put back: it takes no new request and
    /// finishes what it has. Stands over reloads and health checks, until the engine has left its pool for
    /// [`REMEMBERED`](super::REMEMBERED).
    ///
    /// # Errors
    /// There is no such engine; or no other one of its pool takes requests, and `may_empty` is not set.
    pub fn drain(
        &self,
        pool: &PoolId,
        engine: &EngineId,
        length: Option<Duration>,
        may_empty: bool,
        at: Tick,
    ) -> Result<EngineView, DrainError> {
        self.live_pool(pool).ok_or(DrainError::UnknownPool)?.drain(engine, length, may_empty, at)
    }

    /// An operator puts a drained engine back.
    ///
    /// # Errors
    /// There is no such engine.
    pub fn put_back(&self, pool: &PoolId, engine: &EngineId, at: Tick) -> Result<EngineView, DrainError> {
        self.live_pool(pool).ok_or(DrainError::UnknownPool)?.put_back(engine, at)
    }

    /// The status of all pools and engines, by name. Removed engines stay for ten minutes.
    #[must_use]
    pub fn view(&self, at: Tick) -> Vec<PoolView> {
        let live_pools: Vec<_> = self.pools.read().values().cloned().collect();
        let mut views: Vec<_> = live_pools.iter().filter_map(|live_pool| live_pool.view(at)).collect();
        views.sort_by(|a, b| a.pool.cmp(&b.pool));
        views
    }

    /// A pool, for repeated use.
    #[must_use]
    pub fn live_pool(&self, pool: &PoolId) -> Option<Arc<Pool>> {
        self.pools.read().get(pool).cloned()
    }

    fn with_engine(&self, pool: &PoolId, engine: &EngineId, note: impl FnOnce(&mut Engine)) {
        if let Some(live_pool) = self.live_pool(pool) {
            live_pool.with_engine(engine, note);
        }
    }
}

impl Pool {
    /// Picks the best engine that these attempts have not tried, and assigns the work. `None` if no such engine
    /// can take requests. `begins`: a new request in this pool, which extends its retry
    /// budget.
    #[must_use]
    ///
    /// `blocks`: hashes of the prompt's blocks, if a prefix cache may matter.
    pub fn choose(
        self: &Arc<Self>,
        attempts: &mut Attempts,
        pick: PickRequest,
        blocks: &[u64],
        begins: bool,
        at: Tick,
    ) -> Option<PickedEngine> {
        let pick = PickRequest { size: pick.size.believable(), ..pick };
        let mut inner = self.inner.lock();
        if begins {
            inner.budget.request(at);
        }
        inner.wake(at);
        let place = inner.place_for(&pick, blocks, attempts, at)?;
        let engine = inner.engines[place].as_mut().expect("the tree names only places that are taken");
        let expected = engine.prefixes.tokens(engine.prefixes.held(blocks)).min(pick.size.prefill);
        let prompt = pick.size.prefill;
        let size = WorkEstimate { prefill: prompt.less(engine.cached(prompt, blocks)), ..pick.size };
        let snapshot = engine.snapshot(size, at);
        let start = engine.counters.read(at);
        let tries = inner.begin(place, size, at);
        let engine = inner.engines[place].as_ref().expect("it was there a line ago");
        attempts.begin(engine.id.clone());
        let work = Box::new(WorkGuard {
            live_pool: Arc::clone(self),
            place,
            left: size,
            prefix: PromptPrefixBlocks { prompt, blocks: blocks.into(), expected },
            tries,
            snapshot,
            dispatched: at,
            targets: pick.targets,
            whole: pick.whole,
            spent: pick.spent,
            first: None,
            start,
            latency: engine.latency.clone(),
            signals: engine.signals.clone(),
            is_over: false,
        });
        let choice = PickedEngine {
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

impl WorkGuard {
    /// Records the first token, so the prompt is computed.
    pub fn first_token(&mut self, at: Tick) {
        if self.first.is_none() {
            let prompt = std::mem::take(&mut self.left.prefill);
            let mut inner = self.live_pool.inner.lock();
            let reading = inner.first_token(self.place, prompt, at);
            if !self.prefix.blocks.is_empty() {
                let rest = self.prefix.prompt.less(Tokens(BLOCK_TOKENS * self.prefix.blocks.len() as u64));
                inner.note_prefix(self.place, &self.prefix.blocks, rest, at);
            }
            drop(inner);
            self.first = reading.map(|reading| (at, reading));
        }
    }

    /// Records that its engine has served `model` on this path.
    pub fn note_served(&self, endpoint: ApiPath, model: &str) {
        self.live_pool.note_served(endpoint, model);
    }

    /// Signals of its engine.
    #[must_use]
    pub const fn signals(&self) -> &Arc<EngineSignals> {
        &self.signals
    }

    /// When the engine was picked.
    #[must_use]
    pub const fn dispatched(&self) -> Tick {
        self.dispatched
    }

    /// Estimated time from dispatch to the end of prefill: learned, or a default
    /// before.
    #[must_use]
    pub fn time_to_read(&self) -> Duration {
        self.latency.lock().time_to_read(&self.snapshot)
    }

    /// The learned prediction for it; `None` with too little data.
    #[must_use]
    pub fn prediction(&self) -> Option<Prediction> {
        self.latency.lock().predict(&self.snapshot)
    }

    /// Learns from a complete response, outside of the pool's
    /// lock.
    pub fn learned(mut self: Box<Self>, sample: &LatencySample, at: Tick) {
        self.is_over = true;
        let mut inner = self.live_pool.inner.lock();
        let ran = inner.read_counters(self.place, at);
        inner.end(self.place, self.left, self.first.is_some(), self.tries);
        let queues = inner.queues();
        if queues {
            inner.note_outcome(sample, &self.targets, self.whole, self.spent, at);
        }
        let further = self.pace_of(sample, at).zip(self.first.zip(ran)).map(|(tpot, ((began, first), last))| {
            let elapsed = at.since(began).as_secs_f64();
            let steps = DecodeSteps {
                // Derived from times, because output tokens may be of several choices.
                further: (elapsed / tpot.as_secs_f64().max(1e-6)).round().max(1.0) as u64,
                batch: (last.sequences - first.sequences) / elapsed.max(1e-6),
                prompt: last.prompts - first.prompts,
            };
            (steps, tpot)
        });
        let prefill_time = sample.prefill_time();
        inner.note_answer(self.place, &self.snapshot, prefill_time, further);
        drop(inner);
        let times = (!self.prefix.blocks.is_empty()).then(|| {
            let latency = self.latency.lock();
            let miss = LoadSnapshot { prompt: self.prefix.prompt, ..self.snapshot };
            let hit = LoadSnapshot { prompt: self.prefix.prompt.less(self.prefix.expected), ..self.snapshot };
            latency.predict(&hit).zip(latency.predict(&miss)).map(|(hit, miss)| (hit.ttft, miss.ttft))
        });
        let is_whole = queues && !sample.has_media && sample.ttft.is_none() && further.is_none();
        let whole = sample.e2e.filter(|_| is_whole).zip(ran).map(|(e2e, last)| {
            let steps = DecodeSteps {
                further: sample.further,
                batch: (last.sequences - self.start.sequences) / at.since(self.dispatched).as_secs_f64().max(1e-6),
                prompt: (last.prompts - self.start.prompts - self.snapshot.prompt.0 as f64).max(0.0),
            };
            (steps, e2e)
        });
        if further.is_none() && prefill_time.is_none() && times.is_none() && whole.is_none() {
            return;
        }
        let learn = |latency: &mut Latency| {
            if let Some(ttft) = prefill_time {
                latency.first_token(&self.snapshot, ttft);
            }
            if let Some((steps, tpot)) = &further {
                latency.further_tokens(steps, *tpot, at);
            }
            if let Some((steps, e2e)) = &whole {
                latency.whole_answer(&self.snapshot, steps, *e2e, at);
            }
        };
        let mut latency = self.latency.lock();
        learn(&mut latency);
        let is_known = latency.is_known();
        drop(latency);
        if is_known && times.is_none() {
            return;
        }
        let mut inner = self.live_pool.inner.lock();
        if !is_known {
            learn(&mut inner.common);
        }
        if times.is_some() {
            let (output, prefix) = (Tokens(sample.further + 1), &self.prefix);
            inner.learned_prefix(
                self.place,
                prefix.expected,
                sample.cached,
                times.flatten().zip(prefill_time),
                output,
                at,
            );
        }
    }
}

impl WorkGuard {
    /// TPOT as observed; for a long non-streaming response the time after its estimated prefill, per
    /// token, unless that estimate leaves out a part of the prompt.
    fn pace_of(&self, sample: &LatencySample, at: Tick) -> Option<Duration> {
        if sample.ttft.is_some() {
            return sample.tpot;
        }
        let is_long = |further: &u32| *further >= LONG_WHOLE && !sample.has_media;
        let further = u32::try_from(sample.further).ok().filter(is_long)?;
        Some(at.since(self.first?.0) / further)
    }
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        if !self.is_over {
            self.live_pool.inner.lock().end(self.place, self.left, self.first.is_some(), self.tries);
        }
    }
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;

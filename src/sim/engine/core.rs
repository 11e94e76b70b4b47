//! Scheduler of a simulated engine: a pure state machine of steps. Sans-IO.
//!
//! Modelled on vLLM's scheduler. Time passes in steps; a step is composed when the previous one ends, gives
//! every decoding request one token, and spends the rest of its token budget on chunked prefill, running
//! requests first, then waiting ones. A request is admitted while the batch has a seat and the KV cache has
//! room; if running requests exhaust the cache, the last of them is preempted and recomputes its context
//! later. A step's duration grows with its prefill, the number of decoding requests and their
//! context.
//!
//! Moments are arguments and randomness comes from the seed: equal calls give equal traces.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

mod leaps;

pub use self::leaps::LeapingEngine;
pub use super::prefix::BLOCK;
use super::prefix::PrefixCache;
use crate::types::Tick;

/// Properties of an engine. The defaults resemble an 8B model on one 80 GB GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSpec {
    /// Most requests in a batch (`max_num_seqs`).
    pub max_running: usize,
    /// Token budget of a step (`max_num_batched_tokens`).
    pub step_tokens: u64,
    /// Size of the KV cache, tokens.
    pub kv_tokens: u64,
    /// Longest prompt plus output.
    pub max_model_len: u64,
    /// Most waiting requests (at least 1, because each passes through the queue); more are rejected. `None`
    /// means unlimited.
    pub max_waiting: Option<usize>,
    /// Order of admission.
    pub order: AdmissionOrder,
    /// Duration of an empty step: reading the weights once.
    pub step_base: Duration,
    /// Per decoding request.
    pub per_decode: Duration,
    /// Per request in prefill.
    pub per_prefill: Duration,
    /// Per token of prefill.
    pub per_prefill_token: Duration,
    /// Context length at which a token of prefill takes twice as long, at twice the length three times. `None`:
    /// independent of context.
    pub attention_doubles_at: Option<u64>,
    /// Per context token of a decoding request.
    pub per_context_token: Duration,
    /// Whether cached prompt blocks skip prefill.
    pub prefix_caching: bool,
    /// Most tokens per decoding request and step; above 1 for speculative decoding.
    pub speculative: u64,
    /// Relative uniform variation of step durations.
    pub jitter: f64,
    /// Divisor of all durations: 2 is twice as fast.
    pub speed: f64,
}

/// Order of admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdmissionOrder {
    /// First come, first served.
    #[default]
    Arrival,
    /// Lower `priority` first, then first come, first served.
    Priority,
}

impl Default for EngineSpec {
    fn default() -> Self {
        EngineSpec {
            max_running: 128,
            step_tokens: 2048,
            kv_tokens: 320_000,
            max_model_len: 32_768,
            max_waiting: None,
            order: AdmissionOrder::Arrival,
            step_base: Duration::from_micros(7_000),
            per_decode: Duration::from_micros(50),
            per_prefill: Duration::ZERO,
            per_prefill_token: Duration::from_micros(60),
            attention_doubles_at: None,
            per_context_token: Duration::from_nanos(60),
            prefix_caching: true,
            speculative: 1,
            jitter: 0.05,
            speed: 1.0,
        }
    }
}

impl EngineSpec {
    /// Blocks of the KV cache.
    fn blocks(&self) -> u64 {
        (self.kv_tokens / BLOCK).max(1)
    }

    /// Mean cost of a token of prefill in this range of context, relative to the start of a
    /// prompt.
    fn attention(&self, from: u64, to: u64) -> f64 {
        let middle = from.midpoint(to) as f64;
        self.attention_doubles_at.map_or(1.0, |doubles| 1.0 + middle / doubles.max(1) as f64)
    }
}

/// One sequence to generate: a choice of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Job {
    /// Prompt tokens.
    pub prompt: u64,
    /// Tokens it will generate, at least 1.
    pub output: u64,
    /// The request's priority under [`AdmissionOrder::Priority`]; lower is earlier.
    pub priority: i64,
    /// Hashes of the whole prompt blocks, each covering all before it, followed by those of the
    /// output.
    pub blocks: Vec<u64>,
}

/// Identifies a job within its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(u64);

/// The waiting queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// Tokens gained by a job.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenGain {
    /// The job.
    pub job: JobId,
    /// The end of the step.
    pub at: Tick,
    /// Number of tokens.
    pub tokens: u64,
    /// The job's summary, if it is finished.
    pub done: Option<SequenceResult>,
}

/// Summary of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceResult {
    /// Submission.
    pub arrived: Tick,
    /// Start of the first step that worked on it.
    pub started: Tick,
    /// End of the step with its first token.
    pub first_token: Tick,
    /// End of the step with its last token.
    pub ended: Tick,
    /// Prompt tokens.
    pub prompt: u64,
    /// Generated tokens.
    pub output: u64,
    /// Prompt tokens from the prefix cache.
    pub cached: u64,
}

/// An engine's gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    /// Running jobs.
    pub running: usize,
    /// Waiting jobs.
    pub waiting: usize,
    /// Share of the KV cache held by running jobs.
    pub kv_usage: f64,
    /// Prompt tokens computed or cached, cumulative.
    pub prompt_tokens: u64,
    /// Generated tokens, cumulative.
    pub generated_tokens: u64,
    /// Prompt tokens looked up in the prefix cache, cumulative.
    pub prefix_queries: u64,
    /// Prompt tokens found there, cumulative.
    pub prefix_hits: u64,
    /// Preemptions, cumulative.
    pub preemptions: u64,
}

/// Order of admission: priority (0 under [`AdmissionOrder::Arrival`]), then arrival. A preempted job keeps its
/// position.
type AdmissionKey = (i64, u64);

struct Sequence {
    id: JobId,
    job: Job,
    /// Context in the cache.
    computed: u64,
    generated: u64,
    cached: u64,
    /// Leading blocks shared through the prefix cache.
    shared: usize,
    arrived: Tick,
    started: Option<Tick>,
    first_token: Option<Tick>,
}

impl Sequence {
    /// Context that must be cached before the next token.
    fn context(&self) -> u64 {
        self.job.prompt + self.generated
    }

    /// Blocks not shared.
    fn own_blocks(&self) -> u64 {
        blocks(self.computed) - self.shared as u64
    }

    fn is_decoding(&self) -> bool {
        self.generated > 0 && self.computed + 1 == self.context()
    }
}

fn blocks(tokens: u64) -> u64 {
    tokens.div_ceil(BLOCK)
}

struct RunningStep {
    ends: Tick,
    /// Jobs of the step, with their context afterwards.
    work: Vec<(AdmissionKey, u64)>,
}

/// One engine.
pub struct EngineCore {
    shape: EngineSpec,
    chance: StdRng,
    arrivals: u64,
    waiting: BTreeMap<AdmissionKey, Sequence>,
    running: BTreeMap<AdmissionKey, Sequence>,
    places: BTreeMap<JobId, AdmissionKey>,
    /// Unshared blocks of running requests; shared ones are in `prefixes`.
    own_blocks: u64,
    prefixes: PrefixCache,
    step: Option<RunningStep>,
    counts: Gauges,
}

impl EngineCore {
    /// An idle engine.
    #[must_use]
    pub fn new(shape: EngineSpec, seed: u64) -> Self {
        EngineCore {
            shape,
            chance: StdRng::seed_from_u64(seed),
            arrivals: 0,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            places: BTreeMap::new(),
            own_blocks: 0,
            prefixes: PrefixCache::default(),
            step: None,
            counts: Gauges::default(),
        }
    }

    /// Its properties.
    #[must_use]
    pub const fn shape(&self) -> &EngineSpec {
        &self.shape
    }

    /// Whether another job would be rejected.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.shape.max_waiting.is_some_and(|most| self.waiting.len() >= most.max(1))
    }

    /// Queues a job; an idle engine starts a step at once.
    ///
    /// # Errors
    /// [`QueueFull`] if the queue is full.
    pub fn submit(&mut self, job: Job, at: Tick) -> Result<JobId, QueueFull> {
        if self.is_busy() {
            return Err(QueueFull);
        }
        let id = self.enqueue(job, at);
        self.begin(at);
        Ok(id)
    }

    /// Queues a job regardless of the queue's length and starts no step, because a request's choices are queued
    /// together. Prompt and output are clipped to the model's and the cache's limits, so that every job can
    /// end.
    pub fn enqueue(&mut self, mut job: Job, at: Tick) -> JobId {
        let longest = self.shape.max_model_len.min(self.capacity() * BLOCK).max(2);
        job.prompt = job.prompt.clamp(1, longest - 1);
        job.output = job.output.clamp(1, longest - job.prompt);
        job.blocks.truncate(((job.prompt + job.output) / BLOCK) as usize);
        self.arrivals += 1;
        let id = JobId(self.arrivals);
        let priority = if self.shape.order == AdmissionOrder::Priority { job.priority } else { 0 };
        let place = (priority, self.arrivals);
        let sequence = Sequence {
            id,
            job,
            computed: 0,
            generated: 0,
            cached: 0,
            shared: 0,
            arrived: at,
            started: None,
            first_token: None,
        };
        self.places.insert(id, place);
        self.waiting.insert(place, sequence);
        id
    }

    /// Starts a step if none runs.
    pub fn begin(&mut self, at: Tick) {
        if self.step.is_none() {
            self.compose(at);
        }
    }

    /// Sets the speed relative to its properties, from the next step on.
    pub const fn set_speed(&mut self, speed: f64) {
        self.shape.speed = speed;
    }

    /// Removes a job; its seat and cache are free from the next step on.
    pub fn cancel(&mut self, id: JobId) {
        let Some(place) = self.places.remove(&id) else { return };
        self.waiting.remove(&place);
        if let Some(mut sequence) = self.running.remove(&place) {
            self.give_up_room(&mut sequence);
        }
    }

    /// When [`EngineCore::advance`] must be called.
    #[must_use]
    pub fn next_moment(&self) -> Option<Tick> {
        self.step.as_ref().map(|step| step.ends)
    }

    /// Ends every step due by `at` and reports the gains.
    pub fn advance(&mut self, at: Tick, gains: &mut Vec<TokenGain>) {
        while let Some(step) = self.step.take_if(|step| step.ends <= at) {
            for (place, computed) in step.work {
                self.end_of_step(place, computed, step.ends, gains);
            }
            self.compose(step.ends);
        }
    }

    /// The engine's gauges.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let kv_usage = self.blocks_held() as f64 / self.capacity() as f64;
        Gauges { running: self.running.len(), waiting: self.waiting.len(), kv_usage, ..self.counts }
    }

    fn capacity(&self) -> u64 {
        self.shape.blocks()
    }

    /// Blocks held by running requests, counted once.
    fn blocks_held(&self) -> u64 {
        self.own_blocks + self.prefixes.used()
    }

    /// Blocks not held by running requests.
    fn free_blocks(&self) -> u64 {
        self.capacity().saturating_sub(self.blocks_held())
    }

    /// Releases the blocks of a request that leaves the batch.
    fn give_up_room(&mut self, sequence: &mut Sequence) {
        self.own_blocks -= sequence.own_blocks();
        self.prefixes.leave(&sequence.job.blocks[..sequence.shared]);
        (sequence.computed, sequence.shared) = (0, 0);
    }

    fn end_of_step(&mut self, place: AdmissionKey, computed: u64, at: Tick, gains: &mut Vec<TokenGain>) {
        // Cancelled during the step.
        let Some(sequence) = self.running.get_mut(&place) else { return };
        let (job, whole) = (sequence.id, computed >= sequence.context());
        debug_assert_eq!(sequence.computed, computed, "the room was taken when the step was composed");
        if self.shape.prefix_caching {
            let whole_blocks = sequence.job.blocks.len().min((computed / BLOCK) as usize);
            let new = &sequence.job.blocks[sequence.shared..whole_blocks];
            self.prefixes.take(new);
            self.own_blocks -= new.len() as u64;
            sequence.shared = whole_blocks;
        }
        if !whole {
            return;
        }
        let was_decoding = sequence.generated > 0;
        let free = self.shape.blocks().saturating_sub(self.own_blocks + self.prefixes.used());
        let most = if was_decoding { self.shape.speculative.max(1) } else { 1 };
        let lucky = if most > 1 { self.chance.random_range(1..=most) } else { 1 };
        // Tokens of a speculative step beyond the first were computed in it, and need cache.
        let room = (blocks(sequence.computed) + free) * BLOCK - sequence.computed;
        let tokens = lucky.min(sequence.job.output - sequence.generated).min(room + 1);
        sequence.generated += tokens;
        let grown = sequence.computed + tokens - 1;
        self.own_blocks += blocks(grown) - blocks(sequence.computed);
        sequence.computed = grown;
        let first_token = *sequence.first_token.get_or_insert(at);
        self.counts.generated_tokens += tokens;
        let mut done = None;
        if sequence.generated == sequence.job.output {
            let mut sequence = self.running.remove(&place).expect("it was found above");
            self.places.remove(&job);
            self.give_up_room(&mut sequence);
            done = Some(SequenceResult {
                arrived: sequence.arrived,
                started: sequence.started.unwrap_or(at),
                first_token,
                ended: at,
                prompt: sequence.job.prompt,
                output: sequence.generated,
                cached: sequence.cached,
            });
        }
        gains.push(TokenGain { job, at, tokens, done });
    }

    /// Composes the step that starts at `at`, if there is work.
    fn compose(&mut self, at: Tick) {
        let mut plan = StepPlan { budget: self.shape.step_tokens.max(1), ..StepPlan::default() };
        let preempted = self.plan_running(&mut plan);
        if !preempted {
            self.plan_waiting(&mut plan, at);
        }
        self.prefixes.shrink(self.free_blocks());
        if plan.work.is_empty() {
            return;
        }
        let length = self.length_of(&plan);
        self.step = Some(RunningStep { ends: at + length, work: plan.work });
    }

    /// Assigns work to running requests; returns whether one was preempted.
    fn plan_running(&mut self, plan: &mut StepPlan) -> bool {
        let order: Vec<AdmissionKey> = self.running.keys().copied().collect();
        let mut preempted = false;
        for place in order {
            let Some(sequence) = self.running.get(&place) else { continue };
            let wanted = (sequence.context() - sequence.computed).min(plan.budget);
            if wanted == 0 {
                continue;
            }
            let (before, after) = (sequence.computed, sequence.computed + wanted);
            let decoding = sequence.is_decoding();
            let mut fits = true;
            while blocks(after) - blocks(before) > self.free_blocks() {
                preempted = true;
                // The victim is the last request and had no part yet; it may be this one.
                if self.preempt_last() == Some(place) {
                    fits = false;
                    break;
                }
            }
            if fits {
                self.give(place, after, plan, decoding);
            }
        }
        preempted
    }

    fn plan_waiting(&mut self, plan: &mut StepPlan, at: Tick) {
        while plan.budget > 0 && self.running.len() < self.shape.max_running.max(1) {
            let Some(next) = self.waiting.first_entry() else { return };
            let sequence = next.get();
            let (prompt, context) = (sequence.job.prompt, sequence.context());
            let hits = if self.shape.prefix_caching { self.prefixes.hits(&sequence.job.blocks) } else { 0 };
            // The last token is always computed, because its output is needed.
            let shared = hits.min(((context - 1) / BLOCK) as usize);
            let cached = shared as u64 * BLOCK;
            let known = &sequence.job.blocks[..shared];
            let after = (cached + plan.budget).min(context);
            let wanted = blocks(after) - shared as u64 + self.prefixes.idle_of(known);
            let held = self.own_blocks + self.prefixes.used();
            if wanted > self.shape.blocks().saturating_sub(held) {
                return;
            }
            self.prefixes.take(known);
            let (place, mut sequence) = next.remove_entry();
            (sequence.computed, sequence.shared) = (cached, shared);
            if sequence.started.is_none() {
                sequence.started = Some(at);
                sequence.cached = cached;
                self.counts.prompt_tokens += prompt;
                self.counts.prefix_queries += prompt;
                self.counts.prefix_hits += cached;
            }
            self.running.insert(place, sequence);
            self.give(place, after, plan, false);
        }
    }

    /// Reserves cache for a request's context up to `after`, and adds it to the step.
    fn give(&mut self, place: AdmissionKey, after: u64, plan: &mut StepPlan, decoding: bool) {
        let sequence = self.running.get_mut(&place).expect("the caller has it");
        let (before, tokens) = (sequence.computed, after - sequence.computed);
        self.own_blocks += blocks(after) - blocks(before);
        sequence.computed = after;
        plan.budget -= tokens;
        if decoding {
            plan.decodes += 1;
            plan.context += after;
        } else {
            plan.prefills += 1;
            plan.prefill += tokens as f64 * self.shape.attention(before, after);
        }
        plan.work.push((place, after));
    }

    /// Preempts the last running request, which keeps its position in the queue.
    fn preempt_last(&mut self) -> Option<AdmissionKey> {
        let (place, mut sequence) = self.running.pop_last()?;
        self.give_up_room(&mut sequence);
        self.counts.preemptions += 1;
        self.waiting.insert(place, sequence);
        Some(place)
    }

    fn length_of(&mut self, plan: &StepPlan) -> Duration {
        let times = |each: Duration, count: f64| each.as_nanos() as f64 * count;
        let shape = &self.shape;
        let nanos = shape.step_base.as_nanos() as f64
            + times(shape.per_decode, plan.decodes as f64)
            + times(shape.per_prefill, plan.prefills as f64)
            + times(shape.per_prefill_token, plan.prefill)
            + times(shape.per_context_token, plan.context as f64);
        let jitter = shape.jitter.clamp(0.0, 0.99);
        let factor = if jitter > 0.0 { self.chance.random_range(1.0 - jitter..=1.0 + jitter) } else { 1.0 };
        Duration::from_nanos((nanos * factor / shape.speed.max(1e-6)).max(1.0) as u64)
    }
}

/// A step being composed.
#[derive(Default)]
struct StepPlan {
    budget: u64,
    decodes: u64,
    prefills: u64,
    /// In tokens without preceding context.
    prefill: f64,
    context: u64,
    work: Vec<(AdmissionKey, u64)>,
}

#[cfg(test)]
mod tests;

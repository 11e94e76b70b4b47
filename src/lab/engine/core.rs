//! The scheduler of a simulated engine: a pure machine of steps. Sans-IO.
//!
//! It works as vLLM's scheduler does. Time passes in steps; a step is composed when the one
//! before it ends, gives every decoding request one token, and spends what is left of its
//! token budget on prefill, in chunks, first of the requests that run and then of those that
//! wait. A request is admitted while there are seats in the batch and room in the key-value
//! cache; when the room runs out under running requests, the last of them is preempted and
//! computes its context again later. A step's length grows with the prefill in it, the
//! number of decoding requests and the context they read.
//!
//! Moments are arguments, chance comes from the seed: the same calls give the same trace.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

mod leaps;

pub use self::leaps::LeapingEngine;
pub use super::prefix::BLOCK;
use super::prefix::PrefixCache;
use crate::units::Tick;

/// What an engine is made of. The defaults resemble an 8B model on one 80 GB GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Requests that may run in one batch (`max_num_seqs`).
    pub max_running: usize,
    /// Tokens computed in one step (`max_num_batched_tokens`): the budget of chunked prefill.
    pub step_tokens: u64,
    /// Room of the key-value cache, in tokens.
    pub kv_tokens: u64,
    /// Longest prompt plus answer.
    pub max_model_len: u64,
    /// Requests that may wait (at least 1: each one passes through the queue); one more is
    /// turned away. Absent: no limit.
    pub max_waiting: Option<usize>,
    /// Who is admitted first.
    pub order: Order,
    /// Length of a step with nothing in it: the weights are read once.
    pub step_base: Duration,
    /// Added for each decoding request.
    pub per_decode: Duration,
    /// Added for each request whose prompt is read.
    pub per_prefill: Duration,
    /// Added for each token of prefill.
    pub per_prefill_token: Duration,
    /// Behind so many tokens of context a token of prefill takes twice as long, behind twice as
    /// many three times. Absent: it takes the same everywhere.
    pub attention_doubles_at: Option<u64>,
    /// Added for each token of context that a decoding request reads.
    pub per_context_token: Duration,
    /// Whether prompt blocks of earlier requests need no prefill.
    pub prefix_caching: bool,
    /// Most tokens a decoding request can gain in one step: above 1, speculative decoding.
    pub speculative: u64,
    /// Step lengths vary by up to this share, evenly.
    pub jitter: f64,
    /// All lengths are divided by this: 2 is an engine twice as fast.
    pub speed: f64,
}

/// Who is admitted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// First come, first served.
    #[default]
    Arrival,
    /// Lower `priority` first, then first come.
    Priority,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            max_running: 128,
            step_tokens: 2048,
            kv_tokens: 320_000,
            max_model_len: 32_768,
            max_waiting: None,
            order: Order::Arrival,
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

impl Shape {
    /// Blocks of the key-value cache.
    fn blocks(&self) -> u64 {
        (self.kv_tokens / BLOCK).max(1)
    }

    /// How many times as long as at a prompt's beginning a token of prefill takes, on the average
    /// of those from here to there.
    fn attention(&self, from: u64, to: u64) -> f64 {
        let middle = from.midpoint(to) as f64;
        self.attention_doubles_at.map_or(1.0, |doubles| 1.0 + middle / doubles.max(1) as f64)
    }
}

/// One sequence to be generated: a choice of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Job {
    /// Prompt tokens.
    pub prompt: u64,
    /// Tokens it will generate, at least 1.
    pub output: u64,
    /// The request's priority: lower is earlier, under [`Order::Priority`].
    pub priority: i64,
    /// Hashes of the prompt's whole blocks, each covering all before it. Those that go on behind
    /// the prompt are the answer's.
    pub blocks: Vec<u64>,
}

/// Names a job inside its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(u64);

/// The waiting queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

/// A job gained tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Gain {
    /// Which job.
    pub job: JobId,
    /// The end of the step.
    pub at: Tick,
    /// How many tokens.
    pub tokens: u64,
    /// The job's life, if these were its last.
    pub done: Option<Life>,
}

/// The moments of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Life {
    /// It was submitted.
    pub arrived: Tick,
    /// A step first worked on it.
    pub started: Tick,
    /// The step that gave its first token ended.
    pub first_token: Tick,
    /// The step that gave its last token ended.
    pub ended: Tick,
    /// Its prompt tokens.
    pub prompt: u64,
    /// Its generated tokens.
    pub output: u64,
    /// Prompt tokens that came from the prefix cache.
    pub cached: u64,
}

/// What an engine reports of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    /// Jobs in the batch.
    pub running: usize,
    /// Jobs that wait.
    pub waiting: usize,
    /// Share of the key-value cache held by running jobs.
    pub kv_usage: f64,
    /// Prompt tokens computed or taken from the cache, ever.
    pub prompt_tokens: u64,
    /// Tokens generated, ever.
    pub generated_tokens: u64,
    /// Prompt tokens looked up in the prefix cache, ever.
    pub prefix_queries: u64,
    /// Prompt tokens found there, ever.
    pub prefix_hits: u64,
    /// Preemptions, ever.
    pub preemptions: u64,
}

/// The order of admission: priority (0 under [`Order::Arrival`]), then arrival. A preempted
/// job keeps its place and so goes before all that came later.
type Place = (i64, u64);

struct Sequence {
    id: JobId,
    job: Job,
    /// Context in the cache.
    computed: u64,
    generated: u64,
    cached: u64,
    /// Leading blocks of its context that it shares with others through the prefix cache.
    shared: usize,
    arrived: Tick,
    started: Option<Tick>,
    first_token: Option<Tick>,
}

impl Sequence {
    /// Context that must be in the cache before the next token can come.
    fn context(&self) -> u64 {
        self.job.prompt + self.generated
    }

    /// Blocks of its context that are its own.
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

struct Running {
    ends: Tick,
    /// Places, and the context each will have computed.
    work: Vec<(Place, u64)>,
}

/// One engine.
pub struct Engine {
    shape: Shape,
    chance: StdRng,
    arrivals: u64,
    waiting: BTreeMap<Place, Sequence>,
    running: BTreeMap<Place, Sequence>,
    places: BTreeMap<JobId, Place>,
    /// Blocks that running requests have for themselves; what they share is in `prefixes`.
    own_blocks: u64,
    prefixes: PrefixCache,
    step: Option<Running>,
    counts: Gauges,
}

impl Engine {
    /// An idle engine.
    #[must_use]
    pub fn new(shape: Shape, seed: u64) -> Self {
        Engine {
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

    /// What it is made of.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether one more job would be turned away.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.shape.max_waiting.is_some_and(|most| self.waiting.len() >= most.max(1))
    }

    /// Takes a job into the queue; an idle engine begins a step at once.
    ///
    /// # Errors
    /// [`Busy`], if the queue is full.
    pub fn submit(&mut self, job: Job, at: Tick) -> Result<JobId, Busy> {
        if self.is_busy() {
            return Err(Busy);
        }
        let id = self.enqueue(job, at);
        self.begin(at);
        Ok(id)
    }

    /// Takes a job into the queue, however full that is, and begins nothing: the choices of one
    /// request come in together. Prompt and output are cut to what the model and the cache can
    /// hold, so that every job can end.
    pub fn enqueue(&mut self, mut job: Job, at: Tick) -> JobId {
        let longest = self.shape.max_model_len.min(self.capacity() * BLOCK).max(2);
        job.prompt = job.prompt.clamp(1, longest - 1);
        job.output = job.output.clamp(1, longest - job.prompt);
        job.blocks.truncate(((job.prompt + job.output) / BLOCK) as usize);
        self.arrivals += 1;
        let id = JobId(self.arrivals);
        let priority = if self.shape.order == Order::Priority { job.priority } else { 0 };
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

    /// Begins a step, if none runs.
    pub fn begin(&mut self, at: Tick) {
        if self.step.is_none() {
            self.compose(at);
        }
    }

    /// Makes it this many times as fast as its shape says, from the next step on.
    pub const fn set_speed(&mut self, speed: f64) {
        self.shape.speed = speed;
    }

    /// Takes a job out; its seat and its room are free from the next step on.
    pub fn cancel(&mut self, id: JobId) {
        let Some(place) = self.places.remove(&id) else { return };
        self.waiting.remove(&place);
        if let Some(mut sequence) = self.running.remove(&place) {
            self.give_up_room(&mut sequence);
        }
    }

    /// When [`Engine::advance`] has something to do.
    #[must_use]
    pub fn next_moment(&self) -> Option<Tick> {
        self.step.as_ref().map(|step| step.ends)
    }

    /// Ends every step that is due by `at`, and tells what was gained.
    pub fn advance(&mut self, at: Tick, gains: &mut Vec<Gain>) {
        while let Some(step) = self.step.take_if(|step| step.ends <= at) {
            for (place, computed) in step.work {
                self.end_of_step(place, computed, step.ends, gains);
            }
            self.compose(step.ends);
        }
    }

    /// What the engine reports of itself.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let kv_usage = self.blocks_held() as f64 / self.capacity() as f64;
        Gauges { running: self.running.len(), waiting: self.waiting.len(), kv_usage, ..self.counts }
    }

    fn capacity(&self) -> u64 {
        self.shape.blocks()
    }

    /// Blocks that running requests hold, each once.
    fn blocks_held(&self) -> u64 {
        self.own_blocks + self.prefixes.used()
    }

    /// Blocks that running requests do not hold.
    fn free_blocks(&self) -> u64 {
        self.capacity().saturating_sub(self.blocks_held())
    }

    /// A request leaves the batch: its own blocks are free, and so are those that it alone shared.
    fn give_up_room(&mut self, sequence: &mut Sequence) {
        self.own_blocks -= sequence.own_blocks();
        self.prefixes.leave(&sequence.job.blocks[..sequence.shared]);
        (sequence.computed, sequence.shared) = (0, 0);
    }

    fn end_of_step(&mut self, place: Place, computed: u64, at: Tick, gains: &mut Vec<Gain>) {
        // Cancelled during the step: nothing to tell.
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
        // Tokens beyond the first of a speculative step were computed in it, and need room.
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
            done = Some(Life {
                arrived: sequence.arrived,
                started: sequence.started.unwrap_or(at),
                first_token,
                ended: at,
                prompt: sequence.job.prompt,
                output: sequence.generated,
                cached: sequence.cached,
            });
        }
        gains.push(Gain { job, at, tokens, done });
    }

    /// Composes the step that begins at `at`; none if there is nothing to do.
    fn compose(&mut self, at: Tick) {
        let mut plan = Plan { budget: self.shape.step_tokens.max(1), ..Plan::default() };
        let preempted = self.plan_running(&mut plan);
        if !preempted {
            self.plan_waiting(&mut plan, at);
        }
        self.prefixes.shrink(self.free_blocks());
        if plan.work.is_empty() {
            return;
        }
        let length = self.length_of(&plan);
        self.step = Some(Running { ends: at + length, work: plan.work });
    }

    /// Gives each running request its part; returns whether one had to be preempted.
    fn plan_running(&mut self, plan: &mut Plan) -> bool {
        let order: Vec<Place> = self.running.keys().copied().collect();
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
                // The victim never had its part yet: it comes last, and this one is not behind it.
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

    fn plan_waiting(&mut self, plan: &mut Plan, at: Tick) {
        while plan.budget > 0 && self.running.len() < self.shape.max_running.max(1) {
            let Some(next) = self.waiting.first_entry() else { return };
            let sequence = next.get();
            let (prompt, context) = (sequence.job.prompt, sequence.context());
            let hits = if self.shape.prefix_caching { self.prefixes.hits(&sequence.job.blocks) } else { 0 };
            // The last token is always computed: its output is what is wanted.
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

    /// Takes the room for a request's context up to `after`, and puts it into the step.
    fn give(&mut self, place: Place, after: u64, plan: &mut Plan, decoding: bool) {
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

    /// Sends the last running request back to the queue; it keeps its place there.
    fn preempt_last(&mut self) -> Option<Place> {
        let (place, mut sequence) = self.running.pop_last()?;
        self.give_up_room(&mut sequence);
        self.counts.preemptions += 1;
        self.waiting.insert(place, sequence);
        Some(place)
    }

    fn length_of(&mut self, plan: &Plan) -> Duration {
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

/// A step while it is composed.
#[derive(Default)]
struct Plan {
    budget: u64,
    decodes: u64,
    prefills: u64,
    /// In tokens that have no context before them.
    prefill: f64,
    context: u64,
    work: Vec<(Place, u64)>,
}

#[cfg(test)]
mod tests;

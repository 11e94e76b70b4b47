//! The same scheduler for fleets: steps that only decode are taken together.
//!
//! Between two arrivals, ends or prompts every decoding request gains one token per step, and a step differs from the
//! one before only by the context that has grown. [`LeapingEngine`] takes such steps in one leap, whose length is a
//! sum in closed form, and so costs time per request and not per token. It tells of first tokens and ends only.
//!
//! Without jitter and speculation it agrees with [`EngineCore`](super::EngineCore) to the nanosecond; a test holds the two
//! together. It admits by arrival, and runs no more requests at one time than a step has tokens.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use super::super::prefix::PrefixCache;
use super::{BLOCK, EngineSpec, Gauges, Job, JobId, QueueFull, SequenceResult, TokenGain, blocks};
use crate::types::Tick;

/// Arrival number: requests are admitted, and kept when room runs out, in this order.
type Turn = u64;

/// A request in the engine.
struct Request {
    job: Job,
    generated: u64,
    cached: u64,
    /// Leading blocks of the prompt that it shares with others through the prefix cache.
    shared: usize,
    arrived: Tick,
    started: Option<Tick>,
    first_token: Option<Tick>,
}

impl Request {
    /// Context that must be in the cache before the next token can come.
    fn context(&self) -> u64 {
        self.job.prompt + self.generated
    }
}

/// A request in the batch.
struct BatchMember {
    request: Request,
    progress: MemberProgress,
}

#[derive(Clone, Copy)]
enum MemberProgress {
    /// In prefill, with this many tokens computed.
    Prefilling { computed: u64 },
    /// It gains a token per step. Its computed context is `offset` plus the number of decoding steps that the engine
    /// has ended.
    Decoding { offset: i64, joined: u64, ends: u64 },
}

/// Work of a step beside its decoding requests.
#[derive(Clone, Copy, Default)]
struct StepExtra {
    /// Requests whose prompt is read.
    prefills: u64,
    /// Tokens of it, in tokens that have no context before them.
    tokens: f64,
    /// Context of a request that was preempted and lacks its last token only: that is decoding.
    recomputed: Option<u64>,
}

/// Steps in progress.
struct Leap {
    begins: Tick,
    ends: Tick,
    /// How many; more than one only where all of them decode only.
    steps: u64,
    /// Requests whose prompt is read in it, and the context that they will have computed.
    prefills: Vec<(Turn, u64)>,
    decodes: bool,
}

/// One engine that leaps.
pub struct LeapingEngine {
    shape: EngineSpec,
    /// Tokens of a block of the prompts' hashes: a multiple of [`BLOCK`].
    prefix_block: u64,
    arrivals: u64,
    waiting: BTreeMap<Turn, Request>,
    batch: BTreeMap<Turn, BatchMember>,
    /// Decoding steps that have ended.
    steps: u64,
    /// The number of that counter at which a request ends.
    ends: BinaryHeap<Reverse<(u64, Turn)>>,
    decoding: u64,
    /// Sum of the decoding requests' offsets.
    offsets: i64,
    /// Decoding requests by their offset modulo [`BLOCK`]: those of one class need a further block at one step.
    residues: [u64; BLOCK as usize],
    own_blocks: u64,
    prefixes: PrefixCache,
    leap: Option<Leap>,
    counts: Gauges,
}

impl LeapingEngine {
    /// An idle engine. Its prefix cache has blocks of this many tokens, rounded up to a multiple of
    /// [`BLOCK`].
    #[must_use]
    pub fn new(shape: EngineSpec, prefix_block: u64) -> Self {
        LeapingEngine {
            shape,
            prefix_block: prefix_block.max(1).next_multiple_of(BLOCK),
            arrivals: 0,
            waiting: BTreeMap::new(),
            batch: BTreeMap::new(),
            steps: 0,
            ends: BinaryHeap::new(),
            decoding: 0,
            offsets: 0,
            residues: [0; BLOCK as usize],
            own_blocks: 0,
            prefixes: PrefixCache::default(),
            leap: None,
            counts: Gauges::default(),
        }
    }

    /// Its specification.
    #[must_use]
    pub const fn shape(&self) -> &EngineSpec {
        &self.shape
    }

    /// Takes a job into the queue; an idle engine begins a step at once. Prompt and output are cut as
    /// [`EngineCore::enqueue`](super::EngineCore::enqueue) does, and blocks to the prompt.
    ///
    /// # Errors
    /// [`QueueFull`], if the queue is full.
    pub fn submit(&mut self, mut job: Job, at: Tick) -> Result<JobId, QueueFull> {
        if self.shape.max_waiting.is_some_and(|most| self.waiting.len() >= most.max(1)) {
            return Err(QueueFull);
        }
        let longest = self.shape.max_model_len.min(self.shape.blocks() * BLOCK).max(2);
        job.prompt = job.prompt.clamp(1, longest - 1);
        job.output = job.output.clamp(1, longest - job.prompt);
        job.blocks.truncate((job.prompt / self.prefix_block) as usize);
        self.arrivals += 1;
        let turn = self.arrivals;
        // Whoever comes behind others that cannot be admitted changes nothing before a request ends.
        if self.waiting.is_empty() && self.batch.len() < self.most_running() {
            self.cut(at);
        }
        let request =
            Request { job, generated: 0, cached: 0, shared: 0, arrived: at, started: None, first_token: None };
        self.waiting.insert(turn, request);
        if self.leap.is_none() {
            self.compose(at);
        }
        Ok(JobId(turn))
    }

    /// Makes it this many times as fast as its shape says, from the next step on.
    pub fn set_speed(&mut self, speed: f64, at: Tick) {
        self.cut(at);
        self.shape.speed = speed;
    }

    /// Takes a job out; its seat and its room are free from the next step on.
    pub fn cancel(&mut self, id: JobId, at: Tick) {
        let turn = id.0;
        if self.batch.contains_key(&turn) || self.waiting.first_key_value().is_some_and(|(first, _)| *first == turn) {
            self.cut(at);
        }
        self.waiting.remove(&turn);
        self.leave(turn);
    }

    /// When [`LeapingEngine::advance`] has something to do.
    #[must_use]
    pub fn next_moment(&self) -> Option<Tick> {
        self.leap.as_ref().map(|leap| leap.ends)
    }

    /// Advances to `at`, and reports first tokens and ends.
    pub fn advance(&mut self, at: Tick, gains: &mut Vec<TokenGain>) {
        while let Some(leap) = self.leap.take_if(|leap| leap.ends <= at) {
            let ends = leap.ends;
            self.settle(leap, gains);
            self.compose(ends);
        }
    }

    /// Gauges as the engine reports them.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        let kv_usage = self.blocks_held() as f64 / self.shape.blocks() as f64;
        Gauges { running: self.batch.len(), waiting: self.waiting.len(), kv_usage, ..self.counts }
    }

    fn most_running(&self) -> usize {
        self.shape.max_running.clamp(1, self.shape.step_tokens.max(1) as usize)
    }

    /// Blocks of the cache in one block of hashes.
    const fn unit(&self) -> u64 {
        self.prefix_block / BLOCK
    }

    fn blocks_held(&self) -> u64 {
        self.own_blocks + self.prefixes.used() * self.unit()
    }

    fn free_blocks(&self) -> u64 {
        self.shape.blocks().saturating_sub(self.blocks_held())
    }

    /// Context of a member that is in the cache, the step in progress included.
    fn computed(&self, progress: MemberProgress) -> u64 {
        match progress {
            MemberProgress::Prefilling { computed } => computed,
            MemberProgress::Decoding { offset, .. } => {
                let begun = self.steps + u64::from(self.leap.as_ref().is_some_and(|leap| leap.decodes));
                offset.saturating_add_unsigned(begun) as u64
            }
        }
    }

    // ---- the end of steps --------------------------------------------------------------------------------

    fn settle(&mut self, leap: Leap, gains: &mut Vec<TokenGain>) {
        let Leap { ends: at, steps, prefills, decodes, .. } = leap;
        if decodes {
            // The first step's blocks were taken when it was composed.
            self.own_blocks += self.growth(1, steps);
            self.prefixes.shrink(self.free_blocks() / self.unit());
            self.steps += steps;
            self.counts.generated_tokens += self.decoding * steps;
        }
        while let Some(Reverse((_, turn))) = self.ends.peek().copied().filter(|Reverse((end, _))| *end <= self.steps) {
            self.ends.pop();
            // A request that left or was preempted leaves a stale entry.
            let is_its_own = self.batch.get(&turn).is_some_and(
                |member| matches!(member.progress, MemberProgress::Decoding { ends, .. } if ends <= self.steps),
            );
            if is_its_own {
                self.end(turn, at, gains);
            }
        }
        for (turn, computed) in prefills {
            self.prefilled(turn, computed, at, gains);
        }
    }

    /// A decoding request gained its last token.
    fn end(&mut self, turn: Turn, at: Tick, gains: &mut Vec<TokenGain>) {
        let Some(member) = self.take_out(turn) else { return };
        let Request { job, cached, arrived, started, first_token, generated, .. } = member.request;
        let life = SequenceResult {
            arrived,
            started: started.unwrap_or(at),
            first_token: first_token.unwrap_or(at),
            ended: at,
            prompt: job.prompt,
            output: job.output,
            cached,
        };
        // A request preempted while decoding has already reported its first token.
        let told = u64::from(generated > 0 || job.output > 1);
        gains.push(TokenGain { job: JobId(turn), at, tokens: job.output - told, done: Some(life) });
    }

    /// A request's prompt was read up to here.
    fn prefilled(&mut self, turn: Turn, computed: u64, at: Tick, gains: &mut Vec<TokenGain>) {
        let (steps, unit, block) = (self.steps, self.unit(), self.prefix_block);
        // Cancelled during the step: nothing to report.
        let Some(member) = self.batch.get_mut(&turn) else { return };
        let request = &mut member.request;
        if self.shape.prefix_caching {
            let whole = request.job.blocks.len().min((computed / block) as usize);
            let new = &request.job.blocks[request.shared.min(whole)..whole];
            self.prefixes.take(new);
            self.own_blocks -= new.len() as u64 * unit;
            request.shared = request.shared.max(whole);
        }
        if computed < request.context() {
            return;
        }
        let is_first = request.first_token.is_none();
        request.generated += 1;
        request.first_token.get_or_insert(at);
        self.counts.generated_tokens += 1;
        let left = request.job.output - request.generated;
        let offset = computed as i64 - steps as i64;
        let job = JobId(turn);
        if left == 0 {
            let mut out = Vec::new();
            self.end(turn, at, &mut out);
            let tokens = u64::from(is_first);
            gains.extend(out.into_iter().map(|gain| TokenGain { tokens: tokens.max(gain.tokens), ..gain }));
            return;
        }
        member.progress = MemberProgress::Decoding { offset, joined: steps, ends: steps + left };
        self.join(offset);
        self.ends.push(Reverse((steps + left, turn)));
        if is_first {
            gains.push(TokenGain { job, at, tokens: 1, done: None });
        }
    }

    fn join(&mut self, offset: i64) {
        self.decoding += 1;
        self.offsets += offset;
        self.residues[offset.rem_euclid(BLOCK as i64) as usize] += 1;
    }

    /// Removes a request from the batch, and frees its blocks.
    fn leave(&mut self, turn: Turn) {
        let _its_end_is_nobodys = self.take_out(turn);
    }

    fn take_out(&mut self, turn: Turn) -> Option<BatchMember> {
        let mut member = self.batch.remove(&turn)?;
        let computed = self.computed(member.progress);
        self.own_blocks -= blocks(computed) - member.request.shared as u64 * self.unit();
        self.prefixes.leave(&member.request.job.blocks[..member.request.shared]);
        member.request.shared = 0;
        if let MemberProgress::Decoding { offset, joined, .. } = member.progress {
            self.decoding -= 1;
            self.offsets -= offset;
            self.residues[offset.rem_euclid(BLOCK as i64) as usize] -= 1;
            member.request.generated += self.steps - joined;
        }
        Some(member)
    }

    // ---- composing steps -----------------------------------------------------------------------------------

    /// Blocks that decoding requests take in the steps from the one `from` steps ahead to the one before `to`.
    fn growth(&self, from: u64, to: u64) -> u64 {
        let steps = to.saturating_sub(from);
        let turns = self.decoding * (steps / BLOCK);
        let rest = (to - steps % BLOCK)..to;
        turns + rest.map(|ahead| self.growth_at(ahead)).sum::<u64>()
    }

    /// Blocks allocated in the step this far ahead, by requests whose context fills their blocks.
    fn growth_at(&self, ahead: u64) -> u64 {
        let step = (self.steps + ahead) % BLOCK;
        self.residues[((BLOCK - step) % BLOCK) as usize]
    }

    fn compose(&mut self, at: Tick) {
        let growth = self.growth_at(0);
        let mut budget = self.shape.step_tokens.max(1);
        let mut prefills = Vec::new();
        let mut extra = StepExtra::default();
        let is_tight = growth > self.free_blocks();
        let mut is_preempted = is_tight;
        if is_tight {
            self.make_room();
        } else {
            self.own_blocks += growth;
        }
        budget -= self.decoding;
        let decodes = self.decoding > 0;
        // Only the last of the batch can have a prompt that is partly read.
        let last = self.batch.last_key_value().map(|(turn, member)| (*turn, member.progress));
        if let Some((turn, MemberProgress::Prefilling { computed })) = last
            && budget > 0
        {
            let request = &self.batch[&turn].request;
            let (context, has_gained) = (request.context(), request.generated > 0);
            let after = (computed + budget).min(context);
            let wanted = blocks(after) - blocks(computed);
            if wanted > self.free_blocks() {
                is_preempted = true;
                self.preempt(turn);
            } else {
                self.own_blocks += wanted;
                if has_gained && computed + 1 == context {
                    extra.recomputed = Some(after);
                } else {
                    extra.prefills += 1;
                    extra.tokens += (after - computed) as f64 * self.shape.attention(computed, after);
                }
                budget -= after - computed;
                self.batch.get_mut(&turn).expect("it was looked at").progress =
                    MemberProgress::Prefilling { computed: after };
                prefills.push((turn, after));
            }
        }
        if !is_preempted {
            self.admit(budget, &mut prefills, &mut extra, at);
        }
        self.prefixes.shrink(self.free_blocks() / self.unit());
        if !decodes && prefills.is_empty() {
            return;
        }
        // After a step with a preemption, the next one admits again.
        let is_alike = prefills.is_empty() && !is_preempted;
        let steps = if is_alike { self.leap_length() } else { 1 };
        let ends = at + self.length(steps, extra);
        self.leap = Some(Leap { begins: at, ends, steps, prefills, decodes });
    }

    /// Admits waiting requests while seats, blocks and tokens suffice.
    fn admit(&mut self, mut budget: u64, prefills: &mut Vec<(Turn, u64)>, extra: &mut StepExtra, at: Tick) {
        let (unit, block) = (self.unit(), self.prefix_block);
        while budget > 0 && self.batch.len() < self.most_running() {
            let Some(next) = self.waiting.first_entry() else { break };
            let request = next.get();
            let context = request.context();
            let hits = if self.shape.prefix_caching { self.prefixes.hits(&request.job.blocks) } else { 0 };
            // The last token is always computed, because its output is needed.
            let shared = hits.min(((context - 1) / block) as usize);
            let cached = shared as u64 * block;
            let known = &request.job.blocks[..shared];
            let after = (cached + budget).min(context);
            let wanted = blocks(after) - shared as u64 * unit + self.prefixes.idle_of(known) * unit;
            let held = self.own_blocks + self.prefixes.used() * unit;
            if wanted > self.shape.blocks().saturating_sub(held) {
                break;
            }
            self.prefixes.take(known);
            let (turn, mut request) = next.remove_entry();
            request.shared = shared;
            if request.started.is_none() {
                request.started = Some(at);
                request.cached = cached;
                self.counts.prompt_tokens += request.job.prompt;
                self.counts.prefix_queries += request.job.prompt;
                self.counts.prefix_hits += cached;
            }
            self.own_blocks += blocks(after) - shared as u64 * unit;
            extra.prefills += 1;
            extra.tokens += (after - cached) as f64 * self.shape.attention(cached, after);
            budget -= after - cached;
            self.batch.insert(turn, BatchMember { request, progress: MemberProgress::Prefilling { computed: after } });
            prefills.push((turn, after));
        }
    }

    /// Allocates the blocks of decoding requests, in their order; without free blocks the last of the batch
    /// is preempted.
    fn make_room(&mut self) {
        let order: Vec<Turn> = self.batch.keys().copied().collect();
        for turn in order {
            let Some(member) = self.batch.get(&turn) else { continue };
            let MemberProgress::Decoding { offset, .. } = member.progress else { continue };
            let computed = offset.saturating_add_unsigned(self.steps) as u64;
            if !computed.is_multiple_of(BLOCK) {
                continue;
            }
            while self.free_blocks() == 0 {
                let Some(last) = self.batch.last_key_value().map(|(last, _)| *last) else { return };
                self.preempt(last);
                if last == turn {
                    break;
                }
            }
            if self.batch.contains_key(&turn) {
                self.own_blocks += 1;
            }
        }
    }

    /// Returns a request of the batch to the queue, where it keeps its turn.
    fn preempt(&mut self, turn: Turn) {
        let Some(member) = self.take_out(turn) else { return };
        self.counts.preemptions += 1;
        self.waiting.insert(turn, member.request);
    }

    /// Decoding steps until a request ends or room may run out.
    fn leap_length(&self) -> u64 {
        let to_end = self.next_end().map_or(1, |end| end - self.steps);
        let (free, decoding) = (self.free_blocks(), self.decoding.max(1));
        // The first step has its room; whole turns of all residues, and then step by step.
        let turns = free / decoding;
        let mut room = free - turns * decoding;
        let mut roomy = 1 + turns * BLOCK;
        while roomy < to_end {
            let growth = self.growth_at(roomy);
            if growth > room {
                break;
            }
            room -= growth;
            roomy += 1;
        }
        to_end.min(roomy).max(1)
    }

    /// The counter's value at the next end. Requests that left are passed over when their turn comes: an earlier
    /// stop does no harm.
    fn next_end(&self) -> Option<u64> {
        self.ends.peek().map(|Reverse((end, _))| (*end).max(self.steps + 1))
    }

    /// Length of the next `steps` steps, all of which decode the same requests.
    fn length(&self, steps: u64, extra: StepExtra) -> Duration {
        let times = |each: Duration, count: f64| each.as_nanos() as f64 * count;
        let (count, decoding) = (steps as f64, self.decoding as f64);
        // Each step reads the context that it leaves behind: one token more of each request than the step before.
        let context = count * (self.offsets as f64 + decoding * self.steps as f64)
            + decoding * count * (count + 1.0) / 2.0
            + extra.recomputed.unwrap_or(0) as f64;
        let decodes = decoding * count + f64::from(u8::from(extra.recomputed.is_some()));
        let shape = &self.shape;
        let nanos = count * shape.step_base.as_nanos() as f64
            + times(shape.per_decode, decodes)
            + times(shape.per_prefill, extra.prefills as f64)
            + times(shape.per_prefill_token, extra.tokens)
            + times(shape.per_context_token, context);
        Duration::from_nanos((nanos / shape.speed.max(1e-6)).max(1.0) as u64)
    }

    /// Ends a leap with the step in which this moment falls.
    fn cut(&mut self, at: Tick) {
        let Some(leap) = self.leap.take_if(|leap| leap.steps > 1) else { return };
        // The step in progress is the first one that ends after this moment.
        let (mut before, mut upto) = (0, leap.steps);
        while upto - before > 1 {
            let middle = before.midpoint(upto);
            if leap.begins + self.length(middle, StepExtra::default()) <= at {
                before = middle;
            } else {
                upto = middle;
            }
        }
        let begins = if before == 0 { leap.begins } else { leap.begins + self.length(before, StepExtra::default()) };
        let ends = leap.begins + self.length(upto, StepExtra::default());
        self.own_blocks += self.growth(1, upto);
        self.steps += before;
        self.counts.generated_tokens += self.decoding * before;
        self.prefixes.shrink(self.free_blocks() / self.unit());
        self.leap = Some(Leap { begins, ends, steps: 1, ..leap });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::EngineCore;
    use super::*;

    /// An action on an engine.
    #[derive(Clone, Debug)]
    enum Act {
        Submit {
            job: Job,
        },
        /// Of all that were submitted, this one leaves.
        Cancel(usize),
    }

    /// Reports of a job.
    type Story = (Option<Tick>, Option<SequenceResult>, u64);

    fn shape() -> EngineSpec {
        EngineSpec { jitter: 0.0, ..EngineSpec::default() }
    }

    /// The same actions on both engines: the reports of each job, and the last gauges.
    fn both(shape: &EngineSpec, acts: &[(u64, Act)]) -> [(Vec<Story>, Gauges); 2] {
        let mut exact = EngineCore::new(shape.clone(), 1);
        let mut leaping = LeapingEngine::new(shape.clone(), BLOCK);
        let exact = told(
            acts,
            &mut exact,
            |engine, at, gains| engine.advance(at, gains),
            |engine, job, at| engine.submit(job, at).unwrap(),
            |engine, id, _| engine.cancel(id),
            |engine| (engine.next_moment(), engine.gauges()),
        );
        let leaping = told(
            acts,
            &mut leaping,
            |engine, at, gains| engine.advance(at, gains),
            |engine, job, at| engine.submit(job, at).unwrap(),
            |engine, id, at| engine.cancel(id, at),
            |engine| (engine.next_moment(), engine.gauges()),
        );
        [exact, leaping]
    }

    fn told<E>(
        acts: &[(u64, Act)],
        engine: &mut E,
        advance: impl Fn(&mut E, Tick, &mut Vec<TokenGain>),
        submit: impl Fn(&mut E, Job, Tick) -> JobId,
        cancel: impl Fn(&mut E, JobId, Tick),
        state: impl Fn(&E) -> (Option<Tick>, Gauges),
    ) -> (Vec<Story>, Gauges) {
        let mut ids: Vec<JobId> = Vec::new();
        let mut stories: Vec<Story> = Vec::new();
        let mut gains = Vec::new();
        let note = |gains: &mut Vec<TokenGain>, ids: &[JobId], stories: &mut Vec<Story>| {
            for gain in gains.drain(..) {
                let number = ids.iter().position(|id| *id == gain.job).unwrap();
                let story = &mut stories[number];
                story.0.get_or_insert(gain.at);
                story.2 += gain.tokens;
                story.1 = gain.done.or(story.1.take());
            }
        };
        for (at, act) in acts {
            let at = Tick::from_nanos(*at);
            advance(engine, at, &mut gains);
            note(&mut gains, &ids, &mut stories);
            match act {
                Act::Submit { job } => {
                    ids.push(submit(engine, job.clone(), at));
                    stories.push((None, None, 0));
                }
                Act::Cancel(number) if !ids.is_empty() => cancel(engine, ids[number % ids.len()], at),
                Act::Cancel(_) => {}
            }
        }
        while let (Some(at), _) = state(engine) {
            advance(engine, at, &mut gains);
            note(&mut gains, &ids, &mut stories);
        }
        (stories, state(engine).1)
    }

    fn job(prompt: u64, output: u64, name: u64) -> Job {
        let blocks = (0..prompt / BLOCK).map(|block| name * 1000 + block).collect();
        Job { prompt, output, blocks, ..Job::default() }
    }

    #[test]
    fn a_lone_request_takes_a_step_for_its_prompt_and_one_for_each_token() {
        let mut engine = LeapingEngine::new(shape(), BLOCK);
        engine.submit(job(100, 50, 1), Tick::ZERO).unwrap();
        let mut gains = Vec::new();
        let mut moments = 0;
        while let Some(at) = engine.next_moment() {
            moments += 1;
            engine.advance(at, &mut gains);
        }
        assert_eq!((moments, gains.len()), (2, 2), "one step and one leap");
        assert_eq!((gains[0].tokens, gains[1].tokens), (1, 49));
        assert_eq!(gains[1].done.as_ref().unwrap().output, 50);
        let gauges = engine.gauges();
        assert_eq!((gauges.running, gauges.kv_usage, gauges.generated_tokens), (0, 0.0, 50));
    }

    #[test]
    fn an_arrival_in_the_middle_of_a_leap_is_read_in_the_next_step() {
        let acts = [(0, Act::Submit { job: job(64, 400, 1) }), (1_234_567_891, Act::Submit { job: job(600, 3, 2) })];
        let [exact, leaping] = both(&shape(), &acts);
        assert_eq!(exact, leaping);
        assert!(exact.0.iter().all(|(_, life, _)| life.is_some()));
    }

    #[test]
    fn a_request_that_gives_up_its_place_tells_of_one_first_token() {
        let small = EngineSpec { kv_tokens: 800, ..shape() };
        let acts: Vec<_> = (0..6).map(|name| (name * 1000, Act::Submit { job: job(100, 200, name) })).collect();
        let [exact, leaping] = both(&small, &acts);
        assert_eq!(exact, leaping);
        assert!(exact.1.preemptions > 0);
        assert!(leaping.0.iter().all(|(_, life, tokens)| life.is_some() && *tokens == 200));
    }

    #[test]
    fn blocks_of_any_length_are_found_again() {
        let mut engine = LeapingEngine::new(shape(), 500);
        let mut gains = Vec::new();
        for at in 0..2 {
            let blocks = vec![1, 2, 3];
            engine
                .submit(Job { prompt: 1600, output: 2, blocks, ..Job::default() }, Tick::from_millis(at * 5000))
                .unwrap();
            while let Some(at) = engine.next_moment() {
                engine.advance(at, &mut gains);
            }
        }
        let cached: Vec<u64> = gains.iter().filter_map(|gain| Some(gain.done.as_ref()?.cached)).collect();
        assert_eq!(cached, [0, 1536], "three blocks of 512 tokens");
        assert_eq!(engine.gauges().prefix_hits, 1536);
    }

    fn acts() -> impl Strategy<Value = Vec<(u64, Act)>> {
        let submit = (1..700_u64, 1..300_u64, 0..4_u64)
            .prop_map(|(prompt, output, name)| Act::Submit { job: job(prompt, output, name) });
        let act = prop_oneof![6 => submit, 1 => (0..64_usize).prop_map(Act::Cancel)];
        let gap = prop_oneof![1 => Just(0), 4 => 0..400_000_000_u64, 1 => 0..4_000_000_000_u64];
        prop::collection::vec((gap, act), 1..60).prop_map(|acts| {
            let mut at = 0;
            let timed = acts.into_iter().map(|(gap, act)| {
                at += gap;
                (at, act)
            });
            timed.collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn leaps_and_single_steps_tell_the_same_story(
            acts in acts(),
            kv_tokens in prop_oneof![800..3000_u64, Just(320_000)],
            step_tokens in prop_oneof![Just(64_u64), Just(512), Just(2048)],
            max_running in prop_oneof![Just(2_usize), Just(8), Just(128)],
            prefix_caching in any::<bool>(),
            attention in prop_oneof![Just(None), Just(Some(5000))],
        ) {
            let max_running = max_running.min(step_tokens as usize);
            let shape = EngineSpec { kv_tokens, step_tokens, max_running, prefix_caching, attention_doubles_at: attention, ..shape() };
            let [exact, leaping] = both(&shape, &acts);
            for (number, (exact, leaping)) in exact.0.iter().zip(&leaping.0).enumerate() {
                prop_assert_eq!((exact.0, &exact.1), (leaping.0, &leaping.1), "job {}", number);
                // For a job that left, only the exact engine reports single tokens.
                prop_assert!(exact.1.is_none() || exact.2 == leaping.2, "job {}: {} {}", number, exact.2, leaping.2);
            }
            prop_assert_eq!(exact.1, leaping.1);
        }
    }
}

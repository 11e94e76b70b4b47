//! The workload as described by a file, and its arrivals.
//!
//! Each flow has its own random source, and so has each tenant's part of a flow with independent bursts:
//! equal seeds give equal arrivals, and removing a flow does not change the
//! others.

mod drawn;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Exp1, Gamma};
use serde::{Deserialize, Serialize};

use crate::judge::{Objective, Objectives};
use crate::sim::engine::core::BLOCK;
use crate::sim::engine::{EngineSpec, LengthDistribution, mix};
use crate::sim::traffic::{self, RequestStyle, TrafficPlan};
use crate::trace::{PromptBlocks, TraceRequest};
use crate::types::{PoolId, Priority, TenantId, Tick, Tokens};

/// A fleet and its workload.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mix {
    /// Seed of everything random.
    pub seed: u64,
    /// Number of engines.
    pub engines: usize,
    /// Properties of each engine.
    pub engine: Machine,
    /// Slowdown factors of the engines, cycled.
    #[serde(default = "all_alike")]
    pub slowness: Vec<f64>,
    /// Requests per second at load 1, if measured.
    #[serde(default)]
    pub load_of_one: Option<f64>,
    /// Relative error of prompt estimates, either way, where no bytes are
    /// counted.
    #[serde(default)]
    pub estimate_error: f64,
    /// The classes.
    pub classes: Vec<MixClass>,
    /// The traffic.
    pub flows: Vec<MixFlow>,
}

/// Properties of an engine's [`EngineSpec`] set by the file; others are its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Most requests in a batch.
    pub max_running: usize,
    /// Token budget of a step.
    pub step_tokens: u64,
    /// Size of the KV cache.
    pub kv_tokens: u64,
    /// Longest prompt plus output.
    pub max_model_len: u64,
    /// Duration of a step.
    #[serde(default)]
    pub step: Option<StepTimes>,
}

/// Duration of a step, milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepTimes {
    /// Empty.
    pub base_ms: f64,
    /// Per request.
    pub per_request_ms: f64,
    /// Per token of prefill.
    pub per_prefill_token_ms: f64,
    /// Per context token of a decoding request.
    pub per_context_token_ms: f64,
    /// Context length at which a token of prefill takes twice as long.
    pub attention_doubles_at: u64,
}

impl Machine {
    /// The properties that it sets, and the defaults of the others.
    #[must_use]
    pub fn spec(&self) -> EngineSpec {
        let Machine { max_running, step_tokens, kv_tokens, max_model_len, step } = *self;
        let mut shape = EngineSpec { max_running, step_tokens, kv_tokens, max_model_len, ..EngineSpec::default() };
        if let Some(step) = step {
            let millis = |millis: f64| Duration::from_secs_f64(millis / 1000.0);
            shape.step_base = millis(step.base_ms);
            (shape.per_decode, shape.per_prefill) = (millis(step.per_request_ms), millis(step.per_request_ms));
            shape.per_prefill_token = millis(step.per_prefill_token_ms);
            shape.per_context_token = millis(step.per_context_token_ms);
            shape.attention_doubles_at = Some(step.attention_doubles_at);
            shape.jitter = 0.0;
        }
        shape
    }
}

fn all_alike() -> Vec<f64> {
    vec![1.0]
}

fn whole() -> f64 {
    1.0
}

/// One class.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixClass {
    /// Its name.
    pub class: String,
    /// Its priority.
    priority: String,
    objectives: Thresholds,
    /// Target share of requests on which all objectives hold, and default attainment of
    /// each.
    pub target: f64,
    /// Attainment of each objective.
    #[serde(default)]
    each_target: Option<f64>,
    patience_seconds: f64,
    default_output_tokens: u64,
    /// Objectives that were not read from a mix's file, with all that they can say.
    #[serde(skip)]
    whole: Option<Box<Objectives>>,
    /// How long clients wait for an answer without a stream, where that is another time.
    #[serde(skip)]
    whole_patience: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Thresholds {
    ttft_seconds: Option<f64>,
    tpot_seconds: Option<f64>,
    e2e_seconds: Option<f64>,
}

/// A class whose requests come from a trace.
#[derive(Clone, Debug)]
pub struct RecordedClass {
    /// Its name.
    pub name: String,
    /// Its rank.
    pub priority: Priority,
    /// What its requests are judged by.
    pub objectives: Objectives,
    /// How long its clients wait for a first token.
    pub patience: Duration,
    /// How long they wait for an answer that does not stream.
    pub whole_patience: Duration,
}

/// Requests of one kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixFlow {
    /// Its name in reports.
    pub flow: String,
    /// The class it belongs to.
    pub class: String,
    /// Whether it asks for streams.
    pub streams: bool,
    /// Its share of all requests, relative to the others.
    pub share: f64,
    #[serde(default = "whole")]
    burstiness: f64,
    /// Phases between which its rate changes after exponential times. All its tenants then burst together, and
    /// `burstiness` is ignored.
    #[serde(default)]
    phases: Vec<Phase>,
    prompt: LengthRange,
    output: LengthRange,
    /// The output cap stated by its requests.
    pub cap: Option<u64>,
    /// Share of requests that state it.
    #[serde(default = "whole")]
    cap_share: f64,
    /// Lengths of the system prompts of its requests, most common first, in addition to
    /// `prompt`.
    #[serde(default)]
    apps: Vec<u64>,
    /// Share of requests that continue an earlier conversation, if one is ready.
    #[serde(default)]
    conversations: f64,
    /// Bytes per token of its prompts, which the gateway must learn. Such prompts also have blocks for prefix
    /// caches.
    #[serde(default)]
    bytes_per_token: Option<f64>,
    /// Share of its output that is reasoning, which can be switched off.
    #[serde(default)]
    pub reasoning: f64,
    /// Its tenants with weights.
    pub tenants: BTreeMap<String, f64>,
}

/// One of the rates of a flow.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Phase {
    /// Relative to the flow's other phases.
    rate: f64,
    /// Mean duration.
    seconds: f64,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LengthRange {
    p50: f64,
    p95: f64,
    /// With this, both tails are clipped.
    #[serde(default)]
    least: Option<u64>,
    most: u64,
}

impl LengthRange {
    /// Redrawn until it fits if only the upper tail is cut.
    fn draw(self, chance: &mut StdRng) -> u64 {
        let lengths = LengthDistribution { p50: self.p50, p95: self.p95 };
        if let Some(least) = self.least {
            return lengths.draw(chance).clamp(least, self.most);
        }
        loop {
            let drawn = lengths.draw(chance);
            if drawn <= self.most {
                return drawn;
            }
        }
    }
}

/// A tenant that suddenly asks for more.
#[derive(Clone, Debug, PartialEq)]
pub struct Flood {
    /// The tenant.
    pub tenant: String,
    /// Factor of its usual rate.
    pub times: f64,
    /// Start.
    pub from: Duration,
}

/// One arriving request.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// Its arrival.
    pub at: Tick,
    /// Index into [`Mix::flows`].
    pub flow: usize,
    /// Its tenant.
    pub tenant: TenantId,
    /// Prompt tokens.
    pub prompt: u64,
    /// What the gateway sees of its length.
    pub shown: PromptLength,
    /// Its stated output cap.
    pub cap: Option<u64>,
    /// Its output tokens, unknown in advance.
    pub output: u64,
    /// What it shares with others.
    pub likeness: SharedPrefix,
    /// The same as a trace tells it, in place of `likeness`.
    pub recorded: PromptBlocks,
    /// Line of the trace that it comes from; 0 without one.
    pub line: u64,
    /// Its model, if the trace has it.
    pub model: Option<Arc<str>>,
    /// The pools of its route, in order; `None`: the first pool of the fleet.
    pub route: Option<Arc<[PoolId]>>,
}

/// What is visible of a prompt's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptLength {
    /// An estimate in tokens.
    Tokens(u64),
    /// Bytes.
    Bytes(u64),
}

/// What a prompt shares with others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedPrefix {
    /// Its system prompt.
    pub app: u64,
    /// Tokens of that.
    pub app_tokens: u64,
    /// The conversation of all the rest; 0 for a unique prompt.
    pub conversation: u64,
}

impl Arrival {
    /// A request of a trace, in the flow of its class.
    #[must_use]
    pub fn recorded(request: &TraceRequest, flow: usize, tenant: TenantId) -> Arrival {
        Arrival {
            at: Tick::ZERO + request.at,
            flow,
            tenant,
            prompt: request.input,
            shown: PromptLength::Tokens(request.input),
            cap: request.cap,
            output: request.output,
            likeness: SharedPrefix::default(),
            recorded: request.blocks.clone(),
            line: request.line,
            model: request.model.clone(),
            route: None,
        }
    }

    /// Hashes of its prompt's blocks.
    #[must_use]
    pub fn blocks_of_prompt(&self) -> Vec<u64> {
        let mut blocks = self.blocks();
        blocks.truncate((self.prompt / BLOCK) as usize);
        blocks
    }

    /// What a gateway knows of its beginning: a hash for every 128 tokens, as for 512 bytes.
    pub(super) fn beginning(&self) -> Vec<u64> {
        const TOLD: u64 = 128;
        let PromptBlocks { tokens, hashes } = &self.recorded;
        if hashes.is_empty() {
            let prompt = (self.prompt / BLOCK) as usize;
            return self.blocks().into_iter().take(prompt).skip(7).step_by(8).take(128).collect();
        }
        // The block in which such a stretch ends covers it; where that is longer, its stretches are told apart.
        let whole = hashes.len() as u64 * tokens / TOLD;
        let hash = |end: u64| {
            let block = (end * TOLD).div_ceil(*tokens) - 1;
            mix(hashes[block as usize] ^ (end * TOLD - block * tokens))
        };
        (1..=whole.min(128)).map(hash).collect()
    }

    /// Hashes of the blocks of its prompt and output.
    #[must_use]
    pub fn blocks(&self) -> Vec<u64> {
        if !self.recorded.hashes.is_empty() {
            return self.recorded.hashes.clone();
        }
        let SharedPrefix { app, app_tokens, conversation } = self.likeness;
        let known = if conversation == 0 { 0 } else { (self.prompt + self.output) / BLOCK };
        let origin = |block: u64| if (block + 1) * BLOCK <= app_tokens { (app, 1) } else { (conversation, 2) };
        let hash = |block: u64| {
            let (from, kind) = origin(block);
            mix(mix(from << 2 | kind) ^ block)
        };
        (0..known).map(hash).collect()
    }
}

impl Mix {
    /// Parses a mix.
    ///
    /// # Errors
    /// What is wrong, in a sentence.
    pub fn read(text: &str) -> Result<Mix, String> {
        let mix: Mix = serde_yaml::from_str(text).map_err(|error| error.to_string())?;
        for class in &mix.classes {
            if class.rank().is_none() {
                return Err(format!("class {}: there is no priority {:?}", class.class, class.priority));
            }
        }
        for flow in &mix.flows {
            if !mix.classes.iter().any(|class| class.class == flow.class) {
                return Err(format!("flow {}: there is no class {:?}", flow.flow, flow.class));
            }
            let phases = flow.phases.iter().flat_map(|phase| [phase.rate, phase.seconds]);
            let positive = [flow.share, flow.burstiness].into_iter().chain(flow.tenants.values().copied());
            if flow.tenants.is_empty() || !positive.chain(phases).all(|number| number > 0.0) {
                let message = "share, burstiness, phases and weights of tenants are positive";
                return Err(format!("flow {}: {message}", flow.flow));
            }
            if [flow.prompt, flow.output].iter().any(|length| length.p50 > length.most as f64) {
                return Err(format!("flow {}: the median lies beyond `most`", flow.flow));
            }
        }
        Ok(mix)
    }

    /// The mix on which the scheduler was tuned.
    #[must_use]
    pub fn published() -> Mix {
        Mix::read(include_str!("mix.yaml")).expect("a test reads it")
    }

    /// A second world with other engines and traffic, on which the scheduler was not tuned: a large model on a
    /// few GPUs, and an office's traffic.
    #[must_use]
    pub fn office() -> Mix {
        Mix::read(include_str!("office.yaml")).expect("a test reads it")
    }

    /// The same engines with nearly all traffic of one class, so that little can be sacrificed.
    #[must_use]
    pub fn mono() -> Mix {
        Mix::read(include_str!("mono.yaml")).expect("a test reads it")
    }

    /// A fleet whose load comes from a trace: two flows for each class, with streams and without them.
    #[must_use]
    pub fn recorded(engines: usize, classes: &[RecordedClass], seed: u64) -> Mix {
        let machine = Machine { max_running: 1, step_tokens: 1, kv_tokens: 1, max_model_len: 1, step: None };
        let class = |class: &RecordedClass| MixClass {
            class: class.name.clone(),
            priority: class.priority.as_str().to_owned(),
            objectives: Thresholds::default(),
            target: class.objectives.joint_target,
            each_target: None,
            patience_seconds: class.patience.as_secs_f64(),
            default_output_tokens: class.objectives.default_output().0,
            whole: Some(Box::new(class.objectives.clone())),
            whole_patience: Some(class.whole_patience),
        };
        let length = LengthRange { p50: 1.0, p95: 1.0, least: None, most: 1 };
        let flow = |class: &RecordedClass, streams: bool| MixFlow {
            flow: format!("{}{}", class.name, if streams { "" } else { " (whole)" }),
            class: class.name.clone(),
            streams,
            share: 1.0,
            burstiness: 1.0,
            phases: Vec::new(),
            prompt: length,
            output: length,
            cap: None,
            cap_share: 1.0,
            apps: Vec::new(),
            conversations: 0.0,
            bytes_per_token: None,
            reasoning: 0.0,
            tenants: BTreeMap::new(),
        };
        Mix {
            seed,
            engines,
            engine: machine,
            slowness: all_alike(),
            load_of_one: None,
            estimate_error: 0.0,
            classes: classes.iter().map(class).collect(),
            flows: classes.iter().flat_map(|class| [flow(class, true), flow(class, false)]).collect(),
        }
    }

    /// Without one flow; the arrivals of the others are unchanged.
    #[must_use]
    pub fn without(mut self, flow: &str) -> Mix {
        for out in self.flows.iter_mut().filter(|candidate| candidate.flow == flow) {
            out.tenants.clear();
        }
        self
    }

    /// With `times` as many requests in one flow, all with prompts of this many tokens.
    #[must_use]
    pub fn with_prompts(mut self, flow: &str, tokens: u64, times: f64) -> Mix {
        for changed in self.flows.iter_mut().filter(|candidate| candidate.flow == flow) {
            changed.prompt = LengthRange { p50: tokens as f64, p95: tokens as f64, least: None, most: tokens };
            changed.share *= times;
        }
        self
    }

    /// The class of a flow.
    #[must_use]
    pub fn class_of(&self, flow: usize) -> &MixClass {
        let name = &self.flows[flow].class;
        self.classes.iter().find(|class| class.class == *name).expect("it was checked when the mix was read")
    }

    /// The properties of an engine.
    #[must_use]
    pub fn shape(&self, number: usize) -> EngineSpec {
        EngineSpec { speed: 1.0 / self.slowness[number % self.slowness.len()], ..self.engine.spec() }
    }

    /// The arrivals in this time at `rate` requests per second, in order. `rate` is that of the whole mix, also
    /// with a flow removed.
    #[must_use]
    pub fn arrivals(&self, rate: f64, until: Duration) -> Vec<Arrival> {
        let shares: f64 = self.flows.iter().map(|flow| flow.share).sum();
        let mut arrivals = Vec::new();
        for (number, flow) in self.flows.iter().enumerate() {
            if flow.tenants.is_empty() {
                continue;
            }
            let weights: f64 = flow.tenants.values().sum();
            let rate = rate * flow.share / shares;
            if flow.phases.is_empty() {
                for (tenant, weight) in &flow.tenants {
                    self.stream(number, tenant, rate * weight / weights, until, &mut arrivals);
                }
            } else {
                let chance = StdRng::seed_from_u64(mix(self.seed ^ mix(number as u64)));
                CorrelatedBursts { mix: self, number, chance }.arrive(rate, until, &mut arrivals);
            }
        }
        arrivals.sort_by_key(|arrival| arrival.at);
        arrivals
    }

    /// A tenant's additional arrivals from some moment on: requests of the same kind, so that with the usual ones
    /// there are `times` as many.
    #[must_use]
    pub fn flood(&self, flood: &Flood, rate: f64, until: Duration) -> Vec<Arrival> {
        let mut more = self.clone();
        more.seed = mix(self.seed ^ 0xF100D);
        let mut arrivals = Vec::new();
        let shares: f64 = self.flows.iter().map(|flow| flow.share).sum();
        for (number, flow) in self.flows.iter().enumerate() {
            let Some(weight) = flow.tenants.get(&flood.tenant) else { continue };
            let part = weight / flow.tenants.values().sum::<f64>();
            more.flows[number].tenants = BTreeMap::from([(flood.tenant.clone(), 1.0)]);
            more.flows[number].phases = vec![Phase { rate: 1.0, seconds: 60.0 }];
            let chance = StdRng::seed_from_u64(mix(more.seed ^ mix(number as u64)));
            let rate = rate * flow.share / shares * part * (flood.times - 1.0);
            CorrelatedBursts { mix: &more, number, chance }.arrive(
                rate,
                until.saturating_sub(flood.from),
                &mut arrivals,
            );
        }
        arrivals.iter_mut().for_each(|arrival| arrival.at = arrival.at + flood.from);
        arrivals.sort_by_key(|arrival| arrival.at);
        arrivals
    }

    /// The same traffic as a plan for clients on sockets: lengths without clipping, arrivals without bursts, one
    /// flow per tenant. A request states its class in `x-slo-class` and its tenant by the key `sk-` plus the
    /// name.
    #[must_use]
    pub fn plan(&self, rate: f64, model: &str) -> TrafficPlan {
        let flows = self.flows.iter().enumerate().map(|(number, flow)| {
            let tenant = flow.tenants.keys().next().map_or("anonymous", String::as_str);
            let lengths = |length: LengthRange| LengthDistribution { p50: length.p50, p95: length.p95 };
            traffic::TrafficFlow {
                name: flow.flow.clone(),
                share: flow.share,
                style: match flow.streams {
                    true if flow.class == "inline_completion" => RequestStyle::Completion,
                    true => RequestStyle::Chat,
                    false => RequestStyle::Batch,
                },
                input: lengths(flow.prompt),
                output: lengths(flow.output),
                headers: vec![
                    ("x-slo-class".to_owned(), flow.class.clone()),
                    ("authorization".to_owned(), format!("Bearer sk-{tenant}")),
                ],
                leaves: 0.0,
                objectives: self.class_of(number).objectives(),
            }
        });
        let (flows, period) = (flows.collect(), Duration::from_secs(60));
        TrafficPlan { seed: self.seed, rate, swing: 0.0, period, model: model.to_owned(), flows }
    }

    fn stream(&self, number: usize, tenant: &str, rate: f64, until: Duration, arrivals: &mut Vec<Arrival>) {
        let flow = &self.flows[number];
        let name = tenant.bytes().fold(number as u64, |hash, byte| mix(hash ^ u64::from(byte)));
        let mut chance = StdRng::seed_from_u64(mix(self.seed ^ name));
        let shape = 1.0 / (flow.burstiness * flow.burstiness);
        let gaps = Gamma::new(shape, 1.0 / (rate * shape)).expect("positive numbers were asked for");
        let who = TenantId::from(tenant);
        let mut at = 0.0;
        loop {
            at += gaps.sample(&mut chance);
            if at >= until.as_secs_f64() {
                return;
            }
            let prompt = flow.prompt.draw(&mut chance);
            let output = flow.output.draw(&mut chance).min(flow.cap.unwrap_or(u64::MAX));
            let error = chance.random_range(1.0 - self.estimate_error..=1.0 + self.estimate_error);
            arrivals.push(Arrival {
                at: Tick::ZERO + Duration::from_secs_f64(at),
                flow: number,
                tenant: who.clone(),
                prompt,
                shown: PromptLength::Tokens((prompt as f64 * error) as u64),
                cap: flow.cap,
                output,
                likeness: SharedPrefix::default(),
                recorded: PromptBlocks::default(),
                line: 0,
                model: None,
                route: None,
            });
        }
    }
}

/// A flow whose tenants burst together. The number of requests is exactly that of its rate, their times are
/// random.
struct CorrelatedBursts<'a> {
    mix: &'a Mix,
    number: usize,
    chance: StdRng,
}

/// A conversation's last turn.
struct ConversationTurn {
    at: f64,
    likeness: SharedPrefix,
    /// Prompt and output.
    tokens: u64,
    tenant: TenantId,
}

/// Shortest time between turns of a conversation, seconds.
const READING_TIME: f64 = 15.0;

impl CorrelatedBursts<'_> {
    fn arrive(mut self, rate: f64, until: Duration, arrivals: &mut Vec<Arrival>) {
        let flow = &self.mix.flows[self.number];
        let mut turns: Vec<ConversationTurn> = Vec::new();
        for at in self.moments(rate, until.as_secs_f64()) {
            let capped = self.chance.random_bool(flow.cap_share);
            let cap = flow.cap.filter(|_| capped);
            let output = flow.output.draw(&mut self.chance).min(cap.unwrap_or(u64::MAX));
            let fresh = flow.prompt.draw(&mut self.chance);
            let (likeness, prompt, tenant) = match self.turn(&mut turns, at) {
                Some(before) => (before.likeness, before.tokens + (fresh / 8).clamp(20, 800), before.tenant),
                None => {
                    let likeness = self.opening();
                    (likeness, likeness.app_tokens + fresh, self.tenant())
                }
            };
            if flow.conversations > 0.0 {
                turns.push(ConversationTurn { at, likeness, tokens: prompt + output, tenant: tenant.clone() });
            }
            arrivals.push(Arrival {
                at: Tick::ZERO + Duration::from_secs_f64(at),
                flow: self.number,
                tenant,
                prompt,
                shown: match flow.bytes_per_token {
                    Some(bytes) => PromptLength::Bytes((prompt as f64 * bytes) as u64),
                    None => PromptLength::Tokens(prompt),
                },
                cap,
                output,
                likeness,
                recorded: PromptBlocks::default(),
                line: 0,
                model: None,
                route: None,
            });
        }
    }

    fn moments(&mut self, rate: f64, until: f64) -> Vec<f64> {
        let phases = &self.mix.flows[self.number].phases;
        let whole: f64 = phases.iter().map(|phase| phase.seconds).sum();
        let mut first = self.chance.random_range(0.0..whole);
        let mut phase = phases.iter().position(|phase| {
            first -= phase.seconds;
            first < 0.0
        });
        // Start of each phase, and the expected number of requests before it.
        let (mut pieces, mut from, mut before) = (Vec::new(), 0.0, 0.0);
        while from < until {
            let at = phase.unwrap_or(0);
            let Phase { rate, seconds } = phases[at];
            let length = (seconds * self.chance.sample::<f64, _>(Exp1)).min(until - from);
            pieces.push((from, before, rate));
            (from, before, phase) = (from + length, before + length * rate, Some((at + 1) % phases.len()));
        }
        let count = (rate * until).round() as usize;
        let mut moments: Vec<f64> = (0..count)
            .map(|_| {
                let drawn = self.chance.random_range(0.0..before);
                let piece = pieces.partition_point(|(_, before, _)| *before <= drawn) - 1;
                let (from, before, rate) = pieces[piece];
                (from + (drawn - before) / rate).min(until)
            })
            .collect();
        moments.sort_by(f64::total_cmp);
        moments
    }

    /// The turn that this request continues, if any.
    fn turn(&mut self, turns: &mut Vec<ConversationTurn>, at: f64) -> Option<ConversationTurn> {
        let flow = &self.mix.flows[self.number];
        if !self.chance.random_bool(flow.conversations) {
            return None;
        }
        let is_ready = |turn: &ConversationTurn| turn.at < at - READING_TIME && turn.tokens < flow.prompt.most;
        let ready: Vec<usize> = (0..turns.len()).filter(|place| is_ready(&turns[*place])).collect();
        let chosen = (self.chance.random::<f64>() * ready.len() as f64) as usize;
        ready.get(chosen).map(|place| turns.swap_remove(*place))
    }

    fn opening(&mut self) -> SharedPrefix {
        let apps = &self.mix.flows[self.number].apps;
        let drawn = self.chance.random::<f64>().powi(2) * apps.len() as f64;
        let place = drawn as usize;
        let Some(app_tokens) = apps.get(place).copied() else {
            return SharedPrefix { conversation: self.chance.random::<u64>() >> 3 | 1, ..SharedPrefix::default() };
        };
        let app = (self.number as u64) << 16 | place as u64;
        SharedPrefix { app, app_tokens, conversation: self.chance.random::<u64>() >> 3 | 1 }
    }

    fn tenant(&mut self) -> TenantId {
        let tenants = &self.mix.flows[self.number].tenants;
        let mut drawn = self.chance.random_range(0.0..tenants.values().sum());
        let found = tenants.iter().find(|(_, weight)| {
            drawn -= **weight;
            drawn < 0.0
        });
        TenantId::from(found.map_or("anonymous", |(name, _)| name.as_str()))
    }
}

impl MixClass {
    fn rank(&self) -> Option<Priority> {
        Priority::ALL.into_iter().find(|rank| rank.as_str() == self.priority)
    }

    /// Its priority.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.rank().expect("it was checked when the mix was read")
    }

    /// How long its clients wait for a first token, or for an answer that does not stream.
    #[must_use]
    pub fn patience(&self, streams: bool) -> Duration {
        self.whole_patience.filter(|_| !streams).unwrap_or(Duration::from_secs_f64(self.patience_seconds))
    }

    /// Attainment of each of its objectives.
    #[must_use]
    pub fn each_target(&self) -> f64 {
        self.each_target.unwrap_or(self.target)
    }

    /// Its objectives.
    #[must_use]
    pub fn objectives(&self) -> Objectives {
        if let Some(whole) = &self.whole {
            return (**whole).clone();
        }
        let objective = |seconds: Option<f64>| {
            let attainment = self.each_target();
            seconds.map(|seconds| Objective { threshold: Duration::from_secs_f64(seconds), attainment })
        };
        Objectives {
            ttft: objective(self.objectives.ttft_seconds),
            tpot: objective(self.objectives.tpot_seconds),
            e2e: objective(self.objectives.e2e_seconds),
            joint_target: self.target,
            default_output_tokens: Some(Tokens(self.default_output_tokens)),
            ..Objectives::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_mix_can_be_read_and_has_every_kind_of_traffic() {
        let mix = Mix::published();
        let flows: Vec<&str> = mix.flows.iter().map(|flow| flow.flow.as_str()).collect();
        assert_eq!(flows, ["voice", "inline_completion", "chat", "agent", "batch", "flood"]);
        assert_eq!(mix.class_of(0).priority(), Priority::Critical);
        assert!(mix.flows[5].prompt.p50 == 30_000.0 && mix.flows[5].class == mix.flows[2].class);
    }

    #[test]
    fn a_mix_that_makes_no_sense_is_told_apart() {
        let text = include_str!("mix.yaml");
        let broken = |from: &str, to: &str| Mix::read(&text.replacen(from, to, 1)).unwrap_err();
        assert!(broken("priority: high", "priority: hi").contains("there is no priority \"hi\""));
        assert!(broken("class: agent\n    streams", "class: agents\n    streams").contains("there is no class"));
        assert!(broken("share: 20", "share: 0").contains("positive"));
        assert!(broken("p50: 400,", "p50: 4001,").contains("beyond `most`"));
        assert!(broken("seed:", "sead:").contains("sead"));
    }

    #[test]
    fn arrivals_have_the_rate_and_the_shares_and_one_flow_less_changes_no_other() {
        let mix = Mix::published();
        let hour = Duration::from_secs(3600);
        let all = mix.arrivals(30.0, hour);
        assert!((29.0..31.0).contains(&(all.len() as f64 / 3600.0)), "{}", all.len());
        assert!(all.is_sorted_by_key(|arrival| arrival.at));
        let floods = all.iter().filter(|arrival| arrival.flow == 5).count() as f64 / all.len() as f64;
        assert!((0.018..0.022).contains(&floods), "{floods}");
        let calm = mix.without("flood").arrivals(30.0, hour);
        let rest: Vec<_> = all.into_iter().filter(|arrival| arrival.flow != 5).collect();
        assert_eq!(calm, rest);
    }

    #[test]
    fn a_median_is_where_the_file_puts_it_and_the_tail_is_cut() {
        let all = Mix::published().arrivals(30.0, Duration::from_secs(3600));
        let mut prompts: Vec<u64> = all.iter().filter(|arrival| arrival.flow == 2).map(|chat| chat.prompt).collect();
        prompts.sort_unstable();
        assert!((950..1050).contains(&prompts[prompts.len() / 2]), "{}", prompts[prompts.len() / 2]);
        assert!(*prompts.last().unwrap() <= 16_000 && prompts[prompts.len() * 97 / 100] > 5_000);
    }

    #[test]
    fn the_second_world_can_be_read_and_its_engines_are_what_the_file_says() {
        let (office, mono) = (Mix::office(), Mix::mono());
        let flows = |mix: &Mix| mix.flows.iter().map(|flow| flow.flow.clone()).collect::<Vec<_>>();
        assert_eq!(flows(&office), ["completion", "chat", "agent", "batch"]);
        assert_eq!(flows(&mono), ["chat", "batch"]);
        assert_eq!((office.load_of_one, mono.load_of_one), (Some(8.6), Some(11.9)));
        let slow = Mix { slowness: vec![1.0, 3.0], ..office };
        let shape = slow.shape(2);
        assert_eq!((shape.step_base, shape.per_context_token), (Duration::from_millis(32), Duration::from_nanos(40)));
        assert_eq!((shape.per_decode, shape.per_prefill), (Duration::from_micros(300), Duration::from_micros(300)));
        assert_eq!((shape.attention_doubles_at, shape.jitter, shape.speed), (Some(53_000), 0.0, 1.0));
        assert!((slow.shape(3).speed * 3.0 - 1.0).abs() < 1e-9);
        let objectives = slow.classes[0].objectives();
        assert_eq!((objectives.ttft.map(|ttft| ttft.attainment), objectives.joint_target), (Some(0.95), 0.92));
    }

    #[test]
    fn a_flow_with_phases_has_exactly_its_requests_in_bursts_that_its_tenants_share() {
        let all = Mix::office().arrivals(10.0, Duration::from_secs(3600));
        let of = |flow| all.iter().filter(move |arrival| arrival.flow == flow);
        assert_eq!([0, 1, 2, 3].map(|flow| of(flow).count()), [9_000, 16_200, 5_400, 5_400]);
        // Requests per four seconds: for a Poisson process the variance equals the mean.
        let dispersion = |flow| {
            let mut counts = vec![0.0; 900];
            of(flow).for_each(|arrival| counts[(arrival.at.as_nanos() / 4_000_000_000) as usize] += 1.0);
            let mean = counts.iter().sum::<f64>() / 900.0;
            counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / 900.0 / mean
        };
        assert!(dispersion(1) > 4.0 && (0.8..1.25).contains(&dispersion(2)), "{} {}", dispersion(1), dispersion(2));
        let of_web = of(1).filter(|arrival| arrival.tenant.as_str() == "web").count() as f64;
        assert!((0.48..0.52).contains(&(of_web / 16_200.0)), "{of_web}");
    }

    #[test]
    fn conversations_begin_as_their_earlier_turns_did_and_bytes_follow_tokens() {
        let all = Mix::office().arrivals(10.0, Duration::from_secs(1800));
        let mut turns: BTreeMap<u64, &Arrival> = BTreeMap::new();
        let mut later = 0;
        for arrival in all.iter().filter(|arrival| arrival.flow == 1) {
            if let Some(before) = turns.insert(arrival.likeness.conversation, arrival) {
                later += 1;
                let known = (before.prompt + before.output) / BLOCK;
                assert_eq!(arrival.blocks()[..known as usize], before.blocks()[..]);
                assert!(arrival.prompt >= before.prompt + before.output + 20 && arrival.tenant == before.tenant);
                assert!(arrival.at - before.at >= Duration::from_secs(15));
            }
        }
        assert!((0.36..0.42).contains(&(f64::from(later) / 8_100.0)), "{later}");
        let (chat, code) = (all.iter().find(|arrival| arrival.flow == 1), all.iter().find(|arrival| arrival.flow == 0));
        let bytes = |arrival: Option<&Arrival>| arrival.map(|arrival| (arrival.shown, arrival.prompt as f64)).unwrap();
        assert!(
            matches!(bytes(chat), (PromptLength::Bytes(bytes), tokens) if (bytes as f64 / tokens - 4.4).abs() < 0.1)
        );
        assert!(
            matches!(bytes(code), (PromptLength::Bytes(bytes), tokens) if (bytes as f64 / tokens - 3.3).abs() < 0.1)
        );
        let share = |a: &Arrival, b: &Arrival| a.blocks()[0] == b.blocks()[0];
        let chats: Vec<_> = all.iter().filter(|arrival| arrival.flow == 1).take(50).collect();
        assert!(chats[1..].iter().any(|other| share(other, chats[0])), "they have system prompts in common");
        let codes: Vec<_> = all.iter().filter(|arrival| arrival.flow == 0).take(50).collect();
        assert!(codes[1..].iter().all(|other| !share(other, codes[0])));
    }
}

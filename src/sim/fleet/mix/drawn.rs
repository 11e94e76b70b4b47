//! Random worlds, for laws that must hold in every world.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::{LengthRange, Machine, Mix, MixClass, MixFlow, Phase, StepTimes, Thresholds};

impl Mix {
    /// Engines, classes and traffic drawn from a seed. An idle engine, even the slowest one, keeps the objectives
    /// of the longest request, so that every miss is due to
    /// load.
    #[must_use]
    pub fn drawn(seed: u64) -> Mix {
        let mut draw = Draw(StdRng::seed_from_u64(seed));
        let (engine, step) = draw.engine();
        let engines = draw.0.random_range(1..=6);
        let mut slowness = vec![1.0; engines];
        if engines > 1 && draw.0.random_bool(0.25) {
            slowness[engines - 1] = draw.0.random_range(1.5..3.0);
        }
        let slowest = slowness.iter().copied().fold(1.0, f64::max);
        let idle = Idle { step, step_tokens: engine.step_tokens as f64, slowest };
        let count = draw.0.random_range(1..=5);
        let (classes, flows) = (0..count).map(|number| draw.class(number, &idle, &engine)).unzip();
        Mix { seed, engines, engine, slowness, load_of_one: None, estimate_error: 0.0, classes, flows }
    }
}

/// Latency of an idle engine.
struct Idle {
    step: StepTimes,
    step_tokens: f64,
    slowest: f64,
}

impl Idle {
    /// Milliseconds of prefill.
    fn reads(&self, prompt: f64) -> f64 {
        let steps = (prompt / self.step_tokens).ceil();
        let attention = 1.0 + prompt / 2.0 / self.step.attention_doubles_at as f64;
        let tokens = self.step.per_prefill_token_ms * prompt * attention;
        self.slowest * (steps * (self.step.base_ms + self.step.per_request_ms) + tokens)
    }

    /// Milliseconds per further token.
    fn pace(&self, context: f64) -> f64 {
        let context = self.step.per_context_token_ms * context;
        self.slowest * (self.step.base_ms + self.step.per_request_ms + context)
    }
}

struct Draw(StdRng);

impl Draw {
    /// Log-uniform.
    fn between(&mut self, least: f64, most: f64) -> f64 {
        self.0.random_range(least.ln()..most.ln()).exp()
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        *choices.choose(&mut self.0).expect("there are some")
    }

    fn engine(&mut self) -> (Machine, StepTimes) {
        let step = StepTimes {
            base_ms: self.between(5.0, 50.0),
            per_request_ms: self.between(0.05, 0.5),
            per_prefill_token_ms: self.between(0.02, 0.3),
            per_context_token_ms: self.between(0.000_01, 0.000_1),
            attention_doubles_at: self.between(20_000.0, 100_000.0) as u64,
        };
        let machine = Machine {
            max_running: self.of(&[64, 128, 256]),
            step_tokens: self.of(&[512, 1024, 2048, 4096, 8192]),
            kv_tokens: self.between(80_000.0, 400_000.0) as u64,
            max_model_len: 32_768,
            step: Some(step),
        };
        (machine, step)
    }

    fn length(&mut self, (least, most): (f64, f64), tail: (f64, f64)) -> LengthRange {
        let p50 = self.between(least, most).round();
        let p95 = (p50 * self.between(tail.0, tail.1)).round();
        LengthRange { p50, p95, least: Some(1), most: (2.0 * p95) as u64 }
    }

    fn class(&mut self, number: usize, idle: &Idle, engine: &Machine) -> (MixClass, MixFlow) {
        let mut prompt = self.length((100.0, 3000.0), (2.0, 6.0));
        prompt.most = prompt.most.min(engine.kv_tokens / 8);
        let output = self.length((8.0, 300.0), (2.0, 4.0));
        let apps: Vec<u64> = if self.0.random_bool(0.5) {
            (0..self.0.random_range(1..=6)).map(|_| self.0.random_range(100..1500)).collect()
        } else {
            Vec::new()
        };
        let longest = (prompt.most + apps.iter().max().unwrap_or(&0)) as f64 + output.most as f64 + 800.0;
        let streams = self.0.random_bool(0.75);
        let whole = !streams || self.0.random_bool(0.2);
        let (reads, pace) = (idle.reads(longest), idle.pace(longest));
        let seconds = |millis: f64, times: f64| Some(millis * times / 1000.0);
        let objectives = match whole {
            true => Thresholds {
                e2e_seconds: seconds(reads + pace * output.most as f64, self.between(1.5, 5.0)),
                ..Thresholds::default()
            },
            false => Thresholds {
                ttft_seconds: seconds(reads + pace, self.between(1.5, 6.0)),
                tpot_seconds: seconds(pace, self.between(1.5, 5.0)).filter(|_| self.0.random_bool(0.8)),
                e2e_seconds: None,
            },
        };
        let limit = objectives.ttft_seconds.or(objectives.e2e_seconds).unwrap_or(10.0);
        let name = format!("class_{number}");
        let class = MixClass {
            class: name.clone(),
            priority: self.of(&["critical", "high", "normal", "normal", "low", "batch"]).to_owned(),
            objectives,
            target: self.of(&[0.9, 0.95]),
            each_target: None,
            patience_seconds: limit * self.between(1.5, 5.0),
            default_output_tokens: output.p95 as u64,
            whole: None,
            whole_patience: None,
        };
        let bursts = vec![Phase { rate: 0.5, seconds: 12.0 }, Phase { rate: 2.5, seconds: 4.0 }];
        let even = vec![Phase { rate: 1.0, seconds: 60.0 }];
        let tenants = 0..self.0.random_range(1..=4);
        let flow = MixFlow {
            flow: name.clone(),
            class: name,
            streams,
            share: self.between(1.0, 10.0),
            burstiness: 1.0,
            phases: if self.0.random_bool(0.5) { bursts } else { even },
            prompt,
            output,
            cap: self.0.random_bool(0.7).then_some(output.most),
            cap_share: self.of(&[0.3, 1.0]),
            apps,
            conversations: self.of(&[0.0, 0.0, 0.3, 0.5]),
            bytes_per_token: Some(self.0.random_range(3.0..4.8)),
            reasoning: 0.0,
            tenants: tenants
                .map(|tenant| (format!("tenant_{tenant}"), self.between(1.0, 4.0)))
                .collect::<BTreeMap<_, _>>(),
        };
        (class, flow)
    }
}

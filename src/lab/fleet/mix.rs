//! What is asked of the fleet, as a file says it, and the arrivals that follow from it.
//!
//! Each tenant's part of a flow is a stream of its own with its own chance: the same seed gives
//! the same arrivals, and a flow that is taken out changes nothing in the others.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Gamma};
use serde::Deserialize;

use crate::judge::{Objective, Objectives};
use crate::lab::engine::{Lengths, Shape, mix};
use crate::lab::traffic::{self, Plan, Style};
use crate::units::{Priority, TenantId, Tick, Tokens};

/// A fleet and its load, as the file says.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mix {
    /// Decides everything that is drawn.
    pub seed: u64,
    /// How many engines there are.
    pub engines: usize,
    /// What each of them is.
    pub engine: Machine,
    /// How wrong the estimate of a prompt's length may be, as a share of it, either way.
    pub estimate_error: f64,
    /// The promises.
    pub classes: Vec<Class>,
    /// The traffic.
    pub flows: Vec<Flow>,
}

/// The parts of an engine's [`Shape`] that the file sets; the rest are its defaults.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Requests in one batch.
    pub max_running: usize,
    /// Tokens in one step.
    pub step_tokens: u64,
    /// Room of the key-value cache.
    pub kv_tokens: u64,
    /// Longest prompt plus answer.
    pub max_model_len: u64,
}

/// One promise.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// Its name.
    pub class: String,
    /// The word of its rank.
    priority: String,
    objectives: Thresholds,
    /// The share of requests on which all objectives should hold.
    pub target: f64,
    patience_seconds: f64,
    default_output_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Thresholds {
    ttft_seconds: Option<f64>,
    tpot_seconds: Option<f64>,
    e2e_seconds: Option<f64>,
}

/// Requests of one kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flow {
    /// What it is called in reports.
    pub flow: String,
    /// The class it belongs to.
    pub class: String,
    /// Whether it asks for streams.
    pub streams: bool,
    /// Its share of all requests, against the shares of the others.
    pub share: f64,
    burstiness: f64,
    prompt: Length,
    output: Length,
    /// The output cap that its requests state.
    pub cap: Option<u64>,
    /// The share of its output that is reasoning, which can be switched off.
    #[serde(default)]
    pub reasoning: f64,
    /// Who asks, and with what weight.
    pub tenants: BTreeMap<String, f64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Length {
    p50: f64,
    p95: f64,
    most: u64,
}

impl Length {
    /// Drawn again until it fits: a tail that is cut off, not piled up at its end.
    fn draw(self, chance: &mut StdRng) -> u64 {
        let lengths = Lengths { p50: self.p50, p95: self.p95 };
        loop {
            let drawn = lengths.draw(chance);
            if drawn <= self.most {
                return drawn;
            }
        }
    }
}

/// One request that arrives.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// When.
    pub at: Tick,
    /// Whose: an index into [`Mix::flows`].
    pub flow: usize,
    /// Who asks.
    pub tenant: TenantId,
    /// Prompt tokens.
    pub prompt: u64,
    /// Prompt tokens, as the gateway estimates them.
    pub estimate: u64,
    /// Output tokens that it will have; nobody knows before.
    pub output: u64,
}

impl Mix {
    /// Reads a mix.
    ///
    /// # Errors
    /// What is wrong with it, in a sentence.
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
            let positive =
                flow.share > 0.0 && flow.burstiness > 0.0 && flow.tenants.values().all(|weight| *weight > 0.0);
            if !positive || flow.tenants.is_empty() {
                return Err(format!("flow {}: share, burstiness and weights of tenants are positive", flow.flow));
            }
            if [flow.prompt, flow.output].iter().any(|length| length.p50 > length.most as f64) {
                return Err(format!("flow {}: the median lies beyond `most`", flow.flow));
            }
        }
        Ok(mix)
    }

    /// The mix that the published figures are made with.
    #[must_use]
    pub fn published() -> Mix {
        Mix::read(include_str!("mix.yaml")).expect("a test reads it")
    }

    /// The same, without one flow; the arrivals of the others stay as they are.
    #[must_use]
    pub fn without(mut self, flow: &str) -> Mix {
        for out in self.flows.iter_mut().filter(|candidate| candidate.flow == flow) {
            out.tenants.clear();
        }
        self
    }

    /// The same with `times` as many requests in one flow, all with prompts of so many tokens.
    #[must_use]
    pub fn with_prompts(mut self, flow: &str, tokens: u64, times: f64) -> Mix {
        for changed in self.flows.iter_mut().filter(|candidate| candidate.flow == flow) {
            changed.prompt = Length { p50: tokens as f64, p95: tokens as f64, most: tokens };
            changed.share *= times;
        }
        self
    }

    /// The class of a flow.
    #[must_use]
    pub fn class_of(&self, flow: usize) -> &Class {
        let name = &self.flows[flow].class;
        self.classes.iter().find(|class| class.class == *name).expect("it was checked when the mix was read")
    }

    /// What each engine is made of.
    #[must_use]
    pub fn shape(&self) -> Shape {
        let Machine { max_running, step_tokens, kv_tokens, max_model_len } = self.engine;
        Shape { max_running, step_tokens, kv_tokens, max_model_len, ..Shape::default() }
    }

    /// What arrives in this time at `rate` requests per second, in order. With a flow taken out
    /// the rate is that of the whole mix still.
    #[must_use]
    pub fn arrivals(&self, rate: f64, until: Duration) -> Vec<Arrival> {
        let shares: f64 = self.flows.iter().map(|flow| flow.share).sum();
        let mut arrivals = Vec::new();
        for (number, flow) in self.flows.iter().enumerate() {
            let weights: f64 = flow.tenants.values().sum();
            for (tenant, weight) in &flow.tenants {
                let rate = rate * flow.share / shares * weight / weights;
                self.stream(number, tenant, rate, until, &mut arrivals);
            }
        }
        arrivals.sort_by_key(|arrival| arrival.at);
        arrivals
    }

    /// The same traffic as a plan for clients on sockets: lengths without the cut, arrivals
    /// without bursts, each flow of one tenant. A request says its class in `x-slo-class` and its
    /// tenant in a key, `sk-` and the name.
    #[must_use]
    pub fn plan(&self, rate: f64, model: &str) -> Plan {
        let flows = self.flows.iter().enumerate().map(|(number, flow)| {
            let tenant = flow.tenants.keys().next().map_or("anonymous", String::as_str);
            let lengths = |length: Length| Lengths { p50: length.p50, p95: length.p95 };
            traffic::Flow {
                name: flow.flow.clone(),
                share: flow.share,
                style: match flow.streams {
                    true if flow.class == "inline_completion" => Style::Completion,
                    true => Style::Chat,
                    false => Style::Batch,
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
        Plan { seed: self.seed, rate, swing: 0.0, period, model: model.to_owned(), flows }
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
                estimate: (prompt as f64 * error) as u64,
                output,
            });
        }
    }
}

impl Class {
    fn rank(&self) -> Option<Priority> {
        Priority::ALL.into_iter().find(|rank| rank.as_str() == self.priority)
    }

    /// Its rank.
    #[must_use]
    pub fn priority(&self) -> Priority {
        self.rank().expect("it was checked when the mix was read")
    }

    /// How long its clients wait.
    #[must_use]
    pub fn patience(&self) -> Duration {
        Duration::from_secs_f64(self.patience_seconds)
    }

    /// What its requests are judged by.
    #[must_use]
    pub fn objectives(&self) -> Objectives {
        let objective = |seconds: Option<f64>| {
            seconds.map(|seconds| Objective { threshold: Duration::from_secs_f64(seconds), attainment: self.target })
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
}

//! What is asked of a service: classes, lengths, arrivals, cache state, and the requests that follow from
//! them. Pure.

use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::arrivals::{ArrivalProcess, ArrivalTimes};
use super::lengths::LengthModel;
use super::plan::{LoadClass, PlannedRequest};
use super::prompts::{PromptCalibration, PromptMaker, PromptText};
use crate::types::{ApiPath, Dialect, Tokens};

/// What prefix caches hold for a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum CacheState {
    /// Nothing: every prompt is unlike every other one, of this run and of earlier ones.
    Cold,
    /// The first part of every prompt.
    Warm {
        /// Share of a prompt's tokens that it has in common with its group.
        hit_share: f64,
        /// Groups of prompts with a common beginning.
        groups: usize,
    },
}

impl CacheState {
    /// `cold` or `warm`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            CacheState::Cold => "cold",
            CacheState::Warm { .. } => "warm",
        }
    }
}

/// One class of a workload.
#[derive(Clone, Debug)]
pub struct WorkloadClass {
    /// How its requests are judged.
    pub load: LoadClass,
    /// Its share of the requests, against the weights of the others.
    pub weight: f64,
    /// How long its prompts and answers are.
    pub lengths: LengthModel,
}

/// A workload, whatever its rate.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Model asked for.
    pub model: String,
    /// Path of every request.
    pub endpoint: ApiPath,
    /// Whether answers are streamed.
    pub stream: bool,
    /// Classes.
    pub classes: Vec<WorkloadClass>,
    /// Arrivals.
    pub arrivals: ArrivalProcess,
    /// Tells engines to go on to the planned length (vLLM, SGLang, llama.cpp).
    pub ignore_eos: bool,
    /// Prompts are cut at this length, and answers at what is left of it.
    pub max_context: Option<u64>,
    /// Further fields of every body; they replace those of the same name.
    pub extra: Map<String, Value>,
    /// How words become tokens.
    pub calibration: PromptCalibration,
}

/// Seeds of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSeeds {
    /// Decides arrivals, classes and lengths.
    pub plan: u64,
    /// Decides the text of prompts. Never the same twice, or a cache would know them.
    pub prompts: u64,
}

impl RunSeeds {
    /// Seeds of the run with this number.
    #[must_use]
    pub fn derive(self, number: u64) -> Self {
        RunSeeds { plan: scrambled(self.plan, number), prompts: scrambled(self.prompts, number) }
    }
}

/// A number that looks like chance (the finisher of splitmix64).
fn scrambled(seed: u64, number: u64) -> u64 {
    let mut z = seed.wrapping_add(number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Workload {
    /// The requests of a run at this rate, for ever.
    #[must_use]
    pub fn requests(&self, cache: CacheState, rate: f64, seeds: RunSeeds) -> WorkloadRequests<'_> {
        let (shared, groups) = match cache {
            CacheState::Cold => (0.0, 1),
            CacheState::Warm { hit_share, groups } => (hit_share, groups),
        };
        WorkloadRequests {
            workload: self,
            times: self.arrivals.at_rate(rate, scrambled(seeds.plan, 0)),
            chance: StdRng::seed_from_u64(scrambled(seeds.plan, 1)),
            prompts: PromptMaker::new(self.calibration, shared, groups, seeds.prompts),
            total_weight: self.classes.iter().map(|class| class.weight).sum(),
            drawn: vec![0; self.classes.len()],
            number: 0,
        }
    }

    /// A body of this workload.
    #[must_use]
    pub fn body(&self, prompt: &PromptText, output: u64, stream: bool) -> Bytes {
        let dialect = self.endpoint.dialect();
        let mut body = Map::new();
        body.insert("model".to_owned(), json!(self.model));
        let whole = || format!("{}{}", prompt.shared, prompt.own);
        match dialect {
            Dialect::Chat => {
                let mut messages = vec![json!({"role": "user", "content": prompt.own})];
                if !prompt.shared.is_empty() {
                    messages.insert(0, json!({"role": "system", "content": prompt.shared}));
                }
                body.insert("messages".to_owned(), json!(messages));
            }
            Dialect::Messages => {
                if !prompt.shared.is_empty() {
                    body.insert("system".to_owned(), json!(prompt.shared));
                }
                body.insert("messages".to_owned(), json!([{"role": "user", "content": prompt.own}]));
            }
            Dialect::Completions => drop(body.insert("prompt".to_owned(), json!(whole()))),
            Dialect::Responses | Dialect::Plain => drop(body.insert("input".to_owned(), json!(whole()))),
        }
        if dialect.generates() {
            let cap = if dialect == Dialect::Responses { "max_output_tokens" } else { "max_tokens" };
            body.insert(cap.to_owned(), json!(output));
            if stream {
                body.insert("stream".to_owned(), json!(true));
            }
            let is_openai = matches!(dialect, Dialect::Chat | Dialect::Completions);
            if stream && is_openai {
                body.insert("stream_options".to_owned(), json!({"include_usage": true}));
            }
            if self.ignore_eos {
                body.insert("ignore_eos".to_owned(), json!(true));
            }
        }
        body.extend(self.extra.clone());
        Bytes::from(Value::Object(body).to_string())
    }

    /// Lengths as they can be asked for.
    pub(super) fn bounded(&self, (input, output): (u64, u64)) -> (u64, u64) {
        let Some(most) = self.max_context else { return (input, output) };
        let input = input.clamp(1, most.saturating_sub(1).max(1));
        (input, output.clamp(1, most.saturating_sub(input).max(1)))
    }
}

/// The requests of a run.
pub struct WorkloadRequests<'a> {
    workload: &'a Workload,
    times: ArrivalTimes,
    chance: StdRng,
    prompts: PromptMaker,
    total_weight: f64,
    /// Requests drawn of each class.
    drawn: Vec<u64>,
    number: u64,
}

impl WorkloadRequests<'_> {
    fn draw_class(&mut self) -> usize {
        let mut left = self.chance.random::<f64>() * self.total_weight;
        for (index, class) in self.workload.classes.iter().enumerate() {
            left -= class.weight;
            if left < 0.0 {
                return index;
            }
        }
        self.workload.classes.len() - 1
    }

    fn request(&mut self, at: Duration) -> PlannedRequest {
        let workload = self.workload;
        let class = self.draw_class();
        let lengths = workload.classes[class].lengths.draw(self.drawn[class], &mut self.chance);
        self.drawn[class] += 1;
        let (input, output) = workload.bounded(lengths);
        let prompt = self.prompts.prompt(input);
        let tag = self.number;
        self.number += 1;
        PlannedRequest {
            at,
            class,
            endpoint: workload.endpoint,
            stream: workload.stream,
            body: workload.body(&prompt, output, workload.stream),
            input_tokens: Some(input),
            output_cap: workload.endpoint.dialect().generates().then_some(Tokens(output)),
            leaves_after: None,
            authorization: None,
            tag,
        }
    }
}

impl Iterator for WorkloadRequests<'_> {
    type Item = PlannedRequest;

    fn next(&mut self) -> Option<PlannedRequest> {
        if self.workload.classes.is_empty() {
            return None;
        }
        let at = self.times.next()?;
        Some(self.request(at))
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderMap;

    use super::*;
    use crate::forward::settings::Timeouts;
    use crate::judge::Objectives;
    use crate::load::lengths::TokenLengths;
    use crate::types::ClassId;

    fn workload(path: &str) -> Workload {
        let class = |name: &str, weight| WorkloadClass {
            load: LoadClass {
                id: ClassId::from(name),
                objectives: Objectives::default(),
                timeouts: Timeouts::default(),
                headers: HeaderMap::new(),
            },
            weight,
            lengths: LengthModel::fitted(
                TokenLengths::lognormal(200.0, 900.0).unwrap(),
                TokenLengths::lognormal(50.0, 200.0).unwrap(),
                0.3,
            )
            .unwrap(),
        };
        Workload {
            model: "m\"1".to_owned(),
            endpoint: ApiPath::relayed(path).unwrap(),
            stream: true,
            classes: vec![class("chat", 3.0), class("voice", 1.0)],
            arrivals: ArrivalProcess::Poisson,
            ignore_eos: true,
            max_context: Some(1000),
            extra: json!({"temperature": 0}).as_object().unwrap().clone(),
            calibration: PromptCalibration::default(),
        }
    }

    const SEEDS: RunSeeds = RunSeeds { plan: 1, prompts: 2 };
    const WARM: CacheState = CacheState::Warm { hit_share: 0.5, groups: 1 };

    fn bodies(path: &str, cache: CacheState) -> Vec<Value> {
        let workload = workload(path);
        let requests = workload.requests(cache, 10.0, SEEDS).take(3);
        requests.map(|request| serde_json::from_slice(&request.body).unwrap()).collect()
    }

    #[test]
    fn bodies_are_those_of_their_dialect() {
        let chat = &bodies("/v1/chat/completions", WARM)[0];
        assert_eq!((&chat["messages"][0]["role"], &chat["messages"][1]["role"]), (&json!("system"), &json!("user")));
        assert_eq!(chat["stream_options"], json!({"include_usage": true}));
        assert_eq!((&chat["model"], &chat["temperature"]), (&json!("m\"1"), &json!(0)));
        assert_eq!((&chat["ignore_eos"], &chat["stream"]), (&json!(true), &json!(true)));
        assert_eq!(bodies("/v1/chat/completions", CacheState::Cold)[0]["messages"][0]["role"], "user");
        assert!(bodies("/v1/completions", WARM)[0]["prompt"].is_string());
        assert!(bodies("/v1/messages", WARM)[0]["system"].is_string());
        let responses = &bodies("/v1/responses", WARM)[0];
        assert!(responses["max_output_tokens"].is_u64() && responses["stream_options"].is_null());
        let embeddings = &bodies("/v1/embeddings", WARM)[0];
        assert!(embeddings["input"].is_string() && embeddings["max_tokens"].is_null());
    }

    #[test]
    fn classes_come_by_their_weights_and_lengths_stay_in_the_context() {
        let workload = workload("/v1/chat/completions");
        let requests: Vec<_> = workload.requests(CacheState::Cold, 10.0, SEEDS).take(4000).collect();
        let voices = requests.iter().filter(|request| request.class == 1).count();
        assert!((900..1100).contains(&voices), "{voices}");
        for request in &requests {
            assert!(request.input_tokens.unwrap() + request.output_cap.unwrap().0 <= 1000);
        }
    }

    #[test]
    fn lengths_and_times_follow_their_seed_and_texts_their_own() {
        let workload = workload("/v1/chat/completions");
        let of = |seeds| workload.requests(CacheState::Cold, 10.0, seeds).take(20).collect::<Vec<_>>();
        let (first, other) = (of(SEEDS), of(RunSeeds { prompts: 3, ..SEEDS }));
        assert_eq!(first, of(SEEDS));
        let plan = |all: &[PlannedRequest]| -> Vec<_> {
            all.iter().map(|request| (request.at, request.class, request.input_tokens, request.output_cap)).collect()
        };
        assert_eq!(plan(&first), plan(&other));
        assert!(first.iter().zip(&other).all(|(a, b)| a.body != b.body));
        assert_ne!(SEEDS.derive(0), SEEDS.derive(1));
    }
}

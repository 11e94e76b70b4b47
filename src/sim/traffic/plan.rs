//! Load plan: a seeded, open-loop stream of requests. Pure.
//!
//! Arrivals are a Poisson process: requests come regardless of earlier responses. Its rate may swing (a day
//! within a minute), by thinning. Lengths are log-normal by median and 95th percentile. Equal seeds give
//! equal requests at equal moments.

use std::f64::consts::TAU;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use crate::judge::Objectives;
use crate::sim::engine::{LengthDistribution, mix};
use crate::types::Dialect;

/// A mix of flows and their rate.
#[derive(Clone, Debug)]
pub struct TrafficPlan {
    /// Seed of everything random.
    pub seed: u64,
    /// Mean rate, requests per second.
    pub rate: f64,
    /// Relative amplitude of the rate; 0 for a constant rate.
    pub swing: f64,
    /// Period of the rate.
    pub period: Duration,
    /// The requested model.
    pub model: String,
    /// The flows.
    pub flows: Vec<TrafficFlow>,
}

/// Requests of one kind: the traffic of one class.
#[derive(Clone, Debug)]
pub struct TrafficFlow {
    /// Its name in counts.
    pub name: String,
    /// Its share of all requests, relative to the others.
    pub share: f64,
    /// Kind of its requests.
    pub style: RequestStyle,
    /// Prompt tokens.
    pub input: LengthDistribution,
    /// Output tokens, sent as the cap, and the actual length if the engine honours `ignore_eos`.
    pub output: LengthDistribution,
    /// Headers of each request: a key, a class.
    pub headers: Vec<(String, String)>,
    /// Share of requests whose client disconnects early.
    pub leaves: f64,
    /// Objectives by which its responses are judged.
    pub objectives: Objectives,
}

/// Kind of a flow's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestStyle {
    /// `chat/completions`, streaming.
    Chat,
    /// `completions`, streaming, as sent by an editor at each pause.
    Completion,
    /// `chat/completions`, non-streaming, with a required tool call.
    Agent,
    /// `chat/completions`, non-streaming.
    Batch,
}

impl RequestStyle {
    /// Its API path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            RequestStyle::Completion => "/v1/completions",
            RequestStyle::Chat | RequestStyle::Agent | RequestStyle::Batch => "/v1/chat/completions",
        }
    }

    /// Its wire format.
    #[must_use]
    pub const fn dialect(self) -> Dialect {
        match self {
            RequestStyle::Completion => Dialect::Completions,
            RequestStyle::Chat | RequestStyle::Agent | RequestStyle::Batch => Dialect::Chat,
        }
    }

    /// Whether it streams.
    #[must_use]
    pub const fn streams(self) -> bool {
        matches!(self, RequestStyle::Chat | RequestStyle::Completion)
    }
}

/// One request to send.
#[derive(Clone, Debug, PartialEq)]
pub struct TrafficRequest {
    /// Time from the start.
    pub at: Duration,
    /// Index into [`TrafficPlan::flows`].
    pub flow: usize,
    /// The body.
    pub body: Bytes,
    /// Its output cap.
    pub cap: u64,
    /// Time after which the client disconnects.
    pub leaves_after: Option<Duration>,
}

/// The requests of a plan, in order, endless.
pub struct TrafficRequests {
    plan: TrafficPlan,
    chance: StdRng,
    /// Seconds from the start.
    at: f64,
}

impl TrafficPlan {
    /// The requests.
    #[must_use]
    pub fn requests(&self) -> TrafficRequests {
        TrafficRequests { chance: StdRng::seed_from_u64(self.seed), plan: self.clone(), at: 0.0 }
    }

    /// Rate at this moment, requests per second.
    #[must_use]
    pub fn rate_at(&self, at: Duration) -> f64 {
        let turns = at.as_secs_f64() / self.period.as_secs_f64().max(1e-3);
        self.rate * (1.0 + self.swing.clamp(0.0, 1.0) * (TAU * turns).sin())
    }
}

impl Iterator for TrafficRequests {
    type Item = TrafficRequest;

    fn next(&mut self) -> Option<TrafficRequest> {
        if self.plan.flows.is_empty() || self.plan.rate <= 0.0 {
            return None;
        }
        let highest = self.plan.rate * (1.0 + self.plan.swing.clamp(0.0, 1.0));
        let at = loop {
            // A candidate at the highest rate, kept with the probability of the actual rate.
            self.at += -(1.0 - self.chance.random::<f64>()).ln() / highest;
            let at = Duration::try_from_secs_f64(self.at).ok()?;
            if self.chance.random::<f64>() * highest <= self.plan.rate_at(at) {
                break at;
            }
        };
        Some(self.request(at))
    }
}

impl TrafficRequests {
    fn request(&mut self, at: Duration) -> TrafficRequest {
        let number = self.draw_flow();
        let flow = &self.plan.flows[number];
        let (prompt, cap) = (flow.input.draw(&mut self.chance), flow.output.draw(&mut self.chance));
        let leaves = self.chance.random::<f64>() < flow.leaves;
        // Between a very impatient and a very patient client.
        let leaves_after = leaves.then(|| Duration::from_millis(self.chance.random_range(20..4_000)));
        let body = self.body(number, prompt, cap);
        TrafficRequest { at, flow: number, body, cap, leaves_after }
    }

    fn draw_flow(&mut self) -> usize {
        let shares = self.plan.flows.iter().map(|flow| flow.share.max(0.0));
        let mut left = self.chance.random::<f64>() * shares.clone().sum::<f64>();
        for (number, share) in shares.enumerate() {
            left -= share;
            if left < 0.0 {
                return number;
            }
        }
        self.plan.flows.len() - 1
    }

    fn body(&mut self, number: usize, prompt: u64, cap: u64) -> Bytes {
        let flow = &self.plan.flows[number];
        let (model, style) = (&self.plan.model, flow.style);
        // Half of a prompt is the flow's common prefix, which prefix caches can hold.
        let shared = words(number as u64, prompt / 2);
        let own = words(self.chance.random(), prompt - prompt / 2);
        let messages = json!([{"role": "system", "content": shared}, {"role": "user", "content": own}]);
        let usage = json!({"include_usage": true});
        let mut body = match style {
            RequestStyle::Chat => {
                json!({"model": model, "messages": messages, "stream": true, "stream_options": usage})
            }
            RequestStyle::Completion => {
                json!({"model": model, "prompt": shared + &own, "stream": true, "stream_options": usage})
            }
            RequestStyle::Agent | RequestStyle::Batch => json!({"model": model, "messages": messages}),
        };
        body["max_tokens"] = json!(cap);
        if style == RequestStyle::Agent {
            let parameters = json!({"type": "object", "properties": {"query": {"type": "string"}}});
            body["tools"] = json!([{"type": "function", "function": {"name": "search", "parameters": parameters}}]);
            body["tool_choice"] = json!("required");
        } else {
            body["ignore_eos"] = json!(true);
        }
        Bytes::from(body.to_string())
    }
}

/// Text for prompts, generated once, because most of a prompt only needs its length.
static POOL: LazyLock<String> = LazyLock::new(|| {
    const WORDS: [&str; 8] = ["rain ", "tea ", "map ", "oak ", "ship ", "glass ", "plum ", "owl "];
    let mut chance = StdRng::seed_from_u64(0);
    (0..16_384).map(|_| WORDS[chance.random_range(0..WORDS.len())]).collect()
});

/// About this many tokens of text, from a seeded position of the pool.
fn words(seed: u64, tokens: u64) -> String {
    let length = (tokens * 4) as usize;
    let mut text = String::with_capacity(length);
    let mut from = (mix(seed) % POOL.len() as u64) as usize;
    while text.len() < length {
        let piece = POOL.get(from..).unwrap_or_default();
        text.push_str(&piece[..piece.len().min(length - text.len())]);
        from = 0;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rate: f64, swing: f64) -> TrafficPlan {
        let flow = |name: &str, share, style| TrafficFlow {
            name: name.to_owned(),
            share,
            style,
            input: LengthDistribution { p50: 200.0, p95: 900.0 },
            output: LengthDistribution { p50: 50.0, p95: 200.0 },
            headers: Vec::new(),
            leaves: 0.1,
            objectives: Objectives::default(),
        };
        let flows = vec![flow("chat", 3.0, RequestStyle::Chat), flow("agent", 1.0, RequestStyle::Agent)];
        let period = Duration::from_secs(60);
        TrafficPlan { seed: 5, rate, swing, period, model: "m".to_owned(), flows }
    }

    #[test]
    fn the_same_seed_asks_the_same_at_the_same_moments() {
        let first: Vec<TrafficRequest> = plan(20.0, 0.5).requests().take(50).collect();
        assert_eq!(first, plan(20.0, 0.5).requests().take(50).collect::<Vec<_>>());
        let other = TrafficPlan { seed: 6, ..plan(20.0, 0.5) };
        assert_ne!(first, other.requests().take(50).collect::<Vec<_>>());
        assert!(first.is_sorted_by_key(|shot| shot.at));
    }

    #[test]
    fn arrivals_have_the_rate_the_shares_and_the_spread_of_a_poisson_process() {
        let shots: Vec<TrafficRequest> = plan(50.0, 0.0).requests().take(20_000).collect();
        let seconds = shots.last().unwrap().at.as_secs_f64();
        assert!((390.0..410.0).contains(&seconds), "{seconds}");
        let agents = shots.iter().filter(|shot| shot.flow == 1).count();
        assert!((4_800..5_200).contains(&agents), "{agents}");
        let leavers = shots.iter().filter(|shot| shot.leaves_after.is_some()).count();
        assert!((1_850..2_150).contains(&leavers), "{leavers}");
        // Counts per second: the variance equals the mean.
        let mut counts = vec![0.0; seconds as usize];
        for shot in &shots {
            if let Some(count) = counts.get_mut(shot.at.as_secs() as usize) {
                *count += 1.0;
            }
        }
        let mean = counts.iter().sum::<f64>() / counts.len() as f64;
        let variance = counts.iter().map(|count| (count - mean) * (count - mean)).sum::<f64>() / counts.len() as f64;
        assert!((0.8..1.25).contains(&(variance / mean)), "{variance} {mean}");
    }

    #[test]
    fn a_swing_moves_arrivals_from_the_valley_to_the_hill() {
        let plan = plan(50.0, 0.8);
        let shots: Vec<TrafficRequest> = plan.requests().take_while(|shot| shot.at < Duration::from_secs(60)).collect();
        let hill = shots.iter().filter(|shot| shot.at < Duration::from_secs(30)).count();
        assert!(hill > 2 * (shots.len() - hill), "{hill} of {}", shots.len());
    }

    #[test]
    fn bodies_are_what_their_style_says() {
        let shots: Vec<TrafficRequest> = plan(50.0, 0.0).requests().take(50).collect();
        for shot in shots {
            let body: serde_json::Value = serde_json::from_slice(&shot.body).unwrap();
            assert_eq!(body["max_tokens"], shot.cap);
            assert_eq!(body["stream"].as_bool().unwrap_or(false), shot.flow == 0);
            assert_eq!(body["tools"].is_array(), shot.flow == 1);
        }
    }
}

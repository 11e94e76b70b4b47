//! The metrics page with vLLM's names.

use std::fmt::Write as _;
use std::time::Duration;

use super::core::{Gauges, TokenGain};
use super::text::FinishReason;
use crate::types::Tick;

/// Counters beside the gauges.
#[derive(Debug)]
pub(super) struct SimCounts {
    pub aborted: u64,
    pub rejected: u64,
    stopped: u64,
    cut: u64,
    first_token: Histogram,
    between_tokens: Histogram,
    per_output_token: Histogram,
    e2e: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    prompt: Histogram,
    generated: Histogram,
}

/// Bucket edges of durations in seconds: from a step to minutes.
const SHORT: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const GAPS: &[f64] = &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0];
const LONG: &[f64] =
    &[0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0];
const TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0];

impl Default for SimCounts {
    fn default() -> Self {
        SimCounts {
            aborted: 0,
            rejected: 0,
            stopped: 0,
            cut: 0,
            first_token: Histogram::new(SHORT),
            between_tokens: Histogram::new(GAPS),
            per_output_token: Histogram::new(GAPS),
            e2e: Histogram::new(LONG),
            queue: Histogram::new(LONG),
            prefill: Histogram::new(LONG),
            decode: Histogram::new(LONG),
            inference: Histogram::new(LONG),
            prompt: Histogram::new(TOKENS),
            generated: Histogram::new(TOKENS),
        }
    }
}

impl SimCounts {
    /// Records tokens gained by a job; `before` is its previous gain.
    pub fn gain(&mut self, before: Option<Tick>, gain: &TokenGain) {
        if let Some(before) = before {
            self.between_tokens.time(gain.at - before);
        }
        let Some(life) = &gain.done else { return };
        self.first_token.time(life.first_token - life.arrived);
        self.e2e.time(life.ended - life.arrived);
        self.queue.time(life.started - life.arrived);
        self.prefill.time(life.first_token - life.started);
        self.decode.time(life.ended - life.first_token);
        self.inference.time(life.ended - life.started);
        self.prompt.note(life.prompt as f64);
        self.generated.note(life.output as f64);
        if let Some(gaps) = u32::try_from(life.output - 1).ok().filter(|gaps| *gaps > 0) {
            self.per_output_token.time((life.ended - life.first_token) / gaps);
        }
    }

    /// Records a finished choice.
    pub fn finished(&mut self, finish: FinishReason) {
        match finish {
            FinishReason::Length => self.cut += 1,
            FinishReason::Stop | FinishReason::Calls => self.stopped += 1,
        }
    }

    /// Formats the page.
    pub fn page(&self, gauges: &Gauges, model: &str) -> String {
        let mut page = MetricsPage { text: String::new(), model };
        page.single("num_requests_running", "gauge", "Requests in the batch.", gauges.running as f64);
        page.single("num_requests_waiting", "gauge", "Requests that wait.", gauges.waiting as f64);
        page.head("num_requests_waiting_by_reason", "gauge", "Requests that wait, by reason.");
        page.line("num_requests_waiting_by_reason", ",reason=\"capacity\"", gauges.waiting as f64);
        page.line("num_requests_waiting_by_reason", ",reason=\"deferred\"", 0.0);
        page.head("engine_sleep_state", "gauge", "Whether the engine sleeps.");
        for (state, value) in [("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)] {
            page.line("engine_sleep_state", &format!(",sleep_state=\"{state}\""), value);
        }
        page.single("kv_cache_usage_perc", "gauge", "Share of the key-value cache in use.", gauges.kv_usage);
        let queries = gauges.prefix_queries as f64;
        page.single("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache.", queries);
        page.single("prefix_cache_hits_total", "counter", "Tokens found there.", gauges.prefix_hits as f64);
        page.single("num_preemptions_total", "counter", "Preemptions.", gauges.preemptions as f64);
        page.single("prompt_tokens_total", "counter", "Prompt tokens.", gauges.prompt_tokens as f64);
        page.single("generation_tokens_total", "counter", "Generated tokens.", gauges.generated_tokens as f64);
        page.head("request_success_total", "counter", "Requests that ended, by reason.");
        for (reason, count) in [("stop", self.stopped), ("length", self.cut), ("abort", self.aborted), ("error", 0)] {
            page.line("request_success_total", &format!(",finished_reason=\"{reason}\""), count as f64);
        }
        page.head("admission_rejections_total", "counter", "Requests turned away by a full queue.");
        page.line("admission_rejections_total", ",reason=\"max_num_queued_reqs\"", self.rejected as f64);
        page.histogram("time_to_first_token_seconds", &self.first_token);
        page.histogram("inter_token_latency_seconds", &self.between_tokens);
        page.histogram("request_time_per_output_token_seconds", &self.per_output_token);
        page.histogram("e2e_request_latency_seconds", &self.e2e);
        page.histogram("request_queue_time_seconds", &self.queue);
        page.histogram("request_inference_time_seconds", &self.inference);
        page.histogram("request_prefill_time_seconds", &self.prefill);
        page.histogram("request_decode_time_seconds", &self.decode);
        page.histogram("request_prompt_tokens", &self.prompt);
        page.histogram("request_generation_tokens", &self.generated);
        page.text
    }
}

#[derive(Debug)]
struct Histogram {
    edges: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(edges: &'static [f64]) -> Self {
        Histogram { edges, counts: vec![0; edges.len() + 1], sum: 0.0 }
    }

    fn time(&mut self, length: Duration) {
        self.note(length.as_secs_f64());
    }

    fn note(&mut self, value: f64) {
        self.counts[self.edges.partition_point(|edge| *edge < value)] += 1;
        self.sum += value;
    }
}

struct MetricsPage<'a> {
    text: String,
    model: &'a str,
}

impl MetricsPage<'_> {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        write!(self.text, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}\n").expect("a String takes everything");
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let model = self.model.replace('\\', "\\\\").replace('"', "\\\"");
        writeln!(self.text, "vllm:{name}{{engine=\"0\",model_name=\"{model}\"{labels}}} {value:?}")
            .expect("a String takes everything");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, histogram: &Histogram) {
        self.head(name, "histogram", "As vLLM measures it.");
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        let edges = histogram.edges.iter().map(|edge| format!("{edge:?}")).chain(["+Inf".to_owned()]);
        for (edge, count) in edges.zip(&histogram.counts) {
            below += count;
            self.line(&bucket, &format!(",le=\"{edge}\""), below as f64);
        }
        self.line(&format!("{name}_count"), "", below as f64);
        self.line(&format!("{name}_sum"), "", histogram.sum);
    }
}

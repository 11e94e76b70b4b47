//! Inputs of a plan from its file and flags.

use std::path::PathBuf;

use serde::Deserialize;

use crate::capacity::kv::{KvCache, KvPrecision};
use crate::capacity::queueing::LognormalLength;
use crate::capacity::{
    CapacityInputs, ClassForecast, GpuPrice, InputProblem, KvRoom, PrefillFacts, PrefixCacheFacts, ReplicaFacts,
};
use crate::types::Priority;

/// The plan file: every key is optional, and flags take precedence.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawPlan {
    pub headroom: Option<f64>,
    pub spare: Option<u32>,
    pub burst: Option<f64>,
    pub current_replicas: Option<u32>,
    pub gpu_hour: Option<f64>,
    pub currency: Option<String>,
    pub gpus_per_replica: Option<u32>,
    pub tensor_parallel: Option<u32>,
    pub slots_per_replica: Option<u32>,
    pub model: Option<PathBuf>,
    pub kv_precision: Option<KvPrecision>,
    pub kv_bytes_per_token: Option<f64>,
    pub kv_tokens_per_replica: Option<f64>,
    pub gpu_memory_gib: Option<f64>,
    pub memory_utilization: Option<f64>,
    pub weights_gib: Option<f64>,
    pub classes: Vec<RawClass>,
}

/// One class of the plan.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawClass {
    pub class: Option<String>,
    pub priority: Option<String>,
    pub peak_rate: Option<f64>,
    pub mean_rate: Option<f64>,
    pub input_tokens: Option<RawLength>,
    pub output_tokens: Option<RawLength>,
    pub ttft_seconds: Option<f64>,
    pub tpot_seconds: Option<f64>,
    pub goodput: Option<f64>,
    pub target: Option<f64>,
    pub current_replicas: Option<u32>,
    pub prefill: Option<RawPrefill>,
    pub cache: Option<RawCache>,
}

/// A length: its mean, percentiles of a lognormal distribution, or both.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(untagged)]
pub(super) enum RawLength {
    Mean(f64),
    Law(RawLaw),
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawLaw {
    pub mean: Option<f64>,
    pub p50: Option<f64>,
    pub p95: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawPrefill {
    pub seconds: Option<f64>,
    pub rate: Option<f64>,
    pub ways: Option<u32>,
    pub speed_up: Option<f64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct RawCache {
    pub hit_rate: Option<f64>,
    pub hit_rate_p10: Option<f64>,
    pub prefill_share: Option<f64>,
}

/// Share of a GPU's memory that vLLM uses by default.
const MEMORY_UTILIZATION: f64 = 0.9;

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// Default devices and speed-up of a split prefill instance.
const PREFILL_SPLIT: (u32, f64) = (2, 1.6);

impl RawLength {
    /// Parses a flag: a mean (`1200`), percentiles (`p50=900,p95=6000`), or both.
    pub fn parse(text: &str) -> Result<RawLength, String> {
        if let Ok(mean) = text.parse() {
            return Ok(RawLength::Mean(mean));
        }
        let mut law = RawLaw::default();
        for part in text.split(',') {
            let told = "write a mean (1200) or percentiles (p50=900,p95=6000)";
            let (key, value) = part.split_once('=').ok_or(told)?;
            let value = Some(value.parse().map_err(|_| told)?);
            match key.trim() {
                "mean" => law.mean = value,
                "p50" => law.p50 = value,
                "p95" => law.p95 = value,
                _ => return Err(told.to_owned()),
            }
        }
        Ok(RawLength::Law(law))
    }
}

/// Builds the inputs and collects problems.
#[derive(Default)]
pub(super) struct InputBuilder {
    pub problems: Vec<InputProblem>,
}

impl InputBuilder {
    fn add(&mut self, place: impl Into<String>, text: impl Into<String>) {
        self.problems.push(InputProblem { place: place.into(), text: text.into() });
    }

    fn need(&mut self, place: String, value: Option<f64>, what: &str) -> f64 {
        value.unwrap_or_else(|| {
            self.add(place, format!("missing; give {what}"));
            f64::NAN
        })
    }

    /// Returns the inputs; after problems they serve only to find more of them.
    pub fn inputs(&mut self, raw: &RawPlan, config: Option<&str>) -> CapacityInputs {
        let usual = CapacityInputs::of(Vec::new());
        let classes = raw.classes.iter().enumerate().map(|(number, class)| self.class(number, class)).collect();
        let price = raw
            .gpu_hour
            .map(|hour| GpuPrice { hour, currency: raw.currency.clone().unwrap_or_else(|| "USD".to_owned()) });
        CapacityInputs {
            classes,
            replica: self.replica(raw, config),
            headroom: raw.headroom.unwrap_or(usual.headroom),
            spare: raw.spare.unwrap_or(usual.spare),
            burst: raw.burst.unwrap_or(usual.burst),
            current_replicas: raw.current_replicas,
            price,
        }
    }

    fn replica(&mut self, raw: &RawPlan, config: Option<&str>) -> ReplicaFacts {
        let gpus = raw.gpus_per_replica.unwrap_or(1);
        let cache = config.map(|text| KvCache::from_config(text, raw.kv_precision)).transpose();
        let kv_cache = cache.unwrap_or_else(|error| {
            self.add("model", error.to_string());
            None
        });
        if raw.kv_precision.is_some() && raw.model.is_none() {
            self.add("kv_precision", "it is of no use without `model`; give the model's config.json");
        }
        let kv_room = match (raw.kv_tokens_per_replica, raw.gpu_memory_gib) {
            (Some(tokens), _) => Some(KvRoom::Tokens(tokens)),
            (None, Some(memory)) => {
                let place = "weights_gib".to_owned();
                let weights = self.need(place, raw.weights_gib, "the size of the weights in one replica");
                let share = raw.memory_utilization.unwrap_or(MEMORY_UTILIZATION);
                Some(KvRoom::Bytes((f64::from(gpus) * memory * share - weights) * GIB))
            }
            (None, None) => {
                if raw.weights_gib.is_some() || raw.memory_utilization.is_some() {
                    self.add("gpu_memory_gib", "missing; give the memory of one GPU");
                }
                None
            }
        };
        ReplicaFacts {
            gpus,
            tensor_parallel: raw.tensor_parallel.unwrap_or(gpus),
            slots: raw.slots_per_replica,
            kv_bytes_per_token: raw.kv_bytes_per_token,
            kv_cache,
            kv_room,
        }
    }

    fn class(&mut self, number: usize, raw: &RawClass) -> ClassForecast {
        let at = |key: &str| format!("classes[{number}].{key}");
        let name = raw.class.clone().unwrap_or_else(|| "all".to_owned());
        let priority = raw.priority.as_deref().map_or(Some(Priority::Normal), |word| {
            Priority::ALL.into_iter().find(|priority| priority.as_str() == word)
        });
        let priority = priority.unwrap_or_else(|| {
            self.add(at("priority"), "it is one of critical, high, normal, low, batch");
            Priority::Normal
        });
        let (input_tokens, input_variation) = self.length(at("input_tokens"), raw.input_tokens, "prompt");
        let (output_tokens, _) = self.length(at("output_tokens"), raw.output_tokens, "output");
        ClassForecast {
            name,
            priority,
            peak_rate: self.need(at("peak_rate"), raw.peak_rate, "requests per second in the busiest five minutes"),
            mean_rate: raw.mean_rate,
            input_tokens,
            input_variation,
            output_tokens,
            ttft: self.need(at("ttft_seconds"), raw.ttft_seconds, "the mean seconds to the first token"),
            tpot: self.need(at("tpot_seconds"), raw.tpot_seconds, "mean seconds per output token at the planned rate"),
            goodput: self.need(at("goodput"), raw.goodput, "requests per second of one replica, or a sweep's summary"),
            target: self.need(at("target"), raw.target, "the joint attainment that is promised, such as 0.92"),
            current_replicas: raw.current_replicas,
            prefill: raw.prefill.map(|prefill| PrefillFacts {
                seconds: self.need(at("prefill.seconds"), prefill.seconds, "seconds of one device for the mean prompt"),
                rate: prefill.rate,
                ways: prefill.ways.unwrap_or(PREFILL_SPLIT.0),
                speed_up: prefill.speed_up.unwrap_or(PREFILL_SPLIT.1),
            }),
            prefix_cache: raw.cache.map(|cache| PrefixCacheFacts {
                hit_rate: self.need(at("cache.hit_rate"), cache.hit_rate, "the share of cached prompt tokens"),
                hit_rate_p10: self.need(at("cache.hit_rate_p10"), cache.hit_rate_p10, "its 10th percentile"),
                prefill_share: cache.prefill_share,
            }),
        }
    }

    /// The mean, and the squared coefficient of variation if percentiles determine it.
    fn length(&mut self, place: String, raw: Option<RawLength>, of: &str) -> (f64, Option<f64>) {
        let law = match raw {
            None => return (self.need(place, None, &format!("the mean number of {of} tokens")), None),
            Some(RawLength::Mean(mean)) => return (mean, None),
            Some(RawLength::Law(law)) => law,
        };
        let told = match (law.p50, law.p95) {
            (Some(p50), Some(p95)) => match LognormalLength::from_percentiles(p50, p95) {
                Ok(told) => Some(told),
                Err(error) => {
                    self.add(place.clone(), error.to_string());
                    return (1.0, None);
                }
            },
            (None, None) => None,
            _ => {
                self.add(place, "give both percentiles, p50 and p95");
                return (1.0, None);
            }
        };
        let mean = law.mean.or(told.map(|told| told.mean()));
        (self.need(place, mean, &format!("the mean number of {of} tokens")), told.map(|told| told.variation()))
    }
}

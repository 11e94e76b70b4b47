//! Inputs of a plan, and their validation.

use super::kv::KvCache;
use super::queueing::QueueError;
use crate::types::Priority;

/// The inputs of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct CapacityInputs {
    /// The classes of traffic; more than one may share a fleet.
    pub classes: Vec<ClassForecast>,
    /// One replica.
    pub replica: ReplicaFacts,
    /// Share of its goodput that a replica is planned for.
    pub headroom: f64,
    /// Spare replicas: the k of N+k.
    pub spare: u32,
    /// Squared coefficient of variation of the gaps between arrivals; 1 is Poisson.
    pub burst: f64,
    /// Current replicas of all classes together.
    pub current_replicas: Option<u32>,
    /// Price of the GPUs.
    pub price: Option<GpuPrice>,
}

impl CapacityInputs {
    /// Inputs with the usual factors: 0.7 of goodput, one spare replica, Poisson arrivals.
    #[must_use]
    pub fn of(classes: Vec<ClassForecast>) -> Self {
        CapacityInputs {
            classes,
            replica: ReplicaFacts::default(),
            headroom: 0.7,
            spare: 1,
            burst: 1.0,
            current_replicas: None,
            price: None,
        }
    }
}

/// Price of a GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuPrice {
    /// For one hour.
    pub hour: f64,
    /// Unit of the amount.
    pub currency: String,
}

/// Properties of one replica.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaFacts {
    /// Its GPUs.
    pub gpus: u32,
    /// GPUs over which each layer is split; the others hold copies or other layers.
    pub tensor_parallel: u32,
    /// Most concurrent requests (`max_num_seqs`); without it, its concurrency at the knee.
    pub slots: Option<u32>,
    /// Cache bytes per token, without a model.
    pub kv_bytes_per_token: Option<f64>,
    /// Cache of the model.
    pub kv_cache: Option<KvCache>,
    /// Room for it.
    pub kv_room: Option<KvRoom>,
}

impl Default for ReplicaFacts {
    /// One GPU, nothing else known.
    fn default() -> Self {
        ReplicaFacts {
            gpus: 1,
            tensor_parallel: 1,
            slots: None,
            kv_bytes_per_token: None,
            kv_cache: None,
            kv_room: None,
        }
    }
}

/// Memory for the key-value cache in one replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvRoom {
    /// As the engine logs it at its start.
    Tokens(f64),
    /// Memory of all its GPUs beside weights and activations.
    Bytes(f64),
}

/// One class of traffic: its forecast, and the results of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassForecast {
    /// Name.
    pub name: String,
    /// Priority of classes that share a pool.
    pub priority: Priority,
    /// Requests per second in the busiest five minutes.
    pub peak_rate: f64,
    /// Requests per second over the day.
    pub mean_rate: Option<f64>,
    /// Mean prompt tokens.
    pub input_tokens: f64,
    /// Squared coefficient of variation of the prompts' lengths.
    pub input_variation: Option<f64>,
    /// Mean output tokens.
    pub output_tokens: f64,
    /// Mean time to first token at the planned rate, in seconds.
    pub ttft: f64,
    /// Mean time per output token at the planned rate, in seconds.
    pub tpot: f64,
    /// Highest rate of one replica with joint attainment at or above the target.
    pub goodput: f64,
    /// Promised joint attainment, between 0 and 1.
    pub target: f64,
    /// Current replicas of this class alone.
    pub current_replicas: Option<u32>,
    /// The prefill stage.
    pub prefill: Option<PrefillFacts>,
    /// The prefix cache.
    pub prefix_cache: Option<PrefixCacheFacts>,
}

impl ClassForecast {
    /// A class without figures (all 0).
    #[must_use]
    pub fn named(name: &str) -> Self {
        ClassForecast {
            name: name.to_owned(),
            priority: Priority::Normal,
            peak_rate: 0.0,
            mean_rate: None,
            input_tokens: 0.0,
            input_variation: None,
            output_tokens: 0.0,
            ttft: 0.0,
            tpot: 0.0,
            goodput: 0.0,
            target: 0.0,
            current_replicas: None,
            prefill: None,
            prefix_cache: None,
        }
    }
}

/// Properties of a prefill instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillFacts {
    /// Time of one device for the mean prompt, in seconds.
    pub seconds: f64,
    /// Requests per second at one instance; without it, the planned rate of a replica.
    pub rate: Option<f64>,
    /// Devices of an instance that is split.
    pub ways: u32,
    /// Speed-up of these devices over one, when each layer is split.
    pub speed_up: f64,
}

/// Properties of the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefixCacheFacts {
    /// Share of prompt tokens that came from it in the sweep.
    pub hit_rate: f64,
    /// 10th percentile of the share over the day.
    pub hit_rate_p10: f64,
    /// Share of the engine's time that prompts took in the sweep; without it all of it, a bound.
    pub prefill_share: Option<f64>,
}

/// An invalid input.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {text}")]
pub struct InputProblem {
    /// Its path: `classes[0].peak_rate`.
    pub place: String,
    /// The problem and the correction.
    pub text: String,
}

/// Collects all problems of the inputs.
#[derive(Default)]
pub(super) struct InputCheck {
    pub problems: Vec<InputProblem>,
}

impl InputCheck {
    pub fn add(&mut self, place: impl Into<String>, text: impl Into<String>) {
        self.problems.push(InputProblem { place: place.into(), text: text.into() });
    }

    fn positive(&mut self, place: &str, value: f64, unit: &str) {
        if !(value.is_finite() && value > 0.0) {
            self.add(place, format!("{value} is not a positive number; give {unit}"));
        }
    }

    fn share(&mut self, place: &str, value: f64, meaning: &str) {
        if !(value > 0.0 && value <= 1.0) {
            self.add(place, format!("{value} is not above 0 and at most 1; give {meaning}"));
        }
    }

    fn part(&mut self, place: &str, value: f64, meaning: &str) {
        if !(0.0..1.0).contains(&value) {
            self.add(place, format!("{value} is not from 0 to below 1; give {meaning}"));
        }
    }

    pub fn all(&mut self, inputs: &CapacityInputs) {
        self.share("headroom", inputs.headroom, "the share of its goodput that a replica is planned for, such as 0.7");
        if !(inputs.burst.is_finite() && inputs.burst > 0.0) {
            self.add("burst", format!("{} is not a positive number; 1 is Poisson, more is burstier", inputs.burst));
        }
        if let Some(price) = &inputs.price {
            self.positive("gpu_hour", price.hour, "the price of one GPU for one hour");
        }
        self.replica(&inputs.replica);
        if inputs.classes.is_empty() {
            self.add("classes", "no class; give at least one");
        }
        for (number, class) in inputs.classes.iter().enumerate() {
            self.class(&format!("classes[{number}]"), class);
            if inputs.classes[..number].iter().any(|other| other.name == class.name) {
                self.add(format!("classes[{number}].class"), format!("{:?} is repeated", class.name));
            }
        }
    }

    fn replica(&mut self, replica: &ReplicaFacts) {
        if replica.gpus == 0 {
            self.add("gpus_per_replica", "0 GPUs cannot serve; give 1 or more");
        }
        if replica.tensor_parallel == 0 || (replica.gpus > 0 && replica.tensor_parallel > replica.gpus) {
            let text = format!("{} is not from 1 to gpus_per_replica ({})", replica.tensor_parallel, replica.gpus);
            self.add("tensor_parallel", text);
        }
        if replica.slots == Some(0) {
            self.add("slots_per_replica", "0 slots serve nobody; give 1 or more");
        }
        if let Some(bytes) = replica.kv_bytes_per_token {
            self.positive("kv_bytes_per_token", bytes, "bytes per token");
        }
        match replica.kv_room {
            Some(KvRoom::Tokens(tokens)) => self.positive("kv_tokens_per_replica", tokens, "a number of tokens"),
            Some(KvRoom::Bytes(bytes)) if !(bytes.is_finite() && bytes > 0.0) => {
                self.add("gpu_memory_gib", "the weights leave no room for the cache; check memory, weights and GPUs");
            }
            Some(KvRoom::Bytes(_)) | None => {}
        }
    }

    fn class(&mut self, place: &str, class: &ClassForecast) {
        let at = |key: &str| format!("{place}.{key}");
        self.positive(&at("peak_rate"), class.peak_rate, "requests per second in the busiest five minutes");
        if let Some(rate) = class.mean_rate {
            self.positive(&at("mean_rate"), rate, "requests per second over the day");
            if rate > class.peak_rate {
                self.add(at("mean_rate"), format!("{rate} is above the peak of {}", class.peak_rate));
            }
        }
        self.positive(&at("input_tokens"), class.input_tokens, "the mean number of prompt tokens");
        self.positive(&at("output_tokens"), class.output_tokens, "the mean number of output tokens");
        if !(class.ttft.is_finite() && class.ttft >= 0.0) {
            self.add(at("ttft_seconds"), format!("{} is not a number of seconds, 0 or more", class.ttft));
        }
        self.positive(&at("tpot_seconds"), class.tpot, "the mean seconds per output token at the planned rate");
        self.positive(&at("goodput"), class.goodput, "the requests per second of one replica that a sweep found");
        self.share(&at("target"), class.target, "the joint attainment that is promised, such as 0.92");
        if let Some(variation) = class.input_variation
            && !(variation.is_finite() && variation >= 0.0)
        {
            self.add(at("input_tokens"), QueueError::Variation(variation).to_string());
        }
        if let Some(prefill) = class.prefill {
            self.positive(&at("prefill.seconds"), prefill.seconds, "seconds for the mean prompt");
            if let Some(rate) = prefill.rate {
                self.positive(&at("prefill.rate"), rate, "requests per second at one instance");
            }
            if prefill.ways == 0 {
                self.add(at("prefill.ways"), "0 devices cannot prefill; give 1 or more");
            }
            if !(prefill.speed_up >= 1.0 && prefill.speed_up <= f64::from(prefill.ways)) {
                let text = format!("{} is not from 1 to `ways` ({})", prefill.speed_up, prefill.ways);
                self.add(at("prefill.speed_up"), text);
            }
        }
        if let Some(cache) = class.prefix_cache {
            self.part(&at("cache.hit_rate"), cache.hit_rate, "the share of prompt tokens from the cache");
            self.part(&at("cache.hit_rate_p10"), cache.hit_rate_p10, "its 10th percentile over the day");
            if let Some(share) = cache.prefill_share {
                self.share(&at("cache.prefill_share"), share, "the share of the engine's time that prompts take");
            }
        }
    }
}

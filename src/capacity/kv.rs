//! Memory of the key-value cache, from a model's `config.json`.
//!
//! Grouped-query attention stores a key and a value of `head_dim` numbers per key-value head and layer.
//! Multi-head latent attention (DeepSeek, Kimi) stores one compressed vector and one rotary key per layer
//! instead. Layers with a sliding window store at most the window; linear attention and state space layers
//! store nothing that grows.

use serde_json::{Map, Value};

/// Precision of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvPrecision {
    /// Two bytes.
    #[serde(alias = "fp16", alias = "float16", alias = "bfloat16", alias = "half")]
    Bf16,
    /// One byte.
    #[serde(alias = "fp8_e4m3", alias = "fp8_e5m2", alias = "int8")]
    Fp8,
    /// Four bytes.
    #[serde(alias = "float32", alias = "float")]
    Fp32,
}

impl KvPrecision {
    /// Bytes of one number.
    #[must_use]
    pub const fn bytes(self) -> f64 {
        match self {
            KvPrecision::Fp8 => 1.0,
            KvPrecision::Bf16 => 2.0,
            KvPrecision::Fp32 => 4.0,
        }
    }

    fn of(text: &str) -> Option<Self> {
        let text = text.trim_start_matches("torch.");
        serde_json::from_value(Value::from(text)).ok()
    }
}

/// Why a cache size cannot be computed from a `config.json`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// Not a JSON object.
    #[error("it is not a JSON object: {0}")]
    Json(String),
    /// A required number is missing.
    #[error("{0} is missing; give kv_bytes_per_token")]
    Missing(&'static str),
    /// A number that is not positive, or does not divide another one.
    #[error("{key} is {value}, which is impossible")]
    Nonsense {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
    },
}

/// Cache of one token in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayerCache {
    /// A key and a value per head.
    Heads { kv_heads: u32, head_dim: u32 },
    /// One latent vector and one rotary key, shared by all heads.
    Latent { numbers: u32 },
}

/// Cache of one sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvCache {
    entry: LayerCache,
    /// Layers whose cache grows with the whole context.
    full_layers: u32,
    /// Layers that keep the last `window` tokens.
    sliding_layers: u32,
    window: u32,
    precision: KvPrecision,
}

impl KvCache {
    /// Reads a model's `config.json` (Hugging Face). Without a precision, the model's own (`torch_dtype`)
    /// applies, as in engines.
    ///
    /// # Errors A number is missing or invalid.
    pub fn from_config(text: &str, precision: Option<KvPrecision>) -> Result<KvCache, KvError> {
        let whole: Value = serde_json::from_str(text).map_err(|error| KvError::Json(error.to_string()))?;
        let whole = whole.as_object().ok_or_else(|| KvError::Json("another kind of value".to_owned()))?;
        // Multimodal models nest the configuration of their language model.
        let inner = ["text_config", "llm_config", "language_config"].into_iter();
        let config = inner.filter_map(|key| whole.get(key)?.as_object()).next().unwrap_or(whole);
        let keys = ModelConfig(config);
        let layers = keys.need(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"], "num_hidden_layers")?;
        let stated = ["torch_dtype", "dtype"].into_iter().find_map(|key| config.get(key).or(whole.get(key)));
        let stated = stated.and_then(Value::as_str).and_then(KvPrecision::of);
        let (full_layers, sliding_layers, window) = keys.layers(layers)?;
        let entry = keys.entry()?;
        let precision = precision.or(stated).unwrap_or(KvPrecision::Bf16);
        Ok(KvCache { entry, full_layers, sliding_layers, window, precision })
    }

    /// Bytes per token for the first tokens of a sequence, on one copy of the model.
    #[must_use]
    pub fn bytes_per_token(&self) -> f64 {
        f64::from(self.full_layers + self.sliding_layers) * self.layer_bytes()
    }

    /// Bytes of a sequence with this context; above the window, sliding layers stop growing.
    #[must_use]
    pub fn bytes_of(&self, context: f64) -> f64 {
        let slid = context.min(f64::from(self.window));
        (f64::from(self.full_layers) * context + f64::from(self.sliding_layers) * slid) * self.layer_bytes()
    }

    /// Copies of the cache when the model is split over this many GPUs, because a head is never split and
    /// every GPU needs the latent vector.
    #[must_use]
    pub fn copies(&self, tensor_parallel: u32) -> f64 {
        let ways = f64::from(tensor_parallel.max(1));
        match self.entry {
            LayerCache::Heads { kv_heads, .. } => (ways / f64::from(kv_heads)).max(1.0),
            LayerCache::Latent { .. } => ways,
        }
    }

    /// Whether every token of a sequence has the same size.
    #[must_use]
    pub const fn is_linear(&self) -> bool {
        self.sliding_layers == 0
    }

    fn layer_bytes(&self) -> f64 {
        let numbers = match self.entry {
            LayerCache::Heads { kv_heads, head_dim } => 2.0 * f64::from(kv_heads) * f64::from(head_dim),
            LayerCache::Latent { numbers } => f64::from(numbers),
        };
        numbers * self.precision.bytes()
    }
}

/// The numbers of a configuration, by the names that model families use.
struct ModelConfig<'a>(&'a Map<String, Value>);

impl ModelConfig<'_> {
    fn find(&self, names: &[&'static str]) -> Result<Option<u32>, KvError> {
        let found = names.iter().find_map(|name| Some((*name, self.0.get(*name).filter(|value| !value.is_null())?)));
        let Some((key, value)) = found else { return Ok(None) };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number > 0);
        number.map(Some).ok_or_else(|| KvError::Nonsense { key, value: value.to_string() })
    }

    fn need(&self, names: &[&'static str], told: &'static str) -> Result<u32, KvError> {
        self.find(names)?.ok_or(KvError::Missing(told))
    }

    fn is_set(&self, name: &str) -> Option<bool> {
        self.0.get(name).and_then(Value::as_bool)
    }

    fn entry(&self) -> Result<LayerCache, KvError> {
        if let Some(rank) = self.find(&["kv_lora_rank"])? {
            let rope = self.need(&["qk_rope_head_dim"], "qk_rope_head_dim")?;
            return Ok(LayerCache::Latent { numbers: rank.saturating_add(rope) });
        }
        let heads = self.find(&["num_attention_heads", "n_head", "n_heads"])?;
        let head_dim = match self.find(&["head_dim", "kv_channels"])? {
            Some(head_dim) => head_dim,
            None => {
                let hidden = self.need(&["hidden_size", "n_embd", "d_model"], "head_dim or hidden_size")?;
                let heads = heads.ok_or(KvError::Missing("num_attention_heads"))?;
                if !hidden.is_multiple_of(heads) {
                    let value = format!("{hidden} with {heads} heads");
                    return Err(KvError::Nonsense { key: "hidden_size", value });
                }
                hidden / heads
            }
        };
        let kv_heads = self.find(&["num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"])?;
        let one = self.is_set("multi_query").filter(|multi_query| *multi_query).map(|_| 1);
        let kv_heads = kv_heads.or(one).or(heads).ok_or(KvError::Missing("num_key_value_heads"))?;
        if heads.is_some_and(|heads| kv_heads > heads) {
            return Err(KvError::Nonsense { key: "num_key_value_heads", value: kv_heads.to_string() });
        }
        Ok(LayerCache::Heads { kv_heads, head_dim })
    }

    /// Layers with full context, layers with a window, and the window.
    fn layers(&self, all: u32) -> Result<(u32, u32, u32), KvError> {
        let window = self.find(&["sliding_window"])?.filter(|_| self.is_set("use_sliding_window") != Some(false));
        if let Some(kinds) = self.0.get("layer_types").and_then(Value::as_array) {
            let count = |wanted: fn(&str) -> bool| {
                kinds.iter().filter_map(Value::as_str).filter(|kind| wanted(kind)).count() as u32
            };
            let full = count(|kind| matches!(kind, "full_attention" | "attention"));
            let sliding = count(|kind| kind.starts_with("sliding") || kind.starts_with("chunked"));
            if full + sliding > 0 && kinds.len() as u32 == all {
                let chunk = self.find(&["attention_chunk_size"])?;
                return Ok(match window.or(chunk) {
                    Some(window) => (full, sliding, window),
                    None => (full + sliding, 0, 0),
                });
            }
        }
        let every = self.find(&["sliding_window_pattern", "full_attention_interval", "attn_layer_period"])?;
        Ok(match (window, every) {
            (Some(window), Some(every)) => (all / every, all - all / every, window),
            (Some(window), None) => (0, all, window),
            // The other layers have a state of constant size.
            (None, Some(every)) => ((all / every).max(1), 0, 0),
            (None, None) => (all, 0, 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(text: &str) -> KvCache {
        KvCache::from_config(text, None).unwrap()
    }

    #[test]
    fn published_models_need_the_bytes_that_their_papers_state() {
        // DeepSeek-V3 at ISCA 2025 ("Insights into DeepSeek-V3"), table 1: KB per token with 2 bytes a number.
        let deepseek = r#"{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
            "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}"#;
        let qwen_72b = r#"{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "hidden_size": 8192, "torch_dtype": "bfloat16", "use_sliding_window": false, "sliding_window": 131072}"#;
        let llama_405b = r#"{"num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
            "hidden_size": 16384, "torch_dtype": "bfloat16"}"#;
        for (config, bytes) in [(deepseek, 70_272.0), (qwen_72b, 327_680.0), (llama_405b, 516_096.0)] {
            assert_eq!(cache(config).bytes_per_token(), bytes);
        }
    }

    #[test]
    fn heads_and_dimensions_are_found_under_other_names_and_inside() {
        let llama_8b = r#"{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "hidden_size": 4096, "dtype": "bfloat16"}"#;
        assert_eq!(cache(llama_8b).bytes_per_token(), 131_072.0);
        let eight_bits = KvCache::from_config(llama_8b, Some(KvPrecision::Fp8)).unwrap();
        assert_eq!(eight_bits.bytes_per_token(), 65_536.0);
        let gpt2 = r#"{"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}"#;
        assert_eq!(cache(gpt2).bytes_per_token(), 2.0 * 12.0 * 768.0 * 4.0);
        let falcon =
            r#"{"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": true}"#;
        assert_eq!(cache(falcon).bytes_per_token(), 2.0 * 32.0 * 64.0 * 2.0);
        let glm = r#"{"num_layers": 40, "num_attention_heads": 32, "multi_query_group_num": 2, "kv_channels": 128,
            "hidden_size": 4096, "torch_dtype": "bfloat16"}"#;
        assert_eq!(cache(glm).bytes_per_token(), 2.0 * 40.0 * 2.0 * 128.0 * 2.0);
        let seeing = format!(r#"{{"vision_config": {{"num_hidden_layers": 27}}, "text_config": {llama_8b}}}"#);
        assert_eq!(cache(&seeing).bytes_per_token(), 131_072.0);
    }

    #[test]
    fn layers_with_a_window_stop_growing_and_layers_without_cache_do_not_count() {
        let kinds = |kind: &str, other: &str| {
            let each: Vec<_> = (0..24).map(|layer| if layer % 2 == 0 { kind } else { other }).collect();
            serde_json::json!({"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
                "head_dim": 64, "sliding_window": 128, "layer_types": each})
            .to_string()
        };
        let per_layer = 2.0 * 8.0 * 64.0 * 2.0;
        let mixed = cache(&kinds("sliding_attention", "full_attention"));
        assert_eq!(mixed.bytes_of(100.0), 24.0 * 100.0 * per_layer);
        assert_eq!(mixed.bytes_of(1000.0), (12.0 * 1000.0 + 12.0 * 128.0) * per_layer);
        assert!(!mixed.is_linear());
        let hybrid = cache(&kinds("linear_attention", "full_attention"));
        assert_eq!(hybrid.bytes_of(1000.0), 12.0 * 1000.0 * per_layer);
        let gemma = r#"{"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "sliding_window": 1024, "sliding_window_pattern": 6}"#;
        assert_eq!(cache(gemma).bytes_of(10_000.0), (8.0 * 10_000.0 + 40.0 * 1024.0) * 2.0 * 8.0 * 256.0 * 2.0);
        let mistral = r#"{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "hidden_size": 4096, "sliding_window": 4096}"#;
        assert_eq!(cache(mistral).bytes_of(9000.0), 32.0 * 4096.0 * 2.0 * 8.0 * 128.0 * 2.0);
    }

    #[test]
    fn gpus_that_outnumber_the_heads_keep_copies() {
        let grouped =
            cache(r#"{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}"#);
        assert_eq!([1, 4, 8].map(|ways| grouped.copies(ways)), [1.0, 1.0, 2.0]);
        let latent = cache(r#"{"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}"#);
        assert_eq!([1, 8].map(|ways| latent.copies(ways)), [1.0, 8.0]);
    }

    #[test]
    fn a_missing_number_is_an_error_that_names_the_input() {
        let error = |text: &str| KvCache::from_config(text, None).unwrap_err().to_string();
        assert!(error("[1]").contains("not a JSON object"));
        assert!(error("{").contains("not a JSON object"));
        assert_eq!(error("{}"), "num_hidden_layers is missing; give kv_bytes_per_token");
        assert!(error(r#"{"num_hidden_layers": 2}"#).contains("head_dim or hidden_size is missing"));
        assert!(error(r#"{"num_hidden_layers": 2, "head_dim": 64}"#).contains("no num_key_value_heads"));
        assert!(error(r#"{"num_hidden_layers": 2, "hidden_size": 64}"#).contains("no num_attention_heads"));
        assert!(error(r#"{"num_hidden_layers": 0}"#).contains("num_hidden_layers is 0"));
        assert!(error(r#"{"num_hidden_layers": -3}"#).contains("num_hidden_layers is -3"));
        assert!(error(r#"{"num_hidden_layers": 2, "kv_lora_rank": 512}"#).contains("no qk_rope_head_dim"));
        let odd = r#"{"num_hidden_layers": 2, "num_attention_heads": 7, "hidden_size": 64}"#;
        assert!(error(odd).contains("hidden_size is 64 with 7 heads"));
        let more = r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 8, "hidden_size": 64}"#;
        assert!(error(more).contains("num_key_value_heads is 8"));
    }
}

//! Details of a model from an engine's list, beside its name.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

/// Longest text kept.
const LONGEST: usize = 256;

/// Details of a model; absent if not reported or of another type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "RawModelCard")]
pub struct ModelCard {
    /// Unix time in seconds, shown by some clients.
    pub created: Option<u64>,
    /// Most tokens of prompt and output together.
    pub max_model_len: Option<u64>,
    /// The base model's or the weights' name.
    pub root: Option<Arc<str>>,
    /// The model that an adapter belongs to.
    pub parent: Option<Arc<str>>,
}

#[derive(Deserialize)]
struct RawModelCard {
    #[serde(default)]
    created: Value,
    #[serde(default)]
    max_model_len: Value,
    #[serde(default)]
    root: Value,
    #[serde(default)]
    parent: Value,
}

impl From<RawModelCard> for ModelCard {
    fn from(said: RawModelCard) -> Self {
        let text = |value: &Value| value.as_str().filter(|text| text.len() <= LONGEST).map(Arc::from);
        ModelCard {
            created: said.created.as_u64(),
            max_model_len: said.max_model_len.as_u64(),
            root: text(&said.root),
            parent: text(&said.parent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_another_type_is_absent_and_nothing_else_is_lost() {
        let read = |text: &str| serde_json::from_str::<ModelCard>(text).unwrap();
        let whole =
            r#"{"id":"a","created":1700000000,"max_model_len":8192,"root":"org/a","parent":"base","permission":[{}]}"#;
        let expected = ModelCard {
            created: Some(1_700_000_000),
            max_model_len: Some(8192),
            root: Some("org/a".into()),
            parent: Some("base".into()),
        };
        assert_eq!(read(whole), expected);
        let odd = read(r#"{"created":1.5,"max_model_len":"8192","root":7,"parent":null}"#);
        assert_eq!(odd, ModelCard::default());
        assert_eq!(read(&format!(r#"{{"root":"{}","max_model_len":1}}"#, "x".repeat(300))).root, None);
    }
}

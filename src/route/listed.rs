//! Which engines of a pool list which models: a request goes to those that list its model, where
//! any does.
//!
//! The lists come from the engines (`/v1/models`) and change seldom, so who does *not* list a model
//! is worked out then, and a request costs one look-up. An engine that has given no list lists
//! nothing; a model that nobody lists is left to whoever is chosen.

use std::collections::HashMap;
use std::sync::Arc;

use crate::units::EngineId;

/// Engines by name.
pub type EngineList = Arc<[EngineId]>;

/// By model, the engines that do not list it though others do. Only models that some engine does
/// not list are here.
#[derive(Debug, Default)]
pub struct Listed(HashMap<Arc<str>, EngineList, ahash::RandomState>);

impl Listed {
    /// From the lists of all engines of a pool.
    #[must_use]
    pub fn of(engines: &[(EngineId, Arc<[Arc<str>]>)]) -> Self {
        let mut missing: HashMap<Arc<str>, EngineList, ahash::RandomState> = HashMap::default();
        for model in engines.iter().flat_map(|(_, models)| models.iter()) {
            if missing.contains_key(model) {
                continue;
            }
            let without = engines.iter().filter(|(_, models)| !models.contains(model));
            missing.insert(Arc::clone(model), without.map(|(engine, _)| engine.clone()).collect());
        }
        missing.retain(|_, engines| !engines.is_empty());
        Listed(missing)
    }

    /// The engines that a request for this model is kept off; none where there are none such.
    #[must_use]
    pub fn without(&self, model: &str) -> Option<EngineList> {
        self.0.get(model).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(lists: &[(&str, &[&str])]) -> Listed {
        let list = |(engine, models): &(&str, &[&str])| {
            (EngineId::from(*engine), models.iter().map(|model| Arc::from(*model)).collect())
        };
        Listed::of(&lists.iter().map(list).collect::<Vec<_>>())
    }

    #[test]
    fn a_model_keeps_its_requests_off_engines_that_do_not_list_it_where_others_do() {
        let listed = listed(&[("a", &["m", "lora_1"]), ("b", &["m", "lora_2", "lora_2"]), ("c", &["m"]), ("d", &[])]);
        let without = |model: &str| {
            listed.without(model).iter().flat_map(|list| list.iter()).map(EngineId::to_string).collect::<Vec<_>>()
        };
        assert_eq!(without("m"), ["d"]);
        assert_eq!(without("lora_1"), ["b", "c", "d"]);
        assert_eq!(without("lora_2"), ["a", "c", "d"]);
        assert_eq!(without("lora_3"), [""; 0], "nobody lists it: anybody may have it");
    }

    #[test]
    fn where_all_list_the_same_nothing_is_kept() {
        assert!(listed(&[("a", &["m"]), ("b", &["m"])]).0.is_empty());
        assert!(listed(&[("a", &[]), ("b", &[])]).0.is_empty());
        assert!(listed(&[]).0.is_empty());
    }
}

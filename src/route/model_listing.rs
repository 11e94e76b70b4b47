//! Which engines of a pool list which models: a request goes to those that list its model, if any
//! does.
//!
//! The lists come from the engines (`/v1/models`) and change rarely, so the engines that do *not* list a
//! model are computed at a change, and a request costs one lookup. An engine without a list lists nothing;
//! a model listed by none may go to any engine.

use std::collections::HashMap;
use std::sync::Arc;

use crate::types::EngineId;

/// Engine ids.
pub type EngineList = Arc<[EngineId]>;

/// By model, the engines that do not list it although others do. Contains only such
/// models.
#[derive(Debug, Default)]
pub struct ModelListing(HashMap<Arc<str>, EngineList, ahash::RandomState>);

impl ModelListing {
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
        ModelListing(missing)
    }

    /// The engines to avoid for this model; `None` if there are none.
    #[must_use]
    pub fn without(&self, model: &str) -> Option<EngineList> {
        self.0.get(model).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(lists: &[(&str, &[&str])]) -> ModelListing {
        let list = |(engine, models): &(&str, &[&str])| {
            (EngineId::from(*engine), models.iter().map(|model| Arc::from(*model)).collect())
        };
        ModelListing::of(&lists.iter().map(list).collect::<Vec<_>>())
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

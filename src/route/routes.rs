//! The pools that serve a model for a class.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

use super::Fleet;
use super::settings::Route;
use crate::types::{ClassId, Glob, PoolId};

/// The items of `routes`, with the names from `models`.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    lines: Vec<RouteEntry>,
    /// Names written literally in `routes` or `models`, which are their own labels.
    literals: BTreeSet<Arc<str>>,
    aliases: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
struct RouteEntry {
    route: Route,
    pools: Arc<[PoolId]>,
}

/// Result of routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteMatch {
    /// The pools, in order of preference.
    pub pools: Arc<[PoolId]>,
    /// The model's label: a name of the settings, a pattern as written, or `other`.
    pub model_label: Arc<str>,
    /// Whether the settings name the model literally.
    pub literal: bool,
}

/// A model of the settings that no engine lists.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnlistedModel {
    /// Its name.
    pub model: Arc<str>,
    /// The pools of its route.
    pub pools: Arc<[PoolId]>,
}

/// A model shown by `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AvailableModel {
    /// Its name for clients.
    pub id: Arc<str>,
}

impl Routes {
    /// Routes in the order of the settings, and the aliases (alias to name).
    #[must_use]
    pub fn new(routes: Vec<Route>, aliases: BTreeMap<String, String>) -> Self {
        let written = routes.iter().flat_map(|route| &route.models).filter(|model| model.is_literal()).map(Glob::text);
        let literals = written.chain(aliases.values().map(|name| Arc::from(name.as_str()))).collect();
        let lines = routes.into_iter().map(|route| RouteEntry { pools: route.pools.clone().into(), route }).collect();
        Routes { lines, literals, aliases }
    }

    /// The engines' name of a model, if the client used an alias.
    #[must_use]
    pub fn alias(&self, model: &str) -> Option<&str> {
        self.aliases.get(model).map(String::as_str)
    }

    /// The first route that serves this model (after aliasing) for this class. A request without a readable model
    /// matches a route for `*` only.
    #[must_use]
    pub fn find(&self, model: Option<&str>, class: &ClassId) -> Option<RouteMatch> {
        self.lines.iter().filter(|line| line.route.serves(class)).find_map(|line| {
            let pattern = match model {
                Some(name) => line.route.models.iter().find(|pattern| pattern.matches(name)),
                None => line.route.models.iter().find(|pattern| pattern.is_any()),
            }?;
            let literal = model.and_then(|name| self.literals.get(name)).cloned();
            Some(RouteMatch {
                pools: line.pools.clone(),
                literal: literal.is_some(),
                model_label: literal.unwrap_or_else(|| label_of(pattern)),
            })
        })
    }

    /// The first route of this class, for requests that any engine can answer.
    #[must_use]
    pub fn any(&self, class: &ClassId) -> Option<RouteMatch> {
        let line = self.lines.iter().find(|line| line.route.serves(class))?;
        let pattern = line.route.models.first()?;
        let literal = self.literals.get(&*pattern.text()).cloned();
        Some(RouteMatch {
            pools: line.pools.clone(),
            literal: literal.is_some(),
            model_label: literal.unwrap_or_else(|| label_of(pattern)),
        })
    }

    /// Literal model names that no engine of their pools lists although some give lists; probably misspelt.
    /// `listed`: the models of a pool's engines, `None` if unknown yet.
    #[must_use]
    pub fn unlisted(&self, listed: impl Fn(&PoolId) -> Option<Vec<Arc<str>>>) -> Vec<UnlistedModel> {
        let mut unlisted = Vec::new();
        for line in &self.lines {
            let lists: Option<Vec<_>> = line.pools.iter().map(&listed).collect();
            let Some(lists) = lists.map(|lists| lists.concat()).filter(|lists| !lists.is_empty()) else { continue };
            let names = self.literals.iter().filter(|name| line.route.models.iter().any(|model| model.matches(name)));
            let missing = names.filter(|name| !lists.contains(name));
            unlisted.extend(missing.map(|model| UnlistedModel { model: Arc::clone(model), pools: line.pools.clone() }));
        }
        unlisted
    }

    /// Whether any route serves this model for any class.
    #[must_use]
    pub fn knows(&self, model: &str) -> bool {
        self.lines.iter().any(|line| line.route.models.iter().any(|pattern| pattern.matches(model)))
    }

    /// The first pools of this class's routes.
    #[must_use]
    pub fn first_pools(&self, class: &ClassId) -> BTreeSet<PoolId> {
        let served = self.lines.iter().filter(|line| line.route.serves(class));
        served.filter_map(|line| line.pools.first().cloned()).collect()
    }

    /// Every combination of pool and model label that a request of this class can have, so that its counters
    /// exist from the start. Models taken by an earlier route do not reach a later
    /// one.
    #[must_use]
    pub fn reach(&self, class: &ClassId) -> BTreeSet<(PoolId, Arc<str>)> {
        let named = self.literals.iter().filter_map(|name| self.find(Some(name), class));
        let mut reach: BTreeSet<_> = named.flat_map(|routed| with_label(&routed.pools, &routed.model_label)).collect();
        let patterns = self.lines.iter().filter(|line| line.route.serves(class));
        let patterns = patterns.flat_map(|line| line.route.models.iter().map(move |pattern| (line, pattern)));
        for (line, pattern) in patterns.filter(|(_, pattern)| !pattern.is_literal()) {
            reach.extend(with_label(&line.pools, &label_of(pattern)));
            if pattern.is_any() {
                break;
            }
        }
        reach
    }

    /// The models available to these classes: names and aliases of the settings, and those listed by engines of
    /// pools behind patterns.
    #[must_use]
    pub fn models_for(&self, classes: &[ClassId], fleet: &Fleet) -> BTreeSet<AvailableModel> {
        let serves = |name: &str| classes.iter().any(|class| self.find(Some(name), class).is_some());
        let mut models: BTreeSet<_> = self.literals.iter().filter(|name| serves(name)).cloned().collect();
        for (alias, name) in &self.aliases {
            if serves(name) {
                models.insert(Arc::from(alias.as_str()));
            }
        }
        let pools: BTreeSet<&PoolId> =
            self.lines.iter().filter(|line| line.has_pattern()).flat_map(|line| line.pools.iter()).collect();
        for pool in pools {
            let reaches = |name: &str| {
                let routed = classes.iter().filter_map(|class| self.find(Some(name), class));
                routed.into_iter().any(|routed| routed.pools.contains(pool))
            };
            models.extend(fleet.models(pool).into_iter().filter(|name| reaches(name)));
        }
        models.into_iter().map(|id| AvailableModel { id }).collect()
    }
}

impl RouteEntry {
    fn has_pattern(&self) -> bool {
        self.route.models.iter().any(|pattern| !pattern.is_literal())
    }
}

/// Each pool with this label.
fn with_label(pools: &Arc<[PoolId]>, label: &Arc<str>) -> Vec<(PoolId, Arc<str>)> {
    pools.iter().map(|pool| (pool.clone(), Arc::clone(label))).collect()
}

/// The label of models that the settings do not name.
fn other() -> Arc<str> {
    static OTHER: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("other"));
    OTHER.clone()
}

fn label_of(pattern: &Glob) -> Arc<str> {
    if pattern.is_any() { other() } else { pattern.text() }
}

#[cfg(test)]
mod tests {
    use super::super::settings::{EngineAddress, EngineSource, PoolSettings, Scheme};
    use super::*;
    use crate::types::Tick;

    fn route(models: &[&str], classes: Option<&[&str]>, pools: &[&str]) -> Route {
        Route {
            models: models.iter().map(|model| Glob::new(model)).collect(),
            classes: classes.map(|classes| classes.iter().map(|class| ClassId::from(*class)).collect()),
            pools: pools.iter().map(|pool| PoolId::from(*pool)).collect(),
        }
    }

    fn routes() -> Routes {
        let aliases = BTreeMap::from([("gpt-4o".to_owned(), "llama-3-70b".to_owned())]);
        let lines = vec![
            route(&["llama-*"], Some(&["voice", "chat"]), &["interactive", "overflow"]),
            route(&["qwen-3"], None, &["batch"]),
            route(&["*"], Some(&["batch"]), &["batch"]),
        ];
        Routes::new(lines, aliases)
    }

    fn found(model: Option<&str>, class: &str) -> Option<(String, String, bool)> {
        let routed = routes().find(model, &class.into())?;
        Some((routed.pools[0].to_string(), routed.model_label.to_string(), routed.literal))
    }

    fn some(pool: &str, label: &str, literal: bool) -> Option<(String, String, bool)> {
        Some((pool.to_owned(), label.to_owned(), literal))
    }

    #[test]
    fn the_first_route_that_fits_model_and_class_is_taken() {
        assert_eq!(found(Some("llama-3-8b"), "chat"), some("interactive", "llama-*", false));
        assert_eq!(found(Some("llama-3-8b"), "batch"), some("batch", "other", false));
        assert_eq!(found(Some("qwen-3"), "chat"), some("batch", "qwen-3", true));
        assert_eq!(found(Some("mistral"), "chat"), None);
    }

    #[test]
    fn a_name_that_models_writes_out_is_its_own_label() {
        assert_eq!(found(Some("llama-3-70b"), "voice"), some("interactive", "llama-3-70b", true));
        assert_eq!(found(Some("llama-3-70b"), "batch"), some("batch", "llama-3-70b", true));
        assert_eq!(routes().alias("gpt-4o"), Some("llama-3-70b"));
    }

    #[test]
    fn without_a_readable_model_only_a_star_will_do() {
        assert_eq!(found(None, "batch"), some("batch", "other", false));
        assert_eq!(found(None, "chat"), None);
    }

    #[test]
    fn a_name_that_no_engine_of_its_pools_lists_is_told() {
        let told = |lists: &[(&str, Option<&[&str]>)]| {
            let listed = |pool: &PoolId| {
                let (_, models) = lists.iter().find(|(name, _)| pool.as_str() == *name)?;
                Some((*models)?.iter().map(|model| Arc::from(*model)).collect())
            };
            routes().unlisted(listed).into_iter().map(|unlisted| unlisted.model.to_string()).collect::<Vec<_>>()
        };
        let interactive = ("interactive", Some(&["llama-3-70b"][..]));
        let overflow = ("overflow", Some(&["llama-3-8b"][..]));
        assert_eq!(told(&[interactive, overflow, ("batch", Some(&["qwen3"]))]), ["qwen-3", "llama-3-70b", "qwen-3"]);
        assert_eq!(told(&[interactive, overflow, ("batch", Some(&["qwen-3", "llama-3-70b"]))]), [""; 0]);
        assert_eq!(told(&[overflow, ("interactive", Some(&[])), ("batch", None)]), ["llama-3-70b"]);
        assert_eq!(told(&[overflow, ("interactive", None)]), [""; 0], "one has not been asked yet");
        assert_eq!(told(&[("interactive", Some(&[])), ("overflow", Some(&[])), ("batch", Some(&[]))]), [""; 0]);
    }

    #[test]
    fn every_label_that_a_request_can_have_is_reached() {
        let labels = |class: &str| {
            let reach = routes().reach(&class.into());
            reach.into_iter().map(|(pool, model)| format!("{pool} {model}")).collect::<Vec<_>>()
        };
        assert_eq!(
            labels("chat"),
            [
                "batch qwen-3",
                "interactive llama-*",
                "interactive llama-3-70b",
                "overflow llama-*",
                "overflow llama-3-70b",
            ]
        );
        assert_eq!(labels("batch"), ["batch llama-3-70b", "batch other", "batch qwen-3"]);
    }

    #[test]
    fn what_an_earlier_route_takes_does_not_reach_a_later_one() {
        let lines = vec![
            route(&["big", "small-*"], None, &["a", "b"]),
            route(&["big", "mid"], Some(&["chat"]), &["c"]),
            route(&["*"], None, &["d"]),
            route(&["big", "x-*", "*"], None, &["e"]),
        ];
        let routes = Routes::new(lines, BTreeMap::from([("alias".to_owned(), "small-1".to_owned())]));
        let reach = |class: &str| {
            let reach = routes.reach(&class.into());
            reach.into_iter().map(|(pool, model)| format!("{pool} {model}")).collect::<Vec<_>>()
        };
        let first = ["a big", "a small-*", "a small-1", "b big", "b small-*", "b small-1"];
        assert_eq!(reach("chat"), [&first[..], &["c mid", "d other"]].concat());
        assert_eq!(reach("batch"), [&first[..], &["d mid", "d other"]].concat());
    }

    #[test]
    fn the_list_of_models_has_names_aliases_and_what_engines_behind_patterns_serve() {
        let fleet = Fleet::new(1);
        let address = EngineAddress { scheme: Scheme::Http, host: "e".into(), port: 1, base: "".into(), name: None };
        let engines = || EngineSource::Static(vec![address.clone()]);
        let pools = ["interactive", "overflow", "batch"];
        let pools = pools.map(|id| Arc::new(PoolSettings::with_defaults(id.into(), engines())));
        fleet.apply_settings(&pools, Tick::ZERO);
        let serves = |pool: &str, models: &[&str]| {
            fleet.lists_models(&pool.into(), &address.id(), models.iter().map(|model| Arc::from(*model)).collect());
        };
        serves("overflow", &["llama-3-8b", "stray"]);
        serves("batch", &["mistral"]);
        let list = |classes: &[&str]| {
            let classes: Vec<_> = classes.iter().map(|class| ClassId::from(*class)).collect();
            routes().models_for(&classes, &fleet).into_iter().map(|model| model.id.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(list(&["chat"]), ["gpt-4o", "llama-3-70b", "llama-3-8b", "qwen-3"]);
        assert_eq!(list(&["batch"]), ["gpt-4o", "llama-3-70b", "mistral", "qwen-3"]);
        assert_eq!(list(&[]), Vec::<String>::new());
    }
}

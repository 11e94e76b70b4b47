//! Which pools serve a model for a class.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Fleet;
use super::settings::Route;
use crate::units::{ClassId, Glob, PoolId};

/// The lines of `routes`, with the names that `models` adds.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    lines: Vec<Line>,
    /// Names written out in `routes` or `models`: their own labels.
    literals: BTreeSet<Arc<str>>,
    aliases: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
struct Line {
    route: Route,
    pools: Arc<[PoolId]>,
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// The pools, in the order of preference.
    pub pools: Arc<[PoolId]>,
    /// The model as a label: a name of the settings, a pattern as written, or `other`.
    pub model_label: Arc<str>,
    /// Whether the settings name the model, rather than a pattern that fits it.
    pub literal: bool,
}

/// A model that `GET /v1/models` shows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Model {
    /// Its name, as a client may send it.
    pub id: Arc<str>,
}

impl Routes {
    /// Routes in the order of the settings, and the aliases (alias to name).
    #[must_use]
    pub fn new(routes: Vec<Route>, aliases: BTreeMap<String, String>) -> Self {
        let written = routes.iter().flat_map(|route| &route.models).filter(|model| model.is_literal()).map(Glob::text);
        let literals = written.chain(aliases.values().map(|name| Arc::from(name.as_str()))).collect();
        let lines = routes.into_iter().map(|route| Line { pools: route.pools.clone().into(), route }).collect();
        Routes { lines, literals, aliases }
    }

    /// The name that goes to an engine for the name that a client sent, if it is an alias.
    #[must_use]
    pub fn alias(&self, model: &str) -> Option<&str> {
        self.aliases.get(model).map(String::as_str)
    }

    /// The first route that serves this model (after aliasing) for this class. A request
    /// without a readable model goes to a route for `*` only.
    #[must_use]
    pub fn find(&self, model: Option<&str>, class: &ClassId) -> Option<Routed> {
        self.lines.iter().filter(|line| line.route.serves(class)).find_map(|line| {
            let pattern = match model {
                Some(name) => line.route.models.iter().find(|pattern| pattern.matches(name)),
                None => line.route.models.iter().find(|pattern| pattern.is_any()),
            }?;
            let literal = model.and_then(|name| self.literals.get(name)).cloned();
            Some(Routed {
                pools: line.pools.clone(),
                literal: literal.is_some(),
                model_label: literal.unwrap_or_else(|| label_of(pattern)),
            })
        })
    }

    /// Whether any route serves this model for any class.
    #[must_use]
    pub fn knows(&self, model: &str) -> bool {
        self.lines.iter().any(|line| line.route.models.iter().any(|pattern| pattern.matches(model)))
    }

    /// Every combination of pool and model label that a request of this class can have, so
    /// that its counters can exist from the start.
    #[must_use]
    pub fn reach(&self, class: &ClassId) -> BTreeSet<(PoolId, Arc<str>)> {
        let mut reach = BTreeSet::new();
        for line in self.lines.iter().filter(|line| line.route.serves(class)) {
            for pattern in &line.route.models {
                let named = self.literals.iter().filter(|name| pattern.matches(name)).cloned();
                let label = (!pattern.is_literal()).then(|| label_of(pattern));
                for label in named.chain(label) {
                    reach.extend(line.pools.iter().map(|pool| (pool.clone(), label.clone())));
                }
            }
        }
        reach
    }

    /// The models that somebody with these classes may use: names and aliases of the
    /// settings, and what the engines of pools behind patterns said they serve.
    #[must_use]
    pub fn models_for(&self, classes: &[ClassId], fleet: &Fleet) -> BTreeSet<Model> {
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
        models.into_iter().map(|id| Model { id }).collect()
    }
}

impl Line {
    fn has_pattern(&self) -> bool {
        self.route.models.iter().any(|pattern| !pattern.is_literal())
    }
}

fn label_of(pattern: &Glob) -> Arc<str> {
    if pattern.is_any() { Arc::from("other") } else { pattern.text() }
}

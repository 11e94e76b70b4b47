//! Routes, aliases, and unused names.

use std::collections::BTreeMap;

use super::{Checker, Names};
use crate::config::schema::{self, Root};
use crate::config::walk::Located;
use crate::route::settings::Route;
use crate::types::{ClassId, Glob, PoolId};

impl Checker<'_> {
    pub(super) fn routes(
        &mut self,
        root: &Root,
        classes: &Names<'_>,
        aliases: &BTreeMap<String, String>,
    ) -> Vec<Route> {
        let pools = Names::of("pool", root.pools.iter().flat_map(|all| all.iter()).map(|pool| pool.pool.as_ref()));
        let Some(all) = &root.routes else {
            let pools = pools.all.into_iter().map(PoolId::from).collect();
            return vec![Route { models: vec![Glob::new("*")], classes: None, pools }];
        };
        let mut routes: Vec<Route> = Vec::new();
        for raw in all.iter() {
            let route = self.route(raw, classes, &pools);
            self.is_reached(raw, &route, &routes, classes, aliases);
            routes.push(route);
        }
        self.all_are_served(root, &routes);
        routes
    }

    fn route(&mut self, raw: &schema::Route, classes: &Names<'_>, pools: &Names<'_>) -> Route {
        let list = raw.class.as_ref().map(|list| &list.0);
        let classes = list.map(|list| {
            self.unique("class of this route", list);
            list.iter().filter_map(|at| self.known(Some(at), classes)).map(ClassId::from).collect()
        });
        let pool_list = raw.pools.iter().flat_map(|list| &list.0);
        self.unique("pool of this route", pool_list.clone());
        let models = raw.model.iter().flat_map(|list| &list.0);
        for at in models.clone() {
            self.is_free_label(at);
        }
        Route {
            models: models.map(|at| Glob::new(&at.value)).collect(),
            classes,
            pools: pool_list.filter_map(|at| self.known(Some(at), pools)).map(PoolId::from).collect(),
        }
    }

    /// Every pattern of a route must match something that no earlier route takes.
    fn is_reached(
        &mut self,
        raw: &schema::Route,
        route: &Route,
        earlier: &[Route],
        classes: &Names<'_>,
        aliases: &BTreeMap<String, String>,
    ) {
        let served: Vec<ClassId> = match &route.classes {
            Some(list) => list.clone(),
            None => classes.all.iter().copied().map(ClassId::from).collect(),
        };
        if served.is_empty() {
            return;
        }
        for at in raw.model.iter().flat_map(|list| &list.0) {
            let pattern = Glob::new(&at.value);
            let taken = |class: &ClassId| {
                let takes =
                    |route: &Route| route.serves(class) && route.models.iter().any(|model| model.covers(&pattern));
                earlier.iter().position(takes)
            };
            if let Some(by) = served.iter().map(taken).collect::<Option<Vec<_>>>() {
                let first = by.first().map_or(0, |index| *index);
                let message = format!("{} is never reached: routes[{first}] takes it before", at.shown());
                self.problem(&at.place, message, "put the narrower route first, or remove this one");
            } else if let Some(target) = aliases.get(&at.value) {
                let message = format!("{} is never reached: it is an alias of {target}", at.shown());
                self.problem(&at.place, message, "route the alias's target");
            }
        }
    }

    /// Every class and every alias must have a route.
    fn all_are_served(&mut self, root: &Root, routes: &[Route]) {
        for at in root.slo_classes.iter().flat_map(|all| all.iter()).filter_map(|class| class.slo_class.as_ref()) {
            let class = ClassId::from(at.value.as_str());
            if !routes.is_empty() && !routes.iter().any(|route| route.serves(&class)) {
                let message = format!("no route serves the class {}", at.shown());
                self.problem(&at.place, message, "add it to the `class` of a route, or a route without `class`");
            }
        }
        let targets = root.models.iter().flat_map(|models| &models.aliases).flat_map(|aliases| &aliases.0);
        let named: Vec<_> = targets.clone().map(|(name, _)| name.value.as_str()).collect();
        for (_, target) in targets.filter(|(_, target)| !named.contains(&target.value.as_str())) {
            let takes = |route: &Route| route.models.iter().any(|model| model.matches(&target.value));
            if !routes.is_empty() && !routes.iter().any(takes) {
                self.problem(
                    &target.place,
                    format!("no route takes the model {}", target.shown()),
                    "add it to a route",
                );
            }
        }
    }

    /// The aliases, each with its final name.
    pub(super) fn aliases(&mut self, root: &Root) -> BTreeMap<String, String> {
        let entries = root.models.iter().flat_map(|models| &models.aliases).flat_map(|aliases| &aliases.0);
        let direct: BTreeMap<&str, &str> = entries.clone().map(|(a, b)| (a.value.as_str(), b.value.as_str())).collect();
        let mut found = BTreeMap::new();
        for (name, target) in entries {
            for at in [name, target] {
                self.model_name(at);
            }
            self.is_free_label(target);
            match end_of(&direct, &name.value) {
                Some(end) => {
                    found.insert(name.value.clone(), end.to_owned());
                }
                None => {
                    let message = format!("the alias {} leads back to itself", name.shown());
                    self.problem(&name.place, message, "use the name that the engines serve");
                }
            }
        }
        found
    }

    /// `other` is the label of models matched by `*` only, and of requests without one.
    fn is_free_label(&mut self, at: &Located<String>) {
        if at.value == "other" {
            let message = format!("the name {} is reserved in the metrics", at.shown());
            self.problem(&at.place, message, "match it by a pattern such as othe*");
        }
    }

    fn model_name(&mut self, at: &Located<String>) {
        if at.value.contains('*') {
            let message = format!("{} is a pattern", at.shown());
            self.problem(&at.place, message, "an alias leads from one name to one name");
        }
    }

    /// Notes unused definitions.
    pub(super) fn unused(&mut self, root: &Root) {
        for at in root.slo_classes.iter().flat_map(|all| all.iter()).filter_map(|class| class.slo_class.as_ref()) {
            let rules = root.classify.iter().flatten().filter_map(|rule| rule.class.as_ref());
            let leads = rules.chain(&root.default_class).any(|named| named.value == at.value);
            if !leads {
                let message = format!("no rule leads to the class {}", at.shown());
                self.note(&at.place, message, "add a rule to `classify`, or remove the class");
            }
        }
        let Some(routes) = &root.routes else { return };
        for at in root.pools.iter().flat_map(|all| all.iter()).filter_map(|pool| pool.pool.as_ref()) {
            let used = routes.iter().flat_map(|route| &route.pools).flat_map(|list| &list.0);
            if !used.into_iter().any(|named| named.value == at.value) {
                let message = format!("no route leads to the pool {}", at.shown());
                self.note(&at.place, message, "add it to a route, or remove it");
            }
        }
    }
}

/// Follows an alias to its end. `None` for a cycle.
fn end_of<'a>(direct: &BTreeMap<&'a str, &'a str>, name: &str) -> Option<&'a str> {
    let mut end = *direct.get(name)?;
    for _ in 0..direct.len() {
        match direct.get(end) {
            Some(next) => end = next,
            None => return Some(end),
        }
    }
    None
}

//! Tenants and their keys.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU64;
use std::sync::Arc;

use super::{Checker, Names};
use crate::admit::limit::settings::{Allowance, Limits, OverLimit, Rate};
use crate::config::problem::Location;
use crate::config::schema::{self, Root};
use crate::config::walk::{ConfigBlock, Located};
use crate::config::{ClassSettings, TenantSettings};
use crate::identify::{Identity, KeyHash, Keyring};
use crate::route::settings::{Concurrency, PoolSettings, Route};
use crate::types::{ClassId, Glob, TenantId};

/// A key with its position and label.
struct Found {
    hash: KeyHash,
    label: Option<Arc<str>>,
    place: Location,
}

impl Checker<'_> {
    pub(super) fn tenants(&mut self, root: &Root, classes: &Names<'_>) -> (Keyring, Vec<TenantSettings>) {
        let Some(all) = &root.tenants else {
            self.labels_are_known(root, &[]);
            let limits = Limits::default();
            let when_over_limit = OverLimit::default();
            let anonymous = TenantSettings { id: TenantId::anonymous(), classes: None, limits, when_over_limit };
            return (Keyring::anonymous(), vec![anonymous]);
        };
        self.unique("tenant", all.iter().filter_map(|tenant| tenant.tenant.as_ref()));
        let mut owners: HashMap<KeyHash, Identity> = HashMap::new();
        let mut places: HashMap<KeyHash, Location> = HashMap::new();
        let mut labels = Vec::new();
        let mut tenants = Vec::new();
        for raw in all.iter() {
            if let Some(name) = &raw.tenant {
                self.name(name, &["other"]);
            }
            let id = TenantId::from(raw.tenant.as_ref().map_or("", |at| at.value.as_str()));
            for key in self.keys(raw) {
                if let Some(first) = places.get(&key.hash) {
                    let message = format!("the same key is repeated, first at {} (line {})", first.path, first.line);
                    self.problem(&key.place, message, "give each key once, to one tenant");
                }
                labels.extend(key.label.clone());
                places.insert(key.hash, key.place);
                owners.insert(key.hash, Identity { tenant: id.clone(), key_label: key.label });
            }
            let list = raw.classes.as_ref().map(|list| &list.0);
            let classes = list.map(|list| {
                self.unique("class of this tenant", list);
                list.iter().filter_map(|at| self.known(Some(at), classes)).map(ClassId::from).collect()
            });
            let limits = raw.limits.as_ref().map(|limits| self.limits(root, limits)).unwrap_or_default();
            let when_over_limit = raw.when_over_limit.as_ref().map_or_else(Default::default, |word| word.value.0);
            if let Some(at) = raw.when_over_limit.as_ref().filter(|_| !raw.written().contains(&"limits")) {
                self.note(&at.place, "the tenant has no limits", "add `limits`, or remove the key");
            }
            tenants.push(TenantSettings { id, classes, limits, when_over_limit });
        }
        self.labels_are_known(root, &labels);
        (Keyring::of(owners), tenants)
    }

    /// Notes `demote` where no requests queue.
    pub(super) fn demotion_can_help(
        &mut self,
        root: &Root,
        tenants: &[TenantSettings],
        classes: &[Arc<ClassSettings>],
        pools: &[Arc<PoolSettings>],
        routes: &[Route],
    ) {
        for raw in root.tenants.iter().flat_map(|all| all.iter()) {
            let named = |tenant: &&TenantSettings| raw.tenant.as_ref().is_some_and(|at| at.value == tenant.id.as_str());
            let (Some(at), Some(tenant)) = (&raw.when_over_limit, tenants.iter().find(named)) else { continue };
            if at.value.0 != OverLimit::Demote || tenant.limits.is_empty() {
                continue;
            }
            let own = |class: &&Arc<ClassSettings>| tenant.classes.as_ref().is_none_or(|own| own.contains(&class.id));
            let leads = |pool: &PoolSettings, class: &ClassSettings| {
                routes.iter().any(|route| route.serves(&class.id) && route.pools.contains(&pool.id))
            };
            let reached = |pool: &&Arc<PoolSettings>| classes.iter().filter(own).any(|class| leads(pool, class));
            let orders = |pool: &Arc<PoolSettings>| pool.concurrency != Concurrency::Unlimited || pool.engine_priority;
            if !pools.iter().filter(reached).any(orders) {
                let message =
                    "no request waits for the pools of this tenant, so requests beyond its limits run at once";
                self.note(&at.place, message, "give one `max_concurrency_per_engine`, or write `reject`");
            }
        }
    }

    fn limits(&mut self, root: &Root, raw: &schema::Limits) -> Limits {
        let mut limits = Limits { whole: self.allowance(&raw.limit_keys()), models: BTreeMap::new() };
        for (name, allowance) in raw.models.iter().flat_map(|models| &models.0) {
            self.limited_model(root, name);
            let of_model = self.allowance(&allowance.limit_keys());
            self.limits_something(allowance);
            limits.models.insert(Arc::from(name.value.as_str()), of_model);
        }
        self.limits_something(raw);
        limits
    }

    /// Whole numbers only: a rate of nothing would never let anything pass.
    fn allowance(&mut self, raw: &schema::LimitKeys<'_>) -> Allowance {
        let concurrent = raw.concurrent.as_ref().map(|at| self.count(Some(at), 1, 1..=Rate::MOST));
        Allowance {
            tokens: self.rate("tokens", &raw.tokens),
            input_tokens: self.rate("input_tokens", &raw.input_tokens),
            output_tokens: self.rate("output_tokens", &raw.output_tokens),
            requests: self.rate("requests", &raw.requests),
            concurrent_requests: concurrent.and_then(NonZeroU64::new),
        }
    }

    fn rate(&mut self, name: &str, [per_minute, burst]: &[&Option<Located<u64>>; 2]) -> Option<Rate> {
        let range = 1..=Rate::MOST;
        let of_burst = burst.as_ref().map(|at| self.count(Some(at), 1, range.clone()));
        if let (Some(at), None) = (burst, per_minute) {
            let message = format!("it needs {name}_per_minute");
            self.problem(&at.place, message, format!("add `{name}_per_minute`, or remove the key"));
        }
        let per_minute = self.count(Some(per_minute.as_ref()?), 1, range);
        Rate::new(per_minute, of_burst).ok()
    }

    /// Limits count models after aliasing, which some route must take.
    fn limited_model(&mut self, root: &Root, name: &Located<String>) {
        let aliases = root.models.iter().flat_map(|models| &models.aliases).flat_map(|aliases| &aliases.0);
        let mut routes = root.routes.iter().flat_map(|all| all.iter()).peekable();
        if name.value.contains('*') {
            let message = format!("{} is a pattern", name.shown());
            self.problem(&name.place, message, "a limit is for one model: write its whole name");
        } else if let Some((_, target)) = aliases.into_iter().find(|(alias, _)| alias.value == name.value) {
            let message = format!("{} is an alias of {}", name.shown(), target.shown());
            self.problem(&name.place, message, "limits count the aliased name; write that");
        } else if routes.peek().is_some() {
            let takes = |at: &Located<String>| Glob::new(&at.value).matches(&name.value);
            if !routes.flat_map(|route| &route.model).flat_map(|list| &list.0).any(takes) {
                let message = format!("no route takes the model {}", name.shown());
                self.problem(&name.place, message, "add it to a route, or correct the name");
            }
        }
    }

    fn limits_something(&mut self, raw: &impl ConfigBlock) {
        // An unknown key was reported already and may be the misspelt limit.
        let told = self.problems.iter().any(|problem| problem.path == raw.place().path);
        if raw.written().is_empty() && !told {
            self.problem(raw.place(), "has no limit", "write a limit, or remove the key");
        }
    }

    fn keys(&mut self, raw: &schema::Tenant) -> Vec<Found> {
        let mut found = Vec::new();
        for key in raw.keys.iter().flat_map(|keys| keys.iter()) {
            let Some(at) = &key.blake3 else { continue };
            match KeyHash::from_hex(at.value.0.trim()) {
                Some(hash) => {
                    let label = key.label.as_ref().map(|label| Arc::from(label.value.as_str()));
                    found.push(Found { hash, label, place: at.place.clone() });
                }
                None => {
                    let message = "is not a BLAKE3 hash of 64 hexadecimal digits";
                    self.problem(&at.place, message, "make a key and its hash with `goodput key new`");
                }
            }
        }
        found.extend(self.keys_file(raw));
        if raw.keys.is_none() && raw.keys_file.is_none() && raw.is_whole() {
            self.problem(
                raw.place(),
                "the tenant has no key, so no request can belong to it",
                "add `keys` or `keys_file`",
            );
        }
        self.labels_differ(&found);
        found
    }

    /// One hash per line, followed by an optional label; `#` starts a comment.
    fn keys_file(&mut self, raw: &schema::Tenant) -> Vec<Found> {
        let Some(at) = &raw.keys_file else { return Vec::new() };
        let Some(bytes) = self.file(at) else { return Vec::new() };
        let Ok(text) = String::from_utf8(bytes) else {
            self.problem(&at.place, format!("the file {} is not text", at.shown()), "write one hash per line into it");
            return Vec::new();
        };
        let mut found = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or("").trim();
            if line.is_empty() {
                continue;
            }
            let (hash, label) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            match KeyHash::from_hex(hash) {
                Some(hash) => {
                    let label = Some(label.trim()).filter(|label| !label.is_empty()).map(Arc::from);
                    found.push(Found { hash, label, place: at.place.clone() });
                }
                None => {
                    let message = format!("line {number} of {} does not begin with a BLAKE3 hash", at.shown());
                    self.problem(&at.place, message, "write 64 hexadecimal digits, then the label if it has one");
                }
            }
        }
        if found.is_empty() && text.lines().all(|line| line.split('#').next().unwrap_or("").trim().is_empty()) {
            self.problem(&at.place, format!("the file {} holds no key", at.shown()), "write one hash per line into it");
        }
        found
    }

    fn labels_differ(&mut self, keys: &[Found]) {
        let mut seen: HashMap<&str, u64> = HashMap::new();
        for key in keys {
            let Some(label) = key.label.as_deref() else { continue };
            if let Some(line) = seen.insert(label, key.place.line) {
                let message = format!("the label \"{label}\" is repeated in this tenant, first on line {line}");
                self.problem(&key.place, message, "give each key its own label");
            }
        }
    }

    /// A rule for an undefined key label would never match.
    fn labels_are_known(&mut self, root: &Root, labels: &[Arc<str>]) {
        let names = Names { what: "key label", all: labels.iter().map(AsRef::as_ref).collect(), told: false };
        let rules = root.classify.iter().flatten().filter_map(|rule| rule.when.as_ref());
        for at in rules.filter_map(|when| when.key.as_ref()).flat_map(|list| &list.0) {
            self.known(Some(at), &names);
        }
    }
}

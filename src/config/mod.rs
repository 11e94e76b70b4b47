//! The settings: from a YAML file to checked, complete values, and again when it changes.
//!
//! Three steps. `tree` reads the YAML with the place of every node. `raw` walks it into blocks
//! of optional values: what the file said. `check` makes [`Settings`] of them: what we will do.
//! All problems are reported at once, each with its path, line, column and a way out; a file
//! with any problem changes nothing. Secrets come from files or from `${NAME}` and never show
//! in a problem. Other rooms own the types of their settings; renaming a key touches this
//! folder only.

mod check;
mod problem;
mod raw;
mod read;
mod scalar;
mod surroundings;
mod tree;
mod url;
pub mod watch;

pub use problem::{Location, Problem};
pub use surroundings::{Environment, ProcessEnvironment};

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use read::{ConfigWalker, Read};
use secrecy::ExposeSecret;

use crate::accept::settings::{Admin, Listen, Shutdown};
use crate::admit::levels::Level;
use crate::admit::limit::settings::{Limits, OverLimit};
use crate::admit::queue::ClassQueue;
use crate::admit::shared::settings::LimitsStore;
use crate::classify::{Rules, TargetHeaders};
use crate::forward::settings::Timeouts;
use crate::identify::Keyring;
use crate::judge::Objectives;
use crate::record::settings::{AccessLog, JournalSettings, MetricLabels, OtlpSettings};
use crate::route::Routes;
use crate::route::settings::Pool;
use crate::units::{ClassId, Endpoint, LengthBuckets, PoolId, Priority, TenantId};

/// What the gateway does: complete and checked. One immutable value; a request keeps the one
/// it arrived under.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The listener for clients.
    pub listen: Listen,
    /// How the gateway leaves.
    pub shutdown: Shutdown,
    /// The listener for operators; `None`: `admin: off`.
    pub admin: Option<Admin>,
    /// Largest event that is still read, in bytes.
    pub max_event: usize,
    /// Paths beside the generating ones whose answers are judged.
    pub judged_paths: Vec<Endpoint>,
    /// GET paths that go to an engine.
    pub engine_paths: Vec<Endpoint>,
    /// The classes, in the order of the file.
    pub classes: Vec<Arc<ClassSettings>>,
    /// The class of requests that no rule fits.
    pub default_class: ClassId,
    /// The rules that give a request its class.
    pub rules: Rules,
    /// Edges of the prompt lengths.
    pub buckets: LengthBuckets,
    /// The pools, in the order of the file.
    pub pools: Vec<Arc<Pool>>,
    /// Which pools serve what, in order; knows the aliases too.
    pub routes: Routes,
    /// Names that clients send, and the names that engines know. Chains are followed to the end.
    pub aliases: BTreeMap<String, String>,
    /// Who may ask.
    pub keyring: Keyring,
    /// What each tenant may use.
    pub tenants: TenantTable,
    /// Gateways that share the engines.
    pub replicas: u32,
    /// Where the balances of limits live.
    pub limits_store: LimitsStore,
    /// Where the access line goes.
    pub access_log: AccessLog,
    /// The journal, if one is kept.
    pub journal: Option<JournalSettings>,
    /// Where spans go, if anywhere.
    pub otlp: Option<OtlpSettings>,
    /// By which labels the metrics of requests are told apart.
    pub labels: MetricLabels,
    /// A hash of the file and of every file that it refers to.
    pub hash: [u8; 32],
    /// The files that it refers to and that were read with it.
    pub files: Vec<PathBuf>,
    /// What is no problem but worth a look.
    pub notes: Vec<Problem>,
}

/// One SLO class.
#[derive(Clone, Debug)]
pub struct ClassSettings {
    /// Its name.
    pub id: ClassId,
    /// Its rank where requests wait.
    pub priority: Priority,
    /// What it promises.
    pub objectives: Objectives,
    /// What a request's own targets may do.
    pub target_headers: TargetHeaders,
    /// Its time limits.
    pub timeouts: Timeouts,
    /// How its requests wait.
    pub queue: ClassQueue,
    /// What is given up for it under load, in this order.
    pub degrade: Vec<Level>,
}

/// What one tenant may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantSettings {
    /// Its name.
    pub id: TenantId,
    /// Its classes; `None`: all.
    pub classes: Option<Vec<ClassId>>,
    /// What it may use within a time and at one time.
    pub limits: Limits,
    /// What becomes of requests beyond that.
    pub when_over_limit: OverLimit,
}

impl TenantSettings {
    fn may_use(&self, class: &ClassId) -> bool {
        self.classes.as_ref().is_none_or(|classes| classes.contains(class))
    }
}

/// All tenants, found by name.
#[derive(Clone, Debug)]
pub struct TenantTable {
    by_name: HashMap<TenantId, TenantSettings, ahash::RandomState>,
    /// Some of them may not use every class. Where none is held so, requests need not look.
    some_are_held: bool,
}

impl TenantTable {
    fn new(all: Vec<TenantSettings>) -> Self {
        let some_are_held = all.iter().any(|tenant| tenant.classes.is_some());
        let by_name = all.into_iter().map(|tenant| (tenant.id.clone(), tenant)).collect();
        TenantTable { by_name, some_are_held }
    }

    /// The tenant of this name.
    #[must_use]
    pub fn get(&self, tenant: &TenantId) -> Option<&TenantSettings> {
        self.by_name.get(tenant)
    }

    /// Whether a tenant may use a class. It is one of the table.
    #[must_use]
    pub fn may_use(&self, tenant: &TenantId, class: &ClassId) -> bool {
        !self.some_are_held || self.get(tenant).is_some_and(|tenant| tenant.may_use(class))
    }

    /// Every tenant, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &TenantSettings> {
        self.by_name.values()
    }
}

impl Settings {
    /// Whether answers on this path are judged.
    #[must_use]
    pub fn judges(&self, endpoint: Endpoint) -> bool {
        endpoint.dialect().generates() || self.judged_paths.contains(&endpoint)
    }

    /// The class of this name.
    #[must_use]
    pub fn class(&self, id: &ClassId) -> Option<&Arc<ClassSettings>> {
        self.classes.iter().find(|class| class.id == *id)
    }

    /// The pool of this name.
    #[must_use]
    pub fn pool(&self, id: &PoolId) -> Option<&Arc<Pool>> {
        self.pools.iter().find(|pool| pool.id == *id)
    }

    /// Keys that differ from `other` and that a running process cannot change.
    #[must_use]
    pub fn fixed_differences(&self, other: &Settings) -> Vec<&'static str> {
        let mut found = Vec::new();
        if self.listen.address != other.listen.address {
            found.push("listen.address");
        }
        if self.listen.tls.is_some() != other.listen.tls.is_some() {
            found.push("listen.tls");
        }
        if self.admin.as_ref().map(|admin| admin.address) != other.admin.as_ref().map(|admin| admin.address) {
            found.push("admin.address");
        }
        let token =
            |settings: &Settings| settings.admin.as_ref()?.token.as_ref().map(|token| token.expose_secret().to_owned());
        if token(self) != token(other) {
            found.push("admin.token_file");
        }
        let hosts = |settings: &Settings| settings.admin.as_ref().map(|admin| admin.hosts.clone());
        if hosts(self).is_some() && hosts(other).is_some() && hosts(self) != hosts(other) {
            found.push("admin.hosts");
        }
        if self.shutdown != other.shutdown {
            found.push("shutdown");
        }
        if self.limits_store != other.limits_store {
            found.push("limits_store");
        }
        if self.access_log != other.access_log {
            found.push("telemetry.access_log");
        }
        if self.journal != other.journal {
            found.push("telemetry.journal");
        }
        if self.otlp != other.otlp {
            found.push("telemetry.otlp");
        }
        found
    }
}

/// Reads settings from the text of a file.
///
/// # Errors
/// All problems, in the order of the file.
pub fn load(text: &str, surroundings: &dyn Environment) -> Result<Settings, Vec<Problem>> {
    load_with_files(text, surroundings).map_err(|unsound| unsound.problems)
}

/// Why no settings came of a text.
struct Invalid {
    problems: Vec<Problem>,
    /// The files that were looked at: a change of one may be what was missing.
    files: Vec<PathBuf>,
}

fn load_with_files(text: &str, surroundings: &dyn Environment) -> Result<Settings, Invalid> {
    let tree = tree::parse(text).map_err(|problem| Invalid { problems: vec![problem], files: Vec::new() })?;
    if matches!(tree.value, tree::Value::Null) {
        return Err(Invalid { problems: vec![nothing_there()], files: Vec::new() });
    }
    let mut reader = ConfigWalker::new(surroundings);
    let root = raw::Root::read(&tree, &mut reader);
    let mut check = check::Checker::new(surroundings, reader.problems);
    let settings = root.and_then(|root| check.settings(&root, blake3::hash(text.as_bytes())));
    settings.ok_or_else(|| {
        let check::Checker { mut problems, mut files, papers, .. } = check;
        problems.sort_by_key(|problem| (problem.line, problem.column));
        files.extend(papers);
        Invalid { problems, files }
    })
}

/// What is told of a file without a single key.
fn nothing_there() -> Problem {
    let top = Location { path: "".into(), line: 1, column: 1 };
    let way_out = "write at least `slo_classes`, `default_class` and `pools`; config/minimal.yaml shows how";
    Problem::new(&top, "the file is empty, or all comments", way_out)
}

/// The JSON Schema of the file, for editors.
#[must_use]
pub fn schema() -> serde_json::Value {
    let generator = schemars::generate::SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<raw::Root>();
    schema.insert("title".to_owned(), "goodput settings".into());
    schema.to_value()
}

/// A hash over a file's text and the files that it refers to; one that cannot be read counts too.
fn fingerprint(of_text: blake3::Hash, files: &[PathBuf], surroundings: &dyn Environment) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(of_text.as_bytes());
    for path in files {
        match surroundings.file(path) {
            Ok(bytes) => hasher.update(blake3::hash(&bytes).as_bytes()),
            Err(_) => hasher.update(b"unreadable"),
        };
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests;

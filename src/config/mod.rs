//! Settings: from a YAML file to complete, checked values, and again when the file changes.
//!
//! Three steps. `spanned_yaml` parses the YAML with the position of every node. `schema` walks it into blocks of
//! optional values: what the file says. `check` turns them into [`Settings`]: what the gateway does. All
//! problems are reported at once, each with path, line, column and a fix; a file with any problem changes
//! nothing. Secrets come from files or `${NAME}` and never appear in a problem. Other modules own their
//! settings types; renaming a key touches this directory
//! only.

mod check;
mod environment;
mod problem;
mod reference;
mod scalar;
mod schema;
mod spanned_yaml;
mod url;
mod walk;
pub mod watch;

pub use environment::{Environment, ProcessEnvironment};
pub use problem::{Location, Problem};
pub(crate) use url::engine_address;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use secrecy::ExposeSecret;
use walk::{ConfigWalker, Read};

use crate::accept::settings::{Admin, Listen, Shutdown};
use crate::admit::limit::settings::{Limits, OverLimit};
use crate::admit::overload_control::OverloadLevel;
use crate::admit::queue::ClassQueue;
use crate::admit::redis::settings::LimitsStore;
use crate::classify::{Rules, TargetHeaders};
use crate::forward::settings::Timeouts;
use crate::identify::Keyring;
use crate::judge::Objectives;
use crate::record::settings::{
    AccessLog, JournalSettings, MetricLabels, OtlpSettings, PrometheusSettings, SloStateSettings,
};
use crate::route::Routes;
use crate::route::settings::PoolSettings;
use crate::types::{ApiPath, ClassId, LengthBuckets, PoolId, Priority, TenantId};

/// Complete, checked settings. Immutable; a request keeps those of its
/// arrival.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The listener for clients.
    pub listen: Listen,
    /// Graceful shutdown.
    pub shutdown: Shutdown,
    /// The admin listener; `None`: `admin: off`.
    pub admin: Option<Admin>,
    /// Largest event that is inspected, bytes.
    pub max_event: usize,
    /// Paths judged beside the generating ones.
    pub judged_paths: Vec<ApiPath>,
    /// GET paths relayed to an engine.
    pub engine_paths: Vec<ApiPath>,
    /// The classes, in file order.
    pub classes: Vec<Arc<ClassSettings>>,
    /// The class of requests that match no rule.
    pub default_class: ClassId,
    /// Classification rules.
    pub rules: Rules,
    /// Edges of the prompt length buckets.
    pub buckets: LengthBuckets,
    /// The pools, in file order.
    pub pools: Vec<Arc<PoolSettings>>,
    /// Routes in order, with aliases.
    pub routes: Routes,
    /// Aliases: clients' names to engines' names, fully resolved.
    pub aliases: BTreeMap<String, String>,
    /// API keys.
    pub keyring: Keyring,
    /// Tenants and their permissions.
    pub tenants: TenantTable,
    /// Number of gateways that share the engines.
    pub replicas: u32,
    /// Store of the limits' balances.
    pub limits_store: LimitsStore,
    /// Destination of the access log.
    pub access_log: AccessLog,
    /// The journal, if one is kept.
    pub journal: Option<JournalSettings>,
    /// The file in which the counts of classes outlive the process, if any.
    pub slo_state: Option<SloStateSettings>,
    /// The Prometheus that budgets are read from.
    pub prometheus: Option<PrometheusSettings>,
    /// Export of spans, if configured.
    pub otlp: Option<OtlpSettings>,
    /// Labels of the request metrics.
    pub labels: MetricLabels,
    /// Hash of the file and every file it refers to.
    pub hash: [u8; 32],
    /// Files it refers to that were read with it.
    pub files: Vec<PathBuf>,
    /// Remarks that are not problems.
    pub notes: Vec<Problem>,
}

/// One SLO class.
#[derive(Clone, Debug)]
pub struct ClassSettings {
    /// Its name.
    pub id: ClassId,
    /// Its priority in queues.
    pub priority: Priority,
    /// Its objectives.
    pub objectives: Objectives,
    /// How it treats a request's own targets.
    pub target_headers: TargetHeaders,
    /// Its time limits.
    pub timeouts: Timeouts,
    /// Queue settings of its requests.
    pub queue: ClassQueue,
    /// Overload levels, in order.
    pub degrade: Vec<OverloadLevel>,
}

/// Settings of one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantSettings {
    /// Its name.
    pub id: TenantId,
    /// Classes it may use; `None` means all.
    pub classes: Option<Vec<ClassId>>,
    /// Its limits.
    pub limits: Limits,
    /// Treatment of requests beyond the limits.
    pub when_over_limit: OverLimit,
}

impl TenantSettings {
    fn may_use(&self, class: &ClassId) -> bool {
        self.classes.as_ref().is_none_or(|classes| classes.contains(class))
    }
}

/// All tenants by name.
#[derive(Clone, Debug)]
pub struct TenantTable {
    by_name: HashMap<TenantId, TenantSettings, ahash::RandomState>,
    /// Whether any tenant is restricted to some classes, so that others need no lookup.
    some_are_held: bool,
}

impl TenantTable {
    fn new(all: Vec<TenantSettings>) -> Self {
        let some_are_held = all.iter().any(|tenant| tenant.classes.is_some());
        let by_name = all.into_iter().map(|tenant| (tenant.id.clone(), tenant)).collect();
        TenantTable { by_name, some_are_held }
    }

    /// The tenant with this name.
    #[must_use]
    pub fn get(&self, tenant: &TenantId) -> Option<&TenantSettings> {
        self.by_name.get(tenant)
    }

    /// Whether a tenant of this table may use a class.
    #[must_use]
    pub fn may_use(&self, tenant: &TenantId, class: &ClassId) -> bool {
        !self.some_are_held || self.get(tenant).is_some_and(|tenant| tenant.may_use(class))
    }

    /// All tenants, unordered.
    pub fn iter(&self) -> impl Iterator<Item = &TenantSettings> {
        self.by_name.values()
    }
}

impl Settings {
    /// Whether responses on this path are judged.
    #[must_use]
    pub fn judges(&self, endpoint: ApiPath) -> bool {
        endpoint.dialect().generates() || self.judged_paths.contains(&endpoint)
    }

    /// The class with this name.
    #[must_use]
    pub fn class(&self, id: &ClassId) -> Option<&Arc<ClassSettings>> {
        self.classes.iter().find(|class| class.id == *id)
    }

    /// The pool with this name.
    #[must_use]
    pub fn pool(&self, id: &PoolId) -> Option<&Arc<PoolSettings>> {
        self.pools.iter().find(|pool| pool.id == *id)
    }

    /// Keys that differ from `other` and need a restart.
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
        if self.slo_state != other.slo_state {
            found.push("telemetry.slo_state");
        }
        if self.prometheus != other.prometheus {
            found.push("telemetry.prometheus");
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
/// All problems, in file order.
pub fn load(text: &str, surroundings: &dyn Environment) -> Result<Settings, Vec<Problem>> {
    load_with_files(text, surroundings).map_err(|unsound| unsound.problems)
}

/// A text without valid settings.
struct Invalid {
    problems: Vec<Problem>,
    /// Files that were read, because a change of one may fix it.
    files: Vec<PathBuf>,
}

fn load_with_files(text: &str, surroundings: &dyn Environment) -> Result<Settings, Invalid> {
    let tree = spanned_yaml::parse(text).map_err(|problem| Invalid { problems: vec![problem], files: Vec::new() })?;
    if matches!(tree.value, spanned_yaml::Value::Null) {
        return Err(Invalid { problems: vec![nothing_there()], files: Vec::new() });
    }
    let mut reader = ConfigWalker::new(surroundings);
    let root = schema::Root::read(&tree, &mut reader);
    let mut check = check::Checker::new(surroundings, reader.problems);
    let settings = root.and_then(|root| check.settings(&root, blake3::hash(text.as_bytes())));
    settings.ok_or_else(|| {
        let check::Checker { mut problems, mut files, papers, .. } = check;
        problems.sort_by_key(|problem| (problem.line, problem.column));
        files.extend(papers);
        Invalid { problems, files }
    })
}

/// The problem of a file without any key.
fn nothing_there() -> Problem {
    let top = Location { path: "".into(), line: 1, column: 1 };
    let way_out = "write at least `slo_classes`, `default_class` and `pools`; config/minimal.yaml shows how";
    Problem::new(&top, "the file is empty, or all comments", way_out)
}

/// The JSON Schema of the file, for editors.
#[must_use]
pub fn schema() -> serde_json::Value {
    let mut schema = schema_with_links();
    reference::remove_links(&mut schema);
    schema
}

/// The JSON Schema with descriptions in Markdown, as the key tables need them.
fn schema_with_links() -> serde_json::Value {
    let generator = schemars::generate::SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<schema::Root>();
    schema.insert("title".to_owned(), "goodput settings".into());
    schema.to_value()
}

pub use reference::{FillError, fill, tables};

/// Hash of a file's text and the files it refers to; unreadable ones count too.
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

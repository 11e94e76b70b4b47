//! Turns the raw settings into checked ones, and reports all problems at once.
//!
//! Every part returns a value even if it has a problem (a default, or the part without the invalid piece), so
//! that later parts are checked too. Only a file without problems becomes [`Settings`].

mod classes;
mod degrade;
mod listen;
mod pools;
mod routes;
mod rules;
mod slo_state;
mod store;
mod telemetry;
mod tenants;

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::environment::Environment;
use super::problem::{Location, Problem, nearest};
use super::schema::Root;
use super::walk::{ConfigBlock, Located, quoted};
use super::{Settings, TenantTable};
use crate::classify::Rules;
use crate::record::settings::{MetricLabels, RequestLabel};
use crate::route::Routes;
use crate::types::{ClassId, LengthBuckets, Tokens};

/// State of a check.
pub(super) struct Checker<'a> {
    surroundings: &'a dyn Environment,
    pub problems: Vec<Problem>,
    /// Remarks that do not prevent loading.
    notes: Vec<Problem>,
    /// Files read as part of the settings.
    pub files: Vec<PathBuf>,
    /// Files read only to validate them: the listener renews their contents without a reload, so they are not
    /// part of the settings' hash.
    pub papers: Vec<PathBuf>,
}

impl<'a> Checker<'a> {
    pub(super) fn new(surroundings: &'a dyn Environment, problems: Vec<Problem>) -> Self {
        Checker { surroundings, problems, notes: Vec::new(), files: Vec::new(), papers: Vec::new() }
    }

    fn problem(&mut self, place: &Location, message: impl Into<String>, way_out: impl Into<String>) {
        self.problems.push(Problem::new(place, message, way_out));
    }

    fn note(&mut self, place: &Location, message: impl Into<String>, way_out: impl Into<String>) {
        self.notes.push(Problem::new(place, message, way_out));
    }

    /// Checks the whole file. `None` if there is any problem.
    pub(super) fn settings(&mut self, root: &Root, hash_of_text: blake3::Hash) -> Option<Settings> {
        let listen = self.listen(root.listen.as_ref());
        let shutdown = self.shutdown(root.shutdown.as_ref());
        let (max_event, judged_paths) = self.inspect(root.inspect.as_ref());
        let engine_paths = self.engine_paths(root.engine_paths.as_ref());
        let admin = self.admin(root.admin.as_ref(), &listen, root.listen.as_ref());
        let classes = self.classes(root);
        let class_names = Names::of(
            "class",
            root.slo_classes.iter().flat_map(|all| all.iter()).map(|class| class.slo_class.as_ref()),
        );
        let (keyring, mut tenants) = self.tenants(root, &class_names);
        let default_class = self.known(root.default_class.as_ref(), &class_names);
        let mut rules = self.rules(root, &class_names);
        let buckets = self.buckets(root);
        let pools = self.pools(root);
        self.no_engine_is_here(root, &listen, admin.as_ref());
        let aliases = self.aliases(root);
        let mut routes = self.routes(root, &class_names, &aliases);
        self.unused(root);
        self.levels_can_help(root, &classes, &pools, &routes);
        self.seats_have_a_promise(root, &classes, &pools, &routes);
        self.demotion_can_help(root, &tenants, &classes, &pools, &routes);
        let replicas = self.count(root.replicas.as_ref(), 1, 1..=1000);
        let limits_store = self.limits_store(root);
        let access_log = root.telemetry.as_ref().and_then(|telemetry| telemetry.access_log.as_ref());
        let access_log = access_log.map_or_else(Default::default, |word| word.value.0);
        let labels = self.labels(root);
        self.leaves_in_order(root, &shutdown, &classes);
        let journal = self.journal(root);
        let slo_state = self.slo_state(root);
        let prometheus = self.prometheus(root);
        let otlp = self.otlp(root);
        if !self.problems.is_empty() {
            return None;
        }
        let mut default_class = ClassId::from(default_class?);
        let named = rules.iter_mut().map(|(class, _)| class).chain([&mut default_class]);
        let named = named.chain(tenants.iter_mut().flat_map(|tenant| &mut tenant.classes).flatten());
        share(named, classes.iter().map(|class| &class.id));
        share(routes.iter_mut().flat_map(|route| &mut route.pools), pools.iter().map(|pool| &pool.id));
        Some(Settings {
            listen,
            shutdown,
            admin,
            max_event,
            judged_paths,
            engine_paths,
            classes,
            rules: Rules::new(rules, default_class.clone()),
            default_class,
            buckets,
            pools,
            routes: Routes::new(routes, aliases.clone()),
            aliases,
            keyring,
            tenants: TenantTable::new(tenants),
            replicas: replicas as u32,
            limits_store,
            access_log,
            journal,
            slo_state,
            prometheus,
            otlp,
            labels,
            hash: self.hash(hash_of_text),
            files: std::mem::take(&mut self.files),
            notes: std::mem::take(&mut self.notes),
        })
    }

    /// Hash of the file and everything it refers to.
    fn hash(&self, of_text: blake3::Hash) -> [u8; 32] {
        super::fingerprint(of_text, &self.files, self.surroundings)
    }

    fn labels(&mut self, root: &Root) -> MetricLabels {
        let Some(telemetry) = &root.telemetry else { return MetricLabels::default() };
        let histograms_by_model = telemetry.histograms_by_model.as_ref();
        let dropped = telemetry.drop_labels.iter().flat_map(|labels| &labels.0);
        let labels = MetricLabels {
            dropped: dropped.map(|label| label.value.0).collect(),
            histograms_by_model: histograms_by_model.is_some_and(|asked| asked.value),
            series_by_engine: telemetry.series_by_engine.as_ref().is_some_and(|asked| asked.value),
        };
        if let Some(asked) = histograms_by_model.filter(|asked| asked.value)
            && labels.dropped.contains(&RequestLabel::Model)
        {
            let way_out = "leave the label in, or remove this key";
            self.problem(&asked.place, "is true, but drop_labels omits the label model", way_out);
        }
        labels
    }

    fn buckets(&mut self, root: &Root) -> LengthBuckets {
        let mut buckets = LengthBuckets::default();
        let Some(raw) = &root.length_buckets else { return buckets };
        buckets.short = Tokens(self.count(raw.short.as_ref(), buckets.short.0, 1..=u64::MAX));
        buckets.medium = Tokens(self.count(raw.medium.as_ref(), buckets.medium.0, 1..=u64::MAX));
        if buckets.short >= buckets.medium {
            let message = format!("short ({}) is not below medium ({})", buckets.short.0, buckets.medium.0);
            self.problem(raw.place(), message, "make `short` the smaller one");
        }
        buckets
    }

    /// A count within a range, else the default.
    fn count(&mut self, at: Option<&Located<u64>>, default: u64, range: std::ops::RangeInclusive<u64>) -> u64 {
        let Some(at) = at else { return default };
        if range.contains(&at.value) {
            return at.value;
        }
        let way_out = if *range.end() == u64::MAX {
            format!("write a number from {} on", range.start())
        } else {
            format!("write a number from {} to {}", range.start(), range.end())
        };
        self.problem(&at.place, format!("{} is out of range", shown(at)), way_out);
        default
    }

    /// A positive duration, else the default.
    fn time(&mut self, at: Option<&Located<Duration>>, default: Duration) -> Duration {
        let Some(at) = at else { return default };
        if at.value.is_zero() {
            self.problem(&at.place, "0 is not a positive duration", "write a duration above zero, or remove the key");
            return default;
        }
        at.value
    }

    /// Positive seconds; `wrong` is the message for others.
    fn seconds(&mut self, at: &Located<f64>, wrong: &str) -> Option<Duration> {
        let found = Duration::try_from_secs_f64(at.value).ok().filter(|length| !length.is_zero());
        if found.is_none() {
            let way_out = "give a positive number of seconds, or leave it out";
            self.problem(&at.place, format!("{} {wrong}", shown(at)), way_out);
        }
        found
    }

    /// A share above 0 and up to 1.
    fn share(&mut self, at: &Located<f64>) -> Option<f64> {
        self.share_that(at, |_| true)
    }

    /// A share above 0 and up to 1; `fits` selects values to suggest for an invalid one.
    fn share_that(&mut self, at: &Located<f64>, fits: impl Fn(f64) -> bool) -> Option<f64> {
        if at.value > 0.0 && at.value <= 1.0 {
            return Some(at.value);
        }
        // 95 probably means per cent; 1.5 probably does not.
        let of_hundred = (at.value * 1e7).round() / 1e9;
        let way_out = if (2.0..=100.0).contains(&at.value) && fits(of_hundred) && !at.hidden {
            format!("shares are at most 1: did you mean {of_hundred}?")
        } else {
            "write a number above 0, up to 1".to_owned()
        };
        self.problem(&at.place, format!("{} is not a share", shown(at)), way_out);
        None
    }

    /// A name usable as label and header: visible, short, not reserved.
    fn name(&mut self, at: &Located<String>, reserved: &[&str]) {
        let name = &at.value;
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.:/@".contains(c);
        if name.len() > 64 || !name.chars().all(plain) {
            let message = format!("{} cannot be a name", at.shown());
            self.problem(&at.place, message, "use up to 64 letters, digits, or _ - . : / @");
        } else if reserved.contains(&name.as_str()) {
            let message = format!("the name {} is reserved in the metrics", at.shown());
            self.problem(&at.place, message, "choose another name");
        }
    }

    /// Reports duplicate names.
    fn unique<'n>(&mut self, what: &str, names: impl IntoIterator<Item = &'n Located<String>>) {
        let mut first: HashMap<&str, u64> = HashMap::new();
        for at in names {
            if let Some(line) = first.get(at.value.as_str()) {
                let message = format!("the {what} {} is defined twice, first on line {line}", at.shown());
                self.problem(&at.place, message, "give each its own name");
            } else {
                first.insert(&at.value, at.place.line);
            }
        }
    }

    /// A name that must be defined elsewhere in the file.
    fn known<'n>(&mut self, at: Option<&'n Located<String>>, names: &Names<'_>) -> Option<&'n str> {
        let at = at?;
        if names.all.contains(&at.value.as_str()) {
            return Some(&at.value);
        }
        if names.told {
            return None;
        }
        let message = format!("the {} {} is not defined", names.what, at.shown());
        let way_out = match nearest(&at.value, names.all.iter().copied()).filter(|_| !at.hidden) {
            Some(near) => format!("did you mean {near}?"),
            None if names.all.is_empty() => "define it".to_owned(),
            None => format!("define it, or name one of: {}", names.all.join(", ")),
        };
        self.problem(&at.place, message, way_out);
        None
    }

    /// Reads a file that is part of the settings.
    fn file(&mut self, at: &Located<String>) -> Option<Vec<u8>> {
        let path = PathBuf::from(&at.value);
        if !self.files.contains(&path) {
            self.files.push(path);
        }
        self.bytes(at)
    }

    /// Reads a file that another component will follow.
    fn paper(&mut self, at: &Located<String>) -> Option<Vec<u8>> {
        self.papers.push(PathBuf::from(&at.value));
        self.bytes(at)
    }

    fn bytes(&mut self, at: &Located<String>) -> Option<Vec<u8>> {
        match self.surroundings.file(Path::new(&at.value)) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                let (wrong, way_out) = match error.kind() {
                    ErrorKind::FileTooLarge => ("is longer than 1 MiB".to_owned(), "name the file that is meant"),
                    ErrorKind::NotSeekable => ("is not a regular file".to_owned(), "write what it gives into a file"),
                    kind => (
                        format!("cannot be read ({kind})"),
                        "give the file a path from the settings' own directory, and the right to read it",
                    ),
                };
                self.problem(&at.place, format!("the file {} {wrong}", at.shown()), way_out);
                None
            }
        }
    }

    /// Reads a secret from a file: one line of visible characters.
    fn secret_file(&mut self, at: &Located<String>) -> Option<String> {
        let bytes = self.file(at)?;
        let secret = String::from_utf8(bytes).ok().map(|text| text.trim().to_owned());
        let secret = secret.filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()));
        if secret.is_none() {
            let message = format!("the file {} holds no secret", at.shown());
            self.problem(&at.place, message, "write one line of visible ASCII characters into it");
        }
        secret
    }
}

/// A number for a message.
fn shown<T: std::fmt::Display>(at: &Located<T>) -> String {
    if at.hidden { "the value of the variable".to_owned() } else { at.value.to_string() }
}

/// A duration for a message: `1.5s`.
fn in_seconds(length: Duration) -> String {
    format!("{}s", length.as_secs_f64())
}

/// Replaces names by clones of the defined ones, which compare equal by
/// pointer.
fn share<'n, 'd, N: Clone + PartialEq + 'n + 'd>(
    named: impl Iterator<Item = &'n mut N>,
    defined: impl Iterator<Item = &'d N> + Clone,
) {
    for name in named {
        if let Some(same) = defined.clone().find(|same| *same == name) {
            *name = same.clone();
        }
    }
}

/// Defined names of one kind.
struct Names<'n> {
    what: &'static str,
    all: Vec<&'n str>,
    /// Whether their absence was reported already.
    told: bool,
}

impl<'n> Names<'n> {
    fn of(what: &'static str, names: impl IntoIterator<Item = Option<&'n Located<String>>>) -> Self {
        let mut all = Vec::new();
        for at in names.into_iter().flatten() {
            if !all.contains(&at.value.as_str()) {
                all.push(at.value.as_str());
            }
        }
        Names { what, told: all.is_empty(), all }
    }
}

/// Message start for a value given as text.
fn is_not_a(at: &Located<String>, what: &str) -> String {
    if at.hidden {
        format!("the value of the variable is not {what}")
    } else {
        format!("{} is not {what}", quoted(&at.value))
    }
}

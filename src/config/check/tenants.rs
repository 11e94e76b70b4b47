//! Tenants and their keys.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Check, Names};
use crate::config::Tenant;
use crate::config::problem::Place;
use crate::config::raw::{self, Root};
use crate::config::read::Block;
use crate::identify::{KeyHash, Keyring, Who};
use crate::units::{ClassId, TenantId};

/// A key, where it stands, and what it is called.
struct Found {
    hash: KeyHash,
    label: Option<Arc<str>>,
    place: Place,
}

impl Check<'_> {
    pub(super) fn tenants(&mut self, root: &Root, classes: &Names<'_>) -> (Keyring, Vec<Tenant>) {
        let Some(all) = &root.tenants else {
            self.labels_are_known(root, &[]);
            return (Keyring::anonymous(), vec![Tenant { id: TenantId::anonymous(), classes: None }]);
        };
        self.unique("tenant", all.iter().filter_map(|tenant| tenant.tenant.as_ref()));
        let mut owners: HashMap<KeyHash, Who> = HashMap::new();
        let mut places: HashMap<KeyHash, Place> = HashMap::new();
        let mut labels = Vec::new();
        let mut tenants = Vec::new();
        for raw in all.iter() {
            if let Some(name) = &raw.tenant {
                self.name(name, &["other"]);
            }
            let id = TenantId::from(raw.tenant.as_ref().map_or("", |at| at.value.as_str()));
            for key in self.keys(raw) {
                if let Some(first) = places.get(&key.hash) {
                    let message = format!("the same key stands twice, first at {} (line {})", first.path, first.line);
                    self.problem(&key.place, message, "give each key once, to one tenant");
                }
                labels.extend(key.label.clone());
                places.insert(key.hash, key.place);
                owners.insert(key.hash, Who { tenant: id.clone(), key_label: key.label });
            }
            let list = raw.classes.as_ref().map(|list| &list.0);
            let classes = list.map(|list| {
                self.unique("class of this tenant", list);
                list.iter().filter_map(|at| self.known(Some(at), classes)).map(ClassId::from).collect()
            });
            tenants.push(Tenant { id, classes });
        }
        self.labels_are_known(root, &labels);
        (Keyring::of(owners), tenants)
    }

    fn keys(&mut self, raw: &raw::Tenant) -> Vec<Found> {
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
            self.problem(raw.place(), "the tenant has no key, so nobody can ask as it", "add `keys` or `keys_file`");
        }
        self.labels_differ(&found);
        found
    }

    /// One hash per line, a label behind it where it has one; `#` begins a comment.
    fn keys_file(&mut self, raw: &raw::Tenant) -> Vec<Found> {
        let Some(at) = &raw.keys_file else { return Vec::new() };
        let Some(bytes) = self.file(at) else { return Vec::new() };
        let Ok(text) = String::from_utf8(bytes) else {
            self.problem(&at.place, format!("the file {} is no text", at.shown()), "write one hash per line into it");
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
                let message = format!("the label \"{label}\" stands twice in this tenant, first on line {line}");
                self.problem(&key.place, message, "give each key its own label");
            }
        }
    }

    /// A rule for a label that no key has would never match.
    fn labels_are_known(&mut self, root: &Root, labels: &[Arc<str>]) {
        let names = Names { what: "key label", all: labels.iter().map(AsRef::as_ref).collect(), told: false };
        let rules = root.classify.iter().flatten().filter_map(|rule| rule.when.as_ref());
        for at in rules.filter_map(|when| when.key.as_ref()).flat_map(|list| &list.0) {
            self.known(Some(at), &names);
        }
    }
}

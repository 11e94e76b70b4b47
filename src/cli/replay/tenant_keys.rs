//! `--tenant-keys`: the API keys with which the tenants of a journal send. Keys are in no message.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, bail};
use http::header::{AUTHORIZATION, HeaderValue};

use super::classes::ReplayedClasses;
use crate::cli::service_options::ABSENT_SECRET;
use crate::load::LoadTarget;
use crate::record::journal::HashKey;
use crate::trace::journal_tenant;
use crate::types::TenantId;

/// Beginning of a key that stands in the environment.
const VARIABLE: &str = "env:";

/// Keys by tenant, as `authorization` headers.
#[derive(Default)]
pub struct TenantKeys {
    by_number: HashMap<u64, HeaderValue>,
    /// The key of the first line.
    first: Option<HeaderValue>,
    missing: Cell<u64>,
}

impl TenantKeys {
    /// Reads the file; without one there are no keys.
    ///
    /// # Errors The file cannot be read, a line is wrong, or the settings do not tell the tenants of a journal.
    pub fn of(file: Option<&Path>, classes: &ReplayedClasses) -> anyhow::Result<Self> {
        let Some(file) = file else { return Ok(TenantKeys::default()) };
        let shown = file.display();
        let settings = classes.settings.as_ref().context("--tenant-keys: the tenants are those of -c FILE; give it")?;
        let text = std::fs::read_to_string(file).with_context(|| format!("--tenant-keys: cannot read {shown}"))?;
        let hash = settings.journal.as_ref().and_then(|journal| journal.hash_key.as_ref());
        let hash = hash.context("--tenant-keys: the settings have no telemetry.journal.hash_key_file")?;
        if hash.id() == HashKey::from_secret(ABSENT_SECRET).id() {
            bail!("--tenant-keys: the telemetry.journal.hash_key_file of the settings is not on this machine");
        }
        let mut keys = TenantKeys::default();
        for (line, text) in (1..).zip(text.lines()) {
            if text.trim().is_empty() || text.trim_start().starts_with('#') {
                continue;
            }
            let mut words = text.split_whitespace();
            let (Some(tenant), Some(key), None) = (words.next(), words.next(), words.next()) else {
                bail!("--tenant-keys: {shown}: line {line}: write TENANT KEY, or TENANT env:NAME");
            };
            let tenant = TenantId::from(tenant);
            if !settings.tenants.iter().any(|known| known.id == tenant) {
                bail!("--tenant-keys: {shown}: line {line}: its first word is no tenant of the settings");
            }
            let header = header(key).with_context(|| format!("--tenant-keys: {shown}: line {line}"))?;
            keys.first.get_or_insert_with(|| header.clone());
            keys.by_number.insert(journal_tenant(&hash.tenant(&tenant), &hash.id()), header);
        }
        Ok(keys)
    }

    /// The header of a tenant's requests. Requests of tenants without a key are counted.
    pub fn of_tenant(&self, tenant: Option<u64>) -> Option<HeaderValue> {
        let found = tenant.and_then(|tenant| self.by_number.get(&tenant)).cloned();
        if found.is_none() && self.first.is_some() {
            self.missing.set(self.missing.get() + 1);
        }
        found
    }

    /// Requests of tenants without a key.
    pub fn missing(&self) -> u64 {
        self.missing.get()
    }

    /// The service as it is probed before the replay: with the first key, if it has none of its own.
    pub fn for_probe(&self, target: &LoadTarget) -> LoadTarget {
        let mut target = target.clone();
        if let (Some(first), false) = (&self.first, target.headers.contains_key(AUTHORIZATION)) {
            target.headers.insert(AUTHORIZATION, first.clone());
        }
        target
    }
}

fn header(key: &str) -> anyhow::Result<HeaderValue> {
    let key = match key.strip_prefix(VARIABLE) {
        Some(name) => std::env::var(name).ok().with_context(|| format!("{name} is not set"))?,
        None => key.to_owned(),
    };
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim())).ok().context("the key cannot be sent")?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command_line::parse;
    use crate::cli::replay::ReplayArgs;

    const SETTINGS: &str = "
listen: {address: \"127.0.0.1:0\"}
pools: [{pool: p, engines: [{url: \"http://a:8000\"}]}]
routes: [{model: [\"*\"], pools: [p]}]
slo_classes: [{slo_class: chat, objectives: {ttft_seconds: {threshold: 2, attainment: 0.9}}, joint_attainment_target: 0.9}]
default_class: chat
telemetry: {journal: {path: j.jsonl, hash_key_file: hash.key}}
tenants:
  - {tenant: red, keys: [{blake3: \"60f97a7e57ae8bdb4b0e7dcbbdb3e1ea3bb8b8ce1a6ba2c11ff7ce9dd2f86a01\"}]}
  - {tenant: blue, keys: [{blake3: \"1fb1b7a1b8bf5b4ef9d65b2d35d4dd35d0f0ba4a4dcb8dbb4e3ee1c2a2c5e702\"}]}
";
    const SECRET: &str = "of-sixteen-or-more";

    /// Keys of a file with this text; `has_hash_key`: the hash key is on this machine.
    fn keys(text: &str, has_hash_key: bool) -> anyhow::Result<TenantKeys> {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("goodput.yaml"), SETTINGS).unwrap();
        std::fs::write(path("keys"), text).unwrap();
        if has_hash_key {
            std::fs::write(path("hash.key"), SECRET).unwrap();
        }
        let settings = path("goodput.yaml").display().to_string();
        let line = ["replay", "t.csv", "--url", "http://a", "-c", &settings].map(str::to_owned);
        let args = parse::<ReplayArgs>(line).unwrap();
        TenantKeys::of(Some(&path("keys")), &ReplayedClasses::of(&args).unwrap())
    }

    /// The number that a trace gives a tenant.
    fn number(tenant: &str) -> Option<u64> {
        let key = HashKey::from_secret(SECRET.as_bytes());
        Some(journal_tenant(&key.tenant(&TenantId::from(tenant)), &key.id()))
    }

    #[test]
    fn each_tenant_of_a_journal_sends_its_own_key() {
        let keys = keys("# keys\nred sk-red\n\nblue env:PATH\n", true).unwrap();
        let header = |tenant| keys.of_tenant(tenant).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header(number("red")).as_deref(), Some("Bearer sk-red"));
        assert_eq!(header(number("blue")), Some(format!("Bearer {}", std::env::var("PATH").unwrap())));
        assert_eq!((header(number("green")), header(None)), (None, None));
        assert_eq!(keys.missing(), 2);
        assert!(keys.of_tenant(number("red")).unwrap().is_sensitive());
    }

    #[test]
    fn a_file_that_cannot_be_used_is_told_by_its_line_and_without_its_keys() {
        for (text, expected) in [
            ("red sk-hidden\nblue", "line 2: write TENANT KEY"),
            ("red sk-hidden sk-more", "line 1: write TENANT KEY"),
            ("sk-hidden red", "line 1: its first word is no tenant"),
            ("red env:GOODPUT_NO_SUCH", "line 1: GOODPUT_NO_SUCH is not set"),
            ("red sk-hidden\u{7f}", "line 1: the key cannot be sent"),
        ] {
            let said = format!("{:#}", keys(text, true).err().unwrap());
            assert!(said.contains(expected) && !said.contains("hidden"), "{text:?}: {said}");
        }
        let said = format!("{:#}", keys("red sk-hidden", false).err().unwrap());
        assert!(said.contains("hash_key_file of the settings is not on this machine"), "{said}");
    }
}

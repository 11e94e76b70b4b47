//! Logs, metrics, traces and the journal.

use std::path::Path;
use std::time::Duration;

use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use http::{HeaderName, HeaderValue};

use super::{Checker, shown};
use crate::config::schema::{self, Root};
use crate::config::url::engine_address;
use crate::config::walk::{ConfigBlock, Entries, Located};
use crate::record::journal::HashKey;
use crate::record::settings::{JournalSettings, OtlpSettings, PrometheusSettings};
use crate::record::trace::Sampling;
use crate::route::settings::EngineAddress;

/// A shorter secret could be guessed from a journal.
const SHORTEST_SECRET: usize = 16;

/// Lines that wait longer use memory and are lost in a crash.
const LONGEST_FLUSH: Duration = Duration::from_secs(60);

/// Shortest interval of reads from Prometheus.
const SHORTEST_READ: Duration = Duration::from_secs(1);

/// Path of Prometheus' query endpoint, below its URL.
const QUERY: &str = "/api/v1/query";

/// Path of the collector's trace endpoint, below its URL.
const TRACES: &str = "/v1/traces";

impl Checker<'_> {
    pub(super) fn otlp(&mut self, root: &Root) -> Option<OtlpSettings> {
        let raw: &schema::Otlp = root.telemetry.as_ref()?.otlp.as_ref()?;
        let headers = raw.headers_file.as_ref().map(|at| self.headers(at)).unwrap_or_default();
        let roots = raw.ca_file.as_ref().and_then(|at| self.roots(at));
        let sampling = Sampling {
            ratio: raw.ratio.as_ref().map_or(0.01, |at| self.ratio(at)),
            follow_parent: raw.follow_parent.as_ref().is_none_or(|at| at.value),
        };
        let resource = raw
            .resource
            .as_ref()
            .map(|entries| entries.0.iter().map(|(key, value)| (key.value.clone(), value.value.clone())).collect());
        let address = self.service_address(raw.endpoint.as_ref()?, TRACES, "http://host:4318")?;
        Some(OtlpSettings { address, headers, roots, sampling, resource: resource.unwrap_or_default() })
    }

    pub(super) fn prometheus(&mut self, root: &Root) -> Option<PrometheusSettings> {
        let raw: &schema::PrometheusSource = root.telemetry.as_ref()?.prometheus.as_ref()?;
        let mut headers = raw.headers_file.as_ref().map(|at| self.headers(at)).unwrap_or_default();
        let bearer = raw.token_file.as_ref().and_then(|at| {
            if headers.iter().any(|(name, _)| name == AUTHORIZATION) {
                self.problem(&at.place, "`headers_file` sets authorization, too", "remove one of the two");
            }
            let mut value = HeaderValue::from_str(&format!("Bearer {}", self.secret_file(at)?)).ok()?;
            value.set_sensitive(true);
            Some((AUTHORIZATION, value))
        });
        headers.extend(bearer);
        let roots = raw.ca_file.as_ref().and_then(|at| self.roots(at));
        let every = self.time(raw.every.as_ref(), PrometheusSettings::EVERY);
        if let Some(at) = raw.every.as_ref().filter(|_| every < SHORTEST_READ) {
            self.problem(&at.place, "Prometheus would be asked all the time", "write 1s or more");
        }
        let timeout = self.time(raw.timeout.as_ref(), PrometheusSettings::TIMEOUT);
        let select = raw.select.as_ref().map(|entries| self.label_values(entries)).unwrap_or_default();
        let address = self.service_address(raw.url.as_ref()?, QUERY, "http://host:9090")?;
        Some(PrometheusSettings { address, headers, roots, every, timeout, select })
    }

    /// Labels of Prometheus with their values.
    fn label_values(&mut self, entries: &Entries<Located<String>>) -> Vec<(String, String)> {
        for (name, _) in &entries.0 {
            let begins = name.value.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
            if !begins || !name.value.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                self.problem(
                    &name.place,
                    format!("{} cannot be the name of a label", name.shown()),
                    "use letters, digits and _",
                );
            }
        }
        entries.0.iter().map(|(name, value)| (name.value.clone(), value.value.clone())).collect()
    }

    /// The address of a service beside the gateway. A URL that ends in the path below it is as good.
    fn service_address(&mut self, at: &Located<String>, path: &str, example: &str) -> Option<EngineAddress> {
        let text = at.value.trim_end_matches('/');
        match engine_address(text.strip_suffix(path).unwrap_or(text)) {
            Ok(address) => Some(address),
            Err(bad) => {
                let wrong = match bad.wrong.contains("credentials") {
                    true => "carries credentials; they belong into `headers_file`",
                    false => bad.wrong,
                };
                let what =
                    if at.hidden || bad.wrong.contains("credentials") { "the URL".to_owned() } else { at.shown() };
                self.problem(&at.place, format!("{what} {wrong}"), format!("write {example}"));
                None
            }
        }
    }

    /// A share from 0 to 1.
    fn ratio(&mut self, at: &Located<f64>) -> f64 {
        if !(0.0..=1.0).contains(&at.value) {
            self.problem(&at.place, format!("{} is no share", shown(at)), "write a share from 0 to 1");
        }
        at.value
    }

    /// Headers, one on each line; empty lines and those with `#` in front are passed over.
    fn headers(&mut self, at: &Located<String>) -> Vec<(HeaderName, HeaderValue)> {
        let Some(bytes) = self.file(at) else { return Vec::new() };
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.trim()));
        let mut found = Vec::new();
        for (number, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            let header = line.split_once(':').and_then(|(name, value)| {
                let mut value = HeaderValue::from_str(value.trim()).ok()?;
                value.set_sensitive(true);
                Some((HeaderName::from_bytes(name.trim().as_bytes()).ok()?, value))
            });
            match header {
                Some((name, _)) if [HOST, CONTENT_TYPE, CONTENT_LENGTH].contains(&name) => {
                    let message =
                        format!("line {number} of the file {} sets {name}, which the gateway sets itself", at.shown());
                    self.problem(&at.place, message, "remove the line");
                }
                Some(header) => found.push(header),
                None => {
                    let message = format!("line {number} of the file {} is not a header", at.shown());
                    self.problem(&at.place, message, "write `name: value` on each line");
                }
            }
        }
        found
    }

    pub(super) fn journal(&mut self, root: &Root) -> Option<JournalSettings> {
        let raw: &schema::Journal = root.telemetry.as_ref()?.journal.as_ref()?;
        let path = raw.path.as_ref()?;
        let place = self.surroundings.place(Path::new(&path.value));
        let d = JournalSettings::at(place);
        if d.path.file_name().is_none() || path.value.ends_with('/') {
            self.problem(&path.place, format!("{} is not a file", path.shown()), "write the path of a file");
        }
        let hash_key = raw.hash_key_file.as_ref().and_then(|at| {
            let secret = self.secret_file(at)?;
            if secret.len() < SHORTEST_SECRET {
                let message = format!("the file {} holds a secret of fewer than 16 characters", at.shown());
                self.problem(&at.place, message, "write at least 16 random characters into it");
            }
            Some(HashKey::from_secret(secret.as_bytes()))
        });
        if self.files.iter().chain(&self.papers).any(|file| *file == Path::new(&path.value)) {
            self.problem(&path.place, "is a file that the settings read", "write a file of its own");
        }
        if raw.hash_key_file.is_none() {
            let way_out = "add `hash_key_file` if hashes are to be the same over restarts and gateways";
            self.note(raw.place(), "tenants and prompts are hashed with a random key of this process", way_out);
        }
        let flush = self.time(raw.flush.as_ref(), d.flush);
        if let Some(at) = raw.flush.as_ref().filter(|at| at.value > LONGEST_FLUSH) {
            self.problem(&at.place, "the last lines would be lost with the process", "write 1m or less");
        }
        Some(JournalSettings {
            hash_key,
            max_size: self.size(raw.max_size.as_ref(), d.max_size, 64 << 10, 1 << 40),
            max_age: self.time(raw.max_age.as_ref(), d.max_age),
            keep: self.count(raw.keep.as_ref(), d.keep as u64, 0..=10_000) as usize,
            gzip: raw.gzip.as_ref().map_or(d.gzip, |at| at.value),
            flush,
            path: d.path,
        })
    }
}

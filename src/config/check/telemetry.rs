//! What is written down where.

use std::path::Path;
use std::time::Duration;

use super::Checker;
use crate::config::raw::{self, Root};
use crate::config::read::ConfigBlock;
use crate::record::journal::HashKey;
use crate::record::settings::JournalSettings;

/// A shorter secret could be guessed by whoever has a journal.
const SHORTEST_SECRET: usize = 16;

/// Lines that wait longer are lost with the process, and take memory meanwhile.
const LONGEST_FLUSH: Duration = Duration::from_secs(60);

impl Checker<'_> {
    pub(super) fn journal(&mut self, root: &Root) -> Option<JournalSettings> {
        let raw: &raw::Journal = root.telemetry.as_ref()?.journal.as_ref()?;
        let path = raw.path.as_ref()?;
        let place = self.surroundings.place(Path::new(&path.value));
        let d = JournalSettings::at(place);
        if d.path.file_name().is_none() || path.value.ends_with('/') {
            self.problem(&path.place, format!("{} is no file", path.shown()), "write the path of a file");
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
            self.problem(&path.place, "is a file that the settings read", "write a file that nobody else uses");
        }
        if raw.hash_key_file.is_none() {
            let way_out = "add `hash_key_file` if hashes are to be the same over restarts and gateways";
            self.note(raw.place(), "tenants and prompts are hashed with a key of this process alone", way_out);
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

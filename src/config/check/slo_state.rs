//! The file that keeps the counts of classes over restarts.

use std::path::Path;
use std::time::Duration;

use super::Checker;
use crate::config::schema::Root;
use crate::record::settings::SloStateSettings;

/// More often would only wear the disk out.
const SHORTEST: Duration = Duration::from_secs(1);

impl Checker<'_> {
    pub(super) fn slo_state(&mut self, root: &Root) -> Option<SloStateSettings> {
        let raw = root.telemetry.as_ref()?.slo_state.as_ref()?;
        let every = raw.every.as_ref().map_or(SloStateSettings::EVERY, |at| at.value);
        if let Some(at) = raw.every.as_ref().filter(|_| every < SHORTEST) {
            self.problem(&at.place, "the file would be written all the time", "write 1s or more");
        }
        let path = raw.path.as_ref()?;
        if path.value.trim().is_empty() || path.value.ends_with('/') {
            self.problem(&path.place, format!("{} is not a file", path.shown()), "name a file of this gateway's own");
        }
        Some(SloStateSettings { path: self.surroundings.place(Path::new(&path.value)), every })
    }
}

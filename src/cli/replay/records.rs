//! The file of a replay's records: a line as each request ends.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use anyhow::Context;

use crate::load::LoadRecord;

/// Writes records, if a file is given. After the first failure, which is kept, nothing more is written.
pub struct RecordLines {
    file: Option<BufWriter<File>>,
    failed: Option<io::Error>,
}

impl RecordLines {
    /// Creates the file, if a path is given.
    ///
    /// # Errors The file cannot be created.
    pub fn create(path: Option<&Path>) -> anyhow::Result<Self> {
        let create = |path: &Path| File::create(path).with_context(|| format!("cannot write {}", path.display()));
        let file = path.map(create).transpose()?.map(BufWriter::new);
        Ok(RecordLines { file, failed: None })
    }

    /// Adds a record.
    pub fn push(&mut self, record: &LoadRecord) {
        let Some(file) = self.file.as_mut().filter(|_| self.failed.is_none()) else { return };
        let written = serde_json::to_writer(&mut *file, record).map_err(io::Error::from);
        self.failed = written.and_then(|()| file.write_all(b"\n")).err();
    }

    /// Writes the rest.
    ///
    /// # Errors The first failure, such as a full disk.
    pub fn finish(mut self) -> anyhow::Result<()> {
        let flushed = self.file.as_mut().map_or(Ok(()), Write::flush);
        self.failed.map_or(flushed, Err).context("cannot write the records")
    }
}

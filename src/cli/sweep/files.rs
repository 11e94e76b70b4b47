//! Output folder of a sweep: records as they come, the summary after every point, the report at the end.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Serialize;

use crate::load::LoadRecord;
use crate::load::measure::FinishedRun;
use crate::load::report::{figures, html};
use crate::load::summary::SweepSummary;
use crate::load::sweep::NextRun;

/// Name of the summary file.
pub const SUMMARY: &str = "summary.json";

/// Prefix of a record in both files.
#[derive(Serialize)]
struct RowHead<'a> {
    cache: &'a str,
    rate: f64,
    repetition: u32,
    stretch: &'a str,
}

#[derive(Serialize)]
struct JsonRow<'a> {
    #[serde(flatten)]
    head: RowHead<'a>,
    #[serde(flatten)]
    record: &'a LoadRecord,
}

/// Files of a running sweep.
pub struct SweepFiles {
    folder: PathBuf,
    lines: BufWriter<File>,
    table: csv::Writer<File>,
}

impl SweepFiles {
    /// Creates the folder. An existing one must not contain a sweep.
    ///
    /// # Errors The folder cannot be created or written, or contains a sweep.
    pub fn create(folder: &Path) -> anyhow::Result<Self> {
        let shown = folder.display();
        if folder.join(SUMMARY).exists() {
            bail!("{shown} already contains a sweep; give another --out");
        }
        fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {shown}"))?;
        let create = |name: &str| {
            let path = folder.join(name);
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))
        };
        let lines = BufWriter::new(create("records.jsonl")?);
        let table = csv::Writer::from_writer(create("records.csv")?);
        Ok(SweepFiles { folder: folder.to_owned(), lines, table })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Appends the records of a run.
    ///
    /// # Errors A failed write, such as a full disk.
    pub fn records(&mut self, next: NextRun, measured: &FinishedRun) -> anyhow::Result<()> {
        for (stretch, record) in &measured.records {
            let (cache, rate, repetition) = (next.cache.as_str(), next.rate, next.repetition);
            let head = || RowHead { cache, rate, repetition, stretch: stretch.as_str() };
            serde_json::to_writer(&mut self.lines, &JsonRow { head: head(), record })?;
            self.lines.write_all(b"\n")?;
            self.table.serialize((head(), record))?;
        }
        self.lines.flush().and_then(|()| self.table.flush()).context("cannot write the records")
    }

    /// Replaces the summary.
    ///
    /// # Errors A failed write.
    pub fn summary(&self, summary: &SweepSummary) -> anyhow::Result<()> {
        let mut text = serde_json::to_vec_pretty(summary)?;
        text.push(b'\n');
        // Written beside its place first, so that a killed sweep keeps the previous summary.
        let beside = self.folder.join(".summary.json.new");
        fs::write(&beside, text)
            .and_then(|()| fs::rename(&beside, self.folder.join(SUMMARY)))
            .with_context(|| format!("cannot write {}", self.folder.join(SUMMARY).display()))
    }

    /// Writes the report and its chart.
    ///
    /// # Errors A failed write.
    pub fn report(&self, summary: &SweepSummary) -> anyhow::Result<()> {
        let write = |name: &str, text: String| {
            let path = self.folder.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        write("report.html", html(std::slice::from_ref(summary)))?;
        figures(std::slice::from_ref(summary))
            .into_iter()
            .try_for_each(|figure| write(&format!("{}.svg", figure.name), figure.svg))
    }
}

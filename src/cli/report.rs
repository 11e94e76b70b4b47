//! `goodput report`: compares sweeps.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};

use super::print;
use crate::load::report::{Comparison, compare, html};
use crate::load::summary::{FORMAT, SweepSummary};

/// Compares sweeps, and writes a report of them.
#[derive(Clone, Debug, clap::Args)]
pub struct ReportArgs {
    /// Sweeps: their folders, or their summary.json. The others are compared with the first.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Path of the report.
    #[arg(long, default_value = "goodput-report.html", value_name = "FILE")]
    out: PathBuf,
    /// Print the comparison as JSON.
    #[arg(long)]
    json: bool,
}

impl ReportArgs {
    /// Compares; 1 if the workloads differ.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        match self.report() {
            Ok((text, code)) => print::last(text.trim_end(), code),
            Err(error) => {
                eprintln!("goodput report: {error:#}");
                ExitCode::from(2)
            }
        }
    }

    fn report(&self) -> anyhow::Result<(String, ExitCode)> {
        let sweeps = self.runs.iter().map(|run| summary(run)).collect::<anyhow::Result<Vec<_>>>()?;
        let comparisons = compare(&sweeps);
        let write = std::fs::write(&self.out, html(&sweeps));
        write.with_context(|| format!("cannot write {}", self.out.display()))?;
        let is_alike = comparisons.iter().all(|one| one.different_workloads.is_empty());
        let code = if is_alike { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        let text = if self.json {
            serde_json::to_string_pretty(&comparisons)?
        } else {
            format!("{}the report is in {}", words(&self.runs, &sweeps, &comparisons), self.out.display())
        };
        Ok((text, code))
    }
}

/// Reads the summary of a run, by its folder or its file.
///
/// # Errors The file cannot be read, or is not a summary.
fn summary(run: &Path) -> anyhow::Result<SweepSummary> {
    let file = if run.is_dir() { run.join("summary.json") } else { run.to_owned() };
    let shown = file.display();
    let text = std::fs::read(&file).with_context(|| format!("cannot read {shown}; name the folder of a sweep"))?;
    let value: serde_json::Value = serde_json::from_slice(&text).with_context(|| format!("{shown} is not JSON"))?;
    if value["format"] != FORMAT {
        bail!("{shown} is not the summary of a sweep in the format {FORMAT}");
    }
    serde_json::from_value(value).with_context(|| format!("{shown} is incomplete"))
}

fn words(runs: &[PathBuf], sweeps: &[SweepSummary], comparisons: &[Comparison]) -> String {
    let mut text = String::new();
    for (run, sweep) in runs.iter().zip(sweeps) {
        text.push_str(&format!("{}: {}\n", run.display(), sweep.target.model));
        for result in &sweep.results {
            let number = result.goodput.requests_per_second;
            let number = number.map_or_else(|| "no number".to_owned(), |rate| format!("{rate:.2} requests/s"));
            text.push_str(&format!("  {} caches: {number} ({})\n", result.cache.as_str(), result.goodput.explanation));
        }
    }
    for one in comparisons {
        text.push_str(&format!("\n{} against {}\n", runs[one.run].display(), runs[0].display()));
        if !one.different_workloads.is_empty() {
            let what = one.different_workloads.join(", ");
            text.push_str(&format!("  the workloads differ, so figures cannot be compared: {what}\n"));
        }
        one.remarks.iter().for_each(|remark| text.push_str(&format!("  {remark}\n")));
        one.goodput.iter().for_each(|change| text.push_str(&format!("  {} caches: {}\n", change.cache, change.text)));
        for change in one.rates.iter().filter(|change| change.significant) {
            text.push_str(&format!(
                "  {} caches, {:.2} requests/s, {}: attainment {:+.1} points, p = {:.3}\n",
                change.cache,
                change.rate,
                change.class,
                change.difference.difference * 100.0,
                change.adjusted_p_value
            ));
        }
    }
    text
}

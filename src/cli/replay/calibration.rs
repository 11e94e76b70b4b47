//! `--calibrate`: a sweep's records to the properties of a simulated engine.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::load::LoadRecord;
use crate::load::monitor::RunVerdict;
use crate::load::summary::{FORMAT, SweepSummary};
use crate::load::workload::CacheState;
use crate::sim::engine::EngineSpec;
use crate::sim::fleet::{EngineFit, Machine, MeasuredRequest, MeasuredRun, fit_engine};

/// A line of `records.jsonl`.
#[derive(Deserialize)]
struct SweptRecord {
    cache: String,
    rate: f64,
    repetition: u32,
    #[serde(flatten)]
    record: LoadRecord,
}

/// Result of a fit.
pub struct FittedEngine {
    /// Properties of the engine.
    pub machine: Machine,
    fit: EngineFit,
    sweep: String,
}

/// Fits an engine to the sweep in a folder, and writes its properties if requested.
///
/// # Errors The folder contains no sweep, or one with too few results.
pub fn calibrate(folder: &Path, out: Option<&Path>) -> anyhow::Result<FittedEngine> {
    let shown = folder.display();
    let summary = folder.join("summary.json");
    let text = std::fs::read(&summary)
        .with_context(|| format!("--calibrate: cannot read {}; name the folder of a sweep", summary.display()))?;
    let summary: SweepSummary =
        serde_json::from_slice(&text).with_context(|| format!("--calibrate: {shown} holds no sweep"))?;
    if summary.format != FORMAT {
        bail!("--calibrate: {shown} holds no sweep in the format {FORMAT}");
    }
    let cold = summary.results.iter().find(|result| result.cache == CacheState::Cold);
    let result = cold.or(summary.results.first()).with_context(|| format!("--calibrate: {shown} has no result"))?;
    let can_be_believed =
        |verdict: RunVerdict| matches!(verdict, RunVerdict::Clears | RunVerdict::Fails | RunVerdict::Unsteady);
    let rates: Vec<f64> =
        result.points.iter().filter(|point| can_be_believed(point.verdict)).map(|point| point.rate).collect();
    let runs = measured(&folder.join("records.jsonl"), result.cache.as_str(), &rates)?;
    let defaults = EngineSpec::default();
    let base = Machine {
        max_running: defaults.max_running,
        step_tokens: defaults.step_tokens,
        kv_tokens: defaults.kv_tokens,
        max_model_len: defaults.max_model_len,
        step: None,
    };
    let fit =
        fit_engine(&runs, summary.fleet.replicas as usize, &base).with_context(|| format!("--calibrate: {shown}"))?;
    if let Some(out) = out {
        let text = serde_json::to_string_pretty(&fit.machine)? + "\n";
        std::fs::write(out, text).with_context(|| format!("cannot write {}", out.display()))?;
    }
    Ok(FittedEngine { machine: fit.machine, fit, sweep: shown.to_string() })
}

/// The first repetition at each of these rates.
fn measured(file: &Path, cache: &str, rates: &[f64]) -> anyhow::Result<Vec<MeasuredRun>> {
    let shown = file.display();
    let opened = File::open(file).with_context(|| format!("--calibrate: cannot read {shown}"))?;
    let mut runs: BTreeMap<u64, MeasuredRun> = BTreeMap::new();
    for (number, line) in (1..).zip(BufReader::new(opened).lines()) {
        let line = line.with_context(|| format!("--calibrate: cannot read {shown}"))?;
        let swept: SweptRecord = serde_json::from_str(&line)
            .with_context(|| format!("--calibrate: {shown}: line {number} is no record of a sweep"))?;
        let SweptRecord { record, rate, .. } = swept;
        if swept.cache != cache || swept.repetition != 1 || !rates.contains(&rate) {
            continue;
        }
        let planned = record.input_tokens.or(record.planned_input_tokens).unwrap_or(1);
        let run = runs.entry(rate.to_bits()).or_insert_with(|| MeasuredRun { rate, requests: Vec::new() });
        run.requests.push(MeasuredRequest {
            at: Duration::try_from_secs_f64(record.scheduled_seconds).unwrap_or_default(),
            input: planned.saturating_sub(record.cached_tokens.unwrap_or(0)).max(1),
            output: if record.e2e_seconds.is_some() { record.output_tokens } else { record.output_cap.unwrap_or(1) },
            ttft: record.ttft_seconds,
            tpot: record.tpot_seconds,
            e2e: record.e2e_seconds,
        });
    }
    let mut runs: Vec<MeasuredRun> = runs.into_values().collect();
    runs.iter_mut().for_each(|run| run.requests.sort_by_key(|request| request.at));
    Ok(runs)
}

impl FittedEngine {
    /// The model and its errors, as JSON.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(&self.fit).unwrap_or_default()
    }

    /// The same as text.
    pub fn text(&self) -> String {
        let Machine { max_running, step, .. } = self.machine;
        let mut text = format!("an engine like that of {}: a batch of {max_running}", self.sweep);
        if let Some(step) = step {
            let _ = write!(
                text,
                ", a step of {:.3} ms, {:.4} ms per request, {:.5} ms per prompt token, {:.7} ms per token of context",
                step.base_ms, step.per_request_ms, step.per_prefill_token_ms, step.per_context_token_ms
            );
        }
        text.push_str("\n\n    rate  requests            off by  measured and simulated, ms\n");
        for run in &self.fit.runs {
            let kind = if run.is_fitted { "fitted" } else { "held out" };
            let pairs: Vec<String> = run
                .percentiles
                .iter()
                .map(|one| format!("{} {:.1} {:.1}", one.name, one.measured * 1e3, one.simulated * 1e3))
                .collect();
            let _ = writeln!(
                text,
                "{:>8.2} {:>9}  {kind:<8} {:>7.1} %  {}",
                run.rate,
                run.requests,
                run.error * 100.0,
                pairs.join(", ")
            );
        }
        let _ = writeln!(
            text,
            "\nmean error: {:.1} % at rates that were fitted, {:.1} % at rates that were held out",
            self.fit.fitted_error * 100.0,
            self.fit.held_out_error * 100.0
        );
        text
    }
}

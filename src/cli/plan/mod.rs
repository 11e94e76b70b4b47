//! `goodput plan`: replicas and cost for a forecast.
//!
//! Exit codes: 0 the current fleet suffices, or was not given; 1 it is too small; 2 the input cannot be read,
//! or a number is missing or invalid.

mod input;
mod page;
mod sweep;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use serde_json::json;

use self::input::{InputBuilder, RawCache, RawClass, RawLaw, RawLength, RawPlan, RawPrefill};
use super::print;
use crate::capacity::kv::KvPrecision;
use crate::capacity::{CapacityPlan, InputProblem, plan};
use crate::config::watch::SettingsFile;

/// Sizes a fleet from measured goodput: replicas, memory, cost and what-if.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// Plan file (YAML, see docs/capacity.md); flags take precedence.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Summary of a sweep: goodput, target, lengths and mean times.
    #[arg(long, value_name = "FILE")]
    sweep: Option<PathBuf>,
    /// The gateway's settings: target and assumed lengths of the class.
    #[arg(short, long, value_name = "FILE", requires = "class")]
    config: Option<PathBuf>,
    /// Class to plan for.
    #[arg(long, value_name = "NAME")]
    class: Option<String>,
    /// Requests per second in the busiest five minutes.
    #[arg(long, value_name = "RATE")]
    peak: Option<f64>,
    /// Mean requests per second over the day, for the cost per request.
    #[arg(long, value_name = "RATE")]
    mean_rate: Option<f64>,
    /// Prompt tokens: a mean (1200) or percentiles (p50=900,p95=6000).
    #[arg(long, value_name = "LENGTH", value_parser = RawLength::parse)]
    input_tokens: Option<RawLength>,
    /// Output tokens, in the same format.
    #[arg(long, value_name = "LENGTH", value_parser = RawLength::parse)]
    output_tokens: Option<RawLength>,
    /// Mean time to first token at the planned rate.
    #[arg(long, value_name = "SECONDS")]
    ttft_seconds: Option<f64>,
    /// Mean time per output token at the planned rate.
    #[arg(long, value_name = "SECONDS")]
    tpot_seconds: Option<f64>,
    /// Highest rate of one replica that keeps the target, as a sweep found it.
    #[arg(long, value_name = "RATE")]
    goodput: Option<f64>,
    /// Joint attainment that is promised, such as 0.92.
    #[arg(long, value_name = "SHARE")]
    target: Option<f64>,
    /// Share of its goodput that a replica is planned for [default: 0.7].
    #[arg(long, value_name = "SHARE")]
    headroom: Option<f64>,
    /// Replicas that may fail or drain at the peak, the k of N+k [default: 1].
    #[arg(long, value_name = "COUNT")]
    spare: Option<u32>,
    /// Squared coefficient of variation of the gaps between arrivals; 1 is Poisson [default: 1].
    #[arg(long, value_name = "FACTOR")]
    burst: Option<f64>,
    /// Replicas there are today.
    #[arg(long, value_name = "COUNT")]
    current_replicas: Option<u32>,
    /// Price of one GPU for one hour.
    #[arg(long, value_name = "AMOUNT")]
    gpu_hour: Option<f64>,
    /// Unit of the price [default: USD].
    #[arg(long, value_name = "NAME")]
    currency: Option<String>,
    /// GPUs of one replica [default: 1].
    #[arg(long, value_name = "COUNT")]
    gpus_per_replica: Option<u32>,
    /// GPUs over which each layer is split [default: all of the replica].
    #[arg(long, value_name = "COUNT")]
    tensor_parallel: Option<u32>,
    /// Requests that one replica may run at one time (max_num_seqs) [default: what it runs at its knee].
    #[arg(long, value_name = "COUNT")]
    slots_per_replica: Option<u32>,
    /// The model's config.json, for the memory of a token.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Precision of the cache: bf16, fp16, fp8, fp32 [default: the model's].
    #[arg(long, value_name = "NAME", value_parser = precision)]
    kv_precision: Option<KvPrecision>,
    /// Memory of a token, where there is no config.json.
    #[arg(long, value_name = "BYTES")]
    kv_bytes_per_token: Option<f64>,
    /// Tokens that the cache of one replica has room for, as the engine logs it.
    #[arg(long, value_name = "TOKENS")]
    kv_tokens_per_replica: Option<f64>,
    /// Memory of one GPU, where the room is to be computed.
    #[arg(long, value_name = "GIB")]
    gpu_memory_gib: Option<f64>,
    /// Share of it that the engine takes [default: 0.9].
    #[arg(long, value_name = "SHARE")]
    memory_utilization: Option<f64>,
    /// Weights of one replica, all its GPUs together.
    #[arg(long, value_name = "GIB")]
    weights_gib: Option<f64>,
    /// Time of one device for the mean prompt: shows the prefill stage as a queue.
    #[arg(long, value_name = "SECONDS")]
    prefill_seconds: Option<f64>,
    /// Requests per second at one prefill instance [default: the planned rate of a replica].
    #[arg(long, value_name = "RATE", requires = "prefill_seconds")]
    prefill_rate: Option<f64>,
    /// Devices of a split prefill instance [default: 2].
    #[arg(long, value_name = "COUNT", requires = "prefill_seconds")]
    prefill_ways: Option<u32>,
    /// How many times as fast they are with layers split [default: 1.6].
    #[arg(long, value_name = "FACTOR", requires = "prefill_seconds")]
    prefill_speed_up: Option<f64>,
    /// Share of prompt tokens that came from the prefix cache in the sweep.
    #[arg(long, value_name = "SHARE", requires = "cache_hit_rate_p10")]
    cache_hit_rate: Option<f64>,
    /// 10th percentile of that share over the day.
    #[arg(long, value_name = "SHARE", requires = "cache_hit_rate")]
    cache_hit_rate_p10: Option<f64>,
    /// Share of the engine's time that prompts take [default: all of it, a bound].
    #[arg(long, value_name = "SHARE", requires = "cache_hit_rate")]
    prefill_share: Option<f64>,
    /// Write the page as Markdown.
    #[arg(long, conflicts_with_all = ["json", "rules"])]
    markdown: bool,
    /// Write the conditions that ask for a new sweep as alerting rules for Prometheus.
    #[arg(long, conflicts_with = "json")]
    rules: bool,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
}

fn precision(text: &str) -> Result<KvPrecision, String> {
    serde_json::from_value(text.into()).map_err(|_| "write bf16, fp16, fp8 or fp32".to_owned())
}

/// Why there is no plan.
#[derive(Debug)]
enum NoPlan {
    Unreadable(anyhow::Error),
    Problems(Vec<InputProblem>),
}

impl PlanArgs {
    /// Plans, and prints the page.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        match self.plan() {
            Ok(plan) => {
                let code = if plan.is_short() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
                print::last(self.told(&plan).trim_end_matches('\n'), code)
            }
            Err(problem) => self.refuse(&problem),
        }
    }

    fn told(&self, plan: &CapacityPlan) -> String {
        if self.json {
            let mut whole = serde_json::to_value(plan).expect("numbers and strings");
            whole["short"] = plan.is_short().into();
            return whole.to_string();
        }
        match (self.rules, self.markdown) {
            (true, _) => page::rules(plan),
            (false, true) => page::page(plan).markdown(),
            (false, false) => page::page(plan).plain(),
        }
    }

    fn refuse(&self, problem: &NoPlan) -> ExitCode {
        let problems = match problem {
            NoPlan::Unreadable(error) => vec![format!("{error:#}")],
            NoPlan::Problems(problems) => problems.iter().map(ToString::to_string).collect(),
        };
        if self.json {
            return print::last(&json!({ "problems": problems }).to_string(), ExitCode::from(2));
        }
        let mut text = String::new();
        for problem in problems {
            writeln!(text, "goodput plan: {problem}").expect("a String takes everything");
        }
        eprint!("{text}");
        ExitCode::from(2)
    }

    fn plan(&self) -> Result<CapacityPlan, NoPlan> {
        let raw = self.raw().map_err(NoPlan::Unreadable)?;
        let config = raw.model.as_deref().map(read).transpose().map_err(NoPlan::Unreadable)?;
        let mut builder = InputBuilder::default();
        let inputs = builder.inputs(&raw, config.as_deref());
        match plan(&inputs) {
            Ok(plan) if builder.problems.is_empty() => Ok(plan),
            Ok(_) => Err(NoPlan::Problems(builder.problems)),
            Err(further) => {
                let mut problems = builder.problems;
                for problem in further {
                    // A missing value is also an invalid one: one line is enough.
                    if problems.iter().all(|other| other.place != problem.place) {
                        problems.push(problem);
                    }
                }
                Err(NoPlan::Problems(problems))
            }
        }
    }

    /// Merges file, settings, sweep and flags.
    fn raw(&self) -> anyhow::Result<RawPlan> {
        let mut raw: RawPlan = match &self.file {
            Some(file) => {
                let text = read(file)?;
                let mut raw: RawPlan = serde_yaml::from_str(&text).with_context(|| file.display().to_string())?;
                // Paths are relative to the file that names them.
                raw.model = raw.model.map(|model| file.parent().unwrap_or(Path::new("")).join(model));
                raw
            }
            None => RawPlan::default(),
        };
        if raw.classes.is_empty() {
            raw.classes.push(RawClass::default());
        }
        self.override_replica(&mut raw);
        let wanted = self.class.as_deref();
        let number = match (wanted, raw.classes.len()) {
            (Some(name), 1) if raw.classes[0].class.as_deref().is_none_or(|own| own == name) => Some(0),
            (Some(name), _) => {
                let found = raw.classes.iter().position(|class| class.class.as_deref() == Some(name));
                Some(found.with_context(|| format!("the plan has no class {name}"))?)
            }
            (None, 1) => Some(0),
            (None, _) => None,
        };
        match number {
            Some(number) => self.override_class(&mut raw.classes[number])?,
            None => anyhow::ensure!(
                !self.says_something_of_a_class(),
                "the plan has several classes; say which one the flags are for (--class)"
            ),
        }
        Ok(raw)
    }

    fn override_replica(&self, raw: &mut RawPlan) {
        fn set<T: Clone>(place: &mut Option<T>, flag: &Option<T>) {
            if flag.is_some() {
                place.clone_from(flag);
            }
        }
        set(&mut raw.headroom, &self.headroom);
        set(&mut raw.spare, &self.spare);
        set(&mut raw.burst, &self.burst);
        set(&mut raw.current_replicas, &self.current_replicas);
        set(&mut raw.gpu_hour, &self.gpu_hour);
        set(&mut raw.currency, &self.currency);
        set(&mut raw.gpus_per_replica, &self.gpus_per_replica);
        set(&mut raw.tensor_parallel, &self.tensor_parallel);
        set(&mut raw.slots_per_replica, &self.slots_per_replica);
        set(&mut raw.model, &self.model);
        set(&mut raw.kv_precision, &self.kv_precision);
        set(&mut raw.kv_bytes_per_token, &self.kv_bytes_per_token);
        set(&mut raw.kv_tokens_per_replica, &self.kv_tokens_per_replica);
        set(&mut raw.gpu_memory_gib, &self.gpu_memory_gib);
        set(&mut raw.memory_utilization, &self.memory_utilization);
        set(&mut raw.weights_gib, &self.weights_gib);
    }

    fn says_something_of_a_class(&self) -> bool {
        let numbers = [
            self.peak,
            self.mean_rate,
            self.ttft_seconds,
            self.tpot_seconds,
            self.goodput,
            self.target,
            self.prefill_seconds,
            self.cache_hit_rate,
        ];
        let lengths = [self.input_tokens, self.output_tokens];
        self.sweep.is_some() || numbers.iter().any(Option::is_some) || lengths.iter().any(Option::is_some)
    }

    fn override_class(&self, class: &mut RawClass) -> anyhow::Result<()> {
        if class.class.is_none() {
            class.class.clone_from(&self.class);
        }
        class.peak_rate = self.peak.or(class.peak_rate);
        class.mean_rate = self.mean_rate.or(class.mean_rate);
        class.input_tokens = self.input_tokens.or(class.input_tokens);
        class.output_tokens = self.output_tokens.or(class.output_tokens);
        class.ttft_seconds = self.ttft_seconds.or(class.ttft_seconds);
        class.tpot_seconds = self.tpot_seconds.or(class.tpot_seconds);
        class.goodput = self.goodput.or(class.goodput);
        class.target = self.target.or(class.target);
        if self.prefill_seconds.is_some() {
            class.prefill = Some(RawPrefill {
                seconds: self.prefill_seconds,
                rate: self.prefill_rate,
                ways: self.prefill_ways,
                speed_up: self.prefill_speed_up,
            });
        }
        if self.cache_hit_rate.is_some() {
            class.cache = Some(RawCache {
                hit_rate: self.cache_hit_rate,
                hit_rate_p10: self.cache_hit_rate_p10,
                prefill_share: self.prefill_share,
            });
        }
        if let Some(file) = &self.sweep {
            let filled = sweep::fill(class, &read(file)?);
            filled.map_err(|error| anyhow::anyhow!("{}: {error}", file.display()))?;
        }
        if let Some(file) = &self.config {
            fill_from_settings(class, file)?;
        }
        Ok(())
    }
}

/// Fills in a class's objectives and assumed lengths from the gateway's settings.
fn fill_from_settings(class: &mut RawClass, file: &Path) -> anyhow::Result<()> {
    let settings = SettingsFile::file(file).read();
    let settings = settings.map_err(|error| anyhow::anyhow!(error.lines(file).join("\n")))?;
    let name = class.class.clone().unwrap_or_default();
    let found = settings.classes.iter().find(|settings| settings.id.as_str() == name);
    let objectives = &found.with_context(|| format!("{} has no class {name}", file.display()))?.objectives;
    class.target = class.target.or(Some(objectives.joint_target));
    let law = |quantiles: crate::judge::Quantiles| {
        let number = |tokens: crate::types::Tokens| Some(tokens.0 as f64);
        RawLength::Law(RawLaw { mean: None, p50: number(quantiles.p50), p95: number(quantiles.p95) })
    };
    let assumed = objectives.assumed.unwrap_or_default();
    class.input_tokens = class.input_tokens.or(assumed.input_tokens.map(law));
    class.output_tokens = class.output_tokens.or(assumed.output_tokens.map(law));
    Ok(())
}

fn read(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

#[cfg(test)]
mod tests;

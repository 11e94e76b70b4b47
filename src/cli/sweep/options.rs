//! Command line options of a sweep, and the plan built from them.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::inputs;
use crate::cli::numbers;
use crate::cli::service_options::{EndpointArgs, ONLY_CLASS, PromiseArgs};
use crate::config::Settings;
use crate::load::lengths::{LengthModel, TokenLengths};
use crate::load::monitor::RunRule;
use crate::load::prompts::PromptCalibration;
use crate::load::search::SearchSettings;
use crate::load::sweep::RatePlan;
use crate::load::workload::{CacheState, Workload, WorkloadClass};
use crate::load::{LoadClass, LoadTarget};
use crate::types::ClassId;

/// Finds the highest request rate at which a service meets its objectives.
#[derive(Clone, Debug, clap::Args)]
pub struct SweepArgs {
    /// Base URL of the service: a gateway, an engine, any server with the OpenAI API.
    pub url: String,
    /// What is promised.
    #[command(flatten)]
    pub promise: PromiseArgs,
    /// Class of the settings file, with its weight in the mix; may be repeated.
    #[arg(long = "class", value_name = "NAME[=WEIGHT]", requires = "config", help_heading = "What is promised")]
    pub classes: Vec<String>,
    /// Prompt tokens: 512, P50:P95, or @FILE with one length a line; by default the class's workload_assumption.
    #[arg(long, value_name = "LENGTHS", help_heading = "What is asked")]
    pub input: Option<String>,
    /// Output tokens, in the same format.
    #[arg(long, value_name = "LENGTHS", help_heading = "What is asked")]
    pub output: Option<String>,
    /// Correlation of prompt and output lengths, -1 to 1.
    #[arg(
        long,
        value_name = "R",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "What is asked"
    )]
    pub correlation: f64,
    /// Pairs of prompt and output tokens, INPUT,OUTPUT on each line, instead of distributions.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input", "output", "correlation"], help_heading = "What is asked")]
    pub lengths: Option<PathBuf>,
    /// Arrivals: poisson, constant, gamma:BURSTINESS (1 is poisson, less is burstier), trace:FILE.
    #[arg(long, default_value = "poisson", help_heading = "What is asked")]
    pub arrivals: String,
    /// State of prefix caches: cold (distinct prompts), warm (with --hit-share), or both.
    #[arg(long, default_value = "cold", value_parser = ["cold", "warm", "both"], help_heading = "What is asked")]
    pub cache: String,
    /// Share of each prompt that it shares with others, for warm caches.
    #[arg(long, value_name = "SHARE", value_parser = numbers::within::<1, 999>, help_heading = "What is asked")]
    pub hit_share: Option<f64>,
    /// Groups of prompts with a common prefix, for warm caches.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = numbers::count, help_heading = "What is asked")]
    pub prefix_groups: usize,
    /// Header that carries the name of the request's class.
    #[arg(long, value_name = "NAME", help_heading = "What is asked")]
    pub class_header: Option<String>,

    /// First rate, in requests per second.
    #[arg(long, value_name = "RATE", default_value_t = 1.0, value_parser = numbers::within::<1, 100_000_000>, help_heading = "How it is measured")]
    pub start: f64,
    /// Lowest rate to try.
    #[arg(long, value_name = "RATE", default_value_t = 0.01, value_parser = numbers::within::<1, 100_000_000>, help_heading = "How it is measured")]
    pub min_rate: f64,
    /// Highest rate to try.
    #[arg(long, value_name = "RATE", default_value_t = 10_000.0, value_parser = numbers::within::<1, 100_000_000>, help_heading = "How it is measured")]
    pub max_rate: f64,
    /// Factor between the rates of the ramp.
    #[arg(long, default_value_t = 2.0, value_parser = numbers::within::<1_050, 10_000>, help_heading = "How it is measured")]
    pub growth: f64,
    /// Precision: the search ends when the failing rate is at most this share above the clearing one.
    #[arg(long, value_name = "SHARE", default_value_t = 0.03, value_parser = numbers::within::<5, 500>, help_heading = "How it is measured")]
    pub tolerance: f64,
    /// Measure these rates instead of searching: 1,2,4,8.
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = numbers::within::<1, 100_000_000>, help_heading = "How it is measured")]
    pub rates: Vec<f64>,
    /// Runs at each rate; results of fewer than 3 are not published.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100), help_heading = "How it is measured")]
    pub repetitions: u32,
    /// Standard error of the attainment at a rate, over its repetitions.
    #[arg(long, value_name = "SHARE", default_value_t = 0.01, value_parser = numbers::within::<1, 200>, help_heading = "How it is measured")]
    pub standard_error: f64,
    /// Requests before the first evaluation of a run.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = numbers::count, help_heading = "How it is measured")]
    pub first_look: usize,
    /// Shortest warm-up of a run, not counted.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = numbers::within::<100, 3_600_000>, help_heading = "How it is measured")]
    pub warm_up: f64,
    /// Shortest counted period of a run.
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0, value_parser = numbers::within::<100, 86_400_000>, help_heading = "How it is measured")]
    pub min_seconds: f64,
    /// Longest warm-up and counted period of a run together.
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = numbers::within::<1_000, 86_400_000>, help_heading = "How it is measured")]
    pub max_seconds: f64,
    /// Longest drain after a run [default: the classes' time limits].
    #[arg(long, value_name = "SECONDS", value_parser = numbers::within::<100, 86_400_000>, help_heading = "How it is measured")]
    pub drain: Option<f64>,
    /// Seed of arrivals and lengths.
    #[arg(long, default_value_t = 1, help_heading = "How it is measured")]
    pub seed: u64,

    /// Replicas behind the URL.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = "What stands behind it")]
    pub replicas: u32,
    /// GPUs per replica.
    #[arg(long, value_name = "N", default_value_t = 1.0, value_parser = numbers::within::<10, 10_000_000>, help_heading = "What stands behind it")]
    pub gpus_per_replica: f64,
    /// What is sent, and how.
    #[command(flatten)]
    pub endpoint: EndpointArgs,

    /// Folder for records, summary and report [default: goodput-sweep-TIME].
    #[arg(long, value_name = "FOLDER", help_heading = "What is written")]
    pub out: Option<PathBuf>,
    /// Description for the summary and the report: engine, version, GPU, flags.
    #[arg(long, value_name = "TEXT", help_heading = "What is written")]
    pub note: Option<String>,
    /// Print the summary as JSON.
    #[arg(long, help_heading = "What is written")]
    pub json: bool,
}

impl SweepArgs {
    /// The service to load.
    ///
    /// # Errors The URL, a header, the key or the certificates are invalid.
    pub fn target(&self) -> anyhow::Result<LoadTarget> {
        self.endpoint.target(&self.url)
    }

    /// The workload, as far as it is known before the service is probed.
    ///
    /// # Errors A part is missing or invalid.
    pub fn workload(&self) -> anyhow::Result<Workload> {
        let asks = &self.endpoint;
        let endpoint = asks.endpoint()?;
        let classes = self.workload_classes()?;
        let workload = Workload {
            model: asks.model.clone().unwrap_or_default(),
            endpoint,
            stream: !asks.no_stream && endpoint.dialect().generates(),
            classes,
            arrivals: inputs::arrivals(&self.arrivals)?,
            ignore_eos: !asks.respect_eos,
            max_context: asks.max_context.map(|tokens| tokens as u64),
            extra: asks.extra()?,
            calibration: PromptCalibration::default(),
        };
        for class in &workload.classes {
            let judges = workload.stream || class.load.objectives.judges_non_streaming();
            if !judges {
                bail!(
                    "class {} does not judge non-streaming responses; give it an E2E objective, or stream",
                    class.load.id
                );
            }
        }
        Ok(workload)
    }

    fn workload_classes(&self) -> anyhow::Result<Vec<WorkloadClass>> {
        let known = self.promised()?;
        let mut classes = Vec::new();
        for (load, weight) in known {
            let lengths = self.lengths_of(&load)?;
            let mut load = load;
            if let Some(name) = &self.class_header {
                let name: HeaderName =
                    name.parse().with_context(|| format!("--class-header: {name:?} is not a header name"))?;
                load.headers.insert(name, HeaderValue::from_str(load.id.as_str())?);
            }
            classes.push(WorkloadClass { load, weight, lengths });
        }
        Ok(classes)
    }

    /// Classes with their weights.
    fn promised(&self) -> anyhow::Result<Vec<(LoadClass, f64)>> {
        if let (Some(file), Some(settings)) = (&self.promise.config, self.promise.settings()?) {
            return self.of_settings(file, &settings);
        }
        let (objectives, timeouts) = (self.promise.objectives()?, self.promise.timeouts());
        let id = ClassId::from(self.promise.preset.as_deref().unwrap_or(ONLY_CLASS));
        Ok(vec![(LoadClass { id, objectives, timeouts, headers: HeaderMap::new() }, 1.0)])
    }

    fn of_settings(&self, file: &Path, settings: &Settings) -> anyhow::Result<Vec<(LoadClass, f64)>> {
        let all: Vec<&str> = settings.classes.iter().map(|class| class.id.as_str()).collect();
        if self.classes.is_empty() {
            bail!(
                "no class of {} is chosen: give --class NAME[=WEIGHT]; classes are {}",
                file.display(),
                all.join(", ")
            );
        }
        let mut found: Vec<(LoadClass, f64)> = Vec::new();
        for text in &self.classes {
            let (name, weight) = inputs::class_weight(text)?;
            let class = settings.classes.iter().find(|class| class.id.as_str() == name);
            let class = class.with_context(|| {
                format!("--class {name} does not exist in {}; classes are {}", file.display(), all.join(", "))
            })?;
            if found.iter().any(|(known, _)| known.id == class.id) {
                bail!("--class {name} is repeated");
            }
            let load = LoadClass {
                id: class.id.clone(),
                objectives: class.objectives.clone(),
                timeouts: class.timeouts,
                headers: HeaderMap::new(),
            };
            found.push((load, weight));
        }
        Ok(found)
    }

    fn lengths_of(&self, class: &LoadClass) -> anyhow::Result<LengthModel> {
        if let Some(file) = &self.lengths {
            return inputs::length_pairs(file);
        }
        let assumed = class.objectives.assumed.unwrap_or_default();
        let of = |flag: &str, text: &Option<String>, assumed: Option<crate::judge::Quantiles>| match (text, assumed) {
            (Some(text), _) => inputs::lengths(flag, text),
            (None, Some(quantiles)) => Ok(TokenLengths::lognormal(quantiles.p50.0 as f64, quantiles.p95.0 as f64)?),
            (None, None) => bail!(
                "{flag} is missing: class {} assumes no lengths, and a goodput is meaningless without its workload; give 512, P50:P95 or @FILE",
                class.id
            ),
        };
        let input = of("--input", &self.input, assumed.input_tokens)?;
        let output = of("--output", &self.output, assumed.output_tokens)?;
        LengthModel::fitted(input, output, self.correlation).context("--correlation")
    }

    /// Cache states in the order of measurement.
    ///
    /// # Errors Warm caches without a share.
    pub fn caches(&self) -> anyhow::Result<Vec<CacheState>> {
        let warm = || {
            let hit_share = self
                .hit_share
                .context("--cache warm needs --hit-share, the share of a prompt that others have in common")?;
            anyhow::Ok(CacheState::Warm { hit_share, groups: self.prefix_groups })
        };
        match self.cache.as_str() {
            "warm" => Ok(vec![warm()?]),
            "both" => Ok(vec![CacheState::Cold, warm()?]),
            _ if self.hit_share.is_some() => {
                bail!("--hit-share applies to warm caches only; add --cache warm or --cache both")
            }
            _ => Ok(vec![CacheState::Cold]),
        }
    }

    /// The rates.
    ///
    /// # Errors The bounds exclude every rate.
    pub fn rate_plan(&self) -> anyhow::Result<RatePlan> {
        if !self.rates.is_empty() {
            let mut rates = self.rates.clone();
            rates.sort_by(f64::total_cmp);
            rates.dedup();
            return Ok(RatePlan::Fixed(rates));
        }
        if self.min_rate > self.max_rate {
            bail!("--min-rate ({}) is above --max-rate ({})", self.min_rate, self.max_rate);
        }
        Ok(RatePlan::Search(SearchSettings {
            start: self.start,
            growth: self.growth,
            tolerance: self.tolerance,
            lowest: self.min_rate,
            highest: self.max_rate,
        }))
    }

    /// The stopping rule of a run.
    ///
    /// # Errors The times leave no counted period.
    pub fn rule(&self) -> anyhow::Result<RunRule> {
        if self.warm_up + self.min_seconds > self.max_seconds {
            bail!(
                "--max-seconds ({}) leaves no room for --warm-up ({}) and --min-seconds ({})",
                self.max_seconds,
                self.warm_up,
                self.min_seconds
            );
        }
        Ok(RunRule {
            // The repetitions together reach the requested error.
            standard_error: self.standard_error * f64::from(self.repetitions).sqrt(),
            first_look: self.first_look as u64,
            warm_up_seconds: self.warm_up,
            min_seconds: self.min_seconds,
            max_seconds: self.max_seconds,
            ..RunRule::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command_line::parse;
    use crate::cli::service_options::WithoutSecrets;
    use crate::config::{self, ProcessEnvironment};

    const PROMISE: [&str; 8] = ["--ttft", "1.2", "--tpot", "0.05", "--input", "900:6000", "--output", "350:1500"];

    fn args(more: &[&str]) -> Result<SweepArgs, clap::Error> {
        parse([&["sweep", "http://engine:8000"], more].concat())
    }

    /// Returns the error of a command line; empty if it is valid.
    fn told(more: &[&str]) -> String {
        let args = match args(more) {
            Ok(args) => args,
            Err(error) => return error.to_string(),
        };
        let sound = || {
            args.target()?;
            args.workload()?;
            args.caches()?;
            args.rate_plan()?;
            args.rule()?;
            anyhow::Ok(())
        };
        sound().err().map(|error| format!("{error:#}")).unwrap_or_default()
    }

    #[test]
    fn a_command_line_reports_missing_and_invalid_values() {
        assert_eq!(told(&PROMISE), "");
        let with = |more: &[&'static str]| told(&[&PROMISE[..], more].concat());
        assert!(told(&[]).contains("no objectives"));
        assert!(told(&["--ttft", "1"]).contains("--input is missing"));
        assert!(told(&["--preset", "mlperf/llama3"]).contains("presets are mlperf/llama2-70b,"));
        assert!(with(&["--cache", "warm"]).contains("--hit-share"));
        assert!(with(&["--hit-share", "0.5"]).contains("--cache warm"));
        assert!(with(&["--max-seconds", "20"]).contains("leaves no room"));
        assert!(with(&["--min-rate", "9", "--max-rate", "3"]).contains("is above"));
        assert!(with(&["--path", "/v1/audio/speech"]).contains("unsupported path"));
        assert!(with(&["--extra-body", "[]"]).contains("not a JSON object"));
        assert!(with(&["--header", "x"]).contains("NAME: VALUE"));
        assert!(with(&["--correlation", "2"]).contains("--correlation"));
        assert!(with(&["--api-key-file", "/nowhere"]).contains("--api-key-file"));
        assert!(told(&["--e2e", "5", "--input", "9", "--output", "9", "--no-stream"]).is_empty());
        assert!(told(&["--ttft", "5", "--input", "9", "--output", "9", "--no-stream"]).contains("does not judge"));
        assert!(with(&["--start", "0"]).contains("out of range") && with(&["--growth", "1"]).contains("out of range"));
    }

    #[test]
    fn a_key_in_a_header_is_never_repeated() {
        let text = told(&[&PROMISE[..], &["--header", "authorization: se\u{7}cret"]].concat());
        assert!(text.contains("cannot be sent") && !text.contains("cret"), "{text}");
        let target = args(&[&PROMISE[..], &["--header", "x-key: hidden"]].concat()).unwrap().target().unwrap();
        assert!(!format!("{:?}", target.headers).contains("hidden"));
    }

    #[test]
    fn classes_of_a_settings_file_bring_their_objectives_limits_and_lengths() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/config/goodput.yaml");
        let text = std::fs::read_to_string(file).unwrap();
        let settings = config::load(&text, &WithoutSecrets(ProcessEnvironment::of(Path::new(file)))).unwrap();
        let voice = settings.classes.iter().find(|class| class.objectives.assumed.is_some()).unwrap();
        let line = ["-c", file, "--class", voice.id.as_str(), "--class-header", "x-slo-class"];
        let workload = args(&line).unwrap().workload().unwrap();
        let class = &workload.classes[0].load;
        assert_eq!((&class.objectives, class.timeouts), (&voice.objectives, voice.timeouts));
        assert_eq!(class.headers["x-slo-class"], voice.id.as_str());
        assert!(told(&["-c", file]).contains("give --class"));
        assert!(told(&["-c", file, "--class", "nobody"]).contains("does not exist"));
        let twice = ["-c", file, "--class", voice.id.as_str(), "--class", voice.id.as_str()];
        assert!(told(&twice).contains("is repeated"));
    }
}

//! `goodput engine`: a simulated engine on a socket.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use clap::error::ErrorKind;

use super::signals::ShutdownSignals;
use super::{numbers, print};
use crate::clock::Clock;
use crate::sim::engine::{AdmissionOrder, EngineSpec, LengthDistribution, SimEngine, SimSettings};

/// Runs a simulated engine until it is interrupted.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Address to listen on; port 0 takes a free one, which is printed.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Model names it serves; may be repeated.
    #[arg(long = "model", default_value = "sim", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    models: Vec<String>,
    /// Seed of texts, lengths and jitter.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Speed relative to an 8B model on one GPU, 0.001 to 1000.
    #[arg(long, default_value_t = 1.0, value_parser = numbers::within::<1, 1_000_000>)]
    speed: f64,
    /// Most requests in one batch.
    #[arg(long, default_value_t = EngineSpec::default().max_running, value_parser = numbers::count)]
    max_running: usize,
    /// Most waiting requests before the engine responds 503 [default: no limit].
    #[arg(long, value_parser = numbers::count)]
    max_waiting: Option<usize>,
    /// Tokens computed in one step.
    #[arg(long, default_value_t = EngineSpec::default().step_tokens, value_parser = clap::value_parser!(u64).range(1..))]
    step_tokens: u64,
    /// Size of the key-value cache, in tokens.
    #[arg(long, default_value_t = EngineSpec::default().kv_tokens, value_parser = clap::value_parser!(u64).range(1..))]
    kv_tokens: u64,
    /// Longest prompt plus output, in tokens.
    #[arg(long, default_value_t = EngineSpec::default().max_model_len, value_parser = clap::value_parser!(u64).range(1..))]
    max_model_len: u64,
    /// Schedule by the requests' `priority` (lower first) instead of by arrival.
    #[arg(long)]
    priority_scheduling: bool,
    /// Disable the prefix cache.
    #[arg(long)]
    no_prefix_caching: bool,
    /// Most tokens per request and step; above 1 it is speculative decoding.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    speculative: u64,
    /// Reasoning tokens before the response; 0 disables reasoning.
    #[arg(long, default_value_t = 0)]
    reasoning_tokens: u64,
    /// Median output without a cap, in tokens.
    #[arg(long, default_value_t = 160.0, value_parser = numbers::within::<1_000, 1_000_000_000>)]
    output_p50: f64,
    /// 95th percentile of that output.
    #[arg(long, default_value_t = 640.0, value_parser = numbers::within::<1_000, 1_000_000_000>)]
    output_p95: f64,
    /// Seconds after which an idle connection is closed.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    keep_alive_seconds: u64,
    /// Print the address as JSON.
    #[arg(long)]
    json: bool,
}

impl EngineArgs {
    /// Serves until the process is interrupted.
    #[must_use]
    pub fn run(self) -> ExitCode {
        if let Err(unsound) = self.is_sound() {
            unsound.exit();
        }
        super::descriptors::raise_limit();
        let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                eprintln!("goodput engine: no runtime: {error}");
                return ExitCode::from(3);
            }
        };
        runtime.block_on(self.serve())
    }

    /// Checks combinations of flags.
    fn is_sound(&self) -> Result<(), clap::Error> {
        if self.output_p95 < self.output_p50 {
            let (p50, p95) = (self.output_p50, self.output_p95);
            let text =
                format!("--output-p95 ({p95}) is below --output-p50 ({p50}); give both, the larger one as p95\n");
            return Err(clap::Error::raw(ErrorKind::ValueValidation, text));
        }
        Ok(())
    }

    async fn serve(self) -> ExitCode {
        let (listen, json) = (self.listen, self.json);
        let engine = SimEngine::start(Clock::start(), self.settings());
        let bound = match engine.listen(listen).await {
            Ok(bound) => bound,
            Err(error) => {
                eprintln!("goodput engine: cannot listen on {listen}: {error}");
                return ExitCode::from(3);
            }
        };
        let place = format!("http://{bound}");
        let text = if json { format!(r#"{{"listening":"{place}"}}"#) } else { format!("listening on {place}") };
        if let Err(error) = print::line(&text) {
            eprintln!("goodput engine: cannot write to standard output: {error}");
        }
        ShutdownSignals::listen().next().await;
        ExitCode::SUCCESS
    }

    fn settings(self) -> SimSettings {
        let shape = EngineSpec {
            max_running: self.max_running,
            step_tokens: self.step_tokens,
            kv_tokens: self.kv_tokens,
            max_model_len: self.max_model_len,
            max_waiting: self.max_waiting,
            order: if self.priority_scheduling { AdmissionOrder::Priority } else { AdmissionOrder::Arrival },
            prefix_caching: !self.no_prefix_caching,
            speculative: self.speculative,
            speed: self.speed,
            ..EngineSpec::default()
        };
        SimSettings {
            models: self.models,
            shape,
            seed: self.seed,
            output: LengthDistribution { p50: self.output_p50, p95: self.output_p95 },
            reasoning_tokens: self.reasoning_tokens,
            keep_alive: Duration::from_secs(self.keep_alive_seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command_line::parse;

    /// Returns the error of a command line; empty if it is valid.
    fn told(flags: &[&str]) -> String {
        let line = parse([&["engine"], flags].concat()).and_then(|engine: EngineArgs| engine.is_sound());
        line.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn an_engine_that_could_never_answer_is_refused() {
        assert_eq!(told(&[]), "");
        assert_eq!(told(&["--speed", "0.05", "--max-running", "1", "--output-p50", "8", "--output-p95", "8"]), "");
        for (flag, nonsense) in [
            ("--speed", "0"),
            ("--speed", "-1"),
            ("--speed", "nan"),
            ("--speed", "inf"),
            ("--speed", "fast"),
            ("--max-running", "0"),
            ("--max-waiting", "0"),
            ("--step-tokens", "0"),
            ("--kv-tokens", "0"),
            ("--max-model-len", "0"),
            ("--speculative", "0"),
            ("--output-p50", "0"),
            ("--output-p95", "nan"),
            ("--keep-alive-seconds", "0"),
            ("--model", ""),
        ] {
            let told = told(&[&format!("{flag}={nonsense}")]);
            assert!(told.contains(flag), "{flag} {nonsense}: {told}");
        }
        assert!(told(&["--speed=0"]).contains("0 is out of range: write a number from 0.001 to 1000"));
        let crossed = told(&["--output-p50", "700"]);
        assert!(crossed.contains("--output-p95 (640) is below --output-p50 (700)"), "{crossed}");
    }
}

//! The command line of a replay.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;

use crate::cli::numbers;
use crate::cli::service_options::{EndpointArgs, PromiseArgs};
use crate::load::replay::{EngineChange, LossSpan, duration, span_of};
use crate::trace::{Reshape, TraceFormat};

/// Replays recorded traffic against a service or a simulated fleet, and reports whether the classes reach
/// their targets.
#[derive(Clone, Debug, clap::Args)]
pub struct ReplayArgs {
    /// Trace: a gateway's journal, or one of the public formats; may be compressed by gzip or zstd; - reads standard input.
    #[arg(required_unless_present = "calibrate")]
    pub trace: Option<PathBuf>,
    /// Its format (journal, azure, burstgpt, mooncake, bailian); by default what its first line looks like.
    #[arg(long, value_name = "FORMAT", help_heading = "What is replayed")]
    pub format: Option<TraceFormat>,
    /// Leave out what came before this time of the trace: 90, 10m, 1h30m.
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = "What is replayed")]
    pub from: Option<Duration>,
    /// Leave out what came from this time of the trace on.
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = "What is replayed")]
    pub to: Option<Duration>,
    /// Times as fast: 1.3 is 30 % more requests per second, in less time.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = numbers::within::<1, 10_000_000>, help_heading = "What is replayed")]
    pub speed: f64,
    /// Times as many requests per second, in the same time and as bursty.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = numbers::within::<1, 10_000_000>, help_heading = "What is replayed")]
    pub rate: f64,
    /// Slices in which --rate thins or multiplies.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, help_heading = "What is replayed")]
    pub slice: Duration,
    /// Class of requests for which the trace names none; by default the settings' default_class.
    #[arg(long, value_name = "NAME", requires = "config", help_heading = "What is replayed")]
    pub class: Option<String>,

    /// Base URL of the service: a gateway, an engine, any server with the OpenAI API.
    #[arg(long, value_name = "URL", conflicts_with = "simulate", help_heading = "Against what")]
    pub url: Option<String>,
    /// A simulated fleet in virtual time: the pools, classes and tenants of -c.
    #[arg(long, help_heading = "Against what")]
    pub simulate: bool,
    /// Simulated engines: a number, or POOL=N for one of several pools; by default as many as the settings list.
    #[arg(long = "engines", value_name = "[POOL=]N", requires = "simulate", help_heading = "Against what")]
    pub engines: Vec<String>,
    /// Properties of a simulated engine, as --calibrate writes them; by default an 8B model on one large GPU.
    #[arg(long, value_name = "FILE", requires = "simulate", help_heading = "Against what")]
    pub engine: Option<PathBuf>,
    /// Fit the properties of a simulated engine to this sweep of a real one, and print the error on held-out
    /// rates.
    #[arg(long, value_name = "SWEEP", conflicts_with_all = ["engine", "url"], help_heading = "Against what")]
    pub calibrate: Option<PathBuf>,
    /// Header that carries the name of the request's class.
    #[arg(long, value_name = "NAME", help_heading = "Against what")]
    pub class_header: Option<String>,
    /// File with an API key for each tenant of a journal, a line each: TENANT KEY, or TENANT env:NAME for a variable of the
    /// environment. The journal's hash_key_file of -c tells the tenants apart.
    #[arg(long, value_name = "FILE", conflicts_with = "simulate", help_heading = "Against what")]
    pub tenant_keys: Option<PathBuf>,
    /// Longest drain after the last request; by default the classes' time limits.
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = "Against what")]
    pub drain: Option<Duration>,

    /// Engines that are lost at a time of the replay: 3@10m, 1-20@10m, POOL/3@10m, or the NAME of --run or --lose-by; may be
    /// repeated.
    #[arg(long, value_name = "ENGINE@TIME", help_heading = "What is lost on the way")]
    pub lose: Vec<EngineChange>,
    /// Engines that return.
    #[arg(long = "return", value_name = "ENGINE@TIME", requires = "lose", help_heading = "What is lost on the way")]
    pub returned: Vec<EngineChange>,
    /// A real engine that is started here, killed when it is lost and started again when it returns; may be repeated.
    #[arg(long, value_name = "NAME=COMMAND", conflicts_with = "simulate", help_heading = "What is lost on the way")]
    pub run: Vec<String>,
    /// A command that takes away a real engine that runs elsewhere; may be repeated.
    #[arg(long, value_name = "NAME=COMMAND", conflicts_with = "simulate", help_heading = "What is lost on the way")]
    pub lose_by: Vec<String>,
    /// The command that brings it back; at the end of the replay, too, if the engine is still lost.
    #[arg(long, value_name = "NAME=COMMAND", requires = "lose_by", help_heading = "What is lost on the way")]
    pub return_by: Vec<String>,
    /// Window over which recovery is computed.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration, help_heading = "What is lost on the way")]
    pub recovery_window: Duration,

    /// Objectives.
    #[command(flatten)]
    pub promise: PromiseArgs,
    /// Requests.
    #[command(flatten)]
    pub endpoint: EndpointArgs,

    /// File for one JSON line per request.
    #[arg(long, value_name = "FILE", help_heading = "What is written")]
    pub records: Option<PathBuf>,
    /// File for the engine's properties that --calibrate found.
    #[arg(long, value_name = "FILE", requires = "calibrate", help_heading = "What is written")]
    pub engine_out: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long, help_heading = "What is written")]
    pub json: bool,
}

impl ReplayArgs {
    /// Window and rate of the trace.
    ///
    /// # Errors An empty window, or slices without length.
    pub fn reshape(&self) -> anyhow::Result<Reshape> {
        let from = self.from.unwrap_or_default();
        let reshape = Reshape { from, to: self.to, speed: self.speed, rate: self.rate, slice: self.slice };
        reshape.check()?;
        Ok(reshape)
    }

    /// The stretch in which engines are missing.
    #[must_use]
    pub fn loss(&self) -> Option<LossSpan> {
        span_of(&self.lose, &self.returned)
    }

    /// The losses and returns, as they were asked for.
    #[must_use]
    pub fn losses(&self) -> Vec<String> {
        let told = |verb: &'static str| move |change: &EngineChange| format!("{verb} {change}");
        self.lose.iter().map(told("lose")).chain(self.returned.iter().map(told("return"))).collect()
    }

    /// Whether the parts of the line fit together.
    ///
    /// # Errors
    /// What is missing.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.trace.is_some() && self.url.is_none() && !self.simulate {
            bail!("against what? give --url URL, or --simulate");
        }
        self.reshape()?;
        for back in &self.returned {
            let is_lost = self.lose.iter().any(|loss| loss.engines == back.engines && loss.at < back.at);
            if !is_lost {
                bail!("--return {back}: nothing of that name is lost before; the engines must be written as in --lose");
            }
        }
        if self.url.is_some() && !self.lose.is_empty() && self.run.is_empty() && self.lose_by.is_empty() {
            bail!(
                "how is it lost? --run NAME=COMMAND starts an engine that is killed, --lose-by NAME=COMMAND takes one away \
                 that runs elsewhere, --simulate needs neither"
            );
        }
        Ok(())
    }
}

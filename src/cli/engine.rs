//! `goodput engine`: a simulated engine on a socket.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::signals::Signals;
use crate::clock::Clock;
use crate::lab::engine::{Lengths, Order, Settings, Shape, SimEngine};

/// Runs a simulated engine until it is interrupted.
#[derive(Debug, Args)]
pub struct Engine {
    /// Where to listen; port 0 takes a free one, which is printed.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Model names it answers to; may be repeated.
    #[arg(long = "model", default_value = "sim")]
    models: Vec<String>,
    /// Decides texts, lengths and jitter.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many times as fast as an 8B model on one GPU.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Requests in one batch.
    #[arg(long, default_value_t = Shape::default().max_running)]
    max_running: usize,
    /// Requests that may wait before the engine answers 503; no limit by default.
    #[arg(long)]
    max_waiting: Option<usize>,
    /// Tokens computed in one step.
    #[arg(long, default_value_t = Shape::default().step_tokens)]
    step_tokens: u64,
    /// Room of the key-value cache, in tokens.
    #[arg(long, default_value_t = Shape::default().kv_tokens)]
    kv_tokens: u64,
    /// Longest prompt plus answer, in tokens.
    #[arg(long, default_value_t = Shape::default().max_model_len)]
    max_model_len: u64,
    /// Serve by the requests' `priority` (lower first), not by arrival.
    #[arg(long)]
    priority_scheduling: bool,
    /// Compute every prompt in full.
    #[arg(long)]
    no_prefix_caching: bool,
    /// Most tokens a request gains in one step; above 1, speculative decoding.
    #[arg(long, default_value_t = 1)]
    speculative: u64,
    /// Reasoning tokens before an answer; 0: the model does not reason.
    #[arg(long, default_value_t = 0)]
    reasoning_tokens: u64,
    /// Median length of answers that no cap cuts, in tokens.
    #[arg(long, default_value_t = 160.0)]
    output_p50: f64,
    /// Their 95th percentile.
    #[arg(long, default_value_t = 640.0)]
    output_p95: f64,
    /// Seconds after which a connection without a request is closed.
    #[arg(long, default_value_t = 5)]
    keep_alive_seconds: u64,
    /// Say where it listens as JSON.
    #[arg(long)]
    json: bool,
}

impl Engine {
    /// Serves until the process is interrupted or told to end.
    #[must_use]
    pub fn run(self) -> ExitCode {
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
        if json {
            println!(r#"{{"listening":"http://{bound}"}}"#);
        } else {
            println!("listening on http://{bound}");
        }
        Signals::listen().next().await;
        ExitCode::SUCCESS
    }

    fn settings(self) -> Settings {
        let shape = Shape {
            max_running: self.max_running,
            step_tokens: self.step_tokens,
            kv_tokens: self.kv_tokens,
            max_model_len: self.max_model_len,
            max_waiting: self.max_waiting,
            order: if self.priority_scheduling { Order::Priority } else { Order::Arrival },
            prefix_caching: !self.no_prefix_caching,
            speculative: self.speculative,
            speed: self.speed,
            ..Shape::default()
        };
        Settings {
            models: self.models,
            shape,
            seed: self.seed,
            output: Lengths { p50: self.output_p50, p95: self.output_p95 },
            reasoning_tokens: self.reasoning_tokens,
            keep_alive: Duration::from_secs(self.keep_alive_seconds),
        }
    }
}

//! The commands.
//!
//! Exit codes: 0 done; 1 it ran and the answer is no; 2 usage or an unreadable file; 3 it
//! could not start (a port, a certificate).

pub mod engine;
pub mod health;
pub mod serve;
pub mod service;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The command line.
#[derive(Debug, Parser)]
#[command(name = "goodput", version, about)]
pub struct Goodput {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a simulated engine with vLLM's HTTP face; needs no GPU.
    Engine(engine::Engine),
    /// Run the gateway.
    Serve(serve::Serve),
    /// Ask a running gateway whether it is well.
    Health(health::Health),
}

/// Reads the command line and does what it says.
#[must_use]
pub fn run() -> ExitCode {
    match Goodput::parse().command {
        Command::Engine(engine) => engine.run(),
        Command::Health(health) => health.run(),
        Command::Serve(serve) => serve.run(),
    }
}

/// Logs go to stderr; `RUST_LOG` filters them, `info` where it is not set.
pub(crate) fn logs() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt().with_writer(std::io::stderr).with_env_filter(filter);
    // A second call finds a subscriber in place, which is what it wanted.
    let _ = logs.try_init();
}

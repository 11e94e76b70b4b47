//! The commands.
//!
//! Exit codes: 0 done; 1 it ran and the answer is no; 2 usage or an unreadable file; 3 it
//! could not start (a port, a certificate).

pub mod engine;
pub mod health;

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
    /// Ask a running gateway whether it is well.
    Health(health::Health),
}

/// Reads the command line and does what it says.
#[must_use]
pub fn run() -> ExitCode {
    match Goodput::parse().command {
        Command::Engine(engine) => engine.run(),
        Command::Health(health) => health.run(),
    }
}

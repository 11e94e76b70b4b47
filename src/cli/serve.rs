//! `goodput serve`: the gateway.

use std::path::PathBuf;
use std::process::ExitCode;

/// Runs the gateway until it is told to end.
#[derive(Clone, Debug, clap::Args)]
pub struct Serve {
    /// The settings file.
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Say where it listens as JSON.
    #[arg(long)]
    json: bool,
}

impl Serve {
    /// Serves.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let _ = self.json;
        eprintln!("goodput serve: not wired yet ({})", self.config.display());
        ExitCode::from(3)
    }
}

//! `goodput demo`: a gateway, simulated engines and traffic in one process.

use std::process::ExitCode;

/// Shows a gateway at work: simulated engines and traffic, no files, no GPU.
#[derive(Clone, Debug, clap::Args)]
pub struct Demo {
    /// Tell what happens as JSON lines.
    #[arg(long)]
    json: bool,
}

impl Demo {
    /// Runs the demo.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let _ = self.json;
        eprintln!("goodput demo: not wired yet");
        ExitCode::from(3)
    }
}

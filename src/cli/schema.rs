//! `goodput schema`: the JSON Schema of the settings file, for editors.

use std::process::ExitCode;

use super::print;

/// Prints the JSON Schema of the settings file.
#[derive(Clone, Debug, clap::Args)]
pub struct Schema {
    /// The schema is JSON anyway; the flag is here because every command has it.
    #[arg(long)]
    json: bool,
}

impl Schema {
    /// Prints it; on one line with `--json`.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let schema = crate::config::schema();
        let text = if self.json { format!("{schema}") } else { format!("{schema:#}") };
        print::last(&text, ExitCode::SUCCESS)
    }
}

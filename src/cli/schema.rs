//! `goodput schema`: the JSON Schema of the settings file, for editors.

use std::process::ExitCode;

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
        if self.json {
            println!("{schema}");
        } else {
            println!("{schema:#}");
        }
        ExitCode::SUCCESS
    }
}

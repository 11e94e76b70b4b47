//! `goodput schema`: the JSON Schema of the settings file, for editors and for `docs/configuration.md`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::print;
use crate::config;

/// Prints the JSON Schema of the settings file, or its key tables.
#[derive(Clone, Debug, clap::Args)]
pub struct Schema {
    /// Prints the schema on one line.
    #[arg(long)]
    json: bool,
    /// Prints Markdown tables of all keys; with PAGE, the page with the tables between its markers replaced.
    #[arg(long, value_name = "PAGE", num_args = 0..=1, conflicts_with = "json")]
    markdown: Option<Option<PathBuf>>,
}

impl Schema {
    /// Prints the schema or the tables.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let text = match &self.markdown {
            None if self.json => config::schema().to_string(),
            None => format!("{:#}", config::schema()),
            Some(None) => config::tables(),
            Some(Some(page)) => match filled(page) {
                Ok(text) => text,
                Err(error) => {
                    eprintln!("goodput schema: {}: {error:#}", page.display());
                    return ExitCode::from(2);
                }
            },
        };
        print::last(text.trim_end(), ExitCode::SUCCESS)
    }
}

fn filled(page: &Path) -> anyhow::Result<String> {
    Ok(config::fill(&std::fs::read_to_string(page)?)?)
}

//! `goodput drill`: invented misses in a running gateway, to see whether a page arrives.
//!
//! Exit codes: 0 they were counted; 1 the gateway refused or did not answer; 2 the URL or the token's file cannot be used.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use http::{StatusCode, Uri};
use serde_json::json;

use super::admin_port::{AdminPort, token_of};
use super::print;

/// How long the gateway may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Makes a running gateway count misses in the class `drill`, to see whether a page arrives.
#[derive(Clone, Debug, clap::Args)]
pub struct DrillArgs {
    /// The gateway's admin port.
    #[arg(long, default_value = "http://127.0.0.1:9090")]
    url: Uri,
    /// The file with its token: the one that `admin.token_file` names.
    #[arg(long, value_name = "FILE")]
    token_file: PathBuf,
    /// How many misses.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    misses: u64,
    /// Answer in JSON.
    #[arg(long)]
    json: bool,
}

impl DrillArgs {
    /// Asks for the misses, and says what to expect now.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let port = match token_of(&self.token_file).and_then(|token| AdminPort::of(&self.url, Some(token))) {
            Ok(port) => port,
            Err(error) => return self.failed(&error, 2),
        };
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return self.failed(&error.into(), 3),
        };
        match runtime.block_on(self.ask(&port)) {
            Ok(()) if self.json => {
                let told = json!({"counted": true, "class": "drill", "misses": self.misses, "alert": "GoodputDrill"});
                print::last(&told.to_string(), ExitCode::SUCCESS)
            }
            Ok(()) => {
                let told = format!(
                    "{} misses are counted in the class drill. GoodputDrill pages after the next scrape, evaluation and\n\
                     group_wait, and clears five minutes later. No sum, budget or other alert has them.",
                    self.misses
                );
                print::last(&told, ExitCode::SUCCESS)
            }
            Err(error) => self.failed(&error, 1),
        }
    }

    fn failed(&self, error: &anyhow::Error, code: u8) -> ExitCode {
        if self.json {
            let told = json!({"counted": false, "error": format!("{error:#}")});
            return print::last(&told.to_string(), ExitCode::from(code));
        }
        eprintln!("goodput drill: {error:#}");
        ExitCode::from(code)
    }

    async fn ask(&self, port: &AdminPort) -> anyhow::Result<()> {
        let (status, answer) = port.post("/-/drill", &json!({"misses": self.misses}), PATIENCE).await?;
        if status != StatusCode::OK {
            bail!("{status}: {}", String::from_utf8_lossy(&answer).trim());
        }
        Ok(())
    }
}

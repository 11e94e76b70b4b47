//! `goodput dashboard`: a Grafana dashboard of everything that the gateway counts.
//!
//! It is the same for every gateway: classes, pools and tenants are variables, and what a class promises is a
//! metric (`goodput_slo_target`, `goodput_slo_threshold_seconds`), so a reload moves the lines.

mod board;

use std::process::ExitCode;

use super::print;

/// Prints a Grafana dashboard, to be imported or provisioned.
#[derive(Clone, Debug, clap::Args)]
pub struct DashboardArgs {
    /// Its title.
    #[arg(long, default_value = "goodput")]
    title: String,
    /// Its id in URLs; two dashboards of one Grafana need two.
    #[arg(long, default_value = "goodput")]
    uid: String,
    /// A dashboard is JSON anyway; on one line with this.
    #[arg(long)]
    json: bool,
}

impl DashboardArgs {
    /// Prints it.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        let board = board::dashboard(&self.title, &self.uid);
        let text = if self.json { format!("{board}") } else { format!("{board:#}") };
        print::last(&text, ExitCode::SUCCESS)
    }
}

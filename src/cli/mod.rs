//! The command line interface.
//!
//! Exit codes: 0 success; 1 negative result; 2 invalid command line or unreadable file; 3 failed start (a
//! port is taken).

mod admin_port;
pub mod check;
mod class_status;
#[cfg(test)]
mod command_line;
pub mod dashboard;
pub mod demo;
mod descriptors;
mod document;
pub mod drill;
pub mod engine;
pub mod health;
pub mod key;
mod load_runtime;
mod logs;
mod numbers;
pub mod plan;
mod print;
pub mod replay;
pub mod report;
pub mod rules;
pub mod schema;
pub mod serve;
pub mod service;
mod service_options;
mod service_probe;
mod signals;
mod status;
pub mod sweep;
pub mod top;

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
    /// Run the gateway.
    Serve(serve::Serve),
    /// Run a gateway with simulated engines and traffic; needs no files and no GPU.
    Demo(demo::Demo),
    /// Check a settings file, and explain how a request would be handled.
    Check(check::CheckArgs),
    /// Print recording and alerting rules for Prometheus, generated from the classes.
    Rules(rules::RulesArgs),
    /// Count test misses in a running gateway, to verify that an alert arrives.
    Drill(drill::DrillArgs),
    /// Print the JSON Schema of the settings file, or its tables for the documentation.
    Schema(schema::Schema),
    /// Print a Grafana dashboard.
    Dashboard(dashboard::DashboardArgs),
    /// Create API keys.
    Key(key::KeyArgs),
    /// Run a simulated engine with vLLM's HTTP API; needs no GPU.
    Engine(engine::EngineArgs),
    /// Size a fleet from measured goodput: replicas, memory, cost and what-if.
    Plan(Box<plan::PlanArgs>),
    /// Find the highest request rate at which a service meets its objectives.
    Sweep(Box<sweep::SweepArgs>),
    /// Replay recorded traffic against a service or a simulated fleet, with losses of engines.
    Replay(Box<replay::ReplayArgs>),
    /// Compare sweeps, and write a report.
    Report(report::ReportArgs),
    /// Check the health of a running gateway.
    Health(health::HealthArgs),
    /// Show a running gateway: classes, seats, queues, engines, tenants.
    Top(top::TopArgs),
}

/// Parses the command line and runs the command.
#[must_use]
pub fn run() -> ExitCode {
    match Goodput::parse().command {
        Command::Serve(serve) => serve.run(),
        Command::Demo(demo) => demo.run(),
        Command::Check(check) => check.run(),
        Command::Rules(rules) => rules.run(),
        Command::Drill(drill) => drill.run(),
        Command::Schema(schema) => schema.run(),
        Command::Dashboard(dashboard) => dashboard.run(),
        Command::Key(key) => key.run(),
        Command::Engine(engine) => engine.run(),
        Command::Plan(plan) => plan.run(),
        Command::Sweep(sweep) => sweep.run(),
        Command::Replay(replay) => replay.run(),
        Command::Report(report) => report.run(),
        Command::Health(health) => health.run(),
        Command::Top(top) => top.run(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_valid_and_every_command_supports_json() {
        let mut line = Goodput::command();
        line.clone().debug_assert();
        line.build();
        for command in line.get_subcommands().filter(|command| command.get_name() != "help") {
            let leaves: Vec<_> = command.get_subcommands().filter(|command| command.get_name() != "help").collect();
            let leaves = if leaves.is_empty() { vec![command] } else { leaves };
            for leaf in leaves {
                assert!(leaf.get_arguments().any(|flag| flag.get_id() == "json"), "{}", leaf.get_name());
                assert!(leaf.get_about().is_some(), "{}", leaf.get_name());
            }
        }
    }

    #[test]
    fn a_wrong_command_line_is_exit_code_2() {
        for line in [&["goodput"][..], &["goodput", "nothing"], &["goodput", "check"], &["goodput", "check", "-c"]] {
            assert_eq!(Goodput::try_parse_from(line).unwrap_err().exit_code(), 2, "{line:?}");
        }
    }
}

//! `goodput rules`: recording and alerting rules for Prometheus, from the classes of a settings file.
//!
//! Exit codes: 0 printed; 1 the file has problems; 2 it cannot be read, or the options do not fit together.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::ValueEnum;
use serde_json::json;

use super::print;
use crate::admit::redis::settings::LimitsStore;
use crate::alerts::format::{Notation, RuleFormat, render};
use crate::alerts::{AlertPolicy, ClassSlo, RuleOptions, explain, times, unit_tests};
use crate::config::watch::{LoadError, SettingsFile};
use crate::config::{ClassSettings, Settings};
use crate::judge::Objectives;
use crate::record::settings::RequestLabel;

/// Prints recording and alerting rules made from the classes of a settings file.
#[derive(Clone, Debug, clap::Args)]
pub struct RulesArgs {
    /// The settings file.
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Who reads them.
    #[arg(long, value_enum, default_value_t = OutputFormat::Prometheus)]
    format: OutputFormat,
    /// Print promtool tests of the rules instead of the rules.
    #[arg(long, conflicts_with_all = ["explain", "format", "faster"])]
    unit_tests: bool,
    /// The file that holds the rules, as the promtool tests name it.
    #[arg(long, value_name = "FILE", default_value = "goodput.rules.yaml", requires = "unit_tests")]
    rule_file: String,
    /// Print how long each alert takes to fire instead of the rules.
    #[arg(long, conflicts_with_all = ["format", "faster"])]
    explain: bool,
    /// Where the runbooks are: what `runbook_url` begins with.
    #[arg(long, value_name = "URL", default_value = "docs/runbooks")]
    runbooks: String,
    /// Only series with this label; may be repeated. Sums keep it.
    #[arg(long = "select", value_name = "LABEL=VALUE", value_parser = label)]
    matchers: Vec<(String, String)>,
    /// A further label of every alert; may be repeated.
    #[arg(long = "label", value_name = "LABEL=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,
    /// All windows so many times shorter: to rehearse how a page arrives, never for production.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=120))]
    faster: u32,
    /// Print JSON instead of YAML or text; Prometheus reads it, too.
    #[arg(long)]
    json: bool,
}

/// The formats, as the command line names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OutputFormat {
    /// A rule file of Prometheus.
    Prometheus,
    /// A PrometheusRule of the Prometheus operator.
    PrometheusOperator,
    /// SLOs of OpenSLO v1.
    Openslo,
    /// A prometheus/v1 spec of Sloth.
    Sloth,
    /// ServiceLevelObjectives of Pyrra.
    Pyrra,
}

impl OutputFormat {
    fn format(self) -> RuleFormat {
        match self {
            OutputFormat::Prometheus => RuleFormat::Prometheus,
            OutputFormat::PrometheusOperator => RuleFormat::PrometheusOperator,
            OutputFormat::Openslo => RuleFormat::OpenSlo,
            OutputFormat::Sloth => RuleFormat::Sloth,
            OutputFormat::Pyrra => RuleFormat::Pyrra,
        }
    }
}

/// Reads `name=value`, the name being one that Prometheus takes and that the rules do not use themselves.
fn label(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write a label as name=value")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !begins || !name.chars().all(plain) || name.starts_with("__") {
        return Err(format!("{name} cannot be a label's name; use letters, digits and _"));
    }
    let own = [
        "class",
        "length",
        "pool",
        "engine",
        "reason",
        "direction",
        "percentile",
        "severity",
        "tier",
        "window",
        "alertname",
    ];
    if own.contains(&name) {
        return Err(format!("the rules set {name} themselves; choose another label"));
    }
    if value.is_empty() || value.contains("{{") {
        return Err("a label needs a plain value".to_owned());
    }
    Ok((name.to_owned(), value.to_owned()))
}

impl RulesArgs {
    /// Prints what was asked for.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        match SettingsFile::file(&self.config).read() {
            Ok(settings) => print::last(self.text(&settings).trim_end_matches('\n'), ExitCode::SUCCESS),
            Err(why) => {
                let code = if matches!(why, LoadError::Problems(_)) { 1 } else { 2 };
                let lines = why.lines(&self.config);
                if self.json {
                    let told = json!({"file": self.config.display().to_string(), "error": lines});
                    return print::last(&told.to_string(), ExitCode::from(code));
                }
                lines.iter().for_each(|line| eprintln!("{line}"));
                eprintln!("goodput rules: no rules were made; goodput check -c FILE says more");
                ExitCode::from(code)
            }
        }
    }

    fn text(&self, settings: &Settings) -> String {
        let policy = self.policy(settings);
        let notation = if self.json { Notation::Json } else { Notation::Yaml };
        match (self.unit_tests, self.explain) {
            (true, _) => notation.write(&unit_tests(&policy, &self.rule_file)),
            (_, true) if self.json => notation.write(&times(&policy)),
            (_, true) => explain(&policy),
            _ => render(&policy, self.format.format(), notation),
        }
    }

    fn policy(&self, settings: &Settings) -> AlertPolicy {
        let drops = |label| settings.labels.dropped.contains(&label);
        AlertPolicy {
            classes: settings.classes.iter().map(|class| class_slo(settings, class)).collect(),
            by_length: !drops(RequestLabel::Length),
            by_pool: !drops(RequestLabel::Pool),
            replicas: settings.replicas,
            shared_limits: settings.limits_store != LimitsStore::Memory,
            options: RuleOptions {
                runbooks: self.runbooks.trim_end_matches('/').to_owned(),
                matchers: self.matchers.clone(),
                labels: self.labels.clone(),
                faster: self.faster,
            },
        }
    }
}

fn class_slo(settings: &Settings, class: &Arc<ClassSettings>) -> ClassSlo {
    let promise = &class.objectives;
    let mut pools = Vec::new();
    for (pool, _) in settings.routes.reach(&class.id) {
        if !pools.contains(&pool) {
            pools.push(pool);
        }
    }
    // Without a limit on the first token, the wait eats into the time that the whole answer has.
    let limit = promise.ttft.or(promise.e2e).map(|objective| objective.threshold / 2);
    let assumed = promise.assumed.is_some_and(|all| all.input_tokens.is_some() || all.output_tokens.is_some());
    ClassSlo {
        class: class.id.clone(),
        target: promise.joint_target,
        window: promise.window,
        objectives: in_words(promise),
        wait_limit: limit,
        pools,
        assumes_workload: assumed,
    }
}

/// `TTFT 1.2s, TPOT 50ms`.
fn in_words(promise: &Objectives) -> String {
    let all = [("TTFT", promise.ttft), ("TPOT", promise.tpot), ("gaps", promise.itl), ("E2E", promise.e2e)];
    let told = all.iter().filter_map(|(name, objective)| {
        // As `1.2s`, and not as Prometheus writes it.
        Some(format!("{name} {:?}", objective.as_ref()?.threshold))
    });
    let told: Vec<String> = told.collect();
    if told.is_empty() { "finishes".to_owned() } else { told.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command_line::parse;

    const SETTINGS: &str = "\
slo_classes:
  - {slo_class: chat, objectives: {ttft_seconds: {threshold: 1.2, attainment: 0.95}, tpot_seconds: {threshold: 0.05, attainment: 0.95}}, joint_attainment_target: 0.92}
  - {slo_class: agent, objectives: {e2e_seconds: {threshold: 20, attainment: 0.95}}, joint_attainment_target: 0.95}
  - {slo_class: batch, joint_attainment_target: 0.99}
default_class: chat
pools: [{pool: main, engines: [{url: http://e:1}]}, {pool: spare, engines: [{url: http://f:1}]}]
routes: [{model: m, class: [chat, agent], pools: [main]}, {model: '*', pools: [spare]}]
";

    fn rules(more: &[&str]) -> RulesArgs {
        let line = ["rules", "-c", "g.yaml"].into_iter().chain(more.iter().copied());
        parse(line).unwrap_or_else(|error| panic!("{error}"))
    }

    fn settings(text: &str) -> Settings {
        crate::config::load(text, &crate::config::ProcessEnvironment::default()).unwrap()
    }

    #[test]
    fn settings_become_the_inputs_of_the_alerts() {
        let policy = rules(&[]).policy(&settings(SETTINGS));
        let told = |at: usize| {
            let class = &policy.classes[at];
            let pools: Vec<&str> = class.pools.iter().map(|pool| pool.as_str()).collect();
            (class.objectives.as_str(), class.wait_limit.map(|wait| wait.as_millis()), pools)
        };
        assert_eq!(told(0), ("TTFT 1.2s, TPOT 50ms", Some(600), vec!["main", "spare"]));
        assert_eq!(told(1), ("E2E 20s", Some(10_000), vec!["main", "spare"]));
        assert_eq!(told(2), ("finishes", None, vec!["spare"]));
        assert!(policy.by_length && policy.by_pool && !policy.shared_limits);
        let dropped = settings(&format!("{SETTINGS}telemetry: {{drop_labels: [length, pool]}}\nreplicas: 3\n"));
        let policy = rules(&["--runbooks", "https://wiki/x/"]).policy(&dropped);
        assert!(!policy.by_length && !policy.by_pool);
        assert_eq!((policy.replicas, policy.options.runbooks.as_str()), (3, "https://wiki/x"));
    }

    #[test]
    fn labels_are_names_that_prometheus_takes_and_the_rules_do_not_use() {
        assert_eq!(label("cluster=eu"), Ok(("cluster".to_owned(), "eu".to_owned())));
        for wrong in ["cluster", "1a=b", "a-b=c", "class=x", "severity=page", "__name__=x", "a=", "a={{x}}"] {
            assert!(label(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_format_is_printed_in_both_notations() {
        let settings = settings(SETTINGS);
        for (format, begins) in [
            ("prometheus", "groups:"),
            ("prometheus-operator", "apiVersion: monitoring.coreos.com/v1"),
            ("openslo", "---\napiVersion: openslo/v1"),
            ("sloth", "version: prometheus/v1"),
            ("pyrra", "---\napiVersion: pyrra.dev/v1alpha1"),
        ] {
            let text = rules(&["--format", format]).text(&settings);
            assert!(
                text.trim_start_matches("---\n").starts_with(begins.trim_start_matches("---\n")),
                "{format}: {text}"
            );
            let json = rules(&["--format", format, "--json"]).text(&settings);
            assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{format}");
        }
        assert!(rules(&["--unit-tests"]).text(&settings).starts_with("rule_files:\n- goodput.rules.yaml\n"));
        assert!(rules(&["--explain"]).text(&settings).starts_with("chat: 92 % within 28d; 8 % may miss"));
    }

    #[test]
    fn options_that_exclude_each_other_are_a_wrong_command_line() {
        for wrong in [&["--unit-tests", "--explain"][..], &["--unit-tests", "--faster", "2"], &["--rule-file", "x"]] {
            let line = ["rules", "-c", "g.yaml"].into_iter().chain(wrong.iter().copied());
            assert!(parse::<RulesArgs>(line).is_err(), "{wrong:?}");
        }
    }
}

//! A gateway in its own process, and its counters.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::running::{Running, get, until};

const SETTINGS: &str = "goodput.yaml";

/// A TTFT that is kept however busy the machine is: just below the time limit for a first token.
const EASY: f64 = 100.0;

/// A gateway with an easy class `chat` and a class `strict` that is always missed.
pub struct Gateway {
    pub running: Running,
    pub admin: String,
    files: tempfile::TempDir,
}

/// Settings of a test's gateway that differ from the defaults.
pub struct Setup<'a> {
    pub engines: &'a [&'a Running],
    /// URLs of engines outside the test's processes.
    pub addresses: &'a [&'a str],
    /// Content of the pool's `engine` block.
    pub engine: &'a str,
    pub model: &'a str,
    /// TTFT threshold of the class `chat`, in seconds.
    pub ttft: f64,
    /// More keys of `listen`.
    pub listen: &'a str,
    /// More keys of `admin`.
    pub admin: &'a str,
    /// A line of the class `chat`.
    pub chat: &'a str,
    /// A line of the pool.
    pub pool: &'a str,
    /// Its health checks.
    pub health: &'a str,
    /// More lines of the settings.
    pub more: &'a str,
    /// Files beside the settings.
    pub files: &'a [(&'a str, &'a str)],
    /// Log filter.
    pub log: &'a str,
    /// More variables of the environment.
    pub environment: &'a [(&'a str, &'a str)],
    /// Shell commands that run before the gateway.
    pub shell: &'a str,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        let (engine, model, log) = ("kind: vllm", "sim", "info");
        Setup {
            engines: &[],
            addresses: &[],
            engine,
            model,
            ttft: EASY,
            listen: "",
            admin: "",
            chat: "",
            pool: "",
            health: "{every: 200ms, timeout: 30s}",
            more: "",
            files: &[],
            log,
            environment: &[],
            shell: ":",
        }
    }
}

impl Gateway {
    pub fn start(setup: &Setup<'_>) -> Gateway {
        let files = tempfile::tempdir().expect("a folder for the settings");
        for (name, text) in setup.files {
            std::fs::write(files.path().join(name), text).expect("the folder is ours");
        }
        let file = files.path().join(SETTINGS);
        std::fs::write(&file, settings(setup)).expect("the folder is ours");
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{} && exec \"$0\" \"$@\"", setup.shell), env!("CARGO_BIN_EXE_goodput")]);
        command.arg("serve").arg("--config").arg(&file).arg("--json").env("RUST_LOG", setup.log);
        command.envs(setup.environment.iter().copied());
        let running = Running::start(command, "the gateway");
        let told: Value = serde_json::from_str(&running.first_line).expect("one line of JSON");
        let admin = told["admin"].as_str().expect("the operators' port").to_owned();
        until("the gateway is ready", || get(&admin, "/readyz").ok());
        Gateway { running, admin, files }
    }

    /// Path of its settings.
    pub fn settings_file(&self) -> PathBuf {
        self.files.path().join(SETTINGS)
    }

    /// Writes other settings and sends SIGHUP, without waiting for the result.
    pub fn exchange(&self, setup: &Setup<'_>) {
        std::fs::write(self.settings_file(), settings(setup)).expect("the folder is ours");
        self.running.signal("HUP");
    }

    /// Writes other settings, sends SIGHUP, and waits for the reload.
    pub fn reload(&self, setup: &Setup<'_>) {
        self.reload_text(&settings(setup), "success");
    }

    /// The same with any text and the expected result: `success` or `failure`.
    pub fn reload_text(&self, text: &str, result: &str) {
        let reloads = || {
            let page = get(&self.admin, "/metrics").ok()?;
            Some(sum_where(&page, "goodput_config_reloads_total", &format!("result=\"{result}\"")))
        };
        let before = until("the metrics are there", reloads);
        std::fs::write(self.files.path().join(SETTINGS), text).expect("the folder is ours");
        self.running.signal("HUP");
        until("the settings were read again", || reloads().filter(|now| *now > before));
    }

    /// The metrics page once nothing is in flight.
    pub fn quiet_page(&self) -> String {
        until("nothing is in flight", || {
            let page = get(&self.admin, "/metrics").ok()?;
            (sum(&page, "goodput_in_flight") == 0.0).then_some(page)
        })
    }

    /// Nothing is left in flight, and every request has exactly one outcome. Returns the page.
    pub fn adds_up(&self) -> String {
        let page = self.quiet_page();
        let finished = outcomes(&page);
        assert!(finished.values().sum::<f64>() > 0.0, "{page}");
        let of = |outcome: &str| finished.get(outcome).copied().unwrap_or(0.0);
        assert_eq!(of("met") + of("missed"), sum(&page, "slo_total"), "{finished:?}");
        assert_eq!(of("met"), sum(&page, "slo_met_total"), "{finished:?}");
        assert_eq!(of("missed"), sum(&page, "goodput_slo_missed_total"), "{finished:?}");
        assert_eq!(of("excluded"), sum(&page, "goodput_slo_excluded_total"), "{finished:?}");
        page
    }
}

/// The settings of a test's gateway.
pub fn settings(setup: &Setup<'_>) -> String {
    let urls = setup.engines.iter().map(|engine| engine.url.as_str()).chain(setup.addresses.iter().copied());
    let urls: Vec<String> = urls.map(|url| format!("{{url: \"{url}\"}}")).collect();
    let Setup { engine, model, ttft, listen, admin, chat, pool, health, more, .. } = setup;
    format!(
        r#"
listen: {{address: "127.0.0.1:0", {listen}}}
admin: {{address: "127.0.0.1:0", {admin}}}
shutdown: {{delay: 0s, drain: 5m}}
slo_classes:
  - slo_class: chat
    objectives:
      ttft_seconds: {{threshold: {ttft}, attainment: 0.95}}
      tpot_seconds: {{threshold: 20, attainment: 0.95}}
    joint_attainment_target: 0.95
    {chat}
  - slo_class: strict
    objectives:
      ttft_seconds: {{threshold: 0.000001, attainment: 0.95}}
    joint_attainment_target: 0.95
classify:
  - {{class: strict, when: {{header: {{x-slo-class: strict}}}}}}
default_class: chat
pools:
  - pool: main
    engines: [{}]
    engine: {{{engine}}}
    health: {health}
    {pool}
routes:
  - {{model: [{model}], pools: [main]}}
{more}
"#,
        urls.join(", ")
    )
}

/// `goodput_requests_finished_total` by outcome.
pub fn outcomes(page: &str) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("goodput_requests_finished_total{")) {
        let Some((_, rest)) = line.split_once("outcome=\"") else { continue };
        let Some((outcome, _)) = rest.split_once('"') else { continue };
        *found.entry(outcome.to_owned()).or_default() += value(line);
    }
    found
}

/// The sum of all series of a family.
pub fn sum(page: &str, family: &str) -> f64 {
    sum_where(page, family, "")
}

/// The sum of the series of a family whose labels contain this text.
pub fn sum_where(page: &str, family: &str, label: &str) -> f64 {
    let is_of = |line: &&str| line.strip_prefix(family).is_some_and(|rest| rest.starts_with(['{', ' ']));
    page.lines().filter(is_of).filter(|line| line.contains(label)).map(value).sum()
}

pub fn value(line: &str) -> f64 {
    line.rsplit(' ').next().and_then(|text| text.parse().ok()).unwrap_or(f64::NAN)
}

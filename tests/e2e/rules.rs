//! `goodput rules`: Prometheus accepts its output, and the rules work.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::parts::{find, with_parts};
use crate::running::run;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn promtool() -> Result<PathBuf, String> {
    find("promtool", "install it: apt-get install prometheus")
}

/// Settings with these classes: name, target, window.
fn settings(classes: &[(&str, &str, &str)], more: &str) -> String {
    let class = |(name, target, window): &(&str, &str, &str)| {
        format!(
            "  - slo_class: {name}\n    objectives: {{ttft_seconds: {{threshold: 1.2, attainment: 0.95}}}}\n    \
             joint_attainment_target: {target}\n    window: {window}\n    \
             workload_assumption: {{input_tokens: {{p50: 900, p95: 6000}}}}\n"
        )
    };
    let all: String = classes.iter().map(class).collect();
    let default = classes[0].0;
    format!(
        "slo_classes:\n{all}default_class: {default}\npools: [{{pool: p, engines: [{{url: \"http://127.0.0.1:1\"}}]}}]\n{more}"
    )
}

/// A folder with settings, rules and tests of them.
struct RuleFiles {
    folder: tempfile::TempDir,
}

impl RuleFiles {
    fn of(settings: &str, more: &[&str]) -> RuleFiles {
        let files = RuleFiles { folder: tempfile::tempdir().expect("a folder") };
        files.write("goodput.yaml", settings);
        files.write("goodput.rules.yaml", &files.printed(more));
        files.write("goodput.tests.yaml", &files.printed(&[more, &["--unit-tests"]].concat()));
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("the folder is ours");
    }

    fn printed(&self, more: &[&str]) -> String {
        let config = self.path("goodput.yaml").display().to_string();
        printed(&[&["rules", "-c", &config], more].concat())
    }

    /// Leaves out tests whose names contain one of these words, because another test runs them.
    fn without(&self, words: &[&str]) {
        let text = std::fs::read_to_string(self.path("goodput.tests.yaml")).expect("it was written");
        let mut tests: Value = serde_yaml::from_str(&text).expect("YAML");
        let all = tests["tests"].as_array_mut().expect("tests");
        let before = all.len();
        all.retain(|test| !words.iter().any(|word| test["name"].as_str().is_some_and(|name| name.contains(word))));
        assert_eq!(before - all.len(), words.len(), "each of {words:?} is one test");
        self.write("goodput.tests.yaml", &tests.to_string());
    }

    fn promtool(&self, promtool: &Path, words: &[&str]) -> (String, bool) {
        let done = Command::new(promtool).args(words).current_dir(self.folder.path()).output().expect("it was found");
        let told = [done.stdout, done.stderr].concat();
        (String::from_utf8_lossy(&told).into_owned(), done.status.success())
    }

    fn check(&self, promtool: &Path, file: &str) -> usize {
        let (told, is_right) = self.promtool(promtool, &["check", "rules", file]);
        assert!(is_right, "{file}: {told}");
        let count = told.split("SUCCESS: ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
        count.unwrap_or_else(|| panic!("{told}"))
    }

    fn test(&self, promtool: &Path) -> (String, bool) {
        self.promtool(promtool, &["test", "rules", "goodput.tests.yaml"])
    }
}

fn printed(words: &[&str]) -> String {
    let ended = run(words);
    assert_eq!(ended.code, Some(0), "{words:?}: {}", ended.errors);
    ended.told
}

/// Tests with days of simulated time.
const LONG: [&str; 3] = ["a week", "cut short", "one prompt length"];

#[test]
fn promtool_takes_the_rules_of_every_target_over_every_window() {
    with_parts("rules for every target", || {
        let promtool = promtool()?;
        let targets = ["0.5", "0.9", "0.92", "0.95", "0.99", "0.999"];
        let names: Vec<_> = targets
            .iter()
            .flat_map(|target| {
                ["7d", "28d", "30d", "90d"].map(|window| (format!("t{target}-{window}"), *target, window))
            })
            .collect();
        let classes: Vec<_> = names.iter().map(|(name, target, window)| (name.as_str(), *target, *window)).collect();
        let files = RuleFiles::of(&settings(&classes, "telemetry: {drop_labels: [length]}\n"), &[]);
        let rules = files.check(&promtool, "goodput.rules.yaml");
        assert!(rules > 24 * 14, "{rules} rules");
        files.without(&LONG[..2]);
        let (told, is_right) = files.test(&promtool);
        assert!(is_right, "{told}");
        Ok(())
    });
}

#[test]
fn the_rules_pass_their_own_tests_over_a_whole_week() {
    with_parts("rules over a week", || {
        let promtool = promtool()?;
        let more = "replicas: 2\nlimits_store: {redis: {url: \"redis://127.0.0.1:1\"}}\n";
        let classes = [("chat.interactive", "0.92", "28d")];
        let files = RuleFiles::of(&settings(&classes, more), &["--select", "cluster=eu", "--label", "team=llm"]);
        files.check(&promtool, "goodput.rules.yaml");
        let (told, is_right) = files.test(&promtool);
        assert!(is_right, "{told}");
        Ok(())
    });
}

/// The tests of the rules detect the removal of any guard.
#[test]
fn a_rule_that_lacks_a_guard_fails_its_tests() {
    with_parts("rules without guards", || {
        let promtool = promtool()?;
        let files = RuleFiles::of(&settings(&[("chat", "0.92", "28d")], ""), &[]);
        files.without(&LONG);
        let rules = std::fs::read_to_string(files.path("goodput.rules.yaml")).expect("it was written");
        let (told, is_right) = files.test(&promtool);
        assert!(is_right, "{told}");
        let lines = |lacks: &dyn Fn(&str) -> bool| -> String {
            rules.lines().filter(|line| !lacks(line)).map(|line| format!("{line}\n")).collect()
        };
        let is_guard = |line: &str, text: &str| line.trim_start().starts_with("and on (class)") && line.contains(text);
        for (what, wrong) in [
            ("the class may be new", lines(&|line| is_guard(line, "offset"))),
            ("a few requests are enough", lines(&|line| is_guard(line, ":increase"))),
            ("nothing clears it soon", lines(&|line| is_guard(line, "_per_judged:ratio"))),
            ("nothing met is unknown", rules.replace("0 *", "1 *")),
            ("a threshold that cannot be reached", rules.replace("> 0.816", "> 1.152")),
            ("whoever is overdue is waited for", rules.replace("alert: GoodputOverdue", "alert: GoodputLate")),
            ("every replica is added up", rules.replace("max by (pool, engine)", "sum by (pool, engine)")),
        ] {
            assert_ne!(wrong, rules, "{what}");
            files.write("goodput.rules.yaml", &wrong);
            assert!(!files.test(&promtool).1, "{what}: the tests did not notice");
        }
        Ok(())
    });
}

/// The queries inside the specs of others are PromQL, too.
#[test]
fn the_queries_of_every_format_are_promql() {
    with_parts("queries of every format", || {
        let promtool = promtool()?;
        let files = RuleFiles::of(&settings(&[("chat", "0.92", "28d"), ("strict", "0.999", "28d")], ""), &[]);
        let rules: Value = serde_json::from_str(&files.printed(&["--json"])).expect("JSON");
        let of = |format: &str| -> Value {
            serde_json::from_str(&files.printed(&["--format", format, "--json"])).expect("JSON")
        };
        let operator = of("prometheus-operator");
        assert_eq!((&operator["kind"], &operator["spec"]), (&"PrometheusRule".into(), &rules));
        let mut queries = Vec::new();
        for slo in of("sloth")["slos"].as_array().expect("objectives") {
            let events = &slo["sli"]["events"];
            queries.extend(
                [&events["error_query"], &events["total_query"]]
                    .map(|query| query.as_str().unwrap().replace("{{.window}}", "5m")),
            );
        }
        for object in of("openslo").as_array().expect("objects").iter().filter(|object| object["kind"] == "SLO") {
            let ratio = &object["spec"]["indicator"]["spec"]["ratioMetric"];
            queries.extend(
                ["good", "total"].map(|side| ratio[side]["metricSource"]["spec"]["query"].as_str().unwrap().to_owned()),
            );
        }
        for objective in of("pyrra").as_array().expect("objectives") {
            let ratio = &objective["spec"]["indicator"]["ratio"];
            queries.extend(["errors", "total"].map(|side| ratio[side]["metric"].as_str().unwrap().to_owned()));
        }
        assert_eq!(queries.len(), 12);
        let recorded: Vec<Value> = queries
            .iter()
            .enumerate()
            .map(|(at, query)| serde_json::json!({"record": format!("query:{at}"), "expr": query}))
            .collect();
        files.write("queries.yaml", &serde_json::json!({"groups": [{"name": "q", "rules": recorded}]}).to_string());
        assert_eq!(files.check(&promtool, "queries.yaml"), 12);
        Ok(())
    });
}

#[test]
fn deploy_files_and_documents_equal_the_output_of_the_command() {
    let config = root().join("deploy/compose/goodput.yaml").display().to_string();
    let read =
        |file: &str| std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let again = "write it anew: goodput rules -c deploy/compose/goodput.yaml";
    assert_eq!(read("deploy/compose/goodput.rules.yaml"), printed(&["rules", "-c", &config]), "{again}");
    let told = printed(&["rules", "-c", &config, "--explain"]);
    assert!(read("docs/alerts.md").contains(&format!("```text\n{}```\n", told)), "docs/alerts.md: {again} --explain");
}

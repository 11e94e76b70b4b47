//! The README and the pages under `docs/` agree with the program.
//!
//! Every command of the README runs in a shell, every block is read by the program that it is for, and every list
//! in a page is complete. Processes and sockets are real; ports are replaced by free ones. Without `curl` or
//! `promtool` a test is skipped with a message; with `CI` set it fails instead.

#[path = "e2e/running.rs"]
#[expect(dead_code, reason = "shared with the end-to-end tests, which use all of it")]
mod running;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use goodput::clock::Clock;
use goodput::config;
use goodput::record::journal::{HashKey, JournalHeader, JournalLine};
use goodput::record::{EngineReport, Format, Recorder};
use goodput::types::{EngineId, PoolId};
use running::{Running, attempt, get, until};
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_goodput");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

// ---- blocks and commands ---------------------------------------------------------------------

/// A fenced block of a document.
struct Block {
    language: String,
    line: usize,
    text: String,
}

fn blocks(document: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut inside = false;
    for (at, line) in document.lines().enumerate() {
        match line.strip_prefix("```") {
            Some(language) if !inside => {
                inside = true;
                found.push(Block { language: language.to_owned(), line: at + 2, text: String::new() });
            }
            Some(_) => inside = false,
            None if inside => {
                let block = found.last_mut().expect("it was opened");
                block.text.push_str(line);
                block.text.push('\n');
            }
            None => {}
        }
    }
    found
}

fn of_language(document: &str, language: &str) -> Vec<Block> {
    blocks(document).into_iter().filter(|block| block.language == language).collect()
}

/// The shell blocks of the README, in order.
fn scripts() -> Vec<String> {
    of_language(&read("README.md"), "sh").into_iter().map(|block| block.text).collect()
}

/// The test that runs a shell block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RunBy {
    /// `the_demo_runs_and_its_commands_can_be_pasted`
    Demo,
    /// The reader of this file. `tests/architecture.rs` compares it with `.ci/run`.
    Tests,
    /// `the_readmes_steps_lead_to_a_judged_request`, in a shell.
    Step,
    /// The same, as a process that stays.
    Server,
    /// `tests/e2e` runs its services, and `tests/architecture.rs` checks the file.
    Compose,
}

fn run_by(script: &str) -> RunBy {
    match script.split_whitespace().collect::<Vec<_>>()[..] {
        ["cargo", "run", "--", "demo"] => RunBy::Demo,
        ["cargo", "test"] => RunBy::Tests,
        ["docker", "compose", "-f", "deploy/compose/compose.yaml", "up", "--build"] => RunBy::Compose,
        ["goodput", "serve" | "engine", ..] => RunBy::Server,
        _ => RunBy::Step,
    }
}

#[test]
fn every_block_of_the_readme_has_a_test() {
    let readme = read("README.md");
    for block in blocks(&readme) {
        let known = ["sh", "yaml", "promql", "text"];
        assert!(known.contains(&block.language.as_str()), "README.md:{}: nothing reads this block", block.line);
    }
    let kinds: BTreeSet<RunBy> = scripts().iter().map(|script| run_by(script)).collect();
    assert_eq!(kinds.len(), 5, "{kinds:?}");
    assert!(root().join("deploy/compose/compose.yaml").exists());
    assert!(read("Cargo.toml").contains("[[bin]]\nname = \"goodput\""), "`cargo install` makes `goodput`");
}

#[test]
fn the_readme_fits_a_window() {
    for (at, line) in read("README.md").lines().enumerate() {
        let picture = line.contains(['▶', '◀', '│', '▲']);
        assert!(!picture || line.chars().count() <= 82, "README.md:{}: the picture is too wide", at + 1);
    }
}

// ---- running -----------------------------------------------------------------------------------

fn goodput(folder: &Path, words: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(BINARY)
        .args(words)
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it is ours");
    child.stdin.take().expect("it is piped").write_all(stdin.as_bytes()).expect("it reads");
    child.wait_with_output().expect("it ends")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether a program is installed; panics without it in CI.
fn is_installed(program: &str, test: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|folder| folder.join(program).is_file()) {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "{program} is missing");
    eprintln!("SKIPPED {test}: {program} is missing");
    false
}

/// Runs a script as a reader would, with `goodput` on the path. Returns its standard output.
fn shell(folder: &Path, script: &str) -> String {
    let own = Path::new(BINARY).parent().expect("a folder").to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(own).chain(std::env::split_paths(&path))).expect("a path");
    // An HTTP error ends the script.
    let script = script.replace("curl ", "curl --fail-with-body ");
    let done = Command::new("sh").args(["-e", "-c", &script]).current_dir(folder).env("PATH", path).output();
    let done = done.expect("a shell");
    assert!(done.status.success(), "{script}{}{}", text(&done.stdout), text(&done.stderr));
    text(&done.stdout)
}

/// The first YAML block of the README.
fn readme_settings() -> String {
    of_language(&read("README.md"), "yaml").remove(0).text
}

const SHORT_SWEEP: &str =
    "--rates 2 --repetitions 1 --warm-up 0.1 --min-seconds 0.2 --max-seconds 1 --first-look 1 --out swept";

#[test]
fn the_readmes_steps_lead_to_a_judged_request() {
    if !is_installed("curl", "the_readmes_steps_lead_to_a_judged_request") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let settings = readme_settings();
    assert!(settings.starts_with("# goodput.yaml\n"));
    let scripts = scripts();
    let server = |command: &str| {
        let script = scripts.iter().find(|script| script.starts_with(command)).expect("the README has it");
        let mut process = Command::new(BINARY);
        process.args(script.split_whitespace().skip(1).map(free_port)).current_dir(folder.path());
        process
    };
    // The engine first: the README offers it last, for readers without one.
    let engine = Running::start(server("goodput engine"), "the engine");
    let moved = settings.replace("http://127.0.0.1:8000", &engine.url);
    assert_ne!(moved, settings, "the engine's address is in its place");
    let free = moved.replace("0.0.0.0:8080", "127.0.0.1:0").replace("127.0.0.1:9090", "127.0.0.1:0");
    assert_eq!(free.matches("127.0.0.1:0").count(), 2, "both ports are in their places");
    fs::write(folder.path().join("goodput.yaml"), free).expect("the folder is ours");
    let mut serve = server("goodput serve");
    serve.arg("--json");
    let gateway = Running::start(serve, "the gateway");
    let first: Value = serde_json::from_str(&gateway.first_line).expect("one line of JSON");
    let admin = first["admin"].as_str().expect("the admin port").to_owned();
    until("the engine is up", || {
        let page = get(&admin, "/metrics").ok()?;
        let mut engines = page.lines().filter(|line| line.starts_with("goodput_engine_up{"));
        engines.any(|line| line.ends_with(" 1.0")).then_some(())
    });

    let mut expected = BTreeMap::from([
        ("goodput check", &["no problem (1 class, 1 pool)", "class      chat (default)"][..]),
        ("curl -N", &["data: [DONE]", "\"id\":\"my-model\""]),
        // Whether the request was met depends on how busy this machine is.
        ("curl -s", &["slo_met_total{", "slo_total{", " 1\n", "\"class\":\"chat\"", "\"total\":1"]),
        ("goodput rules", &["alert: GoodputErrorBudgetBurn"]),
        ("goodput key", &["label: \"prod\"", "blake3: \""]),
        ("goodput sweep", &[]),
        ("goodput plan", &["replicas"]),
    ]);
    for script in scripts.iter().filter(|script| run_by(script) == RunBy::Step) {
        let (clients, operators) = (gateway.address(), admin.trim_start_matches("http://"));
        let moved = script.replace("127.0.0.1:8080", clients).replace("127.0.0.1:9090", operators);
        let mut moved = moved.replace("127.0.0.1:8000", engine.address());
        if script.starts_with("goodput sweep") {
            // One short run in place of most of an hour; 1 is its exit code without a goodput.
            moved = format!("{} {SHORT_SWEEP} || [ $? -eq 1 ]", moved.trim_end());
        }
        let printed = shell(folder.path(), &moved);
        let start = expected.keys().copied().find(|start| script.starts_with(start));
        let Some(parts) = start.and_then(|start| expected.remove(start)) else { panic!("nothing expects `{script}`") };
        for part in parts {
            assert!(printed.contains(part), "{script}: no {part}\n{printed}");
        }
    }
    assert!(expected.is_empty(), "the README has no {expected:?}");
    assert!(folder.path().join("swept/report.html").exists());
    let page = get(&admin, "/").expect("a page for browsers");
    assert!(page.contains("id=\"class-chat\""), "{page}");
    queries_name_what_is_there(&get(&admin, "/metrics").expect("a page"));
    access_lines_have_the_documented_fields(&gateway);
}

fn free_port(word: &str) -> &str {
    if word.starts_with("127.0.0.1:") { "127.0.0.1:0" } else { word }
}

/// `cargo run -- demo`, without `cargo run`: the same program with the same words.
#[test]
fn the_demo_runs_and_its_commands_can_be_pasted() {
    if !is_installed("curl", "the_demo_runs_and_its_commands_can_be_pasted") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let free = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
    let mut demo = Command::new(BINARY);
    demo.arg("demo").args(free).stdout(Stdio::piped()).current_dir(folder.path());
    let mut child = demo.spawn().expect("it is ours");
    let mut output = BufReader::new(child.stdout.take().expect("it is piped"));
    let mut invitation = String::new();
    while !invitation.trim_end().ends_with("/slo") {
        assert!(output.read_line(&mut invitation).expect("text") > 0, "it ended early: {invitation}");
    }
    let widest = invitation.lines().map(|line| line.chars().count()).max();
    let script: Vec<&str> = invitation.lines().filter_map(|line| line.strip_prefix("  ")).collect();
    let script = script.join("\n");
    assert_eq!(script.matches("curl ").count(), 5, "{invitation}");
    let printed = shell(folder.path(), &script);
    for part in ["data: [DONE]", "\"object\":\"list\"", "slo_total{", "\"classes\""] {
        assert!(printed.contains(part), "no {part}\n{printed}");
    }
    let _ = child.kill();
    let _ = child.wait();
    assert!(widest <= Some(80), "{widest:?} columns: {invitation}");

    let readme = read("README.md");
    assert!(readme.contains("`cargo run -- demo --seconds 20 --json` ends by itself"));
    let done = goodput(folder.path(), &[&["demo", "--seconds", "3", "--json"][..], &free].concat(), "");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let told: Value = serde_json::from_slice(&done.stdout).expect("one JSON object");
    assert_eq!(told["classes"].as_array().map(Vec::len), Some(5), "{told}");
}

/// The dashboard file equals the output of the command.
#[test]
fn the_dashboard_that_is_deployed_is_the_one_that_is_printed() {
    let printed = goodput(root(), &["dashboard"], "");
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    let deployed = read("deploy/grafana/goodput.json");
    assert!(text(&printed.stdout) == deployed, "write it anew: goodput dashboard > deploy/grafana/goodput.json");
}

// ---- Prometheus ---------------------------------------------------------------------------------

/// Queries of the README: one per line, comments aside.
fn queries() -> Vec<String> {
    let blocks = of_language(&read("README.md"), "promql");
    let lines = blocks.iter().flat_map(|block| block.text.lines());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

/// Every metric and label of the README's queries is on the page of a gateway that has served.
fn queries_name_what_is_there(page: &str) {
    let queries = queries();
    assert!(queries.len() >= 5, "{queries:?}");
    for query in queries {
        for name in query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            if name.starts_with("slo_") || name.starts_with("goodput_") {
                let series: Vec<&str> = page.lines().filter(|line| line.starts_with(&format!("{name}{{"))).collect();
                assert!(!series.is_empty(), "{query}: no series {name}");
                let labels = query.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
                for label in labels.flat_map(|labels| labels.split(", ")) {
                    assert!(
                        series.iter().all(|line| line.contains(&format!("{label}=\""))),
                        "{query}: {name} has no {label}"
                    );
                }
            }
        }
    }
}

#[test]
fn prometheus_takes_the_readmes_settings_and_queries() {
    if !is_installed("promtool", "prometheus_takes_the_readmes_settings_and_queries") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let check = |what: &str, name: &str, content: &str| {
        let file = folder.path().join(name);
        fs::write(&file, content).expect("the folder is ours");
        let done = Command::new("promtool").args(["check", what]).arg(&file).output().expect("it was found");
        assert!(done.status.success(), "{}{}", text(&done.stdout), text(&done.stderr));
    };
    let scrape = of_language(&read("README.md"), "yaml").remove(1).text;
    assert!(scrape.starts_with("# prometheus.yml\n"));
    check("config", "prometheus.yml", &scrape);
    let rules: Vec<Value> = queries()
        .iter()
        .enumerate()
        .map(|(at, query)| serde_json::json!({"record": format!("query:{at}"), "expr": query}))
        .collect();
    let rules = serde_json::json!({"groups": [{"name": "readme", "rules": rules}]});
    check("rules", "rules.yml", &rules.to_string());
    // The rules of `plan` are for Prometheus too.
    let command = scripts().into_iter().find(|script| script.starts_with("goodput plan")).expect("the README has it");
    fs::write(folder.path().join("goodput.yaml"), readme_settings()).expect("the folder is ours");
    let words: Vec<&str> = command.split_whitespace().skip(1).chain(["--rules"]).collect();
    let planned = goodput(folder.path(), &words, "");
    assert!(planned.status.success(), "{}", text(&planned.stderr));
    check("rules", "baseline.yml", &text(&planned.stdout));
}

// ---- lists in the documents are complete ------------------------------------------------------------

/// The rows of the tables below a heading that begins so: the cells of each.
fn rows_below(document: &str, heading: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in document.lines() {
        if line.starts_with('#') {
            inside = line.trim_start_matches('#').trim().starts_with(heading);
        } else if inside && line.starts_with("| ") && !line.starts_with("| ---") {
            found.push(line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect());
        }
    }
    assert!(!found.is_empty(), "no table below {heading}");
    found
}

/// The code-quoted text of the first cells.
fn first_cells(rows: &[Vec<String>]) -> BTreeSet<String> {
    let quoted = |row: &Vec<String>| row[0].strip_prefix('`')?.split('`').next().map(str::to_owned);
    rows.iter().filter_map(quoted).collect()
}

#[test]
fn every_metric_is_listed_with_its_meaning() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let page = runtime.block_on(async {
        let recorder = Recorder::new(Clock::start(), None);
        let report = EngineReport {
            up: true,
            waiting: Some(0.0),
            running: Some(0.0),
            kv_usage: Some(0.0),
            ..EngineReport::default()
        };
        recorder.engines(vec![(PoolId::from("pool"), EngineId::from("engine:8000"), report)]);
        recorder.page(Format::Text)
    });
    let golden = read("src/record/golden.prom");
    let there: BTreeSet<String> = [page, golden]
        .iter()
        .flat_map(|page| {
            page.lines()
                .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next().map(str::to_owned))
                .collect::<Vec<_>>()
        })
        .collect();
    let listed = first_cells(&rows_below(&read("docs/operations.md"), "Metrics"));
    assert_eq!(listed, there);
}

#[test]
fn every_reason_is_explained() {
    let golden = read("src/record/golden.prom");
    let there = |family: &str| -> BTreeSet<String> {
        let lines = golden.lines().filter(|line| line.starts_with(&format!("{family}{{")));
        lines.filter_map(|line| line.split("reason=\"").nth(1)?.split('"').next().map(str::to_owned)).collect()
    };
    let mut both = there("goodput_slo_missed_total");
    both.extend(there("goodput_slo_excluded_total"));
    assert!(both.len() > 20, "{both:?}");
    assert_eq!(first_cells(&rows_below(&read("docs/operations.md"), "Why did it miss?")), both);
}

fn access_lines_have_the_documented_fields(gateway: &Running) {
    let line = attempt(|| {
        let output = gateway.output();
        output.lines().find(|line| line.contains("\"class\":\"chat\"")).map(str::to_owned)
    });
    let line: Value = serde_json::from_str(&line.expect("an access line")).expect("JSON");
    let fields: BTreeSet<String> = line.as_object().expect("an object").keys().cloned().collect();
    assert_eq!(first_cells(&rows_below(&read("docs/operations.md"), "The access line")), fields);
    assert_eq!((line["class"].as_str(), line["model"].as_str()), (Some("chat"), Some("my-model")));
}

#[test]
fn every_field_of_the_journal_is_explained() {
    let text = |text: &str| Some(text.to_owned());
    let line = JournalLine {
        arrival_unix_ns: 1,
        endpoint: text("/v1/completions"),
        tenant: text("0"),
        class: text("chat"),
        model: text("m"),
        pool: text("a"),
        engine: text("e:1"),
        stream: true,
        choices: Some(1),
        max_output_tokens: Some(1),
        prompt_bytes: Some(1),
        prompt_tokens: Some(1),
        prompt_tokens_source: text("usage"),
        cached_tokens: Some(1),
        output_tokens: Some(1),
        output_tokens_source: text("usage"),
        reasoning_tokens: Some(1),
        prefix: vec!["0".to_owned()],
        attempts: 1,
        status: 200,
        upload_ms: Some(1.0),
        client_wait_ms: Some(1.0),
        queue_ms: Some(1.0),
        ttft_ms: Some(1.0),
        tpot_ms: Some(1.0),
        largest_gap_ms: Some(1.0),
        e2e_ms: Some(1.0),
        total_ms: 1.0,
        outcome: "missed".to_owned(),
        reason: text("ttft"),
        refusal: text("queue_full"),
    };
    let header = JournalHeader::new(&HashKey::from_chance([0; 32]), 1);
    let written = [serde_json::to_value(line).expect("JSON"), serde_json::to_value(header).expect("JSON")];
    let fields = written.iter().flat_map(|line| line.as_object().expect("an object").keys().cloned());
    let rows = rows_below(&read("docs/journal.md"), "Format");
    let named = rows.iter().flat_map(|row| row[0].split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>());
    assert_eq!(named.collect::<BTreeSet<_>>(), fields.collect::<BTreeSet<_>>());
}

#[test]
fn every_command_is_listed() {
    let help = text(&goodput(root(), &["--help"], "").stdout);
    let there: BTreeSet<String> = help
        .lines()
        .skip_while(|line| !line.starts_with("Commands:"))
        .skip(1)
        .take_while(|line| line.starts_with("  "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect();
    let rows = rows_below(&read("docs/operations.md"), "Commands and exit codes");
    let listed = first_cells(&rows);
    let named = listed.iter().filter_map(|cell| cell.strip_prefix("goodput ")?.split(' ').next().map(str::to_owned));
    assert_eq!(named.collect::<BTreeSet<_>>(), there);
}

/// Files and headings that the documents lead to are there.
#[test]
fn links_lead_somewhere() {
    let documents = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(PathBuf::from);
    let pages = fs::read_dir(root().join("docs")).expect("a folder").map(|entry| entry.expect("a file").path());
    let pages = pages.filter(|page| page.extension().is_some_and(|end| end == "md"));
    let runbooks =
        fs::read_dir(root().join("docs/runbooks")).expect("a folder").map(|entry| entry.expect("a file").path());
    for document in documents.into_iter().chain(pages).chain(runbooks) {
        let whole = root().join(&document);
        let text = fs::read_to_string(&whole).expect("it is there");
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.starts_with("http") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { whole.clone() } else { whole.parent().expect("a folder").join(file) };
            assert!(file.exists(), "{}: {target}", document.display());
            if !heading.is_empty() {
                let found = fs::read_to_string(&file)
                    .expect("a page")
                    .lines()
                    .any(|line| line.starts_with('#') && anchor(line) == heading);
                assert!(found, "{}: no heading for {target}", document.display());
            }
        }
    }
}

fn anchor(heading: &str) -> String {
    let plain = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = plain.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

// ---- the settings -----------------------------------------------------------------------------------

#[test]
fn the_tables_of_keys_are_those_of_the_schema() {
    let printed = goodput(root(), &["schema", "--markdown", "docs/configuration.md"], "");
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    let is_same = text(&printed.stdout) == read("docs/configuration.md");
    assert!(
        is_same,
        "write it anew: goodput schema --markdown docs/configuration.md, whose text is in src/config/schema.rs"
    );
}

/// Files and variables that the examples refer to.
struct Desk {
    certificate: String,
    key: String,
}

impl config::Environment for Desk {
    fn variable(&self, name: &str) -> Option<String> {
        Some(format!("the-value-of-{name}"))
    }

    fn file(&self, path: &Path) -> std::io::Result<Vec<u8>> {
        Ok(match path.to_str() {
            Some("tls.crt") => self.certificate.clone(),
            Some("tls.key") => self.key.clone(),
            _ if path.extension().is_some_and(|end| end == "pem") => self.certificate.clone(),
            _ if path.extension().is_some_and(|end| end == "headers") => "authorization: Basic one".to_owned(),
            _ => "one-line-of-some-length".to_owned(),
        }
        .into_bytes())
    }
}

const GROUND: &str = "
slo_classes:
  - {slo_class: chat, joint_attainment_target: 0.9}
  - {slo_class: voice, joint_attainment_target: 0.9}
  - {slo_class: agent, joint_attainment_target: 0.9}
  - {slo_class: batch, joint_attainment_target: 0.9}
default_class: chat
pools:
  - {pool: main, engines: [{url: 'http://a:1'}]}
  - {pool: spare, engines: [{url: 'http://b:1'}]}
tenants:
  - {tenant: acme, keys: [{label: ivr, blake3: '0000000000000000000000000000000000000000000000000000000000000000'}]}
";

/// The examples of configuration.md are pieces: each is laid over a small whole, and loads.
#[test]
fn the_examples_of_the_settings_load() {
    let made = rcgen::generate_simple_self_signed(["engine".to_owned()]).expect("a certificate");
    let desk = Desk { certificate: made.cert.pem(), key: made.signing_key.serialize_pem() };
    let examples = of_language(&read("docs/configuration.md"), "yaml");
    assert!(examples.len() > 15);
    for example in examples {
        let mut whole = yaml(GROUND);
        let piece = yaml(&example.text);
        for (key, value) in piece.as_object().expect("keys") {
            match (&mut whole[key.as_str()], value) {
                (Value::Array(ground), Value::Array(laid)) => laid.iter().for_each(|item| lay(ground, item)),
                (ground, laid) => *ground = laid.clone(),
            }
        }
        if let Err(problems) = config::load(&whole.to_string(), &desk) {
            let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
            panic!("docs/configuration.md:{}:\n  {}", example.line, all.join("\n  "));
        }
    }
}

/// As the gateway reads it: `on` and `off` are words.
fn yaml(text: &str) -> Value {
    let options = serde_yaml::options! { strict_booleans: true };
    serde_yaml::from_str_with_options(text, options).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// An item of the same name makes way.
fn lay(ground: &mut Vec<Value>, item: &Value) {
    let name =
        |item: &Value| ["slo_class", "pool", "tenant"].iter().find_map(|key| item[*key].as_str().map(str::to_owned));
    let laid = name(item);
    match ground.iter_mut().find(|old| laid.is_some() && name(old) == laid) {
        Some(old) => *old = item.clone(),
        None => ground.push(item.clone()),
    }
}

/// The README's settings have no problem as they are.
#[test]
fn the_readmes_settings_are_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("goodput.yaml"), readme_settings()).expect("the folder is ours");
    let checked = goodput(folder.path(), &["check", "-c", "goodput.yaml"], "");
    assert_eq!(text(&checked.stdout), "goodput.yaml: no problem (1 class, 1 pool)\n");
}

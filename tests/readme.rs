//! The README does what it says: every command in it is run, every block is read by the program
//! it is for, and what the documents list is what there is.
//!
//! Processes and sockets are real; ports are replaced by free ones. A test waits for a
//! condition, a bounded number of times. Where `promtool` is missing, the test that needs it
//! says so; with `CI` set it fails instead.

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
use running::{Running, ask, attempt, get, until};
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

/// The parts of a pipeline, each as its words: single quotes and lines that go on are understood.
fn pipeline(line: &str) -> Vec<Vec<String>> {
    let (mut parts, mut word, mut begun, mut quoted) = (vec![Vec::new()], String::new(), false, false);
    for c in line.chars() {
        match c {
            '\'' => (quoted, begun) = (!quoted, true),
            c if quoted => word.push(c),
            c if c.is_whitespace() || c == '|' => {
                if std::mem::take(&mut begun) {
                    parts.last_mut().expect("there is always one").push(std::mem::take(&mut word));
                }
                if c == '|' {
                    parts.push(Vec::new());
                }
            }
            c => {
                begun = true;
                word.push(c);
            }
        }
    }
    if begun {
        parts.last_mut().expect("there is always one").push(word);
    }
    parts
}

/// The commands of a shell block: a line that ends with `\`, or inside quotes, goes on.
fn commands(block: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut goes_on = false;
    for line in block.lines() {
        let (text, more) = match line.strip_suffix('\\') {
            Some(text) => (text, true),
            None => (line, false),
        };
        match goes_on {
            true => found.last_mut().expect("it goes on").push_str(text),
            false if text.trim().is_empty() => continue,
            false => found.push(text.to_owned()),
        }
        let open = found.last().is_some_and(|command| command.matches('\'').count() % 2 == 1);
        goes_on = more || open;
    }
    found
}

/// All commands of the README, in order.
fn readme_commands() -> Vec<String> {
    of_language(&read("README.md"), "sh").iter().flat_map(|block| commands(&block.text)).collect()
}

/// Who runs a command of the README.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RunBy {
    /// `the_demo_runs_and_what_it_prints_can_be_pasted`
    Demo,
    /// Whoever reads this: it is what runs this file. `tests/architecture.rs` holds `.ci/run` to it.
    Tests,
    /// `the_way_to_ones_own_engine`
    Way,
    /// `a_key_is_made`
    Key,
    /// Its services run in `tests/e2e`; `tests/architecture.rs` checks the file. Docker is not at hand.
    Compose,
}

fn run_by(command: &str) -> Option<RunBy> {
    let words: Vec<&str> = command.split_whitespace().collect();
    Some(match words[..] {
        ["cargo", "run", "--", "demo"] => RunBy::Demo,
        ["cargo", "test"] => RunBy::Tests,
        ["goodput", "check" | "serve" | "engine" | "plan" | "rules" | "sweep", ..] | ["curl", ..] | ["echo", ..] => {
            RunBy::Way
        }
        ["goodput", "key", ..] => RunBy::Key,
        ["docker", "compose", "-f", "deploy/compose/compose.yaml", "up", "--build"] => RunBy::Compose,
        _ => return None,
    })
}

#[test]
fn every_block_of_the_readme_has_a_test() {
    let readme = read("README.md");
    for block in blocks(&readme) {
        let known = ["sh", "yaml", "promql", "text"];
        assert!(known.contains(&block.language.as_str()), "README.md:{}: nothing reads this block", block.line);
    }
    let mut kinds = BTreeSet::new();
    for command in readme_commands() {
        kinds.insert(run_by(&command).unwrap_or_else(|| panic!("README.md: nothing runs `{command}`")));
    }
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

/// A `curl` line, as the request that it would send.
struct Curl {
    authority: String,
    request: String,
}

impl Curl {
    fn read(words: &[String]) -> Curl {
        let (mut url, mut headers, mut body) = (None, Vec::new(), None);
        let mut words = words.iter().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                "-N" | "-s" | "-i" | "-si" => {}
                "-H" => headers.push(words.next().expect("a header").clone()),
                "-d" => body = words.next().cloned(),
                word if word.starts_with("http://") && url.is_none() => url = Some(word.to_owned()),
                other => panic!("curl: nothing understands {other:?}"),
            }
        }
        let url = url.expect("a URL");
        let rest = url.strip_prefix("http://").expect("http");
        let (authority, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        let method = if body.is_some() { "POST" } else { "GET" };
        let mut request = format!("{method} {path} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n");
        headers.iter().for_each(|header| request.push_str(&format!("{header}\r\n")));
        let body = body.unwrap_or_default();
        request.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
        Curl { authority: authority.to_owned(), request }
    }

    /// The body of a 200.
    fn send(&self, address: &str) -> String {
        ask(address, &self.request).unwrap_or_else(|answer| panic!("{}\n{answer}", self.request))
    }
}

/// The lines of `text` that `grep '^...'` would leave, where the pipe ends in one.
fn grepped(parts: &[Vec<String>], answer: String) -> String {
    match parts {
        [_] => answer,
        [_, grep] if grep[0] == "grep" => {
            let start = grep[1].strip_prefix('^').expect("a start of lines");
            answer.lines().filter(|line| line.starts_with(start)).map(|line| format!("{line}\n")).collect()
        }
        other => panic!("nothing understands {other:?}"),
    }
}

/// The first YAML block of the README, with its engine, and with ports of its own.
fn readme_settings() -> String {
    of_language(&read("README.md"), "yaml").remove(0).text
}

#[test]
fn the_way_to_ones_own_engine() {
    let folder = tempfile::tempdir().expect("a folder");
    let settings = readme_settings();
    assert!(settings.starts_with("# goodput.yaml\n"));
    fs::write(folder.path().join("goodput.yaml"), &settings).expect("the folder is ours");

    let mut running: BTreeMap<&str, Running> = BTreeMap::new();
    let (mut admin, mut asked, mut seen) = (String::new(), 0, BTreeSet::new());
    // The engine first: the README offers it last, for those who have none.
    let mut commands = readme_commands();
    commands.retain(|command| run_by(command) == Some(RunBy::Way));
    commands.sort_by_key(|command| !command.starts_with("goodput engine"));
    for command in &commands {
        let parts = pipeline(command);
        let words: Vec<&str> = parts.last().expect("a command").iter().map(String::as_str).collect();
        match (parts[0][0].as_str(), words[0], words.get(1).copied()) {
            ("goodput", _, Some("engine")) => {
                let free: Vec<&str> = words[1..].iter().map(|word| free_port(word)).collect();
                let mut engine = Command::new(BINARY);
                engine.args(free);
                running.insert("engine", Running::start(engine, "the engine"));
            }
            ("goodput", _, Some("serve")) => {
                let moved = settings.replace("http://127.0.0.1:8000", &running["engine"].url);
                assert_ne!(moved, settings, "the engine's address is in its place");
                let free = moved.replace("0.0.0.0:8080", "127.0.0.1:0").replace("127.0.0.1:9090", "127.0.0.1:0");
                assert_eq!(free.matches("127.0.0.1:0").count(), 2, "both ports are in their places");
                fs::write(folder.path().join("goodput.yaml"), free).expect("the folder is ours");
                let mut serve = Command::new(BINARY);
                serve.args(&words[1..]).arg("--json").current_dir(folder.path());
                let gateway = Running::start(serve, "the gateway");
                let told: Value = serde_json::from_str(&gateway.first_line).expect("one line of JSON");
                admin = told["admin"].as_str().expect("the operators' port").to_owned();
                until("the engine is up", || {
                    let page = get(&admin, "/metrics").ok()?;
                    let mut engines = page.lines().filter(|line| line.starts_with("goodput_engine_up{"));
                    engines.any(|line| line.ends_with(" 1.0")).then_some(())
                });
                running.insert("gateway", gateway);
            }
            ("goodput", _, Some("check" | "plan")) => {
                let checked = goodput(folder.path(), &words[1..], "");
                assert!(checked.status.success(), "{command}: {}", text(&checked.stdout));
            }
            ("goodput", _, Some("sweep")) => {
                // The whole of it takes the better part of an hour: here is one rate, for a moment.
                let short = "--rates 2 --repetitions 1 --warm-up 0.1 --min-seconds 0.2 --max-seconds 1 --first-look 1 --out swept";
                let url = running["engine"].url.as_str();
                let words = words[1..].iter().map(|word| if *word == "http://127.0.0.1:8000" { url } else { word });
                let words: Vec<&str> = words.chain(short.split(' ')).collect();
                let swept = goodput(folder.path(), &words, "");
                // Whether promises are kept depends on how busy this machine is.
                assert!(matches!(swept.status.code(), Some(0 | 1)), "{command}: {}", text(&swept.stderr));
                assert!(folder.path().join("swept/report.html").exists());
            }
            ("goodput", _, Some("rules")) => {
                let rules = goodput(folder.path(), &words[1..], "");
                let told = text(&rules.stdout);
                assert!(rules.status.success() && told.contains("alert: GoodputErrorBudgetBurn"), "{told}");
            }
            ("echo", "goodput", Some("check")) => {
                let explained = goodput(folder.path(), &words[1..], &parts[0][1]);
                let told = text(&explained.stdout);
                assert!(explained.status.success() && told.contains("class      chat (default)"), "{told}");
            }
            ("curl", ..) => {
                let curl = Curl::read(&parts[0]);
                let (address, port) = match curl.authority.as_str() {
                    "127.0.0.1:8080" => (running["gateway"].url.clone(), "clients"),
                    "127.0.0.1:9090" => (admin.clone(), "operators"),
                    other => panic!("{other} is nobody's default"),
                };
                let answer = grepped(&parts, curl.send(&address));
                seen.insert(port);
                asked += usize::from(curl.request.starts_with("POST"));
                expect_answer(&curl, &answer, asked);
            }
            _ => panic!("nothing runs `{command}`"),
        }
    }
    assert_eq!((asked, seen.len()), (1, 2));
    let page = get(&admin, "/").expect("a page for browsers");
    assert!(page.contains("id=\"class-chat\""), "{page}");
    queries_name_what_is_there(&get(&admin, "/metrics").expect("a page"));
    access_lines_have_the_documented_fields(&running["gateway"]);
}

/// What a reader expects to see after each `curl` of the README.
fn expect_answer(curl: &Curl, answer: &str, asked: usize) {
    let path = curl.request.split(' ').nth(1).unwrap_or_default();
    match path {
        "/v1/chat/completions" => assert!(answer.contains("data: [DONE]"), "{answer}"),
        "/v1/models" => assert!(answer.contains("\"id\":\"my-model\""), "{answer}"),
        "/metrics" => {
            let total = |name: &str| -> f64 {
                let of = answer.lines().filter(|line| line.starts_with(&format!("{name}{{")));
                of.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
            };
            // Whether it was met depends on how busy this machine is.
            assert_eq!(total("slo_total"), asked as f64, "{answer}");
            assert!(total("slo_met_total") <= asked as f64 && answer.contains("slo_met_total{"), "{answer}");
        }
        "/slo" => assert!(answer.contains("\"class\":\"chat\"") && answer.contains("\"total\":1"), "{answer}"),
        other => panic!("nobody said what {other} answers"),
    }
}

fn free_port(word: &str) -> &str {
    if word.starts_with("127.0.0.1:") { "127.0.0.1:0" } else { word }
}

/// `cargo run -- demo`, without `cargo run`: the same program with the same words.
#[test]
fn the_demo_runs_and_what_it_prints_can_be_pasted() {
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
    let (mut sent, mut widest) = (0, 0);
    for line in invitation.lines() {
        widest = widest.max(line.chars().count());
    }
    let indented: Vec<&str> = invitation.lines().filter_map(|line| line.strip_prefix("  ")).collect();
    for command in commands(&indented.join("\n")) {
        let parts = pipeline(&command);
        let curl = Curl::read(&parts[0]);
        let answer = grepped(&parts, curl.send(&format!("http://{}", curl.authority)));
        assert!(!answer.is_empty(), "{command}");
        sent += 1;
    }
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!(sent, 5, "{invitation}");
    assert!(widest <= 80, "{widest} columns: {invitation}");

    let readme = read("README.md");
    assert!(readme.contains("`cargo run -- demo --seconds 20 --json` ends by itself"));
    let done = goodput(folder.path(), &[&["demo", "--seconds", "3", "--json"][..], &free].concat(), "");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let told: Value = serde_json::from_slice(&done.stdout).expect("one JSON object");
    assert_eq!(told["classes"].as_array().map(Vec::len), Some(5), "{told}");
}

/// What is to be imported is what the program writes.
#[test]
fn the_dashboard_that_is_deployed_is_the_one_that_is_printed() {
    let printed = goodput(root(), &["dashboard"], "");
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    let deployed = read("deploy/grafana/goodput.json");
    assert!(text(&printed.stdout) == deployed, "write it anew: goodput dashboard > deploy/grafana/goodput.json");
}

#[test]
fn a_key_is_made() {
    let commands = readme_commands();
    let command = commands.iter().find(|command| run_by(command) == Some(RunBy::Key)).expect("the README makes a key");
    let words: Vec<&str> = command.split_whitespace().skip(1).collect();
    let made = goodput(root(), &words, "");
    let told = text(&made.stdout);
    assert!(made.status.success() && told.contains("label: \"prod\"") && told.contains("blake3: \""), "{told}");
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
    let path = std::env::var_os("PATH").unwrap_or_default();
    let Some(promtool) = std::env::split_paths(&path).map(|folder| folder.join("promtool")).find(|file| file.is_file())
    else {
        assert!(std::env::var_os("CI").is_none(), "promtool is missing; install Prometheus");
        eprintln!("SKIPPED prometheus_takes_the_readmes_settings_and_queries: promtool is missing; install Prometheus");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let check = |what: &str, name: &str, content: &str| {
        let file = folder.path().join(name);
        fs::write(&file, content).expect("the folder is ours");
        let done = Command::new(&promtool).args(["check", what]).arg(&file).output().expect("it was found");
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
    // What `plan` says of the moment for a new sweep is for Prometheus, too.
    let command =
        readme_commands().into_iter().find(|command| command.starts_with("goodput plan")).expect("it is there");
    fs::write(folder.path().join("goodput.yaml"), readme_settings()).expect("the folder is ours");
    let words: Vec<&str> = command.split_whitespace().skip(1).chain(["--rules"]).collect();
    let planned = goodput(folder.path(), &words, "");
    assert!(planned.status.success(), "{}", text(&planned.stderr));
    check("rules", "baseline.yml", &text(&planned.stdout));
}

// ---- what the documents list is what there is ------------------------------------------------------

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

/// What stands in the first cells, in code quotes.
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

/// What the schema says about a key.
#[derive(Debug, PartialEq, Eq)]
struct Key {
    required: bool,
    later: bool,
    default: Option<String>,
}

/// The keys of a block of the schema.
fn keys_of(block: &Value) -> BTreeMap<String, Key> {
    let required: Vec<&str> = block["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let key = |(name, value): (&String, &Value)| {
        let said = value["description"].as_str().unwrap_or_default();
        let default = said.split_once("Default: ").map(|(_, default)| bare(default.trim_end_matches('.')));
        let later = value.get("not").is_some();
        (name.clone(), Key { required: required.contains(&name.as_str()), later, default })
    };
    block["properties"].as_object().into_iter().flatten().map(key).collect()
}

fn bare(text: &str) -> String {
    text.replace('`', "")
}

/// The name of the block that a value is, or holds.
fn block_in(value: &Value) -> Option<&str> {
    value.as_object()?;
    if let Some(name) = value["$ref"].as_str() {
        return name.strip_prefix("#/$defs/");
    }
    let inside = [&value["items"], &value["additionalProperties"]];
    let choices = value["anyOf"].as_array().into_iter().flatten();
    inside.into_iter().chain(choices).find_map(block_in)
}

/// Follows a path such as `pools[].engine` to the name of its block.
fn block_at(schema: &Value, path: &str) -> String {
    let mut name: Option<String> = None;
    for step in path.split('.').filter(|step| *step != "NAME") {
        let here = name.as_ref().map_or(schema, |name| &schema["$defs"][name.as_str()]);
        let value = &here["properties"][step.trim_end_matches("[]")];
        name = Some(block_in(value).unwrap_or_else(|| panic!("{path}: {step} is no block")).to_owned());
    }
    name.expect("a path")
}

#[test]
fn every_key_of_the_settings_is_documented_as_it_is() {
    let schema = config::schema();
    let page = read("docs/configuration.md");
    let mut documented = BTreeSet::new();
    for heading in page.lines().filter_map(|line| line.strip_prefix("## ")) {
        let path = heading.trim_matches('`');
        let block = match path {
            "The whole file" => &schema,
            path => {
                let name = block_at(&schema, path);
                assert!(documented.insert(name.clone()), "{name} is documented twice");
                &schema["$defs"][name.as_str()]
            }
        };
        let listed: BTreeMap<String, Key> = rows_below(&page, heading)
            .into_iter()
            .skip(1)
            .map(|row| {
                let default = bare(&row[2]);
                let (required, later) = (default == "required", default == "not available yet");
                let default = (!required && !later && !default.is_empty()).then_some(default);
                (bare(&row[0]), Key { required, later, default })
            })
            .collect();
        assert_eq!(listed, keys_of(block), "docs/configuration.md, {heading}");
    }
    let all: BTreeSet<String> = schema["$defs"].as_object().expect("blocks").keys().cloned().collect();
    assert_eq!(documented, all);
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

/// The README's own settings have no problem as they stand: nothing is to be filled in to try.
#[test]
fn the_readmes_settings_are_whole() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("goodput.yaml"), readme_settings()).expect("the folder is ours");
    let checked = goodput(folder.path(), &["check", "-c", "goodput.yaml"], "");
    assert_eq!(text(&checked.stdout), "goodput.yaml: no problem (1 class, 1 pool)\n");
}

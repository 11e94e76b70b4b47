//! The gateway between real parts: official SDKs before it, engines behind it, a real
//! Prometheus beside it. Real processes, real sockets, real time.
//!
//! `tests/e2e/prepare.sh` fetches the parts. A test whose part is missing says so and holds
//! nothing, except where `CI` is set: there it fails. `GOODPUT_E2E_PARTS` names another folder
//! than `target` to look for them in.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

/// Why a test cannot run here.
type Missing = String;

/// Runs a test that may lack a part.
fn with_parts(name: &str, test: impl FnOnce() -> Result<(), Missing>) {
    if let Err(missing) = test() {
        assert!(std::env::var_os("CI").is_none(), "{name}: {missing}");
        eprintln!("SKIPPED {name}: {missing}");
    }
}

#[test]
fn the_simulated_engine_satisfies_the_sdks_by_itself() {
    with_parts("sdks against the engine", || {
        let engine = Running::engine(&[]);
        for sdk in [Sdk::openai_python()?, Sdk::anthropic_python()?, Sdk::openai_node()?] {
            sdk.drive(&engine.url, "sim", "");
        }
        Ok(())
    });
}

#[test]
fn openai_python_through_the_gateway() {
    with_parts("openai-python", || Sdk::openai_python().map(through_the_gateway));
}

#[test]
fn anthropic_python_through_the_gateway() {
    with_parts("anthropic-python", || Sdk::anthropic_python().map(through_the_gateway));
}

#[test]
fn openai_node_through_the_gateway() {
    with_parts("openai-node", || Sdk::openai_node().map(through_the_gateway));
}

/// Two simulated engines that reason behind a gateway: what the SDK's users see, and afterwards
/// what the gateway has counted of it.
fn through_the_gateway(sdk: Sdk) {
    let engines = [Running::engine(&["--seed", "7"]), Running::engine(&["--seed", "7"])];
    let gateway = Gateway::before(&engines.each_ref().map(|engine| engine.url.as_str()), "vllm", "sim");
    sdk.drive(&gateway.running.url, "sim", "");
    gateway.is_quiet_and_adds_up();
    for engine in &engines {
        until("the engines are idle: streams that clients left were left there, too", || {
            let page = get(&engine.url, "/metrics").ok()?;
            (sum(&page, "vllm:num_requests_running") + sum(&page, "vllm:num_requests_waiting") == 0.0).then_some(())
        });
    }
}

#[test]
fn a_real_llama_cpp_server_behind_the_gateway() {
    with_parts("llama.cpp", || {
        let python = python()?;
        let script = scripts().join("llamacpp_engine.py");
        let mut command = Command::new(python);
        command.arg(script).stdin(Stdio::piped());
        let engine = Running::start(command, "the llama.cpp server");
        let gateway = Gateway::before(&[&engine.url], "llama_cpp", "tiny");
        let lacks = "embeddings,sequence_numbers,strictness,tools";
        for sdk in [Sdk::openai_python()?, Sdk::anthropic_python()?] {
            sdk.drive(&gateway.running.url, "tiny", lacks);
        }
        gateway.is_quiet_and_adds_up();
        Ok(())
    });
}

#[test]
fn a_real_prometheus_reads_the_true_counts() {
    with_parts("prometheus", || {
        let binary = find("prometheus", "install it: apt-get install prometheus")?;
        let engine = Running::engine(&[]);
        let gateway = Gateway::before(&[&engine.url], "vllm", "sim");
        let prometheus = Prometheus::of(&binary, &gateway.admin);
        let chat = r#"{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":4,"stream":true}"#;
        for _ in 0..5 {
            assert!(post(&gateway.running.url, "/v1/chat/completions", "", chat).contains("[DONE]"));
        }
        // Nobody can keep a promise of a microsecond.
        for _ in 0..3 {
            assert!(post(&gateway.running.url, "/v1/chat/completions", "x-slo-class: strict\r\n", chat).contains("[DONE]"));
        }
        let refused = post(&gateway.running.url, "/v1/chat/completions", "", r#"{"model":"sim","messages":[],"n":"x"}"#);
        assert!(refused.contains("error"), "{refused}");
        for (query, value) in [
            (r#"sum(slo_total{class="chat"})"#, 5.0),
            (r#"sum(slo_met_total{class="chat"})"#, 5.0),
            (r#"sum(slo_total{class="strict"})"#, 3.0),
            (r#"sum(slo_met_total{class="strict"})"#, 0.0),
            (r#"sum(slo_total)"#, 8.0),
            (r#"sum(goodput_requests_finished_total)"#, 9.0),
            (r#"sum(goodput_slo_excluded_total{reason="invalid_request"})"#, 1.0),
        ] {
            prometheus.until(query, value);
        }
        Ok(())
    });
}

/// A client's library with the script that drives it.
struct Sdk {
    program: PathBuf,
    script: PathBuf,
    modules: Option<PathBuf>,
}

impl Sdk {
    fn openai_python() -> Result<Sdk, Missing> {
        Sdk::python("openai", "sdk_openai.py")
    }

    fn anthropic_python() -> Result<Sdk, Missing> {
        Sdk::python("anthropic", "sdk_anthropic.py")
    }

    fn python(package: &str, script: &str) -> Result<Sdk, Missing> {
        let program = python()?;
        let there = Command::new(&program).args(["-c", &format!("import {package}")]).stderr(Stdio::null()).status();
        match there {
            Ok(status) if status.success() => Ok(Sdk { program, script: scripts().join(script), modules: None }),
            _ => Err(format!("the Python package {package} is missing; run tests/e2e/prepare.sh")),
        }
    }

    fn openai_node() -> Result<Sdk, Missing> {
        let program = find("node", "install Node")?;
        let modules = parts().join("e2e-node/node_modules");
        if !modules.join("openai").is_dir() {
            return Err("the Node package openai is missing; run tests/e2e/prepare.sh".to_owned());
        }
        Ok(Sdk { program, script: scripts().join("sdk_openai.mjs"), modules: Some(modules) })
    }

    /// Runs the script against a service; every step of it must hold.
    fn drive(&self, url: &str, model: &str, lacks: &str) {
        let mut command = Command::new(&self.program);
        command.arg(&self.script).env("GOODPUT_URL", url).env("GOODPUT_MODEL", model).env("GOODPUT_WITHOUT", lacks);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        // No proxy of the machine may stand between them.
        for proxy in ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
            command.env_remove(proxy);
        }
        if let Some(modules) = &self.modules {
            command.env("GOODPUT_NODE_MODULES", modules);
        }
        let done = command.output().expect("the program was found");
        let said = String::from_utf8_lossy(&done.stdout);
        let script = self.script.display();
        assert!(done.status.success(), "{script}\n{said}\n{}", String::from_utf8_lossy(&done.stderr));
        eprintln!("{script}: {}", said.lines().last().unwrap_or_default());
    }
}

/// A process that serves; it ends with the test.
struct Running {
    child: Child,
    url: String,
    first_line: String,
    _files: Option<tempfile::TempDir>,
}

impl Running {
    fn engine(more: &[&str]) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
        command.args(["engine", "--listen", "127.0.0.1:0", "--model", "sim", "--speed", "4"]).args(more);
        Running::start(command, "the simulated engine")
    }

    /// Starts a process that says on its first line of output where it listens.
    fn start(mut command: Command, what: &str) -> Running {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut output = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut first_line = String::new();
        output.read_line(&mut first_line).expect("text");
        // Whatever it says later is read and dropped, so that it never blocks.
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        let json = serde_json::from_str::<Value>(&first_line).ok();
        let told = json.as_ref().and_then(|json| json["listening"].as_str());
        let told = told.or_else(|| first_line.trim().strip_prefix("listening on "));
        let Some(told) = told else { panic!("{what} did not say where it listens, but {first_line:?}") };
        let url = if told.starts_with("http") { told.to_owned() } else { format!("http://{told}") };
        Running { child, url, first_line, _files: None }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A gateway with an easy class `chat` and a class `strict` that nobody can keep.
struct Gateway {
    running: Running,
    admin: String,
}

impl Gateway {
    fn before(engines: &[&str], kind: &str, model: &str) -> Gateway {
        let folder = tempfile::tempdir().expect("a folder for the settings");
        let urls: Vec<String> = engines.iter().map(|url| format!("{{url: \"{url}\"}}")).collect();
        let yaml = format!(
            r#"
listen: {{address: "127.0.0.1:0"}}
admin: {{address: "127.0.0.1:0"}}
slo_classes:
  - slo_class: chat
    objectives:
      ttft_seconds: {{threshold: 30, attainment: 0.95}}
      tpot_seconds: {{threshold: 5, attainment: 0.95}}
    joint_attainment_target: 0.95
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
    engine: {{kind: {kind}}}
routes:
  - {{model: [{model}], pools: [main]}}
"#,
            urls.join(", ")
        );
        let file = folder.path().join("goodput.yaml");
        std::fs::write(&file, yaml).expect("the folder is ours");
        let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
        command.arg("serve").arg("--config").arg(&file).arg("--json");
        let mut running = Running::start(command, "the gateway");
        running._files = Some(folder);
        let told: Value = serde_json::from_str(&running.first_line).expect("one line of JSON");
        let admin = format!("http://{}", told["admin"].as_str().expect("the operators' port"));
        until("the gateway is ready", || get(&admin, "/readyz").ok().map(|_| ()));
        Gateway { running, admin }
    }

    /// Nothing is left in flight, and every request has exactly one outcome.
    fn is_quiet_and_adds_up(&self) {
        let page = until("nothing is in flight", || {
            let page = get(&self.admin, "/metrics").ok()?;
            (sum(&page, "goodput_in_flight") == 0.0).then_some(page)
        });
        let finished = outcomes(&page);
        let counted: f64 = finished.values().sum();
        assert!(counted > 0.0, "{page}");
        let of = |outcome: &str| finished.get(outcome).copied().unwrap_or(0.0);
        assert_eq!(of("met") + of("missed"), sum(&page, "slo_total"), "{finished:?}");
        assert_eq!(of("met"), sum(&page, "slo_met_total"), "{finished:?}");
        assert_eq!(of("missed"), sum(&page, "goodput_slo_missed_total"), "{finished:?}");
        assert_eq!(of("excluded"), sum(&page, "goodput_slo_excluded_total"), "{finished:?}");
        assert_eq!(of("missed"), 0.0, "the promises are easy: {page}");
    }
}

/// `goodput_requests_finished_total` by outcome.
fn outcomes(page: &str) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("goodput_requests_finished_total{")) {
        let Some((_, rest)) = line.split_once("outcome=\"") else { continue };
        let Some((outcome, _)) = rest.split_once('"') else { continue };
        *found.entry(outcome.to_owned()).or_default() += value(line);
    }
    found
}

/// The sum of all series of a family.
fn sum(page: &str, family: &str) -> f64 {
    let is_of = |line: &&str| line.strip_prefix(family).is_some_and(|rest| rest.starts_with(['{', ' ']));
    page.lines().filter(is_of).map(value).sum()
}

fn value(line: &str) -> f64 {
    line.rsplit(' ').next().and_then(|text| text.parse().ok()).unwrap_or(f64::NAN)
}

struct Prometheus {
    child: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    fn of(binary: &Path, admin: &str) -> Prometheus {
        let folder = tempfile::tempdir().expect("a folder for its data");
        let target = admin.strip_prefix("http://").expect("an address");
        let settings = format!(
            "global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}\nscrape_configs: [{{job_name: goodput, static_configs: [{{targets: [\"{target}\"]}}]}}]\n"
        );
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, settings).expect("the folder is ours");
        let address = free_address();
        let child = Command::new(binary)
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=error")
            .stdout(Stdio::null())
            .spawn()
            .expect("the program was found");
        let url = format!("http://{address}");
        until("Prometheus is ready", || get(&url, "/-/ready").ok().map(|_| ()));
        Prometheus { child, url, _folder: folder }
    }

    /// Waits until a query has this value.
    fn until(&self, query: &str, expected: f64) {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let mut last = String::new();
        let found = attempt(|| {
            last = get(&self.url, &format!("/api/v1/query?query={encoded}")).ok()?;
            let answer: Value = serde_json::from_str(&last).ok()?;
            let value: f64 = answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()?;
            (value == expected).then_some(())
        });
        assert!(found.is_some(), "{query} never became {expected}: {last}");
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that was free a moment ago, for programs that cannot take port 0.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound")
}

/// Tries until something is there: a bounded number of times, with a pause between.
fn attempt<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..300 {
        if let Some(found) = look() {
            return Some(found);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    None
}

fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    attempt(look).unwrap_or_else(|| panic!("it never came true that {what}"))
}

fn get(url: &str, path: &str) -> Result<String, String> {
    ask(url, &format!("GET {path} HTTP/1.1\r\nhost: it\r\nconnection: close\r\n\r\n"))
}

fn post(url: &str, path: &str, headers: &str, body: &str) -> String {
    let head = format!("POST {path} HTTP/1.1\r\nhost: it\r\nconnection: close\r\ncontent-type: application/json\r\n");
    let request = format!("{head}{headers}content-length: {}\r\n\r\n{body}", body.len());
    ask(url, &request).unwrap_or_else(|answer| answer)
}

/// Sends a request and returns the body of a 200; the whole answer, or why there is none, is
/// the error. Chunk framing is left in: only its text is looked at.
fn ask(url: &str, request: &str) -> Result<String, String> {
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let read = || -> std::io::Result<String> {
        let mut socket = TcpStream::connect(address)?;
        socket.set_read_timeout(Some(Duration::from_secs(30)))?;
        socket.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    let answer = read().map_err(|error| error.to_string())?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.starts_with("HTTP/1.1 200") => Ok(body.to_owned()),
        _ => Err(answer),
    }
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e")
}

/// Where `prepare.sh` has put things.
fn parts() -> PathBuf {
    let beside = || Path::new(env!("CARGO_TARGET_TMPDIR")).parent().map(Path::to_path_buf).unwrap_or_default();
    std::env::var_os("GOODPUT_E2E_PARTS").map_or_else(beside, PathBuf::from)
}

fn python() -> Result<PathBuf, Missing> {
    let python = parts().join("e2e-venv/bin/python");
    if python.is_file() { Ok(python) } else { Err("no Python environment; run tests/e2e/prepare.sh".to_owned()) }
}

/// A program on the path.
fn find(name: &str, advice: &str) -> Result<PathBuf, Missing> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| format!("{name} is missing; {advice}"))
}

//! Behaviour between processes: a crashing engine, a gateway that is shut down, and all of its output. Needs
//! only our own binary.

use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command};

use crate::gateway::{Gateway, Setup, settings, sum, sum_where};
use crate::running::{Open, Running, get, post, until};
use crate::traces::Collector;

pub const CHAT: &str = "/v1/chat/completions";

pub fn stream_of(tokens: u32) -> String {
    format!(
        r#"{{"model":"sim","messages":[{{"role":"user","content":"hello"}}],"max_tokens":{tokens},"stream":true,"ignore_eos":true}}"#
    )
}

#[test]
fn an_engine_that_dies_in_mid_stream_is_one_miss_and_the_other_one_serves_on() {
    let slow = ["--speed", "0.2"];
    let mut engines = [Running::engine(&slow), Running::engine(&slow)];
    let gateway = Gateway::start(&Setup { engines: &engines.each_ref(), ..Setup::default() });
    let mut answer = Open::post(&gateway.running.url, CHAT, &stream_of(2000));
    answer.read_until(r#""content":" "#);
    let is_running =
        |engine: &Running| get(&engine.url, "/metrics").is_ok_and(|page| sum(&page, "vllm:num_requests_running") > 0.0);
    let busy = engines.iter().position(is_running).expect("one of them has it");
    engines[busy].kill();
    answer.read_to_end();
    assert!(answer.read.contains(r#"data: {"error":"#), "{}", answer.read);
    assert!(!answer.read.contains("[DONE]"), "{}", answer.read);
    for _ in 0..6 {
        let next = post(&gateway.running.url, CHAT, "", &stream_of(3));
        assert!(next.as_ref().is_ok_and(|next| next.contains("[DONE]")), "{next:?}");
    }
    let page = gateway.adds_up();
    assert_eq!((sum(&page, "slo_total"), sum(&page, "slo_met_total")), (7.0, 6.0), "{page}");
    assert_eq!(sum_where(&page, "goodput_slo_missed_total", "reason=\"truncated\""), 1.0, "{page}");
}

#[test]
fn the_limit_of_open_files_is_raised_to_its_maximum() {
    let engine = Running::engine(&[]);
    let shell = "ulimit -Sn 40 && ulimit -Hn 1500";
    let gateway = Gateway::start(&Setup { engines: &[&engine], shell, ..Setup::default() });
    let ask = |_| Open::post(&gateway.running.url, CHAT, &stream_of(30_000));
    let mut open: Vec<Open> = (0..60).map(ask).collect();
    // All streams are open at the same time.
    open.iter_mut().for_each(|answer| answer.read_until(r#""content":" "#));
    drop(open);
    gateway.adds_up();
}

#[test]
fn clients_without_descriptors_wait_and_none_is_lost() {
    let engine = Running::engine(&["--speed", "20"]);
    // Room for 24 of them. All come from one address, which by default could not have that many.
    let (shell, listen) = ("ulimit -n 96", "max_connections_per_address: 100");
    let gateway = Gateway::start(&Setup { engines: &[&engine], shell, listen, ..Setup::default() });
    let body = stream_of(30);
    let clients: Vec<_> = (0..100)
        .map(|_| {
            let (url, body) = (gateway.running.url.clone(), body.clone());
            std::thread::spawn(move || post(&url, CHAT, "", &body))
        })
        .collect();
    for client in clients {
        let answer = client.join().expect("it only asks");
        assert!(answer.as_ref().is_ok_and(|answer| answer.contains("[DONE]")), "{answer:?}");
    }
    let page = gateway.adds_up();
    assert_eq!((sum(&page, "slo_total"), sum(&page, "slo_met_total")), (100.0, 100.0), "{page}");
    assert_eq!(sum(&page, "goodput_retries_total"), 0.0, "{page}");
    assert_eq!(sum(&page, "goodput_connections_refused_total"), 0.0, "{page}");
}

#[test]
fn after_sigterm_open_streams_finish_and_the_exit_code_is_0() {
    let engine = Running::engine(&["--speed", "0.5"]);
    let mut gateway = Gateway::start(&Setup { engines: &[&engine], ..Setup::default() });
    let mut answer = Open::post(&gateway.running.url, CHAT, &stream_of(100));
    answer.read_until(r#""content":" "#);
    gateway.running.signal("TERM");
    until("nobody new is served", || post(&gateway.running.url, CHAT, "", &stream_of(1)).err());
    answer.read_to_end();
    assert!(answer.read.contains("[DONE]"), "{}", answer.read);
    assert_eq!(gateway.running.exit_code(), Some(0));
}

#[test]
fn a_second_sigterm_ends_open_streams_with_an_error_event() {
    let engine = Running::engine(&["--speed", "0.05"]);
    let mut gateway = Gateway::start(&Setup { engines: &[&engine], ..Setup::default() });
    let mut answer = Open::post(&gateway.running.url, CHAT, &stream_of(10_000));
    answer.read_until(r#""content":" "#);
    gateway.running.signal("TERM");
    until("nobody new is served", || post(&gateway.running.url, CHAT, "", &stream_of(1)).err());
    gateway.running.signal("TERM");
    answer.read_to_end();
    assert!(answer.read.contains(r#""code":"drain_cut""#), "{}", answer.read);
    assert_eq!(gateway.running.exit_code(), Some(0));
}

#[test]
fn no_secret_reaches_any_output() {
    let hash = blake3::hash(b"sk-CANARY1").to_hex();
    let keys = tempfile::tempdir().expect("a folder for the key");
    let key = keys.path().join("key");
    std::fs::write(&key, "sk-CANARY3").expect("the folder is ours");
    let kind = format!("kind: vllm, api_key_file: \"{}\"", key.display());
    let journal = keys.path().join("journal");
    let collector = Collector::start();
    let otlp = format!("{{endpoint: \"{}\", headers_file: collector.headers, ratio: 1}}", collector.url);
    let telemetry = format!("telemetry: {{journal: {{path: \"{}\", flush: 50ms}}, otlp: {otlp}}}\n", journal.display());
    let more = format!("tenants:\n  - tenant: acme\n    keys: [{{label: prod, blake3: \"{hash}\"}}]\n{telemetry}");
    let engine = Running::engine(&["--speed", "4"]);
    let files = [("collector.headers", "authorization: Bearer CANARY6\n")];
    let setup =
        Setup { engines: &[&engine], engine: &kind, more: &more, files: &files, log: "trace", ..Setup::default() };
    let gateway = Gateway::start(&setup);
    let url = &gateway.running.url;
    let body = r#"{"model":"sim","messages":[{"role":"user","content":"CANARY4"}],"max_tokens":3}"#;
    let with_query = format!("{CHAT}?key=CANARY5");
    let good = post(url, &with_query, "authorization: Bearer sk-CANARY1\r\n", body);
    assert!(good.is_ok(), "{good:?}");
    let mut seen = String::new();
    for (path, key, body) in [
        (CHAT, "authorization: Bearer sk-CANARY2\r\n", body),
        (CHAT, "x-api-key: sk-CANARY2\r\n", body),
        (CHAT, "authorization: Bearer sk-CANARY1\r\n", r#"{"model":"sim","messages":"CANARY4","n":"CANARY4"}"#),
        (CHAT, "authorization: Bearer sk-CANARY1\r\n", r#"{"model":"UNSERVED1","messages":"CANARY4"}"#),
        ("/v1/UNSERVED2?key=CANARY5", "authorization: Bearer sk-CANARY1\r\n", body),
    ] {
        let refused = post(url, path, key, body).expect_err("it is refused");
        let (_, told) = refused.split_once("\r\n\r\n").expect("an answer");
        seen.push_str(told);
    }
    let page = gateway.adds_up();
    assert_eq!(sum_where(&page, "goodput_slo_excluded_total", "reason=\"unauthorized\""), 2.0, "{page}");
    seen.push_str(&page);
    // The log alone names a model or a path that is not served, and leaves out the query.
    assert!(!seen.contains("UNSERVED"), "{seen}");
    let output = gateway.running.output();
    assert!(output.contains("UNSERVED1") && output.contains("UNSERVED2"), "{output}");
    seen.push_str(&output);
    let journal = until("all lines of the journal are written", || {
        let text = std::fs::read_to_string(&journal).ok()?;
        (text.lines().count() == 1 + 6).then_some(text)
    });
    let traced = until("spans of all six are there", || {
        let taken = collector.taken();
        (taken.iter().map(|batch| batch.requests()).sum::<usize>() == 6).then_some(taken)
    });
    assert!(traced.iter().all(|batch| batch.head.contains("authorization: Bearer CANARY6")), "it is the collector's");
    traced.iter().for_each(|batch| seen.push_str(&String::from_utf8_lossy(&batch.body)));
    assert!(!journal.contains("acme") && !journal.contains("UNSERVED"), "{journal}");
    seen.push_str(&journal);
    let lines = seen.lines().filter(|line| line.contains("CANARY")).collect::<Vec<_>>();
    assert!(lines.is_empty(), "{lines:#?}");
}

#[test]
fn the_demo_ends_by_itself_and_prints_its_counts() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_goodput"));
    demo.args(["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--seconds", "3", "--json"]);
    let done = demo.output().expect("it is ours");
    let told = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{told}\n{}", String::from_utf8_lossy(&done.stderr));
    let told: serde_json::Value = serde_json::from_str(&told).expect("one JSON object");
    let classes = told["classes"].as_array().expect("a list");
    assert_eq!(classes.len(), 5, "{told}");
    let sum = |field: &str| classes.iter().filter_map(|class| class[field].as_u64()).sum::<u64>();
    // The share of met requests depends on the machine and is not tested here.
    assert!(sum("met") <= sum("judged") && sum("judged") <= sum("sent") && sum("sent") > 0, "{told}");
}

/// A full pipe that nobody reads.
fn full_pipe() -> (std::io::PipeReader, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut filler = writer.try_clone().expect("a second handle");
    // Waits for room until the reader is gone.
    std::thread::spawn(move || while filler.write_all(&[b'\n'; 4096]).is_ok() {});
    (reader, writer)
}

/// A pipe whose reader is gone.
fn broken_pipe() -> std::io::PipeWriter {
    std::io::pipe().expect("a pipe").1
}

/// Runs a gateway with these outputs, reloads it repeatedly, sends requests and shuts it down. Returns its
/// exit code.
fn serves_with(stdout: std::io::PipeWriter, stderr: std::io::PipeWriter) -> Option<i32> {
    let free = || TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
    let (address, admin) = (free(), free());
    let text = settings(&Setup { engines: &[&Running::engine(&[])], ..Setup::default() });
    let text = text.replacen("127.0.0.1:0", &address.to_string(), 1).replacen("127.0.0.1:0", &admin.to_string(), 1);
    let folder = tempfile::tempdir().expect("a folder for the settings");
    let file = folder.path().join("goodput.yaml");
    std::fs::write(&file, text).expect("the folder is ours");
    let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
    command.arg("serve").arg("--config").arg(&file).stdout(stdout).stderr(stderr);
    let mut child = Ended(command.spawn().expect("it starts"));
    let (url, admin) = (format!("http://{address}"), format!("http://{admin}"));
    until("the gateway is ready", || get(&admin, "/readyz").ok());
    for _ in 0..5 {
        assert!(post(&admin, "/-/reload", "", "").is_ok_and(|answer| answer.contains("reloaded")));
        assert!(get(&url, "/health").is_ok());
    }
    let told = Command::new("kill").arg("-TERM").arg(child.0.id().to_string()).status();
    assert!(told.is_ok_and(|status| status.success()));
    until("the process has ended", || child.0.try_wait().expect("it was started here")).code()
}

/// A child that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn unread_outputs_block_neither_requests_nor_reloads_nor_shutdown() {
    let (stdout, stderr) = (full_pipe(), full_pipe());
    assert_eq!(serves_with(stdout.1, stderr.1), Some(0));
}

#[test]
fn outputs_that_are_closed_end_neither_requests_nor_reloads_nor_the_process() {
    assert_eq!(serves_with(broken_pipe(), broken_pipe()), Some(0));
}

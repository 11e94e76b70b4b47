//! What only shows between processes: an engine that dies, a gateway that is told to end, and
//! everything that was ever written. Needs no part but our own binary.

use std::process::Command;

use crate::gateway::{Gateway, Setup, sum, sum_where};
use crate::running::{Open, Running, get, post, until};

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
fn told_to_end_a_gateway_lets_open_streams_end_and_leaves_with_0() {
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
fn no_secret_reaches_any_output() {
    let hash = blake3::hash(b"sk-CANARY1").to_hex();
    let keys = tempfile::tempdir().expect("a folder for the key");
    let key = keys.path().join("key");
    std::fs::write(&key, "sk-CANARY3").expect("the folder is ours");
    let kind = format!("kind: vllm, api_key_file: \"{}\"", key.display());
    let more = format!("tenants:\n  - tenant: acme\n    keys: [{{label: prod, blake3: \"{hash}\"}}]\n");
    let engine = Running::engine(&["--speed", "4"]);
    let setup = Setup { engines: &[&engine], engine: &kind, more: &more, log: "trace", ..Setup::default() };
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
        (CHAT, "authorization: Bearer sk-CANARY1\r\n", r#"{"model":"CANARY4"}"#),
        ("/v1/CANARY5", "authorization: Bearer sk-CANARY1\r\n", body),
    ] {
        let refused = post(url, path, key, body).expect_err("it is refused");
        let (_, told) = refused.split_once("\r\n\r\n").expect("an answer");
        seen.push_str(told);
    }
    let page = gateway.adds_up();
    assert_eq!(sum_where(&page, "goodput_slo_excluded_total", "reason=\"unauthorized\""), 2.0, "{page}");
    seen.push_str(&page);
    seen.push_str(&gateway.running.output());
    let lines = seen.lines().filter(|line| line.contains("CANARY")).collect::<Vec<_>>();
    assert!(lines.is_empty(), "{lines:#?}");
}

#[test]
fn the_demo_ends_by_itself_and_tells_what_it_counted() {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_goodput"));
    demo.args(["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--seconds", "3", "--json"]);
    let done = demo.output().expect("it is ours");
    let told = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{told}\n{}", String::from_utf8_lossy(&done.stderr));
    let told: serde_json::Value = serde_json::from_str(&told).expect("one JSON object");
    let classes = told["classes"].as_array().expect("a list");
    assert_eq!(classes.len(), 5, "{told}");
    let sum = |field: &str| classes.iter().filter_map(|class| class[field].as_u64()).sum::<u64>();
    assert!(sum("met") > 0 && sum("met") <= sum("judged") && sum("judged") <= sum("sent"), "{told}");
}

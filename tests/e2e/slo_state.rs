//! Counts of classes that outlive the process (`telemetry.slo_state`).

use std::path::Path;

use serde_json::Value;

use crate::gateway::{Gateway, Setup, sum_where};
use crate::running::{Running, get, post, until};

const ASK: &str = r#"{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":2,"stream":true}"#;

/// The class `chat` on `/slo`.
fn chat(gateway: &Gateway) -> Value {
    let told: Value = serde_json::from_str(&get(&gateway.admin, "/slo").expect("it runs")).expect("JSON");
    let classes = told["classes"].as_array().expect("classes").clone();
    classes.into_iter().find(|class| class["class"] == "chat").expect("the class")
}

/// Number of loads with this result.
fn loaded(gateway: &Gateway, result: &str) -> f64 {
    let page = get(&gateway.admin, "/metrics").expect("it runs");
    sum_where(&page, "goodput_slo_state_loads_total", &format!("result=\"{result}\""))
}

fn ask(gateway: &Gateway, times: usize) {
    for _ in 0..times {
        assert!(
            post(&gateway.running.url, "/v1/chat/completions", "", ASK).is_ok_and(|answer| answer.contains("[DONE]"))
        );
    }
}

fn leave(mut gateway: Gateway) {
    gateway.running.signal("TERM");
    assert_eq!(gateway.running.exit_code(), Some(0));
}

fn settings(file: &Path) -> String {
    format!("telemetry: {{slo_state: {{path: \"{}\", every: 1s}}}}", file.display())
}

#[test]
fn windows_go_on_after_a_restart_and_a_crash_and_a_torn_file_begins_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("slo.state");
    let engine = Running::engine(&["--speed", "20"]);
    let (engines, more) = ([&engine], settings(&file));
    let setup = Setup { engines: &engines, more: &more, ..Setup::default() };

    let first = Gateway::start(&setup);
    assert_eq!(loaded(&first, "absent"), 1.0);
    ask(&first, 3);
    let since = chat(&first)["since_unix_seconds"].as_u64().expect("a time");
    leave(first);

    let mut second = Gateway::start(&setup);
    assert_eq!(loaded(&second, "restored"), 1.0);
    let class = chat(&second);
    assert_eq!((&class["total"], &class["lengths"][0]["total"]), (&3.into(), &3.into()), "{class}");
    assert!(class["since_unix_seconds"].as_u64().expect("a time").abs_diff(since) <= 1, "{class}");
    ask(&second, 2);
    // A save in between: the file that a crash leaves behind.
    let saves = || -> Option<f64> {
        let page = get(&second.admin, "/metrics").ok()?;
        Some(sum_where(&page, "goodput_slo_state_saves_total", "success"))
    };
    let before: f64 = until("the metrics are there", saves);
    until("it was saved twice more", || saves().filter(|now| *now >= before + 2.0));
    second.running.kill();

    let third = Gateway::start(&setup);
    assert_eq!(chat(&third)["total"], 5);
    leave(third);
    let whole = std::fs::read(&file).expect("it was saved");
    std::fs::write(&file, &whole[..whole.len() / 2]).expect("it is ours");

    let fourth = Gateway::start(&setup);
    assert_eq!(loaded(&fourth, "torn"), 1.0);
    assert_eq!(chat(&fourth)["total"], 0);
    ask(&fourth, 1);
    leave(fourth);
    let fifth = Gateway::start(&setup);
    assert_eq!(chat(&fifth)["total"], 1, "written anew");
}

#[test]
fn a_file_of_another_kind_is_never_overwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("notes.txt");
    std::fs::write(&file, "my notes\n").expect("the folder is ours");
    let engine = Running::engine(&["--speed", "20"]);
    let (engines, more) = ([&engine], settings(&file));
    let gateway = Gateway::start(&Setup { engines: &engines, more: &more, ..Setup::default() });
    assert_eq!(loaded(&gateway, "foreign"), 1.0);
    ask(&gateway, 1);
    leave(gateway);
    assert_eq!(std::fs::read_to_string(&file).expect("it is there"), "my notes\n");
}

/// Each of two gateways with one file finds out, and the file is whole whatever they do.
#[test]
fn two_gateways_with_one_file_say_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("slo.state");
    let engine = Running::engine(&["--speed", "20"]);
    let (engines, more) = ([&engine], settings(&file));
    let setup = Setup { engines: &engines, more: &more, ..Setup::default() };
    let gateways = [Gateway::start(&setup), Gateway::start(&setup)];
    for gateway in &gateways {
        until("it has noticed the other", || {
            let page = get(&gateway.admin, "/metrics").ok()?;
            (sum_where(&page, "goodput_slo_state_saves_total", "conflict") >= 2.0).then_some(())
        });
        assert!(gateway.running.output().contains("give each gateway a file of its own"));
    }
    gateways.into_iter().for_each(leave);
    assert_eq!(loaded(&Gateway::start(&setup), "restored"), 1.0);
    assert_eq!(std::fs::read_dir(folder.path()).expect("it is there").count(), 1, "nothing is left beside it");
}

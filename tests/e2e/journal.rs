//! The journal of a real process: on a disk that is full, over restarts, and between two
//! processes. Needs no part but our own binary.

use std::collections::BTreeMap;
use std::path::Path;

use goodput::record::journal::{JournalHeader, JournalLine};

use crate::gateway::{Gateway, Setup, sum, sum_where};
use crate::processes::{CHAT, stream_of};
use crate::running::{Running, get, post, until};

/// The requests in a file, each with the id of the key that its hashes have.
fn requests(path: &Path) -> Vec<(String, JournalLine)> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut key = String::new();
    let mut found = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Ok(header) = serde_json::from_str::<JournalHeader>(line) {
            key = header.hash_key_id;
        } else {
            let line = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            found.push((key.clone(), line));
        }
    }
    found
}

/// A gateway with a journal at this path, and with more keys of it.
fn started(engine: &Running, path: &Path, more: &str, shell: &str) -> Gateway {
    let journal =
        format!("telemetry: {{journal: {{path: \"{}\", hash_key_file: k, flush: 100ms{more}}}}}\n", path.display());
    let files = [("k", "CANARY-that-nobody-has-guessed")];
    Gateway::start(&Setup { engines: &[engine], more: &journal, files: &files, shell, ..Setup::default() })
}

fn written(gateway: &Gateway) -> f64 {
    let page = get(&gateway.admin, "/metrics").unwrap_or_default();
    sum_where(&page, "goodput_journal_lines_total", "result=\"written\"")
}

#[test]
fn a_journal_has_every_request_and_a_restarted_gateway_appends_to_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.jsonl");
    let engine = Running::engine(&["--speed", "20"]);
    let system = "You answer as briefly as you can. ".repeat(40);
    let with_system = |question: &str| {
        format!(
            r#"{{"model":"sim","stream":true,"max_tokens":3,"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{question}"}}]}}"#
        )
    };
    for _ in 0..2 {
        let mut gateway = started(&engine, &path, "", ":");
        for body in [with_system("One?"), with_system("Two?"), stream_of(2)] {
            assert!(post(&gateway.running.url, CHAT, "", &body).is_ok_and(|answer| answer.contains("[DONE]")));
        }
        assert!(post(&gateway.running.url, CHAT, "", "{}").is_err());
        gateway.running.signal("TERM");
        assert_eq!(gateway.running.exit_code(), Some(0));
    }
    let all = requests(&path);
    assert_eq!(all.len(), 8);
    assert!(all.iter().all(|(key, line)| *key == all[0].0 && line.tenant == all[0].1.tenant), "one key, one tenant");
    let sorted = all.windows(2).all(|pair| pair[0].1.arrival_unix_ns < pair[1].1.arrival_unix_ns);
    assert!(sorted, "they came one after the other");
    for (_, line) in all.iter().filter(|(_, line)| line.status == 200) {
        assert_eq!(
            (line.outcome.as_str(), line.class.as_deref(), line.model.as_deref()),
            ("met", Some("chat"), Some("sim"))
        );
        assert!(line.stream && line.prompt_tokens > Some(0) && line.output_tokens > Some(0) && line.attempts == 1);
        assert!(line.ttft_ms > Some(0.0) && line.e2e_ms >= line.ttft_ms && line.total_ms >= line.e2e_ms.unwrap_or(0.0));
    }
    // 1360 bytes are two blocks; the question behind them is in the third.
    let prefixes: Vec<_> = all.iter().map(|(_, line)| &line.prefix).collect();
    assert!(prefixes[0].len() == 2 && prefixes[..2].iter().chain(&prefixes[4..6]).all(|prefix| *prefix == prefixes[0]));
    assert!(prefixes[2].is_empty(), "it is too short to be shared");
    let refused: Vec<_> = all.iter().filter_map(|(_, line)| line.reason.as_deref()).collect();
    assert_eq!(refused, ["invalid_request"; 2]);
}

#[test]
fn a_full_disk_loses_lines_but_no_request_and_leaves_complete_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.jsonl");
    let engine = Running::engine(&["--speed", "20"]);
    // A file may be 8 KiB long at most; beyond that a write fails in its middle.
    let gateway = started(&engine, &path, "", "trap '' XFSZ && ulimit -f 16");
    for number in 0..40 {
        if number == 1 {
            // Lines that wait together are lost together: this one is not among them.
            until("the first line is written", || (written(&gateway) == 1.0).then_some(()));
        }
        assert!(post(&gateway.running.url, CHAT, "", &stream_of(1)).is_ok_and(|answer| answer.contains("[DONE]")));
    }
    let page = until("every line was written or lost", || {
        let page = get(&gateway.admin, "/metrics").ok()?;
        (sum(&page, "goodput_journal_lines_total") == 40.0).then_some(page)
    });
    let lost = sum_where(&page, "goodput_journal_lines_total", "result=\"write_failed\"");
    assert!(lost > 0.0 && lost < 40.0, "{page}");
    assert_eq!(requests(&path).len() as f64, 40.0 - lost);
    assert_eq!(sum(&page, "slo_met_total"), 40.0);
}

#[test]
fn a_second_gateway_keeps_its_hands_off_a_journal_until_the_first_has_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.jsonl");
    let engine = Running::engine(&["--speed", "20"]);
    let mut first = started(&engine, &path, "", ":");
    let second = started(&engine, &path, "", ":");
    let ask = |gateway: &Gateway| assert!(post(&gateway.running.url, CHAT, "", &stream_of(1)).is_ok());
    ask(&second);
    until("the second one's line is lost", || {
        let page = get(&second.admin, "/metrics").ok()?;
        (sum_where(&page, "goodput_journal_lines_total", "result=\"write_failed\"") == 1.0).then_some(())
    });
    assert!(second.running.output().contains("another process writes this journal"));
    ask(&first);
    first.running.signal("TERM");
    assert_eq!(first.running.exit_code(), Some(0));
    ask(&second);
    until("the second one writes", || (written(&second) == 1.0).then_some(()));
    assert_eq!(requests(&path).len(), 2);
}

#[test]
fn rotated_files_are_compressed_and_nothing_is_lost_between_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("journal.jsonl");
    let engine = Running::engine(&["--speed", "20"]);
    let mut gateway = started(&engine, &path, ", max_age: 300ms", ":");
    for count in 1..=6 {
        assert!(post(&gateway.running.url, CHAT, "", &stream_of(1)).is_ok());
        until("it is written", || (written(&gateway) == f64::from(count)).then_some(()));
    }
    gateway.running.signal("TERM");
    assert_eq!(gateway.running.exit_code(), Some(0));
    let mut files: BTreeMap<String, Vec<(String, JournalLine)>> = BTreeMap::new();
    for entry in std::fs::read_dir(folder.path()).expect("it is ours") {
        let file = entry.expect("it is there").path();
        let name = file.file_name().expect("a name").to_string_lossy().into_owned();
        let lines = match name.strip_suffix(".gz") {
            None => requests(&file),
            Some(_) => {
                let plain = folder.path().join("plain");
                let mut from = flate2::read::GzDecoder::new(std::fs::File::open(&file).expect("it is there"));
                std::io::copy(&mut from, &mut std::fs::File::create(&plain).expect("a file")).expect("gzip");
                let lines = requests(&plain);
                std::fs::remove_file(plain).expect("a file");
                lines
            }
        };
        files.insert(name, lines);
    }
    assert!(files.len() > 1 && files.keys().filter(|name| !name.ends_with(".gz")).count() <= 1, "{:?}", files.keys());
    assert_eq!(files.values().flatten().count(), 6);
}

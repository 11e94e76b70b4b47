//! Captured wires of real engines, replayed through the whole gateway: the engine's bytes at
//! their times, framing and all. The client gets the body unchanged, when it came, and the
//! request ends as the tables say.

use std::collections::HashMap;

use crate::support::scripted_engine::Script;
use goodput::inspect::Scanner;
use goodput::observe::Ending;
use goodput::types::{ApiPath, Tick};
use serde_json::{Value, json};

use crate::support::*;
use crate::wire_http::{Wire, posts, table};

/// Timers ring at whole milliseconds.
fn whole_millis(at: Tick) -> u64 {
    at.as_nanos().div_ceil(1_000_000)
}

/// Generous objectives, and limits within which every capture but the silent one ends.
fn generous() -> Yaml {
    Yaml::default()
        .promise(&[("ttft_seconds", 60.0), ("tpot_seconds", 10.0), ("e2e_seconds", 600.0)])
        .class("timeouts: {idle: 10s}")
        .class("stall_seconds: 60")
        .kind("generic")
        .with("retries: {after_fault: 0, after_push_back: 0}")
}

fn script(wire: &Wire) -> Script {
    let reads = wire.raw_reads.iter();
    let script = reads
        .fold(Script::new(), |script, (range, at)| script.at(whole_millis(*at)).write(wire.raw.slice(range.clone())));
    match wire.ending {
        Ending::Clean => script,
        Ending::TimedOut(_) => script.silence(),
        _ => script.at(whole_millis(wire.end)).close(),
    }
}

/// The captured request, or a similar one if the gateway itself rejects it.
fn request(wire: &Wire) -> Value {
    let endpoint = ApiPath::relayed(&wire.path).expect("a path of ours");
    let mut scanner = Scanner::new(endpoint);
    let text = wire.request.to_string();
    let reads = scanner.push(text.as_bytes()).is_ok() && scanner.finish().is_ok_and(|facts| !facts.background);
    if reads { wire.request.clone() } else { json!({"model": "m", "stream": wire.request["stream"] == true}) }
}

/// The part of the body that can have gone out when this much of it was there.
fn whole_events(body: &[u8]) -> usize {
    let ends = ["\n\n", "\r\n\r\n", "\r\r"].map(|blank| {
        let blank = blank.as_bytes();
        body.windows(blank.len()).rposition(|window| window == blank).map_or(0, |at| at + blank.len())
    });
    ends.into_iter().max().unwrap_or(0)
}

fn arrived_by(answer: &Whole, millis_: u64) -> usize {
    answer.frames.iter().filter(|(_, at)| millis(*at) <= millis_).map(|(bytes, _)| bytes.len()).sum()
}

fn bytes_come_when_they_came(wire: &Wire, answer: &Whole) {
    let got = answer.bytes();
    let name = &wire.name;
    if wire.ending == Ending::Clean
        && !String::from_utf8_lossy(&got[wire.body.len().min(got.len())..]).contains("error")
    {
        assert_eq!(got, wire.body, "{name}");
    } else {
        let kept = if wire.ending == Ending::Clean { wire.body.len() } else { whole_events(&wire.body) };
        assert_eq!(got[..kept], wire.body[..kept], "{name}");
        let rest = String::from_utf8_lossy(&got[kept..]).into_owned();
        assert!(
            rest.is_empty() || rest.trim_start().starts_with("data: {\"error\"") || rest.starts_with("event: error"),
            "{name}: {rest}"
        );
    }
    let head = millis(answer.at);
    for (range, at) in &wire.reads {
        let at = whole_millis(*at);
        if at >= head && !wire.raw_reads.is_empty() {
            let least = whole_events(&wire.body[..range.end]);
            let seen = arrived_by(answer, at);
            assert!(seen >= least, "{name}: {seen} bytes at {at} ms, and not {least}");
        }
    }
}

/// Compares a row with an access line at whole milliseconds.
fn agrees(wire: &Wire, row: &[String], line: &Line) -> Result<(), String> {
    let millis = |field: &String| field.parse::<f64>().ok().map(f64::ceil);
    let mut wrong = Vec::new();
    let mut differs = |what: &str, wanted: String, seen: String| {
        if wanted != seen {
            wrong.push(format!("{what} {seen} and not {wanted}"));
        }
    };
    differs("outcome", row[9].clone(), line.verdict());
    let generates = ApiPath::relayed(&wire.path).is_some_and(|endpoint| endpoint.dialect().generates());
    let is_answer = (200..300).contains(&wire.status) && generates && line.outcome() != "excluded";
    if is_answer && wire.raw_reads.len() > 1 {
        differs("first token", format!("{:?}", millis(&row[1])), format!("{:?}", line.ttft()));
        if line.outcome() == "met" {
            differs("finish", format!("{:?}", millis(&row[4])), format!("{:?}", line.e2e()));
        }
    }
    if is_answer && row[5] != "-" && row[5] != "0" {
        differs("output", row[5].clone(), line.tokens().1.map_or("-".to_owned(), |tokens| tokens.to_string()));
        differs("source", row[7].clone(), line.text("token_source").to_owned());
    }
    if is_answer && row[6] != "-" {
        differs("input", row[6].clone(), line.tokens().0.map_or("-".to_owned(), |tokens| tokens.to_string()));
    }
    if wrong.is_empty() { Ok(()) } else { Err(format!("{}: {}", wire.name, wrong.join("; "))) }
}

async fn replayed(wire: &Wire) -> (Whole, Line) {
    let request = request(wire);
    // The tables use a model that the settings name.
    let model = request["model"].as_str().unwrap_or("m1");
    // The engine's key is the client's to send.
    let yaml = generous()
        .engine("forward_authorization: true")
        .routes(&format!("  - {{model: [{}, \"*\"], pools: [a]}}", json!(model)));
    let (house, engine) = House::playing_with(&yaml, script(wire));
    let answer = house.post(&wire.path, request).await.whole().await;
    assert_eq!(engine.log().requests().len(), 1, "{}", wire.name);
    let line = house.line().await;
    house.end().await;
    (answer, line)
}

#[tokio::test(start_paused = true)]
async fn every_captured_wire_passes_unchanged_and_ends_as_in_the_tables() {
    let rows = table("expected.tsv").into_iter().chain(table("derived.tsv"));
    let rows: HashMap<String, Vec<String>> = rows.map(|row| (row[0].clone(), row)).collect();
    let mut wrong = Vec::new();
    let wires = posts();
    assert!(wires.len() >= 140);
    for wire in &wires {
        let (answer, line) = replayed(wire).await;
        if line.number("status") == Some(f64::from(wire.status)) {
            assert_eq!(answer.status.as_u16(), wire.status, "{}", wire.name);
            bytes_come_when_they_came(wire, &answer);
        } else {
            wrong.push(format!("{}: status {:?} and not {}", wire.name, line.number("status"), wire.status));
        }
        wrong.extend(agrees(wire, &rows[&wire.name], &line).err());
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The stream with the member that its engine moved to the usage event, at the end of both, as without usage.
fn with_what_travelled(kept: &str, usage: &str) -> String {
    let finish = kept.rfind("\"finish_reason\":\"").expect("it finishes");
    let end = finish + kept[finish..].find("}\n\n").unwrap();
    let start = kept[..finish].rfind("data: ").unwrap();
    let moved = ["system_fingerprint", "timings"].iter().find_map(|name| {
        let at = usage.find(&format!(",\"{name}\":"))?;
        (!kept[start..end].contains(name)).then(|| usage[at..].trim_end().strip_suffix('}').unwrap())
    });
    [&kept[..end], moved.unwrap_or_default(), &kept[end..]].concat()
}

/// A stream that asked for no usage, from an engine that was asked for it by the gateway.
#[tokio::test(start_paused = true)]
async fn only_the_injected_usage_event_is_removed_from_captured_wires() {
    let (mut replayed, mut put_back) = (0, 0);
    for wire in posts() {
        let text = String::from_utf8(wire.body.to_vec()).unwrap();
        let (hidden, kept): (Vec<&str>, Vec<&str>) =
            text.split_inclusive("\n\n").partition(|event| event.contains("\"choices\":[]"));
        let kept = kept.concat();
        let asks = wire.request["stream_options"] == json!({"include_usage": true});
        if !asks || kept == text {
            continue;
        }
        let mut asked = wire.request.clone();
        asked.as_object_mut().unwrap().remove("stream_options");
        let (house, engine) = House::playing_with(&generous().kind("vllm"), script(&wire));
        let answer = house.post(&wire.path, asked).await.whole().await;
        assert_eq!(engine.log().requests()[0].json()["stream_options"], json!({"include_usage": true}));
        let whole = with_what_travelled(&kept, hidden[0]);
        put_back += usize::from(whole != kept);
        assert_eq!(answer.text(), whole, "{}", wire.name);
        assert_eq!(house.line().await.text("token_source"), "usage");
        house.end().await;
        replayed += 1;
    }
    assert!(replayed >= 4 && put_back >= 4, "{replayed} {put_back}");
}

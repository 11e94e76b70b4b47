//! Captured wires of real engines, replayed: the results are in tables, and do not depend on how the bytes
//! are cut.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use goodput::judge::{JudgeContext, Objective, Objectives, judge};
use goodput::observe::{Ending, Observer, ObserverOptions, PieceInfo, ResponseFormat, TemplateCache, Timeline};
use goodput::rewrite::EventGate;
use goodput::types::Tick;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::wire_http::{Wire, posts, table, wire};

fn watch() -> ObserverOptions {
    let edges = [1, 5, 10, 25, 50, 100, 1000].map(Duration::from_millis);
    ObserverOptions { gap_edges: edges.into(), itl: Some(Duration::from_millis(20)), ..ObserverOptions::default() }
}

/// Replays a wire, cut further at these places, and returns the timeline. The output must equal the input.
fn replay(wire: &Wire, cuts: &BTreeSet<usize>) -> Timeline {
    replay_to(Observer::new(wire.expect(), wire.reader(), wire.status, watch()), wire, cuts).0
}

/// The same with this observer, and the info and length of each piece.
fn replay_to(mut observer: Observer, wire: &Wire, cuts: &BTreeSet<usize>) -> (Timeline, Vec<(PieceInfo, usize)>) {
    let (mut passed, mut notes) = (Vec::with_capacity(wire.body.len()), Vec::new());
    let mut pass = |piece: Bytes, note: &PieceInfo| {
        passed.extend_from_slice(&piece);
        notes.push((*note, piece.len()));
    };
    for (range, at) in &wire.reads {
        let mut start = range.start;
        let ends = cuts.range(range.start + 1..range.end).copied().chain([range.end]);
        for end in ends {
            observer.frame(wire.body.slice(start..end), *at, &mut pass);
            start = end;
        }
    }
    if wire.ending == Ending::Clean {
        observer.clean_end(wire.end, &mut pass);
        assert_eq!(passed, wire.body, "{}", wire.name);
    } else {
        assert!(wire.body.starts_with(&passed), "{}", wire.name);
    }
    (observer.end(wire.ending, wire.end), notes)
}

fn whole(wire: &Wire) -> Timeline {
    replay(wire, &BTreeSet::new())
}

fn millis(at: Option<Tick>) -> String {
    at.map_or("-".to_owned(), |at| format!("{:.2}", at.as_nanos() as f64 / 1e6))
}

/// A timeline in the columns of the tables, `first_token_ms` to `choices_and_token_events`.
fn columns(timeline: &Timeline) -> Vec<String> {
    let choices: Vec<String> = timeline.choices.iter().map(|c| format!("{}:{}", c.index, c.events)).collect();
    vec![
        millis(timeline.first_token),
        millis(timeline.first_visible),
        millis(timeline.last_token),
        millis(timeline.finish),
        timeline.output.0.to_string(),
        timeline.usage.input.map_or("-".to_owned(), |tokens| tokens.0.to_string()),
        timeline.source.as_str().to_owned(),
        if choices.len() > 1 { format!("{{{}}}", choices.join(",")) } else { "-".to_owned() },
    ]
}

/// With `-` for a count or its source in the table, no response had one.
fn matches(row: &[String], seen: &[String]) -> bool {
    let says_nothing = row[6] == "-" && row[4] == "-" && seen[4] == "0";
    (0..seen.len()).all(|i| row[i] == seen[i] || says_nothing && (i == 4 || i == 6))
}

/// The outcome under a class with generous thresholds.
fn outcome(wire: &Wire, timeline: &Timeline) -> String {
    let within = |seconds| Some(Objective { threshold: Duration::from_secs(seconds), attainment: 0.95 });
    let objectives = Objectives { ttft: within(60), tpot: within(10), e2e: within(600), ..Objectives::default() };
    judge(timeline, &objectives, &JudgeContext::of(wire.dialect())).outcome.to_string()
}

fn check(table_name: &str, rows: usize) {
    let table = table(table_name);
    assert_eq!(table.len(), rows);
    let mut wrong = Vec::new();
    for row in &table {
        let wire = wire(&row[0]);
        let timeline = whole(&wire);
        assert_eq!(outcome(&wire, &timeline), row[9], "{}", row[0]);
        let seen = columns(&timeline);
        if !matches(&row[1..], &seen) {
            wrong.push(format!("{}: {:?} and not {seen:?}", row[0], &row[1..9]));
        }
        if let Some(events) = row.get(11).filter(|events| *events != "-") {
            assert_eq!(*events, timeline.token_events.to_string(), "{}", row[0]);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_manually_derived_row_is_met() {
    check("expected.tsv", 29);
}

#[test]
fn every_row_derived_from_the_bytes_is_met() {
    check("derived.tsv", 111);
}

#[test]
fn every_captured_post_stands_in_one_table() {
    let rows = table("expected.tsv").into_iter().chain(table("derived.tsv"));
    let mut named: Vec<String> = rows.map(|row| row[0].clone()).collect();
    named.sort();
    let names: Vec<String> = posts().into_iter().map(|wire| wire.name).collect();
    assert_eq!(named, names);
}

#[test]
fn byte_by_byte_the_timeline_is_the_same() {
    for wire in posts() {
        let all = (0..wire.body.len()).collect();
        assert_eq!(replay(&wire, &all), whole(&wire), "{}", wire.name);
    }
}

#[test]
fn cut_at_every_position_the_timeline_is_the_same() {
    let mut chance = StdRng::seed_from_u64(7);
    for wire in posts() {
        let (whole, length) = (whole(&wire), wire.body.len());
        let is_small = length <= 8 * 1024;
        let tries = if is_small { length } else { 2000 };
        for attempt in 0..tries {
            let cut = if is_small { attempt } else { chance.random_range(0..length) };
            assert_eq!(replay(&wire, &BTreeSet::from([cut])), whole, "{} cut at {cut}", wire.name);
        }
    }
}

#[test]
fn cut_at_several_random_positions_the_timeline_is_the_same() {
    let mut chance = StdRng::seed_from_u64(8);
    for wire in posts().into_iter().filter(|wire| wire.body.len() > 1) {
        let whole = whole(&wire);
        for _ in 0..50 {
            let count = chance.random_range(2..12);
            let cuts = (0..count).map(|_| chance.random_range(0..wire.body.len())).collect();
            assert_eq!(replay(&wire, &cuts), whole, "{} cut at {cuts:?}", wire.name);
        }
    }
}

#[test]
fn a_response_with_a_cached_template_has_the_timeline_of_full_parsing() {
    let templates = Arc::new(TemplateCache::new());
    let at_once = |wire: &Wire, body: &[u8], templates: Option<&Arc<TemplateCache>>| {
        let mut observer = Observer::new(wire.expect(), ResponseFormat::Json, wire.status, watch());
        templates.into_iter().for_each(|templates| observer.use_templates(templates));
        observer.frame(body.to_vec().into(), wire.end, &mut |_, _| {});
        observer.end(Ending::Clean, wire.end)
    };
    let wires: Vec<Wire> = posts().into_iter().filter(|wire| wire.reader() == ResponseFormat::Json).collect();
    for wire in wires.iter().chain(&wires) {
        assert_eq!(at_once(wire, &wire.body, Some(&templates)), at_once(wire, &wire.body, None), "{}", wire.name);
        for at in 0..wire.body.len() {
            let mut body = wire.body.to_vec();
            body[at] = body[at].wrapping_add(1);
            assert_eq!(
                at_once(wire, &body, Some(&templates)),
                at_once(wire, &body, None),
                "{} changed at {at}",
                wire.name
            );
        }
    }
}

#[test]
fn a_stream_with_cached_templates_has_the_timeline_of_full_parsing() {
    let (templates, mut chance) = (Arc::new(TemplateCache::new()), StdRng::seed_from_u64(10));
    let check = |wire: &Wire, cuts: &BTreeSet<usize>, what: &str| {
        let observer = || Observer::new(wire.expect(), wire.reader(), wire.status, watch());
        let mut knowing = observer();
        knowing.use_templates(&templates);
        let (known, alone) = (replay_to(knowing, wire, cuts), replay_to(observer(), wire, cuts));
        assert_eq!(known, alone, "{} {what}", wire.name);
    };
    let mut wires: Vec<Wire> = posts().into_iter().filter(|wire| wire.reader() == ResponseFormat::Events).collect();
    for wire in wires.iter().chain(&wires) {
        check(wire, &BTreeSet::new(), "whole");
        check(wire, &(0..wire.body.len()).collect(), "byte by byte");
    }
    for wire in &mut wires {
        let is_small = wire.body.len() <= 1024;
        for attempt in 0..if is_small { wire.body.len() } else { 250 } {
            let at = if is_small { attempt } else { chance.random_range(0..wire.body.len()) };
            check(wire, &BTreeSet::from([at]), &format!("cut at {at}"));
            let was = wire.body.clone();
            let mut body = was.to_vec();
            body[at] = body[at].wrapping_add(1);
            wire.body = body.into();
            check(wire, &BTreeSet::new(), &format!("changed at {at}"));
            wire.body = was;
        }
    }
}

/// Top-level members of the events of a stream: of those in which a choice finishes, and of the rest.
fn members(body: &[u8]) -> BTreeSet<(bool, Vec<String>)> {
    let text = String::from_utf8_lossy(body).into_owned();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let objects = data.filter_map(|data| serde_json::from_str::<serde_json::Value>(data).ok());
    let described = objects.map(|object| {
        let mut names: Vec<String> = object.as_object().unwrap().keys().cloned().collect();
        names.sort();
        let finishes = object["choices"].as_array().unwrap().iter().any(|choice| !choice["finish_reason"].is_null());
        (finishes, names)
    });
    described.collect()
}

/// Without the usage event, the events equal those of a response without requested usage.
#[test]
fn c105_a_stream_without_its_injected_usage_is_like_one_that_had_none() {
    for (asked, unasked) in [
        ("vllm-0.32.0/completions-stream-usage", "vllm-0.32.0/completions-stream"),
        ("vllm-0.32.0/chat-stream-max-completion-tokens", "vllm-0.32.0/chat-stream-token-ids"),
        ("vllm-0.32.0-interval5/chat-stream", "vllm-0.32.0/chat-stream-token-ids"),
        ("llamacpp-11549/chat-stream-usage", "llamacpp-11549/chat-stream"),
        ("llamacpp-11549/chat-stream-usage-continuous", "llamacpp-11549/chat-stream"),
        ("dynamo-1.6.1/chat-stream-usage", "dynamo-1.6.1/chat-stream"),
        ("dynamo-1.6.1/chat-stream-usage-continuous", "dynamo-1.6.1/chat-stream"),
        ("dynamo-1.6.1/completions-stream-usage", "dynamo-1.6.1/completions-stream"),
    ] {
        let (asked, unasked) = (wire(asked), wire(unasked));
        let continuous = asked.request["stream_options"]["continuous_usage_stats"] == true;
        let is_completion = asked.path == "/v1/completions" && asked.name.starts_with("dynamo");
        let mut gate = EventGate::new(true, continuous);
        let (mut left, mut observer) =
            (Vec::new(), Observer::new(asked.expect(), asked.reader(), asked.status, watch()));
        let mut pass = |piece: Bytes, note: &PieceInfo| gate.pass(piece, note, &mut |passed| left.extend(passed));
        for (range, at) in &asked.reads {
            observer.frame(asked.body.slice(range.clone()), *at, &mut pass);
        }
        gate.rest(&mut |passed| left.extend(passed));
        let (mut left, expected) = (members(&left), members(&unasked.body));
        if is_completion {
            // The capture with usage is short: its only event with a choice is the last one.
            left.extend(expected.iter().filter(|(finishes, _)| !finishes).cloned());
        }
        assert_eq!(left, expected, "{} and {}", asked.name, unasked.name);
        assert!(!left.is_empty());
    }
}

//! The demo's parts together, in virtual time without a gateway.

use std::sync::Arc;

use super::view::{ClassRow, DemoFormat, DemoSnapshot, show};
use super::*;
use crate::sim::traffic::{ByteStream, Traffic};
use crate::types::Tick;

fn row(class: &str, met: u64, judged: u64) -> ClassRow {
    ClassRow { class: class.to_owned(), target: 0.95, met, judged, sent: judged, ..ClassRow::default() }
}

#[tokio::test(start_paused = true)]
async fn lines_come_every_five_seconds_and_a_summary_at_the_end() {
    let clock = Clock::start();
    let mut sent = 0;
    let mut source = move || {
        sent += 50;
        DemoSnapshot { rows: vec![row("chat", sent - 5, sent), row("idle", 0, 0)], engines: Vec::new() }
    };
    let mut out = Vec::new();
    let until = clock.sleep_until(Some(Tick::from_millis(12_000)));
    let last = show(clock, &mut source, &mut out, DemoFormat::Lines, until).await.unwrap();
    assert_eq!(last.rows[0].judged, 150);
    let text = String::from_utf8(out).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "    5 s     10.0 requests/s   chat 90.0 %!   idle -");
    assert_eq!(lines[1], "   10 s     10.0 requests/s   chat 95.0 %   idle -");
    assert_eq!(lines[2], "12 s, 150 requests");
    assert!(!text.contains('\u{1b}'), "no control characters outside a terminal");
}

#[tokio::test(start_paused = true)]
async fn a_table_is_drawn_over_the_one_before() {
    let clock = Clock::start();
    let mut source = || DemoSnapshot { rows: vec![row("chat", 1, 1)], engines: Vec::new() };
    let mut out = Vec::new();
    let until = clock.sleep_until(Some(Tick::from_millis(2_500)));
    show(clock, &mut source, &mut out, DemoFormat::Table, until).await.unwrap();
    let text = String::from_utf8(out).unwrap();
    assert_eq!(text.matches("\u{1b}[J").count(), 2, "the second table and the summary take one back");
}

/// A wrapped line could not be erased, and headers would fill the screen.
#[tokio::test(start_paused = true)]
async fn the_table_fits_a_terminal_of_80_columns() {
    let clock = Clock::start();
    let mut source = || {
        let row = |class: &super::DemoClass| ClassRow {
            seen: Some((123_456, 234_567)),
            in_flight: 9999,
            waiting: 9999,
            limited: 123_456,
            shed: 123_456,
            ttft_p95: Some(Duration::from_millis(119_990)),
            tpot_p95: Some(Duration::from_millis(999)),
            e2e_p95: Some(Duration::from_secs(1799)),
            ..row(class.name, 12_345, 23_456)
        };
        let engine = super::view::EngineRow {
            pool: "interactive".to_owned(),
            engine: "127.0.0.1:65535".to_owned(),
            running: 256,
            waiting: 9999,
            kv_usage: 1.0,
        };
        DemoSnapshot { rows: super::CLASSES.iter().map(row).collect(), engines: vec![engine] }
    };
    let mut out = Vec::new();
    let until = clock.sleep_until(Some(Tick::from_millis(1_500)));
    show(clock, &mut source, &mut out, DemoFormat::Table, until).await.unwrap();
    let text = String::from_utf8(out).unwrap();
    for line in text.lines() {
        let shown = line.trim_start_matches("\u{1b}[").chars().count();
        assert!(shown <= super::view::WIDTH, "{shown} columns: {line}");
    }
    assert!(text.contains("inline_completion") && text.contains("52.6 %!"), "{text}");
}

/// The demo's scenario: a tenant at its limit, a class shed, the others protected.
#[tokio::test(start_paused = true)]
async fn who_is_held_up_is_told_with_what_goes_on_now() {
    let clock = Clock::start();
    let look = |how, millis| async move {
        let mut looks = 0;
        let mut source = move || {
            looks += 1;
            let batch = ClassRow { limited: 100 + looks, ..row("batch", 9, 9) };
            let chat = ClassRow { shed: 10 * looks, waiting: 7, ..row("chat", 8, 10) };
            DemoSnapshot { rows: vec![row("voice", 5, 5), chat, batch], engines: Vec::new() }
        };
        let (mut out, end) = (Vec::new(), clock.now() + Duration::from_millis(millis));
        show(clock, &mut source, &mut out, how, clock.sleep_until(Some(end))).await.unwrap();
        String::from_utf8(out).unwrap()
    };
    let table = look(DemoFormat::Table, 12_500).await;
    let last = table.rsplit("held up").next().unwrap();
    let lines: Vec<Vec<&str>> = last.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[1], ["chat", "7", "0", "0", "130", "110"], "{last}");
    assert_eq!(lines[2], ["batch", "0", "113", "11", "0", "0"], "{last}");
    assert_eq!(lines.len(), 3, "nobody else: {last}");
    let early = look(DemoFormat::Table, 3_500).await;
    assert!(early.contains("batch                    0         104        104"), "all of it is new: {early}");
    let plain = look(DemoFormat::Lines, 21_000).await;
    let last = plain.rsplit("held up").next().unwrap();
    assert_eq!(
        last.lines().nth(1).unwrap().split_whitespace().last(),
        Some("30"),
        "of 50, since the look at 10 s: {last}"
    );
    assert!(plain.contains("voice 100.0 %   chat 80.0 %! (10 shed)   batch 100.0 % (101 over limit)"), "{plain}");
}

#[tokio::test(start_paused = true)]
async fn json_is_one_object() {
    let clock = Clock::start();
    let mut source = || DemoSnapshot { rows: vec![row("chat", 1, 2)], engines: Vec::new() };
    let mut out = Vec::new();
    let until = clock.sleep_until(Some(Tick::from_millis(2_000)));
    show(clock, &mut source, &mut out, DemoFormat::Json, until).await.unwrap();
    let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!((&value["seconds"], &value["classes"][0]["attainment"]), (&2.0.into(), &0.5.into()));
}

/// One engine of the demo gets a third of the demo's rate: the trough keeps every objective.
#[tokio::test(start_paused = true)]
async fn the_demos_promises_can_be_kept() {
    let clock = Clock::start();
    let settings = SimSettings { models: vec![MODEL.to_owned()], shape: shape(), ..SimSettings::default() };
    let engine = SimEngine::start(clock, settings);
    let there = engine.clone();
    let open = move || -> crate::sim::traffic::ConnectFuture {
        let stream = there.connect();
        Box::pin(async move { Ok(Box::new(stream) as Box<dyn ByteStream>) })
    };
    let plan = TrafficPlan { swing: 0.0, ..traffic(1, RATE / 3.0 * 0.4) };
    let traffic = Traffic::start(clock, Arc::new(open), plan);
    clock.sleep_until(Some(Tick::from_millis(120_000))).await;
    for stats in traffic.stop(Duration::from_secs(600)).await {
        let judged = stats.met + stats.missed + stats.unanswered;
        assert!(judged > 0 && stats.met as f64 / judged as f64 > 0.95, "{stats:?}");
    }
}

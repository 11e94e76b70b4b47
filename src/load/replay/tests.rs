//! Scores, losses and prompts of a replay.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::load::LoadRecord;
use crate::load::prompts::{PromptCalibration, PromptMaker};
use crate::load::quantiles::{MeasureQuantiles, Percentile};
use crate::trace::PromptBlocks;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn change(text: &str) -> EngineChange {
    text.parse().unwrap()
}

/// A request that came at this second and took two.
fn record(at: f64, outcome: &str) -> LoadRecord {
    LoadRecord {
        scheduled_seconds: at,
        end_seconds: at + 2.0,
        outcome: outcome.to_owned(),
        reason: if outcome == "met" { String::new() } else { "ttft".to_owned() },
        ttft_seconds: Some(0.5),
        e2e_seconds: Some(2.0),
        input_tokens: Some(100),
        output_tokens: 10,
        ..LoadRecord::default()
    }
}

fn score(loss: Option<LossSpan>, records: impl Iterator<Item = LoadRecord>) -> ClassReplay {
    let class = ReplayClass { name: "chat".to_owned(), target: 0.9 };
    let mut score = ReplayScore::new(vec![class], loss, seconds(10));
    records.for_each(|record| score.push(&record));
    score.results().remove(0)
}

#[test]
fn a_class_passes_by_the_share_of_what_is_judged() {
    let of = |met: usize, missed: usize, excluded: usize| {
        let outcomes = [("met", met), ("missed", missed), ("excluded", excluded)];
        let all = outcomes.into_iter().flat_map(|(outcome, count)| std::iter::repeat_n(outcome, count));
        score(None, all.map(|outcome| record(0.0, outcome)))
    };
    let found = of(9, 1, 5);
    assert_eq!((found.attainment, found.passes, found.requests), (Some(0.9), true, 15));
    assert_eq!((found.missed["ttft"], found.excluded["ttft"], found.input_tokens), (1, 5, 1500));
    assert!(!of(89, 11, 0).passes);
    assert_eq!((of(0, 0, 3).attainment, of(0, 0, 3).passes), (None, false), "nothing judged, nothing reached");
}

#[test]
fn a_class_without_requests_is_not_told_of() {
    let class = |name: &str| ReplayClass { name: name.to_owned(), target: 0.9 };
    let mut score = ReplayScore::new(vec![class("voice"), class("chat")], None, seconds(60));
    score.push(&LoadRecord { class_index: 1, ..record(7.0, "met") });
    let names: Vec<String> = score.results().into_iter().map(|class| class.class).collect();
    assert_eq!((names, score.last_arrival()), (vec!["chat".to_owned()], 7.0));
}

#[test]
fn requests_stand_before_during_and_after_a_loss_and_those_in_flight_with_those_that_follow() {
    let loss = LossSpan { from: seconds(100), to: Some(seconds(200)) };
    let arrivals = [(90.0, "met"), (99.0, "missed"), (150.0, "missed"), (199.0, "met"), (200.0, "met"), (230.0, "met")];
    let found = score(Some(loss), arrivals.into_iter().map(|(at, outcome)| record(at, outcome)));
    let phases: Vec<(&str, u64, u64)> =
        found.phases.iter().map(|phase| (phase.phase.as_str(), phase.met, phase.judged)).collect();
    assert_eq!(phases, [("before", 1, 1), ("during", 1, 3), ("after", 2, 2)]);
    let for_good = LossSpan { from: seconds(100), to: None };
    let found = score(Some(for_good), [record(150.0, "met"), record(500.0, "met")].into_iter());
    assert_eq!((found.phases[1].judged, found.phases[2].judged), (2, 0));
}

/// One request a second; those of these seconds miss.
fn recovered(missed: std::ops::Range<u32>) -> Recovery {
    let loss = LossSpan { from: seconds(100), to: None };
    let arrivals = (0..300).map(|at| record(f64::from(at), if missed.contains(&at) { "missed" } else { "met" }));
    score(Some(loss), arrivals).recovery.unwrap()
}

#[test]
fn recovery_is_told_from_the_loss_to_the_window_that_reaches_the_target_again() {
    assert_eq!(recovered(0..0), Recovery { lowest_attainment: Some(1.0), seconds: Some(0.0) });
    let found = recovered(100..140);
    // Of ten requests from second 139 on one misses, which is the target.
    assert_eq!(found, Recovery { lowest_attainment: Some(0.0), seconds: Some(39.0) });
    assert_eq!(recovered(150..300).seconds, None, "it is not reached again");
    assert_eq!(recovered(0..90).seconds, Some(0.0), "what was missed before is not the loss's");
}

#[test]
fn times_and_engines_are_read_and_written_as_people_write_them() {
    for (text, expected) in
        [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1h30m", 5400.0), ("2d", 172_800.0), ("250ms", 0.25)]
    {
        assert_eq!(duration(text).unwrap().as_secs_f64(), expected, "{text}");
    }
    for bad in ["", "x", "-1", "nan", "inf", "10x", "m", "1h30", "1e999"] {
        assert!(duration(bad).is_err(), "{bad}");
    }
    let numbers = |pool: Option<&str>, from, to| EngineSet::Numbers { pool: pool.map(str::to_owned), from, to };
    assert_eq!(change("3@10m"), EngineChange { engines: numbers(None, 3, 3), at: seconds(600) });
    assert_eq!(change("1-20@90").engines, numbers(None, 1, 20));
    assert_eq!(change("gpu/2@1h").engines, numbers(Some("gpu"), 2, 2));
    assert_eq!(change("left@30").engines, EngineSet::Name("left".to_owned()));
    for bad in ["3", "@10", "0@10", "5-2@10", "3@soon"] {
        assert!(bad.parse::<EngineChange>().is_err(), "{bad}");
    }
    for text in ["3@600s", "gpu/1-20@90s", "left@30s"] {
        assert_eq!(change(text).to_string(), text);
    }
}

#[test]
fn a_loss_lasts_to_the_last_return_or_to_the_end() {
    let changes = |all: &[&str]| all.iter().map(|text| change(text)).collect::<Vec<_>>();
    let span = |lost: &[&str], back: &[&str]| span_of(&changes(lost), &changes(back)).map(|span| (span.from, span.to));
    assert_eq!(span(&[], &[]), None);
    assert_eq!(span(&["1@10", "2@5"], &["1@20", "2@30"]), Some((seconds(5), Some(seconds(30)))));
    assert_eq!(span(&["1@10", "2@5"], &["1@20"]), Some((seconds(5), None)));
    assert_eq!(span(&["1@10", "1@40"], &["1@20"]), Some((seconds(10), None)));
}

#[test]
fn a_histogram_has_the_percentiles_of_its_values_within_one_percent() {
    let values: Vec<f64> = (1..=2000).map(|value| f64::from(value) * 0.003).collect();
    let mut histogram = LatencyHistogram::default();
    values.iter().for_each(|value| histogram.push(*value));
    (0..30).for_each(|_| histogram.push_unreached());
    let (found, exact) = (histogram.quantiles(), MeasureQuantiles::of(values, 30));
    for (found, exact) in [(found.p50, exact.p50), (found.p90, exact.p90), (found.p95, exact.p95)] {
        let (found, exact) = (found.seconds().unwrap(), exact.seconds().unwrap());
        assert!((found / exact - 1.0).abs() < 0.01, "{found} {exact}");
    }
    assert_eq!((found.p99, found.n, found.not_reached), (Percentile::NotReached, 2030, 30));
    assert_eq!(LatencyHistogram::default().quantiles().p50, Percentile::TooFew);
    assert_eq!(LatencyHistogram::default().at(0.5), None);
}

fn prompt(maker: &mut PromptMaker, tokens: u64, hashes: &[u64]) -> String {
    maker.recorded(tokens, &PromptBlocks { tokens: 16, hashes: hashes.to_vec() }).own
}

proptest! {
    #[test]
    fn prompts_begin_alike_exactly_where_their_hashes_do(
        common in prop::collection::vec(any::<u64>(), 0..12),
        ours in any::<u64>(),
        theirs in any::<u64>(),
        tokens_per_word in 0.5..1.7_f64,
    ) {
        prop_assume!(ours << 1 != theirs << 1);
        let calibration = PromptCalibration { base_tokens: 5.0, tokens_per_word, is_measured: true };
        let mut maker = PromptMaker::new(calibration, 0.0, 1, 3);
        let of = |last: u64| [&common[..], &[last]].concat();
        let (one, two) = (prompt(&mut maker, 600, &of(ours)), prompt(&mut maker, 700, &of(theirs)));
        let same = prompt(&mut maker, 600, &of(ours));
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let alike = |a: &str, b: &str| words(a).iter().zip(words(b)).take_while(|(a, b)| *a == b).count();
        let per_block = (16.0 / tokens_per_word).round() as usize;
        prop_assert!(alike(&one, &same) >= per_block * (common.len() + 1));
        prop_assert!(alike(&one, &two) >= per_block * common.len());
        // Different hashes may name some same words, and never a whole block of them.
        prop_assert!(alike(&one, &two) < per_block * (common.len() + 1));
        prop_assert_eq!(words(&one).len(), calibration.words_for(600));
    }
}

//! The rules of `docs/semantics.md`, sections 2 and 4, one by one, and their laws.

use std::time::Duration;

use proptest::prelude::*;

use crate::observe::{
    Choice, ClientLimited, Ending, Gaps, InBandError, ResponseFormat, Timeline, TimeoutKind, TokenSource, Usage,
};
use crate::types::{ClientState, Dialect, Tick, Tokens};

use super::*;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn at(millis: u64) -> Tick {
    Tick::from_millis(millis)
}

fn objective(millis: u64) -> Option<Objective> {
    Some(Objective { threshold: ms(millis), attainment: 0.95 })
}

/// TTFT 500 ms, TPOT 50 ms.
fn chat() -> Objectives {
    Objectives { ttft: objective(500), tpot: objective(50), ..Objectives::default() }
}

/// E2E 20 s only.
fn agent() -> Objectives {
    Objectives { e2e: objective(20_000), ..Objectives::default() }
}

const CASE: JudgeContext = JudgeContext::of(Dialect::Chat);

/// A stream of one choice with visible token events at `moments`, finished with the last
/// one.
fn stream(moments: &[u64], tokens: u64) -> Timeline {
    let (first, last) = (moments.first().copied().map(at), moments.last().copied().map(at));
    let gaps: Vec<Duration> = moments.windows(2).map(|pair| ms(pair[1] - pair[0])).collect();
    let choice = Choice {
        index: 0,
        first_token: first,
        first_visible: first,
        last_token: last,
        events: moments.len() as u64,
        tokens: tokens as f64,
        finished: true,
    };
    Timeline {
        start: at(0),
        streamed: true,
        reader: ResponseFormat::Events,
        first_token: first,
        first_visible: first,
        last_token: last,
        finish: last,
        end: last.unwrap_or(at(0)),
        choices: vec![choice],
        gaps: Gaps { largest: gaps.iter().max().copied(), sum: gaps.iter().sum(), ..Gaps::default() },
        usage: Usage { output: Some(Tokens(tokens)), ..Usage::default() },
        source: TokenSource::Usage,
        output: Tokens(tokens),
        token_events: moments.len() as u64,
        cut_by_length: false,
        has_finish_reason: true,
        error: None,
        unparseable: false,
        status: 200,
        has_output: !moments.is_empty(),
        has_visible: !moments.is_empty(),
        has_lumps: false,
        limited: None,
        ending: Ending::Clean,
    }
}

/// The same without a finish: it ended at `end` by `ending`.
fn cut(moments: &[u64], tokens: u64, ending: Ending, end: u64) -> Timeline {
    let mut timeline = stream(moments, tokens);
    timeline.finish = None;
    timeline.has_finish_reason = false;
    timeline.choices[0].finished = false;
    if moments.is_empty() {
        timeline.choices.clear();
    }
    Timeline { ending, end: at(end), ..timeline }
}

/// A non-streaming response whose last byte came at `end`.
fn whole(end: u64, tokens: u64) -> Timeline {
    let choice = Choice {
        index: 0,
        first_token: None,
        first_visible: None,
        last_token: None,
        events: 1,
        tokens: tokens as f64,
        finished: true,
    };
    Timeline {
        streamed: false,
        reader: ResponseFormat::Json,
        finish: Some(at(end)),
        end: at(end),
        choices: vec![choice],
        token_events: 1,
        has_output: true,
        has_visible: true,
        has_lumps: false,
        ..stream(&[], tokens)
    }
}

fn with_itl(mut timeline: Timeline, objectives: &Objectives, moments: &[u64]) -> Timeline {
    let threshold = objectives.itl.expect("a class with ITL").threshold;
    let broke = moments.windows(2).find(|pair| ms(pair[1] - pair[0]) > threshold);
    timeline.gaps.broke = broke.map(|pair| at(pair[0]) + threshold);
    timeline
}

fn outcome(timeline: &Timeline, objectives: &Objectives) -> Outcome {
    judge(timeline, objectives, &CASE).outcome
}

const MET: Outcome = Outcome::Met;
const fn missed(reason: Missed) -> Outcome {
    Outcome::Missed(reason)
}
const fn excluded(reason: Excluded) -> Outcome {
    Outcome::Excluded(reason)
}

// Objectives of finished streams.

#[test]
fn a_value_on_the_threshold_holds_and_a_nanosecond_above_does_not() {
    assert_eq!(outcome(&stream(&[500, 550], 2), &chat()), MET);
    let mut late = stream(&[500, 550], 2);
    let moment = Some(Tick::from_nanos(500_000_001));
    (late.first_token, late.first_visible, late.choices[0].first_token) = (moment, moment, moment);
    assert_eq!(outcome(&late, &chat()), missed(Missed::Ttft));
}

#[test]
fn c16_a_late_first_token_is_a_miss_by_ttft() {
    let verdict = judge(&stream(&[700, 720], 2), &chat(), &CASE);
    assert_eq!(verdict.outcome, missed(Missed::Ttft));
    assert_eq!((verdict.ttft, verdict.tpot), (Some(ObjectiveState::Broken), Some(ObjectiveState::Held)));
}

#[test]
fn c17_each_clock_judges_by_its_own_point() {
    let mut reasoning = stream(&[200, 230, 2000], 200);
    (reasoning.first_visible, reasoning.choices[0].first_visible) = (Some(at(2000)), Some(at(2000)));
    assert_eq!(outcome(&reasoning, &chat()), MET);
    let visible = Objectives { ttft_counts: TtftCounts::FirstVisibleToken, ..chat() };
    assert_eq!(outcome(&reasoning, &visible), missed(Missed::Ttft));
}

#[test]
fn c17_reasoning_alone_is_judged_by_its_finish_where_visible_tokens_count() {
    let visible = Objectives { ttft_counts: TtftCounts::FirstVisibleToken, ..chat() };
    for (finish, expected) in [(400, MET), (2000, missed(Missed::Ttft))] {
        let mut reasoning = stream(&[200, finish], 100);
        (reasoning.first_visible, reasoning.choices[0].first_visible, reasoning.has_visible) = (None, None, false);
        assert_eq!(outcome(&reasoning, &visible), expected, "finish at {finish}");
    }
}

#[test]
fn a_stream_without_any_token_but_with_a_reason_is_judged_by_its_finish() {
    for (finish, expected) in [(300, MET), (501, missed(Missed::Ttft))] {
        let mut stopped = cut(&[], 1, Ending::Clean, finish);
        (stopped.finish, stopped.has_finish_reason) = (Some(at(finish)), true);
        assert_eq!(outcome(&stopped, &chat()), expected, "finish at {finish}");
    }
}

#[test]
fn c19_one_event_with_all_tokens_is_judged_by_the_derived_budget() {
    let verdict = judge(&stream(&[400], 20), &chat(), &CASE);
    assert_eq!(verdict.outcome, MET);
    assert_eq!((verdict.tpot, verdict.e2e), (Some(ObjectiveState::NotEvaluated), Some(ObjectiveState::Held)));
    let late = judge(&stream(&[1400], 20), &chat(), &CASE);
    assert_eq!(late.outcome, missed(Missed::Ttft));
    assert_eq!(
        (late.tpot, late.e2e),
        (Some(ObjectiveState::NotEvaluated), Some(ObjectiveState::Held)),
        "TTFT and only that"
    );
    // The event was in time, the end of the response was not.
    let mut hung = stream(&[400], 20);
    (hung.finish, hung.end) = (Some(at(1451)), at(1451));
    assert_eq!(outcome(&hung, &chat()), missed(Missed::E2e));
}

#[test]
fn c19_a_json_response_is_judged_by_the_derived_budget() {
    assert_eq!(outcome(&whole(1400, 20), &chat()), MET);
    assert_eq!(outcome(&whole(1450, 20), &chat()), MET);
    let late = judge(&whole(1500, 20), &chat(), &CASE);
    assert_eq!(late.outcome, missed(Missed::E2e));
    assert_eq!(
        (late.ttft, late.tpot, late.e2e),
        (Some(ObjectiveState::NotEvaluated), Some(ObjectiveState::NotEvaluated), Some(ObjectiveState::Broken))
    );
}

#[test]
fn c20_tpot_divides_by_tokens_and_not_by_events() {
    let moments: Vec<u64> = (0..10).map(|i| 100 + 60 * i).collect();
    let timeline = stream(&moments, 31);
    assert_eq!(timeline.tpot(), Some(ms(18)));
    assert_eq!(outcome(&timeline, &chat()), MET);
}

#[test]
fn c21_the_span_is_first_to_last_token_by_tokens_less_one() {
    let timeline = stream(&[100, 200], 2);
    let verdict = judge(&timeline, &chat(), &CASE);
    assert_eq!(timeline.tpot(), Some(ms(100)));
    assert_eq!(verdict.outcome, missed(Missed::Tpot));
    // Events after the last token change nothing.
    let closed_late = Timeline { end: at(5600), ..timeline };
    assert_eq!(judge(&closed_late, &chat(), &CASE), verdict);
}

#[test]
fn c21_one_token_has_no_tpot_and_a_budget_of_the_ttft_threshold() {
    let verdict = judge(&stream(&[300], 1), &chat(), &CASE);
    assert_eq!(
        (verdict.outcome, verdict.tpot, verdict.e2e),
        (MET, Some(ObjectiveState::NotEvaluated), Some(ObjectiveState::Held))
    );
    let mut late = stream(&[300], 1);
    (late.finish, late.end) = (Some(at(501)), at(501));
    assert_eq!(outcome(&late, &chat()), missed(Missed::E2e));
}

#[test]
fn the_worst_choice_counts() {
    let mut two = stream(&[100, 200], 20);
    two.choices.push(Choice { index: 1, tokens: 3.0, events: 2, ..two.choices[0].clone() });
    assert_eq!(two.tpot(), Some(ms(50)));
    two.choices[1].tokens = 2.0;
    assert_eq!(outcome(&two, &chat()), missed(Missed::Tpot));
}

#[test]
fn tpot_breaks_at_the_first_end_of_several_slow_choices() {
    let mut two = stream(&[100, 900], 2);
    two.choices.push(Choice { index: 1, last_token: Some(at(400)), ..two.choices[0].clone() });
    let objectives = |e2e| Objectives { e2e: objective(e2e), ..chat() };
    assert_eq!(outcome(&two, &objectives(600)), missed(Missed::Tpot), "400 < 600");
    assert_eq!(outcome(&two, &objectives(399)), missed(Missed::E2e));
}

#[test]
fn the_objective_that_broke_first_is_the_reason_and_each_is_counted() {
    let objectives = Objectives { itl: objective(300), e2e: objective(1000), ..chat() };
    // TTFT breaks at 500, ITL at 900 (event at 600), E2E at 1000, TPOT at the last token.
    let moments = [600, 1500];
    let all = with_itl(stream(&moments, 2), &objectives, &moments);
    let verdict = judge(&all, &objectives, &CASE);
    let broken = Some(ObjectiveState::Broken);
    assert_eq!(
        verdict,
        Verdict { ttft: broken, tpot: broken, itl: broken, e2e: broken, ..Verdict::bare(missed(Missed::Ttft)) }
    );
    let in_time = [400, 1500];
    let without_ttft = with_itl(stream(&in_time, 2), &objectives, &in_time);
    assert_eq!(outcome(&without_ttft, &objectives), missed(Missed::Itl), "400 + 300 < 1000");
    let loose_gaps = Objectives { itl: objective(2000), ..objectives.clone() };
    assert_eq!(outcome(&with_itl(stream(&in_time, 2), &loose_gaps, &in_time), &loose_gaps), missed(Missed::E2e));
    let slow = Objectives { itl: None, e2e: objective(1500), ..objectives };
    assert_eq!(outcome(&stream(&in_time, 2), &slow), missed(Missed::Tpot));
}

#[test]
fn a_class_without_objectives_is_met_by_finishing() {
    let none = Objectives::default();
    assert_eq!(outcome(&stream(&[90_000, 900_000], 2), &none), MET);
    assert_eq!(outcome(&whole(900_000, 2), &none), MET);
    assert_eq!(outcome(&cut(&[100], 1, Ending::Broken, 200), &none), missed(Missed::Truncated));
}

// Non-streaming responses.

#[test]
fn a_non_streaming_response_is_judged_by_its_e2e_objective_if_any() {
    assert_eq!(outcome(&whole(20_000, 9), &agent()), MET);
    assert_eq!(outcome(&whole(20_001, 9), &agent()), missed(Missed::E2e));
    let both = Objectives { e2e: objective(20_000), ..chat() };
    assert_eq!(outcome(&whole(19_000, 2), &both), MET, "the derived budget gives way to the class's own");
}

#[test]
fn without_a_budget_or_by_the_class_non_streaming_responses_are_excluded() {
    let only_ttft = Objectives { tpot: None, ..chat() };
    let by_choice = Objectives { non_streaming: NonStreaming::Excluded, ..chat() };
    let nothing = Objectives { non_streaming: NonStreaming::Excluded, ..Objectives::default() };
    let failed = Timeline { status: 500, ..whole(100, 0) };
    let left = Timeline { finish: None, ending: Ending::Left, ..whole(100_000, 0) };
    for objectives in [only_ttft, by_choice, nothing] {
        for timeline in [whole(10, 5), failed.clone(), left.clone()] {
            assert_eq!(outcome(&timeline, &objectives), excluded(Excluded::NonStreaming));
        }
        assert!(outcome(&stream(&[100, 120], 2), &objectives).is_judged(), "streams are");
    }
}

#[test]
fn embeddings_on_a_judged_path_have_the_budget_of_one_token() {
    let case = JudgeContext { judged_path: true, ..JudgeContext::of(Dialect::Plain) };
    let answer = |end| Timeline { output: Tokens(900), token_events: 0, choices: vec![], ..whole(end, 900) };
    assert_eq!(judge(&answer(500), &chat(), &case).outcome, MET);
    assert_eq!(judge(&answer(501), &chat(), &case).outcome, missed(Missed::E2e));
    assert_eq!(judge(&answer(1), &chat(), &JudgeContext::of(Dialect::Plain)).outcome, excluded(Excluded::Unjudged));
}

#[test]
fn a_non_streaming_response_without_output_and_reason_is_empty() {
    let nothing = Timeline { has_output: false, has_finish_reason: false, choices: vec![], ..whole(100, 0) };
    assert_eq!(outcome(&nothing, &chat()), missed(Missed::Empty));
    assert_eq!(outcome(&Timeline { has_finish_reason: true, ..nothing.clone() }, &chat()), MET);
    let e2e = |nothing: &Timeline| judge(nothing, &agent(), &CASE).e2e;
    assert_eq!(e2e(&nothing), Some(ObjectiveState::Held), "its end was reached");
    let late = Timeline { finish: Some(at(20_001)), end: at(20_001), ..nothing };
    assert_eq!(e2e(&late), Some(ObjectiveState::Broken));
}

#[test]
fn a_body_that_is_no_json_object_is_unparseable_only_if_it_ended_whole() {
    let garbled = Timeline { unparseable: true, finish: None, ..whole(100, 0) };
    assert_eq!(outcome(&garbled, &chat()), missed(Missed::Unparseable));
    let broken_off = Timeline { ending: Ending::Broken, ..garbled.clone() };
    assert_eq!(outcome(&broken_off, &chat()), missed(Missed::Truncated));
    let left = Timeline { ending: Ending::Left, ..garbled };
    assert_eq!(outcome(&left, &chat()), excluded(Excluded::ClientCancel));
}

#[test]
fn one_lump_is_held_to_the_tighter_of_the_classs_end_and_the_derived_one() {
    // 500 + 50 x (11 - 1) = 1000 ms.
    let lump = |end| {
        let mut lump = stream(&[end], 11);
        lump.choices[0].events = 1;
        lump
    };
    let own = |threshold| Objectives { ttft: objective(500), tpot: objective(50), e2e: objective(threshold), ..chat() };
    let e2e = |end, threshold| judge(&lump(end), &own(threshold), &CASE).e2e;
    assert_eq!((e2e(1000, 5000), e2e(1001, 5000)), (Some(ObjectiveState::Held), Some(ObjectiveState::Broken)));
    assert_eq!((e2e(700, 700), e2e(701, 700)), (Some(ObjectiveState::Held), Some(ObjectiveState::Broken)));
}

#[test]
fn of_several_open_choices_the_one_that_waits_longest_decides() {
    let leave = |quick: &[u64], slow: &[u64], end| {
        let mut left = cut(quick, quick.len() as u64, Ending::Left, end);
        let other = Choice { index: 1, ..cut(slow, slow.len() as u64, Ending::Left, end).choices.remove(0) };
        left.choices.push(other);
        outcome(&left, &Objectives { tpot: None, itl: objective(200), ..chat() })
    };
    assert_eq!(leave(&[100, 300], &[100], 300), excluded(Excluded::ClientCancel));
    assert_eq!(leave(&[100, 300], &[100], 301), missed(Missed::CanceledLate), "one has been silent for 201 ms");
    let by_rate = |quick: &[u64], slow: &[u64], end| {
        let mut left = cut(quick, quick.len() as u64, Ending::Left, end);
        let other = Choice { index: 1, ..cut(slow, slow.len() as u64, Ending::Left, end).choices.remove(0) };
        left.choices.push(other);
        outcome(&left, &chat())
    };
    let quick: Vec<u64> = (0..20).map(|number| 100 + 10 * number).collect();
    assert_eq!(by_rate(&quick, &[100, 190], 200), excluded(Excluded::ClientCancel));
    assert_eq!(by_rate(&quick, &[100, 190], 201), missed(Missed::CanceledLate), "two tokens of one in 101 ms");
}

// Failures.

#[test]
fn c09_a_body_that_ends_before_its_finish_is_truncated() {
    for ending in [Ending::Clean, Ending::Broken] {
        assert_eq!(outcome(&cut(&[100, 120], 2, ending, 130), &chat()), missed(Missed::Truncated));
    }
}

#[test]
fn finished_without_token_or_reason_is_empty_and_so_is_nothing_visible_under_a_lowered_cap() {
    let mut done = cut(&[], 0, Ending::Clean, 100);
    done.finish = Some(at(100));
    let empty = judge(&done, &chat(), &CASE);
    assert_eq!(
        (empty.outcome, empty.ttft),
        (missed(Missed::Empty), Some(ObjectiveState::NotEvaluated)),
        "no token came"
    );
    let lowered = JudgeContext { cap_lowered: true, ..CASE };
    let mut reasoning = stream(&[100, 120], 20);
    (reasoning.first_visible, reasoning.has_visible) = (None, false);
    assert_eq!(judge(&reasoning, &chat(), &lowered).outcome, missed(Missed::Empty));
    assert_eq!(judge(&stream(&[100, 120], 20), &chat(), &lowered).outcome, MET);
    let hidden = Timeline { has_visible: false, ..whole(100, 20) };
    assert_eq!(judge(&hidden, &chat(), &lowered).outcome, missed(Missed::Empty));
    assert_eq!(outcome(&hidden, &chat()), MET);
}

#[test]
fn every_status_of_an_engine_has_its_row() {
    use Excluded::{InvalidRequest, Unauthorized};
    use Missed::{UpstreamError, UpstreamOverload};
    let rows: &[(&[u16], Outcome)] = &[
        (&[429, 503, 529], missed(UpstreamOverload)),
        (&[400, 409, 411, 413, 414, 415, 422, 431, 501], excluded(InvalidRequest)),
        (&[500, 502, 504, 505, 507, 511, 599], missed(UpstreamError)),
        (&[101, 300, 301, 302, 304, 307, 308], missed(UpstreamError)),
        (&[401, 403, 404, 405, 406, 407, 408, 410, 418, 423, 451, 499], missed(UpstreamError)),
        (&[200, 201, 206], MET),
    ];
    for (statuses, expected) in rows {
        for &status in *statuses {
            let answer = Timeline { status, ..whole(100, 3) };
            assert_eq!(outcome(&answer, &chat()), *expected, "{status}");
        }
    }
    let forwarded = JudgeContext { credential_forwarded: true, ..CASE };
    let unknown = JudgeContext { model_unknown_to_pool: true, ..CASE };
    let of = |status, case: &JudgeContext| judge(&Timeline { status, ..whole(100, 3) }, &chat(), case).outcome;
    assert_eq!(of(401, &forwarded), excluded(Unauthorized));
    assert_eq!(of(403, &forwarded), excluded(Unauthorized));
    assert_eq!(of(404, &unknown), excluded(InvalidRequest));
    assert_eq!(of(404, &forwarded), missed(UpstreamError));
    let capped = JudgeContext { cap_lowered: true, ..CASE };
    assert_eq!(
        [400, 422, 413].map(|status| of(status, &capped)),
        [missed(UpstreamError), missed(UpstreamError), excluded(InvalidRequest)]
    );
    let away =
        JudgeContext { served_by_fallback_pool: true, credential_forwarded: true, model_unknown_to_pool: true, ..CASE };
    for status in [400, 401, 403, 404, 409, 411, 413, 414, 415, 422, 431, 501] {
        assert_eq!(of(status, &away), missed(UpstreamOverload), "{status}");
    }
    assert_eq!(of(500, &away), missed(UpstreamError));
}

#[test]
fn c10_an_in_band_error_outranks_the_status_and_counts_as_its_twin_before_the_first_token() {
    let with = |code, after_first_token| {
        let base = if after_first_token { stream(&[100, 120], 2) } else { cut(&[], 0, Ending::Clean, 100) };
        Timeline { error: Some(InBandError { code, after_first_token }), ..base }
    };
    let rows = [
        (504, missed(Missed::UpstreamError)),
        (500, missed(Missed::UpstreamError)),
        (503, missed(Missed::UpstreamOverload)),
        (529, missed(Missed::UpstreamOverload)),
        (429, missed(Missed::UpstreamOverload)),
        (400, excluded(Excluded::InvalidRequest)),
        (404, missed(Missed::UpstreamError)),
        (401, missed(Missed::UpstreamError)),
    ];
    for (code, expected) in rows {
        assert_eq!(outcome(&with(code, false), &chat()), expected, "{code} first");
        assert_eq!(outcome(&with(code, true), &chat()), missed(Missed::UpstreamError), "{code} after a token");
    }
    let other_status = Timeline { status: 500, ..with(400, false) };
    assert_eq!(outcome(&other_status, &chat()), excluded(Excluded::InvalidRequest));
}

#[test]
fn after_finish_only_an_in_band_error_changes_the_outcome() {
    let endings = [
        Ending::Left,
        Ending::Broken,
        Ending::TimedOut(TimeoutKind::Idle),
        Ending::TimedOut(TimeoutKind::Total),
        Ending::WriteStalled,
        Ending::Drained,
        Ending::Panicked,
    ];
    for ending in endings {
        let timeline = Timeline { ending, end: at(90_000), ..stream(&[100, 120], 2) };
        assert_eq!(outcome(&timeline, &chat()), MET, "{ending:?}");
        let error = Some(InBandError { code: 400, after_first_token: true });
        assert_eq!(outcome(&Timeline { error, ..timeline }, &chat()), missed(Missed::UpstreamError));
    }
}

#[test]
fn limits_drain_and_panics_have_their_reasons() {
    let rows = [
        (Ending::TimedOut(TimeoutKind::FirstToken), Missed::TimeoutFirstToken),
        (Ending::TimedOut(TimeoutKind::Idle), Missed::TimeoutIdle),
        (Ending::TimedOut(TimeoutKind::Total), Missed::TimeoutTotal),
        (Ending::Drained, Missed::Internal),
        (Ending::Panicked, Missed::Internal),
    ];
    for (ending, reason) in rows {
        assert_eq!(outcome(&cut(&[100], 1, ending, 300), &chat()), missed(reason));
    }
}

#[test]
fn c58_an_unparseable_response_is_a_miss_even_if_the_client_leaves() {
    for ending in [Ending::Clean, Ending::Left] {
        let coded = Timeline { unparseable: true, reader: ResponseFormat::Coded, ..cut(&[], 0, ending, 100) };
        assert_eq!(outcome(&coded, &chat()), missed(Missed::Unparseable));
    }
}

#[test]
fn on_a_failed_request_each_objective_counts_as_far_as_reached() {
    let objectives = Objectives { itl: objective(300), e2e: objective(1000), ..chat() };
    let verdict = |timeline: &Timeline| {
        let verdict = judge(timeline, &objectives, &CASE);
        [verdict.ttft, verdict.tpot, verdict.itl, verdict.e2e].map(Option::unwrap)
    };
    use ObjectiveState::{Broken, Held as Kept, NotEvaluated as Open};
    // A 500 at once, after the TTFT threshold, and after all thresholds.
    let failed = |end| Timeline { status: 500, ..cut(&[], 0, Ending::Clean, end) };
    assert_eq!(verdict(&failed(100)), [Open, Open, Open, Open]);
    assert_eq!(verdict(&failed(501)), [Broken, Open, Open, Open]);
    assert_eq!(verdict(&failed(1001)), [Broken, Open, Open, Broken]);
    // Cut after tokens: TTFT keeps its state, silence and slowness count.
    assert_eq!(verdict(&cut(&[100, 120], 2, Ending::Broken, 130)), [Kept, Open, Open, Open]);
    assert_eq!(verdict(&cut(&[100, 120], 2, Ending::TimedOut(TimeoutKind::Idle), 900)), [Kept, Broken, Broken, Open]);
    assert_eq!(verdict(&cut(&[600, 620], 2, Ending::Broken, 630)), [Broken, Open, Open, Open]);
    assert_eq!(verdict(&cut(&[], 0, Ending::Broken, 500)), [Open, Open, Open, Open], "its time is not over");
    assert_eq!(verdict(&cut(&[], 0, Ending::Broken, 501)), [Broken, Open, Open, Open]);
    // An error after the finish: points reached keep their state.
    let error = Some(InBandError { code: 500, after_first_token: true });
    assert_eq!(verdict(&Timeline { error, ..stream(&[100, 120], 2) }), [Kept, Kept, Kept, Kept]);
}

#[test]
fn on_an_excluded_request_no_objective_counts() {
    let left = judge(&cut(&[100, 120], 2, Ending::Left, 130), &chat(), &CASE);
    assert_eq!(left.outcome, excluded(Excluded::ClientCancel));
    assert_eq!((left.ttft, left.tpot), (Some(ObjectiveState::NotEvaluated), Some(ObjectiveState::NotEvaluated)));
}

// Clients that leave.

#[test]
fn c54_a_cancel_before_a_broken_objective_is_excluded_and_a_late_one_is_missed() {
    assert_eq!(outcome(&cut(&[], 0, Ending::Left, 100), &chat()), excluded(Excluded::ClientCancel));
    assert_eq!(outcome(&cut(&[], 0, Ending::Left, 500), &chat()), excluded(Excluded::ClientCancel));
    assert_eq!(outcome(&cut(&[], 0, Ending::Left, 2000), &chat()), missed(Missed::CanceledLate));
    let after_finish = Timeline { ending: Ending::Left, ..stream(&[100, 120], 2) };
    assert_eq!(outcome(&after_finish, &chat()), MET);
}

#[test]
fn a_leave_in_a_stall_is_late_also_without_an_itl_objective() {
    assert_eq!(outcome(&cut(&[100, 120], 40, Ending::Left, 1120), &chat()), excluded(Excluded::ClientCancel));
    assert_eq!(outcome(&cut(&[100, 120], 40, Ending::Left, 1121), &chat()), missed(Missed::CanceledLate));
    let itl = Objectives { itl: objective(200), ..chat() };
    assert_eq!(outcome(&cut(&[100, 120], 40, Ending::Left, 321), &itl), missed(Missed::CanceledLate));
    let patient = Objectives { stall: ms(5000), ..chat() };
    assert_eq!(outcome(&cut(&[100, 120], 400, Ending::Left, 4000), &patient), excluded(Excluded::ClientCancel));
}

#[test]
fn a_leave_from_a_slow_stream_is_late_once_two_token_events_have_come() {
    // 4 tokens seen by the age of 200 ms: exactly at the threshold.
    assert_eq!(outcome(&cut(&[100, 200], 4, Ending::Left, 300), &chat()), excluded(Excluded::ClientCancel));
    assert_eq!(outcome(&cut(&[100, 200], 4, Ending::Left, 301), &chat()), missed(Missed::CanceledLate));
    assert_eq!(outcome(&cut(&[100], 1, Ending::Left, 301), &chat()), excluded(Excluded::ClientCancel));
}

#[test]
fn a_leave_after_a_late_first_token_or_the_e2e_threshold_is_late() {
    assert_eq!(outcome(&cut(&[600], 1, Ending::Left, 610), &chat()), missed(Missed::CanceledLate));
    assert_eq!(outcome(&cut(&[], 0, Ending::Left, 20_000), &agent()), excluded(Excluded::ClientCancel));
    assert_eq!(outcome(&cut(&[], 0, Ending::Left, 20_001), &agent()), missed(Missed::CanceledLate));
}

#[test]
fn a_choice_that_has_finished_no_longer_waits() {
    let mut two = cut(&[100, 120], 20, Ending::Left, 1500);
    two.choices[0].finished = true;
    let second =
        Choice { index: 1, finished: false, last_token: Some(at(1490)), tokens: 60.0, ..two.choices[0].clone() };
    two.choices.push(second);
    two.last_token = Some(at(1490));
    assert_eq!(outcome(&two, &chat()), excluded(Excluded::ClientCancel));
    two.choices[1].last_token = Some(at(400));
    assert_eq!(outcome(&two, &chat()), missed(Missed::CanceledLate), "the open one is silent");
}

#[test]
fn a_non_streaming_response_that_is_left_is_held_to_the_expected_output() {
    let left = |end, objectives: &Objectives, case: &JudgeContext| {
        let timeline = Timeline { finish: None, ending: Ending::Left, choices: vec![], ..whole(end, 0) };
        judge(&timeline, objectives, case).outcome
    };
    let output_tokens = Some(Quantiles { p50: Tokens(10), p95: Tokens(101) });
    let assuming = Objectives { assumed: Some(Assumption { input_tokens: None, output_tokens }), ..chat() };
    let stating = |cap| JudgeContext { stated_cap: Some(Tokens(cap)), ..CASE };
    let own = Objectives { default_output_tokens: Some(Tokens(201)), ..chat() };
    // Objectives, context, and the last moment at which leaving is a plain cancel.
    let rows = [
        (&assuming, stating(21), 500 + 50 * 20),
        (&assuming, stating(4000), 500 + 50 * 100),
        (&assuming, CASE, 500 + 50 * 100),
        (&chat(), stating(21), 500 + 50 * 20),
        (&own, CASE, 500 + 50 * 200),
        (&chat(), CASE, 500 + 50 * 1023),
        (&agent(), stating(21), 20_000),
    ];
    for (objectives, case, last) in rows {
        assert_eq!(left(last, objectives, &case), excluded(Excluded::ClientCancel), "{last}");
        assert_eq!(left(last + 1, objectives, &case), missed(Missed::CanceledLate), "{last} + 1");
    }
}

#[test]
fn a_leave_while_waiting_is_judged_alike_and_one_before_the_upload_ended_never_is() {
    let waiting = |uploaded, streamed| Progress::waiting(at(0), uploaded, streamed);
    let left = |progress: &Progress<'_>, end| judge_left(progress, &chat(), &CASE, at(end)).outcome;
    assert_eq!(left(&waiting(true, true), 500), excluded(Excluded::ClientCancel));
    assert_eq!(left(&waiting(true, true), 501), missed(Missed::CanceledLate));
    assert_eq!(left(&waiting(true, false), 501), excluded(Excluded::ClientCancel));
    assert_eq!(left(&waiting(false, true), 90_000), excluded(Excluded::ClientCancel));
    let unjudged = JudgeContext::of(Dialect::Plain);
    let outcome = judge_left(&waiting(true, false), &chat(), &unjudged, at(90_000)).outcome;
    assert_eq!(outcome, excluded(Excluded::Unjudged));
    let outcome = judge_left(&waiting(false, false), &chat(), &unjudged, at(90_000)).outcome;
    assert_eq!(outcome, excluded(Excluded::ClientCancel));
}

// Clients that do not read.

/// `timeline`, whose client stopped reading after `moments` at `since`.
fn limited(timeline: Timeline, moments: &[u64], tokens: u64, since: u64) -> Timeline {
    let before = cut(moments, tokens, Ending::Left, since);
    Timeline { limited: Some(ClientLimited { at: at(since), choices: before.choices }), ..timeline }
}

#[test]
fn a_client_that_does_not_read_is_excluded_whatever_else_would_have_held() {
    let endings = [Ending::Left, Ending::WriteStalled, Ending::TimedOut(TimeoutKind::Total)];
    for ending in endings {
        let timeline = limited(cut(&[100, 120], 40, ending, 60_000), &[100, 120], 40, 130);
        assert_eq!(outcome(&timeline, &chat()), excluded(Excluded::ClientLimited), "{ending:?}");
    }
    let fast = limited(stream(&[100, 120, 140], 40), &[100, 120], 30, 130);
    assert_eq!(outcome(&fast, &chat()), excluded(Excluded::ClientLimited));
    let slow = limited(stream(&[100, 120, 9000], 3), &[100, 120], 2, 130);
    assert_eq!(outcome(&slow, &chat()), excluded(Excluded::ClientLimited));
}

#[test]
fn objectives_broken_before_the_client_stopped_reading_stay_missed() {
    let late = limited(stream(&[600, 620], 40), &[600, 620], 40, 610);
    assert_eq!(outcome(&late, &chat()), missed(Missed::Ttft));
    let slow = limited(stream(&[100, 300, 320], 90), &[100, 300], 2, 310);
    assert_eq!(outcome(&slow, &chat()), missed(Missed::Tpot));
    let left = limited(cut(&[100, 300], 2, Ending::Left, 9000), &[100, 300], 2, 310);
    assert_eq!(outcome(&left, &chat()), missed(Missed::CanceledLate));
    let stalled = limited(cut(&[100, 120], 90, Ending::Left, 9000), &[100, 120], 90, 1200);
    assert_eq!(outcome(&stalled, &chat()), missed(Missed::CanceledLate), "it stalled before");
}

#[test]
fn a_leave_after_the_finish_of_an_unread_response_is_no_cancel() {
    let left = Timeline { ending: Ending::Left, ..stream(&[600, 620], 40) };
    assert_eq!(outcome(&limited(left, &[600], 1, 610), &chat()), missed(Missed::Ttft));
}

#[test]
fn a_non_streaming_response_whose_client_does_not_read_has_no_ttft() {
    let verdict = judge(&limited(whole(60_000, 20), &[], 0, 700), &chat(), &CASE);
    assert_eq!(
        (verdict.outcome, verdict.ttft),
        (excluded(Excluded::ClientLimited), Some(ObjectiveState::NotEvaluated))
    );
    let late = Timeline { ending: Ending::WriteStalled, finish: None, ..whole(60_000, 20) };
    assert_eq!(outcome(&limited(late, &[], 0, 700), &chat()), excluded(Excluded::ClientLimited));
    // It is not overdue either.
    let client = ClientState::default();
    let progress_cell = ProgressCell::set_client(client.clone());
    client.refuses(at(700));
    let waiting = Progress::waiting(at(0), true, false);
    assert!(!progress_cell.is_overdue(&waiting, &chat(), &CASE, 1, at(90_000)));
}

#[test]
fn an_unread_stream_without_the_counted_token_is_judged_by_its_finish() {
    let visible = Objectives { ttft_counts: TtftCounts::FirstVisibleToken, ..chat() };
    for (finish, expected) in [(450, excluded(Excluded::ClientLimited)), (600, missed(Missed::Ttft))] {
        let mut reasoning = stream(&[200, finish], 100);
        (reasoning.first_visible, reasoning.choices[0].first_visible) = (None, None);
        let reasoning = limited(Timeline { end: at(9000), ..reasoning }, &[200], 1, 220);
        assert_eq!(outcome(&reasoning, &visible), expected, "finish at {finish}");
    }
}

#[test]
fn ttft_is_judged_even_after_the_client_stopped_reading() {
    let late = limited(stream(&[900, 920], 40), &[], 0, 200);
    assert_eq!(outcome(&late, &chat()), missed(Missed::Ttft));
    let in_time = limited(stream(&[450, 470], 40), &[], 0, 200);
    assert_eq!(outcome(&in_time, &chat()), excluded(Excluded::ClientLimited));
}

#[test]
fn faults_of_engine_and_gateway_keep_their_reasons_for_a_client_that_does_not_read() {
    let rows = [
        (Ending::Broken, Missed::Truncated),
        (Ending::Clean, Missed::Truncated),
        (Ending::TimedOut(TimeoutKind::Idle), Missed::TimeoutIdle),
        (Ending::Drained, Missed::Internal),
        (Ending::Panicked, Missed::Internal),
    ];
    for (ending, reason) in rows {
        let timeline = limited(cut(&[100, 120], 40, ending, 60_000), &[100, 120], 40, 130);
        let verdict = judge(&timeline, &chat(), &CASE);
        assert_eq!(verdict.outcome, missed(reason));
        assert_eq!((verdict.ttft, verdict.tpot), (Some(ObjectiveState::Held), Some(ObjectiveState::NotEvaluated)));
    }
}

#[test]
fn reading_slowly_after_the_finish_changes_nothing() {
    let timeline = Timeline { ending: Ending::WriteStalled, ..stream(&[100, 120], 2) };
    for since in [120, 400] {
        assert_eq!(outcome(&limited(timeline.clone(), &[100, 120], 2, since), &chat()), MET, "since {since}");
    }
}

// Requests that are not judged, and rejections.

#[test]
fn beyond_the_tenants_limit_everything_is_rate_limited_however_it_ends() {
    let case = JudgeContext { over_limit: true, ..CASE };
    for timeline in [stream(&[100, 120], 2), Timeline { status: 500, ..whole(10, 0) }, cut(&[], 0, Ending::Left, 9000)]
    {
        assert_eq!(judge(&timeline, &chat(), &case).outcome, excluded(Excluded::RateLimited));
    }
}

#[test]
fn a_rejection_keeps_its_reason_and_counts_broken_objectives() {
    let waiting = Progress::waiting(at(0), true, true);
    let shed = judge_refused(missed(Missed::Shed), &waiting, &chat(), &CASE, at(700));
    assert_eq!(
        (shed.outcome, shed.ttft, shed.tpot),
        (missed(Missed::Shed), Some(ObjectiveState::Broken), Some(ObjectiveState::NotEvaluated))
    );
    let wrong = judge_refused(excluded(Excluded::InvalidRequest), &waiting, &chat(), &CASE, at(700));
    assert_eq!((wrong.outcome, wrong.ttft), (excluded(Excluded::InvalidRequest), Some(ObjectiveState::NotEvaluated)));
    let beyond = JudgeContext { over_limit: true, ..CASE };
    for outcome in [missed(Missed::UpstreamError), excluded(Excluded::InvalidRequest)] {
        let judged = judge_refused(outcome, &waiting, &chat(), &beyond, at(700));
        assert_eq!(judged.outcome, excluded(Excluded::RateLimited), "however it ends");
    }
    let unjudged =
        judge_refused(missed(Missed::UpstreamUnavailable), &waiting, &chat(), &JudgeContext::of(Dialect::Plain), at(1));
    assert_eq!(unjudged.outcome, excluded(Excluded::Unjudged));
}

#[test]
fn targets_of_a_request_tighten_and_only_by_permission_loosen() {
    let with = |ttft, may_loosen| chat().with_targets(Some(ms(ttft)), None, may_loosen).ttft.unwrap().threshold;
    assert_eq!(with(300, false), ms(300));
    assert_eq!(with(900, false), ms(500));
    assert_eq!(with(900, true), ms(900));
    let added = agent().with_targets(Some(ms(300)), Some(ms(20)), false);
    assert_eq!(added.derived_budget(11), Some(ms(500)));
    assert_eq!(added.ttft.unwrap().attainment, added.joint_target);
}

#[test]
fn targets_of_a_request_leave_what_its_class_makes_of_it() {
    let own = chat().with_targets(Some(ms(100)), None, false);
    let of = |verdict: Verdict| (verdict.outcome, verdict.by_class);
    let answered = stream(&[300, 320], 2);
    assert_eq!(of(judge(&answered, &own, &CASE)), (missed(Missed::Ttft), Outcome::Met));
    assert_eq!(of(judge(&answered, &chat(), &CASE)), (Outcome::Met, Outcome::Met));
    let late = stream(&[600, 620], 2);
    assert_eq!(of(judge(&late, &own, &CASE)), (missed(Missed::Ttft), missed(Missed::Ttft)));
    let waiting = Progress::waiting(at(0), true, true);
    let left = |objectives, moment| of(judge_left(&waiting, objectives, &CASE, at(moment)));
    assert_eq!(left(&own, 300), (missed(Missed::CanceledLate), excluded(Excluded::ClientCancel)));
    assert_eq!(left(&own, 600), (missed(Missed::CanceledLate), missed(Missed::CanceledLate)));
}

#[test]
fn budgets_never_overflow() {
    assert!(chat().derived_budget(u64::MAX).unwrap() > Duration::from_secs(1 << 30));
    assert_eq!(chat().derived_budget(0), chat().derived_budget(1));
    let endless = cut(&[100, 120], u64::MAX, Ending::Left, 400);
    assert_eq!(outcome(&endless, &chat()), excluded(Excluded::ClientCancel));
}

#[test]
fn the_progress_cell_of_a_stream_shows_when_it_is_overdue() {
    let waiting = Progress::waiting(at(0), true, true);
    let progress_cell = ProgressCell::default();
    let overdue =
        |progress_cell: &ProgressCell, moment| progress_cell.is_overdue(&waiting, &chat(), &CASE, 1, at(moment));
    assert!(!overdue(&progress_cell, 500));
    assert!(overdue(&progress_cell, 501));
    progress_cell.token(at(400), true);
    assert!(!overdue(&progress_cell, 1400));
    assert!(overdue(&progress_cell, 1401), "it stalls");
    progress_cell.token(at(420), true);
    assert!(!overdue(&progress_cell, 500));
    assert!(overdue(&progress_cell, 501), "two tokens in 100 ms");
    progress_cell.finished(true);
    assert!(!overdue(&progress_cell, 90_000));
    progress_cell.finished(false);
    assert!(overdue(&progress_cell, 90_000), "a further token undid the finish");
}

#[test]
fn unjudged_requests_are_never_overdue() {
    let waiting = Progress::waiting(at(0), true, true);
    let overdue = |waiting: &Progress<'_>, objectives: &Objectives, case: &JudgeContext| {
        ProgressCell::default().is_overdue(waiting, objectives, case, 1, at(90_000))
    };
    assert!(overdue(&waiting, &chat(), &CASE));
    assert!(!overdue(&waiting, &chat(), &JudgeContext { over_limit: true, ..CASE }));
    assert!(!overdue(&waiting, &chat(), &JudgeContext::of(Dialect::Plain)));
    assert!(overdue(&waiting, &chat(), &JudgeContext { judged_path: true, ..JudgeContext::of(Dialect::Plain) }));
    let whole = Progress { streamed: false, ..waiting };
    assert!(overdue(&whole, &chat(), &CASE));
    assert!(!overdue(&whole, &Objectives { non_streaming: NonStreaming::Excluded, ..chat() }, &CASE));
}

#[test]
fn a_client_that_does_not_read_is_overdue_by_earlier_breaks_and_its_first_token() {
    let waiting = Progress::waiting(at(0), true, true);
    let overdue =
        |progress_cell: &ProgressCell, moment| progress_cell.is_overdue(&waiting, &chat(), &CASE, 1, at(moment));
    let refusing = |since| {
        let client = ClientState::default();
        let progress_cell = ProgressCell::set_client(client.clone());
        client.refuses(at(since));
        progress_cell
    };
    let progress_cell = refusing(300);
    assert!(!overdue(&progress_cell, 500) && overdue(&progress_cell, 501), "no token has come");
    progress_cell.token(at(400), true);
    assert!(!overdue(&progress_cell, 90_000), "it came in time, and the rest is the client's doing");
    let broken = refusing(501);
    [at(400), at(420)].into_iter().for_each(|moment| broken.token(moment, true));
    assert!(overdue(&broken, 502) && overdue(&broken, 90_000), "two tokens in 101 ms");
    let in_time = refusing(420);
    [at(400), at(420)].into_iter().for_each(|moment| in_time.token(moment, true));
    assert!(overdue(&in_time, 520), "that it reads no more is not known yet");
    assert!(!overdue(&in_time, 521) && !overdue(&in_time, 90_000));
}

#[test]
fn tokens_of_several_choices_are_shared_among_them() {
    let waiting = Progress::waiting(at(0), true, true);
    let progress_cell = ProgressCell::default();
    (0..6).for_each(|number| progress_cell.token(at(100 + 10 * number), true));
    let overdue = |choices, moment| progress_cell.is_overdue(&waiting, &chat(), &CASE, choices, at(moment));
    assert!(!overdue(1, 400) && overdue(1, 401), "six tokens in 300 ms");
    assert!(!overdue(3, 200) && overdue(3, 201), "two of each choice in 100 ms");
}

#[test]
fn a_stream_of_several_tokens_an_event_is_overdue_by_its_tokens() {
    let waiting = Progress::waiting(at(0), true, true);
    let progress_cell = ProgressCell::default();
    progress_cell.set_tokens_per_event(3.0);
    [at(400), at(520)].into_iter().for_each(|moment| progress_cell.token(moment, true));
    let overdue = |moment| progress_cell.is_overdue(&waiting, &chat(), &CASE, 1, at(moment));
    assert!(!overdue(700), "six tokens in 300 ms");
    assert!(overdue(701));
}

#[test]
fn a_gap_that_broke_itl_stays_broken_though_tokens_come_again() {
    let waiting = Progress::waiting(at(0), true, true);
    let promised = Objectives { itl: objective(200), tpot: None, ..chat() };
    let progress_cell = ProgressCell::default();
    [at(100), at(400), at(450)].into_iter().for_each(|moment| progress_cell.token(moment, true));
    let overdue = |moment| progress_cell.is_overdue(&waiting, &promised, &CASE, 1, at(moment));
    assert!(!overdue(460));
    progress_cell.itl_broke(at(300));
    assert!(overdue(460));
}

// Laws.

/// Order of outcomes: met, excluded, missed.
fn badness(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Met => 0,
        Outcome::Excluded(_) => 1,
        Outcome::Missed(_) => 2,
    }
}

fn any_objectives() -> impl Strategy<Value = Objectives> {
    let one = || prop::option::of((1_u64..3000).prop_map(|millis| objective(millis).unwrap()));
    let counts = prop_oneof![Just(TtftCounts::FirstToken), Just(TtftCounts::FirstVisibleToken)];
    (one(), one(), one(), one(), counts).prop_map(|(ttft, tpot, itl, e2e, ttft_counts)| Objectives {
        ttft,
        tpot,
        itl,
        e2e,
        ttft_counts,
        ..Objectives::default()
    })
}

fn any_moments() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0_u64..800, 1..12).prop_map(|steps| {
        let sum = |total: &mut u64, step: u64| {
            *total += step;
            Some(*total)
        };
        steps.into_iter().scan(0, sum).collect()
    })
}

fn gaps_of(mut timeline: Timeline, objectives: &Objectives, moments: &[u64]) -> Timeline {
    if objectives.itl.is_some() {
        timeline = with_itl(timeline, objectives, moments);
    }
    timeline
}

fn any_ending() -> impl Strategy<Value = Ending> {
    prop_oneof![
        Just(Ending::Clean),
        Just(Ending::Broken),
        Just(Ending::Left),
        Just(Ending::WriteStalled),
        Just(Ending::Drained),
        Just(Ending::Panicked),
        prop_oneof![Just(TimeoutKind::FirstToken), Just(TimeoutKind::Idle), Just(TimeoutKind::Total)]
            .prop_map(Ending::TimedOut),
    ]
}

proptest! {
    /// Delaying all events from some point on never improves a finished response.
    #[test]
    fn delay_never_improves_a_finished_answer(
        objectives in any_objectives(), moments in any_moments(), tokens in 0_u64..40,
        from in 0_usize..12, delay in 1_u64..5000,
    ) {
        let later: Vec<u64> =
            moments.iter().enumerate().map(|(i, moment)| if i >= from { moment + delay } else { *moment }).collect();
        let judged = |moments: &[u64]| {
            judge(&gaps_of(stream(moments, tokens), &objectives, moments), &objectives, &CASE)
        };
        let (good, bad) = (judged(&moments), judged(&later));
        prop_assert!(badness(good.outcome) <= badness(bad.outcome), "{good:?} {bad:?}");
        for (before, after) in [(good.ttft, bad.ttft), (good.tpot, bad.tpot), (good.itl, bad.itl), (good.e2e, bad.e2e)] {
            prop_assert!(before != Some(ObjectiveState::Broken) || after == Some(ObjectiveState::Broken));
        }
    }

    /// A client that leaves later without further events is never less the service's fault.
    #[test]
    fn waiting_longer_never_turns_a_miss_into_a_cancel(
        objectives in any_objectives(), moments in any_moments(), wait in 0_u64..3000, more in 0_u64..3000,
    ) {
        let last = moments[moments.len() - 1];
        let left = |end| {
            let timeline = cut(&moments, moments.len() as u64, Ending::Left, end);
            outcome(&gaps_of(timeline, &objectives, &moments), &objectives)
        };
        let (early, late) = (left(last + wait), left(last + wait + more));
        prop_assert!(badness(early) <= badness(late), "{early} {late}");
    }

    /// The same tokens in fewer, larger events with the same end are never judged better.
    #[test]
    fn a_lump_is_never_better_than_the_stream_it_hides(
        moments in any_moments(), tokens in 2_u64..40,
    ) {
        let lump = [moments[moments.len() - 1]];
        let (streamed, lumped) = (outcome(&stream(&moments, tokens), &chat()), outcome(&stream(&lump, tokens), &chat()));
        prop_assert!(streamed != MET || badness(lumped) >= badness(streamed));
    }

    /// Reasons and states agree for every timeline: met has nothing broken, an objective's
    /// reason is a broken one, excluded has nothing evaluated.
    #[test]
    fn every_response_has_an_outcome_that_fits_its_objectives(
        objectives in any_objectives(), moments in any_moments(), tokens in 0_u64..40, ending in any_ending(),
        wait in 0_u64..3000, status in prop_oneof![4 => Just(200_u16), 1 => 100_u16..600], finished in any::<bool>(),
        error in prop::option::weighted(0.2, (400_u16..600, any::<bool>())), unparseable in prop::bool::weighted(0.1),
        limit in prop::option::weighted(0.3, 0_usize..12), streamed in any::<bool>(), reason in any::<bool>(),
        non_streaming in prop_oneof![3 => Just(NonStreaming::Judged), 1 => Just(NonStreaming::Excluded)],
    ) {
        let objectives = Objectives { non_streaming, ..objectives };
        let end = moments[moments.len() - 1] + wait;
        let mut timeline = gaps_of(cut(&moments, tokens, ending, end), &objectives, &moments);
        timeline.finish = finished.then(|| at(end));
        timeline.error = error.map(|(code, after_first_token)| InBandError { code, after_first_token });
        (timeline.status, timeline.unparseable, timeline.streamed) = (status, unparseable, streamed);
        timeline.has_finish_reason = reason;
        if let Some(limit) = limit {
            let seen = &moments[..limit.min(moments.len())];
            let since = seen.last().copied().unwrap_or(0) + 1;
            timeline = limited(timeline, seen, tokens, since);
        }
        let verdict = judge(&timeline, &objectives, &CASE);
        let states = [verdict.ttft, verdict.tpot, verdict.itl, verdict.e2e];
        let broken = |held: Option<ObjectiveState>| held == Some(ObjectiveState::Broken);
        match verdict.outcome {
            Outcome::Met => prop_assert!(!states.into_iter().any(broken)),
            Outcome::Excluded(_) => {
                prop_assert!(states.into_iter().flatten().all(|held| held == ObjectiveState::NotEvaluated));
            }
            Outcome::Missed(Missed::Ttft) => prop_assert!(broken(verdict.ttft)),
            Outcome::Missed(Missed::Tpot) => prop_assert!(broken(verdict.tpot)),
            Outcome::Missed(Missed::Itl) => prop_assert!(broken(verdict.itl)),
            Outcome::Missed(Missed::E2e) => prop_assert!(broken(verdict.e2e)),
            Outcome::Missed(_) => {}
        }
    }
}

//! Measures and objectives (`docs/cases.md`).

use std::time::Duration;

use crate::support::scripted_engine::{Script, event, fixtures::*};
use goodput::accept::DrainPhase;
use serde_json::json;

use crate::support::*;

fn close(seen: Option<f64>, wanted: f64) -> bool {
    seen.is_some_and(|seen| (seen - wanted).abs() < 1e-3)
}

async fn line_of(script: Script) -> Line {
    let (house, _engine) = House::playing(script);
    house.chat(stream_with_usage()).await.whole().await;
    let line = house.line().await;
    house.end().await;
    line
}

#[tokio::test(start_paused = true)]
async fn c16_a_role_event_and_empty_content_are_no_token() {
    let script = Script::stream().at(10).say(r()).at(100).say(t("")).at(700).say(t("a")).say(f("stop")).say(d()).end();
    let line = line_of(script).await;
    assert_eq!((line.verdict(), line.ttft()), ("missed(ttft)".into(), Some(700.0)));
}

fn reasoning(word: fn(&str) -> String) -> Script {
    Script::stream()
        .say_all([(200, word("x")), (230, word("y")), (2000, t("a"))])
        .say(f("stop"))
        .say(u(5, 3))
        .say(d())
        .end()
}

#[tokio::test(start_paused = true)]
async fn c17_reasoning_is_a_token_and_not_visible() {
    for word in [g as fn(&str) -> String, g_short] {
        // TPOT 900 ms, because the pause before the visible token is not under test.
        let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5), ("tpot_seconds", 1.0)]);
        let (house, _engine) = House::playing_with(&yaml, reasoning(word));
        house.chat(stream_with_usage()).await.whole().await;
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft(), line.tpot()), ("met".into(), Some(200.0), Some(900.0)));
        let page = house.page();
        assert!((page.sum("goodput_time_to_first_visible_token_seconds_sum", &[]) - 2.0).abs() < 1e-9);
        house.end().await;

        let (house, _engine) = House::playing_with(&yaml.class("ttft_counts: first_visible_token"), reasoning(word));
        house.chat(stream_with_usage()).await.whole().await;
        assert_eq!(house.line().await.verdict(), "missed(ttft)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c17_a_stop_by_length_before_anything_visible_is_judged_by_its_finish() {
    let yaml = |threshold| {
        Yaml::default()
            .promise(&[("ttft_seconds", threshold), ("tpot_seconds", 1.0)])
            .class("ttft_counts: first_visible_token")
    };
    for (threshold, verdict) in [(0.5, "met"), (0.4, "missed(ttft)")] {
        let script = Script::stream()
            .say_all([(200, g("x")), (230, g("y"))])
            .at(450)
            .say(f("length"))
            .say(u(5, 2))
            .say(d())
            .end();
        let (house, _engine) = House::playing_with(&yaml(threshold), script);
        house.chat(stream_with_usage()).await.whole().await;
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft()), (verdict.into(), Some(200.0)));
        assert_eq!(house.page().sum("goodput_time_to_first_visible_token_seconds_count", &[]), 0.0);
        assert_eq!(house.page().sum("goodput_truncated_answers_total", &[]), 1.0);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c18_a_tool_call_is_a_token() {
    let script = Script::stream()
        .say_all([(10, r()), (300, k("{")), (340, k("}"))])
        .say(f("tool_calls"))
        .say(u(9, 6))
        .say(d())
        .end();
    let line = line_of(script).await;
    assert_eq!((line.verdict(), line.ttft()), ("met".into(), Some(300.0)));
}

#[tokio::test(start_paused = true)]
async fn c18_a_legacy_function_call_is_a_token() {
    let call = t("x").replace(r#""content":"x""#, r#""function_call":{"name":"f","arguments":""}"#);
    let script = Script::stream().at(10).say(r()).at(300).say(call).say(f("function_call")).say(u(9, 1)).say(d()).end();
    let line = line_of(script).await;
    assert_eq!((line.verdict(), line.ttft()), ("met".into(), Some(300.0)));
}

#[tokio::test(start_paused = true)]
async fn c19_a_stream_in_one_event_is_held_to_the_derived_budget() {
    for (when, verdict) in [(400, "met"), (1400, "missed(ttft)")] {
        let all = [event(&t("all of it")), event(&f("stop")), event(&u(5, 20)), event(&d())].concat();
        let script = Script::stream().at(when).put(all).end();
        let (house, _engine) = House::playing(script);
        house.chat(stream_with_usage()).await.whole().await;
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft(), line.tpot()), (verdict.into(), Some(when as f64), None));
        let page = house.page();
        let broken = |objective| {
            let labels = [("objective", objective)];
            page.sum("goodput_slo_objective_total", &labels) - page.sum("goodput_slo_objective_met_total", &labels)
        };
        let ttft = if when > 500 { 1.0 } else { 0.0 };
        assert_eq!((broken("ttft"), broken("tpot"), broken("e2e")), (ttft, 0.0, 0.0));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c19_a_non_streaming_response_is_held_to_the_derived_budget() {
    for (when, verdict) in [(1400, "met"), (1450, "met"), (1500, "missed(e2e)")] {
        let script = Script::new().at(when).reply(200, &[("content-type", "application/json")], whole("x", 5, 20));
        let (house, _engine) = House::playing(script);
        let answer = house.chat(unary()).await.whole().await;
        assert_eq!(answer.text(), whole("x", 5, 20));
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft(), line.tpot()), (verdict.into(), None, None));
        assert_eq!((line.e2e(), line.tokens()), (Some(when as f64), (Some(5), Some(20))));
        assert_eq!(house.page().sum("goodput_time_to_first_token_seconds_count", &[]), 0.0);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c19_a_non_streaming_response_is_held_to_the_classs_e2e_if_it_has_one() {
    for (when, verdict) in [(1900, "met"), (2100, "missed(e2e)")] {
        let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5), ("tpot_seconds", 0.05), ("e2e_seconds", 2.0)]);
        let script = Script::new().at(when).reply(200, &[("content-type", "application/json")], whole("x", 5, 20));
        let (house, _engine) = House::playing_with(&yaml, script);
        house.chat(unary()).await.whole().await;
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c19_a_class_with_ttft_alone_does_not_judge_non_streaming_responses() {
    for yaml in [Yaml::default().promise(&[("ttft_seconds", 0.5)]), Yaml::default().class("non_streaming: excluded")] {
        let script = Script::new().at(9000).reply(200, &[("content-type", "application/json")], whole("x", 5, 20));
        let (house, _engine) = House::playing_with(&yaml, script);
        house.chat(unary()).await.whole().await;
        assert_eq!(house.line().await.verdict(), "excluded(non_streaming)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c20_tpot_is_by_tokens_and_gaps_are_by_events() {
    let events = (0..10).map(|i| (100 + 60 * i, t("three tokens")));
    let script = Script::stream().say_all(events).say(f("stop")).say(u(5, 31)).say(d()).end();
    let (house, _engine) = House::playing(script);
    house.chat(stream_with_usage()).await.whole().await;
    let line = house.line().await;
    assert_eq!((line.verdict(), line.text("token_source")), ("met".into(), "usage"));
    assert!(close(line.tpot(), 18.0));
    let page = house.page();
    assert_eq!(page.sum("goodput_inter_token_gap_seconds_count", &[]), 9.0);
    assert!((page.sum("goodput_inter_token_gap_seconds_sum", &[]) - 0.54).abs() < 1e-9);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c20_without_usage_events_are_counted_and_labelled_so() {
    let yaml = Yaml::default().kind("generic");
    let events = (0..10).map(|i| (100 + 60 * i, t("three tokens")));
    let script = Script::stream().say_all(events).say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing_with(&yaml, script);
    house.chat(stream()).await.whole().await;
    let line = house.line().await;
    assert_eq!((line.verdict(), line.text("token_source")), ("missed(tpot)".into(), "events"));
    assert!(close(line.tpot(), 60.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c20_the_ratio_of_tokens_to_events_is_learned_from_usage() {
    let events = |usage: bool| {
        let events = (0..16).map(|i| (100 + 60 * i, t("three tokens")));
        let script = Script::stream().say_all(events).say(f("stop"));
        if usage { script.say(u(5, 48)).say(d()).end() } else { script.say(d()).end() }
    };
    // Usage comes for a while, then it stays away.
    for (answers, tokens, verdict) in [(2, 16, "missed(tpot)"), (3, 48, "met")] {
        let house = House::new(&Yaml::default());
        let mut scripts = vec![events(true); answers];
        scripts.push(events(false));
        house.engine("e1", scripts);
        for _ in 0..=answers {
            house.chat(stream()).await.whole().await;
        }
        let last = &house.lines(answers + 1).await[answers];
        assert_eq!((last.text("token_source"), last.verdict()), ("events", verdict.to_owned()));
        assert_eq!(last.tokens().1, Some(tokens));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c21_tpot_by_its_formula_and_e2e_to_the_finish_event() {
    for close_after in [0, 5000] {
        let script = Script::stream()
            .say_all([(100, t("a")), (200, t("b")), (200, f("stop")), (500, u(5, 2)), (600, d())])
            .wait(ms(close_after))
            .end();
        let (house, _engine) = House::playing(script);
        let answer = house.chat(stream_with_usage()).await.whole().await;
        // An engine has a second after the finish.
        assert_eq!(answer.end, at(if close_after == 0 { 600 } else { 1200 }));
        let line = house.line().await;
        assert_eq!(line.verdict(), "missed(tpot)");
        assert_eq!((line.ttft(), line.tpot(), line.e2e()), (Some(100.0), Some(100.0), Some(200.0)));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c21_one_token_has_no_tpot_and_the_derived_budget_is_the_ttft() {
    for (finish, verdict) in [(400, "met"), (600, "missed(e2e)")] {
        let script = Script::stream().at(300).say(t("a")).at(finish).say(f("stop")).say(u(5, 1)).say(d()).end();
        let (house, _engine) = House::playing(script);
        house.chat(stream_with_usage()).await.whole().await;
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft(), line.tpot()), (verdict.into(), Some(300.0), None));
        assert_eq!(house.page().sum("goodput_time_per_output_token_seconds_count", &[]), 0.0);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c21_an_engine_that_hangs_after_its_finish_still_ends_the_answer() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms}");
    let script = Script::stream().say_all([(100, t("a")), (120, t("b")), (120, f("stop")), (120, d())]).silence();
    let (house, engine) = House::playing_with(&yaml, script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.end, answer.is_cut), (at(420), false));
    assert!(answer.text().ends_with(&event(&d())), "no error event after the finish");
    assert_eq!(house.line().await.verdict(), "met");
    assert_eq!(engine.log().closed(0).await, at(420));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c23_every_threshold_is_an_edge() {
    let yaml = Yaml::default().promise(&[
        ("ttft_seconds", 1.2),
        ("tpot_seconds", 0.037),
        ("itl_seconds", 0.73),
        ("e2e_seconds", 47.5),
    ]);
    let script = Script::stream().at(1200).say(t("a")).say(f("stop")).say(u(5, 1)).say(d()).end();
    let (house, _engine) = House::playing_with(&yaml, script);
    house.chat(stream_with_usage()).await.whole().await;
    let page = house.page();
    let edge = |name, le| page.sum(name, &[("le", le)]);
    assert_eq!(edge("goodput_time_to_first_token_seconds_bucket", "1.2"), 1.0, "a value on the edge is within it");
    for (name, edges) in [
        ("goodput_time_to_first_token_seconds_bucket", ["0.005", "1.2", "120"]),
        ("goodput_time_per_output_token_seconds_bucket", ["0.001", "0.037", "2.5"]),
        ("goodput_inter_token_gap_seconds_bucket", ["0.001", "0.73", "2.5"]),
        ("goodput_e2e_seconds_bucket", ["47.5", "600", "+Inf"]),
    ] {
        for le in edges {
            assert!(page.count(name, &[("le", le)]) > 0, "{name} has no edge {le}");
        }
    }
    assert_eq!(house.line().await.verdict(), "met");
    house.end().await;
}

fn messages(data: &[(u64, &str, String)]) -> Script {
    let named = |kind: &str, data: &str| format!("event: {kind}\ndata: {data}\n\n");
    data.iter().fold(Script::stream(), |script, (millis, kind, data)| script.at(*millis).put(named(kind, data))).end()
}

fn start(input: u64) -> String {
    json!({"type": "message_start", "message": {"id": "m", "role": "assistant", "content": [], "usage": {"input_tokens": input, "output_tokens": 1}}}).to_string()
}

fn delta(text: &str) -> String {
    json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}).to_string()
}

#[tokio::test(start_paused = true)]
async fn c33_messages_usage_takes_the_last_explicit_value_of_each_field() {
    let end = |usage: serde_json::Value| {
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}).to_string()
    };
    let stop = r#"{"type":"message_stop"}"#.to_owned();
    let block = r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#.to_owned();
    let cases = [
        (start(25), end(json!({"output_tokens": 15})), (Some(25), Some(15))),
        (
            start(0),
            end(json!({"input_tokens": 4000, "cache_creation_input_tokens": 500, "output_tokens": 5})),
            (Some(4500), Some(5)),
        ),
    ];
    for (start, end, tokens) in cases {
        let script = messages(&[
            (10, "message_start", start),
            (20, "content_block_start", block.clone()),
            (30, "ping", r#"{"type":"ping"}"#.to_owned()),
            (300, "content_block_delta", delta("Hi")),
            (340, "content_block_delta", delta(" you")),
            (350, "message_delta", end),
            (350, "message_stop", stop.clone()),
        ]);
        let (house, engine) = House::playing(script.clone());
        let body =
            json!({"model": "m1", "stream": true, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]});
        let answer = house.post("/v1/messages", body.clone()).await.whole().await;
        assert!(answer.text().starts_with("event: message_start\ndata: "));
        assert!(answer.text().ends_with("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"));
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft(), line.e2e()), ("met".into(), Some(300.0), Some(350.0)));
        assert_eq!(line.tokens(), tokens);
        assert_eq!(engine.log().requests()[0].json(), body, "nothing is injected here");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_json_body_for_a_streaming_request_arrives_all_at_once() {
    for (when, verdict) in [(400, "met"), (600, "missed(ttft)")] {
        let script = Script::new().at(when).reply(200, &[("content-type", "application/json")], whole("x", 5, 20));
        let (house, _engine) = House::playing(script);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.text(), whole("x", 5, 20), "usage in a JSON answer stays");
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft()), (verdict.into(), Some(when as f64)));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_unrequested_stream_is_judged_as_one() {
    let script =
        Script::stream().say_all([(100, t("a")), (200, t("b")), (200, f("stop")), (200, u(5, 2)), (200, d())]).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(unary()).await.whole().await;
    assert!(answer.text().contains("\"usage\""), "nothing was injected, nothing is removed");
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tpot()), ("missed(tpot)".into(), Some(100.0), Some(100.0)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn targets_of_the_request_tighten_and_only_loosen_where_allowed() {
    // A first token at 400 ms, tokens every 40 ms; the objectives are 500 and 50.
    let script = || {
        Script::stream()
            .say_all([(400, t("a")), (440, t("b")), (480, t("c"))])
            .say(f("stop"))
            .say(u(5, 3))
            .say(d())
            .end()
    };
    let slow = || {
        Script::stream()
            .say_all([(700, t("a")), (760, t("b")), (820, t("c"))])
            .say(f("stop"))
            .say(u(5, 3))
            .say(d())
            .end()
    };
    let cases = [
        ("off", ["300", "30"], script(), "met"),
        ("tighten", ["300", "60"], script(), "missed(ttft)"),
        ("tighten", ["500", "30"], script(), "missed(tpot)"),
        ("tighten", ["900", "90"], slow(), "missed(ttft)"),
        ("may_loosen", ["900", "90"], slow(), "met"),
        ("may_loosen", ["600", "90"], slow(), "missed(ttft)"),
    ];
    for (mode, [ttft, tpot], script, verdict) in cases {
        let (house, _engine) = House::playing_with(&Yaml::default().class(&format!("target_headers: {mode}")), script);
        let ask = Ask::post(CHAT, stream_with_usage()).header("x-slo-ttft-ms", ttft).header("x-slo-tpot-ms", tpot);
        house.send(ask).await.whole().await;
        assert_eq!(house.line().await.verdict(), verdict, "{mode} {ttft} {tpot}");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_largest_gap_and_the_end_are_objectives_too() {
    let gap = || {
        Script::stream()
            .say_all([(100, t("a")), (120, t("b")), (450, t("c"))])
            .say(f("stop"))
            .say(u(5, 90))
            .say(d())
            .end()
    };
    let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5), ("itl_seconds", 0.3)]);
    let (house, _engine) = House::playing_with(&yaml, gap());
    house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(house.line().await.verdict(), "missed(itl)");
    house.end().await;

    let yaml = Yaml::default().promise(&[("e2e_seconds", 0.4)]);
    let (house, _engine) = House::playing_with(&yaml, gap());
    house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(house.line().await.verdict(), "missed(e2e)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn stalls_are_counted_by_the_classs_own_length() {
    let script = Script::stream()
        .say_all([(100, t("a")), (1200, t("b")), (1500, t("c"))])
        .say(f("stop"))
        .say(u(5, 900))
        .say(d())
        .end();
    let (house, _engine) = House::playing_with(&Yaml::default().class("stall_seconds: 0.25"), script);
    house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(house.page().sum("goodput_stalls_total", &[]), 2.0);
    assert_eq!(house.line().await.verdict(), "met");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn several_choices_are_judged_by_the_worst() {
    let script = Script::stream()
        .say_all([(100, t("a")), (100, of(1, &t("a"))), (120, t("b")), (300, of(1, &t("b")))])
        .say(f("stop"))
        .say(of(1, &f("stop")))
        .say(u(5, 4))
        .say(d())
        .end();
    let mut body = stream_with_usage();
    body["n"] = json!(2);
    let (house, _engine) = House::playing(script);
    house.chat(body).await.whole().await;
    let line = house.line().await;
    assert_eq!((line.verdict(), line.tpot(), line.tokens().1), ("missed(tpot)".into(), Some(200.0), Some(4)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_empty_response_is_empty_and_a_body_that_is_not_json_is_unparseable() {
    let empty = Script::stream().at(100).say(d()).end();
    assert_eq!(line_of(empty).await.verdict(), "missed(empty)");
    let json = |body: &str| Script::new().at(100).reply(200, &[("content-type", "application/json")], body.to_owned());
    let cases = [
        (json("{\"choices\":[]}"), "missed(empty)"),
        (json("not json"), "missed(unparseable)"),
        (json("[1]"), "missed(unparseable)"),
        (json(""), "missed(unparseable)"),
        (Script::new().at(100).reply(200, &[("content-type", "text/html")], "<html>"), "missed(unparseable)"),
        (json("{\"error\":{\"message\":\"x\",\"code\":503}}"), "missed(upstream_overload)"),
        (json("{\"error\":{\"message\":\"x\",\"type\":\"invalid_request_error\"}}"), "excluded(invalid_request)"),
        (json("{\"error\":\"boom\"}"), "missed(upstream_error)"),
    ];
    for (script, verdict) in cases {
        let (house, _engine) = House::playing(script);
        let answer = house.chat(unary()).await.whole().await;
        assert!(!answer.is_cut);
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_204_or_a_close_before_the_length_is_no_success() {
    let cases = [
        (Script::new().write("HTTP/1.1 204 No Content\r\n\r\n"), "missed(unparseable)", false),
        (
            Script::new()
                .write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n{\"a\":")
                .at(50)
                .close(),
            "missed(truncated)",
            true,
        ),
        // Seen before anything of it went out: the client hears of it by a status.
        (
            Script::new()
                .write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n{\"a\":")
                .close(),
            "missed(truncated)",
            false,
        ),
    ];
    for (script, verdict, is_cut) in cases {
        let (house, _engine) = House::playing(script);
        let answer = house.chat(unary()).await.whole().await;
        assert_eq!(answer.is_cut, is_cut);
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

/// Many clients that have all asked before.
async fn guests(house: &House, count: usize) -> Vec<Client> {
    let door = house.door();
    let mut clients: Vec<_> = (0..count).map(|_| house.connect_at(&door, 64 * 1024)).collect();
    for client in &mut clients {
        client.post(CHAT, &unary()).await;
    }
    for client in &mut clients {
        client.read_until("\"x\"").await;
    }
    house.lines(count).await;
    clients
}

/// All requests come at once: the gateway starts some of them per scheduler turn, which takes a millisecond
/// here. Some have heads longer than one read.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_to_be_read_takes_the_longer_for_it() {
    let (house, _engine) = House::playing(Script::json(200, whole("x", 5, 1)));
    let count = 400;
    let mut clients = guests(&house, count).await;
    for (number, client) in clients.iter_mut().enumerate() {
        let (body, long) = (unary().to_string(), "x".repeat(number % 2 * 5000));
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\nx-long: {long}\r\n");
        client.send(format!("{head}content-length: {}\r\n\r\n{body}", body.len())).await;
    }
    let finished = || house.page().sum("goodput_requests_finished_total", &[]) as usize;
    while finished() < 2 * count {
        tokio::time::advance(Duration::from_millis(1)).await;
    }
    let lines = house.lines(2 * count).await;
    let took = |line: &Line| (line.e2e().unwrap(), line.number("upload_ms").unwrap());
    let took: Vec<_> = lines[count..].iter().map(took).collect();
    let (first, last) = (took[0].0, took[count - 2].0.min(took[count - 1].0));
    assert!(last > 2.0 * first, "the last ones waited for the first ones: {took:?}");
    // Delays outside the engine are not reported as the engine's.
    assert!(took.iter().all(|(e2e, upload)| e2e - upload < first + 3.0), "{took:?}");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waits_to_be_read_when_a_drain_begins_is_answered() {
    let (house, _engine) = House::playing(Script::json(200, whole("x", 5, 1)));
    let mut clients = guests(&house, 400).await;
    for client in &mut clients {
        client.post(CHAT, &unary()).await;
    }
    tokio::task::yield_now().await;
    house.drain().advance(DrainPhase::Draining);
    for client in &mut clients {
        let (answer, _) = client.read_to_end().await;
        assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
    }
    house.end().await;
}

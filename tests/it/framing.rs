//! Framing of events on the wire, and its results (`docs/cases.md`).

use std::time::Duration;

use crate::support::scripted_engine::{Script, event, fixtures::*};
use serde_json::json;

use crate::support::*;

/// Role @10, text @300, finish, usage, end: as a script, and the bytes.
fn plain(frame: impl Fn(&str) -> String) -> (Script, String) {
    let [role, text, finish, usage, done] = [r(), t("ab"), f("stop"), u(5, 2), d()].map(|data| frame(&data));
    let body = [role.as_str(), &text, &finish, &usage, &done].concat();
    let script = Script::stream().at(10).put(role).at(300).put(text).at(310).put(finish).put(usage).put(done).end();
    (script, body)
}

async fn comes_out_unchanged(script: Script, body: &str) {
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(answer.text(), body);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tokens()), ("met".into(), Some(300.0), (Some(5), Some(2))));
    assert_eq!(line.e2e(), Some(310.0));
    assert_eq!((answer.at, answer.end, answer.is_cut), (at(300), at(310), false));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c01_crlf_ends_events_as_lf_does() {
    let (script, body) = plain(|data| event(data).replace('\n', "\r\n"));
    comes_out_unchanged(script, &body).await;
}

#[tokio::test(start_paused = true)]
async fn c01_cr_alone_ends_events_as_lf_does() {
    let (script, body) = plain(|data| event(data).replace('\n', "\r"));
    comes_out_unchanged(script, &body).await;
}

#[tokio::test(start_paused = true)]
async fn c01_a_crlf_split_over_two_reads_is_one_line_end() {
    let (_, body) = plain(|data| event(data).replace('\n', "\r\n"));
    let text_ends = body.find("ab").unwrap() + body[body.find("ab").unwrap()..].find("\r\n\r\n").unwrap() + 3;
    // Between CR and LF of the text's blank line; and of its first line end.
    for cut in [text_ends, text_ends - 2] {
        let script = Script::stream()
            .at(300)
            .put(body[..cut].to_owned())
            .wait(Duration::ZERO)
            .put(body[cut..text_ends + 1].to_owned())
            .at(310)
            .put(body[text_ends + 1..].to_owned())
            .end();
        comes_out_unchanged(script, &body).await;
    }
}

#[tokio::test(start_paused = true)]
async fn c01_an_event_that_ends_in_cr_cr_does_not_wait_for_the_next_one() {
    let text = format!("data: {}\r\r", t("ab"));
    let script = Script::stream().at(100).put(text.clone()).at(900).put(event(&f("stop"))).put(event(&d())).end();
    let (house, _engine) = House::playing(script);
    let mut answer = house.chat(stream_with_usage()).await;
    assert_eq!(answer.at, at(100));
    let (first, when) = answer.frame().await.unwrap();
    assert!(first.starts_with(&text.as_bytes()[..text.len() - 1]));
    assert_eq!(when, at(100));
    answer.whole().await;
    assert_eq!(house.line().await.ttft(), Some(100.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c02_no_space_after_the_colon() {
    let (script, body) = plain(|data| format!("data:{data}\n\n"));
    comes_out_unchanged(script, &body).await;
}

#[tokio::test(start_paused = true)]
async fn c03_any_split_also_inside_a_character_leaves_the_bytes_alone() {
    let text = event(&t("héllo 🌍 漢字"));
    let body = [event(&r()), text.clone(), event(&f("stop")), event(&u(5, 4)), event(&d())].concat();
    let script = Script::stream().put_split(body.as_bytes(), 1, ms(1)).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(blake3::hash(&answer.bytes()), blake3::hash(body.as_bytes()));
    let line = house.line().await;
    let last_byte_of_text = (event(&r()).len() + text.len()) as f64;
    assert_eq!((line.ttft(), line.tokens()), (Some(last_byte_of_text), (Some(5), Some(4))));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c04_comments_and_pings_are_no_tokens_and_pass() {
    let script = Script::stream()
        .at(20)
        .put(": k\n\n")
        .at(200)
        .put(": k\n\n")
        .at(250)
        .put("event: ping\ndata: {\"type\":\"ping\"}\n\n")
        .at(400)
        .say(t("a"))
        .at(430)
        .put(": k\n\n")
        .at(460)
        .say(t("b"))
        .say(f("stop"))
        .say(u(5, 2))
        .say(d())
        .end();
    let (house, _engine) =
        House::playing_with(&Yaml::default().promise(&[("ttft_seconds", 0.5), ("tpot_seconds", 0.06)]), script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(answer.text().matches(": k\n\n").count(), 3);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tpot()), ("met".into(), Some(400.0), Some(60.0)));
    let page = house.page();
    assert_eq!(page.sum("goodput_inter_token_gap_seconds_count", &[]), 1.0);
    assert!((page.sum("goodput_inter_token_gap_seconds_sum", &[]) - 0.06).abs() < 1e-9);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c04_comments_keep_the_idle_limit_from_firing() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms}").class("stall_seconds: 5");
    let script = Script::stream().at(100).say(t("a")).at(350).put(": k\n\n").at(600).put(": k\n\n").at(850).say(t("b"));
    let script = script.say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing_with(&yaml, script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(answer.end, at(850));
    assert_eq!(house.line().await.verdict(), "missed(tpot)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c06_one_very_large_event_passes_and_counts() {
    let call = event(&k(&"x".repeat(3 << 20)));
    let body = [event(&r()), call.clone(), event(&f("tool_calls")), event(&u(9, 6)), event(&d())].concat();
    let script = Script::stream().at(10).say(r()).at(300).put_split(call.as_bytes(), 4096, Duration::ZERO);
    let script = script.say(f("tool_calls")).say(u(9, 6)).say(d()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(blake3::hash(&answer.bytes()), blake3::hash(body.as_bytes()));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tokens()), ("met".into(), Some(300.0), (Some(9), Some(6))));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c06_an_event_above_the_limit_is_relayed_without_parsing() {
    let yaml = Yaml::default().top("inspect: {max_event: 1MiB}");
    let call = event(&k(&"x".repeat(2 << 20)));
    let body = [call.clone(), event(&f("tool_calls")), event(&d())].concat();
    let script = Script::stream()
        .at(100)
        .put_split(call.as_bytes(), 16 << 10, Duration::ZERO)
        .say(f("tool_calls"))
        .say(d())
        .end();
    let (house, _engine) = House::playing_with(&yaml, script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(blake3::hash(&answer.bytes()), blake3::hash(body.as_bytes()));
    assert_eq!(house.line().await.verdict(), "missed(unparseable)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn injected_usage_is_removed_from_a_large_event() {
    let usage = r#""usage":{"prompt_tokens":9,"completion_tokens":6}"#;
    let call = event(&k(&"x".repeat(3 << 20)));
    let told = call.replace("}\n\n", &format!(",{usage}}}\n\n"));
    assert!(told.len() > call.len());
    let yaml = Yaml::default().with("inject: {usage: true, continuous_usage: true}");
    for size in [4096, 100_000] {
        let script = Script::stream().at(10).say(r()).at(300).put_split(told.as_bytes(), size, Duration::ZERO);
        let script = script.say(f("tool_calls")).say(u(9, 6)).say(d()).end();
        let (house, _engine) = House::playing_with(&yaml, script);
        let answer = house.chat(stream()).await.whole().await;
        let body = [event(&r()), call.clone(), event(&f("tool_calls")), event(&d())].concat();
        assert_eq!(blake3::hash(&answer.bytes()), blake3::hash(body.as_bytes()));
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft(), line.tokens()), ("met".into(), Some(300.0), (Some(9), Some(6))));
        house.end().await;
    }
    // Cut at an undecided position by a clean end: the held bytes pass too.
    let begun = &told[..told.len() - 10];
    let script = Script::stream().at(300).put_split(begun.as_bytes(), 4096, Duration::ZERO).end();
    let (house, _engine) = House::playing_with(&yaml, script);
    let answer = house.chat(stream()).await.whole().await;
    let rest = answer.text().strip_prefix(begun).expect("all that came").to_owned();
    assert!(rest.starts_with("\n\ndata: {\"error\":") && rest.contains("stream_incomplete"), "{rest}");
    assert_eq!(house.line().await.verdict(), "missed(truncated)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c08_a_finish_reason_and_a_clean_end_are_complete_without_done() {
    let script = Script::stream().at(10).say(r()).at(300).say(t("a")).say(f("stop")).say(u(5, 1)).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(answer.text(), [event(&r()), event(&t("a")), event(&f("stop")), event(&u(5, 1))].concat());
    let line = house.line().await;
    assert_eq!((line.verdict(), line.tokens()), ("met".into(), (Some(5), Some(1))));
    house.end().await;
}

/// Two tokens, and then this.
async fn breaks_off(script: impl FnOnce(Script) -> Script) {
    let script = script(Script::stream().at(10).say(r()).at(100).say(t("a")).at(120).say(t("b")));
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    let relayed = [event(&r()), event(&t("a")), event(&t("b"))].concat();
    let rest = answer.text().strip_prefix(&relayed).expect("everything received is relayed").to_owned();
    let error: serde_json::Value = serde_json::from_str(rest.strip_prefix("data: ").unwrap().trim_end()).unwrap();
    assert!(rest.ends_with("}\n\n"));
    assert_eq!(error["error"]["type"], "upstream_error");
    assert_eq!(error["error"]["code"], "stream_incomplete");
    assert!(error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()));
    assert!(!answer.is_cut, "the answer itself ends in order");
    assert!(!answer.text().contains("[DONE]"));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tokens().1), ("missed(truncated)".into(), Some(100.0), Some(2)));
    assert_eq!(line.text("token_source"), "events");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c09_a_clean_end_before_any_finish_reason_is_truncated() {
    breaks_off(Script::end).await;
}

#[tokio::test(start_paused = true)]
async fn c09_a_reset_before_any_finish_reason_is_truncated() {
    breaks_off(Script::reset).await;
}

#[tokio::test(start_paused = true)]
async fn c09_a_close_inside_chunked_framing_is_truncated() {
    breaks_off(Script::close).await;
}

#[tokio::test(start_paused = true)]
async fn c09_a_body_shorter_than_its_content_length_is_truncated() {
    let events = [event(&r()), event(&t("a")), event(&t("b"))].concat();
    let length = (events.len() + 100).to_string();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n");
    let script = Script::new().write(head).at(100).write(events.clone()).close();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.header("content-length"), None);
    assert!(answer.text().starts_with(&events) && answer.text().contains("stream_incomplete"));
    assert_eq!(house.line().await.verdict(), "missed(truncated)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c09_a_tail_without_its_blank_line_is_parsed_and_the_error_is_separate() {
    let tail = format!("data: {}", t("b"));
    let script = Script::stream().at(100).say(t("a")).at(120).put(tail.clone()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    let relayed = [event(&t("a")), tail, "\n\n".to_owned()].concat();
    assert!(answer.text().strip_prefix(&relayed).unwrap().starts_with("data: {\"error\""));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.tokens().1), ("missed(truncated)".into(), Some(2)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c09_a_tail_with_a_finish_completes_the_response() {
    let script = Script::stream().at(100).say(t("a")).at(120).put(format!("data: {}", f("stop"))).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert!(!answer.text().contains("error"));
    assert_eq!(house.line().await.verdict(), "met");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c09_a_tail_before_a_reset_is_dropped() {
    let script = Script::stream().at(100).say(t("a")).at(120).put("data: {\"choices\":[{\"in").reset();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    let rest = answer.text().strip_prefix(&event(&t("a"))).unwrap().to_owned();
    assert!(rest.starts_with("data: {\"error\""), "{rest}");
    assert_eq!(house.line().await.verdict(), "missed(truncated)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c09_a_reset_inside_a_long_event_cuts_the_answer_instead() {
    let half = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{}", "x".repeat(200_000));
    let script = Script::stream().at(100).say(t("a")).at(120).put(half).reset();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert!(answer.is_cut);
    assert!(!answer.text().contains("error"));
    assert_eq!(house.line().await.verdict(), "missed(truncated)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c09_done_without_a_finish_reason_is_no_truncation() {
    let script = Script::stream().at(100).say(t("a")).at(120).say(t("b")).say(d()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.text(), [event(&t("a")), event(&t("b")), event(&d())].concat());
    assert_eq!(house.line().await.verdict(), "met");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c09_one_of_two_choices_finished_and_a_clean_end_is_complete() {
    let mut body = stream();
    body["n"] = json!(2);
    let events = || Script::stream().at(100).say(t("a")).at(120).say(t("b")).say(f("stop"));
    let (house, _engine) = House::playing(events().end());
    let answer = house.chat(body.clone()).await.whole().await;
    assert!(!answer.text().contains("error"));
    assert_eq!(house.line().await.verdict(), "met");
    house.end().await;

    let (house, _engine) = House::playing(events().reset());
    let answer = house.chat(body).await.whole().await;
    assert!(answer.text().contains("stream_incomplete"));
    assert_eq!(house.line().await.verdict(), "missed(truncated)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c10_an_error_event_before_any_token_is_no_success() {
    let yaml = Yaml::default().with("retries: {after_fault: 0}");
    let script = Script::stream().at(10).say(r()).at(50).say(error("worker lost", 504)).say(d()).end();
    let (house, _engine) = House::playing_with(&yaml, script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.text(), [event(&r()), event(&error("worker lost", 504)), event(&d())].concat());
    assert_eq!(answer.status, 200);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tpot()), ("missed(upstream_error)".into(), None, None));
    assert_eq!(house.page().sum("goodput_time_to_first_token_seconds_count", &[]), 0.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c10_an_error_event_after_three_tokens_is_relayed_and_counts() {
    let script =
        Script::stream().say_all([(100, t("a")), (120, t("b")), (140, t("c")), (150, error("x", 504)), (150, d())]);
    let (house, engine) = House::playing(script.end());
    let answer = house.chat(stream()).await.whole().await;
    let relayed = [event(&t("a")), event(&t("b")), event(&t("c")), event(&error("x", 504)), event(&d())].concat();
    assert_eq!(answer.text(), relayed);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft()), ("missed(upstream_error)".into(), Some(100.0)));
    assert_eq!(engine.log().requests().len(), 1, "nothing is tried again after a token");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c10_an_in_band_invalid_request_is_excluded() {
    let script = Script::stream().at(10).say(r()).at(50).say(error("context length", 400)).say(d()).end();
    let (house, engine) = House::playing(script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert!(answer.text().contains("context length"));
    assert_eq!(house.line().await.verdict(), "excluded(invalid_request)");
    assert_eq!(engine.log().requests().len(), 1);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c10_an_event_named_error_counts_as_one() {
    let named = "event: error\ndata: {\"message\":\"boom\"}\n\n";
    let script = Script::stream().at(100).say(t("a")).at(120).put(named).say(d()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert!(answer.text().contains(named));
    assert_eq!(house.line().await.verdict(), "missed(upstream_error)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c10_in_band_faults_open_the_breaker() {
    let yaml = Yaml::default().with("retries: {after_fault: 0}").with("breaker: {faults: 2, within: 10s, open: 5s}");
    let script = Script::stream().at(10).say(t("a")).say(error("worker lost", 500)).say(d()).end();
    let (house, engine) = House::playing_with(&yaml, script);
    for _ in 0..2 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!(engine.log().requests().len(), 2);
    assert_eq!(house.states("a"), ["breaker_open"]);
    house.lines(2).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c13_events_without_choices_are_no_tokens_and_their_usage_counts() {
    let preamble = r#"{"id":"c1","object":"chat.completion.chunk","choices":[],"prompt_filter_results":[]}"#;
    let usage = r#"{"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}"#;
    let script =
        Script::stream().at(50).say(preamble).say(r()).at(300).say(t("a")).say(f("stop")).say(usage).say(d()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert!(answer.text().contains(usage) && answer.text().contains(preamble));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.tokens()), ("met".into(), Some(300.0), (Some(5), Some(2))));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c14_usage_on_every_event_is_never_summed() {
    let script = Script::stream()
        .at(10)
        .say(with_usage(&r(), 100, 0))
        .say_all([
            (100, with_usage(&t("a"), 100, 1)),
            (120, with_usage(&t("b"), 100, 2)),
            (140, with_usage(&t("c"), 100, 3)),
        ])
        .say(f("stop"))
        .say(u(100, 3))
        .say(d())
        .end();
    let (house, _engine) = House::playing(script);
    house.chat(stream_with_usage()).await.whole().await;
    let line = house.line().await;
    assert_eq!((line.ttft(), line.tokens()), (Some(100.0), (Some(100), Some(3))));
    let page = house.page();
    assert_eq!(page.sum("goodput_tokens_total", &[("direction", "input")]), 100.0);
    assert_eq!(page.sum("goodput_tokens_total", &[("direction", "output")]), 3.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c14_a_cut_after_the_second_token_counts_exactly_that() {
    let script = Script::stream().say_all([
        (100, with_usage(&t("a"), 100, 1)),
        (120, with_usage(&t("b"), 100, 2)),
        (140, with_usage(&t("c"), 100, 3)),
    ]);
    let (house, engine) = House::playing(script.silence());
    let mut answer = house.chat(stream_with_usage()).await;
    answer.frames(2).await;
    drop(answer);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.tokens()), ("excluded(client_cancel)".into(), (Some(100), Some(2))));
    assert_eq!(engine.log().closed(0).await, at(120));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c14_null_usage_is_nothing() {
    let script = Script::stream()
        .say_all([(100, with_null_usage(&t("a"))), (120, with_null_usage(&t("b")))])
        .say(with_null_usage(&f("stop")))
        .say(u(7, 2))
        .say(d())
        .end();
    let (house, _engine) = House::playing(script);
    house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(house.line().await.tokens(), (Some(7), Some(2)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn after_the_finish_only_an_in_band_error_changes_the_outcome() {
    let answer = || Script::stream().say_all([(100, t("a")), (120, t("b"))]).say(f("stop")).at(150);
    for (script, tail, verdict) in [
        (answer().reset(), String::new(), "met"),
        (answer().close(), String::new(), "met"),
        (answer().put("data: {\"half").reset(), String::new(), "met"),
        (
            answer().say(error("late", 500)).say(d()).end(),
            [event(&error("late", 500)), event(&d())].concat(),
            "missed(upstream_error)",
        ),
    ] {
        let (house, _engine) = House::playing(script);
        let answer = house.chat(stream()).await.whole().await;
        let relayed = [event(&t("a")), event(&t("b")), event(&f("stop")), tail].concat();
        assert_eq!((answer.text(), answer.is_cut), (relayed, false));
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

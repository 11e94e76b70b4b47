//! Clients that leave, engines that fall silent, limits of time, held heads (`docs/cases.md`).

use std::time::Duration;

use crate::support::scripted_engine::{Script, event, fixtures::*};
use goodput::types::{ClientState, DisconnectReason};
use serde_json::{Value, json};

use crate::support::*;

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];
const CODED: &[(&str, &str)] = &[("content-type", "text/event-stream"), ("content-encoding", "gzip")];

/// A token every 20 ms from 20 ms on, for ever.
fn steady() -> Script {
    (1..=500).fold(Script::stream(), |script, number| script.at(20 * number).say(t("a"))).silence()
}

fn messages_delta() -> String {
    let data = json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}});
    format!("event: content_block_delta\ndata: {data}\n\n")
}

fn responses_delta(number: u64) -> String {
    let data = json!({"type": "response.output_text.delta", "sequence_number": number, "item_id": "i", "delta": "a"});
    format!("event: response.output_text.delta\ndata: {data}\n\n")
}

/// The three dialects with a stream of tokens every 20 ms.
fn dialects() -> Vec<(&'static str, Value, Script)> {
    let paced = |piece: &dyn Fn(u64) -> String| {
        (1..=500).fold(Script::stream(), |script, number| script.at(20 * number).put(piece(number))).silence()
    };
    vec![
        (CHAT, stream(), steady()),
        (
            "/v1/messages",
            json!({"model": "m1", "stream": true, "max_tokens": 9, "messages": []}),
            paced(&|_| messages_delta()),
        ),
        ("/v1/responses", json!({"model": "m1", "stream": true, "input": "hi"}), paced(&responses_delta)),
        (
            "/v1/completions",
            json!({"model": "m1", "stream": true, "prompt": "hi"}),
            paced(&|_| {
                event(
                    r#"{"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":null}]}"#,
                )
            }),
        ),
    ]
}

#[tokio::test(start_paused = true)]
async fn c47_a_cancel_in_mid_stream_reaches_the_engine_at_once() {
    for (path, body, script) in dialects() {
        let (house, engine) = House::playing(script);
        let mut answer = house.post(path, body).await;
        answer.frames(5).await;
        assert_eq!(house.clock.now(), at(100));
        drop(answer);
        assert_eq!(engine.log().closed(0).await, at(100), "{path}");
        let line = house.line().await;
        // Its 200 had come.
        assert_eq!((line.verdict(), line.number("status")), ("excluded(client_cancel)".into(), Some(200.0)));
        assert_eq!(line.tokens().1, Some(5));
        assert_eq!(house.page().sum("goodput_cancel_seconds_count", &[]), 1.0);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c47_a_cancel_over_a_connection_reaches_the_engine_at_once() {
    for (path, body, script) in dialects() {
        let (house, engine) = House::playing(script);
        let mut client = house.connect(64 * 1024);
        client.post(path, &body).await;
        client.read_until("\"a\"").await;
        house.sleep(ms(85)).await;
        drop(client);
        assert_eq!(engine.log().closed(0).await, at(105), "{path}");
        assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c47_a_reset_http2_stream_reaches_the_engine_and_the_connection_lives_on() {
    let house = House::new(&Yaml::default());
    let engine = house.engine("e1", vec![steady(), Script::json(200, whole("x", 1, 1))]);
    let mut client = house.connect_h2().await;
    let mut answer = client.send_request(h2_post(CHAT, &stream())).await.unwrap();
    assert!(h2_next(&mut answer).await.is_some());
    house.sleep(ms(30)).await;
    drop(answer);
    assert_eq!(engine.log().closed(0).await, at(50));
    assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
    assert_eq!(client.send_request(h2_post(CHAT, &unary())).await.unwrap().status(), 200);
    house.lines(2).await;
    drop(client);
    house.end().await;
}

/// 64 KiB a millisecond.
pub fn flood() -> Script {
    let block = event(&t(&"x".repeat(1000))).repeat(60);
    (1..=200).fold(Script::stream(), |script, number| script.at(number).put(block.clone())).silence()
}

#[tokio::test(start_paused = true)]
async fn c47_a_cancel_reaches_the_engine_while_the_gateway_is_blocked_writing() {
    let (house, engine) = House::playing(flood());
    let mut client = house.connect(4096);
    client.post(CHAT, &stream()).await;
    house.sleep(ms(90)).await;
    let written = engine.log().connections()[0].written;
    assert!(written < 400_000, "{written} bytes were taken from the engine for a client that reads nothing");
    drop(client);
    assert_eq!(engine.log().closed(0).await, at(90));
    assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c48_a_cancel_before_the_first_token_reaches_the_engine() {
    for body in [stream(), unary()] {
        for script in [Script::new().silence(), Script::stream().say(r()).silence()] {
            let (house, engine) = House::playing(script);
            let before = tokio::time::timeout(ms(200), house.chat(body.clone())).await;
            // The head of an unrequested stream is released at once.
            drop(before);
            house.sleep(ms(200)).await;
            assert!(engine.log().closed(0).await <= at(200));
            assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
            assert_eq!(house.page().sum("goodput_time_to_first_token_seconds_count", &[]), 0.0);
            house.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn c48_a_cancel_over_a_connection_before_the_first_token_reaches_the_engine() {
    let (house, engine) = House::playing(Script::new().silence());
    let mut client = house.connect(4096);
    client.post(CHAT, &unary()).await;
    house.sleep(ms(200)).await;
    drop(client);
    assert_eq!(engine.log().closed(0).await, at(200));
    assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
    house.end().await;
}

/// A stream without usage at a third of the promised pace is a miss when its client leaves, whatever earlier
/// responses of its engine looked like.
#[tokio::test(start_paused = true)]
async fn earlier_odd_responses_do_not_excuse_a_slow_stream_that_is_left() {
    let answer = |events: u64, event: String, tokens: u64| {
        let script = (0..events).fold(Script::stream().at(10), |script, _| script.say(&event));
        script.say(f("stop")).say(u(5, tokens)).say(d()).end()
    };
    let slow = (1..=100).fold(Script::stream(), |script, number| script.at(150 * number).say(t("a"))).silence();
    let odd = [
        Vec::new(),
        vec![answer(2, k("{}"), 120)],
        vec![answer(40, k("{}"), 2000); 20],
        vec![answer(2, t("all of it"), 120); 20],
        vec![answer(40, t("a"), u64::MAX), answer(40, t("a"), 4_294_967_295), answer(40, t("a"), 100_000_000)],
        vec![answer(40, t("a"), 2560); 2],
        [vec![answer(40, t("a"), 2560); 9], vec![answer(40, t("a"), 41); 3]].concat(),
    ];
    for before in odd {
        let count = before.len();
        let house = House::new(&Yaml::default());
        let _engine = house.engine("e1", before.into_iter().chain([slow.clone()]).collect());
        for _ in 0..count {
            house.chat(stream()).await.whole().await;
        }
        let mut answer = house.chat(stream()).await;
        answer.frames(20).await;
        drop(answer);
        let line = house.lines(count + 1).await.remove(count);
        assert_eq!(line.verdict(), "missed(canceled_late)", "after {count}");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_during_its_upload_is_a_cancel() {
    let (house, engine) = House::playing(Script::new().silence());
    let mut client = house.connect(4096);
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 100\r\n\r\n{\"model\":").await;
    // Longer than any objective: an upload is never our doing.
    house.sleep(Duration::from_secs(20)).await;
    drop(client);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.number("status")), ("excluded(client_cancel)".into(), Some(499.0)));
    assert!(engine.log().requests().is_empty());
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c51_a_steady_stream_outlives_the_idle_limit() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms}");
    let script = (1..=25).fold(Script::stream(), |script, number| script.at(200 * number).say(t("a")));
    let (house, _engine) = House::playing_with(&yaml, script.say(f("stop")).say(d()).end());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.end, at(5000));
    assert!(!answer.text().contains("error"));
    assert_eq!(house.line().await.verdict(), "missed(tpot)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c51_only_the_total_limit_ends_an_active_stream() {
    let yaml = Yaml::default().class("timeouts: {total: 1s, first_token: 1s}");
    let (house, engine) = House::playing_with(&yaml, steady());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.end, answer.is_cut), (at(1000), false));
    let last = answer.events().pop().unwrap();
    assert!(last.contains("total_timeout"), "{last}");
    assert_eq!(engine.log().closed(0).await, at(1000));
    assert_eq!(house.line().await.verdict(), "missed(timeout_total)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c52_silence_from_the_start_is_a_504() {
    let yaml = Yaml::default().class("timeouts: {first_token: 500ms, response_head: 500ms}");
    for (body, script) in [
        (stream(), Script::new().silence()),
        (stream(), Script::stream().silence()),
        (stream(), Script::stream().say(r()).silence()),
        (stream(), Script::stream().say_all([(200, ": k"), (300, ": k"), (450, ": k")]).silence()),
        (unary(), Script::new().silence()),
    ] {
        let streams = body["stream"] == true;
        let (house, engine) = House::playing_with(&yaml, script);
        let answer = house.chat(body).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.at), (504, at(500)));
        let code = if streams { "first_token_timeout" } else { "response_head_timeout" };
        assert_eq!(answer.header("x-goodput-reason"), Some(code));
        assert_eq!(answer.json()["error"]["code"], code);
        assert_eq!(engine.log().closed(0).await, at(500));
        assert_eq!(house.line().await.verdict(), "missed(timeout_first_token)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c52_silence_after_the_head_was_sent_is_an_error_event() {
    let yaml = Yaml::default().class("timeouts: {first_token: 500ms}").class("hold_head: 100ms");
    let (house, engine) = House::playing_with(&yaml, Script::stream().say(r()).silence());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.at, answer.end), (200, at(100), at(500)));
    let rest = answer.text().strip_prefix(&event(&r())).unwrap().to_owned();
    assert!(rest.starts_with("data: {\"error\":") && rest.contains("first_token_timeout"));
    assert_eq!(engine.log().closed(0).await, at(500));
    assert_eq!(house.line().await.verdict(), "missed(timeout_first_token)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c52_a_gap_over_the_idle_limit_is_an_error_event() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms}").with("breaker: {faults: 1, within: 10s, open: 5s}");
    let (house, engine) = House::playing_with(&yaml, Script::stream().say(r()).at(100).say(t("a")).silence());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.end, answer.is_cut), (at(400), false));
    assert!(answer.events().pop().unwrap().contains("idle_timeout"));
    assert_eq!(engine.log().closed(0).await, at(400));
    assert_eq!(house.line().await.verdict(), "missed(timeout_idle)");
    assert_eq!(house.states("a"), ["breaker_open"], "a limit behind a token is the engine's fault");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c52_half_an_event_does_not_keep_the_idle_limit_from_firing() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms}");
    let script = Script::stream().at(100).say(t("a")).at(250).put("data: {\"cho").at(390).put("ices").silence();
    let (house, _engine) = House::playing_with(&yaml, script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.end, at(400));
    let rest = answer.text().strip_prefix(&event(&t("a"))).unwrap().to_owned();
    assert!(rest.starts_with("data: {\"error\":"), "the tail is dropped: {rest}");
    assert_eq!(house.line().await.verdict(), "missed(timeout_idle)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c52_empty_lines_do_not_keep_the_idle_limit_from_firing() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms}");
    for nothing in ["\n", "\r\n", "id: 1\n", "retry: 5\n\n", "x: y\n\n"] {
        let script = Script::stream().at(100).say(t("a")).at(250).put(nothing).at(390).put(nothing).silence();
        let (house, _engine) = House::playing_with(&yaml, script);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.end, at(400), "{nothing:?}");
        assert_eq!(house.line().await.verdict(), "missed(timeout_idle)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c52_a_non_streaming_response_that_stops_sending_is_cut() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms}");
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n";
    let script = Script::new().write(head).at(200).write("{\"cho").silence();
    let (house, engine) = House::playing_with(&yaml, script);
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.end, answer.is_cut, answer.text()), (at(500), true, "{\"cho".into()));
    assert_eq!(answer.header("content-length"), Some("100"));
    assert_eq!(engine.log().closed(0).await, at(500));
    assert_eq!(house.line().await.verdict(), "missed(timeout_idle)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_response_that_breaks_at_once_is_cut_after_its_received_bytes() {
    let cut = ["content-length: 100\r\n\r\n{\"cho", "transfer-encoding: chunked\r\n\r\n5\r\n{\"cho\r\nnot a size"];
    // Everything arrives in one piece, including the end of the connection. A success is then not worth
    // relaying; a failure is recognised by its head.
    for (status, rest, told) in [(200, cut[0], "502"), (200, cut[1], "502"), (500, cut[0], "500")] {
        let head = format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n");
        let script = Script::new().write(head + rest).close();
        let (house, _engine) = House::playing_with(&Yaml::default().with("retries: {after_fault: 0}"), script);
        let mut client = house.connect(64 * 1024);
        client.post(CHAT, &unary()).await;
        let told = format!("HTTP/1.1 {told} ");
        let (seen, _) = client.read_until(if status == 200 { "stream_incomplete" } else { "{\"cho" }).await;
        assert!(seen.starts_with(&told), "{seen:?}");
        drop(client);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_successful_response_that_breaks_at_once_is_retried() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"cho";
    let broken = Script::new().write(head).close();
    let (house, _engines) = House::many(
        &Yaml::default(),
        2,
        vec![broken, Script::json(200, "{\"choices\":[{\"finish_reason\":\"stop\"}]}")],
    );
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.is_cut), (200, false));
    assert_eq!(house.line().await.verdict(), "met");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_empty_response_is_neither_success_nor_cancel() {
    for rest in ["content-length: 0\r\n\r\n", "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"] {
        for status in ["200 OK", "204 No Content"] {
            let head = format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{rest}");
            let (house, _engine) = House::playing(Script::new().write(head));
            let mut client = house.connect(64 * 1024);
            client.post(CHAT, &unary()).await;
            client.read_until("\r\n\r\n").await;
            assert_eq!(house.line().await.verdict(), "missed(unparseable)", "{status} {rest}");
            drop(client);
            house.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_truncated_http_1_0_response_is_visible_to_an_http_1_1_client() {
    let head = "HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{\"cho";
    let (house, _engine) = House::playing(Script::new().write(head).at(50).write("ices").at(100).reset());
    let mut client = house.connect(64 * 1024);
    client.post(CHAT, &unary()).await;
    let (seen, _) = client.read_to_end().await;
    let seen = String::from_utf8_lossy(&seen).into_owned();
    assert!(seen.starts_with("HTTP/1.1 200 ") && seen.contains("chunked") && !seen.contains("\r\n0\r\n"), "{seen:?}");
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn no_idle_limit_runs_before_the_first_token() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms, first_token: 5s}");
    let script = Script::stream().at(10).say(r()).at(2000).say(t("a")).say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing_with(&yaml, script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.end), (200, at(2000)));
    assert_eq!(house.line().await.verdict(), "missed(ttft)");
    house.end().await;
}

// --- held heads and keepalives ---

fn waiting(keepalive: bool) -> Yaml {
    let yaml = Yaml::default().class("hold_head: 200ms").class("timeouts: {first_token: 5s}");
    if keepalive { yaml.class("keepalive_seconds: 0.2") } else { yaml }
}

fn slow_head() -> Script {
    Script::new().at(950).open().say(r()).say(t("a")).say(f("stop")).say(d()).end()
}

#[tokio::test(start_paused = true)]
async fn c53_an_early_head_is_sent_if_the_engine_sent_none() {
    let (house, _engine) = House::playing_with(&waiting(true), slow_head());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.at), (200, at(200)));
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    assert_eq!(answer.moments(), [200, 400, 600, 800, 950]);
    let comments = ": keepalive\n\n".repeat(4);
    assert_eq!(answer.text(), [comments, event(&r()), event(&t("a")), event(&f("stop")), event(&d())].concat());
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft()), ("missed(ttft)".into(), Some(950.0)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_byte_order_mark_is_removed_only_after_keepalive_comments() {
    let marked = |text: &str| ["\u{feff}", &event(&t(text))].concat();
    let slow = Script::new().at(950).open().put(marked("a")).put(marked("b")).say(f("stop")).say(d()).end();
    let quick = Script::stream().at(100).put(marked("a")).put(marked("b")).say(f("stop")).say(d()).end();
    for (script, comments, first) in [(slow, 4, event(&t("a"))), (quick, 0, marked("a"))] {
        let (house, _engine) = House::playing_with(&waiting(true), script);
        let answer = house.chat(stream()).await.whole().await;
        let comments = ": keepalive\n\n".repeat(comments);
        assert_eq!(answer.text(), [comments, first, marked("b"), event(&f("stop")), event(&d())].concat());
        house.line().await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c53_a_held_head_is_released_and_comments_follow() {
    let script = Script::stream().at(10).say(r()).at(950).say(t("a")).say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing_with(&waiting(true), script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.at, at(200));
    assert_eq!(answer.moments(), [200, 400, 600, 800, 950]);
    let comments = ": keepalive\n\n".repeat(3);
    assert_eq!(answer.text(), [event(&r()), comments, event(&t("a")), event(&f("stop")), event(&d())].concat());
    assert_eq!(house.line().await.ttft(), Some(950.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c53_no_comment_after_a_token() {
    let script = Script::stream().at(100).say(t("a")).at(2000).say(t("b")).say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing_with(&waiting(true), script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.at, at(100));
    assert!(!answer.text().contains("keepalive"));
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c53_without_keepalive_the_gateway_waits_for_the_engines_head() {
    let (house, _engine) = House::playing_with(&waiting(false), slow_head());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.at), (200, at(950)));
    assert!(!answer.text().contains("keepalive"));
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c53_no_comment_in_a_non_streaming_response() {
    let script = Script::new().at(1000).reply(200, JSON, whole("x", 1, 1));
    let (house, _engine) = House::playing_with(&waiting(true), script);
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.at, answer.text()), (at(1000), whole("x", 1, 1)));
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c53_failures_after_an_early_head_are_events() {
    let cases = [
        (Script::new().at(500).reply(503, JSON, "{}"), "engine_answered", "missed(upstream_overload)"),
        (Script::new().at(500).reply(500, JSON, "{}"), "engine_answered", "missed(upstream_error)"),
        (Script::new().at(500).reply(400, JSON, "{}"), "engine_answered", "excluded(invalid_request)"),
        (Script::new().at(500).reply(500, CODED, "{}"), "engine_answered", "missed(upstream_error)"),
        (Script::new().at(500).reply(200, CODED, "zzz"), "engine_coded", "missed(unparseable)"),
        (Script::new().at(500).reset(), "engine_reset", "missed(upstream_unavailable)"),
        (Script::new().silence(), "first_token_timeout", "missed(timeout_first_token)"),
    ];
    for (script, code, verdict) in cases {
        let yaml = waiting(true).engines_of_first(&["e1", "e2"]);
        let (house, engines) = House::many(&yaml, 2, vec![script, slow_head()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.at, answer.is_cut), (200, at(200), false));
        let error: Value = serde_json::from_str(&answer.events().pop().unwrap()).unwrap();
        assert_eq!(error["error"]["code"], code);
        let asked: usize = engines.iter().map(|engine| engine.log().requests().len()).sum();
        assert_eq!(asked, 1, "the head is out: nothing is tried again");
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c53_a_compressed_response_after_an_early_head_disables_injection_and_opens_no_breaker() {
    let house = House::new(&waiting(true).with("breaker: {faults: 1, within: 10s, open: 5s}"));
    let engine = house.engine("e1", vec![Script::new().at(500).reply(200, CODED, "zzz"), slow_head()]);
    let answer = house.chat(stream()).await.whole().await;
    assert!(!answer.text().contains("zzz") && answer.text().contains("engine_coded"));
    assert_eq!(house.states("a"), ["up"]);
    house.chat(stream()).await.whole().await;
    let injected = engine.log().requests().into_iter().map(|request| {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        body["stream_options"].is_object()
    });
    assert_eq!(injected.collect::<Vec<_>>(), [true, false]);
    house.lines(2).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c53_an_early_head_is_no_proof_that_the_engine_accepts_an_injection() {
    // The engine rejects the injection after the early head. That is no proof that it accepts injections, so
    // the next rejection is still retried without it.
    let house = House::new(&waiting(true));
    let late = Script::new().at(500).reply(400, JSON, "{}");
    let engine = house.engine("e1", vec![late, Script::json(400, "{}"), slow_head()]);
    house.chat(stream()).await.whole().await;
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.status, 200);
    assert_eq!(engine.log().requests().len(), 3);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_preamble_above_64_kib_is_released() {
    let preamble = ": x\n\n".repeat(20_000);
    let script = Script::stream().at(10).put(preamble.clone()).at(300).say(t("a")).say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.at, at(10));
    assert!(answer.text().starts_with(&preamble));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft()), ("met".into(), Some(300.0)));
    house.end().await;
}

// --- when a leave is whose fault ---

#[tokio::test(start_paused = true)]
async fn c54_a_leave_in_good_time_is_a_cancel() {
    let (house, _engine) = House::playing(steady());
    let mut answer = house.chat(stream()).await;
    answer.frames(5).await;
    drop(answer);
    assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c54_a_leave_after_the_finish_event_does_not_count() {
    let script = Script::stream().say_all([(100, t("a")), (120, t("b"))]).say(f("stop")).at(5000).say(d()).end();
    let (house, engine) = House::playing(script);
    let mut answer = house.chat(stream()).await;
    answer.frames(3).await;
    drop(answer);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.number("status")), ("met".into(), Some(200.0)));
    // Its usage is charged, and awaited for a second after the finish.
    assert_eq!(engine.log().closed(0).await, at(1120));
    assert_eq!(house.page().sum("goodput_cancel_seconds_count", &[]), 0.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c54_a_leave_after_the_promise_was_broken_is_a_miss() {
    for (leave, verdict) in
        [(500, "excluded(client_cancel)"), (501, "missed(canceled_late)"), (2000, "missed(canceled_late)")]
    {
        let (house, _engine) = House::playing(Script::stream().at(10).say(r()).silence());
        assert!(tokio::time::timeout(ms(leave), house.chat(stream())).await.is_err());
        assert_eq!(house.line().await.verdict(), verdict, "after {leave} ms");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c54_a_leave_during_a_stall_is_a_miss() {
    for (leave, verdict) in [(1000, "excluded(client_cancel)"), (1001, "missed(canceled_late)")] {
        let (house, _engine) = House::playing(Script::stream().at(100).say(t("a")).silence());
        let answer = house.chat(stream()).await;
        house.sleep(ms(leave)).await;
        drop(answer);
        assert_eq!(house.line().await.verdict(), verdict, "{leave} ms after the last token");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c54_a_leave_from_a_slow_stream_is_a_miss() {
    let script = Script::stream().say_all([(100, t("a")), (180, t("b")), (260, t("c"))]).silence();
    let (house, _engine) = House::playing(script);
    let mut answer = house.chat(stream()).await;
    answer.frames(3).await;
    drop(answer);
    assert_eq!(house.line().await.verdict(), "missed(canceled_late)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c54_a_leave_from_a_whole_answer_is_held_to_the_budget_of_its_cap() {
    // 500 + 50 x (11 - 1) = 1000 ms.
    for (leave, verdict) in [(1000, "excluded(client_cancel)"), (1001, "missed(canceled_late)")] {
        let (house, _engine) = House::playing(Script::new().silence());
        let mut body = unary();
        body["max_tokens"] = json!(11);
        assert!(tokio::time::timeout(ms(leave), house.chat(body)).await.is_err());
        assert_eq!(house.line().await.verdict(), verdict, "after {leave} ms");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn overdue_requests_are_counted_while_they_run() {
    let (house, _engine) = House::playing(Script::stream().say_all([(100, t("a")), (140, t("b"))]).silence());
    let overdue = |house: &House| house.page().sum("goodput_overdue", &[("class", "chat")]);
    let mut answer = house.chat(stream()).await;
    answer.frames(2).await;
    assert_eq!(
        (overdue(&house), house.page().sum("goodput_in_flight", &[("class", "chat"), ("pool", "a")])),
        (0.0, 1.0)
    );
    // Two tokens in 140 - 100 ms allow the next ones until 200 ms.
    house.sleep(ms(61)).await;
    assert_eq!(overdue(&house), 1.0);
    drop(answer);
    assert_eq!(house.line().await.verdict(), "missed(canceled_late)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_several_tokens_an_event_is_not_overdue_once_that_is_learned() {
    let house = House::new(&Yaml::default());
    let ten = (0..10).map(|number| (100 + 10 * number, t("abc")));
    let teaches = Script::stream().say_all(ten).say(f("stop")).say(u(5, 30)).say(d()).end();
    // Six events and eighteen tokens in 600 ms: 100 ms an event, 33 ms a token.
    let runs = Script::stream().say_all((0..6).map(|number| (100 + 120 * number, t("abc")))).silence();
    house.engine("e1", vec![teaches.clone(), teaches.clone(), teaches, runs]);
    for _ in 0..3 {
        house.chat(stream_with_usage()).await.whole().await;
    }
    let mut answer = house.chat(stream()).await;
    answer.frames(6).await;
    assert_eq!(house.page().sum("goodput_overdue", &[("class", "chat")]), 0.0);
    drop(answer);
    assert_eq!(house.lines(4).await[3].verdict(), "excluded(client_cancel)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn ratios_learned_for_one_model_do_not_apply_to_another_of_the_same_pattern() {
    let house = House::new(&Yaml::default().class("stall_seconds: 9"));
    let ten = (0..10).map(|number| (100 + 10 * number, t("abc")));
    let teaches = Script::stream().say_all(ten).say(f("stop")).say(u(5, 30)).say(d()).end();
    let runs = Script::stream().say_all((0..6).map(|number| (100 + 120 * number, t("abc")))).silence();
    house.engine("e1", vec![teaches.clone(), teaches.clone(), teaches, runs]);
    let mut one = stream_with_usage();
    one["model"] = json!("x1");
    for _ in 0..3 {
        house.chat(one.clone()).await.whole().await;
    }
    let mut other = stream();
    other["model"] = json!("x2");
    let mut answer = house.chat(other).await;
    answer.frames(6).await;
    assert_eq!(house.page().sum("goodput_overdue", &[("class", "chat")]), 1.0);
    drop(answer);
    assert_eq!(house.lines(4).await[3].verdict(), "missed(canceled_late)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_broke_itl_and_continued_is_overdue() {
    let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5), ("itl_seconds", 0.2)]);
    let script = Script::stream().say_all([(100, t("a")), (400, t("b")), (450, t("c"))]).silence();
    let (house, _engine) = House::playing_with(&yaml, script);
    let mut answer = house.chat(stream()).await;
    answer.frames(1).await;
    assert_eq!(house.page().sum("goodput_overdue", &[("class", "chat")]), 0.0);
    answer.frames(2).await;
    assert_eq!(house.page().sum("goodput_overdue", &[("class", "chat")]), 1.0);
    drop(answer);
    assert_eq!(house.line().await.verdict(), "missed(canceled_late)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_revoked_finish_does_not_count_for_overdue_requests() {
    let script = Script::stream().at(100).say(t("a")).say(f("stop")).at(120).say(t("b")).silence();
    let (house, _engine) = House::playing_with(&Yaml::default().class("stall_seconds: 1"), script);
    let mut answer = house.chat(stream()).await;
    answer.frames(3).await;
    house.sleep(ms(1001)).await;
    assert_eq!(house.page().sum("goodput_overdue", &[("class", "chat")]), 1.0);
    drop(answer);
    assert_eq!(house.line().await.verdict(), "missed(canceled_late)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn reasoning_is_no_first_token_for_overdue_requests_of_a_class_that_counts_visible_tokens() {
    for (counts, overdue) in [("first_token", 0.0), ("first_visible_token", 1.0)] {
        let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5)]).class(&format!("ttft_counts: {counts}"));
        let (house, _engine) = House::playing_with(&yaml, Script::stream().at(100).say(g("hm")).silence());
        let mut answer = house.chat(stream()).await;
        answer.frames(1).await;
        house.sleep(ms(401)).await;
        assert_eq!(house.page().sum("goodput_overdue", &[("class", "chat")]), overdue, "{counts}");
        drop(answer);
        house.line().await;
        house.end().await;
    }
}

// --- clients that do not read ---

#[tokio::test(start_paused = true)]
async fn c55_a_client_that_reads_nothing_stops_the_engine_and_is_cut() {
    let (house, engine) = House::playing(flood());
    let mut client = house.connect(4096);
    client.post(CHAT, &stream()).await;
    house.sleep(Duration::from_secs(3)).await;
    let written = engine.log().connections()[0].written;
    assert!(written < 600_000, "{written} bytes are on their way for a client that reads nothing");
    assert_eq!(house.page().sum("goodput_in_flight", &[("class", "chat")]), 1.0);
    // Nothing was read since the first millisecond; the write stall is 30 s.
    let closed = engine.log().closed(0).await;
    assert!(closed > at(30_000) && closed <= at(30_010), "{closed:?}");
    assert_eq!(house.line().await.verdict(), "excluded(client_limited)");
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c55_a_slow_reader_does_not_make_its_engine_look_slow() {
    let yaml = Yaml::default().class("timeouts: {idle: 1s}").class("stall_seconds: 0.5");
    let block = event(&t(&"x".repeat(1000))).repeat(60);
    let script = (1..=20).fold(Script::stream(), |script, number| script.at(10 * number).put(block.clone()));
    let (house, _engine) = House::playing_with(&yaml, script.say(f("stop")).say(d()).end());
    let mut client = house.connect(4096);
    client.post(CHAT, &stream()).await;
    // Longer than the idle limit, which does not run meanwhile.
    house.sleep(Duration::from_secs(3)).await;
    let (text, _) = client.read_until("0\r\n\r\n").await;
    assert!(text.contains("[DONE]") && !text.contains("error"));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft()), ("excluded(client_limited)".into(), Some(10.0)));
    assert_eq!(house.page().sum("goodput_stalls_total", &[]), 0.0);
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c55_a_late_first_token_stays_a_miss_for_a_slow_reader() {
    let block = event(&t(&"x".repeat(1000))).repeat(300);
    let script = Script::stream().at(700).put(block.clone()).at(900).put(block).say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing(script);
    let mut client = house.connect(4096);
    client.post(CHAT, &stream()).await;
    house.sleep(Duration::from_secs(3)).await;
    client.read_until("0\r\n\r\n").await;
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft()), ("missed(ttft)".into(), Some(700.0)));
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_readers_tpot_is_not_sampled() {
    for (refuses, samples) in [(false, 1.0), (true, 0.0)] {
        let script = Script::stream().say_all([(700, t("a")), (720, t("b")), (900, t("c"))]).say(f("stop")).say(d());
        let (house, _engine) = House::playing(script.end());
        let client = ClientState::default();
        let mut answer = house.send(Ask::post(CHAT, stream()).client(&client)).await;
        answer.frames(2).await;
        if refuses {
            client.refuses(at(720));
        }
        answer.whole().await;
        assert_eq!(house.line().await.verdict(), "missed(ttft)", "judged, whoever reads");
        let page = house.page();
        assert_eq!(page.sum("goodput_time_to_first_token_seconds_count", &[]), 1.0);
        assert_eq!(page.sum("goodput_time_per_output_token_seconds_count", &[]), samples, "refuses: {refuses}");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stopped_reading_in_time_is_not_overdue() {
    for (since, overdue, verdict) in [
        (130, 0.0, "excluded(client_limited)"),
        // Two tokens from 100 ms on allow the next one until 200 ms.
        (210, 1.0, "missed(canceled_late)"),
    ] {
        let script = Script::stream().say_all([(100, t("a")), (120, t("b")), (400, r())]).silence();
        let (house, _engine) = House::playing(script);
        let client = ClientState::default();
        let mut answer = house.send(Ask::post(CHAT, stream()).client(&client)).await;
        answer.frames(2).await;
        client.refuses(at(since));
        answer.frames(1).await;
        house.sleep(ms(2000)).await;
        assert_eq!(house.page().sum("goodput_overdue", &[("class", "chat")]), overdue, "since {since}");
        drop(answer);
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_of_a_connection_that_stopped_reading_in_time_is_not_overdue() {
    let (house, _engine) = House::playing(flood());
    let mut client = house.connect(4096);
    client.post(CHAT, &stream()).await;
    house.sleep(Duration::from_secs(3)).await;
    assert_eq!(house.page().sum("goodput_overdue", &[("class", "chat")]), 0.0);
    drop(client);
    assert_eq!(house.line().await.verdict(), "excluded(client_limited)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c55_an_http2_client_that_opens_no_window_stops_the_engine_too() {
    let (house, engine) = House::playing(flood());
    let mut client = house.connect_h2().await;
    let answer = client.send_request(h2_post(CHAT, &stream())).await.unwrap();
    house.sleep(Duration::from_secs(3)).await;
    let written = engine.log().connections()[0].written;
    assert!(written < 600_000, "{written} bytes are on their way for a client that reads nothing");
    drop(answer);
    assert!(engine.log().closed(0).await <= at(3100));
    assert_eq!(house.line().await.verdict(), "excluded(client_limited)");
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_small_stream_gives_its_seat_back_at_its_end_though_its_client_keeps_the_window_shut() {
    let script = Script::stream().say_all([(10, t("a")), (20, t("b")), (30, f("stop")), (30, d())]).end();
    let yaml = Yaml::default().with("max_concurrency_per_engine: 1");
    let (house, _engine) = House::playing_with(&yaml, script);
    let mut client = house.connect_h2_with_window(0).await;
    let _untaken = client.send_request(h2_post(CHAT, &stream())).await.unwrap();
    assert_eq!(house.crowd(), (1, 0));
    house.sleep(ms(25)).await;
    assert_eq!(house.crowd(), (0, 0));
    assert_eq!(house.line().await.verdict(), "met");
    // Buffered data of a gone stream are dropped, and change nothing any more.
    house.sleep(Duration::from_secs(40)).await;
    assert_eq!(house.lines(1).await.len(), 1);
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_long_stream_waits_for_a_client_that_keeps_the_window_shut_and_is_cut_after_the_write_stall() {
    let (house, engine) = House::playing(flood());
    let mut client = house.connect_h2_with_window(0).await;
    let _untaken = client.send_request(h2_post(CHAT, &stream())).await.unwrap();
    house.sleep(Duration::from_secs(3)).await;
    let written = engine.log().connections()[0].written;
    assert!(written < 600_000, "{written} bytes are on their way for a client that reads nothing");
    assert_eq!(engine.log().closed(0).await, at(30_001));
    assert_eq!(house.line().await.verdict(), "excluded(client_limited)");
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_reset_reaches_the_engine_while_the_window_is_shut() {
    for (script, moment) in [(steady(), 90), (flood(), 90), (flood(), 3000)] {
        let (house, engine) = House::playing(script);
        let mut client = house.connect_h2_with_window(0).await;
        let answer = client.send_request(h2_post(CHAT, &stream())).await.unwrap();
        house.sleep(at(moment).since(house.clock.now())).await;
        drop(answer);
        assert_eq!(engine.log().closed(0).await, at(moment));
        let limited = moment > 200;
        let verdict = if limited { "excluded(client_limited)" } else { "excluded(client_cancel)" };
        assert_eq!(house.line().await.verdict(), verdict);
        drop(client);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_idle_limit_does_not_run_while_the_window_is_shut_and_the_total_limit_does() {
    let yaml = Yaml::default().class("timeouts: {idle: 1s, total: 5s}");
    let (house, engine) = House::playing_with(&yaml, Script::stream().at(100).say(t("a")).silence());
    let mut client = house.connect_h2_with_window(0).await;
    let _untaken = client.send_request(h2_post(CHAT, &stream())).await.unwrap();
    assert_eq!(engine.log().closed(0).await, at(5000));
    assert_eq!(house.line().await.verdict(), "excluded(client_limited)");
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_total_limit_that_passes_while_the_window_is_shut_is_no_fault_of_the_engine() {
    let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5)]).class("timeouts: {idle: 60s, total: 5s}");
    let yaml = yaml.with("breaker: {faults: 1, within: 10s, open: 60s}");
    for (window, verdict, state) in
        [(0, "excluded(client_limited)", "up"), (64 * 1024, "missed(timeout_total)", "breaker_open")]
    {
        let (house, engine) = House::playing_with(&yaml, Script::stream().at(100).say(t("a")).silence());
        let mut client = house.connect_h2_with_window(window).await;
        let _untaken = client.send_request(h2_post(CHAT, &stream())).await.unwrap();
        assert_eq!(engine.log().closed(0).await, at(5000));
        assert_eq!((house.line().await.verdict(), house.states("a")), (verdict.into(), vec![state]));
        drop(client);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_idle_limit_runs_from_the_moment_at_which_a_client_takes_bytes_again() {
    let yaml = Yaml::default().class("timeouts: {idle: 1s}");
    let (house, engine) = House::playing_with(&yaml, Script::stream().at(100).say(t(&"x".repeat(2000))).silence());
    let mut client = house.connect(256);
    client.post(CHAT, &stream()).await;
    house.sleep(at(3000).since(house.clock.now())).await;
    assert_eq!(house.page().sum("goodput_in_flight", &[("class", "chat")]), 1.0);
    let (_, when) = client.read_until("idle_timeout").await;
    assert_eq!((when, engine.log().closed(0).await), (at(4000), at(4000)));
    assert_eq!(house.line().await.verdict(), "missed(timeout_idle)");
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_idle_limit_begins_anew_when_a_refusing_client_reads_again() {
    let yaml = Yaml::default().class("timeouts: {idle: 1s}");
    let (house, engine) = House::playing_with(&yaml, Script::stream().at(100).say(t("a")).silence());
    let mut answer = house.chat(stream()).await;
    answer.frame().await.unwrap();
    // Nobody asks for more until 900 ms: as hyper does while a client refuses bytes.
    house.sleep(ms(800)).await;
    let rest = answer.whole().await;
    assert_eq!(rest.end, at(1900));
    assert_eq!(engine.log().closed(0).await, at(1900));
    assert_eq!(house.line().await.verdict(), "missed(timeout_idle)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_closed_by_the_listener_records_its_reason() {
    for (why, verdict) in [
        (DisconnectReason::WriteStall, "excluded(client_limited)"),
        (DisconnectReason::Total, "excluded(client_limited)"),
        (DisconnectReason::Drain, "missed(internal)"),
    ] {
        let (house, _engine) = House::playing(steady());
        let client = ClientState::default();
        let mut answer = house.send(Ask::post(CHAT, stream()).client(&client)).await;
        answer.frames(3).await;
        if why != DisconnectReason::Drain {
            client.refuses(house.clock.now());
            house.sleep(ms(200)).await;
        }
        client.sever(why);
        drop(answer);
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_leave_after_an_early_head_reaches_the_engine() {
    let (house, engine) = House::playing_with(&waiting(true), Script::new().silence());
    let mut answer = house.chat(stream()).await;
    assert_eq!(answer.frame().await.unwrap().1, at(200));
    house.sleep(ms(50)).await;
    drop(answer);
    assert_eq!(engine.log().closed(0).await, at(250));
    assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_unrequested_stream_is_released_too() {
    let script = Script::stream().at(10).say(r()).at(950).say(t("a")).say(f("stop")).say(d()).end();
    let (house, _engine) = House::playing_with(&waiting(false), script);
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.at, answer.end), (at(200), at(950)));
    assert_eq!(house.line().await.verdict(), "missed(ttft)");
    house.end().await;
}

/// C92: the side that closes first must not be the one that a request is sent to.
#[tokio::test(start_paused = true)]
async fn c92_an_idle_connection_outlives_those_of_clients_and_load_balancers() {
    let script = Script::new().at(10).reply(200, &[("content-type", "application/json")], whole("x", 1, 1));
    let (house, _engine) = House::playing(script);
    let mut client = house.connect(64 * 1024);
    // The engine's own connection does not stay open so long, and is opened anew.
    for _ in 0..3 {
        client.post(CHAT, &unary()).await;
        client.read_until("finish_reason").await;
        house.sleep(Duration::from_secs(615)).await;
    }
    let (rest, when) = client.read_to_end().await;
    assert!(rest.is_empty());
    let (least, most) = (at(3 * 615_000), at(3 * 615_000 + 10_000));
    assert!((least..most).contains(&when), "{when:?}");
    let mut sender = house.connect_h2().await;
    for _ in 0..3 {
        let mut answer = sender.send_request(h2_post(CHAT, &unary())).await.unwrap();
        while h2_next(&mut answer).await.is_some() {}
        drop(answer);
        house.sleep(Duration::from_secs(615)).await;
        assert!(!sender.is_closed());
    }
    house.sleep(Duration::from_secs(10)).await;
    assert!(sender.is_closed(), "and it ends at last");
    house.lines(6).await;
    house.end().await;
}

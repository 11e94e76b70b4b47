//! Tenants' limits, seats and queues (`docs/cases.md`), over the whole gateway.

use std::sync::Arc;

use crate::support::scripted_engine::{Script, ScriptedEngine, fixtures::*};
use futures_util::future::join_all;
use goodput::admit::RateLimiter;
use goodput::admit::queue::{Deadline, LimitState, QueueRequest as QueueAsk, WhenHopeless};
use goodput::types::{ClientState, DisconnectReason, Priority, TenantId, Tokens};
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::*;

/// One tenant, `acme` (key `sk-acme`), with these limits, and `globex` (key `sk-globex`) without.
pub fn limited(limits: &str) -> Yaml {
    tenants(&format!("limits: {{{limits}}}"))
}

pub fn tenants(of_acme: &str) -> Yaml {
    let hash = |key: &str| blake3::hash(key.as_bytes()).to_hex().to_string();
    let acme = format!("  - {{tenant: acme, keys: [{{label: a, blake3: \"{}\"}}], {of_acme}}}", hash("sk-acme"));
    let globex = format!("  - {{tenant: globex, keys: [{{label: g, blake3: \"{}\"}}]}}", hash("sk-globex"));
    Yaml::default().top(&format!("tenants:\n{acme}\n{globex}"))
}

/// One engine with this many seats; the first token may take ten seconds.
fn seats(count: usize) -> Yaml {
    Yaml::default().promise(&[("ttft_seconds", 10.0)]).with(&format!("max_concurrency_per_engine: {count}"))
}

pub fn by(key: &str, body: Value) -> Ask {
    Ask::post(CHAT, body).header("authorization", &format!("Bearer {key}"))
}

/// A chat request of ten prompt tokens that states this cap.
pub fn capped(cap: u64, streams: bool) -> Value {
    let content = "x".repeat(38);
    json!({"model": "m1", "stream": streams, "max_tokens": cap, "messages": [{"role": "user", "content": content}]})
}

/// A non-streaming response with this usage, this long after the request.
fn answer_after(millis: u64, prompt: u64, output: u64) -> Script {
    let body = whole("x", prompt, output);
    Script::new().at(millis).reply(200, &[("content-type", "application/json")], body)
}

/// A stream of one token at `first`, that ends at `end`.
fn stream_of(first: u64, end: u64) -> Script {
    Script::stream().at(first).say(t("a")).at(end).say(f("stop")).say(u(10, 1)).say(d()).end()
}

pub async fn status(house: &House, ask: Ask) -> u16 {
    house.send(ask).await.whole().await.status.as_u16()
}

/// Remainder of a limit of `acme`.
pub fn left(house: &House, limit: &str) -> u64 {
    let (tenant, now) = (goodput::types::TenantId::from("acme"), house.clock.now());
    let RateLimiter::Local(log) = &house.gateway.limiter else { panic!("limits of this process") };
    let standings = log.statuses(&tenant, "m1", now);
    standings.iter().find(|limit_state| limit_state.limit.as_str() == limit).expect("a limit of this name").remaining
}

/// A patient queue request.
pub fn patient() -> QueueAsk {
    QueueAsk {
        tenant: TenantId::anonymous(),
        priority: Priority::Normal,
        arrival: at(0),
        deadline: Deadline::Whenever,
        tokens: Tokens(1),
        prompt: Tokens(1),
        timeout_at: at(100_000),
        when_hopeless: WhenHopeless::Demote,
        limit_state: LimitState::WithinLimits,
    }
}

fn spawn(house: &Arc<House>, ask: Ask) -> JoinHandle<Whole> {
    let house = Arc::clone(house);
    tokio::spawn(async move { house.send(ask).await.whole().await })
}

async fn ended(house: Arc<House>) {
    Arc::into_inner(house).expect("all tasks have ended").end().await;
}

// --- prompts that are being read ---

#[tokio::test(start_paused = true)]
async fn a_prompt_waits_for_the_prefill_of_the_one_before_it() {
    let yaml = seats(8).with("queue: {prefill_tokens_per_engine: 5}");
    let (house, engine) = House::playing_with(&yaml, stream_of(300, 5000));
    let house = Arc::new(house);
    let first = spawn(&house, Ask::post(CHAT, capped(500, true)));
    house.sleep(ms(50)).await;
    let second = spawn(&house, Ask::post(CHAT, capped(500, true)));
    house.sleep(ms(50)).await;
    assert_eq!(house.crowd(), (1, 1), "seats are not what is short");
    let _ = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(engine.log().requests()[1].body_at, at(300), "asked when the first token came");
    house.lines(2).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_non_streaming_prompt_counts_as_prefilled_after_its_predicted_time() {
    let yaml = seats(8).with("queue: {prefill_tokens_per_engine: 5}");
    let (house, engine) = House::playing_with(&yaml, answer_after(9000, 10, 20));
    let house = Arc::new(house);
    let first = spawn(&house, Ask::post(CHAT, capped(500, false)));
    house.sleep(ms(10)).await;
    let second = spawn(&house, Ask::post(CHAT, capped(500, false)));
    let answers = (first.await.unwrap(), second.await.unwrap());
    assert_eq!((answers.0.status.as_u16(), answers.1.status.as_u16()), (200, 200));
    let asked = engine.log().requests()[1].body_at;
    assert!(asked > at(25) && asked < at(100), "about as long as reading takes: {asked:?}");
    house.lines(2).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn by_default_the_prefill_limit_follows_the_learned_pace() {
    let yaml = seats(8).promise(&[("ttft_seconds", 1.0)]);
    let limit = |house: &House| house.page().sum("goodput_prefill_tokens_per_engine", &[]);
    let tokens = (0..10).map(|n| (300 + 10 * n, t("a")));
    let script = Script::stream().say_all(tokens).say(f("stop")).say(u(10, 10)).say(d()).end();
    let (house, engine) = House::playing_with(&yaml, script);
    assert_eq!(house.page().count("goodput_prefill_tokens_per_engine", &[]), 0, "nothing is known, nothing is told");
    for _ in 0..40 {
        house.send(Ask::post(CHAT, capped(500, true))).await.whole().await;
    }
    house.sleep(ms(150)).await;
    let room = limit(&house);
    assert!((512.0..20_000.0).contains(&room), "what the engine reads in a part of a second: {room}");
    let house = Arc::new(house);
    let long = || {
        let content = "word ".repeat(room as usize);
        json!({"model": "m1", "stream": true, "max_tokens": 9, "messages": [{"role": "user", "content": content}]})
    };
    let before = house.clock.now();
    let first = spawn(&house, Ask::post(CHAT, long()));
    house.sleep(ms(50)).await;
    let second = spawn(&house, Ask::post(CHAT, long()));
    let _ = (first.await.unwrap(), second.await.unwrap());
    let asked = engine.log().requests()[41].body_at;
    assert_eq!(asked, before + ms(300), "each takes all of the room, until its first token");
    house.reload(&yaml.clone().with("queue: {prefill_tokens_per_engine: off}"));
    assert_eq!(house.page().count("goodput_prefill_tokens_per_engine", &[]), 0);
    house.reload(&yaml.with("queue: {prefill_tokens_per_engine: 7}").top("replicas: 3"));
    assert_eq!(limit(&house), 2.0, "each gateway has its part");
    house.lines(42).await;
    ended(house).await;
}

// --- limits ---

#[tokio::test(start_paused = true)]
async fn c25_a_concurrent_burst_is_admitted_up_to_the_limit() {
    let (house, engine) = House::playing_with(&limited("tokens_per_minute: 1000"), answer_after(100, 10, 20));
    let asks = (0..10).map(|_| house.send(by("sk-acme", capped(300, false))));
    let statuses: Vec<u16> = join_all(asks).await.into_iter().map(|reply| reply.status.as_u16()).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 3);
    assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 7);
    assert_eq!(engine.log().requests().len(), 3);
    // 1000 less three times 30, and what flowed back in 100 ms.
    assert!((910..=912).contains(&left(&house, "tokens_per_minute")), "{}", left(&house, "tokens_per_minute"));
    let page = house.page();
    assert_eq!(page.sum("goodput_rate_limited_total", &[("tenant", "acme"), ("limit", "tokens_per_minute")]), 7.0);
    assert_eq!(page.sum("goodput_slo_excluded_total", &[("reason", "rate_limited")]), 7.0);
    assert_eq!(status(&house, by("sk-globex", capped(300, false))).await, 200, "the limit is acme's");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c27_two_hundred_cancelled_streams_leave_nothing_behind() {
    let script = Script::stream().at(5).say(t("a")).silence();
    let yaml = limited("concurrent_requests: 1").with("max_concurrency_per_engine: 1");
    let (house, _engine) = House::playing_with(&yaml, script);
    for _ in 0..200 {
        let mut reply = house.send(by("sk-acme", stream())).await;
        assert_eq!(reply.status, 200);
        reply.frames(1).await;
        drop(reply);
        assert_eq!(house.crowd(), (0, 0));
    }
    let reply = house.send(by("sk-acme", stream())).await;
    assert_eq!((reply.status.as_u16(), house.crowd()), (200, (1, 0)));
    assert_eq!(house.page().sum("goodput_in_flight", &[("class", "chat")]), 1.0);
    drop(reply);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c29_a_client_that_leaves_before_the_usage_pays_for_the_tokens_seen() {
    let tokens = |script: Script| (1..=100).fold(script, |script, number| script.at(10 * number).say(t("a")));
    let script = tokens(Script::stream()).say(f("length")).say(u(10, 100)).say(d()).end();
    let (house, engine) = House::playing_with(&limited("tokens_per_minute: 60, tokens_burst: 9000"), script);
    let mut reply = house.send(by("sk-acme", capped(5000, true))).await;
    reply.frames(60).await;
    assert_eq!(left(&house, "tokens_per_minute"), 9000 - 5010, "prompt and cap are set aside");
    drop(reply);
    assert_eq!(left(&house, "tokens_per_minute"), 9000 - 10 - 60);
    assert_eq!(engine.log().closed(0).await, at(600));
    assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c29_a_client_that_leaves_during_prefill_pays_for_the_prompt() {
    let (house, _engine) = House::playing_with(&limited("tokens_per_minute: 600"), Script::new().silence());
    {
        let asked = house.send(by("sk-acme", capped(500, true)));
        tokio::select! {
            _ = asked => panic!("the engine is silent"),
            () = house.sleep(ms(1)) => {}
        }
    }
    assert_eq!(left(&house, "tokens_per_minute"), 590);
    house.lines(1).await;
    house.end().await;
}

/// 600 tokens a minute for `acme`, and heads that go out after 200 ms.
fn heads_go_ahead() -> Yaml {
    limited("tokens_per_minute: 600").class("hold_head: 200ms").class("keepalive_seconds: 1")
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_after_an_early_head_before_a_token_pays_for_the_prompt() {
    let yaml = heads_go_ahead();
    for script in [Script::new().silence(), Script::stream().at(10).say(r()).silence()] {
        let (house, _engine) = House::playing_with(&yaml, script);
        let mut reply = house.send(by("sk-acme", capped(500, true))).await;
        reply.frames(1).await;
        assert_eq!(house.clock.now(), at(200));
        drop(reply);
        // Two tokens flow back in 200 ms.
        assert_eq!(
            (house.line().await.verdict(), left(&house, "tokens_per_minute")),
            ("excluded(client_cancel)".into(), 592)
        );
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_cut_after_an_early_head_for_not_reading_pays_for_the_prompt() {
    let yaml = heads_go_ahead();
    let (house, _engine) = House::playing_with(&yaml, Script::new().silence());
    let client = ClientState::default();
    let mut reply = house.send(by("sk-acme", capped(500, true)).client(&client)).await;
    reply.frames(1).await;
    client.refuses(at(200));
    client.sever(DisconnectReason::WriteStall);
    drop(reply);
    assert_eq!((house.line().await.outcome(), left(&house, "tokens_per_minute")), ("excluded", 592));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_after_an_in_band_error_pays_nothing() {
    let yaml = heads_go_ahead();
    let script = Script::stream().at(10).say(r()).at(250).say(error("own words", 500)).silence();
    let (house, _engine) = House::playing_with(&yaml, script);
    let mut reply = house.send(by("sk-acme", capped(500, true))).await;
    while !reply.frames(1).await.iter().any(|(bytes, _)| bytes.ends_with(b"}\n\n") && house.clock.now() == at(250)) {}
    assert_eq!(left(&house, "tokens_per_minute"), 92);
    drop(reply);
    assert_eq!(
        (house.line().await.verdict(), left(&house, "tokens_per_minute")),
        ("missed(upstream_error)".into(), 600)
    );
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_path_that_generates_nothing_costs_its_input() {
    let answer = json!({"object": "list", "data": [], "usage": {"prompt_tokens": 250, "total_tokens": 250}});
    let yaml = limited("tokens_per_minute: 600, output_tokens_per_minute: 100");
    let (house, _engine) = House::playing_with(&yaml, Script::json(200, answer.to_string()));
    let ask = Ask::post("/v1/embeddings", json!({"model": "m1", "input": "x".repeat(38)}));
    assert_eq!(status(&house, ask.header("authorization", "Bearer sk-acme")).await, 200);
    assert_eq!((left(&house, "tokens_per_minute"), left(&house, "output_tokens_per_minute")), (350, 100));
    house.lines(1).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_without_a_token_costs_nothing() {
    for script in [Script::json(500, "{}"), Script::json(429, "{}"), Script::new().reset()] {
        let (house, _engine) = House::playing_with(&limited("tokens_per_minute: 600, requests_per_minute: 5"), script);
        let answer = house.send(by("sk-acme", capped(500, true))).await.whole().await;
        assert!(answer.status.as_u16() >= 400);
        assert_eq!((left(&house, "tokens_per_minute"), left(&house, "requests_per_minute")), (600, 5));
        house.lines(1).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c32_retry_after_is_true_for_this_request() {
    let yaml = limited("tokens_per_minute: 600");
    let (house, engine) = House::playing_with(&yaml, answer_after(0, 10, 590));
    assert_eq!(status(&house, by("sk-acme", capped(590, false))).await, 200);
    let refused = house.send(by("sk-acme", capped(40, false)).header("x-request-id", "req-7")).await.whole().await;
    assert_eq!((refused.status.as_u16(), refused.header("content-type")), (429, Some("application/json")));
    let error = &refused.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("rate_limit_exceeded")));
    assert_eq!(error["request_id"], "req-7");
    assert_eq!(refused.header("retry-after"), Some("5"));
    assert_eq!(refused.header("x-goodput-reason"), Some("rate_limit_exceeded"));
    assert_eq!(refused.header("x-ratelimit-limit-tokens"), Some("600"));
    assert_eq!(refused.header("x-ratelimit-remaining-tokens"), Some("0"));
    assert_eq!(refused.header("x-ratelimit-reset-tokens"), Some("60s"));
    assert_eq!(refused.header("x-ratelimit-limit-requests"), None);
    house.sleep(ms(4000)).await;
    assert_eq!(status(&house, by("sk-acme", capped(40, false))).await, 429, "a second less is too early");
    house.sleep(ms(1000)).await;
    assert_eq!(status(&house, by("sk-acme", capped(40, false))).await, 200);
    assert_eq!(engine.log().requests().len(), 2);
    house.end().await;
}

/// An engine whose counter became negative locks out no tenant, and no counter decreases.
#[tokio::test(start_paused = true)]
async fn an_impossible_usage_is_replaced_by_the_tokens_seen() {
    for impossible in [u64::MAX, 4_294_967_295] {
        let stream = Script::stream().at(10).say_all([(10, t("a")), (20, t("b")), (20, f("stop"))]);
        let stream = stream.say(u(impossible, impossible)).say(d()).end();
        let house = House::new(&limited("tokens_per_minute: 600"));
        let _engine = house.engine("e1", vec![stream, Script::json(200, whole("a", impossible, impossible))]);
        for streamed in [true, false] {
            let before = left(&house, "tokens_per_minute");
            assert_eq!(status(&house, by("sk-acme", capped(20, streamed))).await, 200);
            let line = house.lines(if streamed { 1 } else { 2 }).await.pop().expect("a line");
            let (Some(input), Some(output)) = line.tokens() else { panic!("{line:?}") };
            assert!(input < 20 && output == if streamed { 2 } else { 1 }, "{line:?}");
            assert_eq!(before - left(&house, "tokens_per_minute"), input + output);
        }
        let counted = house.page().sum("goodput_tokens_total", &[("direction", "output")]);
        assert_eq!(counted, 3.0);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn concurrent_requests_have_no_retry_after() {
    let (house, _engine) = House::playing_with(&limited("concurrent_requests: 1"), answer_after(500, 10, 1));
    let (one, other) = tokio::join!(house.send(by("sk-acme", unary())), house.send(by("sk-acme", unary())));
    let (one, other) = (one.whole().await, other.whole().await);
    assert_eq!((one.status.as_u16(), other.status.as_u16()), (200, 429));
    assert_eq!(other.header("retry-after"), None);
    assert_eq!(other.header("x-ratelimit-limit-requests"), Some("1"));
    assert_eq!(other.header("x-ratelimit-reset-requests"), None);
    assert_eq!(status(&house, by("sk-acme", unary())).await, 200);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_limit_in_the_messages_dialect_has_its_shape() {
    let (house, _engine) = House::playing_with(&limited("requests_per_minute: 1"), answer_after(0, 10, 1));
    assert_eq!(status(&house, by("sk-acme", unary())).await, 200);
    let body = json!({"model": "m1", "max_tokens": 9, "messages": []});
    let ask = Ask::post("/v1/messages", body).header("x-api-key", "sk-acme").header("x-request-id", "req-7");
    let refused = house.send(ask).await.whole().await;
    assert_eq!((refused.status.as_u16(), &refused.json()["type"]), (429, &json!("error")));
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!(refused.header("retry-after"), Some("60"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c35_a_request_that_can_never_fit_is_rejected_at_once_and_costs_nothing() {
    let (house, engine) = House::playing_with(&limited("tokens_per_minute: 1000"), answer_after(0, 10, 1));
    let refused = house.send(by("sk-acme", capped(4990, false))).await.whole().await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (400, None));
    let error = &refused.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("invalid_request_error"), &json!("request_exceeds_limit")));
    let told = error["message"].as_str().expect("a message");
    assert!(told.contains("5000") && told.contains("1000") && told.contains("tokens_per_minute"), "{told}");
    assert_eq!((left(&house, "tokens_per_minute"), engine.log().requests().len()), (1000, 0));
    assert_eq!(house.line().await.verdict(), "excluded(invalid_request)");
    // An unstated cap is an estimate, and is clipped to the bucket.
    assert_eq!(status(&house, by("sk-acme", unary())).await, 200);
    house.end().await;
}

/// Rejected for good if there is a limit; without one it reaches the engine unchanged.
async fn never_fits_and_travels_untouched(body: String) {
    let (house, engine) = House::playing_with(&limited("tokens_per_minute: 1000"), answer_after(0, 10, 1));
    let ask = |key: &str| Ask::raw(CHAT, body.clone()).header("authorization", &format!("Bearer {key}"));
    let refused = house.send(ask("sk-acme")).await.whole().await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["code"]), (400, &json!("request_exceeds_limit")));
    assert_eq!((left(&house, "tokens_per_minute"), engine.log().requests().len()), (1000, 0));
    assert_eq!(status(&house, ask("sk-globex")).await, 200);
    assert_eq!(engine.log().requests()[0].body, body.as_bytes());
    house.lines(2).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c35_a_cap_beyond_the_number_range_never_fits_and_passes_unchanged_without_a_limit() {
    let cap = format!("1{}", "0".repeat(30));
    never_fits_and_travels_untouched(format!(r#"{{"model":"m1","max_tokens":{cap},"messages":[]}}"#)).await;
}

#[tokio::test(start_paused = true)]
async fn c35_the_most_choices_allowed_may_never_fit_and_pass_unchanged_without_a_limit() {
    never_fits_and_travels_untouched(r#"{"model":"m1","max_tokens":1,"n":2048,"messages":[]}"#.to_owned()).await;
}

/// Replay of C94: each choice is kept to its end, so that their number is bounded.
#[tokio::test(start_paused = true)]
async fn c94_too_many_choices_are_rejected_and_cost_nothing() {
    let (house, engine) = House::playing_with(&limited("tokens_per_minute: 1000"), answer_after(0, 10, 1));
    let most = u64::MAX.to_string();
    for count in ["2049", "18446744073709551616", &format!("1{}", "0".repeat(30)), &most] {
        for key in ["sk-acme", "sk-globex"] {
            let body = format!(r#"{{"model":"m1","max_tokens":1,"n":{count},"messages":[]}}"#);
            let ask = Ask::raw(CHAT, body).header("authorization", &format!("Bearer {key}"));
            let refused = house.send(ask).await.whole().await;
            assert_eq!((refused.status.as_u16(), &refused.json()["error"]["code"]), (400, &json!("unreadable_body")));
            let told = refused.json()["error"]["message"].to_string();
            assert!(told.contains("2048 choices"), "{told}");
        }
    }
    assert_eq!((left(&house, "tokens_per_minute"), engine.log().requests().len()), (1000, 0));
    assert!(house.lines(8).await.iter().all(|line| line.verdict() == "excluded(invalid_request)"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn unbounded_choices_do_not_reverse_the_priorities() {
    let low = "  - {slo_class: low, priority: low, objectives: {ttft_seconds: {threshold: 100, attainment: 0.9}}, joint_attainment_target: 0.9, window: 28d}";
    let yaml = seats(1).and_class(low).top("classify: [{class: low, when: {header: {x-slo-class: low}}}]");
    let house = House::new(&yaml);
    let odd = |body: &Value| body["n"].is_number();
    let engine = ScriptedEngine::new(house.clock, move |request| {
        if odd(&serde_json::from_slice(&request.body).unwrap()) { Script::json(400, "{}") } else { stream_of(100, 200) }
    });
    house.network.engine("e1", &engine);
    let house = Arc::new(house);
    let mut absurd = stream_with_usage();
    absurd["n"] = json!(2000);
    absurd["max_tokens"] = json!(1);
    let in_low = || Ask::post(CHAT, stream_with_usage()).header("x-slo-class", "low");
    let sitting = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    let lows: Vec<_> = (0..3).map(|_| spawn(&house, in_low())).collect();
    let refused = spawn(&house, Ask::post(CHAT, absurd));
    house.sleep(ms(10)).await;
    let chats: Vec<_> = (0..3).map(|_| spawn(&house, Ask::post(CHAT, stream_with_usage()))).collect();
    assert_eq!(refused.await.unwrap().status, 400);
    let last = |answers: Vec<Result<Whole, _>>| answers.into_iter().map(|answer| answer.unwrap().at).max();
    let (lows, chats) = (last(join_all(lows).await), last(join_all(chats).await));
    assert!(chats < lows, "the rank above goes first: {chats:?} {lows:?}");
    sitting.await.unwrap();
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn c37_an_admitted_stream_is_never_cut_for_a_limit() {
    let tokens = |script: Script| (1..=300).fold(script, |script, number| script.at(10 * number).say(t("a")));
    let script = tokens(Script::stream()).say(f("length")).say(u(10, 300)).say(d()).end();
    let (house, _engine) = House::playing_with(&limited("tokens_per_minute: 100"), script);
    let answer = house.send(by("sk-acme", capped(20, true))).await.whole().await;
    assert_eq!(answer.events().last().map(String::as_str), Some("[DONE]"));
    assert_eq!(left(&house, "tokens_per_minute"), 0, "debt is told as nothing left");
    let refused = house.send(by("sk-acme", capped(20, true))).await.whole().await;
    assert_eq!(refused.status, 429);
    // 310 of 100 used, 5 flowed back in 3 s; 30 are asked for: 235 at 100 a minute.
    assert_eq!(refused.header("retry-after"), Some("141"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c38_tokens_are_charged_and_not_requests() {
    let (house, _engine) = House::playing_with(&limited("tokens_per_minute: 30"), answer_after(0, 10, 140));
    assert_eq!(status(&house, by("sk-acme", capped(20, false))).await, 200);
    assert_eq!(status(&house, by("sk-acme", capped(20, false))).await, 429);
    assert_eq!(house.page().sum("goodput_tokens_total", &[("tenant", "acme")]), 150.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c40_a_reload_keeps_balances_and_applies_what_changed_at_once() {
    let yaml = |most: u64| limited(&format!("tokens_per_minute: {most}, concurrent_requests: 9"));
    let slow = Script::stream().at(10).say(t("a")).at(5000).say(f("stop")).say(u(10, 1)).say(d()).end();
    let house = House::new(&yaml(1000));
    let engine = house.engine("e1", vec![answer_after(0, 10, 890), slow]);
    assert_eq!(status(&house, by("sk-acme", capped(890, false))).await, 200);
    assert_eq!(left(&house, "tokens_per_minute"), 100);
    house.reload(&yaml(1000));
    assert_eq!(left(&house, "tokens_per_minute"), 100, "the same limit keeps its balance");

    let mut running = house.send(by("sk-acme", capped(50, true))).await;
    running.frames(1).await;
    house.reload(&yaml(500));
    assert_eq!(left(&house, "tokens_per_minute"), 0, "what was spent is carried over");
    assert_eq!(status(&house, by("sk-acme", capped(10, false))).await, 429);
    house.reload(&Yaml::default());
    assert_eq!(status(&house, Ask::post(CHAT, unary()).header("authorization", "Bearer sk-acme")).await, 200);
    let rest = running.whole().await;
    assert_eq!(rest.events().last().map(String::as_str), Some("[DONE]"), "a stream ends under its old settings");
    house.reload(&yaml(500));
    assert_eq!(left(&house, "tokens_per_minute"), 500, "a tenant that was removed comes back as a new one");
    assert_eq!(engine.log().requests().len(), 3);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_fails_before_a_token_costs_nothing_whatever_its_usage_says() {
    let start = json!({"type": "message_start", "message": {"id": "m", "role": "assistant", "content": [], "usage": {"input_tokens": 500, "output_tokens": 1}}});
    let delta = json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}});
    let named = |data: &Value| format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap());
    let begun = || Script::stream().at(50).put(named(&start));
    let yaml = limited("tokens_per_minute: 2000").promise(&[("ttft_seconds", 10.0)]).class("hold_head: 100ms");
    for (script, charged) in [(begun().at(300).reset(), 0), (begun().at(300).put(named(&delta)).at(310).reset(), 501)] {
        let (house, _engine) = House::playing_with(&yaml, script);
        let body = json!({"model": "m1", "stream": true, "max_tokens": 900, "messages": []});
        let ask = Ask::post("/v1/messages", body).header("authorization", "Bearer sk-acme");
        let reply = house.send(ask).await;
        assert_eq!(reply.whole().await.status, 200);
        assert_eq!(house.line().await.verdict(), "missed(truncated)");
        // Ten tokens flow back in 310 ms.
        let left = left(&house, "tokens_per_minute");
        assert!((2000 - charged..=2010 - charged).contains(&left), "{left} left, {charged} charged");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_limit_for_one_model_counts_the_name_behind_the_alias() {
    let yaml = limited("models: {m1: {requests_per_minute: 1}}")
        .routes("  - {model: [m1, m2], pools: [a]}")
        .top("models: {aliases: {nick: m1}}");
    let (house, _engine) = House::playing_with(&yaml, answer_after(0, 10, 1));
    let ask = |model: &str| {
        let mut body = unary();
        body["model"] = json!(model);
        by("sk-acme", body)
    };
    assert_eq!(status(&house, ask("nick")).await, 200);
    assert_eq!(status(&house, ask("m1")).await, 429);
    assert_eq!(status(&house, ask("m2")).await, 200);
    let page = house.page();
    assert_eq!(page.sum("goodput_rate_limited_total", &[("limit", "requests_per_minute"), ("scope", "model")]), 1.0);
    assert_eq!(page.sum("goodput_rate_limited_total", &[]), 1.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_tenant_over_its_limit_gets_free_seats_and_is_not_judged() {
    let yaml = tenants("limits: {requests_per_minute: 1}, when_over_limit: demote")
        .promise(&[("ttft_seconds", 10.0)])
        .with("max_concurrency_per_engine: 1");
    let house = House::new(&yaml);
    let engine = house.engine("e1", vec![stream_of(100, 200)]);
    let house = Arc::new(house);
    assert_eq!(status(&house, by("sk-acme", stream_with_usage())).await, 200);
    // One request has the seat, one over the limit waits, and a later one within limits goes first.
    let first = spawn(&house, by("sk-globex", stream_with_usage()));
    house.sleep(ms(10)).await;
    let demoted = spawn(&house, by("sk-acme", stream_with_usage()));
    house.sleep(ms(10)).await;
    let second = spawn(&house, by("sk-globex", stream_with_usage()));
    let (first, demoted, second) = (first.await.unwrap(), demoted.await.unwrap(), second.await.unwrap());
    assert_eq!((first.status.as_u16(), demoted.status.as_u16(), second.status.as_u16()), (200, 200, 200));
    assert!(second.end < demoted.at, "who is within limits goes first");
    let page = house.page();
    assert_eq!(page.sum("goodput_over_limit_total", &[("tenant", "acme")]), 1.0);
    assert_eq!(page.sum("goodput_slo_excluded_total", &[("reason", "rate_limited")]), 1.0);
    assert_eq!(page.sum("goodput_rate_limited_total", &[]), 0.0);
    assert_eq!(page.sum("slo_total", &[]), 3.0);
    assert_eq!(engine.log().requests().len(), 4);
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_served_beyond_its_limit_is_never_overdue() {
    let yaml = tenants("limits: {requests_per_minute: 1}, when_over_limit: demote");
    let house = House::new(&yaml);
    house.engine("e1", vec![stream_of(100, 200), Script::new().silence()]);
    let house = Arc::new(house);
    let overdue = || house.page().sum("goodput_overdue", &[("class", "chat")]);
    assert_eq!(status(&house, by("sk-acme", stream_with_usage())).await, 200);
    let beyond = spawn(&house, by("sk-acme", stream_with_usage()));
    house.sleep(ms(600)).await;
    assert_eq!((overdue(), house.page().sum("goodput_in_flight", &[("class", "chat")])), (0.0, 1.0));
    let within = spawn(&house, by("sk-globex", stream_with_usage()));
    house.sleep(ms(600)).await;
    assert_eq!((overdue(), house.page().sum("goodput_in_flight", &[("class", "chat")])), (1.0, 2.0));
    beyond.abort();
    within.abort();
    let verdicts: Vec<_> = house.lines(3).await.iter().skip(1).map(Line::verdict).collect();
    assert!(verdicts.contains(&"excluded(rate_limited)".into()) && verdicts.contains(&"missed(canceled_late)".into()));
    ended(house).await;
}

// --- seats and queues ---

#[tokio::test(start_paused = true)]
async fn waiting_for_a_seat_is_part_of_ttft_and_reported() {
    let (house, engine) = House::playing_with(&seats(1), stream_of(100, 400));
    let house = Arc::new(house);
    let first = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(50)).await;
    let second = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(50)).await;
    assert_eq!(house.crowd(), (1, 1));
    let page = house.page();
    assert_eq!(page.sum("goodput_queue_depth", &[("class", "chat"), ("pool", "a")]), 1.0);
    assert_eq!((page.sum("goodput_seats", &[]), page.sum("goodput_seats_taken", &[])), (1.0, 1.0));
    let first = first.await.unwrap();
    house.sleep(ms(10)).await;
    let page = house.page();
    let of = |name| page.sum(name, &[("class", "chat"), ("pool", "a")]);
    assert_eq!((of("goodput_queue_depth"), of("goodput_in_flight")), (0.0, 1.0), "it was called, and runs");
    let second = second.await.unwrap();
    assert_eq!((first.at, second.at), (at(100), at(500)));
    assert_eq!(engine.log().requests()[1].body_at, at(400), "asked when the seat came free");
    assert_eq!(second.header("server-timing"), Some("queue;dur=350.000, upstream;dur=100.000"));
    let lines = house.lines(2).await;
    assert_eq!((lines[0].number("queue_ms"), lines[1].number("queue_ms")), (Some(0.0), Some(350.0)));
    assert_eq!(lines[1].ttft(), Some(450.0));
    let queue = house.page().sum("goodput_queue_seconds_sum", &[]);
    assert!((queue - 0.35).abs() < 1e-9, "{queue}");
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_requests_own_targets_move_its_deadline_back_and_never_forward() {
    for (targets, order) in [(["", "1000"], [0, 1]), (["20000", ""], [1, 0])] {
        let house = House::new(&seats(1).class("target_headers: may_loosen"));
        house.engine("e1", vec![stream_of(100, 200)]);
        let house = Arc::new(house);
        let with = |target: &str| match target {
            "" => Ask::post(CHAT, stream_with_usage()),
            _ => Ask::post(CHAT, stream_with_usage()).header("x-slo-ttft-ms", target),
        };
        let sits = spawn(&house, with(""));
        house.sleep(ms(10)).await;
        let mut waiting = Vec::new();
        for target in targets {
            waiting.push(spawn(&house, with(target)));
            house.sleep(ms(10)).await;
        }
        sits.await.unwrap();
        let mut ends = Vec::new();
        for answer in waiting {
            ends.push(answer.await.unwrap().end);
        }
        assert_eq!(ends, order.map(|turn| at(400 + 200 * turn)), "{targets:?}");
        house.lines(3).await;
        ended(house).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_seat_in_time_is_shed_with_a_true_retry_after() {
    let yaml = seats(1).class("queue: {max_wait: 300ms}").with("queue: {max_waiting: 1}");
    let (house, engine) = House::playing_with(&yaml, stream_of(100, 2000));
    let house = Arc::new(house);
    // The rate: one seat in two seconds.
    assert_eq!(status(&house, Ask::post(CHAT, stream_with_usage())).await, 200);
    let sitting = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    let waiting = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    let full = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!((full.status.as_u16(), full.header("x-goodput-reason")), (503, Some("queue_full")));
    assert_eq!(full.header("retry-after"), Some("5"), "one who waits and itself, a little above two seconds each");
    let late = waiting.await.unwrap();
    assert_eq!(
        (late.status.as_u16(), late.header("x-goodput-reason"), late.at),
        (503, Some("queue_timeout"), at(2310))
    );
    assert_eq!(late.header("retry-after"), Some("3"), "itself; no seat has come free for longer than usual");
    assert_eq!(sitting.await.unwrap().status, 200);
    assert_eq!(engine.log().requests().len(), 2);
    assert_eq!(house.page().sum("goodput_slo_missed_total", &[("reason", "shed")]), 2.0);
    for line in house.lines(4).await.iter().filter(|line| line.outcome() == "missed") {
        assert_eq!((line.verdict(), line.number("queue_ms")), ("missed(shed)".into(), None));
    }
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_time_limit_that_fires_in_the_queue_is_a_miss() {
    let yaml = seats(1).class("timeouts: {first_token: 10200ms}");
    let (house, _engine) = House::playing_with(&yaml, stream_of(100, 60_000));
    let house = Arc::new(house);
    let sitting = house.chat(stream_with_usage()).await;
    let late = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(
        (late.status.as_u16(), late.header("x-goodput-reason"), late.at),
        (503, Some("queue_timeout"), at(10_300))
    );
    assert_eq!(house.line().await.verdict(), "missed(shed)");
    drop(sitting);
    house.lines(2).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_the_queue_is_out_of_it_at_once_and_judged_by_the_rule_for_leaving() {
    let (house, engine) = House::playing_with(&seats(1), stream_of(100, 60_000));
    let sitting = house.chat(stream_with_usage()).await;
    for (patience, verdict) in [(3000, "excluded(client_cancel)"), (10_001, "missed(canceled_late)")] {
        let mut waiting = Box::pin(house.chat(stream_with_usage()));
        tokio::select! {
            _ = &mut waiting => panic!("no seat is free"),
            () = house.sleep(ms(patience)) => {}
        }
        assert_eq!(house.crowd(), (1, 1));
        drop(waiting);
        assert_eq!(house.crowd(), (1, 0));
        let lines = house.lines(1 + usize::from(patience > 3000)).await;
        assert_eq!(lines.last().expect("a line").verdict(), verdict);
    }
    assert_eq!(engine.log().requests().len(), 1);
    drop(sitting);
    house.lines(3).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_hangs_up_in_the_queue_is_out_of_it_at_once_over_a_connection_too() {
    let (house, engine) = House::playing_with(&seats(1), stream_of(100, 60_000));
    let sitting = house.chat(stream_with_usage()).await;
    let mut client = house.connect(64 * 1024);
    client.post(CHAT, &stream_with_usage()).await;
    let mut h2 = house.connect_h2().await;
    let stream = tokio::spawn(h2.send_request(h2_post(CHAT, &stream_with_usage())));
    house.sleep(ms(10)).await;
    assert_eq!(house.crowd(), (1, 2));
    drop(client);
    house.sleep(ms(1)).await;
    assert_eq!(house.crowd(), (1, 1));
    stream.abort();
    house.sleep(ms(1)).await;
    assert_eq!(house.crowd(), (1, 0));
    assert_eq!(engine.log().requests().len(), 1);
    drop(sitting);
    let lines = house.lines(3).await;
    assert!(lines.iter().all(|line| line.verdict() == "excluded(client_cancel)"), "{lines:?}");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_body_is_kept_while_the_request_waits() {
    let (house, engine) = House::playing_with(&seats(1), stream_of(100, 500));
    let body = json!({"model": "m1", "stream": true, "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": "a long prompt ".repeat(20_000)}]});
    let (_, second) = tokio::join!(async { house.chat(stream_with_usage()).await.whole().await }, async {
        house.chat(body.clone()).await.whole().await
    });
    assert_eq!((second.status.as_u16(), second.at), (200, at(600)));
    let received = engine.log().requests();
    assert_eq!(serde_json::from_slice::<Value>(&received[1].body).unwrap(), body);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn requests_waiting_when_a_drain_begins_are_served() {
    let (house, _engine) = House::playing_with(&seats(1), stream_of(100, 1000));
    let house = Arc::new(house);
    let all: Vec<_> = (0..3).map(|_| spawn(&house, Ask::post(CHAT, stream_with_usage()))).collect();
    house.sleep(ms(10)).await;
    house.gateway.begin_drain();
    let late = house.chat(stream_with_usage()).await;
    assert_eq!((late.status.as_u16(), &late.headers["x-goodput-reason"]), (503, &"draining".parse().unwrap()));
    for answer in join_all(all).await {
        assert_eq!(answer.unwrap().status, 200);
    }
    drop(late);
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn requests_waiting_at_the_drain_limit_are_rejected() {
    let (house, _engine) = House::playing_with(&seats(1), stream_of(100, 60_000));
    let sitting = house.chat(stream_with_usage()).await;
    let client = goodput::types::ClientState::default();
    let mut waiting = Box::pin(house.send(Ask::post(CHAT, stream_with_usage()).client(&client)));
    tokio::select! {
        _ = &mut waiting => panic!("no seat is free"),
        () = house.sleep(ms(100)) => {}
    }
    house.gateway.begin_drain();
    client.end_drain();
    let refused = waiting.as_mut().await.whole().await;
    drop(waiting);
    assert_eq!((refused.status.as_u16(), refused.header("x-goodput-reason")), (503, Some("draining")));
    assert_eq!(house.line().await.verdict(), "missed(shed)");
    drop(sitting);
    house.lines(2).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn no_waiting_request_takes_a_seat_freed_by_the_drain_limit() {
    let (house, engine) = House::playing_with(&seats(1), Script::stream().silence());
    let client = goodput::types::ClientState::default();
    let ask = || Ask::post(CHAT, stream_with_usage()).client(&client);
    let mut sitting = Box::pin(house.send(ask()));
    let mut waiting = Box::pin(house.send(ask()));
    tokio::select! {
        biased;
        _ = &mut sitting => panic!("the engine is silent"),
        _ = &mut waiting => panic!("no seat is free"),
        () = house.sleep(ms(100)) => {}
    }
    assert_eq!(house.crowd(), (1, 1));
    house.gateway.begin_drain();
    client.end_drain();
    // The cut request releases its seat before the other one is checked.
    let (cut, refused) = (sitting.as_mut().await.whole().await, waiting.as_mut().await.whole().await);
    drop((sitting, waiting));
    let reasons = (cut.header("x-goodput-reason"), refused.header("x-goodput-reason"));
    assert_eq!((refused.status.as_u16(), reasons), (503, (Some("drain_cut"), Some("draining"))));
    let lines = house.lines(2).await;
    let line = lines.iter().find(|line| line.verdict() == "missed(shed)").expect("who waited is shed");
    assert_eq!((line.number("attempts").unwrap_or(0.0), engine.log().requests().len()), (0.0, 1));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_class_that_sheds_rejects_requests_with_an_infeasible_deadline() {
    let yaml = Yaml::default().with("max_concurrency_per_engine: 1").class("queue: {when_hopeless: shed}");
    let (house, _engine) = House::playing_with(&yaml, stream_of(100, 5000));
    let sitting = house.chat(stream_with_usage()).await;
    let refused = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!((refused.status.as_u16(), refused.header("x-goodput-reason")), (503, Some("hopeless")));
    assert_eq!(refused.at, at(601), "the first token was due at 600, and the timer counts milliseconds");
    drop(sitting);
    house.lines(2).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_non_streaming_request_is_feasible_until_the_budget_of_its_cap() {
    let yaml = Yaml::default().with("max_concurrency_per_engine: 1").class("queue: {when_hopeless: shed}");
    let (house, _engine) = House::playing_with(&yaml, stream_of(100, 5000));
    let sitting = house.chat(stream_with_usage()).await;
    assert_eq!(house.clock.now(), at(100));
    let refused = house.send(Ask::post(CHAT, capped(11, false))).await.whole().await;
    assert_eq!((refused.status.as_u16(), refused.header("x-goodput-reason")), (503, Some("hopeless")));
    assert_eq!(refused.at, at(1101), "500 + 50 x (11 - 1) from its arrival on, and the timer counts milliseconds");
    drop(sitting);
    house.lines(2).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_retry_inside_the_pool_keeps_its_seat() {
    let yaml = seats(1);
    let (house, engines) = House::many(&yaml, 2, vec![Script::json(500, "{}"), stream_of(100, 200)]);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!((answer.status.as_u16(), house.crowd()), (200, (0, 0)));
    assert_eq!(engines.iter().map(|engine| engine.log().requests().len()).sum::<usize>(), 2);
    assert_eq!(house.line().await.number("attempts"), Some(2.0));
    house.end().await;
}

/// Pool `a` on `e1` and pool `b` on `e2`, one seat each.
fn two_pools() -> Yaml {
    seats(1).pool("b", &["e2"]).with("max_concurrency_per_engine: 1")
}

/// Why a request comes to the second pool: push-back, failed connections or a full queue of the first.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SentOn {
    PushedBack,
    Unreachable,
    Full,
}

#[tokio::test(start_paused = true)]
async fn c27_cancelled_streams_leave_nothing_behind_in_a_further_pool_either() {
    for why in [SentOn::PushedBack, SentOn::Unreachable, SentOn::Full] {
        let one_seat = |yaml: Yaml| {
            let yaml = yaml.with("max_concurrency_per_engine: 1").with("breaker: off");
            yaml.with("retries: {share: 1, floor_per_10s: 1000}")
        };
        let a = one_seat(limited("concurrent_requests: 1").class("queue: {max_wait: 0s}"));
        let house = House::new(&one_seat(a.pool("b", &["e2"])));
        let streams = || Script::stream().at(5).say(t("a")).silence();
        let _a = match why {
            SentOn::PushedBack => Some(house.engine("e1", vec![Script::json(503, "{}")])),
            SentOn::Unreachable => None,
            SentOn::Full => Some(house.engine("e1", vec![streams()])),
        };
        let b = house.engine("e2", vec![streams()]);
        let in_a = match why {
            SentOn::Full => Some(house.send(by("sk-globex", stream())).await),
            SentOn::PushedBack | SentOn::Unreachable => None,
        };
        let taken = usize::from(in_a.is_some());
        for _ in 0..200 {
            let mut reply = house.send(by("sk-acme", stream())).await;
            assert_eq!(
                (reply.status.as_u16(), &reply.headers["x-goodput-pool"]),
                (200, &"b".parse().unwrap()),
                "{why:?}"
            );
            reply.frames(1).await;
            assert_eq!(house.crowd(), (taken + 1, 0));
            drop(reply);
            assert_eq!(house.crowd(), (taken, 0), "{why:?}");
        }
        let last = house.send(by("sk-acme", stream())).await;
        assert_eq!((last.status.as_u16(), house.crowd()), (200, (taken + 1, 0)));
        let page = house.page();
        let of_b = |name| page.sum(name, &[("pool", "b")]);
        assert_eq!(
            (of_b("goodput_in_flight"), of_b("goodput_queue_depth"), of_b("goodput_seats_taken")),
            (1.0, 0.0, 1.0)
        );
        drop((last, in_a));
        assert_eq!(b.log().requests().len(), 201);
        assert_eq!(house.lines(201 + taken).await.iter().filter(|line| line.text("pool") == "b").count(), 201);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_in_another_pool_takes_a_free_seat_there_or_is_not_made() {
    let yaml = two_pools();
    let house = House::new(&yaml);
    let (a, b) = (house.engine("e1", vec![Script::json(503, "{}")]), house.engine("e2", vec![stream_of(100, 5000)]));
    let in_b = house.chat(stream_with_usage()).await;
    assert_eq!((in_b.status.as_u16(), house.crowd()), (200, (1, 0)), "it has b's seat, and gave a's back");
    assert_eq!(in_b.headers["x-goodput-pool"], "b");
    let refused = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(refused.status, 503, "a's own answer");
    assert_eq!((a.log().requests().len(), b.log().requests().len()), (2, 1));
    drop(in_b);
    house.lines(2).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_engines_refuse_connections_waits_in_the_next_pool() {
    // Without the retry budget, which is empty: no engine has had the request yet.
    let yaml = seats(1).with("retries: {share: 0, floor_per_10s: 0}").pool("b", &["e2"]);
    let yaml = yaml.with("max_concurrency_per_engine: 1").with("retries: {share: 0, floor_per_10s: 0}");
    let house = House::new(&yaml);
    let b = house.engine("e2", vec![stream_of(100, 2000)]);
    let house = Arc::new(house);
    let all: Vec<_> = (0..3).map(|_| spawn(&house, Ask::post(CHAT, stream_with_usage()))).collect();
    house.sleep(ms(10)).await;
    let of = |pool: &str| house.gateway.pool_queues.pool_queue(&pool.into()).expect("a desk").numbers();
    assert_eq!((of("a").taken, of("b").taken, of("b").waiting), (0, 1, 2), "nobody holds a seat of a meanwhile");
    for answer in join_all(all).await {
        let answer = answer.unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("b")));
    }
    assert_eq!(b.log().requests().len(), 3);
    let lines = house.lines(3).await;
    assert!(lines.iter().all(|line| line.verdict() == "met" && line.number("attempts") == Some(2.0)));
    assert_eq!(lines[2].number("queue_ms"), Some(4000.0), "waiting there is queue time");
    let page = house.page();
    assert_eq!(page.sum("goodput_retries_total", &[("reason", "connect_failed")]), 3.0);
    assert_eq!(page.sum("goodput_spilled_total", &[]), 0.0, "no queue was too long");
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_queue_whose_only_engine_dies_waits_on_in_the_next_pool() {
    let yaml = seats(1).with("breaker: off").pool("b", &["e2"]).with("max_concurrency_per_engine: 1");
    let house = House::new(&yaml);
    let _a = house.engine("e1", vec![Script::stream().at(100).say(t("a")).at(1000).reset()]);
    let b = house.engine("e2", vec![stream_of(100, 500)]);
    let house = Arc::new(house);
    let in_a = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    let in_b = house.gateway.pool_queues.pool_queue(&"b".into()).expect("a desk").take_free_seat(&patient());
    let waiting: Vec<_> = (0..8).map(|_| spawn(&house, Ask::post(CHAT, stream_with_usage()))).collect();
    house.sleep(ms(500)).await;
    assert_eq!(house.crowd(), (2, 8));
    house.network.refuse("e1");
    house.sleep(ms(1000)).await;
    assert_eq!(house.gateway.pool_queues.pool_queue(&"b".into()).expect("a desk").numbers().waiting, 8);
    drop((in_a.await, in_b));
    for answer in join_all(waiting).await {
        let answer = answer.unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("b")));
    }
    assert_eq!(b.log().requests().len(), 8);
    house.lines(9).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn behind_a_dead_pool_a_full_queue_reports_the_connection_and_a_wait_reports_the_queue() {
    for (queue, told, verdict) in [
        ("queue: {max_waiting: 0}", (502, "connect_failed", 0), "missed(upstream_unavailable)"),
        ("queue: {max_waiting: 9}", (503, "queue_timeout", 1500), "missed(shed)"),
    ] {
        let yaml = seats(1).class("queue: {max_wait: 1500ms}").pool("b", &["e2"]);
        let house = House::new(&yaml.with("max_concurrency_per_engine: 1").with(queue));
        let _b = house.engine("e2", vec![stream_of(100, 60_000)]);
        let in_b = house.gateway.pool_queues.pool_queue(&"b".into()).expect("a desk").take_free_seat(&patient());
        let refused = house.chat(stream_with_usage()).await.whole().await;
        let reason = refused.header("x-goodput-reason").expect("a refusal of ours");
        assert_eq!((refused.status.as_u16(), reason, millis(refused.at)), told);
        assert_eq!(house.line().await.verdict(), verdict);
        drop(in_b);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_while_it_waits_behind_a_dead_pool_pays_nothing() {
    let yaml = limited("tokens_per_minute: 600").with("max_concurrency_per_engine: 1");
    let house = House::new(&yaml.pool("b", &["e2"]).with("max_concurrency_per_engine: 1"));
    let b = house.engine("e2", vec![stream_of(100, 60_000)]);
    let in_b = house.gateway.pool_queues.pool_queue(&"b".into()).expect("a desk").take_free_seat(&patient());
    let mut waiting = Box::pin(house.send(by("sk-acme", capped(500, true))));
    tokio::select! {
        _ = &mut waiting => panic!("no seat is free"),
        () = house.sleep(ms(100)) => {}
    }
    assert_eq!(house.crowd(), (1, 1));
    drop(waiting);
    assert_eq!((house.crowd(), left(&house, "tokens_per_minute")), ((1, 0), 600), "no engine was sent it");
    assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
    assert_eq!(b.log().requests().len(), 0);
    drop(in_b);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_during_connecting_pays_nothing() {
    let house = House::new(&limited("tokens_per_minute: 600"));
    house.network.silence("e1");
    let mut asked = Box::pin(house.send(by("sk-acme", capped(500, true))));
    tokio::select! {
        _ = &mut asked => panic!("nobody answers"),
        () = house.sleep(ms(100)) => {}
    }
    drop(asked);
    assert_eq!(left(&house, "tokens_per_minute"), 600);
    house.lines(1).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_would_be_late_spills_to_a_free_seat_and_traffic_returns() {
    let yaml = two_pools().promise(&[("ttft_seconds", 1.0)]);
    let house = House::new(&yaml);
    let slow = house.engine("e1", vec![stream_of(100, 4000)]);
    let other = house.engine("e2", vec![stream_of(100, 300)]);
    let house = Arc::new(house);
    let first = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    // Nothing is known of the rate: it waits half of its time, then goes.
    let moved = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!((moved.headers["x-goodput-pool"].to_str().unwrap(), moved.at), ("b", at(710)));
    first.await.unwrap();
    // The queue is over: the first pool is asked again.
    let back = house.chat(stream_with_usage()).await;
    assert_eq!(back.headers["x-goodput-pool"], "a");
    // The rate is known now, one seat in four seconds, so it spills at once.
    let at_once = house.chat(stream_with_usage()).await;
    assert_eq!((at_once.headers["x-goodput-pool"].to_str().unwrap(), at_once.at - back.at), ("b", ms(100)));
    drop((back, at_once));
    assert_eq!((slow.log().requests().len(), other.log().requests().len()), (2, 2));
    let lines = house.lines(4).await;
    assert_eq!(house.page().sum("goodput_spilled_total", &[("pool", "b")]), 2.0);
    assert!(lines.iter().filter(|line| line.text("pool") == "b").count() == 2);
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_with_a_short_longest_wait_spills_before_its_end() {
    let house = House::new(&two_pools().class("queue: {max_wait: 2s}"));
    house.engine("e1", vec![stream_of(100, 60_000)]);
    house.engine("e2", vec![stream_of(100, 300)]);
    let sitting = house.chat(stream_with_usage()).await;
    let moved = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!((moved.status.as_u16(), moved.header("x-goodput-pool")), (200, Some("b")));
    assert!(moved.at <= at(1400), "{:?}: as long again as it has waited is more than what is left", moved.at);
    drop(sitting);
    house.lines(2).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_spills_to_the_next_pool_before_it_rejects() {
    let full = seats(1).with("queue: {max_waiting: 0}").pool("b", &["e2"]);
    let nobody_waits = seats(1).class("queue: {max_wait: 0s}").pool("b", &["e2"]);
    for yaml in [full, nobody_waits] {
        let house = House::new(&yaml);
        let _a = house.engine("e1", vec![stream_of(100, 4000)]);
        let _b = house.engine("e2", vec![stream_of(100, 300)]);
        let in_a = house.chat(stream_with_usage()).await;
        let in_b = house.chat(stream_with_usage()).await;
        assert_eq!(
            (&in_a.headers["x-goodput-pool"], &in_b.headers["x-goodput-pool"]),
            (&"a".parse().unwrap(), &"b".parse().unwrap())
        );
        drop((in_a, in_b));
        house.lines(2).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_evicted_request_spills_to_the_next_pool() {
    let yaml = tenants("limits: {requests_per_minute: 1000}").promise(&[("ttft_seconds", 10.0)]);
    let yaml = yaml.with("max_concurrency_per_engine: 1").with("queue: {max_waiting: 2}").pool("b", &["e2"]);
    let house = House::new(&yaml.with("max_concurrency_per_engine: 1"));
    house.engine("e1", vec![stream_of(100, 1000)]);
    let b = house.engine("e2", vec![stream_of(100, 300)]);
    let house = Arc::new(house);
    let mut burst = Vec::new();
    for _ in 0..3 {
        burst.push(spawn(&house, by("sk-acme", stream_with_usage())));
        house.sleep(ms(10)).await;
    }
    assert_eq!((house.crowd(), b.log().requests().len()), ((1, 2), 0));
    let other = spawn(&house, by("sk-globex", stream_with_usage()));
    house.sleep(ms(10)).await;
    assert_eq!((house.crowd(), b.log().requests().len()), ((2, 2), 1));
    burst.push(other);
    assert!(join_all(burst).await.into_iter().all(|answer| answer.unwrap().status == 200));
    let spilled = house.lines(4).await.iter().filter(|line| line.text("pool") == "b").count();
    assert_eq!((spilled, house.page().sum("goodput_spilled_total", &[])), (1, 1.0));
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_pool_spilled_to_is_not_the_clients_fault() {
    let yaml = seats(1).with("queue: {max_waiting: 0}").pool("b", &["e2"]);
    let house = House::new(&yaml);
    let _a = house.engine("e1", vec![stream_of(100, 4000)]);
    let b = house.engine("e2", vec![crate::retries::status(404)]);
    let in_a = house.chat(stream_with_usage()).await;
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (503, Some("queue_timeout")));
    assert_eq!(b.log().requests().len(), 1);
    drop(in_a);
    let lines = house.lines(2).await;
    assert!(lines.iter().any(|line| line.verdict() == "missed(shed)"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn requests_waiting_in_a_pool_that_goes_down_are_served_by_the_next_one_even_if_full() {
    for promise in [10.0, 0.2] {
        let yaml = seats(1).promise(&[("ttft_seconds", promise)]).with("health: {every: 1s, timeout: 500ms}");
        let house = House::new(&yaml.pool("b", &["e2"]).with("max_concurrency_per_engine: 1"));
        let _a = house.engine("e1", vec![stream_of(100, 60_000)]);
        let b = house.engine("e2", vec![stream_of(100, 5000)]);
        let probes = house.probe();
        house.sleep(ms(1500)).await;
        let house = Arc::new(house);
        let in_a = house.chat(stream_with_usage()).await;
        assert_eq!(in_a.headers["x-goodput-pool"], "a");
        let waiting: Vec<_> = (0..4).map(|_| spawn(&house, Ask::post(CHAT, stream_with_usage()))).collect();
        house.sleep(ms(10)).await;
        house.network.silence("e1");
        house.sleep(ms(4500)).await;
        let waiting_in =
            |pool: &str| house.gateway.pool_queues.pool_queue(&pool.into()).expect("a desk").numbers().waiting;
        assert_eq!((waiting_in("a"), waiting_in("b")), (0, 3));
        for answer in join_all(waiting).await {
            let answer = answer.unwrap();
            assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("b")));
        }
        assert_eq!(b.log().requests().iter().filter(|asked| asked.target == CHAT).count(), 4);
        drop((in_a, probes));
        house.lines(5).await;
        ended(house).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_seated_in_a_pool_that_just_died_waits_in_the_next_one() {
    let yaml = seats(1).with("breaker: {faults: 1, within: 60s, open: 60s}").pool("b", &["e2"]);
    let house = House::new(&yaml.with("max_concurrency_per_engine: 1"));
    let breaks = Script::stream().at(100).say(t("a")).at(1850).reset();
    let (a, _b) = (house.engine("e1", vec![breaks]), house.engine("e2", vec![stream_of(100, 3000)]));
    let house = Arc::new(house);
    let in_a = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    let in_b = house.gateway.pool_queues.pool_queue(&"b".into()).expect("a desk").take_free_seat(&patient());
    let waiting = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(2000)).await;
    assert_eq!((house.states("a"), in_b.is_some()), (vec!["breaker_open"], true));
    drop((in_a.await, in_b));
    let answer = waiting.await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("b")));
    assert_eq!(a.log().requests().len(), 1);
    house.lines(2).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_spills_to_a_queue_without_a_measured_rate() {
    let house =
        House::new(&seats(1).with("queue: {max_waiting: 0}").pool("b", &["e2"]).with("max_concurrency_per_engine: 1"));
    let _a = house.engine("e1", vec![stream_of(100, 4000)]);
    let _b = house.engine("e2", vec![stream_of(100, 1000)]);
    let house = Arc::new(house);
    let all: Vec<_> = (0..3).map(|_| spawn(&house, Ask::post(CHAT, stream_with_usage()))).collect();
    let mut pools = Vec::new();
    for answer in join_all(all).await {
        pools.push(answer.unwrap().header("x-goodput-pool").map(str::to_owned));
    }
    assert_eq!(pools, ["a", "b", "b"].map(|pool| Some(pool.to_owned())));
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn without_an_available_engine_requests_do_not_wait_in_vain() {
    let yaml = seats(1).class("queue: {max_wait: 100s}").with("health: {every: 1s, timeout: 500ms}");
    let house = Arc::new(House::new(&yaml));
    let refused = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    let others: Vec<_> = (0..20).map(|_| spawn(&house, Ask::post(CHAT, stream_with_usage()))).collect();
    assert_eq!(refused.await.unwrap().header("x-goodput-reason"), Some("connect_failed"));
    for other in join_all(others).await {
        let other = other.unwrap();
        assert!(other.status.is_server_error());
        assert!(other.at < at(100), "{:?}", other.at);
    }
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_returning_engine_is_noticed_while_all_requests_wait() {
    let yaml = seats(1).engines_of_first(&["e1", "e2"]).with("health: {every: 1s, timeout: 500ms}");
    let house = House::new(&yaml);
    let _one = house.engine("e1", vec![Script::stream().at(100).say(t("a")).silence()]);
    let probes = house.probe();
    house.sleep(ms(2500)).await;
    let house = Arc::new(house);
    let sitting = house.chat(stream_with_usage()).await;
    let waiting = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(2000)).await;
    assert_eq!(house.crowd(), (1, 1));
    let healthy = ScriptedEngine::new(house.clock, |request| match request.target.as_str() {
        "/v1/chat/completions" => stream_of(100, 300),
        _ => Script::json(200, "{}"),
    });
    house.network.engine("e2", &healthy);
    let answer = waiting.await.unwrap();
    assert_eq!(answer.status, 200);
    assert!(answer.at < at(9000), "{:?}", answer.at);
    drop((sitting, probes));
    house.lines(2).await;
    ended(house).await;
}

// --- reload while requests wait ---

#[tokio::test(start_paused = true)]
async fn a_removed_pool_serves_its_waiting_requests() {
    let (house, engine) = House::playing_with(&two_pools(), stream_of(100, 1000));
    let other = house.engine("e2", vec![stream_of(100, 200)]);
    let house = Arc::new(house);
    let sitting = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    let waiting = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    house.reload(&Yaml::default().no_pools().pool("b", &["e2"]));
    let new = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!((new.header("x-goodput-pool"), new.at), (Some("b"), at(120)));
    assert_eq!(sitting.await.unwrap().status, 200);
    assert_eq!((waiting.await.unwrap().header("x-goodput-pool"), engine.log().requests().len()), (Some("a"), 2));
    assert_eq!(other.log().requests().len(), 1);
    house.lines(3).await;
    house.gateway.report_seats();
    assert_eq!(house.page().count("goodput_seats", &[("pool", "a")]), 0, "nobody is left");
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_removed_tenants_running_requests_are_served_to_their_end() {
    let yaml =
        limited("tokens_per_minute: 9000").promise(&[("ttft_seconds", 10.0)]).with("max_concurrency_per_engine: 1");
    let (house, _engine) = House::playing_with(&yaml, stream_of(100, 1000));
    let house = Arc::new(house);
    let all: Vec<_> = (0..2).map(|_| spawn(&house, by("sk-acme", stream_with_usage()))).collect();
    house.sleep(ms(10)).await;
    assert_eq!(house.crowd(), (1, 1));
    house.reload(&seats(1));
    for answer in join_all(all).await {
        let answer = answer.unwrap();
        assert_eq!((answer.status.as_u16(), answer.events().last().map(String::as_str)), (200, Some("[DONE]")));
    }
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_removed_class_still_serves_its_waiting_requests() {
    let yaml = seats(1).and_class("  - {slo_class: gone, objectives: {ttft_seconds: {threshold: 20, attainment: 0.9}}, joint_attainment_target: 0.9, window: 28d, queue: {max_wait: 5s}}")
        .top("classify: [{class: gone, when: {header: {x-slo-class: gone}}}]");
    let (house, _engine) = House::playing_with(&yaml, stream_of(100, 3000));
    let house = Arc::new(house);
    let sitting = spawn(&house, Ask::post(CHAT, stream_with_usage()));
    house.sleep(ms(10)).await;
    let waiting = spawn(&house, Ask::post(CHAT, stream_with_usage()).header("x-slo-class", "gone"));
    house.sleep(ms(10)).await;
    house.reload(&seats(2));
    let answer = waiting.await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.header("x-slo-class"), answer.at), (200, Some("gone"), at(120)));
    sitting.await.unwrap();
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn removing_the_concurrency_limit_admits_all_waiting_requests() {
    let (house, engine) = House::playing_with(&seats(1), stream_of(100, 3000));
    let house = Arc::new(house);
    let all: Vec<_> = (0..5).map(|_| spawn(&house, Ask::post(CHAT, stream_with_usage()))).collect();
    house.sleep(ms(10)).await;
    assert_eq!(house.crowd(), (1, 4));
    house.reload(&Yaml::default());
    house.sleep(ms(10)).await;
    assert_eq!((house.crowd(), engine.log().requests().len()), ((5, 0), 5));
    for answer in join_all(all).await {
        assert_eq!(answer.unwrap().status, 200);
    }
    ended(house).await;
}

// --- C73 ---

#[tokio::test(start_paused = true)]
async fn c73_under_overload_a_low_class_starts_within_its_bound_or_is_rejected() {
    let low = "  - {slo_class: low, priority: low, objectives: {e2e_seconds: {threshold: 60, attainment: 0.9}}, joint_attainment_target: 0.9, window: 28d, queue: {max_wait: 8s}}";
    let yaml = Yaml::default()
        .promise(&[("ttft_seconds", 2.0)])
        .class("priority: high")
        .and_class(low)
        .top("classify: [{class: low, when: {header: {x-slo-class: low}}}]")
        .with("max_concurrency_per_engine: 2")
        .with("queue: {shares: {low: 0.1}}");
    // 500 ms each, two at a time: four a second. Five a second come for ten seconds.
    let (house, _engine) = House::playing_with(&yaml, stream_of(100, 500));
    let house = Arc::new(house);
    let mut tasks = Vec::new();
    for number in 0..50_u64 {
        tasks.push(spawn(&house, Ask::post(CHAT, stream_with_usage())));
        if number % 10 == 5 {
            let ask = Ask::post(CHAT, stream_with_usage()).header("x-slo-class", "low");
            tasks.push(spawn(&house, ask));
        }
        house.sleep(ms(200)).await;
    }
    join_all(tasks).await;
    let lines = house.lines(55).await;
    let low: Vec<&Line> = lines.iter().filter(|line| line.text("class") == "low").collect();
    assert_eq!(low.len(), 5);
    // One in ten, and five more, of 500 ms on two seats; counted from when it was first in line.
    let bound = 250.0 * (10.0 + 5.0) + 250.0;
    let (mut stood_first, mut ran) = (0.0_f64, 0);
    for (line, arrival) in low.iter().zip([1000.0, 3000.0, 5000.0, 7000.0, 9000.0]) {
        let Some(waited) = line.number("queue_ms") else {
            assert_eq!((line.verdict(), line.number("status")), ("missed(shed)".into(), Some(503.0)));
            continue;
        };
        let seated = arrival + waited;
        assert!(seated - stood_first.max(arrival) <= bound, "{seated} after {stood_first}");
        (stood_first, ran) = (seated, ran + 1);
    }
    assert!(ran >= 3, "{ran} of it ran");
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn c73_one_tenants_burst_does_not_hold_all_places_of_a_priority() {
    let yaml = tenants("limits: {requests_per_minute: 1000}")
        .promise(&[("ttft_seconds", 100.0)])
        .with("max_concurrency_per_engine: 1")
        .with("queue: {max_waiting: 10, quantum: 8}");
    let (house, _engine) = House::playing_with(&yaml, stream_of(100, 1000));
    let house = Arc::new(house);
    let burst: Vec<_> = (0..11).map(|_| spawn(&house, by("sk-acme", stream_with_usage()))).collect();
    house.sleep(ms(10)).await;
    assert_eq!(house.crowd(), (1, 10));
    let other = house.send(by("sk-globex", stream_with_usage())).await;
    assert_eq!(other.status, 200);
    assert!(other.at <= at(2100), "{:?}: before most of those that came earlier", other.at);
    drop(other);
    let burst: Vec<Whole> = join_all(burst).await.into_iter().map(Result::unwrap).collect();
    let pushed: Vec<_> =
        burst.iter().filter(|answer| answer.header("x-goodput-reason") == Some("pushed_out")).collect();
    assert_eq!((pushed.len(), pushed[0].status.as_u16()), (1, 503));
    house.lines(12).await;
    ended(house).await;
}

// --- laws, over random histories ---

/// Behaviour of an engine.
fn scripts() -> Vec<Script> {
    let tokens = |count: u64| (1..=count).fold(Script::stream().say(r()), |script, n| script.at(15 * n).say(t("a")));
    vec![
        tokens(5).say(f("stop")).say(u(10, 5)).say(d()).end(),
        tokens(20).say(f("length")).say(u(10, 40)).say(d()).end(),
        tokens(2).reset(),
        tokens(3).silence(),
        Script::new().silence(),
        Script::new().at(30).reset(),
        Script::json(500, "{}"),
        Script::answer(429, &[("retry-after", "1")], "{}"),
        Script::json(400, "{}"),
        tokens(0).at(20).say(error("no", 503)).say(d()).end(),
    ]
}

#[derive(Clone, Debug)]
struct Guest {
    comes: u64,
    of_acme: bool,
    cap: Option<u64>,
    /// Reads to the end, or leaves this long after the request.
    patience: Option<u64>,
}

fn any_guest() -> impl Strategy<Value = Guest> {
    let cap = prop::option::of(prop_oneof![1..300_u64, Just(100_000)]);
    (0..1500_u64, any::<bool>(), cap, prop::option::of(0..900_u64)).prop_map(|(comes, of_acme, cap, patience)| Guest {
        comes,
        of_acme,
        cap,
        patience,
    })
}

async fn visit(house: Arc<House>, guest: Guest) {
    house.sleep(ms(guest.comes)).await;
    let mut body = capped(guest.cap.unwrap_or(1), true);
    body["stream_options"] = json!({"include_usage": true});
    if guest.cap.is_none() {
        body.as_object_mut().expect("an object").remove("max_tokens");
    }
    let asked = async { house.send(by(if guest.of_acme { "sk-acme" } else { "sk-globex" }, body)).await.whole().await };
    match guest.patience {
        None => drop(asked.await),
        Some(patience) => tokio::select! {
            biased;
            _ = asked => {}
            () = house.sleep(ms(patience)) => {}
        },
    }
}

fn was_cut(line: &Line) -> bool {
    line.has_left() || line.verdict().contains("timeout")
}

/// Least and most charge of a request of `acme`, by its access line.
fn charged(line: &Line) -> (u64, u64) {
    match line.tokens() {
        (Some(input), output) => (input + output.unwrap_or_default(), input + output.unwrap_or_default()),
        // It left, or timed out, during prefill: ten tokens, or eleven if the learned bytes per token are
        // slightly below the truth.
        _ if was_cut(line) && line.number("attempts") > Some(0.0) => (10, 11),
        _ => (0, 0),
    }
}

/// Bucket of `acme`; hardly anything flows back during the test.
const MOST: u64 = 9000;

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// For any requests and any ends, with changing seats and pools: no seat, place or reservation is left,
    /// each request ends once, and the balance agrees with the access lines.
    #[test]
    fn nothing_leaks_and_every_token_is_accounted_for(
        guests in prop::collection::vec(any_guest(), 1..40),
        plays in prop::collection::vec(0..10_usize, 1..12),
        seats in 1..4_usize,
        reloads in prop::collection::vec((0..600_u64, prop::option::of(1..4_usize), any::<bool>()), 0..4),
        demotes in any::<bool>(),
        when_hopeless in prop::sample::select(vec!["demote", "shed", "serve"]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let over = if demotes { "demote" } else { "reject" };
            let yaml = |seats: Option<usize>, with_b: bool| {
                let limits = format!("tokens_per_minute: 1, tokens_burst: {MOST}, concurrent_requests: 6");
                let yaml = tenants(&format!("limits: {{{limits}}}, when_over_limit: {over}"))
                    .class("timeouts: {first_token: 700ms, idle: 300ms, total: 3s}")
                    .class(&format!("queue: {{max_wait: 400ms, when_hopeless: {when_hopeless}}}"))
                    .engines_of_first(&["e1", "e2"]);
                let yaml = match seats {
                    Some(seats) => {
                        let seats = format!("max_concurrency_per_engine: {seats}");
                        yaml.with(&seats).with("queue: {max_waiting: 5}")
                    }
                    None => yaml,
                };
                if with_b { yaml.pool("b", &["e3"]).with("max_concurrency_per_engine: 1") } else { yaml }
            };
            let house = House::new(&yaml(Some(seats), true));
            let all = Arc::new(scripts());
            let plays = Arc::new(plays);
            for host in ["e1", "e2", "e3"] {
                let (all, plays) = (Arc::clone(&all), Arc::clone(&plays));
                let engine = ScriptedEngine::new(house.clock, move |request| {
                    all[plays[request.number % plays.len()]].clone()
                });
                house.network.engine(host, &engine);
            }
            let (house, count) = (Arc::new(house), guests.len());
            let changes = async {
                for (after, seats, with_b) in reloads {
                    house.sleep(ms(after)).await;
                    house.reload(&yaml(seats, with_b));
                }
            };
            tokio::join!(changes, join_all(guests.into_iter().map(|guest| visit(Arc::clone(&house), guest))));
            let lines = house.lines(count).await;
            let of_acme = lines.iter().filter(|line| line.text("tenant") == "acme" && line.verdict() != "excluded(rate_limited)");
            let (least, most) = of_acme.map(charged).fold((0, 0), |(a, b), (least, most)| (a + least, b + most));
            let spent = MOST - left(&house, "tokens_per_minute");
            assert!((least..=most).contains(&spent), "{spent} is gone, {least} to {most} were used");
            ended(house).await;
        });
    }
}

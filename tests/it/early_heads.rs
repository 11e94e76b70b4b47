//! Early heads: the client's view of a request that waits in a queue longer than `hold_head`, and its record.

use std::sync::Arc;

use crate::support::scripted_engine::{Script, event, fixtures::*};
use goodput::admit::pool_queue::Seat;
use goodput::types::{ClientState, DisconnectReason};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::*;

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];
const KEEPALIVE: &str = ": keepalive\n\n";

/// One seat; heads are held for 200 ms, comments come every 200 ms.
fn kept() -> Yaml {
    Yaml::default()
        .promise(&[("ttft_seconds", 10.0)])
        .class("hold_head: 200ms")
        .class("keepalive_seconds: 0.2")
        .with("max_concurrency_per_engine: 1")
        .with("breaker: off")
}

/// A stream of one token at `first`, that ends at `end`.
fn stream_of(first: u64, end: u64) -> Script {
    Script::stream().at(first).say(t("a")).at(end).say(f("stop")).say(u(10, 1)).say(d()).end()
}

fn words() -> String {
    [event(&t("a")), event(&f("stop")), event(&u(10, 1)), event(&d())].concat()
}

fn spawn(house: &Arc<House>, ask: Ask) -> JoinHandle<Whole> {
    let house = Arc::clone(house);
    tokio::spawn(async move { house.send(ask).await.whole().await })
}

fn ask() -> Ask {
    Ask::post(CHAT, stream_with_usage())
}

async fn ended(house: Arc<House>) {
    Arc::into_inner(house).expect("all tasks have ended").end().await;
}

/// A gateway whose only seat is taken until the returned value is dropped.
fn full(yaml: &Yaml, script: Script) -> (House, Seat) {
    let house = House::new(yaml);
    house.engine("e1", vec![script]);
    let seat = take_the_seat(&house, "a");
    (house, seat)
}

fn take_the_seat(house: &House, pool: &str) -> Seat {
    let pool_queue = house.gateway.pool_queues.pool_queue(&pool.into()).expect("a desk");
    pool_queue.take_free_seat(&crate::admission::patient()).expect("a free seat")
}

#[tokio::test(start_paused = true)]
async fn a_request_waiting_longer_than_hold_head_gets_an_early_head_and_comments() {
    let (house, _engine) = House::playing_with(&kept(), stream_of(100, 1000));
    let house = Arc::new(house);
    let sitting = spawn(&house, ask());
    house.sleep(ms(10)).await;
    let answer = spawn(&house, ask().header("x-request-id", "req-7")).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.at), (200, at(210)));
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!((answer.header("x-accel-buffering"), answer.header("x-slo-class")), (Some("no"), Some("chat")));
    assert_eq!(answer.header("x-request-id"), Some("req-7"));
    for later in ["x-goodput-pool", "server-timing", "x-goodput-reason", "content-length"] {
        assert_eq!(answer.header(later), None, "{later} is not known yet");
    }
    // It is called to its seat at 1000; the comments go on in their time.
    assert_eq!(answer.moments(), [210, 410, 610, 810, 1010, 1100, 2000]);
    assert_eq!(answer.text(), [KEEPALIVE.repeat(5), words()].concat());
    sitting.await.unwrap();
    let lines = house.lines(2).await;
    let line = lines.iter().find(|line| line.text("request_id") == "req-7").expect("its line");
    assert_eq!((line.verdict(), line.ttft(), line.number("queue_ms")), ("met".into(), Some(1090.0), Some(990.0)));
    assert_eq!((line.number("status"), line.number("attempts"), line.text("pool")), (Some(200.0), Some(1.0), "a"));
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn an_early_head_needs_a_stream_keepalive_and_hold_head() {
    let without = Yaml::default().promise(&[("ttft_seconds", 10.0)]).class("hold_head: 200ms");
    let without = without.with("max_concurrency_per_engine: 1");
    let whole = Script::new().at(100).reply(200, JSON, whole("x", 1, 1));
    for (yaml, free_at, script, body) in [
        (without, 1000, stream_of(100, 200), stream_with_usage()),
        (kept(), 1000, whole, unary()),
        (kept(), 90, stream_of(100, 200), stream_with_usage()),
        (kept(), 199, stream_of(0, 200), stream_with_usage()),
    ] {
        let (house, seat) = full(&yaml, script);
        let house = Arc::new(house);
        let waiting = spawn(&house, Ask::post(CHAT, body));
        house.sleep(ms(free_at)).await;
        drop(seat);
        let answer = waiting.await.unwrap();
        assert!(!answer.text().contains("keepalive"), "{}", answer.text());
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("a")));
        assert!(answer.at >= at(free_at), "{:?}", answer.at);
        house.line().await;
        ended(house).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_rejection_of_the_queue_after_an_early_head_is_an_event_of_the_dialect() {
    let chat = stream_with_usage();
    let completions = json!({"model": "m1", "stream": true, "prompt": "hi"});
    let messages = json!({"model": "m1", "stream": true, "max_tokens": 9, "messages": []});
    let responses = json!({"model": "m1", "stream": true, "input": "hi"});
    for (path, body, name, code) in [
        (CHAT, chat, "data: ", "/error/code"),
        ("/v1/completions", completions, "data: ", "/error/code"),
        ("/v1/messages", messages, "event: error\ndata: ", "/error/code"),
        ("/v1/responses/", responses, "event: error\ndata: ", "/code"),
    ] {
        let (house, seat) = full(&kept().class("queue: {max_wait: 500ms}"), stream_of(100, 200));
        let answer = house.send(Ask::post(path, body).header("x-request-id", "req-7")).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.at, answer.end), (200, at(200), at(500)));
        assert!(!answer.is_cut && answer.header("retry-after").is_none());
        let text = answer.text();
        let error = text.strip_prefix(&[&KEEPALIVE.repeat(2), name].concat()).expect("comments, then the error");
        let error: Value = serde_json::from_str(error.strip_suffix("\n\n").expect("a whole event")).unwrap();
        assert_eq!((error.pointer(code), error.to_string().contains("req-7")), (Some(&json!("queue_timeout")), true));
        let line = house.line().await;
        assert_eq!((line.verdict(), line.text("refusal")), ("missed(shed)".into(), "queue_timeout"));
        assert_eq!((line.number("status"), line.number("queue_ms")), (Some(200.0), None), "what the client has seen");
        assert_eq!(house.page().sum("goodput_refused_total", &[("code", "queue_timeout")]), 1.0);
        drop(seat);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_eviction_after_an_early_head_is_an_event() {
    let low = "  - {slo_class: low, priority: low, objectives: {ttft_seconds: {threshold: 20, attainment: 0.9}}, joint_attainment_target: 0.9, window: 28d, hold_head: 200ms, keepalive_seconds: 1}";
    let yaml = kept().and_class(low).top("classify: [{class: low, when: {header: {x-slo-class: low}}}]");
    let (house, seat) = full(&yaml.with("queue: {max_waiting: 1}"), stream_of(100, 200));
    let house = Arc::new(house);
    let pushed = spawn(&house, ask().header("x-slo-class", "low"));
    house.sleep(ms(300)).await;
    let other = spawn(&house, ask());
    let pushed = pushed.await.unwrap();
    assert_eq!((pushed.status.as_u16(), pushed.end), (200, at(300)));
    assert!(pushed.events().pop().expect("an event").contains("\"pushed_out\""));
    drop(seat);
    assert_eq!(other.await.unwrap().status, 200);
    house.lines(2).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn the_drain_limit_after_an_early_head_is_an_event() {
    let (house, seat) = full(&kept(), stream_of(100, 200));
    let client = ClientState::default();
    let mut reply = house.send(ask().client(&client)).await;
    reply.frames(2).await;
    house.gateway.begin_drain();
    client.end_drain();
    let rest = reply.whole().await;
    assert!(rest.events().pop().expect("an event").contains("\"draining\""));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.number("status")), ("missed(shed)".into(), Some(200.0)));
    drop(seat);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_after_an_early_head_leaves_the_queue_and_pays_nothing() {
    let top = format!(
        "tenants: [{{tenant: acme, keys: [{{label: a, blake3: \"{}\"}}], limits: {{tokens_per_minute: 6000, concurrent_requests: 1}}}}]",
        blake3::hash(b"sk-acme").to_hex()
    );
    for (patience, verdict) in [(3000, "excluded(client_cancel)"), (10_001, "missed(canceled_late)")] {
        let (house, seat) = full(&kept().top(&top), stream_of(100, 200));
        let mut reply = house.send(ask().header("authorization", "Bearer sk-acme")).await;
        assert_eq!((reply.status.as_u16(), house.crowd()), (200, (1, 1)));
        tokio::select! {
            _ = reply.frames(usize::MAX) => panic!("no seat is free"),
            () = house.sleep(ms(patience - 200)) => {}
        }
        drop(reply);
        assert_eq!(house.crowd(), (1, 0));
        let line = house.line().await;
        assert_eq!((line.verdict(), line.number("status")), (verdict.into(), Some(200.0)));
        assert_eq!(house.page().sum("goodput_cancel_seconds_count", &[]), 1.0);
        drop(seat);
        assert_eq!(house.network.dials("e1"), 0);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_after_an_early_head_is_at_fault() {
    for (since, cut, verdict) in [
        (300, 2000, "excluded(client_limited)"),
        // Its first token was due at 10,000, so the wait is the service's, whether the client reads or not.
        (300, 10_500, "missed(ttft)"),
    ] {
        let (house, seat) = full(&kept(), stream_of(100, 200));
        let client = ClientState::default();
        let mut reply = house.send(ask().client(&client)).await;
        reply.frames(1).await;
        client.refuses(at(since));
        house.sleep(ms(cut)).await;
        client.sever(DisconnectReason::WriteStall);
        drop(reply);
        assert_eq!((house.line().await.verdict(), house.crowd()), (verdict.into(), (1, 0)));
        drop(seat);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn engine_failures_after_an_early_head_are_events_without_retries() {
    let coded: &[(&str, &str)] = &[("content-type", "text/event-stream"), ("content-encoding", "gzip")];
    let cases = [
        (Some(Script::new().at(50).reply(503, JSON, "{}")), "engine_answered", "missed(upstream_overload)"),
        (Some(Script::new().at(50).reply(500, JSON, "{}")), "engine_answered", "missed(upstream_error)"),
        (Some(Script::new().at(50).reply(400, JSON, "{}")), "engine_answered", "excluded(invalid_request)"),
        (Some(Script::new().at(50).reply(200, coded, "zzz")), "engine_coded", "missed(unparseable)"),
        (Some(Script::new().at(50).reset()), "engine_reset", "missed(upstream_unavailable)"),
        (Some(Script::stream().at(50).say(r()).reset()), "stream_incomplete", "missed(truncated)"),
        (Some(Script::new().silence()), "first_token_timeout", "missed(timeout_first_token)"),
        (None, "connect_failed", "missed(upstream_unavailable)"),
    ];
    for (script, code, verdict) in cases {
        let yaml = kept().promise(&[("ttft_seconds", 4.0)]).class("timeouts: {first_token: 5s}").pool("b", &["e2"]);
        let house = House::new(&yaml.with("max_concurrency_per_engine: 1"));
        let engine = script.map(|script| house.engine("e1", vec![script]));
        let other = house.engine("e2", vec![stream_of(0, 0)]);
        let (seat, in_b) = (take_the_seat(&house, "a"), take_the_seat(&house, "b"));
        let house = Arc::new(house);
        let waiting = spawn(&house, ask());
        house.sleep(ms(500)).await;
        drop((seat, in_b));
        let answer = waiting.await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.at, answer.is_cut), (200, at(200), false));
        let error: Value = serde_json::from_str(&answer.events().pop().unwrap()).unwrap();
        assert_eq!(error["error"]["code"], code);
        let line = house.line().await;
        assert_eq!(
            (line.verdict(), line.number("attempts"), line.number("status")),
            (verdict.into(), Some(1.0), Some(200.0))
        );
        assert_eq!(engine.map_or(0, |engine| engine.log().requests().len()), usize::from(code != "connect_failed"));
        assert_eq!(other.log().requests().len(), 0);
        ended(house).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_in_band_error_after_an_early_head_is_judged_by_its_code() {
    for (code, verdict) in [(503, "missed(upstream_overload)"), (400, "excluded(invalid_request)")] {
        let script = Script::stream().at(50).say(r()).say(error("own words", code)).say(d()).end();
        let (house, seat) = full(&kept(), script);
        let house = Arc::new(house);
        let waiting = spawn(&house, ask());
        house.sleep(ms(500)).await;
        drop(seat);
        let answer = waiting.await.unwrap();
        assert!(answer.text().ends_with(&[event(&r()), event(&error("own words", code)), event(&d())].concat()));
        assert_eq!(house.line().await.verdict(), verdict);
        ended(house).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stale_connection_does_not_fail_a_request_after_an_early_head() {
    // Every connection serves one request and closes when the second comes.
    let house = House::new(&kept());
    let engine =
        crate::support::scripted_engine::ScriptedEngine::new(house.clock, |request| match request.on_connection {
            0 => stream_of(10, 20),
            _ => Script::new().close(),
        });
    house.network.engine("e1", &engine);
    house.send(ask()).await.whole().await;
    let seat = take_the_seat(&house, "a");
    let house = Arc::new(house);
    let waiting = spawn(&house, ask());
    house.sleep(ms(500)).await;
    drop(seat);
    let answer = waiting.await.unwrap();
    assert!(answer.text().ends_with(&words()), "{}", answer.text());
    house.lines(2).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn after_an_early_head_only_accepted_injections_are_used() {
    let house = House::new(&kept());
    let engine = house.engine("e1", vec![stream_of(10, 20)]);
    let house = Arc::new(house);
    for _ in 0..2 {
        let seat = take_the_seat(&house, "a");
        let waiting = spawn(&house, Ask::post(CHAT, stream()));
        house.sleep(ms(500)).await;
        drop(seat);
        assert_eq!(waiting.await.unwrap().at.as_nanos() % 1_000_000_000, at(200).as_nanos());
        // One that did not wait: now the engine has shown it.
        house.chat(stream()).await.whole().await;
        house.sleep(ms(1000) - ms(house.clock.now().as_nanos() / 1_000_000 % 1000)).await;
    }
    let injected = engine.log().requests().into_iter().map(|request| {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        body["stream_options"].is_object()
    });
    assert_eq!(injected.collect::<Vec<_>>(), [false, true, true, true]);
    house.lines(4).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_at_any_moment_leaves_nothing_behind() {
    // It is called at 700 and hears its first token at 800, its last at 1000.
    for moment in (10..1100).step_by(30) {
        let (house, seat) = full(&kept(), stream_of(100, 300));
        let house = Arc::new(house);
        let waiting = {
            let house = Arc::clone(&house);
            tokio::spawn(async move {
                tokio::time::timeout(ms(moment), async { house.send(ask()).await.whole().await }).await.is_ok()
            })
        };
        house.sleep(ms(700)).await;
        drop(seat);
        let stayed = waiting.await.unwrap();
        let verdict = if stayed { "met" } else { "excluded(client_cancel)" };
        assert_eq!((house.line().await.verdict(), house.crowd()), (verdict.into(), (0, 0)), "left at {moment}");
        ended(house).await;
    }
}

#[tokio::test(start_paused = true)]
async fn after_an_early_head_a_request_still_spills_to_the_next_pool() {
    let yaml = kept().promise(&[("ttft_seconds", 1.0)]).pool("b", &["e2"]);
    let house = House::new(&yaml.with("max_concurrency_per_engine: 1"));
    house.engine("e1", vec![stream_of(100, 200)]);
    house.engine("e2", vec![stream_of(100, 200)]);
    let (in_a, in_b) = (take_the_seat(&house, "a"), take_the_seat(&house, "b"));
    let house = Arc::new(house);
    let waiting = spawn(&house, ask());
    house.sleep(ms(550)).await;
    drop(in_b);
    let answer = waiting.await.unwrap();
    assert!(answer.at == at(200) && answer.text().ends_with(&words()), "{}", answer.text());
    let line = house.line().await;
    assert_eq!((line.verdict(), line.text("pool")), ("met".into(), "b"));
    drop(in_a);
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn comments_are_sent_while_waiting_behind_an_unreachable_pool() {
    let yaml = kept().pool("b", &["e2"]).with("max_concurrency_per_engine: 1");
    let house = House::new(&yaml);
    house.engine("e2", vec![stream_of(100, 200)]);
    let in_b = take_the_seat(&house, "b");
    let house = Arc::new(house);
    let waiting = spawn(&house, ask());
    house.sleep(ms(450)).await;
    drop(in_b);
    let answer = waiting.await.unwrap();
    assert_eq!((answer.at, answer.text()), (at(200), [KEEPALIVE.repeat(2), words()].concat()));
    assert_eq!(house.line().await.verdict(), "met");
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn over_http1_and_http2_comments_are_sent_and_a_hang_up_leaves_the_queue() {
    let (house, seat) = full(&kept(), stream_of(100, 300));
    let mut client = house.connect(64 * 1024);
    client.post(CHAT, &stream_with_usage()).await;
    let (seen, when) = client.read_until("keepalive").await;
    assert!(seen.starts_with("HTTP/1.1 200 ") && seen.contains("chunked") && when == at(200), "{seen} {when:?}");
    let mut h2 = house.connect_h2().await;
    let mut answer = h2.send_request(h2_post(CHAT, &stream_with_usage())).await.expect("a head");
    assert_eq!((answer.status().as_u16(), house.clock.now()), (200, at(400)));
    for moment in [400, 600, 800] {
        assert_eq!(h2_next(&mut answer).await.as_deref(), Some(KEEPALIVE.as_bytes()));
        assert_eq!(house.clock.now(), at(moment));
    }
    assert_eq!(house.crowd(), (1, 2));
    drop(client);
    house.sleep(ms(1)).await;
    assert_eq!(house.crowd(), (1, 1));
    drop(seat);
    let mut rest = Vec::new();
    while let Some(bytes) = h2_next(&mut answer).await {
        rest.extend_from_slice(&bytes);
    }
    assert_eq!(String::from_utf8_lossy(&rest), words());
    let mut h2_again = h2;
    let seat = take_the_seat(&house, "a");
    let answer = h2_again.send_request(h2_post(CHAT, &stream_with_usage())).await.expect("a head");
    assert_eq!(house.crowd(), (1, 1));
    drop(answer);
    house.sleep(ms(1)).await;
    assert_eq!(house.crowd(), (1, 0));
    drop(seat);
    house.lines(3).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_keeps_its_window_shut_holds_no_seat_longer_than_its_engine_works() {
    let (house, seat) = full(&kept(), stream_of(100, 300));
    let mut shut = house.connect_h2_with_window(0).await;
    let mut untaken = Vec::new();
    for _ in 0..2 {
        untaken.push(shut.send_request(h2_post(CHAT, &stream_with_usage())).await.expect("a head"));
    }
    let house = Arc::new(house);
    let honest = spawn(&house, ask());
    house.sleep(ms(600)).await;
    assert_eq!(house.crowd(), (1, 3));
    drop(seat);
    let honest = honest.await.unwrap();
    assert_eq!(honest.end, at(1000 + 3 * 300), "behind the two, who took their turn");
    assert_eq!(house.crowd(), (0, 0));
    let lines = house.lines(3).await;
    let verdicts: Vec<_> = lines.iter().map(Line::verdict).collect();
    assert_eq!(verdicts, ["excluded(client_limited)", "excluded(client_limited)", "met"]);
    assert!(lines.iter().all(|line| line.number("attempts") == Some(1.0)));
    drop((shut, untaken));
    house.sleep(ms(1)).await;
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn a_reset_behind_a_shut_window_leaves_the_queue_and_the_engine_at_once() {
    for (is_freed, crowd) in [(false, (1, 0)), (true, (0, 0))] {
        let house = House::new(&kept());
        let engine = house.engine("e1", vec![Script::new().silence()]);
        let mut seat = Some(take_the_seat(&house, "a"));
        let mut shut = house.connect_h2_with_window(0).await;
        let answer = shut.send_request(h2_post(CHAT, &stream_with_usage())).await.expect("a head");
        house.sleep(ms(300)).await;
        if is_freed {
            seat = None;
        }
        house.sleep(ms(300)).await;
        let asked = engine.log().requests().len();
        assert_eq!((asked, house.clock.now()), (usize::from(is_freed), at(800)));
        drop(answer);
        house.sleep(ms(1)).await;
        assert_eq!(house.crowd(), crowd);
        if is_freed {
            assert_eq!(engine.log().closed(0).await, at(800));
        }
        assert_eq!(house.line().await.verdict(), "excluded(client_limited)");
        drop((seat, shut));
        house.end().await;
    }
}

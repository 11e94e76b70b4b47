//! Retries and failover through the whole gateway: the table of the semantics row by row, and
//! the cases of `docs/cases.md`.

use std::time::Duration;

use crate::support::scripted_engine::{Script, ScriptedEngine, event, fixtures::*};
use serde_json::json;

use crate::support::*;

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

/// Role, token, finish and end at once.
pub fn good() -> Script {
    Script::stream().at(10).say(r()).say(t("a")).say(f("stop")).say(d()).end()
}

fn good_body() -> String {
    [event(&r()), event(&t("a")), event(&f("stop")), event(&d())].concat()
}

pub fn status(status: u16) -> Script {
    Script::new().at(50).reply(status, JSON, format!("{{\"error\":{{\"message\":\"own words {status}\"}}}}"))
}

/// A head, a role event, and an error event.
fn twin(code: u16) -> Script {
    Script::stream().at(40).say(r()).at(50).say(error("own words", code)).say(d()).end()
}

fn asked(engines: &[ScriptedEngine]) -> usize {
    engines.iter().map(|engine| engine.log().requests().len()).sum()
}

/// At most this many requests reached any one engine.
fn most(engines: &[ScriptedEngine]) -> usize {
    engines.iter().map(|engine| engine.log().requests().len()).max().unwrap_or_default()
}

fn retries(house: &House, reason: &str) -> f64 {
    house.page().sum("goodput_retries_total", &[("reason", reason)])
}

async fn ends_well(house: House, answer: Whole, attempts: f64) {
    assert_eq!((answer.status.as_u16(), answer.text()), (200, good_body()));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.number("attempts")), ("met".into(), Some(attempts)));
    house.end().await;
}

// --- the line ---

/// Answers the first request of each connection, and closes at the second.
fn once_per_connection(house: &House) -> ScriptedEngine {
    let whole = whole("x", 1, 1);
    let engine = ScriptedEngine::new(house.clock, move |request| match request.on_connection {
        0 => Script::json(200, whole.clone()),
        _ => Script::new().close(),
    });
    house.network.engine("e1", &engine);
    engine
}

#[tokio::test(start_paused = true)]
async fn c44_retry_row_stale_connection_is_retried_once_and_is_no_attempt() {
    // Without a retry budget, because this retry does not draw from it.
    let house = House::new(&Yaml::default().with("retries: {after_fault: 0, share: 0, floor_per_10s: 0}"));
    let engine = once_per_connection(&house);
    for _ in 0..100 {
        let answer = house.chat(unary()).await.whole().await;
        assert_eq!(answer.status, 200);
    }
    let lines = house.lines(100).await;
    assert!(lines.iter().all(|line| line.verdict() == "met" && line.number("attempts") == Some(1.0)));
    let stale = engine.log().requests().iter().filter(|request| request.on_connection > 0).count();
    assert_eq!(retries(&house, "stale_connection"), stale as f64);
    assert!(stale >= 50, "{stale} connections were used again");
    assert_eq!(house.states("a"), ["up"]);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c44_after_a_stale_connection_no_other_idle_one_is_tried() {
    let house = House::new(&Yaml::default().with("retries: {after_fault: 0, share: 0, floor_per_10s: 0}"));
    let engine = once_per_connection(&house);
    let send = async || house.chat(unary()).await.whole().await.status;
    assert_eq!(futures_util::future::join(send(), send()).await, (200.try_into().unwrap(), 200.try_into().unwrap()));
    assert_eq!(engine.log().connections().len(), 2, "both are kept, and neither takes a second request");
    assert_eq!(send().await, 200);
    assert_eq!(engine.log().connections().len(), 3);
    assert_eq!(retries(&house, "stale_connection"), 1.0);
    house.lines(3).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn each_request_adds_its_share_to_the_budget_of_retries() {
    for (before, last) in [(1, 500), (4, 200)] {
        let yaml = Yaml::default().with("retries: {share: 0.25, floor_per_10s: 0}");
        let mut scripts = vec![good(); before];
        scripts.extend([status(500), good()]);
        let (house, _engines) = House::many(&yaml, 2, scripts);
        for _ in 0..before {
            assert_eq!(house.chat(stream()).await.whole().await.status, 200);
        }
        assert_eq!(house.chat(stream()).await.whole().await.status, last, "after {before}");
        house.lines(before + 1).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c44_a_fresh_connection_that_is_closed_is_the_engines_failure() {
    let (house, engine) = House::playing(Script::new().close());
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (502, Some("engine_reset")));
    assert_eq!(engine.log().requests().len(), 2, "the one retry that is allowed after a fault");
    assert_eq!(house.line().await.verdict(), "missed(upstream_unavailable)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c44_a_second_failure_after_a_stale_connection_is_a_failover() {
    let house = House::new(&Yaml::default().engines_of_first(&["e1", "e2"]));
    let breaks = ScriptedEngine::new(house.clock, |request| match request.number {
        0 => Script::json(200, whole("x", 1, 1)),
        _ => Script::new().close(),
    });
    house.network.engine("e1", &breaks);
    let works = house.engine("e2", vec![Script::json(200, whole("x", 1, 1))]);
    for _ in 0..6 {
        assert_eq!(house.chat(unary()).await.whole().await.status, 200);
    }
    assert!(works.log().requests().len() >= 5);
    assert!(house.lines(6).await.iter().all(|line| line.verdict() == "met"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn connections_are_reused_and_not_after_four_seconds() {
    let (house, engine) = House::playing(Script::json(200, whole("x", 1, 1)));
    for pause in [0, 3900, 4100] {
        house.sleep(ms(pause)).await;
        house.chat(unary()).await.whole().await;
    }
    let numbers: Vec<usize> = engine.log().requests().iter().map(|request| request.connection).collect();
    assert_eq!(numbers, [0, 0, 1]);
    house.end().await;
}

// --- connect failure ---

#[tokio::test(start_paused = true)]
async fn retry_row_connect_failure_goes_to_the_other_engines() {
    let house = House::new(&Yaml::default().engines_of_first(&["e1", "e2", "e3"]));
    let works = house.engine("e3", vec![good()]);
    let mut both = 0.0;
    for _ in 0..4 {
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.text(), good_body());
        both = retries(&house, "connect_failed");
    }
    assert!(both >= 1.0);
    assert_eq!(works.log().requests().len(), 4);
    assert!(house.network.dials("e1") <= 5 && house.network.dials("e2") <= 5);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_connect_failure_asks_each_engine_at_most_once() {
    let house = House::new(&Yaml::default().engines_of_first(&["e1", "e2", "e3"]));
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (502, Some("connect_failed")));
    assert_eq!(["e1", "e2", "e3"].map(|host| house.network.dials(host)), [1, 1, 1]);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.number("attempts")), ("missed(upstream_unavailable)".into(), Some(3.0)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_connect_failure_of_the_only_engine_is_tried_again_there() {
    let house = House::new(&Yaml::default());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.status, 502);
    assert_eq!(house.network.dials("e1"), 2);
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_connect_failure_has_breaker_effect() {
    let yaml = Yaml::default().engines_of_first(&["e1", "e2"]).with("breaker: {faults: 1, within: 10s, open: 5s}");
    let house = House::new(&yaml);
    house.engine("e2", vec![good()]);
    for _ in 0..4 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!(house.states("a"), ["breaker_open", "up"]);
    assert_eq!(house.network.dials("e1"), 1);
    house.sleep(Duration::from_secs(5)).await;
    house.engine("e1", vec![good()]);
    for _ in 0..8 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!(house.states("a"), ["up", "up"]);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_connect_failure_by_silence_ends_at_the_connect_timeout() {
    let yaml = Yaml::default().engines_of_first(&["e1", "e2"]).with("connect_timeout: 200ms");
    let house = House::new(&yaml);
    house.network.silence("e1");
    let works = house.engine("e2", vec![good()]);
    let mut slow = 0;
    for _ in 0..4 {
        let before = house.clock.now();
        let answer = house.chat(stream()).await;
        if answer.at == before + ms(210) {
            slow += 1;
        } else {
            assert_eq!(answer.at, before + ms(10));
        }
        answer.whole().await;
    }
    assert_eq!(slow, house.network.dials("e1") as i32);
    assert_eq!(works.log().requests().len(), 4);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_passes_while_the_connection_is_made_is_a_connect_failure() {
    let limits = ["first_token: 500ms", "total: 500ms", "first_token: 500ms, response_head: 500ms"];
    for (limit, body) in limits.into_iter().zip([stream(), stream(), unary()]) {
        let yaml = Yaml::default().class(&format!("timeouts: {{{limit}}}"));
        let house = House::new(&yaml.with("breaker: {faults: 1, within: 10s, open: 5s}"));
        house.network.silence("e1");
        let answer = house.chat(body).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (502, Some("connect_failed")));
        assert_eq!((answer.at, house.network.dials("e1")), (at(500), 1), "a limit leaves no time for another attempt");
        assert_eq!(house.states("a"), ["breaker_open"], "breaker effect, as of any connect failure");
        assert_eq!(house.line().await.verdict(), "missed(upstream_unavailable)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_gateway_without_descriptors_reports_it_and_blames_no_engine() {
    let yaml = Yaml::default().class("hold_head: 100ms").class("keepalive_seconds: 1");
    let house = House::new(&yaml.with("breaker: {faults: 1, within: 10s, open: 5s}"));
    house.network.lack("e1");
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (503, Some("out_of_sockets")));
    assert_eq!((house.network.dials("e1"), house.states("a")), (1, vec!["up"]));
    assert_eq!(house.line().await.verdict(), "missed(internal)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn after_an_early_head_a_limit_during_connecting_is_a_connect_failure_too() {
    let yaml = Yaml::default().class("timeouts: {first_token: 500ms}").class("hold_head: 100ms");
    let yaml = yaml.class("keepalive_seconds: 1").with("breaker: {faults: 1, within: 10s, open: 5s}");
    let house = House::new(&yaml);
    house.network.silence("e1");
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.at, answer.end), (200, at(100), at(500)));
    assert!(answer.events().pop().expect("an event").contains("connect_failed"));
    assert_eq!(house.states("a"), ["breaker_open"]);
    assert_eq!(house.line().await.verdict(), "missed(upstream_unavailable)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_earlier_response_is_relayed_if_a_limit_passes_during_the_next_connect() {
    let yaml = Yaml::default().engines_of_first(&["e1", "e2"]).class("timeouts: {first_token: 500ms}");
    let house = House::new(&yaml);
    house.engine("e1", vec![status(503)]);
    house.network.silence("e2");
    // Whichever is asked first.
    let mut answers = Vec::new();
    for _ in 0..2 {
        answers.push(house.chat(stream()).await.whole().await.status.as_u16());
        house.sleep(ms(2000)).await;
    }
    assert!(answers.contains(&503), "{answers:?}");
    house.end().await;
}

// --- push-back ---

#[tokio::test(start_paused = true)]
async fn retry_row_push_back_goes_to_another_engine_without_breaker_effect() {
    for first in [status(429), status(503), status(529), twin(429), twin(503), twin(529)] {
        let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}");
        let (house, engines) = House::many(&yaml, 2, vec![first, good()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((asked(&engines), most(&engines)), (2, 1));
        assert_eq!(retries(&house, "push_back"), 1.0);
        let mut states = house.states("a");
        states.sort_unstable();
        assert_eq!(states, ["cooling", "up"]);
        house.sleep(ms(1000)).await;
        assert_eq!(house.states("a"), ["up", "up"], "cools down for one second");
        ends_well(house, answer, 2.0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn retry_row_push_back_by_error_type_alone() {
    let typed = r#"{"error":{"message":"busy","type":"overloaded_error"}}"#;
    let first = Script::stream().at(50).say(typed).end();
    let (house, engines) = House::many(&Yaml::default(), 2, vec![first, good()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(most(&engines), 1);
    ends_well(house, answer, 2.0).await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_push_back_asks_up_to_after_push_back_others_and_relays_the_last_answer() {
    for (allowed, tried) in [(3, 4), (1, 2), (0, 1), (9, 5)] {
        let yaml = Yaml::default().with(&format!("retries: {{after_push_back: {allowed}}}"));
        let (house, engines) = House::many(&yaml, 5, vec![status(503)]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((asked(&engines), most(&engines)), (tried, 1));
        assert_eq!((answer.status.as_u16(), answer.text()), (503, r#"{"error":{"message":"own words 503"}}"#.into()));
        assert_eq!(answer.header("x-goodput-reason"), None, "it is the engine's own answer");
        let line = house.line().await;
        assert_eq!((line.verdict(), line.number("attempts")), ("missed(upstream_overload)".into(), Some(tried as f64)));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn retry_row_push_back_of_the_only_engine_is_not_tried_again() {
    let (house, engine) = House::playing(status(429));
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), engine.log().requests().len()), (429, 1));
    assert_eq!(house.line().await.verdict(), "missed(upstream_overload)");
    house.end().await;
}

fn retry_after(value: &str) -> Script {
    let headers = [("content-type", "application/json"), ("retry-after", value)];
    Script::new().at(50).reply(429, &headers, r#"{"error":{"code":"engine_says_no"}}"#)
}

#[tokio::test(start_paused = true)]
async fn c46_a_push_back_and_its_retry_after_are_relayed_without_another_engine() {
    let (house, _engine) = House::playing(retry_after("30"));
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (429, Some("30")));
    assert_eq!(answer.text(), r#"{"error":{"code":"engine_says_no"}}"#);
    assert_eq!(answer.header("x-goodput-reason"), None, "no limit of the tenant's own");
    assert_eq!(house.line().await.verdict(), "missed(upstream_overload)");
    assert_eq!(house.states("a"), ["cooling"]);
    house.sleep(Duration::from_secs(29)).await;
    assert_eq!(house.states("a"), ["cooling"]);
    house.sleep(Duration::from_secs(1)).await;
    assert_eq!(house.states("a"), ["up"]);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c46_with_two_engines_the_second_serves_while_the_first_cools_down() {
    let (house, engines) = House::many(&Yaml::default(), 2, vec![retry_after("30"), good()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.text(), good_body());
    let cooling = usize::from(house.states("a")[1] == "cooling");
    for _ in 0..10 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!(engines[cooling].log().requests().len(), 1, "nobody asks it while the other one can");
    house.lines(11).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c46_a_retry_after_beyond_reason_is_clamped() {
    for (value, seconds) in [("100000", 60), ("0.2", 1)] {
        let (house, _engine) = House::playing(retry_after(value));
        house.chat(stream()).await.whole().await;
        house.sleep(Duration::from_secs(seconds) - ms(60)).await;
        let still = if value == "0.2" { "up" } else { "cooling" };
        assert_eq!(house.states("a"), [still]);
        house.sleep(ms(60)).await;
        assert_eq!(house.states("a"), ["up"]);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn if_all_cool_down_the_first_to_recover_is_tried() {
    let house = House::new(&Yaml::default().engines_of_first(&["e1", "e2"]));
    let long = house.engine("e1", vec![retry_after("50"), good()]);
    let short = house.engine("e2", vec![retry_after("20"), good()]);
    assert_eq!(house.chat(stream()).await.whole().await.status, 429);
    assert_eq!(house.states("a"), ["cooling", "cooling"]);
    assert_eq!(house.chat(stream()).await.whole().await.text(), good_body());
    assert_eq!((long.log().requests().len(), short.log().requests().len()), (1, 2));
    house.end().await;
}

// --- faults ---

#[tokio::test(start_paused = true)]
async fn retry_row_fault_is_tried_once_on_another_engine() {
    for first in [
        status(500),
        status(502),
        status(504),
        status(507),
        twin(500),
        twin(504),
        Script::new().at(50).reset(),
        Script::new().at(50).close(),
        Script::new().at(50).write("HTTP/1.1 200 OK\r\ncontent-ty").close(),
        Script::new().at(50).write("SSH-2.0-OpenSSH\r\n").close(),
        Script::stream().at(50).say(r()).reset(),
        Script::stream().at(50).say(r()).end(),
        Script::stream().at(50).end(),
        Script::stream().at(50).say(r()).write("zz\r\n"),
    ] {
        let (house, engines) = House::many(&Yaml::default(), 3, vec![first.clone(), good()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((asked(&engines), most(&engines)), (2, 1), "{first:?}");
        assert_eq!(retries(&house, "fault"), 1.0);
        assert_eq!(answer.at, at(60), "{first:?}");
        ends_well(house, answer, 2.0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn retry_row_fault_of_the_only_engine_is_tried_again_there() {
    for first in [status(500), twin(500), Script::new().at(50).reset(), Script::stream().at(50).say(r()).end()] {
        let house = House::new(&Yaml::default());
        let engine = house.engine("e1", vec![first, good()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(engine.log().requests().len(), 2);
        ends_well(house, answer, 2.0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn retry_row_fault_has_breaker_effect() {
    let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}");
    for first in [status(500), twin(504), Script::new().at(50).reset(), Script::stream().at(50).say(r()).end()] {
        let (house, _engines) = House::many(&yaml, 2, vec![first, good()]);
        let answer = house.chat(stream()).await.whole().await;
        let mut states = house.states("a");
        states.sort_unstable();
        assert_eq!(states, ["breaker_open", "up"]);
        ends_well(house, answer, 2.0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn retry_row_the_same_fault_twice_is_caused_by_the_request() {
    let yaml = Yaml::default().with("retries: {after_fault: 5}").with("breaker: {faults: 1, within: 10s, open: 5s}");
    for failing in [status(500), twin(500)] {
        let (house, engines) = House::many(&yaml, 4, vec![failing]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(asked(&engines), 2, "no third try");
        assert!(answer.text().contains("own words"), "the last answer is relayed");
        assert_eq!(house.states("a"), ["up"; 4], "neither status counts");
        assert_eq!(house.line().await.verdict(), "missed(upstream_error)");
        house.end().await;
    }
    let (house, engines) = House::many(&yaml, 4, vec![Script::new().at(50).reset()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((asked(&engines), answer.status.as_u16()), (2, 502));
    let open = house.states("a").iter().filter(|state| **state == "breaker_open").count();
    assert_eq!(open, 2, "resets count");
    assert_eq!(house.line().await.verdict(), "missed(upstream_unavailable)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_two_different_faults_continue_and_both_count() {
    let yaml = Yaml::default().with("retries: {after_fault: 5}").with("breaker: {faults: 1, within: 10s, open: 5s}");
    let (house, engines) = House::many(&yaml, 4, vec![status(500), status(502), good()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(asked(&engines), 3);
    let open = house.states("a").iter().filter(|state| **state == "breaker_open").count();
    assert_eq!(open, 2);
    ends_well(house, answer, 3.0).await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_truncated_in_its_preamble_by_every_engine_is_a_502() {
    let (house, engines) = House::many(&Yaml::default(), 2, vec![Script::stream().at(50).say(r()).end()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(asked(&engines), 2);
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (502, Some("stream_incomplete")));
    assert_eq!(answer.json()["error"]["code"], "stream_incomplete");
    assert_eq!(house.line().await.verdict(), "missed(truncated)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_response_that_is_not_http_is_a_502() {
    let (house, _engine) = House::playing(Script::new().at(50).write("SSH-2.0-OpenSSH\r\n").close());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (502, Some("engine_garbage")));
    assert_eq!(house.line().await.verdict(), "missed(upstream_error)");
    house.end().await;
}

// --- injections ---

#[tokio::test(start_paused = true)]
async fn retry_row_a_rejected_injection_is_retried_without_it_outside_the_budget() {
    for refusing in [400, 422] {
        let yaml = Yaml::default()
            .with("retries: {after_fault: 0, share: 0, floor_per_10s: 0}")
            .top("models: {aliases: {nick: m1}}");
        let house = House::new(&yaml);
        let picky = ScriptedEngine::new(house.clock, move |request| match request.json()["stream_options"].is_null() {
            true => good(),
            false => status(refusing),
        });
        house.network.engine("e1", &picky);
        let mut body = stream();
        body["model"] = json!("nick");
        let answer = house.chat(body.clone()).await.whole().await;
        assert_eq!(answer.text(), good_body());
        let requests = picky.log().requests();
        assert_eq!(requests.len(), 2);
        assert!(requests.iter().all(|request| request.json()["model"] == "m1"), "the alias stays");
        assert_eq!(retries(&house, "injection"), 1.0);
        // From now on nothing is injected for this engine.
        house.chat(body).await.whole().await;
        assert_eq!(picky.log().requests().len(), 3);
        let lines = house.lines(2).await;
        assert!(lines.iter().all(|line| line.verdict() == "met" && line.number("attempts") == Some(1.0)));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn retry_row_an_injection_rejected_in_band_is_retried_without_it() {
    let house = House::new(&Yaml::default());
    let picky = ScriptedEngine::new(house.clock, |request| match request.json()["stream_options"].is_null() {
        true => good(),
        false => twin(400),
    });
    house.network.engine("e1", &picky);
    assert_eq!(house.chat(stream()).await.whole().await.text(), good_body());
    assert_eq!(picky.log().requests().len(), 2);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_a_body_rejected_with_and_without_injection_was_not_rejected_for_it() {
    let (house, engine) = House::playing(status(400));
    for (number, requests) in [(1, 2), (2, 4)] {
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.status, 400);
        assert_eq!(engine.log().requests().len(), requests, "injections go on");
        assert_eq!(house.lines(number).await[number - 1].verdict(), "excluded(invalid_request)");
    }
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_a_recently_accepted_injection_is_not_the_reason_of_a_400() {
    let house = House::new(&Yaml::default());
    let engine = house.engine("e1", vec![good(), status(400), status(400), good()]);
    house.chat(stream()).await.whole().await;
    house.sleep(Duration::from_secs(59)).await;
    assert_eq!(house.chat(stream()).await.whole().await.status, 400);
    assert_eq!(engine.log().requests().len(), 2, "relayed at once");
    house.sleep(Duration::from_secs(2)).await;
    assert_eq!(house.chat(stream()).await.whole().await.status, 200);
    assert_eq!(engine.log().requests().len(), 4, "tried again after a minute");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn retry_row_a_400_to_a_body_without_injection_is_relayed() {
    let (house, engine) = House::playing(status(400));
    for body in [stream_with_usage(), unary()] {
        assert_eq!(house.chat(body).await.whole().await.status, 400);
    }
    assert_eq!(engine.log().requests().len(), 2);
    house.end().await;
}

// --- never retried ---

#[tokio::test(start_paused = true)]
async fn retry_row_other_answers_are_relayed_at_once() {
    let cases = [
        (301, "missed(upstream_error)"),
        (404, "missed(upstream_error)"),
        (405, "missed(upstream_error)"),
        (408, "missed(upstream_error)"),
        (409, "excluded(invalid_request)"),
        (411, "excluded(invalid_request)"),
        (413, "excluded(invalid_request)"),
        (414, "excluded(invalid_request)"),
        (415, "excluded(invalid_request)"),
        (418, "missed(upstream_error)"),
        (431, "excluded(invalid_request)"),
        (501, "excluded(invalid_request)"),
    ];
    for (code, verdict) in cases {
        let (house, engines) = House::many(&Yaml::default(), 2, vec![status(code)]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((answer.status.as_u16(), asked(&engines)), (code, 1));
        assert!(answer.text().contains("own words"));
        assert_eq!(house.line().await.verdict(), verdict, "{code}");
        assert_eq!(house.states("a"), ["up", "up"]);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_401_is_the_clients_only_if_its_own_key_was_forwarded() {
    let yaml = Yaml::default().engine("forward_authorization: true");
    for (key, verdict) in [(true, "excluded(unauthorized)"), (false, "missed(upstream_error)")] {
        let (house, engine) = House::playing_with(&yaml, status(401));
        let ask = Ask::post(CHAT, stream());
        let ask = if key { ask.header("authorization", "Bearer sk-own") } else { ask };
        house.send(ask).await.whole().await;
        let seen = engine.log().requests()[0].header("authorization").map(str::to_owned);
        assert_eq!(seen.as_deref(), key.then_some("Bearer sk-own"));
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_404_for_a_model_of_a_pattern_is_the_clients_until_it_was_served_once() {
    let house = House::new(&Yaml::default());
    house.engine("e1", vec![status(404), good(), status(404)]);
    let mut body = stream();
    body["model"] = json!("no-such-model");
    for (number, verdict) in ["excluded(invalid_request)", "met", "missed(upstream_error)"].into_iter().enumerate() {
        house.chat(body.clone()).await.whole().await;
        assert_eq!(house.lines(number + 1).await[number].verdict(), verdict);
    }
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c42_no_retry_after_a_token_was_sent() {
    for ending in [Script::reset as fn(Script) -> Script, Script::end] {
        let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}");
        let first = ending(Script::stream().at(10).say(r()).at(20).say(t("A")).at(50));
        let (house, engines) = House::many(&yaml, 2, vec![first, good()]);
        let answer = house.chat(stream()).await.whole().await;
        let relayed = [event(&r()), event(&t("A"))].concat();
        let rest = answer.text().strip_prefix(&relayed).unwrap().to_owned();
        assert!(rest.starts_with("data: {\"error\":") && rest.contains("stream_incomplete"));
        assert_eq!(asked(&engines), 1);
        assert!(house.states("a").contains(&"breaker_open"), "and it is the engine's fault");
        assert_eq!(house.line().await.verdict(), "missed(truncated)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c42_an_error_after_a_token_is_the_engines_fault_whatever_its_code() {
    for code in [400, 429, 500] {
        let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}");
        let first = Script::stream().at(20).say(t("A")).at(50).say(error("x", code)).say(d()).end();
        let (house, engines) = House::many(&yaml, 2, vec![first, good()]);
        house.chat(stream()).await.whole().await;
        assert_eq!(asked(&engines), 1);
        assert!(house.states("a").contains(&"breaker_open"));
        assert_eq!(house.line().await.verdict(), "missed(upstream_error)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c43_a_preamble_does_not_commit_to_an_engine() {
    let first = Script::stream().at(10).say(r()).at(50).reset();
    let second = Script::stream().at(5).say(r()).at(100).say(t("b")).say(f("stop")).say(d()).end();
    let (house, engines) = House::many(&Yaml::default(), 2, vec![first, second]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.text(), [event(&r()), event(&t("b")), event(&f("stop")), event(&d())].concat());
    assert_eq!(answer.text().matches("\"role\"").count(), 1);
    let bodies: Vec<_> = engines.iter().map(|engine| engine.log().requests()[0].body.clone()).collect();
    assert_eq!(bodies[0], bodies[1], "the same body");
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft()), ("met".into(), Some(150.0)), "both tries are inside");
    assert_eq!(retries(&house, "fault"), 1.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c43_if_all_fail_the_client_gets_a_real_error_status() {
    let broken = || Script::stream().at(10).say(r()).at(50).reset();
    let (house, engines) = House::many(&Yaml::default(), 2, vec![broken(), broken()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), asked(&engines)), (502, 2));
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(house.line().await.verdict(), "missed(truncated)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_earlier_response_is_relayed_if_a_later_attempt_has_none() {
    // The first engine responds 500, the second resets: the existing response is relayed.
    let (house, engines) = House::many(&Yaml::default(), 2, vec![status(500), Script::new().at(50).reset()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((asked(&engines), answer.status.as_u16()), (2, 500));
    assert_eq!(house.line().await.verdict(), "missed(upstream_error)");
    house.end().await;
}

// --- the budget and the limits around it ---

#[tokio::test(start_paused = true)]
async fn without_a_retry_budget_there_is_no_retry() {
    let yaml = Yaml::default().with("retries: {share: 0, floor_per_10s: 0}");
    for first in [status(500), status(503), Script::new().at(50).reset()] {
        let (house, engines) = House::many(&yaml, 3, vec![first, good()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(asked(&engines), 1);
        assert!(answer.status.is_server_error());
        house.line().await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_floor_of_the_budget_is_per_ten_seconds() {
    let yaml = Yaml::default().with("retries: {share: 0, floor_per_10s: 3}").with("breaker: off");
    let house = House::new(&yaml.engines_of_first(&["e1", "e2"]));
    let engine = |host| house.engine(host, vec![Script::new().reset()]);
    let engines = [engine("e1"), engine("e2")];
    for _ in 0..6 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!(asked(&engines), 9, "six requests and three retries");
    house.sleep(Duration::from_secs(11)).await;
    house.chat(stream()).await.whole().await;
    assert_eq!(asked(&engines), 11);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_first_token_limit_runs_over_all_attempts() {
    let yaml = Yaml::default().class("timeouts: {first_token: 600ms}");
    let slow = Script::new().at(300).reply(500, JSON, "{}");
    let silent = Script::new().silence();
    let (house, engines) = House::many(&yaml, 2, vec![slow, silent]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.at, asked(&engines)), (504, at(600), 2));
    assert_eq!(house.line().await.verdict(), "missed(timeout_first_token)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_response_head_limit_runs_over_all_attempts() {
    let yaml = Yaml::default().class("timeouts: {response_head: 600ms}");
    let slow = Script::new().at(300).reply(500, JSON, "{}");
    let (house, engines) = House::many(&yaml, 2, vec![slow, Script::new().silence()]);
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.at, asked(&engines)), (504, at(600), 2));
    assert_eq!(answer.header("x-goodput-reason"), Some("response_head_timeout"));
    assert_eq!(house.line().await.verdict(), "missed(timeout_first_token)");
    house.end().await;
}

// --- other pools ---

fn two_pools() -> Yaml {
    Yaml::default().pool("b", &["f1"])
}

#[tokio::test(start_paused = true)]
async fn the_next_pool_is_tried_after_push_back_or_failed_connections() {
    for first in [Some(status(503)), Some(twin(529)), None] {
        let house = House::new(&two_pools());
        let pushes_back = first.is_some();
        if let Some(script) = first {
            house.engine("e1", vec![script]);
        }
        let other = house.engine("f1", vec![good()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.header("x-goodput-pool"), Some("b"));
        assert_eq!(other.log().requests().len(), 1);
        let reason = if pushes_back { "push_back" } else { "connect_failed" };
        assert!(retries(&house, reason) >= 1.0, "a spill is a further attempt");
        let line = house.line().await;
        assert_eq!((line.verdict(), line.text("pool"), line.text("engine")), ("met".into(), "b", "f1:8000"));
        assert_eq!(house.page().sum("slo_met_total", &[("pool", "b")]), 1.0);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_of_a_further_pool_hides_no_overload_of_the_first() {
    for (first, told, verdict) in [
        (Some(503), 503, "missed(upstream_overload)"),
        (Some(429), 429, "missed(upstream_overload)"),
        (None, 502, "missed(upstream_unavailable)"),
    ] {
        for code in [400, 404, 413, 422, 501] {
            let house = House::new(&two_pools().routes("  - {model: \"*\", pools: [a, b]}"));
            if let Some(first) = first {
                house.engine("e1", vec![status(first)]);
            }
            let other = house.engine("f1", vec![status(code)]);
            let answer = house.chat(stream()).await.whole().await;
            assert!(!other.log().requests().is_empty());
            assert_eq!(answer.status.as_u16(), told, "{first:?} {code}");
            assert_eq!(house.line().await.verdict(), verdict);
            house.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pool_whose_engines_are_all_out_is_passed_over() {
    let house = House::new(&two_pools().engines_of_first(&["e1"]).with("balance: least_work"));
    let house_b = house.engine("f1", vec![good()]);
    // Five connect failures open the breaker of the only engine of pool a.
    for _ in 0..5 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!(house.states("a"), ["breaker_open"]);
    let dials = house.network.dials("e1");
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.text(), house.network.dials("e1")), (good_body(), dials));
    assert_eq!(house_b.log().requests().len(), 6);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn requests_that_break_every_engine_do_not_block_the_others() {
    let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}");
    let broken = || Script::stream().at(10).say(t("a")).reset();
    let (house, engines) = House::many(&yaml, 2, vec![broken(), broken(), good()]);
    for _ in 0..2 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!(house.states("a"), ["breaker_open"; 2]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(asked(&engines), 3);
    assert_eq!(house.states("a").iter().filter(|state| **state == "up").count(), 1, "and it is trusted again");
    assert_eq!(answer.status, 200);
    assert_eq!(house.lines(3).await[2].verdict(), "met");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_does_not_spill() {
    let house = House::new(&two_pools());
    house.engine("e1", vec![status(500), status(502)]);
    let other = house.engine("f1", vec![good()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), other.log().requests().len()), (502, 0));
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_opens_the_breaker_of_the_only_engine_does_not_spill_either() {
    let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}").pool("b", &["f1"]);
    let house = House::new(&yaml);
    house.engine("e1", vec![Script::new().at(50).reset()]);
    let other = house.engine("f1", vec![good()]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(house.states("a"), ["breaker_open"]);
    assert_eq!((answer.status.as_u16(), other.log().requests().len()), (502, 0));
    assert_eq!(retries(&house, "fault"), 0.0, "no further attempt was made");
    assert_eq!(house.line().await.number("attempts"), Some(1.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_push_back_behind_an_unreachable_pool_uses_the_next_pools_budget() {
    let seat = "max_concurrency_per_engine: 1";
    let yaml = Yaml::default().with(seat).pool("b", &["f1"]).with(seat).pool("c", &["g1"]).with(seat);
    let house = House::new(&yaml.with("retries: {share: 0, floor_per_10s: 0}"));
    let head = "HTTP/1.1 503 X\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n";
    house.engine("f1", vec![Script::new().at(50).write(head).silence()]);
    let last = house.engine("g1", vec![good()]);
    let answer = house.chat(stream()).await;
    assert_eq!((answer.status.as_u16(), last.log().requests().len()), (503, 0));
    let taken = |pool| house.page().sum("goodput_seats_taken", &[("pool", pool)]);
    assert_eq!((taken("b"), taken("c")), (1.0, 0.0), "the answer of the second pool holds no seat of the third");
    drop(answer);
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c42_after_a_token_was_sent_the_next_pool_is_not_tried_either() {
    let begun = || Script::stream().at(10).say(r()).at(20).say(t("A")).at(50);
    // An overload would have sent it on to the next pool at once, without the token.
    let overloaded = begun().say(error("own words", 529)).say(d()).end();
    for (first, verdict) in [
        (begun().reset(), "missed(truncated)"),
        (begun().end(), "missed(truncated)"),
        (overloaded, "missed(upstream_error)"),
    ] {
        let house = House::new(&two_pools());
        let (a, b) = (house.engine("e1", vec![first]), house.engine("f1", vec![good()]));
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("a")));
        let relayed = [event(&r()), event(&t("A"))].concat();
        let rest = answer.text().strip_prefix(&relayed).expect("what came from a").to_owned();
        assert!(rest.starts_with("data: {\"error\":") && !rest.contains("\"delta\""), "{rest}");
        assert_eq!((a.log().requests().len(), b.log().requests().len()), (1, 0));
        let line = house.line().await;
        assert_eq!((line.verdict(), line.text("pool")), (verdict.to_owned(), "a"));
        assert_eq!(line.number("attempts"), Some(1.0));
        assert_eq!(house.page().sum("goodput_retries_total", &[]), 0.0);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c43_a_preamble_of_one_pool_does_not_exclude_the_next() {
    let house = House::new(&two_pools());
    let second = Script::stream().at(5).say(r()).at(100).say(t("b")).say(f("stop")).say(d()).end();
    let (a, b) = (house.engine("e1", vec![twin(529)]), house.engine("f1", vec![second]));
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("b")));
    assert_eq!(answer.text(), [event(&r()), event(&t("b")), event(&f("stop")), event(&d())].concat());
    assert_eq!(a.log().requests()[0].body, b.log().requests()[0].body, "the same body");
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft()), ("met".into(), Some(150.0)), "both tries are inside");
    assert_eq!((retries(&house, "push_back"), line.number("attempts")), (1.0, Some(2.0)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c43_a_reset_behind_a_preamble_stays_in_its_pool_and_the_only_engine_is_asked_again() {
    let house = House::new(&two_pools());
    let first = Script::stream().at(10).say(r()).at(50).reset();
    let second = Script::stream().at(5).say(r()).at(100).say(t("b")).say(f("stop")).say(d()).end();
    let (a, b) = (house.engine("e1", vec![first, second]), house.engine("f1", vec![good()]));
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.text(), [event(&r()), event(&t("b")), event(&f("stop")), event(&d())].concat());
    assert_eq!((a.log().requests().len(), b.log().requests().len()), (2, 0));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.ttft(), line.text("pool")), ("met".into(), Some(150.0), "a"));
    assert_eq!(retries(&house, "fault"), 1.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c43_if_all_pools_fail_behind_a_preamble_the_client_gets_a_real_error_status() {
    let silent = || Script::stream().at(10).say(r()).silence();
    let timeouts = two_pools().class("timeouts: {first_token: 2s}");
    for (yaml, first, second, told) in [
        (two_pools(), twin(529), status(503), (503, "missed(upstream_overload)")),
        (two_pools(), Script::stream().at(10).say(r()).at(50).reset(), good(), (502, "missed(truncated)")),
        (timeouts, silent(), silent(), (504, "missed(timeout_first_token)")),
    ] {
        let house = House::new(&yaml);
        let _engines = (house.engine("e1", vec![first]), house.engine("f1", vec![second]));
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.header("content-type"), Some("application/json"), "{}", answer.text());
        assert!(answer.json()["error"].is_object());
        assert_eq!((answer.status.as_u16(), house.line().await.verdict().as_str()), told);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn if_every_pool_pushes_back_the_last_response_is_relayed() {
    let house = House::new(&two_pools());
    house.engine("e1", vec![status(503)]);
    house.engine("f1", vec![status(429)]);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (429, Some("b")));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.text("pool")), ("missed(upstream_overload)".into(), "b"));
    house.end().await;
}

// --- twins in the other dialects ---

#[tokio::test(start_paused = true)]
async fn in_band_errors_of_the_other_dialects_are_retried_too() {
    let messages = |kind: &str| {
        let data = json!({"type": "error", "error": {"type": kind, "message": "own words"}});
        format!("event: error\ndata: {data}\n\n")
    };
    let failed = json!({"type": "response.failed", "sequence_number": 1, "response": {"error": {"code": "server_error", "message": "own words"}}});
    let delta = json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}});
    let messages_good = format!(
        "event: content_block_delta\ndata: {delta}\n\nevent: message_stop\ndata: {{\"type\":\"message_stop\"}}\n\n"
    );
    let delta = json!({"type": "response.output_text.delta", "sequence_number": 1, "item_id": "i", "delta": "a"});
    let done = json!({"type": "response.completed", "sequence_number": 2, "response": {}});
    let responses_good =
        format!("event: response.output_text.delta\ndata: {delta}\n\nevent: response.completed\ndata: {done}\n\n");
    for (path, bad, good, reason) in [
        ("/v1/messages", messages("overloaded_error"), &messages_good, "push_back"),
        ("/v1/messages", messages("api_error"), &messages_good, "fault"),
        ("/v1/responses", format!("event: response.failed\ndata: {failed}\n\n"), &responses_good, "fault"),
    ] {
        let scripts = vec![Script::stream().at(50).put(bad).end(), Script::stream().at(10).put(good.clone()).end()];
        let (house, engines) = House::many(&Yaml::default(), 2, scripts);
        let body = json!({"model": "m1", "stream": true, "max_tokens": 5});
        let answer = house.post(path, body).await.whole().await;
        assert_eq!((answer.text(), asked(&engines), most(&engines)), (good.clone(), 2, 1));
        assert_eq!(retries(&house, reason), 1.0, "{path}");
        assert_eq!(house.line().await.verdict(), "met");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_gives_up_before_the_first_token_is_followed_by_another() {
    let data = |object: serde_json::Value| format!("data: {object}\n\n");
    let gives_up = |reason: &str| event(&f(reason));
    let choice = |code: u16| {
        let error = json!({"code": code, "message": "own words"});
        data(json!({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error", "error": error}]}))
    };
    let field = |code: u16| format!("error: {{\"code\":{code},\"message\":\"own words\",\"type\":\"x\"}}\n\n");
    for (bad, reason) in [
        (gives_up("abort"), "fault"),
        (gives_up("error"), "fault"),
        (gives_up("insufficient_system_resource"), "push_back"),
        (choice(502), "fault"),
        (choice(503), "push_back"),
        (field(500), "fault"),
        (field(503), "push_back"),
        (data(json!({"error": {"code": "insufficient_quota"}})), "push_back"),
        (data(json!({"error": {"message": "own words", "http_status_code": 503}})), "push_back"),
    ] {
        let bad = Script::stream().at(40).say(r()).at(50).put(bad.clone()).say(d()).end();
        let (house, engines) = House::many(&Yaml::default(), 2, vec![bad, good()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((asked(&engines), most(&engines), retries(&house, reason)), (2, 1, 1.0));
        ends_well(house, answer, 2.0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_gives_up_after_a_token_or_twice_has_failed() {
    for (reason, first, late) in [
        ("abort", "missed(upstream_error)", "missed(upstream_error)"),
        ("insufficient_system_resource", "missed(upstream_overload)", "missed(upstream_error)"),
    ] {
        let script = || Script::stream().at(40).say(r()).at(50).say(f(reason)).say(d()).end();
        let (house, engines) = House::many(&Yaml::default(), 2, vec![script(), script()]);
        let answer = house.chat(stream()).await.whole().await;
        let relayed = [event(&r()), event(&f(reason)), event(&d())].concat();
        assert_eq!((answer.status.as_u16(), answer.text(), asked(&engines)), (200, relayed, 2));
        assert_eq!(house.line().await.verdict(), first);
        house.end().await;
        let script = Script::stream().at(40).say(t("a")).at(50).say(f(reason)).say(d()).end();
        let (house, engine) = House::playing(script);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.text(), [event(&t("a")), event(&f(reason)), event(&d())].concat());
        assert_eq!((house.line().await.verdict(), engine.log().requests().len()), (late.into(), 1));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalid_request_is_not_retried_in_any_spelling() {
    let chat = |error: serde_json::Value| format!("data: {}\n\n", json!({"error": error}));
    for said in [
        "error: {\"code\":400,\"message\":\"own words\"}\n\n".to_owned(),
        chat(json!({"message": "own words", "http_status_code": 422})),
        chat(json!({"message": "own words", "code": "content_filter", "status": 400})),
        chat(json!({"type": "request_too_large"})),
    ] {
        let script = Script::stream().at(50).put(said.clone()).end();
        let (house, engines) = House::many(&Yaml::default().kind("generic"), 2, vec![script, good()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((answer.text(), asked(&engines)), (said, 1));
        assert_eq!(house.line().await.verdict(), "excluded(invalid_request)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn empty_errors_do_not_count_against_an_engine() {
    let say = |event: String| event.replacen('{', "{\"error\":\"\",", 1);
    let script = Script::stream().at(10).say(say(r())).say(say(t("a"))).say(say(f("stop"))).say(d()).end();
    let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}");
    let (house, engine) = House::playing_with(&yaml, script);
    for _ in 0..3 {
        house.chat(stream()).await.whole().await;
    }
    assert!(house.lines(3).await.iter().all(|line| line.verdict() == "met" && line.number("attempts") == Some(1.0)));
    assert_eq!((engine.log().requests().len(), house.states("a")), (3, vec!["up"]));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_first_engines_fault_counts_if_the_client_leaves_before_the_second_response() {
    let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}");
    let (house, engines) = House::many(&yaml, 2, vec![status(500), Script::new().silence()]);
    assert!(tokio::time::timeout(ms(200), house.chat(stream())).await.is_err());
    assert_eq!(asked(&engines), 2);
    let mut states = house.states("a");
    states.sort_unstable();
    assert_eq!(states, ["breaker_open", "up"]);
    assert_eq!(house.line().await.verdict(), "excluded(client_cancel)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_error_body_that_never_ends_is_relayed_and_cut() {
    let yaml = Yaml::default().class("timeouts: {idle: 300ms}").with("retries: {after_fault: 0}");
    let head = "HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n{\"a";
    let (house, engine) = House::playing_with(&yaml, Script::new().at(50).write(head).silence());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.text(), answer.is_cut), (500, "{\"a".into(), true));
    assert_eq!((answer.end, engine.log().closed(0).await), (at(350), at(350)));
    assert_eq!(house.line().await.verdict(), "missed(upstream_error)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_without_a_body_is_relayed() {
    for (code, verdict) in
        [(500, "missed(upstream_error)"), (429, "missed(upstream_overload)"), (304, "missed(upstream_error)")]
    {
        let (house, _engine) = House::playing(Script::answer(code, &[], ""));
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.text(), answer.is_cut), (code, String::new(), false));
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_recognised_by_its_head_alone() {
    let head = |status| format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n");
    for status in [500, 503] {
        let slow = Script::new().at(50).write(head(status)).silence();
        let (house, engines) = House::many(&Yaml::default(), 2, vec![slow, good()]);
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((answer.at, asked(&engines)), (at(60), 2));
        ends_well(house, answer, 2.0).await;
    }
}

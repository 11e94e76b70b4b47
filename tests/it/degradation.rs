//! Overload levels through the whole gateway: when they are entered and left, and what each of
//! them does to a request.

use crate::support::scripted_engine::{Script, ScriptedEngine, fixtures::*};
use goodput::gateway::OverrideError;
use serde_json::{Value, json};

use crate::retries::{good, status};
use crate::support::*;

/// The class `chat` with these levels, on pool `a` of one seat and pool `b` without limit; the
/// class `bulk` ranks below, and may use pool `a` only.
fn yaml(levels: &str) -> Yaml {
    with_queue(levels, "queue: {max_waiting: 100}")
}

fn with_queue(levels: &str, queue: &str) -> Yaml {
    Yaml::default()
        .class(&format!("degrade: [{levels}]"))
        .class("queue: {max_wait: 100s}")
        .with("max_concurrency_per_engine: 1")
        .with(queue)
        .pool("b", &["e2"])
        .and_class("  - {slo_class: bulk, priority: batch, joint_attainment_target: 0.9}")
        .routes("  - {model: \"*\", class: chat, pools: [a, b]}\n  - {model: \"*\", class: bulk, pools: a}")
        .top("classify: [{class: bulk, when: {metadata: {class: bulk}}}]")
}

/// Everything goes to pool `a` alone.
const ONE: &str = "  - {model: \"*\", pools: a}";

const DEEP: &str = "enter_when: {queue_depth_above: 2}";

fn bulk() -> Value {
    let mut body = stream();
    body["metadata"] = json!({"class": "bulk"});
    body
}

/// A gateway whose engines both play this, with the class `chat` at this level by hand.
fn forced(levels: &str, level: usize, script: &Script) -> (House, [ScriptedEngine; 2]) {
    let house = House::new(&yaml(levels));
    let engines = ["e1", "e2"].map(|host| house.engine(host, vec![script.clone()]));
    house.gateway.force_level("chat", Some(level), None).unwrap();
    (house, engines)
}

/// The present level of `chat`.
fn level(house: &House) -> usize {
    house.gateway.level_views()[0].level
}

fn asked(engine: &ScriptedEngine) -> Vec<Value> {
    engine.log().requests().iter().map(|request| request.json()).collect()
}

/// One token at 100 ms, and the end after this time.
fn long(millis: u64) -> Script {
    Script::stream().at(100).say(r()).say(t("a")).at(millis).say(f("stop")).say(d()).end()
}

// --- when ---

#[tokio::test(start_paused = true)]
async fn a_level_is_entered_by_the_queue_and_left_when_requests_cease() {
    let levels = format!("{{action: shed_lower, {DEEP}}}, {{action: reasoning_off, {DEEP}, hold: 5s}}");
    let house = House::new(&yaml(&levels).class("timeouts: {idle: 100s}").routes(ONE));
    house.engine("e1", vec![long(12_000)]);
    let ask = async || house.chat(stream()).await.whole().await;
    let watch = async {
        let mut seen = Vec::new();
        house.sleep(ms(50)).await;
        for second in 1..60 {
            house.sleep(ms(1000)).await;
            let view = house.gateway.level_views().remove(0);
            if seen.last().is_none_or(|(_, level, _)| *level != view.level) {
                seen.push((second, view.level, view.measured.queue_depth));
            }
        }
        seen
    };
    let (.., seen) = tokio::join!(ask(), ask(), ask(), ask(), watch);
    // Three wait at once: the first level. They still do ten seconds later: the second. One of
    // them has got the seat at 12 s, two are not few enough; at 24 s one waits, which is the
    // bound, and at 36 s nobody. Then both levels are left, the second not before its time.
    assert_eq!(seen.iter().map(|(_, level, _)| *level).collect::<Vec<_>>(), [1, 2, 1, 0], "{seen:?}");
    let seconds: Vec<_> = seen.iter().map(|(second, ..)| *second).collect();
    assert_eq!(seconds, [1, 11, 37, 47], "{seen:?}");
    let page = house.page();
    assert_eq!(page.sum("goodput_degrade_level", &[("class", "chat")]), 0.0);
    assert_eq!(page.sum("goodput_degrade_forced", &[]), 0.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_level_is_entered_by_the_burn_rate_of_served_requests() {
    let house = House::new(&yaml("{action: {cap_output: 9}, enter_when: {burn_rate_above: 2}}"));
    house.engine("e1", vec![status(500)]);
    house.engine("e2", vec![status(500)]);
    for count in 1..=10 {
        assert_eq!(level(&house), 0, "{count}");
        assert_eq!(house.chat(stream()).await.whole().await.status, 500);
        house.sleep(ms(600)).await;
    }
    assert_eq!(level(&house), 1);
    assert_eq!(house.gateway.level_views()[0].measured.burn_rate.map(f64::round), Some(13.0));
    house.sleep(ms(61_000)).await;
    assert_eq!(level(&house), 0, "nothing burns any more");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn shed_requests_do_not_raise_the_burn_rate() {
    let levels = "{action: {cap_output: 9}, enter_when: {burn_rate_above: 2}}";
    let house = House::new(&with_queue(levels, "queue: {max_waiting: 0}").routes(ONE));
    house.engine("e1", vec![long(60_000)]);
    let holds = house.chat(stream()).await;
    for _ in 0..20 {
        let refused = house.chat(stream()).await.whole().await;
        assert_eq!((refused.status.as_u16(), refused.header("x-goodput-reason")), (503, Some("queue_full")));
        house.sleep(ms(300)).await;
    }
    assert_eq!(level(&house), 0);
    let page = house.page();
    assert_eq!(page.sum("goodput_slo_missed_total", &[("reason", "shed")]), 20.0);
    drop(holds);
    house.end().await;
}

// --- by hand ---

#[tokio::test(start_paused = true)]
async fn a_manual_level_survives_reloads_until_it_is_returned() {
    let two = format!("{{action: defer, {DEEP}}}, {{action: spill, {DEEP}}}");
    let house = House::new(&yaml(&two));
    let gateway = &house.gateway;
    assert_eq!(gateway.force_level("chat", Some(3), None), Err(OverrideError::TooHigh(2)));
    assert_eq!(gateway.force_level("bulk", Some(1), None), Err(OverrideError::TooHigh(0)));
    assert_eq!(gateway.force_level("nobody", Some(1), None), Err(OverrideError::UnknownClass));
    let view = gateway.force_level("chat", Some(2), None).unwrap();
    assert_eq!((view.level, view.is_forced, view.actions.len()), (2, true, 2));
    house.sleep(ms(60_000)).await;
    house.reload(&yaml(&two));
    assert_eq!(level(&house), 2);
    assert_eq!(house.page().sum("goodput_degrade_forced", &[("class", "chat")]), 1.0);
    house.reload(&yaml(&format!("{{action: defer, {DEEP}}}")));
    assert_eq!(level(&house), 1, "there is no second one any more");
    gateway.force_level("chat", None, None).unwrap();
    house.sleep(ms(9_000)).await;
    assert_eq!(level(&house), 1, "it is left as any other");
    house.sleep(ms(2_000)).await;
    assert_eq!(level(&house), 0);
    house.reload(&Yaml::default());
    assert_eq!(house.gateway.level_views(), []);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_manual_level_with_a_time_limit_returns_by_itself() {
    let house = House::new(&yaml(&format!("{{action: defer, {DEEP}}}")));
    let left = || house.page().sum("goodput_degrade_forced_seconds_left", &[("class", "chat")]);
    let view = house.gateway.force_level("chat", Some(1), Some(ms(60_000))).unwrap();
    assert_eq!((view.is_forced, view.forced_for), (true, Some(ms(60_000))));
    assert_eq!(left(), 60.0);
    house.sleep(ms(20_000)).await;
    assert_eq!(left(), 40.0);
    house.reload(&yaml(&format!("{{action: defer, {DEEP}}}")));
    house.sleep(ms(39_000)).await;
    assert_eq!((level(&house), left()), (1, 1.0), "a reload changes nothing about it");
    house.sleep(ms(2_000)).await;
    let page = house.page();
    assert_eq!(page.sum("goodput_degrade_forced", &[]) + page.sum("goodput_degrade_forced_seconds_left", &[]), 0.0);
    assert_eq!(level(&house), 1, "it is left as any other");
    house.sleep(ms(10_000)).await;
    assert_eq!(level(&house), 0);
    house.end().await;
}

// --- what each does ---

#[tokio::test(start_paused = true)]
async fn shed_lower_reserves_pools_from_lower_priorities() {
    let levels = format!("{{action: shed_lower, {DEEP}}}");
    let (house, engines) = forced(&levels, 1, &good());
    let refused = house.chat(bulk()).await.whole().await;
    assert_eq!(refused.status, 503);
    assert_eq!(refused.header("x-goodput-reason"), Some("overload_shed"));
    assert_eq!(refused.header("x-goodput-degraded"), Some("shed_lower"));
    assert_eq!(refused.header("retry-after"), None, "an operator decides");
    let line = house.line().await;
    assert_eq!(line.verdict(), "missed(shed)");
    let by_another = serde_json::json!({"level": 0, "cap": null, "actions": ["shed_lower"]});
    assert_eq!(line.0["degraded"], by_another, "its own class has no level");
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-degraded")), (200, None));
    assert_eq!(asked(&engines[0]).len(), 1);
    assert_eq!(house.page().sum("goodput_degraded_total", &[("class", "bulk"), ("action", "shed_lower")]), 1.0);

    house.gateway.force_level("chat", Some(0), None).unwrap();
    assert_eq!(house.chat(bulk()).await.whole().await.status, 200);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_shed_from_one_pool_may_use_another() {
    let levels = format!("{{action: shed_lower, {DEEP}}}");
    let routes = "  - {model: \"*\", class: chat, pools: a}\n  - {model: \"*\", class: bulk, pools: [a, b]}";
    let house = House::new(&yaml(&levels).routes(routes));
    let engines = ["e1", "e2"].map(|host| house.engine(host, vec![good()]));
    house.gateway.force_level("chat", Some(1), None).unwrap();
    let answer = house.chat(bulk()).await.whole().await;
    assert_eq!((answer.header("x-goodput-pool"), answer.header("x-goodput-degraded")), (Some("b"), Some("shed_lower")));
    assert_eq!((asked(&engines[0]).len(), asked(&engines[1]).len()), (0, 1));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_retry_after_is_the_first_moment_at_which_the_level_may_be_left() {
    let levels = format!("{{action: shed_lower, {DEEP}, hold: 20s}}");
    let house = House::new(&yaml(&levels).routes(ONE));
    house.engine("e1", vec![long(1_000)]);
    let ask = async || drop(house.chat(stream()).await.whole().await);
    let refused = async {
        house.sleep(ms(700)).await;
        house.chat(bulk()).await.whole().await
    };
    let (.., refused) = tokio::join!(ask(), ask(), ask(), ask(), refused);
    assert_eq!(refused.header("retry-after"), Some("20"), "entered at 0.5 s, asked at 0.7 s");
    house.sleep(ms(19_700)).await;
    assert_eq!(house.chat(bulk()).await.whole().await.status, 200, "the load is over");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_cap_is_lowered_and_capped_responses_are_counted() {
    let levels = format!("{{action: {{cap_output: 300}}, {DEEP}}}, {{action: {{cap_output: 50}}, {DEEP}}}");
    let cut = Script::stream().at(10).say(r()).say(t("a")).say(f("length")).say(d()).end();
    let (house, engines) = forced(&levels, 2, &cut);
    let bodies = [
        (r#"{"model":"m1","stream":true,"max_tokens":400}"#, r#""max_tokens":50}"#, Some("cap_output")),
        (r#"{"model":"m1","stream":true,"max_tokens":50}"#, r#""max_tokens":50}"#, None),
        (r#"{"model":"m1","stream":true}"#, r#""max_tokens":50,"#, Some("cap_output")),
    ];
    for (number, (body, becomes, header)) in bodies.into_iter().enumerate() {
        let answer = house.send(Ask::raw(CHAT, body)).await.whole().await;
        assert_eq!(answer.header("x-goodput-degraded"), header, "{body}");
        let received = String::from_utf8(engines[0].log().requests()[number].body.to_vec()).unwrap();
        assert!(received.contains(becomes), "{received}");
    }
    let told: Vec<_> = house.lines(3).await.into_iter().map(|line| line.0["degraded"].clone()).collect();
    let capped = serde_json::json!({"level": 2, "cap": 50, "actions": ["cap_output"]});
    assert_eq!(told, [capped.clone(), serde_json::Value::Null, capped]);
    let page = house.page();
    assert_eq!(page.sum("goodput_degraded_total", &[("action", "cap_output")]), 2.0);
    assert_eq!(page.sum("goodput_capped_answers_total", &[]), 2.0);
    assert_eq!(page.sum("goodput_truncated_answers_total", &[]), 3.0);
    house.end().await;
}

/// An engine that refuses caps below 100, and bodies with `bad`.
fn wants_room(house: &House) -> ScriptedEngine {
    ScriptedEngine::new(house.clock, |request| {
        let body = request.json();
        let is_small = body["max_tokens"].as_u64().is_some_and(|cap| cap < 100);
        if is_small || !body["bad"].is_null() { status(400) } else { good() }
    })
}

#[tokio::test(start_paused = true)]
async fn an_engines_rejection_of_a_lowered_cap_is_not_the_clients_fault() {
    let house = House::new(&yaml(&format!("{{action: {{cap_output: 50}}, {DEEP}}}")));
    let engine = wants_room(&house);
    house.network.engine("e1", &engine);
    house.gateway.force_level("chat", Some(1), None).unwrap();
    let mut body = stream();
    body["max_tokens"] = json!(400);
    let answer = house.chat(body.clone()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-degraded")), (200, None));
    let caps: Vec<Value> = asked(&engine).into_iter().map(|body| body["max_tokens"].clone()).collect();
    assert_eq!(caps, [json!(50), json!(400)]);
    // A rejection without the cap too is the client's fault.
    body["bad"] = json!(true);
    assert_eq!(house.chat(body).await.whole().await.status, 400);
    let verdicts: Vec<String> = house.lines(2).await.iter().map(|line| line.verdict()).collect();
    assert_eq!(verdicts, ["met", "excluded(invalid_request)"]);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejection_of_the_pool_spilled_to_by_a_level_is_not_the_clients_fault() {
    for code in [400, 404, 413, 422, 501] {
        let house = House::new(&yaml(&format!("{{action: spill, {DEEP}}}")));
        let engines = [house.engine("e1", vec![good(), status(code)]), house.engine("e2", vec![status(code)])];
        house.gateway.force_level("chat", Some(1), None).unwrap();
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("a")), "{code}");
        // Its own pool's word counts.
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (code, Some("a")));
        // 400 and 422 are retried once without the injection.
        assert!(asked(&engines[0]).len() == 2 && asked(&engines[1]).len() >= 2, "{code}");
        house.lines(2).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_a_level_spills_to_hides_no_overload_of_the_first() {
    let house = House::new(&yaml(&format!("{{action: spill, {DEEP}}}")));
    house.engine("e1", vec![long(60_000)]);
    house.engine("e2", vec![good(), status(404)]);
    let holds = house.send(Ask::post(CHAT, bulk())).await;
    house.gateway.force_level("chat", Some(1), None).unwrap();
    assert_eq!(house.chat(stream()).await.whole().await.status, 200);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (503, Some("queue_timeout")));
    drop(holds);
    let lines = house.lines(3).await;
    assert!(lines.iter().any(|line| line.verdict() == "missed(shed)"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_response_without_visible_output_after_a_lowered_cap_is_a_miss() {
    let levels = format!("{{action: {{cap_output: 5}}, {DEEP}}}");
    let thoughts = Script::stream().at(10).say(r()).say(g("hm")).say(f("length")).say(d()).end();
    let (house, _engines) = forced(&levels, 1, &thoughts);
    house.chat(stream()).await.whole().await;
    assert_eq!(house.line().await.verdict(), "missed(empty)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn reasoning_is_switched_off_and_the_rest_of_the_body_stays() {
    let levels = format!("{{action: reasoning_off, {DEEP}}}");
    let (house, engines) = forced(&levels, 1, &good());
    let body = r#"{"model":"m1", "reasoning_effort": "high", "x":1.50}"#;
    let answer = house.send(Ask::raw(CHAT, body)).await.whole().await;
    assert_eq!(answer.header("x-goodput-degraded"), Some("reasoning_off"));
    let received = String::from_utf8(engines[0].log().requests()[0].body.to_vec()).unwrap();
    let becomes = r#"{"chat_template_kwargs":{"enable_thinking":false,"thinking":false},"model":"m1", "reasoning_effort": "low", "x":1.50}"#;
    assert_eq!(received, becomes);
    let none = house.send(Ask::raw(CHAT, r#"{"model":"m1","reasoning_effort":"none"}"#)).await.whole().await;
    assert_eq!(none.header("x-goodput-degraded"), None);
    assert_eq!(house.page().sum("goodput_degraded_total", &[("action", "reasoning_off")]), 1.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_rejects_the_switches_is_retried_without_them() {
    let house = House::new(&yaml(&format!("{{action: reasoning_off, {DEEP}}}")));
    let picky = ScriptedEngine::new(house.clock, |request| match request.json()["chat_template_kwargs"].is_null() {
        true => good(),
        false => status(400),
    });
    house.network.engine("e1", &picky);
    house.gateway.force_level("chat", Some(1), None).unwrap();
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-degraded")), (200, None));
    assert_eq!(asked(&picky).len(), 2);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn spill_goes_to_the_next_pool_first() {
    let levels = format!("{{action: spill, {DEEP}}}");
    let house = House::new(&yaml(&levels));
    let engines = [house.engine("e1", vec![good()]), house.engine("e2", vec![good(), status(503)])];
    house.gateway.force_level("chat", Some(1), None).unwrap();
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.header("x-goodput-pool"), answer.header("x-goodput-degraded")), (Some("b"), Some("spill")));
    assert_eq!((asked(&engines[0]).len(), asked(&engines[1]).len()), (0, 1));
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-pool")), (200, Some("a")), "the first one is left");
    house.end().await;
}

/// A request of lower priority arrives after one of the class; the order of the only seat shows the effect.
#[tokio::test(start_paused = true)]
async fn defer_waits_behind_all_others() {
    for (by_hand, order) in [(0, ["chat", "bulk"]), (1, ["bulk", "chat"])] {
        let house = House::new(&yaml(&format!("{{action: defer, {DEEP}}}")).routes(ONE));
        house.engine("e1", vec![long(1_000)]);
        house.gateway.force_level("chat", Some(by_hand), None).unwrap();
        let ask = async |after: u64, class: &'static str, body: Value| {
            house.sleep(ms(after)).await;
            let answer = house.chat(body).await.whole().await;
            assert_eq!(answer.status, 200);
            (answer.end, class, answer.header("x-goodput-degraded") == Some("defer"))
        };
        let first = ask(0, "bulk", bulk());
        let (_, chat, bulk) = tokio::join!(first, ask(1, "chat", stream()), ask(2, "bulk", bulk()));
        assert_eq!((chat.2, bulk.2), (by_hand == 1, false));
        let mut ends = [chat, bulk];
        ends.sort_unstable();
        assert_eq!(ends.map(|(_, class, _)| class), order);
        house.end().await;
    }
}

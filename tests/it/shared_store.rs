//! Limits that gateways share, while their store is away: nothing is connected here, and the
//! gateway's keeper does not run. With a real store they are tested in `tests/e2e`.

use crate::support::scripted_engine::{Script, fixtures::*};
use serde_json::{Value, json};

use crate::support::*;

fn shared(limits: &str, more: &str) -> Yaml {
    let hash = blake3::hash(b"sk-acme").to_hex();
    let acme = format!("tenants:\n  - {{tenant: acme, keys: [{{blake3: \"{hash}\"}}], limits: {{{limits}}}}}");
    let store = format!("limits_store: {{redis: {{url: \"redis://nowhere:6379\"{more}}}}}");
    Yaml::default().top(&format!("{acme}\nreplicas: 3\n{store}"))
}

fn capped(cap: u64) -> Ask {
    let body: Value = json!({"model": "m1", "max_tokens": cap, "messages": [{"role": "user", "content": "hello"}]});
    Ask::post(CHAT, body).header("authorization", "Bearer sk-acme")
}

fn answer(output: u64) -> Script {
    Script::new().at(1).reply(200, &[("content-type", "application/json")], whole("x", 2, output))
}

#[tokio::test(start_paused = true)]
async fn open_serves_this_gateways_share() {
    let (house, _engine) = House::playing_with(&shared("requests_per_minute: 60, requests_burst: 9", ""), answer(5));
    let mut statuses = Vec::new();
    for _ in 0..5 {
        statuses.push(house.send(capped(10)).await.whole().await.status.as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 429, 429], "a third of nine at once");
    let refused = house.send(capped(10)).await.whole().await;
    assert_eq!(refused.headers["retry-after"], "3", "a third of one a second");
    let told = |name: &str| refused.headers[name].to_str().unwrap().to_owned();
    assert_eq!(told("x-ratelimit-limit-requests"), "9", "the limit is the tenant's, whoever enforces which part of it");
    assert_eq!((told("x-ratelimit-remaining-requests"), told("x-ratelimit-reset-requests")), ("0".into(), "9s".into()));
    assert!(refused.text().contains("60 a minute, 9 at once"), "{}", refused.text());
    let page = house.page();
    assert_eq!(page.sum("goodput_limits_store_up", &[]), 0.0);
    assert_eq!(page.sum("goodput_limits_store_requests_total", &[("by", "share")]), 3.0);
    assert_eq!(page.sum("goodput_slo_excluded_total", &[("reason", "rate_limited")]), 3.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_larger_than_the_share_takes_all_of_it_and_owes_the_rest() {
    let yaml = shared("tokens_per_minute: 6000, tokens_burst: 900", "");
    let (house, _engine) = House::playing_with(&yaml, answer(500));
    assert_eq!(house.send(capped(800)).await.whole().await.status, 200, "it fits into 900, though not into 300");
    let refused = house.send(capped(250)).await.whole().await;
    // 502 are spent of 300, and 33 a second flow back: 252 fit when 48 are left.
    assert_eq!((refused.status.as_u16(), &refused.headers["retry-after"]), (429, &"14".parse().unwrap()));
    let never = house.send(capped(901)).await.whole().await;
    assert_eq!(
        (never.status.as_u16(), &never.headers["x-goodput-reason"]),
        (400, &"request_exceeds_limit".parse().unwrap())
    );
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn closed_rejects_as_an_internal_miss() {
    let yaml = shared("requests_per_minute: 60", ", on_failure: closed");
    let (house, engine) = House::playing_with(&yaml, answer(5));
    let refused = house.send(capped(10)).await.whole().await;
    assert_eq!(refused.status, 503);
    assert_eq!(refused.headers["x-goodput-reason"], "limits_store_unavailable");
    assert!(!refused.headers.contains_key("retry-after"), "nobody knows when it is back");
    assert!(engine.log().requests().is_empty());
    let page = house.page();
    assert_eq!(page.sum("goodput_slo_missed_total", &[("reason", "internal")]), 1.0);
    assert_eq!(page.sum("goodput_limits_store_requests_total", &[("by", "nobody")]), 1.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_tenant_without_limits_needs_no_store() {
    let yaml = shared("models: {m2: {requests_per_minute: 1}}", ", on_failure: closed");
    let (house, _engine) = House::playing_with(&yaml, answer(5));
    for _ in 0..3 {
        assert_eq!(house.send(capped(10)).await.whole().await.status, 200);
    }
    assert_eq!(
        house.page().sum("goodput_limits_store_requests_total", &[]),
        0.0,
        "none of them counts against a limit"
    );
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn rejections_by_a_share_of_places_report_the_whole_limit() {
    let (house, _engine) = House::playing_with(&shared("concurrent_requests: 7", ""), answer(5));
    let running = [house.send(capped(10)).await, house.send(capped(10)).await];
    let refused = house.send(capped(10)).await.whole().await;
    assert_eq!((refused.status.as_u16(), &refused.headers["x-ratelimit-limit-requests"]), (429, &"7".parse().unwrap()));
    for answer in running {
        assert_eq!(answer.whole().await.status, 200);
    }
    house.end().await;
}

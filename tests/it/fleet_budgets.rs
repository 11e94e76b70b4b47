//! Budgets of all gateways, read from a scripted Prometheus (`telemetry.prometheus`).

use goodput::record::CountSource;
use parking_lot::Mutex;
use std::sync::Arc;

use crate::support::scripted_engine::{Script, ScriptedEngine};
use crate::support::*;

const SETTINGS: &str = "telemetry: {prometheus: {url: \"http://prometheus:9090/thanos\", every: 60s, timeout: 5s, select: {cluster: \"e\\\"u\"}}}";

/// Behaviour of Prometheus for every query.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mood {
    /// 900 of 1000 met, in every window, counted for two days.
    Answers,
    Status(u16),
    Silent,
    Nonsense,
    /// It scrapes other gateways, or none.
    Empty,
    Warns,
}

fn vector(samples: &[(&str, f64)]) -> String {
    let one = |(metric, value): &(&str, f64)| {
        format!(r#"{{"metric":{{"class":"chat",{metric}}},"value":[1000000,"{value}"]}}"#)
    };
    let all: Vec<String> = samples.iter().map(one).collect();
    format!(r#"{{"status":"success","data":{{"resultType":"vector","result":[{}]}}}}"#, all.join(","))
}

fn answer(mood: Mood, query: &str) -> Script {
    match mood {
        Mood::Silent => Script::new().silence(),
        Mood::Status(status) => Script::json(status, "{}"),
        Mood::Nonsense => Script::json(200, "<html>"),
        Mood::Empty => Script::json(200, vector(&[])),
        Mood::Warns => Script::json(200, r#"{"status":"success","data":{"result":[]},"warnings":["a store is away"]}"#),
        Mood::Answers if query.contains("slo_judged%7C") || query.contains("judged%7Cmissed") => {
            Script::json(200, vector(&[]))
        }
        Mood::Answers if query.contains("timestamp") => {
            Script::json(200, vector(&[("\"x\":\"\"", 1_000_000.0 - 172_800.0)]))
        }
        Mood::Answers => Script::json(
            200,
            vector(&[
                (r#""counted":"judged","length":"short""#, 400.0),
                (r#""counted":"judged","length":"long""#, 600.0),
                (r#""counted":"met","length":"short""#, 400.0),
                (r#""counted":"met","length":"long""#, 500.0),
            ]),
        ),
    }
}

/// A gateway beside a Prometheus whose mood can change.
fn watched(mood: Mood) -> (House, ScriptedEngine, Arc<Mutex<Mood>>) {
    let house = House::new(&Yaml::default().top(SETTINGS));
    let mood = Arc::new(Mutex::new(mood));
    let now = Arc::clone(&mood);
    let prometheus =
        ScriptedEngine::new(house.clock, move |request| answer(*now.lock(), &String::from_utf8_lossy(&request.body)));
    house.network.engine("prometheus", &prometheus);
    (house, prometheus, mood)
}

fn chat(house: &House) -> goodput::record::SloStatus {
    house.gateway.recorder.statuses().remove(0)
}

#[tokio::test(start_paused = true)]
async fn budgets_are_those_of_all_gateways_where_prometheus_has_them() {
    let (house, prometheus, _) = watched(Mood::Answers);
    house.sleep(ms(1000)).await;
    let status = chat(&house);
    assert_eq!((status.own.count.met, status.own.count.judged), (900, 1000));
    assert_eq!((status.source, status.own.covered.as_secs()), (CountSource::Prometheus, 172_800));
    let lengths: Vec<_> = status.lengths.iter().map(|one| (one.length.as_str(), one.own.count.judged)).collect();
    assert_eq!(lengths, [("short", 400), ("long", 600)]);
    let page = house.page();
    assert_eq!(page.sum("goodput_slo_source", &[("class", "chat"), ("source", "prometheus")]), 1.0);
    assert_eq!(page.sum("goodput_prometheus_reads_total", &[("result", "success")]), 1.0);
    assert!((page.sum("goodput_slo_attainment", &[("class", "chat"), ("window", "1h")]) - 0.9).abs() < 1e-9);
    assert!(house.gateway.recorder.budgets_in_words().is_some_and(|words| words.contains("sums over all gateways")));
    let requests = prometheus.log().requests();
    assert!(requests.iter().all(|request| request.target == "/thanos/api/v1/query" && request.method == "POST"));
    let body = String::from_utf8_lossy(&requests[0].body).into_owned();
    assert!(body.contains("timeout=5s") && body.contains("cluster%3D%22e%5C%22u%22"), "{body}");
    assert_eq!(house.network.dials("prometheus"), 1, "one connection for all queries");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn without_an_answer_the_last_sums_hold_for_three_intervals_and_then_the_process_counts() {
    for mood in [Mood::Status(500), Mood::Status(302), Mood::Silent, Mood::Nonsense, Mood::Empty, Mood::Warns] {
        let (house, _, now) = watched(Mood::Answers);
        house.sleep(ms(1000)).await;
        *now.lock() = mood;
        house.sleep(ms(150_000)).await;
        assert_eq!(chat(&house).source, CountSource::Prometheus, "{mood:?}");
        let words = house.gateway.recorder.budgets_in_words().unwrap();
        assert!(words.contains("cannot be read") && words.contains("sums over all gateways"), "{mood:?}: {words}");
        house.sleep(ms(60_000)).await;
        let status = chat(&house);
        assert_eq!((status.source, status.own.count.judged), (CountSource::Process, 0), "{mood:?}");
        let words = house.gateway.recorder.budgets_in_words().unwrap();
        assert!(words.contains("of this process alone"), "{mood:?}: {words}");
        let page = house.page();
        assert!(page.sum("goodput_prometheus_reads_total", &[("result", "failure")]) >= 3.0, "{mood:?}");
        assert_eq!(page.sum("goodput_slo_source", &[("class", "chat"), ("source", "process")]), 1.0);
        *now.lock() = Mood::Answers;
        house.sleep(ms(70_000)).await;
        assert_eq!(chat(&house).source, CountSource::Prometheus, "{mood:?}: it is back");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_prometheus_that_nobody_reaches_holds_no_request_up() {
    let house = House::new(&Yaml::default().top(SETTINGS));
    let _engine = house.engine(
        "e1",
        vec![
            Script::stream()
                .at(100)
                .say(r#"{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}"#)
                .say("[DONE]")
                .end(),
        ],
    );
    house.network.silence("prometheus");
    assert_eq!(house.chat(stream()).await.whole().await.status, 200);
    let status = chat(&house);
    assert_eq!((status.source, status.own.count.judged), (CountSource::Process, 1));
    house.end().await;
}

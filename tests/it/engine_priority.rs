//! Priority of a class, sent to engines that schedule by it, and to no others.

use crate::support::scripted_engine::{Script, ScriptedEngine};
use goodput::sim::engine::{AdmissionOrder, EngineSpec, LengthDistribution, SimEngine, SimSettings};
use serde_json::{Value, json};

use crate::retries::{good, status};
use crate::support::{CHAT, House, Yaml, ms, stream, unary};

const FLOOD: &str = "  - {slo_class: bulk, priority: batch, joint_attainment_target: 0.9}
  - {slo_class: voice, priority: critical, joint_attainment_target: 0.9}";

const RULES: &str = "classify:
  - {class: bulk, when: {metadata: {class: bulk}}}
  - {class: voice, when: {metadata: {class: voice}}}";

fn yaml() -> Yaml {
    Yaml::default().and_class(FLOOD).top(RULES)
}

fn by_priority() -> Yaml {
    yaml().engine("priority_scheduling: true")
}

fn of(class: &str) -> Value {
    let mut body = stream();
    body["metadata"] = json!({"class": class});
    body
}

/// The `priority` that each request came with, in the order of arrival.
fn told(engine: &ScriptedEngine) -> Vec<Value> {
    engine.log().requests().iter().map(|request| request.json()["priority"].clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn the_classs_priority_is_sent_and_the_clients_is_not() {
    let (house, engine) = House::playing_with(&by_priority(), good());
    for class in ["voice", "chat", "bulk"] {
        let mut body = of(class);
        body["priority"] = json!(-1000);
        assert_eq!(house.chat(body).await.whole().await.status, 200);
    }
    assert_eq!(told(&engine), [json!(0), json!(2), json!(4)]);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn engines_that_schedule_by_arrival_get_no_priority() {
    for kind in ["vllm", "sglang", "generic"] {
        let (house, engine) = House::playing_with(&yaml().kind(kind), good());
        let mut body = of("voice");
        body["priority"] = json!(-1000);
        assert_eq!(house.chat(body).await.whole().await.status, 200);
        assert_eq!(told(&engine), [Value::Null]);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn paths_without_a_priority_get_none() {
    let (house, engine) = House::playing_with(&by_priority(), Script::json(200, "{}".to_owned()));
    house.post("/v1/messages", json!({"model": "m1", "max_tokens": 5, "messages": []})).await.whole().await;
    house.post("/v1/embeddings", json!({"model": "m1", "input": "a"})).await.whole().await;
    house.post("/v1/responses", json!({"model": "m1", "input": "a"})).await.whole().await;
    assert_eq!(told(&engine), [Value::Null, Value::Null, json!(2)]);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_rejects_a_priority_is_retried_without() {
    let house = House::new(&by_priority());
    let by_arrival = ScriptedEngine::new(house.clock, |request| match request.json()["priority"].is_null() {
        true => good(),
        false => status(400),
    });
    house.network.engine("e1", &by_arrival);
    assert_eq!(house.chat(unary()).await.whole().await.status, 200);
    assert_eq!(told(&by_arrival), [json!(2), Value::Null]);
    house.chat(unary()).await.whole().await;
    assert_eq!(told(&by_arrival).len(), 3, "from now on it is not told");
    house.end().await;
}

/// One seat in the engine's batch and three requests in its queue; returns the order of service.
async fn order_of_service(order: AdmissionOrder, yaml: &Yaml) -> Vec<&'static str> {
    let house = House::new(yaml);
    let shape = EngineSpec { max_running: 1, order, prefix_caching: false, ..EngineSpec::default() };
    let output = LengthDistribution { p50: 20.0, p95: 20.0 };
    let models = vec!["m1".to_owned()];
    let engine = SimEngine::start(house.clock, SimSettings { models, shape, output, ..SimSettings::default() });
    house.network.simulated("e1", &engine);
    let ask = async |after: u64, class: &'static str| {
        house.sleep(ms(after)).await;
        (house.post(CHAT, of(class)).await.whole().await.end, class)
    };
    let (_, a, b, c) = tokio::join!(ask(0, "bulk"), ask(1, "bulk"), ask(2, "chat"), ask(3, "voice"));
    let mut ends = [a, b, c];
    ends.sort_unstable();
    house.end().await;
    ends.map(|(_, class)| class).to_vec()
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_schedules_by_priority_serves_the_higher_rank_first() {
    assert_eq!(order_of_service(AdmissionOrder::Priority, &by_priority()).await, ["voice", "chat", "bulk"]);
    assert_eq!(
        order_of_service(AdmissionOrder::Priority, &yaml()).await,
        ["bulk", "chat", "voice"],
        "nothing was told"
    );
    assert_eq!(order_of_service(AdmissionOrder::Arrival, &by_priority()).await, ["bulk", "chat", "voice"]);
}

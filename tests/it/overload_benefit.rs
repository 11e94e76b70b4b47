//! Effect of each overload action: the same minute of overload, in virtual time, on the same simulated engine
//! behind the whole gateway, with one action in force at a time. The table is in `docs/degradation.md`;
//! `--nocapture` prints it.

use std::fmt::Write;

use futures_util::future::join_all;
use goodput::sim::engine::{EngineSpec, LengthDistribution, SimEngine, SimSettings};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::support::*;

/// Requests a second of the classes `chat`, `agent` and `bulk`.
const RATES: [(&str, f64); 3] = [("chat", 3.0), ("agent", 0.3), ("bulk", 0.4)];
const SECONDS: f64 = 60.0;

const NEVER: &str = "enter_when: {queue_wait_above: 1h}";

/// Two pools: all requests use the first, the second is for spilling. The levels of `chat` are those of the
/// table, `agent` may be deferred.
fn yaml(levels: &str) -> Yaml {
    let queue = "queue: {max_wait: 10s}";
    Yaml::default()
        .promise(&[("ttft_seconds", 2.0), ("tpot_seconds", 0.05)])
        .class(queue)
        .class(levels)
        .with("max_concurrency_per_engine: 4")
        .pool("spare", &["e2"])
        .with("max_concurrency_per_engine: 2")
        .and_class(&format!(
            "  - slo_class: agent
    objectives: {{ttft_seconds: {{threshold: 8, attainment: 0.9}}}}
    joint_attainment_target: 0.9
    {queue}
    degrade: [{{action: defer, {NEVER}}}]
  - {{slo_class: bulk, priority: batch, joint_attainment_target: 0.9, {queue}}}"
        ))
        .routes("  - {model: \"*\", class: chat, pools: [a, spare]}\n  - {model: \"*\", pools: a}")
        .top("classify: [{class: agent, when: {metadata: {class: agent}}}, {class: bulk, when: {metadata: {class: bulk}}}]")
}

/// The levels of `chat`, each alone.
const LEVERS: [(&str, &str); 4] = [
    ("shed_lower", "shed_lower"),
    ("cap_output: 40", "{cap_output: 40}"),
    ("reasoning_off", "reasoning_off"),
    ("spill", "spill"),
];

/// When requests come, and of which class: the same for every row.
fn arrivals() -> Vec<(u64, &'static str)> {
    let mut chance = StdRng::seed_from_u64(20);
    let mut all = Vec::new();
    for (class, rate) in RATES {
        let mut at = 0.0;
        loop {
            at -= (1.0 - chance.random::<f64>()).ln() / rate;
            if at > SECONDS {
                break;
            }
            all.push(((at * 1e3) as u64, class));
        }
    }
    all.sort_unstable();
    all
}

fn body(number: usize, class: &str) -> Value {
    let mut body = stream();
    body["messages"] = json!([{"role": "user", "content": format!("question {number}")}]);
    body["metadata"] = json!({"class": class});
    body
}

/// Met requests per 100 judged of each class, and the tokens of `chat`.
struct Row {
    met: [f64; 3],
    tokens: f64,
}

async fn minute(levels: &str, prepare: impl FnOnce(&House)) -> Row {
    let house = House::new(&yaml(levels));
    let shape = EngineSpec { max_running: 8, speed: 0.25, prefix_caching: false, jitter: 0.0, ..EngineSpec::default() };
    let output = LengthDistribution { p50: 40.0, p95: 80.0 };
    let settings =
        SimSettings { models: vec!["m1".into()], shape, output, reasoning_tokens: 30, ..SimSettings::default() };
    let engines = ["e1", "e2"].map(|host| (host, SimEngine::start(house.clock, settings.clone())));
    engines.iter().for_each(|(host, engine)| house.network.simulated(host, engine));
    prepare(&house);
    let asks = arrivals().into_iter().enumerate().map(async |(number, (at, class))| {
        house.sleep(ms(at)).await;
        let answer = house.chat(body(number, class)).await.whole().await;
        let usage = answer.events().iter().filter(|event| event.contains("delta")).count();
        if class == "chat" { usage as f64 } else { 0.0 }
    });
    let tokens = join_all(asks).await.into_iter().sum();
    let page = house.page();
    let met = RATES.map(|(class, _)| {
        let sum = |name| page.sum(name, &[("class", class)]);
        100.0 * sum("slo_met_total") / sum("slo_total")
    });
    house.end().await;
    Row { met, tokens }
}

#[tokio::test(start_paused = true)]
async fn each_overload_action_has_its_measured_gain_and_cost() {
    let nothing = minute("priority: normal", |_| ()).await;
    let mut rows = vec![("nothing", nothing)];
    let deferred = minute("priority: normal", |house| drop(house.gateway.force_level("agent", Some(1), None).unwrap()));
    rows.push(("defer (agent)", deferred.await));
    for (name, action) in LEVERS {
        let levels = format!("degrade: [{{action: {action}, {NEVER}}}]");
        let row = minute(&levels, |house| drop(house.gateway.force_level("chat", Some(1), None).unwrap())).await;
        rows.push((name, row));
    }
    let all = "degrade:
      - {action: shed_lower, enter_when: {queue_wait_above: 600ms}, hold: 5s}
      - {action: reasoning_off, enter_when: {queue_wait_above: 600ms}, hold: 5s}
      - {action: {cap_output: 40}, enter_when: {queue_wait_above: 900ms}, hold: 5s}
      - {action: spill, enter_when: {queue_wait_above: 900ms}, hold: 5s}";
    rows.push(("by measure", minute(all, |_| ()).await));

    let mut table =
        String::from("| in force | chat met | agent met | bulk met | chat tokens |\n| --- | --- | --- | --- | --- |\n");
    for (name, Row { met: [chat, agent, bulk], tokens }) in &rows {
        writeln!(table, "| {name} | {chat:.0} % | {agent:.0} % | {bulk:.0} % | {tokens:.0} |").unwrap();
    }
    println!("{table}");
    assert!(include_str!("../../docs/degradation.md").contains(&table), "put this into docs/degradation.md:\n{table}");
    let met = |name: &str| rows.iter().find(|(row, _)| *row == name).expect("a row").1.met;
    let tokens = |name: &str| rows.iter().find(|(row, _)| *row == name).expect("a row").1.tokens;
    // The statements beside the table. Reducing the work per response gains most ...
    for lever in ["cap_output: 40", "reasoning_off"] {
        assert!(met(lever)[0] > met("nothing")[0] + 10.0 && met(lever)[2] > met("nothing")[2], "{table}");
        assert!(tokens(lever) < 0.8 * tokens("nothing"), "{table}");
    }
    // ... while the ranks of the queue protect from others already ...
    for lever in ["defer (agent)", "shed_lower", "spill"] {
        assert!((met(lever)[0] - met("nothing")[0]).abs() < 5.0, "{table}");
    }
    assert!(met("shed_lower")[2] == 0.0 && met("defer (agent)")[1] < met("nothing")[1], "{table}");
    // ... and by measure it costs less than all the time.
    assert!(met("by measure")[0] > met("nothing")[0] + 10.0, "{table}");
    assert!(tokens("by measure") > tokens("cap_output: 40"), "{table}");
}

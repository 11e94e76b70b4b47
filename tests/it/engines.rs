//! Engines that go away, come back, are busy, list models, or say what they should not: what
//! becomes of requests meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::Duration;

use crate::support::scripted_engine::{Received, Script, ScriptedEngine, fixtures::*};
use futures_util::future::join_all;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::retries::{good, status};
use crate::support::*;

/// What an engine says to whoever looks at it.
#[derive(Clone)]
pub struct Face {
    /// The status of its health; 0: silence.
    health: Arc<AtomicU16>,
    models: Arc<Mutex<Vec<&'static str>>>,
}

impl Face {
    pub fn well(models: &[&'static str]) -> Self {
        Face { health: Arc::new(AtomicU16::new(200)), models: Arc::new(Mutex::new(models.to_vec())) }
    }

    pub fn health(&self, status: u16) {
        self.health.store(status, Ordering::Relaxed);
    }

    fn loads(&self, model: &'static str) {
        self.models.lock().push(model);
    }

    fn answers(&self, target: &str) -> Option<Script> {
        match target {
            "/health" => Some(match self.health.load(Ordering::Relaxed) {
                0 => Script::new().silence(),
                status => Script::json(status, "{}"),
            }),
            "/v1/models" => {
                let data: Vec<Value> = self.models.lock().iter().map(|id| json!({"id": id})).collect();
                Some(Script::json(200, json!({"object": "list", "data": data}).to_string()))
            }
            _ => None,
        }
    }
}

/// An engine that can be looked at, and plays this to requests.
pub fn engine(
    house: &House,
    host: &str,
    face: &Face,
    plays: impl Fn(&Received) -> Script + Send + Sync + 'static,
) -> ScriptedEngine {
    let face = face.clone();
    let engine = ScriptedEngine::new(house.clock, move |request| {
        face.answers(&request.target).unwrap_or_else(|| match request.method.as_str() {
            "GET" => Script::json(404, "{}"),
            _ => plays(request),
        })
    });
    house.network.engine(host, &engine);
    engine
}

pub fn posts(engine: &ScriptedEngine) -> usize {
    engine.log().requests().iter().filter(|request| request.method == "POST").count()
}

fn departed(house: &House) -> f64 {
    house.page().sum("goodput_retries_total", &[("reason", "departing")])
}

pub async fn until(house: &House, millis: u64) {
    house.clock.sleep_until(Some(at(millis))).await;
}

pub fn two() -> Yaml {
    Yaml::default().engines_of_first(&["e1", "e2"])
}

// --- engines that go away ---

/// C85: `e1` answers nothing and then goes away in this way, while `e2` is well.
async fn goes_away(
    yaml: &Yaml,
    body: Value,
    plays: Script,
    leaves: impl FnOnce(&House, &Face),
) -> (House, Vec<Whole>, [usize; 2]) {
    let house = House::new(yaml);
    let faces = [Face::well(&[]), Face::well(&[])];
    let first = engine(&house, "e1", &faces[0], move |_| plays.clone());
    let whole = body["stream"].is_null();
    let second =
        engine(&house, "e2", &faces[1], move |_| if whole { Script::json(200, whole_answer()) } else { good() });
    let probes = house.probe();
    until(&house, 100).await;
    let requests = join_all((0..6).map(|_| async { house.chat(body.clone()).await.whole().await }));
    let (answers, ()) = futures_util::future::join(requests, async {
        until(&house, 1_000).await;
        leaves(&house, &faces[0]);
    })
    .await;
    drop(probes);
    (house, answers, [posts(&first), posts(&second)])
}

fn whole_answer() -> String {
    whole("x", 1, 1)
}

#[tokio::test(start_paused = true)]
async fn c85_unanswered_requests_of_a_departing_engine_move_to_its_neighbour() {
    let preamble = || Script::stream().at(10).say(r()).silence();
    type Leaves = fn(&House, &Face);
    let ways: [Leaves; 2] = [|house, _| house.network.refuse("e1"), |_, face| face.health(503)];
    for leaves in ways {
        for (body, plays) in
            [(stream(), Script::new().silence()), (stream(), preamble()), (unary(), Script::new().silence())]
        {
            let (house, answers, [first, second]) = goes_away(&two(), body, plays, leaves).await;
            assert!(answers.iter().all(|answer| answer.status == 200 && answer.end < at(3_500)), "{answers:?}");
            assert!(first > 0, "it was asked, too");
            assert_eq!((second, departed(&house)), (6, first as f64));
            let lines = house.lines(6).await;
            assert_eq!(lines.iter().filter(|line| line.number("attempts") == Some(2.0)).count(), first);
            assert!(lines.iter().all(|line| ["met", "missed(ttft)", "missed(e2e)"].contains(&&*line.verdict())));
            house.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_engine_keeps_its_requests() {
    let late = || Script::stream().at(15_000).say(t("a")).say(f("stop")).say(d()).end();
    let (house, answers, [first, second]) = goes_away(&two(), stream(), late(), |_, face| face.health(0)).await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    assert_eq!((first + second, departed(&house)), (6, 0.0), "each was asked of one engine");
    assert!(answers.iter().any(|answer| answer.end > at(15_000)));
    house.lines(6).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c85_a_started_response_stays_with_its_engine() {
    let flows = (0..40).fold(Script::stream(), |script, n| script.at(100 + n * 200).say(t("a")));
    let flows = flows.say(f("stop")).say(d()).end();
    let (house, answers, [first, second]) =
        goes_away(&two(), stream(), flows, |house, _| house.network.refuse("e1")).await;
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.text().ends_with("data: [DONE]\n\n")));
    assert_eq!((first + second, departed(&house)), (6, 0.0));
    house.lines(6).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_head_was_sent_stays_with_its_engine() {
    let yaml = two().class("hold_head: 500ms").class("keepalive_seconds: 1");
    let late = Script::stream().at(8_000).say(t("a")).say(f("stop")).say(d()).end();
    let (house, answers, [first, second]) =
        goes_away(&yaml, stream(), late, |house, _| house.network.refuse("e1")).await;
    assert!(answers.iter().all(|answer| answer.text().ends_with("data: [DONE]\n\n")));
    assert_eq!((first + second, departed(&house)), (6, 0.0));
    house.lines(6).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn beyond_the_retry_budget_requests_wait_for_the_departing_engine() {
    let yaml = two().with("retries: {share: 0, floor_per_10s: 1}");
    let late = Script::stream().at(6_000).say(t("a")).say(f("stop")).say(d()).end();
    let (house, answers, [first, second]) =
        goes_away(&yaml, stream(), late, |house, _| house.network.refuse("e1")).await;
    assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
    assert!(first >= 2, "{first}");
    assert_eq!((second, departed(&house)), (6 - first + 1, 1.0));
    assert_eq!(answers.iter().filter(|answer| answer.end > at(6_000)).count(), first - 1, "it finished what it had");
    house.lines(6).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn without_another_engine_no_attempt_is_abandoned() {
    let house = House::new(&Yaml::default());
    let face = Face::well(&[]);
    let late = || Script::stream().at(5_000).say(t("a")).say(f("stop")).say(d()).end();
    let only = engine(&house, "e1", &face, move |_| late());
    let _probes = house.probe();
    until(&house, 100).await;
    let (answer, ()) = futures_util::future::join(async { house.chat(stream()).await.whole().await }, async {
        until(&house, 1_000).await;
        face.health(503);
    })
    .await;
    assert_eq!((answer.status.as_u16(), posts(&only), departed(&house)), (200, 1, 0.0));
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c85_without_another_engine_in_the_pool_the_next_pool_of_the_route_serves() {
    for seats in [None, Some(4)] {
        let seats = seats.map_or_else(String::new, |seats| format!("max_concurrency_per_engine: {seats}"));
        let limited = |yaml: Yaml| if seats.is_empty() { yaml } else { yaml.with(&seats) };
        let yaml = limited(limited(Yaml::default()).pool("b", &["f1"]));
        let house = House::new(&yaml);
        let faces = [Face::well(&[]), Face::well(&[])];
        let first = engine(&house, "e1", &faces[0], |_| Script::new().silence());
        let second = engine(&house, "f1", &faces[1], |_| good());
        let _probes = house.probe();
        until(&house, 100).await;
        let requests = join_all((0..3).map(|_| async { house.chat(stream()).await.whole().await }));
        let (answers, ()) = futures_util::future::join(requests, async {
            until(&house, 1_000).await;
            house.network.refuse("e1");
        })
        .await;
        assert!(answers.iter().all(|answer| answer.status == 200 && answer.end < at(3_500)), "{answers:?}");
        assert!(answers.iter().all(|answer| answer.header("x-goodput-pool") == Some("b")));
        assert_eq!((posts(&first), posts(&second), departed(&house)), (3, 3, 3.0));
        house.lines(3).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_health_checks_a_refused_connection_moves_the_others_at_once() {
    let house = House::new(&two().with("health: off").with("balance: round_robin"));
    let face = Face::well(&[]);
    let first = engine(&house, "e1", &face, |_| Script::new().silence());
    let second = engine(&house, "e2", &face, |_| good());
    let waits = join_all((0..2).map(|_| async { house.chat(stream()).await.whole().await }));
    let (answers, later) = futures_util::future::join(waits, async {
        until(&house, 500).await;
        house.network.refuse("e1");
        // The connection that stands is used again, if there is one: a fresh one is needed.
        join_all((0..2).map(|_| async { house.chat(stream()).await.whole().await })).await
    })
    .await;
    assert!(answers.iter().chain(&later).all(|answer| answer.status == 200 && answer.end < at(600)), "{answers:?}");
    assert_eq!((posts(&first), posts(&second), departed(&house)), (1, 4, 1.0));
    house.lines(4).await;
    house.end().await;
}

// --- signs of life ---

/// C81
#[tokio::test(start_paused = true)]
async fn c81_engines_with_flowing_tokens_are_not_ejected_by_a_silent_health_check() {
    let house = House::new(&two().class("timeouts: {total: 100s}"));
    let faces = [Face::well(&[]), Face::well(&[])];
    let flows = (1..=140).fold(Script::stream(), |script, n| script.at(n * 100).say(t("a")));
    let flows = flows.say(f("stop")).say(d()).end();
    for (host, face) in ["e1", "e2"].into_iter().zip(&faces) {
        let flows = flows.clone();
        engine(
            &house,
            host,
            face,
            move |request| if request.json()["user"] == "long" { flows.clone() } else { good() },
        );
    }
    let probes = house.probe();
    until(&house, 100).await;
    let mut long = stream();
    long["user"] = json!("long");
    let streams = join_all((0..4).map(|_| async { house.chat(long.clone()).await.whole().await }));
    let (streams, ()) = futures_util::future::join(streams, async {
        until(&house, 800).await;
        faces.iter().for_each(|face| face.health(0));
        for second in 1..14 {
            until(&house, second * 1_000).await;
            assert_eq!(house.states("a"), ["up", "up"], "at {second} s");
            assert_eq!(house.chat(stream()).await.whole().await.status, 200);
        }
    })
    .await;
    assert!(streams.iter().all(|answer| answer.text().ends_with("data: [DONE]\n\n")));
    drop(probes);
    house.lines(17).await;
    house.end().await;
}

// --- breakers ---

/// C112: five resets, and then the engines are well, with their first token after three seconds.
#[tokio::test(start_paused = true)]
async fn c112_if_every_breaker_is_open_requests_still_go_through() {
    for (hosts, more) in [
        (&["e1"][..], None),
        (&["e1", "e2"], None),
        (&["e1", "e2"], Some("max_concurrency_per_engine: 64")),
        (&["e1"], Some("balance: prefix_affinity")),
    ] {
        let yaml = Yaml::default().engines_of_first(hosts);
        let yaml = more.map_or(yaml.clone(), |line| yaml.with(line));
        let house = House::new(&yaml);
        let is_well = Arc::new(AtomicBool::new(false));
        for host in hosts {
            let is_well = Arc::clone(&is_well);
            let engine = ScriptedEngine::new(house.clock, move |_| match is_well.load(Ordering::Relaxed) {
                false => Script::new().at(10).reset(),
                true => Script::stream().at(3_000).say(t("a")).say(f("stop")).say(d()).end(),
            });
            house.network.engine(host, &engine);
        }
        let mut bad = 0;
        while house.states("a").iter().any(|state| *state != "breaker_open") {
            house.chat(stream()).await.whole().await;
            bad += 1;
        }
        is_well.store(true, Ordering::Relaxed);
        let began = house.clock.now();
        let request = async |n: u64| {
            house.clock.sleep_until(Some(began + ms(n * 20))).await;
            house.chat(stream()).await.whole().await
        };
        let answers = join_all((0..90).map(request)).await;
        assert!(answers.iter().all(|answer| answer.status == 200), "{hosts:?} {more:?}");
        assert!(answers.iter().all(|answer| answer.end.since(began) < Duration::from_secs(6)));
        assert_eq!(house.states("a"), vec!["up"; hosts.len()]);
        house.lines(90 + bad).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c112_while_another_pool_serves_an_open_breaker_stays_closed_to_requests() {
    let yaml = Yaml::default().with("breaker: {faults: 1, within: 10s, open: 5s}").pool("b", &["f1"]);
    let house = House::new(&yaml);
    let first = house.engine("e1", vec![Script::stream().at(10).say(t("a")).reset()]);
    let second = house.engine("f1", vec![good()]);
    for _ in 0..9 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!((first.log().requests().len(), second.log().requests().len()), (1, 8));
    house.lines(9).await;
    house.end().await;
}

/// C98: the class's own limit is no fault of an engine while its tokens come.
#[tokio::test(start_paused = true)]
async fn c98_a_total_limit_while_tokens_flow_is_not_the_engines_fault() {
    let yaml = two().class("timeouts: {total: 3s}");
    let house = House::new(&yaml);
    let flows = (1..=600).fold(Script::stream(), |script, n| script.at(n * 100).say(t("a")));
    // Nor while it is silent on this one, and other answers of the engine go on.
    let pauses = Script::stream().at(100).say(t("a")).silence();
    for host in ["e1", "e2"] {
        let (flows, pauses) = (flows.clone(), pauses.clone());
        let engine = ScriptedEngine::new(house.clock, move |request| match request.json()["user"].as_str() {
            Some("pauses") => pauses.clone(),
            _ => flows.clone(),
        });
        house.network.engine(host, &engine);
    }
    let mut pausing = stream();
    pausing["user"] = json!("pauses");
    let bodies = (0..28).map(|n| if n % 2 == 0 { stream() } else { pausing.clone() });
    let answers = join_all(bodies.map(|body| async { house.chat(body).await.whole().await })).await;
    assert!(answers.iter().all(|answer| answer.events().last().is_some_and(|last| last.contains("total_timeout"))));
    assert_eq!(house.states("a"), ["up", "up"]);
    assert!(house.lines(28).await.iter().all(|line| line.verdict() == "missed(timeout_total)"));
    house.end().await;
}

// --- lists of models ---

fn for_model(model: &str) -> Value {
    let mut body = stream();
    body["model"] = json!(model);
    body
}

/// Answers a model that it has, and 404 for any other.
fn serves(face: &Face) -> impl Fn(&Received) -> Script + Send + Sync + 'static + use<> {
    let models = Arc::clone(&face.models);
    move |request| match models.lock().iter().any(|model| request.json()["model"] == *model) {
        true => good(),
        false => status(404),
    }
}

/// C84
#[tokio::test(start_paused = true)]
async fn c84_a_request_for_an_adapter_goes_to_the_replicas_that_list_it() {
    for (more, times) in [("balance: least_work", 40), ("balance: round_robin", 10), ("balance: prefix_affinity", 10)] {
        let house = House::new(&two().with(more));
        let faces = [Face::well(&["base"]), Face::well(&["base", "lora_3"])];
        let [first, second] =
            [("e1", 0), ("e2", 1)].map(|(host, n)| engine(&house, host, &faces[n], serves(&faces[n])));
        let _probes = house.probe();
        until(&house, 100).await;
        let ask = async |model: &str, times: usize| {
            let answers =
                join_all((0..times).map(|_| async { house.chat(for_model(model)).await.whole().await })).await;
            answers.iter().filter(|answer| answer.status == 200).count()
        };
        assert_eq!((ask("lora_3", times).await, posts(&first), posts(&second)), (times, 0, times));
        assert_eq!(ask("base", 12).await, 12);
        if !more.contains("prefix") {
            assert!(posts(&first) >= 3, "both have it: {}", posts(&first));
        }
        // Loaded on one replica after the other, and asked for from the first second.
        faces[0].loads("lora_4");
        until(&house, 1_300).await;
        assert_eq!(ask("lora_4", 10).await, 10);
        faces[1].loads("lora_4");
        until(&house, 2_500).await;
        assert_eq!(ask("lora_4", 10).await, 10);
        // Of a model that nobody lists anybody is asked.
        assert_eq!(ask("unknown", 2).await, 0);
        house.end().await;
    }
}

/// On every path, with seats and without, and also where the only one that has it is busy or gone.
#[tokio::test(start_paused = true)]
async fn c84_every_request_for_an_adapter_goes_to_an_engine_that_lists_it() {
    let with_model = |mut body: Value| {
        body["model"] = json!("lora_3");
        body
    };
    let others = [("/v1/embeddings", json!({"input": "hi"})), ("/tokenize", json!({"prompt": "hi"})), (CHAT, unary())];
    let asked = dialects().into_iter().map(|spoken| (spoken.path, spoken.ask)).chain(others);
    let asked: Vec<_> = asked.map(|(path, body)| (path, with_model(body))).collect();
    for more in [None, Some("max_concurrency_per_engine: 1"), Some("balance: round_robin")] {
        let yaml = more.map_or(two(), |more| two().with(more)).class("queue: {max_wait: 60s}");
        let house = House::new(&yaml);
        let faces = [Face::well(&["base"]), Face::well(&["base", "lora_3"])];
        let plays = |request: &Received| match dialects().into_iter().find(|spoken| spoken.path == request.target) {
            Some(spoken) if request.json()["stream"] == true => spoken.closes(spoken.tokens([50])),
            _ => Script::json(200, whole_answer()),
        };
        let first = engine(&house, "e1", &faces[0], |_| status(404));
        let second = engine(&house, "e2", &faces[1], plays);
        let _probes = house.probe();
        until(&house, 100).await;
        // One after the other, and all at once.
        for (path, body) in &asked {
            assert_eq!(house.post(path, body.clone()).await.whole().await.status, 200, "{path}");
        }
        let all =
            join_all(asked.iter().map(|(path, body)| async { house.post(path, body.clone()).await.whole().await }))
                .await;
        assert!(all.iter().all(|answer| answer.status == 200), "{more:?}: {all:?}");
        assert_eq!((posts(&first), posts(&second)), (0, 2 * asked.len()), "{more:?}");
        // Nobody else is asked for what only one has that is gone.
        faces[1].health(503);
        let now = millis(house.clock.now());
        until(&house, now + 3_000).await;
        let gone = house.chat(for_model("lora_3")).await.whole().await;
        assert_eq!((gone.status.as_u16(), gone.header("x-goodput-reason")), (503, Some("no_engine")), "{more:?}");
        assert_eq!(posts(&first), 0);
        house.lines(2 * asked.len() + 1).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c84_an_alias_is_looked_up_by_the_name_that_engines_know() {
    let house = House::new(&two().routes("  - {model: lora_3, pools: a}").top("models: {aliases: {nick: lora_3}}"));
    let faces = [Face::well(&["base"]), Face::well(&["base", "lora_3"])];
    let [first, second] = [("e1", 0), ("e2", 1)].map(|(host, n)| engine(&house, host, &faces[n], serves(&faces[n])));
    let _probes = house.probe();
    until(&house, 100).await;
    for _ in 0..10 {
        assert_eq!(house.chat(for_model("nick")).await.whole().await.status, 200);
    }
    assert_eq!((posts(&first), posts(&second)), (0, 10));
    house.end().await;
}

// --- what comes back ---

/// C102
#[tokio::test(start_paused = true)]
async fn c102_no_header_of_the_gateway_and_no_inner_address_comes_from_an_engine() {
    const INNER: &[(&str, &str)] = &[
        ("content-type", "application/json"),
        ("x-goodput-pool", "theirs"),
        ("x-goodput-reason", "theirs"),
        ("x-goodput-made-up", "theirs"),
        ("x-slo-class", "theirs"),
        ("x-slo-made-up", "theirs"),
        ("x-ratelimit-remaining-tokens", "7"),
        ("request-id", "theirs"),
        ("request_id", "theirs"),
        ("x_goodput_pool", "theirs"),
        ("X-Goodput_Reason", "theirs"),
        ("x_slo-class", "theirs"),
        ("x_request_id", "theirs"),
        ("location", "http://10.0.0.5:8000/x"),
        ("content-location", "//10.0.0.5/x"),
        ("link", "<http://10.0.0.5:8000/x>; rel=next"),
        ("refresh", "0; url=http://10.0.0.5:8000/x"),
        ("alt-svc", "h2=\"10.0.0.5:8000\""),
        ("via", "1.1 inner-proxy"),
        ("x-ratelimit-policy", "passes"),
        ("retry-after", "7"),
    ];
    for code in [200, 307, 400] {
        let (house, _engine) = House::playing(Script::answer(code, INNER, whole_answer()));
        let answer = house.chat(unary()).await.whole().await;
        assert_eq!(answer.status.as_u16(), code);
        let shown: Vec<_> = answer.headers.iter().map(|(name, value)| format!("{name}: {value:?}")).collect();
        assert!(!shown.iter().any(|field| field.contains("theirs") || field.contains("inner")), "{shown:?}");
        assert!(!shown.iter().any(|field| field.contains("10.0.0.5")), "{shown:?}");
        assert_eq!(answer.header("x-ratelimit-remaining-tokens"), None);
        assert_eq!((answer.header("x-ratelimit-policy"), answer.header("retry-after")), (Some("passes"), Some("7")));
        house.line().await;
        house.end().await;
    }
    let fields: &[(&str, &str)] = &[("location", "/v1/chat/completions/")];
    let (house, _engine) = House::playing(Script::answer(307, fields, ""));
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!(answer.header("location"), Some("/v1/chat/completions/"), "a path of the gateway's own");
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c102_an_unknown_status_is_an_invalid_response() {
    for code in ["999", "600", "700", "000", "099"] {
        let head = format!("HTTP/1.1 {code} Strange\r\ncontent-length: 2\r\n\r\n{{}}");
        let (house, engine) = House::playing(Script::new().at(10).write(head));
        let answer = house.chat(unary()).await.whole().await;
        assert_eq!(
            (answer.status.as_u16(), answer.header("x-goodput-reason")),
            (502, Some("engine_garbage")),
            "{code}"
        );
        assert_eq!(engine.log().requests().len(), 2, "tried again, as after any answer that broke off");
        assert_eq!(house.line().await.verdict(), "missed(upstream_error)");
        house.end().await;
    }
}

/// C109: what an engine says to the pool's key is nothing to a client.
#[tokio::test(start_paused = true)]
async fn c109_an_engine_that_rejects_the_pools_key_gives_a_502() {
    for code in [401, 403] {
        let told = json!({"error": {"message": "in its own words", "code": code}});
        let event = Script::stream().say(r()).at(20).say(told.to_string()).say(d()).end();
        for script in [status(code), event] {
            for key in [None, Some("api_key_file: engine.key")] {
                let yaml = Yaml::default();
                let house = House::new(&key.map_or(yaml.clone(), |key| yaml.engine(key)));
                house.engine("e1", vec![script.clone()]);
                let answer = house.chat(stream()).await.whole().await;
                assert_eq!(
                    (answer.status.as_u16(), answer.header("x-goodput-reason")),
                    (502, Some("engine_key_refused"))
                );
                assert!(!answer.text().contains("own words"));
                let line = house.line().await;
                assert_eq!((line.verdict(), line.number("attempts")), ("missed(upstream_error)".into(), Some(1.0)));
                assert_eq!(house.states("a"), ["up"]);
                house.end().await;
            }
        }
    }
}

/// C109, where the engine says it in a body of 200 that is no stream, in one piece or several.
#[tokio::test(start_paused = true)]
async fn c109_a_rejected_key_in_a_non_streaming_200_gives_a_502() {
    let bodies = [
        json!({"error": {"message": "in its own words", "code": 401}}),
        json!({"error": {"message": "in its own words", "type": "permission_error", "code": null}}),
        json!({"object": "error", "message": "in its own words", "code": 401}),
        json!({"message": "in its own words", "status": 403}),
    ];
    let json_type: &[(&str, &str)] = &[("content-type", "application/json")];
    for body in bodies {
        let text = body.to_string();
        let split = |script: Script, size| {
            text.as_bytes().chunks(size).fold(script, |script, piece| script.put(piece.to_vec()))
        };
        let known_length =
            format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", text.len());
        let (front, back) = text.split_at(9);
        let scripts = [
            Script::json(200, text.clone()),
            split(Script::new().open_with(200, json_type), 1).end(),
            split(Script::new().open_until_close(200, json_type), 7).close(),
            Script::new().write(known_length + front).at(50).write(back.to_owned()),
        ];
        for (script, asked) in scripts.iter().flat_map(|script| [(script, unary()), (script, stream())]) {
            let (house, _engine) = House::playing(script.clone());
            let answer = house.chat(asked).await.whole().await;
            assert_eq!(
                (answer.status.as_u16(), answer.header("x-goodput-reason")),
                (502, Some("engine_key_refused")),
                "{body}"
            );
            assert!(!answer.text().contains("own words"));
            let line = house.line().await;
            assert_eq!((line.verdict(), line.number("attempts")), ("missed(upstream_error)".into(), Some(1.0)));
            assert_eq!(house.states("a"), ["up"]);
            house.end().await;
        }
    }
    // An answer that only looks like one at first is whole, and an error of another kind is the engine's to tell.
    for (body, verdict) in [
        (json!({"code": 7, "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}), "met"),
        (json!({"error": {"message": "in its own words", "code": 400}}), "excluded(invalid_request)"),
    ] {
        let text = body.to_string();
        let (front, back) = text.split_at(5);
        let script = Script::new().open_with(200, json_type).put(front.to_owned()).at(50).put(back.to_owned()).end();
        let (house, _engine) = House::playing(script);
        let answer = house.chat(unary()).await.whole().await;
        assert_eq!((answer.text(), house.line().await.verdict().as_str()), (text, verdict));
        house.end().await;
    }
    // One that keeps the connection awake by white space is not held back.
    let body = json!({"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}).to_string();
    let script = Script::new().open_with(200, json_type).at(10).put(" ").at(900).put(body).end();
    let (house, _engine) = House::playing_with(&Yaml::default().promise(&[("e2e_seconds", 5.0)]), script);
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.at, answer.moments()), (at(10), vec![10, 900]));
    house.line().await;
    house.end().await;
}

/// C109, where the client has a head of the gateway's own, or text, before the engine says it.
#[tokio::test(start_paused = true)]
async fn c109_a_rejected_key_after_a_head_is_an_error_event() {
    let told = json!({"error": {"message": "in its own words", "code": 401}}).to_string();
    let late = |script: Script| script.at(700);
    let scripts = [
        ("a status", late(Script::new()).reply(401, &[("content-type", "application/json")], told.clone())),
        ("a status", late(Script::new()).reply(403, &[], "")),
        ("an event", late(Script::stream()).say(&told).say(d()).end()),
        ("an event behind its head", late(Script::new()).open().say(r()).say(&told).end()),
        ("a tail", late(Script::stream()).say(r()).put(format!("data: {told}")).end()),
        ("an event of its own name", late(Script::stream()).put(format!("event: error\ndata: {told}\n\n")).silence()),
    ];
    for ((how, script), dialect) in scripts.iter().flat_map(|script| [(script, CHAT), (script, "/v1/messages")]) {
        let yaml = Yaml::default().class("hold_head: 100ms").class("keepalive_seconds: 0.2");
        let (house, _engine) = House::playing_with(&yaml, script.clone());
        let mut body = stream();
        body["max_tokens"] = json!(9);
        let answer = house.post(dialect, body).await.whole().await;
        assert_eq!(answer.status, 200, "{how}");
        let last = answer.events().pop().unwrap();
        assert!(last.contains("Your key is not the problem"), "{how}: {last}");
        assert!(!answer.text().contains("own words"), "{how}: {}", answer.text());
        let line = house.line().await;
        assert_eq!(
            (line.verdict(), line.text("refusal")),
            ("missed(upstream_error)".into(), "engine_key_refused"),
            "{how}"
        );
        assert_eq!((line.tokens().1, house.states("a")), (None, vec!["up"]), "{how}");
        house.end().await;
    }
    // Behind text what has come is out, and is charged.
    let script = Script::stream().at(10).say(t("a")).say(t("b")).say(&told).say(d()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    let events = answer.events();
    assert_eq!(events[..2], [t("a"), t("b")]);
    assert!(events.len() == 3 && events[2].contains("Your key is not the problem"), "{events:?}");
    let line = house.line().await;
    assert_eq!((line.verdict(), line.tokens().1), ("missed(upstream_error)".into(), Some(2)));
    house.end().await;
    // Of its own key a client reads what the engine says.
    let script = Script::stream().at(10).say(t("a")).say(&told).say(d()).end();
    let (house, _engine) = House::playing_with(&Yaml::default().engine("forward_authorization: true"), script);
    let answer = house.send(Ask::post(CHAT, stream()).header("authorization", "Bearer sk-own")).await.whole().await;
    assert!(answer.text().contains("own words"));
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_whose_credential_is_forwarded_gets_the_engines_own_response() {
    for key in [None, Some("Bearer sk-own")] {
        let (house, _engine) = House::playing_with(&Yaml::default().engine("forward_authorization: true"), status(401));
        let ask = Ask::post(CHAT, stream());
        let answer = house.send(key.map_or(Ask::post(CHAT, stream()), |key| ask.header("authorization", key))).await;
        let answer = answer.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (401, None));
        house.line().await;
        house.end().await;
    }
}

//! Operators' requirements: closed label sets, no secret in any output, faults of the gateway
//! (`docs/cases.md`, metrics and logs).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use crate::support::scripted_engine::{Script, ScriptedEngine, fixtures::*};
use bytes::Bytes;
use http::{Method, Request};
use http_body::{Body, Frame};
use parking_lot::Mutex;
use rand::distr::{Alphanumeric, SampleString};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tracing_subscriber::fmt::MakeWriter;

use crate::support::*;

fn good() -> Script {
    Script::stream().at(10).say(r()).say(t("a")).say(f("stop")).say(d()).end()
}

fn keyed() -> Yaml {
    let hash = blake3::hash(b"sk-CANARY1").to_hex().to_string();
    Yaml::default()
        .engine("api_key_file: canary3")
        .top(&format!("tenants:\n  - {{tenant: acme, keys: [{{label: prod, blake3: \"{hash}\"}}]}}"))
}

#[tokio::test(start_paused = true)]
async fn c68_nothing_that_a_client_sends_makes_a_series() {
    let (house, _engine) = House::playing_with(&keyed(), Script::json(200, whole("x", 5, 1)));
    let mut chance = StdRng::seed_from_u64(68);
    let mut word = || Alphanumeric.sample_string(&mut chance, 12);
    let valid = |ask: Ask| ask.header("authorization", "Bearer sk-CANARY1");
    house.send(valid(Ask::post(CHAT, unary()))).await.whole().await;
    let before = house.page();
    for number in 0..5000 {
        if number % 1000 == 0 {
            // Access lines leave every ten milliseconds.
            house.sleep(ms(20)).await;
        }
        let mut body = unary();
        body["model"] = json!(word());
        body["user"] = json!(word());
        let ask = valid(Ask::post(CHAT, body)).header("x-request-id", &word()).header(&word(), &word());
        house.send(ask).await.whole().await;
        house.send(valid(Ask::of(Method::POST, &format!("/v1/{}", word())))).await.whole().await;
        house.send(Ask::post(CHAT, unary()).header("x-api-key", &word())).await.whole().await;
    }
    let after = house.page();
    assert_eq!(after.sum("goodput_requests_finished_total", &[]), 15_001.0);
    assert_eq!(after.len(), before.len(), "series came with requests");
    assert_eq!(after.sum("slo_total", &[("model", "other")]), 5000.0);
    house.end().await;
}

/// Captured log lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;
    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}

#[tokio::test(start_paused = true)]
async fn c69_no_key_prompt_or_query_in_any_output() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(log.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    tracing::trace!("it listens");

    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("journal");
    let telemetry = format!(
        "telemetry: {{journal: {{path: \"{}\"}}, otlp: {{endpoint: \"http://collector\", ratio: 1}}}}",
        journal.display()
    );
    let house = House::new(&keyed().top(&telemetry));
    let collector = house.engine("collector", vec![Script::answer(200, &[], "")]);
    let engine = house.engine(
        "e1",
        vec![
            good(),
            Script::new().at(10).reset(),
            Script::new().at(10).reset(),
            Script::stream().at(10).say(t("a")).reset(),
            Script::new().at(10).reply(500, &[], "{}"),
            Script::new().at(10).reply(400, &[], "{}"),
            Script::new().at(10).write("SSH-2.0-x\r\n").close(),
            Script::stream().at(10).say(t("a")).silence(),
        ],
    );
    let mut outputs = Vec::new();
    let body = json!({
        "model": "m1", "stream": true, "user": "CANARY4", "metadata": {"note": "CANARY4"},
        "messages": [{"role": "user", "content": "CANARY4"}],
    });
    let target = format!("{CHAT}?key=CANARY5");
    let keys = [
        ("authorization", "Bearer sk-CANARY1"),
        ("x-api-key", "sk-CANARY1"),
        ("authorization", "Bearer sk-CANARY2"),
        ("x-api-key", "sk-CANARY2"),
        ("authorization", "sk-CANARY2"),
    ];
    for (name, key) in keys {
        for body in [body.to_string(), body.to_string()[..60].to_owned(), "CANARY4".to_owned()] {
            let reply = house.send(Ask::raw(&target, body).header(name, key)).await;
            let taken = tokio::time::timeout(ms(200), reply.whole()).await;
            outputs.extend(taken.map(|answer| format!("{:?}{}", answer.headers, answer.text())).ok());
        }
    }
    for _ in 0..8 {
        let reply = house.send(Ask::post(&target, body.clone()).header("x-api-key", "sk-CANARY1")).await;
        let taken = tokio::time::timeout(ms(200), reply.whole()).await;
        outputs.extend(taken.map(|answer| format!("{:?}{}", answer.headers, answer.text())).ok());
    }
    // Unknown paths and models are logged; queries never are.
    for path in ["/v1/models?key=CANARY5", "/v1/models/nobody?key=CANARY5", "/nothing?key=CANARY5"] {
        let ask = Ask::of(Method::GET, path).header("authorization", "Bearer sk-CANARY1");
        let answer = house.send(ask).await.whole().await;
        outputs.push(format!("{:?}{}", answer.headers, answer.text()));
    }
    // The same over connections, whose server logs too.
    let head = format!("POST {target} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer sk-CANARY1\r\n");
    let mut client = house.connect(64 * 1024);
    client.send(format!("{head}content-length: {}\r\n\r\n{body}", body.to_string().len())).await;
    house.sleep(ms(50)).await;
    drop(client);
    let mut client = house.connect(64 * 1024);
    client.send(format!("{head}content-length: 900\r\ncontent-length: 3\r\n\r\nCANARY4")).await;
    outputs.push(String::from_utf8_lossy(&client.read_to_end().await.0).into_owned());
    let mut client = house.connect_h2().await;
    let mut request = h2_post(&target, &body);
    request.headers_mut().insert("authorization", "Bearer sk-CANARY1".parse().unwrap());
    let answer = client.send_request(request).await.unwrap();
    drop((answer, client));
    house.sleep(ms(5000)).await;

    assert!(engine.log().requests().len() > 8);
    assert!(engine.log().requests().iter().all(|request| request.header("authorization") == Some("Bearer sk-CANARY3")));
    outputs.push(house.page().text);
    outputs.push(house.written());
    outputs.push(house.open_page());
    outputs.push(std::fs::read_to_string(&journal).unwrap());
    assert!(outputs.last().unwrap().lines().count() > 20);
    let batches = collector.log().requests();
    assert!(!batches.is_empty());
    outputs.extend(batches.iter().map(|batch| String::from_utf8_lossy(&batch.body).into_owned()));
    outputs.push(format!("{:?}", house.gateway.live.load().settings));
    let logged = String::from_utf8_lossy(&log.0.lock()).into_owned();
    assert!(logged.contains("it listens"));
    outputs.push(logged);
    for output in &outputs {
        for canary in ["CANARY1", "CANARY2", "CANARY3", "CANARY4", "CANARY5"] {
            let at = output.find(canary);
            let around = at.map(|at| &output[at.saturating_sub(200)..(at + 50).min(output.len())]);
            assert_eq!(around, None, "{canary} is in an output");
        }
    }
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_access_line_names_the_endpoint_and_unknown_paths_and_models() {
    let yaml = Yaml::default().routes("  - {model: [m1], pools: [a]}");
    let (house, _engine) = House::playing_with(&yaml, Script::json(200, whole("x", 5, 1)));
    let get = |path: &str| Ask::of(Method::GET, path);
    let unknown = |model: &str| Ask::post(CHAT, json!({"model": model, "messages": []}));
    let long = "x".repeat(500);
    let asks = [
        (Ask::post("/v1/chat/completions/?key=CANARY", unary()), Some("/v1/chat/completions"), None),
        (get("/v1/models/nobody%0a?CANARY"), Some("/v1/models/{id}"), Some("nobody\\n")),
        (get("/health?CANARY"), Some("/health"), None),
        (Ask::post("/v1/chat/completion?key=CANARY", unary()), None, Some("/v1/chat/completion")),
        (get("/v1/chat/completions?key=CANARY"), None, None),
        (unknown("gpt-5\u{1b}[2J"), Some(CHAT), Some("gpt-5\\u{1b}[2J")),
        (unknown(&long), Some(CHAT), Some(&long[..128])),
        (Ask::post(CHAT, json!({"messages": []})), Some(CHAT), None),
    ];
    for (number, (ask, endpoint, asked)) in asks.into_iter().enumerate() {
        house.send(ask).await.whole().await;
        let line = house.lines(number + 1).await.remove(number);
        assert_eq!((line.0["endpoint"].as_str(), line.0["asked"].as_str()), (endpoint, asked));
        assert!(!line.0.to_string().contains("CANARY"), "{}", line.0);
    }
    house.end().await;
}

/// Unknown paths and models are logged once a minute, with the number left out.
#[tokio::test(start_paused = true)]
async fn an_unknown_path_is_logged_once_a_minute() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let house = House::new(&Yaml::default());
    for (wait, path) in [(0, "/first"), (10, "/second"), (30_000, "/third"), (30_000, "/fourth?key=1")] {
        house.sleep(ms(wait)).await;
        house.send(Ask::of(Method::GET, path)).await.whole().await;
    }
    house.lines(4).await;
    house.end().await;
    let logged = String::from_utf8_lossy(&log.0.lock()).into_owned();
    let told: Vec<&str> = logged.lines().filter(|line| line.contains("request for an unknown path")).collect();
    assert_eq!(told.len(), 2, "{logged}");
    assert!(told[0].contains("/first\"") && told[0].contains("untold=0"), "{logged}");
    assert!(told[1].contains("/fourth\"") && told[1].contains("untold=2"), "{logged}");
}

#[tokio::test(start_paused = true)]
async fn rejections_name_no_engine() {
    for script in [Script::new().reset(), Script::new().write("x\r\n\r\n").close(), Script::new().silence()] {
        let yaml = Yaml::default().class("timeouts: {first_token: 600ms}");
        let (house, _engine) = House::playing_with(&yaml, script);
        let answer = house.chat(stream()).await.whole().await;
        assert!(answer.status.is_server_error());
        assert!(!answer.text().contains("e1:") && !format!("{:?}", answer.headers).contains("e1:"));
        house.line().await;
        house.end().await;
    }
}

/// A request body that fails unexpectedly.
struct Panics;

impl Body for Panics {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        panic!("a body that panics")
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_one_internal_miss_and_a_500() {
    let house = House::new(&Yaml::default());
    let request = Request::post(CHAT).header("host", "g").body(Panics).unwrap();
    let answer = house.send_body(request).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (500, Some("internal")));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.number("status")), ("missed(internal)".into(), Some(500.0)));
    assert_eq!(line.text("refusal"), "internal");
    let page = house.page();
    assert_eq!(page.sum("slo_total", &[("class", "chat")]), 1.0, "a miss before a class is the default's");
    assert_eq!(page.sum("goodput_refused_total", &[("code", "internal")]), 1.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn every_series_is_there_from_the_start() {
    let yaml = Yaml::default().pool("b", &["f1"]).routes("  - {model: [m1, \"llama-*\", \"*\"], pools: [a, b]}");
    let house = House::new(&yaml);
    let page = house.page();
    for pool in ["a", "b"] {
        for model in ["m1", "llama-*", "other"] {
            for length in ["short", "medium", "long", "unknown"] {
                let labels = [("class", "chat"), ("length", length), ("pool", pool), ("model", model)];
                assert_eq!((page.count("slo_total", &labels), page.sum("slo_total", &labels)), (1, 0.0), "{labels:?}");
                assert_eq!(page.count("slo_met_total", &labels), 1);
            }
        }
    }
    house.end().await;
}

/// Any mixture of endings, drops and refusals: each request ends once. `House::end` holds the
/// law against the metrics and the access lines.
#[tokio::test(start_paused = true)]
async fn met_and_missed_and_excluded_are_all_that_finished() {
    let mut chance = StdRng::seed_from_u64(4);
    let yaml = Yaml::default()
        .engines_of_first(&["e1", "e2", "e3"])
        .pool("b", &["f1"])
        .class("timeouts: {first_token: 2s, idle: 400ms, total: 5s}")
        .class("hold_head: 150ms")
        .class("keepalive_seconds: 0.1");
    let house = House::new(&yaml);
    let scripts = |chance: &mut StdRng| -> Vec<Script> {
        (0..200)
            .map(|_| {
                let start = chance.random_range(1..700);
                let script = match chance.random_range(0..9) {
                    0 => return Script::new().at(start).reset(),
                    1 => return Script::new().silence(),
                    2 => return Script::new().at(start).reply(503, &[("retry-after", "1")], "{}"),
                    3 => return Script::new().at(start).reply(500, &[], "{}"),
                    4 => return Script::new().at(start).reply(400, &[], "{}"),
                    5 => {
                        return Script::new().at(start).reply(
                            200,
                            &[("content-type", "application/json")],
                            whole("x", 5, 9),
                        );
                    }
                    _ => Script::stream().at(start / 2).say(r()).at(start),
                };
                let tokens = chance.random_range(0..6);
                let script =
                    (0..tokens).fold(script, |script, _| script.wait(ms(chance.random_range(1..90))).say(t("a")));
                match chance.random_range(0..6) {
                    0 => script.reset(),
                    1 => script.end(),
                    2 => script.silence(),
                    3 => script.say(error("x", [400, 500, 503][chance.random_range(0..3)])).say(d()).end(),
                    _ => script.say(f("stop")).say(u(5, 4)).say(d()).end(),
                }
            })
            .collect()
    };
    for host in ["e1", "e2", "e3", "f1"] {
        house.engine(host, scripts(&mut chance));
    }
    let total = 400;
    for _ in 0..total {
        let body = match chance.random_range(0..8) {
            0 => json!({"model": 3}),
            1 | 2 => unary(),
            3 => stream_with_usage(),
            _ => stream(),
        };
        let patience = ms(chance.random_range(1..3000));
        let client = goodput::types::ClientState::default();
        let exchange = async {
            let reply = house.send(Ask::post(CHAT, body).client(&client)).await;
            reply.whole().await
        };
        let _ = tokio::time::timeout(patience, exchange).await;
    }
    let lines = house.lines(total).await;
    assert_eq!(lines.len(), total);
    let kinds: std::collections::BTreeSet<String> = lines.iter().map(Line::verdict).collect();
    assert!(kinds.len() >= 8, "{kinds:?}");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_series_of_a_removed_engine_stay_for_ten_minutes() {
    let house = House::new(&Yaml::default().engines_of_first(&["e1"]));
    let up = |house: &House, engine| {
        let labels = [("pool", "a"), ("engine", engine)];
        let page = house.page();
        (page.count("goodput_engine_up", &labels), page.sum("goodput_engine_up", &labels))
    };
    assert_eq!(up(&house, "e1:8000"), (1, 1.0));
    house.reload(&Yaml::default().engines_of_first(&["e2"]));
    house.sleep(ms(599_000)).await;
    assert_eq!((up(&house, "e1:8000"), up(&house, "e2:8000")), ((1, 0.0), (1, 1.0)));
    // Nobody looks while the second one leaves and is forgotten; its whole pool goes last.
    house.reload(&Yaml::default().engines_of_first(&["e3"]));
    house.sleep(ms(601_000)).await;
    assert_eq!((up(&house, "e2:8000"), up(&house, "e3:8000")), ((0, 0.0), (1, 1.0)));
    house.reload(&Yaml::default().no_pools().pool("b", &["f1"]));
    house.sleep(ms(601_000)).await;
    assert_eq!(up(&house, "e3:8000"), (0, 0.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c70_an_engine_that_refuses_connections_is_ejected_at_once() {
    let house = House::new(&Yaml::default().engines_of_first(&["e1", "e2"]));
    let works = house.engine("e2", vec![good()]);
    for _ in 0..20 {
        let answer = house.chat(stream()).await.whole().await;
        assert_eq!(answer.status, 200, "no client sees it");
    }
    assert_eq!(house.network.dials("e1"), 1);
    assert_eq!(works.log().requests().len(), 20);
    assert!(house.lines(20).await.iter().all(|line| line.verdict() == "met"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c70_an_engine_whose_readiness_is_off_gets_no_new_requests_and_finishes_the_old() {
    let yaml = Yaml::default()
        .promise(&[("ttft_seconds", 0.5)])
        .engines_of_first(&["e1", "e2"])
        .with("balance: round_robin")
        .with("health: {path: /health, every: 1s, timeout: 1s}");
    let house = House::new(&yaml);
    let ready = Arc::new(AtomicBool::new(true));
    let engine = |ready: Arc<AtomicBool>| {
        ScriptedEngine::new(house.clock, move |request| match request.target.as_str() {
            CHAT => Script::stream().at(10).say(t("a")).at(9000).say(f("stop")).say(d()).end(),
            "/health" if ready.load(Ordering::Relaxed) => Script::json(200, "{}"),
            "/health" => Script::json(503, "{}"),
            "/v1/models" => Script::json(200, r#"{"data":[{"id":"m1"}]}"#),
            _ => Script::json(404, "{}"),
        })
    };
    let (going, staying) = (engine(Arc::clone(&ready)), engine(Arc::new(AtomicBool::new(true))));
    house.network.engine("e1", &going);
    house.network.engine("e2", &staying);
    let _probes = house.probe();
    let asked =
        |engine: &ScriptedEngine| engine.log().requests().iter().filter(|request| request.target == CHAT).count();
    let open = [house.chat(stream()).await, house.chat(stream()).await];
    assert_eq!((asked(&going), asked(&staying)), (1, 1));
    ready.store(false, Ordering::Relaxed);
    house.sleep(ms(4000)).await;
    assert_eq!(house.states("a"), ["down", "up"]);
    for _ in 0..6 {
        drop(house.chat(stream()).await);
    }
    assert_eq!((asked(&going), asked(&staying)), (1, 7));
    for open in open {
        assert!(open.whole().await.text().ends_with("[DONE]\n\n"));
    }
    ready.store(true, Ordering::Relaxed);
    house.sleep(ms(20_000)).await;
    assert_eq!(house.states("a"), ["up", "up"]);
    house.lines(8).await;
    house.end().await;
}

/// An operator drains an engine under load: its requests finish, no new ones come, and it returns.
#[tokio::test(start_paused = true)]
async fn a_drained_engine_gets_no_new_requests_and_finishes_the_old() {
    let yaml = Yaml::default().engines_of_first(&["e1", "e2"]).with("balance: round_robin");
    let house = House::new(&yaml);
    let slow = || Script::stream().at(10).say(r()).say(t("a")).at(5000).say(f("stop")).say(d()).end();
    let (first, second) = (house.engine("e1", vec![slow()]), house.engine("e2", vec![good()]));
    let (pool, e1, e2) = ("a".into(), "e1:8000".into(), "e2:8000".into());
    house.gateway.drain_engine(&pool, &e2, None, false).unwrap();
    let old = house.chat(stream()).await;
    house.gateway.put_back_engine(&pool, &e2).unwrap();
    let drained = house.gateway.drain_engine(&pool, &e1, None, false).unwrap();
    assert_eq!((drained.requests, drained.takes_requests()), (1, false));
    for _ in 0..10 {
        assert_eq!(house.chat(stream()).await.whole().await.status, 200);
    }
    assert_eq!((first.log().requests().len(), second.log().requests().len()), (1, 10));
    let told = |house: &House, name: &str| house.page().sum(name, &[("pool", "a"), ("engine", "e1:8000")]);
    assert_eq!((told(&house, "goodput_engine_drained"), told(&house, "goodput_engine_up")), (1.0, 0.0));
    house.reload(&yaml);
    assert_eq!(told(&house, "goodput_engine_drained"), 1.0, "a reload changes nothing");
    assert!(old.whole().await.text().contains("[DONE]"));
    house.gateway.put_back_engine(&pool, &e1).unwrap();
    assert_eq!((told(&house, "goodput_engine_drained"), told(&house, "goodput_engine_up")), (0.0, 1.0));
    for _ in 0..2 {
        house.chat(stream()).await.whole().await;
    }
    assert_eq!((first.log().requests().len(), second.log().requests().len()), (2, 11));
    house.end().await;
}

/// A miss records its attempts, with the failure of each.
#[tokio::test(start_paused = true)]
async fn a_recent_miss_lists_the_engines_tried_and_their_failures() {
    let yaml =
        Yaml::default().promise(&[("ttft_seconds", 0.5)]).engines_of_first(&["e1", "e2"]).with("balance: round_robin");
    let house = House::new(&yaml);
    let late = Script::stream().at(900).say(r()).say(t("a")).at(1200).say(f("stop")).say(d()).end();
    let refuses = Script::json(503, "{}");
    let (_first, _second) = (house.engine("e1", vec![refuses]), house.engine("e2", vec![late]));
    house.chat(stream()).await.whole().await;
    house.chat(stream()).await.whole().await;
    let misses = house.gateway.recorder.recent_misses();
    let tried = |engine: &str| {
        misses.iter().flat_map(|miss| &miss.attempts).filter(|attempt| attempt.engine.as_str() == engine).count()
    };
    assert_eq!((misses.len(), tried("e2:8000")), (2, 2), "{misses:?}");
    let failed = misses.iter().find(|miss| miss.attempts.len() == 2).expect("one was refused first");
    let (first, second) = (&failed.attempts[0], &failed.attempts[1]);
    let failure = first.failure.map(|failure| (failure.what, failure.status));
    assert_eq!((first.engine.as_str(), failure), ("e1:8000", Some(("push_back", Some(503)))));
    assert_eq!((second.engine.as_str(), second.failure), ("e2:8000", None));
    assert!(failed.arrival <= first.begin && first.begin <= second.begin && Some(second.begin) < failed.first_token);
    house.end().await;
}

//! Cases that were found in chat streams, in every dialect that streams: engines that are busy, go
//! away, or come near a limit (from C81 of `docs/cases.md` on).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::scripted_engine::{Received, Script, ScriptedEngine, fixtures::*};
use futures_util::future::{join, join_all};
use serde_json::{Value, json};

use crate::engines::{Face, engine, posts, two, until};
use crate::support::*;

async fn whole_of(house: &House, path: &str, body: &Value) -> Whole {
    house.post(path, body.clone()).await.whole().await
}

/// An engine whose health check falls silent while it sends this response.
async fn stays_up(what: &str, path: &str, body: Value, script: Script, more: &str) {
    let yaml = Yaml::default().class("timeouts: {total: 100s, idle: 100s}");
    let house = House::new(&if more.is_empty() { yaml } else { yaml.with(more) });
    let face = Face::well(&[]);
    let first = engine(&house, "e1", &face, move |_| script.clone());
    let probes = house.probe();
    until(&house, 100).await;
    let (answer, ()) = join(whole_of(&house, path, &body), async {
        until(&house, 800).await;
        face.health(0);
        for second in 1..20 {
            until(&house, second * 1_000).await;
            assert_eq!(house.states("a"), ["up"], "{what} at {second} s");
        }
    })
    .await;
    assert!(answer.status == 200 && answer.end >= at(14_000), "{what}: {answer:?}");
    assert_eq!(posts(&first), 1);
    drop(probes);
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c81_any_part_of_a_response_is_a_sign_of_life() {
    let every = |millis: u64| (1..).map(move |n| n * millis).take_while(|moment| *moment <= 20_000);
    for spoken in dialects() {
        let said = |piece: &str, millis| {
            every(millis)
                .fold(Script::stream().put(spoken.opening.clone()), |script, at| script.at(at).put(piece.to_owned()))
        };
        for (what, script) in [
            ("tokens", said(&spoken.token, 100)),
            ("slow tokens", said(&spoken.token, 1_500)),
            ("reasoning", said(&spoken.hidden, 100)),
            ("calls", said(&spoken.call, 500)),
        ] {
            stays_up(what, spoken.path, spoken.ask.clone(), spoken.closes(script), "").await;
        }
    }
    // Half characters, which only usage shows.
    let rises = (1..).zip(every(500)).fold(Script::stream().say(with_usage(&t("a"), 9, 1)), |script, (n, at)| {
        script.at(at).say(with_usage(&t(""), 9, 1 + n))
    });
    stays_up("rises of usage", CHAT, stream(), rises.say(f("stop")).say(d()).end(), "").await;
    // Responses that are not token streams: audio, a transcript, a long response.
    let sound: &[(&str, &str)] = &[("content-type", "audio/mpeg")];
    let speech = every(500).fold(Script::new().open_with(200, sound), |script, at| script.at(at).put("....")).end();
    let spoken = json!({"model": "m1", "input": "hi"});
    stays_up("sound", "/v1/audio/speech", spoken.clone(), speech, "").await;
    let transcript = every(500).fold(Script::stream(), |script, at| {
        script.at(at).say(json!({"type": "transcript.text.delta", "delta": "a"}).to_string())
    });
    stays_up("a transcript", "/v1/audio/speech", spoken, transcript.end(), "").await;
    let numbers: &[(&str, &str)] = &[("content-type", "application/json")];
    let many = every(1_000)
        .fold(Script::new().open_with(200, numbers).put("{\"data\":[0"), |script, at| script.at(at).put(",1"));
    stays_up("a long answer", "/v1/embeddings", json!({"model": "m1", "input": "hi"}), many.put("]}").end(), "").await;
}

#[tokio::test(start_paused = true)]
async fn c82_a_tool_call_is_written_in_silence_in_every_dialect() {
    for spoken in dialects() {
        for silence in [32_000, 119_000] {
            let script = spoken.tokens([100, 200]).at(200 + silence).put(spoken.call.clone());
            let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5)]);
            let (house, _engine) = House::playing_with(&yaml, spoken.closes(script));
            let answer = whole_of(&house, spoken.path, &spoken.ask).await;
            assert!(
                answer.text().contains("\\\"a\\\":1") && !answer.text().contains("idle_timeout"),
                "{}",
                spoken.path
            );
            assert_eq!(house.line().await.verdict(), "met", "{}", spoken.path);
            assert_eq!(house.page().sum("goodput_stalls_total", &[]), 1.0);
            house.end().await;
        }
        // Comments keep it going for as long as it takes, and hide no stall.
        let begun = spoken.tokens([100]);
        let waits = (1..12).fold(begun, |script, n| script.at(n * 30_000).put(": still here\n\n"));
        let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5)]);
        let (house, _engine) = House::playing_with(&yaml, spoken.closes(waits.at(340_000).put(spoken.call.clone())));
        whole_of(&house, spoken.path, &spoken.ask).await;
        assert_eq!(house.line().await.verdict(), "met", "{}", spoken.path);
        assert_eq!(house.page().sum("goodput_stalls_total", &[]), 1.0);
        house.end().await;
    }
    // A non-streaming response whose head came early.
    let head: &[(&str, &str)] = &[("content-type", "application/json")];
    let late = Script::new().open_with(200, head).at(119_000).put(whole("x", 9, 1)).end();
    let (house, _engine) = House::playing_with(&Yaml::default().promise(&[("e2e_seconds", 300.0)]), late);
    assert_eq!(house.chat(unary()).await.whole().await.status, 200);
    assert_eq!(house.line().await.verdict(), "met");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c85_every_request_moves_to_the_neighbour_of_a_departing_engine() {
    let seats = "max_concurrency_per_engine: 6";
    for (spoken, more) in dialects().into_iter().flat_map(|spoken| [(spoken.clone(), None), (spoken, Some(seats))]) {
        let yaml = two().with("balance: round_robin");
        let house = House::new(&more.map_or(yaml.clone(), |more| yaml.with(more)));
        let faces = [Face::well(&[]), Face::well(&[])];
        // Its events so far had no token.
        let (held, good) = (spoken.tokens([]).silence(), spoken.closes(spoken.tokens([10])));
        let first = engine(&house, "e1", &faces[0], move |_| held.clone());
        let second = engine(&house, "e2", &faces[1], move |_| good.clone());
        let probes = house.probe();
        until(&house, 100).await;
        let requests = join_all((0..6).map(|_| whole_of(&house, spoken.path, &spoken.ask)));
        let (answers, ()) = join(requests, async {
            until(&house, 1_000).await;
            faces[0].health(503);
        })
        .await;
        assert!(answers.iter().all(|answer| answer.status == 200 && answer.end < at(3_500)), "{}", spoken.path);
        let opened = |answer: &Whole| answer.text().matches(spoken.opening.as_str()).count();
        assert!(answers.iter().all(|answer| opened(answer) == 1), "nothing of the first answer is out");
        assert_eq!((posts(&first), posts(&second)), (3, 6));
        drop(probes);
        house.lines(6).await;
        house.end().await;
    }
}

/// Three engines depart one after the other: each takes over the requests of the previous one.
#[tokio::test(start_paused = true)]
async fn c85_a_request_moves_on_as_often_as_engines_depart() {
    let yaml = Yaml::default().engines_of_first(&["e1", "e2", "e3"]).promise(&[("ttft_seconds", 20.0)]);
    let house = House::new(&yaml);
    let faces: Vec<Face> = (0..3).map(|_| Face::well(&[])).collect();
    let asked: Arc<parking_lot::Mutex<Vec<usize>>> = Arc::default();
    for (number, face) in faces.iter().enumerate() {
        let asked = Arc::clone(&asked);
        let plays = move |_: &Received| {
            let mut asked = asked.lock();
            asked.push(number);
            if asked.len() < 3 { Script::new().silence() } else { crate::retries::good() }
        };
        engine(&house, &format!("e{}", number + 1), face, plays);
    }
    let probes = house.probe();
    until(&house, 100).await;
    let (answer, ()) = join(whole_of(&house, CHAT, &stream()), async {
        for second in [1, 5] {
            until(&house, second * 1_000).await;
            let now = *asked.lock().last().expect("somebody has it");
            faces[now].health(503);
        }
    })
    .await;
    assert!(answer.status == 200 && answer.end < at(8_000), "{answer:?}");
    let mut each = asked.lock().clone();
    each.sort_unstable();
    assert_eq!(each, [0, 1, 2]);
    drop(probes);
    assert_eq!(house.line().await.number("attempts"), Some(3.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c98_the_total_limit_of_a_class_is_not_an_engines_fault_in_any_dialect() {
    for spoken in dialects() {
        for (apart, class) in [
            (100, "hold_head: 10s"),
            (800, "hold_head: 10s"),
            // As slow as all of it, and behind a head of the gateway's own.
            (1_400, "hold_head: 10s"),
            (100, "{hold_head: 50ms, keepalive_seconds: 0.2}"),
        ] {
            let yaml = two().class("timeouts: {total: 3s}");
            let yaml = match class.strip_prefix('{') {
                Some(_) => yaml.class("hold_head: 50ms").class("keepalive_seconds: 0.2"),
                None => yaml.class(class),
            };
            let house = House::new(&yaml);
            for host in ["e1", "e2"] {
                let flows = spoken.tokens((1..60).map(|n| n * apart)).silence();
                house.network.engine(host, &ScriptedEngine::new(house.clock, move |_| flows.clone()));
            }
            let answers = join_all((0..14).map(|_| whole_of(&house, spoken.path, &spoken.ask))).await;
            let ended = answers.iter().filter(|answer| answer.text().contains("did not end within 3 s")).count();
            assert_eq!((ended, house.states("a")), (14, vec!["up", "up"]), "{} {apart} {class}", spoken.path);
            let lines = house.lines(14).await;
            assert!(lines.iter().all(|line| line.verdict().starts_with("missed(")), "{} {apart}", spoken.path);
            house.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn c112_open_breakers_reject_no_request_in_any_dialect_or_route() {
    let plain = json!({"model": "m1", "input": "hi"});
    let others = [(CHAT, unary()), ("/v1/embeddings", plain)];
    let asked = dialects().into_iter().map(|spoken| (spoken.path, spoken.ask)).chain(others);
    for (path, body) in asked {
        for pools in [1, 2] {
            let yaml = Yaml::default().engines_of_first(&["e1", "e2"]);
            let yaml = if pools == 2 { yaml.pool("b", &["f1"]) } else { yaml };
            let house = House::new(&yaml);
            let is_well = Arc::new(AtomicBool::new(false));
            for host in ["e1", "e2", "f1"] {
                let is_well = Arc::clone(&is_well);
                let plays = move |request: &Received| match is_well.load(Ordering::Relaxed) {
                    false => Script::new().at(10).reset(),
                    true if request.json()["stream"] == true => dialects()
                        .into_iter()
                        .find(|spoken| spoken.path == request.target)
                        .map(|spoken| spoken.closes(spoken.tokens([3_000])))
                        .expect("a dialect"),
                    true => {
                        Script::new().at(3_000).reply(200, &[("content-type", "application/json")], whole("x", 1, 1))
                    }
                };
                house.network.engine(host, &ScriptedEngine::new(house.clock, plays));
            }
            let all_open = || {
                let of_b = if pools == 2 { house.states("b") } else { Vec::new() };
                house.states("a").into_iter().chain(of_b).all(|state| state == "breaker_open")
            };
            let mut bad = 0;
            while !all_open() {
                whole_of(&house, path, &body).await;
                bad += 1;
                assert!(bad < 100, "{path}: {:?}", house.states("a"));
            }
            is_well.store(true, Ordering::Relaxed);
            let began = house.clock.now();
            let request = async |n: u64| {
                house.clock.sleep_until(Some(began + ms(n * 50))).await;
                whole_of(&house, path, &body).await
            };
            let answers = join_all((0..30).map(request)).await;
            assert!(answers.iter().all(|answer| answer.status == 200), "{path} {pools}: {answers:?}");
            house.lines(30 + bad).await;
            house.end().await;
        }
    }
}

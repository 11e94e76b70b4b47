//! Choice of an engine by prompt, by session and by earlier errors.

use std::pin::pin;

use crate::support::scripted_engine::fixtures::{d, f, r, t};
use crate::support::scripted_engine::{Script, ScriptedEngine};
use futures_util::future::{join, join_all};
use goodput::route::WorkEstimate;
use goodput::types::{ClientState, PoolId, Tokens};
use serde_json::{Value, json};

use crate::retries::good;
use crate::support::{Ask, CHAT, House, Yaml, ms, stream, unary};

const FOUR: [&str; 4] = ["e1", "e2", "e3", "e4"];

fn asked(engines: &[ScriptedEngine]) -> Vec<usize> {
    engines.iter().map(|engine| engine.log().requests().len()).collect()
}

/// How many engines met requests that contain this.
fn met(engines: &[ScriptedEngine], text: &str) -> usize {
    let has = |engine: &&ScriptedEngine| {
        engine.log().requests().iter().any(|request| request.json().to_string().contains(text))
    };
    engines.iter().filter(has).count()
}

fn of_system(number: usize, question: usize) -> Value {
    let system = format!("You are assistant {number:03}. {}", "Be brief. ".repeat(40));
    let mut body = stream();
    body["messages"] = json!([
        {"role": "system", "content": system},
        {"role": "user", "content": format!("question {question}")},
    ]);
    body
}

#[tokio::test(start_paused = true)]
async fn like_prompts_meet_one_engine() {
    let yaml = Yaml::default().engines_of_first(&FOUR).with("balance: prefix_affinity");
    let house = House::new(&yaml);
    let engines = FOUR.map(|host| house.engine(host, vec![good()]));
    for question in 0..5 {
        for system in 0..24 {
            assert_eq!(house.chat(of_system(system, question)).await.whole().await.status, 200);
        }
    }
    assert!((0..24).all(|system| met(&engines, &format!("assistant {system:03}")) == 1));
    assert!(asked(&engines).iter().all(|count| *count > 0), "{:?}", asked(&engines));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_session_keeps_its_engine_until_that_is_gone() {
    let yaml = Yaml::default().engines_of_first(&FOUR).with("balance: session_affinity").with("session_header: x-chat");
    let house = House::new(&yaml);
    let engines = FOUR.map(|host| house.engine(host, vec![good()]));
    let turn = async |session: &str| {
        let mut body = stream();
        body["messages"][0]["content"] = json!(format!("of {session}"));
        let reply = house.send(Ask::post(CHAT, body).header("x-chat", session)).await;
        assert_eq!(reply.whole().await.status, 200);
    };
    let sessions: Vec<_> = (0..12).map(|number| format!("session-{number:03}")).collect();
    for _ in 0..4 {
        for session in &sessions {
            turn(session).await;
        }
    }
    assert!(sessions.iter().all(|session| met(&engines, session) == 1));
    let before = asked(&engines);
    assert!(before.iter().all(|count| *count > 0), "{before:?}");
    // The first name has no engine any more.
    house.reload(&yaml.clone().engines_of_first(&FOUR[1..]));
    for session in &sessions {
        turn(session).await;
    }
    assert_eq!(asked(&engines)[0], before[0]);
    let moved = sessions.iter().filter(|session| met(&engines, session) == 2).count();
    assert_eq!(moved, before[0] / 4, "those of the engine that left, and no others");
    house.end().await;
}

/// A stream with its first token after this many milliseconds, and nine more 10 ms apart.
fn after(millis: u64) -> Script {
    let mut script = Script::stream().at(millis).say(r()).say(t("a"));
    for n in 1..10 {
        script = script.at(millis + 10 * n).say(t("a"));
    }
    script.say(f("stop")).say(d()).end()
}

#[tokio::test(start_paused = true)]
async fn requests_go_to_the_engine_most_likely_to_meet_their_objectives() {
    let yaml = Yaml::default().engines_of_first(&["e1", "e2"]);
    let house = House::new(&yaml);
    let engines = [house.engine("e1", vec![after(100)]), house.engine("e2", vec![after(800)])];
    let (pool, size) = (PoolId::from("a"), WorkEstimate { prefill: Tokens(1), decode: Tokens(100) });
    assert_eq!(house.gateway.fleet.predict(&pool, size, house.clock.now()), None);
    for _ in 0..100 {
        assert_eq!(house.chat(stream()).await.whole().await.status, 200);
        house.sleep(ms(10)).await;
    }
    let learned = asked(&engines);
    assert!(learned[1] >= 25, "by work alone, until enough is known: {learned:?}");
    for _ in 0..200 {
        assert_eq!(house.chat(stream()).await.whole().await.status, 200);
    }
    let later = asked(&engines)[1] - learned[1];
    assert!(later <= 10, "{later} of 200 went to the one that takes 800 of 500 ms");
    let predicted = house.gateway.fleet.predict(&pool, size, house.clock.now()).expect("enough was seen");
    assert!(predicted.tpot.abs_diff(ms(10)) < ms(2), "{predicted:?}");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_teaches_nothing_of_its_engines_latency() {
    for (refuses, verdict, learns) in [(true, "excluded(client_limited)", false), (false, "met", true)] {
        let (house, _engine) = House::playing(after(300));
        let (pool, size) = (PoolId::from("a"), WorkEstimate { prefill: Tokens(1), decode: Tokens(100) });
        for _ in 0..40 {
            let client = ClientState::default();
            if refuses {
                client.refuses(house.clock.now());
            }
            house.send(Ask::post(CHAT, stream()).client(&client)).await.whole().await;
        }
        assert!(house.lines(40).await.iter().all(|line| line.verdict() == verdict));
        assert_eq!(house.gateway.fleet.predict(&pool, size, house.clock.now()).is_some(), learns, "{verdict}");
        house.end().await;
    }
}

/// The tokens of an image are not in the estimate of its prompt.
#[tokio::test(start_paused = true)]
async fn prompts_with_images_teach_nothing_about_prefill() {
    let text = json!({"type": "text", "text": "hi"});
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    for (content, learns) in [(json!([text, image]), false), (json!([text]), true)] {
        let (house, _engine) = House::playing(after(300));
        let (pool, size) = (PoolId::from("a"), WorkEstimate { prefill: Tokens(1), decode: Tokens(100) });
        let mut body = stream();
        body["messages"][0]["content"] = content;
        for _ in 0..40 {
            assert_eq!(house.chat(body.clone()).await.whole().await.status, 200);
        }
        assert_eq!(house.gateway.fleet.predict(&pool, size, house.clock.now()).is_some(), learns);
        house.lines(40).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn seats_that_are_found_out_begin_at_sixty_four_and_others_wait() {
    let yaml = Yaml::default().with("max_concurrency_per_engine: auto");
    let house = House::new(&yaml);
    let engine = house.engine("e1", vec![after(100)]);
    let all = join_all((0..70).map(|_| async { house.chat(stream()).await.whole().await.status }));
    let look = async {
        house.sleep(ms(50)).await;
        engine.log().requests().len()
    };
    let (statuses, asked) = join(all, look).await;
    assert_eq!(asked, 64);
    assert!(statuses.iter().all(|status| *status == 200));
    assert_eq!(engine.log().requests().len(), 70);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_absurd_cap_leaves_the_other_work_of_its_engine_in_the_books() {
    let house = House::new(&Yaml::default());
    let _engine = house.engine("e1", vec![after(100), Script::json(400, r#"{"error":{"message":"too many"}}"#)]);
    let work = || house.gateway.fleet.view(house.clock.now())[0].engines[0].work;
    let absurd = async {
        house.sleep(ms(10)).await;
        let before = work();
        let mut body = stream();
        (body["max_tokens"], body["n"]) = (json!(u64::MAX), json!(2000));
        assert_eq!(house.chat(body).await.whole().await.status, 400);
        (before, work())
    };
    let (first, (before, behind)) = join(async { house.chat(stream()).await.whole().await.status }, absurd).await;
    assert_eq!(first, 200);
    assert!(before > Tokens::ZERO && behind == before, "{before:?} {behind:?}");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_path_without_output_counts_its_prompt_as_work() {
    let house = House::new(&Yaml::default());
    let _engine = house.engine("e1", vec![Script::new().silence()]);
    let work = async |path: &str, body: Value| {
        let asking = pin!(house.post(path, body));
        assert!(tokio::time::timeout(ms(10), asking).await.is_err(), "it is never answered");
        house.gateway.fleet.view(house.clock.now())[0].engines[0].work
    };
    let mut capped = unary();
    capped["max_tokens"] = json!(500);
    assert!(work(CHAT, capped).await >= Tokens(500));
    for (path, body) in [
        ("/v1/embeddings", json!({"model": "m1", "input": "12345678"})),
        ("/tokenize", json!({"model": "m1", "prompt": "12345678"})),
    ] {
        assert!(work(path, body).await < Tokens(20), "{path}");
    }
    house.lines(3).await;
    house.end().await;
}

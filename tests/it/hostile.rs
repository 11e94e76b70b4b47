//! Variants of cases of `docs/cases.md` that nobody reported yet, and peers that nobody would be: names whose addresses
//! come and go, Python's numbers wherever they can stand, conditions on a POST.

use std::net::IpAddr;

use crate::support::scripted_engine::{Script, ScriptedEngine, event, fixtures::*};
use futures_util::future::join_all;
use http::Method;
use serde_json::{Value, json};

use crate::disconnects_and_timeouts::flood;
use crate::engines::{Face, engine, until};
use crate::retries::good;
use crate::support::*;

// --- C87: the last word of a message ---

#[tokio::test(start_paused = true)]
async fn c87_a_message_ends_with_its_stop_reason_and_with_nothing_less() {
    let start = r#"{"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":1}}}"#;
    let text = r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}"#;
    let delta = |reason: Value| {
        json!({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 1}}).to_string()
    };
    let begun = || Script::stream().at(100).say(start).say(text);
    let by_close = Script::new().open_until_close(200, &[("content-type", "text/event-stream")]);
    let stopped = || begun().say(delta(json!("end_turn")));
    let tail = format!("event: message_delta\ndata: {}", delta(json!("end_turn")));
    for (what, script, verdict) in [
        ("a ping behind it", stopped().say(r#"{"type":"ping"}"#).end(), "met"),
        ("a comment behind it", stopped().put(": bye\n\n").end(), "met"),
        ("without its blank line", begun().put(tail.clone()).end(), "met"),
        ("in carriage returns", begun().put(format!("{}\r\r", tail.replace('\n', "\r"))).end(), "met"),
        (
            "a body that ends with its connection",
            by_close.say(start).say(text).say(delta(json!("end_turn"))).close(),
            "met",
        ),
        ("no reason", begun().say(delta(Value::Null)).end(), "missed(truncated)"),
        ("a token behind it", stopped().say(text).end(), "missed(truncated)"),
        ("a reset behind it", stopped().at(200).reset(), "missed(truncated)"),
        ("half of it", begun().put(tail[..40].to_owned()).end(), "missed(truncated)"),
    ] {
        let (house, _engine) = House::playing(script);
        let body = json!({"model": "m1", "stream": true, "max_tokens": 9, "messages": []});
        let answer = house.post("/v1/messages", body).await.whole().await;
        assert_eq!(house.line().await.verdict(), verdict, "{what}");
        assert_eq!(answer.text().contains("event: error"), verdict != "met", "{what}: {}", answer.text());
        house.end().await;
    }
}

// --- C89: numbers of Python ---

#[tokio::test(start_paused = true)]
async fn c89_numbers_of_python_are_read_in_every_answer_and_in_no_request() {
    let with = |event: &str, what: &str| event.replace(r#""logprobs":null"#, &format!(r#""logprobs":{what}"#));
    let odd =
        r#"{"content":[{"token":"a","logprob":-Infinity,"top_logprobs":[{"logprob":NaN},{"logprob":Infinity}]}]}"#;
    // In a whole answer, with its usage read.
    let (house, _engine) = House::playing_with(
        &Yaml::default().promise(&[("e2e_seconds", 1.0)]),
        Script::json(200, with(&whole("a", 7, 3), odd)),
    );
    let answer = house.chat(unary()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.text()), (200, with(&whole("a", 7, 3), odd)));
    let line = house.line().await;
    assert_eq!((line.verdict(), line.tokens()), ("met".into(), (Some(7), Some(3))));
    house.end().await;
    // Cut between any two bytes of the words, and beside the usage that is removed again.
    let first = event(&with(&t("a"), odd));
    let place = first.find("-Infinity").unwrap();
    for cut in place..place + 12 {
        let script = Script::stream().at(100).put(first[..cut].to_owned()).at(110).put(first[cut..].to_owned());
        let (house, _engine) =
            House::playing(script.at(120).say(with(&t("b"), odd)).say(f("stop")).say(u(5, 2)).say(d()).end());
        let answer = house.chat(stream()).await.whole().await;
        let expected = first.clone() + &event(&with(&t("b"), odd)) + &event(&f("stop")) + &event(&d());
        assert_eq!(answer.text(), expected, "cut at {cut}");
        let line = house.line().await;
        assert_eq!(
            (line.ttft(), line.tpot(), line.tokens()),
            (Some(110.0), Some(10.0), (Some(5), Some(2))),
            "cut at {cut}"
        );
        house.end().await;
    }
    // A count that is no number is no count.
    let nan = u(5, 2).replace(r#""completion_tokens":2"#, r#""completion_tokens":NaN"#);
    let (house, _engine) =
        House::playing(Script::stream().at(100).say(t("a")).at(110).say(t("b")).say(f("stop")).say(nan).say(d()).end());
    house.chat(stream()).await.whole().await;
    let line = house.line().await;
    assert_eq!((line.verdict(), line.text("token_source")), ("met".into(), "events"));
    house.end().await;
    for number in ["NaN", "-Infinity", "Infinity"] {
        let (house, engine) = House::playing(good());
        let body = format!(r#"{{"model":"m1","messages":[],"temperature":{number}}}"#);
        assert_eq!(house.send(Ask::raw(CHAT, body)).await.whole().await.status, 400, "{number}");
        assert_eq!(house.line().await.verdict(), "excluded(invalid_request)");
        assert!(engine.log().requests().is_empty());
        house.end().await;
    }
}

// --- C110: tokens without events ---

#[tokio::test(start_paused = true)]
async fn c110_swallowed_tokens_move_the_end_in_every_dialect_and_one_does_not() {
    let messages = |last: u64| {
        let text = r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}"#;
        let script = Script::stream().at(100).say(text).at(120).say(text).at(140).say(text).at(200);
        let delta =
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": last}});
        let body = json!({"model": "m1", "stream": true, "max_tokens": 9, "messages": []});
        ("/v1/messages", body, script.say(delta.to_string()).say(r#"{"type":"message_stop"}"#).end())
    };
    let responses = |last: u64| {
        let text = r#"{"type":"response.output_text.delta","delta":"a"}"#;
        let script = Script::stream().at(100).say(text).at(120).say(text).at(140).say(text).at(200);
        let end =
            json!({"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": last}}});
        ("/v1/responses", json!({"model": "m1", "stream": true, "input": "hi"}), script.say(end.to_string()).end())
    };
    let chat = |last: u64| {
        let script = Script::stream().at(100).say(t("a")).at(120).say(t("a")).at(140).say(t("a"));
        (CHAT, stream_with_usage(), script.at(200).say(f("stop")).say(u(5, last)).say(d()).end())
    };
    for of in [&messages as &dyn Fn(u64) -> (&'static str, Value, Script), &responses, &chat] {
        for (tokens, tpot) in [(3, 20.0), (4, 40.0 / 3.0), (5, 25.0), (11, 10.0)] {
            let (path, body, script) = of(tokens);
            let (house, _engine) = House::playing(script);
            house.post(path, body).await.whole().await;
            let line = house.line().await;
            let seen = line.tpot().expect("more than one token");
            assert!((seen - tpot).abs() < 0.01, "{path} with {tokens}: {seen} for {tpot}");
            assert_eq!((line.verdict(), line.tokens().1), ("met".into(), Some(tokens)), "{path}");
            house.end().await;
        }
    }
}

// --- C93: dates, and what a refusal says ---

#[tokio::test(start_paused = true)]
async fn c93_a_date_in_the_past_or_none_at_all_makes_no_engine_wait() {
    for written in [
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "Sunday, 06-Nov-94 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994",
        "-5",
        "soon",
        "",
    ] {
        let house = House::new(&Yaml::default().engines_of_first(&["e1", "e2"]).with("balance: round_robin"));
        let busy = Script::new().reply(503, &[("retry-after", written), ("content-type", "application/json")], "{}");
        let first = house.engine("e1", vec![busy.clone(), good()]);
        let second = house.engine("e2", vec![busy, good()]);
        assert_eq!(house.chat(stream()).await.whole().await.header("retry-after"), Some(written), "{written}");
        house.sleep(ms(1_100)).await;
        for _ in 0..4 {
            assert_eq!(house.chat(stream()).await.whole().await.status, 200, "{written}");
        }
        let asked = [first, second].map(|engine| engine.log().requests().len());
        assert_eq!(asked, [3, 3], "{written}: both are asked again after a second");
        house.lines(5).await;
        house.end().await;
    }
}

// --- C55: who reads nothing, and who reads in drops ---

#[tokio::test(start_paused = true)]
async fn c55_a_whole_answer_gives_its_seat_back_at_its_end_though_nobody_reads_it() {
    for is_http2 in [false, true] {
        let yaml = Yaml::default().promise(&[("e2e_seconds", 1.0)]).with("max_concurrency_per_engine: 1");
        let (house, _engine) = House::playing_with(&yaml, Script::json(200, whole(&"x".repeat(50_000), 5, 1)));
        let mut client = house.connect(512);
        let mut other = house.connect_h2_with_window(0).await;
        let untaken = match is_http2 {
            true => Some(other.send_request(h2_post(CHAT, &unary())).await.unwrap()),
            false => {
                client.post(CHAT, &unary()).await;
                None
            }
        };
        house.sleep(ms(50)).await;
        assert_eq!(house.crowd(), (0, 0), "HTTP/2: {is_http2}");
        assert_eq!(house.line().await.verdict(), "met");
        drop((client, other, untaken));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c55_an_answer_read_in_drops_holds_its_seat_up_to_the_total_limit() {
    let yaml = Yaml::default().class("timeouts: {total: 60s}").with("max_concurrency_per_engine: 1");
    let (house, engine) = House::playing_with(&yaml, flood());
    let mut client = house.connect(512);
    client.post(CHAT, &stream()).await;
    for _ in 0..5 {
        house.sleep(ms(10_000)).await;
        client.read_until("x").await;
        assert_eq!(house.crowd(), (1, 0));
    }
    house.sleep(ms(11_000)).await;
    assert_eq!(house.crowd(), (0, 0));
    assert!(engine.log().closed(0).await <= at(60_001));
    assert_eq!(house.line().await.verdict(), "excluded(client_limited)");
    drop(client);
    house.end().await;
}

// --- C98: limits of the class ---

/// Half characters, further choices, and whole answers: none of one tenant's limits takes an engine from others.
#[tokio::test(start_paused = true)]
async fn c98_rises_of_usage_and_further_choices_are_flowing_tokens() {
    let rises = (1..=100).fold(Script::stream().at(50).say(with_usage(&t("a"), 9, 1)), |script, n| {
        script.at(50 + n * 100).say(with_usage(&t(""), 9, 1 + n))
    });
    let choices = (1..=100).fold(Script::stream(), |script, n| script.at(n * 100).say(of(n % 3, &t("a"))));
    for script in [rises, choices] {
        let house = House::new(&Yaml::default().engines_of_first(&["e1", "e2"]).class("timeouts: {total: 3s}"));
        for host in ["e1", "e2"] {
            let script = script.clone();
            house.network.engine(host, &ScriptedEngine::new(house.clock, move |_| script.clone()));
        }
        let mut body = stream_with_usage();
        body["n"] = json!(3);
        join_all((0..14).map(|_| async { house.chat(body.clone()).await.whole().await })).await;
        assert_eq!(house.states("a"), ["up", "up"]);
        assert!(house.lines(14).await.iter().all(|line| line.verdict().starts_with("missed(")));
        house.end().await;
    }
}

// --- C113: names that are no words ---

#[tokio::test(start_paused = true)]
async fn c113_a_models_name_with_quotes_and_breaks_stays_within_its_label() {
    let name = "we\"ird\\na me\n{x=\"y\"} é";
    let route = format!("- {{model: [{}], pools: [a]}}", json!(name));
    let (house, _engine) = House::playing_with(&Yaml::default().routes(&route), good());
    let mut body = stream();
    body["model"] = json!(name);
    assert_eq!(house.chat(body).await.whole().await.status, 200);
    assert_eq!(house.line().await.verdict(), "met");
    let page = house.open_page();
    let label = "model=\"we\\\"ird\\\\na me\\n{x=\\\"y\\\"} é\"";
    let met = page.lines().filter(|line| line.starts_with("slo_met_total{") && line.contains(label));
    assert_eq!(
        met.filter(|line| line.split(label).last().is_some_and(|rest| rest.ends_with("} 1"))).count(),
        1,
        "{page}"
    );
    assert!(
        page.lines().all(|line| line.starts_with('#')
            || line.starts_with("goodput_")
            || line.starts_with("slo_")
            || line.starts_with("process_")),
        "a line is no sample"
    );
    house.end().await;
}

// --- conditions and ranges ---

/// Some servers of engines heed them on any method, and a 206 or 412 would be a miss by the client's word.
#[tokio::test(start_paused = true)]
async fn conditions_and_ranges_of_a_post_never_reach_an_engine() {
    let fields = [
        ("range", "bytes=0-9"),
        ("if-range", "\"x\""),
        ("if-match", "\"x\""),
        ("if-none-match", "*"),
        ("if-modified-since", "Sun, 06 Nov 1994 08:49:37 GMT"),
        ("if-unmodified-since", "Sun, 06 Nov 1994 08:49:37 GMT"),
    ];
    let yaml = Yaml::default().class("non_streaming: excluded").top("engine_paths: [/version]");
    let with = |ask: Ask| fields.iter().fold(ask, |ask, (name, value)| ask.header(name, value));
    let heeds = |clock| {
        ScriptedEngine::new(clock, |request| match (request.header("range"), request.header("if-none-match")) {
            (None, None) => Script::json(200, whole("x", 1, 1)),
            (Some(_), None) => Script::new().reply(206, &[("content-range", "bytes 0-9/90")], "0123456789"),
            (_, Some(_)) => Script::new().reply(304, &[("etag", "\"x\"")], ""),
        })
    };
    let house = House::new(&yaml);
    let engine = heeds(house.clock);
    house.network.engine("e1", &engine);
    for path in [CHAT, "/v1/embeddings", "/v1/audio/speech", "/tokenize"] {
        let body = json!({"model": "m1", "messages": [], "input": "hi", "prompt": "hi", "voice": "x"});
        assert_eq!(house.send(with(Ask::post(path, body))).await.whole().await.status, 200, "{path}");
    }
    assert!(
        engine.log().requests().iter().all(|request| fields.iter().all(|(name, _)| request.header(name).is_none()))
    );
    // With a GET they are the client's own, and so is the answer.
    let answer = house.send(with(Ask::of(Method::GET, "/version"))).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("etag")), (304, Some("\"x\"")));
    let lines = house.lines(5).await;
    assert!(lines.iter().all(|line| line.outcome() == "excluded"), "{lines:?}");
    assert_eq!(house.states("a"), ["up"]);
    house.end().await;
}

// --- names whose addresses come and go ---

#[tokio::test(start_paused = true)]
async fn addresses_that_flap_cut_no_request_and_leave_no_work_behind() {
    let address = |last| IpAddr::from([10, 0, 0, last]);
    for seats in [None, Some("max_concurrency_per_engine: 3")] {
        let yaml =
            Yaml::default().dns("{name: engines.test, port: 8000, refresh: 1s}").promise(&[("ttft_seconds", 60.0)]);
        let house = House::new(&seats.map_or(yaml.clone(), |seats| yaml.with(seats)));
        let long =
            (1..=40).fold(Script::stream(), |script, n| script.at(n * 100).say(t("a"))).say(f("stop")).say(d()).end();
        let face = Face::well(&[]);
        let plays = |last: u8| {
            let long = long.clone();
            engine(&house, &format!("10.0.0.{last}"), &face, move |_| long.clone())
        };
        let engines: Vec<ScriptedEngine> = (1..=3).map(plays).collect();
        house.network.name("engines.test", &[address(1), address(2)]);
        let _probes = house.probe();
        until(&house, 100).await;
        // Each second another set, an empty one and a failure among them, while requests come and run for four.
        let sets: [&[u8]; 8] = [&[1], &[1, 2], &[2], &[], &[3], &[1, 2, 3], &[2, 3], &[1, 2]];
        let flaps = async {
            for (second, set) in (1..).zip(sets.into_iter().cycle().take(16)) {
                until(&house, second * 1_000 - 500).await;
                house.network.name("engines.test", &set.iter().map(|last| address(*last)).collect::<Vec<_>>());
            }
        };
        let asked = (0..20).map(|n| {
            let house = &house;
            async move {
                until(house, 150 + n * 750).await;
                house.chat(stream()).await.whole().await
            }
        });
        let (answers, ()) = futures_util::future::join(join_all(asked), flaps).await;
        let whole = answers.iter().filter(|answer| answer.events().last().is_some_and(|last| last == "[DONE]"));
        assert_eq!(
            (whole.count(), answers.iter().filter(|answer| answer.status == 200).count()),
            (20, 20),
            "{seats:?}"
        );
        assert!(house.lines(20).await.iter().all(|line| line.verdict() == "met"), "{seats:?}");
        if seats.is_some() {
            for engine in &engines {
                let (mut most, mut running) = (0, 0_i32);
                let starts = engine
                    .log()
                    .requests()
                    .into_iter()
                    .filter(|request| request.target == CHAT)
                    .map(|request| request.head_at);
                let mut turns: Vec<_> = starts.flat_map(|start| [(start, 1), (start + ms(4_000), -1)]).collect();
                turns.sort_unstable();
                turns.iter().for_each(|(_, step)| {
                    running += step;
                    most = most.max(running);
                });
                assert!(most <= 3, "{most} at once at an engine that came back");
            }
        }
        house.end().await;
    }
}

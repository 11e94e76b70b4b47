//! Findings of real use (from C76 of `docs/cases.md` on): streams, counts and moments.

use crate::support::scripted_engine::{Script, fixtures::*};
use bytes::Bytes;
use http::Request;
use serde_json::{Value, json};

use crate::http::slow_body;
use crate::support::*;

fn flat(code: u16) -> String {
    json!({"message": "worker died", "type": "InternalServerError", "code": code}).to_string()
}

#[tokio::test(start_paused = true)]
async fn c76_a_partial_response_and_a_flat_error_are_an_engine_failure() {
    for error in [r#"{"detail":"Internal Server Error"}"#.to_owned(), flat(500), flat(400)] {
        let script = Script::stream().at(10).say(r()).say(t("a")).at(20).say(t("b")).say(&error).say(d()).end();
        let (house, _engine) = House::playing(script);
        let answer = house.chat(stream()).await.whole().await;
        assert!(answer.text().ends_with(&format!("data: {error}\n\ndata: [DONE]\n\n")), "it passes as it came");
        assert_eq!(house.line().await.verdict(), "missed(upstream_error)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c76_a_flat_error_before_the_first_token_is_retried_by_its_code() {
    let good = || Script::stream().at(30).say(t("a")).say(f("stop")).say(u(9, 1)).say(d()).end();
    for (code, retries, verdict) in
        [(500, "fault", "met"), (503, "push_back", "met"), (400, "", "excluded(invalid_request)")]
    {
        let bad = Script::stream().at(10).say(r()).say(flat(code)).end();
        let (house, _engines) = House::many(&Yaml::default(), 2, vec![bad, good()]);
        house.chat(stream_with_usage()).await.whole().await;
        assert_eq!(house.line().await.verdict(), verdict, "{code}");
        let tried = house.page().sum("goodput_retries_total", &[("reason", retries)]);
        assert_eq!(tried, f64::from(u8::from(!retries.is_empty())), "{code}");
        house.end().await;
    }
    let body = json!({"detail": "gone"}).to_string();
    let (house, _engines) =
        House::many(&Yaml::default().promise(&[("e2e_seconds", 5.0)]), 2, vec![Script::json(200, body)]);
    house.chat(unary()).await.whole().await;
    assert_eq!(house.line().await.verdict(), "missed(upstream_error)", "a whole answer, too");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c79_usage_in_a_stream_of_another_path_is_charged_as_in_an_answer() {
    let path = "/v1/audio/transcriptions";
    let chunk = json!({"object": "transcription.chunk", "choices": [{"delta": {"content": "hi"}}]}).to_string();
    let usage = json!({"choices": [], "usage": {"prompt_tokens": 1500, "completion_tokens": 400}}).to_string();
    let streamed =
        (1..=3).fold(Script::stream(), |script, at| script.at(at * 10).say(&chunk)).say(&usage).say(d()).end();
    let whole = Script::json(
        200,
        json!({"text": "hi", "usage": {"prompt_tokens": 1500, "completion_tokens": 400}}).to_string(),
    );
    let form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm1\r\n--b\r\nContent-Disposition: form-data; \
                name=\"stream\"\r\n\r\ntrue\r\n--b--\r\n";
    for script in [streamed, whole] {
        let (house, _engine) = House::playing(script);
        let ask = || {
            Ask::of(http::Method::POST, path).header("content-type", "multipart/form-data; boundary=b").with_body(form)
        };
        let answer = house.send(ask()).await.whole().await;
        assert_eq!(answer.status, 200);
        let line = house.line().await;
        assert_eq!((line.verdict(), line.tokens()), ("excluded(unjudged)".into(), (Some(1500), Some(400))));
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c79_a_stream_of_another_path_passes_as_it_comes() {
    let script = Script::stream().at(10).put("data: {\"a\":").at(400_000).put("1}\n\n").end();
    let (house, _engine) = House::playing_with(&Yaml::default().class("timeouts: {idle: 500s, total: 600s}"), script);
    let mut answer = house.post("/v1/audio/speech", json!({"model": "m1", "input": "hi"})).await;
    let (first, when) = answer.frame().await.unwrap();
    assert_eq!((&*first, when), (&b"data: {\"a\":"[..], at(10)), "nothing is held for a token");
    let rest = answer.whole().await;
    assert_eq!((rest.text().as_str(), house.line().await.verdict()), ("1}\n\n", "excluded(unjudged)".into()));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c82_the_defaults_let_a_tool_call_be_written_in_silence() {
    let script = Script::stream().at(100).say(g("a")).at(200).say(t("b")).at(119_000).say(k("{}")).say(f("tool_calls"));
    let (house, _engine) =
        House::playing_with(&Yaml::default().promise(&[("ttft_seconds", 0.5)]), script.say(u(9, 40)).say(d()).end());
    let answer = house.chat(stream()).await.whole().await;
    assert!(answer.text().ends_with("data: [DONE]\n\n"));
    assert_eq!(house.line().await.verdict(), "met");
    assert_eq!(house.page().sum("goodput_stalls_total", &[]), 1.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c86_an_unknown_stored_object_is_an_invalid_request() {
    let gone = Script::json(404, json!({"error": {"message": "no such response", "code": 404}}).to_string());
    let yaml = Yaml::default().routes("- {model: m1, pools: [a]}");
    for (path, body, verdict) in [
        (
            "/v1/responses",
            json!({"model": "m1", "input": "hi", "previous_response_id": "resp_x"}),
            "excluded(invalid_request)",
        ),
        (
            "/v1/responses",
            json!({"model": "m1", "input": "hi", "conversation": {"id": "c"}, "stream": true}),
            "excluded(invalid_request)",
        ),
        ("/v1/responses", json!({"model": "m1", "prompt": {"id": "p"}}), "excluded(invalid_request)"),
        ("/v1/responses", json!({"model": "m1", "input": "hi"}), "missed(upstream_error)"),
        ("/v1/chat/completions", json!({"model": "m1", "messages": [], "conversation": "c"}), "missed(upstream_error)"),
    ] {
        let (house, _engine) = House::playing_with(&yaml, gone.clone());
        let answer = house.post(path, body.clone()).await.whole().await;
        assert_eq!((answer.status.as_u16(), house.line().await.verdict().as_str()), (404, verdict), "{body}");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c87_a_message_without_message_stop_is_complete() {
    let events = [
        json!({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}),
    ];
    let written: String =
        events.iter().map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap())).collect();
    let (house, _engine) = House::playing(Script::stream().at(100).put(written.clone()).at(150).end());
    let body = json!({"model": "m1", "stream": true, "max_tokens": 9, "messages": []});
    let answer = house.post("/v1/messages", body).await.whole().await;
    assert_eq!(answer.text(), written, "nothing is appended");
    let line = house.line().await;
    assert_eq!((line.verdict(), line.e2e()), ("met".into(), Some(150.0)));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c90_a_finished_response_is_ended_after_a_second() {
    let ends = [
        (CHAT, stream_with_usage(), vec![t("a"), f("stop"), u(9, 1), d()]),
        (CHAT, stream(), vec![t("a"), f("stop")]),
        (
            "/v1/responses",
            json!({"model": "m1", "stream": true, "input": "hi"}),
            vec![
                json!({"type": "response.output_text.delta", "delta": "a"}).to_string(),
                json!({"type": "response.completed", "response": {"usage": {"output_tokens": 1}}}).to_string(),
            ],
        ),
    ];
    for (path, body, events) in ends {
        let script = events.iter().fold(Script::stream().at(100), |script, event| script.say(event)).at(8100).end();
        let yaml = Yaml::default().with("max_concurrency_per_engine: 1");
        let (house, engine) = House::playing_with(&yaml, script);
        let answer = house.post(path, body).await.whole().await;
        let sent: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        assert_eq!((answer.text(), house.clock.now()), (sent, at(1100)), "{path}");
        assert_eq!(engine.log().closed(0).await, at(1100), "{path}: its connection goes, too");
        let line = house.line().await;
        assert_eq!((line.verdict(), line.e2e()), ("met".into(), Some(100.0)), "{path}");
        assert_eq!(house.states("a"), ["up"], "{path}: it is no fault");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c90_a_revoked_finish_ends_nothing() {
    let script =
        Script::stream().at(100).say(t("a")).say(f("stop")).at(1050).say(t("b")).at(3000).say(t("c")).say(f("stop"));
    let (house, _engine) =
        House::playing_with(&Yaml::default().promise(&[("ttft_seconds", 0.5)]), script.say(u(9, 3)).say(d()).end());
    let answer = house.chat(stream()).await.whole().await;
    assert!(answer.text().ends_with("data: [DONE]\n\n"));
    assert_eq!(house.line().await.e2e(), Some(3000.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c90_usage_within_the_second_still_counts_and_a_late_tail_is_dropped() {
    let script =
        Script::stream().at(100).say(t("a")).say(f("stop")).at(1000).say(u(9, 7)).put("data: [DO").at(8000).end();
    let (house, _engine) = House::playing_with(&Yaml::default().promise(&[("ttft_seconds", 0.5)]), script);
    let answer = house.chat(stream_with_usage()).await.whole().await;
    assert!(answer.text().ends_with("\"total_tokens\":16}}\n\n"), "{}", answer.text());
    let line = house.line().await;
    assert_eq!((line.verdict(), line.tokens().1, answer.end), ("met".into(), Some(7), at(1100)));
    house.end().await;
}

/// A stream of one token 100 ms after the request was there.
fn quick() -> Script {
    Script::stream().at(100).say(t("a")).say(f("stop")).say(u(9, 1)).say(d()).end()
}

async fn uploaded_late(yaml: &Yaml) -> (House, Line) {
    let (house, _engine) = House::playing_with(yaml, quick());
    let text = stream().to_string();
    let halves = text.split_at(20);
    let frames = vec![(0, Bytes::from(halves.0.to_owned())), (1400, Bytes::from(halves.1.to_owned()))];
    let request = Request::post(CHAT).header("host", "g").body(slow_body(&house, frames)).unwrap();
    house.send_body(request).await.whole().await;
    let line = house.line().await;
    (house, line)
}

#[tokio::test(start_paused = true)]
async fn c96_a_slow_upload_is_no_miss_unless_the_class_counts_it() {
    let promise = [("ttft_seconds", 0.5), ("e2e_seconds", 1.0)];
    let (house, line) = uploaded_late(&Yaml::default().promise(&promise)).await;
    assert_eq!((line.verdict(), line.ttft(), line.e2e()), ("met".into(), Some(100.0), Some(100.0)));
    assert_eq!((line.number("upload_ms"), line.number("client_wait_ms")), (Some(1400.0), Some(1400.0)));
    assert_eq!(house.page().sum("goodput_client_wait_seconds_sum", &[]), 1.4);
    assert_eq!(house.page().sum("goodput_time_to_first_token_seconds_sum", &[]), 0.1);
    house.end().await;
    let (house, line) = uploaded_late(&Yaml::default().promise(&promise).class("upload: counted")).await;
    assert_eq!((line.verdict(), line.ttft(), line.e2e()), ("missed(ttft)".into(), Some(1500.0), Some(1500.0)));
    assert_eq!(line.number("client_wait_ms"), Some(1400.0));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c96_a_request_in_one_piece_has_no_client_wait() {
    let (house, _engine) = House::playing(quick());
    let mut client = house.connect(64 * 1024);
    client.post(CHAT, &stream()).await;
    client.read_until("[DONE]").await;
    let line = house.line().await;
    assert_eq!((line.number("client_wait_ms"), line.ttft()), (Some(0.0), Some(100.0)));
    // The same over a connection, in halves.
    let body = stream().to_string();
    let (first, second) = body.split_at(9);
    client.send(format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-length: {}\r\n\r\n{first}", body.len())).await;
    house.sleep(ms(250)).await;
    client.send(second).await;
    client.read_until("[DONE]").await;
    let line = house.lines(2).await.remove(1);
    assert_eq!((line.number("client_wait_ms"), line.ttft()), (Some(250.0), Some(100.0)));
    drop(client);
    house.end().await;
}

/// vLLM's events with requested usage: members of the finish event move to the usage event.
fn of_vllm(body: &Value, usage_after: u64) -> Script {
    let asks = |name: &str| body["stream_options"][name] == true;
    let (usage, each) = (asks("include_usage"), asks("include_usage") && asks("continuous_usage_stats"));
    let counted = |event: String, tokens: u64| if each { with_usage(&event, 9, tokens) } else { event };
    let and = |event: String| format!("{},\"system_fingerprint\":\"f1\"}}", event.strip_suffix('}').unwrap());
    let finish = counted(f("stop"), 2);
    let script = Script::stream().at(100).say(counted(t("a"), 1)).at(120).say(counted(t("b"), 2)).at(130);
    if usage {
        return script.say(finish).at(130 + usage_after).say(and(u(9, 2))).say(d()).end();
    }
    script.say(and(finish)).at(130 + usage_after).say(d()).end()
}

#[tokio::test(start_paused = true)]
async fn c104_c105_the_client_gets_the_engines_response_as_without_injection() {
    let values = [None, Some(Value::Null), Some(json!(false)), Some(json!(true))];
    for include in &values {
        for continuous in &values {
            let mut options = json!({});
            for (name, value) in [("include_usage", include), ("continuous_usage_stats", continuous)] {
                if let Some(value) = value {
                    options[name] = value.clone();
                }
            }
            let mut body = stream();
            body["stream_options"] = options;
            for usage_after in [0, 3] {
                let received = |yaml: Yaml| {
                    let body = body.clone();
                    async move {
                        let house = House::new(&yaml);
                        let engine =
                            crate::support::scripted_engine::ScriptedEngine::new(house.clock, move |request| {
                                of_vllm(&request.json(), usage_after)
                            });
                        house.network.engine("e1", &engine);
                        let answer = house.chat(body).await.whole().await;
                        let line = house.line().await;
                        house.end().await;
                        (answer.text(), line)
                    }
                };
                let (ours, line) = received(Yaml::default()).await;
                let (alone, _) = received(Yaml::default().with("inject: {usage: false}")).await;
                assert_eq!(ours, alone, "{body} {usage_after}");
                assert_eq!(line.tokens(), (Some(9), Some(2)), "{body}");
                let (every, _) = received(Yaml::default().with("inject: {continuous_usage: true}")).await;
                assert_eq!(every, alone, "{body} {usage_after}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn c105_the_finish_event_is_held_for_a_few_milliseconds_only() {
    let script = Script::stream().at(100).say(t("a")).at(120).say(f("stop")).at(500).say(u(9, 2)).say(d()).end();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!(answer.moments(), [100, 130, 500]);
    let line = house.line().await;
    assert_eq!((line.verdict(), line.e2e()), ("met".into(), Some(120.0)), "moments are those of receipt");
    house.end().await;
    // A break behind it takes nothing of it.
    let script = Script::stream().at(100).say(t("a")).at(120).say(f("stop")).at(125).reset();
    let (house, _engine) = House::playing(script);
    let answer = house.chat(stream()).await.whole().await;
    assert!(answer.text().ends_with("\"finish_reason\":\"stop\"}]}\n\n"), "{}", answer.text());
    assert_eq!(house.line().await.verdict(), "met");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c105_the_usage_event_of_an_engine_that_moves_fields_is_awaited() {
    let whole = |usage_after: u64| of_vllm(&json!({"stream_options": {"include_usage": true}}), usage_after);
    let without_usage = Script::stream().at(100).say(t("a")).at(130).say(f("stop")).at(5000).say(d()).end();
    let house = House::new(&Yaml::default());
    house.engine("e1", vec![whole(400), whole(0), whole(400), whole(999), without_usage]);
    let ask = async || {
        let began = house.clock.now();
        let answer = house.chat(stream()).await.whole().await;
        let has_it = answer.text().contains("system_fingerprint");
        let moments = answer.moments().into_iter().map(|moment| moment - millis(began)).collect::<Vec<_>>();
        (has_it, moments)
    };
    assert_eq!(ask().await, (false, vec![100, 120, 140, 530]), "nothing is known of it yet");
    assert_eq!(ask().await, (true, vec![100, 120, 130]));
    assert_eq!(ask().await, (true, vec![100, 120, 530]));
    assert_eq!(ask().await, (true, vec![100, 120, 1129]));
    assert_eq!(ask().await, (false, vec![100, 1130]), "no longer than the answer");
    house.lines(5).await;
    house.end().await;
}

// --- C96, other hands that are slow ---

/// A chat body with this text, in two halves, the second of which arrives this many milliseconds later.
fn late_half(
    house: &House,
    text: &[u8],
    late: u64,
    fields: &[(&str, &str)],
) -> Request<impl http_body::Body<Data = Bytes, Error = std::io::Error> + use<>> {
    let halves = text.split_at(text.len() / 2);
    let frames = vec![(0, Bytes::copy_from_slice(halves.0)), (late, Bytes::copy_from_slice(halves.1))];
    let mut request = Request::post(CHAT).header("host", "g");
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(slow_body(house, frames)).unwrap()
}

#[tokio::test(start_paused = true)]
async fn c96_no_time_limit_of_the_class_runs_during_the_clients_wait() {
    for (limits, body) in [
        ("first_token: 1s", stream()),
        ("first_token: 1s, total: 1200ms", stream()),
        ("response_head: 1s", unary()),
        ("total: 1s", unary()),
    ] {
        let script = if body["stream"] == true {
            quick()
        } else {
            Script::new().at(100).reply(200, &[("content-type", "application/json")], whole("x", 1, 1))
        };
        for seats in [false, true] {
            let yaml = Yaml::default().promise(&[("e2e_seconds", 0.5)]).class(&format!("timeouts: {{{limits}}}"));
            let yaml =
                if seats { yaml.with("max_concurrency_per_engine: 1").class("queue: {max_wait: 700ms}") } else { yaml };
            let (house, engine) = House::playing_with(&yaml, script.clone());
            let request = late_half(&house, body.to_string().as_bytes(), 1400, &[]);
            let answer = house.send_body(request).await.whole().await;
            assert_eq!((answer.status.as_u16(), answer.end), (200, at(1500)), "{limits}");
            let line = house.line().await;
            assert_eq!((line.verdict(), line.e2e()), ("met".into(), Some(100.0)), "{limits}");
            assert_eq!((engine.log().requests().len(), house.states("a")), (1, vec!["up"]));
            house.end().await;
            // With `counted`, measures and limits run from the arrival.
            let (house, _engine) = House::playing_with(&yaml.class("upload: counted"), script.clone());
            let request = late_half(&house, body.to_string().as_bytes(), 1400, &[]);
            let answer = house.send_body(request).await.whole().await;
            assert_eq!(answer.status, 504, "{limits}");
            house.line().await;
            house.end().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn c96_a_slow_upload_is_no_miss_in_any_framing() {
    let promise = [("ttft_seconds", 0.5), ("e2e_seconds", 1.0)];
    let text = stream().to_string();
    let met = async |house: House, wait: f64| {
        let line = house.line().await;
        assert_eq!((line.verdict(), line.ttft(), line.e2e()), ("met".into(), Some(100.0), Some(100.0)));
        assert_eq!(line.number("client_wait_ms"), Some(wait));
        house.end().await;
    };
    // In a coding.
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
    let (house, _engine) = House::playing_with(&Yaml::default().promise(&promise), quick());
    let coded = encoder.finish().unwrap();
    house.send_body(late_half(&house, &coded, 1400, &[("content-encoding", "gzip")])).await.whole().await;
    met(house, 1400.0).await;
    // In chunks, byte by byte.
    let (house, _engine) = House::playing_with(&Yaml::default().promise(&promise), quick());
    let mut client = house.connect(64 * 1024);
    client.send(format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n")).await;
    for byte in text.chars() {
        client.send(format!("1\r\n{byte}\r\n")).await;
        house.sleep(ms(20)).await;
    }
    client.send("0\r\n\r\n").await;
    client.read_until("[DONE]").await;
    drop(client);
    met(house, 20.0 * text.len() as f64).await;
    // Behind an expected `100 Continue`.
    let (house, _engine) = House::playing_with(&Yaml::default().promise(&promise), quick());
    let mut client = house.connect(64 * 1024);
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n", text.len());
    client.send(head).await;
    client.read_until("100 Continue").await;
    house.sleep(ms(1400)).await;
    client.send(&text).await;
    client.read_until("[DONE]").await;
    drop(client);
    met(house, 1400.0).await;
    // A stream of HTTP/2, whose connection carries others meanwhile.
    let (house, _engine) = House::playing_with(&Yaml::default().promise(&promise), quick());
    let (io, theirs) = tokio::io::duplex(64 * 1024);
    let (door, gateway) = (house.door(), house.gateway.clone());
    tokio::spawn(async move { door.serve(theirs, gateway).await });
    let handshake = hyper::client::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new())
        .handshake(hyper_util::rt::TokioIo::new(io));
    let (mut sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let (mut request, body) = late_half(&house, text.as_bytes(), 1400, &[]).into_parts();
    request.headers.remove("host");
    request.uri = format!("http://g{CHAT}").parse().unwrap();
    let request = Request::from_parts(request, http_body_util::BodyExt::boxed_unsync(body));
    let mut answer = sender.send_request(request).await.unwrap();
    while h2_next(&mut answer).await.is_some() {}
    drop(sender);
    met(house, 1400.0).await;
}

#[tokio::test(start_paused = true)]
async fn c96_a_leave_during_the_upload_is_neither_met_nor_missed() {
    let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5), ("e2e_seconds", 1.0)]);
    for class in ["upload: excluded", "upload: counted"] {
        let (house, engine) = House::playing_with(&yaml.clone().class(class), quick());
        let request = late_half(&house, stream().to_string().as_bytes(), 5_000, &[]);
        let left = tokio::time::timeout(ms(2_000), house.send_body(request)).await;
        assert!(left.is_err());
        let line = house.line().await;
        assert_eq!((line.verdict(), engine.log().requests().len()), ("excluded(client_cancel)".into(), 0));
        house.end().await;
    }
}

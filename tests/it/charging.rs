//! Charges of a tenant for every end of a request (`docs/semantics.md` 8; C80 and C97 of `docs/cases.md`).

use std::sync::Arc;

use crate::support::scripted_engine::{Script, ScriptedEngine, fixtures::*};
use futures_util::future::join_all;
use goodput::types::{ClientState, DisconnectReason};
use http::Method;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::admission::{by, capped, left, limited, status};
use crate::support::*;

/// Nothing to speak of flows back meanwhile.
const LIMITS: &str = "tokens_per_minute: 1, tokens_burst: 5000, output_tokens_per_minute: 1, output_tokens_burst: 5000, \
                      requests_per_minute: 1, requests_burst: 50";

/// Tokens and requests that `acme` has spent of [`LIMITS`].
fn spent(house: &House) -> (u64, u64) {
    (5000 - left(house, "tokens_per_minute"), 50 - left(house, "requests_per_minute"))
}

/// A stream of `count` tokens: the first after 100 ms, the others 20 ms apart.
fn tokens(count: u64) -> Script {
    (0..count).fold(Script::stream(), |script, number| script.at(100 + 20 * number).say(t("a")))
}

/// Answers from which an engine has taught its speed, some of them side by side.
const TOGETHER: [usize; 11] = [1, 2, 4, 6, 8, 1, 3, 5, 7, 1, 2];
const LESSONS: usize = 40;

/// The engine has taught its speed: 100 ms, and 20 ms for each further token.
async fn teach(house: &Arc<House>) {
    let asked = |_| async {
        let mut body = capped(20, true);
        body["stream_options"] = json!({"include_usage": true});
        let sample = by("sk-globex", body).header("x-ending", "lesson");
        assert_eq!(house.send(sample).await.whole().await.status, 200);
    };
    for together in TOGETHER {
        join_all((0..together).map(asked)).await;
    }
}

/// An engine `e1` that teaches its speed by lessons, and otherwise plays this script.
fn engine(house: &House, script: impl Fn(&Value) -> Script + Send + Sync + 'static) -> ScriptedEngine {
    let engine = ScriptedEngine::new(house.clock, move |request| match request.header("x-ending") {
        Some("lesson") => tokens(20).say(f("length")).say(u(10, 20)).say(d()).end(),
        _ => script(&request.json()),
    });
    house.network.engine("e1", &engine);
    engine
}

/// A house with [`LIMITS`] and these limits in time, whose engine has taught its speed.
async fn taught(timeouts: &str, script: Script) -> Arc<House> {
    let yaml = limited(LIMITS).class(&format!("timeouts: {{{timeouts}}}"));
    let house = Arc::new(House::new(&yaml));
    engine(&house, move |_| script.clone());
    teach(&house).await;
    house
}

async fn ended(house: Arc<House>) {
    house.lines(1).await;
    Arc::into_inner(house).expect("all tasks have ended").end().await;
}

// --- C80 ---

#[tokio::test(start_paused = true)]
async fn c80_counting_tokens_is_a_request_and_costs_none() {
    let text = "x".repeat(15_000);
    let message = json!([{"role": "user", "content": text}]);
    for (path, body, answer) in [
        (
            "/v1/messages/count_tokens",
            json!({"model": "m1", "max_tokens": 100_000, "messages": message}),
            json!({"input_tokens": 4000}),
        ),
        ("/tokenize", json!({"model": "m1", "prompt": text}), json!({"count": 4000, "tokens": [1, 2, 3]})),
        ("/tokenize", json!({"model": "m1", "messages": message}), json!({"usage": {"prompt_tokens": 4000}})),
        ("/detokenize", json!({"model": "m1", "tokens": vec![1; 9000]}), json!({"prompt": text})),
        (
            "/v1/chat/completions/render",
            json!({"model": "m1", "max_tokens": 100_000, "messages": message}),
            json!({"token_ids": [1, 2, 3]}),
        ),
        ("/v1/completions/render", json!({"model": "m1", "prompt": text}), json!([{"prompt_token_ids": [1]}])),
    ] {
        let yaml = limited(LIMITS).with("max_concurrency_per_engine: 4");
        let (house, _engine) = House::playing_with(&yaml, Script::json(200, answer.to_string()));
        assert_eq!(status(&house, by_at("/v1/messages/count_tokens", path, body)).await, 200, "{path}");
        assert_eq!(spent(&house), (0, 1), "{path}");
        assert_eq!(left(&house, "output_tokens_per_minute"), 5000, "{path}");
        house.lines(1).await;
        house.end().await;
    }
}

/// Of `acme`, in the dialect of the path.
fn by_at(messages: &str, path: &str, body: Value) -> Ask {
    let version = if path == messages { "2023-06-01" } else { "none" };
    Ask::post(path, body).header("authorization", "Bearer sk-acme").header("anthropic-version", version)
}

#[tokio::test(start_paused = true)]
async fn c80_lists_of_models_are_requests_and_cost_no_tokens() {
    let yaml = limited("tokens_per_minute: 1, tokens_burst: 10, requests_per_minute: 1, requests_burst: 2");
    let (house, engine) = House::playing_with(&yaml, Script::json(200, "{}"));
    let get = |path: &str, key: &str| Ask::of(Method::GET, path).header("authorization", &format!("Bearer {key}"));
    for path in ["/v1/models", "/v1/models/m1"] {
        assert_eq!(status(&house, get(path, "sk-acme")).await, 200);
    }
    let refused = house.send(get("/v1/models", "sk-acme")).await.whole().await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("60")));
    assert_eq!(refused.header("x-ratelimit-limit-requests"), Some("2"));
    assert_eq!(left(&house, "tokens_per_minute"), 10);
    assert_eq!(status(&house, get("/v1/models", "sk-globex")).await, 200, "the limit is acme's");
    assert_eq!(status(&house, Ask::of(Method::GET, "/health")).await, 200);
    assert!(engine.log().requests().is_empty());
    assert_eq!(house.page().sum("goodput_slo_excluded_total", &[("reason", "rate_limited")]), 1.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_demoted_tenant_gets_its_list_of_models_too() {
    let yaml = crate::admission::tenants("limits: {requests_per_minute: 1}, when_over_limit: demote");
    let (house, _engine) = House::playing_with(&yaml, Script::json(200, "{}"));
    for _ in 0..3 {
        let ask = Ask::of(Method::GET, "/v1/models").header("authorization", "Bearer sk-acme");
        assert_eq!(status(&house, ask).await, 200);
    }
    house.end().await;
}

// --- C97: requests ---

#[tokio::test(start_paused = true)]
async fn c97_a_request_that_an_engine_rejects_as_invalid_counts() {
    let yaml = limited("tokens_per_minute: 600, requests_per_minute: 30");
    let (house, engine) = House::playing_with(&yaml, Script::json(400, "{}"));
    let mut statuses = Vec::new();
    for _ in 0..200 {
        // Nothing is injected: that would be tried without it.
        statuses.push(status(&house, by("sk-acme", capped(100, false))).await);
    }
    let count = |code| statuses.iter().filter(|status| **status == code).count();
    assert_eq!((count(400), count(429), engine.log().requests().len()), (30, 170, 30));
    assert_eq!(left(&house, "tokens_per_minute"), 600, "nothing was generated");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c97_a_request_is_refunded_only_if_the_service_failed_it() {
    let refused = |code: u16| (format!("{code}"), Script::json(code, "{}"));
    let in_band = |code: u16| {
        let says = error("own words", code);
        (format!("{code} in a stream"), Script::stream().at(10).say(r()).say(says).say(d()).end())
    };
    let in_json = |code: u16| {
        let body = json!({"error": {"message": "own words", "code": code}}).to_string();
        (format!("{code} in a body"), Script::json(200, body))
    };
    let clients = [400, 409, 413, 415, 422, 431, 501].map(refused).into_iter().chain([in_band(400), in_json(422)]);
    let services = [401, 403, 404, 405, 429, 500, 503].map(refused).into_iter().chain([
        in_band(500),
        in_band(503),
        in_json(500),
        ("a reset".to_owned(), Script::new().at(30).reset()),
        ("nothing at all".to_owned(), Script::stream().end()),
    ]);
    for (counts, (what, script)) in clients.map(|each| (1, each)).chain(services.map(|each| (0, each))) {
        let (house, _engine) = House::playing_with(&limited(LIMITS), script);
        house.send(by("sk-acme", capped(100, !what.ends_with("body")))).await.whole().await;
        assert_eq!(spent(&house), (0, counts), "{what}");
        house.lines(1).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_model_that_no_engine_serves_counts_as_the_clients_request() {
    let (house, _engine) = House::playing_with(&limited(LIMITS), Script::json(404, "{}"));
    let mut body = capped(100, true);
    body["model"] = json!("anybody/else");
    assert_eq!(status(&house, by("sk-acme", body)).await, 404);
    assert_eq!(spent(&house), (0, 1));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_status_after_an_early_head_is_charged_by_the_same_rule() {
    let yaml = limited(LIMITS).class("hold_head: 200ms").class("keepalive_seconds: 1");
    let late = |code| Script::new().at(300).reply(code, &[("content-type", "application/json")], "{}");
    for (script, counts) in [(late(400), 1), (late(500), 0), (Script::new().at(300).reset(), 0)] {
        let (house, _engine) = House::playing_with(&yaml, script);
        let answer = house.send(by("sk-acme", capped(100, true))).await.whole().await;
        assert!((answer.status, answer.text().contains("\"error\"")) == (http::StatusCode::OK, true));
        assert_eq!(spent(&house), (0, counts));
        house.lines(1).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_after_an_early_head_during_connecting_pays_nothing() {
    let yaml = limited(LIMITS).class("hold_head: 200ms").class("keepalive_seconds: 1").with("connect_timeout: 60s");
    let house = House::new(&yaml);
    house.network.silence("e1");
    let mut reply = house.send(by("sk-acme", capped(100, true))).await;
    reply.frames(1).await;
    drop(reply);
    house.line().await;
    assert_eq!(spent(&house), (0, 0));
    house.end().await;
}

// --- C97: tokens ---

#[tokio::test(start_paused = true)]
async fn c97_time_limits_charge_the_prompt_and_what_was_seen() {
    let cases: [(&str, &str, Script, u64); 5] = [
        // The 96th would come at the very moment of the limit.
        ("missed(timeout_total)", "total: 2s", tokens(1000), 95),
        ("missed(timeout_idle)", "idle: 500ms", tokens(7).silence(), 7),
        ("missed(timeout_first_token)", "first_token: 2s", Script::new().silence(), 0),
        ("missed(timeout_first_token)", "first_token: 2s", Script::stream().at(5).say(r()).silence(), 0),
        ("missed(timeout_total)", "total: 2s", Script::stream().silence(), 0),
    ];
    for (verdict, timeouts, script, output) in cases {
        let house = taught(timeouts, script).await;
        house.send(by("sk-acme", capped(1500, true))).await.whole().await;
        let lines = house.lines(LESSONS + 1).await;
        let line = lines.iter().find(|line| line.text("tenant") == "acme").expect("its line");
        assert_eq!(line.verdict(), verdict);
        let (tokens, requests) = spent(&house);
        // Its prompt at 3.8 bytes per token: what engines said of another tenant's does not count.
        assert_eq!((tokens, requests), (10 + output, 1), "{verdict}");
        ended(house).await;
    }
}

/// Six requests of 1,500 tokens each into a limit of 2 s.
#[tokio::test(start_paused = true)]
async fn c97_unobservable_responses_are_charged_the_estimated_output() {
    let house = taught("total: 2s", Script::new().silence()).await;
    let asks = (0..6).map(|_| async { status(&house, by("sk-acme", capped(500, false))).await });
    assert_eq!(join_all(asks).await, [504; 6]);
    let (tokens, requests) = spent(&house);
    assert_eq!(requests, 6);
    // The prompt, and (2 s - 100 ms) / 20 ms, six times.
    assert!((580..=700).contains(&tokens), "{tokens}");
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn c97_a_client_that_leaves_a_non_streaming_response_pays_for_the_output_by_then() {
    let body_breaks = |script: Script| script.open_with(200, &[("content-type", "application/json")]);
    for (script, patience, cap, least, most) in [
        (Script::new().silence(), 1100, 500, 56, 66),
        (Script::new().silence(), 60, 500, 10, 11),
        (Script::new().silence(), 1100, 30, 40, 41),
        (body_breaks(Script::new().at(600)).put("{\"choices\":").silence(), 1100, 500, 56, 66),
    ] {
        let house = taught("total: 60s", script).await;
        tokio::select! {
            biased;
            _ = async { house.send(by("sk-acme", capped(cap, false))).await.whole().await } => panic!("it is silent"),
            () = house.sleep(ms(patience)) => {}
        }
        let (tokens, requests) = spent(&house);
        assert!((least..=most).contains(&tokens) && requests == 1, "{tokens} after {patience} ms of {cap}");
        ended(house).await;
    }
}

#[tokio::test(start_paused = true)]
async fn choices_are_generated_side_by_side() {
    let house = taught("total: 60s", Script::new().silence()).await;
    let mut body = capped(500, false);
    body["n"] = json!(3);
    tokio::select! {
        biased;
        _ = house.send(by("sk-acme", body)) => panic!("it is silent"),
        () = house.sleep(ms(1100)) => {}
    }
    let (tokens, _) = spent(&house);
    assert!((140..=175).contains(&tokens), "{tokens}");
    ended(house).await;
}

#[tokio::test(start_paused = true)]
async fn the_conversations_of_a_batch_are_generated_side_by_side() {
    let conversation = json!([{"role": "user", "content": "x".repeat(38)}]);
    let batch = json!({"model": "m1", "messages": [conversation, conversation, conversation], "max_tokens": 500});
    let ask = || Ask::post("/v1/chat/completions/batch", batch.clone()).header("authorization", "Bearer sk-acme");
    let house = taught("total: 60s", Script::new().silence()).await;
    tokio::select! {
        biased;
        _ = house.send(ask()) => panic!("it is silent"),
        () = async {
            house.sleep(ms(1)).await;
            let reserved = 5000 - left(&house, "output_tokens_per_minute");
            assert_eq!(reserved, 1500, "the cap of each");
            house.sleep(ms(1099)).await;
        } => {}
    }
    let (tokens, requests) = spent(&house);
    assert!((160..=195).contains(&tokens) && requests == 1, "{tokens}");
    ended(house).await;

    let usage = json!({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 60}});
    let (house, _engine) = House::playing_with(&limited(LIMITS), Script::json(200, usage.to_string()));
    assert_eq!(status(&house, ask()).await, 200);
    assert_eq!(spent(&house), (90, 1), "what its usage says");
    house.lines(1).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_a_path_without_output_pays_for_the_prompt() {
    let (house, _engine) = House::playing_with(&limited(LIMITS), Script::new().silence());
    let ask = Ask::post("/v1/embeddings", json!({"model": "m1", "input": "x".repeat(38)}));
    tokio::select! {
        biased;
        _ = house.send(ask.header("authorization", "Bearer sk-acme")) => panic!("it is silent"),
        () = house.sleep(ms(5000)) => {}
    }
    assert_eq!(spent(&house), (10, 1));
    house.lines(1).await;
    house.end().await;
}

/// Reads on to the finish event.
async fn until_its_finish(reply: &mut Reply) {
    loop {
        let (bytes, _) = reply.frame().await.expect("the finish comes");
        if String::from_utf8_lossy(&bytes).contains("\"finish_reason\":\"stop\"") {
            return;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn c97_a_stream_left_at_its_finish_is_charged_its_usage() {
    let usage_at = |millis| tokens(5).say(f("stop")).at(millis).say(u(10, 40)).say(d()).end();
    for (script, output, ends) in [
        (usage_at(180), 40, 180),
        (usage_at(900), 40, 900),
        (usage_at(1170), 40, 1170),
        // Behind more than a second, or never.
        (usage_at(1190), 5, 1180),
        (tokens(5).say(f("stop")).silence(), 5, 1180),
        (tokens(5).say(f("stop")).at(300).end(), 5, 300),
        (tokens(5).say(f("stop")).at(300).reset(), 5, 300),
    ] {
        let (house, engine) = House::playing_with(&limited(LIMITS), script);
        let mut body = capped(1000, true);
        body["stream_options"] = json!({"include_usage": true});
        let mut reply = house.send(by("sk-acme", body)).await;
        until_its_finish(&mut reply).await;
        assert_eq!(house.clock.now(), at(180));
        drop(reply);
        let line = house.line().await;
        assert_eq!((line.verdict(), line.e2e()), ("met".to_owned(), Some(180.0)));
        assert_eq!((line.tokens().1, spent(&house)), (Some(output), (10 + output, 1)));
        // Lines are written every 10 ms.
        assert!((at(ends)..=at(ends + 10)).contains(&house.clock.now()), "and for no longer");
        drop(engine);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_continues_after_its_finish_is_left_like_any_other() {
    let script = tokens(5).say(f("stop")).at(400).say(t("more")).at(500).say(t("more")).silence();
    let (house, engine) = House::playing_with(&limited(LIMITS), script);
    let mut reply = house.send(by("sk-acme", capped(1000, true))).await;
    until_its_finish(&mut reply).await;
    drop(reply);
    let line = house.line().await;
    assert_eq!((line.verdict(), spent(&house)), ("excluded(client_cancel)".to_owned(), (16, 1)));
    assert_eq!(engine.log().closed(0).await, at(400), "as soon as it is known");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_cut_for_not_reading_at_the_finish_pays_the_usage() {
    let script = tokens(5).say(f("stop")).at(700).say(u(10, 40)).say(d()).end();
    let (house, _engine) = House::playing_with(&limited(LIMITS), script);
    let client = ClientState::default();
    let mut reply = house.send(by("sk-acme", capped(1000, true)).client(&client)).await;
    until_its_finish(&mut reply).await;
    client.sever(DisconnectReason::WriteStall);
    drop(reply);
    house.line().await;
    assert_eq!(spent(&house), (50, 1));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_compressed_response_is_charged_the_estimated_output() {
    let head = [("content-type", "application/json"), ("content-encoding", "gzip")];
    let house = taught("total: 60s", Script::new().at(1100).reply(200, &head, "not to be read")).await;
    assert_eq!(status(&house, by("sk-acme", capped(500, false))).await, 200);
    let (tokens, requests) = spent(&house);
    assert!((56..=66).contains(&tokens) && requests == 1, "{tokens}");
    ended(house).await;
}

// --- the law ---

/// How an engine ends, after this many tokens if it streams.
#[derive(Clone, Copy, Debug)]
enum End {
    /// As it should, with its usage or without.
    Whole {
        usage: bool,
    },
    /// Before any token.
    Refuses(u16),
    InBand(u16),
    Resets,
    HangsUp,
    Silence,
}

/// One request, and all that becomes of it.
#[derive(Clone, Debug)]
struct Guest {
    comes: u64,
    streams: bool,
    cap: u64,
    tokens: u64,
    end: End,
    /// Reads to the end, or leaves this long after the request.
    patience: Option<u64>,
}

fn any_end() -> impl Strategy<Value = End> {
    prop_oneof![
        4 => any::<bool>().prop_map(|usage| End::Whole { usage }),
        1 => prop::sample::select(vec![400, 422, 429, 500, 503]).prop_map(End::Refuses),
        1 => prop::sample::select(vec![400, 500, 503]).prop_map(End::InBand),
        1 => Just(End::Resets),
        1 => Just(End::HangsUp),
        2 => Just(End::Silence),
    ]
}

fn any_guest() -> impl Strategy<Value = Guest> {
    let patience = prop_oneof![
        3 => Just(None),
        // Before the head; in the middle, or at the finish.
        1 => (0..100_u64).prop_map(Some),
        3 => (5..75_u64).prop_map(|step| Some(20 * step)),
    ];
    (0..4000_u64, any::<bool>(), 1..60_u64, 0..60_u64, any_end(), patience).prop_map(
        |(comes, streams, cap, tokens, end, patience)| {
            // An unobserved response continues to its cap.
            let is_hidden = !streams && matches!(end, End::Silence);
            let tokens = if is_hidden { cap } else { tokens.min(cap) };
            Guest { comes, streams, cap, tokens, end, patience }
        },
    )
}

impl Guest {
    fn ask(&self, number: usize) -> Ask {
        let mut body = capped(self.cap, self.streams);
        body["seed"] = json!(number);
        by("sk-acme", body).header("x-request-id", &number.to_string())
    }

    fn script(&self) -> Script {
        let json = [("content-type", "application/json")];
        let begun = if self.streams { tokens(self.tokens) } else { Script::new() };
        let begun = begun.at(100 + 20 * self.tokens.saturating_sub(1));
        let in_json = |code| json!({"error": {"message": "own words", "code": code}}).to_string();
        match self.end {
            End::Whole { usage } if self.streams => {
                let finished = begun.say(r()).say(f("stop"));
                let finished = if usage { finished.wait(ms(100)).say(u(10, self.tokens)) } else { finished };
                finished.say(d()).end()
            }
            End::Whole { usage } => {
                let text = whole(&"a".repeat(4 * self.tokens as usize), 10, self.tokens);
                let mut body: Value = serde_json::from_str(&text).expect("JSON");
                if !usage {
                    body.as_object_mut().expect("an object").remove("usage");
                }
                begun.reply(200, &json, body.to_string())
            }
            End::Refuses(code) => Script::new().at(30).reply(code, &json, "{}"),
            End::InBand(code) if self.streams => begun.say(error("own words", code)).say(d()).end(),
            End::InBand(code) => begun.reply(200, &json, in_json(code)),
            End::Resets => begun.reset(),
            End::HangsUp if self.streams => begun.end(),
            End::HangsUp => begun.open_with(200, &json).put("{").close(),
            End::Silence => begun.silence(),
        }
    }

    /// What it may cost at least and at most, as its end was told: output, and whether it counts.
    /// `worked`: how long the engine had it; `in_all`: since it had it first, as what is sent once more
    /// behind a connection that was closed is no attempt of its own.
    fn bound(&self, line: &Line, worked: u64, in_all: u64) -> (u64, u64, u64) {
        let by = |after: u64, most: u64| if after < 100 { 0 } else { ((after - 100) / 20 + 1).min(most) };
        let came = self.streams && self.tokens > 0 && !matches!(self.end, End::Refuses(_));
        let verdict = line.verdict();
        match verdict.as_str() {
            "met" => (1, self.tokens, self.tokens),
            "excluded(invalid_request)" => (1, 0, 0),
            _ if line.has_left() && line.number("attempts") == Some(0.0) => (0, 0, 0),
            // Of a stream what came, and what came in the very moment of the cut may be missing.
            _ if (line.has_left() || verdict.contains("timeout")) && self.streams => {
                (1, by(worked.saturating_sub(1), self.tokens), by(worked, self.tokens))
            }
            // The output generated by then, within a fifth.
            _ if line.has_left() || verdict.contains("timeout") => {
                (1, by(worked * 4 / 5, self.cap), (by(in_all * 6 / 5, self.cap) + 1).min(self.cap))
            }
            "missed(upstream_unavailable)" => (0, 0, 0),
            "missed(upstream_error)" | "missed(upstream_overload)" | "missed(truncated)" => {
                if came {
                    (1, self.tokens, self.tokens)
                } else {
                    (0, 0, 0)
                }
            }
            other => panic!("{other} was not expected of {self:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// However requests end, nothing stays reserved, and the charge is what their engine did, within
    /// the bounds of `docs/admission.md`.
    #[test]
    fn every_end_of_a_request_charges_the_work_done(
        guests in prop::collection::vec(any_guest(), 1..24),
        reloads in prop::collection::vec((0..2000_u64, 5000..9000_u64, any::<bool>()), 0..3),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let yaml = |burst: u64, with_b: bool| {
                let tokens = format!("tokens_per_minute: 1, tokens_burst: {burst}");
                let yaml = limited(&format!("{tokens}, requests_per_minute: 1, requests_burst: 50"))
                    .promise(&[("ttft_seconds", 0.9), ("e2e_seconds", 1.3)])
                    .with("breaker: {faults: 1000, within: 60s, open: 1s}")
                    .class("timeouts: {first_token: 900ms, idle: 300ms, total: 1300ms}");
                if with_b { yaml.pool("b", &["e2"]) } else { yaml }
            };
            let house = Arc::new(House::new(&yaml(5000, false)));
            let scripts: Vec<Script> = guests.iter().map(Guest::script).collect();
            let engine = engine(&house, move |body| scripts[body["seed"].as_u64().expect("a number") as usize].clone());
            teach(&house).await;
            let mut most = 5000;
            let changes = async {
                for (after, burst, with_b) in reloads {
                    house.sleep(ms(after)).await;
                    house.reload(&yaml(burst, with_b));
                    most = burst;
                }
            };
            let visits = guests.iter().enumerate().map(|(number, guest)| {
                let house = Arc::clone(&house);
                async move {
                    house.sleep(ms(guest.comes)).await;
                    let asked = async { drop(house.send(guest.ask(number)).await.whole().await) };
                    tokio::select! {
                        biased;
                        () = asked => {}
                        () = house.sleep(ms(guest.patience.unwrap_or(100_000))) => {}
                    }
                }
            });
            tokio::join!(changes, join_all(visits));
            let lines = house.lines(LESSONS + guests.len()).await;
            let (requests, connections) = (engine.log().requests(), engine.log().connections());
            let (mut counted, mut least, mut at_most) = (0, 0, 0);
            for (number, guest) in guests.iter().enumerate() {
                let line = lines.iter().find(|line| line.text("request_id") == number.to_string()).expect("its line");
                let mut its = requests.iter().filter(|request| request.json()["seed"] == json!(number));
                let first = its.next();
                let (worked, in_all) = its.last().or(first).zip(first).map_or((0, 0), |(last, first)| {
                    let until = millis(connections[last.connection].closed.unwrap_or(house.clock.now()));
                    (until.saturating_sub(millis(last.body_at)), until.saturating_sub(millis(first.body_at)))
                });
                let (counts, low, high) = guest.bound(line, worked, in_all);
                counted += counts;
                least += counts * (10 + low) * u64::from(counts > 0 && line.verdict() != "excluded(invalid_request)");
                at_most += counts * (11 + high) * u64::from(line.verdict() != "excluded(invalid_request)");
            }
            let spent = most - left(&house, "tokens_per_minute");
            assert!((least..=at_most).contains(&spent), "{spent} tokens, {least} to {at_most} were the work");
            assert_eq!(50 - left(&house, "requests_per_minute"), counted);
            Arc::into_inner(house).expect("all tasks have ended").end().await;
        });
    }
}

/// A form of uncountable audio costs the learned cost of such forms, if no usage is reported.
#[tokio::test(start_paused = true)]
async fn c97_a_form_left_early_pays_the_learned_cost_of_its_audio() {
    let form = |sound: usize| {
        let part = |name: &str, value: &str| {
            format!("--b\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
        };
        let file = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n";
        format!("{}{file}{}\r\n--b--\r\n", part("model", "m1"), "s".repeat(sound))
    };
    let ask = |sound| {
        Ask::of(Method::POST, "/v1/audio/transcriptions")
            .header("content-type", "multipart/form-data; boundary=b")
            .header("authorization", "Bearer sk-acme")
            .with_body(form(sound))
    };
    let told =
        Script::json(200, json!({"text": "hi", "usage": {"prompt_tokens": 1500, "completion_tokens": 40}}).to_string());
    let untold = Script::answer(200, &[("content-type", "text/plain")], "hi");
    let broken = Script::json(500, "{}");
    let yaml = limited(LIMITS).class("timeouts: {total: 2s, response_head: 2s}");
    let house = House::new(&yaml);
    let scripts =
        vec![untold.clone(), told, untold, Script::new().silence(), Script::new().silence(), broken.clone(), broken];
    house.engine("e1", scripts);
    let mut before = 0;
    for (how, sound, cost) in [
        ("nothing is known of forms", 100_000, 0),
        ("the engine tells", 100_000, 1540),
        ("it does not", 50_000, 752),
        ("the client leaves", 50_000, 752),
        ("a time limit", 25_000, 378),
        ("the engine fails", 25_000, 0),
    ] {
        let asked = house.send(ask(sound));
        match how {
            "the client leaves" => drop(tokio::time::timeout(ms(500), asked).await.map(|_| panic!("it is silent"))),
            _ => drop(asked.await.whole().await),
        }
        house.sleep(ms(10)).await;
        let all = spent(&house).0;
        assert!((all - before).abs_diff(cost) <= 3, "{how}: {} {cost}", all - before);
        before = all;
    }
    house.lines(6).await;
    house.end().await;
}

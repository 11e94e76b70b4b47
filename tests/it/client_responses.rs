//! Responses of the gateway itself: errors in every dialect, its own paths, its header fields; and
//! classification.

use crate::support::scripted_engine::{Script, ScriptedEngine, event, fixtures::*};
use goodput::types::ClientState;
use http::Method;
use serde_json::{Value, json};

use crate::support::*;

fn good() -> Script {
    Script::stream().at(10).say(r()).say(t("a")).say(f("stop")).say(d()).end()
}

fn whole_answer() -> Script {
    Script::json(200, whole("x", 5, 1))
}

/// Tenants `acme` (key `sk-acme`) and `limited` (key `sk-limited`, class `batch` only).
fn tenants() -> Yaml {
    let hash = |key: &str| blake3::hash(key.as_bytes()).to_hex().to_string();
    let batch = "  - {slo_class: batch, objectives: {e2e_seconds: {threshold: 60, attainment: 0.9}}, joint_attainment_target: 0.9, window: 28d}";
    Yaml::default()
        .and_class(batch)
        .routes("  - {model: [m1], class: [chat], pools: [a]}\n  - {model: [big], class: [batch], pools: [a]}")
        .top(&format!(
            "tenants:\n  - {{tenant: acme, keys: [{{label: prod, blake3: \"{}\"}}]}}\n  - {{tenant: limited, keys: [{{label: dev, blake3: \"{}\"}}], classes: [batch]}}",
            hash("sk-acme"),
            hash("sk-limited")
        ))
}

// --- errors ---

fn is_openai(error: &Value, kind: &str, code: &str) {
    assert_eq!(error.as_object().map(serde_json::Map::len), Some(1));
    let error = &error["error"];
    assert_eq!((error["type"].as_str(), error["code"].as_str()), (Some(kind), Some(code)));
    assert!(error["message"].as_str().is_some_and(|message| message.len() > 20));
    assert!(error.get("param").is_some());
    assert_eq!(error["request_id"], "req-7");
}

fn is_messages(error: &Value, kind: &str, code: &str) {
    assert_eq!(error["type"], "error");
    assert_eq!((error["error"]["type"].as_str(), error["error"]["code"].as_str()), (Some(kind), Some(code)));
    assert!(error["error"]["message"].as_str().is_some_and(|message| message.len() > 20));
    assert_eq!(error["request_id"], "req-7");
}

#[tokio::test(start_paused = true)]
async fn errors_have_the_shape_of_their_dialect() {
    let house = House::new(&Yaml::default());
    for path in [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"] {
        let answer = house.send(Ask::raw(path, "no json").header("x-request-id", "req-7")).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("content-type")), (400, Some("application/json")));
        is_openai(&answer.json(), "invalid_request_error", "unreadable_body");
    }
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let answer = house.send(Ask::raw(path, "no json").header("x-request-id", "req-7")).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("content-type")), (400, Some("application/json")));
        is_messages(&answer.json(), "invalid_request_error", "unreadable_body");
    }
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_failure_has_its_type() {
    let cases: Vec<(Script, u16, &str, &str, &str)> = vec![
        (Script::new().reset(), 502, "engine_reset", "upstream_error", "api_error"),
        (Script::new().silence(), 504, "first_token_timeout", "timeout_error", "timeout_error"),
        (Script::stream().say(r()).reset(), 502, "stream_incomplete", "upstream_error", "api_error"),
    ];
    for (script, status, code, openai, messages) in cases {
        let (house, _engine) = House::playing(script);
        let ask = |path| Ask::post(path, stream()).header("x-request-id", "req-7");
        let answer = house.send(ask(CHAT)).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (status, Some(code)));
        is_openai(&answer.json(), openai, code);
        let answer = house.send(ask("/v1/messages")).await.whole().await;
        assert_eq!(answer.status.as_u16(), status);
        is_messages(&answer.json(), messages, code);
        house.lines(2).await;
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn errors_in_band_have_the_shape_of_their_dialect() {
    let chat = Script::stream().at(10).say(t("a")).reset();
    let completions = Script::stream()
        .at(10)
        .say(r#"{"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":null}]}"#)
        .reset();
    let delta = json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}});
    let messages = Script::stream().at(10).put(format!("event: content_block_delta\ndata: {delta}\n\n")).reset();
    let delta = json!({"type": "response.output_text.delta", "sequence_number": 41, "item_id": "i", "delta": "a"});
    let responses =
        Script::stream().at(10).put(format!("event: response.output_text.delta\ndata: {delta}\n\n")).reset();
    for (path, script) in
        [(CHAT, chat), ("/v1/completions", completions), ("/v1/messages", messages), ("/v1/responses", responses)]
    {
        let (house, _engine) = House::playing(script);
        let body = json!({"model": "m1", "stream": true, "max_tokens": 5});
        let answer = house.send(Ask::post(path, body).header("x-request-id", "req-7")).await.whole().await;
        let text = answer.text();
        let last = text.trim_end().rsplit("\n\n").next().unwrap();
        let error: Value = serde_json::from_str(last.lines().find_map(|l| l.strip_prefix("data: ")).unwrap()).unwrap();
        match path {
            "/v1/messages" => {
                assert!(last.starts_with("event: error\n"));
                is_messages(&error, "api_error", "stream_incomplete");
            }
            "/v1/responses" => {
                assert!(last.starts_with("event: error\n"));
                assert_eq!(
                    (error["type"].as_str(), error["code"].as_str()),
                    (Some("error"), Some("stream_incomplete"))
                );
                assert_eq!((error["sequence_number"].as_u64(), error["param"].is_null()), (Some(42), true));
                assert!(error["message"].is_string());
            }
            _ => {
                assert!(last.starts_with("data: "));
                is_openai(&error, "upstream_error", "stream_incomplete");
            }
        }
        assert!(text.ends_with("\n\n"));
        assert_eq!(house.line().await.verdict(), "missed(truncated)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn unknown_paths_and_methods_are_rejected() {
    let house = House::new(&Yaml::default());
    let cases = [
        (Method::POST, "/v1/realtime", 404, "unknown_path", None),
        (Method::GET, "/", 404, "unknown_path", None),
        (Method::GET, "/v1/responses/resp_1", 404, "unknown_path", None),
        (Method::DELETE, "/v1/responses/resp_1", 404, "unknown_path", None),
        (Method::GET, CHAT, 405, "method_not_allowed", Some("POST")),
        (Method::PUT, CHAT, 405, "method_not_allowed", Some("POST")),
        (Method::OPTIONS, CHAT, 405, "method_not_allowed", Some("POST")),
        (Method::HEAD, CHAT, 405, "method_not_allowed", Some("POST")),
        (Method::POST, "/v1/models", 405, "method_not_allowed", Some("GET, HEAD")),
        (Method::POST, "/health", 405, "method_not_allowed", Some("GET, HEAD")),
    ];
    for (method, path, status, code, allow) in cases.clone() {
        let ask = Ask::of(method, path).header("x-request-id", "req-7");
        let answer = house.send(ask).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("allow")), (status, allow), "{path}");
        let kind = if status == 404 { "not_found_error" } else { "invalid_request_error" };
        is_openai(&answer.json(), kind, code);
    }
    let answer = house.send(Ask::of(Method::GET, "/v1/messages/batches").header("x-request-id", "req-7")).await;
    is_messages(&answer.whole().await.json(), "not_found_error", "unknown_path");
    let lines = house.lines(cases.len() + 1).await;
    assert!(lines.iter().all(|line| line.verdict() == "excluded(invalid_request)" && line.text("class") == "-"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn unsupported_requests_are_rejected_before_any_engine_is_tried() {
    let yaml = Yaml::default().routes("  - {model: [m1, \"llama-*\"], pools: [a]}");
    let cases = [
        (
            "/v1/responses",
            json!({"model": "m1", "input": "x", "background": true}),
            400,
            "background_refused",
            "background",
        ),
        (CHAT, json!({"model": "m1", "kv_transfer_params": {"do_remote_decode": true}}), 400, "transfer_refused", ""),
        (CHAT, json!({"model": "m1", "bootstrap_host": "10.0.0.1"}), 400, "transfer_refused", ""),
        (CHAT, json!({"model": "m1", "nvext": {"backend_instance_id": 5}}), 400, "transfer_refused", ""),
        (CHAT, json!({"model": "nobody"}), 404, "model_not_found", "model"),
        (CHAT, json!({"messages": []}), 404, "model_missing", "model"),
        (CHAT, json!({"model": null}), 404, "model_missing", "model"),
    ];
    for (path, body, status, code, param) in cases {
        let (house, engine) = House::playing_with(&yaml, whole_answer());
        let answer = house.post(path, body).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (status, Some(code)));
        assert_eq!(answer.json()["error"]["param"].as_str().unwrap_or_default(), param);
        assert!(engine.log().requests().is_empty());
        assert_eq!(house.line().await.verdict(), "excluded(invalid_request)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_without_a_model_uses_the_route_for_any_model() {
    let (house, engine) = House::playing(whole_answer());
    assert_eq!(house.chat(json!({"messages": []})).await.whole().await.status, 200);
    assert_eq!(engine.log().requests().len(), 1);
    assert_eq!(house.line().await.text("model"), "other");
    house.end().await;
}

// --- keys, tenants, classes ---

#[tokio::test(start_paused = true)]
async fn keys_are_required_if_tenants_are_configured() {
    let (house, engine) = House::playing_with(&tenants(), whole_answer());
    let cases: [(Fields, u16, &str); 6] = [
        (&[], 401, "missing_key"),
        (&[("authorization", "Bearer sk-wrong")], 401, "unknown_key"),
        (&[("authorization", "Basic sk-acme")], 401, "missing_key"),
        (&[("authorization", "Bearer sk-acme"), ("x-api-key", "sk-limited")], 401, "two_keys"),
        (&[("authorization", "Bearer sk-acme")], 200, ""),
        (&[("x-api-key", "sk-acme")], 200, ""),
    ];
    for (headers, status, code) in cases {
        let ask = headers.iter().fold(Ask::post(CHAT, unary()), |ask, (name, value)| ask.header(name, value));
        let answer = house.send(ask).await.whole().await;
        assert_eq!(answer.status.as_u16(), status, "{headers:?}");
        if status == 401 {
            assert!(["missing_key", "unknown_key", "two_keys"].contains(&answer.header("x-goodput-reason").unwrap()));
            if code != "missing_key" {
                assert_eq!(answer.header("x-goodput-reason"), Some(code));
            }
            assert_eq!(answer.json()["error"]["type"], "authentication_error");
        }
    }
    assert_eq!(engine.log().requests().len(), 2);
    assert!(engine.log().requests().iter().all(|request| request.header("authorization").is_none()));
    let lines = house.lines(6).await;
    assert_eq!(lines.iter().filter(|line| line.verdict() == "excluded(unauthorized)").count(), 4);
    assert_eq!(lines[4].text("tenant"), "acme");
    assert_eq!(house.page().sum("goodput_tenant_slo_total", &[("tenant", "acme"), ("class", "chat")]), 2.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_class_that_the_tenant_may_not_use_is_a_403() {
    let (house, engine) = House::playing_with(&tenants(), whole_answer());
    let answer = house.send(Ask::post(CHAT, unary()).header("x-api-key", "sk-limited")).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.json()["error"]["type"].as_str()), (403, Some("permission_error")));
    assert!(engine.log().requests().is_empty());
    assert_eq!(house.line().await.verdict(), "excluded(unauthorized)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_models_are_those_that_the_tenant_may_use() {
    let (house, _engine) =
        House::playing_with(&tenants().top("models: {aliases: {nick: m1, giant: big}}"), whole_answer());
    let ids = |answer: &Whole| -> Vec<String> {
        let data = answer.json()["data"].as_array().unwrap().clone();
        data.iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
    };
    let list = |key: &'static str| Ask::of(Method::GET, "/v1/models").header("x-api-key", key);
    let answer = house.send(list("sk-acme")).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.json()["object"].as_str()), (200, Some("list")));
    assert_eq!(ids(&answer), ["big", "giant", "m1", "nick"]);
    assert_eq!(ids(&house.send(list("sk-limited")).await.whole().await), ["big", "giant"]);
    assert_eq!(house.get("/v1/models").await.whole().await.status, 401);

    let one =
        |model: &str, key: &'static str| Ask::of(Method::GET, &format!("/v1/models/{model}")).header("x-api-key", key);
    assert_eq!(house.send(one("m1", "sk-acme")).await.whole().await.json()["id"], "m1");
    assert_eq!(house.send(one("m1", "sk-limited")).await.whole().await.status, 404);
    assert_eq!(house.send(one("nobody", "sk-acme")).await.whole().await.status, 404);
    let lines = house.lines(6).await;
    assert_eq!(lines.iter().filter(|line| line.verdict() == "excluded(unjudged)").count(), 3);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn models_of_a_pattern_come_from_the_engines_lists() {
    let house = House::new(&Yaml::default().routes("  - {model: [\"llama-*\"], pools: [a]}"));
    let pool = goodput::types::PoolId::from("a");
    let (engine, _) = house.gateway.fleet.engines(&pool).remove(0);
    house.gateway.fleet.lists_models(&pool, &engine, vec!["llama-3".into(), "qwen".into()]);
    let answer = house.get("/v1/models").await.whole().await;
    assert_eq!(answer.json()["data"].as_array().unwrap().len(), 1);
    assert_eq!(answer.json()["data"][0]["id"], "llama-3");
    assert_eq!(house.get("/v1/models/llama-3").await.whole().await.status, 200);
    house.lines(2).await;
    house.end().await;
}

/// The engines' metadata of a model reach clients, also under an alias; the shortest length applies.
#[tokio::test(start_paused = true)]
async fn the_list_of_models_keeps_the_engines_metadata() {
    let yaml = Yaml::default()
        .pool("a", &["e1", "e2"])
        .routes("  - {model: [\"llama-*\", m1], pools: [a]}")
        .top("models: {aliases: {nick: llama-3}}");
    let house = House::new(&yaml);
    let list = |length: u64| {
        let llama = json!({"id": "llama-3", "object": "model", "created": 1_700_000_000, "owned_by": "vllm",
            "root": "org/llama-3", "parent": null, "max_model_len": length, "permission": [{"id": "p"}]});
        let adapter = json!({"id": "llama-lora", "created": 1.5, "root": "/lora", "parent": "llama-3"});
        json!({"object": "list", "data": [llama, adapter, {"id": "llama-odd", "max_model_len": "no"}]}).to_string()
    };
    for (host, length) in [("e1", 8192), ("e2", 4096)] {
        let engine = ScriptedEngine::new(house.clock, move |request| match request.target.as_str() {
            "/v1/models" => Script::json(200, list(length)),
            _ => Script::json(200, "{}"),
        });
        house.network.engine(host, &engine);
    }
    let _probes = house.probe();
    house.sleep(ms(60_000)).await;
    let answer = house.get("/v1/models").await.whole().await.json();
    let of = |id: &str| answer["data"].as_array().unwrap().iter().find(|model| model["id"] == id).unwrap().clone();
    for id in ["llama-3", "nick"] {
        let expected = json!({"id": id, "object": "model", "created": 1_700_000_000, "owned_by": "goodput", "type": "model",
            "display_name": id, "root": "org/llama-3", "max_model_len": 4096});
        assert_eq!(of(id), expected);
        assert_eq!(house.get(&format!("/v1/models/{id}")).await.whole().await.json(), expected);
    }
    assert_eq!((&of("llama-lora")["parent"], &of("llama-lora")["root"]), (&"llama-3".into(), &"/lora".into()));
    for id in ["llama-odd", "m1"] {
        assert_eq!((&of(id)["created"], of(id).get("max_model_len"), of(id).get("root")), (&0.into(), None, None));
    }
    house.lines(3).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn listed_engine_paths_are_relayed_unjudged_and_control_paths_never() {
    let yaml = Yaml::default().routes("  - {model: [m1], pools: [a]}").top("engine_paths: [/version, /load]");
    let script = Script::json(200, r#"{"ok":true,"usage":{"prompt_tokens":3,"completion_tokens":4}}"#);
    let (house, engine) = House::playing_with(&yaml, script);
    let posts = [
        "/pooling",
        "/classify",
        "/v2/embed",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/completions/render",
    ];
    for path in posts {
        let answer = house.post(path, json!({"model": "m1", "messages": [], "x": 1})).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.json()["ok"].as_bool()), (200, Some(true)), "{path}");
        assert_eq!(house.get(path).await.whole().await.status, 405, "{path}");
    }
    for path in ["/version", "/load?a=%2F"] {
        let answer = house.get(path).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.json()["ok"].as_bool()), (200, Some(true)), "{path}");
        let seen = engine.log().requests().last().cloned().unwrap();
        assert_eq!((seen.method.as_str(), seen.target.as_str(), seen.body.len()), ("GET", path, 0));
    }
    assert_eq!(house.post("/version", json!({})).await.whole().await.status, 405);
    let before = engine.log().requests().len();
    for path in
        ["/ping", "/sleep", "/v1/load_lora_adapter", "/reset_prefix_cache", "/collective_rpc", "/update_weights"]
    {
        assert_eq!(house.get(path).await.whole().await.status, 404, "{path}");
        assert_eq!(house.post(path, unary()).await.whole().await.status, 404, "{path}");
    }
    assert_eq!(engine.log().requests().len(), before);
    let lines = house.lines(27).await;
    let relayed: Vec<_> = lines.iter().filter(|line| line.number("attempts") == Some(1.0)).collect();
    assert_eq!(relayed.len(), 8);
    assert!(relayed.iter().all(|line| line.verdict() == "excluded(unjudged)"), "{relayed:?}");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn responses_of_the_messages_dialect_have_the_header_request_id() {
    let (house, _engine) = House::playing(Script::json(200, r#"{"type":"message","content":[]}"#));
    for (path, has_it) in
        [("/v1/messages", true), ("/v1/messages/count_tokens", true), ("/v1/messages/x", true), (CHAT, false)]
    {
        for body in [json!({"model": "m1", "messages": []}).to_string(), "{".to_owned()] {
            let answer = house.send(Ask::raw(path, body).header("x-request-id", "mine")).await.whole().await;
            assert_eq!(answer.header("x-request-id"), Some("mine"));
            assert_eq!(answer.header("request-id"), has_it.then_some("mine"), "{path} {}", answer.status);
        }
    }
    house.lines(8).await;
    house.end().await;
}

/// RFC 9110 section 15.5.2.
#[tokio::test(start_paused = true)]
async fn c93_a_401_says_how_to_authenticate() {
    let house = House::new(&tenants());
    for ask in [Ask::post(CHAT, unary()), Ask::post(CHAT, unary()).header("x-api-key", "nobody")] {
        let answer = house.send(ask).await.whole().await;
        assert_eq!(
            (answer.status.as_u16(), answer.header("www-authenticate")),
            (401, Some("Bearer realm=\"goodput\""))
        );
    }
    let answer = house.send(Ask::post(CHAT, json!({})).header("x-api-key", "sk-acme")).await.whole().await;
    assert_eq!(answer.header("www-authenticate"), None);
    house.lines(3).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_model_is_found_by_its_percent_encoded_name() {
    let house = House::new(&Yaml::default().routes("  - {model: [org/name, \"\u{fc} x\", \"a%2Fb\"], pools: [a]}"));
    for (path, id) in [
        ("org/name", Some("org/name")),
        ("org%2Fname", Some("org/name")),
        ("org%2fname/", Some("org/name")),
        ("%C3%BC%20x", Some("\u{fc} x")),
        ("a%252Fb", Some("a%2Fb")),
        ("a%2Fb", None),
        ("org%2name", None),
        ("%FF", None),
        ("org/name//", None),
    ] {
        let answer = house.get(&format!("/v1/models/{path}")).await.whole().await;
        assert_eq!(answer.status.as_u16(), if id.is_some() { 200 } else { 404 }, "{path}");
        assert_eq!(answer.json()["id"].as_str(), id, "{path}");
    }
    house.lines(9).await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn health_requires_neither_key_nor_engine() {
    let house = House::new(&tenants());
    for path in ["/health", "/health/"] {
        let answer = house.get(path).await.whole().await;
        assert_eq!((answer.status.as_u16(), answer.json()), (200, json!({"status": "ok"})));
    }
    house.gateway.begin_drain();
    assert_eq!(house.get("/health").await.whole().await.status, 503);
    assert!(house.lines(3).await.iter().all(|line| line.verdict() == "excluded(unjudged)"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_first_matching_rule_gives_the_class() {
    let classes = "  - {slo_class: batch, objectives: {e2e_seconds: {threshold: 60, attainment: 0.9}}, joint_attainment_target: 0.9, window: 28d}\n  - {slo_class: tools, objectives: {e2e_seconds: {threshold: 20, attainment: 0.9}}, joint_attainment_target: 0.9, window: 28d}";
    let yaml = Yaml::default().and_class(classes).top(
        "classify:\n  - {class: tools, when: {has_tools: true, stream: false}}\n  - {class: batch, when: {header: {x-slo-class: batch}}}\n  - {class: batch, when: {max_tokens: {at_least: 1000}}}",
    );
    let (house, _engine) = House::playing_with(&yaml, whole_answer());
    let mut with_tools = unary();
    with_tools["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    let mut long = unary();
    long["max_tokens"] = json!(2000);
    let asks = [
        (Ask::post(CHAT, unary()), "chat", "default"),
        (Ask::post(CHAT, with_tools), "tools", "rule 1"),
        (Ask::post(CHAT, unary()).header("x-slo-class", "batch"), "batch", "rule 2"),
        (Ask::post(CHAT, long), "batch", "rule 3"),
    ];
    for (number, (ask, class, rule)) in asks.into_iter().enumerate() {
        let answer = house.send(ask).await.whole().await;
        assert_eq!(answer.header("x-slo-class"), Some(class));
        let line = house.lines(number + 1).await.remove(number);
        assert_eq!((line.text("class"), line.text("rule")), (class, rule));
    }
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn prompts_are_sorted_by_length_and_models_by_the_settings_names() {
    let yaml = Yaml::default()
        .top("length_buckets: {short: 10, medium: 100}\nmodels: {aliases: {nick: m2}}")
        .routes("  - {model: [m1, \"llama-*\", \"*\"], pools: [a]}");
    // A response without usage, from which no bytes per token are learned.
    let answer = r#"{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}"#;
    let (house, _engine) = House::playing_with(&yaml, Script::json(200, answer));
    let ask = |model: &str, bytes: usize| json!({"model": model, "messages": [{"role": "user", "content": "x".repeat(bytes)}]});
    let cases = [
        (ask("m1", 38), "short", "m1"),
        (ask("m1", 39), "medium", "m1"),
        (ask("llama-7b", 380), "medium", "llama-*"),
        (ask("llama-7b", 400), "long", "llama-*"),
        (ask("nick", 1), "short", "m2"),
        (ask("who-knows", 1), "short", "other"),
    ];
    for (number, (body, length, model)) in cases.into_iter().enumerate() {
        house.chat(body).await.whole().await;
        let line = house.lines(number + 1).await.remove(number);
        assert_eq!((line.text("length"), line.text("model")), (length, model));
        assert!(house.page().sum("slo_total", &[("length", length), ("model", model)]) >= 1.0);
    }
    house.end().await;
}

// --- header fields of responses ---

#[tokio::test(start_paused = true)]
async fn responses_have_headers_for_id_class_pool_and_timing() {
    let script = Script::new().at(250).reply(200, &[("content-type", "application/json")], whole("x", 1, 1));
    let (house, engine) = House::playing(script);
    let answer = house.send(Ask::post(CHAT, unary()).header("x-request-id", "mine-1")).await.whole().await;
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    assert_eq!(answer.header("x-slo-class"), Some("chat"));
    assert_eq!(answer.header("x-goodput-pool"), Some("a"));
    assert_eq!(answer.header("server-timing"), Some("queue;dur=0.000, upstream;dur=250.000"));
    assert_eq!(answer.header("x-goodput-reason"), None);
    assert_eq!(house.line().await.text("request_id"), "mine-1");
    let seen = engine.log().requests()[0].header("x-request-id").unwrap().to_owned();
    assert!(seen.len() > 16 && seen.starts_with("mine-1-"), "engines see a unique one that can be matched: {seen}");

    for unfit in ["has space", "", "quote\"", &"x".repeat(200)] {
        let answer = house.send(Ask::post(CHAT, unary()).header("x-request-id", unfit)).await.whole().await;
        let made = answer.header("x-request-id").unwrap();
        assert!(made.starts_with("req-") && made.len() > 20, "{made}");
    }
    let ids: std::collections::BTreeSet<String> =
        engine.log().requests().iter().map(|request| request.header("x-request-id").unwrap().to_owned()).collect();
    assert_eq!(ids.len(), 5);
    let answer = house.send(Ask::of(Method::GET, "/nothing").header("x-request-id", "mine-2")).await.whole().await;
    assert_eq!(answer.header("x-request-id"), Some("mine-2"));
    assert_eq!(answer.header("x-slo-class"), None);
    house.lines(6).await;
    house.end().await;
}

/// An engine whose address leads back here sends its request while that still runs. A client that copies the
/// id from a response to another request has proved nothing.
#[tokio::test(start_paused = true)]
async fn c95_a_loop_is_an_invalid_request_and_an_id_proves_only_its_own_request() {
    let key = blake3::hash(b"sk-t").to_hex();
    let yaml = Yaml::default().routes("  - {model: [m1], pools: [a]}").top(&format!(
        "tenants: [{{tenant: t, keys: [{{label: a, blake3: \"{key}\"}}], limits: {{requests_per_minute: 4}}}}]"
    ));
    let script = Script::new().at(250).reply(200, &[("content-type", "application/json")], whole("x", 1, 1));
    let (house, engine) = House::playing_with(&yaml, script);
    let ask = |body: Value, id: &str| Ask::post(CHAT, body).header("x-request-id", id).header("x-api-key", "sk-t");
    let seen = || engine.log().requests().last().unwrap().header("x-request-id").unwrap().to_owned();
    let replayed = async {
        house.sleep(ms(100)).await;
        let looped = house.send(ask(unary(), &seen())).await.whole().await;
        let keyless = house.send(Ask::post(CHAT, unary()).header("x-request-id", &seen())).await.whole().await;
        (looped, keyless)
    };
    let (first, (looped, keyless)) =
        tokio::join!(async { house.send(ask(unary(), "mine")).await.whole().await }, replayed);
    assert_eq!(first.status, 200);
    assert_eq!((looped.status.as_u16(), looped.header("x-goodput-reason")), (508, Some("loop_detected")));
    assert_eq!(keyless.header("x-goodput-reason"), Some("missing_key"), "whoever has no key learns nothing else");
    let seen = seen();
    for (body, reason) in [(json!({}), Some("model_missing")), (unary(), None), (unary(), None), (unary(), None)] {
        assert_eq!(house.send(ask(body, &seen)).await.whole().await.header("x-goodput-reason"), reason);
    }
    let limited = house.send(ask(unary(), &seen)).await.whole().await;
    assert_eq!(limited.header("x-goodput-reason"), Some("rate_limit_exceeded"));
    assert_eq!(engine.log().requests().len(), 4);
    assert_eq!(house.page().sum("goodput_slo_missed_total", &[]), 0.0);
    house.end().await;
}

/// The loop tag of a running request, on any request.
#[tokio::test(start_paused = true)]
async fn c95_a_copied_loop_tag_is_an_invalid_request_on_every_path() {
    let words = json!({"model": "m1", "input": "hi", "messages": [], "prompt": "hi", "max_tokens": 9, "query": "q", "documents": ["d"]});
    let mut streamed = words.clone();
    streamed["stream"] = json!(true);
    let paths = [
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/tokenize",
    ];
    let script = Script::new().at(900).reply(200, &[("content-type", "application/json")], whole("x", 1, 1));
    let (house, engine) = House::playing_with(&Yaml::default().promise(&[("e2e_seconds", 5.0)]), script);
    let seen = || engine.log().requests().last().unwrap().header("x-request-id").unwrap().to_owned();
    let replays = async {
        house.sleep(ms(100)).await;
        let (mark, mut sent) = (seen(), 0);
        for path in paths {
            for body in [&words, &streamed] {
                let answer =
                    house.send(Ask::post(path, body.clone()).header("X-Request-ID", &mark)).await.whole().await;
                assert_eq!(
                    (answer.status.as_u16(), answer.header("x-goodput-reason")),
                    (508, Some("loop_detected")),
                    "{path}"
                );
                sent += 1;
            }
        }
        let mut request = h2_post(CHAT, &streamed);
        request.headers_mut().insert("x-request-id", mark.parse().unwrap());
        assert_eq!(house.connect_h2().await.send_request(request).await.unwrap().status(), 508);
        let mut client = house.connect(64 * 1024);
        let body = words.to_string();
        client
            .send(format!(
                "POST {CHAT} HTTP/1.1\r\nhost: g\r\nX-Request-Id: {mark}\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ))
            .await;
        client.read_until("loop_detected").await;
        // Rejected bodies and unknown paths do not reveal it.
        for (ask, status) in
            [(Ask::raw(CHAT, "{"), 400), (Ask::post(CHAT, json!({})), 502), (Ask::of(Method::GET, "/v1/models"), 200)]
        {
            let answer = house.send(ask.header("x-request-id", &mark)).await.whole().await;
            assert!(answer.status == status || answer.status == 508, "{}", answer.status);
        }
        sent + 2
    };
    let first = async { house.send(Ask::post(CHAT, unary()).header("x-request-id", "mine")).await.whole().await };
    let (first, loops) = tokio::join!(first, replays);
    assert_eq!((first.status.as_u16(), engine.log().requests().len()), (200, 1), "nobody else was sent on");
    let page = house.page();
    assert!(page.sum("goodput_refused_total", &[("code", "loop_detected")]) >= f64::from(loops));
    assert_eq!(page.sum("goodput_slo_missed_total", &[]), 0.0);
    let excluded = page.sum("goodput_slo_excluded_total", &[("reason", "invalid_request")]);
    assert!(excluded >= f64::from(loops), "{excluded}");
    house.lines(loops as usize + 4).await;
    house.end().await;
}

/// An engine's fields of these names stay here, in every version of HTTP; its times pass.
#[tokio::test(start_paused = true)]
async fn headers_of_the_gateway_never_come_from_an_engine() {
    let of_engine = [
        ("content-type", "application/json"),
        ("x-request-id", "theirs"),
        ("X-Slo-Class", "theirs"),
        ("x-goodput-pool", "theirs"),
        ("x-goodput-degraded", "theirs"),
        ("X-Goodput-Reason", "theirs"),
        ("server-timing", "theirs"),
    ];
    let script = || Script::new().at(250).reply(200, &of_engine, whole("x", 1, 1));
    let ours = [
        ("x-request-id", &["mine"][..]),
        ("x-slo-class", &["chat"]),
        ("x-goodput-pool", &["a"]),
        ("x-goodput-degraded", &[]),
        ("x-goodput-reason", &[]),
        ("server-timing", &["theirs", "queue;dur=0.000, upstream;dur=250.000"]),
    ];
    let house = House::new(&Yaml::default());
    house.engine("e1", vec![script(), script()]);

    let (body, mut client) = (unary().to_string(), house.connect(64 * 1024));
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\nx-request-id: mine\r\nconnection: close");
    client.send(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
    let answer = String::from_utf8(client.read_to_end().await.0).unwrap();
    let (head, _) = answer.split_once("\r\n\r\n").unwrap();
    for (name, values) in ours {
        let lines = head.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        assert_eq!(lines.collect::<Vec<_>>(), values, "{name}");
    }

    let mut client = house.connect_h2().await;
    let mut request = h2_post(CHAT, &unary());
    request.headers_mut().insert("x-request-id", "mine".parse().unwrap());
    let mut answer = client.send_request(request).await.unwrap();
    for (name, values) in ours {
        let fields = answer.headers().get_all(name).iter().map(|value| value.to_str().unwrap());
        assert_eq!(fields.collect::<Vec<_>>(), values, "{name}");
    }
    while h2_next(&mut answer).await.is_some() {}
    house.lines(2).await;
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn rejections_after_classification_name_the_class() {
    let house = House::new(&Yaml::default());
    let answer = house.chat(stream()).await.whole().await;
    assert_eq!((answer.status.as_u16(), answer.header("x-slo-class")), (502, Some("chat")));
    house.line().await;
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn pools_put_their_own_headers_and_key_in_place() {
    let yaml = Yaml::default().engine("headers: {x-team: gold}").engine("api_key_file: engine");
    let (house, engine) = House::playing_with(&yaml, whole_answer());
    let ask = Ask::post(CHAT, unary()).header("authorization", "Bearer sk-client").header("x-team", "lead");
    house.send(ask).await.whole().await;
    let sent = &engine.log().requests()[0];
    assert_eq!(sent.header("authorization"), Some("Bearer sk-ENGINE"));
    assert_eq!(sent.headers.iter().filter(|(name, _)| name == "x-team").count(), 1);
    assert_eq!(sent.header("x-team"), Some("gold"));
    house.line().await;
    house.end().await;
}

// --- paths that generate nothing ---

#[tokio::test(start_paused = true)]
async fn other_paths_are_relayed_and_judged_only_if_configured() {
    let answer = r#"{"object":"list","data":[]}"#;
    for (judged, verdict) in [("[]", "excluded(unjudged)"), ("[/v1/embeddings]", "met")] {
        let yaml = Yaml::default().top(&format!("inspect: {{judged_paths: {judged}}}"));
        let script = Script::new().at(400).reply(200, &[("content-type", "application/json")], answer);
        let (house, engine) = House::playing_with(&yaml, script);
        let got = house.post("/v1/embeddings", json!({"model": "m1", "input": "hi"})).await.whole().await;
        assert_eq!((got.text(), engine.log().requests()[0].target.as_str()), (answer.into(), "/v1/embeddings"));
        assert_eq!(house.line().await.verdict(), verdict);
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_judged_path_is_held_to_the_budget_of_one_token() {
    let yaml = Yaml::default().top("inspect: {judged_paths: [/v1/embeddings, /v1/audio/speech]}");
    let json = |body: &str| Script::new().at(501).reply(200, &[("content-type", "application/json")], body.to_owned());
    let cases = [
        ("/v1/embeddings", json("{}"), "missed(e2e)"),
        ("/v1/embeddings", Script::json(200, "[]"), "missed(unparseable)"),
        ("/v1/embeddings", Script::answer(200, &[("content-type", "text/html")], "<html>"), "missed(unparseable)"),
        ("/v1/embeddings", Script::json(200, "{\"error\":{\"code\":503}}"), "missed(upstream_overload)"),
        ("/v1/audio/speech", Script::answer(200, &[("content-type", "audio/wav")], "RIFF"), "met"),
        ("/v1/audio/speech", Script::json(400, "{}"), "excluded(invalid_request)"),
    ];
    for (path, script, verdict) in cases {
        let (house, _engine) = House::playing_with(&yaml, script);
        house.post(path, json!({"model": "m1", "input": "hi"})).await.whole().await;
        assert_eq!(house.line().await.verdict(), verdict, "{path}");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_an_unjudged_path_is_unjudged() {
    let (house, engine) = House::playing(Script::new().silence());
    let ask = house.post("/v1/embeddings", json!({"model": "m1", "input": "hi"}));
    assert!(tokio::time::timeout(ms(9000), ask).await.is_err());
    assert_eq!(engine.log().closed(0).await, at(9000));
    assert_eq!(house.line().await.verdict(), "excluded(unjudged)");
    house.end().await;
}

// --- drain ---

#[tokio::test(start_paused = true)]
async fn c70_while_draining_new_requests_are_refused_and_open_ones_run_on() {
    let script = Script::stream().say_all([(100, t("a")), (130, t("b"))]).at(3000).say(f("stop")).say(d()).end();
    let yaml = Yaml::default().promise(&[("ttft_seconds", 0.5)]);
    let (house, engine) = House::playing_with(&yaml, script);
    let open = house.chat(stream()).await;
    house.gateway.begin_drain();
    for (path, body) in [(CHAT, stream()), ("/v1/messages", stream())] {
        let refused = house.post(path, body).await.whole().await;
        assert_eq!((refused.status.as_u16(), refused.header("x-goodput-reason")), (503, Some("draining")));
        assert_eq!((refused.header("retry-after"), refused.header("connection")), (Some("1"), Some("close")));
    }
    let answer = open.whole().await;
    assert_eq!(answer.end, at(3000));
    assert!(!answer.text().contains("error"));
    assert_eq!(engine.log().requests().len(), 1);
    let lines = house.lines(3).await;
    let verdicts: Vec<String> = lines.iter().map(Line::verdict).collect();
    assert_eq!(verdicts, ["missed(shed)", "missed(shed)", "met"]);
    assert_eq!(house.page().sum("goodput_slo_missed_total", &[("class", "chat"), ("reason", "shed")]), 2.0);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c70_unjudged_requests_are_no_misses_while_draining() {
    for (judged, verdict) in [("[]", "excluded(unjudged)"), ("[/v1/embeddings]", "missed(shed)")] {
        let yaml = Yaml::default().top(&format!("inspect: {{judged_paths: {judged}}}"));
        let house = House::new(&yaml);
        house.gateway.begin_drain();
        let embeddings = house.post("/v1/embeddings", json!({"model": "m1", "input": "hi"})).await.whole().await;
        let models = house.get("/v1/models").await.whole().await;
        assert_eq!((embeddings.status.as_u16(), models.status.as_u16()), (503, 503));
        let verdicts: Vec<String> = house.lines(2).await.iter().map(Line::verdict).collect();
        assert_eq!(verdicts, [verdict, "excluded(unjudged)"]);
        house.end().await;
    }
}

/// Runs `ask` until 200 ms, then the drain limit passes; `accept` polls right after that.
async fn drained_at_200(house: &House, ask: Value) -> Whole {
    let client = ClientState::default();
    let exchange = async {
        let reply = house.send(Ask::post(CHAT, ask).client(&client)).await;
        reply.whole().await
    };
    tokio::pin!(exchange);
    tokio::select! {
        _ = &mut exchange => panic!("it ended before the drain limit"),
        () = house.sleep(ms(200)) => {}
    }
    client.end_drain();
    exchange.await
}

#[tokio::test(start_paused = true)]
async fn c70_the_drain_limit_ends_a_stream_with_an_error_event() {
    let (house, engine) = House::playing(Script::stream().say_all([(100, t("a")), (130, t("b"))]).silence());
    let answer = drained_at_200(&house, stream()).await;
    assert_eq!((answer.end, answer.is_cut), (at(200), false));
    let rest = answer.text().strip_prefix(&[event(&t("a")), event(&t("b"))].concat()).unwrap().to_owned();
    assert!(rest.starts_with("data: {\"error\":") && rest.contains("drain_cut"));
    assert_eq!(engine.log().closed(0).await, at(200));
    assert_eq!(house.line().await.verdict(), "missed(internal)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c70_the_drain_limit_ends_a_wait_with_a_503() {
    for (ask, script) in [
        (stream(), Script::new().silence()),
        (unary(), Script::new().silence()),
        (stream(), Script::stream().say(r()).silence()),
    ] {
        let (house, engine) = House::playing(script);
        let answer = drained_at_200(&house, ask).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-goodput-reason")), (503, Some("drain_cut")));
        assert_eq!(engine.log().closed(0).await, at(200));
        assert_eq!(house.line().await.verdict(), "missed(internal)");
        house.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn c70_the_drain_limit_cuts_a_whole_answer_that_has_begun() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"a";
    let (house, _engine) = House::playing(Script::new().write(head).silence());
    let answer = drained_at_200(&house, unary()).await;
    assert_eq!((answer.end, answer.is_cut), (at(200), true));
    assert_eq!(house.line().await.verdict(), "missed(internal)");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c70_over_a_connection_a_shutdown_keeps_streams_and_rejects_the_rest() {
    let script = Script::stream().say_all([(100, t("a")), (3000, t("b"))]).say(f("stop")).say(d()).end();
    for (drain, ends, last) in [(10_000, 3000, "[DONE]"), (1000, 1000, "drain_cut")] {
        let (house, _engine) = House::playing_with(&Yaml::default().promise(&[("ttft_seconds", 0.5)]), script.clone());
        let mut client = house.connect(64 * 1024);
        client.post(CHAT, &stream()).await;
        client.read_until("\"a\"").await;
        let shutdown = goodput::accept::settings::Shutdown { delay: ms(0), drain: ms(drain - 100) };
        let departure = house.drain().leave(house.clock, &shutdown);
        let read = async {
            let (text, when) = client.read_until(last).await;
            (text, when, client.read_to_end().await.1)
        };
        let (_, (_, when, closed)) = tokio::join!(departure, read);
        assert_eq!((when, closed), (at(ends), at(ends)), "and the connection closes behind it");
        let verdict = if last == "[DONE]" { "met" } else { "missed(internal)" };
        assert_eq!(house.line().await.verdict(), verdict);
        drop(client);
        house.end().await;
    }
}

// --- reload ---

#[tokio::test(start_paused = true)]
async fn a_stream_keeps_the_settings_it_arrived_under() {
    let script = Script::stream().say_all([(100, t("a")), (180, t("b"))]).say(f("stop")).say(u(5, 2)).say(d()).end();
    let (house, _engine) =
        House::playing_with(&Yaml::default().promise(&[("ttft_seconds", 0.5), ("tpot_seconds", 0.1)]), script);
    let old = house.chat(stream_with_usage()).await;
    // TPOT 80 ms is now too slow, the class is renamed, and the pool is another one.
    let new = Yaml::default().no_pools().pool("b", &["f1"]);
    house.reload(&new);
    let other = house.engine("f1", vec![good()]);
    let during = house.chat(stream_with_usage()).await.whole().await;
    assert_eq!(during.header("x-goodput-pool"), Some("b"));
    old.whole().await;
    let lines = house.lines(2).await;
    let of = |pool: &str| lines.iter().find(|line| line.text("pool") == pool).unwrap();
    assert_eq!((of("a").verdict(), of("b").verdict()), ("met".into(), "met".into()));
    assert_eq!(other.log().requests().len(), 1);
    assert_eq!(house.page().sum("slo_met_total", &[("pool", "a")]), 1.0, "counters stay over a reload");
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_removed_engine_finishes_its_requests() {
    let script = Script::stream().say_all([(100, t("a")), (130, t("b"))]).say(f("stop")).say(d()).end();
    let (house, engine) = House::playing(script);
    let open = house.chat(stream()).await;
    house.reload(&Yaml::default().engines_of_first(&["e2"]));
    house.engine("e2", vec![good()]);
    assert!(open.whole().await.text().ends_with("[DONE]\n\n"));
    for _ in 0..5 {
        assert_eq!(house.chat(stream()).await.whole().await.status, 200);
    }
    assert_eq!(engine.log().requests().len(), 1);
    assert!(house.lines(6).await.iter().all(|line| line.verdict() == "met"));
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c70_the_drain_limit_ends_an_upload_with_a_503() {
    let (house, engine) = House::playing(good());
    let mut client = house.connect(4096);
    client.send("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 100\r\n\r\n{\"model\":").await;
    house.sleep(ms(50)).await;
    let shutdown = goodput::accept::settings::Shutdown { delay: ms(0), drain: ms(150) };
    let departure = house.drain().leave(house.clock, &shutdown);
    let (_, (answer, when)) = tokio::join!(departure, client.read_until("drain_cut"));
    assert!(answer.starts_with("HTTP/1.1 503 "));
    assert_eq!(when, at(200));
    assert!(engine.log().requests().is_empty());
    assert_eq!(house.line().await.verdict(), "missed(internal)");
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_head_request_gets_no_body_over_a_connection() {
    let house = House::new(&Yaml::default());
    let mut client = house.connect(4096);
    client.send("HEAD /v1/models HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n").await;
    let (answer, _) = client.read_to_end().await;
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n"), "{answer}");
    house.line().await;
    drop(client);
    house.end().await;
}

#[tokio::test(start_paused = true)]
async fn c70_the_drain_limit_ends_http2_waits_and_streams_too() {
    let house = House::new(&Yaml::default());
    let speaks = Script::stream().say_all([(10, t("a")), (40, t("b"))]).silence();
    house.engine("e1", vec![speaks, Script::new().silence()]);
    let mut client = house.connect_h2().await;
    let mut open = client.send_request(h2_post(CHAT, &stream())).await.unwrap();
    let waits = tokio::spawn(client.send_request(h2_post(CHAT, &unary())));
    house.sleep(ms(50)).await;
    let shutdown = goodput::accept::settings::Shutdown { delay: ms(0), drain: ms(150) };
    let read = async {
        let mut text = String::new();
        while let Some(bytes) = h2_next(&mut open).await {
            text.push_str(&String::from_utf8_lossy(&bytes));
        }
        text
    };
    let ((), text) = tokio::join!(house.drain().leave(house.clock, &shutdown), read);
    assert!(text.contains("drain_cut"), "{text}");
    assert_eq!(waits.await.unwrap().unwrap().status(), 503);
    let lines = house.lines(2).await;
    assert!(lines.iter().all(|line| line.verdict() == "missed(internal)"));
    drop(client);
    house.end().await;
}

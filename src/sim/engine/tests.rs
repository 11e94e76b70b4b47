//! The engine over in-memory connections, in virtual time.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response};
use serde_json::{Value, json};

use super::*;
use crate::types::Tick;

/// 10 ms per step, whatever its content.
fn settings() -> SimSettings {
    let shape = EngineSpec {
        step_base: Duration::from_millis(10),
        per_decode: Duration::ZERO,
        per_prefill_token: Duration::ZERO,
        per_context_token: Duration::ZERO,
        jitter: 0.0,
        ..EngineSpec::default()
    };
    SimSettings { models: vec!["tiny".to_owned()], shape, ..SimSettings::default() }
}

struct Client {
    send: SendRequest<Full<Bytes>>,
    _line: tokio::task::JoinHandle<()>,
}

impl Client {
    async fn of(engine: &SimEngine) -> Client {
        let (send, line) = handshake(TokioIo::new(engine.connect())).await.unwrap();
        Client { send, _line: tokio::spawn(async move { line.await.unwrap_or(()) }) }
    }

    async fn post(&mut self, path: &str, body: &Value) -> Response<Incoming> {
        let body = Full::new(Bytes::from(body.to_string()));
        let request = Request::post(path).header("x-request-id", "q1").body(body).unwrap();
        self.send.send_request(request).await.unwrap()
    }

    async fn get(&mut self, path: &str) -> String {
        let request = Request::get(path).body(Full::default()).unwrap();
        text(self.send.send_request(request).await.unwrap()).await
    }
}

async fn text(response: Response<Incoming>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// The complete response of an engine with these settings.
async fn answer(settings: SimSettings, path: &str, body: &Value) -> String {
    let engine = SimEngine::start(Clock::start(), settings);
    text(Client::of(&engine).await.post(path, body).await).await
}

async fn parsed(settings: SimSettings, path: &str, body: &Value) -> Value {
    serde_json::from_str(&answer(settings, path, body).await).unwrap()
}

/// JSON text with keys and structure kept and values replaced by 0 and "s".
fn skeleton(text: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(next) = rest.chars().next() {
        let length = match next {
            '"' => {
                let mut escaped = false;
                let is_end = |c: char| {
                    let ends = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                };
                let end = rest[1..].find(is_end).unwrap() + 2;
                out.push_str(if rest[end..].starts_with(':') { &rest[..end] } else { "\"s\"" });
                end
            }
            '0'..='9' | '-' => {
                out.push('0');
                rest.find(|c: char| !(c.is_ascii_digit() || "-.e".contains(c))).unwrap_or(rest.len())
            }
            other => {
                out.push(other);
                other.len_utf8()
            }
        };
        rest = &rest[length..];
    }
    out
}

fn skeletons(stream: &str) -> Vec<String> {
    stream.split_terminator("\n\n").map(skeleton).collect()
}

/// Events sent by the real server (0.32.0), with values replaced.
mod real {
    pub const ROLE: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"delta":{"role":"s","content":"s"},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}"#;
    pub const TEXT: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"delta":{"content":"s"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#;
    pub const FINISH: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"delta":{"content":"s"},"logprobs":null,"finish_reason":"s","stop_reason":null,"token_ids":null}]}"#;
    pub const LAST: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"delta":{"content":"s"},"logprobs":null,"finish_reason":"s","stop_reason":null,"token_ids":null}],"system_fingerprint":"s"}"#;
    pub const USAGE: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[],"usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0},"system_fingerprint":"s"}"#;
    pub const WHOLE: &str = r#"{"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"message":{"role":"s","content":"s","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"s","stop_reason":null,"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"s","usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0,"prompt_tokens_details":null,"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#;
    pub const THINKS: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"delta":{"reasoning":"s"},"logprobs":null,"finish_reason":null,"token_ids":null}],"usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0,"completion_tokens_details":{"reasoning_tokens":0}}}"#;
    pub const COMPLETION: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"text":"s","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}"#;
    pub const COMPLETION_WHOLE: &str = r#"{"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"text":"s","logprobs":null,"finish_reason":"s","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"s","usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0,"prompt_tokens_details":null,"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#;
    pub const CALL: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"delta":{"content":null,"tool_calls":[{"id":"s","type":"s","index":0,"function":{"name":"s"}}]},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#;
    pub const ARGUMENTS: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"delta":{"content":null,"tool_calls":[{"index":0,"function":{"arguments":"s"}}]},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#;
    pub const CALLED: &str = r#"data: {"id":"s","object":"s","created":0,"model":"s","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"s","stop_reason":null,"token_ids":null}]}"#;
    pub const MESSAGES: [&str; 7] = [
        "event: message_start\ndata: {\"type\":\"s\",\"message\":{\"id\":\"s\",\"type\":\"s\",\"role\":\"s\",\"content\":[],\"model\":\"s\",\"stop_reason\":null,\"stop_sequence\":null,\"usage\":{\"input_tokens\":0,\"output_tokens\":0}}}",
        "event: content_block_start\ndata: {\"type\":\"s\",\"content_block\":{\"type\":\"s\",\"text\":\"s\"},\"index\":0}",
        "event: content_block_delta\ndata: {\"type\":\"s\",\"delta\":{\"type\":\"s\",\"text\":\"s\"},\"index\":0}",
        "event: content_block_delta\ndata: {\"type\":\"s\",\"delta\":{\"type\":\"s\",\"text\":\"s\"},\"index\":0}",
        "event: content_block_stop\ndata: {\"type\":\"s\",\"index\":0}",
        "event: message_delta\ndata: {\"type\":\"s\",\"delta\":{\"stop_reason\":\"s\",\"stop_sequence\":null},\"usage\":{\"input_tokens\":0,\"output_tokens\":0}}",
        "event: message_stop\ndata: {\"type\":\"s\"}",
    ];
    pub const RESPONSE: &str = r#"{"id":"s","created_at":0,"incomplete_details":null,"instructions":null,"metadata":null,"model":"s","object":"s","output":[],"parallel_tool_calls":true,"temperature":0,"tool_choice":"s","tools":[],"top_p":0,"background":false,"max_output_tokens":0,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"s","status":"s","text":null,"top_logprobs":null,"truncation":"s","usage":null,"user":null,"presence_penalty":0,"frequency_penalty":0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}"#;
}

fn chat(more: &Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "the gateway streams tokens"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(start_paused = true)]
async fn a_chat_stream_has_the_real_servers_events_in_its_order() {
    let stream = answer(settings(), CHAT, &chat(&json!({"stream": true, "max_tokens": 3}))).await;
    assert_eq!(skeletons(&stream), [real::ROLE, real::TEXT, real::TEXT, real::LAST, "data: [DONE]"]);
    assert!(stream.contains(r#""id":"chatcmpl-q1""#) && stream.contains(r#""finish_reason":"length""#), "{stream}");
    let counted = chat(&json!({"stream": true, "max_tokens": 2, "stream_options": {"include_usage": true}}));
    let stream = answer(settings(), CHAT, &counted).await;
    assert_eq!(skeletons(&stream), [real::ROLE, real::TEXT, real::FINISH, real::USAGE, "data: [DONE]"]);
    assert!(stream.contains(r#""usage":{"prompt_tokens":11,"total_tokens":13,"completion_tokens":2}"#), "{stream}");
}

#[tokio::test(start_paused = true)]
async fn a_whole_answer_says_and_counts_the_same_as_its_stream() {
    let whole = answer(settings(), CHAT, &chat(&json!({}))).await;
    assert_eq!(skeleton(&whole), real::WHOLE);
    let whole: Value = serde_json::from_str(&whole).unwrap();
    let streamed = chat(&json!({"stream": true, "stream_options": {"include_usage": true}}));
    let stream = answer(settings(), CHAT, &streamed).await;
    let events =
        stream.split("\n\n").filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok());
    let (mut said, mut usage) = (String::new(), Value::Null);
    for event in events {
        said.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
        if !event["usage"].is_null() {
            usage = event["usage"]["completion_tokens"].clone();
        }
    }
    assert_eq!(whole["choices"][0]["message"]["content"], said);
    assert_eq!(whole["usage"]["completion_tokens"], usage);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop", "no cap: it ends by itself");
}

#[tokio::test(start_paused = true)]
async fn a_model_that_reasons_thinks_first_and_tells_its_usage_in_detail() {
    let settings = SimSettings { reasoning_tokens: 2, ..settings() };
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = chat(&json!({"stream": true, "max_tokens": 4, "stream_options": options}));
    let stream = answer(settings.clone(), CHAT, &body).await;
    let shapes = skeletons(&stream);
    assert_eq!(shapes[1..3], [real::THINKS, real::THINKS]);
    assert!(shapes[3].contains(r#""content":"s""#), "{}", shapes[3]);
    assert!(stream.contains(r#""completion_tokens":2,"completion_tokens_details":{"reasoning_tokens":2}"#), "{stream}");
    let quick = parsed(settings, CHAT, &chat(&json!({"reasoning_effort": "none"}))).await;
    assert_eq!(quick["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
}

#[tokio::test(start_paused = true)]
async fn a_demanded_tool_is_called() {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Bern"]}}});
    let function = json!({"name": "lookup", "parameters": parameters});
    let tools = json!([{"type": "function", "function": function}]);
    let ask =
        json!({"stream": true, "tools": tools, "tool_choice": "required", "stream_options": {"include_usage": true}});
    let stream = answer(settings(), CHAT, &chat(&ask)).await;
    let shapes = skeletons(&stream);
    assert_eq!(shapes[..3], [real::ROLE, real::CALL, real::ARGUMENTS]);
    assert_eq!(shapes[shapes.len() - 3..], [real::CALLED, real::USAGE, "data: [DONE]"]);
    let whole = parsed(settings(), CHAT, &chat(&json!({"tools": tools, "tool_choice": "required"}))).await;
    assert_eq!(whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], r#"{"city":"Oslo"}"#);
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");

    let tool = json!({"name": "lookup", "input_schema": parameters});
    let ask = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 99, "tools": [tool], "tool_choice": {"type": "any"}});
    let message = parsed(settings(), "/v1/messages", &ask).await;
    assert_eq!(
        (&message["content"][0]["input"]["city"], &message["stop_reason"]),
        (&json!("Oslo"), &json!("tool_use"))
    );

    let tool = json!({"type": "function", "name": "lookup", "parameters": parameters});
    let response =
        parsed(settings(), "/v1/responses", &json!({"input": "x", "tools": [tool], "tool_choice": "required"})).await;
    assert_eq!(response["output"][0]["arguments"], r#"{"city":"Oslo"}"#);
}

#[tokio::test(start_paused = true)]
async fn completions_echo_and_answer_every_prompt() {
    let body = json!({"prompt": "ab", "max_tokens": 2, "stream": true});
    let shapes = skeletons(&answer(settings(), "/v1/completions", &body).await);
    assert_eq!((shapes[0].as_str(), shapes.len()), (real::COMPLETION, 3));
    let body = json!({"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2, "echo": true});
    let whole = parsed(settings(), "/v1/completions", &body).await;
    let texts: Vec<&str> = whole["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts.iter().map(|text| &text[..2]).collect::<Vec<_>>(), ["ab", "ab", "cd", "cd"]);
    assert_eq!(whole["usage"]["completion_tokens"], 8);
    assert_eq!(whole["usage"]["prompt_tokens"], 2);
    let one = answer(settings(), "/v1/completions", &json!({"prompt": "ab", "max_tokens": 2})).await;
    assert_eq!(skeleton(&one), real::COMPLETION_WHOLE);
}

#[tokio::test(start_paused = true)]
async fn messages_and_responses_have_the_real_servers_events() {
    let ask = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": true});
    assert_eq!(skeletons(&answer(settings(), "/v1/messages", &ask).await), real::MESSAGES);
    let ask = json!({"input": "x", "max_output_tokens": 2, "stream": true, "temperature": 0.0});
    let stream = answer(settings(), "/v1/responses", &ask).await;
    let names: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(names, expected);
    let created = skeletons(&stream).remove(0);
    let wanted = format!(
        "event: response.created\ndata: {{\"response\":{},\"sequence_number\":0,\"type\":\"s\"}}",
        real::RESPONSE
    );
    assert_eq!(created, wanted);
    assert!(stream.contains(r#""incomplete_details":{"reason":"max_output_tokens"}"#));
}

#[tokio::test(start_paused = true)]
async fn tokens_come_with_the_steps_and_a_waiting_request_has_its_head_already() {
    let clock = Clock::start();
    let one_seat = SimSettings { shape: EngineSpec { max_running: 1, ..settings().shape }, ..settings() };
    let engine = SimEngine::start(clock, one_seat);
    let body = chat(&json!({"stream": true, "max_tokens": 5}));
    let (mut one, mut two) = (Client::of(&engine).await, Client::of(&engine).await);
    let (first, second) = tokio::join!(one.post(CHAT, &body), two.post(CHAT, &body));
    assert_eq!(clock.now(), Tick::ZERO, "heads come at once");
    let mut second = second.into_body();
    let drained = tokio::spawn(text(first));
    second.frame().await.unwrap().unwrap();
    // Five steps of the first request, then one of the second.
    assert_eq!(clock.now(), Tick::from_millis(60));
    drained.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_frees_its_seat_streaming_or_not() {
    for stream in [true, false] {
        let clock = Clock::start();
        let engine = SimEngine::start(clock, settings());
        let client = Client::of(&engine).await;
        let Client { mut send, _line: line } = client;
        let body = chat(&json!({"stream": stream, "max_tokens": 5000, "ignore_eos": true, "n": 3}));
        let request = Request::post(CHAT).body(Full::new(Bytes::from(body.to_string()))).unwrap();
        let asked = tokio::spawn(async move {
            let response = send.send_request(request).await.unwrap();
            let mut body = response.into_body();
            while body.frame().await.is_some() {}
        });
        clock.sleep_until(Some(Tick::from_millis(100))).await;
        assert_eq!(engine.gauges().running, 3);
        asked.abort();
        line.abort();
        clock.sleep_until(Some(Tick::from_millis(101))).await;
        assert_eq!((engine.gauges().running, engine.gauges().kv_usage), (0, 0.0), "stream: {stream}");
        let page = Client::of(&engine).await.get("/metrics").await;
        assert!(page.contains(r#"finished_reason="abort"} 3.0"#), "{page}");
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_have_the_status_and_the_shape_of_their_dialect() {
    let full =
        SimSettings { shape: EngineSpec { max_running: 1, max_waiting: Some(1), ..settings().shape }, ..settings() };
    let engine = SimEngine::start(Clock::start(), full);
    let mut client = Client::of(&engine).await;
    let cases = [
        (CHAT, chat(&json!({"model": "other"})), 404, "NotFoundError"),
        (CHAT, chat(&json!({"n": 0})), 400, "BadRequestError"),
        ("/v1/messages", json!({"messages": []}), 400, r#"{"type":"error""#),
        ("/v1/nothing", json!({}), 404, r#"{"detail":"Not Found"}"#),
        ("/health", json!({}), 405, r#"{"detail":"Method Not Allowed"}"#),
    ];
    for (path, body, status, words) in cases {
        let response = client.post(path, &body).await;
        assert_eq!(response.status(), status, "{path}");
        let body = text(response).await;
        assert!(body.contains(words), "{body}");
    }
    let long = chat(&json!({"stream": true, "max_tokens": 100, "ignore_eos": true}));
    let _running = Client::of(&engine).await.post(CHAT, &long).await;
    let _waiting = Client::of(&engine).await.post(CHAT, &long).await;
    assert_eq!(client.post(CHAT, &long).await.status(), 503);
}

#[tokio::test(start_paused = true)]
async fn the_small_paths_answer() {
    let engine = SimEngine::start(Clock::start(), settings());
    let mut client = Client::of(&engine).await;
    assert_eq!(client.get("/version").await, r#"{"version":"0.32.0"}"#);
    assert_eq!(client.get("/health").await, "");
    assert!(client.get("/v1/models").await.contains(r#""id":"tiny","object":"model""#));
    let counted = client.post("/v1/messages/count_tokens", &chat(&json!({}))).await;
    assert_eq!(text(counted).await, r#"{"input_tokens":11,"context_management":{"original_input_tokens":11}}"#);
    let tokens = text(client.post("/tokenize", &json!({"prompt": "12345678"})).await).await;
    assert!(tokens.starts_with(r#"{"count":2,"max_model_len":32768,"tokens":["#), "{tokens}");
    let vectors = text(client.post("/v1/embeddings", &json!({"input": ["a", "b"]})).await).await;
    let vectors: Value = serde_json::from_str(&vectors).unwrap();
    assert_eq!(vectors["data"][1]["embedding"].as_array().unwrap().len(), 8);
    text(client.post(CHAT, &chat(&json!({"max_tokens": 5}))).await).await;
    let page = client.get("/metrics").await;
    for line in [
        r#"vllm:num_requests_running{engine="0",model_name="tiny"} 0.0"#,
        r#"vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0"#,
        r#"vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0"#,
        r#"vllm:time_to_first_token_seconds_bucket{engine="0",model_name="tiny",le="0.01"} 3.0"#,
        r#"vllm:request_success_total{engine="0",model_name="tiny",finished_reason="length"} 1.0"#,
    ] {
        assert!(page.contains(line), "{line}\n{page}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_closed_as_the_real_server_closes_it() {
    let clock = Clock::start();
    let engine = SimEngine::start(clock, settings());
    let mut client = Client::of(&engine).await;
    client.get("/health").await;
    client.send.ready().await.unwrap();
    clock.sleep_until(Some(Tick::from_millis(5100))).await;
    assert!(client.send.ready().await.is_err());
}

//! The streaming dialects, each with a request and the events of a response.

use crate::support::scripted_engine::{Script, fixtures::*};
use serde_json::{Value, json};

use super::{CHAT, stream};

/// One way of asking for a stream, and of answering.
#[derive(Clone, Debug)]
pub struct Spoken {
    pub path: &'static str,
    pub ask: Value,
    /// The beginning of a response, without a token.
    pub opening: String,
    /// A visible token, and a reasoning token.
    pub token: String,
    pub hidden: String,
    /// A call of a tool, all at once.
    pub call: String,
    /// The end of a complete response whose usage reports this many tokens.
    pub closing: String,
}

fn event(data: &Value) -> String {
    format!("event: {}\ndata: {data}\n\n", data["type"].as_str().expect("these events have a type"))
}

fn data(text: &str) -> String {
    format!("data: {text}\n\n")
}

/// All four.
pub fn dialects() -> [Spoken; 4] {
    let text = |text: &str| json!({"choices": [{"index": 0, "text": text, "finish_reason": null}]}).to_string();
    let delta =
        |index: u64, delta: Value| event(&json!({"type": "content_block_delta", "index": index, "delta": delta}));
    let response = |kind: &str, usage: Value| {
        event(
            &json!({"type": kind, "sequence_number": 1, "response": {"id": "r1", "status": "completed", "usage": usage}}),
        )
    };
    [
        Spoken {
            path: CHAT,
            ask: stream(),
            opening: data(&r()),
            token: data(&t("a")),
            hidden: data(&g("a")),
            call: data(&k("{\"a\":1}")),
            closing: [data(&f("stop")), data(&u(9, 5)), data(&d())].concat(),
        },
        Spoken {
            path: "/v1/completions",
            ask: json!({"model": "m1", "stream": true, "prompt": "hi"}),
            opening: data(&text("")),
            token: data(&text("a")),
            hidden: data(&text("a")),
            call: data(&text("{\"a\":1}")),
            closing: [
                data(&json!({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}).to_string()),
                data(&u(9, 5)),
                data(&d()),
            ]
            .concat(),
        },
        Spoken {
            path: "/v1/responses",
            ask: json!({"model": "m1", "stream": true, "input": "hi"}),
            opening: response("response.created", Value::Null),
            token: event(&json!({"type": "response.output_text.delta", "delta": "a"})),
            hidden: event(&json!({"type": "response.reasoning_text.delta", "delta": "a"})),
            call: event(&json!({"type": "response.function_call_arguments.delta", "delta": "{\"a\":1}"})),
            closing: response("response.completed", json!({"input_tokens": 9, "output_tokens": 5})),
        },
        Spoken {
            path: "/v1/messages",
            ask: json!({"model": "m1", "stream": true, "max_tokens": 90, "messages": [{"role": "user", "content": "hi"}]}),
            opening: event(&json!({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}})),
            token: delta(0, json!({"type": "text_delta", "text": "a"})),
            hidden: delta(0, json!({"type": "thinking_delta", "thinking": "a"})),
            call: delta(1, json!({"type": "input_json_delta", "partial_json": "{\"a\":1}"})),
            closing: [
                event(&json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}})),
                event(&json!({"type": "message_stop"})),
            ]
            .concat(),
        },
    ]
}

impl Spoken {
    /// Tokens at these moments; the stream continues.
    pub fn tokens(&self, moments: impl IntoIterator<Item = u64>) -> Script {
        let opened = Script::stream().put(self.opening.clone());
        moments.into_iter().fold(opened, |script, moment| script.at(moment).put(self.token.clone()))
    }

    /// The end of a complete response.
    pub fn closes(&self, script: Script) -> Script {
        script.put(self.closing.clone()).end()
    }
}

//! `responses`.

use serde_json::Value;

use super::super::text::{FinishReason, Fragment};
use super::{ChoiceDelta, ChoiceState, Protocol, ResponseMeta, event, quoted, totals};

#[derive(Default)]
pub(super) struct Responses {
    sequence: u64,
    item: Option<OpenItem>,
    /// The text of the open item.
    text: String,
    call: String,
    finished: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenItem {
    Reasoning,
    Message,
    Call,
}

impl OpenItem {
    fn id(self, meta: &ResponseMeta) -> String {
        let kind = match self {
            OpenItem::Reasoning => "rs",
            OpenItem::Message => "msg",
            OpenItem::Call => "fc",
        };
        format!("{kind}_{}", meta.id)
    }
}

impl Protocol for Responses {
    fn opening(&mut self, meta: &ResponseMeta, out: &mut Vec<String>) {
        let response = response(meta, "in_progress", "", "null", "null");
        for kind in ["response.created", "response.in_progress"] {
            self.push(kind, &format!(r#""response":{response}"#), out);
        }
    }

    fn turn(&mut self, meta: &ResponseMeta, states: &[ChoiceState], turn: &ChoiceDelta, out: &mut Vec<String>) {
        for piece in &turn.pieces {
            self.say(meta, piece, out);
        }
        if states[turn.choice].finish.is_some() {
            self.close_item(meta, out);
        }
    }

    fn closing(&mut self, meta: &ResponseMeta, states: &[ChoiceState], out: &mut Vec<String>) {
        let response = self.finished_response(meta, states);
        // The engine uses this name also if the status inside is `incomplete`.
        self.push("response.completed", &format!(r#""response":{response}"#), out);
    }

    fn whole(&mut self, meta: &ResponseMeta, states: &[ChoiceState]) -> String {
        let mut nowhere = Vec::new();
        for states in states {
            let pieces = [
                (!states.reasoning.is_empty()).then(|| Fragment::Reasoning(states.reasoning.clone())),
                (!states.text.is_empty()).then(|| Fragment::Text(states.text.clone())),
                states.call.clone().map(Fragment::Call),
                (!states.arguments.is_empty()).then(|| Fragment::Arguments(states.arguments.clone())),
            ];
            for piece in pieces.into_iter().flatten() {
                self.say(meta, &piece, &mut nowhere);
            }
            self.close_item(meta, &mut nowhere);
        }
        self.finished_response(meta, states)
    }
}

impl Responses {
    fn push(&mut self, kind: &str, fields: &str, out: &mut Vec<String>) {
        let number = self.sequence;
        self.sequence += 1;
        out.push(event(kind, &format!(r#"{{{fields},"sequence_number":{number},"type":"{kind}"}}"#)));
    }

    fn say(&mut self, meta: &ResponseMeta, piece: &Fragment, out: &mut Vec<String>) {
        let item = match piece {
            Fragment::Reasoning(_) => OpenItem::Reasoning,
            Fragment::Text(_) => OpenItem::Message,
            Fragment::Call(_) | Fragment::Arguments(_) => OpenItem::Call,
            Fragment::End => return,
        };
        if self.item != Some(item) {
            self.close_item(meta, out);
            if let Fragment::Call(name) = piece {
                self.call.clone_from(name);
            }
            self.open_item(meta, item, out);
        }
        let (index, id) = (self.finished.len(), item.id(meta));
        match piece {
            Fragment::Reasoning(text) => {
                self.text.push_str(text);
                let fields =
                    format!(r#""content_index":0,"delta":{},"item_id":"{id}","output_index":{index}"#, quoted(text));
                self.push("response.reasoning_text.delta", &fields, out);
            }
            Fragment::Text(text) => {
                self.text.push_str(text);
                let fields = format!(
                    r#""content_index":0,"delta":{},"item_id":"{id}","logprobs":[],"output_index":{index}"#,
                    quoted(text)
                );
                self.push("response.output_text.delta", &fields, out);
            }
            Fragment::Arguments(text) => {
                self.text.push_str(text);
                let fields = format!(r#""delta":{},"item_id":"{id}","output_index":{index}"#, quoted(text));
                self.push("response.function_call_arguments.delta", &fields, out);
            }
            Fragment::Call(_) | Fragment::End => {}
        }
    }

    fn open_item(&mut self, meta: &ResponseMeta, item: OpenItem, out: &mut Vec<String>) {
        self.item = Some(item);
        let (index, id) = (self.finished.len(), item.id(meta));
        let (shown, part) = match item {
            OpenItem::Reasoning => (
                format!(
                    r#"{{"id":"{id}","summary":[],"type":"reasoning","content":null,"encrypted_content":null,"status":"in_progress"}}"#
                ),
                r#"{"text":"","type":"reasoning_text"}"#,
            ),
            OpenItem::Message => (
                format!(
                    r#"{{"id":"{id}","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null}}"#
                ),
                r#"{"annotations":[],"text":"","type":"output_text","logprobs":[]}"#,
            ),
            OpenItem::Call => (self.call_item(meta, "in_progress"), ""),
        };
        self.push("response.output_item.added", &format!(r#""item":{shown},"output_index":{index}"#), out);
        if !part.is_empty() {
            let fields = format!(r#""content_index":0,"item_id":"{id}","output_index":{index},"part":{part}"#);
            self.push("response.content_part.added", &fields, out);
        }
    }

    fn close_item(&mut self, meta: &ResponseMeta, out: &mut Vec<String>) {
        let Some(item) = self.item.take() else { return };
        let (index, id, text) = (self.finished.len(), item.id(meta), quoted(&self.text));
        let place = format!(r#""item_id":"{id}","output_index":{index}"#);
        let shown = match item {
            OpenItem::Reasoning => {
                let part = format!(r#"{{"text":{text},"type":"reasoning_text"}}"#);
                self.push("response.reasoning_text.done", &format!(r#""content_index":0,{place},"text":{text}"#), out);
                self.push("response.content_part.done", &format!(r#""content_index":0,{place},"part":{part}"#), out);
                format!(
                    r#"{{"id":"{id}","summary":[],"type":"reasoning","content":[{part}],"encrypted_content":null,"status":"completed"}}"#
                )
            }
            OpenItem::Message => {
                let part = format!(r#"{{"annotations":[],"text":{text},"type":"output_text","logprobs":null}}"#);
                let done = format!(r#""content_index":0,"item_id":"{id}","logprobs":[],"output_index":{index}"#);
                self.push("response.output_text.done", &format!(r#"{done},"text":{text}"#), out);
                self.push("response.content_part.done", &format!(r#""content_index":0,{place},"part":{part}"#), out);
                format!(
                    r#"{{"id":"{id}","content":[{part}],"role":"assistant","status":"completed","type":"message","phase":null}}"#
                )
            }
            OpenItem::Call => {
                let name = quoted(&self.call);
                let done = format!(r#""arguments":{text},{place},"name":{name}"#);
                self.push("response.function_call_arguments.done", &done, out);
                self.call_item(meta, "completed")
            }
        };
        self.push("response.output_item.done", &format!(r#""item":{shown},"output_index":{index}"#), out);
        self.finished.push(shown);
        self.text.clear();
    }

    fn call_item(&self, meta: &ResponseMeta, status: &str) -> String {
        format!(
            r#"{{"arguments":{},"call_id":"call_{}","name":{},"type":"function_call","id":"{}","status":"{status}"}}"#,
            quoted(&self.text),
            meta.id,
            quoted(&self.call),
            OpenItem::Call.id(meta)
        )
    }

    fn finished_response(&self, meta: &ResponseMeta, states: &[ChoiceState]) -> String {
        let is_cut = states.iter().any(|states| states.finish == Some(FinishReason::Length));
        let (status, incomplete) =
            if is_cut { ("incomplete", r#"{"reason":"max_output_tokens"}"#) } else { ("completed", "null") };
        let (output, reasoning) = totals(states);
        let input = meta.ask.prompt_tokens();
        let cached = states.iter().map(|states| states.cached).max().unwrap_or(0);
        let usage = format!(
            r#"{{"input_tokens":{input},"input_tokens_details":{{"cached_tokens":{cached},"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}},"output_tokens":{output},"output_tokens_details":{{"reasoning_tokens":{reasoning},"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}},"total_tokens":{}}}"#,
            input + output
        );
        response(meta, status, &self.finished.join(","), incomplete, &usage)
    }
}

fn response(meta: &ResponseMeta, status: &str, output: &str, incomplete: &str, usage: &str) -> String {
    let body = &meta.ask.body;
    let states = |name: &str, otherwise: &str| match body.get(name) {
        Some(value) if !value.is_null() => value.to_string(),
        _ => otherwise.to_owned(),
    };
    let tool_choice =
        states("tool_choice", if body.get("tools").is_some_and(Value::is_array) { r#""auto""# } else { r#""none""# });
    format!(
        r#"{{"id":"resp_{}","created_at":{},"incomplete_details":{incomplete},"instructions":{},"metadata":{},"model":{},"object":"response","output":[{output}],"parallel_tool_calls":{},"temperature":{},"tool_choice":{tool_choice},"tools":{},"top_p":{},"background":false,"max_output_tokens":{},"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":{},"service_tier":"auto","status":"{status}","text":null,"top_logprobs":null,"truncation":"disabled","usage":{usage},"user":{},"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}}"#,
        meta.id,
        meta.created,
        states("instructions", "null"),
        states("metadata", "null"),
        quoted(&meta.ask.model),
        states("parallel_tool_calls", "true"),
        states("temperature", "1.0"),
        states("tools", "[]"),
        states("top_p", "1.0"),
        states("max_output_tokens", "null"),
        states("reasoning", "null"),
        states("user", "null"),
    )
}

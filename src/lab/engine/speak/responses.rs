//! `responses`.

use serde_json::Value;

use super::super::voice::{Finish, Piece};
use super::{Speak, Talk, Told, Turn, event, quoted, totals};

#[derive(Default)]
pub(super) struct Responses {
    sequence: u64,
    item: Option<Item>,
    /// The text of the open item.
    text: String,
    call: String,
    finished: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Item {
    Reasoning,
    Message,
    Call,
}

impl Item {
    fn id(self, talk: &Talk) -> String {
        let kind = match self {
            Item::Reasoning => "rs",
            Item::Message => "msg",
            Item::Call => "fc",
        };
        format!("{kind}_{}", talk.id)
    }
}

impl Speak for Responses {
    fn opening(&mut self, talk: &Talk, out: &mut Vec<String>) {
        let response = response(talk, "in_progress", "", "null", "null");
        for kind in ["response.created", "response.in_progress"] {
            self.push(kind, &format!(r#""response":{response}"#), out);
        }
    }

    fn turn(&mut self, talk: &Talk, told: &[Told], turn: &Turn, out: &mut Vec<String>) {
        for piece in &turn.pieces {
            self.say(talk, piece, out);
        }
        if told[turn.choice].finish.is_some() {
            self.close_item(talk, out);
        }
    }

    fn closing(&mut self, talk: &Talk, told: &[Told], out: &mut Vec<String>) {
        let response = self.finished_response(talk, told);
        // The engine uses this name also if the status inside is `incomplete`.
        self.push("response.completed", &format!(r#""response":{response}"#), out);
    }

    fn whole(&mut self, talk: &Talk, told: &[Told]) -> String {
        let mut nowhere = Vec::new();
        for told in told {
            let pieces = [
                (!told.reasoning.is_empty()).then(|| Piece::Reasoning(told.reasoning.clone())),
                (!told.text.is_empty()).then(|| Piece::Text(told.text.clone())),
                told.call.clone().map(Piece::Call),
                (!told.arguments.is_empty()).then(|| Piece::Arguments(told.arguments.clone())),
            ];
            for piece in pieces.into_iter().flatten() {
                self.say(talk, &piece, &mut nowhere);
            }
            self.close_item(talk, &mut nowhere);
        }
        self.finished_response(talk, told)
    }
}

impl Responses {
    fn push(&mut self, kind: &str, fields: &str, out: &mut Vec<String>) {
        let number = self.sequence;
        self.sequence += 1;
        out.push(event(kind, &format!(r#"{{{fields},"sequence_number":{number},"type":"{kind}"}}"#)));
    }

    fn say(&mut self, talk: &Talk, piece: &Piece, out: &mut Vec<String>) {
        let item = match piece {
            Piece::Reasoning(_) => Item::Reasoning,
            Piece::Text(_) => Item::Message,
            Piece::Call(_) | Piece::Arguments(_) => Item::Call,
            Piece::End => return,
        };
        if self.item != Some(item) {
            self.close_item(talk, out);
            if let Piece::Call(name) = piece {
                self.call.clone_from(name);
            }
            self.open_item(talk, item, out);
        }
        let (index, id) = (self.finished.len(), item.id(talk));
        match piece {
            Piece::Reasoning(text) => {
                self.text.push_str(text);
                let fields =
                    format!(r#""content_index":0,"delta":{},"item_id":"{id}","output_index":{index}"#, quoted(text));
                self.push("response.reasoning_text.delta", &fields, out);
            }
            Piece::Text(text) => {
                self.text.push_str(text);
                let fields = format!(
                    r#""content_index":0,"delta":{},"item_id":"{id}","logprobs":[],"output_index":{index}"#,
                    quoted(text)
                );
                self.push("response.output_text.delta", &fields, out);
            }
            Piece::Arguments(text) => {
                self.text.push_str(text);
                let fields = format!(r#""delta":{},"item_id":"{id}","output_index":{index}"#, quoted(text));
                self.push("response.function_call_arguments.delta", &fields, out);
            }
            Piece::Call(_) | Piece::End => {}
        }
    }

    fn open_item(&mut self, talk: &Talk, item: Item, out: &mut Vec<String>) {
        self.item = Some(item);
        let (index, id) = (self.finished.len(), item.id(talk));
        let (shown, part) = match item {
            Item::Reasoning => (
                format!(
                    r#"{{"id":"{id}","summary":[],"type":"reasoning","content":null,"encrypted_content":null,"status":"in_progress"}}"#
                ),
                r#"{"text":"","type":"reasoning_text"}"#,
            ),
            Item::Message => (
                format!(
                    r#"{{"id":"{id}","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null}}"#
                ),
                r#"{"annotations":[],"text":"","type":"output_text","logprobs":[]}"#,
            ),
            Item::Call => (self.call_item(talk, "in_progress"), ""),
        };
        self.push("response.output_item.added", &format!(r#""item":{shown},"output_index":{index}"#), out);
        if !part.is_empty() {
            let fields = format!(r#""content_index":0,"item_id":"{id}","output_index":{index},"part":{part}"#);
            self.push("response.content_part.added", &fields, out);
        }
    }

    fn close_item(&mut self, talk: &Talk, out: &mut Vec<String>) {
        let Some(item) = self.item.take() else { return };
        let (index, id, text) = (self.finished.len(), item.id(talk), quoted(&self.text));
        let place = format!(r#""item_id":"{id}","output_index":{index}"#);
        let shown = match item {
            Item::Reasoning => {
                let part = format!(r#"{{"text":{text},"type":"reasoning_text"}}"#);
                self.push("response.reasoning_text.done", &format!(r#""content_index":0,{place},"text":{text}"#), out);
                self.push("response.content_part.done", &format!(r#""content_index":0,{place},"part":{part}"#), out);
                format!(
                    r#"{{"id":"{id}","summary":[],"type":"reasoning","content":[{part}],"encrypted_content":null,"status":"completed"}}"#
                )
            }
            Item::Message => {
                let part = format!(r#"{{"annotations":[],"text":{text},"type":"output_text","logprobs":null}}"#);
                let done = format!(r#""content_index":0,"item_id":"{id}","logprobs":[],"output_index":{index}"#);
                self.push("response.output_text.done", &format!(r#"{done},"text":{text}"#), out);
                self.push("response.content_part.done", &format!(r#""content_index":0,{place},"part":{part}"#), out);
                format!(
                    r#"{{"id":"{id}","content":[{part}],"role":"assistant","status":"completed","type":"message","phase":null}}"#
                )
            }
            Item::Call => {
                let name = quoted(&self.call);
                let done = format!(r#""arguments":{text},{place},"name":{name}"#);
                self.push("response.function_call_arguments.done", &done, out);
                self.call_item(talk, "completed")
            }
        };
        self.push("response.output_item.done", &format!(r#""item":{shown},"output_index":{index}"#), out);
        self.finished.push(shown);
        self.text.clear();
    }

    fn call_item(&self, talk: &Talk, status: &str) -> String {
        format!(
            r#"{{"arguments":{},"call_id":"call_{}","name":{},"type":"function_call","id":"{}","status":"{status}"}}"#,
            quoted(&self.text),
            talk.id,
            quoted(&self.call),
            Item::Call.id(talk)
        )
    }

    fn finished_response(&self, talk: &Talk, told: &[Told]) -> String {
        let is_cut = told.iter().any(|told| told.finish == Some(Finish::Length));
        let (status, incomplete) =
            if is_cut { ("incomplete", r#"{"reason":"max_output_tokens"}"#) } else { ("completed", "null") };
        let (output, reasoning) = totals(told);
        let input = talk.ask.prompt_tokens();
        let cached = told.iter().map(|told| told.cached).max().unwrap_or(0);
        let usage = format!(
            r#"{{"input_tokens":{input},"input_tokens_details":{{"cached_tokens":{cached},"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}},"output_tokens":{output},"output_tokens_details":{{"reasoning_tokens":{reasoning},"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}},"total_tokens":{}}}"#,
            input + output
        );
        response(talk, status, &self.finished.join(","), incomplete, &usage)
    }
}

fn response(talk: &Talk, status: &str, output: &str, incomplete: &str, usage: &str) -> String {
    let body = &talk.ask.body;
    let told = |name: &str, otherwise: &str| match body.get(name) {
        Some(value) if !value.is_null() => value.to_string(),
        _ => otherwise.to_owned(),
    };
    let tool_choice =
        told("tool_choice", if body.get("tools").is_some_and(Value::is_array) { r#""auto""# } else { r#""none""# });
    format!(
        r#"{{"id":"resp_{}","created_at":{},"incomplete_details":{incomplete},"instructions":{},"metadata":{},"model":{},"object":"response","output":[{output}],"parallel_tool_calls":{},"temperature":{},"tool_choice":{tool_choice},"tools":{},"top_p":{},"background":false,"max_output_tokens":{},"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":{},"service_tier":"auto","status":"{status}","text":null,"top_logprobs":null,"truncation":"disabled","usage":{usage},"user":{},"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}}"#,
        talk.id,
        talk.created,
        told("instructions", "null"),
        told("metadata", "null"),
        quoted(&talk.ask.model),
        told("parallel_tool_calls", "true"),
        told("temperature", "1.0"),
        told("tools", "[]"),
        told("top_p", "1.0"),
        told("max_output_tokens", "null"),
        told("reasoning", "null"),
        told("user", "null"),
    )
}

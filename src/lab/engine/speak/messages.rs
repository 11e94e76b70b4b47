//! `messages`, the Anthropic format.

use super::super::voice::{Finish, Piece};
use super::{Speak, Talk, Told, Turn, event, quoted, totals};

#[derive(Default)]
pub(super) struct Messages {
    has_begun: bool,
    block: Option<Block>,
    index: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    ToolUse,
}

impl Speak for Messages {
    fn turn(&mut self, talk: &Talk, told: &[Told], turn: &Turn, out: &mut Vec<String>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            out.push(event(
                "message_start",
                &format!(
                    r#"{{"type":"message_start","message":{}}}"#,
                    message(talk, "", "null", r#","stop_sequence":null"#, &usage(talk, 0, None))
                ),
            ));
        }
        for piece in &turn.pieces {
            self.say(talk, piece, out);
        }
        if told[turn.choice].finish.is_some() {
            self.close_block(talk, out);
        }
    }

    fn closing(&mut self, talk: &Talk, told: &[Told], out: &mut Vec<String>) {
        let stop = quoted(stop_reason(told));
        let usage = usage(talk, totals(told).0, cached(talk, told));
        out.push(event(
            "message_delta",
            &format!(
                r#"{{"type":"message_delta","delta":{{"stop_reason":{stop},"stop_sequence":null}},"usage":{usage}}}"#
            ),
        ));
        out.push(event("message_stop", r#"{"type":"message_stop"}"#));
    }

    fn whole(&mut self, talk: &Talk, told: &[Told]) -> String {
        let mut blocks = Vec::new();
        for told in told {
            if !told.reasoning.is_empty() {
                let (thinking, signature) = (quoted(&told.reasoning), signature(talk));
                blocks.push(format!(r#"{{"type":"thinking","thinking":{thinking},"signature":"{signature}"}}"#));
            }
            if !told.text.is_empty() {
                blocks.push(format!(r#"{{"type":"text","text":{}}}"#, quoted(&told.text)));
            }
            if let Some(name) = &told.call {
                let input = serde_json::from_str::<serde_json::Value>(&told.arguments).unwrap_or_default();
                let input = if input.is_object() { input.to_string() } else { "{}".to_owned() };
                blocks.push(format!(
                    r#"{{"type":"tool_use","id":"chatcmpl-tool-{}","name":{},"input":{input}}}"#,
                    talk.id,
                    quoted(name)
                ));
            }
        }
        let usage = usage(talk, totals(told).0, cached(talk, told));
        message(talk, &blocks.join(","), &quoted(stop_reason(told)), "", &usage)
    }
}

impl Messages {
    fn say(&mut self, talk: &Talk, piece: &Piece, out: &mut Vec<String>) {
        let (block, start, delta) = match piece {
            Piece::Reasoning(text) => (
                Block::Thinking,
                r#"{"type":"thinking","thinking":""}"#.to_owned(),
                Some(format!(r#"{{"type":"thinking_delta","thinking":{}}}"#, quoted(text))),
            ),
            Piece::Text(text) => (
                Block::Text,
                r#"{"type":"text","text":""}"#.to_owned(),
                Some(format!(r#"{{"type":"text_delta","text":{}}}"#, quoted(text))),
            ),
            Piece::Call(name) => {
                let id = &talk.id;
                let start =
                    format!(r#"{{"type":"tool_use","id":"chatcmpl-tool-{id}","name":{},"input":{{}}}}"#, quoted(name));
                (Block::ToolUse, start, None)
            }
            Piece::Arguments(text) => {
                let delta = format!(r#"{{"type":"input_json_delta","partial_json":{}}}"#, quoted(text));
                (Block::ToolUse, String::new(), Some(delta))
            }
            Piece::End => return,
        };
        if self.block != Some(block) {
            self.close_block(talk, out);
            self.block = Some(block);
            out.push(event(
                "content_block_start",
                &format!(r#"{{"type":"content_block_start","content_block":{start},"index":{}}}"#, self.index),
            ));
        }
        if let Some(delta) = delta {
            out.push(self.delta(&delta));
        }
    }

    fn delta(&self, delta: &str) -> String {
        let index = self.index;
        event("content_block_delta", &format!(r#"{{"type":"content_block_delta","delta":{delta},"index":{index}}}"#))
    }

    fn close_block(&mut self, talk: &Talk, out: &mut Vec<String>) {
        let Some(block) = self.block.take() else { return };
        if block == Block::Thinking {
            out.push(self.delta(&format!(r#"{{"type":"signature_delta","signature":"{}"}}"#, signature(talk))));
        }
        out.push(event("content_block_stop", &format!(r#"{{"type":"content_block_stop","index":{}}}"#, self.index)));
        self.index += 1;
    }
}

fn message(talk: &Talk, blocks: &str, stop: &str, stop_sequence: &str, usage: &str) -> String {
    let (id, model) = (&talk.id, quoted(&talk.ask.model));
    format!(
        r#"{{"id":"chatcmpl-{id}","type":"message","role":"assistant","content":[{blocks}],"model":{model},"stop_reason":{stop}{stop_sequence},"usage":{usage}}}"#
    )
}

/// Cached prompt tokens are reported only by a server with details.
fn cached(talk: &Talk, told: &[Told]) -> Option<u64> {
    talk.details.then(|| told.iter().map(|told| told.cached).max().unwrap_or(0))
}

/// Input tokens exclude those read from the cache.
fn usage(talk: &Talk, output: u64, cached: Option<u64>) -> String {
    let input = talk.ask.prompt_tokens() - cached.unwrap_or(0).min(talk.ask.prompt_tokens());
    let details = cached.map_or_else(String::new, |read| {
        format!(r#","cache_creation_input_tokens":0,"cache_read_input_tokens":{read}"#)
    });
    format!(r#"{{"input_tokens":{input},"output_tokens":{output}{details}}}"#)
}

fn stop_reason(told: &[Told]) -> &'static str {
    match told.first().and_then(|told| told.finish) {
        Some(Finish::Length) => "max_tokens",
        Some(Finish::Calls) => "tool_use",
        _ => "end_turn",
    }
}

fn signature(talk: &Talk) -> String {
    format!("{:016x}", super::super::voice::mix(talk.ask.seed))
}

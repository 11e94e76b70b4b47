//! `messages`, the Anthropic format.

use super::super::text::{FinishReason, Fragment};
use super::{ChoiceDelta, ChoiceState, Protocol, ResponseMeta, event, quoted, totals};

#[derive(Default)]
pub(super) struct Messages {
    has_begun: bool,
    block: Option<OpenBlock>,
    index: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    ToolUse,
}

impl Protocol for Messages {
    fn turn(&mut self, meta: &ResponseMeta, states: &[ChoiceState], turn: &ChoiceDelta, out: &mut Vec<String>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            out.push(event(
                "message_start",
                &format!(
                    r#"{{"type":"message_start","message":{}}}"#,
                    message(meta, "", "null", r#","stop_sequence":null"#, &usage(meta, 0, None))
                ),
            ));
        }
        for piece in &turn.pieces {
            self.say(meta, piece, out);
        }
        if states[turn.choice].finish.is_some() {
            self.close_block(meta, out);
        }
    }

    fn closing(&mut self, meta: &ResponseMeta, states: &[ChoiceState], out: &mut Vec<String>) {
        let stop = quoted(stop_reason(states));
        let usage = usage(meta, totals(states).0, cached(meta, states));
        out.push(event(
            "message_delta",
            &format!(
                r#"{{"type":"message_delta","delta":{{"stop_reason":{stop},"stop_sequence":null}},"usage":{usage}}}"#
            ),
        ));
        out.push(event("message_stop", r#"{"type":"message_stop"}"#));
    }

    fn whole(&mut self, meta: &ResponseMeta, states: &[ChoiceState]) -> String {
        let mut blocks = Vec::new();
        for states in states {
            if !states.reasoning.is_empty() {
                let (thinking, signature) = (quoted(&states.reasoning), signature(meta));
                blocks.push(format!(r#"{{"type":"thinking","thinking":{thinking},"signature":"{signature}"}}"#));
            }
            if !states.text.is_empty() {
                blocks.push(format!(r#"{{"type":"text","text":{}}}"#, quoted(&states.text)));
            }
            if let Some(name) = &states.call {
                let input = serde_json::from_str::<serde_json::Value>(&states.arguments).unwrap_or_default();
                let input = if input.is_object() { input.to_string() } else { "{}".to_owned() };
                blocks.push(format!(
                    r#"{{"type":"tool_use","id":"chatcmpl-tool-{}","name":{},"input":{input}}}"#,
                    meta.id,
                    quoted(name)
                ));
            }
        }
        let usage = usage(meta, totals(states).0, cached(meta, states));
        message(meta, &blocks.join(","), &quoted(stop_reason(states)), "", &usage)
    }
}

impl Messages {
    fn say(&mut self, meta: &ResponseMeta, piece: &Fragment, out: &mut Vec<String>) {
        let (block, start, delta) = match piece {
            Fragment::Reasoning(text) => (
                OpenBlock::Thinking,
                r#"{"type":"thinking","thinking":""}"#.to_owned(),
                Some(format!(r#"{{"type":"thinking_delta","thinking":{}}}"#, quoted(text))),
            ),
            Fragment::Text(text) => (
                OpenBlock::Text,
                r#"{"type":"text","text":""}"#.to_owned(),
                Some(format!(r#"{{"type":"text_delta","text":{}}}"#, quoted(text))),
            ),
            Fragment::Call(name) => {
                let id = &meta.id;
                let start =
                    format!(r#"{{"type":"tool_use","id":"chatcmpl-tool-{id}","name":{},"input":{{}}}}"#, quoted(name));
                (OpenBlock::ToolUse, start, None)
            }
            Fragment::Arguments(text) => {
                let delta = format!(r#"{{"type":"input_json_delta","partial_json":{}}}"#, quoted(text));
                (OpenBlock::ToolUse, String::new(), Some(delta))
            }
            Fragment::End => return,
        };
        if self.block != Some(block) {
            self.close_block(meta, out);
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

    fn close_block(&mut self, meta: &ResponseMeta, out: &mut Vec<String>) {
        let Some(block) = self.block.take() else { return };
        if block == OpenBlock::Thinking {
            out.push(self.delta(&format!(r#"{{"type":"signature_delta","signature":"{}"}}"#, signature(meta))));
        }
        out.push(event("content_block_stop", &format!(r#"{{"type":"content_block_stop","index":{}}}"#, self.index)));
        self.index += 1;
    }
}

fn message(meta: &ResponseMeta, blocks: &str, stop: &str, stop_sequence: &str, usage: &str) -> String {
    let (id, model) = (&meta.id, quoted(&meta.ask.model));
    format!(
        r#"{{"id":"chatcmpl-{id}","type":"message","role":"assistant","content":[{blocks}],"model":{model},"stop_reason":{stop}{stop_sequence},"usage":{usage}}}"#
    )
}

/// Cached prompt tokens are reported only by a server with details.
fn cached(meta: &ResponseMeta, states: &[ChoiceState]) -> Option<u64> {
    meta.details.then(|| states.iter().map(|states| states.cached).max().unwrap_or(0))
}

/// Input tokens exclude those read from the cache.
fn usage(meta: &ResponseMeta, output: u64, cached: Option<u64>) -> String {
    let input = meta.ask.prompt_tokens() - cached.unwrap_or(0).min(meta.ask.prompt_tokens());
    let details = cached.map_or_else(String::new, |read| {
        format!(r#","cache_creation_input_tokens":0,"cache_read_input_tokens":{read}"#)
    });
    format!(r#"{{"input_tokens":{input},"output_tokens":{output}{details}}}"#)
}

fn stop_reason(states: &[ChoiceState]) -> &'static str {
    match states.first().and_then(|states| states.finish) {
        Some(FinishReason::Length) => "max_tokens",
        Some(FinishReason::Calls) => "tool_use",
        _ => "end_turn",
    }
}

fn signature(meta: &ResponseMeta) -> String {
    format!("{:016x}", super::super::mix(meta.ask.seed))
}

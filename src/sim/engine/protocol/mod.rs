//! Formats responses per dialect, field by field and event by event as vLLM does.

mod chat;
mod completions;
mod messages;
mod responses;

use serde_json::Value;

use super::request::ParsedRequest;
use super::text::{FinishReason, Fragment};
use crate::types::Dialect;

/// Values shared by all events of a response.
pub(super) struct ResponseMeta {
    /// Its unique id.
    pub id: String,
    /// Seconds since the Unix epoch.
    pub created: u64,
    /// Whether a reasoning parser runs, so that usage reports reasoning and cached tokens.
    pub details: bool,
    pub fingerprint: String,
    pub ask: ParsedRequest,
}

/// Output of one choice so far.
#[derive(Clone, Debug, Default)]
pub(super) struct ChoiceState {
    pub reasoning: String,
    pub text: String,
    pub call: Option<String>,
    pub arguments: String,
    pub tokens: u64,
    pub reasoning_tokens: u64,
    pub cached: u64,
    pub finish: Option<FinishReason>,
}

impl ChoiceState {
    pub fn take(&mut self, piece: &Fragment) {
        match piece {
            Fragment::Reasoning(text) => self.reasoning.push_str(text),
            Fragment::Text(text) => self.text.push_str(text),
            Fragment::Call(name) => self.call = Some(name.clone()),
            Fragment::Arguments(text) => self.arguments.push_str(text),
            Fragment::End => {}
        }
    }
}

/// New output of one choice: adjacent pieces of a kind are joined, an end token has none.
pub(super) struct ChoiceDelta {
    pub choice: usize,
    pub pieces: Vec<Fragment>,
}

impl ChoiceDelta {
    pub fn new(choice: usize, tokens: impl Iterator<Item = Fragment>) -> ChoiceDelta {
        let mut pieces: Vec<Fragment> = Vec::new();
        for token in tokens {
            match (pieces.last_mut(), token) {
                (_, Fragment::End) => {}
                (Some(Fragment::Reasoning(before)), Fragment::Reasoning(text))
                | (Some(Fragment::Text(before)), Fragment::Text(text))
                | (Some(Fragment::Arguments(before)), Fragment::Arguments(text)) => before.push_str(&text),
                (_, token) => pieces.push(token),
            }
        }
        ChoiceDelta { choice, pieces }
    }
}

/// The format of one dialect. Events are complete, blank line included.
pub(super) trait Protocol: Send {
    /// Events before the first token.
    fn opening(&mut self, _talk: &ResponseMeta, _out: &mut Vec<String>) {}
    /// Events of new output; `told` includes it.
    fn turn(&mut self, meta: &ResponseMeta, states: &[ChoiceState], turn: &ChoiceDelta, out: &mut Vec<String>);
    /// Events after the last token of the last choice.
    fn closing(&mut self, meta: &ResponseMeta, states: &[ChoiceState], out: &mut Vec<String>);
    /// The complete response as one body.
    fn whole(&mut self, meta: &ResponseMeta, states: &[ChoiceState]) -> String;
}

pub(super) fn protocol_of(dialect: Dialect) -> Box<dyn Protocol> {
    match dialect {
        Dialect::Completions => Box::new(completions::Completions::default()),
        Dialect::Responses => Box::new(responses::Responses::default()),
        Dialect::Messages => Box::new(messages::Messages::default()),
        Dialect::Chat | Dialect::Plain => Box::new(chat::Chat::default()),
    }
}

fn data(json: &str) -> String {
    format!("data: {json}\n\n")
}

fn event(kind: &str, json: &str) -> String {
    format!("event: {kind}\ndata: {json}\n\n")
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The finish reason in the words of `chat` and `completions`.
const fn reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Calls => "tool_calls",
    }
}

/// Usage of one choice so far.
fn usage_so_far(meta: &ResponseMeta, states: &ChoiceState) -> String {
    usage_text(meta, states.tokens, states.reasoning_tokens, "")
}

/// Usage of the request.
fn usage_total(meta: &ResponseMeta, states: &[ChoiceState]) -> String {
    let (tokens, reasoning) = totals(states);
    let cached: u64 = states.iter().map(|states| states.cached).max().unwrap_or(0);
    let cached = format!(r#","prompt_tokens_details":{{"cached_tokens":{cached},"created_cache_tokens":0}}"#);
    usage_text(meta, tokens, reasoning, &cached)
}

fn totals(states: &[ChoiceState]) -> (u64, u64) {
    (states.iter().map(|states| states.tokens).sum(), states.iter().map(|states| states.reasoning_tokens).sum())
}

fn usage_text(meta: &ResponseMeta, tokens: u64, reasoning: u64, prompt_details: &str) -> String {
    let prompt = meta.ask.prompt_tokens();
    let details = if meta.details {
        format!(r#"{prompt_details},"completion_tokens_details":{{"reasoning_tokens":{reasoning}}}"#)
    } else {
        String::new()
    };
    let total = prompt + tokens;
    format!(r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{tokens}{details}}}"#)
}

/// Usage of a non-streaming response, where details are always present, possibly `null`.
fn usage_whole(meta: &ResponseMeta, states: &[ChoiceState]) -> String {
    let usage = usage_total(meta, states);
    match usage.strip_suffix('}') {
        Some(open) if !meta.details => {
            format!(r#"{open},"prompt_tokens_details":null,"completion_tokens_details":null}}"#)
        }
        _ => usage,
    }
}

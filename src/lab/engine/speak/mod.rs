//! Formats responses per dialect, field by field and event by event as vLLM does.

mod chat;
mod completions;
mod messages;
mod responses;

use serde_json::Value;

use super::ask::Ask;
use super::voice::{Finish, Piece};
use crate::units::Dialect;

/// Values shared by all events of a response.
pub(super) struct Talk {
    /// Its unique id.
    pub id: String,
    /// Seconds since the Unix epoch.
    pub created: u64,
    /// Whether a reasoning parser runs, so that usage reports reasoning and cached tokens.
    pub details: bool,
    pub fingerprint: String,
    pub ask: Ask,
}

/// Output of one choice so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub reasoning: String,
    pub text: String,
    pub call: Option<String>,
    pub arguments: String,
    pub tokens: u64,
    pub reasoning_tokens: u64,
    pub cached: u64,
    pub finish: Option<Finish>,
}

impl Told {
    pub fn take(&mut self, piece: &Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning.push_str(text),
            Piece::Text(text) => self.text.push_str(text),
            Piece::Call(name) => self.call = Some(name.clone()),
            Piece::Arguments(text) => self.arguments.push_str(text),
            Piece::End => {}
        }
    }
}

/// New output of one choice: adjacent pieces of a kind are joined, an end token has none.
pub(super) struct Turn {
    pub choice: usize,
    pub pieces: Vec<Piece>,
}

impl Turn {
    pub fn new(choice: usize, tokens: impl Iterator<Item = Piece>) -> Turn {
        let mut pieces: Vec<Piece> = Vec::new();
        for token in tokens {
            match (pieces.last_mut(), token) {
                (_, Piece::End) => {}
                (Some(Piece::Reasoning(before)), Piece::Reasoning(text))
                | (Some(Piece::Text(before)), Piece::Text(text))
                | (Some(Piece::Arguments(before)), Piece::Arguments(text)) => before.push_str(&text),
                (_, token) => pieces.push(token),
            }
        }
        Turn { choice, pieces }
    }
}

/// The format of one dialect. Events are complete, blank line included.
pub(super) trait Speak: Send {
    /// Events before the first token.
    fn opening(&mut self, _talk: &Talk, _out: &mut Vec<String>) {}
    /// Events of new output; `told` includes it.
    fn turn(&mut self, talk: &Talk, told: &[Told], turn: &Turn, out: &mut Vec<String>);
    /// Events after the last token of the last choice.
    fn closing(&mut self, talk: &Talk, told: &[Told], out: &mut Vec<String>);
    /// The complete response as one body.
    fn whole(&mut self, talk: &Talk, told: &[Told]) -> String;
}

pub(super) fn speaker(dialect: Dialect) -> Box<dyn Speak> {
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
const fn reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Calls => "tool_calls",
    }
}

/// Usage of one choice so far.
fn usage_so_far(talk: &Talk, told: &Told) -> String {
    usage_text(talk, told.tokens, told.reasoning_tokens, "")
}

/// Usage of the request.
fn usage_total(talk: &Talk, told: &[Told]) -> String {
    let (tokens, reasoning) = totals(told);
    let cached: u64 = told.iter().map(|told| told.cached).max().unwrap_or(0);
    let cached = format!(r#","prompt_tokens_details":{{"cached_tokens":{cached},"created_cache_tokens":0}}"#);
    usage_text(talk, tokens, reasoning, &cached)
}

fn totals(told: &[Told]) -> (u64, u64) {
    (told.iter().map(|told| told.tokens).sum(), told.iter().map(|told| told.reasoning_tokens).sum())
}

fn usage_text(talk: &Talk, tokens: u64, reasoning: u64, prompt_details: &str) -> String {
    let prompt = talk.ask.prompt_tokens();
    let details = if talk.details {
        format!(r#"{prompt_details},"completion_tokens_details":{{"reasoning_tokens":{reasoning}}}"#)
    } else {
        String::new()
    };
    let total = prompt + tokens;
    format!(r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{tokens}{details}}}"#)
}

/// Usage of a non-streaming response, where details are always present, possibly `null`.
fn usage_whole(talk: &Talk, told: &[Told]) -> String {
    let usage = usage_total(talk, told);
    match usage.strip_suffix('}') {
        Some(open) if !talk.details => {
            format!(r#"{open},"prompt_tokens_details":null,"completion_tokens_details":null}}"#)
        }
        _ => usage,
    }
}

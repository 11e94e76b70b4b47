//! The observer's inputs from the request, and its description of each piece of the response.

use std::sync::Arc;

use crate::inspect::Facts;
use crate::types::{Dialect, Tick};

use super::timeline::InBandError;

/// Expected properties of the response.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponseExpectation {
    /// Wire format of the response.
    pub dialect: Dialect,
    /// Whether the request asked for a stream.
    pub stream_asked: bool,
    /// Expected choices: `n` x prompts.
    pub choices: u64,
    /// Prompts of the request.
    pub prompts: u64,
    /// The decoded prompts, if the response echoes them (`completions` with `echo`).
    pub echo_prompts: Arc<[String]>,
    /// Start of the objectives' clock: the arrival, plus the time the client kept the gateway waiting.
    pub start: Tick,
    /// Tokens per token event, learned from this engine's and model's usage reports.
    pub tokens_per_event: f64,
}

impl ResponseExpectation {
    /// A stream of one choice, with nothing learned.
    #[must_use]
    pub fn stream(dialect: Dialect, start: Tick) -> Self {
        ResponseExpectation {
            dialect,
            stream_asked: true,
            choices: 1,
            prompts: 1,
            echo_prompts: Arc::default(),
            start,
            tokens_per_event: 1.0,
        }
    }

    /// Expectations from the facts of a request.
    #[must_use]
    pub fn of(dialect: Dialect, facts: &Facts, start: Tick, tokens_per_event: f64) -> Self {
        ResponseExpectation {
            dialect,
            stream_asked: facts.streams(),
            choices: facts.choices(),
            prompts: facts.prompts.max(1),
            echo_prompts: Arc::clone(&facts.echo_prompts),
            start,
            tokens_per_event,
        }
    }
}

/// Position of an event's usage. Only `chat/completions` and `completions` have several positions;
/// in other dialects it is always [`UsagePosition::None`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsagePosition {
    /// The event has no usage, or `null`.
    #[default]
    None,
    /// Usage without a choice: the event requested by `include_usage`.
    Alone,
    /// Usage beside a choice.
    WithChoice,
}

/// Which part of an event a piece is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PiecePart {
    /// A whole event, or a piece of a body without events.
    #[default]
    Whole,
    /// A piece of an event longer than [`super::sse::HELD`], with more to follow.
    More,
    /// The last piece of such an event, with the information about the event.
    Last,
}

/// Description of a piece of the response that may be forwarded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceInfo {
    /// Whether it is an event with a generated token.
    pub token: bool,
    /// Whether that token is on a visible channel.
    pub visible: bool,
    /// Position of its usage.
    pub usage: UsagePosition,
    /// Whether one of its choices has a finish reason (`chat/completions` and `completions`).
    pub ends_choice: bool,
    /// An error inside a 200.
    pub error: Option<InBandError>,
    /// Whether the response is finished so far; a further token undoes it.
    pub finished: bool,
    /// Which part of an event it is.
    pub part: PiecePart,
}

impl PieceInfo {
    /// The code by which the engine rejects the presented key.
    #[must_use]
    pub fn refused_key(&self) -> Option<u16> {
        self.error.filter(|error| error.refuses_key()).map(|error| error.code)
    }
}

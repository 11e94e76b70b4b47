//! What an observer is told of the request, and what it says of each piece of the answer.

use std::sync::Arc;

use crate::inspect::Facts;
use crate::units::{Dialect, Tick};

use super::timeline::InBandError;

/// What the request lets expect of its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Expect {
    /// How the answer is written.
    pub dialect: Dialect,
    /// The request asked for a stream.
    pub stream_asked: bool,
    /// Choices the answer should have: `n` x prompts.
    pub choices: u64,
    /// Prompts of the request.
    pub prompts: u64,
    /// The decoded prompts, where the answer echoes them (`completions` with `echo`).
    pub echo_prompts: Arc<[String]>,
    /// Where objectives run from: the arrival, later by what the client let the gateway wait.
    pub start: Tick,
    /// Tokens per token event, learned from this engine's and model's answers with usage.
    pub tokens_per_event: f64,
}

impl Expect {
    /// A stream of one choice, of which nothing has been learned.
    #[must_use]
    pub fn stream(dialect: Dialect, start: Tick) -> Self {
        Expect {
            dialect,
            stream_asked: true,
            choices: 1,
            prompts: 1,
            echo_prompts: Arc::default(),
            start,
            tokens_per_event: 1.0,
        }
    }

    /// What the facts of a request let expect.
    #[must_use]
    pub fn of(dialect: Dialect, facts: &Facts, start: Tick, tokens_per_event: f64) -> Self {
        Expect {
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

/// Where an event's usage stands. Only `chat/completions` and `completions` have a choice of
/// places; for the other dialects it is always [`UsagePosition::None`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UsagePosition {
    /// The event has no usage, or `null`.
    #[default]
    None,
    /// Usage without any choice: the event that `include_usage` asks for.
    Alone,
    /// Usage beside a choice.
    WithChoice,
}

/// How much of an event a piece is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PiecePart {
    /// All of it; or none, as a piece of a body without events.
    #[default]
    Whole,
    /// A piece of an event longer than [`super::sse::HELD`], and more of it follows.
    More,
    /// The last piece of such an event: what it carried is noted here.
    Last,
}

/// What is known of a piece of the answer that may leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceInfo {
    /// It is an event that carries a generated token.
    pub token: bool,
    /// ... on a visible channel.
    pub visible: bool,
    /// Where its usage stands.
    pub usage: UsagePosition,
    /// A choice of it has a finish reason (`chat/completions` and `completions`).
    pub ends_choice: bool,
    /// It is an error inside a 200.
    pub error: Option<InBandError>,
    /// The answer is finished as of now. Provisional: a further token undoes it.
    pub finished: bool,
    /// Whether it is all of an event.
    pub part: PiecePart,
}

impl PieceInfo {
    /// The code by which it says that the engine refuses the key that it saw.
    #[must_use]
    pub fn refused_key(&self) -> Option<u16> {
        self.error.filter(|error| error.refuses_key()).map(|error| error.code)
    }
}

//! The [`Timeline`] of one response, which `judge` judges and `record` records.

use std::sync::Arc;
use std::time::Duration;

use crate::types::{Tick, Tokens};

/// How the body is read, chosen by its content type and coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseFormat {
    /// `text/event-stream`.
    Events,
    /// A JSON body, read whole at its end.
    Json,
    /// An event stream of a path that does not generate: bytes pass as they come, and events are read for
    /// usage and errors.
    Aside,
    /// A body without tokens (audio, text); only its framing matters.
    Opaque,
    /// A content coding other than identity; bytes pass and cannot be read.
    Coded,
}

/// Options of an observer beyond the timestamps of every timeline.
#[derive(Clone, Debug)]
pub struct ObserverOptions {
    /// Upper edges of the class's inter-token-gap histogram, ascending. Larger gaps fall into one more
    /// bucket.
    pub gap_edges: Arc<[Duration]>,
    /// The class's ITL threshold, to record when it first broke.
    pub itl: Option<Duration>,
    /// Gaps above this count as stalls.
    pub stall: Duration,
    /// Longest event that is inspected, bytes; longer ones are only relayed.
    pub max_event: usize,
}

/// No gap histogram, no ITL objective; stalls above a second, events up to
/// 16 MiB.
impl Default for ObserverOptions {
    fn default() -> Self {
        ObserverOptions { gap_edges: [].into(), itl: None, stall: Duration::from_secs(1), max_event: 16 << 20 }
    }
}

/// Source of an output token count. Sources are never mixed silently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TokenSource {
    /// The engine's `usage`.
    Usage,
    /// Token events times the learned ratio of tokens to events.
    Events,
    /// Visible bytes of a non-streaming response / 4.
    Estimate,
}

impl TokenSource {
    /// All sources.
    pub const ALL: [TokenSource; 3] = [TokenSource::Usage, TokenSource::Events, TokenSource::Estimate];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            TokenSource::Usage => "usage",
            TokenSource::Events => "events",
            TokenSource::Estimate => "estimate",
        }
    }
}

/// Usage reported by the engine; per field the last explicit value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens, cache reads and writes included.
    pub input: Option<Tokens>,
    /// Output tokens over all choices.
    pub output: Option<Tokens>,
    /// Reasoning tokens, a part of the output.
    pub reasoning: Option<Tokens>,
    /// Tokens read from the prefix cache, a part of the input.
    pub cached: Option<Tokens>,
}

/// One choice of a response.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Its index in the response.
    pub index: u64,
    /// Arrival of its first token event.
    pub first_token: Option<Tick>,
    /// Arrival of its first visible token event.
    pub first_visible: Option<Tick>,
    /// Arrival of its last token event; its finish if usage shows tokens that no event can have
    /// carried.
    pub last_token: Option<Tick>,
    /// Number of its token events.
    pub events: u64,
    /// Its output tokens: own usage, else its share of the total; see `Timeline::source`.
    pub tokens: f64,
    /// Whether it has a non-empty finish reason.
    pub finished: bool,
}

impl Choice {
    /// Mean time per output token after the first (`docs/semantics.md`, section 2): defined for at least two
    /// tokens delivered in at least two events.
    #[must_use]
    pub fn tpot(&self) -> Option<Duration> {
        if self.tokens < 2.0 || self.events < 2 {
            return None;
        }
        let span = self.last_token?.since(self.first_token?);
        Some(span.div_f64(self.tokens - 1.0))
    }
}

/// Gaps between successive token events of one choice, over all choices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gaps {
    /// Gaps per bucket, one more than [`ObserverOptions::gap_edges`].
    pub buckets: Vec<u32>,
    /// Sum of all gaps.
    pub sum: Duration,
    /// The largest gap.
    pub largest: Option<Duration>,
    /// Gaps above [`ObserverOptions::stall`].
    pub stalls: u32,
    /// When the ITL objective first broke: the event before the first gap that was too large, plus the
    /// threshold.
    pub broke: Option<Tick>,
}

/// An error inside a 200 (`docs/semantics.md`, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InBandError {
    /// The equivalent HTTP status: 500 if the engine's own code is absent or unknown.
    pub code: u16,
    /// Whether a token had come before it.
    pub after_first_token: bool,
}

impl InBandError {
    /// Whether the engine refuses the key that it saw.
    #[must_use]
    pub const fn refuses_key(self) -> bool {
        matches!(self.code, 401 | 403)
    }
}

/// Time from which on the client's refusal to read determines the measures.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientLimited {
    /// Start of the stretch of not reading that lasted too long. Later silence is the client's doing.
    pub at: Tick,
    /// The choices at that moment, with their known tokens.
    pub choices: Vec<Choice>,
}

/// A time limit of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeoutKind {
    /// `first_token` (streams), `response_head` (the rest).
    FirstToken,
    /// `idle`: between two events.
    Idle,
    /// `total`.
    Total,
}

/// How the transport of a response ended. `judge` interprets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The engine's body ended by its framing; or the response had finished and the gateway ended it because
    /// the engine kept its body open.
    Clean,
    /// The engine's connection failed: reset, invalid framing, or a wrong length.
    Broken,
    /// The client left.
    Left,
    /// A time limit fired.
    TimedOut(TimeoutKind),
    /// The client did not read until a write-stall or total limit ended it.
    WriteStalled,
    /// Cut at the drain limit.
    Drained,
    /// The gateway failed: a panic in handler or body.
    Panicked,
}

/// Everything observed of a relayed response. Complete when the observer ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Start of the objectives' clock: the arrival, plus the time the client kept the gateway waiting.
    pub start: Tick,
    /// Whether the request asked for a stream or got one anyway; judged by token moments.
    pub streamed: bool,
    /// How the body was read.
    pub reader: ResponseFormat,
    /// First token event of any channel and choice. For a requested stream answered by a JSON body: its
    /// last byte.
    pub first_token: Option<Tick>,
    /// First token event on a visible channel.
    pub first_visible: Option<Tick>,
    /// Last token event of any choice. If tokens came that no event can have carried,
    /// [`Choice::last_token`] is later and used for TPOT.
    pub last_token: Option<Tick>,
    /// The event that ended the response in its dialect; for a non-streaming response its last byte, if its
    /// framing was complete and it could be read.
    pub finish: Option<Tick>,
    /// When the body ended or was dropped.
    pub end: Tick,
    /// The choices, by index.
    pub choices: Vec<Choice>,
    /// Gaps between token events.
    pub gaps: Gaps,
    /// Reported usage.
    pub usage: Usage,
    /// Source of `output`.
    pub source: TokenSource,
    /// Output tokens: usage, else events x ratio (rounded up), else visible bytes / 4.
    pub output: Tokens,
    /// Token events of all choices; for a JSON body the number of choices with output.
    pub token_events: u64,
    /// Whether a choice ended with reason `length` (`max_tokens`, `incomplete`).
    pub cut_by_length: bool,
    /// Whether a choice (or the response) had a finish or stop reason.
    pub has_finish_reason: bool,
    /// The last in-band error.
    pub error: Option<InBandError>,
    /// Whether the response could not be inspected: an oversized event, not a JSON object, a coding.
    pub unparseable: bool,
    /// HTTP status of the response.
    pub status: u16,
    /// Whether there was output on any channel, also in a non-streaming response.
    pub has_output: bool,
    /// Whether there was output on a visible channel, also in a non-streaming response.
    pub has_visible: bool,
    /// Whether some output was of a kind that engines deliver in lumps rather than token by token: tool
    /// calls, audio.
    pub has_lumps: bool,
    /// Set if the client's not reading limited the stream.
    pub limited: Option<ClientLimited>,
    /// How the transport ended.
    pub ending: Ending,
}

/// Whether a status means success.
pub(super) fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}

impl Timeline {
    /// Whether the engine's status means success.
    #[must_use]
    pub fn is_success(&self) -> bool {
        is_success(self.status)
    }

    /// Time to first token, from `start`.
    #[must_use]
    pub fn ttft(&self) -> Option<Duration> {
        self.first_token.map(|at| at.since(self.start))
    }

    /// Time to first visible token, from `start`.
    #[must_use]
    pub fn ttfvt(&self) -> Option<Duration> {
        self.first_visible.map(|at| at.since(self.start))
    }

    /// The worst choice's time per output token.
    #[must_use]
    pub fn tpot(&self) -> Option<Duration> {
        self.choices.iter().filter_map(Choice::tpot).max()
    }

    /// Token events and output tokens of a plain stream: one choice, complete, token by token, whose usage has
    /// no tokens that no event carried. None for other
    /// responses.
    #[must_use]
    pub fn plain_events(&self) -> Option<(u64, Tokens)> {
        let is_whole = self.finish.is_some() && self.error.is_none() && self.reader == ResponseFormat::Events;
        let is_plain = self.choices.len() == 1 && !self.has_lumps;
        let is_hidden = self.usage.reasoning > Some(Tokens::ZERO) && self.first_visible == self.first_token;
        let counts = is_whole && is_plain && !is_hidden && self.source == TokenSource::Usage;
        counts.then_some((self.token_events, self.output))
    }

    /// From `start` to `finish`.
    #[must_use]
    pub fn e2e(&self) -> Option<Duration> {
        self.finish.map(|at| at.since(self.start))
    }
}

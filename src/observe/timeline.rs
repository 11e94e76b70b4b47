//! What was seen of one answer: the [`Timeline`] that `judge` weighs and `record` writes down.

use std::sync::Arc;
use std::time::Duration;

use crate::units::{Tick, Tokens};

/// How the answer's body is read; its content type and coding choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// `text/event-stream`.
    Events,
    /// A JSON body, read whole at its end.
    Json,
    /// An event stream of a path that does not generate: its bytes pass as they come, and its events
    /// are looked at for usage and errors.
    Aside,
    /// A body without tokens (audio, text): only its framing matters.
    Opaque,
    /// A content coding other than identity: bytes pass, nothing can be read.
    Coded,
}

/// What an observer measures besides the moments that every timeline has.
#[derive(Clone, Debug)]
pub struct Watch {
    /// Upper edges of the class's inter-token-gap histogram, ascending; gaps above the last
    /// fall into one more bucket.
    pub gap_edges: Arc<[Duration]>,
    /// The class's ITL threshold, to know when it broke first.
    pub itl: Option<Duration>,
    /// Gaps above this count as stalls.
    pub stall: Duration,
    /// Events longer than this are relayed but no longer inspected, in bytes.
    pub max_event: usize,
}

/// Moments only: no gap histogram, no ITL objective; stalls above a second, events up to
/// 16 MiB.
impl Default for Watch {
    fn default() -> Self {
        Watch { gap_edges: [].into(), itl: None, stall: Duration::from_secs(1), max_event: 16 << 20 }
    }
}

/// Where a count of output tokens comes from. Never silently mixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TokenSource {
    /// The engine's `usage`.
    Usage,
    /// Token events times the learned ratio of tokens to events.
    Events,
    /// Visible bytes of a non-streaming answer / 4.
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

/// Usage as the engine reported it: per field the last explicit value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens, cache reads and writes included.
    pub input: Option<Tokens>,
    /// Output tokens over all choices.
    pub output: Option<Tokens>,
    /// Of the output, reasoning tokens.
    pub reasoning: Option<Tokens>,
    /// Of the input, tokens read from the prefix cache.
    pub cached: Option<Tokens>,
}

/// One choice of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Its index in the answer.
    pub index: u64,
    /// Receipt of its first token event.
    pub first_token: Option<Tick>,
    /// Receipt of its first visible token event.
    pub first_visible: Option<Tick>,
    /// Receipt of its last token event; its finish, where usage tells of tokens that no event can
    /// have carried.
    pub last_token: Option<Tick>,
    /// Its token events.
    pub events: u64,
    /// Its output tokens: its own usage, else its share of the total; see `Timeline::source`.
    pub tokens: f64,
    /// It has a non-empty finish reason.
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
    /// Gaps per bucket: one more than there are edges in [`Watch::gap_edges`].
    pub buckets: Vec<u32>,
    /// Sum of all gaps.
    pub sum: Duration,
    /// The largest gap.
    pub largest: Option<Duration>,
    /// Gaps above [`Watch::stall`].
    pub stalls: u32,
    /// The moment at which the ITL objective broke first: the event before the first gap
    /// that was too large, plus the threshold.
    pub broke: Option<Tick>,
}

/// An error that stood inside a 200 (`docs/semantics.md`, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InBandError {
    /// Its HTTP twin: 500 where the engine's own code was absent or unknown.
    pub code: u16,
    /// Whether a token had come before.
    pub after_first_token: bool,
}

impl InBandError {
    /// Whether the engine refuses the key that it saw.
    #[must_use]
    pub const fn refuses_key(self) -> bool {
        matches!(self.code, 401 | 403)
    }
}

/// The moment from which on a client's refusal of bytes is what is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientLimited {
    /// When the stretch of refusal began that lasted too long. Later silence is the client's.
    pub at: Tick,
    /// The choices as they stood then, with the tokens known of each at that moment.
    pub choices: Vec<Choice>,
}

/// A time limit of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeoutKind {
    /// `first_token` (streams), `response_head` (the rest).
    FirstToken,
    /// `idle`: the gap between two events.
    Idle,
    /// `total`.
    Total,
}

/// How the answer's transport ended. What that means for the promise is `judge`'s business.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The engine's body ended as its framing says; or the answer had finished, and the gateway ended
    /// it because the engine held its body open.
    Clean,
    /// The engine's connection broke: reset, broken framing, a length not kept.
    Broken,
    /// The client left.
    Left,
    /// A time limit fired.
    TimedOut(TimeoutKind),
    /// The client did not read, and a write-stall or total limit ended it.
    WriteStalled,
    /// The drain limit cut it.
    Drained,
    /// The gateway failed: a panic in handler or body.
    Panicked,
}

/// Everything seen of the answer that was relayed. Complete when the observer ends.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Where objectives run from: the arrival, later by what the client let the gateway wait.
    pub start: Tick,
    /// The request asked for a stream, or got one unasked: judged by token moments.
    pub streamed: bool,
    /// How the body was read.
    pub reader: Reader,
    /// First token event on any channel, over all choices. On a streamed request that got a
    /// JSON body: its last byte.
    pub first_token: Option<Tick>,
    /// First token event on a visible channel.
    pub first_visible: Option<Tick>,
    /// Last token event, over all choices. Where tokens came that no event can have carried,
    /// [`Choice::last_token`] is later, by which TPOT is measured.
    pub last_token: Option<Tick>,
    /// The event that ended the answer in its dialect; for a non-streaming answer its last
    /// byte, where the framing ended whole and the body could be read.
    pub finish: Option<Tick>,
    /// The body ended, or was dropped.
    pub end: Tick,
    /// Choices seen, by index.
    pub choices: Vec<Choice>,
    /// Gaps between token events.
    pub gaps: Gaps,
    /// What usage said.
    pub usage: Usage,
    /// Where `output` comes from.
    pub source: TokenSource,
    /// Output tokens: usage, else events x ratio (rounded up), else visible bytes / 4.
    pub output: Tokens,
    /// Token events over all choices; of a JSON body the choices that have any output.
    pub token_events: u64,
    /// Some choice ended with reason `length` (`max_tokens`, `incomplete`).
    pub cut_by_length: bool,
    /// Some choice (or the answer) had a finish or stop reason.
    pub has_finish_reason: bool,
    /// The last in-band error.
    pub error: Option<InBandError>,
    /// The answer could not be inspected: an event over the cap, no JSON object, a coding.
    pub unparseable: bool,
    /// HTTP status of the answer.
    pub status: u16,
    /// Some output was seen on any channel, also in an answer that did not stream.
    pub has_output: bool,
    /// Some output was seen on a visible channel, also in an answer that did not stream.
    pub has_visible: bool,
    /// Some output was of a kind that engines deliver in lumps, not token by token: calls of
    /// tools, sound.
    pub has_lumps: bool,
    /// The client's refusal of bytes had limited the stream.
    pub limited: Option<ClientLimited>,
    /// How the transport ended.
    pub ending: Ending,
}

/// Whether an engine's status says that it did what was asked.
pub(super) fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}

impl Timeline {
    /// Whether the engine's status says that it did what was asked.
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

    /// Token events and output tokens of an answer whose events are like those of any plain
    /// stream: one choice that came whole, token by token, and whose usage says nothing of
    /// tokens that no event carried.
    #[must_use]
    pub fn plain_events(&self) -> Option<(u64, Tokens)> {
        let is_whole = self.finish.is_some() && self.error.is_none() && self.reader == Reader::Events;
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

//! The record of one request, created once, at its end.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::trace::{RequestTrace, SpanId};
use crate::admit::limit::{LimitKind, LimitScope};
use crate::admit::overload_control::AppliedActions;
use crate::judge::{Excluded, Outcome, Verdict};
use crate::observe::{Timeline, TokenSource};
use crate::types::{ApiPath, ClassId, EngineId, LengthBucket, PoolId, RequestId, TenantId, Tick, Tokens};

/// Reason for a further attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// A reused connection was closed before any response byte; not counted as an attempt.
    StaleConnection,
    /// The engine could not be connected to.
    ConnectFailed,
    /// The engine pushed back: 429, 503, 529 or the in-band equivalent.
    PushBack,
    /// The engine failed: another 5xx, the in-band equivalent, reset or truncation.
    Fault,
    /// The engine refused a body with injected members.
    Injection,
    /// The engine was going away, and nothing of its response had been forwarded.
    Departing,
}

impl Retry {
    /// Every reason, in the order of the documentation.
    pub const ALL: [Retry; 6] = [
        Retry::StaleConnection,
        Retry::ConnectFailed,
        Retry::PushBack,
        Retry::Fault,
        Retry::Injection,
        Retry::Departing,
    ];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Retry::StaleConnection => "stale_connection",
            Retry::ConnectFailed => "connect_failed",
            Retry::PushBack => "push_back",
            Retry::Fault => "fault",
            Retry::Injection => "injection",
            Retry::Departing => "departing",
        }
    }
}

/// Number of retries per reason, in the order of [`Retry::ALL`].
pub type RetryCounts = [u32; Retry::ALL.len()];

/// Shape of a prompt for the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptShape {
    /// UTF-8 bytes of its text.
    pub bytes: u64,
    /// A hash for each block of its beginning (`inspect::Facts::prefix_blocks`).
    pub blocks: Vec<u64>,
}

/// A record on its way to its writers.
#[derive(Debug)]
pub(super) enum SharedRecord {
    /// There is one of them.
    Own(Box<RequestRecord>),
    /// There are several.
    Shared(Arc<RequestRecord>),
}

impl Deref for SharedRecord {
    type Target = RequestRecord;
    fn deref(&self) -> &RequestRecord {
        match self {
            SharedRecord::Own(record) => record,
            SharedRecord::Shared(record) => record,
        }
    }
}

/// One attempt at an engine; a repetition on the same engine (stale connection, refused injection) is part
/// of it. Made by `gateway::retries`; the access line, the journal, the page and spans read this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptRecord {
    /// Its pool.
    pub pool: PoolId,
    /// The engine.
    pub engine: EngineId,
    /// The engine was picked.
    pub begin: Tick,
    /// Why the gateway left the engine; `None` if its response was relayed or the request's end cut it.
    pub failure: Option<AttemptFailure>,
    /// Its span, if spans are exported.
    pub span: Option<SpanId>,
}

/// The failure of an attempt before the client got any of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptFailure {
    /// When the engine was left.
    pub at: Tick,
    /// The outcome's name (`route::retry::AttemptOutcome::as_str`).
    pub what: &'static str,
    /// The HTTP status of the engine's response, if it gave one.
    pub status: Option<u16>,
}

/// One finished request. Every metric, log line and journal line comes from it.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// Correlates response, log line and span.
    pub request_id: RequestId,
    /// Its API path; `None` if it ended before that was known.
    pub endpoint: Option<ApiPath>,
    /// Its tenant; `None` if no key was found.
    pub tenant: Option<TenantId>,
    /// Its class; `None` if it ended before classification.
    pub class: Option<ClassId>,
    /// The rule that chose the class.
    pub rule: Option<Arc<str>>,
    /// The model as named by the routes.
    pub model: Option<Arc<str>>,
    /// The pool of the last attempt, else the first of the route.
    pub pool: Option<PoolId>,
    /// The engine of the last attempt.
    pub engine: Option<EngineId>,
    /// The attempts, in order.
    pub attempts: Vec<AttemptRecord>,
    /// Retries by reason.
    pub retries: RetryCounts,
    /// The HTTP status sent to the client; 499 if it left before one was sent.
    pub status: u16,
    /// Whether the client left before the response was complete.
    pub left: bool,
    /// It asked for a stream.
    pub streamed: bool,
    /// Choices that it asked for, over all its prompts.
    pub choices: u64,
    /// The largest output cap that it stated.
    pub stated_cap: Option<Tokens>,
    /// How long the prompt is.
    pub length: LengthBucket,
    /// Estimated prompt tokens, if the body was read.
    pub prompt: Tokens,
    /// The same, if a journal is kept.
    pub prompt_shape: Option<Box<PromptShape>>,
    /// The gateway had parsed the request head.
    pub arrival: Tick,
    /// When the last byte of the body was read.
    pub body_complete: Option<Tick>,
    /// How long the gateway waited for body bytes that the client did not send.
    pub client_wait: Option<Duration>,
    /// When the request left the queue.
    pub admitted: Option<Tick>,
    /// The request ended.
    pub end: Tick,
    /// Its outcome and objectives.
    pub verdict: Verdict,
    /// The observed response, if one was relayed.
    pub timeline: Option<Timeline>,
    /// The edges by which the timeline's gaps were counted.
    pub gap_edges: Option<Arc<[Duration]>>,
    /// The error code of the gateway's own rejection, if any.
    pub refusal: Option<&'static str>,
    /// The tenant limit that refused it, and its scope.
    pub limited: Option<(LimitKind, LimitScope)>,
    /// Whether it was admitted beyond a limit of its tenant.
    pub over_limit: bool,
    /// Whether it went to a further pool of its route because of the queue.
    pub spilled: bool,
    /// The overload actions applied to it.
    pub degraded: AppliedActions,
    /// Whether one of them lowered its output cap.
    pub cap_lowered: bool,
    /// The unknown path or model it asked for, escaped and shortened.
    pub asked: Option<Box<str>>,
    /// Its trace, if spans are exported.
    pub trace: Option<Box<RequestTrace>>,
}

impl RequestRecord {
    /// Time from the request head to the last byte of the body.
    #[must_use]
    pub fn upload(&self) -> Option<Duration> {
        self.body_complete.map(|at| at.since(self.arrival))
    }

    /// Time in the gateway's queue.
    #[must_use]
    pub fn queue(&self) -> Option<Duration> {
        Some(self.admitted?.since(self.body_complete?))
    }

    /// Number of attempts.
    #[must_use]
    pub fn attempt_count(&self) -> u32 {
        u32::try_from(self.attempts.len()).unwrap_or(u32::MAX)
    }

    /// The response, if an engine gave one without an error.
    #[must_use]
    pub fn answer(&self) -> Option<&Timeline> {
        self.timeline.as_ref().filter(|timeline| timeline.is_success())
    }

    /// The response, if it finished in its dialect.
    #[must_use]
    pub fn whole_answer(&self) -> Option<&Timeline> {
        self.answer().filter(|timeline| timeline.finish.is_some() && timeline.error.is_none())
    }

    /// The time to the first token of a stream.
    #[must_use]
    pub fn streamed_ttft(&self) -> Option<Duration> {
        self.answer().filter(|answer| answer.streamed)?.ttft()
    }

    /// TPOT of a finished stream that its client did not slow down, and the source of its token count.
    #[must_use]
    pub fn streamed_tpot(&self) -> Option<(Duration, TokenSource)> {
        let answer = self.whole_answer().filter(|answer| answer.streamed && answer.limited.is_none())?;
        Some((answer.tpot()?, answer.source))
    }

    /// Input and output tokens; none if no engine is known to have computed anything. Input is the engine's
    /// usage, else the prompt estimate.
    #[must_use]
    pub fn tokens(&self) -> Option<(Tokens, Tokens)> {
        let computed = |t: &&Timeline| t.usage.input.is_some() || t.output > Tokens::ZERO || t.first_token.is_some();
        let answer = self.answer().filter(computed)?;
        Some((answer.usage.input.unwrap_or(self.prompt), answer.output))
    }

    /// Its trace, if it is kept: sampled at the head, or a miss. Local replies have none, because health
    /// checks are no traffic.
    #[must_use]
    pub fn kept_trace(&self) -> Option<&RequestTrace> {
        let outcome = self.verdict.outcome;
        let is_own = self.attempts.is_empty() && outcome == Outcome::Excluded(Excluded::Unjudged);
        let is_miss = matches!(outcome, Outcome::Missed(_));
        self.trace.as_deref().filter(|trace| !is_own && (is_miss || trace.context.sampled))
    }

    /// How long the client had waited when it left before the response was complete.
    #[must_use]
    pub fn left_after(&self) -> Option<Duration> {
        self.left.then(|| self.end.since(self.arrival))
    }

    /// The class in which it is counted; a miss before classification counts in the default class.
    #[must_use]
    pub fn booked_class<'a>(&'a self, default: &'a ClassId) -> Option<&'a ClassId> {
        match self.verdict.outcome {
            Outcome::Met | Outcome::Missed(_) => Some(self.class.as_ref().unwrap_or(default)),
            Outcome::Excluded(_) => self.class.as_ref(),
        }
    }
}

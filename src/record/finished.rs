//! All that is written down of one request, made once, at its end.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use super::trace::RequestTrace;
use crate::admit::levels::Degraded;
use crate::admit::limit::{Limit, Scope};
use crate::judge::{Excluded, Outcome, Verdict};
use crate::observe::Timeline;
use crate::units::{ClassId, Endpoint, EngineId, LengthBucket, PoolId, RequestId, TenantId, Tick, Tokens};

/// Why another attempt was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// A reused connection was closed before any response byte; no attempt of its own.
    StaleConnection,
    /// No connection to the engine.
    ConnectFailed,
    /// The engine pushed back: 429, 503, 529 or a twin inside a 200.
    PushBack,
    /// The engine failed: another 5xx, a twin inside a 200, reset or truncation.
    Fault,
    /// The engine refused a body into which the gateway had injected something.
    Injection,
    /// The engine was going away, and nothing of its answer had gone to the client.
    Departing,
}

impl Retry {
    /// All of them, in the order of the documentation.
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

/// How often each kind of retry was made, in the order of [`Retry::ALL`].
pub type RetryCounts = [u32; Retry::ALL.len()];

/// A prompt as the journal tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptShape {
    /// UTF-8 bytes of its text.
    pub bytes: u64,
    /// A hash for each block of its beginning (`inspect::Facts::prefix_blocks`).
    pub blocks: Vec<u64>,
}

/// A record on its way to those that write it down.
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

/// One request, ended. Every metric, log line and journal line is made from it.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// Correlates response, log line and span.
    pub request_id: RequestId,
    /// Which of our paths it came to; `None` where it ended before that was known.
    pub endpoint: Option<Endpoint>,
    /// Who asked; `None` where no key was found.
    pub tenant: Option<TenantId>,
    /// The class that applied; `None` where it ended before one did.
    pub class: Option<ClassId>,
    /// Which rule chose the class.
    pub rule: Option<Arc<str>>,
    /// The model as the routes name it.
    pub model: Option<Arc<str>>,
    /// The pool of the last attempt, else the first of the route.
    pub pool: Option<PoolId>,
    /// The engine of the last attempt.
    pub engine: Option<EngineId>,
    /// Attempts made.
    pub attempts: u32,
    /// Of which kinds the further ones were.
    pub retries: RetryCounts,
    /// The HTTP status that the client received; 499 where it left before any.
    pub status: u16,
    /// The client left before the answer was whole.
    pub left: bool,
    /// It asked for a stream.
    pub streamed: bool,
    /// Choices that it asked for, over all its prompts.
    pub choices: u64,
    /// The largest output cap that it stated.
    pub stated_cap: Option<Tokens>,
    /// How long the prompt is.
    pub length: LengthBucket,
    /// The prompt estimate, where the body was read.
    pub prompt: Tokens,
    /// The same, where a journal is kept.
    pub prompt_shape: Option<Box<PromptShape>>,
    /// The gateway had parsed the request head.
    pub arrival: Tick,
    /// The last byte of the body was read.
    pub body_complete: Option<Tick>,
    /// How long the client had sent nothing of it while the gateway stood ready to read.
    pub client_wait: Option<Duration>,
    /// The request left the queue.
    pub admitted: Option<Tick>,
    /// The request ended.
    pub end: Tick,
    /// How it ended, and which objectives held.
    pub verdict: Verdict,
    /// What was seen of the answer, where one was relayed.
    pub timeline: Option<Timeline>,
    /// The edges by which the timeline's gaps were counted.
    pub gap_edges: Option<Arc<[Duration]>>,
    /// The code of the gateway's own error, where it made one.
    pub refusal: Option<&'static str>,
    /// The limit of its tenant that refused it, and whether it was one for its model.
    pub limited: Option<(Limit, Scope)>,
    /// It was let in beyond a limit of its tenant.
    pub over_limit: bool,
    /// It went to a further pool of its route because of the queue before.
    pub spilled: bool,
    /// What overload levels did to it.
    pub degraded: Degraded,
    /// Its output cap was lowered by one of them.
    pub cap_lowered: bool,
    /// The path or model that it asked for in vain, as it may be shown.
    pub asked: Option<Box<str>>,
    /// Its trace, where spans are exported.
    pub trace: Option<Box<RequestTrace>>,
}

impl RequestRecord {
    /// From the head of the request to the last byte of its body.
    #[must_use]
    pub fn upload(&self) -> Option<Duration> {
        self.body_complete.map(|at| at.since(self.arrival))
    }

    /// The time in the gateway's queue.
    #[must_use]
    pub fn queue(&self) -> Option<Duration> {
        Some(self.admitted?.since(self.body_complete?))
    }

    /// The answer, where an engine gave one without an error.
    #[must_use]
    pub fn answer(&self) -> Option<&Timeline> {
        self.timeline.as_ref().filter(|timeline| timeline.is_success())
    }

    /// The answer, where it finished in its dialect.
    #[must_use]
    pub fn whole_answer(&self) -> Option<&Timeline> {
        self.answer().filter(|timeline| timeline.finish.is_some() && timeline.error.is_none())
    }

    /// Input and output tokens: nothing where no engine is known to have computed anything. Input is the
    /// engine's usage, else the prompt estimate.
    #[must_use]
    pub fn tokens(&self) -> Option<(Tokens, Tokens)> {
        let computed = |t: &&Timeline| t.usage.input.is_some() || t.output > Tokens::ZERO || t.first_token.is_some();
        let answer = self.answer().filter(computed)?;
        Some((answer.usage.input.unwrap_or(self.prompt), answer.output))
    }

    /// Its trace, if it is kept: sampled at the head, or a miss. What the gateway answers by itself
    /// has none: health checks are no traffic.
    #[must_use]
    pub fn kept_trace(&self) -> Option<&RequestTrace> {
        let outcome = self.verdict.outcome;
        let is_own = self.attempts == 0 && outcome == Outcome::Excluded(Excluded::Unjudged);
        let is_miss = matches!(outcome, Outcome::Missed(_));
        self.trace.as_deref().filter(|trace| !is_own && (is_miss || trace.context.sampled))
    }

    /// How long the client had waited when it left, if it left before the answer was whole.
    #[must_use]
    pub fn left_after(&self) -> Option<Duration> {
        self.left.then(|| self.end.since(self.arrival))
    }

    /// The class in whose books it goes: a miss before classification goes into the default's.
    #[must_use]
    pub fn booked_class<'a>(&'a self, default: &'a ClassId) -> Option<&'a ClassId> {
        match self.verdict.outcome {
            Outcome::Met | Outcome::Missed(_) => Some(self.class.as_ref().unwrap_or(default)),
            Outcome::Excluded(_) => self.class.as_ref(),
        }
    }
}

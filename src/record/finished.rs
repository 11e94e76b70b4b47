//! All that is written down of one request, made once, at its end.

use std::sync::Arc;
use std::time::Duration;

use crate::admit::levels::Degraded;
use crate::admit::limit::{Limit, Scope};
use crate::judge::{Outcome, Verdict};
use crate::observe::{Timeline, TokenSource};
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

/// One attempt: an engine that was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptRecord {
    /// Its pool.
    pub pool: PoolId,
    /// The engine.
    pub engine: EngineId,
    /// The engine was picked.
    pub begin: Tick,
    /// When and how it failed for good before the client got anything of it; `None` where its response was
    /// relayed, and where the request's end cut it.
    pub failed: Option<(Tick, Retry)>,
}

/// One request, ended. Every metric and log line is made from it.
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
    /// Each of them, in order.
    pub tried: Vec<AttemptRecord>,
    /// Of which kinds the further ones were.
    pub retries: RetryCounts,
    /// The HTTP status that the client received; 499 where it left before any.
    pub status: u16,
    /// The client left before the answer was whole.
    pub left: bool,
    /// How long the prompt is.
    pub length: LengthBucket,
    /// The prompt estimate, where the body was read.
    pub prompt: Tokens,
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

    /// The time to the first token of a stream.
    #[must_use]
    pub fn streamed_ttft(&self) -> Option<Duration> {
        self.answer().filter(|answer| answer.streamed)?.ttft()
    }

    /// The time per output token of a finished stream that its client did not slow down, and where the
    /// count of its tokens comes from.
    #[must_use]
    pub fn streamed_tpot(&self) -> Option<(Duration, TokenSource)> {
        let answer = self.whole_answer().filter(|answer| answer.streamed && answer.limited.is_none())?;
        Some((answer.tpot()?, answer.source))
    }

    /// Input and output tokens: nothing where no engine is known to have computed anything. Input is the
    /// engine's usage, else the prompt estimate.
    #[must_use]
    pub fn tokens(&self) -> Option<(Tokens, Tokens)> {
        let computed = |t: &&Timeline| t.usage.input.is_some() || t.output > Tokens::ZERO || t.first_token.is_some();
        let answer = self.answer().filter(computed)?;
        Some((answer.usage.input.unwrap_or(self.prompt), answer.output))
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

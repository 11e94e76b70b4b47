//! What a class promises.

use std::time::Duration;

use crate::units::Tokens;

/// One objective: at least `attainment` of the judged requests stay at or below `threshold`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// The largest value that still holds.
    pub threshold: Duration,
    /// The share of requests on which it should hold, 0 to 1.
    pub attainment: f64,
}

/// Which token ends the wait that TTFT measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TtftCounts {
    /// The first token on any channel.
    #[default]
    FirstToken,
    /// The first token that a user sees.
    FirstVisibleToken,
}

/// Whether a class judges answers that do not stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonStreaming {
    /// By the E2E objective, else by the derived budget.
    #[default]
    Judged,
    /// They are excluded.
    Excluded,
}

/// Whether the time in which a client let the gateway wait for its body counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UploadRule {
    /// Objectives run from `start`: what the client does not send is no wait of its request.
    #[default]
    Excluded,
    /// They run from the arrival.
    Counted,
}

/// Quantiles of a length, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantiles {
    /// Half of the requests are at or below this.
    pub p50: Tokens,
    /// 95 of 100 are.
    pub p95: Tokens,
}

/// The workload that a class's objectives were written for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assumption {
    /// Prompt tokens.
    pub input_tokens: Option<Quantiles>,
    /// Output tokens.
    pub output_tokens: Option<Quantiles>,
}

/// Everything a class promises, and how it is judged.
#[derive(Clone, Debug, PartialEq)]
pub struct Objectives {
    /// Time to first token.
    pub ttft: Option<Objective>,
    /// Time per output token.
    pub tpot: Option<Objective>,
    /// The largest gap between token events.
    pub itl: Option<Objective>,
    /// From `start` to finish.
    pub e2e: Option<Objective>,
    /// Which token ends TTFT.
    pub ttft_counts: TtftCounts,
    /// What becomes of answers that do not stream.
    pub non_streaming: NonStreaming,
    /// Whether the client's own wait counts.
    pub upload: UploadRule,
    /// Gaps above this are stalls; a client that leaves in one leaves because of us.
    pub stall: Duration,
    /// The share of requests on which all objectives should hold together.
    pub joint_target: f64,
    /// The window over which the target is promised.
    pub window: Duration,
    /// The workload that was assumed.
    pub assumed: Option<Assumption>,
    /// Output tokens to expect where a request states no cap.
    pub default_output_tokens: Option<Tokens>,
}

impl Default for Objectives {
    /// No objective: a request is met by finishing.
    fn default() -> Self {
        Objectives {
            ttft: None,
            tpot: None,
            itl: None,
            e2e: None,
            ttft_counts: TtftCounts::FirstToken,
            non_streaming: NonStreaming::Judged,
            upload: UploadRule::Excluded,
            stall: Duration::from_secs(1),
            joint_target: 0.95,
            window: Duration::from_secs(28 * 24 * 3600),
            assumed: None,
            default_output_tokens: None,
        }
    }
}

impl Objectives {
    /// Expected where neither the request nor its class says anything.
    pub const FALLBACK_OUTPUT: Tokens = Tokens(1024);

    /// Whether the class promises nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ttft.is_none() && self.tpot.is_none() && self.itl.is_none() && self.e2e.is_none()
    }

    /// The time by which a stream of `n` tokens that kept both promises would have ended:
    /// TTFT threshold + TPOT threshold x (n - 1). Exists only where both thresholds do.
    #[must_use]
    pub fn derived_budget(&self, n: u64) -> Option<Duration> {
        let (ttft, tpot) = (self.ttft?.threshold, self.tpot?.threshold);
        let nanos = tpot.as_nanos().saturating_mul(u128::from(n.saturating_sub(1)));
        let rest = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        Some(ttft.saturating_add(rest))
    }

    /// The time within which a non-streaming answer of `n` tokens must end: the E2E
    /// threshold, else the derived budget.
    #[must_use]
    pub fn whole_budget(&self, n: u64) -> Option<Duration> {
        self.e2e.map(|objective| objective.threshold).or_else(|| self.derived_budget(n))
    }

    /// The longest time from start within which a request of this class can still keep its promise: to
    /// its first token, or to its end where answers have the expected length.
    #[must_use]
    pub fn longest(&self) -> Option<Duration> {
        let ttft = self.ttft.map(|objective| objective.threshold);
        ttft.into_iter().chain(self.whole_budget(self.default_output().0)).max()
    }

    /// Whether a non-streaming answer of this class is judged at all. A class without any
    /// objective judges it: it is met by finishing.
    #[must_use]
    pub fn judges_non_streaming(&self) -> bool {
        self.non_streaming == NonStreaming::Judged && (self.is_empty() || self.whole_budget(1).is_some())
    }

    /// Output tokens to expect of a request that states no cap.
    #[must_use]
    pub fn default_output(&self) -> Tokens {
        self.default_output_tokens.or_else(|| self.assumed_output_p95()).unwrap_or(Self::FALLBACK_OUTPUT)
    }

    /// The output length that 95 of 100 requests were assumed to stay below.
    #[must_use]
    pub fn assumed_output_p95(&self) -> Option<Tokens> {
        self.assumed.and_then(|assumed| assumed.output_tokens).map(|quantiles| quantiles.p95)
    }

    /// The objectives of a request that brought targets of its own. Unless `may_loosen`, the
    /// stricter of class and request applies. A target that the class does not have is added,
    /// with the joint target as its attainment.
    #[must_use]
    pub fn with_targets(&self, ttft: Option<Duration>, tpot: Option<Duration>, may_loosen: bool) -> Objectives {
        let pick = |own: Option<Objective>, asked: Option<Duration>| {
            let Some(asked) = asked else { return own };
            match own {
                Some(own) if !may_loosen => Some(Objective { threshold: own.threshold.min(asked), ..own }),
                Some(own) => Some(Objective { threshold: asked, ..own }),
                None => Some(Objective { threshold: asked, attainment: self.joint_target }),
            }
        };
        Objectives { ttft: pick(self.ttft, ttft), tpot: pick(self.tpot, tpot), ..self.clone() }
    }
}

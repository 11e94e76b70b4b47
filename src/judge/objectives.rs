//! The objectives of a class.

use std::sync::Arc;
use std::time::Duration;

use crate::types::Tokens;

/// One objective: at least `attainment` of the judged requests stay at or below `threshold`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    /// The largest value that holds.
    pub threshold: Duration,
    /// Share of requests on which it should hold, 0 to 1.
    pub attainment: f64,
}

/// Which token ends TTFT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TtftCounts {
    /// The first token on any channel.
    #[default]
    FirstToken,
    /// The first token visible to a user.
    FirstVisibleToken,
}

/// Whether a class judges non-streaming responses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonStreaming {
    /// By the E2E objective, else by the derived budget.
    #[default]
    Judged,
    /// They are excluded.
    Excluded,
}

/// Whether the time a client takes to send its body counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UploadRule {
    /// Objectives run from `start`, without the client's own delay.
    #[default]
    Excluded,
    /// Objectives run from the arrival.
    Counted,
}

/// Quantiles of a length, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantiles {
    /// Half of the requests are at or below this.
    pub p50: Tokens,
    /// 95 % of the requests are at or below this.
    pub p95: Tokens,
}

/// The workload for which a class's objectives were written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assumption {
    /// Prompt tokens.
    pub input_tokens: Option<Quantiles>,
    /// Output tokens.
    pub output_tokens: Option<Quantiles>,
}

/// Objectives of a class, and its rules of judging.
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
    /// How non-streaming responses are treated.
    pub non_streaming: NonStreaming,
    /// Whether the client's upload time counts.
    pub upload: UploadRule,
    /// Gaps above this are stalls; leaving during one is a late cancel.
    pub stall: Duration,
    /// Share of requests on which all objectives should hold together.
    pub joint_target: f64,
    /// The window of the target.
    pub window: Duration,
    /// The assumed workload.
    pub assumed: Option<Assumption>,
    /// Expected output tokens of a request without a cap.
    pub default_output_tokens: Option<Tokens>,
    /// The class's own objectives, where the request has set targets of its own.
    pub of_class: Option<Arc<Objectives>>,
}

impl Default for Objectives {
    /// No objectives: a finished request is met.
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
            of_class: None,
        }
    }
}

impl Objectives {
    /// Expected output if neither the request nor its class states one.
    pub const FALLBACK_OUTPUT: Tokens = Tokens(1024);

    /// Whether the class has no objectives.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ttft.is_none() && self.tpot.is_none() && self.itl.is_none() && self.e2e.is_none()
    }

    /// End of a stream of `n` tokens that exactly keeps both objectives: TTFT threshold + TPOT threshold x
    /// (n - 1). Needs both thresholds.
    #[must_use]
    pub fn derived_budget(&self, n: u64) -> Option<Duration> {
        let (ttft, tpot) = (self.ttft?.threshold, self.tpot?.threshold);
        let nanos = tpot.as_nanos().saturating_mul(u128::from(n.saturating_sub(1)));
        let rest = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        Some(ttft.saturating_add(rest))
    }

    /// Time limit of a non-streaming response of `n` tokens: the E2E threshold, else the derived
    /// budget.
    #[must_use]
    pub fn whole_budget(&self, n: u64) -> Option<Duration> {
        self.e2e.map(|objective| objective.threshold).or_else(|| self.derived_budget(n))
    }

    /// Longest time from start after which a request can still meet its objectives: to the first token, or to
    /// the end at the expected length.
    #[must_use]
    pub fn longest(&self) -> Option<Duration> {
        let ttft = self.ttft.map(|objective| objective.threshold);
        ttft.into_iter().chain(self.whole_budget(self.default_output().0)).max()
    }

    /// Whether non-streaming responses of this class are judged. A class without objectives judges them: they
    /// are met by finishing.
    #[must_use]
    pub fn judges_non_streaming(&self) -> bool {
        self.non_streaming == NonStreaming::Judged && (self.is_empty() || self.whole_budget(1).is_some())
    }

    /// Expected output tokens of a request without a cap.
    #[must_use]
    pub fn default_output(&self) -> Tokens {
        self.default_output_tokens.or_else(|| self.assumed_output_p95()).unwrap_or(Self::FALLBACK_OUTPUT)
    }

    /// The assumed 95th percentile of output tokens.
    #[must_use]
    pub fn assumed_output_p95(&self) -> Option<Tokens> {
        self.assumed.and_then(|assumed| assumed.output_tokens).map(|quantiles| quantiles.p95)
    }

    /// The objectives with a request's own targets applied. Unless `may_loosen`, the stricter of class and
    /// request applies. A target without a counterpart in the class is added with the joint target as
    /// its attainment.
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
        Objectives {
            ttft: pick(self.ttft, ttft),
            tpot: pick(self.tpot, tpot),
            of_class: Some(Arc::new(self.clone())),
            ..self.clone()
        }
    }
}

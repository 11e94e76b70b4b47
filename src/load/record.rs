//! Record of one request: a row of the JSONL and CSV files.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::judge::{Excluded, ObjectiveState, Outcome, Verdict};
use crate::observe::Timeline;

/// One request and its verdict. Times are in seconds; those of the response run from the scheduled send time.
/// A measure that was not reached or is not defined is absent (`docs/semantics.md`, section 2).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadRecord {
    /// Number of the request in its run, in the order of the schedule, from 0.
    pub number: u64,
    /// Number of the planner's own: the line of a trace.
    pub tag: u64,
    /// Class.
    pub class: String,
    /// Index of the class.
    #[serde(skip)]
    pub class_index: usize,
    /// Scheduled send time, from the start of the run.
    pub scheduled_seconds: f64,
    /// Lateness of the client itself: from the scheduled time to the moment at which it began to send.
    pub send_lag_seconds: f64,
    /// End of the request, from the start of the run.
    pub end_seconds: f64,
    /// HTTP status; absent where no response came.
    pub status: Option<u16>,
    /// `met`, `missed` or `excluded`.
    pub outcome: String,
    /// Reason of a miss or an exclusion; empty for `met`.
    pub reason: String,
    /// Whether the TTFT objective held; absent where there is none, or where it was not evaluated.
    pub ttft_held: Option<bool>,
    /// State of the TPOT objective.
    pub tpot_held: Option<bool>,
    /// State of the ITL objective.
    pub itl_held: Option<bool>,
    /// State of the E2E objective or derived budget.
    pub e2e_held: Option<bool>,
    /// Time to the first token.
    pub ttft_seconds: Option<f64>,
    /// Time to the first visible token.
    pub ttfvt_seconds: Option<f64>,
    /// Time per output token.
    pub tpot_seconds: Option<f64>,
    /// Largest gap between two token events.
    pub itl_max_seconds: Option<f64>,
    /// Time to the finish.
    pub e2e_seconds: Option<f64>,
    /// Gaps longer than the class's `stall_seconds`.
    pub stalls: u32,
    /// Prompt tokens that were planned.
    pub planned_input_tokens: Option<u64>,
    /// Output cap that the request stated.
    pub output_cap: Option<u64>,
    /// Prompt tokens by the engine's usage.
    pub input_tokens: Option<u64>,
    /// Of these, tokens from the prefix cache, by the engine's usage.
    pub cached_tokens: Option<u64>,
    /// Output tokens.
    pub output_tokens: u64,
    /// Source of `output_tokens`: `usage`, `events` or `estimate`; empty where no response came.
    pub token_source: String,
    /// Token events.
    pub token_events: u64,
    /// The response reached the output cap.
    pub cut_by_length: bool,
    /// Reason that a goodput gateway gave for a refusal (`x-goodput-reason`).
    pub gateway_reason: Option<String>,
    /// Error of the connection, where one ended the request.
    pub error: Option<String>,
    /// The load generator itself failed: it had no socket to send with. Makes the run invalid.
    pub client_fault: bool,
}

impl LoadRecord {
    /// Writes the verdict in.
    pub(super) fn judged(&mut self, verdict: &Verdict) {
        let held = |state: Option<ObjectiveState>| match state {
            Some(ObjectiveState::Held) => Some(true),
            Some(ObjectiveState::Broken) => Some(false),
            Some(ObjectiveState::NotEvaluated) | None => None,
        };
        verdict.outcome.as_str().clone_into(&mut self.outcome);
        verdict.outcome.reason().clone_into(&mut self.reason);
        self.ttft_held = held(verdict.ttft);
        self.tpot_held = held(verdict.tpot);
        self.itl_held = held(verdict.itl);
        self.e2e_held = held(verdict.e2e);
    }

    /// Writes the measures of a relayed response.
    pub(super) fn observed(&mut self, timeline: &Timeline) {
        let seconds = |length: Option<Duration>| length.map(|length| length.as_secs_f64());
        self.status = Some(timeline.status);
        if timeline.streamed {
            self.ttft_seconds = seconds(timeline.ttft());
            self.ttfvt_seconds = seconds(timeline.ttfvt());
            self.tpot_seconds = seconds(timeline.tpot());
            self.itl_max_seconds = seconds(timeline.gaps.largest);
        }
        self.e2e_seconds = seconds(timeline.e2e());
        self.stalls = timeline.gaps.stalls;
        self.input_tokens = timeline.usage.input.map(|tokens| tokens.0);
        self.cached_tokens = timeline.usage.cached.map(|tokens| tokens.0);
        self.output_tokens = timeline.output.0;
        timeline.source.as_str().clone_into(&mut self.token_source);
        self.token_events = timeline.token_events;
        self.cut_by_length = timeline.cut_by_length;
    }

    /// Whether it counts in attainment.
    #[must_use]
    pub fn is_judged(&self) -> bool {
        self.outcome != EXCLUDED
    }

    /// Whether it kept every objective.
    #[must_use]
    pub fn is_met(&self) -> bool {
        self.outcome == MET
    }
}

/// Label of [`Outcome::Met`].
const MET: &str = Outcome::Met.as_str();
/// Label of an exclusion.
const EXCLUDED: &str = Outcome::Excluded(Excluded::Unjudged).as_str();

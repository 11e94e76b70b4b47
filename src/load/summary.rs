//! Summary of a sweep: its results together with the whole workload. Pure.
//!
//! One cannot be written without the other, because a goodput without its workload cannot be compared. It
//! contains no prompts and no credentials.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::arrivals::ArrivalProcess;
use super::lengths::LengthModel;
use super::monitor::RunRule;
use super::prompts::PromptCalibration;
use super::sweep::CacheResult;
use super::workload::{Workload, WorkloadClass};
use crate::judge::{NonStreaming, Objective, TtftCounts};

/// Version of the shape of a summary.
pub const FORMAT: &str = "goodput-sweep/1";

/// A sweep, complete or as far as it came.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SweepSummary {
    /// [`FORMAT`].
    pub format: String,
    /// Version of goodput.
    pub version: String,
    /// Name of the sweep: the moment at which it began (UTC).
    pub started: String,
    /// The moment at which it ended.
    pub ended: String,
    /// Whether every run that was planned was made.
    pub complete: bool,
    /// Why not.
    pub ended_by: Option<String>,
    /// Service.
    pub target: TargetSummary,
    /// Replicas and GPUs.
    pub fleet: FleetSummary,
    /// Workload.
    pub workload: WorkloadSummary,
    /// How rates were searched and runs ended.
    pub method: MethodSummary,
    /// Machine of the load generator.
    pub client: ClientSummary,
    /// Results, one for each cache state.
    pub results: Vec<CacheResult>,
}

/// The service that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetSummary {
    /// Address, without credentials.
    pub url: String,
    /// Model.
    pub model: String,
    /// Path.
    pub path: String,
    /// Whether responses were streamed.
    pub stream: bool,
    /// The user's description (`--note`).
    pub note: Option<String>,
}

/// The fleet behind the address.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetSummary {
    /// Replicas.
    pub replicas: u32,
    /// GPUs of a replica.
    pub gpus_per_replica: f64,
}

/// The workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadSummary {
    /// Classes.
    pub classes: Vec<ClassSummary>,
    /// Arrivals.
    pub arrivals: ArrivalProcess,
    /// Whether engines had to continue to the planned length.
    pub ignore_eos: bool,
    /// Longest prompt plus output.
    pub max_context: Option<u64>,
    /// Names of further fields in bodies.
    pub extra_fields: Vec<String>,
    /// How words became tokens.
    pub calibration: PromptCalibration,
    /// Seed of arrivals and lengths.
    pub seed: u64,
}

/// One class: objectives and requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassSummary {
    /// Class.
    pub class: String,
    /// Share of the requests.
    pub share: f64,
    /// Objectives, by name.
    pub objectives: BTreeMap<String, ObjectiveSummary>,
    /// Share of requests that must keep all of them.
    pub joint_attainment_target: f64,
    /// Which token ends TTFT: `first_token` or `first_visible_token`.
    pub ttft_counts: String,
    /// Whether non-streaming responses are judged: `judged` or `excluded`.
    pub non_streaming: String,
    /// Time limits, in seconds.
    pub timeouts_seconds: BTreeMap<String, f64>,
    /// Lengths.
    pub lengths: LengthModel,
}

/// One objective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectiveSummary {
    /// Threshold, in seconds.
    pub threshold_seconds: f64,
    /// Share of requests that should keep it.
    pub attainment: f64,
}

/// How it was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MethodSummary {
    /// Rates: `search` or `fixed`.
    pub rates: String,
    /// Tolerance of the search.
    pub tolerance: Option<f64>,
    /// Runs at each rate.
    pub repetitions: u32,
    /// When a run ended.
    pub rule: RunRule,
    /// Longest drain, in seconds; absent: the classes' time limits.
    pub drain_seconds: Option<f64>,
    /// Allowed send lag: this share of the TTFT threshold at p99.
    pub max_send_lag_share: f64,
}

/// The load generator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClientSummary {
    /// Processors that it could use.
    pub processors: usize,
    /// Operating system and architecture.
    pub platform: String,
}

impl WorkloadSummary {
    /// Of a workload and the seed of its arrivals and lengths.
    #[must_use]
    pub fn of(workload: &Workload, seed: u64) -> Self {
        let total: f64 = workload.classes.iter().map(|class| class.weight).sum();
        WorkloadSummary {
            classes: workload.classes.iter().map(|class| ClassSummary::of(class, total)).collect(),
            arrivals: workload.arrivals.clone(),
            ignore_eos: workload.ignore_eos,
            max_context: workload.max_context,
            extra_fields: workload.extra.keys().cloned().collect(),
            calibration: workload.calibration,
            seed,
        }
    }

    /// Differences from another workload, in words; empty if figures can be compared. Seeds and calibrations
    /// may differ.
    #[must_use]
    pub fn differences(&self, other: &WorkloadSummary) -> Vec<String> {
        let mut found = Vec::new();
        if self.arrivals != other.arrivals {
            found.push("arrivals".to_owned());
        }
        if self.ignore_eos != other.ignore_eos {
            found.push("whether answers go on to the planned length".to_owned());
        }
        if self.max_context != other.max_context {
            found.push("the longest context".to_owned());
        }
        if self.extra_fields != other.extra_fields {
            found.push("further fields of bodies".to_owned());
        }
        let names = |summary: &WorkloadSummary| -> Vec<String> {
            summary.classes.iter().map(|class| class.class.clone()).collect()
        };
        if names(self) != names(other) {
            found.push("the classes".to_owned());
            return found;
        }
        for (ours, theirs) in self.classes.iter().zip(&other.classes) {
            let pairs = [
                (ours.share == theirs.share, "its share"),
                (ours.objectives == theirs.objectives, "objectives"),
                (ours.joint_attainment_target == theirs.joint_attainment_target, "joint target"),
                (ours.ttft_counts == theirs.ttft_counts, "the token that ends TTFT"),
                (ours.timeouts_seconds == theirs.timeouts_seconds, "time limits"),
                (ours.lengths == theirs.lengths, "lengths"),
            ];
            let unlike = pairs.into_iter().filter(|(is_same, _)| !is_same);
            found.extend(unlike.map(|(_, what)| format!("{what} of class {}", ours.class)));
        }
        found
    }
}

impl ClassSummary {
    fn of(class: &WorkloadClass, total: f64) -> Self {
        let objectives = &class.load.objectives;
        let named =
            [("ttft", objectives.ttft), ("tpot", objectives.tpot), ("itl", objectives.itl), ("e2e", objectives.e2e)];
        let summary = |objective: Objective| ObjectiveSummary {
            threshold_seconds: objective.threshold.as_secs_f64(),
            attainment: objective.attainment,
        };
        let timeouts = &class.load.timeouts;
        let limits = [
            ("first_token", timeouts.first_token),
            ("idle", timeouts.idle),
            ("total", timeouts.total),
            ("response_head", timeouts.response_head),
        ];
        ClassSummary {
            class: class.load.id.to_string(),
            share: class.weight / total,
            objectives: named
                .into_iter()
                .filter_map(|(name, objective)| Some((name.to_owned(), summary(objective?))))
                .collect(),
            joint_attainment_target: objectives.joint_target,
            ttft_counts: match objectives.ttft_counts {
                TtftCounts::FirstToken => "first_token",
                TtftCounts::FirstVisibleToken => "first_visible_token",
            }
            .to_owned(),
            non_streaming: match objectives.non_streaming {
                NonStreaming::Judged => "judged",
                NonStreaming::Excluded => "excluded",
            }
            .to_owned(),
            timeouts_seconds: limits.into_iter().map(|(name, limit)| (name.to_owned(), limit.as_secs_f64())).collect(),
            lengths: class.lengths.clone(),
        }
    }
}

//! Result of a replay: the trace, the target and the scores.

use serde::Serialize;

use super::score::ClassReplay;
use crate::trace::TraceNotes;

/// Name and version of the format.
pub const REPLAY_FORMAT: &str = "goodput-replay/1";

/// The trace, and its reshaping.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayTraceSummary {
    /// Its file.
    pub file: String,
    /// Its format.
    pub format: String,
    /// Start of the window on the trace's clock, in seconds.
    pub from_seconds: f64,
    /// End of the window; absent: the end of the trace.
    pub to_seconds: Option<f64>,
    /// Times as fast.
    pub speed: f64,
    /// Times as many requests.
    pub rate: f64,
    /// Slices in which the rate was changed, in seconds.
    pub slice_seconds: f64,
    /// Requests that the reader passed over, by reason.
    pub passed_over: TraceNotes,
    /// Requests that are longer than a context of the engines, and were left out.
    pub too_long: u64,
    /// Requests whose class is not in the settings; they were replayed as the default class.
    pub unknown_class: u64,
    /// Requests of a model that no route of their class serves; they took the class's first route.
    pub unknown_model: u64,
}

/// One pool of a simulated fleet.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FleetPoolSummary {
    /// Pool.
    pub pool: String,
    /// Engines.
    pub engines: usize,
    /// Requests whose last attempt went to one of them.
    pub requests: u64,
    /// Of these, requests whose route names another pool first.
    pub from_earlier_pools: u64,
    /// Share of prompt tokens that prefix caches held.
    pub hit_share: f64,
    /// Preempted requests.
    pub preemptions: u64,
}

/// Target of the replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ReplayTarget {
    /// A service.
    Service {
        /// Address, without credentials.
        url: String,
        /// Model.
        model: String,
        /// 99th percentile of the client's own lateness, in seconds.
        send_lag_p99_seconds: f64,
        /// Requests of tenants without a key of their own, where `--tenant-keys` is given.
        tenants_without_key: u64,
        /// Reasons why the run is invalid; empty if it is valid.
        problems: Vec<String>,
    },
    /// A simulated fleet.
    Simulated {
        /// Pools.
        pools: Vec<FleetPoolSummary>,
        /// Most requests at one time, waiting ones included.
        most_open: usize,
        /// File of the engines' properties; absent: the defaults.
        engine: Option<String>,
        /// Seconds that it took to simulate.
        took_seconds: f64,
    },
}

/// The whole of a replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReplayResult {
    /// [`REPLAY_FORMAT`].
    pub format: &'static str,
    /// Version of this program.
    pub version: &'static str,
    /// The trace.
    pub trace: ReplayTraceSummary,
    /// Target of the replay.
    pub target: ReplayTarget,
    /// Whether the whole trace was replayed.
    pub complete: bool,
    /// Why not.
    pub ended_by: Option<String>,
    /// Whether the whole trace was replayed, can be believed, and every class reached its target.
    pub passes: bool,
    /// From the start to the last arrival, in seconds.
    pub seconds: f64,
    /// Engines that were lost and came back, as they were asked for.
    pub losses: Vec<String>,
    /// Classes that had requests.
    pub classes: Vec<ClassReplay>,
}

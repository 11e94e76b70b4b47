//! Status of pools and engines, for metrics, `/readyz` and the status page.

use std::time::Duration;

use super::latency::PredictionErrors;
use crate::types::{EngineId, PoolId, Tick, Tokens};

/// One pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolView {
    /// Its name.
    pub pool: PoolId,
    /// Its engines by name, including those removed in the last ten minutes.
    pub engines: Vec<EngineView>,
    /// Whether the current settings name it.
    pub is_named: bool,
}

impl PoolView {
    /// Whether any engine takes requests.
    #[cfg(test)]
    pub(super) fn is_available(&self) -> bool {
        self.engines.iter().any(EngineView::takes_requests)
    }
}

/// One engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineView {
    /// Its name.
    pub engine: EngineId,
    /// Its current state.
    pub state: EngineState,
    /// An operator has drained it: it takes no new request, whatever its state.
    pub is_drained: bool,
    /// How long it stays drained, where that has an end.
    pub drained_for: Option<Duration>,
    /// When it was removed, if it was.
    pub left: Option<Tick>,
    /// This gateway's requests at it.
    pub requests: u32,
    /// Their outstanding tokens.
    pub work: Tokens,
    /// Requests waiting in it, by a recent report.
    pub waiting: Option<f64>,
    /// Requests running in the engine, by its report.
    pub running: Option<f64>,
    /// Requests of other gateways at it, if any reports.
    pub elsewhere: Option<f64>,
    /// Used share of its KV cache, by its report.
    pub kv_usage: Option<f64>,
    /// Most concurrent requests of this gateway; `None` means unlimited.
    pub seats: Option<u32>,
    /// Recent errors of latency predictions.
    pub errors: PredictionErrors,
    /// Whether injection was switched off because it rejected one.
    pub injection_refused: bool,
}

impl EngineView {
    /// Whether requests go there.
    #[must_use]
    pub const fn takes_requests(&self) -> bool {
        !self.is_drained && self.state.takes_requests()
    }
}

/// Why an engine could not be drained or put back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DrainError {
    /// The settings name no such pool.
    #[error("no pool has this name")]
    UnknownPool,
    /// The pool has no such engine.
    #[error("the pool has no such engine")]
    UnknownEngine,
    /// No other engine of the pool takes requests.
    #[error("no other engine of the pool takes requests")]
    LastEngine,
}

/// State of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Takes requests.
    Up,
    /// Cooling down: takes requests if no other can.
    Cooling,
    /// Its breaker is open, or a trial is in flight.
    BreakerOpen,
    /// Out by its health checks.
    Down,
    /// A vLLM that was put to sleep.
    Asleep,
    /// Removed from the pool; finishes its requests.
    Left,
}

impl EngineState {
    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            EngineState::Up => "up",
            EngineState::Cooling => "cooling",
            EngineState::BreakerOpen => "breaker_open",
            EngineState::Down => "down",
            EngineState::Asleep => "asleep",
            EngineState::Left => "left",
        }
    }

    /// Whether it takes requests.
    #[must_use]
    pub const fn takes_requests(self) -> bool {
        matches!(self, EngineState::Up | EngineState::Cooling)
    }
}

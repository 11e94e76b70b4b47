//! What there is to show of pools and engines: metrics, `/readyz`, the status page.

use std::time::Duration;

use super::latency::Errors;
use crate::units::{EngineId, PoolId, Tick, Tokens};

/// One pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolView {
    /// Its name.
    pub pool: PoolId,
    /// Its engines, by name, those included that left in the last ten minutes.
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
    /// What it does now.
    pub state: EngineState,
    /// An operator has drained it: it takes no new request, whatever its state.
    pub is_drained: bool,
    /// How long it stays drained, where that has an end.
    pub drained_for: Option<Duration>,
    /// When it left the pool, if it did.
    pub left: Option<Tick>,
    /// Our requests that it has.
    pub requests: u32,
    /// Their outstanding tokens.
    pub work: Tokens,
    /// Requests in its queue, by a report that is not old.
    pub waiting: Option<f64>,
    /// Requests in its batch, likewise.
    pub running: Option<f64>,
    /// Share of its KV cache in use, likewise.
    pub kv_usage: Option<f64>,
    /// Of our requests it should have so many at one time at most; `None`: there is no limit.
    pub seats: Option<u32>,
    /// How far predictions of its latency were off lately.
    pub errors: Errors,
    /// Whether injections were switched off because it refused one.
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

/// What an engine does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Takes requests.
    Up,
    /// Pushed back a moment ago: takes requests when no other does.
    Cooling,
    /// Its breaker is open, or one request tries.
    BreakerOpen,
    /// Its health checks say so.
    Down,
    /// A vLLM that was put to sleep.
    Asleep,
    /// No longer of the pool; finishes what it has.
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

    /// Whether requests may go there.
    #[must_use]
    pub const fn takes_requests(self) -> bool {
        matches!(self, EngineState::Up | EngineState::Cooling)
    }
}

//! Inputs of the choice of an engine: a request's work, targets and affinity.

use std::time::Duration;

use super::latency::SloTargets;
use crate::types::Tokens;

/// Estimated work of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkEstimate {
    /// Prompt tokens.
    pub prefill: Tokens,
    /// Output tokens of all choices.
    pub decode: Tokens,
}

impl WorkEstimate {
    /// Largest work counted, whatever a client states, because one absurd cap would make all other requests
    /// negligible.
    const LONGEST: Tokens = Tokens(1 << 20);

    pub(super) fn believable(self) -> WorkEstimate {
        WorkEstimate {
            prefill: self.prefill.min(WorkEstimate::LONGEST),
            decode: self.decode.min(WorkEstimate::LONGEST),
        }
    }
}

/// Requirements of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PickRequest {
    /// Its work.
    pub size: WorkEstimate,
    /// Its latency targets.
    pub targets: SloTargets,
    /// Its E2E target, if judged.
    pub whole: Option<Duration>,
    /// Time since its arrival.
    pub spent: Duration,
    /// Affinity key: equal keys go to the same engine while its load allows; 0 means none.
    pub key: u64,
}

impl From<WorkEstimate> for PickRequest {
    /// This work, without targets.
    fn from(size: WorkEstimate) -> Self {
        PickRequest { size, ..PickRequest::default() }
    }
}

//! Consequences of an event for the simulated engines, and the state of a request at one of them.

use std::num::NonZeroU32;

use super::routed_request::PriorAttempts;
use crate::admit::limit::LocalReservation;
use crate::admit::queue::{QueueReport, Ticket};
use crate::route::{EngineShare, WorkGuard};
use crate::types::Tick;

/// A request to be dispatched.
pub(super) struct DispatchedRequest {
    pub visit: usize,
    pub engine: usize,
    pub hold: EngineHold,
}

/// What a request holds while an engine has it.
#[derive(Default)]
pub(super) struct EngineHold {
    pub ticket: Option<Ticket>,
    pub work: Option<Box<WorkGuard>>,
    pub reservation: Option<LocalReservation>,
    pub dispatched: Tick,
    /// When the first token was expected.
    pub expected: Option<Tick>,
    /// Bytes of its prompt, if they say something about its tokens.
    pub bytes: Option<u64>,
    /// State for a further attempt.
    pub tried: Option<Box<PriorAttempts>>,
    /// For peers: the grade of its class.
    pub grade: usize,
    /// For peers: further attempts.
    pub attempts: u32,
    /// Whether it is served beyond its tenant's limits.
    pub over_limit: bool,
    /// Index of its pool.
    pub desk: usize,
    /// Whether that is not the first one of its route.
    pub went_on: bool,
}

impl EngineHold {
    /// What a peer's request holds.
    pub fn of_peer(grade: usize, dispatched: Tick) -> EngineHold {
        EngineHold { grade, dispatched, ..EngineHold::default() }
    }
}

/// Consequences of an event: requests to dispatch, requests to reject.
#[derive(Default)]
pub(super) struct Effects {
    pub go: Vec<DispatchedRequest>,
    pub refused: Vec<usize>,
    /// Requests beyond the limits of a tenant that is not demoted.
    pub over_limit: Vec<usize>,
    /// Requests for which no engine was found.
    pub lost: Vec<usize>,
    /// Requests whose prompts are estimated to be prefilled.
    pub read: Vec<usize>,
}

/// One of the gateways that share the engines.
#[derive(Clone, Copy)]
pub(super) struct GatewayReplica {
    pub number: usize,
    pub of: NonZeroU32,
}

/// The report of one gateway on a pool.
#[derive(Clone)]
pub(super) struct GatewayNews {
    pub queue: QueueReport,
    pub engines: Vec<EngineShare>,
}

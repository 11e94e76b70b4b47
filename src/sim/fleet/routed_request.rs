//! A request on its route through the pools of a simulated gateway.

use std::time::Duration;

use crate::admit::limit::LocalReservation;
use crate::admit::queue::QueueRequest;
use crate::route::retry::Attempts;
use crate::route::{PickRequest, SloTargets, WorkEstimate};
use crate::types::Tick;

/// A request that no engine has yet.
pub(super) struct RoutedRequest {
    pub visit: usize,
    pub entry: QueueRequest,
    pub reservation: Option<LocalReservation>,
    /// Indices of the pools of its route, in order.
    pub route: Vec<usize>,
    /// Its place in the route.
    pub place: usize,
    /// Since when it waits there.
    pub since: Tick,
    pub bytes: Option<u64>,
    pub size: WorkEstimate,
    pub blocks: Vec<u64>,
    pub targets: SloTargets,
    pub promised_whole: Option<Duration>,
    pub streams: bool,
    /// Attempts in earlier pools.
    pub attempts: Option<Attempts>,
}

impl RoutedRequest {
    /// Whether its route has a later pool.
    pub fn has_further(&self) -> bool {
        self.place + 1 < self.route.len()
    }

    /// Index of its pool.
    pub fn desk(&self) -> usize {
        self.route[self.place]
    }

    /// Whether engines were tried and none could be connected to.
    pub fn is_unheard(&self) -> bool {
        self.attempts.as_ref().is_some_and(Attempts::is_unheard)
    }

    /// Whether an engine has failed it.
    pub fn was_tried(&self) -> bool {
        self.attempts.as_ref().is_some_and(|attempts| attempts.count() > 0)
    }
}

/// A request's attempts so far.
pub(super) struct PriorAttempts {
    pub attempts: Attempts,
    pub pick: PickRequest,
    /// The request, if its route has a later pool.
    pub request: Option<Box<RoutedRequest>>,
}

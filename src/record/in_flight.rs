//! Requests in flight, as seen by a scrape.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::judge::{Progress, ProgressCell};
use crate::types::{ClassId, ClientState, PoolId, Tick};

use super::request_policy::RequestPolicy;

/// A request in flight, as seen by a scrape.
#[derive(Debug)]
pub(super) struct InFlightRequest {
    slot: usize,
    pub(super) progress_cell: ProgressCell,
    pub(super) standing: Mutex<InFlightStatus>,
}

/// Its current state.
#[derive(Debug, Default)]
pub(super) struct InFlightStatus {
    pub(super) promise: Option<RequestPolicy>,
    pub(super) pool: Option<PoolId>,
    pub(super) waits: bool,
}

/// Its position: class, pool, queue.
#[derive(Debug)]
pub(super) struct InFlightSnapshot {
    pub(super) class: Option<ClassId>,
    pub(super) pool: Option<PoolId>,
    pub(super) waits: bool,
    pub(super) is_overdue: bool,
}

impl InFlightRequest {
    fn place(&self, at: Tick) -> InFlightSnapshot {
        let standing = self.standing.lock();
        let promise = standing.promise.as_ref();
        let overdue = |promise: &RequestPolicy| {
            let waiting = Progress::waiting(promise.start, true, promise.streamed);
            let RequestPolicy { objectives, case, choices, .. } = promise;
            self.progress_cell.is_overdue(&waiting, objectives, case, *choices, at)
        };
        InFlightSnapshot {
            class: promise.map(|promise| promise.class.clone()),
            pool: standing.pool.clone(),
            waits: standing.waits,
            is_overdue: promise.is_some_and(overdue),
        }
    }
}

/// All requests in flight. Locked briefly at each arrival and end only.
#[derive(Debug, Default)]
pub(super) struct InFlightRegistry(Mutex<InFlightSlots>);

#[derive(Debug, Default)]
struct InFlightSlots {
    visits: Vec<Option<Arc<InFlightRequest>>>,
    free: Vec<usize>,
}

impl InFlightRegistry {
    pub(super) fn add(&self, client: ClientState) -> Arc<InFlightRequest> {
        let mut slots = self.0.lock();
        let slot = slots.free.pop().unwrap_or(slots.visits.len());
        let open = Arc::new(InFlightRequest {
            slot,
            progress_cell: ProgressCell::set_client(client),
            standing: Mutex::default(),
        });
        match slots.visits.get_mut(slot) {
            Some(empty) => *empty = Some(open.clone()),
            None => slots.visits.push(Some(open.clone())),
        }
        open
    }

    /// Removes a request; `true` if it was the last one.
    pub(super) fn remove(&self, open: &InFlightRequest) -> bool {
        let mut slots = self.0.lock();
        slots.visits[open.slot] = None;
        slots.free.push(open.slot);
        slots.free.len() == slots.visits.len()
    }

    pub(super) fn count(&self) -> usize {
        let slots = self.0.lock();
        slots.visits.len() - slots.free.len()
    }

    pub(super) fn places(&self, at: Tick) -> Vec<InFlightSnapshot> {
        let open: Vec<Arc<InFlightRequest>> = self.0.lock().visits.iter().flatten().cloned().collect();
        open.iter().map(|open| open.place(at)).collect()
    }
}

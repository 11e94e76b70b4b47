//! The waiting requests of one priority: feasible ones, infeasible ones behind them, and the number of
//! places per tenant.

use std::collections::{BTreeSet, HashMap};

use super::fair_queue::{FairQueue, QueuePosition};
use super::request::{QueueKey, Ticket};
use crate::types::TenantId;

/// One of a band's two queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feasibility {
    /// Feasible, without a deadline, or keeping their position in any case.
    Feasible,
    /// Demoted.
    Late,
}

#[derive(Debug)]
pub(super) struct PriorityBand {
    hopeful: FairQueue,
    late: FairQueue,
    /// Waiting requests per tenant.
    held: HashMap<TenantId, usize>,
    /// The same, sorted by number.
    crowd: BTreeSet<(usize, TenantId)>,
    len: usize,
    /// Of these the demoted ones.
    stepped_behind: usize,
    /// Thousandths of tokens that the priority is entitled to and has not had.
    pub credit: u64,
    /// Number of the last admission from this band.
    pub last_turn: u64,
}

impl PriorityBand {
    pub fn new(quantum: u64) -> Self {
        PriorityBand {
            hopeful: FairQueue::new(quantum),
            late: FairQueue::new(quantum),
            held: HashMap::new(),
            crowd: BTreeSet::new(),
            len: 0,
            stepped_behind: 0,
            credit: 0,
            last_turn: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Number of infeasible requests.
    pub fn late(&self) -> usize {
        self.stepped_behind
    }

    /// The next request of this band.
    pub fn first(&self) -> Option<QueuePosition> {
        self.hopeful.first().or_else(|| self.late.first())
    }

    /// Its requests in order, see [`FairQueue::in_order`].
    pub fn in_order(&self) -> impl Iterator<Item = QueuePosition> + '_ {
        self.hopeful.in_order().chain(self.late.in_order())
    }

    /// The tenant's last request with this key, in either queue.
    pub fn last_due(&self, tenant: &TenantId, due: QueueKey) -> Option<Ticket> {
        self.hopeful.last_due(tenant, due).max(self.late.last_due(tenant, due))
    }

    pub fn insert(&mut self, line: Feasibility, tenant: &TenantId, place: QueuePosition) {
        self.line(line).insert(tenant, place);
        self.count(tenant, |held| held + 1);
        self.len += 1;
        self.stepped_behind += usize::from(line == Feasibility::Late);
    }

    /// Removes a request; `charge` as in [`FairQueue::remove`]. An empty band loses its
    /// entitlement.
    pub fn remove(&mut self, line: Feasibility, tenant: &TenantId, place: QueuePosition, charge: u64) {
        self.line(line).remove(tenant, place, charge);
        self.count(tenant, |held| held - 1);
        self.len -= 1;
        self.stepped_behind -= usize::from(line == Feasibility::Late);
        if self.len == 0 {
            self.credit = 0;
        }
    }

    /// Demotes a request.
    pub fn demote(&mut self, tenant: &TenantId, place: QueuePosition) {
        self.hopeful.remove(tenant, place, 0);
        self.late.insert(tenant, place);
        self.stepped_behind += 1;
    }

    pub fn correct(&mut self, line: Feasibility, tenant: &TenantId, charged: u64, used: u64) {
        self.line(line).correct(tenant, charged, used);
    }

    pub fn set_quantum(&mut self, quantum: u64) {
        self.hopeful.set_quantum(quantum);
        self.late.set_quantum(quantum);
    }

    /// The request to evict: of the tenant with the most places, the one that would be served
    /// last.
    pub fn last_of_the_crowd(&self) -> Option<Ticket> {
        let (_, tenant) = self.crowd.last()?;
        self.late.last_of(tenant).or_else(|| self.hopeful.last_of(tenant)).map(|place| place.ticket)
    }

    /// Whether some tenant would hold at least as many places as this one after giving it one.
    pub fn is_crowded_for(&self, tenant: &TenantId) -> bool {
        let held = self.held.get(tenant).copied().unwrap_or(0);
        self.crowd.last().is_some_and(|(most, _)| *most > held + 1)
    }

    fn line(&mut self, line: Feasibility) -> &mut FairQueue {
        match line {
            Feasibility::Feasible => &mut self.hopeful,
            Feasibility::Late => &mut self.late,
        }
    }

    fn count(&mut self, tenant: &TenantId, change: impl FnOnce(usize) -> usize) {
        let held = self.held.remove(tenant).unwrap_or(0);
        self.crowd.remove(&(held, tenant.clone()));
        let now = change(held);
        if now > 0 {
            self.held.insert(tenant.clone(), now);
            self.crowd.insert((now, tenant.clone()));
        }
    }
}

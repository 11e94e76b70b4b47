//! A fair queue: the smallest key among the tenants that were served least.
//!
//! Each tenant has a count of served tokens. A tenant that starts to wait is raised to the `floor`, the
//! count of the least-served waiting tenant, so that no tenant accumulates credit while absent, and unused
//! capacity is not held against a tenant that used it. The floor therefore never falls, a tenant stops
//! being eligible only by being served, and every operation is amortised O(log n).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound::{Excluded, Unbounded};

use super::request::{QueueKey, Ticket};
use crate::types::TenantId;

/// A position in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueuePosition {
    pub due: QueueKey,
    pub ticket: Ticket,
}

#[derive(Debug)]
pub(super) struct FairQueue {
    quantum: u64,
    floor: u64,
    /// Waiting tenants, and others with a count above the floor.
    members: HashMap<TenantId, TenantEntry>,
    /// First request of each waiting tenant within a quantum of the floor.
    eligible: BTreeMap<QueuePosition, TenantId>,
    /// Waiting tenants beyond that.
    ahead: BTreeSet<(u64, TenantId)>,
    /// All waiting tenants.
    waiting: BTreeSet<(u64, TenantId)>,
    /// Tenants that do not wait.
    idle: BTreeSet<(u64, TenantId)>,
}

#[derive(Debug)]
struct TenantEntry {
    served: u64,
    places: BTreeSet<QueuePosition>,
}

impl FairQueue {
    pub fn new(quantum: u64) -> Self {
        FairQueue {
            quantum,
            floor: 0,
            members: HashMap::new(),
            eligible: BTreeMap::new(),
            ahead: BTreeSet::new(),
            waiting: BTreeSet::new(),
            idle: BTreeSet::new(),
        }
    }

    /// The next request.
    pub fn first(&self) -> Option<QueuePosition> {
        self.eligible.first_key_value().map(|(place, _)| *place)
    }

    /// Requests by key, those of tenants served more than a quantum beyond the floor last. O(log n) for each one taken.
    pub fn in_order(&self) -> impl Iterator<Item = QueuePosition> + '_ {
        let mut firsts = self.eligible.iter().peekable();
        // The next request of each tenant of which one was taken.
        let mut nexts: BTreeMap<QueuePosition, &TenantId> = BTreeMap::new();
        let eligible = std::iter::from_fn(move || {
            let next = nexts.first_key_value().map(|(place, _)| *place);
            let first = firsts.next_if(|(first, _)| next.is_none_or(|next| **first < next));
            let (place, tenant) = first.map(|(place, tenant)| (*place, tenant)).or_else(|| nexts.pop_first())?;
            let places = self.members.get(tenant).map(|member| &member.places);
            let behind = places.and_then(|places| places.range((Excluded(place), Unbounded)).next());
            nexts.extend(behind.map(|behind| (*behind, tenant)));
            Some(place)
        });
        let ahead = self.ahead.iter().filter_map(|(_, tenant)| self.members.get(tenant));
        eligible.chain(ahead.flat_map(|member| member.places.iter().copied()))
    }

    /// The tenant's last request.
    pub fn last_of(&self, tenant: &TenantId) -> Option<QueuePosition> {
        self.members.get(tenant).and_then(|member| member.places.last().copied())
    }

    /// The tenant's last request with this key.
    pub fn last_due(&self, tenant: &TenantId, due: QueueKey) -> Option<Ticket> {
        let end = QueuePosition { due, ticket: Ticket(u64::MAX) };
        let before = self.members.get(tenant)?.places.range(..=end).next_back()?;
        (before.due == due).then_some(before.ticket)
    }

    pub fn insert(&mut self, tenant: &TenantId, place: QueuePosition) {
        self.change(tenant, |member| {
            member.places.insert(place);
        });
    }

    /// Removes a request; `charge` is its cost if it is served, else zero.
    pub fn remove(&mut self, tenant: &TenantId, place: QueuePosition, charge: u64) {
        self.change(tenant, |member| {
            member.places.remove(&place);
            member.served = member.served.saturating_add(charge);
        });
    }

    /// Corrects the cost of an earlier request. A refund does not move its tenant ahead of the least-served
    /// ones.
    pub fn correct(&mut self, tenant: &TenantId, charged: u64, used: u64) {
        if charged != used {
            self.change(tenant, |member| member.served = member.served.saturating_add(used).saturating_sub(charged));
        }
    }

    pub fn set_quantum(&mut self, quantum: u64) {
        self.quantum = quantum;
        self.eligible.clear();
        self.ahead.clone_from(&self.waiting);
        self.raise_floor();
    }

    fn change(&mut self, tenant: &TenantId, how: impl FnOnce(&mut TenantEntry)) {
        let mut member = match self.members.remove(tenant) {
            Some(member) => self.unlink(tenant, member),
            None => TenantEntry { served: self.floor, places: BTreeSet::new() },
        };
        how(&mut member);
        member.served = member.served.max(self.floor);
        self.link(tenant, member);
        self.raise_floor();
    }

    fn unlink(&mut self, tenant: &TenantId, member: TenantEntry) -> TenantEntry {
        let key = (member.served, tenant.clone());
        match member.places.first() {
            None => drop(self.idle.remove(&key)),
            Some(first) => {
                if self.eligible.remove(first).is_none() {
                    self.ahead.remove(&key);
                }
                self.waiting.remove(&key);
            }
        }
        member
    }

    fn link(&mut self, tenant: &TenantId, member: TenantEntry) {
        let key = (member.served, tenant.clone());
        match member.places.first() {
            None if member.served <= self.floor => return,
            None => drop(self.idle.insert(key)),
            Some(first) => {
                if member.served <= self.floor.saturating_add(self.quantum) {
                    self.eligible.insert(*first, tenant.clone());
                } else {
                    self.ahead.insert(key.clone());
                }
                self.waiting.insert(key);
            }
        }
        self.members.insert(tenant.clone(), member);
    }

    /// Raises the floor to the least-served waiting tenant; tenants it reaches become eligible, or are
    /// removed.
    fn raise_floor(&mut self) {
        let Some((least, _)) = self.waiting.first() else { return };
        self.floor = *least;
        let reach = self.floor.saturating_add(self.quantum);
        while let Some((_, tenant)) = pop_up_to(&mut self.ahead, reach) {
            let first = self.members.get(&tenant).and_then(|member| member.places.first());
            if let Some(first) = first {
                self.eligible.insert(*first, tenant);
            }
        }
        while let Some((_, tenant)) = pop_up_to(&mut self.idle, self.floor) {
            self.members.remove(&tenant);
        }
    }
}

fn pop_up_to(set: &mut BTreeSet<(u64, TenantId)>, most: u64) -> Option<(u64, TenantId)> {
    if set.first()?.0 <= most { set.pop_first() } else { None }
}

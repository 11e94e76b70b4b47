//! An admitted request as seen by attempts, and the parts of the gateway that attempts need.

use std::borrow::Cow;
use std::sync::Arc;

use super::request::RequestContext;
use super::seat::PoolCursor;
use super::snapshot::PoolHandle;
use crate::clock::{Alarms, Clock};
use crate::forward::conn_pool::ConnPool;
use crate::forward::deadlines::Deadlines;
use crate::forward::headers::{self, EngineHeaders};
use crate::judge::{NonStreaming, Objective, Objectives, ProgressCell};
use crate::route::settings::{Balance, PoolSettings};
use crate::route::{self, Fleet, PickRequest, SloTargets};
use crate::types::Tick;

/// An admitted request: its context, and what stays the same over its attempts.
pub struct UpstreamRequest<'a> {
    /// The request.
    pub context: &'a RequestContext<'a>,
    /// Its position along the route; `None` if no pool has seats.
    pub cursor: Option<&'a PoolCursor<'a>>,
    /// Index of the pool that admitted it.
    pub first: usize,
    /// The current moment, if nothing was awaited since it was read.
    pub begins: Option<Tick>,
    /// The unique id sent to engines.
    pub upstream_id: Cow<'a, [u8]>,
    /// Its `priority`, for engines that schedule by it.
    pub engine_priority: i64,
    /// Receives token events.
    pub progress_cell: ProgressCell,
}

/// The parts of the gateway that attempts need.
pub struct Upstreams<'a> {
    /// The clock.
    pub clock: Clock,
    /// Its timers.
    pub alarms: &'a Arc<Alarms>,
    /// All engines.
    pub fleet: &'a Arc<Fleet>,
    /// Their connections.
    pub lines: &'a Arc<ConnPool>,
}

impl UpstreamRequest<'_> {
    /// Whether the client already has its head, because it waited longer than heads are held.
    pub(super) fn has_head(&self) -> bool {
        self.cursor.is_some_and(PoolCursor::has_head)
    }

    /// Its requirements of an engine of this pool.
    pub(super) fn pick(&self, pool: &PoolSettings, at: Tick) -> PickRequest {
        let Objectives { ttft, tpot, e2e, .. } = &*self.context.policy.objectives;
        let threshold = |objective: &Option<Objective>| objective.map(|objective| objective.threshold);
        let targets = match self.context.streams() {
            true => SloTargets { ttft: threshold(ttft), tpot: threshold(tpot), e2e: threshold(e2e) },
            false => SloTargets {
                e2e: self.context.policy.objectives.whole_budget(self.context.size.decode.0),
                ..SloTargets::NONE
            },
        };
        let objectives = &self.context.policy.objectives;
        let is_judged = self.context.streams() || objectives.non_streaming == NonStreaming::Judged;
        let whole = threshold(e2e).filter(|_| is_judged);
        let key = match &pool.balance {
            Balance::LeastWork | Balance::RoundRobin => 0,
            Balance::PrefixAffinity => self.context.facts().prefix_hash,
            Balance::SessionAffinity { header } => {
                self.context.arrived.head.headers.get(header).map_or(0, |session| route::key_of(session.as_bytes()))
            }
        };
        PickRequest { size: self.context.size, targets, whole, spent: at - self.context.start, key }
    }

    /// All limits run over all attempts, from the moment from which the objectives do: what the client
    /// let the gateway wait must not be an engine's miss. The head is held from arrival.
    pub(super) fn deadlines(&self) -> Deadlines {
        let limits = &self.context.policy.class.timeouts;
        let head = if self.context.streams() { limits.first_token } else { limits.response_head };
        Deadlines {
            total: Some(self.context.start + limits.total),
            first_token: Some(self.context.start + head),
            hold: Some(self.context.arrived.arrival + limits.hold_head),
            ..Deadlines::default()
        }
    }

    pub(super) fn forwards_credential(&self, bound: &PoolHandle) -> bool {
        let forward_authorization = bound.settings.forward_authorization;
        let engine = EngineHeaders { fixed: &bound.fixed_headers, forward_authorization };
        headers::forwards_credential(&self.context.arrived.head.headers, &engine)
    }
}

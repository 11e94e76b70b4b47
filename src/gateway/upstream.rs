//! What a request brings to every attempt, and the parts of the gateway that attempts need.

use std::borrow::Cow;
use std::sync::Arc;

use http::uri::PathAndQuery;

use super::admission::PoolCursor;
use super::promise::{ClassPolicy, PoolHandle};
use crate::accept::ParsedHead as Request;
use crate::clock::{Alarms, Clock};
use crate::forward::deadlines::Deadlines;
use crate::forward::headers::{self, EngineHeaders};
use crate::forward::lines::ConnPool;
use crate::inspect::{Facts, ModelRatios};
use crate::judge::{NonStreaming, Objective, Objectives, ProgressCell};
use crate::route::settings::{Balance, Pool};
use crate::route::{self, Aims, Fleet, Routed, Size, TenantKey, Want};
use crate::units::{ClientState, Dialect, Endpoint, RequestId, Tick, Tokens};

/// What one request asks of engines. Everything that stays the same over its attempts.
pub struct UpstreamRequest<'a> {
    /// The class's promise, with the request's own targets.
    pub promise: &'a ClassPolicy,
    /// Where the request may go.
    pub routed: &'a Routed,
    /// Where in its route it has been let in.
    pub first: usize,
    /// The pool in its route where it belongs: what another one, which was asked instead, finds
    /// wrong with it is no word about the client.
    pub home: usize,
    /// Its way along the pools of its route; none where no pool has seats.
    pub walk: Option<&'a PoolCursor<'a>>,
    /// What its body said.
    pub facts: &'a Facts,
    /// Its path.
    pub endpoint: Endpoint,
    /// Its answer is judged.
    pub is_judged: bool,
    /// Path and query, for the engine.
    pub target: &'a PathAndQuery,
    /// Its head, as it came.
    pub head: &'a Request,
    /// Its body, as it came (decoded).
    pub frames: &'a [bytes::Bytes],
    /// The body wore a content coding, which is gone.
    pub was_coded: bool,
    /// No byte of the body may be changed (multipart).
    pub fixed: bool,
    /// The model's name behind an alias.
    pub alias: Option<&'a str>,
    /// Whose request it is, as far as breakers tell tenants apart.
    pub tenant: TenantKey,
    /// Work that it brings, estimated.
    pub size: Size,
    /// The most output tokens that an overload level leaves it.
    pub cap: Option<Tokens>,
    /// An overload level sends it without extended reasoning.
    pub without_reasoning: bool,
    /// Its `priority`, for engines that schedule by it.
    pub engine_priority: i64,
    /// When its head had been parsed.
    pub arrival: Tick,
    /// Where its objectives run from.
    pub start: Tick,
    /// The present moment, where nothing was waited for since it was looked at.
    pub begins: Option<Tick>,
    /// The id that the client knows.
    pub id: &'a RequestId,
    /// The id that engines see: unique.
    pub upstream_id: Cow<'a, [u8]>,
    /// The client's side.
    pub client: &'a ClientState,
    /// What is known of its model.
    pub learned: &'a ModelRatios,
    /// Told of token events.
    pub pulse: ProgressCell,
}

/// The parts of the house that attempts need.
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
    pub(super) fn streams(&self) -> bool {
        self.facts.streams()
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.endpoint.dialect()
    }

    /// The client has its head already: it waited for longer than heads are held.
    pub(super) fn has_head(&self) -> bool {
        self.walk.is_some_and(PoolCursor::has_head)
    }

    /// The model's name as engines know it.
    pub(super) fn model(&self) -> Option<&str> {
        self.alias.or_else(|| self.facts.model.as_ref().map(|field| &*field.value))
    }

    /// What it asks of an engine of this pool.
    pub(super) fn want(&self, pool: &Pool, at: Tick) -> Want {
        let Objectives { ttft, tpot, e2e, .. } = &*self.promise.objectives;
        let threshold = |objective: &Option<Objective>| objective.map(|objective| objective.threshold);
        let aims = match self.streams() {
            true => Aims { ttft: threshold(ttft), tpot: threshold(tpot), e2e: threshold(e2e) },
            false => Aims { e2e: self.promise.objectives.whole_budget(self.size.decode.0), ..Aims::NONE },
        };
        let objectives = &self.promise.objectives;
        let is_judged = self.streams() || objectives.non_streaming == NonStreaming::Judged;
        let whole = threshold(e2e).filter(|_| is_judged);
        let key = match &pool.balance {
            Balance::LeastWork | Balance::RoundRobin => 0,
            Balance::PrefixAffinity => self.facts.prefix_hash,
            Balance::SessionAffinity { header } => {
                self.head.headers.get(header).map_or(0, |session| route::key_of(session.as_bytes()))
            }
        };
        Want { size: self.size, aims, whole, spent: at - self.start, key }
    }

    /// All limits run from arrival, over all attempts.
    pub(super) fn deadlines(&self) -> Deadlines {
        let limits = &self.promise.class.timeouts;
        let head = if self.streams() { limits.first_token } else { limits.response_head };
        Deadlines {
            total: Some(self.arrival + limits.total),
            first_token: Some(self.arrival + head),
            hold: Some(self.arrival + limits.hold_head),
            ..Deadlines::default()
        }
    }

    pub(super) fn forwards_credential(&self, bound: &PoolHandle) -> bool {
        let forward_authorization = bound.settings.forward_authorization;
        let engine = EngineHeaders { fixed: &bound.fixed_headers, forward_authorization, host: None };
        headers::forwards_credential(&self.head.headers, &engine)
    }
}

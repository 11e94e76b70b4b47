//! The tenants' limits shared by several gateways in Redis or Valkey.
//!
//! The same rules as [`limit`](super::limit) (burst, debt, all limits of a request or none, a true
//! `Retry-After`), with the balances in one place: a Lua script (`script.lua`) maintains them by the
//! server's clock. Costs and guarantees are in `docs/shared-limits.md`.
//!
//! - A request draws from its gateway's **lease** (`lease`): tokens granted by the store and not used yet.
//!   Only if that is not enough the store is called, for the need plus a quarter second of use. One call at
//!   a time is in flight per tenant; requests that come meanwhile wait for it and are served from its
//!   result.
//! - No request waits longer than [`Redis::timeout`](settings::Redis::timeout). Without an answer
//!   [`OnFailure`] applies: a local share of the limit, or a rejection. A breaker (`breaker`) stops calls to
//!   a failing store; trials continue beside the requests.
//! - Uncertainty errs towards the limit: a lease in a call without an answer is not spent again, and a debt
//!   in one is reported again.
//!
//! One task, the [`SyncTask`], makes all calls, so a client that leaves during its call loses nothing. The end
//! of a request only changes local state and never waits: the task checks the tenants in use ten times a
//! second. Its channel carries requests for an earlier check; if it is full, a request that needs the store
//! is served as if the store were unavailable, and an end is found at the next check.

mod breaker;
pub mod connection;
mod counters;
pub mod exchange;
mod exchange_call;
#[cfg(test)]
mod interleavings;
mod lease;
pub mod lua_call;
mod reservation;
pub mod settings;
mod sync_task;
mod tenant_leases;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ahash::RandomState;
use dashmap::DashMap;

use tokio::sync::{mpsc, oneshot};

pub use counters::{CallResult, EDGES, GrantSource, StoreStats};
pub use reservation::RedisReservation;
pub use sync_task::SyncTask;

use super::limit::settings::{Allowance, Limits, Rate};
use super::limit::{LimitExceeded, LimitStatus, LocalLimiter, Output, Wanted};
use crate::clock::Clock;
use crate::sync::Mutex;
use crate::types::{TenantId, Tick};
use counters::StoreCounters;
use exchange::{ExchangeCounters, GatewayExchange};
use settings::{OnFailure, Redis};
use tenant_leases::{DrawResult, LeaseRequest, TenantLeases};

/// Capacity of the task's channel.
const MOST_COMMANDS: usize = 1024;

/// Most requests of one tenant that wait for the store.
const WAITING: usize = 4096;

/// Why a request may not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// A limit is exhausted.
    #[error(transparent)]
    Exhausted(#[from] LimitExceeded),
    /// The store is unavailable, and the settings say `closed`.
    #[error("limits store unavailable")]
    Unavailable,
}

/// The limits of all tenants in a store. Outlives reloads. Clones share one state.
#[derive(Clone, Debug)]
pub struct RedisLimiter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    clock: Clock,
    settings: Redis,
    /// This gateway's random name in the store.
    gateway: Arc<str>,
    tenants: DashMap<TenantId, Arc<SharedTenant>, RandomState>,
    /// Requests of this gateway against its share of the limits.
    share: LocalLimiter,
    replicas: AtomicU32,
    commands: mpsc::Sender<SyncCommand>,
    counters: StoreCounters,
    exchange: Arc<ExchangeCounters>,
    /// Makes the common random number, if no gateway has made one.
    seed: u64,
}

/// One tenant, as the task sees it.
#[derive(Debug)]
struct SharedTenant {
    id: TenantId,
    state: Mutex<TenantState>,
}

#[derive(Debug)]
struct TenantState {
    tenant_leases: TenantLeases,
    waiting: VecDeque<PendingReservation>,
    /// A call is in flight.
    calling: bool,
    /// The tenant is on the task's list.
    listed: bool,
    /// Until when the store is not called for this tenant, because its stored state was unusable.
    degraded_until: Tick,
}

/// A request that waits for the store.
#[derive(Debug)]
struct PendingReservation {
    want: LeaseRequest,
    tell: oneshot::Sender<Result<RedisReservation, LimitExceeded>>,
}

/// A message to the task.
#[derive(Debug)]
enum SyncCommand {
    /// Check this tenant.
    Check(Arc<SharedTenant>),
    /// Return all leases and end.
    Release(oneshot::Sender<()>),
}

impl RedisLimiter {
    /// A store and its task. Connects only when the task runs. `seed` makes this gateway's name in the store,
    /// so it must differ between gateways.
    #[must_use]
    pub fn new(settings: Redis, clock: Clock, seed: u64) -> (Self, SyncTask) {
        let (commands, heard) = mpsc::channel(MOST_COMMANDS);
        let inner = Arc::new(Inner {
            clock,
            settings,
            gateway: format!("{seed:016x}").into(),
            tenants: DashMap::default(),
            share: LocalLimiter::new(),
            replicas: AtomicU32::new(1),
            commands,
            counters: StoreCounters::default(),
            exchange: Arc::default(),
            seed,
        });
        (RedisLimiter(Arc::clone(&inner)), SyncTask::new(inner, heard))
    }

    /// Sets the limits, and how many gateways share them. Spent amounts stay in the store; name every tenant,
    /// as for [`LocalLimiter::reload`].
    pub fn reload(&self, tenants: &BTreeMap<TenantId, Limits>, replicas: u32, at: Tick) {
        let inner = &self.0;
        inner.replicas.store(replicas, Ordering::Relaxed);
        inner.tenants.retain(|tenant, _| tenants.contains_key(tenant));
        for (id, limits) in tenants {
            if let Some(tenant) = inner.tenants.get(id) {
                tenant.state.lock().tenant_leases.change(limits, replicas, at);
                continue;
            }
            let key = format!("{}:limits:{id}", inner.settings.key_prefix).into();
            let tenant_leases = TenantLeases::new(key, Arc::clone(&inner.gateway), limits, replicas, at);
            let state = TenantState {
                tenant_leases,
                waiting: VecDeque::new(),
                calling: false,
                listed: false,
                degraded_until: Tick::ZERO,
            };
            inner.tenants.insert(id.clone(), Arc::new(SharedTenant { id: id.clone(), state: Mutex::new(state) }));
        }
        let shares = tenants.iter().map(|(id, limits)| (id.clone(), share_of(limits, replicas))).collect();
        inner.share.reload(&shares, at);
    }

    /// Reserves what the request needs of every applicable limit, or nothing. Unknown tenants are not limited.
    /// Cancel-safe: if dropped, nothing is taken.
    ///
    /// # Errors
    /// [`Denied`].
    pub async fn reserve(
        &self,
        tenant: &TenantId,
        model: &str,
        wanted: &Wanted,
        at: Tick,
    ) -> Result<RedisReservation, Denied> {
        let Some(tenant) = self.0.tenants.get(tenant).map(|tenant| Arc::clone(&tenant)) else {
            return Ok(RedisReservation::unlimited());
        };
        let heard = {
            let mut state = tenant.state.lock();
            match state.tenant_leases.draw(model, wanted, at) {
                DrawResult::Held(held) => {
                    let is_limited = state.tenant_leases.limits(model);
                    drop(state);
                    if is_limited {
                        self.0.counters.request(GrantSource::Lease);
                    }
                    return Ok(self.0.leased(&tenant, model, wanted, held, at));
                }
                DrawResult::Refused(exhausted) => return Err(exhausted.into()),
                DrawResult::AskStore => self.queue(&tenant, &mut state, model, wanted, at),
            }
        };
        let Some(heard) = heard else { return self.0.without_the_store(&tenant, model, wanted) };
        let deadline = self.0.clock.now() + self.0.settings.timeout;
        tokio::select! {
            biased;
            heard = heard => match heard {
                Ok(answer) => Ok(answer?),
                Err(_) => self.0.without_the_store(&tenant, model, wanted),
            },
            () = self.0.clock.sleep_until(Some(deadline)) => self.0.without_the_store(&tenant, model, wanted),
        }
    }

    /// Queues a request for the store; `None` if the store is unavailable.
    fn queue(
        &self,
        tenant: &Arc<SharedTenant>,
        state: &mut TenantState,
        model: &str,
        wanted: &Wanted,
        at: Tick,
    ) -> Option<oneshot::Receiver<Result<RedisReservation, LimitExceeded>>> {
        if !self.0.counters.is_up() || at < state.degraded_until || state.waiting.len() >= WAITING {
            return None;
        }
        if !state.calling && state.waiting.is_empty() {
            self.0.commands.try_send(SyncCommand::Check(Arc::clone(tenant))).ok()?;
        }
        let (tell, heard) = oneshot::channel();
        state
            .waiting
            .push_back(PendingReservation { want: LeaseRequest { model: model.into(), wanted: *wanted }, tell });
        Some(heard)
    }

    /// Number of a tenant's limited requests running here.
    #[must_use]
    pub fn running(&self, tenant: &TenantId) -> u64 {
        self.0.tenants.get(tenant).map_or(0, |tenant| tenant.state.lock().tenant_leases.running())
    }

    /// Status of a tenant's limits of one scope (`None`: its own) by the store's last report.
    #[must_use]
    pub fn statuses(&self, tenant: &TenantId, model: Option<&str>, at: Tick) -> Vec<LimitStatus> {
        self.0
            .tenants
            .get(tenant)
            .map(|tenant| tenant.state.lock().tenant_leases.statuses(model, at))
            .unwrap_or_default()
    }

    /// Statistics.
    #[must_use]
    pub fn numbers(&self) -> StoreStats {
        let unspent = |tenant: &Arc<SharedTenant>| tenant.state.lock().tenant_leases.unspent();
        let unspent = self.0.tenants.iter().map(|tenant| unspent(&tenant)).fold(0, u64::saturating_add);
        self.0.counters.read(unspent)
    }

    /// This gateway's exchange of reports with the others; `None` if the settings disable it.
    #[must_use]
    pub fn exchange(&self) -> Option<GatewayExchange> {
        let inner = &self.0;
        let counters = Arc::clone(&inner.exchange);
        let (settings, gateway) = (inner.settings.clone(), Arc::clone(&inner.gateway));
        // Not the name itself, because that is no secret.
        let random = std::hash::BuildHasher::hash_one(&RandomState::new(), inner.seed);
        inner.settings.share_queues.then(|| GatewayExchange::new(settings, inner.clock, gateway, random, counters))
    }

    /// Successful and failed calls of the exchange, and the number of other gateways with a report.
    #[must_use]
    pub fn exchanged(&self) -> (u64, u64, u64) {
        self.0.exchange.read()
    }

    /// Returns all leases and ends the task. Reservations that still run settle without effect, so call it when
    /// there are none.
    pub async fn leave(&self) {
        let (tell, left) = oneshot::channel();
        if self.0.commands.send(SyncCommand::Release(tell)).await.is_ok() {
            let _ = left.await;
        }
    }
}

impl Inner {
    /// A request admitted by the store or a lease.
    fn leased(
        self: &Arc<Self>,
        tenant: &Arc<SharedTenant>,
        model: &str,
        wanted: &Wanted,
        held: tenant_leases::HeldByScope,
        at: Tick,
    ) -> RedisReservation {
        let noted = self.share.note(&tenant.id, model, wanted, at);
        RedisReservation::new(self, tenant, model, Some(held), noted)
    }

    /// A request while the store is unavailable.
    fn without_the_store(
        self: &Arc<Self>,
        tenant: &Arc<SharedTenant>,
        model: &str,
        wanted: &Wanted,
    ) -> Result<RedisReservation, Denied> {
        if self.settings.on_failure == OnFailure::Closed {
            self.counters.request(GrantSource::Nobody);
            return Err(Denied::Unavailable);
        }
        // A need that only the whole limit can hold takes the whole share and leaves the rest as debt.
        let wanted = Wanted { output: Output::Assumed(wanted.output.tokens()), ..*wanted };
        let share = self.share.reserve(&tenant.id, model, &wanted, self.clock.now());
        let share = share.map_err(|refused| of_the_whole(tenant, model, refused))?;
        tenant.state.lock().tenant_leases.runs(model);
        self.counters.request(GrantSource::Share);
        Ok(RedisReservation::new(self, tenant, model, None, share))
    }
}

/// A rejection by a share, reported as the limit of which it is one, with the share's remainder and reset
/// time.
fn of_the_whole(tenant: &SharedTenant, model: &str, refused: LimitExceeded) -> LimitExceeded {
    match refused {
        LimitExceeded::Retryable { limit_status, retry_after } => {
            let limit_status = tenant.state.lock().tenant_leases.of_the_whole(model, limit_status);
            LimitExceeded::Retryable { limit_status, retry_after }
        }
        never @ LimitExceeded::NeverFits { .. } => never,
    }
}

/// One gateway's share of the limits: at least one of each, so that something can pass.
fn share_of(limits: &Limits, replicas: u32) -> Limits {
    let replicas = u64::from(replicas.max(1));
    let rate = |rate: Rate| {
        let share = |whole: u64| (whole / replicas).max(1);
        Rate::new(share(rate.per_minute()), Some(share(rate.burst()))).expect("a part of a rate is within its range")
    };
    let part = |allowance: &Allowance| Allowance {
        tokens: allowance.tokens.map(rate),
        input_tokens: allowance.input_tokens.map(rate),
        output_tokens: allowance.output_tokens.map(rate),
        requests: allowance.requests.map(rate),
        concurrent_requests: allowance
            .concurrent_requests
            .and_then(|most| std::num::NonZeroU64::new((most.get() / replicas).max(1))),
    };
    Limits {
        whole: part(&limits.whole),
        models: limits.models.iter().map(|(model, allowance)| (Arc::clone(model), part(allowance))).collect(),
    }
}

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
//! One task, the [`Keeper`], makes all calls, so a client that leaves during its call loses nothing. The end
//! of a request only changes local state and never waits: the task checks the tenants in use ten times a
//! second. Its channel carries requests for an earlier check; if it is full, a request that needs the store
//! is served as if the store were unavailable, and an end is found at the next check.

mod account;
mod breaker;
mod keeper;
mod lease;
pub mod line;
mod numbers;
#[cfg(test)]
mod orders;
mod reservation;
pub mod settings;
#[cfg(test)]
mod tests;
pub mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ahash::RandomState;
use dashmap::DashMap;

use tokio::sync::{mpsc, oneshot};

pub use keeper::Keeper;
pub use numbers::{By, EDGES, Ended, Numbers};
pub use reservation::Reservation;

use super::limit::settings::{Allowance, Limits, Rate};
use super::limit::{Exhausted, Ledger, Output, Standing, Wanted};
use crate::clock::Clock;
use crate::locks::Mutex;
use crate::units::{TenantId, Tick};
use account::{Account, Drawn, Want};
use numbers::Counters;
use settings::{OnFailure, Redis};

/// Capacity of the task's channel.
const WORDS: usize = 1024;

/// Most requests of one tenant that wait for the store.
const WAITING: usize = 4096;

/// Why a request may not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// A limit is exhausted.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// The store is unavailable, and the settings say `closed`.
    #[error("limits store unavailable")]
    Unavailable,
}

/// The limits of all tenants in a store. Outlives reloads. Clones share one state.
#[derive(Clone, Debug)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    clock: Clock,
    settings: Redis,
    /// This gateway's random name in the store.
    gateway: Arc<str>,
    tenants: DashMap<TenantId, Arc<Tenant>, RandomState>,
    /// Requests of this gateway against its share of the limits.
    share: Ledger,
    replicas: AtomicU32,
    words: mpsc::Sender<Word>,
    counters: Counters,
}

/// One tenant, as the task sees it.
#[derive(Debug)]
struct Tenant {
    id: TenantId,
    desk: Mutex<Desk>,
}

#[derive(Debug)]
struct Desk {
    account: Account,
    waiting: VecDeque<Waiter>,
    /// A call is in flight.
    calling: bool,
    /// The tenant is on the task's list.
    listed: bool,
    /// Until when the store is not called for this tenant, because its stored state was unusable.
    sick_until: Tick,
}

/// A request that waits for the store.
#[derive(Debug)]
struct Waiter {
    want: Want,
    tell: oneshot::Sender<Result<Reservation, Exhausted>>,
}

/// A message to the task.
#[derive(Debug)]
enum Word {
    /// Check this tenant.
    Look(Arc<Tenant>),
    /// Return all leases and end.
    Leave(oneshot::Sender<()>),
}

impl Store {
    /// A store and its task. Connects only when the task runs. `seed` makes this gateway's name in the store,
    /// so it must differ between gateways.
    #[must_use]
    pub fn new(settings: Redis, clock: Clock, seed: u64) -> (Self, Keeper) {
        let (words, heard) = mpsc::channel(WORDS);
        let inner = Arc::new(Inner {
            clock,
            settings,
            gateway: format!("{seed:016x}").into(),
            tenants: DashMap::default(),
            share: Ledger::new(),
            replicas: AtomicU32::new(1),
            words,
            counters: Counters::default(),
        });
        (Store(Arc::clone(&inner)), Keeper::new(inner, heard))
    }

    /// Sets the limits, and how many gateways share them. Spent amounts stay in the store; name every tenant,
    /// as for [`Ledger::reload`].
    pub fn reload(&self, tenants: &BTreeMap<TenantId, Limits>, replicas: u32, at: Tick) {
        let inner = &self.0;
        inner.replicas.store(replicas, Ordering::Relaxed);
        inner.tenants.retain(|tenant, _| tenants.contains_key(tenant));
        for (id, limits) in tenants {
            if let Some(tenant) = inner.tenants.get(id) {
                tenant.desk.lock().account.change(limits, replicas, at);
                continue;
            }
            let key = format!("{}:limits:{id}", inner.settings.key_prefix).into();
            let account = Account::new(key, Arc::clone(&inner.gateway), limits, replicas, at);
            let desk =
                Desk { account, waiting: VecDeque::new(), calling: false, listed: false, sick_until: Tick::ZERO };
            inner.tenants.insert(id.clone(), Arc::new(Tenant { id: id.clone(), desk: Mutex::new(desk) }));
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
    ) -> Result<Reservation, Denied> {
        let Some(tenant) = self.0.tenants.get(tenant).map(|tenant| Arc::clone(&tenant)) else {
            return Ok(Reservation::unlimited());
        };
        let heard = {
            let mut desk = tenant.desk.lock();
            match desk.account.draw(model, wanted, at) {
                Drawn::Held(held) => {
                    let is_limited = desk.account.limits(model);
                    drop(desk);
                    if is_limited {
                        self.0.counters.request(By::Lease);
                    }
                    return Ok(self.0.leased(&tenant, model, wanted, held, at));
                }
                Drawn::Refused(exhausted) => return Err(exhausted.into()),
                Drawn::Ask => self.queue(&tenant, &mut desk, model, wanted, at),
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
        tenant: &Arc<Tenant>,
        desk: &mut Desk,
        model: &str,
        wanted: &Wanted,
        at: Tick,
    ) -> Option<oneshot::Receiver<Result<Reservation, Exhausted>>> {
        if !self.0.counters.is_up() || at < desk.sick_until || desk.waiting.len() >= WAITING {
            return None;
        }
        if !desk.calling && desk.waiting.is_empty() {
            self.0.words.try_send(Word::Look(Arc::clone(tenant))).ok()?;
        }
        let (tell, heard) = oneshot::channel();
        desk.waiting.push_back(Waiter { want: Want { model: model.into(), wanted: *wanted }, tell });
        Some(heard)
    }

    /// Number of a tenant's limited requests running here.
    #[must_use]
    pub fn running(&self, tenant: &TenantId) -> u64 {
        self.0.tenants.get(tenant).map_or(0, |tenant| tenant.desk.lock().account.running())
    }

    /// Where a tenant's limits of one scope (`None`: its own) stand by the store's last word.
    #[must_use]
    pub fn standings(&self, tenant: &TenantId, model: Option<&str>, at: Tick) -> Vec<Standing> {
        self.0.tenants.get(tenant).map(|tenant| tenant.desk.lock().account.standings(model, at)).unwrap_or_default()
    }

    /// Statistics.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        let unspent = |tenant: &Arc<Tenant>| tenant.desk.lock().account.unspent();
        let unspent = self.0.tenants.iter().map(|tenant| unspent(&tenant)).fold(0, u64::saturating_add);
        self.0.counters.read(unspent)
    }

    /// Returns all leases and ends the task. Reservations that still run settle without effect, so call it when
    /// there are none.
    pub async fn leave(&self) {
        let (tell, left) = oneshot::channel();
        if self.0.words.send(Word::Leave(tell)).await.is_ok() {
            let _ = left.await;
        }
    }
}

impl Inner {
    /// A request admitted by the store or a lease.
    fn leased(
        self: &Arc<Self>,
        tenant: &Arc<Tenant>,
        model: &str,
        wanted: &Wanted,
        held: account::HeldOfBoth,
        at: Tick,
    ) -> Reservation {
        let noted = self.share.note(&tenant.id, model, wanted, at);
        Reservation::new(self, tenant, model, Some(held), noted)
    }

    /// A request while the store is unavailable.
    fn without_the_store(
        self: &Arc<Self>,
        tenant: &Arc<Tenant>,
        model: &str,
        wanted: &Wanted,
    ) -> Result<Reservation, Denied> {
        if self.settings.on_failure == OnFailure::Closed {
            self.counters.request(By::Nobody);
            return Err(Denied::Unavailable);
        }
        // A need that only the whole limit can hold takes the whole share and leaves the rest as debt.
        let wanted = Wanted { output: Output::Assumed(wanted.output.tokens()), ..*wanted };
        let share = self.share.reserve(&tenant.id, model, &wanted, self.clock.now());
        let share = share.map_err(|refused| of_the_whole(tenant, model, refused))?;
        tenant.desk.lock().account.runs(model);
        self.counters.request(By::Share);
        Ok(Reservation::new(self, tenant, model, None, share))
    }
}

/// A rejection by a share, reported as the limit of which it is one, with the share's remainder and reset
/// time.
fn of_the_whole(tenant: &Tenant, model: &str, refused: Exhausted) -> Exhausted {
    match refused {
        Exhausted::ForNow { standing, retry_after } => {
            let standing = tenant.desk.lock().account.of_the_whole(model, standing);
            Exhausted::ForNow { standing, retry_after }
        }
        never @ Exhausted::ForEver { .. } => never,
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

//! The tenants' rate limiter, with balances in this process or in a shared store.

use std::collections::BTreeMap;

use super::limit::settings::Limits;
use super::limit::{self, Ledger, Scope, Standing, Used, Wanted};
use super::shared::settings::LimitsStore;
use super::shared::{self, Denied, Keeper, Store};
use crate::clock::Clock;
use crate::units::{TenantId, Tick};

/// The rate limiter of all tenants. Outlives reloads.
#[derive(Debug)]
pub enum Books {
    /// In this process.
    Here(Ledger),
    /// In a store shared by several gateways.
    Shared(Store),
}

/// The reservation of a running request. Released by exactly one ending.
#[must_use = "dropped at once it holds nothing"]
#[derive(Debug)]
pub enum Reservation {
    /// Of local limits.
    Here(limit::Reservation),
    /// Of shared limits. Boxed because it is much larger and rarer.
    Shared(Box<shared::Reservation>),
}

impl Books {
    /// A rate limiter, and its background task if the balances are shared. `seed` must differ between
    /// gateways.
    #[must_use]
    pub fn new(store: &LimitsStore, clock: Clock, seed: u64) -> (Self, Option<Keeper>) {
        match store {
            LimitsStore::Memory => (Books::Here(Ledger::new()), None),
            LimitsStore::Redis(redis) => {
                let (store, keeper) = Store::new((**redis).clone(), clock, seed);
                (Books::Shared(store), Some(keeper))
            }
        }
    }

    /// Sets the limits, and how many gateways share them.
    pub fn reload(&self, tenants: &BTreeMap<TenantId, Limits>, replicas: u32, at: Tick) {
        match self {
            Books::Here(ledger) => ledger.reload(tenants, at),
            Books::Shared(store) => store.reload(tenants, replicas, at),
        }
    }

    /// Reserves what the request needs of every applicable limit, or nothing.
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
        match self {
            Books::Here(ledger) => Ok(Reservation::Here(ledger.reserve(tenant, model, wanted, at)?)),
            Books::Shared(store) => {
                // Boxed because it would enlarge every request's future.
                let reserved = Box::pin(store.reserve(tenant, model, wanted, at)).await?;
                Ok(Reservation::Shared(Box::new(reserved)))
            }
        }
    }

    /// Where a tenant's limits of one scope stand: its own (`None`), or those for one model. Of shared
    /// limits it is the store's last word, and what the store has not told is left out.
    #[must_use]
    pub fn standings(&self, tenant: &TenantId, model: Option<&str>, at: Tick) -> Vec<Standing> {
        match self {
            Books::Here(ledger) => {
                let scope = if model.is_some() { Scope::Model } else { Scope::Tenant };
                let all = ledger.standings(tenant, model.unwrap_or_default(), at);
                all.into_iter().filter(|standing| standing.scope == scope).collect()
            }
            Books::Shared(store) => store.standings(tenant, model, at),
        }
    }

    /// Number of a tenant's requests with a reservation.
    #[must_use]
    pub fn running(&self, tenant: &TenantId) -> u64 {
        match self {
            Books::Here(ledger) => ledger.running(tenant),
            Books::Shared(store) => store.running(tenant),
        }
    }
}

impl Reservation {
    /// Replaces the reservation by the actual usage: the rest is refunded, an excess becomes
    /// debt.
    pub fn settle(self, used: Used, at: Tick) {
        match self {
            Reservation::Here(reservation) => reservation.settle(used, at),
            Reservation::Shared(reservation) => reservation.settle(used, at),
        }
    }
}

//! The tenants' rate limiter, with balances in this process or in a shared store.

use std::collections::BTreeMap;

use super::limit::settings::Limits;
use super::limit::{self, LimitScope, LimitStatus, LocalLimiter, Used, Wanted};
use super::redis::settings::LimitsStore;
use super::redis::{self, Denied, RedisLimiter, SyncTask};
use crate::clock::Clock;
use crate::types::{TenantId, Tick};

/// The rate limiter of all tenants. Outlives reloads.
#[derive(Debug)]
pub enum RateLimiter {
    /// In this process.
    Local(LocalLimiter),
    /// In a store shared by several gateways.
    Shared(RedisLimiter),
}

/// The reservation of a running request. Released by exactly one ending.
#[must_use = "dropped at once it holds nothing"]
#[derive(Debug)]
pub enum Reservation {
    /// Of local limits.
    Local(limit::LocalReservation),
    /// Of shared limits. Boxed because it is much larger and rarer.
    Shared(Box<redis::RedisReservation>),
}

impl RateLimiter {
    /// A rate limiter, and its background task if the balances are shared. `seed` must differ between
    /// gateways.
    #[must_use]
    pub fn new(store: &LimitsStore, clock: Clock, seed: u64) -> (Self, Option<SyncTask>) {
        match store {
            LimitsStore::Memory => (RateLimiter::Local(LocalLimiter::new()), None),
            LimitsStore::Redis(redis) => {
                let (store, sync_task) = RedisLimiter::new((**redis).clone(), clock, seed);
                (RateLimiter::Shared(store), Some(sync_task))
            }
        }
    }

    /// Sets the limits, and how many gateways share them.
    pub fn reload(&self, tenants: &BTreeMap<TenantId, Limits>, replicas: u32, at: Tick) {
        match self {
            RateLimiter::Local(limiter) => limiter.reload(tenants, at),
            RateLimiter::Shared(store) => store.reload(tenants, replicas, at),
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
            RateLimiter::Local(limiter) => Ok(Reservation::Local(limiter.reserve(tenant, model, wanted, at)?)),
            RateLimiter::Shared(store) => {
                // Boxed because it would enlarge every request's future.
                let reserved = Box::pin(store.reserve(tenant, model, wanted, at)).await?;
                Ok(Reservation::Shared(Box::new(reserved)))
            }
        }
    }

    /// Status of a tenant's limits of one scope: its own (`None`), or those for one model. For shared limits
    /// it is the store's last report, without limits not reported yet.
    #[must_use]
    pub fn statuses(&self, tenant: &TenantId, model: Option<&str>, at: Tick) -> Vec<LimitStatus> {
        match self {
            RateLimiter::Local(limiter) => {
                let scope = if model.is_some() { LimitScope::Model } else { LimitScope::Tenant };
                let all = limiter.statuses(tenant, model.unwrap_or_default(), at);
                all.into_iter().filter(|standing| standing.scope == scope).collect()
            }
            RateLimiter::Shared(store) => store.statuses(tenant, model, at),
        }
    }

    /// Number of a tenant's requests with a reservation.
    #[must_use]
    pub fn running(&self, tenant: &TenantId) -> u64 {
        match self {
            RateLimiter::Local(limiter) => limiter.running(tenant),
            RateLimiter::Shared(store) => store.running(tenant),
        }
    }
}

impl Reservation {
    /// Replaces the reservation by the actual usage: the rest is refunded, an excess becomes
    /// debt.
    pub fn settle(self, used: Used, at: Tick) {
        match self {
            Reservation::Local(reservation) => reservation.settle(used, at),
            Reservation::Shared(reservation) => reservation.settle(used, at),
        }
    }
}

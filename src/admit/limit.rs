//! The tenants' limits: token rates, request rates, concurrent requests.
//!
//! Pure: moments are arguments, and nothing waits. A request reserves before it is dispatched, of all
//! limits together or of none, and settles with its actual usage when it ends
//! (`docs/semantics.md` section 8).
//!
//! Rules:
//! - Each rate limit is a token bucket with a burst and a constant refill. A reservation counts as spent
//!   at once, so that the retry time of a rejection ([`LimitExceeded::Retryable`]) does not depend on when other
//!   requests end.
//! - Usage beyond the reservation is debt, paid back by waiting and reported as 0 remaining. A running
//!   request is never cut for it.
//! - A request rate counts every settled request, with or without tokens; a request that ends by a drop is
//!   refunded.
//! - Refunds raise a balance at most to full. A refund may come when the bucket has refilled already, and
//!   can then pay for something else, so a burst can be larger by the unused part of running reservations.
//!   All charges together stay within one burst plus the refill since start (plus debt). Assigning refunds
//!   to their original minute would need the bucket's history.
//! - A request served beyond its limits (`when_over_limit: demote`) holds no reservation: it takes what is
//!   left, and owes nothing.
//!
//! Each operation is O(1) in the number of tenants, models and running requests; a tenant's requests share
//! one lock, held briefly, plus one per limited model.

pub(super) mod buckets;
#[cfg(test)]
mod interleavings;
mod limit_error;
mod reservation;
pub mod settings;
#[cfg(test)]
mod tests;
pub(super) mod token_bucket;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ahash::RandomState;
use dashmap::DashMap;

pub use limit_error::{LimitExceeded, LimitKind, LimitScope, LimitStatus};
pub use reservation::LocalReservation;

use crate::sync::Mutex;
use crate::types::{TenantId, Tick, Tokens};
use buckets::BucketSet;
use reservation::BucketHold;
use settings::Limits;

/// The need of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Estimated prompt tokens.
    pub input: Tokens,
    /// Output tokens over all choices and prompts.
    pub output: Output,
}

impl Wanted {
    /// One request without tokens.
    pub const A_REQUEST: Wanted = Wanted { input: Tokens::ZERO, output: Output::Assumed(Tokens::ZERO) };
}

/// The output to reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Stated by the request. More than a bucket holds can never run.
    Stated(Tokens),
    /// Assumed. Clipped, with the prompt, to what a bucket holds.
    Assumed(Tokens),
}

impl Output {
    /// The number of tokens.
    #[must_use]
    pub const fn tokens(self) -> Tokens {
        match self {
            Output::Stated(tokens) | Output::Assumed(tokens) => tokens,
        }
    }
}

/// The actual usage of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Prompt tokens.
    pub input: Tokens,
    /// Output tokens of all choices.
    pub output: Tokens,
}

/// The limits of all tenants. Outlives reloads.
#[derive(Debug, Default)]
pub struct LocalLimiter {
    all_buckets: DashMap<TenantId, TenantBuckets, RandomState>,
}

/// The buckets of one tenant. Lock order: the tenant's own first, then its model's.
#[derive(Debug)]
struct TenantBuckets {
    whole: Arc<Mutex<BucketSet>>,
    models: HashMap<Arc<str>, Arc<Mutex<BucketSet>>, RandomState>,
}

impl LocalLimiter {
    /// Without tenants, nothing is limited.
    #[must_use]
    pub fn new() -> Self {
        LocalLimiter::default()
    }

    /// Sets the limits. Spent amounts are kept and count against the new limit at once; tenants and models that
    /// are no longer named are removed. Name every tenant, also those without limits, so that a later limit
    /// knows the running requests.
    pub fn reload(&self, tenants: &BTreeMap<TenantId, Limits>, at: Tick) {
        self.all_buckets.retain(|tenant, _| tenants.contains_key(tenant));
        for (tenant, limits) in tenants {
            match self.all_buckets.get_mut(tenant) {
                Some(mut tenant_buckets) => tenant_buckets.change(limits, at),
                None => drop(self.all_buckets.insert(tenant.clone(), TenantBuckets::new(limits, at))),
            }
        }
    }

    /// Reserves what the request needs of every applicable limit, or nothing. Unknown tenants are not
    /// limited.
    pub fn reserve(
        &self,
        tenant: &TenantId,
        model: &str,
        wanted: &Wanted,
        at: Tick,
    ) -> Result<LocalReservation, LimitExceeded> {
        let Some([whole, model]) = self.bucket_sets(tenant, model) else {
            return Ok(LocalReservation::new([None, None], wanted.input));
        };
        let holds = {
            let mut locked = [
                whole.as_ref().map(|bucket_set| bucket_set.lock()),
                model.as_ref().map(|bucket_set| bucket_set.lock()),
            ];
            check_all(locked.iter().flatten().map(|bucket_set| &**bucket_set), wanted, at)?;
            locked.each_mut().map(|bucket_set| bucket_set.as_mut().map(|bucket_set| bucket_set.take(wanted, at)))
        };
        let [of_whole, of_model] = holds;
        let hold = |(bucket_set, held)| BucketHold { bucket_set, held };
        Ok(LocalReservation::new([whole.zip(of_whole).map(hold), model.zip(of_model).map(hold)], wanted.input))
    }

    /// Records a request admitted elsewhere: takes what is left without owing more, and counts it as
    /// running.
    pub fn note(&self, tenant: &TenantId, model: &str, wanted: &Wanted, at: Tick) -> LocalReservation {
        let bucket_sets = self.bucket_sets(tenant, model).unwrap_or_default();
        let hold = |bucket_set: Arc<Mutex<BucketSet>>| {
            let held = bucket_set.lock().take_what_is_left(wanted, at);
            BucketHold { bucket_set, held }
        };
        LocalReservation::externally_admitted(bucket_sets.map(|bucket_set| bucket_set.map(hold)), wanted.input)
    }

    /// The state of the limits that apply to a tenant's requests for this model.
    #[must_use]
    pub fn statuses(&self, tenant: &TenantId, model: &str, at: Tick) -> Vec<LimitStatus> {
        let bucket_sets = self.bucket_sets(tenant, model).into_iter().flatten().flatten();
        bucket_sets.flat_map(|bucket_set| bucket_set.lock().statuses(at).collect::<Vec<_>>()).collect()
    }

    /// Number of a tenant's requests with a reservation.
    #[must_use]
    pub fn running(&self, tenant: &TenantId) -> u64 {
        self.all_buckets.get(tenant).map_or(0, |tenant_buckets| tenant_buckets.whole.lock().running())
    }

    /// The tenant's buckets, and those for the model if any.
    fn bucket_sets(&self, tenant: &TenantId, model: &str) -> Option<[Option<Arc<Mutex<BucketSet>>>; 2]> {
        let tenant_buckets = self.all_buckets.get(tenant)?;
        Some([Some(Arc::clone(&tenant_buckets.whole)), tenant_buckets.models.get(model).map(Arc::clone)])
    }
}

impl TenantBuckets {
    fn new(limits: &Limits, at: Tick) -> Self {
        let whole = Arc::new(Mutex::new(BucketSet::new(LimitScope::Tenant, &limits.whole, at)));
        let mut tenant_buckets = TenantBuckets { whole, models: HashMap::default() };
        tenant_buckets.change(limits, at);
        tenant_buckets
    }

    fn change(&mut self, limits: &Limits, at: Tick) {
        self.whole.lock().change(&limits.whole, at);
        self.models.retain(|model, _| limits.models.contains_key(model));
        for (model, allowance) in &limits.models {
            match self.models.get(model) {
                Some(bucket_set) => bucket_set.lock().change(allowance, at),
                None => {
                    let bucket_set = BucketSet::new(LimitScope::Model, allowance, at);
                    self.models.insert(Arc::clone(model), Arc::new(Mutex::new(bucket_set)));
                }
            }
        }
    }
}

/// Checks the need against all buckets. "Never" takes precedence over "not now", and the longest wait is
/// reported.
fn check_all<'a>(
    bucket_sets: impl Iterator<Item = &'a BucketSet> + Clone,
    wanted: &Wanted,
    at: Tick,
) -> Result<(), LimitExceeded> {
    bucket_sets.clone().try_for_each(|bucket_set| bucket_set.can_ever_hold(wanted))?;
    bucket_sets.clone().try_for_each(BucketSet::has_a_place)?;
    LimitExceeded::for_the_longest(bucket_sets.filter_map(|bucket_set| bucket_set.longest_wait(wanted, at)))
        .map_or(Ok(()), Err)
}

//! Settings of the simulated gateway's scheduling.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use super::mix::MixClass;
use crate::admit::limit::settings::Limits;
use crate::admit::overload_control::OverloadLevel;
use crate::admit::queue::{self, ClassQueue};
use crate::route::settings::{Concurrency, EngineSource, PoolSettings};
use crate::types::{PoolId, TenantId};

/// Settings of the gateway's scheduling, as in its file.
#[derive(Clone, Debug)]
pub struct GatewayScheduling {
    /// `max_concurrency_per_engine`.
    pub seats: Concurrency,
    /// The pool's `queue`.
    pub queue: queue::QueueSettings,
    /// The classes' `queue`, if not the default.
    pub classes: Vec<(String, ClassQueue)>,
    /// Tenants' `limits`.
    pub limits: BTreeMap<TenantId, Limits>,
    /// Tenants with `when_over_limit: reject`; the others are demoted.
    pub rejected: BTreeSet<TenantId>,
    /// The pool's other settings, if not the default: health, retries, breaker, choice of engines.
    pub pool: Option<Box<PoolSettings>>,
    /// The classes' `degrade`.
    pub degrade: Vec<(String, Vec<OverloadLevel>)>,
    /// Pools after the first one. Requests without a route enter the second one only by the level `spill`.
    pub further: Vec<FurtherPool>,
    /// Pools of the classes' routes, if not the first pool alone.
    pub reach: BTreeMap<String, ClassPools>,
}

/// A pool after the first one.
#[derive(Clone, Debug)]
pub struct FurtherPool {
    /// Settings; its addresses are ignored.
    pub settings: PoolSettings,
    /// Number of engines.
    pub engines: usize,
}

/// Pools that requests of a class can come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassPools {
    /// The first pools of its routes.
    pub first: BTreeSet<PoolId>,
    /// All of them.
    pub all: BTreeSet<PoolId>,
}

impl GatewayScheduling {
    /// The settings tuned on [`Mix::published`](super::Mix::published): seats found by search (24 to 64 and `auto` are as good), other
    /// settings default.
    #[must_use]
    pub fn published() -> Self {
        GatewayScheduling {
            seats: Concurrency::Fixed(NonZeroU32::new(32).expect("not zero")),
            queue: queue::QueueSettings::default(),
            classes: Vec::new(),
            limits: BTreeMap::new(),
            rejected: BTreeSet::new(),
            pool: None,
            degrade: Vec::new(),
            further: Vec::new(),
            reach: BTreeMap::new(),
        }
    }

    /// With a second pool of this many engines that has the queue and the seats of the first one.
    #[must_use]
    pub fn with_overflow(self, engines: usize) -> Self {
        let settings = PoolSettings { id: PoolId::from("overflow"), ..self.first_pool() };
        GatewayScheduling { further: vec![FurtherPool { settings, engines }], ..self }
    }

    /// Settings of the first pool.
    pub(super) fn first_pool(&self) -> PoolSettings {
        let pool = match &self.pool {
            Some(pool) => (**pool).clone(),
            None => PoolSettings::with_defaults(PoolId::from("fleet"), EngineSource::Static(Vec::new())),
        };
        PoolSettings { concurrency: self.seats, queue: self.queue.clone(), ..pool }
    }

    /// Engines of the pools after the first one.
    pub(super) fn further_engines(&self) -> usize {
        self.further.iter().map(|pool| pool.engines).sum()
    }

    /// Pools of a class's routes.
    pub(super) fn reach_of(&self, class: &str) -> ClassPools {
        self.reach.get(class).cloned().unwrap_or_else(|| {
            let first = BTreeSet::from([self.first_pool().id]);
            ClassPools { all: first.clone(), first }
        })
    }

    /// How requests of a class wait.
    pub(super) fn queue_of(&self, class: &MixClass) -> ClassQueue {
        let own = self.classes.iter().find(|(name, _)| *name == class.class);
        own.map_or_else(|| ClassQueue::of_promise(class.objectives().longest()), |(_, queue)| *queue)
    }
}

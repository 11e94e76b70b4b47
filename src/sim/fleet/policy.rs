//! Policies: when a request goes to which engine.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use super::gateway_pools::GatewayPools;
use super::mix::{Arrival, Mix, MixClass};
use super::peers::{Peer, PeerBalancer};
use super::pool_scheduler::PriorAttempts;
use crate::admit::limit::settings::Limits;
use crate::admit::limit::{LocalReservation, Used};
use crate::admit::overload_control::{ActiveActions, OverloadLevel};
use crate::admit::queue::{self, ClassQueue, QueueReport, Ticket};
use crate::judge::Outcome;
use crate::observe::Timeline;
use crate::route::retry::AttemptOutcome;
use crate::route::settings::{Concurrency, EngineSource, PoolSettings};
use crate::route::{EngineShare, WorkGuard};
use crate::sim::engine::Gauges;
use crate::types::{PoolId, TenantId, Tick};

/// A policy.
#[derive(Clone, Debug)]
pub enum Policy {
    /// Dispatches every request at once to the next engine, which serves first come, first served.
    RoundRobin,
    /// Dispatches every request at once to the engine with the fewest requests, round robin among
    /// equals.
    LeastConnections,
    /// Another load balancer or gateway.
    Peer(Peer),
    /// Requests queue in the gateway for a seat; the engine is chosen when they get one.
    Scheduled(GatewayScheduling),
}

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
    /// The settings tuned on [`Mix::published`]: seats found by search (24 to 64 and `auto` are as good), other
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

/// A request to be dispatched.
pub(super) struct DispatchedRequest {
    pub visit: usize,
    pub engine: usize,
    pub hold: EngineHold,
}

/// What a request holds while an engine has it.
#[derive(Default)]
pub(super) struct EngineHold {
    pub ticket: Option<Ticket>,
    pub work: Option<Box<WorkGuard>>,
    pub reservation: Option<LocalReservation>,
    pub dispatched: Tick,
    /// When the first token was expected.
    pub expected: Option<Tick>,
    /// Bytes of its prompt, if they say something about its tokens.
    pub bytes: Option<u64>,
    /// State for a further attempt.
    pub tried: Option<Box<PriorAttempts>>,
    /// For peers: the grade of its class.
    pub grade: usize,
    /// For peers: further attempts.
    pub attempts: u32,
    /// Whether it is served beyond its tenant's limits.
    pub over_limit: bool,
    /// Index of its pool.
    pub desk: usize,
    /// Whether that is not the first one of its route.
    pub went_on: bool,
}

impl EngineHold {
    /// What a peer's request holds.
    pub fn of_peer(grade: usize, dispatched: Tick) -> EngineHold {
        EngineHold { grade, dispatched, ..EngineHold::default() }
    }
}

/// Consequences of an event: requests to dispatch, requests to reject.
#[derive(Default)]
pub(super) struct Effects {
    pub go: Vec<DispatchedRequest>,
    pub refused: Vec<usize>,
    /// Requests beyond the limits of a tenant that is not demoted.
    pub over_limit: Vec<usize>,
    /// Requests for which no engine was found.
    pub lost: Vec<usize>,
    /// Requests whose prompts are estimated to be prefilled.
    pub read: Vec<usize>,
}

/// A running policy.
pub(super) enum Frontend {
    Peer(Box<PeerBalancer>),
    Scheduled(Box<GatewayPools>),
}

/// One of the gateways that share the engines.
#[derive(Clone, Copy)]
pub(super) struct GatewayReplica {
    pub number: usize,
    pub of: NonZeroU32,
}

/// What one gateway tells the others of a pool.
#[derive(Clone)]
pub(super) struct GatewayNews {
    pub queue: QueueReport,
    pub engines: Vec<EngineShare>,
}

impl Frontend {
    pub fn new(policy: &Policy, mix: &Mix, gateway: GatewayReplica, at: Tick) -> Frontend {
        let peer = |settings| Frontend::Peer(Box::new(PeerBalancer::new(settings, mix.engines, at)));
        match policy {
            Policy::RoundRobin => peer(Peer::round_robin()),
            Policy::LeastConnections => peer(Peer::least_connections()),
            Policy::Peer(settings) => peer(settings.clone()),
            Policy::Scheduled(settings) => Frontend::Scheduled(Box::new(GatewayPools::new(settings, mix, gateway, at))),
        }
    }

    /// The actions in force for requests of a class.
    pub fn in_force(&self, class: &str) -> ActiveActions {
        match self {
            Frontend::Scheduled(pools) => pools.in_force(class),
            Frontend::Peer(_) => ActiveActions::default(),
        }
    }

    /// Records an outcome.
    pub fn judged(&mut self, class: &str, outcome: Outcome, at: Tick) {
        if let Frontend::Scheduled(pools) = self {
            pools.judged(class, outcome, at);
        }
    }

    /// A request arrived.
    pub fn arrive(&mut self, visit: usize, arrival: &Arrival, mix: &Mix, effects: &mut Effects) {
        let class = mix.class_of(arrival.flow);
        match self {
            Frontend::Peer(balancer) => balancer.arrive(visit, arrival, class, effects),
            Frontend::Scheduled(pools) => pools.arrive(visit, arrival, mix, effects),
        }
    }

    /// A stream's first token came.
    pub fn first_token(&mut self, hold: &mut EngineHold, at: Tick, effects: &mut Effects) {
        if let Frontend::Scheduled(pools) = self {
            pools.answers(hold, at);
        }
        self.was_read(hold, at, effects);
    }

    /// A prompt is estimated to be prefilled.
    pub fn was_read(&mut self, hold: &mut EngineHold, at: Tick, effects: &mut Effects) {
        if let Some(work) = &mut hold.work {
            work.first_token(at);
        }
        if let (Frontend::Scheduled(pools), Some(ticket)) = (self, hold.ticket) {
            pools.read(hold.desk, ticket, at, effects);
        }
    }

    /// An engine finished a request, with this timeline if it was served; `used` are its
    /// tokens.
    pub fn freed(
        &mut self,
        engine: usize,
        hold: EngineHold,
        answer: Option<&Timeline>,
        used: Used,
        at: Tick,
        effects: &mut Effects,
    ) {
        match self {
            Frontend::Peer(balancer) => balancer.freed(engine, &hold, at, effects),
            Frontend::Scheduled(pools) => pools.freed(hold, answer, used, at, effects),
        }
    }

    /// An engine did not accept a request, or failed before its response.
    pub fn failed(
        &mut self,
        visit: usize,
        engine: usize,
        hold: EngineHold,
        how: AttemptOutcome,
        at: Tick,
        effects: &mut Effects,
    ) {
        match self {
            Frontend::Peer(balancer) if how == AttemptOutcome::ConnectFailed => {
                balancer.not_taken(visit, engine, hold, at, effects);
            }
            Frontend::Peer(balancer) => {
                effects.lost.push(visit);
                balancer.freed(engine, &hold, at, effects);
            }
            Frontend::Scheduled(pools) => pools.failed(visit, hold, how, at, effects),
        }
    }

    /// Seats of all engines if limited, and waiting requests.
    pub fn seats(&self, at: Tick) -> (Option<usize>, usize) {
        let pools = match self {
            Frontend::Peer(balancer) => return (balancer.seats(), balancer.waiting()),
            Frontend::Scheduled(pools) => pools,
        };
        pools.desks().iter().fold((Some(0), 0), |(seats, waiting), desk| {
            (seats.zip(desk.seats(at)).map(|(all, own)| all + own), waiting + desk.waiting())
        })
    }

    /// What this gateway tells the others, by pool.
    pub fn tells(&self, at: Tick) -> Vec<GatewayNews> {
        let Frontend::Scheduled(pools) = self else { return Vec::new() };
        pools.desks().iter().map(|desk| desk.tells(at)).collect()
    }

    /// What another gateway told at `made`; it counts until then.
    pub fn hears(
        &mut self,
        from: usize,
        news: &[GatewayNews],
        (made, until): (Tick, Tick),
        at: Tick,
        effects: &mut Effects,
    ) {
        if let Frontend::Scheduled(pools) = self {
            pools.hears(from as u64, news, (made, until), at, effects);
        }
    }

    /// A waiting request's client left.
    pub fn withdraw(&mut self, visit: usize, at: Tick, effects: &mut Effects) {
        match self {
            Frontend::Peer(balancer) => balancer.withdraw(visit, at, effects),
            Frontend::Scheduled(pools) => pools.withdraw(visit, at),
        }
    }

    /// When [`Frontend::wake`] must be called.
    pub fn next_moment(&self) -> Option<Tick> {
        match self {
            Frontend::Scheduled(pools) => pools.next_moment(),
            Frontend::Peer(balancer) => balancer.next_moment(),
        }
    }

    /// Advances time. `gauges` returns an engine's gauges, or none if it is down.
    pub fn wake(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick, effects: &mut Effects) {
        match self {
            Frontend::Peer(balancer) => balancer.wake(|engine| gauges(engine).is_some(), at, effects),
            Frontend::Scheduled(pools) => pools.wake(&gauges, at, effects),
        }
    }
}

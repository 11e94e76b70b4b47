//! Policies: when a request goes to which engine.

use super::effects::{Effects, EngineHold, GatewayNews, GatewayReplica};
use super::gateway_pools::GatewayPools;
use super::mix::{Arrival, Mix};
use super::peers::{Peer, PeerBalancer};
use super::scheduling::GatewayScheduling;
use crate::admit::limit::Used;
use crate::admit::overload_control::ActiveActions;
use crate::judge::Outcome;
use crate::observe::Timeline;
use crate::route::retry::AttemptOutcome;
use crate::sim::engine::Gauges;
use crate::types::Tick;

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

/// A running policy.
pub(super) enum Frontend {
    Peer(Box<PeerBalancer>),
    Scheduled(Box<GatewayPools>),
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

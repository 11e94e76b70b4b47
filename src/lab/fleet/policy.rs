//! Who decides when a request goes to which engine.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::mix::{Arrival, Class, Mix};
use crate::admit::queue::{self, Aim, Ask, Moves, Scheduler, Standing, Ticket, WhenHopeless};
use crate::lab::engine::Gauges;
use crate::route::retry::Attempts;
use crate::route::settings::{EngineAddress, Engines, Pool, Scheme};
use crate::route::{Fleet, Report, Size, Work};
use crate::units::{EngineId, PoolId, Tick, Tokens};

/// How requests meet engines.
#[derive(Clone, Debug)]
pub enum Policy {
    /// Every request at once to the next engine; it waits there, first come, first served.
    RoundRobin,
    /// Every request at once to the engine with the fewest requests, in the order of a list
    /// among equals; it waits there.
    LeastConnections,
    /// Requests wait in the gateway's queue for a seat; the engine is chosen when they get one.
    Scheduled(Scheduled),
}

/// Settings of the gateway's scheduling.
#[derive(Clone, Debug)]
pub struct Scheduled {
    /// Requests that one engine has at the same time.
    pub seats: usize,
    /// The pool's queue.
    pub queue: queue::Settings,
    /// The longest wait, by class; 30 s for the others.
    pub max_wait: Vec<(String, Duration)>,
    /// What becomes of hopeless requests.
    pub when_hopeless: WhenHopeless,
}

impl Scheduled {
    fn max_wait(&self, class: &Class) -> Duration {
        let own = self.max_wait.iter().find(|(name, _)| *name == class.class);
        own.map_or(Duration::from_secs(30), |(_, wait)| *wait)
    }
}

/// What a policy does with a request that arrived or that waited.
pub(super) struct Go {
    pub visit: usize,
    pub engine: usize,
    pub hold: Hold,
}

/// What a request holds while an engine has it.
#[derive(Default)]
pub(super) struct Hold {
    pub ticket: Option<Ticket>,
    pub work: Option<Work>,
}

/// What follows from an event: these go to engines, these are turned away.
#[derive(Default)]
pub(super) struct Steps {
    pub go: Vec<Go>,
    pub refused: Vec<usize>,
}

/// A policy at work.
pub(super) enum Front {
    RoundRobin { engines: usize, turn: usize },
    LeastConnections { open: Vec<usize> },
    Scheduled(Box<Desk>),
}

impl Front {
    pub fn new(policy: &Policy, mix: &Mix) -> Front {
        match policy {
            Policy::RoundRobin => Front::RoundRobin { engines: mix.engines, turn: 0 },
            Policy::LeastConnections => Front::LeastConnections { open: vec![0; mix.engines] },
            Policy::Scheduled(settings) => Front::Scheduled(Box::new(Desk::new(settings.clone(), mix))),
        }
    }

    /// A request arrived. Its ticket, if it has to wait.
    pub fn arrive(&mut self, visit: usize, arrival: &Arrival, mix: &Mix, steps: &mut Steps) {
        let engine = match self {
            Front::RoundRobin { engines, turn } => {
                *turn = (*turn + 1) % *engines;
                *turn
            }
            Front::LeastConnections { open } => {
                let least = (0..open.len()).min_by_key(|engine| open[*engine]).unwrap_or(0);
                open[least] += 1;
                least
            }
            Front::Scheduled(desk) => return desk.arrive(visit, arrival, mix, steps),
        };
        steps.go.push(Go { visit, engine, hold: Hold::default() });
    }

    /// An engine is done with a request, or its client left; `used` are the tokens it cost.
    pub fn freed(&mut self, engine: usize, hold: Hold, used: Tokens, at: Tick, steps: &mut Steps) {
        match self {
            Front::RoundRobin { .. } => {}
            Front::LeastConnections { open } => open[engine] -= 1,
            Front::Scheduled(desk) => desk.freed(hold, used, at, steps),
        }
    }

    /// A waiting request's client left.
    pub fn withdraw(&mut self, visit: usize, at: Tick) {
        if let Front::Scheduled(desk) = self {
            desk.withdraw(visit, at);
        }
    }

    /// When [`Front::wake`] has something to do.
    pub fn next_moment(&self) -> Option<Tick> {
        match self {
            Front::Scheduled(desk) => {
                Some(desk.scheduler.next_deadline().unwrap_or(desk.report_at).min(desk.report_at))
            }
            _ => None,
        }
    }

    /// Time passed. `gauges` tells what an engine says of itself.
    pub fn wake(&mut self, gauges: impl Fn(usize) -> Gauges, at: Tick, steps: &mut Steps) {
        if let Front::Scheduled(desk) = self {
            desk.wake(gauges, at, steps);
        }
    }
}

/// The gateway's queue and its choice of engines, as they are, on a simulated clock.
pub(super) struct Desk {
    settings: Scheduled,
    scheduler: Scheduler,
    fleet: Fleet,
    pool: Pool,
    names: Vec<EngineId>,
    places: HashMap<EngineId, usize>,
    visits: HashMap<Ticket, (usize, Size)>,
    tickets: HashMap<usize, Ticket>,
    report_at: Tick,
}

impl Desk {
    fn new(settings: Scheduled, mix: &Mix) -> Desk {
        let address = |number: usize| EngineAddress {
            scheme: Scheme::Http,
            host: format!("engine-{number}").into(),
            port: 8000,
            base: "".into(),
            name: None,
        };
        let addresses: Vec<EngineAddress> = (0..mix.engines).map(address).collect();
        let names: Vec<EngineId> = addresses.iter().map(EngineAddress::id).collect();
        let places = names.iter().cloned().zip(0..).collect();
        let pool = Pool::with_defaults(PoolId::from("fleet"), Engines::Static(addresses));
        let fleet = Fleet::new(mix.seed);
        fleet.follow(&[Arc::new(pool.clone())], Tick::ZERO);
        let mut scheduler = Scheduler::new(settings.queue.clone());
        let nobody_waits = scheduler.set_seats(settings.seats * mix.engines, Tick::ZERO);
        debug_assert_eq!(nobody_waits, Moves::default());
        let (visits, tickets) = (HashMap::new(), HashMap::new());
        Desk { settings, scheduler, fleet, pool, names, places, visits, tickets, report_at: Tick::ZERO }
    }

    fn arrive(&mut self, visit: usize, arrival: &Arrival, mix: &Mix, steps: &mut Steps) {
        let (flow, class) = (&mix.flows[arrival.flow], mix.class_of(arrival.flow));
        let objectives = class.objectives();
        let decode = flow.cap.map_or(objectives.default_output(), Tokens);
        let size = Size { prefill: Tokens(arrival.estimate), decode };
        let ask = Ask {
            tenant: arrival.tenant.clone(),
            rank: class.priority(),
            arrival: arrival.at,
            aim: match (objectives.ttft, objectives.whole_budget(decode.0)) {
                (Some(ttft), _) if flow.streams => Aim::FirstToken { within: ttft.threshold, lead: Duration::ZERO },
                (_, Some(within)) => Aim::Whole { within, service: Duration::ZERO },
                (_, None) => Aim::Whenever,
            },
            tokens: size.prefill + size.decode,
            leave_by: arrival.at + self.settings.max_wait(class),
            when_hopeless: self.settings.when_hopeless,
            standing: Standing::WithinLimits,
        };
        let (ticket, moves) = self.scheduler.offer(&ask, arrival.at);
        self.visits.insert(ticket, (visit, size));
        self.tickets.insert(visit, ticket);
        self.follow(moves, arrival.at, steps);
    }

    fn freed(&mut self, hold: Hold, used: Tokens, at: Tick, steps: &mut Steps) {
        drop(hold.work);
        if let Some(ticket) = hold.ticket {
            let moves = self.scheduler.release(ticket, used, at);
            self.follow(moves, at, steps);
        }
    }

    fn withdraw(&mut self, visit: usize, at: Tick) {
        if let Some(ticket) = self.tickets.remove(&visit) {
            self.visits.remove(&ticket);
            self.scheduler.withdraw(ticket, at);
        }
    }

    fn wake(&mut self, gauges: impl Fn(usize) -> Gauges, at: Tick, steps: &mut Steps) {
        if at >= self.report_at {
            let every = self.pool.metrics.as_ref().map_or(Duration::from_secs(2), |scrape| scrape.every);
            self.report_at = at + every;
            for (number, name) in self.names.iter().enumerate() {
                let said = gauges(number);
                let report = Report {
                    waiting: Some(said.waiting as f64),
                    running: Some(said.running as f64),
                    kv_usage: Some(said.kv_usage),
                    asleep: false,
                };
                self.fleet.reported(&self.pool.id, name, report, at);
            }
        }
        let moves = self.scheduler.expire(at);
        self.follow(moves, at, steps);
    }

    fn follow(&mut self, moves: Moves, at: Tick, steps: &mut Steps) {
        for away in moves.refused {
            if let Some((visit, _)) = self.visits.remove(&away.ticket) {
                self.tickets.remove(&visit);
                steps.refused.push(visit);
            }
        }
        for ticket in moves.admitted {
            let Some((visit, size)) = self.visits.remove(&ticket) else { continue };
            self.tickets.remove(&visit);
            let mut attempts = Attempts::new(&self.pool, Tick::from_nanos(u64::MAX));
            let choice = self.fleet.choose(&self.pool.id, &mut attempts, size, at).expect("all engines are well");
            let hold = Hold { ticket: Some(ticket), work: Some(choice.work) };
            steps.go.push(Go { visit, engine: self.places[&choice.engine], hold });
        }
    }
}

//! Policies: when a request goes to which engine.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::mix::{Arrival, Mix, MixClass, PromptLength};
use super::overload::FleetOverload;
use super::peers::{Peer, PeerBalancer};
use crate::admit::limit::settings::Limits;
use crate::admit::limit::{LocalLimiter, LocalReservation, Output, Used, Wanted};
use crate::admit::overload_control::{ActiveActions, OverloadLevel};
use crate::admit::queue::{
    self, ClassQueue, Deadline, Decisions, LimitState, QueueReport, QueueRequest, Scheduler, Ticket,
};
use crate::inspect::{PromptSize, Ratios};
use crate::judge::Outcome;
use crate::observe::Timeline;
use crate::route::retry::{AttemptOutcome, Attempts, Injection, RetryDecision};
use crate::route::settings::{Concurrency, EngineAddress, EngineSource, PoolSettings, Scheme};
use crate::route::{
    EngineMetrics, EngineShare, Fleet, LatencySample, PickRequest, PoolTargets, Prediction, ProbeResult, SloTargets,
    WorkEstimate, WorkGuard,
};
use crate::sim::engine::Gauges;
use crate::types::{EngineId, PoolId, TenantId, Tick, Tokens};

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
    /// Engines of a second pool, used only by requests spilled by a level.
    pub overflow: usize,
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
            overflow: 0,
        }
    }

    fn queue_of(&self, class: &MixClass) -> ClassQueue {
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
    ticket: Option<Ticket>,
    work: Option<Box<WorkGuard>>,
    reservation: Option<LocalReservation>,
    pub dispatched: Tick,
    /// When the first token was expected.
    pub expected: Option<Tick>,
    /// Bytes of its prompt, if they say something about its tokens.
    bytes: Option<u64>,
    /// State for a further attempt.
    tried: Option<Box<PriorAttempts>>,
    /// For peers: the grade of its class.
    pub grade: usize,
    /// For peers: further attempts.
    pub attempts: u32,
    /// Whether it is served beyond its tenant's limits.
    pub over_limit: bool,
    /// Whether it is in the second pool.
    spilled: bool,
}

impl EngineHold {
    /// What a peer's request holds.
    pub fn of_peer(grade: usize, dispatched: Tick) -> EngineHold {
        EngineHold { grade, dispatched, ..EngineHold::default() }
    }
}

/// A request's attempts so far.
struct PriorAttempts {
    attempts: Attempts,
    pick: PickRequest,
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
    queue: QueueReport,
    engines: Vec<EngineShare>,
}

/// The pools, and the overload levels.
pub(super) struct GatewayPools {
    overload: FleetOverload,
    first: PoolScheduler,
    /// The second pool, if any.
    overflow: Option<PoolScheduler>,
}

impl GatewayPools {
    fn desks(&mut self) -> impl Iterator<Item = &mut PoolScheduler> {
        std::iter::once(&mut self.first).chain(&mut self.overflow)
    }

    fn scheduler_of(&mut self, hold: &EngineHold) -> &mut PoolScheduler {
        self.overflow.as_mut().filter(|_| hold.spilled).unwrap_or(&mut self.first)
    }
}

impl Frontend {
    pub fn new(policy: &Policy, mix: &Mix, gateway: GatewayReplica, at: Tick) -> Frontend {
        let peer = |settings| Frontend::Peer(Box::new(PeerBalancer::new(settings, mix.engines, at)));
        match policy {
            Policy::RoundRobin => peer(Peer::round_robin()),
            Policy::LeastConnections => peer(Peer::least_connections()),
            Policy::Peer(settings) => peer(settings.clone()),
            Policy::Scheduled(settings) => {
                let all = mix.engines + settings.overflow;
                let desk = |engines| PoolScheduler::new(settings.clone(), mix, engines, gateway, at);
                Frontend::Scheduled(Box::new(GatewayPools {
                    overload: FleetOverload::new(settings, mix, at),
                    first: desk(0..mix.engines),
                    overflow: (settings.overflow > 0).then(|| desk(mix.engines..all)),
                }))
            }
        }
    }

    /// The actions in force for requests of a class.
    pub fn in_force(&self, class: &str) -> ActiveActions {
        match self {
            Frontend::Scheduled(pools) => pools.overload.in_force(class),
            Frontend::Peer(_) => ActiveActions::default(),
        }
    }

    /// Records an outcome.
    pub fn judged(&mut self, class: &str, outcome: Outcome, at: Tick) {
        if let Frontend::Scheduled(pools) = self {
            pools.overload.note(class, outcome, at);
        }
    }

    /// A request arrived.
    pub fn arrive(&mut self, visit: usize, arrival: &Arrival, mix: &Mix, effects: &mut Effects) {
        let class = mix.class_of(arrival.flow);
        match self {
            Frontend::Peer(balancer) => balancer.arrive(visit, arrival, class, effects),
            Frontend::Scheduled(pools) => {
                let in_force = pools.overload.in_force(&class.class);
                if pools.overload.sheds(class.priority()) {
                    return effects.refused.push(visit);
                }
                let desk = pools.overflow.as_mut().filter(|_| in_force.spill).unwrap_or(&mut pools.first);
                desk.arrive(visit, arrival, in_force, mix, effects);
            }
        }
    }

    /// A stream's first token came.
    pub fn first_token(&mut self, hold: &mut EngineHold, at: Tick, effects: &mut Effects) {
        if let Frontend::Scheduled(pools) = self {
            pools.scheduler_of(hold).answers(hold, at);
        }
        self.was_read(hold, at, effects);
    }

    /// A prompt is estimated to be prefilled.
    pub fn was_read(&mut self, hold: &mut EngineHold, at: Tick, effects: &mut Effects) {
        if let Some(work) = &mut hold.work {
            work.first_token(at);
        }
        if let (Frontend::Scheduled(pools), Some(ticket)) = (self, hold.ticket) {
            pools.scheduler_of(hold).read(ticket, at, effects);
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
            Frontend::Scheduled(pools) => pools.scheduler_of(&hold).freed(hold, answer, used, at, effects),
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
            Frontend::Scheduled(pools) => pools.scheduler_of(&hold).failed(visit, hold, how, at, effects),
        }
    }

    /// Seats of all engines if limited, and waiting requests.
    pub fn seats(&self, at: Tick) -> (Option<usize>, usize) {
        let pools = match self {
            Frontend::Peer(balancer) => return (balancer.seats(), balancer.waiting()),
            Frontend::Scheduled(pools) => pools,
        };
        let desks = std::iter::once(&pools.first).chain(&pools.overflow);
        desks.fold((Some(0), 0), |(seats, waiting), desk| {
            let own = desk.fleet.seats(&desk.pool.id, at);
            (seats.zip(own).map(|(all, own)| all + own), waiting + desk.scheduler.waiting())
        })
    }

    /// What this gateway tells the others, by pool.
    pub fn tells(&self, at: Tick) -> Vec<GatewayNews> {
        let Frontend::Scheduled(pools) = self else { return Vec::new() };
        std::iter::once(&pools.first).chain(&pools.overflow).map(|desk| desk.tells(at)).collect()
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
            for (desk, news) in pools.desks().zip(news) {
                desk.hears(from as u64, news, (made, until), at, effects);
            }
        }
    }

    /// A waiting request's client left.
    pub fn withdraw(&mut self, visit: usize, at: Tick, effects: &mut Effects) {
        match self {
            Frontend::Peer(balancer) => balancer.withdraw(visit, at, effects),
            Frontend::Scheduled(pools) => pools.desks().for_each(|desk| desk.withdraw(visit, at)),
        }
    }

    /// When [`Frontend::wake`] must be called.
    pub fn next_moment(&self) -> Option<Tick> {
        match self {
            Frontend::Scheduled(pools) => {
                let overflow = pools.overflow.as_ref().and_then(PoolScheduler::next_moment);
                [pools.first.next_moment(), overflow, pools.overload.next_moment()].into_iter().flatten().min()
            }
            Frontend::Peer(balancer) => balancer.next_moment(),
        }
    }

    /// Advances time. `gauges` returns an engine's gauges, or none if it is down.
    pub fn wake(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick, effects: &mut Effects) {
        match self {
            Frontend::Peer(balancer) => balancer.wake(|engine| gauges(engine).is_some(), at, effects),
            Frontend::Scheduled(pools) => {
                pools.desks().for_each(|desk| desk.wake(&gauges, at, effects));
                let GatewayPools { overload, first, .. } = &mut **pools;
                overload.evaluate(
                    |priority| first.scheduler.expected_wait(priority, at),
                    first.scheduler.waiting(),
                    at,
                );
            }
        }
    }
}

/// The gateway's own queue and choice of engines on a simulated clock.
pub(super) struct PoolScheduler {
    settings: GatewayScheduling,
    scheduler: Scheduler,
    ledger: LocalLimiter,
    /// Learned bytes per token.
    ratios: Ratios,
    fleet: Fleet,
    pool: PoolSettings,
    seat_changes: u64,
    /// Index of its first engine.
    from: usize,
    names: Vec<EngineId>,
    places: HashMap<EngineId, usize>,
    waiting: HashMap<Ticket, QueuedAtGateway>,
    tickets: HashMap<usize, Ticket>,
    /// Estimated ends of prefill for requests without an observable first token.
    reads: BinaryHeap<Reverse<(Tick, usize)>>,
    report_at: Tick,
    check_at: Tick,
    pace_at: Tick,
}

/// Interval at which seats and pace follow the model, as in the gateway.
const PACE_EVERY: Duration = Duration::from_millis(100);

struct QueuedAtGateway {
    visit: usize,
    arrival: Tick,
    bytes: Option<u64>,
    size: WorkEstimate,
    blocks: Vec<u64>,
    targets: SloTargets,
    promised_whole: Option<Duration>,
    streams: bool,
    reservation: Option<LocalReservation>,
}

impl PoolScheduler {
    fn new(
        mut settings: GatewayScheduling,
        mix: &Mix,
        engines: Range<usize>,
        gateway: GatewayReplica,
        at: Tick,
    ) -> PoolScheduler {
        let address = |number: usize| EngineAddress {
            scheme: Scheme::Http,
            host: format!("engine-{number}").into(),
            port: 8000,
            base: "".into(),
            name: None,
        };
        let addresses: Vec<EngineAddress> = engines.clone().map(address).collect();
        let names: Vec<EngineId> = addresses.iter().map(EngineAddress::id).collect();
        let places = names.iter().cloned().zip(engines.clone()).collect();
        let source = EngineSource::Static(addresses);
        let mut pool = match &settings.pool {
            Some(pool) => PoolSettings { engines: source, ..(**pool).clone() },
            None => PoolSettings::with_defaults(PoolId::from("fleet"), source),
        };
        pool.concurrency = settings.seats;
        let fleet = Fleet::new(mix.seed ^ gateway.number as u64);
        fleet.share_among(gateway.of);
        settings.queue.reading = settings.queue.reading.shared_among(gateway.of);
        fleet.apply_settings(&[Arc::new(pool.clone())], at);
        let objectives: Vec<_> = mix.classes.iter().map(MixClass::objectives).collect();
        fleet.set_targets(
            &pool.id,
            PoolTargets {
                ttft: objectives.iter().filter_map(|class| class.ttft).map(|ttft| ttft.threshold).min(),
                tpot: objectives.iter().filter_map(|class| class.tpot).map(|tpot| tpot.threshold).min(),
                e2e: objectives.iter().any(|class| class.e2e.is_some()),
                attainment: mix.classes.iter().map(MixClass::each_target).fold(0.0, f64::max),
            },
        );
        let mut desk = PoolScheduler {
            scheduler: Scheduler::new(settings.queue.clone()),
            ledger: LocalLimiter::new(),
            ratios: Ratios::new(),
            settings,
            fleet,
            pool,
            seat_changes: u64::MAX,
            from: engines.start,
            names,
            places,
            waiting: HashMap::new(),
            tickets: HashMap::new(),
            reads: BinaryHeap::new(),
            // Gateways scrape at different moments.
            report_at: at + SCRAPE_EVERY * gateway.number as u32 / gateway.of.get(),
            check_at: at,
            pace_at: at,
        };
        desk.ledger.reload(&desk.settings.limits, at);
        let _nobody_waits = desk.scheduler.set_prefilling_engines(engines.len(), at);
        desk.count_seats(at, &mut Effects::default());
        desk
    }

    fn arrive(&mut self, visit: usize, arrival: &Arrival, in_force: ActiveActions, mix: &Mix, effects: &mut Effects) {
        let (flow, class) = (&mix.flows[arrival.flow], mix.class_of(arrival.flow));
        let objectives = class.objectives();
        let expected = in_force.cap.unwrap_or(Tokens(u64::MAX)).min(objectives.default_output());
        let decode = arrival.cap.map_or(expected, |cap| Tokens(cap).min(expected));
        let (prefill, bytes) = match arrival.shown {
            PromptLength::Tokens(tokens) => (Tokens(tokens), None),
            PromptLength::Bytes(bytes) => {
                let per_token = self.ratios.of(Some(MODEL)).bytes_per_token(ALL);
                (text(bytes).tokens(per_token), Some(bytes))
            }
        };
        let size = WorkEstimate { prefill, decode };
        let blocks = arrival.beginning();
        let uncached = self.fleet.uncached(&self.pool.id, prefill, &blocks);
        let lead = WorkEstimate { prefill: uncached, ..size };
        let predicted = self.fleet.predict(&self.pool.id, lead, arrival.at);
        let predicted = predicted.unwrap_or(Prediction { ttft: Duration::ZERO, tpot: Duration::ZERO });
        let streams = flow.streams;
        let whole = objectives.whole_budget(decode.0);
        let deadline = match (objectives.ttft, whole) {
            (Some(ttft), _) if streams => Deadline::FirstToken { within: ttft.threshold, lead: predicted.ttft },
            (_, Some(within)) => {
                let usual = self.fleet.usual_length(&self.pool.id, within).unwrap_or(u64::MAX);
                let further = decode.0.saturating_sub(1).min(usual) as u32;
                let service = predicted.ttft + predicted.tpot * further;
                Deadline::Whole { within, service }
            }
            (_, None) => Deadline::Whenever,
        };
        let threshold = |objective: Option<crate::judge::Objective>| objective.map(|objective| objective.threshold);
        let targets = match streams {
            true => SloTargets {
                ttft: threshold(objectives.ttft),
                tpot: threshold(objectives.tpot),
                e2e: threshold(objectives.e2e),
            },
            false => SloTargets { ttft: None, tpot: None, e2e: whole },
        };
        let queue = self.settings.queue_of(class);
        let wanted = Wanted {
            input: size.prefill,
            output: arrival.cap.map_or(Output::Assumed(expected), |cap| Output::Stated(Tokens(cap))),
        };
        let reservation = self.ledger.reserve(&arrival.tenant, "sim", &wanted, arrival.at).ok();
        if reservation.is_none() && self.settings.rejected.contains(&arrival.tenant) {
            return effects.over_limit.push(visit);
        }
        let limit_state =
            if reservation.is_some() && !in_force.defer { LimitState::WithinLimits } else { LimitState::OverLimit };
        let ask = QueueRequest {
            tenant: arrival.tenant.clone(),
            priority: class.priority(),
            arrival: arrival.at,
            deadline,
            tokens: size.prefill + size.decode,
            prompt: uncached,
            timeout_at: arrival.at + queue.max_wait,
            when_hopeless: queue.when_hopeless,
            limit_state,
        };
        let (ticket, decisions) = self.scheduler.offer(&ask, arrival.at);
        let promised_whole = threshold(objectives.e2e);
        let waiting = QueuedAtGateway {
            visit,
            arrival: arrival.at,
            bytes,
            size,
            blocks,
            targets,
            promised_whole,
            streams,
            reservation,
        };
        self.waiting.insert(ticket, waiting);
        self.tickets.insert(visit, ticket);
        self.follow(decisions, arrival.at, effects);
    }

    fn read(&mut self, ticket: Ticket, at: Tick, effects: &mut Effects) {
        let decisions = self.scheduler.read(ticket, at);
        self.follow(decisions, at, effects);
    }

    fn freed(&mut self, mut hold: EngineHold, answer: Option<&Timeline>, used: Used, at: Tick, effects: &mut Effects) {
        if answer.is_some() {
            self.answers(&mut hold, at);
        }
        if let (Some(bytes), Some(_)) = (hold.bytes, answer) {
            let known = self.ratios.of(Some(MODEL));
            let learned = self.ratios.of_answer(&known, Some(MODEL), true);
            learned.expect("the settings name the model").prompt(ALL, text(bytes), used.input);
        }
        match (hold.work, answer) {
            (Some(work), Some(answer)) => work.learned(&sample(answer, hold.dispatched), at),
            (work, _) => drop(work),
        }
        if let Some(reservation) = hold.reservation {
            reservation.settle(used, at);
        }
        if let Some(ticket) = hold.ticket {
            let decisions = self.scheduler.release(ticket, used.input + used.output, at);
            self.follow(decisions, at, effects);
        }
    }

    /// A response starts: a first token, or a complete non-streaming response.
    fn answers(&mut self, hold: &mut EngineHold, at: Tick) {
        if let Some(mut tried) = hold.tried.take() {
            tried.attempts.first_token();
            self.fleet.succeeded(&self.pool.id, &mut tried.attempts, Injection::None, at);
        }
    }

    fn failed(&mut self, visit: usize, mut hold: EngineHold, how: AttemptOutcome, at: Tick, effects: &mut Effects) {
        let spent = at - hold.dispatched;
        drop(hold.work.take());
        let again = hold.tried.take().and_then(|mut tried| {
            let next = self.fleet.failed(&self.pool.id, &mut tried.attempts, how, at);
            if !matches!(next, RetryDecision::Another | RetryDecision::SameFresh) {
                return None;
            }
            let pick = PickRequest { spent: tried.pick.spent + spent, ..tried.pick };
            let choice = self.fleet.choose(&self.pool.id, &mut tried.attempts, pick, at)?;
            Some((choice, tried))
        });
        match again {
            Some((choice, tried)) => {
                let engine = self.places[&choice.engine];
                let hold = EngineHold { work: Some(choice.work), tried: Some(tried), expected: None, ..hold };
                effects.go.push(DispatchedRequest { visit, engine, hold });
            }
            None => {
                self.freed(hold, None, Used::default(), at, effects);
                effects.lost.push(visit);
            }
        }
        self.count_seats(at, effects);
    }

    fn withdraw(&mut self, visit: usize, at: Tick) {
        if let Some(ticket) = self.tickets.remove(&visit) {
            self.waiting.remove(&ticket);
            self.scheduler.withdraw(ticket, at);
        }
    }

    fn next_moment(&self) -> Option<Tick> {
        let read = self.reads.peek().map(|Reverse((at, _))| *at);
        let looks = [self.report_at, self.check_at, self.pace_at].map(Some);
        let waits = [self.scheduler.next_deadline(), self.scheduler.next_refill(), read];
        looks.into_iter().chain(waits).flatten().min()
    }

    fn wake(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick, effects: &mut Effects) {
        if at >= self.check_at {
            self.check(&gauges, at, effects);
        }
        if at >= self.report_at {
            self.scrape(gauges, at);
        }
        while let Some(Reverse((_, visit))) = self.reads.peek().copied().filter(|Reverse((due, _))| *due <= at) {
            self.reads.pop();
            effects.read.push(visit);
        }
        if at >= self.pace_at {
            self.pace_at = at + PACE_EVERY;
            let pace = self.fleet.update_pace(&self.pool.id, at);
            let decisions = self.scheduler.set_pace(pace, at);
            self.follow(decisions, at, effects);
        } else {
            let decisions = self.scheduler.expire(at);
            self.follow(decisions, at, effects);
        }
    }

    fn tells(&self, at: Tick) -> GatewayNews {
        GatewayNews { queue: self.scheduler.report(at), engines: self.fleet.shares(&self.pool.id, at) }
    }

    fn hears(&mut self, from: u64, news: &GatewayNews, (made, until): (Tick, Tick), at: Tick, effects: &mut Effects) {
        self.fleet.heard(&self.pool.id, from, &news.engines, until, at);
        let decisions = self.scheduler.heard(from, &news.queue, made, until, at);
        self.follow(decisions, at, effects);
    }

    /// Health checks.
    fn check(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick, effects: &mut Effects) {
        self.check_at = at + self.pool.health.as_ref().map_or(SCRAPE_EVERY, |health| health.every);
        for (number, name) in self.names.iter().enumerate() {
            let checked = gauges(self.from + number).map_or(ProbeResult::Refused, |_| ProbeResult::Healthy);
            let _change = self.fleet.checked(&self.pool.id, name, checked, at);
        }
        let available = self.fleet.available(&self.pool.id, at);
        let decisions = self.scheduler.set_prefilling_engines(available.max(1), at);
        self.follow(decisions, at, effects);
    }

    /// Scrapes of the engines' metrics.
    fn scrape(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick) {
        self.report_at = at + SCRAPE_EVERY;
        for (number, name) in self.names.iter().enumerate() {
            let Some(said) = gauges(self.from + number) else { continue };
            let report = EngineMetrics {
                waiting: Some(said.waiting as f64),
                running: Some(said.running as f64),
                kv_usage: Some(said.kv_usage),
                asleep: false,
            };
            self.fleet.reported(&self.pool.id, name, report, at);
        }
    }

    fn follow(&mut self, decisions: Decisions, at: Tick, effects: &mut Effects) {
        for away in decisions.refused {
            if let Some(waiting) = self.waiting.remove(&away.ticket) {
                self.tickets.remove(&waiting.visit);
                effects.refused.push(waiting.visit);
            }
        }
        for ticket in decisions.admitted {
            self.dispatch(ticket, at, effects);
        }
        self.count_seats(at, effects);
    }

    fn dispatch(&mut self, ticket: Ticket, at: Tick, effects: &mut Effects) {
        let Some(waiting) = self.waiting.remove(&ticket) else { return };
        let QueuedAtGateway { visit, arrival, bytes, size, blocks, targets, promised_whole, streams, reservation } =
            waiting;
        self.tickets.remove(&visit);
        let mut attempts = Attempts::new(&self.pool, Tick::from_nanos(u64::MAX));
        let pick = PickRequest { size, targets, whole: promised_whole, spent: at - arrival, key: 0 };
        let live_pool = self.fleet.live_pool(&self.pool.id).expect("its pool is followed");
        let Some(choice) = live_pool.choose(&mut attempts, pick, &blocks, true, at) else {
            let hold = EngineHold { ticket: Some(ticket), reservation, dispatched: at, ..EngineHold::default() };
            self.freed(hold, None, Used::default(), at, effects);
            return effects.lost.push(visit);
        };
        let expected = at + choice.work.time_to_read();
        if !streams {
            self.reads.push(Reverse((expected, visit)));
        }
        let over_limit = reservation.is_none();
        let hold = EngineHold {
            ticket: Some(ticket),
            work: Some(choice.work),
            reservation,
            dispatched: at,
            expected: Some(expected),
            bytes,
            tried: Some(Box::new(PriorAttempts { attempts, pick })),
            grade: 0,
            attempts: 0,
            over_limit,
            spilled: self.from > 0,
        };
        effects.go.push(DispatchedRequest { visit, engine: self.places[&choice.engine], hold });
    }

    /// Updates the scheduler to the engines' seats.
    fn count_seats(&mut self, at: Tick, effects: &mut Effects) {
        let changes = self.fleet.seat_changes();
        if changes != self.seat_changes {
            self.seat_changes = changes;
            let seats = self.fleet.seats(&self.pool.id, at).unwrap_or(usize::MAX);
            let decisions = self.scheduler.set_seats(seats, at);
            self.follow(decisions, at, effects);
        }
    }
}

/// Interval of scrapes.
const SCRAPE_EVERY: Duration = Duration::from_secs(2);

/// The model served by all engines.
const MODEL: &str = "sim";
/// Lengths are learned for all tenants together.
const ALL: &str = "all";

/// A prompt of this many bytes of text.
fn text(bytes: u64) -> PromptSize {
    PromptSize { bytes, is_known: true, ..PromptSize::default() }
}

/// What an answer teaches about its engine.
fn sample(answer: &Timeline, dispatched: Tick) -> LatencySample {
    LatencySample {
        ttft: answer.first_token.map(|at| at - dispatched),
        tpot: answer.tpot(),
        e2e: answer.finish.map(|at| at - dispatched),
        further: answer.output.0.saturating_sub(1),
        cached: None,
        has_media: false,
    }
}

//! Policies: when a request goes to which engine.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::brownout::Brownout;
use super::mix::{Arrival, Class, Mix, Shown};
use super::peers::{Balancer, Peer};
use crate::admit::levels::{InForce, Level};
use crate::admit::limit::settings::Limits;
use crate::admit::limit::{Ledger, Output, Reservation, Used, Wanted};
use crate::admit::queue::{self, Aim, Ask, ClassQueue, Moves, Scheduler, Standing, Ticket};
use crate::inspect::{PromptSize, Ratios};
use crate::judge::Outcome;
use crate::lab::engine::Gauges;
use crate::observe::Timeline;
use crate::route::retry::{Attempts, Happened, Injection, Next};
use crate::route::settings::{Concurrency, EngineAddress, Engines, Pool, Scheme};
use crate::route::{Aims, Checked, Fleet, Lesson, Prediction, Promised, Report, Size, Want, Work};
use crate::units::{EngineId, PoolId, TenantId, Tick, Tokens};

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
    Scheduled(Scheduled),
}

/// Settings of the gateway's scheduling, as in its file.
#[derive(Clone, Debug)]
pub struct Scheduled {
    /// `max_concurrency_per_engine`.
    pub seats: Concurrency,
    /// The pool's `queue`.
    pub queue: queue::Settings,
    /// The classes' `queue`, if not the default.
    pub classes: Vec<(String, ClassQueue)>,
    /// Tenants' `limits`, all with `when_over_limit: demote`.
    pub limits: BTreeMap<TenantId, Limits>,
    /// The classes' `degrade`.
    pub degrade: Vec<(String, Vec<Level>)>,
    /// Engines of a second pool, used only by requests spilled by a level.
    pub overflow: usize,
}

impl Scheduled {
    /// The settings tuned on [`Mix::published`]: seats found by search (24 to 64 and `auto` are as good), other
    /// settings default.
    #[must_use]
    pub fn published() -> Self {
        Scheduled {
            seats: Concurrency::Fixed(NonZeroU32::new(32).expect("not zero")),
            queue: queue::Settings::default(),
            classes: Vec::new(),
            limits: BTreeMap::new(),
            degrade: Vec::new(),
            overflow: 0,
        }
    }

    fn queue_of(&self, class: &Class) -> ClassQueue {
        let own = self.classes.iter().find(|(name, _)| *name == class.class);
        own.map_or_else(|| ClassQueue::of_promise(class.objectives().longest()), |(_, queue)| *queue)
    }
}

/// A request to be dispatched.
pub(super) struct Go {
    pub visit: usize,
    pub engine: usize,
    pub hold: Hold,
}

/// What a request holds while an engine has it.
#[derive(Default)]
pub(super) struct Hold {
    ticket: Option<Ticket>,
    work: Option<Box<Work>>,
    reservation: Option<Reservation>,
    pub dispatched: Tick,
    /// When the first token was expected.
    pub expected: Option<Tick>,
    /// Bytes of its prompt, if they say something about its tokens.
    bytes: Option<u64>,
    /// State for a further attempt.
    tried: Option<Box<Tried>>,
    /// For peers: the grade of its class.
    pub grade: usize,
    /// For peers: further attempts.
    pub attempts: u32,
    /// Whether it is served beyond its tenant's limits.
    pub over_limit: bool,
    /// Whether it is in the second pool.
    spilled: bool,
}

impl Hold {
    /// What a peer's request holds.
    pub fn of_peer(grade: usize, dispatched: Tick) -> Hold {
        Hold { grade, dispatched, ..Hold::default() }
    }
}

/// A request's attempts so far.
struct Tried {
    attempts: Attempts,
    want: Want,
}

/// Consequences of an event: requests to dispatch, requests to reject.
#[derive(Default)]
pub(super) struct Steps {
    pub go: Vec<Go>,
    pub refused: Vec<usize>,
    /// Requests for which no engine was found.
    pub lost: Vec<usize>,
    /// Requests whose prompts are estimated to be prefilled.
    pub read: Vec<usize>,
}

/// A running policy.
pub(super) enum Front {
    Peer(Box<Balancer>),
    Scheduled(Box<House>),
}

/// One of the gateways that share the engines.
#[derive(Clone, Copy)]
pub(super) struct Gateway {
    pub number: usize,
    pub of: NonZeroU32,
}

/// The pools, and the overload levels.
pub(super) struct House {
    brownout: Brownout,
    first: Desk,
    /// The second pool, if any.
    overflow: Option<Desk>,
}

impl House {
    fn desks(&mut self) -> impl Iterator<Item = &mut Desk> {
        std::iter::once(&mut self.first).chain(&mut self.overflow)
    }

    fn desk_of(&mut self, hold: &Hold) -> &mut Desk {
        self.overflow.as_mut().filter(|_| hold.spilled).unwrap_or(&mut self.first)
    }
}

impl Front {
    pub fn new(policy: &Policy, mix: &Mix, gateway: Gateway, at: Tick) -> Front {
        let peer = |settings| Front::Peer(Box::new(Balancer::new(settings, mix.engines, at)));
        match policy {
            Policy::RoundRobin => peer(Peer::round_robin()),
            Policy::LeastConnections => peer(Peer::least_connections()),
            Policy::Peer(settings) => peer(settings.clone()),
            Policy::Scheduled(settings) => {
                let all = mix.engines + settings.overflow;
                let desk = |engines| Desk::new(settings.clone(), mix, engines, gateway, at);
                Front::Scheduled(Box::new(House {
                    brownout: Brownout::new(settings, mix, at),
                    first: desk(0..mix.engines),
                    overflow: (settings.overflow > 0).then(|| desk(mix.engines..all)),
                }))
            }
        }
    }

    /// The actions in force for requests of a class.
    pub fn in_force(&self, class: &str) -> InForce {
        match self {
            Front::Scheduled(house) => house.brownout.in_force(class),
            Front::Peer(_) => InForce::default(),
        }
    }

    /// Records an outcome.
    pub fn judged(&mut self, class: &str, outcome: Outcome, at: Tick) {
        if let Front::Scheduled(house) = self {
            house.brownout.note(class, outcome, at);
        }
    }

    /// A request arrived.
    pub fn arrive(&mut self, visit: usize, arrival: &Arrival, mix: &Mix, steps: &mut Steps) {
        let class = mix.class_of(arrival.flow);
        match self {
            Front::Peer(balancer) => balancer.arrive(visit, arrival, class, steps),
            Front::Scheduled(house) => {
                let in_force = house.brownout.in_force(&class.class);
                if house.brownout.sheds(class.priority()) {
                    return steps.refused.push(visit);
                }
                let desk = house.overflow.as_mut().filter(|_| in_force.spill).unwrap_or(&mut house.first);
                desk.arrive(visit, arrival, in_force, mix, steps);
            }
        }
    }

    /// A stream's first token came.
    pub fn first_token(&mut self, hold: &mut Hold, at: Tick, steps: &mut Steps) {
        if let Front::Scheduled(house) = self {
            house.desk_of(hold).answers(hold, at);
        }
        self.was_read(hold, at, steps);
    }

    /// A prompt is estimated to be prefilled.
    pub fn was_read(&mut self, hold: &mut Hold, at: Tick, steps: &mut Steps) {
        if let Some(work) = &mut hold.work {
            work.first_token(at);
        }
        if let (Front::Scheduled(house), Some(ticket)) = (self, hold.ticket) {
            house.desk_of(hold).read(ticket, at, steps);
        }
    }

    /// An engine finished a request, with this timeline if it was served; `used` are its
    /// tokens.
    pub fn freed(
        &mut self,
        engine: usize,
        hold: Hold,
        answer: Option<&Timeline>,
        used: Used,
        at: Tick,
        steps: &mut Steps,
    ) {
        match self {
            Front::Peer(balancer) => balancer.freed(engine, &hold, at, steps),
            Front::Scheduled(house) => house.desk_of(&hold).freed(hold, answer, used, at, steps),
        }
    }

    /// An engine did not accept a request, or failed before its response.
    pub fn failed(&mut self, visit: usize, engine: usize, hold: Hold, how: Happened, at: Tick, steps: &mut Steps) {
        match self {
            Front::Peer(balancer) if how == Happened::ConnectFailed => {
                balancer.not_taken(visit, engine, hold, at, steps);
            }
            Front::Peer(balancer) => {
                steps.lost.push(visit);
                balancer.freed(engine, &hold, at, steps);
            }
            Front::Scheduled(house) => house.desk_of(&hold).failed(visit, hold, how, at, steps),
        }
    }

    /// Seats of all engines if limited, and waiting requests.
    pub fn seats(&self, at: Tick) -> (Option<usize>, usize) {
        let house = match self {
            Front::Peer(balancer) => return (balancer.seats(), balancer.waiting()),
            Front::Scheduled(house) => house,
        };
        let desks = std::iter::once(&house.first).chain(&house.overflow);
        desks.fold((Some(0), 0), |(seats, waiting), desk| {
            let own = desk.fleet.seats(&desk.pool.id, at);
            (seats.zip(own).map(|(all, own)| all + own), waiting + desk.scheduler.waiting())
        })
    }

    /// A waiting request's client left.
    pub fn withdraw(&mut self, visit: usize, at: Tick, steps: &mut Steps) {
        match self {
            Front::Peer(balancer) => balancer.withdraw(visit, at, steps),
            Front::Scheduled(house) => house.desks().for_each(|desk| desk.withdraw(visit, at)),
        }
    }

    /// When [`Front::wake`] must be called.
    pub fn next_moment(&self) -> Option<Tick> {
        match self {
            Front::Scheduled(house) => {
                let overflow = house.overflow.as_ref().and_then(Desk::next_moment);
                [house.first.next_moment(), overflow, house.brownout.next_moment()].into_iter().flatten().min()
            }
            Front::Peer(balancer) => balancer.next_moment(),
        }
    }

    /// Advances time. `gauges` returns an engine's gauges, or none if it is down.
    pub fn wake(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick, steps: &mut Steps) {
        match self {
            Front::Peer(balancer) => balancer.wake(|engine| gauges(engine).is_some(), at, steps),
            Front::Scheduled(house) => {
                house.desks().for_each(|desk| desk.wake(&gauges, at, steps));
                let House { brownout, first, .. } = &mut **house;
                brownout.weigh(|rank| first.scheduler.expected_wait(rank, at), first.scheduler.waiting(), at);
            }
        }
    }
}

/// The gateway's own queue and choice of engines on a simulated clock.
pub(super) struct Desk {
    settings: Scheduled,
    scheduler: Scheduler,
    ledger: Ledger,
    /// Learned bytes per token.
    ratios: Ratios,
    fleet: Fleet,
    pool: Pool,
    seat_changes: u64,
    /// Index of its first engine.
    from: usize,
    names: Vec<EngineId>,
    places: HashMap<EngineId, usize>,
    waiting: HashMap<Ticket, Waiting>,
    tickets: HashMap<usize, Ticket>,
    /// Estimated ends of prefill for requests without an observable first token.
    reads: BinaryHeap<Reverse<(Tick, usize)>>,
    report_at: Tick,
    check_at: Tick,
    pace_at: Tick,
}

/// Interval at which seats and pace follow the model, as in the gateway.
const PACE_EVERY: Duration = Duration::from_millis(100);

struct Waiting {
    visit: usize,
    arrival: Tick,
    bytes: Option<u64>,
    size: Size,
    blocks: Vec<u64>,
    aims: Aims,
    promised_whole: Option<Duration>,
    streams: bool,
    reservation: Option<Reservation>,
}

impl Desk {
    fn new(mut settings: Scheduled, mix: &Mix, engines: Range<usize>, gateway: Gateway, at: Tick) -> Desk {
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
        let mut pool = Pool::with_defaults(PoolId::from("fleet"), Engines::Static(addresses));
        pool.concurrency = settings.seats;
        let fleet = Fleet::new(mix.seed ^ gateway.number as u64);
        fleet.share_among(gateway.of);
        settings.queue.reading = settings.queue.reading.shared_among(gateway.of);
        fleet.follow(&[Arc::new(pool.clone())], at);
        let objectives: Vec<_> = mix.classes.iter().map(Class::objectives).collect();
        fleet.hold_to(
            &pool.id,
            Promised {
                ttft: objectives.iter().filter_map(|class| class.ttft).map(|ttft| ttft.threshold).min(),
                tpot: objectives.iter().filter_map(|class| class.tpot).map(|tpot| tpot.threshold).min(),
                e2e: objectives.iter().any(|class| class.e2e.is_some()),
                attainment: mix.classes.iter().map(Class::each_target).fold(0.0, f64::max),
            },
        );
        let mut desk = Desk {
            scheduler: Scheduler::new(settings.queue.clone()),
            ledger: Ledger::new(),
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
        let _nobody_waits = desk.scheduler.set_readers(engines.len(), at);
        desk.count_seats(at, &mut Steps::default());
        desk
    }

    fn arrive(&mut self, visit: usize, arrival: &Arrival, in_force: InForce, mix: &Mix, steps: &mut Steps) {
        let (flow, class) = (&mix.flows[arrival.flow], mix.class_of(arrival.flow));
        let objectives = class.objectives();
        let expected = in_force.cap.unwrap_or(Tokens(u64::MAX)).min(objectives.default_output());
        let decode = arrival.cap.map_or(expected, |cap| Tokens(cap).min(expected));
        let (prefill, bytes) = match arrival.shown {
            Shown::Tokens(tokens) => (Tokens(tokens), None),
            Shown::Bytes(bytes) => {
                let per_token = self.ratios.of(Some(MODEL)).bytes_per_token();
                (text(bytes).tokens(per_token), Some(bytes))
            }
        };
        let size = Size { prefill, decode };
        let blocks = arrival.beginning();
        let uncached = self.fleet.uncached(&self.pool.id, prefill, &blocks);
        let lead = Size { prefill: uncached, ..size };
        let predicted = self.fleet.predict(&self.pool.id, lead, arrival.at);
        let predicted = predicted.unwrap_or(Prediction { ttft: Duration::ZERO, tpot: Duration::ZERO });
        let streams = flow.streams;
        let whole = objectives.whole_budget(decode.0);
        let aim = match (objectives.ttft, whole) {
            (Some(ttft), _) if streams => Aim::FirstToken { within: ttft.threshold, lead: predicted.ttft },
            (_, Some(within)) => {
                let usual = self.fleet.usual_length(&self.pool.id, within).unwrap_or(u64::MAX);
                let further = decode.0.saturating_sub(1).min(usual) as u32;
                let service = predicted.ttft + predicted.tpot * further;
                Aim::Whole { within, service }
            }
            (_, None) => Aim::Whenever,
        };
        let threshold = |objective: Option<crate::judge::Objective>| objective.map(|objective| objective.threshold);
        let aims = match streams {
            true => Aims {
                ttft: threshold(objectives.ttft),
                tpot: threshold(objectives.tpot),
                e2e: threshold(objectives.e2e),
            },
            false => Aims { ttft: None, tpot: None, e2e: whole },
        };
        let queue = self.settings.queue_of(class);
        let wanted = Wanted {
            input: size.prefill,
            output: arrival.cap.map_or(Output::Assumed(expected), |cap| Output::Stated(Tokens(cap))),
        };
        let reservation = self.ledger.reserve(&arrival.tenant, "sim", &wanted, arrival.at).ok();
        let standing =
            if reservation.is_some() && !in_force.defer { Standing::WithinLimits } else { Standing::OverLimit };
        let ask = Ask {
            tenant: arrival.tenant.clone(),
            rank: class.priority(),
            arrival: arrival.at,
            aim,
            tokens: size.prefill + size.decode,
            prompt: uncached,
            leave_by: arrival.at + queue.max_wait,
            when_hopeless: queue.when_hopeless,
            standing,
        };
        let (ticket, moves) = self.scheduler.offer(&ask, arrival.at);
        let promised_whole = threshold(objectives.e2e);
        let waiting =
            Waiting { visit, arrival: arrival.at, bytes, size, blocks, aims, promised_whole, streams, reservation };
        self.waiting.insert(ticket, waiting);
        self.tickets.insert(visit, ticket);
        self.follow(moves, arrival.at, steps);
    }

    fn read(&mut self, ticket: Ticket, at: Tick, steps: &mut Steps) {
        let moves = self.scheduler.read(ticket, at);
        self.follow(moves, at, steps);
    }

    fn freed(&mut self, mut hold: Hold, answer: Option<&Timeline>, used: Used, at: Tick, steps: &mut Steps) {
        if answer.is_some() {
            self.answers(&mut hold, at);
        }
        if let (Some(bytes), Some(_)) = (hold.bytes, answer) {
            let known = self.ratios.of(Some(MODEL));
            let learned = self.ratios.of_answer(&known, Some(MODEL), true);
            learned.expect("the settings name the model").prompt(text(bytes), used.input);
        }
        match (hold.work, answer) {
            (Some(work), Some(answer)) => work.learned(&lesson(answer, hold.dispatched), at),
            (work, _) => drop(work),
        }
        if let Some(reservation) = hold.reservation {
            reservation.settle(used, at);
        }
        if let Some(ticket) = hold.ticket {
            let moves = self.scheduler.release(ticket, used.input + used.output, at);
            self.follow(moves, at, steps);
        }
    }

    /// A response starts: a first token, or a complete non-streaming response.
    fn answers(&mut self, hold: &mut Hold, at: Tick) {
        if let Some(mut tried) = hold.tried.take() {
            tried.attempts.first_token();
            self.fleet.succeeded(&self.pool.id, &mut tried.attempts, Injection::None, at);
        }
    }

    fn failed(&mut self, visit: usize, mut hold: Hold, how: Happened, at: Tick, steps: &mut Steps) {
        let spent = at - hold.dispatched;
        drop(hold.work.take());
        let again = hold.tried.take().and_then(|mut tried| {
            let next = self.fleet.failed(&self.pool.id, &mut tried.attempts, how, at);
            if !matches!(next, Next::Another | Next::SameFresh) {
                return None;
            }
            let want = Want { spent: tried.want.spent + spent, ..tried.want };
            let choice = self.fleet.choose(&self.pool.id, &mut tried.attempts, want, at)?;
            Some((choice, tried))
        });
        match again {
            Some((choice, tried)) => {
                let engine = self.places[&choice.engine];
                let hold = Hold { work: Some(choice.work), tried: Some(tried), expected: None, ..hold };
                steps.go.push(Go { visit, engine, hold });
            }
            None => {
                self.freed(hold, None, Used::default(), at, steps);
                steps.lost.push(visit);
            }
        }
        self.count_seats(at, steps);
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

    fn wake(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick, steps: &mut Steps) {
        if at >= self.check_at {
            self.check(&gauges, at, steps);
        }
        if at >= self.report_at {
            self.scrape(gauges, at);
        }
        while let Some(Reverse((_, visit))) = self.reads.peek().copied().filter(|Reverse((due, _))| *due <= at) {
            self.reads.pop();
            steps.read.push(visit);
        }
        if at >= self.pace_at {
            self.pace_at = at + PACE_EVERY;
            let pace = self.fleet.keep_pace(&self.pool.id, at);
            let moves = self.scheduler.set_pace(pace, at);
            self.follow(moves, at, steps);
        } else {
            let moves = self.scheduler.expire(at);
            self.follow(moves, at, steps);
        }
    }

    /// Health checks.
    fn check(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick, steps: &mut Steps) {
        self.check_at = at + self.pool.health.as_ref().map_or(SCRAPE_EVERY, |health| health.every);
        for (number, name) in self.names.iter().enumerate() {
            let checked = gauges(self.from + number).map_or(Checked::Refused, |_| Checked::Well);
            let _change = self.fleet.checked(&self.pool.id, name, checked, at);
        }
        let available = self.fleet.available(&self.pool.id, at);
        let moves = self.scheduler.set_readers(available.max(1), at);
        self.follow(moves, at, steps);
    }

    /// Scrapes of the engines' metrics.
    fn scrape(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick) {
        self.report_at = at + SCRAPE_EVERY;
        for (number, name) in self.names.iter().enumerate() {
            let Some(said) = gauges(self.from + number) else { continue };
            let report = Report {
                waiting: Some(said.waiting as f64),
                running: Some(said.running as f64),
                kv_usage: Some(said.kv_usage),
                asleep: false,
            };
            self.fleet.reported(&self.pool.id, name, report, at);
        }
    }

    fn follow(&mut self, moves: Moves, at: Tick, steps: &mut Steps) {
        for away in moves.refused {
            if let Some(waiting) = self.waiting.remove(&away.ticket) {
                self.tickets.remove(&waiting.visit);
                steps.refused.push(waiting.visit);
            }
        }
        for ticket in moves.admitted {
            self.dispatch(ticket, at, steps);
        }
        self.count_seats(at, steps);
    }

    fn dispatch(&mut self, ticket: Ticket, at: Tick, steps: &mut Steps) {
        let Some(waiting) = self.waiting.remove(&ticket) else { return };
        let Waiting { visit, arrival, bytes, size, blocks, aims, promised_whole, streams, reservation } = waiting;
        self.tickets.remove(&visit);
        let mut attempts = Attempts::new(&self.pool, Tick::from_nanos(u64::MAX));
        let want = Want { size, aims, whole: promised_whole, spent: at - arrival, key: 0 };
        let yard = self.fleet.yard(&self.pool.id).expect("its pool is followed");
        let Some(choice) = yard.choose(&mut attempts, want, &blocks, true, at) else {
            let hold = Hold { ticket: Some(ticket), reservation, dispatched: at, ..Hold::default() };
            self.freed(hold, None, Used::default(), at, steps);
            return steps.lost.push(visit);
        };
        let expected = at + choice.work.time_to_read();
        if !streams {
            self.reads.push(Reverse((expected, visit)));
        }
        let over_limit = reservation.is_none();
        let hold = Hold {
            ticket: Some(ticket),
            work: Some(choice.work),
            reservation,
            dispatched: at,
            expected: Some(expected),
            bytes,
            tried: Some(Box::new(Tried { attempts, want })),
            grade: 0,
            attempts: 0,
            over_limit,
            spilled: self.from > 0,
        };
        steps.go.push(Go { visit, engine: self.places[&choice.engine], hold });
    }

    /// Updates the scheduler to the engines' seats.
    fn count_seats(&mut self, at: Tick, steps: &mut Steps) {
        let changes = self.fleet.seat_changes();
        if changes != self.seat_changes {
            self.seat_changes = changes;
            let seats = self.fleet.seats(&self.pool.id, at).unwrap_or(usize::MAX);
            let moves = self.scheduler.set_seats(seats, at);
            self.follow(moves, at, steps);
        }
    }
}

/// Interval of scrapes.
const SCRAPE_EVERY: Duration = Duration::from_secs(2);

/// The model served by all engines.
const MODEL: &str = "sim";

/// A prompt of this many bytes of text.
fn text(bytes: u64) -> PromptSize {
    PromptSize { bytes, is_known: true, ..PromptSize::default() }
}

/// What an answer teaches about its engine.
fn lesson(answer: &Timeline, dispatched: Tick) -> Lesson {
    Lesson {
        ttft: answer.first_token.map(|at| at - dispatched),
        tpot: answer.tpot(),
        e2e: answer.finish.map(|at| at - dispatched),
        further: answer.output.0.saturating_sub(1),
        cached: None,
    }
}

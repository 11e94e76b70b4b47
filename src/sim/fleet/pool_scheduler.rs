//! One pool of a simulated gateway: its own queue and choice of engines, on a simulated clock.
//!
//! Requests that their pool does not serve are collected as [`LeavingRequest`]s if their route has a later pool;
//! `gateway_pools` decides whether they go on.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::effects::{DispatchedRequest, Effects, EngineHold, GatewayNews, GatewayReplica};
use super::mix::{Arrival, Mix, MixClass, PromptLength};
use super::routed_request::{PriorAttempts, RoutedRequest};
use super::scheduling::GatewayScheduling;
use crate::admit::limit::Used;
use crate::admit::overload_control::ActiveActions;
use crate::admit::queue::{
    ClassQueue, Deadline, Decisions, LimitState, PrefillBudget, QueueRequest, RejectReason, Scheduler, Ticket,
};
use crate::admit::spill::CurrentQueue;
use crate::inspect::{PromptSize, Ratios};
use crate::judge::Objectives;
use crate::observe::Timeline;
use crate::route::retry::{AttemptOutcome, Attempts, Injection, RetryDecision};
use crate::route::settings::{Concurrency, EngineAddress, EngineSource, PoolSettings, Scheme};
use crate::route::{
    EngineMetrics, Fleet, LatencySample, PickRequest, PoolTargets, Prediction, ProbeResult, SloTargets, WorkEstimate,
    WorkGuard,
};
use crate::sim::engine::Gauges;
use crate::types::{EngineId, Tick, Tokens};

/// The queue and the engines of one pool.
pub(super) struct PoolScheduler {
    /// Index among the pools.
    number: usize,
    scheduler: Scheduler,
    /// Learned bytes per token.
    ratios: Ratios,
    fleet: Fleet,
    pool: PoolSettings,
    seat_changes: u64,
    /// Index of its first engine.
    from: usize,
    names: Vec<EngineId>,
    places: HashMap<EngineId, usize>,
    waiting: HashMap<Ticket, Box<RoutedRequest>>,
    tickets: HashMap<usize, Ticket>,
    /// Estimated ends of prefill for requests without an observable first token.
    reads: BinaryHeap<Reverse<(Tick, usize)>>,
    report_at: Tick,
    check_at: Tick,
    pace_at: Tick,
    leaving: VecDeque<LeavingRequest>,
}

/// Interval at which seats and pace follow the model, as in the gateway.
const PACE_EVERY: Duration = Duration::from_millis(100);

/// A request that its pool does not serve, and whose route has a later pool.
pub(super) enum LeavingRequest {
    /// The queue refused it; `at_once`: without a wait.
    Refused { request: Box<RoutedRequest>, why: RejectReason, at_once: bool },
    /// It has a seat in a pool that has no engine.
    Stranded(Box<RoutedRequest>, Ticket),
    /// No engine took it. It still has its seat.
    Unserved(Box<RoutedRequest>, Ticket),
}

/// Properties of an arrival for its entry in queues.
pub(super) struct RequestTerms<'a> {
    pub in_force: ActiveActions,
    pub queue: ClassQueue,
    pub limit_state: LimitState,
    pub class: &'a MixClass,
    pub streams: bool,
}

impl PoolScheduler {
    pub fn new(
        number: usize,
        pool: PoolSettings,
        settings: &GatewayScheduling,
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
        let mut pool = PoolSettings { engines: EngineSource::Static(addresses), ..pool };
        pool.queue.reading = match pool.concurrency {
            // Without seats the gateway has no queue.
            Concurrency::Unlimited => PrefillBudget::NoLimit,
            _ => pool.queue.reading.shared_among(gateway.of),
        };
        let fleet = Fleet::new(mix.seed ^ gateway.number as u64);
        fleet.share_among(gateway.of);
        fleet.apply_settings(&[Arc::new(pool.clone())], at);
        let classes = mix.classes.iter().filter(|class| settings.reach_of(&class.class).all.contains(&pool.id));
        fleet.set_targets(&pool.id, targets_of(classes.map(MixClass::objectives)));
        let mut desk = PoolScheduler {
            number,
            scheduler: Scheduler::new(pool.queue.clone()),
            ratios: Ratios::new(),
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
            leaving: VecDeque::new(),
        };
        let _nobody_waits = desk.scheduler.set_prefilling_engines(engines.len(), at);
        desk.count_seats(at, &mut Effects::default());
        desk
    }

    /// Its settings.
    pub fn pool(&self) -> &PoolSettings {
        &self.pool
    }

    /// Waiting requests.
    pub fn waiting(&self) -> usize {
        self.scheduler.waiting()
    }

    /// Seats, if limited.
    pub fn seats(&self, at: Tick) -> Option<usize> {
        self.fleet.seats(&self.pool.id, at)
    }

    /// The scheduler, for its measures.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Engines that take requests.
    pub fn available(&self, at: Tick) -> usize {
        self.fleet.available(&self.pool.id, at)
    }

    /// The oldest request that may go on to another pool.
    pub fn next_leaving(&mut self) -> Option<LeavingRequest> {
        self.leaving.pop_front()
    }

    /// The request as queues see it. It begins in this pool, and its route is still to be set.
    pub fn request(&self, visit: usize, arrival: &Arrival, terms: &RequestTerms<'_>) -> RoutedRequest {
        let RequestTerms { in_force, queue, limit_state, class, streams } = *terms;
        let objectives = class.objectives();
        let expected = in_force.cap.unwrap_or(Tokens(u64::MAX)).min(objectives.default_output());
        let decode = arrival.cap.map_or(expected, |cap| Tokens(cap).min(expected));
        let (prefill, bytes) = self.prompt(arrival);
        let size = WorkEstimate { prefill, decode };
        let blocks = arrival.beginning();
        let uncached = self.fleet.uncached(&self.pool.id, prefill, &blocks);
        let lead = WorkEstimate { prefill: uncached, ..size };
        let predicted = self.fleet.predict(&self.pool.id, lead, arrival.at);
        let predicted = predicted.unwrap_or(Prediction { ttft: Duration::ZERO, tpot: Duration::ZERO });
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
        let entry = QueueRequest {
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
        RoutedRequest {
            visit,
            entry,
            reservation: None,
            route: vec![self.number],
            place: 0,
            since: arrival.at,
            bytes,
            size,
            blocks,
            targets,
            promised_whole: threshold(objectives.e2e),
            streams,
            attempts: None,
        }
    }

    /// Prompt tokens as the gateway estimates them, and the bytes that they are estimated by.
    pub fn prompt(&self, arrival: &Arrival) -> (Tokens, Option<u64>) {
        match arrival.shown {
            PromptLength::Tokens(tokens) => (Tokens(tokens), None),
            PromptLength::Bytes(bytes) => {
                let per_token = self.ratios.of(Some(MODEL), ALL).bytes_per_token();
                (text(bytes).tokens(per_token), Some(bytes))
            }
        }
    }

    /// Offers a request to the queue. True if it waits there.
    pub fn offer(&mut self, mut request: Box<RoutedRequest>, at: Tick, effects: &mut Effects) -> bool {
        let visit = request.visit;
        request.since = at;
        let (ticket, decisions) = self.scheduler.offer(&request.entry, at);
        self.waiting.insert(ticket, request);
        self.tickets.insert(visit, ticket);
        self.follow_after(Some(ticket), decisions, at, effects);
        self.waiting.contains_key(&ticket)
    }

    /// A free seat that no request waits for.
    pub fn free_seat(&mut self, entry: &QueueRequest, at: Tick) -> Option<Ticket> {
        self.scheduler.take_free_seat(entry, at)
    }

    /// Expected wait of a request that came here now.
    pub fn expected_wait_for(&self, entry: &QueueRequest, at: Tick) -> Option<Duration> {
        self.scheduler.expected_wait_for(entry, at)
    }

    /// The state of the queue for one of its requests; `None` if the request left.
    pub fn queue_of(&self, visit: usize, at: Tick) -> Option<(&RoutedRequest, CurrentQueue)> {
        let ticket = self.tickets.get(&visit)?;
        let request = self.waiting.get(ticket)?;
        let has_engine = self.available(at) > 0;
        let expected_wait = self.scheduler.expected_wait_of(*ticket, at).filter(|_| has_engine);
        Some((request, CurrentQueue { has_engine, expected_wait, waited: at - request.since }))
    }

    /// Takes a request out of the queue.
    pub fn take(&mut self, visit: usize, at: Tick) -> Option<Box<RoutedRequest>> {
        let ticket = self.tickets.remove(&visit)?;
        self.scheduler.withdraw(ticket, at);
        self.waiting.remove(&ticket)
    }

    /// Gives back a seat that no engine was asked with.
    pub fn give_back(&mut self, ticket: Ticket, at: Tick, effects: &mut Effects) {
        let decisions = self.scheduler.release(ticket, Tokens::ZERO, at);
        self.follow(decisions, at, effects);
    }

    /// Whether the retry budget allows an attempt.
    pub fn grants_retry(&self, at: Tick) -> bool {
        self.fleet.grants_retry(&self.pool.id, at)
    }

    /// Ends a request that no engine takes.
    pub fn lose(&mut self, request: RoutedRequest, ticket: Ticket, at: Tick, effects: &mut Effects) {
        let RoutedRequest { visit, reservation, .. } = request;
        let hold = EngineHold { ticket: Some(ticket), reservation, dispatched: at, ..EngineHold::default() };
        self.freed(hold, None, Used::default(), at, effects);
        effects.lost.push(visit);
    }

    /// Chooses an engine for a request that has its seat.
    pub fn seated(&mut self, mut request: Box<RoutedRequest>, ticket: Ticket, at: Tick, effects: &mut Effects) {
        let mut attempts = match request.attempts.take() {
            None => Attempts::new(&self.pool, Tick::from_nanos(u64::MAX)),
            Some(mut earlier) => {
                earlier.enter(&self.pool);
                earlier
            }
        };
        let RoutedRequest { size, targets, promised_whole, .. } = *request;
        let pick = PickRequest { size, targets, whole: promised_whole, spent: at - request.entry.arrival, key: 0 };
        let live_pool = self.fleet.live_pool(&self.pool.id).expect("its pool is followed");
        let Some(choice) = live_pool.choose(&mut attempts, pick, &request.blocks, true, at) else {
            if request.has_further() {
                self.fleet.settle(&self.pool.id, &mut attempts, at);
                request.attempts = Some(attempts);
                return self.leaving.push_back(LeavingRequest::Unserved(request, ticket));
            }
            return self.lose(*request, ticket, at, effects);
        };
        let expected = at + choice.work.time_to_read();
        let visit = request.visit;
        if !request.streams {
            self.reads.push(Reverse((expected, visit)));
        }
        let reservation = request.reservation.take();
        let hold = EngineHold {
            ticket: Some(ticket),
            work: Some(choice.work),
            over_limit: reservation.is_none(),
            reservation,
            dispatched: at,
            expected: Some(expected),
            bytes: request.bytes,
            desk: self.number,
            went_on: request.place > 0,
            tried: Some(Box::new(PriorAttempts {
                attempts,
                pick,
                request: Some(request).filter(|one| one.has_further()),
            })),
            ..EngineHold::default()
        };
        effects.go.push(DispatchedRequest { visit, engine: self.places[&choice.engine], hold });
    }

    /// A request's prompt is prefilled, or believed to be.
    pub fn read(&mut self, ticket: Ticket, at: Tick, effects: &mut Effects) {
        let decisions = self.scheduler.read(ticket, at);
        self.follow(decisions, at, effects);
    }

    /// An engine is done with a request; with a timeline if it was served.
    pub fn freed(
        &mut self,
        mut hold: EngineHold,
        answer: Option<&Timeline>,
        used: Used,
        at: Tick,
        effects: &mut Effects,
    ) {
        if answer.is_some() {
            self.answers(&mut hold, at);
        }
        if let (Some(bytes), Some(_)) = (hold.bytes, answer) {
            let known = self.ratios.of(Some(MODEL), ALL);
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
    pub fn answers(&mut self, hold: &mut EngineHold, at: Tick) {
        if let Some(mut tried) = hold.tried.take() {
            tried.attempts.first_token();
            self.fleet.succeeded(&self.pool.id, &mut tried.attempts, Injection::None, at);
        }
    }

    /// An engine did not accept a request, or failed before its response.
    pub fn failed(&mut self, visit: usize, mut hold: EngineHold, how: AttemptOutcome, at: Tick, effects: &mut Effects) {
        let spent = at - hold.dispatched;
        drop(hold.work.take());
        match hold.tried.take().map(|tried| self.again(*tried, spent, how, at)) {
            Some(Ok((engine, work, tried))) => {
                let hold = EngineHold { work: Some(work), tried: Some(Box::new(tried)), expected: None, ..hold };
                effects.go.push(DispatchedRequest { visit, engine, hold });
            }
            Some(Err(Some(mut request))) => {
                request.reservation = hold.reservation.take();
                let ticket = hold.ticket.take().expect("it was dispatched with a seat");
                self.leaving.push_back(LeavingRequest::Unserved(request, ticket));
            }
            Some(Err(None)) | None => {
                self.freed(hold, None, Used::default(), at, effects);
                effects.lost.push(visit);
            }
        }
        self.count_seats(at, effects);
    }

    /// Another attempt in this pool; if there is none, the request if it may go on to a later pool.
    fn again(
        &mut self,
        tried: PriorAttempts,
        spent: Duration,
        how: AttemptOutcome,
        at: Tick,
    ) -> Result<(usize, Box<WorkGuard>, PriorAttempts), Option<Box<RoutedRequest>>> {
        let PriorAttempts { mut attempts, pick, request } = tried;
        let next = self.fleet.failed(&self.pool.id, &mut attempts, how, at);
        if matches!(next, RetryDecision::Another | RetryDecision::SameFresh) {
            let pick = PickRequest { spent: pick.spent + spent, ..pick };
            if let Some(choice) = self.fleet.choose(&self.pool.id, &mut attempts, pick, at) {
                let engine = self.places[&choice.engine];
                return Ok((engine, choice.work, PriorAttempts { attempts, pick, request }));
            }
        }
        // Failures that look like the request's own are not spread, as in the gateway.
        let may_leave = matches!(how, AttemptOutcome::ConnectFailed | AttemptOutcome::PushBack { .. });
        let mut request = request.filter(|_| may_leave && !attempts.failed_alike()).ok_or(None)?;
        self.fleet.settle(&self.pool.id, &mut attempts, at);
        request.attempts = Some(attempts);
        Err(Some(request))
    }

    /// A waiting request's client left.
    pub fn withdraw(&mut self, visit: usize, at: Tick) {
        if let Some(ticket) = self.tickets.remove(&visit) {
            self.waiting.remove(&ticket);
            self.scheduler.withdraw(ticket, at);
        }
    }

    /// When [`PoolScheduler::wake`] must be called.
    pub fn next_moment(&self) -> Option<Tick> {
        let read = self.reads.peek().map(|Reverse((at, _))| *at);
        let looks = [self.report_at, self.check_at, self.pace_at].map(Some);
        let waits = [self.scheduler.next_deadline(), self.scheduler.next_refill(), read];
        looks.into_iter().chain(waits).flatten().min()
    }

    /// Advances time.
    pub fn wake(&mut self, gauges: impl Fn(usize) -> Option<Gauges>, at: Tick, effects: &mut Effects) {
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

    /// What the other gateways need to know.
    pub fn tells(&self, at: Tick) -> GatewayNews {
        GatewayNews { queue: self.scheduler.report(at), engines: self.fleet.shares(&self.pool.id, at) }
    }

    /// What another gateway told.
    pub fn hears(
        &mut self,
        from: u64,
        news: &GatewayNews,
        (made, until): (Tick, Tick),
        at: Tick,
        effects: &mut Effects,
    ) {
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
        self.follow_after(None, decisions, at, effects);
    }

    /// `offered`: the ticket whose offer led to these decisions.
    fn follow_after(&mut self, offered: Option<Ticket>, decisions: Decisions, at: Tick, effects: &mut Effects) {
        for away in decisions.refused {
            let Some(request) = self.waiting.remove(&away.ticket) else { continue };
            self.tickets.remove(&request.visit);
            if request.has_further() {
                let at_once = offered == Some(away.ticket);
                self.leaving.push_back(LeavingRequest::Refused { request, why: away.why, at_once });
            } else {
                effects.refused.push(request.visit);
            }
        }
        for ticket in decisions.admitted {
            let Some(request) = self.waiting.remove(&ticket) else { continue };
            self.tickets.remove(&request.visit);
            if request.has_further() && self.available(at) == 0 {
                self.leaving.push_back(LeavingRequest::Stranded(request, ticket));
            } else {
                self.seated(request, ticket, at, effects);
            }
        }
        self.count_seats(at, effects);
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

/// The strictest targets of the classes that use a pool.
fn targets_of(classes: impl Iterator<Item = Objectives>) -> PoolTargets {
    let objectives: Vec<Objectives> = classes.collect();
    let attainments = objectives.iter().flat_map(|class| [class.ttft, class.tpot, class.e2e]).flatten();
    PoolTargets {
        ttft: objectives.iter().filter_map(|class| class.ttft).map(|ttft| ttft.threshold).min(),
        tpot: objectives.iter().filter_map(|class| class.tpot).map(|tpot| tpot.threshold).min(),
        e2e: objectives.iter().any(|class| class.e2e.is_some()),
        attainment: attainments.map(|objective| objective.attainment).fold(0.0, f64::max),
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

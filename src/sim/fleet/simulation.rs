//! The event loop of a run: engines, clients, and a policy between them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::iter::Peekable;
use std::num::NonZeroU32;
use std::time::Duration;

use super::effects::{DispatchedRequest, Effects, EngineHold, GatewayNews, GatewayReplica};
use super::mix::{Arrival, Flood, Mix};
use super::policy::{Frontend, Policy};
use super::report::{EngineTotals, RequestReport, RunReport, StateSample};
use crate::admit::limit::Used;
use crate::judge::{Excluded, JudgeContext, Missed, Outcome, Progress, judge, judge_left, judge_refused};
use crate::observe::{Choice, Ending, Gaps, ResponseFormat, Timeline, TokenSource, Usage};
use crate::route::retry::AttemptOutcome;
use crate::sim::engine::Gauges;
use crate::sim::engine::core::{EngineCore, EngineSpec, Job, JobId, LeapingEngine, TokenGain};
use crate::types::{Dialect, Tick, Tokens};

/// Duration of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunSpan {
    /// Warm-up, whose arrivals are not counted.
    pub warm_up: Duration,
    /// Measured interval.
    pub measured: Duration,
    /// Arrivals continue for this long, so that measured requests end under load as well.
    pub after: Duration,
}

impl RunSpan {
    fn whole(&self) -> Duration {
        self.warm_up.saturating_add(self.measured).saturating_add(self.after)
    }

    fn counts(&self, at: Tick) -> bool {
        let begin = Tick::ZERO + self.warm_up;
        at >= begin && at < begin + self.measured
    }
}

/// Runs a mix at this rate, requests per second.
#[must_use]
pub fn run(mix: &Mix, policy: &Policy, rate: f64, span: &RunSpan) -> RunReport {
    Simulation::new(mix, policy, mix.arrivals(rate, span.whole()).into_iter(), *span).run()
}

/// The same with a scenario.
#[must_use]
pub fn run_in(mix: &Mix, policy: &Policy, rate: f64, span: &RunSpan, scenario: &Scenario) -> RunReport {
    let mut arrivals = mix.arrivals(rate, span.whole());
    for flood in &scenario.floods {
        arrivals.extend(mix.flood(flood, rate, span.whole()));
    }
    arrivals.sort_by_key(|arrival| arrival.at);
    Simulation::in_scenario(mix, policy, arrivals.into_iter(), *span, scenario).run()
}

/// Events beside the workload.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Number of gateways that share the engines and get requests in turn.
    pub gateways: NonZeroU32,
    /// How gateways hear of each other; `None`: only by what engines report.
    pub exchange: Option<GatewayLink>,
    /// Whether clients wait without limit.
    pub patient: bool,
    /// Tenants that suddenly ask for more.
    pub floods: Vec<Flood>,
    /// Events of engines and gateways.
    pub events: Vec<(Duration, Incident)>,
}

impl Default for Scenario {
    /// One gateway, without events.
    fn default() -> Self {
        Scenario { gateways: NonZeroU32::MIN, exchange: None, patient: false, floods: Vec::new(), events: Vec::new() }
    }
}

/// How gateways hear of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayLink {
    /// Interval at which each one tells the others.
    pub every: Duration,
    /// How long what it tells is under way.
    pub delay: Duration,
}

impl Default for GatewayLink {
    /// As through a store: every 50 ms, 25 ms and half a millisecond under way.
    fn default() -> Self {
        GatewayLink { every: Duration::from_millis(50), delay: Duration::from_micros(25_500) }
    }
}

/// Intervals for which what a gateway told counts.
const EXCHANGE_COUNTS: u32 = 3;

/// An event of an engine or gateway.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Incident {
    /// An engine restarts: its requests fail, its cache is lost, and it is down for a while.
    EngineRestarts {
        /// The engine.
        engine: usize,
        /// Downtime.
        down: Duration,
    },
    /// An engine becomes slower.
    EngineSlows {
        /// The engine.
        engine: usize,
        /// Factor relative to its properties.
        times: f64,
    },
    /// A gateway restarts: its requests fail, and what it learned is lost.
    GatewayRestarts {
        /// The gateway.
        gateway: usize,
    },
}

/// What the engines did with a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplayEnd {
    /// Their counters, in order: those of the first pool, then those of the further ones.
    pub engines: Vec<EngineTotals>,
    /// When the last request ended, from the first one's arrival.
    pub ended: Tick,
    /// Most requests that were open at one time.
    pub most_open: usize,
}

/// Replays a trace in virtual time. Engines take decoding steps in leaps, requests are held only while they are
/// open, and each is told as it ends: a trace of any length takes the same memory.
///
/// `arrivals` are in order of time; `shape` gives each engine what it is made of, and `prefix_block` is the length of the
/// blocks by which the trace tells that prompts begin alike.
pub fn replay(
    mix: &Mix,
    policy: &Policy,
    arrivals: impl Iterator<Item = Arrival>,
    shape: &EngineSpec,
    prefix_block: u64,
    scenario: &Scenario,
    mut on_end: impl FnMut(&RequestReport),
) -> ReplayEnd {
    let span = RunSpan { warm_up: Duration::ZERO, measured: Duration::MAX, after: Duration::ZERO };
    let engine = |_: usize| FleetEngine::Leaps(LeapingEngine::new(shape.clone(), prefix_block));
    let mut world = Simulation::with_engines(mix, policy, arrivals, span, scenario, Box::new(engine));
    world.on_end = Some(&mut on_end);
    world.play();
    ReplayEnd { engines: world.totals, ended: world.ended, most_open: world.most_open }
}

/// The rate at which the engines finish requests of this mix when saturated: first come, first served, full
/// batches, and clients without time limits. Defines load
/// 1.
#[must_use]
pub fn capacity(mix: &Mix, span: &RunSpan) -> f64 {
    // More than any such engine can serve.
    let mut rate = 8.0 * mix.engines as f64;
    loop {
        let mut world =
            Simulation::new(mix, &Policy::LeastConnections, mix.arrivals(rate, span.whole()).into_iter(), *span);
        world.patient = true;
        world.ends_with_the_span = true;
        let finished = world.run().finished as f64 / span.measured.as_secs_f64();
        if finished < 0.75 * rate {
            return finished;
        }
        rate *= 2.0;
    }
}

/// One request.
struct SimRequest {
    arrival: Arrival,
    stage: SimStage,
    first_token: Option<Tick>,
    last_token: Option<Tick>,
    events: u64,
    tokens: u64,
    cap_lowered: bool,
    /// When an engine first got it.
    dispatched: Option<Tick>,
    /// The last engine that got it, and whether its pool was not the first of the route.
    engine: Option<(usize, bool)>,
}

enum SimStage {
    /// In the gateway's queue.
    Waits,
    /// At an engine.
    Runs { engine: usize, job: Option<JobId>, hold: Box<EngineHold> },
    /// Judged.
    Over,
}

/// An engine of the fleet.
enum FleetEngine {
    /// One step after the other: every token is told.
    Steps(EngineCore),
    /// In leaps: first tokens and ends are.
    Leaps(LeapingEngine),
}

impl FleetEngine {
    fn submit(&mut self, job: Job, at: Tick) -> JobId {
        let submitted = match self {
            FleetEngine::Steps(engine) => engine.submit(job, at),
            FleetEngine::Leaps(engine) => engine.submit(job, at),
        };
        submitted.expect("the engine's queue has no end")
    }

    fn cancel(&mut self, job: JobId, at: Tick) {
        match self {
            FleetEngine::Steps(engine) => engine.cancel(job),
            FleetEngine::Leaps(engine) => engine.cancel(job, at),
        }
    }

    fn set_speed(&mut self, speed: f64, at: Tick) {
        match self {
            FleetEngine::Steps(engine) => engine.set_speed(speed),
            FleetEngine::Leaps(engine) => engine.set_speed(speed, at),
        }
    }

    fn advance(&mut self, at: Tick, gains: &mut Vec<TokenGain>) {
        match self {
            FleetEngine::Steps(engine) => engine.advance(at, gains),
            FleetEngine::Leaps(engine) => engine.advance(at, gains),
        }
    }

    fn next_moment(&self) -> Option<Tick> {
        match self {
            FleetEngine::Steps(engine) => engine.next_moment(),
            FleetEngine::Leaps(engine) => engine.next_moment(),
        }
    }

    fn gauges(&self) -> Gauges {
        match self {
            FleetEngine::Steps(engine) => engine.gauges(),
            FleetEngine::Leaps(engine) => engine.gauges(),
        }
    }
}

/// Requests that have arrived, by number; those at the front that are over are forgotten.
#[derive(Default)]
struct Visits {
    first: usize,
    held: VecDeque<SimRequest>,
}

impl Visits {
    /// One more than the last number.
    fn arrived(&self) -> usize {
        self.first + self.held.len()
    }

    fn get(&self, number: usize) -> Option<&SimRequest> {
        self.held.get(number.checked_sub(self.first)?)
    }

    fn forget(&mut self) {
        while self.held.front().is_some_and(|visit| matches!(visit.stage, SimStage::Over)) {
            self.held.pop_front();
            self.first += 1;
        }
    }
}

impl std::ops::Index<usize> for Visits {
    type Output = SimRequest;

    fn index(&self, number: usize) -> &SimRequest {
        &self.held[number - self.first]
    }
}

impl std::ops::IndexMut<usize> for Visits {
    fn index_mut(&mut self, number: usize) -> &mut SimRequest {
        &mut self.held[number - self.first]
    }
}

/// When engines have something to do, the earliest first. An entry counts while it is the engine's last.
struct Timers {
    heap: BinaryHeap<Reverse<(Tick, usize)>>,
    due: Vec<Option<Tick>>,
}

impl Timers {
    fn set(&mut self, engine: usize, due: Option<Tick>) {
        if self.due[engine] != due {
            self.due[engine] = due;
            self.heap.extend(due.map(|due| Reverse((due, engine))));
        }
    }

    fn next(&mut self) -> Option<(Tick, usize)> {
        loop {
            let Reverse((due, engine)) = *self.heap.peek()?;
            if self.due[engine] == Some(due) {
                return Some((due, engine));
            }
            self.heap.pop();
        }
    }

    /// The engine's moment has come: whatever it says next is new.
    fn passed(&mut self, engine: usize) {
        self.heap.pop();
        self.due[engine] = None;
    }
}

struct Simulation<'a, A: Iterator<Item = Arrival>> {
    mix: &'a Mix,
    span: RunSpan,
    patient: bool,
    ends_with_the_span: bool,
    policy: &'a Policy,
    frontends: Vec<Frontend>,
    engines: Vec<FleetEngine>,
    make_engine: Box<dyn Fn(usize) -> FleetEngine + 'a>,
    timers: Timers,
    /// When an engine that is down comes back.
    back_at: BTreeMap<usize, Tick>,
    events: VecDeque<(Tick, Incident)>,
    jobs: Vec<HashMap<JobId, usize, ahash::RandomState>>,
    arrivals: Peekable<A>,
    visits: Visits,
    open: usize,
    most_open: usize,
    ended: Tick,
    /// Counters of the engines before their last restarts, and at the end those of all.
    totals: Vec<EngineTotals>,
    leaves: BinaryHeap<Reverse<(Tick, usize)>>,
    exchange: Option<GatewayLink>,
    /// When each gateway tells the others next.
    tells_at: Vec<Tick>,
    /// What is under way: when it arrives, from whom, and when it was told.
    under_way: VecDeque<(Tick, usize, Tick, Vec<GatewayNews>)>,
    look_at: Tick,
    gains: Vec<TokenGain>,
    report: RunReport,
    /// Who is told of each request as it ends; then the report keeps none, and nothing that grows.
    on_end: Option<&'a mut dyn FnMut(&RequestReport)>,
}

/// Next event; at equal moments in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum NextEvent {
    Befall,
    Return(usize),
    Step(usize),
    Wake(usize),
    Tell(usize),
    Hear,
    Leave,
    Arrive,
    Look,
}

/// Interval of the samples of seats and engines.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl<'a, A: Iterator<Item = Arrival>> Simulation<'a, A> {
    fn new(mix: &'a Mix, policy: &'a Policy, arrivals: A, span: RunSpan) -> Self {
        Simulation::in_scenario(mix, policy, arrivals, span, &Scenario::default())
    }

    fn in_scenario(mix: &'a Mix, policy: &'a Policy, arrivals: A, span: RunSpan, scenario: &Scenario) -> Self {
        let engine = |number: usize| FleetEngine::Steps(EngineCore::new(mix.shape(number), mix.seed ^ number as u64));
        Simulation::with_engines(mix, policy, arrivals, span, scenario, Box::new(engine))
    }

    fn with_engines(
        mix: &'a Mix,
        policy: &'a Policy,
        arrivals: A,
        span: RunSpan,
        scenario: &Scenario,
        make_engine: Box<dyn Fn(usize) -> FleetEngine + 'a>,
    ) -> Self {
        let further = if let Policy::Scheduled(settings) = policy { settings.further_engines() } else { 0 };
        let engines = mix.engines + further;
        let mut events: Vec<_> = scenario.events.iter().map(|(after, what)| (Tick::ZERO + *after, *what)).collect();
        events.sort_by_key(|(at, _)| *at);
        Simulation {
            mix,
            span,
            patient: scenario.patient,
            ends_with_the_span: false,
            policy,
            frontends: (0..scenario.gateways.get() as usize)
                .map(|number| Frontend::new(policy, mix, GatewayReplica { number, of: scenario.gateways }, Tick::ZERO))
                .collect(),
            back_at: BTreeMap::new(),
            events: events.into(),
            engines: (0..engines).map(&make_engine).collect(),
            make_engine,
            timers: Timers { heap: BinaryHeap::new(), due: vec![None; engines] },
            jobs: vec![HashMap::default(); engines],
            arrivals: arrivals.peekable(),
            visits: Visits::default(),
            open: 0,
            most_open: 0,
            ended: Tick::ZERO,
            totals: vec![EngineTotals::default(); engines],
            leaves: BinaryHeap::new(),
            exchange: scenario.exchange.filter(|_| scenario.gateways.get() > 1),
            // Each at another moment.
            tells_at: (0..scenario.gateways.get())
                .map(|number| {
                    let every = scenario.exchange.map_or(Duration::ZERO, |exchange| exchange.every);
                    Tick::ZERO + every * number / scenario.gateways.get()
                })
                .collect(),
            under_way: VecDeque::new(),
            look_at: Tick::ZERO,
            gains: Vec::new(),
            report: RunReport::new(mix, span.measured),
            on_end: None,
        }
    }

    fn run(mut self) -> RunReport {
        self.play();
        self.totals.iter().for_each(|engine| self.report.engines.add(engine));
        self.report
    }

    /// Plays to the end.
    fn play(&mut self) {
        let end = Tick::ZERO + self.span.whole();
        while let Some((at, event)) = self.next_event() {
            if self.ends_with_the_span && at > end {
                break;
            }
            let mut effects = Effects::default();
            match event {
                NextEvent::Befall => self.befall(at, &mut effects),
                NextEvent::Return(engine) => drop(self.back_at.remove(&engine)),
                NextEvent::Step(engine) => self.step(engine, at, &mut effects),
                NextEvent::Wake(number) => {
                    let Simulation { engines, back_at, frontends, .. } = &mut *self;
                    let gauges = |engine: usize| (!back_at.contains_key(&engine)).then(|| engines[engine].gauges());
                    frontends[number].wake(gauges, at, &mut effects);
                }
                NextEvent::Tell(number) => self.tell(number, at),
                NextEvent::Hear => self.hear(at, &mut effects),
                NextEvent::Leave => self.leave(at, &mut effects),
                NextEvent::Arrive => self.arrive(at, &mut effects),
                NextEvent::Look => self.look(at),
            }
            self.take(effects, at);
            self.visits.forget();
        }
        for (total, engine) in self.totals.iter_mut().zip(&self.engines) {
            total.add(&EngineTotals::of(&engine.gauges()));
        }
    }

    fn look(&mut self, at: Tick) {
        self.look_at = at + LOOK_EVERY;
        let of_engine = |engine: &FleetEngine| (engine.gauges().running, engine.gauges().waiting);
        let engines = self.engines.iter().map(of_engine).collect();
        let none = (Some(0), 0);
        let (seats, queued) = self
            .frontends
            .iter()
            .map(|frontend| frontend.seats(at))
            .fold(none, |sum, (seats, queued)| (sum.0.zip(seats).map(|(all, own)| all + own), sum.1 + queued));
        self.report.looks.push(StateSample { at, seats, queued, engines });
    }

    /// `None` if nothing is left to happen.
    fn next_event(&mut self) -> Option<(Tick, NextEvent)> {
        let arrival = self.arrivals.peek().map(|arrival| (arrival.at, NextEvent::Arrive));
        if arrival.is_none() && self.open == 0 {
            return None;
        }
        let step = self.timers.next().map(|(at, engine)| (at, NextEvent::Step(engine)));
        let wakes = self.frontends.iter().enumerate();
        let wakes = wakes.filter_map(|(number, frontend)| Some((frontend.next_moment()?, NextEvent::Wake(number))));
        let befall = self.events.front().map(|(at, _)| (*at, NextEvent::Befall));
        let returns = self.back_at.iter().map(|(number, at)| (*at, NextEvent::Return(*number)));
        let leave = self.leaves.peek().map(|Reverse((at, _))| (*at, NextEvent::Leave));
        let look = self.on_end.is_none().then_some((self.look_at, NextEvent::Look));
        let tells = self.tells_at.iter().enumerate().filter(|_| self.exchange.is_some());
        let tells = tells.map(|(number, at)| (*at, NextEvent::Tell(number)));
        let hears = self.under_way.front().map(|(at, ..)| (*at, NextEvent::Hear));
        let exchange = tells.chain(hears);
        step.into_iter()
            .chain(arrival)
            .chain(exchange)
            .chain(wakes)
            .chain(leave)
            .chain(look)
            .chain(befall)
            .chain(returns)
            .min()
    }

    fn tell(&mut self, number: usize, at: Tick) {
        let Some(exchange) = self.exchange else { return };
        self.tells_at[number] = at + exchange.every;
        self.under_way.push_back((at + exchange.delay, number, at, self.frontends[number].tells(at)));
    }

    fn hear(&mut self, at: Tick, effects: &mut Effects) {
        let Some((_, from, made, news)) = self.under_way.pop_front() else { return };
        let Some(exchange) = self.exchange else { return };
        let until = made + exchange.every * EXCHANGE_COUNTS;
        for number in (0..self.frontends.len()).filter(|number| *number != from) {
            self.frontends[number].hears(from, &news, (made, until), at, effects);
        }
    }

    fn arrive(&mut self, at: Tick, effects: &mut Effects) {
        let Some(arrival) = self.arrivals.next() else { return };
        let number = self.visits.arrived();
        self.open += 1;
        self.most_open = self.most_open.max(self.open);
        if !self.patient {
            let streams = self.mix.flows[arrival.flow].streams;
            let leaves = at + self.mix.class_of(arrival.flow).patience(streams);
            self.leaves.push(Reverse((leaves, number)));
        }
        self.visits.held.push_back(SimRequest {
            arrival,
            stage: SimStage::Waits,
            first_token: None,
            last_token: None,
            events: 0,
            tokens: 0,
            cap_lowered: false,
            dispatched: None,
            engine: None,
        });
        self.degrade(number);
        let gateway = number % self.frontends.len();
        self.frontends[gateway].arrive(number, &self.visits[number].arrival, self.mix, effects);
    }

    fn frontend(&mut self, number: usize) -> &mut Frontend {
        let gateways = self.frontends.len();
        &mut self.frontends[number % gateways]
    }

    fn befall(&mut self, at: Tick, effects: &mut Effects) {
        match self.events.pop_front() {
            Some((_, Incident::EngineRestarts { engine, down })) => {
                self.totals[engine].add(&EngineTotals::of(&self.engines[engine].gauges()));
                self.engines[engine] = (self.make_engine)(engine);
                self.timers.set(engine, None);
                self.back_at.insert(engine, at + down);
                let mut had: Vec<usize> = self.jobs[engine].drain().map(|(_, visit)| visit).collect();
                had.sort_unstable();
                had.into_iter().for_each(|number| self.fail(number, AttemptOutcome::Broken, at, effects));
            }
            Some((_, Incident::EngineSlows { engine, times })) => {
                self.engines[engine].set_speed(1.0 / times, at);
                self.timers.set(engine, self.engines[engine].next_moment());
            }
            Some((_, Incident::GatewayRestarts { gateway })) => {
                let of = NonZeroU32::new(self.frontends.len() as u32).unwrap_or(NonZeroU32::MIN);
                let fresh = Frontend::new(self.policy, self.mix, GatewayReplica { number: gateway, of }, at);
                self.frontends[gateway] = fresh;
                let (of, first) = (self.frontends.len(), self.visits.first);
                let its = (first..self.visits.arrived()).filter(|number| number % of == gateway);
                its.for_each(|number| self.cut(number, at));
            }
            None => {}
        }
    }

    /// A request's engine failed or did not accept it.
    fn fail(&mut self, number: usize, how: AttemptOutcome, at: Tick, effects: &mut Effects) {
        let visit = &mut self.visits[number];
        let SimStage::Runs { engine, job, hold } = std::mem::replace(&mut visit.stage, SimStage::Waits) else { return };
        if let Some(job) = job {
            self.jobs[engine].remove(&job);
        }
        let streams = self.mix.flows[visit.arrival.flow].streams;
        if visit.first_token.is_none() || !streams {
            (visit.first_token, visit.last_token, visit.events, visit.tokens) = (None, None, 0, 0);
            return self.frontend(number).failed(number, engine, *hold, how, at, effects);
        }
        let used = Used { input: Tokens(visit.arrival.prompt), output: Tokens(visit.tokens) };
        self.frontend(number).freed(engine, *hold, None, used, at, effects);
        self.end_missed(number, Missed::UpstreamError, at, effects);
    }

    /// A request's gateway failed.
    fn cut(&mut self, number: usize, at: Tick) {
        match std::mem::replace(&mut self.visits[number].stage, SimStage::Waits) {
            SimStage::Runs { engine, job, .. } => {
                if let Some(job) = job {
                    self.cancel(engine, job, at);
                }
            }
            SimStage::Waits => {}
            SimStage::Over => {
                self.visits[number].stage = SimStage::Over;
                return;
            }
        }
        self.end_missed(number, Missed::Internal, at, &mut Effects::default());
    }

    fn cancel(&mut self, engine: usize, job: JobId, at: Tick) {
        // A job that has just ended is in its engine no more.
        if self.jobs[engine].remove(&job).is_some() {
            self.engines[engine].cancel(job, at);
            self.timers.set(engine, self.engines[engine].next_moment());
        }
    }

    fn end_missed(&mut self, number: usize, reason: Missed, at: Tick, effects: &mut Effects) {
        let visit = &self.visits[number];
        let objectives = self.mix.class_of(visit.arrival.flow).objectives();
        let progress = Progress::waiting(visit.arrival.at, true, self.mix.flows[visit.arrival.flow].streams);
        let missed = Outcome::Missed(reason);
        let outcome = judge_refused(missed, &progress, &objectives, &self.case(number), at).outcome;
        self.end(number, outcome, None, at, effects);
    }

    /// Shortens the output if a level of its class says so.
    fn degrade(&mut self, number: usize) {
        let visit = &mut self.visits[number];
        let flow = &self.mix.flows[visit.arrival.flow];
        let in_force = self.frontends[number % self.frontends.len()].in_force(&flow.class);
        let asked = visit.arrival.output;
        if in_force.reasoning_off {
            let left = asked as f64 * (1.0 - flow.reasoning);
            visit.arrival.output = (left as u64).max(1);
        }
        if let Some(cap) = in_force.cap {
            visit.cap_lowered = true;
            visit.arrival.output = visit.arrival.output.min(cap.0.max(1));
        }
        self.report.shortened += u64::from(visit.arrival.output < asked);
    }

    fn step(&mut self, engine: usize, at: Tick, effects: &mut Effects) {
        let mut gains = std::mem::take(&mut self.gains);
        self.timers.passed(engine);
        self.engines[engine].advance(at, &mut gains);
        self.timers.set(engine, self.engines[engine].next_moment());
        for gain in gains.drain(..) {
            let Some(&number) = self.jobs[engine].get(&gain.job) else { continue };
            let streams = self.mix.flows[self.visits[number].arrival.flow].streams;
            let visit = &mut self.visits[number];
            if visit.first_token.replace(visit.first_token.unwrap_or(gain.at)).is_none()
                && streams
                && let SimStage::Runs { hold, .. } = &mut visit.stage
            {
                let is_told = self.on_end.is_none() && self.span.counts(visit.arrival.at);
                if let Some(expected) = hold.expected.filter(|_| is_told) {
                    let share = |moment: Tick| (moment - hold.dispatched).as_secs_f64().max(1e-6);
                    self.report.predictions.push(share(expected) / share(gain.at));
                }
                let gateways = self.frontends.len();
                self.frontends[number % gateways].first_token(hold, gain.at, effects);
            }
            visit.last_token = Some(gain.at);
            visit.events += 1;
            visit.tokens += gain.tokens;
            if gain.done.is_some() {
                self.jobs[engine].remove(&gain.job);
                self.finish(number, gain.at, effects);
            }
        }
        self.gains = gains;
    }

    fn finish(&mut self, number: usize, at: Tick, effects: &mut Effects) {
        if self.span.counts(at) {
            self.report.finished += 1;
        }
        let timeline = self.timeline(number, at);
        let visit = &self.visits[number];
        let objectives = self.mix.class_of(visit.arrival.flow).objectives();
        let outcome = judge(&timeline, &objectives, &self.case(number)).outcome;
        self.end(number, outcome, Some(&timeline), at, effects);
    }

    /// The next impatient client leaves, unless it has its response.
    fn leave(&mut self, at: Tick, effects: &mut Effects) {
        let Some(Reverse((_, number))) = self.leaves.pop() else { return };
        let Some(visit) = self.visits.get(number) else { return };
        let streams = self.mix.flows[visit.arrival.flow].streams;
        if matches!(visit.stage, SimStage::Over) || (streams && visit.first_token.is_some()) {
            return;
        }
        let objectives = self.mix.class_of(visit.arrival.flow).objectives();
        let progress = Progress::waiting(visit.arrival.at, true, streams);
        let outcome = judge_left(&progress, &objectives, &self.case(number), at).outcome;
        self.end(number, outcome, None, at, effects);
    }

    /// The only place where a request ends.
    fn end(&mut self, number: usize, outcome: Outcome, answer: Option<&Timeline>, at: Tick, effects: &mut Effects) {
        let visit = &mut self.visits[number];
        let (prompt, tokens) = (visit.arrival.prompt, visit.tokens);
        let stage = std::mem::replace(&mut visit.stage, SimStage::Over);
        let dispatched = visit.dispatched.is_some();
        match stage {
            SimStage::Waits => self.frontend(number).withdraw(number, at, effects),
            SimStage::Runs { engine, job, hold } => {
                if let Some(job) = job {
                    self.cancel(engine, job, at);
                }
                let used = Used { input: Tokens(prompt), output: Tokens(tokens) };
                self.frontend(number).freed(engine, *hold, answer, used, at, effects);
            }
            SimStage::Over => return,
        }
        self.open -= 1;
        let flow = self.visits[number].arrival.flow;
        let class = &self.mix.flows[flow].class;
        let gateways = self.frontends.len();
        self.frontends[number % gateways].judged(class, outcome, at);
        self.ended = self.ended.max(at);
        let visit = &self.visits[number];
        let arrival = &visit.arrival;
        let told = RequestReport {
            arrived: arrival.at,
            flow,
            line: arrival.line,
            engine: visit.engine.map(|(engine, _)| engine),
            went_on: visit.engine.is_some_and(|(_, went_on)| went_on),
            input: prompt,
            output: answer.map_or(0, |answer| answer.output.0),
            outcome,
            waited: visit.dispatched.map(|dispatched| dispatched - arrival.at),
            ttft: answer.and_then(Timeline::ttft),
            tpot: answer.and_then(Timeline::tpot),
            e2e: answer.and_then(Timeline::e2e),
            ended: at,
        };
        if let Some(on_end) = &mut self.on_end {
            return on_end(&told);
        }
        self.report.told.push(told);
        if self.span.counts(arrival.at) {
            let key = (arrival.flow, arrival.tenant.clone());
            self.report.tenants.entry(key).or_default().note(outcome, Tokens(tokens), dispatched);
        }
    }

    /// Applies consequences, and theirs.
    fn take(&mut self, mut effects: Effects, at: Tick) {
        loop {
            let Effects { go, refused, over_limit, lost, read } = std::mem::take(&mut effects);
            if [&refused, &over_limit, &lost, &read].into_iter().all(Vec::is_empty) && go.is_empty() {
                return;
            }
            for number in read {
                if self.visits.get(number).is_none() {
                    continue;
                }
                if let SimStage::Runs { hold, .. } = &mut self.visits[number].stage {
                    let gateways = self.frontends.len();
                    self.frontends[number % gateways].was_read(hold, at, &mut effects);
                }
            }
            refused.into_iter().for_each(|number| self.end_missed(number, Missed::Shed, at, &mut effects));
            let limited = Outcome::Excluded(Excluded::RateLimited);
            over_limit.into_iter().for_each(|number| self.end(number, limited, None, at, &mut effects));
            lost.into_iter().for_each(|number| self.end_missed(number, Missed::UpstreamUnavailable, at, &mut effects));
            go.into_iter().for_each(|go| self.give(go, at, &mut effects));
        }
    }

    /// Dispatches a request to an engine, if it is up.
    fn give(&mut self, go: DispatchedRequest, at: Tick, effects: &mut Effects) {
        let DispatchedRequest { visit: number, engine, hold } = go;
        let visit = &mut self.visits[number];
        visit.dispatched.get_or_insert(at);
        visit.engine = Some((engine, hold.went_on));
        let hold = Box::new(hold);
        if self.back_at.contains_key(&engine) {
            visit.stage = SimStage::Runs { engine, job: None, hold };
            return self.fail(number, AttemptOutcome::ConnectFailed, at, effects);
        }
        let Arrival { prompt, output, .. } = visit.arrival;
        let job = Job { prompt, output, blocks: visit.arrival.blocks(), ..Job::default() };
        let job = self.engines[engine].submit(job, at);
        self.timers.set(engine, self.engines[engine].next_moment());
        self.jobs[engine].insert(job, number);
        visit.stage = SimStage::Runs { engine, job: Some(job), hold };
    }

    fn case(&self, number: usize) -> JudgeContext {
        let visit = &self.visits[number];
        let cap = visit.arrival.cap;
        let over_limit = matches!(&visit.stage, SimStage::Runs { hold, .. } if hold.over_limit);
        let cap_lowered = visit.cap_lowered;
        JudgeContext { stated_cap: cap.map(Tokens), over_limit, cap_lowered, ..JudgeContext::of(Dialect::Chat) }
    }

    /// The timeline that the gateway's observer would have seen of a complete response.
    fn timeline(&self, number: usize, at: Tick) -> Timeline {
        let visit = &self.visits[number];
        let streams = self.mix.flows[visit.arrival.flow].streams;
        let token = |moment: Option<Tick>| moment.filter(|_| streams);
        let (first_token, last_token) = (token(visit.first_token), token(visit.last_token));
        let events = if streams { visit.events } else { 1 };
        let choice = Choice {
            index: 0,
            first_token,
            first_visible: first_token,
            last_token,
            events,
            tokens: visit.tokens as f64,
            finished: true,
        };
        Timeline {
            start: visit.arrival.at,
            streamed: streams,
            reader: if streams { ResponseFormat::Events } else { ResponseFormat::Json },
            first_token,
            first_visible: first_token,
            last_token,
            finish: Some(at),
            end: at,
            choices: vec![choice],
            gaps: Gaps::default(),
            usage: Usage {
                input: Some(Tokens(visit.arrival.prompt)),
                output: Some(Tokens(visit.tokens)),
                ..Usage::default()
            },
            source: TokenSource::Usage,
            output: Tokens(visit.tokens),
            token_events: events,
            cut_by_length: false,
            has_finish_reason: true,
            error: None,
            unparseable: false,
            status: 200,
            has_output: true,
            has_visible: true,
            has_lumps: false,
            limited: None,
            ending: Ending::Clean,
        }
    }
}

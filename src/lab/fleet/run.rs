//! The event loop of a run: engines, clients, and a policy between them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use super::mix::{Arrival, Flood, Mix};
use super::policy::{Front, Gateway, Go, Hold, Policy, Steps};
use super::score::{Look, Report, Told};
use crate::admit::limit::Used;
use crate::judge::{Case, Missed, Outcome, Progress, judge, judge_left, judge_refused};
use crate::lab::engine::core::{Engine, Gain, Job, JobId};
use crate::observe::{Choice, Ending, Gaps, Reader, Timeline, TokenSource, Usage};
use crate::route::retry::Happened;
use crate::units::{Dialect, Tick, Tokens};

/// Duration of a run.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Warm-up, whose arrivals are not counted.
    pub warm_up: Duration,
    /// Measured interval.
    pub measured: Duration,
    /// Arrivals continue for this long, so that measured requests end under load as well.
    pub after: Duration,
}

impl Span {
    fn whole(&self) -> Duration {
        self.warm_up + self.measured + self.after
    }

    fn counts(&self, at: Tick) -> bool {
        let begin = Tick::ZERO + self.warm_up;
        at >= begin && at < begin + self.measured
    }
}

/// Runs a mix at this rate, requests per second.
#[must_use]
pub fn run(mix: &Mix, policy: &Policy, rate: f64, span: &Span) -> Report {
    World::new(mix, policy, mix.arrivals(rate, span.whole()), *span).run()
}

/// The same with a scenario.
#[must_use]
pub fn run_in(mix: &Mix, policy: &Policy, rate: f64, span: &Span, scenario: &Scenario) -> Report {
    let mut arrivals = mix.arrivals(rate, span.whole());
    for flood in &scenario.floods {
        arrivals.extend(mix.flood(flood, rate, span.whole()));
    }
    arrivals.sort_by_key(|arrival| arrival.at);
    World::in_scenario(mix, policy, arrivals, *span, scenario).run()
}

/// Events beside the workload.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Number of gateways that share the engines and get requests in turn.
    pub gateways: NonZeroU32,
    /// Whether clients wait without limit.
    pub patient: bool,
    /// Tenants that suddenly ask for more.
    pub floods: Vec<Flood>,
    /// Events of engines and gateways.
    pub events: Vec<(Duration, Befalls)>,
}

impl Default for Scenario {
    /// One gateway, without events.
    fn default() -> Self {
        Scenario { gateways: NonZeroU32::MIN, patient: false, floods: Vec::new(), events: Vec::new() }
    }
}

/// An event of an engine or gateway.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Befalls {
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

/// The rate at which the engines finish requests of this mix when saturated: first come, first served, full
/// batches, and clients without time limits. Defines load
/// 1.
#[must_use]
pub fn capacity(mix: &Mix, span: &Span) -> f64 {
    // More than any such engine can serve.
    let mut rate = 8.0 * mix.engines as f64;
    loop {
        let mut world = World::new(mix, &Policy::LeastConnections, mix.arrivals(rate, span.whole()), *span);
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
struct Visit {
    arrival: Arrival,
    stage: Stage,
    first_token: Option<Tick>,
    last_token: Option<Tick>,
    events: u64,
    tokens: u64,
    cap_lowered: bool,
    /// When an engine first got it.
    dispatched: Option<Tick>,
}

enum Stage {
    /// In the gateway's queue.
    Waits,
    /// At an engine.
    Runs { engine: usize, job: Option<JobId>, hold: Box<Hold> },
    /// Judged.
    Over,
}

struct World<'a> {
    mix: &'a Mix,
    span: Span,
    patient: bool,
    ends_with_the_span: bool,
    policy: &'a Policy,
    fronts: Vec<Front>,
    engines: Vec<Engine>,
    /// When an engine that is down comes back.
    back_at: Vec<Option<Tick>>,
    events: VecDeque<(Tick, Befalls)>,
    jobs: Vec<HashMap<JobId, usize, ahash::RandomState>>,
    visits: Vec<Visit>,
    /// Number of requests that have arrived.
    arrived: usize,
    open: usize,
    leaves: BinaryHeap<Reverse<(Tick, usize)>>,
    look_at: Tick,
    gains: Vec<Gain>,
    report: Report,
}

/// Next event; at equal moments in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Befall,
    Return(usize),
    Step(usize),
    Wake(usize),
    Leave,
    Arrive,
    Look,
}

/// Interval of the samples of seats and engines.
const LOOK_EVERY: Duration = Duration::from_secs(1);

impl<'a> World<'a> {
    fn new(mix: &'a Mix, policy: &'a Policy, arrivals: Vec<Arrival>, span: Span) -> Self {
        World::in_scenario(mix, policy, arrivals, span, &Scenario::default())
    }

    fn in_scenario(mix: &'a Mix, policy: &'a Policy, arrivals: Vec<Arrival>, span: Span, scenario: &Scenario) -> Self {
        let visit = |arrival| Visit {
            arrival,
            stage: Stage::Waits,
            first_token: None,
            last_token: None,
            events: 0,
            tokens: 0,
            cap_lowered: false,
            dispatched: None,
        };
        let overflow = if let Policy::Scheduled(settings) = policy { settings.overflow } else { 0 };
        let engines = mix.engines + overflow;
        let mut events: Vec<_> = scenario.events.iter().map(|(after, what)| (Tick::ZERO + *after, *what)).collect();
        events.sort_by_key(|(at, _)| *at);
        World {
            mix,
            span,
            patient: scenario.patient,
            ends_with_the_span: false,
            policy,
            fronts: (0..scenario.gateways.get() as usize)
                .map(|number| Front::new(policy, mix, Gateway { number, of: scenario.gateways }, Tick::ZERO))
                .collect(),
            back_at: vec![None; engines],
            events: events.into(),
            engines: (0..engines as u64)
                .map(|number| Engine::new(mix.shape(number as usize), mix.seed ^ number))
                .collect(),
            jobs: vec![HashMap::default(); engines],
            visits: arrivals.into_iter().map(visit).collect(),
            arrived: 0,
            open: 0,
            leaves: BinaryHeap::new(),
            look_at: Tick::ZERO,
            gains: Vec::new(),
            report: Report::new(mix, span.measured),
        }
    }

    fn run(mut self) -> Report {
        let end = Tick::ZERO + self.span.whole();
        while let Some((at, event)) = self.next_event() {
            if self.ends_with_the_span && at > end {
                break;
            }
            let mut steps = Steps::default();
            match event {
                Event::Befall => self.befall(at, &mut steps),
                Event::Return(engine) => self.back_at[engine] = None,
                Event::Step(engine) => self.step(engine, at, &mut steps),
                Event::Wake(number) => {
                    let World { engines, back_at, fronts, .. } = &mut self;
                    let gauges = |engine: usize| back_at[engine].is_none().then(|| engines[engine].gauges());
                    fronts[number].wake(gauges, at, &mut steps);
                }
                Event::Leave => self.leave(at, &mut steps),
                Event::Arrive => self.arrive(at, &mut steps),
                Event::Look => self.look(at),
            }
            self.take(steps, at);
        }
        for engine in &self.engines {
            self.report.engines.add(&engine.gauges());
        }
        self.report
    }

    fn look(&mut self, at: Tick) {
        self.look_at = at + LOOK_EVERY;
        let of_engine = |engine: &Engine| (engine.gauges().running, engine.gauges().waiting);
        let engines = self.engines.iter().map(of_engine).collect();
        let none = (Some(0), 0);
        let (seats, queued) = self
            .fronts
            .iter()
            .map(|front| front.seats(at))
            .fold(none, |sum, (seats, queued)| (sum.0.zip(seats).map(|(all, own)| all + own), sum.1 + queued));
        self.report.looks.push(Look { at, seats, queued, engines });
    }

    /// `None` if nothing is left to happen.
    fn next_event(&self) -> Option<(Tick, Event)> {
        let arrival = self.visits.get(self.arrived).map(|visit| (visit.arrival.at, Event::Arrive));
        if arrival.is_none() && self.open == 0 {
            return None;
        }
        let steps = self
            .engines
            .iter()
            .enumerate()
            .filter_map(|(number, engine)| Some((engine.next_moment()?, Event::Step(number))));
        let wakes = self.fronts.iter().enumerate();
        let wakes = wakes.filter_map(|(number, front)| Some((front.next_moment()?, Event::Wake(number))));
        let befall = self.events.front().map(|(at, _)| (*at, Event::Befall));
        let returns = self.back_at.iter().enumerate();
        let returns = returns.filter_map(|(number, at)| Some(((*at)?, Event::Return(number))));
        let leave = self.leaves.peek().map(|Reverse((at, _))| (*at, Event::Leave));
        let look = std::iter::once((self.look_at, Event::Look));
        steps.chain(arrival).chain(wakes).chain(leave).chain(look).chain(befall).chain(returns).min()
    }

    fn arrive(&mut self, at: Tick, steps: &mut Steps) {
        let number = self.arrived;
        self.arrived += 1;
        self.open += 1;
        self.degrade(number);
        let arrival = &self.visits[number].arrival;
        if !self.patient {
            self.leaves.push(Reverse((at + self.mix.class_of(arrival.flow).patience(), number)));
        }
        let gateway = number % self.fronts.len();
        self.fronts[gateway].arrive(number, arrival, self.mix, steps);
    }

    fn front(&mut self, number: usize) -> &mut Front {
        let gateways = self.fronts.len();
        &mut self.fronts[number % gateways]
    }

    fn befall(&mut self, at: Tick, steps: &mut Steps) {
        match self.events.pop_front() {
            Some((_, Befalls::EngineRestarts { engine, down })) => {
                let shape = self.engines[engine].shape().clone();
                self.report.engines.add(&self.engines[engine].gauges());
                self.engines[engine] = Engine::new(shape, self.mix.seed ^ engine as u64);
                self.back_at[engine] = Some(at + down);
                let mut had: Vec<usize> = self.jobs[engine].drain().map(|(_, visit)| visit).collect();
                had.sort_unstable();
                had.into_iter().for_each(|number| self.fail(number, Happened::Broken, at, steps));
            }
            Some((_, Befalls::EngineSlows { engine, times })) => self.engines[engine].set_speed(1.0 / times),
            Some((_, Befalls::GatewayRestarts { gateway })) => {
                let of = NonZeroU32::new(self.fronts.len() as u32).unwrap_or(NonZeroU32::MIN);
                let fresh = Front::new(self.policy, self.mix, Gateway { number: gateway, of }, at);
                self.fronts[gateway] = fresh;
                let its = (gateway..self.arrived).step_by(self.fronts.len());
                its.for_each(|number| self.cut(number, at));
            }
            None => {}
        }
    }

    /// A request's engine failed or did not accept it.
    fn fail(&mut self, number: usize, how: Happened, at: Tick, steps: &mut Steps) {
        let visit = &mut self.visits[number];
        let Stage::Runs { engine, job, hold } = std::mem::replace(&mut visit.stage, Stage::Waits) else { return };
        if let Some(job) = job {
            self.jobs[engine].remove(&job);
        }
        let streams = self.mix.flows[visit.arrival.flow].streams;
        if visit.first_token.is_none() || !streams {
            (visit.first_token, visit.last_token, visit.events, visit.tokens) = (None, None, 0, 0);
            return self.front(number).failed(number, engine, *hold, how, at, steps);
        }
        let used = Used { input: Tokens(visit.arrival.prompt), output: Tokens(visit.tokens) };
        self.front(number).freed(engine, *hold, None, used, at, steps);
        self.end_missed(number, Missed::UpstreamError, at, steps);
    }

    /// A request's gateway failed.
    fn cut(&mut self, number: usize, at: Tick) {
        match std::mem::replace(&mut self.visits[number].stage, Stage::Waits) {
            Stage::Runs { engine, job, .. } => {
                if let Some(job) = job {
                    self.jobs[engine].remove(&job);
                    self.engines[engine].cancel(job);
                }
            }
            Stage::Waits => {}
            Stage::Over => {
                self.visits[number].stage = Stage::Over;
                return;
            }
        }
        self.end_missed(number, Missed::Internal, at, &mut Steps::default());
    }

    fn end_missed(&mut self, number: usize, reason: Missed, at: Tick, steps: &mut Steps) {
        let visit = &self.visits[number];
        let objectives = self.mix.class_of(visit.arrival.flow).objectives();
        let progress = Progress::waiting(visit.arrival.at, true, self.mix.flows[visit.arrival.flow].streams);
        let missed = Outcome::Missed(reason);
        let outcome = judge_refused(missed, &progress, &objectives, &self.case(number), at).outcome;
        self.end(number, outcome, None, at, steps);
    }

    /// Shortens the output if a level of its class says so.
    fn degrade(&mut self, number: usize) {
        let visit = &mut self.visits[number];
        let flow = &self.mix.flows[visit.arrival.flow];
        let in_force = self.fronts[number % self.fronts.len()].in_force(&flow.class);
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

    fn step(&mut self, engine: usize, at: Tick, steps: &mut Steps) {
        let mut gains = std::mem::take(&mut self.gains);
        self.engines[engine].advance(at, &mut gains);
        for gain in gains.drain(..) {
            let Some(&number) = self.jobs[engine].get(&gain.job) else { continue };
            let streams = self.mix.flows[self.visits[number].arrival.flow].streams;
            let visit = &mut self.visits[number];
            if visit.first_token.replace(visit.first_token.unwrap_or(gain.at)).is_none()
                && streams
                && let Stage::Runs { hold, .. } = &mut visit.stage
            {
                if let Some(expected) = hold.expected.filter(|_| self.span.counts(visit.arrival.at)) {
                    let share = |moment: Tick| (moment - hold.dispatched).as_secs_f64().max(1e-6);
                    self.report.predictions.push(share(expected) / share(gain.at));
                }
                let gateways = self.fronts.len();
                self.fronts[number % gateways].first_token(hold, gain.at, steps);
            }
            visit.last_token = Some(gain.at);
            visit.events += 1;
            visit.tokens += gain.tokens;
            if gain.done.is_some() {
                self.finish(number, gain.at, steps);
            }
        }
        self.gains = gains;
    }

    fn finish(&mut self, number: usize, at: Tick, steps: &mut Steps) {
        if self.span.counts(at) {
            self.report.finished += 1;
        }
        let timeline = self.timeline(number, at);
        let visit = &self.visits[number];
        let objectives = self.mix.class_of(visit.arrival.flow).objectives();
        let outcome = judge(&timeline, &objectives, &self.case(number)).outcome;
        self.end(number, outcome, Some(&timeline), at, steps);
    }

    /// The next impatient client leaves, unless it has its response.
    fn leave(&mut self, at: Tick, steps: &mut Steps) {
        let Some(Reverse((_, number))) = self.leaves.pop() else { return };
        let visit = &self.visits[number];
        let streams = self.mix.flows[visit.arrival.flow].streams;
        if matches!(visit.stage, Stage::Over) || (streams && visit.first_token.is_some()) {
            return;
        }
        let objectives = self.mix.class_of(visit.arrival.flow).objectives();
        let progress = Progress::waiting(visit.arrival.at, true, streams);
        let outcome = judge_left(&progress, &objectives, &self.case(number), at).outcome;
        self.end(number, outcome, None, at, steps);
    }

    /// The only place where a request ends.
    fn end(&mut self, number: usize, outcome: Outcome, answer: Option<&Timeline>, at: Tick, steps: &mut Steps) {
        let visit = &mut self.visits[number];
        let (prompt, tokens) = (visit.arrival.prompt, visit.tokens);
        let stage = std::mem::replace(&mut visit.stage, Stage::Over);
        let dispatched = visit.dispatched.is_some();
        match stage {
            Stage::Waits => self.front(number).withdraw(number, at, steps),
            Stage::Runs { engine, job, hold } => {
                if let Some(job) = job {
                    self.jobs[engine].remove(&job);
                    self.engines[engine].cancel(job);
                }
                let used = Used { input: Tokens(prompt), output: Tokens(tokens) };
                self.front(number).freed(engine, *hold, answer, used, at, steps);
            }
            Stage::Over => return,
        }
        self.open -= 1;
        let flow = self.visits[number].arrival.flow;
        let class = &self.mix.flows[flow].class;
        let gateways = self.fronts.len();
        self.fronts[number % gateways].judged(class, outcome, at);
        let visit = &self.visits[number];
        let arrival = &visit.arrival;
        self.report.told.push(Told {
            arrived: arrival.at,
            flow,
            outcome,
            waited: visit.dispatched.map(|dispatched| dispatched - arrival.at),
            ttft: answer.and_then(Timeline::ttft),
            tpot: answer.and_then(Timeline::tpot),
        });
        if self.span.counts(arrival.at) {
            let key = (arrival.flow, arrival.tenant.clone());
            self.report.tenants.entry(key).or_default().note(outcome, Tokens(tokens), dispatched);
        }
    }

    /// Applies consequences, and theirs.
    fn take(&mut self, mut steps: Steps, at: Tick) {
        loop {
            let Steps { go, refused, lost, read } = std::mem::take(&mut steps);
            if go.is_empty() && refused.is_empty() && lost.is_empty() && read.is_empty() {
                return;
            }
            for number in read {
                if let Stage::Runs { hold, .. } = &mut self.visits[number].stage {
                    let gateways = self.fronts.len();
                    self.fronts[number % gateways].was_read(hold, at, &mut steps);
                }
            }
            refused.into_iter().for_each(|number| self.end_missed(number, Missed::Shed, at, &mut steps));
            lost.into_iter().for_each(|number| self.end_missed(number, Missed::UpstreamUnavailable, at, &mut steps));
            go.into_iter().for_each(|go| self.give(go, at, &mut steps));
        }
    }

    /// Dispatches a request to an engine, if it is up.
    fn give(&mut self, go: Go, at: Tick, steps: &mut Steps) {
        let Go { visit: number, engine, hold } = go;
        let visit = &mut self.visits[number];
        visit.dispatched.get_or_insert(at);
        let hold = Box::new(hold);
        if self.back_at[engine].is_some() {
            visit.stage = Stage::Runs { engine, job: None, hold };
            return self.fail(number, Happened::ConnectFailed, at, steps);
        }
        let Arrival { prompt, output, .. } = visit.arrival;
        let job = Job { prompt, output, blocks: visit.arrival.blocks(), ..Job::default() };
        let job = self.engines[engine].submit(job, at).expect("the engine's queue has no end");
        self.jobs[engine].insert(job, number);
        visit.stage = Stage::Runs { engine, job: Some(job), hold };
    }

    fn case(&self, number: usize) -> Case {
        let visit = &self.visits[number];
        let cap = visit.arrival.cap;
        let over_limit = matches!(&visit.stage, Stage::Runs { hold, .. } if hold.over_limit);
        let cap_lowered = visit.cap_lowered;
        Case { stated_cap: cap.map(Tokens), over_limit, cap_lowered, ..Case::of(Dialect::Chat) }
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
            reader: if streams { Reader::Events } else { Reader::Json },
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

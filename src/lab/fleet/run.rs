//! The world of a run: engines, clients and a policy between them, from event to event.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use super::mix::{Arrival, Mix};
use super::policy::{Front, Hold, Policy, Steps};
use super::score::Report;
use crate::admit::limit::Used;
use crate::judge::{Case, Missed, Outcome, Progress, judge, judge_left, judge_refused};
use crate::lab::engine::core::{Engine, Gain, Job, JobId};
use crate::observe::{Choice, Ending, Gaps, Reader, Timeline, TokenSource, Usage};
use crate::units::{Dialect, Tick, Tokens};

/// How long to run and what to count.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Arrivals before this are not counted: queues fill.
    pub warm_up: Duration,
    /// Arrivals in this time after it are.
    pub measured: Duration,
    /// Arrivals go on for this long behind, so that those counted end under load, too.
    pub after: Duration,
}

impl Span {
    fn whole(&self) -> Duration {
        self.warm_up + self.measured + self.after
    }
}

/// Runs a mix at so many requests per second.
#[must_use]
pub fn run(mix: &Mix, policy: &Policy, rate: f64, span: &Span) -> Report {
    World::new(mix, policy, mix.arrivals(rate, span.whole()), *span).run()
}

/// The rate at which the engines finish requests of this mix when they never lack any: first
/// come, first served, as many in a batch as it holds, and every client waits as long as it
/// takes. A load of 1 is this rate.
#[must_use]
pub fn capacity(mix: &Mix, span: &Span) -> f64 {
    // More than any engine of the kind can serve, and known from the first guess to be so.
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
}

enum Stage {
    /// In the gateway's queue.
    Waits,
    /// An engine has it.
    Runs { engine: usize, job: JobId, hold: Box<Hold> },
    /// It has been judged.
    Over,
}

struct World<'a> {
    mix: &'a Mix,
    span: Span,
    patient: bool,
    ends_with_the_span: bool,
    front: Front,
    engines: Vec<Engine>,
    jobs: Vec<HashMap<JobId, usize, ahash::RandomState>>,
    visits: Vec<Visit>,
    /// Those that have arrived are before this.
    arrived: usize,
    open: usize,
    leaves: BinaryHeap<Reverse<(Tick, usize)>>,
    gains: Vec<Gain>,
    report: Report,
}

/// What happens next, and in this order at the same moment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Step(usize),
    Wake,
    Leave,
    Arrive,
}

impl<'a> World<'a> {
    fn new(mix: &'a Mix, policy: &Policy, arrivals: Vec<Arrival>, span: Span) -> Self {
        let visit = |arrival| Visit {
            arrival,
            stage: Stage::Waits,
            first_token: None,
            last_token: None,
            events: 0,
            tokens: 0,
            cap_lowered: false,
        };
        let overflow = if let Policy::Scheduled(settings) = policy { settings.overflow } else { 0 };
        let engines = mix.engines + overflow;
        World {
            mix,
            span,
            patient: false,
            ends_with_the_span: false,
            front: Front::new(policy, mix),
            engines: (0..engines as u64).map(|number| Engine::new(mix.shape(), mix.seed ^ number)).collect(),
            jobs: vec![HashMap::default(); engines],
            visits: arrivals.into_iter().map(visit).collect(),
            arrived: 0,
            open: 0,
            leaves: BinaryHeap::new(),
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
                Event::Step(engine) => self.step(engine, at, &mut steps),
                Event::Wake => {
                    let engines = &self.engines;
                    self.front.wake(|number| engines[number].gauges(), at, &mut steps);
                }
                Event::Leave => self.leave(at, &mut steps),
                Event::Arrive => self.arrive(at, &mut steps),
            }
            self.take(steps, at);
        }
        self.report
    }

    /// None: nothing is left to happen.
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
        let wake = self.front.next_moment().map(|at| (at, Event::Wake));
        let leave = self.leaves.peek().map(|Reverse((at, _))| (*at, Event::Leave));
        steps.chain(arrival).chain(wake).chain(leave).min()
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
        self.front.arrive(number, arrival, self.mix, steps);
    }

    /// A shorter answer, if a level of its class says so.
    fn degrade(&mut self, number: usize) {
        let visit = &mut self.visits[number];
        let flow = &self.mix.flows[visit.arrival.flow];
        let in_force = self.front.in_force(&flow.class);
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
                self.front.first_token(hold, gain.at, steps);
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
        if at >= Tick::ZERO + self.span.warm_up && at < Tick::ZERO + self.span.warm_up + self.span.measured {
            self.report.finished += 1;
        }
        let timeline = self.timeline(number, at);
        let visit = &self.visits[number];
        let objectives = self.mix.class_of(visit.arrival.flow).objectives();
        let outcome = judge(&timeline, &objectives, &self.case(number)).outcome;
        self.end(number, outcome, Some(&timeline), at, steps);
    }

    /// The client at the head of the list leaves, unless it has what it waits for.
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

    fn refuse(&mut self, number: usize, at: Tick, steps: &mut Steps) {
        let visit = &self.visits[number];
        let objectives = self.mix.class_of(visit.arrival.flow).objectives();
        let progress = Progress::waiting(visit.arrival.at, true, self.mix.flows[visit.arrival.flow].streams);
        let shed = Outcome::Missed(Missed::Shed);
        let outcome = judge_refused(shed, &progress, &objectives, &self.case(number), at).outcome;
        self.end(number, outcome, None, at, steps);
    }

    /// The one place where a request ends.
    fn end(&mut self, number: usize, outcome: Outcome, answer: Option<&Timeline>, at: Tick, steps: &mut Steps) {
        let visit = &mut self.visits[number];
        let (prompt, tokens) = (visit.arrival.prompt, visit.tokens);
        let stage = std::mem::replace(&mut visit.stage, Stage::Over);
        let dispatched = matches!(stage, Stage::Runs { .. });
        match stage {
            Stage::Waits => self.front.withdraw(number, at),
            Stage::Runs { engine, job, hold } => {
                self.jobs[engine].remove(&job);
                self.engines[engine].cancel(job);
                let used = Used { input: Tokens(prompt), output: Tokens(tokens) };
                self.front.freed(engine, *hold, answer, used, at, steps);
            }
            Stage::Over => return,
        }
        self.open -= 1;
        let arrival = &self.visits[number].arrival;
        self.front.judged(&self.mix.flows[arrival.flow].class, outcome, at);
        let begin = Tick::ZERO + self.span.warm_up;
        if arrival.at >= begin && arrival.at < begin + self.span.measured {
            let key = (arrival.flow, arrival.tenant.clone());
            self.report.tenants.entry(key).or_default().note(outcome, Tokens(tokens), dispatched);
        }
    }

    fn take(&mut self, mut steps: Steps, at: Tick) {
        for number in std::mem::take(&mut steps.read) {
            if let Stage::Runs { hold, .. } = &mut self.visits[number].stage {
                self.front.first_token(hold, at, &mut steps);
            }
        }
        for number in std::mem::take(&mut steps.refused) {
            self.refuse(number, at, &mut steps);
        }
        for go in steps.go {
            let visit = &mut self.visits[go.visit];
            let job = Job { prompt: visit.arrival.prompt, output: visit.arrival.output, ..Job::default() };
            let job = self.engines[go.engine].submit(job, at).expect("the engine's queue has no end");
            self.jobs[go.engine].insert(job, go.visit);
            visit.stage = Stage::Runs { engine: go.engine, job, hold: Box::new(go.hold) };
        }
    }

    fn case(&self, number: usize) -> Case {
        let visit = &self.visits[number];
        let cap = self.mix.flows[visit.arrival.flow].cap;
        let over_limit = matches!(&visit.stage, Stage::Runs { hold, .. } if hold.over_limit);
        let cap_lowered = visit.cap_lowered;
        Case { stated_cap: cap.map(Tokens), over_limit, cap_lowered, ..Case::of(Dialect::Chat) }
    }

    /// What the gateway's observer would have seen of an answer that is complete.
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

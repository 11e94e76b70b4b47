//! Seats that are found out, on simulated engines in virtual time: nothing here waits.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use goodput::admit::queue::{self, Deadline, Decisions, LimitState, QueueRequest, Scheduler, Ticket, WhenHopeless};
use goodput::route::retry::Attempts;
use goodput::route::settings::{Concurrency, EngineAddress, EngineSource, PoolSettings, Scheme};
use goodput::route::{
    Fleet, LatencySample, PickRequest, PoolTargets, ProbeResult, SloTargets, WorkEstimate, WorkGuard,
};
use goodput::sim::engine::EngineSpec;
use goodput::sim::engine::core::{EngineCore, Job, JobId, TokenGain};
use goodput::types::{PoolId, Priority, TenantId, Tick, Tokens};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Exp, LogNormal};

const TTFT: Duration = Duration::from_millis(1_500);
const TPOT: Duration = Duration::from_millis(35);

/// Targets of each response.
const STREAMS: SloTargets = SloTargets { ttft: Some(TTFT), tpot: Some(TPOT), e2e: None };
const TO_THE_END: SloTargets = SloTargets { ttft: None, tpot: None, e2e: Some(Duration::from_secs(15)) };

struct Running {
    engine: usize,
    job: JobId,
    work: Box<WorkGuard>,
    ticket: Ticket,
    dispatched: Tick,
    first: Option<Tick>,
}

/// Requests wait in the pool's queue and go on as seats and the pace of prompts let them.
struct World {
    targets: SloTargets,
    streams: bool,
    fleet: Fleet,
    pool: PoolSettings,
    engines: Vec<EngineCore>,
    running: Vec<Running>,
    queue: Scheduler,
    waiting: HashMap<Ticket, Job>,
    chance: StdRng,
    /// Answers that ended.
    ended: usize,
    /// End and engine of each good response.
    good: Vec<(Tick, usize)>,
    /// The seats of every engine, each second.
    seats: Vec<Vec<u32>>,
    /// The requests of every engine, each second.
    batches: Vec<Vec<u32>>,
}

impl World {
    fn new(engines: usize, concurrency: Concurrency, seed: u64) -> World {
        World::promised(STREAMS, engines, concurrency, seed)
    }

    fn promised(targets: SloTargets, engines: usize, concurrency: Concurrency, seed: u64) -> World {
        let address = |number: usize| EngineAddress {
            scheme: Scheme::Http,
            host: format!("e{number}").into(),
            port: 1,
            base: "".into(),
            name: None,
        };
        let addresses = (0..engines).map(address).collect();
        let pool = PoolSettings {
            concurrency,
            ..PoolSettings::with_defaults(PoolId::from("p"), EngineSource::Static(addresses))
        };
        let fleet = Fleet::new(seed);
        fleet.apply_settings(&[Arc::new(pool.clone())], Tick::ZERO);
        let SloTargets { ttft, tpot, e2e } = targets;
        fleet.set_targets(&pool.id, PoolTargets { ttft, tpot, e2e: e2e.is_some(), attainment: 0.95 });
        let engine = |number| EngineCore::new(EngineSpec { max_running: 256, ..EngineSpec::default() }, seed ^ number);
        World {
            targets,
            streams: true,
            fleet,
            pool,
            engines: (0..engines as u64).map(engine).collect(),
            running: Vec::new(),
            queue: Scheduler::new(queue::QueueSettings { max_waiting: 1 << 20, ..queue::QueueSettings::default() }),
            waiting: HashMap::new(),
            chance: StdRng::seed_from_u64(seed),
            ended: 0,
            good: Vec::new(),
            seats: Vec::new(),
            batches: Vec::new(),
        }
    }

    /// Runs from one second to another at this request rate.
    fn run(&mut self, from: u64, until: u64, rate: f64) {
        let (mut at, end) = (seconds(from), seconds(until));
        let gap = Exp::new(rate).unwrap();
        let (mut arrival, mut look, mut follow) = (at, at, at);
        let _nobody_waits = self.queue.set_prefilling_engines(self.engines.len(), at);
        let mut gains = Vec::new();
        while at < end {
            let steps = self.engines.iter().filter_map(EngineCore::next_moment);
            at = steps.chain([arrival, look, follow]).chain(self.queue.next_refill()).min().unwrap();
            if at == look {
                self.look(at);
                look = look + Duration::from_secs(1);
            }
            if at == follow {
                self.apply_settings(at);
                follow = follow + Duration::from_millis(100);
            }
            if at == arrival {
                self.arrive(at);
                arrival = arrival + Duration::from_secs_f64(gap.sample(&mut self.chance));
            }
            for engine in 0..self.engines.len() {
                self.engines[engine].advance(at, &mut gains);
                gains.drain(..).for_each(|gain| self.gain(engine, &gain));
            }
            let decisions = self.queue.expire(at);
            self.dispatch(&decisions, at);
        }
    }

    fn job(&mut self) -> Job {
        let mut length = |median: f64| LogNormal::new(median.ln(), 0.7).unwrap().sample(&mut self.chance) as u64;
        let (prompt, output) = (length(600.0).clamp(20, 6_000), length(180.0).clamp(10, 1_000));
        Job { prompt, output, ..Job::default() }
    }

    /// Updates seats and pace from the learned values.
    fn apply_settings(&mut self, at: Tick) {
        let pace = self.fleet.update_pace(&self.pool.id, at);
        let decisions = self.queue.set_pace(pace, at);
        self.dispatch(&decisions, at);
        let decisions = self.queue.set_seats(self.fleet.seats(&self.pool.id, at).unwrap_or(usize::MAX), at);
        self.dispatch(&decisions, at);
    }

    /// In order of arrival: no request is late before it is dispatched.
    fn arrive(&mut self, at: Tick) {
        let job = self.job();
        let ask = QueueRequest {
            tenant: TenantId::from("t"),
            priority: Priority::Normal,
            arrival: at,
            deadline: Deadline::Whenever,
            tokens: Tokens(job.prompt + 200),
            prompt: Tokens(job.prompt),
            timeout_at: Tick::from_nanos(u64::MAX),
            when_hopeless: WhenHopeless::Serve,
            limit_state: LimitState::WithinLimits,
        };
        let (ticket, decisions) = self.queue.offer(&ask, at);
        self.waiting.insert(ticket, job);
        self.dispatch(&decisions, at);
    }

    fn dispatch(&mut self, decisions: &Decisions, at: Tick) {
        for ticket in &decisions.admitted {
            let job = self.waiting.remove(ticket).unwrap();
            let size = WorkEstimate { prefill: Tokens(job.prompt), decode: Tokens(200) };
            let pick = PickRequest { targets: self.targets, whole: self.targets.e2e, ..size.into() };
            let mut attempts = Attempts::new(&self.pool, seconds(1 << 30));
            let choice = self.fleet.choose(&self.pool.id, &mut attempts, pick, at).unwrap();
            let engine = choice.engine.as_str()[1..].split(':').next().unwrap().parse::<usize>().unwrap();
            let job = self.engines[engine].submit(job, at).unwrap();
            let (work, ticket) = (choice.work, *ticket);
            self.running.push(Running { engine, job, work, ticket, dispatched: at, first: None });
        }
    }

    fn gain(&mut self, engine: usize, gain: &TokenGain) {
        let place = self.running.iter().position(|r| (r.engine, r.job) == (engine, gain.job)).unwrap();
        let running = &mut self.running[place];
        if running.first.is_none() {
            running.first = Some(gain.at);
            running.work.first_token(gain.at);
            let (ticket, at) = (running.ticket, gain.at);
            let decisions = self.queue.read(ticket, at);
            self.dispatch(&decisions, at);
        }
        let Some(life) = &gain.done else { return };
        let Running { work, ticket, dispatched, first, .. } = self.running.swap_remove(place);
        let ttft = first.unwrap() - dispatched;
        let further = life.output.saturating_sub(1);
        let tpot = (gain.at - first.unwrap()).div_f64(further.max(1) as f64);
        let whole = LatencySample { e2e: Some(gain.at - dispatched), further, ..LatencySample::default() };
        let sample = if self.streams { LatencySample { ttft: Some(ttft), tpot: Some(tpot), ..whole } } else { whole };
        work.learned(&sample, gain.at);
        let decisions = self.queue.release(ticket, Tokens(life.prompt + life.output), gain.at);
        self.dispatch(&decisions, gain.at);
        let kept = |took: Duration, limit: Option<Duration>| limit.is_none_or(|limit| took <= limit);
        let SloTargets { ttft: to_the_first, tpot: per_token, e2e } = self.targets;
        self.ended += 1;
        if kept(ttft, to_the_first) && kept(tpot, per_token) && kept(gain.at - dispatched, e2e) {
            self.good.push((gain.at, engine));
        }
    }

    fn look(&mut self, at: Tick) {
        let engines = self.fleet.view(at).remove(0).engines;
        self.batches.push(engines.iter().map(|engine| engine.requests).collect());
        self.seats.push(engines.iter().map(|engine| engine.seats.unwrap_or(0)).collect());
    }

    /// Good responses per second in this period.
    fn goodput(&self, from: u64, until: u64) -> f64 {
        let inside = |at: Tick| at >= seconds(from) && at < seconds(until);
        self.good.iter().filter(|(at, _)| inside(*at)).count() as f64 / (until - from) as f64
    }

    /// The same of one engine.
    fn goodput_of(&self, engine: usize, from: u64, until: u64) -> f64 {
        let inside = |at: Tick| at >= seconds(from) && at < seconds(until);
        self.good.iter().filter(|(at, of)| inside(*at) && *of == engine).count() as f64 / (until - from) as f64
    }

    /// Share of good responses.
    fn kept(&self) -> f64 {
        self.good.len() as f64 / self.ended as f64
    }

    fn seats_of(&self, engine: usize, from: u64, until: u64) -> Vec<u32> {
        self.seats[from as usize..until as usize].iter().map(|seats| seats[engine]).collect()
    }
}

fn seconds(seconds: u64) -> Tick {
    Tick::ZERO + Duration::from_secs(seconds)
}

fn fixed(seats: u32) -> Concurrency {
    Concurrency::Fixed(NonZeroU32::new(seats).unwrap())
}

/// The best of many figures that do not change, and its goodput, of an engine as it is and of
/// one at six tenths of the speed.
static BEST: LazyLock<[(u32, f64); 2]> = LazyLock::new(|| {
    [1.0, 0.6].map(|speed| {
        let one = |seats: u32| {
            let mut world = World::new(1, fixed(seats), 3);
            world.engines[0].set_speed(speed);
            world.run(0, 80, 20.0);
            (seats, world.goodput(20, 80))
        };
        [8, 16, 24, 32, 40, 48, 56, 64, 80, 96].map(one).into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
    })
});

/// How far a figure swings around its mean, at most.
fn swing(seats: &[u32]) -> f64 {
    let mean = f64::from(seats.iter().sum::<u32>()) / seats.len() as f64;
    let off = |seats: &u32| (f64::from(*seats) - mean).abs() / mean;
    seats.iter().map(off).fold(0.0, f64::max)
}

#[test]
fn auto_settles_within_a_tenth_of_the_best_fixed_limit() {
    for (speed, (seats, best)) in [1.0, 0.6].into_iter().zip(*BEST) {
        let mut world = World::new(1, Concurrency::Auto, 3);
        world.engines[0].set_speed(speed);
        world.run(0, 400, 20.0);
        let found = world.goodput(100, 400);
        assert!(found >= 0.9 * best, "speed {speed}: {found} a second; {best} with {seats} seats");
        // Seats are a ceiling that the pace of prompts keeps requests below: what rests is the batch.
        let batches: Vec<u32> = world.batches[100..400].iter().map(|batches| batches[0]).collect();
        let later: Vec<u32> = batches.chunks(20).map(|some| some.iter().sum()).collect();
        assert!(swing(&later) < 0.3, "{later:?}");
    }
}

#[test]
fn a_step_in_load_is_followed() {
    let [(seats, best), _] = *BEST;
    let mut world = World::new(1, Concurrency::Auto, 4);
    world.run(0, 100, 2.0);
    let idle = world.seats_of(0, 50, 100);
    assert!(swing(&idle) < 0.3, "seats that nobody takes are not cut: {idle:?}");
    world.run(100, 300, 20.0);
    let found = world.goodput(200, 300);
    assert!(found >= 0.9 * best, "{found} a second; {best} with {seats} seats");
    // And down again, without rejecting requests at the limit found.
    let before = world.seats.last().unwrap()[0];
    let waiting: Vec<_> = world.waiting.drain().map(|(ticket, _)| ticket).collect();
    waiting.into_iter().for_each(|ticket| _ = world.queue.withdraw(ticket, seconds(300)));
    world.run(300, 400, 2.0);
    assert!(world.seats_of(0, 310, 400).iter().all(|seats| *seats * 10 >= before * 9));
}

#[test]
fn each_engine_gets_its_own_limit() {
    let [(quick_seats, quick), (slow_seats, slow)] = *BEST;
    let mut world = World::new(2, Concurrency::Auto, 5);
    world.engines[1].set_speed(0.6);
    world.run(0, 400, 40.0);
    let found = world.goodput(100, 400);
    assert!(found >= 0.9 * (quick + slow), "{found} a second; {quick} and {slow} by themselves");
    let mean = |engine| {
        let seats = world.seats_of(engine, 200, 400);
        f64::from(seats.iter().sum::<u32>()) / seats.len() as f64
    };
    assert!(mean(1) < 0.7 * mean(0), "{} and {}; best fixed {quick_seats} and {slow_seats}", mean(0), mean(1));
}

#[test]
fn an_engine_that_becomes_slow_loses_seats_at_once_and_has_them_again_when_it_recovers() {
    let mut world = World::new(1, Concurrency::Auto, 6);
    world.run(0, 150, 20.0);
    let before = world.seats.last().unwrap()[0];
    world.engines[0].set_speed(0.6);
    world.run(150, 300, 20.0);
    let slow = world.seats_of(0, 200, 300);
    assert!(slow.iter().all(|seats| *seats * 10 < before * 8), "{before:?} {slow:?}");
    let [(_, quick), (_, best)] = *BEST;
    let found = world.goodput(200, 300);
    assert!(found >= 0.9 * best, "{found} a second, best {best}: {before} {slow:?}");
    world.engines[0].set_speed(1.0);
    world.run(300, 450, 20.0);
    assert!(world.goodput(380, 450) >= 0.9 * quick, "{}", world.goodput(380, 450));
}

#[test]
fn a_returning_engine_starts_slowly_and_soon_regains_its_seats() {
    let mut world = World::new(2, Concurrency::Auto, 7);
    world.run(0, 200, 40.0);
    let before = world.goodput_of(0, 100, 200);
    let engine = world.fleet.engines(&world.pool.id)[0].0.clone();
    let _ = world.fleet.checked(&world.pool.id, &engine, ProbeResult::Refused, seconds(200));
    world.run(200, 220, 40.0);
    let _ = world.fleet.checked(&world.pool.id, &engine, ProbeResult::Healthy, seconds(220));
    world.run(220, 320, 40.0);
    let (usual, after) = (world.seats_of(0, 100, 200), world.seats_of(0, 225, 320));
    let fewest = usual.iter().min().unwrap();
    assert!(after[0] <= fewest / 2, "{fewest} {after:?}");
    let again = after.iter().position(|seats| seats >= fewest);
    assert!(again.is_some_and(|seconds| seconds <= 75), "{fewest} {after:?}");
    let batches = |from: usize, until: usize| world.batches[from..until].iter().map(|batch| batch[0]).max().unwrap();
    assert!(batches(225, 320) * 10 <= batches(100, 200) * 13, "{} {}", batches(225, 320), batches(100, 200));
    let found = world.goodput_of(0, 250, 320);
    assert!(found >= 0.9 * before, "{found} a second, {before} before it left");
}

/// The best goodput of several fixed limits for a class with E2E.
static BEST_TO_THE_END: LazyLock<f64> = LazyLock::new(|| {
    let one = |seats: u32| {
        let mut world = World::promised(TO_THE_END, 1, fixed(seats), 3);
        world.run(0, 300, 20.0);
        world.goodput(100, 300)
    };
    [48, 64, 80, 96, 128].into_iter().map(one).fold(0.0, f64::max)
});

fn a_class_that_promises_only_time_to_the_end_is_kept(streams: bool) {
    let best = *BEST_TO_THE_END;
    let world = |rate| {
        let mut world = World { streams, ..World::promised(TO_THE_END, 1, Concurrency::Auto, 3) };
        world.run(0, 300, rate);
        world
    };
    let found = world(20.0).goodput(100, 300);
    assert!(found >= 0.95 * best, "beyond capacity {found} a second, {best} with the best fixed figure");
    let kept = world(0.75 * best).kept();
    assert!(kept >= 0.95, "{kept} are kept of a load that the engine can carry");
}

#[test]
fn a_class_with_e2e_only_is_met_with_streams() {
    a_class_that_promises_only_time_to_the_end_is_kept(true);
}

#[test]
fn a_class_with_e2e_only_is_met_without_streaming() {
    a_class_that_promises_only_time_to_the_end_is_kept(false);
}

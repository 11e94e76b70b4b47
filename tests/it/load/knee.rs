//! Whole sweeps against a service whose knee is known: a queue with one server and a fixed service time (M/D/1), whose
//! distribution of waits has a closed form.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use goodput::load::LoadEvent;
use goodput::load::LoadRecord;
use goodput::load::RunEnd;
use goodput::load::arrivals::ArrivalProcess;
use goodput::load::interval::Outcomes;
use goodput::load::monitor::{ClassGoal, RunMonitor, RunRule, RunStep, RunVerdict};
use goodput::load::result::{NamedGoal, RunResult};
use goodput::load::search::SearchSettings;
use goodput::load::sweep::{GoodputResult, GoodputStatus, NextRun, RatePlan, SweepPlan, SweepProgress};
use goodput::load::workload::CacheState;

/// Service time of the queue, and the threshold of TTFT, in seconds.
const SERVICE: f64 = 0.1;
const THRESHOLD: f64 = 0.5;
const TARGET: f64 = 0.92;

/// Probability that a wait of an M/D/1 queue is at most `wait` service times, at this load (Erlang's formula; Tijms,
/// A First Course in Stochastic Models, section 9.2).
pub(super) fn waits_at_most(wait: f64, load: f64) -> f64 {
    let term = |k: u32| {
        let left = load * (f64::from(k) - wait);
        let factorial: f64 = (1..=k).map(f64::from).product();
        left.powi(k as i32) / factorial * (-left).exp()
    };
    (1.0 - load) * (0..=wait.floor() as u32).map(term).sum::<f64>()
}

/// The rate at which just as many requests keep the threshold as the target asks for.
pub(super) fn analytic_knee(service: f64, threshold: f64, target: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let load = f64::midpoint(low, high);
        let attained = waits_at_most((threshold - service) / service, load);
        *(if attained >= target { &mut low } else { &mut high }) = load;
    }
    low / service
}

fn goals(threshold: f64, target: f64) -> Vec<NamedGoal> {
    let goal = ClassGoal { target, threshold: Duration::from_secs_f64(threshold), is_ttft: true, weight: 1.0 };
    vec![NamedGoal { class: "chat".to_owned(), goal }]
}

/// What a service makes of a request: how long it takes, from its arrival.
type Service<'a> = dyn FnMut(f64) -> f64 + 'a;

/// Runs a service at a rate, as far as the monitor asks for.
fn run(rule: RunRule, next: NextRun, seed: u64, serve: &mut Service<'_>) -> RunResult {
    let goals = goals(THRESHOLD, TARGET);
    let mut monitor = RunMonitor::new(rule, goals.iter().map(|named| named.goal.clone()).collect(), next.rate);
    // Moments to come, in nanoseconds: the second number tells a break from an end.
    let mut pending: BinaryHeap<Reverse<(u64, u64, u64)>> = BinaryHeap::new();
    let mut records: Vec<LoadRecord> = Vec::new();
    let mut step = RunStep::GoOn;
    let mut tell = |monitor: &mut RunMonitor, pending: &mut BinaryHeap<_>, records: &[LoadRecord], until: f64| {
        while let Some(Reverse((nanos, is_end, number))) = pending.peek().copied() {
            let at = nanos as f64 / 1e9;
            if at > until {
                break;
            }
            pending.pop();
            let event = match is_end {
                0 => LoadEvent::Overdue { number },
                _ => LoadEvent::Ended(Box::new(records[number as usize].clone())),
            };
            step = monitor.note(&event, at);
        }
        step
    };
    for (number, at) in (0..).zip(ArrivalProcess::Poisson.at_rate(next.rate, seed)) {
        let now = at.as_secs_f64();
        if tell(&mut monitor, &mut pending, &records, now) != RunStep::GoOn {
            break;
        }
        monitor.note(&LoadEvent::Sent { number, class: 0, at }, now);
        let ttft = serve(now);
        let outcome = if ttft <= THRESHOLD { "met" } else { "missed" };
        records.push(LoadRecord {
            number,
            class: "chat".to_owned(),
            outcome: outcome.to_owned(),
            scheduled_seconds: now,
            end_seconds: now + ttft,
            ttft_seconds: Some(ttft),
            e2e_seconds: Some(ttft),
            ..LoadRecord::default()
        });
        let nanos = |seconds: f64| (seconds * 1e9) as u64;
        if ttft > THRESHOLD {
            pending.push(Reverse((nanos(now + THRESHOLD), 0, number)));
        }
        pending.push(Reverse((nanos(now + ttft), 1, number)));
    }
    tell(&mut monitor, &mut pending, &records, f64::INFINITY);
    let last = records.iter().map(|record| record.end_seconds).fold(0.0, f64::max);
    let end = RunEnd { sent: records.len() as u64, length: Duration::from_secs_f64(last), ..RunEnd::default() };
    let conclusion = monitor.finish(last, true);
    RunResult::of(next.repetition, &conclusion, &end, &records, &goals, rule.confidence)
}

fn md1() -> impl FnMut(f64) -> f64 {
    let mut free = 0.0_f64;
    move |at| {
        free = free.max(at) + SERVICE;
        free - at
    }
}

fn plan() -> SweepPlan {
    let settings = SearchSettings { start: 1.0, growth: 2.0, tolerance: 0.03, lowest: 0.05, highest: 1000.0 };
    SweepPlan {
        rates: RatePlan::Search(settings),
        repetitions: 3,
        caches: vec![CacheState::Cold],
        goals: goals(THRESHOLD, TARGET),
        confidence: 0.95,
        replicas: 1,
        gpus_per_replica: 2.0,
    }
}

fn swept(
    plan: SweepPlan,
    rule: RunRule,
    seed: u64,
    mut service: impl FnMut(u32) -> Box<Service<'static>>,
) -> GoodputResult {
    let mut progress = SweepProgress::new(plan);
    while let Some(next) = progress.next_run() {
        progress.note(run(rule, next, seed * 10_000 + next.number, &mut *service(next.repetition)));
    }
    progress.results().remove(0).goodput
}

#[test]
fn the_closed_form_agrees_with_published_values() {
    // No wait at all happens with probability 1 - load; the mean is load / (2 (1 - load)).
    assert!((waits_at_most(0.0, 0.7) - 0.3).abs() < 1e-12);
    let mean: f64 = (0..20_000).map(|step| 0.001 * (1.0 - waits_at_most(f64::from(step) * 0.001, 0.6))).sum();
    assert!((mean - 0.75).abs() < 1e-3, "{mean}");
}

#[test]
fn the_search_finds_the_knee_of_a_known_queue_within_five_percent_in_nine_of_ten_seeds() {
    let knee = analytic_knee(SERVICE, THRESHOLD, TARGET);
    let found: Vec<GoodputResult> =
        (0..10).map(|seed| swept(plan(), RunRule::default(), seed, |_| Box::new(md1()))).collect();
    let near =
        |goodput: &&GoodputResult| goodput.requests_per_second.is_some_and(|rate| (rate / knee - 1.0).abs() <= 0.05);
    let told: Vec<_> = found.iter().map(|at| (at.status, at.highest_clearing, at.lowest_failing, at.spread)).collect();
    assert!(found.iter().filter(near).count() >= 9, "knee {knee:.3}: {told:#?}");
    let halves = found.iter().filter_map(|goodput| Some(goodput.per_gpu? / goodput.per_replica?));
    assert!(halves.clone().count() >= 9 && halves.into_iter().all(|half| half == 0.5));
}

#[test]
fn a_rate_beyond_capacity_is_unsteady_and_has_no_attainment() {
    // Fast at first: half of the requests that are counted are met.
    let next = NextRun { cache: CacheState::Cold, rate: 12.0, repetition: 1, number: 0 };
    let rule = RunRule { warm_up_seconds: 1.0, ..RunRule::default() };
    let result = run(rule, next, 1, &mut md1());
    assert_eq!(result.verdict, RunVerdict::Unsteady, "{result:?}");
    assert_eq!((result.classes[0].attainment, result.classes[0].interval), (None, None));
    assert!(result.classes[0].objectives.is_empty());
    assert!(result.throughput.requests_per_second > 9.0, "what flowed is no secret");
}

#[test]
fn repetitions_that_disagree_are_noise_and_no_number() {
    let speeds = [1.0, 0.75, 1.25];
    let service = |repetition: u32| {
        let (mut free, time) = (0.0_f64, SERVICE * speeds[repetition as usize - 1]);
        Box::new(move |at: f64| {
            free = free.max(at) + time;
            free - at
        }) as Box<Service<'static>>
    };
    let found = swept(plan(), RunRule::default(), 1, service);
    assert_eq!((found.status, found.requests_per_second, found.per_gpu), (GoodputStatus::Noise, None, None));
    assert!(found.spread.unwrap() > 0.1 && found.explanation.contains("noise"), "{found:?}");
}

#[test]
fn a_search_without_an_end_says_which_way_to_look() {
    let instant = |_| Box::new(|_: f64| 0.01) as Box<Service<'static>>;
    let short = SearchSettings { start: 1.0, growth: 2.0, tolerance: 0.03, lowest: 0.5, highest: 8.0 };
    let bounded = SweepPlan { rates: RatePlan::Search(short), ..plan() };
    let found = swept(bounded.clone(), RunRule::default(), 1, instant);
    assert_eq!((found.status, found.highest_clearing), (GoodputStatus::AboveRange, Some(8.0)));
    let slow = |_| Box::new(|_: f64| 0.9) as Box<Service<'static>>;
    let found = swept(bounded, RunRule::default(), 1, slow);
    assert_eq!((found.status, found.lowest_failing), (GoodputStatus::BelowRange, Some(0.5)));
    assert_eq!(found.requests_per_second, None);
}

#[test]
fn one_repetition_is_a_look_and_no_result() {
    let once = SweepPlan { repetitions: 1, ..plan() };
    let found = swept(once, RunRule::default(), 4, |_| Box::new(md1()));
    assert_eq!((found.status, found.requests_per_second), (GoodputStatus::NotRepeated, None));
    assert!(found.highest_clearing.is_some());
}

#[test]
fn fixed_rates_are_measured_as_they_are_and_warm_follows_cold() {
    let warm = CacheState::Warm { hit_share: 0.5, groups: 1 };
    let fixed = SweepPlan {
        rates: RatePlan::Fixed(vec![2.0, 4.0]),
        repetitions: 2,
        caches: vec![CacheState::Cold, warm],
        ..plan()
    };
    let mut progress = SweepProgress::new(fixed);
    let mut order = Vec::new();
    while let Some(next) = progress.next_run() {
        order.push((next.cache.as_str(), next.rate, next.repetition, next.number));
        progress.note(run(RunRule::default(), next, next.number, &mut md1()));
    }
    let expected = [
        ("cold", 2.0, 1, 0),
        ("cold", 2.0, 2, 1),
        ("cold", 4.0, 1, 2),
        ("cold", 4.0, 2, 3),
        ("warm", 2.0, 1, 4),
        ("warm", 2.0, 2, 5),
        ("warm", 4.0, 1, 6),
        ("warm", 4.0, 2, 7),
    ];
    assert_eq!(order, expected);
    let results = progress.results();
    assert_eq!(results.iter().map(|result| result.points.len()).collect::<Vec<_>>(), [2, 2]);
    assert!(results[1].points[0].classes[0].judged > results[1].points[0].runs[0].classes[0].judged, "pooled");
}

#[test]
fn a_sweep_that_is_cut_short_keeps_what_was_measured_and_publishes_nothing() {
    let mut progress = SweepProgress::new(plan());
    for _ in 0..4 {
        let next = progress.next_run().unwrap();
        progress.note(run(RunRule::default(), next, next.number, &mut md1()));
    }
    progress.stop();
    assert_eq!(progress.next_run(), None);
    let result = progress.results().remove(0);
    assert_eq!((result.goodput.status, result.goodput.requests_per_second), (GoodputStatus::Partial, None));
    assert_eq!(result.points.iter().map(|point| point.runs.len()).collect::<Vec<_>>(), [3, 1]);
}

/// Requests that arrive last are slowest to end: a count of what has ended would leave them out.
#[test]
fn what_counts_is_the_order_of_arrival_and_not_what_has_ended() {
    let mut chance = StdRng::seed_from_u64(2);
    let mut service = move |_: f64| if chance.random::<f64>() < 0.2 { 8.0 } else { 0.05 };
    let next = NextRun { cache: CacheState::Cold, rate: 50.0, repetition: 1, number: 0 };
    let rule = RunRule { min_seconds: 2.0, ..RunRule::default() };
    let result = run(rule, next, 1, &mut service);
    let attainment = result.classes[0].attainment.unwrap();
    assert_eq!(result.verdict, RunVerdict::Fails);
    assert!((attainment - 0.8).abs() < 0.12, "{attainment}");
    assert!(result.decided && result.counted_seconds < 5.0, "slow requests count once they are overdue");
}

#[test]
fn outcomes_of_no_request_decide_nothing() {
    let monitor = RunMonitor::new(RunRule::default(), vec![goals(1.0, 0.9).remove(0).goal], 1.0);
    let conclusion = monitor.finish(0.0, true);
    assert_eq!((conclusion.verdict, Outcomes::default().attainment()), (RunVerdict::Fails, 0.0));
}

//! The law of the stop rule: over queues of many kinds whose truth lies on the target, it calls no more of them something
//! else than it states.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, LogNormal};

use super::*;

/// One server, requests in the order of their arrival.
#[derive(Clone, Copy, Debug)]
struct QueueWorld {
    /// Share of the time that the server is busy.
    load: f64,
    /// Spread of service times, lognormal; 0: all alike.
    spread: f64,
    /// Share that should be met.
    target: f64,
}

const WORLDS: [QueueWorld; 8] = [
    QueueWorld { load: 0.5, spread: 0.0, target: 0.92 },
    QueueWorld { load: 0.8, spread: 0.0, target: 0.92 },
    QueueWorld { load: 0.9, spread: 0.0, target: 0.92 },
    QueueWorld { load: 0.95, spread: 0.0, target: 0.95 },
    QueueWorld { load: 0.8, spread: 0.0, target: 0.99 },
    QueueWorld { load: 0.7, spread: 0.8, target: 0.95 },
    QueueWorld { load: 0.85, spread: 1.0, target: 0.92 },
    QueueWorld { load: 0.6, spread: 1.2, target: 0.9 },
];

/// Requests per second; a service takes a share of the time between them.
const RATE: f64 = 10.0;

impl QueueWorld {
    /// Arrivals and latencies, from the server's stationary past on.
    fn requests(self, load: f64, seed: u64, count: usize) -> Vec<(f64, f64)> {
        let mut chance = StdRng::seed_from_u64(seed);
        let mean = load / RATE;
        let service = LogNormal::new(mean.ln() - self.spread * self.spread / 2.0, self.spread.max(1e-9)).unwrap();
        // Overrun, it has no stationary past.
        let past = if load < 1.0 { (10.0 / (1.0 - load).powi(2)) as usize } else { 0 };
        let (mut wait, mut at, mut found) = (0.0_f64, 0.0, Vec::new());
        for number in 0..past + count {
            let takes = if self.spread == 0.0 { mean } else { service.sample(&mut chance) };
            let gap = -(1.0 - chance.random::<f64>()).ln() / RATE;
            if number >= past {
                found.push((at, wait + takes));
                at += gap;
            }
            wait = (wait + takes - gap).max(0.0);
        }
        found
    }

    /// The threshold at which the target is the truth.
    fn threshold(self) -> f64 {
        let mut latencies: Vec<f64> =
            self.requests(self.load, 77, 120_000).into_iter().map(|(_, length)| length).collect();
        latencies.sort_by(f64::total_cmp);
        latencies[(latencies.len() as f64 * self.target) as usize]
    }
}

/// Watches a run of these requests as it happens; its conclusion and the requests it took.
fn watched(world: QueueWorld, threshold: f64, requests: &[(f64, f64)]) -> (RunConclusion, usize) {
    let goal =
        ClassGoal { target: world.target, threshold: Duration::from_secs_f64(threshold), is_ttft: true, weight: 1.0 };
    let rule = RunRule { warm_up_seconds: 1.0, min_seconds: 2.0, max_seconds: 400.0, ..RunRule::default() };
    let mut monitor = RunMonitor::new(rule, vec![goal], RATE);
    let sent = requests.iter().enumerate().map(|(number, (at, _))| (*at, number, true));
    let ended = requests.iter().enumerate().map(|(number, (at, length))| (at + length, number, false));
    let mut events: Vec<(f64, usize, bool)> = sent.chain(ended).collect();
    events.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (now, number, is_sent) in events {
        let (at, latency) = requests[number];
        let event = if is_sent {
            LoadEvent::Sent { number: number as u64, class: 0, at: Duration::from_secs_f64(at) }
        } else {
            let outcome = if latency <= threshold { "met" } else { "missed" };
            LoadEvent::Ended(Box::new(LoadRecord {
                number: number as u64,
                outcome: outcome.to_owned(),
                end_seconds: now,
                ttft_seconds: Some(latency),
                e2e_seconds: Some(latency),
                ..LoadRecord::default()
            }))
        };
        if monitor.note(&event, now) == RunStep::Enough {
            break;
        }
    }
    let seen = monitor.requests.len();
    let end = monitor.requests.last().map_or(0.0, |request| request.at);
    (monitor.finish(end, true), seen)
}

const RUNS: u64 = 24;

#[test]
fn a_run_whose_truth_is_its_target_is_decided_no_more_often_than_is_stated() {
    let (mut decided, mut runs) = (0, 0);
    for world in WORLDS {
        let threshold = world.threshold();
        let of_world = (0..RUNS)
            .filter(|seed| {
                let (conclusion, _) = watched(world, threshold, &world.requests(world.load, *seed, 4_500));
                conclusion.is_decided
            })
            .count();
        assert!(of_world <= 4, "{world:?}: {of_world} of {RUNS} runs");
        (decided, runs) = (decided + of_world, runs + RUNS as usize);
    }
    assert!(decided as f64 <= 0.05 * runs as f64, "{decided} of {runs} runs");
}

#[test]
fn a_service_that_is_overrun_or_far_below_its_knee_is_told_by_few_requests() {
    for world in [WORLDS[1], WORLDS[2], WORLDS[6]] {
        let threshold = world.threshold();
        let mean = |load: f64, verdicts: &[RunVerdict]| {
            let runs = (0..8).map(|seed| watched(world, threshold, &world.requests(load, seed, 4_500)));
            let sizes = runs.map(|(conclusion, size)| {
                assert!(verdicts.contains(&conclusion.verdict), "{world:?} at {load}: {conclusion:?}");
                size
            });
            sizes.sum::<usize>() as f64 / 8.0
        };
        let (half, over) =
            (mean(world.load / 2.0, &[RunVerdict::Clears]), mean(1.6, &[RunVerdict::Fails, RunVerdict::Unsteady]));
        assert!(half < 2_000.0 && over < 1_000.0, "{world:?}: {half} and {over} requests");
    }
}

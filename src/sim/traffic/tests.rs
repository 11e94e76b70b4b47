//! The load generator with a simulated engine, in virtual time.

use super::*;
use crate::judge::{Objective, Objectives};
use crate::sim::engine::{EngineSpec, LengthDistribution, SimEngine, SimSettings};
use crate::types::Tick;

fn open(engine: &SimEngine) -> Connector {
    let engine = engine.clone();
    Arc::new(move || {
        let stream = engine.connect();
        Box::pin(async move { Ok(Box::new(stream) as Box<dyn ByteStream>) })
    })
}

fn flow(name: &str, style: RequestStyle) -> TrafficFlow {
    let limit = |millis| Some(Objective { threshold: Duration::from_millis(millis), attainment: 0.95 });
    TrafficFlow {
        name: name.to_owned(),
        share: 1.0,
        style,
        input: LengthDistribution { p50: 100.0, p95: 400.0 },
        output: LengthDistribution { p50: 20.0, p95: 60.0 },
        headers: Vec::new(),
        leaves: 0.0,
        objectives: Objectives { ttft: limit(1000), tpot: limit(100), ..Objectives::default() },
    }
}

fn plan(flows: Vec<TrafficFlow>) -> TrafficPlan {
    TrafficPlan { seed: 3, rate: 20.0, swing: 0.0, period: Duration::from_secs(60), model: "sim".to_owned(), flows }
}

#[tokio::test(start_paused = true)]
async fn an_engine_with_room_meets_every_style_and_a_slow_one_misses() {
    for (speed, is_met) in [(1.0, true), (0.02, false)] {
        let clock = Clock::start();
        let shape = EngineSpec { speed, ..EngineSpec::default() };
        let engine = SimEngine::start(clock, SimSettings { shape, ..SimSettings::default() });
        let flows = vec![
            flow("chat", RequestStyle::Chat),
            flow("editor", RequestStyle::Completion),
            flow("agent", RequestStyle::Agent),
            flow("batch", RequestStyle::Batch),
        ];
        let traffic = Traffic::start(clock, open(&engine), plan(flows));
        clock.sleep_until(Some(Tick::from_millis(20_000))).await;
        for stats in traffic.stop(Duration::from_secs(3600)).await {
            assert!(stats.sent > 50, "{stats:?}");
            assert_eq!(stats.met + stats.missed, stats.sent, "{stats:?}");
            assert_eq!(stats.missed == 0, is_met, "{stats:?}");
            assert_eq!(stats.statuses.keys().copied().collect::<Vec<_>>(), [200], "{stats:?}");
            assert_eq!(stats.ttft.quantile(0.5).is_some(), matches!(stats.name.as_str(), "chat" | "editor"));
            assert!(stats.e2e.quantile(0.5).is_some());
        }
        assert_eq!(engine.gauges().running, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn who_leaves_in_time_is_excluded_and_who_leaves_late_is_a_miss() {
    for (speed, objective_holds) in [(1.0, true), (0.001, false)] {
        let clock = Clock::start();
        let shape = EngineSpec { speed, ..EngineSpec::default() };
        let engine = SimEngine::start(clock, SimSettings { shape, ..SimSettings::default() });
        let slow = TrafficFlow {
            leaves: 1.0,
            output: LengthDistribution { p50: 4000.0, p95: 4000.0 },
            ..flow("chat", RequestStyle::Chat)
        };
        let traffic = Traffic::start(clock, open(&engine), plan(vec![slow]));
        clock.sleep_until(Some(Tick::from_millis(10_000))).await;
        let stats = traffic.stop(Duration::from_secs(60)).await.remove(0);
        assert_eq!(stats.excluded + stats.missed, stats.sent);
        assert_eq!(stats.missed == 0, objective_holds, "{stats:?}");
        assert_eq!((engine.gauges().running, engine.gauges().waiting), (0, 0), "all have left");
    }
}

#[tokio::test(start_paused = true)]
async fn nobody_there_is_counted_as_unanswered() {
    let refuse: Connector = Arc::new(|| Box::pin(async { Err(std::io::ErrorKind::ConnectionRefused.into()) }));
    let clock = Clock::start();
    let traffic = Traffic::start(clock, refuse, plan(vec![flow("chat", RequestStyle::Chat)]));
    clock.sleep_until(Some(Tick::from_millis(5_000))).await;
    let stats = traffic.stop(Duration::from_secs(1)).await.remove(0);
    assert_eq!((stats.unanswered, stats.in_flight), (stats.sent, 0));
}

/// On one thread: a generator that never waits would starve all other tasks.
#[tokio::test(start_paused = true)]
async fn a_maker_that_is_hopelessly_behind_still_lets_others_work_and_ends_when_told() {
    let never: Connector = Arc::new(|| Box::pin(std::future::pending()));
    for is_told in [true, false] {
        let clock = Clock::start();
        let crowd = TrafficPlan { rate: 1e9, ..plan(vec![flow("chat", RequestStyle::Chat)]) };
        let traffic = Traffic::start(clock, Arc::clone(&never), crowd);
        tokio::task::yield_now().await;
        tokio::time::advance(Duration::from_secs(1)).await;
        while traffic.unsent() == 0 {
            tokio::task::yield_now().await;
        }
        if is_told {
            let stats = traffic.stop(Duration::from_secs(1)).await.remove(0);
            assert_eq!(stats.sent, MOST_IN_FLIGHT as u64);
        } else {
            drop(traffic);
        }
    }
}

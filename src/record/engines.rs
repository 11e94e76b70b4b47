//! What is known of the engines, as gauges that go away ten minutes after their engine did.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;

use crate::units::{EngineId, PoolId, Tick};

/// How long an engine's series outlive it, so that a dashboard can show its end.
const AFTERLIFE: Duration = Duration::from_secs(10 * 60);

/// The last report on one engine. What an engine does not tell is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineReport {
    /// It takes requests: healthy, breaker closed, not draining, not asleep.
    pub up: bool,
    /// Requests that wait inside the engine.
    pub waiting: Option<f64>,
    /// Requests that the engine computes.
    pub running: Option<f64>,
    /// Share of its KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Of our requests it should have so many at one time at most.
    pub seats: Option<f64>,
    /// How far predictions of the time to the first token were off, as a share of what was seen.
    pub ttft_error: Option<f64>,
    /// The same for the time per output token.
    pub tpot_error: Option<f64>,
}

#[derive(Debug)]
struct Known {
    report: EngineReport,
    left: Option<Tick>,
}

/// All engines of all pools.
#[derive(Debug, Default)]
pub(super) struct Engines(Mutex<BTreeMap<(PoolId, EngineId), Known>>);

impl Engines {
    pub(super) fn report(&self, pool: &PoolId, engine: &EngineId, report: EngineReport) {
        let known = Known { report, left: None };
        self.0.lock().insert((pool.clone(), engine.clone()), known);
    }

    /// The engine is no longer listed: it counts as down, and its other values end.
    pub(super) fn leave(&self, pool: &PoolId, engine: &EngineId, at: Tick) {
        if let Some(known) = self.0.lock().get_mut(&(pool.clone(), engine.clone())) {
            known.left.get_or_insert(at);
            known.report = EngineReport::default();
        }
    }

    pub(super) fn reports(&self, at: Tick) -> Vec<(PoolId, EngineId, EngineReport)> {
        let mut known = self.0.lock();
        known.retain(|_, known| known.left.is_none_or(|left| at.since(left) < AFTERLIFE));
        known.iter().map(|((pool, engine), known)| (pool.clone(), engine.clone(), known.report)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_told_for_ten_minutes_after_it_left_and_no_longer() {
        let (engines, pool, engine) = (Engines::default(), PoolId::from("a"), EngineId::from("e:1"));
        engines.report(&pool, &engine, EngineReport { up: true, waiting: Some(3.0), ..EngineReport::default() });
        engines.leave(&pool, &engine, Tick::from_millis(1000));
        engines.leave(&pool, &engine, Tick::from_millis(9000));
        let last = Tick::from_millis(1000) + AFTERLIFE;
        let told = engines.reports(Tick::from_nanos(last.as_nanos() - 1));
        assert_eq!(told, [(pool.clone(), engine.clone(), EngineReport::default())]);
        assert_eq!(engines.reports(last), []);
    }

    #[test]
    fn an_engine_that_comes_back_is_told_again() {
        let (engines, pool, engine) = (Engines::default(), PoolId::from("a"), EngineId::from("e:1"));
        let up = EngineReport { up: true, ..EngineReport::default() };
        engines.report(&pool, &engine, up);
        engines.leave(&pool, &engine, Tick::ZERO);
        engines.report(&pool, &engine, up);
        assert_eq!(engines.reports(Tick::ZERO + 2 * AFTERLIFE).len(), 1);
    }
}

//! How the requests of each engine fared over the last hour: the engine of a request's last attempt.

use std::collections::HashMap;
use std::time::Duration;

use ahash::RandomState;
use parking_lot::Mutex;

use super::burn::JudgedCount;
use super::finished::RequestRecord;
use super::last_hour::LastHour;
use super::latency_counts::LatencyCounts;
use crate::judge::Outcome;
use crate::units::{EngineId, PoolId, Tick};

/// What one engine's judged requests came to over the last hour.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineHour {
    /// Requests met and judged.
    pub count: JudgedCount,
    /// TTFT of its streams, median and 95th percentile.
    pub ttft: Option<(Duration, Duration)>,
    /// TPOT of its streams, median and 95th percentile.
    pub tpot: Option<(Duration, Duration)>,
}

/// All engines that served a judged request in the last hour. One short lock per request.
#[derive(Debug, Default)]
pub(super) struct EngineStats(Mutex<HashMap<PoolId, EnginesOfPool, RandomState>>);

type EnginesOfPool = HashMap<EngineId, LastHour<EngineCounts>, RandomState>;

#[derive(Debug, Default)]
struct EngineCounts {
    count: JudgedCount,
    ttft: LatencyCounts,
    tpot: LatencyCounts,
}

impl EngineStats {
    /// A request ended.
    pub(super) fn note(&self, finished: &RequestRecord) {
        let outcome = finished.verdict.outcome;
        let (Some(pool), Some(engine), true) = (&finished.pool, &finished.engine, outcome.is_judged()) else { return };
        let mut pools = self.0.lock();
        let engines = match pools.get_mut(pool) {
            Some(engines) => engines,
            None => pools.entry(pool.clone()).or_default(),
        };
        let hour = match engines.get_mut(engine) {
            Some(hour) => hour,
            None => engines.entry(engine.clone()).or_default(),
        };
        let slot = hour.slot(finished.end);
        slot.count.judged += 1;
        slot.count.met += u64::from(outcome == Outcome::Met);
        if let Some(ttft) = finished.streamed_ttft() {
            slot.ttft.note(ttft);
        }
        if let Some((tpot, _)) = finished.streamed_tpot() {
            slot.tpot.note(tpot);
        }
    }

    /// Forgets engines that served nothing in the last hour.
    pub(super) fn prune(&self, at: Tick) {
        let mut pools = self.0.lock();
        pools.retain(|_, engines| {
            engines.retain(|_, hour| hour.live(at).next().is_some());
            !engines.is_empty()
        });
    }

    /// One engine's last hour.
    pub(super) fn hour(&self, pool: &PoolId, engine: &EngineId, at: Tick) -> EngineHour {
        let pools = self.0.lock();
        let Some(hour) = pools.get(pool).and_then(|engines| engines.get(engine)) else { return EngineHour::default() };
        let mut sum = EngineCounts::default();
        for slot in hour.live(at) {
            sum.count.met += slot.count.met;
            sum.count.judged += slot.count.judged;
            sum.ttft.add(&slot.ttft);
            sum.tpot.add(&slot.tpot);
        }
        let both = |counts: &LatencyCounts| counts.quantile(0.5).zip(counts.quantile(0.95));
        EngineHour { count: sum.count, ttft: both(&sum.ttft), tpot: both(&sum.tpot) }
    }
}

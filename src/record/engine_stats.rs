//! Results by engine, for the engine of a request's last attempt: over the last hour, and as series if the
//! settings enable them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::burn::JudgedCount;
use super::last_hour::LastHour;
use super::latency_counts::LatencyCounts;
use super::metrics::Metrics;
use super::request_record::RequestRecord;
use super::series::{EngineSeries, Map};
use crate::judge::Outcome;
use crate::types::{EngineId, PoolId, Tick};

/// Results of one engine's judged requests over the last hour.
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
pub(super) struct EngineStats {
    engines: Mutex<Map<PoolId, Map<EngineId, EngineEntry>>>,
    /// The settings ask for series by engine.
    has_series: AtomicBool,
}

#[derive(Debug, Default)]
struct EngineEntry {
    hour: LastHour<EngineCounts>,
    series: Option<EngineSeries>,
}

#[derive(Debug, Default)]
struct EngineCounts {
    count: JudgedCount,
    ttft: LatencyCounts,
    tpot: LatencyCounts,
}

impl EngineStats {
    /// Enables or disables series by engine. Disabling deletes the counts.
    pub(super) fn set_series(&self, metrics: &Metrics, has_series: bool) {
        self.has_series.store(has_series, Ordering::Relaxed);
        if !has_series {
            self.apply_settings(metrics, &[]);
        }
    }

    /// Sets the known engines, including recently removed ones: exactly these have series.
    pub(super) fn apply_settings(&self, metrics: &Metrics, known: &[(PoolId, EngineId)]) {
        let mut pools = self.engines.lock();
        for (pool, engines) in pools.iter_mut() {
            for (engine, entry) in engines.iter_mut() {
                if !known.iter().any(|(of, name)| of == pool && name == engine) {
                    entry.series = None;
                }
            }
        }
        if self.has_series.load(Ordering::Relaxed) {
            known.iter().for_each(|(pool, engine)| {
                EngineSeries::new(metrics, pool, engine);
            });
        }
        metrics.keep_engines(known);
    }

    /// A request ended.
    pub(super) fn note(&self, metrics: &Metrics, finished: &RequestRecord) {
        let outcome = finished.verdict.outcome;
        let (Some(pool), Some(engine), true) = (&finished.pool, &finished.engine, outcome.is_judged()) else { return };
        let mut pools = self.engines.lock();
        let engines = match pools.get_mut(pool) {
            Some(engines) => engines,
            None => pools.entry(pool.clone()).or_default(),
        };
        let entry = match engines.get_mut(engine) {
            Some(entry) => entry,
            None => engines.entry(engine.clone()).or_default(),
        };
        let (met, ttft, tpot) = (outcome == Outcome::Met, finished.streamed_ttft(), finished.streamed_tpot());
        let slot = entry.hour.slot(finished.end);
        slot.count.judged += 1;
        slot.count.met += u64::from(met);
        ttft.inspect(|ttft| slot.ttft.note(*ttft));
        tpot.inspect(|(tpot, _)| slot.tpot.note(*tpot));
        if self.has_series.load(Ordering::Relaxed) {
            let series = entry.series.get_or_insert_with(|| EngineSeries::new(metrics, pool, engine));
            series.note(met, ttft, tpot);
        }
    }

    /// Forgets engines that served nothing in the last hour. Their series stay.
    pub(super) fn prune(&self, at: Tick) {
        let mut pools = self.engines.lock();
        pools.retain(|_, engines| {
            engines.retain(|_, entry| entry.hour.live(at).next().is_some());
            !engines.is_empty()
        });
    }

    /// One engine's last hour.
    pub(super) fn hour(&self, pool: &PoolId, engine: &EngineId, at: Tick) -> EngineHour {
        let pools = self.engines.lock();
        let Some(entry) = pools.get(pool).and_then(|engines| engines.get(engine)) else { return EngineHour::default() };
        let mut sum = EngineCounts::default();
        for slot in entry.hour.live(at) {
            sum.count.met += slot.count.met;
            sum.count.judged += slot.count.judged;
            sum.ttft.add(&slot.ttft);
            sum.tpot.add(&slot.tpot);
        }
        let both = |counts: &LatencyCounts| counts.quantile(0.5).zip(counts.quantile(0.95));
        EngineHour { count: sum.count, ttft: both(&sum.ttft), tpot: both(&sum.tpot) }
    }
}

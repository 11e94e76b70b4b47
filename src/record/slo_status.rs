//! The SLO status of each class, the first thing an operator looks at.

use std::sync::Arc;
use std::time::Duration;

use crate::judge::{Missed, Quantiles};
use crate::types::{ClassId, EngineId, LengthBucket, PoolId, TenantId, Tick};

use super::burn::{Burn, WindowCount};
use super::history::SAMPLED_EVERY;
use super::length_drift::{DRIFT_FACTOR, LengthHistogram};
use super::series_table::{ClassSeries, ClassState};
use super::{EngineHour, HistoryPoint, HistorySpan, MissRecord, Recorder};

/// Source of a class's counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountSource {
    /// This process, since it started.
    Process,
    /// This gateway, over restarts (`telemetry.slo_state`).
    File,
    /// All gateways (`telemetry.prometheus`).
    Prometheus,
}

impl CountSource {
    /// Every source.
    pub const ALL: [CountSource; 3] = [CountSource::Process, CountSource::File, CountSource::Prometheus];

    /// The source of a class's figures at `at`.
    pub(super) fn of(burn: &Burn, at: Tick) -> CountSource {
        match burn.is_summed(at) {
            true => CountSource::Prometheus,
            false if burn.is_kept() => CountSource::File,
            false => CountSource::Process,
        }
    }

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            CountSource::Process => "process",
            CountSource::File => "file",
            CountSource::Prometheus => "prometheus",
        }
    }
}

/// The SLO status of one class.
#[derive(Clone, Debug, PartialEq)]
pub struct SloStatus {
    /// The class.
    pub class: ClassId,
    /// Target share of met requests.
    pub target: f64,
    /// Count of the class's own window.
    pub own: WindowCount,
    /// Unix time from which on it was counted, in seconds.
    pub since: u64,
    /// Source of its counts.
    pub source: CountSource,
    /// The same for each prompt length of which anything was judged.
    pub lengths: Vec<LengthStatus>,
    /// Deviation of lengths from those assumed, if known.
    pub drifts: Vec<WorkloadDrift>,
    /// Remaining share of the error budget; negative if overspent. Absent if nothing was
    /// judged.
    pub budget_left: Option<f64>,
    /// Burn rate of each window in which anything was
    /// judged.
    pub burn: Vec<(WindowCount, f64)>,
    /// Requests in flight.
    pub in_flight: u64,
    /// Of these, requests waiting for a seat.
    pub waiting: u64,
    /// Of these, requests with a broken objective.
    pub overdue: u64,
}

/// SLO status of one prompt length.
#[derive(Clone, Debug, PartialEq)]
pub struct LengthStatus {
    /// The length.
    pub length: LengthBucket,
    /// Counts in the class's window.
    pub own: WindowCount,
    /// The share of the budget of misses that is left.
    pub budget_left: f64,
    /// How many times too fast the budget is used, over each window in which anything was judged.
    pub burn: Vec<(WindowCount, f64)>,
}

/// A percentile of lengths against the assumed one.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkloadDrift {
    /// `input` or `output`.
    pub direction: &'static str,
    /// `p50` or `p95`.
    pub percentile: &'static str,
    /// Observed by assumed.
    pub ratio: f64,
}

impl WorkloadDrift {
    /// Whether it is another workload.
    #[must_use]
    pub fn is_another_workload(&self) -> bool {
        self.ratio > DRIFT_FACTOR || self.ratio < 1.0 / DRIFT_FACTOR
    }

    /// Advice for an operator; `None` for the assumed workload.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        let WorkloadDrift { direction, percentile, ratio } = self;
        self.is_another_workload().then(|| {
            format!(
                "{percentile} of {direction} tokens is {ratio:.2} times what the class assumes: capacity was found out for another \
                 workload; run the sweep again (goodput sweep) and correct workload_assumption"
            )
        })
    }
}

/// Windows in which anything was judged, with how fast the budget was used.
fn burns(burn: &Burn, at: Tick) -> Vec<(WindowCount, f64)> {
    let judged = burn.spans(at).filter(|span| span.count.judged > 0);
    judged.map(|span| (span, burn.rate(span.count))).collect()
}

/// Observed over assumed length, for each assumed quantile.
pub(super) fn drifts(
    series: &ClassSeries,
    memory: &mut ClassState,
    at: Tick,
    tell: &mut dyn FnMut(&'static str, &'static str, f64),
) {
    let Some(assumed) = series.promise.assumed else { return };
    let mut one = |direction: &'static str, lengths: &mut LengthHistogram, assumed: Option<Quantiles>| {
        let Some(Quantiles { p50, p95 }) = assumed else { return };
        for (name, q, assumed) in [("p50", 0.5, p50), ("p95", 0.95, p95)] {
            if let Some(seen) = lengths.quantile(q, at).filter(|_| assumed.0 > 0) {
                tell(direction, name, seen / assumed.0 as f64);
            }
        }
    };
    one("input", &mut memory.input, assumed.input_tokens);
    one("output", &mut memory.output, assumed.output_tokens);
}

impl Recorder {
    /// The status of every class, in the order of the settings.
    #[must_use]
    pub fn statuses(&self) -> Vec<SloStatus> {
        let at = self.now();
        let table = self.0.table.load();
        let places = self.0.open.places(at);
        let stand = |class: &ClassId| {
            let series = table.class(class)?;
            let mut memory = series.memory.lock();
            let own = memory.burn.own(at);
            let mut told = Vec::new();
            drifts(series, &mut memory, at, &mut |direction, percentile, ratio| {
                told.push(WorkloadDrift { direction, percentile, ratio });
            });
            let lengths = LengthBucket::ALL.iter().zip(&memory.lengths).filter_map(|(length, burn)| {
                let own = burn.own(at);
                let (budget_left, burn) = (burn.budget_left(at), burns(burn, at));
                (own.count.judged > 0).then_some(LengthStatus { length: *length, own, budget_left, burn })
            });
            let here = places.iter().filter(|place| place.class.as_ref() == Some(class));
            Some(SloStatus {
                class: class.clone(),
                target: series.promise.joint_target,
                own,
                since: self.0.clock.wall().saturating_sub(own.covered).as_secs(),
                source: CountSource::of(&memory.burn, at),
                lengths: lengths.collect(),
                drifts: told,
                budget_left: (own.count.judged > 0).then(|| memory.burn.budget_left(at)),
                burn: burns(&memory.burn, at),
                in_flight: here.clone().count() as u64,
                waiting: here.clone().filter(|place| place.waits).count() as u64,
                overdue: here.filter(|place| place.is_overdue).count() as u64,
            })
        };
        table.current.iter().filter_map(stand).collect()
    }

    /// Adds points to the histories of all classes as they become due. Never ends.
    pub async fn keep_history(self) {
        loop {
            let clock = self.0.clock;
            clock.sleep_until(Some(clock.now() + SAMPLED_EVERY)).await;
            self.sample_history();
        }
    }

    fn sample_history(&self) {
        let at = self.now();
        let table = self.0.table.load();
        for series in table.current.iter().filter_map(|class| table.class(class)) {
            let memory = &mut *series.memory.lock();
            let budget_left = (memory.burn.own(at).count.judged > 0).then(|| memory.burn.budget_left(at));
            memory.history.sample(budget_left, at);
        }
        self.0.engine_stats.prune(at);
    }

    /// How a class fared over this span: its length, and points of which the last is of this moment.
    /// `None`: the settings name no such class.
    #[must_use]
    pub fn history(&self, class: &ClassId, span: HistorySpan) -> Option<(Duration, Vec<HistoryPoint>)> {
        let at = self.now();
        let table = self.0.table.load();
        let memory = table.class(class)?.memory.lock();
        let budget_left = (memory.burn.own(at).count.judged > 0).then(|| memory.burn.budget_left(at));
        Some(memory.history.span(span, budget_left, at))
    }

    /// Why requests of a class missed in the last hour, the most frequent reason first.
    #[must_use]
    pub fn missed_last_hour(&self, class: &ClassId) -> Vec<(Missed, u64)> {
        let at = self.now();
        let table = self.0.table.load();
        let Some(series) = table.class(class) else { return Vec::new() };
        let memory = series.memory.lock();
        let count = |reason: Missed| memory.missed.live(at).map(|slot| u64::from(slot.0[reason as usize])).sum();
        let mut counts: Vec<(Missed, u64)> = Missed::ALL.iter().map(|&reason| (reason, count(reason))).collect();
        counts.retain(|(_, count)| *count > 0);
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        counts
    }

    /// How the requests of an engine fared over the last hour.
    #[must_use]
    pub fn engine_hour(&self, pool: &PoolId, engine: &EngineId) -> EngineHour {
        self.0.engine_stats.hour(pool, engine, self.now())
    }

    /// The last misses of each class and reason, the newest first.
    #[must_use]
    pub fn recent_misses(&self) -> Vec<Arc<MissRecord>> {
        self.0.misses.all()
    }

    /// Counts of a tenant since the start: met, judged, input and output tokens. `None` if it has no series
    /// of its own.
    #[must_use]
    pub fn tenant_totals(&self, tenant: &TenantId) -> Option<[u64; 4]> {
        self.0.table.load().tenant_totals(tenant)
    }

    /// Unix time at which the process started, in seconds.
    #[must_use]
    pub fn started_unix_seconds(&self) -> f64 {
        self.0.started
    }

    /// When settings were loaded last, in seconds of Unix time, and whether the last attempt did.
    #[must_use]
    pub fn settings_loaded(&self) -> (f64, bool) {
        let metrics = &self.0.metrics;
        (metrics.reload_timestamp.get(), metrics.reload_successful.get() == 1)
    }
}

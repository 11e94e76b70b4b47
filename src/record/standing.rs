//! The SLO status of each class, the first thing an operator looks at.

use std::sync::Arc;
use std::time::Duration;

use crate::judge::Missed;
use crate::units::{ClassId, EngineId, PoolId, TenantId};

use super::burn::WindowCount;
use super::history::SAMPLED_EVERY;
use super::{EngineHour, HistoryPoint, HistorySpan, MissRecord, Recorder};

/// The SLO status of one class.
#[derive(Clone, Debug, PartialEq)]
pub struct SloStatus {
    /// The class.
    pub class: ClassId,
    /// Target share of met requests.
    pub target: f64,
    /// Count of the class's own window.
    pub own: WindowCount,
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

impl Recorder {
    /// The status of every class, in the order of the settings.
    #[must_use]
    pub fn standings(&self) -> Vec<SloStatus> {
        let at = self.now();
        let table = self.0.table.load();
        let places = self.0.open.places(at);
        let stand = |class: &ClassId| {
            let series = table.class(class)?;
            let memory = series.memory.lock();
            let own = memory.burn.own(at);
            let judged = memory.burn.spans(at).filter(|span| span.count.judged > 0);
            let here = places.iter().filter(|place| place.class.as_ref() == Some(class));
            Some(SloStatus {
                class: class.clone(),
                target: series.promise.joint_target,
                own,
                budget_left: (own.count.judged > 0).then(|| memory.burn.budget_left(at)),
                burn: judged.map(|span| (span, memory.burn.rate(span.count))).collect(),
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

    /// What was counted of a tenant since the start: met, judged, input and output tokens. `None`: it has
    /// no series of its own.
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

//! Written down once: metrics, access line, journal, spans.
//!
//! The [`Recorder`] opens an [`ActiveRequest`] for each accepted request; its [`RequestEnd`] becomes one
//! [`RequestRecord`], and [`Recorder::note`] is the only place where requests are counted:
//! `met + missed + excluded = finished`. Gauges are computed when a page is requested. All
//! labels come from the settings ([`Recorder::bind`]), never from clients.

pub mod access;
mod active_request;
mod bucket_edges;
pub mod burn;
mod drill;
mod engine_stats;
mod engines;
mod family;
mod gauges;
mod history;
mod http_client;
mod in_flight;
pub mod journal;
mod journal_files;
mod journal_writer;
mod last_hour;
mod latency_counts;
pub mod length_drift;
mod metrics;
mod misses;
mod otlp;
mod process;
mod prometheus;
mod request_policy;
mod request_record;
mod series;
mod series_shape;
mod series_table;
pub mod settings;
mod slo_state;
mod slo_status;
mod spans;
#[cfg(test)]
mod tests;
pub mod trace;

pub use access::AccessLines;
pub use active_request::{ActiveRequest, RequestEnd};
pub use engine_stats::EngineHour;
pub use engines::EngineReport;
pub use history::{HistoryPoint, HistorySpan};
pub use journal_writer::{JournalSender, JournalWriter, journal};
pub use misses::MissRecord;
pub use otlp::{SpanExporter, SpanSender, spans};
pub use prometheus::{PrometheusReader, PrometheusStatus};
pub use request_policy::RequestPolicy;
pub use request_record::{AttemptFailure, AttemptRecord, PromptShape, RequestRecord, Retry, RetryCounts};
pub use series_shape::{ClassShape, SeriesShape, TenantShape};
pub use slo_state::{SloState, StateFile, StateLoad, StateSave, StateStamp};
pub use slo_status::{CountSource, LengthStatus, SloStatus, WorkloadDrift};

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::registry::Registry;
use tokio::sync::Notify;

use crate::clock::Clock;
use crate::types::{ClassId, ClientState, EngineId, ListenerStats, PoolId, RequestId, Tick, Tokens};

use engine_stats::EngineStats;
use gauges::GaugeCollector;
use in_flight::InFlightRegistry;
use metrics::Metrics;
use misses::RecentMisses;
use prometheus::SummedClass;
use request_record::SharedRecord;
use series_table::SeriesTable;
use slo_state::ClassCounts;
use trace::Sampling;

/// The recorded status of a request whose client left before a status was sent.
pub const LEFT: u16 = 499;

/// Number of series above which a warning is logged, because a scrape then takes several megabytes.
const MANY_SERIES: usize = 50_000;

/// Format of the metrics page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

/// Seats of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeatReport {
    /// Total seats.
    pub seats: usize,
    /// Occupied seats.
    pub taken: usize,
    /// Most prompt tokens outstanding at one engine, if limited.
    pub prefill: Option<Tokens>,
    /// Requests that wait at other gateways, if any tells of them.
    pub elsewhere: Option<u64>,
}

/// Overload level of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelReport {
    /// Number of levels in force.
    pub level: usize,
    /// Whether an operator set it.
    pub is_forced: bool,
    /// Remaining time of the operator's setting, if limited.
    pub forced_for: Option<Duration>,
}

/// Statistics of the shared limits store.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreReport {
    /// Whether it is in use.
    pub up: bool,
    /// Calls by result.
    pub calls: Vec<(&'static str, u64)>,
    /// Calls by duration: upper edges with counts, and the rest.
    pub lengths: (Vec<(Duration, u64)>, u64),
    /// Sum of all durations.
    pub length: Duration,
    /// How often the store was given up until a trial succeeded.
    pub given_up: u64,
    /// Requests by what admitted them.
    pub requests: Vec<(&'static str, u64)>,
    /// Tokens leased to this gateway and unused.
    pub unspent: u64,
    /// Calls by which gateways tell each other of their queues, by result.
    pub exchanges: Vec<(&'static str, u64)>,
    /// Other gateways heard of in the last one.
    pub gateways: u64,
}

/// Destinations of finished requests beside the metrics.
#[derive(Clone, Debug, Default)]
pub struct RecordSinks {
    /// Access lines.
    pub access: Option<AccessLines>,
    /// The journal.
    pub journal: Option<JournalSender>,
    /// Spans.
    pub spans: Option<SpanSender>,
}

/// Writes down what happened. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Recorder(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    clock: Clock,
    /// Start of the process, Unix seconds.
    started: f64,
    metrics: Metrics,
    table: ArcSwap<SeriesTable>,
    open: InFlightRegistry,
    misses: RecentMisses,
    engine_stats: EngineStats,
    engines: Mutex<Vec<(PoolId, EngineId, EngineReport)>>,
    seats: Mutex<Vec<(PoolId, SeatReport)>>,
    levels: Mutex<Vec<(ClassId, LevelReport)>>,
    store: Mutex<Option<StoreReport>>,
    listener_stats: ListenerStats,
    registry: Registry,
    sinks: RecordSinks,
    /// There are sinks beside the access lines.
    shares: bool,
    emptied: Notify,
    past: Mutex<PastCounts>,
    /// Result of the last read from Prometheus, if the settings name one.
    prometheus: Mutex<Option<PrometheusStatus>>,
}

/// Counts of previous processes.
#[derive(Debug, Default)]
struct PastCounts {
    /// The Unix time at the tick 0; zero if counts do not outlive the process.
    epoch: Duration,
    /// Classes that no settings have named yet.
    classes: BTreeMap<String, ClassCounts>,
}

impl Recorder {
    /// A recorder without settings; access lines go to `access`, if given.
    #[must_use]
    pub fn new(clock: Clock, access: Option<AccessLines>) -> Self {
        Self::with_sinks(clock, RecordSinks { access, ..RecordSinks::default() })
    }

    /// The same, for all that finished requests may go to.
    #[must_use]
    pub fn with_sinks(clock: Clock, sinks: RecordSinks) -> Self {
        let metrics = Metrics::new(sinks.spans.is_some());
        let table = ArcSwap::from_pointee(SeriesTable::empty(&metrics));
        Recorder(Arc::new_cyclic(|inner| {
            let mut registry = Registry::default();
            metrics.register(&mut registry);
            registry.register_collector(Box::new(GaugeCollector(inner.clone())));
            Inner {
                clock,
                started: clock.wall().as_secs_f64(),
                metrics,
                table,
                open: InFlightRegistry::default(),
                misses: RecentMisses::default(),
                engine_stats: EngineStats::default(),
                engines: Mutex::default(),
                seats: Mutex::default(),
                levels: Mutex::default(),
                store: Mutex::default(),
                listener_stats: ListenerStats::default(),
                registry,
                shares: sinks.journal.is_some() || sinks.spans.is_some(),
                sinks,
                emptied: Notify::new(),
                past: Mutex::default(),
                prometheus: Mutex::default(),
            }
        }))
    }

    /// Creates every series that these settings can reach. Called at start and at each reload;
    /// counters keep their values.
    pub fn bind(&self, shape: &SeriesShape) {
        let mut past = self.0.past.lock();
        let table = self.0.table.load().bind(&self.0.metrics, shape, self.now(), past.epoch);
        for class in &table.current {
            if let (Some(counts), Some(series)) = (past.classes.remove(class.as_str()), table.class(class)) {
                series.memory.lock().restore(&counts, self.now());
            }
        }
        drop(past);
        self.0.misses.keep_classes(&table.current);
        self.0.table.store(Arc::new(table));
        self.0.engine_stats.set_series(&self.0.metrics, shape.labels.series_by_engine);
        let series = self.0.metrics.series();
        if series > MANY_SERIES {
            tracing::warn!(
                series,
                "the metrics page has very many series: narrow `routes`, or omit labels (telemetry.drop_labels)"
            );
        }
    }

    /// Enables counts that outlive the process; those of the previous one are restored as classes are bound.
    /// Must be called before any settings are applied.
    pub fn keep_counts(&self, load: StateLoad) {
        for result in StateLoad::ALL {
            self.0.metrics.state_loads.at(vec![("result", result.into())]);
        }
        for result in StateSave::ALL {
            self.state_saved_counter(result);
        }
        self.0.metrics.state_loads.at(vec![("result", load.as_str().into())]).inc();
        let mut past = self.0.past.lock();
        past.epoch = self.0.clock.wall().saturating_sub(self.now().since(Tick::ZERO));
        if let StateLoad::Restored(state) = load {
            past.classes = state.classes;
        }
    }

    /// The counts of every class so far, for saving.
    #[must_use]
    pub fn slo_state(&self) -> SloState {
        let (table, mut classes) = (self.0.table.load(), self.0.past.lock().classes.clone());
        classes.extend(table.every_class().map(|(class, series)| (class.to_string(), series.memory.lock().counts())));
        SloState { saved_at: self.0.clock.wall().as_secs(), classes }
    }

    /// Counts a saving of the file of counts.
    pub fn state_saved(&self, result: StateSave) {
        self.state_saved_counter(result).inc();
    }

    fn state_saved_counter(&self, result: StateSave) -> prometheus_client::metrics::counter::Counter {
        self.0.metrics.state_saves.at(vec![("result", result.as_str().into())])
    }

    /// The windows of all classes, shortest first.
    fn burn_windows(&self) -> Vec<Duration> {
        let table = self.0.table.load();
        let classes = table.current.iter().filter_map(|class| table.class(class));
        let mut windows = BTreeSet::new();
        classes.for_each(|series| windows.extend(series.memory.lock().burn.windows()));
        windows.into_iter().collect()
    }

    /// Whether the settings name any of these classes.
    fn names_any<'a>(&self, mut classes: impl Iterator<Item = &'a String>) -> bool {
        let table = self.0.table.load();
        classes.any(|class| table.current.iter().any(|known| known.as_str() == class))
    }

    /// Budgets are read from a Prometheus; called before it is first asked.
    pub fn expect_prometheus(&self) {
        *self.0.prometheus.lock() = Some(PrometheusStatus::default());
        for success in [true, false] {
            self.prometheus_reads(success);
        }
    }

    /// Takes in what Prometheus has counted, to be used until then, or why it could not be read.
    fn prometheus_read(&self, read: Result<BTreeMap<String, SummedClass>, String>, until: Tick) {
        self.prometheus_reads(read.is_ok()).inc();
        let table = self.0.table.load();
        for (class, summed) in read.iter().flatten() {
            let Some(series) = table.class(&ClassId::from(class.as_str())) else { continue };
            series.memory.lock().set_summed(summed, until);
        }
        let mut status = self.0.prometheus.lock();
        let before = status.take().unwrap_or_default();
        *status = Some(match read {
            Ok(_) => PrometheusStatus { read_at: Some(self.now()), until, problem: None },
            Err(problem) => PrometheusStatus { problem: Some(problem), ..before },
        });
    }

    fn prometheus_reads(&self, success: bool) -> prometheus_client::metrics::counter::Counter {
        let result = if success { "success" } else { "failure" };
        self.0.metrics.prometheus_reads.at(vec![("result", result.into())])
    }

    /// Source of budgets and burn rates in a sentence, if the settings name a Prometheus.
    #[must_use]
    pub fn budgets_in_words(&self) -> Option<String> {
        self.0.prometheus.lock().as_ref().map(|status| status.in_words(self.now()))
    }

    /// Number of request series.
    #[must_use]
    pub fn series(&self) -> usize {
        self.0.metrics.series()
    }

    /// A request of this client arrived.
    pub fn open(&self, request_id: RequestId, arrival: Tick, client: ClientState) -> ActiveRequest {
        ActiveRequest::new(self.clone(), self.0.open.add(client), request_id, arrival)
    }

    /// Counts one request and writes its line. Nothing else counts requests.
    pub fn note(&self, finished: impl Into<Box<RequestRecord>>) {
        let finished = finished.into();
        let table = self.0.table.load();
        table.note(&finished);
        self.0.engine_stats.note(&self.0.metrics, &finished);
        self.0.misses.note(&finished, table.default_class());
        if self.0.shares {
            self.share(finished);
        } else if self.0.sinks.access.is_some() {
            self.write_access(SharedRecord::Own(finished));
        }
    }

    /// Hands a request to all sinks.
    fn share(&self, finished: Box<RequestRecord>) {
        let finished = Arc::<RequestRecord>::from(finished);
        if let Some(journal) = &self.0.sinks.journal {
            journal.write(SharedRecord::Shared(Arc::clone(&finished)));
        }
        if let Some(spans) = self.0.sinks.spans.as_ref().filter(|_| finished.kept_trace().is_some()) {
            spans.write(SharedRecord::Shared(Arc::clone(&finished)));
        }
        self.write_access(SharedRecord::Shared(finished));
    }

    /// Sampling rules, if spans are exported.
    fn sampling(&self) -> Option<&Sampling> {
        self.0.sinks.spans.as_ref().map(SpanSender::sampling)
    }

    fn write_access(&self, finished: SharedRecord) {
        if let Some(access) = &self.0.sinks.access {
            let written = access.write(finished);
            if !written {
                self.0.metrics.lines_dropped.inc();
            }
        }
    }

    /// A journal is kept.
    #[must_use]
    pub fn has_journal(&self) -> bool {
        self.0.sinks.journal.is_some()
    }

    /// Counters of the client listener and the gateway for events that never become requests.
    #[must_use]
    pub fn listener_stats(&self) -> &ListenerStats {
        &self.0.listener_stats
    }

    /// Requests in flight.
    #[must_use]
    pub fn open_visits(&self) -> usize {
        self.0.open.count()
    }

    /// Resolves when no request is in flight.
    pub async fn emptied(&self) {
        loop {
            let emptied = self.0.emptied.notified();
            tokio::pin!(emptied);
            emptied.as_mut().enable();
            if self.open_visits() == 0 {
                return;
            }
            emptied.await;
        }
    }

    /// The gap histogram's edges of a class.
    #[must_use]
    pub fn gap_edges(&self, class: &ClassId) -> Option<Arc<[Duration]>> {
        self.0.table.load().class(class).map(|series| series.gap_edges.clone())
    }

    /// The metrics page.
    #[must_use]
    pub fn page(&self, format: Format) -> String {
        if let Some(access) = &self.0.sinks.access {
            self.0.metrics.lines_dropped.inc_by(access.take_lost());
        }
        if let Some(journal) = &self.0.sinks.journal {
            self.0.metrics.count_journal(journal.lines());
        }
        if let Some(spans) = &self.0.sinks.spans {
            self.0.metrics.count_spans(spans.spans());
        }
        let mut page = String::new();
        let encoded = match format {
            Format::Text => prometheus_text::encode(&mut page, &self.0.registry),
            Format::OpenMetrics => text::encode(&mut page, &self.0.registry),
        };
        encoded.expect("writing into a string cannot fail");
        page
    }

    /// Replaces the reports of all engines.
    pub fn engines(&self, engines: Vec<(PoolId, EngineId, EngineReport)>) {
        let known: Vec<_> = engines.iter().map(|(pool, engine, _)| (pool.clone(), engine.clone())).collect();
        self.0.engine_stats.apply_settings(&self.0.metrics, &known);
        *self.0.engines.lock() = engines;
    }

    /// Replaces the seats of all pools with a limit.
    pub fn seats(&self, seats: Vec<(PoolId, SeatReport)>) {
        *self.0.seats.lock() = seats;
    }

    /// Replaces the overload levels of all classes that have any.
    pub fn levels(&self, levels: Vec<(ClassId, LevelReport)>) {
        *self.0.levels.lock() = levels;
    }

    /// Burn rate of the class in the last minute without shed requests; `None` if too few were
    /// judged.
    #[must_use]
    pub fn pressure(&self, class: &ClassId, at: Tick) -> Option<f64> {
        let table = self.0.table.load();
        let memory = table.class(class)?.memory.lock();
        memory.burn.pressure(at)
    }

    /// Counts misses that a drill invents, in the class `drill`.
    pub fn drill(&self, misses: u64) {
        self.0.table.load().drill(misses);
    }

    /// Replaces the statistics of the shared limits store.
    pub fn limits_store(&self, report: StoreReport) {
        *self.0.store.lock() = Some(report);
    }

    /// Counts a reload.
    pub fn reloaded(&self, success: bool) {
        let metrics = &self.0.metrics;
        metrics.reload(success).inc();
        metrics.reload_successful.set(i64::from(success));
        if success {
            metrics.reload_timestamp.set(self.0.clock.wall().as_secs_f64());
        }
    }

    fn now(&self) -> Tick {
        self.0.clock.now()
    }

    fn closed(&self, open: &in_flight::InFlightRequest) {
        if self.0.open.remove(open) {
            self.0.emptied.notify_waiters();
        }
    }
}

/// The names of all families on a page, to check documents against.
#[must_use]
pub fn names(page: &str) -> Vec<&str> {
    let typed = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    typed.filter_map(|line| line.split(' ').next()).collect()
}

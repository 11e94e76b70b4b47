//! Written down once: metrics, access line, journal, spans.
//!
//! The [`Recorder`] opens an [`ActiveRequest`] for each accepted request; its [`RequestEnd`] becomes one
//! [`RequestRecord`], and [`Recorder::note`] is the one place where requests are counted:
//! `met + missed + excluded = finished`. Gauges are worked out when a page is asked for. All
//! labels come from the settings ([`Recorder::bind`]); nothing a client sends becomes one.

pub mod access;
pub mod burn;
pub mod drift;
mod edges;
mod engines;
mod family;
mod finished;
pub mod journal;
mod journal_files;
mod journal_writer;
mod live;
mod metrics;
mod open;
mod otlp;
mod process;
mod series;
pub mod settings;
mod spans;
mod standing;
mod table;
#[cfg(test)]
mod tests;
pub mod trace;
mod visit;

pub use access::AccessLines;
pub use engines::EngineReport;
pub use finished::{PromptShape, RequestRecord, Retry, RetryCounts};
pub use journal_writer::{JournalSender, JournalWriter, journal};
pub use otlp::{SpanExporter, SpanSender, spans};
pub use standing::SloStatus;
pub use table::{ClassShape, SeriesShape, TenantShape};
pub use visit::{ActiveRequest, RequestEnd, RequestPolicy};

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::registry::Registry;
use tokio::sync::Notify;

use crate::clock::Clock;
use crate::units::{ClassId, Doorstep, EngineId, PoolId, RequestId, Tick, Tokens};

use finished::SharedRecord;
use live::GaugeCollector;
use metrics::Metrics;
use open::InFlightRegistry;
use table::Table;
use trace::Sampling;

/// The status that is written down where the client left before it got one.
pub const LEFT: u16 = 499;

/// With more series than these a warning says so: a scrape takes several megabytes.
const MANY_SERIES: usize = 50_000;

/// How a page of metrics is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

/// How many requests may run on a pool, and how many do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeatReport {
    /// Seats there are.
    pub seats: usize,
    /// Seats taken.
    pub taken: usize,
    /// Prompt tokens that each engine may have to read at one time, if that is limited.
    pub prefill: Option<Tokens>,
}

/// At which overload level a class is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelReport {
    /// Levels in force.
    pub level: usize,
    /// An operator has set it.
    pub is_forced: bool,
    /// For how long still, where that has an end.
    pub forced_for: Option<Duration>,
}

/// What was counted about the store in which gateways share the tenants' limits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoreReport {
    /// It is asked.
    pub up: bool,
    /// Calls, by how they ended.
    pub calls: Vec<(&'static str, u64)>,
    /// Calls by their length: upper edges with counts, and longer ones.
    pub lengths: (Vec<(Duration, u64)>, u64),
    /// All lengths together.
    pub length: Duration,
    /// How often it was given up, until a trial succeeded.
    pub given_up: u64,
    /// Requests, by who let them in.
    pub requests: Vec<(&'static str, u64)>,
    /// What is granted to this gateway and used by nobody.
    pub unspent: u64,
}

/// Where finished requests go beside the metrics.
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
    /// Unix time at which the process started, in seconds.
    started: f64,
    metrics: Metrics,
    table: ArcSwap<Table>,
    open: InFlightRegistry,
    engines: Mutex<Vec<(PoolId, EngineId, EngineReport)>>,
    seats: Mutex<Vec<(PoolId, SeatReport)>>,
    levels: Mutex<Vec<(ClassId, LevelReport)>>,
    store: Mutex<Option<StoreReport>>,
    doorstep: Doorstep,
    registry: Registry,
    sinks: RecordSinks,
    /// There are sinks beside the access lines.
    shares: bool,
    emptied: Notify,
}

impl Recorder {
    /// A recorder without settings; access lines go to `access`, if anywhere.
    #[must_use]
    pub fn new(clock: Clock, access: Option<AccessLines>) -> Self {
        Self::with_sinks(clock, RecordSinks { access, ..RecordSinks::default() })
    }

    /// The same, for all that finished requests may go to.
    #[must_use]
    pub fn with_sinks(clock: Clock, sinks: RecordSinks) -> Self {
        let metrics = Metrics::new(sinks.spans.is_some());
        let table = ArcSwap::from_pointee(Table::empty(&metrics));
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
                engines: Mutex::default(),
                seats: Mutex::default(),
                levels: Mutex::default(),
                store: Mutex::default(),
                doorstep: Doorstep::default(),
                registry,
                shares: sinks.journal.is_some() || sinks.spans.is_some(),
                sinks,
                emptied: Notify::new(),
            }
        }))
    }

    /// Makes every series that these settings can reach. Called at start and at each reload;
    /// counters keep their values.
    pub fn bind(&self, shape: &SeriesShape) {
        let table = self.0.table.load().bind(&self.0.metrics, shape, self.now());
        self.0.table.store(Arc::new(table));
        let series = self.0.metrics.series();
        if series > MANY_SERIES {
            tracing::warn!(
                series,
                "the page of metrics has very many series: narrow `routes`, or leave labels out (telemetry.drop_labels)"
            );
        }
    }

    /// How many series requests are counted in.
    #[must_use]
    pub fn series(&self) -> usize {
        self.0.metrics.series()
    }

    /// A request arrived.
    pub fn open(&self, request_id: RequestId, arrival: Tick) -> ActiveRequest {
        ActiveRequest::new(self.clone(), self.0.open.add(), request_id, arrival)
    }

    /// Counts one request and writes its line. Nothing else counts requests.
    pub fn note(&self, finished: impl Into<Box<RequestRecord>>) {
        let finished = finished.into();
        self.0.table.load().note(&finished);
        if self.0.shares {
            self.share(finished);
        } else if self.0.sinks.access.is_some() {
            self.write_access(SharedRecord::Own(finished));
        }
    }

    /// Hands a request to all sinks.
    fn share(&self, finished: Box<RequestRecord>) {
        let finished: Arc<RequestRecord> = Arc::from(finished);
        if let Some(journal) = &self.0.sinks.journal {
            journal.write(SharedRecord::Shared(Arc::clone(&finished)));
        }
        if let Some(spans) = self.0.sinks.spans.as_ref().filter(|_| finished.kept_trace().is_some()) {
            spans.write(SharedRecord::Shared(Arc::clone(&finished)));
        }
        self.write_access(SharedRecord::Shared(finished));
    }

    /// Which traces are kept, where spans are exported.
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

    /// Where the listener for clients, and the gateway behind it, count what never becomes a request.
    #[must_use]
    pub fn doorstep(&self) -> &Doorstep {
        &self.0.doorstep
    }

    /// Requests that have arrived and not ended.
    #[must_use]
    pub fn open_visits(&self) -> usize {
        self.0.open.count()
    }

    /// Waits until no visit is open.
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

    /// Edges by which a class's gaps are counted.
    #[must_use]
    pub fn gap_edges(&self, class: &ClassId) -> Option<Arc<[Duration]>> {
        self.0.table.load().class(class).map(|series| series.gap_edges.clone())
    }

    /// The page of metrics.
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

    /// The engines of all pools, as they are now: what is said of them replaces all that was.
    pub fn engines(&self, engines: Vec<(PoolId, EngineId, EngineReport)>) {
        *self.0.engines.lock() = engines;
    }

    /// The seats of every pool that has a limit, as they are now.
    pub fn seats(&self, seats: Vec<(PoolId, SeatReport)>) {
        *self.0.seats.lock() = seats;
    }

    /// The overload level of every class that has any, as it is now.
    pub fn levels(&self, levels: Vec<(ClassId, LevelReport)>) {
        *self.0.levels.lock() = levels;
    }

    /// How many times too fast a class used its budget of misses in the last minute, requests
    /// that were shed left out; `None` where too few were judged to tell.
    #[must_use]
    pub fn pressure(&self, class: &ClassId, at: Tick) -> Option<f64> {
        let table = self.0.table.load();
        let memory = table.class(class)?.memory.lock();
        memory.burn.pressure(at)
    }

    /// What was counted about the store of shared limits so far.
    pub fn limits_store(&self, report: StoreReport) {
        *self.0.store.lock() = Some(report);
    }

    /// Settings were loaded, or could not be and the old ones stay.
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

    fn closed(&self, open: &open::InFlightRequest) {
        if self.0.open.remove(open) {
            self.0.emptied.notify_waiters();
        }
    }
}

/// The name of every family, as the page writes it: for whoever checks documents against it.
#[must_use]
pub fn names(page: &str) -> Vec<&str> {
    let typed = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    typed.filter_map(|line| line.split(' ').next()).collect()
}

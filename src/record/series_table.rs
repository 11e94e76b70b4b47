//! The series of every label combination that requests can reach, resolved once.
//!
//! [`SeriesTable`] is built when settings load: all series exist at 0 from then on, and counting a request is a
//! few lookups by name followed by plain additions. It only grows: counters keep their values over a
//! reload, and requests that still run under older settings find their series. All labels come from
//! settings, never from clients.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;

use crate::admit::limit::{LimitKind, LimitScope};
use crate::admit::overload_control::ActionKind;
use crate::judge::{Missed, Objectives, Outcome};
use crate::reject::Rejection;
use crate::route::key_of;
use crate::types::{ClassId, LengthBucket, PoolId, TenantId, Tick};

use super::bucket_edges::BucketEdges;
use super::burn::Burn;
use super::drill::DrillSeries;
use super::history::ClassHistory;
use super::last_hour::LastHour;
use super::length_drift::LengthHistogram;
use super::metrics::Metrics;
use super::prometheus::SummedClass;
use super::request_record::{RequestRecord, Retry};
use super::series::{Histograms, Map, Measures, NONE, OTHER, PoolSeries, TenantSeries, UnclassifiedSeries};
use super::series_shape::{ClassShape, SeriesShape, TenantShape};
use super::slo_state::ClassCounts;

/// Number of tenants with series of their own; the others share `other`.
const TENANTS: usize = 200;

/// All series.
#[derive(Clone, Debug)]
pub(super) struct SeriesTable {
    /// Few, so a linear search beats hashing. Indices are stable over reloads.
    classes: Vec<(ClassId, Arc<ClassSeries>)>,
    tenants: Map<TenantId, Arc<TenantSeries>>,
    other_tenant: Option<Arc<TenantSeries>>,
    unclassed: Arc<UnclassifiedSeries>,
    /// `None` before the first settings.
    drill: Option<Arc<DrillSeries>>,
    retries: Arc<[Counter]>,
    /// In the order of [`Rejection::CODES`].
    refused: Arc<[Counter]>,
    default_class: ClassId,
    /// The classes of the current settings, in order.
    pub(super) current: Vec<ClassId>,
}

impl SeriesTable {
    /// A table before any settings: counts only requests without a class.
    pub(super) fn empty(metrics: &Metrics) -> Self {
        let retry = |retry: &Retry| metrics.retries.at(metrics.labels([("reason", retry.as_str())]));
        SeriesTable {
            classes: Vec::new(),
            tenants: Map::default(),
            other_tenant: None,
            unclassed: Arc::new(UnclassifiedSeries::new(metrics)),
            drill: None,
            retries: Retry::ALL.iter().map(retry).collect(),
            refused: Rejection::CODES.iter().map(|code| metrics.refused.at(metrics.labels([("code", code)]))).collect(),
            default_class: ClassId::from(NONE),
            current: Vec::new(),
        }
    }

    /// This table plus everything that `shape` can reach. `epoch` is the Unix time at the tick 0, or zero if
    /// counts do not outlive the process.
    pub(super) fn bind(&self, metrics: &Metrics, shape: &SeriesShape, at: Tick, epoch: Duration) -> Self {
        metrics.drop_labels(&shape.labels.dropped);
        if self.current.is_empty() {
            metrics.forget_unclassed();
        }
        let mut table = self.clone();
        table.unclassed = Arc::new(UnclassifiedSeries::new(metrics));
        table.drill = Some(Arc::new(DrillSeries::new(metrics)));
        table.default_class = shape.default_class.clone();
        table.current = shape.classes.iter().map(|class| class.id.clone()).collect();
        for class in &shape.classes {
            let known = self.class(&class.id);
            let routes = shape.routes.iter().filter(|(of, ..)| *of == class.id);
            let routes = routes.map(|(_, pool, model)| (pool.clone(), model.clone()));
            let routes = routes.chain(known.into_iter().flat_map(|known| known.routes())).collect();
            let memory = known.map(|known| known.memory.clone());
            let by_model = shape.labels.histograms_by_model;
            let memory = memory.unwrap_or_else(|| Arc::new(Mutex::new(ClassState::new(&class.objectives, at, epoch))));
            let series = Arc::new(ClassSeries::new(metrics, class, routes, by_model, memory, at));
            match self.place_of(&class.id) {
                Some(place) => table.classes[place].1 = series,
                None => table.classes.push((class.id.clone(), series)),
            }
        }
        // Only configured tenants take a place; removed ones keep their series.
        let mut places = TENANTS.saturating_sub(table.known_tenants(shape));
        for tenant in &shape.tenants {
            table.bind_tenant(metrics, tenant, &mut places);
        }
        table
    }

    fn known_tenants(&self, shape: &SeriesShape) -> usize {
        shape.tenants.iter().filter(|tenant| self.tenants.contains_key(&tenant.id)).count()
    }

    fn bind_tenant(&mut self, metrics: &Metrics, tenant: &TenantShape, places: &mut usize) {
        let place = |class: &ClassId| Some((class.clone(), self.place_of(class)?));
        let of_classes = tenant.classes.as_deref().unwrap_or(&self.current);
        let classes: Vec<_> = of_classes.iter().filter_map(place).collect();
        let is_known = self.tenants.contains_key(&tenant.id);
        if is_known || *places > 0 {
            *places -= usize::from(!is_known);
            let series = TenantSeries::new(metrics, tenant.id.as_str(), &classes, &tenant.limits);
            self.tenants.insert(tenant.id.clone(), Arc::new(series));
        } else {
            let all: Vec<_> =
                LimitKind::ALL.into_iter().flat_map(|limit| LimitScope::ALL.map(|scope| (limit, scope))).collect();
            let classes: Vec<_> = self.current.iter().filter_map(place).collect();
            self.other_tenant = Some(Arc::new(TenantSeries::new(metrics, OTHER, &classes, &all)));
        }
    }

    /// The series of a class.
    pub(super) fn class(&self, class: &ClassId) -> Option<&Arc<ClassSeries>> {
        self.place_of(class).map(|place| &self.classes[place].1)
    }

    /// Every class there ever was.
    pub(super) fn every_class(&self) -> impl Iterator<Item = (&ClassId, &Arc<ClassSeries>)> {
        self.classes.iter().map(|(class, series)| (class, series))
    }

    fn place_of(&self, class: &ClassId) -> Option<usize> {
        self.classes.iter().position(|(known, _)| known == class)
    }

    /// Counts one request in all its series.
    pub(super) fn note(&self, finished: &RequestRecord) {
        for (counter, &times) in self.retries.iter().zip(&finished.retries).filter(|(_, times)| **times > 0) {
            counter.inc_by(u64::from(times));
        }
        if let Some(refused) = finished.refusal.and_then(|code| self.refused(code)) {
            refused.inc();
        }
        let class = finished.booked_class(&self.default_class).and_then(|class| self.place_of(class));
        self.note_tenant(finished, class);
        match class {
            Some(place) => self.classes[place].1.note(finished),
            None => self.unclassed.note(finished.verdict.outcome),
        }
    }

    /// In whose books a miss without a class goes.
    pub(super) fn default_class(&self) -> &ClassId {
        &self.default_class
    }

    /// Counts of a tenant since the start: met, judged, input and output tokens. `None` if it has no series
    /// of its own.
    pub(super) fn tenant_totals(&self, tenant: &TenantId) -> Option<[u64; 4]> {
        self.tenants.get(tenant).map(|series| series.totals())
    }

    /// Counts test misses.
    pub(super) fn drill(&self, misses: u64) {
        self.drill.iter().for_each(|series| series.miss(misses));
    }

    fn refused(&self, code: &str) -> Option<&Counter> {
        let place = Rejection::CODES.iter().position(|known| *known == code)?;
        self.refused.get(place)
    }

    fn note_tenant(&self, finished: &RequestRecord, class: Option<usize>) {
        let Some(tenant) = &finished.tenant else { return };
        let Some(series) = self.tenants.get(tenant).or(self.other_tenant.as_ref()) else { return };
        if let Some((input, output)) = finished.tokens() {
            series.input.inc_by(input.0);
            series.output.inc_by(output.0);
        }
        series.note_limits(finished);
        let outcome = finished.verdict.outcome;
        if let Some(pair) = class.and_then(|class| series.class(class)).filter(|_| outcome.is_judged()) {
            pair.note(outcome == Outcome::Met);
        }
    }
}

/// The series of one class.
#[derive(Debug)]
pub(super) struct ClassSeries {
    /// The class's current objectives.
    pub(super) promise: Arc<Objectives>,
    /// Windows and length histograms.
    pub(super) memory: Arc<Mutex<ClassState>>,
    /// Edges of its gap histogram.
    pub(super) gap_edges: Arc<[Duration]>,
    /// Few, so searched linearly.
    pools: Vec<(PoolId, PoolSeries)>,
    nowhere: PoolSeries,
    /// In the order of [`ActionKind::ALL`].
    degraded: [Counter; ActionKind::ALL.len()],
}

/// Misses, in the order of [`Missed::ALL`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MissCounts(pub(super) [u32; Missed::COUNT]);

/// State of a class beside its counters.
#[derive(Debug)]
pub(super) struct ClassState {
    pub(super) burn: Burn,
    /// The same by prompt length, in the order of [`LengthBucket::ALL`].
    pub(super) lengths: [Burn; LengthBucket::ALL.len()],
    pub(super) history: ClassHistory,
    /// Misses of the last hour, in the order of [`Missed::ALL`].
    pub(super) missed: LastHour<MissCounts>,
    pub(super) input: LengthHistogram,
    pub(super) output: LengthHistogram,
}

impl ClassState {
    fn new(promise: &Objectives, at: Tick, epoch: Duration) -> Self {
        let burn = || Burn::at_epoch(promise.joint_target, promise.window, at, epoch);
        ClassState {
            burn: burn(),
            lengths: LengthBucket::ALL.map(|_| burn()),
            history: ClassHistory::new(promise.window, at),
            missed: LastHour::default(),
            input: LengthHistogram::default(),
            output: LengthHistogram::default(),
        }
    }

    fn promise(&mut self, promise: &Objectives, at: Tick) {
        let all = [&mut self.burn].into_iter().chain(&mut self.lengths);
        all.for_each(|burn| burn.promise(promise.joint_target, promise.window, at));
        self.history.set_window(promise.window, at);
    }

    /// The counts, for saving.
    pub(super) fn counts(&mut self) -> ClassCounts {
        let lengths = LengthBucket::ALL.iter().zip(&mut self.lengths);
        let lengths = lengths.map(|(length, burn)| (length.as_str().to_owned(), burn.state())).collect();
        ClassCounts { all: self.burn.state(), lengths }
    }

    /// Takes in what Prometheus has counted over all gateways.
    pub(super) fn set_summed(&mut self, summed: &SummedClass, until: Tick) {
        self.burn.set_summed(summed.all.clone(), until);
        for (burn, windows) in self.lengths.iter_mut().zip(&summed.lengths) {
            burn.set_summed(windows.clone(), until);
        }
    }

    /// Restores the counts of a previous process.
    pub(super) fn restore(&mut self, counts: &ClassCounts, at: Tick) {
        self.burn.restore(&counts.all, at);
        for (length, burn) in LengthBucket::ALL.iter().zip(&mut self.lengths) {
            if let Some(state) = counts.lengths.get(length.as_str()) {
                burn.restore(state, at);
            }
        }
    }
}

impl ClassSeries {
    fn new(
        metrics: &Metrics,
        class: &ClassShape,
        routes: Vec<(PoolId, Arc<str>)>,
        by_model: bool,
        memory: Arc<Mutex<ClassState>>,
        at: Tick,
    ) -> Self {
        let promise = &class.objectives;
        let edges = BucketEdges::of(promise);
        memory.lock().promise(promise, at);
        let mut pools: Vec<(PoolId, PoolSeries)> = Vec::new();
        for (pool, model) in routes {
            let place = pools.iter().position(|(known, _)| *known == pool).unwrap_or_else(|| {
                let place = (class.id.as_str(), pool.as_str());
                let histograms = (!by_model).then(|| Histograms::new(metrics, place.0, place.1, None, &edges));
                let measures = Measures::new(metrics, place.0, place.1, histograms);
                pools.push((pool.clone(), PoolSeries::new(metrics, class, pool.as_str(), Some(measures))));
                pools.len() - 1
            });
            let edges = by_model.then_some(&edges);
            pools[place].1.add_model(metrics, class.id.as_str(), pool.as_str(), &model, edges);
        }
        let mut nowhere = PoolSeries::new(metrics, class, NONE, None);
        nowhere.add_model(metrics, class.id.as_str(), NONE, &Arc::from(OTHER), None);
        let degraded = ActionKind::ALL
            .map(|kind| metrics.degraded.at(metrics.labels([("class", class.id.as_str()), ("action", kind.as_str())])));
        ClassSeries { promise: promise.clone(), memory, gap_edges: edges.gaps, pools, nowhere, degraded }
    }

    /// The pools on which the class can run.
    pub(super) fn pools(&self) -> impl Iterator<Item = &PoolId> {
        self.pools.iter().map(|(pool, _)| pool)
    }

    fn routes(&self) -> impl Iterator<Item = (PoolId, Arc<str>)> {
        self.pools.iter().flat_map(|(pool, series)| series.models.keys().map(|model| (pool.clone(), model.clone())))
    }

    fn pool(&self, pool: &PoolId) -> Option<&PoolSeries> {
        self.pools.iter().find(|(known, _)| known == pool).map(|(_, series)| series)
    }

    fn note(&self, finished: &RequestRecord) {
        let outcome = finished.verdict.outcome;
        let pool = finished.pool.as_ref().and_then(|pool| self.pool(pool));
        let model = pool.zip(finished.model.as_ref()).and_then(|(pool, model)| pool.models.get(model));
        let (pool, model) = match pool.zip(model) {
            Some((pool, model)) => (pool, Some(model)),
            None => (&self.nowhere, self.nowhere.models.get(OTHER)),
        };
        if let Some(model) = model {
            model.by_length[finished.length as usize].note(outcome);
        }
        pool.note(finished, model);
        for kind in finished.degraded.kinds.iter() {
            self.degraded[kind as usize].inc();
        }
        if outcome.is_judged() {
            self.remember(finished);
        }
    }

    fn remember(&self, finished: &RequestRecord) {
        let mut memory = self.memory.lock();
        let outcome = finished.verdict.outcome;
        memory.burn.note(outcome == Outcome::Met, finished.end);
        memory.history.note(outcome == Outcome::Met);
        if let Outcome::Missed(reason) = outcome {
            memory.missed.slot(finished.end).0[reason as usize] += 1;
        }
        memory.lengths[finished.length as usize].note(outcome == Outcome::Met, finished.end);
        let pressing = if outcome == Outcome::Met { outcome } else { finished.verdict.by_class };
        if pressing.is_judged() && pressing != Outcome::Missed(Missed::Shed) {
            let tenant = finished.tenant.as_ref().map_or(0, |tenant| key_of(tenant.as_str().as_bytes()));
            memory.burn.note_served_to(tenant, pressing == Outcome::Met, finished.end);
        }
        if let Some((input, output)) = finished.tokens().filter(|_| self.promise.assumed.is_some()) {
            memory.input.note(input, finished.end);
            memory.output.note(output, finished.end);
        }
    }
}

//! The series of every combination that requests can reach, resolved once.
//!
//! [`Table`] is made when settings load: all series exist at 0 from then on, and counting a
//! request is a few look-ups by name and then plain additions. It only grows: counters keep
//! their values over a reload, and a request that still runs under older settings finds its
//! series. All labels come from settings; nothing a client sends can add one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ahash::RandomState;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;

use crate::judge::{Excluded, Held, Missed, Objectives, Outcome, Verdict};
use crate::observe::{Timeline, TokenSource};
use crate::units::{ClassId, LengthBucket, PoolId, TenantId};

use super::burn::Burn;
use super::drift::Lengths;
use super::edges::Edges;
use super::family::{Histogram, Labels};
use super::finished::{Finished, Retry};
use super::metrics::Metrics;

type Map<K, V> = HashMap<K, V, RandomState>;

/// Tenants that get series of their own; the rest are `other` together.
const TENANTS: usize = 200;

/// Where a label has no value: before the class, before the pool.
pub(super) const NONE: &str = "none";
/// The model label where no route's pattern names it, and the tenants beyond [`TENANTS`].
const OTHER: &str = "other";

/// What the settings say about series.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Every class, with its objectives.
    pub classes: Vec<ClassShape>,
    /// In whose books a miss before classification goes.
    pub default_class: ClassId,
    /// Every class, pool and model label that the routes can bring together.
    pub routes: Vec<(ClassId, PoolId, Arc<str>)>,
    /// Every tenant, with the classes it may use; `None`: all of them.
    pub tenants: Vec<(TenantId, Option<Vec<ClassId>>)>,
}

/// One class of a [`Shape`].
#[derive(Clone, Debug)]
pub struct ClassShape {
    /// Its name.
    pub id: ClassId,
    /// What it promises.
    pub objectives: Arc<Objectives>,
    /// Requests may bring targets of their own, so TTFT and TPOT may be judged in any case.
    pub takes_targets: bool,
}

/// All series.
#[derive(Clone, Debug)]
pub(super) struct Table {
    classes: Map<ClassId, Arc<ClassSeries>>,
    tenants: Map<TenantId, Arc<TenantSeries>>,
    other_tenant: Option<Arc<TenantSeries>>,
    unclassed: Arc<Unclassed>,
    retries: Arc<[Counter]>,
    default_class: ClassId,
    /// The classes of the present settings, in their order.
    pub(super) current: Vec<ClassId>,
}

impl Table {
    /// Before any settings: only what has no class can be counted.
    pub(super) fn empty(metrics: &Metrics) -> Self {
        let retry = |retry: &Retry| metrics.retries.at(labels([("reason", retry.as_str())]));
        Table {
            classes: Map::default(),
            tenants: Map::default(),
            other_tenant: None,
            unclassed: Arc::new(Unclassed::new(metrics)),
            retries: Retry::ALL.iter().map(retry).collect(),
            default_class: ClassId::from(NONE),
            current: Vec::new(),
        }
    }

    /// This table with everything that `shape` can reach.
    pub(super) fn bind(&self, metrics: &Metrics, shape: &Shape) -> Self {
        let mut table = self.clone();
        table.default_class = shape.default_class.clone();
        table.current = shape.classes.iter().map(|class| class.id.clone()).collect();
        for class in &shape.classes {
            let known = self.classes.get(&class.id);
            let routes = shape.routes.iter().filter(|(of, ..)| *of == class.id);
            let routes = routes.map(|(_, pool, model)| (pool.clone(), model.clone()));
            let routes = routes.chain(known.into_iter().flat_map(|known| known.routes())).collect();
            let memory = known.map(|known| known.memory.clone());
            table.classes.insert(class.id.clone(), Arc::new(ClassSeries::new(metrics, class, routes, memory)));
        }
        for (tenant, classes) in &shape.tenants {
            table.bind_tenant(metrics, tenant, classes.as_deref());
        }
        table
    }

    fn bind_tenant(&mut self, metrics: &Metrics, tenant: &TenantId, classes: Option<&[ClassId]>) {
        let classes = classes.unwrap_or(&self.current);
        if self.tenants.contains_key(tenant) || self.tenants.len() < TENANTS {
            let series = TenantSeries::new(metrics, tenant.as_str(), classes);
            self.tenants.insert(tenant.clone(), Arc::new(series));
        } else {
            self.other_tenant = Some(Arc::new(TenantSeries::new(metrics, OTHER, &self.current)));
        }
    }

    /// One class's series.
    pub(super) fn class(&self, class: &ClassId) -> Option<&Arc<ClassSeries>> {
        self.classes.get(class)
    }

    /// Counts one request, everywhere.
    pub(super) fn note(&self, finished: &Finished) {
        for (counter, &times) in self.retries.iter().zip(&finished.retries).filter(|(_, times)| **times > 0) {
            counter.inc_by(u64::from(times));
        }
        let class = finished.booked_class(&self.default_class);
        self.note_tenant(finished, class);
        match class.and_then(|class| self.classes.get(class)) {
            Some(class) => class.note(finished),
            None => self.unclassed.note(finished.verdict.outcome),
        }
    }

    fn note_tenant(&self, finished: &Finished, class: Option<&ClassId>) {
        let Some(tenant) = &finished.tenant else { return };
        let Some(series) = self.tenants.get(tenant).or(self.other_tenant.as_ref()) else { return };
        if let Some((input, output)) = finished.tokens() {
            series.input.inc_by(input.0);
            series.output.inc_by(output.0);
        }
        let outcome = finished.verdict.outcome;
        if let Some(pair) = class.and_then(|class| series.classes.get(class)).filter(|_| outcome.is_judged()) {
            pair.note(outcome == Outcome::Met);
        }
    }
}

/// The series of one class.
#[derive(Debug)]
pub(super) struct ClassSeries {
    /// What the class promises now.
    pub(super) promise: Arc<Objectives>,
    /// Windows and lengths.
    pub(super) memory: Arc<Mutex<Memory>>,
    /// Edges by which its gaps are counted.
    pub(super) gap_edges: Arc<[Duration]>,
    pools: Map<PoolId, PoolSeries>,
    nowhere: PoolSeries,
}

/// What a class remembers beside counters.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) burn: Burn,
    pub(super) input: Lengths,
    pub(super) output: Lengths,
}

impl ClassSeries {
    fn new(
        metrics: &Metrics,
        class: &ClassShape,
        routes: Vec<(PoolId, Arc<str>)>,
        memory: Option<Arc<Mutex<Memory>>>,
    ) -> Self {
        let promise = &class.objectives;
        let edges = Edges::of(promise);
        let memory = memory.unwrap_or_else(|| {
            let burn = Burn::new(promise.joint_target, promise.window);
            Arc::new(Mutex::new(Memory { burn, input: Lengths::default(), output: Lengths::default() }))
        });
        memory.lock().burn.promise(promise.joint_target, promise.window);
        let mut pools: Map<PoolId, PoolSeries> = Map::default();
        for (pool, model) in routes {
            let measures = || Measures::new(metrics, class.id.as_str(), pool.as_str(), &edges);
            let series = pools
                .entry(pool.clone())
                .or_insert_with(|| PoolSeries::new(metrics, class, pool.as_str(), Some(measures())));
            series.add_model(metrics, class.id.as_str(), pool.as_str(), &model);
        }
        let mut nowhere = PoolSeries::new(metrics, class, NONE, None);
        nowhere.add_model(metrics, class.id.as_str(), NONE, &Arc::from(OTHER));
        ClassSeries { promise: promise.clone(), memory, gap_edges: edges.gaps, pools, nowhere }
    }

    /// The pools on which the class can run.
    pub(super) fn pools(&self) -> impl Iterator<Item = &PoolId> {
        self.pools.keys()
    }

    fn routes(&self) -> impl Iterator<Item = (PoolId, Arc<str>)> {
        let models = |(pool, series): (&PoolId, &PoolSeries)| {
            let pool = pool.clone();
            let models: Vec<Arc<str>> = series.models.keys().cloned().collect();
            models.into_iter().map(move |model| (pool.clone(), model))
        };
        self.pools.iter().flat_map(models)
    }

    fn note(&self, finished: &Finished) {
        let outcome = finished.verdict.outcome;
        let pool = finished.pool.as_ref().and_then(|pool| self.pools.get(pool));
        let model = pool.zip(finished.model.as_ref()).and_then(|(pool, model)| pool.models.get(model));
        let (pool, model) = match pool.zip(model) {
            Some((pool, model)) => (pool, Some(model)),
            None => (&self.nowhere, self.nowhere.models.get(OTHER)),
        };
        if let Some(model) = model {
            model.lengths[finished.length as usize].note(outcome);
        }
        pool.note(finished);
        if outcome.is_judged() {
            self.remember(finished);
        }
    }

    fn remember(&self, finished: &Finished) {
        let mut memory = self.memory.lock();
        memory.burn.note(finished.verdict.outcome == Outcome::Met, finished.end);
        if let Some((input, output)) = finished.tokens().filter(|_| self.promise.assumed.is_some()) {
            memory.input.note(input, finished.end);
            memory.output.note(output, finished.end);
        }
    }
}

/// The series of a class on a pool.
#[derive(Debug)]
struct PoolSeries {
    missed: Box<[Counter]>,
    excluded: Box<[Counter]>,
    ttft: Option<Pair>,
    tpot: Option<Pair>,
    itl: Option<Pair>,
    e2e: Option<Pair>,
    measures: Option<Measures>,
    models: Map<Arc<str>, ModelSeries>,
}

impl PoolSeries {
    fn new(metrics: &Metrics, class: &ClassShape, pool: &str, measures: Option<Measures>) -> Self {
        let place = |(name, value)| labels([("class", class.id.as_str()), ("pool", pool), (name, value)]);
        let objective = |exists: bool, name: &'static str| {
            exists.then(|| Pair {
                met: metrics.objective_met.at(place(("objective", name))),
                all: metrics.objective.at(place(("objective", name))),
            })
        };
        let (promise, targets) = (&class.objectives, class.takes_targets);
        let budget = promise.e2e.is_some() || targets || promise.derived_budget(1).is_some();
        PoolSeries {
            missed: Missed::ALL.iter().map(|reason| metrics.missed.at(place(("reason", reason.as_str())))).collect(),
            excluded: Excluded::ALL.iter().map(|why| metrics.excluded.at(place(("reason", why.as_str())))).collect(),
            ttft: objective(promise.ttft.is_some() || targets, "ttft"),
            tpot: objective(promise.tpot.is_some() || targets, "tpot"),
            itl: objective(promise.itl.is_some(), "itl"),
            e2e: objective(budget, "e2e"),
            measures,
            models: Map::default(),
        }
    }

    fn add_model(&mut self, metrics: &Metrics, class: &str, pool: &str, model: &Arc<str>) {
        self.models.entry(model.clone()).or_insert_with(|| ModelSeries::new(metrics, class, pool, model));
    }

    fn note(&self, finished: &Finished) {
        let verdict = &finished.verdict;
        match verdict.outcome {
            Outcome::Met => {}
            Outcome::Missed(reason) => {
                self.missed[reason as usize].inc();
            }
            Outcome::Excluded(reason) => {
                self.excluded[reason as usize].inc();
            }
        }
        if verdict.outcome.is_judged() {
            self.note_objectives(verdict);
        }
        if let Some(measures) = &self.measures {
            measures.note(finished);
        }
    }

    fn note_objectives(&self, verdict: &Verdict) {
        let each = [
            (&self.ttft, verdict.ttft),
            (&self.tpot, verdict.tpot),
            (&self.itl, verdict.itl),
            (&self.e2e, verdict.e2e),
        ];
        for (pair, held) in each {
            match (pair, held) {
                (Some(pair), Some(Held::Held)) => pair.note(true),
                (Some(pair), Some(Held::Broken)) => pair.note(false),
                _ => {}
            }
        }
    }
}

/// Met, and met + missed.
#[derive(Debug)]
struct Pair {
    met: Counter,
    all: Counter,
}

impl Pair {
    fn note(&self, met: bool) {
        self.all.inc();
        if met {
            self.met.inc();
        }
    }
}

/// Histograms and companions of a class on a pool.
#[derive(Debug)]
struct Measures {
    ttft: Histogram,
    ttfvt: Histogram,
    tpot: Box<[Histogram]>,
    gap: Histogram,
    e2e: Histogram,
    queue: Histogram,
    upload: Histogram,
    cancel: Histogram,
    stalls: Counter,
    truncated: Counter,
}

impl Measures {
    fn new(metrics: &Metrics, class: &str, pool: &str, edges: &Edges) -> Self {
        let place = || labels([("class", class), ("pool", pool)]);
        let by_source = |source: &TokenSource| {
            let source = ("token_source", source.as_str());
            metrics.tpot.at(labels([("class", class), ("pool", pool), source]), &edges.tpot)
        };
        Measures {
            ttft: metrics.ttft.at(place(), &edges.ttft),
            ttfvt: metrics.ttfvt.at(place(), &edges.ttft),
            tpot: TokenSource::ALL.iter().map(by_source).collect(),
            gap: metrics.gap.at(place(), &edges.gaps),
            e2e: metrics.e2e.at(place(), &edges.e2e),
            queue: metrics.queue.at(place(), &edges.wait),
            upload: metrics.upload.at(place(), &edges.wait),
            cancel: metrics.cancel.at(place(), &edges.e2e),
            stalls: metrics.stalls.at(place()),
            truncated: metrics.truncated_answers.at(place()),
        }
    }

    /// Only points that were reached. What the engines did is told of judged requests, so that
    /// attainment by histogram is attainment by counter; waits are told of all.
    fn note(&self, finished: &Finished) {
        finished.upload().inspect(|length| self.upload.observe(*length));
        finished.queue().inspect(|length| self.queue.observe(*length));
        finished.left_after().inspect(|length| self.cancel.observe(*length));
        if !finished.verdict.outcome.is_judged() {
            return;
        }
        if let Some(answer) = finished.answer() {
            self.note_tokens(answer, finished.gap_edges.as_deref());
        }
        if let Some(answer) = finished.whole_answer() {
            self.note_end(answer);
        }
    }

    fn note_tokens(&self, answer: &Timeline, gap_edges: Option<&[Duration]>) {
        if answer.streamed {
            answer.ttft().inspect(|length| self.ttft.observe(*length));
            answer.ttfvt().inspect(|length| self.ttfvt.observe(*length));
        }
        if let Some(edges) = gap_edges {
            self.gap.absorb(edges, &answer.gaps.buckets, answer.gaps.sum);
        }
        self.stalls.inc_by(u64::from(answer.gaps.stalls));
    }

    fn note_end(&self, answer: &Timeline) {
        answer.e2e().inspect(|length| self.e2e.observe(*length));
        if answer.streamed && answer.limited.is_none() {
            answer.tpot().inspect(|length| self.tpot[answer.source as usize].observe(*length));
        }
        if answer.cut_by_length {
            self.truncated.inc();
        }
    }
}

/// The series of a class on a pool for one model.
#[derive(Debug)]
struct ModelSeries {
    lengths: Box<[LengthSeries]>,
}

#[derive(Debug)]
struct LengthSeries {
    slo: Pair,
    finished: [Counter; 3],
}

impl ModelSeries {
    fn new(metrics: &Metrics, class: &str, pool: &str, model: &str) -> Self {
        let of_length = |length: &LengthBucket| {
            let length = length.as_str();
            let place = || labels([("class", class), ("length", length), ("pool", pool), ("model", model)]);
            let finished = |outcome| {
                let outcome = ("outcome", Arc::from(outcome));
                metrics.finished.at(place().into_iter().chain([outcome]).collect())
            };
            LengthSeries {
                slo: Pair { met: metrics.slo_met.at(place()), all: metrics.slo.at(place()) },
                finished: ["met", "missed", "excluded"].map(finished),
            }
        };
        ModelSeries { lengths: LengthBucket::ALL.iter().map(of_length).collect() }
    }
}

impl LengthSeries {
    fn note(&self, outcome: Outcome) {
        let index = match outcome {
            Outcome::Met => 0,
            Outcome::Missed(_) => 1,
            Outcome::Excluded(_) => 2,
        };
        self.finished[index].inc();
        if outcome.is_judged() {
            self.slo.note(outcome == Outcome::Met);
        }
    }
}

/// The series of one tenant.
#[derive(Debug)]
struct TenantSeries {
    input: Counter,
    output: Counter,
    classes: Map<ClassId, Pair>,
}

impl TenantSeries {
    fn new(metrics: &Metrics, tenant: &str, classes: &[ClassId]) -> Self {
        let tokens = |direction| metrics.tokens.at(labels([("tenant", tenant), ("direction", direction)]));
        let pair = |class: &ClassId| {
            let place = || labels([("tenant", tenant), ("class", class.as_str())]);
            let pair = Pair { met: metrics.tenant_slo_met.at(place()), all: metrics.tenant_slo.at(place()) };
            (class.clone(), pair)
        };
        TenantSeries { input: tokens("input"), output: tokens("output"), classes: classes.iter().map(pair).collect() }
    }
}

/// Requests that ended before they had a class.
#[derive(Debug)]
struct Unclassed {
    finished: Counter,
    excluded: Box<[Counter]>,
}

impl Unclassed {
    fn new(metrics: &Metrics) -> Self {
        let place = [("class", NONE), ("length", LengthBucket::Unknown.as_str()), ("pool", NONE), ("model", OTHER)];
        let outcome = ("outcome", "excluded");
        let pairs: Vec<_> = place.into_iter().chain([outcome]).map(|(name, value)| (name, Arc::from(value))).collect();
        let excluded = |reason: &Excluded| {
            metrics.excluded.at(labels([("class", NONE), ("pool", NONE), ("reason", reason.as_str())]))
        };
        Unclassed { finished: metrics.finished.at(pairs), excluded: Excluded::ALL.iter().map(excluded).collect() }
    }

    /// A miss always has a class once settings are bound, and nothing is served before.
    fn note(&self, outcome: Outcome) {
        if let Outcome::Excluded(reason) = outcome {
            self.finished.inc();
            self.excluded[reason as usize].inc();
        }
    }
}

fn labels<const N: usize>(pairs: [(&'static str, &str); N]) -> Labels {
    pairs.into_iter().map(|(name, value)| (name, Arc::from(value))).collect()
}

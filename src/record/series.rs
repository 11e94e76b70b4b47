//! The series of one label combination: resolved once, then plain additions.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ahash::RandomState;
use prometheus_client::metrics::counter::Counter;

use crate::admit::limit::{LimitKind, LimitScope};
use crate::judge::{Excluded, Missed, ObjectiveState, Objectives, Outcome, Verdict};
use crate::observe::{Timeline, TokenSource};
use crate::types::{ClassId, EngineId, LengthBucket, PoolId, Tick};

use super::bucket_edges::BucketEdges;
use super::family::DurationHistogram;
use super::metrics::Metrics;
use super::request_record::RequestRecord;
use super::series_shape::ClassShape;
use super::trace::RequestTrace;

pub(super) type Map<K, V> = HashMap<K, V, RandomState>;

/// Label value before a class or pool is known.
pub(super) const NONE: &str = "none";
/// Label value of models that no pattern of a route names, and of tenants beyond the first 200.
pub(super) const OTHER: &str = "other";

/// The series of a class on a pool.
#[derive(Debug)]
pub(super) struct PoolSeries {
    missed: Box<[Counter]>,
    excluded: Box<[Counter]>,
    ttft: Option<ObjectiveCounters>,
    tpot: Option<ObjectiveCounters>,
    itl: Option<ObjectiveCounters>,
    e2e: Option<ObjectiveCounters>,
    measures: Option<Measures>,
    pub(super) models: Map<Arc<str>, ModelSeries>,
}

impl PoolSeries {
    pub(super) fn new(metrics: &Metrics, class: &ClassShape, pool: &str, measures: Option<Measures>) -> Self {
        let place = |(name, value)| metrics.labels([("class", class.id.as_str()), ("pool", pool), (name, value)]);
        let objective = |exists: bool, name: &'static str| {
            exists.then(|| ObjectiveCounters {
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

    /// Adds the series of a model; `edges` if it has its own histograms.
    pub(super) fn add_model(
        &mut self,
        metrics: &Metrics,
        class: &str,
        pool: &str,
        model: &Arc<str>,
        edges: Option<&BucketEdges>,
    ) {
        self.models.entry(model.clone()).or_insert_with(|| {
            let histograms = edges.map(|edges| Histograms::new(metrics, class, pool, Some(model), edges));
            ModelSeries::new(metrics, class, pool, model, histograms)
        });
    }

    pub(super) fn note(&self, finished: &RequestRecord, model: Option<&ModelSeries>) {
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
            measures.note(finished, model.and_then(|model| model.histograms.as_ref()));
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
                (Some(pair), Some(ObjectiveState::Held)) => pair.note(true),
                (Some(pair), Some(ObjectiveState::Broken)) => pair.note(false),
                _ => {}
            }
        }
    }
}

/// Objective counters: met, and met + missed.
#[derive(Debug)]
pub(super) struct ObjectiveCounters {
    met: Counter,
    all: Counter,
}

impl ObjectiveCounters {
    /// Met, and met + missed.
    fn read(&self) -> (u64, u64) {
        (self.met.get(), self.all.get())
    }

    pub(super) fn note(&self, met: bool) {
        self.all.inc();
        if met {
            self.met.inc();
        }
    }
}

/// Companion metrics of a class on a pool, and its histograms.
#[derive(Debug)]
pub(super) struct Measures {
    /// `None` if each model has its own.
    histograms: Option<Histograms>,
    stalls: Counter,
    truncated: Counter,
    capped: Counter,
    spilled: Counter,
}

/// Histograms of a class on a pool, or of one model there.
#[derive(Debug)]
pub(super) struct Histograms {
    ttft: DurationHistogram,
    ttfvt: DurationHistogram,
    tpot: Box<[DurationHistogram]>,
    gap: DurationHistogram,
    e2e: DurationHistogram,
    queue: DurationHistogram,
    upload: DurationHistogram,
    client_wait: DurationHistogram,
    cancel: DurationHistogram,
}

impl Measures {
    pub(super) fn new(metrics: &Metrics, class: &str, pool: &str, histograms: Option<Histograms>) -> Self {
        let place = || metrics.labels([("class", class), ("pool", pool)]);
        Measures {
            histograms,
            stalls: metrics.stalls.at(place()),
            truncated: metrics.truncated_answers.at(place()),
            capped: metrics.capped.at(place()),
            spilled: metrics.spilled.at(place()),
        }
    }

    /// Records points that were reached: engine latencies of judged requests, waits of all requests.
    /// Attainment is computed from the counters, not from these histograms.
    fn note(&self, finished: &RequestRecord, of_model: Option<&Histograms>) {
        // A request rejected by the further pool did not run there.
        if finished.spilled && finished.admitted.is_some() {
            self.spilled.inc();
        }
        if let Some(histograms) = self.histograms.as_ref().or(of_model) {
            histograms.note(finished);
        }
        if !finished.verdict.outcome.is_judged() {
            return;
        }
        if let Some(answer) = finished.answer() {
            self.stalls.inc_by(u64::from(answer.gaps.stalls));
        }
        if finished.whole_answer().is_some_and(|answer| answer.cut_by_length) {
            self.truncated.inc();
            self.capped.inc_by(u64::from(finished.cap_lowered));
        }
    }
}

impl Histograms {
    /// Series of a class on a pool, and of a model if models are distinguished.
    pub(super) fn new(metrics: &Metrics, class: &str, pool: &str, model: Option<&str>, edges: &BucketEdges) -> Self {
        let place = |source: Option<&TokenSource>| {
            let mut labels = metrics.labels([("class", class), ("pool", pool)]);
            labels.extend(model.map(|model| ("model", Arc::from(model))));
            labels.extend(source.map(|source| ("token_source", Arc::from(source.as_str()))));
            labels
        };
        let by_source = |source: &TokenSource| metrics.tpot.at(place(Some(source)), &edges.tpot);
        Histograms {
            ttft: metrics.ttft.at_with_exemplars(place(None), &edges.ttft, metrics.has_exemplars),
            ttfvt: metrics.ttfvt.at(place(None), &edges.ttft),
            tpot: TokenSource::ALL.iter().map(by_source).collect(),
            gap: metrics.gap.at(place(None), &edges.gaps),
            e2e: metrics.e2e.at_with_exemplars(place(None), &edges.e2e, metrics.has_exemplars),
            queue: metrics.queue.at(place(None), &edges.wait),
            upload: metrics.upload.at(place(None), &edges.wait),
            client_wait: metrics.client_wait.at(place(None), &edges.wait),
            cancel: metrics.cancel.at(place(None), &edges.e2e),
        }
    }

    fn note(&self, finished: &RequestRecord) {
        finished.upload().inspect(|length| self.upload.observe(*length));
        finished.client_wait.inspect(|length| self.client_wait.observe(*length));
        finished.queue().inspect(|length| self.queue.observe(*length));
        finished.left_after().inspect(|length| self.cancel.observe(*length));
        if !finished.verdict.outcome.is_judged() {
            return;
        }
        if let Some(answer) = finished.answer() {
            self.note_tokens(finished, answer);
        }
        if let Some(answer) = finished.whole_answer() {
            answer.e2e().inspect(|length| self.e2e.observe_traced(*length, traced(finished, answer.finish)));
        }
        finished.streamed_tpot().inspect(|(length, source)| self.tpot[*source as usize].observe(*length));
    }

    fn note_tokens(&self, finished: &RequestRecord, answer: &Timeline) {
        if answer.streamed {
            answer.ttft().inspect(|length| self.ttft.observe_traced(*length, traced(finished, answer.first_token)));
            answer.ttfvt().inspect(|length| self.ttfvt.observe(*length));
        }
        if let Some(edges) = finished.gap_edges.as_deref() {
            self.gap.absorb(edges, &answer.gaps.buckets, answer.gaps.sum);
        }
    }
}

/// The trace of a request, if it is kept, and the time of day at a moment of it.
fn traced(finished: &RequestRecord, at: Option<Tick>) -> Option<(&RequestTrace, Duration)> {
    let trace = finished.kept_trace()?;
    Some((trace, trace.arrival + at?.since(finished.arrival)))
}

/// The series of a class on a pool for one model.
#[derive(Debug)]
pub(super) struct ModelSeries {
    pub(super) by_length: Box<[LengthSeries]>,
    /// Its own histograms, if enabled in the settings.
    histograms: Option<Histograms>,
}

#[derive(Debug)]
pub(super) struct LengthSeries {
    slo: ObjectiveCounters,
    finished: [Counter; 3],
}

impl ModelSeries {
    pub(super) fn new(metrics: &Metrics, class: &str, pool: &str, model: &str, histograms: Option<Histograms>) -> Self {
        let of_length = |length: &LengthBucket| {
            let length = length.as_str();
            let place = || metrics.labels([("class", class), ("length", length), ("pool", pool), ("model", model)]);
            let finished = |outcome| {
                let outcome = ("outcome", Arc::from(outcome));
                metrics.finished.at(place().into_iter().chain([outcome]).collect())
            };
            LengthSeries {
                slo: ObjectiveCounters { met: metrics.slo_met.at(place()), all: metrics.slo.at(place()) },
                finished: ["met", "missed", "excluded"].map(finished),
            }
        };
        ModelSeries { by_length: LengthBucket::ALL.iter().map(of_length).collect(), histograms }
    }
}

impl LengthSeries {
    pub(super) fn note(&self, outcome: Outcome) {
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
pub(super) struct TenantSeries {
    pub(super) input: Counter,
    pub(super) output: Counter,
    /// For the classes that it may use, by class index.
    classes: Vec<Option<ObjectiveCounters>>,
    limited: Vec<((LimitKind, LimitScope), Counter)>,
    over_limit: Option<Counter>,
}

impl TenantSeries {
    pub(super) fn new(
        metrics: &Metrics,
        tenant: &str,
        classes: &[(ClassId, usize)],
        limits: &[(LimitKind, LimitScope)],
    ) -> Self {
        let tokens = |direction| metrics.tokens.at(metrics.labels([("tenant", tenant), ("direction", direction)]));
        let pair = |class: &ClassId| {
            let place = || metrics.labels([("tenant", tenant), ("class", class.as_str())]);
            ObjectiveCounters { met: metrics.tenant_slo_met.at(place()), all: metrics.tenant_slo.at(place()) }
        };
        let mut pairs = Vec::new();
        for (class, place) in classes {
            pairs.resize_with(pairs.len().max(place + 1), || None);
            pairs[*place] = Some(pair(class));
        }
        let limited = |which: &(LimitKind, LimitScope)| {
            let place = [("tenant", tenant), ("limit", which.0.as_str()), ("scope", which.1.as_str())];
            (*which, metrics.rate_limited.at(metrics.labels(place)))
        };
        let is_limited = !limits.is_empty();
        TenantSeries {
            input: tokens("input"),
            output: tokens("output"),
            classes: pairs,
            limited: limits.iter().map(limited).collect(),
            over_limit: is_limited.then(|| metrics.over_limit.at(metrics.labels([("tenant", tenant)]))),
        }
    }

    /// Met, judged, input and output tokens since the start.
    pub(super) fn totals(&self) -> [u64; 4] {
        let (met, judged) = self.classes.iter().flatten().fold((0, 0), |(met, judged), pair| {
            let (more, of) = pair.read();
            (met + more, judged + of)
        });
        [met, judged, self.input.get(), self.output.get()]
    }

    /// The counters of the class with this index.
    pub(super) fn class(&self, place: usize) -> Option<&ObjectiveCounters> {
        self.classes.get(place)?.as_ref()
    }

    /// Counts requests refused for a limit, and requests served beyond one.
    pub(super) fn note_limits(&self, finished: &RequestRecord) {
        let refused = finished.limited.and_then(|limit| self.limited.iter().find(|(of, _)| *of == limit));
        if let Some((_, counter)) = refused {
            counter.inc();
        }
        if let Some(counter) = self.over_limit.as_ref().filter(|_| finished.over_limit && !finished.attempts.is_empty())
        {
            counter.inc();
        }
    }
}

/// The series of one engine.
#[derive(Debug)]
pub(super) struct EngineSeries {
    slo: ObjectiveCounters,
    ttft: DurationHistogram,
    tpot: Box<[DurationHistogram]>,
}

impl EngineSeries {
    /// Existing counts continue.
    pub(super) fn new(metrics: &Metrics, pool: &PoolId, engine: &EngineId) -> Self {
        // Those of no class in particular: its requests are of several.
        let edges = BucketEdges::of(&Objectives::default());
        let place = || metrics.labels([("pool", pool.as_str()), ("engine", engine.as_str())]);
        let by_source = |source: &TokenSource| {
            let labels = place().into_iter().chain([("token_source", Arc::from(source.as_str()))]);
            metrics.engine_tpot.at(labels.collect(), &edges.tpot)
        };
        EngineSeries {
            slo: ObjectiveCounters { met: metrics.engine_slo_met.at(place()), all: metrics.engine_slo.at(place()) },
            ttft: metrics.engine_ttft.at(place(), &edges.ttft),
            tpot: TokenSource::ALL.iter().map(by_source).collect(),
        }
    }

    /// A judged request ended.
    pub(super) fn note(&self, met: bool, ttft: Option<Duration>, tpot: Option<(Duration, TokenSource)>) {
        self.slo.note(met);
        ttft.inspect(|length| self.ttft.observe(*length));
        tpot.inspect(|(length, source)| self.tpot[*source as usize].observe(*length));
    }
}

/// Requests that ended before classification.
#[derive(Debug)]
pub(super) struct UnclassifiedSeries {
    finished: Counter,
    excluded: Box<[Counter]>,
}

impl UnclassifiedSeries {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let unknown = LengthBucket::Unknown.as_str();
        let place = [("class", NONE), ("length", unknown), ("pool", NONE), ("model", OTHER), ("outcome", "excluded")];
        let excluded = |reason: &Excluded| {
            metrics.excluded.at(metrics.labels([("class", NONE), ("pool", NONE), ("reason", reason.as_str())]))
        };
        UnclassifiedSeries {
            finished: metrics.finished.at(metrics.labels(place)),
            excluded: Excluded::ALL.iter().map(excluded).collect(),
        }
    }

    /// Never called for a miss, which always has a class once settings are bound.
    pub(super) fn note(&self, outcome: Outcome) {
        if let Outcome::Excluded(reason) = outcome {
            self.finished.inc();
            self.excluded[reason as usize].inc();
        }
    }
}

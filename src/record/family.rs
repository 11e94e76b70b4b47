//! Metric families whose series are created when settings load, and kept in order.
//!
//! Handles are resolved once and used without label lookups; the families keep them only for the
//! page. Histograms have a type of their own because each series has its own edges (including the
//! class's thresholds), and because token gaps arrive as counts per
//! bucket.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use parking_lot::RwLock;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::{MetricType, TypedMetric};

use super::trace::RequestTrace;

/// The labels of a series, in page order.
pub(super) type Labels = Vec<(&'static str, Arc<str>)>;

/// All series of one name.
#[derive(Debug)]
pub(super) struct MetricFamily<M>(Arc<RwLock<BTreeMap<Labels, M>>>);

impl<M> Clone for MetricFamily<M> {
    fn clone(&self) -> Self {
        MetricFamily(self.0.clone())
    }
}

impl<M> Default for MetricFamily<M> {
    fn default() -> Self {
        MetricFamily(Arc::default())
    }
}

impl<M> MetricFamily<M> {
    /// Number of series.
    pub(super) fn len(&self) -> usize {
        self.0.read().len()
    }

    /// Forgets those whose labels this does not keep.
    pub(super) fn retain(&self, keeps: impl Fn(&Labels) -> bool) {
        self.0.write().retain(|labels, _| keeps(labels));
    }

    /// Removes all series.
    pub(super) fn clear(&self) {
        self.0.write().clear();
    }
}

impl MetricFamily<Counter> {
    /// The counter with these labels, created at 0.
    pub(super) fn at(&self, labels: Labels) -> Counter {
        self.0.write().entry(labels).or_default().clone()
    }
}

impl MetricFamily<DurationHistogram> {
    /// Number of lines on the page: one per edge, plus infinity, sum and count.
    pub(super) fn lines(&self) -> usize {
        self.0.read().values().map(|histogram| histogram.buckets.edges.len() + 3).sum()
    }

    /// The histogram with these labels. One with other edges is replaced by an empty one, because its counts
    /// cannot be converted.
    pub(super) fn at(&self, labels: Labels, edges: &Arc<[Duration]>) -> DurationHistogram {
        self.made(labels, edges, DurationHistogram::new)
    }

    /// The same, keeping an exemplar for each bucket if they are wanted.
    pub(super) fn at_with_exemplars(&self, labels: Labels, edges: &Arc<[Duration]>, wanted: bool) -> DurationHistogram {
        self.made(labels, edges, if wanted { DurationHistogram::with_exemplars } else { DurationHistogram::new })
    }

    fn made(
        &self,
        labels: Labels,
        edges: &Arc<[Duration]>,
        make: fn(Arc<[Duration]>) -> DurationHistogram,
    ) -> DurationHistogram {
        let mut series = self.0.write();
        let known = series.get(&labels).filter(|known| known.buckets.edges == *edges).cloned();
        known.unwrap_or_else(|| {
            let fresh = make(edges.clone());
            series.insert(labels, fresh.clone());
            fresh
        })
    }
}

impl<M: EncodeMetric + TypedMetric> EncodeMetric for MetricFamily<M> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for (labels, metric) in self.0.read().iter() {
            metric.encode(encoder.encode_family(labels)?)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        M::TYPE
    }
}

/// A histogram of durations.
#[derive(Clone, Debug)]
pub(super) struct DurationHistogram {
    buckets: Arc<Buckets>,
    /// Replaces the buckets if exemplars are kept, because only this type of the library writes exemplars.
    exemplars: Option<HistogramWithExemplars<ExemplarLabels>>,
}

/// Labels of an exemplar, which link a bucket to a trace.
type ExemplarLabels = Vec<(&'static str, String)>;

#[derive(Debug)]
struct Buckets {
    edges: Arc<[Duration]>,
    /// The edges in nanoseconds, as they are compared.
    edge_nanos: Box<[u64]>,
    counts: Box<[AtomicU64]>,
    sum_nanos: AtomicU64,
}

impl DurationHistogram {
    fn new(edges: Arc<[Duration]>) -> Self {
        let counts = (0..=edges.len()).map(|_| AtomicU64::new(0)).collect();
        let edge_nanos = edges.iter().copied().map(nanos).collect();
        let buckets = Arc::new(Buckets { edges, edge_nanos, counts, sum_nanos: AtomicU64::new(0) });
        DurationHistogram { buckets, exemplars: None }
    }

    fn with_exemplars(edges: Arc<[Duration]>) -> Self {
        let exemplars = HistogramWithExemplars::new(edges.iter().map(Duration::as_secs_f64));
        DurationHistogram { exemplars: Some(exemplars), ..DurationHistogram::new(edges) }
    }

    /// Counts one length, and keeps the trace of its request as its bucket's exemplar. `at` is the time of
    /// day at which it had passed.
    pub(super) fn observe_traced(&self, length: Duration, trace: Option<(&RequestTrace, Duration)>) {
        let Some(exemplars) = &self.exemplars else { return self.observe(length) };
        let labels = trace
            .map(|(trace, _)| vec![("trace_id", trace.context.trace.hex()), ("span_id", trace.context.span.hex())]);
        let at = trace.map(|(_, at)| UNIX_EPOCH + at);
        exemplars.observe(length.as_secs_f64(), labels, at);
    }

    /// Counts one duration.
    pub(super) fn observe(&self, length: Duration) {
        let nanos = nanos(length);
        self.add(nanos, 1);
        self.add_sum(nanos);
    }

    /// Adds counts by `edges` (one count more than edges). Counts by other edges, from before a reload, go
    /// into the bucket of their upper edge.
    pub(super) fn absorb(&self, edges: &[Duration], counts: &[u32], sum: Duration) {
        for (index, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            self.add(edges.get(index).copied().map_or(u64::MAX, nanos), u64::from(count));
        }
        self.add_sum(nanos(sum));
    }

    fn add(&self, nanos: u64, times: u64) {
        // Few edges, so a linear search is fastest.
        let Buckets { edge_nanos, counts, .. } = &*self.buckets;
        let bucket = edge_nanos.iter().position(|edge| nanos <= *edge).unwrap_or(edge_nanos.len());
        counts[bucket].fetch_add(times, Ordering::Relaxed);
    }

    fn add_sum(&self, nanos: u64) {
        self.buckets.sum_nanos.fetch_add(nanos, Ordering::Relaxed);
    }
}

/// Saturates.
fn nanos(length: Duration) -> u64 {
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

impl TypedMetric for DurationHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for DurationHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        if let Some(exemplars) = &self.exemplars {
            return exemplars.encode(encoder);
        }
        let Buckets { edges, counts, sum_nanos, .. } = &*self.buckets;
        let edges = edges.iter().map(Duration::as_secs_f64).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> =
            edges.zip(counts.iter()).map(|(edge, count)| (edge, count.load(Ordering::Relaxed))).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum = sum_nanos.load(Ordering::Relaxed) as f64 / 1e9;
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(millis: &[u64]) -> Arc<[Duration]> {
        millis.iter().copied().map(Duration::from_millis).collect()
    }

    fn counts(histogram: &DurationHistogram) -> Vec<u64> {
        histogram.buckets.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    #[test]
    fn a_length_on_an_edge_is_within_it() {
        let histogram = DurationHistogram::new(edges(&[10, 20]));
        for millis in [10, 11, 20, 21] {
            histogram.observe(Duration::from_millis(millis));
        }
        assert_eq!(counts(&histogram), [1, 2, 1]);
    }

    #[test]
    fn counts_by_older_edges_go_where_their_upper_edge_goes() {
        let histogram = DurationHistogram::new(edges(&[10, 25, 50]));
        histogram.absorb(&edges(&[10, 20]), &[3, 2, 1], Duration::from_millis(90));
        assert_eq!(counts(&histogram), [3, 2, 0, 1]);
    }

    #[test]
    fn the_same_edges_keep_what_was_counted_and_others_begin_anew() {
        let family = MetricFamily::<DurationHistogram>::default();
        family.at(vec![], &edges(&[10])).observe(Duration::from_millis(5));
        assert_eq!(counts(&family.at(vec![], &edges(&[10]))), [1, 0]);
        assert_eq!(counts(&family.at(vec![], &edges(&[20]))), [0, 0]);
    }
}

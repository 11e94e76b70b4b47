//! Registers every metric family in one place.
//!
//! Names are a promise to dashboards and alerts: `docs/semantics.md` defines what they count.
//! The library appends `_total` to counters, so their names here lack it.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use super::family::{DurationHistogram, Labels, MetricFamily};
use super::journal_writer::JournalCounts;
use super::otlp::SpanCounts;
use super::settings::RequestLabel;
use crate::types::{EngineId, PoolId};

/// Metrics changed by requests, reloads and dropped lines. Gauges computed at each scrape are in
/// `live`.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    /// Labels omitted from new series.
    dropped: RwLock<Vec<RequestLabel>>,
    pub(super) slo_met: MetricFamily<Counter>,
    pub(super) slo: MetricFamily<Counter>,
    pub(super) finished: MetricFamily<Counter>,
    pub(super) missed: MetricFamily<Counter>,
    pub(super) excluded: MetricFamily<Counter>,
    pub(super) objective_met: MetricFamily<Counter>,
    pub(super) objective: MetricFamily<Counter>,
    pub(super) tenant_slo_met: MetricFamily<Counter>,
    pub(super) tenant_slo: MetricFamily<Counter>,
    pub(super) tokens: MetricFamily<Counter>,
    pub(super) stalls: MetricFamily<Counter>,
    pub(super) truncated_answers: MetricFamily<Counter>,
    pub(super) retries: MetricFamily<Counter>,
    pub(super) refused: MetricFamily<Counter>,
    pub(super) rate_limited: MetricFamily<Counter>,
    pub(super) over_limit: MetricFamily<Counter>,
    pub(super) spilled: MetricFamily<Counter>,
    pub(super) degraded: MetricFamily<Counter>,
    pub(super) capped: MetricFamily<Counter>,
    pub(super) engine_slo_met: MetricFamily<Counter>,
    pub(super) engine_slo: MetricFamily<Counter>,
    pub(super) engine_ttft: MetricFamily<DurationHistogram>,
    pub(super) engine_tpot: MetricFamily<DurationHistogram>,
    pub(super) ttft: MetricFamily<DurationHistogram>,
    pub(super) ttfvt: MetricFamily<DurationHistogram>,
    pub(super) tpot: MetricFamily<DurationHistogram>,
    pub(super) gap: MetricFamily<DurationHistogram>,
    pub(super) e2e: MetricFamily<DurationHistogram>,
    pub(super) queue: MetricFamily<DurationHistogram>,
    pub(super) upload: MetricFamily<DurationHistogram>,
    pub(super) client_wait: MetricFamily<DurationHistogram>,
    pub(super) cancel: MetricFamily<DurationHistogram>,
    pub(super) reloads: MetricFamily<Counter>,
    pub(super) reload_successful: Gauge,
    pub(super) reload_timestamp: Gauge<f64, AtomicU64>,
    pub(super) lines_dropped: Counter,
    journal_lines: MetricFamily<Counter>,
    pub(super) state_loads: MetricFamily<Counter>,
    pub(super) state_saves: MetricFamily<Counter>,
    pub(super) prometheus_reads: MetricFamily<Counter>,
    spans: MetricFamily<Counter>,
    /// Histograms of what traces can explain keep one for each bucket.
    pub(super) has_exemplars: bool,
}

impl Metrics {
    /// All of them, at nothing.
    pub(super) fn new(has_exemplars: bool) -> Self {
        Metrics { has_exemplars, ..Metrics::default() }
    }

    /// Registers all families. Help texts name the start and end of each measure.
    pub(super) fn register(&self, registry: &mut Registry) {
        for success in [true, false] {
            self.reload(success);
        }
        registry.register(
            "slo_met",
            "Judged requests on which every objective of their class held",
            self.slo_met.clone(),
        );
        registry.register("slo", "Judged requests: met and missed, excluded ones left out", self.slo.clone());
        let own = registry.sub_registry_with_prefix("goodput");
        own.register("build", "The version that runs", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        self.register_outcomes(own);
        self.register_handling(own);
        self.register_times(own);
        self.register_engines(own);
        self.register_telemetry(own);
    }

    fn register_outcomes(&self, own: &mut Registry) {
        own.register(
            "requests_finished",
            "Accepted requests that ended, by outcome: met, missed or excluded",
            self.finished.clone(),
        );
        own.register(
            "slo_missed",
            "Requests that missed, by the reason that counts: the service's fault",
            self.missed.clone(),
        );
        own.register(
            "slo_excluded",
            "Requests that are not judged, by reason: not the service's fault",
            self.excluded.clone(),
        );
        own.register(
            "slo_objective_met",
            "Judged requests on which this one objective held",
            self.objective_met.clone(),
        );
        own.register(
            "slo_objective",
            "Judged requests on which this one objective held or was broken",
            self.objective.clone(),
        );
        own.register(
            "tenant_slo_met",
            "Met requests of a tenant; tenants beyond the first 200 are \"other\"",
            self.tenant_slo_met.clone(),
        );
        own.register(
            "tenant_slo",
            "Judged requests of a tenant; tenants beyond the first 200 are \"other\"",
            self.tenant_slo.clone(),
        );
    }

    fn register_handling(&self, own: &mut Registry) {
        own.register("tokens", "Tokens that engines computed: input by usage, else by the prompt estimate; output by usage, else by token events", self.tokens.clone());
        own.register("stalls", "Gaps between token events above the class's stall_seconds", self.stalls.clone());
        own.register(
            "truncated_answers",
            "Finished answers that were cut by the output-token cap (finish reason length)",
            self.truncated_answers.clone(),
        );
        own.register("retries", "Further attempts, by what made them necessary", self.retries.clone());
        own.register(
            "refused",
            "Requests that got no answer of an engine, by the code of the error that the gateway made instead",
            self.refused.clone(),
        );
        own.register(
            "rate_limited",
            "Requests that a limit of their tenant refused, by the limit and whether it counts all of the tenant or one model; tenants beyond the first 200 are \"other\"",
            self.rate_limited.clone(),
        );
        own.register(
            "over_limit",
            "Requests that went to an engine although a limit of their tenant was used up (when_over_limit: demote)",
            self.over_limit.clone(),
        );
        own.register(
            "spilled",
            "Requests that went to this pool because the one before it in their route had too long a queue, or no engine",
            self.spilled.clone(),
        );
        own.register(
            "degraded",
            "Requests to which an overload level did this: capped, sent on, deferred, refused for a higher rank",
            self.degraded.clone(),
        );
        own.register(
            "capped_answers",
            "Finished answers that were cut by an output-token cap which an overload level had lowered",
            self.capped.clone(),
        );
    }

    fn register_times(&self, own: &mut Registry) {
        own.register(
            "time_to_first_token_seconds",
            "From the request's start (its head's arrival, later by the client's own wait) to the last byte of the first token event on any channel, judged requests",
            self.ttft.clone(),
        );
        own.register("time_to_first_visible_token_seconds", "From the request's start to the first token event on a visible channel (reasoning is not), judged requests", self.ttfvt.clone());
        own.register(
            "time_per_output_token_seconds",
            "From the first token event to the last (to the finish, where tokens came that no event shows) by output tokens less one, worst choice, finished judged streams",
            self.tpot.clone(),
        );
        own.register(
            "inter_token_gap_seconds",
            "Between successive token events of one choice, judged requests; an event may carry several tokens",
            self.gap.clone(),
        );
        own.register("e2e_seconds", "From the request's start to the event that ends the answer (not streamed: its last byte), finished judged requests", self.e2e.clone());
        own.register(
            "queue_seconds",
            "From the last byte of the request body to admission, requests that were admitted",
            self.queue.clone(),
        );
        own.register(
            "upload_seconds",
            "From the request head's arrival to the last byte of the request body",
            self.upload.clone(),
        );
        own.register(
            "client_wait_seconds",
            "Time in which the gateway stood ready to read the request body and the client had sent nothing; no part of TTFT and E2E, unless the class says upload: counted",
            self.client_wait.clone(),
        );
        own.register(
            "cancel_seconds",
            "From the request head's arrival to the moment the client left before the answer was whole",
            self.cancel.clone(),
        );
    }

    fn register_engines(&self, own: &mut Registry) {
        own.register(
            "engine_slo_met",
            "Judged requests of the engine that were met, the engine of their last attempt (telemetry.series_by_engine)",
            self.engine_slo_met.clone(),
        );
        own.register(
            "engine_slo",
            "Judged requests of the engine, met and missed (telemetry.series_by_engine)",
            self.engine_slo.clone(),
        );
        own.register(
            "engine_time_to_first_token_seconds",
            "As goodput_time_to_first_token_seconds, by engine (telemetry.series_by_engine)",
            self.engine_ttft.clone(),
        );
        own.register(
            "engine_time_per_output_token_seconds",
            "As goodput_time_per_output_token_seconds, by engine (telemetry.series_by_engine)",
            self.engine_tpot.clone(),
        );
    }

    fn register_telemetry(&self, own: &mut Registry) {
        own.register(
            "config_reloads",
            "Attempts to load settings, the one at the start included, by result: success or failure",
            self.reloads.clone(),
        );
        own.register(
            "config_last_reload_successful",
            "Whether the last attempt to load settings succeeded (1) or left the old ones in place (0)",
            self.reload_successful.clone(),
        );
        own.register(
            "config_last_reload_timestamp_seconds",
            "Unix time of the last successful load of settings",
            self.reload_timestamp.clone(),
        );
        own.register(
            "slo_state_loads",
            "Readings of the file in which the counts of classes outlive the process, by what came of it; only with telemetry.slo_state",
            self.state_loads.clone(),
        );
        own.register(
            "slo_state_saves",
            "Savings of that file, by result: success, conflict (over what another process had saved), failure",
            self.state_saves.clone(),
        );
        own.register(
            "prometheus_reads",
            "Readings of the budgets of all gateways from Prometheus, by result: success or failure; only with telemetry.prometheus",
            self.prometheus_reads.clone(),
        );
        own.register(
            "access_lines_dropped",
            "Access lines lost because the output was slower than the traffic or failed",
            self.lines_dropped.clone(),
        );
        self.count_journal(&JournalCounts::default());
        own.register(
            "journal_lines",
            "Lines of the journal, by what became of them: written; or lost, because the queue in front of the disk was full, or because the disk failed",
            self.journal_lines.clone(),
        );
        self.count_spans(&SpanCounts::default());
        own.register(
            "spans",
            "Spans, by what became of them: exported; or lost, because the queue in front of the exporter was full, the collector did not take them, or rejected them",
            self.spans.clone(),
        );
    }

    /// The labels of a request series, without omitted ones.
    pub(super) fn labels<const N: usize>(&self, pairs: [(&'static str, &str); N]) -> Labels {
        let dropped = self.dropped.read();
        let stays = |(name, _): &(&'static str, &str)| dropped.iter().all(|label| label.as_str() != *name);
        pairs.into_iter().filter(stays).map(|(name, value)| (name, Arc::from(value))).collect()
    }

    /// Omits these labels from new series.
    pub(super) fn drop_labels(&self, dropped: &[RequestLabel]) {
        *self.dropped.write() = dropped.to_vec();
    }

    /// Whether this label is omitted.
    pub(super) fn drops(&self, label: RequestLabel) -> bool {
        self.dropped.read().contains(&label)
    }

    /// Forgets the series of engines that are not among these.
    pub(super) fn keep_engines(&self, known: &[(PoolId, EngineId)]) {
        let place =
            |(pool, engine): &(PoolId, EngineId)| self.labels([("pool", pool.as_str()), ("engine", engine.as_str())]);
        let known: BTreeSet<Labels> = known.iter().map(place).collect();
        let keeps = |labels: &Labels| {
            let place = labels.iter().filter(|(name, _)| ["pool", "engine"].contains(name));
            known.contains(&place.cloned().collect::<Labels>())
        };
        self.engine_slo_met.retain(keeps);
        self.engine_slo.retain(keeps);
        self.engine_ttft.retain(keeps);
        self.engine_tpot.retain(keeps);
    }

    /// Removes series created before there were settings; nothing was counted in them.
    pub(super) fn forget_unclassed(&self) {
        self.finished.clear();
        self.excluded.clear();
    }

    /// Number of request series, in lines of the page.
    pub(super) fn series(&self) -> usize {
        let counters = [
            &self.slo_met,
            &self.slo,
            &self.finished,
            &self.missed,
            &self.excluded,
            &self.objective_met,
            &self.objective,
            &self.tenant_slo_met,
            &self.tenant_slo,
            &self.tokens,
            &self.stalls,
            &self.truncated_answers,
            &self.rate_limited,
            &self.over_limit,
            &self.spilled,
            &self.degraded,
            &self.capped,
            &self.engine_slo_met,
            &self.engine_slo,
        ];
        let histograms = [
            &self.ttft,
            &self.ttfvt,
            &self.tpot,
            &self.gap,
            &self.e2e,
            &self.queue,
            &self.upload,
            &self.client_wait,
            &self.cancel,
            &self.engine_ttft,
            &self.engine_tpot,
        ];
        let counters: usize = counters.into_iter().map(MetricFamily::len).sum();
        counters + histograms.into_iter().map(MetricFamily::lines).sum::<usize>()
    }

    /// Adds what became of the journal's lines since this was last done.
    pub(super) fn count_journal(&self, lines: &JournalCounts) {
        let results =
            [("written", &lines.written), ("queue_full", &lines.queue_full), ("write_failed", &lines.write_failed)];
        for (result, count) in results {
            self.journal_lines.at(vec![("result", result.into())]).inc_by(count.swap(0, Ordering::Relaxed));
        }
    }

    /// Adds what became of spans since this was last done.
    pub(super) fn count_spans(&self, spans: &SpanCounts) {
        let results = [
            ("exported", &spans.exported),
            ("queue_full", &spans.queue_full),
            ("export_failed", &spans.export_failed),
            ("rejected", &spans.rejected),
        ];
        for (result, count) in results {
            self.spans.at(vec![("result", result.into())]).inc_by(count.swap(0, Ordering::Relaxed));
        }
    }

    /// The counter of reloads with this result.
    pub(super) fn reload(&self, success: bool) -> Counter {
        let result = if success { "success" } else { "failure" };
        self.reloads.at(vec![("result", result.into())])
    }
}

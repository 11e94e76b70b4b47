//! Gauges computed at each scrape.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::types::{ClassId, LengthBucket, PoolId, Tick};

use super::engines::EngineReport;
use super::in_flight::InFlightSnapshot;
use super::process::ProcessSample;
use super::series::NONE;
use super::series_table::ClassSeries;
use super::settings::RequestLabel;
use super::slo_status::drifts;
use super::{CountSource, Inner, LevelReport, SeatReport};

/// Weak, because the recorder owns the registry that owns this.
#[derive(Debug)]
pub(super) struct GaugeCollector(pub(super) Weak<Inner>);

impl Collector for GaugeCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(recorder) = self.0.upgrade() else { return Ok(()) };
        let at = recorder.clock.now();
        let mut page = GaugePage(&mut encoder);
        listener_stats(&recorder, &mut page)?;
        in_flight(&recorder, at, &mut page)?;
        classes(&recorder, at, &mut page)?;
        sources(&recorder, at, &mut page)?;
        levels(&recorder, &mut page)?;
        seats(&recorder, &mut page)?;
        engines(&recorder, &mut page)?;
        limits_store(&recorder, &mut page)?;
        process(&recorder, &mut page)
    }
}

type GaugeRows = Vec<(Vec<(&'static str, String)>, f64)>;

/// Writes gauges. Families without rows are written too, so that the page names all of
/// them.
struct GaugePage<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl GaugePage<'_, '_> {
    fn gauges(&mut self, name: &str, help: &str, rows: GaugeRows) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in &rows {
            family.encode_family(labels)?.encode_gauge(value)?;
        }
        Ok(())
    }

    /// Writes counters with one label.
    fn counters(&mut self, name: &str, help: &str, label: &'static str, rows: &[(&'static str, u64)]) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (value, count) in rows {
            family.encode_family(&[(label, *value)])?.encode_counter::<NoLabelSet, u64, f64>(count, None)?;
        }
        Ok(())
    }

    fn gauge(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        let Some(value) = value else { return Ok(()) };
        self.0.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
    }

    fn counter(&mut self, name: &str, help: &str, value: Option<f64>) -> fmt::Result {
        let Some(value) = value else { return Ok(()) };
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        encoder.encode_counter::<NoLabelSet, f64, f64>(&value, None)
    }
}

fn listener_stats(recorder: &Inner, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let help = "Request heads that were refused, by what is wrong with them: they never became requests, and are counted nowhere else";
    page.counters("goodput_bad_heads", help, "reason", &recorder.listener_stats.bad_heads())?;
    let help = "Connections that were closed at once because their address had as many as it may";
    let mut family = page.0.encode_descriptor("goodput_connections_refused", help, None, MetricType::Counter)?;
    family.encode_counter::<NoLabelSet, u64, f64>(&recorder.listener_stats.refused_connections(), None)
}

fn in_flight(recorder: &Inner, at: Tick, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let table = recorder.table.load();
    let mut running: BTreeMap<(String, String), u64> = BTreeMap::new();
    let mut waiting: BTreeMap<(String, String), u64> = BTreeMap::new();
    let mut overdue: BTreeMap<ClassId, u64> = BTreeMap::new();
    let none = || (NONE.to_owned(), NONE.to_owned());
    running.insert(none(), 0);
    for class in &table.current {
        overdue.insert(class.clone(), 0);
        for pool in table.class(class).into_iter().flat_map(|series| series.pools()) {
            running.insert((class.to_string(), pool.to_string()), 0);
            waiting.insert((class.to_string(), pool.to_string()), 0);
        }
    }
    let drops_pool = recorder.metrics.drops(RequestLabel::Pool);
    for InFlightSnapshot { class, pool, waits, is_overdue } in recorder.open.places(at) {
        let text = |name: Option<&str>| name.unwrap_or(NONE).to_owned();
        let key = (text(class.as_ref().map(ClassId::as_str)), text(pool.as_ref().map(PoolId::as_str)));
        if waits {
            *waiting.entry(key.clone()).or_default() += 1;
        }
        *running.entry(key).or_default() += 1;
        if let Some(class) = class.filter(|_| is_overdue) {
            *overdue.entry(class).or_default() += 1;
        }
    }
    let rows = |counts: BTreeMap<(String, String), u64>| {
        let mut rows: GaugeRows = Vec::new();
        for ((class, pool), n) in counts {
            let mut labels = vec![("class", class)];
            labels.extend((!drops_pool).then_some(("pool", pool)));
            match rows.last_mut().filter(|(last, _)| *last == labels) {
                Some((_, sum)) => *sum += n as f64,
                None => rows.push((labels, n as f64)),
            }
        }
        rows
    };
    page.gauges("goodput_in_flight", "Requests that have arrived and not ended", rows(running))?;
    page.gauges("goodput_queue_depth", "Requests that wait in the gateway for a seat of the pool", rows(waiting))?;
    let rows = overdue.into_iter().map(|(class, n)| (vec![("class", class.to_string())], n as f64));
    page.gauges("goodput_overdue", "Requests in flight with an objective that is broken already", rows.collect())
}

/// Writes all gauges by class and window.
fn classes(recorder: &Inner, at: Tick, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let table = recorder.table.load();
    let series: Vec<(&ClassId, &Arc<ClassSeries>)> =
        table.current.iter().filter_map(|class| Some((class, table.class(class)?))).collect();
    let (mut attainment, mut rate, mut budget, mut good, mut drift) =
        <(GaugeRows, GaugeRows, GaugeRows, GaugeRows, GaugeRows)>::default();
    let (mut length_attainment, mut length_rate, mut length_budget) = <(GaugeRows, GaugeRows, GaugeRows)>::default();
    let by_length = !recorder.metrics.drops(RequestLabel::Length);
    let mut covered = GaugeRows::new();
    let (mut target, mut threshold) = <(GaugeRows, GaugeRows)>::default();
    for (class, series) in series {
        let of = &series.promise;
        target.push((vec![("class", class.to_string())], of.joint_target));
        for (name, objective) in [("ttft", of.ttft), ("tpot", of.tpot), ("itl", of.itl), ("e2e", of.e2e)] {
            let labels = || vec![("class", class.to_string()), ("objective", name.to_owned())];
            threshold.extend(objective.map(|objective| (labels(), objective.threshold.as_secs_f64())));
        }
        let memory = &mut *series.memory.lock();
        let name = || ("class", class.to_string());
        for span in memory.burn.spans(at) {
            let labels = vec![name(), ("window", span.name())];
            rate.push((labels.clone(), memory.burn.rate(span.count)));
            covered.push((labels.clone(), span.covered.as_secs_f64()));
            attainment.extend(span.count.attainment().map(|share| (labels, share)));
        }
        for (length, burn) in LengthBucket::ALL.iter().zip(&memory.lengths).filter(|_| by_length) {
            let of = || vec![name(), ("length", length.as_str().to_owned())];
            for span in burn.spans(at) {
                // Lengths that do not come have no series.
                let Some(share) = span.count.attainment() else { continue };
                let labels = [of(), vec![("window", span.name())]].concat();
                length_attainment.push((labels.clone(), share));
                length_rate.push((labels, burn.rate(span.count)));
            }
            if burn.own(at).count.judged > 0 {
                length_budget.push((of(), burn.budget_left(at)));
            }
        }
        budget.push((vec![name()], memory.burn.budget_left(at)));
        good.push((vec![name()], memory.burn.good_rate(at)));
        // Not `quantile`, which Prometheus reserves for summaries.
        drifts(series, memory, at, &mut |direction, percentile, ratio| {
            let direction = ("direction", direction.to_owned());
            drift.push((vec![name(), direction, ("percentile", percentile.to_owned())], ratio));
        });
    }
    page.gauges(
        "goodput_slo_target",
        "Share of the judged requests of the class that is to be met, by its settings",
        target,
    )?;
    page.gauges(
        "goodput_slo_threshold_seconds",
        "Threshold of the objective, by the settings of the class; objectives that the class has",
        threshold,
    )?;
    page.gauges(
        "goodput_slo_attainment",
        "Met share of judged requests over what is counted of the window; absent where none was judged",
        attainment,
    )?;
    page.gauges(
        "goodput_slo_burn_rate",
        "How many times faster than promised the budget of misses is used over what is counted of the window",
        rate,
    )?;
    page.gauges(
        "goodput_slo_window_covered_seconds",
        "How much of the window is counted: all of it once the class has been counted for so long",
        covered,
    )?;
    page.gauges(
        "goodput_slo_budget_remaining",
        "Share of the budget of misses left over what is counted of the class's window; negative where overdrawn",
        budget,
    )?;
    page.gauges(
        "goodput_slo_length_attainment",
        "goodput_slo_attainment of one prompt length; absent where none was judged",
        length_attainment,
    )?;
    page.gauges(
        "goodput_slo_length_burn_rate",
        "goodput_slo_burn_rate of one prompt length; absent where none was judged",
        length_rate,
    )?;
    page.gauges(
        "goodput_slo_length_budget_remaining",
        "goodput_slo_budget_remaining of one prompt length; absent where none was judged",
        length_budget,
    )?;
    page.gauges("goodput_rate", "Highest rate of judged requests per second over 30 s stretches of the last hour with attainment at or above target", good)?;
    page.gauges(
        "goodput_workload_drift",
        "Observed percentile of lengths over the last 30 to 60 minutes by the one that the class assumes",
        drift,
    )
}

/// Writes the source of the classes' counts, unless it is this process alone.
fn sources(recorder: &Inner, at: Tick, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let table = recorder.table.load();
    let mut rows = GaugeRows::new();
    for (class, series) in table.current.iter().filter_map(|class| Some((class, table.class(class)?))) {
        let now = CountSource::of(&series.memory.lock().burn, at);
        rows.extend(CountSource::ALL.map(|source| {
            let labels = vec![("class", class.to_string()), ("source", source.as_str().to_owned())];
            (labels, f64::from(u8::from(source == now)))
        }));
    }
    page.gauges(
        "goodput_slo_source",
        "1 for where attainment, burn rate and budget of the class come from: this process, the file over its restarts, or Prometheus over all gateways",
        rows,
    )
}

fn levels(recorder: &Inner, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let levels = recorder.levels.lock();
    let rows = |of: fn(&LevelReport) -> usize| -> GaugeRows {
        levels.iter().map(|(class, report)| (vec![("class", class.to_string())], of(report) as f64)).collect()
    };
    page.gauges(
        "goodput_degrade_level",
        "Overload levels of the class that are in force, classes that have any",
        rows(|report| report.level),
    )?;
    page.gauges(
        "goodput_degrade_forced",
        "Whether an operator has set the overload level of the class (1), or measures do (0)",
        rows(|report| usize::from(report.is_forced)),
    )?;
    let left = levels
        .iter()
        .filter_map(|(class, report)| Some((vec![("class", class.to_string())], report.forced_for?.as_secs_f64())));
    page.gauges(
        "goodput_degrade_forced_seconds_left",
        "How long the overload level that an operator has set still stands; absent where that has no end",
        left.collect(),
    )
}

fn seats(recorder: &Inner, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let seats = recorder.seats.lock();
    let rows = |of: fn(&SeatReport) -> usize| -> GaugeRows {
        seats.iter().map(|(pool, report)| (vec![("pool", pool.to_string())], of(report) as f64)).collect()
    };
    page.gauges(
        "goodput_seats",
        "Requests that may run on the pool's engines at the same time, pools with a limit",
        rows(|report| report.seats),
    )?;
    page.gauges("goodput_seats_taken", "Seats of the pool that are taken", rows(|report| report.taken))?;
    let prefill = |(pool, report): &(PoolId, SeatReport)| {
        report.prefill.map(|tokens| (vec![("pool", pool.to_string())], tokens.0 as f64))
    };
    page.gauges(
        "goodput_prefill_tokens_per_engine",
        "Prompt tokens of requests without a first token that each engine of the pool may have, where that is limited",
        seats.iter().filter_map(prefill).collect(),
    )?;
    let elsewhere = |(pool, report): &(PoolId, SeatReport)| {
        report.elsewhere.map(|waiting| (vec![("pool", pool.to_string())], waiting as f64))
    };
    page.gauges(
        "goodput_queue_depth_elsewhere",
        "Requests that wait for a seat of the pool at other gateways, as they tell",
        seats.iter().filter_map(elsewhere).collect(),
    )
}

fn engines(recorder: &Inner, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let reports = recorder.engines.lock().clone();
    let rows = |of: fn(&EngineReport) -> Option<f64>| -> GaugeRows {
        let row = |(pool, engine, report): &(PoolId, _, EngineReport)| {
            let labels = vec![("pool", pool.to_string()), ("engine", ToString::to_string(engine))];
            Some((labels, of(report)?))
        };
        reports.iter().filter_map(row).collect()
    };
    page.gauges("goodput_engine_up", "Whether the engine takes requests", rows(|r| Some(f64::from(u8::from(r.up)))))?;
    page.gauges(
        "goodput_engine_drained",
        "Whether an operator has drained the engine (1): it takes no new request until it is put back",
        rows(|r| Some(f64::from(u8::from(r.drained)))),
    )?;
    page.gauges("goodput_engine_waiting", "Requests that wait inside the engine, as it reports", rows(|r| r.waiting))?;
    page.gauges("goodput_engine_running", "Requests that the engine computes, as it reports", rows(|r| r.running))?;
    page.gauges(
        "goodput_engine_elsewhere",
        "Requests of other gateways at the engine, as they tell",
        rows(|r| r.elsewhere),
    )?;
    page.gauges(
        "goodput_engine_kv_usage",
        "Share of the engine's KV cache in use, as it reports",
        rows(|r| r.kv_usage),
    )?;
    page.gauges("goodput_engine_seats", "Requests of ours that the engine should have at one time", rows(|r| r.seats))?;
    let mut errors = GaugeRows::new();
    for (quantity, rows) in [("ttft", rows(|r| r.ttft_error)), ("tpot", rows(|r| r.tpot_error))] {
        let named = |(mut labels, error): (Vec<_>, f64)| {
            labels.push(("quantity", quantity.to_owned()));
            (labels, error)
        };
        errors.extend(rows.into_iter().map(named));
    }
    page.gauges(
        "goodput_prediction_error_ratio",
        "How far predictions of the engine's latency were off lately, as a share of what was seen",
        errors,
    )
}

/// Rows only if limits are shared; the families are written in any case.
fn limits_store(recorder: &Inner, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let report = recorder.store.lock().clone();
    let (is_shared, report) = (report.is_some(), report.unwrap_or_default());
    let help = "Whether the store of shared limits is asked (1), or was given up until a trial succeeds (0)";
    let mut family = page.0.encode_descriptor("goodput_limits_store_up", help, None, MetricType::Gauge)?;
    if is_shared {
        family.encode_gauge(&f64::from(u8::from(report.up)))?;
    }
    let help = "Calls to the store of shared limits, by how they ended";
    page.counters("goodput_limits_store_calls", help, "result", &report.calls)?;
    let help = "How long calls to the store of shared limits took";
    let name = "goodput_limits_store_call_seconds";
    let mut family = page.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
    if is_shared {
        let (edges, longer) = &report.lengths;
        let mut buckets: Vec<_> = edges.iter().map(|(edge, count)| (edge.as_secs_f64(), *count)).collect();
        buckets.push((f64::INFINITY, *longer));
        let count = buckets.iter().map(|(_, count)| count).sum();
        family.encode_histogram::<NoLabelSet>(report.length.as_secs_f64(), count, &buckets, None)?;
    }
    let help = "How often the store of shared limits was given up, until a trial succeeded";
    let mut family = page.0.encode_descriptor("goodput_limits_store_given_up", help, None, MetricType::Counter)?;
    if is_shared {
        family.encode_counter::<NoLabelSet, u64, f64>(&report.given_up, None)?;
    }
    let help = "Requests with shared limits: let in by a lease, by the store, by this gateway's share, or refused because the store was away";
    page.counters("goodput_limits_store_requests", help, "by", &report.requests)?;
    let help = "Tokens and requests of shared limits that are granted to this gateway and used by nobody";
    let mut family = page.0.encode_descriptor("goodput_limits_store_unspent", help, None, MetricType::Gauge)?;
    if is_shared {
        family.encode_gauge(&(report.unspent as f64))?;
    }
    let help = "Calls by which gateways tell each other of their queues through the store, by how they ended";
    page.counters("goodput_limits_store_exchanges", help, "result", &report.exchanges)?;
    let help = "Other gateways that this one hears of through the store";
    let mut family = page.0.encode_descriptor("goodput_limits_store_gateways", help, None, MetricType::Gauge)?;
    if is_shared {
        family.encode_gauge(&(report.gateways as f64))?;
    }
    Ok(())
}

fn process(recorder: &Inner, page: &mut GaugePage<'_, '_>) -> fmt::Result {
    let sample = ProcessSample::sample();
    let whole = |value: Option<u64>| value.map(|value| value as f64);
    page.counter("process_cpu_seconds", "User and system CPU time spent", sample.cpu_seconds)?;
    page.gauge("process_resident_memory_bytes", "Resident memory", whole(sample.resident_bytes))?;
    page.gauge("process_virtual_memory_bytes", "Virtual memory", whole(sample.virtual_bytes))?;
    page.gauge("process_open_fds", "Open file descriptors", whole(sample.open_fds))?;
    page.gauge("process_max_fds", "Largest number of open file descriptors", whole(sample.max_fds))?;
    page.gauge("process_threads", "Threads", whole(sample.threads))?;
    page.gauge("process_start_time_seconds", "Unix time at which the process started", Some(recorder.started))
}

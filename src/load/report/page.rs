//! A report as one HTML page that needs nothing else: no script, no font, no picture from elsewhere. Pure.

use maud::{DOCTYPE, Markup, PreEscaped, html as markup};

use super::compare::{Comparison, compare};
use super::figure::{figures, letter};
use crate::load::arrivals::ArrivalProcess;
use crate::load::lengths::{LengthModel, LengthShape, TokenLengths};
use crate::load::monitor::RunVerdict;
use crate::load::result::{ClassResult, PointResult};
use crate::load::summary::{ClassSummary, SweepSummary};
use crate::load::sweep::{CacheResult, GoodputStatus};
use crate::load::workload::CacheState;

/// A page about one sweep, or about several that are held against the first.
#[must_use]
pub fn html(sweeps: &[SweepSummary]) -> String {
    let title = match sweeps {
        [one] => format!("Goodput of {}", one.target.model),
        _ => format!("Goodput of {} sweeps", sweeps.len()),
    };
    let page = markup! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                @for (number, sweep) in sweeps.iter().enumerate() { (headline(number, sweep, sweeps.len() > 1)) }
                @if sweeps.len() > 1 { (comparisons(&compare(sweeps))) }
                h2 { "Attainment and latency against the offered rate" }
                @for figure in figures(sweeps) {
                    h3 { (figure.title) }
                    div.figure { (PreEscaped(figure.svg)) }
                }
                @for (number, sweep) in sweeps.iter().enumerate() { (details(number, sweep, sweeps.len() > 1)) }
                (reading())
            }
        }
    };
    page.into_string()
}

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c;background:#fff}\
table{border-collapse:collapse;margin:.6rem 0 1.2rem}th,td{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}\
th:first-child,td:first-child,.words td,.words th{text-align:left}.number{font-size:2rem;font-weight:600}.no{color:#a22}\
.figure{overflow-x:auto}.figure svg{max-width:100%;height:auto}.wide{overflow-x:auto}small{color:#555}";

fn headline(number: usize, sweep: &SweepSummary, is_named: bool) -> Markup {
    markup! {
        @if is_named { h2 { (letter(number)) ": " (sweep.target.model) } }
        p {
            (sweep.target.url) ", " (sweep.started)
            @if let Some(note) = &sweep.target.note { ", " (note) }
        }
        @if let Some(why) = &sweep.ended_by { p.no { "Partial: " (why) "." } }
        @for result in &sweep.results { (goodput(result, sweep)) }
    }
}

fn goodput(result: &CacheResult, sweep: &SweepSummary) -> Markup {
    let goodput = &result.goodput;
    let fleet = &sweep.fleet;
    markup! {
        p {
            (cache(result.cache)) ": "
            @match (goodput.status, goodput.requests_per_second) {
                (GoodputStatus::Published, Some(rate)) => {
                    span.number { (short(rate)) } " requests/s keep the promise"
                    @if fleet.replicas > 1 || fleet.gpus_per_replica != 1.0 {
                        ", " (short(goodput.per_replica.unwrap_or_default())) " per replica, "
                        (short(goodput.per_gpu.unwrap_or_default())) " per GPU"
                    }
                    "."
                }
                _ => { span.number.no { "no number" } ": " (goodput.explanation) "." }
            }
            br;
            small {
                @if goodput.status == GoodputStatus::Published { (goodput.explanation) ". " }
                @if let Some(at) = goodput.rate_interval {
                    "By the intervals of the attainment the knee lies between " (short(at.low)) " and " (short(at.high)) " requests/s. "
                }
                @if let Some(spread) = goodput.spread {
                    "Repetitions by themselves cross the target at "
                    (goodput.repetitions.iter().map(|rate| short(*rate)).collect::<Vec<_>>().join(", "))
                    " requests/s (" (percent(spread)) " apart)."
                }
            }
        }
    }
}

fn comparisons(all: &[Comparison]) -> Markup {
    markup! {
        h2 { "Compared with A" }
        @for one in all {
            h3 { (letter(one.run)) }
            @if !one.different_workloads.is_empty() {
                p.no { "The workloads differ, so figures cannot be compared: " (one.different_workloads.join(", ")) "." }
            }
            @for remark in &one.remarks { p.no { (remark) "." } }
            @for change in &one.goodput { p { (change.cache) " caches: " (change.text) "." } }
            @if !one.rates.is_empty() {
                table {
                    tr { th { "rate" } th { "caches" } th { "class" } th { "A" } th { (letter(one.run)) } th { "difference [95 %]" } th { "p (adjusted)" } th { "significant" } }
                    @for change in &one.rates {
                        tr {
                            td { (short(change.rate)) } td { (change.cache) } td { (change.class) }
                            td { (percent(change.first)) } td { (percent(change.second)) }
                            td { (points_of(change.difference.difference)) " [" (points_of(change.difference.low)) ", " (points_of(change.difference.high)) "]" }
                            td { (format!("{:.3}", change.adjusted_p_value)) }
                            td { @if change.significant { "yes" } @else { "no" } }
                        }
                    }
                }
            }
        }
    }
}

fn details(number: usize, sweep: &SweepSummary, is_named: bool) -> Markup {
    let name = if is_named { format!(" of {}", letter(number)) } else { String::new() };
    markup! {
        h2 { "Points" (name) }
        @for result in &sweep.results {
            h3 { (cache(result.cache)) }
            div.wide { (points_table(result)) }
        }
        h2 { "Workload" (name) }
        (workload(sweep))
        h2 { "Method" (name) }
        (method(sweep))
    }
}

fn points_table(result: &CacheResult) -> Markup {
    markup! {
        table {
            tr {
                th { "rate" } th { "verdict" } th { "class" } th { "n" } th { "attainment [95 %]" } th { "misses" }
                th { "TTFT p50" } th { "p95" } th { "p99" } th { "TPOT p50" } th { "p95" } th { "p99" } th { "E2E p50" } th { "p95" } th { "p99" }
                th { "met/s" } th { "output tokens/s" }
            }
            @for point in &result.points { (point_rows(point)) }
        }
    }
}

fn point_rows(point: &PointResult) -> Markup {
    markup! {
        @for (number, class) in point.classes.iter().enumerate() {
            tr {
                td { @if number == 0 { (short(point.rate)) } }
                td { @if number == 0 { (verdict(point)) } }
                td { (class.class) } td { (class.judged) }
                td {
                    @if let Some(attainment) = class.attainment { (percent(attainment)) } @else { "no number" }
                    @if let Some(at) = class.interval { " [" (percent(at.low)) ", " (percent(at.high)) "]" }
                }
                td { (misses(class)) }
                @for all in [&class.ttft_seconds, &class.tpot_seconds, &class.e2e_seconds] {
                    td { (all.p50.to_string()) } td { (all.p95.to_string()) } td { (all.p99.to_string()) }
                }
                td { @if number == 0 { (format!("{:.2}", point.throughput.met_per_second)) } }
                td { @if number == 0 { (format!("{:.0}", point.throughput.output_tokens_per_second)) } }
            }
        }
    }
}

fn verdict(point: &PointResult) -> String {
    let word = match point.verdict {
        RunVerdict::Clears => "clears",
        RunVerdict::Fails => "fails",
        RunVerdict::Unsteady => "unsteady",
        RunVerdict::Invalid => "invalid",
        RunVerdict::Partial => "partial",
    };
    let problems: Vec<&str> = point.runs.iter().flat_map(|run| &run.problems).map(String::as_str).collect();
    if problems.is_empty() { word.to_owned() } else { format!("{word}: {}", problems.join("; ")) }
}

fn misses(class: &ClassResult) -> String {
    let all = class.missed.iter().chain(&class.excluded);
    all.map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
}

fn workload(sweep: &SweepSummary) -> Markup {
    let workload = &sweep.workload;
    let arrivals = match &workload.arrivals {
        ArrivalProcess::Poisson => "Poisson".to_owned(),
        ArrivalProcess::Constant => "at equal distances".to_owned(),
        ArrivalProcess::Gamma { burstiness } => format!("gamma gaps with burstiness {burstiness}"),
        ArrivalProcess::Trace { name, arrivals, variation, .. } => {
            format!("the gaps of {name} ({arrivals} arrivals, coefficient of variation {variation:.2})")
        }
    };
    let calibration = &workload.calibration;
    markup! {
        table.words {
            tr { th { "class" } th { "share" } th { "promise" } th { "lengths" } th { "time limits" } }
            @for class in &workload.classes {
                tr {
                    td { (class.class) } td { (percent(class.share)) } td { (promise(class)) } td { (lengths(&class.lengths)) }
                    td { (class.timeouts_seconds.iter().map(|(name, limit)| format!("{name} {limit} s")).collect::<Vec<_>>().join(", ")) }
                }
            }
        }
        p {
            "Model " (sweep.target.model) " on " (sweep.target.path) @if !sweep.target.stream { ", without streams" } ". Arrivals: " (arrivals) ". "
            @if workload.ignore_eos { "Answers go on to the planned length. " } @else { "Answers end where the model ends them. " }
            @if let Some(most) = workload.max_context { "Prompt and answer are cut at " (most) " tokens together. " }
            @if calibration.is_measured {
                "Prompts are calibrated by the engine's usage: " (format!("{:.2}", calibration.tokens_per_word)) " tokens a word, "
                (format!("{:.0}", calibration.base_tokens)) " for the template. "
            } @else { "The engine reports no usage: prompts are taken to have one token a word. " }
            "Seed " (workload.seed) "."
            @if !workload.extra_fields.is_empty() { " Further fields of bodies: " (workload.extra_fields.join(", ")) "." }
        }
        (reached(sweep))
    }
}

/// Observed lengths.
fn reached(sweep: &SweepSummary) -> Markup {
    let classes = sweep.results.iter().flat_map(|result| {
        let last =
            result.points.iter().rev().find(|point| point.verdict == RunVerdict::Clears).or(result.points.first());
        last.into_iter().flat_map(move |point| point.classes.iter().map(move |class| (result.cache, point.rate, class)))
    });
    markup! {
        table {
            tr { th { "measured" } th { "class" } th { "prompt tokens planned" } th { "reported" } th { "from the cache" } th { "output tokens planned" } th { "came" } }
            @for (cache, rate, class) in classes {
                tr {
                    td { (cache.as_str()) ", " (short(rate)) " requests/s" } td { (class.class) }
                    td { (format!("{:.0}", class.planned_input_tokens)) }
                    td { @if let Some(tokens) = class.reported_input_tokens { (format!("{tokens:.0}")) } @else { "not reported" } }
                    td { @if let Some(share) = class.reported_hit_share { (percent(share)) } @else { "not reported" } }
                    td { (format!("{:.0}", class.planned_output_tokens)) } td { (format!("{:.0}", class.output_tokens)) }
                }
            }
        }
    }
}

fn promise(class: &ClassSummary) -> String {
    let all = class.objectives.iter();
    let all: Vec<String> =
        all.map(|(name, at)| format!("{} at most {} s", name.to_uppercase(), at.threshold_seconds)).collect();
    format!("{}, together on {} of requests", all.join(", "), percent(class.joint_attainment_target))
}

fn lengths(model: &LengthModel) -> String {
    let shape = |shape: &LengthShape| format!("p50 {}, p95 {}, mean {:.0}", shape.p50, shape.p95, shape.mean);
    let one = |lengths: &TokenLengths| match lengths {
        TokenLengths::Fixed { tokens } => format!("{tokens} tokens"),
        TokenLengths::Lognormal { p50, p95 } => format!("log-normal, p50 {p50}, p95 {p95}"),
        TokenLengths::Recorded { name, shape: at, .. } => format!("recorded in {name} ({})", shape(at)),
    };
    match model {
        LengthModel::Fitted { input, output, correlation } => {
            format!("prompts {}; answers {}; correlation {correlation}", one(input), one(output))
        }
        LengthModel::Pairs { name, input, output, .. } => {
            format!("pairs of {name}: prompts {}; answers {}", shape(input), shape(output))
        }
    }
}

fn method(sweep: &SweepSummary) -> Markup {
    let (method, rule) = (&sweep.method, &sweep.method.rule);
    let runs = || sweep.results.iter().flat_map(|result| &result.points).flat_map(|point| &point.runs);
    let lag = runs().map(|run| run.send_lag_p99_seconds).fold(0.0, f64::max);
    markup! {
        p {
            "Open loop: every request was sent at its scheduled time, and its clock runs from there. "
            (method.repetitions) " runs at each rate, each with at least " (rule.warm_up_seconds) " s of warm-up and " (rule.min_seconds)
            " s that count, at most " (rule.max_seconds) " s, until a look at fixed sample sizes decides or the standard error is "
            (format!("{:.3}", rule.standard_error)) ". Largest p99 send lag of a run: " (format!("{:.1} ms", lag * 1e3)) " (allowed: "
            (percent(method.max_send_lag_share)) " of the TTFT threshold). Load from " (sweep.client.processors) " processors, "
            (sweep.client.platform) "; goodput " (sweep.version) "."
        }
    }
}

fn reading() -> Markup {
    markup! {
        h2 { "How to read it" }
        p {
            "Attainment is joint: the share of requests that kept every threshold of their class. Errors, time-outs and refusals are misses, and so is a "
            "request that is still open when its time limit ends. Goodput is the highest measured rate whose attainment reaches the target. "
            "Percentiles count requests that never got so far as the slowest; \"n too small\" says that fewer than ten requests lie beyond it "
            "(1,000 requests for a p99). A run whose requests in flight or latencies kept growing is unsteady: it fails, and has no attainment. "
            "Throughput stands beside it because it goes on rising where promises are already broken."
        }
    }
}

fn cache(state: CacheState) -> String {
    match state {
        CacheState::Cold => "Cold caches".to_owned(),
        CacheState::Warm { hit_share, groups } => {
            format!("Warm caches ({} of each prompt is common to one of {groups} groups)", percent(hit_share))
        }
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn points_of(difference: f64) -> String {
    format!("{:+.1}", difference * 100.0)
}

fn short(rate: f64) -> String {
    if rate < 10.0 { format!("{rate:.2}") } else { format!("{rate:.1}") }
}

//! Status of pools and their engines.

use maud::{Markup, html};

use super::bar;
use super::text::{NOTHING, count, latency, length, percent, rough_percent};
use crate::admin::status::{EngineStatus, GatewayStatus, PoolStatus};

/// One table of engines per pool.
pub(super) fn section(status: &GatewayStatus) -> Markup {
    html! {
        section id="pools" aria-labelledby="pools-title" {
            h2 id="pools-title" { "Pools and engines" }
            @if status.pools.is_empty() { p.empty { "No pool." } }
            @for pool in &status.pools { (one(pool)) }
        }
    }
}

fn one(pool: &PoolStatus) -> Markup {
    let title = format!("pool-{}", pool.pool);
    html! {
        h3 id=(title) {
            (pool.pool)
            span.facts {
                @match pool.seats {
                    Some(seats) => { span { (count(pool.taken)) " of " (count(seats)) " seats taken" } }
                    None => { span.quiet { "no limit on seats" } }
                }
                @if pool.waiting > 0 { span.warn { (count(pool.waiting)) " waiting" } } @else { span.quiet { "none waiting" } }
                @if let Some(waiting) = pool.waiting_elsewhere { span.quiet { (count(waiting)) " waiting at other gateways" } }
            }
        }
        @if pool.engines.is_empty() { p.empty { "No engine: its name resolves to nothing, or nothing was looked up yet." } } @else {
            div.scroll tabindex="0" role="group" aria-labelledby=(title) {
                table.cards role="table" {
                    thead role="rowgroup" {
                        tr role="row" {
                            th scope="col" role="columnheader" { "Engine" }
                            th scope="col" role="columnheader" { "State" }
                            th scope="col" role="columnheader" { "Our requests" }
                            th.n scope="col" role="columnheader" { "Its running" }
                            th.n scope="col" role="columnheader" { "Its queue" }
                            th scope="col" role="columnheader" { "KV cache" }
                            th.n scope="col" role="columnheader" { "Kept, last hour" }
                            th.n scope="col" role="columnheader" { "TTFT p50 / p95" }
                            th.n scope="col" role="columnheader" { "TPOT p50 / p95" }
                        }
                    }
                    tbody role="rowgroup" { @for engine in &pool.engines { (row(&pool.pool, engine)) } }
                }
            }
        }
    }
}

fn row(pool: &str, engine: &EngineStatus) -> Markup {
    let hour = &engine.last_hour;
    html! {
        tr role="row" id={ "engine-" (pool) "-" (engine.engine) } {
            th.name scope="row" role="rowheader" { (engine.engine) }
            td role="cell" data-label="State" { (state(engine)) }
            td role="cell" data-label="Our requests" {
                (count(engine.in_flight))
                @if let Some(seats) = engine.seats {
                    " of " (count(seats)) (bar(engine.in_flight as f64 / seats.max(1) as f64, false))
                }
                @if let Some(elsewhere) = engine.elsewhere { span.note { "and " (count(elsewhere)) " of other gateways" } }
            }
            td.n role="cell" data-label="Its running" { (reported(engine.running)) }
            td.n role="cell" data-label="Its queue" { (reported(engine.waiting)) }
            td role="cell" data-label="KV cache" {
                @match engine.kv_usage {
                    Some(share) => { (rough_percent(share)) (bar(share, true)) }
                    None => { span.quiet { (NOTHING) } }
                }
            }
            td.n role="cell" data-label="Kept, last hour" {
                @if hour.judged > 0 {
                    (percent(hour.met as f64 / hour.judged as f64)) span.note { "of " (count(hour.judged)) }
                } @else { span.quiet { (NOTHING) } }
            }
            td.n role="cell" data-label="TTFT p50 / p95" { (both(hour.ttft_p50_seconds, hour.ttft_p95_seconds)) }
            td.n role="cell" data-label="TPOT p50 / p95" { (both(hour.tpot_p50_seconds, hour.tpot_p95_seconds)) }
        }
    }
}

fn state(engine: &EngineStatus) -> Markup {
    let mark = match engine.state.as_str() {
        "up" => "ok",
        "cooling" => "warn",
        "down" | "breaker_open" => "bad",
        _ => "off",
    };
    html! {
        span class={ "badge " (mark) } { (engine.state.replace('_', " ")) }
        @if engine.drained {
            " " span.badge.off {
                "drained"
                @if let Some(seconds) = engine.drained_for_seconds { " for " (length(seconds)) " more" }
            }
        }
    }
}

fn reported(value: Option<f64>) -> Markup {
    match value {
        Some(value) => html! { (format!("{value:.0}")) },
        None => html! { span.quiet { (NOTHING) } },
    }
}

fn both(p50: Option<f64>, p95: Option<f64>) -> Markup {
    match p50.zip(p95) {
        Some((p50, p95)) => html! { (latency(p50)) " / " (latency(p95)) },
        None => html! { @if let Some(p95) = p95 { (latency(p95)) } @else { span.quiet { (NOTHING) } } },
    }
}

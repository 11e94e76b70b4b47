//! The last misses, each with the time that it took.

use maud::{Markup, html};

use super::chart;
use super::text::{NOTHING, count, latency, moment};
use crate::admin::status::{GatewayStatus, MissStatus};

/// Misses that are shown; `GET /status` has all that are kept.
const SHOWN: usize = 24;

/// One row per miss, the newest first.
pub(super) fn section(status: &GatewayStatus) -> Markup {
    let left_out = status.misses.len().saturating_sub(SHOWN);
    html! {
        section id="misses" aria-labelledby="misses-title" {
            h2 id="misses-title" { "Recent misses" }
            @if status.misses.is_empty() { p.empty { "No miss since the start." } } @else {
                p.legend {
                    @for (kind, words) in [("upload", "upload"), ("queue", "queue"), ("failed", "failed attempt"), ("attempt", "attempt, to the first token"), ("tokens", "tokens"), ("rest", "to the end")] {
                        span { svg viewBox="0 0 10 10" aria-hidden="true" { rect class=(kind) width="10" height="10" {} } (words) }
                    }
                    span { svg viewBox="0 0 10 10" aria-hidden="true" { line.promised x1="5" x2="5" y1="0" y2="10" {} } "first token promised" }
                }
                div.scroll tabindex="0" role="group" aria-label="Table of misses" {
                    table.cards.misses role="table" {
                        thead role="rowgroup" {
                            tr role="row" {
                                th scope="col" role="columnheader" { "Ended" }
                                th scope="col" role="columnheader" { "Class" }
                                th scope="col" role="columnheader" { "Missed by" }
                                th scope="col" role="columnheader" { "Timeline" }
                                th.wide scope="col" role="columnheader" { "Tenant" }
                                th scope="col" role="columnheader" { "Engine" }
                                th.n.wide scope="col" role="columnheader" { "Status" }
                                th.n.wide scope="col" role="columnheader" { "Tokens in / out" }
                                th.wide scope="col" role="columnheader" { "Request" }
                            }
                        }
                        tbody role="rowgroup" { @for miss in status.misses.iter().take(SHOWN) { (row(status, miss)) } }
                    }
                }
                p.empty {
                    "The last ten of each class and reason."
                    @if left_out > 0 { " " (count(left_out as u64)) " older ones stand in " a href="/status" { "the JSON" } "." }
                }
            }
        }
    }
}

fn row(status: &GatewayStatus, miss: &MissStatus) -> Markup {
    let class = status.classes.iter().find(|class| class.standing.class == miss.class);
    let ttft = class.and_then(|class| class.objectives.iter().find(|one| one.objective == "ttft"));
    let others: Vec<&str> =
        miss.broken.iter().map(String::as_str).filter(|objective| *objective != miss.reason).collect();
    html! {
        tr role="row" id=(key(miss)) {
            td role="cell" data-label="Ended" { (moment(miss.unix_seconds)) }
            td role="cell" data-label="Class" { (miss.class) }
            td role="cell" data-label="Missed by" {
                strong { (miss.reason) }
                @if let Some(code) = &miss.code { span.quiet { " (" (code) ")" } }
                @if !others.is_empty() { span.quiet { " (also " (others.join(", ")) ")" } }
            }
            td.timeline role="cell" data-label="Timeline" {
                details id={ (key(miss)) "-more" } {
                    summary {
                        (chart::waterfall(miss, ttft.map(|ttft| ttft.threshold_seconds)))
                        span.total { (latency(miss.end_ms / 1000.0)) }
                    }
                    ol { @for segment in chart::timeline_segments(miss) { li { (segment.text) } } }
                    p {
                        "Request " code { (miss.request_id) } " of " (miss.tenant.as_deref().unwrap_or("nobody known")) ", status " (miss.status) ", " (tokens(miss)) " tokens"
                        @if let Some(model) = &miss.model { ", model " (model) }
                        @if miss.level > 0 { ", overload level " (miss.level) }
                        @if let Some(wait) = miss.client_wait_ms.filter(|wait| *wait >= 1.0) {
                            ", " (latency(wait / 1000.0)) " of the upload waiting for the client"
                        }
                    }
                }
            }
            td.wide role="cell" data-label="Tenant" { (miss.tenant.as_deref().unwrap_or(NOTHING)) }
            td role="cell" data-label="Engine" {
                @match (&miss.engine, &miss.pool) {
                    (Some(engine), Some(pool)) => { span title={ "pool " (pool) } { (engine) } }
                    (Some(engine), None) => { (engine) }
                    (None, Some(pool)) => { span.quiet { "pool " (pool) } }
                    (None, None) => { span.quiet { (NOTHING) } }
                }
            }
            td.n.wide role="cell" data-label="Status" { (miss.status) }
            td.n.wide role="cell" data-label="Tokens in / out" { (tokens(miss)) }
            td.wide role="cell" data-label="Request" { code { (miss.request_id) } }
        }
    }
}

fn tokens(miss: &MissStatus) -> String {
    let output = miss.output_tokens.map_or_else(|| NOTHING.to_owned(), count);
    format!("{} / {output}", count(miss.prompt_tokens))
}

/// The id of a row, which stays the same while others come before it.
fn key(miss: &MissStatus) -> String {
    let text = format!("{} {} {}", miss.request_id, miss.class, miss.end_ms);
    format!("miss-{}", &blake3::hash(text.as_bytes()).to_hex()[..10])
}

//! How much of their limits tenants use.

use maud::{Markup, html};

use super::bar;
use super::text::{NOTHING, count, percent, short_count};
use crate::admin::status::{GatewayStatus, LimitUse, TenantStatus};

/// One row per tenant, those nearest to a limit first.
pub(super) fn section(status: &GatewayStatus) -> Markup {
    html! {
        section id="tenants" aria-labelledby="tenants-title" {
            h2 id="tenants-title" { "Tenants" }
            @if status.tenants.is_empty() { p.empty { "No tenant: the settings name none, so everybody may ask." } } @else {
                div.scroll tabindex="0" role="group" aria-label="Table of tenants" {
                    table.cards role="table" {
                        thead role="rowgroup" {
                            tr role="row" {
                                th scope="col" role="columnheader" { "Tenant" }
                                th.n scope="col" role="columnheader" { "Running" }
                                th.n scope="col" role="columnheader" { "Kept since the start" }
                                th scope="col" role="columnheader" { "Limits" }
                            }
                        }
                        tbody role="rowgroup" { @for tenant in &status.tenants { (row(tenant)) } }
                    }
                }
            }
            @if status.tenants_left_out > 0 {
                p.empty { "And " (count(status.tenants_left_out)) " more, which are further from their limits." }
            }
        }
    }
}

fn row(tenant: &TenantStatus) -> Markup {
    let (met, judged) = (tenant.met.unwrap_or(0), tenant.judged.unwrap_or(0));
    html! {
        tr role="row" id={ "tenant-" (tenant.tenant) } {
            th.name scope="row" role="rowheader" { (tenant.tenant) }
            td.n role="cell" data-label="Running" { (count(tenant.running)) }
            td.n role="cell" data-label="Kept since the start" {
                @if judged > 0 { (percent(met as f64 / judged as f64)) span.note { "of " (count(judged)) } }
                @else { span.quiet { (NOTHING) } }
            }
            td role="cell" data-label="Limits" {
                @if tenant.limits.is_empty() { span.quiet { "none" } } @else {
                    ul.limits { @for limit in &tenant.limits { (one(limit)) } }
                }
            }
        }
    }
}

fn one(limit: &LimitUse) -> Markup {
    let used = limit.most.saturating_sub(limit.remaining);
    html! {
        li {
            span { (limit.limit) @if let Some(model) = &limit.model { " for " (model) } }
            span { (short_count(used)) " of " (short_count(limit.most)) " used" }
            (bar(limit.used_share(), true))
        }
    }
}

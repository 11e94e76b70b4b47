//! How classes stand: a table, and plots of their budgets.

use maud::{Markup, html};

use super::chart;
use super::text::{NOTHING, count, latency, length, percent, rough_percent, window};
use crate::admin::status::{ClassStatus, GatewayStatus};
use crate::admin::{ClassStanding, Degradation};

/// Reasons of misses that a row names.
const REASONS: usize = 3;

/// Said of figures that no Prometheus is asked for.
const OWN_COUNTS: &str = "Kept, budget and burn are those of this gateway; in flight, waiting and overdue, too.";

/// One row per class.
pub(super) fn table(status: &GatewayStatus) -> Markup {
    let windows = common_windows(&status.classes);
    html! {
        section id="classes" aria-labelledby="classes-title" {
            h2 id="classes-title" { "Classes" }
            @if status.classes.is_empty() { p.empty { "No class." } } @else {
                div.scroll tabindex="0" role="group" aria-label="Table of classes" {
                    table.cards role="table" {
                        thead role="rowgroup" {
                            tr role="row" {
                                th scope="col" role="columnheader" { "Class" }
                                th scope="col" role="columnheader" { "Kept" }
                                th scope="col" role="columnheader" { "Budget left" }
                                @for window in &windows {
                                    th.n scope="col" role="columnheader" { "Burn " (self::window(*window)) }
                                }
                                th.n scope="col" role="columnheader" { "Burn, window" }
                                th.n scope="col" role="columnheader" { "In flight" }
                                th.n scope="col" role="columnheader" { "Waiting" }
                                th.n scope="col" role="columnheader" { "Overdue" }
                                th scope="col" role="columnheader" { "Overload level" }
                                th scope="col" role="columnheader" { "Missed in the last hour" }
                            }
                        }
                        tbody role="rowgroup" {
                            @for class in &status.classes { (row(class, &windows)) }
                        }
                    }
                }
                @if status.classes.iter().any(is_young) {
                    p.empty { "Burn in italics is that of less than its window: of the time since the class is counted." }
                }
                p.empty id="counts" { (status.budgets_note.as_deref().unwrap_or(OWN_COUNTS)) }
            }
        }
    }
}

fn is_young(class: &ClassStatus) -> bool {
    class.standing.burn_rate.iter().any(|burn| burn.covered_seconds < burn.window_seconds)
}

/// The windows of alert rules: those that are told of and are not a class's own.
fn common_windows(classes: &[ClassStatus]) -> Vec<u64> {
    let own = |class: &ClassStatus, window: u64| class.standing.window_seconds == window;
    let mut windows: Vec<u64> = classes
        .iter()
        .flat_map(|class| class.standing.burn_rate.iter().map(move |burn| (class, burn.window_seconds)))
        .filter(|(class, window)| !own(class, *window))
        .map(|(_, window)| window)
        .collect();
    windows.sort_unstable();
    windows.dedup();
    windows
}

fn row(class: &ClassStatus, windows: &[u64]) -> Markup {
    let standing = &class.standing;
    let objectives: Vec<String> = class
        .objectives
        .iter()
        .map(|one| format!("{} ≤ {}", one.objective.to_uppercase(), latency(one.threshold_seconds)))
        .collect();
    html! {
        tr role="row" id={ "class-" (standing.class) } {
            th.name scope="row" role="rowheader" {
                (standing.class)
                span.note { (objectives.join(" · ")) }
            }
            td role="cell" data-label="Kept" {
                (kept(standing))
                span.note { "target " (percent(standing.target)) ", " (count(standing.met)) " of " (count(standing.total)) }
            }
            td role="cell" data-label="Budget left" {
                (budget_left(standing.budget_remaining))
                span.note { (counted(standing.covered_seconds, standing.window_seconds)) }
            }
            @for window in windows {
                td.n role="cell" data-label={ "Burn " (self::window(*window)) } { (burn(standing, *window)) }
            }
            td.n role="cell" data-label="Burn, window" { (burn(standing, standing.window_seconds)) }
            td.n role="cell" data-label="In flight" { (count(standing.in_flight)) }
            td.n role="cell" data-label="Waiting" { (count(standing.waiting)) }
            td.n role="cell" data-label="Overdue" {
                @if standing.overdue > 0 { strong.warn { (count(standing.overdue)) } } @else { "0" }
            }
            td role="cell" data-label="Overload level" { (level(standing.degradation.as_ref())) }
            td role="cell" data-label="Missed in the last hour" { (reasons(class)) }
        }
    }
}

fn kept(standing: &ClassStanding) -> Markup {
    match standing.attainment {
        None => html! { span.quiet { "nothing judged" } },
        Some(share) if share < standing.target => html! {
            strong.bad { (percent(share)) } " " span.badge.bad { "below target" }
        },
        Some(share) => html! { strong { (percent(share)) } },
    }
}

fn budget_left(share: Option<f64>) -> Markup {
    match share {
        None => html! { span.quiet { (NOTHING) } },
        Some(share) if share < 0.0 => html! { strong.bad { (left_in_words(share)) } },
        Some(share) if share < 0.25 => html! { strong.warn { (rough_percent(share)) } },
        Some(share) => html! { strong { (rough_percent(share)) } },
    }
}

/// What is left of a budget: `83 %`, `12 % overdrawn`.
fn left_in_words(share: f64) -> String {
    if share < 0.0 { format!("{} overdrawn", rough_percent(-share)) } else { rough_percent(share) }
}

/// How much of the window is counted: all of it, or so much of it as yet.
fn counted(covered: u64, whole: u64) -> String {
    if covered < whole {
        format!("of the last {} (window {})", length(covered), window(whole))
    } else {
        format!("of the last {}", window(whole))
    }
}

/// A rate that is that of less than its window says so.
fn burn(standing: &ClassStanding, window: u64) -> Markup {
    let Some(burn) = standing.burn_rate.iter().find(|burn| burn.window_seconds == window) else {
        return html! { span.quiet { (NOTHING) } };
    };
    let mark = if burn.rate > 1.0 { "warn" } else { "plain" };
    let is_part = burn.covered_seconds < burn.window_seconds;
    let rate = format!("{:.2}", burn.rate);
    html! {
        @if is_part { em class=(mark) title={ "of the last " (length(burn.covered_seconds)) } { (rate) } }
        @else { span class=(mark) { (rate) } }
    }
}

/// Which level, and what it does.
fn level(degradation: Option<&Degradation>) -> Markup {
    let Some(Degradation { level, levels, actions, forced, forced_for_seconds, .. }) = degradation else {
        return html! { span.quiet { (NOTHING) } };
    };
    let by_hand = match forced_for_seconds {
        Some(left) => format!(", by hand for {left} s more"),
        None if *forced => ", by hand".to_owned(),
        None => String::new(),
    };
    let does = if actions.is_empty() { String::new() } else { format!(": {}", actions.join(", ")) };
    let text = format!("{level} of {levels}{by_hand}{does}");
    html! { @if *level > 0 { span.warn { (text) } } @else { (text) } }
}

fn reasons(class: &ClassStatus) -> Markup {
    let rest: u64 = class.missed_last_hour.iter().skip(REASONS).map(|one| one.count).sum();
    html! {
        @if class.missed_last_hour.is_empty() { span.quiet { "none" } } @else {
            ul.reasons {
                @for one in class.missed_last_hour.iter().take(REASONS) {
                    li { (one.reason) " " b { (count(one.count)) } }
                }
                @if rest > 0 { li { "others " b { (count(rest)) } } }
            }
        }
    }
}

/// A plot of the budget of each class over time, and of what was met and missed.
pub(super) fn plots(status: &GatewayStatus) -> Markup {
    let spans = [("hour", "last hour"), ("day", "last day"), ("window", "whole window")];
    html! {
        section id="budgets" aria-labelledby="budgets-title" {
            h2 id="budgets-title" { "Budget left over time" }
            nav.spans aria-label="Span of time" {
                @for (span, words) in spans {
                    @let is_shown = span == status.history_span;
                    a href={ "/?span=" (span) } aria-current=[is_shown.then_some("true")] { (words) }
                }
            }
            div.plots {
                @for class in &status.classes { (plot(class)) }
            }
        }
    }
}

fn plot(class: &ClassStatus) -> Markup {
    let (name, span) = (&class.standing.class, chart::domain(&class.history, class.history_seconds));
    let left = class.standing.budget_remaining;
    let shares = class.history.iter().filter_map(|point| point.budget_remaining);
    let lowest = shares.fold(f64::INFINITY, f64::min);
    let words = match left {
        Some(left) => format!(
            "Budget left of {name} over {}: {} now, {} at the lowest",
            window(span),
            left_in_words(left),
            left_in_words(lowest.min(left)),
        ),
        None => format!("Budget left of {name}: nothing judged yet"),
    };
    let judged: u64 = class.history.iter().map(|point| point.judged).sum();
    let missed: u64 = class.history.iter().map(|point| point.judged - point.met).sum();
    let told = format!("Requests of {name}: {} judged, {} missed", count(judged), count(missed));
    let budget = chart::budget(&class.history, span as f64, &words);
    let (most, bars) = chart::outcomes(&class.history, span as f64, &told);
    html! {
        figure id={ "plot-" (name) } {
            figcaption {
                b { (name) }
                span { (left.map_or_else(|| "nothing judged".to_owned(), left_in_words)) }
            }
            div.framed {
                span.axis.high aria-hidden="true" { "100 %" }
                span.axis.low aria-hidden="true" { @if budget.bottom < -0.5 { (rough_percent(budget.bottom)) } @else { "0 %" } }
                (budget.svg)
            }
            div.framed {
                span.axis.high aria-hidden="true" { (count(most)) }
                (bars)
            }
            p.scale { span { (window(span)) " ago" } span { (count(judged)) " judged, " (count(missed)) " missed" } span { "now" } }
        }
    }
}

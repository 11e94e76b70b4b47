//! A spec of Sloth (`prometheus/v1`).
//!
//! Sloth's alerts have fixed thresholds: its first page fires at a burn of 14.4 times (over 28 and 30 days), which a
//! class with a budget above 1 / 14.4 can never reach. For those its alerts are switched off and the
//! recording rules stay; the pages then come from `--format prometheus`. The spec has no window: Sloth takes it from
//! `--default-slo-period`, so classes with another window than the others' need a run of their own.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::promql::duration;
use super::super::{AlertPolicy, ClassSlo};
use super::{DnsLabels, class_selector, in_percent};

/// The burn rate of Sloth's first page.
const FIRST_PAGE: f64 = 14.4;

#[derive(Serialize)]
pub(super) struct SlothSpec {
    version: &'static str,
    service: &'static str,
    slos: Vec<SlothSlo>,
}

#[derive(Serialize)]
struct SlothSlo {
    name: String,
    description: String,
    objective: f64,
    labels: BTreeMap<String, String>,
    sli: SlothSli,
    alerting: SlothAlerting,
}

#[derive(Serialize)]
struct SlothSli {
    events: SlothEvents,
}

#[derive(Serialize)]
struct SlothEvents {
    error_query: String,
    total_query: String,
}

#[derive(Serialize)]
struct SlothAlerting {
    name: &'static str,
    annotations: BTreeMap<&'static str, String>,
    page_alert: SlothAlert,
    ticket_alert: SlothAlert,
}

#[derive(Serialize)]
struct SlothAlert {
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    disable: bool,
    labels: BTreeMap<&'static str, &'static str>,
}

pub(super) fn spec(policy: &AlertPolicy) -> SlothSpec {
    let classes = policy.classes.iter().filter(|class| class.budget() > 0.0);
    let mut names = DnsLabels::new();
    classes.clone().filter(|class| is_name(class.class.as_str())).for_each(|class| names.reserve(class.class.as_str()));
    let slo = |class: &ClassSlo| {
        let name = class.class.as_str();
        let name = if is_name(name) { name.to_owned() } else { names.of(&format!("class-{name}")) };
        slo(policy, class, name)
    };
    SlothSpec { version: "prometheus/v1", service: "goodput", slos: classes.map(slo).collect() }
}

/// Whether Sloth takes a name: two characters or more, letters and digits outside, also `.`, `_` and `-` inside.
fn is_name(name: &str) -> bool {
    let outer = |c: char| c.is_ascii_alphanumeric();
    let inner = |c: char| outer(c) || matches!(c, '.' | '_' | '-');
    name.len() > 1 && name.starts_with(outer) && name.ends_with(outer) && name.chars().all(inner)
}

fn slo(policy: &AlertPolicy, class: &ClassSlo, slo_name: String) -> SlothSlo {
    let name = class.class.as_str();
    let rate = |metric: &str| format!("sum(rate({}[{{{{.window}}}}]))", class_selector(policy, metric, name));
    let (total, met) = (rate("slo_total"), rate("slo_met_total"));
    let cannot_page = FIRST_PAGE * class.budget() >= 1.0;
    let alert = |severity| SlothAlert { disable: cannot_page, labels: BTreeMap::from([("severity", severity)]) };
    let window = duration(class.window);
    let runbook = format!("{}/error-budget-burn.md", policy.options.runbooks);
    SlothSlo {
        name: slo_name,
        description: format!("{}; promised over {window}", class.objectives),
        objective: in_percent(class.target),
        labels: policy.options.labels.iter().cloned().chain([("class".to_owned(), name.to_owned())]).collect(),
        sli: SlothSli {
            events: SlothEvents { error_query: format!("{total} - ({met} or 0 * {total})"), total_query: total },
        },
        alerting: SlothAlerting {
            name: "GoodputErrorBudgetBurn",
            annotations: BTreeMap::from([
                (
                    "summary",
                    format!("{name} uses its error budget too fast: find the sick engine or pool, then shed load"),
                ),
                ("runbook_url", runbook),
            ]),
            page_alert: alert("page"),
            ticket_alert: alert("ticket"),
        },
    }
}

//! `ServiceLevelObjective`s of Pyrra.
//!
//! Pyrra wants the bad events as one series: `goodput_slo_missed_total`, whose sum over reasons is
//! `slo_total - slo_met_total`. Its burn alerts have fixed factors, the first at 14; where a budget is too large for that
//! to be reached they are switched off, and the pages come from `--format prometheus`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::promql::{duration, number};
use super::super::{AlertPolicy, ClassSlo};
use super::{DnsLabels, class_selector, in_percent};

/// The burn rate of Pyrra's first page.
const FIRST_PAGE: f64 = 14.0;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PyrraObjective {
    api_version: &'static str,
    kind: &'static str,
    metadata: PyrraMetadata,
    spec: PyrraSpec,
}

#[derive(Serialize)]
struct PyrraMetadata {
    name: String,
    labels: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct PyrraSpec {
    description: String,
    target: String,
    window: String,
    indicator: PyrraIndicator,
    alerting: PyrraAlerting,
}

#[derive(Serialize)]
struct PyrraIndicator {
    ratio: PyrraRatio,
}

#[derive(Serialize)]
struct PyrraRatio {
    errors: PyrraMetric,
    total: PyrraMetric,
}

#[derive(Serialize)]
struct PyrraMetric {
    metric: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PyrraAlerting {
    name: &'static str,
    absent_name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    burnrates: Option<bool>,
}

pub(super) fn objectives(policy: &AlertPolicy) -> Vec<PyrraObjective> {
    let mut names = DnsLabels::new();
    let classes = policy.classes.iter().filter(|class| class.budget() > 0.0);
    classes.map(|class| objective(policy, class, names.of(&format!("goodput-{}", class.class)))).collect()
}

fn objective(policy: &AlertPolicy, class: &ClassSlo, name: String) -> PyrraObjective {
    let of = |metric: &str| PyrraMetric { metric: class_selector(policy, metric, class.class.as_str()) };
    // Pyrra takes these labels over into its alerts, without the prefix.
    let further = policy.options.labels.iter().map(|(label, value)| (format!("pyrra.dev/{label}"), value.clone()));
    let cannot_page = FIRST_PAGE * class.budget() >= 1.0;
    PyrraObjective {
        api_version: "pyrra.dev/v1alpha1",
        kind: "ServiceLevelObjective",
        metadata: PyrraMetadata { name, labels: further.collect() },
        spec: PyrraSpec {
            description: format!("Requests of the class {} that kept their promise: {}", class.class, class.objectives),
            target: number(in_percent(class.target)),
            window: duration(class.window),
            indicator: PyrraIndicator {
                ratio: PyrraRatio { errors: of("goodput_slo_missed_total"), total: of("slo_total") },
            },
            alerting: PyrraAlerting {
                name: "GoodputErrorBudgetBurn",
                absent_name: "GoodputAbsent",
                burnrates: cannot_page.then_some(false),
            },
        },
    }
}

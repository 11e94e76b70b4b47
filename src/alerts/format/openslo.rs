//! Objects of OpenSLO v1: a service, a data source, a notification target, and for each class an `SLO` with
//! its alert policies.
//!
//! The specification has one window per condition, so the long one of each burn tier is used. A class with a
//! target of 1 has no `SLO`, because the specification requires targets below 1.

use serde::Serialize;

use super::super::promql::{duration, percent};
use super::super::{AlertPolicy, BurnAlert, ClassSlo, Severity, burn_alerts};
use super::{DnsLabels, class_selector};

const VERSION: &str = "openslo/v1";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OpenSloObject {
    api_version: &'static str,
    kind: &'static str,
    metadata: OpenSloMetadata,
    spec: OpenSloSpec,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloMetadata {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    display_name: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum OpenSloSpec {
    Service { description: &'static str },
    DataSource(OpenSloSource),
    Target { description: &'static str, target: &'static str },
    Slo(Box<OpenSloObjective>),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloSource {
    r#type: &'static str,
    connection_details: OpenSloConnection,
}

#[derive(Serialize)]
struct OpenSloConnection {
    url: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloObjective {
    description: String,
    service: &'static str,
    indicator: OpenSloIndicator,
    time_window: Vec<OpenSloWindow>,
    budgeting_method: &'static str,
    objectives: Vec<OpenSloShare>,
    alert_policies: Vec<OpenSloPolicy>,
}

#[derive(Serialize)]
struct OpenSloIndicator {
    metadata: OpenSloMetadata,
    spec: OpenSloIndicatorSpec,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloIndicatorSpec {
    ratio_metric: OpenSloRatio,
}

#[derive(Serialize)]
struct OpenSloRatio {
    counter: bool,
    good: OpenSloMetric,
    total: OpenSloMetric,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloMetric {
    metric_source: OpenSloMetricSource,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloMetricSource {
    metric_source_ref: &'static str,
    r#type: &'static str,
    spec: OpenSloQuery,
}

#[derive(Serialize)]
struct OpenSloQuery {
    query: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloWindow {
    duration: String,
    is_rolling: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloShare {
    display_name: String,
    target: f64,
}

#[derive(Serialize)]
struct OpenSloPolicy {
    kind: &'static str,
    metadata: OpenSloMetadata,
    spec: OpenSloPolicySpec,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloPolicySpec {
    description: String,
    alert_when_no_data: bool,
    alert_when_resolved: bool,
    alert_when_breaching: bool,
    conditions: Vec<OpenSloCondition>,
    notification_targets: Vec<OpenSloTargetRef>,
}

#[derive(Serialize)]
struct OpenSloCondition {
    kind: &'static str,
    metadata: OpenSloMetadata,
    spec: OpenSloConditionSpec,
}

#[derive(Serialize)]
struct OpenSloConditionSpec {
    description: String,
    severity: &'static str,
    condition: OpenSloBurn,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloBurn {
    kind: &'static str,
    op: &'static str,
    threshold: f64,
    lookback_window: String,
    alert_after: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct OpenSloTargetRef {
    target_ref: String,
}

const SERVICE: &str = "goodput";
const SOURCE: &str = "prometheus";

fn named(name: impl Into<String>) -> OpenSloMetadata {
    OpenSloMetadata { name: name.into(), display_name: None }
}

fn object(kind: &'static str, metadata: OpenSloMetadata, spec: OpenSloSpec) -> OpenSloObject {
    OpenSloObject { api_version: VERSION, kind, metadata, spec }
}

pub(super) fn documents(policy: &AlertPolicy) -> Vec<OpenSloObject> {
    let source =
        OpenSloSource { r#type: "Prometheus", connection_details: OpenSloConnection { url: "http://prometheus:9090" } };
    let target = |severity: Severity, description| {
        let spec = OpenSloSpec::Target { description, target: severity.as_str() };
        object("AlertNotificationTarget", named(severity.as_str()), spec)
    };
    let service = OpenSloSpec::Service { description: "The gateway in front of the inference engines" };
    let mut documents = vec![
        object("Service", named(SERVICE), service),
        object("DataSource", named(SOURCE), OpenSloSpec::DataSource(source)),
        target(Severity::Page, "Somebody, now"),
        target(Severity::Ticket, "Somebody, this week"),
    ];
    let mut names = DnsLabels::new();
    for class in policy.classes.iter().filter(|class| class.budget() > 0.0) {
        let name = names.of(&format!("goodput-{}", class.class));
        let metadata = OpenSloMetadata { name: name.clone(), display_name: Some(class.class.to_string()) };
        documents.push(object("SLO", metadata, OpenSloSpec::Slo(Box::new(objective(policy, class, &name)))));
    }
    documents
}

fn objective(policy: &AlertPolicy, class: &ClassSlo, name: &str) -> OpenSloObjective {
    let metric = |metric: &str| OpenSloMetric {
        metric_source: OpenSloMetricSource {
            metric_source_ref: SOURCE,
            r#type: "Prometheus",
            spec: OpenSloQuery { query: format!("sum({})", class_selector(policy, metric, class.class.as_str())) },
        },
    };
    let ratio = OpenSloRatio { counter: true, good: metric("slo_met_total"), total: metric("slo_total") };
    OpenSloObjective {
        description: format!(
            "Judged requests of the class {} that kept their promise: {}",
            class.class, class.objectives
        ),
        service: SERVICE,
        indicator: OpenSloIndicator {
            metadata: named(format!("{name}-met")),
            spec: OpenSloIndicatorSpec { ratio_metric: ratio },
        },
        time_window: vec![OpenSloWindow { duration: shorthand(class.window), is_rolling: true }],
        budgeting_method: "Occurrences",
        objectives: vec![OpenSloShare { display_name: percent(class.target), target: class.target }],
        alert_policies: burn_alerts(class.budget(), class.window)
            .iter()
            .map(|alert| alert_policy(name, alert))
            .collect(),
    }
}

fn alert_policy(name: &str, alert: &BurnAlert) -> OpenSloPolicy {
    let tier = alert.tier.as_str().replace('_', "-");
    let description = format!(
        "More than {} of the requests of {} missed: the budget is used {:.2} times as fast as promised",
        percent(alert.miss_ratio),
        duration(alert.long),
        alert.burn
    );
    let condition = OpenSloCondition {
        kind: "AlertCondition",
        metadata: named(format!("{name}-{tier}")),
        spec: OpenSloConditionSpec {
            description: description.clone(),
            severity: alert.severity.as_str(),
            condition: OpenSloBurn {
                kind: "burnrate",
                op: "gt",
                threshold: (alert.burn * 1e6).round() / 1e6,
                lookback_window: shorthand(alert.long),
                alert_after: "1m",
            },
        },
    };
    OpenSloPolicy {
        kind: "AlertPolicy",
        metadata: named(format!("{name}-{tier}")),
        spec: OpenSloPolicySpec {
            description,
            alert_when_no_data: false,
            alert_when_resolved: true,
            alert_when_breaching: true,
            conditions: vec![condition],
            notification_targets: vec![OpenSloTargetRef { target_ref: alert.severity.as_str().to_owned() }],
        },
    }
}

/// One number with one unit, as the specification wants it: `28d`, `90m`.
fn shorthand(length: std::time::Duration) -> String {
    let minutes = length.as_secs().div_ceil(60);
    match minutes {
        whole if whole.is_multiple_of(24 * 60) => format!("{}d", whole / (24 * 60)),
        whole if whole.is_multiple_of(60) => format!("{}h", whole / 60),
        whole => format!("{whole}m"),
    }
}

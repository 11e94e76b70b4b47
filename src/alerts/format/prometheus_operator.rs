//! A `PrometheusRule` of the Prometheus operator.

use serde::Serialize;

use super::super::{AlertPolicy, RuleSet, rule_set};

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OperatorRule {
    api_version: &'static str,
    kind: &'static str,
    metadata: OperatorMetadata,
    spec: RuleSet,
}

#[derive(Serialize)]
struct OperatorMetadata {
    name: &'static str,
    labels: OperatorLabels,
}

#[derive(Serialize)]
struct OperatorLabels {
    #[serde(rename = "app.kubernetes.io/name")]
    name: &'static str,
}

pub(super) fn rule(policy: &AlertPolicy) -> OperatorRule {
    OperatorRule {
        api_version: "monitoring.coreos.com/v1",
        kind: "PrometheusRule",
        metadata: OperatorMetadata { name: "goodput", labels: OperatorLabels { name: "goodput" } },
        spec: rule_set(policy),
    }
}

//! Conditions under which a plan's measurements are outdated and a new sweep is due.

use std::fmt::Write;

use serde::Serialize;

use super::inputs::ClassForecast;

/// A condition for Prometheus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BaselineCondition {
    /// Name of the alert.
    pub alert: String,
    /// PromQL over the gateway's own metrics.
    pub expression: String,
    /// How long it must hold before the alert fires.
    pub hold: &'static str,
    /// Its meaning, in a sentence.
    pub meaning: String,
}

/// Changes that move the knee and that no metric shows.
pub const UNSEEN_CHANGES: [&str; 6] = [
    "another model, or another version of it",
    "another version or other settings of the engine: batch size, chunked prefill, speculative decoding, parallelism",
    "another precision of weights or cache",
    "another GPU, driver or interconnect",
    "another prompt template or system prompt",
    "new objectives, or another attainment target",
];

/// Mean lengths may drift by this factor, either way.
const DRIFT: f64 = 1.25;

/// Steps may be slower by this factor than the plan assumes.
const SLOWER: f64 = 1.1;

/// The conditions of a class whose plan allows `planned_rate` requests per second for each of `replicas`.
#[must_use]
pub(super) fn conditions(class: &ClassForecast, planned_rate: f64, replicas: u32) -> Vec<BaselineCondition> {
    let label = format!("{{class={}}}", quoted(&class.name));
    let rate = |family: &str, window: &str| format!("sum(rate({family}{label}[{window}]))");
    let ClassForecast { name, peak_rate, tpot, target, .. } = class;
    let allowed = planned_rate * f64::from(replicas);
    let condition = |alert: &str, expression: String, hold: &'static str, meaning: String| BaselineCondition {
        alert: format!("GoodputBaseline{alert}"),
        expression,
        hold,
        meaning,
    };
    let pace = "goodput_time_per_output_token_seconds";
    let (sum, count) = (rate(&format!("{pace}_sum"), "1h"), rate(&format!("{pace}_count"), "1h"));
    let (met, all) = (rate("slo_met_total", "1h"), rate("slo_total", "1h"));
    vec![
        condition(
            "Lengths",
            format!("goodput_workload_drift{label} > {DRIFT} or goodput_workload_drift{label} < {}", 1.0 / DRIFT),
            "1h",
            format!("Lengths of class {name} are a quarter off the workload_assumption that it was planned with."),
        ),
        condition(
            "Peak",
            format!("{} > {peak_rate}", rate("slo_total", "5m")),
            "5m",
            format!("Class {name} gets more than its forecast peak of {peak_rate} requests per second."),
        ),
        condition(
            "Pace",
            format!("{sum} / {count} > {}", rounded(SLOWER * tpot)),
            "1h",
            format!("Tokens of class {name} take more than 10 % longer than the {tpot} s that were planned."),
        ),
        condition(
            "Attainment",
            format!("{met} / {all} < {target} and {all} < {}", rounded(allowed)),
            "30m",
            format!(
                "Class {name} misses its target of {target} at a rate that {replicas} replicas should carry: the knee has moved."
            ),
        ),
    ]
}

/// Rounds to six digits, without the noise of binary fractions.
fn rounded(value: f64) -> f64 {
    format!("{value:.6}").parse().unwrap_or(value)
}

/// A string as PromQL and YAML both read it.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The conditions as a file of Prometheus alerting rules.
#[must_use]
pub fn rules(conditions: &[BaselineCondition]) -> String {
    let mut out = String::from("groups:\n  - name: goodput-baseline\n    rules:\n");
    for condition in conditions {
        let BaselineCondition { alert, expression, hold, meaning } = condition;
        let (expression, summary) = (quoted(expression), quoted(&format!("{meaning} Sweep again and plan anew.")));
        let lines = format!(
            "      - alert: {alert}\n        expr: {expression}\n        for: {hold}\n        labels: {{severity: ticket}}\n        annotations: {{summary: {summary}}}\n"
        );
        out.write_str(&lines).expect("a String takes everything");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_carry_the_figures_of_the_plan_and_survive_odd_names() {
        let class = ClassForecast { peak_rate: 30.0, tpot: 0.035, target: 0.92, ..ClassForecast::named("a\"b") };
        let found = conditions(&class, 5.6, 6);
        let expression =
            |alert: &str| found.iter().find(|condition| condition.alert.ends_with(alert)).unwrap().expression.clone();
        assert_eq!(expression("Peak"), r#"sum(rate(slo_total{class="a\"b"}[5m])) > 30"#);
        assert!(expression("Pace").ends_with("> 0.0385"), "{}", expression("Pace"));
        assert!(expression("Attainment").contains("< 0.92 and ") && expression("Attainment").ends_with("< 33.6"));
        let yaml = rules(&found);
        let read: serde_json::Value = serde_yaml::from_str(&yaml).unwrap();
        let rules = read["groups"][0]["rules"].as_array().unwrap();
        assert_eq!(rules.len(), found.len());
        assert_eq!(rules[1]["expr"], expression("Peak"));
    }
}

//! The rules, and the objectives behind them, as whoever evaluates them reads them.
//!
//! | format | what comes out |
//! | --- | --- |
//! | [`RuleFormat::Prometheus`] | a rule file |
//! | [`RuleFormat::PrometheusOperator`] | the same as a `PrometheusRule` of the Prometheus operator |
//! | [`RuleFormat::OpenSlo`] | `SLO`s of OpenSLO v1, with their alert policies |
//! | [`RuleFormat::Sloth`] | a `prometheus/v1` spec of Sloth |
//! | [`RuleFormat::Pyrra`] | `ServiceLevelObjective`s of Pyrra |
//!
//! The last three hand over objectives, and whoever reads them makes rules of their own.

mod openslo;
mod prometheus_operator;
mod pyrra;
mod sloth;
#[cfg(test)]
mod specifications;

use std::collections::BTreeSet;

use serde::Serialize;

use super::{AlertPolicy, rule_set};

/// Consumer of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleFormat {
    /// Prometheus, or whatever reads its rule files.
    Prometheus,
    /// The Prometheus operator.
    PrometheusOperator,
    /// Whatever reads OpenSLO v1.
    OpenSlo,
    /// Sloth.
    Sloth,
    /// Pyrra.
    Pyrra,
}

/// How it is written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notation {
    /// YAML; several objects are several documents.
    Yaml,
    /// JSON; several objects are a list.
    Json,
}

impl Notation {
    /// Writes one value.
    #[must_use]
    pub fn write(self, value: &impl Serialize) -> String {
        match self {
            Notation::Yaml => serde_yaml::to_string(value).expect("texts, numbers and lists are always YAML"),
            Notation::Json => serde_json::to_string_pretty(value).expect("texts, numbers and lists are always JSON"),
        }
    }

    fn write_all(self, values: &[impl Serialize]) -> String {
        match self {
            Notation::Yaml => serde_yaml::to_string_multiple(values).expect("texts, numbers and lists are always YAML"),
            Notation::Json => self.write(&values),
        }
    }
}

/// The rules or objectives of these classes, for this reader.
#[must_use]
pub fn render(policy: &AlertPolicy, format: RuleFormat, notation: Notation) -> String {
    match format {
        RuleFormat::Prometheus => notation.write(&rule_set(policy)),
        RuleFormat::PrometheusOperator => notation.write(&prometheus_operator::rule(policy)),
        RuleFormat::OpenSlo => notation.write_all(&openslo::documents(policy)),
        RuleFormat::Sloth => notation.write(&sloth::spec(policy)),
        RuleFormat::Pyrra => notation.write_all(&pyrra::objectives(policy)),
    }
}

/// Names as Kubernetes takes them (RFC 1123 labels), each once.
struct DnsLabels(BTreeSet<String>);

impl DnsLabels {
    fn new() -> Self {
        DnsLabels(BTreeSet::new())
    }

    /// Reserves a name.
    fn reserve(&mut self, name: &str) {
        self.0.insert(name.to_owned());
    }

    /// A label derived from this name: `chat_interactive` becomes `chat-interactive`.
    fn of(&mut self, name: &str) -> String {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
        let mapped: String = name.chars().map(plain).collect();
        let bare = mapped.trim_matches('-');
        let bare = if bare.is_empty() { "class" } else { &bare[..bare.len().min(50)] };
        let bare = bare.trim_end_matches('-');
        let numbered = (2..).map(|n| format!("{bare}-{n}"));
        let free = [bare.to_owned()].into_iter().chain(numbered).find(|label| !self.0.contains(label));
        let free = free.expect("numbers do not end");
        self.0.insert(free.clone());
        free
    }
}

/// A selector of a class's series, with the matchers of the options.
fn class_selector(policy: &AlertPolicy, metric: &str, class: &str) -> String {
    use super::promql::{Matcher, selector};
    let further = policy.options.matchers.iter().map(|(label, value)| Matcher::Is(label, value));
    let all: Vec<Matcher<'_>> = [Matcher::Is("class", class)].into_iter().chain(further).collect();
    selector(metric, &all)
}

/// A target in per cent, without noise behind its last digit.
fn in_percent(target: f64) -> f64 {
    (target * 1e10).round() / 1e8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_labels_that_kubernetes_takes_each_once() {
        let mut labels = DnsLabels::new();
        let of = ["chat_interactive", "Chat.Interactive", "@:", "a/b", &"x".repeat(64)].map(|name| labels.of(name));
        assert_eq!(of[..4], ["chat-interactive", "chat-interactive-2", "class", "a-b"]);
        assert_eq!(of[4].len(), 50);
    }
}

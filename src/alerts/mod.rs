//! Recording and alerting rules for Prometheus, made from what the classes promise.
//!
//! Pure: an [`AlertPolicy`] goes in, [`RuleGroup`]s come out; [`format`](mod@format) writes them for whoever
//! evaluates them, [`unit_tests`](unit_tests()) writes promtool tests of them, and [`explain`](explain()) says how long each
//! of them takes to page. The burn-rate tiers and their thresholds are in [`BurnAlert`]; expressions
//! are written in `rules`, and they follow four laws:
//!
//! - Sums over replicas, pools and models come first, ratios after them; a mean of ratios occurs nowhere.
//! - The class `drill` is in no sum: every selector names the classes of the settings.
//! - An alert needs enough requests that chance alone would not cross its threshold
//!   ([`min_requests`]), and a class that was seen longer ago than the threshold takes to be crossed.
//! - What pages is a promise broken: budgets, overdue requests, no data at all. Causes and early
//!   signs are tickets and information.

mod binomial;
mod explain;
mod fleet_counts;
pub mod format;
mod promql;
mod rules;
mod severity;
mod tiers;
mod unit_tests;

pub use binomial::min_requests;
pub use explain::{ClassTimes, TierTimes, explain, times};
pub use fleet_counts::{counted, first_seen, is_counted_directly, recorded_counts};
pub use promql::duration;
pub use rules::{AlertingRule, PrometheusRule, RecordingRule, RuleGroup, RuleSet, rule_set};
pub use severity::Severity;
pub use tiers::{BurnAlert, BurnTier, burn_alerts};
pub use unit_tests::{PromtoolTests, unit_tests};

use std::time::Duration;

use crate::types::{ClassId, PoolId};

/// Inputs of the rules.
#[derive(Clone, Debug)]
pub struct AlertPolicy {
    /// The classes, in the order of the settings.
    pub classes: Vec<ClassSlo>,
    /// Whether requests are counted by the label `length`.
    pub by_length: bool,
    /// Whether they are counted by the label `pool`.
    pub by_pool: bool,
    /// Gateways that should be there.
    pub replicas: u32,
    /// Whether the tenants' limits are in a store that gateways share.
    pub shared_limits: bool,
    /// How the rules are written.
    pub options: RuleOptions,
}

/// One class, as far as alerts need it.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassSlo {
    /// Its name.
    pub class: ClassId,
    /// The share of judged requests that should be met.
    pub target: f64,
    /// The window of the target.
    pub window: Duration,
    /// The objectives in a few words: `TTFT 1.2s, TPOT 50ms`.
    pub objectives: String,
    /// Expected wait that deserves an early warning; absent if the class has no limit on time.
    pub wait_limit: Option<Duration>,
    /// The pools that serve it.
    pub pools: Vec<PoolId>,
    /// Whether it assumes a workload that requests can drift from.
    pub assumes_workload: bool,
}

impl ClassSlo {
    /// The share of requests that may miss.
    #[must_use]
    pub fn budget(&self) -> f64 {
        // The difference of two decimal fractions has noise behind its last digit.
        ((1.0 - self.target) * 1e12).round() / 1e12
    }
}

/// How rules are written.
#[derive(Clone, Debug, PartialEq)]
pub struct RuleOptions {
    /// Location of the runbooks: a URL or path, without a trailing slash.
    pub runbooks: String,
    /// Further labels that every series must have, with their values.
    pub matchers: Vec<(String, String)>,
    /// Further labels of every alert.
    pub labels: Vec<(String, String)>,
    /// How many times shorter all windows are than they should be: above 1 only to rehearse.
    pub faster: u32,
}

impl Default for RuleOptions {
    fn default() -> Self {
        RuleOptions { runbooks: "docs/runbooks".to_owned(), matchers: Vec::new(), labels: Vec::new(), faster: 1 }
    }
}

#[cfg(test)]
mod tests;

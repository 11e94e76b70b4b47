//! Time until an alert fires, for people and as values.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use super::promql::{duration, number, percent};
use super::{AlertPolicy, BurnAlert, ClassSlo, burn_alerts};

/// The miss ratios of the table, beside a full outage.
const MISS_RATIOS: [f64; 5] = [1.0, 0.75, 0.5, 0.25, 0.1];

/// One class: when which tier fires.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassTimes {
    /// The class.
    pub class: String,
    /// The share of requests that should be met.
    pub target: f64,
    /// The SLO's window, in Prometheus notation.
    pub window: String,
    /// The highest possible burn rate, 1 / (1 - target); absent for a target of 1.
    pub highest_burn: Option<f64>,
    /// From a full outage to the first page, in seconds.
    pub first_page_seconds: Option<u64>,
    /// The share of the budget that is used by then.
    pub budget_used_by_first_page: Option<f64>,
    /// The tiers, the most urgent first.
    pub tiers: Vec<TierTimes>,
}

/// One tier of a class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TierTimes {
    /// The tier.
    pub tier: &'static str,
    /// Whom it reaches.
    pub severity: &'static str,
    /// Its windows, as Prometheus writes them.
    pub long_window: String,
    /// The same.
    pub short_window: String,
    /// It fires above this.
    pub miss_ratio: f64,
    /// The same as a burn rate.
    pub burn_rate: f64,
    /// Requests that its long window must hold.
    pub min_requests: u64,
    /// Seconds until it fires, by the share of requests that miss from some moment on; none: it never does.
    pub seconds_to_fire: Vec<(f64, Option<u64>)>,
}

/// The table of every class.
#[must_use]
pub fn times(policy: &AlertPolicy) -> Vec<ClassTimes> {
    policy.classes.iter().map(of_class).collect()
}

fn of_class(slo: &ClassSlo) -> ClassTimes {
    let budget = slo.budget();
    let alerts = burn_alerts(budget, slo.window);
    let pages = alerts.iter().filter(|alert| alert.severity == super::Severity::Page);
    let first = pages.filter_map(|alert| alert.time_to_fire(1.0)).min();
    let used = first.map(|time| time.as_secs_f64() / (slo.window.as_secs_f64() * budget));
    ClassTimes {
        class: slo.class.to_string(),
        target: slo.target,
        window: duration(slo.window),
        highest_burn: (budget > 0.0).then(|| 1.0 / budget),
        first_page_seconds: first.map(rounded_seconds),
        budget_used_by_first_page: used,
        tiers: alerts.iter().map(of_tier).collect(),
    }
}

fn of_tier(alert: &BurnAlert) -> TierTimes {
    let seconds = |ratio: f64| (ratio, alert.time_to_fire(ratio).map(rounded_seconds));
    TierTimes {
        tier: alert.tier.as_str(),
        severity: alert.severity.as_str(),
        long_window: duration(alert.long),
        short_window: duration(alert.short),
        miss_ratio: alert.miss_ratio,
        burn_rate: alert.burn,
        min_requests: alert.min_requests,
        seconds_to_fire: MISS_RATIOS.map(seconds).to_vec(),
    }
}

fn rounded_seconds(length: Duration) -> u64 {
    length.as_secs_f64().round() as u64
}

/// The same as a text.
#[must_use]
pub fn explain(policy: &AlertPolicy) -> String {
    let mut text = String::new();
    for class in times(policy) {
        tell(&mut text, &class);
    }
    text.push_str(
        "Times run from the moment at which requests begin to miss, after a time without misses, with steady traffic. Add the\n\
         scrape interval, up to 30 s until the rules are evaluated (4m for windows above 1h), and what Alertmanager waits\n\
         (group_wait). \"needs\" is the number of requests that the long window must hold: with less traffic a tier is silent.\n",
    );
    text
}

fn tell(text: &mut String, class: &ClassTimes) {
    let ClassTimes { class: name, target, window, .. } = class;
    let mut line = |line: String| writeln!(text, "{}", line.trim_end()).expect("writing into a string cannot fail");
    let Some(highest) = class.highest_burn else {
        line(format!(
            "{name}: every request within {window}. There is no budget, so nothing burns: any miss is a ticket within the hour.\n"
        ));
        return;
    };
    let budget = percent(1.0 - target);
    line(format!(
        "{name}: {} within {window}; {budget} may miss, so it burns {} times too fast at most",
        percent(*target),
        number((highest * 100.0).round() / 100.0)
    ));
    if let (Some(first), Some(used)) = (class.first_page_seconds, class.budget_used_by_first_page) {
        line(format!(
            "  a full outage pages after {}, with {} of the budget used",
            rough(first),
            percent((used * 1e4).round() / 1e4)
        ));
    }
    let misses = MISS_RATIOS.map(|ratio| format!("{:>10}", percent(ratio))).concat();
    line(String::new());
    line(format!(
        "  {:<11}{:<9}{:<14}{:>9}{:>8}{:>8}   time to fire when this share misses",
        "tier", "severity", "windows", "above", "burn", "needs"
    ));
    line(format!("  {:<11}{:<9}{:<14}{:>9}{:>8}{:>8}{misses}", "", "", "", "", "", ""));
    for tier in &class.tiers {
        let windows = format!("{}/{}", tier.long_window, tier.short_window);
        let times = tier
            .seconds_to_fire
            .iter()
            .map(|(_, time)| format!("{:>10}", time.map_or_else(|| "never".to_owned(), rough)));
        let burn = number((tier.burn_rate * 100.0).round() / 100.0);
        line(format!(
            "  {:<11}{:<9}{windows:<14}{:>9}{burn:>8}{:>8}{}",
            tier.tier,
            tier.severity,
            percent((tier.miss_ratio * 1e5).round() / 1e5),
            tier.min_requests,
            times.collect::<String>()
        ));
    }
    line(String::new());
}

/// A length of time in its two largest units.
fn rough(seconds: u64) -> String {
    let step = [(86_400, 3600), (3600, 60), (60, 1)]
        .into_iter()
        .find(|(unit, _)| seconds >= *unit)
        .map_or(1, |(_, step)| step);
    duration(Duration::from_secs(seconds / step * step))
}

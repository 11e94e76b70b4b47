//! The rules themselves: which series are recorded, and which conditions are alerts.
//!
//! Windows up to an hour are increases over the counters. Longer ones are sums over a recorded rate,
//! because a range of days over every replica, pool and model is more samples than a
//! Prometheus lets one query touch: each sample of a rate over [`BASE_RATE`], recorded every [`BASE_EVERY`], stands for
//! so many seconds of traffic, and their sum is the number of requests.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::binomial::min_requests;
use super::promql::{Matcher, duration, number, percent, selector};
use super::severity::Severity;
use super::tiers::{BurnAlert, BurnTier, burn_alerts};
use super::{AlertPolicy, ClassSlo};
use crate::record::length_drift::DRIFT_FACTOR;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);

/// The range of the recorded rate that long windows are summed from, and how often it is recorded. The ranges
/// overlap, so that what falls between the last scrape of one and the first of the next is in their neighbours; and they
/// come more often than every five minutes, because a query looks back no further than that.
pub(super) const BASE_RATE: Duration = Duration::from_secs(8 * 60);
pub(super) const BASE_EVERY: Duration = Duration::from_secs(4 * 60);

/// Longest window computed from the counters directly.
pub(super) const DIRECT: Duration = HOUR;

/// How often pages and early warnings are evaluated.
const OFTEN: Duration = Duration::from_secs(30);

/// Window over which overdue requests are compared with finished ones.
const OVERDUE_WINDOW: Duration = Duration::from_secs(5 * 60);
/// Fewest overdue requests that count as an outage.
const OVERDUE_LEAST: u64 = 4;
/// How far between the budget and a total outage the overdue share must be.
const OVERDUE_REACH: f64 = 0.5;
/// Time for which that must hold.
const OVERDUE_FOR: Duration = Duration::from_secs(2 * 60);

/// The range of the dispatch rate that a queue is divided by.
const DISPATCH_RATE: Duration = Duration::from_secs(2 * 60);

/// A share of requests that is excluded, or cut by its length, is worth a ticket above this, if it was half as large a day before.
const COMPANION_SHARE: f64 = 0.1;
/// Fewest requests per hour for a meaningful share.
const COMPANION_LEAST: u64 = 100;
/// Fewest requests shed in an hour that count as a trend.
const SHED_LEAST: u64 = 10;

/// A pool with a larger share of its engines down than this is worth a ticket.
const ENGINES_DOWN: f64 = 0.25;

/// All groups: the content of a Prometheus rule file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RuleSet {
    /// In the order in which they build on each other.
    pub groups: Vec<RuleGroup>,
}

impl RuleSet {
    /// All alerting rules.
    pub fn alerts(&self) -> impl Iterator<Item = &AlertingRule> {
        let rules = self.groups.iter().flat_map(|group| &group.rules);
        rules.filter_map(|rule| match rule {
            PrometheusRule::Alerting(alert) => Some(alert),
            PrometheusRule::Recording(_) => None,
        })
    }
}

/// Rules that are evaluated one after the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RuleGroup {
    /// Its name.
    pub name: String,
    /// How often it is evaluated, as Prometheus writes it.
    pub interval: String,
    /// Its rules, in order.
    pub rules: Vec<PrometheusRule>,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum PrometheusRule {
    /// Makes series.
    Recording(RecordingRule),
    /// Makes alerts.
    Alerting(AlertingRule),
}

/// A rule that records the value of an expression as a series.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecordingRule {
    /// The name of the series.
    pub record: String,
    /// The expression.
    pub expr: String,
    /// Labels that it gets.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// An alerting rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AlertingRule {
    /// Its name.
    pub alert: String,
    /// Its condition.
    pub expr: String,
    /// Time for which the condition must hold.
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// Labels, for routing.
    pub labels: BTreeMap<String, String>,
    /// Texts for the receiver.
    pub annotations: BTreeMap<String, String>,
}

/// The rules for these classes.
#[must_use]
pub fn rule_set(policy: &AlertPolicy) -> RuleSet {
    let writer = RuleWriter::new(policy);
    let groups = vec![
        writer.group("base", BASE_EVERY, writer.base()),
        writer.group("fast-burn", OFTEN, writer.fast_burn()),
        writer.group("slow-burn", BASE_EVERY, writer.slow_burn()),
        writer.group("budget", BASE_EVERY, writer.budget()),
        writer.group("early-warning", OFTEN, writer.early_warning()),
        writer.group("companions", MINUTE, writer.companions()),
        writer.group("health", OFTEN, writer.health()),
    ];
    RuleSet { groups: groups.into_iter().filter(|group| !group.rules.is_empty()).collect() }
}

/// A class with its tiers.
struct ClassAlerts<'a> {
    slo: &'a ClassSlo,
    budget: f64,
    tiers: Vec<BurnAlert>,
}

impl<'a> ClassAlerts<'a> {
    fn name(&self) -> &'a str {
        self.slo.class.as_str()
    }

    /// `92 % within 28d: TTFT 1.2s, TPOT 50ms`.
    fn promise(&self) -> String {
        let share = percent(self.slo.target);
        format!("{share} within {}: {}", duration(self.slo.window), self.slo.objectives)
    }

    /// Windows of its tiers and of what else is asked of it.
    fn windows(&self) -> impl Iterator<Item = Duration> {
        let tiers = self.tiers.iter().flat_map(|tier| [tier.long, tier.short]);
        tiers.chain([OVERDUE_WINDOW, HOUR])
    }
}

/// Whose counts a recorded series holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SeriesLevel {
    Class,
    ClassAndLength,
}

impl SeriesLevel {
    fn prefix(self) -> &'static str {
        match self {
            SeriesLevel::Class => "class",
            SeriesLevel::ClassAndLength => "class_length",
        }
    }
}

/// An alerting rule that gets its labels and texts.
struct AlertDraft {
    rule: AlertingRule,
    faster: u32,
}

impl AlertDraft {
    fn label(mut self, name: &str, value: &str) -> Self {
        self.rule.labels.insert(name.to_owned(), value.to_owned());
        self
    }

    fn of_class(self, class: &str) -> Self {
        self.label("class", class)
    }

    fn hold(mut self, length: Duration) -> Self {
        self.rule.hold = Some(duration(length / self.faster));
        self
    }

    fn annotation(mut self, name: &str, text: String) -> Self {
        self.rule.annotations.insert(name.to_owned(), text);
        self
    }

    /// One line: class, objective, action.
    fn summary(self, text: impl Into<String>) -> Self {
        self.annotation("summary", text.into())
    }

    /// The measurement.
    fn description(self, text: impl Into<String>) -> Self {
        self.annotation("description", text.into())
    }

    fn build(self) -> PrometheusRule {
        PrometheusRule::Alerting(self.rule)
    }
}

/// Writes rules. All lengths of time go through [`RuleWriter::time`].
struct RuleWriter<'a> {
    policy: &'a AlertPolicy,
    classes: Vec<ClassAlerts<'a>>,
    names: Vec<&'a str>,
}

impl<'a> RuleWriter<'a> {
    fn new(policy: &'a AlertPolicy) -> Self {
        let alerts = |slo: &'a ClassSlo| {
            let budget = slo.budget();
            ClassAlerts { slo, budget, tiers: burn_alerts(budget, slo.window) }
        };
        let names = policy.classes.iter().map(|slo| slo.class.as_str()).collect();
        RuleWriter { policy, classes: policy.classes.iter().map(alerts).collect(), names }
    }

    // ---- pieces ------------------------------------------------------------------------------

    fn group(&self, name: &str, interval: Duration, rules: Vec<PrometheusRule>) -> RuleGroup {
        let least = Duration::from_secs(1);
        let interval = duration((interval / self.policy.options.faster).max(least));
        RuleGroup { name: format!("goodput-{name}"), interval, rules }
    }

    /// A duration in rule notation.
    fn time(&self, length: Duration) -> String {
        duration(length / self.policy.options.faster)
    }

    /// A selector with the matchers that every series must have.
    fn of(&self, metric: &str, own: &[Matcher<'_>]) -> String {
        let further = self.policy.options.matchers.iter().map(|(label, value)| Matcher::Is(label, value));
        let all: Vec<Matcher<'_>> = own.iter().copied().chain(further).collect();
        selector(metric, &all)
    }

    /// The series of one class.
    fn of_class(&self, metric: &str, class: &str) -> String {
        self.of(metric, &[Matcher::Is("class", class)])
    }

    /// These labels and those of the matchers: what sums and joins keep.
    fn labels(&self, own: &[&str]) -> String {
        let further = self.policy.options.matchers.iter().map(|(label, _)| label.as_str());
        own.iter().copied().chain(further).collect::<Vec<_>>().join(", ")
    }

    fn sum(&self, by: &[&str], inner: &str) -> String {
        format!("sum by ({}) ({inner})", self.labels(by))
    }

    fn record(&self, name: impl Into<String>, expr: impl Into<String>) -> PrometheusRule {
        PrometheusRule::Recording(RecordingRule { record: name.into(), expr: expr.into(), labels: BTreeMap::new() })
    }

    fn alert(&self, name: &str, severity: Severity, expr: String) -> AlertDraft {
        let further = self.policy.options.labels.iter().cloned();
        let labels: BTreeMap<_, _> = further.chain([("severity".to_owned(), severity.as_str().to_owned())]).collect();
        let runbook = format!("{}/{}.md", self.policy.options.runbooks, in_kebab_case(name));
        let annotations = BTreeMap::from([("runbook_url".to_owned(), runbook)]);
        let rule = AlertingRule { alert: name.to_owned(), expr, hold: None, labels, annotations };
        AlertDraft { rule, faster: self.policy.options.faster }
    }

    // ---- recorded series ---------------------------------------------------------------------

    /// Recordings that long windows are computed from.
    fn base(&self) -> Vec<PrometheusRule> {
        let mut rules = Vec::new();
        for level in self.levels() {
            rules.extend(self.judged_and_missed(
                level,
                &self.names,
                &format!("rate{}", self.time(BASE_RATE)),
                |writer, metric, by, classes| {
                    let range = writer.time(BASE_RATE);
                    writer
                        .sum(by, &format!("rate({}[{range}])", writer.of(metric, &[Matcher::AnyOf("class", classes)])))
                },
            ));
        }
        rules
    }

    /// The target and the budget of each class.
    fn targets(&self) -> Vec<PrometheusRule> {
        let mut rules = Vec::new();
        for class in &self.classes {
            for (name, value) in
                [("class:slo_objective:ratio", class.slo.target), ("class:slo_budget:ratio", class.budget)]
            {
                let further = self.policy.options.matchers.iter().cloned();
                let labels = further.chain([("class".to_owned(), class.name().to_owned())]).collect();
                let expr = format!("vector({})", number(value));
                rules.push(PrometheusRule::Recording(RecordingRule { record: name.to_owned(), expr, labels }));
            }
        }
        rules
    }

    fn levels(&self) -> Vec<SeriesLevel> {
        if self.policy.by_length {
            vec![SeriesLevel::Class, SeriesLevel::ClassAndLength]
        } else {
            vec![SeriesLevel::Class]
        }
    }

    /// Judged and missed requests, and for counts their ratio and burn rate.
    fn judged_and_missed(
        &self,
        level: SeriesLevel,
        classes: &[&str],
        operation: &str,
        count: impl Fn(&Self, &str, &[&str], &[&str]) -> String,
    ) -> Vec<PrometheusRule> {
        let by: &[&str] = if level == SeriesLevel::Class { &["class"] } else { &["class", "length"] };
        let judged = format!("{}:slo_judged:{operation}", level.prefix());
        let of_judged = self.of(&judged, &[Matcher::AnyOf("class", classes)]);
        let all = count(self, "slo_total", by, classes);
        let met = count(self, "slo_met_total", by, classes);
        vec![
            self.record(judged, all),
            // Before the first met request its series may be missing: then every judged request missed.
            self.record(
                format!("{}:slo_missed:{operation}", level.prefix()),
                format!("{of_judged} - ({met} or 0 * {of_judged})"),
            ),
        ]
    }

    /// Counts, ratio and burn over one window.
    fn window(&self, level: SeriesLevel, window: Duration, classes: &[&str]) -> Vec<PrometheusRule> {
        let (prefix, range) = (level.prefix(), self.time(window));
        let any = [Matcher::AnyOf("class", classes)];
        let of = |series: &str, operation: &str| self.of(&format!("{prefix}:{series}:{operation}"), &any);
        let mut rules = if window <= DIRECT {
            self.judged_and_missed(level, classes, &format!("increase{range}"), |writer, metric, by, classes| {
                let series = writer.of(metric, &[Matcher::AnyOf("class", classes)]);
                writer.sum(by, &format!("increase({series}[{range}])"))
            })
        } else {
            let seconds = number((BASE_EVERY / self.policy.options.faster).as_secs_f64());
            let rate = format!("rate{}", self.time(BASE_RATE));
            let summed = |series: &str| {
                let expr = format!("sum_over_time({}[{range}]) * {seconds}", of(series, &rate));
                self.record(format!("{prefix}:{series}:increase{range}"), expr)
            };
            vec![summed("slo_judged"), summed("slo_missed")]
        };
        let increase = format!("increase{range}");
        let ratio = format!("{} / ({} > 0)", of("slo_missed", &increase), of("slo_judged", &increase));
        rules.push(self.record(format!("{prefix}:slo_missed_per_judged:ratio{range}"), ratio));
        let on = self.labels(&["class"]);
        let join = if level == SeriesLevel::Class { String::new() } else { " group_left ()".to_owned() };
        let budget = self.of("class:slo_budget:ratio", &any);
        let burn =
            format!("{} / on ({on}){join} ({budget} > 0)", of("slo_missed_per_judged", &format!("ratio{range}")));
        rules.push(self.record(format!("{prefix}:slo_burn_rate:ratio{range}"), burn));
        rules
    }

    /// The classes that need each window.
    fn windows(&self, wanted: impl Fn(Duration) -> bool) -> BTreeMap<Duration, Vec<&'a str>> {
        let mut windows: BTreeMap<Duration, Vec<&str>> = BTreeMap::new();
        for class in &self.classes {
            for window in class.windows().filter(|window| wanted(*window)) {
                let classes = windows.entry(window).or_default();
                if !classes.contains(&class.name()) {
                    classes.push(class.name());
                }
            }
        }
        windows
    }

    // ---- burn --------------------------------------------------------------------------------

    fn fast_burn(&self) -> Vec<PrometheusRule> {
        let mut rules = self.targets();
        for (window, classes) in self.windows(|window| window <= DIRECT) {
            rules.extend(self.window(SeriesLevel::Class, window, &classes));
        }
        for class in &self.classes {
            rules.extend(class.tiers.iter().filter(|tier| tier.long <= DIRECT).map(|tier| self.burn(class, tier)));
        }
        rules
    }

    fn slow_burn(&self) -> Vec<PrometheusRule> {
        let mut rules = Vec::new();
        for (window, classes) in self.windows(|window| window > DIRECT) {
            rules.extend(self.window(SeriesLevel::Class, window, &classes));
        }
        if self.policy.by_length {
            let mut windows: BTreeMap<Duration, Vec<&str>> = BTreeMap::new();
            for class in &self.classes {
                let day = class.tiers.iter().find(|tier| tier.tier == BurnTier::Day);
                for window in day.into_iter().flat_map(|tier| [tier.long, tier.short]).chain([HOUR]) {
                    let classes = windows.entry(window).or_default();
                    if !classes.contains(&class.name()) {
                        classes.push(class.name());
                    }
                }
            }
            for (window, classes) in windows {
                rules.extend(self.window(SeriesLevel::ClassAndLength, window, &classes));
            }
        }
        for class in &self.classes {
            rules.extend(class.tiers.iter().filter(|tier| tier.long > DIRECT).map(|tier| self.burn(class, tier)));
            rules.extend(self.length_burn(class));
            if class.tiers.is_empty() {
                rules.push(self.any_miss(class));
            }
        }
        rules
    }

    /// The conditions of a tier: over both windows, with enough requests, of a class that is not new.
    fn crossed(&self, level: SeriesLevel, class: &ClassAlerts<'_>, tier: &BurnAlert, own: &[Matcher<'_>]) -> String {
        let matchers: Vec<Matcher<'_>> =
            [Matcher::Is("class", class.name())].into_iter().chain(own.iter().copied()).collect();
        let by: &[&str] = if level == SeriesLevel::Class { &["class"] } else { &["class", "length"] };
        let (on, prefix) = (self.labels(by), level.prefix());
        let of = |series: &str| self.of(&format!("{prefix}:{series}"), &matchers);
        let (long, short) = (self.time(tier.long), self.time(tier.short));
        let limit = number(tier.miss_ratio);
        let seen = tier.seen_before();
        let before = (tier.long.saturating_sub(seen)).max(SEEN_WITHIN);
        let range = format!("[{}] offset {}", self.time(before), self.time(seen));
        let seen = if tier.long <= DIRECT {
            let series = self.of("slo_total", &matchers);
            format!("count by ({on}) (count_over_time({series}{range}))")
        } else {
            let series = of(&format!("slo_judged:rate{}", self.time(BASE_RATE)));
            format!("count_over_time({series}{range})")
        };
        let ratio = |window: &str| of(&format!("slo_missed_per_judged:ratio{window}"));
        let judged = of(&format!("slo_judged:increase{long}"));
        [
            format!("{} > {limit}", ratio(&long)),
            format!("and on ({on}) {} > {limit}", ratio(&short)),
            format!("and on ({on}) {judged} >= {}", tier.min_requests),
            format!("and on ({on}) {seen}"),
        ]
        .join("\n")
    }

    fn burn(&self, class: &ClassAlerts<'_>, tier: &BurnAlert) -> PrometheusRule {
        let expr = self.crossed(SeriesLevel::Class, class, tier, &[]);
        let (name, long) = (class.name(), self.time(tier.long));
        let gone = duration(in_hours(class.slo.window.div_f64(tier.burn)));
        let what = match tier.severity {
            Severity::Page => "find the sick engine or pool, then shed load",
            _ => "find what costs the budget before it is gone",
        };
        self.alert("GoodputErrorBudgetBurn", tier.severity, expr)
            .of_class(name)
            .label("tier", tier.tier.as_str())
            .label("window", &long)
            .summary(format!(
                "{name}: more than {} of the requests of the last {long} missed ({}); {what}",
                percent(tier.miss_ratio),
                class.promise()
            ))
            .description(format!(
                "Missed over {long}: {{{{ $value | humanizePercentage }}}}. The budget is {} of the requests; at the threshold it is used {} times as fast as promised and gone within {gone}.",
                percent(class.budget),
                number((tier.burn * 100.0).round() / 100.0)
            ))
            .build()
    }

    /// Prompt lengths cause tickets only, because a page for the class covers them and a second page for one
    /// cause is noise.
    fn length_burn(&self, class: &ClassAlerts<'_>) -> Option<PrometheusRule> {
        let tier = class.tiers.iter().find(|tier| tier.tier == BurnTier::Day).filter(|_| self.policy.by_length)?;
        let (name, long) = (class.name(), self.time(tier.long));
        let (limit, on) = (number(tier.miss_ratio), self.labels(&["class"]));
        let of_class = self.of_class(&format!("class:slo_missed_per_judged:ratio{long}"), name);
        let crossed = self.crossed(SeriesLevel::ClassAndLength, class, tier, &[Matcher::Not("length", "unknown")]);
        let expr = format!("{crossed}\nunless on ({on}) {of_class} > {limit}");
        let alert = self.alert("GoodputLengthBudgetBurn", Severity::Ticket, expr).of_class(name).label("window", &long);
        Some(
            alert
                .summary(format!(
                    "{name}: more than {} of its {{{{ $labels.length }}}} prompts of the last {long} missed, while the class as a whole is within its limits ({}); give these prompts a class or a pool of their own",
                    percent(tier.miss_ratio),
                    class.promise()
                ))
                .description(format!("Missed over {long}: {{{{ $value | humanizePercentage }}}}."))
                .build(),
        )
    }

    /// For a class with a target of 1: without a budget, every miss deserves a ticket.
    fn any_miss(&self, class: &ClassAlerts<'_>) -> PrometheusRule {
        let range = self.time(HOUR);
        let missed = self.of_class(&format!("class:slo_missed:increase{range}"), class.name());
        self.alert("GoodputMissWithoutBudget", Severity::Ticket, format!("{missed} > 0"))
            .of_class(class.name())
            .summary(format!(
                "{}: requests missed within the last {range}, and the class promises every one ({}); set a target below 100 % to get burn rates and pages",
                class.name(),
                class.promise()
            ))
            .description("Missed within the hour: {{ $value | humanize }}.")
            .build()
    }

    /// Remaining budget of each class: a ratio of sums over its own window.
    fn budget(&self) -> Vec<PrometheusRule> {
        let mut windows: BTreeMap<Duration, Vec<&str>> = BTreeMap::new();
        for class in self.classes.iter().filter(|class| class.budget > 0.0) {
            windows.entry(class.slo.window).or_default().push(class.name());
        }
        let rule = |(window, classes): (Duration, Vec<&str>)| {
            let any = [Matcher::AnyOf("class", &classes)];
            let (range, rate) = (self.time(window), self.time(BASE_RATE));
            let summed = |series: &str| {
                format!("sum_over_time({}[{range}])", self.of(&format!("class:{series}:rate{rate}"), &any))
            };
            let (missed, judged) = (summed("slo_missed"), summed("slo_judged"));
            let budget = self.of("class:slo_budget:ratio", &any);
            let on = self.labels(&["class"]);
            PrometheusRule::Recording(RecordingRule {
                record: "class:slo_budget_remaining:ratio".to_owned(),
                expr: format!("1 - ({missed} / ({judged} > 0)) / on ({on}) {budget}"),
                labels: BTreeMap::from([("window".to_owned(), range)]),
            })
        };
        windows.into_iter().map(rule).collect()
    }

    // ---- early warnings ----------------------------------------------------------------------

    fn early_warning(&self) -> Vec<PrometheusRule> {
        let any = [Matcher::AnyOf("class", &self.names)];
        let overdue = self.sum(&["class"], &self.of("goodput_overdue", &any));
        let range = self.time(DISPATCH_RATE);
        let depth = self.sum(&["class"], &self.of("goodput_queue_depth", &any));
        let dispatched =
            self.sum(&["class"], &format!("rate({}[{range}])", self.of("goodput_queue_seconds_count", &any)));
        let on = self.labels(&["class"]);
        let mut rules = vec![
            self.record("class:requests_overdue:sum", overdue),
            self.record("class:queue_wait_seconds:expected", format!("{depth} / on ({on}) {dispatched}")),
        ];
        for class in &self.classes {
            rules.push(self.overdue(class));
            rules.extend(self.queue_wait(class));
        }
        rules.extend(self.engine_waits());
        rules
    }

    /// Requests in flight that are broken already count as misses: a pool that hangs ends none.
    fn overdue(&self, class: &ClassAlerts<'_>) -> PrometheusRule {
        let (name, range) = (class.name(), self.time(OVERDUE_WINDOW));
        let limit = class.budget + OVERDUE_REACH * (1.0 - class.budget);
        let least = min_requests(class.budget, limit).max(OVERDUE_LEAST);
        let on = self.labels(&["class"]);
        let overdue = self.of_class("class:requests_overdue:sum", name);
        let ended = |series: &str| self.of_class(&format!("class:{series}:increase{range}"), name);
        let with = |ended: &str| format!("({ended} + on ({on}) {overdue})");
        let (missed, judged) = (with(&ended("slo_missed")), with(&ended("slo_judged")));
        let expr = format!("{missed} / on ({on}) {judged} > {}\nand on ({on}) {overdue} >= {least}", number(limit));
        self.alert("GoodputOverdue", Severity::Page, expr)
            .of_class(name)
            .hold(OVERDUE_FOR)
            .summary(format!(
                "{name}: most requests in flight have broken their promise and have not ended ({}); drain or restart the engines that hang",
                class.promise()
            ))
            .description(format!(
                "Of the requests that ended within {range} or are overdue, {{{{ $value | humanizePercentage }}}} miss."
            ))
            .build()
    }

    fn queue_wait(&self, class: &ClassAlerts<'_>) -> Option<PrometheusRule> {
        let limit = class.slo.wait_limit?;
        let (name, seconds) = (class.name(), number(limit.as_secs_f64()));
        let wait = self.of_class("class:queue_wait_seconds:expected", name);
        let alert = self.alert("GoodputQueueWait", Severity::Info, format!("{wait} > {seconds}"));
        let alert = alert.of_class(name).hold(MINUTE).summary(format!(
            "{name}: who comes now waits longer than {seconds} s for a seat, half of what the promise allows ({}); add engines or shed load before it is broken",
            class.promise()
        ));
        Some(
            alert
                .description("Requests that wait by requests dispatched a second: {{ $value | humanizeDuration }}.")
                .build(),
        )
    }

    /// The same for queues inside the engines of each pool, by the strictest class that it serves.
    fn engine_waits(&self) -> Vec<PrometheusRule> {
        let mut pools: BTreeMap<&str, Duration> = BTreeMap::new();
        for slo in &self.policy.classes {
            for (pool, limit) in slo.pools.iter().filter_map(|pool| Some((pool, slo.wait_limit?))) {
                let strictest = pools.entry(pool.as_str()).or_insert(limit);
                *strictest = limit.min(*strictest);
            }
        }
        let range = self.time(DISPATCH_RATE);
        let rule = |(pool, limit): (&str, Duration)| {
            let seconds = number(limit.as_secs_f64());
            // Every gateway reports the same engines, so the highest report of each counts, not their sum.
            let each = format!(
                "max by ({}) ({})",
                self.labels(&["pool", "engine"]),
                self.of("goodput_engine_waiting", &[Matcher::Is("pool", pool)])
            );
            let dispatched = self.of("goodput_queue_seconds_count", &[Matcher::Is("pool", pool)]);
            let dispatched = self.sum(&["pool"], &format!("rate({dispatched}[{range}])"));
            let waiting = self.sum(&["pool"], &each);
            let on = self.labels(&["pool"]);
            let alert = self.alert(
                "GoodputEngineQueueWait",
                Severity::Info,
                format!("{waiting} / on ({on}) {dispatched} > {seconds}"),
            );
            alert
                .label("pool", pool)
                .hold(MINUTE)
                .summary(format!(
                    "pool {pool}: requests wait inside its engines for longer than {seconds} s, half of what the strictest class that it serves allows; lower max_concurrency_per_engine or add engines"
                ))
                .description("Requests that wait in the engines by requests dispatched a second: {{ $value | humanizeDuration }}.")
                .build()
        };
        if self.policy.by_pool { pools.into_iter().map(rule).collect() } else { Vec::new() }
    }

    // ---- companions --------------------------------------------------------------------------

    /// Effects that make attainment look better than it is, or that use the budget without latency.
    fn companions(&self) -> Vec<PrometheusRule> {
        let any = [Matcher::AnyOf("class", &self.names)];
        let range = self.time(HOUR);
        let increase = |by: &[&str], metric: &str, own: &[Matcher<'_>]| {
            let matchers: Vec<Matcher<'_>> = any.iter().chain(own).copied().collect();
            self.sum(by, &format!("increase({}[{range}])", self.of(metric, &matchers)))
        };
        let on = self.labels(&["class"]);
        let finished = self.of(&format!("class:requests_finished:increase{range}"), &any);
        let judged = self.of(&format!("class:slo_judged:increase{range}"), &any);
        let excluded = increase(&["class", "reason"], "goodput_slo_excluded_total", &[]);
        let shed = increase(&["class"], "goodput_slo_missed_total", &[Matcher::Is("reason", "shed")]);
        let truncated = increase(&["class"], "goodput_truncated_answers_total", &[]);
        let mut rules = vec![
            self.record(
                format!("class:requests_finished:increase{range}"),
                increase(&["class"], "goodput_requests_finished_total", &[]),
            ),
            self.record(format!("class:requests_shed:increase{range}"), shed),
            self.record(
                format!("class:truncated_per_judged:ratio{range}"),
                format!("{truncated} / on ({on}) ({judged} > 0)"),
            ),
            self.record(
                format!("class_reason:excluded_per_finished:ratio{range}"),
                format!("{excluded} / on ({on}) group_left () ({finished} > 0)"),
            ),
        ];
        for class in &self.classes {
            rules.push(self.shed(class));
            rules.push(self.truncated(class));
            rules.push(self.excluded(class));
        }
        if self.classes.iter().any(|class| class.slo.assumes_workload) {
            let assuming: Vec<&str> =
                self.classes.iter().filter(|class| class.slo.assumes_workload).map(ClassAlerts::name).collect();
            let drift = self.of("goodput_workload_drift", &[Matcher::AnyOf("class", &assuming)]);
            let by = self.labels(&["class", "direction", "percentile"]);
            rules.push(self.record("class:workload_drift:avg", format!("avg by ({by}) ({drift})")));
            rules.extend(self.classes.iter().filter(|class| class.slo.assumes_workload).map(|class| self.drift(class)));
        }
        rules
    }

    fn shed(&self, class: &ClassAlerts<'_>) -> PrometheusRule {
        let (name, range) = (class.name(), self.time(HOUR));
        let on = self.labels(&["class"]);
        let shed = self.of_class(&format!("class:requests_shed:increase{range}"), name);
        let judged = self.of_class(&format!("class:slo_judged:increase{range}"), name);
        let half = number(class.budget / 2.0);
        let expr = format!("{shed} / on ({on}) {judged} > {half}\nand on ({on}) {shed} >= {SHED_LEAST}");
        self.alert("GoodputShed", Severity::Ticket, expr)
            .of_class(name)
            .summary(format!(
                "{name}: shedding alone used more than half of the budget within {range} ({}); more is asked for than the pools take: add engines, or spill to another pool",
                class.promise()
            ))
            .description("Shed, as a share of the judged requests: {{ $value | humanizePercentage }}.")
            .build()
    }

    /// A share that grew: above a tenth, and twice that of a day before.
    fn grew(&self, share: &str, of_enough: &str, by: &str) -> String {
        let day = self.time(24 * HOUR);
        let limit = number(COMPANION_SHARE);
        format!(
            "{share} > {limit}\nand {share} > 2 * ({share} offset {day})\nand on ({by}) {of_enough} >= {COMPANION_LEAST}"
        )
    }

    fn truncated(&self, class: &ClassAlerts<'_>) -> PrometheusRule {
        let (name, range, on) = (class.name(), self.time(HOUR), self.labels(&["class"]));
        let share = self.of_class(&format!("class:truncated_per_judged:ratio{range}"), name);
        let judged = self.of_class(&format!("class:slo_judged:increase{range}"), name);
        self.alert("GoodputTruncated", Severity::Ticket, self.grew(&share, &judged, &on))
            .of_class(name)
            .summary(format!(
                "{name}: twice as many answers as a day ago are cut by their output cap; a shorter answer keeps its promise more easily ({}): look at overload levels and at clients' max_tokens",
                class.promise()
            ))
            .description("Cut answers, as a share of the judged requests: {{ $value | humanizePercentage }}.")
            .build()
    }

    fn excluded(&self, class: &ClassAlerts<'_>) -> PrometheusRule {
        let (name, range, on) = (class.name(), self.time(HOUR), self.labels(&["class"]));
        let share = self.of_class(&format!("class_reason:excluded_per_finished:ratio{range}"), name);
        let finished = self.of_class(&format!("class:requests_finished:increase{range}"), name);
        self.alert("GoodputExcluded", Severity::Ticket, self.grew(&share, &finished, &on))
            .of_class(name)
            .summary(format!(
                "{name}: twice as many requests as a day ago are left out of the judgement ({{{{ $labels.reason }}}}); what is not judged cannot miss ({}): look at limits, keys and clients",
                class.promise()
            ))
            .description("Excluded for this reason, as a share of all that finished: {{ $value | humanizePercentage }}.")
            .build()
    }

    fn drift(&self, class: &ClassAlerts<'_>) -> PrometheusRule {
        let drift = self.of_class("class:workload_drift:avg", class.name());
        let (above, below) = (number(DRIFT_FACTOR), number(1.0 / DRIFT_FACTOR));
        self.alert("GoodputWorkloadDrift", Severity::Ticket, format!("{drift} > {above} or {drift} < {below}"))
            .of_class(class.name())
            .hold(HOUR / 2)
            .summary(format!(
                "{}: {{{{ $labels.direction }}}} tokens ({{{{ $labels.percentile }}}}) are off the workload that the class assumes by more than a factor of {above}; run the sweep again (goodput sweep) and correct workload_assumption",
                class.name()
            ))
            .description("Observed by assumed: {{ $value | humanize }}. What was found out about capacity no longer holds.")
            .build()
    }

    // ---- health ------------------------------------------------------------------------------

    fn health(&self) -> Vec<PrometheusRule> {
        let any = [Matcher::AnyOf("class", &self.names)];
        let nothing = format!("absent({})", self.of("slo_total", &any));
        let mut rules = vec![
            self.alert("GoodputAbsent", Severity::Page, nothing.clone())
                .hold(5 * MINUTE)
                .summary("no gateway is scraped: whether any promise is kept is unknown; look at the gateways, then at Prometheus' targets")
                .description("There is no slo_total of any class.")
                .build(),
        ];
        if self.classes.len() > 1 {
            let one = |class: &ClassAlerts<'_>| {
                let absent = format!("absent({}) unless on () {nothing}", self.of_class("slo_total", class.name()));
                self.alert("GoodputClassAbsent", Severity::Ticket, absent)
                    .of_class(class.name())
                    .hold(15 * MINUTE)
                    .summary(format!(
                        "{}: no gateway knows this class, others are there; roll the settings out everywhere, or write the rules anew",
                        class.name()
                    ))
                    .description("There is no slo_total of this class.")
                    .build()
            };
            rules.extend(self.classes.iter().map(one));
        }
        rules.push(self.reload_failed());
        rules.extend(self.replicas_missing());
        rules.push(self.engines_down());
        rules.extend(self.limits_store_down());
        rules.push(self.drill());
        rules
    }

    fn counted(&self, inner: &str) -> String {
        let by = self.labels(&[]);
        if by.is_empty() { format!("count({inner})") } else { format!("count by ({by}) ({inner})") }
    }

    fn reload_failed(&self) -> PrometheusRule {
        let failed = format!("{} == 0", self.of("goodput_config_last_reload_successful", &[]));
        self.alert("GoodputConfigReloadFailed", Severity::Ticket, format!("{} > 0", self.counted(&failed)))
            .hold(5 * MINUTE)
            .summary("a gateway runs with old settings, because the new ones have a problem; correct the file (goodput check -c FILE says where)")
            .description("Gateways whose last reload failed: {{ $value }}.")
            .build()
    }

    fn replicas_missing(&self) -> Option<PrometheusRule> {
        let replicas = self.policy.replicas;
        let there = self.counted(&self.of("goodput_build_info", &[]));
        let alert = self.alert("GoodputReplicasMissing", Severity::Ticket, format!("{there} < {replicas}"));
        let alert = alert
            .hold(10 * MINUTE)
            .summary(format!(
                "fewer gateways are scraped than the {replicas} of the settings (replicas); start the others, or correct the number: limits and seats are shared out by it"
            ))
            .description("Gateways that are scraped: {{ $value }}.")
            .build();
        (replicas > 1).then_some(alert)
    }

    fn engines_down(&self) -> PrometheusRule {
        let (by, both) = (self.labels(&["pool"]), self.labels(&["pool", "engine"]));
        // An engine is up if one gateway reaches it.
        let up = format!("max by ({both}) ({})", self.of("goodput_engine_up", &[]));
        let expr = format!("count by ({by}) ({up} == 0) / count by ({by}) ({up}) > {}", number(ENGINES_DOWN));
        self.alert("GoodputEnginesDown", Severity::Ticket, expr)
            .hold(10 * MINUTE)
            .summary("pool {{ $labels.pool }}: more than a quarter of its engines take no requests; what is left may not carry the next peak: restart or replace them")
            .description("Engines that are down: {{ $value | humanizePercentage }}.")
            .build()
    }

    fn limits_store_down(&self) -> Option<PrometheusRule> {
        let down = format!("{} == 0", self.of("goodput_limits_store_up", &[]));
        let alert = self.alert("GoodputLimitsStoreDown", Severity::Ticket, format!("{} > 0", self.counted(&down)));
        let alert = alert
            .hold(MINUTE)
            .summary("the store of the tenants' shared limits does not answer: each gateway counts alone, or refuses; bring it back (goodput_limits_store_calls_total says how it fails)")
            .description("Gateways that have given it up: {{ $value }}.")
            .build();
        self.policy.shared_limits.then_some(alert)
    }

    /// The one alert that the class `drill` has: whether a page arrives at all.
    fn drill(&self) -> PrometheusRule {
        let range = self.time(5 * MINUTE);
        let increase = |metric: &str| {
            let inner = format!("increase({}[{range}])", self.of_class(metric, "drill"));
            self.sum(&["class"], &inner)
        };
        let (judged, met) = (increase("slo_total"), increase("slo_met_total"));
        let expr = format!("{judged} - ({met} or 0 * {judged}) > 0");
        self.alert("GoodputDrill", Severity::Page, expr)
            .of_class("drill")
            .summary("this is a drill: somebody called goodput drill to see whether a page arrives; nothing is wrong")
            .description("Misses that the drill invented within {{ $labels.window }}: {{ $value | humanize }}.")
            .label("window", &range)
            .build()
    }
}

/// The least range in which a class must have been seen.
const SEEN_WITHIN: Duration = Duration::from_secs(2 * 60);

/// To whole hours from two on.
fn in_hours(length: Duration) -> Duration {
    let step = if length >= 2 * HOUR { HOUR } else { MINUTE };
    Duration::from_secs((length.as_secs() / step.as_secs()).max(1) * step.as_secs())
}

/// `GoodputErrorBudgetBurn`: `error-budget-burn`.
fn in_kebab_case(name: &str) -> String {
    let bare = name.strip_prefix("Goodput").unwrap_or(name);
    let mut text = String::new();
    for c in bare.chars() {
        if c.is_ascii_uppercase() && !text.is_empty() {
            text.push('-');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}

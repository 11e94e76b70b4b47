//! promtool tests of the rules: what fires on a bad hour, and what must not fire.
//!
//! The tests drive all classes at once, over synthetic counters of [`RATE`] requests a minute, and look at
//! the series `ALERTS` that Prometheus itself makes of the rules.

use std::time::Duration;

use serde::Serialize;

use super::binomial::min_requests;
use super::promql::{duration, number};
use super::rules::BASE_EVERY;
use super::tiers::{BurnAlert, burn_alerts};
use super::{AlertPolicy, ClassSlo, Severity, rule_set};
use crate::record::length_drift::DRIFT_FACTOR;

/// Requests a minute of each class.
const RATE: f64 = 1000.0;
/// The step of the series. The rules are evaluated as often as the slowest of them: the sums over days count on it.
const STEP: Duration = Duration::from_secs(60);

const HOUR: u64 = 60;
const DAY: u64 = 24 * HOUR;

/// A file of promtool tests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PromtoolTests {
    rule_files: Vec<String>,
    evaluation_interval: String,
    group_eval_order: Vec<String>,
    tests: Vec<PromtoolTest>,
}

/// One story.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct PromtoolTest {
    name: String,
    interval: String,
    input_series: Vec<InputSeries>,
    promql_expr_test: Vec<ExprTest>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct InputSeries {
    series: String,
    values: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct ExprTest {
    expr: String,
    eval_time: String,
    exp_samples: Vec<ExprSample>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct ExprSample {
    labels: String,
    value: f64,
}

/// The tests of the rules that stand in this file.
///
/// They are for rules with windows of their full length: `options.faster` is 1.
#[must_use]
pub fn unit_tests(policy: &AlertPolicy, rule_file: &str) -> PromtoolTests {
    let stories = Stories { policy, matchers: &policy.options.matchers };
    let tests = [
        stories.bad_hour(),
        stories.good_week(),
        stories.new_class(),
        stories.roll_out(),
        stories.counter_resets(),
        stories.met_is_absent(),
        stories.low_traffic(),
        stories.nothing_is_scraped(),
        stories.a_pool_hangs(),
        stories.a_queue_grows(),
        stories.engines_queue(),
        stories.companions(),
        stories.drift(),
        stories.health(),
        stories.drill(),
        stories.lengths(),
    ];
    PromtoolTests {
        rule_files: vec![rule_file.to_owned()],
        evaluation_interval: duration(BASE_EVERY),
        group_eval_order: rule_set(policy).groups.into_iter().map(|group| group.name).collect(),
        tests: tests.into_iter().flatten().collect(),
    }
}

/// A counter as promtool writes it: stretches of so many steps with the same growth.
struct CounterValues {
    value: f64,
    text: String,
}

impl CounterValues {
    fn new() -> Self {
        CounterValues { value: 0.0, text: String::new() }
    }

    /// The next `steps` minutes, each with `growth`.
    fn grow(mut self, growth: f64, steps: u64) -> Self {
        if steps > 0 {
            let first = number(self.value);
            self.push(&format!("{first}+{}x{}", number(growth), steps - 1));
            self.value += growth * steps as f64;
        }
        self
    }

    /// The process restarts: the counter begins anew.
    fn reset(mut self) -> Self {
        self.value = 0.0;
        self
    }

    /// The series is not there for so many steps.
    fn absent(mut self, steps: u64) -> Self {
        if steps > 0 {
            self.push(&format!("_x{steps}"));
        }
        self
    }

    fn push(&mut self, stretch: &str) {
        if !self.text.is_empty() {
            self.text.push(' ');
        }
        self.text.push_str(stretch);
    }
}

/// What a class's counters do, in stretches of minutes.
#[derive(Clone, Copy)]
enum TrafficPhase {
    /// So many of its requests miss.
    Missing(f64, u64),
    /// Few requests come, and all of them miss: so many a minute.
    Sparse(f64, u64),
    /// No requests come.
    Idle(u64),
    /// Its counters begin anew.
    Reset,
    /// It is not there.
    Absent(u64),
}

/// The minute at or after this one at which rules are evaluated.
fn evaluated(minute: u64) -> u64 {
    let every = BASE_EVERY.as_secs() / 60;
    minute.div_ceil(every) * every
}

struct Stories<'a> {
    policy: &'a AlertPolicy,
    matchers: &'a [(String, String)],
}

impl Stories<'_> {
    // ---- pieces ------------------------------------------------------------------------------

    fn labels(&self, own: &[(&str, &str)]) -> String {
        let own = own.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let all: Vec<String> = own
            .chain(self.matchers.iter().cloned())
            .map(|(name, value)| format!("{name}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"")))
            .collect();
        all.join(",")
    }

    fn series(&self, metric: &str, labels: &[(&str, &str)], values: impl Into<String>) -> InputSeries {
        InputSeries { series: format!("{metric}{{{}}}", self.labels(labels)), values: values.into() }
    }

    /// The pair of counters of a class on one gateway.
    fn pair(&self, class: &str, instance: &str, length: &str, phases: &[TrafficPhase]) -> [InputSeries; 2] {
        let (mut judged, mut met) = (CounterValues::new(), CounterValues::new());
        for phase in phases {
            (judged, met) = match *phase {
                TrafficPhase::Missing(share, steps) => {
                    (judged.grow(RATE, steps), met.grow(RATE * (1.0 - share), steps))
                }
                TrafficPhase::Sparse(growth, steps) => (judged.grow(growth, steps), met.grow(0.0, steps)),
                TrafficPhase::Idle(steps) => (judged.grow(0.0, steps), met.grow(0.0, steps)),
                TrafficPhase::Reset => (judged.reset(), met.reset()),
                TrafficPhase::Absent(steps) => (judged.absent(steps), met.absent(steps)),
            };
        }
        let labels = [("class", class), ("length", length), ("pool", "p"), ("model", "m"), ("instance", instance)];
        [self.series("slo_total", &labels, judged.text), self.series("slo_met_total", &labels, met.text)]
    }

    /// All classes on one gateway, each as `phases` says.
    fn all(&self, phases: impl Fn(&ClassSlo) -> Vec<TrafficPhase>) -> Vec<InputSeries> {
        let classes = self.policy.classes.iter();
        classes.flat_map(|slo| self.pair(slo.class.as_str(), "a:9090", "short", &phases(slo))).collect()
    }

    fn tiers(&self, slo: &ClassSlo) -> Vec<BurnAlert> {
        burn_alerts(slo.budget(), slo.window)
    }

    fn story(&self, name: &str, input_series: Vec<InputSeries>, promql_expr_test: Vec<ExprTest>) -> PromtoolTest {
        PromtoolTest { name: name.to_owned(), interval: duration(STEP), input_series, promql_expr_test }
    }

    /// How many alerts fire at a minute, of those with these labels.
    fn firing(&self, minute: u64, matchers: &str, expected: u64) -> ExprTest {
        let comma = if matchers.is_empty() { "" } else { "," };
        let expr = format!("count(ALERTS{{alertstate=\"firing\"{comma}{matchers}}}) or vector(0)");
        let sample = ExprSample { labels: "{}".to_owned(), value: expected as f64 };
        ExprTest { expr, eval_time: format!("{}m", evaluated(minute)), exp_samples: vec![sample] }
    }

    /// That at least one does.
    fn fires(&self, minute: u64, matchers: &str) -> ExprTest {
        let expr = format!("count(ALERTS{{alertstate=\"firing\",{matchers}}}) > bool 0");
        let sample = ExprSample { labels: "{}".to_owned(), value: 1.0 };
        ExprTest { expr, eval_time: format!("{}m", evaluated(minute)), exp_samples: vec![sample] }
    }

    /// That none has fired in all the time before.
    fn never_fired(&self, minutes: u64, matchers: &str) -> ExprTest {
        let comma = if matchers.is_empty() { "" } else { "," };
        let expr = format!("count(count_over_time(ALERTS{{alertstate=\"firing\"{comma}{matchers}}}[{minutes}m]))");
        ExprTest { expr, eval_time: format!("{minutes}m"), exp_samples: Vec::new() }
    }

    fn pages_of(&self, class: &str) -> String {
        format!("alertname=\"GoodputErrorBudgetBurn\",severity=\"page\",class=\"{class}\"")
    }

    // ---- stories -----------------------------------------------------------------------------

    /// Two good hours, an hour in which everything misses, then good again.
    fn bad_hour(&self) -> Option<PromtoolTest> {
        let (begins, ends, over) = (2 * HOUR, 3 * HOUR, 5 * HOUR);
        let input = self.all(|_| {
            vec![
                TrafficPhase::Missing(0.0, begins),
                TrafficPhase::Missing(1.0, HOUR),
                TrafficPhase::Missing(0.0, over - ends + 1),
            ]
        });
        let mut checks = Vec::new();
        for slo in self.with_budget() {
            let pages = self.pages_of(slo.class.as_str());
            let first = self.tiers(slo).iter().filter_map(|tier| tier.time_to_fire(1.0)).min().unwrap_or_default();
            let first = first.as_secs() / 60;
            checks.push(self.firing(begins, &pages, 0));
            checks.push(self.fires(evaluated(begins + first + 2), &pages));
            // Its short window clears each of them, however much of the long one was bad.
            for tier in self.tiers(slo).iter().filter(|tier| tier.severity == Severity::Page) {
                let clears = evaluated(ends + tier.short.as_secs() / 60 + 3);
                checks.push(self.firing(clears, &format!("{pages},tier=\"{}\"", tier.tier.as_str()), 0));
            }
        }
        (!checks.is_empty()).then(|| self.story("a bad hour pages, and a recovery clears it", input, checks))
    }

    /// A week in which each class misses exactly what it may.
    fn good_week(&self) -> Option<PromtoolTest> {
        let input = self.all(|slo| vec![TrafficPhase::Missing(slo.budget(), 7 * DAY + 1)]);
        let checks = vec![self.never_fired(7 * DAY, "")];
        Some(self.story("a week that keeps its promise exactly makes no alert", input, checks))
    }

    /// A class that is new, and whose first minutes miss: its ranges are only as long as it is old.
    fn new_class(&self) -> Option<PromtoolTest> {
        let input = self.all(|_| vec![TrafficPhase::Missing(1.0, 7), TrafficPhase::Missing(0.0, 2 * HOUR)]);
        let late = |tier: &BurnAlert| tier.seen_before() >= Duration::from_secs(8 * 60);
        let mut checks = Vec::new();
        for slo in self.with_budget() {
            for tier in self.tiers(slo).iter().filter(|tier| late(tier)) {
                let of = format!(
                    "alertname=\"GoodputErrorBudgetBurn\",class=\"{}\",tier=\"{}\"",
                    slo.class,
                    tier.tier.as_str()
                );
                checks.push(self.firing(4, &of, 0));
                checks.push(self.firing(8, &of, 0));
            }
        }
        (!checks.is_empty()).then(|| self.story("the first misses of a new class do not page", input, checks))
    }

    /// Two gateways are replaced by two others, whose first requests miss.
    fn roll_out(&self) -> Option<PromtoolTest> {
        let at = 2 * HOUR;
        let mut input = Vec::new();
        for slo in &self.policy.classes {
            let lowest = self.tiers(slo).iter().map(|tier| tier.miss_ratio).fold(1.0, f64::min);
            // So few that their share stays below every threshold even of the time since the story began.
            let share = if slo.budget() > 0.0 { (lowest * at as f64 / 2.0).min(1.0) } else { 0.0 };
            let (old, new) = (
                [TrafficPhase::Missing(0.0, at)],
                [TrafficPhase::Absent(at), TrafficPhase::Missing(share, 2), TrafficPhase::Missing(0.0, HOUR)],
            );
            for (instance, phases) in [("a:9090", &old[..]), ("b:9090", &old), ("c:9090", &new), ("d:9090", &new)] {
                input.extend(self.pair(slo.class.as_str(), instance, "short", phases));
            }
        }
        let checks = vec![self.never_fired(at + HOUR, "severity=~\"page|ticket\"")];
        Some(self.story("short series after a roll-out do not page", input, checks))
    }

    /// Restarts in good times make nothing, and in bad ones they hide nothing.
    fn counter_resets(&self) -> Option<PromtoolTest> {
        let good = self.all(|_| {
            vec![
                TrafficPhase::Missing(0.0, HOUR),
                TrafficPhase::Reset,
                TrafficPhase::Missing(0.0, 7),
                TrafficPhase::Reset,
                TrafficPhase::Missing(0.0, HOUR),
            ]
        });
        let bad = |instance: &str, class: &str| {
            let phases = [
                TrafficPhase::Missing(0.0, 2 * HOUR),
                TrafficPhase::Missing(1.0, 20),
                TrafficPhase::Reset,
                TrafficPhase::Missing(1.0, 20),
            ];
            self.pair(class, instance, "short", &phases)
        };
        let Some(slo) = self.with_budget().next() else {
            return Some(self.story("counters that reset make no alert", good, vec![self.never_fired(2 * HOUR, "")]));
        };
        let mut input = bad("a:9090", slo.class.as_str()).to_vec();
        for other in self.policy.classes.iter().filter(|other| other.class != slo.class) {
            let calm = [TrafficPhase::Missing(0.0, HOUR), TrafficPhase::Reset, TrafficPhase::Missing(0.0, 2 * HOUR)];
            input.extend(self.pair(other.class.as_str(), "a:9090", "short", &calm));
        }
        let mut checks = vec![self.fires(2 * HOUR + 35, &self.pages_of(slo.class.as_str()))];
        let others = self.policy.classes.iter().filter(|other| other.class != slo.class);
        checks.extend(others.map(|other| self.firing(2 * HOUR + 35, &format!("class=\"{}\"", other.class), 0)));
        Some(self.story("counters that reset make no alert and hide none", input, checks))
    }

    /// Nothing was ever met, so that there may be no series of it.
    fn met_is_absent(&self) -> Option<PromtoolTest> {
        let slo = self.with_budget().next()?;
        let mut input = self.all(|other| {
            let share = if other.class == slo.class { 1.0 } else { 0.0 };
            vec![TrafficPhase::Missing(share, 2 * HOUR)]
        });
        input.retain(|series| {
            let of_class = series.series.contains(&format!("class=\"{}\"", slo.class));
            !(of_class && series.series.starts_with("slo_met_total"))
        });
        let checks = vec![self.fires(HOUR, &self.pages_of(slo.class.as_str()))];
        Some(self.story("slo_met_total may be absent while everything misses", input, checks))
    }

    /// A handful of misses among a handful of requests.
    fn low_traffic(&self) -> Option<PromtoolTest> {
        let needs = |slo: &ClassSlo| self.tiers(slo).iter().map(|tier| tier.min_requests).min().unwrap_or(2);
        let input = self.all(|slo| {
            let few = needs(slo).saturating_sub(1).min(3) as f64;
            vec![TrafficPhase::Idle(2 * HOUR), TrafficPhase::Sparse(few, 1), TrafficPhase::Idle(HOUR)]
        });
        let checks = vec![self.never_fired(3 * HOUR, "alertname=\"GoodputErrorBudgetBurn\"")];
        Some(self.story("a few requests that all miss do not page", input, checks))
    }

    fn nothing_is_scraped(&self) -> Option<PromtoolTest> {
        let checks = vec![
            self.firing(0, "alertname=\"GoodputAbsent\"", 0),
            self.firing(10, "alertname=\"GoodputAbsent\",severity=\"page\"", 1),
            self.firing(30, "alertname=\"GoodputClassAbsent\"", 0),
        ];
        let elsewhere = self.series("goodput_build_info", &[("instance", "a:9090")], "1x40");
        Some(self.story("no data at all pages once", vec![elsewhere], checks))
    }

    /// Requests pile up that are broken already, and nothing ends.
    fn a_pool_hangs(&self) -> Option<PromtoolTest> {
        let at = HOUR;
        let mut input = self.all(|_| vec![TrafficPhase::Missing(0.0, at), TrafficPhase::Idle(HOUR)]);
        let mut checks = Vec::new();
        for slo in &self.policy.classes {
            let (class, gauge) = (slo.class.as_str(), format!("0x{} {RATE}+{RATE}x20 0x{HOUR}", at - 1));
            input.push(self.series("goodput_overdue", &[("class", class), ("instance", "a:9090")], gauge));
            let of = format!("alertname=\"GoodputOverdue\",severity=\"page\",class=\"{class}\"");
            checks.push(self.firing(at, &of, 0));
            checks.push(self.firing(at + 10, &of, 1));
            checks.push(self.firing(at + 30, &of, 0));
        }
        Some(self.story("requests that are overdue page before they end", input, checks))
    }

    fn a_queue_grows(&self) -> Option<PromtoolTest> {
        let (at, mut checks) = (HOUR, Vec::new());
        let mut input = self.all(|_| vec![TrafficPhase::Missing(0.0, 2 * HOUR)]);
        for slo in self.policy.classes.iter().filter(|slo| slo.wait_limit.is_some()) {
            let class = slo.class.as_str();
            let limit = slo.wait_limit.unwrap_or_default().as_secs_f64();
            let labels = [("class", class), ("pool", "p"), ("instance", "a:9090")];
            // One request a second is dispatched: what waits is the wait in seconds.
            input.push(self.series("goodput_queue_seconds_count", &labels, format!("0+60x{}", 2 * HOUR)));
            let (below, above) = (number(limit * 0.9), number(limit * 1.2));
            input.push(self.series("goodput_queue_depth", &labels, format!("{below}x{at} {above}x{HOUR}")));
            let of = format!("alertname=\"GoodputQueueWait\",severity=\"info\",class=\"{class}\"");
            checks.push(self.firing(at, &of, 0));
            checks.push(self.firing(at + 10, &of, 1));
        }
        checks.push(self.never_fired(2 * HOUR, "severity=~\"page|ticket\""));
        Some(self.story("a queue that is too long is told of and pages nobody", input, checks))
    }

    fn engines_queue(&self) -> Option<PromtoolTest> {
        let of_pool = |slo: &ClassSlo| Some((slo.pools.first()?.as_str().to_owned(), slo.wait_limit?));
        let (pool, _) = self.policy.classes.iter().find_map(of_pool).filter(|_| self.policy.by_pool)?;
        let strictest = self.policy.classes.iter().filter(|slo| slo.pools.iter().any(|own| own.as_str() == pool));
        let limit = strictest.filter_map(|slo| slo.wait_limit).min()?.as_secs_f64();
        let class = self.policy.classes.first()?.class.as_str();
        let mut input = self.all(|_| vec![TrafficPhase::Missing(0.0, HOUR)]);
        // Two gateways tell of the same two engines.
        for instance in ["a:9090", "b:9090"] {
            for engine in ["e:1", "e:2"] {
                let labels = [("pool", pool.as_str()), ("engine", engine), ("instance", instance)];
                let (below, above) = (number(limit * 0.45), number(limit * 0.6));
                input.push(self.series("goodput_engine_waiting", &labels, format!("{below}x20 {above}x40")));
            }
        }
        let labels = [("class", class), ("pool", pool.as_str()), ("instance", "a:9090")];
        input.push(self.series("goodput_queue_seconds_count", &labels, "0+60x60"));
        let of = format!("alertname=\"GoodputEngineQueueWait\",severity=\"info\",pool=\"{pool}\"");
        let checks =
            vec![self.firing(20, &of, 0), self.firing(30, &of, 1), self.never_fired(HOUR, "severity=~\"page|ticket\"")];
        Some(self.story("requests that wait inside engines are told of", input, checks))
    }

    /// What improves attainment without serving anybody better, and what costs the budget without being slow.
    fn companions(&self) -> Option<PromtoolTest> {
        let slo = self.with_budget().next()?;
        let class = slo.class.as_str();
        let at = DAY + 2 * HOUR;
        let mut input = self.all(|_| vec![TrafficPhase::Missing(0.0, at)]);
        let shares = |metric: &str, labels: &[(&str, &str)], before: f64, after: f64| {
            let own = [("class", class), ("pool", "p"), ("instance", "a:9090")];
            let labels: Vec<(&str, &str)> = own.into_iter().chain(labels.iter().copied()).collect();
            let values = CounterValues::new().grow(before * RATE, DAY).grow(after * RATE, 2 * HOUR).text;
            self.series(metric, &labels, values)
        };
        input.push(shares(
            "goodput_requests_finished_total",
            &[("outcome", "met"), ("length", "short"), ("model", "m")],
            1.0,
            1.0,
        ));
        input.push(shares("goodput_slo_excluded_total", &[("reason", "rate_limited")], 0.05, 0.2));
        input.push(shares("goodput_slo_excluded_total", &[("reason", "client_cancel")], 0.2, 0.2));
        input.push(shares("goodput_truncated_answers_total", &[], 0.06, 0.3));
        input.push(shares("goodput_slo_missed_total", &[("reason", "shed")], 0.0, slo.budget()));
        let of = |name: &str| format!("alertname=\"{name}\",severity=\"ticket\",class=\"{class}\"");
        let checks = vec![
            self.firing(DAY, &of("Goodput.*").replace("alertname=", "alertname=~"), 0),
            self.firing(at, &format!("{},reason=\"rate_limited\"", of("GoodputExcluded")), 1),
            self.firing(at, &of("GoodputExcluded"), 1),
            self.firing(at, &of("GoodputTruncated"), 1),
            self.firing(at, &of("GoodputShed"), 1),
        ];
        Some(self.story("what is shed, left out or cut short is told of", input, checks))
    }

    fn drift(&self) -> Option<PromtoolTest> {
        let slo = self.policy.classes.iter().find(|slo| slo.assumes_workload)?;
        let class = slo.class.as_str();
        let mut input = self.all(|_| vec![TrafficPhase::Missing(0.0, 2 * HOUR)]);
        let mut push = |direction: &str, percentile: &str, value: f64| {
            let labels =
                [("class", class), ("direction", direction), ("percentile", percentile), ("instance", "a:9090")];
            input.push(self.series("goodput_workload_drift", &labels, format!("{}x{}", number(value), 2 * HOUR)));
        };
        push("input", "p50", 1.0);
        push("input", "p95", DRIFT_FACTOR * 1.1);
        push("output", "p95", 1.0 / DRIFT_FACTOR / 1.1);
        let of = format!("alertname=\"GoodputWorkloadDrift\",severity=\"ticket\",class=\"{class}\"");
        let checks = vec![self.firing(20, &of, 0), self.firing(40, &of, 2)];
        Some(self.story("a workload that drifted is told of", input, checks))
    }

    fn health(&self) -> Option<PromtoolTest> {
        let mut input = self.all(|_| vec![TrafficPhase::Missing(0.0, HOUR)]);
        input.push(self.series("goodput_config_last_reload_successful", &[("instance", "a:9090")], "1x20 0x40"));
        input.push(self.series("goodput_config_last_reload_successful", &[("instance", "b:9090")], "1x60"));
        input.push(self.series("goodput_build_info", &[("instance", "a:9090"), ("version", "1")], "1x60"));
        for (engine, values) in [("e:1", "1x60"), ("e:2", "1x20 0x40"), ("e:3", "1x60")] {
            input.push(self.series(
                "goodput_engine_up",
                &[("pool", "p"), ("engine", engine), ("instance", "a:9090")],
                values,
            ));
        }
        let ticket = |name: &str| format!("alertname=\"{name}\",severity=\"ticket\"");
        let mut checks = vec![
            self.firing(20, "", if self.policy.replicas > 1 { 1 } else { 0 }),
            self.firing(35, &ticket("GoodputConfigReloadFailed"), 1),
            self.firing(40, &ticket("GoodputEnginesDown"), 1),
        ];
        if self.policy.shared_limits {
            input.push(self.series("goodput_limits_store_up", &[("instance", "a:9090")], "1x20 0x40"));
            checks.push(self.firing(35, &ticket("GoodputLimitsStoreDown"), 1));
        }
        if self.policy.replicas > 1 {
            checks.push(self.firing(15, &ticket("GoodputReplicasMissing"), 1));
        }
        if self.policy.classes.len() > 1 {
            let gone = self.policy.classes.last()?.class.as_str();
            input.retain(|series| !series.series.contains(&format!("class=\"{gone}\"")));
            checks[0] = self.firing(10, "alertname=\"GoodputClassAbsent\"", 0);
            checks.push(self.firing(20, &format!("{},class=\"{gone}\"", ticket("GoodputClassAbsent")), 1));
            checks.push(self.firing(20, &ticket("GoodputClassAbsent"), 1));
        }
        checks.push(self.firing(HOUR, "severity=\"page\"", 0));
        Some(self.story("what is wrong with the gateways themselves is told of", input, checks))
    }

    /// The class `drill` pages by itself, and belongs to nothing else.
    fn drill(&self) -> Option<PromtoolTest> {
        let mut input = self.all(|_| vec![TrafficPhase::Missing(0.0, 2 * HOUR)]);
        input.extend(self.pair(
            "drill",
            "a:9090",
            "unknown",
            &[TrafficPhase::Idle(HOUR), TrafficPhase::Sparse(20.0, 1), TrafficPhase::Idle(HOUR)],
        ));
        let checks = vec![
            self.firing(HOUR, "", 0),
            self.firing(HOUR + 4, "alertname=\"GoodputDrill\",severity=\"page\",class=\"drill\"", 1),
            self.firing(HOUR + 4, "", 1),
            self.firing(HOUR + 10, "", 0),
        ];
        Some(self.story("a drill pages and is in no sum", input, checks))
    }

    /// Long prompts miss while the class as a whole keeps its promise.
    fn lengths(&self) -> Option<PromtoolTest> {
        if !self.policy.by_length {
            return None;
        }
        let slo = self.with_budget().find(|slo| slo.budget() <= 0.1)?;
        let class = slo.class.as_str();
        let day = self.tiers(slo).into_iter().find(|tier| tier.tier == super::BurnTier::Day)?;
        let minutes = day.long.as_secs() / 60 + 2 * HOUR;
        let mut input = self.all(|_| vec![TrafficPhase::Missing(0.0, minutes)]);
        let enough = min_requests(slo.budget(), day.miss_ratio) as f64 * 2.0;
        let rate = (enough / (day.long.as_secs_f64() / 60.0)).min(RATE / 100.0);
        input.extend(self.pair(class, "a:9090", "long", &[TrafficPhase::Sparse(rate, minutes)]));
        let checks = vec![
            self.firing(
                minutes,
                &format!("alertname=\"GoodputLengthBudgetBurn\",severity=\"ticket\",class=\"{class}\",length=\"long\""),
                1,
            ),
            self.never_fired(minutes, "severity=\"page\""),
        ];
        Some(self.story("one prompt length that misses is a ticket", input, checks))
    }

    fn with_budget(&self) -> impl Iterator<Item = &ClassSlo> {
        self.policy.classes.iter().filter(|slo| slo.budget() > 0.0)
    }
}

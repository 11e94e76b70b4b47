use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::format::{Notation, RuleFormat, render};
use super::*;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn class(name: &str, target: f64, days: u32) -> ClassSlo {
    ClassSlo {
        class: ClassId::from(name),
        target,
        window: days * DAY,
        objectives: "TTFT 1.2s".to_owned(),
        wait_limit: Some(Duration::from_millis(600)),
        pools: vec![PoolId::from("main")],
        assumes_workload: true,
    }
}

fn policy(classes: Vec<ClassSlo>) -> AlertPolicy {
    AlertPolicy {
        classes,
        by_length: true,
        by_pool: true,
        replicas: 2,
        shared_limits: true,
        options: RuleOptions::default(),
    }
}

fn expression(set: &RuleSet, name: &str, label: (&str, &str)) -> String {
    let mut found = set.alerts().filter(|alert| alert.alert == name);
    let found = found.find(|alert| alert.labels.get(label.0).is_some_and(|value| value == label.1));
    found.unwrap_or_else(|| panic!("no {name} with {label:?}")).expr.clone()
}

#[test]
fn a_burn_alert_has_both_windows_enough_requests_and_a_class_that_is_not_new() {
    let set = rule_set(&policy(vec![class("chat", 0.92, 28)]));
    assert_eq!(
        expression(&set, "GoodputErrorBudgetBurn", ("tier", "fast")),
        "class:slo_missed_per_judged:ratio1h{class=\"chat\"} > 0.54\n\
         and on (class) class:slo_missed_per_judged:ratio5m{class=\"chat\"} > 0.54\n\
         and on (class) class:slo_judged:increase1h{class=\"chat\"} >= 10\n\
         and on (class) count by (class) (count_over_time(slo_total{class=\"chat\"}[27m36s] offset 32m24s))"
    );
    assert_eq!(
        expression(&set, "GoodputErrorBudgetBurn", ("tier", "three_days")),
        "class:slo_missed_per_judged:ratio3d{class=\"chat\"} > 0.12\n\
         and on (class) class:slo_missed_per_judged:ratio6h{class=\"chat\"} > 0.12\n\
         and on (class) class:slo_judged:increase3d{class=\"chat\"} >= 734\n\
         and on (class) count_over_time(class:slo_judged:rate8m{class=\"chat\"}[2d15h21m36s] offset 8h38m24s)"
    );
}

#[test]
fn prompt_lengths_make_tickets_only_while_their_class_is_within_its_limits() {
    let set = rule_set(&policy(vec![class("chat", 0.92, 28)]));
    let of_length: Vec<_> = set.alerts().filter(|alert| alert.expr.contains("class_length:")).collect();
    assert_eq!(of_length.len(), 1);
    assert_eq!(of_length[0].labels["severity"], "ticket");
    assert!(
        of_length[0].expr.ends_with("unless on (class) class:slo_missed_per_judged:ratio1d{class=\"chat\"} > 0.172")
    );
    let without = AlertPolicy { by_length: false, ..policy(vec![class("chat", 0.92, 28)]) };
    assert!(!format!("{:?}", rule_set(&without)).contains("length"));
}

#[test]
fn the_engines_of_a_pool_are_held_to_the_strictest_class_that_it_serves_and_are_counted_once() {
    let strict = ClassSlo { wait_limit: Some(Duration::from_millis(200)), ..class("voice", 0.95, 28) };
    let free = ClassSlo { wait_limit: None, ..class("batch", 0.99, 28) };
    let set = rule_set(&policy(vec![class("chat", 0.92, 28), strict, free]));
    let expr = expression(&set, "GoodputEngineQueueWait", ("pool", "main"));
    assert!(
        expr.starts_with("sum by (pool) (max by (pool, engine) (goodput_engine_waiting{pool=\"main\"}))"),
        "{expr}"
    );
    assert!(expr.ends_with("> 0.2"), "{expr}");
    let waits = set.alerts().filter(|alert| alert.alert == "GoodputQueueWait");
    assert_eq!(waits.count(), 2, "a class without a limit on time has no early warning");
}

#[test]
fn a_class_without_a_budget_has_tickets_and_no_burn() {
    let set = rule_set(&policy(vec![class("all", 1.0, 28)]));
    assert!(set.alerts().all(|alert| alert.alert != "GoodputErrorBudgetBurn"));
    assert_eq!(
        expression(&set, "GoodputMissWithoutBudget", ("class", "all")),
        "class:slo_missed:increase1h{class=\"all\"} > 0"
    );
    for format in [RuleFormat::OpenSlo, RuleFormat::Sloth, RuleFormat::Pyrra] {
        assert!(
            !render(&policy(vec![class("all", 1.0, 28)]), format, Notation::Json).contains("slo_total"),
            "{format:?}"
        );
    }
}

#[test]
fn further_matchers_are_in_every_selector_and_every_sum() {
    let options = RuleOptions {
        matchers: vec![("cluster".to_owned(), "eu".to_owned())],
        labels: vec![("team".to_owned(), "llm".to_owned())],
        runbooks: "https://wiki".to_owned(),
        faster: 1,
    };
    let set = rule_set(&AlertPolicy { options, ..policy(vec![class("chat", 0.92, 28), class("b", 0.9, 7)]) });
    for group in &set.groups {
        for rule in &group.rules {
            let expr = match rule {
                PrometheusRule::Recording(rule) => &rule.expr,
                PrometheusRule::Alerting(rule) => &rule.expr,
            };
            let selectors = expr.matches('{').count();
            assert_eq!(selectors, expr.matches("cluster=\"eu\"}").count(), "{expr}");
            for by in expr.split("by (").skip(1).chain(expr.split("on (").skip(1)) {
                let labels = by.split(')').next().unwrap();
                assert!(labels.is_empty() || labels.contains("cluster"), "{expr}");
            }
        }
    }
    assert!(set.alerts().all(|alert| alert.labels["team"] == "llm"));
    assert!(set.alerts().all(|alert| alert.annotations["runbook_url"].starts_with("https://wiki/")));
}

#[test]
fn no_rule_counts_the_class_drill_but_its_own() {
    let set = rule_set(&policy(vec![class("chat", 0.92, 28), class("agent", 0.95, 28)]));
    for group in &set.groups {
        for rule in &group.rules {
            let (name, expr) = match rule {
                PrometheusRule::Recording(rule) => (&rule.record, &rule.expr),
                PrometheusRule::Alerting(rule) => (&rule.alert, &rule.expr),
            };
            assert_eq!(expr.contains("\"drill\""), name == "GoodputDrill", "{name}");
            for counter in ["slo_total", "slo_met_total"] {
                for (at, _) in expr.match_indices(&format!("{counter}{{")) {
                    assert!(expr[at + counter.len() + 1..].starts_with("class"), "{name}: {expr}");
                }
            }
        }
    }
}

#[test]
fn whatever_pages_or_asks_has_a_runbook_and_a_summary_that_says_what_to_do() {
    let classes = vec![class("chat", 0.92, 28), class("sure", 1.0, 28)];
    let set = rule_set(&policy(classes));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/runbooks");
    let overview = std::fs::read_to_string(folder.join("../alerts.md")).unwrap();
    let mut named = BTreeSet::new();
    for alert in set.alerts() {
        assert!(["page", "ticket", "info"].contains(&alert.labels["severity"].as_str()), "{}", alert.alert);
        let url = &alert.annotations["runbook_url"];
        let file = url.strip_prefix("docs/runbooks/").unwrap_or_else(|| panic!("{url}"));
        let text = std::fs::read_to_string(folder.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(text.starts_with(&format!("# {}\n", alert.alert)), "{file}");
        assert!(text.contains("## Over when"), "{file}");
        assert!(overview.contains(&format!("[{}](runbooks/{file})", alert.alert)), "docs/alerts.md: {file}");
        let summary = &alert.annotations["summary"];
        assert!(summary.contains(';') || summary.contains(':'), "{summary}");
        if let Some(name) = alert.labels.get("class").filter(|name| *name != "drill") {
            assert!(summary.starts_with(&format!("{name}: ")), "{summary}");
        }
        named.insert(file.to_owned());
    }
    let there: BTreeSet<String> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(named, there, "every alert has a runbook, and every runbook an alert");
}

#[test]
fn what_pages_is_a_broken_promise_or_nothing_to_go_by() {
    let set = rule_set(&policy(vec![class("chat", 0.92, 28), class("agent", 0.95, 28)]));
    let pages: BTreeSet<&str> =
        set.alerts().filter(|alert| alert.labels["severity"] == "page").map(|alert| alert.alert.as_str()).collect();
    assert_eq!(pages, BTreeSet::from(["GoodputAbsent", "GoodputDrill", "GoodputErrorBudgetBurn", "GoodputOverdue"]));
}

#[test]
fn a_rehearsal_has_every_length_of_time_shorter() {
    let options = RuleOptions { faster: 30, ..RuleOptions::default() };
    let set = rule_set(&AlertPolicy { options, ..policy(vec![class("chat", 0.92, 28)]) });
    let outage = expression(&set, "GoodputErrorBudgetBurn", ("tier", "outage"));
    assert!(outage.starts_with("class:slo_missed_per_judged:ratio20s{class=\"chat\"} > 0.816\n"), "{outage}");
    assert!(outage.contains("ratio4s{") && outage.contains("[4s] offset 16s300ms"), "{outage}");
    assert_eq!(set.groups[0].interval, "8s");
}

#[test]
fn targets_that_a_fixed_threshold_cannot_reach_switch_the_alerts_of_others_off() {
    let of = |target: f64, format| {
        let text = render(&policy(vec![class("chat_interactive", target, 28)]), format, Notation::Json);
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    let sloth = of(0.92, RuleFormat::Sloth);
    assert_eq!(sloth["slos"][0]["objective"], 92.0);
    assert_eq!(sloth["slos"][0]["alerting"]["page_alert"]["disable"], true);
    assert_eq!(
        sloth["slos"][0]["sli"]["events"]["error_query"],
        "sum(rate(slo_total{class=\"chat_interactive\"}[{{.window}}])) - \
         (sum(rate(slo_met_total{class=\"chat_interactive\"}[{{.window}}])) or 0 * \
         sum(rate(slo_total{class=\"chat_interactive\"}[{{.window}}])))"
    );
    assert!(of(0.999, RuleFormat::Sloth)["slos"][0]["alerting"]["page_alert"].get("disable").is_none());
    let pyrra = of(0.92, RuleFormat::Pyrra);
    assert_eq!(pyrra[0]["metadata"]["name"], "goodput-chat-interactive");
    assert_eq!((&pyrra[0]["spec"]["target"], &pyrra[0]["spec"]["window"]), (&"92".into(), &"28d".into()));
    assert_eq!(pyrra[0]["spec"]["alerting"]["burnrates"], false);
    assert!(of(0.999, RuleFormat::Pyrra)[0]["spec"]["alerting"].get("burnrates").is_none());
}

#[test]
fn openslo_has_an_objective_for_each_class_with_one_condition_a_policy() {
    let text = render(&policy(vec![class("chat", 0.92, 28)]), RuleFormat::OpenSlo, Notation::Json);
    let all: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let kinds: Vec<&str> = all.iter().map(|object| object["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["Service", "DataSource", "AlertNotificationTarget", "AlertNotificationTarget", "SLO"]);
    let slo = &all[4]["spec"];
    assert_eq!(slo["objectives"][0]["target"], 0.92);
    assert_eq!(slo["timeWindow"][0], serde_json::json!({"duration": "28d", "isRolling": true}));
    let policies = slo["alertPolicies"].as_array().unwrap();
    assert_eq!(policies.len(), 5);
    for policy in policies {
        let conditions = policy["spec"]["conditions"].as_array().unwrap();
        assert_eq!(conditions.len(), 1);
        assert!(policy["metadata"]["name"].as_str().unwrap().len() <= 63);
    }
    let condition = &policies[0]["spec"]["conditions"][0]["spec"]["condition"];
    assert_eq!((&condition["threshold"], &condition["lookbackWindow"]), (&10.2.into(), &"10m".into()));
}

#[test]
fn the_first_page_of_the_explanation_is_the_one_of_the_tiers() {
    let policy = policy(vec![class("chat", 0.92, 28), class("sure", 1.0, 28)]);
    let told = times(&policy);
    assert_eq!((told[0].first_page_seconds, told[0].highest_burn.map(|burn| burn.round())), (Some(490), Some(13.0)));
    assert_eq!(told[1].tiers, []);
    let text = explain(&policy);
    assert!(text.contains("a full outage pages after 8m10s, with 0.25 % of the budget used"), "{text}");
    assert!(text.contains("sure: every request within 28d."), "{text}");
}

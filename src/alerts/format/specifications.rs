//! Checks of what is written against the published specifications: every field is one that the
//! specification has, of its type, and none that it requires is missing.
//!
//! Read field by field in September 2026: the text of OpenSLO v1 (its draft JSON schema allows no inline alert
//! policies, the text does), Sloth's `prometheus/v1` with the rules that `sloth validate` applies, and the types behind
//! Pyrra's `v1alpha1` definition.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::super::{AlertPolicy, ClassSlo, RuleOptions};
use super::{Notation, RuleFormat, render};
use crate::types::{ClassId, PoolId};

/// Fields that a specification has, as far as what we write could use them: path, type, `!` for a required one.
/// `[]` is every item of a list, `{}` every value of a map with free keys. A field is required where what
/// holds it is there.
const OPENSLO_SLO: &str = "
apiVersion! string
kind! string
metadata! object
metadata.name! string
metadata.displayName string
metadata.labels object
metadata.annotations object
spec! object
spec.description string
spec.service! string
spec.indicator! object
spec.indicator.metadata! object
spec.indicator.metadata.name! string
spec.indicator.metadata.displayName string
spec.indicator.spec! object
spec.indicator.spec.description string
spec.indicator.spec.ratioMetric! object
spec.indicator.spec.ratioMetric.counter! boolean
spec.indicator.spec.ratioMetric.good! object
spec.indicator.spec.ratioMetric.good.metricSource! object
spec.indicator.spec.ratioMetric.good.metricSource.metricSourceRef string
spec.indicator.spec.ratioMetric.good.metricSource.type string
spec.indicator.spec.ratioMetric.good.metricSource.spec! object
spec.indicator.spec.ratioMetric.good.metricSource.spec.query! string
spec.indicator.spec.ratioMetric.total! object
spec.indicator.spec.ratioMetric.total.metricSource! object
spec.indicator.spec.ratioMetric.total.metricSource.metricSourceRef string
spec.indicator.spec.ratioMetric.total.metricSource.type string
spec.indicator.spec.ratioMetric.total.metricSource.spec! object
spec.indicator.spec.ratioMetric.total.metricSource.spec.query! string
spec.timeWindow! array
spec.timeWindow[]! object
spec.timeWindow[].duration! string
spec.timeWindow[].isRolling! boolean
spec.budgetingMethod! string
spec.objectives! array
spec.objectives[]! object
spec.objectives[].displayName string
spec.objectives[].target! number
spec.alertPolicies array
spec.alertPolicies[] object
spec.alertPolicies[].kind! string
spec.alertPolicies[].metadata! object
spec.alertPolicies[].metadata.name! string
spec.alertPolicies[].spec! object
spec.alertPolicies[].spec.description string
spec.alertPolicies[].spec.alertWhenNoData boolean
spec.alertPolicies[].spec.alertWhenResolved boolean
spec.alertPolicies[].spec.alertWhenBreaching boolean
spec.alertPolicies[].spec.conditions! array
spec.alertPolicies[].spec.conditions[]! object
spec.alertPolicies[].spec.conditions[].kind! string
spec.alertPolicies[].spec.conditions[].metadata! object
spec.alertPolicies[].spec.conditions[].metadata.name! string
spec.alertPolicies[].spec.conditions[].spec! object
spec.alertPolicies[].spec.conditions[].spec.description string
spec.alertPolicies[].spec.conditions[].spec.severity! string
spec.alertPolicies[].spec.conditions[].spec.condition! object
spec.alertPolicies[].spec.conditions[].spec.condition.kind! string
spec.alertPolicies[].spec.conditions[].spec.condition.op! string
spec.alertPolicies[].spec.conditions[].spec.condition.threshold! number
spec.alertPolicies[].spec.conditions[].spec.condition.lookbackWindow! string
spec.alertPolicies[].spec.conditions[].spec.condition.alertAfter string
spec.alertPolicies[].spec.notificationTargets! array
spec.alertPolicies[].spec.notificationTargets[]! object
spec.alertPolicies[].spec.notificationTargets[].targetRef! string
";

/// The other kinds.
const OPENSLO_OTHERS: [(&str, &str); 3] = [
    (
        "Service",
        "apiVersion! string\nkind! string\nmetadata! object\nmetadata.name! string\nspec! object\nspec.description string",
    ),
    (
        "DataSource",
        "apiVersion! string\nkind! string\nmetadata! object\nmetadata.name! string\nspec! object\nspec.description string\nspec.type! string\n\
         spec.connectionDetails! object\nspec.connectionDetails.url string",
    ),
    (
        "AlertNotificationTarget",
        "apiVersion! string\nkind! string\nmetadata! object\nmetadata.name! string\nspec! object\nspec.description string\nspec.target! string",
    ),
];

const SLOTH: &str = "
version! string
service! string
labels object
labels{} string
slos! array
slos[]! object
slos[].name! string
slos[].description string
slos[].objective! number
slos[].labels object
slos[].labels{} string
slos[].sli! object
slos[].sli.events! object
slos[].sli.events.error_query! string
slos[].sli.events.total_query! string
slos[].alerting! object
slos[].alerting.name! string
slos[].alerting.labels object
slos[].alerting.annotations object
slos[].alerting.annotations{} string
slos[].alerting.page_alert object
slos[].alerting.page_alert.disable boolean
slos[].alerting.page_alert.labels object
slos[].alerting.page_alert.labels{} string
slos[].alerting.ticket_alert object
slos[].alerting.ticket_alert.disable boolean
slos[].alerting.ticket_alert.labels object
slos[].alerting.ticket_alert.labels{} string
";

const PYRRA: &str = "
apiVersion! string
kind! string
metadata! object
metadata.name! string
metadata.labels object
metadata.labels{} string
spec! object
spec.description string
spec.target! string
spec.window! string
spec.indicator! object
spec.indicator.ratio! object
spec.indicator.ratio.errors! object
spec.indicator.ratio.errors.metric! string
spec.indicator.ratio.total! object
spec.indicator.ratio.total.metric! string
spec.alerting object
spec.alerting.name string
spec.alerting.absentName string
spec.alerting.burnrates boolean
spec.alerting.absent boolean
";

/// The type of a field, and whether it is required.
type FieldSpec<'a> = BTreeMap<&'a str, (&'a str, bool)>;

fn specification(text: &str) -> FieldSpec<'_> {
    let field = |line| {
        let (path, kind): (&str, &str) = str::split_once(line, ' ').expect("a path and a type");
        (path.trim_end_matches('!'), (kind, path.ends_with('!')))
    };
    text.lines().filter(|line| !line.is_empty()).map(field).collect()
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Everything that is wrong with a value at a path.
fn wrong(value: &Value, path: &str, fields: &FieldSpec<'_>) -> Vec<String> {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    match value {
        Value::Object(members) => {
            let free = fields.get(format!("{path}{{}}").as_str());
            let mut found = Vec::new();
            for (name, member) in members {
                let at = below(name);
                match free.or_else(|| fields.get(at.as_str())) {
                    None => found.push(format!("{at} is no field of the specification")),
                    Some((kind, _)) if *kind != kind_of(member) => found.push(format!("{at} is no {kind}")),
                    Some(_) if free.is_some() => {}
                    Some(_) => found.extend(wrong(member, &at, fields)),
                }
            }
            let required = fields.iter().filter(|(_, (_, required))| *required).map(|(at, _)| *at);
            let here = required.filter_map(|at| match path.is_empty() {
                true => Some(at),
                false => at.strip_prefix(path)?.strip_prefix('.'),
            });
            let missing = here.filter(|name| !name.contains(['.', '[', '{']) && !members.contains_key(*name));
            found.extend(missing.map(|name| format!("{} is missing", below(name))));
            found
        }
        Value::Array(items) => items.iter().flat_map(|item| wrong(item, &format!("{path}[]"), fields)).collect(),
        _ => Vec::new(),
    }
}

/// Awkward class names that the settings permit.
const NAMES: [&str; 6] = ["chat_interactive", "a/b.c:d@E", "x", "-_-", "@:", "chat-interactive"];

fn policy() -> AlertPolicy {
    let class = |(number, name): (usize, &&str)| ClassSlo {
        class: ClassId::from(*name),
        target: [0.5, 0.9, 0.92, 0.95, 0.99, 0.999][number],
        window: Duration::from_secs([7, 28, 30, 90, 28, 7][number] * 86_400),
        objectives: "TTFT 1.2s, \"quoted\" {braced}\nand \u{e4}".to_owned(),
        wait_limit: None,
        pools: vec![PoolId::from("main")],
        assumes_workload: false,
    };
    AlertPolicy {
        classes: NAMES.iter().enumerate().map(class).collect(),
        by_length: true,
        by_pool: true,
        replicas: 1,
        shared_limits: false,
        options: RuleOptions {
            matchers: vec![("cluster".to_owned(), "e\"u\\{\n}".to_owned())],
            labels: vec![("team".to_owned(), "serving".to_owned())],
            ..RuleOptions::default()
        },
    }
}

/// The same documents from both notations.
fn documents(format: RuleFormat) -> Vec<Value> {
    let yaml = render(&policy(), format, Notation::Yaml);
    let read: Vec<Value> = serde_yaml::from_multiple(&yaml).unwrap();
    let json: Value = serde_json::from_str(&render(&policy(), format, Notation::Json)).unwrap();
    assert_eq!(json.as_array().cloned().unwrap_or_else(|| vec![json.clone()]), read);
    read
}

/// A label of DNS (RFC 1123).
fn is_dns_label(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('-') && !name.ends_with('-')
}

/// One number and one unit.
fn is_duration_shorthand(text: &str) -> bool {
    let (number, unit) = text.split_at(text.len() - 1);
    number.parse::<u32>().is_ok_and(|number| number > 0) && ["m", "h", "d", "w", "M", "Q", "Y"].contains(&unit)
}

#[test]
fn openslo_objects_have_the_fields_of_the_specification_and_no_others() {
    let mut slos = 0;
    let mut names = std::collections::BTreeSet::new();
    for object in documents(RuleFormat::OpenSlo) {
        let kind = object["kind"].as_str().unwrap();
        let fields = OPENSLO_OTHERS.iter().find(|(other, _)| *other == kind).map_or(OPENSLO_SLO, |(_, fields)| fields);
        assert_eq!(wrong(&object, "", &specification(fields)), Vec::<String>::new(), "{object:#}");
        let name = object["metadata"]["name"].as_str().unwrap();
        assert!(object["apiVersion"] == "openslo/v1" && is_dns_label(name), "{name}");
        assert!(names.insert((kind.to_owned(), name.to_owned())), "{kind} {name} stands there twice");
        if kind != "SLO" {
            continue;
        }
        slos += 1;
        let spec = &object["spec"];
        assert!(spec["description"].as_str().unwrap().chars().count() <= 1050);
        assert!(spec["objectives"][0]["target"].as_f64().is_some_and(|target| (0.0..1.0).contains(&target)));
        assert!(is_duration_shorthand(spec["timeWindow"][0]["duration"].as_str().unwrap()));
        assert_eq!(spec["timeWindow"].as_array().unwrap().len(), 1);
        for policy in spec["alertPolicies"].as_array().unwrap() {
            let conditions = policy["spec"]["conditions"].as_array().unwrap();
            assert_eq!(conditions.len(), 1, "one condition a policy");
            let burn = &conditions[0]["spec"]["condition"];
            assert_eq!((&burn["kind"], &burn["op"]), (&"burnrate".into(), &"gt".into()));
            for length in ["lookbackWindow", "alertAfter"] {
                assert!(is_duration_shorthand(burn[length].as_str().unwrap()), "{burn}");
            }
            assert!(is_dns_label(policy["metadata"]["name"].as_str().unwrap()), "{policy}");
            assert!(is_dns_label(conditions[0]["metadata"]["name"].as_str().unwrap()), "{policy}");
        }
    }
    assert_eq!(slos, NAMES.len());
}

/// Sloth takes names of two characters and more: letters, digits, `.`, `_` and `-`, the outer ones letters or digits.
#[test]
fn sloth_takes_every_name_and_both_queries_have_its_window() {
    let documents = documents(RuleFormat::Sloth);
    let [spec] = &documents[..] else { panic!("{documents:#?}") };
    assert_eq!(wrong(spec, "", &specification(SLOTH)), Vec::<String>::new());
    assert_eq!(spec["version"], "prometheus/v1");
    let slos = spec["slos"].as_array().unwrap();
    let names: std::collections::BTreeSet<&str> = slos.iter().map(|slo| slo["name"].as_str().unwrap()).collect();
    assert_eq!((names.len(), slos.len()), (NAMES.len(), NAMES.len()), "{names:?}");
    assert!(names.contains("chat_interactive") && names.contains("chat-interactive"), "what fits stays: {names:?}");
    for (slo, class) in slos.iter().zip(NAMES) {
        let name = slo["name"].as_str().unwrap();
        let outer = |c: char| c.is_ascii_alphanumeric();
        assert!(name.len() > 1 && name.starts_with(outer) && name.ends_with(outer), "{name}");
        assert!(name.chars().all(|c| outer(c) || "-_.".contains(c)), "{name}");
        assert_eq!(slo["labels"]["class"], class, "alerts keep the class's own name");
        assert!(slo["objective"].as_f64().is_some_and(|share| share > 0.0 && share <= 100.0));
        for query in ["error_query", "total_query"] {
            assert!(slo["sli"]["events"][query].as_str().unwrap().contains("{{.window}}"), "{slo}");
        }
    }
}

#[test]
fn pyrra_objects_have_the_fields_of_their_definition() {
    let documents = documents(RuleFormat::Pyrra);
    assert_eq!(documents.len(), NAMES.len());
    for object in documents {
        assert_eq!(wrong(&object, "", &specification(PYRRA)), Vec::<String>::new(), "{object:#}");
        assert_eq!(
            (&object["apiVersion"], &object["kind"]),
            (&"pyrra.dev/v1alpha1".into(), &"ServiceLevelObjective".into())
        );
        assert!(is_dns_label(object["metadata"]["name"].as_str().unwrap()));
        let target: f64 = object["spec"]["target"].as_str().unwrap().parse().unwrap();
        assert!((1.0..100.0).contains(&target), "per cent, as a text: {target}");
        let ratio = &object["spec"]["indicator"]["ratio"];
        for metric in ["errors", "total"] {
            let selector = ratio[metric]["metric"].as_str().unwrap();
            assert!(selector.ends_with('}') && !selector.contains('('), "a selector alone: {selector}");
        }
    }
}

/// The checks above detect errors.
#[test]
fn a_field_too_many_a_wrong_type_and_a_missing_one_are_told() {
    let fields = specification(PYRRA);
    let mut object = documents(RuleFormat::Pyrra).remove(0);
    object["spec"]["indicater"] = Value::from(1);
    object["spec"]["window"] = Value::from(28);
    object["spec"]["indicator"]["ratio"].as_object_mut().unwrap().remove("total");
    assert_eq!(
        wrong(&object, "", &fields),
        [
            "spec.indicater is no field of the specification",
            "spec.indicator.ratio.total is missing",
            "spec.window is no string"
        ]
    );
}

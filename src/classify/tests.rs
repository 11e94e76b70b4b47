use http::{HeaderName, HeaderValue};
use proptest::prelude::*;

use super::*;
use crate::inspect::{Caps, Field, PromptSize, Reasoning};
use crate::types::{Glob, TenantId};

struct Sample {
    who: Identity,
    headers: HeaderMap,
    path: &'static str,
    facts: Option<Facts>,
    model: Option<String>,
    prompt_tokens: Tokens,
}

fn sample() -> Sample {
    let facts = Facts {
        model: Some(Field { value: "gpt-4o".into(), at: 0..0 }),
        stream: Some(Field { value: true, at: 0..0 }),
        caps: Caps { max_tokens: Some(Field { value: 100, at: 0..0 }), ..Caps::default() },
        has_tools: true,
        reasoning: Some(Reasoning::Low),
        metadata: vec![("team".into(), "search".into())],
        prompt: PromptSize { bytes: 400, is_known: true, ..PromptSize::default() },
        readable: true,
        ..Facts::default()
    };
    let mut headers = HeaderMap::new();
    headers.append("x-slo-class", HeaderValue::from_static("batch"));
    headers.append("x-slo-class", HeaderValue::from_static("voice"));
    Sample {
        who: Identity { tenant: TenantId::from("acme"), key_label: Some(Arc::from("prod")) },
        headers,
        path: "/v1/chat/completions",
        facts: Some(facts),
        model: Some("llama-3-70b".into()),
        prompt_tokens: Tokens(106),
    }
}

impl Sample {
    fn ask(&self) -> ClassifyInput<'_> {
        ClassifyInput {
            who: &self.who,
            headers: &self.headers,
            path: self.path,
            facts: self.facts.as_ref(),
            model: self.model.as_deref(),
            prompt_tokens: self.prompt_tokens,
        }
    }

    fn fits(&self, when: When) -> bool {
        let rules = Rules::new([(ClassId::from("x"), when)], ClassId::from("default"));
        let found = rules.class_of(&self.ask(), |_| true).unwrap();
        let said = &rules.explain(&self.ask(), |_| true)[0].said;
        assert_eq!(found.rule.as_ref() == "rule 1", *said == ConditionResult::Matched, "{said:?}");
        found.class.as_str() == "x"
    }
}

fn header(name: &'static str, test: HeaderTest) -> When {
    When { headers: vec![(HeaderName::from_static(name), test)], ..When::default() }
}

fn cap(test: CapTest) -> When {
    When { max_tokens: Some(test), ..When::default() }
}

fn prompt(at_least: u64, at_most: u64) -> When {
    When { prompt_tokens: Some(TokenRange { at_least: Tokens(at_least), at_most: Tokens(at_most) }), ..When::default() }
}

fn within(at_least: u64, at_most: u64) -> CapTest {
    CapTest::Within(TokenRange { at_least: Tokens(at_least), at_most: Tokens(at_most) })
}

fn metadata(key: &str, values: &[&str]) -> When {
    When { metadata: vec![(key.into(), values.iter().map(|v| (*v).into()).collect())], ..When::default() }
}

fn models(globs: &[&str]) -> When {
    When { models: Some(globs.iter().map(|g| Glob::new(g)).collect()), ..When::default() }
}

#[test]
fn every_condition_alone() {
    let one = |change: fn(&mut When)| {
        let mut when = When::default();
        change(&mut when);
        when
    };
    let table = [
        (When::default(), true),
        (one(|w| w.tenants = Some(vec!["ivr".into(), "acme".into()])), true),
        (one(|w| w.tenants = Some(vec!["ivr".into()])), false),
        (one(|w| w.keys = Some(vec!["prod".into()])), true),
        (one(|w| w.keys = Some(vec!["test".into()])), false),
        (one(|w| w.paths = Some(vec!["/v1/chat/completions"])), true),
        (one(|w| w.paths = Some(vec!["/v1/completions"])), false),
        (models(&["gpt-*"]), true),
        (models(&["llama-*"]), true),
        (models(&["qwen-*", "llama-3-70b"]), true),
        (models(&["qwen-*"]), false),
        (one(|w| w.stream = Some(true)), true),
        (one(|w| w.stream = Some(false)), false),
        (one(|w| w.has_tools = Some(true)), true),
        (one(|w| w.has_tools = Some(false)), false),
        (one(|w| w.reasoning = Some(vec![Reasoning::Low, Reasoning::High])), true),
        (one(|w| w.reasoning = Some(vec![Reasoning::On])), false),
        (cap(within(0, 100)), true),
        (cap(within(100, 100)), true),
        (cap(within(101, 200)), false),
        (cap(within(0, 99)), false),
        (cap(CapTest::Within(TokenRange::ANY)), true),
        (cap(CapTest::NotStated), false),
        (prompt(0, 106), true),
        (prompt(107, 200), false),
        (header("x-slo-class", HeaderTest::Is(vec!["voice".into()])), true),
        (header("x-slo-class", HeaderTest::Is(vec!["Voice".into()])), false),
        (header("x-slo-class", HeaderTest::Prefix("bat".into())), true),
        (header("x-slo-class", HeaderTest::Prefix("bas".into())), false),
        (header("x-slo-class", HeaderTest::Present(true)), true),
        (header("x-slo-class", HeaderTest::Present(false)), false),
        (header("x-other", HeaderTest::Present(false)), true),
        (header("x-other", HeaderTest::Is(vec![String::new()])), false),
        (metadata("team", &["ads", "search"]), true),
        (metadata("team", &["ads"]), false),
        (metadata("unit", &["search"]), false),
    ];
    for (when, expected) in table {
        assert_eq!(sample().fits(when.clone()), expected, "{when:?}");
    }
}

#[test]
fn an_absent_cap_matches_only_not_stated() {
    let mut sample = sample();
    sample.facts.as_mut().unwrap().caps = Caps::default();
    assert!(sample.fits(cap(CapTest::NotStated)));
    assert!(!sample.fits(cap(CapTest::Within(TokenRange::ANY))));
}

#[test]
fn a_prompt_that_cannot_be_measured_fits_no_range() {
    let mut sample = sample();
    sample.facts.as_mut().unwrap().prompt.is_known = false;
    assert!(!sample.fits(prompt(0, u64::MAX)));
}

#[test]
fn conditions_about_a_body_that_was_not_read_do_not_hold() {
    let mut sample = sample();
    sample.facts = None;
    assert!(!sample.fits(When { stream: Some(false), ..When::default() }));
    assert!(!sample.fits(When { has_tools: Some(false), ..When::default() }));
    assert!(!sample.fits(cap(CapTest::NotStated)));
    assert!(sample.fits(models(&["llama-*"])));
}

#[test]
fn an_unreadable_body_goes_to_the_default_class() {
    let mut sample = sample();
    sample.facts.as_mut().unwrap().readable = false;
    assert!(!sample.fits(When::default()));
}

#[test]
fn a_rule_whose_class_the_tenant_may_not_use_does_not_match() {
    let rules = Rules::new([("voice".into(), When::default()), ("agent".into(), When::default())], "chat".into());
    let sample = sample();
    let class =
        |allowed: &'static [&'static str]| rules.class_of(&sample.ask(), |class| allowed.contains(&class.as_str()));
    assert_eq!(class(&["voice", "agent", "chat"]).unwrap().rule.as_ref(), "rule 1");
    assert_eq!(class(&["agent", "chat"]).unwrap().class.as_str(), "agent");
    assert_eq!(class(&["chat"]).unwrap().rule.as_ref(), "default");
    assert_eq!(class(&[]), Err(NotAllowed));

    let said = rules.explain(&sample.ask(), |class| class.as_str() == "agent");
    assert_eq!(said[0].said, ConditionResult::ClassNotAllowed);
    assert_eq!(said[1].said, ConditionResult::Matched);
}

#[test]
fn an_explanation_names_every_condition_that_differs() {
    let when = When { stream: Some(false), has_tools: Some(true), ..metadata("team", &["ads"]) };
    let rules = Rules::new([("x".into(), when), ("y".into(), When::default())], "z".into());
    let said = rules.explain(&sample().ask(), |_| true);
    assert_eq!(said[0].said, ConditionResult::Differs(vec!["stream".into(), "metadata.team".into()]));
    assert_eq!(said[1].said, ConditionResult::Matched);
}

fn any_when() -> impl Strategy<Value = When> {
    let stream = proptest::option::of(any::<bool>());
    let tools = proptest::option::of(any::<bool>());
    let tenant = proptest::option::of(prop_oneof![Just("acme"), Just("ivr")]);
    let range = proptest::option::of((0u64..200, 0u64..200));
    (stream, tools, tenant, range).prop_map(|(stream, has_tools, tenant, range)| When {
        stream,
        has_tools,
        tenants: tenant.map(|tenant| vec![TenantId::from(tenant)]),
        max_tokens: range.map(|(low, width)| within(low, low + width)),
        ..When::default()
    })
}

proptest! {
    #[test]
    fn the_first_rule_that_fits_decides_and_the_explanation_agrees(
        whens in proptest::collection::vec((0usize..4, any_when()), 0..6),
        allowed in proptest::collection::vec(any::<bool>(), 5),
        readable in proptest::bool::weighted(0.9),
    ) {
        let mut sample = sample();
        sample.facts.as_mut().unwrap().readable = readable;
        let names = ["a", "b", "c", "d", "default"];
        let may_use = |class: &ClassId| {
            names.iter().position(|name| *name == class.as_str()).is_some_and(|at| allowed[at])
        };
        let rules: Vec<(ClassId, When)> =
            whens.iter().map(|(name, when)| (ClassId::from(names[*name]), when.clone())).collect();

        // Reference implementation: each rule alone, in order.
        let alone = |when: &When| sample.fits(when.clone());
        let first = rules.iter().position(|(class, when)| alone(when) && may_use(class));
        let expected = match first {
            Some(at) => Ok(Classified { class: rules[at].0.clone(), rule: format!("rule {}", at + 1).into() }),
            None if may_use(&"default".into()) => Ok(Classified { class: "default".into(), rule: "default".into() }),
            None => Err(NotAllowed),
        };
        let compiled = Rules::new(rules, "default".into());
        prop_assert_eq!(compiled.class_of(&sample.ask(), may_use), expected);

        let said = compiled.explain(&sample.ask(), may_use);
        prop_assert_eq!(said.iter().position(|rule| rule.said == ConditionResult::Matched), first);
        if let Some(at) = first {
            prop_assert!(said[at + 1..].iter().all(|rule| rule.said == ConditionResult::NotReached));
        }
    }
}

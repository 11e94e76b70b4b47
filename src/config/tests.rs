use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;
use secrecy::ExposeSecret;

use super::url::engine_address;
use super::*;
use crate::admit::limit::settings::{Allowance, Rate};
use crate::admit::overload_control::{Action, LoadBounds};
use crate::admit::queue::{self, PrefillBudget, Shares, WhenHopeless};
use crate::admit::redis::settings::{LimitsStore, OnFailure, Redis, RedisAddress};
use crate::judge::{Assumption, NonStreaming, Objective, Quantiles, TtftCounts};
use crate::record::journal::HashKey;
use crate::record::settings::RequestLabel;
use crate::record::trace::Sampling;
use crate::route::settings::{Balance, Concurrency, EngineKind, EngineSource};
use crate::types::Tokens;

/// Variables and files of a test.
#[derive(Clone, Default)]
struct Made {
    variables: HashMap<&'static str, &'static str>,
    files: HashMap<&'static str, String>,
}

impl Environment for Made {
    fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).map(|value| (*value).to_owned())
    }
    fn file(&self, path: &Path) -> io::Result<Vec<u8>> {
        let found = path.to_str().and_then(|path| self.files.get(path));
        found.map(|text| text.clone().into_bytes()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn hash(key: &str) -> String {
    blake3::hash(key.as_bytes()).to_hex().to_string()
}

fn made() -> Made {
    let signed = || rcgen::generate_simple_self_signed(vec!["engine".to_owned()]).unwrap();
    let (own, certificate) = (signed(), signed().cert.pem());
    let variables = HashMap::from([
        ("PORT", "8123"),
        ("CANARY", "sk-CANARY3"),
        ("YES", "true"),
        ("NOTHING", ""),
        ("NOT_A_URL", "gpu-SECRET:8000"),
        ("LATE", "10x-SECRET"),
    ]);
    let files = HashMap::from([
        ("admin.token", "tok-1\n".to_owned()),
        ("engine.key", "sk-engine\n".to_owned()),
        ("journal.key", "0123456789abcdef-CANARY\n".to_owned()),
        ("engine-ca.pem", certificate),
        ("acme.keys", format!("# ours\n{} file\n\n{}\n", hash("f1"), hash("f2"))),
        ("tls.crt", own.cert.pem()),
        ("tls.key", own.signing_key.serialize_pem()),
        ("other.key", signed().signing_key.serialize_pem()),
        ("empty", String::new()),
        ("two words", "a b".to_owned()),
        ("bad.keys", "sk-CANARY1 prod\n".to_owned()),
        ("good.headers", "# ours\n\nAuthorization: Basic CANARY\nx-scope:  a:b \n".to_owned()),
        ("bad.headers", "a: b\nCANARY\n".to_owned()),
        ("our.headers", "Content-Type: text/plain\n".to_owned()),
    ]);
    Made { variables, files }
}

const BASE: &str = "\
slo_classes:
  - slo_class: chat
    joint_attainment_target: 0.9
  - slo_class: batch
    joint_attainment_target: 0.9
default_class: chat
classify:
  - {class: batch, when: {stream: false}}
pools:
  - pool: main
    engines: [{url: http://e:1}]
";

/// The problems of a text, as printed.
fn problems(text: &str) -> Vec<String> {
    match load(text, &made()) {
        Ok(_) => Vec::new(),
        Err(problems) => problems.iter().map(ToString::to_string).collect(),
    }
}

fn good(text: &str) -> Settings {
    load(text, &made()).unwrap_or_else(|problems| panic!("{problems:#?}"))
}

/// The base with one line changed, and lines appended.
fn changed(from: &str, to: &str) -> String {
    assert!(BASE.contains(from), "{from}");
    BASE.replacen(from, to, 1)
}

fn and(more: &str) -> String {
    format!("{BASE}{more}\n")
}

/// The base with more keys in its first class.
fn class(more: &str) -> String {
    changed("chat\n    joint", &format!("chat\n    {more}\n    joint"))
}

/// The base with more keys in its pool.
fn pool(more: &str) -> String {
    changed("    engines", &format!("    {more}\n    engines"))
}

fn store(redis: &str) -> String {
    and(&format!("limits_store: {{redis: {redis}}}"))
}

fn journal(keys: &str) -> String {
    and(&format!("telemetry: {{journal: {keys}}}"))
}

fn otlp(keys: &str) -> String {
    and(&format!("telemetry: {{otlp: {keys}}}"))
}

fn rule(when: &str) -> String {
    changed("{stream: false}", when)
}

/// The base with one more class.
fn third(name: &str) -> String {
    changed("default_class", &format!("  - slo_class: {name}\n    joint_attainment_target: 0.9\ndefault_class"))
}

/// The base with seats in its pool and this queue.
fn queue(keys: &str) -> String {
    pool(&format!("max_concurrency_per_engine: 8\n    queue: {keys}"))
}

/// The base with these levels of its first class.
fn degrade(levels: &str) -> String {
    class(&format!("degrade: [{levels}]"))
}

/// The base with a TLS listener.
fn listen_tls(certificate: &str, key: &str) -> String {
    and(&format!("listen: {{tls: {{certificate_file: {certificate}, private_key_file: {key}}}}}"))
}

/// The base with a tenant with these limits.
fn limits(keys: &str) -> String {
    tenants(&format!("  - {{tenant: a, limits: {keys}, keys: [{{blake3: \"{}\"}}]}}", hash("k")))
}

fn tenants(list: &str) -> String {
    and(&format!("tenants:\n{list}"))
}

// ---- what loads ---------------------------------------------------------------------------

#[test]
fn the_base_of_these_tests_has_no_problem() {
    let settings = good(BASE);
    assert_eq!(settings.listen, Listen::default());
    assert_eq!(settings.notes, []);
}

#[test]
fn an_slo_document_loads_unchanged() {
    let block = "
slo_class: chat_interactive
objectives:
  ttft_seconds: {threshold: 1.2, attainment: 0.95}
  tpot_seconds: {threshold: 0.05, attainment: 0.95}
joint_attainment_target: 0.92   # both must hold on the same request
window: 28d
workload_assumption:
  input_tokens: {p50: 900, p95: 6000}
  output_tokens: {p50: 350, p95: 1500}
";
    let indented = block.trim().replace('\n', "\n    ");
    let settings = good(&format!(
        "slo_classes:\n  - {indented}\ndefault_class: chat_interactive\n\
         pools: [{{pool: p, engines: [{{url: http://e:1}}]}}]\n"
    ));
    let class = &settings.classes[0];
    let objective = |millis, attainment| Some(Objective { threshold: Duration::from_millis(millis), attainment });
    let quantiles = |p50, p95| Some(Quantiles { p50: Tokens(p50), p95: Tokens(p95) });
    let expected = Objectives {
        ttft: objective(1200, 0.95),
        tpot: objective(50, 0.95),
        joint_target: 0.92,
        window: Duration::from_secs(28 * 24 * 3600),
        assumed: Some(Assumption { input_tokens: quantiles(900, 6000), output_tokens: quantiles(350, 1500) }),
        ..Objectives::default()
    };
    assert_eq!(class.objectives, expected);
    assert_eq!((class.priority, class.timeouts), (Priority::Normal, Timeouts::default()));
}

#[test]
fn config_minimal_loads() {
    let settings = good(include_str!("../../config/minimal.yaml"));
    assert_eq!(settings.default_class, "chat".into());
    let routed = settings.routes.find(Some("anything"), &"chat".into()).unwrap();
    assert_eq!(routed.pools.as_ref(), [PoolId::from("main")]);
    assert_eq!(routed.model_label.as_ref(), "other");
    assert!(settings.tenants.may_use(&TenantId::anonymous(), &"chat".into()));
    assert_eq!(settings.notes, []);
}

#[test]
fn config_goodput_loads_completely() {
    let settings = good(include_str!("../../config/goodput.yaml"));
    assert_eq!(settings.listen, Listen::default(), "the example names the defaults");
    assert_eq!(settings.shutdown, Shutdown { drain: Duration::from_secs(80), ..Shutdown::default() });
    assert_eq!(settings.buckets, LengthBuckets::default());
    assert_eq!(settings.judged_paths[0].path(), "/v1/embeddings");
    assert_eq!(settings.classes.len(), 5);
    let voice = settings.class(&"voice".into()).unwrap();
    assert_eq!(voice.priority, Priority::Critical);
    assert_eq!(voice.target_headers, TargetHeaders::Tighten);
    assert_eq!(voice.objectives.default_output_tokens, Some(Tokens(512)));
    let seconds = Duration::from_secs;
    let limits = Timeouts {
        first_token: seconds(5),
        idle: seconds(10),
        total: seconds(120),
        response_head: seconds(120),
        hold_head: seconds(2),
        keepalive: Some(seconds(1)),
    };
    assert_eq!(voice.timeouts, limits);
    let queue = ClassQueue { max_wait: Duration::from_millis(300), when_hopeless: WhenHopeless::Demote };
    assert_eq!(voice.queue, queue);
    let actions: Vec<Action> = voice.degrade.iter().map(|level| level.action).collect();
    assert_eq!(actions, [Action::ShedLower, Action::CapOutput(Tokens(300)), Action::ReasoningOff, Action::Spill]);
    let (first, third) = (voice.degrade[0], voice.degrade[2]);
    assert_eq!((first.leave.queue_wait, first.hold), (Some(Duration::from_millis(75)), OverloadLevel::HOLD));
    let leave = LoadBounds { burn_rate: Some(2.0), queue_wait: None, queue_depth: Some(50) };
    assert_eq!(third.leave, leave, "what is not written is half of what enters it");
    let interactive = settings.pool(&"interactive".into()).unwrap();
    assert!(interactive.engine_priority);
    assert_eq!(interactive.concurrency, Concurrency::Fixed(64.try_into().unwrap()));
    assert_eq!(interactive.queue, queue::QueueSettings::default(), "the example names the defaults");
    let defaults = PoolSettings::with_defaults("interactive".into(), interactive.engines.clone());
    assert_eq!(interactive.retries, defaults.retries);
    assert_eq!(interactive.breaker, defaults.breaker);
    assert_eq!(interactive.health, defaults.health);
    assert_eq!(interactive.metrics, defaults.metrics);
    assert_eq!(interactive.cool_down, defaults.cool_down);
    assert_eq!(interactive.inject, defaults.inject);
    assert!(matches!(&settings.pools[1].engines, EngineSource::Dns(dns) if dns.port == 8000));
    let batch = &settings.pools[2];
    assert_eq!((batch.kind, &batch.balance), (EngineKind::Sglang, &Balance::RoundRobin));
    assert!(batch.health.is_none() && batch.metrics.is_none() && batch.breaker.is_none());
    assert_eq!(settings.routes.alias("gpt-4o"), Some("llama-3-70b"));
    assert!(!settings.tenants.may_use(&"acme".into(), &"voice".into()));
    let acme = settings.tenants.get(&"acme".into()).unwrap();
    let rate = |per_minute, burst| Some(Rate::new(per_minute, Some(burst)).unwrap());
    let whole = Allowance {
        tokens: rate(600_000, 200_000),
        requests: rate(1200, 100),
        concurrent_requests: 64.try_into().ok(),
        ..Allowance::default()
    };
    assert_eq!(acme.limits.whole, whole);
    let of_model =
        Allowance { input_tokens: rate(200_000, 100_000), output_tokens: rate(50_000, 50_000), ..Allowance::default() };
    assert_eq!(acme.limits.models["llama-3-70b"], of_model);
    assert!(settings.tenants.get(&"ivr".into()).unwrap().limits.is_empty());
    assert_eq!(settings.notes, []);
}

/// The example's commented keys are valid too.
#[test]
fn config_goodput_loads_with_its_commented_keys() {
    let text = include_str!("../../config/goodput.yaml");
    let is_key = |line: &str| {
        let word = line.split(':').next().unwrap_or("");
        line.contains(": ") && word.chars().all(|c| c.is_ascii_lowercase() || c == '_')
    };
    let mut uncommented = 0;
    let lines = text.lines().map(|line| match line.trim_start().strip_prefix("# ") {
        Some(rest) if line.starts_with("  ") && is_key(rest) => {
            uncommented += 1;
            line.replacen("# ", "", 1)
        }
        _ => line.to_owned(),
    });
    let text = lines.collect::<Vec<_>>().join("\n");
    assert_eq!(uncommented, 11);
    let settings = good(&text);
    assert!(settings.listen.tls.is_some());
    assert_eq!(settings.admin.unwrap().token.unwrap().expose_secret(), "tok-1");
    let pool = &settings.pools[0];
    assert_eq!(pool.api_key.as_ref().unwrap().expose_secret(), "sk-engine");
    assert_eq!(pool.roots.as_ref().unwrap().len(), 1);
    assert_eq!(pool.queue.reading, PrefillBudget::Auto);
    let mut headers = http::HeaderMap::new();
    headers.insert("x-api-key", http::HeaderValue::from_static("f1"));
    let who = settings.keyring.find(&headers).unwrap();
    assert_eq!((who.tenant.as_str(), who.key_label.as_deref()), ("acme", Some("file")));
    let files: Vec<_> = settings.files.iter().map(|path| path.to_str().unwrap()).collect();
    assert_eq!(files.len(), 4, "a certificate is renewed without a reload: {files:?}");
}

#[test]
fn a_variable_is_replaced_by_its_value() {
    let settings = good(&format!(
        "listen: {{address: \"127.0.0.1:${{PORT}}\", max_connections: \"${{PORT}}\"}}\n{}",
        pool("inject: {usage: \"${YES}\"}\n    engine: {headers: {x-key: \"Key ${CANARY}\", x-raw: \"$${CANARY}\"}}")
    ));
    assert_eq!(settings.listen.address.port(), 8123);
    assert_eq!(settings.listen.max_connections, 8123);
    let headers = &settings.pools[0].headers;
    assert_eq!(headers[0].1, "Key sk-CANARY3");
    assert_eq!(headers[1].1, "${CANARY}");
    assert!(!format!("{settings:?}").contains("CANARY3"));
}

#[test]
fn anchors_and_merges_are_fine() {
    let text = "
slo_classes:
  - &first
    slo_class: chat
    objectives: &fast {ttft_seconds: {threshold: 1, attainment: 0.9}}
    joint_attainment_target: 0.9
  - {<<: *first, slo_class: batch, priority: low}
default_class: chat
classify: [{class: batch, when: {stream: false}}]
pools: [{pool: main, engines: [{url: http://e:1}]}]
";
    let settings = good(text);
    assert_eq!(settings.classes[1].objectives, settings.classes[0].objectives);
    assert_eq!(settings.classes[1].priority, Priority::Low);
}

#[test]
fn aliases_are_followed_to_the_end() {
    let settings = good(&and("models: {aliases: {a: b, b: c}}"));
    assert_eq!(settings.aliases["a"], "c");
    assert_eq!(settings.aliases["b"], "c");
}

#[test]
fn missing_keys_have_their_defaults() {
    let settings = good(&class("non_streaming: excluded\n    ttft_counts: first_visible_token"));
    assert_eq!(settings.classes[0].objectives.non_streaming, NonStreaming::Excluded);
    assert_eq!(settings.classes[0].objectives.ttft_counts, TtftCounts::FirstVisibleToken);
    assert_eq!(settings.admin.unwrap().address.to_string(), "127.0.0.1:9090");
    assert_eq!(settings.replicas, 1);
    let pool_of_base = &good(BASE).pools[0];
    assert_eq!(pool_of_base.concurrency, Concurrency::Unlimited);
    assert!(!pool_of_base.engine_priority);
    assert_eq!(good(&class("queue: {max_wait: 0s}")).classes[0].queue.max_wait, Duration::ZERO);
    let some = good(&pool("max_concurrency_per_engine: 8\n    queue: {shares: {batch: 0.1}}"));
    let shares = Shares::new([500, 200, 100, 50, 100]).unwrap();
    assert_eq!(some.pools[0].queue, queue::QueueSettings { shares, ..queue::QueueSettings::default() });
    let reading = |word: &str| good(&queue(&format!("{{prefill_tokens_per_engine: {word}}}"))).pools[0].queue.reading;
    assert_eq!((some.pools[0].queue.reading, reading("auto")), (PrefillBudget::Auto, PrefillBudget::Auto));
    assert_eq!((reading("off"), reading("512")), (PrefillBudget::NoLimit, PrefillBudget::Tokens(Tokens(512))));
    let total = good(&class("timeouts: {total: 90s}"));
    assert_eq!(total.classes[0].timeouts.response_head, Duration::from_secs(90), "as total");
    let generic = good(&pool("engine: {kind: generic}"));
    assert!(!generic.pools[0].inject.usage);
    assert!(generic.pools[0].metrics.is_none());
    assert!(good(&and("admin: off")).admin.is_none());
    assert_eq!(good(&and("telemetry: {access_log: off}")).access_log, AccessLog::Off);
    let labels = |text: &str| good(&and(&format!("telemetry: {{{text}}}"))).labels;
    assert_eq!(labels("access_log: off"), MetricLabels::default());
    let dropped = |labels: &[RequestLabel]| MetricLabels { dropped: labels.to_vec(), ..MetricLabels::default() };
    assert_eq!(labels("drop_labels: tenant"), dropped(&[RequestLabel::Tenant]));
    assert_eq!(labels("drop_labels: [length, pool]"), dropped(&[RequestLabel::Length, RequestLabel::Pool]));
    assert!(labels("histograms_by_model: true").histograms_by_model);
    assert!(labels("series_by_engine: true").series_by_engine && !labels("drop_labels: tenant").series_by_engine);
}

#[test]
fn responses_that_the_drain_would_cut_are_reported() {
    let notes = |text: &str| good(text).notes.iter().map(ToString::to_string).collect::<Vec<_>>();
    let slow = |shutdown: &str| {
        notes(
            &class("objectives: {e2e_seconds: {threshold: 90, attainment: 0.9}}")
                .replace("default_class", &format!("{shutdown}default_class")),
        )
    };
    assert!(notes(BASE).is_empty());
    let told = slow("shutdown: {drain: 1m}\n");
    assert!(
        told[0].contains("shutdown.drain: `drain` (60s) cuts responses of the class chat that may take 90s and meet their objectives; give it 90s"),
        "{told:?}"
    );
    assert!(slow("")[0].starts_with("1:1: shutdown: `drain` (60s) cuts"), "by default, too");
    assert!(slow("shutdown: {drain: 90s}\n").is_empty());
    // Nobody has said how long answers are.
    let unknown =
        "objectives: {ttft_seconds: {threshold: 1, attainment: 0.9}, tpot_seconds: {threshold: 0.2, attainment: 0.9}}";
    assert!(notes(&class(unknown)).is_empty());
    let stated = format!("{unknown}\n    default_output_tokens: 400");
    assert!(notes(&class(&stated))[0].contains("that may take 80.8s"), "{:?}", notes(&class(&stated)));
    let compared = notes(&and("shutdown: {pre_stop: 3s}"));
    assert!(compared[0].contains("shutdown.pre_stop: is compared with nothing; add `grace_period`"), "{compared:?}");
    assert!(notes(&and("shutdown: {pre_stop: 3s, grace_period: 73s}")).is_empty());
}

#[test]
fn a_journal_is_read_with_its_key() {
    assert_eq!(good(BASE).journal, None);
    let plain = good(&journal("{path: logs/j.jsonl}"));
    assert_eq!(plain.journal, Some(JournalSettings::at("logs/j.jsonl".into())));
    assert!(plain.notes[0].to_string().contains("hashed with a random key of this process"), "{:?}", plain.notes);
    let full = good(&journal(
        "{path: j, hash_key_file: journal.key, max_size: 1MiB, max_age: 1h, keep: 3, gzip: false, flush: 200ms}",
    ));
    let expected = JournalSettings {
        path: "j".into(),
        hash_key: Some(HashKey::from_secret(b"0123456789abcdef-CANARY")),
        max_size: 1 << 20,
        max_age: Duration::from_secs(3600),
        keep: 3,
        gzip: false,
        flush: Duration::from_millis(200),
    };
    assert_eq!(full.journal, Some(expected));
    assert!(full.notes.is_empty() && !format!("{full:?}").contains("CANARY"));
}

#[test]
fn counts_of_classes_are_kept_in_the_configured_file() {
    let state = |text: &str| good(&and(&format!("telemetry: {{{text}}}"))).slo_state;
    let kept = |every| Some(SloStateSettings { path: "slo.state".into(), every: Duration::from_secs(every) });
    assert_eq!(state("access_log: off"), None);
    assert_eq!(state("slo_state: {path: slo.state}"), kept(60));
    assert_eq!(state("slo_state: {path: slo.state, every: 5s}"), kept(5));
}

#[test]
fn a_prometheus_is_read_with_its_token_and_labels() {
    let source = |text: &str| good(&and(&format!("telemetry: {{prometheus: {text}}}")));
    let plain = source("{url: \"http://prometheus:9090\"}").prometheus.unwrap();
    assert_eq!((&*plain.address.host, plain.address.port, &*plain.address.base), ("prometheus", 9090, ""));
    assert_eq!((plain.every.as_secs(), plain.timeout.as_secs()), (60, 10));
    assert!(plain.headers.is_empty() && plain.select.is_empty() && plain.roots.is_none());
    let full = source(
        "{url: \"https://mimir/prometheus/api/v1/query\", token_file: admin.token, ca_file: engine-ca.pem, every: 15s, timeout: 3s, select: {cluster: eu}}",
    );
    let found = full.prometheus.as_ref().unwrap();
    assert_eq!((&*found.address.host, found.address.port, &*found.address.base), ("mimir", 443, "/prometheus"));
    assert!(found.headers[0].1.to_str().unwrap().starts_with("Bearer ") && found.headers[0].1.is_sensitive());
    assert_eq!((found.roots.as_ref().unwrap().len(), found.select.clone()), (1, vec![("cluster".into(), "eu".into())]));
    assert!(!format!("{full:?}").contains(found.headers[0].1.to_str().unwrap()));
    assert_eq!(good(BASE).fixed_differences(&full), ["telemetry.prometheus"]);
}

#[test]
fn a_collector_is_read_with_its_headers() {
    let plain = good(&otlp("{endpoint: \"http://collector:4318\"}")).otlp.unwrap();
    let address = engine_address("http://collector:4318").unwrap();
    let sampling = Sampling { ratio: 0.01, follow_parent: true };
    assert_eq!(plain, OtlpSettings { address, headers: vec![], roots: None, sampling, resource: vec![] });
    for (url, base) in
        [("https://c/v1/traces", ""), ("https://c/otlp/v1/traces/", "/otlp"), ("https://c/otlp/", "/otlp")]
    {
        let found = good(&otlp(&format!("{{endpoint: \"{url}\"}}"))).otlp.unwrap().address;
        assert_eq!((&*found.host, found.port, &*found.base), ("c", 443, base), "{url}");
    }
    let full = good(&otlp(
        "{endpoint: \"https://c\", headers_file: good.headers, ca_file: engine-ca.pem, ratio: 0.5, follow_parent: false, resource: {service.name: edge, k8s.cluster.name: eu}}",
    ));
    let found = full.otlp.as_ref().unwrap();
    let headers: Vec<_> = found.headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    assert_eq!(headers, [("authorization", "Basic CANARY"), ("x-scope", "a:b")]);
    assert_eq!(found.sampling, Sampling { ratio: 0.5, follow_parent: false });
    assert_eq!(found.roots.as_ref().unwrap().len(), 1);
    let resource =
        [("service.name", "edge"), ("k8s.cluster.name", "eu")].map(|(key, value)| (key.into(), value.into()));
    assert_eq!(found.resource, resource);
    assert!(!format!("{full:?}").contains("CANARY"));
}

#[test]
fn a_store_of_limits_is_read_with_its_secrets() {
    assert_eq!(good(&and("limits_store: memory")).limits_store, LimitsStore::Memory);
    assert_eq!(good(BASE).limits_store, LimitsStore::Memory);
    let redis = |settings: Settings| match settings.limits_store {
        LimitsStore::Redis(redis) => *redis,
        LimitsStore::Memory => panic!("a store was written"),
    };
    let plain = redis(good(&store("{url: \"redis://store:6380/2\"}")));
    assert_eq!(plain, Redis::at(RedisAddress::read("redis://store:6380/2").unwrap()));
    let full = redis(good(&store(
        "{url: \"rediss://gateway@store\", password_file: engine.key, on_failure: closed, timeout: 20ms, key_prefix: eu}",
    )));
    let expected = Redis {
        address: RedisAddress::read("rediss://gateway:sk-engine@store").unwrap(),
        on_failure: OnFailure::Closed,
        timeout: Duration::from_millis(20),
        key_prefix: "eu".into(),
    };
    assert_eq!(full, expected);
    assert!(!format!("{full:?}").contains("sk-engine"));
    let hidden = redis(good(&store("{url: \"redis://:${CANARY}@store\"}")));
    assert!(hidden.address.has_password() && !format!("{hidden:?}").contains("CANARY3"));
    assert!(good(&store("{url: \"redis://store\"}")).notes[0].to_string().contains("no tenant has limits"));
    let two = problems(&store("{url: \"redis://:${CANARY}@store\", password_file: engine.key}"));
    assert!(two.len() == 1 && two[0].contains("stands here and in `password_file`"), "{two:?}");
}

#[test]
fn a_changed_companion_is_another_hash() {
    let text = tenants("  - {tenant: a, keys_file: acme.keys}");
    let mut made = made();
    let before = load(&text, &made).unwrap().hash;
    assert_eq!(load(&text, &made).unwrap().hash, before);
    made.files.insert("acme.keys", hash("g"));
    assert_ne!(load(&text, &made).unwrap().hash, before);
}

#[test]
fn keys_that_need_a_restart_are_named() {
    let before = good(BASE);
    let after = good(&and("listen: {address: 0.0.0.0:1}\nadmin: off"));
    assert_eq!(before.fixed_differences(&before), Vec::<&str>::new());
    assert_eq!(before.fixed_differences(&after), ["listen.address", "admin.address"]);
    let after = good(&and(
        "shutdown: {drain: 1s}\ntelemetry: {access_log: off, journal: {path: j}, otlp: {endpoint: 'http://c'}}",
    ));
    assert_eq!(
        before.fixed_differences(&after),
        ["shutdown", "telemetry.access_log", "telemetry.journal", "telemetry.otlp"]
    );
    let after = good(&store("{url: \"redis://store\"}"));
    assert_eq!(before.fixed_differences(&after), ["limits_store"]);
    let after = good(&and("telemetry: {slo_state: {path: slo.state}}"));
    assert_eq!(before.fixed_differences(&after), ["telemetry.slo_state"]);
}

#[test]
fn a_rule_may_test_a_value_beyond_ascii() {
    good(&changed("{stream: false}", "{header: {x-a: [é, \"a\\tb\"], x-b: {prefix: \"ü \"}}}"));
}

// ---- what does not ------------------------------------------------------------------------

/// Each kind of problem: a text, and its only problem as printed.
#[test]
fn each_kind_of_problem() {
    let blake = hash("k");
    let key = |more: &str| format!("  - {{tenant: a, keys: [{{blake3: \"{blake}\"{more}}}]}}");
    let table: Vec<(String, &str)> = vec![
        // keys
        (changed("classify:", "clasify:"), "7:1: unknown key `clasify`; did you mean `classify`?"),
        (and("clasify: []"), "12:1: unknown key `clasify`; valid keys are: listen"),
        (and("zzz: 1"), "12:1: unknown key `zzz`; valid keys are: listen, shutdown"),
        (pool("health: off\n    helth: off"), "12:5: pools[0]: unknown key `helth`; valid keys are: pool, engines"),
        (pool("helth: off"), "11:5: pools[0]: unknown key `helth`; did you mean `health`?"),
        (and("replicas: 1\nreplicas: 2"), "13:1: the key `replicas` is repeated, first on line 12; keep one"),
        (class("priority: low\n    priority: low"), "4:5: slo_classes[0]: the key `priority` is repeated"),
        (and("1: x"), "12:1: a key is a number; write the key as text"),
        (and("tenants:"), "12:8: tenants: is empty; write a list, or remove the key"),
        (changed("default_class: chat\n", ""), "1:1: `default_class` is missing; add `default_class`"),
        (
            changed("  - slo_class: batch\n    joint", "  - slo_class: batch\n    # joint"),
            "4:5: slo_classes[1]: `joint_attainment_target` is missing",
        ),
        // types
        (changed("[{url: http://e:1}]", "http://e:1"), "11:14: pools[0].engines: is text; write a list"),
        (and("listen: 8080"), "12:9: listen: is a number; write a mapping with the keys"),
        (class("priority: 3"), "3:15: slo_classes[0].priority: is a number; write one of: critical, high"),
        (class("priority: hihg"), "3:15: slo_classes[0].priority: \"hihg\" is not a valid value; did you mean high?"),
        (third("7"), "6:16: slo_classes[2].slo_class: is a number; write it in quotes"),
        (rule("{stream: no}"), "8:35: classify[0].when.stream: \"no\" is not a boolean; write true or false"),
        (and("replicas: 1.5"), "12:11: replicas: 1.5 is not a non-negative integer"),
        (and("replicas: -1"), "12:11: replicas: -1 is not a non-negative integer"),
        (and("replicas: \"2\""), "12:11: replicas: is text; write an integer"),
        (and("replicas: 0"), "12:11: replicas: 0 is out of range; write a number from 1 to 1000"),
        (class("stall_seconds: .inf"), "3:20: slo_classes[0].stall_seconds: is not finite"),
        (class("window: 28"), "3:13: slo_classes[0].window: 28 has no unit; put one behind it: ms, s, m, h, d or w"),
        (class("window: 28 days"), "3:13: slo_classes[0].window: \"28 days\" is not a duration; write a duration"),
        (
            class("window: 28s"),
            "3:13: slo_classes[0].window: the window is out of range; write a window from 1h to 366d",
        ),
        (and("listen: {max_body: lots}"), "12:20: listen.max_body: \"lots\" is not a size"),
        (and("listen: {max_body: 3}"), "12:20: listen.max_body: the size is out of range; write a size from 1.0 KiB"),
        (and("listen: {header_timeout: 0s}"), "12:26: listen.header_timeout: 0 is not a positive duration"),
        (class("keepalive_seconds: \"\""), "3:24: slo_classes[0].keepalive_seconds: is text; write a number"),
        (third("\"\""), "6:16: slo_classes[2].slo_class: is empty"),
        // variables
        (and("replicas: \"${NOBODY}\""), "12:11: replicas: the variable NOBODY is not set; set it"),
        (and("replicas: \"${NO-BODY}\""), "12:11: replicas: holds a `${` that names no variable; write ${NAME}"),
        (and("replicas: \"${LATE}\""), "12:11: replicas: is text; write an integer"),
        (class("window: \"${LATE}\""), "3:13: slo_classes[0].window: the value does not fit; write a duration"),
        (
            pool("engine: {headers: {x-key: \"Bearer ${NOTHING}\"}}"),
            "11:31: pools[0].engine.headers.x-key: the variable NOTHING is empty; give it a value in the environment",
        ),
        (third("\"${NOTHING}\""), "6:16: slo_classes[2].slo_class: the variable NOTHING is empty; give it a value"),
        // listeners
        (
            and("listen: {address: localhost:80}"),
            "12:19: listen.address: \"localhost:80\" is not an address; did you mean 127.0.0.1:80?",
        ),
        (
            and("listen: {address: \"localhost:http\"}"),
            "12:19: listen.address: \"localhost:http\" is not an address; write an IP address and a port",
        ),
        (
            and("listen: {address: \"0.0.0.0:9090\"}"),
            "12:19: listen.address: the admin port listens there (127.0.0.1:9090) unless `admin` says otherwise; give",
        ),
        (
            and("admin: {token_file: admin.token}\nlisten: {address: \"127.0.0.1:9090\"}"),
            "12:8: admin: clients and operators would share one address",
        ),
        (
            and("listen: {address: \"${CANARY}\"}"),
            "12:19: listen.address: the value of the variable is not an address; write an IP",
        ),
        (
            and("admin: {address: 127.0.0.1:8080}"),
            "12:18: admin.address: clients and operators would share one address",
        ),
        (
            and("admin: {token_file: nowhere}"),
            "12:21: admin.token_file: the file \"nowhere\" cannot be read (entity not found)",
        ),
        (and("admin: {token_file: empty}"), "12:21: admin.token_file: the file \"empty\" holds no secret"),
        (and("admin: {token_file: two words}"), "12:21: admin.token_file: the file \"two words\" holds no secret"),
        (and("admin: true"), "12:8: admin: is true; write a mapping, or `off`; without the key the defaults hold"),
        (
            and("telemetry: {drop_labels: model, histograms_by_model: true}"),
            "12:54: telemetry.histograms_by_model: is true, but drop_labels omits the label model; leave the label in, or remove this key",
        ),
        (and("telemetry: {slo_state: {every: 5s}}"), "12:24: telemetry.slo_state: `path` is missing"),
        (
            and("telemetry: {slo_state: {path: slo.state, every: 10ms}}"),
            "12:49: telemetry.slo_state.every: the file would be written all the time; write 1s or more",
        ),
        (and("telemetry: {prometheus: {every: 5s}}"), "12:25: telemetry.prometheus: `url` is missing"),
        (
            and("telemetry: {prometheus: {url: \"http://p:9090\", every: 10ms}}"),
            "telemetry.prometheus.every: Prometheus would be asked all the time; write 1s or more",
        ),
        (
            and("telemetry: {prometheus: {url: \"http://p:9090\", select: {a-b: c}}}"),
            "telemetry.prometheus.select.a-b: \"a-b\" cannot be the name of a label; use letters, digits and _",
        ),
        (
            and(
                "telemetry: {prometheus: {url: \"http://p:9090\", token_file: admin.token, headers_file: good.headers}}",
            ),
            "telemetry.prometheus.token_file: `headers_file` sets authorization, too; remove one of the two",
        ),
        (
            and("telemetry: {prometheus: {url: \"http://me:pw@p:9090\"}}"),
            "telemetry.prometheus.url: the URL carries credentials; they belong into `headers_file`; write http://host:9090",
        ),
        (and("telemetry: {slo_state: {path: state/}}"), "12:31: telemetry.slo_state.path: \"state/\" is not a file"),
        (and("telemetry: {access_log: true}"), "12:25: telemetry.access_log: is true; write one of: stdout, off"),
        (
            rule("{reasoning: true}"),
            "8:38: classify[0].when.reasoning: is true; write one of: none, low, medium, high, on; `on` in quotes where",
        ),
        (
            queue("{prefill_tokens_per_engine: true}"),
            "pools[0].queue.prefill_tokens_per_engine: is true; write an integer",
        ),
        (and("admin: on"), "12:8: admin: is text; write a mapping, or `off`"),
        (and("listen: {tls: {certificate_file: a}}"), "12:15: listen.tls: `private_key_file` is missing"),
        (
            listen_tls("nowhere.crt", "tls.key"),
            "12:34: listen.tls.certificate_file: the file \"nowhere.crt\" cannot be read (entity not found); give the file",
        ),
        (
            listen_tls("tls.crt", "nowhere.key"),
            "12:61: listen.tls.private_key_file: the file \"nowhere.key\" cannot be read (entity not found)",
        ),
        (
            listen_tls("empty", "tls.key"),
            "12:34: listen.tls.certificate_file: the file \"empty\" holds no certificate in PEM; write the certificate",
        ),
        (
            listen_tls("tls.crt", "tls.crt"),
            "12:61: listen.tls.private_key_file: the file \"tls.crt\" holds no private key in PEM; write the",
        ),
        (
            listen_tls("tls.crt", "other.key"),
            "12:61: listen.tls.private_key_file: the key in \"other.key\" is not that of the certificate in \"tls.crt\"; name",
        ),
        (
            and("inspect: {judged_paths: [/v1/embedings]}"),
            "12:26: inspect.judged_paths[0]: \"/v1/embedings\" is not a path relayed to engines; did you mean /v1/embeddings?",
        ),
        (
            and("inspect: {judged_paths: [/v1/mesages]}"),
            "12:26: inspect.judged_paths[0]: \"/v1/mesages\" is not a path relayed to engines; name one of: /v1/",
        ),
        (
            and("inspect: {judged_paths: [/v1/messages]}"),
            "12:26: inspect.judged_paths[0]: \"/v1/messages\" is judged anyway",
        ),
        // classes
        (
            class("objectives: {ttft_seconds: {threshold: 0, attainment: 0.9}}"),
            "3:44: slo_classes[0].objectives.ttft_seconds.threshold: 0 can never be met; give a positive number of seconds, or leave it out",
        ),
        (
            class("objectives: {ttft_seconds: {threshold: -1, attainment: 0.9}}"),
            "3:44: slo_classes[0].objectives.ttft_seconds.threshold: -1 can never be met",
        ),
        (
            class("objectives: {ttft_seconds: {threshold: 1, attainment: 95}}"),
            "3:59: slo_classes[0].objectives.ttft_seconds.attainment: 95 is not a share; shares are at most 1: did you mean 0.95?",
        ),
        (
            class("objectives: {ttft_seconds: {threshold: 1, attainment: 99.9}}"),
            "3:59: slo_classes[0].objectives.ttft_seconds.attainment: 99.9 is not a share; shares are at most 1: did you mean 0.999?",
        ),
        (
            class("objectives: {ttft_seconds: {threshold: 1, attainment: 1.5}}"),
            "3:59: slo_classes[0].objectives.ttft_seconds.attainment: 1.5 is not a share; write a number above 0, up to 1",
        ),
        (
            class("objectives: {ttft_seconds: {threshold: 1, attainment: 0}}"),
            "3:59: slo_classes[0].objectives.ttft_seconds.attainment: 0 is not a share; write a number above 0, up to 1",
        ),
        (
            class("objectives: {ttft_seconds: {threshold: 1}}"),
            "3:32: slo_classes[0].objectives.ttft_seconds: `attainment` is missing",
        ),
        (
            class("objectives: {ttft_seconds: {threshold: 400, attainment: 0.9}}"),
            "3:44: slo_classes[0].objectives.ttft_seconds.threshold: the threshold is beyond timeouts.first_token (120s), which cuts the request first; thresholds are in seconds",
        ),
        (
            class("objectives: {e2e_seconds: {threshold: 20, attainment: 0.9}}\n    timeouts: {total: 10s}"),
            "3:43: slo_classes[0].objectives.e2e_seconds.threshold: the threshold is beyond timeouts.total (10s)",
        ),
        (
            class("timeouts: {first_token: 20s, total: 10s}"),
            "3:29: slo_classes[0].timeouts.first_token: first_token is longer than total (10s)",
        ),
        (
            class("objectives: {ttft_seconds: {threshold: 20, attainment: 0.9}}\n    timeouts: {total: 10s}"),
            "3:44: slo_classes[0].objectives.ttft_seconds.threshold: the threshold is beyond timeouts.total (10s)",
        ),
        (
            class("objectives: {e2e_seconds: {threshold: 20, attainment: 0.9}}\n    timeouts: {response_head: 10s}"),
            "3:43: slo_classes[0].objectives.e2e_seconds.threshold: the threshold is beyond timeouts.response_head (10s)",
        ),
        (
            class("objectives: {itl_seconds: {threshold: 20, attainment: 0.9}}\n    timeouts: {total: 10s}"),
            "3:43: slo_classes[0].objectives.itl_seconds.threshold: the threshold is beyond timeouts.total (10s)",
        ),
        (
            class(
                "objectives: {ttft_seconds: {threshold: 1, attainment: 0.9}, tpot_seconds: {threshold: 0.1, attainment: 0.9}}\n    timeouts: {total: 10s}\n    workload_assumption: {output_tokens: {p50: 50, p95: 92}}",
            ),
            "5:57: slo_classes[0].workload_assumption.output_tokens.p95: a response of 92 tokens that meets TTFT and TPOT may take 10.1s, but timeouts.total (10s) cuts it first; raise timeouts.total, or lower what is assumed",
        ),
        (class("keepalive_seconds: 0"), "3:24: slo_classes[0].keepalive_seconds: 0 is not a positive duration"),
        (
            class("workload_assumption: {input_tokens: {p50: 9, p95: 3}}"),
            "3:41: slo_classes[0].workload_assumption.input_tokens: p50 is above p95",
        ),
        (class("default_output_tokens: 0"), "3:28: slo_classes[0].default_output_tokens: 0 is out of range"),
        (third("\"a b\""), "6:16: slo_classes[2].slo_class: \"a b\" cannot be a name"),
        (third("drill"), "6:16: slo_classes[2].slo_class: the name \"drill\" is reserved"),
        (third("chat"), "6:16: slo_classes[2].slo_class: the class \"chat\" is defined twice, first on line 2"),
        (and("length_buckets: {short: 10, medium: 10}"), "12:17: length_buckets: short (10) is not below medium (10)"),
        // rules
        (
            changed("default_class: chat", "default_class: caht"),
            "6:16: default_class: the class \"caht\" is not defined; did you mean chat?",
        ),
        (
            changed("{class: batch,", "{class: zzzzzz,"),
            "8:13: classify[0].class: the class \"zzzzzz\" is not defined; define it, or name one of: chat, batch",
        ),
        (changed("{class: batch, when: {stream: false}}", "{class: batch}"), "8:5: classify[0]: `when` is missing"),
        (
            rule("{tenant: acme}"),
            "8:35: classify[0].when.tenant: the tenant \"acme\" is not defined; define it, or name one of: anonymous",
        ),
        (rule("{key: prod}"), "8:32: classify[0].when.key: the key label \"prod\" is not defined"),
        (
            rule("{path: /v1/chat/completion}"),
            "8:33: classify[0].when.path: \"/v1/chat/completion\" is not a path relayed to engines; did you mean /v1/chat/completions?",
        ),
        (rule("{header: {\"a b\": c}}"), "8:36: classify[0].when.header.a b: \"a b\" is not a header name"),
        (
            rule("{header: {authorization: c}}"),
            "8:36: classify[0].when.header.authorization: a key may not stand in a rule",
        ),
        (
            rule("{header: {Cookie: {present: true}}}"),
            "8:36: classify[0].when.header.Cookie: a key may not stand in a rule",
        ),
        (rule("{header: {api-key: c}}"), "8:36: classify[0].when.header.api-key: a key may not stand in a rule"),
        (
            rule("{header: {proxy-authorization: c}}"),
            "8:36: classify[0].when.header.proxy-authorization: a key may not stand in a rule",
        ),
        (rule("{header: {x-a: \"b\\nc\"}}"), "8:41: classify[0].when.header.x-a: not a valid header value"),
        (
            rule("{header: {x-a: {prefix: \"b\\u0000\"}}}"),
            "8:50: classify[0].when.header.x-a.prefix: not a valid header value",
        ),
        (rule("{header: {x-a: {}}}"), "8:41: classify[0].when.header.x-a: needs either `prefix` or `present`"),
        (
            rule("{header: {x-a: {prefix: a, present: true}}}"),
            "8:41: classify[0].when.header.x-a: needs either `prefix` or `present`",
        ),
        (rule("{max_tokens: {}}"), "8:39: classify[0].when.max_tokens: the range has no end"),
        (
            rule("{max_tokens: {stated: false, at_most: 3}}"),
            "8:39: classify[0].when.max_tokens: a cap that is not stated lies in no range",
        ),
        (
            rule("{prompt_tokens: {at_least: 3, at_most: 2}}"),
            "8:42: classify[0].when.prompt_tokens: nothing lies in this range",
        ),
        (
            rule("{reasoning: [lots]}"),
            "8:39: classify[0].when.reasoning[0]: \"lots\" is not a valid value; write one of: none, low",
        ),
        (
            rule("{stream: false}}\n  - {class: chat, when: {stream: false}"),
            "9:5: classify[1]: this rule is never reached: rule 1 always fits before it",
        ),
        (rule("{}}\n  - {class: chat, when: {stream: true}"), "9:5: classify[1]: this rule is never reached"),
        // pools
        (
            changed("http://e:1", "http//gpu-3:8000"),
            "11:21: pools[0].engines[0].url: \"http//gpu-3:8000\" is not a URL; did you mean \"http://gpu-3:8000\"?",
        ),
        (
            changed("http://e:1", "ftp://e:1"),
            "11:21: pools[0].engines[0].url: \"ftp://e:1\" has neither http nor https",
        ),
        (
            changed("http://e:1", "http://e:1?key=SECRET"),
            "11:21: pools[0].engines[0].url: the URL has a query or a fragment",
        ),
        (
            class("objectives: {tpot_seconds: {threshold: 150, attainment: 0.9}}"),
            "3:44: slo_classes[0].objectives.tpot_seconds.threshold: the threshold is beyond timeouts.idle (120s)",
        ),
        (
            changed("http://e:1", "http://user:SECRET@e:1"),
            "11:21: pools[0].engines[0].url: the URL carries credentials; they belong into `engine.api_key_file` or `engine.headers`",
        ),
        (
            changed("http://e:1", "\"${NOT_A_URL}\""),
            "11:21: pools[0].engines[0].url: the value of the variable is not a URL; write http://host:port",
        ),
        (
            changed("{url: http://e:1}", "{url: http://e:1}, {url: http://e:1/v1}"),
            "11:40: pools[0].engines[1].url: \"http://e:1/v1\" is the same engine as on line 11",
        ),
        (changed("    engines: [{url: http://e:1}]\n", ""), "10:5: pools[0]: the pool has no engines; add `engines`"),
        (
            changed("http://e:1", "http://localhost:8080/v1"),
            "11:21: pools[0].engines[0].url: the engine is the gateway itself (0.0.0.0:8080); give the engine's own host and port",
        ),
        (
            changed("http://e:1", "http://127.0.0.1:9090"),
            "11:21: pools[0].engines[0].url: the engine is its admin port (127.0.0.1:9090)",
        ),
        (
            changed("engines: [{url: http://e:1}]", "dns: {name: LocalHost, port: 8080}"),
            "11:17: pools[0].dns.name: the engine is the gateway itself (0.0.0.0:8080)",
        ),
        (changed("[{url: http://e:1}]", "[]"), "11:14: pools[0].engines: is an empty list"),
        (pool("dns: {name: e, port: 1}"), "11:10: pools[0].dns: a pool has either `engines` or `dns`"),
        (
            changed("engines: [{url: http://e:1}]", "dns: {name: \"e:1\", port: 1}"),
            "11:17: pools[0].dns.name: \"e:1\" is not a host name",
        ),
        (
            changed("engines: [{url: http://e:1}]", "dns: {name: 10.0.0.1, port: 1}"),
            "11:17: pools[0].dns.name: \"10.0.0.1\" needs no DNS lookup",
        ),
        (
            changed("engines: [{url: http://e:1}]", "dns: {name: e, port: 70000}"),
            "11:26: pools[0].dns.port: 70000 is out of range",
        ),
        (changed("pool: main", "pool: none"), "10:11: pools[0].pool: the name \"none\" is reserved"),
        (pool("engine: {kind: vlm}"), "11:20: pools[0].engine.kind: \"vlm\" is not a valid value; did you mean vllm?"),
        (
            pool("engine: {api_key_file: engine.key, forward_authorization: true}"),
            "11:28: pools[0].engine.api_key_file: two credentials would go to the engine",
        ),
        (
            pool("engine: {ca_file: engine.key}"),
            "11:23: pools[0].engine.ca_file: the file \"engine.key\" holds no certificates in PEM",
        ),
        (
            pool("engine: {headers: {host: x}}"),
            "11:24: pools[0].engine.headers.host: the header \"host\" cannot be set here",
        ),
        (
            pool("engine: {headers: {Content-Encoding: gzip}}"),
            "11:24: pools[0].engine.headers.Content-Encoding: the header \"Content-Encoding\" cannot be set here",
        ),
        (
            pool("engine: {headers: {x-request-id: same}}"),
            "11:24: pools[0].engine.headers.x-request-id: the header \"x-request-id\" cannot be set here",
        ),
        (
            pool("engine: {forward_authorization: true, headers: {authorization: \"Bearer pool\"}}"),
            "11:37: pools[0].engine.forward_authorization: two credentials would go to the engine",
        ),
        (
            pool("engine: {headers: {x-a: \"a\\nSECRET\"}}"),
            "11:29: pools[0].engine.headers.x-a: the value cannot be sent in a header",
        ),
        (
            pool("health: {path: health}"),
            "11:20: pools[0].health.path: \"health\" is not a path; write a path that starts with /",
        ),
        (pool("breaker: {faults: 0}"), "11:23: pools[0].breaker.faults: 0 is out of range"),
        (
            pool("retries: {share: 2}"),
            "11:22: pools[0].retries.share: 2 is not a share; shares are at most 1: did you mean 0.02?",
        ),
        (pool("cool_down: {default: 2m}"), "11:16: pools[0].cool_down: default is longer than max"),
        (
            pool("inject: {continuous_usage: true, usage: false}"),
            "11:32: pools[0].inject.continuous_usage: it needs `usage`",
        ),
        (
            pool("engine: {kind: sglang}\n    inject: {continuous_usage: true}"),
            "12:32: pools[0].inject.continuous_usage: only engines of kind vllm support it",
        ),
        // routes and models
        (
            and("routes: [{model: a, pools: mian}, {model: \"*\", pools: main}]"),
            "12:28: routes[0].pools: the pool \"mian\" is not defined; did you mean main?",
        ),
        (
            and("routes: [{model: a, class: zz, pools: main}, {model: \"*\", pools: main}]"),
            "12:28: routes[0].class: the class \"zz\" is not defined",
        ),
        (and("routes: []"), "12:9: routes: is an empty list; add at least one"),
        (
            and("routes: [{model: \"*\", pools: main}, {model: a-*, pools: main}]"),
            "12:45: routes[1].model: \"a-*\" is never reached: routes[0] takes it before; put the narrower route first",
        ),
        (
            and("routes: [{model: \"*\", class: chat, pools: main}]"),
            "4:16: slo_classes[1].slo_class: no route serves the class \"batch\"",
        ),
        (
            and("routes: [{model: other, pools: main}, {model: \"*\", pools: main}]"),
            "12:18: routes[0].model: the name \"other\" is reserved",
        ),
        (
            and("models: {aliases: {a: a}}\nroutes: [{model: \"*\", pools: main}]"),
            "12:20: models.aliases.a: the alias \"a\" leads back to itself",
        ),
        (
            and("models: {aliases: {\"a*\": b}}"),
            "12:20: models.aliases.a*: \"a*\" is a pattern; an alias leads from one name to one name",
        ),
        (
            and("models: {aliases: {a: b}}\nroutes: [{model: c, pools: main}]"),
            "12:23: models.aliases.a: no route takes the model \"b\"",
        ),
        (
            and("models: {aliases: {a: b}}\nroutes: [{model: a, pools: main}, {model: \"*\", pools: main}]"),
            "13:18: routes[0].model: \"a\" is never reached: it is an alias of b",
        ),
        // tenants
        (tenants("  []"), "13:3: tenants: is an empty list; add at least one"),
        (tenants("  - {tenant: a}"), "13:5: tenants[0]: the tenant has no key, so no request can belong to it"),
        (
            tenants("  - {tenant: a, keys: [{blake3: \"sk-CANARY1\"}]}"),
            "13:33: tenants[0].keys[0].blake3: is not a BLAKE3 hash of 64 hexadecimal digits; make a key and its hash with `goodput key new`",
        ),
        (
            tenants("  - {tenant: a, keys: [{blake3: 12345}]}"),
            "13:33: tenants[0].keys[0].blake3: is a number; write it in quotes",
        ),
        (
            tenants("  - {tenant: a, keys_file: bad.keys}"),
            "13:28: tenants[0].keys_file: line 1 of \"bad.keys\" does not begin with a BLAKE3 hash",
        ),
        (tenants("  - {tenant: a, keys_file: empty}"), "13:28: tenants[0].keys_file: the file \"empty\" holds no key"),
        (
            tenants(&format!("{}\n{}", key(""), key("").replace("tenant: a", "tenant: b"))),
            "14:33: tenants[1].keys[0].blake3: the same key is repeated, first at tenants[0].keys[0].blake3 (line 13)",
        ),
        (
            tenants(&format!("{}\n  - {{tenant: a, keys: [{{blake3: \"{}\"}}]}}", key(""), hash("k2"))),
            "14:14: tenants[1].tenant: the tenant \"a\" is defined twice, first on line 13",
        ),
        (
            tenants(&format!(
                "  - {{tenant: a, keys: [{{label: x, blake3: \"{blake}\"}}, {{label: x, blake3: \"{}\"}}]}}",
                hash("k2")
            )),
            "13:131: tenants[0].keys[1].blake3: the label \"x\" is repeated in this tenant",
        ),
        (
            tenants(&key("").replace("keys:", "classes: [caht], keys:")),
            "13:27: tenants[0].classes[0]: the class \"caht\" is not defined; did you mean chat?",
        ),
        (tenants(&key("").replace("keys:", "classes: [], keys:")), "13:26: tenants[0].classes: is an empty list"),
        (
            tenants(&key("").replace("tenant: a", "tenant: other")),
            "13:14: tenants[0].tenant: the name \"other\" is reserved",
        ),
        // limits of tenants
        (limits("{}"), "13:25: tenants[0].limits: has no limit; write a limit, or remove the key"),
        (limits("{tokens: 5}"), "13:26: tenants[0].limits: unknown key `tokens`"),
        (
            limits("{tokens_per_minute: 0}"),
            "13:45: tenants[0].limits.tokens_per_minute: 0 is out of range; write a number from 1 to 9007199254740992",
        ),
        (
            limits("{tokens_per_minute: -5}"),
            "13:45: tenants[0].limits.tokens_per_minute: -5 is not a non-negative integer",
        ),
        (
            limits("{requests_per_minute: 9007199254740993}"),
            "13:47: tenants[0].limits.requests_per_minute: 9007199254740993 is out of range",
        ),
        (
            limits("{requests_per_minute: 99999999999999999999999}"),
            "13:47: tenants[0].limits.requests_per_minute: 100000000000000000000000 is not a non-negative integer",
        ),
        (
            limits("{requests_per_minute: 60, requests_burst: 0}"),
            "13:67: tenants[0].limits.requests_burst: 0 is out of range; write a number from 1",
        ),
        (
            limits("{concurrent_requests: 1, tokens_burst: 5}"),
            "13:64: tenants[0].limits.tokens_burst: it needs tokens_per_minute; add",
        ),
        (
            limits("{concurrent_requests: 0}"),
            "13:47: tenants[0].limits.concurrent_requests: 0 is out of range; write a number from 1",
        ),
        (
            limits("{models: {\"llama-*\": {tokens_per_minute: 5}}}"),
            "13:35: tenants[0].limits.models.llama-*: \"llama-*\" is a pattern; a limit is for one model",
        ),
        (limits("{models: {a: {}}}"), "13:38: tenants[0].limits.models.a: has no limit"),
        (
            limits("{models: {mistral: {tokens_per_minute: 5}}}") + "routes: [{model: llama-*, pools: main}]\n",
            "13:35: tenants[0].limits.models.mistral: no route takes the model \"mistral\"; add it to a route",
        ),
        (
            limits("{models: {gpt: {tokens_per_minute: 5}}}") + "models: {aliases: {gpt: llama}}\n",
            "13:35: tenants[0].limits.models.gpt: \"gpt\" is an alias of \"llama\"; limits count the aliased name",
        ),
        (
            tenants(&key("").replace("keys:", "when_over_limit: drop, keys:")),
            "13:34: tenants[0].when_over_limit: \"drop\" is not a valid value; write one of: reject, demote",
        ),
        // waiting
        (
            class("queue: {max_wait: 2m}\n    timeouts: {total: 90s}"),
            "3:23: slo_classes[0].queue.max_wait: max_wait is longer than timeouts.total (90s)",
        ),
        (
            class("queue: {when_hopeless: give_up}"),
            "3:28: slo_classes[0].queue.when_hopeless: \"give_up\" is not a valid value; write one of: demote, shed, serve",
        ),
        (
            pool("max_concurrency_per_engine: 0"),
            "11:33: pools[0].max_concurrency_per_engine: 0 is out of range; write a number from 1 to 1000000",
        ),
        (
            pool("max_concurrency_per_engine: many"),
            "11:33: pools[0].max_concurrency_per_engine: is text; write an integer",
        ),
        (
            pool("max_concurrency_per_engine: -1"),
            "11:33: pools[0].max_concurrency_per_engine: -1 is not a non-negative integer; write an integer, or auto",
        ),
        (queue("{quantum: 0}"), "12:22: pools[0].queue.quantum: 0 is out of range"),
        (queue("{prefill_tokens_per_engine: 0}"), "12:40: pools[0].queue.prefill_tokens_per_engine: 0 is out of range"),
        (
            queue("{prefill_tokens_per_engine: on}"),
            "12:40: pools[0].queue.prefill_tokens_per_engine: is text; write an integer",
        ),
        (queue("{max_waiting: 99999999}"), "12:26: pools[0].queue.max_waiting: 99999999 is out of range"),
        (
            queue("{shares: {batch: 0.2}}"),
            "12:21: pools[0].queue.shares: the shares add up to 1.05, more than 1; lower some",
        ),
        (queue("{shares: {batch: 0}}"), "12:29: pools[0].queue.shares.batch: 0 is not a share"),
        (
            queue("{shares: {batch: 5}}"),
            "12:29: pools[0].queue.shares.batch: 5 is not a share; shares are at most 1: did you",
        ),
        (
            queue("{shares: {batch: 2.55}}"),
            "12:29: pools[0].queue.shares.batch: 2.55 is not a share; write a number above 0",
        ),
        (
            queue("{shares: {batch: 0.0004}}"),
            "12:29: pools[0].queue.shares.batch: 0.0004 is not a whole number of thousandths",
        ),
        (
            pool("engine: {kind: sglang, priority_scheduling: true}"),
            "11:49: pools[0].engine.priority_scheduling: only engines of kind vllm accept a priority; remove",
        ),
        (pool("balance: prefix"), "11:14: pools[0].balance: \"prefix\" is not a valid value"),
        (pool("max_concurrency_per_engine: automatic"), "11:33: pools[0].max_concurrency_per_engine: "),
        (pool("max_concurrency_per_engine: 0"), "11:33: pools[0].max_concurrency_per_engine: "),
        (pool("session_header: x-chat"), "11:21: pools[0].session_header: only session_affinity reads it"),
        // overload levels
        (class("degrade: []"), "3:14: slo_classes[0].degrade: is an empty list"),
        (degrade("{action: defer}"), "3:15: slo_classes[0].degrade[0]: `enter_when` is missing"),
        (
            degrade("{action: defer, enter_when: {}}"),
            "3:43: slo_classes[0].degrade[0].enter_when: nothing enters this level; write at least one",
        ),
        (
            degrade("{action: hide, enter_when: {queue_depth_above: 5}}"),
            "3:24: slo_classes[0].degrade[0].action: \"hide\" is not a valid value; write one of: defer, shed_lower, reasoning_off, spill, {cap_output: N}",
        ),
        (
            degrade("{action: 256, enter_when: {queue_depth_above: 5}}"),
            "3:24: slo_classes[0].degrade[0].action: is a number; write one of: defer, shed_lower, reasoning_off, spill, {cap_output: N}",
        ),
        (
            degrade("{action: cap_output, enter_when: {queue_depth_above: 5}}"),
            "3:24: slo_classes[0].degrade[0].action: \"cap_output\" is not a valid value; write one of: defer, shed_lower, reasoning_off, spill, {cap_output: N}",
        ),
        (
            degrade("{action: {cap_output: 0}, enter_when: {queue_depth_above: 5}}"),
            "3:37: slo_classes[0].degrade[0].action.cap_output: 0 is out of range",
        ),
        (
            degrade("{action: defer, enter_when: {queue_depth_above: 0}}"),
            "3:63: slo_classes[0].degrade[0].enter_when.queue_depth_above: 0 is out of range",
        ),
        (
            degrade("{action: defer, enter_when: {queue_wait_above: 0s}}"),
            "3:62: slo_classes[0].degrade[0].enter_when.queue_wait_above: 0 is not a positive duration",
        ),
        (
            degrade("{action: defer, enter_when: {burn_rate_above: 0}}"),
            "3:61: slo_classes[0].degrade[0].enter_when.burn_rate_above: 0 is not a burn rate that can be exceeded",
        ),
        (
            degrade("{action: defer, enter_when: {burn_rate_above: 14}}"),
            "3:61: slo_classes[0].degrade[0].enter_when.burn_rate_above: 14 is never exceeded: if every request misses, this class burns at 10.0",
        ),
        (
            degrade("{action: defer, enter_when: {burn_rate_above: 2}, leave_when: {queue_depth_below: 2}}"),
            "3:97: slo_classes[0].degrade[0].leave_when.queue_depth_below: it needs queue_depth_above",
        ),
        (
            degrade("{action: defer, enter_when: {queue_depth_above: 5}, leave_when: {queue_depth_below: 6}}"),
            "3:99: slo_classes[0].degrade[0].leave_when.queue_depth_below: 6 is above queue_depth_above: the level would flap",
        ),
        (
            degrade("{action: defer, enter_when: {queue_depth_above: 5}, leave_when: {queue_depth_below: 0}}"),
            "3:99: slo_classes[0].degrade[0].leave_when.queue_depth_below: nothing is ever below 0, so the level would never be left",
        ),
        (
            degrade("{action: defer, enter_when: {queue_depth_above: 5}, hold: 0s}"),
            "3:73: slo_classes[0].degrade[0].hold: 0 is not a positive duration",
        ),
        (
            degrade(
                "{action: spill, enter_when: {queue_depth_above: 5}}, {action: spill, enter_when: {queue_depth_above: 9}}",
            ),
            "3:68: slo_classes[0].degrade[1]: spill is already in force at an earlier level; remove one of the two",
        ),
        (
            degrade(
                "{action: {cap_output: 50}, enter_when: {queue_depth_above: 5}}, {action: {cap_output: 50}, enter_when: {queue_depth_above: 9}}",
            ),
            "3:79: slo_classes[0].degrade[1]: the cap is no lower than that of an earlier level",
        ),
        // where limits live
        (
            and("limits_store: disk"),
            "12:15: limits_store: \"disk\" is not a valid value; write one of: memory, {redis: {url: redis://HOST:PORT}}",
        ),
        (and("limits_store: {}"), "12:15: limits_store: `redis` is missing; add `redis`"),
        (store("{}"), "12:23: limits_store.redis: `url` is missing; add `url`"),
        (
            store("{url: \"store:6379/SECRET\"}"),
            "12:29: limits_store.redis.url: is not a store URL; write redis://HOST:PORT or, with TLS, rediss://HOST:PORT",
        ),
        (store("{url: \"http://store\"}"), "12:29: limits_store.redis.url: is not a store URL"),
        (
            store("{url: \"rediss://store/#insecure\"}"),
            "12:29: limits_store.redis.url: disables verification of the certificate; remove `#insecure`",
        ),
        (
            store("{url: \"redis://:SECRET@store\"}"),
            "12:29: limits_store.redis.url: contains a password in clear text; write the whole URL as ${NAME}",
        ),
        (
            store("{url: \"redis://store\", on_failure: half}"),
            "limits_store.redis.on_failure: \"half\" is not a valid value; write one of: open, closed",
        ),
        (
            store("{url: \"redis://store\", timeout: 2s}"),
            "limits_store.redis.timeout: every request may have to wait so long",
        ),
        (store("{url: \"redis://store\", timeout: 0s}"), "limits_store.redis.timeout: 0 is not a positive duration"),
        (
            store("{url: \"redis://store\", key_prefix: \"a b\"}"),
            "limits_store.redis.key_prefix: \"a b\" cannot be a name",
        ),
        (
            store("{url: \"redis://store\", password_file: nowhere}"),
            "limits_store.redis.password_file: the file \"nowhere\" cannot be read",
        ),
        (
            and("shutdown: {drain: 2m, pre_stop: 3s, grace_period: 130s}"),
            "12:51: shutdown.grace_period: the shutdown takes 133s: pre_stop + delay + drain and the last writes, 3s + 5s + 120s + 5s; give it 133s, or shorten `drain`",
        ),
        (and("shutdown: {grace_period: 69s}"), "12:26: shutdown.grace_period: the shutdown takes 70s"),
        (and("telemetry: {journal: {}}"), "12:22: telemetry.journal: `path` is missing; add `path`"),
        (journal("{path: logs/}"), "12:29: telemetry.journal.path: \"logs/\" is not a file; write the path of a file"),
        (
            journal("{path: journal.key, hash_key_file: journal.key}"),
            "12:29: telemetry.journal.path: is a file that the settings read; write a file of its own",
        ),
        (
            journal("{path: j, hash_key_file: engine.key}"),
            "12:47: telemetry.journal.hash_key_file: the file \"engine.key\" holds a secret of fewer than 16 characters",
        ),
        (journal("{path: j, max_size: 1KiB}"), "12:42: telemetry.journal.max_size: the size is out of range"),
        (journal("{path: j, max_age: 0s}"), "12:41: telemetry.journal.max_age: 0 is not a positive duration"),
        (journal("{path: j, keep: 100000}"), "12:38: telemetry.journal.keep: 100000 is out of range"),
        (
            journal("{path: j, flush: 2m}"),
            "12:39: telemetry.journal.flush: the last lines would be lost with the process; write 1m or less",
        ),
        (and("telemetry: {otlp: {}}"), "12:19: telemetry.otlp: `endpoint` is missing; add `endpoint`"),
        (
            otlp("{endpoint: \"collector:4318\"}"),
            "12:30: telemetry.otlp.endpoint: \"collector:4318\" is not a URL; write http://host:4318",
        ),
        (
            otlp("{endpoint: \"http://me:SECRET@collector\"}"),
            "12:30: telemetry.otlp.endpoint: the URL carries credentials; they belong into `headers_file`",
        ),
        (
            otlp("{endpoint: \"http://c\", headers_file: bad.headers}"),
            "12:56: telemetry.otlp.headers_file: line 2 of the file \"bad.headers\" is not a header; write `name: value`",
        ),
        (
            otlp("{endpoint: \"http://c\", headers_file: our.headers}"),
            "telemetry.otlp.headers_file: line 1 of the file \"our.headers\" sets content-type, which the gateway sets itself",
        ),
        (otlp("{endpoint: \"http://c\", ratio: 1.5}"), "12:49: telemetry.otlp.ratio: 1.5 is no share"),
        (
            otlp("{endpoint: \"https://c\", ca_file: empty}"),
            "telemetry.otlp.ca_file: the file \"empty\" holds no certificates in PEM",
        ),
        // no YAML, no settings
        ("a: [1".into(), "not readable as YAML"),
        (
            String::new(),
            "1:1: the file is empty, or all comments; write at least `slo_classes`, `default_class` and `pools`",
        ),
        ("# later\n---\n".into(), "1:1: the file is empty, or all comments"),
        (format!("{BASE}---\nlisten: {{}}\n"), "a second YAML document begins here; keep one of them"),
        ("- a\n- b\n".into(), "1:1: is a list; write a mapping with the keys of this block"),
    ];
    let mut wrong = Vec::new();
    for (text, expected) in table {
        let found = problems(&text);
        if !(found.len() == 1 && found[0].contains(expected)) {
            wrong.push(format!("expected {expected}\n   found {found:#?}\n in\n{text}"));
        }
        let all = found.concat();
        assert!(!all.contains("CANARY") || all.contains("bad.keys"), "{all}");
        assert!(!all.contains("SECRET"), "{all}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn all_problems_are_reported_at_once_in_the_order_of_the_file() {
    let text = "
listen: {address: nowhere}
slo_classes:
  - slo_class: chat
    objectives: {ttft_seconds: {threshold: 0, attainment: 2}}
    joint_attainment_target: 0
default_class: caht
clasify: []
pools:
  - {pool: p, engines: [{url: http//e}], balance: fair}
";
    let lines: Vec<u64> = load(text, &made()).unwrap_err().iter().map(|problem| problem.line).collect();
    assert_eq!(lines, [2, 5, 5, 6, 7, 8, 10, 10]);
}

/// Exactly the names that mean something else as a label value, or are kept for drills.
#[test]
fn only_reserved_label_values_are_rejected_as_names() {
    let key = format!("keys: [{{blake3: \"{}\"}}]", hash("k"));
    let named = |what: &str, name: &str| match what {
        "class" => third(name).replace(
            "when: {stream: false}}",
            &format!("when: {{stream: false}}}}\n  - {{class: {name}, when: {{stream: true}}}}"),
        ),
        "pool" => changed("pool: main", &format!("pool: {name}")),
        "tenant" => tenants(&format!("  - {{tenant: {name}, {key}}}")),
        "model" => and(&format!("routes: [{{model: {name}, pools: main}}, {{model: \"*\", pools: main}}]")),
        _ => and(&format!("models: {{aliases: {{a: {name}}}}}")),
    };
    let taken = [
        ("class", "none"),
        ("class", "drill"),
        ("pool", "none"),
        ("tenant", "other"),
        ("model", "other"),
        ("alias", "other"),
    ];
    for what in ["class", "pool", "tenant", "model", "alias"] {
        for name in ["none", "other", "drill"] {
            let told = problems(&named(what, name)).concat();
            let is_taken = taken.contains(&(what, name));
            assert_eq!(told.contains("is reserved"), is_taken, "{what} {name}: {told}");
            assert_eq!(told.is_empty(), !is_taken, "{what} {name}: {told}");
        }
    }
}

#[test]
fn a_problem_is_not_repeated_at_its_references() {
    // The pool is invalid, but its name is known to the routes.
    let text = changed("{url: http://e:1}", "{url: \"\"}") + "routes: [{model: \"*\", pools: main}]\n";
    assert_eq!(problems(&text).len(), 1);
    let text = changed(
        "joint_attainment_target: 0.9\n  - slo_class: batch",
        "joint_attainment_target: x\n  - slo_class: batch",
    );
    assert_eq!(problems(&text).len(), 1);
}

#[test]
fn unreachable_settings_are_notes() {
    let settings = good(&changed("classify:\n  - {class: batch, when: {stream: false}}\n", ""));
    assert_eq!(settings.notes.len(), 1);
    assert!(settings.notes[0].to_string().contains("no rule leads to the class \"batch\""));
    let no_seats = good(&pool("queue: {max_waiting: 5}"));
    assert!(no_seats.notes[0].to_string().contains("no request waits here"));
    let nothing_to_keep = good(&pool("max_concurrency_per_engine: auto"));
    assert!(nothing_to_keep.notes[0].to_string().contains("seats only grow"), "{:?}", nothing_to_keep.notes);
    let to_the_end = class("objectives: {e2e_seconds: {threshold: 9, attainment: 0.95}}");
    let to_the_end = to_the_end.replacen("    engines", "    max_concurrency_per_engine: auto\n    engines", 1);
    assert_eq!(good(&to_the_end).notes, []);
    let no_limits =
        tenants(&format!("  - {{tenant: a, when_over_limit: demote, keys: [{{blake3: \"{}\"}}]}}", hash("k")));
    assert!(good(&no_limits).notes[0].to_string().contains("the tenant has no limits"));
    let demotes = |of_pool: &str| {
        let limits = "limits: {requests_per_minute: 5}, when_over_limit: demote";
        let tenant = format!("  - {{tenant: a, {limits}, keys: [{{blake3: \"{}\"}}]}}", hash("k"));
        good(&tenants(&tenant).replacen("    engines", &format!("    {of_pool}\n    engines"), 1)).notes
    };
    let nothing_waits = demotes("connect_timeout: 2s");
    assert!(nothing_waits[0].to_string().contains("beyond its limits run at once"), "{nothing_waits:?}");
    assert_eq!(demotes("max_concurrency_per_engine: 8"), []);
    assert_eq!(demotes("engine: {priority_scheduling: true}"), [], "engines put it behind others");
    let in_vain =
        "{action: defer, enter_when: {burn_rate_above: 2}}, {action: shed_lower, enter_when: {burn_rate_above: 2}},
      {action: spill, enter_when: {burn_rate_above: 2}}, {action: reasoning_off, enter_when: {queue_depth_above: 2}}";
    let notes: Vec<String> = good(&degrade(in_vain)).notes.iter().map(ToString::to_string).collect();
    assert_eq!(notes.len(), 4, "{notes:#?}");
    let said = ["no request waits for", "no class has a lower priority", "has a second pool", "it is never entered"];
    assert!(notes.iter().zip(said).all(|(note, said)| note.contains(said)), "{notes:#?}");
    let late = class("timeouts: {first_token: 5s, idle: 5s}\n    keepalive_seconds: 15");
    assert!(good(&late).notes[0].to_string().contains("no comment is ever sent"));
}

#[test]
fn a_later_rule_is_reached_by_tenants_that_may_not_use_the_first_class() {
    let two = rule("{}}\n  - {class: chat, when: {stream: true}");
    let tenant = format!("tenants:\n  - {{tenant: a, classes: chat, keys: [{{blake3: \"{}\"}}]}}\n", hash("k"));
    assert_eq!(problems(&two).len(), 1);
    assert_eq!(problems(&(two + &tenant)), Vec::<String>::new());
}

// ---- the schema and the walk --------------------------------------------------------------

/// Every block of the schema, with the path to one of its instances.
fn blocks(schema: &serde_json::Value) -> Vec<(Vec<String>, Vec<String>)> {
    fn resolve<'a>(root: &'a serde_json::Value, node: &'a serde_json::Value) -> &'a serde_json::Value {
        match node.get("$ref").and_then(|to| to.as_str()) {
            Some(to) => root.pointer(to.trim_start_matches('#')).unwrap(),
            None => node,
        }
    }
    fn walk(
        root: &serde_json::Value,
        node: &serde_json::Value,
        way: &[String],
        found: &mut Vec<(Vec<String>, Vec<String>)>,
    ) {
        let node = resolve(root, node);
        let step = |step: &str| [way, &[step.to_owned()]].concat();
        for option in node.get("anyOf").and_then(|list| list.as_array()).into_iter().flatten() {
            walk(root, option, way, found);
        }
        if let Some(items) = node.get("items") {
            walk(root, items, &step("[]"), found);
        }
        if let Some(each) = node.get("additionalProperties").filter(|each| each.is_object()) {
            walk(root, each, &step("any"), found);
        }
        if let Some(properties) = node.get("properties").and_then(|map| map.as_object()) {
            found.push((way.to_vec(), properties.keys().cloned().collect()));
            for (key, value) in properties {
                walk(root, value, &step(key), found);
            }
        }
    }
    let mut found = Vec::new();
    walk(schema, schema, &[], &mut found);
    found
}

/// A document with `inner` at the end of a path.
fn at_the_end(way: &[String], inner: &str) -> String {
    way.iter().rev().fold(inner.to_owned(), |inside, step| match step.as_str() {
        "[]" => format!("[{inside}]"),
        key => format!("{{{key}: {inside}}}"),
    })
}

#[test]
fn the_schema_and_the_walk_know_the_same_keys() {
    let blocks = blocks(&schema());
    assert!(blocks.len() > 30, "{}", blocks.len());
    let unknown = |text: &str| problems(text).iter().any(|problem| problem.contains("unknown key"));
    for (way, keys) in &blocks {
        for key in keys {
            assert!(!unknown(&at_the_end(way, &format!("{{{key}: ~}}"))), "{way:?} {key}");
            assert!(unknown(&at_the_end(way, &format!("{{{key}x: ~}}"))), "{way:?} {key}x");
        }
        // The walk lists all keys of a block for a key that resembles none.
        let named = problems(&at_the_end(way, "{qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq: 1}"));
        let expected = format!("valid keys are: {}", in_order_of_file(&named, keys));
        assert!(named.iter().any(|problem| problem.contains(&expected)), "{way:?} {named:?}");
    }
}

/// The keys listed in a problem, if they are exactly these.
fn in_order_of_file(problems: &[String], keys: &[String]) -> String {
    let list = problems.iter().find_map(|problem| problem.split("valid keys are: ").nth(1)).unwrap();
    let mut found: Vec<&str> = list.split(", ").collect();
    let order = found.join(", ");
    found.sort_unstable();
    let mut keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(found, keys);
    order
}

#[test]
fn every_key_of_the_schema_is_described() {
    fn all_described(node: &serde_json::Value) {
        if let Some(properties) = node.get("properties").and_then(|map| map.as_object()) {
            for (key, value) in properties {
                let text = value.get("description").and_then(|text| text.as_str()).unwrap_or("");
                assert!(text.len() > 3, "{key}");
            }
        }
        match node {
            serde_json::Value::Object(map) => map.values().for_each(all_described),
            serde_json::Value::Array(list) => list.iter().for_each(all_described),
            _ => {}
        }
    }
    all_described(&schema());
}

/// Paths to all positions of the schema where this value is allowed.
fn ways_to(value: &serde_json::Value) -> Vec<String> {
    fn walk(root: &serde_json::Value, node: &serde_json::Value, way: &str, to: (&serde_json::Value, &mut Vec<String>)) {
        let node = match node.get("$ref").and_then(|at| at.as_str()) {
            Some(at) => root.pointer(at.trim_start_matches('#')).unwrap(),
            None => node,
        };
        let (value, found) = to;
        if node.get("enum").and_then(|all| all.as_array()).is_some_and(|all| all.contains(value)) {
            found.push(way.to_owned());
        }
        for option in node.get("anyOf").and_then(|list| list.as_array()).into_iter().flatten() {
            walk(root, option, way, (value, found));
        }
        if let Some(items) = node.get("items") {
            walk(root, items, way, (value, found));
        }
        for (key, inner) in node.get("properties").and_then(|map| map.as_object()).into_iter().flatten() {
            walk(root, inner, &format!("{way}.{key}"), (value, found));
        }
    }
    let (schema, mut found) = (schema(), Vec::new());
    walk(&schema, &schema, "", (value, &mut found));
    found.sort();
    found.dedup();
    found
}

/// YAML 1.1 tools (PyYAML, Helm, Ansible) write `false` for `off`.
#[test]
fn false_is_off_wherever_off_may_stand() {
    let places = [
        (".admin", and("admin: off")),
        (".pools.breaker", pool("breaker: off")),
        (".pools.health", pool("health: off")),
        (".pools.metrics", pool("metrics: off")),
        (".pools.queue.prefill_tokens_per_engine", queue("{prefill_tokens_per_engine: off}")),
        (".slo_classes.target_headers", class("target_headers: off")),
        (".telemetry.access_log", and("telemetry: {access_log: off}")),
    ];
    let known: Vec<&str> = places.iter().map(|(way, _)| *way).collect();
    assert_eq!(ways_to(&serde_json::json!("off")), known, "each place has its line above");
    assert_eq!(ways_to(&serde_json::json!(false)), known, "the schema lets false stand wherever off may");
    let seen = |text: &str| format!("{:?}", Settings { hash: [0; 32], ..good(text) });
    for (way, text) in places {
        assert_eq!(seen(&text), seen(&text.replacen(": off", ": false", 1)), "{way}");
        assert!(!problems(&text.replacen(": off", ": true", 1)).is_empty(), "{way}");
    }
}

#[test]
fn every_key_is_used_by_the_full_example() {
    let text = include_str!("../../config/goodput.yaml");
    for (way, keys) in blocks(&super::schema()) {
        for key in keys {
            assert!(text.contains(&format!("{key}:")), "{way:?} {key}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_text_breaks_the_reading(text in "[a-z_:\\[\\]{} \\n\"0-9.$*&-]{0,80}") {
        let _ = load(&text, &made_empty());
    }

    /// A valid file with a piece cut out loads or reports why not, and every problem has a position.
    #[test]
    fn problems_of_a_mangled_file_have_positions(at in 0usize..6000, length in 1usize..30, with in "[a-z:\\[\\]{} \\n~0-9]{0,6}") {
        let good = include_str!("../../config/goodput.yaml");
        let at = at.min(good.len() - 1);
        let end = (at + length).min(good.len());
        prop_assume!(good.is_char_boundary(at) && good.is_char_boundary(end));
        let text = format!("{}{}{}", &good[..at], with, &good[end..]);
        if let Err(problems) = load(&text, &made_empty()) {
            prop_assert!(!problems.is_empty());
            let lines = text.lines().count() as u64 + 1;
            for problem in problems {
                prop_assert!((1..=lines).contains(&problem.line) && problem.column >= 1, "{:?}", problem);
                prop_assert!(!problem.message.is_empty() && !problem.way_out.is_empty());
            }
        }
    }
}

fn made_empty() -> Made {
    Made::default()
}

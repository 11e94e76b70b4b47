//! Probes of simulated engines, in virtual time.

use std::collections::BTreeMap;
use std::net::IpAddr;

use http::HeaderValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::*;
use crate::dial::{PipeDial, PipeListener, Scheme};
use crate::route::settings::{AddressFamily, DnsName, HealthCheck};
use crate::route::{EngineState, EngineView, WorkEstimate};
use crate::types::Tick;

/// Responses by path; other paths are not answered.
#[derive(Clone, Default)]
struct Script(Arc<Mutex<BTreeMap<&'static str, (u16, String)>>>, Arc<Mutex<Vec<String>>>);

impl Script {
    fn well() -> Self {
        let script = Script::default();
        script.says("/health", 200, "");
        script
    }

    fn says(&self, path: &'static str, status: u16, body: &str) {
        self.0.lock().insert(path, (status, body.to_owned()));
    }

    fn falls_silent(&self) {
        self.0.lock().clear();
    }

    fn heads(&self) -> Vec<String> {
        self.1.lock().clone()
    }

    async fn play(self, mut listener: PipeListener) {
        let mut open = JoinSet::new();
        loop {
            let connection = listener.accept().await;
            open.spawn(self.clone().answer(connection));
        }
    }

    async fn answer(self, mut connection: DuplexStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = connection.read_u8().await else { return };
            head.push(byte);
        }
        let head = String::from_utf8(head).unwrap();
        self.1.lock().push(head.clone());
        let path = head.split(' ').nth(1).unwrap();
        let answer = self.0.lock().get(path).cloned();
        match answer {
            None => std::future::pending().await,
            Some((status, body)) => {
                let length = body.len();
                let text = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}");
                let _ = connection.write_all(text.as_bytes()).await;
            }
        }
    }
}

struct Bench {
    network: PipeDial,
    fleet: Arc<Fleet>,
    probes: Probes,
    clock: Clock,
    engines: JoinSet<()>,
}

impl Bench {
    fn new() -> Self {
        let (network, clock) = (PipeDial::new(), Clock::start());
        let fleet = Arc::new(Fleet::new(1));
        let probes = Probes::new(fleet.clone(), Arc::new(network.clone()), clock, 7);
        Bench { network, fleet, probes, clock, engines: JoinSet::new() }
    }

    fn engine(&mut self, at: &str, script: &Script) {
        let listener = self.network.listen(at);
        self.engines.spawn(script.clone().play(listener));
    }

    fn apply_settings(&self, pool: PoolSettings) {
        let pools = [Arc::new(pool)];
        self.fleet.apply_settings(&pools, self.clock.now());
        self.probes.apply_settings(&pools);
    }

    async fn until(&self, seconds: f64) {
        self.clock.sleep_until(Some(Tick::ZERO + Duration::from_secs_f64(seconds))).await;
    }

    fn seen(&self) -> Vec<EngineView> {
        self.fleet.view(self.clock.now()).remove(0).engines
    }

    fn states(&self) -> Vec<(String, EngineState)> {
        self.seen().into_iter().map(|view| (view.engine.to_string(), view.state)).collect()
    }

    fn state(&self) -> EngineState {
        self.seen()[0].state
    }
}

fn pool() -> PoolSettings {
    let address =
        EngineAddress { scheme: Scheme::Http, host: "e".into(), port: 8000, base: "/base".into(), name: None };
    PoolSettings { metrics: None, ..PoolSettings::with_defaults("p".into(), EngineSource::Static(vec![address])) }
}

fn plain_pool() -> PoolSettings {
    let mut pool = pool();
    if let EngineSource::Static(addresses) = &mut pool.engines {
        addresses[0].base = "".into();
    }
    pool
}

fn dns_pool() -> PoolSettings {
    let dns = DnsName {
        name: "svc".into(),
        port: 80,
        scheme: Scheme::Http,
        refresh: Duration::from_secs(5),
        family: AddressFamily::default(),
    };
    PoolSettings { metrics: None, ..PoolSettings::with_defaults("p".into(), EngineSource::Dns(dns)) }
}

#[tokio::test(start_paused = true)]
async fn a_look_goes_below_the_engines_base_with_the_pools_own_key() {
    let mut bench = Bench::new();
    let script = Script::default();
    script.says("/base/health", 200, "");
    bench.engine("e:8000", &script);
    let headers = vec![("x-extra".parse().unwrap(), HeaderValue::from_static("1"))];
    bench.apply_settings(PoolSettings { api_key: Some("secret".to_owned().into()), headers, ..pool() });
    bench.until(1.0).await;
    let head = script.heads()[0].to_lowercase();
    assert!(head.starts_with("get /base/health http/1.1\r\n"), "{head}");
    for line in ["host: e:8000\r\n", "authorization: bearer secret\r\n", "x-extra: 1\r\n"] {
        assert!(head.contains(line), "{line} in {head}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_is_down_at_once_and_up_at_its_return() {
    let mut bench = Bench::new();
    let script = Script::well();
    bench.apply_settings(plain_pool());
    bench.until(0.1).await;
    assert_eq!(bench.state(), EngineState::Down);
    bench.engine("e:8000", &script);
    bench.until(2.5).await;
    assert_eq!(bench.state(), EngineState::Up);
    script.says("/health", 503, "");
    bench.until(5.0).await;
    assert_eq!(bench.state(), EngineState::Down);
    script.says("/health", 200, "");
    bench.until(8.0).await;
    assert_eq!(bench.state(), EngineState::Up);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refused_for_an_instant_is_not_out_for_a_whole_interval() {
    let mut bench = Bench::new();
    bench.apply_settings(plain_pool());
    bench.until(0.1).await;
    assert_eq!(bench.state(), EngineState::Down);
    bench.engine("e:8000", &Script::well());
    bench.until(0.4).await;
    assert_eq!(bench.state(), EngineState::Up);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_only_answers_late_stays_while_requests_succeed() {
    let mut bench = Bench::new();
    let script = Script::well();
    bench.engine("e:8000", &script);
    bench.apply_settings(plain_pool());
    bench.until(1.0).await;
    script.falls_silent();
    let attempts = || super::super::retry::Attempts::new(&plain_pool(), Tick::from_millis(1_000_000));
    for second in 2..20 {
        bench.until(f64::from(second)).await;
        assert_eq!(bench.state(), EngineState::Up, "at {second} s");
        let mut attempts = attempts();
        let choice =
            bench.fleet.choose(&"p".into(), &mut attempts, WorkEstimate::default(), bench.clock.now()).unwrap();
        bench.fleet.succeeded(&"p".into(), &mut attempts, super::super::retry::Injection::None, bench.clock.now());
        drop(choice);
    }
    // No request succeeds any more; after three checks of two seconds each it is out.
    bench.until(40.0).await;
    assert_eq!(bench.state(), EngineState::Down);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_does_not_come_about_is_doubt_and_not_death() {
    let bench = Bench::new();
    bench.network.silence("e:8000");
    bench.apply_settings(plain_pool());
    bench.until(3.0).await;
    assert_eq!(bench.state(), EngineState::Up);
    bench.until(20.0).await;
    assert_eq!(bench.state(), EngineState::Down);
}

#[tokio::test(start_paused = true)]
async fn a_gateway_without_descriptors_holds_nothing_against_an_engine() {
    let mut bench = Bench::new();
    bench.engine("e:8000", &Script::well());
    bench.apply_settings(plain_pool());
    bench.until(10.0).await;
    bench.network.lack(usize::MAX);
    bench.until(120.0).await;
    assert_eq!(bench.state(), EngineState::Up);
    assert!(bench.network.dials("e:8000") > 10, "it went on looking");
}

#[tokio::test(start_paused = true)]
async fn the_engines_own_metrics_are_read_and_not_believed_for_long() {
    let mut bench = Bench::new();
    let script = Script::well();
    script.says(
        "/metrics",
        200,
        "vllm:num_requests_waiting{e=\"0\"} 4\nvllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5",
    );
    bench.engine("e:8000", &script);
    bench.apply_settings(PoolSettings { metrics: Some(Default::default()), ..plain_pool() });
    bench.until(1.0).await;
    let seen = bench.seen().remove(0);
    assert_eq!((seen.waiting, seen.running, seen.kv_usage), (Some(4.0), Some(2.0), Some(0.5)));
    script.says("/metrics", 500, "");
    bench.until(5.5).await;
    assert_eq!(bench.seen()[0].waiting, Some(4.0));
    bench.until(9.5).await;
    assert_eq!(bench.seen()[0].waiting, None);
}

#[tokio::test(start_paused = true)]
async fn a_sleeping_vllm_is_not_available_although_its_health_says_200() {
    let mut bench = Bench::new();
    let script = Script::well();
    script.says("/metrics", 200, "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 0.0\n");
    bench.engine("e:8000", &script);
    bench.apply_settings(PoolSettings { metrics: Some(Default::default()), ..plain_pool() });
    bench.until(1.0).await;
    assert_eq!(bench.state(), EngineState::Asleep);
    assert_eq!(bench.fleet.available(&"p".into(), bench.clock.now()), 0);
    script.says("/metrics", 200, "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 1.0\n");
    bench.until(4.0).await;
    assert_eq!(bench.state(), EngineState::Up);
}

#[tokio::test(start_paused = true)]
async fn the_models_of_an_engine_are_learned() {
    let mut bench = Bench::new();
    let script = Script::well();
    script.says("/v1/models", 200, r#"{"object":"list","data":[{"id":"llama-3","x":1},{"id":""},{"id":"a"}]}"#);
    bench.engine("e:8000", &script);
    bench.apply_settings(plain_pool());
    bench.until(1.0).await;
    assert_eq!(bench.fleet.models(&"p".into()), [Arc::from("a"), Arc::from("llama-3")]);
    script.says("/v1/models", 200, "[[[[[[[[[");
    bench.until(100.0).await;
    assert_eq!(bench.fleet.models(&"p".into()).len(), 2, "nonsense changes nothing");
}

#[tokio::test(start_paused = true)]
async fn engines_come_and_go_with_a_dns_name_and_survive_its_failure() {
    let mut bench = Bench::new();
    let address = |last| IpAddr::from([10, 0, 0, last]);
    for at in ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"] {
        bench.engine(at, &Script::well());
    }
    bench.apply_settings(dns_pool());
    bench.until(1.0).await;
    assert!(bench.seen().is_empty());
    bench.network.name("svc", &[address(2), address(1), address(2)]);
    bench.until(6.0).await;
    let up = |at: &str| (at.to_owned(), EngineState::Up);
    let left = |at: &str| (at.to_owned(), EngineState::Left);
    assert_eq!(bench.states(), [up("10.0.0.1:80"), up("10.0.0.2:80")]);
    bench.network.name("svc", &[]);
    bench.until(12.0).await;
    assert_eq!(bench.states(), [up("10.0.0.1:80"), up("10.0.0.2:80")]);
    bench.network.name("svc", &[address(2), address(3)]);
    bench.until(16.0).await;
    assert_eq!(bench.states(), [left("10.0.0.1:80"), up("10.0.0.2:80"), up("10.0.0.3:80")]);
    assert_eq!(bench.fleet.available(&"p".into(), bench.clock.now()), 2);
    let looked = bench.network.dials("10.0.0.1:80");
    bench.until(30.0).await;
    assert_eq!(bench.network.dials("10.0.0.1:80"), looked, "nobody looks at it any more");
}

#[tokio::test(start_paused = true)]
async fn a_reload_that_changes_nothing_does_not_disturb_the_looks() {
    let mut bench = Bench::new();
    let script = Script::well();
    bench.engine("e:8000", &script);
    bench.apply_settings(plain_pool());
    bench.until(1.0).await;
    let before = script.heads().len();
    bench.apply_settings(plain_pool());
    bench.until(1.5).await;
    assert_eq!(script.heads().len(), before);
    bench.apply_settings(PoolSettings {
        health: Some(HealthCheck { path: "/ready".into(), ..HealthCheck::default() }),
        ..plain_pool()
    });
    script.says("/ready", 200, "");
    bench.until(1.6).await;
    assert!(script.heads()[before].starts_with("GET /ready "));
    bench.probes.apply_settings(&[]);
    bench.until(2.0).await;
    let after = script.heads().len();
    bench.until(60.0).await;
    assert_eq!(script.heads().len(), after);
}

#[tokio::test(start_paused = true)]
async fn looks_are_spread() {
    let mut bench = Bench::new();
    let script = Script::well();
    bench.engine("e:8000", &script);
    bench.apply_settings(plain_pool());
    bench.until(200.0).await;
    let checks = script.heads().iter().filter(|head| head.contains("/health")).count();
    assert!((95..=106).contains(&checks), "{checks}");
}

/// C81: a response to a request is as good as a health check.
#[tokio::test(start_paused = true)]
async fn an_engine_whose_tokens_come_is_not_taken_out_by_a_health_that_is_silent() {
    let mut bench = Bench::new();
    let script = Script::well();
    bench.engine("e:8000", &script);
    bench.apply_settings(plain_pool());
    bench.until(0.8).await;
    script.falls_silent();
    let mut attempts = super::super::retry::Attempts::new(&plain_pool(), Tick::from_millis(1_000_000));
    let choice = bench.fleet.choose(&"p".into(), &mut attempts, WorkEstimate::default(), bench.clock.now()).unwrap();
    for tenth in 9..140 {
        bench.until(f64::from(tenth) / 10.0).await;
        choice.work.signals().is_alive(bench.clock.now());
        assert_eq!(bench.state(), EngineState::Up, "at {tenth} tenths");
    }
    bench.until(40.0).await;
    assert_eq!(bench.state(), EngineState::Down, "and nothing came any more");
    choice.work.signals().is_alive(bench.clock.now());
    bench.until(44.0).await;
    assert_eq!(bench.state(), EngineState::Up, "it was only silent: the next token has it back");
}

#[tokio::test(start_paused = true)]
async fn an_adapter_is_known_a_second_after_it_was_loaded_where_there_is_a_choice() {
    let mut bench = Bench::new();
    let (first, second) = (Script::well(), Script::well());
    bench.engine("e:8000", &first);
    bench.engine("f:8000", &second);
    let list = |names: &[&str]| {
        let data: Vec<_> = names.iter().map(|name| serde_json::json!({"id": name})).collect();
        serde_json::json!({"object": "list", "data": data}).to_string()
    };
    let _ = [&first, &second].map(|script| script.says("/v1/models", 200, &list(&["base"])));
    let mut pool = plain_pool();
    let EngineSource::Static(addresses) = &mut pool.engines else { panic!("a fixed list") };
    addresses.push(EngineAddress { host: "f".into(), ..addresses[0].clone() });
    bench.apply_settings(pool);
    let without = |model: &str| {
        let without = bench.fleet.live_pool(&"p".into()).unwrap().engines_without(model);
        without.iter().flat_map(|list| list.iter()).map(ToString::to_string).collect::<Vec<_>>()
    };
    bench.until(10.0).await;
    assert_eq!((without("base"), without("lora_3")), (vec![], vec![]));
    second.says("/v1/models", 200, &list(&["base", "lora_3"]));
    bench.until(11.2).await;
    assert_eq!(without("lora_3"), ["e:8000"]);
    first.says("/v1/models", 200, &list(&["base", "lora_3"]));
    bench.until(12.4).await;
    assert_eq!(without("lora_3"), [""; 0]);
    assert_eq!(bench.fleet.all_models(&"p".into()).unwrap().len(), 2);
}

/// C83, with several addresses of an engine's name: health checks try the next address as requests
/// do.
#[tokio::test(start_paused = true)]
async fn a_name_whose_first_address_is_dead_is_well_and_its_second_is_remembered() {
    let mut bench = Bench::new();
    let address = |last| IpAddr::from([10, 0, 0, last]);
    bench.network.name("e", &[address(1), address(2)]);
    bench.network.silence("10.0.0.1:8000");
    bench.engine("10.0.0.2:8000", &Script::well());
    bench.apply_settings(plain_pool());
    bench.until(0.3).await;
    assert_eq!(bench.state(), EngineState::Up);
    bench.until(30.0).await;
    assert_eq!(bench.state(), EngineState::Up);
    let silent = bench.network.dials("10.0.0.1:8000");
    assert!(silent <= 4, "{silent}: each kind of look asks it once, before anything is known");
    assert!(bench.network.dials("10.0.0.2:8000") > 10);
    bench.network.silence("10.0.0.2:8000");
    bench.engine("10.0.0.1:8000", &Script::well());
    bench.until(60.0).await;
    assert_eq!(bench.state(), EngineState::Up, "the other way round, too");
}

/// C91: one engine with two addresses is one engine.
#[tokio::test(start_paused = true)]
async fn of_a_name_with_both_families_the_one_that_answers_is_the_engine() {
    let (v4, v6) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]));
    let names = |bench: &Bench| {
        let there = bench.states().into_iter().filter(|(_, state)| *state != EngineState::Left);
        there.map(|(name, _)| name).collect::<Vec<_>>()
    };
    for (listens, engine) in [(v4, "10.0.0.1:80"), (v6, "[fd00::1]:80")] {
        let mut bench = Bench::new();
        bench.network.name("svc", &[v6, v4]);
        bench.network.silence(if listens == v4 { "[fd00::1]:80" } else { "10.0.0.1:80" });
        bench.engine(engine, &Script::well());
        bench.apply_settings(dns_pool());
        bench.until(1.0).await;
        assert_eq!(names(&bench), [engine]);
        // It is kept whatever the order of addresses, and whoever else listens.
        let other = if listens == v4 { "[fd00::1]:80" } else { "10.0.0.1:80" };
        bench.engine(other, &Script::well());
        bench.network.name("svc", &[v4, v6]);
        bench.until(20.0).await;
        assert_eq!(names(&bench), [engine]);
        bench.network.fail(engine, std::io::ErrorKind::ConnectionRefused);
        bench.until(32.0).await;
        assert_eq!(names(&bench), [other], "until it serves no more");
    }
}

/// C91: one of the two queries of a name fails now and then.
#[tokio::test(start_paused = true)]
async fn a_family_that_is_missing_from_a_few_lookups_stays_the_engines() {
    let (v4, v6) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]));
    for (ours, name, theirs, other) in
        [(v4, "10.0.0.1:80", v6, "[fd00::1]:80"), (v6, "[fd00::1]:80", v4, "10.0.0.1:80")]
    {
        let mut bench = Bench::new();
        bench.engine(name, &Script::well());
        bench.engine(other, &Script::well());
        bench.network.name("svc", &[ours]);
        bench.apply_settings(dns_pool());
        bench.until(1.0).await;
        let engines = |bench: &Bench| {
            bench
                .states()
                .into_iter()
                .filter(|(_, state)| *state == EngineState::Up)
                .map(|(name, _)| name)
                .collect::<Vec<_>>()
        };
        assert_eq!(engines(&bench), [name]);
        bench.network.name("svc", &[v6, v4]);
        bench.until(18.0).await;
        assert_eq!(engines(&bench), [name], "both are found, and it serves");
        bench.network.name("svc", &[theirs]);
        bench.until(31.0).await;
        assert_eq!(engines(&bench), [name], "three lookups missed it");
        bench.network.name("svc", &[v4, v6]);
        bench.until(38.0).await;
        bench.network.name("svc", &[theirs]);
        bench.until(51.0).await;
        assert_eq!(engines(&bench), [name], "and three again");
        bench.until(58.0).await;
        assert_eq!(engines(&bench), [other], "it has gone from the name");
    }
}

#[tokio::test(start_paused = true)]
async fn the_settings_choose_the_family() {
    let (v4, v6) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]));
    let (v4_of_another, v6_of_another) = (IpAddr::from([10, 0, 0, 2]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 2]));
    let mapped = "::ffff:10.0.0.1".parse().unwrap();
    for (family, found, engines) in [
        (AddressFamily::Ipv4, &[v6, v4][..], &["10.0.0.1:80"][..]),
        (AddressFamily::Ipv6, &[v6, v4], &["[fd00::1]:80"]),
        (AddressFamily::Both, &[v6, v4], &["10.0.0.1:80", "[fd00::1]:80"]),
        (AddressFamily::Auto, &[v6], &["[fd00::1]:80"]),
        (AddressFamily::Ipv4, &[v6], &[]),
        (AddressFamily::Auto, &[mapped, v4], &["10.0.0.1:80"]),
        (AddressFamily::Both, &[mapped, v4], &["10.0.0.1:80"]),
        (AddressFamily::Auto, &[v6, v6], &["[fd00::1]:80"]),
        // Two engines, of which one has no address of the other family, whatever comes first.
        (AddressFamily::Auto, &[v6, v4, v4_of_another], &["10.0.0.1:80", "10.0.0.2:80"]),
        (AddressFamily::Auto, &[v6_of_another, v4, v6], &["[fd00::1]:80", "[fd00::2]:80"]),
    ] {
        let mut bench = Bench::new();
        bench.network.name("svc", found);
        for at in ["10.0.0.1:80", "10.0.0.2:80", "[fd00::1]:80", "[fd00::2]:80"] {
            bench.engine(at, &Script::well());
        }
        let mut pool = dns_pool();
        if let EngineSource::Dns(dns) = &mut pool.engines {
            dns.family = family;
        }
        bench.apply_settings(pool);
        bench.until(1.0).await;
        let names: Vec<_> = bench.states().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, engines, "{family:?} {found:?}");
    }
}

async fn surveyed(bench: &Bench, pool: PoolSettings) -> Survey {
    survey(&[Arc::new(pool)], Arc::new(bench.network.clone()), bench.clock).await.remove(0)
}

/// C109
#[tokio::test(start_paused = true)]
async fn a_survey_tells_what_an_engine_is_and_whether_it_takes_the_key() {
    let mut bench = Bench::new();
    let script = Script::well();
    script.says("/v1/models", 200, r#"{"data":[{"id":"a"},{"id":"b"},{"id":"c"},{"id":"d"},{"id":"e"},{"id":"f"}]}"#);
    script.says("/version", 200, r#"{"version":"0.9.1"}"#);
    bench.engine("e:8000", &script);
    let with_key = || PoolSettings { api_key: Some("secret".to_owned().into()), engine_priority: true, ..plain_pool() };
    let well = surveyed(&bench, with_key()).await;
    assert!(well.is_well() && well.priority_scheduling);
    assert_eq!((well.kind, well.version.as_deref(), well.key), ("vllm", Some("0.9.1"), KeyState::Accepted));
    assert_eq!(well.models_shown(), "a, b, c, d, e and 1 more");
    assert_eq!(surveyed(&bench, plain_pool()).await.key, KeyState::NotNeeded);
    script.says("/v1/models", 401, "{}");
    let refused = surveyed(&bench, plain_pool()).await;
    assert_eq!((refused.key, refused.is_well(), refused.trouble), (KeyState::Refused, false, None));
    script.says("/health", 503, "");
    assert_eq!(surveyed(&bench, plain_pool()).await.trouble.as_deref(), Some("/health answers 503"));
    script.falls_silent();
    let silent = surveyed(&bench, plain_pool()).await;
    assert_eq!(silent.trouble.as_deref(), Some("/health was not answered within 2s"));
    assert_eq!((silent.key, silent.models_shown()), (KeyState::Unknown, "not told".to_owned()));
    bench.network.fail("e:8000", std::io::ErrorKind::ConnectionRefused);
    assert_eq!(surveyed(&bench, plain_pool()).await.trouble.as_deref(), Some("the port refuses connections"));
    bench.network.silence("e:8000");
    let trouble = surveyed(&bench, PoolSettings { health: None, ..plain_pool() }).await.trouble;
    assert_eq!(trouble.as_deref(), Some("no connection within `connect_timeout`"));
    let nowhere = surveyed(&bench, dns_pool()).await;
    assert_eq!(nowhere.trouble.as_deref(), Some("the name svc has no address that could be an engine"));
}

#[tokio::test(start_paused = true)]
async fn the_cause_behind_an_engine_that_cannot_be_asked_says_what_may_be_wrong() {
    let address = |scheme| EngineAddress { scheme, host: "e".into(), port: 1, base: "".into(), name: None };
    let garbled = || ProbeFailure::Dial(std::io::Error::new(std::io::ErrorKind::InvalidData, "corrupt message"));
    let cause = garbled().cause(&address(Scheme::Https));
    assert_eq!(cause, "no connection: corrupt message; if it speaks plain HTTP, write http:// in the settings");
    assert!(!garbled().cause(&address(Scheme::Http)).contains("http://"));
    // A TLS server responds to a plain request with an alert.
    let bench = Bench::new();
    let mut listener = bench.network.listen("e:8000");
    let engine = tokio::spawn(async move {
        let mut connection = listener.accept().await;
        let _ = connection.write_all(b"\x15\x03\x01\x00\x02\x02\x46").await;
    });
    let client = ProbeClient { dial: Arc::new(bench.network.clone()), clock: bench.clock };
    let EngineSource::Static(addresses) = plain_pool().engines else { panic!("a fixed list") };
    let failed = client.ask(&plain_pool(), &addresses[0], "/health").await.err().expect("no HTTP");
    let cause = failed.cause(&addresses[0]);
    assert!(cause.ends_with("if it speaks TLS, write https:// in the settings"), "{cause}");
    engine.await.unwrap();
}

//! Runs of a sweep through the whole stack, in virtual time: workload, client, observer, judge, monitor.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::HeaderMap;

use super::knee::waits_at_most;
use super::{scripted, stream, target};
use crate::support::scripted_engine::{Script, ScriptedEngine};
use goodput::clock::Clock;
use goodput::dial::BoxedIo;
use goodput::forward::settings::Timeouts;
use goodput::judge::{Objective, Objectives};
use goodput::load::arrivals::ArrivalProcess;
use goodput::load::lengths::{LengthModel, TokenLengths};
use goodput::load::measure::{FinishedRun, RunSetting, goals_of};
use goodput::load::monitor::{RunRule, RunVerdict};
use goodput::load::probe::{ProbeError, ServiceProbe};
use goodput::load::prompts::PromptCalibration;
use goodput::load::result::Stretch;
use goodput::load::sweep::NextRun;
use goodput::load::workload::{CacheState, RunSeeds, Workload, WorkloadClass};
use goodput::load::{LoadClass, LoadTarget, RunControl, RunLimits};
use goodput::sim::engine::{EngineSpec, SimEngine, SimSettings};
use goodput::types::{ApiPath, ClassId};

fn workload(ttft: f64, input: u64, output: u64) -> Workload {
    let objective = Objective { threshold: Duration::from_secs_f64(ttft), attainment: 0.95 };
    let objectives = Objectives { ttft: Some(objective), joint_target: 0.92, ..Objectives::default() };
    let load =
        LoadClass { id: ClassId::from("chat"), objectives, timeouts: Timeouts::default(), headers: HeaderMap::new() };
    let fixed = |tokens| TokenLengths::Fixed { tokens };
    let lengths = LengthModel::fitted(fixed(input), fixed(output), 0.0).unwrap();
    Workload {
        model: "sim".to_owned(),
        endpoint: ApiPath::relayed("/v1/chat/completions").unwrap(),
        stream: true,
        classes: vec![WorkloadClass { load, weight: 1.0, lengths }],
        arrivals: ArrivalProcess::Poisson,
        ignore_eos: true,
        max_context: None,
        extra: serde_json::Map::new(),
        calibration: PromptCalibration::default(),
    }
}

const SEEDS: RunSeeds = RunSeeds { plan: 7, prompts: 8 };

fn at_rate(rate: f64, cache: CacheState) -> NextRun {
    NextRun { cache, rate, repetition: 1, number: 0 }
}

async fn measured(clock: Clock, target: &LoadTarget, workload: &Workload, next: NextRun, rule: RunRule) -> FinishedRun {
    let goals = goals_of(workload);
    let limits = RunLimits::default();
    let setting = RunSetting { clock, target, workload, goals: &goals, rule, limits, seeds: SEEDS };
    setting.measure(next, &RunControl::new(), |_| {}).await
}

fn simulated(engine: &SimEngine) -> LoadTarget {
    let engine = engine.clone();
    at_root(target(move || Ok(Box::new(engine.connect()) as BoxedIo)))
}

/// The same service, without a path in front of its API.
fn at_root(mut target: LoadTarget) -> LoadTarget {
    target.address.base = "".into();
    target
}

/// One request at a time, each for one step of 100 ms.
fn one_server() -> SimSettings {
    let shape = EngineSpec {
        max_running: 1,
        step_base: Duration::from_millis(100),
        per_decode: Duration::ZERO,
        per_prefill_token: Duration::ZERO,
        per_context_token: Duration::ZERO,
        jitter: 0.0,
        ..EngineSpec::default()
    };
    SimSettings { shape, ..SimSettings::default() }
}

#[tokio::test(start_paused = true)]
async fn an_engine_with_one_seat_attains_what_queueing_theory_says() {
    let clock = Clock::start();
    let engine = SimEngine::start(clock, one_server());
    let (target, workload) = (simulated(&engine), workload(0.35, 40, 1));
    let rule = RunRule { standard_error: 0.005, ..RunRule::default() };
    let run = measured(clock, &target, &workload, at_rate(6.0, CacheState::Cold), rule).await;
    // 250 ms of waiting are two and a half service times.
    let expected = waits_at_most(2.5, 0.6);
    let class = &run.result.classes[0];
    let interval = class.interval.unwrap();
    assert!(interval.low < expected && expected < interval.high, "{expected}: {class:?}");
    // Timers go by whole milliseconds.
    assert!(run.result.send_lag_p99_seconds < 0.001 && run.result.problems.is_empty(), "{:?}", run.result);
    assert!((run.result.throughput.requests_per_second / 6.0 - 1.0).abs() < 0.1, "{:?}", run.result.throughput);
    assert_eq!(class.judged, run.records.iter().filter(|(stretch, _)| *stretch == Stretch::Counted).count() as u64);
    assert!(run.records.iter().any(|(stretch, _)| *stretch == Stretch::WarmUp));
    let over = measured(clock, &target, &workload, at_rate(11.0, CacheState::Cold), RunRule::default()).await;
    assert_eq!((over.result.verdict, over.result.classes[0].attainment), (RunVerdict::Unsteady, None));
}

#[tokio::test(start_paused = true)]
async fn a_prefix_cache_holds_what_was_stated_and_nothing_of_a_cold_run() {
    let clock = Clock::start();
    let engine = SimEngine::start(clock, SimSettings::default());
    let target = simulated(&engine);
    let mut workload = workload(1.0, 800, 4);
    let answer = ServiceProbe::new(clock, &target).calibrate(&workload, 1).await.unwrap();
    assert!(answer.calibration.is_measured && answer.takes_ignore_eos, "{answer:?}");
    workload.calibration = answer.calibration;
    let rule = RunRule { warm_up_seconds: 2.0, min_seconds: 10.0, ..RunRule::default() };
    let mut hits = Vec::new();
    for cache in [CacheState::Cold, CacheState::Warm { hit_share: 0.5, groups: 2 }] {
        let before = engine.gauges();
        let run = measured(clock, &target, &workload, at_rate(20.0, cache), rule).await;
        let after = engine.gauges();
        let looked_up = (after.prefix_queries - before.prefix_queries) as f64;
        hits.push((after.prefix_hits - before.prefix_hits) as f64 / looked_up);
        let class = &run.result.classes[0];
        let reported = class.reported_input_tokens.unwrap();
        assert!((reported / 800.0 - 1.0).abs() < 0.02, "{reported} tokens instead of 800");
    }
    assert!(hits[0] < 0.01 && (0.44..0.52).contains(&hits[1]), "{hits:?}");
}

#[tokio::test(start_paused = true)]
async fn a_service_that_dies_ends_the_run_and_what_was_seen_is_kept() {
    let clock = Clock::start();
    let engine = ScriptedEngine::always(clock, stream(100, 120).close());
    let is_gone = Arc::new(AtomicBool::new(false));
    let (gone, connects) = (Arc::clone(&is_gone), engine.clone());
    let target = target(move || match gone.load(Ordering::Relaxed) {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(Box::new(connects.connect()) as BoxedIo),
    });
    let workload = workload(1.0, 20, 2);
    let goals = goals_of(&workload);
    let (rule, limits) = (RunRule::default(), RunLimits::default());
    let setting = RunSetting { clock, target: &target, workload: &workload, goals: &goals, rule, limits, seeds: SEEDS };
    let next = at_rate(5.0, CacheState::Cold);
    let run = setting
        .measure(next, &RunControl::new(), |standing| {
            is_gone.fetch_or(standing.sent > 60, Ordering::Relaxed);
        })
        .await;
    assert_eq!(run.result.verdict, RunVerdict::Partial);
    assert!(run.gone.as_deref().unwrap().contains("cannot connect"), "{:?}", run.gone);
    assert!((80..100).contains(&run.records.len()), "{}", run.records.len());
    assert_eq!(run.records.iter().filter(|(_, record)| record.is_met()).count(), 60);
}

#[tokio::test(start_paused = true)]
async fn an_interrupted_run_is_partial_and_leaves_nothing_open() {
    let clock = Clock::start();
    let engine = ScriptedEngine::always(clock, stream(100, 5000));
    let (target, workload) = (scripted(&engine), workload(1.0, 20, 2));
    let goals = goals_of(&workload);
    let (rule, limits) = (RunRule::default(), RunLimits::default());
    let setting = RunSetting { clock, target: &target, workload: &workload, goals: &goals, rule, limits, seeds: SEEDS };
    let interrupt = RunControl::new();
    let stops = interrupt.clone();
    let next = at_rate(5.0, CacheState::Cold);
    let run = setting
        .measure(next, &interrupt, |standing| {
            if standing.sent == 50 {
                stops.abort()
            }
        })
        .await;
    assert_eq!((run.result.verdict, run.gone, run.records.len()), (RunVerdict::Partial, None, 50));
    assert!(run.records.iter().any(|(_, record)| record.reason == "client_cancel"), "open ones were left");
    assert!(run.result.classes.iter().all(|class| class.attainment.is_none()));
    assert!(run.result.problems.is_empty(), "its own leaving is no refusal: {:?}", run.result.problems);
    engine.log().quiet().await;
}

#[tokio::test(start_paused = true)]
async fn refused_requests_make_a_run_invalid_and_not_better() {
    let clock = Clock::start();
    let refused = Script::json(400, r#"{"error":{"message":"too long"}}"#);
    let engine = ScriptedEngine::new(
        clock,
        move |request| {
            if request.number % 10 == 0 { refused.clone() } else { stream(100, 120) }
        },
    );
    let (target, workload) = (scripted(&engine), workload(1.0, 20, 2));
    let run = measured(clock, &target, &workload, at_rate(20.0, CacheState::Cold), RunRule::default()).await;
    assert_eq!((run.result.verdict, run.result.classes[0].attainment), (RunVerdict::Invalid, None));
    let problem = &run.result.problems[0];
    assert!(problem.contains("invalid_request") && problem.contains("status 400"), "{problem}");
}

#[tokio::test(start_paused = true)]
async fn a_probe_says_what_the_service_said() {
    let clock = Clock::start();
    let workload = workload(1.0, 20, 2);
    let models = r#"{"object":"list","data":[{"id":"a"},{"id":"b"}]}"#;
    let engine = ScriptedEngine::always(clock, Script::json(200, models));
    assert_eq!(ServiceProbe::new(clock, &scripted(&engine)).models().await.unwrap(), ["a", "b"]);
    let strange = ScriptedEngine::always(clock, Script::answer(200, &[], "<html>"));
    let error = ServiceProbe::new(clock, &scripted(&strange)).models().await.unwrap_err();
    assert!(matches!(error, ProbeError::Strange { .. }), "{error}");
    let keyed = ScriptedEngine::always(clock, Script::json(401, r#"{"error":{"message":"no\nkey"}}"#));
    let error = ServiceProbe::new(clock, &scripted(&keyed)).calibrate(&workload, 1).await.unwrap_err();
    assert_eq!(error.to_string(), "/v1/chat/completions answered 401 Unauthorized: no key");
    let silent = ScriptedEngine::always(clock, Script::new().silence());
    let error = ServiceProbe::new(clock, &scripted(&silent)).models().await.unwrap_err();
    assert!(error.to_string().contains("no answer within 120 s"), "{error}");
}

/// OpenAI's own API refuses fields that it does not know; others report no usage.
#[tokio::test(start_paused = true)]
async fn a_service_that_refuses_ignore_eos_is_asked_without_and_one_without_usage_is_not_believed() {
    let clock = Clock::start();
    let engine =
        ScriptedEngine::new(clock, |request| match String::from_utf8_lossy(&request.body).contains("ignore_eos") {
            true => Script::json(400, r#"{"error":{"message":"unknown field"}}"#),
            false => Script::json(200, r#"{"choices":[]}"#),
        });
    let answer = ServiceProbe::new(clock, &scripted(&engine)).calibrate(&workload(1.0, 20, 2), 1).await.unwrap();
    assert!(!answer.takes_ignore_eos && !answer.calibration.is_measured);
    assert_eq!(answer.calibration, PromptCalibration::default());
}

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::Value;
use tokio::io::AsyncReadExt;

use super::*;
use crate::admit::limit::{LimitKind, LimitScope, LimitStatus};
use crate::admit::overload_control::{ActionKind, AppliedActions};
use crate::gateway::completion::{RequestGuard, judge_response};
use crate::judge::{Excluded, JudgeContext, Missed, Objective, ObjectiveState, Objectives, Outcome, Verdict};
use crate::observe::{Choice, Ending, Gaps, ResponseFormat, Timeline, TokenSource, Usage};
use crate::record::settings::{MetricLabels, RequestLabel};
use crate::reject::Rejection;
use crate::types::{ApiPath, ClientState, Dialect, LengthBucket, TenantId, Tokens};

pub(super) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn at(millis: u64) -> Tick {
    Tick::from_millis(millis)
}

fn chat() -> Arc<Objectives> {
    let objective = |millis| Some(Objective { threshold: ms(millis), attainment: 0.95 });
    Arc::new(Objectives { ttft: objective(1200), tpot: objective(50), joint_target: 0.9, ..Objectives::default() })
}

pub(super) fn shape() -> SeriesShape {
    let class = |id: &str| ClassShape { id: ClassId::from(id), objectives: chat(), takes_targets: false };
    let route = |class: &str, pool: &str, model: &str| (ClassId::from(class), PoolId::from(pool), Arc::from(model));
    SeriesShape {
        classes: vec![class("chat"), class("batch")],
        default_class: ClassId::from("chat"),
        routes: vec![
            route("chat", "main", "llama-*"),
            route("chat", "spare", "llama-*"),
            route("batch", "main", "other"),
        ],
        tenants: vec![
            TenantShape {
                id: TenantId::from("acme"),
                classes: Some(vec![ClassId::from("chat")]),
                limits: vec![
                    (LimitKind::Tokens, LimitScope::Tenant),
                    (LimitKind::Tokens, LimitScope::Model),
                    (LimitKind::ConcurrentRequests, LimitScope::Tenant),
                ],
            },
            tenant("anonymous"),
        ],
        labels: MetricLabels::default(),
    }
}

fn tenant(id: &str) -> TenantShape {
    TenantShape { id: TenantId::from(id), classes: None, limits: Vec::new() }
}

/// A recorder on a paused clock, with these settings.
fn recorder() -> Recorder {
    let recorder = Recorder::new(Clock::start(), None);
    recorder.bind(&shape());
    recorder
}

/// Four tokens at 300, 340, 380 and 420 ms, finished.
pub(super) fn answer() -> Timeline {
    let choice = Choice {
        index: 0,
        first_token: Some(at(300)),
        first_visible: Some(at(340)),
        last_token: Some(at(420)),
        events: 4,
        tokens: 4.0,
        finished: true,
    };
    Timeline {
        start: at(0),
        streamed: true,
        reader: ResponseFormat::Events,
        first_token: choice.first_token,
        first_visible: choice.first_visible,
        last_token: choice.last_token,
        finish: Some(at(430)),
        end: at(440),
        choices: vec![choice],
        gaps: Gaps { largest: Some(ms(40)), sum: ms(120), ..Gaps::default() },
        usage: Usage { input: Some(Tokens(11)), output: Some(Tokens(4)), ..Usage::default() },
        source: TokenSource::Usage,
        output: Tokens(4),
        token_events: 4,
        cut_by_length: true,
        has_finish_reason: true,
        error: None,
        unparseable: false,
        status: 200,
        has_output: true,
        has_visible: true,
        has_lumps: false,
        limited: None,
        ending: Ending::Clean,
    }
}

/// An attempt whose response was relayed.
fn attempt(begin: u64) -> AttemptRecord {
    AttemptRecord {
        pool: PoolId::from("main"),
        engine: EngineId::from("vllm-0:8000"),
        begin: at(begin),
        failure: None,
        span: None,
    }
}

pub(super) fn finished(verdict: Verdict) -> RequestRecord {
    RequestRecord {
        request_id: RequestId::from("r-1"),
        endpoint: ApiPath::relayed("/v1/chat/completions"),
        tenant: Some(TenantId::from("acme")),
        class: Some(ClassId::from("chat")),
        rule: Some(Arc::from("rule 1")),
        model: Some(Arc::from("llama-*")),
        pool: Some(PoolId::from("main")),
        engine: Some(EngineId::from("vllm-0:8000")),
        attempts: vec![attempt(20)],
        retries: RetryCounts::default(),
        status: 200,
        left: false,
        streamed: true,
        choices: 1,
        stated_cap: Some(Tokens(64)),
        length: LengthBucket::Short,
        prompt: Tokens(9),
        prompt_shape: None,
        arrival: at(0),
        body_complete: Some(at(20)),
        client_wait: Some(Duration::ZERO),
        admitted: Some(at(20)),
        end: at(440),
        verdict,
        timeline: None,
        gap_edges: None,
        refusal: None,
        limited: None,
        over_limit: false,
        spilled: false,
        degraded: AppliedActions::default(),
        cap_lowered: false,
        asked: None,
        trace: None,
    }
}

fn accept(recorder: &Recorder, id: RequestId, arrival: Tick) -> RequestGuard {
    RequestGuard::new(recorder.open(id, arrival, ClientState::default()))
}

fn end(request: RequestGuard, timeline: Timeline, rejection: Option<&Rejection>) {
    let verdict = judge_response(&request, &timeline, rejection);
    request.record_response(verdict, timeline, rejection);
}

fn promise() -> RequestPolicy {
    RequestPolicy {
        start: at(0),
        class: ClassId::from("chat"),
        rule: Arc::from("default"),
        objectives: chat(),
        length: LengthBucket::Medium,
        prompt: Tokens(2000),
        streamed: true,
        choices: 1,
        gap_edges: [].into(),
        case: JudgeContext::of(Dialect::Chat),
    }
}

/// Samples of a page: name and labels -> value.
pub(super) fn samples(recorder: &Recorder) -> BTreeMap<String, f64> {
    let page = recorder.page(Format::Text);
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

/// Samples without those of the process, which change on their own.
fn of_requests(recorder: &Recorder) -> BTreeMap<String, f64> {
    samples(recorder).into_iter().filter(|(name, _)| !name.starts_with("process_")).collect()
}

fn sum(samples: &BTreeMap<String, f64>, name: &str, label: &str) -> f64 {
    let of = |key: &str| key.split('{').next() == Some(name) && key.contains(label);
    samples.iter().filter(|(key, _)| of(key)).map(|(_, value)| value).sum()
}

#[tokio::test(start_paused = true)]
async fn every_reachable_series_is_there_at_zero_before_the_first_request() {
    let samples = samples(&recorder());
    for (class, pool, model) in [("chat", "main", "llama-*"), ("chat", "spare", "llama-*"), ("batch", "main", "other")]
    {
        for length in ["short", "medium", "long", "unknown"] {
            let labels = format!("class=\"{class}\",length=\"{length}\",pool=\"{pool}\",model=\"{model}\"");
            assert_eq!(samples.get(&format!("slo_met_total{{{labels}}}")), Some(&0.0));
            assert_eq!(samples.get(&format!("slo_total{{{labels}}}")), Some(&0.0));
        }
    }
    assert!(!samples.keys().any(|key| key.contains("pool=\"spare\"") && key.contains("class=\"batch\"")));
    // A miss before classification has a series too.
    let early = "class=\"chat\",length=\"unknown\",pool=\"none\",model=\"other\"";
    assert_eq!(samples.get(&format!("slo_total{{{early}}}")), Some(&0.0));
    assert_eq!(samples.get("goodput_in_flight{class=\"chat\",pool=\"main\"}"), Some(&0.0));
    assert_eq!(samples.get("goodput_overdue{class=\"batch\"}"), Some(&0.0));
}

#[tokio::test(start_paused = true)]
async fn c23_every_threshold_is_an_edge() {
    let page = recorder().page(Format::Text);
    let has = |name: &str, edge: &str| {
        let mut lines = page.lines().filter(|line| line.starts_with(name) && line.contains("class=\"chat\""));
        lines.any(|line| line.contains(&format!("le=\"{edge}\"")))
    };
    for edge in ["1.2", "0.005", "120"] {
        assert!(has("goodput_time_to_first_token_seconds_bucket", edge), "{edge}");
    }
    assert!(has("goodput_time_per_output_token_seconds_bucket", "0.05"));
    assert!(has("goodput_inter_token_gap_seconds_bucket", "2.5"));
    assert!(has("goodput_e2e_seconds_bucket", "600"));
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_counted_once_in_each_family() {
    let recorder = recorder();
    let mut timeline = answer();
    let edges = recorder.gap_edges(&ClassId::from("chat")).unwrap();
    timeline.gaps.buckets = vec![0; edges.len() + 1];
    timeline.gaps.buckets[edges.partition_point(|edge| *edge < ms(40))] = 3;
    let verdict = crate::judge::judge(&timeline, &chat(), &JudgeContext::of(Dialect::Chat));
    let retries = [1, 0, 2, 0, 0, 0];
    recorder.note(RequestRecord { timeline: Some(timeline), gap_edges: Some(edges), retries, ..finished(verdict) });
    let samples = samples(&recorder);
    let at_labels = |name: &str, labels: &str| samples[&format!("{name}{{{labels}}}")];
    let place = "class=\"chat\",pool=\"main\"";
    let full = "class=\"chat\",length=\"short\",pool=\"main\",model=\"llama-*\"";
    assert_eq!(at_labels("slo_total", full), 1.0);
    assert_eq!(at_labels("slo_met_total", full), 1.0);
    assert_eq!(at_labels("goodput_requests_finished_total", &format!("{full},outcome=\"met\"")), 1.0);
    for objective in ["ttft", "tpot"] {
        let labels = format!("{place},objective=\"{objective}\"");
        assert_eq!(at_labels("goodput_slo_objective_met_total", &labels), 1.0);
        assert_eq!(at_labels("goodput_slo_objective_total", &labels), 1.0);
    }
    assert_eq!(at_labels("goodput_time_to_first_token_seconds_sum", place), 0.3);
    assert_eq!(at_labels("goodput_time_to_first_visible_token_seconds_sum", place), 0.34);
    assert_eq!(
        at_labels("goodput_time_per_output_token_seconds_sum", &format!("{place},token_source=\"usage\"")),
        0.04
    );
    assert_eq!(at_labels("goodput_inter_token_gap_seconds_count", place), 3.0);
    assert_eq!(at_labels("goodput_inter_token_gap_seconds_sum", place), 0.12);
    assert_eq!(at_labels("goodput_e2e_seconds_sum", place), 0.43);
    assert_eq!(at_labels("goodput_upload_seconds_sum", place), 0.02);
    assert_eq!(at_labels("goodput_queue_seconds_count", place), 1.0);
    assert_eq!(at_labels("goodput_cancel_seconds_count", place), 0.0);
    assert_eq!(at_labels("goodput_truncated_answers_total", place), 1.0);
    assert_eq!(at_labels("goodput_tokens_total", "tenant=\"acme\",direction=\"input\""), 11.0);
    assert_eq!(at_labels("goodput_tokens_total", "tenant=\"acme\",direction=\"output\""), 4.0);
    assert_eq!(at_labels("goodput_tenant_slo_met_total", "tenant=\"acme\",class=\"chat\""), 1.0);
    assert_eq!(at_labels("goodput_retries_total", "reason=\"stale_connection\""), 1.0);
    assert_eq!(at_labels("goodput_retries_total", "reason=\"push_back\""), 2.0);
    assert_eq!(at_labels("goodput_slo_attainment", "class=\"chat\",window=\"5m\""), 1.0);
    assert_eq!(sum(&samples, "goodput_slo_missed_total", ""), 0.0);
}

#[tokio::test(start_paused = true)]
async fn points_that_were_not_reached_leave_no_sample() {
    let recorder = recorder();
    let timeline = Timeline { finish: None, ending: Ending::Broken, ..answer() };
    let verdict = crate::judge::judge(&timeline, &chat(), &JudgeContext::of(Dialect::Chat));
    assert_eq!(verdict.outcome, Outcome::Missed(Missed::Truncated));
    recorder.note(RequestRecord { timeline: Some(timeline), ..finished(verdict) });
    let samples = samples(&recorder);
    assert_eq!(sum(&samples, "goodput_time_to_first_token_seconds_count", ""), 1.0);
    assert_eq!(sum(&samples, "goodput_time_per_output_token_seconds_count", ""), 0.0);
    assert_eq!(sum(&samples, "goodput_e2e_seconds_count", ""), 0.0);
    assert_eq!(sum(&samples, "goodput_truncated_answers_total", ""), 0.0);
    assert_eq!(sum(&samples, "goodput_slo_objective_total", "objective=\"ttft\""), 1.0);
    assert_eq!(sum(&samples, "goodput_slo_objective_total", "objective=\"tpot\""), 0.0);
}

#[tokio::test(start_paused = true)]
async fn what_ends_before_it_has_a_class_is_counted_without_one_and_a_miss_in_the_default() {
    let recorder = recorder();
    accept(&recorder, RequestId::from("a"), at(0)).reject(&Rejection::UnknownKey);
    accept(&recorder, RequestId::from("b"), at(0)).reject(&Rejection::Draining);
    accept(&recorder, RequestId::from("c"), at(0)).answered(200);
    let samples = samples(&recorder);
    assert_eq!(samples["goodput_slo_excluded_total{class=\"none\",pool=\"none\",reason=\"unauthorized\"}"], 1.0);
    assert_eq!(samples["goodput_slo_excluded_total{class=\"none\",pool=\"none\",reason=\"unjudged\"}"], 1.0);
    assert_eq!(samples["goodput_slo_missed_total{class=\"chat\",pool=\"none\",reason=\"shed\"}"], 1.0);
    assert_eq!(sum(&samples, "goodput_requests_finished_total", ""), 3.0);
    assert_eq!(sum(&samples, "slo_total", ""), 1.0);
}

#[tokio::test(start_paused = true)]
async fn what_came_to_a_path_that_is_not_judged_is_no_miss_also_without_a_class() {
    let recorder = recorder();
    let visit = |is_judged| {
        let mut visit = accept(&recorder, RequestId::from("r"), at(0));
        visit.set_endpoint(ApiPath::find("POST", "/v1/embeddings").unwrap(), is_judged);
        visit
    };
    for refusal in [Rejection::Draining, Rejection::Internal, Rejection::DrainCut] {
        visit(false).reject(&refusal);
    }
    visit(false).reject(&Rejection::UnknownKey);
    visit(true).reject(&Rejection::Draining);
    let samples = samples(&recorder);
    assert_eq!(samples["goodput_slo_excluded_total{class=\"none\",pool=\"none\",reason=\"unjudged\"}"], 3.0);
    assert_eq!(samples["goodput_slo_excluded_total{class=\"none\",pool=\"none\",reason=\"unauthorized\"}"], 1.0);
    assert_eq!(sum(&samples, "slo_total", ""), 1.0, "the judged one");
}

#[tokio::test(start_paused = true)]
async fn c68_nothing_a_client_sends_becomes_a_series() {
    let recorder = recorder();
    let before = samples(&recorder).len();
    for i in 0..5000 {
        let verdict = Verdict::bare(Outcome::Excluded(Excluded::InvalidRequest));
        let tenant = Some(TenantId::from(format!("t{i}")));
        let (model, pool) = (Some(Arc::from(format!("m{i}"))), Some(PoolId::from(format!("p{i}"))));
        recorder.note(RequestRecord { tenant, model, pool, ..finished(verdict) });
    }
    let samples = samples(&recorder);
    assert_eq!(samples.len(), before);
    assert_eq!(sum(&samples, "goodput_requests_finished_total", "outcome=\"excluded\""), 5000.0);
}

#[tokio::test(start_paused = true)]
async fn tenants_beyond_two_hundred_share_one_series() {
    let recorder = Recorder::new(Clock::start(), None);
    let tenants = (0..300).map(|i| tenant(&format!("t{i}"))).collect();
    recorder.bind(&SeriesShape { tenants, ..shape() });
    for i in 0..300 {
        let tenant = Some(TenantId::from(format!("t{i}")));
        recorder.note(RequestRecord { tenant, timeline: Some(answer()), ..finished(Verdict::bare(Outcome::Met)) });
    }
    let samples = samples(&recorder);
    assert_eq!(samples["goodput_tenant_slo_total{tenant=\"other\",class=\"chat\"}"], 100.0);
    assert_eq!(samples["goodput_tokens_total{tenant=\"other\",direction=\"output\"}"], 400.0);
    assert_eq!(sum(&samples, "goodput_tenant_slo_total", ""), 300.0);
}

#[tokio::test(start_paused = true)]
async fn tenants_that_went_leave_their_places_to_others() {
    let recorder = Recorder::new(Clock::start(), None);
    for name in ["a", "b"] {
        let tenants = (0..200).map(|i| tenant(&format!("{name}{i}"))).collect();
        recorder.bind(&SeriesShape { tenants, ..shape() });
    }
    for name in ["a0", "b199"] {
        recorder.note(RequestRecord { tenant: Some(TenantId::from(name)), ..finished(Verdict::bare(Outcome::Met)) });
    }
    let told = samples(&recorder);
    assert_eq!(told["goodput_tenant_slo_total{tenant=\"a0\",class=\"chat\"}"], 1.0, "a request of before");
    assert_eq!(told["goodput_tenant_slo_total{tenant=\"b199\",class=\"chat\"}"], 1.0);
}

#[tokio::test(start_paused = true)]
async fn c40_a_reload_keeps_what_was_counted() {
    let recorder = recorder();
    recorder.note(RequestRecord { timeline: Some(answer()), ..finished(Verdict::bare(Outcome::Met)) });
    let before = of_requests(&recorder);
    recorder.bind(&shape());
    assert!(of_requests(&recorder) == before);
    // A removed class and route keep their counters; a running request still finds them.
    let mut smaller = shape();
    smaller.classes.remove(0);
    smaller.routes.retain(|(class, ..)| class.as_str() == "batch");
    smaller.default_class = ClassId::from("batch");
    recorder.bind(&smaller);
    recorder.note(finished(Verdict::bare(Outcome::Met)));
    let after = samples(&recorder);
    assert_eq!(sum(&after, "slo_total", "class=\"chat\""), 2.0);
    assert!(!after.keys().any(|key| key.starts_with("goodput_slo_burn_rate{class=\"chat\"")));
}

#[tokio::test(start_paused = true)]
async fn a_visit_that_is_dropped_is_a_client_that_left() {
    let recorder = recorder();
    let clock = recorder.0.clock;
    let visit = |uploaded: bool| {
        let mut visit = accept(&recorder, RequestId::from("r"), clock.now());
        visit.set_tenant(TenantId::from("acme"));
        if uploaded {
            visit.uploaded(clock.now(), Duration::ZERO);
        }
        visit.set_policy(promise());
        visit.routed(Arc::from("llama-*"), PoolId::from("spare"));
        visit
    };
    let (slow_upload, early, late) = (visit(false), visit(true), visit(true));
    assert_eq!(recorder.open_visits(), 3);
    let in_flight = samples(&recorder);
    assert_eq!(in_flight["goodput_in_flight{class=\"chat\",pool=\"spare\"}"], 3.0);
    assert_eq!(in_flight["goodput_overdue{class=\"chat\"}"], 0.0);
    clock.sleep_until(Some(clock.now() + ms(1200))).await;
    drop(early);
    clock.sleep_until(Some(clock.now() + ms(1))).await;
    assert_eq!(samples(&recorder)["goodput_overdue{class=\"chat\"}"], 2.0);
    drop(late);
    drop(slow_upload);
    let samples = samples(&recorder);
    assert_eq!(recorder.open_visits(), 0);
    assert_eq!(samples["goodput_slo_excluded_total{class=\"chat\",pool=\"spare\",reason=\"client_cancel\"}"], 2.0);
    assert_eq!(samples["goodput_slo_missed_total{class=\"chat\",pool=\"spare\",reason=\"canceled_late\"}"], 1.0);
    assert_eq!(samples["goodput_slo_objective_total{class=\"chat\",pool=\"spare\",objective=\"ttft\"}"], 1.0);
    assert_eq!(samples["goodput_cancel_seconds_count{class=\"chat\",pool=\"spare\"}"], 3.0);
    assert_eq!(samples["goodput_in_flight{class=\"chat\",pool=\"spare\"}"], 0.0);
}

#[tokio::test(start_paused = true)]
async fn an_engines_status_behind_a_head_of_ours_counts_as_if_it_had_been_relayed() {
    let recorder = recorder();
    let ended = |status, unknown| {
        let mut visit = accept(&recorder, RequestId::from("r"), at(0));
        visit.uploaded(at(1), Duration::ZERO);
        visit.set_policy(promise());
        visit.routed(Arc::from("llama-*"), PoolId::from("main"));
        visit.case_mut().unwrap().model_unknown_to_pool = unknown;
        let nothing = Timeline { first_token: None, finish: None, choices: vec![], ..answer() };
        end(visit, nothing, Some(&Rejection::EngineAnswered { status }));
    };
    ended(503, false);
    ended(404, false);
    ended(404, true);
    let samples = samples(&recorder);
    assert_eq!(sum(&samples, "goodput_slo_missed_total", "upstream_overload"), 1.0);
    assert_eq!(sum(&samples, "goodput_slo_missed_total", "upstream_error"), 1.0);
    assert_eq!(sum(&samples, "goodput_slo_excluded_total", "invalid_request"), 1.0);
}

#[tokio::test(start_paused = true)]
async fn a_visit_that_is_dropped_in_a_panic_is_a_fault_of_ours() {
    let recorder = recorder();
    let visit = accept(&recorder, RequestId::from("r"), at(0));
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _held = visit;
        panic!("as the test wants it");
    }));
    assert!(caught.is_err());
    let samples = samples(&recorder);
    assert_eq!(samples["goodput_slo_missed_total{class=\"chat\",pool=\"none\",reason=\"internal\"}"], 1.0);
    assert_eq!(recorder.open_visits(), 0);
}

#[tokio::test(start_paused = true)]
async fn draining_waits_for_the_last_visit() {
    let recorder = recorder();
    recorder.emptied().await;
    let (first, second) =
        (accept(&recorder, RequestId::from("a"), at(0)), accept(&recorder, RequestId::from("b"), at(0)));
    let waiting = tokio::spawn({
        let recorder = recorder.clone();
        async move { recorder.emptied().await }
    });
    tokio::task::yield_now().await;
    first.answered(200);
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    end(second, answer(), None);
    waiting.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_refuses_is_counted_for_its_tenant_and_only_limits_that_it_has_are_told() {
    let recorder = recorder();
    let before = samples(&recorder);
    let limited = |limit: &str, scope: &str| {
        format!("goodput_rate_limited_total{{tenant=\"acme\",limit=\"{limit}\",scope=\"{scope}\"}}")
    };
    assert_eq!(before.get(&limited("tokens_per_minute", "tenant")), Some(&0.0));
    assert_eq!(before.get(&limited("requests_per_minute", "tenant")), None);
    assert_eq!(before.get(&limited("concurrent_requests", "model")), None);
    assert_eq!(before.get("goodput_over_limit_total{tenant=\"acme\"}"), Some(&0.0));
    assert!(!before.keys().any(|name| name.contains("limit") && name.contains("anonymous")));
    let sample = Rejection::samples().into_iter().find_map(|refusal| refusal.limit().copied()).expect("a sample");
    for scope in [LimitScope::Tenant, LimitScope::Model, LimitScope::Model] {
        let mut visit = accept(&recorder, RequestId::from("r"), at(0));
        visit.set_tenant(TenantId::from("acme"));
        visit.set_policy(promise());
        visit.reject(&Rejection::RateLimitExceeded {
            limit_status: LimitStatus { scope, ..sample },
            retry_after: Some(1),
        });
    }
    let after = samples(&recorder);
    assert_eq!(after[&limited("tokens_per_minute", "tenant")], 1.0);
    assert_eq!(after[&limited("tokens_per_minute", "model")], 2.0);
    assert_eq!(after["goodput_refused_total{code=\"rate_limit_exceeded\"}"], 3.0);
    assert_eq!(sum(&after, "goodput_refused_total", ""), 3.0);
    assert_eq!(before["goodput_refused_total{code=\"queue_full\"}"], 0.0, "there from the start");
    assert_eq!(sum(&after, "goodput_slo_excluded_total", "reason=\"rate_limited\""), 3.0);
}

#[tokio::test(start_paused = true)]
async fn what_is_served_beyond_a_limit_is_counted_once_an_engine_was_asked() {
    let recorder = recorder();
    for asked in [false, true] {
        let mut visit = accept(&recorder, RequestId::from("r"), at(0));
        visit.set_tenant(TenantId::from("acme"));
        visit.set_policy(RequestPolicy {
            case: JudgeContext { over_limit: true, ..JudgeContext::of(Dialect::Chat) },
            ..promise()
        });
        if asked {
            let _ = visit.begin_attempt(&PoolId::from("main"), EngineId::from("vllm-0:8000"), at(30));
        }
        end(visit, answer(), None);
    }
    let told = samples(&recorder);
    assert_eq!(told["goodput_over_limit_total{tenant=\"acme\"}"], 1.0);
    assert_eq!(sum(&told, "goodput_slo_excluded_total", "reason=\"rate_limited\""), 2.0);
    assert_eq!(sum(&told, "slo_total", ""), 0.0);
}

#[tokio::test(start_paused = true)]
async fn who_waits_is_told_where_and_who_went_on_is_counted_there() {
    let recorder = recorder();
    let mut visit = accept(&recorder, RequestId::from("r"), at(0));
    visit.set_policy(promise());
    visit.routed(Arc::from("llama-*"), PoolId::from("main"));
    let depth = |pool: &str| {
        let name = format!("goodput_queue_depth{{class=\"chat\",pool=\"{pool}\"}}");
        samples(&recorder)[&name]
    };
    assert_eq!((depth("main"), depth("spare")), (0.0, 0.0));
    visit.queued(&PoolId::from("main"));
    assert_eq!((depth("main"), depth("spare")), (1.0, 0.0));
    let limit_status =
        recorder.statuses().into_iter().find(|limit_status| limit_status.class.as_str() == "chat").unwrap();
    assert_eq!((limit_status.in_flight, limit_status.waiting), (1, 1));
    visit.spilled(&PoolId::from("spare"));
    assert_eq!((depth("main"), depth("spare")), (0.0, 0.0));
    visit.queued(&PoolId::from("spare"));
    assert_eq!((depth("main"), depth("spare")), (0.0, 1.0));
    visit.dequeued();
    assert_eq!((depth("main"), depth("spare")), (0.0, 0.0));
    visit.admitted(at(1));
    end(visit, answer(), None);
    // A request rejected there did not run there.
    let mut other = accept(&recorder, RequestId::from("s"), at(0));
    other.set_policy(promise());
    other.routed(Arc::from("llama-*"), PoolId::from("main"));
    other.spilled(&PoolId::from("spare"));
    other.reject(&Rejection::Draining);
    let told = samples(&recorder);
    assert_eq!(told["goodput_spilled_total{class=\"chat\",pool=\"spare\"}"], 1.0);
    assert_eq!(sum(&told, "goodput_spilled_total", ""), 1.0);
}

#[tokio::test(start_paused = true)]
async fn what_overload_levels_did_is_counted_and_so_are_answers_that_their_cap_cut() {
    let recorder = recorder();
    for (cap_lowered, cut) in [(true, true), (true, false), (false, true)] {
        let mut visit = accept(&recorder, RequestId::from("r"), at(0));
        visit.set_policy(promise());
        visit.routed(Arc::from("llama-*"), PoolId::from("main"));
        if cap_lowered {
            visit.degraded(ActionKind::CapOutput);
            visit.degraded(ActionKind::Spill);
        }
        end(visit, Timeline { cut_by_length: cut, ..answer() }, None);
    }
    let told = samples(&recorder);
    assert_eq!(told["goodput_degraded_total{class=\"chat\",action=\"cap_output\"}"], 2.0);
    assert_eq!(told["goodput_degraded_total{class=\"chat\",action=\"spill\"}"], 2.0);
    assert_eq!(told["goodput_degraded_total{class=\"chat\",action=\"defer\"}"], 0.0);
    assert_eq!(told["goodput_capped_answers_total{class=\"chat\",pool=\"main\"}"], 1.0);
    assert_eq!(told["goodput_truncated_answers_total{class=\"chat\",pool=\"main\"}"], 2.0);
}

#[tokio::test(start_paused = true)]
async fn engines_reload_and_process_are_told() {
    let recorder = recorder();
    let (pool, engine) = (PoolId::from("main"), EngineId::from("vllm-0:8000"));
    let report = EngineReport {
        up: true,
        drained: false,
        waiting: Some(2.0),
        running: None,
        elsewhere: Some(3.0),
        kv_usage: Some(0.5),
        seats: Some(12.0),
        ttft_error: Some(0.25),
        tpot_error: None,
    };
    recorder.engines(vec![(pool, engine, report)]);
    recorder.reloaded(true);
    recorder.reloaded(false);
    let told = samples(&recorder);
    let labels = "{pool=\"main\",engine=\"vllm-0:8000\"}";
    assert_eq!(told[&format!("goodput_engine_up{labels}")], 1.0);
    assert_eq!(told[&format!("goodput_engine_drained{labels}")], 0.0);
    assert_eq!(told[&format!("goodput_engine_waiting{labels}")], 2.0);
    assert_eq!(told[&format!("goodput_engine_kv_usage{labels}")], 0.5);
    assert!(!told.contains_key(&format!("goodput_engine_running{labels}")), "what is not known is absent");
    assert_eq!(told[&format!("goodput_engine_seats{labels}")], 12.0);
    let error = |quantity| labels.replace('}', &format!(",quantity=\"{quantity}\"}}"));
    assert_eq!(told[&format!("goodput_prediction_error_ratio{}", error("ttft"))], 0.25);
    assert!(!told.contains_key(&format!("goodput_prediction_error_ratio{}", error("tpot"))));
    assert_eq!(told["goodput_config_reloads_total{result=\"failure\"}"], 1.0);
    assert_eq!(told["goodput_config_last_reload_successful"], 0.0);
    assert!(told["goodput_config_last_reload_timestamp_seconds"] > 1e9);
    assert!(told["process_resident_memory_bytes"] > 0.0);
    recorder.engines(Vec::new());
    assert!(!samples(&recorder).contains_key(&format!("goodput_engine_up{labels}")));
}

/// What the process before has counted is there as soon as its class is, and as good as what comes.
#[tokio::test(start_paused = true)]
async fn counts_outlive_the_process_and_wait_for_their_class() {
    let met = || crate::judge::judge(&answer(), &chat(), &JudgeContext::of(Dialect::Chat));
    let before = Recorder::new(Clock::start(), None);
    before.keep_counts(StateLoad::Absent);
    before.bind(&shape());
    for length in [LengthBucket::Short, LengthBucket::Long] {
        before.note(RequestRecord { length, timeline: Some(answer()), ..finished(met()) });
    }
    let missed = Verdict { ttft: Some(ObjectiveState::Broken), ..Verdict::bare(Outcome::Missed(Missed::Ttft)) };
    before.note(RequestRecord { length: LengthBucket::Long, ..finished(missed) });
    let state = before.slo_state();

    let after = Recorder::new(Clock::start(), None);
    after.keep_counts(StateLoad::Restored(state.clone()));
    let mut few = shape();
    few.classes.retain(|class| class.id.as_str() == "batch");
    few.default_class = ClassId::from("batch");
    few.routes.retain(|(class, ..)| class.as_str() == "batch");
    after.bind(&few);
    assert_eq!(
        after.slo_state().classes["chat"],
        state.classes["chat"],
        "no settings name it, and it is not forgotten"
    );
    after.bind(&shape());
    let of_chat = || after.statuses().into_iter().find(|limit_status| limit_status.class.as_str() == "chat").unwrap();
    let limit_status = of_chat();
    assert_eq!((limit_status.own.count.met, limit_status.own.count.judged), (2, 3));
    let lengths: Vec<_> = limit_status
        .lengths
        .iter()
        .map(|length| (length.length, length.own.count.met, length.own.count.judged))
        .collect();
    assert_eq!(lengths, [(LengthBucket::Short, 1, 1), (LengthBucket::Long, 1, 2)]);
    assert!((limit_status.lengths[1].budget_left + 4.0).abs() < 1e-9);
    after.bind(&shape());
    after.note(RequestRecord { length: LengthBucket::Short, timeline: Some(answer()), ..finished(met()) });
    assert_eq!(of_chat().own.count.judged, 4, "taken in once");
    let page = samples(&after);
    assert_eq!(page["goodput_slo_state_loads_total{result=\"restored\"}"], 1.0);
    let burn = page["goodput_slo_length_burn_rate{class=\"chat\",length=\"long\",window=\"28d\"}"];
    assert!((burn - 5.0).abs() < 1e-9, "{burn}");
    let counter = "slo_total{class=\"chat\",length=\"long\",pool=\"main\",model=\"llama-*\"}";
    assert_eq!(page[counter], 0.0, "counters are the process's own");
}

#[test]
fn a_drift_says_what_to_do_once_it_is_another_workload() {
    let drift = |ratio| WorkloadDrift { direction: "input", percentile: "p95", ratio };
    assert_eq!([1.0, 1.49, 0.7].map(|ratio| drift(ratio).advice()), [None, None, None]);
    for ratio in [1.6, 0.6] {
        let advice = drift(ratio).advice().unwrap();
        assert!(advice.contains(&format!("p95 of input tokens is {ratio:.2} times")), "{advice}");
        assert!(advice.contains("run the sweep again (goodput sweep)"), "{advice}");
    }
}

/// Nothing but counters has them.
#[tokio::test(start_paused = true)]
async fn a_drill_counts_in_its_class_alone() {
    let recorder = recorder();
    let before = samples(&recorder);
    recorder.drill(20);
    let after = samples(&recorder);
    let changed: Vec<&str> = after
        .iter()
        .filter(|(series, value)| before.get(*series) != Some(*value) && !series.starts_with("process_"))
        .map(|(series, _)| series.as_str())
        .collect();
    assert_eq!(changed.len(), 3, "{changed:?}");
    assert!(changed.iter().all(|series| series.contains("class=\"drill\"")), "{changed:?}");
    assert!(recorder.statuses().iter().all(|limit_status| limit_status.class.as_str() != "drill"));
    let met = "slo_met_total{class=\"drill\",length=\"unknown\",pool=\"none\",model=\"other\"}";
    assert_eq!(after[met], 0.0);
}

#[tokio::test(start_paused = true)]
async fn the_page_is_the_golden_one() {
    let recorder = Recorder::new(Clock::start(), None);
    let mut small = shape();
    small.classes.truncate(1);
    small.routes.truncate(1);
    small.tenants.truncate(1);
    recorder.bind(&small);
    recorder.engines(vec![(PoolId::from("main"), EngineId::from("vllm-0:8000"), EngineReport::default())]);
    let seats = SeatReport { seats: 8, taken: 3, prefill: Some(Tokens(1024)), elsewhere: Some(4) };
    recorder.seats(vec![(PoolId::from("main"), seats)]);
    recorder.levels(vec![(
        ClassId::from("chat"),
        LevelReport { level: 2, is_forced: true, forced_for: Some(Duration::from_secs(90)) },
    )]);
    recorder.limits_store(StoreReport {
        up: true,
        calls: vec![("granted", 5), ("timeout", 1)],
        lengths: (vec![(Duration::from_millis(1), 4), (Duration::from_millis(50), 1)], 1),
        length: Duration::from_millis(55),
        given_up: 0,
        requests: vec![("lease", 40), ("store", 5)],
        unspent: 1200,
        exchanges: vec![("told", 20), ("failed", 1)],
        gateways: 2,
    });
    let verdict = crate::judge::judge(&answer(), &chat(), &JudgeContext::of(Dialect::Chat));
    recorder.note(RequestRecord { timeline: Some(answer()), ..finished(verdict) });
    let missed = Verdict { ttft: Some(ObjectiveState::Broken), ..Verdict::bare(Outcome::Missed(Missed::Shed)) };
    recorder.note(finished(missed));
    // One histogram's buckets represent all; process metrics change on their own.
    let told = |line: &&str| {
        let varies = line.starts_with("process_") || line.starts_with("goodput_build_info{");
        let repeats = line.contains("_bucket{") && !line.starts_with("goodput_time_to_first_token_seconds");
        !varies && !repeats
    };
    let page = recorder.page(Format::Text);
    let page: String = page.lines().filter(told).map(|line| format!("{line}\n")).collect();
    if page != include_str!("golden.prom") {
        let differ = page.lines().zip(include_str!("golden.prom").lines()).find(|(now, golden)| now != golden);
        panic!("the page changed, and so must dashboards and alerts: {differ:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn both_formats_tell_the_same_families() {
    let recorder = recorder();
    let text = recorder.page(Format::Text);
    let open = recorder.page(Format::OpenMetrics);
    assert!(open.ends_with("# EOF\n"));
    let bare = |name: &&str| name.trim_end_matches("_total").trim_end_matches("_info").to_owned();
    let (mut of_text, mut of_open): (Vec<_>, Vec<_>) =
        (names(&text).iter().map(bare).collect(), names(&open).iter().map(bare).collect());
    of_text.sort();
    of_open.sort();
    assert_eq!(of_text, of_open);
    assert!(
        of_text
            .iter()
            .all(|name| name.starts_with("goodput_") || name.starts_with("process_") || name.starts_with("slo"))
    );
    assert!(names(&text).contains(&"slo_met_total") && names(&text).contains(&"slo_total"));
}

#[tokio::test(start_paused = true)]
async fn an_access_line_has_its_fields_in_their_order_and_no_content() {
    let (lines, writer) = access::lines();
    let clock = Clock::start();
    let recorder = Recorder::new(clock, Some(lines));
    recorder.bind(&shape());
    let verdict = crate::judge::judge(&answer(), &chat(), &JudgeContext::of(Dialect::Chat));
    recorder.note(RequestRecord { timeline: Some(answer()), ..finished(verdict) });
    accept(&recorder, RequestId::from("r-\"2\""), recorder.now()).reject(&Rejection::UnknownPath);
    let mut visit = accept(&recorder, RequestId::from("r-3"), recorder.now());
    visit.set_policy(promise());
    visit.at_level(2, Some(Tokens(400)));
    visit.degraded(ActionKind::Spill);
    visit.degraded(ActionKind::CapOutput);
    visit.reject(&Rejection::Internal);
    drop(recorder);
    let (mut reader, output) = tokio::io::duplex(1 << 16);
    writer.run(output, clock).await.unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).await.unwrap();
    let written: Vec<&str> = text.lines().collect();
    let (time, rest) = written[0].split_once(",").unwrap();
    assert!(
        time.starts_with("{\"time\":\"20")
            && time.ends_with("Z\"")
            && time.len() == "{\"time\":\"2026-01-01T00:00:00.000Z\"".len(),
        "{time}"
    );
    assert_eq!(
        rest,
        "\"request_id\":\"r-1\",\"endpoint\":\"/v1/chat/completions\",\"tenant\":\"acme\",\"class\":\"chat\",\"rule\":\"rule 1\",\"model\":\"llama-*\",\
         \"pool\":\"main\",\"engine\":\"vllm-0:8000\",\"attempts\":1,\"status\":200,\"outcome\":\"met\",\"reason\":null,\
         \"refusal\":null,\"length\":\"short\",\"input_tokens\":11,\"output_tokens\":4,\"token_source\":\"usage\",\"upload_ms\":20.000,\"client_wait_ms\":0.000,\
         \"queue_ms\":0.000,\"ttft_ms\":300.000,\"tpot_ms\":40.000,\"e2e_ms\":430.000,\"degraded\":null,\"asked\":null}"
    );
    let refused: Value = serde_json::from_str(written[1]).unwrap();
    assert_eq!((&refused["request_id"], &refused["status"]), (&"r-\"2\"".into(), &404.into()));
    assert_eq!((&refused["outcome"], &refused["reason"]), (&"excluded".into(), &"invalid_request".into()));
    assert_eq!((&refused["refusal"], &refused["class"]), (&"unknown_path".into(), &Value::Null));
    assert_eq!(refused["endpoint"], Value::Null);
    let degraded: Value = serde_json::from_str(written[2]).unwrap();
    let expected = serde_json::json!({"level": 2, "cap": 400, "actions": ["cap_output", "spill"]});
    assert_eq!(degraded["degraded"], expected);
    assert_eq!(written.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn each_access_line_has_its_own_names_however_often_they_change() {
    let (lines, writer) = access::lines();
    let clock = Clock::start();
    let recorder = Recorder::new(clock, Some(lines));
    let verdict = Verdict::bare(Outcome::Excluded(Excluded::Unjudged));
    // More combinations than the cache holds: of shared names, of names allocated each time (possibly at
    // reused addresses), and of none.
    let shared: Vec<(PoolId, Arc<str>)> =
        (0..9).map(|n| (PoolId::from(format!("pool \"{n}\"")), Arc::from(format!("rule {n}")))).collect();
    let mut expected = Vec::new();
    for n in 0..2000usize {
        let (pool, rule) = &shared[n * 7 % 9];
        let engine = (n % 5 > 0).then(|| EngineId::from(format!("e-{}", n % 23)));
        let class = (n % 3 > 0).then(|| ClassId::from(format!("c-{}", n % 4)));
        let names = [Some("acme"), class.as_ref().map(ClassId::as_str), Some(rule), None, Some(pool.as_str())];
        expected.push(
            [&names[..], &[engine.as_ref().map(EngineId::as_str)]]
                .concat()
                .iter()
                .map(|name| name.map(str::to_owned))
                .collect::<Vec<_>>(),
        );
        let (pool, rule) = (Some(pool.clone()), Some(Arc::clone(rule)));
        recorder.note(RequestRecord { pool, rule, engine, class, model: None, ..finished(verdict) });
    }
    drop(recorder);
    let mut written = Vec::new();
    writer.run(&mut written, clock).await.unwrap();
    let of_line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        ["tenant", "class", "rule", "model", "pool", "engine"].map(|key| line[key].as_str().map(str::to_owned)).to_vec()
    };
    let seen: Vec<_> = std::str::from_utf8(&written).unwrap().lines().map(of_line).collect();
    assert_eq!(seen, expected);
}

#[tokio::test(start_paused = true)]
async fn each_access_line_tells_its_own_ending_where_the_names_are_the_same() {
    let (lines, writer) = access::lines();
    let clock = Clock::start();
    let recorder = Recorder::new(clock, Some(lines));
    let first = finished(Verdict::bare(Outcome::Met));
    // Each differs from the first in one value.
    let others = [
        RequestRecord { endpoint: ApiPath::relayed("/v1/completions"), ..first.clone() },
        RequestRecord { endpoint: None, ..first.clone() },
        RequestRecord { attempts: vec![attempt(20), attempt(30)], ..first.clone() },
        RequestRecord { status: 503, ..first.clone() },
        RequestRecord { verdict: Verdict::bare(Outcome::Missed(Missed::Shed)), ..first.clone() },
        RequestRecord { verdict: Verdict::bare(Outcome::Excluded(Excluded::Unjudged)), ..first.clone() },
        RequestRecord { refusal: Some(Rejection::CODES[0]), ..first.clone() },
        RequestRecord { refusal: Some(Rejection::CODES[1]), ..first.clone() },
        RequestRecord { length: LengthBucket::Long, ..first.clone() },
    ];
    let all: Vec<_> = others.iter().flat_map(|other| [first.clone(), other.clone(), other.clone()]).collect();
    all.iter().for_each(|finished| recorder.note(finished.clone()));
    drop(recorder);
    let mut written = Vec::new();
    writer.run(&mut written, clock).await.unwrap();
    let keys = ["endpoint", "attempts", "status", "outcome", "reason", "refusal", "length"];
    let seen = std::str::from_utf8(&written).unwrap().lines().map(|line| -> Vec<Value> {
        let line: Value = serde_json::from_str(line).unwrap();
        keys.iter().map(|key| line[key].clone()).collect()
    });
    let meant = all.iter().map(|finished| -> Vec<Value> {
        let outcome = finished.verdict.outcome;
        let reason = (outcome != Outcome::Met).then(|| outcome.reason());
        vec![
            finished.endpoint.map(ApiPath::path).into(),
            finished.attempt_count().into(),
            finished.status.into(),
            outcome.as_str().into(),
            reason.into(),
            finished.refusal.into(),
            finished.length.as_str().into(),
        ]
    });
    assert_eq!(seen.collect::<Vec<_>>(), meant.collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_full_channel_drops_lines_and_counts_them() {
    let (lines, writer) = access::lines();
    let recorder = Recorder::new(Clock::start(), Some(lines));
    recorder.bind(&shape());
    for _ in 0..8192 + 7 {
        recorder.note(finished(Verdict::bare(Outcome::Met)));
    }
    assert_eq!(samples(&recorder)["goodput_access_lines_dropped_total"], 7.0);
    assert_eq!(sum(&samples(&recorder), "slo_total", ""), 8192.0 + 7.0);
    drop(writer);
}

#[tokio::test(start_paused = true)]
async fn drift_is_observed_by_assumed() {
    use crate::judge::{Assumption, Quantiles};
    let recorder = Recorder::new(Clock::start(), None);
    let assumed = Assumption { input_tokens: None, output_tokens: Some(Quantiles { p50: Tokens(2), p95: Tokens(4) }) };
    let mut shape = shape();
    shape.classes[0].objectives = Arc::new(Objectives { assumed: Some(assumed), ..(*chat()).clone() });
    recorder.bind(&shape);
    for _ in 0..50 {
        recorder.note(RequestRecord { timeline: Some(answer()), ..finished(Verdict::bare(Outcome::Met)) });
    }
    let samples = samples(&recorder);
    let drift = |percentile| {
        samples[&format!("goodput_workload_drift{{class=\"chat\",direction=\"output\",percentile=\"{percentile}\"}}")]
    };
    assert!((drift("p50") - 2.0).abs() < 0.1 && (drift("p95") - 1.0).abs() < 0.05);
    assert!(!samples.keys().any(|key| key.starts_with("goodput_workload_drift") && key.contains("input")));
}

/// C113, by the rules of `promtool check metrics` that a page could break.
#[tokio::test(start_paused = true)]
async fn c113_no_label_or_name_means_something_else_to_prometheus() {
    let page = [include_str!("golden.prom"), &served().page(Format::Text)].concat();
    let kinds: BTreeMap<&str, &str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .inspect(|(name, kind)| {
            assert_eq!(name.ends_with("_total"), *kind == "counter", "{name}");
            let reserved = ["_bucket", "_sum", "_count", "_info"].iter().any(|end| name.ends_with(end));
            assert!(!reserved || *name == "goodput_build_info", "{name}");
            assert!(page.contains(&format!("# HELP {name} ")), "{name}");
        })
        .collect();
    let labels = label_names(&page);
    assert!(labels["goodput_workload_drift"].contains("percentile"), "it has values");
    for (name, labels) in &labels {
        assert!(!labels.contains("quantile"), "{name}");
    }
    for line in page.lines().filter(|line| line.contains(",le=\"") || line.contains("{le=\"")) {
        let name = line.split('{').next().unwrap().strip_suffix("_bucket").unwrap();
        assert_eq!(kinds[name], "histogram", "{line}");
    }
}

/// C113: labels that a scrape attaches to every series; one of ours by such a name would be renamed to
/// `exported_..`, and alerts on it would be empty.
#[tokio::test(start_paused = true)]
async fn c113_no_label_is_one_that_a_scrape_attaches() {
    let attached = ["job", "instance", "namespace", "pod", "container", "service", "node", "endpoint", "cluster"];
    let page = [include_str!("golden.prom"), &served().page(Format::Text)].concat();
    for (name, labels) in label_names(&page) {
        for label in labels {
            let is_reserved = label.starts_with("__") || label.starts_with("exported_");
            assert!(!is_reserved && !attached.contains(&label.as_str()), "{name}: {label}");
        }
    }
}

/// C113: names under which a family exposes samples. What another one has, too, is a second meaning.
fn exposed_names(family: &str, kind: &str) -> Vec<String> {
    let ends: &[&str] = match kind {
        "counter" => &["_total", "_created"],
        "histogram" => &["_bucket", "_sum", "_count", "_created"],
        "info" => &["_info"],
        _ => &[""],
    };
    ends.iter().map(|end| format!("{family}{end}")).collect()
}

#[tokio::test(start_paused = true)]
async fn c113_no_two_families_expose_one_name_in_openmetrics() {
    let recorder = served();
    recorder.keep_counts(StateLoad::Absent);
    let page = recorder.page(Format::OpenMetrics);
    let mut owners: BTreeMap<String, String> = BTreeMap::new();
    let families = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    for (family, kind) in families {
        assert_ne!(kind, "unknown", "{family}");
        for name in exposed_names(family, kind) {
            if let Some(other) = owners.insert(name.clone(), family.to_owned()) {
                panic!("{name} is of {other} and of {family}");
            }
        }
    }
    for sample in page.lines().filter(|line| !line.starts_with('#')) {
        let name = sample.split(['{', ' ']).next().unwrap();
        assert!(owners.contains_key(name), "a sample of no family: {sample}");
    }
}

/// C113: to Prometheus an empty label is one that is not there, and a series that comes twice spoils the
/// whole scrape, whatever labels the settings leave out.
#[tokio::test(start_paused = true)]
async fn c113_no_series_comes_twice_and_no_label_is_empty_whatever_is_left_out() {
    use RequestLabel::{Length, Model, Pool, Tenant};
    for dropped in [&[][..], &[Length], &[Model], &[Pool], &[Tenant], &[Length, Model, Pool, Tenant]] {
        let recorder = Recorder::new(Clock::start(), None);
        recorder.bind(&labelled(dropped, true));
        for outcome in [Outcome::Met, Outcome::Excluded(Excluded::Unauthorized)] {
            for (class, tenant, pool) in [(true, true, true), (true, false, false), (false, false, false)] {
                let record = finished(Verdict::bare(outcome));
                recorder.note(RequestRecord {
                    timeline: pool.then(answer),
                    class: record.class.clone().filter(|_| class),
                    tenant: record.tenant.clone().filter(|_| tenant),
                    pool: record.pool.clone().filter(|_| pool),
                    ..record
                });
            }
        }
        for format in [Format::Text, Format::OpenMetrics] {
            let page = recorder.page(format);
            let mut seen = BTreeSet::new();
            for sample in page.lines().filter(|line| !line.starts_with('#')) {
                // An exemplar stands behind the value.
                let sample = sample.split(" # ").next().unwrap();
                let series = sample.rsplit_once(' ').unwrap().0;
                assert!(seen.insert(series.to_owned()), "twice without {dropped:?}: {series}");
                assert!(!series.contains("=\"\""), "an empty label without {dropped:?}: {series}");
            }
        }
    }
}

/// A shape with these label settings.
fn labelled(dropped: &[RequestLabel], histograms_by_model: bool) -> SeriesShape {
    let labels = MetricLabels { dropped: dropped.to_vec(), histograms_by_model, ..MetricLabels::default() };
    SeriesShape { labels, ..shape() }
}

/// C115: series that differ only in omitted labels are counted together.
#[tokio::test(start_paused = true)]
async fn c115_labels_that_are_left_out_take_no_series_and_lose_no_count() {
    use RequestLabel::{Length, Model, Pool, Tenant};
    let full = recorder().series();
    // Five families have `length`, for three models; two classes reach none.
    for (dropped, most) in [(&[Length][..], full - 5 * 5 * 3), (&[Length, Model, Pool, Tenant], full * 2 / 3)] {
        let recorder = Recorder::new(Clock::start(), None);
        recorder.bind(&labelled(dropped, false));
        let _open = accept(&recorder, RequestId::from("r-2"), at(0));
        for pool in ["main", "spare"] {
            for length in [LengthBucket::Short, LengthBucket::Long] {
                let timeline = Some(answer());
                let pool = Some(PoolId::from(pool));
                recorder.note(RequestRecord { timeline, pool, length, ..finished(Verdict::bare(Outcome::Met)) });
            }
        }
        recorder.note(RequestRecord {
            class: None,
            tenant: None,
            ..finished(Verdict::bare(Outcome::Excluded(Excluded::Unauthorized)))
        });
        let page = recorder.page(Format::Text);
        for label in dropped {
            let has = page.lines().filter(|line| line.contains(&format!("{}=\"", label.as_str())));
            assert_eq!(has.collect::<Vec<_>>(), Vec::<&str>::new(), "{label:?}");
        }
        let samples = samples(&recorder);
        assert_eq!(sum(&samples, "slo_total", ""), 4.0);
        assert_eq!(sum(&samples, "goodput_requests_finished_total", ""), 5.0);
        assert_eq!(sum(&samples, "goodput_e2e_seconds_count", ""), 4.0);
        assert_eq!(sum(&samples, "goodput_tenant_slo_met_total", ""), 4.0);
        assert_eq!(sum(&samples, "goodput_tokens_total", "direction=\"input\""), 44.0);
        assert_eq!(sum(&samples, "goodput_slo_excluded_total", "reason=\"unauthorized\""), 1.0);
        assert_eq!(sum(&samples, "goodput_in_flight", ""), 1.0);
        assert!(recorder.series() <= most, "{} of {full}", recorder.series());
    }
}

/// A reload that omits labels continues the counts.
#[tokio::test(start_paused = true)]
async fn labels_that_a_reload_leaves_out_keep_the_sums() {
    let recorder = recorder();
    let note = || recorder.note(RequestRecord { timeline: Some(answer()), ..finished(Verdict::bare(Outcome::Met)) });
    note();
    recorder.bind(&labelled(&[RequestLabel::Length, RequestLabel::Pool], false));
    note();
    let samples = samples(&recorder);
    assert_eq!(sum(&samples, "slo_met_total", ""), 2.0);
    assert_eq!(samples["slo_met_total{class=\"chat\",model=\"llama-*\"}"], 1.0);
    assert_eq!(sum(&samples, "goodput_time_to_first_token_seconds_count", ""), 2.0);
}

#[tokio::test(start_paused = true)]
async fn histograms_are_told_by_model_where_that_is_asked_for() {
    let recorder = Recorder::new(Clock::start(), None);
    recorder.bind(&labelled(&[], true));
    recorder.note(RequestRecord { timeline: Some(answer()), ..finished(Verdict::bare(Outcome::Met)) });
    let samples = samples(&recorder);
    let place = "class=\"chat\",pool=\"main\",model=\"llama-*\"";
    assert_eq!(samples[&format!("goodput_time_to_first_token_seconds_count{{{place}}}")], 1.0);
    assert_eq!(samples[&format!("goodput_time_per_output_token_seconds_count{{{place},token_source=\"usage\"}}")], 1.0);
    assert_eq!(samples["goodput_truncated_answers_total{class=\"chat\",pool=\"main\"}"], 1.0);
    for (name, _) in samples.iter().filter(|(name, _)| name.contains("_seconds_count{class=")) {
        assert!(name.contains("model="), "{name}");
    }
}

/// C115: too many series give a warning.
#[tokio::test(start_paused = true)]
async fn c115_very_many_series_are_a_warning() {
    let said = Arc::new(Mutex::new(Vec::new()));
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let log = Arc::clone(&said);
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || Log(Arc::clone(&log))).finish();
    let _logged = tracing::subscriber::set_default(subscriber);
    let class = |id: &str| ClassShape { id: ClassId::from(id), objectives: chat(), takes_targets: false };
    let with = |classes: usize, pools: usize, models: usize| {
        let names: Vec<String> = (0..classes.max(pools).max(models)).map(|number| format!("n{number}")).collect();
        let routes = names[..classes].iter().flat_map(|class| {
            let models = &names[..models];
            names[..pools].iter().flat_map(move |pool| {
                models.iter().map(move |model| (class.as_str().into(), pool.as_str().into(), Arc::from(model.as_str())))
            })
        });
        let routes = routes.collect();
        SeriesShape { classes: names[..classes].iter().map(|name| class(name)).collect(), routes, ..shape() }
    };
    let text = || String::from_utf8(said.lock().clone()).unwrap();
    let few = Recorder::new(Clock::start(), None);
    few.bind(&with(10, 10, 1));
    assert!((25_000..50_000).contains(&few.series()) && text().is_empty(), "{} {}", few.series(), text());
    let many = Recorder::new(Clock::start(), None);
    many.bind(&with(12, 12, 12));
    assert!((50_000..100_000).contains(&many.series()), "{}", many.series());
    assert!(text().contains("WARN") && text().contains(&format!("series={}", many.series())), "{}", text());
    let fewer = Recorder::new(Clock::start(), None);
    let labels = MetricLabels { dropped: vec![RequestLabel::Pool], ..MetricLabels::default() };
    fewer.bind(&SeriesShape { labels, ..with(12, 12, 12) });
    assert!(fewer.series() < 10_000, "{}", fewer.series());
}

#[tokio::test(start_paused = true)]
async fn the_number_of_series_is_that_of_the_page() {
    let recorder = recorder();
    let page = recorder.page(Format::Text);
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    // Process, listener, window, engine and reload series do not multiply.
    let beside = |name: &str| {
        let fixed = [
            "process_",
            "goodput_config_",
            "goodput_build",
            "goodput_access_",
            "goodput_journal_",
            "goodput_spans_",
            "goodput_bad_heads_",
            "goodput_connections_refused_",
            "goodput_refused_",
            "goodput_retries_",
        ];
        let gauges = [
            "goodput_in_flight",
            "goodput_queue_depth",
            "goodput_overdue",
            "goodput_slo_attainment",
            "goodput_slo_burn",
            "goodput_slo_window",
            "goodput_slo_budget",
            "goodput_slo_target",
            "goodput_slo_threshold",
            "goodput_slo_source",
            "goodput_rate{",
        ];
        fixed.iter().chain(&gauges).any(|start| name.starts_with(start))
    };
    assert_eq!(recorder.series(), lines.filter(|line| !beside(line)).count());
}

/// A recorder that has counted enough to report drift.
fn served() -> Recorder {
    use crate::judge::{Assumption, Quantiles};
    let recorder = Recorder::new(Clock::start(), None);
    let quantiles = Some(Quantiles { p50: Tokens(2), p95: Tokens(4) });
    let assumed = Assumption { input_tokens: quantiles, output_tokens: quantiles };
    let mut shape = shape();
    shape.classes[0].objectives = Arc::new(Objectives { assumed: Some(assumed), ..(*chat()).clone() });
    shape.labels.series_by_engine = true;
    recorder.bind(&shape);
    for _ in 0..50 {
        recorder.note(RequestRecord { timeline: Some(answer()), ..finished(Verdict::bare(Outcome::Met)) });
    }
    recorder
}

/// The label names of every family that has samples.
fn label_names(page: &str) -> BTreeMap<String, BTreeSet<String>> {
    let histograms: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" histogram")).collect();
    let mut names: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for sample in page.lines().filter(|line| !line.starts_with('#')) {
        let (name, labels) = sample.rsplit_once(' ').unwrap().0.split_once('{').unwrap_or((sample, ""));
        let name = name.split(' ').next().unwrap();
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let family = family.filter(|family| histograms.contains(family)).unwrap_or(name);
        let keys = labels.split("\",").filter_map(|label| Some(label.split_once('=')?.0.to_owned()));
        names.entry(family.to_owned()).or_default().extend(keys.filter(|key| key != "le"));
    }
    names
}

#[tokio::test(start_paused = true)]
async fn every_metric_is_listed_with_its_labels() {
    let recorder = served();
    let report = EngineReport {
        up: true,
        drained: false,
        waiting: Some(2.0),
        running: Some(1.0),
        elsewhere: Some(3.0),
        kv_usage: Some(0.5),
        seats: Some(12.0),
        ttft_error: Some(0.25),
        tpot_error: Some(0.25),
    };
    recorder.engines(vec![(PoolId::from("main"), EngineId::from("vllm-0:8000"), report)]);
    recorder.keep_counts(StateLoad::Absent);
    recorder.expect_prometheus();
    let told = label_names(&[include_str!("golden.prom"), &recorder.page(Format::Text)].concat());
    let listed = include_str!("../../docs/operations.md").lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.split(" | ");
        let (name, kind) = (cells.next()?.strip_suffix('`')?, cells.next()?);
        let labels = kind.split_once(": ").map_or("", |(_, labels)| labels);
        let is_metric = ["counter", "gauge", "histogram", "info"].contains(&kind.split(':').next()?);
        let labels = labels.split(", ").filter(|label| !label.is_empty()).map(str::to_owned).collect();
        is_metric.then(|| (name.to_owned(), labels))
    });
    let listed: BTreeMap<String, BTreeSet<String>> = listed.collect();
    assert_eq!(told, listed);
}

fn any_outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        Just(Outcome::Met),
        prop::sample::select(Missed::ALL).prop_map(Outcome::Missed),
        prop::sample::select(Excluded::ALL).prop_map(Outcome::Excluded),
    ]
}

fn any_finished() -> impl Strategy<Value = RequestRecord> {
    let held = || {
        prop::option::of(prop::sample::select(vec![
            ObjectiveState::Held,
            ObjectiveState::Broken,
            ObjectiveState::NotEvaluated,
        ]))
    };
    let class = prop::option::of(prop::sample::select(vec!["chat", "batch", "gone"]));
    let pool = prop::option::of(prop::sample::select(vec!["main", "spare", "gone"]));
    let model = prop::option::of(prop::sample::select(vec!["llama-*", "other", "gone"]));
    let answer = prop::option::of((prop::sample::select(vec![200_u16, 400, 500]), any::<bool>(), 0_u64..9));
    (any_outcome(), class, pool, model, prop::sample::select(LengthBucket::ALL.to_vec()), held(), held(), answer)
        .prop_map(|(outcome, class, pool, model, length, ttft, tpot, timeline)| {
            let whole = |(status, finished, tokens): (u16, bool, u64)| Timeline {
                status,
                finish: finished.then_some(at(430)),
                output: Tokens(tokens),
                ..answer_of(tokens)
            };
            RequestRecord {
                class: class.map(ClassId::from),
                pool: pool.map(PoolId::from),
                model: model.map(Arc::from),
                length,
                timeline: timeline.map(whole),
                ..finished(Verdict { ttft, tpot, ..Verdict::bare(outcome) })
            }
        })
}

fn answer_of(tokens: u64) -> Timeline {
    if tokens > 0 { answer() } else { Timeline { first_token: None, choices: vec![], ..answer() } }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// met + missed + excluded = finished, per family and in total.
    #[test]
    fn met_and_missed_and_excluded_are_all_that_finished(all in prop::collection::vec(any_finished(), 0..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _inside = runtime.enter();
        let recorder = recorder();
        let count = |of: fn(&Outcome) -> bool| all.iter().filter(|one| of(&one.verdict.outcome)).count() as f64;
        let met = count(|outcome| *outcome == Outcome::Met);
        let missed = count(|outcome| matches!(outcome, Outcome::Missed(_)));
        let excluded = count(|outcome| matches!(outcome, Outcome::Excluded(_)));
        let before = samples(&recorder).len();
        // A class that was never in the settings is counted in the default class.
        let known: Vec<RequestRecord> = all
            .iter()
            .cloned()
            .map(|one| RequestRecord { class: one.class.filter(|class| class.as_str() != "gone"), ..one })
            .collect();
        known.into_iter().for_each(|one| recorder.note(one));
        let samples = samples(&recorder);
        let finished = |outcome: &str| sum(&samples, "goodput_requests_finished_total", outcome);
        prop_assert_eq!(finished(""), met + missed + excluded);
        prop_assert_eq!(finished("outcome=\"met\""), met);
        prop_assert_eq!(finished("outcome=\"missed\""), missed);
        prop_assert_eq!(finished("outcome=\"excluded\""), excluded);
        prop_assert_eq!(sum(&samples, "slo_total", ""), met + missed);
        prop_assert_eq!(sum(&samples, "slo_met_total", ""), met);
        prop_assert_eq!(sum(&samples, "goodput_slo_missed_total", ""), missed);
        prop_assert_eq!(sum(&samples, "goodput_slo_excluded_total", ""), excluded);
        for objective in ["ttft", "tpot"] {
            let label = format!("objective=\"{objective}\"");
            let (met, all) = (
                sum(&samples, "goodput_slo_objective_met_total", &label),
                sum(&samples, "goodput_slo_objective_total", &label),
            );
            prop_assert!(met <= all && all <= met + missed + sum(&samples, "slo_met_total", ""));
        }
        // A share of nothing is absent.
        let is_share = |key: &&String| ["goodput_slo_attainment", "goodput_slo_length_"].iter().any(|name| key.starts_with(name));
        let shares = samples.keys().filter(is_share).count();
        prop_assert_eq!(samples.len() - shares, before, "no other series appears with traffic");
    }
}

/// An output whose first writes fail with this error.
struct Failing {
    failures: u32,
    with: std::io::ErrorKind,
    taken: Vec<u8>,
}

impl tokio::io::AsyncWrite for &mut Failing {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        if self.failures > 0 {
            self.failures -= 1;
            return std::task::Poll::Ready(Err(self.with.into()));
        }
        self.taken.extend_from_slice(bytes);
        std::task::Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn poll_shutdown(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_was_full_gets_access_lines_again_and_the_lost_ones_are_counted() {
    let (lines, writer) = access::lines();
    let recorder = Recorder::new(Clock::start(), Some(lines));
    recorder.bind(&shape());
    let mut disk = Failing { failures: 1, with: std::io::ErrorKind::StorageFull, taken: Vec::new() };
    let clock = recorder.0.clock;
    let written = tokio::join!(writer.run(&mut disk, clock), async move {
        let note = |lines: u32| (0..lines).for_each(|_| recorder.note(finished(Verdict::bare(Outcome::Met))));
        note(300);
        clock.sleep_until(Some(clock.now() + ms(15))).await;
        note(44);
        clock.sleep_until(Some(clock.now() + ms(15))).await;
        assert_eq!(samples(&recorder)["goodput_access_lines_dropped_total"], 300.0);
    });
    written.0.unwrap();
    assert_eq!(String::from_utf8(disk.taken).unwrap().lines().filter(|line| line.starts_with('{')).count(), 44);
}

#[tokio::test(start_paused = true)]
async fn every_line_that_a_closed_output_loses_is_counted() {
    let (lines, writer) = access::lines();
    let recorder = Recorder::new(Clock::start(), Some(lines));
    recorder.bind(&shape());
    let mut pipe = Failing { failures: 1, with: std::io::ErrorKind::BrokenPipe, taken: Vec::new() };
    for _ in 0..300 {
        recorder.note(finished(Verdict::bare(Outcome::Met)));
    }
    assert!(writer.run(&mut pipe, recorder.0.clock).await.is_err());
    recorder.note(finished(Verdict::bare(Outcome::Met)));
    assert_eq!(samples(&recorder)["goodput_access_lines_dropped_total"], 301.0);
}

fn missed(reason: Missed, millis: u64) -> RequestRecord {
    RequestRecord { end: at(millis), ..finished(Verdict::bare(Outcome::Missed(reason))) }
}

#[tokio::test(start_paused = true)]
async fn a_miss_is_kept_with_its_moments_and_others_are_not() {
    let recorder = recorder();
    recorder.note(finished(Verdict::bare(Outcome::Met)));
    recorder.note(finished(Verdict::bare(Outcome::Excluded(Excluded::ClientCancel))));
    assert!(recorder.recent_misses().is_empty());
    let verdict = Verdict {
        ttft: Some(ObjectiveState::Broken),
        tpot: Some(ObjectiveState::Held),
        e2e: Some(ObjectiveState::Broken),
        ..Verdict::bare(Outcome::Missed(Missed::Ttft))
    };
    let failure = Some(AttemptFailure { at: at(50), what: "push_back", status: Some(503) });
    let attempts = vec![AttemptRecord { failure, ..attempt(20) }, attempt(50)];
    recorder.note(RequestRecord { timeline: Some(answer()), attempts: attempts.clone(), ..finished(verdict) });
    let misses = recorder.recent_misses();
    let miss = &misses[0];
    assert_eq!((misses.len(), miss.reason, &miss.broken[..]), (1, Missed::Ttft, &["ttft", "e2e"][..]));
    assert_eq!((miss.first_token, miss.last_token, miss.end), (Some(at(300)), Some(at(420)), at(440)));
    assert_eq!((&miss.attempts, miss.output), (&attempts, Some(Tokens(4))));
    recorder.note(RequestRecord { class: None, tenant: None, ..missed(Missed::Internal, 900) });
    let newest = recorder.recent_misses()[0].clone();
    assert_eq!((newest.class.as_str(), newest.reason), ("chat", Missed::Internal), "in the default's books");
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_one_reason_hides_no_other_miss() {
    let recorder = recorder();
    recorder.note(missed(Missed::Ttft, 1));
    (2..5000).for_each(|millis| recorder.note(missed(Missed::Shed, millis)));
    let misses = recorder.recent_misses();
    assert_eq!(misses.len(), 11);
    assert_eq!((misses[0].end, misses[9].end, misses[10].reason), (at(4999), at(4990), Missed::Ttft));
    let mut other = shape();
    other.classes.remove(0);
    other.default_class = ClassId::from("batch");
    recorder.bind(&other);
    assert!(recorder.recent_misses().is_empty(), "no settings name their class");
}

#[tokio::test(start_paused = true)]
async fn the_last_hour_of_an_engine_tells_what_its_requests_came_to() {
    let recorder = recorder();
    let (pool, engine) = (PoolId::from("main"), EngineId::from("vllm-0:8000"));
    let hour = || recorder.engine_hour(&pool, &engine);
    assert_eq!(hour(), EngineHour::default());
    let verdict = crate::judge::judge(&answer(), &chat(), &JudgeContext::of(Dialect::Chat));
    for _ in 0..3 {
        recorder.note(RequestRecord { timeline: Some(answer()), ..finished(verdict) });
    }
    recorder.note(missed(Missed::UpstreamError, 440));
    recorder.note(finished(Verdict::bare(Outcome::Excluded(Excluded::ClientCancel))));
    recorder.note(RequestRecord { engine: None, ..missed(Missed::Shed, 440) });
    let told = hour();
    assert_eq!((told.count.met, told.count.judged), (3, 4));
    let near = |latency: Option<(Duration, Duration)>, millis: f64| {
        let (p50, p95) = latency.unwrap();
        assert!((p50.as_secs_f64() * 1000.0 / millis - 1.0).abs() < 0.05 && p50 == p95, "{p50:?} for {millis}");
    };
    near(told.ttft, 300.0);
    near(told.tpot, 40.0);
    assert_eq!(recorder.engine_hour(&pool, &EngineId::from("other:1")), EngineHour::default());
    let reasons = recorder.missed_last_hour(&ClassId::from("chat"));
    assert_eq!(reasons, [(Missed::UpstreamError, 1), (Missed::Shed, 1)]);
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert_eq!(hour(), EngineHour::default());
    assert!(recorder.missed_last_hour(&ClassId::from("chat")).is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_history_of_a_class_is_kept_while_nobody_looks() {
    let recorder = recorder();
    let keeps = recorder.clone().keep_history();
    let looks = async {
        for second in 1..=60_u64 {
            tokio::time::advance(Duration::from_secs(1)).await;
            tokio::task::yield_now().await;
            let outcome = if second <= 30 { Outcome::Met } else { Outcome::Missed(Missed::Tpot) };
            recorder.note(RequestRecord { end: at(second * 1000), ..finished(Verdict::bare(outcome)) });
        }
    };
    tokio::select! {
        biased;
        () = keeps => unreachable!("it never ends"),
        () = looks => {}
    }
    let (length, points) = recorder.history(&ClassId::from("chat"), HistorySpan::Hour).unwrap();
    assert_eq!(length, Duration::from_secs(3600));
    let judged: u64 = points.iter().map(|point| point.count.judged).sum();
    assert_eq!((points.len(), judged), (7, 60), "{points:?}");
    assert_eq!(points[1].budget_left, Some(1.0));
    let left = points.last().unwrap().budget_left.unwrap();
    assert!((left + 4.0).abs() < 1e-9, "half of all missed, of which a tenth may: {left}");
    let (window, points) = recorder.history(&ClassId::from("chat"), HistorySpan::Window).unwrap();
    assert_eq!((window, points.len()), (Duration::from_secs(28 * 24 * 60 * 60), 1));
    assert!(recorder.history(&ClassId::from("none"), HistorySpan::Day).is_none());
}

#[tokio::test(start_paused = true)]
async fn engines_have_series_where_the_settings_ask_for_them_and_as_long_as_they_are_known() {
    let recorder = recorder();
    let verdict = crate::judge::judge(&answer(), &chat(), &JudgeContext::of(Dialect::Chat));
    let serve = |engine: &str| {
        let engine = Some(EngineId::from(engine));
        recorder.note(RequestRecord { engine, timeline: Some(answer()), ..finished(verdict) });
    };
    let known = |engines: &[&str]| {
        let report = |engine: &&str| (PoolId::from("main"), EngineId::from(*engine), EngineReport::default());
        recorder.engines(engines.iter().map(report).collect());
    };
    let told = |name: &str, engine: &str| {
        samples(&recorder).get(&format!("{name}{{pool=\"main\",engine=\"{engine}\"}}")).copied()
    };
    serve("a:1");
    known(&["a:1"]);
    assert_eq!(told("goodput_engine_slo_total", "a:1"), None, "nobody asked for them");
    let mut shape = shape();
    shape.labels.series_by_engine = true;
    recorder.bind(&shape);
    known(&["a:1", "b:1"]);
    assert_eq!(told("goodput_engine_slo_total", "b:1"), Some(0.0), "there from the start");
    serve("a:1");
    serve("a:1");
    recorder.note(RequestRecord { engine: Some(EngineId::from("a:1")), ..missed(Missed::Ttft, 440) });
    assert_eq!(told("goodput_engine_slo_total", "a:1"), Some(3.0));
    assert_eq!(told("goodput_engine_slo_met_total", "a:1"), Some(2.0));
    assert_eq!(told("goodput_engine_time_to_first_token_seconds_sum", "a:1"), Some(0.6));
    let tpot = sum(&samples(&recorder), "goodput_engine_time_per_output_token_seconds_count", "token_source=\"usage\"");
    assert_eq!(tpot, 2.0);
    tokio::time::advance(Duration::from_secs(2 * 3600)).await;
    recorder.0.engine_stats.prune(recorder.now());
    serve("a:1");
    assert_eq!(told("goodput_engine_slo_total", "a:1"), Some(4.0), "a quiet hour loses no count");
    known(&["b:1"]);
    assert_eq!((told("goodput_engine_slo_total", "a:1"), told("goodput_engine_slo_total", "b:1")), (None, Some(0.0)));
    serve("a:1");
    assert_eq!(told("goodput_engine_slo_total", "a:1"), Some(1.0), "its last answers end");
    shape.labels.series_by_engine = false;
    recorder.bind(&shape);
    assert_eq!(told("goodput_engine_slo_total", "b:1"), None);
}

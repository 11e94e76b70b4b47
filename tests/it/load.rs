//! Runs against scripted and simulated engines, in virtual time.

mod knee;
mod sweeps;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::HeaderMap;

use crate::support::scripted_engine::fixtures::{d, error, f, r, t, u, whole};
use crate::support::scripted_engine::{Script, ScriptedEngine};
use goodput::clock::Clock;
use goodput::dial::{BoxedIo, Dial, EngineAddress, Roots, Scheme};
use goodput::forward::settings::Timeouts;
use goodput::judge::{Objective, Objectives};
use goodput::load::*;
use goodput::types::{ApiPath, ClassId, Tokens};

/// A network with one place, where connections are made so.
struct Connects<F>(F);

impl<F: Fn() -> io::Result<BoxedIo> + Send + Sync> Dial for Connects<F> {
    fn dial<'a>(&'a self, _: &'a EngineAddress, _: Option<&'a Roots>) -> BoxFuture<'a, io::Result<BoxedIo>> {
        Box::pin(async move { (self.0)() })
    }

    fn look_up<'a>(&'a self, _: &'a str, _: u16) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async { Err(io::ErrorKind::NotFound.into()) })
    }
}

fn target(connects: impl Fn() -> io::Result<BoxedIo> + Send + Sync + 'static) -> LoadTarget {
    let address =
        EngineAddress { scheme: Scheme::Http, host: "service".into(), port: 80, base: "/base".into(), name: None };
    LoadTarget { dial: Arc::new(Connects(connects)), address, roots: None, headers: HeaderMap::new() }
}

fn scripted(engine: &ScriptedEngine) -> LoadTarget {
    let engine = engine.clone();
    target(move || Ok(Box::new(engine.connect()) as BoxedIo))
}

fn class(ttft: u64, tpot: u64) -> LoadClass {
    let limit = |millis| Some(Objective { threshold: Duration::from_millis(millis), attainment: 0.95 });
    LoadClass {
        id: ClassId::from("chat"),
        objectives: Objectives { ttft: limit(ttft), tpot: limit(tpot), ..Objectives::default() },
        timeouts: Timeouts {
            first_token: Duration::from_secs(5),
            idle: Duration::from_secs(3),
            total: Duration::from_secs(20),
            response_head: Duration::from_secs(15),
            ..Timeouts::default()
        },
        headers: HeaderMap::new(),
    }
}

fn planned(at: u64) -> PlannedRequest {
    PlannedRequest {
        at: Duration::from_millis(at),
        class: 0,
        endpoint: ApiPath::relayed("/v1/chat/completions").unwrap(),
        stream: true,
        body: Bytes::from_static(b"{\"model\":\"m\",\"stream\":true,\"messages\":[]}"),
        input_tokens: Some(3),
        output_cap: Some(Tokens(8)),
        leaves_after: None,
        authorization: None,
        tag: at,
    }
}

/// What came of a plan: the records by number, and the numbers that were told to be overdue.
struct Ran {
    records: Vec<LoadRecord>,
    overdue: Vec<u64>,
    end: RunEnd,
}

impl Ran {
    fn verdicts(&self) -> Vec<String> {
        self.records.iter().map(|record| format!("{}({})", record.outcome, record.reason)).collect()
    }
}

async fn ran(target: &LoadTarget, class: LoadClass, plan: Vec<PlannedRequest>, limits: RunLimits) -> Ran {
    let (mut records, mut overdue, mut sent) = (Vec::new(), Vec::new(), Vec::new());
    let end = run(Clock::start(), target, &[class], plan, limits, &RunControl::new(), |event| match event {
        LoadEvent::Sent { number, .. } => sent.push(number),
        LoadEvent::Overdue { number } => overdue.push(number),
        LoadEvent::Ended(record) => records.push(*record),
    })
    .await;
    records.sort_by_key(|record| record.number);
    assert_eq!(records.iter().map(|record| record.number).collect::<Vec<_>>(), sent, "each ends once");
    assert_eq!(end.sent, records.len() as u64);
    Ran { records, overdue, end }
}

fn stream(first: u64, last: u64) -> Script {
    let opened = Script::stream().say(r()).at(first).say(t("a")).at(last).say(t("b"));
    opened.say(f("stop")).say(u(9, 2)).say(d()).end()
}

#[tokio::test(start_paused = true)]
async fn slow_responses_do_not_delay_the_schedule_and_are_judged_from_it() {
    let engine = ScriptedEngine::in_turn(Clock::start(), vec![stream(1500, 1540), stream(300, 340), stream(300, 440)]);
    let plan = vec![planned(0), planned(100), planned(200)];
    let ran = ran(&scripted(&engine), class(1000, 50), plan, RunLimits::default()).await;
    assert_eq!(ran.verdicts(), ["missed(ttft)", "met()", "missed(tpot)"]);
    let ttfts: Vec<_> = ran.records.iter().map(|record| record.ttft_seconds.unwrap()).collect();
    assert_eq!(ttfts, [1.5, 0.3, 0.3]);
    let record = &ran.records[2];
    assert_eq!((record.tpot_seconds, record.output_tokens, record.token_source.as_str()), (Some(0.14), 2, "usage"));
    assert_eq!((record.scheduled_seconds, record.send_lag_seconds, record.end_seconds), (0.2, 0.0, 0.64));
    assert_eq!((record.ttft_held, record.tpot_held, record.itl_held), (Some(true), Some(false), None));
    assert_eq!(ran.overdue, [0], "told while it was open");
    let requests = engine.log().requests();
    assert!(requests.iter().all(|request| request.target == "/base/v1/chat/completions"));
    assert_eq!(engine.log().connections().len(), 3, "one connection for each request that is open");
}

#[tokio::test(start_paused = true)]
async fn a_request_with_its_own_authorization_sends_it_in_place_of_the_services() {
    let engine = ScriptedEngine::in_turn(Clock::start(), vec![stream(10, 20), stream(10, 20)]);
    let mut target = scripted(&engine);
    target.headers.insert(http::header::AUTHORIZATION, http::HeaderValue::from_static("Bearer all"));
    let own = Some(http::HeaderValue::from_static("Bearer own"));
    let plan = vec![planned(0), PlannedRequest { authorization: own, ..planned(100) }];
    ran(&target, class(1000, 50), plan, RunLimits::default()).await;
    let requests = engine.log().requests();
    let keys = requests.iter().map(|request| {
        let own = request.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("authorization"));
        own.map(|(_, value)| value.as_str()).collect::<Vec<_>>()
    });
    assert_eq!(keys.collect::<Vec<_>>(), [vec!["Bearer all"], vec!["Bearer own"]]);
}

#[tokio::test(start_paused = true)]
async fn connections_are_used_again_and_a_kept_one_that_was_closed_is_no_failure() {
    let closing = Script::new().reply(200, &[("content-type", "application/json")], whole("a", 1, 1)).close();
    let engine = ScriptedEngine::in_turn(Clock::start(), vec![stream(10, 20), closing, stream(10, 20)]);
    let plan = vec![planned(0), planned(1000), planned(2000), planned(9000)];
    let ran = ran(&scripted(&engine), class(1000, 50), plan, RunLimits::default()).await;
    assert_eq!(ran.verdicts(), ["met()"; 4]);
    let used: Vec<_> = engine.log().connections().iter().map(|connection| connection.requests).collect();
    assert_eq!(used, [2, 1, 1], "and none that idled for more than 4 s");
}

#[tokio::test(start_paused = true)]
async fn every_way_to_fail_is_a_miss_with_its_reason() {
    let json = [("content-type", "application/json")];
    let cut = Script::stream().say(r()).say(t("a")).end();
    let after_token = Script::stream().say(t("a")).say(error("boom", 500)).say(d()).end();
    let scripts = vec![
        (Script::answer(503, &json, "{}"), "missed(upstream_overload)"),
        (Script::answer(500, &json, "{}"), "missed(upstream_error)"),
        (Script::answer(400, &json, "{}"), "excluded(invalid_request)"),
        (Script::answer(401, &json, "{}"), "excluded(unauthorized)"),
        (Script::answer(429, &[("x-goodput-reason", "rate_limit_exceeded")], "{}"), "excluded(rate_limited)"),
        (Script::stream().say(error("busy", 503)).say(d()).end(), "missed(upstream_overload)"),
        (after_token, "missed(upstream_error)"),
        (cut, "missed(truncated)"),
        (Script::stream().say(t("a")).reset(), "missed(truncated)"),
        (Script::new().reset(), "missed(upstream_unavailable)"),
        (Script::new().silence(), "missed(timeout_first_token)"),
        (Script::stream().say(r()).silence(), "missed(timeout_first_token)"),
        (Script::stream().say(t("a")).silence(), "missed(timeout_idle)"),
        (Script::stream().say(f("stop")).silence(), "met()"),
        (Script::json(200, "[]"), "missed(unparseable)"),
        (Script::answer(200, &[("content-encoding", "gzip")], "x"), "missed(unparseable)"),
    ];
    let (scripts, expected): (Vec<_>, Vec<_>) = scripts.into_iter().unzip();
    let engine = ScriptedEngine::in_turn(Clock::start(), scripts);
    let plan = (0..expected.len() as u64).map(|number| planned(number * 10_000)).collect();
    let ran = ran(&scripted(&engine), class(1000, 50), plan, RunLimits::default()).await;
    assert_eq!(ran.verdicts(), expected);
    let silent = &ran.records[10];
    assert_eq!((silent.end_seconds - silent.scheduled_seconds, silent.ttft_held), (5.0, Some(false)));
    engine.log().quiet().await; // who gives up closes
}

#[tokio::test(start_paused = true)]
async fn an_absent_engine_and_a_client_without_sockets_are_distinguished() {
    let refuses = target(|| Err(io::ErrorKind::ConnectionRefused.into()));
    let refused = ran(&refuses, class(1000, 50), vec![planned(0)], RunLimits::default()).await;
    assert_eq!(refused.verdicts(), ["missed(upstream_unavailable)"]);
    assert!(refused.records[0].error.as_deref().unwrap().contains("cannot connect to http://service:80/base"));
    let lacks = target(|| Err(io::Error::from_raw_os_error(libc::EMFILE)));
    let lacking = ran(&lacks, class(1000, 50), vec![planned(0)], RunLimits::default()).await;
    assert!(lacking.records[0].client_fault && !refused.records[0].client_fault);
}

#[tokio::test(start_paused = true)]
async fn requests_open_after_the_drain_are_judged_like_timeouts() {
    let begun = Script::stream().say(t("a")).wait(Duration::from_secs(2)).say(t("b")).silence();
    let engine = ScriptedEngine::in_turn(Clock::start(), vec![Script::new().silence(), begun, stream(10, 20)]);
    let limits = RunLimits { drain: Some(Duration::from_millis(1500)), ..RunLimits::default() };
    let plan = vec![planned(0), planned(100), planned(200)];
    let ran = ran(&scripted(&engine), class(1000, 50), plan, limits).await;
    assert_eq!(ran.verdicts(), ["missed(timeout_first_token)", "missed(timeout_total)", "met()"]);
    assert_eq!((ran.end.length, ran.end.sending), (Duration::from_millis(1700), Duration::from_millis(200)));
}

#[tokio::test(start_paused = true)]
async fn a_planned_leave_is_judged_by_the_objectives_broken_by_then() {
    let engine = ScriptedEngine::always(Clock::start(), Script::new().silence());
    let leaving = |at, after| PlannedRequest { leaves_after: Some(Duration::from_millis(after)), ..planned(at) };
    let plan = vec![leaving(0, 900), leaving(0, 1100)];
    let ran = ran(&scripted(&engine), class(1000, 50), plan, RunLimits::default()).await;
    assert_eq!(ran.verdicts(), ["excluded(client_cancel)", "missed(canceled_late)"]);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_stopped_sends_no_more_and_one_that_is_aborted_leaves() {
    for (aborts, sent, verdict) in [(false, 3, "met()"), (true, 3, "excluded(client_cancel)")] {
        let engine = ScriptedEngine::always(Clock::start(), stream(500, 520));
        let control = RunControl::new();
        let stops = control.clone();
        let mut verdicts = Vec::new();
        let plan = (0..1_000_000).map(|number| planned(number * 100));
        let end = run(
            Clock::start(),
            &scripted(&engine),
            &[class(1000, 50)],
            plan,
            RunLimits::default(),
            &control,
            |event| match event {
                LoadEvent::Sent { number: 2, .. } if aborts => stops.abort(),
                LoadEvent::Sent { number: 2, .. } => stops.stop_sending(),
                LoadEvent::Ended(record) => verdicts.push(format!("{}({})", record.outcome, record.reason)),
                _ => {}
            },
        )
        .await;
        assert_eq!((end.sent, end.aborted), (sent, aborts));
        assert_eq!(verdicts, vec![verdict; 3]);
    }
}

#[tokio::test(start_paused = true)]
async fn more_open_requests_than_allowed_are_counted_and_not_sent() {
    let engine = ScriptedEngine::always(Clock::start(), stream(500, 520));
    let limits = RunLimits { max_in_flight: 2, ..RunLimits::default() };
    let plan = (0..5).map(planned).collect();
    let ran = ran(&scripted(&engine), class(1000, 50), plan, limits).await;
    assert_eq!((ran.end.sent, ran.end.unsent), (2, 3));
}

#[test]
fn a_record_survives_the_files_that_it_is_written_to() {
    let record = LoadRecord { number: 7, outcome: "met".to_owned(), ttft_seconds: Some(0.25), ..LoadRecord::default() };
    let line = serde_json::to_string(&record).unwrap();
    assert_eq!(serde_json::from_str::<LoadRecord>(&line).unwrap(), record);
}

//! The trace against a service, open loop: each request at its time, whatever became of the ones before.

use std::cell::Cell;
use std::time::Duration;

use super::classes::ReplayedClasses;
use super::options::ReplayArgs;
use super::processes::EngineProcesses;
use super::records::RecordLines;
use super::source::{FeedState, TraceSource};
use super::tenant_keys::TenantKeys;
use crate::cli::load_runtime::NotStarted;
use crate::cli::service_probe::{explained, only_model};
use crate::cli::signals::ShutdownSignals;
use crate::clock::Clock;
use crate::load::arrivals::ArrivalProcess;
use crate::load::lengths::{LengthModel, TokenLengths};
use crate::load::probe::ServiceProbe;
use crate::load::prompts::PromptCalibration;
use crate::load::replay::{LatencyHistogram, ReplayRequests, ReplayScore, ReplayTarget};
use crate::load::result::MOST_LAG;
use crate::load::workload::{Workload, WorkloadClass};
use crate::load::{LoadEvent, LoadRecord, LoadTarget, PlannedRequest, RunControl, RunEnd, RunLimits, run};

/// Requests in a row that no connection could be had for, after which the service counts as gone.
const GONE_AFTER: u32 = 20;

/// Longest wait for a service whose engines were just started.
const STARTS_WITHIN: Duration = Duration::from_secs(600);

/// Between two questions to a service that is starting.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Results of a replay against a service, beside the scores.
pub struct LiveEnd {
    /// The service, and why it cannot be believed.
    pub target: ReplayTarget,
    /// The trace, as far as it was read.
    pub feed: FeedState,
    /// Why it ended before the trace did.
    pub ended_by: Option<String>,
}

/// Replays against `url`.
///
/// # Errors
/// The command line is wrong, or the service cannot be reached.
pub async fn replay_live(
    args: &ReplayArgs,
    url: &str,
    source: &TraceSource,
    classes: &ReplayedClasses,
    score: &mut ReplayScore,
    lines: &mut RecordLines,
) -> Result<LiveEnd, NotStarted> {
    let clock = Clock::start();
    let target = args.endpoint.target(url).map_err(NotStarted::Usage)?;
    let sent = classes.sent(args.class_header.as_deref()).map_err(NotStarted::Usage)?;
    let mut workload = workload(args, &sent).map_err(NotStarted::Usage)?;
    let mut processes = EngineProcesses::start(args).map_err(NotStarted::Usage)?;
    let seed = u64::try_from(clock.wall().as_nanos() & u128::from(u64::MAX)).unwrap_or_default();
    let control = RunControl::new();
    let told = control.clone();
    let listener = tokio::spawn(async move {
        ShutdownSignals::listen().next().await;
        told.abort();
    });
    let keys = TenantKeys::of(args.tenant_keys.as_deref(), classes).map_err(NotStarted::Usage)?;
    let probed = keys.for_probe(&target);
    let ready = prepare(clock, &probed, &mut workload, seed, processes.are_started());
    tokio::select! {
        ready = ready => ready.map_err(NotStarted::Start)?,
        () = control.aborted() => return Err(NotStarted::Start(anyhow::anyhow!("interrupted before it began"))),
    }
    let feed = source.feed(classes, args.endpoint.max_context.map(|tokens| tokens as u64));
    let feed = feed.map_err(NotStarted::Usage)?;
    let state = feed.state();
    let mut requests = ReplayRequests::new(&workload, seed);
    let plan = feed.map(|(request, class)| PlannedRequest {
        authorization: keys.of_tenant(request.tenant),
        ..requests.request(&request, class)
    });
    let mut watch = RunWatch { lags: LatencyHistogram::default(), unreachable: 0, client_faults: 0, gone: None };
    let may_be_gone = args.lose.is_empty();
    let origin = clock.now();
    let end = {
        let limits = RunLimits { drain: args.drain, ..RunLimits::default() };
        let is_gone = Cell::new(false);
        let running = run(clock, &target, &sent, plan, limits, &control, |event| {
            let LoadEvent::Ended(record) = event else { return };
            score.push(&record);
            lines.push(&record);
            watch.note(&record);
            if may_be_gone && watch.unreachable >= GONE_AFTER && !is_gone.replace(true) {
                watch.gone = record.error.clone().or_else(|| Some("no connection".to_owned()));
                control.abort();
            }
        });
        tokio::select! {
            end = running => end,
            () = processes.follow(clock, origin, |said| eprintln!("{said}")) => RunEnd::default(),
        }
    };
    let lost_commands = processes.finish(clock).await;
    listener.abort();
    let ended_by = match &watch.gone {
        Some(error) => Some(format!("the service stopped answering: {error}")),
        None => end.aborted.then(|| "interrupted".to_owned()),
    };
    let target = ReplayTarget::Service {
        url: target.address.to_string(),
        model: workload.model.clone(),
        send_lag_p99_seconds: watch.lags.at(0.99).unwrap_or_default(),
        tenants_without_key: keys.missing(),
        problems: watch.problems(&end, classes).into_iter().chain(lost_commands).collect(),
    };
    Ok(LiveEnd { target, feed: state.take(), ended_by })
}

/// The workload: bodies with the lengths of the trace.
fn workload(args: &ReplayArgs, sent: &[crate::load::LoadClass]) -> anyhow::Result<Workload> {
    let asks = &args.endpoint;
    let endpoint = asks.endpoint()?;
    let one = || LengthModel::fitted(TokenLengths::Fixed { tokens: 1 }, TokenLengths::Fixed { tokens: 1 }, 0.0);
    let class =
        |load: &crate::load::LoadClass| anyhow::Ok(WorkloadClass { load: load.clone(), weight: 1.0, lengths: one()? });
    Ok(Workload {
        model: asks.model.clone().unwrap_or_default(),
        endpoint,
        stream: !asks.no_stream && endpoint.dialect().generates(),
        classes: sent.iter().map(class).collect::<anyhow::Result<_>>()?,
        arrivals: ArrivalProcess::Constant,
        ignore_eos: !asks.respect_eos,
        max_context: asks.max_context.map(|tokens| tokens as u64),
        extra: asks.extra()?,
        calibration: PromptCalibration::default(),
    })
}

/// Probes the service for its model and token lengths; waits for one that is starting.
async fn prepare(
    clock: Clock,
    target: &LoadTarget,
    workload: &mut Workload,
    seed: u64,
    is_starting: bool,
) -> anyhow::Result<()> {
    let probe = ServiceProbe::new(clock, target);
    let give_up = clock.now() + STARTS_WITHIN;
    loop {
        let asked = ask(&probe, workload, seed).await;
        if asked.is_ok() || !is_starting || clock.now() >= give_up {
            return asked;
        }
        clock.sleep_until(Some(clock.now() + ASK_EVERY)).await;
    }
}

async fn ask(probe: &ServiceProbe, workload: &mut Workload, seed: u64) -> anyhow::Result<()> {
    if workload.model.is_empty() {
        workload.model = only_model(probe).await?;
    }
    let answer = probe.calibrate(workload, seed).await.map_err(explained)?;
    if workload.ignore_eos && !answer.takes_ignore_eos {
        eprintln!("the service refuses ignore_eos: answers end where the model ends them");
    }
    (workload.ignore_eos, workload.calibration) = (answer.takes_ignore_eos, answer.calibration);
    Ok(())
}

/// State observed beside the scores.
struct RunWatch {
    lags: LatencyHistogram,
    /// Requests in a row, the last ones that ended, without a connection.
    unreachable: u32,
    client_faults: u64,
    gone: Option<String>,
}

impl RunWatch {
    fn note(&mut self, record: &LoadRecord) {
        self.lags.push(record.send_lag_seconds);
        self.client_faults += u64::from(record.client_fault);
        self.unreachable = if record.reason == "upstream_unavailable" { self.unreachable + 1 } else { 0 };
    }

    fn problems(&self, end: &RunEnd, classes: &ReplayedClasses) -> Vec<String> {
        let mut found = Vec::new();
        let thresholds = classes.all.iter().filter_map(|class| class.objectives.ttft.or(class.objectives.e2e));
        let tightest = thresholds.map(|objective| objective.threshold.as_secs_f64()).fold(f64::INFINITY, f64::min);
        let lag = self.lags.at(0.99).unwrap_or_default();
        if lag > MOST_LAG * tightest {
            found.push(format!(
                "the load generator itself was late: its p99 send lag of {:.1} ms exceeds 5 % of the tightest threshold ({:.0} ms)",
                lag * 1e3,
                tightest * 1e3
            ));
        }
        if self.client_faults > 0 {
            found.push(format!(
                "{} requests found no socket on this machine; raise its limit of open files",
                self.client_faults
            ));
        }
        if end.unsent > 0 {
            found.push(format!("{} requests were not sent, because too many were open", end.unsent));
        }
        found
    }
}

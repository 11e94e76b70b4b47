//! `goodput sweep`: finds the highest request rate at which a service meets its objectives.

mod files;
mod inputs;
mod options;
mod show;

pub use options::SweepArgs;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use jiff::Timestamp;

use self::files::SweepFiles;
use self::show::SweepProgressLine;
use super::load_runtime::{NotStarted, load_runtime};
use super::print;
use super::service_probe::{explained, only_model};
use super::signals::ShutdownSignals;
use crate::clock::Clock;
use crate::load::measure::{RunSetting, goals_of};
use crate::load::monitor::RunVerdict;
use crate::load::probe::ServiceProbe;
use crate::load::result::MOST_LAG;
use crate::load::summary::{
    ClientSummary, FORMAT, FleetSummary, MethodSummary, SweepSummary, TargetSummary, WorkloadSummary,
};
use crate::load::sweep::{CacheResult, GoodputStatus, RatePlan, SweepPlan, SweepProgress};
use crate::load::workload::{RunSeeds, Workload};
use crate::load::{LoadTarget, RunControl, RunLimits};

/// The inputs of a sweep.
struct Sweep {
    args: SweepArgs,
    clock: Clock,
    target: LoadTarget,
    workload: Workload,
    plan: SweepPlan,
    seeds: RunSeeds,
    started: String,
}

impl SweepArgs {
    /// Sweeps; 0 if there is a goodput (with fixed rates: if all of them clear), else 1.
    #[must_use]
    pub fn run(self) -> ExitCode {
        super::descriptors::raise_limit();
        let runtime = match load_runtime() {
            Ok(runtime) => runtime,
            Err(error) => return NotStarted::Start(anyhow::anyhow!("no runtime: {error}")).report("sweep"),
        };
        let json = self.json;
        match runtime.block_on(self.sweep()) {
            Ok((summary, is_good)) => {
                let text = if json {
                    serde_json::to_string_pretty(&summary).unwrap_or_default()
                } else {
                    show::table(&summary)
                };
                print::last(text.trim_end(), if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
            }
            Err(error) => error.report("sweep"),
        }
    }

    /// Returns the summary, and whether the result is positive.
    async fn sweep(self) -> Result<(SweepSummary, bool), NotStarted> {
        let clock = Clock::start();
        let sweep = Sweep::begin(self, clock).await?;
        let started = sweep.started.replace([':', '-'], "");
        let folder = sweep.args.out.clone().unwrap_or_else(|| PathBuf::from(format!("goodput-sweep-{started}")));
        let files = SweepFiles::create(&folder).map_err(NotStarted::Usage)?;
        sweep.measure(files).await.map_err(NotStarted::Start)
    }
}

impl Sweep {
    /// Parses the command line and probes the service.
    async fn begin(args: SweepArgs, clock: Clock) -> Result<Self, NotStarted> {
        let usage = NotStarted::Usage;
        let target = args.target().map_err(usage)?;
        let mut workload = args.workload().map_err(usage)?;
        let caches = args.caches().map_err(usage)?;
        let rates = args.rate_plan().map_err(usage)?;
        args.rule().map_err(usage)?;
        let line = SweepProgressLine::new(args.repetitions);
        let probe = ServiceProbe::new(clock, &target);
        if workload.model.is_empty() {
            workload.model = only_model(&probe).await.map_err(NotStarted::Start)?;
        }
        let wall = clock.wall();
        let nonce = u64::try_from(wall.as_nanos() & u128::from(u64::MAX)).unwrap_or_default();
        let seeds = RunSeeds { plan: args.seed, prompts: nonce };
        let answer = probe.calibrate(&workload, nonce).await.map_err(|error| NotStarted::Start(explained(error)))?;
        if workload.ignore_eos && !answer.takes_ignore_eos {
            line.say("the service refuses ignore_eos: answers end where the model ends them");
        }
        if !answer.calibration.is_measured {
            line.say("the service reports no usage: prompts are taken to have one token a word");
        }
        workload.ignore_eos = answer.takes_ignore_eos;
        workload.calibration = answer.calibration;
        let plan = SweepPlan {
            rates,
            repetitions: args.repetitions,
            caches,
            goals: goals_of(&workload),
            confidence: args.rule().map_err(usage)?.confidence,
            replicas: args.replicas,
            gpus_per_replica: args.gpus_per_replica,
        };
        let started = at(wall);
        Ok(Sweep { args, clock, target, workload, plan, seeds, started })
    }

    /// Performs the runs that the search requests.
    async fn measure(&self, mut files: SweepFiles) -> anyhow::Result<(SweepSummary, bool)> {
        let rule = self.args.rule()?;
        let drain = self.args.drain.map(Duration::from_secs_f64);
        let setting = RunSetting {
            clock: self.clock,
            target: &self.target,
            workload: &self.workload,
            goals: &self.plan.goals,
            rule,
            limits: RunLimits { drain, ..RunLimits::default() },
            seeds: self.seeds,
        };
        let interrupt = RunControl::new();
        let told = interrupt.clone();
        let listener = tokio::spawn(async move {
            ShutdownSignals::listen().next().await;
            told.abort();
        });
        let mut line = SweepProgressLine::new(self.plan.repetitions);
        let mut progress = SweepProgress::new(self.plan.clone());
        let mut ended_by = None;
        while let Some(next) = progress.next_run() {
            let measured = setting.measure(next, &interrupt, |standing| line.standing(next, standing)).await;
            line.ended(next, &measured.result);
            files.records(next, &measured)?;
            if interrupt.is_aborted() {
                ended_by = Some("interrupted".to_owned());
            } else if let Some(error) = &measured.gone {
                ended_by = Some(format!("the service stopped answering: {error}"));
            }
            progress.note(measured.result);
            if ended_by.is_some() {
                progress.stop();
            }
            files.summary(&self.summary(progress.so_far(), Some("still running".to_owned())))?;
        }
        listener.abort();
        if let Some(why) = &ended_by {
            line.say(&format!("{why}: what was measured until then is kept, and marked partial"));
        }
        let summary = self.summary(progress.results(), ended_by);
        files.summary(&summary)?;
        files.report(&summary)?;
        line.say(&format!("records, summary and report are in {}", files.folder().display()));
        let is_good = summary.complete && self.is_yes(&summary.results);
        Ok((summary, is_good))
    }

    fn is_yes(&self, results: &[CacheResult]) -> bool {
        let clears = |result: &CacheResult| match self.plan.rates {
            RatePlan::Search(_) => result.goodput.status == GoodputStatus::Published,
            RatePlan::Fixed(_) => result.points.iter().all(|point| point.verdict == RunVerdict::Clears),
        };
        !results.is_empty() && results.iter().all(clears)
    }

    fn summary(&self, results: Vec<CacheResult>, ended_by: Option<String>) -> SweepSummary {
        let args = &self.args;
        let search = match &self.plan.rates {
            RatePlan::Search(settings) => Some(settings),
            RatePlan::Fixed(_) => None,
        };
        SweepSummary {
            format: FORMAT.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: self.started.clone(),
            ended: at(self.clock.wall()),
            complete: ended_by.is_none(),
            ended_by,
            target: TargetSummary {
                url: self.target.address.to_string(),
                model: self.workload.model.clone(),
                path: self.workload.endpoint.path().to_owned(),
                stream: self.workload.stream,
                note: args.note.clone(),
            },
            fleet: FleetSummary { replicas: args.replicas, gpus_per_replica: args.gpus_per_replica },
            workload: WorkloadSummary::of(&self.workload, self.seeds.plan),
            method: MethodSummary {
                rates: if search.is_some() { "search" } else { "fixed" }.to_owned(),
                tolerance: search.map(|settings| settings.tolerance),
                repetitions: self.plan.repetitions,
                rule: args.rule().unwrap_or_default(),
                drain_seconds: args.drain,
                max_send_lag_share: MOST_LAG,
            },
            client: ClientSummary {
                processors: std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get),
                platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            },
            results,
        }
    }
}

/// A time of day in UTC, in whole seconds.
fn at(wall: Duration) -> String {
    let seconds = i64::try_from(wall.as_secs()).unwrap_or_default();
    Timestamp::from_second(seconds).map_or_else(|_| "unknown".to_owned(), |moment| moment.to_string())
}

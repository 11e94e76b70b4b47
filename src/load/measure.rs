//! One run of a sweep: the workload at one rate against a service, watched until it has shown enough.

use super::monitor::{ClassGoal, RunMonitor, RunRule, RunStep};
use super::plan::{LoadClass, LoadTarget};
use super::record::LoadRecord;
use super::result::{NamedGoal, RunResult, Stretch};
use super::run::{RunControl, RunLimits, run};
use super::run_events::LoadEvent;
use super::sweep::NextRun;
use super::workload::{RunSeeds, Workload};
use crate::clock::Clock;
use crate::judge::Objectives;
use crate::types::Tick;

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunStanding {
    /// Seconds since it began.
    pub seconds: f64,
    /// Requests sent.
    pub sent: u64,
    /// Requests that have ended.
    pub ended: u64,
    /// Requests that were met.
    pub met: u64,
    /// Requests that were missed.
    pub missed: u64,
}

/// Settings of a run, apart from its rate.
pub struct RunSetting<'a> {
    /// Clock.
    pub clock: Clock,
    /// Service.
    pub target: &'a LoadTarget,
    /// Workload.
    pub workload: &'a Workload,
    /// Goals of its classes.
    pub goals: &'a [NamedGoal],
    /// When a run has shown enough.
    pub rule: RunRule,
    /// Bounds of a run.
    pub limits: RunLimits,
    /// Seeds of the sweep.
    pub seeds: RunSeeds,
}

/// A run that is over.
#[derive(Debug)]
pub struct FinishedRun {
    /// Result.
    pub result: RunResult,
    /// All its records, in the order of the schedule, with their stretches.
    pub records: Vec<(Stretch, LoadRecord)>,
    /// The service could not be reached any more: the error of the last attempt.
    pub gone: Option<String>,
}

impl RunSetting<'_> {
    /// Performs a run. `interrupt` aborts it; `watch` receives its progress.
    pub async fn measure(
        &self,
        next: NextRun,
        interrupt: &RunControl,
        mut watch: impl FnMut(&RunStanding),
    ) -> FinishedRun {
        let goals: Vec<ClassGoal> = self.goals.iter().map(|named| named.goal.clone()).collect();
        let classes: Vec<LoadClass> = self.workload.classes.iter().map(|class| class.load.clone()).collect();
        let plan = self.workload.requests(next.cache, next.rate, self.seeds.derive(next.number));
        let control = RunControl::new();
        let mut monitor = RunMonitor::new(self.rule, goals, next.rate);
        let mut records: Vec<LoadRecord> = Vec::new();
        let mut standing = RunStanding::default();
        let mut is_gone = false;
        let start = self.clock.now();
        let end = {
            let running = run(self.clock, self.target, &classes, plan, self.limits, &control, |event| {
                let now = seconds_since(start, self.clock);
                match monitor.note(&event, now) {
                    RunStep::GoOn => {}
                    RunStep::Enough => control.stop_sending(),
                    RunStep::Gone => {
                        is_gone = true;
                        control.abort();
                    }
                }
                standing.note(&event, now);
                if let LoadEvent::Ended(record) = event {
                    records.push(*record);
                }
                watch(&standing);
            });
            let mut running = std::pin::pin!(running);
            loop {
                tokio::select! {
                    end = &mut running => break end,
                    () = interrupt.aborted(), if !control.is_aborted() => control.abort(),
                }
            }
        };
        records.sort_by_key(|record| record.number);
        let conclusion = monitor.finish(end.length.as_secs_f64(), !end.aborted);
        let result = RunResult::of(next.repetition, &conclusion, &end, &records, self.goals, self.rule.confidence);
        let last_error = || records.iter().rev().find_map(|record| record.error.clone());
        let gone = is_gone.then(|| last_error().unwrap_or_else(|| "no connection".to_owned()));
        let records = records.into_iter().map(|record| (Stretch::of(record.number, &conclusion), record)).collect();
        FinishedRun { result, records, gone }
    }
}

impl RunStanding {
    fn note(&mut self, event: &LoadEvent, now: f64) {
        self.seconds = now;
        match event {
            LoadEvent::Sent { .. } => self.sent += 1,
            LoadEvent::Overdue { .. } => {}
            LoadEvent::Ended(record) => {
                self.ended += 1;
                self.met += u64::from(record.is_met());
                self.missed += u64::from(record.is_judged() && !record.is_met());
            }
        }
    }
}

fn seconds_since(start: Tick, clock: Clock) -> f64 {
    clock.now().since(start).as_secs_f64()
}

/// The goals of a workload's classes. Latency is TTFT if the class has such an objective and its requests
/// stream, else E2E, else the budget of a non-streaming response.
#[must_use]
pub fn goals_of(workload: &Workload) -> Vec<NamedGoal> {
    let total: f64 = workload.classes.iter().map(|class| class.weight).sum();
    let goal = |class: &super::workload::WorkloadClass| {
        let objectives: &Objectives = &class.load.objectives;
        let streams = workload.stream && workload.endpoint.dialect().generates();
        let ttft = objectives.ttft.filter(|_| streams).map(|ttft| ttft.threshold);
        let whole = objectives.whole_budget(class.lengths.mean_output().round() as u64);
        let threshold = ttft.or(whole).unwrap_or(class.load.timeouts.total);
        let weight = class.weight / total;
        NamedGoal {
            class: class.load.id.to_string(),
            goal: ClassGoal { target: objectives.joint_target, threshold, is_ttft: ttft.is_some(), weight },
        }
    };
    workload.classes.iter().map(goal).collect()
}

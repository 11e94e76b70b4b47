//! How each class stands against its promise at this moment: what an operator looks at first.

use crate::units::{ClassId, LengthBucket};

use super::Recorder;
use super::burn::{Burn, WindowCount};
use super::drift::DRIFT_FACTOR;
use super::live::drifts;

/// How one class stands.
#[derive(Clone, Debug, PartialEq)]
pub struct SloStatus {
    /// The class.
    pub class: ClassId,
    /// The share of judged requests that must be met.
    pub target: f64,
    /// What was counted in the window of its promise.
    pub own: WindowCount,
    /// Unix time from which on it was counted, in seconds.
    pub since: u64,
    /// The same for each prompt length of which anything was judged.
    pub lengths: Vec<LengthStatus>,
    /// How far lengths are off those that it assumes, where that is known.
    pub drifts: Vec<WorkloadDrift>,
    /// The share of the budget of misses that is left; negative where overdrawn. Absent where
    /// nothing was judged.
    pub budget_left: Option<f64>,
    /// How many times too fast the budget is used, over each window in which anything was
    /// judged.
    pub burn: Vec<(WindowCount, f64)>,
    /// Requests that have arrived and not ended.
    pub in_flight: u64,
    /// Of these, how many wait for a seat.
    pub waiting: u64,
    /// Of those in flight, how many have broken an objective already.
    pub overdue: u64,
}

/// How the prompts of one length stand.
#[derive(Clone, Debug, PartialEq)]
pub struct LengthStatus {
    /// The length.
    pub length: LengthBucket,
    /// What was counted in the window of the class's promise.
    pub own: WindowCount,
    /// The share of the budget of misses that is left.
    pub budget_left: f64,
    /// How many times too fast the budget is used, over each window in which anything was judged.
    pub burn: Vec<(WindowCount, f64)>,
}

/// A percentile of lengths against the one that the class assumes.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkloadDrift {
    /// `input` or `output`.
    pub direction: &'static str,
    /// `p50` or `p95`.
    pub percentile: &'static str,
    /// Observed by assumed.
    pub ratio: f64,
}

impl WorkloadDrift {
    /// Whether it is another workload.
    #[must_use]
    pub fn is_another_workload(&self) -> bool {
        self.ratio > DRIFT_FACTOR || self.ratio < 1.0 / DRIFT_FACTOR
    }

    /// What to do about it, for an operator; nothing while it is the workload that was assumed.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        let WorkloadDrift { direction, percentile, ratio } = self;
        self.is_another_workload().then(|| {
            format!(
                "{percentile} of {direction} tokens is {ratio:.2} times what the class assumes: capacity was found out for another \
                 workload; run the sweep again (goodput sweep) and correct workload_assumption"
            )
        })
    }
}

/// Windows in which anything was judged, with how fast the budget was used.
fn burns(burn: &Burn, at: crate::units::Tick) -> Vec<(WindowCount, f64)> {
    let judged = burn.spans(at).filter(|span| span.count.judged > 0);
    judged.map(|span| (span, burn.rate(span.count))).collect()
}

impl Recorder {
    /// Every class of the settings, in their order.
    #[must_use]
    pub fn standings(&self) -> Vec<SloStatus> {
        let at = self.now();
        let table = self.0.table.load();
        let places = self.0.open.places(at);
        let stand = |class: &ClassId| {
            let series = table.class(class)?;
            let mut memory = series.memory.lock();
            let own = memory.burn.own(at);
            let mut told = Vec::new();
            drifts(series, &mut memory, at, &mut |direction, percentile, ratio| {
                told.push(WorkloadDrift { direction, percentile, ratio });
            });
            let lengths = LengthBucket::ALL.iter().zip(&memory.lengths).filter_map(|(length, burn)| {
                let own = burn.own(at);
                let (budget_left, burn) = (burn.budget_left(at), burns(burn, at));
                (own.count.judged > 0).then_some(LengthStatus { length: *length, own, budget_left, burn })
            });
            let here = places.iter().filter(|place| place.class.as_ref() == Some(class));
            Some(SloStatus {
                class: class.clone(),
                target: series.promise.joint_target,
                own,
                since: self.0.clock.wall().saturating_sub(own.covered).as_secs(),
                lengths: lengths.collect(),
                drifts: told,
                budget_left: (own.count.judged > 0).then(|| memory.burn.budget_left(at)),
                burn: burns(&memory.burn, at),
                in_flight: here.clone().count() as u64,
                waiting: here.clone().filter(|place| place.waits).count() as u64,
                overdue: here.filter(|place| place.is_overdue).count() as u64,
            })
        };
        table.current.iter().filter_map(stand).collect()
    }
}

//! Scores of a replay's requests, counted as they end.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::histogram::LatencyHistogram;
use super::losses::LossSpan;
use crate::load::quantiles::MeasureQuantiles;
use crate::load::record::LoadRecord;

/// A class of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayClass {
    /// Name.
    pub name: String,
    /// Share of requests that must keep all objectives.
    pub target: f64,
}

/// Counts of a stretch of a replay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseScore {
    /// `before`, `during` or `after` the loss of engines.
    pub phase: String,
    /// Requests that were met.
    pub met: u64,
    /// Requests that were met or missed.
    pub judged: u64,
    /// Share of met ones.
    pub attainment: Option<f64>,
}

/// How a class came through the loss of engines.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recovery {
    /// Lowest attainment of any window after the loss; absent if no window had a request.
    pub lowest_attainment: Option<f64>,
    /// From the loss to the first window from which on the target is reached; 0 if it was never missed,
    /// absent if it is not reached before the end.
    pub seconds: Option<f64>,
}

/// Result of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassReplay {
    /// Class.
    pub class: String,
    /// Requests.
    pub requests: u64,
    /// Requests that were met.
    pub met: u64,
    /// Missed requests by reason.
    pub missed: BTreeMap<String, u64>,
    /// Excluded requests by reason.
    pub excluded: BTreeMap<String, u64>,
    /// Share of judged requests that were met; absent if none was judged.
    pub attainment: Option<f64>,
    /// Target.
    pub target: f64,
    /// Whether the target was reached. A class without a judged request has reached nothing.
    pub passes: bool,
    /// Prompt tokens.
    pub input_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// TTFT.
    pub ttft_seconds: MeasureQuantiles,
    /// TPOT.
    pub tpot_seconds: MeasureQuantiles,
    /// E2E.
    pub e2e_seconds: MeasureQuantiles,
    /// Before, during and after the loss of engines; empty without one.
    pub phases: Vec<PhaseScore>,
    /// How it came through the loss.
    pub recovery: Option<Recovery>,
}

/// Counts of one second of arrivals.
#[derive(Clone, Copy, Debug, Default)]
struct SecondCounts {
    met: u32,
    judged: u32,
}

#[derive(Clone, Debug)]
struct ReplayCounts {
    class: ReplayClass,
    requests: u64,
    met: u64,
    missed: BTreeMap<String, u64>,
    excluded: BTreeMap<String, u64>,
    input_tokens: u64,
    output_tokens: u64,
    ttft: LatencyHistogram,
    tpot: LatencyHistogram,
    e2e: LatencyHistogram,
    phases: [MetCounts; 3],
    /// By second of arrival from the loss on.
    seconds: Vec<SecondCounts>,
}

#[derive(Clone, Copy, Debug, Default)]
struct MetCounts {
    met: u64,
    judged: u64,
}

const PHASES: [&str; 3] = ["before", "during", "after"];

/// See the module.
#[derive(Clone, Debug)]
pub struct ReplayScore {
    loss: Option<LossSpan>,
    window: usize,
    classes: Vec<ReplayCounts>,
    /// Latest arrival, in seconds.
    last: f64,
}

impl ReplayScore {
    /// Counts for these classes. `window`: the period over which recovery is computed.
    #[must_use]
    pub fn new(classes: Vec<ReplayClass>, loss: Option<LossSpan>, window: Duration) -> Self {
        let counts = |class| ReplayCounts {
            class,
            requests: 0,
            met: 0,
            missed: BTreeMap::new(),
            excluded: BTreeMap::new(),
            input_tokens: 0,
            output_tokens: 0,
            ttft: LatencyHistogram::default(),
            tpot: LatencyHistogram::default(),
            e2e: LatencyHistogram::default(),
            phases: Default::default(),
            seconds: Vec::new(),
        };
        let window = (window.as_secs_f64().ceil() as usize).max(1);
        ReplayScore { loss, window, classes: classes.into_iter().map(counts).collect(), last: 0.0 }
    }

    /// Counts a request, by the index of its class.
    pub fn push(&mut self, record: &LoadRecord) {
        self.last = self.last.max(record.scheduled_seconds);
        let loss = self.loss;
        let counts = &mut self.classes[record.class_index];
        counts.requests += 1;
        counts.input_tokens += record.input_tokens.or(record.planned_input_tokens).unwrap_or(0);
        counts.output_tokens += record.output_tokens;
        if !record.is_judged() {
            *counts.excluded.entry(record.reason.clone()).or_default() += 1;
            return;
        }
        let met = record.is_met();
        if met {
            counts.met += 1;
        } else {
            *counts.missed.entry(record.reason.clone()).or_default() += 1;
        }
        let is_unreached = record.e2e_seconds.is_none();
        let measures = [
            (&mut counts.ttft, record.ttft_seconds),
            (&mut counts.tpot, record.tpot_seconds),
            (&mut counts.e2e, record.e2e_seconds),
        ];
        for (histogram, value) in measures {
            match value {
                Some(seconds) => histogram.push(seconds),
                None if is_unreached => histogram.push_unreached(),
                None => {}
            }
        }
        let Some(loss) = loss else { return };
        let from = loss.from.as_secs_f64();
        let phase = if record.end_seconds < from {
            0
        } else if loss.to.is_none_or(|to| record.scheduled_seconds < to.as_secs_f64()) {
            1
        } else {
            2
        };
        counts.phases[phase].judged += 1;
        counts.phases[phase].met += u64::from(met);
        if phase > 0 {
            // Requests in flight at the loss count with the first ones after it.
            let second = (record.scheduled_seconds - from).max(0.0) as usize;
            if counts.seconds.len() <= second {
                counts.seconds.resize(second + 1, SecondCounts::default());
            }
            counts.seconds[second].judged += 1;
            counts.seconds[second].met += u32::from(met);
        }
    }

    /// Seconds from the start to the last arrival.
    #[must_use]
    pub const fn last_arrival(&self) -> f64 {
        self.last
    }

    /// Results of the classes that had requests.
    #[must_use]
    pub fn results(&self) -> Vec<ClassReplay> {
        self.classes.iter().filter(|counts| counts.requests > 0).map(|counts| self.result(counts)).collect()
    }

    fn result(&self, counts: &ReplayCounts) -> ClassReplay {
        let judged = counts.met + counts.missed.values().sum::<u64>();
        let attainment = share(counts.met, judged);
        let target = counts.class.target;
        let phases = PHASES.iter().zip(counts.phases).filter(|_| self.loss.is_some());
        let phases = phases.map(|(phase, MetCounts { met, judged })| PhaseScore {
            phase: (*phase).to_owned(),
            met,
            judged,
            attainment: share(met, judged),
        });
        ClassReplay {
            class: counts.class.name.clone(),
            requests: counts.requests,
            met: counts.met,
            missed: counts.missed.clone(),
            excluded: counts.excluded.clone(),
            attainment,
            target,
            passes: attainment.is_some_and(|attainment| attainment >= target),
            input_tokens: counts.input_tokens,
            output_tokens: counts.output_tokens,
            ttft_seconds: counts.ttft.quantiles(),
            tpot_seconds: counts.tpot.quantiles(),
            e2e_seconds: counts.e2e.quantiles(),
            phases: phases.collect(),
            recovery: self.loss.map(|_| recovery(&counts.seconds, self.window, target)),
        }
    }
}

fn share(met: u64, judged: u64) -> Option<f64> {
    (judged > 0).then(|| met as f64 / judged as f64)
}

/// How a class recovers: windows of `window` seconds that begin at each second after the loss. It has recovered where
/// a window reaches the target and the one behind it does, too; windows without requests say nothing.
fn recovery(seconds: &[SecondCounts], window: usize, target: f64) -> Recovery {
    let mut sums = vec![MetCounts::default()];
    for second in seconds {
        let before = sums[sums.len() - 1];
        let (met, judged) = (before.met + u64::from(second.met), before.judged + u64::from(second.judged));
        sums.push(MetCounts { met, judged });
    }
    let attained = |from: usize| {
        let (begin, end) = (sums[from.min(seconds.len())], sums[(from + window).min(seconds.len())]);
        share(end.met - begin.met, end.judged - begin.judged)
    };
    let starts = 0..=seconds.len().saturating_sub(window);
    let lowest = starts.clone().filter_map(attained).min_by(f64::total_cmp);
    let falls_short = |from: usize| attained(from).is_some_and(|attainment| attainment < target);
    let Some(dip) = starts.clone().find(|from| falls_short(*from)) else {
        return Recovery { lowest_attainment: lowest, seconds: lowest.map(|_| 0.0) };
    };
    let mut later = dip..*starts.end() + 1;
    let recovered = later.find(|from| !falls_short(*from) && !falls_short(from + window));
    Recovery { lowest_attainment: lowest, seconds: recovered.map(|from| from as f64) }
}

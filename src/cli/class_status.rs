//! SLO status of each class for the admin port.

use crate::admin::{BurnRate, ClassStanding, Degradation, DriftStanding, LengthStanding};
use crate::gateway::{Gateway, LevelView};
use crate::record::burn::WindowCount;
use crate::record::{LengthStatus, SloStatus, WorkloadDrift};
use crate::types::seconds_up;

/// Returns the status of every class.
pub(super) fn standings(gateway: &Gateway) -> Vec<ClassStanding> {
    let levels = gateway.level_views();
    let burn_rate = |(span, rate): &(WindowCount, f64)| BurnRate {
        window_seconds: span.window.as_secs(),
        covered_seconds: span.covered.as_secs(),
        rate: *rate,
    };
    let length = |length: &LengthStatus| LengthStanding {
        length: length.length.as_str().into(),
        met: length.own.count.met,
        total: length.own.count.judged,
        attainment: length.own.count.attainment(),
        budget_remaining: length.budget_left,
        burn_rate: length.burn.iter().map(burn_rate).collect(),
    };
    let drift = |drift: &WorkloadDrift| DriftStanding {
        direction: drift.direction.into(),
        percentile: drift.percentile.into(),
        ratio: drift.ratio,
        advice: drift.advice(),
    };
    let standing = |standing: SloStatus| ClassStanding {
        class: standing.class.to_string(),
        window_seconds: standing.own.window.as_secs(),
        covered_seconds: standing.own.covered.as_secs(),
        target: standing.target,
        met: standing.own.count.met,
        total: standing.own.count.judged,
        attainment: standing.own.count.attainment(),
        budget_remaining: standing.budget_left,
        since_unix_seconds: standing.since,
        source: standing.source.as_str().into(),
        burn_rate: standing.burn.iter().map(burn_rate).collect(),
        lengths: standing.lengths.iter().map(length).collect(),
        workload_drift: standing.drifts.iter().map(drift).collect(),
        in_flight: standing.in_flight,
        waiting: standing.waiting,
        overdue: standing.overdue,
        degradation: levels.iter().find(|view| view.class == standing.class).map(degradation),
    };
    gateway.recorder.statuses().into_iter().map(standing).collect()
}

/// Returns the overload level of a class.
pub(super) fn degradation(view: &LevelView) -> Degradation {
    Degradation {
        level: view.level,
        levels: view.levels,
        actions: view.actions.iter().map(|kind| kind.as_str().to_owned()).collect(),
        forced: view.is_forced,
        // Rounded up, so that the level lasts as long as shown.
        forced_for_seconds: view.forced_for.map(seconds_up),
        burn_rate: view.measured.burn_rate,
        queue_wait_seconds: view.measured.queue_wait.map(|wait| wait.as_secs_f64()),
        queue_depth: view.measured.queue_depth,
    }
}

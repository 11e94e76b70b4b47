//! Bucket edges of the histograms. They include every threshold of the class, so that attainment at a
//! threshold is exact.

use std::sync::Arc;
use std::time::Duration;

use crate::judge::{Objective, Objectives};

/// TTFT: 5 ms to 120 s.
const FIRST_TOKEN: [f64; 23] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0,
    60.0, 90.0, 120.0,
];
/// TPOT and gaps between tokens: 1 ms to 2.5 s.
const PER_TOKEN: [f64; 20] = [
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5,
    2.5,
];
/// E2E: 10 ms to 600 s.
const WHOLE: [f64; 21] = [
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0,
    300.0, 600.0,
];
/// Waits in the gateway, and uploads.
const WAIT: [f64; 13] = [0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// The bucket edges of one class.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BucketEdges {
    pub(super) ttft: Arc<[Duration]>,
    pub(super) tpot: Arc<[Duration]>,
    pub(super) gaps: Arc<[Duration]>,
    pub(super) e2e: Arc<[Duration]>,
    pub(super) wait: Arc<[Duration]>,
}

impl BucketEdges {
    pub(super) fn of(objectives: &Objectives) -> Self {
        let threshold = |objective: Option<Objective>| objective.map(|objective| objective.threshold);
        BucketEdges {
            ttft: with(&FIRST_TOKEN, [threshold(objectives.ttft)]),
            tpot: with(&PER_TOKEN, [threshold(objectives.tpot)]),
            gaps: with(&PER_TOKEN, [threshold(objectives.itl), Some(objectives.stall)]),
            e2e: with(&WHOLE, [threshold(objectives.e2e)]),
            wait: with(&WAIT, [None]),
        }
    }
}

fn with<const N: usize>(common: &[f64], own: [Option<Duration>; N]) -> Arc<[Duration]> {
    let common = common.iter().copied().map(Duration::from_secs_f64);
    let mut edges: Vec<Duration> = common.chain(own.into_iter().flatten()).collect();
    edges.sort_unstable();
    edges.dedup();
    edges.into()
}

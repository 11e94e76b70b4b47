//! The class `drill`: misses that an operator invents, to see whether a page arrives.
//!
//! They are in the counters alone, under a class that no settings can have. Windows, gauges, `/slo` and
//! the access line leave them out, because no request ended.

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;

use crate::judge::Missed;
use crate::types::LengthBucket;

use super::metrics::Metrics;
use super::series::{NONE, OTHER};

/// The name of the class.
const DRILL: &str = "drill";

/// The series of the class. Those of met requests stay at 0.
#[derive(Debug)]
pub(super) struct DrillSeries {
    judged: Counter,
    finished: Counter,
    missed: Counter,
}

impl DrillSeries {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let length = LengthBucket::Unknown.as_str();
        let place = || metrics.labels([("class", DRILL), ("length", length), ("pool", NONE), ("model", OTHER)]);
        let outcome = ("outcome", Arc::from("missed"));
        let reason = ("reason", Missed::Ttft.as_str());
        metrics.slo_met.at(place());
        DrillSeries {
            judged: metrics.slo.at(place()),
            finished: metrics.finished.at(place().into_iter().chain([outcome]).collect()),
            missed: metrics.missed.at(metrics.labels([("class", DRILL), ("pool", NONE), reason])),
        }
    }

    /// Counts this many misses.
    pub(super) fn miss(&self, times: u64) {
        for counter in [&self.judged, &self.finished, &self.missed] {
            counter.inc_by(times);
        }
    }
}

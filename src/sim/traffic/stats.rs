//! Counts of the load generator, per flow.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::time::Duration;

use crate::judge::Outcome;
use crate::observe::Timeline;

/// Latest samples kept for quantiles.
const KEPT: usize = 512;

/// The end of one request, as seen by its client.
#[derive(Clone, Debug)]
pub struct RequestResult {
    /// Its status; `None` without a response.
    pub status: Option<u16>,
    /// Its outcome; `None` if no response came although the client waited.
    pub outcome: Option<Outcome>,
    /// The observed response.
    pub timeline: Option<Timeline>,
}

/// Counts of one flow.
#[derive(Clone, Debug, Default)]
pub struct FlowStats {
    /// The flow's name.
    pub name: String,
    /// Sent requests.
    pub sent: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Met, judged by the client.
    pub met: u64,
    /// Missed.
    pub missed: u64,
    /// Excluded, mostly because the client disconnected.
    pub excluded: u64,
    /// No response at all (no connection, or it broke before a response). These are misses too, but not counted
    /// in [`FlowStats::missed`].
    pub unanswered: u64,
    /// Responses by status.
    pub statuses: BTreeMap<u16, u64>,
    /// Latest TTFTs.
    pub ttft: Samples,
    /// Latest TPOTs.
    pub tpot: Samples,
    /// Latest E2E times.
    pub e2e: Samples,
}

impl FlowStats {
    pub(super) fn note(&mut self, seen: &RequestResult) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Some(status) = seen.status {
            *self.statuses.entry(status).or_default() += 1;
        }
        match seen.outcome {
            Some(Outcome::Met) => self.met += 1,
            Some(Outcome::Missed(_)) => self.missed += 1,
            None => self.unanswered += 1,
            Some(Outcome::Excluded(_)) => self.excluded += 1,
        }
        let Some(timeline) = &seen.timeline else { return };
        if timeline.streamed {
            self.ttft.keep(timeline.ttft());
            self.tpot.keep(timeline.tpot());
        }
        self.e2e.keep(timeline.e2e());
    }
}

/// The latest values of a measure.
#[derive(Clone, Debug, Default)]
pub struct Samples(VecDeque<Duration>);

impl Samples {
    fn keep(&mut self, value: Option<Duration>) {
        let Some(value) = value else { return };
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(value);
    }

    /// The value that this share of the samples is at or below.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let mut sorted: Vec<Duration> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        let rank = (share.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_newest_values() {
        let mut samples = Samples::default();
        assert_eq!(samples.quantile(0.5), None);
        for value in 1..=1000 {
            samples.keep(Some(Duration::from_millis(value)));
        }
        assert_eq!(samples.quantile(0.0), Some(Duration::from_millis(489)));
        assert_eq!(samples.quantile(1.0), Some(Duration::from_millis(1000)));
        assert_eq!(samples.quantile(0.5), Some(Duration::from_millis(744)));
    }
}

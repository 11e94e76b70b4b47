//! What the senders of traffic saw, per flow.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::time::Duration;

use crate::judge::Outcome;
use crate::observe::Timeline;

/// Samples kept for quantiles: the newest ones.
const KEPT: usize = 512;

/// How one request ended, as its sender saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The status; `None` where no answer came.
    pub status: Option<u16>,
    /// How it is judged; `None` where no answer came though the client waited.
    pub outcome: Option<Outcome>,
    /// What was observed of the answer.
    pub timeline: Option<Timeline>,
}

/// Counts of one flow.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The flow's name.
    pub name: String,
    /// Requests sent.
    pub sent: u64,
    /// Requests that have no end yet.
    pub in_flight: u64,
    /// Met, as the sender judges.
    pub met: u64,
    /// Missed.
    pub missed: u64,
    /// Excluded: those whose client left, mostly.
    pub excluded: u64,
    /// No answer at all (no connection, or it broke before a response). Misses, too, but not
    /// counted among [`Tally::missed`].
    pub unanswered: u64,
    /// Answers by status.
    pub statuses: BTreeMap<u16, u64>,
    /// Times to first token of the newest answers.
    pub ttft: Samples,
    /// Times per output token of the newest answers.
    pub tpot: Samples,
    /// Times to the end of the newest answers.
    pub e2e: Samples,
}

impl Tally {
    pub(super) fn note(&mut self, seen: &Seen) {
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

/// The newest values of a measure.
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

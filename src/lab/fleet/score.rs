//! How a run went: every request judged as the gateway judges it, counted by flow and tenant.

use std::collections::BTreeMap;
use std::time::Duration;

use super::mix::Mix;
use crate::judge::{Missed, Outcome};
use crate::lab::engine::Gauges;
use crate::units::{TenantId, Tick, Tokens};

/// The requests of one flow, or of one tenant in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// They kept their promise.
    pub met: u64,
    /// They did not, by reason.
    pub missed: BTreeMap<&'static str, u64>,
    /// They are not judged.
    pub excluded: u64,
    /// Output tokens of those that were met.
    pub tokens: u64,
    /// Of all of them, those that were sent to an engine.
    pub dispatched: u64,
}

impl Score {
    pub(super) fn note(&mut self, outcome: Outcome, tokens: Tokens, dispatched: bool) {
        self.dispatched += u64::from(dispatched);
        match outcome {
            Outcome::Met => {
                self.met += 1;
                self.tokens += tokens.0;
            }
            Outcome::Missed(reason) => *self.missed.entry(Missed::as_str(reason)).or_default() += 1,
            Outcome::Excluded(_) => self.excluded += 1,
        }
    }

    /// Requests that were judged.
    #[must_use]
    pub fn judged(&self) -> u64 {
        self.met + self.missed.values().sum::<u64>()
    }

    /// The share of the judged requests that kept their promise; 1 where none was judged.
    #[must_use]
    pub fn attainment(&self) -> f64 {
        if self.judged() == 0 { 1.0 } else { self.met as f64 / self.judged() as f64 }
    }
}

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Names of the flows, in the order of the mix.
    pub flows: Vec<String>,
    /// Scores by flow and tenant.
    pub tenants: BTreeMap<(usize, TenantId), Score>,
    /// The time over which arrivals are counted.
    pub measured: Duration,
    /// Answers that were complete within that time, whenever they were asked for.
    pub finished: u64,
    /// Answers that a level made shorter than they would have been.
    pub shortened: u64,
    /// The time from dispatch to the first token as it was predicted, over what it was: of every
    /// stream that was counted.
    pub predictions: Vec<f64>,
    /// What the engines did, all together and all the time.
    pub engines: Engines,
    /// How it stood, second by second.
    pub looks: Vec<Look>,
    /// Every request, whether it was counted or not, in the order in which they ended.
    pub told: Vec<Told>,
}

/// What is told of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Told {
    /// When it arrived.
    pub arrived: Tick,
    /// Whose it was: an index into [`Mix::flows`].
    pub flow: usize,
    /// How it ended.
    pub outcome: Outcome,
    /// From its arrival until an engine was given it.
    pub waited: Option<Duration>,
    /// The time to its first token.
    pub ttft: Option<Duration>,
    /// The time of each further one.
    pub tpot: Option<Duration>,
    /// The time to its end.
    pub e2e: Option<Duration>,
}

/// What engines did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Engines {
    /// Prompt tokens that were looked up in prefix caches.
    pub queries: u64,
    /// Those that were found there.
    pub hits: u64,
    /// Requests that had to give up their place in a batch.
    pub preemptions: u64,
}

impl Engines {
    pub(super) fn add(&mut self, gauges: &Gauges) {
        self.queries += gauges.prefix_queries;
        self.hits += gauges.prefix_hits;
        self.preemptions += gauges.preemptions;
    }

    /// The share of prompt tokens that needed no prefill.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.queries.max(1) as f64
    }
}

/// How it stood at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// When.
    pub at: Tick,
    /// Seats that the gateway had to give, if it had a number of them.
    pub seats: Option<usize>,
    /// Requests that waited in it.
    pub queued: usize,
    /// Requests in each engine's batch, and in its queue.
    pub engines: Vec<(usize, usize)>,
}

impl Report {
    pub(super) fn new(mix: &Mix, measured: Duration) -> Report {
        let flows = mix.flows.iter().map(|flow| flow.flow.clone()).collect();
        Report { flows, measured, ..Report::default() }
    }

    /// The score of a flow over its tenants.
    #[must_use]
    pub fn flow(&self, name: &str) -> Score {
        self.sum(|flow, _| self.flows[flow] == name)
    }

    /// The attainment that each tenant loses in another run, in points, by flow, where both runs
    /// have 50 requests of it: fewer say nothing.
    #[must_use]
    pub fn losses(&self, other: &Report) -> BTreeMap<(&str, TenantId), f64> {
        let both = self.tenants.iter().filter_map(|(key, own)| Some((key, own, other.tenants.get(key)?)));
        let told = both.filter(|(_, own, theirs)| own.judged() >= 50 && theirs.judged() >= 50);
        told.map(|((flow, tenant), own, theirs)| {
            let points = 100.0 * (own.attainment() - theirs.attainment());
            ((self.flows[*flow].as_str(), tenant.clone()), points)
        })
        .collect()
    }

    /// Requests per second that kept their promise, over all flows.
    #[must_use]
    pub fn goodput(&self) -> f64 {
        self.per_second(&self.all())
    }

    /// Requests per second that kept their promise.
    #[must_use]
    pub fn per_second(&self, score: &Score) -> f64 {
        score.met as f64 / self.measured.as_secs_f64()
    }

    /// How far predictions of the time to the first token were off: the median of |ratio - 1|.
    #[must_use]
    pub fn prediction_error(&self) -> Option<f64> {
        let mut errors: Vec<f64> = self.predictions.iter().map(|ratio| (ratio - 1.0).abs()).collect();
        errors.sort_by(f64::total_cmp);
        errors.get(errors.len() / 2).copied()
    }

    /// All requests.
    #[must_use]
    pub fn all(&self) -> Score {
        self.sum(|_, _| true)
    }

    fn sum(&self, counts: impl Fn(usize, &TenantId) -> bool) -> Score {
        let mut sum = Score::default();
        for ((flow, tenant), score) in &self.tenants {
            if counts(*flow, tenant) {
                sum.met += score.met;
                sum.excluded += score.excluded;
                sum.tokens += score.tokens;
                sum.dispatched += score.dispatched;
                score.missed.iter().for_each(|(reason, count)| *sum.missed.entry(reason).or_default() += count);
            }
        }
        sum
    }
}

//! Results of a run: every request judged by the gateway's rules, counted by flow and tenant.

use std::collections::BTreeMap;
use std::time::Duration;

use super::mix::Mix;
use crate::judge::{Missed, Outcome};
use crate::sim::engine::Gauges;
use crate::types::{TenantId, Tick, Tokens};

/// Counts of a flow, or of a tenant in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowScore {
    /// Met requests.
    pub met: u64,
    /// Missed requests by reason.
    pub missed: BTreeMap<&'static str, u64>,
    /// Excluded requests.
    pub excluded: u64,
    /// Output tokens of met requests.
    pub tokens: u64,
    /// Requests sent to an engine.
    pub dispatched: u64,
}

impl FlowScore {
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

    /// Number of judged requests.
    #[must_use]
    pub fn judged(&self) -> u64 {
        self.met + self.missed.values().sum::<u64>()
    }

    /// Share of met requests; 1 if none was judged.
    #[must_use]
    pub fn attainment(&self) -> f64 {
        if self.judged() == 0 { 1.0 } else { self.met as f64 / self.judged() as f64 }
    }
}

/// Result of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunReport {
    /// Names of the flows, in the order of the mix.
    pub flows: Vec<String>,
    /// Scores by flow and tenant.
    pub tenants: BTreeMap<(usize, TenantId), FlowScore>,
    /// Length of the measured interval.
    pub measured: Duration,
    /// Responses completed within it, whenever requested.
    pub finished: u64,
    /// Responses shortened by a level.
    pub shortened: u64,
    /// Predicted over measured TTFT from dispatch, of every counted
    /// stream.
    pub predictions: Vec<f64>,
    /// Totals of the engines.
    pub engines: EngineTotals,
    /// Samples, one per second.
    pub looks: Vec<StateSample>,
    /// Every request, counted or not, in order of its end.
    pub told: Vec<RequestReport>,
}

/// Record of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestReport {
    /// Its arrival.
    pub arrived: Tick,
    /// Index into [`Mix::flows`].
    pub flow: usize,
    /// Line of the trace that it comes from; 0 without one.
    pub line: u64,
    /// The last engine that got it.
    pub engine: Option<usize>,
    /// Whether that engine's pool is not the first one of its route.
    pub went_on: bool,
    /// Prompt tokens.
    pub input: u64,
    /// Output tokens of a whole answer; 0 of others.
    pub output: u64,
    /// Its outcome.
    pub outcome: Outcome,
    /// From arrival to dispatch.
    pub waited: Option<Duration>,
    /// TTFT.
    pub ttft: Option<Duration>,
    /// TPOT.
    pub tpot: Option<Duration>,
    /// The time to its end.
    pub e2e: Option<Duration>,
    /// Its end, whatever it was.
    pub ended: Tick,
}

/// Totals of the engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineTotals {
    /// Prompt tokens looked up in prefix caches.
    pub queries: u64,
    /// Prompt tokens found there.
    pub hits: u64,
    /// Requests that had to give up their place in a batch.
    pub preemptions: u64,
}

impl EngineTotals {
    pub(super) fn of(gauges: &Gauges) -> Self {
        EngineTotals { queries: gauges.prefix_queries, hits: gauges.prefix_hits, preemptions: gauges.preemptions }
    }

    /// Adds those of other engines.
    pub fn add(&mut self, other: &EngineTotals) {
        self.queries += other.queries;
        self.hits += other.hits;
        self.preemptions += other.preemptions;
    }

    /// Cache hit rate in prompt tokens.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.queries.max(1) as f64
    }
}

/// The state at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSample {
    /// The moment.
    pub at: Tick,
    /// The gateway's seats, if limited.
    pub seats: Option<usize>,
    /// Requests waiting in the gateway.
    pub queued: usize,
    /// Running and waiting requests per engine.
    pub engines: Vec<(usize, usize)>,
}

impl RunReport {
    pub(super) fn new(mix: &Mix, measured: Duration) -> RunReport {
        let flows = mix.flows.iter().map(|flow| flow.flow.clone()).collect();
        RunReport { flows, measured, ..RunReport::default() }
    }

    /// Counts of a flow over its tenants.
    #[must_use]
    pub fn flow(&self, name: &str) -> FlowScore {
        self.sum(|flow, _| self.flows[flow] == name)
    }

    /// Attainment that each tenant loses in another run, in points, by flow, if both runs have at least 50 of its
    /// requests.
    #[must_use]
    pub fn losses(&self, other: &RunReport) -> BTreeMap<(&str, TenantId), f64> {
        let both = self.tenants.iter().filter_map(|(key, own)| Some((key, own, other.tenants.get(key)?)));
        let told = both.filter(|(_, own, theirs)| own.judged() >= 50 && theirs.judged() >= 50);
        told.map(|((flow, tenant), own, theirs)| {
            let points = 100.0 * (own.attainment() - theirs.attainment());
            ((self.flows[*flow].as_str(), tenant.clone()), points)
        })
        .collect()
    }

    /// Met requests per second over all flows.
    #[must_use]
    pub fn goodput(&self) -> f64 {
        self.per_second(&self.all())
    }

    /// Met requests per second.
    #[must_use]
    pub fn per_second(&self, score: &FlowScore) -> f64 {
        score.met as f64 / self.measured.as_secs_f64()
    }

    /// Error of TTFT predictions: the median of |ratio - 1|.
    #[must_use]
    pub fn prediction_error(&self) -> Option<f64> {
        let mut errors: Vec<f64> = self.predictions.iter().map(|ratio| (ratio - 1.0).abs()).collect();
        errors.sort_by(f64::total_cmp);
        errors.get(errors.len() / 2).copied()
    }

    /// Counts of all requests.
    #[must_use]
    pub fn all(&self) -> FlowScore {
        self.sum(|_, _| true)
    }

    fn sum(&self, counts: impl Fn(usize, &TenantId) -> bool) -> FlowScore {
        let mut sum = FlowScore::default();
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

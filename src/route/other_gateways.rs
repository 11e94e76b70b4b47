//! Requests of the other gateways at an engine, by their reports.
//!
//! An engine's own metrics are seconds old and do not separate the gateways. Gateways that exchange reports
//! have both, and count the others' sequences and prompts in everything that depends on the load of an engine.

use std::time::Duration;

use super::latency::{DecodeSteps, LoadSnapshot};
use crate::types::{EngineId, Tick, Tokens};

/// Requests of one gateway at one engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineShare {
    /// The engine.
    pub engine: EngineId,
    /// Its requests there.
    pub requests: u32,
    /// Of these, requests with a first token.
    pub decoding: u32,
    /// Estimated prompt tokens still to be computed.
    pub prefill: f64,
    /// Estimated prompt tokens computed since its start.
    pub prompts: f64,
    /// Prompts that the engine computed since the last report.
    pub computed: Vec<ComputedPrompt>,
    /// Responses that ended since the last report.
    pub answers: Vec<SeenAnswer>,
}

/// A response as a sample of its engine's latency.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeenAnswer {
    /// The load at dispatch.
    pub snapshot: LoadSnapshot,
    /// The time to its first token.
    pub ttft: Option<Duration>,
    /// The steps after the first token, and the time of each.
    pub further: Option<(DecodeSteps, Duration)>,
}

/// Most responses in a report.
const MOST_ANSWERS: usize = 64;

/// A prompt that an engine has computed, and should now hold in its prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputedPrompt {
    /// Hashes of its blocks.
    pub blocks: Box<[u64]>,
    /// Tokens beyond the blocks.
    pub rest: Tokens,
}

/// Most blocks in a report.
const MOST_BLOCKS: usize = 1024;

/// Computed prompts and responses for the next report.
#[derive(Debug, Default)]
pub(super) struct Untold {
    prompts: Vec<ComputedPrompt>,
    blocks: usize,
    answers: Vec<SeenAnswer>,
}

impl Untold {
    /// Keeps a response, if there is room.
    pub fn note_answer(&mut self, answer: SeenAnswer) {
        if self.answers.len() < MOST_ANSWERS {
            self.answers.push(answer);
        }
    }

    /// Keeps a prompt, if there is room.
    pub fn note(&mut self, blocks: &[u64], rest: Tokens) {
        if self.blocks + blocks.len() <= MOST_BLOCKS {
            self.blocks += blocks.len();
            self.prompts.push(ComputedPrompt { blocks: blocks.into(), rest });
        }
    }

    /// The prompts and responses since the last call.
    pub fn take(&mut self) -> (Vec<ComputedPrompt>, Vec<SeenAnswer>) {
        self.blocks = 0;
        (std::mem::take(&mut self.prompts), std::mem::take(&mut self.answers))
    }
}

/// The other gateways' requests at one engine.
#[derive(Clone, Debug, Default)]
pub(super) struct OtherRequests {
    gateways: Vec<OtherShare>,
    /// Sums over the gateways with a current report.
    pub requests: f64,
    pub decoding: f64,
    pub prefill: f64,
}

#[derive(Clone, Copy, Debug)]
struct OtherShare {
    gateway: u64,
    until: Tick,
    requests: f64,
    decoding: f64,
    prefill: f64,
    prompts: f64,
}

/// Most gateways whose reports are kept.
const MOST_GATEWAYS: usize = 64;

impl OtherRequests {
    /// Whether another gateway has a current report.
    pub fn is_known(&self) -> bool {
        !self.gateways.is_empty()
    }

    /// Their requests by current reports. `None` without any.
    pub fn requests_at(&self, at: Tick) -> Option<f64> {
        self.gateways.iter().filter(|known| known.until > at).map(|known| known.requests).reduce(|a, b| a + b)
    }

    /// Number of gateways with a current report.
    pub fn count(&self) -> usize {
        self.gateways.len()
    }

    /// Applies a report; returns the prompt tokens that the engine computed for that gateway since its previous one.
    pub fn heard(&mut self, gateway: u64, share: &EngineShare, until: Tick) -> f64 {
        let counted = |number: f64| if number.is_finite() { number.clamp(0.0, MOST_TOKENS) } else { 0.0 };
        let now = OtherShare {
            gateway,
            until,
            requests: f64::from(share.requests),
            decoding: f64::from(share.decoding.min(share.requests)),
            prefill: counted(share.prefill),
            prompts: share.prompts,
        };
        let has_room = self.gateways.len() < MOST_GATEWAYS;
        let known = self.gateways.iter_mut().find(|known| known.gateway == gateway);
        let computed = match known {
            Some(known) => now.prompts - std::mem::replace(known, now).prompts,
            None if has_room => {
                self.gateways.push(now);
                0.0
            }
            None => 0.0,
        };
        self.sum();
        counted(computed)
    }

    /// Forgets reports whose time is over. True if there were any.
    pub fn expire(&mut self, at: Tick) -> bool {
        let before = self.gateways.len();
        self.gateways.retain(|known| known.until > at);
        let has_changed = self.gateways.len() != before;
        if has_changed {
            self.sum();
        }
        has_changed
    }

    fn sum(&mut self) {
        let sum = |of: fn(&OtherShare) -> f64| self.gateways.iter().map(of).sum();
        (self.requests, self.decoding, self.prefill) =
            (sum(|known| known.requests), sum(|known| known.decoding), sum(|known| known.prefill));
    }
}

/// Largest counted number of tokens.
const MOST_TOKENS: f64 = 1e12;

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::sync::Arc;

    use super::*;
    use crate::route::settings::{Concurrency, EngineAddress, EngineSource, PoolSettings, Scheme};
    use crate::route::{EngineMetrics, Fleet, WorkEstimate};
    use crate::types::PoolId;

    fn ms(millis: u64) -> Tick {
        Tick::from_millis(millis)
    }

    fn pool() -> PoolId {
        PoolId::from("main")
    }

    /// One of two gateways before two engines.
    fn fleet(concurrency: Concurrency) -> Fleet {
        let address = |host: &str| EngineAddress {
            scheme: Scheme::Http,
            host: host.into(),
            port: 8000,
            base: "".into(),
            name: None,
        };
        let engines = EngineSource::Static(["a", "b"].map(address).to_vec());
        let settings = PoolSettings { concurrency, ..PoolSettings::with_defaults(pool(), engines) };
        let fleet = Fleet::new(7);
        fleet.share_among(NonZeroU32::new(2).unwrap());
        fleet.apply_settings(&[Arc::new(settings)], ms(0));
        fleet
    }

    fn share(engine: &str, requests: u32, prefill: f64, prompts: f64) -> EngineShare {
        EngineShare {
            engine: EngineId::from(engine),
            requests,
            decoding: requests,
            prefill,
            prompts,
            computed: Vec::new(),
            answers: Vec::new(),
        }
    }

    #[test]
    fn seats_that_others_leave_are_lent_whole_and_divided_again_when_nobody_is_heard() {
        let fleet = fleet(Concurrency::Fixed(NonZeroU32::new(10).unwrap()));
        assert_eq!(fleet.seats(&pool(), ms(0)), Some(10), "half of twenty");
        fleet.heard(&pool(), 2, &[share("a:8000", 3, 0.0, 0.0), share("b:8000", 0, 0.0, 0.0)], ms(150), ms(0));
        assert_eq!(fleet.seats(&pool(), ms(1)), Some(17));
        fleet.heard(&pool(), 2, &[share("a:8000", 10, 0.0, 0.0), share("b:8000", 10, 0.0, 0.0)], ms(150), ms(0));
        assert_eq!(fleet.seats(&pool(), ms(1)), Some(2), "one at each engine in any case");
        let _pace = fleet.update_pace(&pool(), ms(150));
        assert_eq!(fleet.seats(&pool(), ms(150)), Some(10));
    }

    #[test]
    fn a_prompt_goes_where_the_others_have_the_least_ahead() {
        let fleet = fleet(Concurrency::Auto);
        let pick = |at: Tick| {
            let mut attempts = crate::route::retry::Attempts::new(
                &PoolSettings::with_defaults(pool(), EngineSource::Static(Vec::new())),
                ms(60_000),
            );
            let size = WorkEstimate { prefill: Tokens(100), decode: Tokens(10) };
            fleet.choose(&pool(), &mut attempts, size, at).expect("both are up").engine
        };
        for (busy, free) in [("a:8000", "b:8000"), ("b:8000", "a:8000")] {
            let shares = [share(busy, 5, 4000.0, 0.0), share(free, 5, 0.0, 0.0)];
            fleet.heard(&pool(), 2, &shares, ms(150), ms(0));
            assert_eq!(pick(ms(1)), EngineId::from(free));
        }
    }

    #[test]
    fn what_an_engine_reports_beyond_the_gateways_heard_of_counts_as_well() {
        let fleet = fleet(Concurrency::Fixed(NonZeroU32::new(10).unwrap()));
        let report = EngineMetrics { running: Some(6.0), waiting: Some(0.0), ..EngineMetrics::default() };
        fleet.heard(&pool(), 2, &[share("a:8000", 4, 0.0, 0.0), share("b:8000", 0, 0.0, 0.0)], ms(9_000), ms(0));
        fleet.reported(&pool(), &EngineId::from("a:8000"), report, ms(1));
        let _pace = fleet.update_pace(&pool(), ms(2));
        assert_eq!(fleet.seats(&pool(), ms(2)), Some(4 + 10), "four of those heard of, and two of others");
    }

    #[test]
    fn prompts_are_counted_from_one_report_to_the_next() {
        let mut others = OtherRequests::default();
        assert_eq!(others.heard(2, &share("a", 1, 50.0, 1_000.0), ms(150)), 0.0, "the time before is unknown");
        assert_eq!(others.heard(2, &share("a", 2, 60.0, 1_300.0), ms(200)), 300.0);
        assert_eq!(others.heard(3, &share("a", 5, 7.0, 0.0), ms(160)), 0.0);
        assert_eq!((others.requests, others.prefill), (7.0, 67.0));
        assert_eq!(others.heard(2, &share("a", 1, f64::NAN, 0.0), ms(250)), 0.0, "it began anew");
        assert!(others.expire(ms(160)) && !others.expire(ms(160)));
        assert_eq!((others.requests, others.prefill, others.is_known()), (1.0, 0.0, true));
        assert!(others.expire(ms(250)) && !others.is_known());
    }
}

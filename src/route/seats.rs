//! `max_concurrency_per_engine: auto`: how many requests an engine may work on at one time, and how
//! fast prompts may come, so that the classes keep their time per output token.
//!
//! Pure. Two parts:
//!
//! - [`Paces`]: the mean step that the classes can bear. It begins at [`SHARE_AT_FIRST`] of each threshold
//!   and follows the outcomes of the answers that the threshold holds for, by stochastic approximation
//!   of a quantile (Robbins and Monro, *Ann. Math. Stat.* 22, 1951): an answer that broke the threshold
//!   lowers the pace a little, one that kept it raises it by much less, so that it comes to rest where
//!   [`LOST`] of the misses that the attainment allows are lost to the pace. Outcomes only correct:
//!   the pace stays within [`LEAST`] and 1 of its threshold.
//! - [`seats`] and [`prefill_share`]: what follows from a pace and the learned
//!   [length of a step](super::StepTime). A step with `n` sequences and `p` prompt tokens takes
//!   `base + per_sequence n + per_prompt_token p`. Without prefill it must stay below the pace, which
//!   bounds `n`; what is left of the pace is the share of its time that the engine may spend on
//!   prefill.
//!
//! An engine that cannot keep the pace with a single sequence is held to [`ATTAINABLE`] times what it
//! can do, because fewer requests would not make it faster and an idle engine helps nobody.
//!
//! An engine that reports a full key-value cache preempts requests. [`CacheLimit`] bounds the seats to
//! what its cache held then, and tries more as the cache empties.

use std::collections::VecDeque;
use std::time::Duration;

use super::latency::StepTime;
use crate::units::Tick;

/// The share of answers whose length a promise of time to the end is kept for by the pace.
pub const MOST_ANSWERS: f64 = 0.8;
/// The part of the time to the end that is left for output.
const DECODE_OF_WHOLE: f64 = 0.9;

/// Never fewer seats.
pub const FLOOR: u32 = 1;
/// Never more.
pub const CEILING: u32 = 1024;

/// Seats before anything was learned: more than most engines have running while they keep their
/// promises, and few enough that what comes in the first seconds of an overload does not keep an engine
/// slow for minutes.
pub const AT_FIRST: u32 = 64;

/// A pace begins at this share of its threshold.
const SHARE_AT_FIRST: f64 = 0.9;
/// And never falls below this one.
const LEAST: f64 = 0.6;
/// Share of the allowed misses that the pace may cost. The rest is left to first tokens and to chance:
/// half or more lost answers to both, in every load of two mixes that were tried.
const LOST: f64 = 0.4;
/// How much one answer moves the pace, in the logarithm.
const GAIN: f64 = 0.04;
/// A threshold that no answer was held to for so long limits nobody.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// Seats are those whose steps without prefill take this share of the pace.
const DECODE_SHARE: f64 = 0.9;
/// An engine is not asked for less than this times its step with a single sequence.
const ATTAINABLE: f64 = 1.25;
/// Prefill always gets this share of an engine's time.
const LEAST_PREFILL: f64 = 0.05;

/// What the classes that a pool serves are promised, as far as seats can keep it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Promised {
    /// The shortest threshold of the time to the first token.
    pub ttft: Option<Duration>,
    /// The shortest threshold of the time per output token.
    pub tpot: Option<Duration>,
    /// A class promises time to the end of its answers: each its own.
    pub e2e: bool,
    /// The largest share of answers that must keep one of them.
    pub attainment: f64,
}

impl Default for Promised {
    /// No thresholds, and 95 % of answers.
    fn default() -> Self {
        Promised { ttft: None, tpot: None, e2e: false, attainment: 0.95 }
    }
}

/// The mean steps that the thresholds of a pool's classes can bear.
#[derive(Clone, Debug, Default)]
pub struct Paces(Vec<Pace>);

/// The mean step that one threshold can bear.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// The threshold: of the time per output token, or of the time to the end.
    of: (Duration, bool),
    /// What an answer may take per token, in seconds.
    limit: f64,
    /// The share of it that the mean step may take.
    share: f64,
    seen: Tick,
}

/// Thresholds that are kept apart.
const THRESHOLDS: usize = 16;

impl Paces {
    /// An answer ended that this threshold of time per output token holds for. `kept`: whether it did;
    /// `attainment`: the share of answers that must; `weight`: how much the answer says, at most 1.
    pub fn note(&mut self, threshold: Duration, kept: bool, attainment: f64, weight: f64, at: Tick) {
        self.note_of((threshold, false), threshold.as_secs_f64(), kept, attainment, weight, at);
    }

    /// The same for a threshold of time to the end, where [`MOST_ANSWERS`] of the answers have at most
    /// `length` further tokens. Longer ones may miss for their length: to keep the whole batch slow enough
    /// for all would cost more promises than it keeps.
    pub fn note_whole(&mut self, threshold: Duration, length: u64, kept: bool, attainment: f64, at: Tick) {
        let limit = DECODE_OF_WHOLE * threshold.as_secs_f64() / length.max(1) as f64;
        self.note_of((threshold, true), limit, kept, attainment, 1.0, at);
    }

    fn note_of(&mut self, of: (Duration, bool), limit: f64, kept: bool, attainment: f64, weight: f64, at: Tick) {
        let place = self.0.iter().position(|pace| pace.of == of).unwrap_or_else(|| {
            if self.0.len() == THRESHOLDS {
                self.0.remove(0);
            }
            self.0.push(Pace { of, limit, share: SHARE_AT_FIRST, seen: at });
            self.0.len() - 1
        });
        let pace = &mut self.0[place];
        pace.limit = limit;
        let allowed = LOST * (1.0 - attainment.clamp(0.5, 0.999));
        let lost = if kept { 0.0 } else { 1.0 };
        pace.share = (pace.share * (GAIN * weight * (allowed - lost)).exp()).clamp(LEAST, 1.0);
        pace.seen = at;
    }

    /// The mean step that all thresholds can bear which were asked for lately, in seconds.
    #[must_use]
    pub fn least(&self, at: Tick) -> Option<f64> {
        let lately = self.0.iter().filter(|pace| at.since(pace.seen) < FORGOTTEN);
        lately.map(|pace| pace.limit * pace.share).reduce(f64::min)
    }
}

impl Promised {
    /// The mean step to begin with, before any answer of a class with a threshold has ended.
    #[must_use]
    pub fn pace_at_first(&self) -> Option<f64> {
        self.tpot.map(|tpot| tpot.as_secs_f64() * SHARE_AT_FIRST)
    }
}

/// The pace that an engine can be held to.
fn attainable(step: &StepTime, pace: f64) -> f64 {
    pace.max(ATTAINABLE * step.decode(1.0))
}

/// Sequences whose steps stay within the pace, with some room for prefill.
#[must_use]
pub fn seats(step: &StepTime, pace: f64) -> u32 {
    let room = DECODE_SHARE * attainable(step, pace) - step.base;
    let seats = room / step.per_sequence.max(1e-9);
    seats.clamp(f64::from(FLOOR), f64::from(CEILING)) as u32
}

/// The share of its time that an engine with so many running sequences may spend on prefill.
#[must_use]
pub fn prefill_share(step: &StepTime, pace: f64, batch: f64) -> f64 {
    (1.0 - step.decode(batch) / attainable(step, pace)).clamp(LEAST_PREFILL, 1.0)
}

/// Seats that an engine's key-value cache was seen to hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheLimit(Option<f64>);

/// Usage of the cache from which running requests are about to be preempted.
const CACHE_FULL: f64 = 0.95;
/// Usage that the seats are set to.
const CACHE_AIM: f64 = 0.9;
/// How much more is tried with each report that shows room.
const CACHE_GROWTH: f64 = 1.05;

impl CacheLimit {
    /// The engine reported this usage while it ran so many requests, with or without others in its own
    /// queue.
    pub fn reported(&mut self, usage: f64, running: f64, waiting: f64) {
        if usage >= CACHE_FULL && waiting > 0.0 && running >= 1.0 {
            self.0 = Some((running * CACHE_AIM / usage).max(f64::from(FLOOR)));
        } else if usage < CACHE_AIM {
            self.0 = self.0.map(|seats| seats * CACHE_GROWTH).filter(|seats| *seats < f64::from(CEILING));
        }
    }

    /// The seats; none where the cache does not limit them.
    #[must_use]
    pub fn seats(self) -> Option<u32> {
        self.0.map(|seats| seats as u32)
    }
}

/// How long the answers are whose class promises time to the end: of each threshold the last 256.
#[derive(Clone, Debug, Default)]
pub struct Lengths(Vec<(Duration, VecDeque<u64>)>);

/// So many answers tell how long answers are.
const LENGTHS: usize = 256;
/// With fewer nothing is told.
const ENOUGH_LENGTHS: usize = 20;

impl Lengths {
    /// One more answer.
    pub fn note(&mut self, limit: Duration, further: u64) {
        let place = self.0.iter().position(|(of, _)| *of == limit).unwrap_or_else(|| {
            if self.0.len() == THRESHOLDS {
                self.0.remove(0);
            }
            self.0.push((limit, VecDeque::with_capacity(LENGTHS)));
            self.0.len() - 1
        });
        let seen = &mut self.0[place].1;
        if seen.len() == LENGTHS {
            seen.pop_front();
        }
        seen.push_back(further);
    }

    /// The length that this share of answers stays within; none while too few were seen.
    #[must_use]
    pub fn of(&self, limit: Duration, share: f64) -> Option<u64> {
        let (_, seen) = self.0.iter().find(|(of, seen)| *of == limit && seen.len() >= ENOUGH_LENGTHS)?;
        let mut lengths: Vec<u64> = seen.iter().copied().collect();
        let place = ((share.clamp(0.5, 1.0) * lengths.len() as f64).ceil() as usize).clamp(1, lengths.len()) - 1;
        Some(*lengths.select_nth_unstable(place).1)
    }
}

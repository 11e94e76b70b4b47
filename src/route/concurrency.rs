//! Adaptive concurrency (`max_concurrency_per_engine: auto`): how many concurrent requests an engine gets,
//! and the prefill pace, so that classes keep their TPOT.
//!
//! Pure. Two parts:
//!
//! - [`StepBudgets`]: the mean step time that the classes tolerate. It starts at [`SHARE_AT_FIRST`] of each
//!   threshold and follows the outcomes of responses under that threshold by stochastic approximation of a
//!   quantile (Robbins and Monro, *Ann. Math. Stat.* 22, 1951): a response that broke the threshold lowers
//!   the pace, one that kept it raises it by much less, so that it settles where [`LOST`] of the allowed
//!   misses are due to the pace. Outcomes only correct: the pace stays between [`LEAST`] and 1 of its
//!   threshold.
//! - [`seats`] and [`prefill_share`] follow from a pace and the learned [step time](super::StepTime). A step
//!   with `n` sequences and `p` prompt tokens takes `base + per_sequence n + per_prompt_token p`. Without
//!   prefill it must stay below the pace, which bounds `n`; the rest of the pace is the share of time for
//!   prefill.
//!
//! An engine that cannot keep the pace with a single sequence is held to [`ATTAINABLE`] times what it can
//! do, because fewer requests would not make it faster.
//!
//! An engine with a full KV cache preempts requests. [`KvCacheLimit`] bounds the seats to what its cache held
//! then, and grows again as the cache empties.

use std::collections::VecDeque;
use std::time::Duration;

use super::latency::StepTime;
use crate::types::Tick;

/// Share of responses, by length, whose E2E objective the pace should keep.
pub const MOST_ANSWERS: f64 = 0.8;
/// Share of the E2E threshold that is available for output.
const DECODE_OF_WHOLE: f64 = 0.9;

/// Fewest seats.
pub const FLOOR: u32 = 1;
/// Most seats.
pub const CEILING: u32 = 1024;

/// Seats before anything was learned: more than most engines run within their objectives, and few enough that
/// the first seconds of an overload do not slow an engine for
/// minutes.
pub const AT_FIRST: u32 = 64;

/// Initial pace relative to its threshold.
const SHARE_AT_FIRST: f64 = 0.9;
/// Lowest pace relative to its threshold.
const LEAST: f64 = 0.6;
/// Share of the allowed misses that the pace may cause. The rest is left to first tokens and to chance; 0.5
/// or more lost responses to both at every load of two mixes.
const LOST: f64 = 0.4;
/// Step of the pace per response, in the logarithm.
const GAIN: f64 = 0.04;
/// Time after which an unused threshold no longer counts.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// Share of the pace for steps without prefill.
const DECODE_SHARE: f64 = 0.9;
/// An engine's pace is at least this times its step with a single sequence.
const ATTAINABLE: f64 = 1.25;
/// Smallest share of an engine's time for prefill.
const LEAST_PREFILL: f64 = 0.05;

/// Objectives of the classes that a pool serves, as far as seats can keep them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolTargets {
    /// The shortest TTFT threshold.
    pub ttft: Option<Duration>,
    /// The shortest TPOT threshold.
    pub tpot: Option<Duration>,
    /// Whether a class has an E2E objective.
    pub e2e: bool,
    /// The highest attainment among these objectives.
    pub attainment: f64,
}

impl Default for PoolTargets {
    /// No thresholds, and 95 %.
    fn default() -> Self {
        PoolTargets { ttft: None, tpot: None, e2e: false, attainment: 0.95 }
    }
}

/// Tolerated mean step times of a pool's thresholds.
#[derive(Clone, Debug, Default)]
pub struct StepBudgets(Vec<StepBudget>);

/// Tolerated mean step time of one threshold.
#[derive(Clone, Copy, Debug)]
struct StepBudget {
    /// The threshold, and whether it is E2E rather than TPOT.
    of: (Duration, bool),
    /// Limit per token, seconds.
    limit: f64,
    /// Share of it for the mean step.
    share: f64,
    seen: Tick,
}

/// Most thresholds tracked.
const THRESHOLDS: usize = 16;

impl StepBudgets {
    /// Records the end of a response under this TPOT threshold. `kept`: whether it kept it; `attainment`: the
    /// objective's; `weight`: weight of the response, at most 1.
    pub fn note(&mut self, threshold: Duration, kept: bool, attainment: f64, weight: f64, at: Tick) {
        self.note_of((threshold, false), threshold.as_secs_f64(), kept, attainment, weight, at);
    }

    /// The same for an E2E threshold, if [`MOST_ANSWERS`] of the responses have at most `length` tokens after the
    /// first. Longer ones may miss because of their length: slowing admission for all of them would lose more
    /// promises than it keeps.
    pub fn note_whole(&mut self, threshold: Duration, length: u64, kept: bool, attainment: f64, at: Tick) {
        let limit = DECODE_OF_WHOLE * threshold.as_secs_f64() / length.max(1) as f64;
        self.note_of((threshold, true), limit, kept, attainment, 1.0, at);
    }

    fn note_of(&mut self, of: (Duration, bool), limit: f64, kept: bool, attainment: f64, weight: f64, at: Tick) {
        let place = self.0.iter().position(|pace| pace.of == of).unwrap_or_else(|| {
            if self.0.len() == THRESHOLDS {
                self.0.remove(0);
            }
            self.0.push(StepBudget { of, limit, share: SHARE_AT_FIRST, seen: at });
            self.0.len() - 1
        });
        let pace = &mut self.0[place];
        pace.limit = limit;
        let allowed = LOST * (1.0 - attainment.clamp(0.5, 0.999));
        let lost = if kept { 0.0 } else { 1.0 };
        pace.share = (pace.share * (GAIN * weight * (allowed - lost)).exp()).clamp(LEAST, 1.0);
        pace.seen = at;
    }

    /// The mean step time tolerated by all recently used thresholds, seconds.
    #[must_use]
    pub fn least(&self, at: Tick) -> Option<f64> {
        let lately = self.0.iter().filter(|pace| at.since(pace.seen) < FORGOTTEN);
        lately.map(|pace| pace.limit * pace.share).reduce(f64::min)
    }
}

impl PoolTargets {
    /// The initial one, before any response under a threshold has ended.
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

/// Share of time for prefill on an engine with this many running sequences.
#[must_use]
pub fn prefill_share(step: &StepTime, pace: f64, batch: f64) -> f64 {
    (1.0 - step.decode(batch) / attainable(step, pace)).clamp(LEAST_PREFILL, 1.0)
}

/// Seats that an engine's KV cache was seen to hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvCacheLimit(Option<f64>);

/// Cache usage at which running requests are about to be preempted.
const CACHE_FULL: f64 = 0.95;
/// Target cache usage.
const CACHE_AIM: f64 = 0.9;
/// Growth per report with free cache.
const CACHE_GROWTH: f64 = 1.05;

impl KvCacheLimit {
    /// Applies a report of cache usage with this many running requests, with or without waiting
    /// ones.
    pub fn reported(&mut self, usage: f64, running: f64, waiting: f64) {
        if usage >= CACHE_FULL && waiting > 0.0 && running >= 1.0 {
            self.0 = Some((running * CACHE_AIM / usage).max(f64::from(FLOOR)));
        } else if usage < CACHE_AIM {
            self.0 = self.0.map(|seats| seats * CACHE_GROWTH).filter(|seats| *seats < f64::from(CEILING));
        }
    }

    /// The seats; `None` if the cache does not limit them.
    #[must_use]
    pub fn seats(self) -> Option<u32> {
        self.0.map(|seats| seats as u32)
    }
}

/// Output lengths under E2E objectives: the last 256 per threshold.
#[derive(Clone, Debug, Default)]
pub struct OutputLengths(Vec<(Duration, VecDeque<u64>)>);

/// Lengths kept per threshold.
const LENGTHS: usize = 256;
/// Fewest lengths for a quantile.
const ENOUGH_LENGTHS: usize = 20;

impl OutputLengths {
    /// Records a length.
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

    /// The length that this share of responses stays within; `None` with too few.
    #[must_use]
    pub fn of(&self, limit: Duration, share: f64) -> Option<u64> {
        let (_, seen) = self.0.iter().find(|(of, seen)| *of == limit && seen.len() >= ENOUGH_LENGTHS)?;
        let mut lengths: Vec<u64> = seen.iter().copied().collect();
        let place = ((share.clamp(0.5, 1.0) * lengths.len() as f64).ceil() as usize).clamp(1, lengths.len()) - 1;
        Some(*lengths.select_nth_unstable(place).1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(100);

    fn at(seconds: u64) -> Tick {
        Tick::from_millis(1000 * seconds)
    }

    /// Share of [`LIMIT`] for the mean step.
    fn share(step_budgets: &StepBudgets) -> f64 {
        step_budgets.least(at(0)).unwrap() / LIMIT.as_secs_f64()
    }

    #[test]
    fn a_pace_comes_to_rest_where_its_part_of_the_allowed_misses_is_lost() {
        for (seed, attainment) in [(1, 0.9), (2, 0.8), (3, 0.7)] {
            let (mut chance, mut step_budgets) = (StdRng::seed_from_u64(seed), StepBudgets::default());
            let (mut now, mut sum) = (SHARE_AT_FIRST, 0.0);
            for answer in 0..20_000 {
                // No response breaks its limit at 0.6 of it, a fifth do at 1.
                let breaks = chance.random_bool((0.5 * (now - 0.6)).max(0.0));
                step_budgets.note(LIMIT, !breaks, attainment, 1.0, at(0));
                now = share(&step_budgets);
                sum += if answer < 5_000 { 0.0 } else { now };
            }
            let mean = sum / 15_000.0;
            let rest = 0.6 + LOST * (1.0 - attainment) / 0.5;
            assert!((mean - rest).abs() < 0.03, "{attainment}: {mean}, where {rest} would lose as much as it may");
        }
    }

    #[test]
    fn a_pace_returns_as_outcomes_are_good_and_a_miss_costs_more_than_a_hit_brings() {
        let mut step_budgets = StepBudgets::default();
        let note = |step_budgets: &mut StepBudgets, kept| step_budgets.note(LIMIT, kept, 0.9, 1.0, at(0));
        note(&mut step_budgets, true);
        assert!(share(&step_budgets) > SHARE_AT_FIRST);
        let before = share(&step_budgets);
        note(&mut step_budgets, false);
        let after_one = share(&step_budgets);
        assert!(after_one < before && after_one > 0.95 * before, "one answer moves it a little: {before} {after_one}");
        (0..100).for_each(|_| note(&mut step_budgets, false));
        assert!((share(&step_budgets) - LEAST).abs() < 1e-9);
        let mut answers = 0;
        while share(&step_budgets) < 0.999 {
            note(&mut step_budgets, true);
            answers += 1;
        }
        assert!((100..500).contains(&answers), "{answers}");
    }

    #[test]
    fn short_answers_move_a_pace_by_their_weight() {
        let moved = |weight| {
            let mut step_budgets = StepBudgets::default();
            step_budgets.note(LIMIT, false, 0.9, weight, at(0));
            (SHARE_AT_FIRST / share(&step_budgets)).ln()
        };
        assert!((moved(0.1) - 0.1 * moved(1.0)).abs() < 1e-9 && moved(0.0).abs() < 1e-9);
    }

    #[test]
    fn the_least_of_the_paces_holds_that_answers_were_held_to_lately() {
        let mut step_budgets = StepBudgets::default();
        assert_eq!(step_budgets.least(at(0)), None);
        let millis = Duration::from_millis;
        step_budgets.note(millis(50), true, 0.9, 0.0, at(0));
        step_budgets.note(millis(200), true, 0.9, 0.0, at(50));
        let least = |seconds| step_budgets.least(at(seconds)).map(|pace| (pace * 1e6).round() / 1e6);
        assert_eq!(least(50), Some(0.045));
        assert_eq!(least(59), Some(0.045));
        assert_eq!(least(60), Some(0.18), "a threshold that nobody was held to for a minute limits nobody");
        assert_eq!(least(110), None);
        // The number of thresholds is bounded; the oldest is dropped.
        for n in 0..2 * THRESHOLDS as u64 {
            step_budgets.note(millis(1_000 + n), true, 0.9, 1.0, at(200));
        }
        assert_eq!(step_budgets.0.len(), THRESHOLDS);
        assert!(step_budgets.0.iter().all(|pace| pace.of.0 >= millis(1_000 + THRESHOLDS as u64)));
    }

    #[test]
    fn before_any_answer_the_shortest_promise_gives_the_pace() {
        assert_eq!(PoolTargets::default().pace_at_first(), None);
        let targets = PoolTargets { tpot: Some(LIMIT), ..PoolTargets::default() };
        assert!((targets.pace_at_first().unwrap() - 0.09).abs() < 1e-9);
    }

    const STEP: StepTime = StepTime { base: 0.010, per_sequence: 0.001, per_prompt_token: 0.000_1 };

    #[test]
    fn seats_are_the_sequences_whose_steps_leave_a_tenth_of_the_pace() {
        assert_eq!(seats(&STEP, 0.1), 80, "10 ms and 80 of 1 ms are nine tenths of 100 ms");
        assert_eq!(seats(&StepTime { per_sequence: 0.0, ..STEP }, 0.1), CEILING);
        assert_eq!(seats(&StepTime { per_sequence: 1.0, ..STEP }, 0.1), FLOOR);
    }

    #[test]
    fn what_the_pace_leaves_is_for_prefill_and_a_little_always() {
        assert!((prefill_share(&STEP, 0.1, 40.0) - 0.5).abs() < 1e-9);
        assert!((prefill_share(&STEP, 0.1, 0.0) - 0.9).abs() < 1e-9);
        assert!((prefill_share(&STEP, 0.1, 400.0) - LEAST_PREFILL).abs() < 1e-9);
    }

    #[test]
    fn an_engine_that_cannot_keep_the_pace_alone_is_not_starved() {
        // A step takes 11 ms with a single sequence, 5 ms are demanded.
        let (alone, asked) = (seats(&STEP, 0.005), prefill_share(&STEP, 0.005, 1.0));
        assert_eq!(alone, seats(&STEP, ATTAINABLE * STEP.decode(1.0)));
        assert!(alone >= 2 && asked >= 0.19, "{alone} {asked}");
    }

    #[test]
    fn a_full_cache_limits_seats_to_what_it_held_and_room_lets_them_grow() {
        let mut cache = KvCacheLimit::default();
        cache.reported(0.99, 40.0, 0.0);
        assert_eq!(cache.seats(), None, "full, and nobody waits for it");
        cache.reported(0.99, 0.0, 3.0);
        assert_eq!(cache.seats(), None, "nobody runs");
        cache.reported(1.0, 40.0, 3.0);
        assert_eq!(cache.seats(), Some(36), "so many fill nine tenths");
        cache.reported(0.93, 36.0, 0.0);
        assert_eq!(cache.seats(), Some(36), "as it should be");
        cache.reported(0.95, 36.0, 1.0);
        assert_eq!(cache.seats(), Some(34));
        let mut seen = vec![34];
        while let Some(seats) = cache.seats() {
            seen.push(seats);
            cache.reported(0.5, 10.0, 0.0);
            assert!(seen.len() < 200, "and in the end it limits nobody: {seen:?}");
        }
        assert!(seen.is_sorted() && seen.len() > 30, "by little steps: {seen:?}");
    }

    #[test]
    fn the_usual_length_is_one_that_most_answers_stay_within() {
        let mut lengths = OutputLengths::default();
        (1..20).for_each(|further| lengths.note(LIMIT, further));
        assert_eq!(lengths.of(LIMIT, 0.9), None, "too few say nothing");
        (20..=100).for_each(|further| lengths.note(LIMIT, further));
        assert_eq!((lengths.of(LIMIT, 0.9), lengths.of(LIMIT, 1.0)), (Some(90), Some(100)));
        assert_eq!(lengths.of(2 * LIMIT, 0.9), None, "of another promise");
        (0..LENGTHS).for_each(|_| lengths.note(LIMIT, 7));
        assert_eq!(lengths.of(LIMIT, 1.0), Some(7), "the last of them count");
    }

    proptest! {
        #[test]
        fn a_pace_stays_within_its_bounds(
            answers in prop::collection::vec((any::<bool>(), 0.0..1.5f64, 0.0..1.0f64), 1..500),
            turns in 1usize..20,
        ) {
            let mut step_budgets = StepBudgets::default();
            for _ in 0..turns {
                for (kept, attainment, weight) in &answers {
                    step_budgets.note(LIMIT, *kept, *attainment, *weight, at(0));
                    let share = share(&step_budgets);
                    prop_assert!((LEAST - 1e-9..=1.0 + 1e-9).contains(&share), "{share}");
                }
            }
        }

        #[test]
        fn seats_and_prefill_follow_from_any_step_and_pace(
            base in 0.0..1.0f64, per_sequence in 0.0..0.1f64, per_prompt_token in 0.0..0.01f64,
            pace in 0.001..1.0f64, batch in 0.0..500.0f64,
        ) {
            let step = StepTime { base, per_sequence, per_prompt_token };
            let own = seats(&step, pace);
            prop_assert!((FLOOR..=CEILING).contains(&own));
            prop_assert!(seats(&step, 1.1 * pace) >= own, "more time is never fewer seats");
            prop_assert!(own == FLOOR || step.decode(own.into()) <= attainable(&step, pace));
            let share = prefill_share(&step, pace, batch);
            prop_assert!((LEAST_PREFILL..=1.0).contains(&share));
            prop_assert!(prefill_share(&step, pace, batch + 1.0) <= share);
        }
    }
}

//! Finds out how many requests an engine may work on at one time: `max_concurrency_per_engine:
//! auto`.
//!
//! Pure. Every answer that ends says how far it was strained: the largest of what it took after
//! dispatch over what it may take (1: just kept). Answers are gathered in epochs; at the end of
//! one, the strain at the promised share of them (with 0.95 promised: the twentieth-worst of
//! 400) decides.
//!
//! - Above 1: **multiplicative decrease**, by as much as the strain says, at most to
//!   [`LEAST_FACTOR`]. It is not put off to the end of the epoch once the epoch is lost.
//! - Below [`ROOMY`], and the seats were used: **additive increase**, a sixteenth, or half the
//!   way to what is surely safe (below) where that is more. In between nothing changes: that band is why the figure comes to rest and does not swing.
//! - **Slow start**, at first and after the engine returned: up to twofold per epoch, until the
//!   band is reached or, for a returning engine, what it had before. Time per token grows at
//!   most in proportion to the batch, so that `1 / strain` times the batch is still safe, and no
//!   increase goes beyond it.
//!
//! An answer is evidence for a figure only if it was dispatched under it: what an engine still
//! works on when the figure changes says nothing about the new one (that is also why congestion
//! is answered once, not once per answer). Time in the gateway's own queue is no part of strain:
//! fewer seats would make it longer.
//!
//! Time to the end depends on the length of an answer, and lengths differ: see [`Whole`].
//!
//! Additive increase with multiplicative decrease is fair between gateways that share an engine
//! (Chiu and Jain, *Computer Networks and ISDN Systems* 17, 1989); each finds its own share.

use std::collections::VecDeque;
use std::time::Duration;

use super::latency::Lesson;
use crate::units::Tick;

/// Seats at first, and again after a return at least.
pub const AT_FIRST: u32 = 16;
/// Never fewer.
pub const FLOOR: u32 = 1;
/// Never more.
pub const CEILING: u32 = 1024;

/// One decrease never goes below this share.
const LEAST_FACTOR: f64 = 0.7;
/// And it always goes at least down to this.
const MOST_FACTOR: f64 = 0.97;
/// Strain below which there may be room for more.
const ROOMY: f64 = 0.92;
/// Increases aim no higher than this strain.
const AIM: f64 = 0.96;
/// Strain below which it goes back to slow start: the engine has become much faster.
const VERY_ROOMY: f64 = 0.6;
/// Share of the seats that must have been taken for an increase.
const USED: f64 = 0.8;
/// An answer from a batch this much larger than the seats says nothing about them.
const BEYOND: f64 = 1.15;
/// Answers of an epoch: as many as seats while it starts, twice as many when it is steady, so
/// that chance alone seldom looks like strain; within these bounds, which are doubled likewise.
const ANSWERS: (usize, usize) = (20, 100);
/// An epoch older than this when an answer comes is begun anew: it is from another time.
const OLD: Duration = Duration::from_secs(600);

/// The controller of one engine.
#[derive(Clone, Debug)]
pub struct Seats {
    cap: u32,
    phase: Phase,
    /// The figure has been what it is since then.
    since: Tick,
    /// When the current epoch began.
    began: Tick,
    strains: Vec<f64>,
    broken: usize,
    batches: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Up to twofold per epoch, until there was strain or this many seats are reached.
    Starting { until: u32 },
    /// Small steps.
    Steady,
}

/// What the classes that a pool serves are promised, as far as seats can keep it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Promised {
    /// The shortest threshold of the time to the first token.
    pub ttft: Option<Duration>,
    /// The shortest threshold of the time per output token. It is every answer's business: a
    /// batch is as slow for one request as for another.
    pub tpot: Option<Duration>,
    /// A class promises time to the end of its answers: each its own.
    pub e2e: bool,
    /// The largest share of answers that must keep one of them.
    pub attainment: f64,
}

/// What an answer's own class asks, and what is known of such answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Own {
    /// The threshold of the time to the first token.
    pub ttft: Option<Duration>,
    /// What the prompt alone takes to be read.
    pub reading: Option<Duration>,
    /// What the time to the end must stay within.
    pub whole: Option<Whole>,
}

/// An objective of time to the end, and the answers for which it is hard to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole {
    /// The threshold.
    pub limit: Duration,
    /// Tokens after the first of an answer that is as long as must be kept: of the promised share
    /// of answers the longest.
    pub length: u64,
    /// What such an answer takes from an engine that does nothing else, as far as was learned.
    pub alone: Option<Duration>,
}

/// How long the answers are whose class promises time to the end: of each threshold the last 256.
#[derive(Clone, Debug, Default)]
pub struct Lengths(Vec<(Duration, VecDeque<u64>)>);

/// So many answers tell how long answers are.
const LENGTHS: usize = 256;
/// With fewer nothing is told.
const ENOUGH_LENGTHS: usize = 20;
/// Thresholds that are kept apart.
const THRESHOLDS: usize = 16;

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

impl Default for Promised {
    /// No thresholds, and 95 % of answers.
    fn default() -> Self {
        Promised { ttft: None, tpot: None, e2e: false, attainment: 0.95 }
    }
}

impl Promised {
    /// The largest of what an answer took over what it might. 0 where no class is promised
    /// anything; none where the answer says nothing about seats.
    ///
    /// A first token says nothing where the prompt alone comes near its threshold: fewer seats
    /// would not help. An answer that came in one piece is also compared with the time by which
    /// a stream that kept the pool's promises would have ended.
    #[must_use]
    pub fn strain(&self, lesson: &Lesson, own: &Own) -> Option<f64> {
        if !self.e2e && self.ttft.is_none() && self.tpot.is_none() {
            return Some(0.0);
        }
        let further = u32::try_from(lesson.further).unwrap_or(u32::MAX);
        let budget = || Some(self.ttft? + self.tpot?.saturating_mul(further));
        let first =
            lesson.ttft.zip(own.ttft).filter(|(_, limit)| own.reading.is_none_or(|own| share(own, *limit) < NEAR));
        let of_the_pool = match lesson.ttft {
            Some(_) => lesson.tpot.zip(self.tpot),
            None => lesson.e2e.zip(budget()),
        };
        let strains = [first, of_the_pool].map(|pair| pair.map(|(took, limit)| share(took, limit)));
        let whole = own.whole.and_then(|whole| whole.strain(lesson, own.reading.unwrap_or_default()));
        strains.into_iter().chain([whole]).flatten().reduce(f64::max)
    }
}

impl Whole {
    /// What an answer of the length that must be kept would have taken at this one's pace, over
    /// what it might.
    ///
    /// Not what this one took itself: under a figure that has just changed short answers end
    /// first, and would all say that there is room. None where the objective could not be kept
    /// with the engine to itself: fewer seats would not help; and for an answer in one piece that is too
    /// short to tell a pace.
    fn strain(&self, lesson: &Lesson, reading: Duration) -> Option<f64> {
        if self.alone.is_some_and(|alone| share(alone, self.limit) >= ALONE) {
            return None;
        }
        let length = self.length as f64;
        let took = match (lesson.ttft, lesson.tpot) {
            (Some(ttft), Some(tpot)) => ttft.as_secs_f64() + tpot.as_secs_f64() * length,
            (None, _) if lesson.further > 0 && 2 * lesson.further >= self.length => {
                let e2e = lesson.e2e?;
                let reading = reading.min(e2e).as_secs_f64();
                reading + (e2e.as_secs_f64() - reading) / lesson.further as f64 * length
            }
            _ => return None,
        };
        Some(took / self.limit.as_secs_f64().max(1e-6))
    }
}

fn share(took: Duration, limit: Duration) -> f64 {
    took.as_secs_f64() / limit.as_secs_f64().max(1e-6)
}

/// A share of a threshold from which an answer alone is not kept by fewer seats.
const ALONE: f64 = 0.9;

/// A share of a threshold from which a prompt alone comes near it.
const NEAR: f64 = 0.6;

/// What an answer says about the seats of its engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evidence {
    /// When it was dispatched.
    pub dispatched: Tick,
    /// The mean number of requests that the engine had meanwhile.
    pub batch: f64,
    /// Its [`strain`](Promised::strain).
    pub strain: f64,
    /// The share of answers that must keep what was promised.
    pub promised: f64,
}

impl Default for Seats {
    fn default() -> Self {
        Seats {
            cap: AT_FIRST,
            phase: Phase::Starting { until: CEILING },
            since: Tick::ZERO,
            began: Tick::ZERO,
            strains: Vec::new(),
            broken: 0,
            batches: 0.0,
        }
    }
}

impl Seats {
    /// Requests that the engine may work on now.
    #[must_use]
    pub const fn cap(&self) -> u32 {
        self.cap
    }

    /// The engine was away, and its caches and what was compiled are gone: it starts slowly, up
    /// to what it had.
    pub fn returned(&mut self, at: Tick) {
        let before = match self.phase {
            Phase::Starting { until } if until < CEILING => until,
            _ => self.cap,
        };
        self.cap = (before / 4).max(AT_FIRST).min(before.max(FLOOR));
        self.phase = Phase::Starting { until: before };
        self.since = at;
        self.begin(at);
    }

    /// An answer ended. Says whether the figure changed.
    pub fn note(&mut self, evidence: Evidence, at: Tick) -> bool {
        if evidence.dispatched < self.since || !evidence.strain.is_finite() {
            return false;
        }
        if evidence.batch > BEYOND * f64::from(self.cap) + 1.0 {
            return false;
        }
        if at.since(self.began) > OLD {
            self.begin(at);
        }
        self.strains.push(evidence.strain);
        self.batches += evidence.batch;
        self.broken += usize::from(evidence.strain > 1.0);
        let wanted = (self.cap as usize).clamp(ANSWERS.0, ANSWERS.1);
        let wanted = if self.phase == Phase::Steady { 2 * wanted } else { wanted };
        let allowed = (1.0 - evidence.promised.clamp(0.5, 1.0)) * wanted as f64;
        let is_lost = self.broken as f64 > allowed + 2.0;
        if self.strains.len() < wanted && !is_lost {
            return false;
        }
        let before = self.cap;
        let strain = self.strain_at(evidence.promised);
        let batch = self.batches / self.strains.len() as f64;
        self.decide(strain, batch);
        self.begin(at);
        if self.cap != before {
            self.since = at;
        }
        self.cap != before
    }

    fn begin(&mut self, at: Tick) {
        self.began = at;
        self.strains.clear();
        self.broken = 0;
        self.batches = 0.0;
    }

    /// The strain that the promised share of answers stayed within.
    fn strain_at(&mut self, promised: f64) -> f64 {
        let last = self.strains.len() - 1;
        let place = ((promised.clamp(0.5, 1.0) * self.strains.len() as f64).ceil() as usize).clamp(1, last + 1) - 1;
        *self.strains.select_nth_unstable_by(place, f64::total_cmp).1
    }

    fn decide(&mut self, strain: f64, batch: f64) {
        let cap = f64::from(self.cap);
        let is_used = batch >= USED * cap;
        if strain > 1.0 {
            let factor = (1.0 / strain).clamp(LEAST_FACTOR, MOST_FACTOR);
            self.set((cap.min(batch.max(1.0)) * factor).floor());
            self.phase = Phase::Steady;
        } else if strain >= ROOMY {
            self.phase = Phase::Steady;
        } else if is_used {
            if strain < VERY_ROOMY && self.phase == Phase::Steady {
                self.phase = Phase::Starting { until: CEILING };
            }
            self.grow(strain);
        }
    }

    fn grow(&mut self, strain: f64) {
        let cap = f64::from(self.cap);
        let safe = cap * AIM / strain.max(1e-3);
        match self.phase {
            Phase::Starting { until } => {
                self.set((2.0 * cap).min(safe).min(f64::from(until)).floor().max(cap + 1.0));
                if self.cap >= until && until < CEILING {
                    self.phase = Phase::Steady;
                }
            }
            Phase::Steady => {
                let step = (cap / 16.0).max((safe - cap) / 2.0);
                self.set((cap + step).min(safe).floor().max(cap + 1.0));
            }
        }
    }

    fn set(&mut self, seats: f64) {
        self.cap = seats.clamp(f64::from(FLOOR), f64::from(CEILING)) as u32;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// An engine whose strain grows with its batch, fed one answer after the other at the full
    /// batch. Returns the figures after each epoch.
    fn settle(seats: &mut Seats, from: Tick, answers: usize, strain: impl Fn(f64) -> f64) -> Vec<u32> {
        let mut at = from;
        let mut found = vec![seats.cap()];
        for _ in 0..answers {
            at = at + ms(10);
            let batch = f64::from(seats.cap());
            if seats.note(Evidence { dispatched: at, batch, strain: strain(batch), promised: 0.95 }, at) {
                found.push(seats.cap());
            }
        }
        found
    }

    #[test]
    fn it_starts_slowly_comes_to_rest_and_stays_there() {
        let mut seats = Seats::default();
        let line = |batch: f64| 0.3 + batch / 100.0;
        let found = settle(&mut seats, Tick::ZERO, 5_000, line);
        assert!(found.is_sorted(), "never too high: {found:?}");
        assert!((60..=70).contains(&seats.cap()), "{found:?}");
        let rest = settle(&mut seats, Tick::from_millis(60_000), 5_000, line);
        assert_eq!(rest.len(), 1, "{rest:?}");
    }

    #[test]
    fn a_breach_is_answered_once_by_as_much_as_it_says() {
        let mut seats = Seats { cap: 100, phase: Phase::Steady, ..Seats::default() };
        let at = Tick::from_millis(1_000);
        let broken = |dispatched| Evidence { dispatched, batch: 100.0, strain: 1.25, promised: 0.95 };
        let decided = (1..).find(|_| seats.note(broken(Tick::ZERO), at)).unwrap();
        assert_eq!((decided, seats.cap()), (13, 80), "not put off to the end of the epoch");
        let changes = (0..1_000).filter(|_| seats.note(broken(Tick::ZERO), Tick::from_millis(2_000))).count();
        assert_eq!(changes, 0, "these were dispatched before the change");
        let mut seats = Seats { cap: 100, phase: Phase::Steady, ..Seats::default() };
        let hopeless = Evidence { strain: 50.0, ..broken(Tick::ZERO) };
        let _ = (1..).find(|_| seats.note(hopeless, at));
        assert_eq!(seats.cap(), 70);
    }

    #[test]
    fn one_answer_in_twenty_may_be_late() {
        let mut seats = Seats { cap: 40, phase: Phase::Steady, ..Seats::default() };
        for n in 0..4_000u32 {
            let strain = if n % 25 == 0 { 3.0 } else { 0.95 };
            let at = Tick::from_millis(u64::from(n));
            assert!(!seats.note(Evidence { dispatched: at, batch: 40.0, strain, promised: 0.95 }, at));
        }
    }

    #[test]
    fn seats_that_nobody_takes_are_not_added_to() {
        let mut seats = Seats::default();
        let idle = Evidence { dispatched: Tick::ZERO, batch: 3.0, strain: 0.2, promised: 0.95 };
        assert!((0..1_000).all(|_| !seats.note(idle, Tick::ZERO)));
        let slow = Evidence { strain: 1.5, ..idle };
        let _ = (0..1_000).find(|_| seats.note(slow, Tick::ZERO));
        assert_eq!(seats.cap(), 2, "breached at 3: it is taken from there");
    }

    #[test]
    fn an_engine_that_returns_has_what_it_had_and_no_more() {
        let mut seats = Seats { cap: 100, phase: Phase::Steady, ..Seats::default() };
        seats.returned(Tick::from_millis(5));
        assert_eq!(seats.cap(), 25);
        seats.returned(Tick::from_millis(6));
        assert_eq!(seats.cap(), 25, "it has not lost what it had by leaving again");
        let found = settle(&mut seats, Tick::from_millis(10), 300, |_| 0.5);
        assert_eq!(found[..4], [25, 48, 92, 100], "{found:?}");
        let mut small = Seats { cap: 3, ..Seats::default() };
        small.returned(Tick::ZERO);
        assert_eq!(small.cap(), 3);
    }

    #[test]
    fn strain_is_the_worst_of_what_is_promised() {
        let promised = Promised { ttft: Some(ms(400)), tpot: Some(ms(50)), ..Promised::default() };
        let stream = Lesson { ttft: Some(ms(600)), tpot: Some(ms(25)), e2e: Some(ms(9_000)), further: 100 };
        let strain = |lesson, ttft, reading| promised.strain(&lesson, &Own { ttft, reading, ..Own::default() });
        assert_eq!(strain(stream, Some(ms(1_200)), None), Some(0.5));
        assert_eq!(strain(stream, Some(ms(500)), Some(ms(100))), Some(1.2));
        assert_eq!(strain(stream, Some(ms(500)), Some(ms(400))), Some(0.5), "its prompt alone takes that long");
        assert_eq!(strain(stream, None, None), Some(0.5));
        let whole = Lesson { ttft: None, tpot: None, ..stream };
        assert!((strain(whole, None, None).unwrap() - 9.0 / 5.4).abs() < 1e-9);
        assert_eq!(Promised::default().strain(&whole, &Own::default()), Some(0.0), "nothing is promised here");
    }

    #[test]
    fn time_to_the_end_is_asked_of_the_pace_and_not_of_the_answers_that_happen_to_end() {
        let promised = Promised { e2e: true, ..Promised::default() };
        let own = |limit, alone| {
            let whole = Whole { limit: ms(limit), length: 300, alone: Some(ms(alone)) };
            Own { reading: Some(ms(400)), whole: Some(whole), ..Own::default() }
        };
        let short = Lesson { ttft: Some(ms(600)), tpot: Some(ms(28)), e2e: Some(ms(880)), further: 10 };
        assert_eq!(promised.strain(&short, &own(10_000, 3_000)), Some(0.9), "600 ms and 300 times 28");
        assert_eq!(promised.strain(&short, &own(8_000, 3_000)), Some(1.125));
        assert_eq!(promised.strain(&short, &own(3_000, 3_000)), None, "fewer seats would not help");
        let whole = |e2e, further| Lesson { ttft: None, tpot: None, e2e: Some(ms(e2e)), further };
        assert_eq!(promised.strain(&whole(5_400, 150), &own(10_000, 3_000)), Some(1.04), "400 ms and 300 of 33");
        assert_eq!(promised.strain(&whole(5_400, 600), &own(10_000, 3_000)), Some(0.29));
        assert_eq!(promised.strain(&whole(900, 149), &own(10_000, 3_000)), None, "too short to tell a pace");
        assert_eq!(promised.strain(&short, &Own::default()), None, "of a class that promises nothing");
        let both = Promised { tpot: Some(ms(56)), ..promised };
        assert_eq!(both.strain(&short, &own(3_000, 3_000)), Some(0.5), "its pace is others' business, too");
        assert_eq!(both.strain(&short, &own(8_000, 3_000)), Some(1.125));
    }

    #[test]
    fn the_length_that_must_be_kept_is_that_of_the_last_answers() {
        let (mut lengths, limit) = (Lengths::default(), ms(5_000));
        (1..ENOUGH_LENGTHS as u64).for_each(|length| lengths.note(limit, length));
        assert_eq!(lengths.of(limit, 0.95), None);
        (0..2 * LENGTHS as u64).for_each(|length| lengths.note(limit, length % 100 + 1));
        assert!(lengths.of(limit, 0.95).is_some_and(|length| (93..=97).contains(&length)));
        assert_eq!(lengths.of(limit, 1.0), Some(100));
        assert_eq!(lengths.of(ms(6_000), 0.95), None);
        (0..100).for_each(|other| lengths.note(ms(other), 1));
        assert_eq!(lengths.0.len(), THRESHOLDS, "what is remembered has a bound");
    }

    proptest! {
        #[test]
        fn whatever_is_seen_the_figure_stays_within_its_bounds(
            seen in proptest::collection::vec((0u64..100, 0f64..2_000.0, 0f64..10.0, any::<bool>()), 1..2_000),
        ) {
            let mut seats = Seats::default();
            let mut at = Tick::ZERO;
            for (gap, batch, strain, returns) in seen {
                at = at + ms(gap);
                let before = seats.cap();
                if returns && gap == 0 {
                    seats.returned(at);
                    prop_assert!(seats.cap() <= before);
                    continue;
                }
                let batch = batch % (f64::from(before) * 1.3);
                let changed = seats.note(Evidence { dispatched: at, batch, strain, promised: 0.95 }, at);
                prop_assert_eq!(changed, seats.cap() != before);
                prop_assert!((FLOOR..=CEILING).contains(&seats.cap()));
                prop_assert!(seats.cap() <= 2 * before);
            }
        }

        #[test]
        fn any_engine_that_slows_with_its_batch_is_settled_near_its_limit(
            base in 0.05f64..0.7, slope in 0.002f64..0.1, noise in 0.0f64..0.1,
        ) {
            let mut seats = Seats::default();
            let n = std::cell::Cell::new(0u32);
            let line = |batch: f64| {
                n.set(n.get() + 1);
                (base + slope * batch) * (1.0 - noise * f64::from(n.get() % 10) / 10.0)
            };
            let _ = settle(&mut seats, Tick::ZERO, 40_000, line);
            let limit = ((1.0 - base) / slope).clamp(1.0, f64::from(CEILING));
            let found = f64::from(seats.cap());
            let roomy = (ROOMY - base) / slope;
            prop_assert!(found <= limit * 1.15 + 2.0 && found >= roomy - 2.0, "{} of {} to {}", found, roomy, limit);
            let later = settle(&mut seats, Tick::from_millis(1 << 30), 20_000, line);
            let (least, most) = (later.iter().min().unwrap(), later.iter().max().unwrap());
            prop_assert!(f64::from(*most - *least) <= 0.15 * f64::from(*most) + 2.0, "{:?}", later);
        }
    }
}

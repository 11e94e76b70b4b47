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
//! - Below [`ROOMY`], and the seats were used: **additive increase**, a sixteenth. In between
//!   nothing changes: that band is why the figure comes to rest and does not swing.
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
//! Additive increase with multiplicative decrease is fair between gateways that share an engine
//! (Chiu and Jain, *Computer Networks and ISDN Systems* 17, 1989); each finds its own share.

use std::time::Duration;

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
const MOST_FACTOR: f64 = 0.95;
/// Strain below which there may be room for more.
const ROOMY: f64 = 0.9;
/// Increases aim no higher than this strain.
const AIM: f64 = 0.95;
/// Strain below which it goes back to slow start: the engine has become much faster.
const VERY_ROOMY: f64 = 0.6;
/// Share of the seats that must have been taken for an increase.
const USED: f64 = 0.8;
/// An answer from a batch this much larger than the seats says nothing about them.
const BEYOND: f64 = 1.15;
/// Answers of an epoch: as many as seats, but within these bounds.
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

/// What an answer says about the seats of its engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evidence {
    /// When it was dispatched.
    pub dispatched: Tick,
    /// The mean number of requests that the engine had meanwhile.
    pub batch: f64,
    /// The largest of what was seen over what is allowed; 0 where nothing is asked.
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
            Phase::Steady => self.set((cap + (cap / 16.0).max(1.0)).min(safe.max(cap + 1.0)).floor()),
        }
    }

    fn set(&mut self, seats: f64) {
        self.cap = seats.clamp(f64::from(FLOOR), f64::from(CEILING)) as u32;
    }
}

//! The limits of one scope (a tenant, or its use of one model) and the amounts taken.

use super::meter::Meter;
use super::settings::Allowance;
use super::{Exhausted, Limit, Output, Scope, Standing, Used, Wanted};
use crate::units::Tick;

/// The rate limits, in the order of a [`Book`]'s buckets and of [`Held`].
pub(in super::super) const BY_RATE: [Limit; 4] =
    [Limit::Tokens, Limit::InputTokens, Limit::OutputTokens, Limit::Requests];

/// Amounts held of each rate limit; 0 of absent ones.
pub(in super::super) type Held = [u64; BY_RATE.len()];

#[derive(Debug)]
pub(super) struct Book {
    scope: Scope,
    meters: [Option<Meter>; BY_RATE.len()],
    /// Counted even without a limit, so that a limit set by a reload knows the running requests.
    running: u64,
    concurrent: Option<u64>,
}

impl Book {
    pub fn new(scope: Scope, allowance: &Allowance, at: Tick) -> Self {
        let mut book = Book { scope, meters: Default::default(), running: 0, concurrent: None };
        book.change(allowance, at);
        book
    }

    /// Sets the limits; amounts taken are kept.
    pub fn change(&mut self, allowance: &Allowance, at: Tick) {
        for (meter, limit) in self.meters.iter_mut().zip(BY_RATE) {
            match (meter, allowance.rate(limit)) {
                (Some(meter), rate) => meter.change(rate, at),
                (empty, rate) => *empty = rate.map(|rate| Meter::new(rate, at)),
            }
        }
        self.concurrent = allowance.concurrent_requests.map(Into::into);
    }

    /// Whether the request can ever fit.
    pub fn can_ever_hold(&self, wanted: &Wanted) -> Result<(), Exhausted> {
        for (limit, meter) in self.metered() {
            let (need, most) = (wanted.of(limit), meter.enforced().map_or(u64::MAX, |rate| rate.burst()));
            if need > most && wanted.is_stated(limit) {
                return Err(Exhausted::ForEver { limit, scope: self.scope, need, most });
            }
        }
        Ok(())
    }

    /// Whether a concurrent request is left.
    pub fn has_a_place(&self) -> Result<(), Exhausted> {
        match self.places() {
            Some(standing) if standing.remaining == 0 => Err(Exhausted::ForNow { standing, retry_after: None }),
            _ => Ok(()),
        }
    }

    /// The limit with the longest wait, and the wait in whole seconds.
    pub fn longest_wait(&self, wanted: &Wanted, at: Tick) -> Option<(u64, Standing)> {
        let mut longest: Option<(u64, Standing)> = None;
        for (limit, meter) in self.metered() {
            let wait = meter.wait(clipped(wanted.of(limit), meter), at);
            if let Some(wait) = wait.filter(|wait| longest.is_none_or(|(longest, _)| *wait > longest)) {
                longest = self.standing(limit, meter, at).map(|standing| (wait, standing));
            }
        }
        longest
    }

    /// Takes from every limit without a check, which the caller has made for all buckets.
    pub fn take(&mut self, wanted: &Wanted, at: Tick) -> Held {
        self.take_each(wanted, at, |clipped, _| clipped)
    }

    /// Takes from every limit as much as is left, without debt. For a request that was admitted
    /// elsewhere.
    pub fn take_what_is_left(&mut self, wanted: &Wanted, at: Tick) -> Held {
        self.take_each(wanted, at, |clipped, meter| clipped.min(meter.remaining(at)))
    }

    /// Takes from every limit the amount that `much` derives from the need clipped to the bucket.
    fn take_each(&mut self, wanted: &Wanted, at: Tick, much: impl Fn(u64, &Meter) -> u64) -> Held {
        self.running = self.running.saturating_add(1);
        let mut held = Held::default();
        for ((held, meter), limit) in held.iter_mut().zip(&mut self.meters).zip(BY_RATE) {
            if let Some(meter) = meter {
                *held = much(clipped(wanted.of(limit), meter), meter);
                meter.take(*held, at);
            }
        }
        held
    }

    /// Replaces what was held by the actual usage. An excess becomes debt, or for a `guest` takes what is
    /// left.
    pub fn settle(&mut self, held: &Held, used: &Used, guest: bool, at: Tick) {
        self.running = self.running.saturating_sub(1);
        for ((held, meter), limit) in held.iter().zip(&mut self.meters).zip(BY_RATE) {
            if let Some(meter) = meter {
                let most = if guest { held.saturating_add(meter.remaining(at)) } else { u64::MAX };
                meter.settle(*held, used.of(limit).min(most), at);
            }
        }
    }

    /// Refunds completely.
    pub fn give_back(&mut self, held: &Held) {
        self.running = self.running.saturating_sub(1);
        for (held, meter) in held.iter().zip(&mut self.meters) {
            if let Some(meter) = meter {
                meter.give_back(*held);
            }
        }
    }

    pub fn running(&self) -> u64 {
        self.running
    }

    /// The state of every enforced limit, in the order of [`Limit::ALL`].
    pub fn standings(&self, at: Tick) -> impl Iterator<Item = Standing> {
        self.metered().filter_map(move |(limit, meter)| self.standing(limit, meter, at)).chain(self.places())
    }

    fn metered(&self) -> impl Iterator<Item = (Limit, &Meter)> {
        BY_RATE.into_iter().zip(&self.meters).filter_map(|(limit, meter)| Some((limit, meter.as_ref()?)))
    }

    fn standing(&self, limit: Limit, meter: &Meter, at: Tick) -> Option<Standing> {
        let rate = meter.enforced()?;
        let (most, per_minute) = (rate.burst(), Some(rate.per_minute()));
        let (remaining, reset) = (meter.remaining(at), Some(meter.until_full(at)));
        Some(Standing { limit, scope: self.scope, most, per_minute, remaining, reset })
    }

    fn places(&self) -> Option<Standing> {
        let most = self.concurrent?;
        let (limit, remaining) = (Limit::ConcurrentRequests, most.saturating_sub(self.running));
        Some(Standing { limit, scope: self.scope, most, per_minute: None, remaining, reset: None })
    }
}

/// The amount taken: an estimate beyond the bucket takes all of it.
fn clipped(need: u64, meter: &Meter) -> u64 {
    meter.enforced().map_or(need, |rate| need.min(rate.burst()))
}

impl Wanted {
    pub(in super::super) fn of(&self, limit: Limit) -> u64 {
        let used = Used { input: self.input, output: self.output.tokens() };
        used.of(limit)
    }

    /// Whether the request states its need of this limit. A prompt is an estimate.
    pub(in super::super) fn is_stated(&self, limit: Limit) -> bool {
        let counts_output = matches!(limit, Limit::Tokens | Limit::OutputTokens);
        counts_output && matches!(self.output, Output::Stated(_))
    }
}

impl Used {
    pub(in super::super) fn of(&self, limit: Limit) -> u64 {
        match limit {
            Limit::Tokens => (self.input + self.output).0,
            Limit::InputTokens => self.input.0,
            Limit::OutputTokens => self.output.0,
            Limit::Requests | Limit::ConcurrentRequests => 1,
        }
    }
}

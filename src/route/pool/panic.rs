//! Panic threshold: if breakers alone exclude all engines of a route, requests pass them in the usual order,
//! because a breaker may divert traffic but must not drop it.
//!
//! The first request through an open breaker is its trial: its result, or that of any later request, closes
//! the breaker or opens it again.

use super::{Key, PoolInner, key_of};
use crate::route::pick_request::PickRequest;
use crate::route::retry::Attempts;
use crate::types::Tick;

impl PoolInner {
    /// The best slot for a request; if none is available and its attempts bypass breakers, one behind a
    /// breaker.
    pub fn place_for(&mut self, pick: &PickRequest, blocks: &[u64], attempts: &Attempts, at: Tick) -> Option<usize> {
        let shut = attempts.shut();
        let found = self.best_for(pick, blocks, &shut);
        if found.is_some() || !attempts.passes_breakers() {
            return found;
        }
        let place = self.past_breakers(at, |inner| inner.best_for(pick, blocks, &shut))?;
        if let Some(engine) = self.engines[place].as_mut() {
            engine.breaker.may_try_now();
        }
        Some(place)
    }

    /// Whether there is an engine for another attempt of this request.
    pub fn has_another(&mut self, attempts: &Attempts, at: Tick) -> bool {
        let shut = attempts.shut();
        self.best_without(&shut).is_some()
            || (attempts.passes_breakers() && self.past_breakers(at, |inner| inner.best_without(&shut)).is_some())
    }

    /// Seats of engines excluded by breakers alone, if there are no
    /// others.
    pub fn seats_past_breakers(&mut self, at: Tick) -> u64 {
        match self.available(at) {
            0 => self.engines.iter().flatten().map(|engine| u64::from(engine.gives_past_breaker(at))).sum(),
            _ => 0,
        }
    }

    /// Evaluates `look` while engines excluded by breakers alone are ranked with the others.
    fn past_breakers<T>(&mut self, at: Tick, look: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        let mut let_in = Vec::new();
        for place in 0..self.engines.len() {
            let Some(engine) = self.engines[place].as_mut().filter(|engine| engine.waits_for_its_breaker(at)) else {
                continue;
            };
            let rank = engine.rank_past_breaker(at);
            let key = key_of(engine, rank, &self.settings.balance, self.typical, at);
            self.tree.set(place, key);
            let_in.push(place);
        }
        let found = if let_in.is_empty() { None } else { look(self) };
        let_in.into_iter().for_each(|place| self.tree.set(place, Key::OUT));
        found
    }
}

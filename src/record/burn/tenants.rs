//! Judged requests of the last minute by tenant, so that one tenant's misses alone do not look like
//! overload.

use super::{JudgedCount, PRESSURE};
use crate::types::Tick;

const SLOTS: usize = 12;
/// Tenants distinguished per slot; further ones are counted together.
const MOST: usize = 64;

/// Counts by tenant in slots of five seconds.
#[derive(Debug, Default)]
pub(super) struct Tenants([TenantSlot; SLOTS]);

#[derive(Debug, Default)]
struct TenantSlot {
    number: u64,
    counts: Vec<(u64, JudgedCount)>,
    others: JudgedCount,
}

impl Tenants {
    /// Records the end of a tenant's judged request.
    pub fn note(&mut self, tenant: u64, met: bool, at: Tick) {
        let number = number_at(at);
        let slot = &mut self.0[(number % SLOTS as u64) as usize];
        if slot.number < number {
            slot.number = number;
            slot.counts.clear();
            slot.others = JudgedCount::default();
        }
        match slot.counts.iter().position(|(known, _)| *known == tenant) {
            Some(place) => slot.counts[place].1.note(met),
            None if slot.counts.len() < MOST => {
                slot.counts.push((tenant, JudgedCount { met: u64::from(met), judged: 1 }))
            }
            None => slot.others.note(met),
        }
    }

    /// The counts without each tenant in turn, if any remain.
    pub fn without_each(&self, at: Tick) -> Vec<JudgedCount> {
        let newest = number_at(at);
        let live = || self.0.iter().filter(move |slot| slot.number <= newest && slot.number + SLOTS as u64 > newest);
        let mut all = JudgedCount::default();
        let mut each: Vec<(u64, JudgedCount)> = Vec::new();
        live().for_each(|slot| all.add(slot.others));
        for (tenant, count) in live().flat_map(|slot| &slot.counts) {
            all.add(*count);
            match each.iter_mut().find(|(known, _)| known == tenant) {
                Some((_, sum)) => sum.add(*count),
                None => each.push((*tenant, *count)),
            }
        }
        let rest =
            |(_, own): (u64, JudgedCount)| JudgedCount { met: all.met - own.met, judged: all.judged - own.judged };
        each.into_iter().map(rest).filter(|rest| rest.judged > 0).collect()
    }
}

fn number_at(at: Tick) -> u64 {
    at.as_nanos() / (PRESSURE.as_nanos() as u64 / SLOTS as u64)
}

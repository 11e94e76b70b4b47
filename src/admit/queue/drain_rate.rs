//! Drain rate of a queue: the rate at which seats are freed while all are occupied.
//!
//! Its clock stops while a seat is free or the pool has none, so that a quiet hour does not make the pool
//! look slow, and the last busy period's rate stays until there is a newer one. A stuck pool looks slower
//! with every moment.

use std::collections::VecDeque;
use std::time::Duration;

use crate::types::Tick;

/// Freed seats over which the rate is measured.
const REMEMBERED: usize = 32;

/// Responses that began together end nearly together; those within this time after the first belong to the
/// same busy period.
const TOGETHER: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct DrainRate {
    /// Time with all seats occupied, up to `since`.
    before: Duration,
    since: Option<Tick>,
    ended: Option<FreedSeat>,
    marks: VecDeque<Duration>,
}

/// The end of a busy period.
#[derive(Clone, Copy, Debug)]
struct FreedSeat {
    at: Tick,
    /// The last seat freed together with the first one.
    last: Tick,
}

impl DrainRate {
    /// Records whether all seats are occupied from `at` on.
    pub fn watch(&mut self, all_taken: bool, at: Tick) {
        match (self.since, self.ended) {
            (None, _) if all_taken => {
                self.since = Some(at);
                if self.marks.is_empty() {
                    self.marks.push_back(self.before);
                }
            }
            (Some(_), None) if !all_taken => self.ended = Some(FreedSeat { at, last: at }),
            (Some(_), Some(ended)) if all_taken => {
                self.before = self.clock(at);
                self.since = Some(at);
                self.ended = None;
                debug_assert!(ended.at <= at, "time does not go back");
            }
            _ => {}
        }
    }

    /// Records a freed seat; counted only if all were occupied, or just before.
    pub fn freed(&mut self, at: Tick) {
        let counts = match &mut self.ended {
            None => self.since.is_some(),
            Some(ended) => {
                let together = at.since(ended.at) <= TOGETHER;
                ended.last = if together { at } else { ended.last };
                together
            }
        };
        if counts {
            self.marks.push_back(self.clock(at));
            if self.marks.len() > REMEMBERED + 1 {
                self.marks.pop_front();
            }
        }
    }

    /// Time until this many seats are freed at the measured rate.
    pub fn time_for(&self, requests: usize, at: Tick) -> Option<Duration> {
        let first = self.marks.front()?;
        let seen = self.marks.len() as u128 - 1;
        let nanos = (self.clock(at) - *first).as_nanos().saturating_mul(requests as u128).checked_div(seen)?;
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    fn clock(&self, at: Tick) -> Duration {
        let end = self.ended.map_or(at, |ended| ended.last);
        self.before + self.since.map_or(Duration::ZERO, |since| end.since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_end_together_are_as_many_seats_as_they_had() {
        let ms = Tick::from_millis;
        let mut drain = DrainRate::default();
        drain.watch(true, ms(0));
        for at in [4000, 4000, 4010, 4020] {
            drain.freed(ms(at));
            drain.watch(false, ms(at));
        }
        drain.freed(ms(4500));
        drain.watch(true, ms(9000));
        assert_eq!(drain.time_for(4, ms(9000)), Some(Duration::from_millis(4020)));
    }

    #[test]
    fn the_rate_is_that_of_the_last_seats_alone() {
        let mut drain = DrainRate::default();
        drain.watch(true, Tick::ZERO);
        (1..=50).for_each(|seat| drain.freed(Tick::from_millis(10_000 * seat)));
        assert_eq!(drain.time_for(1, Tick::from_millis(500_000)), Some(Duration::from_secs(10)));
        (1..=REMEMBERED as u64).for_each(|seat| drain.freed(Tick::from_millis(500_000 + 100 * seat)));
        assert_eq!(drain.time_for(1, Tick::from_millis(503_200)), Some(Duration::from_millis(100)));
    }

    #[test]
    fn a_quiet_hour_is_not_slow_and_a_stuck_pool_is() {
        let ms = Tick::from_millis;
        let mut drain = DrainRate::default();
        drain.watch(true, ms(1000));
        assert_eq!(drain.time_for(1, ms(2000)), None, "nothing measured");
        drain.freed(ms(1500));
        drain.freed(ms(2000));
        drain.watch(false, ms(2000));
        drain.freed(ms(3000));
        drain.watch(true, ms(3_602_000));
        assert_eq!(drain.time_for(4, ms(3_602_000)), Some(Duration::from_secs(2)));
        assert_eq!(drain.time_for(4, ms(3_604_000)), Some(Duration::from_secs(6)));
    }
}

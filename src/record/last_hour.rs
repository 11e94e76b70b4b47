//! Counts over the last hour, in slots of five minutes.
//!
//! Totals cover the last 55 to 60 minutes. Pure: moments are arguments.

use std::collections::VecDeque;
use std::time::Duration;

use crate::types::Tick;

const SLOTS: u64 = 12;
const SLOT: Duration = Duration::from_secs(5 * 60);

/// One value per slot; empty slots use no memory.
#[derive(Debug)]
pub(super) struct LastHour<T>(VecDeque<(u64, T)>);

impl<T> Default for LastHour<T> {
    fn default() -> Self {
        LastHour(VecDeque::new())
    }
}

impl<T: Default> LastHour<T> {
    /// The slot of this moment. A moment behind the newest slot counts there.
    pub(super) fn slot(&mut self, at: Tick) -> &mut T {
        let number = number_at(at);
        while self.0.front().is_some_and(|(oldest, _)| oldest + SLOTS <= number) {
            self.0.pop_front();
        }
        if self.0.back().is_none_or(|(newest, _)| *newest < number) {
            self.0.push_back((number, T::default()));
        }
        &mut self.0.back_mut().expect("a slot was pushed if there was none").1
    }

    /// The slots that belong to the last hour, the oldest first.
    pub(super) fn live(&self, at: Tick) -> impl Iterator<Item = &T> {
        let number = number_at(at);
        self.0.iter().filter(move |(slot, _)| slot + SLOTS > number).map(|(_, value)| value)
    }
}

fn number_at(at: Tick) -> u64 {
    at.as_nanos() / SLOT.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minutes(n: u64) -> Tick {
        Tick::from_millis(n * 60_000)
    }

    #[test]
    fn an_hour_is_told_and_what_is_older_is_forgotten() {
        let mut counts = LastHour::<u32>::default();
        for minute in 0..180 {
            *counts.slot(minutes(minute)) += 1;
            assert!(counts.0.len() <= 12);
        }
        assert_eq!(counts.live(minutes(179)).sum::<u32>(), 60);
        assert_eq!(counts.live(minutes(180)).sum::<u32>(), 55);
        assert_eq!(counts.live(minutes(235)).sum::<u32>(), 0);
    }

    #[test]
    fn a_moment_behind_the_newest_slot_is_not_lost() {
        let mut counts = LastHour::<u32>::default();
        *counts.slot(minutes(10)) += 1;
        *counts.slot(minutes(9)) += 1;
        assert_eq!(counts.live(minutes(10)).sum::<u32>(), 2);
    }
}

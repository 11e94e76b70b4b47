//! A call to the store and its answer, as the script reads and writes them.
//!
//! The words here are the script's (`script.lua`), which has the arithmetic; they are open so
//! that tests can hold it against the [`Ledger`](crate::admit::limit::Ledger).

use std::sync::Arc;
use std::time::Duration;

/// The script that keeps a tenant's books.
pub const SCRIPT: &str = include_str!("script.lua");

/// The layout of what it keeps. A store that holds another one is not written to.
pub const LAYOUT: &str = "1";

/// How long a gateway's count of running requests outlives its last word.
pub const COUNT_LIFE: Duration = Duration::from_secs(15);

/// One call: for one tenant, all or nothing.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// The tenant's key.
    pub key: Arc<str>,
    /// Which gateway speaks: letters and digits.
    pub gateway: Arc<str>,
    /// How long the books are kept after this call.
    pub key_life: Duration,
    /// One for each limit by rate.
    pub buckets: Vec<Bucket>,
    /// One for each limit on requests at the same time.
    pub places: Vec<Places>,
}

/// What a call says about a limit by rate. All amounts are at most 2^53.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bucket {
    /// Its field in the tenant's hash.
    pub field: Arc<str>,
    /// What flows back in a minute.
    pub per_minute: u64,
    /// What it holds.
    pub burst: u64,
    /// Of what was granted before: not used.
    pub back: u64,
    /// Used beyond what was granted.
    pub owed: u64,
    /// Wanted, of all together or of none.
    pub need: u64,
    /// Wanted besides, as far as it is there.
    pub besides: u64,
    /// The birth of the books that spoke last of it; 0 where none did.
    pub begun: u64,
    /// Used here without asking, while the store was away.
    pub unheard: u64,
    /// What these books had spent by then, as far as it has not flown off: charged where they are
    /// lost, as far as no other gateway remembered it.
    pub remembered: u64,
}

/// What a call says about requests at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// Its field in the tenant's hash.
    pub field: Arc<str>,
    /// How many there are.
    pub most: u64,
    /// How many of them run here: no change, the whole number.
    pub running: u64,
    /// Wanted.
    pub need: u64,
    /// Wanted besides, as far as they are there.
    pub besides: u64,
}

/// What the store says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Whether everything that was needed was there and has been taken.
    pub granted: bool,
    /// The store's time, in microseconds since 1970.
    pub now: u64,
    /// The birth of the books.
    pub begun: u64,
    /// One for each bucket of the call.
    pub buckets: Vec<Level>,
    /// One for each of the call's places.
    pub places: Vec<Count>,
}

/// How a bucket stands after a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Whole tokens spent.
    pub whole: u64,
    /// And this many sixty-millionths.
    pub micros: u64,
    /// Granted besides.
    pub besides: u64,
}

/// Requests at the same time, after a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// That this gateway may have, those that run included.
    pub ours: u64,
    /// That others have.
    pub others: u64,
}

impl Call {
    /// The script's arguments behind the key.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let head = [
            LAYOUT.to_owned(),
            self.gateway.to_string(),
            self.key_life.as_millis().to_string(),
            COUNT_LIFE.as_micros().to_string(),
            self.buckets.len().to_string(),
            self.places.len().to_string(),
        ];
        let mut all = Vec::from(head);
        for Bucket { field, per_minute, burst, back, owed, need, besides, begun, unheard, remembered } in &self.buckets
        {
            all.push(field.to_string());
            all.extend([per_minute, burst, back, owed, need, besides, begun, unheard, remembered].map(u64::to_string));
        }
        for Places { field, most, running, need, besides } in &self.places {
            all.push(field.to_string());
            all.extend([most, running, need, besides].map(u64::to_string));
        }
        all
    }

    /// Reads an answer to this call; `None`: it cannot be one.
    #[must_use]
    pub fn read(&self, numbers: &[i64]) -> Option<Answer> {
        let (head, rest) = numbers.split_at_checked(3)?;
        let (buckets, places) = rest.split_at_checked(3 * self.buckets.len())?;
        if places.len() != 2 * self.places.len() {
            return None;
        }
        let number = |number: i64| u64::try_from(number).ok();
        let level = |three: &[i64]| {
            let [whole, micros, besides] = three.try_into().ok()?;
            Some(Level { whole: number(whole)?, micros: number(micros)?, besides: number(besides)? })
        };
        let count = |two: &[i64]| {
            let [ours, others] = two.try_into().ok()?;
            Some(Count { ours: number(ours)?, others: number(others)? })
        };
        let answer = Answer {
            granted: match head[0] {
                0 => false,
                1 => true,
                _ => return None,
            },
            now: number(head[1])?,
            begun: number(head[2])?,
            buckets: buckets.chunks(3).map(level).collect::<Option<_>>()?,
            places: places.chunks(2).map(count).collect::<Option<_>>()?,
        };
        let asked_for = self.buckets.iter().zip(&answer.buckets).all(|(ask, level)| level.besides <= ask.besides);
        let none_beyond = self.places.iter().zip(&answer.places).all(|(ask, count)| {
            count.ours >= ask.running && count.ours - ask.running <= ask.need.saturating_add(ask.besides)
        });
        (asked_for && none_beyond).then_some(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call() -> Call {
        let bucket = Bucket { besides: 5, ..Bucket::default() };
        let places = Places { running: 2, need: 1, ..Places::default() };
        Call { buckets: vec![bucket], places: vec![places], ..Call::default() }
    }

    #[test]
    fn an_answer_is_read_as_the_script_writes_it() {
        let answer = call().read(&[1, 1_700_000_000_000_000, 7, 40, 30, 5, 3, 9]).unwrap();
        assert!(answer.granted);
        assert_eq!((answer.now, answer.begun), (1_700_000_000_000_000, 7));
        assert_eq!(answer.buckets, [Level { whole: 40, micros: 30, besides: 5 }]);
        assert_eq!(answer.places, [Count { ours: 3, others: 9 }]);
    }

    #[test]
    fn nonsense_is_no_answer() {
        let good = [1, 1, 7, 40, 30, 5, 3, 9];
        for end in 0..good.len() {
            assert_eq!(call().read(&good[..end]), None, "cut at {end}");
        }
        assert_eq!(call().read(&[good.as_slice(), &[0]].concat()), None, "one too many");
        for (at, number) in [(0, 2), (0, -1), (1, -1), (3, -5), (5, 6), (6, 1), (6, 4), (7, i64::MIN)] {
            let mut numbers = good;
            numbers[at] = number;
            assert_eq!(call().read(&numbers), None, "{number} at {at}");
        }
    }
}

//! A call to the store and its result, in the script's format.
//!
//! The names are those of the script (`script.lua`), which has the arithmetic. Public so that tests can
//! compare it with the [`LocalLimiter`](crate::admit::limit::LocalLimiter).

use std::sync::Arc;
use std::time::Duration;

use crate::types::Tick;

/// The script that maintains a tenant's balances.
pub const SCRIPT: &str = include_str!("script.lua");

/// Version of the stored layout. A key with another version is not written.
pub const LAYOUT: &str = "1";

/// Expiry of a gateway's count of running requests after its last report.
pub const COUNT_LIFE: Duration = Duration::from_secs(15);

/// How long the store keeps the mark of a gateway's last call. A mark half as old is not relied on.
pub const MARK_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

/// The marks of one gateway's calls about one key: numbers that rise. The store keeps the last one, so that a
/// gateway which finds a lower one than it wrote knows that the store has gone back to older data.
#[derive(Clone, Debug, Default)]
pub(super) struct CallMarks {
    made: u64,
    known: Option<KnownCall>,
}

/// The last answered call.
#[derive(Clone, Copy, Debug)]
struct KnownCall {
    mark: u64,
    /// Creation time of the state then.
    begun: u64,
    answered: Tick,
}

impl CallMarks {
    /// Puts a new mark on a call, with what the store must have.
    pub fn put_on(&mut self, call: &mut LuaCall, at: Tick) {
        self.made += 1;
        let known = self.known.filter(|known| at.since(known.answered) < MARK_LIFE / 2);
        (call.known_mark, call.known_begun) = known.map_or((0, 0), |known| (known.mark, known.begun));
        call.mark = self.made;
    }

    /// A call with this mark was answered from state created at `begun`.
    pub fn answered(&mut self, mark: u64, begun: u64, at: Tick) {
        if self.known.is_none_or(|known| known.mark < mark) {
            self.known = Some(KnownCall { mark, begun, answered: at });
        }
    }
}

/// One call for one tenant, all or nothing.
#[derive(Clone, Debug, Default)]
pub struct LuaCall {
    /// The tenant's key.
    pub key: Arc<str>,
    /// The calling gateway's name: letters and digits.
    pub gateway: Arc<str>,
    /// Expiry of the key after this call.
    pub key_life: Duration,
    /// Mark of this call; 0 for none.
    pub mark: u64,
    /// Mark of this gateway's last answered call; a lower one in the store begins its state anew.
    pub known_mark: u64,
    /// Creation time of the state then; another one is a loss that was found already.
    pub known_begun: u64,
    /// One per rate limit.
    pub buckets: Vec<BucketArgs>,
    /// One per concurrency limit.
    pub places: Vec<ConcurrencyArgs>,
}

/// A rate limit in a call. All amounts are at most 2^53.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketArgs {
    /// Its field in the tenant's hash.
    pub field: Arc<str>,
    /// Refill per minute.
    pub per_minute: u64,
    /// Capacity.
    pub burst: u64,
    /// Returned part of earlier grants.
    pub back: u64,
    /// Used beyond the grants.
    pub owed: u64,
    /// Needed, of all limits together or none.
    pub need: u64,
    /// Wanted beyond the need, as far as available.
    pub besides: u64,
    /// Creation time of the last reported state; 0 if none.
    pub begun: u64,
    /// Used here without asking while the store was unavailable.
    pub unheard: u64,
    /// Spent amount of the last reported state, not yet refilled: charged if the store lost it, as far as no
    /// other gateway reported it.
    pub remembered: u64,
}

/// A concurrency limit in a call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConcurrencyArgs {
    /// Its field in the tenant's hash.
    pub field: Arc<str>,
    /// The limit.
    pub most: u64,
    /// How many run here, absolute.
    pub running: u64,
    /// Needed.
    pub need: u64,
    /// Wanted beyond the need, as far as available.
    pub besides: u64,
}

/// The store's result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LuaReply {
    /// Whether everything needed was available and taken.
    pub granted: bool,
    /// The store's time, microseconds since 1970.
    pub now: u64,
    /// Creation time of the state.
    pub begun: u64,
    /// One per bucket of the call.
    pub buckets: Vec<BucketLevel>,
    /// One per concurrency limit of the call.
    pub places: Vec<ConcurrencyCount>,
}

/// State of a bucket after a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketLevel {
    /// Whole tokens spent.
    pub whole: u64,
    /// Plus this many sixty-millionths.
    pub micros: u64,
    /// Granted beyond the need.
    pub besides: u64,
}

/// State of a concurrency limit after a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConcurrencyCount {
    /// Granted to this gateway, running ones included.
    pub ours: u64,
    /// Granted to others.
    pub others: u64,
}

impl LuaCall {
    /// The script's arguments after the key.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let head = [
            LAYOUT.to_owned(),
            self.gateway.to_string(),
            self.key_life.as_millis().to_string(),
            COUNT_LIFE.as_micros().to_string(),
            self.mark.to_string(),
            self.known_mark.to_string(),
            self.known_begun.to_string(),
            MARK_LIFE.as_micros().to_string(),
            self.buckets.len().to_string(),
            self.places.len().to_string(),
        ];
        let mut all = Vec::from(head);
        for BucketArgs { field, per_minute, burst, back, owed, need, besides, begun, unheard, remembered } in
            &self.buckets
        {
            all.push(field.to_string());
            all.extend([per_minute, burst, back, owed, need, besides, begun, unheard, remembered].map(u64::to_string));
        }
        for ConcurrencyArgs { field, most, running, need, besides } in &self.places {
            all.push(field.to_string());
            all.extend([most, running, need, besides].map(u64::to_string));
        }
        all
    }

    /// Parses the result of this call; `None` if malformed.
    #[must_use]
    pub fn read(&self, numbers: &[i64]) -> Option<LuaReply> {
        let (head, rest) = numbers.split_at_checked(3)?;
        let (buckets, places) = rest.split_at_checked(3 * self.buckets.len())?;
        if places.len() != 2 * self.places.len() {
            return None;
        }
        let number = |number: i64| u64::try_from(number).ok();
        let level = |three: &[i64]| {
            let [whole, micros, besides] = three.try_into().ok()?;
            Some(BucketLevel { whole: number(whole)?, micros: number(micros)?, besides: number(besides)? })
        };
        let count = |two: &[i64]| {
            let [ours, others] = two.try_into().ok()?;
            Some(ConcurrencyCount { ours: number(ours)?, others: number(others)? })
        };
        let answer = LuaReply {
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

    fn call() -> LuaCall {
        let bucket = BucketArgs { besides: 5, ..BucketArgs::default() };
        let places = ConcurrencyArgs { running: 2, need: 1, ..ConcurrencyArgs::default() };
        LuaCall { buckets: vec![bucket], places: vec![places], ..LuaCall::default() }
    }

    #[test]
    fn an_answer_is_read_as_the_script_writes_it() {
        let answer = call().read(&[1, 1_700_000_000_000_000, 7, 40, 30, 5, 3, 9]).unwrap();
        assert!(answer.granted);
        assert_eq!((answer.now, answer.begun), (1_700_000_000_000_000, 7));
        assert_eq!(answer.buckets, [BucketLevel { whole: 40, micros: 30, besides: 5 }]);
        assert_eq!(answer.places, [ConcurrencyCount { ours: 3, others: 9 }]);
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

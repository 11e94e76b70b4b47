//! Model of an engine's prefix cache: which prompt blocks (hashed by `inspect`) it should hold, from the
//! time it computed them until as many other tokens were computed as its cache holds.
//!
//! Pure. One [`PrefixIndex`] per engine. It evicts as engines do: least recently used first, and of one
//! prompt the deepest block first. A block is never used without all before it, so if a block is held, all
//! before it are, and [`held`](PrefixIndex::held) finds the last one by binary search.
//!
//! This is an estimate: an engine may cache nothing, may have been filled by another gateway, or may have
//! restarted. [`credit`](PrefixIndex::credit) says how accurate it was recently:
//!
//! - If responses report cached tokens, the share of expected tokens that were reported. vLLM omits the
//!   detail if nothing was cached, so once an engine has reported any, its absence counts as zero.
//! - If no response ever reported any, how much earlier the first token came than without the cache,
//!   relative to the expected difference. The scale of expectations is learned from requests without a hit;
//!   each hit is weighted by the time it should save, and a request that waited long does not count more
//!   than one that gained nothing.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::time::Duration;

use crate::types::{Tick, Tokens};

/// Bytes of a prompt block (made by `inspect`).
const BLOCK: f64 = 512.0;
/// Cache size of an engine that does not report it; less than most have.
pub const USUAL_ROOM: Tokens = Tokens(192 * 1024);
/// Most entries of one engine's index: 7 MB of text, about 1 MB of memory.
pub const MOST_ENTRIES: usize = 14_000;
/// Most blocks of a prompt; `inspect` reports no more.
const LONGEST: usize = 128;
/// Age at which an unused entry is discarded, because what happened meanwhile is unknown.
const OLDEST: Duration = Duration::from_secs(3600);

/// Initial credit, weighted like this many expected tokens.
const AT_FIRST: f64 = 0.5;
const WEIGHT_AT_FIRST: f64 = 1024.0;
/// Remaining weight of earlier observations after a new one.
const KEPT: f64 = 1.0 - 1.0 / 32.0;
/// Requests without a hit needed for their scale.
const ENOUGH: u32 = 4;
/// Largest factor by which one of them moves the scale: initially, and later.
const STEPS: (f64, f64) = (1.25, 1.03);
/// Smallest saving, relative to TTFT, for a hit to be evidence.
const TELLING: f64 = 0.25;
/// Conversion of saved seconds to expected tokens, at a typical prefill speed.
const TOKENS_PER_SECOND: f64 = 5000.0;

/// The blocks that one engine should hold.
#[derive(Debug)]
pub struct PrefixIndex {
    places: HashMap<u64, u32, ahash::RandomState>,
    /// Entries and free slots, linked in order of use.
    entries: Vec<PrefixEntry>,
    free: Vec<u32>,
    oldest: u32,
    newest: u32,
    /// Tokens of all entries, and their limit.
    held: u64,
    room: u64,
    /// Tokens per block.
    tokens: u32,
    at: Tick,
    belief: CacheCredit,
}

#[derive(Clone, Copy, Debug)]
struct PrefixEntry {
    /// `None`: computed tokens that are no prompt block.
    hash: Option<NonZeroU64>,
    tokens: u32,
    older: u32,
    newer: u32,
    used: Tick,
}

/// No entry.
const NONE: u32 = u32::MAX;

impl Default for PrefixIndex {
    fn default() -> Self {
        PrefixIndex::new()
    }
}

impl PrefixIndex {
    /// The index of an engine that has computed nothing, at the default size.
    #[must_use]
    pub fn new() -> Self {
        PrefixIndex {
            places: HashMap::default(),
            entries: Vec::new(),
            free: Vec::new(),
            oldest: NONE,
            newest: NONE,
            held: 0,
            room: USUAL_ROOM.0,
            tokens: (BLOCK / 4.0) as u32,
            at: Tick::default(),
            belief: CacheCredit::new(),
        }
    }

    /// Sets the cache size (`None` if unknown) and the model's bytes per
    /// token.
    pub fn resize(&mut self, room: Option<Tokens>, bytes_per_token: f64) {
        self.room = room.unwrap_or(USUAL_ROOM).0;
        self.tokens = (BLOCK / bytes_per_token.max(0.1)).max(1.0) as u32;
        self.evict();
    }

    /// Number of leading blocks that the engine should hold.
    #[must_use]
    pub fn held(&self, blocks: &[u64]) -> usize {
        blocks.partition_point(|block| self.places.contains_key(block))
    }

    /// Tokens in this many blocks.
    #[must_use]
    pub fn tokens(&self, blocks: usize) -> Tokens {
        Tokens(blocks as u64 * u64::from(self.tokens))
    }

    /// Records that the engine computed these blocks of one prompt, or had them cached.
    pub fn note(&mut self, blocks: &[u64], at: Tick) {
        self.forget_before(at);
        let most = (self.room / u64::from(self.tokens)).min(LONGEST as u64) as usize;
        // The first block is recorded last, so that it is evicted last.
        for &block in blocks[..blocks.len().min(most)].iter().rev() {
            // A hash of 0 occurs once in 2^64.
            let Some(hash) = NonZeroU64::new(block) else { continue };
            let place = match self.places.get(&block) {
                Some(&place) => {
                    self.unlink(place);
                    place
                }
                None => self.add(Some(hash), self.tokens),
            };
            self.link(place);
        }
        self.evict();
    }

    /// Records computed tokens that are no prompt block: output, and the rest of a prompt. They occupy the
    /// cache as well.
    pub fn note_other(&mut self, tokens: Tokens, at: Tick) {
        self.forget_before(at);
        let tokens = tokens.0.min(self.room).min(u64::from(u32::MAX)) as u32;
        if tokens == 0 {
            return;
        }
        match self.entries.get_mut(self.newest as usize) {
            // Merged, because many small entries would fill the index.
            Some(newest) if newest.hash.is_none() && newest.tokens.max(tokens) < self.tokens => {
                newest.tokens += tokens;
                newest.used = self.at;
                self.held += u64::from(tokens);
            }
            _ => {
                let place = self.add(None, tokens);
                self.link(place);
            }
        }
        self.evict();
    }

    /// The engine restarted: it holds nothing, and may be configured differently.
    pub fn clear(&mut self) {
        *self = PrefixIndex { room: self.room, tokens: self.tokens, at: self.at, ..PrefixIndex::new() };
    }

    /// Learns from a response with usage. `expected`: tokens of the blocks [`held`](Self::held) at dispatch,
    /// regardless of credit; `reported`: cached tokens of its usage, if
    /// any.
    pub fn observed(&mut self, expected: Tokens, reported: Option<Tokens>) {
        self.belief.observed(expected, reported);
    }

    /// Learns from a first token. `hit` and `miss`: expected times after dispatch with and without the cached
    /// blocks (equal if none), in any unit, because the scale is learned. `took`: the
    /// measured time.
    pub fn timed(&mut self, hit: Duration, miss: Duration, took: Duration) {
        self.belief.timed(hit.as_secs_f64(), miss.as_secs_f64(), took.as_secs_f64());
    }

    /// Recent accuracy from 0 to 1: the value of what `held` says.
    #[must_use]
    pub fn credit(&self) -> f64 {
        self.belief.credit()
    }

    /// Memory of the index, bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        // One control byte per bucket, of which one in eight stays empty.
        let buckets = (self.places.capacity() * 8).div_ceil(7).next_power_of_two();
        let map = if self.places.capacity() == 0 { 0 } else { buckets * (size_of::<(u64, u32)>() + 1) + 16 };
        map + self.entries.capacity() * size_of::<PrefixEntry>() + self.free.capacity() * size_of::<u32>()
    }

    /// Allocates an entry outside the list.
    fn add(&mut self, hash: Option<NonZeroU64>, tokens: u32) -> u32 {
        self.held += u64::from(tokens);
        let entry = PrefixEntry { hash, tokens, older: NONE, newer: NONE, used: self.at };
        let place = self.free.pop().unwrap_or(self.entries.len() as u32);
        match self.entries.get_mut(place as usize) {
            Some(free) => *free = entry,
            None => self.entries.push(entry),
        }
        if let Some(hash) = hash {
            self.places.insert(hash.get(), place);
        }
        place
    }

    /// Appends an entry as the most recently used.
    fn link(&mut self, place: u32) {
        let newest = std::mem::replace(&mut self.newest, place);
        let entry = &mut self.entries[place as usize];
        (entry.older, entry.newer, entry.used) = (newest, NONE, self.at);
        match self.entries.get_mut(newest as usize) {
            Some(older) => older.newer = place,
            None => self.oldest = place,
        }
    }

    fn unlink(&mut self, place: u32) {
        let PrefixEntry { older, newer, .. } = self.entries[place as usize];
        match self.entries.get_mut(older as usize) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
        match self.entries.get_mut(newer as usize) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
    }

    /// Evicts least recently used entries until the rest fits.
    fn evict(&mut self) {
        while self.held > self.room || self.entries.len() - self.free.len() > MOST_ENTRIES {
            self.drop_oldest();
        }
    }

    fn forget_before(&mut self, at: Tick) {
        self.at = self.at.max(at);
        while let Some(oldest) = self.entries.get(self.oldest as usize)
            && self.at.since(oldest.used) > OLDEST
        {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        let place = self.oldest;
        let PrefixEntry { hash, tokens, .. } = self.entries[place as usize];
        self.unlink(place);
        self.free.push(place);
        self.held -= u64::from(tokens);
        if let Some(hash) = hash {
            self.places.remove(&hash.get());
        }
    }
}

/// Accuracy of the expected cache content.
#[derive(Clone, Copy, Debug)]
struct CacheCredit {
    /// Expected tokens and those found, plus the initial assumption; both
    /// decay.
    expected: f64,
    found: f64,
    /// Whether a response has reported cached tokens.
    reports: bool,
    /// Measured over expected TTFT without a hit (median), and the number of samples.
    scale: f64,
    misses: u32,
}

impl CacheCredit {
    const fn new() -> Self {
        CacheCredit { expected: 0.0, found: 0.0, reports: false, scale: 1.0, misses: 0 }
    }

    fn credit(&self) -> f64 {
        let found = self.found + AT_FIRST * WEIGHT_AT_FIRST;
        (found / (self.expected + WEIGHT_AT_FIRST)).clamp(0.0, 1.0)
    }

    fn learn(&mut self, expected: f64, share: f64) {
        self.expected = self.expected * KEPT + expected;
        self.found = self.found * KEPT + expected * share;
    }

    fn observed(&mut self, expected: Tokens, reported: Option<Tokens>) {
        if !self.reports && reported.is_some_and(|cached| cached.0 > 0) {
            // One report is worth more than everything learned from times.
            *self = CacheCredit { reports: true, ..CacheCredit::new() };
        }
        if expected.0 > 0 && (self.reports || reported.is_some()) {
            let cached = reported.map_or(0.0, |cached| cached.0 as f64);
            self.learn(expected.0 as f64, (cached / expected.0 as f64).min(1.0));
        }
    }

    fn timed(&mut self, hit: f64, miss: f64, took: f64) {
        if self.reports || miss <= 0.0 {
            return;
        }
        let saved = (miss - hit).max(0.0);
        if saved == 0.0 {
            return self.calibrate(took / miss);
        }
        if saved < TELLING * miss || self.misses < ENOUGH {
            return;
        }
        let gained = (self.scale * miss - took) / (self.scale * saved);
        self.learn(self.scale * saved * TOKENS_PER_SECOND, gained.clamp(0.0, 1.0));
    }

    /// Moves the scale towards the median.
    fn calibrate(&mut self, ratio: f64) {
        self.misses = self.misses.saturating_add(1);
        if self.misses == 1 {
            self.scale = ratio.max(f64::MIN_POSITIVE);
            return;
        }
        let most = if self.misses < 8 * ENOUGH { STEPS.0 } else { STEPS.1 };
        self.scale *= (ratio / self.scale).clamp(1.0 / most, most);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The hash chain of a prompt with these blocks.
    fn chain(blocks: &[u8]) -> Vec<u64> {
        let next = |hash: &mut u64, block: &u8| {
            *hash = (*hash ^ u64::from(*block) ^ 0x55).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
            Some(*hash)
        };
        blocks.iter().scan(1, next).collect()
    }

    fn at(seconds: u64) -> Tick {
        Tick::from_millis(1000 * seconds)
    }

    fn of_room(blocks: u64) -> PrefixIndex {
        let mut index = PrefixIndex::new();
        index.resize(Some(Tokens(blocks * 128)), 4.0);
        index
    }

    /// Reference implementation: time of use and depth of every block.
    #[derive(Default)]
    struct Slow {
        held: Vec<(u64, Tick, usize, usize)>,
        turn: usize,
        room: usize,
    }

    impl Slow {
        fn held(&self, blocks: &[u64]) -> usize {
            blocks.iter().take_while(|block| self.held.iter().any(|held| held.0 == **block)).count()
        }

        fn note(&mut self, blocks: &[u64], at: Tick) {
            self.turn += 1;
            self.held.retain(|held| at.since(held.1) <= OLDEST);
            self.held.retain(|held| !blocks.contains(&held.0));
            self.held.extend(blocks.iter().enumerate().map(|(depth, block)| (*block, at, self.turn, depth)));
            while self.held.len() > self.room {
                let first = (0..self.held.len()).min_by_key(|i| (self.held[*i].2, usize::MAX - self.held[*i].3));
                self.held.remove(first.unwrap());
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Note(Vec<u8>, u64),
        Resize(u64),
        Clear,
    }

    fn step() -> impl Strategy<Value = Step> {
        // Few words, so that prompts often share a beginning.
        let prompt = proptest::collection::vec(0u8..2, 0..8);
        prop_oneof![
            30 => (prompt, prop_oneof![9 => 0u64..60, 1 => 0u64..4000]).prop_map(|(p, s)| Step::Note(p, s)),
            1 => (0u64..30).prop_map(Step::Resize),
            1 => Just(Step::Clear),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_slow_one(
            room in 0u64..30,
            steps in proptest::collection::vec(step(), 1..120),
            asked in proptest::collection::vec(proptest::collection::vec(0u8..2, 0..8), 20),
        ) {
            let (mut index, mut slow) = (of_room(room), Slow { room: room as usize, ..Slow::default() });
            let mut now = 0;
            for step in steps {
                match step {
                    Step::Note(prompt, later) => {
                        now += later;
                        index.note(&chain(&prompt), at(now));
                        slow.note(&chain(&prompt), at(now));
                    }
                    Step::Resize(room) => {
                        index.resize(Some(Tokens(room * 128)), 4.0);
                        slow.room = room as usize;
                        slow.note(&[], at(now));
                    }
                    Step::Clear => {
                        index.clear();
                        slow.held.clear();
                    }
                }
                for prompt in &asked {
                    prop_assert_eq!(index.held(&chain(prompt)), slow.held(&chain(prompt)));
                }
                prop_assert_eq!(index.held as usize, slow.held.len() * 128);
                prop_assert_eq!(index.places.len(), slow.held.len());
                prop_assert_eq!(index.entries.len() - index.free.len(), slow.held.len());
            }
        }

        #[test]
        fn room_is_kept_whatever_else_is_computed(
            room in 0u64..5000,
            steps in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..20), 0u64..3000), 1..100),
        ) {
            let mut index = PrefixIndex::new();
            index.resize(Some(Tokens(room)), 3.8);
            for (turn, (prompt, other)) in steps.into_iter().enumerate() {
                index.note(&chain(&prompt), at(turn as u64));
                index.note_other(Tokens(other), at(turn as u64));
                let mut tokens = 0;
                let mut place = index.oldest;
                let mut count = 0;
                while let Some(entry) = index.entries.get(place as usize) {
                    tokens += u64::from(entry.tokens);
                    count += 1;
                    prop_assert!(entry.hash.is_none_or(|hash| index.places[&hash.get()] == place));
                    place = entry.newer;
                }
                prop_assert!(index.held <= room && index.held == tokens);
                prop_assert_eq!(index.entries.len() - index.free.len(), count);
            }
        }

        #[test]
        fn credit_is_a_share_whatever_is_told(
            told in proptest::collection::vec((any::<u32>(), proptest::option::of(any::<u32>()), 0u64..9000, 0u64..9000, 0u64..9000), 0..60),
        ) {
            let mut index = PrefixIndex::new();
            for (expected, reported, hit, miss, took) in told {
                let [hit, miss, took] = [hit, miss, took].map(Duration::from_millis);
                index.timed(hit, miss, took);
                prop_assert!((0.0..=1.0).contains(&index.credit()));
                index.observed(Tokens(expected.into()), reported.map(|cached| Tokens(cached.into())));
                prop_assert!((0.0..=1.0).contains(&index.credit()));
            }
        }
    }

    #[test]
    fn the_deepest_blocks_of_the_prompt_used_longest_ago_go_first() {
        let mut index = of_room(8);
        let (one, two) = (chain(&[1, 2, 3, 4]), chain(&[5, 6, 7, 8]));
        index.note(&one, at(1));
        index.note(&two, at(2));
        assert_eq!((index.held(&one), index.held(&two)), (4, 4));
        index.note(&chain(&[9]), at(3));
        assert_eq!((index.held(&one), index.held(&two)), (3, 4));
        // After reuse the other one is evicted.
        index.note(&one[..2], at(4));
        index.note(&chain(&[10, 11]), at(5));
        assert_eq!((index.held(&one), index.held(&two)), (2, 3));
    }

    #[test]
    fn answers_take_room_too() {
        let mut index = of_room(8);
        let one = chain(&[1, 2, 3, 4]);
        index.note(&one, at(1));
        index.note_other(Tokens(128 * 4), at(2));
        assert_eq!(index.held(&one), 4);
        index.note_other(Tokens(1), at(2));
        assert_eq!(index.held(&one), 3);
        // However small each is, they are few entries.
        let mut index = PrefixIndex::new();
        (0..100_000).for_each(|turn| index.note_other(Tokens(1), at(turn / 100)));
        assert!(index.entries.len() <= 100_000 / 128 + 1, "{}", index.entries.len());
        index.note_other(Tokens(u64::MAX), at(2000));
        assert_eq!(index.held, USUAL_ROOM.0);
    }

    #[test]
    fn what_was_not_used_for_an_hour_is_not_believed() {
        let mut index = PrefixIndex::new();
        let (one, two) = (chain(&[1, 2]), chain(&[3, 4]));
        index.note(&one, at(0));
        index.note(&two, at(1800));
        index.note(&chain(&[5]), at(3600));
        assert_eq!((index.held(&one), index.held(&two)), (2, 2));
        index.note(&chain(&[5]), at(3601));
        assert_eq!((index.held(&one), index.held(&two)), (0, 2));
    }

    #[test]
    fn an_engine_that_started_anew_holds_nothing_and_has_its_credit_to_earn() {
        let mut index = of_room(8);
        let one = chain(&[1, 2]);
        index.note(&one, at(1));
        (0..50).for_each(|_| index.observed(Tokens(1000), Some(Tokens(1000))));
        index.clear();
        assert_eq!((index.held(&one), index.credit(), index.memory()), (0, AT_FIRST, 0));
        index.note(&chain(&[1; 20]), at(2));
        assert_eq!(index.held(&chain(&[1; 20])), 8, "room is what it was");
    }

    #[test]
    fn memory_is_bounded_by_entries() {
        let mut index = PrefixIndex::new();
        index.resize(Some(Tokens(u64::MAX)), 4.0);
        for prompt in 0..40_000u64 {
            let blocks: Vec<u64> =
                (0..3).map(|block| (3 * prompt + block).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
            index.note(&blocks, at(prompt / 100));
        }
        assert_eq!(index.places.len(), MOST_ENTRIES);
        assert!(index.memory() < MOST_ENTRIES * 80, "{} bytes", index.memory());
        // A prompt longer than the limit adds no more.
        let long: Vec<u64> = (1..100_000).collect();
        index.note(&long, at(500));
        assert_eq!((index.held(&long), index.places.len()), (LONGEST, MOST_ENTRIES));
        assert!(index.memory() < MOST_ENTRIES * 80, "{} bytes", index.memory());
        // An engine of 200,000 tokens.
        let mut index = PrefixIndex::new();
        index.resize(Some(Tokens(200_000)), 3.8);
        (0..20_000u64).for_each(|block| index.note(&[block.wrapping_mul(0x9E37_79B9_7F4A_7C15)], at(1)));
        assert!(index.memory() < 150_000, "{} bytes", index.memory());
        assert_eq!(PrefixIndex::new().memory(), 0);
    }

    #[test]
    fn credit_follows_what_is_reported() {
        let mut index = PrefixIndex::new();
        assert_eq!(index.credit(), AT_FIRST);
        (0..20).for_each(|_| index.observed(Tokens(1500), Some(Tokens(1400))));
        assert!((0.88..0.94).contains(&index.credit()), "{}", index.credit());
        // More than expected counts as exactly right.
        (0..200).for_each(|_| index.observed(Tokens(1500), Some(Tokens(9000))));
        assert!((0.97..=1.0).contains(&index.credit()), "{}", index.credit());
        // Its cache was switched off.
        (0..100).for_each(|_| index.observed(Tokens(1500), Some(Tokens(0))));
        assert!(index.credit() < 0.06, "{}", index.credit());
        (0..100).for_each(|_| index.observed(Tokens(1500), Some(Tokens(1500))));
        assert!(index.credit() > 0.93, "{}", index.credit());
        // Without an expectation nothing is learned.
        let before = index.credit();
        index.observed(Tokens(0), Some(Tokens(700)));
        assert_eq!(index.credit(), before);
    }

    #[test]
    fn silence_is_none_only_of_an_engine_that_has_reported() {
        let mut index = PrefixIndex::new();
        (0..100).for_each(|_| index.observed(Tokens(1500), None));
        assert_eq!(index.credit(), AT_FIRST);
        index.observed(Tokens(0), Some(Tokens(16)));
        (0..100).for_each(|_| index.observed(Tokens(1500), None));
        assert!(index.credit() < 0.06);
    }

    /// An engine with 5,000 prompt tokens a second and steps of 30 ms; prompts of 1,000 to 4,000 tokens of which
    /// four fifths are expected to be cached, except for every third.
    fn timed(index: &mut PrefixIndex, caches: bool, scale: f64, wait: impl Fn(u32) -> f64) {
        for turn in 0..300 {
            let prompt = f64::from(1000 + 1000 * (turn % 4));
            let believed = if turn % 3 == 0 { 0.0 } else { 0.8 * prompt };
            let computed = if caches { prompt - believed } else { prompt };
            let times =
                [prompt - believed, prompt].map(|tokens| Duration::from_secs_f64(scale * (0.03 + tokens / 5000.0)));
            index.timed(times[0], times[1], Duration::from_secs_f64(0.03 + computed / 5000.0 + wait(turn)));
        }
    }

    #[test]
    fn where_nothing_is_reported_first_tokens_tell() {
        for scale in [0.01, 0.6, 1.0, 1.7, 50.0] {
            let wait = |turn: u32| [0.0, 0.02, 0.005, 0.04, 0.01, 0.0, 1.5][turn as usize % 7];
            let (mut with, mut without) = (PrefixIndex::new(), PrefixIndex::new());
            timed(&mut with, true, scale, wait);
            timed(&mut without, false, scale, wait);
            assert!(with.credit() > 0.75, "{scale}: {}", with.credit());
            assert!(without.credit() < 0.15, "{scale}: {}", without.credit());
            // An engine that reports is believed, not timed.
            without.observed(Tokens(1000), Some(Tokens(1000)));
            let before = without.credit();
            assert!(before > 0.7);
            timed(&mut without, false, scale, wait);
            assert_eq!(without.credit(), before);
        }
    }

    #[test]
    fn an_engine_that_became_slower_is_not_taken_for_one_without_a_cache_for_long() {
        let mut index = PrefixIndex::new();
        timed(&mut index, true, 1.0, |_| 0.0);
        timed(&mut index, true, 1.0 / 3.0, |_| 0.0);
        let times = [0.1, 0.5].map(Duration::from_secs_f64);
        for _ in 0..200 {
            index.timed(times[1], times[1], 3 * times[1]);
            index.timed(times[0], times[1], 3 * times[0]);
        }
        assert!(index.credit() > 0.9, "{}", index.credit());
    }

    #[test]
    fn a_hit_that_could_save_little_is_no_evidence() {
        let mut index = PrefixIndex::new();
        let [hit, miss] = [0.9, 1.0].map(Duration::from_secs_f64);
        (0..10).for_each(|_| index.timed(miss, miss, miss));
        (0..100).for_each(|_| index.timed(hit, miss, miss));
        assert_eq!(index.credit(), AT_FIRST);
        // Nothing is learned before the time of a miss is known.
        let mut index = PrefixIndex::new();
        (0..100).for_each(|_| index.timed(Duration::ZERO, miss, 2 * miss));
        index.timed(Duration::ZERO, Duration::ZERO, miss);
        assert_eq!(index.credit(), AT_FIRST);
    }
}

//! Which prompt blocks an engine still holds from earlier requests.

use std::collections::{BTreeMap, HashMap};

/// Tokens per block of the key-value cache.
pub const BLOCK: u64 = 16;

/// A least-recently-used set of block hashes. A block's hash covers everything before it, so
/// that a hit means the whole prefix up to there is the same.
#[derive(Debug, Default)]
pub(super) struct PrefixCache {
    stamp: u64,
    used: HashMap<u64, u64>,
    by_age: BTreeMap<u64, u64>,
}

impl PrefixCache {
    /// How many leading blocks of a prompt are held.
    pub fn hits(&mut self, blocks: &[u64]) -> u64 {
        let held = blocks.iter().take_while(|block| self.used.contains_key(block)).count();
        self.keep(&blocks[..held]);
        held as u64
    }

    /// Holds a prompt's blocks from now on.
    pub fn keep(&mut self, blocks: &[u64]) {
        for &block in blocks {
            self.stamp += 1;
            if let Some(before) = self.used.insert(block, self.stamp) {
                self.by_age.remove(&before);
            }
            self.by_age.insert(self.stamp, block);
        }
    }

    /// Forgets the oldest blocks until at most `room` are held: running requests need the rest.
    pub fn shrink(&mut self, room: u64) {
        while self.used.len() as u64 > room {
            let Some((_, oldest)) = self.by_age.pop_first() else { return };
            self.used.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_blocks_go_first_and_a_hit_makes_young() {
        let mut cache = PrefixCache::default();
        cache.keep(&[1, 2, 3]);
        assert_eq!(cache.hits(&[1, 9, 3]), 1);
        cache.shrink(2);
        assert_eq!((cache.hits(&[1]), cache.hits(&[2]), cache.hits(&[3])), (1, 0, 1));
    }
}

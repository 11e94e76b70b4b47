//! The engine's prefix cache.

use std::collections::{BTreeMap, HashMap};

/// Tokens per block of the KV cache.
pub const BLOCK: u64 = 16;

/// Prompt blocks held by an engine, by hash. A hash covers everything before the block, so a hit means an
/// equal prefix.
///
/// As in vLLM: running requests with equal beginnings share blocks; an unused block stays until its room is
/// needed, and the least recently used is evicted first, of one prompt the last
/// block first.
#[derive(Debug, Default)]
pub(super) struct PrefixCache {
    stamp: u64,
    blocks: HashMap<u64, BlockUse>,
    /// Unused blocks by last use.
    idle: BTreeMap<u64, u64>,
}

#[derive(Debug)]
enum BlockUse {
    /// By this many running requests.
    Used(u64),
    /// By none since then.
    Idle(u64),
}

impl PrefixCache {
    /// Number of leading blocks held.
    pub fn hits(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|block| self.blocks.contains_key(block)).count()
    }

    /// Number of these blocks that are unused, and would occupy room again when used.
    pub fn idle_of(&self, blocks: &[u64]) -> u64 {
        blocks.iter().filter(|block| matches!(self.blocks.get(block), Some(BlockUse::Idle(_)))).count() as u64
    }

    /// Number of used blocks.
    pub fn used(&self) -> u64 {
        (self.blocks.len() - self.idle.len()) as u64
    }

    /// A running request uses these blocks; missing ones are added.
    pub fn take(&mut self, blocks: &[u64]) {
        for block in blocks {
            let users = match self.blocks.get(block) {
                None => 1,
                Some(BlockUse::Used(users)) => users + 1,
                Some(BlockUse::Idle(since)) => {
                    self.idle.remove(since);
                    1
                }
            };
            self.blocks.insert(*block, BlockUse::Used(users));
        }
    }

    /// A running request no longer uses these blocks.
    pub fn leave(&mut self, blocks: &[u64]) {
        for block in blocks.iter().rev() {
            let left = match self.blocks.get(block) {
                Some(BlockUse::Used(users)) if *users > 1 => BlockUse::Used(users - 1),
                Some(BlockUse::Used(_)) => {
                    self.stamp += 1;
                    self.idle.insert(self.stamp, *block);
                    BlockUse::Idle(self.stamp)
                }
                Some(BlockUse::Idle(_)) | None => continue,
            };
            self.blocks.insert(*block, left);
        }
    }

    /// Evicts unused blocks, oldest first, until at most `room` of them are left.
    pub fn shrink(&mut self, room: u64) {
        while self.idle.len() as u64 > room {
            let Some((_, oldest)) = self.idle.pop_first() else { return };
            self.blocks.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_blocks_go_first_of_a_prompt_the_last_and_use_makes_young() {
        let mut cache = PrefixCache::default();
        cache.take(&[1, 2, 3]);
        cache.leave(&[1, 2, 3]);
        cache.take(&[8, 9]);
        cache.leave(&[8, 9]);
        assert_eq!((cache.hits(&[1, 2, 7, 3]), cache.used()), (2, 0));
        cache.take(&[1]);
        cache.leave(&[1]);
        cache.shrink(2);
        assert_eq!((cache.hits(&[1]), cache.hits(&[2]), cache.hits(&[8]), cache.hits(&[9])), (1, 0, 1, 0));
    }

    #[test]
    fn a_block_that_is_used_is_held_once_and_never_forgotten() {
        let mut cache = PrefixCache::default();
        cache.take(&[1, 2]);
        cache.take(&[1, 2]);
        cache.leave(&[1, 2]);
        assert_eq!((cache.used(), cache.idle_of(&[1, 2])), (2, 0));
        cache.shrink(0);
        assert_eq!(cache.hits(&[1, 2]), 2);
        cache.leave(&[1, 2]);
        assert_eq!((cache.used(), cache.idle_of(&[1, 2, 3])), (0, 2));
        cache.shrink(0);
        assert_eq!(cache.hits(&[1, 2]), 0);
    }
}

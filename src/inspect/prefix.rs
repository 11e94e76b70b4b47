//! Hash of a prompt's head, for prefix affinity, and the [`Chain`] of its blocks, as an engine's
//! prefix cache sees them.
//!
//! The head ends with the first part (a message, a text) that completes [`ENOUGH`] bytes, or
//! at [`LENGTH`]. A long system prompt is therefore a head by itself, and a short one is extended by
//! the first message of the conversation.

use super::blocks::{Chain, PromptSlot, fold};
use crate::types::Dialect;

/// Largest head, bytes. Long enough to distinguish system prompts, short enough to be nearly
/// free.
const LENGTH: usize = 4096;
/// Smallest head of complete parts, bytes, if the prompt is longer.
const ENOUGH: usize = 256;

/// Hashes of a prompt. Each costs as much as reading the rest of a short body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptHashes {
    /// That of its head: [`Facts::prefix_hash`](super::Facts::prefix_hash).
    pub head: bool,
    /// Those of its blocks: [`Facts::prefix_blocks`](super::Facts::prefix_blocks).
    pub blocks: bool,
}

impl PromptHashes {
    /// Neither hash.
    pub const NONE: PromptHashes = PromptHashes { head: false, blocks: false };
}

/// The head of a prompt. The hash depends on the text alone, not on frame boundaries or the
/// machine, so that all gateways send like prompts to the same engine.
#[derive(Debug)]
pub(super) struct PromptPrefix {
    head: Vec<u8>,
    /// Most bytes kept; 0 if the hash is not needed.
    most: usize,
    is_whole: bool,
    /// Hashes of the blocks.
    pub(super) chain: Chain,
}

impl PromptPrefix {
    /// Blocks are hashed only for generating dialects, because engines cache nothing else.
    pub(super) const fn new(dialect: Dialect) -> Self {
        PromptPrefix { head: Vec::new(), most: LENGTH, is_whole: false, chain: Chain::new(dialect.generates()) }
    }

    /// Skips the head's hash.
    pub(super) const fn leave_head(&mut self) {
        self.most = 0;
    }

    /// Whether more bytes would change a hash.
    pub(super) fn wants(&self) -> bool {
        self.head_wants() || self.chain.wants()
    }

    /// Whether more bytes would change the head's hash.
    pub(super) fn head_wants(&self) -> bool {
        !self.is_whole && self.head.len() < self.most
    }

    /// Adds a piece of prompt text.
    pub(super) fn push(&mut self, piece: &[u8]) {
        self.chain.push(piece);
        self.push_head(piece);
    }

    /// Adds digits of a token id.
    pub(super) fn push_id(&mut self, digits: &[u8]) {
        self.chain.push_id(digits);
        self.push_head(digits);
    }

    fn push_head(&mut self, piece: &[u8]) {
        if !self.head_wants() {
            return;
        }
        let room = self.most - self.head.len();
        let piece = &piece[..piece.len().min(room)];
        if self.head.capacity() == 0 {
            // Most prompts arrive in one piece, sometimes followed by a few small ones.
            self.head.reserve_exact((piece.len() + 64).min(self.most));
        }
        self.head.extend_from_slice(piece);
    }

    /// Ends a text, because `ab`, `c` is another prompt than `a`, `bc`.
    pub(super) fn part(&mut self) {
        self.chain.part();
        self.head_part();
    }

    /// Ends a token id.
    pub(super) fn id_ends(&mut self) {
        self.chain.id_ends();
        self.head_part();
    }

    /// Begins a top-level member; `None` if models do not read it.
    pub(super) fn member_begins(&mut self, slot: Option<PromptSlot>) {
        self.chain.begins(slot);
    }

    fn head_part(&mut self) {
        if self.head_wants() {
            // 0xFF occurs in no UTF-8 text.
            self.head.push(0xFF);
            self.is_whole = self.head.len() > ENOUGH;
        }
    }

    /// The hash; 0 only if there was no prompt.
    pub(super) fn hash(&self) -> u64 {
        if self.head.is_empty() {
            return 0;
        }
        let (words, rest) = self.head.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let words = words.iter().chain(std::iter::once(&last)).map(|word| u64::from_le_bytes(*word));
        words.fold(self.head.len() as u64, |hash, word| fold(hash ^ word ^ 0xA076_1D64_78BD_642F)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn hash(parts: &[&str]) -> u64 {
        let mut prefix = PromptPrefix::new(Dialect::Plain);
        for part in parts {
            prefix.push(part.as_bytes());
            prefix.part();
        }
        prefix.hash()
    }

    #[test]
    fn the_hash_is_the_same_for_ever() {
        assert_eq!(hash(&[]), 0);
        assert_eq!(hash(&["You are a helpful assistant."]), 9_421_006_706_151_689_517);
    }

    #[test]
    fn unneeded_hashes_are_not_computed() {
        let mut prefix = PromptPrefix::new(Dialect::Plain);
        prefix.leave_head();
        prefix.push(b"You are");
        prefix.part();
        assert!(!prefix.wants());
        assert_eq!((prefix.hash(), prefix.head.capacity()), (0, 0));
    }

    #[test]
    fn parts_and_bytes_tell_prompts_apart_but_only_at_the_front() {
        assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
        let (front, other) = ("x".repeat(LENGTH), "x".repeat(LENGTH - 1) + "y");
        assert_eq!(hash(&[&front, "one"]), hash(&[&front, "two"]));
        assert_ne!(hash(&[&front]), hash(&[&other]));
    }

    #[test]
    fn a_long_first_part_is_a_complete_head_and_a_short_one_is_not() {
        let (long, short) = ("s".repeat(ENOUGH), "s".repeat(ENOUGH - 1));
        assert_eq!(hash(&[&long, "one"]), hash(&[&long, "two"]));
        assert_eq!(hash(&[&long]), hash(&[&long, "two"]));
        assert_ne!(hash(&[&short, "one"]), hash(&[&short, "two"]));
        assert_eq!(hash(&[&short, "one", "more"]), hash(&[&short, "one", "other"]));
    }

    #[test]
    fn hashes_spread() {
        let all: HashSet<u64> = (0..10_000).map(|i| hash(&[&format!("prompt {i}")]) >> 44).collect();
        assert!(all.len() > 9_900, "{}", all.len());
    }
}

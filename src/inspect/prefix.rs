//! A hash of a prompt's head, for sending like prompts to like engines.
//!
//! The head ends with the first part (a message, a text) by which there are [`ENOUGH`] bytes, or
//! at [`LENGTH`]: a long system prompt is a head by itself, whatever is asked behind it, and a
//! short one is told apart by the first message of the conversation.

/// How much of a prompt is hashed, at most. Long enough to tell system prompts apart, short
/// enough to be nearly free.
const LENGTH: usize = 4096;
/// A head of whole parts is at least this long, if there is more.
const ENOUGH: usize = 256;

/// The head of a prompt. The hash depends on nothing but them: not on how the body
/// was cut, not on the machine, so that all gateways send alike prompts to one engine.
#[derive(Debug)]
pub(super) struct Prefix {
    head: Vec<u8>,
    /// How many bytes are kept at most: none where nobody asks for the hash.
    most: usize,
    is_whole: bool,
}

impl Prefix {
    pub(super) const fn new() -> Self {
        Prefix { head: Vec::new(), most: LENGTH, is_whole: false }
    }

    /// Of a body whose prefix nobody asks for.
    pub(super) const fn unasked() -> Self {
        Prefix { head: Vec::new(), most: 0, is_whole: false }
    }

    /// Whether more bytes would still change the hash.
    pub(super) fn wants(&self) -> bool {
        !self.is_whole && self.head.len() < self.most
    }

    pub(super) fn push(&mut self, piece: &[u8]) {
        if self.is_whole {
            return;
        }
        let room = self.most - self.head.len();
        let piece = &piece[..piece.len().min(room)];
        if self.head.capacity() == 0 {
            // Most prompts come in one piece, and then a few more.
            self.head.reserve_exact((piece.len() + 64).min(self.most));
        }
        self.head.extend_from_slice(piece);
    }

    /// A text or token id ended: `ab`, `c` is another prompt than `a`, `bc`.
    pub(super) fn part(&mut self) {
        if self.wants() {
            // A byte that no UTF-8 text contains.
            self.head.push(0xFF);
            self.is_whole = self.head.len() > ENOUGH;
        }
    }

    /// The hash; 0 only where there was no prompt.
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

/// Multiplies to 128 bits and folds the halves: every bit of the input reaches every bit of
/// the result.
fn fold(word: u64) -> u64 {
    let product = u128::from(word) * 0x9E37_79B9_7F4A_7C15;
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn hash(parts: &[&str]) -> u64 {
        let mut prefix = Prefix::new();
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
    fn nothing_is_kept_that_nobody_asks_for() {
        let mut prefix = Prefix::unasked();
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
    fn a_long_first_part_is_a_head_by_itself_and_a_short_one_is_not() {
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

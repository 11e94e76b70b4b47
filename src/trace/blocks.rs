//! Block hashes of a prompt's beginning.

/// Whole blocks of a prompt, from the front. Each hash covers its block and everything before it: two prompts whose
/// lists begin with the same `k` hashes begin with the same `k` blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptBlocks {
    /// Tokens per block; 0 if unknown.
    pub tokens: u64,
    /// One hash per whole block.
    pub hashes: Vec<u64>,
}

impl PromptBlocks {
    /// Blocks of a prompt of `input` tokens, from ids that name blocks. Ids of one trace may name a block alone or a
    /// block with its past: both give hashes that cover the past. An id of a block that the prompt does not fill is
    /// left out, because no cache can know it again.
    pub(super) fn from_ids(tokens: u64, input: u64, ids: impl IntoIterator<Item = u64>) -> Self {
        let whole = (input / tokens) as usize;
        let mut before = 0;
        let chained = |id: u64| {
            before = scrambled(before ^ scrambled(id));
            before
        };
        PromptBlocks { tokens, hashes: ids.into_iter().take(whole).map(chained).collect() }
    }

    /// The same structure with nothing in common with the original, nor with another number.
    #[must_use]
    pub fn renamed(&self, number: u64) -> Self {
        let salt = scrambled(number);
        PromptBlocks { tokens: self.tokens, hashes: self.hashes.iter().map(|hash| scrambled(hash ^ salt)).collect() }
    }
}

/// Hashes a number (the finalizer of splitmix64).
pub(super) const fn scrambled(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

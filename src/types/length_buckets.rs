//! Upper edges of the prompt length buckets.

use super::{LengthBucket, Tokens};

/// Upper edges of the length buckets, in estimated prompt tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthBuckets {
    /// The longest `short` prompt.
    pub short: Tokens,
    /// The longest `medium` prompt; longer ones are `long`.
    pub medium: Tokens,
}

impl Default for LengthBuckets {
    /// `{short: 1000, medium: 8000}`
    fn default() -> Self {
        LengthBuckets { short: Tokens(1000), medium: Tokens(8000) }
    }
}

impl LengthBuckets {
    /// The bucket of a prompt with this many tokens.
    #[must_use]
    pub fn of(&self, prompt: Tokens) -> LengthBucket {
        if prompt <= self.short {
            LengthBucket::Short
        } else if prompt <= self.medium {
            LengthBucket::Medium
        } else {
            LengthBucket::Long
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_belongs_to_the_shorter_bucket() {
        let buckets = LengthBuckets::default();
        assert_eq!(buckets.of(Tokens(1000)), LengthBucket::Short);
        assert_eq!(buckets.of(Tokens(1001)), LengthBucket::Medium);
        assert_eq!(buckets.of(Tokens(8000)), LengthBucket::Medium);
        assert_eq!(buckets.of(Tokens(8001)), LengthBucket::Long);
    }
}

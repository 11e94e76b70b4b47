//! Guaranteed shares of the priorities.

use std::fmt;

use crate::types::{Priority, Tokens};

/// Guaranteed shares in thousandths: of the tokens admitted while a priority waits, and of the places in a
/// full queue. The rest goes to the highest priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares([u16; 5]);

/// Invalid shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidShares {
    /// This priority could starve.
    Nothing(Priority),
    /// The guaranteed shares add up to more than 100 %.
    TooMuch {
        /// Their sum, in thousandths.
        sum: u32,
    },
}

impl fmt::Display for InvalidShares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidShares::Nothing(priority) => {
                write!(f, "rank {} has no share and could wait for ever", priority.as_str())
            }
            InvalidShares::TooMuch { sum } => write!(f, "the shares add up to {sum} thousandths, more than 1000"),
        }
    }
}

impl Default for Shares {
    /// 50 %, 20 %, 10 %, 5 % and 2 %, highest priority first.
    fn default() -> Self {
        Shares([500, 200, 100, 50, 20])
    }
}

impl Shares {
    /// Shares in thousandths, in the order of [`Priority::ALL`].
    ///
    /// # Errors
    /// [`InvalidShares`] if a priority has none, or they add up to more than 1000.
    pub fn new(thousandths: [u16; 5]) -> Result<Self, InvalidShares> {
        if let Some(at) = thousandths.iter().position(|share| *share == 0) {
            return Err(InvalidShares::Nothing(Priority::ALL[at]));
        }
        let sum = thousandths.iter().map(|share| u32::from(*share)).sum();
        if sum > 1000 { Err(InvalidShares::TooMuch { sum }) } else { Ok(Shares(thousandths)) }
    }

    /// The share of a priority, in thousandths.
    #[must_use]
    pub fn of(self, priority: Priority) -> u16 {
        self.0[priority as usize]
    }

    /// Bound on waiting: while a priority waits, at most this many tokens are admitted for others before one
    /// of its requests, where no request costs more than `largest`.
    ///
    /// Its entitlement grows by its share of each admitted token, and covers any of its requests after
    /// `largest / share`, overshot by at most one admission. From then on only priorities that are also
    /// entitled and were served less recently go first: each of the four others once at most.
    /// others once at most.
    #[must_use]
    pub fn longest_wait(self, priority: Priority, largest: Tokens) -> Tokens {
        let covered = largest.times(1000).0.div_ceil(u64::from(self.of(priority)));
        Tokens(covered) + largest.times(5)
    }

    /// Places in a queue of `max_waiting` that higher priorities cannot take.
    #[must_use]
    pub fn places(self, priority: Priority, max_waiting: usize) -> usize {
        max_waiting.saturating_mul(usize::from(self.of(priority))) / 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rank_goes_without_and_all_fit() {
        assert_eq!(Shares::new([500, 200, 100, 50, 20]), Ok(Shares::default()));
        assert_eq!(Shares::new([500, 200, 100, 50, 0]), Err(InvalidShares::Nothing(Priority::Batch)));
        assert_eq!(Shares::new([900, 50, 49, 1, 1]), Err(InvalidShares::TooMuch { sum: 1001 }));
    }

    #[test]
    fn the_bound_in_requests_of_equal_cost() {
        let bound = Shares::default().longest_wait(Priority::Low, Tokens(100));
        assert_eq!(bound, Tokens(2500), "one in twenty, and five");
    }
}

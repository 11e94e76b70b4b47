//! Mutations of heads, for tests of head parsers.

use proptest::prelude::*;
use proptest::sample::{Index, select};

/// A mutation of a head, and a length to cut it to.
#[derive(Clone, Debug)]
pub(crate) struct Changes {
    /// Position, bytes removed, text inserted.
    others: Vec<(Index, usize, &'static str)>,
    cut: Index,
}

/// A few mutations, mostly at delicate places.
pub(crate) fn changes() -> impl Strategy<Value = Changes> {
    let other = select(vec![
        "",
        "1",
        "7",
        " ",
        "\t",
        "\r",
        "\n",
        "\r\n",
        "\r\n\r\n",
        ":",
        "x",
        "\0",
        "\u{e9}",
        "close",
        ", 12",
        "\r\ncontent-length: 12",
    ]);
    let others = prop::collection::vec((any::<Index>(), 0usize..4, other), 0..3);
    (others, any::<Index>()).prop_map(|(others, cut)| Changes { others, cut })
}

impl Changes {
    /// The mutated head with bytes behind it, whole and cut.
    pub(crate) fn of(&self, head: &str) -> [Vec<u8>; 2] {
        let mut next = head.as_bytes().to_vec();
        for (at, length, other) in &self.others {
            let at = at.index(next.len());
            next.splice(at..(at + length).min(next.len()), other.bytes());
        }
        next.extend_from_slice(b"{\"a\": 1}\r\n\r\n");
        let cut = next[..self.cut.index(next.len())].to_vec();
        [next, cut]
    }
}

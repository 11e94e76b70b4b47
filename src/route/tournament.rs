//! Tournament tree over engines: every node has the best key below it and the number of engines with that
//! key. A change costs O(log n), and so does a uniform choice among
//! equals.

/// Sort key of an engine; the smallest wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// Available, full, cooling, out.
    pub rank: Rank,
    /// Load; for a cooling engine the moment at which it is free.
    pub load: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// Available.
    Free,
    /// At its concurrency limit.
    Full,
    /// Cooling down after push-back.
    Cooling,
    /// Unavailable.
    Out,
}

impl Key {
    pub const OUT: Key = Key { rank: Rank::Out, load: u64::MAX };
}

/// The tree: node 1 is the root, the children of `n` are `2n` and `2n + 1`, and the leaf of slot `i` is
/// `width + i`.
#[derive(Debug, Default)]
pub(super) struct Tournament {
    width: usize,
    nodes: Vec<TournamentNode>,
}

#[derive(Clone, Copy, Debug)]
struct TournamentNode {
    best: Key,
    equals: u32,
}

const EMPTY: TournamentNode = TournamentNode { best: Key::OUT, equals: 1 };

impl Tournament {
    /// The key of a slot; unset slots are out.
    pub fn key(&self, place: usize) -> Key {
        self.nodes.get(self.width + place).map_or(Key::OUT, |node| node.best)
    }

    /// Sets the key of a slot and updates its ancestors.
    pub fn set(&mut self, place: usize, key: Key) {
        if place >= self.width {
            self.widen(place + 1);
        }
        let mut node = self.width + place;
        self.nodes[node].best = key;
        while node > 1 {
            node /= 2;
            self.nodes[node] = self.play(node);
        }
    }

    /// A slot with the best key, chosen by `chance` among equals; `None` if all are out.
    pub fn best(&self, chance: u64) -> Option<usize> {
        let root = self.nodes.get(1).filter(|root| root.best.rank != Rank::Out)?;
        let mut skip = (chance % u64::from(root.equals)) as u32;
        let mut node = 1;
        while node < self.width {
            node *= 2;
            let left = self.nodes[node];
            if left.best != root.best {
                node += 1;
            } else if skip >= left.equals {
                skip -= left.equals;
                node += 1;
            }
        }
        Some(node - self.width)
    }

    fn play(&self, node: usize) -> TournamentNode {
        let (a, b) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
        match a.best.cmp(&b.best) {
            std::cmp::Ordering::Less => a,
            std::cmp::Ordering::Greater => b,
            std::cmp::Ordering::Equal => TournamentNode { best: a.best, equals: a.equals + b.equals },
        }
    }

    fn widen(&mut self, places: usize) {
        let width = places.next_power_of_two();
        let mut nodes = vec![EMPTY; 2 * width];
        let leaves = self.nodes.get(self.width..).unwrap_or_default();
        nodes[width..width + leaves.len()].copy_from_slice(leaves);
        (self.width, self.nodes) = (width, nodes);
        for node in (1..width).rev() {
            self.nodes[node] = self.play(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_looking_at_everybody(
            changes in proptest::collection::vec((0usize..37, 0u64..5, 0u8..4, any::<u64>()), 1..200),
        ) {
            let mut tree = Tournament::default();
            let mut plain = [Key::OUT; 37];
            for (place, load, rank, chance) in changes {
                let rank = [Rank::Free, Rank::Full, Rank::Cooling, Rank::Out][rank as usize];
                plain[place] = if rank == Rank::Out { Key::OUT } else { Key { rank, load } };
                tree.set(place, plain[place]);
                let best = *plain.iter().min().unwrap();
                let equals: Vec<_> = (0..37).filter(|&i| best.rank != Rank::Out && plain[i] == best).collect();
                let expected = (!equals.is_empty()).then(|| equals[(chance % equals.len() as u64) as usize]);
                prop_assert_eq!(tree.best(chance), expected);
            }
        }
    }

    #[test]
    fn nobody_is_best_where_nobody_is() {
        let mut tree = Tournament::default();
        assert_eq!(tree.best(0), None);
        tree.set(0, Key { rank: Rank::Free, load: 1 });
        assert_eq!(tree.best(0), Some(0));
        tree.set(0, Key::OUT);
        assert_eq!(tree.best(0), None);
    }
}

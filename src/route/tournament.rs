//! Keeps the best of many engines at hand: a tree of winners over their keys. One engine's
//! change costs O(log n), the best one nothing.

/// What engines are compared by; the least wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// First who is free, then who is cooling, last who cannot take anything.
    pub rank: Rank,
    /// Load; for a cooling engine the moment at which it is free.
    pub load: u64,
    /// Chance, to part equals.
    pub salt: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// Takes requests.
    Free,
    /// Pushed back a moment ago; stands behind the others.
    Cooling,
    /// Takes none.
    Out,
}

impl Key {
    pub const OUT: Key = Key { rank: Rank::Out, load: u64::MAX, salt: u32::MAX };
}

/// The tree. Leaf `i` stands at `width + i`; every inner node holds the winner of its two.
#[derive(Debug, Default)]
pub(super) struct Tournament {
    width: usize,
    keys: Vec<Key>,
    winners: Vec<u32>,
}

impl Tournament {
    /// The key at a place; places never set are out.
    pub fn key(&self, place: usize) -> Key {
        self.keys.get(place).copied().unwrap_or(Key::OUT)
    }

    /// Sets the key at a place and plays the games above it again.
    pub fn set(&mut self, place: usize, key: Key) {
        if place >= self.width {
            self.widen(place + 1);
        }
        self.keys[place] = key;
        let mut node = (self.width + place) / 2;
        while node >= 1 {
            self.winners[node] = self.play(node);
            node /= 2;
        }
    }

    /// The place of the best key, if it is not out.
    pub fn best(&self) -> Option<usize> {
        let place = match self.width {
            0 => return None,
            1 => 0,
            _ => self.winners[1] as usize,
        };
        (self.key(place).rank != Rank::Out).then_some(place)
    }

    fn play(&self, node: usize) -> u32 {
        let (a, b) = (self.winner(2 * node), self.winner(2 * node + 1));
        if self.keys[b as usize] < self.keys[a as usize] { b } else { a }
    }

    fn winner(&self, node: usize) -> u32 {
        if node >= self.width { (node - self.width) as u32 } else { self.winners[node] }
    }

    fn widen(&mut self, places: usize) {
        self.width = places.next_power_of_two();
        self.keys.resize(self.width, Key::OUT);
        self.winners = vec![0; self.width];
        for node in (1..self.width).rev() {
            self.winners[node] = self.play(node);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_looking_at_everybody(changes in proptest::collection::vec((0usize..37, 0u64..9, 0u8..3), 1..200)) {
            let mut tree = Tournament::default();
            let mut plain = [Key::OUT; 37];
            for (turn, (place, load, rank)) in changes.into_iter().enumerate() {
                let rank = [Rank::Free, Rank::Cooling, Rank::Out][rank as usize];
                plain[place] = Key { rank, load, salt: turn as u32 };
                tree.set(place, plain[place]);
                let best = (0..37).min_by_key(|&i| plain[i]).filter(|&i| plain[i].rank != Rank::Out);
                prop_assert_eq!(tree.best(), best);
            }
        }
    }

    #[test]
    fn nobody_is_best_where_nobody_is() {
        let mut tree = Tournament::default();
        assert_eq!(tree.best(), None);
        tree.set(0, Key { rank: Rank::Free, load: 1, salt: 0 });
        assert_eq!(tree.best(), Some(0));
        tree.set(0, Key::OUT);
        assert_eq!(tree.best(), None);
    }
}

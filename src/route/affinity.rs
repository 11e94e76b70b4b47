//! Affinity: which engine a key belongs to, so that like prompts, or the turns of a session, meet the
//! prefix cache that has them.
//!
//! Rendezvous hashing (Thaler and Ravishankar, *IEEE/ACM Trans. Networking* 6, 1998): every engine has a
//! weight for a key, and the heaviest is its home. When an engine leaves, only its own keys move; when one
//! joins, only those that become its own. Weights depend on names alone, so all gateways agree without
//! communication.
//!
//! With bounded loads (Mirrokni, Thorup and Zadimoghaddam, *Consistent Hashing with Bounded Loads*, SODA
//! 2018): an engine takes at most [`BOUND`] times the mean number of requests; beyond that a key goes to
//! the next engine in its own order, so that a popular key is cached by as many engines as it needs. With
//! few requests the bound would separate them needlessly, so [`AT_LEAST`] are always allowed.
//!
//! Choosing computes one multiplication per engine: O(n), unlike the rest of this module, and about a
//! quarter of a microsecond for a hundred engines.

/// Largest load relative to the mean.
const BOUND: f64 = 1.25;
/// Requests that an engine may always have.
const AT_LEAST: f64 = 4.0;

/// Most requests of an engine, if `free` engines have `requests` and one more comes.
pub(super) fn bound(requests: u64, free: u64) -> f64 {
    (BOUND * (requests + 1) as f64 / free.max(1) as f64).ceil().max(AT_LEAST)
}

/// Key of a session's name; never 0, which means no key.
#[must_use]
pub fn key_of(name: &[u8]) -> u64 {
    let (words, rest) = name.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let words = words.iter().chain(std::iter::once(&last)).map(|word| u64::from_le_bytes(*word));
    words.fold(name.len() as u64, |hash, word| fold(hash ^ word ^ 0xA076_1D64_78BD_642F)).max(1)
}

/// Weight of an engine (hash of its name) for a key.
pub(super) fn weight(engine: u64, key: u64) -> u64 {
    fold(fold(key ^ 0x2D35_8DCC_AA6C_78A5) ^ engine)
}

/// Multiplies to 128 bits and folds the halves, so that every input bit affects every output
/// bit.
fn fold(word: u64) -> u64 {
    let product = u128::from(word) * 0x9E37_79B9_7F4A_7C15;
    (product as u64) ^ ((product >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(engines: &[u64], key: u64) -> u64 {
        *engines.iter().max_by_key(|engine| weight(**engine, key)).unwrap()
    }

    fn engines(count: usize) -> Vec<u64> {
        (0..count).map(|n| key_of(format!("vllm-{n}.vllm:8000").as_bytes())).collect()
    }

    fn keys() -> impl Iterator<Item = u64> {
        (0..20_000).map(|n| key_of(format!("session {n}").as_bytes()))
    }

    #[test]
    fn a_key_is_the_same_for_ever() {
        assert_eq!(key_of(b"session"), key_of(b"session"));
        assert_ne!(key_of(b"session"), key_of(b"session\0"));
        assert_ne!(key_of(b""), 0);
        let home = home(&engines(5), key_of(b"a session"));
        assert_eq!(engines(5).iter().position(|engine| *engine == home), Some(HOME_OF_A_SESSION));
    }

    const HOME_OF_A_SESSION: usize = 0;

    #[test]
    fn keys_are_spread_evenly() {
        for count in [2, 3, 8, 50] {
            let engines = engines(count);
            let mean = 20_000 / count;
            for engine in &engines {
                let own = keys().filter(|key| home(&engines, *key) == *engine).count();
                // Four standard deviations.
                let off = 4.0 * (mean as f64).sqrt();
                assert!((own as f64 - mean as f64).abs() < off, "{own} of {mean} at one of {count}");
            }
        }
    }

    #[test]
    fn when_an_engine_leaves_only_its_own_keys_move() {
        let before = engines(8);
        let after = &before[..7];
        for key in keys() {
            let (old, new) = (home(&before, key), home(after, key));
            assert!(old == new || old == before[7]);
        }
    }

    #[test]
    fn the_bound_is_a_quarter_above_the_mean_and_never_fewer_than_four() {
        assert_eq!(bound(0, 10), 4.0);
        assert_eq!(bound(99, 10), 13.0);
        assert_eq!(bound(999, 10), 125.0);
    }
}

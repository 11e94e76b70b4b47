//! Problems in the settings, with position and correction.

use std::fmt;
use std::sync::Arc;

/// Position in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Path of keys and indices: `pools[0].engines[2].url`.
    pub path: Arc<str>,
    /// Line, starting at 1.
    pub line: u64,
    /// Column in characters, starting at 1.
    pub column: u64,
}

/// One problem. Its texts contain no secret: no key, and no value of an environment
/// variable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Problem {
    /// Path of keys and indices; empty for the file as a whole.
    pub path: Arc<str>,
    /// Line, starting at 1.
    pub line: u64,
    /// Column in characters, starting at 1.
    pub column: u64,
    /// The problem.
    pub message: String,
    /// How to fix it.
    pub way_out: String,
}

impl Problem {
    pub(super) fn new(place: &Location, message: impl Into<String>, way_out: impl Into<String>) -> Self {
        Problem {
            path: place.path.clone(),
            line: place.line,
            column: place.column,
            message: message.into(),
            way_out: way_out.into(),
        }
    }
}

impl fmt::Display for Problem {
    /// `12:7: pools[0].engines[2].url: problem; correction`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.line, self.column)?;
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        write!(f, "{}; {}", self.message, self.way_out)
    }
}

/// The known word most similar to this one, if any is similar enough.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    let near = known.into_iter().map(|other| (distance(&word, &other.to_lowercase()), other));
    let (far, best) = near.min_by_key(|(far, _)| *far)?;
    let allowed = (word.chars().count().max(best.chars().count()) / 3).max(1);
    (far <= allowed).then_some(best)
}

/// Edit distance, counting swapped neighbours as one edit.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(80).collect(), b.chars().take(80).collect());
    let mut before: Vec<usize> = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let same = usize::from(a[i - 1] != b[j - 1]);
            let mut least = (last[j - 1] + same).min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(before[j - 2] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_gets_a_suggestion() {
        let known = ["classify", "default_class", "pools", "routes"];
        assert_eq!(nearest("clasify", known), Some("classify"));
        assert_eq!(nearest("Pools", known), Some("pools"));
        assert_eq!(nearest("deafult_class", known), Some("default_class"));
        assert_eq!(nearest("route", known), Some("routes"));
        assert_eq!(nearest("kubernetes", known), None);
        assert_eq!(nearest("x", []), None);
    }

    #[test]
    fn a_swap_is_one_slip() {
        assert_eq!(distance("ab", "ba"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}

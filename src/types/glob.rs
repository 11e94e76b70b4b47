//! Name patterns in which `*` matches any text.

use std::fmt;
use std::sync::Arc;

/// A name pattern: `*` matches any text, including none; every other character matches itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Glob(Arc<str>);

impl Glob {
    /// The pattern as written.
    #[must_use]
    pub fn new(pattern: &str) -> Self {
        Glob(Arc::from(pattern))
    }

    /// The pattern as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Shares the pattern's text, for use as a label.
    #[must_use]
    pub fn text(&self) -> Arc<str> {
        self.0.clone()
    }

    /// Whether the pattern has no `*` and so matches one name only.
    #[must_use]
    pub fn is_literal(&self) -> bool {
        !self.0.contains('*')
    }

    /// Whether the pattern matches every name.
    #[must_use]
    pub fn is_any(&self) -> bool {
        !self.0.is_empty() && self.0.bytes().all(|byte| byte == b'*')
    }

    /// Whether `name` matches the whole pattern. Case-sensitive.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        // Also a pattern with stars fits itself.
        *self.0 == *name || fits(self.0.as_bytes(), name.as_bytes())
    }

    /// Whether every name matched by `other` is matched by this pattern too.
    #[must_use]
    pub fn covers(&self, other: &Glob) -> bool {
        // `other` is read as a name: its `*` is a character that only a `*` of this pattern can match.
        fits(self.0.as_bytes(), other.0.as_bytes())
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Backtracks to the last star only, so it takes at most pattern x name steps.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut last_star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                last_star = Some((p, n));
                p += 1;
            }
            Some(&byte) if byte == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match last_star {
                Some((star, taken)) => {
                    last_star = Some((star, taken + 1));
                    p = star + 1;
                    n = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_star_matches_any_text() {
        let cases = [
            ("llama-*", "llama-3-70b", true),
            ("llama-*", "llama-", true),
            ("llama-*", "my-llama-3", false),
            ("*", "", true),
            ("*-instruct", "qwen-instruct", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("org/*", "org/x/y", true),
            ("exact", "exact", true),
            ("exact", "Exact", false),
            ("a?c", "abc", false),
            ("", "", true),
            ("", "a", false),
        ];
        for (pattern, name, expected) in cases {
            assert_eq!(Glob::new(pattern).matches(name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn one_pattern_covers_another() {
        let covers = |a: &str, b: &str| Glob::new(a).covers(&Glob::new(b));
        assert!(covers("*", "llama-*"));
        assert!(covers("llama-*", "llama-3-*"));
        assert!(covers("llama-*", "llama-3"));
        assert!(covers("a*c", "a*b*c"));
        assert!(!covers("llama-3", "llama-*"));
        assert!(!covers("a*b", "a*"));
    }

    fn slow(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern.split_first(), name.split_first()) {
            (None, None) => true,
            (Some((b'*', rest)), None) => slow(rest, name),
            (Some((b'*', rest)), Some((_, tail))) => slow(rest, name) || slow(pattern, tail),
            (Some((a, rest)), Some((b, tail))) => a == b && slow(rest, tail),
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_slow_simple_one(pattern in "[ab*]{0,8}", name in "[ab]{0,10}") {
            prop_assert_eq!(Glob::new(&pattern).matches(&name), slow(pattern.as_bytes(), name.as_bytes()));
        }

        #[test]
        fn a_covering_pattern_matches_every_covered_name(a in "[ab*]{0,5}", b in "[ab*]{0,5}", name in "[ab]{0,6}") {
            let (a, b) = (Glob::new(&a), Glob::new(&b));
            prop_assert!(!a.covers(&b) || !b.matches(&name) || a.matches(&name));
        }
    }
}

//! Unknown paths and models: each kind is logged at most once a minute, and all appear in their access
//! lines.

use std::fmt::Write as _;
use std::time::Duration;

use parking_lot::Mutex;

use crate::types::Tick;

/// Log interval per kind.
const EVERY: Duration = Duration::from_secs(60);

/// Characters shown.
const LONGEST: usize = 128;

/// Throttled log of unknown paths and models.
#[derive(Debug, Default)]
pub(super) struct UnknownNames {
    paths: Mutex<ThrottledLog>,
    models: Mutex<ThrottledLog>,
}

/// Throttle of one kind.
#[derive(Debug, Default)]
struct ThrottledLog {
    last: Option<Tick>,
    /// Number not logged since then.
    since: u64,
}

impl UnknownNames {
    /// Reports an unknown path, without its query. Returns its displayable form.
    pub(super) fn path(&self, path: &str, at: Tick) -> String {
        let path = shown(path);
        if let Some(untold) = self.paths.lock().comes(at) {
            tracing::info!(path, untold, "request for an unknown path");
        }
        path
    }

    /// Reports a model that no route serves.
    pub(super) fn model(&self, model: &str, at: Tick) -> String {
        let model = shown(model);
        if let Some(untold) = self.models.lock().comes(at) {
            tracing::info!(model, untold, "request for a model that no route serves");
        }
        model
    }
}

impl ThrottledLog {
    /// Counts one; returns how many were suppressed before it, if it is to be logged.
    fn comes(&mut self, at: Tick) -> Option<u64> {
        if self.last.is_some_and(|last| at < last + EVERY) {
            self.since += 1;
            return None;
        }
        self.last = Some(at);
        Some(std::mem::take(&mut self.since))
    }
}

/// The displayable form of client input: shortened, with control characters (including those that change
/// text direction) escaped.
fn shown(name: &str) -> String {
    let mut shown = String::new();
    let mut left = LONGEST;
    for character in name.chars() {
        let is_odd = character.is_control()
            || matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
        let length = if is_odd { character.escape_default().count() } else { 1 };
        if length > left {
            break;
        }
        left -= length;
        match is_odd {
            true => write!(shown, "{}", character.escape_default()).expect("writing into a string cannot fail"),
            false => shown.push(character),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_and_its_control_characters_are_escaped() {
        for (name, expected) in [
            ("/v1/nothing", "/v1/nothing"),
            ("a\nb\t\u{7}", "a\\nb\\t\\u{7}"),
            ("\u{1b}[2J\u{7f}\u{9b}", "\\u{1b}[2J\\u{7f}\\u{9b}"),
            ("a\u{202e}b\u{2028}", "a\\u{202e}b\\u{2028}"),
            ("mod\u{e8}le", "mod\u{e8}le"),
            ("", ""),
        ] {
            assert_eq!(shown(name), expected);
        }
        assert_eq!(shown(&"\u{e8}".repeat(500)).chars().count(), 128);
        assert_eq!(shown(&format!("{}\n", "x".repeat(127))), "x".repeat(127), "no half of an escape");
    }

    #[test]
    fn one_a_minute_is_told_and_the_others_are_counted() {
        let mut told = ThrottledLog::default();
        let at = |seconds: u64| Tick::from_millis(seconds * 1000);
        let comes: Vec<_> = [0, 1, 59, 60, 61, 500].into_iter().map(|seconds| told.comes(at(seconds))).collect();
        assert_eq!(comes, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}

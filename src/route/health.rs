//! Whether an engine is alive, by evidence.
//!
//! A refused connection or an answer that says "I am not well" is evidence at once. A check
//! that times out is not: an engine under load answers late. It counts only when several in
//! a row stayed unanswered and the engine showed no other sign of life meanwhile: a token of any
//! answer, or an answer that was finished. An engine that was taken out for its silence alone is
//! back with the first of them; one that refuses or says that it is not well, only with a check.

use crate::units::Tick;

/// What a health check saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    /// It answered with 2xx or 3xx.
    Well,
    /// It answered with an error.
    Unwell {
        /// The answer's status.
        status: u16,
    },
    /// Nobody listens there.
    Refused,
    /// No answer in time, or one that broke off.
    NoAnswer,
}

impl Checked {
    /// Whether it says that the engine is leaving: what it has not answered yet it may never answer.
    /// Silence does not say so.
    #[must_use]
    pub const fn is_departure(self) -> bool {
        matches!(self, Checked::Refused | Checked::Unwell { status: 503 })
    }
}

/// What is known of an engine's health.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// No check has ended yet; it takes requests.
    #[default]
    Unknown,
    /// It takes requests.
    Up,
    /// It takes requests, but checks stay unanswered.
    Doubtful {
        /// Unanswered checks in a row.
        missed: u32,
        /// The first of them.
        since: Tick,
    },
    /// It takes none: it was silent for too long.
    Silent {
        /// The last unanswered check.
        since: Tick,
    },
    /// It takes none: it refused, or said that it is not well.
    Down,
}

/// What a check changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The engine came back.
    CameUp,
    /// The engine is taken out.
    WentDown,
}

impl Health {
    /// Unanswered checks in a row after which an engine is down, if nothing else succeeded.
    pub const MISSES: u32 = 3;

    /// Whether requests may go there.
    #[must_use]
    pub fn is_up(self) -> bool {
        !matches!(self, Health::Down | Health::Silent { .. })
    }

    /// A check ended. `last_alive` is the engine's last sign of life in answers to requests.
    #[must_use]
    pub fn note(&mut self, checked: Checked, last_alive: Option<Tick>, at: Tick) -> Option<Change> {
        let was_up = self.is_up();
        let lives_since = |since: Tick| last_alive.is_some_and(|alive| alive >= since);
        *self = match (checked, *self) {
            (Checked::Well, _) => Health::Up,
            (Checked::Unwell { .. } | Checked::Refused, _) | (Checked::NoAnswer, Health::Down) => Health::Down,
            (Checked::NoAnswer, Health::Silent { since }) if !lives_since(since) => Health::Silent { since: at },
            (Checked::NoAnswer, Health::Doubtful { missed, since }) if !lives_since(since) => {
                match missed + 1 >= Self::MISSES {
                    true => Health::Silent { since: at },
                    false => Health::Doubtful { missed: missed + 1, since },
                }
            }
            (Checked::NoAnswer, _) => Health::Doubtful { missed: 1, since: at },
        };
        match (was_up, self.is_up()) {
            (false, true) => Some(Change::CameUp),
            (true, false) => Some(Change::WentDown),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sec(seconds: u64) -> Tick {
        Tick::from_millis(seconds * 1000)
    }

    #[test]
    fn a_check_that_times_out_under_load_is_not_death_by_itself() {
        let mut health = Health::Up;
        for second in 1..100 {
            let last_well = Some(sec(second - 1));
            assert_eq!(health.note(Checked::NoAnswer, last_well, sec(second)), None);
        }
        assert!(health.is_up());
    }

    #[test]
    fn three_unanswered_checks_and_no_success_are_death() {
        let mut health = Health::Up;
        let last_well = Some(sec(0));
        assert_eq!(health.note(Checked::NoAnswer, last_well, sec(2)), None);
        assert_eq!(health.note(Checked::NoAnswer, last_well, sec(4)), None);
        assert_eq!(health.note(Checked::NoAnswer, last_well, sec(6)), Some(Change::WentDown));
        assert_eq!(health.note(Checked::NoAnswer, last_well, sec(8)), None);
        assert_eq!(health.note(Checked::Well, last_well, sec(10)), Some(Change::CameUp));
    }

    #[test]
    fn silence_that_took_an_engine_out_ends_with_its_next_sign_of_life() {
        let mut health = Health::Up;
        let changes = [2, 4, 6, 8].map(|second| health.note(Checked::NoAnswer, None, sec(second)));
        assert_eq!(changes, [None, None, Some(Change::WentDown), None]);
        assert_eq!(health.note(Checked::NoAnswer, Some(sec(7)), sec(10)), None, "older than the last look");
        assert_eq!(health.note(Checked::NoAnswer, Some(sec(11)), sec(12)), Some(Change::CameUp));
        let mut refused = Health::Up;
        assert_eq!(refused.note(Checked::Refused, None, sec(1)), Some(Change::WentDown));
        assert_eq!(refused.note(Checked::NoAnswer, Some(sec(2)), sec(3)), None, "it finishes what it has");
    }

    #[test]
    fn only_a_refusal_and_a_503_say_that_an_engine_leaves() {
        assert!(Checked::Refused.is_departure() && Checked::Unwell { status: 503 }.is_departure());
        for checked in [Checked::Well, Checked::NoAnswer, Checked::Unwell { status: 500 }] {
            assert!(!checked.is_departure(), "{checked:?}");
        }
    }

    #[test]
    fn a_refused_connection_and_a_bad_answer_are_death_at_once() {
        for checked in [Checked::Refused, Checked::Unwell { status: 503 }] {
            let mut health = Health::Unknown;
            assert_eq!(health.note(checked, Some(sec(1)), sec(1)), Some(Change::WentDown));
            assert!(!health.is_up());
        }
    }
}

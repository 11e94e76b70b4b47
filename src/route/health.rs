//! Whether an engine is alive, by evidence.
//!
//! A refused connection or an answer that says "I am not well" is evidence at once. A check
//! that times out is not: an engine under load answers late. It counts only when several in
//! a row stayed unanswered and no request succeeded meanwhile.

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
    /// It takes none.
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
        self != Health::Down
    }

    /// A check ended. `last_well` is the last success of a request at this engine.
    #[must_use]
    pub fn note(&mut self, checked: Checked, last_well: Option<Tick>, at: Tick) -> Option<Change> {
        let was_up = self.is_up();
        *self = match (checked, *self) {
            (Checked::Well, _) => Health::Up,
            (Checked::Unwell { .. } | Checked::Refused, _) | (Checked::NoAnswer, Health::Down) => Health::Down,
            (Checked::NoAnswer, Health::Doubtful { missed, since }) => {
                if last_well.is_some_and(|well| well >= since) {
                    Health::Doubtful { missed: 1, since: at }
                } else if missed + 1 >= Self::MISSES {
                    Health::Down
                } else {
                    Health::Doubtful { missed: missed + 1, since }
                }
            }
            (Checked::NoAnswer, Health::Unknown | Health::Up) => Health::Doubtful { missed: 1, since: at },
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
    fn a_refused_connection_and_a_bad_answer_are_death_at_once() {
        for checked in [Checked::Refused, Checked::Unwell { status: 503 }] {
            let mut health = Health::Unknown;
            assert_eq!(health.note(checked, Some(sec(1)), sec(1)), Some(Change::WentDown));
            assert!(!health.is_up());
        }
    }
}

//! Health of an engine, from evidence.
//!
//! A refused connection or an error status is evidence at once. A check that times out is not, because an
//! engine under load responds late: it counts only if several in a row are unanswered and there was no
//! other sign of life, such as a token of any response or a finished one. An engine taken out for silence
//! alone returns with the first of these; one that refused or reported an error only with a
//! successful check.

use crate::types::Tick;

/// Result of a health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeResult {
    /// A 2xx or 3xx response.
    Healthy,
    /// An error response.
    Unhealthy {
        /// Its status.
        status: u16,
    },
    /// Connection refused.
    Refused,
    /// No response in time, or an incomplete one.
    NoAnswer,
}

impl ProbeResult {
    /// Whether it means that the engine is departing and may never finish its requests. Silence does not.
    #[must_use]
    pub const fn is_departure(self) -> bool {
        matches!(self, ProbeResult::Refused | ProbeResult::Unhealthy { status: 503 })
    }
}

/// Health of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Not checked yet; takes requests.
    #[default]
    Unknown,
    /// Takes requests.
    Up,
    /// Takes requests, but checks are unanswered.
    Doubtful {
        /// Consecutive unanswered checks.
        missed: u32,
        /// Moment of the first of them.
        since: Tick,
    },
    /// Out: silent for too long.
    Silent {
        /// Moment of the last unanswered check.
        since: Tick,
    },
    /// Out: refused, or reported an error.
    Down,
}

/// Effect of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// The engine is available again.
    CameUp,
    /// The engine is taken out.
    WentDown,
}

impl Health {
    /// Consecutive unanswered checks without other signs of life that take an engine out.
    pub const MISSES: u32 = 3;

    /// Whether it takes requests.
    #[must_use]
    pub fn is_up(self) -> bool {
        !matches!(self, Health::Down | Health::Silent { .. })
    }

    /// Applies a check. `last_alive`: the engine's last sign of life in responses.
    #[must_use]
    pub fn note(&mut self, checked: ProbeResult, last_alive: Option<Tick>, at: Tick) -> Option<HealthChange> {
        let was_up = self.is_up();
        let lives_since = |since: Tick| last_alive.is_some_and(|alive| alive >= since);
        *self = match (checked, *self) {
            (ProbeResult::Healthy, _) => Health::Up,
            (ProbeResult::Unhealthy { .. } | ProbeResult::Refused, _) | (ProbeResult::NoAnswer, Health::Down) => {
                Health::Down
            }
            (ProbeResult::NoAnswer, Health::Silent { since }) if !lives_since(since) => Health::Silent { since: at },
            (ProbeResult::NoAnswer, Health::Doubtful { missed, since }) if !lives_since(since) => {
                match missed + 1 >= Self::MISSES {
                    true => Health::Silent { since: at },
                    false => Health::Doubtful { missed: missed + 1, since },
                }
            }
            (ProbeResult::NoAnswer, _) => Health::Doubtful { missed: 1, since: at },
        };
        match (was_up, self.is_up()) {
            (false, true) => Some(HealthChange::CameUp),
            (true, false) => Some(HealthChange::WentDown),
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
            assert_eq!(health.note(ProbeResult::NoAnswer, last_well, sec(second)), None);
        }
        assert!(health.is_up());
    }

    #[test]
    fn three_unanswered_checks_and_no_success_are_death() {
        let mut health = Health::Up;
        let last_well = Some(sec(0));
        assert_eq!(health.note(ProbeResult::NoAnswer, last_well, sec(2)), None);
        assert_eq!(health.note(ProbeResult::NoAnswer, last_well, sec(4)), None);
        assert_eq!(health.note(ProbeResult::NoAnswer, last_well, sec(6)), Some(HealthChange::WentDown));
        assert_eq!(health.note(ProbeResult::NoAnswer, last_well, sec(8)), None);
        assert_eq!(health.note(ProbeResult::Healthy, last_well, sec(10)), Some(HealthChange::CameUp));
    }

    #[test]
    fn silence_that_took_an_engine_out_ends_with_its_next_sign_of_life() {
        let mut health = Health::Up;
        let changes = [2, 4, 6, 8].map(|second| health.note(ProbeResult::NoAnswer, None, sec(second)));
        assert_eq!(changes, [None, None, Some(HealthChange::WentDown), None]);
        assert_eq!(health.note(ProbeResult::NoAnswer, Some(sec(7)), sec(10)), None, "older than the last look");
        assert_eq!(health.note(ProbeResult::NoAnswer, Some(sec(11)), sec(12)), Some(HealthChange::CameUp));
        let mut refused = Health::Up;
        assert_eq!(refused.note(ProbeResult::Refused, None, sec(1)), Some(HealthChange::WentDown));
        assert_eq!(refused.note(ProbeResult::NoAnswer, Some(sec(2)), sec(3)), None, "it finishes what it has");
    }

    #[test]
    fn only_a_refusal_and_a_503_say_that_an_engine_leaves() {
        assert!(ProbeResult::Refused.is_departure() && ProbeResult::Unhealthy { status: 503 }.is_departure());
        for checked in [ProbeResult::Healthy, ProbeResult::NoAnswer, ProbeResult::Unhealthy { status: 500 }] {
            assert!(!checked.is_departure(), "{checked:?}");
        }
    }

    #[test]
    fn a_refused_connection_and_a_bad_answer_are_death_at_once() {
        for checked in [ProbeResult::Refused, ProbeResult::Unhealthy { status: 503 }] {
            let mut health = Health::Unknown;
            assert_eq!(health.note(checked, Some(sec(1)), sec(1)), Some(HealthChange::WentDown));
            assert!(!health.is_up());
        }
    }
}

//! Which time limit of an answer ends next. Pure: moments in, moments out.

use std::time::Duration;

use crate::observe::TimeoutKind;
use crate::units::Tick;

/// The limits of one answer, as moments. `None` does not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// `total`, from the start that objectives have.
    pub total: Option<Tick>,
    /// `first_token` of a stream, `response_head` of the rest, from there too, over all attempts.
    pub first_token: Option<Tick>,
    /// `idle`: since the last event once a token has come (JSON bodies: since the head).
    pub idle: Option<Tick>,
    /// `hold_head`, from arrival: the held head is let go.
    pub hold: Option<Tick>,
    /// The next `: keepalive` comment.
    pub keepalive: Option<Tick>,
    /// A finish event that waits for the usage event behind it goes out.
    pub finish: Option<Tick>,
    /// The answer is over: the engine's body should have ended.
    pub over: Option<Tick>,
}

/// So long after `finish` an engine may hold its body open, for its usage and its last word.
const AFTER_FINISH: Duration = Duration::from_secs(1);

/// So long a finish event waits for the usage event: engines write both at once. Of an engine that is
/// known to have members of it there, until the answer is over.
const FINISH_WAITS: Duration = Duration::from_millis(10);

/// What a deadline that has passed asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlineAction {
    /// A limit of the class ends the answer.
    Limit(TimeoutKind),
    /// The head is let go.
    Hold,
    /// A comment is written.
    Keepalive,
    /// The finish event goes out.
    Finish,
    /// The answer is ended.
    Over,
}

impl Deadlines {
    /// The earliest moment at which something is due.
    #[must_use]
    pub fn next(&self) -> Option<Tick> {
        let limits = earlier(earlier(self.total, self.first_token), self.idle);
        let writes = earlier(earlier(self.hold, self.keepalive), self.finish);
        earlier(earlier(limits, writes), self.over)
    }

    /// Whether anything is due before `at`.
    #[must_use]
    pub fn any_before(&self, at: Tick) -> bool {
        let before = |moment: Option<Tick>| moment.is_some_and(|moment| moment < at);
        before(self.idle)
            || before(self.total)
            || before(self.first_token)
            || before(self.hold)
            || before(self.keepalive)
            || before(self.finish)
            || before(self.over)
    }

    /// What is due at `at`: the limit that passed first, before what only writes something.
    #[must_use]
    pub fn due(&self, at: Tick) -> Option<DeadlineAction> {
        let limits = [
            (self.first_token, TimeoutKind::FirstToken),
            (self.idle, TimeoutKind::Idle),
            (self.total, TimeoutKind::Total),
        ];
        let passed = limits.into_iter().filter_map(|(moment, limit)| Some((moment.filter(|m| *m <= at)?, limit)));
        if let Some((_, limit)) = passed.min_by_key(|(moment, _)| *moment) {
            return Some(DeadlineAction::Limit(limit));
        }
        let has_passed = |moment: Option<Tick>| moment.is_some_and(|m| m <= at);
        if has_passed(self.finish) {
            return Some(DeadlineAction::Finish);
        }
        if has_passed(self.over) {
            return Some(DeadlineAction::Over);
        }
        if has_passed(self.hold) {
            return Some(DeadlineAction::Hold);
        }
        has_passed(self.keepalive).then_some(DeadlineAction::Keepalive)
    }

    /// A token came: the first-token limit, the held head and the comments are over.
    pub fn token_came(&mut self) {
        self.first_token = None;
        self.hold = None;
        self.keepalive = None;
    }

    /// The answer finished at this moment, as it looks now, or has not.
    pub fn finished(&mut self, at: Option<Tick>) {
        self.over = at.map(|at| at + AFTER_FINISH);
    }

    /// A finish event waits since `at`, unless one did already; `misses_members`: its engine has members
    /// of it behind it.
    pub fn finish_waits(&mut self, at: Tick, misses_members: bool) {
        self.finish.get_or_insert(at + if misses_members { AFTER_FINISH } else { FINISH_WAITS });
    }

    /// The engine said something at `at`.
    pub fn heard(&mut self, at: Tick, idle: Duration) {
        self.idle = Some(at + idle);
    }
}

/// The earlier of two moments, of which neither has to be.
pub fn earlier(one: Option<Tick>, other: Option<Tick>) -> Option<Tick> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Option<Tick> {
        Some(Tick::from_millis(millis))
    }

    #[test]
    fn the_limit_that_passed_first_is_the_one_that_fired() {
        let limits =
            Deadlines { total: at(900), idle: at(800), first_token: None, hold: at(100), ..Deadlines::default() };
        assert_eq!(limits.next(), at(100));
        assert_eq!(limits.due(Tick::from_millis(99)), None);
        assert_eq!(limits.due(Tick::from_millis(100)), Some(DeadlineAction::Hold));
        assert_eq!(limits.due(Tick::from_millis(1000)), Some(DeadlineAction::Limit(TimeoutKind::Idle)));
    }

    #[test]
    fn a_token_ends_what_only_runs_before_it() {
        let mut limits = Deadlines { first_token: at(5), hold: at(4), keepalive: at(3), ..Deadlines::default() };
        limits.token_came();
        assert_eq!(limits.next(), None);
        limits.heard(Tick::from_millis(10), Duration::from_millis(30));
        assert_eq!(limits.due(Tick::from_millis(40)), Some(DeadlineAction::Limit(TimeoutKind::Idle)));
    }

    #[test]
    fn an_answer_that_is_over_may_be_held_open_for_a_second_and_its_finish_back_for_a_moment() {
        let mut limits = Deadlines { idle: at(5000), ..Deadlines::default() };
        limits.finished(at(100));
        limits.finish_waits(Tick::from_millis(100), false);
        limits.finish_waits(Tick::from_millis(105), true);
        assert_eq!((limits.next(), limits.due(Tick::from_millis(110))), (at(110), Some(DeadlineAction::Finish)));
        limits.finish = None;
        limits.finish_waits(Tick::from_millis(100), true);
        assert_eq!(limits.next(), at(1100));
        limits.finish = None;
        assert_eq!((limits.next(), limits.due(Tick::from_millis(1100))), (at(1100), Some(DeadlineAction::Over)));
        assert!(limits.any_before(Tick::from_millis(1101)) && !limits.any_before(Tick::from_millis(1100)));
        limits.finished(None);
        assert_eq!(limits.next(), at(5000), "a further token came");
    }
}

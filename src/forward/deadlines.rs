//! The next time limit of a response. Pure.

use std::time::Duration;

use crate::observe::TimeoutKind;
use crate::types::Tick;

/// The time limits of one response, as moments. `None` means not running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// `total`, from the start that objectives have.
    pub total: Option<Tick>,
    /// `first_token` for streams, `response_head` otherwise; from arrival over all attempts.
    pub first_token: Option<Tick>,
    /// `idle`: from the last event once a token has come (JSON bodies: from the head).
    pub idle: Option<Tick>,
    /// `hold_head`, from arrival: the held head is released.
    pub hold: Option<Tick>,
    /// The next `: keepalive` comment.
    pub keepalive: Option<Tick>,
    /// Release of a finish event that waits for the usage event.
    pub finish: Option<Tick>,
    /// End of a finished response whose engine keeps its body open.
    pub over: Option<Tick>,
}

/// How long after `finish` the engine's body may stay open, for usage and trailing events.
const AFTER_FINISH: Duration = Duration::from_secs(1);

/// Longest hold of a finish event for the usage event, which engines write at once. For an engine known to
/// move members there, the hold lasts until the response ends.
const FINISH_WAITS: Duration = Duration::from_millis(10);

/// The action of a deadline that has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlineAction {
    /// End the response because of a class limit.
    Limit(TimeoutKind),
    /// Release the head.
    Hold,
    /// Write a comment.
    Keepalive,
    /// Release the finish event.
    Finish,
    /// End the response.
    Over,
}

impl Deadlines {
    /// The earliest deadline.
    #[must_use]
    pub fn next(&self) -> Option<Tick> {
        let limits = earlier(earlier(self.total, self.first_token), self.idle);
        let writes = earlier(earlier(self.hold, self.keepalive), self.finish);
        earlier(earlier(limits, writes), self.over)
    }

    /// Whether a deadline is before `at`.
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

    /// The action due at `at`: the limit that passed first, before actions that only write something.
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

    /// A token came: ends the first-token limit, the hold and the comments.
    pub fn token_came(&mut self) {
        self.first_token = None;
        self.hold = None;
        self.keepalive = None;
    }

    /// Sets or clears the moment at which the response finished, as it looks so far.
    pub fn finished(&mut self, at: Option<Tick>) {
        self.over = at.map(|at| at + AFTER_FINISH);
    }

    /// A finish event waits since `at`, unless one did already; `misses_members`: its engine has members
    /// of it behind it.
    pub fn finish_waits(&mut self, at: Tick, misses_members: bool) {
        self.finish.get_or_insert(at + if misses_members { AFTER_FINISH } else { FINISH_WAITS });
    }

    /// Records activity of the engine.
    pub fn heard(&mut self, at: Tick, idle: Duration) {
        self.idle = Some(at + idle);
    }
}

/// The earlier of two optional moments.
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

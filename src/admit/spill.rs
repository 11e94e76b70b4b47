//! Spilling: which pool of its route a waiting request goes on to.
//!
//! Pure: the gateway measures the queues one after another, and this module decides whether the request
//! leaves its own ([`SpillSearch::of_queue`]) and whether it joins a later one
//! ([`SpillSearch::accepts`]). Pools without a limit or with a free seat are always taken and never come
//! here. A request only goes forward along its route.

use std::time::Duration;

/// The time a waiting request has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLeft {
    /// Until the latest start that still keeps its deadline.
    pub to_start: Duration,
    /// Until it must leave any queue.
    pub to_leave: Duration,
}

/// The queue in which a request waits, as measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurrentQueue {
    /// Whether its pool has an available engine.
    pub has_engine: bool,
    /// Expected wait for a seat; `None` if unknown.
    pub expected_wait: Option<Duration>,
    /// How long the request has waited in it.
    pub waited: Duration,
}

/// The search for the next pool of a route.
#[derive(Debug)]
pub struct SpillSearch {
    /// The wait that a later queue must undercut; `None` if the request can never start where it is.
    expected: Option<Duration>,
    left: TimeLeft,
    fallback: Option<usize>,
}

impl SpillSearch {
    /// A request that can never start where it is: no engine, or no place in the queue.
    #[must_use]
    pub const fn stranded(left: TimeLeft) -> Self {
        SpillSearch { expected: None, left, fallback: None }
    }

    /// A request that waits in a queue; `None` if it stays because its wait keeps the deadline.
    ///
    /// Without a known rate the further wait is assumed to equal the past one.
    #[must_use]
    pub fn of_queue(queue: CurrentQueue, left: TimeLeft) -> Option<Self> {
        if !queue.has_engine {
            return Some(SpillSearch::stranded(left));
        }
        let expected = queue.expected_wait.unwrap_or(queue.waited);
        (expected > left.to_start).then_some(SpillSearch { expected: Some(expected), left, fallback: None })
    }

    /// Whether the request joins the queue of the pool `at` now. `wait`: its expected wait there.
    ///
    /// A stranded request prefers a queue that keeps its deadline, but remembers the first one that is not
    /// known to leave it unserved ([`fallback`](Self::fallback)).
    pub fn accepts(&mut self, at: usize, wait: Option<Duration>) -> bool {
        let is_shorter = |wait| self.expected.is_none_or(|expected| wait < expected);
        if wait.is_some_and(|wait| wait <= self.left.to_start && is_shorter(wait)) {
            return true;
        }
        if self.expected.is_none() && wait.is_none_or(|wait| wait <= self.left.to_leave) {
            self.fallback.get_or_insert(at);
        }
        false
    }

    /// The queue to join if no other was accepted.
    #[must_use]
    pub const fn fallback(&self) -> Option<usize> {
        self.fallback
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    const LEFT: TimeLeft = TimeLeft { to_start: ms(300), to_leave: ms(1000) };

    fn waiting(expected_wait: Option<Duration>, waited: Duration) -> Option<SpillSearch> {
        SpillSearch::of_queue(CurrentQueue { has_engine: true, expected_wait, waited }, LEFT)
    }

    #[test]
    fn a_request_stays_while_its_expected_wait_keeps_the_deadline() {
        assert!(waiting(Some(ms(300)), ms(900)).is_none());
        assert!(waiting(Some(ms(301)), ms(0)).is_some());
    }

    #[test]
    fn without_a_rate_the_wait_is_expected_to_double() {
        assert!(waiting(None, ms(300)).is_none());
        assert!(waiting(None, ms(301)).is_some());
    }

    #[test]
    fn a_queue_is_joined_if_it_keeps_the_deadline_and_is_shorter() {
        let mut search = waiting(Some(ms(301)), ms(0)).unwrap();
        assert!(search.accepts(1, Some(ms(300))));
        assert!(!search.accepts(1, Some(ms(302))), "longer than the deadline allows");
        assert!(!search.accepts(1, None), "of unknown length");
        assert_eq!(search.fallback(), None, "it waits on where it is");
    }

    #[test]
    fn a_stranded_request_takes_the_first_queue_that_may_serve_it() {
        let gone = CurrentQueue { has_engine: false, expected_wait: Some(ms(1)), waited: ms(0) };
        let mut search = SpillSearch::of_queue(gone, LEFT).unwrap();
        assert!(!search.accepts(1, Some(ms(1001))), "it would leave unserved");
        assert!(!search.accepts(2, None));
        assert!(!search.accepts(3, Some(ms(900))));
        assert_eq!(search.fallback(), Some(2));
        assert!(search.accepts(4, Some(ms(300))), "one that keeps the deadline goes first");
    }
}

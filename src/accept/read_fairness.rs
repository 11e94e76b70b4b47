//! Read fairness.
//!
//! A busy worker would otherwise start every readable request before finishing any: token timestamps
//! would be late, and nothing of a request would remain in the processor's cache when its response
//! comes. Each worker therefore starts at most [`A_TURN`] requests before it polls what arrived for those
//! in progress: with 512 busy connections a request then touches 28 lines of memory beyond a cache of 2 MB,
//! and 275 without (counted under valgrind).
//!
//! Applies to further requests of kept HTTP/1 connections only: a connection's first request comes with
//! its handshake, and with HTTP/2 hyper reads. The wait is recorded and is part of the
//! request's time.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::clock::Clock;
use crate::types::Tick;

/// Requests started per worker and turn. A request and its connections use about 50 kB, including the
/// kernel's part, which then stay in a cache of 2 MB.
const A_TURN: usize = 32;

/// One for all connections of a listener.
pub(super) struct ReadFairness {
    most: usize,
    /// Whether the runtime has one thread.
    is_alone: bool,
    clock: Clock,
    /// Requests admitted in this turn; `most` while any wait.
    went_in: AtomicUsize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waker>,
    /// Whether a task advances the turns.
    turns: bool,
}

/// State of a connection's next read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadTicket {
    /// It may read.
    Free,
    /// Nothing had arrived; it asks when something has.
    Asks,
    /// Waiting since then; woken when it may read.
    Waits(Tick),
}

impl ReadTicket {
    /// Ends the wait and returns when it began, if it did.
    pub(super) fn end(&mut self) -> Option<Tick> {
        match std::mem::replace(self, ReadTicket::Free) {
            ReadTicket::Waits(since) => Some(since),
            ReadTicket::Free | ReadTicket::Asks => None,
        }
    }
}

impl ReadFairness {
    /// For connections of the current runtime.
    pub(super) fn new(clock: Clock) -> Arc<Self> {
        let threads = Handle::try_current().map_or(1, |runtime| runtime.metrics().num_workers());
        Arc::new(Self::of(A_TURN * threads, threads == 1, clock))
    }

    fn of(most: usize, is_alone: bool, clock: Clock) -> Self {
        ReadFairness { most, is_alone, clock, went_in: AtomicUsize::new(0), queue: Mutex::default() }
    }

    /// Ready when the connection may read. Wakes it after a wait; a wake-up for another reason admits it as
    /// well.
    pub(super) fn poll(self: &Arc<Self>, pass: &mut ReadTicket, cx: &mut Context<'_>) -> Poll<()> {
        if *pass != ReadTicket::Asks {
            return Poll::Ready(());
        }
        if self.went_in.load(Ordering::Relaxed) < self.most {
            let before = self.went_in.fetch_add(1, Ordering::Relaxed);
            // Turns advance while there is room, so that a few requests at a time do not wait.
            if before >= self.most / 2 {
                self.begin_turn(&mut self.queue.lock());
            }
            return Poll::Ready(());
        }
        *pass = ReadTicket::Waits(self.clock.now());
        let mut queue = self.queue.lock();
        queue.waiting.push_back(cx.waker().clone());
        self.begin_turn(&mut queue);
        Poll::Pending
    }

    fn begin_turn(self: &Arc<Self>, queue: &mut Queue) {
        if !std::mem::replace(&mut queue.turns, true) {
            tokio::spawn(Arc::clone(self).turn());
        }
    }

    /// Admits the next requests each time when all ready tasks have run.
    async fn turn(self: Arc<Self>) {
        loop {
            match self.is_alone {
                // Behind everything that the next poll of the system reports.
                true => tokio::task::yield_now().await,
                // A yield would return to this thread, however busy it is.
                false => behind_what_is_ready().await,
            }
            let mut queue = self.queue.lock();
            let next = queue.waiting.len().min(self.most);
            let is_last = next == queue.waiting.len();
            queue.turns = !is_last;
            self.went_in.store(if is_last { next } else { self.most }, Ordering::Relaxed);
            queue.waiting.drain(..next).for_each(Waker::wake);
            if is_last {
                return;
            }
        }
    }
}

/// Re-queues the task where any thread may take it.
async fn behind_what_is_ready() {
    let mut is_behind = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut is_behind, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(most: usize) -> Arc<ReadFairness> {
        Arc::new(ReadFairness::of(most, true, Clock::start()))
    }

    /// A connection that asks once, and records its number when admitted.
    fn asks(
        turnstile: &Arc<ReadFairness>,
        number: usize,
        log: &Arc<Mutex<Vec<usize>>>,
    ) -> tokio::task::JoinHandle<ReadTicket> {
        let (turnstile, log) = (Arc::clone(turnstile), Arc::clone(log));
        tokio::spawn(async move {
            let mut pass = ReadTicket::Asks;
            poll_fn(|cx| turnstile.poll(&mut pass, cx)).await;
            log.lock().push(number);
            pass
        })
    }

    #[tokio::test(start_paused = true)]
    async fn few_begin_at_once_and_the_others_in_the_order_in_which_they_came() {
        let (turnstile, log) = (of(3), Arc::default());
        let all: Vec<_> = (0..10).map(|number| asks(&turnstile, number, &log)).collect();
        let mut seen = Vec::new();
        while log.lock().len() < 10 {
            tokio::task::yield_now().await;
            seen.push(log.lock().len());
        }
        seen.dedup();
        assert_eq!(seen, [3, 6, 9, 10], "three a turn");
        assert_eq!(*log.lock(), (0..10).collect::<Vec<_>>());
        for (number, asked) in all.into_iter().enumerate() {
            let waited = asked.await.unwrap();
            assert_eq!(waited, if number < 3 { ReadTicket::Asks } else { ReadTicket::Waits(Tick::ZERO) });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn where_any_thread_may_turn_all_come_in_too() {
        let turnstile = Arc::new(ReadFairness::of(3, false, Clock::start()));
        let log = Arc::default();
        for asked in (0..10).map(|number| asks(&turnstile, number, &log)).collect::<Vec<_>>() {
            asked.await.unwrap();
        }
        assert_eq!(*log.lock(), (0..10).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn who_comes_a_few_at_a_time_never_waits() {
        let (turnstile, log) = (of(4), Arc::default());
        for number in 0..30 {
            let both = [asks(&turnstile, number, &log), asks(&turnstile, number, &log)];
            for asked in both {
                assert_eq!(asked.await.unwrap(), ReadTicket::Asks);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_is_overtaken_by_more_than_a_turn() {
        let (turnstile, log) = (of(2), Arc::default());
        let mut all: Vec<_> = (0..6).map(|number| asks(&turnstile, number, &log)).collect();
        for number in 6..30 {
            tokio::task::yield_now().await;
            all.push(asks(&turnstile, number, &log));
        }
        for asked in all {
            asked.await.unwrap();
        }
        let log = log.lock();
        assert_eq!(log.len(), 30);
        assert!(log.iter().enumerate().all(|(place, number)| place.abs_diff(*number) < 2), "{log:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_leave_while_they_wait_hold_up_nobody() {
        let (turnstile, log) = (of(1), Arc::default());
        let all: Vec<_> = (0..8).map(|number| asks(&turnstile, number, &log)).collect();
        tokio::task::yield_now().await;
        all[1..7].iter().for_each(tokio::task::JoinHandle::abort);
        assert!(all.into_iter().next_back().unwrap().await.is_ok());
        for number in 8..12 {
            asks(&turnstile, number, &log).await.unwrap();
        }
        assert!(log.lock().ends_with(&[7, 8, 9, 10, 11]));
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_woken_by_something_else_need_not_wait() {
        let turnstile = of(0);
        let mut pass = ReadTicket::Asks;
        let mut cx = Context::from_waker(Waker::noop());
        assert!(turnstile.poll(&mut pass, &mut cx).is_pending());
        assert!(turnstile.poll(&mut pass, &mut cx).is_ready());
        assert_eq!(pass, ReadTicket::Waits(Tick::ZERO));
    }
}

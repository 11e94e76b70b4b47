//! Measures how long a client keeps the gateway waiting for its request body.
//!
//! Counts only the time between a poll that finds no bytes and the wake-up by new ones. Time before the
//! gateway polls (short memory for bodies, other work) and between wake-up and the next poll is the
//! gateway's own delay and stays in every objective.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::clock::Clock;
use crate::types::Tick;

/// Measures the waits for one body.
#[derive(Debug)]
pub struct ClientWait {
    clock: Clock,
    length: Duration,
    /// The wait in progress.
    present: Option<WaitInProgress>,
}

#[derive(Debug)]
struct WaitInProgress {
    since: Tick,
    bell: Arc<TimedWaker>,
}

/// A waker that records when it was first woken.
#[derive(Debug)]
struct TimedWaker {
    clock: Clock,
    rung: AtomicU64,
    inner: Waker,
}

const NEVER: u64 = u64::MAX;

impl ClientWait {
    /// No wait yet.
    #[must_use]
    pub const fn new(clock: Clock) -> Self {
        ClientWait { clock, length: Duration::ZERO, present: None }
    }

    /// Polls for the client's next bytes.
    pub fn poll<T>(&mut self, cx: &mut Context<'_>, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        let before = self.present.take();
        let bell = match &before {
            Some(WaitInProgress { bell, .. }) if bell.is_silent() && bell.inner.will_wake(cx.waker()) => {
                Arc::clone(bell)
            }
            _ => TimedWaker::new(self.clock, cx.waker()),
        };
        let rung = before.as_ref().and_then(|present| present.bell.rung());
        let polled = poll(&mut Context::from_waker(&Waker::from(Arc::clone(&bell))));
        match (before, polled.is_pending()) {
            // The wait continues: something else woke the task.
            (Some(WaitInProgress { since, .. }), true) if rung.is_none() => {
                self.present = Some(WaitInProgress { since, bell })
            }
            (before, is_pending) => {
                let now = self.clock.now();
                if let Some(WaitInProgress { since, .. }) = before {
                    self.length += rung.unwrap_or(now).since(since);
                }
                if is_pending {
                    self.present = Some(WaitInProgress { since: now, bell });
                }
            }
        }
        polled
    }

    /// The sum of all waits.
    #[must_use]
    pub const fn length(&self) -> Duration {
        self.length
    }
}

impl TimedWaker {
    fn new(clock: Clock, inner: &Waker) -> Arc<Self> {
        Arc::new(TimedWaker { clock, rung: AtomicU64::new(NEVER), inner: inner.clone() })
    }

    fn rung(&self) -> Option<Tick> {
        let rung = self.rung.load(Ordering::Acquire);
        (rung != NEVER).then(|| Tick::from_nanos(rung))
    }

    fn is_silent(&self) -> bool {
        self.rung().is_none()
    }
}

impl Wake for TimedWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let now = self.clock.now().as_nanos();
        // Only the first wake-up counts.
        let _ = self.rung.compare_exchange(NEVER, now, Ordering::AcqRel, Ordering::Relaxed);
        self.inner.wake_by_ref();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// A client that sends on command.
    #[derive(Default)]
    struct Client {
        has_sent: RefCell<bool>,
        waker: RefCell<Option<Waker>>,
    }

    impl Client {
        fn sends(&self) {
            *self.has_sent.borrow_mut() = true;
            self.waker.take().into_iter().for_each(Waker::wake);
        }

        fn is_asked(&self, wait: &mut ClientWait) -> bool {
            let mut cx = Context::from_waker(Waker::noop());
            let asked = wait.poll(&mut cx, |cx| match self.has_sent.take() {
                true => Poll::Ready(()),
                false => {
                    *self.waker.borrow_mut() = Some(cx.waker().clone());
                    Poll::Pending
                }
            });
            asked.is_ready()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_clients_own_silence_is_its_wait() {
        let (clock, client) = (Clock::start(), Client::default());
        let mut wait = ClientWait::new(clock);
        // The gateway has not polled yet.
        tokio::time::advance(ms(100)).await;
        assert!(!client.is_asked(&mut wait));
        tokio::time::advance(ms(30)).await;
        // Something else wakes its task; the client has still sent nothing.
        assert!(!client.is_asked(&mut wait));
        tokio::time::advance(ms(20)).await;
        client.sends();
        // The gateway polls late.
        tokio::time::advance(ms(400)).await;
        assert!(client.is_asked(&mut wait));
        assert_eq!(wait.length(), ms(50));
        // Memory for bodies is short, so it does not poll; bytes sent meanwhile are no wait.
        tokio::time::advance(ms(700)).await;
        client.sends();
        tokio::time::advance(ms(5)).await;
        assert!(client.is_asked(&mut wait));
        assert_eq!(wait.length(), ms(50));
        // A spurious wake-up ends one wait and begins another.
        assert!(!client.is_asked(&mut wait));
        tokio::time::advance(ms(10)).await;
        client.waker.take().into_iter().for_each(Waker::wake);
        tokio::time::advance(ms(1000)).await;
        assert!(!client.is_asked(&mut wait));
        tokio::time::advance(ms(15)).await;
        client.sends();
        assert!(client.is_asked(&mut wait));
        assert_eq!(wait.length(), ms(75));
    }
}

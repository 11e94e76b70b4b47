//! Reusable timers.
//!
//! Most waits end before their limit, and most limits move meanwhile. Arming and disarming a timer costs
//! more than the rest of such a wait, so an [`Alarm`] that fires too early is re-checked when it fires,
//! and an armed timer that is no longer needed is handed to the next wait ([`Alarms`]).

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::task::unconstrained;
use tokio::time::Sleep;

use super::Clock;
use crate::types::Tick;

/// Armed timers that are currently unused. One per runtime.
#[derive(Debug)]
pub struct Alarms {
    clock: Clock,
    spare: Mutex<Vec<Armed>>,
}

/// Consecutive waits on one timer. May be ready early, never late: the caller checks the time
/// then.
#[derive(Debug)]
pub struct Alarm {
    alarms: Arc<Alarms>,
    armed: Option<Armed>,
}

#[derive(Debug)]
struct Armed {
    timer: Pin<Box<Sleep>>,
    /// When it fires; `None` once it has.
    set_for: Option<Tick>,
    /// The task to wake; `None` if no task waits.
    wakes: Option<Waker>,
}

impl Alarms {
    /// Most unused timers kept.
    const SPARE: usize = 1024;

    /// No timers yet.
    #[must_use]
    pub fn new(clock: Clock) -> Arc<Self> {
        Arc::new(Alarms { clock, spare: Mutex::default() })
    }

    /// An alarm, which takes a timer at its first wait.
    #[must_use]
    pub fn alarm(self: &Arc<Self>) -> Alarm {
        Alarm { alarms: Arc::clone(self), armed: None }
    }

    fn take(&self, at: Tick) -> Armed {
        let spare = self.spare.lock().pop();
        spare.unwrap_or_else(|| {
            let timer = Box::pin(tokio::time::sleep_until(self.clock.instant(at)));
            Armed { timer, set_for: Some(at), wakes: None }
        })
    }

    fn give_back(&self, mut armed: Armed) {
        armed.wakes = None;
        let mut spare = self.spare.lock();
        if spare.len() < Self::SPARE {
            spare.push(armed);
        }
    }
}

impl Alarm {
    /// Whether it will wake the current task at a moment that is `early_enough`.
    pub fn stands(&self, cx: &Context<'_>, early_enough: impl FnOnce(Tick) -> bool) -> bool {
        self.armed.as_ref().is_some_and(|armed| {
            armed.set_for.is_some_and(early_enough)
                && armed.wakes.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()))
                && !armed.timer.is_elapsed()
        })
    }

    /// Ready at `at` or before. Wakes the last task that polled.
    pub fn poll(&mut self, at: Tick, cx: &mut Context<'_>) -> Poll<()> {
        let armed = self.armed.get_or_insert_with(|| self.alarms.take(at));
        if armed.set_for.is_none_or(|ring| ring > at) {
            armed.timer.as_mut().reset(self.alarms.clock.instant(at));
            armed.set_for = Some(at);
        }
        // Unconstrained, because a task without budget left would get `Pending` from a timer that fired.
        if Pin::new(&mut unconstrained(armed.timer.as_mut())).poll(cx).is_pending() {
            armed.wakes = Some(cx.waker().clone());
            return Poll::Pending;
        }
        armed.set_for = None;
        Poll::Ready(())
    }

    /// Called when no task waits for now.
    pub fn rest(&mut self) {
        if let Some(armed) = self.armed.take() {
            self.alarms.give_back(armed);
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.rest();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;
    use std::time::Duration;

    use super::*;

    async fn wait(alarm: &mut Alarm, at: Tick) -> Tick {
        let clock = alarm.alarms.clock;
        while clock.now() < at {
            poll_fn(|cx| alarm.poll(at, cx)).await;
        }
        clock.now()
    }

    #[tokio::test(start_paused = true)]
    async fn a_timer_armed_by_another_wait_is_neither_late_nor_lost() {
        let alarms = Alarms::new(Clock::start());
        let mut first = alarms.alarm();
        assert!(poll_fn(|cx| Poll::Ready(first.poll(Tick::from_millis(500), cx))).await.is_pending());
        drop(first);
        assert_eq!(alarms.spare.lock().len(), 1);
        // Set for a later moment, then for an earlier one, and fired meanwhile.
        let mut second = alarms.alarm();
        assert_eq!(wait(&mut second, Tick::from_millis(100)).await, Tick::from_millis(100));
        assert!(alarms.spare.lock().is_empty());
        assert!(poll_fn(|cx| Poll::Ready(second.poll(Tick::from_millis(200), cx))).await.is_pending());
        second.rest();
        assert_eq!(wait(&mut second, Tick::from_millis(900)).await, Tick::from_millis(900));
        assert_eq!(wait(&mut second, Tick::from_millis(901)).await, Tick::from_millis(901));
        second.rest();
        alarms.clock.sleep_until(Some(Tick::from_millis(2000))).await;
        assert_eq!(wait(&mut alarms.alarm(), Tick::from_millis(2500)).await, Tick::from_millis(2500));
    }

    #[tokio::test(start_paused = true)]
    async fn it_rings_also_for_a_task_that_had_used_up_its_share() {
        let alarms = Alarms::new(Clock::start());
        const SOON: Duration = Duration::from_millis(500);
        for is_spare in [false, true] {
            let mut alarm = alarms.alarm();
            poll_fn(|cx| {
                while pin!(tokio::task::consume_budget()).poll(cx).is_ready() {}
                assert!(alarm.poll(alarms.clock.now() + SOON, cx).is_pending());
                Poll::Ready(())
            })
            .await;
            let began = alarms.clock.now();
            let rings =
                poll_fn(|cx| if alarm.stands(cx, |_| true) { Poll::Pending } else { alarm.poll(began + SOON, cx) });
            tokio::select! {
                biased;
                () = rings => assert_eq!(alarms.clock.now(), began + SOON, "{is_spare}"),
                () = alarms.clock.sleep_until(Some(began + Duration::from_secs(2))) => panic!("it did not ring: {is_spare}"),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_alarm_stays_armed_for_a_task_that_it_wakes_early_enough() {
        let alarms = Alarms::new(Clock::start());
        let mut alarm = alarms.alarm();
        let soon = |ring: Tick| ring <= Tick::from_millis(500);
        poll_fn(|cx| {
            assert!(!alarm.stands(cx, soon), "nothing is armed");
            assert!(alarm.poll(Tick::from_millis(500), cx).is_pending());
            assert!(alarm.stands(cx, soon));
            assert!(!alarm.stands(cx, |ring| ring < Tick::from_millis(500)));
            assert!(!alarm.stands(&Context::from_waker(Waker::noop()), soon));
            Poll::Ready(())
        })
        .await;
        alarms.clock.sleep_until(Some(Tick::from_millis(600))).await;
        assert!(poll_fn(|cx| Poll::Ready(!alarm.stands(cx, soon))).await, "it has rung");
    }
}

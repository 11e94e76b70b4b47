//! Graceful shutdown: its phases, and how connections learn of them.
//!
//! A [`Drain`] is shared by its initiator, the listeners and the gateway. [`Drain::leave`] drives the
//! phases; everyone else only queries or awaits them.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

use super::settings::Shutdown;
use crate::clock::Clock;

/// Phase of the shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DrainPhase {
    /// Serving.
    Open,
    /// Readiness fails so that no new clients are sent here; everything is still served.
    Leaving,
    /// No new connections; idle ones are closed; open responses continue. A request that still arrives on an
    /// open connection is rejected by the gateway (`shed`).
    Draining,
    /// The drain limit has passed: open responses report it in band and end.
    Over,
    /// Everything still open is cut.
    Cut,
}

const PHASES: [DrainPhase; 5] =
    [DrainPhase::Open, DrainPhase::Leaving, DrainPhase::Draining, DrainPhase::Over, DrainPhase::Cut];

/// The shared state of the shutdown.
#[derive(Clone, Debug, Default)]
pub struct Drain(Arc<DrainState>);

#[derive(Debug, Default)]
struct DrainState {
    phase: AtomicU8,
    changed: Arc<Notify>,
}

impl Drain {
    /// Time for a response to report the drain limit and end.
    pub const FINAL_GRACE: Duration = Duration::from_secs(1);

    /// In the phase `Open`.
    #[must_use]
    pub fn new() -> Self {
        Drain::default()
    }

    /// The current phase.
    #[must_use]
    pub fn phase(&self) -> DrainPhase {
        PHASES[usize::from(self.0.phase.load(Ordering::Acquire)).min(PHASES.len() - 1)]
    }

    /// Whether readiness must fail.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.phase() >= DrainPhase::Leaving
    }

    /// Whether a new request is rejected.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.phase() >= DrainPhase::Draining
    }

    /// Advances to `phase`; never goes back.
    pub fn advance(&self, phase: DrainPhase) {
        self.0.phase.fetch_max(phase as u8, Ordering::AcqRel);
        self.0.changed.notify_waiters();
    }

    /// Drives the whole shutdown: fails readiness, waits `delay`, stops accepting, waits `drain`, tells open
    /// responses, and cuts the rest. Listeners' futures end as soon as their connections have ended, so wait
    /// for those rather than for this:
    /// `select! { () = listener.serve(..) => {}, () = async { drain.leave(..).await; pending().await } => {} }`.
    pub async fn leave(&self, clock: Clock, shutdown: &Shutdown) {
        self.advance(DrainPhase::Leaving);
        clock.sleep_until(Some(clock.now() + shutdown.delay)).await;
        self.advance(DrainPhase::Draining);
        clock.sleep_until(Some(clock.now() + shutdown.drain)).await;
        self.cut_now(clock).await;
    }

    /// The last phases without waiting for open responses: they get an error event, then are cut.
    pub async fn cut_now(&self, clock: Clock) {
        self.advance(DrainPhase::Over);
        clock.sleep_until(Some(clock.now() + Self::FINAL_GRACE)).await;
        self.advance(DrainPhase::Cut);
    }

    /// Resolves when `phase` is reached; at once if it already was.
    pub async fn reached(&self, phase: DrainPhase) {
        loop {
            let changed = self.0.changed.notified();
            if self.phase() >= phase {
                return;
            }
            changed.await;
        }
    }

    /// A watch of the phase for hand-written polls.
    pub(super) fn drain_watch(&self) -> DrainWatch {
        DrainWatch { drain: self.clone(), heard: DrainPhase::Open, bell: None }
    }
}

/// Reports each phase change once. Registers its waker once per change and task rather than on every
/// poll, because an event must not cost a lock shared by all connections.
pub(super) struct DrainWatch {
    drain: Drain,
    heard: DrainPhase,
    bell: Option<(Pin<Box<OwnedNotified>>, Waker)>,
}

impl DrainWatch {
    /// The phase, if it changed since the last call.
    pub(super) fn poll_phase(&mut self, cx: &mut Context<'_>) -> Option<DrainPhase> {
        loop {
            let stale = self.bell.as_ref().is_none_or(|(_, waker)| !waker.will_wake(cx.waker()));
            let rang = stale && {
                // Registers before it reads, so that no change between the two is missed.
                let mut bell = Box::pin(Arc::clone(&self.drain.0.changed).notified_owned());
                let rang = bell.as_mut().poll(cx).is_ready();
                self.bell = Some((bell, cx.waker().clone()));
                rang
            };
            let phase = self.drain.phase();
            if phase > self.heard {
                self.heard = phase;
                self.bell = None;
                return Some(phase);
            }
            if !rang {
                return None;
            }
            self.bell = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;
    use crate::types::Tick;

    #[tokio::test(start_paused = true)]
    async fn the_phases_come_in_order_and_on_time() {
        let clock = Clock::start();
        let drain = Drain::new();
        let shutdown = Shutdown { delay: Duration::from_secs(5), drain: Duration::from_secs(60) };
        let seen = async {
            let mut seen = Vec::new();
            for phase in PHASES {
                drain.reached(phase).await;
                seen.push((phase, clock.now()));
            }
            seen
        };
        let (seen, ()) = tokio::join!(seen, drain.leave(clock, &shutdown));
        let at = |secs: u64| Tick::from_millis(secs * 1000);
        assert_eq!(
            seen,
            [
                (DrainPhase::Open, at(0)),
                (DrainPhase::Leaving, at(0)),
                (DrainPhase::Draining, at(5)),
                (DrainPhase::Over, at(65)),
                (DrainPhase::Cut, at(66))
            ]
        );
    }

    async fn hear(drain_watch: &mut DrainWatch) -> Option<DrainPhase> {
        std::future::poll_fn(|cx| Poll::Ready(drain_watch.poll_phase(cx))).await
    }

    #[tokio::test]
    async fn an_ear_hears_a_change_once_and_wakes_for_it() {
        let drain = Drain::new();
        let mut drain_watch = drain.drain_watch();
        assert_eq!(hear(&mut drain_watch).await, None);
        drain.advance(DrainPhase::Draining);
        assert_eq!(hear(&mut drain_watch).await, Some(DrainPhase::Draining));
        assert_eq!(hear(&mut drain_watch).await, None);
        drain.advance(DrainPhase::Leaving);
        assert_eq!(hear(&mut drain_watch).await, None, "there is no way back");
        let mut drain_watch = drain.drain_watch();
        let mut told = Vec::new();
        let listen = std::future::poll_fn(|cx| {
            while let Some(phase) = drain_watch.poll_phase(cx) {
                told.push(phase);
            }
            if told.last() == Some(&DrainPhase::Cut) { Poll::Ready(()) } else { Poll::Pending }
        });
        tokio::join!(listen, async {
            tokio::task::yield_now().await;
            drain.advance(DrainPhase::Over);
            tokio::task::yield_now().await;
            drain.advance(DrainPhase::Cut);
        });
        assert_eq!(told, [DrainPhase::Draining, DrainPhase::Over, DrainPhase::Cut]);
    }
}

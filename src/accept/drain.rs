//! How the gateway leaves: the phases, and how connections hear of them.
//!
//! A [`Drain`] is shared by whoever decides to leave, the listeners, and the gateway. Time
//! is played by [`Drain::leave`]; everybody else only asks for the phase or waits for one.

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

/// Where the process is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DrainPhase {
    /// Serving.
    Open,
    /// Readiness fails, so that no new clients are sent here; everything is still served.
    Leaving,
    /// No new connections; idle ones are closed; open responses go on. A request that still
    /// comes in on an open connection is refused by the gateway (`shed`).
    Draining,
    /// The drain limit has passed: open responses are told to say so in band and end.
    Over,
    /// What is still open is cut.
    Cut,
}

const PHASES: [DrainPhase; 5] =
    [DrainPhase::Open, DrainPhase::Leaving, DrainPhase::Draining, DrainPhase::Over, DrainPhase::Cut];

/// The shared word on whether the process is leaving.
#[derive(Clone, Debug, Default)]
pub struct Drain(Arc<DrainState>);

#[derive(Debug, Default)]
struct DrainState {
    phase: AtomicU8,
    changed: Arc<Notify>,
}

impl Drain {
    /// How long a response may take to say its last words after the drain limit.
    pub const LAST_WORDS: Duration = Duration::from_secs(1);

    /// Nobody is leaving.
    #[must_use]
    pub fn new() -> Self {
        Drain::default()
    }

    /// The phase of this moment.
    #[must_use]
    pub fn phase(&self) -> DrainPhase {
        PHASES[usize::from(self.0.phase.load(Ordering::Acquire)).min(PHASES.len() - 1)]
    }

    /// Whether readiness must fail.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.phase() >= DrainPhase::Leaving
    }

    /// Whether a request that arrives now is refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.phase() >= DrainPhase::Draining
    }

    /// Steps forward to `phase`; there is no way back.
    pub fn advance(&self, phase: DrainPhase) {
        self.0.phase.fetch_max(phase as u8, Ordering::AcqRel);
        self.0.changed.notify_waiters();
    }

    /// Plays the whole departure: fails readiness, waits `delay`, stops accepting, waits
    /// `drain`, tells the open responses, and cuts what is left. The listeners' futures end
    /// as soon as their connections have ended, so wait for those, not for this:
    /// `select! { () = listener.serve(..) => {}, () = async { drain.leave(..).await; pending().await } => {} }`.
    pub async fn leave(&self, clock: Clock, shutdown: &Shutdown) {
        self.advance(DrainPhase::Leaving);
        clock.sleep_until(Some(clock.now() + shutdown.delay)).await;
        self.advance(DrainPhase::Draining);
        clock.sleep_until(Some(clock.now() + shutdown.drain)).await;
        self.hurry(clock).await;
    }

    /// The end of the departure, without waiting for what is open: it is told, and then cut.
    pub async fn hurry(&self, clock: Clock) {
        self.advance(DrainPhase::Over);
        clock.sleep_until(Some(clock.now() + Self::LAST_WORDS)).await;
        self.advance(DrainPhase::Cut);
    }

    /// Waits until `phase` is reached; at once if it has been.
    pub async fn reached(&self, phase: DrainPhase) {
        loop {
            let changed = self.0.changed.notified();
            if self.phase() >= phase {
                return;
            }
            changed.await;
        }
    }

    /// Something to hear phases with from inside a hand-written poll.
    pub(super) fn ear(&self) -> DrainWatch {
        DrainWatch { drain: self.clone(), heard: DrainPhase::Open, bell: None }
    }
}

/// Hears each change of phase once. Registers its waker once per change and task instead of
/// on every poll: an event must not cost a lock that all connections share.
pub(super) struct DrainWatch {
    drain: Drain,
    heard: DrainPhase,
    bell: Option<(Pin<Box<OwnedNotified>>, Waker)>,
}

impl DrainWatch {
    /// The phase, if it changed since it was last told.
    pub(super) fn poll_news(&mut self, cx: &mut Context<'_>) -> Option<DrainPhase> {
        loop {
            let stale = self.bell.as_ref().is_none_or(|(_, waker)| !waker.will_wake(cx.waker()));
            let rang = stale && {
                // Listen first, look second: a change between the two rings this bell.
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
    use crate::units::Tick;

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

    async fn hear(ear: &mut DrainWatch) -> Option<DrainPhase> {
        std::future::poll_fn(|cx| Poll::Ready(ear.poll_news(cx))).await
    }

    #[tokio::test]
    async fn an_ear_hears_a_change_once_and_wakes_for_it() {
        let drain = Drain::new();
        let mut ear = drain.ear();
        assert_eq!(hear(&mut ear).await, None);
        drain.advance(DrainPhase::Draining);
        assert_eq!(hear(&mut ear).await, Some(DrainPhase::Draining));
        assert_eq!(hear(&mut ear).await, None);
        drain.advance(DrainPhase::Leaving);
        assert_eq!(hear(&mut ear).await, None, "there is no way back");
        let mut ear = drain.ear();
        let mut told = Vec::new();
        let listen = std::future::poll_fn(|cx| {
            while let Some(phase) = ear.poll_news(cx) {
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

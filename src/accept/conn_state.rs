//! State shared by the parts of one connection: its socket, its requests, and the loop that enforces its
//! limits.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::time::Duration;

use crate::clock::Clock;
use crate::types::{ClientState, Tick};

const NEVER: u64 = u64::MAX;

/// Marks a moment that is read from the clock at the next check of the limits.
const JUST_NOW: u64 = NEVER - 1;

/// One client connection. With HTTP/1 everything runs in one task and the atomics only make it `Sync`;
/// with HTTP/2 streams end in tasks of their own.
pub(super) struct ConnState {
    pub(super) clock: Clock,
    /// The client's address as text.
    address: Option<Arc<str>>,
    /// Read state of the current HTTP/1 request's client (HTTP/2 streams have their own).
    pub(super) side: ClientState,
    accepted_at: Tick,
    /// Whether a complete request head has come.
    greeted: AtomicBool,
    /// Whether requests are HTTP/2 streams, each watched in its own task.
    multiplexed: AtomicBool,
    /// Requests whose handler or body still exists.
    open: AtomicUsize,
    /// Since when there is none.
    idle_since: AtomicU64,
    /// When the next head began.
    speaks_since: AtomicU64,
    /// Whether the socket currently accepts no bytes.
    refuses: AtomicBool,
    /// Whether it was asked to close while idle, because its slot is needed.
    asked_to_leave: AtomicBool,
    /// The connection's task, woken when its last stream ends.
    task: OnceLock<Waker>,
}

/// How long a connection may remain in its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnDeadline {
    /// As long as its requests take.
    Never,
    /// A complete request head must come by then.
    Head(Tick),
    /// Something must come by then.
    Idle(Tick),
}

impl ConnState {
    pub(super) fn new(clock: Clock, address: Option<Arc<str>>) -> Arc<Self> {
        let now = clock.now();
        Arc::new(ConnState {
            clock,
            side: ClientState::of(address.clone()),
            address,
            accepted_at: now,
            greeted: AtomicBool::new(false),
            multiplexed: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            idle_since: AtomicU64::new(now.as_nanos()),
            speaks_since: AtomicU64::new(NEVER),
            refuses: AtomicBool::new(false),
            asked_to_leave: AtomicBool::new(false),
            task: OnceLock::new(),
        })
    }

    pub(super) fn accepted_at(&self) -> Tick {
        self.accepted_at
    }

    /// The read state for a further stream.
    pub(super) fn side_of_a_stream(&self) -> ClientState {
        ClientState::of(self.address.clone())
    }

    /// Since when it has been idle; `None` during a request, or before the first one.
    pub(super) fn idle_since(&self) -> Option<Tick> {
        let is_idle = self.greeted.load(Ordering::Relaxed)
            && !self.has_open()
            && !self.refuses.load(Ordering::Relaxed)
            && (self.is_multiplexed() || self.speaks_since.load(Ordering::Relaxed) == NEVER);
        is_idle.then(|| Tick::from_nanos(self.idle_since.load(Ordering::Relaxed)))
    }

    /// Asks it to close if still idle.
    pub(super) fn ask_to_leave(&self) {
        self.asked_to_leave.store(true, Ordering::Relaxed);
        if let Some(task) = self.task.get() {
            task.wake_by_ref();
        }
    }

    pub(super) fn may_stay(&self) {
        self.asked_to_leave.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_asked_to_leave(&self) -> bool {
        self.asked_to_leave.load(Ordering::Relaxed)
    }

    /// Records a request's head. The request is open until the returned value is dropped.
    pub(super) fn greet(self: &Arc<Self>, multiplexed: bool) -> OpenRequest {
        self.greeted.store(true, Ordering::Relaxed);
        self.multiplexed.store(multiplexed, Ordering::Relaxed);
        self.speaks_since.store(NEVER, Ordering::Relaxed);
        self.open.fetch_add(1, Ordering::AcqRel);
        OpenRequest(Arc::clone(self))
    }

    pub(super) fn is_multiplexed(&self) -> bool {
        self.multiplexed.load(Ordering::Relaxed)
    }

    /// Records received bytes. Usually they contain a whole head, so reading the clock is left to
    /// [`ConnState::due`], which is called whenever the connection waits.
    pub(super) fn heard(&self) {
        if self.open.load(Ordering::Relaxed) == 0 && self.speaks_since.load(Ordering::Relaxed) == NEVER {
            self.speaks_since.store(JUST_NOW, Ordering::Relaxed);
        }
    }

    /// Records whether the socket accepts bytes.
    pub(super) fn set_refuses(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::Relaxed);
        if !refuses {
            // The tail of a response was sent: the idle time begins here, not at the body's end.
            self.idle_since.store(self.clock.now().as_nanos(), Ordering::Relaxed);
        }
    }

    /// The limit that currently applies. A socket that accepts no bytes is under the write-stall limit.
    pub(super) fn due(&self, header_timeout: Duration, idle_timeout: Duration) -> ConnDeadline {
        if self.speaks_since.load(Ordering::Relaxed) == JUST_NOW {
            self.speaks_since.store(self.clock.now().as_nanos(), Ordering::Relaxed);
        }
        if !self.greeted.load(Ordering::Relaxed) {
            return ConnDeadline::Head(self.accepted_at + header_timeout);
        }
        if self.open.load(Ordering::Acquire) > 0 || self.refuses.load(Ordering::Relaxed) {
            return ConnDeadline::Never;
        }
        let idle = ConnDeadline::Idle(Tick::from_nanos(self.idle_since.load(Ordering::Relaxed)) + idle_timeout);
        match self.speaks_since.load(Ordering::Relaxed) {
            // HTTP/2 peers also send pings and settings, so only streams count.
            _ if self.is_multiplexed() => idle,
            NEVER => idle,
            since => ConnDeadline::Head(Tick::from_nanos(since) + header_timeout),
        }
    }

    /// Stores the waker of the connection's task for the end of a stream.
    pub(super) fn driven_by(&self, waker: &Waker) {
        self.task.get_or_init(|| waker.clone());
    }

    pub(super) fn has_open(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }
}

/// A request in progress.
pub(super) struct OpenRequest(Arc<ConnState>);

impl OpenRequest {
    pub(super) fn peer(&self) -> &Arc<ConnState> {
        &self.0
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.idle_since.store(self.0.clock.now().as_nanos(), Ordering::Relaxed);
        let before = self.0.open.fetch_sub(1, Ordering::AcqRel);
        if before == 1
            && self.0.is_multiplexed()
            && let Some(task) = self.0.task.get()
        {
            task.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Duration = Duration::from_secs(10);
    const IDLE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn each_state_has_its_own_limit() {
        let clock = Clock::start();
        let at = |secs: u64| Tick::from_millis(secs * 1000);
        let wait = |secs| async move { clock.sleep_until(Some(at(secs))).await };
        let peer = ConnState::new(clock, None);
        peer.heard();
        assert_eq!(peer.due(HEAD, IDLE), ConnDeadline::Head(at(10)), "from the accepted connection");
        wait(3).await;
        let open = peer.greet(false);
        assert_eq!(peer.due(HEAD, IDLE), ConnDeadline::Never);
        wait(100).await;
        drop(open);
        assert_eq!(peer.due(HEAD, IDLE), ConnDeadline::Idle(at(160)));
        for secs in [150, 152] {
            wait(secs).await;
            peer.heard();
            assert_eq!(peer.due(HEAD, IDLE), ConnDeadline::Head(at(160)), "from the first byte of the next head");
        }
        let _open = peer.greet(false);
        assert_eq!(peer.due(HEAD, IDLE), ConnDeadline::Never);
    }

    #[tokio::test(start_paused = true)]
    async fn the_tail_of_an_answer_is_not_idleness() {
        let clock = Clock::start();
        let peer = ConnState::new(clock, None);
        drop(peer.greet(false));
        peer.set_refuses(true);
        assert_eq!(peer.due(HEAD, IDLE), ConnDeadline::Never);
        clock.sleep_until(Some(Tick::from_millis(5000))).await;
        peer.set_refuses(false);
        assert_eq!(peer.due(HEAD, IDLE), ConnDeadline::Idle(Tick::from_millis(65_000)));
    }
}

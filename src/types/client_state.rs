//! Read state of one client, shared between its connection and the response body.
//!
//! hyper stops polling a response body once its own buffers are full, so a timer inside the body cannot
//! notice a client that stopped reading. `accept` notices it at the socket and records it in this
//! cell, which travels with the request body; `forward` reads it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use super::Tick;

/// Why `accept` closed the connection of a client that did not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DisconnectReason {
    /// The client accepted no byte for `write_stall`.
    WriteStall,
    /// The class's total time limit passed while the client was not reading.
    Total,
    /// The drain limit passed while the client was not reading.
    Drain,
}

/// A cell shared by a request's connection (or HTTP/2 stream) and its response body.
#[derive(Clone, Debug, Default)]
pub struct ClientState(Arc<Cell>);

#[derive(Debug)]
struct Cell {
    address: Option<Arc<str>>,
    refused_since: AtomicU64,
    resumed_at: AtomicU64,
    limited_since: AtomicU64,
    total_deadline: AtomicU64,
    severed: AtomicU8,
    drain_over: AtomicBool,
}

const NEVER: u64 = u64::MAX;

impl Cell {
    fn of(address: Option<Arc<str>>) -> Self {
        Cell {
            address,
            refused_since: AtomicU64::new(NEVER),
            resumed_at: AtomicU64::new(NEVER),
            limited_since: AtomicU64::new(NEVER),
            total_deadline: AtomicU64::new(NEVER),
            severed: AtomicU8::new(0),
            drain_over: AtomicBool::new(false),
        }
    }
}

impl Default for Cell {
    fn default() -> Self {
        Cell::of(None)
    }
}

impl ClientState {
    /// The state of a client at `address`, if known.
    #[must_use]
    pub fn of(address: Option<Arc<str>>) -> Self {
        ClientState(Arc::new(Cell::of(address)))
    }

    /// The peer address of the connection, without a port.
    #[must_use]
    pub fn address(&self) -> Option<&str> {
        self.0.address.as_deref()
    }

    /// A stretch of not reading longer than this marks the request `client_limited`
    /// (`docs/semantics.md`, section 1).
    pub const PATIENCE: Duration = Duration::from_millis(100);

    /// Records that the client's socket (or HTTP/2 window) accepted no byte at `at`. Keeps the start of
    /// the stretch.
    pub fn refuses(&self, at: Tick) {
        let _ = self.0.refused_since.compare_exchange(NEVER, at.as_nanos(), Ordering::AcqRel, Ordering::Acquire);
    }

    /// Records that the client reads again. A stretch above [`ClientState::PATIENCE`] is remembered.
    pub fn accepts(&self, at: Tick) {
        if let Some(since) = self.limited_since(at) {
            self.0.limited_since.store(since.as_nanos(), Ordering::Release);
        }
        if self.0.refused_since.swap(NEVER, Ordering::AcqRel) != NEVER {
            self.0.resumed_at.store(at.as_nanos(), Ordering::Release);
        }
    }

    /// When the client resumed reading, if it ever stopped. The idle limit is suspended meanwhile and
    /// restarts here unless an event came later.
    #[must_use]
    pub fn resumed_at(&self) -> Option<Tick> {
        moment(&self.0.resumed_at)
    }

    /// Start of the current stretch of not reading.
    #[must_use]
    pub fn refused_since(&self) -> Option<Tick> {
        moment(&self.0.refused_since)
    }

    /// Start of the first stretch of not reading that lasted more than 100 ms, up to `at`.
    #[must_use]
    pub fn limited_since(&self, at: Tick) -> Option<Tick> {
        let long = |since: &Tick| at.since(*since) > Self::PATIENCE;
        moment(&self.0.limited_since).or_else(|| self.refused_since().filter(long))
    }

    /// Whether such a stretch exists.
    #[must_use]
    pub fn is_limited(&self, at: Tick) -> bool {
        self.limited_since(at).is_some()
    }

    /// Clears the state between two requests of one connection.
    pub fn reset(&self) {
        self.0.limited_since.store(NEVER, Ordering::Release);
        self.0.refused_since.store(NEVER, Ordering::Release);
        self.0.resumed_at.store(NEVER, Ordering::Release);
        self.0.total_deadline.store(NEVER, Ordering::Release);
        self.0.severed.store(0, Ordering::Release);
    }

    /// Sets the end of the request's total time limit. `accept` enforces it while the client is not
    /// reading, `forward` otherwise.
    pub fn set_total_deadline(&self, deadline: Tick) {
        self.0.total_deadline.store(deadline.as_nanos(), Ordering::Release);
    }

    /// Clears the total time limit because the response's last byte was handed over; the rest of the write
    /// is bounded by the write stall alone.
    pub fn lift_total_deadline(&self) {
        self.0.total_deadline.store(NEVER, Ordering::Release);
    }

    /// End of the request's total time limit.
    #[must_use]
    pub fn total_deadline(&self) -> Option<Tick> {
        moment(&self.0.total_deadline)
    }

    /// Records that the drain limit has passed. `accept` polls the handler or body right afterwards,
    /// so a caller that checks [`ClientState::drain_is_over`] on each poll needs no waker.
    pub fn end_drain(&self) {
        self.0.drain_over.store(true, Ordering::Release);
    }

    /// Whether the drain limit has passed. The response then reports it in band and ends, or is cut a
    /// moment later.
    #[must_use]
    pub fn drain_is_over(&self) -> bool {
        self.0.drain_over.load(Ordering::Acquire)
    }

    /// Resolves when the drain limit has passed. Registers no waker, see [`ClientState::end_drain`].
    pub async fn drain_over(&self) {
        std::future::poll_fn(|_| if self.drain_is_over() { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// Records why `accept` is about to close the connection, for the body that is dropped next.
    pub fn sever(&self, why: DisconnectReason) {
        let code = match why {
            DisconnectReason::WriteStall => 1,
            DisconnectReason::Total => 2,
            DisconnectReason::Drain => 3,
        };
        let _ = self.0.severed.compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Why `accept` closed the connection, if it did.
    #[must_use]
    pub fn severed(&self) -> Option<DisconnectReason> {
        match self.0.severed.load(Ordering::Acquire) {
            1 => Some(DisconnectReason::WriteStall),
            2 => Some(DisconnectReason::Total),
            3 => Some(DisconnectReason::Drain),
            _ => None,
        }
    }
}

fn moment(cell: &AtomicU64) -> Option<Tick> {
    Some(cell.load(Ordering::Acquire)).filter(|nanos| *nanos != NEVER).map(Tick::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_refusal_leaves_no_mark_and_a_long_one_does() {
        let side = ClientState::default();
        side.refuses(Tick::from_millis(10));
        side.refuses(Tick::from_millis(60));
        assert_eq!(side.resumed_at(), None);
        side.accepts(Tick::from_millis(110));
        side.accepts(Tick::from_millis(120));
        assert_eq!(side.resumed_at(), Some(Tick::from_millis(110)));
        assert!(!side.is_limited(Tick::from_millis(500)));
        side.refuses(Tick::from_millis(600));
        assert!(!side.is_limited(Tick::from_millis(700)));
        assert!(side.is_limited(Tick::from_millis(701)));
        side.accepts(Tick::from_millis(800));
        assert!(side.is_limited(Tick::from_millis(900)), "the mark stays");
    }

    #[test]
    fn the_first_reason_to_cut_is_kept() {
        let side = ClientState::default();
        assert_eq!(side.severed(), None);
        side.sever(DisconnectReason::Total);
        side.sever(DisconnectReason::WriteStall);
        assert_eq!(side.severed(), Some(DisconnectReason::Total));
    }
}

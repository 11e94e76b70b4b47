//! Signals of an engine between health checks: its last sign of life, and its departure.
//!
//! Shared by the relays of its responses (one relaxed load per read with a token, a store every 100 ms), the
//! attempts that wait for it, and its probe. Lives as long as the engine is
//! known.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::sync::Mutex;
use crate::types::Tick;

/// The signals of one engine; see the module.
#[derive(Debug, Default)]
pub struct EngineSignals {
    /// The last token or finished response, in nanoseconds plus one; 0 if none. Up to [`EngineSignals::GRAIN`] too
    /// early.
    alive: AtomicU64,
    /// Number of departures.
    departures: AtomicU64,
    /// Attempts that wait for the start of their response.
    waiting: Mutex<WatchSlots>,
    /// When its rejection of the pool's key was last logged, in nanoseconds plus one.
    key_refusal_told: AtomicU64,
    /// Whether its usage event has members that stand on the finish event if usage is not requested.
    moves_members: AtomicBool,
}

#[derive(Debug, Default)]
struct WatchSlots {
    wakers: Vec<Option<Waker>>,
    free: Vec<usize>,
}

impl WatchSlots {
    /// Slots kept for reuse.
    const KEPT: usize = 64;
}

impl EngineSignals {
    /// Resolution of signs of life.
    pub const GRAIN: Duration = Duration::from_millis(100);
    /// Interval of the log line about a rejected key.
    const TOLD_EVERY: Duration = Duration::from_secs(60);

    /// Records a token, or the end of a response.
    pub fn is_alive(&self, at: Tick) {
        let known = self.alive.load(Ordering::Relaxed);
        let now = at.as_nanos().saturating_add(1);
        if known == 0 || now.saturating_sub(known) >= Self::GRAIN.as_nanos() as u64 {
            self.alive.store(now, Ordering::Relaxed);
        }
    }

    /// Its last sign of life.
    #[must_use]
    pub fn last_alive(&self) -> Option<Tick> {
        self.alive.load(Ordering::Relaxed).checked_sub(1).map(Tick::from_nanos)
    }

    /// Records a departure (connection refused, or health 503) and wakes the attempts that wait for
    /// it.
    pub fn goes_away(&self) {
        self.departures.fetch_add(1, Ordering::AcqRel);
        let wakers: Vec<Waker> = self.waiting.lock().wakers.iter_mut().filter_map(Option::take).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// It has moved members from its finish event to its usage event.
    pub fn has_moved_members(&self) {
        self.moves_members.store(true, Ordering::Relaxed);
    }

    /// Whether it has ever done so.
    #[must_use]
    pub fn moves_members(&self) -> bool {
        self.moves_members.load(Ordering::Relaxed)
    }

    /// Whether it is time to say that it refuses the pool's key.
    #[must_use]
    pub fn is_to_tell_of_key(&self, at: Tick) -> bool {
        let now = at.as_nanos().saturating_add(1);
        let known = self.key_refusal_told.load(Ordering::Relaxed);
        let is_due = known == 0 || now.saturating_sub(known) >= Self::TOLD_EVERY.as_nanos() as u64;
        is_due && self.key_refusal_told.compare_exchange(known, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// Tells one attempt whether its engine goes away before its response starts.
#[derive(Debug)]
pub struct DepartureWatch {
    signals: Arc<EngineSignals>,
    /// Departures seen.
    seen: u64,
    slot: Option<usize>,
}

impl DepartureWatch {
    /// Watches from now on.
    #[must_use]
    pub fn new(signals: &Arc<EngineSignals>) -> Self {
        let seen = signals.departures.load(Ordering::Acquire);
        DepartureWatch { signals: Arc::clone(signals), seen, slot: None }
    }

    /// Ready if the engine has departed since the last call.
    pub fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        // Registers first, because a departure is counted before wakers are called.
        self.register(cx.waker());
        let departures = self.signals.departures.load(Ordering::Acquire);
        if departures == self.seen {
            return Poll::Pending;
        }
        self.seen = departures;
        Poll::Ready(())
    }

    fn register(&mut self, waker: &Waker) {
        let mut slots = self.signals.waiting.lock();
        match self.slot {
            Some(slot) => match &mut slots.wakers[slot] {
                Some(known) if known.will_wake(waker) => {}
                empty => *empty = Some(waker.clone()),
            },
            None => {
                let slot = slots.free.pop().unwrap_or_else(|| {
                    slots.wakers.push(None);
                    slots.wakers.len() - 1
                });
                slots.wakers[slot] = Some(waker.clone());
                self.slot = Some(slot);
            }
        }
    }
}

impl Drop for DepartureWatch {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            let mut slots = self.signals.waiting.lock();
            let waker = slots.wakers[slot].take();
            slots.free.push(slot);
            if slots.free.len() == slots.wakers.len() && slots.wakers.len() > WatchSlots::KEPT {
                // Releases the memory of a burst.
                *slots = WatchSlots::default();
            }
            drop(slots);
            drop(waker);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_departure_wakes_whoever_waits_and_is_seen_once() {
        let (signals, count) = (Arc::new(EngineSignals::default()), Arc::new(Count::default()));
        let waker = Waker::from(Arc::clone(&count));
        let cx = Context::from_waker(&waker);
        let mut first = DepartureWatch::new(&signals);
        let mut second = DepartureWatch::new(&signals);
        assert!(first.poll(&cx).is_pending() && second.poll(&cx).is_pending() && first.poll(&cx).is_pending());
        drop(second);
        signals.goes_away();
        assert_eq!(count.0.load(Ordering::Relaxed), 1, "one waits, and is woken once");
        assert!(first.poll(&cx).is_ready());
        assert!(first.poll(&cx).is_pending());
        let mut later = DepartureWatch::new(&signals);
        assert!(later.poll(&cx).is_pending(), "what was before it is nothing to it");
        signals.goes_away();
        assert_eq!(count.0.load(Ordering::Relaxed), 3);
        drop((first, later));
        assert!(signals.waiting.lock().wakers.iter().all(Option::is_none), "nobody is left behind");
        let burst: Vec<_> = (0..1_000).map(|_| DepartureWatch::new(&signals)).collect();
        let burst: Vec<_> = burst.into_iter().map(|mut watch| (watch.poll(&cx), watch)).collect();
        assert_eq!(signals.waiting.lock().wakers.len(), 1_000);
        drop(burst);
        assert!(signals.waiting.lock().wakers.is_empty(), "nor memory");
    }

    #[test]
    fn signs_of_life_are_known_to_a_tenth_of_a_second() {
        let signals = EngineSignals::default();
        assert_eq!(signals.last_alive(), None);
        for (at, known) in [(0, 0), (99, 0), (100, 100), (150, 100), (5_000, 5_000), (4_000, 5_000)] {
            signals.is_alive(Tick::from_millis(at));
            assert_eq!(signals.last_alive(), Some(Tick::from_millis(known)), "{at}");
        }
    }

    #[test]
    fn a_refused_key_is_told_once_a_minute() {
        let signals = EngineSignals::default();
        let told = |seconds: u64| signals.is_to_tell_of_key(Tick::from_millis(seconds * 1_000));
        assert_eq!([0, 1, 59, 60, 61, 120].map(told), [true, false, false, true, false, true]);
    }
}

//! The only reader of time.
//!
//! Built on the runtime's instant, so that tests with paused time control every limit, timestamp and
//! retry. A serving process reads the system's clock itself ([`Clock::of_system`]), because each request takes
//! six readings and one over the runtime's and the standard library's types costs 75 instructions instead of 30.
//! Pure modules take a [`Tick`] as an argument.

mod alarm;

pub use alarm::{Alarm, Alarms};

use std::num::NonZeroU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use crate::types::Tick;

/// The clock of the process. Copies share one origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    /// The system's monotonic clock at the origin, in nanoseconds; `None` to ask the runtime.
    system_origin: Option<NonZeroU64>,
}

impl Clock {
    /// A clock of the runtime with its origin now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one room that may read the time")]
    pub fn start() -> Self {
        Clock { origin: Instant::now(), system_origin: None }
    }

    /// The same, read from the system, whatever the runtime's time is. On Linux both are `CLOCK_MONOTONIC`
    /// (clock_gettime(2)); elsewhere this is [`Clock::start`].
    #[must_use]
    pub fn of_system() -> Self {
        // Read first, so that a timer set for a moment never fires before it.
        let system_origin = system_nanos();
        Clock { system_origin, ..Clock::start() }
    }

    /// The current moment.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one room that may read the time")]
    pub fn now(&self) -> Tick {
        match self.system_origin.and_then(|origin| Some((origin, system_nanos()?))) {
            Some((origin, now)) => Tick::from_nanos(now.get().saturating_sub(origin.get())),
            None => self.tick_of(Instant::now()),
        }
    }

    /// Time of day, as time since the Unix epoch.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one room that may read the time")]
    pub fn wall(&self) -> Duration {
        system_wall().unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
    }

    /// The runtime's instant of a moment, to arm a timer.
    #[must_use]
    pub fn instant(&self, at: Tick) -> Instant {
        let far = self.origin + Self::FAR;
        self.origin.checked_add(Duration::from_nanos(at.as_nanos())).map_or(far, |instant| instant.min(far))
    }

    /// Sleeps until `deadline`; forever without one.
    pub async fn sleep_until(&self, deadline: Option<Tick>) {
        match deadline {
            Some(at) => tokio::time::sleep_until(self.instant(at)).await,
            None => std::future::pending().await,
        }
    }

    /// Far enough to mean "never", near enough for the runtime's timer.
    const FAR: Duration = Duration::from_secs(60 * 60 * 24 * 365);

    fn tick_of(&self, instant: Instant) -> Tick {
        Tick::ZERO + instant.saturating_duration_since(self.origin)
    }
}

/// The system's monotonic clock, in nanoseconds.
#[cfg(target_os = "linux")]
#[inline]
fn system_nanos() -> Option<NonZeroU64> {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    NonZeroU64::new(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

/// The system's time of day, as time since the Unix epoch.
#[cfg(target_os = "linux")]
fn system_wall() -> Option<Duration> {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    Some(Duration::new(u64::try_from(now.tv_sec).ok()?, u32::try_from(now.tv_nsec).ok()?))
}

#[cfg(not(target_os = "linux"))]
fn system_nanos() -> Option<NonZeroU64> {
    None
}

#[cfg(not(target_os = "linux"))]
fn system_wall() -> Option<Duration> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "compares the clock with the runtime's instant")]
    fn a_timer_set_for_a_moment_of_the_systems_clock_never_fires_before_it() {
        let clock = Clock::of_system();
        let before = Instant::now();
        let read = clock.now();
        assert!(clock.instant(read) >= before);
        assert!(clock.now() >= read);
    }

    #[tokio::test(start_paused = true)]
    async fn a_paused_runtime_rules_the_clock() {
        let clock = Clock::start();
        assert_eq!(clock.now(), Tick::ZERO);
        clock.sleep_until(Some(Tick::from_millis(250))).await;
        assert_eq!(clock.now(), Tick::from_millis(250));
    }
}

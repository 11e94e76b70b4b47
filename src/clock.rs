//! The only reader of time.
//!
//! Built on the runtime's instant, so that tests with paused time control every limit, timestamp and
//! retry. Pure modules take a [`Tick`] as an argument.

mod alarm;

pub use alarm::{Alarm, Alarms};

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use crate::types::Tick;

/// The clock of the process. Copies share one origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// A clock with its origin now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one room that may read the time")]
    pub fn start() -> Self {
        Clock { origin: Instant::now() }
    }

    /// The current moment.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one room that may read the time")]
    pub fn now(&self) -> Tick {
        self.tick_of(Instant::now())
    }

    /// Time of day, as time since the Unix epoch.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the one room that may read the time")]
    pub fn wall(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_paused_runtime_rules_the_clock() {
        let clock = Clock::start();
        assert_eq!(clock.now(), Tick::ZERO);
        clock.sleep_until(Some(Tick::from_millis(250))).await;
        assert_eq!(clock.now(), Tick::from_millis(250));
    }
}

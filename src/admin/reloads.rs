//! Reloads of the settings, at most one per second.
//!
//! Requests that come too early wait, and one reload answers all of them: it reads everything that they can
//! have written before they asked.

use std::time::Duration;

use tokio::sync::Mutex;

use super::Reloaded;
use crate::clock::Clock;
use crate::types::Tick;

/// From the beginning of a reload to that of the next one.
const EVERY: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct Reloads {
    clock: Clock,
    /// Start of the last reload and its result; no result if the requester left.
    last: Mutex<Option<(Tick, Option<Reloaded>)>>,
}

impl Reloads {
    pub(super) fn new(clock: Clock) -> Self {
        Reloads { clock, last: Mutex::default() }
    }

    /// Reloads by `reload`, or returns the result of a concurrent one.
    pub(super) async fn run<F: Future<Output = Reloaded>>(&self, reload: impl FnOnce() -> F) -> Reloaded {
        let came = self.clock.now();
        let mut last = self.last.lock().await;
        match &*last {
            Some((began, Some(reloaded))) if *began > came => return reloaded.clone(),
            Some((began, _)) => self.clock.sleep_until(Some(*began + EVERY)).await,
            None => {}
        }
        let began = self.clock.now();
        *last = Some((began, None));
        let reloaded = reload().await;
        *last = Some((began, Some(reloaded.clone())));
        reloaded
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::future::join_all;

    use super::*;

    /// Returns the number of previous calls.
    async fn count(reloads: &Cell<usize>) -> Reloaded {
        Err(vec![reloads.replace(reloads.get() + 1).to_string()])
    }

    #[tokio::test(start_paused = true)]
    async fn c101_settings_are_read_once_a_second_and_answer_all_who_wait() {
        let (clock, counted) = (Clock::start(), Cell::default());
        let reloads = Reloads::new(clock);
        let all = join_all((0..500).map(|_| reloads.run(|| count(&counted)))).await;
        let said =
            |all: &[Reloaded], number: &str| all.iter().filter(|one| **one == Err(vec![number.to_owned()])).count();
        assert_eq!((said(&all, "0"), said(&all, "1")), (1, 499), "all but the first come before the second begins");
        assert_eq!(clock.now(), Tick::from_millis(1000));
        clock.sleep_until(Some(Tick::from_millis(5000))).await;
        assert_eq!(reloads.run(|| count(&counted)).await, Err(vec!["2".to_owned()]));
        assert_eq!(clock.now(), Tick::from_millis(5000), "nobody waits who comes later");
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_and_leaves_gets_no_further_reload() {
        let (clock, counted) = (Clock::start(), Cell::default());
        let reloads = Reloads::new(clock);
        for _ in 0..100 {
            let one = reloads.run(|| count(&counted));
            let _ = tokio::time::timeout(Duration::from_millis(10), one).await;
        }
        assert_eq!(clock.now(), Tick::from_millis(990));
        assert_eq!(counted.get(), 1);
    }
}

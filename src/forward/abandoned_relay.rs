//! Reads a finished stream to its usage after the client has gone.
//!
//! Without this a client that closes at the finish event would be charged by an event count. The verdict
//! no longer changes, and the engine has nothing left to cancel. The relay's end is reported when the
//! usage is known, the engine's body has ended, or a second has passed since
//! the finish.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use http_body::Body;

use super::conn_pool::UpstreamBody;
use super::relay_events::{RelayEnd, RelayEvents};
use crate::clock::Clock;
use crate::observe::{Ending, Observer};
use crate::types::Tick;

/// How long after the finish usage is awaited.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// A relay whose client has gone.
pub(super) struct AbandonedRelay {
    pub clock: Clock,
    pub engine: UpstreamBody,
    pub observer: Observer,
    /// Taken when the end is reported.
    pub subscriber: Option<Box<dyn RelayEvents>>,
    /// How and when the relay ended.
    pub ending: Ending,
    pub at: Tick,
}

impl AbandonedRelay {
    /// Reads until the usage is known or the time is over.
    pub async fn read(mut self) {
        while let Some(finish) = self.observer.finished_without_usage() {
            let (clock, engine) = (self.clock, &mut self.engine);
            let next = poll_fn(|cx| Pin::new(&mut *engine).poll_frame(cx));
            let frame = tokio::select! {
                biased;
                frame = next => frame,
                () = clock.sleep_until(Some(finish + PATIENCE)) => break,
            };
            let Some(Ok(frame)) = frame else { break };
            if let Ok(bytes) = frame.into_data() {
                self.observer.frame(bytes, clock.now(), &mut |_, _| {});
            }
        }
    }
}

/// Reports the end however the reading stops, also at shutdown of the runtime.
impl Drop for AbandonedRelay {
    fn drop(&mut self) {
        if let Some(subscriber) = self.subscriber.take() {
            let timeline = self.observer.last_look(self.ending, self.at);
            subscriber.end(RelayEnd { timeline, refusal: None, never_sent: false });
        }
    }
}

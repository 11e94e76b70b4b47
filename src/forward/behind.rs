//! Reads on behind the finish of a stream whose client has gone, because its usage follows there.
//!
//! A client that closes at the finish event would otherwise pay by a count of events. The answer is
//! over for everybody else: its verdict does not change any more, and the engine has nothing left to
//! cancel. The keeper hears of the end as soon as the usage is known, the engine's body has ended or
//! a second has passed since the finish.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use http_body::Body;

use super::lines::UpstreamBody;
use super::relay::{RelayEnd, RelayEvents};
use crate::clock::Clock;
use crate::observe::{Ending, Observer};
use crate::units::Tick;

/// How long behind its finish an engine's usage is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// What is left of a relay whose client has gone.
pub(super) struct AbandonedRelay {
    pub clock: Clock,
    pub engine: UpstreamBody,
    pub observer: Observer,
    /// Taken by the end.
    pub keeper: Option<Box<dyn RelayEvents>>,
    /// How the relay ended, and when.
    pub ending: Ending,
    pub at: Tick,
}

impl AbandonedRelay {
    /// Reads until the usage is known, or it is too late for it.
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

/// However the reading ends, also where the runtime does.
impl Drop for AbandonedRelay {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            let timeline = self.observer.last_look(self.ending, self.at);
            keeper.end(RelayEnd { timeline, refusal: None, never_sent: false });
        }
    }
}

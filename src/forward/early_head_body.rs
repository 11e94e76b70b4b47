//! The body of a response head that was sent early: keepalive comments until the engine's response
//! begins, then that response's body.
//!
//! The request continues in the future that would have returned the head. A client that leaves drops it,
//! and with it everything it holds.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use tokio::time::Sleep;

use super::ReplyBody;
use crate::clock::Clock;
use crate::types::Tick;

pub(super) const KEEPALIVE: Bytes = Bytes::from_static(b": keepalive\n\n");

/// The future that serves one request.
pub type Serving = Pin<Box<dyn Future<Output = Response<ReplyBody>> + Send>>;

/// A body sent before the response exists; see the module.
pub struct EarlyHeadBody {
    serving: Serving,
    clock: Clock,
    every: Duration,
    /// Time of the next comment; none before the first, which is sent at once, because the head was sent
    /// early in order to send bytes.
    next: Option<Tick>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// The next part of the body.
pub(super) enum EarlyHeadStep {
    Comment,
    /// The body of the response, whose head is discarded.
    Goes(ReplyBody),
}

impl EarlyHeadBody {
    /// A body that waits for `serving`, with a comment at once and then at every interval.
    #[must_use]
    pub fn new(serving: Serving, clock: Clock, every: Duration) -> Box<Self> {
        Box::new(EarlyHeadBody { serving, clock, every, next: None, timer: None })
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<EarlyHeadStep> {
        let Some(next) = self.next else { return Poll::Ready(self.comment()) };
        if let Poll::Ready(response) = self.serving.as_mut().poll(cx) {
            let mut body = response.into_body();
            if let ReplyBody::Relay(relay) = &mut body {
                relay.comments_from(next);
            }
            return Poll::Ready(EarlyHeadStep::Goes(body));
        }
        let instant = self.clock.instant(next);
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(instant)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(self.comment())
    }

    fn comment(&mut self) -> EarlyHeadStep {
        self.timer = None;
        self.next = Some(self.clock.now() + self.every);
        EarlyHeadStep::Comment
    }
}

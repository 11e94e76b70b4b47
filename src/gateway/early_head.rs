//! Early heads: response heads sent while a request still waits in a queue (`docs/semantics.md`, section 5).
//!
//! A client of a class with `keepalive_seconds` gets a head after `hold_head`, even if no engine was
//! contacted yet. The waiting request puts the head into the [`EarlyHeadSlot`]; [`ServeFuture`], which
//! polls it, returns the head at once and moves the serving future into the response body, where it
//! continues. Whatever follows from queue, seat or engine is reported in
//! events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Response;
use http::response::Parts;
use parking_lot::Mutex;

use crate::clock::Clock;
use crate::forward::{EarlyHeadBody, ReplyBody, Serving};

/// Serves one request until there is a response or an early head.
#[must_use = "nothing is served before it is polled"]
pub struct ServeFuture {
    /// `None` once done.
    serving: Option<Serving>,
    outlet: Option<EarlyHeadSlot>,
    clock: Clock,
}

impl ServeFuture {
    /// `outlet` is where an early head may come from, if allowed.
    pub fn new(serving: Serving, outlet: Option<EarlyHeadSlot>, clock: Clock) -> Self {
        ServeFuture { serving: Some(serving), outlet, clock }
    }
}

impl Future for ServeFuture {
    type Output = Result<Response<ReplyBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut serving = self.serving.take().expect("not polled after it was ready");
        let polled = serving.as_mut().poll(cx);
        let given = self.outlet.as_ref().and_then(EarlyHeadSlot::take);
        let response = match (polled, given) {
            (Poll::Ready(response), None) => response,
            (Poll::Pending, None) => {
                self.serving = Some(serving);
                return Poll::Pending;
            }
            (polled, Some(EarlyHeadSent { head, every })) => {
                if let Poll::Ready(response) = polled {
                    serving = Box::pin(std::future::ready(response));
                }
                Response::from_parts(head, ReplyBody::Ahead(EarlyHeadBody::new(serving, self.clock, every)))
            }
        };
        Poll::Ready(Ok(response))
    }
}

/// The slot for the early head of a request.
#[derive(Clone, Default)]
pub struct EarlyHeadSlot(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    /// No head was sent.
    #[default]
    Held,
    /// A head is on its way to the client.
    Given(Box<EarlyHeadSent>),
    /// A head was sent.
    Out,
}

struct EarlyHeadSent {
    head: Parts,
    every: Duration,
}

impl EarlyHeadSlot {
    /// Sends a head at the next poll of the request's task.
    pub(super) fn give(&self, head: Parts, every: Duration) {
        *self.0.lock() = State::Given(Box::new(EarlyHeadSent { head, every }));
    }

    fn take(&self) -> Option<EarlyHeadSent> {
        let mut state = self.0.lock();
        match &*state {
            State::Held | State::Out => None,
            State::Given(_) => match std::mem::replace(&mut *state, State::Out) {
                State::Given(given) => Some(*given),
                State::Held | State::Out => None,
            },
        }
    }

    /// Whether the client has a head or is about to get one, so that errors are sent as events.
    #[must_use]
    pub fn is_out(&self) -> bool {
        !matches!(*self.0.lock(), State::Held)
    }
}

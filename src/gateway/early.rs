//! The head that goes out while a request still waits in a queue (`docs/semantics.md`, section 5).
//!
//! A client of a class with `keepalive_seconds` gets a head after `hold_head`, also where no engine
//! has been asked yet. Whoever waits then lays the head into the [`EarlyHeadSlot`]; [`ServeFuture`], which
//! polls it, gives it to the client at once, and moves the future that serves the request, as it
//! is, into the answer's body. There it goes on: what a queue, a seat or an engine come to is
//! told in events from then on.

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

/// Serves one request, until there is an answer or a head that goes ahead of it.
#[must_use = "nothing is served before it is polled"]
pub struct ServeFuture {
    /// None once it is done.
    serving: Option<Serving>,
    outlet: Option<EarlyHeadSlot>,
    clock: Clock,
}

impl ServeFuture {
    /// Serves so; `outlet` is where a head may come from, if it may.
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

/// Where a request that is being served leaves the head that goes ahead.
#[derive(Clone, Default)]
pub struct EarlyHeadSlot(Arc<Mutex<State>>);

#[derive(Default)]
enum State {
    /// No head has gone.
    #[default]
    Held,
    /// It is on its way to the client.
    Given(Box<EarlyHeadSent>),
    /// It is out.
    Out,
}

struct EarlyHeadSent {
    head: Parts,
    every: Duration,
}

impl EarlyHeadSlot {
    /// Sends a head, once the task of the request is polled next.
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

    /// Whether the client has a head, or is about to: what comes now is told in events.
    #[must_use]
    pub fn is_out(&self) -> bool {
        !matches!(*self.0.lock(), State::Held)
    }
}

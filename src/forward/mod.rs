//! One attempt at one engine: the request is sent on a pooled connection, the response head is held
//! until the first token, then whole events are relayed as they arrive.
//!
//! [`start`](start()) starts an attempt and returns the engine's head; [`Relay`] holds and relays its
//! body; [`ReplyBody`] is what the client's connection polls. The choice of engine and what follows a
//! failure are `gateway`'s loop over `route::retry`. Dropping any of these values closes the engine's
//! connection, which is how a cancel reaches the engine.

mod abandoned_relay;
mod attempt;
pub mod conn_pool;
pub mod deadlines;
mod early_head_body;
mod gateway_headers;
pub mod header_names;
pub mod headers;
mod relay;
mod relay_events;
pub mod settings;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{HeaderName, HeaderValue};
use http_body::{Body, Frame, SizeHint};

pub use attempt::{AttemptRequest, ConnectError, ConnectErrorKind, ConnectingAttempt, start};
pub use deadlines::{DeadlineAction, Deadlines};
pub use early_head_body::{EarlyHeadBody, Serving};
pub use gateway_headers::GatewayHeaders;
pub use relay::{HoldError, Relay, RelayConfig, TruncatedBody, UpstreamHead};
pub use relay_events::{RelayEnd, RelayEvents};

use crate::http1::{HeaderSink, ResponseHeaders};
use crate::observe::TimeoutKind;
use crate::reject::Rejection;
use early_head_body::{EarlyHeadStep, KEEPALIVE};

/// The body of every response of the gateway.
pub enum ReplyBody {
    /// Made by the gateway: `None` once sent, or if empty.
    Whole(Option<Bytes>),
    /// An engine's response.
    Relay(Box<Relay>),
    /// The body of a head that was sent early.
    Ahead(Box<EarlyHeadBody>),
}

impl ReplyBody {
    /// A body made by the gateway.
    #[must_use]
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        ReplyBody::Whole((!bytes.is_empty()).then_some(bytes))
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = TruncatedBody;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, TruncatedBody>>> {
        loop {
            return match &mut *self {
                ReplyBody::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
                ReplyBody::Relay(relay) => match catch_unwind(AssertUnwindSafe(|| relay.poll_bytes(cx))) {
                    Ok(poll) => poll.map(|bytes| bytes.map(|bytes| bytes.map(Frame::data))),
                    Err(_) => {
                        relay.panicked();
                        Poll::Ready(Some(Err(TruncatedBody)))
                    }
                },
                ReplyBody::Ahead(ahead) => match ready!(ahead.poll(cx)) {
                    EarlyHeadStep::Comment => Poll::Ready(Some(Ok(Frame::data(KEEPALIVE)))),
                    EarlyHeadStep::Goes(body) => {
                        *self = body;
                        continue;
                    }
                },
            };
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ReplyBody::Whole(bytes) => bytes.is_none(),
            ReplyBody::Relay(relay) => relay.is_over(),
            ReplyBody::Ahead(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ReplyBody::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            ReplyBody::Relay(relay) => relay.size_hint(),
            ReplyBody::Ahead(_) => SizeHint::default(),
        }
    }
}

/// The engine's headers, and the gateway's own.
impl ResponseHeaders for ReplyBody {
    fn upstream_headers(&self, to: &mut impl FnMut(&HeaderName, &HeaderValue)) {
        if let ReplyBody::Relay(relay) = self {
            relay.upstream_headers(to);
        }
    }

    fn gateway_headers(&self, head: &mut impl HeaderSink) {
        if let ReplyBody::Relay(relay) = self {
            relay.gateway_headers(head);
        }
    }
}

/// The rejection for a time limit.
#[must_use]
pub fn limit_refusal(timeouts: &settings::Timeouts, limit: TimeoutKind, streams: bool) -> Rejection {
    match limit {
        TimeoutKind::FirstToken if streams => Rejection::FirstTokenTimeout { limit: timeouts.first_token },
        TimeoutKind::FirstToken => Rejection::ResponseHeadTimeout { limit: timeouts.response_head },
        TimeoutKind::Idle => Rejection::IdleTimeout { limit: timeouts.idle },
        TimeoutKind::Total => Rejection::TotalTimeout { limit: timeouts.total },
    }
}

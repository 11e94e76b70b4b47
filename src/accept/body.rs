//! The body of a client's request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::Request;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use parking_lot::Mutex;

use super::head::ParsedHead;
use crate::units::{ClientState, Tick};

/// A request as a connection hands it over. The connection keeps the head too: the next one is
/// nearly the same, as a rule, and is then made of it without a copy.
pub struct IncomingRequest {
    /// Its head.
    pub head: Arc<ParsedHead>,
    /// Its body.
    pub body: RequestBody,
    /// Since when it was there, where it had to wait for its turn before it was read.
    pub since: Option<Tick>,
}

impl From<IncomingRequest> for Request<RequestBody> {
    fn from(IncomingRequest { head, body, .. }: IncomingRequest) -> Self {
        Request::from_parts(Arc::unwrap_or_clone(head).into_parts(), body)
    }
}

/// The body of a client's request, on whatever version of HTTP it came.
pub struct RequestBody {
    source: BodySource,
    client: ClientState,
}

/// Where a body comes from.
pub(super) enum BodySource {
    /// All of it had come with its head.
    Whole(Option<Bytes>),
    /// HTTP/1: the connection hands it over as it comes.
    Flow(Arc<BodyChannel>),
    /// HTTP/2.
    Stream(Incoming),
}

/// A request's body did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The client left.
    #[error("the client left before the end of its request's body")]
    Left,
    /// Its framing cannot be read.
    #[error("the framing of the request's body is broken")]
    Framing,
}

impl RequestBody {
    pub(super) fn new(source: BodySource, client: ClientState) -> Self {
        RequestBody { source, client }
    }

    /// What the connection tells of the client that sends it.
    #[must_use]
    pub fn client(&self) -> &ClientState {
        &self.client
    }
}

impl BodySource {
    pub(super) fn whole(bytes: Bytes) -> Self {
        BodySource::Whole((!bytes.is_empty()).then_some(bytes))
    }

    /// A body that is to come, and where the connection puts it.
    pub(super) fn flow() -> (Self, BodySender) {
        let flow = Arc::new(BodyChannel::default());
        (BodySource::Flow(Arc::clone(&flow)), BodySender(flow))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.source {
            BodySource::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            BodySource::Flow(flow) => flow.poll(cx).map(|next| next.map(|next| next.map(Frame::data))),
            BodySource::Stream(incoming) => {
                Pin::new(incoming).poll_frame(cx).map(|next| next.map(|next| next.map_err(|_| BodyError::Left)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            BodySource::Whole(bytes) => bytes.is_none(),
            BodySource::Flow(_) => false,
            BodySource::Stream(incoming) => incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            BodySource::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            BodySource::Flow(_) => SizeHint::default(),
            BodySource::Stream(incoming) => incoming.size_hint(),
        }
    }
}

/// What a connection and the body of its request share. Both live in one task as a rule; a
/// lock that nobody else holds lets them live in two.
#[derive(Default)]
pub(super) struct BodyChannel(Mutex<State>);

#[derive(Default)]
struct State {
    /// What has come and was not taken.
    ready: Option<Bytes>,
    end: Option<Result<(), BodyError>>,
    /// Who waits for more.
    waiting: Option<Waker>,
}

impl BodyChannel {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyError>>> {
        let mut state = self.0.lock();
        if let Some(bytes) = state.ready.take() {
            return Poll::Ready(Some(Ok(bytes)));
        }
        match state.end {
            Some(Ok(())) => Poll::Ready(None),
            Some(Err(cut)) => {
                state.end = Some(Ok(()));
                Poll::Ready(Some(Err(cut)))
            }
            None => {
                state.waiting = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// The connection's side of a body that is to come. Dropped before the end, the client has
/// left.
pub(super) struct BodySender(Arc<BodyChannel>);

impl BodySender {
    /// Whether somebody waits for more of it.
    pub(super) fn is_waited_for(&self) -> bool {
        self.0.0.lock().waiting.is_some()
    }

    /// Hands bytes over to the one who waits. `ours` is the task that asks them next anyway.
    pub(super) fn give(&self, bytes: Bytes, ours: &Waker) {
        self.change(|state| state.ready = Some(bytes), ours);
    }

    /// There is no more.
    pub(super) fn end(&self, end: Result<(), BodyError>, ours: &Waker) {
        self.change(|state| state.end = state.end.or(Some(end)), ours);
    }

    fn change(&self, change: impl FnOnce(&mut State), ours: &Waker) {
        let waiting = {
            let mut state = self.0.0.lock();
            change(&mut state);
            state.waiting.take()
        };
        if let Some(waker) = waiting.filter(|waker| !waker.will_wake(ours)) {
            waker.wake();
        }
    }
}

impl Drop for BodySender {
    fn drop(&mut self) {
        self.end(Err(BodyError::Left), Waker::noop());
    }
}

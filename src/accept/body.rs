//! A client's request and its body.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::Request;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use parking_lot::Mutex;

use crate::http1::ParsedHead;
use crate::types::{ClientState, Tick};

/// Any error of a body or service.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A request as received by a connection. The connection shares the head, from which it derives the next
/// one: mostly equal, and then without a copy.
pub struct IncomingRequest {
    /// Its head.
    pub head: Arc<ParsedHead>,
    /// Its body.
    pub body: RequestBody,
    /// When it was available, if it had to wait for its turn to be read.
    pub since: Option<Tick>,
}

impl From<IncomingRequest> for Request<RequestBody> {
    fn from(IncomingRequest { head, body, .. }: IncomingRequest) -> Self {
        Request::from_parts(Arc::unwrap_or_clone(head).into_parts(), body)
    }
}

/// The body of a client's request, over any HTTP version.
pub struct RequestBody {
    source: BodySource,
    client: ClientState,
}

/// Source of a body.
pub(super) enum BodySource {
    /// It arrived completely with its head.
    Whole(Option<Bytes>),
    /// HTTP/1: fed by the connection as it arrives.
    Flow(Arc<BodyChannel>),
    /// HTTP/2.
    Stream(Incoming),
}

/// The request's body was not received completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The client left.
    #[error("the client left before the end of its request's body")]
    Left,
    /// Invalid framing.
    #[error("the framing of the request's body is broken")]
    Framing,
}

impl RequestBody {
    pub(super) fn new(source: BodySource, client: ClientState) -> Self {
        RequestBody { source, client }
    }

    /// The read state of the client that sends it.
    #[must_use]
    pub fn client(&self) -> &ClientState {
        &self.client
    }
}

impl BodySource {
    pub(super) fn whole(bytes: Bytes) -> Self {
        BodySource::Whole((!bytes.is_empty()).then_some(bytes))
    }

    /// A body still to come, and the connection's sending end.
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

/// State shared by a connection and the body of its request. Both usually run in one task; an uncontended
/// lock allows two.
#[derive(Default)]
pub(super) struct BodyChannel(Mutex<State>);

#[derive(Default)]
struct State {
    /// Bytes not taken yet.
    ready: Option<Bytes>,
    end: Option<Result<(), BodyError>>,
    /// The task that waits for more.
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

/// The connection's end of a body still to come. Dropping it before the end means that the client
/// left.
pub(super) struct BodySender(Arc<BodyChannel>);

impl BodySender {
    /// Whether a task waits for more.
    pub(super) fn is_waited_for(&self) -> bool {
        self.0.0.lock().waiting.is_some()
    }

    /// Passes bytes on. `ours` is the waker of the task that polls the body next anyway.
    pub(super) fn give(&self, bytes: Bytes, ours: &Waker) {
        self.change(|state| state.ready = Some(bytes), ours);
    }

    /// Ends the body.
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

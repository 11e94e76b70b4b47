//! The body of a client's request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::Request;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use parking_lot::Mutex;

use super::head::Head;
use crate::units::{ClientState, Tick};

/// A request as a connection hands it over. The connection keeps the head too: the next one is
/// nearly the same, as a rule, and is then made of it without a copy.
pub struct Received {
    /// Its head.
    pub head: Arc<Head>,
    /// Its body.
    pub body: RequestBody,
    /// Since when it was there, where it had to wait for its turn before it was read.
    pub since: Option<Tick>,
}

impl From<Received> for Request<RequestBody> {
    fn from(Received { head, body, .. }: Received) -> Self {
        Request::from_parts(Arc::unwrap_or_clone(head).into_parts(), body)
    }
}

/// The body of a client's request, on whatever version of HTTP it came.
pub struct RequestBody {
    source: Source,
    client: ClientState,
}

/// Where a body comes from.
pub(super) enum Source {
    /// All of it had come with its head.
    Whole(Option<Bytes>),
    /// HTTP/1: the connection hands it over as it comes.
    Flow(Arc<Flow>),
    /// HTTP/2.
    Stream(Incoming),
}

/// A request's body did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyCut {
    /// The client left.
    #[error("the client left before the end of its request's body")]
    Left,
    /// Its framing cannot be read.
    #[error("the framing of the request's body is broken")]
    Framing,
}

impl RequestBody {
    pub(super) fn new(source: Source, client: ClientState) -> Self {
        RequestBody { source, client }
    }

    /// What the connection tells of the client that sends it.
    #[must_use]
    pub fn client(&self) -> &ClientState {
        &self.client
    }
}

impl Source {
    pub(super) fn whole(bytes: Bytes) -> Self {
        Source::Whole((!bytes.is_empty()).then_some(bytes))
    }

    /// A body that is to come, and where the connection puts it.
    pub(super) fn flow() -> (Self, Feed) {
        let flow = Arc::new(Flow::default());
        (Source::Flow(Arc::clone(&flow)), Feed(flow))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyCut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyCut>>> {
        match &mut self.source {
            Source::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Source::Flow(flow) => flow.poll(cx).map(|next| next.map(|next| next.map(Frame::data))),
            Source::Stream(incoming) => {
                Pin::new(incoming).poll_frame(cx).map(|next| next.map(|next| next.map_err(|_| BodyCut::Left)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Whole(bytes) => bytes.is_none(),
            Source::Flow(_) => false,
            Source::Stream(incoming) => incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Source::Flow(_) => SizeHint::default(),
            Source::Stream(incoming) => incoming.size_hint(),
        }
    }
}

/// What a connection and the body of its request share. Both live in one task as a rule; a
/// lock that nobody else holds lets them live in two.
#[derive(Default)]
pub(super) struct Flow(Mutex<State>);

#[derive(Default)]
struct State {
    /// What has come and was not taken.
    ready: Option<Bytes>,
    end: Option<Result<(), BodyCut>>,
    /// Who waits for more.
    waiting: Option<Waker>,
}

impl Flow {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyCut>>> {
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
pub(super) struct Feed(Arc<Flow>);

impl Feed {
    /// Whether somebody waits for more of it.
    pub(super) fn is_waited_for(&self) -> bool {
        self.0.0.lock().waiting.is_some()
    }

    /// Hands bytes over to the one who waits. `ours` is the task that asks them next anyway.
    pub(super) fn give(&self, bytes: Bytes, ours: &Waker) {
        self.change(|state| state.ready = Some(bytes), ours);
    }

    /// There is no more.
    pub(super) fn end(&self, end: Result<(), BodyCut>, ours: &Waker) {
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

impl Drop for Feed {
    fn drop(&mut self) {
        self.end(Err(BodyCut::Left), Waker::noop());
    }
}

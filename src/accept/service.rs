//! Adapter between connections and the service: gives each request its [`ClientState`], tracks each
//! response body, and watches each HTTP/2 stream for a client that does not read, while driving its body
//! meanwhile.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::Either;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Request, Response, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tower::util::Oneshot;
use tower::{Service, ServiceExt};

use super::body::{BodySource, BoxError, IncomingRequest, RequestBody};
use super::conn_state::{ConnState, OpenRequest};
use super::drain::{Drain, DrainPhase, DrainWatch};
use super::h2_send_buffer::H2SendBuffer;
use super::request_id::{X_GOODPUT_REASON, new_request_id};
use super::write_stall::Stall;
use crate::http1::{HeaderSink, ParsedHead, ResponseHeaders, X_REQUEST_ID, with_fields};
use crate::reject::Rejection;
use crate::types::{ClientState, Dialect, DisconnectReason, InvalidHead, ListenerStats, Tick};

/// An HTTP/2 stream, shared by its response body and its watcher.
#[derive(Default)]
pub(super) struct H2Stream {
    side: ClientState,
    /// Twice the number of frames returned; odd while the next one is pending. Even and unchanged means that
    /// the last frame has not been sent yet.
    given: AtomicU64,
    /// The body. Uncontended, because all access is from the stream's task.
    shelf: Mutex<H2SendBuffer>,
}

impl H2Stream {
    /// The next frame for hyper.
    fn poll_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let next = self.shelf.lock().poll_frame(cx);
        match &next {
            Poll::Ready(_) => self.gave(),
            Poll::Pending => self.owes(),
        }
        next
    }

    /// Polls the body although its last frame has not been sent.
    fn drive(&self, cx: &mut Context<'_>) {
        if self.shelf.lock().prefetch(cx) {
            self.side.lift_total_deadline();
        }
    }

    fn gave(&self) {
        let given = self.given.load(Ordering::Relaxed);
        self.given.store((given & !1) + 2, Ordering::Relaxed);
    }

    fn owes(&self) {
        self.given.fetch_or(1, Ordering::Relaxed);
    }

    /// The number of the frame waiting to be sent, if any.
    fn waiting(&self) -> Option<u64> {
        let given = self.given.load(Ordering::Relaxed);
        (given != 0 && given & 1 == 0).then_some(given)
    }
}

/// Passes a stream's [`H2Stream`] from hyper's call of the service to the spawn of the stream's task, which
/// follow each other within one poll.
type PendingStream = Arc<Mutex<Option<(Arc<H2Stream>, OpenRequest)>>>;

/// The service of one connection.
pub(super) struct ConnService<S> {
    service: S,
    peer: Arc<ConnState>,
    handover: PendingStream,
    listener_stats: ListenerStats,
}

impl<S> ConnService<S> {
    pub(super) fn new(service: S, peer: Arc<ConnState>, streams: &H2Executor, listener_stats: ListenerStats) -> Self {
        ConnService { service, peer, handover: Arc::clone(&streams.handover), listener_stats }
    }

    /// Counts a rejected head.
    pub(super) fn refused(&self, why: InvalidHead) {
        self.listener_stats.refused_head(why);
    }

    pub(super) fn peer(&self) -> &ConnState {
        &self.peer
    }
}

impl<S, B> hyper::service::Service<Request<Incoming>> for ConnService<S>
where
    S: Service<IncomingRequest, Response = Response<B>> + Clone,
    B: ResponseHeaders + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<TrackedBody<B>>;
    type Error = S::Error;
    type Future = ServiceCall<S>;

    /// Runs in the connection's task, which many streams share.
    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let (head, body) = request.into_parts();
        match caught(|| Arc::new(ParsedHead::new(head))) {
            Some(head) => self.serve(head, BodySource::Stream(body), None),
            None => self.begin(true, |_| None),
        }
    }
}

/// Result of a step unless it panics, because one request's failure must not end its connection.
fn caught<T>(step: impl FnOnce() -> T) -> Option<T> {
    let caught = catch_unwind(AssertUnwindSafe(step));
    if caught.is_err() {
        tracing::error!("panic before the request reached its handler; responding 500");
    }
    caught.ok()
}

/// A call of the service.
pub(super) type ServiceCall<S> =
    TrackedFuture<Either<<S as Service<IncomingRequest>>::Future, Oneshot<S, IncomingRequest>>>;

impl<S, B> ConnService<S>
where
    S: Service<IncomingRequest, Response = Response<B>> + Clone,
    B: ResponseHeaders,
{
    /// Calls the service with a request; `since` is when it was available, if it had to wait.
    pub(super) fn serve(&self, head: Arc<ParsedHead>, source: BodySource, since: Option<Tick>) -> ServiceCall<S> {
        self.begin(head.version == Version::HTTP_2, |side| {
            let request = IncomingRequest { head, body: RequestBody::new(source, side), since };
            // Most services are always ready, so the call is made at once without storing the
            // request.
            caught(|| {
                let mut service = self.service.clone();
                match service.poll_ready(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(Ok(())) => Either::Left(service.call(request)),
                    _ => Either::Right(service.oneshot(request)),
                }
            })
        })
    }

    /// Begins a request and calls the service.
    fn begin<F>(&self, multiplexed: bool, hand_over: impl FnOnce(ClientState) -> Option<F>) -> TrackedFuture<F> {
        let open = self.peer.greet(multiplexed);
        let strand = multiplexed.then(|| {
            let strand = Arc::new(H2Stream { side: self.peer.side_of_a_stream(), ..H2Stream::default() });
            // The stream's task is counted too, so that a connection does not look idle while the last frames of
            // a response wait for the client's window.
            *self.handover.lock() = Some((Arc::clone(&strand), self.peer.greet(true)));
            strand
        });
        let side = match &strand {
            Some(strand) => strand.side.clone(),
            None => {
                self.peer.side.reset();
                self.peer.side.clone()
            }
        };
        TrackedFuture { inner: hand_over(side), told: Some((open, strand)) }
    }
}

pin_project! {
    /// The service's future, which keeps its request open.
    pub(super) struct TrackedFuture<F> {
        // `None`: the call panicked.
        #[pin]
        inner: Option<F>,
        told: Option<(OpenRequest, Option<Arc<H2Stream>>)>,
    }
}

impl<F, B, E> Future for TrackedFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: ResponseHeaders + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Output = Result<Response<TrackedBody<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = match this.inner.as_pin_mut() {
            Some(inner) => ready!(inner.poll(cx)).map(|response| response.map(Ok)),
            None => Ok(failed().map(Err)),
        };
        let (open, strand) = this.told.take().expect("not polled after it was ready");
        Poll::Ready(response.map(|response| {
            let (head, body) = response.into_parts();
            match (body, strand) {
                (Err(body), _) => Response::from_parts(head, TrackedBody::Failed { body, _open: open }),
                (Ok(body), None) => Response::from_parts(head, TrackedBody::Plain { body, open }),
                // hyper takes all headers from the map.
                (Ok(body), Some(strand)) => with_fields(Response::from_parts(head, body)).map(|body| {
                    *strand.shelf.lock() = H2SendBuffer::of(Box::pin(body.map_err(Into::into)));
                    TrackedBody::Stream { strand, _open: open }
                }),
            }
        }))
    }
}

/// The response to a request whose call failed.
#[cold]
fn failed() -> Response<Full<Bytes>> {
    let (refusal, id) = (Rejection::Internal, new_request_id());
    let mut response = Response::new(Full::new(refusal.body(Dialect::Chat, &id)));
    *response.status_mut() = refusal.status();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.extend(HeaderValue::from_str(id.as_str()).ok().map(|id| (X_REQUEST_ID, id)));
    headers.insert(X_GOODPUT_REASON, HeaderValue::from_static(refusal.code()));
    response
}

pin_project! {
    /// A response body, which keeps its request open.
    #[project = Projected]
    pub(super) enum TrackedBody<B> {
        // HTTP/1: unchanged.
        Plain { #[pin] body: B, open: OpenRequest },
        // HTTP/2: held by the stream, so that its watcher can drive it.
        Stream { strand: Arc<H2Stream>, _open: OpenRequest },
        // A response made here.
        Failed { #[pin] body: Full<Bytes>, _open: OpenRequest },
    }
    impl<B> PinnedDrop for TrackedBody<B> {
        fn drop(this: Pin<&mut Self>) {
            match this.project() {
                Projected::Plain { open, .. } => open.peer().side.lift_total_deadline(),
                Projected::Stream { strand, .. } => {
                    let left = std::mem::take(&mut *strand.shelf.lock());
                    drop(left);
                }
                Projected::Failed { .. } => {}
            }
        }
    }
}

/// With HTTP/2 they were moved into the head's map.
impl<B> ResponseHeaders for TrackedBody<B>
where
    B: ResponseHeaders,
    B::Error: Into<BoxError>,
{
    fn upstream_headers(&self, to: &mut impl FnMut(&HeaderName, &HeaderValue)) {
        match self {
            TrackedBody::Plain { body, .. } => body.upstream_headers(to),
            TrackedBody::Stream { .. } | TrackedBody::Failed { .. } => {}
        }
    }

    fn gateway_headers(&self, head: &mut impl HeaderSink) {
        match self {
            TrackedBody::Plain { body, .. } => body.gateway_headers(head),
            TrackedBody::Stream { .. } | TrackedBody::Failed { .. } => {}
        }
    }
}

impl<B> Body for TrackedBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project() {
            Projected::Plain { body, .. } => body.poll_frame(cx).map(|next| next.map(|next| next.map_err(Into::into))),
            Projected::Stream { strand, .. } => strand.poll_frame(cx),
            Projected::Failed { body, .. } => {
                body.poll_frame(cx).map(|next| next.map(|next| next.map_err(|never| match never {})))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            TrackedBody::Plain { body, .. } => body.is_end_stream(),
            TrackedBody::Stream { strand, .. } => strand.shelf.lock().is_end_stream(),
            TrackedBody::Failed { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            TrackedBody::Plain { body, .. } => body.size_hint(),
            TrackedBody::Stream { strand, .. } => strand.shelf.lock().size_hint(),
            TrackedBody::Failed { body, .. } => body.size_hint(),
        }
    }
}

/// The executor of one HTTP/2 connection: one task per stream.
#[derive(Clone)]
pub(super) struct H2Executor {
    drain: Drain,
    write_stall: Duration,
    handover: PendingStream,
}

impl H2Executor {
    pub(super) fn new(drain: Drain, write_stall: Duration) -> Self {
        H2Executor { drain, write_stall, handover: PendingStream::default() }
    }
}

impl<F> hyper::rt::Executor<F> for H2Executor
where
    F: Future<Output = ()> + Send + 'static,
{
    /// The task is owned by its [`OpenRequest`]: the connection waits until all have ended.
    fn execute(&self, stream: F) {
        let Some((strand, open)) = self.handover.lock().take() else {
            // Only a tunnel has no preceding call, and tunnels are rejected.
            return;
        };
        let stall = Stall::none();
        let watched = H2StreamTask {
            stream,
            strand,
            open,
            drain_watch: self.drain.drain_watch(),
            stall,
            frame: 0,
            write_stall: self.write_stall,
        };
        tokio::spawn(watched);
    }
}

pin_project! {
    /// A stream's future with the limits for a client that does not read.
    struct H2StreamTask<F> {
        #[pin]
        stream: F,
        strand: Arc<H2Stream>,
        drain_watch: DrainWatch,
        stall: Stall,
        // The frame that the current stretch is about.
        frame: u64,
        write_stall: Duration,
        // Last, so that the stream is dropped before it stops being counted.
        open: OpenRequest,
    }
}

impl<F: Future<Output = ()>> Future for H2StreamTask<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        let side = &this.strand.side;
        while let Some(phase) = this.drain_watch.poll_phase(cx) {
            if phase >= DrainPhase::Over {
                side.end_drain();
            }
            if phase >= DrainPhase::Cut {
                side.sever(DisconnectReason::Drain);
                return Poll::Ready(());
            }
        }
        if this.stream.poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let clock = &this.open.peer().clock;
        match this.strand.waiting() {
            None => {
                this.stall.end(side, clock);
                Poll::Pending
            }
            Some(frame) => {
                if frame != *this.frame {
                    *this.frame = frame;
                    this.stall.end(side, clock);
                }
                this.strand.drive(cx);
                let severed = ready!(this.stall.refused(side, clock, *this.write_stall, cx));
                tracing::debug!(?severed, "client does not read; resetting its stream");
                Poll::Ready(())
            }
        }
    }
}

//! Requests and answers between connections and the service: each request gets its
//! [`ClientState`], each answer says what its body last did, and each HTTP/2 stream is
//! watched for a client that does not take its bytes, and driven on meanwhile.

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

use super::body::{Received, RequestBody, Source};
use super::door::Fault;
use super::drain::{Drain, Ear, Phase};
use super::head::Head;
use super::id::{X_GOODPUT_REASON, X_REQUEST_ID, made_id};
use super::peer::{Open, Peer};
use super::shelf::Shelf;
use super::stall::Stall;
use crate::framing::{HeaderSink, ResponseHeaders, with_fields};
use crate::refuse::Refusal;
use crate::units::{ClientState, Dialect, DisconnectReason, Doorstep, InvalidHead, Tick};

/// An HTTP/2 stream, as its answer's body and its watcher see it.
#[derive(Default)]
pub(super) struct Strand {
    side: ClientState,
    /// Twice the number of frames the body has given; odd while it owes the next one. Even
    /// and unchanged means: the last frame has not gone out yet.
    given: AtomicU64,
    /// The body. A lock that nobody else holds: all who ask are in the stream's task.
    shelf: Mutex<Shelf>,
}

impl Strand {
    /// The next frame for hyper.
    fn poll_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        let next = self.shelf.lock().poll_frame(cx);
        match &next {
            Poll::Ready(_) => self.gave(),
            Poll::Pending => self.owes(),
        }
        next
    }

    /// Goes on with the body, although what it gave last has not gone out.
    fn drive(&self, cx: &mut Context<'_>) {
        if self.shelf.lock().fill(cx) {
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

    /// The number of the frame that waits to go out, if one does.
    fn waiting(&self) -> Option<u64> {
        let given = self.given.load(Ordering::Relaxed);
        (given != 0 && given & 1 == 0).then_some(given)
    }
}

/// Where hyper's call of the service and the spawn of the stream's task, which follow each other in one
/// poll, hand over the stream's [`Strand`].
type Handover = Arc<Mutex<Option<(Arc<Strand>, Open)>>>;

/// The service as one connection sees it.
pub(super) struct Reception<S> {
    service: S,
    peer: Arc<Peer>,
    handover: Handover,
    doorstep: Doorstep,
}

impl<S> Reception<S> {
    pub(super) fn new(service: S, peer: Arc<Peer>, streams: &Streams, doorstep: Doorstep) -> Self {
        Reception { service, peer, handover: Arc::clone(&streams.handover), doorstep }
    }

    /// A head never became a request.
    pub(super) fn refused(&self, why: InvalidHead) {
        self.doorstep.refused_head(why);
    }

    pub(super) fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl<S, B> hyper::service::Service<Request<Incoming>> for Reception<S>
where
    S: Service<Received, Response = Response<B>> + Clone,
    B: ResponseHeaders + Send + 'static,
    B::Error: Into<Fault>,
{
    type Response = Response<Told<B>>;
    type Error = S::Error;
    type Future = Asked<S>;

    /// Runs in the task of the connection, which many streams share.
    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let (head, body) = request.into_parts();
        match caught(|| Arc::new(Head::new(head))) {
            Some(head) => self.receive(head, Source::Stream(body), None),
            None => self.begin(true, |_| None),
        }
    }
}

/// What comes of a step, if it does not panic: a fault of one request must not end its connection.
fn caught<T>(step: impl FnOnce() -> T) -> Option<T> {
    let caught = catch_unwind(AssertUnwindSafe(step));
    if caught.is_err() {
        tracing::error!("a panic before a request came to its handler; its client gets a 500");
    }
    caught.ok()
}

/// A request in the service's hands.
pub(super) type Asked<S> = Handling<Either<<S as Service<Received>>::Future, Oneshot<S, Received>>>;

impl<S, B> Reception<S>
where
    S: Service<Received, Response = Response<B>> + Clone,
    B: ResponseHeaders,
{
    /// Hands a request to the service: one that was there since then, if it had to wait.
    pub(super) fn receive(&self, head: Arc<Head>, source: Source, since: Option<Tick>) -> Asked<S> {
        self.begin(head.version == Version::HTTP_2, |side| {
            let request = Received { head, body: RequestBody::new(source, side), since };
            // Most services are always ready: theirs is called at once, and nothing holds the request
            // meanwhile.
            caught(|| {
                let mut service = self.service.clone();
                match service.poll_ready(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(Ok(())) => Either::Left(service.call(request)),
                    _ => Either::Right(service.oneshot(request)),
                }
            })
        })
    }

    /// Begins a request, with what hands it to the service.
    fn begin<F>(&self, multiplexed: bool, hand_over: impl FnOnce(ClientState) -> Option<F>) -> Handling<F> {
        let open = self.peer.greet(multiplexed);
        let strand = multiplexed.then(|| {
            let strand = Arc::new(Strand { side: self.peer.side_of_a_stream(), ..Strand::default() });
            // The stream's task is counted too, so that a connection is not taken for idle
            // while the last frames of an answer wait for the client's window.
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
        Handling { inner: hand_over(side), told: Some((open, strand)) }
    }
}

pin_project! {
    /// The service's future, which keeps its request open.
    pub(super) struct Handling<F> {
        // `None`: it panicked before it came there.
        #[pin]
        inner: Option<F>,
        told: Option<(Open, Option<Arc<Strand>>)>,
    }
}

impl<F, B, E> Future for Handling<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: ResponseHeaders + Send + 'static,
    B::Error: Into<Fault>,
{
    type Output = Result<Response<Told<B>>, E>;

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
                (Err(body), _) => Response::from_parts(head, Told::Failed { body, _open: open }),
                (Ok(body), None) => Response::from_parts(head, Told::Plain { body, open }),
                // hyper takes all fields of a head from its map.
                (Ok(body), Some(strand)) => with_fields(Response::from_parts(head, body)).map(|body| {
                    *strand.shelf.lock() = Shelf::of(Box::pin(body.map_err(Into::into)));
                    Told::Stream { strand, _open: open }
                }),
            }
        }))
    }
}

/// The answer to a request that never came to the service.
#[cold]
fn failed() -> Response<Full<Bytes>> {
    let (refusal, id) = (Refusal::Internal, made_id());
    let mut response = Response::new(Full::new(refusal.body(Dialect::Chat, &id)));
    *response.status_mut() = refusal.status();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.extend(HeaderValue::from_str(id.as_str()).ok().map(|id| (X_REQUEST_ID, id)));
    headers.insert(X_GOODPUT_REASON, HeaderValue::from_static(refusal.code()));
    response
}

pin_project! {
    /// An answer's body, which keeps its request open.
    #[project = Projected]
    pub(super) enum Told<B> {
        // HTTP/1: as it is.
        Plain { #[pin] body: B, open: Open },
        // HTTP/2: it stands in the strand, for its watcher to drive it too.
        Stream { strand: Arc<Strand>, _open: Open },
        // An answer of our own.
        Failed { #[pin] body: Full<Bytes>, _open: Open },
    }
    impl<B> PinnedDrop for Told<B> {
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

/// On HTTP/2 they have been taken to the map of its head.
impl<B> ResponseHeaders for Told<B>
where
    B: ResponseHeaders,
    B::Error: Into<Fault>,
{
    fn pass_fields(&self, to: &mut impl FnMut(&HeaderName, &HeaderValue)) {
        match self {
            Told::Plain { body, .. } => body.pass_fields(to),
            Told::Stream { .. } | Told::Failed { .. } => {}
        }
    }

    fn add_fields(&self, head: &mut impl HeaderSink) {
        match self {
            Told::Plain { body, .. } => body.add_fields(head),
            Told::Stream { .. } | Told::Failed { .. } => {}
        }
    }
}

impl<B> Body for Told<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Fault>,
{
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
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
            Told::Plain { body, .. } => body.is_end_stream(),
            Told::Stream { strand, .. } => strand.shelf.lock().is_end_stream(),
            Told::Failed { body, .. } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Told::Plain { body, .. } => body.size_hint(),
            Told::Stream { strand, .. } => strand.shelf.lock().size_hint(),
            Told::Failed { body, .. } => body.size_hint(),
        }
    }
}

/// The executor of one HTTP/2 connection: a task for each stream.
#[derive(Clone)]
pub(super) struct Streams {
    drain: Drain,
    write_stall: Duration,
    handover: Handover,
}

impl Streams {
    pub(super) fn new(drain: Drain, write_stall: Duration) -> Self {
        Streams { drain, write_stall, handover: Handover::default() }
    }
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future<Output = ()> + Send + 'static,
{
    /// The task is owned by its [`Open`]: the connection waits until all of them have ended.
    fn execute(&self, stream: F) {
        let Some((strand, open)) = self.handover.lock().take() else {
            // Only a tunnel comes without a call before it, and those are refused.
            return;
        };
        let stall = Stall::none();
        let watched =
            Watched { stream, strand, open, ear: self.drain.ear(), stall, frame: 0, write_stall: self.write_stall };
        tokio::spawn(watched);
    }
}

pin_project! {
    /// A stream's future, and the limits of a client that does not take its bytes.
    struct Watched<F> {
        #[pin]
        stream: F,
        strand: Arc<Strand>,
        ear: Ear,
        stall: Stall,
        // Which frame the stretch of refusal is about.
        frame: u64,
        write_stall: Duration,
        // Last, so that the stream is gone before it is no longer counted.
        open: Open,
    }
}

impl<F: Future<Output = ()>> Future for Watched<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        let side = &this.strand.side;
        while let Some(phase) = this.ear.poll_news(cx) {
            if phase >= Phase::Over {
                side.end_drain();
            }
            if phase >= Phase::Cut {
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
                tracing::debug!(?severed, "client does not take its bytes; stream cut");
                Poll::Ready(())
            }
        }
    }
}

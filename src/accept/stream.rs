//! Requests and answers between connections and the service: each request gets its
//! [`ClientSide`], each answer says what its body last did, and each HTTP/2 stream is
//! watched for a client that does not take its bytes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use futures_util::future::Either;
use http::{Request, Response, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tower::util::Oneshot;
use tower::{Service, ServiceExt};

use super::body::{RequestBody, Source};
use super::drain::{Drain, Ear, Phase};
use super::peer::{Open, Peer};
use super::stall::Stall;
use crate::framing::{Fielded, Fields, with_fields};
use crate::units::{ClientSide, Severed};

/// An HTTP/2 stream, as its answer's body and its watcher see it.
#[derive(Default)]
struct Strand {
    side: ClientSide,
    /// Twice the number of frames the body has given; odd while it owes the next one. Even
    /// and unchanged means: the last frame has not gone out yet.
    given: AtomicU64,
}

impl Strand {
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
}

impl<S> Reception<S> {
    pub(super) fn new(service: S, peer: Arc<Peer>, streams: &Streams) -> Self {
        Reception { service, peer, handover: Arc::clone(&streams.handover) }
    }

    pub(super) fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl<S, B> hyper::service::Service<Request<Incoming>> for Reception<S>
where
    S: Service<Request<RequestBody>, Response = Response<B>> + Clone,
    B: Fielded,
{
    type Response = Response<Told<B>>;
    type Error = S::Error;
    type Future = Asked<S>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.receive(request.map(Source::Stream))
    }
}

/// A request in the service's hands.
pub(super) type Asked<S> =
    Handling<Either<<S as Service<Request<RequestBody>>>::Future, Oneshot<S, Request<RequestBody>>>>;

impl<S, B> Reception<S>
where
    S: Service<Request<RequestBody>, Response = Response<B>> + Clone,
    B: Fielded,
{
    /// Hands a request to the service.
    pub(super) fn receive(&self, request: Request<Source>) -> Asked<S> {
        let multiplexed = request.version() == Version::HTTP_2;
        let open = self.peer.greet(multiplexed);
        let strand = multiplexed.then(|| {
            let strand = Arc::new(Strand::default());
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
        let request = request.map(|source| RequestBody::new(source, side));
        // Most services are always ready: theirs is called at once, and nothing holds the request
        // meanwhile.
        let mut service = self.service.clone();
        let inner = match service.poll_ready(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(())) => Either::Left(service.call(request)),
            _ => Either::Right(service.oneshot(request)),
        };
        Handling { inner, told: Some((open, strand)) }
    }
}

pin_project! {
    /// The service's future, which keeps its request open.
    pub(super) struct Handling<F> {
        #[pin]
        inner: F,
        told: Option<(Open, Option<Arc<Strand>>)>,
    }
}

impl<F, B, E> Future for Handling<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: Fielded,
{
    type Output = Result<Response<Told<B>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = ready!(this.inner.poll(cx));
        let (open, strand) = this.told.take().expect("not polled after it was ready");
        Poll::Ready(response.map(|response| {
            // hyper takes all fields of a head from its map.
            let response = if strand.is_some() { with_fields(response) } else { response };
            response.map(|body| Told { body, rest: Bytes::new(), open, strand })
        }))
    }
}

pin_project! {
    /// An answer's body, which keeps its request open and tells its strand what it does.
    pub(super) struct Told<B> {
        #[pin]
        body: B,
        rest: Bytes,
        open: Open,
        strand: Option<Arc<Strand>>,
    }
    impl<B> PinnedDrop for Told<B> {
        fn drop(this: Pin<&mut Self>) {
            if this.strand.is_none() {
                this.open.peer().side.lift_total_deadline();
            }
        }
    }
}

/// What HTTP/2 puts into one DATA frame at most. A longer piece is handed to it in parts: a
/// client that takes one part after the other, however slowly, takes bytes.
const PART: usize = 16 * 1024;

impl<B: Fielded> Told<B> {
    /// Adds the fields that the body brings to its head.
    pub(super) fn add_fields(&self, head: &mut impl Fields) {
        self.body.add_fields(head);
    }
}

impl<B: Body<Data = Bytes>> Body for Told<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let Some(strand) = this.strand else {
            return this.body.poll_frame(cx);
        };
        if this.rest.has_remaining() {
            strand.gave();
            let part = this.rest.split_to(PART.min(this.rest.len()));
            return Poll::Ready(Some(Ok(Frame::data(part))));
        }
        let Poll::Ready(frame) = this.body.poll_frame(cx) else {
            strand.owes();
            return Poll::Pending;
        };
        strand.gave();
        Poll::Ready(frame.map(|frame| {
            frame.map(|frame| match frame.into_data() {
                Ok(mut data) if data.len() > PART => {
                    *this.rest = data.split_off(PART);
                    Frame::data(data)
                }
                Ok(data) => Frame::data(data),
                Err(other) => other,
            })
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut whole = SizeHint::new();
        whole.set_lower(hint.lower() + rest);
        if let Some(upper) = hint.upper() {
            whole.set_upper(upper + rest);
        }
        whole
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
                side.sever(Severed::Drain);
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
                let severed = ready!(this.stall.refused(side, clock, *this.write_stall, cx));
                tracing::debug!(?severed, "client does not take its bytes; stream cut");
                Poll::Ready(())
            }
        }
    }
}

//! HTTP/1 with one client: its requests, one after the other, and their answers.
//!
//! All of it is one future without a task, a channel or a copy of its own: a poll reads what
//! has come, asks the service or its body, and writes what they say. While a request is being
//! answered the connection is read on, to hear of a client that leaves: one that closes its
//! writing half has left. What two readers could read in two ways is not read.

use std::future::Future;
use std::io;
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use http::{Method, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tower::Service;

use self::head::{HeadLimits, RequestHead};
use self::out::{ResponseFraming, ResponseMode, WriteBuffer};
use super::body::{BodyError, BodySender, BodySource, IncomingRequest};
use super::date::Dates;
use super::door::{BoxError, ConnDriver};
use super::settings::Listen;
use super::stream::{self, ConnService, TrackedBody};
use super::turnstile::{ReadFairness, ReadTicket};
use crate::framing::{Decoded, Framing, FramingError, HeadCache, ResponseHeaders};

mod head;
mod out;
#[cfg(test)]
mod tests;

/// What one read takes while no body is waited for.
const SIP: usize = 4 * 1024;

/// What one read takes of a body: at first, and at most.
const ROOM: usize = 16 * 1024;
const MOST_ROOM: usize = 64 * 1024;

/// What is kept of requests that came before their turn. Of a client that sends more all of it is
/// thrown away, and the connection ends behind the present answer: its end can only be seen
/// behind what it sent.
const MOST_AHEAD: usize = 64 * 1024;

/// While this much waits to be written, an answer's body is not asked for more.
const MOST_WAITING: usize = 64 * 1024;

pin_project! {
    /// A connection.
    pub(super) struct Http1<T, S, B>
    where
        S: Service<IncomingRequest>,
    {
        #[pin]
        io: T,
        reception: ConnService<S>,
        dates: Arc<Dates>,
        turnstile: Arc<ReadFairness>,
        pass: ReadTicket,
        limits: HeadLimits,
        known: HeadCache<RequestHead>,
        inbox: ReadState,
        out: WriteBuffer,
        #[pin]
        exchange: Exchange<stream::ServiceCall<S>, TrackedBody<B>>,
        manners: ResponseMode,
        // No request is taken any more.
        is_finishing: bool,
        end: Option<ConnEnd>,
    }
}

pin_project! {
    /// The request of the moment.
    #[project = Now]
    enum Exchange<F, B> {
        // There is none.
        None,
        // The service has it.
        Asking { #[pin] future: F },
        // Its answer goes out.
        Answering { #[pin] body: B, ending: ResponseFraming },
    }
}

/// How far the connection is on its way to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnEnd {
    /// It is closed when all is written.
    Clean,
    /// It breaks off within an answer when all is written.
    Broken,
    /// It has ended.
    Over,
}

/// What comes in.
struct ReadState {
    /// What has been read and not understood.
    buffer: BytesMut,
    /// Of a head: what is known to hold no end of it.
    looked_at: usize,
    /// What is left of the body of the request of the moment.
    framing: Framing,
    feed: Option<BodySender>,
    awaits_continue: bool,
    room: usize,
    /// More came ahead of its turn than is kept: none of it is.
    is_overrun: bool,
}

/// What looking at the body came to.
enum BodyFeed {
    /// The service has more of it, or its end.
    More,
    /// Nobody waits for it.
    Unasked,
}

impl<T, S, B> Http1<T, S, B>
where
    S: Service<IncomingRequest, Response = Response<B>> + Clone,
    S::Error: Into<BoxError>,
    B: ResponseHeaders + Send + 'static,
    B::Error: Into<BoxError>,
{
    pub(super) fn new(
        io: T,
        reception: ConnService<S>,
        limits: &Listen,
        dates: Arc<Dates>,
        turnstile: Arc<ReadFairness>,
    ) -> Self {
        let limits = HeadLimits { head: limits.max_head, lines: limits.max_header_lines };
        Http1 {
            io,
            reception,
            dates,
            turnstile,
            pass: ReadTicket::Free,
            limits,
            known: HeadCache::default(),
            inbox: ReadState::new(),
            out: WriteBuffer::default(),
            exchange: Exchange::None,
            manners: ResponseMode { version: http::Version::HTTP_11, is_head: false, keeps: true },
            is_finishing: false,
            end: None,
        }
    }
}

impl<T, S, B> ConnDriver for Pin<&mut Http1<T, S, B>>
where
    T: AsyncRead + AsyncWrite,
    S: Service<IncomingRequest, Response = Response<B>> + Clone,
    S::Error: Into<BoxError>,
    B: ResponseHeaders + Send + 'static,
    B::Error: Into<BoxError>,
{
    type End = io::Result<()>;

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match self.as_mut().project().exchange.as_mut().project() {
                Now::None => ready!(self.as_mut().between(cx))?,
                Now::Asking { .. } => ready!(self.as_mut().ask(cx))?,
                Now::Answering { .. } => ready!(self.as_mut().answer(cx))?,
            }
            if self.end == Some(ConnEnd::Over) {
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn finish(&mut self) {
        *self.as_mut().project().is_finishing = true;
    }
}

impl<T, S, B> Http1<T, S, B>
where
    T: AsyncRead + AsyncWrite,
    S: Service<IncomingRequest, Response = Response<B>> + Clone,
    S::Error: Into<BoxError>,
    B: ResponseHeaders + Send + 'static,
    B::Error: Into<BoxError>,
{
    /// No request is open: what is left of the last answer goes out, and the next one comes in.
    fn between(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut this = self.project();
        ready!(this.out.poll(this.io.as_mut(), cx))?;
        if *this.is_finishing && this.end.is_none() {
            // A request that is there is answered, also where it had to wait for its turn to be read.
            let may_be_there = this.inbox.buffer.is_empty() && *this.pass != ReadTicket::Free;
            let is_there = may_be_there && matches!(this.inbox.sip(this.io.as_mut(), cx)?, Poll::Ready(1..));
            if !is_there {
                *this.end = Some(ConnEnd::Clean);
            }
        }
        if let Some(end) = *this.end {
            if end == ConnEnd::Clean {
                ready!(this.io.poll_shutdown(cx))?;
            }
            *this.end = Some(ConnEnd::Over);
            return Poll::Ready(Ok(()));
        }
        let ReadState { buffer, looked_at, .. } = this.inbox;
        match head::take(buffer, looked_at, this.known, *this.limits) {
            Ok(Some(RequestHead { head, framing, keeps, awaits_continue })) => {
                *this.manners = ResponseMode { version: head.version, is_head: head.method == Method::HEAD, keeps };
                let body = this.inbox.begin(framing, awaits_continue);
                let since = this.pass.end();
                let future = this.reception.receive(head, body, since);
                this.exchange.set(Exchange::Asking { future });
            }
            // It has had its last chance.
            Ok(None) if *this.is_finishing => *this.end = Some(ConnEnd::Clean),
            Ok(None) => {
                if this.inbox.buffer.is_empty() {
                    ready!(this.turnstile.poll(this.pass, cx));
                } else {
                    // Also where it was read ahead: from here on its head is waited for.
                    this.reception.peer().heard();
                }
                match this.inbox.sip(this.io, cx)? {
                    Poll::Ready(0) => *this.end = Some(ConnEnd::Clean),
                    Poll::Ready(_) => {}
                    Poll::Pending => {
                        *this.pass = ReadTicket::Asks;
                        return Poll::Pending;
                    }
                }
            }
            Err(why) => {
                this.reception.refused(why);
                this.out.refusal(why, head::path_of_unread(&this.inbox.buffer), &this.dates.now());
                *this.end = Some(ConnEnd::Clean);
            }
        }
        Poll::Ready(Ok(()))
    }

    /// The service has the request.
    fn ask(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut this = self.project();
        let Now::Asking { future } = this.exchange.as_mut().project() else { return Poll::Ready(Ok(())) };
        match future.poll(cx) {
            Poll::Ready(Ok(response)) => {
                let (head, body) = response.into_parts();
                let mut manners = *this.manners;
                // What is left of a body that nobody wanted is not read to get at the next
                // request.
                manners.keeps &= this.inbox.framing.is_over() && !this.inbox.is_overrun && !*this.is_finishing;
                let (length, date) = (body.size_hint().exact(), this.dates.now());
                let (ending, keeps) = this.out.head(&head, &body, length, manners, &date);
                this.manners.keeps = keeps;
                this.exchange.set(Exchange::Answering { body, ending });
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(io::Error::other(error))),
            Poll::Pending => match ready!(this.inbox.feed(this.io.as_mut(), this.out, cx))? {
                BodyFeed::More => Poll::Ready(Ok(())),
                BodyFeed::Unasked => {
                    let is_read = this.inbox.framing.is_over();
                    this.inbox.watch(this.io, is_read, cx)
                }
            },
        }
    }

    /// The answer goes out.
    fn answer(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut this = self.project();
        let Now::Answering { mut body, ending } = this.exchange.as_mut().project() else { return Poll::Ready(Ok(())) };
        let mut is_waiting = false;
        // How the answer has ended, and whether well.
        let mut ended = (*ending == ResponseFraming::None || *ending == ResponseFraming::Length(0)).then_some(true);
        while ended.is_none() && this.out.takes_more(MOST_WAITING) {
            match body.as_mut().poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let is_right = frame.into_data().map_or(true, |piece| this.out.piece(piece, ending));
                    if !is_right {
                        ended = Some(false);
                    } else if body.is_end_stream() || *ending == ResponseFraming::Length(0) {
                        ended = Some(this.out.end(*ending));
                    }
                }
                Poll::Ready(Some(Err(_))) => ended = Some(false),
                Poll::Ready(None) => ended = Some(this.out.end(*ending)),
                Poll::Pending => {
                    is_waiting = true;
                    break;
                }
            }
        }
        if let Some(is_whole) = ended {
            this.exchange.set(Exchange::None);
            this.inbox.feed = None;
            match is_whole {
                false => *this.end = Some(ConnEnd::Broken),
                true if !this.manners.keeps || this.inbox.is_overrun || *this.is_finishing => {
                    *this.end = Some(ConnEnd::Clean);
                }
                true => {}
            }
            return Poll::Ready(Ok(()));
        }
        match this.out.poll(this.io.as_mut(), cx) {
            Poll::Ready(Ok(())) if !is_waiting => Poll::Ready(Ok(())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            _ => this.inbox.watch(this.io, true, cx),
        }
    }
}

impl ReadState {
    fn new() -> Self {
        ReadState {
            buffer: BytesMut::new(),
            looked_at: 0,
            framing: Framing::EMPTY,
            feed: None,
            awaits_continue: false,
            room: ROOM,
            is_overrun: false,
        }
    }

    /// The body of a request whose head has been taken: whole, if it has come with it.
    fn begin(&mut self, framing: Framing, awaits_continue: bool) -> BodySource {
        (self.framing, self.awaits_continue, self.room) = (framing, awaits_continue, ROOM);
        if let Framing::Length(length) = self.framing
            && length <= self.buffer.len() as u64
        {
            self.framing = Framing::EMPTY;
            // As a rule nothing stands behind it, and the buffer itself becomes the body.
            return BodySource::whole(match length == self.buffer.len() as u64 {
                true => std::mem::take(&mut self.buffer).freeze(),
                false => self.buffer.split_to(length as usize).freeze(),
            });
        }
        let (body, feed) = BodySource::flow();
        self.feed = Some(feed);
        body
    }

    /// Reads a little, to hear what comes next; says how much, 0 at the end.
    fn sip<T: AsyncRead>(&mut self, io: Pin<&mut T>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut room = [const { MaybeUninit::uninit() }; SIP];
        let mut room = ReadBuf::uninit(&mut room);
        ready!(io.poll_read(cx, &mut room))?;
        match self.buffer.is_empty() {
            true => self.buffer = BytesMut::from(room.filled()),
            false => self.buffer.extend_from_slice(room.filled()),
        }
        Poll::Ready(Ok(room.filled().len()))
    }

    /// Nothing is expected from the client but that it leaves, or the next requests before
    /// their turn. `is_read`: nothing of what is kept belongs to the present request, or nobody
    /// wants it any more.
    fn watch<T: AsyncRead>(
        &mut self,
        mut io: Pin<&mut T>,
        is_read: bool,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            if self.buffer.len() >= MOST_AHEAD {
                if !is_read {
                    return Poll::Pending;
                }
                self.is_overrun = true;
            }
            if self.is_overrun {
                self.buffer = BytesMut::new();
            }
            if ready!(self.sip(io.as_mut(), cx))? == 0 {
                return Poll::Ready(Err(left()));
            }
        }
    }

    /// Hands over what has come of the body, where it is waited for.
    fn feed<T: AsyncRead + AsyncWrite>(
        &mut self,
        mut io: Pin<&mut T>,
        out: &mut WriteBuffer,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<BodyFeed>> {
        let Some(feed) = self.feed.as_ref().filter(|feed| feed.is_waited_for()) else {
            return Poll::Ready(Ok(BodyFeed::Unasked));
        };
        loop {
            let step = self.framing.step(&mut self.buffer);
            if self.framing.is_over() {
                // What is behind the body is little; what the body was read into is not kept for it.
                self.buffer = BytesMut::from(&self.buffer[..]);
            }
            match step {
                Ok(Decoded::Data(bytes)) => feed.give(bytes, cx.waker()),
                Ok(Decoded::End) => feed.end(Ok(()), cx.waker()),
                Err(FramingError) => feed.end(Err(BodyError::Framing), cx.waker()),
                Ok(Decoded::More) => {
                    if std::mem::take(&mut self.awaits_continue) {
                        out.go_on();
                    }
                    if let Poll::Ready(Err(error)) = out.poll(io.as_mut(), cx) {
                        return Poll::Ready(Err(error));
                    }
                    let room = self.room;
                    if self.buffer.capacity() - self.buffer.len() < room / 4 {
                        self.buffer.reserve(room);
                    }
                    let read = ready!(pin!(io.read_buf(&mut self.buffer)).poll(cx))?;
                    if read == 0 {
                        return Poll::Ready(Err(left()));
                    }
                    if read >= room / 2 {
                        self.room = (2 * room).min(MOST_ROOM);
                    }
                    continue;
                }
            }
            return Poll::Ready(Ok(BodyFeed::More));
        }
    }
}

fn left() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the client left")
}

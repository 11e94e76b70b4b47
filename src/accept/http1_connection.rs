//! The HTTP/1 server: one client's requests, one after the other, and their responses.
//!
//! One future without a task, channel or copy of its own: a poll reads available bytes, polls the
//! service or its response body, and writes. During a response the connection is read as well, to notice
//! a client that leaves; one that closes its writing half has left. Anything that two parsers could read
//! differently is rejected.
//!
//! hyper's HTTP/1.1 server does not take its place: of 27 framings tried on both (1 December 2026, hyper 1.12)
//! it serves a request with `transfer-encoding` beside `content-length`, and removes the length before the
//! service could reject it.

use std::future::Future;
use std::io;
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, BytesMut};
use http::{Method, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tower::Service;

use self::writer::WriteBuffer;
use super::body::{BodyError, BodySender, BodySource, BoxError, IncomingRequest};
use super::conn_driver::ConnDriver;
use super::date::Dates;
use super::read_fairness::{ReadFairness, ReadTicket};
use super::service::{self, ConnService, TrackedBody};
use super::settings::Listen;
use crate::http1::{
    self, Decoded, Framing, FramingError, HeadCache, HeadLimits, RequestHead, ResponseFraming, ResponseHeaders,
    ResponseMode,
};

#[cfg(test)]
mod tests;
mod writer;

/// Bytes per read while no body is awaited.
const SIP: usize = 4 * 1024;

/// Bytes per read of a body, initially and at most.
const ROOM: usize = 16 * 1024;
const MOST_ROOM: usize = 64 * 1024;

/// Most bytes kept of pipelined requests. If a client sends more, all of it is discarded and the
/// connection closes after the current response, because its end can only be seen behind
/// what it sent.
const MOST_AHEAD: usize = 64 * 1024;

/// While this many bytes wait to be written, the response body is not polled.
const MOST_WAITING: usize = 64 * 1024;

pin_project! {
    /// One connection.
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
        exchange: Exchange<service::ServiceCall<S>, TrackedBody<B>>,
        manners: ResponseMode,
        // No further request is read.
        is_finishing: bool,
        end: Option<ConnEnd>,
    }
}

pin_project! {
    /// The current request.
    #[project = Now]
    enum Exchange<F, B> {
        // None.
        None,
        // In the service.
        Asking { #[pin] future: F },
        // Its response is being written.
        Answering { #[pin] body: B, ending: ResponseFraming },
    }
}

/// How the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnEnd {
    /// It closes when everything is written.
    Clean,
    /// It aborts within a response when everything is written.
    Broken,
    /// It has ended.
    Over,
}

/// The receiving side.
struct ReadState {
    /// Unparsed bytes.
    buffer: BytesMut,
    /// Bytes of a head known not to contain its end.
    looked_at: usize,
    /// Framing of the rest of the current request's body.
    framing: Framing,
    feed: Option<BodySender>,
    awaits_continue: bool,
    room: usize,
    /// More pipelined bytes came than are kept, and all were discarded.
    is_overrun: bool,
}

/// Result of feeding the body.
enum BodyFeed {
    /// The service got bytes, or the end.
    More,
    /// No task waits for it.
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
                Now::None => ready!(self.as_mut().next_request(cx))?,
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
    /// Between requests: writes the rest of the last response and reads the next head.
    fn next_request(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut this = self.project();
        ready!(this.out.poll(this.io.as_mut(), cx))?;
        if *this.is_finishing && this.end.is_none() {
            // An available request is answered even if it had to wait for its turn to be read.
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
        match http1::take_request_head(buffer, looked_at, this.known, *this.limits) {
            Ok(Some(RequestHead { head, framing, keeps, awaits_continue })) => {
                *this.manners = ResponseMode { version: head.version, is_head: head.method == Method::HEAD, keeps };
                let body = this.inbox.begin(framing, awaits_continue);
                let since = this.pass.end();
                let future = this.reception.serve(head, body, since);
                this.exchange.set(Exchange::Asking { future });
            }
            // Its last chance.
            Ok(None) if *this.is_finishing => *this.end = Some(ConnEnd::Clean),
            Ok(None) => {
                if this.inbox.buffer.is_empty() {
                    ready!(this.turnstile.poll(this.pass, cx));
                } else {
                    // Also if it was pipelined: the header timeout runs from here.
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
                this.out.refusal(why, http1::path_of_unread(&this.inbox.buffer), &this.dates.now());
                *this.end = Some(ConnEnd::Clean);
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Polls the service.
    fn ask(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut this = self.project();
        let Now::Asking { future } = this.exchange.as_mut().project() else { return Poll::Ready(Ok(())) };
        match future.poll(cx) {
            Poll::Ready(Ok(response)) => {
                let (head, body) = response.into_parts();
                let mut manners = *this.manners;
                // The unread rest of an unwanted body is not skipped to reach the next
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

    /// Writes the response.
    fn answer(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut this = self.project();
        let Now::Answering { mut body, ending } = this.exchange.as_mut().project() else { return Poll::Ready(Ok(())) };
        let mut is_waiting = false;
        // Whether the response has ended, and completely.
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

    /// The body of a parsed request: complete if it came with the head.
    fn begin(&mut self, framing: Framing, awaits_continue: bool) -> BodySource {
        (self.framing, self.awaits_continue, self.room) = (framing, awaits_continue, ROOM);
        if let Framing::Length(length) = self.framing
            && length <= self.buffer.len() as u64
        {
            self.framing = Framing::EMPTY;
            // Usually nothing follows, and the buffer itself becomes the body.
            return BodySource::whole(match length == self.buffer.len() as u64 {
                true => std::mem::take(&mut self.buffer).freeze(),
                false => self.buffer.split_to(length as usize).freeze(),
            });
        }
        let (body, feed) = BodySource::flow();
        self.feed = Some(feed);
        body
    }

    /// Reads a little to detect what comes next; returns the number of bytes, 0 at the end.
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

    /// Reads while only the client's leaving, or pipelined requests, can come. `is_read`: no kept byte
    /// belongs to the current request, or nothing wants it any
    /// more.
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
            let read = if is_read {
                self.sip(io.as_mut(), cx)
            } else {
                read_body(&mut self.buffer, &mut self.room, io.as_mut(), cx)
            };
            if ready!(read)? == 0 {
                return Poll::Ready(Err(left()));
            }
        }
    }

    /// Passes available body bytes on if they are awaited.
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
                // Few bytes follow the body, so its large buffer is not kept for them.
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
                    let read = ready!(read_body(&mut self.buffer, &mut self.room, io.as_mut(), cx))?;
                    if read == 0 {
                        return Poll::Ready(Err(left()));
                    }
                    continue;
                }
            }
            return Poll::Ready(Ok(BodyFeed::More));
        }
    }
}

/// Reads bytes of a body behind those that are there; returns their number, 0 at the end. `room` follows what
/// one read brings.
fn read_body<T: AsyncRead>(
    buffer: &mut BytesMut,
    room: &mut usize,
    mut io: Pin<&mut T>,
    cx: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    let most = (*room).min(MOST_AHEAD.saturating_sub(buffer.len())).max(SIP);
    if buffer.capacity() - buffer.len() < most / 4 {
        buffer.reserve(most);
    }
    let mut spare = buffer.limit(most);
    let read = ready!(pin!(io.read_buf(&mut spare)).poll(cx))?;
    if read >= *room / 2 {
        *room = (2 * *room).min(MOST_ROOM);
    }
    Poll::Ready(Ok(read))
}

fn left() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the client left")
}

//! Counts HTTP/2 heads that the HTTP/2 library rejects itself: it resets the stream, or responds 431, and
//! reports neither to the service.
//!
//! The frames of both directions are followed by their nine-byte headers. A stream that the client began and that
//! the service is not called for was rejected, if the library also reset it or responded with a head alone.
//! `REFUSED_STREAM` does not count, because it is about the number of streams.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use h2::Reason;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::conn_driver::ConnDriver;
use crate::types::{InvalidHead, ListenerStats};

/// The streams of one connection whose request has not reached the service.
#[derive(Clone, Default)]
pub(super) struct PendingHeads(Arc<Mutex<HeadCounts>>);

#[derive(Default)]
struct HeadCounts {
    /// Streams begun that neither reached the service nor were rejected.
    pending: u64,
    /// The highest stream begun; what a client sends on a lower one is trailers.
    last: u32,
    /// Streams up to this one are not pending.
    done: u32,
    /// Streams ended without a response of the service, as it seems, and what that is counted as.
    ended: Vec<(u32, Option<InvalidHead>)>,
}

impl PendingHeads {
    /// Most ends that are kept until the next look.
    const MOST: usize = 1024;

    /// The service got a request.
    pub(super) fn served(&self) {
        let mut heads = self.0.lock();
        heads.pending = heads.pending.saturating_sub(1);
    }

    fn begun(&self, stream: u32) {
        let mut heads = self.0.lock();
        if stream > heads.last {
            heads.last = stream;
            heads.pending += 1;
        }
    }

    fn ended(&self, stream: u32, why: Option<InvalidHead>) {
        let mut heads = self.0.lock();
        let is_known = stream <= heads.done || heads.ended.last().is_some_and(|(last, _)| *last == stream);
        if !is_known && heads.ended.len() < Self::MOST {
            heads.ended.push((stream, why));
        }
    }

    /// Counts the streams that were rejected. To be called when the service has been called for all others.
    fn settle(&self, listener_stats: &ListenerStats) {
        let mut heads = self.0.lock();
        let rejected = heads.ended.len().min(usize::try_from(heads.pending).unwrap_or(usize::MAX));
        heads.ended[..rejected].iter().filter_map(|(_, why)| *why).for_each(|why| listener_stats.refused_head(why));
        heads.pending -= rejected as u64;
        heads.ended.clear();
        if heads.pending == 0 {
            heads.done = heads.last;
        }
    }
}

/// A connection whose rejected heads are counted after each poll.
pub(super) struct CountsRejectedHeads<T> {
    pub connection: T,
    pub pending: PendingHeads,
    pub listener_stats: ListenerStats,
}

impl<T: ConnDriver> ConnDriver for CountsRejectedHeads<T> {
    type End = T::End;

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<T::End> {
        let end = self.connection.poll(cx);
        self.pending.settle(&self.listener_stats);
        end
    }

    fn finish(&mut self) {
        self.connection.finish();
    }
}

/// A transport with HTTP/2 on it.
pub(super) struct H2FrameWatch<T> {
    io: T,
    read: FrameReader,
    written: FrameReader,
    pending: PendingHeads,
}

impl<T> H2FrameWatch<T> {
    /// Follows a connection from its preface on.
    pub(super) fn new(io: T, pending: PendingHeads) -> Self {
        let read = FrameReader { skip: FrameReader::PREFACE, ..FrameReader::default() };
        H2FrameWatch { io, read, written: FrameReader::default(), pending }
    }

    fn on_read(&mut self, bytes: &[u8]) {
        let pending = &self.pending;
        self.read.walk(bytes, |frame| {
            if frame.kind() == FrameReader::HEADERS {
                pending.begun(frame.stream());
            }
        });
    }

    fn on_written(&mut self, bytes: &[u8]) {
        let pending = &self.pending;
        self.written.walk(bytes, |frame| match frame.kind() {
            FrameReader::RESET => {
                let counts = frame.code() != u32::from(Reason::REFUSED_STREAM);
                pending.ended(frame.stream(), counts.then_some(InvalidHead::Malformed));
            }
            FrameReader::HEADERS if frame.ends_stream() => {
                pending.ended(frame.stream(), Some(InvalidHead::TooLarge));
            }
            _ => {}
        });
    }
}

/// Finds the frames in one direction of a connection.
#[derive(Default)]
struct FrameReader {
    /// The header of a frame (RFC 9113 section 4.1), and of a reset its code.
    head: [u8; 13],
    have: usize,
    /// Bytes until the next frame.
    skip: usize,
}

impl FrameReader {
    const PREFACE: usize = 24;
    const HEADER: usize = 9;
    const HEADERS: u8 = 1;
    const RESET: u8 = 3;
    const END_STREAM: u8 = 1;

    /// Calls `found` for every frame whose header is complete.
    fn walk(&mut self, mut bytes: &[u8], mut found: impl FnMut(&Self)) {
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let taken = (self.wanted() - self.have).min(bytes.len());
            self.head[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == self.wanted() {
                found(self);
                self.skip = Self::HEADER + self.length() - self.have;
                self.have = 0;
            }
        }
    }

    /// Length of the part that is read.
    fn wanted(&self) -> usize {
        let has_code = self.have >= Self::HEADER && self.kind() == Self::RESET && self.length() == size_of::<u32>();
        if has_code { self.head.len() } else { Self::HEADER }
    }

    fn length(&self) -> usize {
        usize::from(self.head[0]) << 16 | usize::from(self.head[1]) << 8 | usize::from(self.head[2])
    }

    fn kind(&self) -> u8 {
        self.head[3]
    }

    fn ends_stream(&self) -> bool {
        self.head[4] & Self::END_STREAM != 0
    }

    fn stream(&self) -> u32 {
        self.number(5) & !(1 << 31)
    }

    fn code(&self) -> u32 {
        self.number(Self::HEADER)
    }

    fn number(&self, at: usize) -> u32 {
        u32::from_be_bytes([self.head[at], self.head[at + 1], self.head[at + 2], self.head[at + 3]])
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for H2FrameWatch<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        self.on_read(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for H2FrameWatch<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.io).poll_write(cx, buf))?;
        self.on_written(&buf[..written]);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.io).poll_write_vectored(cx, bufs))?;
        let mut left = written;
        for buf in bufs {
            let part = left.min(buf.len());
            self.on_written(&buf[..part]);
            left -= part;
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

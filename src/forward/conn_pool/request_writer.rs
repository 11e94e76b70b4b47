//! Writes a request: the head, and the frames of its body as received.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::AsyncWrite;

use crate::dial::BoxedIo;
use crate::http1::{put_line, put_request_head, return_write_buffer, take_write_buffer};

/// Bodies up to this length are copied behind the head, because one plain write is cheaper than a
/// vectored one.
const SHORT: usize = 4 * 1024;

/// Initial capacity of a head.
const USUAL_HEAD: usize = 512;

/// Most buffers per vectored write.
const AT_ONCE: usize = 16;

/// The unwritten rest of a request.
pub struct RequestWriter {
    /// The head, followed by a short body; written up to `at`.
    head: Vec<u8>,
    at: usize,
    /// The body, unless short.
    frames: VecDeque<Bytes>,
}

impl RequestWriter {
    /// A `POST`; otherwise as [`RequestWriter::new`].
    #[must_use]
    pub fn post<'a>(
        prefix: &str,
        target: &str,
        fields: impl Iterator<Item = (&'a str, &'a [u8])>,
        body: Cow<'_, [Bytes]>,
    ) -> Self {
        let put = |head: &mut Vec<u8>| fields.for_each(|(name, value)| put_line(head, name, value));
        Self::new("POST", prefix, target, put, body)
    }

    /// A request with this method, the target `prefix` + `target` and these headers; `Content-Length` is
    /// appended.
    #[must_use]
    pub fn new(
        method: &str,
        prefix: &str,
        target: &str,
        put_fields: impl FnOnce(&mut Vec<u8>),
        body: Cow<'_, [Bytes]>,
    ) -> Self {
        let length: usize = body.iter().map(Bytes::len).sum();
        let is_short = length <= SHORT;
        let mut head = take_write_buffer();
        head.reserve(USUAL_HEAD + if is_short { length } else { 0 });
        put_request_head(&mut head, method, [prefix, target], put_fields, length as u64);
        if is_short {
            body.iter().for_each(|frame| head.extend_from_slice(frame));
        }
        let mut frames = VecDeque::new();
        if !is_short {
            frames = body.into_owned().into();
            frames.retain(|frame| !frame.is_empty());
        }
        RequestWriter { head, at: 0, frames }
    }

    /// Writes until everything is out.
    pub(super) fn poll(&mut self, io: &mut BoxedIo, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.at < self.head.len() || !self.frames.is_empty() {
            let written = match ready!(self.write(Pin::new(io), cx))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => written,
            };
            self.advance(written);
        }
        Pin::new(io).poll_flush(cx)
    }

    fn write(&self, io: Pin<&mut BoxedIo>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let head = &self.head[self.at..];
        if self.frames.is_empty() {
            return io.poll_write(cx, head);
        }
        let mut pieces = [IoSlice::new(&[]); AT_ONCE];
        let left = std::iter::once(head).chain(self.frames.iter().map(|frame| &**frame));
        let left = left.filter(|piece| !piece.is_empty());
        let count = pieces.iter_mut().zip(left).map(|(slot, piece)| *slot = IoSlice::new(piece)).count();
        io.poll_write_vectored(cx, &pieces[..count])
    }

    fn advance(&mut self, mut written: usize) {
        let of_head = written.min(self.head.len() - self.at);
        self.at += of_head;
        written -= of_head;
        while let Some(frame) = self.frames.front_mut().filter(|_| written > 0) {
            let of_frame = written.min(frame.len());
            frame.advance(of_frame);
            written -= of_frame;
            if frame.is_empty() {
                self.frames.pop_front();
            }
        }
    }
}

impl Drop for RequestWriter {
    fn drop(&mut self) {
        return_write_buffer(std::mem::take(&mut self.head));
    }
}

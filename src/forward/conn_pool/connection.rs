//! The receiving side of a connection to an engine.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::{Context, Poll};

use bytes::BytesMut;
use tokio::io::AsyncReadExt;
use tokio::task::unconstrained;

use super::BUFFER;
use crate::dial::BoxedIo;
use crate::http1::{HeadCache, ResponseHead};

/// Usual read buffer: large enough for an event, or a small response with its head. Grows while reads
/// fill it.
const ROOM: usize = 4 * 1024;

/// Less free space than this is not read into.
const LEAST_ROOM: usize = 1024;

/// Unused buffers kept per thread, because most connections wait most of the time.
const SPARE: usize = 16;

thread_local! {
    /// Last returned first, because it is still in the processor's caches. A connection that waits for its
    /// engine, within a stream or between requests, keeps none.
    static BUFFERS: RefCell<Vec<BytesMut>> = const { RefCell::new(Vec::new()) };
}

/// A connection, and its received bytes that were not consumed yet.
pub(super) struct UpstreamConn {
    pub io: BoxedIo,
    pub buffer: BytesMut,
    /// Bytes received since it was opened.
    pub received: u64,
    /// Cache of its response heads.
    pub known: HeadCache<ResponseHead>,
    room: usize,
}

impl UpstreamConn {
    pub fn new(io: BoxedIo) -> Self {
        UpstreamConn { io, buffer: BytesMut::new(), received: 0, known: HeadCache::default(), room: ROOM }
    }

    /// Reads into the buffer; returns the number of bytes, 0 at the end of the connection.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.buffer.is_empty() {
            if self.buffer.capacity() == 0 {
                self.buffer = BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_default();
            }
            // Reuses the buffer if no slice of it is alive, which is the rule.
            let _ = self.buffer.try_reclaim(self.room);
        }
        if self.buffer.capacity() - self.buffer.len() < LEAST_ROOM {
            self.buffer.reserve(self.room);
        }
        let room = self.buffer.capacity() - self.buffer.len();
        let Poll::Ready(read) = pin!(self.io.read_buf(&mut self.buffer)).poll(cx) else {
            if self.buffer.is_empty() && self.room == ROOM {
                self.give_back();
            }
            return Poll::Pending;
        };
        let read = read?;
        self.received += read as u64;
        if read == room {
            self.room = (2 * room).clamp(ROOM, BUFFER);
        } else if read < self.room / 4 {
            self.room = (self.room / 2).max(ROOM);
        }
        Poll::Ready(Ok(read))
    }

    /// Called when the connection goes idle; its read buffer serves others.
    pub fn shrink(&mut self) {
        self.room = ROOM;
        self.give_back();
    }

    /// Gives the empty buffer to the thread's next connection that reads. One that has grown, or of which a
    /// slice is alive, is let go.
    fn give_back(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        if buffer.try_reclaim(ROOM) && buffer.capacity() <= 2 * ROOM {
            BUFFERS.with_borrow_mut(|buffers| {
                if buffers.len() < SPARE {
                    buffers.push(buffer);
                }
            });
        }
    }

    /// Whether no bytes, not even the end of the connection, follow the last response. Bypasses the task's
    /// cooperative budget, which could otherwise report "nothing to read" wrongly. Registers the task to be
    /// woken by input.
    pub fn is_reusable(&mut self, cx: &mut Context<'_>) -> bool {
        let look = pin!(unconstrained(poll_fn(|cx| self.poll_read(cx))));
        look.poll(cx).is_pending() && self.buffer.is_empty()
    }
}

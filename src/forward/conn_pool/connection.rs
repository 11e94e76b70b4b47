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
    /// engine, within a stream or between requests, keeps none. Slices of one may still be alive.
    static BUFFERS: RefCell<Vec<BytesMut>> = const { RefCell::new(Vec::new()) };
}

/// The unused buffer that was returned last and is free. Those whose slices are alive (clients have not read
/// them yet) are let go on the way.
fn spare_buffer() -> BytesMut {
    BUFFERS.with_borrow_mut(|buffers| {
        let free =
            std::iter::from_fn(|| buffers.pop()).find_map(|mut buffer| buffer.try_reclaim(ROOM).then_some(buffer));
        free.unwrap_or_default()
    })
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
    /// Whether the buffer has grown beyond what is worth keeping.
    is_large: bool,
}

impl UpstreamConn {
    pub fn new(io: BoxedIo) -> Self {
        UpstreamConn {
            io,
            buffer: BytesMut::new(),
            received: 0,
            known: HeadCache::default(),
            room: ROOM,
            is_large: false,
        }
    }

    /// Reads into the buffer; returns the number of bytes, 0 at the end of the connection.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.buffer.capacity() == 0 {
            self.buffer = spare_buffer();
        } else if self.buffer.is_empty() {
            // Reuses the buffer if no slice of it is alive, which is the rule.
            let _ = self.buffer.try_reclaim(self.room);
        }
        if self.buffer.capacity() - self.buffer.len() < LEAST_ROOM {
            self.buffer.reserve(self.room);
            self.is_large |= self.buffer.capacity() > 2 * ROOM;
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

    /// Gives the empty buffer to the thread's next connection that reads. One that has grown is let go.
    fn give_back(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        if !std::mem::take(&mut self.is_large) && buffer.capacity() > 0 {
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

//! The bytes of a connection to an engine, as they come in.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use tokio::io::AsyncReadExt;
use tokio::task::unconstrained;

use super::BUFFER;
use super::head::ResponseHead;
use crate::dial::BoxedIo;
use crate::framing::HeadCache;

/// Room for a read: what an event, or a small answer with its head, fits into. More is asked
/// for while reads fill it.
const ROOM: usize = 4 * 1024;

/// With less room than this left, none is read into.
const LEAST_ROOM: usize = 1024;

/// A connection, and what has come in and was not looked at yet.
pub(super) struct UpstreamConn {
    pub io: BoxedIo,
    pub buffer: BytesMut,
    /// Bytes that came in since it was opened.
    pub received: u64,
    /// What is known of the heads of its answers.
    pub known: HeadCache<ResponseHead>,
    room: usize,
}

impl UpstreamConn {
    pub fn new(io: BoxedIo) -> Self {
        UpstreamConn { io, buffer: BytesMut::new(), received: 0, known: HeadCache::default(), room: ROOM }
    }

    /// Reads more into the buffer; says how much, 0 at the connection's end.
    pub fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        // Where nobody holds what was read before, its place is taken again. That is the rule, and
        // the processor's caches still hold it then.
        if self.buffer.is_empty() {
            let _ = self.buffer.try_reclaim(self.room);
        }
        if self.buffer.capacity() - self.buffer.len() < LEAST_ROOM {
            self.buffer.reserve(self.room);
        }
        let room = self.buffer.capacity() - self.buffer.len();
        let read = ready!(pin!(self.io.read_buf(&mut self.buffer)).poll(cx))?;
        self.received += read as u64;
        if read == room {
            self.room = (2 * room).clamp(ROOM, BUFFER);
        } else if read < self.room / 4 {
            self.room = (self.room / 2).max(ROOM);
        }
        Poll::Ready(Ok(read))
    }

    /// Nothing is waited for for a while: a large buffer is not kept meanwhile.
    pub fn rest(&mut self) {
        if self.buffer.capacity() > ROOM {
            self.buffer = BytesMut::new();
        }
        self.room = ROOM;
    }

    /// Whether nothing came behind the last answer, not even the connection's end. Looks at the
    /// connection itself, however much its task has done in this turn: one that has used up its
    /// budget would be told that nothing is there. What comes from now on wakes the task.
    pub fn is_quiet(&mut self, cx: &mut Context<'_>) -> bool {
        let look = pin!(unconstrained(poll_fn(|cx| self.poll_more(cx))));
        look.poll(cx).is_pending() && self.buffer.is_empty()
    }
}

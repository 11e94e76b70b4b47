//! Counts what comes in underneath hyper, whose errors do not tell a close without any byte
//! from one after half a head.

use super::*;
use crate::dial::BoxedIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is known of a connection beside hyper.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// Bytes received since it was opened.
    pub received: AtomicU64,
    /// The current request's body has been handed over whole.
    pub sent_whole: AtomicBool,
}

impl Meter {
    /// A request begins; returns the bytes received before it.
    pub fn begin(&self) -> u64 {
        self.sent_whole.store(false, Ordering::Release);
        self.received.load(Ordering::Acquire)
    }
}

/// A connection whose received bytes are counted.
pub(super) struct Counted {
    io: BoxedIo,
    meter: Arc<Meter>,
}

impl Counted {
    pub fn new(io: BoxedIo, meter: Arc<Meter>) -> Self {
        Counted { io, meter }
    }
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.io).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        if read > 0 {
            self.meter.received.fetch_add(read as u64, Ordering::AcqRel);
        }
        result
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
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

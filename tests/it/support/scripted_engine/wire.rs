//! Byte streams of a scripted engine.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::TcpStream;

/// A byte stream that can be reset.
pub trait Wire: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Resets the stream.
    fn reset(self);
}

impl Wire for TcpStream {
    fn reset(self) {
        // Zero linger turns the following close into an RST.
        let _ = self.set_zero_linger();
    }
}

/// Tokio's pipe cannot be reset: the peer sees a normal end. Use a [`pipe`] where the difference
/// matters.
impl Wire for DuplexStream {
    fn reset(self) {}
}

/// One end of an in-memory connection. Dropping it closes normally: the other end reads the rest, then the
/// end of the stream.
#[derive(Debug)]
pub struct PipeEnd {
    inner: DuplexStream,
    own_reset: Arc<AtomicBool>,
    peer_reset: Arc<AtomicBool>,
}

/// An in-memory connection with this capacity per direction.
#[must_use]
pub fn pipe(capacity: usize) -> (PipeEnd, PipeEnd) {
    let (left, right) = tokio::io::duplex(capacity);
    let (a, b) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let left = PipeEnd { inner: left, own_reset: Arc::clone(&a), peer_reset: Arc::clone(&b) };
    (left, PipeEnd { inner: right, own_reset: b, peer_reset: a })
}

impl Wire for PipeEnd {
    /// The peer still reads earlier bytes, then gets `ConnectionReset`.
    fn reset(self) {
        self.own_reset.store(true, Ordering::Release);
    }
}

impl PipeEnd {
    fn reset_or<T>(&self, value: T) -> io::Result<T> {
        if self.peer_reset.load(Ordering::Acquire) { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(value) }
    }
}

impl AsyncRead for PipeEnd {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let wanted = buf.remaining() > 0;
        std::task::ready!(Pin::new(&mut self.inner).poll_read(cx, buf))?;
        let ended = wanted && buf.filled().len() == before;
        Poll::Ready(if ended { self.reset_or(()) } else { Ok(()) })
    }
}

impl AsyncWrite for PipeEnd {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.reset_or(())?;
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

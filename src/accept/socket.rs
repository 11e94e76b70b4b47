//! The socket under TLS and HTTP: detects a client that does not read, and closes gracefully.
//!
//! A connection stops polling a response once its buffers are full, so with HTTP/1 this is the only place
//! that can notice such a client and enforce its limits. HTTP/2 streams are watched individually; here
//! the write-stall limit covers the whole connection.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::conn_state::ConnState;
use super::write_stall::Stall;

/// A client's transport.
pub(super) struct Socket<T> {
    io: T,
    peer: Arc<ConnState>,
    write_stall: Duration,
    stall: Stall,
    /// Whether the client has closed its side.
    ended: bool,
    linger: Linger,
}

enum Linger {
    /// Our side is open.
    Open,
    /// Our side is closed. Further bytes of the client are read and discarded for a while, because closing a
    /// socket with unread bytes resets it, and the reset can overtake a response that explains
    /// the closing (413, 431).
    Reading(Pin<Box<Sleep>>),
    /// Closed.
    Closed,
}

impl<T> Socket<T> {
    /// How long a client may send after our side is closed.
    const LINGER: Duration = Duration::from_secs(2);

    pub(super) fn new(io: T, peer: Arc<ConnState>, write_stall: Duration) -> Self {
        Socket { io, peer, write_stall, stall: Stall::none(), ended: false, linger: Linger::Open }
    }

    fn written<N>(&mut self, wrote: Poll<io::Result<N>>, cx: &mut Context<'_>) -> Poll<io::Result<N>> {
        if wrote.is_ready() {
            if self.stall.is_running() {
                self.stall.end(&self.peer.side, &self.peer.clock);
                self.peer.set_refuses(false);
            }
            return wrote;
        }
        self.peer.set_refuses(true);
        let severed = ready!(self.stall.refused(&self.peer.side, &self.peer.clock, self.write_stall, cx));
        tracing::debug!(?severed, "client does not read; closing its connection");
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Socket<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            this.peer.heard();
        } else {
            this.ended = true;
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Socket<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.io).poll_write(cx, buf);
        this.written(wrote, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.io).poll_write_vectored(cx, bufs);
        this.written(wrote, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            match &mut this.linger {
                Linger::Open => {
                    ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
                    if this.ended {
                        this.linger = Linger::Closed;
                        continue;
                    }
                    let until = this.peer.clock.instant(this.peer.clock.now() + Self::LINGER);
                    this.linger = Linger::Reading(Box::pin(tokio::time::sleep_until(until)));
                }
                Linger::Reading(limit) => {
                    let mut scrap = [0; 4096];
                    let mut scrap = ReadBuf::new(&mut scrap);
                    let done = match Pin::new(&mut this.io).poll_read(cx, &mut scrap) {
                        Poll::Ready(Ok(())) => scrap.filled().is_empty(),
                        Poll::Ready(Err(_)) => true,
                        Poll::Pending => {
                            ready!(limit.as_mut().poll(cx));
                            true
                        }
                    };
                    if done || limit.is_elapsed() {
                        this.linger = Linger::Closed;
                    }
                }
                Linger::Closed => return Poll::Ready(Ok(())),
            }
        }
    }
}

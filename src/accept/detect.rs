//! Detects a client's HTTP version from its first bytes.
//!
//! HTTP/2 begins with a preface that no HTTP/1 request begins with. The bytes read for detection are
//! replayed together with the bytes after them in one read, so that a request fills
//! one buffer rather than two.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::conn_driver::ConnDriver;

/// The connection preface of HTTP/2 (RFC 9113 section 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpVersion {
    Http1,
    Http2,
}

impl HttpVersion {
    /// The version of an ALPN name (RFC 7301 section 6, RFC 9113 section 3.2).
    pub(super) fn of(name: &[u8]) -> Option<Self> {
        VERSIONS.into_iter().find(|(own, _)| *own == name).map(|(_, version)| version)
    }
}

/// ALPN names in order of preference.
pub(super) const VERSIONS: [(&[u8], HttpVersion); 2] = [(b"h2", HttpVersion::Http2), (b"http/1.1", HttpVersion::Http1)];

/// Reads until the version is known.
pub(super) struct DetectHttp<T> {
    /// `None` once the version is known.
    io: Option<T>,
    first: PeekBuffer,
    /// The connection is closing, so no first byte is awaited.
    is_over: bool,
}

/// The first bytes of a connection.
#[derive(Clone, Copy, Debug, Default)]
struct PeekBuffer {
    bytes: [u8; PREFACE.len()],
    len: u8,
}

impl PeekBuffer {
    fn seen(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The version, if these bytes suffice; `at_end` means that no more come.
    fn version(&self, at_end: bool) -> Option<HttpVersion> {
        match self.seen() {
            seen if seen == PREFACE => Some(HttpVersion::Http2),
            seen if PREFACE.starts_with(seen) && !at_end => None,
            _ => Some(HttpVersion::Http1),
        }
    }
}

impl<T> DetectHttp<T> {
    pub(super) fn new(io: T) -> Self {
        DetectHttp { io: Some(io), first: PeekBuffer::default(), is_over: false }
    }
}

impl<T: AsyncRead + Unpin> ConnDriver for DetectHttp<T> {
    type End = io::Result<Option<(HttpVersion, PrefixedIo<T>)>>;

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Self::End> {
        while let Some(io) = self.io.as_mut().filter(|_| !self.is_over) {
            let mut room = ReadBuf::new(&mut self.first.bytes);
            room.set_filled(usize::from(self.first.len));
            ready!(Pin::new(io).poll_read(cx, &mut room))?;
            let len = room.filled().len() as u8;
            let at_end = len == self.first.len;
            self.first.len = len;
            if let Some(version) = self.first.version(at_end) {
                let rewound = self.io.take().map(|io| PrefixedIo { io, first: self.first, given: 0 });
                return Poll::Ready(Ok(rewound.map(|io| (version, io))));
            }
        }
        Poll::Ready(Ok(None))
    }

    fn finish(&mut self) {
        self.is_over = true;
    }
}

/// A connection whose first bytes were read already and are replayed.
pub(super) struct PrefixedIo<T> {
    io: T,
    first: PeekBuffer,
    given: u8,
}

impl<T: AsyncRead + Unpin> AsyncRead for PrefixedIo<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.given == self.first.len {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let left = &self.first.seen()[usize::from(self.given)..];
        let give = left.len().min(buf.remaining());
        buf.put_slice(&left[..give]);
        self.given += give as u8;
        if buf.remaining() > 0 {
            // An error occurs again at the next read.
            let _ = Pin::new(&mut self.io).poll_read(cx, buf);
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for PrefixedIo<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn asked(chunks: &[&[u8]]) -> Option<(HttpVersion, Vec<u8>)> {
        let (mut client, io) = tokio::io::duplex(4096);
        let send = async {
            for chunk in chunks {
                client.write_all(chunk).await.unwrap();
                tokio::task::yield_now().await;
            }
            drop(client);
        };
        let hear = async {
            let mut asking = DetectHttp::new(io);
            let (version, mut io) = std::future::poll_fn(|cx| asking.poll(cx)).await.unwrap()?;
            let mut all = Vec::new();
            io.read_to_end(&mut all).await.unwrap();
            Some((version, all))
        };
        tokio::join!(hear, send).0
    }

    #[tokio::test]
    async fn the_preface_tells_and_nothing_is_lost() {
        for (text, version) in [
            (&b"POST / HTTP/1.1\r\n\r\n"[..], HttpVersion::Http1),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nmore", HttpVersion::Http2),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r", HttpVersion::Http1),
            (b"PRI * HTTP/1.1\r\n\r\n", HttpVersion::Http1),
            (b"", HttpVersion::Http1),
        ] {
            assert_eq!(asked(&[text]).await, Some((version, text.to_vec())));
            let bytes: Vec<&[u8]> = text.chunks(1).collect();
            assert_eq!(asked(&bytes).await, Some((version, text.to_vec())));
        }
    }

    #[tokio::test]
    async fn a_connection_that_is_to_end_is_not_waited_for() {
        let (_client, io) = tokio::io::duplex(64);
        let mut asking = DetectHttp::new(io);
        let first = std::future::poll_fn(|cx| Poll::Ready(asking.poll(cx).is_pending())).await;
        assert!(first);
        asking.finish();
        let end = std::future::poll_fn(|cx| asking.poll(cx)).await;
        assert!(end.unwrap().is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_are_read_again(text in proptest::collection::vec(any::<u8>(), 0..64), size in 1usize..40) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let chunks: Vec<&[u8]> = text.chunks(size).collect();
            let (version, all) = runtime.block_on(asked(&chunks)).unwrap();
            prop_assert_eq!(version == HttpVersion::Http2, text.starts_with(PREFACE));
            prop_assert_eq!(all, text);
        }
    }
}

//! One client connection, from its first byte to its last: TLS, HTTP version, requests, limits, and its
//! end.

use std::error::Error;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use h2::Reason;
use http::{Request, Response};
use http_body::Body;
use hyper::server::conn::http2;
use hyper_util::rt::TokioIo;
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tower::Service;

use super::body::{BoxError, IncomingRequest};
use super::conn_driver::{ConnDriver, DeadlineWatch, drive};
use super::conn_state::ConnState;
use super::connection_limits::Connections;
use super::date::Dates;
use super::detect::{DetectHttp, HttpVersion};
use super::drain::{Drain, DrainPhase};
use super::h2_rejected_heads::{CountsRejectedHeads, H2FrameWatch};
use super::http1_connection::Http1;
use super::read_fairness::ReadFairness;
use super::service::{ConnService, H2Executor};
use super::settings::Listen;
use super::socket::Socket;
use super::tls::{Certificates, TlsError};
use crate::clock::Clock;
use crate::http1::ResponseHeaders;
use crate::types::{InvalidHead, ListenerStats};

/// Serves connections under the limits of [`Listen`]. Clones share one state.
#[derive(Clone)]
pub struct ConnectionServer {
    limits: Arc<ArcSwap<Listen>>,
    /// Notified when the limits change.
    changed: Arc<Notify>,
    certificates: Option<Arc<Certificates>>,
    tls: Option<TlsAcceptor>,
    drain: Drain,
    dates: Arc<Dates>,
    turnstile: Arc<ReadFairness>,
    connections: Arc<Connections>,
    listener_stats: ListenerStats,
    clock: Clock,
}

impl ConnectionServer {
    /// A server with the limits of `listen`; with TLS if `certificates` are given.
    #[must_use]
    pub fn new(listen: &Listen, certificates: Option<&Arc<Certificates>>, drain: Drain, clock: Clock) -> Self {
        let limits = Arc::new(ArcSwap::from_pointee(listen.clone()));
        let tls = certificates.map(|certificates| TlsAcceptor::from(certificates.server_config()));
        let changed = Arc::default();
        ConnectionServer {
            limits,
            changed,
            certificates: certificates.cloned(),
            tls,
            drain,
            dates: Arc::new(Dates::new(clock)),
            turnstile: ReadFairness::new(clock),
            connections: Arc::default(),
            listener_stats: ListenerStats::default(),
            clock,
        }
    }

    /// Sets the counters of what never becomes a request.
    #[must_use]
    pub fn counting(self, listener_stats: ListenerStats) -> Self {
        ConnectionServer { listener_stats, ..self }
    }

    /// Sets limits and certificate files for future connections after a reload of the settings. The address,
    /// and whether TLS is used, do not change. The files are read on a thread for blocking work, because a
    /// file system that hangs would otherwise hold up connections.
    ///
    /// # Errors
    /// A certificate that cannot be used; then everything stays as it was.
    pub async fn set_limits(&self, listen: &Listen) -> Result<(), TlsError> {
        if let (Some(certificates), Some(tls)) = (&self.certificates, &listen.tls) {
            let (certificates, tls) = (Arc::clone(certificates), tls.clone());
            let file = tls.certificate_file.clone();
            let renewed = tokio::task::spawn_blocking(move || certificates.renew_from(&tls)).await;
            renewed.map_err(|error| TlsError::Unreadable { file, source: io::Error::other(error) })??;
        }
        self.limits.store(Arc::new(listen.clone()));
        self.changed.notify_one();
        Ok(())
    }

    /// Resolves when the limits have changed since the last call. For one listener.
    pub(super) async fn limits_changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn limits(&self) -> Arc<Listen> {
        self.limits.load_full()
    }

    pub(super) fn drain(&self) -> &Drain {
        &self.drain
    }

    pub(super) fn clock(&self) -> Clock {
        self.clock
    }

    pub(super) fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    pub(super) fn listener_stats(&self) -> &ListenerStats {
        &self.listener_stats
    }

    /// Serves one connection to its end, including all its streams.
    pub async fn serve<T, S, B>(&self, io: T, service: S)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: Service<IncomingRequest, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: ResponseHeaders + Send + 'static,
        B::Error: Into<BoxError>,
    {
        self.serve_from(io, None, service).await;
    }

    /// The same for a connection from this address.
    pub async fn serve_from<T, S, B>(&self, io: T, address: Option<IpAddr>, service: S)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: Service<IncomingRequest, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: ResponseHeaders + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let limits = self.limits();
        let peer = ConnState::new(self.clock, address.map(|address| address.to_canonical().to_string().into()));
        let _entered = self.connections.enter(&peer, address);
        let socket = Socket::new(io, Arc::clone(&peer), limits.write_stall);
        let Some(transport) = self.tls_handshake(socket, &peer, limits.header_timeout).await else { return };
        let agreed = transport.agreed();
        let streams = H2Executor::new(self.drain.clone(), limits.write_stall);
        let conn_service = ConnService::new(service, Arc::clone(&peer), &streams, self.listener_stats.clone());
        let mut deadlines =
            DeadlineWatch::new(Arc::clone(&peer), &limits, Arc::clone(&self.connections), self.drain.drain_watch());
        let mut alarm = pin!(deadlines.alarm());
        let (version, io) = match drive(&mut DetectHttp::new(transport), &mut deadlines, alarm.as_mut()).await {
            Some(Ok(Some(found))) => found,
            _ => return,
        };
        if agreed.is_some_and(|agreed| agreed != version) {
            tracing::debug!(?agreed, ?version, "the client does not use the negotiated protocol");
            return;
        }
        match version {
            HttpVersion::Http1 => {
                let (dates, turnstile) = (Arc::clone(&self.dates), Arc::clone(&self.turnstile));
                let mut driver = pin!(Http1::new(io, conn_service, &limits, dates, turnstile));
                log_end(drive(&mut driver, &mut deadlines, alarm.as_mut()).await);
            }
            HttpVersion::Http2 => {
                // Boxed because it is three times as large as HTTP/1's, and rarer.
                let (pending, listener_stats) = (conn_service.pending_heads(), self.listener_stats.clone());
                let io = TokioIo::new(H2FrameWatch::new(io, pending.clone()));
                let connection = http2(&limits, streams).serve_connection(io, conn_service);
                let mut driver = Box::new(CountsRejectedHeads { connection, pending, listener_stats });
                let ended = drive(&mut *driver, &mut deadlines, alarm.as_mut()).await;
                if let Some(Err(error)) = &ended
                    && breaks_http2(error)
                {
                    self.listener_stats.refused_head(InvalidHead::Malformed);
                }
                log_end(ended);
            }
        }
        last_stream_ended(&peer).await;
    }

    /// The TLS handshake, if any. It shares its time limit with the first head, and is abandoned while
    /// draining.
    async fn tls_handshake<T>(&self, socket: Socket<T>, peer: &ConnState, limit: Duration) -> Option<Transport<T>>
    where
        T: AsyncRead + AsyncWrite + Unpin,
    {
        let Some(tls) = &self.tls else { return Some(Transport::Plain { io: socket }) };
        // Boxed so that the connection does not reserve its memory for life.
        let shaking = Box::pin(tls.accept(socket));
        tokio::select! {
            shaken = shaking => match shaken {
                Ok(io) => Some(Transport::Tls { io: Box::new(io) }),
                Err(error) => {
                    tracing::debug!(%error, "TLS handshake failed");
                    None
                }
            },
            () = self.clock.sleep_until(Some(peer.accepted_at() + limit)) => None,
            () = self.drain.reached(DrainPhase::Draining) => None,
        }
    }
}

fn log_end<E: std::fmt::Display>(ended: Option<Result<(), E>>) {
    if let Some(Err(error)) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

/// Whether the connection ended because its client violated the protocol before or between requests.
fn breaks_http2(error: &hyper::Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<h2::Error>());
    let reason = cause.filter(|cause| !cause.is_remote() && !cause.is_io()).and_then(h2::Error::reason);
    matches!(reason, Some(Reason::PROTOCOL_ERROR | Reason::COMPRESSION_ERROR | Reason::FRAME_SIZE_ERROR))
}

/// hyper's HTTP/2 settings.
fn http2(limits: &Listen, streams: H2Executor) -> http2::Builder<H2Executor> {
    let mut builder = http2::Builder::new(streams);
    // Heads up to this size are passed on and rejected like those of HTTP/1.1; h2 itself rejects larger
    // ones with a bare 431.
    let most = limits.max_head.saturating_mul(4).saturating_add(limits.max_header_lines.saturating_mul(32 * 4));
    builder
        .max_concurrent_streams(limits.http2_max_streams)
        .max_header_list_size(u32::try_from(most).unwrap_or(u32::MAX))
        .max_send_buf_size(STREAM_BUFFER);
    builder
}

/// Most bytes that HTTP/2 buffers of a stream whose client has opened its window and does not read. Bytes
/// beyond the window are kept before it.
const STREAM_BUFFER: usize = 64 * 1024;

impl<I, S, B> ConnDriver for http2::Connection<I, S, H2Executor>
where
    I: hyper::rt::Read + hyper::rt::Write + Unpin + 'static,
    S: hyper::service::Service<Request<hyper::body::Incoming>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type End = hyper::Result<()>;

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        Future::poll(Pin::new(self), cx)
    }

    fn finish(&mut self) {
        Pin::new(self).graceful_shutdown();
    }
}

/// Waits for the streams of an ended connection, which end as well; a drain must not overtake
/// them.
async fn last_stream_ended(peer: &ConnState) {
    std::future::poll_fn(|cx| {
        peer.driven_by(cx.waker());
        if peer.has_open() { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
}

pin_project! {
    /// A client's transport, with or without TLS.
    #[project = Projected]
    enum Transport<T> {
        Plain { #[pin] io: Socket<T> },
        Tls { #[pin] io: Box<TlsStream<Socket<T>>> },
    }
}

impl<T> Transport<T> {
    /// The HTTP version negotiated in the TLS handshake, if any.
    fn agreed(&self) -> Option<HttpVersion> {
        match self {
            Transport::Plain { .. } => None,
            Transport::Tls { io } => HttpVersion::of(io.get_ref().1.alpn_protocol()?),
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Transport<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.project() {
            Projected::Plain { io } => io.poll_read(cx, buf),
            Projected::Tls { io } => io.poll_read(cx, buf),
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Transport<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.project() {
            Projected::Plain { io } => io.poll_write(cx, buf),
            Projected::Tls { io } => io.poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.project() {
            Projected::Plain { io } => io.poll_write_vectored(cx, bufs),
            Projected::Tls { io } => io.poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Transport::Plain { io } => io.is_write_vectored(),
            Transport::Tls { io } => io.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.project() {
            Projected::Plain { io } => io.poll_flush(cx),
            Projected::Tls { io } => io.poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.project() {
            Projected::Plain { io } => io.poll_shutdown(cx),
            Projected::Tls { io } => io.poll_shutdown(cx),
        }
    }
}

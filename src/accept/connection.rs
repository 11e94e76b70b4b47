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
use tokio::task::unconstrained;
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tower::Service;

use super::body::IncomingRequest;
use super::conn_state::{ConnDeadline, ConnState};
use super::connection_limits::Connections;
use super::date::Dates;
use super::detect::{DetectHttp, HttpVersion};
use super::drain::{Drain, DrainPhase, DrainWatch};
use super::http1_connection::Http1;
use super::read_fairness::ReadFairness;
use super::service::{ConnService, H2Executor};
use super::settings::Listen;
use super::socket::Socket;
use super::tls::{Certificates, TlsError};
use crate::clock::Clock;
use crate::http1::ResponseHeaders;
use crate::types::{DisconnectReason, InvalidHead, ListenerStats, Tick};

/// Any error of a body or service.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

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
        let reception = ConnService::new(service, Arc::clone(&peer), &streams, self.listener_stats.clone());
        let mut minder =
            DeadlineWatch::new(Arc::clone(&peer), &limits, Arc::clone(&self.connections), self.drain.drain_watch());
        let mut alarm = pin!(minder.alarm());
        let (version, io) = match drive(&mut DetectHttp::new(transport), &mut minder, alarm.as_mut()).await {
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
                let mut talk = pin!(Http1::new(io, reception, &limits, dates, turnstile));
                log_end(drive(&mut talk, &mut minder, alarm.as_mut()).await);
            }
            HttpVersion::Http2 => {
                // Boxed because it is three times as large as HTTP/1's, and rarer.
                let mut talk = Box::new(http2(&limits, streams).serve_connection(TokioIo::new(io), reception));
                let ended = drive(&mut *talk, &mut minder, alarm.as_mut()).await;
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

/// Whether the connection ended because its client violated the protocol before or between requests. (h2 does
/// not report what it rejects of a single stream.)
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

/// A phase of a connection: polled until it ends or is asked to finish.
pub(super) trait ConnDriver {
    /// Result of the phase.
    type End;
    /// Makes progress.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Self::End>;
    /// Closes the connection once everything begun is done.
    fn finish(&mut self);
}

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

/// Drives a phase together with the deadlines. `None`: the connection is cut.
async fn drive<T: ConnDriver>(talk: &mut T, minder: &mut DeadlineWatch, mut alarm: Pin<&mut Sleep>) -> Option<T::End> {
    std::future::poll_fn(|cx| {
        minder.peer.driven_by(cx.waker());
        let mut wish = minder.hear(cx);
        loop {
            match wish {
                ConnCommand::GoOn => {}
                ConnCommand::Finish => talk.finish(),
                ConnCommand::Cut => return Poll::Ready(None),
            }
            if let Poll::Ready(end) = talk.poll(cx) {
                return Poll::Ready(Some(end));
            }
            wish = minder.watch(alarm.as_mut(), cx);
            if wish == ConnCommand::GoOn {
                return Poll::Pending;
            }
        }
    })
    .await
}

/// The next step of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnCommand {
    GoOn,
    /// Close it after its open requests.
    Finish,
    /// Close it at once.
    Cut,
}

/// Watches a connection's time limits and the drain.
struct DeadlineWatch {
    peer: Arc<ConnState>,
    connections: Arc<Connections>,
    header_timeout: Duration,
    idle_timeout: Duration,
    drain_watch: DrainWatch,
    /// When the timer is set to fire. It may fire early (the limit moved meanwhile), never late, so that
    /// keep-alive traffic does not reset it each time.
    armed: Option<Tick>,
    /// Deadline of an idle connection that was asked to finish.
    finish_by: Option<Tick>,
}

impl DeadlineWatch {
    /// Time for an idle connection to finish.
    const GOODBYE: Duration = Duration::from_secs(3);
    /// The same if a new connection waits for its slot.
    const SHORT_GOODBYE: Duration = Duration::from_millis(250);

    fn new(peer: Arc<ConnState>, limits: &Listen, connections: Arc<Connections>, drain_watch: DrainWatch) -> Self {
        let (header_timeout, idle_timeout) = (limits.header_timeout, limits.idle_timeout);
        DeadlineWatch { peer, connections, header_timeout, idle_timeout, drain_watch, armed: None, finish_by: None }
    }

    fn alarm(&self) -> Sleep {
        tokio::time::sleep_until(self.peer.clock.instant(self.peer.accepted_at() + self.header_timeout))
    }

    /// Effect of the drain phase on this connection.
    fn hear(&mut self, cx: &mut Context<'_>) -> ConnCommand {
        let mut wish = ConnCommand::GoOn;
        while let Some(phase) = self.drain_watch.poll_phase(cx) {
            if phase >= DrainPhase::Over {
                self.peer.side.end_drain();
            }
            if phase >= DrainPhase::Cut {
                self.peer.side.sever(DisconnectReason::Drain);
                return ConnCommand::Cut;
            }
            if phase >= DrainPhase::Draining {
                wish = ConnCommand::Finish;
            }
        }
        wish
    }

    /// Checks the time limits.
    fn watch(&mut self, mut alarm: Pin<&mut Sleep>, cx: &mut Context<'_>) -> ConnCommand {
        loop {
            let due = self.peer.due(self.header_timeout, self.idle_timeout);
            match due {
                ConnDeadline::Idle(_) if self.finish_by.is_none() && self.connections.wants_to_end(&self.peer) => {
                    self.finish_by = Some(self.peer.clock.now() + Self::SHORT_GOODBYE);
                    return ConnCommand::Finish;
                }
                ConnDeadline::Idle(_) => {}
                ConnDeadline::Never | ConnDeadline::Head(_) => self.connections.cannot_end(&self.peer),
            }
            let deadline = match (due, self.finish_by) {
                // The timer is not touched during a response, which must not pay for it.
                (ConnDeadline::Never, _) => return ConnCommand::GoOn,
                (_, Some(by)) => by,
                (ConnDeadline::Head(at) | ConnDeadline::Idle(at), None) => at,
            };
            let mut rings = alarm.is_elapsed();
            if self.armed.is_none_or(|armed| armed > deadline) {
                alarm.as_mut().reset(self.peer.clock.instant(deadline));
                self.armed = Some(deadline);
                // Registers the waker: a connection is driven by one task. Unconstrained, because a task that has used
                // up its cooperative budget would get `Pending` from a timer that
                // fired.
                rings = Pin::new(&mut unconstrained(alarm.as_mut())).poll(cx).is_ready();
            }
            if !rings {
                return ConnCommand::GoOn;
            }
            self.armed = None;
            let now = self.peer.clock.now();
            match due {
                _ if deadline > now => {}
                ConnDeadline::Idle(_) if self.finish_by.is_none() => {
                    self.finish_by = Some(now + Self::GOODBYE);
                    return ConnCommand::Finish;
                }
                _ => return ConnCommand::Cut,
            }
        }
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

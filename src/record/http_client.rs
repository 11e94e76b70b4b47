//! An HTTP client for a service beside the data path: the collector of spans, a Prometheus.
//!
//! One connection, kept open between requests, with a limit on time and on the length of a response.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, RETRY_AFTER, USER_AGENT};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Collected, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::CertificateDer;
use tokio::task::JoinSet;

use crate::clock::Clock;
use crate::dial::Dial;
use crate::route::settings::EngineAddress;

/// The service, and how to reach it.
#[derive(Clone, Debug)]
pub(super) struct HttpServer {
    pub(super) address: EngineAddress,
    /// Sent with every request.
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    /// Roots in place of the system's.
    pub(super) roots: Option<Arc<[CertificateDer<'static>]>>,
    /// Limit on a whole exchange, connecting included.
    pub(super) timeout: Duration,
    /// Longest response that is read, in bytes.
    pub(super) longest: usize,
}

/// Why a request was not answered with success.
#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    #[error("no connection: {0}")]
    Dial(#[source] io::Error),
    #[error("it does not answer in HTTP: {0}")]
    Http(#[source] hyper::Error),
    #[error("it was silent for {0:?}")]
    Silent(Duration),
    #[error("it answers {status}")]
    Status {
        status: StatusCode,
        /// The pause that it asks for.
        retry_after: Option<Duration>,
    },
    #[error("its answer is longer than {0} bytes, or was cut")]
    Body(usize),
}

/// See the module.
pub(super) struct HttpClient {
    dial: Arc<dyn Dial>,
    clock: Clock,
    server: HttpServer,
    open: Option<OpenConnection>,
}

struct OpenConnection {
    sender: SendRequest<Full<Bytes>>,
    /// Drives the connection; ends it when dropped.
    _task: JoinSet<hyper::Result<()>>,
}

impl HttpClient {
    pub(super) fn new(dial: Arc<dyn Dial>, clock: Clock, server: HttpServer) -> Self {
        HttpClient { dial, clock, server, open: None }
    }

    pub(super) fn clock(&self) -> Clock {
        self.clock
    }

    /// Posts a body to a path below the service's own; returns the body of a successful response.
    pub(super) async fn post(&mut self, path: &str, kind: &'static str, body: &Bytes) -> Result<Bytes, HttpError> {
        let (clock, timeout) = (self.clock, self.server.timeout);
        let deadline = clock.now() + timeout;
        tokio::select! {
            done = self.exchange(path, kind, body) => done,
            () = clock.sleep_until(Some(deadline)) => {
                self.open = None;
                Err(HttpError::Silent(timeout))
            }
        }
    }

    async fn exchange(&mut self, path: &str, kind: &'static str, body: &Bytes) -> Result<Bytes, HttpError> {
        // A connection that the service closed meanwhile fails here, and a new one is opened.
        if let Some(mut open) = self.open.take()
            && let Ok(response) = self.send(&mut open, path, kind, body).await
        {
            return self.finish(open, response).await;
        }
        let mut open = self.connect().await?;
        let response = self.send(&mut open, path, kind, body).await.map_err(HttpError::Http)?;
        self.finish(open, response).await
    }

    async fn connect(&self) -> Result<OpenConnection, HttpError> {
        let HttpServer { address, roots, .. } = &self.server;
        let io = self.dial.dial(address, roots.as_ref()).await.map_err(HttpError::Dial)?;
        let (sender, connection) = http1::handshake(TokioIo::new(io)).await.map_err(HttpError::Http)?;
        let mut task = JoinSet::new();
        task.spawn(connection);
        Ok(OpenConnection { sender, _task: task })
    }

    async fn send(
        &self,
        open: &mut OpenConnection,
        path: &str,
        kind: &'static str,
        body: &Bytes,
    ) -> hyper::Result<Response<Incoming>> {
        open.sender.ready().await?;
        let HttpServer { address, headers, .. } = &self.server;
        let mut request = Request::post(format!("{}{path}", address.base))
            .header(HOST, address.authority())
            .header(USER_AGENT, concat!("goodput/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, kind)
            .body(Full::new(body.clone()))
            .expect("the settings' check has seen the path and the host");
        for (name, value) in headers {
            request.headers_mut().insert(name.clone(), value.clone());
        }
        open.sender.send_request(request).await
    }

    async fn finish(&mut self, open: OpenConnection, response: Response<Incoming>) -> Result<Bytes, HttpError> {
        let status = response.status();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(seconds);
        let longest = self.server.longest;
        let read = Limited::new(response.into_body(), longest).collect().await;
        let body = read.map(Collected::to_bytes).map_err(|_| HttpError::Body(longest));
        if body.is_ok() {
            self.open = Some(open);
        }
        if status.is_success() { body } else { Err(HttpError::Status { status, retry_after }) }
    }
}

/// Whole seconds; a date is ignored.
fn seconds(value: &HeaderValue) -> Option<Duration> {
    value.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

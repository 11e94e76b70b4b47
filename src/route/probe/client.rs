//! One GET to an engine on its own connection, because whether the engine accepts one is part of the
//! question.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HOST, USER_AGENT};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use secrecy::ExposeSecret;
use tokio::task::JoinSet;

use crate::clock::Clock;
use crate::dial::{Dial, is_refusal};
use crate::route::settings::{EngineAddress, PoolSettings, Scheme};

const LONGEST_HEAD: usize = 64 * 1024;

/// Dependencies of a probe.
#[derive(Clone)]
pub(super) struct ProbeClient {
    pub dial: Arc<dyn Dial>,
    pub clock: Clock,
}

/// Why a probe failed.
pub(super) enum ProbeFailure {
    /// No connection.
    Dial(io::Error),
    /// No HTTP on the connection.
    Http(hyper::Error),
    /// An unusable status.
    Status(StatusCode),
    /// Nothing usable in the response.
    Useless,
    /// Timed out.
    Late(Duration),
}

/// A response with its connection.
pub(super) struct ProbeResponse {
    pub status: StatusCode,
    body: Incoming,
    _line: (SendRequest<Empty<Bytes>>, JoinSet<hyper::Result<()>>),
}

impl ProbeClient {
    /// Sends a GET.
    pub async fn ask(
        &self,
        pool: &PoolSettings,
        address: &EngineAddress,
        path: &str,
    ) -> Result<ProbeResponse, ProbeFailure> {
        let dialled = self.within(pool.connect_timeout, self.dial.dial(address, pool.roots.as_ref())).await;
        let io = dialled.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into())).map_err(ProbeFailure::Dial)?;
        let handshake = http1::Builder::new().max_buf_size(LONGEST_HEAD).handshake(TokioIo::new(io)).await;
        let (mut sender, connection) = handshake.map_err(ProbeFailure::Http)?;
        let mut task = JoinSet::new();
        task.spawn(connection);
        match sender.send_request(request(pool, address, path)?).await {
            Ok(answer) => {
                Ok(ProbeResponse { status: answer.status(), body: answer.into_body(), _line: (sender, task) })
            }
            // The connection failed before it took the request; its task has the reason.
            Err(error) if error.is_canceled() => match task.join_next().await {
                Some(Ok(Err(why))) => Err(ProbeFailure::Http(why)),
                _ => Err(ProbeFailure::Http(error)),
            },
            Err(error) => Err(ProbeFailure::Http(error)),
        }
    }

    /// Gets a JSON document up to this length.
    pub async fn document<T: serde::de::DeserializeOwned>(
        &self,
        (pool, address): (&PoolSettings, &EngineAddress),
        path: &str,
        (longest, timeout): (usize, Duration),
    ) -> Result<T, ProbeFailure> {
        let read = async {
            let answer = self.ask(pool, address, path).await?;
            if answer.status != StatusCode::OK {
                return Err(ProbeFailure::Status(answer.status));
            }
            let mut text = Vec::new();
            answer.read(longest, |piece| text.extend_from_slice(piece)).await?;
            serde_json::from_slice(&text).map_err(|_| ProbeFailure::Useless)
        };
        self.within(timeout, read).await.unwrap_or(Err(ProbeFailure::Late(timeout)))
    }

    /// Runs work within a time limit.
    pub async fn within<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            () = self.clock.sleep_until(Some(self.clock.now() + limit)) => None,
        }
    }
}

impl ProbeResponse {
    /// Reads the body in pieces, up to `most` bytes.
    pub async fn read(mut self, most: usize, mut take: impl FnMut(&[u8])) -> Result<(), ProbeFailure> {
        let mut length = 0;
        while let Some(frame) = self.body.frame().await {
            let Ok(piece) = frame.map_err(ProbeFailure::Http)?.into_data() else { continue };
            length += piece.len();
            if length > most {
                return Err(ProbeFailure::Useless);
            }
            take(&piece);
        }
        Ok(())
    }
}

impl ProbeFailure {
    /// The cause in words for an operator, with possible misconfiguration.
    pub fn cause(&self, address: &EngineAddress) -> String {
        let hint = match (self, address.scheme) {
            // A plain-text response looks like broken TLS.
            (ProbeFailure::Dial(error), Scheme::Https) if error.kind() == io::ErrorKind::InvalidData => {
                "; if it speaks plain HTTP, write http:// in the settings"
            }
            (ProbeFailure::Http(error), Scheme::Http) if !is_broken_off(error) => {
                "; if it speaks TLS, write https:// in the settings"
            }
            _ => "",
        };
        let what = match self {
            ProbeFailure::Dial(error) if is_refusal(error) => "the port refuses connections".to_owned(),
            ProbeFailure::Dial(error) if error.kind() == io::ErrorKind::TimedOut => {
                "no connection within `connect_timeout`".to_owned()
            }
            ProbeFailure::Dial(error) => format!("no connection: {error}"),
            ProbeFailure::Http(error) => format!("it does not answer in HTTP: {}", behind(error)),
            ProbeFailure::Status(status) => format!("it answers {}", status.as_u16()),
            ProbeFailure::Useless => "what it answers cannot be read".to_owned(),
            ProbeFailure::Late(limit) => format!("it was silent for {limit:?}"),
        };
        what + hint
    }
}

/// The connection's error behind a request that it cancelled.
fn behind(error: &hyper::Error) -> &hyper::Error {
    let mut error = error;
    while let Some(why) = error.source().and_then(|why| why.downcast_ref()) {
        error = why;
    }
    error
}

/// Whether the connection was lost, whatever the protocol.
fn is_broken_off(error: &hyper::Error) -> bool {
    behind(error).source().is_some_and(|why| why.is::<io::Error>())
}

fn request(pool: &PoolSettings, address: &EngineAddress, path: &str) -> Result<Request<Empty<Bytes>>, ProbeFailure> {
    let mut request = Request::get(format!("{}{path}", address.base))
        .header(HOST, address.authority())
        .header(USER_AGENT, "goodput")
        .header(ACCEPT, "*/*")
        .body(Empty::new())
        .map_err(|_| ProbeFailure::Useless)?;
    let headers = request.headers_mut();
    if let Some(key) = &pool.api_key
        && let Ok(mut value) = HeaderValue::try_from(format!("Bearer {}", key.expose_secret()))
    {
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    for (name, value) in &pool.headers {
        headers.insert(name.clone(), value.clone());
    }
    Ok(request)
}

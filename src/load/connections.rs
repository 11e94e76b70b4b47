//! HTTP/1.1 connections to the service under load, kept and used again.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::task::{AbortHandle, JoinSet};

use super::plan::LoadTarget;
use crate::clock::Clock;
use crate::dial::is_lack;
use crate::types::Tick;

/// Idle time after which a connection is not used again: uvicorn and llama.cpp close theirs at 5 s.
const IDLE: Duration = Duration::from_secs(4);

/// Longest response that is read as a whole, in bytes.
const LONGEST_ANSWER: usize = 16 << 20;

/// A request with its whole body.
pub(super) type FullRequest = Request<Full<Bytes>>;

/// The connections of a run.
pub(super) struct LoadConnections {
    clock: Clock,
    target: LoadTarget,
    /// The newest last: the oldest are left to grow too old.
    idle: Mutex<Vec<IdleConnection>>,
    drivers: Mutex<JoinSet<()>>,
}

struct IdleConnection {
    since: Tick,
    connection: LoadConnection,
}

/// A connection that one request has for itself. Dropped, it is closed; [`LoadConnections::put_back`]
/// keeps it.
pub(super) struct LoadConnection {
    sender: SendRequest<Full<Bytes>>,
    driver: Option<AbortHandle>,
}

impl Drop for LoadConnection {
    fn drop(&mut self) {
        if let Some(driver) = self.driver.take() {
            driver.abort();
        }
    }
}

/// Why no response came.
#[derive(Debug)]
pub(super) struct NoResponse {
    /// Text for the record.
    pub error: String,
    /// This process could not open a socket.
    pub is_client_fault: bool,
}

impl LoadConnections {
    pub fn new(clock: Clock, target: LoadTarget) -> Self {
        LoadConnections { clock, target, idle: Mutex::default(), drivers: Mutex::default() }
    }

    pub fn target(&self) -> &LoadTarget {
        &self.target
    }

    /// Sends a request and returns the head of its response. A kept connection that turns out to be closed
    /// before any response byte is replaced by a fresh one, because that is no failure of the service.
    pub async fn send(
        self: &Arc<Self>,
        request: impl Fn() -> FullRequest,
    ) -> Result<(Response<Incoming>, LoadConnection), NoResponse> {
        if let Some(mut connection) = self.take_idle()
            && connection.sender.ready().await.is_ok()
        {
            match connection.sender.send_request(request()).await {
                Ok(response) => return Ok((response, connection)),
                Err(error) if error.is_canceled() || error.is_incomplete_message() => {}
                Err(error) => return Err(NoResponse::http(&error)),
            }
        }
        let mut connection = self.open().await?;
        let response = connection.sender.send_request(request()).await.map_err(|error| NoResponse::http(&error))?;
        Ok((response, connection))
    }

    /// Sends one request on its own connection, and reads the response up to [`LONGEST_ANSWER`].
    pub async fn ask(&self, request: FullRequest) -> Result<(http::StatusCode, Bytes), NoResponse> {
        let mut connection = self.open().await?;
        let response = connection.sender.send_request(request).await.map_err(|error| NoResponse::http(&error))?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, LONGEST_ANSWER).collect().await;
        let body = body.map_err(|error| NoResponse { error: error.to_string(), is_client_fault: false })?;
        Ok((head.status, body.to_bytes()))
    }

    async fn open(&self) -> Result<LoadConnection, NoResponse> {
        let LoadTarget { dial, address, roots, .. } = &self.target;
        let io = dial.dial(address, roots.as_ref()).await.map_err(|error| NoResponse {
            is_client_fault: is_lack(&error),
            error: format!("cannot connect to {address}: {error}"),
        })?;
        let (sender, driver) = handshake(TokioIo::new(io)).await.map_err(|error| NoResponse::http(&error))?;
        let mut drivers = self.drivers.lock();
        while drivers.try_join_next().is_some() {}
        let driver = drivers.spawn(async move { driver.await.unwrap_or(()) });
        Ok(LoadConnection { sender, driver: Some(driver) })
    }

    fn take_idle(&self) -> Option<LoadConnection> {
        let now = self.clock.now();
        let mut idle = self.idle.lock();
        let too_old = idle.iter().take_while(|kept| now.since(kept.since) > IDLE).count();
        idle.drain(..too_old);
        while let Some(kept) = idle.pop() {
            if !kept.connection.sender.is_closed() {
                return Some(kept.connection);
            }
        }
        None
    }

    /// Keeps a connection whose response has been read to its end.
    pub fn put_back(&self, connection: LoadConnection) {
        if !connection.sender.is_closed() {
            self.idle.lock().push(IdleConnection { since: self.clock.now(), connection });
        }
    }
}

impl NoResponse {
    fn http(error: &hyper::Error) -> Self {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        NoResponse { error: text, is_client_fault: false }
    }
}

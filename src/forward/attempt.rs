//! Starts one attempt: takes a connection, sends the request, and waits for the response head.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::conn_pool::{
    ConnPool, ConnectFailed, PendingResponse, PooledConn, RequestWriter, ResponseError, SendError, UpstreamResponse,
};
use crate::reject::Rejection;
use crate::route::settings::{EngineAddress, PoolSettings};
use crate::types::{EngineId, PoolId, Tick};

/// One request to one engine.
pub struct AttemptRequest {
    /// The pool of connections to all engines.
    pub lines: Arc<ConnPool>,
    /// The pool that the engine belongs to.
    pub pool: Arc<PoolSettings>,
    /// The engine's id.
    pub engine: EngineId,
    /// Its address.
    pub address: Arc<EngineAddress>,
    /// Head and body, complete.
    pub request: RequestWriter,
    /// Use a new connection rather than an idle one.
    pub fresh: bool,
    /// The current moment.
    pub at: Tick,
}

/// No response head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectError {
    /// The engine's pool.
    pub pool: PoolId,
    /// The reason.
    pub why: ConnectErrorKind,
}

/// Reasons for a missing response head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectErrorKind {
    /// No connection: unreachable, TLS failure, `connect_timeout`.
    NoConnection,
    /// Connection refused.
    Refused,
    /// The gateway has no file descriptor left.
    Lack,
    /// A reused connection was closed before any byte came back.
    Stale,
    /// The connection ended before a head.
    Reset,
    /// Not HTTP, or not a response to this request.
    Garbage,
}

impl ConnectError {
    /// The rejection for the client if no further attempt follows.
    #[must_use]
    pub fn refusal(&self) -> Rejection {
        let pool = self.pool.clone();
        match self.why {
            ConnectErrorKind::NoConnection | ConnectErrorKind::Refused => Rejection::ConnectFailed { pool },
            ConnectErrorKind::Lack => Rejection::OutOfSockets { pool },
            ConnectErrorKind::Stale | ConnectErrorKind::Reset => Rejection::EngineReset { pool },
            ConnectErrorKind::Garbage => Rejection::EngineGarbage { pool },
        }
    }
}

/// A started attempt. Dropping it closes the engine's connection.
#[must_use = "without it the request is cancelled"]
pub struct ConnectingAttempt {
    pool: Arc<PoolSettings>,
    way: AttemptPhase,
}

/// Progress of an attempt.
enum AttemptPhase {
    /// Connecting, with the request to send.
    Connecting(Connecting, Option<RequestWriter>),
    /// Sending the request and waiting for its response.
    Sending(PendingResponse),
}

type Connecting = Pin<Box<dyn Future<Output = Result<PooledConn, ConnectFailed>> + Send>>;

/// Starts an attempt; on an idle connection the request is written at once. Must be polled in the same
/// turn unless it [waits](ConnectingAttempt::waits).
pub fn start(call: AttemptRequest, cx: &mut Context<'_>) -> ConnectingAttempt {
    let AttemptRequest { lines, pool, engine, address, request, fresh, at } = call;
    let line = match fresh {
        false => lines.checkout_idle(&pool, &engine, &address, at, cx),
        true => Err(lines.slot(&pool, &engine, &address)),
    };
    let way = match line {
        Ok(line) => {
            let mut sending = line.send(request);
            sending.write(cx);
            AttemptPhase::Sending(sending)
        }
        Err(place) => {
            let of = Arc::clone(&pool);
            let connecting = async move { lines.open(&of, &address, place).await };
            AttemptPhase::Connecting(Box::pin(connecting), Some(request))
        }
    };
    ConnectingAttempt { pool, way }
}

impl ConnectingAttempt {
    /// Whether it needs no poll in this turn: the connection was quiet just before the request was written,
    /// and input will wake the task.
    #[must_use]
    pub fn waits(&self) -> bool {
        matches!(&self.way, AttemptPhase::Sending(sending) if !sending.is_stuck())
    }

    /// Whether the connection is open and the request is being sent.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        matches!(self.way, AttemptPhase::Sending(_))
    }

    /// The error for a time limit that passes now: no connection, if the engine does not have the request
    /// yet.
    #[must_use]
    pub fn unconnected(&self) -> Option<ConnectError> {
        (!self.is_connected()).then(|| self.failed(ConnectErrorKind::NoConnection))
    }

    fn failed(&self, why: ConnectErrorKind) -> ConnectError {
        ConnectError { pool: self.pool.id.clone(), why }
    }
}

impl Future for ConnectingAttempt {
    type Output = Result<UpstreamResponse, ConnectError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let why = match &mut self.way {
                AttemptPhase::Connecting(connecting, request) => match ready!(connecting.as_mut().poll(cx)) {
                    Ok(line) => {
                        let request = request.take().expect("a connection is made once");
                        self.way = AttemptPhase::Sending(line.send(request));
                        continue;
                    }
                    Err(failed) if failed.is_ours() => ConnectErrorKind::Lack,
                    Err(failed) if failed.is_refusal() => ConnectErrorKind::Refused,
                    Err(_) => ConnectErrorKind::NoConnection,
                },
                AttemptPhase::Sending(sending) => match ready!(Pin::new(sending).poll(cx)) {
                    Ok(answered) => return Poll::Ready(Ok(answered)),
                    Err(error) => why_not(&error),
                },
            };
            return Poll::Ready(Err(self.failed(why)));
        }
    }
}

fn why_not(failed: &SendError) -> ConnectErrorKind {
    match failed.why {
        _ if failed.is_stale() => ConnectErrorKind::Stale,
        ResponseError::Closed => ConnectErrorKind::Reset,
        ResponseError::Garbage | ResponseError::HeadTooLarge => ConnectErrorKind::Garbage,
    }
}

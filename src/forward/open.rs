//! Begins one attempt: a line to the engine, the request on it, and the head that comes back.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::lines::{
    ConnPool, ConnectFailed, PendingResponse, PooledConn, RequestWriter, ResponseError, SendError, UpstreamResponse,
};
use crate::refuse::Rejection;
use crate::route::settings::{EngineAddress, Pool};
use crate::units::{EngineId, PoolId, Tick};

/// One request to one engine.
pub struct AttemptRequest {
    /// The connections of all engines.
    pub lines: Arc<ConnPool>,
    /// The pool that the engine belongs to.
    pub pool: Arc<Pool>,
    /// The engine.
    pub engine: EngineId,
    /// Where it is.
    pub address: Arc<EngineAddress>,
    /// Head and body, complete.
    pub request: RequestWriter,
    /// Use a fresh connection, not one that has been idle.
    pub fresh: bool,
    /// The moment.
    pub at: Tick,
}

/// Why there is no response head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectError {
    /// The engine's pool.
    pub pool: PoolId,
    /// What happened.
    pub why: ConnectErrorKind,
}

/// What happened instead of a response head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectErrorKind {
    /// No connection: unreachable, TLS failure, `connect_timeout`.
    NoConnection,
    /// The same, because nobody listens there.
    Refused,
    /// The gateway has no file descriptor left for a connection.
    Lack,
    /// A reused connection was closed before any byte came back.
    Stale,
    /// The connection ended before a head.
    Reset,
    /// What came is not HTTP, or no answer to this request.
    Garbage,
}

impl ConnectError {
    /// What the client is told where no other attempt follows.
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

/// An attempt that has begun. Dropping it closes the engine's connection.
#[must_use = "without it the request is cancelled"]
pub struct ConnectingAttempt {
    pool: Arc<Pool>,
    way: AttemptPhase,
}

/// How far an attempt is.
enum AttemptPhase {
    /// Its connection is being made; what is to be sent on it.
    Connecting(Connecting, Option<RequestWriter>),
    /// The request goes out, and its answer is waited for.
    Sending(PendingResponse),
}

type Connecting = Pin<Box<dyn Future<Output = Result<PooledConn, ConnectFailed>> + Send>>;

/// Begins an attempt: on a line that stands already the request is written. To be polled in the
/// same turn, unless it [waits](ConnectingAttempt::waits).
pub fn open(call: AttemptRequest, cx: &mut Context<'_>) -> ConnectingAttempt {
    let AttemptRequest { lines, pool, engine, address, request, fresh, at } = call;
    let line = match fresh {
        false => lines.standing(&pool, &engine, &address, at, cx),
        true => Err(lines.unmade(&pool, &engine, &address)),
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
    /// Whether nothing is left to be done in the turn in which it began: the line was quiet just
    /// before the request was written, and what comes wakes the task that began it.
    #[must_use]
    pub fn waits(&self) -> bool {
        matches!(&self.way, AttemptPhase::Sending(sending) if !sending.is_stuck())
    }

    /// Whether the connection stands: the request goes out.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        matches!(self.way, AttemptPhase::Sending(_))
    }

    /// What a time limit that passes now says about the connection: it could not be made, where
    /// the engine does not have the request yet.
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

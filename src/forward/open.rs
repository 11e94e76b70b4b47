//! Begins one attempt: a line to the engine, the request on it, and the head that comes back.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::lines::{Answered, ConnectFailed, Line, Lines, NoAnswer, Outgoing, SendFailed, Sending};
use crate::refuse::Refusal;
use crate::route::settings::{EngineAddress, Pool};
use crate::units::{EngineId, PoolId, Tick};

/// One request to one engine.
pub struct Call {
    /// The connections of all engines.
    pub lines: Arc<Lines>,
    /// The pool that the engine belongs to.
    pub pool: Arc<Pool>,
    /// The engine.
    pub engine: EngineId,
    /// Where it is.
    pub address: Arc<EngineAddress>,
    /// Head and body, complete.
    pub request: Outgoing,
    /// Use a fresh connection, not one that has been idle.
    pub fresh: bool,
    /// The moment.
    pub at: Tick,
}

/// Why there is no response head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFailed {
    /// The engine's pool.
    pub pool: PoolId,
    /// What happened.
    pub why: WhyNot,
}

/// What happened instead of a response head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyNot {
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

impl OpenFailed {
    /// What the client is told where no other attempt follows.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        let pool = self.pool.clone();
        match self.why {
            WhyNot::NoConnection | WhyNot::Refused => Refusal::ConnectFailed { pool },
            WhyNot::Lack => Refusal::OutOfSockets { pool },
            WhyNot::Stale | WhyNot::Reset => Refusal::EngineReset { pool },
            WhyNot::Garbage => Refusal::EngineGarbage { pool },
        }
    }
}

/// An attempt that has begun. Dropping it closes the engine's connection.
#[must_use = "without it the request is cancelled"]
pub struct Opening {
    pool: Arc<Pool>,
    way: Way,
}

/// How far an attempt is.
enum Way {
    /// Its connection is being made; what is to be sent on it.
    Connecting(Connecting, Option<Outgoing>),
    /// The request goes out, and its answer is waited for.
    Sending(Sending),
}

type Connecting = Pin<Box<dyn Future<Output = Result<Line, ConnectFailed>> + Send>>;

/// Begins an attempt: on a line that stands already the request is written. To be polled in the
/// same turn, unless it [waits](Opening::waits).
pub fn open(call: Call, cx: &mut Context<'_>) -> Opening {
    let Call { lines, pool, engine, address, request, fresh, at } = call;
    let line = match fresh {
        false => lines.standing(&pool, &engine, &address, at, cx),
        true => Err(lines.unmade(&pool, &engine, &address)),
    };
    let way = match line {
        Ok(line) => {
            let mut sending = line.send(request);
            sending.write(cx);
            Way::Sending(sending)
        }
        Err(place) => {
            let of = Arc::clone(&pool);
            let connecting = async move { lines.open(&of, &address, place).await };
            Way::Connecting(Box::pin(connecting), Some(request))
        }
    };
    Opening { pool, way }
}

impl Opening {
    /// Whether nothing is left to be done in the turn in which it began: the line was quiet just
    /// before the request was written, and what comes wakes the task that began it.
    #[must_use]
    pub fn waits(&self) -> bool {
        matches!(&self.way, Way::Sending(sending) if !sending.is_stuck())
    }

    /// Whether the connection stands: the request goes out.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        matches!(self.way, Way::Sending(_))
    }

    /// What a time limit that passes now says about the connection: it could not be made, where
    /// the engine does not have the request yet.
    #[must_use]
    pub fn unconnected(&self) -> Option<OpenFailed> {
        (!self.is_connected()).then(|| self.failed(WhyNot::NoConnection))
    }

    fn failed(&self, why: WhyNot) -> OpenFailed {
        OpenFailed { pool: self.pool.id.clone(), why }
    }
}

impl Future for Opening {
    type Output = Result<Answered, OpenFailed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let why = match &mut self.way {
                Way::Connecting(connecting, request) => match ready!(connecting.as_mut().poll(cx)) {
                    Ok(line) => {
                        let request = request.take().expect("a connection is made once");
                        self.way = Way::Sending(line.send(request));
                        continue;
                    }
                    Err(failed) if failed.is_ours() => WhyNot::Lack,
                    Err(failed) if failed.is_refusal() => WhyNot::Refused,
                    Err(_) => WhyNot::NoConnection,
                },
                Way::Sending(sending) => match ready!(Pin::new(sending).poll(cx)) {
                    Ok(answered) => return Poll::Ready(Ok(answered)),
                    Err(error) => why_not(&error),
                },
            };
            return Poll::Ready(Err(self.failed(why)));
        }
    }
}

fn why_not(failed: &SendFailed) -> WhyNot {
    match failed.why {
        _ if failed.is_stale() => WhyNot::Stale,
        NoAnswer::Closed => WhyNot::Reset,
        NoAnswer::Garbage | NoAnswer::HeadTooLarge => WhyNot::Garbage,
    }
}

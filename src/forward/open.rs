//! Begins one attempt: a line to the engine, the request on it, and the head that comes back.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::lines::{Answered, Lines, NoAnswer, Outgoing, SendFailed, Sending};
use crate::refuse::Refusal;
use crate::route::settings::{EngineAddress, Pool};
use crate::units::{EngineId, PoolId};

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
    /// No connection: refused, unreachable, TLS failure, `connect_timeout`.
    NoConnection,
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
            WhyNot::NoConnection => Refusal::ConnectFailed { pool },
            WhyNot::Stale | WhyNot::Reset => Refusal::EngineReset { pool },
            WhyNot::Garbage => Refusal::EngineGarbage { pool },
        }
    }
}

/// An attempt that has begun. Dropping it closes the engine's connection.
#[must_use = "nothing is sent before it is polled"]
pub struct Opening {
    pool: Arc<Pool>,
    way: Way,
}

/// How an attempt goes on.
enum Way {
    /// On a connection that stood already.
    Standing(Sending),
    /// On one that has to be made first.
    Making(Pin<Box<dyn Future<Output = Result<Answered, WhyNot>> + Send>>),
}

/// Begins an attempt.
pub fn open(call: Call) -> Opening {
    let Call { lines, pool, engine, address, request, fresh } = call;
    let standing = if fresh { None } else { lines.standing(&pool, &engine, &address) };
    if let Some(line) = standing {
        return Opening { pool, way: Way::Standing(line.send(request)) };
    }
    let of = Arc::clone(&pool);
    let making = async move {
        let line = match fresh {
            false => lines.take(&of, &engine, &address).await,
            true => lines.fresh(&of, &engine, &address).await,
        };
        let line = line.map_err(|_| WhyNot::NoConnection)?;
        line.send(request).await.map_err(|error| why_not(&error))
    };
    Opening { pool, way: Way::Making(Box::pin(making)) }
}

impl Future for Opening {
    type Output = Result<Answered, OpenFailed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answered = match &mut self.way {
            Way::Standing(sending) => ready!(Pin::new(sending).poll(cx)).map_err(|error| why_not(&error)),
            Way::Making(making) => ready!(making.as_mut().poll(cx)),
        };
        Poll::Ready(answered.map_err(|why| OpenFailed { pool: self.pool.id.clone(), why }))
    }
}

fn why_not(failed: &SendFailed) -> WhyNot {
    match failed.why {
        _ if failed.is_stale() => WhyNot::Stale,
        NoAnswer::Closed => WhyNot::Reset,
        NoAnswer::Garbage | NoAnswer::HeadTooLarge => WhyNot::Garbage,
    }
}

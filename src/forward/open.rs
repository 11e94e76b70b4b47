//! Begins one attempt: a line to the engine, the request on it, and the head that comes back.

use std::pin::Pin;
use std::sync::Arc;

use http::Request;

use super::lines::{Answered, Frames, Lines, NoAnswer, SendFailed};
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
    /// Head and body, complete: hyper adds the framing only.
    pub request: Request<Frames>,
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
pub type Opening = Pin<Box<dyn Future<Output = Result<Answered, OpenFailed>> + Send>>;

/// Begins an attempt.
#[must_use]
pub fn open(call: Call) -> Opening {
    let Call { lines, pool, engine, address, request, fresh } = call;
    let standing = if fresh { None } else { lines.standing(&pool, &engine, &address) };
    if let Some(line) = standing {
        let sent = line.send(request);
        return Box::pin(async move { sent.await.map_err(|error| failed(&pool, why_not(&error))) });
    }
    Box::pin(async move {
        let line = match fresh {
            false => lines.take(&pool, &engine, &address).await,
            true => lines.fresh(&pool, &engine, &address).await,
        };
        let line = line.map_err(|_| failed(&pool, WhyNot::NoConnection))?;
        line.send(request).await.map_err(|error| failed(&pool, why_not(&error)))
    })
}

fn failed(pool: &Pool, why: WhyNot) -> OpenFailed {
    OpenFailed { pool: pool.id.clone(), why }
}

fn why_not(failed: &SendFailed) -> WhyNot {
    match failed.why {
        _ if failed.is_stale() => WhyNot::Stale,
        NoAnswer::Closed => WhyNot::Reset,
        NoAnswer::Garbage | NoAnswer::HeadTooLarge => WhyNot::Garbage,
    }
}

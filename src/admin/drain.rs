//! `POST /-/drain`: an operator drains an engine, or puts it back.

use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde::Deserialize;

use super::{LONGEST, LONGEST_WISH, SharedView, plain};
use crate::route::DrainError;
use crate::types::{EngineId, PoolId};

/// An operator's order for an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainOrder {
    /// Its pool.
    pub pool: PoolId,
    /// The engine.
    pub engine: EngineId,
    /// It is drained; else it is put back.
    pub drain: bool,
    /// Duration; `None`: until it is put back.
    pub length: Option<Duration>,
    /// Also the last engine of its pool that takes requests.
    pub may_empty_pool: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DrainBody {
    pool: String,
    engine: String,
    drain: bool,
    for_seconds: Option<u64>,
    #[serde(default)]
    may_empty_pool: bool,
}

impl DrainBody {
    fn order(self) -> Option<DrainOrder> {
        let is_length = |seconds: u64| self.drain && (1..=LONGEST).contains(&seconds);
        let DrainBody { pool, engine, drain, for_seconds, may_empty_pool } = self;
        if !for_seconds.is_none_or(is_length) {
            return None;
        }
        let length = for_seconds.map(Duration::from_secs);
        Some(DrainOrder { pool: pool.into(), engine: engine.into(), drain, length, may_empty_pool })
    }
}

pub(super) async fn drain(State(view): SharedView, request: Request) -> Response {
    let body = axum::body::to_bytes(request.into_body(), LONGEST_WISH).await.unwrap_or_default();
    let read: Option<DrainBody> = serde_json::from_slice(&body).ok();
    let Some(order) = read.and_then(DrainBody::order) else {
        let text = "send {\"pool\": NAME, \"engine\": NAME, \"drain\": true}, or false to put it back; \
                    \"for_seconds\": 1 to 604800 beside true gives it an end, \
                    \"may_empty_pool\": true drains also the last engine that takes requests\n";
        return plain(StatusCode::BAD_REQUEST, text);
    };
    match view.drain(&order) {
        Ok(now) => {
            let body = serde_json::to_vec(&now).expect("names and numbers are always JSON");
            ([(CONTENT_TYPE, "application/json")], body).into_response()
        }
        Err(DrainError::UnknownPool) => plain(StatusCode::NOT_FOUND, "no pool has this name; see /status\n"),
        Err(DrainError::UnknownEngine) => {
            plain(StatusCode::NOT_FOUND, "the pool has no engine of this name; see /status\n")
        }
        Err(DrainError::LastEngine) => {
            let text =
                "no other engine of the pool takes requests: add \"may_empty_pool\": true to drain it all the same\n";
            plain(StatusCode::CONFLICT, text)
        }
    }
}

//! Facts that a verdict needs beside the timeline.

use crate::types::{Dialect, Tokens};

/// Facts about a request beside its timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JudgeContext {
    /// Wire format of request and response.
    pub dialect: Dialect,
    /// Whether the path generates, or the settings list it under `judged_paths`.
    pub judged_path: bool,
    /// The largest output cap that the request states, per choice.
    pub stated_cap: Option<Tokens>,
    /// Whether the gateway lowered or inserted the output cap.
    pub cap_lowered: bool,
    /// Whether it is served beyond the tenant's own limit.
    pub over_limit: bool,
    /// Whether the client's own credential was forwarded to the engine.
    pub credential_forwarded: bool,
    /// Whether only a pattern of the routes matches the model and no engine of the pool has served it on
    /// this path since start: an engine's 404 then means that the model does not exist.
    pub model_unknown_to_pool: bool,
    /// Whether the request names a stored object, so that an engine's 404 may refer to that object.
    pub names_stored: bool,
    /// Whether a fallback pool answered because the request's own pool had no room.
    pub served_by_fallback_pool: bool,
}

impl JudgeContext {
    /// The defaults: a judged path, nothing stated, nothing changed.
    #[must_use]
    pub const fn of(dialect: Dialect) -> Self {
        JudgeContext {
            dialect,
            judged_path: dialect.generates(),
            stated_cap: None,
            cap_lowered: false,
            over_limit: false,
            credential_forwarded: false,
            model_unknown_to_pool: false,
            names_stored: false,
            served_by_fallback_pool: false,
        }
    }
}

//! Why a request may not run, with the numbers told to its client.

use std::fmt;
use std::time::Duration;

/// The kinds of limits, named as in the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitKind {
    /// Prompt and output tokens per minute.
    Tokens,
    /// Prompt tokens per minute.
    InputTokens,
    /// Output tokens per minute.
    OutputTokens,
    /// Requests per minute.
    Requests,
    /// Concurrent requests.
    ConcurrentRequests,
}

impl LimitKind {
    /// Every kind: the closed set of the label.
    pub const ALL: [LimitKind; 5] = [
        LimitKind::Tokens,
        LimitKind::InputTokens,
        LimitKind::OutputTokens,
        LimitKind::Requests,
        LimitKind::ConcurrentRequests,
    ];

    /// The name in settings, messages and labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            LimitKind::Tokens => "tokens_per_minute",
            LimitKind::InputTokens => "input_tokens_per_minute",
            LimitKind::OutputTokens => "output_tokens_per_minute",
            LimitKind::Requests => "requests_per_minute",
            LimitKind::ConcurrentRequests => "concurrent_requests",
        }
    }

    /// The unit in `x-ratelimit` header names.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            LimitKind::Tokens | LimitKind::InputTokens | LimitKind::OutputTokens => "tokens",
            LimitKind::Requests | LimitKind::ConcurrentRequests => "requests",
        }
    }
}

impl fmt::Display for LimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The requests that a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitScope {
    /// All of the tenant.
    Tenant,
    /// Those of the tenant for one model.
    Model,
}

impl LimitScope {
    /// Both scopes.
    pub const ALL: [LimitScope; 2] = [LimitScope::Tenant, LimitScope::Model];

    /// The name in messages and labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            LimitScope::Tenant => "tenant",
            LimitScope::Model => "model",
        }
    }
}

impl fmt::Display for LimitScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// State of a limit: the values of the `x-ratelimit` headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// The kind.
    pub limit: LimitKind,
    /// The scope.
    pub scope: LimitScope,
    /// The most that can be taken at once: the burst, or the concurrent requests.
    pub most: u64,
    /// The rate, if it is one.
    pub per_minute: Option<u64>,
    /// What is left after reservations; 0 if in debt.
    pub remaining: u64,
    /// Time until it is full if all reservations are spent completely; unknown for concurrent
    /// requests.
    pub reset: Option<Duration>,
}

/// A rejected request. Nothing was taken from any limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitExceeded {
    /// Not now: 429.
    #[error("{} of the {} is used up: {} of {} left", .limit_status.limit, .limit_status.scope, .limit_status.remaining, .limit_status.most)]
    Retryable {
        /// The limit that refused: `concurrent_requests` first, otherwise the one with the longest wait, so that
        /// the retry time is true.
        limit_status: LimitStatus,
        /// Whole seconds, at least one, until this request fits if all running reservations are spent completely.
        /// `None` if unknown.
        retry_after: Option<u64>,
    },
    /// Never: 400. Caused only by a cap that the request states.
    #[error("{limit} of the {scope} holds {most} at most, and {need} are asked for")]
    NeverFits {
        /// The limit.
        limit: LimitKind,
        /// Its scope.
        scope: LimitScope,
        /// What the request needs.
        need: u64,
        /// What the limit can hold.
        most: u64,
    },
}

impl LimitExceeded {
    /// The longest of several waits; `None` if there is none.
    pub(crate) fn for_the_longest(waits: impl Iterator<Item = (u64, LimitStatus)>) -> Option<Self> {
        let (wait, limit_status) = waits.reduce(|longest, next| if next.0 > longest.0 { next } else { longest })?;
        Some(LimitExceeded::Retryable { limit_status, retry_after: Some(wait) })
    }
}

//! Why a request may not run, with the numbers told to its client.

use std::fmt;
use std::time::Duration;

/// The kinds of limits, named as in the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
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

impl Limit {
    /// Every kind: the closed set of the label.
    pub const ALL: [Limit; 5] =
        [Limit::Tokens, Limit::InputTokens, Limit::OutputTokens, Limit::Requests, Limit::ConcurrentRequests];

    /// The name in settings, messages and labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Limit::Tokens => "tokens_per_minute",
            Limit::InputTokens => "input_tokens_per_minute",
            Limit::OutputTokens => "output_tokens_per_minute",
            Limit::Requests => "requests_per_minute",
            Limit::ConcurrentRequests => "concurrent_requests",
        }
    }

    /// The unit in `x-ratelimit` header names.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            Limit::Tokens | Limit::InputTokens | Limit::OutputTokens => "tokens",
            Limit::Requests | Limit::ConcurrentRequests => "requests",
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The requests that a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// All of the tenant.
    Tenant,
    /// Those of the tenant for one model.
    Model,
}

impl Scope {
    /// Both scopes.
    pub const ALL: [Scope; 2] = [Scope::Tenant, Scope::Model];

    /// The name in messages and labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Scope::Tenant => "tenant",
            Scope::Model => "model",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// State of a limit: the values of the `x-ratelimit` headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The kind.
    pub limit: Limit,
    /// The scope.
    pub scope: Scope,
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
pub enum Exhausted {
    /// Not now: 429.
    #[error("{} of the {} is used up: {} of {} left", .standing.limit, .standing.scope, .standing.remaining, .standing.most)]
    ForNow {
        /// The limit that refused: `concurrent_requests` first, otherwise the one with the longest wait, so that
        /// the retry time is true.
        standing: Standing,
        /// Whole seconds, at least one, until this request fits if all running reservations are spent completely.
        /// `None` if unknown.
        retry_after: Option<u64>,
    },
    /// Never: 400. Caused only by a cap that the request states.
    #[error("{limit} of the {scope} holds {most} at most, and {need} are asked for")]
    ForEver {
        /// The limit.
        limit: Limit,
        /// Its scope.
        scope: Scope,
        /// What the request needs.
        need: u64,
        /// What the limit can hold.
        most: u64,
    },
}

impl Exhausted {
    /// The longest of several waits; `None` if there is none.
    pub(crate) fn for_the_longest(waits: impl Iterator<Item = (u64, Standing)>) -> Option<Self> {
        let (wait, standing) = waits.reduce(|longest, next| if next.0 > longest.0 { next } else { longest })?;
        Some(Exhausted::ForNow { standing, retry_after: Some(wait) })
    }
}

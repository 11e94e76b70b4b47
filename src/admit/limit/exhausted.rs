//! Why a request may not run now, with the numbers that its client is told.

use std::fmt;
use std::time::Duration;

/// The limits there are, by the names they have in the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// Prompt and output tokens in a minute.
    Tokens,
    /// Prompt tokens in a minute.
    InputTokens,
    /// Output tokens in a minute.
    OutputTokens,
    /// Requests in a minute.
    Requests,
    /// Requests at the same time.
    ConcurrentRequests,
}

impl Limit {
    /// All of them: the label's closed set.
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

    /// What it counts, as the `x-ratelimit` headers call it.
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

/// Which requests a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// All of the tenant's.
    Tenant,
    /// The tenant's for one model.
    Model,
}

impl Scope {
    /// Both of them.
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

/// Where a limit stands: the values of the `x-ratelimit` headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Which one.
    pub limit: Limit,
    /// Whose.
    pub scope: Scope,
    /// The most that can be taken at once: the burst, or the requests at the same time.
    pub most: u64,
    /// The rate, where it is one.
    pub per_minute: Option<u64>,
    /// What is left, reservations taken off. Debt is 0.
    pub remaining: u64,
    /// Until it stands as at first, if all reservations were spent in full; nobody can know
    /// that of requests that run.
    pub reset: Option<Duration>,
}

/// A request that got nothing. Nothing was taken from any limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exhausted {
    /// Not now: 429.
    #[error("{} of the {} is used up: {} of {} left", .standing.limit, .standing.scope, .standing.remaining, .standing.most)]
    ForNow {
        /// The limit that refused. Where several do, the one that takes longest, so that its
        /// moment is true for the request; before them `concurrent_requests`.
        standing: Standing,
        /// Whole seconds, at least one, until this very request fits if all running
        /// reservations were spent in full. None where nobody can know.
        retry_after: Option<u64>,
    },
    /// Never, whatever is waited for: 400. Only a cap that the request states can do this.
    #[error("{limit} of the {scope} holds {most} at most, and {need} are asked for")]
    ForEver {
        /// The limit that is too small.
        limit: Limit,
        /// Whose.
        scope: Scope,
        /// What the request would have to take.
        need: u64,
        /// What can be taken at most.
        most: u64,
    },
}

impl Exhausted {
    /// The longest of several waits is the true one. None where there is no wait.
    pub(crate) fn for_the_longest(waits: impl Iterator<Item = (u64, Standing)>) -> Option<Self> {
        let (wait, standing) = waits.reduce(|longest, next| if next.0 > longest.0 { next } else { longest })?;
        Some(Exhausted::ForNow { standing, retry_after: Some(wait) })
    }
}

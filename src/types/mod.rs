//! Domain types with their units.
//!
//! A bare number hides its unit; these types show it. [`Tick`] is a moment, [`Duration`] a
//! length of time, [`Tokens`] a count. Names ([`ClassId`], [`PoolId`], ...) are shared
//! strings: cheap to clone, compared by text, and stable across a reload of the settings.
//! This module depends on no other.

mod api_path;
mod client_state;
pub mod decimal;
mod glob;
mod length_buckets;
mod listener_stats;
mod prefill_pace;
mod priority;

pub use api_path::{ApiPath, Dialect, PathError};
pub use client_state::{ClientState, DisconnectReason};
pub use glob::Glob;
pub use length_buckets::LengthBuckets;
pub use listener_stats::{InvalidHead, ListenerStats};
pub use prefill_pace::PrefillPace;
pub use priority::Priority;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Add, Sub};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Whole seconds, rounded up.
#[must_use]
pub const fn seconds_up(length: Duration) -> u64 {
    length.as_secs().saturating_add((length.subsec_nanos() > 0) as u64)
}

/// A moment on the monotonic clock: nanoseconds since the process's clock began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(u64);

impl Tick {
    /// The start of the clock.
    pub const ZERO: Tick = Tick(0);

    /// The moment `nanos` nanoseconds after the start of the clock.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Tick(nanos)
    }

    /// The moment `millis` milliseconds after the start of the clock.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Tick(millis * 1_000_000)
    }

    /// Nanoseconds since the start of the clock.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time from `earlier` to this moment; zero if this moment is not later.
    #[must_use]
    pub const fn since(self, earlier: Tick) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Tick {
    type Output = Tick;
    /// Saturates, so that "never" can be added.
    fn add(self, length: Duration) -> Tick {
        let nanos = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        Tick(self.0.saturating_add(nanos))
    }
}

impl Sub for Tick {
    type Output = Duration;
    /// Same as [`Tick::since`]: never negative.
    fn sub(self, earlier: Tick) -> Duration {
        self.since(earlier)
    }
}

/// A count of tokens. Arithmetic saturates because engines report totals that do not add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tokens(pub u64);

impl Tokens {
    /// No tokens.
    pub const ZERO: Tokens = Tokens(0);

    /// The difference, zero if `other` is larger.
    #[must_use]
    pub const fn less(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_sub(other.0))
    }

    /// This count multiplied by `times`.
    #[must_use]
    pub const fn times(self, times: u64) -> Tokens {
        Tokens(self.0.saturating_mul(times))
    }
}

impl Add for Tokens {
    type Output = Tokens;
    fn add(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_add(other.0))
    }
}

impl std::iter::Sum for Tokens {
    fn sum<I: Iterator<Item = Tokens>>(all: I) -> Tokens {
        all.fold(Tokens::ZERO, Add::add)
    }
}

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Eq, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        /// Pointer equality first, because most comparisons are of a name with itself.
        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool { Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0 }
        }
        impl Hash for $name {
            fn hash<H: Hasher>(&self, state: &mut H) { self.0.hash(state) }
        }

        impl $name {
            /// The name as written in the settings.
            #[must_use]
            pub fn as_str(&self) -> &str { &self.0 }
        }
        impl From<&str> for $name {
            fn from(text: &str) -> Self { $name(Arc::from(text)) }
        }
        impl From<String> for $name {
            fn from(text: String) -> Self { $name(Arc::from(text)) }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result { f.write_str(&self.0) }
        }
        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str { &self.0 }
        }
    )*};
}

names! {
    /// A tenant: the owner of an API key.
    TenantId;
    /// An SLO class.
    ClassId;
    /// A pool of engines.
    PoolId;
    /// One engine: its authority (`host:port`), unique inside its pool.
    EngineId;
    /// The id shared by a request's response and its access line.
    RequestId;
}

impl TenantId {
    /// The tenant of every request where the settings name no tenants.
    #[must_use]
    pub fn anonymous() -> Self {
        static ANONYMOUS: LazyLock<TenantId> = LazyLock::new(|| TenantId::from("anonymous"));
        ANONYMOUS.clone()
    }
}

/// Prompt length as a low-cardinality label.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LengthBucket {
    /// At most `length_buckets.short` prompt tokens.
    Short,
    /// At most `length_buckets.medium` prompt tokens.
    Medium,
    /// More than that.
    Long,
    /// The body was not read, or has no prompt whose length can be estimated.
    #[default]
    Unknown,
}

impl LengthBucket {
    /// Every bucket, shortest first.
    pub const ALL: [LengthBucket; 4] =
        [LengthBucket::Short, LengthBucket::Medium, LengthBucket::Long, LengthBucket::Unknown];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            LengthBucket::Short => "short",
            LengthBucket::Medium => "medium",
            LengthBucket::Long => "long",
            LengthBucket::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_before_another_is_no_time_after_it() {
        let (early, late) = (Tick::from_millis(5), Tick::from_millis(9));
        assert_eq!(late - early, Duration::from_millis(4));
        assert_eq!(early - late, Duration::ZERO);
        assert_eq!(late + Duration::MAX, Tick::from_nanos(u64::MAX));
    }

    #[test]
    fn tokens_never_overflow() {
        assert_eq!(Tokens(u64::MAX) + Tokens(1), Tokens(u64::MAX));
        assert_eq!(Tokens(1).less(Tokens(2)), Tokens::ZERO);
        assert_eq!([Tokens(3), Tokens(4)].into_iter().sum::<Tokens>(), Tokens(7));
    }
}

//! Statistics of the store, for metrics.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallResult {
    /// Granted.
    Granted,
    /// Rejected: a limit is exhausted.
    Refused,
    /// Maintenance without a need: leases returned, counts reported.
    Told,
    /// Not in time.
    Timeout,
    /// The connection broke.
    Broken,
    /// The server returned an error.
    Error,
    /// A malformed result, or one about foreign data.
    Nonsense,
}

impl CallResult {
    /// Every result: the closed set of the label.
    pub const ALL: [CallResult; 7] = [
        CallResult::Granted,
        CallResult::Refused,
        CallResult::Told,
        CallResult::Timeout,
        CallResult::Broken,
        CallResult::Error,
        CallResult::Nonsense,
    ];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            CallResult::Granted => "granted",
            CallResult::Refused => "refused",
            CallResult::Told => "told",
            CallResult::Timeout => "timeout",
            CallResult::Broken => "broken",
            CallResult::Error => "error",
            CallResult::Nonsense => "nonsense",
        }
    }
}

/// What admitted a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantSource {
    /// A lease that was here.
    Lease,
    /// A call to the store.
    Store,
    /// This gateway's share of the limit, because the store was unavailable.
    Share,
    /// Nothing: rejected because the store was unavailable.
    Nobody,
}

impl GrantSource {
    /// Every value: the closed set of the label.
    pub const ALL: [GrantSource; 4] = [GrantSource::Lease, GrantSource::Store, GrantSource::Share, GrantSource::Nobody];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            GrantSource::Lease => "lease",
            GrantSource::Store => "store",
            GrantSource::Share => "share",
            GrantSource::Nobody => "nobody",
        }
    }
}

/// Upper edges of call durations.
pub const EDGES: [Duration; 9] = [
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
    Duration::from_millis(100),
];

/// Counts since start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Whether the store is in use.
    pub up: bool,
    /// Calls by result, in the order of [`CallResult::ALL`].
    pub calls: [u64; CallResult::ALL.len()],
    /// Calls by duration, in the order of [`EDGES`], and longer ones.
    pub lengths: [u64; EDGES.len() + 1],
    /// Sum of all durations.
    pub length: Duration,
    /// How often the store was given up until a trial succeeded.
    pub given_up: u64,
    /// Requests by admission, in the order of [`GrantSource::ALL`].
    pub requests: [u64; GrantSource::ALL.len()],
    /// Leased and unused tokens and requests of the tenants' own limits.
    pub unspent: u64,
}

impl StoreStats {
    /// Number of calls with this result.
    #[must_use]
    pub fn calls(&self, ended: CallResult) -> u64 {
        self.calls[ended as usize]
    }

    /// Number of requests with this admission.
    #[must_use]
    pub fn requests(&self, by: GrantSource) -> u64 {
        self.requests[by as usize]
    }
}

/// The counters.
#[derive(Debug, Default)]
pub(super) struct StoreCounters {
    up: AtomicBool,
    calls: [AtomicU64; CallResult::ALL.len()],
    lengths: [AtomicU64; EDGES.len() + 1],
    nanos: AtomicU64,
    given_up: AtomicU64,
    requests: [AtomicU64; GrantSource::ALL.len()],
}

impl StoreCounters {
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    /// Sets whether the store is in use.
    pub fn turn(&self, up: bool) {
        let was_up = self.up.swap(up, Ordering::AcqRel);
        if was_up && !up {
            self.given_up.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn call(&self, ended: CallResult, length: Duration) {
        self.calls[ended as usize].fetch_add(1, Ordering::Relaxed);
        let bucket = EDGES.partition_point(|edge| *edge < length);
        self.lengths[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(length.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub fn request(&self, by: GrantSource) {
        self.requests[by as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self, unspent: u64) -> StoreStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StoreStats {
            up: self.is_up(),
            calls: self.calls.each_ref().map(read),
            lengths: self.lengths.each_ref().map(read),
            length: Duration::from_nanos(read(&self.nanos)),
            given_up: read(&self.given_up),
            requests: self.requests.each_ref().map(read),
            unspent,
        }
    }
}

//! What is counted about the store, for the metrics.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With what was asked for.
    Granted,
    /// Without: a limit is used up.
    Refused,
    /// Nobody asked for anything: leases were given back, counts were said again.
    Told,
    /// Not in time.
    Timeout,
    /// The connection broke.
    Broken,
    /// The server answered with an error.
    Error,
    /// With something that cannot be an answer, or that says that what is kept is not ours.
    Nonsense,
}

impl Ended {
    /// All of them: the label's closed set.
    pub const ALL: [Ended; 7] =
        [Ended::Granted, Ended::Refused, Ended::Told, Ended::Timeout, Ended::Broken, Ended::Error, Ended::Nonsense];

    /// The label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Ended::Granted => "granted",
            Ended::Refused => "refused",
            Ended::Told => "told",
            Ended::Timeout => "timeout",
            Ended::Broken => "broken",
            Ended::Error => "error",
            Ended::Nonsense => "nonsense",
        }
    }
}

/// Who let a request in, or did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// A lease that was here.
    Lease,
    /// The store, asked for it.
    Store,
    /// This gateway's share of the limit, because the store could not be asked.
    Share,
    /// Nobody: it was refused because the store could not be asked.
    Nobody,
}

impl By {
    /// All of them: the label's closed set.
    pub const ALL: [By; 4] = [By::Lease, By::Store, By::Share, By::Nobody];

    /// The label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            By::Lease => "lease",
            By::Store => "store",
            By::Share => "share",
            By::Nobody => "nobody",
        }
    }
}

/// Upper edges of the lengths of calls.
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

/// What was counted since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Whether the store is asked.
    pub up: bool,
    /// Calls, in the order of [`Ended::ALL`].
    pub calls: [u64; Ended::ALL.len()],
    /// Calls by their length, in the order of [`EDGES`], and longer ones.
    pub lengths: [u64; EDGES.len() + 1],
    /// All lengths together.
    pub length: Duration,
    /// How often the store was given up until a trial succeeded.
    pub given_up: u64,
    /// Requests, in the order of [`By::ALL`].
    pub requests: [u64; By::ALL.len()],
    /// Tokens and requests that are granted and held by no request, of the tenants' own limits.
    pub unspent: u64,
}

impl Numbers {
    /// Calls that ended so.
    #[must_use]
    pub fn calls(&self, ended: Ended) -> u64 {
        self.calls[ended as usize]
    }

    /// Requests that were let in so, or not.
    #[must_use]
    pub fn requests(&self, by: By) -> u64 {
        self.requests[by as usize]
    }
}

/// The counters behind them.
#[derive(Debug, Default)]
pub(super) struct Counters {
    up: AtomicBool,
    calls: [AtomicU64; Ended::ALL.len()],
    lengths: [AtomicU64; EDGES.len() + 1],
    nanos: AtomicU64,
    given_up: AtomicU64,
    requests: [AtomicU64; By::ALL.len()],
}

impl Counters {
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    /// Whether the store is asked from now on.
    pub fn turn(&self, up: bool) {
        let was_up = self.up.swap(up, Ordering::AcqRel);
        if was_up && !up {
            self.given_up.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn call(&self, ended: Ended, length: Duration) {
        self.calls[ended as usize].fetch_add(1, Ordering::Relaxed);
        let bucket = EDGES.partition_point(|edge| *edge < length);
        self.lengths[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(u64::try_from(length.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub fn request(&self, by: By) {
        self.requests[by as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self, unspent: u64) -> Numbers {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Numbers {
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

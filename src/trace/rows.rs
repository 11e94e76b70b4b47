//! The rows of a trace, as the reader of each format gives them.

use std::time::Duration;

use serde::Serialize;

use super::TraceRequest;
use super::error::TraceError;

/// What a reader passed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TraceNotes {
    /// Requests that failed in the original (BurstGPT: no response tokens) and are not replayed.
    pub failed: u64,
    /// Requests of a journal that no engine should see: refused as invalid, or to a path that generates nothing.
    pub not_generating: u64,
    /// Lines of a journal that are no JSON: what a crash leaves behind.
    pub unreadable: u64,
    /// Requests of a journal whose output is not known, because they were refused or failed; the mean of their class
    /// stands in.
    pub guessed_output: u64,
}

/// What one format's reader gives: a time on the trace's own clock in nanoseconds, and the request.
pub(super) type Row = (i128, TraceRequest);

/// A format's reader.
pub(super) trait Rows {
    /// The next request; `None` at the end.
    fn next_row(&mut self, notes: &mut TraceNotes) -> Result<Option<Row>, TraceError>;
}

/// A length that is not negative.
pub(super) fn nanos(length: i128) -> Duration {
    Duration::from_nanos(u64::try_from(length).unwrap_or(u64::MAX))
}

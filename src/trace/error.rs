//! Errors in a trace, with their position.

use std::time::Duration;

/// A trace that cannot be read on, with the line at which that was found.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {fault}")]
pub struct TraceError {
    /// Line, from 1.
    pub line: u64,
    /// The error.
    pub fault: TraceFault,
}

/// Error in a line.
#[derive(Debug, thiserror::Error)]
pub enum TraceFault {
    /// The file has no requests.
    #[error("the trace has no requests")]
    Empty,
    /// The line ends in the middle, at the end of the file.
    #[error("the last line is cut off: the file was cut or is still being written; remove the line")]
    CutOff,
    /// The line is longer than any line of a trace.
    #[error("the line is longer than {limit} bytes; is this a trace?")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// The line has another shape than the format says.
    #[error("{0}")]
    Malformed(String),
    /// A field is not there.
    #[error("there is no field {0:?}")]
    Missing(&'static str),
    /// A field that is not a number, or out of range.
    #[error("{field} is {value:?}; it must be {must}")]
    BadNumber {
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
        /// The expected form.
        must: &'static str,
    },
    /// A request that came before the one in front of it.
    #[error("this request came {by:?} before the one in the line above; sort the trace by time")]
    Unsorted {
        /// The difference.
        by: Duration,
    },
    /// A request of a journal that ended too long after others that came later.
    #[error(
        "this request came {by:?} before requests that were passed on already: it took longer than the reordering window of {window:?}"
    )]
    TooLate {
        /// The difference.
        by: Duration,
        /// The window.
        window: Duration,
    },
    /// An unsupported version of the journal.
    #[error("this journal is of version {found}; this program reads version {known}")]
    Version {
        /// The version of the journal.
        found: u64,
        /// The supported version.
        known: u64,
    },
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Io(#[from] std::io::Error),
}

//! What is wrong with a trace, and where.

use std::time::Duration;

/// A trace that cannot be read on, with the line at which that was found.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {fault}")]
pub struct TraceError {
    /// Line, from 1.
    pub line: u64,
    /// What is wrong there.
    pub fault: TraceFault,
}

/// What is wrong with a line.
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
    /// A field that is no number, or not one that the field can have.
    #[error("{field} is {value:?}; it must be {must}")]
    BadNumber {
        /// The field.
        field: &'static str,
        /// What stands there.
        value: String,
        /// What may stand there.
        must: &'static str,
    },
    /// A request that came before the one in front of it.
    #[error("this request came {by:?} before the one in the line above; sort the trace by time")]
    Unsorted {
        /// By so much.
        by: Duration,
    },
    /// A request of a journal that ended too long after others that came later.
    #[error(
        "this request came {by:?} before requests that were passed on already: it took longer than the reordering window of {window:?}"
    )]
    TooLate {
        /// By so much.
        by: Duration,
        /// The window.
        window: Duration,
    },
    /// A version of the journal that this program does not know.
    #[error("this journal is of version {found}; this program reads version {known}")]
    Version {
        /// What the journal says.
        found: u64,
        /// What is known.
        known: u64,
    },
    /// The file cannot be read.
    #[error("it cannot be read: {0}")]
    Io(#[from] std::io::Error),
}

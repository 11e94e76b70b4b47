//! Events of a run, and how far it is asked to stop.

use std::time::Duration;

use super::record::LoadRecord;

/// Events of a run.
#[derive(Debug)]
pub enum LoadEvent {
    /// A request goes out now.
    Sent {
        /// Its number, from 0, in the order of the schedule.
        number: u64,
        /// Its class.
        class: usize,
        /// Its scheduled time, from the start of the run.
        at: Duration,
    },
    /// An objective of a request that is still open is broken: it is a miss, whatever comes.
    Overdue {
        /// Its number.
        number: u64,
    },
    /// A request has ended and is judged.
    Ended(Box<LoadRecord>),
}

/// How far a run is asked to stop. Later ones include earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Halt {
    /// Not at all.
    #[default]
    Run,
    /// No further request is sent; open ones run to their end.
    StopSending,
    /// Open requests end as if a time limit had fired.
    TimeOut,
    /// Open requests are left at once.
    Abort,
}

//! Decides whether a request kept its class's promise.
//!
//! Pure: a timeline and the objectives go in, a verdict comes out. All objectives must hold
//! on the same request. How the connection ended is determined before, in
//! [`Ending`](crate::observe::Ending).
//!
//! [`judge`] judges a relayed response, [`judge_refused`] a request that the gateway rejected, and
//! [`judge_left`] one whose client left before a response. All three use [`Progress`]: how far a
//! request had come, and when an objective breaks. The rules in words are `docs/semantics.md`,
//! sections 2 and 4.

mod context;
mod evaluate;
mod fault;
mod objectives;
mod outcome;
mod progress;
mod progress_cell;
#[cfg(test)]
mod tests;

pub use context::JudgeContext;
pub use evaluate::{ObjectiveState, Verdict, judge, judge_left, judge_refused};
pub use fault::of_code;
pub use objectives::{Assumption, NonStreaming, Objective, Objectives, Quantiles, TtftCounts, UploadRule};
pub use outcome::{Excluded, Missed, Outcome};
pub use progress::{Progress, breaks_at, is_broken_at};
pub use progress_cell::ProgressCell;

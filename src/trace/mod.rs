//! Recorded traffic: when requests came, how long they were, and what their prompts had in common.
//!
//! [`TraceReader`] reads the gateway's own journal and four public formats, one request at a time, so that a file
//! of any size takes the same memory. [`Reshape`] cuts a part out of a trace and changes its rate without changing
//! how bursty it is. Pure: bytes come in through [`BufRead`](std::io::BufRead), and no file is opened here.
//!
//! Times are absolute and count from the first request of the trace. Content is never in a trace: prompts that
//! begin alike have [`PromptBlocks`] that begin alike, and any text will do for them.
//!
//! ```
//! use goodput::trace::{TraceFormat, TraceReader};
//!
//! let csv = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
//!            2023-11-16 18:15:46.6805900,374,44\n\
//!            2023-11-16 18:15:50.9951690,396,109\n";
//! let requests: Vec<_> = TraceReader::new(TraceFormat::Azure, csv.as_bytes()).map(Result::unwrap).collect();
//! assert_eq!((requests[0].input, requests[1].output), (374, 109));
//! assert_eq!(requests[1].at.as_nanos(), 4_314_579_000);
//! ```

mod blocks;
mod csv_rows;
mod error;
mod journal;
mod json_lines;
mod reader;
mod reshape;
mod rows;
#[cfg(test)]
mod tests;

pub use blocks::PromptBlocks;
pub use error::{TraceError, TraceFault};
pub use journal::journal_tenant;
pub use reader::{TraceFormat, TraceReader};
pub use reshape::{Reshape, ReshapeError, Reshaped};
pub use rows::TraceNotes;

use std::sync::Arc;
use std::time::Duration;

/// One request of a trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceRequest {
    /// Its line in the file, from 1.
    pub line: u64,
    /// When it came, from the first request of the trace.
    pub at: Duration,
    /// SLO class, if the trace has it.
    pub class: Option<Arc<str>>,
    /// Tenant, as a hash that means nothing outside the trace.
    pub tenant: Option<u64>,
    /// Conversation, if the trace has it.
    pub session: Option<u64>,
    /// Prompt tokens, at least 1.
    pub input: u64,
    /// Output tokens, at least 1.
    pub output: u64,
    /// Output cap that it stated.
    pub cap: Option<u64>,
    /// Whether it asked for a stream, where the trace knows it.
    pub stream: Option<bool>,
    /// What its prompt begins with.
    pub blocks: PromptBlocks,
}

//! Load on a service, open loop, and what it makes of it.
//!
//! [`run()`] sends [`PlannedRequest`]s at their scheduled times to a [`LoadTarget`] and gives one
//! [`LoadRecord`] for each, judged by [`crate::observe`] and [`crate::judge`] as the gateway judges. Every
//! clock starts at the scheduled time: no response can slow the schedule down, and a client that is
//! late makes the service look worse, never better. How late it was stands in the record.

pub mod arrivals;
mod connections;
mod exchange;
pub mod interval;
pub mod lengths;
pub mod measure;
pub mod monitor;
mod plan;
pub mod presets;
pub mod probe;
pub mod prompts;
pub mod quantiles;
mod record;
pub mod replay;
pub mod report;
pub mod result;
mod run;
mod run_events;
pub mod search;
pub mod steady;
pub mod summary;
pub mod sweep;
pub mod workload;

pub use plan::{LoadClass, LoadTarget, PlannedRequest};
pub use record::LoadRecord;
pub use run::{RunControl, RunEnd, RunLimits, run};
pub use run_events::LoadEvent;

//! Replay of a recorded trace: the requests that follow from it, the engines that are lost on the way, and what
//! became of it all. Pure.
//!
//! [`ReplayRequests`] makes requests of a trace for a service, [`ReplayScore`] counts records as they end, of a service
//! or of a simulated fleet, in memory that does not grow with them, and [`ReplayResult`] is what is written.

mod histogram;
mod losses;
mod requests;
mod result;
mod score;
#[cfg(test)]
mod tests;

pub use histogram::LatencyHistogram;
pub use losses::{EngineChange, EngineSet, LossSpan, duration, span_of};
pub use requests::ReplayRequests;
pub use result::{FleetPoolSummary, REPLAY_FORMAT, ReplayResult, ReplayTarget, ReplayTraceSummary};
pub use score::{ClassReplay, PhaseScore, Recovery, ReplayClass, ReplayScore};

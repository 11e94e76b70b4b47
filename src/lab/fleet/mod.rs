//! A fleet of simulated engines in virtual time, with and without the gateway's scheduling.
//!
//! Nothing here waits, opens a socket or reads a clock: moments are numbers, and thousands of
//! engine-seconds pass in seconds. [`Mix`] is what arrives, [`Policy`] who decides, and
//! [`run()`] what comes of it. The parts are the real ones: the engines' core, the pool's
//! [`Scheduler`](crate::admit::queue::Scheduler), the choice of engines by
//! [`Fleet`](crate::route::Fleet), the tenants' [`Ledger`](crate::admit::limit::Ledger) and
//! [`judge`](crate::judge) for every request. What is left out: the network (no time passes on
//! it), failures, and retries. What came of it is told in `docs/scheduling.md`.

mod brownout;
mod mix;
mod policy;
mod run;
mod score;
#[cfg(test)]
mod tests;

pub use mix::{Arrival, Class, Flow, Likeness, Machine, Mix, Shown, StepTime};
pub use policy::{Policy, Scheduled};
pub use run::{Span, capacity, run, run_patiently};
pub use score::{Engines, Look, Report, Score};

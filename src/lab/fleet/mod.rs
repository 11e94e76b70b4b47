//! A fleet of simulated engines in virtual time, with and without the gateway's scheduling.
//!
//! Nothing here waits, opens a socket or reads a clock: moments are numbers, and thousands of
//! engine-seconds pass in seconds. [`Mix`] is what arrives, [`Policy`] who decides, and
//! [`run()`] what comes of it. The parts are the real ones: the engines' core, the pool's
//! [`Scheduler`](crate::admit::queue::Scheduler), the choice of engines by
//! [`Fleet`](crate::route::Fleet), the tenants' [`Ledger`](crate::admit::limit::Ledger) and
//! [`judge`](crate::judge) for every request. What is left out: the network (no time passes on
//! it). What came of it is told in `docs/scheduling.md`.
//!
//! There are two worlds: [`Mix::published`], whose engines resemble one small model on one GPU,
//! and [`Mix::office`] and [`Mix::mono`], of other engines and another traffic; [`Mix::drawn`]
//! makes up any number of others. A [`Peer`] is what people run in place of the gateway, and a
//! [`Scenario`] what befalls all of them: engines that restart or become slow, gateways that
//! restart or share the engines, tenants that flood.

mod brownout;
mod mix;
mod peers;
mod policy;
mod run;
mod score;
#[cfg(test)]
mod tests;

pub use mix::{Arrival, Class, Flood, Flow, Likeness, Machine, Mix, RecordedClass, Shown, StepTime};
pub use peers::{Peer, Pick, grade};
pub use policy::{Policy, Scheduled};
pub use run::{Befalls, ReplayEnd, Scenario, Span, capacity, replay, run, run_in};
pub use score::{Engines, Look, Report, Score, Told};

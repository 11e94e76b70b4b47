//! Discrete-event simulation of a fleet, with and without the gateway's scheduling.
//!
//! No waiting, sockets or clock: moments are numbers, and thousands of engine-seconds pass in seconds.
//! [`Mix`] is the workload, [`Policy`] decides, and [`run()`] returns the result. The parts are the real
//! ones: the engines' core, the pool's [`Scheduler`](crate::admit::queue::Scheduler), the choice of engines
//! by [`Fleet`](crate::route::Fleet), the tenants' [`LocalLimiter`](crate::admit::limit::LocalLimiter) and
//! [`judge`](crate::judge) for every request. The network is left out (it takes no time). Results are in
//! `docs/scheduling.md`.
//!
//! Two worlds: [`Mix::published`], whose engines resemble a small model on one GPU, and [`Mix::office`] and
//! [`Mix::mono`], with other engines and traffic; [`Mix::drawn`] generates any number of others. A [`Peer`]
//! is an alternative to the gateway, and a [`Scenario`] applies to all of them: engines that restart or slow
//! down, gateways that restart or share the engines, tenants that
//! flood.

mod calibrate;
mod effects;
mod gateway_pools;
mod mix;
mod overload;
mod peers;
mod policy;
mod pool_scheduler;
mod report;
mod routed_request;
mod scheduling;
mod simulation;
#[cfg(test)]
mod tests;

pub use calibrate::{CannotFit, EngineFit, FittedPercentile, MeasuredRequest, MeasuredRun, RunFit, fit_engine};
pub use mix::{Arrival, Flood, Machine, Mix, MixClass, MixFlow, PromptLength, RecordedClass, SharedPrefix, StepTimes};
pub use peers::{Peer, PickRule, grade};
pub use policy::Policy;
pub use report::{EngineTotals, FlowScore, RequestReport, RunReport, StateSample};
pub use scheduling::{ClassPools, FurtherPool, GatewayScheduling};
pub use simulation::{GatewayLink, Incident, ReplayEnd, RunSpan, Scenario, capacity, replay, run, run_in};

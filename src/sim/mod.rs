//! Simulation and load tools.
//!
//! - [`engine`]: a simulated engine with vLLM's HTTP API over a scheduler that counts tokens.
//! - [`traffic`]: an open-loop client that judges responses as the gateway does.
//! - [`demo`]: both, with gateway settings and a view.
//! - [`fleet`]: discrete-event simulation of many engines and their load, to measure scheduling.

pub mod demo;
pub mod engine;
pub mod fleet;
pub mod traffic;

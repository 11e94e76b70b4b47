//! Tools that make load and stand in for engines.
//!
//! - [`script`]: an engine that plays a written part and notes all it receives; for tests.

pub mod demo;
pub mod engine;
pub mod script;
pub mod traffic;

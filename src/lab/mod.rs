//! Tools that make load and stand in for engines.
//!
//! - [`engine`]: a simulated engine with vLLM's HTTP face over a scheduler that counts tokens.
//! - [`traffic`]: clients that ask by a plan, and judge what they get as the gateway does.
//! - [`demo`]: both together, with the settings of a gateway between them and a view.
//! - [`fleet`]: many engines and their load in virtual time, to see what scheduling is worth.
//! - [`script`]: an engine that plays a written part and notes all it receives; for tests.

pub mod demo;
pub mod engine;
pub mod fleet;
pub mod script;
pub mod traffic;

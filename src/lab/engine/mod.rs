//! A simulated engine.
pub mod core;
mod prefix;

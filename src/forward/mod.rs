//! One attempt at one engine: head held until the first token, relay, cancel.

pub mod lines;
pub mod settings;

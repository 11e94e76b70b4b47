//! One attempt at one engine: head held until the first token, relay, cancel.

pub mod settings;

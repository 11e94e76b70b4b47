//! Which pools, which engine, given health, load and affinity.

pub mod settings;

//! The commands.

pub mod health;

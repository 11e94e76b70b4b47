//! One reading of a request body.
//!
//! [`Scanner`] is an iterative push scanner: it eats the body frame by frame as it arrives,
//! never builds a tree, never recurses, and keeps the byte ranges of the few fields on which
//! the gateway decides. The result is [`Facts`]; everything else in the body is checked for
//! grammar (RFC 8259) and forwarded untouched. There is one reading of a body for all sizes,
//! so that no two rooms can understand one body in two ways.

mod blocks;
pub mod coding;
mod facts;
mod fields;
mod kept;
pub mod multipart;
mod prefix;
mod ratios;
mod scanner;

pub use facts::{Caps, Facts, Field, PromptSize, Reasoning, StreamOptions, SwitchGroup, Switches, Unreadable};
pub use prefix::PromptHashes;
pub use ratios::{Learned, ModelRatios, Ratios};
pub use scanner::Scanner;

#[cfg(test)]
pub(crate) mod tests;

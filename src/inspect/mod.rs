//! Reads a request body once.
//!
//! [`Scanner`] is an iterative push scanner: it consumes the body frame by frame as it arrives,
//! builds no tree, does not recurse, and keeps the byte ranges of the few fields on which
//! the gateway decides. The result is [`Facts`]; everything else is checked for
//! grammar (RFC 8259) and forwarded untouched. Bodies of all sizes are read by the same code,
//! so that no two modules can understand one body differently.

mod blocks;
mod bounded_value;
pub mod decode;
mod facts;
mod fields;
pub mod multipart;
mod prefix;
mod scanner;
mod token_ratios;

pub use blocks::BlockKey;
pub use facts::{Caps, Facts, Field, PromptSize, Reasoning, StreamOptions, SwitchGroup, Switches, Unreadable};
pub use prefix::PromptHashes;
pub use scanner::Scanner;
pub use token_ratios::{Learned, ModelRatios, Ratios};

#[cfg(test)]
pub(crate) mod tests;

//! Byte splices into request bodies, and removal of injected events from responses.

mod edits;
mod gate;
mod moved;
mod splice;
mod usage;

pub use edits::{EditPlan, Edits, ReasoningEdit, edits};
pub use gate::EventGate;
pub use splice::{Splice, apply, length_after};

//! Decides whether a request kept its class's promise.
//!
//! Pure: a timeline and the objectives go in, a verdict comes out. All objectives must hold
//! on the same request. What happened to the connection is settled before, in
//! [`Ending`](crate::observe::Ending); this room only weighs it.

mod outcome;

pub use outcome::{Excluded, Missed, Outcome};

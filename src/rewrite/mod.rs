//! Byte splices into request bodies, removal of injected events from answers.

mod gate;

pub use gate::EventGate;

//! Byte splices into request bodies, removal of injected events from answers.

//! The crate's lock types: `parking_lot`'s.
//!
//! In unit tests a lock created inside `shuttle_locks::tried` is one of `shuttle`'s instead, which chooses the
//! next task at every lock operation. Tests can thus try many interleavings of the shipped code rather
//! than those that a machine happens to produce. In every other build these names are
//! `parking_lot`'s types.

#[cfg(not(test))]
pub use parking_lot::{Mutex, RwLock};

#[cfg(test)]
pub use shuttle_locks::{Mutex, RwLock};

#[cfg(test)]
pub mod shuttle_locks;

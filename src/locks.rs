//! The locks around which threads meet: `parking_lot`'s, under names of our own.
//!
//! In the crate's own unit tests a lock that is made inside `woven::tried` is one of `shuttle`'s
//! instead, which decides at each of them who goes on. So a test can try many orders of steps,
//! rather than those that a machine happens to take, on the very code that is shipped; everywhere
//! else, and in every other build, these names are `parking_lot`'s types and nothing besides.

#[cfg(not(test))]
pub use parking_lot::{Mutex, RwLock};

#[cfg(test)]
pub use woven::{Mutex, RwLock};

#[cfg(test)]
pub mod woven;

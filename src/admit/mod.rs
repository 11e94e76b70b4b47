//! Who may enter now.
//!
//! [`limit`] keeps the books of the tenants' limits, [`queue`] decides who runs, waits and is
//! turned away in front of one pool, [`desk`] is where requests wait for it.

pub mod desk;
pub mod levels;
pub mod limit;
pub mod queue;
pub mod shared;

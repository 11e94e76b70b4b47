//! Admission control.
//!
//! [`limit`] has the tenants' limits, [`shared`] the same limits shared by several gateways, and [`Books`]
//! is either; [`queue`] decides which requests of a pool run, wait or are rejected, and [`desk`] is its
//! async face; [`spill`] decides when a waiting request goes on to the next pool of its route; [`levels`]
//! decides a class's overload level, and [`overload`] its effect on a
//! request.

mod books;
pub mod desk;
pub mod levels;
pub mod limit;
pub mod overload;
pub mod queue;
pub mod shared;
pub mod spill;

pub use books::{Books, Reservation};

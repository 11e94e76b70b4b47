//! Who may enter now.
//!
//! [`limit`] keeps the books of the tenants' limits, [`shared`] does where several gateways have
//! the same ones, and [`Books`] is either; [`queue`] decides who runs, waits and is
//! turned away in front of one pool, [`desk`] is where requests wait for it; [`spill`] decides when a
//! request that waits goes on to the next pool of its route; [`levels`] decides how far a class is
//! degraded under load, and [`overload`] what that does to a request.

mod books;
pub mod desk;
pub mod levels;
pub mod limit;
pub mod overload;
pub mod queue;
pub mod shared;
pub mod spill;

pub use books::{Books, Reservation};

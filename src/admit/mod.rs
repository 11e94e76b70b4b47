//! Admission control.
//!
//! [`limit`] has the tenants' limits, [`redis`] the same limits shared by several gateways, and [`RateLimiter`]
//! is either; [`queue`] decides which requests of a pool run, wait or are rejected, and [`pool_queue`] is its
//! async face; [`spill`] decides when a waiting request goes on to the next pool of its route; [`overload_control`]
//! decides a class's overload level, and [`overload`] its effect on a
//! request.

pub mod limit;
pub mod overload;
pub mod overload_control;
pub mod pool_queue;
pub mod queue;
mod rate_limiter;
pub mod redis;
pub mod spill;

pub use rate_limiter::{RateLimiter, Reservation};

//! Who may enter now. Unlimited seats for the time being: `admitted` = `body_complete`.
//!
//! [`limit`] keeps the books of the tenants' limits, [`queue`] decides who runs, waits and is
//! turned away in front of one pool. The desk that will ask both is not there yet: no request
//! is refused, charged or made to wait by them so far.

pub mod limit;
pub mod queue;
pub mod shared;

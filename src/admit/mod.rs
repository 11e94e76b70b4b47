//! Who may enter now. Unlimited seats for the time being: `admitted` = `body_complete`.
//!
//! [`limit`] keeps the books of the tenants' limits. The desk that will ask it, and the queue
//! beside it, are not there yet: no request is refused or charged by it so far.

pub mod limit;

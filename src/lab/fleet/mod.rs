//! A fleet of simulated engines in virtual time, with and without the gateway's scheduling.
//!
//! Nothing here waits, opens a socket or reads a clock: moments are numbers, and thousands of
//! engine-seconds pass in seconds. [`Mix`] is what arrives.

mod mix;

pub use mix::{Arrival, Class, Flow, Machine, Mix};

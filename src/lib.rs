//! Inline SLO-aware gateway for LLM inference engines.
//!
//! The order of the rooms is the order of the work:
//! accept -> identify -> inspect -> classify -> admit -> route -> forward -> observe ->
//! judge -> record. `gateway` tells the life of one request.

pub mod accept;
pub mod admin;
pub mod admit;
pub mod classify;
pub mod cli;
pub mod clock;
pub mod config;
pub mod dial;
pub mod forward;
pub mod gateway;
pub mod identify;
pub mod inspect;
pub mod json;
pub mod judge;
pub mod lab;
pub mod observe;
pub mod record;
pub mod refuse;
pub mod rewrite;
pub mod route;
pub mod units;

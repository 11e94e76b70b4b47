//! Tests over several rooms, in one binary.

mod clocks;
mod framing;
mod support;
mod wire;
mod wire_http;

//! Tests over several rooms, in one binary.

mod clocks;
mod framing;
mod http;
mod leaving;
mod made;
mod retries;
mod support;
mod wire;
mod wire_http;

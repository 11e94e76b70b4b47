//! Tests over several rooms, in one binary.

mod wire;
mod wire_http;

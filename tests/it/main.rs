//! Tests over several rooms, in one binary.

mod admission;
mod affinity;
mod ahead;
mod charging;
mod choosing;
mod clocks;
mod degradation;
mod engine_priority;
mod faces;
mod framing;
mod http;
mod leaving;
mod levers;
mod made;
mod operations;
mod retries;
mod seats;
mod shared_store;
mod support;
mod wire;
mod wire_gateway;
mod wire_http;

//! Tests over several rooms, in one binary.

mod admission;
mod affinity;
mod auto_concurrency;
mod charging;
mod client_responses;
mod degradation;
mod disconnects_and_timeouts;
mod early_heads;
mod engine_priority;
mod engine_selection;
mod engines;
mod framing;
mod http;
mod in_use;
mod operations;
mod overload_benefit;
mod retries;
mod shared_store;
mod slo_timing;
mod support;
mod synthetic_wires;
mod traces;
mod wire;
mod wire_gateway;
mod wire_http;

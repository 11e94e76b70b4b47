//! What is known of the engines, as gauges.

/// The last report on one engine. What an engine does not tell is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineReport {
    /// It takes requests: healthy, breaker closed, not drained, not asleep.
    pub up: bool,
    /// An operator has drained it.
    pub drained: bool,
    /// Requests that wait inside the engine.
    pub waiting: Option<f64>,
    /// Requests that the engine computes.
    pub running: Option<f64>,
    /// Share of its KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Of our requests it should have so many at one time at most.
    pub seats: Option<f64>,
    /// How far predictions of the time to the first token were off, as a share of what was seen.
    pub ttft_error: Option<f64>,
    /// The same for the time per output token.
    pub tpot_error: Option<f64>,
}

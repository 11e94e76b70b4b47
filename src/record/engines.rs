//! Gauges of engines.

/// The last report on one engine. Values that the engine does not report are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineReport {
    /// Whether it is available: healthy, breaker closed, not draining, not asleep.
    pub up: bool,
    /// Whether an operator has drained it.
    pub drained: bool,
    /// Requests waiting in the engine.
    pub waiting: Option<f64>,
    /// Requests running in the engine.
    pub running: Option<f64>,
    /// Requests of other gateways at it, if any tells of them.
    pub elsewhere: Option<f64>,
    /// Used share of its KV cache, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Largest number of concurrent requests that the gateway sends it.
    pub seats: Option<f64>,
    /// Error of TTFT predictions, as a share of the measured value.
    pub ttft_error: Option<f64>,
    /// Relative error of TPOT predictions.
    pub tpot_error: Option<f64>,
}

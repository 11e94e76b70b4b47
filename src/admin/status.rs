//! The status of a gateway, as in `GET /status`: data of the status page and of `goodput top`.
//!
//! Names, times and counts; no content and no keys. `docs/status-page.md` lists the fields.

use serde::{Deserialize, Serialize};

use super::ClassStanding;

/// Everything at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GatewayStatus {
    /// The version of the program.
    pub version: String,
    /// This moment, as Unix time.
    pub unix_seconds: f64,
    /// How long the process has run.
    pub uptime_seconds: u64,
    /// Whether new clients may be sent here.
    pub ready: bool,
    /// When settings were loaded last, as Unix time.
    pub settings_loaded_unix_seconds: f64,
    /// Whether the last attempt to load settings failed, so that older ones are in force.
    pub settings_failed: bool,
    /// Span of the classes' histories: `hour`, `day` or `window`.
    pub history_span: String,
    /// Source of budgets and burn rates, if they may cover all gateways.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budgets_note: Option<String>,
    /// Every class, in the order of the settings.
    pub classes: Vec<ClassStatus>,
    /// Every pool, by name.
    pub pools: Vec<PoolStatus>,
    /// The tenants nearest to a limit, then those with the most requests.
    pub tenants: Vec<TenantStatus>,
    /// Number of tenants left out.
    pub tenants_left_out: u64,
    /// The last misses of each class and reason, the newest first.
    pub misses: Vec<MissStatus>,
}

/// One class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClassStatus {
    /// Its SLO status, as in `GET /slo`.
    #[serde(flatten)]
    pub standing: ClassStanding,
    /// Its priority in queues.
    pub priority: String,
    /// The thresholds of its objectives in seconds: `ttft`, `tpot`, `itl`, `e2e`, as far as it has them.
    pub objectives: Vec<ObjectiveStatus>,
    /// Why requests missed in the last hour, the most frequent reason first.
    pub missed_last_hour: Vec<ReasonCount>,
    /// Length of the span of `history`.
    pub history_seconds: u64,
    /// How it fared over that span, the last point being this moment.
    pub history: Vec<HistoryStatus>,
}

/// One objective of a class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ObjectiveStatus {
    /// `ttft`, `tpot`, `itl` or `e2e`.
    pub objective: String,
    /// The threshold.
    pub threshold_seconds: f64,
}

/// How often something happened for one reason.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReasonCount {
    /// The reason.
    pub reason: String,
    /// How often.
    pub count: u64,
}

/// Counts since the previous point, and the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryStatus {
    /// The moment, as Unix time.
    pub unix_seconds: f64,
    /// Requests met since the point before.
    pub met: u64,
    /// Requests judged since the point before.
    pub judged: u64,
    /// Remaining share of the budget; absent before the first judged request.
    pub budget_remaining: Option<f64>,
}

/// One pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Its name.
    pub pool: String,
    /// Seats of its engines; absent without a limit.
    pub seats: Option<u64>,
    /// Seats in use.
    pub taken: u64,
    /// Requests that wait for a seat.
    pub waiting: u64,
    /// Requests that wait for one at other gateways; absent without reports.
    pub waiting_elsewhere: Option<u64>,
    /// Its engines, by name, including those removed in the last ten minutes.
    pub engines: Vec<EngineStatus>,
}

/// One engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// Its name.
    pub engine: String,
    /// `up`, `cooling`, `breaker_open`, `down`, `asleep` or `left`.
    pub state: String,
    /// Whether an operator has drained it.
    pub drained: bool,
    /// Remaining time of a drain; absent without a limit or without a drain.
    pub drained_for_seconds: Option<u64>,
    /// Requests of this gateway that it has.
    pub in_flight: u64,
    /// Requests of other gateways at it, by their reports; absent without any.
    pub elsewhere: Option<u64>,
    /// Its concurrency limit; absent without one.
    pub seats: Option<u64>,
    /// Requests in its batch, as it reports.
    pub running: Option<f64>,
    /// Requests in its queue, as it reports.
    pub waiting: Option<f64>,
    /// The share of its KV cache in use, as it reports.
    pub kv_usage: Option<f64>,
    /// Results of its judged requests over the last hour.
    pub last_hour: EngineHourStatus,
}

/// Results of an engine's judged requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineHourStatus {
    /// Requests met.
    pub met: u64,
    /// Requests judged.
    pub judged: u64,
    /// The median TTFT of its streams.
    pub ttft_p50_seconds: Option<f64>,
    /// The 95th percentile.
    pub ttft_p95_seconds: Option<f64>,
    /// The median TPOT of its streams.
    pub tpot_p50_seconds: Option<f64>,
    /// The 95th percentile.
    pub tpot_p95_seconds: Option<f64>,
}

/// One tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// Its name.
    pub tenant: String,
    /// Its requests that run.
    pub running: u64,
    /// Requests met since the process started; absent for tenants without series of their own.
    pub met: Option<u64>,
    /// Requests judged since then.
    pub judged: Option<u64>,
    /// Status of its limits, as far as known.
    pub limits: Vec<LimitUse>,
}

/// Status of a limit of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LimitUse {
    /// Its name in the settings: `tokens_per_minute`, ...
    pub limit: String,
    /// The model whose requests it counts; absent if it counts all requests of the tenant.
    pub model: Option<String>,
    /// The burst, or the most concurrent requests.
    pub most: u64,
    /// The remainder.
    pub remaining: u64,
}

impl LimitUse {
    /// The share that is used, 0 to 1.
    #[must_use]
    pub fn used_share(&self) -> f64 {
        let used = self.most.saturating_sub(self.remaining);
        if self.most == 0 { 0.0 } else { used as f64 / self.most as f64 }
    }
}

/// One request that missed. Moments are in milliseconds from its arrival.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MissStatus {
    /// Its end, as Unix time.
    pub unix_seconds: f64,
    /// The id that correlates it with the access line.
    pub request_id: String,
    /// The class in whose books it went.
    pub class: String,
    /// Why it missed.
    pub reason: String,
    /// Objectives that were broken.
    pub broken: Vec<String>,
    /// The tenant.
    pub tenant: Option<String>,
    /// The model as the routes name it.
    pub model: Option<String>,
    /// The pool of the last attempt, else the first of the route.
    pub pool: Option<String>,
    /// The engine of the last attempt.
    pub engine: Option<String>,
    /// The status that the client received.
    pub status: u16,
    /// The code of the gateway's own error.
    pub code: Option<String>,
    /// Overload levels in force for it.
    pub level: u64,
    /// The prompt estimate, in tokens.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub output_tokens: Option<u64>,
    /// The last byte of the body was read.
    pub body_complete_ms: Option<f64>,
    /// How long the client had sent nothing of it.
    pub client_wait_ms: Option<f64>,
    /// The request left the queue.
    pub admitted_ms: Option<f64>,
    /// The engines that were asked, in order.
    pub attempts: Vec<AttemptStatus>,
    /// The first token.
    pub first_token_ms: Option<f64>,
    /// The last token.
    pub last_token_ms: Option<f64>,
    /// The end.
    pub end_ms: f64,
}

/// One attempt of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AttemptStatus {
    /// The pool.
    pub pool: String,
    /// The engine.
    pub engine: String,
    /// When the engine was picked, in milliseconds from the request's arrival.
    pub begin_ms: f64,
    /// Time of its failure; absent for the attempt whose response was relayed, and for one cut by the
    /// request's end.
    pub failed_ms: Option<f64>,
    /// How it failed, by the reasons of `goodput_retries_total`.
    pub failure: Option<String>,
}

//! The status of a gateway, as `GET /status` writes it: what the status page shows and `goodput top` reads.
//!
//! Names, moments and counts; no content and no keys. `docs/status-page.md` lists the fields.

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
    /// Which span of time the histories of classes tell of: `hour`, `day` or `window`.
    pub history_span: String,
    /// What budgets and burn rates are, where they may be those of all gateways.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budgets_note: Option<String>,
    /// Every class, in the order of the settings.
    pub classes: Vec<ClassStatus>,
    /// Every pool, by name.
    pub pools: Vec<PoolStatus>,
    /// The tenants that use most of a limit, then those that ask most.
    pub tenants: Vec<TenantStatus>,
    /// Tenants that are left out because there are so many.
    pub tenants_left_out: u64,
    /// The last misses of each class and reason, the newest first.
    pub misses: Vec<MissStatus>,
}

/// One class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClassStatus {
    /// How it stands against its promise, as in `GET /slo`.
    #[serde(flatten)]
    pub standing: ClassStanding,
    /// Its rank where requests wait.
    pub priority: String,
    /// The thresholds of its objectives in seconds: `ttft`, `tpot`, `itl`, `e2e`, those that it has.
    pub objectives: Vec<ObjectiveStatus>,
    /// Why requests missed in the last hour, the most frequent reason first.
    pub missed_last_hour: Vec<ReasonCount>,
    /// The length of the span that `history` tells of.
    pub history_seconds: u64,
    /// How it fared over that span, the last point being this moment.
    pub history: Vec<HistoryStatus>,
}

/// One objective of a class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ObjectiveStatus {
    /// `ttft`, `tpot`, `itl` or `e2e`.
    pub objective: String,
    /// What must not be exceeded.
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

/// What was counted since the point before, and how the budget stood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HistoryStatus {
    /// The moment, as Unix time.
    pub unix_seconds: f64,
    /// Requests met since the point before.
    pub met: u64,
    /// Requests judged since the point before.
    pub judged: u64,
    /// The share of the budget that was left; absent where nothing had been judged.
    pub budget_remaining: Option<f64>,
}

/// One pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Its name.
    pub pool: String,
    /// Requests that may run on its engines at the same time; absent where there is no limit.
    pub seats: Option<u64>,
    /// Seats taken.
    pub taken: u64,
    /// Requests that wait for a seat.
    pub waiting: u64,
    /// Its engines, by name, those that left in the last ten minutes included.
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
    /// For how long still; absent where that has no end, and where nobody has.
    pub drained_for_seconds: Option<u64>,
    /// Requests of this gateway that it has.
    pub in_flight: u64,
    /// How many it should have at most; absent where there is no limit.
    pub seats: Option<u64>,
    /// Requests in its batch, as it reports.
    pub running: Option<f64>,
    /// Requests in its queue, as it reports.
    pub waiting: Option<f64>,
    /// The share of its KV cache in use, as it reports.
    pub kv_usage: Option<f64>,
    /// What its judged requests came to over the last hour.
    pub last_hour: EngineHourStatus,
}

/// What the judged requests of an engine came to.
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
    /// Requests judged since then, likewise.
    pub judged: Option<u64>,
    /// Its limits, as far as it is known how they stand.
    pub limits: Vec<LimitUse>,
}

/// How a limit of a tenant stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LimitUse {
    /// Its name in the settings: `tokens_per_minute`, ...
    pub limit: String,
    /// The model whose requests alone it counts; absent where it counts all of the tenant's.
    pub model: Option<String>,
    /// The most that can be taken at once: the burst, or the requests at the same time.
    pub most: u64,
    /// What is left of that.
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
    /// Who asked.
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
    /// When it failed; absent of the one whose response was relayed, and of one that the request's end cut.
    pub failed_ms: Option<f64>,
    /// How it failed, by the reasons of `goodput_retries_total`.
    pub failure: Option<String>,
}

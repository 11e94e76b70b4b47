//! Routing: pools for a request, the choice of an engine, and what follows a failed attempt.
//!
//! [`Routes`] gives the pools for a model and a class, in order. [`Fleet`] knows every engine's health,
//! breaker, cool-down and load, and picks one. [`retry`] has the rules of retries. All of these are pure:
//! moments, random numbers and observations of engines are arguments. [`probe`] is the shell that makes
//! the observations: health checks, the engines' metrics,
//! DNS.

mod affinity;
mod breaker;
mod concurrency;
mod engine;
pub mod engine_metrics;
mod fleet;
mod health;
mod latency;
mod model_card;
mod model_listing;
mod other_gateways;
mod pick_request;
mod pool;
mod prefix;
pub mod probe;
pub mod retry;
mod retry_budget;
mod routes;
pub mod settings;
mod signals;
mod status;
mod tournament;

pub use affinity::key_of;
pub use breaker::{Breaker, RecentSuccesses, TenantKey};
pub use concurrency::PoolTargets;
pub use engine::EngineMetrics;
pub use fleet::{Fleet, PickedEngine, WorkGuard};
pub use health::{Health, HealthChange, ProbeResult};
pub use latency::{
    DecodeSteps, ENOUGH, Latency, LatencySample, LoadSnapshot, Prediction, PredictionErrors, SloTargets, StepTime,
};
pub use model_card::ModelCard;
pub use model_listing::EngineList;
pub use other_gateways::{ComputedPrompt, EngineShare, SeenAnswer};
pub use pick_request::{PickRequest, WorkEstimate};
pub use pool::{Pool, REMEMBERED};
pub use prefix::{MOST_ENTRIES, PrefixIndex, USUAL_ROOM};
pub use retry_budget::RetryBudget;
pub use routes::{AvailableModel, RouteMatch, Routes, UnlistedModel};
pub use signals::{DepartureWatch, EngineSignals};
pub use status::{DrainError, EngineState, EngineView, PoolView};

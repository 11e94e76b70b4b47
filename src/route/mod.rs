//! Routing: pools for a request, the choice of an engine, and what follows a failed attempt.
//!
//! [`Routes`] gives the pools for a model and a class, in order. [`Fleet`] knows every engine's health,
//! breaker, cool-down and load, and picks one. [`retry`] has the rules of retries. All of these are pure:
//! moments, random numbers and observations of engines are arguments. [`probe`] is the shell that makes
//! the observations: health checks, the engines' metrics,
//! DNS.

mod affinity;
mod breaker;
mod budget;
mod card;
mod engine;
mod fleet;
mod health;
mod latency;
mod listed;
mod prefix;
pub mod probe;
pub mod retry;
mod routes;
pub mod scrape;
mod seats;
pub mod settings;
mod signals;
mod tournament;
mod view;
mod yard;

pub use affinity::key_of;
pub use breaker::{Answered, Breaker, TenantKey};
pub use budget::Budget;
pub use card::ModelCard;
pub use engine::Report;
pub use fleet::{Choice, Fleet, REMEMBERED, Size, Want, Work};
pub use health::{Change, Checked, Health};
pub use latency::{Aims, ENOUGH, Errors, Latency, Lesson, Prediction, Situation, StepTime, Steps};
pub use listed::EngineList;
pub use prefix::{MOST_ENTRIES, PrefixIndex, USUAL_ROOM};
pub use routes::{Model, Routed, Routes, Unlisted};
pub use seats::Promised;
pub use signals::{DepartureWatch, Signals};
pub use view::{DrainError, EngineState, EngineView, PoolView};
pub use yard::Yard;

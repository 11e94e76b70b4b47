//! Capacity maths: how many replicas a forecast needs, what they cost, and how sure that is.
//!
//! Pure: numbers go in, numbers come out. The unit of capacity is *goodput*: the highest rate of one replica at
//! which the joint SLO attainment is still at or above its target, as a sweep measures it. Formulas are a sanity
//! bound around that measurement and never replace it; each of them names its source.
//!
//! - [`plan()`] puts all of it together: [`CapacityInputs`] to [`CapacityPlan`].
//! - [`queueing`]: waits in front of the prefill stage and of the decode slots.
//! - [`kv`]: memory of the key-value cache, from a model's `config.json`.
//! - [`fleet`]: Little's law, replicas for the peak, headroom, redundancy.
//! - [`cost`]: money per compliant request and per million tokens.
//! - [`pooling`]: separate pools against one that is shared by priority.
//! - [`sensitivity`]: what else could happen, and what it would take.
//! - [`baseline`]: the conditions that ask for a new sweep, as alerts.
//!
//! ```
//! use goodput::capacity::{CapacityInputs, ClassForecast, plan};
//!
//! let chat = ClassForecast {
//!     peak_rate: 30.0,
//!     input_tokens: 1200.0,
//!     output_tokens: 400.0,
//!     ttft: 0.5,
//!     tpot: 0.035,
//!     goodput: 8.0,
//!     target: 0.92,
//!     ..ClassForecast::named("chat")
//! };
//! let plan = plan(&CapacityInputs { headroom: 0.7, spare: 1, ..CapacityInputs::of(vec![chat]) }).unwrap();
//! let chat = &plan.classes[0];
//! assert_eq!((chat.concurrency.round(), chat.live_kv_tokens.round()), (435.0, 609_000.0));
//! assert_eq!((chat.size.for_peak, chat.size.total), (6, 7));
//! ```

pub mod baseline;
pub mod cost;
pub mod fleet;
mod inputs;
pub mod kv;
mod plan;
pub mod pooling;
pub mod queueing;
pub mod sensitivity;

pub use inputs::{
    CapacityInputs, ClassForecast, GpuPrice, InputProblem, KvRoom, PrefillFacts, PrefixCacheFacts, ReplicaFacts,
};
pub use plan::{CapacityPlan, ClassPlan, FleetVerdict, KvPlan, PrefillPlan, PrefillQueue, SlotPlan, plan};

//! Separate pools against one pool that classes share by priority.

use serde::Serialize;

use super::fleet::{FleetSize, e2e};
use super::inputs::{CapacityInputs, ClassForecast};
use super::queueing::SlotPool;

/// One pool for all classes, against one for each.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolingPlan {
    /// Replicas of all separate pools, each with its own spares.
    pub separate: u32,
    /// The shared pool.
    pub shared: FleetSize,
    /// Replicas that sharing saves.
    pub saves: u32,
    /// Slots of the shared pool.
    pub slots: u32,
    /// Mean wait for a slot by class, the first in priority first.
    pub waits: Vec<PooledWait>,
}

/// Mean waits of a class for a slot, in seconds; absent if the queue grows without bound.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PooledWait {
    /// The class.
    pub class: String,
    /// In a pool of its own, with its spares.
    pub separate: Option<f64>,
    /// In the shared pool, with its spares.
    pub shared: Option<f64>,
    /// In the shared pool after the loss of one replica.
    pub shared_after_loss: Option<f64>,
}

/// Requests that a replica runs at its knee, with the classes in these proportions.
///
/// At the knee of a mix the shares `rate / goodput` of its classes add up to 1. This assumes that work adds
/// up linearly, which only a sweep of the mix can confirm. Little's law then gives the concurrency.
pub(super) fn slots_of(inputs: &CapacityInputs, classes: &[ClassForecast]) -> f64 {
    if let Some(slots) = inputs.replica.slots {
        return f64::from(slots);
    }
    let shares: f64 = classes.iter().map(|class| class.peak_rate / class.goodput).sum();
    let running: f64 = classes.iter().map(|class| class.peak_rate * time_of(class)).sum();
    running / shares
}

fn time_of(class: &ClassForecast) -> f64 {
    e2e(class.ttft, class.tpot, class.output_tokens)
}

/// Waits for a slot in a pool of this many replicas; `None` without a steady state.
fn waits(inputs: &CapacityInputs, classes: &[ClassForecast], replicas: u32) -> Option<(u32, Vec<f64>)> {
    let slots = (slots_of(inputs, classes) * f64::from(replicas)).floor() as u32;
    let rates: Vec<f64> = classes.iter().map(|class| class.peak_rate).collect();
    let all: f64 = rates.iter().sum();
    let service = classes.iter().map(|class| class.peak_rate * time_of(class)).sum::<f64>() / all;
    let pool = SlotPool { slots, service, burst: inputs.burst };
    let waits = pool.waits_by_priority(&rates).ok()?;
    Some((slots, waits.into_iter().map(|wait| wait.mean).collect()))
}

/// Compares both, for two classes or more. `sizes` are those of the separate pools.
///
/// Replicas add up as fractions before rounding, and share their spares. Waits follow the priorities (Cobham
/// 1954, in [`SlotPool::waits_by_priority`]), assuming that all peaks coincide and that requests of all
/// classes hold a slot equally long.
#[must_use]
pub(super) fn compare(inputs: &CapacityInputs, sizes: &[FleetSize]) -> Option<PoolingPlan> {
    if inputs.classes.len() < 2 {
        return None;
    }
    let shared = FleetSize::of_share(sizes.iter().map(|size| size.exact).sum(), inputs.spare);
    let separate = sizes.iter().map(|size| size.total).sum::<u32>();
    let mut order: Vec<usize> = (0..inputs.classes.len()).collect();
    order.sort_by_key(|number| inputs.classes[*number].priority);
    let ranked: Vec<ClassForecast> = order.iter().map(|number| inputs.classes[*number].clone()).collect();
    let whole = waits(inputs, &ranked, shared.total);
    let lost = waits(inputs, &ranked, shared.total.saturating_sub(1));
    let wait_of = |waits: &Option<(u32, Vec<f64>)>, place: usize| waits.as_ref().map(|(_, waits)| waits[place]);
    let rows = order.iter().enumerate().map(|(place, number)| PooledWait {
        class: ranked[place].name.clone(),
        separate: waits(inputs, &ranked[place..=place], sizes[*number].total).map(|(_, waits)| waits[0]),
        shared: wait_of(&whole, place),
        shared_after_loss: wait_of(&lost, place),
    });
    Some(PoolingPlan {
        separate,
        shared,
        saves: separate.saturating_sub(shared.total),
        slots: whole.as_ref().map_or(0, |(slots, _)| *slots),
        waits: rows.collect(),
    })
}

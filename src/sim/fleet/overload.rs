//! Overload levels in the simulated fleet: the gateway's own controllers on its own measures, every half
//! second.

use std::time::Duration;

use super::mix::Mix;
use super::policy::GatewayScheduling;
use crate::admit::overload_control::{ActiveActions, LoadMeasures, OverloadController, OverloadLevel};
use crate::judge::{Missed, Outcome};
use crate::record::burn::Burn;
use crate::types::{Priority, Tick};

/// Interval of evaluation.
const EVERY: Duration = Duration::from_millis(500);

/// The classes with levels.
#[derive(Default)]
pub(super) struct FleetOverload {
    classes: Vec<LeveledClass>,
    weigh_at: Tick,
}

struct LeveledClass {
    class: String,
    rank: Priority,
    levels: Vec<OverloadLevel>,
    controller: OverloadController,
    burn: Burn,
}

impl FleetOverload {
    pub fn new(settings: &GatewayScheduling, mix: &Mix, at: Tick) -> Self {
        let standing = |(name, levels): &(String, Vec<OverloadLevel>)| {
            let class = mix.classes.iter().find(|class| class.class == *name)?;
            Some(LeveledClass {
                class: name.clone(),
                rank: class.priority(),
                levels: levels.clone(),
                controller: OverloadController::default(),
                burn: Burn::new(class.target, Duration::from_secs(3600), at),
            })
        };
        FleetOverload { classes: settings.degrade.iter().filter_map(standing).collect(), weigh_at: at }
    }

    /// When classes are evaluated next.
    pub fn next_moment(&self) -> Option<Tick> {
        (!self.classes.is_empty()).then_some(self.weigh_at)
    }

    /// Evaluates every class if due.
    pub fn evaluate(&mut self, wait: impl Fn(Priority) -> Option<Duration>, depth: usize, at: Tick) {
        if at < self.weigh_at {
            return;
        }
        self.weigh_at = at + EVERY;
        for class in &mut self.classes {
            let measured = LoadMeasures {
                burn_rate: class.burn.pressure(at),
                queue_wait: wait(class.rank),
                queue_depth: depth as u64,
            };
            class.controller.evaluate(&class.levels, &measured, at);
        }
    }

    /// Records the outcome of a request.
    pub fn note(&mut self, class: &str, outcome: Outcome, at: Tick) {
        let Some(class) = self.classes.iter_mut().find(|standing| standing.class == class) else { return };
        match outcome {
            Outcome::Excluded(_) => {}
            Outcome::Missed(Missed::Shed) => class.burn.note(false, at),
            Outcome::Met | Outcome::Missed(_) => class.burn.note_served(outcome == Outcome::Met, at),
        }
    }

    /// The actions in force for requests of a class.
    pub fn in_force(&self, class: &str) -> ActiveActions {
        let standing = self.classes.iter().find(|standing| standing.class == class);
        standing.map_or_else(ActiveActions::default, |found| ActiveActions::at(&found.levels, found.controller.level()))
    }

    /// Whether a class of higher priority sheds requests of this one.
    pub fn sheds(&self, rank: Priority) -> bool {
        self.classes.iter().any(|standing| {
            standing.rank < rank && ActiveActions::at(&standing.levels, standing.controller.level()).shed_lower
        })
    }
}

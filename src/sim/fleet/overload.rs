//! Overload levels in the simulated fleet: the gateway's own controllers on its own measures, every half
//! second.

use std::collections::BTreeSet;
use std::time::Duration;

use super::mix::Mix;
use super::scheduling::{ClassPools, GatewayScheduling};
use crate::admit::overload::{OverloadSnapshot, Reroute};
use crate::admit::overload_control::{ActiveActions, LoadMeasures, OverloadController, OverloadLevel};
use crate::judge::{Missed, Outcome};
use crate::record::burn::Burn;
use crate::types::{ClassId, PoolId, Priority, Tick};

/// Interval of evaluation.
const EVERY: Duration = Duration::from_millis(500);

/// The classes with levels.
#[derive(Default)]
pub(super) struct FleetOverload {
    classes: Vec<LeveledClass>,
    /// The levels in force, for routes.
    snapshot: OverloadSnapshot,
    weigh_at: Tick,
}

struct LeveledClass {
    class: String,
    rank: Priority,
    pools: ClassPools,
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
                pools: settings.reach_of(name),
                levels: levels.clone(),
                controller: OverloadController::default(),
                burn: Burn::new(class.target, Duration::from_secs(3600), at),
            })
        };
        let classes = settings.degrade.iter().filter_map(standing).collect();
        FleetOverload { classes, snapshot: OverloadSnapshot::default(), weigh_at: at }
    }

    /// When classes are evaluated next.
    pub fn next_moment(&self) -> Option<Tick> {
        (!self.classes.is_empty()).then_some(self.weigh_at)
    }

    /// Evaluates every class if due. `load`: queue depth and wait of a priority in these pools.
    pub fn evaluate(&mut self, at: Tick, load: impl Fn(&BTreeSet<PoolId>, Priority) -> LoadMeasures) {
        if at < self.weigh_at {
            return;
        }
        self.weigh_at = at + EVERY;
        let mut moved = false;
        for class in &mut self.classes {
            let burn_rate = class.burn.pressure(at);
            let measured = LoadMeasures { burn_rate, ..load(&class.pools.first, class.rank) };
            moved |= class.controller.evaluate(&class.levels, &measured, at);
        }
        if moved {
            self.snapshot = OverloadSnapshot::default();
            for LeveledClass { class, rank, pools, levels, controller, .. } in &self.classes {
                let class = ClassId::from(class.as_str());
                self.snapshot.add(&class, *rank, levels, controller, || pools.all.clone());
            }
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

    /// The pools of a route that are left to a request.
    pub fn reroute(&self, in_force: &ActiveActions, rank: Priority, pools: &[PoolId]) -> Reroute {
        if self.snapshot.is_empty() {
            return Reroute::Unchanged;
        }
        self.snapshot.reroute(in_force, rank, pools)
    }
}

//! Overload levels in the simulated fleet: the gateway's own controllers on its own measures, every half
//! second.

use std::time::Duration;

use super::mix::Mix;
use super::policy::Scheduled;
use crate::admit::levels::{InForce, Ladder, Level, Measured};
use crate::judge::{Missed, Outcome};
use crate::record::burn::Burn;
use crate::units::{Priority, Tick};

/// Interval of evaluation.
const EVERY: Duration = Duration::from_millis(500);

/// The classes with levels.
#[derive(Default)]
pub(super) struct Brownout {
    classes: Vec<Standing>,
    weigh_at: Tick,
}

struct Standing {
    class: String,
    rank: Priority,
    levels: Vec<Level>,
    ladder: Ladder,
    burn: Burn,
}

impl Brownout {
    pub fn new(settings: &Scheduled, mix: &Mix, at: Tick) -> Self {
        let standing = |(name, levels): &(String, Vec<Level>)| {
            let class = mix.classes.iter().find(|class| class.class == *name)?;
            Some(Standing {
                class: name.clone(),
                rank: class.priority(),
                levels: levels.clone(),
                ladder: Ladder::default(),
                burn: Burn::new(class.target, Duration::from_secs(3600), at),
            })
        };
        Brownout { classes: settings.degrade.iter().filter_map(standing).collect(), weigh_at: at }
    }

    /// When classes are evaluated next.
    pub fn next_moment(&self) -> Option<Tick> {
        (!self.classes.is_empty()).then_some(self.weigh_at)
    }

    /// Evaluates every class if due.
    pub fn weigh(&mut self, wait: impl Fn(Priority) -> Option<Duration>, depth: usize, at: Tick) {
        if at < self.weigh_at {
            return;
        }
        self.weigh_at = at + EVERY;
        for class in &mut self.classes {
            let measured = Measured {
                burn_rate: class.burn.pressure(at),
                queue_wait: wait(class.rank),
                queue_depth: depth as u64,
            };
            class.ladder.weigh(&class.levels, &measured, at);
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
    pub fn in_force(&self, class: &str) -> InForce {
        let standing = self.classes.iter().find(|standing| standing.class == class);
        standing.map_or_else(InForce::default, |found| InForce::at(&found.levels, found.ladder.level()))
    }

    /// Whether a class of higher priority sheds requests of this one.
    pub fn sheds(&self, rank: Priority) -> bool {
        self.classes
            .iter()
            .any(|standing| standing.rank < rank && InForce::at(&standing.levels, standing.ladder.level()).shed_lower)
    }
}

//! The effect of all classes' overload levels on one request.
//!
//! Pure: the gateway publishes an [`OverloadSnapshot`] when a level changes, and each request consults the
//! current one. `levels` decides each class's level; this module decides which pools of a request's
//! route are left, if any.

use std::collections::{BTreeSet, HashMap};

use ahash::RandomState;

use super::overload_control::{ActionKind, ActionKinds, ActiveActions, OverloadController, OverloadLevel};
use crate::types::{ClassId, PoolId, Priority, Tick};

/// The overload levels in force, of all classes.
#[derive(Debug, Default)]
pub struct OverloadSnapshot {
    classes: HashMap<ClassId, ActiveActions, RandomState>,
    reserved: Vec<ReservedPools>,
}

/// Pools that a class keeps free of lower priorities.
#[derive(Debug)]
struct ReservedPools {
    class: ClassId,
    priority: Priority,
    pools: BTreeSet<PoolId>,
    /// The earliest change of the level that reserves them; `None`: an operator decides.
    until: Option<Tick>,
}

/// The route with overload actions applied.
#[derive(Debug, PartialEq, Eq)]
pub enum Reroute {
    /// All pools, in order.
    Unchanged,
    /// These pools, in this order.
    Pools {
        /// The pools.
        pools: Vec<PoolId>,
        /// The actions that were applied to the request.
        applied: ActionKinds,
    },
    /// No pool: all are reserved for higher priorities.
    Shed {
        /// The class that reserves the first of them.
        class: ClassId,
        /// The earliest moment at which that class gives it up; `None`: an operator decides.
        until: Option<Tick>,
    },
}

impl OverloadSnapshot {
    /// Adds a class at a level. `pools`: all that its routes reach.
    pub fn add(
        &mut self,
        class: &ClassId,
        priority: Priority,
        levels: &[OverloadLevel],
        controller: &OverloadController,
        pools: impl FnOnce() -> BTreeSet<PoolId>,
    ) {
        if controller.level() == 0 {
            return;
        }
        let in_force = ActiveActions::at(levels, controller.level());
        if in_force.shed_lower {
            let (class, until) = (class.clone(), controller.sheds_until(levels));
            self.reserved.push(ReservedPools { class, priority, pools: pools(), until });
        }
        self.classes.insert(class.clone(), in_force);
    }

    /// Whether no level of any class is in force.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// The actions in force for requests of a class.
    #[must_use]
    pub fn of_class(&self, class: &ClassId) -> ActiveActions {
        self.classes.get(class).copied().unwrap_or_default()
    }

    /// The route of a request with these actions in force and this priority.
    #[must_use]
    pub fn reroute(&self, in_force: &ActiveActions, priority: Priority, route: &[PoolId]) -> Reroute {
        let reserved = |pool: &PoolId| {
            self.reserved.iter().find(|reserved| reserved.priority < priority && reserved.pools.contains(pool))
        };
        let mut pools: Vec<PoolId> = route.iter().filter(|pool| reserved(pool).is_none()).cloned().collect();
        let has_fewer = pools.len() < route.len();
        if !has_fewer && !in_force.spill {
            return Reroute::Unchanged;
        }
        if let (true, Some(ReservedPools { class, until, .. })) = (pools.is_empty(), route.first().and_then(reserved)) {
            return Reroute::Shed { class: class.clone(), until: *until };
        }
        let mut applied = ActionKinds::default();
        if has_fewer {
            applied.add(ActionKind::ShedLower);
        }
        if in_force.spill && pools.len() > 1 {
            applied.add(ActionKind::Spill);
            pools.rotate_left(1);
        }
        Reroute::Pools { pools, applied }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::overload_control::{Action, LoadBounds};
    use super::*;

    fn pool(name: &str) -> PoolId {
        PoolId::from(name)
    }

    fn pools(names: &[&str]) -> Vec<PoolId> {
        names.iter().map(|name| pool(name)).collect()
    }

    fn kinds(all: &[ActionKind]) -> ActionKinds {
        let mut kinds = ActionKinds::default();
        all.iter().for_each(|kind| kinds.add(*kind));
        kinds
    }

    /// `voice`, of high priority, sheds lower ones from `main` for 10 s from 1 s on.
    fn voice_sheds() -> OverloadSnapshot {
        let hold = Duration::from_secs(10);
        let levels = [OverloadLevel {
            action: Action::ShedLower,
            enter: LoadBounds::default(),
            leave: LoadBounds::default(),
            hold,
        }];
        let mut controller = OverloadController::default();
        controller.force(1, Some(Tick::from_millis(1000)), Tick::ZERO);
        let mut snapshot = OverloadSnapshot::default();
        snapshot.add(&ClassId::from("voice"), Priority::High, &levels, &controller, || [pool("main")].into());
        snapshot
    }

    #[test]
    fn a_class_at_no_level_is_not_there() {
        let mut snapshot = OverloadSnapshot::default();
        snapshot.add(&ClassId::from("chat"), Priority::Normal, &[], &OverloadController::default(), || {
            panic!("not asked for")
        });
        assert!(snapshot.is_empty());
        assert_eq!(snapshot.of_class(&ClassId::from("chat")), ActiveActions::default());
    }

    #[test]
    fn lower_priorities_lose_the_pools_of_a_class_that_sheds() {
        let snapshot = voice_sheds();
        let reroute = |priority, route: &[&str]| snapshot.reroute(&ActiveActions::default(), priority, &pools(route));
        let left = Reroute::Pools { pools: pools(&["spare"]), applied: kinds(&[ActionKind::ShedLower]) };
        assert_eq!(reroute(Priority::Normal, &["main", "spare"]), left);
        let until = Some(Tick::from_millis(11_000));
        assert_eq!(reroute(Priority::Normal, &["main"]), Reroute::Shed { class: ClassId::from("voice"), until });
        for same_or_higher in [Priority::High, Priority::Critical] {
            assert_eq!(reroute(same_or_higher, &["main", "spare"]), Reroute::Unchanged);
        }
        assert_eq!(reroute(Priority::Normal, &["spare"]), Reroute::Unchanged);
    }

    #[test]
    fn a_class_that_spills_begins_with_the_next_pool() {
        let (snapshot, spill) = (voice_sheds(), ActiveActions { spill: true, ..ActiveActions::default() });
        let reroute = |route: &[&str]| snapshot.reroute(&spill, Priority::High, &pools(route));
        let rotated = Reroute::Pools { pools: pools(&["b", "c", "a"]), applied: kinds(&[ActionKind::Spill]) };
        assert_eq!(reroute(&["a", "b", "c"]), rotated);
        let alone = Reroute::Pools { pools: pools(&["a"]), applied: ActionKinds::default() };
        assert_eq!(reroute(&["a"]), alone, "there is no next pool");
    }
}

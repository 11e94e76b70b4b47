//! Overload levels.

use std::sync::Arc;
use std::time::Duration;

use super::{Checker, in_seconds, shown};
use crate::admit::overload_control::{Action, ActionKind, LoadBounds, OverloadLevel};
use crate::config::ClassSettings;
use crate::config::problem::Location;
use crate::config::schema::{self, ActionWord, Root};
use crate::config::walk::{ConfigBlock, Located, OrBlock};
use crate::judge::Objectives;
use crate::route::settings::{Concurrency, PoolSettings, Route};
use crate::types::Tokens;

impl Checker<'_> {
    pub(super) fn degrade(&mut self, raw: &schema::Class, promise: &Objectives) -> Vec<OverloadLevel> {
        let mut levels: Vec<OverloadLevel> = Vec::new();
        for raw in raw.degrade.iter().flat_map(|levels| levels.iter()) {
            let action = self.action(raw);
            let bounds = raw.enter_when.as_ref().map(|above| self.bounds(above, raw.leave_when.as_ref(), promise));
            let hold = self.time(raw.hold.as_ref(), OverloadLevel::HOLD);
            let (Some(action), Some((enter, leave))) = (action, bounds) else { continue };
            self.is_another(raw.place(), action, &levels);
            levels.push(OverloadLevel { action, enter, leave, hold });
        }
        levels
    }

    fn action(&mut self, raw: &schema::Level) -> Option<Action> {
        Some(match raw.action.as_ref()? {
            OrBlock::Short(word) => match word.value.0 {
                ActionWord::Defer => Action::Defer,
                ActionWord::ShedLower => Action::ShedLower,
                ActionWord::ReasoningOff => Action::ReasoningOff,
                ActionWord::Spill => Action::Spill,
            },
            OrBlock::Block(cap) => {
                let tokens = self.count(Some(cap.cap_output.as_ref()?), 1, 1..=u64::from(u32::MAX));
                Action::CapOutput(Tokens(tokens))
            }
        })
    }

    /// Levels are cumulative, so each must add an action.
    fn is_another(&mut self, place: &Location, action: Action, before: &[OverloadLevel]) {
        let same = before.iter().rev().find(|level| level.action.kind() == action.kind());
        match (action, same.map(|level| level.action)) {
            (_, None) => {}
            (Action::CapOutput(cap), Some(Action::CapOutput(other))) if cap < other => {}
            (Action::CapOutput(_), Some(_)) => {
                self.problem(
                    place,
                    "the cap is no lower than that of an earlier level",
                    "lower it, or remove the level",
                );
            }
            (_, Some(_)) => {
                let message = format!("{} is already in force at an earlier level", action.kind().as_str());
                self.problem(place, message, "remove one of the two");
            }
        }
    }

    fn bounds(
        &mut self,
        above: &schema::Above,
        below: Option<&schema::Below>,
        promise: &Objectives,
    ) -> (LoadBounds, LoadBounds) {
        if above.written().is_empty() {
            self.problem(above.place(), "nothing enters this level", "write at least one of the bounds");
        }
        let enter = LoadBounds {
            burn_rate: above.burn_rate_above.as_ref().and_then(|at| self.burn_rate(at, promise)),
            queue_wait: above.queue_wait_above.as_ref().map(|at| self.time(Some(at), Duration::from_secs(1))),
            queue_depth: above.queue_depth_above.as_ref().map(|at| self.count(Some(at), 1, 1..=10_000_000)),
        };
        let mut leave = LoadBounds {
            burn_rate: enter.burn_rate.map(|rate| rate / 2.0),
            queue_wait: enter.queue_wait.map(|wait| wait / 2),
            queue_depth: enter.queue_depth.map(|depth| (depth / 2).max(1)),
        };
        let Some(below) = below else { return (enter, leave) };
        if let Some(at) = &below.burn_rate_below {
            let is_lower = enter.burn_rate.is_none_or(|rate| at.value <= rate);
            let has_upper = above.burn_rate_above.is_some();
            if self.is_below(at, "burn_rate", shown(at), at.value > 0.0, is_lower, has_upper) {
                leave.burn_rate = Some(at.value);
            }
        }
        if let Some(at) = &below.queue_wait_below {
            let is_lower = enter.queue_wait.is_none_or(|wait| at.value <= wait);
            let has_upper = above.queue_wait_above.is_some();
            let value = in_seconds(at.value);
            if self.is_below(at, "queue_wait", value, !at.value.is_zero(), is_lower, has_upper) {
                leave.queue_wait = Some(at.value);
            }
        }
        if let Some(at) = &below.queue_depth_below {
            let is_lower = enter.queue_depth.is_none_or(|depth| at.value <= depth);
            let has_upper = above.queue_depth_above.is_some();
            if self.is_below(at, "queue_depth", shown(at), at.value > 0, is_lower, has_upper) {
                leave.queue_depth = Some(at.value);
            }
        }
        (enter, leave)
    }

    /// A burn rate above the largest possible one is an error: with every request missed it is one over the
    /// allowed share of misses.
    fn burn_rate(&mut self, at: &Located<f64>, promise: &Objectives) -> Option<f64> {
        if at.value <= 0.0 {
            let way_out = "write a number above 0; 1 uses the budget up exactly at the end of the window";
            self.problem(&at.place, format!("{} is not a burn rate that can be exceeded", shown(at)), way_out);
            return None;
        }
        let most = 1.0 / (1.0 - promise.joint_target);
        if at.value >= most {
            let message =
                format!("{} is never exceeded: if every request misses, this class burns at {most:.1}", shown(at));
            self.problem(&at.place, message, "lower it, or the class's joint_attainment_target is not what you meant");
            return None;
        }
        Some(at.value)
    }

    fn is_below<T>(
        &mut self,
        at: &Located<T>,
        name: &str,
        value: String,
        can_be: bool,
        is_lower: bool,
        has_upper: bool,
    ) -> bool {
        if !has_upper {
            let message = format!("it needs {name}_above");
            self.problem(&at.place, message, format!("add `{name}_above` to `enter_when`, or remove the key"));
        } else if !can_be {
            let message = format!("nothing is ever below {value}, so the level would never be left");
            self.problem(&at.place, message, "write a value above 0, or remove the key");
        } else if !is_lower {
            let message = format!("{value} is above {name}_above: the level would flap at once");
            self.problem(&at.place, message, format!("write less than `{name}_above`, or remove the key"));
        }
        has_upper && can_be && is_lower
    }

    /// Notes levels without effect, or that are never entered.
    pub(super) fn levels_can_help(
        &mut self,
        root: &Root,
        classes: &[Arc<ClassSettings>],
        pools: &[Arc<PoolSettings>],
        routes: &[Route],
    ) {
        for raw in root.slo_classes.iter().flat_map(|all| all.iter()) {
            let named =
                |class: &&Arc<ClassSettings>| raw.slo_class.as_ref().is_some_and(|at| at.value == class.id.as_str());
            let Some(class) = classes.iter().find(named) else { continue };
            let reach = Reach::of(class, classes, pools, routes);
            for raw in raw.degrade.iter().flat_map(|levels| levels.iter()) {
                if let Some((message, way_out)) = kind_of(raw).and_then(|kind| reach.is_in_vain(kind)) {
                    self.note(raw.place(), message, format!("{way_out}, or remove the level"));
                }
                let asks = raw.enter_when.as_ref().map_or(&[][..], ConfigBlock::written);
                if !reach.waits && !asks.is_empty() && asks.iter().all(|key| key.starts_with("queue")) {
                    let message = "it is never entered, because no request waits for the pools of this class";
                    self.note(raw.place(), message, "give one `max_concurrency_per_engine`, or go by burn_rate_above");
                }
            }
        }
    }
}

/// Measures and pools that levels of a class can act on.
struct Reach {
    /// Whether requests can wait for one of its pools.
    waits: bool,
    /// Whether one of its pools passes a priority to engines.
    is_told: bool,
    has_lower: bool,
    has_second_pool: bool,
}

impl Reach {
    fn of(
        class: &ClassSettings,
        classes: &[Arc<ClassSettings>],
        pools: &[Arc<PoolSettings>],
        routes: &[Route],
    ) -> Self {
        let served = || routes.iter().filter(|route| route.serves(&class.id));
        let own = || pools.iter().filter(|pool| served().any(|route| route.pools.contains(&pool.id)));
        Reach {
            waits: own().any(|pool| pool.concurrency != Concurrency::Unlimited),
            is_told: own().any(|pool| pool.engine_priority),
            has_lower: classes.iter().any(|other| other.priority > class.priority),
            has_second_pool: served().any(|route| route.pools.len() > 1),
        }
    }

    /// The missing requirement of this kind of action, and its correction.
    fn is_in_vain(&self, kind: ActionKind) -> Option<(&'static str, &'static str)> {
        match kind {
            ActionKind::Defer if !self.waits && !self.is_told => {
                Some(("no request waits for the pools of this class", "give one `max_concurrency_per_engine`"))
            }
            ActionKind::ShedLower if !self.has_lower => {
                Some(("no class has a lower priority", "lower the `priority` of another class"))
            }
            ActionKind::Spill if !self.has_second_pool => {
                Some(("no route of this class has a second pool", "add one to its route"))
            }
            ActionKind::Defer
            | ActionKind::ShedLower
            | ActionKind::CapOutput
            | ActionKind::ReasoningOff
            | ActionKind::Spill => None,
        }
    }
}

fn kind_of(raw: &schema::Level) -> Option<ActionKind> {
    Some(match raw.action.as_ref()? {
        OrBlock::Short(word) => match word.value.0 {
            ActionWord::Defer => ActionKind::Defer,
            ActionWord::ShedLower => ActionKind::ShedLower,
            ActionWord::ReasoningOff => ActionKind::ReasoningOff,
            ActionWord::Spill => ActionKind::Spill,
        },
        OrBlock::Block(_) => ActionKind::CapOutput,
    })
}

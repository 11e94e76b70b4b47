//! Measures classes for overload control, and publishes the levels in force.
//!
//! `admit::levels` decides a class's level, [`admit::overload`](crate::admit::overload) its effect on a
//! request. [`OverloadBoard`] outlives reloads. Requests read one published snapshot, which is absent while
//! no level is in force, so that a gateway without overload pays nothing. A request takes the snapshot
//! when it is classified and keeps it to its end.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ahash::RandomState;
use arc_swap::ArcSwapOption;
use http::header::HeaderValue;
use parking_lot::Mutex;

use super::house::GatewayState;
use super::promise::SettingsSnapshot;
use crate::admit::levels::{InForce, Kind, Kinds, Ladder, Measured};
use crate::admit::overload::{OverloadSnapshot, Reroute};
use crate::config::{ClassSettings, Settings};
use crate::record::{ActiveRequest, LevelReport};
use crate::refuse::Rejection;
use crate::route::Routed;
use crate::units::{ClassId, PoolId, Priority, Tick, Tokens, seconds_up};

/// Interval between measurements.
const EVERY: Duration = Duration::from_millis(500);

/// Overload levels of all classes.
#[derive(Debug, Default)]
pub struct OverloadBoard {
    ladders: Mutex<OverloadControllers>,
    board: ArcSwapOption<OverloadSnapshot>,
    /// Whether a snapshot is published; cheaper than loading it, and almost always false.
    is_posted: AtomicBool,
}

#[derive(Debug, Default)]
struct OverloadControllers {
    of: HashMap<ClassId, ClassOverload, RandomState>,
    /// Time of the next measurement.
    due: Tick,
}

#[derive(Clone, Copy, Debug, Default)]
struct ClassOverload {
    ladder: Ladder,
    measured: Measured,
}

/// Overload status of a class.
#[derive(Clone, Debug, PartialEq)]
pub struct LevelView {
    /// The class.
    pub class: ClassId,
    /// Levels in force.
    pub level: usize,
    /// Configured levels.
    pub levels: usize,
    /// Actions in force, in order.
    pub actions: Vec<Kind>,
    /// Whether an operator set the level.
    pub is_forced: bool,
    /// Remaining time of the operator's setting; `None` if unlimited or not set.
    pub forced_for: Option<Duration>,
    /// The last measurement.
    pub measured: Measured,
}

/// Why a level was not set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverrideError {
    /// Unknown class.
    UnknownClass,
    /// The class has only this many levels.
    TooHigh(usize),
}

/// The overload actions in force for one request.
#[derive(Clone, Debug, Default)]
pub struct ActiveOverload {
    in_force: InForce,
    board: Option<Arc<OverloadSnapshot>>,
}

impl ActiveOverload {
    /// The output cap in force.
    #[must_use]
    pub fn cap(&self) -> Option<Tokens> {
        self.in_force.cap
    }

    /// Whether extended reasoning is reduced.
    #[must_use]
    pub fn without_reasoning(&self) -> bool {
        self.in_force.reasoning_off
    }

    /// Records the actions in force, for the access line.
    pub fn is_told(&self, active: &mut ActiveRequest) {
        if self.in_force.level > 0 {
            active.at_level(self.in_force.level, self.in_force.cap);
        }
    }

    /// Whether it queues behind all others. Call once.
    #[must_use]
    pub fn defers(&self, active: &mut ActiveRequest) -> bool {
        if self.in_force.defer {
            active.degraded(Kind::Defer);
        }
        self.in_force.defer
    }

    /// The route with overload actions applied.
    ///
    /// # Errors
    /// No pool is left: all are reserved for higher priorities.
    pub fn rerouted(
        &self,
        routed: Routed,
        priority: Priority,
        active: &mut ActiveRequest,
        at: Tick,
    ) -> Result<Routed, Rejection> {
        let Some(board) = &self.board else { return Ok(routed) };
        match board.reroute(&self.in_force, priority, &routed.pools) {
            Reroute::Unchanged => Ok(routed),
            Reroute::Pools { pools, applied } => {
                applied.iter().for_each(|kind| active.degraded(kind));
                Ok(Routed { pools: pools.into(), ..routed })
            }
            Reroute::Shed { class, until } => {
                active.degraded(Kind::ShedLower);
                let retry_after = until.map(|until| seconds_up(until - at).max(1));
                Err(Rejection::OverloadShed { class, retry_after })
            }
        }
    }

    /// Index of the route's first pool among the pools of [`ActiveOverload::rerouted`].
    pub fn home(&self, pools: &[PoolId]) -> usize {
        if self.in_force.spill { pools.len().saturating_sub(1) } else { 0 }
    }
}

/// The value of `x-goodput-degraded`; `None` if no action was applied.
#[must_use]
pub fn shown(kinds: Kinds) -> Option<HeaderValue> {
    if kinds.is_empty() {
        return None;
    }
    let names: Vec<&str> = kinds.iter().map(Kind::as_str).collect();
    HeaderValue::try_from(names.join(", ")).ok()
}

impl GatewayState {
    /// The actions in force for a request of this class.
    pub(super) fn relief(&self, class: &ClassId) -> ActiveOverload {
        let is_posted = self.levels.is_posted.load(Ordering::Acquire);
        let board = if is_posted { self.levels.board.load_full() } else { None };
        let in_force = board.as_ref().map(|board| board.of_class(class)).unwrap_or_default();
        ActiveOverload { in_force, board }
    }

    /// Measures every class with levels if due, and updates its level.
    pub(super) fn weigh_levels(&self) {
        let at = self.clock.now();
        let mut ladders = self.levels.ladders.lock();
        if ladders.of.is_empty() || at < ladders.due {
            return;
        }
        ladders.due = at + EVERY;
        let live = self.live.load();
        let mut moved = false;
        for class in live.settings.classes.iter().filter(|class| !class.degrade.is_empty()) {
            let Some(standing) = ladders.of.get_mut(&class.id) else { continue };
            standing.measured = self.measure(&live, class, at);
            if standing.ladder.weigh(&class.degrade, &standing.measured, at) {
                moved = true;
                tell(class, standing, at);
            }
        }
        if moved {
            self.publish(&live.settings, &ladders);
        }
    }

    /// Applies settings: levels in force stay if they still exist.
    pub(super) fn follow_levels(&self, settings: &Settings) {
        let at = self.clock.now();
        let mut ladders = self.levels.ladders.lock();
        ladders.of.retain(|id, _| settings.class(id).is_some_and(|class| !class.degrade.is_empty()));
        for class in settings.classes.iter().filter(|class| !class.degrade.is_empty()) {
            ladders.of.entry(class.id.clone()).or_default().ladder.fit(class.degrade.len(), at);
        }
        self.publish(settings, &ladders);
    }

    /// Sets the level of a class by hand, for a time or until reset; or resets it.
    ///
    /// # Errors
    /// Unknown class or level.
    pub fn force_level(
        &self,
        class: &str,
        level: Option<usize>,
        length: Option<Duration>,
    ) -> Result<LevelView, OverrideError> {
        let at = self.clock.now();
        let mut ladders = self.levels.ladders.lock();
        // Loaded while the lock is held, so that the controllers match these settings.
        let live = self.live.load();
        let class = live.settings.class(&ClassId::from(class)).ok_or(OverrideError::UnknownClass)?;
        let standing = match ladders.of.get_mut(&class.id) {
            Some(standing) if level.is_none_or(|level| level <= class.degrade.len()) => standing,
            _ => return Err(OverrideError::TooHigh(class.degrade.len())),
        };
        match level {
            Some(level) => standing.ladder.force(level, length.map(|length| at + length), at),
            None => standing.ladder.release(at),
        }
        tell(class, standing, at);
        let view = standing.view(class, at);
        self.publish(&live.settings, &ladders);
        Ok(view)
    }

    /// The status of every class with levels, in the order of the settings.
    #[must_use]
    pub fn level_views(&self) -> Vec<LevelView> {
        let ladders = self.levels.ladders.lock();
        let (live, at) = (self.live.load(), self.clock.now());
        let view = |class: &Arc<ClassSettings>| Some(ladders.of.get(&class.id)?.view(class, at));
        live.settings.classes.iter().filter_map(view).collect()
    }

    /// Reports the levels to the recorder. Called before a metrics page is
    /// written.
    pub fn report_levels(&self) {
        let report = |view: LevelView| {
            let LevelView { level, is_forced, forced_for, .. } = view;
            (view.class, LevelReport { level, is_forced, forced_for })
        };
        self.recorder.levels(self.level_views().into_iter().map(report).collect());
    }

    fn measure(&self, live: &SettingsSnapshot, class: &ClassSettings, at: Tick) -> Measured {
        let mut measured = Measured { burn_rate: self.recorder.pressure(&class.id, at), ..Measured::default() };
        for pool in live.settings.routes.first_pools(&class.id) {
            let Some(desk) = self.desks.desk(&pool) else { continue };
            measured.queue_depth = measured.queue_depth.max(desk.numbers().waiting as u64);
            measured.queue_wait = measured.queue_wait.max(desk.expected_wait(class.priority));
        }
        measured
    }

    /// Publishes the snapshot for requests.
    fn publish(&self, settings: &Settings, ladders: &OverloadControllers) {
        let mut board = OverloadSnapshot::default();
        for class in &settings.classes {
            if let Some(ClassOverload { ladder, .. }) = ladders.of.get(&class.id) {
                let pools = || settings.routes.reach(&class.id).into_iter().map(|(pool, _)| pool).collect();
                board.add(&class.id, class.priority, &class.degrade, ladder, pools);
            }
        }
        let is_posted = !board.is_empty();
        self.levels.board.store(is_posted.then(|| Arc::new(board)));
        self.levels.is_posted.store(is_posted, Ordering::Release);
    }
}

impl ClassOverload {
    fn view(&self, class: &ClassSettings, at: Tick) -> LevelView {
        let level = self.ladder.level();
        LevelView {
            class: class.id.clone(),
            level,
            levels: class.degrade.len(),
            actions: class.degrade.iter().take(level).map(|level| level.action.kind()).collect(),
            is_forced: self.ladder.is_forced(),
            forced_for: self.ladder.forced_until().map(|end| end - at),
            measured: self.measured,
        }
    }
}

/// Logs a level change.
fn tell(class: &ClassSettings, standing: &ClassOverload, at: Tick) {
    let ClassOverload { ladder, measured } = standing;
    tracing::info!(
        class = %class.id,
        level = ladder.level(),
        forced = ladder.is_forced(),
        forced_for_s = ladder.forced_until().map(|end| (end - at).as_secs()),
        burn_rate = measured.burn_rate,
        queue_wait_ms = measured.queue_wait.map(|wait| wait.as_millis() as u64),
        queue_depth = measured.queue_depth,
        "the overload level of the class"
    );
}

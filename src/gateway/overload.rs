//! Measures classes for overload control, and publishes the levels in force.
//!
//! `admit::overload_control` decides a class's level, [`admit::overload`](crate::admit::overload) its effect on a
//! request. [`OverloadBoard`](super::OverloadBoard) outlives reloads. Requests read one published snapshot, which is absent while
//! no level is in force, so that a gateway without overload pays nothing. A request takes the snapshot
//! when it is classified and keeps it to its end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::header::HeaderValue;

use super::overload_board::{ClassOverload, OverloadControllers};
use super::snapshot::SettingsSnapshot;
use super::state::GatewayState;
use crate::admit::overload::{OverloadSnapshot, Reroute};
use crate::admit::overload_control::{ActionKind, ActionKinds, ActiveActions, LoadMeasures};
use crate::config::{ClassSettings, Settings};
use crate::record::{ActiveRequest, LevelReport};
use crate::reject::Rejection;
use crate::route::RouteMatch;
use crate::types::{ClassId, PoolId, Priority, Tick, Tokens, seconds_up};

/// Interval between measurements.
const EVERY: Duration = Duration::from_millis(500);

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
    pub actions: Vec<ActionKind>,
    /// Whether an operator set the level.
    pub is_forced: bool,
    /// Remaining time of the operator's setting; `None` if unlimited or not set.
    pub forced_for: Option<Duration>,
    /// The last measurement.
    pub measured: LoadMeasures,
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
    in_force: ActiveActions,
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
            active.degraded(ActionKind::Defer);
        }
        self.in_force.defer
    }

    /// The route with overload actions applied.
    ///
    /// # Errors
    /// No pool is left: all are reserved for higher priorities.
    pub fn rerouted(
        &self,
        routed: RouteMatch,
        priority: Priority,
        active: &mut ActiveRequest,
        at: Tick,
    ) -> Result<RouteMatch, Rejection> {
        let Some(board) = &self.board else { return Ok(routed) };
        match board.reroute(&self.in_force, priority, &routed.pools) {
            Reroute::Unchanged => Ok(routed),
            Reroute::Pools { pools, applied } => {
                applied.iter().for_each(|kind| active.degraded(kind));
                Ok(RouteMatch { pools: pools.into(), ..routed })
            }
            Reroute::Shed { class, until } => {
                active.degraded(ActionKind::ShedLower);
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
pub fn degradation_header(kinds: ActionKinds) -> Option<HeaderValue> {
    if kinds.is_empty() {
        return None;
    }
    let names: Vec<&str> = kinds.iter().map(ActionKind::as_str).collect();
    HeaderValue::try_from(names.join(", ")).ok()
}

impl GatewayState {
    /// The actions in force for a request of this class.
    pub(super) fn active_overload(&self, class: &ClassId) -> ActiveOverload {
        let is_posted = self.levels.is_posted.load(Ordering::Acquire);
        let board = if is_posted { self.levels.board.load_full() } else { None };
        let in_force = board.as_ref().map(|board| board.of_class(class)).unwrap_or_default();
        ActiveOverload { in_force, board }
    }

    /// Measures every class with levels if due, and updates its level.
    pub(super) fn evaluate_overload(&self) {
        let at = self.clock.now();
        let mut controllers = self.levels.controllers.lock();
        if controllers.of.is_empty() || at < controllers.due {
            return;
        }
        controllers.due = at + EVERY;
        let live = self.live.load();
        let mut moved = false;
        for class in live.settings.classes.iter().filter(|class| !class.degrade.is_empty()) {
            let Some(class_overload) = controllers.of.get_mut(&class.id) else { continue };
            class_overload.measured = self.measure(&live, class, at);
            if class_overload.controller.evaluate(&class.degrade, &class_overload.measured, at) {
                moved = true;
                log_level_change(class, class_overload, at);
            }
        }
        if moved {
            self.publish(&live.settings, &controllers);
        }
    }

    /// Applies settings: levels in force stay if they still exist.
    pub(super) fn apply_overload_settings(&self, settings: &Settings) {
        let at = self.clock.now();
        let mut controllers = self.levels.controllers.lock();
        controllers.of.retain(|id, _| settings.class(id).is_some_and(|class| !class.degrade.is_empty()));
        for class in settings.classes.iter().filter(|class| !class.degrade.is_empty()) {
            controllers.of.entry(class.id.clone()).or_default().controller.fit(class.degrade.len(), at);
        }
        self.publish(settings, &controllers);
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
        let mut controllers = self.levels.controllers.lock();
        // Loaded while the lock is held, so that the controllers match these settings.
        let live = self.live.load();
        let class = live.settings.class(&ClassId::from(class)).ok_or(OverrideError::UnknownClass)?;
        let class_overload = match controllers.of.get_mut(&class.id) {
            Some(class_overload) if level.is_none_or(|level| level <= class.degrade.len()) => class_overload,
            _ => return Err(OverrideError::TooHigh(class.degrade.len())),
        };
        match level {
            Some(level) => class_overload.controller.force(level, length.map(|length| at + length), at),
            None => class_overload.controller.release(at),
        }
        log_level_change(class, class_overload, at);
        let view = class_overload.view(class, at);
        self.publish(&live.settings, &controllers);
        Ok(view)
    }

    /// The status of every class with levels, in the order of the settings.
    #[must_use]
    pub fn level_views(&self) -> Vec<LevelView> {
        let controllers = self.levels.controllers.lock();
        let (live, at) = (self.live.load(), self.clock.now());
        let view = |class: &Arc<ClassSettings>| Some(controllers.of.get(&class.id)?.view(class, at));
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

    fn measure(&self, live: &SettingsSnapshot, class: &ClassSettings, at: Tick) -> LoadMeasures {
        let mut measured = LoadMeasures { burn_rate: self.recorder.pressure(&class.id, at), ..LoadMeasures::default() };
        for pool in live.settings.routes.first_pools(&class.id) {
            let Some(pool_queue) = self.pool_queues.pool_queue(&pool) else { continue };
            measured.queue_depth = measured.queue_depth.max(pool_queue.numbers().waiting as u64);
            measured.queue_wait = measured.queue_wait.max(pool_queue.expected_wait(class.priority));
        }
        measured
    }

    /// Publishes the snapshot for requests.
    fn publish(&self, settings: &Settings, controllers: &OverloadControllers) {
        let mut board = OverloadSnapshot::default();
        for class in &settings.classes {
            if let Some(ClassOverload { controller, .. }) = controllers.of.get(&class.id) {
                let pools = || settings.routes.reach(&class.id).into_iter().map(|(pool, _)| pool).collect();
                board.add(&class.id, class.priority, &class.degrade, controller, pools);
            }
        }
        let is_posted = !board.is_empty();
        self.levels.board.store(is_posted.then(|| Arc::new(board)));
        self.levels.is_posted.store(is_posted, Ordering::Release);
    }
}

impl ClassOverload {
    fn view(&self, class: &ClassSettings, at: Tick) -> LevelView {
        let level = self.controller.level();
        LevelView {
            class: class.id.clone(),
            level,
            levels: class.degrade.len(),
            actions: class.degrade.iter().take(level).map(|level| level.action.kind()).collect(),
            is_forced: self.controller.is_forced(),
            forced_for: self.controller.forced_until().map(|end| end - at),
            measured: self.measured,
        }
    }
}

/// Logs a level change.
fn log_level_change(class: &ClassSettings, class_overload: &ClassOverload, at: Tick) {
    let ClassOverload { controller, measured } = class_overload;
    tracing::info!(
        class = %class.id,
        level = controller.level(),
        forced = controller.is_forced(),
        forced_for_s = controller.forced_until().map(|end| (end - at).as_secs()),
        burn_rate = measured.burn_rate,
        queue_wait_ms = measured.queue_wait.map(|wait| wait.as_millis() as u64),
        queue_depth = measured.queue_depth,
        "the overload level of the class"
    );
}

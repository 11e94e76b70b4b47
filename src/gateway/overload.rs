//! Overload levels at work: measures every class, and publishes what is in force.
//!
//! Which level a class is at is decided by `admit::levels`, what the levels do to a request by
//! [`admit::overload`](crate::admit::overload). [`OverloadBoard`] lives over reloads. Requests look at one
//! published snapshot, absent while no level of any class is in force, so that a gateway without load
//! pays for nothing. A request takes the snapshot when its class is known, and keeps it to its end.

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

/// How often classes are measured.
const EVERY: Duration = Duration::from_millis(500);

/// The overload levels of all classes.
#[derive(Debug, Default)]
pub struct OverloadBoard {
    ladders: Mutex<OverloadControllers>,
    board: ArcSwapOption<OverloadSnapshot>,
    /// There is one. To look for it costs more, and there hardly ever is.
    is_posted: AtomicBool,
}

#[derive(Debug, Default)]
struct OverloadControllers {
    of: HashMap<ClassId, ClassOverload, RandomState>,
    /// When classes are measured next.
    due: Tick,
}

#[derive(Clone, Copy, Debug, Default)]
struct ClassOverload {
    ladder: Ladder,
    measured: Measured,
}

/// How a class with levels stands.
#[derive(Clone, Debug, PartialEq)]
pub struct LevelView {
    /// The class.
    pub class: ClassId,
    /// Levels in force.
    pub level: usize,
    /// Levels that it has.
    pub levels: usize,
    /// What those in force do, in their order.
    pub actions: Vec<Kind>,
    /// An operator has set it.
    pub is_forced: bool,
    /// For how long still; none where that has no end, and where nobody has.
    pub forced_for: Option<Duration>,
    /// What was measured last.
    pub measured: Measured,
}

/// Why a level could not be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverrideError {
    /// No class has this name.
    UnknownClass,
    /// The class has only so many levels.
    TooHigh(usize),
}

/// What is done to one request.
#[derive(Clone, Debug, Default)]
pub struct ActiveOverload {
    in_force: InForce,
    board: Option<Arc<OverloadSnapshot>>,
}

impl ActiveOverload {
    /// The most output tokens that it may have.
    #[must_use]
    pub fn cap(&self) -> Option<Tokens> {
        self.in_force.cap
    }

    /// Whether it goes without extended reasoning.
    #[must_use]
    pub fn without_reasoning(&self) -> bool {
        self.in_force.reasoning_off
    }

    /// Notes what is in force, for its access line.
    pub fn is_told(&self, active: &mut ActiveRequest) {
        if self.in_force.level > 0 {
            active.at_level(self.in_force.level, self.in_force.cap);
        }
    }

    /// Whether it waits behind everybody else. To be asked once.
    #[must_use]
    pub fn defers(&self, active: &mut ActiveRequest) -> bool {
        if self.in_force.defer {
            active.degraded(Kind::Defer);
        }
        self.in_force.defer
    }

    /// The route that is left of the one that the settings say.
    ///
    /// # Errors
    /// Nothing is left: all of its pools are kept free for higher ranks.
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

    /// Where among the pools of [`ActiveOverload::rerouted`] the route's own first one stands.
    pub fn home(&self, pools: &[PoolId]) -> usize {
        if self.in_force.spill { pools.len().saturating_sub(1) } else { 0 }
    }
}

/// The value of `x-goodput-degraded`; none where nothing was done.
#[must_use]
pub fn shown(kinds: Kinds) -> Option<HeaderValue> {
    if kinds.is_empty() {
        return None;
    }
    let names: Vec<&str> = kinds.iter().map(Kind::as_str).collect();
    HeaderValue::try_from(names.join(", ")).ok()
}

impl GatewayState {
    /// What is in force for a request of this class.
    pub(super) fn relief(&self, class: &ClassId) -> ActiveOverload {
        let is_posted = self.levels.is_posted.load(Ordering::Acquire);
        let board = if is_posted { self.levels.board.load_full() } else { None };
        let in_force = board.as_ref().map(|board| board.of_class(class)).unwrap_or_default();
        ActiveOverload { in_force, board }
    }

    /// Measures every class that has levels, if it is time to, and moves its level.
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

    /// Levels follow the settings: what is in force stays, as far as it is still there.
    pub(super) fn follow_levels(&self, settings: &Settings) {
        let at = self.clock.now();
        let mut ladders = self.levels.ladders.lock();
        ladders.of.retain(|id, _| settings.class(id).is_some_and(|class| !class.degrade.is_empty()));
        for class in settings.classes.iter().filter(|class| !class.degrade.is_empty()) {
            ladders.of.entry(class.id.clone()).or_default().ladder.fit(class.degrade.len(), at);
        }
        self.publish(settings, &ladders);
    }

    /// An operator sets the level of a class, for so long or until it is handed back; or hands it
    /// back.
    ///
    /// # Errors
    /// There is no such class, or no such level.
    pub fn force_level(
        &self,
        class: &str,
        level: Option<usize>,
        length: Option<Duration>,
    ) -> Result<LevelView, OverrideError> {
        let at = self.clock.now();
        let mut ladders = self.levels.ladders.lock();
        // Behind the lock: the ladders follow the settings of this moment.
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

    /// How every class with levels stands, in the order of the settings.
    #[must_use]
    pub fn level_views(&self) -> Vec<LevelView> {
        let ladders = self.levels.ladders.lock();
        let (live, at) = (self.live.load(), self.clock.now());
        let view = |class: &Arc<ClassSettings>| Some(ladders.of.get(&class.id)?.view(class, at));
        live.settings.classes.iter().filter_map(view).collect()
    }

    /// Tells the recorder at which level each class is: to be called before a page of metrics is
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

    /// Publishes the snapshot that requests look at.
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

/// A level that changes is a life event.
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

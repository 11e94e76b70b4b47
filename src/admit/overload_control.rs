//! Overload controller of one class: its levels are entered and left one by one.
//!
//! Pure: measurements and moments go in, the level comes out. The operator orders the levels; all up to
//! the current one are in force together. A level is entered when one of its measures exceeds its bound,
//! and left when all are below lower bounds. After each change the top level stays for its `hold`, in
//! both directions, to show its effect. With constant measurements the level therefore moves in one
//! direction and then not at all ([`OverloadController::evaluate`]), and it never changes twice within a `hold`.
//!
//! The burn rate excludes shed requests, because shedding would otherwise keep its own level in force. The
//! gateway applies the actions to requests.

#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::types::{Tick, Tokens};

/// Action of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Requests of the class queue behind all others.
    Defer,
    /// Requests of lower priorities are shed from the pools of this class.
    ShedLower,
    /// Responses of the class have at most this many output tokens.
    CapOutput(Tokens),
    /// Requests of the class are sent without extended reasoning.
    ReasoningOff,
    /// Requests of the class go to the next pool of their route first.
    Spill,
}

/// The kind of an [`Action`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActionKind {
    /// See [`Action::Defer`].
    Defer,
    /// See [`Action::ShedLower`].
    ShedLower,
    /// See [`Action::CapOutput`].
    CapOutput,
    /// See [`Action::ReasoningOff`].
    ReasoningOff,
    /// See [`Action::Spill`].
    Spill,
}

impl ActionKind {
    /// Every kind, in the order of the documentation.
    pub const ALL: [ActionKind; 5] =
        [ActionKind::Defer, ActionKind::ShedLower, ActionKind::CapOutput, ActionKind::ReasoningOff, ActionKind::Spill];

    /// The word in settings, labels and headers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            ActionKind::Defer => "defer",
            ActionKind::ShedLower => "shed_lower",
            ActionKind::CapOutput => "cap_output",
            ActionKind::ReasoningOff => "reasoning_off",
            ActionKind::Spill => "spill",
        }
    }
}

impl Action {
    /// Its kind.
    #[must_use]
    pub const fn kind(self) -> ActionKind {
        match self {
            Action::Defer => ActionKind::Defer,
            Action::ShedLower => ActionKind::ShedLower,
            Action::CapOutput(_) => ActionKind::CapOutput,
            Action::ReasoningOff => ActionKind::ReasoningOff,
            Action::Spill => ActionKind::Spill,
        }
    }
}

/// A set of action kinds: those applied to one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActionKinds(u8);

impl ActionKinds {
    /// Adds a kind.
    pub const fn add(&mut self, kind: ActionKind) {
        self.0 |= 1 << kind as u8;
    }

    /// Whether the kind is in the set.
    #[must_use]
    pub const fn has(self, kind: ActionKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The kinds in the set, in the order of [`ActionKind::ALL`].
    pub fn iter(self) -> impl Iterator<Item = ActionKind> {
        ActionKind::ALL.into_iter().filter(move |kind| self.has(*kind))
    }
}

/// Bounds on a class's measurements. A measure without a bound is ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadBounds {
    /// Burn rate.
    pub burn_rate: Option<f64>,
    /// Expected wait for a seat.
    pub queue_wait: Option<Duration>,
    /// Requests waiting for its pools.
    pub queue_depth: Option<u64>,
}

/// Measurements of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadMeasures {
    /// Burn rate without shed requests; `None` if too few were judged, which counts as 0.
    pub burn_rate: Option<f64>,
    /// Expected wait for a seat; `None` if unknown.
    pub queue_wait: Option<Duration>,
    /// Requests waiting for its pools.
    pub queue_depth: u64,
}

impl LoadBounds {
    fn any(&self, measured: &LoadMeasures, beyond: impl Fn(f64, f64) -> bool) -> bool {
        let seconds = |length: Duration| length.as_secs_f64();
        let pairs = [
            (measured.burn_rate.unwrap_or(0.0), self.burn_rate),
            (measured.queue_wait.map_or(0.0, seconds), self.queue_wait.map(seconds)),
            (measured.queue_depth as f64, self.queue_depth.map(|depth| depth as f64)),
        ];
        pairs.into_iter().any(|(value, bound)| bound.is_some_and(|bound| beyond(value, bound)))
    }

    /// Whether a measure exceeds its bound.
    #[must_use]
    pub fn is_exceeded(&self, measured: &LoadMeasures) -> bool {
        self.any(measured, |value, bound| value > bound)
    }

    /// Whether all measures are below their bounds.
    #[must_use]
    pub fn is_kept(&self, measured: &LoadMeasures) -> bool {
        !self.any(measured, |value, bound| value >= bound)
    }
}

/// One overload level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverloadLevel {
    /// Its action.
    pub action: Action,
    /// Entered when one of these is exceeded.
    pub enter: LoadBounds,
    /// Left when all of these are kept: the same measures, with bounds not above those of `enter`.
    pub leave: LoadBounds,
    /// Shortest time between entering it, or returning to it, and the next change.
    pub hold: Duration,
}

impl OverloadLevel {
    /// Default of `hold`.
    pub const HOLD: Duration = Duration::from_secs(10);
}

/// Actions in force for requests of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActiveActions {
    /// Number of levels in force.
    pub level: usize,
    /// Requests queue behind all others.
    pub defer: bool,
    /// Lower priorities are shed from its pools.
    pub shed_lower: bool,
    /// Largest output cap.
    pub cap: Option<Tokens>,
    /// Requests are sent without extended reasoning.
    pub reasoning_off: bool,
    /// Requests go to the next pool first.
    pub spill: bool,
}

/// Actions applied to one request, and what was in force for its class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppliedActions {
    /// The actions applied.
    pub kinds: ActionKinds,
    /// Levels of its class in force.
    pub level: usize,
    /// The cap they set.
    pub cap: Option<Tokens>,
}

impl ActiveActions {
    /// The first `level` levels combined.
    #[must_use]
    pub fn at(levels: &[OverloadLevel], level: usize) -> Self {
        let level = level.min(levels.len());
        let mut all = ActiveActions { level, ..ActiveActions::default() };
        for level in &levels[..level] {
            match level.action {
                Action::Defer => all.defer = true,
                Action::ShedLower => all.shed_lower = true,
                Action::CapOutput(cap) => all.cap = Some(all.cap.map_or(cap, |other| other.min(cap))),
                Action::ReasoningOff => all.reasoning_off = true,
                Action::Spill => all.spill = true,
            }
        }
        all
    }
}

/// The current level of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverloadController {
    /// Number of levels in force.
    level: usize,
    /// Time of the last change.
    changed: Option<Tick>,
    by_hand: ManualOverride,
}

/// Whether an operator has fixed the level, so that measurements do not move it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ManualOverride {
    #[default]
    No,
    /// Until reset.
    Held,
    /// Until this moment at the latest.
    Until(Tick),
}

impl OverloadController {
    /// Number of levels in force.
    #[must_use]
    pub const fn level(&self) -> usize {
        self.level
    }

    /// Whether an operator has fixed the level.
    #[must_use]
    pub const fn is_forced(&self) -> bool {
        !matches!(self.by_hand, ManualOverride::No)
    }

    /// End of the operator's setting; `None` if unlimited.
    #[must_use]
    pub const fn forced_until(&self) -> Option<Tick> {
        match self.by_hand {
            ManualOverride::Until(end) => Some(end),
            ManualOverride::No | ManualOverride::Held => None,
        }
    }

    /// Moves at most one level by the measurements, or ends an expired operator's setting. Returns whether
    /// anything changed.
    pub fn evaluate(&mut self, levels: &[OverloadLevel], measured: &LoadMeasures, at: Tick) -> bool {
        let ended = self.forced_until().filter(|end| *end <= at);
        if let Some(end) = ended {
            self.release(end);
        }
        self.moves(levels, measured, at) || ended.is_some()
    }

    fn moves(&mut self, levels: &[OverloadLevel], measured: &LoadMeasures, at: Tick) -> bool {
        if self.is_forced() || at < self.free_at(levels) {
            return false;
        }
        let top = self.level.checked_sub(1).and_then(|top| levels.get(top));
        if levels.get(self.level).is_some_and(|next| next.enter.is_exceeded(measured)) {
            self.move_to(self.level + 1, at)
        } else if top.is_some_and(|top| top.leave.is_kept(measured)) {
            self.move_to(self.level - 1, at)
        } else {
            false
        }
    }

    /// When the top level may change. Level 0 may change at any time.
    #[must_use]
    pub fn free_at(&self, levels: &[OverloadLevel]) -> Tick {
        let top = self.level.checked_sub(1).and_then(|top| levels.get(top));
        self.changed.zip(top).map_or(Tick::ZERO, |(since, top)| since + top.hold)
    }

    /// Earliest moment at which the class stops shedding lower priorities: levels are left one by one, each
    /// after its hold. `None` if an operator decides.
    #[must_use]
    pub fn sheds_until(&self, levels: &[OverloadLevel]) -> Option<Tick> {
        let since = match self.by_hand {
            ManualOverride::No => self.changed,
            ManualOverride::Held => return None,
            ManualOverride::Until(end) => Some(end),
        };
        let in_force = &levels[..self.level.min(levels.len())];
        let lowest = in_force.iter().position(|level| level.action == Action::ShedLower);
        let holds = lowest.map_or(Duration::ZERO, |lowest| in_force[lowest..].iter().map(|level| level.hold).sum());
        Some(since.map_or(Tick::ZERO, |since| since + holds))
    }

    /// An operator sets the level until `until`, or until reset.
    pub fn force(&mut self, level: usize, until: Option<Tick>, at: Tick) {
        self.by_hand = until.map_or(ManualOverride::Held, ManualOverride::Until);
        self.move_to(level, at);
    }

    /// Resets it: measurements move it again from here.
    pub fn release(&mut self, at: Tick) {
        if std::mem::take(&mut self.by_hand) != ManualOverride::No {
            self.changed = Some(at);
        }
    }

    /// Adapts to a new number of configured levels.
    pub fn fit(&mut self, levels: usize, at: Tick) {
        if self.level > levels {
            self.move_to(levels, at);
        }
    }

    fn move_to(&mut self, level: usize, at: Tick) -> bool {
        let moves = self.level != level;
        if moves {
            self.level = level;
            self.changed = Some(at);
        }
        moves
    }
}

//! What is given up under load: the overload levels of one class, entered and left one by one.
//!
//! Pure: measures and moments go in, the level comes out. The operator orders the levels; all
//! up to the present one are in force together. A level is entered when one of its measures
//! is above its bound and left when all of them are below lower ones. After each change the
//! level on top stands for its `hold`, in both directions: it gets that long to show what it
//! does. So with measures that stand still the level moves one way and then not at all
//! ([`Ladder::weigh`]), and it never changes twice within a `hold`.
//!
//! The burn rate that goes in leaves out what was shed: shedding would otherwise hold the
//! level that sheds. What the actions mean for a request is the gateway's business.

#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::units::{Tick, Tokens};

/// What a level does to requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Requests of the class wait behind everybody else.
    Defer,
    /// Requests of lower ranks are refused where they would go to a pool of this class.
    ShedLower,
    /// An answer of the class has at most so many output tokens.
    CapOutput(Tokens),
    /// Requests of the class are sent without extended reasoning.
    ReasoningOff,
    /// Requests of the class go to the next pool of their route first.
    Spill,
}

/// The kind of an [`Action`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
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

impl Kind {
    /// All of them, in the order of the documentation.
    pub const ALL: [Kind; 5] = [Kind::Defer, Kind::ShedLower, Kind::CapOutput, Kind::ReasoningOff, Kind::Spill];

    /// The word in settings, labels and headers.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Defer => "defer",
            Kind::ShedLower => "shed_lower",
            Kind::CapOutput => "cap_output",
            Kind::ReasoningOff => "reasoning_off",
            Kind::Spill => "spill",
        }
    }
}

impl Action {
    /// Its kind.
    #[must_use]
    pub const fn kind(self) -> Kind {
        match self {
            Action::Defer => Kind::Defer,
            Action::ShedLower => Kind::ShedLower,
            Action::CapOutput(_) => Kind::CapOutput,
            Action::ReasoningOff => Kind::ReasoningOff,
            Action::Spill => Kind::Spill,
        }
    }
}

/// Some kinds of actions: those that were done to one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    /// One more.
    pub const fn add(&mut self, kind: Kind) {
        self.0 |= 1 << kind as u8;
    }

    /// Whether it is among them.
    #[must_use]
    pub const fn has(self, kind: Kind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// All of them, in the order of [`Kind::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Kind> {
        Kind::ALL.into_iter().filter(move |kind| self.has(*kind))
    }
}

/// Bounds on what is measured of a class. A measure without one has no say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bounds {
    /// How many times too fast its budget of misses is used.
    pub burn_rate: Option<f64>,
    /// How long one of its requests would wait for a seat.
    pub queue_wait: Option<Duration>,
    /// Requests that wait in front of its pools.
    pub queue_depth: Option<u64>,
}

/// What is measured of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// How many times too fast its budget of misses is used, requests that were shed left out;
    /// `None`: too few were judged to tell. Then nothing burns.
    pub burn_rate: Option<f64>,
    /// How long one of its requests would wait for a seat; `None`: nobody can tell.
    pub queue_wait: Option<Duration>,
    /// Requests that wait in front of its pools.
    pub queue_depth: u64,
}

impl Bounds {
    fn any(&self, measured: &Measured, beyond: impl Fn(f64, f64) -> bool) -> bool {
        let seconds = |length: Duration| length.as_secs_f64();
        let pairs = [
            (measured.burn_rate.unwrap_or(0.0), self.burn_rate),
            (measured.queue_wait.map_or(0.0, seconds), self.queue_wait.map(seconds)),
            (measured.queue_depth as f64, self.queue_depth.map(|depth| depth as f64)),
        ];
        pairs.into_iter().any(|(value, bound)| bound.is_some_and(|bound| beyond(value, bound)))
    }

    /// Whether some measure lies above its bound.
    #[must_use]
    pub fn is_exceeded(&self, measured: &Measured) -> bool {
        self.any(measured, |value, bound| value > bound)
    }

    /// Whether all measures lie below their bounds.
    #[must_use]
    pub fn is_kept(&self, measured: &Measured) -> bool {
        !self.any(measured, |value, bound| value >= bound)
    }
}

/// One level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// What it does.
    pub action: Action,
    /// It is entered when one of these is exceeded.
    pub enter: Bounds,
    /// It is left when all of these are kept: the same measures, no bound above that of `enter`.
    pub leave: Bounds,
    /// How long nothing changes after it was entered, or became the highest again.
    pub hold: Duration,
}

impl Level {
    /// Default of `hold`.
    pub const HOLD: Duration = Duration::from_secs(10);
}

/// What is in force for requests of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InForce {
    /// So many levels.
    pub level: usize,
    /// They wait behind everybody else.
    pub defer: bool,
    /// Requests of lower ranks are refused on its pools.
    pub shed_lower: bool,
    /// Their answers have at most so many output tokens.
    pub cap: Option<Tokens>,
    /// They are sent without extended reasoning.
    pub reasoning_off: bool,
    /// They go to the next pool first.
    pub spill: bool,
}

/// What was done to one request, and what was in force for its class meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Degraded {
    /// What was done.
    pub kinds: Kinds,
    /// Levels of its class that were in force.
    pub level: usize,
    /// The cap that they set.
    pub cap: Option<Tokens>,
}

impl InForce {
    /// The first `level` of these levels together.
    #[must_use]
    pub fn at(levels: &[Level], level: usize) -> Self {
        let level = level.min(levels.len());
        let mut all = InForce { level, ..InForce::default() };
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

/// Which level a class is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ladder {
    /// Levels in force; 0: none.
    level: usize,
    /// The last change.
    changed: Option<Tick>,
    by_hand: ByHand,
}

/// Whether an operator holds a level where it is: then measures do not move it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ByHand {
    #[default]
    No,
    /// Until it is handed back.
    Held,
    /// Until then, at the latest.
    Until(Tick),
}

impl Ladder {
    /// Levels in force.
    #[must_use]
    pub const fn level(&self) -> usize {
        self.level
    }

    /// Whether an operator holds it where it is.
    #[must_use]
    pub const fn is_forced(&self) -> bool {
        !matches!(self.by_hand, ByHand::No)
    }

    /// Until when an operator holds it; none where that has no end.
    #[must_use]
    pub const fn forced_until(&self) -> Option<Tick> {
        match self.by_hand {
            ByHand::Until(end) => Some(end),
            ByHand::No | ByHand::Held => None,
        }
    }

    /// Moves at most one level by what is measured, and is nobody's any more when the operator's
    /// time is over. Returns whether anything changed.
    pub fn weigh(&mut self, levels: &[Level], measured: &Measured, at: Tick) -> bool {
        let ended = self.forced_until().filter(|end| *end <= at);
        if let Some(end) = ended {
            self.release(end);
        }
        self.moves(levels, measured, at) || ended.is_some()
    }

    fn moves(&mut self, levels: &[Level], measured: &Measured, at: Tick) -> bool {
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

    /// When the level on top may change. Level 0 may be left at any time.
    #[must_use]
    pub fn free_at(&self, levels: &[Level]) -> Tick {
        let top = self.level.checked_sub(1).and_then(|top| levels.get(top));
        self.changed.zip(top).map_or(Tick::ZERO, |(since, top)| since + top.hold)
    }

    /// When the class can have stopped shedding lower ranks, at the earliest: levels are left one
    /// by one, each after its hold. None where an operator decides.
    #[must_use]
    pub fn sheds_until(&self, levels: &[Level]) -> Option<Tick> {
        let since = match self.by_hand {
            ByHand::No => self.changed,
            ByHand::Held => return None,
            ByHand::Until(end) => Some(end),
        };
        let in_force = &levels[..self.level.min(levels.len())];
        let lowest = in_force.iter().position(|level| level.action == Action::ShedLower);
        let holds = lowest.map_or(Duration::ZERO, |lowest| in_force[lowest..].iter().map(|level| level.hold).sum());
        Some(since.map_or(Tick::ZERO, |since| since + holds))
    }

    /// An operator sets the level, and holds it there: until then, or until it is released.
    pub fn force(&mut self, level: usize, until: Option<Tick>, at: Tick) {
        self.by_hand = until.map_or(ByHand::Held, ByHand::Until);
        self.move_to(level, at);
    }

    /// It moves by what is measured again, from where it is.
    pub fn release(&mut self, at: Tick) {
        if std::mem::take(&mut self.by_hand) != ByHand::No {
            self.changed = Some(at);
        }
    }

    /// The settings have so many levels now.
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

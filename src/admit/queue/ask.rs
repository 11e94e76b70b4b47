//! What is asked of the scheduler, and what it answers.

use std::time::Duration;

use crate::units::{Priority, TenantId, Tick, Tokens};

/// One request that wants a seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Who asks: seats of a rank are shared out among its tenants by tokens.
    pub tenant: TenantId,
    /// The rank of its class.
    pub rank: Priority,
    /// When its head arrived.
    pub arrival: Tick,
    /// What its class promises, as far as the order depends on it.
    pub aim: Aim,
    /// The work expected: estimate of the prompt and the output reserved. Counted as at least
    /// one token.
    pub tokens: Tokens,
    /// Of these the prompt, which has to be read before the first token comes.
    pub prompt: Tokens,
    /// When it has waited too long. From this moment on it is refused; only a seat that is free
    /// when it is offered it still gets.
    pub leave_by: Tick,
    /// What happens when it can no longer make it.
    pub when_hopeless: WhenHopeless,
    /// Whether it goes to its rank's turn or, beyond its tenant's limits or deferred, behind everybody.
    pub standing: Standing,
}

/// The promise that a request's deadline comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// A stream whose first token is due.
    FirstToken {
        /// From arrival to the first token, at most.
        within: Duration,
        /// Predicted time from a seat to the first token; zero where nothing is known.
        lead: Duration,
    },
    /// An answer that is due as a whole: no threshold for the first token, or no stream.
    Whole {
        /// From arrival to the last byte, at most.
        within: Duration,
        /// Predicted time from a seat to the last byte; zero where nothing is known.
        service: Duration,
    },
    /// A class with no objective: behind those that have one, by arrival.
    Whenever,
}

/// What a class wants for a request that can no longer keep its promise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenHopeless {
    /// It steps behind those of its rank that still can.
    #[default]
    Demote,
    /// It is refused, unless it finds a free seat on arrival.
    Shed,
    /// Nothing: it keeps its place.
    Serve,
}

/// Whether a request stands in its rank or behind all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Within its tenant's limits.
    #[default]
    WithinLimits,
    /// Beyond them, or deferred by an overload level: served behind everybody else while there is
    /// room.
    OverLimit,
}

impl Standing {
    /// Where an engine that schedules by priority puts a request of this rank; the lower goes
    /// first. Whoever is over a limit comes behind everybody within.
    #[must_use]
    pub const fn engine_priority(self, rank: Priority) -> i64 {
        let behind = match self {
            Standing::WithinLimits => 0,
            Standing::OverLimit => Priority::ALL.len() as i64,
        };
        behind + rank as i64
    }
}

/// Where a request stands among others of its kind: the earlier goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    By(Tick),
    /// No deadline, by arrival.
    Whenever(Tick),
}

impl Aim {
    /// The deadline that orders requests inside a rank; none without an objective.
    #[must_use]
    pub fn deadline(self, arrival: Tick) -> Option<Tick> {
        match self {
            Aim::FirstToken { within, .. } => Some(arrival + within),
            Aim::Whole { within, service } => Some(before(arrival + within, service)),
            Aim::Whenever => None,
        }
    }

    /// The last moment at which a seat still keeps the promise, as far as it can be predicted.
    /// After it the request is hopeless.
    #[must_use]
    pub fn last_call(self, arrival: Tick) -> Option<Tick> {
        match self {
            Aim::FirstToken { within, lead } => Some(before(arrival + within, lead)),
            Aim::Whole { .. } | Aim::Whenever => self.deadline(arrival),
        }
    }

    pub(super) fn due(self, arrival: Tick) -> Due {
        self.deadline(arrival).map_or(Due::Whenever(arrival), Due::By)
    }
}

fn before(moment: Tick, length: Duration) -> Tick {
    let nanos = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    Tick::from_nanos(moment.as_nanos().saturating_sub(nanos))
}

/// Names one request in one scheduler: while it waits and while it holds a seat. Later offers
/// have greater tickets; none is ever given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) u64);

/// What the caller has to do now. Tickets named in neither list stay as they were.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Moves {
    /// These hold a seat from now on, until they are released.
    pub admitted: Vec<Ticket>,
    /// These are turned away and forgotten.
    pub refused: Vec<TurnedAway>,
}

/// A request that gets no seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnedAway {
    /// Which.
    pub ticket: Ticket,
    /// Why.
    pub why: Why,
    /// Whole seconds, at least one, until those that wait now in its rank and before it will
    /// have been admitted, at the rate measured. None where there are no seats or no rate.
    pub retry_after: Option<Duration>,
}

/// Why a request is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// No place to wait in, and none that it may take from another.
    QueueFull,
    /// Another took its place in a full queue: one of a higher rank, or one of a tenant that
    /// has fewer waiting in the same rank.
    PushedOut,
    /// It reached `leave_by`.
    WaitedTooLong,
    /// It can no longer make it, and its class says `shed`.
    Hopeless,
}

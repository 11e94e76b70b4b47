//! Inputs and outputs of the scheduler.

use std::time::Duration;

use crate::types::{Priority, TenantId, Tick, Tokens};

/// A request for a seat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRequest {
    /// The tenant; seats of a priority are shared among tenants by tokens.
    pub tenant: TenantId,
    /// The priority of its class.
    pub priority: Priority,
    /// When its head arrived.
    pub arrival: Tick,
    /// The objective that determines its deadline.
    pub deadline: Deadline,
    /// Expected work: prompt estimate plus reserved output. Counted as at least one
    /// token.
    pub tokens: Tokens,
    /// The prompt's part of it, which is prefilled before the first token.
    pub prompt: Tokens,
    /// When it is rejected for waiting too long. It can still take a seat that is free when it is
    /// offered.
    pub timeout_at: Tick,
    /// What happens when its deadline becomes infeasible.
    pub when_hopeless: WhenHopeless,
    /// Whether it queues in its priority or, beyond its tenant's limits or deferred, behind all.
    pub limit_state: LimitState,
}

/// The objective that a request's deadline comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// A stream with a TTFT objective.
    FirstToken {
        /// From arrival to the first token.
        within: Duration,
        /// Predicted time from a seat to the first token; zero if unknown.
        lead: Duration,
    },
    /// A response with an objective for its end: no TTFT threshold, or no stream.
    Whole {
        /// From arrival to the last byte.
        within: Duration,
        /// Predicted time from a seat to the last byte; zero if unknown.
        service: Duration,
    },
    /// A class without objectives: behind those that have one, by arrival.
    Whenever,
}

/// What a class wants for a request whose deadline has become infeasible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenHopeless {
    /// It is demoted behind feasible requests of its priority.
    #[default]
    Demote,
    /// It is rejected, unless a seat is free at arrival.
    Shed,
    /// Nothing: it keeps its position.
    Serve,
}

/// Whether a request queues in its priority or behind all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LimitState {
    /// Within its tenant's limits.
    #[default]
    WithinLimits,
    /// Beyond them, or deferred by an overload level: served behind all others, while there is
    /// room.
    OverLimit,
}

impl LimitState {
    /// The `priority` for an engine that schedules by it; lower goes first. Requests over a limit come behind
    /// all within.
    #[must_use]
    pub const fn engine_priority(self, priority: Priority) -> i64 {
        let behind = match self {
            LimitState::WithinLimits => 0,
            LimitState::OverLimit => Priority::ALL.len() as i64,
        };
        behind + priority as i64
    }
}

/// The sort key of a request among others of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum QueueKey {
    By(Tick),
    /// No deadline: by arrival.
    Whenever(Tick),
}

impl Deadline {
    /// The deadline that orders requests within a priority; `None` without an objective.
    #[must_use]
    pub fn deadline(self, arrival: Tick) -> Option<Tick> {
        match self {
            Deadline::FirstToken { within, .. } => Some(arrival + within),
            Deadline::Whole { within, service } => Some(before(arrival + within, service)),
            Deadline::Whenever => None,
        }
    }

    /// The last moment at which a seat can still meet the deadline, as far as predictable. The request is
    /// infeasible after it.
    #[must_use]
    pub fn latest_start(self, arrival: Tick) -> Option<Tick> {
        match self {
            Deadline::FirstToken { within, lead } => Some(before(arrival + within, lead)),
            Deadline::Whole { .. } | Deadline::Whenever => self.deadline(arrival),
        }
    }

    pub(super) fn due(self, arrival: Tick) -> QueueKey {
        self.deadline(arrival).map_or(QueueKey::Whenever(arrival), QueueKey::By)
    }
}

fn before(moment: Tick, length: Duration) -> Tick {
    let nanos = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    Tick::from_nanos(moment.as_nanos().saturating_sub(nanos))
}

/// Identifies one request in one scheduler while it waits or has a seat. Increasing, and never
/// reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) u64);

/// Decisions for the caller to apply. Tickets in neither list are unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Decisions {
    /// Admitted: these hold a seat until released.
    pub admitted: Vec<Ticket>,
    /// Rejected and forgotten.
    pub refused: Vec<Rejected>,
}

/// A rejected request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Which.
    pub ticket: Ticket,
    /// The reason.
    pub why: RejectReason,
    /// Whole seconds, at least one, until the requests now before it will have been admitted, at the measured
    /// rate. `None` without seats or a measured rate.
    pub retry_after: Option<Duration>,
}

/// Why a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// The queue is full, and no other request may be evicted for it.
    QueueFull,
    /// Evicted from a full queue by one of a higher priority, or of a tenant with fewer waiting requests in the
    /// same priority.
    PushedOut,
    /// It reached `leave_by`.
    WaitedTooLong,
    /// Its deadline is infeasible, and its class says `shed`.
    Hopeless,
}

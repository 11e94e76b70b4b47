//! Waiting for a seat in a pool of the route.
//!
//! A request waits in the queue of the first pool of its route that has an engine available. It
//! goes on to a further pool, forward only, while it waits (or at once), by the rules of
//! [`admit::spill`](crate::admit::spill): this file measures the queues and takes the seats. A request that
//! was called, and finds that no engine of its pool can be connected to, goes on in the same way: no
//! engine has had it yet. Every request begins with the first pool again, so traffic returns there
//! as soon as its queue is short enough.
//!
//! A pool without an available engine keeps one seat: for the request that finds out whether that
//! is still so. The others wait for its result.

use std::time::Duration;

use super::early::EarlyHeadSlot;
use super::house::GatewayState;
use super::overload;
use super::promise::PoolHandle;
use super::reply;
use super::request::RequestContext;
use crate::admit::desk::{Offered, Seat, Turn};
use crate::admit::queue::{Ask, TurnedAway, Why};
use crate::admit::spill::{CurrentQueue, SpillSearch, TimeLeft};
use crate::forward::GatewayHeaders;
use crate::record::ActiveRequest;
use crate::refuse::Rejection;
use crate::units::{PoolId, Tick};

/// How often a request that could go elsewhere looks whether it should.
const LOOK: Duration = Duration::from_millis(100);

/// A request that has got its seat, or needs none.
pub struct Admitted {
    /// None if the pool has no limit.
    pub seat: Option<Seat>,
    /// Which pool of the route.
    pub first: usize,
    /// The moment at which it got it; none if that was at once.
    pub since: Option<Tick>,
}

impl Admitted {
    /// No pool has a limit.
    pub const AT_ONCE: Admitted = Admitted { seat: None, first: 0, since: None };
}

impl GatewayState {
    /// Waits for a seat in a pool of the route.
    ///
    /// # Errors
    /// The queue has no place, or none for so long; the gateway drains.
    pub(super) async fn seat(
        &self,
        cursor: &PoolCursor<'_>,
        active: &mut ActiveRequest,
    ) -> Result<Admitted, Rejection> {
        cursor.seat_from(NextPool::Queue(cursor.begins()), active).await
    }

    /// Waits for a seat in a pool behind `from`, which has been given up. None if none of them has
    /// a place for it.
    pub(super) async fn seat_behind(
        &self,
        cursor: &PoolCursor<'_>,
        from: usize,
        active: &mut ActiveRequest,
    ) -> Option<Result<Admitted, Rejection>> {
        let place = cursor.onward(from)?;
        Some(cursor.seat_from(place, active).await)
    }
}

/// A request on its way along the pools of its route.
pub struct PoolCursor<'a> {
    /// The gateway, which knows the engines.
    pub(super) gateway: &'a GatewayState,
    /// The request, whose class knows the pools.
    request: &'a RequestContext<'a>,
    /// What it asks of a queue.
    pub(super) ask: &'a Ask,
    /// The head that its client gets while it waits here, if it gets one.
    early: Option<EarlyHead<'a>>,
}

/// Where a request goes on to.
enum NextPool {
    /// A pool without a limit, or with a free seat, which it has now.
    Free(usize, Option<Seat>),
    /// A pool whose queue is short enough.
    Queue(usize),
}

impl NextPool {
    const fn pool(&self) -> usize {
        match self {
            NextPool::Free(at, _) | NextPool::Queue(at) => *at,
        }
    }
}

/// Why a request no longer waits where it did.
enum WaitEnd {
    Away(TurnedAway),
    Onward(NextPool),
    Drained,
}

impl<'a> PoolCursor<'a> {
    /// At the beginning of its route.
    pub(super) fn new(gateway: &'a GatewayState, request: &'a RequestContext<'a>, ask: &'a Ask) -> Self {
        PoolCursor { gateway, request, ask, early: EarlyHead::of(request) }
    }

    fn pools(&self) -> &'a [PoolId] {
        &self.request.routed.pools
    }

    fn pool(&self, at: usize) -> &'a PoolHandle {
        self.request.policy.pool(&self.pools()[at])
    }

    fn now(&self) -> Tick {
        self.gateway.clock.now()
    }

    fn available(&self, at: usize) -> usize {
        self.gateway.engines_of(&self.pools()[at], self.pool(at).desk.as_deref())
    }

    /// The first pool that has an engine available; the first of all if none has.
    fn begins(&self) -> usize {
        (0..self.pools().len()).find(|at| self.available(*at) > 0).unwrap_or(0)
    }

    /// Whether its client has an early head.
    pub(super) fn has_head(&self) -> bool {
        self.early.as_ref().is_some_and(|early| early.slot.is_out())
    }

    /// Takes a place, or waits for one, until it is seated or turned away.
    async fn seat_from(&self, mut place: NextPool, active: &mut ActiveRequest) -> Result<Admitted, Rejection> {
        let begins = place.pool();
        loop {
            let at = place.pool();
            if at != begins {
                active.spills(&self.pools()[at]);
            }
            if let NextPool::Free(at, seat) = place {
                return Ok(Admitted { seat, first: at, since: Some(self.now()) });
            }
            let went_on = (at != begins).then(|| self.now());
            let Some(desk) = &self.pool(at).desk else {
                return Ok(Admitted { seat: None, first: at, since: went_on });
            };
            let ended = match desk.offer(self.ask) {
                Offered::Seated(seat) => return Ok(Admitted { seat: Some(seat), first: at, since: went_on }),
                Offered::Away(away) if away.why == Why::Hopeless => WaitEnd::Away(away),
                Offered::Away(away) => self.onward_or(at, away),
                Offered::Waits(turn) => match self.wait_for_seat(at, turn, active).await {
                    Ok(seat) => return Ok(Admitted { seat: Some(seat), first: at, since: Some(self.now()) }),
                    Err(ended) => ended,
                },
            };
            place = match ended {
                WaitEnd::Onward(place) => place,
                WaitEnd::Drained => return Err(Rejection::Draining),
                WaitEnd::Away(away) => return Err(rejection(&away, &self.pools()[at])),
            };
        }
    }

    /// Waits in the queue of one pool until it has a seat there, or does not wait there any more.
    async fn wait_for_seat(&self, at: usize, turn: Turn, active: &mut ActiveRequest) -> Result<Seat, WaitEnd> {
        active.waits(&self.pools()[at]);
        let seat = match self.wait(at, turn, active).await {
            Ok(seat) => seat,
            Err(WaitEnd::Away(away)) if away.why == Why::PushedOut => return Err(self.onward_or(at, away)),
            Err(ended) => return Err(ended),
        };
        // Called into a pool whose engines have gone meanwhile: further ones may be there.
        if self.available(at) == 0
            && let Some(place) = self.onward(at)
        {
            drop(seat);
            return Err(WaitEnd::Onward(place));
        }
        active.called();
        Ok(seat)
    }

    /// Waits in the queue of one pool, and looks whether it should go on to a further one.
    async fn wait(&self, at: usize, mut turn: Turn, active: &mut ActiveRequest) -> Result<Seat, WaitEnd> {
        let since = self.now();
        loop {
            let look = (at + 1 < self.pools().len()).then(|| self.now());
            if let Some(place) = look.and_then(|now| self.should_go_on(at, &turn, since, now)) {
                return Err(WaitEnd::Onward(place));
            }
            let head = self.early.as_ref().and_then(|early| Some((early, early.due()?)));
            tokio::select! {
                biased;
                // First: the limit also cuts those that sit, and nobody may begin in their seats.
                () = self.request.arrived.client.drain_over() => return Err(WaitEnd::Drained),
                called = turn.come() => return called.map_err(WaitEnd::Away),
                () = self.gateway.clock.sleep_until(head.map(|(_, due)| due)) => {
                    head.into_iter().for_each(|(early, _)| early.send(active));
                }
                () = self.gateway.clock.sleep_until(look.map(|now| now + LOOK)) => {}
            }
        }
    }

    /// The pool to go on to, if the expected wait in this queue is too long.
    fn should_go_on(&self, at: usize, turn: &Turn, since: Tick, now: Tick) -> Option<NextPool> {
        let has_engine = self.available(at) > 0;
        let expected_wait = if has_engine { turn.expected_wait() } else { None };
        let queue = CurrentQueue { has_engine, expected_wait, waited: now - since };
        self.search(at, SpillSearch::of_queue(queue, self.left(now))?)
    }

    /// The next pool of the route that has a place for a request that can never start where it is.
    fn onward(&self, from: usize) -> Option<NextPool> {
        self.search(from, SpillSearch::stranded(self.left(self.now())))
    }

    fn onward_or(&self, from: usize, away: TurnedAway) -> WaitEnd {
        self.onward(from).map_or(WaitEnd::Away(away), WaitEnd::Onward)
    }

    /// How much of its time is left.
    fn left(&self, now: Tick) -> TimeLeft {
        let Ask { aim, arrival, leave_by, .. } = self.ask;
        let latest_start = aim.last_call(*arrival).map_or(*leave_by, |last| last.min(*leave_by));
        TimeLeft { to_start: latest_start - now, to_leave: *leave_by - now }
    }

    /// Measures the pools behind `from`, and takes a free seat if one of them has it.
    fn search(&self, from: usize, mut search: SpillSearch) -> Option<NextPool> {
        for at in from + 1..self.pools().len() {
            if self.available(at) == 0 {
                continue;
            }
            let Some(desk) = &self.pool(at).desk else { return Some(NextPool::Free(at, None)) };
            if let Some(seat) = desk.take_free_seat(self.ask) {
                return Some(NextPool::Free(at, Some(seat)));
            }
            if search.accepts(at, desk.expected_wait_of(self.ask)) {
                return Some(NextPool::Queue(at));
            }
        }
        search.fallback().map(NextPool::Queue)
    }
}

fn rejection(away: &TurnedAway, pool: &PoolId) -> Rejection {
    let (pool, retry_after) = (pool.clone(), away.retry_after.map(|wait| wait.as_secs()));
    match away.why {
        Why::QueueFull => Rejection::QueueFull { pool, retry_after },
        Why::PushedOut => Rejection::PushedOut { pool, retry_after },
        Why::WaitedTooLong => Rejection::QueueTimeout { pool, retry_after },
        Why::Hopeless => Rejection::Hopeless { pool, retry_after },
    }
}

/// A head that goes out while the request still waits.
struct EarlyHead<'a> {
    slot: &'a EarlyHeadSlot,
    request: &'a RequestContext<'a>,
    /// Distance of the comments behind it.
    every: Duration,
}

impl<'a> EarlyHead<'a> {
    /// None for a class without `keepalive_seconds`, and for a response that is no stream.
    fn of(request: &'a RequestContext<'a>) -> Option<Self> {
        let slot = request.arrived.early_head.as_ref().filter(|_| request.streams_tokens())?;
        let every = request.policy.class.timeouts.keepalive?;
        Some(EarlyHead { slot, request, every })
    }

    /// The moment at which it is sent; none if it has been.
    fn due(&self) -> Option<Tick> {
        let due = self.request.arrived.arrival + self.request.policy.class.timeouts.hold_head;
        (!self.slot.is_out()).then_some(due)
    }

    /// Sends it, with what is known by now.
    fn send(&self, active: &mut ActiveRequest) {
        let (request, arrived) = (self.request, self.request.arrived);
        let mut head = reply::our_head();
        let own = GatewayHeaders {
            class: request.policy.shown.clone(),
            is_messages: request.endpoint.is_of_messages(),
            degraded: overload::shown(active.degradation()),
            ..GatewayHeaders::of(&arrived.id)
        };
        own.add_to(&mut head.headers);
        active.head_went_ahead(&arrived.client);
        self.slot.give(head, self.every);
    }
}

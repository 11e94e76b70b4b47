//! Waits for a seat in a pool of the route.
//!
//! A request waits in the queue of the first pool with an available engine. While it waits (or at once) it
//! may go on to a later pool, never back, by the rules of [`admit::spill`](crate::admit::spill); this file
//! measures the queues and takes the seats. A request that got its seat and finds that no engine of its
//! pool can be connected to goes on in the same way, because no engine has had it. Every request begins
//! with the first pool again, so traffic returns there as soon as its queue is short
//! enough.
//!
//! A pool without an available engine keeps one seat, for a request that finds out whether that is still
//! so. The others wait for its result.

use std::time::Duration;

use super::early_head::EarlyHeadSlot;
use super::local_reply;
use super::overload;
use super::request::RequestContext;
use super::snapshot::PoolHandle;
use super::state::GatewayState;
use crate::admit::pool_queue::{Admission, QueuedTicket, Seat};
use crate::admit::queue::{QueueRequest, RejectReason, Rejected};
use crate::admit::spill::{CurrentQueue, SpillSearch, TimeLeft};
use crate::forward::GatewayHeaders;
use crate::record::ActiveRequest;
use crate::reject::Rejection;
use crate::types::{PoolId, Tick};

/// Interval at which a request that could go elsewhere checks whether it should.
const LOOK: Duration = Duration::from_millis(100);

/// A request that has its seat, or needs none.
pub struct Admitted {
    /// `None` if the pool has no limit.
    pub seat: Option<Seat>,
    /// Index of the pool in the route.
    pub first: usize,
    /// When it got the seat; `None` if at once.
    pub since: Option<Tick>,
}

impl Admitted {
    /// Admitted without a limit.
    pub const AT_ONCE: Admitted = Admitted { seat: None, first: 0, since: None };
}

impl GatewayState {
    /// Waits for a seat in a pool of the route.
    ///
    /// # Errors
    /// The queue is full, the wait is too long, or the gateway drains.
    pub(super) async fn seat(
        &self,
        cursor: &PoolCursor<'_>,
        active: &mut ActiveRequest,
    ) -> Result<Admitted, Rejection> {
        cursor.seat_from(NextPool::Queue(cursor.begins()), active).await
    }

    /// Waits for a seat in a pool after `from`, which was given up. `None` if none has
    /// room.
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

/// A request's position along the pools of its route.
pub struct PoolCursor<'a> {
    /// The shared state, for the engines.
    pub(super) gateway: &'a GatewayState,
    /// The request.
    request: &'a RequestContext<'a>,
    /// Its entry for a queue.
    pub(super) queue_request: &'a QueueRequest,
    /// Its early head while it waits, if any.
    early: Option<EarlyHead<'a>>,
}

/// Next step of a request that leaves its queue.
enum NextPool {
    /// A pool without a limit, or with a free seat, which is taken.
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

/// Why a request stopped waiting.
enum WaitEnd {
    Away(Rejected),
    Onward(NextPool),
    Drained,
}

impl<'a> PoolCursor<'a> {
    /// At the start of its route.
    pub(super) fn new(
        gateway: &'a GatewayState,
        request: &'a RequestContext<'a>,
        queue_request: &'a QueueRequest,
    ) -> Self {
        PoolCursor { gateway, request, queue_request, early: EarlyHead::of(request) }
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
        self.gateway.engines_of(&self.pools()[at], self.pool(at).pool_queue.as_deref())
    }

    /// Index of the first pool with an available engine; 0 if none has.
    fn begins(&self) -> usize {
        (0..self.pools().len()).find(|at| self.available(*at) > 0).unwrap_or(0)
    }

    /// Whether its client has an early head.
    pub(super) fn has_head(&self) -> bool {
        self.early.as_ref().is_some_and(|early| early.slot.is_out())
    }

    /// Takes a seat, or waits for one, until admitted or rejected.
    async fn seat_from(&self, mut place: NextPool, active: &mut ActiveRequest) -> Result<Admitted, Rejection> {
        let begins = place.pool();
        loop {
            let at = place.pool();
            if at != begins {
                active.spilled(&self.pools()[at]);
            }
            if let NextPool::Free(at, seat) = place {
                return Ok(Admitted { seat, first: at, since: Some(self.now()) });
            }
            let went_on = (at != begins).then(|| self.now());
            let Some(pool_queue) = &self.pool(at).pool_queue else {
                return Ok(Admitted { seat: None, first: at, since: went_on });
            };
            let ended = match pool_queue.offer(self.queue_request) {
                Admission::Admitted(seat) => return Ok(Admitted { seat: Some(seat), first: at, since: went_on }),
                Admission::Rejected(away) if away.why == RejectReason::Hopeless => WaitEnd::Away(away),
                Admission::Rejected(away) => self.onward_or(at, away),
                Admission::Queued(queued) => match self.wait_for_seat(at, queued, active).await {
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

    /// Waits in the queue of one pool until it has a seat or leaves.
    async fn wait_for_seat(
        &self,
        at: usize,
        queued: QueuedTicket,
        active: &mut ActiveRequest,
    ) -> Result<Seat, WaitEnd> {
        active.queued(&self.pools()[at]);
        let seat = match self.wait(at, queued, active).await {
            Ok(seat) => seat,
            Err(WaitEnd::Away(away)) if away.why == RejectReason::PushedOut => return Err(self.onward_or(at, away)),
            Err(ended) => return Err(ended),
        };
        // The pool's engines became unavailable; a later pool may have some.
        if self.available(at) == 0
            && let Some(place) = self.onward(at)
        {
            drop(seat);
            return Err(WaitEnd::Onward(place));
        }
        active.dequeued();
        Ok(seat)
    }

    /// Waits in the queue of one pool, checking whether to go on to a later one.
    async fn wait(&self, at: usize, mut queued: QueuedTicket, active: &mut ActiveRequest) -> Result<Seat, WaitEnd> {
        let since = self.now();
        loop {
            let look = (at + 1 < self.pools().len()).then(|| self.now());
            if let Some(place) = look.and_then(|now| self.should_go_on(at, &queued, since, now)) {
                return Err(WaitEnd::Onward(place));
            }
            let head = self.early.as_ref().and_then(|early| Some((early, early.due()?)));
            tokio::select! {
                biased;
                // First, because the drain limit also cuts seated requests, whose seats must not be reused.
                () = self.request.arrived.client.drain_over() => return Err(WaitEnd::Drained),
                called = queued.wait() => return called.map_err(WaitEnd::Away),
                () = self.gateway.clock.sleep_until(head.map(|(_, due)| due)) => {
                    head.into_iter().for_each(|(early, _)| early.send(active));
                }
                () = self.gateway.clock.sleep_until(look.map(|now| now + LOOK)) => {}
            }
        }
    }

    /// The pool to go on to, if the expected wait here is too long.
    fn should_go_on(&self, at: usize, queued: &QueuedTicket, since: Tick, now: Tick) -> Option<NextPool> {
        let has_engine = self.available(at) > 0;
        let expected_wait = if has_engine { queued.expected_wait() } else { None };
        let queue = CurrentQueue { has_engine, expected_wait, waited: now - since };
        self.search(at, SpillSearch::of_queue(queue, self.left(now))?)
    }

    /// The next pool with room for a request that can never start here.
    fn onward(&self, from: usize) -> Option<NextPool> {
        self.search(from, SpillSearch::stranded(self.left(self.now())))
    }

    fn onward_or(&self, from: usize, away: Rejected) -> WaitEnd {
        self.onward(from).map_or(WaitEnd::Away(away), WaitEnd::Onward)
    }

    /// The rest of its time.
    fn left(&self, now: Tick) -> TimeLeft {
        let QueueRequest { deadline, arrival, timeout_at, .. } = self.queue_request;
        let latest_start = deadline.latest_start(*arrival).map_or(*timeout_at, |last| last.min(*timeout_at));
        TimeLeft { to_start: latest_start - now, to_leave: *timeout_at - now }
    }

    /// Measures the pools after `from`, and takes a free seat if one has it.
    fn search(&self, from: usize, mut search: SpillSearch) -> Option<NextPool> {
        for at in from + 1..self.pools().len() {
            if self.available(at) == 0 {
                continue;
            }
            let Some(pool_queue) = &self.pool(at).pool_queue else { return Some(NextPool::Free(at, None)) };
            if let Some(seat) = pool_queue.take_free_seat(self.queue_request) {
                return Some(NextPool::Free(at, Some(seat)));
            }
            if search.accepts(at, pool_queue.expected_wait_of(self.queue_request)) {
                return Some(NextPool::Queue(at));
            }
        }
        search.fallback().map(NextPool::Queue)
    }
}

fn rejection(away: &Rejected, pool: &PoolId) -> Rejection {
    let (pool, retry_after) = (pool.clone(), away.retry_after.map(|wait| wait.as_secs()));
    match away.why {
        RejectReason::QueueFull => Rejection::QueueFull { pool, retry_after },
        RejectReason::PushedOut => Rejection::PushedOut { pool, retry_after },
        RejectReason::WaitedTooLong => Rejection::QueueTimeout { pool, retry_after },
        RejectReason::Hopeless => Rejection::Hopeless { pool, retry_after },
    }
}

/// A head sent while the request still waits.
struct EarlyHead<'a> {
    slot: &'a EarlyHeadSlot,
    request: &'a RequestContext<'a>,
    /// Interval of the comments after it.
    every: Duration,
}

impl<'a> EarlyHead<'a> {
    /// `None` for a class without `keepalive_seconds`, and for a response that is not a stream.
    fn of(request: &'a RequestContext<'a>) -> Option<Self> {
        let slot = request.arrived.early_head.as_ref().filter(|_| request.streams_tokens())?;
        let every = request.policy.class.timeouts.keepalive?;
        Some(EarlyHead { slot, request, every })
    }

    /// When it is due; `None` once sent.
    fn due(&self) -> Option<Tick> {
        let due = self.request.arrived.arrival + self.request.policy.class.timeouts.hold_head;
        (!self.slot.is_out()).then_some(due)
    }

    /// Sends it with the headers known so far.
    fn send(&self, active: &mut ActiveRequest) {
        let (request, arrived) = (self.request, self.request.arrived);
        let mut head = local_reply::our_head();
        let own = GatewayHeaders {
            class: request.policy.shown.clone(),
            is_messages: request.endpoint.is_of_messages(),
            degraded: overload::degradation_header(active.degradation()),
            ..GatewayHeaders::of(&arrived.id)
        };
        own.add_to(&mut head.headers);
        active.head_went_ahead(&arrived.client);
        self.slot.give(head, self.every);
    }
}

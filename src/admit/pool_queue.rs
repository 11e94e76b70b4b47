//! The queue for a pool's seats: the async face of [`queue`](super::queue).
//!
//! Each pool has one lock around one scheduler and the list of waiting requests. There is no task: each
//! waiting request sleeps until its own deadline and then lets the scheduler expire late ones. Decisions
//! are stored for their requests inside the lock, and wakers are called after it is released. Every
//! operation is one critical section, so any concurrency is equivalent to some order of operations; the
//! tests try many orders.
//!
//! Release is ownership: a dropped [`Seat`] goes to the next request, and a dropped [`QueuedTicket`] leaves the
//! queue at once, or returns a seat that was granted but not taken.
//!
//! [`PoolQueues`] outlives reloads. Waiting requests keep their settings; a queue that becomes shorter evicts
//! nobody. A pool that is no longer configured keeps serving requests that arrived before, and is removed
//! when none is left; one that no longer has a limit admits all waiting
//! requests.

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use ahash::RandomState;

use super::queue::{Decisions, QueueReport, QueueRequest, QueueSettings, Rejected, Scheduler, Ticket};
use crate::clock::Clock;
use crate::sync::{Mutex, RwLock};
use crate::types::{PoolId, PrefillPace, Priority, Tick, Tokens};

/// The queues of all pools with limited concurrency.
#[derive(Debug)]
pub struct PoolQueues {
    clock: Clock,
    pool_queues: RwLock<HashMap<PoolId, Arc<PoolQueue>, RandomState>>,
    /// Pools that are no longer configured but still serve earlier requests.
    leaving: Mutex<Vec<PoolId>>,
}

/// The queue of one pool.
#[derive(Debug)]
pub struct PoolQueue {
    clock: Clock,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    scheduler: Scheduler,
    waiting: HashMap<Ticket, WaitState, RandomState>,
    /// Wakers to call once the lock is released.
    woken: Vec<Waker>,
}

/// State of a waiting request.
#[derive(Debug)]
enum WaitState {
    /// Still waiting.
    Pending(Option<Waker>),
    /// It has a seat.
    Admitted,
    /// It was rejected.
    Rejected(Rejected),
}

/// Result of asking for a seat.
#[derive(Debug)]
pub enum Admission {
    /// A seat was free.
    Admitted(Seat),
    /// It has to wait.
    Queued(QueuedTicket),
    /// It may not even wait.
    Rejected(Rejected),
}

/// One concurrent request of a pool. Goes to the next request by exactly one of
/// [`settle`](Seat::settle) (with its cost) or the drop (without cost).
#[derive(Debug)]
#[must_use = "dropped at once it is nobody's seat"]
pub struct Seat {
    pool_queue: Arc<PoolQueue>,
    ticket: Option<Ticket>,
}

/// A waiting request. Dropping it leaves the queue.
#[derive(Debug)]
#[must_use = "dropped at once it does not wait"]
pub struct QueuedTicket {
    pool_queue: Arc<PoolQueue>,
    ticket: Ticket,
    alarm: Option<Tick>,
    has_ended: bool,
}

/// Statistics of a pool's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Total seats.
    pub seats: usize,
    /// Occupied seats.
    pub taken: usize,
    /// Waiting requests.
    pub waiting: usize,
    /// Most prompt tokens outstanding at one engine, if limited.
    pub reading: Option<Tokens>,
    /// Requests that wait at other gateways, if any reports.
    pub elsewhere: Option<u64>,
}

impl PoolQueues {
    /// No queues.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        PoolQueues { clock, pool_queues: RwLock::default(), leaving: Mutex::default() }
    }

    /// Applies the settings: the configured pools, each with its queue settings if limited. A new queue has
    /// no seats, see [`PoolQueue::set_seats`].
    pub fn apply_settings<'a>(&self, pools: impl IntoIterator<Item = (&'a PoolId, Option<&'a QueueSettings>)>) {
        let mut pool_queues = self.pool_queues.write();
        let (mut named, mut limited) = (Vec::new(), Vec::new());
        for (pool, queue) in pools {
            named.push(pool);
            match (pool_queues.get(pool), queue) {
                (Some(pool_queue), Some(queue)) => pool_queue.set_settings(queue.clone()),
                (Some(pool_queue), None) => pool_queue.set_seats(usize::MAX),
                (None, Some(queue)) => {
                    pool_queues.insert(pool.clone(), Arc::new(PoolQueue::new(queue.clone(), self.clock)));
                }
                (None, None) => {}
            }
            limited.extend(queue.map(|_| pool));
        }
        pool_queues.retain(|pool, pool_queue| limited.contains(&pool) || !pool_queue.numbers().is_idle());
        *self.leaving.lock() = pool_queues.keys().filter(|pool| !named.contains(pool)).cloned().collect();
    }

    /// Removes queues of unconfigured pools that no request can use any more.
    pub fn forget_left(&self) {
        if self.leaving.lock().is_empty() {
            return;
        }
        let mut pool_queues = self.pool_queues.write();
        self.leaving.lock().retain(|pool| {
            let is_held = pool_queues.get(pool).is_some_and(|pool_queue| Arc::strong_count(pool_queue) > 1);
            if !is_held {
                pool_queues.remove(pool);
            }
            is_held
        });
    }

    /// The queue of a pool; `None` if the pool is not limited.
    #[must_use]
    pub fn pool_queue(&self, pool: &PoolId) -> Option<Arc<PoolQueue>> {
        self.pool_queues.read().get(pool).cloned()
    }

    /// Whether any request waits.
    #[must_use]
    pub fn any_waits(&self) -> bool {
        self.pool_queues.read().values().any(|pool_queue| pool_queue.inner.lock().scheduler.waiting() > 0)
    }

    /// All queues.
    #[must_use]
    pub fn all(&self) -> Vec<(PoolId, Arc<PoolQueue>)> {
        self.pool_queues.read().iter().map(|(pool, pool_queue)| (pool.clone(), Arc::clone(pool_queue))).collect()
    }
}

impl QueueStats {
    /// Whether no request has a seat or waits.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.taken == 0 && self.waiting == 0
    }
}

impl PoolQueue {
    /// A queue without seats, see [`PoolQueue::set_seats`].
    #[must_use]
    pub fn new(settings: QueueSettings, clock: Clock) -> Self {
        let inner = Inner { scheduler: Scheduler::new(settings), waiting: HashMap::default(), woken: Vec::new() };
        PoolQueue { clock, inner: Mutex::new(inner) }
    }

    /// Asks for a seat and waits for it.
    #[cfg(test)]
    async fn enter(self: &Arc<Self>, request: &QueueRequest) -> Result<Seat, Rejected> {
        match self.offer(request) {
            Admission::Admitted(seat) => Ok(seat),
            Admission::Rejected(away) => Err(away),
            Admission::Queued(mut queued) => queued.wait().await,
        }
    }

    /// Asks for a seat.
    pub fn offer(self: &Arc<Self>, request: &QueueRequest) -> Admission {
        let at = self.clock.now();
        let (ticket, seated, away, alarm) = self.locked(|inner| {
            let (ticket, mut decisions) = inner.scheduler.offer(request, at);
            let seated = take(&mut decisions.admitted, |admitted| *admitted == ticket);
            let away = take(&mut decisions.refused, |away| away.ticket == ticket);
            if seated.is_none() && away.is_none() {
                inner.waiting.insert(ticket, WaitState::Pending(None));
            }
            let alarm = inner.scheduler.alarm(ticket);
            inner.deliver(decisions);
            (ticket, seated, away, alarm)
        });
        // Outside the lock, because dropping a seat or a turn takes it.
        match (seated, away) {
            (Some(ticket), _) => Admission::Admitted(self.seat(ticket)),
            (None, Some(away)) => Admission::Rejected(away),
            (None, None) => {
                Admission::Queued(QueuedTicket { pool_queue: Arc::clone(self), ticket, alarm, has_ended: false })
            }
        }
    }

    /// A free seat that no request waits for, for a request that must not wait, such as a retry from another
    /// pool.
    #[must_use]
    pub fn take_free_seat(self: &Arc<Self>, request: &QueueRequest) -> Option<Seat> {
        let at = self.clock.now();
        self.locked(|inner| inner.scheduler.take_free_seat(request, at)).map(|ticket| self.seat(ticket))
    }

    /// Sets the number of seats.
    pub fn set_seats(&self, seats: usize) {
        let at = self.clock.now();
        self.locked(|inner| {
            if inner.scheduler.seats() != seats {
                let decisions = inner.scheduler.set_seats(seats, at);
                inner.deliver(decisions);
            }
        });
    }

    /// Sets the number of engines that prefill prompts.
    pub fn set_prefilling_engines(&self, prefilling_engines: usize) {
        let at = self.clock.now();
        self.locked(|inner| {
            if inner.scheduler.prefilling_engines() != prefilling_engines {
                let decisions = inner.scheduler.set_prefilling_engines(prefilling_engines, at);
                inner.deliver(decisions);
            }
        });
    }

    /// Sets the prefill pace for [`Reading::Auto`](super::queue::PrefillBudget); `None` means unlimited.
    pub fn set_pace(&self, pace: Option<PrefillPace>) {
        let at = self.clock.now();
        self.locked(|inner| {
            let decisions = inner.scheduler.set_pace(pace, at);
            inner.deliver(decisions);
        });
    }

    /// What the other gateways before the same engines need to know of this queue.
    #[must_use]
    pub fn report(&self) -> QueueReport {
        let at = self.clock.now();
        self.inner.lock().scheduler.report(at)
    }

    /// Takes another gateway's report, made at `made`; it counts until then.
    pub fn heard(&self, gateway: u64, report: &QueueReport, made: Tick, until: Tick) {
        let at = self.clock.now();
        self.locked(|inner| {
            let decisions = inner.scheduler.heard(gateway, report, made, until, at);
            inner.deliver(decisions);
        });
    }

    /// Sets the queue's settings.
    pub fn set_settings(&self, settings: QueueSettings) {
        let at = self.clock.now();
        self.locked(|inner| {
            inner.scheduler.set_settings(settings);
            let decisions = inner.scheduler.expire(at);
            inner.deliver(decisions);
        });
    }

    /// Expected wait of a request with this priority. `None` if unknown.
    #[must_use]
    pub fn expected_wait(&self, priority: Priority) -> Option<Duration> {
        let at = self.clock.now();
        self.inner.lock().scheduler.expected_wait(priority, at)
    }

    /// Expected wait of this request. `None` if unknown.
    #[must_use]
    pub fn expected_wait_of(&self, request: &QueueRequest) -> Option<Duration> {
        let at = self.clock.now();
        self.inner.lock().scheduler.expected_wait_for(request, at)
    }

    /// Statistics.
    #[must_use]
    pub fn numbers(&self) -> QueueStats {
        let at = self.clock.now();
        let scheduler = &self.inner.lock().scheduler;
        QueueStats {
            seats: scheduler.seats(),
            taken: scheduler.running(),
            waiting: scheduler.waiting(),
            reading: scheduler.reading_per_engine(),
            elsewhere: scheduler.waiting_elsewhere(at),
        }
    }

    /// Expires late requests, and admits those that waited for prefill pace.
    pub fn expire(&self) {
        let at = self.clock.now();
        self.locked(|inner| {
            let decisions = inner.scheduler.expire(at);
            inner.deliver(decisions);
        });
    }

    fn release(&self, ticket: Ticket, used: Tokens) {
        let at = self.clock.now();
        self.locked(|inner| {
            let decisions = inner.scheduler.release(ticket, used, at);
            inner.deliver(decisions);
        });
    }

    fn seat(self: &Arc<Self>, ticket: Ticket) -> Seat {
        Seat { pool_queue: Arc::clone(self), ticket: Some(ticket) }
    }

    /// Runs a critical section, then calls the wakers.
    fn locked<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.inner.lock();
        let result = act(&mut inner);
        let woken = std::mem::take(&mut inner.woken);
        drop(inner);
        woken.into_iter().for_each(Waker::wake);
        result
    }
}

impl Inner {
    /// Stores the decisions for the waiting requests.
    fn deliver(&mut self, decisions: Decisions) {
        let seated = decisions.admitted.into_iter().map(|ticket| (ticket, WaitState::Admitted));
        let away = decisions.refused.into_iter().map(|away| (away.ticket, WaitState::Rejected(away)));
        for (ticket, news) in seated.chain(away) {
            let before = self.waiting.insert(ticket, news);
            debug_assert!(matches!(before, Some(WaitState::Pending(_))), "{ticket:?} waits at this desk");
            if let Some(WaitState::Pending(Some(waker))) = before {
                self.woken.push(waker);
            }
        }
    }
}

/// Removes the first matching element.
fn take<T>(list: &mut Vec<T>, fits: impl FnMut(&T) -> bool) -> Option<T> {
    list.iter().position(fits).map(|at| list.swap_remove(at))
}

impl QueuedTicket {
    /// Waits until the request is admitted or rejected. Cancel-safe.
    ///
    /// # Errors
    /// [`Rejected`]: evicted, or waited too long.
    pub async fn wait(&mut self) -> Result<Seat, Rejected> {
        let (clock, alarm) = (self.pool_queue.clock, self.alarm);
        tokio::select! {
            biased;
            called = self.called() => return called,
            () = clock.sleep_until(alarm) => {}
        }
        self.pool_queue.expire();
        self.called().await
    }

    /// Expected further wait. `None` if unknown.
    #[must_use]
    pub fn expected_wait(&self) -> Option<Duration> {
        let at = self.pool_queue.clock.now();
        self.pool_queue.inner.lock().scheduler.expected_wait_of(self.ticket, at)
    }

    async fn called(&mut self) -> Result<Seat, Rejected> {
        poll_fn(|cx| {
            let mut inner = self.pool_queue.inner.lock();
            let news = match inner.waiting.get_mut(&self.ticket) {
                Some(WaitState::Pending(waker)) => {
                    let knows = waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
                    let old = if knows { None } else { waker.replace(cx.waker().clone()) };
                    // Wakers are dropped outside the lock, because their drop may run foreign code.
                    drop(inner);
                    drop(old);
                    return Poll::Pending;
                }
                _ => inner.waiting.remove(&self.ticket),
            };
            drop(inner);
            match news {
                Some(WaitState::Admitted) => {
                    self.has_ended = true;
                    Poll::Ready(Ok(self.pool_queue.seat(self.ticket)))
                }
                Some(WaitState::Rejected(away)) => {
                    self.has_ended = true;
                    Poll::Ready(Err(away))
                }
                // Already resolved: nothing more will come.
                Some(WaitState::Pending(_)) | None => Poll::Pending,
            }
        })
        .await
    }

    fn leave(&self) {
        let at = self.pool_queue.clock.now();
        let gone = self.pool_queue.locked(|inner| {
            let gone = inner.waiting.remove(&self.ticket);
            match &gone {
                Some(WaitState::Pending(_)) => {
                    inner.scheduler.withdraw(self.ticket, at);
                    if inner.scheduler.reading_per_engine().is_some() {
                        // It may have blocked requests with shorter prompts.
                        let decisions = inner.scheduler.expire(at);
                        inner.deliver(decisions);
                    }
                }
                Some(WaitState::Admitted) => {
                    let decisions = inner.scheduler.release(self.ticket, Tokens::ZERO, at);
                    inner.deliver(decisions);
                }
                Some(WaitState::Rejected(_)) | None => {}
            }
            gone
        });
        drop(gone);
    }
}

impl Drop for QueuedTicket {
    fn drop(&mut self) {
        if !self.has_ended {
            self.leave();
        }
    }
}

impl Seat {
    /// Records the first token, so the engine can prefill another prompt. Matters if the pool limits
    /// outstanding prompt tokens.
    pub fn prefill_done(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let at = self.pool_queue.clock.now();
        self.pool_queue.locked(|inner| {
            if inner.scheduler.reading_per_engine().is_some() {
                let decisions = inner.scheduler.read(ticket, at);
                inner.deliver(decisions);
            }
        });
    }

    /// Releases the seat; `used` are the tokens that the request cost, for fairness between
    /// tenants.
    pub fn settle(mut self, used: Tokens) {
        if let Some(ticket) = self.ticket.take() {
            self.pool_queue.release(ticket, used);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.pool_queue.release(ticket, Tokens::ZERO);
        }
    }
}

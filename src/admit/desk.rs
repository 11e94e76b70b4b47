//! The queue for a pool's seats: the async face of [`queue`](super::queue).
//!
//! Each pool has one lock around one scheduler and the list of waiting requests. There is no task: each
//! waiting request sleeps until its own deadline and then lets the scheduler expire late ones. Decisions
//! are stored for their requests inside the lock, and wakers are called after it is released. Every
//! operation is one critical section, so any concurrency is equivalent to some order of operations; the
//! tests try many orders.
//!
//! Release is ownership: a dropped [`Seat`] goes to the next request, and a dropped [`Turn`] leaves the
//! queue at once, or returns a seat that was granted but not taken.
//!
//! [`Desks`] outlives reloads. Waiting requests keep their settings; a queue that becomes shorter evicts
//! nobody. A pool that is no longer configured keeps serving requests that arrived before, and is removed
//! when none is left; one that no longer has a limit admits all waiting
//! requests.

#[cfg(test)]
mod orders;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use ahash::RandomState;

use super::queue::{Ask, Moves, Scheduler, Settings, Ticket, TurnedAway};
use crate::clock::Clock;
use crate::locks::{Mutex, RwLock};
use crate::units::{PoolId, PrefillPace, Priority, Tick, Tokens};

/// The queues of all pools with limited concurrency.
#[derive(Debug)]
pub struct Desks {
    clock: Clock,
    desks: RwLock<HashMap<PoolId, Arc<Desk>, RandomState>>,
    /// Pools that are no longer configured but still serve earlier requests.
    leaving: Mutex<Vec<PoolId>>,
}

/// The queue of one pool.
#[derive(Debug)]
pub struct Desk {
    clock: Clock,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    scheduler: Scheduler,
    waiting: HashMap<Ticket, Waiting, RandomState>,
    /// Wakers to call once the lock is released.
    woken: Vec<Waker>,
}

/// State of a waiting request.
#[derive(Debug)]
enum Waiting {
    /// Still waiting.
    Still(Option<Waker>),
    /// It has a seat.
    Seated,
    /// It was rejected.
    Away(TurnedAway),
}

/// Result of asking for a seat.
#[derive(Debug)]
pub enum Offered {
    /// A seat was free.
    Seated(Seat),
    /// It has to wait.
    Waits(Turn),
    /// It may not even wait.
    Away(TurnedAway),
}

/// One concurrent request of a pool. Goes to the next request by exactly one of
/// [`settle`](Seat::settle) (with its cost) or the drop (without cost).
#[derive(Debug)]
#[must_use = "dropped at once it is nobody's seat"]
pub struct Seat {
    desk: Arc<Desk>,
    ticket: Option<Ticket>,
}

/// A waiting request. Dropping it leaves the queue.
#[derive(Debug)]
#[must_use = "dropped at once it does not wait"]
pub struct Turn {
    desk: Arc<Desk>,
    ticket: Ticket,
    alarm: Option<Tick>,
    has_ended: bool,
}

/// Statistics of a pool's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Total seats.
    pub seats: usize,
    /// Occupied seats.
    pub taken: usize,
    /// Waiting requests.
    pub waiting: usize,
    /// Most prompt tokens outstanding at one engine, if limited.
    pub reading: Option<Tokens>,
}

impl Desks {
    /// No queues.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Desks { clock, desks: RwLock::default(), leaving: Mutex::default() }
    }

    /// Applies the settings: the configured pools, each with its queue settings if limited. A new queue has
    /// no seats, see [`Desk::set_seats`].
    pub fn follow<'a>(&self, pools: impl IntoIterator<Item = (&'a PoolId, Option<&'a Settings>)>) {
        let mut desks = self.desks.write();
        let (mut named, mut limited) = (Vec::new(), Vec::new());
        for (pool, queue) in pools {
            named.push(pool);
            match (desks.get(pool), queue) {
                (Some(desk), Some(queue)) => desk.set_settings(queue.clone()),
                (Some(desk), None) => desk.set_seats(usize::MAX),
                (None, Some(queue)) => {
                    desks.insert(pool.clone(), Arc::new(Desk::new(queue.clone(), self.clock)));
                }
                (None, None) => {}
            }
            limited.extend(queue.map(|_| pool));
        }
        desks.retain(|pool, desk| limited.contains(&pool) || !desk.numbers().is_idle());
        *self.leaving.lock() = desks.keys().filter(|pool| !named.contains(pool)).cloned().collect();
    }

    /// Removes queues of unconfigured pools that no request can use any more.
    pub fn forget_left(&self) {
        if self.leaving.lock().is_empty() {
            return;
        }
        let mut desks = self.desks.write();
        self.leaving.lock().retain(|pool| {
            let is_held = desks.get(pool).is_some_and(|desk| Arc::strong_count(desk) > 1);
            if !is_held {
                desks.remove(pool);
            }
            is_held
        });
    }

    /// The queue of a pool; `None` if the pool is not limited.
    #[must_use]
    pub fn desk(&self, pool: &PoolId) -> Option<Arc<Desk>> {
        self.desks.read().get(pool).cloned()
    }

    /// Whether any request waits.
    #[must_use]
    pub fn any_waits(&self) -> bool {
        self.desks.read().values().any(|desk| desk.inner.lock().scheduler.waiting() > 0)
    }

    /// All queues.
    #[must_use]
    pub fn all(&self) -> Vec<(PoolId, Arc<Desk>)> {
        self.desks.read().iter().map(|(pool, desk)| (pool.clone(), Arc::clone(desk))).collect()
    }
}

impl Numbers {
    /// Whether no request has a seat or waits.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.taken == 0 && self.waiting == 0
    }
}

impl Desk {
    /// A queue without seats, see [`Desk::set_seats`].
    #[must_use]
    pub fn new(settings: Settings, clock: Clock) -> Self {
        let inner = Inner { scheduler: Scheduler::new(settings), waiting: HashMap::default(), woken: Vec::new() };
        Desk { clock, inner: Mutex::new(inner) }
    }

    /// Asks for a seat and waits for it.
    #[cfg(test)]
    async fn enter(self: &Arc<Self>, ask: &Ask) -> Result<Seat, TurnedAway> {
        match self.offer(ask) {
            Offered::Seated(seat) => Ok(seat),
            Offered::Away(away) => Err(away),
            Offered::Waits(mut turn) => turn.come().await,
        }
    }

    /// Asks for a seat.
    pub fn offer(self: &Arc<Self>, ask: &Ask) -> Offered {
        let at = self.clock.now();
        let (ticket, seated, away, alarm) = self.locked(|inner| {
            let (ticket, mut moves) = inner.scheduler.offer(ask, at);
            let seated = take(&mut moves.admitted, |admitted| *admitted == ticket);
            let away = take(&mut moves.refused, |away| away.ticket == ticket);
            if seated.is_none() && away.is_none() {
                inner.waiting.insert(ticket, Waiting::Still(None));
            }
            let alarm = inner.scheduler.alarm(ticket);
            inner.deliver(moves);
            (ticket, seated, away, alarm)
        });
        // Outside the lock, because dropping a seat or a turn takes it.
        match (seated, away) {
            (Some(ticket), _) => Offered::Seated(self.seat(ticket)),
            (None, Some(away)) => Offered::Away(away),
            (None, None) => Offered::Waits(Turn { desk: Arc::clone(self), ticket, alarm, has_ended: false }),
        }
    }

    /// A free seat that no request waits for, for a request that must not wait, such as a retry from another
    /// pool.
    #[must_use]
    pub fn take_free_seat(self: &Arc<Self>, ask: &Ask) -> Option<Seat> {
        let at = self.clock.now();
        self.locked(|inner| inner.scheduler.take_free_seat(ask, at)).map(|ticket| self.seat(ticket))
    }

    /// Sets the number of seats.
    pub fn set_seats(&self, seats: usize) {
        let at = self.clock.now();
        self.locked(|inner| {
            if inner.scheduler.seats() != seats {
                let moves = inner.scheduler.set_seats(seats, at);
                inner.deliver(moves);
            }
        });
    }

    /// Sets the number of engines that prefill prompts.
    pub fn set_readers(&self, readers: usize) {
        let at = self.clock.now();
        self.locked(|inner| {
            if inner.scheduler.readers() != readers {
                let moves = inner.scheduler.set_readers(readers, at);
                inner.deliver(moves);
            }
        });
    }

    /// Sets the prefill pace for [`Reading::Auto`](super::queue::Reading); `None` means unlimited.
    pub fn set_pace(&self, pace: Option<PrefillPace>) {
        let at = self.clock.now();
        self.locked(|inner| {
            let moves = inner.scheduler.set_pace(pace, at);
            inner.deliver(moves);
        });
    }

    /// Sets the queue's settings.
    pub fn set_settings(&self, settings: Settings) {
        let at = self.clock.now();
        self.locked(|inner| {
            inner.scheduler.set_settings(settings);
            let moves = inner.scheduler.expire(at);
            inner.deliver(moves);
        });
    }

    /// Expected wait of a request with this priority. `None` if unknown.
    #[must_use]
    pub fn expected_wait(&self, rank: Priority) -> Option<Duration> {
        let at = self.clock.now();
        self.inner.lock().scheduler.expected_wait(rank, at)
    }

    /// Expected wait of this request. `None` if unknown.
    #[must_use]
    pub fn expected_wait_of(&self, ask: &Ask) -> Option<Duration> {
        let at = self.clock.now();
        self.inner.lock().scheduler.expected_wait_for(ask, at)
    }

    /// Statistics.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        let scheduler = &self.inner.lock().scheduler;
        Numbers {
            seats: scheduler.seats(),
            taken: scheduler.running(),
            waiting: scheduler.waiting(),
            reading: scheduler.reading_per_engine(),
        }
    }

    /// Expires late requests, and admits those that waited for prefill pace.
    pub fn expire(&self) {
        let at = self.clock.now();
        self.locked(|inner| {
            let moves = inner.scheduler.expire(at);
            inner.deliver(moves);
        });
    }

    fn release(&self, ticket: Ticket, used: Tokens) {
        let at = self.clock.now();
        self.locked(|inner| {
            let moves = inner.scheduler.release(ticket, used, at);
            inner.deliver(moves);
        });
    }

    fn seat(self: &Arc<Self>, ticket: Ticket) -> Seat {
        Seat { desk: Arc::clone(self), ticket: Some(ticket) }
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
    fn deliver(&mut self, moves: Moves) {
        let seated = moves.admitted.into_iter().map(|ticket| (ticket, Waiting::Seated));
        let away = moves.refused.into_iter().map(|away| (away.ticket, Waiting::Away(away)));
        for (ticket, news) in seated.chain(away) {
            let before = self.waiting.insert(ticket, news);
            debug_assert!(matches!(before, Some(Waiting::Still(_))), "{ticket:?} waits at this desk");
            if let Some(Waiting::Still(Some(waker))) = before {
                self.woken.push(waker);
            }
        }
    }
}

/// Removes the first matching element.
fn take<T>(list: &mut Vec<T>, fits: impl FnMut(&T) -> bool) -> Option<T> {
    list.iter().position(fits).map(|at| list.swap_remove(at))
}

impl Turn {
    /// Waits until the request is admitted or rejected. Cancel-safe.
    ///
    /// # Errors
    /// [`TurnedAway`]: evicted, or waited too long.
    pub async fn come(&mut self) -> Result<Seat, TurnedAway> {
        let (clock, alarm) = (self.desk.clock, self.alarm);
        tokio::select! {
            biased;
            called = self.called() => return called,
            () = clock.sleep_until(alarm) => {}
        }
        self.desk.expire();
        self.called().await
    }

    /// Expected further wait. `None` if unknown.
    #[must_use]
    pub fn expected_wait(&self) -> Option<Duration> {
        let at = self.desk.clock.now();
        self.desk.inner.lock().scheduler.expected_wait_of(self.ticket, at)
    }

    async fn called(&mut self) -> Result<Seat, TurnedAway> {
        poll_fn(|cx| {
            let mut inner = self.desk.inner.lock();
            let news = match inner.waiting.get_mut(&self.ticket) {
                Some(Waiting::Still(waker)) => {
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
                Some(Waiting::Seated) => {
                    self.has_ended = true;
                    Poll::Ready(Ok(self.desk.seat(self.ticket)))
                }
                Some(Waiting::Away(away)) => {
                    self.has_ended = true;
                    Poll::Ready(Err(away))
                }
                // Already resolved: nothing more will come.
                Some(Waiting::Still(_)) | None => Poll::Pending,
            }
        })
        .await
    }

    fn leave(&self) {
        let at = self.desk.clock.now();
        let gone = self.desk.locked(|inner| {
            let gone = inner.waiting.remove(&self.ticket);
            match &gone {
                Some(Waiting::Still(_)) => {
                    inner.scheduler.withdraw(self.ticket, at);
                    if inner.scheduler.reading_per_engine().is_some() {
                        // It may have blocked requests with shorter prompts.
                        let moves = inner.scheduler.expire(at);
                        inner.deliver(moves);
                    }
                }
                Some(Waiting::Seated) => {
                    let moves = inner.scheduler.release(self.ticket, Tokens::ZERO, at);
                    inner.deliver(moves);
                }
                Some(Waiting::Away(_)) | None => {}
            }
            gone
        });
        drop(gone);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.has_ended {
            self.leave();
        }
    }
}

impl Seat {
    /// Records the first token, so the engine can prefill another prompt. Matters if the pool limits
    /// outstanding prompt tokens.
    pub fn has_read(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let at = self.desk.clock.now();
        self.desk.locked(|inner| {
            if inner.scheduler.reading_per_engine().is_some() {
                let moves = inner.scheduler.read(ticket, at);
                inner.deliver(moves);
            }
        });
    }

    /// Releases the seat; `used` are the tokens that the request cost, for fairness between
    /// tenants.
    pub fn settle(mut self, used: Tokens) {
        if let Some(ticket) = self.ticket.take() {
            self.desk.release(ticket, used);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.desk.release(ticket, Tokens::ZERO);
        }
    }
}

//! Where requests wait for a seat: the async face of [`queue`](super::queue), one desk per pool.
//!
//! A desk is one lock around one scheduler and the list of those that wait at it. There is no
//! task: each waiting request sleeps until its own last moment and then lets the scheduler
//! turn away whoever is late. What the scheduler moves is written down for its owner inside
//! the lock; owners are woken behind it. Every step is one such piece, so whatever threads do at
//! the same time comes to an order of steps: the tests try many.
//!
//! Giving back is ownership. A [`Seat`] that ends gives its place to the next one, and a
//! [`Turn`] that is dropped leaves the queue at once, or hands on the seat that it had been
//! given and did not take.
//!
//! [`Desks`] lives over reloads. Whoever waits stays under the settings that it came with; a
//! queue that becomes shorter pushes nobody out. A pool that no settings name any more goes
//! on serving those that arrived under the old ones and is forgotten when nobody is left; one
//! that has no limit any more lets everybody in who waits.

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

/// The desks of all pools that limit what runs at the same time.
#[derive(Debug)]
pub struct Desks {
    clock: Clock,
    desks: RwLock<HashMap<PoolId, Arc<Desk>, RandomState>>,
    /// Pools that no settings name any more, whose desks still serve those that came before.
    leaving: Mutex<Vec<PoolId>>,
}

/// The desk of one pool.
#[derive(Debug)]
pub struct Desk {
    clock: Clock,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    scheduler: Scheduler,
    waiting: HashMap<Ticket, Waiting, RandomState>,
    /// To be woken when the lock is free again.
    woken: Vec<Waker>,
}

/// What a request that waits will find when it looks.
#[derive(Debug)]
enum Waiting {
    /// Nothing yet.
    Still(Option<Waker>),
    /// Its seat.
    Seated,
    /// That it has to go.
    Away(TurnedAway),
}

/// What came of asking for a seat.
#[derive(Debug)]
pub enum Offered {
    /// One was free.
    Seated(Seat),
    /// It has to wait.
    Waits(Turn),
    /// It may not even wait.
    Away(TurnedAway),
}

/// A place in a pool. Exactly one of [`settle`](Seat::settle) (we know what it cost) or the drop
/// (it cost nothing) gives it to the next one.
#[derive(Debug)]
#[must_use = "dropped at once it is nobody's seat"]
pub struct Seat {
    desk: Arc<Desk>,
    ticket: Option<Ticket>,
}

/// A request that waits. Dropped, it has left the queue.
#[derive(Debug)]
#[must_use = "dropped at once it does not wait"]
pub struct Turn {
    desk: Arc<Desk>,
    ticket: Ticket,
    alarm: Option<Tick>,
    has_ended: bool,
}

/// How full a pool is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Seats there are.
    pub seats: usize,
    /// Seats taken.
    pub taken: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Prompt tokens that one engine may have to read at one time, if that is limited.
    pub reading: Option<Tokens>,
}

impl Desks {
    /// No desks yet.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Desks { clock, desks: RwLock::default(), leaving: Mutex::default() }
    }

    /// The settings name these pools, each with its queue if it limits what runs there. A new
    /// desk has no seats: see [`Desk::set_seats`].
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

    /// Forgets the desks of pools that no settings name any more and that nobody can come to.
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

    /// The desk of a pool; none where nothing limits what runs there.
    #[must_use]
    pub fn desk(&self, pool: &PoolId) -> Option<Arc<Desk>> {
        self.desks.read().get(pool).cloned()
    }

    /// Whether anybody waits at any desk.
    #[must_use]
    pub fn any_waits(&self) -> bool {
        self.desks.read().values().any(|desk| desk.inner.lock().scheduler.waiting() > 0)
    }

    /// Every desk there is.
    #[must_use]
    pub fn all(&self) -> Vec<(PoolId, Arc<Desk>)> {
        self.desks.read().iter().map(|(pool, desk)| (pool.clone(), Arc::clone(desk))).collect()
    }
}

impl Numbers {
    /// Whether nobody sits or waits.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.taken == 0 && self.waiting == 0
    }
}

impl Desk {
    /// A desk with no seats: see [`Desk::set_seats`].
    #[must_use]
    pub fn new(settings: Settings, clock: Clock) -> Self {
        let inner = Inner { scheduler: Scheduler::new(settings), waiting: HashMap::default(), woken: Vec::new() };
        Desk { clock, inner: Mutex::new(inner) }
    }

    /// Asks for a seat, and waits for it.
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
        // Outside the lock: whatever gives itself back when it is dropped takes the lock.
        match (seated, away) {
            (Some(ticket), _) => Offered::Seated(self.seat(ticket)),
            (None, Some(away)) => Offered::Away(away),
            (None, None) => Offered::Waits(Turn { desk: Arc::clone(self), ticket, alarm, has_ended: false }),
        }
    }

    /// A seat for a request that must not wait, as a retry from another pool: only one that
    /// nobody wants.
    #[must_use]
    pub fn take_free_seat(self: &Arc<Self>, ask: &Ask) -> Option<Seat> {
        let at = self.clock.now();
        self.locked(|inner| inner.scheduler.take_free_seat(ask, at)).map(|ticket| self.seat(ticket))
    }

    /// The pool has so many seats from now on.
    pub fn set_seats(&self, seats: usize) {
        let at = self.clock.now();
        self.locked(|inner| {
            if inner.scheduler.seats() != seats {
                let moves = inner.scheduler.set_seats(seats, at);
                inner.deliver(moves);
            }
        });
    }

    /// So many of the pool's engines read prompts from now on.
    pub fn set_readers(&self, readers: usize) {
        let at = self.clock.now();
        self.locked(|inner| {
            if inner.scheduler.readers() != readers {
                let moves = inner.scheduler.set_readers(readers, at);
                inner.deliver(moves);
            }
        });
    }

    /// How fast prompts may go, where [`Reading::Auto`](super::queue::Reading) is set; none: no limit.
    pub fn set_pace(&self, pace: Option<PrefillPace>) {
        let at = self.clock.now();
        self.locked(|inner| {
            let moves = inner.scheduler.set_pace(pace, at);
            inner.deliver(moves);
        });
    }

    /// The queue behaves so from now on.
    pub fn set_settings(&self, settings: Settings) {
        let at = self.clock.now();
        self.locked(|inner| {
            inner.scheduler.set_settings(settings);
            let moves = inner.scheduler.expire(at);
            inner.deliver(moves);
        });
    }

    /// How long a request of this rank would wait. None where nobody can know.
    #[must_use]
    pub fn expected_wait(&self, rank: Priority) -> Option<Duration> {
        let at = self.clock.now();
        self.inner.lock().scheduler.expected_wait(rank, at)
    }

    /// How long this request would wait. None where nobody can know.
    #[must_use]
    pub fn expected_wait_of(&self, ask: &Ask) -> Option<Duration> {
        let at = self.clock.now();
        self.inner.lock().scheduler.expected_wait_for(ask, at)
    }

    /// How full it is.
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

    /// Turns away whoever is late, and lets go whoever waited for the pace of prompts.
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

    /// Does something inside the lock, and wakes behind it whoever has to know.
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
    /// Writes down for each request that waits what was decided about it.
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

/// Takes the one that fits out of a short list.
fn take<T>(list: &mut Vec<T>, fits: impl FnMut(&T) -> bool) -> Option<T> {
    list.iter().position(fits).map(|at| list.swap_remove(at))
}

impl Turn {
    /// Waits until the request is called to its seat, or turned away. Nothing is lost if this
    /// future is dropped and made again.
    ///
    /// # Errors
    /// [`TurnedAway`]: pushed out, or waited too long.
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

    /// How long it will still wait. None where nobody can know.
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
                    // Whatever a waker does when it goes, it does not do it inside the lock.
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
                // Called before: nothing more will come.
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
                        // It may have kept others from going whose prompts are shorter.
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
    /// The first token came: the engine can read another prompt. Matters where the pool limits
    /// what its engines read at the same time.
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

    /// Gives the place back; `used` are the tokens that the request cost its pool, for the
    /// shares of the tenants.
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

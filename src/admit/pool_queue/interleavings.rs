//! The queue under many interleavings: each test is a story of a few tasks, run some hundred times with
//! another task continuing at every lock ([`crate::sync`]).
//!
//! Invariants at each end: every waiting request was resolved (a forgotten one waits forever, which fails
//! the run), no request has a seat or is remembered, and never more seats were occupied than
//! exist.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::rc::Rc;

use futures_util::future::select;

use super::tests::{ms, numbers, patient, pool_queue, request, settings};
use super::*;
use crate::admit::queue::{PrefillBudget, RejectReason};
use crate::route::Fleet;
use crate::route::settings::{Concurrency, EngineAddress, EngineSource, PoolSettings, Scheme};
use crate::sync::shuttle_locks::{Time, all_end, others, task, tried};

/// State shared by the tasks of a story.
#[derive(Clone)]
struct QueueScenario {
    pool_queue: Arc<PoolQueue>,
    clock: Clock,
    sitting: Rc<Cell<usize>>,
    most: usize,
}

/// A request with a seat.
struct HeldSeat(Rc<Cell<usize>>, Option<Seat>);

impl Drop for HeldSeat {
    fn drop(&mut self) {
        // Before the seat goes to the next request.
        self.0.set(self.0.get() - 1);
    }
}

impl QueueScenario {
    fn with(seats: usize, most: usize) -> QueueScenario {
        let clock = Clock::start();
        QueueScenario { pool_queue: pool_queue(clock, seats, 100), clock, sitting: Rc::default(), most }
    }

    async fn sit(&self, seat: Seat, steps: usize) {
        self.sitting.set(self.sitting.get() + 1);
        assert!(self.sitting.get() <= self.most, "a seat was given twice");
        let mut sitting = HeldSeat(Rc::clone(&self.sitting), Some(seat));
        steps_of_others(steps).await;
        let seat = sitting.1.take().expect("it sits");
        drop(sitting);
        if steps.is_multiple_of(2) { drop(seat) } else { seat.settle(Tokens(10)) }
    }

    /// Waits until it has a seat.
    async fn stays(self, steps: usize) {
        let seat = self.pool_queue.enter(&patient(self.clock)).await.expect("nobody turns it away");
        self.sit(seat, steps).await;
    }

    /// Leaves after this many steps, whatever its state.
    async fn leaves(self, after: usize) {
        select(Box::pin(self.stays(3)), Box::pin(steps_of_others(after))).await;
    }

    /// Waits for at most this long.
    async fn waits_for(self, length: Duration, steps: usize) {
        match self.pool_queue.enter(&request(self.clock, Priority::Normal, length)).await {
            Ok(seat) => self.sit(seat, steps).await,
            Err(away) => assert_eq!(away.why, RejectReason::WaitedTooLong),
        }
    }

    fn is_empty(&self) {
        assert_eq!(numbers(&self.pool_queue), (0, 0), "nobody sits or waits");
        let inner = self.pool_queue.inner.lock();
        assert!(inner.waiting.is_empty() && inner.woken.is_empty(), "nobody is remembered");
    }
}

async fn steps_of_others(steps: usize) {
    for _ in 0..steps {
        others().await;
    }
}

/// Advances time in steps of a millisecond.
async fn passes(time: Arc<Time>, millis: u64) {
    for _ in 0..millis {
        time.passes(ms(1));
        others().await;
    }
}

#[test]
fn a_seat_that_ends_while_others_ask_for_it_is_never_lost() {
    tried(|_| {
        let scenario = QueueScenario::with(1, 1);
        all_end((0..4).map(|steps| task(scenario.clone().stays(steps))));
        scenario.is_empty();
    });
}

#[test]
fn who_leaves_at_the_moment_it_is_called_hands_its_seat_on() {
    tried(|_| {
        let scenario = QueueScenario::with(1, 1);
        let stay = (0..3).map(|steps| task(scenario.clone().stays(steps)));
        let leave = (1..4).map(|after| task(scenario.clone().leaves(after)));
        all_end(stay.chain(leave));
        scenario.is_empty();
    });
}

#[test]
fn who_is_called_in_its_last_moment_sits_or_goes_and_the_seat_is_not_lost() {
    tried(|time| {
        let scenario = QueueScenario::with(1, 1);
        let late = (1..4).map(|at| task(scenario.clone().waits_for(ms(at), 2)));
        let stay = (0..2).map(|steps| task(scenario.clone().stays(steps)));
        all_end(late.chain(stay).chain([task(passes(Arc::clone(time), 4))]));
        scenario.is_empty();
    });
}

#[test]
fn seats_that_come_and_go_while_others_are_given_back_forget_nobody() {
    tried(|_| {
        let scenario = QueueScenario::with(0, 3);
        let stay = (0..4).map(|steps| task(scenario.clone().stays(steps)));
        let leave = (1..3).map(|after| task(scenario.clone().leaves(after)));
        let (one, other) = (Arc::clone(&scenario.pool_queue), Arc::clone(&scenario.pool_queue));
        let engines = |pool_queue: Arc<PoolQueue>, counts: [usize; 4]| async move {
            for seats in counts {
                pool_queue.set_seats(seats);
                others().await;
            }
        };
        let seats = [task(engines(one, [3, 0, 1, 2])), task(engines(other, [1, 0, 2, 1]))];
        all_end(stay.chain(leave).chain(seats));
        scenario.is_empty();
        assert!((1..=2).contains(&scenario.pool_queue.numbers().seats), "as somebody said last");
    });
}

#[test]
fn a_reload_in_the_middle_of_everything_lets_everybody_end() {
    tried(|_| {
        let (clock, a, b) = (Clock::start(), PoolId::from("a"), PoolId::from("b"));
        let pool_queues = Arc::new(PoolQueues::new(clock));
        let queue = settings(50);
        pool_queues.apply_settings([(&a, Some(&queue))]);
        pool_queues.pool_queue(&a).expect("it is limited").set_seats(1);
        let guest = |pool_queues: Arc<PoolQueues>, a: PoolId, steps: usize| async move {
            let Some(pool_queue) = pool_queues.pool_queue(&a) else { return };
            others().await;
            let seat = pool_queue.enter(&patient(clock)).await.expect("who waits stays");
            steps_of_others(steps).await;
            seat.settle(Tokens(1));
            assert!(pool_queue.inner.lock().woken.is_empty());
        };
        let reloads = |pool_queues: Arc<PoolQueues>, a: PoolId| async move {
            let none_may_wait = settings(50);
            for pools in [vec![(&b, None)], vec![(&a, Some(&none_may_wait))], vec![(&a, None)], vec![]] {
                pool_queues.apply_settings(pools);
                others().await;
                // As `count_seats` does.
                pool_queues.forget_left();
                pool_queues
                    .all()
                    .into_iter()
                    .filter(|(_, pool_queue)| pool_queue.numbers().seats == 0)
                    .for_each(|(_, pool_queue)| pool_queue.set_seats(1));
            }
        };
        let guests = (0..4).map(|steps| task(guest(Arc::clone(&pool_queues), a.clone(), steps)));
        let reload = task(reloads(Arc::clone(&pool_queues), a.clone()));
        all_end(guests.chain([reload]));
        pool_queues.forget_left();
        assert!(pool_queues.all().is_empty(), "nobody is left, and no settings name it");
    });
}

#[test]
fn who_keeps_a_long_prompt_from_being_read_and_goes_lets_the_next_one_read() {
    tried(|_| {
        let scenario = QueueScenario::with(4, 4);
        let reading = QueueSettings { reading: PrefillBudget::Tokens(Tokens(100)), ..settings(50) };
        scenario.pool_queue.set_settings(reading);
        scenario.pool_queue.set_prefilling_engines(1);
        let reads = |scenario: QueueScenario, steps: usize| async move {
            let mut seat = scenario.pool_queue.enter(&patient(scenario.clock)).await.expect("nobody turns it away");
            steps_of_others(steps).await;
            seat.prefill_done();
            scenario.sit(seat, steps).await;
        };
        let read = (0..3).map(|steps| task(reads(scenario.clone(), steps)));
        let leave = (1..3).map(|after| task(scenario.clone().leaves(after)));
        all_end(read.chain(leave));
        scenario.is_empty();
    });
}

#[test]
fn a_free_seat_is_taken_by_one_only() {
    tried(|_| {
        let scenario = QueueScenario::with(1, 1);
        let grabs = |scenario: QueueScenario| async move {
            if let Some(seat) = scenario.pool_queue.take_free_seat(&patient(scenario.clock)) {
                scenario.sit(seat, 2).await;
            }
        };
        let grab = (0..2).map(|_| task(grabs(scenario.clone())));
        let stay = (0..3).map(|steps| task(scenario.clone().stays(steps)));
        all_end(grab.chain(stay));
        scenario.is_empty();
    });
}

#[test]
fn seats_that_two_count_at_once_are_right_when_they_are_counted_once_more() {
    tried(|_| {
        let scenario = QueueScenario::with(1, 4);
        let fleet = Rc::new(Fleet::new(7));
        let address = |name: &str| EngineAddress {
            scheme: Scheme::Http,
            host: name.into(),
            port: 1,
            base: "".into(),
            name: None,
        };
        let both: Vec<_> = ["a", "b"].map(address).into();
        let id = PoolId::from("p");
        let pool = PoolSettings::with_defaults(id.clone(), EngineSource::Static(both.clone()));
        fleet.apply_settings(
            &[Arc::new(PoolSettings { concurrency: Concurrency::Fixed(NonZeroU32::MIN.saturating_add(1)), ..pool })],
            Tick::ZERO,
        );
        let count = |fleet: &Fleet, pool_queue: &PoolQueue| {
            let seats = fleet.seats(&PoolId::from("p"), Tick::ZERO);
            pool_queue.set_seats(seats.expect("it is limited"));
        };
        let counts = || {
            let (fleet, pool_queue) = (Rc::clone(&fleet), Arc::clone(&scenario.pool_queue));
            task(async move {
                for _ in 0..3 {
                    count(&fleet, &pool_queue);
                    others().await;
                }
            })
        };
        let engines = {
            let (fleet, id, one) = (Rc::clone(&fleet), id.clone(), vec![address("a")]);
            task(async move {
                for addresses in [one, both] {
                    fleet.set_engines(&id, addresses, Tick::ZERO);
                    others().await;
                }
            })
        };
        let stay: Vec<_> = (0..4).map(|steps| task(scenario.clone().stays(steps))).collect();
        all_end([counts(), counts(), engines].into_iter().chain(stay));
        scenario.is_empty();
        count(&fleet, &scenario.pool_queue);
        assert_eq!(Some(scenario.pool_queue.numbers().seats), fleet.seats(&id, Tick::ZERO));
    });
}

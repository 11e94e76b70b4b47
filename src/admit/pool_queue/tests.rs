use std::future::Future;
use std::pin::{Pin, pin};

use futures_util::FutureExt;
use futures_util::future::join_all;
use proptest::prelude::*;

use super::*;
use crate::admit::queue::{Deadline, LimitState, RejectReason, WhenHopeless};
use crate::types::TenantId;

pub(super) fn ms(length: u64) -> Duration {
    Duration::from_millis(length)
}

/// A stream with a TTFT of a second that waits at most this long.
pub(super) fn request(clock: Clock, priority: Priority, patience: Duration) -> QueueRequest {
    QueueRequest {
        tenant: TenantId::anonymous(),
        priority,
        arrival: clock.now(),
        deadline: Deadline::FirstToken { within: ms(1000), lead: Duration::ZERO },
        tokens: Tokens(100),
        prompt: Tokens(60),
        timeout_at: clock.now() + patience,
        when_hopeless: WhenHopeless::Demote,
        limit_state: LimitState::WithinLimits,
    }
}

pub(super) fn patient(clock: Clock) -> QueueRequest {
    request(clock, Priority::Normal, Duration::from_secs(3600))
}

pub(super) fn settings(max_waiting: usize) -> QueueSettings {
    QueueSettings { max_waiting, quantum: Tokens(100), ..QueueSettings::default() }
}

pub(super) fn pool_queue(clock: Clock, seats: usize, max_waiting: usize) -> Arc<PoolQueue> {
    let pool_queue = Arc::new(PoolQueue::new(settings(max_waiting), clock));
    pool_queue.set_seats(seats);
    pool_queue
}

pub(super) fn numbers(pool_queue: &PoolQueue) -> (usize, usize) {
    let numbers = pool_queue.numbers();
    (numbers.taken, numbers.waiting)
}

fn seated(offered: Admission) -> Seat {
    match offered {
        Admission::Admitted(seat) => seat,
        other => panic!("a seat, not {other:?}"),
    }
}

fn waits(offered: Admission) -> QueuedTicket {
    match offered {
        Admission::Queued(queued) => queued,
        other => panic!("a turn, not {other:?}"),
    }
}

async fn sleep(clock: Clock, length: Duration) {
    clock.sleep_until(Some(clock.now() + length)).await;
}

#[tokio::test(start_paused = true)]
async fn a_seat_given_back_goes_to_the_one_who_waits() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 1, 10);
    let first = pool_queue.enter(&patient(clock)).await.unwrap();
    let entering = pool_queue.clone();
    let second = async move {
        let seat = entering.enter(&patient(clock)).await.unwrap();
        (seat, clock.now())
    };
    let leaving = async {
        sleep(clock, ms(250)).await;
        assert_eq!(numbers(&pool_queue), (1, 1));
        first.settle(Tokens(7));
    };
    let ((seat, at), ()) = tokio::join!(second, leaving);
    assert_eq!(at, Tick::from_millis(250));
    assert_eq!(numbers(&pool_queue), (1, 0));
    drop(seat);
    assert_eq!(numbers(&pool_queue), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn who_has_waited_too_long_goes_at_that_moment_and_nobody_else() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 1, 10);
    let _seat = pool_queue.enter(&patient(clock)).await.unwrap();
    let mut other = waits(pool_queue.offer(&patient(clock)));
    let away = pool_queue.enter(&request(clock, Priority::Normal, ms(300))).await.unwrap_err();
    assert_eq!((away.why, clock.now()), (RejectReason::WaitedTooLong, Tick::from_millis(300)));
    assert!(other.wait().now_or_never().is_none());
    assert_eq!(numbers(&pool_queue), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn who_is_pushed_out_learns_it_at_once() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 1, 1);
    let _seat = pool_queue.enter(&patient(clock)).await.unwrap();
    let mut low = waits(pool_queue.offer(&request(clock, Priority::Batch, ms(9000))));
    assert!(low.wait().now_or_never().is_none());
    let _high = waits(pool_queue.offer(&request(clock, Priority::High, ms(9000))));
    assert_eq!(low.wait().await.unwrap_err().why, RejectReason::PushedOut);
    assert_eq!(clock.now(), Tick::ZERO);
    match pool_queue.offer(&request(clock, Priority::Batch, ms(9000))) {
        Admission::Rejected(away) => assert_eq!(away.why, RejectReason::QueueFull),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn who_leaves_the_queue_is_out_of_it_at_once() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 1, 10);
    let seat = pool_queue.enter(&patient(clock)).await.unwrap();
    let gone = waits(pool_queue.offer(&patient(clock)));
    let mut next = waits(pool_queue.offer(&patient(clock)));
    drop(gone);
    assert_eq!(numbers(&pool_queue), (1, 1));
    drop(seat);
    assert!(next.wait().now_or_never().is_some_and(|came| came.is_ok()));
}

#[tokio::test(start_paused = true)]
async fn a_seat_that_was_granted_and_not_taken_goes_on() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 1, 10);
    let seat = pool_queue.enter(&patient(clock)).await.unwrap();
    let granted = waits(pool_queue.offer(&patient(clock)));
    let mut next = waits(pool_queue.offer(&patient(clock)));
    drop(seat);
    assert_eq!(numbers(&pool_queue), (1, 1), "the first of them has it");
    drop(granted);
    let seat = next.wait().now_or_never().expect("called").expect("a seat");
    assert_eq!(numbers(&pool_queue), (1, 0));
    drop(seat);
    assert_eq!(numbers(&pool_queue), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_looked_at_and_put_away_again_is_still_called() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 1, 10);
    let seat = pool_queue.enter(&patient(clock)).await.unwrap();
    let mut queued = waits(pool_queue.offer(&patient(clock)));
    for _ in 0..3 {
        tokio::select! {
            called = queued.wait() => panic!("nobody has left: {called:?}"),
            () = sleep(clock, ms(10)) => {}
        }
    }
    drop(seat);
    assert!(queued.wait().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn more_seats_call_as_many_and_fewer_wait_for_those_that_sit() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 0, 10);
    let mut queued: Vec<QueuedTicket> = (0..4).map(|_| waits(pool_queue.offer(&patient(clock)))).collect();
    pool_queue.set_seats(3);
    assert_eq!(numbers(&pool_queue), (3, 1));
    let mut seats = Vec::new();
    for queued in &mut queued[..3] {
        seats.push(queued.wait().now_or_never().unwrap().unwrap());
    }
    pool_queue.set_seats(1);
    seats.truncate(1);
    assert_eq!(numbers(&pool_queue), (1, 1));
    drop(seats);
    assert_eq!(numbers(&pool_queue), (1, 0));
    drop(queued.pop());
    assert_eq!(numbers(&pool_queue), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn only_a_seat_that_nobody_wants_is_free_to_take() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 2, 10);
    let one = pool_queue.take_free_seat(&patient(clock)).expect("a free seat");
    let two = seated(pool_queue.offer(&patient(clock)));
    assert!(pool_queue.take_free_seat(&patient(clock)).is_none());
    let queued = waits(pool_queue.offer(&patient(clock)));
    drop(one);
    assert!(pool_queue.take_free_seat(&patient(clock)).is_none(), "it belongs to the one who waits");
    drop((two, queued));
    assert!(pool_queue.take_free_seat(&patient(clock)).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_reload_keeps_whoever_sits_or_waits() {
    let (clock, a, b) = (Clock::start(), PoolId::from("a"), PoolId::from("b"));
    let pool_queues = PoolQueues::new(clock);
    let queue = settings(5);
    pool_queues.apply_settings([(&a, Some(&queue)), (&b, None)]);
    assert!(pool_queues.pool_queue(&b).is_none(), "no limit, no desk");
    let pool_queue = pool_queues.pool_queue(&a).unwrap();
    pool_queue.set_seats(1);
    let seat = seated(pool_queue.offer(&patient(clock)));
    let mut queued = [waits(pool_queue.offer(&patient(clock))), waits(pool_queue.offer(&patient(clock)))];

    let none_may_wait = settings(0);
    pool_queues.apply_settings([(&a, Some(&none_may_wait))]);
    assert_eq!(numbers(&pool_queue), (1, 2), "who waits stays");
    assert!(
        matches!(pool_queue.offer(&patient(clock)), Admission::Rejected(away) if away.why == RejectReason::QueueFull)
    );

    pool_queues.apply_settings([(&b, None)]);
    assert!(Arc::ptr_eq(&pool_queues.pool_queue(&a).expect("somebody is there"), &pool_queue));
    drop(seat);
    let seat = queued[0].wait().now_or_never().expect("the pool goes on").unwrap();

    pool_queues.apply_settings([(&a, None)]);
    let other = queued[1].wait().now_or_never().expect("no limit any more").unwrap();
    drop((seat, other));
    pool_queues.apply_settings([(&a, None)]);
    assert!(pool_queues.pool_queue(&a).is_none(), "nobody is left");
}

#[test]
fn a_pool_that_no_settings_name_is_forgotten_when_its_last_request_has_gone() {
    let (clock, a, b) = (Clock::start(), PoolId::from("a"), PoolId::from("b"));
    let (pool_queues, queue) = (PoolQueues::new(clock), settings(5));
    pool_queues.apply_settings([(&a, Some(&queue)), (&b, Some(&queue))]);
    let pool_queue = pool_queues.pool_queue(&a).unwrap();
    pool_queue.set_seats(1);
    let seat = seated(pool_queue.offer(&patient(clock)));
    drop(pool_queue);
    pool_queues.apply_settings([(&b, Some(&queue))]);
    pool_queues.forget_left();
    assert!(pool_queues.pool_queue(&a).is_some(), "somebody sits there");
    drop(seat);
    pool_queues.forget_left();
    assert!(pool_queues.pool_queue(&a).is_none() && pool_queues.pool_queue(&b).is_some());
    pool_queues.apply_settings([(&a, Some(&queue)), (&b, Some(&queue))]);
    pool_queues.forget_left();
    assert!(pool_queues.pool_queue(&a).is_some(), "it is named again");
}

// ---- laws -----------------------------------------------------------------------------------

/// How a request ends.
#[derive(Clone, Copy, Debug)]
enum Ending {
    /// Holds its seat for this long, and settles.
    Settles { after: u64 },
    /// Holds its seat for this long, and drops it.
    Breaks { after: u64 },
    /// Leaves this long after it asked, whatever its state.
    Leaves { after: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Guest {
    comes: u64,
    priority: usize,
    patience: u64,
    ending: Ending,
}

fn any_ending() -> impl Strategy<Value = Ending> {
    prop_oneof![
        (0..40_u64).prop_map(|after| Ending::Settles { after }),
        (0..40_u64).prop_map(|after| Ending::Breaks { after }),
        (0..60_u64).prop_map(|after| Ending::Leaves { after }),
    ]
}

fn any_guest() -> impl Strategy<Value = Guest> {
    let guest = (0..100_u64, 0..Priority::ALL.len(), 0..80_u64, any_ending());
    guest.prop_map(|(comes, priority, patience, ending)| Guest { comes, priority, patience, ending })
}

async fn stay(pool_queue: Arc<PoolQueue>, clock: Clock, guest: Guest) {
    sleep(clock, ms(guest.comes)).await;
    let request = request(clock, Priority::ALL[guest.priority], ms(guest.patience));
    let visit = async {
        let Ok(seat) = pool_queue.enter(&request).await else { return };
        match guest.ending {
            Ending::Settles { after } => {
                sleep(clock, ms(after)).await;
                seat.settle(Tokens(after));
            }
            Ending::Breaks { after } => {
                sleep(clock, ms(after)).await;
                drop(seat);
            }
            Ending::Leaves { .. } => {
                sleep(clock, ms(10_000)).await;
                drop(seat);
            }
        }
    };
    let leaves = async {
        match guest.ending {
            Ending::Leaves { after } => sleep(clock, ms(after)).await,
            _ => std::future::pending().await,
        }
    };
    tokio::select! {
        () = visit => {}
        () = leaves => {}
    }
}

fn paused<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(future)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever requests come and however they end: at the end none has a seat or waits, and there were never
    /// more than the seats.
    #[test]
    fn no_seat_leaks_on_any_ending(
        seats in 1..4_usize, max_waiting in 0..12_usize, guests in prop::collection::vec(any_guest(), 0..200),
    ) {
        paused(async {
            let clock = Clock::start();
            let pool_queue = pool_queue(clock, seats, max_waiting);
            let watched = Arc::clone(&pool_queue);
            let watch = async {
                loop {
                    assert!(watched.numbers().taken <= seats);
                    assert!(watched.numbers().waiting <= max_waiting);
                    sleep(clock, ms(1)).await;
                }
            };
            let all = join_all(guests.iter().map(|guest| stay(Arc::clone(&pool_queue), clock, *guest)));
            tokio::select! {
                _ = all => {}
                () = watch => {}
            }
            assert_eq!(numbers(&pool_queue), (0, 0));
            assert!(pool_queue.inner.lock().waiting.is_empty(), "nobody is remembered");
            let mut seats: Vec<_> = (0..seats).map(|_| pool_queue.take_free_seat(&patient(clock))).collect();
            assert!(seats.iter().all(Option::is_some), "every seat can be taken again");
            seats.clear();
        });
    }
}

/// Drops a future after this many polls.
async fn polled_times<F: Future>(mut future: Pin<&mut F>, times: usize) -> Option<F::Output> {
    for _ in 0..times {
        if let Some(output) = future.as_mut().now_or_never() {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

#[tokio::test(start_paused = true)]
async fn two_hundred_cancels_at_every_point_of_the_queue() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 1, 500);
    for point in 0..200_usize {
        let holder = pool_queue.enter(&patient(clock)).await.unwrap();
        let others: Vec<QueuedTicket> = (0..point % 5).map(|_| waits(pool_queue.offer(&patient(clock)))).collect();
        let request = patient(clock);
        let mut entering = Box::pin(pool_queue.enter(&request));
        // Never polled, polled while waiting, or already admitted when dropped.
        let early = polled_times(entering.as_mut(), point % 3).await;
        assert!(early.is_none(), "the seat is taken");
        if point % 2 == 0 {
            drop(holder);
            drop(entering);
        } else {
            drop(entering);
            drop(holder);
        }
        drop(others);
        assert_eq!(numbers(&pool_queue), (0, 0), "at point {point}");
    }
    let _ = pin!(pool_queue.enter(&patient(clock))).now_or_never().expect("free").expect("a seat");
}

/// A lost wake-up between lock and waker would hang this test.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nobody_is_forgotten_by_many_threads() {
    let clock = Clock::start();
    let pool_queue = pool_queue(clock, 3, 10_000);
    let one = |number: usize, pool_queue: Arc<PoolQueue>| async move {
        let request = patient(clock);
        let mut entering = Box::pin(pool_queue.enter(&request));
        if number.is_multiple_of(3) {
            drop(left_after(entering.as_mut(), number % 7).await);
            return;
        }
        let seat = entering.await.expect("a seat");
        for _ in 0..number % 4 {
            tokio::task::yield_now().await;
        }
        if number.is_multiple_of(2) { seat.settle(Tokens(number as u64)) } else { drop(seat) }
    };
    let mut all = tokio::task::JoinSet::new();
    for number in 0..5000 {
        all.spawn(one(number, Arc::clone(&pool_queue)));
    }
    while let Some(ended) = all.join_next().await {
        ended.unwrap();
    }
    assert_eq!(numbers(&pool_queue), (0, 0));
}

/// Waits for a seat while others run this many times, then gives up.
async fn left_after<F: Future>(entering: Pin<&mut F>, times: usize) -> Option<F::Output> {
    let others = async {
        for _ in 0..times {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        came = entering => Some(came),
        () = others => None,
    }
}

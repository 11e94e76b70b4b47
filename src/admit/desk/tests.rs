use std::future::Future;
use std::pin::{Pin, pin};

use futures_util::FutureExt;
use futures_util::future::join_all;
use proptest::prelude::*;

use super::*;
use crate::admit::queue::{Aim, Standing, WhenHopeless, Why};
use crate::units::TenantId;

pub(super) fn ms(length: u64) -> Duration {
    Duration::from_millis(length)
}

/// A stream with a TTFT of a second that waits at most this long.
pub(super) fn ask(clock: Clock, rank: Priority, patience: Duration) -> Ask {
    Ask {
        tenant: TenantId::anonymous(),
        rank,
        arrival: clock.now(),
        aim: Aim::FirstToken { within: ms(1000), lead: Duration::ZERO },
        tokens: Tokens(100),
        prompt: Tokens(60),
        leave_by: clock.now() + patience,
        when_hopeless: WhenHopeless::Demote,
        standing: Standing::WithinLimits,
    }
}

pub(super) fn patient(clock: Clock) -> Ask {
    ask(clock, Priority::Normal, Duration::from_secs(3600))
}

pub(super) fn settings(max_waiting: usize) -> Settings {
    Settings { max_waiting, quantum: Tokens(100), ..Settings::default() }
}

pub(super) fn desk(clock: Clock, seats: usize, max_waiting: usize) -> Arc<Desk> {
    let desk = Arc::new(Desk::new(settings(max_waiting), clock));
    desk.set_seats(seats);
    desk
}

pub(super) fn numbers(desk: &Desk) -> (usize, usize) {
    let numbers = desk.numbers();
    (numbers.taken, numbers.waiting)
}

fn seated(offered: Offered) -> Seat {
    match offered {
        Offered::Seated(seat) => seat,
        other => panic!("a seat, not {other:?}"),
    }
}

fn waits(offered: Offered) -> Turn {
    match offered {
        Offered::Waits(turn) => turn,
        other => panic!("a turn, not {other:?}"),
    }
}

async fn sleep(clock: Clock, length: Duration) {
    clock.sleep_until(Some(clock.now() + length)).await;
}

#[tokio::test(start_paused = true)]
async fn a_seat_given_back_goes_to_the_one_who_waits() {
    let clock = Clock::start();
    let desk = desk(clock, 1, 10);
    let first = desk.enter(&patient(clock)).await.unwrap();
    let entering = desk.clone();
    let second = async move {
        let seat = entering.enter(&patient(clock)).await.unwrap();
        (seat, clock.now())
    };
    let leaving = async {
        sleep(clock, ms(250)).await;
        assert_eq!(numbers(&desk), (1, 1));
        first.settle(Tokens(7));
    };
    let ((seat, at), ()) = tokio::join!(second, leaving);
    assert_eq!(at, Tick::from_millis(250));
    assert_eq!(numbers(&desk), (1, 0));
    drop(seat);
    assert_eq!(numbers(&desk), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn who_has_waited_too_long_goes_at_that_moment_and_nobody_else() {
    let clock = Clock::start();
    let desk = desk(clock, 1, 10);
    let _seat = desk.enter(&patient(clock)).await.unwrap();
    let mut other = waits(desk.offer(&patient(clock)));
    let away = desk.enter(&ask(clock, Priority::Normal, ms(300))).await.unwrap_err();
    assert_eq!((away.why, clock.now()), (Why::WaitedTooLong, Tick::from_millis(300)));
    assert!(other.come().now_or_never().is_none());
    assert_eq!(numbers(&desk), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn who_is_pushed_out_learns_it_at_once() {
    let clock = Clock::start();
    let desk = desk(clock, 1, 1);
    let _seat = desk.enter(&patient(clock)).await.unwrap();
    let mut low = waits(desk.offer(&ask(clock, Priority::Batch, ms(9000))));
    assert!(low.come().now_or_never().is_none());
    let _high = waits(desk.offer(&ask(clock, Priority::High, ms(9000))));
    assert_eq!(low.come().await.unwrap_err().why, Why::PushedOut);
    assert_eq!(clock.now(), Tick::ZERO);
    match desk.offer(&ask(clock, Priority::Batch, ms(9000))) {
        Offered::Away(away) => assert_eq!(away.why, Why::QueueFull),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn who_leaves_the_queue_is_out_of_it_at_once() {
    let clock = Clock::start();
    let desk = desk(clock, 1, 10);
    let seat = desk.enter(&patient(clock)).await.unwrap();
    let gone = waits(desk.offer(&patient(clock)));
    let mut next = waits(desk.offer(&patient(clock)));
    drop(gone);
    assert_eq!(numbers(&desk), (1, 1));
    drop(seat);
    assert!(next.come().now_or_never().is_some_and(|came| came.is_ok()));
}

#[tokio::test(start_paused = true)]
async fn a_seat_that_was_granted_and_not_taken_goes_on() {
    let clock = Clock::start();
    let desk = desk(clock, 1, 10);
    let seat = desk.enter(&patient(clock)).await.unwrap();
    let granted = waits(desk.offer(&patient(clock)));
    let mut next = waits(desk.offer(&patient(clock)));
    drop(seat);
    assert_eq!(numbers(&desk), (1, 1), "the first of them has it");
    drop(granted);
    let seat = next.come().now_or_never().expect("called").expect("a seat");
    assert_eq!(numbers(&desk), (1, 0));
    drop(seat);
    assert_eq!(numbers(&desk), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_looked_at_and_put_away_again_is_still_called() {
    let clock = Clock::start();
    let desk = desk(clock, 1, 10);
    let seat = desk.enter(&patient(clock)).await.unwrap();
    let mut turn = waits(desk.offer(&patient(clock)));
    for _ in 0..3 {
        tokio::select! {
            called = turn.come() => panic!("nobody has left: {called:?}"),
            () = sleep(clock, ms(10)) => {}
        }
    }
    drop(seat);
    assert!(turn.come().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn more_seats_call_as_many_and_fewer_wait_for_those_that_sit() {
    let clock = Clock::start();
    let desk = desk(clock, 0, 10);
    let mut turns: Vec<Turn> = (0..4).map(|_| waits(desk.offer(&patient(clock)))).collect();
    desk.set_seats(3);
    assert_eq!(numbers(&desk), (3, 1));
    let mut seats = Vec::new();
    for turn in &mut turns[..3] {
        seats.push(turn.come().now_or_never().unwrap().unwrap());
    }
    desk.set_seats(1);
    seats.truncate(1);
    assert_eq!(numbers(&desk), (1, 1));
    drop(seats);
    assert_eq!(numbers(&desk), (1, 0));
    drop(turns.pop());
    assert_eq!(numbers(&desk), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn only_a_seat_that_nobody_wants_is_free_to_take() {
    let clock = Clock::start();
    let desk = desk(clock, 2, 10);
    let one = desk.take_free_seat(&patient(clock)).expect("a free seat");
    let two = seated(desk.offer(&patient(clock)));
    assert!(desk.take_free_seat(&patient(clock)).is_none());
    let turn = waits(desk.offer(&patient(clock)));
    drop(one);
    assert!(desk.take_free_seat(&patient(clock)).is_none(), "it belongs to the one who waits");
    drop((two, turn));
    assert!(desk.take_free_seat(&patient(clock)).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_reload_keeps_whoever_sits_or_waits() {
    let (clock, a, b) = (Clock::start(), PoolId::from("a"), PoolId::from("b"));
    let desks = Desks::new(clock);
    let queue = settings(5);
    desks.follow([(&a, Some(&queue)), (&b, None)]);
    assert!(desks.desk(&b).is_none(), "no limit, no desk");
    let desk = desks.desk(&a).unwrap();
    desk.set_seats(1);
    let seat = seated(desk.offer(&patient(clock)));
    let mut turns = [waits(desk.offer(&patient(clock))), waits(desk.offer(&patient(clock)))];

    let none_may_wait = settings(0);
    desks.follow([(&a, Some(&none_may_wait))]);
    assert_eq!(numbers(&desk), (1, 2), "who waits stays");
    assert!(matches!(desk.offer(&patient(clock)), Offered::Away(away) if away.why == Why::QueueFull));

    desks.follow([(&b, None)]);
    assert!(Arc::ptr_eq(&desks.desk(&a).expect("somebody is there"), &desk));
    drop(seat);
    let seat = turns[0].come().now_or_never().expect("the pool goes on").unwrap();

    desks.follow([(&a, None)]);
    let other = turns[1].come().now_or_never().expect("no limit any more").unwrap();
    drop((seat, other));
    desks.follow([(&a, None)]);
    assert!(desks.desk(&a).is_none(), "nobody is left");
}

#[test]
fn a_pool_that_no_settings_name_is_forgotten_when_its_last_request_has_gone() {
    let (clock, a, b) = (Clock::start(), PoolId::from("a"), PoolId::from("b"));
    let (desks, queue) = (Desks::new(clock), settings(5));
    desks.follow([(&a, Some(&queue)), (&b, Some(&queue))]);
    let desk = desks.desk(&a).unwrap();
    desk.set_seats(1);
    let seat = seated(desk.offer(&patient(clock)));
    drop(desk);
    desks.follow([(&b, Some(&queue))]);
    desks.forget_left();
    assert!(desks.desk(&a).is_some(), "somebody sits there");
    drop(seat);
    desks.forget_left();
    assert!(desks.desk(&a).is_none() && desks.desk(&b).is_some());
    desks.follow([(&a, Some(&queue)), (&b, Some(&queue))]);
    desks.forget_left();
    assert!(desks.desk(&a).is_some(), "it is named again");
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
    rank: usize,
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
    guest.prop_map(|(comes, rank, patience, ending)| Guest { comes, rank, patience, ending })
}

async fn stay(desk: Arc<Desk>, clock: Clock, guest: Guest) {
    sleep(clock, ms(guest.comes)).await;
    let ask = ask(clock, Priority::ALL[guest.rank], ms(guest.patience));
    let visit = async {
        let Ok(seat) = desk.enter(&ask).await else { return };
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
            let desk = desk(clock, seats, max_waiting);
            let watched = Arc::clone(&desk);
            let watch = async {
                loop {
                    assert!(watched.numbers().taken <= seats);
                    assert!(watched.numbers().waiting <= max_waiting);
                    sleep(clock, ms(1)).await;
                }
            };
            let all = join_all(guests.iter().map(|guest| stay(Arc::clone(&desk), clock, *guest)));
            tokio::select! {
                _ = all => {}
                () = watch => {}
            }
            assert_eq!(numbers(&desk), (0, 0));
            assert!(desk.inner.lock().waiting.is_empty(), "nobody is remembered");
            let mut seats: Vec<_> = (0..seats).map(|_| desk.take_free_seat(&patient(clock))).collect();
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
    let desk = desk(clock, 1, 500);
    for point in 0..200_usize {
        let holder = desk.enter(&patient(clock)).await.unwrap();
        let others: Vec<Turn> = (0..point % 5).map(|_| waits(desk.offer(&patient(clock)))).collect();
        let ask = patient(clock);
        let mut entering = Box::pin(desk.enter(&ask));
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
        assert_eq!(numbers(&desk), (0, 0), "at point {point}");
    }
    let _ = pin!(desk.enter(&patient(clock))).now_or_never().expect("free").expect("a seat");
}

/// A lost wake-up between lock and waker would hang this test.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nobody_is_forgotten_by_many_threads() {
    let clock = Clock::start();
    let desk = desk(clock, 3, 10_000);
    let one = |number: usize, desk: Arc<Desk>| async move {
        let ask = patient(clock);
        let mut entering = Box::pin(desk.enter(&ask));
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
        all.spawn(one(number, Arc::clone(&desk)));
    }
    while let Some(ended) = all.join_next().await {
        ended.unwrap();
    }
    assert_eq!(numbers(&desk), (0, 0));
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

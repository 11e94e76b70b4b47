//! Cost of one admission with a short and a long queue: an arrival that waits, a seat that is
//! released to the next request, a prefill that ends; and of telling other gateways of the queue.
//!
//! `cargo bench --bench admission`. Absolute figures depend on the machine; the result is that the
//! cost grows little when the queue grows a hundredfold.

use std::hint::black_box;
use std::time::Duration;

use goodput::admit::queue::{
    Deadline, LimitState, PrefillBudget, QueueRequest, QueueSettings, Scheduler, Ticket, WhenHopeless,
};
use goodput::clock::Clock;
use goodput::types::{Priority, TenantId, Tick, Tokens};

/// Waiting requests.
const WAITING: [usize; 3] = [10, 1_000, 100_000];
/// Admissions per run, and runs; the median is printed.
const ADMISSIONS: u64 = 20_000;
const TURNS: usize = 7;
const TENANTS: u64 = 200;

fn main() {
    // `cargo test --all-targets` runs benches, too, without this.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    println!("{:>9} {:>24} {:>24} {:>14}", "waiting", "ns per admission", "with a limit on reading", "ns per report");
    for waiting in WAITING {
        let median = |turn: &dyn Fn() -> u64| {
            let mut turns: Vec<u64> = (0..TURNS).map(|_| turn()).collect();
            turns.sort_unstable();
            turns[TURNS / 2]
        };
        let cost = |reading| median(&|| turn(waiting, reading));
        let (queue, _, number) = queue_of(waiting, PrefillBudget::NoLimit);
        let report = median(&|| reports(&queue, at(number)));
        let [unlimited, limited] = [PrefillBudget::NoLimit, PrefillBudget::Tokens(Tokens(1024))].map(cost);
        println!("{waiting:>9} {unlimited:>24} {limited:>24} {report:>14}");
    }
}

/// Nanoseconds per admission: as many come as go, so that as many wait all the time.
fn turn(waiting: usize, reading: PrefillBudget) -> u64 {
    let clock = Clock::start();
    let (mut queue, mut running, mut number) = queue_of(waiting, reading);
    let begin = clock.now();
    for _ in 0..ADMISSIONS {
        let (_, decisions) = queue.offer(&request(number), at(number));
        running.extend(decisions.admitted);
        let ends = running.swap_remove((number % running.len() as u64) as usize);
        running.extend(read_and_release(&mut queue, ends, at(number)));
        number += 1;
    }
    black_box(&queue);
    (clock.now() - begin).as_nanos() as u64 / ADMISSIONS
}

/// Nanoseconds per report to the other gateways.
fn reports(queue: &Scheduler, at: Tick) -> u64 {
    const REPORTS: u64 = 1_000;
    let clock = Clock::start();
    let begin = clock.now();
    for _ in 0..REPORTS {
        black_box(queue.report(at));
    }
    (clock.now() - begin).as_nanos() as u64 / REPORTS
}

/// A queue in which so many wait, the requests that run, and the number of the next one.
fn queue_of(waiting: usize, reading: PrefillBudget) -> (Scheduler, Vec<Ticket>, u64) {
    let mut queue = Scheduler::new(QueueSettings { max_waiting: waiting + 1, reading, ..QueueSettings::default() });
    let _nobody_waits = (queue.set_seats(64, Tick::ZERO), queue.set_prefilling_engines(8, Tick::ZERO));
    let mut running = Vec::new();
    let mut number = 0;
    while queue.waiting() < waiting {
        running.extend(queue.offer(&request(number), at(number)).1.admitted);
        number += 1;
    }
    (queue, running, number)
}

fn read_and_release(queue: &mut Scheduler, ticket: Ticket, at: Tick) -> Vec<Ticket> {
    let mut admitted = queue.read(ticket, at).admitted;
    admitted.extend(queue.release(ticket, Tokens(700), at).admitted);
    admitted
}

/// The moment of this number: one millisecond each.
fn at(number: u64) -> Tick {
    Tick::from_millis(number)
}

/// Requests of many tenants in all priorities, with varied sizes.
fn request(number: u64) -> QueueRequest {
    let drawn = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    QueueRequest {
        tenant: TenantId::from(format!("tenant-{}", drawn % TENANTS)),
        priority: Priority::ALL[(drawn % 5) as usize],
        arrival: at(number),
        deadline: Deadline::FirstToken { within: Duration::from_millis(500 + drawn % 100_000), lead: Duration::ZERO },
        tokens: Tokens(200 + drawn % 1_000),
        prompt: Tokens(100 + drawn % 900),
        timeout_at: at(number) + Duration::from_secs(1 << 20),
        when_hopeless: WhenHopeless::Demote,
        limit_state: LimitState::WithinLimits,
    }
}

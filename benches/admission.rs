//! What one admission costs while few or many wait: an arrival that has to wait, a seat that
//! comes free and goes to the next, a prompt that has been read.
//!
//! `cargo bench --bench admission`. Figures of one machine say little; that the cost grows by a
//! little where the queue grows by a hundred is what is shown.

use std::hint::black_box;
use std::time::Duration;

use goodput::admit::queue::{Aim, Ask, Reading, Scheduler, Settings, Standing, Ticket, WhenHopeless};
use goodput::clock::Clock;
use goodput::units::{Priority, TenantId, Tick, Tokens};

/// Requests that wait meanwhile.
const WAITING: [usize; 3] = [10, 1_000, 100_000];
/// Admissions of one turn, and turns; the median is told.
const ADMISSIONS: u64 = 20_000;
const TURNS: usize = 7;
const TENANTS: u64 = 200;

fn main() {
    // `cargo test --all-targets` runs benches, too, without this.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    println!("{:>9} {:>24} {:>24}", "waiting", "ns per admission", "with a limit on reading");
    for waiting in WAITING {
        let cost = |reading| {
            let mut turns: Vec<u64> = (0..TURNS).map(|_| turn(waiting, reading)).collect();
            turns.sort_unstable();
            turns[TURNS / 2]
        };
        println!("{waiting:>9} {:>24} {:>24}", cost(Reading::NoLimit), cost(Reading::Tokens(Tokens(1024))));
    }
}

/// Nanoseconds per admission: as many come as go, so that as many wait all the time.
fn turn(waiting: usize, reading: Reading) -> u64 {
    let clock = Clock::start();
    let mut queue = Scheduler::new(Settings { max_waiting: waiting + 1, reading, ..Settings::default() });
    let _nobody_waits = (queue.set_seats(64, Tick::ZERO), queue.set_readers(8, Tick::ZERO));
    let mut running = Vec::new();
    let mut number = 0;
    while queue.waiting() < waiting {
        running.extend(queue.offer(&ask(number), at(number)).1.admitted);
        number += 1;
    }
    let begin = clock.now();
    for _ in 0..ADMISSIONS {
        let (_, moves) = queue.offer(&ask(number), at(number));
        running.extend(moves.admitted);
        let ends = running.swap_remove((number % running.len() as u64) as usize);
        running.extend(read_and_release(&mut queue, ends, at(number)));
        number += 1;
    }
    black_box(&queue);
    (clock.now() - begin).as_nanos() as u64 / ADMISSIONS
}

fn read_and_release(queue: &mut Scheduler, ticket: Ticket, at: Tick) -> Vec<Ticket> {
    let mut admitted = queue.read(ticket, at).admitted;
    admitted.extend(queue.release(ticket, Tokens(700), at).admitted);
    admitted
}

/// A millisecond from one to the next.
fn at(number: u64) -> Tick {
    Tick::from_millis(number)
}

/// Requests of many tenants in all ranks, as different as they come.
fn ask(number: u64) -> Ask {
    let drawn = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    Ask {
        tenant: TenantId::from(format!("tenant-{}", drawn % TENANTS)),
        rank: Priority::ALL[(drawn % 5) as usize],
        arrival: at(number),
        aim: Aim::FirstToken { within: Duration::from_millis(500 + drawn % 100_000), lead: Duration::ZERO },
        tokens: Tokens(200 + drawn % 1_000),
        prompt: Tokens(100 + drawn % 900),
        leave_by: at(number) + Duration::from_secs(1 << 20),
        when_hopeless: WhenHopeless::Demote,
        standing: Standing::WithinLimits,
    }
}

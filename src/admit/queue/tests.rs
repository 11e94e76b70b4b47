use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

mod model;

use model::{Fate, Slow};

const NEVER: Tick = Tick::from_nanos(u64::MAX);

fn ms(at: u64) -> Tick {
    Tick::from_millis(at)
}

fn length(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A stream of `rank` that arrives at `at` with a TTFT of a second.
fn request(tenant: &str, priority: Priority, at: u64) -> QueueRequest {
    QueueRequest {
        tenant: TenantId::from(tenant),
        priority,
        arrival: ms(at),
        deadline: Deadline::FirstToken { within: length(1000), lead: Duration::ZERO },
        tokens: Tokens(100),
        prompt: Tokens(60),
        timeout_at: NEVER,
        when_hopeless: WhenHopeless::Demote,
        limit_state: LimitState::WithinLimits,
    }
}

fn scheduler(seats: usize, max_waiting: usize) -> Scheduler {
    let mut queue = Scheduler::new(QueueSettings { max_waiting, quantum: Tokens(100), ..QueueSettings::default() });
    assert_eq!(queue.set_seats(seats, Tick::ZERO), Decisions::default());
    queue
}

/// A scheduler whose only seat is occupied, and its ticket.
fn taken(max_waiting: usize) -> (Scheduler, Ticket) {
    let mut queue = scheduler(1, max_waiting);
    let (holder, decisions) = queue.offer(&request("holder", Priority::Critical, 0), ms(0));
    assert_eq!(decisions.admitted, [holder]);
    (queue, holder)
}

fn wait(queue: &mut Scheduler, request: &QueueRequest, at: u64) -> Ticket {
    let (ticket, decisions) = queue.offer(request, ms(at));
    assert_eq!(decisions, Decisions::default(), "it waits");
    ticket
}

/// Passes the one seat on until no request waits; returns the order.
fn drained(queue: &mut Scheduler, holder: Ticket, at: u64) -> Vec<Ticket> {
    let (mut order, mut next) = (vec![], Some(holder));
    while let Some(ticket) = next {
        let decisions = queue.release(ticket, Tokens(100), ms(at));
        assert_eq!(decisions.refused, []);
        next = decisions.admitted.first().copied();
        order.extend(next);
    }
    assert_eq!((queue.waiting(), queue.running()), (0, 0));
    order
}

#[test]
fn ranks_then_deadlines_then_arrival_without_one() {
    let (mut queue, holder) = taken(100);
    let whenever = QueueRequest { deadline: Deadline::Whenever, ..request("a", Priority::Normal, 5) };
    let whole = Deadline::Whole { within: length(2000), service: length(1500) };
    let late_whenever = wait(&mut queue, &QueueRequest { arrival: ms(7), ..whenever.clone() }, 8);
    let early_whenever = wait(&mut queue, &whenever, 9);
    let stream = wait(&mut queue, &request("a", Priority::Normal, 10), 10);
    let answer = wait(&mut queue, &QueueRequest { deadline: whole, ..request("a", Priority::Normal, 11) }, 11);
    let low = wait(&mut queue, &request("a", Priority::Low, 1), 12);
    let high = wait(&mut queue, &request("a", Priority::High, 13), 13);
    let order = drained(&mut queue, holder, 20);
    assert_eq!(order, [high, answer, stream, early_whenever, late_whenever, low]);
}

#[test]
fn a_burst_of_one_tenant_does_not_hold_its_rank() {
    let (mut queue, holder) = taken(100);
    let flood: Vec<_> = (1..=20).map(|at| wait(&mut queue, &request("flood", Priority::Normal, at), at)).collect();
    let other = wait(&mut queue, &request("other", Priority::Normal, 30), 30);
    let order = drained(&mut queue, holder, 40);
    let turn = order.iter().position(|ticket| *ticket == other).unwrap();
    assert_eq!(turn, 2, "a quantum of 100 tokens lets two of 100 go before it");
    assert_eq!(order[0], flood[0]);
}

#[test]
fn what_is_given_back_does_not_lift_a_tenant_over_those_that_had_least() {
    let mut queue = scheduler(2, 100);
    let dear = |tenant, at| QueueRequest { tokens: Tokens(5000), ..request(tenant, Priority::Normal, at) };
    let (returned, _) = queue.offer(&dear("a", 0), ms(0));
    let (holder, _) = queue.offer(&request("b", Priority::Normal, 1), ms(1));
    let served = wait(&mut queue, &dear("b", 2), 2);
    let b: Vec<_> = (3..6).map(|at| wait(&mut queue, &request("b", Priority::Normal, at), at)).collect();
    let a: Vec<_> = (6..9).map(|at| wait(&mut queue, &request("a", Priority::Normal, at), at)).collect();
    assert_eq!(queue.release(holder, Tokens(100), ms(10)).admitted, [served]);
    // Both had about 5000 when nearly all of it is refunded to one.
    let mut next = queue.release(returned, Tokens(1), ms(11)).admitted;
    let mut order = vec![];
    while let Some(ticket) = next.first().copied() {
        order.push(ticket);
        next = queue.release(ticket, Tokens(100), ms(12)).admitted;
    }
    assert_eq!(order, [b[0], a[0], b[1], a[1], b[2], a[2]], "by turns, no run of those that were given back to");
}

#[test]
fn who_cannot_make_it_steps_behind_by_the_rule_of_its_class() {
    let (mut queue, holder) = taken(100);
    let first = |rule| QueueRequest { when_hopeless: rule, ..request("a", Priority::Normal, 0) };
    let serve = wait(&mut queue, &first(WhenHopeless::Serve), 0);
    let demote = wait(&mut queue, &first(WhenHopeless::Demote), 0);
    let shed = wait(&mut queue, &first(WhenHopeless::Shed), 0);
    let hopeful = wait(&mut queue, &request("a", Priority::Normal, 500), 500);
    assert_eq!(queue.next_deadline(), Some(Tick::from_nanos(ms(1000).as_nanos() + 1)));
    assert_eq!(queue.expire(ms(1000)), Decisions::default(), "a seat at the last moment would still do");
    let refused = queue.expire(ms(1001)).refused;
    assert_eq!(
        refused.iter().map(|away| (away.ticket, away.why)).collect::<Vec<_>>(),
        [(shed, RejectReason::Hopeless)]
    );
    assert_eq!(drained(&mut queue, holder, 1001), [serve, hopeful, demote]);
}

#[test]
fn a_hopeless_request_is_not_shed_from_a_free_seat() {
    let mut queue = scheduler(1, 10);
    let late = QueueRequest { when_hopeless: WhenHopeless::Shed, ..request("a", Priority::Normal, 0) };
    let (first, decisions) = queue.offer(&late, ms(5000));
    assert_eq!(decisions.admitted, [first]);
    let (second, decisions) = queue.offer(&late, ms(5000));
    assert_eq!((decisions.refused[0].ticket, decisions.refused[0].why), (second, RejectReason::Hopeless));
}

#[test]
fn demotion_leaves_equal_deadlines_of_a_tenant_in_order() {
    let (mut queue, holder) = taken(100);
    let with_lead = |lead| QueueRequest {
        deadline: Deadline::FirstToken { within: length(1000), lead: length(lead) },
        ..request("a", Priority::Normal, 0)
    };
    let long = wait(&mut queue, &with_lead(900), 0);
    let short = wait(&mut queue, &with_lead(10), 0);
    assert_eq!(drained(&mut queue, holder, 500), [long, short], "only the long one is hopeless by itself");
    // A demoted one is not passed either.
    let (mut queue, holder) = taken(100);
    let long = wait(&mut queue, &with_lead(900), 0);
    assert_eq!(queue.expire(ms(500)), Decisions::default());
    let short = wait(&mut queue, &with_lead(10), 500);
    assert_eq!(drained(&mut queue, holder, 500), [long, short]);
}

#[test]
fn over_the_limit_means_behind_everybody() {
    let (mut queue, holder) = taken(100);
    let over = wait(
        &mut queue,
        &QueueRequest { limit_state: LimitState::OverLimit, ..request("a", Priority::Critical, 0) },
        0,
    );
    let batch = wait(&mut queue, &QueueRequest { deadline: Deadline::Whenever, ..request("b", Priority::Batch, 1) }, 1);
    assert_eq!(drained(&mut queue, holder, 2), [batch, over]);
}

#[test]
fn a_full_queue_refuses_the_lowest_rank_first_but_not_inside_its_share() {
    let settings = QueueSettings {
        max_waiting: 4,
        shares: Shares::new([250, 150, 150, 150, 250]).unwrap(),
        ..QueueSettings::default()
    };
    let mut queue = Scheduler::new(settings);
    let _ = queue.set_seats(1, ms(0));
    let (holder, _) = queue.offer(&request("holder", Priority::Normal, 0), ms(0));
    let over = wait(
        &mut queue,
        &QueueRequest { limit_state: LimitState::OverLimit, ..request("a", Priority::Critical, 1) },
        1,
    );
    let batch: Vec<_> = (2..=4).map(|at| wait(&mut queue, &request("a", Priority::Batch, at), at)).collect();
    let mut pushed = vec![];
    for at in 5..=7 {
        let (_, decisions) = queue.offer(&request("a", Priority::Normal, at), ms(at));
        assert_eq!((decisions.admitted.len(), decisions.refused[0].why), (0, RejectReason::PushedOut));
        pushed.push(decisions.refused[0].ticket);
    }
    assert_eq!(pushed, [over, batch[2], batch[1]], "the newest of the lowest rank");
    let (fourth, decisions) = queue.offer(&request("a", Priority::Normal, 8), ms(8));
    assert_eq!((decisions.refused[0].ticket, decisions.refused[0].why), (fourth, RejectReason::QueueFull));
    assert_eq!(queue.waiting_in(Priority::Batch, LimitState::WithinLimits), 1);
    assert_eq!(drained(&mut queue, holder, 9).len(), 4);
}

#[test]
fn a_burst_does_not_hold_all_places_of_its_rank() {
    let (mut queue, _) = taken(4);
    let flood: Vec<_> = (1..=4).map(|at| wait(&mut queue, &request("flood", Priority::Normal, at), at)).collect();
    let mut pushed = vec![];
    for at in 5..=6 {
        let (_, decisions) = queue.offer(&request("other", Priority::Normal, at), ms(at));
        pushed.extend(decisions.refused.iter().map(|away| away.ticket));
    }
    assert_eq!(pushed, [flood[3], flood[2]]);
    let (third, decisions) = queue.offer(&request("other", Priority::Normal, 7), ms(7));
    assert_eq!(
        (decisions.refused[0].ticket, decisions.refused[0].why),
        (third, RejectReason::QueueFull),
        "two each are even"
    );
}

#[test]
fn what_is_late_from_the_start_keeps_nobody_out_who_is_not() {
    let (mut queue, holder) = taken(4);
    let deadline = Deadline::FirstToken { within: length(1000), lead: length(2000) };
    let late = |tenant, at| QueueRequest { deadline, ..request(tenant, Priority::Normal, at) };
    let flood: Vec<_> = (1..=2).map(|at| wait(&mut queue, &late("flood", at), at)).collect();
    let refused = |queue: &mut Scheduler, request: &QueueRequest, at| {
        let (ticket, decisions) = queue.offer(request, ms(at));
        decisions.refused.iter().map(|away| (away.ticket == ticket, away.why)).collect::<Vec<_>>()
    };
    assert_eq!(refused(&mut queue, &late("flood", 3), 3), [(true, RejectReason::QueueFull)], "half of the places");
    assert_eq!(refused(&mut queue, &late("other", 4), 4), [(false, RejectReason::PushedOut)], "but they are shared");
    let batch: Vec<_> = (5..=6).map(|at| wait(&mut queue, &request("a", Priority::Batch, at), at)).collect();
    assert!(queue.withdraw(flood[0], ms(7)));
    let over =
        wait(&mut queue, &QueueRequest { limit_state: LimitState::OverLimit, ..request("b", Priority::Normal, 8) }, 8);
    let (again, decisions) = queue.offer(&late("flood", 9), ms(9));
    assert_eq!(
        (decisions.refused[0].ticket, decisions.refused[0].why),
        (over, RejectReason::PushedOut),
        "but who is over a limit"
    );
    assert!(queue.withdraw(again, ms(10)));
    let third = wait(&mut queue, &request("a", Priority::Batch, 11), 11);
    assert_eq!(
        refused(&mut queue, &late("flood", 12), 12),
        [(true, RejectReason::QueueFull)],
        "no place of a lower rank"
    );
    let order = drained(&mut queue, holder, 13);
    assert_eq!((order.len(), &order[1..]), (4, &[batch[0], batch[1], third][..]));
}

#[test]
fn who_leaves_or_waits_too_long_is_gone_at_once() {
    let (mut queue, holder) = taken(10);
    let gone = wait(&mut queue, &request("a", Priority::Normal, 0), 0);
    let late = wait(&mut queue, &QueueRequest { timeout_at: ms(300), ..request("a", Priority::Normal, 0) }, 0);
    assert!(queue.withdraw(gone, ms(10)) && !queue.withdraw(gone, ms(10)) && !queue.withdraw(holder, ms(10)));
    assert_eq!(queue.next_deadline(), Some(ms(300)));
    let decisions = queue.release(holder, Tokens(1), ms(300));
    assert_eq!(
        (decisions.admitted.len(), decisions.refused[0].ticket, decisions.refused[0].why),
        (0, late, RejectReason::WaitedTooLong)
    );
    assert_eq!((queue.next_deadline(), queue.waiting(), queue.running()), (None, 0, 0));
    assert_eq!(queue.release(holder, Tokens(1), ms(301)), Decisions::default(), "twice changes nothing");
}

#[test]
fn seats_come_and_go() {
    let mut queue = scheduler(0, 10);
    let all: Vec<_> = (0..5).map(|at| wait(&mut queue, &request("a", Priority::Normal, at), at)).collect();
    assert_eq!(queue.set_seats(3, ms(10)).admitted, all[..3]);
    assert_eq!(queue.set_seats(1, ms(11)), Decisions::default());
    assert_eq!(queue.release(all[0], Tokens(100), ms(12)), Decisions::default());
    assert_eq!(queue.release(all[1], Tokens(100), ms(12)), Decisions::default());
    assert_eq!(queue.release(all[2], Tokens(100), ms(12)).admitted, [all[3]]);
    assert_eq!(queue.take_free_seat(&request("b", Priority::Normal, 12), ms(12)), None);
    assert_eq!(queue.set_seats(9, ms(13)).admitted, [all[4]]);
    assert!(queue.take_free_seat(&request("b", Priority::Normal, 13), ms(13)).is_some());
}

#[test]
fn retry_after_is_the_time_until_those_before_are_gone() {
    let (mut queue, mut holder) = taken(4);
    for at in 1..=4 {
        wait(&mut queue, &request("a", Priority::Normal, at), at);
    }
    let (_, decisions) = queue.offer(&request("a", Priority::Normal, 5), ms(5));
    assert_eq!(decisions.refused[0].retry_after, None, "nothing measured yet");
    for at in [1500, 3000] {
        holder = queue.release(holder, Tokens(100), ms(at)).admitted[0];
        wait(&mut queue, &request("a", Priority::Normal, at), at);
    }
    let (_, decisions) = queue.offer(&request("a", Priority::Normal, 3000), ms(3000));
    assert_eq!(decisions.refused[0].retry_after, Some(length(8000)), "five times 1.5 s, in whole seconds");
    let (_, decisions) = queue.offer(&request("a", Priority::Critical, 3000), ms(3000));
    assert_eq!(decisions.refused[0].why, RejectReason::PushedOut);
    assert_eq!(queue.expected_wait(Priority::High, ms(3000)), Some(length(3000)), "one critical, and itself");
    // At that rate the queue has drained by then.
    let mut freed = 0;
    for at in [4500, 6000, 7500, 9000, 10_500] {
        freed += queue.release(holder, Tokens(100), ms(at)).admitted.first().map_or(0, |next| {
            holder = *next;
            1
        });
    }
    assert_eq!((freed, queue.waiting()), (4, 0));
}

#[test]
fn retry_after_is_a_second_at_least() {
    let (mut queue, holder) = taken(1);
    let next = wait(&mut queue, &request("a", Priority::Normal, 0), 0);
    assert_eq!(queue.release(holder, Tokens(100), ms(0)).admitted, [next]);
    wait(&mut queue, &request("a", Priority::Normal, 0), 0);
    let (_, decisions) = queue.offer(&request("a", Priority::Normal, 0), ms(0));
    assert_eq!(decisions.refused[0].retry_after, Some(SECOND), "seats came free in no time");
}

/// Two seats, the high class at 120 % of them for ten seconds, five requests of a low one.
#[test]
fn a_low_class_starts_within_the_bound_under_overload() {
    let mut queue = scheduler(2, 1000);
    let (mut running, mut started): (Vec<(u64, Ticket)>, Vec<u64>) = (vec![], vec![]);
    let mut low = vec![];
    // Each holds its seat for 100 ms: 20 a second fit, 24 arrive.
    for at in 0..10_000 {
        let mut admitted = vec![];
        let over: Vec<_> = running.extract_if(.., |(until, _)| *until == at).collect();
        for (_, ticket) in over {
            admitted.extend(queue.release(ticket, Tokens(100), ms(at)).admitted);
        }
        if at % 125 == 0 {
            for _ in 0..3 {
                admitted.extend(queue.offer(&request("high", Priority::High, at), ms(at)).1.admitted);
            }
        }
        if at == 1000 {
            low = (0..5).map(|_| wait(&mut queue, &request("low", Priority::Low, at), at)).collect();
        }
        started.extend(admitted.iter().filter(|ticket| low.contains(ticket)).map(|_| at));
        running.extend(admitted.iter().map(|ticket| (at + 100, *ticket)));
    }
    let bound = Shares::default().longest_wait(Priority::Low, Tokens(100)).0 / 100;
    let seconds = |nth: u64| 1000 + nth * (bound + 1) * 50;
    assert_eq!(started.len(), 5, "{started:?}");
    assert!(started.iter().zip(1..).all(|(at, nth)| *at <= seconds(nth)), "{started:?}");
    assert!(started[0] > 1500, "and the higher rank went first: {started:?}");
}

// ---- prompts that are being read ---------------------------------------------------------------

/// A scheduler with ten seats and `readers` engines, each with room for 100 prompt tokens.
fn reading(prefilling_engines: usize) -> Scheduler {
    let mut queue =
        Scheduler::new(QueueSettings { reading: PrefillBudget::Tokens(Tokens(100)), ..QueueSettings::default() });
    let _ = (queue.set_seats(10, ms(0)), queue.set_prefilling_engines(prefilling_engines, ms(0)));
    queue
}

fn prompt(tokens: u64, request: QueueRequest) -> QueueRequest {
    QueueRequest { prompt: Tokens(tokens), ..request }
}

#[test]
fn prompts_wait_for_an_engine_to_read_them_and_nobody_passes_the_next() {
    let mut queue = reading(1);
    let (first, decisions) = queue.offer(&prompt(60, request("a", Priority::Critical, 0)), ms(0));
    assert_eq!(decisions.admitted, [first]);
    let second = wait(&mut queue, &prompt(60, request("a", Priority::Critical, 1)), 1);
    let small = wait(&mut queue, &prompt(10, request("a", Priority::Critical, 2)), 2);
    assert_eq!(queue.free_seats(), 9, "seats are not what is short");
    assert_eq!(queue.take_free_seat(&prompt(10, request("a", Priority::Critical, 2)), ms(2)), None);
    assert_eq!(queue.read(first, ms(3)).admitted, [second, small]);
    assert_eq!(queue.read(first, ms(4)), Decisions::default(), "counted once");
    // The end of a response without an observed first token also frees its prompt tokens.
    let third = wait(&mut queue, &prompt(100, request("a", Priority::Critical, 5)), 5);
    assert_eq!(queue.release(second, Tokens(100), ms(6)).admitted, []);
    assert_eq!(queue.release(small, Tokens(100), ms(7)).admitted, [third]);
}

#[test]
fn where_reading_is_what_is_short_the_pace_of_reading_is_the_rate() {
    let mut queue = reading(1);
    let (mut reads, _) = queue.offer(&prompt(100, request("a", Priority::Critical, 0)), ms(0));
    (0..4).for_each(|_| _ = wait(&mut queue, &prompt(100, request("a", Priority::Critical, 0)), 0));
    for at in [500, 1000] {
        reads = queue.read(reads, ms(at)).admitted[0];
    }
    assert_eq!(queue.expected_wait(Priority::Critical, ms(1000)), Some(length(1500)), "two, and itself");
}

#[test]
fn over_the_limit_nobody_passes_who_leaves_reading_to_others() {
    let mut queue = reading(1);
    let (first, decisions) = queue.offer(&prompt(10, request("a", Priority::Critical, 0)), ms(0));
    assert_eq!(decisions.admitted, [first]);
    let within = wait(&mut queue, &prompt(90, request("b", Priority::Batch, 1)), 1);
    let over = QueueRequest { limit_state: LimitState::OverLimit, ..request("c", Priority::Critical, 2) };
    wait(&mut queue, &prompt(10, over), 2);
    assert_eq!(queue.read(first, ms(3)).admitted, [within]);
}

#[test]
fn a_long_prompt_has_one_engine_to_itself_and_no_more() {
    let mut queue = reading(2);
    let (long, decisions) = queue.offer(&prompt(30_000, request("a", Priority::Critical, 0)), ms(0));
    assert_eq!(decisions.admitted, [long]);
    let (other, decisions) = queue.offer(&prompt(100, request("b", Priority::Critical, 1)), ms(1));
    assert_eq!(decisions.admitted, [other]);
    let next = wait(&mut queue, &prompt(1, request("b", Priority::Critical, 2)), 2);
    assert_eq!(queue.read(other, ms(3)).admitted, [next]);
}

#[test]
fn lower_ranks_and_the_hopeless_leave_reading_to_others() {
    let mut queue = reading(10);
    for at in 0..7 {
        let (ticket, decisions) = queue.offer(&prompt(100, request("a", Priority::Critical, at)), ms(at));
        assert_eq!(decisions.admitted, [ticket]);
    }
    let batch = wait(&mut queue, &prompt(100, request("b", Priority::Batch, 7)), 7);
    // So expensive that its priority's share does not cover it.
    let deadline = Deadline::FirstToken { within: length(5), lead: length(3) };
    let late = QueueRequest { deadline, tokens: Tokens(100_000), ..request("c", Priority::Critical, 0) };
    let late = wait(&mut queue, &prompt(100, late), 8);
    let (normal, decisions) = queue.offer(&prompt(100, request("d", Priority::Normal, 9)), ms(9));
    assert_eq!(decisions.admitted, [normal], "it passes those that are held back");
    assert_eq!(queue.waiting(), 2);
    for read in 1..=7 {
        let admitted = queue.read(Ticket(read), ms(10)).admitted;
        let expected = if read == 2 { vec![batch] } else { vec![] };
        assert_eq!(admitted, expected, "seven of ten, its own included: {read}");
    }
    assert_eq!(queue.read(normal, ms(11)).admitted, [late], "two of ten, where two and a half are the most");
}

#[test]
fn whoever_wants_may_read_alone() {
    let mut queue = reading(1);
    let over = QueueRequest { limit_state: LimitState::OverLimit, ..request("a", Priority::Batch, 0) };
    let (first, decisions) = queue.offer(&prompt(100, over.clone()), ms(0));
    assert_eq!(decisions.admitted, [first]);
    let second = wait(&mut queue, &prompt(100, over), 1);
    assert_eq!(queue.read(first, ms(2)).admitted, [second]);
}

#[test]
fn no_seat_is_free_for_a_rank_that_leaves_the_reading_to_others() {
    let mut queue = reading(1);
    let _ = queue.offer(&prompt(60, request("a", Priority::Normal, 0)), ms(0));
    let batch = prompt(20, request("b", Priority::Batch, 1));
    assert_eq!(queue.take_free_seat(&batch, ms(1)), None);
    assert_eq!((queue.waiting(), queue.running()), (0, 1), "nothing of it is left");
    queue.set_settings(QueueSettings { max_waiting: 0, ..queue.settings.clone() });
    let (ticket, decisions) = queue.offer(&batch, ms(2));
    let away: Vec<_> = decisions.refused.iter().map(|away| (away.ticket, away.why)).collect();
    assert_eq!((decisions.admitted, away), (vec![], vec![(ticket, RejectReason::QueueFull)]), "nobody may wait");
}

// ---- the pace of prompts -----------------------------------------------------------------------

const PACE: PrefillPace =
    PrefillPace { per_second: 1000.0, spare: f64::INFINITY, burst: 100.0, behind: 100.0, most: 1000.0, least: 300.0 };

/// A scheduler with a hundred seats and one engine, at this pace.
fn paced(pace: PrefillPace) -> Scheduler {
    let mut queue = Scheduler::new(QueueSettings { quantum: Tokens(1 << 30), ..QueueSettings::default() });
    let _ = (queue.set_seats(100, ms(0)), queue.set_prefilling_engines(1, ms(0)), queue.set_pace(Some(pace), ms(0)));
    queue
}

/// No predicted prefill time and a distant deadline, so that only the pace delays it.
fn patient(tokens: u64, priority: Priority, at: u64) -> QueueRequest {
    let deadline = Deadline::FirstToken { within: length(100_000), lead: Duration::ZERO };
    QueueRequest { deadline, when_hopeless: WhenHopeless::Serve, ..prompt(tokens, request("a", priority, at)) }
}

fn goes(queue: &mut Scheduler, request: &QueueRequest, at: u64) -> Ticket {
    let (ticket, decisions) = queue.offer(request, ms(at));
    assert_eq!((decisions.admitted, decisions.refused), (vec![ticket], vec![]), "it goes at once");
    ticket
}

#[test]
fn prompts_go_at_the_pace_and_what_is_saved_up_goes_at_once() {
    let mut queue = paced(PACE);
    let critical = |at| patient(100, Priority::Critical, at);
    // A full bucket, plus the allowed debt.
    let first = goes(&mut queue, &critical(0), 0);
    let second = goes(&mut queue, &critical(0), 0);
    assert_eq!(queue.bucket.level, -100.0);
    let third = wait(&mut queue, &critical(0), 0);
    assert_eq!(queue.free_seats(), 98, "seats are not what is short");
    assert_eq!(queue.read(first, ms(0)), Decisions::default(), "nor is the reading");
    assert_eq!(queue.read(second, ms(0)), Decisions::default());
    let moment = queue.next_refill().expect("by the pace alone");
    assert!(moment <= ms(1), "a token is enough to be within what it may be behind: {moment:?}");
    assert_eq!(queue.expire(moment).admitted, [third]);
    // One per 100 ms from now on.
    let began: Vec<u64> = (0..5)
        .map(|_| {
            let now = queue.now.as_nanos() / 1_000_000;
            let next = wait(&mut queue, &critical(0), now);
            let moment = queue.next_refill().unwrap();
            assert_eq!(queue.expire(moment).admitted, [next]);
            let _nobody_waits = queue.read(next, moment);
            moment.as_nanos() / 1_000_000
        })
        .collect();
    assert!(began.windows(2).all(|two| (99..=102).contains(&(two[1] - two[0]))), "{began:?}");
    let _nobody_waits = queue.expire(ms(100_000));
    assert_eq!(queue.bucket.level, 100.0, "no more is saved up than the bucket holds");
}

#[test]
fn lower_ranks_leave_a_part_of_the_bucket_to_others() {
    let mut queue = paced(PACE);
    // 140 tokens above the level at which batch must wait, 200 above that of critical.
    goes(&mut queue, &patient(139, Priority::Critical, 0), 0);
    goes(&mut queue, &patient(10, Priority::Batch, 0), 0);
    let batch = wait(&mut queue, &patient(10, Priority::Batch, 0), 0);
    goes(&mut queue, &patient(10, Priority::Critical, 0), 0);
    assert_eq!(queue.waiting(), 1, "it passes those that are held back");
    let moment = queue.next_refill().unwrap();
    assert!((ms(19)..ms(21)).contains(&moment), "{moment:?}");
    assert_eq!(queue.expire(ms(18)), Decisions::default());
    assert_eq!(queue.expire(moment).admitted, [batch]);
}

#[test]
fn while_the_bucket_is_empty_an_engine_has_less_ahead_of_it() {
    let mut queue = paced(PrefillPace {
        per_second: 1.0,
        spare: f64::INFINITY,
        burst: 100.0,
        behind: 10_000.0,
        most: 1000.0,
        least: 300.0,
    });
    let critical = |tokens| patient(tokens, Priority::Critical, 0);
    assert_eq!(queue.reading_per_engine(), Some(Tokens(1000)));
    let first = goes(&mut queue, &critical(200), 0);
    assert_eq!((queue.bucket.level, queue.reading_per_engine()), (-100.0, Some(Tokens(300))));
    goes(&mut queue, &critical(100), 0);
    let third = wait(&mut queue, &critical(100), 0);
    let moment = queue.next_refill().unwrap();
    assert!((ms(199_999)..ms(200_001)).contains(&moment), "there is something in the bucket again: {moment:?}");
    assert_eq!(queue.read(first, ms(1)).admitted, [third], "or its engine has less ahead");
}

#[test]
fn what_leaves_before_its_first_token_gives_back_what_it_took_and_what_was_read_does_not() {
    let mut queue = paced(PACE);
    let read = goes(&mut queue, &patient(50, Priority::Critical, 0), 0);
    let left = goes(&mut queue, &patient(120, Priority::Critical, 0), 0);
    assert_eq!(queue.bucket.level, -70.0);
    let _nobody_waits = queue.read(read, ms(0));
    let _nobody_waits = queue.release(read, Tokens(60), ms(0));
    assert_eq!(queue.bucket.level, -70.0);
    let _nobody_waits = queue.release(left, Tokens::ZERO, ms(0));
    assert_eq!(queue.bucket.level, 50.0);
}

#[test]
fn a_new_pace_takes_nothing_away_but_what_it_has_no_room_for() {
    let mut queue = paced(PACE);
    goes(&mut queue, &patient(30, Priority::Critical, 0), 0);
    let _ = queue.set_pace(Some(PrefillPace { burst: 200.0, ..PACE }), ms(0));
    assert_eq!(queue.bucket.level, 70.0);
    let _ = queue.set_pace(Some(PrefillPace { burst: 20.0, ..PACE }), ms(0));
    assert_eq!(queue.bucket.level, 20.0);
    let _ = queue.set_pace(Some(PrefillPace { per_second: f64::INFINITY, ..PACE }), ms(0));
    assert_eq!(
        (queue.expire(ms(0)), queue.bucket.level),
        (Decisions::default(), 100.0),
        "where nothing has a pace it is full"
    );
    let _ = queue.set_pace(None, ms(0));
    assert_eq!(queue.reading_per_engine(), None);
    (0..50).for_each(|_| _ = goes(&mut queue, &patient(500, Priority::Batch, 0), 0));
}

#[test]
fn at_a_known_pace_what_takes_little_prefill_goes_first() {
    let mut queue = paced(PrefillPace { behind: 0.0, ..PACE });
    goes(&mut queue, &patient(100, Priority::Normal, 0), 0);
    let mut waits = |tokens, at, seconds: u64| {
        let deadline = Deadline::FirstToken { within: length(1000 * seconds), lead: Duration::ZERO };
        wait(&mut queue, &QueueRequest { deadline, ..patient(tokens, Priority::Normal, at) }, at)
    };
    let long = waits(90, 1, 1);
    let short = waits(30, 2, 1);
    let patient_one = waits(30, 3, 60);
    let late = waits(30, 4, 1);
    let mut order = Vec::new();
    while let Some(moment) = queue.next_refill() {
        let admitted = queue.expire(moment).admitted;
        admitted.iter().for_each(|ticket| _ = queue.read(*ticket, moment));
        order.extend(admitted);
    }
    assert_eq!(order, [short, late, long, patient_one], "1.8 s of prefill and a tenth of its 60 s lie between them");
}

// ---- what tenants usually ask for --------------------------------------------------------------

/// Ten minutes in which `a` and `b` asked for ten requests of 100 tokens per second each, with one
/// occupied seat; returns the next second, and the ticket with the seat.
fn usually(max_waiting: usize) -> (Scheduler, Ticket, u64) {
    let mut queue = scheduler(100, max_waiting);
    for at in (0..600_000).step_by(100) {
        for tenant in ["a", "b"] {
            let ticket = goes(&mut queue, &request(tenant, Priority::Normal, at), at);
            let _nobody_waits = queue.release(ticket, Tokens(100), ms(at));
        }
    }
    let _nobody_waits = queue.set_seats(1, ms(600_000));
    let holder = goes(&mut queue, &request("c", Priority::Critical, 600_000), 600_000);
    (queue, holder, 600_000)
}

#[test]
fn a_sudden_flood_goes_behind_everybody_of_any_rank_who_can_be_met() {
    let (mut queue, holder, now) = usually(10_000);
    // 30 times its usual demand, with distant deadlines.
    let far = |tenant, priority, at| QueueRequest {
        deadline: Deadline::Whole { within: length(600_000), service: length(0) },
        ..request(tenant, priority, at)
    };
    let flood: Vec<_> =
        (0..6000).map(|n| wait(&mut queue, &far("a", Priority::Normal, now + n / 300), now + n / 300)).collect();
    let steady: Vec<_> = (20..40).map(|n| wait(&mut queue, &far("b", Priority::Normal, now + n), now + n)).collect();
    let batch: Vec<_> = (0..10).map(|_| wait(&mut queue, &far("b", Priority::Batch, now + 41), now + 41)).collect();
    let order = drained(&mut queue, holder, now + 50);
    let place = |ticket: &Ticket| order.iter().position(|other| other == ticket).unwrap();
    let usual = flood.iter().filter(|ticket| place(ticket) < place(&batch[9])).count();
    assert!((100..400).contains(&usual), "a burst of some twenty seconds is usual: {usual}");
    assert!(steady.iter().all(|ticket| place(ticket) < 2 * steady.len() + 10), "by turns with it");
    assert_eq!(order.len(), 6030, "and where nobody else waits it is served");
}

#[test]
fn who_cannot_be_met_any_more_does_not_keep_a_flood_from_its_seat() {
    let (mut queue, holder, now) = usually(10_000);
    let flood: Vec<_> = (0..2000).map(|_| wait(&mut queue, &request("a", Priority::Normal, now + 900), now)).collect();
    let late = QueueRequest {
        deadline: Deadline::FirstToken { within: length(1000), lead: length(2000) },
        ..request("b", Priority::Normal, now)
    };
    let late = wait(&mut queue, &late, now + 1);
    let order = drained(&mut queue, holder, now + 2);
    let place = order.iter().position(|ticket| *ticket == late).unwrap();
    // It waits for the requests of the flood within the tenant's usual share.
    assert!(place < 400 && order[place + 1..].iter().all(|ticket| flood.contains(ticket)), "{place}");
}

#[test]
fn a_free_seat_is_taken_by_who_asks_for_more_than_usual_only_while_prompts_leave_room() {
    let (mut queue, holder, now) = usually(10_000);
    let _nobody_waits = (queue.release(holder, Tokens(1), ms(now)), queue.set_seats(10_000, ms(now)));
    let taken: Vec<_> =
        (0..3000).filter_map(|_| queue.take_free_seat(&request("a", Priority::Normal, now), ms(now))).collect();
    assert_eq!(taken.len(), 3000, "nobody else wants it");
    let _ = (
        queue.set_prefilling_engines(1, ms(now)),
        queue.set_pace(Some(PrefillPace { per_second: 1.0, ..PACE }), ms(now)),
    );
    goes(&mut queue, &prompt(120, request("b", Priority::Critical, now)), now);
    assert_eq!(
        queue.take_free_seat(&prompt(1, request("a", Priority::Normal, now)), ms(now)),
        None,
        "half of the bucket"
    );
    assert!(queue.take_free_seat(&prompt(1, request("b", Priority::Normal, now)), ms(now)).is_some());
    assert_eq!(queue.waiting(), 0, "nothing of it is left");
}

// ---- laws over random histories ----------------------------------------------------------------

#[derive(Clone, Debug)]
enum Step {
    Offer(QueueRequest),
    TakeFreeSeat(QueueRequest),
    Release(usize, u64),
    Read(usize),
    Withdraw(usize),
    Expire,
    Seats(usize),
    Readers(usize),
    Pace(Option<PrefillPace>),
    Settings(QueueSettings),
}

fn asks() -> impl Strategy<Value = QueueRequest> {
    let deadline = prop_oneof![
        4 => (1u64..4, 0u64..6).prop_map(|(within, lead)| Deadline::FirstToken {
            within: length(within * 4),
            lead: length(lead),
        }),
        2 => (0u64..12, 0u64..6).prop_map(|(within, service)| Deadline::Whole {
            within: length(within),
            service: length(service),
        }),
        1 => Just(Deadline::Whenever),
    ];
    let rule = prop_oneof![
        3 => Just(WhenHopeless::Demote),
        1 => Just(WhenHopeless::Shed),
        1 => Just(WhenHopeless::Serve),
    ];
    let over = prop_oneof![6 => Just(LimitState::WithinLimits), 1 => Just(LimitState::OverLimit)];
    // Mostly one priority, so that they interact.
    let priority = prop_oneof![3 => Just(Priority::Normal), 2 => prop::sample::select(Priority::ALL.to_vec())];
    let who = (0usize..3, priority, over);
    (who, deadline, rule, 0u64..300, 0u64..40, 0u64..3).prop_map(
        |((tenant, priority, limit_state), deadline, rule, tokens, stays, late)| {
            QueueRequest {
                tenant: TenantId::from(["a", "b", "c"][tenant]),
                priority,
                arrival: ms(late), // before the offer by so much, see `at_once`
                deadline,
                tokens: Tokens(tokens),
                prompt: Tokens(tokens / 2),
                timeout_at: ms(stays),
                when_hopeless: rule,
                limit_state,
            }
        },
    )
}

/// Converts the durations of a generated request into moments.
fn at_once(request: &QueueRequest, now: u64) -> QueueRequest {
    let late = request.arrival.as_nanos() / 1_000_000;
    QueueRequest {
        arrival: ms(now.saturating_sub(late)),
        timeout_at: request.timeout_at + Duration::from_millis(now),
        ..request.clone()
    }
}

fn settings() -> impl Strategy<Value = QueueSettings> {
    let each = (1u64..200).prop_map(|each| PrefillBudget::Tokens(Tokens(each)));
    let reading = prop_oneof![1 => Just(PrefillBudget::NoLimit), 1 => Just(PrefillBudget::Auto), 1 => each];
    (0usize..12, prop_oneof![Just(0u64), 0u64..400], 0usize..3, reading).prop_map(
        |(max_waiting, quantum, shares, reading)| QueueSettings {
            max_waiting,
            quantum: Tokens(quantum),
            shares: Shares::new([[500, 200, 100, 50, 20], [200; 5], [10, 10, 300, 10, 670]][shares]).unwrap(),
            reading,
        },
    )
}

/// Some refill within milliseconds, some hardly at all, some at once.
fn paces() -> impl Strategy<Value = PrefillPace> {
    let rate = prop_oneof![2 => 1.0..1e3, 5 => 1e3..1e5, 1 => Just(f64::INFINITY)];
    let spare = prop_oneof![0.0..1e3, 1e3..1e5, Just(f64::INFINITY)];
    (rate, spare, 1.0..200.0, 0.0..200.0, 1.0..200.0, 0.0..1.0).prop_map(
        |(per_second, spare, burst, behind, most, part)| PrefillPace {
            per_second,
            spare,
            burst,
            behind,
            most,
            least: most * part,
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let step = prop_oneof![
        12 => asks().prop_map(Step::Offer),
        3 => asks().prop_map(Step::TakeFreeSeat),
        8 => (any::<prop::sample::Index>(), 0u64..400).prop_map(|(at, used)| Step::Release(at.index(1 << 20), used)),
        6 => any::<prop::sample::Index>().prop_map(|at| Step::Read(at.index(1 << 20))),
        2 => any::<prop::sample::Index>().prop_map(|at| Step::Withdraw(at.index(1 << 20))),
        1 => Just(Step::Expire),
        1 => (0usize..4).prop_map(Step::Seats),
        1 => (0usize..3).prop_map(Step::Readers),
        2 => prop::option::weighted(0.8, paces()).prop_map(Step::Pace),
        1 => settings().prop_map(Step::Settings),
    ];
    // Occasionally long enough that usual demand becomes known.
    let pause = prop_oneof![90 => Just(0u64), 30 => 1u64..6, 1 => Just(31_000)];
    prop::collection::vec((pause, step), 1..200)
}

fn fate(decisions: &Decisions) -> Fate {
    let refused = decisions.refused.iter().map(|away| (away.ticket.0, away.why)).collect();
    (decisions.admitted.iter().map(|ticket| ticket.0).collect(), refused)
}

/// State of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waits,
    Runs,
    Gone,
}

/// Applies moves to the tickets; fails if one is moved twice or from nowhere.
fn book(states: &mut BTreeMap<Ticket, State>, decisions: &Decisions) {
    for ticket in &decisions.admitted {
        assert_eq!(states.insert(*ticket, State::Runs), Some(State::Waits), "{ticket:?}");
    }
    for away in &decisions.refused {
        assert_eq!(states.insert(away.ticket, State::Gone), Some(State::Waits), "{away:?}");
    }
}

fn pick(states: &BTreeMap<Ticket, State>, state: State, at: usize) -> Option<Ticket> {
    let all: Vec<_> = states.iter().filter(|(_, is)| **is == state).map(|(ticket, _)| *ticket).collect();
    (!all.is_empty()).then(|| all[at % all.len()])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn it_agrees_with_a_slow_simple_one(start in settings(), seats in 0usize..4, steps in steps()) {
        let (mut quick, mut slow) = (Scheduler::new(start.clone()), Slow::new(start));
        let _ = (quick.set_seats(seats, ms(0)), slow.set_seats(seats, ms(0)));
        let _ = (quick.set_prefilling_engines(1, ms(0)), slow.set_prefilling_engines(1, ms(0)));
        let mut now = 10;
        for (pause, step) in steps {
            now += pause;
            let choose = |all: Vec<u64>, at: usize| (!all.is_empty()).then(|| all[at % all.len()]);
            let (ours, theirs) = match step {
                Step::Offer(request) => {
                    let request = at_once(&request, now);
                    (quick.offer(&request, ms(now)).1, slow.offer(&request, ms(now)))
                }
                Step::TakeFreeSeat(request) => {
                    let request = at_once(&request, now);
                    let taken = quick.take_free_seat(&request, ms(now)).map(|ticket| ticket.0);
                    prop_assert_eq!(taken, slow.take_free_seat(&request, ms(now)));
                    (Decisions::default(), Fate::default())
                }
                Step::Release(at, used) => {
                    let ticket = choose(slow.running(), at).unwrap_or(0);
                    (quick.release(Ticket(ticket), Tokens(used), ms(now)), slow.release(ticket, used, ms(now)))
                }
                Step::Withdraw(at) => {
                    if let Some(ticket) = choose(slow.waiting(), at) {
                        prop_assert!(quick.withdraw(Ticket(ticket), ms(now)));
                        slow.withdraw(ticket, ms(now));
                    }
                    (Decisions::default(), Fate::default())
                }
                Step::Read(at) => {
                    let ticket = choose(slow.running(), at).unwrap_or(0);
                    (quick.read(Ticket(ticket), ms(now)), slow.read(ticket, ms(now)))
                }
                Step::Expire => (quick.expire(ms(now)), slow.expire(ms(now))),
                Step::Seats(seats) => (quick.set_seats(seats, ms(now)), slow.set_seats(seats, ms(now))),
                Step::Readers(prefilling_engines) => (quick.set_prefilling_engines(prefilling_engines, ms(now)), slow.set_prefilling_engines(prefilling_engines, ms(now))),
                Step::Pace(pace) => (quick.set_pace(pace, ms(now)), slow.set_pace(pace, ms(now))),
                Step::Settings(other) => {
                    quick.set_settings(other.clone());
                    slow.settings = other;
                    (Decisions::default(), Fate::default())
                }
            };
            prop_assert_eq!(fate(&ours), theirs);
            prop_assert_eq!(quick.next_deadline(), slow.next_deadline());
            prop_assert_eq!((quick.waiting(), quick.running()), (slow.waiting().len(), slow.running().len()));
        }
    }

    #[test]
    fn every_ticket_ends_once_and_no_seat_leaks(start in settings(), steps in steps()) {
        let mut queue = Scheduler::new(start);
        let _ = (queue.set_seats(2, ms(0)), queue.set_prefilling_engines(1, ms(0)));
        let (mut now, mut states) = (10, BTreeMap::new());
        for (pause, step) in steps {
            now += pause;
            let decisions = match step {
                Step::Offer(request) => {
                    let (ticket, decisions) = queue.offer(&at_once(&request, now), ms(now));
                    prop_assert_eq!(states.insert(ticket, State::Waits), None);
                    decisions
                }
                Step::TakeFreeSeat(request) => {
                    if let Some(ticket) = queue.take_free_seat(&at_once(&request, now), ms(now)) {
                        prop_assert_eq!(states.insert(ticket, State::Runs), None);
                    }
                    Decisions::default()
                }
                Step::Release(at, used) => match pick(&states, State::Runs, at) {
                    Some(ticket) => {
                        states.insert(ticket, State::Gone);
                        queue.release(ticket, Tokens(used), ms(now))
                    }
                    None => queue.release(Ticket(at as u64), Tokens(used), ms(now)),
                },
                Step::Withdraw(at) => {
                    let ticket = pick(&states, State::Waits, at);
                    if let Some(ticket) = ticket {
                        prop_assert!(queue.withdraw(ticket, ms(now)));
                        states.insert(ticket, State::Gone);
                    }
                    Decisions::default()
                }
                Step::Read(at) => match pick(&states, State::Runs, at) {
                    Some(ticket) => queue.read(ticket, ms(now)),
                    None => queue.read(Ticket(at as u64), ms(now)),
                },
                Step::Expire => queue.expire(ms(now)),
                Step::Seats(seats) => queue.set_seats(seats, ms(now)),
                Step::Readers(prefilling_engines) => queue.set_prefilling_engines(prefilling_engines, ms(now)),
                Step::Pace(pace) => queue.set_pace(pace, ms(now)),
                Step::Settings(other) => {
                    queue.set_settings(other);
                    queue.expire(ms(now))
                }
            };
            book(&mut states, &decisions);
            let count = |state| states.values().filter(|is| **is == state).count();
            prop_assert_eq!((queue.waiting(), queue.running()), (count(State::Waits), count(State::Runs)));
            let idle = queue.free_seats() > 0 && queue.waiting() > 0;
            prop_assert!(!idle || queue.reading_per_engine().is_some(), "a seat is free and somebody waits");
            prop_assert!(queue.pace.is_none_or(|pace| queue.bucket.level <= pace.burst), "no more in the bucket than it holds");
            let goes_later = queue.next_refill().is_some() || queue.reading > 0 || queue.prefilling_engines == 0;
            let is_paced = queue.paced().is_some();
            prop_assert!(!idle || !is_paced || goes_later, "what waits for nothing but the bucket is called in time");
            let being_read: u64 = queue.running.values().map(|seated| seated.reading).sum();
            prop_assert_eq!(queue.reading, being_read);
            let bands: usize = queue.bands.iter().map(PriorityBand::len).sum();
            prop_assert_eq!((bands, queue.alarms.len()), (queue.waiting(), queue.waiting()));
        }
        // Who leaves now can have been in the way of one that is admitted instead.
        book(&mut states, &queue.expire(ms(now)));
        book(&mut states, &queue.expire(ms(now + 1_000_000)));
        for ticket in states.keys().filter(|ticket| states[*ticket] == State::Runs) {
            prop_assert_eq!(queue.release(*ticket, Tokens(1), ms(now + 1_000_000)), Decisions::default());
        }
        prop_assert_eq!((queue.waiting(), queue.running(), queue.alarms.len(), queue.latest_starts.len()), (0, 0, 0, 0));
    }

    #[test]
    fn no_rank_waits_beyond_the_bound(
        start in settings(),
        pace in prop::option::of(paces()),
        rounds in prop::collection::vec((0usize..4, asks()), 50..300),
    ) {
        let start = QueueSettings { max_waiting: 100, ..start };
        let mut queue = Scheduler::new(start.clone());
        let _ = (queue.set_seats(1, ms(0)), queue.set_prefilling_engines(1, ms(0)), queue.set_pace(pace, ms(0)));
        let mut running = queue.offer(&request("holder", Priority::Critical, 10), ms(10)).0;
        let (mut known, mut given, mut now) = (BTreeMap::from([(running, (5, 0))]), [0u64; 5], 10);
        for (pause, request) in rounds {
            now += pause as u64;
            now = now.max(queue.now.as_nanos().div_ceil(1_000_000));
            // None is shed, because a priority that empties unseen and fills again would look as if it had waited.
            let when_hopeless = [WhenHopeless::Demote, WhenHopeless::Serve][usize::from(request.tokens.0 % 2 == 0)];
            let request = QueueRequest { timeout_at: NEVER, when_hopeless, ..at_once(&request, now) };
            let (ticket, _) = queue.offer(&request, ms(now));
            known.insert(ticket, (queue.band_of_ticket(ticket), request.tokens.0.max(1)));
            let before: Vec<bool> = queue.bands[..5].iter().map(|band| band.len() > 0).collect();
            if pause == 0 {
                continue;
            }
            let mut decisions = queue.release(running, Tokens(known[&running].1), ms(now));
            while let Some(moment) = queue.next_refill().filter(|_| decisions.admitted.is_empty()) {
                decisions = queue.expire(moment);
            }
            let Some(next) = decisions.admitted.first() else {
                prop_assert_eq!(queue.waiting(), 0);
                now = now.max(queue.now.as_nanos().div_ceil(1_000_000) + 3_600_000);
                let alone = QueueRequest { arrival: ms(now), ..request };
                running = queue.offer(&alone, ms(now)).1.admitted[0];
                known.insert(running, (queue.band_of_ticket(running), alone.tokens.0.max(1)));
                given = [0; 5];
                continue;
            };
            running = *next;
            let (band, cost) = known[&running];
            prop_assert!(band < 10 || !before.contains(&true), "over the limit and not behind everybody");
            for (priority, given) in Priority::ALL.iter().zip(&mut given) {
                let waits = before[*priority as usize] && queue.bands[*priority as usize].len() > 0;
                *given = if waits && *priority as usize != band { *given + cost } else { 0 };
                prop_assert!(*given <= start.shares.longest_wait(*priority, Tokens(300)).0, "{priority:?} {given}");
            }
        }
    }

    #[test]
    fn no_tenant_waits_for_more_than_twice_a_quantum_of_another(
        quantum in 0u64..400,
        rate in prop::option::of(100.0..10_000.0),
        rounds in prop::collection::vec((0usize..4, 1u64..300, 0u64..50), 50..300),
    ) {
        let mut queue = Scheduler::new(QueueSettings { max_waiting: 1000, quantum: Tokens(quantum), ..QueueSettings::default() });
        // Such a bucket is never empty, because the order is tested here.
        let pace = rate.map(|per_second| PrefillPace { per_second, spare: f64::INFINITY, burst: 1e9, behind: 0.0, most: 1e9, least: 1e9 });
        let _ = (queue.set_seats(1, ms(0)), queue.set_prefilling_engines(1, ms(0)), queue.set_pace(pace, ms(0)));
        let names = ["a", "b", "c", "d"];
        let offer = |queue: &mut Scheduler, (tenant, tokens, within): (usize, u64, u64), at| {
            let deadline = Deadline::Whole { within: length(within), service: Duration::ZERO };
            let rule = WhenHopeless::Serve;
            let (tokens, prompt) = (Tokens(tokens), Tokens(tokens));
            let request = QueueRequest { deadline, tokens, prompt, when_hopeless: rule, ..request(names[tenant], Priority::Normal, at) };
            queue.offer(&request, ms(at)).0
        };
        let mut running = offer(&mut queue, (0, 1, 1), 1);
        let mut order = vec![];
        for (at, round) in (2..).zip(&rounds) {
            offer(&mut queue, *round, at);
        }
        while let Some(next) = {
            let cost = order.last().map_or(1, |ticket: &Ticket| rounds[ticket.0 as usize - 2].1);
            queue.release(running, Tokens(cost), ms(1000)).admitted.first().copied()
        } {
            running = next;
            order.push(next);
        }
        let of = |ticket: &Ticket| (rounds[ticket.0 as usize - 2].0, rounds[ticket.0 as usize - 2].1);
        for tenant in 0..4 {
            let last = order.iter().rposition(|ticket| of(ticket).0 == tenant).map_or(0, |last| last + 1);
            let mut given = [0u64; 4];
            for (other, cost) in order[..last].iter().map(of) {
                given[other] += cost;
                if other == tenant {
                    given = [0; 4];
                }
                prop_assert!(given.iter().all(|given| *given <= 2 * (quantum + 300)), "{tenant}: {given:?}");
            }
        }
        prop_assert_eq!(order.len(), rounds.len());
    }

    #[test]
    fn equal_deadlines_of_a_tenant_go_in_the_order_they_came(
        rate in prop::option::of(100.0..10_000.0),
        rounds in prop::collection::vec((0u64..3, 0u64..2, 0u64..8, prop::bool::weighted(0.8)), 20..200),
    ) {
        let mut queue = scheduler(1, 1000);
        let pace = rate.map(|per_second| PrefillPace { per_second, spare: f64::INFINITY, burst: 1e9, behind: 0.0, most: 1e9, least: 1e9 });
        let _ = (queue.set_prefilling_engines(1, ms(0)), queue.set_pace(pace, ms(0)));
        let mut running = queue.offer(&request("holder", Priority::Normal, 0), ms(0)).0;
        let (mut now, mut last, mut due) = (0, BTreeMap::new(), BTreeMap::new());
        for (pause, tenant, lead, release) in rounds {
            now += pause;
            // Deadlines at every fourth millisecond, so that many are equal.
            let deadline = (now / 4 + 3) * 4;
            let deadline = Deadline::FirstToken { within: length(deadline - now), lead: length(lead) };
            let request = QueueRequest { deadline, ..request(["a", "b"][tenant as usize], Priority::Normal, now) };
            let (ticket, _) = queue.offer(&request, ms(now));
            due.insert(ticket, (tenant, queue.due(&request)));
            if release {
                running = queue.release(running, Tokens(100), ms(now)).admitted[0];
                let before = last.insert(due[&running], running);
                prop_assert!(before < Some(running), "{before:?} before {running:?}");
            }
        }
    }

    #[test]
    fn whoever_waits_for_the_pace_goes_when_it_says_and_not_before(
        pace in paces().prop_filter("it fills within hours", |pace| pace.per_second > 10.0),
        prefilling_engines in 1usize..4,
        asks in prop::collection::vec((asks(), prop::bool::weighted(0.3)), 1..60),
    ) {
        let mut queue = paced(pace);
        let _ = queue.set_prefilling_engines(prefilling_engines, ms(0));
        let mut unread: Vec<Ticket> = Vec::new();
        for (request, read) in &asks {
            let request = QueueRequest { when_hopeless: WhenHopeless::Serve, timeout_at: NEVER, ..at_once(request, 10) };
            unread.extend(queue.offer(&request, ms(10)).1.admitted);
            if *read && let Some(ticket) = unread.pop() {
                unread.extend(queue.read(ticket, ms(10)).admitted);
            }
        }
        let mut looks = 0;
        while queue.waiting() > 0 {
            looks += 1;
            prop_assert!(looks < 10 * asks.len(), "somebody waits for ever: {:?}", queue.next_refill());
            let Some(moment) = queue.next_refill() else {
                let ticket = unread.pop();
                prop_assert!(ticket.is_some(), "nothing is read, and nothing is called");
                unread.extend(queue.read(ticket.unwrap(), queue.now).admitted);
                continue;
            };
            let before = Duration::from_nanos((moment - queue.now).as_nanos() as u64 / 1000 * 999);
            if before > Duration::from_micros(10) {
                let early = queue.expire(queue.now + before);
                prop_assert_eq!(early, Decisions::default());
            }
            let admitted = queue.expire(moment).admitted;
            prop_assert!(!admitted.is_empty(), "{:?} {:?}", queue.bucket.level, pace);
            unread.extend(admitted);
        }
    }

    #[test]
    fn what_was_taken_is_given_back_exactly(
        pace in paces(),
        prefilling_engines in 1usize..4,
        asks in prop::collection::vec((0u64..400, prop::bool::ANY), 1..20),
    ) {
        let mut queue = paced(PrefillPace { per_second: 1.0, ..pace });
        let _ = queue.set_prefilling_engines(prefilling_engines, ms(0));
        for (tokens, read) in asks {
            let before = queue.bucket.level;
            let (ticket, decisions) = queue.offer(&patient(tokens, Priority::Critical, 0), ms(0));
            if decisions.admitted != [ticket] {
                prop_assert_eq!(queue.bucket.level, before, "who waits takes nothing");
                prop_assert!(queue.withdraw(ticket, ms(0)));
                continue;
            }
            let after = queue.bucket.level;
            prop_assert!(after <= before && before - after <= tokens as f64 + 1e-9);
            if read {
                let _nobody_waits = queue.read(ticket, ms(0));
            }
            let _nobody_waits = queue.release(ticket, Tokens::ZERO, ms(0));
            let expected = if read { after } else { before };
            prop_assert!((queue.bucket.level - expected).abs() < 1e-9, "{} {expected}", queue.bucket.level);
        }
    }
}

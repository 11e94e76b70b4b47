//! Queues of the other gateways before the same engines: one order over all of them, without a common queue.
//!
//! Every gateway reports its requests at the engines and the head of its queue to the others several times a
//! second ([`QueueReport`]). Each one then schedules as if all requests were its own: the prompts of others drain
//! the same bucket, and a request runs only after those of others that precede it in the order. A request of
//! another gateway that would be next is assumed to run there, because that gateway decides in the same way: it
//! is counted at once, and the next report corrects the count.
//!
//! A report is used until it expires. Without reports a gateway schedules its own requests only.

use std::collections::BTreeMap;
use std::time::Duration;

use super::priority_band::Feasibility;
use super::request::QueueKey;
use crate::types::{PrefillPace, Tick};

/// Most waiting requests in a report: more than are dispatched between two reports.
pub const MOST_TOLD: usize = 32;
/// Most gateways whose reports are kept.
const MOST_GATEWAYS: usize = 64;
/// Reports in a row without a dispatch, where one was expected, until a gateway's queue is no longer waited for.
const STUCK: u32 = 10;

/// The report of one gateway on its queue before a pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueReport {
    /// Prompt tokens of requests that have a seat and no first token.
    pub prefill: u64,
    /// Prompt tokens dispatched since its start, those of requests that ended before their first token left out.
    pub dispatched: f64,
    /// Requests admitted since its start.
    pub admitted: u64,
    /// The prefill pace that it learned, and the level of its bucket.
    pub pace: Option<(PrefillPace, f64)>,
    /// The first waiting requests, at most [`MOST_TOLD`].
    pub waiting: Vec<WaitingWork>,
    /// Number of all waiting requests.
    pub depth: u64,
}

/// A waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingWork {
    /// Its band: usual demand by priority, then demand beyond it, then requests over their limits.
    pub band: u8,
    /// Whether it can no longer meet its deadline.
    pub is_late: bool,
    /// Whether it has a deadline.
    pub has_deadline: bool,
    /// Its key relative to the moment of the report, microseconds; negative if it lies before.
    pub due: i64,
    /// Its prompt.
    pub prompt: u64,
}

/// The place of another gateway's request in the common order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OtherPlace {
    pub band: usize,
    pub is_late: bool,
    pub due: QueueKey,
    gateway: u64,
    number: usize,
}

impl OtherPlace {
    pub fn line(&self) -> Feasibility {
        if self.is_late { Feasibility::Late } else { Feasibility::Feasible }
    }

    /// Whether it goes before a request of this gateway.
    pub fn is_before(&self, band: usize, line: Feasibility, due: QueueKey) -> bool {
        (self.band, self.is_late, self.due) < (band, line == Feasibility::Late, due)
    }
}

/// The other gateways' queues.
#[derive(Debug, Default)]
pub(super) struct OtherQueues {
    gateways: BTreeMap<u64, OtherQueue>,
    /// Their waiting requests in order, with their prompts.
    order: BTreeMap<OtherPlace, u64>,
    /// Sum of prompt tokens that they have in prefill, those assumed included.
    prefill: u64,
    /// Sum of requests assumed to have been dispatched since their reports.
    assumed: usize,
}

#[derive(Debug)]
struct OtherQueue {
    until: Tick,
    dispatched: f64,
    admitted: u64,
    prefill: u64,
    pace: Option<PrefillPace>,
    /// Assumed since the last report: requests, prompt tokens in prefill, and tokens taken from the bucket.
    assumed: (usize, u64, f64),
    stuck: u32,
    depth: u64,
    /// Places of its report in the order, those assumed to be dispatched included.
    places: Vec<OtherPlace>,
}

impl OtherQueues {
    /// Applies a report made at `made` on this gateway's clock. Returns the prompt tokens dispatched beyond those
    /// assumed; negative if fewer were.
    pub fn heard(&mut self, gateway: u64, report: &QueueReport, made: Tick, until: Tick) -> f64 {
        let before = self.gateways.remove(&gateway);
        if before.is_none() && self.gateways.len() >= MOST_GATEWAYS {
            return 0.0;
        }
        let assumed = before.as_ref().map_or(0.0, |known| known.assumed.2);
        // The first report of a gateway, also after its restart, has no previous one to be compared with.
        let went = before.as_ref().map_or(0.0, |known| report.dispatched - known.dispatched);
        let went = if went.is_finite() { went.max(-report.dispatched.abs()) } else { 0.0 };
        let stuck = match before.as_ref().filter(|known| known.admitted == report.admitted) {
            Some(known) if known.assumed.0 > 0 => known.stuck.saturating_add(1),
            Some(known) => known.stuck,
            None => 0,
        };
        let mut known = OtherQueue {
            until,
            dispatched: report.dispatched,
            admitted: report.admitted,
            prefill: report.prefill,
            pace: report.pace.map(|(pace, _)| pace).filter(PrefillPace::is_sound),
            assumed: (0, 0, 0.0),
            stuck,
            depth: report.depth,
            places: Vec::new(),
        };
        for place in before.into_iter().flat_map(|known| known.places) {
            self.order.remove(&place);
        }
        if stuck < STUCK {
            let waiting = || report.waiting.iter().take(MOST_TOLD).enumerate();
            known.places = waiting().map(|(number, work)| work.place(gateway, number, made)).collect();
            self.order.extend(known.places.iter().copied().zip(waiting().map(|(_, work)| work.prompt)));
        }
        self.gateways.insert(gateway, known);
        self.sum();
        went - assumed
    }

    /// Drops expired reports.
    pub fn expire(&mut self, at: Tick) {
        if self.gateways.values().all(|known| known.until > at) {
            return;
        }
        self.gateways.retain(|_, known| known.until > at);
        self.order.retain(|place, _| self.gateways.contains_key(&place.gateway));
        self.sum();
    }

    /// The mean pace of this gateway and the others. Each learns from its own responses alone, and with
    /// different paces the gateway with the fastest would never wait, and the others always.
    pub fn mean_pace(&self, own: Option<PrefillPace>) -> Option<PrefillPace> {
        let all = own.into_iter().chain(self.gateways.values().filter_map(|known| known.pace));
        let (count, sum) = all.fold((0.0, PrefillPace::default()), |(count, sum), pace| (count + 1.0, sum.plus(&pace)));
        (count > 0.0).then(|| sum.times(1.0 / count))
    }

    fn sum(&mut self) {
        let all = || self.gateways.values();
        self.prefill = all().map(|known| known.prefill.saturating_add(known.assumed.1)).fold(0, u64::saturating_add);
        self.assumed = all().map(|known| known.assumed.0).sum();
    }

    /// Their waiting requests by current reports. `None` without any.
    pub fn depth(&self, at: Tick) -> Option<u64> {
        let depths = self.gateways.values().filter(|known| known.until > at).map(|known| known.depth);
        depths.reduce(u64::saturating_add)
    }

    /// Prompt tokens of others in prefill.
    pub fn prefill(&self) -> u64 {
        self.prefill
    }

    /// Requests assumed to have been dispatched since the reports.
    pub fn assumed(&self) -> usize {
        self.assumed
    }

    /// Waiting requests in order, each with its prompt.
    pub fn in_order(&self) -> impl Iterator<Item = (&OtherPlace, u64)> {
        self.order.iter().map(|(place, prompt)| (place, *prompt))
    }

    /// Whether a request of this band waits at any gateway.
    pub fn any_in(&self, band: usize) -> bool {
        let first = OtherPlace { band, is_late: false, due: QueueKey::By(Tick::ZERO), gateway: 0, number: 0 };
        self.order.range(first..).next().is_some_and(|(place, _)| place.band == band)
    }

    /// Assumes that a request was dispatched: it counts as this much in prefill, and took this from the bucket.
    pub fn assume(&mut self, place: OtherPlace, prefill: u64, taken: f64) {
        self.order.remove(&place);
        if let Some(known) = self.gateways.get_mut(&place.gateway) {
            let (requests, tokens, all) = &mut known.assumed;
            (*requests, *tokens, *all) = (*requests + 1, tokens.saturating_add(prefill), *all + taken);
            self.prefill = self.prefill.saturating_add(prefill);
            self.assumed += 1;
        }
    }
}

impl WaitingWork {
    /// A waiting request as reported at this moment.
    pub(super) fn told(band: usize, line: Feasibility, due: QueueKey, prompt: u64, at: Tick) -> WaitingWork {
        let (QueueKey::By(moment) | QueueKey::Whenever(moment)) = due;
        let micros = |nanos: u64| i64::try_from(nanos / 1000).unwrap_or(i64::MAX);
        WaitingWork {
            band: u8::try_from(band).unwrap_or(u8::MAX),
            is_late: line == Feasibility::Late,
            has_deadline: matches!(due, QueueKey::By(_)),
            due: micros(moment.as_nanos()).saturating_sub(micros(at.as_nanos())),
            prompt,
        }
    }

    fn place(&self, gateway: u64, number: usize, made: Tick) -> OtherPlace {
        let away = Duration::from_micros(self.due.unsigned_abs());
        let moment = match self.due {
            0.. => made + away,
            _ => Tick::from_nanos(made.as_nanos().saturating_sub(u64::try_from(away.as_nanos()).unwrap_or(u64::MAX))),
        };
        let due = if self.has_deadline { QueueKey::By(moment) } else { QueueKey::Whenever(moment) };
        OtherPlace { band: usize::from(self.band), is_late: self.is_late, due, gateway, number }
    }
}

#[cfg(test)]
mod tests {
    use crate::admit::queue::{
        Deadline, LimitState, MOST_TOLD, PrefillBudget, QueueReport, QueueRequest, QueueSettings, Scheduler,
        WhenHopeless,
    };
    use crate::types::{PrefillPace, Priority, TenantId, Tick, Tokens};

    fn ms(millis: u64) -> Tick {
        Tick::from_millis(millis)
    }

    fn request(priority: Priority, prompt: u64, at: Tick) -> QueueRequest {
        QueueRequest {
            tenant: TenantId::from("tenant"),
            priority,
            arrival: at,
            deadline: Deadline::FirstToken { within: ms(5_000).since(Tick::ZERO), lead: ms(0).since(Tick::ZERO) },
            tokens: Tokens(prompt),
            prompt: Tokens(prompt),
            timeout_at: at + ms(60_000).since(Tick::ZERO),
            when_hopeless: WhenHopeless::Demote,
            limit_state: LimitState::WithinLimits,
        }
    }

    fn gateway(reading: PrefillBudget, seats: usize) -> Scheduler {
        let mut scheduler = Scheduler::new(QueueSettings { reading, ..QueueSettings::default() });
        let _nobody_waits = scheduler.set_prefilling_engines(1, ms(0));
        let _nobody_waits = scheduler.set_seats(seats, ms(0));
        scheduler
    }

    #[test]
    fn a_report_tells_the_heads_of_the_queue_in_its_order() {
        const PRIORITIES: [Priority; 3] = [Priority::Batch, Priority::High, Priority::Normal];
        let mut queue = gateway(PrefillBudget::NoLimit, 0);
        let mut expected = Vec::new();
        for number in 0..300_u64 {
            // Arrivals in another order than the tickets, of tenants with few and with many requests.
            let (arrival, priority) = (ms(number * 7919 % 300), PRIORITIES[(number % 3) as usize]);
            let tenant = TenantId::from(format!("tenant-{}", number * number % 50));
            let request = QueueRequest { tenant, ..request(priority, 100, arrival) };
            let (ticket, _waits) = queue.offer(&request, ms(300));
            expected.push((priority, arrival, ticket));
        }
        expected.sort_unstable_by_key(|(priority, arrival, ticket)| (*priority as u8, *arrival, *ticket));
        let report = queue.report(ms(300));
        let told: Vec<(u8, i64)> = report.waiting.iter().map(|work| (work.band, work.due)).collect();
        let due = |arrival: Tick| 5_000_000 - i64::try_from(ms(300).since(arrival).as_micros()).unwrap();
        let heads = expected.iter().take(MOST_TOLD).map(|(priority, arrival, _)| (*priority as u8, due(*arrival)));
        assert_eq!((told, report.depth), (heads.collect(), 300));
    }

    #[test]
    fn a_tenant_that_was_served_more_is_told_behind_the_others() {
        let quantum = Tokens(1000);
        let mut queue =
            Scheduler::new(QueueSettings { quantum, reading: PrefillBudget::NoLimit, ..QueueSettings::default() });
        let _nobody_waits = queue.set_seats(1, ms(0));
        let of = |tenant: &str, prompt, at| QueueRequest {
            tenant: TenantId::from(tenant),
            ..request(Priority::High, prompt, at)
        };
        let (greedy, _runs) = queue.offer(&of("greedy", 5000, ms(0)), ms(0));
        // The modest tenant waits first, because a tenant that waits alone is the least-served one.
        let _waits = [("modest", 2), ("greedy", 1), ("greedy", 3), ("modest", 4)]
            .map(|(tenant, prompt)| queue.offer(&of(tenant, prompt, ms(prompt)), ms(9)));
        let prompts =
            |queue: &Scheduler| queue.report(ms(9)).waiting.iter().map(|work| work.prompt).collect::<Vec<_>>();
        assert_eq!(prompts(&queue), [2, 4, 1, 3]);
        let _next = queue.release(greedy, Tokens(5000), ms(9));
        assert_eq!(prompts(&queue), [4, 1, 3]);
    }

    const PACE: PrefillPace =
        PrefillPace { per_second: 1000.0, spare: 1000.0, burst: 100.0, behind: 900.0, most: 1e6, least: 1e6 };

    #[test]
    fn batch_waits_while_chat_waits_at_another_gateway() {
        let (mut ours, mut theirs) = (gateway(PrefillBudget::NoLimit, 0), gateway(PrefillBudget::NoLimit, 0));
        let (batch, _) = ours.offer(&request(Priority::Batch, 100, ms(0)), ms(0));
        let (chat, _) = theirs.offer(&request(Priority::High, 100, ms(10)), ms(10));
        let _none = ours.heard(2, &theirs.report(ms(10)), ms(10), ms(160), ms(20));
        assert!(ours.set_seats(1, ms(30)).admitted.is_empty(), "the one seat is assumed to be the chat's");
        assert_eq!(theirs.set_seats(1, ms(30)).admitted, [chat]);
        // The next report has no waiting chat; the caller counts its seat.
        let freed = ours.heard(2, &theirs.report(ms(60)), ms(60), ms(210), ms(70));
        assert_eq!(freed.admitted, [batch]);
    }

    #[test]
    fn without_reports_a_gateway_is_on_its_own_again() {
        let (mut ours, mut theirs) = (gateway(PrefillBudget::NoLimit, 0), gateway(PrefillBudget::NoLimit, 0));
        let (batch, _) = ours.offer(&request(Priority::Batch, 100, ms(0)), ms(0));
        let _waits = theirs.offer(&request(Priority::High, 100, ms(0)), ms(0));
        let _none = ours.heard(2, &theirs.report(ms(0)), ms(0), ms(150), ms(0));
        assert!(ours.set_seats(1, ms(149)).admitted.is_empty());
        assert_eq!(ours.expire(ms(150)).admitted, [batch]);
    }

    #[test]
    fn a_gateway_that_dispatches_nothing_for_half_a_second_is_not_waited_for() {
        let (mut ours, mut theirs) = (gateway(PrefillBudget::NoLimit, 1), gateway(PrefillBudget::NoLimit, 0));
        let _waits = theirs.offer(&request(Priority::High, 100, ms(0)), ms(0));
        let _none = ours.heard(2, &theirs.report(ms(0)), ms(0), ms(150), ms(0));
        let (batch, at_once) = ours.offer(&request(Priority::Batch, 100, ms(1)), ms(1));
        assert!(at_once.admitted.is_empty());
        let mut admitted_at = None;
        for at in (50..2_000).step_by(50) {
            let decisions = ours.heard(2, &theirs.report(ms(at)), ms(at), ms(at + 150), ms(at));
            if decisions.admitted == [batch] {
                admitted_at = Some(at);
                break;
            }
        }
        assert_eq!(admitted_at, Some(500));
    }

    #[test]
    fn what_others_dispatch_leaves_the_bucket_and_is_not_taken_twice() {
        let (mut ours, mut theirs) = (gateway(PrefillBudget::Auto, 100), gateway(PrefillBudget::Auto, 100));
        for scheduler in [&mut ours, &mut theirs] {
            let _nobody_waits = scheduler.set_pace(Some(PACE), ms(0));
        }
        let _first = ours.heard(2, &theirs.report(ms(0)), ms(0), ms(150), ms(0));
        let (chat, decisions) = theirs.offer(&request(Priority::High, 600, ms(0)), ms(0));
        assert_eq!(decisions.admitted, [chat]);
        let _second = ours.heard(2, &theirs.report(ms(0)), ms(0), ms(150), ms(0));
        let level = |scheduler: &Scheduler| scheduler.report(ms(0)).pace.map(|(_, level)| level);
        assert_eq!((level(&ours), level(&theirs)), (Some(-500.0), Some(-500.0)));
        let _third = ours.heard(2, &theirs.report(ms(0)), ms(0), ms(150), ms(0));
        assert_eq!(level(&ours), Some(-500.0), "the same once more");
    }

    #[test]
    fn gateways_that_learned_different_paces_keep_one() {
        let mut ours = gateway(PrefillBudget::Auto, 100);
        let _nobody_waits = ours.set_pace(Some(PACE), ms(0));
        let report = QueueReport { pace: Some((PACE.times(3.0), 100.0)), ..QueueReport::default() };
        let _heard = ours.heard(2, &report, ms(0), ms(150), ms(0));
        assert_eq!(ours.pace, Some(PACE.times(2.0)));
        let broken = PrefillPace { burst: f64::NAN, ..PACE };
        let report = QueueReport { pace: Some((broken, f64::NAN)), dispatched: f64::NAN, ..QueueReport::default() };
        let _heard = ours.heard(3, &report, ms(0), ms(150), ms(0));
        assert_eq!(ours.pace, Some(PACE.times(2.0)), "no sound pace is none");
        let _expired = ours.expire(ms(150));
        let _nobody_waits = ours.set_pace(Some(PACE), ms(150));
        assert_eq!(ours.pace, Some(PACE));
    }
}

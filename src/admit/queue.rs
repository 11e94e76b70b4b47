//! The scheduler of one pool: which requests run, wait, or are rejected.
//!
//! Sans-IO: moments are arguments, results say what to do ([`Decisions`]) and when to call again
//! ([`Scheduler::next_deadline`]). The caller holds the lock, wakes waiting requests and returns seats.
//!
//! Order:
//! 1. Requests within their tenants' usual demand (`surge`), then those beyond it, then those over their
//!    tenants' limits. Requests beyond usual demand run when no request before them waits that can still
//!    meet its deadline, those over limits when no other waits; no guarantee covers either.
//! 2. The highest waiting priority, unless another one's guaranteed share is due ([`Shares`]): a priority
//!    is entitled to its share of the tokens admitted while it waits, and is due when that covers its next
//!    request. [`Shares::longest_wait`] is the resulting bound.
//! 3. Within a priority, requests that can still meet their deadline before those that cannot, by the rule
//!    of their class ([`WhenHopeless`]).
//! 4. Among these the smallest key of the tenants whose served tokens are within one quantum of the
//!    least-served waiting tenant. While a tenant waits, another one gets at most twice the sum of the
//!    quantum and the largest request before it (apart from later corrections of estimates). Requests
//!    without an objective come last, by arrival.
//!
//! The key is `arrival + 0.1 x time to the deadline + 30 x prefill time`: short prompts first, and every
//! request advances by waiting. The prefill time is the prompt's time at one engine's pace; without a pace
//! the key is the deadline.
//!
//! Demotion keeps the order of one tenant's requests with equal keys and rules, because a request becomes
//! infeasible no later than the one before it. A request over the limit may be overtaken by a later one
//! within it.
//!
//! Within a priority only `leave_by` bounds the wait of a request that others keep overtaking (infeasible,
//! or without an objective): it is then rejected, never left waiting.
//!
//! A seat alone is not enough: outstanding prompts delay the first token and slow running sequences. With
//! [`PrefillBudget::Auto`] prompts are dispatched by [`PrefillPace`], a token bucket that refills at the rate at
//! which engines can prefill without breaking the TPOT; with [`PrefillBudget::Tokens`] a fixed number may be
//! outstanding. The next request then runs when its prompt fits, and no other passes it meanwhile. Some of
//! the budget is reserved: lower priorities may use only a part of it; requests that are infeasible, beyond
//! usual demand or over limits a quarter, and those beyond usual demand only while engines have spare time
//! ([`PrefillPace::spare`]). Requests held back by that are passed by others, but never when their
//! priority's guaranteed share is due. With a fixed number any single prompt may be outstanding alone.
//!
//! A full queue rejects the lowest priority first, before that requests over their limits, then those beyond
//! usual demand. An arrival replaces a waiting request of a lower priority as long as that one holds more
//! than its guaranteed places, or one of its own priority from a tenant that holds more places, so that one
//! tenant's burst cannot occupy all of them. An arrival that is already infeasible replaces no request of
//! another priority, and none at all while such requests hold half of the queue, so that they never keep
//! out requests that can be met.
//!
//! Every operation is O(log n) in the waiting requests and tenants, plus the same for each request
//! moved.

mod drain_rate;
mod fair_queue;
mod other_gateways;
mod priority_band;
mod request;
mod shares;
mod surge;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::time::Duration;

use crate::types::{PrefillPace, Priority, TenantId, Tick, Tokens, seconds_up};

pub use other_gateways::{MOST_TOLD, QueueReport, WaitingWork};
pub use request::{Deadline, Decisions, LimitState, QueueRequest, RejectReason, Rejected, Ticket, WhenHopeless};
pub use shares::{InvalidShares, Shares};

use drain_rate::DrainRate;
use fair_queue::QueuePosition;
use other_gateways::{OtherPlace, OtherQueues};
use priority_band::{Feasibility, PriorityBand};
use request::QueueKey;
use surge::SurgeDetector;

/// Settings of a pool's queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueSettings {
    /// Most waiting requests. 0: a request runs at once or is rejected.
    pub max_waiting: usize,
    /// How far a tenant's served tokens may exceed those of the least-served tenant before others go
    /// first.
    pub quantum: Tokens,
    /// Guaranteed shares of the priorities.
    pub shares: Shares,
    /// Limit of outstanding prompt tokens.
    pub reading: PrefillBudget,
}

impl Default for QueueSettings {
    /// 1000 requests, 65,536 tokens, default shares, automatic prefill pace.
    fn default() -> Self {
        QueueSettings {
            max_waiting: 1000,
            quantum: Tokens(65_536),
            shares: Shares::default(),
            reading: PrefillBudget::Auto,
        }
    }
}

/// Limit of prompt tokens at one engine of requests without a first token. A longer prompt counts as the
/// limit and has the engine to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillBudget {
    /// Unlimited.
    NoLimit,
    /// This many.
    Tokens(Tokens),
    /// By the pace last set by [`Scheduler::set_pace`]; unlimited before.
    #[default]
    Auto,
}

/// Bucket level below which a share of the prompts must wait: the highest priority may use all of the
/// bucket, others its upper part only.
fn threshold(pace: &PrefillPace, percent: u64) -> f64 {
    pace.burst - (pace.burst + pace.behind) * percent as f64 / 100.0
}

/// Prompt tokens that may be dispatched now; negative if dispatched in advance.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PrefillBucket {
    /// Refilled by [`PrefillPace::per_second`].
    level: f64,
    /// Refilled by [`PrefillPace::spare`]; each dispatch takes from both.
    spare: f64,
}

impl PrefillBucket {
    const EMPTY: PrefillBucket = PrefillBucket { level: 0.0, spare: 0.0 };
    const FULL: PrefillBucket = PrefillBucket { level: f64::INFINITY, spare: f64::INFINITY };

    /// With this many tokens added, up to the pace's capacity.
    fn filled(self, tokens: f64, spare: f64, pace: &PrefillPace) -> PrefillBucket {
        PrefillBucket { level: (self.level + tokens).min(pace.burst), spare: (self.spare + spare).min(pace.burst) }
    }

    /// After this many seconds.
    fn after(self, seconds: f64, pace: &PrefillPace) -> PrefillBucket {
        let gained = |rate: f64| if rate.is_finite() { rate * seconds } else { f64::INFINITY };
        self.filled(gained(pace.per_second), gained(pace.spare), pace)
    }
}

impl PrefillBudget {
    /// The share of one of several gateways in front of the same engines.
    #[must_use]
    pub fn shared_among(self, gateways: NonZeroU32) -> PrefillBudget {
        match self {
            PrefillBudget::Tokens(each) => PrefillBudget::Tokens(Tokens((each.0 / u64::from(gateways.get())).max(1))),
            PrefillBudget::NoLimit | PrefillBudget::Auto => self,
        }
    }
}

/// How requests of a class wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassQueue {
    /// From the last byte of a request's body to its rejection. Zero: a free seat or
    /// none.
    pub max_wait: Duration,
    /// What happens to a request that can no longer meet its deadline.
    pub when_hopeless: WhenHopeless,
}

impl ClassQueue {
    /// The default of a class: 30 seconds, or as long as its longest objective can still be
    /// met.
    #[must_use]
    pub fn of_promise(longest: Option<Duration>) -> Self {
        ClassQueue { max_wait: longest.unwrap_or_default().max(LEAST_MAX_WAIT), ..ClassQueue::default() }
    }
}

/// Default of `max_wait` unless an objective is longer.
const LEAST_MAX_WAIT: Duration = Duration::from_secs(30);

impl Default for ClassQueue {
    /// `{max_wait: 30s, when_hopeless: demote}`
    fn default() -> Self {
        ClassQueue { max_wait: LEAST_MAX_WAIT, when_hopeless: WhenHopeless::default() }
    }
}

/// The scheduler of one pool.
#[derive(Debug)]
pub struct Scheduler {
    settings: QueueSettings,
    seats: usize,
    /// Number of engines that prefill.
    prefilling_engines: usize,
    /// Current pace of [`PrefillBudget::Auto`]: the mean of those that the gateways learned.
    pace: Option<PrefillPace>,
    /// Pace that this gateway learned.
    own_pace: Option<PrefillPace>,
    /// State at `filled`.
    bucket: PrefillBucket,
    filled: Tick,
    /// Outstanding prompt tokens.
    reading: u64,
    /// The latest moment seen, because time must not go back.
    now: Tick,
    /// Tickets issued.
    tickets: u64,
    /// Admissions.
    turns: u64,
    /// In serving order: priorities within usual demand, priorities beyond it, priorities over their
    /// limits.
    bands: Vec<PriorityBand>,
    waiting: HashMap<Ticket, QueuedRequest>,
    running: HashMap<Ticket, RunningRequest>,
    /// When each waiting request must be rejected.
    alarms: BTreeSet<(Tick, Ticket)>,
    /// The last feasible start of requests that are demoted after it.
    latest_starts: BTreeSet<(Tick, Ticket)>,
    drain: DrainRate,
    usual: SurgeDetector,
    /// The other gateways before the same engines.
    others: OtherQueues,
    /// Prompt tokens dispatched, for the others.
    dispatched: f64,
}

#[derive(Debug)]
struct QueuedRequest {
    tenant: TenantId,
    band: usize,
    line: Feasibility,
    place: QueuePosition,
    cost: u64,
    prompt: u64,
    /// Not later than that of the tenant's previous request with the same deadline.
    latest_start: Option<Tick>,
    /// Whether it is demoted after its last feasible start.
    steps: bool,
    alarm: (Tick, RejectReason),
}

#[derive(Debug)]
struct RunningRequest {
    tenant: TenantId,
    band: usize,
    line: Feasibility,
    cost: u64,
    /// Prompt tokens it counts for until its first token.
    reading: u64,
    /// Tokens it took from the pace's bucket.
    taken: f64,
}

const PRIORITIES: usize = Priority::ALL.len();

/// Weight of the prefill time in the key. Beyond capacity, shortest job first meets more deadlines than
/// earliest deadline first, which serves everybody slightly too late (Moore, *Management Science* 15, 1968,
/// for one machine): 8.2 against 7.1 requests per second in one mix, 12.3 against 10.9 in another. Values
/// from 10 to 100 make little difference; below capacity none.
const OF_PREFILL: f64 = 30.0;
const OF_DEADLINE: f64 = 0.1;

/// Largest counted size of a request, so that sums cannot overflow.
const LARGEST: u64 = 1 << 40;

/// Percentage of prefill for requests beyond usual demand: enough to use engines that are otherwise idle, little
/// enough not to delay others.
const BEYOND_SHARE: u64 = 25;

/// Percentage of prefill for requests over limits, and for those that are infeasible.
const LAST_SHARE: u64 = 25;

/// The percentages that [`prefill_for`] gives: of feasible requests by priority, and of others.
const PREFILL_PERCENTS: [u64; PRIORITIES + 2] = [100, 100, 90, 80, 70, BEYOND_SHARE, LAST_SHARE];

/// Percentage of the outstanding prompt tokens that a row may use together with all others.
const fn prefill_for(band: usize, line: Feasibility) -> u64 {
    match line {
        Feasibility::Feasible if band < PRIORITIES => PREFILL_PERCENTS[band],
        Feasibility::Feasible if band < OVER_LIMIT => BEYOND_SHARE,
        Feasibility::Feasible | Feasibility::Late => LAST_SHARE,
    }
}

/// `is_usual`: within the tenant's usual demand.
fn band_of(request: &QueueRequest, is_usual: bool) -> usize {
    let first = match request.limit_state {
        LimitState::WithinLimits if is_usual => 0,
        LimitState::WithinLimits => PRIORITIES,
        LimitState::OverLimit => OVER_LIMIT,
    };
    first + request.priority as usize
}

fn cost_of(request: &QueueRequest) -> u64 {
    request.tokens.0.clamp(1, LARGEST)
}

/// First row of requests over their limits; those beyond usual demand come before.
const OVER_LIMIT: usize = 2 * PRIORITIES;

impl Scheduler {
    /// An empty queue without seats, see [`Scheduler::set_seats`].
    #[must_use]
    pub fn new(settings: QueueSettings) -> Self {
        let bands = (0..3 * PRIORITIES).map(|_| PriorityBand::new(settings.quantum.0)).collect();
        Scheduler {
            settings,
            seats: 0,
            prefilling_engines: 0,
            pace: None,
            own_pace: None,
            bucket: PrefillBucket::EMPTY,
            filled: Tick::ZERO,
            reading: 0,
            now: Tick::ZERO,
            tickets: 0,
            turns: 0,
            bands,
            waiting: HashMap::new(),
            running: HashMap::new(),
            alarms: BTreeSet::new(),
            latest_starts: BTreeSet::new(),
            drain: DrainRate::default(),
            usual: SurgeDetector::default(),
            others: OtherQueues::default(),
            dispatched: 0.0,
        }
    }

    /// What the other gateways before the same engines need to know of this queue. Its cost does not follow the number
    /// of waiting requests.
    #[must_use]
    pub fn report(&self, at: Tick) -> QueueReport {
        let at = at.max(self.now);
        let places = self.bands.iter().flat_map(PriorityBand::in_order);
        let told = |request: &QueuedRequest| {
            WaitingWork::told(request.band, request.line, request.place.due, request.prompt, at)
        };
        QueueReport {
            prefill: self.reading,
            dispatched: self.dispatched,
            admitted: self.turns,
            pace: self.own_pace.map(|pace| (pace, self.bucket.level)),
            waiting: places.take(MOST_TOLD).filter_map(|place| self.waiting.get(&place.ticket)).map(told).collect(),
            depth: self.waiting.len() as u64,
        }
    }

    /// Requests that wait at the other gateways, by current reports. `None` without any.
    #[must_use]
    pub fn waiting_elsewhere(&self, at: Tick) -> Option<u64> {
        self.others.depth(at.max(self.now))
    }

    /// Takes the report of another gateway, made `made` on this gateway's clock and valid until `until`.
    pub fn heard(&mut self, gateway: u64, report: &QueueReport, made: Tick, until: Tick, at: Tick) -> Decisions {
        let mut decisions = self.begin(at);
        let beyond = self.others.heard(gateway, report, made, until);
        self.follow_pace();
        if let Some(pace) = self.paced().copied() {
            self.bucket = self.bucket.filled(-beyond, -beyond, &pace);
            self.bucket.level = self.bucket.level.max(-DEEPEST * (pace.burst + pace.behind));
            self.bucket.spare = self.bucket.spare.max(-pace.behind);
            // Equal paces and dispatches keep equal levels equal; this makes them so, and keeps errors from adding up.
            let theirs = report.pace.map(|(_, level)| level).filter(|level| level.is_finite());
            let apart = theirs.map_or(0.0, |level| level.min(pace.burst) - self.bucket.level);
            self.bucket.level += TOWARDS_OTHERS * apart;
        }
        self.fill_by_pace(&mut decisions);
        self.end();
        decisions
    }

    /// Offers a request. Its ticket is among the moves if it is admitted or rejected; otherwise it
    /// waits.
    pub fn offer(&mut self, request: &QueueRequest, at: Tick) -> (Ticket, Decisions) {
        let mut decisions = self.begin(at);
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        let is_within = request.limit_state == LimitState::WithinLimits;
        let is_usual = !is_within || self.usual.takes(&request.tenant, request.priority, cost_of(request), self.now);
        let waiting = self.stand(request, band_of(request, is_usual), ticket);
        let refusal = if self.goes_at_once(&waiting) { None } else { self.refusal(request, &waiting, &mut decisions) };
        match refusal {
            Some(why) => {
                let away = self.turned_away(ticket, waiting.band, why);
                decisions.refused.push(away);
            }
            None => {
                self.enter(ticket, waiting);
                self.fill(&mut decisions);
            }
        }
        self.end();
        (ticket, decisions)
    }

    /// A free seat that no request waits for, for a request that must not wait, such as a retry from another
    /// pool.
    pub fn take_free_seat(&mut self, request: &QueueRequest, at: Tick) -> Option<Ticket> {
        self.now = self.now.max(at);
        self.refill_bucket();
        let next = Ticket(self.tickets + 1);
        if !self.goes_at_once(&self.stand(request, self.band_for(request), next)) {
            return None;
        }
        let (ticket, decisions) = self.offer(request, at);
        debug_assert!(decisions.admitted == [ticket] && decisions.refused.is_empty(), "a free seat, and nobody waits");
        Some(ticket)
    }

    /// Returns a seat; `used` are the tokens the request finally cost. A ticket without a seat has no
    /// effect.
    pub fn release(&mut self, ticket: Ticket, used: Tokens, at: Tick) -> Decisions {
        let mut decisions = self.begin(at);
        if let Some(seated) = self.running.remove(&ticket) {
            self.reading -= seated.reading;
            if let Some(pace) = self.pace.filter(|_| seated.reading > 0) {
                self.bucket = self.bucket.filled(seated.taken, seated.taken, &pace);
                self.dispatched -= seated.taken;
            }
            let used = used.0.clamp(1, LARGEST);
            self.bands[seated.band].correct(seated.line, &seated.tenant, seated.cost, used);
        }
        self.refill(&mut decisions);
        self.end();
        decisions
    }

    /// Records a request's first token: its prompt is prefilled, and the engine can take another one. Counts
    /// once.
    pub fn read(&mut self, ticket: Ticket, at: Tick) -> Decisions {
        let mut decisions = self.begin(at);
        if let Some(seated) = self.running.get_mut(&ticket)
            && seated.reading > 0
        {
            self.reading -= std::mem::take(&mut seated.reading);
            self.refill(&mut decisions);
        }
        self.end();
        decisions
    }

    /// Withdraws a waiting request. False if it does not wait. Requests that it blocked are admitted at the
    /// next event.
    pub fn withdraw(&mut self, ticket: Ticket, at: Tick) -> bool {
        self.now = self.now.max(at);
        let left = self.leave(ticket, 0).is_some();
        self.end();
        left
    }

    /// Rejects requests whose time is over, and admits those they blocked.
    pub fn expire(&mut self, at: Tick) -> Decisions {
        let mut decisions = self.begin(at);
        self.fill_by_pace(&mut decisions);
        self.end();
        decisions
    }

    /// When [`Scheduler::expire`] must be called next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        self.alarms.first().map(|(moment, _)| *moment)
    }

    /// Latest rejection of a waiting request: its `leave_by`, or the moment it becomes infeasible if its class
    /// says so.
    #[must_use]
    pub fn alarm(&self, ticket: Ticket) -> Option<Tick> {
        self.waiting.get(&ticket).map(|waiting| waiting.alarm.0)
    }

    /// Sets the number of seats. If fewer than occupied, none is admitted until enough are
    /// returned.
    pub fn set_seats(&mut self, seats: usize, at: Tick) -> Decisions {
        self.seats = seats;
        let mut decisions = self.begin(at);
        self.fill(&mut decisions);
        self.end();
        decisions
    }

    /// Sets the number of engines that prefill, relevant if [`QueueSettings::reading`] limits
    /// it.
    pub fn set_prefilling_engines(&mut self, prefilling_engines: usize, at: Tick) -> Decisions {
        self.prefilling_engines = prefilling_engines;
        let mut decisions = self.begin(at);
        self.fill(&mut decisions);
        self.end();
        decisions
    }

    /// Sets the pace for [`PrefillBudget::Auto`]; `None` means unlimited. The first pace starts with a full
    /// bucket.
    pub fn set_pace(&mut self, pace: Option<PrefillPace>, at: Tick) -> Decisions {
        let mut decisions = self.begin(at);
        self.own_pace = pace;
        self.follow_pace();
        self.fill_by_pace(&mut decisions);
        self.end();
        decisions
    }

    /// Applies the mean of the gateways' paces.
    fn follow_pace(&mut self) {
        let pace = self.others.mean_pace(self.own_pace);
        let before = if self.pace.is_none() { PrefillBucket::FULL } else { self.bucket };
        self.bucket = pace.map_or(PrefillBucket::EMPTY, |pace| before.filled(0.0, 0.0, &pace));
        self.pace = pace;
    }

    /// When the next request can run, if it waits for the prefill pace alone.
    #[must_use]
    pub fn next_refill(&self) -> Option<Tick> {
        let pace = self.paced()?;
        if self.free_seats() == 0 {
            return None;
        }
        if self.next_to_go(self.bucket).is_some() {
            return Some(self.now);
        }
        let thresholds = PREFILL_PERCENTS.map(|percent| threshold(pace, percent)).into_iter();
        // Above zero an engine may also have more ahead of it.
        let levels = thresholds.chain([0.0]).map(|level| (level, self.bucket.level, pace.per_second));
        let missing = levels.chain([(0.0, self.bucket.spare, pace.spare)]);
        let mut waits: Vec<f64> = missing
            .filter(|(enough, has, rate)| enough >= has && *rate > 0.0)
            .map(|(enough, has, rate)| (just_above(enough) - has) / rate)
            .collect();
        waits.sort_by(f64::total_cmp);
        let seconds = waits.into_iter().find(|seconds| self.next_to_go(self.bucket.after(*seconds, pace)).is_some())?;
        Some(self.filled + Duration::from_secs_f64(seconds.min(LONGEST_LOOK)) + Duration::from_nanos(1))
    }

    /// Sets the settings. Waiting requests stay, even beyond the new size; requests that may now run are
    /// admitted at the next event, such as [`Scheduler::expire`].
    pub fn set_settings(&mut self, settings: QueueSettings) {
        if settings.quantum != self.settings.quantum {
            self.bands.iter_mut().for_each(|band| band.set_quantum(settings.quantum.0));
        }
        self.settings = settings;
    }

    /// Number of waiting requests.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Waiting requests of a priority, by standing.
    #[cfg(test)]
    fn waiting_in(&self, priority: Priority, limit_state: LimitState) -> usize {
        match limit_state {
            LimitState::WithinLimits => self.bands[priority as usize].len(),
            LimitState::OverLimit => self.bands[OVER_LIMIT + priority as usize].len(),
        }
    }

    /// The row of a waiting or running request; beyond all rows otherwise.
    #[cfg(test)]
    fn band_of_ticket(&self, ticket: Ticket) -> usize {
        let runs = || self.running.get(&ticket).map_or(usize::MAX, |seated| seated.band);
        self.waiting.get(&ticket).map_or_else(runs, |waiting| waiting.band)
    }

    /// Occupied seats.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Total seats.
    #[must_use]
    pub fn seats(&self) -> usize {
        self.seats
    }

    /// Engines that prefill.
    #[must_use]
    pub fn prefilling_engines(&self) -> usize {
        self.prefilling_engines
    }

    /// Most outstanding prompt tokens at one engine; `None` means unlimited.
    #[must_use]
    pub fn reading_per_engine(&self) -> Option<Tokens> {
        self.reading_at(self.bucket)
    }

    /// The same with this bucket.
    fn reading_at(&self, bucket: PrefillBucket) -> Option<Tokens> {
        match self.settings.reading {
            PrefillBudget::NoLimit => None,
            PrefillBudget::Tokens(each) => Some(each),
            PrefillBudget::Auto => {
                self.pace.map(|pace| Tokens(if bucket.level > 0.0 { pace.most } else { pace.least }.max(1.0) as u64))
            }
        }
    }

    /// The pace, if any.
    fn paced(&self) -> Option<&PrefillPace> {
        self.pace.as_ref().filter(|_| self.settings.reading == PrefillBudget::Auto)
    }

    /// Refills the bucket for the elapsed time.
    fn refill_bucket(&mut self) {
        if let Some(pace) = self.pace {
            self.bucket = self.bucket.after(self.now.since(self.filled).as_secs_f64(), &pace);
        }
        self.filled = self.now;
    }

    /// Whether the pace admits a request of this row with this bucket.
    fn keeps_pace(&self, band: usize, line: Feasibility, bucket: PrefillBucket) -> bool {
        let is_beyond = (PRIORITIES..OVER_LIMIT).contains(&band);
        self.paced().is_none_or(|pace| {
            bucket.level > threshold(pace, prefill_for(band, line)) && (!is_beyond || bucket.spare > 0.0)
        })
    }

    /// Free seats.
    #[must_use]
    pub fn free_seats(&self) -> usize {
        self.seats.saturating_sub(self.running.len() + self.others.assumed())
    }

    /// Expected wait of a request with this priority, from the requests before it and the measured rate of
    /// freed seats. Later arrivals of higher priorities are not predicted. `None` without seats or a measured
    /// rate.
    #[must_use]
    pub fn expected_wait(&self, priority: Priority, at: Tick) -> Option<Duration> {
        if !self.is_full() {
            return Some(Duration::ZERO);
        }
        self.time_through(priority as usize, at.max(self.now))
    }

    /// The same for a request that was not offered yet, including its standing.
    #[must_use]
    pub fn expected_wait_for(&self, request: &QueueRequest, at: Tick) -> Option<Duration> {
        if !self.is_full() {
            return Some(Duration::ZERO);
        }
        self.time_through(self.band_for(request), at.max(self.now))
    }

    /// Upper estimate of a waiting request's further wait, as if all others of its priority went
    /// before it.
    #[must_use]
    pub fn expected_wait_of(&self, ticket: Ticket, at: Tick) -> Option<Duration> {
        let band = self.waiting.get(&ticket)?.band;
        if self.seats == 0 {
            return None;
        }
        self.drain.time_for(self.ahead_of(band), at.max(self.now))
    }

    /// Waiting requests in a row and before it.
    fn ahead_of(&self, band: usize) -> usize {
        self.bands[..=band].iter().map(PriorityBand::len).sum()
    }

    fn time_through(&self, band: usize, at: Tick) -> Option<Duration> {
        if self.seats == 0 {
            return None;
        }
        self.drain.time_for(self.ahead_of(band) + 1, at)
    }

    /// First step of every operation: advances time.
    fn begin(&mut self, at: Tick) -> Decisions {
        self.now = self.now.max(at);
        self.refill_bucket();
        self.others.expire(self.now);
        let mut decisions = Decisions::default();
        while let Some((moment, ticket)) = self.alarms.first().copied().filter(|(moment, _)| *moment <= self.now) {
            debug_assert!(
                self.waiting.contains_key(&ticket),
                "{ticket:?} has an alarm at {moment:?} and does not wait"
            );
            let Some(gone) = self.leave(ticket, 0) else { break };
            let away = self.turned_away(ticket, gone.band, gone.alarm.1);
            decisions.refused.push(away);
        }
        while let Some((_, ticket)) = self.latest_starts.first().copied().filter(|(moment, _)| *moment < self.now) {
            self.latest_starts.pop_first();
            if let Some(waiting) = self.waiting.get_mut(&ticket) {
                waiting.line = Feasibility::Late;
                self.bands[waiting.band].demote(&waiting.tenant, waiting.place);
            }
        }
        decisions
    }

    /// Last step of every operation.
    fn end(&mut self) {
        self.drain.watch(self.seats > 0 && self.is_full(), self.now);
    }

    /// Whether any request would have to wait.
    fn is_full(&self) -> bool {
        !self.waiting.is_empty() || !self.has_room_for(1, self.bucket)
    }

    /// Whether a new request runs at once: no other waits, and outstanding prompts leave room. (A priority is
    /// entitled to nothing while none of it waits.)
    fn goes_at_once(&self, new: &QueuedRequest) -> bool {
        self.waiting.is_empty()
            && self.has_room_for(new.prompt, self.bucket)
            && !self.leaves_reading(new, self.bucket)
            && self.before(new, self.bucket).is_none()
    }

    /// Whether a seat is free, and an engine has room for this prompt.
    fn has_room_for(&self, prompt: u64, bucket: PrefillBucket) -> bool {
        let reads = self.reading_at(bucket).is_none_or(|each| {
            let most = each.0.saturating_mul(self.prefilling_engines as u64);
            self.outstanding().saturating_add(counts_for(prompt, each)) <= most
        });
        self.free_seats() > 0 && reads
    }

    /// The row of a request that was not offered yet.
    fn band_for(&self, request: &QueueRequest) -> usize {
        band_of(request, self.usual.would_take(&request.tenant, request.priority, cost_of(request), self.now))
    }

    /// The position of a request in a row.
    fn stand(&self, request: &QueueRequest, band: usize, ticket: Ticket) -> QueuedRequest {
        let place = QueuePosition { due: self.due(request), ticket };
        let own = request.deadline.latest_start(request.arrival);
        let latest_start =
            own.map(|own| self.last_call_before(band, request, place).map_or(own, |before| own.min(before)));
        let steps = request.when_hopeless == WhenHopeless::Demote && latest_start.is_some();
        let late = steps && latest_start.is_some_and(|last| last < self.now);
        let shed =
            own.filter(|_| request.when_hopeless == WhenHopeless::Shed).map(|last| last + Duration::from_nanos(1));
        let alarm = match shed {
            Some(shed) if shed < request.timeout_at => (shed, RejectReason::Hopeless),
            _ => (request.timeout_at, RejectReason::WaitedTooLong),
        };
        let line = if late { Feasibility::Late } else { Feasibility::Feasible };
        let cost = cost_of(request);
        let prompt = request.prompt.0.min(LARGEST);
        QueuedRequest { tenant: request.tenant.clone(), band, line, place, cost, prompt, latest_start, steps, alarm }
    }

    /// The key of a request: its deadline, or, with a known pace, mostly its prefill time
    /// ([`OF_PREFILL`]).
    fn due(&self, request: &QueueRequest) -> QueueKey {
        let due = request.deadline.due(request.arrival);
        let (Some(pace), QueueKey::By(deadline)) = (self.paced().filter(|pace| pace.per_second.is_finite()), due)
        else {
            return due;
        };
        let each = pace.per_second.max(1.0) / self.prefilling_engines.max(1) as f64;
        let (within, prefill) = (deadline.since(request.arrival).as_secs_f64(), request.prompt.0 as f64 / each);
        QueueKey::By(
            request.arrival + Duration::from_secs_f64((OF_DEADLINE * within + OF_PREFILL * prefill).min(3600.0)),
        )
    }

    /// Last feasible start of the tenant's latest request with the same deadline. Without it a request with a
    /// shorter prompt would overtake that one as soon as it is demoted.
    fn last_call_before(&self, band: usize, request: &QueueRequest, place: QueuePosition) -> Option<Tick> {
        let before = self.bands[band].last_due(&request.tenant, place.due)?;
        self.waiting.get(&before)?.latest_start
    }

    /// Why a request that finds no free seat may not wait either. Evicts another one from a full queue if
    /// allowed.
    fn refusal(
        &mut self,
        request: &QueueRequest,
        waiting: &QueuedRequest,
        decisions: &mut Decisions,
    ) -> Option<RejectReason> {
        if waiting.alarm.0 <= self.now {
            return Some(waiting.alarm.1);
        }
        let is_late = waiting.band < PRIORITIES && waiting.line == Feasibility::Late;
        let late_ones = || self.bands[..PRIORITIES].iter().map(PriorityBand::late).sum::<usize>();
        let are_too_many = is_late && late_ones() >= self.settings.max_waiting.div_ceil(2);
        if self.waiting.len() < self.settings.max_waiting && !are_too_many {
            return None;
        }
        let lower = match is_late {
            true if are_too_many => self.bands.len(),
            true => PRIORITIES,
            false => waiting.band + 1,
        };
        let Some(victim) = self.victim(waiting.band, lower, &request.tenant) else {
            return Some(RejectReason::QueueFull);
        };
        if let Some(gone) = self.leave(victim, 0) {
            let away = self.turned_away(victim, gone.band, RejectReason::PushedOut);
            decisions.refused.push(away);
        }
        None
    }

    /// The request to evict so that this tenant may wait in this row: from the rows from `lower` on, or from
    /// its own.
    fn victim(&self, band: usize, lower: usize, tenant: &TenantId) -> Option<Ticket> {
        let lower = (lower..self.bands.len()).rev().find(|lower| self.bands[*lower].len() > self.guaranteed(*lower));
        match lower {
            Some(lower) => self.bands[lower].last_of_the_crowd(),
            None if self.bands[band].is_crowded_for(tenant) => self.bands[band].last_of_the_crowd(),
            None => None,
        }
    }

    fn guaranteed(&self, band: usize) -> usize {
        let priority = Priority::ALL.get(band);
        priority.map_or(0, |priority| self.settings.shares.places(*priority, self.settings.max_waiting))
    }

    fn enter(&mut self, ticket: Ticket, waiting: QueuedRequest) {
        self.bands[waiting.band].insert(waiting.line, &waiting.tenant, waiting.place);
        self.alarms.insert((waiting.alarm.0, ticket));
        if let Some(latest_start) =
            waiting.latest_start.filter(|_| waiting.steps && waiting.line == Feasibility::Feasible)
        {
            self.latest_starts.insert((latest_start, ticket));
        }
        self.waiting.insert(ticket, waiting);
    }

    /// Removes a request from the queue.
    fn leave(&mut self, ticket: Ticket, charge: u64) -> Option<QueuedRequest> {
        let gone = self.waiting.remove(&ticket)?;
        self.bands[gone.band].remove(gone.line, &gone.tenant, gone.place, charge);
        self.alarms.remove(&(gone.alarm.0, ticket));
        if let Some(latest_start) = gone.latest_start.filter(|_| gone.steps) {
            self.latest_starts.remove(&(latest_start, ticket));
        }
        Some(gone)
    }

    fn turned_away(&self, ticket: Ticket, band: usize, why: RejectReason) -> Rejected {
        let whole = |wait: Duration| Duration::from_secs(seconds_up(wait)).max(SECOND);
        Rejected { ticket, why, retry_after: self.time_through(band, self.now).map(whole) }
    }

    /// Admits after an event that made room; counts in the drain rate.
    fn refill(&mut self, decisions: &mut Decisions) {
        let before = decisions.admitted.len();
        self.fill(decisions);
        let came = (decisions.admitted.len() - before).max(usize::from(!self.is_full()));
        (0..came).for_each(|_| self.drain.freed(self.now));
    }

    /// Admits after a refill; a request admitted by the pace counts in the drain rate like one that takes a
    /// freed seat.
    fn fill_by_pace(&mut self, decisions: &mut Decisions) {
        self.fill(decisions);
        (0..decisions.admitted.len()).for_each(|_| self.drain.freed(self.now));
    }

    /// Admits while there are seats and waiting requests, but not past one whose prompt has no
    /// room.
    fn fill(&mut self, decisions: &mut Decisions) {
        while self.free_seats() > 0 {
            let next = match self.next_to_go(self.bucket) {
                Some(NextToGo::Here(next)) => next,
                Some(NextToGo::Elsewhere(place, prompt)) => {
                    self.assume(place, prompt);
                    continue;
                }
                None => return,
            };
            let (ticket, band, cost, prompt) = (next.place.ticket, next.band, next.cost, next.prompt);
            let reading = self.reading_per_engine().map_or(0, |each| counts_for(prompt, each));
            self.reading += reading;
            let taken = self.take_from_bucket(prompt);
            self.dispatched += taken;
            self.entitle(band, cost);
            let Some(gone) = self.leave(ticket, cost) else { return };
            self.running
                .insert(ticket, RunningRequest { tenant: gone.tenant, band, line: gone.line, cost, reading, taken });
            decisions.admitted.push(ticket);
        }
    }

    /// The next request of this or another gateway, if this bucket admits it.
    fn next_to_go(&self, bucket: PrefillBucket) -> Option<NextToGo<'_>> {
        let own = self.waiting.get(&self.bands[self.next_band(bucket)?].first()?.ticket)?;
        let other = if self.is_due(own.band) { None } else { self.before(own, bucket) };
        let (band, line, prompt) =
            other.map_or((own.band, own.line, own.prompt), |(place, prompt)| (place.band, place.line(), prompt));
        let next = other.map_or(NextToGo::Here(own), |(place, prompt)| NextToGo::Elsewhere(place, prompt));
        (self.has_room_for(prompt, bucket) && self.keeps_pace(band, line, bucket)).then_some(next)
    }

    /// The first request of another gateway that goes before one of this gateway, those left out that must leave
    /// the prefill budget to others.
    fn before(&self, own: &QueuedRequest, bucket: PrefillBucket) -> Option<(OtherPlace, u64)> {
        let ahead = self.others.in_order().take_while(|(place, _)| place.is_before(own.band, own.line, own.place.due));
        let waits_for = |place: &OtherPlace| match own.band {
            ..PRIORITIES => false,
            PRIORITIES..OVER_LIMIT => !place.is_late && place.band < PRIORITIES,
            OVER_LIMIT.. => place.band < OVER_LIMIT,
        };
        let goes = |place: &OtherPlace, prompt: u64| {
            waits_for(place) || !self.leaves_to_others(place.band, place.line(), prompt, bucket)
        };
        ahead.map(|(place, prompt)| (*place, prompt)).find(|(place, prompt)| goes(place, *prompt))
    }

    /// Counts another gateway's request as dispatched.
    fn assume(&mut self, place: OtherPlace, prompt: u64) {
        let prefill = self.reading_per_engine().map_or(0, |each| counts_for(prompt, each));
        let taken = self.take_from_bucket(prompt);
        // Each priority is entitled at one gateway at least: here where it waits nowhere else.
        for (band, priority) in Priority::ALL.iter().enumerate() {
            if place.band < PRIORITIES && self.bands[band].len() > 0 && !self.others.any_in(band) {
                let share = u64::from(self.settings.shares.of(*priority));
                self.bands[band].credit = self.bands[band].credit.saturating_add(prompt.min(LARGEST) * share);
            }
        }
        self.others.assume(place, prefill, taken);
    }

    /// Takes a prompt from the bucket: at most what one engine computes between full and empty, because the
    /// other engines continue.
    fn take_from_bucket(&mut self, prompt: u64) -> f64 {
        let Some(pace) = self.paced().copied() else { return 0.0 };
        let taken = (prompt as f64).min((pace.burst + pace.behind) / self.prefilling_engines.max(1) as f64);
        self.bucket.level -= taken;
        self.bucket.spare = (self.bucket.spare - taken).max(-pace.behind);
        taken
    }

    /// The row to serve: of the due ones the one served longest ago, else the
    /// highest.
    fn next_band(&self, bucket: PrefillBucket) -> Option<usize> {
        let due = (0..PRIORITIES).filter(|band| self.is_due(*band)).min_by_key(|band| self.bands[*band].last_turn);
        due.or_else(|| self.highest_of(0..PRIORITIES, bucket))
            .or_else(|| {
                self.highest_of(PRIORITIES..OVER_LIMIT, bucket).filter(|_| self.none_can_be_met_of(0..PRIORITIES))
            })
            .or_else(|| {
                let nobody_within = self.bands[..OVER_LIMIT].iter().all(|band| band.len() == 0);
                self.highest_of(OVER_LIMIT..self.bands.len(), bucket).filter(|_| nobody_within)
            })
    }

    fn highest_of(&self, mut bands: std::ops::Range<usize>, bucket: PrefillBucket) -> Option<usize> {
        bands.find(|band| self.bands[*band].len() > 0 && !self.is_held_back(*band, bucket))
    }

    /// Whether no feasible request waits in these rows.
    fn none_can_be_met_of(&self, bands: std::ops::Range<usize>) -> bool {
        self.bands[bands].iter().all(|band| band.len() == band.late())
    }

    /// Whether a row's next request must leave the prefill budget to others.
    fn is_held_back(&self, band: usize, bucket: PrefillBucket) -> bool {
        let first = self.bands[band].first().and_then(|place| self.waiting.get(&place.ticket));
        first.is_some_and(|first| self.leaves_reading(first, bucket))
    }

    /// Whether a request must leave the prefill budget to higher rows.
    fn leaves_reading(&self, next: &QueuedRequest, bucket: PrefillBucket) -> bool {
        self.leaves_to_others(next.band, next.line, next.prompt, bucket)
    }

    /// The same by its row and prompt.
    fn leaves_to_others(&self, band: usize, line: Feasibility, prompt: u64, bucket: PrefillBucket) -> bool {
        if !self.keeps_pace(band, line, bucket) {
            return true;
        }
        let outstanding = self.outstanding();
        let Some(each) = self.reading_at(bucket).filter(|_| outstanding > 0) else { return false };
        let all = each.0.saturating_mul(self.prefilling_engines as u64);
        let most = all / 100 * prefill_for(band, line);
        outstanding.saturating_add(counts_for(prompt, each)) > most
    }

    /// Outstanding prompt tokens of all gateways.
    fn outstanding(&self) -> u64 {
        self.reading.saturating_add(self.others.prefill())
    }

    /// Whether a priority's entitlement covers its next request.
    fn is_due(&self, band: usize) -> bool {
        let first = self.bands[band].first().and_then(|place| self.waiting.get(&place.ticket));
        first.is_some_and(|first| self.bands[band].credit >= first.cost * 1000)
    }

    /// Distributes entitlements when this row is served: each waiting priority gets its share.
    fn entitle(&mut self, band: usize, cost: u64) {
        self.turns += 1;
        self.bands[band].last_turn = self.turns;
        for (priority, waits) in Priority::ALL.iter().zip(&mut self.bands) {
            if band < PRIORITIES && waits.len() > 0 {
                waits.credit = waits.credit.saturating_add(cost * u64::from(self.settings.shares.of(*priority)));
            }
        }
        self.bands[band].credit = self.bands[band].credit.saturating_sub(cost * 1000);
    }
}

/// The next request in the common order.
enum NextToGo<'a> {
    /// Of this gateway.
    Here(&'a QueuedRequest),
    /// Of another one, with its prompt.
    Elsewhere(OtherPlace, u64),
}

/// Counted size of a prompt, with this limit per engine.
fn counts_for(prompt: u64, each: Tokens) -> u64 {
    prompt.min(each.0).max(1)
}

/// A level just above another one, within floating-point precision for tokens.
fn just_above(level: f64) -> f64 {
    level + 1e-6 * level.abs().max(1.0)
}

/// Part of the distance to another gateway's bucket that each report closes.
const TOWARDS_OTHERS: f64 = 0.05;

/// Deepest level of the bucket after other gateways' dispatches, in its ranges.
const DEEPEST: f64 = 4.0;

/// Longest interval between checks of a slowly filling bucket, seconds.
const LONGEST_LOOK: f64 = 3600.0;

const SECOND: Duration = Duration::from_secs(1);

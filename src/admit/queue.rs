//! The scheduler of one pool: which requests run, wait, or are rejected.
//!
//! Sans-IO: moments are arguments, results say what to do ([`Moves`]) and when to call again
//! ([`Scheduler::next_deadline`]). The caller holds the lock, wakes waiting requests and returns seats.
//!
//! Order:
//! 1. Requests within their tenants' usual demand (`usual`), then those beyond it, then those over their
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
//! [`Reading::Auto`] prompts are dispatched by [`PrefillPace`], a token bucket that refills at the rate at
//! which engines can prefill without breaking the TPOT; with [`Reading::Tokens`] a fixed number may be
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

mod ask;
mod drain;
mod lane;
mod row;
mod shares;
#[cfg(test)]
mod tests;
mod usual;

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::time::Duration;

use crate::units::{PrefillPace, Priority, TenantId, Tick, Tokens, seconds_up};

pub use ask::{Aim, Ask, Moves, Standing, Ticket, TurnedAway, WhenHopeless, Why};
pub use shares::{BadShares, Shares};

use ask::Due;
use drain::Drain;
use lane::Place;
use row::{Line, Row};
use usual::UsualShares;

/// Settings of a pool's queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Most waiting requests. 0: a request runs at once or is rejected.
    pub max_waiting: usize,
    /// How far a tenant's served tokens may exceed those of the least-served tenant before others go
    /// first.
    pub quantum: Tokens,
    /// Guaranteed shares of the priorities.
    pub shares: Shares,
    /// Limit of outstanding prompt tokens.
    pub reading: Reading,
}

impl Default for Settings {
    /// 1000 requests, 65,536 tokens, default shares, automatic prefill pace.
    fn default() -> Self {
        Settings { max_waiting: 1000, quantum: Tokens(65_536), shares: Shares::default(), reading: Reading::Auto }
    }
}

/// Limit of prompt tokens at one engine of requests without a first token. A longer prompt counts as the
/// limit and has the engine to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reading {
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
struct Bucket {
    /// Refilled by [`PrefillPace::per_second`].
    level: f64,
    /// Refilled by [`PrefillPace::spare`]; each dispatch takes from both.
    spare: f64,
}

impl Bucket {
    const EMPTY: Bucket = Bucket { level: 0.0, spare: 0.0 };
    const FULL: Bucket = Bucket { level: f64::INFINITY, spare: f64::INFINITY };

    /// With this many tokens added, up to the pace's capacity.
    fn filled(self, tokens: f64, spare: f64, pace: &PrefillPace) -> Bucket {
        Bucket { level: (self.level + tokens).min(pace.burst), spare: (self.spare + spare).min(pace.burst) }
    }

    /// After this many seconds.
    fn after(self, seconds: f64, pace: &PrefillPace) -> Bucket {
        let gained = |rate: f64| if rate.is_finite() { rate * seconds } else { f64::INFINITY };
        self.filled(gained(pace.per_second), gained(pace.spare), pace)
    }
}

impl Reading {
    /// The share of one of several gateways in front of the same engines.
    #[must_use]
    pub fn shared_among(self, gateways: NonZeroU32) -> Reading {
        match self {
            Reading::Tokens(each) => Reading::Tokens(Tokens((each.0 / u64::from(gateways.get())).max(1))),
            Reading::NoLimit | Reading::Auto => self,
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
    settings: Settings,
    seats: usize,
    /// Number of engines that prefill.
    readers: usize,
    /// Current pace of [`Reading::Auto`].
    pace: Option<PrefillPace>,
    /// State at `filled`.
    bucket: Bucket,
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
    rows: Vec<Row>,
    waiting: HashMap<Ticket, Waiting>,
    running: HashMap<Ticket, Seated>,
    /// When each waiting request must be rejected.
    alarms: BTreeSet<(Tick, Ticket)>,
    /// The last feasible start of requests that are demoted after it.
    last_calls: BTreeSet<(Tick, Ticket)>,
    drain: Drain,
    usual: UsualShares,
}

#[derive(Debug)]
struct Waiting {
    tenant: TenantId,
    row: usize,
    line: Line,
    place: Place,
    cost: u64,
    prompt: u64,
    /// Not later than that of the tenant's previous request with the same deadline.
    last_call: Option<Tick>,
    /// Whether it is demoted after its last feasible start.
    steps: bool,
    alarm: (Tick, Why),
}

#[derive(Debug)]
struct Seated {
    tenant: TenantId,
    row: usize,
    line: Line,
    cost: u64,
    /// Prompt tokens it counts for until its first token.
    reading: u64,
    /// Tokens it took from the pace's bucket.
    taken: f64,
}

const RANKS: usize = Priority::ALL.len();

/// Weight of the prefill time in the key. Beyond capacity, shortest job first meets more deadlines than
/// earliest deadline first, which serves everybody slightly too late (Moore, *Management Science* 15, 1968,
/// for one machine): 8.2 against 7.1 requests per second in one mix, 12.3 against 10.9 in another. Values
/// from 10 to 100 make little difference; below capacity none.
const OF_PREFILL: f64 = 30.0;
const OF_DEADLINE: f64 = 0.1;

/// Largest counted size of a request, so that sums cannot overflow.
const LARGEST: u64 = 1 << 40;

/// Percentage for requests beyond usual demand: enough to use engines that are otherwise idle, little
/// enough not to delay others.
const BEYOND_SHARE: u64 = 25;

/// Percentage of the outstanding prompt tokens that a row may use together with all others.
const fn reading_for(row: usize, line: Line) -> u64 {
    const OF_RANKS: [u64; RANKS] = [100, 100, 90, 80, 70];
    match line {
        Line::Hopeful if row < RANKS => OF_RANKS[row],
        Line::Hopeful if row < OVER_LIMIT => BEYOND_SHARE,
        Line::Hopeful | Line::Hopeless => 25,
    }
}

/// `is_usual`: within the tenant's usual demand.
fn row_of(ask: &Ask, is_usual: bool) -> usize {
    let first = match ask.standing {
        Standing::WithinLimits if is_usual => 0,
        Standing::WithinLimits => RANKS,
        Standing::OverLimit => OVER_LIMIT,
    };
    first + ask.rank as usize
}

fn cost_of(ask: &Ask) -> u64 {
    ask.tokens.0.clamp(1, LARGEST)
}

/// First row of requests over their limits; those beyond usual demand come before.
const OVER_LIMIT: usize = 2 * RANKS;

impl Scheduler {
    /// An empty queue without seats, see [`Scheduler::set_seats`].
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let rows = (0..3 * RANKS).map(|_| Row::new(settings.quantum.0)).collect();
        Scheduler {
            settings,
            seats: 0,
            readers: 0,
            pace: None,
            bucket: Bucket::EMPTY,
            filled: Tick::ZERO,
            reading: 0,
            now: Tick::ZERO,
            tickets: 0,
            turns: 0,
            rows,
            waiting: HashMap::new(),
            running: HashMap::new(),
            alarms: BTreeSet::new(),
            last_calls: BTreeSet::new(),
            drain: Drain::default(),
            usual: UsualShares::default(),
        }
    }

    /// Offers a request. Its ticket is among the moves if it is admitted or rejected; otherwise it
    /// waits.
    pub fn offer(&mut self, ask: &Ask, at: Tick) -> (Ticket, Moves) {
        let mut moves = self.begin(at);
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        let is_within = ask.standing == Standing::WithinLimits;
        let is_usual = !is_within || self.usual.takes(&ask.tenant, ask.rank, cost_of(ask), self.now);
        let waiting = self.stand(ask, row_of(ask, is_usual), ticket);
        let refusal = if self.goes_at_once(&waiting) { None } else { self.refusal(ask, &waiting, &mut moves) };
        match refusal {
            Some(why) => {
                let away = self.turned_away(ticket, waiting.row, why);
                moves.refused.push(away);
            }
            None => {
                self.enter(ticket, waiting);
                self.fill(&mut moves);
            }
        }
        self.end();
        (ticket, moves)
    }

    /// A free seat that no request waits for, for a request that must not wait, such as a retry from another
    /// pool.
    pub fn take_free_seat(&mut self, ask: &Ask, at: Tick) -> Option<Ticket> {
        self.now = self.now.max(at);
        self.refill_bucket();
        let next = Ticket(self.tickets + 1);
        if !self.goes_at_once(&self.stand(ask, self.row_for(ask), next)) {
            return None;
        }
        let (ticket, moves) = self.offer(ask, at);
        debug_assert!(moves.admitted == [ticket] && moves.refused.is_empty(), "a free seat, and nobody waits");
        Some(ticket)
    }

    /// Returns a seat; `used` are the tokens the request finally cost. A ticket without a seat has no
    /// effect.
    pub fn release(&mut self, ticket: Ticket, used: Tokens, at: Tick) -> Moves {
        let mut moves = self.begin(at);
        if let Some(seated) = self.running.remove(&ticket) {
            self.reading -= seated.reading;
            if let Some(pace) = self.pace.filter(|_| seated.reading > 0) {
                self.bucket = self.bucket.filled(seated.taken, seated.taken, &pace);
            }
            let used = used.0.clamp(1, LARGEST);
            self.rows[seated.row].correct(seated.line, &seated.tenant, seated.cost, used);
        }
        self.refill(&mut moves);
        self.end();
        moves
    }

    /// Records a request's first token: its prompt is prefilled, and the engine can take another one. Counts
    /// once.
    pub fn read(&mut self, ticket: Ticket, at: Tick) -> Moves {
        let mut moves = self.begin(at);
        if let Some(seated) = self.running.get_mut(&ticket)
            && seated.reading > 0
        {
            self.reading -= std::mem::take(&mut seated.reading);
            self.refill(&mut moves);
        }
        self.end();
        moves
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
    pub fn expire(&mut self, at: Tick) -> Moves {
        let mut moves = self.begin(at);
        self.fill_by_pace(&mut moves);
        self.end();
        moves
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
    pub fn set_seats(&mut self, seats: usize, at: Tick) -> Moves {
        self.seats = seats;
        let mut moves = self.begin(at);
        self.fill(&mut moves);
        self.end();
        moves
    }

    /// Sets the number of engines that prefill, relevant if [`Settings::reading`] limits
    /// it.
    pub fn set_readers(&mut self, readers: usize, at: Tick) -> Moves {
        self.readers = readers;
        let mut moves = self.begin(at);
        self.fill(&mut moves);
        self.end();
        moves
    }

    /// Sets the pace for [`Reading::Auto`]; `None` means unlimited. The first pace starts with a full
    /// bucket.
    pub fn set_pace(&mut self, pace: Option<PrefillPace>, at: Tick) -> Moves {
        let mut moves = self.begin(at);
        let before = if self.pace.is_none() { Bucket::FULL } else { self.bucket };
        self.bucket = pace.map_or(Bucket::EMPTY, |pace| before.filled(0.0, 0.0, &pace));
        self.pace = pace;
        self.fill_by_pace(&mut moves);
        self.end();
        moves
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
        let firsts = self.rows.iter().filter_map(|row| self.waiting.get(&row.first()?.ticket));
        let thresholds = firsts.map(|first| threshold(pace, reading_for(first.row, first.line)));
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
    pub fn set_settings(&mut self, settings: Settings) {
        if settings.quantum != self.settings.quantum {
            self.rows.iter_mut().for_each(|row| row.set_quantum(settings.quantum.0));
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
    fn waiting_in(&self, rank: Priority, standing: Standing) -> usize {
        match standing {
            Standing::WithinLimits => self.rows[rank as usize].len(),
            Standing::OverLimit => self.rows[OVER_LIMIT + rank as usize].len(),
        }
    }

    /// The row of a waiting or running request; beyond all rows otherwise.
    #[cfg(test)]
    fn row_of_ticket(&self, ticket: Ticket) -> usize {
        let runs = || self.running.get(&ticket).map_or(usize::MAX, |seated| seated.row);
        self.waiting.get(&ticket).map_or_else(runs, |waiting| waiting.row)
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
    pub fn readers(&self) -> usize {
        self.readers
    }

    /// Most outstanding prompt tokens at one engine; `None` means unlimited.
    #[must_use]
    pub fn reading_per_engine(&self) -> Option<Tokens> {
        self.reading_at(self.bucket)
    }

    /// The same with this bucket.
    fn reading_at(&self, bucket: Bucket) -> Option<Tokens> {
        match self.settings.reading {
            Reading::NoLimit => None,
            Reading::Tokens(each) => Some(each),
            Reading::Auto => {
                self.pace.map(|pace| Tokens(if bucket.level > 0.0 { pace.most } else { pace.least }.max(1.0) as u64))
            }
        }
    }

    /// The pace, if any.
    fn paced(&self) -> Option<&PrefillPace> {
        self.pace.as_ref().filter(|_| self.settings.reading == Reading::Auto)
    }

    /// Refills the bucket for the elapsed time.
    fn refill_bucket(&mut self) {
        if let Some(pace) = self.pace {
            self.bucket = self.bucket.after(self.now.since(self.filled).as_secs_f64(), &pace);
        }
        self.filled = self.now;
    }

    /// Whether the pace admits a request of this row with this bucket.
    fn keeps_pace(&self, row: usize, line: Line, bucket: Bucket) -> bool {
        let is_beyond = (RANKS..OVER_LIMIT).contains(&row);
        self.paced().is_none_or(|pace| {
            bucket.level > threshold(pace, reading_for(row, line)) && (!is_beyond || bucket.spare > 0.0)
        })
    }

    /// Free seats.
    #[must_use]
    pub fn free_seats(&self) -> usize {
        self.seats.saturating_sub(self.running.len())
    }

    /// Expected wait of a request with this priority, from the requests before it and the measured rate of
    /// freed seats. Later arrivals of higher priorities are not predicted. `None` without seats or a measured
    /// rate.
    #[must_use]
    pub fn expected_wait(&self, rank: Priority, at: Tick) -> Option<Duration> {
        if !self.is_full() {
            return Some(Duration::ZERO);
        }
        self.time_through(rank as usize, at.max(self.now))
    }

    /// The same for a request that was not offered yet, including its standing.
    #[must_use]
    pub fn expected_wait_for(&self, ask: &Ask, at: Tick) -> Option<Duration> {
        if !self.is_full() {
            return Some(Duration::ZERO);
        }
        self.time_through(self.row_for(ask), at.max(self.now))
    }

    /// Upper estimate of a waiting request's further wait, as if all others of its priority went
    /// before it.
    #[must_use]
    pub fn expected_wait_of(&self, ticket: Ticket, at: Tick) -> Option<Duration> {
        let row = self.waiting.get(&ticket)?.row;
        if self.seats == 0 {
            return None;
        }
        self.drain.time_for(self.before(row), at.max(self.now))
    }

    /// Waiting requests in a row and before it.
    fn before(&self, row: usize) -> usize {
        self.rows[..=row].iter().map(Row::len).sum()
    }

    fn time_through(&self, row: usize, at: Tick) -> Option<Duration> {
        if self.seats == 0 {
            return None;
        }
        self.drain.time_for(self.before(row) + 1, at)
    }

    /// First step of every operation: advances time.
    fn begin(&mut self, at: Tick) -> Moves {
        self.now = self.now.max(at);
        self.refill_bucket();
        let mut moves = Moves::default();
        while let Some((moment, ticket)) = self.alarms.first().copied().filter(|(moment, _)| *moment <= self.now) {
            debug_assert!(
                self.waiting.contains_key(&ticket),
                "{ticket:?} has an alarm at {moment:?} and does not wait"
            );
            let Some(gone) = self.leave(ticket, 0) else { break };
            let away = self.turned_away(ticket, gone.row, gone.alarm.1);
            moves.refused.push(away);
        }
        while let Some((_, ticket)) = self.last_calls.first().copied().filter(|(moment, _)| *moment < self.now) {
            self.last_calls.pop_first();
            if let Some(waiting) = self.waiting.get_mut(&ticket) {
                waiting.line = Line::Hopeless;
                self.rows[waiting.row].step_behind(&waiting.tenant, waiting.place);
            }
        }
        moves
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
    fn goes_at_once(&self, new: &Waiting) -> bool {
        self.waiting.is_empty() && self.has_room_for(new.prompt, self.bucket) && !self.leaves_reading(new, self.bucket)
    }

    /// Whether a seat is free, and an engine has room for this prompt.
    fn has_room_for(&self, prompt: u64, bucket: Bucket) -> bool {
        let reads = self.reading_at(bucket).is_none_or(|each| {
            let most = each.0.saturating_mul(self.readers as u64);
            self.reading.saturating_add(counts_for(prompt, each)) <= most
        });
        self.free_seats() > 0 && reads
    }

    /// The row of a request that was not offered yet.
    fn row_for(&self, ask: &Ask) -> usize {
        row_of(ask, self.usual.would_take(&ask.tenant, ask.rank, cost_of(ask), self.now))
    }

    /// The position of a request in a row.
    fn stand(&self, ask: &Ask, row: usize, ticket: Ticket) -> Waiting {
        let place = Place { due: self.due(ask), ticket };
        let own = ask.aim.last_call(ask.arrival);
        let last_call = own.map(|own| self.last_call_before(row, ask, place).map_or(own, |before| own.min(before)));
        let steps = ask.when_hopeless == WhenHopeless::Demote && last_call.is_some();
        let late = steps && last_call.is_some_and(|last| last < self.now);
        let shed = own.filter(|_| ask.when_hopeless == WhenHopeless::Shed).map(|last| last + Duration::from_nanos(1));
        let alarm = match shed {
            Some(shed) if shed < ask.leave_by => (shed, Why::Hopeless),
            _ => (ask.leave_by, Why::WaitedTooLong),
        };
        let line = if late { Line::Hopeless } else { Line::Hopeful };
        let cost = cost_of(ask);
        let prompt = ask.prompt.0.min(LARGEST);
        Waiting { tenant: ask.tenant.clone(), row, line, place, cost, prompt, last_call, steps, alarm }
    }

    /// The key of a request: its deadline, or, with a known pace, mostly its prefill time
    /// ([`OF_PREFILL`]).
    fn due(&self, ask: &Ask) -> Due {
        let due = ask.aim.due(ask.arrival);
        let (Some(pace), Due::By(deadline)) = (self.paced().filter(|pace| pace.per_second.is_finite()), due) else {
            return due;
        };
        let each = pace.per_second.max(1.0) / self.readers.max(1) as f64;
        let (within, prefill) = (deadline.since(ask.arrival).as_secs_f64(), ask.prompt.0 as f64 / each);
        Due::By(ask.arrival + Duration::from_secs_f64((OF_DEADLINE * within + OF_PREFILL * prefill).min(3600.0)))
    }

    /// Last feasible start of the tenant's latest request with the same deadline. Without it a request with a
    /// shorter prompt would overtake that one as soon as it is demoted.
    fn last_call_before(&self, row: usize, ask: &Ask, place: Place) -> Option<Tick> {
        let before = self.rows[row].last_due(&ask.tenant, place.due)?;
        self.waiting.get(&before)?.last_call
    }

    /// Why a request that finds no free seat may not wait either. Evicts another one from a full queue if
    /// allowed.
    fn refusal(&mut self, ask: &Ask, waiting: &Waiting, moves: &mut Moves) -> Option<Why> {
        if waiting.alarm.0 <= self.now {
            return Some(waiting.alarm.1);
        }
        let is_late = waiting.row < RANKS && waiting.line == Line::Hopeless;
        let late_ones = || self.rows[..RANKS].iter().map(Row::hopeless).sum::<usize>();
        let are_too_many = is_late && late_ones() >= self.settings.max_waiting.div_ceil(2);
        if self.waiting.len() < self.settings.max_waiting && !are_too_many {
            return None;
        }
        let lower = match is_late {
            true if are_too_many => self.rows.len(),
            true => RANKS,
            false => waiting.row + 1,
        };
        let Some(victim) = self.victim(waiting.row, lower, &ask.tenant) else { return Some(Why::QueueFull) };
        if let Some(gone) = self.leave(victim, 0) {
            let away = self.turned_away(victim, gone.row, Why::PushedOut);
            moves.refused.push(away);
        }
        None
    }

    /// The request to evict so that this tenant may wait in this row: from the rows from `lower` on, or from
    /// its own.
    fn victim(&self, row: usize, lower: usize, tenant: &TenantId) -> Option<Ticket> {
        let lower = (lower..self.rows.len()).rev().find(|lower| self.rows[*lower].len() > self.guaranteed(*lower));
        match lower {
            Some(lower) => self.rows[lower].last_of_the_crowd(),
            None if self.rows[row].is_crowded_for(tenant) => self.rows[row].last_of_the_crowd(),
            None => None,
        }
    }

    fn guaranteed(&self, row: usize) -> usize {
        let rank = Priority::ALL.get(row);
        rank.map_or(0, |rank| self.settings.shares.places(*rank, self.settings.max_waiting))
    }

    fn enter(&mut self, ticket: Ticket, waiting: Waiting) {
        self.rows[waiting.row].insert(waiting.line, &waiting.tenant, waiting.place);
        self.alarms.insert((waiting.alarm.0, ticket));
        if let Some(last_call) = waiting.last_call.filter(|_| waiting.steps && waiting.line == Line::Hopeful) {
            self.last_calls.insert((last_call, ticket));
        }
        self.waiting.insert(ticket, waiting);
    }

    /// Removes a request from the queue.
    fn leave(&mut self, ticket: Ticket, charge: u64) -> Option<Waiting> {
        let gone = self.waiting.remove(&ticket)?;
        self.rows[gone.row].remove(gone.line, &gone.tenant, gone.place, charge);
        self.alarms.remove(&(gone.alarm.0, ticket));
        if let Some(last_call) = gone.last_call.filter(|_| gone.steps) {
            self.last_calls.remove(&(last_call, ticket));
        }
        Some(gone)
    }

    fn turned_away(&self, ticket: Ticket, row: usize, why: Why) -> TurnedAway {
        let whole = |wait: Duration| Duration::from_secs(seconds_up(wait)).max(SECOND);
        TurnedAway { ticket, why, retry_after: self.time_through(row, self.now).map(whole) }
    }

    /// Admits after an event that made room; counts in the drain rate.
    fn refill(&mut self, moves: &mut Moves) {
        let before = moves.admitted.len();
        self.fill(moves);
        let came = (moves.admitted.len() - before).max(usize::from(!self.is_full()));
        (0..came).for_each(|_| self.drain.freed(self.now));
    }

    /// Admits after a refill; a request admitted by the pace counts in the drain rate like one that takes a
    /// freed seat.
    fn fill_by_pace(&mut self, moves: &mut Moves) {
        self.fill(moves);
        (0..moves.admitted.len()).for_each(|_| self.drain.freed(self.now));
    }

    /// Admits while there are seats and waiting requests, but not past one whose prompt has no
    /// room.
    fn fill(&mut self, moves: &mut Moves) {
        while self.free_seats() > 0 {
            let Some(next) = self.next_to_go(self.bucket) else { return };
            let (ticket, row, cost, prompt) = (next.place.ticket, next.row, next.cost, next.prompt);
            let reading = self.reading_per_engine().map_or(0, |each| counts_for(prompt, each));
            self.reading += reading;
            let taken = self.take_from_bucket(prompt);
            self.entitle(row, cost);
            let Some(gone) = self.leave(ticket, cost) else { return };
            self.running.insert(ticket, Seated { tenant: gone.tenant, row, line: gone.line, cost, reading, taken });
            moves.admitted.push(ticket);
        }
    }

    /// The next request, if this bucket admits it.
    fn next_to_go(&self, bucket: Bucket) -> Option<&Waiting> {
        let next = self.waiting.get(&self.rows[self.next_row(bucket)?].first()?.ticket)?;
        (self.has_room_for(next.prompt, bucket) && self.keeps_pace(next.row, next.line, bucket)).then_some(next)
    }

    /// Takes a prompt from the bucket: at most what one engine computes between full and empty, because the
    /// other engines continue.
    fn take_from_bucket(&mut self, prompt: u64) -> f64 {
        let Some(pace) = self.paced().copied() else { return 0.0 };
        let taken = (prompt as f64).min((pace.burst + pace.behind) / self.readers.max(1) as f64);
        self.bucket.level -= taken;
        self.bucket.spare = (self.bucket.spare - taken).max(-pace.behind);
        taken
    }

    /// The row to serve: of the due ones the one served longest ago, else the
    /// highest.
    fn next_row(&self, bucket: Bucket) -> Option<usize> {
        let due = (0..RANKS).filter(|row| self.is_due(*row)).min_by_key(|row| self.rows[*row].last_turn);
        due.or_else(|| self.highest_of(0..RANKS, bucket))
            .or_else(|| self.highest_of(RANKS..OVER_LIMIT, bucket).filter(|_| self.none_can_be_met_of(0..RANKS)))
            .or_else(|| {
                let nobody_within = self.rows[..OVER_LIMIT].iter().all(|row| row.len() == 0);
                self.highest_of(OVER_LIMIT..self.rows.len(), bucket).filter(|_| nobody_within)
            })
    }

    fn highest_of(&self, mut rows: std::ops::Range<usize>, bucket: Bucket) -> Option<usize> {
        rows.find(|row| self.rows[*row].len() > 0 && !self.is_held_back(*row, bucket))
    }

    /// Whether no feasible request waits in these rows.
    fn none_can_be_met_of(&self, rows: std::ops::Range<usize>) -> bool {
        self.rows[rows].iter().all(|row| row.len() == row.hopeless())
    }

    /// Whether a row's next request must leave the prefill budget to others.
    fn is_held_back(&self, row: usize, bucket: Bucket) -> bool {
        let first = self.rows[row].first().and_then(|place| self.waiting.get(&place.ticket));
        first.is_some_and(|first| self.leaves_reading(first, bucket))
    }

    /// Whether a request must leave the prefill budget to higher rows.
    fn leaves_reading(&self, next: &Waiting, bucket: Bucket) -> bool {
        if !self.keeps_pace(next.row, next.line, bucket) {
            return true;
        }
        let Some(each) = self.reading_at(bucket).filter(|_| self.reading > 0) else { return false };
        let all = each.0.saturating_mul(self.readers as u64);
        let most = all / 100 * reading_for(next.row, next.line);
        self.reading.saturating_add(counts_for(next.prompt, each)) > most
    }

    /// Whether a priority's entitlement covers its next request.
    fn is_due(&self, row: usize) -> bool {
        let first = self.rows[row].first().and_then(|place| self.waiting.get(&place.ticket));
        first.is_some_and(|first| self.rows[row].credit >= first.cost * 1000)
    }

    /// Distributes entitlements when this row is served: each waiting priority gets its share.
    fn entitle(&mut self, row: usize, cost: u64) {
        self.turns += 1;
        self.rows[row].last_turn = self.turns;
        for (rank, waits) in Priority::ALL.iter().zip(&mut self.rows) {
            if row < RANKS && waits.len() > 0 {
                waits.credit = waits.credit.saturating_add(cost * u64::from(self.settings.shares.of(*rank)));
            }
        }
        self.rows[row].credit = self.rows[row].credit.saturating_sub(cost * 1000);
    }
}

/// Counted size of a prompt, with this limit per engine.
fn counts_for(prompt: u64, each: Tokens) -> u64 {
    prompt.min(each.0).max(1)
}

/// A level just above another one, within floating-point precision for tokens.
fn just_above(level: f64) -> f64 {
    level + 1e-6 * level.abs().max(1.0)
}

/// Longest interval between checks of a slowly filling bucket, seconds.
const LONGEST_LOOK: f64 = 3600.0;

const SECOND: Duration = Duration::from_secs(1);

//! Who of a pool's requests runs, who waits, and who is turned away.
//!
//! Sans-IO: moments are arguments, answers say what to do ([`Moves`]) and when to ask again
//! ([`Scheduler::next_deadline`]). The desk holds the lock, wakes the waiting and gives seats
//! back.
//!
//! The order, one scheduler per pool:
//! 1. Requests within what their tenants usually ask for (`usual`), then those beyond it, and
//!    last those over their tenants' limits. Those beyond go when nobody before them waits who can
//!    still make it, those over limits when nobody else waits; no guarantee covers either.
//! 2. The highest rank that waits, unless another one's guaranteed share is due ([`Shares`]):
//!    a rank is entitled to its share of the tokens admitted while it waits, and is due when
//!    that covers its next request. [`Shares::longest_wait`] is the bound that follows.
//! 3. In a rank, requests that can still make it before those that cannot, by the rule of
//!    their class ([`WhenHopeless`]).
//! 4. Among these the smallest key of the tenants whose tokens served lie within one
//!    quantum of the least-served tenant that waits; while a tenant waits, another one gets
//!    at most twice the sum of the quantum and the largest request before it (estimates that
//!    are corrected later apart). Without an objective: last, by arrival.
//!
//! The key is `arrival + 0.1 x time to the deadline + 30 x prefill time`: short prompts first, and
//! everybody moves forward by waiting. The prefill time is what the prompt takes of one engine's pace;
//! without a pace the key is the deadline.
//!
//! Stepping behind changes no order in what one tenant sends with equal keys and the same
//! rule: a request becomes hopeless no later than the one before it. A request over the limit
//! may be overtaken by a later one within it.
//!
//! Inside a rank nothing but `leave_by` bounds the wait of a request that others keep
//! overtaking (a hopeless one, one with no objective): then it is refused, never left waiting.
//!
//! A seat is not all that a request needs: prompts that an engine has still to compute are what a
//! first token waits for, and they slow the answers that run. Under [`Reading::Auto`] prompts go by
//! [`PrefillPace`], a token bucket that fills at the rate at which the engines can compute them without breaking the
//! time per output token; under [`Reading::Tokens`] so many may be outstanding. Then whoever is next goes when
//! there is room for its prompt, and nobody passes it meanwhile. Some of the room is kept for those who
//! may come: lower ranks use a part of it only; requests that can no longer make it, are beyond what is
//! usual or over their limits a quarter, and those beyond only while the engines have time to spare
//! ([`PrefillPace::spare`]). Who is held back by that is passed by others, but never when its rank's guaranteed
//! share is due. Under a number whoever wants may be read alone.
//!
//! A full queue refuses the lowest rank first, those over their limits before all and then those
//! beyond what is usual. An arrival
//! takes the place of a waiting request of a lower rank, as long as that rank holds more than
//! its guaranteed places; in its own rank that of a tenant which holds more places than its
//! own, so that one tenant's burst cannot hold them all. Who can no longer make it when it comes
//! takes no place from another rank, and none at all while such requests hold half of the queue:
//! what is late from the start, however much, keeps nobody out who could be served in time.
//!
//! Every operation costs O(log n) in the requests and tenants waiting, plus that for each
//! request it moves.

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

/// How a pool's queue behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Requests that may wait. 0: a request runs at once or is refused.
    pub max_waiting: usize,
    /// How far a tenant's tokens may be ahead of the least-served one's before it has to let
    /// the others go first.
    pub quantum: Tokens,
    /// What each rank is guaranteed.
    pub shares: Shares,
    /// How much of prompts engines have to read at one time.
    pub reading: Reading,
}

impl Default for Settings {
    /// 1000 requests, 65,536 tokens, the default shares, reading as it is found out.
    fn default() -> Self {
        Settings { max_waiting: 1000, quantum: Tokens(65_536), shares: Shares::default(), reading: Reading::Auto }
    }
}

/// Prompt tokens of requests without a first token that one engine may have; a longer prompt
/// counts as this many and has the engine to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reading {
    /// As many as come.
    NoLimit,
    /// So many.
    Tokens(Tokens),
    /// At the pace that [`Scheduler::set_pace`] was told last; before that as many as come.
    #[default]
    Auto,
}

/// The level of the bucket below which a share of the prompts has to wait: all of it is open to the
/// highest row, the upper part of it to the others.
fn threshold(pace: &PrefillPace, percent: u64) -> f64 {
    pace.burst - (pace.burst + pace.behind) * percent as f64 / 100.0
}

/// Prompt tokens that may go at once by a [`PrefillPace`]; below zero: that went in advance.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bucket {
    /// By [`PrefillPace::per_second`].
    level: f64,
    /// By [`PrefillPace::spare`]: whatever goes is taken from both.
    spare: f64,
}

impl Bucket {
    const EMPTY: Bucket = Bucket { level: 0.0, spare: 0.0 };
    const FULL: Bucket = Bucket { level: f64::INFINITY, spare: f64::INFINITY };

    /// With so many tokens more, as far as the pace has room for them.
    fn filled(self, tokens: f64, spare: f64, pace: &PrefillPace) -> Bucket {
        Bucket { level: (self.level + tokens).min(pace.burst), spare: (self.spare + spare).min(pace.burst) }
    }

    /// So many seconds later.
    fn after(self, seconds: f64, pace: &PrefillPace) -> Bucket {
        let gained = |rate: f64| if rate.is_finite() { rate * seconds } else { f64::INFINITY };
        self.filled(gained(pace.per_second), gained(pace.spare), pace)
    }
}

impl Reading {
    /// The part of one of so many gateways in front of the same engines.
    #[must_use]
    pub fn shared_among(self, gateways: NonZeroU32) -> Reading {
        match self {
            Reading::Tokens(each) => Reading::Tokens(Tokens((each.0 / u64::from(gateways.get())).max(1))),
            Reading::NoLimit | Reading::Auto => self,
        }
    }
}

/// How the requests of a class wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassQueue {
    /// From the moment a request has been read whole to the moment it is refused. Zero: it gets a
    /// free seat or none.
    pub max_wait: Duration,
    /// What becomes of a request that can no longer keep its promise.
    pub when_hopeless: WhenHopeless,
}

impl ClassQueue {
    /// How a class waits that says nothing else: for 30 seconds, or as long as its longest
    /// promise can still be kept.
    #[must_use]
    pub fn of_promise(longest: Option<Duration>) -> Self {
        ClassQueue { max_wait: longest.unwrap_or_default().max(LEAST_MAX_WAIT), ..ClassQueue::default() }
    }
}

/// The default of `max_wait` where no promise is longer.
const LEAST_MAX_WAIT: Duration = Duration::from_secs(30);

impl Default for ClassQueue {
    /// `{max_wait: 30s, when_hopeless: demote}`
    fn default() -> Self {
        ClassQueue { max_wait: LEAST_MAX_WAIT, when_hopeless: WhenHopeless::default() }
    }
}

/// The queue in front of one pool's seats.
#[derive(Debug)]
pub struct Scheduler {
    settings: Settings,
    seats: usize,
    /// Engines that read prompts.
    readers: usize,
    /// What [`Reading::Auto`] is at present.
    pace: Option<PrefillPace>,
    /// As it was at `filled`.
    bucket: Bucket,
    filled: Tick,
    /// Prompt tokens that count as being read.
    reading: u64,
    /// The latest moment heard of: time does not go back.
    now: Tick,
    /// Tickets given so far.
    tickets: u64,
    /// Admissions so far.
    turns: u64,
    /// In the order of going: ranks of requests within what their tenants usually ask for, ranks of
    /// those beyond that, ranks of those over their limits.
    rows: Vec<Row>,
    waiting: HashMap<Ticket, Waiting>,
    running: HashMap<Ticket, Seated>,
    /// When each waiting request has to be turned away.
    alarms: BTreeSet<(Tick, Ticket)>,
    /// The last call of those that will step behind after it.
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
    /// No later than that of the tenant's request before it with the same deadline.
    last_call: Option<Tick>,
    /// Whether it steps behind after its last call.
    steps: bool,
    alarm: (Tick, Why),
}

#[derive(Debug)]
struct Seated {
    tenant: TenantId,
    row: usize,
    line: Line,
    cost: u64,
    /// What its prompt counts for, until it has been read.
    reading: u64,
    /// What it took out of the bucket of the pace.
    taken: f64,
}

const RANKS: usize = Priority::ALL.len();

/// A second of prefill puts a request as far back as having come so many seconds later, and a second of
/// its deadline as so many. Beyond capacity shortest job first keeps more promises than the earliest
/// deadline, which serves everybody just too late (Moore, *Management Science* 15, 1968, for one machine):
/// 8.2 against 7.1 requests per second in one mix, 12.3 against 10.9 in another. Between 10 and 100 it
/// makes little difference; below capacity none.
const OF_PREFILL: f64 = 30.0;
const OF_DEADLINE: f64 = 0.1;

/// More than this no request counts for, so that sums stay far from their end.
const LARGEST: u64 = 1 << 40;

/// The part for requests beyond what their tenants usually ask for: enough to use engines that nobody
/// else needs, and little that others would find in their way.
const BEYOND_SHARE: u64 = 25;

/// The part of the reading that a row may use together with all others, in hundredths.
const fn reading_for(row: usize, line: Line) -> u64 {
    const OF_RANKS: [u64; RANKS] = [100, 100, 90, 80, 70];
    match line {
        Line::Hopeful if row < RANKS => OF_RANKS[row],
        Line::Hopeful if row < OVER_LIMIT => BEYOND_SHARE,
        Line::Hopeful | Line::Hopeless => 25,
    }
}

/// `is_usual`: it is within what its tenant usually asks for.
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

/// The first row of those over their limits; before them stand those beyond their usual share.
const OVER_LIMIT: usize = 2 * RANKS;

impl Scheduler {
    /// A queue with nobody in it, and no seats: see [`Scheduler::set_seats`].
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

    /// A request asks for a seat. Its ticket stands in the moves if it has one or gets none;
    /// otherwise it waits.
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

    /// A seat for a request that must not wait, as a retry from another pool. None is taken
    /// from those that wait.
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

    /// A request gives its seat back; `used` are the tokens that it cost in the end. A ticket
    /// without a seat changes nothing.
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

    /// The first token of a request came: its prompt has been read, and the engine can read
    /// another one. Counts once.
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

    /// A waiting request leaves by itself. False: it does not wait (any more). Should it have
    /// kept others from going, they go at the next event: somebody's prompt is being read.
    pub fn withdraw(&mut self, ticket: Ticket, at: Tick) -> bool {
        self.now = self.now.max(at);
        let left = self.leave(ticket, 0).is_some();
        self.end();
        left
    }

    /// Turns away those whose time is over; others may go now that they stood before.
    pub fn expire(&mut self, at: Tick) -> Moves {
        let mut moves = self.begin(at);
        self.fill_by_pace(&mut moves);
        self.end();
        moves
    }

    /// When [`Scheduler::expire`] has something to do next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        self.alarms.first().map(|(moment, _)| *moment)
    }

    /// When a request that waits will be turned away at the latest: by its `leave_by`, or as
    /// soon as it is hopeless where its class says so.
    #[must_use]
    pub fn alarm(&self, ticket: Ticket) -> Option<Tick> {
        self.waiting.get(&ticket).map(|waiting| waiting.alarm.0)
    }

    /// The pool has so many seats from now on. With fewer than are taken nobody is admitted
    /// until enough are given back.
    pub fn set_seats(&mut self, seats: usize, at: Tick) -> Moves {
        self.seats = seats;
        let mut moves = self.begin(at);
        self.fill(&mut moves);
        self.end();
        moves
    }

    /// So many engines read prompts from now on, which matters where [`Settings::reading`]
    /// limits it.
    pub fn set_readers(&mut self, readers: usize, at: Tick) -> Moves {
        self.readers = readers;
        let mut moves = self.begin(at);
        self.fill(&mut moves);
        self.end();
        moves
    }

    /// How fast prompts may go from now on, where [`Reading::Auto`] is set; none: no limit. The first
    /// pace finds a full bucket.
    pub fn set_pace(&mut self, pace: Option<PrefillPace>, at: Tick) -> Moves {
        let mut moves = self.begin(at);
        let before = if self.pace.is_none() { Bucket::FULL } else { self.bucket };
        self.bucket = pace.map_or(Bucket::EMPTY, |pace| before.filled(0.0, 0.0, &pace));
        self.pace = pace;
        self.fill_by_pace(&mut moves);
        self.end();
        moves
    }

    /// When the next request in turn will go by the pace of prompts alone, if that is all it waits for.
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
        // Above zero an engine may have more ahead of it, too.
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

    /// Other settings from now on. Whoever waits stays, even if more wait than may; whoever may
    /// go now that could not before goes at the next event, [`Scheduler::expire`] for one.
    pub fn set_settings(&mut self, settings: Settings) {
        if settings.quantum != self.settings.quantum {
            self.rows.iter_mut().for_each(|row| row.set_quantum(settings.quantum.0));
        }
        self.settings = settings;
    }

    /// Requests that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that wait in a rank, those over their limits apart.
    #[cfg(test)]
    fn waiting_in(&self, rank: Priority, standing: Standing) -> usize {
        match standing {
            Standing::WithinLimits => self.rows[rank as usize].len(),
            Standing::OverLimit => self.rows[OVER_LIMIT + rank as usize].len(),
        }
    }

    /// The row of a request that waits or runs; beyond all for one that does not.
    #[cfg(test)]
    fn row_of_ticket(&self, ticket: Ticket) -> usize {
        let runs = || self.running.get(&ticket).map_or(usize::MAX, |seated| seated.row);
        self.waiting.get(&ticket).map_or_else(runs, |waiting| waiting.row)
    }

    /// Seats taken.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Seats that the pool has.
    #[must_use]
    pub fn seats(&self) -> usize {
        self.seats
    }

    /// Engines that read prompts.
    #[must_use]
    pub fn readers(&self) -> usize {
        self.readers
    }

    /// Prompt tokens that one engine may have to read at one time; none: as many as come.
    #[must_use]
    pub fn reading_per_engine(&self) -> Option<Tokens> {
        self.reading_at(self.bucket)
    }

    /// The same with so much in the bucket of the pace.
    fn reading_at(&self, bucket: Bucket) -> Option<Tokens> {
        match self.settings.reading {
            Reading::NoLimit => None,
            Reading::Tokens(each) => Some(each),
            Reading::Auto => {
                self.pace.map(|pace| Tokens(if bucket.level > 0.0 { pace.most } else { pace.least }.max(1.0) as u64))
            }
        }
    }

    /// The pace of prompts, where there is one.
    fn paced(&self) -> Option<&PrefillPace> {
        self.pace.as_ref().filter(|_| self.settings.reading == Reading::Auto)
    }

    /// The bucket of the pace fills with time.
    fn refill_bucket(&mut self) {
        if let Some(pace) = self.pace {
            self.bucket = self.bucket.after(self.now.since(self.filled).as_secs_f64(), &pace);
        }
        self.filled = self.now;
    }

    /// Whether the pace lets go a request of this row, with so much in its bucket.
    fn keeps_pace(&self, row: usize, line: Line, bucket: Bucket) -> bool {
        let is_beyond = (RANKS..OVER_LIMIT).contains(&row);
        self.paced().is_none_or(|pace| {
            bucket.level > threshold(pace, reading_for(row, line)) && (!is_beyond || bucket.spare > 0.0)
        })
    }

    /// Seats that nobody holds.
    #[must_use]
    pub fn free_seats(&self) -> usize {
        self.seats.saturating_sub(self.running.len())
    }

    /// How long a request of this rank would wait, by those that wait now in its rank and
    /// before it and the rate at which seats were seen to come free. Later arrivals of higher
    /// ranks are not foreseen. None where there are no seats or no rate has been measured.
    #[must_use]
    pub fn expected_wait(&self, rank: Priority, at: Tick) -> Option<Duration> {
        if !self.is_full() {
            return Some(Duration::ZERO);
        }
        self.time_through(rank as usize, at.max(self.now))
    }

    /// The same for a request that has not asked yet, by its standing too.
    #[must_use]
    pub fn expected_wait_for(&self, ask: &Ask, at: Tick) -> Option<Duration> {
        if !self.is_full() {
            return Some(Duration::ZERO);
        }
        self.time_through(self.row_for(ask), at.max(self.now))
    }

    /// How long a request that waits will wait from now on, at the most: as if all others of
    /// its rank went before it.
    #[must_use]
    pub fn expected_wait_of(&self, ticket: Ticket, at: Tick) -> Option<Duration> {
        let row = self.waiting.get(&ticket)?.row;
        if self.seats == 0 {
            return None;
        }
        self.drain.time_for(self.before(row), at.max(self.now))
    }

    /// Requests that wait in a row and before it.
    fn before(&self, row: usize) -> usize {
        self.rows[..=row].iter().map(Row::len).sum()
    }

    fn time_through(&self, row: usize, at: Tick) -> Option<Duration> {
        if self.seats == 0 {
            return None;
        }
        self.drain.time_for(self.before(row) + 1, at)
    }

    /// What every operation does first: time passes.
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

    /// What every operation does last.
    fn end(&mut self) {
        self.drain.watch(self.seats > 0 && self.is_full(), self.now);
    }

    /// Whether a request of any kind would have to wait.
    fn is_full(&self) -> bool {
        !self.waiting.is_empty() || !self.has_room_for(1, self.bucket)
    }

    /// Whether a request that has just come does not wait: nobody else does, and nothing that is
    /// being read keeps it from its seat. (Its rank is owed nothing while nobody waits in it.)
    fn goes_at_once(&self, new: &Waiting) -> bool {
        self.waiting.is_empty() && self.has_room_for(new.prompt, self.bucket) && !self.leaves_reading(new, self.bucket)
    }

    /// Whether a seat is free, and an engine to read so long a prompt.
    fn has_room_for(&self, prompt: u64, bucket: Bucket) -> bool {
        let reads = self.reading_at(bucket).is_none_or(|each| {
            let most = each.0.saturating_mul(self.readers as u64);
            self.reading.saturating_add(counts_for(prompt, each)) <= most
        });
        self.free_seats() > 0 && reads
    }

    /// The row of a request that has not asked yet.
    fn row_for(&self, ask: &Ask) -> usize {
        row_of(ask, self.usual.would_take(&ask.tenant, ask.rank, cost_of(ask), self.now))
    }

    /// Where a request would stand in a row.
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

    /// What orders a request among those of its kind: its deadline, or, where the pace of prompts is
    /// known, mostly how much of it the prompt takes ([`OF_PREFILL`]).
    fn due(&self, ask: &Ask) -> Due {
        let due = ask.aim.due(ask.arrival);
        let (Some(pace), Due::By(deadline)) = (self.paced().filter(|pace| pace.per_second.is_finite()), due) else {
            return due;
        };
        let each = pace.per_second.max(1.0) / self.readers.max(1) as f64;
        let (within, prefill) = (deadline.since(ask.arrival).as_secs_f64(), ask.prompt.0 as f64 / each);
        Due::By(ask.arrival + Duration::from_secs_f64((OF_DEADLINE * within + OF_PREFILL * prefill).min(3600.0)))
    }

    /// The last call of the tenant's latest request with the same deadline. Without this one
    /// with a shorter prompt would overtake it as soon as it has to step behind.
    fn last_call_before(&self, row: usize, ask: &Ask, place: Place) -> Option<Tick> {
        let before = self.rows[row].last_due(&ask.tenant, place.due)?;
        self.waiting.get(&before)?.last_call
    }

    /// Why a request that finds no free seat may not wait either. Makes a place for it in a
    /// full queue if it can.
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

    /// Who has to go so that this tenant may wait in this row: somebody of the rows from `lower`
    /// on, or of its own.
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

    /// Takes a request out of the queue and all that remembers it there.
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

    /// Room has been made: how much the rate of draining is told.
    fn refill(&mut self, moves: &mut Moves) {
        let before = moves.admitted.len();
        self.fill(moves);
        let came = (moves.admitted.len() - before).max(usize::from(!self.is_full()));
        (0..came).for_each(|_| self.drain.freed(self.now));
    }

    /// Time has made room: whoever goes by the pace of prompts counts for the rate of draining as who takes
    /// a seat that came free.
    fn fill_by_pace(&mut self, moves: &mut Moves) {
        self.fill(moves);
        (0..moves.admitted.len()).for_each(|_| self.drain.freed(self.now));
    }

    /// Seats are taken as long as there are any and somebody waits; but not past one whose
    /// prompt no engine can read now.
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

    /// Whose turn it is, if it may go with so much in the bucket of the pace.
    fn next_to_go(&self, bucket: Bucket) -> Option<&Waiting> {
        let next = self.waiting.get(&self.rows[self.next_row(bucket)?].first()?.ticket)?;
        (self.has_room_for(next.prompt, bucket) && self.keeps_pace(next.row, next.line, bucket)).then_some(next)
    }

    /// Takes a prompt out of the bucket: not more than keeps one engine busy from full to empty, because
    /// the others go on meanwhile.
    fn take_from_bucket(&mut self, prompt: u64) -> f64 {
        let Some(pace) = self.paced().copied() else { return 0.0 };
        let taken = (prompt as f64).min((pace.burst + pace.behind) / self.readers.max(1) as f64);
        self.bucket.level -= taken;
        self.bucket.spare = (self.bucket.spare - taken).max(-pace.behind);
        taken
    }

    /// The row whose turn it is: of those that are due the one whose last turn is longest
    /// ago, else the highest.
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

    /// Whether nobody waits in these rows who can still make it.
    fn none_can_be_met_of(&self, rows: std::ops::Range<usize>) -> bool {
        self.rows[rows].iter().all(|row| row.len() == row.hopeless())
    }

    /// Whether a row's next request leaves what is being read to others.
    fn is_held_back(&self, row: usize, bucket: Bucket) -> bool {
        let first = self.rows[row].first().and_then(|place| self.waiting.get(&place.ticket));
        first.is_some_and(|first| self.leaves_reading(first, bucket))
    }

    /// Whether a request leaves what is being read to others of higher rows.
    fn leaves_reading(&self, next: &Waiting, bucket: Bucket) -> bool {
        if !self.keeps_pace(next.row, next.line, bucket) {
            return true;
        }
        let Some(each) = self.reading_at(bucket).filter(|_| self.reading > 0) else { return false };
        let all = each.0.saturating_mul(self.readers as u64);
        let most = all / 100 * reading_for(next.row, next.line);
        self.reading.saturating_add(counts_for(next.prompt, each)) > most
    }

    /// Whether a rank's entitlement covers its next request.
    fn is_due(&self, row: usize) -> bool {
        let first = self.rows[row].first().and_then(|place| self.waiting.get(&place.ticket));
        first.is_some_and(|first| self.rows[row].credit >= first.cost * 1000)
    }

    /// So many tokens go to this row: each rank that waits is entitled to its share of them.
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

/// What a prompt counts for while it is read, where an engine may have so much to read.
fn counts_for(prompt: u64, each: Tokens) -> u64 {
    prompt.min(each.0).max(1)
}

/// A level of a bucket that is beyond another one, as far as tokens can be told apart.
fn just_above(level: f64) -> f64 {
    level + 1e-6 * level.abs().max(1.0)
}

/// A bucket is looked at after so many seconds, however slowly it fills.
const LONGEST_LOOK: f64 = 3600.0;

const SECOND: Duration = Duration::from_secs(1);

//! Whether a request may run now: its tenant's limits, then a seat in the first pool of its
//! route that can take it.
//!
//! What it holds is [`AdmissionGuard`]: the reservation and the seat. It lives where the request lives,
//! first in the handler's future and then in the body of the answer, and goes with it: settled
//! where the answer's timeline is known, by the rules for a client that left where it is not.
//!
//! Which queue it waits in: of the first pool of the route that has an engine available. It
//! goes on to a further pool, forward only, while it waits (or at once) if the wait to be
//! expected is more than what is left of its time, and the further pool has a free seat, or a
//! wait that still makes it; where it could never begin (no engine, no place in the queue), any
//! queue that it need not leave unserved. One that was called, and found that no engine of its pool
//! can be connected to, goes on in the same way: no engine has had it yet. As every request begins
//! with the first pool again, traffic is back there as soon as its queue is short enough.
//!
//! A pool of which no engine is available keeps one seat: for the request that finds out
//! whether that is still so. The others wait for its result.

use std::borrow::Cow;
use std::time::Duration;

use super::charge::{self, ServiceSpeed, Unseen};
use super::early::EarlyHead;
use super::house::GatewayState;
use super::promise::{ClassPolicy, PoolHandle, SettingsSnapshot};
use crate::admit::Reservation;
use crate::admit::desk::{Offered, Seat, Turn};
use crate::admit::limit::settings::OverLimit;
use crate::admit::limit::{Exhausted, Output, Used, Wanted};
use crate::admit::queue::{Aim, Ask, Standing, TurnedAway, Why};
use crate::admit::shared::Denied;
use crate::clock::Clock;
use crate::inspect::Facts;
use crate::judge::{Case, Objective, Objectives, Progress, breaks_at};
use crate::observe::Timeline;
use crate::record::ActiveRequest;
use crate::refuse::Rejection;
use crate::route::{Prediction, Work};
use crate::units::{ClientState, Endpoint, PoolId, TenantId, Tick, Tokens};

/// How often a request that could go elsewhere looks whether it should.
const LOOK: Duration = Duration::from_millis(100);

/// Choices of a prompt that count as work, in queues and on engines: what OpenAI takes at most.
/// An engine refuses an absurd number, but by then it would have weighed on all others.
const MOST_CHOICES: u64 = 128;

/// What a request holds while it is in the house.
#[derive(Debug)]
pub struct AdmissionGuard {
    clock: Clock,
    /// In a box: it is large, and where no limits are named no request has one.
    metered: Option<Box<Metered>>,
    seat: Option<Seat>,
    prompt: Tokens,
    /// An engine has been sent it: a client that leaves from now on has used the prompt.
    dispatched: bool,
}

/// A reservation, and what its end is charged by beside the answer.
#[derive(Debug)]
struct Metered {
    reservation: Reservation,
    /// The path generates or reads tokens that count: not that of `tokenize` and the like.
    costs_tokens: bool,
    /// It asks for a stream of tokens.
    streams: bool,
    unseen: Unseen,
    /// Of the attempt that was dispatched last.
    pace: Option<ServiceSpeed>,
}

impl Metered {
    fn unseen(&self, at: Tick) -> Tokens {
        self.pace.as_ref().map_or(Tokens::ZERO, |pace| self.unseen.by(pace, at))
    }

    fn settle(self, used: Used, at: Tick) {
        self.reservation.settle(if self.costs_tokens { used } else { Used::default() }, at);
    }
}

impl AdmissionGuard {
    /// What a request holds that waits for its seat.
    #[must_use]
    pub fn new(allowed: ReservedTokens, prompt: Tokens, clock: Clock) -> Self {
        AdmissionGuard { clock, metered: allowed.metered, seat: None, prompt, dispatched: false }
    }

    /// It has its seat, if it needs one.
    pub fn sits(&mut self, seat: Option<Seat>) {
        self.seat = seat;
    }

    /// It goes out on a connection to an engine, whose share of work this is.
    pub fn dispatched(&mut self, work: Option<&Work>) {
        self.dispatched = true;
        let Some((metered, work)) = self.metered.as_deref_mut().zip(work) else { return };
        let is_new = metered.pace.is_none_or(|pace| pace.dispatched != work.dispatched());
        if is_new && metered.unseen.most > Tokens::ZERO {
            metered.pace = Some(ServiceSpeed::of(work.dispatched(), work.prediction(), || work.time_to_read()));
        }
    }

    /// The first token came: its prompt has been read.
    pub fn first_token(&mut self) {
        if let Some(seat) = &mut self.seat {
            seat.has_read();
        }
    }

    /// Goes on in another pool, in the place of the one where it is.
    pub fn takes(&mut self, spare: FreeSeat) {
        self.seat = spare.0;
    }

    /// The answer ended so: charges what was used, and gives the seat back. `never_sent`: its
    /// last attempt was still connecting.
    pub fn settle(mut self, timeline: &Timeline, case: &Case, refusal: Option<&Rejection>, never_sent: bool) {
        let metered = self.metered.take();
        let unseen = |at| metered.as_ref().map_or(Tokens::ZERO, |metered| metered.unseen(at));
        let used = charge::of_answer(timeline, case, refusal, self.prompt, unseen);
        let used = used.filter(|_| self.dispatched || !never_sent);
        if let Some((metered, used)) = metered.zip(used) {
            metered.settle(used, timeline.end);
        }
        if let Some(seat) = self.seat.take() {
            seat.settle(used.map_or(Tokens::ZERO, |used| used.input + used.output));
        }
    }

    /// The gateway ended it before any answer was relayed. A time limit is charged as a client
    /// that left; any other failure costs nothing.
    pub fn refused(mut self, refusal: &Rejection) {
        if !refusal.is_time_limit() {
            self.metered = None;
            self.seat = None;
        }
    }
}

/// What a request needs to go on in another pool: a seat there that nobody wants, nothing where
/// the pool has no limit.
#[derive(Debug)]
#[must_use = "dropped at once it is nobody's"]
pub struct FreeSeat(Option<Seat>);

impl FreeSeat {
    /// `None`: each seat of the pool is taken, or wanted.
    pub fn of(pool: &PoolHandle, ask: &Ask) -> Option<FreeSeat> {
        let Some(desk) = &pool.desk else { return Some(FreeSeat(None)) };
        desk.take_free_seat(ask).map(|seat| FreeSeat(Some(seat)))
    }
}

impl Drop for AdmissionGuard {
    /// The client left before an answer was relayed, or a time limit fired.
    fn drop(&mut self) {
        if !self.dispatched || std::thread::panicking() {
            return;
        }
        if let Some(metered) = self.metered.take() {
            let now = self.clock.now();
            // The head of a stream is held until its first token: none has come.
            let output = if metered.streams { Tokens::ZERO } else { metered.unseen(now) };
            metered.settle(Used { input: self.prompt, output }, now);
        }
        if let Some(seat) = self.seat.take() {
            seat.settle(self.prompt);
        }
    }
}

/// What is asked for, as far as admission decides on it.
pub struct AdmissionRequest<'a> {
    /// Who asks.
    pub tenant: &'a TenantId,
    /// The model's name as engines know it.
    pub model: Option<&'a str>,
    /// Its path.
    pub endpoint: Endpoint,
    /// What its body said.
    pub facts: &'a Facts,
    /// The prompt estimate.
    pub prompt: Tokens,
    /// Of these the tokens that no engine's cache should hold.
    pub uncached: Tokens,
    /// What its class promises.
    pub promise: &'a ClassPolicy,
    /// What is judged, its own targets included.
    pub objectives: &'a Objectives,
    /// The most output tokens that an overload level leaves it.
    pub cap: Option<Tokens>,
    /// When its head had been parsed.
    pub arrival: Tick,
    /// Where its objectives run from.
    pub start: Tick,
    /// When its last byte came.
    pub complete: Tick,
}

/// What has been set aside for a request by its tenant's limits.
pub struct ReservedTokens {
    metered: Option<Box<Metered>>,
    /// Whether it may only have what others leave.
    pub standing: Standing,
    /// When that was known: later than its last byte where a store had to be asked.
    pub at: Tick,
}

impl ReservedTokens {
    /// Where the settings name no limit.
    #[must_use]
    pub fn unmetered(at: Tick) -> Self {
        ReservedTokens { metered: None, standing: Standing::WithinLimits, at }
    }
}

/// What is reserved of limits: the prompt, and the cap that the request states or the output that
/// its class assumes, over all choices; no tokens where the path only counts them.
#[must_use]
pub fn wanted(facts: &Facts, endpoint: Endpoint, objectives: &Objectives, prompt: Tokens) -> Wanted {
    if !endpoint.costs_tokens() {
        return Wanted::A_REQUEST;
    }
    let choices = facts.choices();
    let output = match facts.caps.largest() {
        Some(cap) => Output::Stated(cap.times(choices)),
        None if endpoint.generates() => Output::Assumed(objectives.default_output().times(choices)),
        None => Output::Assumed(Tokens::ZERO),
    };
    Wanted { input: prompt, output }
}

/// Choices that count as work.
#[must_use]
pub fn plausible_choices(facts: &Facts) -> u64 {
    facts.n.clamp(1, MOST_CHOICES).saturating_mul(facts.prompts.max(1))
}

impl AdmissionRequest<'_> {
    /// The output that is expected of each choice: a stated cap counts as far as the class
    /// expects answers of that length, so that an absurd one does not weigh on others.
    fn output(&self) -> Tokens {
        if !self.endpoint.generates() {
            return Tokens::ZERO;
        }
        let expected = self.objectives.default_output();
        let expected = self.cap.map_or(expected, |cap| cap.min(expected));
        self.facts.caps.largest().map_or(expected, |cap| cap.min(expected))
    }

    /// The work that is expected. More choices of a prompt than anybody serves count as so many.
    fn work(&self) -> Tokens {
        self.prompt + self.output().times(plausible_choices(self.facts))
    }

    /// Whether it gets a stream of tokens.
    pub fn streams(&self) -> bool {
        self.facts.streams() && self.endpoint.dialect().generates()
    }

    /// What its place in the queue depends on.
    ///
    /// `usual` is the usual length of answers that are promised such a time to the end.
    pub fn ask(
        &self,
        standing: Standing,
        predicted: Option<Prediction>,
        usual: impl Fn(Duration) -> Option<u64>,
    ) -> Ask {
        let class = &self.promise.class;
        let limits = &class.timeouts;
        let head = if self.facts.streams() { limits.first_token } else { limits.response_head };
        let own_limits = self.arrival + head.min(limits.total);
        Ask {
            tenant: self.tenant.clone(),
            rank: class.priority,
            arrival: self.start,
            aim: self.aim(predicted.unwrap_or(Prediction { ttft: Duration::ZERO, tpot: Duration::ZERO }), usual),
            tokens: self.work(),
            prompt: self.uncached,
            leave_by: own_limits.min(self.complete + class.queue.max_wait),
            when_hopeless: class.queue.when_hopeless,
            standing,
        }
    }

    /// The promise that orders it: the class's own, or a later one that the request asks for;
    /// targets of its own never make it go earlier.
    fn aim(&self, predicted: Prediction, usual: impl Fn(Duration) -> Option<u64>) -> Aim {
        let class = &*self.promise.objectives;
        let objectives = if std::ptr::eq(class, self.objectives) {
            Cow::Borrowed(class)
        } else {
            let ttft = later(class.ttft, self.objectives.ttft);
            let tpot = later(class.tpot, self.objectives.tpot);
            Cow::Owned(Objectives { ttft, tpot, ..class.clone() })
        };
        if let Some(ttft) = objectives.ttft.filter(|_| self.streams()) {
            return Aim::FirstToken { within: ttft.threshold, lead: predicted.ttft };
        }
        let case = Case { stated_cap: self.facts.caps.largest(), ..Case::of(self.endpoint.dialect()) };
        let waiting = Progress::waiting(self.start, true, self.streams());
        match breaks_at(&waiting, &objectives, &case) {
            Some(moment) => {
                let usual = objectives.e2e.and_then(|e2e| usual(e2e.threshold)).unwrap_or(u64::MAX);
                let further = u32::try_from(self.output().0.saturating_sub(1).min(usual)).unwrap_or(u32::MAX);
                let service = predicted.ttft + predicted.tpot.saturating_mul(further);
                Aim::Whole { within: moment - self.start, service }
            }
            None => Aim::Whenever,
        }
    }
}

fn later(own: Option<Objective>, asked: Option<Objective>) -> Option<Objective> {
    let own = own?;
    Some(asked.filter(|asked| asked.threshold > own.threshold).unwrap_or(own))
}

impl GatewayState {
    /// Sets aside what the request wants, of all limits of its tenant together.
    ///
    /// # Errors
    /// A limit is used up and the tenant's settings say `reject`, or it can never hold so much;
    /// the store of the limits cannot be asked.
    pub(super) async fn reserve(
        &self,
        live: &SettingsSnapshot,
        wish: &AdmissionRequest<'_>,
        at: Tick,
    ) -> Result<ReservedTokens, Rejection> {
        let wanted = wanted(wish.facts, wish.endpoint, wish.objectives, wish.prompt);
        let reserved = self.reserve_of(live, wish.tenant, wish.model.unwrap_or_default(), &wanted, at).await?;
        let standing = if reserved.is_some() { Standing::WithinLimits } else { Standing::OverLimit };
        let metered = reserved.map(|reservation| {
            let choices = plausible_choices(wish.facts);
            let lowered = wish.cap.map_or(wanted.output.tokens(), |cap| cap.times(wish.facts.choices()));
            let most = if wish.endpoint.generates() { wanted.output.tokens() } else { Tokens::ZERO };
            Box::new(Metered {
                reservation,
                costs_tokens: wish.endpoint.costs_tokens(),
                streams: wish.streams(),
                unseen: Unseen { most: most.min(lowered), choices },
                pace: None,
            })
        });
        Ok(ReservedTokens { metered, standing, at: self.clock.now() })
    }

    /// Counts a request that the gateway answers itself: it costs no tokens.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub(super) async fn count_own(
        &self,
        live: &SettingsSnapshot,
        tenant: &TenantId,
        at: Tick,
    ) -> Result<(), Rejection> {
        if let Some(reservation) = self.reserve_of(live, tenant, "", &Wanted::A_REQUEST, at).await? {
            reservation.settle(Used::default(), at);
        }
        Ok(())
    }

    /// None: the limit is used up, and the tenant's settings say `demote`.
    async fn reserve_of(
        &self,
        live: &SettingsSnapshot,
        tenant: &TenantId,
        model: &str,
        wanted: &Wanted,
        at: Tick,
    ) -> Result<Option<Reservation>, Rejection> {
        match self.books.reserve(tenant, model, wanted, at).await {
            Ok(reservation) => Ok(Some(reservation)),
            Err(Denied::Unavailable) => Err(Rejection::LimitsStoreUnavailable),
            Err(Denied::Exhausted(Exhausted::ForEver { limit, scope, need, most })) => {
                Err(Rejection::RequestExceedsLimit { limit, scope, need, most })
            }
            Err(Denied::Exhausted(Exhausted::ForNow { .. })) if live.when_over_limit(tenant) == OverLimit::Demote => {
                Ok(None)
            }
            Err(Denied::Exhausted(Exhausted::ForNow { standing, retry_after })) => {
                Err(Rejection::RateLimitExceeded { standing, retry_after })
            }
        }
    }

    /// Waits for a seat in a pool of the route.
    ///
    /// # Errors
    /// The queue has no place, or none for so long; the gateway drains.
    pub(super) async fn seat(&self, walk: &PoolCursor<'_>, visit: &mut ActiveRequest) -> Result<Admitted, Rejection> {
        self.seat_from(walk, NextPool::Queue(walk.begins()), visit).await
    }

    /// Waits for a seat in a pool behind `from`, which has been given up. None where none of them
    /// has a place for it.
    pub(super) async fn seat_behind(
        &self,
        walk: &PoolCursor<'_>,
        from: usize,
        visit: &mut ActiveRequest,
    ) -> Option<Result<Admitted, Rejection>> {
        let place = walk.onward(from, None)?;
        Some(self.seat_from(walk, place, visit).await)
    }

    async fn seat_from(
        &self,
        walk: &PoolCursor<'_>,
        mut place: NextPool,
        visit: &mut ActiveRequest,
    ) -> Result<Admitted, Rejection> {
        let begins = place.pool();
        loop {
            let at = place.pool();
            if at != begins {
                visit.spills(&walk.pools[at]);
            }
            if let NextPool::Free(at, seat) = place {
                return Ok(Admitted { seat, first: at, since: Some(walk.now()) });
            }
            let went_on = (at != begins).then(|| walk.now());
            let Some(desk) = &walk.pool(at).desk else {
                return Ok(Admitted { seat: None, first: at, since: went_on });
            };
            let ended = match desk.offer(walk.ask) {
                Offered::Seated(seat) => {
                    return Ok(Admitted { seat: Some(seat), first: at, since: went_on });
                }
                Offered::Away(away) if away.why == Why::Hopeless => WaitEnd::Away(away),
                Offered::Away(away) => walk.onward(at, None).map_or(WaitEnd::Away(away), WaitEnd::Onward),
                Offered::Waits(turn) => {
                    visit.waits(&walk.pools[at]);
                    match walk.wait(at, turn, visit).await {
                        // Called into a pool that has gone meanwhile: further ones may be there.
                        Ok(seat) if walk.available(at) == 0 => match walk.onward(at, None) {
                            Some(place) => {
                                drop(seat);
                                WaitEnd::Onward(place)
                            }
                            None => {
                                visit.called();
                                return Ok(Admitted { seat: Some(seat), first: at, since: Some(walk.now()) });
                            }
                        },
                        Ok(seat) => {
                            visit.called();
                            return Ok(Admitted { seat: Some(seat), first: at, since: Some(walk.now()) });
                        }
                        Err(WaitEnd::Away(away)) if away.why == Why::PushedOut => {
                            walk.onward(at, None).map_or(WaitEnd::Away(away), WaitEnd::Onward)
                        }
                        Err(ended) => ended,
                    }
                }
            };
            place = match ended {
                WaitEnd::Onward(place) => place,
                WaitEnd::Drained => return Err(Rejection::Draining),
                WaitEnd::Away(away) => return Err(refusal(&away, &walk.pools[at])),
            };
        }
    }
}

/// A request that has got its seat, or needs none.
pub struct Admitted {
    /// None where the pool has no limit.
    pub seat: Option<Seat>,
    /// Which pool of the route.
    pub first: usize,
    /// When it got it; none where that was at once.
    pub since: Option<Tick>,
}

/// A request on its way along the pools of its route.
pub struct PoolCursor<'a> {
    /// The house, which knows the engines.
    pub house: &'a GatewayState,
    /// The class's promise, which knows the pools.
    pub promise: &'a ClassPolicy,
    /// The pools of the route.
    pub pools: &'a [PoolId],
    /// What it asks of a queue.
    pub ask: &'a Ask,
    /// The client's side.
    pub client: &'a ClientState,
    /// The head that its client gets while it waits here, where it gets one.
    pub early: Option<EarlyHead<'a>>,
}

/// Where a request goes on to.
enum NextPool {
    /// A pool without a limit, or with a free seat, which it has now.
    Free(usize, Option<Seat>),
    /// A pool whose queue is short enough.
    Queue(usize),
}

impl NextPool {
    const fn pool(&self) -> usize {
        match self {
            NextPool::Free(at, _) | NextPool::Queue(at) => *at,
        }
    }
}

/// Why a request no longer waits where it did.
enum WaitEnd {
    Away(TurnedAway),
    Onward(NextPool),
    Drained,
}

impl PoolCursor<'_> {
    fn pool(&self, at: usize) -> &PoolHandle {
        self.promise.pool(&self.pools[at])
    }

    fn now(&self) -> Tick {
        self.house.clock.now()
    }

    fn available(&self, at: usize) -> usize {
        self.house.engines_of(&self.pools[at], self.pool(at).desk.as_deref())
    }

    /// The first pool that has an engine available; the first of all where none has.
    fn begins(&self) -> usize {
        (0..self.pools.len()).find(|at| self.available(*at) > 0).unwrap_or(0)
    }

    /// Whether its client has a head already.
    pub fn has_head(&self) -> bool {
        self.early.as_ref().is_some_and(|early| early.outlet.is_out())
    }

    /// Waits in the queue of one pool, and looks whether it should go on to a further one.
    async fn wait(&self, at: usize, mut turn: Turn, visit: &mut ActiveRequest) -> Result<Seat, WaitEnd> {
        let since = self.now();
        loop {
            let look = (at + 1 < self.pools.len()).then(|| self.now());
            if let Some(place) = look.and_then(|now| self.should_go_on(at, &turn, since, now)) {
                return Err(WaitEnd::Onward(place));
            }
            let head = self.early.as_ref().and_then(|early| Some((early, early.due()?)));
            tokio::select! {
                biased;
                // First: the limit also cuts those that sit, and nobody may begin in their seats.
                () = self.client.drain_over() => return Err(WaitEnd::Drained),
                called = turn.come() => return called.map_err(WaitEnd::Away),
                () = self.house.clock.sleep_until(head.map(|(_, due)| due)) => {
                    head.into_iter().for_each(|(early, _)| early.go(visit));
                }
                () = self.house.clock.sleep_until(look.map(|now| now + LOOK)) => {}
            }
        }
    }

    /// Whether the wait to be expected is more than what is left, and where it would be less.
    /// Where no rate is known, as long again as it has waited is expected; for ever where no
    /// engine is available.
    fn should_go_on(&self, at: usize, turn: &Turn, since: Tick, now: Tick) -> Option<NextPool> {
        if self.available(at) == 0 {
            return self.onward(at, None);
        }
        let expected = turn.expected_wait().unwrap_or(now - since);
        if expected > self.left(now) { self.onward(at, Some(expected)) } else { None }
    }

    /// What is left of its time: to its last call, to its last moment where it has none.
    fn left(&self, now: Tick) -> Duration {
        self.ask.aim.last_call(self.ask.arrival).map_or(self.ask.leave_by, |last| last.min(self.ask.leave_by)) - now
    }

    /// The next pool of the route that has a place for it. Where `expected` is for ever (none),
    /// any queue will do in which it is not known that it has to leave before it is called, but
    /// one that keeps its promise goes first.
    fn onward(&self, from: usize, expected: Option<Duration>) -> Option<NextPool> {
        let now = self.now();
        let mut at_least = None;
        let place = (from + 1..self.pools.len()).find_map(|at| {
            if self.available(at) == 0 {
                return None;
            }
            let Some(desk) = &self.pool(at).desk else { return Some(NextPool::Free(at, None)) };
            if let Some(seat) = desk.take_free_seat(self.ask) {
                return Some(NextPool::Free(at, Some(seat)));
            }
            let wait = desk.expected_wait_of(self.ask);
            let is_better = |wait| wait <= self.left(now) && expected.is_none_or(|expected| wait < expected);
            if wait.is_some_and(is_better) {
                return Some(NextPool::Queue(at));
            }
            if expected.is_none() && wait.is_none_or(|wait| wait <= self.ask.leave_by - now) {
                at_least.get_or_insert(at);
            }
            None
        });
        place.or(at_least.map(NextPool::Queue))
    }
}

fn refusal(away: &TurnedAway, pool: &PoolId) -> Rejection {
    let (pool, retry_after) = (pool.clone(), away.retry_after.map(|wait| wait.as_secs()));
    match away.why {
        Why::QueueFull => Rejection::QueueFull { pool, retry_after },
        Why::PushedOut => Rejection::PushedOut { pool, retry_after },
        Why::WaitedTooLong => Rejection::QueueTimeout { pool, retry_after },
        Why::Hopeless => Rejection::Hopeless { pool, retry_after },
    }
}

//! What is known of one engine.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;

use super::affinity;
use super::breaker::{Answered, Breaker, TenantKey};
use super::card::ModelCard;
use super::fleet::Size;
use super::health::{Change, Checked, Health};
use super::latency::{Latency, Situation, StepTime};
use super::prefix::PrefixIndex;
use super::retry::{Attempts, Effect};
use super::seats::{self, CacheLimit};
use super::settings::{BreakerLimits, Concurrency, EngineAddress, SeatBounds};
use super::signals::Signals;
use super::tournament::Rank;
use super::view::EngineState;
use crate::locks::Mutex;
use crate::units::{EngineId, Tick, Tokens};

/// What an engine's own metrics say; `None` where it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Requests that wait in the engine's queue.
    pub waiting: Option<f64>,
    /// Requests in its batch.
    pub running: Option<f64>,
    /// Share of its KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// A vLLM that was put to sleep.
    pub asleep: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SwitchedOff {
    No,
    Refused,
    Coded,
}

#[derive(Debug)]
pub(super) struct Engine {
    pub id: EngineId,
    pub address: Arc<EngineAddress>,
    /// The address as `Host` says it.
    pub host: Option<HeaderValue>,
    pub breaker: Breaker,
    pub cool_until: Tick,
    pub requests: u32,
    pub last_turn: u64,
    pub left: Option<Tick>,
    pub models: Arc<[Arc<str>]>,
    /// What it says of them beside their names.
    pub cards: Arc<[(Arc<str>, ModelCard)]>,
    /// It has been asked for them, whatever it said.
    pub asked_for_models: bool,
    /// When its key is to be computed again, as far as it is already planned.
    pub planned: Option<Tick>,
    /// Seats of its pool that are its own, as its key has it.
    pub given: Given,
    limit: Limit,
    /// What stands for its name where keys are given homes.
    pub name_key: u64,
    /// Seats under `auto`: as many as its steps allow at the pace of the pool.
    auto: u32,
    /// Something that its limit or its load depends on is another than when its key was made.
    has_changed: bool,
    /// Seats that its cache was seen to hold.
    cache: CacheLimit,
    /// What it has run since it came.
    pub counters: Counters,
    /// See [`Engine::compares`].
    pub slowness: f64,
    /// Its last answer that was as what was learned says.
    pub confirmed_at: Tick,
    /// Prompt tokens in its steps, lately.
    pub prompt_per_step: f64,
    /// The beginnings of prompts that its cache should hold.
    pub prefixes: PrefixIndex,
    /// What its answers taught.
    pub latency: Arc<Mutex<Latency>>,
    /// What is heard of it between checks.
    pub signals: Arc<Signals>,
    health: Health,
    outstanding: Size,
    /// Prompt tokens that it has still to compute, by the speed at which it was seen to.
    backlog: Backlog,
    busy: Busy,
    report: Option<Reported>,
    answered: Answered,
    /// It came (back) at this moment and is still warming up.
    warms_since: Option<Tick>,
    injections_off: SwitchedOff,
    injection_accepted: Option<Tick>,
    /// Parts of the load that change by time or report only, from the last full look.
    others: f64,
    factor: f64,
}

/// How many requests it should work on at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limit {
    /// Of ours.
    ours: u32,
    /// In the books of its pool, which are divided by the number of gateways as a whole.
    whole: u32,
    /// Of ours, those that other gateways were not using when the engine was last asked.
    lent: u32,
}

/// What an engine adds to the seats of its pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Given {
    /// To be divided among the gateways.
    pub whole: u32,
    /// Beside that, this gateway's alone.
    pub lent: u32,
}

impl Limit {
    const NONE: Limit = Limit { ours: u32::MAX, whole: 0, lent: 0 };
}

/// What an engine has run: read twice, they say what it ran in between.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    /// Requests of ours that have their first token.
    decoding: u32,
    /// Sequences of others.
    foreign: f64,
    /// Running sequences, integrated over time: sequence-seconds.
    sequences: f64,
    /// Prompt tokens whose first token has come, as estimated.
    prompts: f64,
    /// Up to this moment.
    until: Tick,
}

/// The prompt tokens that an engine has still to compute. What is outstanding says too much, because
/// a prompt counts there until its first token comes; so it is taken to shrink with time as well.
#[derive(Clone, Copy, Debug, Default)]
struct Backlog {
    tokens: f64,
    /// Tokens per second; 0 where nothing was learned.
    speed: f64,
    at: Tick,
}

impl Backlog {
    fn pass(&mut self, at: Tick) {
        self.tokens = (self.tokens - self.speed * at.since(self.at).as_secs_f64()).max(0.0);
        self.at = self.at.max(at);
    }

    fn add(&mut self, prompt: Tokens, at: Tick) {
        self.pass(at);
        self.tokens += prompt.0 as f64;
    }
}

/// How fast an engine computed prompts while it had any: at least that is its speed, because it may have
/// had too few to fill its steps.
#[derive(Clone, Copy, Debug, Default)]
struct Busy {
    /// Since when it has been known to have prompts.
    since: Option<Tick>,
    /// Lately, in seconds.
    seconds: f64,
    /// Prompt tokens whose first token came in these seconds, as estimated.
    tokens: f64,
}

impl Busy {
    /// The first token of a prompt came.
    fn first_token(&mut self, prompt: Tokens, at: Tick) {
        let Some(since) = self.since else { return };
        let seconds = at.since(since).as_secs_f64();
        let kept = (-seconds / BUSY_MEMORY).exp();
        self.seconds = kept * self.seconds + seconds;
        self.tokens = kept * self.tokens + prompt.0 as f64;
        self.since = Some(at);
    }

    /// Tokens per second; none while too little was seen.
    fn speed(&self) -> Option<f64> {
        (self.seconds >= ENOUGH_BUSY).then(|| self.tokens / self.seconds)
    }
}

/// A reading of [`Counters`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reading {
    pub sequences: f64,
    pub prompts: f64,
}

impl Counters {
    /// Sequences that run now.
    pub fn running(&self) -> f64 {
        f64::from(self.decoding) + self.foreign
    }

    /// The counters at this moment.
    pub fn read(&mut self, at: Tick) -> Reading {
        self.sequences += self.running() * at.since(self.until).as_secs_f64();
        self.until = self.until.max(at);
        Reading { sequences: self.sequences, prompts: self.prompts }
    }

    /// The first token of a prompt came.
    pub fn first_token(&mut self, prompt: Tokens, at: Tick) -> Reading {
        self.read(at);
        self.decoding += 1;
        self.prompts += prompt.0 as f64;
        Reading { sequences: self.sequences, prompts: self.prompts }
    }

    /// A request that had its first token ended.
    pub fn ended(&mut self) {
        self.decoding = self.decoding.saturating_sub(1);
    }
}

#[derive(Clone, Copy, Debug)]
struct Reported {
    report: Report,
    /// Not believed from here on.
    until: Tick,
    /// Our own requests that it had then.
    ours: f64,
}

/// Seconds of having prompts after which what was seen of them counts a third.
const BUSY_MEMORY: f64 = 20.0;
/// Fewer seconds say nothing of an engine's speed.
const ENOUGH_BUSY: f64 = 2.0;
/// A returning engine takes its full share after this long.
const WARM_UP: Duration = Duration::from_secs(10);
/// It is looked at again in steps of this.
const WARM_STEP: Duration = Duration::from_secs(1);
/// At first it takes this share.
const COLD_SHARE: f64 = 0.1;
/// Of the seats that other gateways do not use, one in so many is lent: all of them, and a burst at every
/// gateway would find the same seats free.
const LENT_PART: u32 = 2;
/// What a request weighs beside its prompt, in prompt tokens: its share of each step.
const PER_REQUEST: f64 = 8.0;
/// What a token of a request's own prompt weighs, beside one ahead of it: it delays the request itself and about
/// one more. Between 1 and 3 more of prompts is found in caches (0.31 to 0.32 in an office at load 0.8), and no
/// fewer promises are kept.
const OF_OWN_PROMPT: f64 = 2.0;
/// Loads are whole numbers, and this fine.
const LOAD_UNIT: f64 = 16.0;
/// KV usage from which an engine counts as under pressure: from here on it begins to preempt.
const KV_PRESSURE: f64 = 0.8;

impl Engine {
    pub fn new(address: EngineAddress, warms_since: Option<Tick>) -> Self {
        let id = address.id();
        Engine {
            name_key: affinity::key_of(id.as_str().as_bytes()),
            id,
            host: HeaderValue::from_str(&address.authority()).ok(),
            address: Arc::new(address),
            breaker: Breaker::default(),
            cool_until: Tick::ZERO,
            requests: 0,
            last_turn: 0,
            left: None,
            models: Arc::from([]),
            cards: Arc::from([]),
            asked_for_models: false,
            planned: None,
            given: Given::default(),
            limit: Limit::NONE,
            auto: seats::AT_FIRST,
            has_changed: false,
            cache: CacheLimit::default(),
            counters: Counters::default(),
            slowness: 1.0,
            confirmed_at: Tick::ZERO,
            prompt_per_step: 0.0,
            prefixes: PrefixIndex::new(),
            latency: Arc::default(),
            signals: Arc::default(),
            health: Health::default(),
            outstanding: Size::default(),
            backlog: Backlog::default(),
            busy: Busy::default(),
            report: None,
            answered: Answered::default(),
            warms_since,
            injections_off: SwitchedOff::No,
            injection_accepted: None,
            others: 0.0,
            factor: 1.0,
        }
    }

    /// The settings or DNS name it (again).
    pub fn rejoin(&mut self, address: EngineAddress, at: Tick) {
        if *self.address != address {
            self.host = HeaderValue::from_str(&address.authority()).ok();
            self.address = Arc::new(address);
        }
        if self.left.take().is_some() {
            self.start_anew(at);
        }
    }

    /// Nothing learned about what it accepts holds for whatever was started in its place.
    fn start_anew(&mut self, at: Tick) {
        self.health = Health::Unknown;
        self.warms_since = Some(at);
        self.injections_off = SwitchedOff::No;
        self.injection_accepted = None;
        self.report = None;
        self.breaker.may_try_now();
        self.cache = CacheLimit::default();
        self.busy = Busy::default();
        self.prefixes.clear();
        self.latency.lock().doubt();
    }

    pub fn begin(&mut self, size: Size, at: Tick) -> bool {
        self.requests += 1;
        self.backlog.add(size.prefill, at);
        self.busy.since = self.busy.since.or(Some(at));
        self.outstanding.prefill = self.outstanding.prefill + size.prefill;
        self.outstanding.decode = self.outstanding.decode + size.decode;
        self.breaker.begin()
    }

    /// The first token of a prompt came.
    pub fn first_token(&mut self, prompt: Tokens, at: Tick) -> Reading {
        self.busy.first_token(prompt, at);
        self.lighten(Size { prefill: prompt, decode: Tokens::ZERO });
        self.counters.first_token(prompt, at)
    }

    pub fn lighten(&mut self, size: Size) {
        self.outstanding.prefill = self.outstanding.prefill.less(size.prefill);
        self.backlog.tokens = self.backlog.tokens.min(self.outstanding.prefill.0 as f64);
        self.outstanding.decode = self.outstanding.decode.less(size.decode);
        if self.outstanding.prefill == Tokens::ZERO {
            self.busy.since = None;
        }
    }

    /// What a request would come into.
    pub fn situation(&mut self, size: Size, at: Tick) -> Situation {
        self.backlog.pass(at);
        let prefill = Tokens(self.backlog.tokens as u64);
        Situation { prompt: size.prefill, prefill, decode: self.outstanding.decode, batch: self.requests + 1 }
    }

    /// Of our requests it should have so many at one time at most; `None`: there is no limit.
    pub fn limit(&self) -> Option<u32> {
        (self.limit != Limit::NONE).then_some(self.limit.ours)
    }

    /// Outstanding tokens of our own dispatches.
    pub fn work(&self) -> Tokens {
        self.outstanding.prefill + self.outstanding.decode
    }

    pub fn rank(&mut self, at: Tick) -> Rank {
        // An open breaker whose time is over becomes ready by this look.
        let breaker_lets = self.breaker.may_take(at);
        if breaker_lets { self.rank_past_breaker(at) } else { Rank::Out }
    }

    /// Its rank, whatever its breaker says.
    pub fn rank_past_breaker(&self, at: Tick) -> Rank {
        match self.left.is_none() && self.health.is_up() && !self.is_asleep(at) {
            false => Rank::Out,
            true if self.cool_until > at => Rank::Cooling,
            true => self.rank_if_able(),
        }
    }

    /// Its rank, if nothing but its limit can keep it from requests.
    pub const fn rank_if_able(&self) -> Rank {
        if self.requests >= self.limit.ours { Rank::Full } else { Rank::Free }
    }

    /// Computes its limit anew. While it warms up it takes a share of it, one at least.
    pub fn follow_limit(&mut self, concurrency: Concurrency, bounds: SeatBounds, gateways: NonZeroU32, at: Tick) {
        self.limit = match concurrency {
            Concurrency::Unlimited => Limit::NONE,
            Concurrency::Fixed(most) => {
                let whole = ((f64::from(most.get()) * self.share(at)) as u32).max(1);
                let share = whole.div_ceil(gateways.get());
                let lent = self.unused_by_others(whole - share, at) / LENT_PART;
                Limit { ours: share + lent, whole, lent }
            }
            Concurrency::Auto => {
                let cache = self.cache.seats().unwrap_or(u32::MAX);
                let warm = f64::from(self.auto) * self.share(at);
                let most = (warm as u32).min(cache).clamp(bounds.min.get(), bounds.max.get());
                // What others have in the batch is in its steps, too.
                let ours = most.saturating_sub(self.counters.foreign as u32).max(bounds.min.get());
                Limit { ours, whole: ours, lent: 0 }
            }
        };
    }

    /// Of so many seats of other gateways, those that nobody used by a report that is not old.
    fn unused_by_others(&self, theirs: u32, at: Tick) -> u32 {
        self.fresh_report(at).map_or(0, |_| theirs.saturating_sub(self.counters.foreign.ceil() as u32))
    }

    /// What its learned step time says at the pace that its pool must keep: its seats under `auto`
    /// follow. Without a pace it has as many as there are.
    ///
    /// Second is the speed at which its prompts were seen to be computed, in tokens per second. An engine
    /// of which little was learned is taken to be as all engines of its pool together (`common`).
    pub fn keep_pace(
        &mut self,
        pace: Option<f64>,
        learned: &Latency,
        common: &Latency,
        at: Tick,
    ) -> Option<(StepTime, f64)> {
        // Requests that end without an answer are not counted out at their moment.
        self.counters.read(at);
        let step = learned.step_time().or_else(|| common.step_time());
        let speed = learned.prefill_speed().or_else(|| common.prefill_speed());
        (self.confirmed_at, self.prompt_per_step) = (learned.confirmed_at(), learned.prompt_per_step());
        // The slope of first tokens over what is ahead says little where little ever is.
        let speed = speed.map(|speed| self.busy.speed().map_or(speed, |seen| speed.max(seen)));
        self.backlog.speed = speed.unwrap_or(0.0);
        let auto = match (step, pace) {
            (Some(step), Some(pace)) => seats::seats(&step, pace),
            (None, Some(_)) => seats::AT_FIRST,
            (_, None) => seats::CEILING,
        };
        self.has_changed |= auto != std::mem::replace(&mut self.auto, auto);
        step.map(|step| (step, speed.unwrap_or(1.0 / step.per_prompt_token.max(1e-7))))
    }

    /// How slow it is among the engines of its pool; 1 is as the others.
    pub fn compares(&mut self, slowness: f64) {
        self.has_changed |= slowness.to_bits() != std::mem::replace(&mut self.slowness, slowness).to_bits();
    }

    /// Whether its limit or its load are others than its key says.
    pub fn needs_a_key(&self) -> bool {
        self.has_changed || self.warms_since.is_some()
    }

    /// Its limit and its load are looked at for its key.
    pub fn key_is_made(&mut self) {
        self.has_changed = false;
    }

    /// The seats that it gives its pool at this rank.
    pub const fn gives(&self, rank: Rank) -> Given {
        match rank {
            Rank::Free | Rank::Full => Given { whole: self.limit.whole, lent: self.limit.lent },
            Rank::Cooling | Rank::Out => Given { whole: 0, lent: 0 },
        }
    }

    /// Whether nothing but its breaker keeps it from requests.
    pub fn waits_for_its_breaker(&self, at: Tick) -> bool {
        self.breaker.is_open() && self.rank_past_breaker(at) != Rank::Out
    }

    /// The seats that it would give its pool if its breaker were closed.
    pub fn gives_past_breaker(&self, at: Tick) -> u32 {
        if self.waits_for_its_breaker(at) { self.limit.whole } else { 0 }
    }

    /// How loaded it would be with one request more: the prompt tokens that are ahead of it, plus a
    /// little for each request, of others too (its waiting and running requests at the last report
    /// less ours then; those that wait there have their prompts still ahead of them); more where its KV
    /// cache is nearly full, where it is slower than the others, and while it warms up. An old report is
    /// as none.
    ///
    /// Prompt tokens count and output tokens hardly do, because a first token waits for the former alone:
    /// all sequences of a batch gain a token in the same step.
    pub fn load(&mut self, typical: f64, at: Tick) -> u64 {
        let report = self.fresh_report(at).unwrap_or_default();
        let waiting = report.waiting.unwrap_or(0.0);
        let ours = self.report.map_or(0.0, |reported| reported.ours);
        let foreign = (waiting + report.running.unwrap_or(0.0) - ours).max(0.0);
        let pressure = ((report.kv_usage.unwrap_or(0.0) - KV_PRESSURE) / (1.0 - KV_PRESSURE)).clamp(0.0, 1.0);
        let queued = waiting.min(foreign);
        self.counters.read(at);
        // Its limit follows with the next key.
        self.has_changed |= foreign - queued != self.counters.foreign;
        self.counters.foreign = foreign - queued;
        self.others = PER_REQUEST * foreign + typical * queued;
        self.factor = (1.0 + pressure) / self.share(at);
        self.load_again()
    }

    /// The same if a request of so many prompt tokens that have to be computed came to it. They count more
    /// than those ahead of it, because whoever comes next waits for them as well ([`OF_OWN_PROMPT`]).
    pub fn load_with(&self, prompt: Tokens) -> u64 {
        let added = OF_OWN_PROMPT * prompt.0 as f64 * self.factor * self.slowness * LOAD_UNIT;
        self.load_again().saturating_add(added as u64)
    }

    /// Tokens of a prompt that it should find in its cache; the last token is always computed.
    pub fn cached(&self, prompt: Tokens, blocks: &[u64]) -> Tokens {
        let held = self.prefixes.held(blocks);
        if held == 0 {
            return Tokens::ZERO;
        }
        let expected = self.prefixes.tokens(held).0 as f64 * self.prefixes.credit();
        Tokens(expected as u64).min(prompt.less(Tokens(1)))
    }

    /// Whether it has fewer requests than this bound lets an engine have that is warm and has
    /// room; one at least.
    pub fn is_below(&self, bound: f64) -> bool {
        f64::from(self.requests) < (bound / self.factor).max(1.0)
    }

    /// The same, with the engine's report and warmth as they were at the last full look.
    pub fn load_again(&self) -> u64 {
        let tokens = self.outstanding.prefill.0 as f64 + PER_REQUEST * f64::from(self.requests + 1) + self.others;
        (tokens * self.factor * self.slowness * LOAD_UNIT) as u64
    }

    /// The share of traffic it takes: below 1 while it warms up.
    fn share(&mut self, at: Tick) -> f64 {
        match self.warms_since {
            None => 1.0,
            Some(since) if at - since >= WARM_UP => {
                self.warms_since = None;
                1.0
            }
            Some(since) => COLD_SHARE + (1.0 - COLD_SHARE) * (at - since).as_secs_f64() / WARM_UP.as_secs_f64(),
        }
    }

    /// When its key changes by time alone.
    pub fn next_wake(&self, at: Tick) -> Option<Tick> {
        let steps = |since: Tick| (at - since).as_secs() as u32 + 1;
        let warmer = self.warms_since.map(|since| since + WARM_STEP * steps(since));
        let cooled = (self.cool_until > at).then_some(self.cool_until);
        [warmer, cooled, self.breaker.opens_until()].into_iter().flatten().min()
    }

    pub fn fresh_report(&self, at: Tick) -> Option<Report> {
        self.report.filter(|reported| reported.until > at).map(|reported| reported.report)
    }

    fn is_asleep(&self, at: Tick) -> bool {
        self.fresh_report(at).is_some_and(|report| report.asleep)
    }

    pub fn reported(&mut self, report: Report, until: Tick) {
        let (usage, running) = (report.kv_usage.unwrap_or(0.0), report.running.unwrap_or(0.0));
        self.cache.reported(usage, running, report.waiting.unwrap_or(0.0));
        self.report = Some(Reported { report, until, ours: f64::from(self.requests) });
    }

    pub fn checked(&mut self, checked: Checked, at: Tick) -> Option<Change> {
        let alive = self.answered.last().max(self.signals.last_alive());
        let change = self.health.note(checked, alive, at);
        // One that only kept silent, and serves again, is the same one.
        if change == Some(Change::CameUp) && checked == Checked::Well {
            self.start_anew(at);
            self.health = Health::Up;
        }
        change
    }

    /// What an attempt of this tenant did to it. True where its place among the others may have
    /// changed.
    pub fn feel(&mut self, effect: &Effect, limits: Option<&BreakerLimits>, tenant: TenantKey, at: Tick) -> bool {
        match effect {
            Effect::Fault(_) => {
                if let Some(limits) = limits {
                    self.breaker.fault(limits, tenant, &self.answered, at);
                }
                true
            }
            Effect::FaultElsewhere(..) => false,
            Effect::Cool(_, length) => {
                self.cool_until = self.cool_until.max(at + *length);
                true
            }
            Effect::Well(_) => {
                self.answered.note(tenant, at);
                self.breaker.well()
            }
            Effect::InjectionAccepted(_) => {
                self.injection_accepted = Some(at);
                false
            }
            Effect::InjectionSwitchedOff(_) => {
                self.injections_off = SwitchedOff::Refused;
                false
            }
        }
    }

    pub fn answers_coded(&mut self) {
        if self.injections_off == SwitchedOff::No {
            self.injections_off = SwitchedOff::Coded;
        }
    }

    pub fn may_inject(&self) -> bool {
        self.injections_off == SwitchedOff::No
    }

    pub fn injection_refused(&self) -> bool {
        self.injections_off == SwitchedOff::Refused
    }

    pub fn injection_proven(&self, at: Tick) -> bool {
        self.injection_accepted.is_some_and(|accepted| at - accepted < Attempts::PROOF)
    }

    pub fn state(&self, at: Tick) -> EngineState {
        match () {
            () if !self.health.is_up() => EngineState::Down,
            () if self.is_asleep(at) => EngineState::Asleep,
            () if self.breaker.is_open() => EngineState::BreakerOpen,
            () if self.cool_until > at => EngineState::Cooling,
            () => EngineState::Up,
        }
    }
}

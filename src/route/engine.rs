//! State of one engine.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;

use super::affinity;
use super::breaker::{Breaker, RecentSuccesses, TenantKey};
use super::concurrency::{self, KvCacheLimit};
use super::health::{Health, HealthChange, ProbeResult};
use super::latency::{Latency, LoadSnapshot, StepTime};
use super::model_card::ModelCard;
use super::other_gateways::{EngineShare, OtherRequests, Untold};
use super::pick_request::WorkEstimate;
use super::prefix::PrefixIndex;
use super::retry::{Attempts, EngineEffect};
use super::settings::{BreakerLimits, Concurrency, EngineAddress, SeatBounds};
use super::signals::EngineSignals;
use super::status::EngineState;
use super::tournament::Rank;
use crate::sync::Mutex;
use crate::types::{EngineId, Tick, Tokens};

/// Values from an engine's metrics; `None` if not reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineMetrics {
    /// Requests waiting in the engine.
    pub waiting: Option<f64>,
    /// Requests running in the engine.
    pub running: Option<f64>,
    /// Used share of its KV cache, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Whether a vLLM was put to sleep.
    pub asleep: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InjectionState {
    Allowed,
    Refused,
    Compressed,
}

#[derive(Debug)]
pub(super) struct Engine {
    pub id: EngineId,
    pub address: Arc<EngineAddress>,
    /// The value of `Host`.
    pub host: Option<HeaderValue>,
    pub breaker: Breaker,
    pub cool_until: Tick,
    /// Drained by an operator until then; [`Engine::NO_END`]: until it is put back.
    drained_until: Tick,
    pub requests: u32,
    pub last_turn: u64,
    pub left: Option<Tick>,
    pub models: Arc<[Arc<str>]>,
    /// Details of its models.
    pub cards: Arc<[(Arc<str>, ModelCard)]>,
    /// Whether it was asked for its models.
    pub asked_for_models: bool,
    /// When its key is due to be recomputed, if scheduled.
    pub planned: Option<Tick>,
    /// Its seats as counted in its key.
    pub given: EngineSeats,
    limit: EngineLimit,
    /// Hash of its name, for affinity.
    pub name_key: u64,
    /// Seats under `auto`: as many as its step time allows at the pool's pace.
    auto: u32,
    /// Something that its limit or its load depends on is another than when its key was made.
    has_changed: bool,
    /// Seats that its KV cache was seen to hold.
    cache: KvCacheLimit,
    /// Work done since it joined.
    pub counters: EngineCounters,
    /// Requests of other gateways, by their reports.
    other_gateways: OtherRequests,
    /// Prompts and responses for the next report to the other gateways.
    pub untold: Untold,
    /// Sequences of gateways without reports, by the engine's metrics.
    unheard: f64,
    /// This gateway's part of the computed prompts.
    own_prompts: f64,
    /// Slowness relative to the pool's engines; 1 is normal.
    pub slowness: f64,
    /// Its last response that agreed with the model.
    pub confirmed_at: Tick,
    /// Recent prompt tokens per step.
    pub prompt_per_step: f64,
    /// Prompt prefixes that its cache should hold.
    pub prefixes: PrefixIndex,
    /// Its latency model.
    pub latency: Arc<Mutex<Latency>>,
    /// Signals of life and departure.
    pub signals: Arc<EngineSignals>,
    health: Health,
    outstanding: WorkEstimate,
    /// Estimated prompt tokens still to be computed.
    backlog: PrefillBacklog,
    busy: PrefillThroughput,
    report: Option<ReportedMetrics>,
    answered: RecentSuccesses,
    /// When it joined or came back, while warming up.
    warms_since: Option<Tick>,
    injections_off: InjectionState,
    injection_accepted: Option<Tick>,
    /// Parts of the load that change with time or reports only, from the last full evaluation.
    others: f64,
    factor: f64,
}

/// Concurrency limit of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EngineLimit {
    /// This gateway's requests.
    ours: u32,
    /// Before division by the number of gateways.
    whole: u32,
    /// Part of ours that other gateways did not use at the last report.
    lent: u32,
}

/// Seats that an engine contributes to its pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EngineSeats {
    /// To be divided among gateways.
    pub whole: u32,
    /// In addition, for this gateway alone.
    pub lent: u32,
}

impl EngineLimit {
    const NONE: EngineLimit = EngineLimit { ours: u32::MAX, whole: 0, lent: 0 };
}

/// Cumulative work of an engine; differences give the work of an interval.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineCounters {
    /// This gateway's requests with a first token.
    decoding: u32,
    /// Sequences of other gateways.
    foreign: f64,
    /// Integral of running sequences over time: sequence-seconds.
    sequences: f64,
    /// Estimated prompt tokens whose first token has come.
    prompts: f64,
    /// Moment of the last update.
    until: Tick,
}

/// Prompt tokens still to be computed. A prompt remains outstanding until its first token comes, so the
/// backlog is also assumed to shrink with time.
#[derive(Clone, Copy, Debug, Default)]
struct PrefillBacklog {
    tokens: f64,
    /// Tokens per second; 0 if unknown.
    speed: f64,
    at: Tick,
}

impl PrefillBacklog {
    fn pass(&mut self, at: Tick) {
        self.tokens = (self.tokens - self.speed * at.since(self.at).as_secs_f64()).max(0.0);
        self.at = self.at.max(at);
    }

    fn add(&mut self, prompt: Tokens, at: Tick) {
        self.pass(at);
        self.tokens += prompt.0 as f64;
    }
}

/// Prefill speed measured while the engine had prompts: a lower bound, because it may have had too few to
/// fill its steps.
#[derive(Clone, Copy, Debug, Default)]
struct PrefillThroughput {
    /// Start of the current busy interval.
    since: Option<Tick>,
    /// Recent busy seconds.
    seconds: f64,
    /// Estimated prompt tokens whose first token came in them.
    tokens: f64,
}

impl PrefillThroughput {
    /// Records a first token.
    fn first_token(&mut self, prompt: Tokens, at: Tick) {
        let Some(since) = self.since else { return };
        let seconds = at.since(since).as_secs_f64();
        let kept = (-seconds / BUSY_MEMORY).exp();
        self.seconds = kept * self.seconds + seconds;
        self.tokens = kept * self.tokens + prompt.0 as f64;
        self.since = Some(at);
    }

    /// Tokens per second; `None` with too little data.
    fn speed(&self) -> Option<f64> {
        (self.seconds >= ENOUGH_BUSY).then(|| self.tokens / self.seconds)
    }
}

/// A reading of [`EngineCounters`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CounterReading {
    pub sequences: f64,
    pub prompts: f64,
}

impl EngineCounters {
    /// Currently running sequences.
    pub fn running(&self) -> f64 {
        f64::from(self.decoding) + self.foreign
    }

    /// The counters at this moment.
    pub fn read(&mut self, at: Tick) -> CounterReading {
        self.sequences += self.running() * at.since(self.until).as_secs_f64();
        self.until = self.until.max(at);
        CounterReading { sequences: self.sequences, prompts: self.prompts }
    }

    /// Records a first token.
    pub fn first_token(&mut self, prompt: Tokens, at: Tick) -> CounterReading {
        self.read(at);
        self.decoding += 1;
        self.prompts += prompt.0 as f64;
        CounterReading { sequences: self.sequences, prompts: self.prompts }
    }

    /// Records the end of a request that had its first token.
    pub fn ended(&mut self) {
        self.decoding = self.decoding.saturating_sub(1);
    }
}

#[derive(Clone, Copy, Debug)]
struct ReportedMetrics {
    report: EngineMetrics,
    /// Valid until.
    until: Tick,
    /// This gateway's requests at that time.
    ours: f64,
    /// Sequences of the gateways with reports.
    theirs: f64,
}

/// Time constant of the busy time, seconds.
const BUSY_MEMORY: f64 = 20.0;
/// Busy seconds needed for a speed.
const ENOUGH_BUSY: f64 = 2.0;
/// Time until a returning engine takes its full share.
const WARM_UP: Duration = Duration::from_secs(10);
/// Interval of re-evaluation meanwhile.
const WARM_STEP: Duration = Duration::from_secs(1);
/// Share at first.
const COLD_SHARE: f64 = 0.1;
/// Divisor of the seats that other gateways do not use and that are lent: lending all would let every
/// gateway find the same free seats.
const LENT_PART: u32 = 2;
/// Load of a request beside its prompt, in prompt tokens: its share of each step.
const PER_REQUEST: f64 = 8.0;
/// Weight of a token of the request's own prompt relative to one ahead of it, because it delays the request
/// and about one more, and because a prefix computed twice takes the room of others in the caches. Weights from 1
/// to 4 raise the cache hit share without losing promises.
const OF_OWN_PROMPT: f64 = 3.0;
/// Resolution of loads as integers.
const LOAD_UNIT: f64 = 16.0;
/// KV cache usage from which an engine counts as under pressure, because it begins to preempt.
const KV_PRESSURE: f64 = 0.8;

impl Engine {
    const NO_END: Tick = Tick::from_nanos(u64::MAX);

    pub fn new(address: EngineAddress, warms_since: Option<Tick>) -> Self {
        let id = address.id();
        Engine {
            name_key: affinity::key_of(id.as_str().as_bytes()),
            id,
            host: HeaderValue::from_str(&address.authority()).ok(),
            address: Arc::new(address),
            breaker: Breaker::default(),
            cool_until: Tick::ZERO,
            drained_until: Tick::ZERO,
            requests: 0,
            last_turn: 0,
            left: None,
            models: Arc::from([]),
            cards: Arc::from([]),
            asked_for_models: false,
            planned: None,
            given: EngineSeats::default(),
            limit: EngineLimit::NONE,
            auto: concurrency::AT_FIRST,
            has_changed: false,
            cache: KvCacheLimit::default(),
            counters: EngineCounters::default(),
            other_gateways: OtherRequests::default(),
            untold: Untold::default(),
            unheard: 0.0,
            own_prompts: 0.0,
            slowness: 1.0,
            confirmed_at: Tick::ZERO,
            prompt_per_step: 0.0,
            prefixes: PrefixIndex::new(),
            latency: Arc::default(),
            signals: Arc::default(),
            health: Health::default(),
            outstanding: WorkEstimate::default(),
            backlog: PrefillBacklog::default(),
            busy: PrefillThroughput::default(),
            report: None,
            answered: RecentSuccesses::default(),
            warms_since,
            injections_off: InjectionState::Allowed,
            injection_accepted: None,
            others: 0.0,
            factor: 1.0,
        }
    }

    /// The settings or DNS list it (again).
    pub fn rejoin(&mut self, address: EngineAddress, at: Tick) {
        if *self.address != address {
            self.host = HeaderValue::from_str(&address.authority()).ok();
            self.address = Arc::new(address);
        }
        if self.left.take().is_some() {
            self.start_anew(at);
        }
    }

    /// Resets what was learned about the process that it replaces.
    fn start_anew(&mut self, at: Tick) {
        self.health = Health::Unknown;
        self.warms_since = Some(at);
        self.injections_off = InjectionState::Allowed;
        self.injection_accepted = None;
        self.report = None;
        self.breaker.may_try_now();
        self.cache = KvCacheLimit::default();
        self.busy = PrefillThroughput::default();
        self.prefixes.clear();
        self.latency.lock().doubt();
    }

    pub fn begin(&mut self, size: WorkEstimate, at: Tick) -> bool {
        self.requests += 1;
        self.backlog.add(size.prefill, at);
        self.busy.since = self.busy.since.or(Some(at));
        self.outstanding.prefill = self.outstanding.prefill + size.prefill;
        self.outstanding.decode = self.outstanding.decode + size.decode;
        self.breaker.begin()
    }

    /// Records a first token.
    pub fn first_token(&mut self, prompt: Tokens, at: Tick) -> CounterReading {
        self.busy.first_token(prompt, at);
        self.lighten(WorkEstimate { prefill: prompt, decode: Tokens::ZERO });
        self.own_prompts += prompt.0 as f64;
        self.counters.first_token(prompt, at)
    }

    pub fn lighten(&mut self, size: WorkEstimate) {
        self.outstanding.prefill = self.outstanding.prefill.less(size.prefill);
        self.backlog.tokens = self.backlog.tokens.min(self.outstanding.prefill.0 as f64);
        self.outstanding.decode = self.outstanding.decode.less(size.decode);
        if self.outstanding.prefill == Tokens::ZERO {
            self.busy.since = None;
        }
    }

    /// The conditions that a new request of this size meets.
    pub fn snapshot(&mut self, size: WorkEstimate, at: Tick) -> LoadSnapshot {
        self.backlog.pass(at);
        let prefill = Tokens((self.backlog.tokens + self.other_gateways.prefill) as u64);
        let batch = self.requests + 1 + self.foreign() as u32;
        LoadSnapshot { prompt: size.prefill, prefill, decode: self.outstanding.decode, batch }
    }

    /// Number of other gateways with reports of their requests here.
    pub fn gateways_heard(&self) -> usize {
        self.other_gateways.count()
    }

    /// Requests of other gateways here, as they tell. `None` if none is heard of.
    pub fn elsewhere(&self, at: Tick) -> Option<f64> {
        self.other_gateways.requests_at(at)
    }

    /// Running requests of other gateways.
    fn foreign(&self) -> f64 {
        self.unheard + self.other_gateways.requests
    }

    /// This gateway's requests here, for its report.
    pub fn share_told(&mut self, at: Tick) -> EngineShare {
        self.backlog.pass(at);
        let (computed, answers) = self.untold.take();
        EngineShare {
            engine: self.id.clone(),
            requests: self.requests,
            decoding: self.counters.decoding,
            prefill: self.backlog.tokens,
            prompts: self.own_prompts,
            computed,
            answers,
        }
    }

    /// Takes what another gateway has here.
    pub fn heard(&mut self, gateway: u64, share: &EngineShare, until: Tick, at: Tick) {
        self.counters.read(at);
        self.other_gateways.expire(at);
        let computed = self.other_gateways.heard(gateway, share, until);
        self.counters.prompts += computed;
        self.has_changed = true;
    }

    /// Most concurrent requests of this gateway; `None` means unlimited.
    pub fn limit(&self) -> Option<u32> {
        (self.limit != EngineLimit::NONE).then_some(self.limit.ours)
    }

    /// Outstanding tokens of this gateway's requests.
    pub fn work(&self) -> Tokens {
        self.outstanding.prefill + self.outstanding.decode
    }

    pub fn rank(&mut self, at: Tick) -> Rank {
        // An open breaker whose time is over becomes ready here.
        let breaker_lets = self.breaker.may_take(at);
        if breaker_lets { self.rank_past_breaker(at) } else { Rank::Out }
    }

    /// Its rank ignoring its breaker.
    pub fn rank_past_breaker(&self, at: Tick) -> Rank {
        match self.left.is_none() && !self.is_drained(at) && self.health.is_up() && !self.is_asleep(at) {
            false => Rank::Out,
            true if self.cool_until > at => Rank::Cooling,
            true => self.rank_if_able(),
        }
    }

    /// Its rank if only its limit can exclude it.
    pub const fn rank_if_able(&self) -> Rank {
        if self.requests >= self.limit.ours { Rank::Full } else { Rank::Free }
    }

    /// Recomputes its limit. While warming up it gets a share, at least one.
    pub fn follow_limit(&mut self, concurrency: Concurrency, bounds: SeatBounds, gateways: NonZeroU32, at: Tick) {
        self.limit = match concurrency {
            Concurrency::Unlimited => EngineLimit::NONE,
            Concurrency::Fixed(most) => {
                let whole = ((f64::from(most.get()) * self.share(at)) as u32).max(1);
                if self.other_gateways.is_known() {
                    // At least one, so that no gateway is shut out by the others' counts.
                    let ours = whole.saturating_sub(self.foreign() as u32).max(1);
                    self.limit = EngineLimit { ours, whole: 0, lent: ours };
                    return;
                }
                let share = whole.div_ceil(gateways.get());
                let lent = self.unused_by_others(whole - share, at) / LENT_PART;
                EngineLimit { ours: share + lent, whole, lent }
            }
            Concurrency::Auto => {
                let cache = self.cache.seats().unwrap_or(u32::MAX);
                let warm = f64::from(self.auto) * self.share(at);
                let most = (warm as u32).min(cache).clamp(bounds.min.get(), bounds.max.get());
                // Other gateways' sequences are part of its steps.
                let ours = most.saturating_sub(self.foreign() as u32).max(bounds.min.get());
                EngineLimit { ours, whole: ours, lent: 0 }
            }
        };
    }

    /// Of `theirs`, other gateways' seats, those unused by a recent report.
    fn unused_by_others(&self, theirs: u32, at: Tick) -> u32 {
        self.fresh_report(at).map_or(0, |_| theirs.saturating_sub(self.counters.foreign.ceil() as u32))
    }

    /// Its learned step time at the pool's pace, from which its seats under `auto` follow; unlimited without a
    /// pace.
    ///
    /// Second is the speed at which its prompts were seen to be computed, in tokens per second. An engine
    /// of which little was learned is taken to be as all engines of its pool together (`common`).
    pub fn update_pace(
        &mut self,
        pace: Option<f64>,
        learned: &Latency,
        common: &Latency,
        at: Tick,
    ) -> Option<(StepTime, f64)> {
        // Requests that end without an answer are not counted out at their moment.
        self.counters.read(at);
        self.has_changed |= self.other_gateways.expire(at);
        let step = learned.step_time().or_else(|| common.step_time());
        let speed = learned.prefill_speed().or_else(|| common.prefill_speed());
        (self.confirmed_at, self.prompt_per_step) = (learned.confirmed_at(), learned.prompt_per_step());
        // The slope of first tokens over what is ahead says little where little ever is.
        let speed = speed.map(|speed| self.busy.speed().map_or(speed, |seen| speed.max(seen)));
        self.backlog.speed = speed.unwrap_or(0.0);
        let auto = match (step, pace) {
            (Some(step), Some(pace)) => concurrency::seats(&step, pace),
            (None, Some(_)) => concurrency::AT_FIRST,
            (_, None) => concurrency::CEILING,
        };
        self.has_changed |= auto != std::mem::replace(&mut self.auto, auto);
        step.map(|step| (step, speed.unwrap_or(1.0 / step.per_prompt_token.max(1e-7))))
    }

    /// Slowness relative to the engines of its pool; 1 is normal.
    pub fn compares(&mut self, slowness: f64) {
        self.has_changed |= slowness.to_bits() != std::mem::replace(&mut self.slowness, slowness).to_bits();
    }

    /// Whether its limit or load changed since its key was computed.
    pub fn needs_a_key(&self) -> bool {
        self.has_changed || self.warms_since.is_some()
    }

    /// Its limit and its load are looked at for its key.
    pub fn key_is_made(&mut self) {
        self.has_changed = false;
    }

    /// Its seats at this rank.
    pub const fn gives(&self, rank: Rank) -> EngineSeats {
        match rank {
            Rank::Free | Rank::Full => EngineSeats { whole: self.limit.whole, lent: self.limit.lent },
            Rank::Cooling | Rank::Out => EngineSeats { whole: 0, lent: 0 },
        }
    }

    /// Whether only its breaker excludes it.
    pub fn waits_for_its_breaker(&self, at: Tick) -> bool {
        self.breaker.is_open() && self.rank_past_breaker(at) != Rank::Out
    }

    /// The seats it would have with a closed breaker.
    pub fn gives_past_breaker(&self, at: Tick) -> u32 {
        if self.waits_for_its_breaker(at) { self.limit.whole } else { 0 }
    }

    /// Its load with one more request: prompt tokens ahead of it, plus a little per request, including other
    /// gateways' (waiting and running at the last report minus ours then; waiting ones still have their prompts
    /// ahead). Higher with a nearly full KV cache, if slower than others, and while warming up. Old reports are
    /// ignored.
    ///
    /// Prompt tokens dominate because only they delay a first token: all sequences of a batch gain a token in
    /// the same step.
    pub fn load(&mut self, typical: f64, at: Tick) -> u64 {
        let report = self.fresh_report(at).unwrap_or_default();
        let waiting = report.waiting.unwrap_or(0.0);
        let known = self.other_gateways.is_known();
        let told = |reported: ReportedMetrics| reported.ours + if known { reported.theirs } else { 0.0 };
        let ours = self.report.map_or(0.0, told);
        let foreign = (waiting + report.running.unwrap_or(0.0) - ours).max(0.0);
        let pressure = ((report.kv_usage.unwrap_or(0.0) - KV_PRESSURE) / (1.0 - KV_PRESSURE)).clamp(0.0, 1.0);
        let queued = waiting.min(foreign);
        self.counters.read(at);
        // Its limit follows with the next key.
        self.unheard = foreign - queued;
        let running = self.unheard + self.other_gateways.decoding;
        self.has_changed |= running != self.counters.foreign;
        self.counters.foreign = running;
        self.others =
            PER_REQUEST * (foreign + self.other_gateways.requests) + typical * queued + self.other_gateways.prefill;
        self.factor = (1.0 + pressure) / self.share(at);
        self.load_again()
    }

    /// The same if a request with this many uncached prompt tokens is added. These count more than tokens ahead,
    /// because later requests wait for them too ([`OF_OWN_PROMPT`]).
    pub fn load_with(&self, prompt: Tokens) -> u64 {
        let added = OF_OWN_PROMPT * prompt.0 as f64 * self.factor * self.slowness * LOAD_UNIT;
        self.load_again().saturating_add(added as u64)
    }

    /// Prompt tokens expected in its cache; the last token is always computed.
    pub fn cached(&self, prompt: Tokens, blocks: &[u64]) -> Tokens {
        let held = self.prefixes.held(blocks);
        if held == 0 {
            return Tokens::ZERO;
        }
        let expected = self.prefixes.tokens(held).0 as f64 * self.prefixes.credit();
        Tokens(expected as u64).min(prompt.less(Tokens(1)))
    }

    /// Whether it has fewer requests than this bound, which is reduced while it warms up or its cache is full;
    /// at least one.
    pub fn is_below(&self, bound: f64) -> bool {
        f64::from(self.requests) < (bound / self.factor).max(1.0)
    }

    /// The load with report and warm-up of the last full evaluation.
    pub fn load_again(&self) -> u64 {
        let tokens = self.outstanding.prefill.0 as f64 + PER_REQUEST * f64::from(self.requests + 1) + self.others;
        (tokens * self.factor * self.slowness * LOAD_UNIT) as u64
    }

    /// Its share of traffic: below 1 while warming up.
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

    /// When its key changes with time alone.
    pub fn next_wake(&self, at: Tick) -> Option<Tick> {
        let steps = |since: Tick| (at - since).as_secs() as u32 + 1;
        let warmer = self.warms_since.map(|since| since + WARM_STEP * steps(since));
        let cooled = (self.cool_until > at).then_some(self.cool_until);
        let drained = (self.is_drained(at) && self.drained_until < Self::NO_END).then_some(self.drained_until);
        [warmer, cooled, drained, self.breaker.opens_until()].into_iter().flatten().min()
    }

    pub fn fresh_report(&self, at: Tick) -> Option<EngineMetrics> {
        self.report.filter(|reported| reported.until > at).map(|reported| reported.report)
    }

    fn is_asleep(&self, at: Tick) -> bool {
        self.fresh_report(at).is_some_and(|report| report.asleep)
    }

    pub fn reported(&mut self, report: EngineMetrics, until: Tick) {
        let (usage, running) = (report.kv_usage.unwrap_or(0.0), report.running.unwrap_or(0.0));
        self.cache.reported(usage, running, report.waiting.unwrap_or(0.0));
        self.report = Some(ReportedMetrics {
            report,
            until,
            ours: f64::from(self.requests),
            theirs: self.other_gateways.requests,
        });
    }

    pub fn checked(&mut self, checked: ProbeResult, at: Tick) -> Option<HealthChange> {
        let alive = self.answered.last().max(self.signals.last_alive());
        let change = self.health.note(checked, alive, at);
        // An engine that was only silent, and serves again, is the same process.
        if change == Some(HealthChange::CameUp) && checked == ProbeResult::Healthy {
            self.start_anew(at);
            self.health = Health::Up;
        }
        change
    }

    /// Applies an attempt's effect. True if its rank may have
    /// changed.
    pub fn feel(&mut self, effect: &EngineEffect, limits: Option<&BreakerLimits>, tenant: TenantKey, at: Tick) -> bool {
        match effect {
            EngineEffect::Fault(_) => {
                if let Some(limits) = limits {
                    self.breaker.fault(limits, tenant, &self.answered, at);
                }
                true
            }
            EngineEffect::FaultElsewhere(..) => false,
            EngineEffect::Cool(_, length) => {
                self.cool_until = self.cool_until.max(at + *length);
                true
            }
            EngineEffect::Well(_) => self.well(tenant, at),
            EngineEffect::InjectionAccepted(_) => {
                self.injection_accepted = Some(at);
                false
            }
            EngineEffect::InjectionSwitchedOff(_) => {
                self.injections_off = InjectionState::Refused;
                false
            }
        }
    }

    /// It served a tenant's request. Whether its key changed.
    pub fn well(&mut self, tenant: TenantKey, at: Tick) -> bool {
        self.answered.note(tenant, at);
        self.breaker.well()
    }

    pub fn mark_compressed(&mut self) {
        if self.injections_off == InjectionState::Allowed {
            self.injections_off = InjectionState::Compressed;
        }
    }

    pub fn may_inject(&self) -> bool {
        self.injections_off == InjectionState::Allowed
    }

    pub fn injection_refused(&self) -> bool {
        self.injections_off == InjectionState::Refused
    }

    pub fn injection_proven(&self, at: Tick) -> bool {
        self.injection_accepted.is_some_and(|accepted| at - accepted < Attempts::PROOF)
    }

    /// Takes no new request for so long (`None`: until it is put back); what it has goes on.
    pub fn drain(&mut self, length: Option<Duration>, at: Tick) {
        self.drained_until = length.map_or(Self::NO_END, |length| at + length);
    }

    pub fn put_back(&mut self) {
        self.drained_until = Tick::ZERO;
    }

    pub fn is_drained(&self, at: Tick) -> bool {
        self.drained_until > at
    }

    /// How long it stays drained, where that has an end.
    pub fn drained_for(&self, at: Tick) -> Option<Duration> {
        (self.is_drained(at) && self.drained_until < Self::NO_END).then(|| self.drained_until.since(at))
    }

    /// What it does, its drain by an operator aside.
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

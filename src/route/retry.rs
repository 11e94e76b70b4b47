//! Retry rules: what follows a failed attempt (`docs/semantics.md`, section 5).
//!
//! Pure: the outcome of an attempt goes in, the next step and effects on engines come out. Decided here:
//! which engine is tried next, whether the failure counts for the engine's breaker, and whether the engine
//! cools down. Two equal failures are the request's doing, so the effect of a first failing status is held
//! back until the second attempt's outcome.
//!
//! [`Attempts`] is one request's state within one pool; [`Fleet::failed`](super::Fleet::failed) calls it
//! with the pool's budget and applies the
//! effects.

use std::borrow::Cow;
use std::time::Duration;

use http::HeaderValue;

use super::RetryBudget;
use super::breaker::TenantKey;
use super::model_listing::EngineList;
use super::settings::{CoolDown, PoolSettings, Retries};
use crate::types::{EngineId, PoolId, Tick};

/// Outcome of an attempt that is not simply relayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// Not connected: refused, unreachable, TLS failure, `connect_timeout`.
    ConnectFailed,
    /// The gateway itself could open no connection: says nothing about the engine, and affects other engines as
    /// well.
    Lacking,
    /// A reused connection was reset or closed before any response byte.
    StaleConnection,
    /// 429, 503 or 529, as status or in-band before the first token.
    PushBack {
        /// The engine's `Retry-After`.
        retry_after: Option<Duration>,
    },
    /// Another 5xx, as status or in-band.
    Fault {
        /// Status or in-band code.
        status: u16,
    },
    /// Reset, close, truncation or invalid bytes after the request was sent.
    Broken,
    /// The engine is going away (connection refused, or health 503), nothing of its response was forwarded, and
    /// another engine may be tried; the budget was already charged
    /// for it.
    Departing,
    /// 400 or 422 to an injected body, from an engine that has not accepted such an injection within
    /// 60 s.
    InjectionRefused,
    /// 400 or 422 to a body whose output cap an overload level had lowered.
    CapRefused,
    /// Any other unsuccessful response (3xx, 4xx, 501), as status or in-band.
    Refused,
    /// A class time limit fired while the engine had the request.
    TimedOut,
}

/// Injection of an attempt, to interpret a 400 or 422.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injection {
    /// Nothing was injected.
    None,
    /// Injected; the engine has accepted such a body within 60 s.
    Proven,
    /// Injected; the engine has not accepted one recently.
    Unproven,
}

impl AttemptOutcome {
    /// A short name, for traces and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            AttemptOutcome::ConnectFailed => "connect_failed",
            AttemptOutcome::Lacking => "out_of_sockets",
            AttemptOutcome::StaleConnection => "stale_connection",
            AttemptOutcome::PushBack { .. } => "push_back",
            AttemptOutcome::Fault { .. } => "fault",
            AttemptOutcome::Broken => "broken",
            AttemptOutcome::Departing => "departing",
            AttemptOutcome::InjectionRefused => "injection_refused",
            AttemptOutcome::CapRefused => "cap_refused",
            AttemptOutcome::Refused => "refused",
            AttemptOutcome::TimedOut => "timed_out",
        }
    }

    /// Whether an engine rejected the request's content.
    #[must_use]
    pub const fn refuses(self) -> bool {
        matches!(self, AttemptOutcome::Refused | AttemptOutcome::InjectionRefused | AttemptOutcome::CapRefused)
    }

    /// The same if an overload level has lowered the output cap, which may be what the engine
    /// rejects.
    #[must_use]
    pub fn with_lowered_cap(self, status: u16) -> AttemptOutcome {
        match (self, status) {
            (AttemptOutcome::Refused | AttemptOutcome::InjectionRefused, 400 | 422) => AttemptOutcome::CapRefused,
            _ => self,
        }
    }

    /// Interprets an engine's status other than 2xx, or an in-band code before the first token.
    #[must_use]
    pub fn answer(status: u16, retry_after: Option<Duration>, injection: Injection) -> AttemptOutcome {
        match status {
            429 | 503 | 529 => AttemptOutcome::PushBack { retry_after },
            // The engine lacks the function, as do others of its kind, and a client must not be able to open
            // breakers with it.
            501 => AttemptOutcome::Refused,
            500.. => AttemptOutcome::Fault { status },
            400 | 422 if injection == Injection::Unproven => AttemptOutcome::InjectionRefused,
            _ => AttemptOutcome::Refused,
        }
    }
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryDecision {
    /// The same engine on a fresh connection. Not an attempt, only counted.
    SameFresh,
    /// The same engine without injection (an alias stays).
    SameWithoutInjection,
    /// The same engine with the client's own output cap.
    SameWithoutCap,
    /// Choose again: an untried engine, or the only one.
    Another,
    /// No attempt is left: relay the last engine's response unchanged.
    Relay,
    /// No attempt is left, and none got a response: the gateway creates one.
    GiveUp,
}

/// Effect of an attempt on its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEffect {
    /// Counts for the engine's breaker.
    Fault(EngineId),
    /// The same for an engine of a pool that the request has left.
    FaultElsewhere(PoolId, EngineId),
    /// The engine cools down for this long.
    Cool(EngineId, Duration),
    /// The engine works.
    Well(EngineId),
    /// The engine accepted an injected body.
    InjectionAccepted(EngineId),
    /// The engine rejected an injected body and accepted it without injection.
    InjectionSwitchedOff(EngineId),
}

/// The next step, and effects of the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryStep {
    /// The next step.
    pub next: RetryDecision,
    /// Effects on engines.
    pub effects: Vec<EngineEffect>,
}

/// Engines left for this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemainingEngines {
    /// At least one available engine is untried.
    Others,
    /// The failed engine is the only available one.
    Alone,
    /// All were tried.
    Nobody,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailureKind {
    Status(u16),
    Reset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RetryStage {
    /// Nothing was sent to the client.
    Held,
    /// The head was sent: no further attempt.
    Committed,
    /// A token was sent: every failure is the engine's fault.
    Flowing,
}

/// The attempts of one request in one pool.
#[derive(Clone, Debug)]
pub struct Attempts {
    pool: PoolId,
    retries: Retries,
    cool_down: CoolDown,
    until: Tick,
    stage: RetryStage,
    tried: Vec<EngineId>,
    /// Index of the first engine of those not to be tried again.
    closed_from: usize,
    faults: u32,
    push_backs: u32,
    connect_repeated: bool,
    stale: Option<EngineId>,
    without_injection: bool,
    without_cap: bool,
    last_failure: Option<FailureKind>,
    provisional: Option<(PoolId, EngineId)>,
    alike: bool,
    has_answer: bool,
    /// Whether an engine may have received some of it.
    was_heard: bool,
    /// Whether a time limit ended the last one.
    timed_out: bool,
    /// The request's tenant.
    tenant: TenantKey,
    /// Engines of the pool that do not list the model although others do.
    not_listing: Option<EngineList>,
    /// Whether breakers are bypassed because no engine of the route is available otherwise.
    past_breakers: bool,
}

impl Attempts {
    /// Age at which an accepted injection no longer proves anything.
    pub const PROOF: Duration = Duration::from_secs(60);

    /// No attempt yet. No retry starts at or after `until`: the class's `first_token` limit, or
    /// `response_head` for non-streaming requests.
    #[must_use]
    pub fn new(pool: &PoolSettings, until: Tick) -> Self {
        Attempts {
            pool: pool.id.clone(),
            retries: pool.retries,
            cool_down: pool.cool_down,
            until,
            stage: RetryStage::Held,
            tried: Vec::with_capacity(1),
            closed_from: 0,
            faults: 0,
            push_backs: 0,
            connect_repeated: false,
            stale: None,
            without_injection: false,
            without_cap: false,
            last_failure: None,
            provisional: None,
            alike: false,
            has_answer: false,
            was_heard: false,
            timed_out: false,
            tenant: TenantKey::default(),
            not_listing: None,
            past_breakers: false,
        }
    }

    /// Sets the tenant.
    #[must_use]
    pub fn of_tenant(mut self, tenant: TenantKey) -> Self {
        self.tenant = tenant;
        self
    }

    /// The request's tenant.
    #[must_use]
    pub fn tenant(&self) -> TenantKey {
        self.tenant
    }

    /// Enters another pool: its engines are untried, earlier outcomes stay.
    pub fn enter(&mut self, pool: &PoolSettings) {
        self.pool = pool.id.clone();
        self.retries = pool.retries;
        self.cool_down = pool.cool_down;
        self.closed_from = self.tried.len();
        self.connect_repeated = false;
        self.without_injection = false;
        self.not_listing = None;
    }

    /// Sets the engines of the pool to avoid because others list the model.
    pub fn keep_off(&mut self, engines: Option<EngineList>) {
        self.not_listing = engines;
    }

    /// Bypasses breakers from now on, if nothing else excludes an engine.
    pub fn pass_breakers(&mut self) {
        self.past_breakers = true;
    }

    /// Whether breakers are bypassed.
    #[must_use]
    pub fn passes_breakers(&self) -> bool {
        self.past_breakers
    }

    /// The current pool.
    #[must_use]
    pub fn pool(&self) -> &PoolId {
        &self.pool
    }

    /// An engine was chosen; called by [`Pool::choose`](super::Pool::choose).
    pub fn begin(&mut self, engine: EngineId) {
        self.tried.push(engine);
        self.without_injection = false;
    }

    /// Attempts begun.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.tried.len()).unwrap_or(u32::MAX)
    }

    /// Engines not to be tried again.
    #[must_use]
    pub fn tried(&self) -> &[EngineId] {
        &self.tried[self.closed_from..]
    }

    /// Engines to avoid: tried ones, and those that do not list the model.
    #[must_use]
    pub fn shut(&self) -> Cow<'_, [EngineId]> {
        match &self.not_listing {
            None => Cow::Borrowed(self.tried()),
            Some(others) => Cow::Owned(self.tried().iter().chain(&**others).cloned().collect()),
        }
    }

    /// Whether time and client allow another attempt: nothing was sent, and the limit for first tokens has not
    /// passed.
    #[must_use]
    pub fn may_go_on(&self, at: Tick) -> bool {
        self.stage == RetryStage::Held && at < self.until
    }

    /// The engine of the current attempt.
    #[must_use]
    pub fn engine(&self) -> Option<&EngineId> {
        self.tried.last()
    }

    /// Whether engines were tried and none could be connected to, so that none has had the request.
    #[must_use]
    pub fn is_unheard(&self) -> bool {
        self.count() > 0 && !self.was_heard
    }

    /// Whether the current attempt must not inject.
    #[must_use]
    pub fn without_injection(&self) -> bool {
        self.without_injection
    }

    /// Whether the lowered cap must not be used because an engine rejected it.
    #[must_use]
    pub fn without_cap(&self) -> bool {
        self.without_cap
    }

    /// Whether two attempts failed alike: the request's doing, though counted as missed.
    #[must_use]
    pub fn failed_alike(&self) -> bool {
        self.alike
    }

    /// The response head was sent: no further attempt.
    pub fn commit(&mut self) {
        self.stage = self.stage.max(RetryStage::Committed);
    }

    /// A token came: from now on every failure counts for the breaker.
    pub fn first_token(&mut self) {
        self.stage = RetryStage::Flowing;
    }

    /// The current engine, if its success has no effect but on its health, as is the rule.
    pub fn succeeds_plainly(&self, injection: Injection) -> Option<&EngineId> {
        let is_plain = injection == Injection::None && !self.without_injection && self.provisional.is_none();
        self.engine().filter(|_| is_plain)
    }

    /// The current attempt succeeded: a 2xx with its first token, or with a complete head if the response is not
    /// a stream.
    #[must_use = "effects are to be applied"]
    pub fn succeeded(&mut self, injection: Injection) -> impl Iterator<Item = EngineEffect> + use<> {
        let engine = || self.engine().cloned();
        let of_injection = match injection {
            _ if self.without_injection => engine().map(EngineEffect::InjectionSwitchedOff),
            Injection::None => None,
            Injection::Proven | Injection::Unproven => engine().map(EngineEffect::InjectionAccepted),
        };
        let well = engine().map(EngineEffect::Well);
        self.settled().into_iter().chain(of_injection).chain(well)
    }

    /// Decides what follows the current attempt's outcome.
    #[must_use = "the effects are to be applied"]
    pub fn next(
        &mut self,
        outcome: AttemptOutcome,
        rest: RemainingEngines,
        at: Tick,
        budget: &mut RetryBudget,
    ) -> RetryStep {
        let Some(engine) = self.engine().cloned() else {
            return RetryStep { next: RetryDecision::GiveUp, effects: Vec::new() };
        };
        let mut effects = Vec::new();
        if self.stage == RetryStage::Flowing {
            effects.extend(self.settled());
            effects.push(EngineEffect::Fault(engine));
            return RetryStep { next: RetryDecision::Relay, effects };
        }
        self.was_heard |= !matches!(outcome, AttemptOutcome::ConnectFailed | AttemptOutcome::Lacking);
        let next = match outcome {
            AttemptOutcome::StaleConnection if self.stale.as_ref() != Some(&engine) => {
                self.stale = Some(engine);
                return RetryStep { next: RetryDecision::SameFresh, effects };
            }
            AttemptOutcome::ConnectFailed => {
                effects.extend(self.settled());
                effects.push(EngineEffect::Fault(engine.clone()));
                effects.push(EngineEffect::Cool(engine, self.cool_down.default.min(self.cool_down.max)));
                let alone = rest == RemainingEngines::Alone && !self.connect_repeated;
                self.connect_repeated |= alone;
                self.another(rest == RemainingEngines::Others || alone, rest, at, budget)
            }
            AttemptOutcome::Lacking => None,
            AttemptOutcome::PushBack { retry_after } => {
                effects.extend(self.settled());
                let length = retry_after.unwrap_or(self.cool_down.default).min(self.cool_down.max);
                effects.push(EngineEffect::Cool(engine, length));
                self.has_answer = true;
                self.push_backs += 1;
                let may = self.push_backs <= self.retries.after_push_back && rest == RemainingEngines::Others;
                self.another(may, rest, at, budget)
            }
            AttemptOutcome::Fault { status } => {
                self.has_answer = true;
                self.after_failure(FailureKind::Status(status), engine, rest, at, budget, &mut effects)
            }
            // Its health check has taken it out already.
            AttemptOutcome::Departing => {
                effects.extend(self.settled());
                (rest == RemainingEngines::Others).then_some(RetryDecision::Another)
            }
            AttemptOutcome::Broken | AttemptOutcome::StaleConnection => {
                self.after_failure(FailureKind::Reset, engine, rest, at, budget, &mut effects)
            }
            AttemptOutcome::InjectionRefused | AttemptOutcome::CapRefused => {
                self.has_answer = true;
                let (is_undone, next) = match outcome {
                    AttemptOutcome::InjectionRefused => {
                        (&mut self.without_injection, RetryDecision::SameWithoutInjection)
                    }
                    _ => (&mut self.without_cap, RetryDecision::SameWithoutCap),
                };
                if *is_undone || self.stage != RetryStage::Held || at >= self.until {
                    effects.push(EngineEffect::Well(engine));
                    None
                } else {
                    *is_undone = true;
                    return RetryStep { next, effects };
                }
            }
            AttemptOutcome::Refused => {
                self.has_answer = true;
                effects.push(EngineEffect::Well(engine));
                None
            }
            AttemptOutcome::TimedOut => {
                self.timed_out = true;
                None
            }
        };
        let next = next.unwrap_or_else(|| {
            effects.extend(self.settled());
            self.nothing_left()
        });
        RetryStep { next, effects }
    }

    /// The client's response if no engine is left. [`RetryDecision::Relay`] means the last engine's response.
    #[must_use]
    pub fn nothing_left(&self) -> RetryDecision {
        if self.has_answer && !self.timed_out { RetryDecision::Relay } else { RetryDecision::GiveUp }
    }

    /// A held-back effect that now counts. Called once where a request ends without a further call of
    /// [`Attempts::next`] or [`Attempts::succeeded`]: the client left, or no engine could be
    /// chosen.
    #[must_use = "it is to be applied"]
    pub fn settled(&mut self) -> Option<EngineEffect> {
        self.provisional.take().map(|(pool, engine)| match pool == self.pool {
            true => EngineEffect::Fault(engine),
            false => EngineEffect::FaultElsewhere(pool, engine),
        })
    }

    fn after_failure(
        &mut self,
        failure: FailureKind,
        engine: EngineId,
        rest: RemainingEngines,
        at: Tick,
        budget: &mut RetryBudget,
        effects: &mut Vec<EngineEffect>,
    ) -> Option<RetryDecision> {
        self.alike = self.last_failure == Some(failure);
        self.last_failure = Some(failure);
        if self.alike {
            self.provisional = None;
        } else {
            effects.extend(self.settled());
        }
        match failure {
            FailureKind::Reset => effects.push(EngineEffect::Fault(engine)),
            FailureKind::Status(_) if self.alike => {}
            FailureKind::Status(_) => self.provisional = Some((self.pool.clone(), engine)),
        }
        self.faults += 1;
        let may = !self.alike && self.faults <= self.retries.after_fault && rest != RemainingEngines::Nobody;
        self.another(may, rest, at, budget)
    }

    /// Another attempt, if time and budget allow it.
    fn another(
        &mut self,
        may: bool,
        rest: RemainingEngines,
        at: Tick,
        budget: &mut RetryBudget,
    ) -> Option<RetryDecision> {
        let may = may && self.stage == RetryStage::Held && at < self.until && budget.draw(at);
        if may && rest == RemainingEngines::Alone {
            self.closed_from = self.tried.len();
        }
        may.then_some(RetryDecision::Another)
    }
}

/// Parses `Retry-After`: seconds, or a date relative to the wall clock in any of HTTP's three formats (RFC
/// 9110 section 5.6.7). A past date is now.
#[must_use]
pub fn retry_after(value: &HeaderValue, wall: Duration) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let wall_second = i64::try_from(wall.as_secs()).ok()?;
    let second = rfc_1123(text).or_else(|| rfc_850(text, wall_second)).or_else(|| asctime(text))?;
    Some(Duration::from_secs(u64::try_from(second).unwrap_or(0)).saturating_sub(wall))
}

/// `Sun, 06 Nov 1994 08:49:37 GMT`
fn rfc_1123(text: &str) -> Option<i64> {
    Some(jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(text).ok()?.as_second())
}

/// `Sunday, 06-Nov-94 08:49:37 GMT`. The two-digit year is the latest one at most fifty years
/// ahead.
fn rfc_850(text: &str, wall: i64) -> Option<i64> {
    let (_weekday, date) = text.split_once(", ")?;
    let (day, rest) = date.split_once('-')?;
    let (month, rest) = rest.split_once('-')?;
    let (year, time) = rest.split_once(' ')?;
    let year: i16 = (year.len() == 2).then(|| year.parse().ok())??;
    let this_year = jiff::Timestamp::from_second(wall).ok()?.to_zoned(jiff::tz::TimeZone::UTC).year();
    let ahead = this_year + 50;
    let year = ahead - (ahead - year).rem_euclid(100);
    second_of(&format!("{day} {month} {year} {}", time.strip_suffix(" GMT")?))
}

/// `Sun Nov  6 08:49:37 1994`
fn asctime(text: &str) -> Option<i64> {
    let mut words = text.split_ascii_whitespace().skip(1);
    let (month, day, time, year) = (words.next()?, words.next()?, words.next()?, words.next()?);
    second_of(&format!("{day} {month} {year} {time}"))
}

fn second_of(date: &str) -> Option<i64> {
    let date = jiff::civil::DateTime::strptime("%d %b %Y %H:%M:%S", date).ok()?;
    Some(date.to_zoned(jiff::tz::TimeZone::UTC).ok()?.timestamp().as_second())
}

#[cfg(test)]
mod tests;

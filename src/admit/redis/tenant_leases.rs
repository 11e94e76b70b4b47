//! One tenant's leases, and the calls to the store about them.
//!
//! Pure: moments are arguments and nothing waits. A request [`draw`](TenantLeases::draw)s; if the leases are not
//! enough it becomes a [`InFlightCall`] call, of which one per tenant is in flight, whose result comes back to
//! [`answered`](TenantLeases::answered) or [`lost`](TenantLeases::lost).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ahash::RandomState;

use super::lease::{ConcurrencyLease, TokenLease};
use super::lua_call::{BucketArgs, COUNT_LIFE, CallMarks, ConcurrencyArgs, LuaCall, LuaReply};
use crate::admit::limit::buckets::{BY_RATE, HeldAmounts};
use crate::admit::limit::settings::{Allowance, Limits};
use crate::admit::limit::token_bucket::TokenBucket;
use crate::admit::limit::{LimitExceeded, LimitKind, LimitScope, LimitStatus, Used, Wanted};
use crate::types::Tick;

/// Idle time after which leases are returned.
const IDLE: Duration = Duration::from_secs(1);

/// Redis keys expire after twice the refill time plus this.
const GRACE: Duration = Duration::from_secs(60);
/// Longest key life.
pub(super) const LONGEST_LIFE: Duration = Duration::from_secs(400 * 24 * 60 * 60);

/// Most scopes handled by one call.
const SCOPES_IN_A_CALL: usize = 8;

/// Amounts held of the tenant's leases, and of its model's.
pub(super) type HeldByScope = [HeldAmounts; 2];

/// A request for the store.
#[derive(Clone, Debug)]
pub(super) struct LeaseRequest {
    /// The model's name.
    pub model: Arc<str>,
    pub wanted: Wanted,
}

/// Result of drawing from the leases.
#[derive(Debug, PartialEq)]
pub(super) enum DrawResult {
    /// Everything needed was here.
    Held(HeldByScope),
    /// Rejected without calling the store.
    Refused(LimitExceeded),
    /// The store must be called.
    AskStore,
}

/// A call in flight.
#[derive(Debug)]
pub(super) struct InFlightCall {
    pub call: LuaCall,
    want: Option<LeaseRequest>,
    /// Scope (`None`: the tenant's own) and limit of each bucket.
    buckets: Vec<(Option<Arc<str>>, usize)>,
    /// Scope of each concurrency limit.
    places: Vec<Option<Arc<str>>>,
    /// Scopes whose unreported usage the call reports.
    told: Vec<Option<Arc<str>>>,
}

impl InFlightCall {
    /// Whether a request waits for the result.
    pub fn is_asked(&self) -> bool {
        self.want.is_some()
    }

    /// Whether the result comes from other state than remembered, so that the store lost its data.
    pub fn shows_a_loss(&self, answer: &LuaReply) -> bool {
        let is_lost = |bucket: &BucketArgs| bucket.begun != 0 && bucket.begun != answer.begun && bucket.remembered > 0;
        self.call.buckets.iter().any(is_lost)
    }
}

/// The leases of one tenant.
#[derive(Debug)]
pub(super) struct TenantLeases {
    key: Arc<str>,
    gateway: Arc<str>,
    whole: ScopeLeases,
    models: HashMap<Arc<str>, ScopeLeases, RandomState>,
    key_life: Duration,
    marks: CallMarks,
    last_call: Tick,
    last_draw: Tick,
}

/// The leases of one scope.
#[derive(Debug)]
struct ScopeLeases {
    scope: LimitScope,
    fields: [Arc<str>; BY_RATE.len() + 1],
    token_leases: [Option<TokenLease>; BY_RATE.len()],
    seats: Option<ConcurrencyLease>,
    /// Requests running here, however admitted.
    running: u64,
    /// The store was unavailable: usage meanwhile must be reported, and whether it lost its data is
    /// unknown.
    untold: bool,
}

impl TenantLeases {
    pub fn new(key: Arc<str>, gateway: Arc<str>, limits: &Limits, replicas: u32, at: Tick) -> Self {
        let mut tenant_leases = TenantLeases {
            key,
            gateway,
            whole: ScopeLeases::new(None),
            models: HashMap::default(),
            key_life: GRACE,
            marks: CallMarks::default(),
            last_call: at,
            last_draw: at,
        };
        tenant_leases.change(limits, replicas, at);
        tenant_leases
    }

    /// Sets the limits. Leases of removed limits are dropped.
    pub fn change(&mut self, limits: &Limits, replicas: u32, at: Tick) {
        self.whole.change(&self.gateway, &limits.whole, replicas, at);
        self.models.retain(|model, _| limits.models.contains_key(model));
        for (model, allowance) in &limits.models {
            let leases = self.models.entry(Arc::clone(model)).or_insert_with(|| ScopeLeases::new(Some(model)));
            leases.change(&self.gateway, allowance, replicas, at);
        }
        let longest = self.scopes().flat_map(ScopeLeases::token_leases).map(|(_, lease)| {
            let minutes = lease.rate.burst() as f64 / lease.rate.per_minute() as f64;
            Duration::try_from_secs_f64(minutes * 120.0).unwrap_or(LONGEST_LIFE)
        });
        self.key_life = longest.fold(COUNT_LIFE, Duration::max).saturating_add(GRACE).min(LONGEST_LIFE);
    }

    /// Takes what a request needs, if available here.
    pub fn draw(&mut self, model: &str, wanted: &Wanted, at: Tick) -> DrawResult {
        let scopes = || std::iter::once(&self.whole).chain(self.models.get(model));
        if let Err(never) = scopes().try_for_each(|leases| leases.can_ever_hold(wanted)) {
            return DrawResult::Refused(never);
        }
        if !scopes().all(|leases| leases.has(wanted)) {
            let mut known = scopes().map(|leases| leases.known_full(at)).chain([LimitExceeded::for_the_longest(
                scopes().filter_map(|leases| leases.longest_wait(wanted, at, TokenLease::known_wait)),
            )]);
            return known.find_map(|known| known).map_or(DrawResult::AskStore, DrawResult::Refused);
        }
        self.last_draw = at;
        let of_whole = self.whole.draw(wanted);
        let of_model = self.models.get_mut(model).map(|leases| leases.draw(wanted));
        DrawResult::Held([of_whole, of_model.unwrap_or_default()])
    }

    /// Records a request admitted without the store.
    pub fn runs(&mut self, model: &str) {
        self.each_of(model, |_, leases| leases.running = leases.running.saturating_add(1));
    }

    /// Records the end of a request. `held`: what it held from the store, if anything; `lend`: the store is
    /// available. True if the store should be told soon.
    pub fn ended(&mut self, model: &str, held: Option<&HeldByScope>, used: Option<&Used>, lend: bool) -> bool {
        let mut is_urgent = false;
        let last = self.last_call;
        self.each_of(model, |index, leases| {
            leases.running = leases.running.saturating_sub(1);
            match (held, used) {
                (Some(held), used) => leases.settle(&held[index], used, lend),
                (None, Some(used)) => leases.used_unheard(used),
                (None, None) => {}
            }
            let seats = leases.seats.as_ref();
            is_urgent |= seats.is_some_and(|seats| seats.is_untidy(leases.running, false, last));
        });
        is_urgent
    }

    /// The call for a request that needs the store. `behind`: others of this tenant wait too. `spent_here`: the
    /// state of this gateway's own limiter.
    pub fn call<'a>(
        &mut self,
        want: LeaseRequest,
        behind: impl Iterator<Item = &'a LeaseRequest> + Clone,
        spent_here: &[LimitStatus],
        at: Tick,
    ) -> InFlightCall {
        let since = at.since(self.last_call);
        let mut sent = self.empty_call(at);
        let names = [None, self.models.get_key_value(&want.model).map(|(model, _)| Arc::clone(model))];
        for (index, name) in names.into_iter().enumerate().filter(|(index, name)| *index == 0 || name.is_some()) {
            let mates = || behind.clone().filter(|mate| index == 0 || mate.model == want.model);
            let Some(leases) = self.leases_mut(name.as_ref()) else { continue };
            leases.untold = false;
            sent.told.push(name.clone());
            for (place, limit) in BY_RATE.into_iter().enumerate() {
                let Some(lease) = &mut leases.token_leases[place] else { continue };
                let waiting = mates().map(|mate| lease.clipped(mate.wanted.of(limit)));
                let waiting = waiting.fold(0, u64::saturating_add).min(lease.rate.burst());
                let need = lease.clipped(want.wanted.of(limit));
                let besides = lease.ask_ahead(since).max(waiting);
                let (back, owed) = lease.hand_over();
                let unheard = lease.tell_unheard(spent(spent_here, leases.scope, limit));
                let bucket = BucketArgs { back, owed, need, besides, unheard, ..leases.bucket(place, at) };
                sent.buckets.push((name.clone(), place));
                sent.call.buckets.push(bucket);
            }
            let running = leases.running;
            if let Some(seats) = &mut leases.seats {
                let besides = seats.ask_ahead().max(mates().count() as u64);
                seats.hand_over(running);
                let places = ConcurrencyArgs { need: 1, besides, ..leases.places() };
                sent.places.push(name.clone());
                sent.call.places.push(places);
            }
        }
        self.last_call = at;
        sent.want = Some(want);
        sent
    }

    /// A maintenance call: returns idle leases, reports debts and running requests, and after an outage the
    /// usage meanwhile and the last known state. `None` if there is nothing to do. `everything`: keep nothing,
    /// because this gateway leaves. `spent_here`: the state of this gateway's own limiter for one model.
    pub fn tidy(
        &mut self,
        everything: bool,
        spent_here: impl Fn(&str) -> Vec<LimitStatus>,
        at: Tick,
    ) -> Option<InFlightCall> {
        let is_idle = everything || at.since(self.last_draw) >= IDLE;
        let mut sent = self.empty_call(at);
        let mut scopes = 0;
        for name in std::iter::once(None).chain(self.models.keys().cloned().map(Some)).collect::<Vec<_>>() {
            let Some(leases) = self.leases_mut(name.as_ref()) else { continue };
            let before = sent.call.buckets.len() + sent.call.places.len();
            let spent_here = std::mem::take(&mut leases.untold).then(|| {
                sent.told.push(name.clone());
                spent_here(name.as_deref().unwrap_or_default())
            });
            for (place, limit) in BY_RATE.into_iter().enumerate() {
                let Some(lease) = &mut leases.token_leases[place] else { continue };
                let (back, owed) = lease.tidy(is_idle).unwrap_or_default();
                let unheard = spent_here.as_ref().map_or(0, |all| lease.tell_unheard(spent(all, leases.scope, limit)));
                let bucket = BucketArgs { back, owed, unheard, ..leases.bucket(place, at) };
                if back == 0 && owed == 0 && unheard == 0 && (spent_here.is_none() || bucket.remembered == 0) {
                    continue;
                }
                sent.buckets.push((name.clone(), place));
                sent.call.buckets.push(bucket);
            }
            let running = leases.running;
            if let Some(seats) = leases.seats.as_mut().filter(|seats| seats.is_untidy(running, is_idle, at)) {
                seats.hand_over(running);
                sent.places.push(name.clone());
                sent.call.places.push(leases.places());
            }
            scopes += usize::from(sent.call.buckets.len() + sent.call.places.len() > before);
            if scopes == SCOPES_IN_A_CALL {
                break;
            }
        }
        (scopes > 0).then_some(sent)
    }

    /// The store is available again and must be told what it may not know.
    pub fn came_back(&mut self) {
        self.whole.untold = true;
        self.models.values_mut().for_each(|leases| leases.untold = true);
    }

    /// Handles the result of a call: what its request holds, or why it was rejected. `None` if no request asked,
    /// or it must ask again because the refusing limit was changed meanwhile.
    pub fn answered(
        &mut self,
        sent: InFlightCall,
        answer: &LuaReply,
        at: Tick,
    ) -> Option<Result<HeldByScope, LimitExceeded>> {
        let InFlightCall { call, want, buckets, places, .. } = sent;
        self.marks.answered(call.mark, answer.begun, at);
        for (((name, place), bucket), level) in buckets.iter().zip(&call.buckets).zip(&answer.buckets) {
            let lease = self.leases_mut(name.as_ref()).and_then(|leases| leases.token_leases[*place].as_mut());
            let Some(lease) = lease else { continue };
            let token_bucket = TokenBucket::told(lease.rate, level.whole, level.micros, at);
            let took = want.is_some().then_some(if answer.granted { bucket.need } else { 0 });
            lease.granted(took, level.besides, token_bucket, answer.begun, at);
        }
        for ((name, asked), count) in places.iter().zip(&call.places).zip(&answer.places) {
            let seats = self.leases_mut(name.as_ref()).and_then(|leases| leases.seats.as_mut());
            let Some(seats) = seats else { continue };
            let taken = count.others.saturating_add(asked.running).saturating_add(asked.need);
            seats.granted(count.ours, taken > asked.most, at);
        }
        let want = want?;
        if !answer.granted {
            return self.refused(&want, at).map(Err);
        }
        self.last_draw = at;
        self.runs(&want.model);
        let mut held = HeldByScope::default();
        for ((name, place), bucket) in buckets.iter().zip(&call.buckets) {
            held[usize::from(name.is_some())][*place] = bucket.need;
        }
        Some(Ok(held))
    }

    /// Handles the result of a call whose request has gone: the grant becomes a lease.
    pub fn answered_to_nobody(&mut self, sent: InFlightCall, answer: &LuaReply, at: Tick) {
        let model = sent.want.as_ref().map(|want| Arc::clone(&want.model));
        if let (Some(model), Some(Ok(held))) = (model, self.answered(sent, answer, at)) {
            self.ended(&model, Some(&held), None, true);
        }
    }

    /// Handles a call without a result. `untouched`: it certainly had no effect.
    pub fn lost(&mut self, sent: InFlightCall, untouched: bool) {
        for ((name, place), bucket) in sent.buckets.iter().zip(&sent.call.buckets) {
            let lease = self.leases_mut(name.as_ref()).and_then(|leases| leases.token_leases[*place].as_mut());
            if let Some(lease) = lease {
                lease.lost(bucket.back, bucket.owed, bucket.unheard, untouched);
            }
        }
        for name in &sent.told {
            if let Some(leases) = self.leases_mut(name.as_ref()) {
                leases.untold = true;
            }
        }
    }

    /// Whether there is nothing to report to the store.
    pub fn is_quiet(&self) -> bool {
        self.scopes().all(|leases| {
            let seats = leases.seats.as_ref().is_none_or(|seats| seats.is_empty() && leases.running == 0);
            seats && !leases.untold && leases.token_leases().all(|(_, lease)| lease.is_empty())
        })
    }

    /// Requests running here.
    pub fn running(&self) -> u64 {
        self.whole.running
    }

    /// Whether any limit counts this tenant's requests for the model.
    pub fn limits(&self, model: &str) -> bool {
        let mut scopes = std::iter::once(&self.whole).chain(self.models.get(model));
        scopes.any(|leases| leases.seats.is_some() || leases.token_leases().next().is_some())
    }

    /// The state of a share, reported as the limit of which it is one, because that is what the tenant has
    /// agreed to.
    pub fn of_the_whole(&self, model: &str, share: LimitStatus) -> LimitStatus {
        let leases = match share.scope {
            LimitScope::Tenant => Some(&self.whole),
            LimitScope::Model => self.models.get(model),
        };
        let Some(leases) = leases else { return share };
        let rate = leases.token_leases().find(|(limit, _)| *limit == share.limit).map(|(_, lease)| lease.rate);
        match (rate, leases.seats.as_ref().filter(|_| share.limit == LimitKind::ConcurrentRequests)) {
            (Some(rate), _) => LimitStatus { most: rate.burst(), per_minute: Some(rate.per_minute()), ..share },
            (None, Some(seats)) => LimitStatus { most: seats.most, ..share },
            // The limit was removed meanwhile.
            (None, None) => share,
        }
    }

    /// Status of the limits of one scope (`None`: the tenant's own) by the store's last report, without
    /// limits not reported yet; concurrent requests are those of this gateway.
    pub fn statuses(&self, model: Option<&str>, at: Tick) -> Vec<LimitStatus> {
        let leases = match model {
            None => Some(&self.whole),
            Some(model) => self.models.get(model),
        };
        let Some(leases) = leases else { return Vec::new() };
        let by_rate = leases.token_leases().filter_map(|(limit, lease)| {
            let (remaining, reset) = lease.told_level(at)?;
            let (most, per_minute) = (lease.rate.burst(), Some(lease.rate.per_minute()));
            Some(LimitStatus { limit, scope: leases.scope, most, per_minute, remaining, reset: Some(reset) })
        });
        let places = leases.seats.as_ref().map(|seats| {
            let (limit, remaining) = (LimitKind::ConcurrentRequests, seats.most.saturating_sub(leases.running));
            LimitStatus { limit, scope: leases.scope, most: seats.most, per_minute: None, remaining, reset: None }
        });
        by_rate.chain(places).collect()
    }

    /// Unused leased tokens of the tenant's own limits.
    pub fn unspent(&self) -> u64 {
        self.whole.token_leases().map(|(_, lease)| lease.left()).fold(0, u64::saturating_add)
    }

    /// Why the store rejected, by the current limits. `None` if these would not have.
    fn refused(&self, want: &LeaseRequest, at: Tick) -> Option<LimitExceeded> {
        let scopes = || std::iter::once(&self.whole).chain(self.models.get(&want.model));
        let full = scopes().find_map(|leases| leases.known_full(at));
        let longest = || {
            LimitExceeded::for_the_longest(
                scopes().filter_map(|leases| leases.longest_wait(&want.wanted, at, TokenLease::told_wait)),
            )
        };
        full.or_else(longest)
    }

    fn empty_call(&mut self, at: Tick) -> InFlightCall {
        let (key, gateway) = (Arc::clone(&self.key), Arc::clone(&self.gateway));
        let mut call = LuaCall { key, gateway, key_life: self.key_life, ..LuaCall::default() };
        self.marks.put_on(&mut call, at);
        InFlightCall { call, want: None, buckets: Vec::new(), places: Vec::new(), told: Vec::new() }
    }

    fn scopes(&self) -> impl Iterator<Item = &ScopeLeases> {
        std::iter::once(&self.whole).chain(self.models.values())
    }

    fn leases_mut(&mut self, name: Option<&Arc<str>>) -> Option<&mut ScopeLeases> {
        match name {
            None => Some(&mut self.whole),
            Some(model) => self.models.get_mut(model),
        }
    }

    /// The scopes of a request for this model, with their index in [`HeldByScope`].
    fn each_of(&mut self, model: &str, mut act: impl FnMut(usize, &mut ScopeLeases)) {
        act(0, &mut self.whole);
        if let Some(leases) = self.models.get_mut(model) {
            act(1, leases);
        }
    }
}

impl ScopeLeases {
    fn new(model: Option<&Arc<str>>) -> Self {
        let names = LimitKind::ALL.map(|limit| match model {
            None => Arc::from(format!("all/{limit}")),
            Some(model) => Arc::from(format!("model/{limit}/{model}")),
        });
        let scope = if model.is_none() { LimitScope::Tenant } else { LimitScope::Model };
        ScopeLeases { scope, fields: names, token_leases: Default::default(), seats: None, running: 0, untold: false }
    }

    fn change(&mut self, gateway: &str, allowance: &Allowance, replicas: u32, at: Tick) {
        for ((lease, limit), field) in self.token_leases.iter_mut().zip(BY_RATE).zip(&self.fields) {
            match (&mut *lease, allowance.rate(limit)) {
                (Some(lease), Some(rate)) => lease.change(rate, replicas, at),
                (_, rate) => *lease = rate.map(|rate| TokenLease::new(rate, replicas, seed_of(gateway, field), at)),
            }
        }
        match (&mut self.seats, allowance.concurrent_requests) {
            (Some(seats), Some(most)) => seats.change(most.get(), replicas),
            (seats, most) => *seats = most.map(|most| ConcurrencyLease::new(most.get(), replicas, at)),
        }
    }

    fn can_ever_hold(&self, wanted: &Wanted) -> Result<(), LimitExceeded> {
        for (limit, lease) in self.token_leases() {
            let (need, most) = (wanted.of(limit), lease.rate.burst());
            if need > most && wanted.is_stated(limit) {
                return Err(LimitExceeded::NeverFits { limit, scope: self.scope, need, most });
            }
        }
        Ok(())
    }

    fn has(&self, wanted: &Wanted) -> bool {
        let seats = self.seats.as_ref().is_none_or(|seats| seats.has_room(self.running));
        seats && self.token_leases().all(|(limit, lease)| lease.has(lease.clipped(wanted.of(limit))))
    }

    fn draw(&mut self, wanted: &Wanted) -> HeldAmounts {
        self.running = self.running.saturating_add(1);
        let mut held = HeldAmounts::default();
        for ((held, lease), limit) in held.iter_mut().zip(&mut self.token_leases).zip(BY_RATE) {
            if let Some(lease) = lease {
                *held = lease.clipped(wanted.of(limit));
                lease.draw(*held);
            }
        }
        held
    }

    fn settle(&mut self, held: &HeldAmounts, used: Option<&Used>, lend: bool) {
        for ((held, lease), limit) in held.iter().zip(&mut self.token_leases).zip(BY_RATE) {
            if let Some(lease) = lease {
                lease.settle(*held, used.map_or(0, |used| used.of(limit)), lend);
            }
        }
    }

    fn used_unheard(&mut self, used: &Used) {
        for (lease, limit) in self.token_leases.iter_mut().zip(BY_RATE) {
            if let Some(lease) = lease {
                lease.used_unheard(used.of(limit));
            }
        }
    }

    /// The concurrency limit, if known to be full.
    fn known_full(&self, at: Tick) -> Option<LimitExceeded> {
        let seats = self.seats.as_ref().filter(|seats| !seats.has_room(self.running) && seats.is_known_full(at))?;
        let (limit, most) = (LimitKind::ConcurrentRequests, seats.most);
        let limit_status = LimitStatus { limit, scope: self.scope, most, per_minute: None, remaining: 0, reset: None };
        Some(LimitExceeded::Retryable { limit_status, retry_after: None })
    }

    /// The limit with the longest wait, and the wait in whole seconds.
    fn longest_wait(
        &self,
        wanted: &Wanted,
        at: Tick,
        wait: fn(&TokenLease, u64, Tick) -> Option<u64>,
    ) -> Option<(u64, LimitStatus)> {
        let waits = self.token_leases().filter_map(|(limit, lease)| {
            let wait = wait(lease, lease.clipped(wanted.of(limit)), at)?;
            let (remaining, reset) = lease.level(at);
            let (most, per_minute) = (lease.rate.burst(), Some(lease.rate.per_minute()));
            Some((wait, LimitStatus { limit, scope: self.scope, most, per_minute, remaining, reset: Some(reset) }))
        });
        waits.reduce(|longest, next| if next.0 > longest.0 { next } else { longest })
    }

    fn token_leases(&self) -> impl Iterator<Item = (LimitKind, &TokenLease)> {
        BY_RATE.into_iter().zip(&self.token_leases).filter_map(|(limit, lease)| Some((limit, lease.as_ref()?)))
    }

    fn bucket(&self, place: usize, at: Tick) -> BucketArgs {
        let field = Arc::clone(&self.fields[place]);
        let Some(lease) = &self.token_leases[place] else { return BucketArgs { field, ..BucketArgs::default() } };
        let (begun, remembered) = lease.remembered(at);
        let (per_minute, burst) = (lease.rate.per_minute(), lease.rate.burst());
        BucketArgs { field, per_minute, burst, begun, remembered, ..BucketArgs::default() }
    }

    fn places(&self) -> ConcurrencyArgs {
        let most = self.seats.as_ref().map_or(0, |seats| seats.most);
        let field = Arc::clone(&self.fields[BY_RATE.len()]);
        ConcurrencyArgs { field, most, running: self.running, ..ConcurrencyArgs::default() }
    }
}

/// Seed of one limit at one gateway (FNV-1a).
fn seed_of(gateway: &str, field: &str) -> u64 {
    let bytes = gateway.bytes().chain(field.bytes());
    bytes.fold(0xCBF2_9CE4_8422_2325, |seed, byte| (seed ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// Spent amount of a limit in this gateway's own limiter.
fn spent(statuses: &[LimitStatus], scope: LimitScope, limit: LimitKind) -> u64 {
    let own = statuses.iter().find(|limit_status| (limit_status.scope, limit_status.limit) == (scope, limit));
    own.map_or(0, |own| own.most.saturating_sub(own.remaining))
}

//! The task that makes all calls to the store.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::OptionFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};

use super::breaker::StoreBreaker;
use super::connection::{CallError, RedisConnection};
use super::counters::{CallResult, GrantSource};
use super::lua_call::{CallMarks, LuaCall, LuaReply};
use super::tenant_leases::{DrawResult, InFlightCall, LONGEST_LIFE};
use super::{Inner, SharedTenant, SyncCommand, TenantState};
use crate::clock::Clock;
use crate::types::{TenantId, Tick};

/// Interval at which tenants in use are checked.
const LOOK: Duration = Duration::from_millis(100);

/// Idle time after which the task itself calls the store, so that a dead connection is noticed and replaced
/// before a request needs it.
const SILENCE: Duration = Duration::from_secs(1);

/// How long the store is not called for a tenant whose stored state was unusable.
const SICK: Duration = Duration::from_secs(1);

/// Time limit of leaving; at least one call's.
const LEAVING: Duration = Duration::from_millis(500);

type PendingCalls = FuturesUnordered<Pin<Box<dyn Future<Output = FinishedCall> + Send>>>;
/// A new connection, with the mark of the call that tried it and the creation time of the store's state.
type ConnectionTrial = Pin<Box<dyn Future<Output = Result<(RedisConnection, u64, u64), CallError>> + Send>>;

/// Makes the calls that requests wait for, returns idle leases, and tries a failed store again. Ends by
/// [`RedisLimiter::leave`](super::RedisLimiter::leave).
pub struct SyncTask {
    inner: Arc<Inner>,
    commands: mpsc::Receiver<SyncCommand>,
}

/// However it ends, no request waits for the store from then on.
impl Drop for SyncTask {
    fn drop(&mut self) {
        self.inner.counters.turn(false);
    }
}

/// A completed call.
struct FinishedCall {
    /// Its tenant; `None` for a call that only checks the store.
    call: Option<(Arc<SharedTenant>, InFlightCall)>,
    result: Result<LuaReply, CallError>,
    /// Of a call that only checks the store.
    mark: u64,
    began: Tick,
    /// Its connection, because one that was given up says nothing about the next.
    connection: u64,
}

/// The task's state.
struct State {
    breaker: StoreBreaker,
    connection: Option<RedisConnection>,
    /// Number of the current connection.
    lines: u64,
    /// Last logged reason of failing trials.
    told: Option<String>,
    calls: PendingCalls,
    trial: Option<ConnectionTrial>,
    /// Tenants with a lease, a debt or running requests.
    in_use: HashMap<TenantId, Arc<SharedTenant>, ahash::RandomState>,
    next_look: Tick,
    last_call: Tick,
    /// Creation time of the store's state; a change means that it lost its data.
    greeted: Option<u64>,
    /// Marks of the calls that only check the store.
    greetings: CallMarks,
}

impl SyncTask {
    pub(super) fn new(inner: Arc<Inner>, commands: mpsc::Receiver<SyncCommand>) -> Self {
        SyncTask { inner, commands }
    }

    /// Runs until told to leave.
    pub async fn run(mut self) {
        let clock = self.inner.clock;
        let mut state = State::new(clock.now());
        loop {
            state.begin_trial(&self.inner);
            let next = state.next_deadline();
            tokio::select! {
                command = self.commands.recv() => match command {
                    Some(SyncCommand::Check(tenant)) => state.look(&self.inner, &tenant),
                    Some(SyncCommand::Release(left)) => return state.leave(&self.inner, left).await,
                    None => return,
                },
                Some(over) = state.calls.next() => state.over(&self.inner, over),
                Some(result) = OptionFuture::from(state.trial.as_mut()) => state.tried(&self.inner, result),
                () = clock.sleep_until(Some(next)) => state.look_through(&self.inner),
            }
        }
    }
}

impl State {
    fn new(at: Tick) -> Self {
        State {
            breaker: StoreBreaker::new(at),
            connection: None,
            lines: 0,
            told: None,
            calls: PendingCalls::default(),
            trial: None,
            in_use: HashMap::default(),
            next_look: at + LOOK,
            last_call: at,
            greeted: None,
            greetings: CallMarks::default(),
        }
    }

    fn next_deadline(&self) -> Tick {
        let silence = self.last_call + SILENCE;
        let look = if self.in_use.is_empty() { silence } else { self.next_look.min(silence) };
        let quiet = if self.connection.is_none() && self.in_use.is_empty() { Tick::from_nanos(u64::MAX) } else { look };
        self.breaker.trial_at().map_or(quiet, |trial| trial.min(quiet))
    }

    /// Serves this tenant's waiting requests as far as possible without a call, and makes the call needed.
    fn look(&mut self, inner: &Arc<Inner>, tenant: &Arc<SharedTenant>) {
        let at = inner.clock.now();
        let mut state = tenant.state.lock();
        if state.calling {
            return;
        }
        let served = self.next_call(inner, tenant, &mut state, at);
        if !state.listed && !state.tenant_leases.is_quiet() {
            state.listed = true;
            self.in_use.insert(tenant.id.clone(), Arc::clone(tenant));
        }
        drop(state);
        served.into_iter().for_each(|tell| tell());
    }

    /// Results are sent after the lock is released, because a reservation that nobody receives is released
    /// under the same lock.
    fn next_call(
        &mut self,
        inner: &Arc<Inner>,
        tenant: &Arc<SharedTenant>,
        state: &mut TenantState,
        at: Tick,
    ) -> Vec<Box<dyn FnOnce()>> {
        let mut said: Vec<Box<dyn FnOnce()>> = Vec::new();
        let Some(connection) =
            self.connection.clone().filter(|_| self.breaker.is_closed() && at >= state.degraded_until)
        else {
            // They get the result "unavailable".
            let unheard = std::mem::take(&mut state.waiting);
            said.push(Box::new(move || drop(unheard)));
            return said;
        };
        while let Some(pending) = state.waiting.pop_front() {
            if pending.tell.is_closed() {
                continue;
            }
            let (model, wanted) = (Arc::clone(&pending.want.model), pending.want.wanted);
            match state.tenant_leases.draw(&model, &wanted, at) {
                DrawResult::Held(held) => {
                    inner.counters.request(GrantSource::Lease);
                    let (inner, tenant) = (Arc::clone(inner), Arc::clone(tenant));
                    said.push(Box::new(move || {
                        let _ = pending.tell.send(Ok(inner.leased(&tenant, &model, &wanted, held, at)));
                    }));
                }
                DrawResult::Refused(exhausted) => said.push(Box::new(move || drop(pending.tell.send(Err(exhausted))))),
                DrawResult::AskStore => {
                    let spent_here = inner.share.statuses(&tenant.id, &model, at);
                    let behind = state.waiting.iter().filter(|mate| !mate.tell.is_closed()).map(|mate| &mate.want);
                    let sent = state.tenant_leases.call(pending.want.clone(), behind, &spent_here, at);
                    // The first one gets the result.
                    state.waiting.push_front(pending);
                    self.send(inner, connection, tenant, state, sent, at);
                    break;
                }
            }
        }
        if !state.calling
            && let Some(sent) = state.tenant_leases.tidy(false, |model| inner.share.statuses(&tenant.id, model, at), at)
            && let Some(connection) = self.connection.clone()
        {
            self.send(inner, connection, tenant, state, sent, at);
        }
        said
    }

    fn send(
        &mut self,
        inner: &Inner,
        connection: RedisConnection,
        tenant: &Arc<SharedTenant>,
        state: &mut TenantState,
        sent: InFlightCall,
        at: Tick,
    ) {
        state.calling = true;
        self.last_call = at;
        self.calls.push(Box::pin(made(
            inner.clock,
            inner.settings.timeout,
            connection,
            self.lines,
            Some((Arc::clone(tenant), sent)),
        )));
    }

    /// Handles a completed call.
    fn over(&mut self, inner: &Arc<Inner>, FinishedCall { call, result, mark, began, connection }: FinishedCall) {
        let at = inner.clock.now();
        let asked = call.as_ref().is_some_and(|(_, sent)| sent.is_asked());
        inner.counters.call(ended(&result, asked), at.since(began));
        if connection == self.lines {
            self.note_outcome(inner, &result, call.is_some(), at);
        }
        if let (Ok(answer), None) = (&result, &call) {
            self.greetings.answered(mark, answer.begun, at);
        }
        let has_forgotten = match (&result, &call) {
            (Ok(answer), Some((_, sent))) => sent.shows_a_loss(answer),
            (Ok(answer), None) => self.greeted.replace(answer.begun).is_some_and(|birth| birth != answer.begun),
            (Err(_), _) => false,
        };
        if has_forgotten {
            tracing::warn!(store = %inner.settings.address, "limits store lost its data; restoring what it had granted");
            self.tell_everything(inner);
        }
        let Some((tenant, sent)) = call else { return };
        let mut state = tenant.state.lock();
        state.calling = false;
        let (mut said, mut unheard) = (None, VecDeque::new());
        match result {
            Ok(answer) => {
                // A request that must ask again stays first.
                if let Some(result) = state.tenant_leases.answered(sent, &answer, at)
                    && let Some(pending) = state.waiting.pop_front()
                {
                    said = Some((pending, result));
                }
            }
            Err(failure) => {
                state.tenant_leases.lost(sent, matches!(failure, CallError::Error(_)));
                if asked {
                    unheard = std::mem::take(&mut state.waiting);
                }
                if let CallError::Nonsense(what) = &failure {
                    tracing::warn!(tenant = %tenant.id, what, "limits store has a foreign key");
                    state.degraded_until = at + SICK;
                }
            }
        }
        drop(state);
        drop(unheard);
        if let Some((pending, result)) = said {
            let result = result.map(|held| {
                inner.counters.request(GrantSource::Store);
                inner.leased(&tenant, &pending.want.model, &pending.want.wanted, held, at)
            });
            let _ = pending.tell.send(result);
        }
        self.look(inner, &tenant);
    }

    /// Updates the breaker by a call's result.
    fn note_outcome(&mut self, inner: &Inner, result: &Result<LuaReply, CallError>, is_tenants: bool, at: Tick) {
        let failure = match result {
            Ok(_) => None,
            // The store works; this tenant's key holds foreign data.
            Err(CallError::Nonsense(_)) if is_tenants => None,
            Err(failure) => Some(failure),
        };
        let opens = self.breaker.call_ended(failure.is_none(), at);
        let is_gone = matches!(failure, Some(CallError::Broken(_)));
        if is_gone {
            self.breaker.connection_lost(at);
        }
        if let Some(why) = failure.filter(|_| opens || is_gone) {
            tracing::warn!(store = %inner.settings.address, %why, "limits store unavailable");
            (self.connection, self.told) = (None, Some(why.to_string()));
            self.lines += 1;
            inner.counters.turn(false);
        }
    }

    /// Checks all tenants in use, and calls a store that has been silent.
    fn look_through(&mut self, inner: &Arc<Inner>) {
        let at = inner.clock.now();
        if at >= self.next_look {
            self.next_look = at + LOOK;
            for tenant in self.in_use.values().cloned().collect::<Vec<_>>() {
                self.look(inner, &tenant);
            }
            self.in_use.retain(|_, tenant| {
                let mut state = tenant.state.lock();
                state.listed = state.calling || !state.waiting.is_empty() || !state.tenant_leases.is_quiet();
                state.listed
            });
        }
        if at.since(self.last_call) >= SILENCE {
            self.last_call = at;
            let Some(connection) = self.connection.clone().filter(|_| self.breaker.is_closed()) else { return };
            let call = self.greeting(inner);
            self.calls.push(Box::pin(greeted(inner, connection, self.lines, call)));
        }
    }

    /// A call without effect on balances, which shows whether the store would accept one.
    fn greeting(&mut self, inner: &Inner) -> LuaCall {
        let mut call = LuaCall {
            key: format!("{}:greeting", inner.settings.key_prefix).into(),
            gateway: Arc::clone(&inner.gateway),
            // Outlives any idle time, because a new key would look like lost data.
            key_life: LONGEST_LIFE,
            ..LuaCall::default()
        };
        self.greetings.put_on(&mut call, inner.clock.now());
        call
    }

    fn begin_trial(&mut self, inner: &Arc<Inner>) {
        if self.breaker.trial_at().is_some_and(|due| due <= inner.clock.now()) {
            self.breaker.trial_begins();
            let (inner, call) = (Arc::clone(inner), self.greeting(inner));
            self.trial = Some(Box::pin(async move {
                let connection = RedisConnection::open(&inner.settings).await?;
                let FinishedCall { result, mark, .. } = greeted(&inner, connection.clone(), 0, call).await;
                result.map(|answer| (connection, mark, answer.begun))
            }));
        }
    }

    fn tried(&mut self, inner: &Inner, result: Result<(RedisConnection, u64, u64), CallError>) {
        let at = inner.clock.now();
        self.trial = None;
        self.breaker.trial_ended(result.is_ok(), at);
        match result {
            Ok((connection, mark, birth)) => {
                self.greetings.answered(mark, birth, at);
                tracing::info!(store = %inner.settings.address, "limits store available");
                (self.connection, self.told) = (Some(connection), None);
                self.lines += 1;
                (self.last_call, self.next_look, self.greeted) = (at, at, Some(birth));
                self.tell_everything(inner);
                inner.counters.turn(true);
            }
            Err(why) => {
                let why = why.to_string();
                if self.told.as_ref() == Some(&why) {
                    tracing::debug!(store = %inner.settings.address, why, "limits store not responding");
                } else {
                    tracing::warn!(store = %inner.settings.address, why, "limits store not responding");
                    self.told = Some(why);
                }
            }
        }
    }

    /// Marks every tenant for a complete report at the next check.
    fn tell_everything(&mut self, inner: &Inner) {
        for tenant in &inner.tenants {
            let mut state = tenant.state.lock();
            state.tenant_leases.came_back();
            state.listed = true;
            self.in_use.insert(tenant.id.clone(), Arc::clone(&tenant));
        }
    }

    /// Returns everything, as far as possible in a short time.
    async fn leave(mut self, inner: &Arc<Inner>, left: oneshot::Sender<()>) {
        let clock = inner.clock;
        let until = clock.now() + LEAVING.max(inner.settings.timeout);
        inner.counters.turn(false);
        let mut open: Vec<Arc<SharedTenant>> = self.in_use.values().cloned().collect();
        loop {
            let at = clock.now();
            let connection = self.connection.clone().filter(|_| self.breaker.is_closed());
            for tenant in open.split_off(0) {
                let mut state = tenant.state.lock();
                let unheard = std::mem::take(&mut state.waiting);
                let Some(connection) = connection.clone() else { continue };
                if state.calling {
                    open.push(Arc::clone(&tenant));
                } else if let Some(sent) =
                    state.tenant_leases.tidy(true, |model| inner.share.statuses(&tenant.id, model, at), at)
                {
                    self.send(inner, connection, &tenant, &mut state, sent, at);
                    open.push(Arc::clone(&tenant));
                }
                drop(state);
                drop(unheard);
            }
            if self.calls.is_empty() {
                break;
            }
            tokio::select! {
                Some(over) = self.calls.next() => {
                    // Its first call may have been in flight, so it was not listed as in use.
                    let whose = self.over_while_leaving(inner, over);
                    open.extend(whose.filter(|whose| open.iter().all(|tenant| !Arc::ptr_eq(tenant, whose))));
                }
                () = clock.sleep_until(Some(until)) => break,
            }
        }
        let _ = left.send(());
    }

    /// The tenant of a call.
    fn over_while_leaving(
        &mut self,
        inner: &Inner,
        FinishedCall { call, result, .. }: FinishedCall,
    ) -> Option<Arc<SharedTenant>> {
        let at = inner.clock.now();
        let (tenant, sent) = call?;
        let mut state = tenant.state.lock();
        state.calling = false;
        match result {
            Ok(answer) => state.tenant_leases.answered_to_nobody(sent, &answer, at),
            // No retry, because its time belongs to the shutdown.
            Err(_) => self.connection = None,
        }
        drop(state);
        Some(tenant)
    }
}

/// Makes one call within its time limit.
async fn made(
    clock: Clock,
    limit: Duration,
    connection: RedisConnection,
    number: u64,
    call: Option<(Arc<SharedTenant>, InFlightCall)>,
) -> FinishedCall {
    let began = clock.now();
    let empty = LuaCall::default();
    let what = call.as_ref().map_or(&empty, |(_, sent)| &sent.call);
    let result = tokio::select! {
        biased;
        result = connection.call(what) => result,
        () = clock.sleep_until(Some(began + limit)) => Err(CallError::Timeout),
    };
    FinishedCall { call, result, mark: 0, began, connection: number }
}

/// Makes a [greeting](State::greeting) within the time limit of a call.
fn greeted(
    inner: &Inner,
    connection: RedisConnection,
    number: u64,
    call: LuaCall,
) -> impl Future<Output = FinishedCall> + Send + use<> {
    let (clock, limit) = (inner.clock, inner.settings.timeout);
    async move {
        let began = clock.now();
        let result = tokio::select! {
            biased;
            result = connection.call(&call) => result,
            () = clock.sleep_until(Some(began + limit)) => Err(CallError::Timeout),
        };
        FinishedCall { call: None, result, mark: call.mark, began, connection: number }
    }
}

fn ended(result: &Result<LuaReply, CallError>, asked: bool) -> CallResult {
    match result {
        Ok(_) if !asked => CallResult::Told,
        Ok(LuaReply { granted: true, .. }) => CallResult::Granted,
        Ok(_) => CallResult::Refused,
        Err(CallError::Timeout) => CallResult::Timeout,
        Err(CallError::Broken(_)) => CallResult::Broken,
        Err(CallError::Error(_)) => CallResult::Error,
        Err(CallError::Nonsense(_)) => CallResult::Nonsense,
    }
}

//! The task that makes all calls to the store.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::OptionFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};

use super::account::{Drawn, LONGEST_LIFE, Sent};
use super::breaker::Breaker;
use super::line::{Failure, Line};
use super::numbers::{By, Ended};
use super::wire::{Answer, Call};
use super::{Desk, Inner, Tenant, Word};
use crate::clock::Clock;
use crate::units::{TenantId, Tick};

/// Interval at which tenants in use are checked.
const LOOK: Duration = Duration::from_millis(100);

/// Idle time after which the task itself calls the store, so that a dead connection is noticed and replaced
/// before a request needs it.
const SILENCE: Duration = Duration::from_secs(1);

/// How long the store is not called for a tenant whose stored state was unusable.
const SICK: Duration = Duration::from_secs(1);

/// Time limit of leaving; at least one call's.
const LEAVING: Duration = Duration::from_millis(500);

type Calls = FuturesUnordered<Pin<Box<dyn Future<Output = Over> + Send>>>;
/// A new connection, with the creation time of the store's state.
type Trial = Pin<Box<dyn Future<Output = Result<(Line, u64), Failure>> + Send>>;

/// Makes the calls that requests wait for, returns idle leases, and tries a failed store again. Ends by
/// [`Store::leave`](super::Store::leave).
pub struct Keeper {
    inner: Arc<Inner>,
    words: mpsc::Receiver<Word>,
}

/// However it ends, no request waits for the store from then on.
impl Drop for Keeper {
    fn drop(&mut self) {
        self.inner.counters.turn(false);
    }
}

/// A completed call.
struct Over {
    /// Its tenant; `None` for a call that only checks the store.
    call: Option<(Arc<Tenant>, Sent)>,
    result: Result<Answer, Failure>,
    began: Tick,
    /// Its connection, because one that was given up says nothing about the next.
    line: u64,
}

/// The task's state.
struct State {
    breaker: Breaker,
    line: Option<Line>,
    /// Number of the current connection.
    lines: u64,
    /// Last logged reason of failing trials.
    told: Option<String>,
    calls: Calls,
    trial: Option<Trial>,
    /// Tenants with a lease, a debt or running requests.
    in_use: HashMap<TenantId, Arc<Tenant>, ahash::RandomState>,
    next_look: Tick,
    last_call: Tick,
    /// Creation time of the store's state; a change means that it lost its data.
    greeted: Option<u64>,
}

impl Keeper {
    pub(super) fn new(inner: Arc<Inner>, words: mpsc::Receiver<Word>) -> Self {
        Keeper { inner, words }
    }

    /// Runs until told to leave.
    pub async fn run(mut self) {
        let clock = self.inner.clock;
        let mut state = State::new(clock.now());
        loop {
            state.begin_trial(&self.inner);
            let next = state.next_deadline();
            tokio::select! {
                word = self.words.recv() => match word {
                    Some(Word::Look(tenant)) => state.look(&self.inner, &tenant),
                    Some(Word::Leave(left)) => return state.leave(&self.inner, left).await,
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
            breaker: Breaker::new(at),
            line: None,
            lines: 0,
            told: None,
            calls: Calls::default(),
            trial: None,
            in_use: HashMap::default(),
            next_look: at + LOOK,
            last_call: at,
            greeted: None,
        }
    }

    fn next_deadline(&self) -> Tick {
        let silence = self.last_call + SILENCE;
        let look = if self.in_use.is_empty() { silence } else { self.next_look.min(silence) };
        let quiet = if self.line.is_none() && self.in_use.is_empty() { Tick::from_nanos(u64::MAX) } else { look };
        self.breaker.trial_at().map_or(quiet, |trial| trial.min(quiet))
    }

    /// Serves this tenant's waiting requests as far as possible without a call, and makes the call needed.
    fn look(&mut self, inner: &Arc<Inner>, tenant: &Arc<Tenant>) {
        let at = inner.clock.now();
        let mut desk = tenant.desk.lock();
        if desk.calling {
            return;
        }
        let served = self.next_call(inner, tenant, &mut desk, at);
        if !desk.listed && !desk.account.is_quiet() {
            desk.listed = true;
            self.in_use.insert(tenant.id.clone(), Arc::clone(tenant));
        }
        drop(desk);
        served.into_iter().for_each(|tell| tell());
    }

    /// Results are sent after the lock is released, because a reservation that nobody receives is released
    /// under the same lock.
    fn next_call(
        &mut self,
        inner: &Arc<Inner>,
        tenant: &Arc<Tenant>,
        desk: &mut Desk,
        at: Tick,
    ) -> Vec<Box<dyn FnOnce()>> {
        let mut said: Vec<Box<dyn FnOnce()>> = Vec::new();
        let Some(line) = self.line.clone().filter(|_| self.breaker.is_closed() && at >= desk.sick_until) else {
            // They get the result "unavailable".
            let unheard = std::mem::take(&mut desk.waiting);
            said.push(Box::new(move || drop(unheard)));
            return said;
        };
        while let Some(waiter) = desk.waiting.pop_front() {
            if waiter.tell.is_closed() {
                continue;
            }
            let (model, wanted) = (Arc::clone(&waiter.want.model), waiter.want.wanted);
            match desk.account.draw(&model, &wanted, at) {
                Drawn::Held(held) => {
                    inner.counters.request(By::Lease);
                    let (inner, tenant) = (Arc::clone(inner), Arc::clone(tenant));
                    said.push(Box::new(move || {
                        let _ = waiter.tell.send(Ok(inner.leased(&tenant, &model, &wanted, held, at)));
                    }));
                }
                Drawn::Refused(exhausted) => said.push(Box::new(move || drop(waiter.tell.send(Err(exhausted))))),
                Drawn::Ask => {
                    let spent_here = inner.share.standings(&tenant.id, &model, at);
                    let behind = desk.waiting.iter().filter(|mate| !mate.tell.is_closed()).map(|mate| &mate.want);
                    let sent = desk.account.call(waiter.want.clone(), behind, &spent_here, at);
                    // The first one gets the result.
                    desk.waiting.push_front(waiter);
                    self.send(inner, line, tenant, desk, sent, at);
                    break;
                }
            }
        }
        if !desk.calling
            && let Some(sent) = desk.account.tidy(false, |model| inner.share.standings(&tenant.id, model, at), at)
            && let Some(line) = self.line.clone()
        {
            self.send(inner, line, tenant, desk, sent, at);
        }
        said
    }

    fn send(&mut self, inner: &Inner, line: Line, tenant: &Arc<Tenant>, desk: &mut Desk, sent: Sent, at: Tick) {
        desk.calling = true;
        self.last_call = at;
        self.calls.push(Box::pin(made(
            inner.clock,
            inner.settings.timeout,
            line,
            self.lines,
            Some((Arc::clone(tenant), sent)),
        )));
    }

    /// Handles a completed call.
    fn over(&mut self, inner: &Arc<Inner>, Over { call, result, began, line }: Over) {
        let at = inner.clock.now();
        let asked = call.as_ref().is_some_and(|(_, sent)| sent.is_asked());
        inner.counters.call(ended(&result, asked), at.since(began));
        if line == self.lines {
            self.weigh(inner, &result, call.is_some(), at);
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
        let mut desk = tenant.desk.lock();
        desk.calling = false;
        let (mut said, mut unheard) = (None, VecDeque::new());
        match result {
            Ok(answer) => {
                // A request that must ask again stays first.
                if let Some(result) = desk.account.answered(sent, &answer, at)
                    && let Some(waiter) = desk.waiting.pop_front()
                {
                    said = Some((waiter, result));
                }
            }
            Err(failure) => {
                desk.account.lost(sent, matches!(failure, Failure::Error(_)));
                if asked {
                    unheard = std::mem::take(&mut desk.waiting);
                }
                if let Failure::Nonsense(what) = &failure {
                    tracing::warn!(tenant = %tenant.id, what, "limits store has a foreign key");
                    desk.sick_until = at + SICK;
                }
            }
        }
        drop(desk);
        drop(unheard);
        if let Some((waiter, result)) = said {
            let result = result.map(|held| {
                inner.counters.request(By::Store);
                inner.leased(&tenant, &waiter.want.model, &waiter.want.wanted, held, at)
            });
            let _ = waiter.tell.send(result);
        }
        self.look(inner, &tenant);
    }

    /// Updates the breaker by a call's result.
    fn weigh(&mut self, inner: &Inner, result: &Result<Answer, Failure>, is_tenants: bool, at: Tick) {
        let failure = match result {
            Ok(_) => None,
            // The store works; this tenant's key holds foreign data.
            Err(Failure::Nonsense(_)) if is_tenants => None,
            Err(failure) => Some(failure),
        };
        let opens = self.breaker.call_ended(failure.is_none(), at);
        let is_gone = matches!(failure, Some(Failure::Broken(_)));
        if is_gone {
            self.breaker.line_lost(at);
        }
        if let Some(why) = failure.filter(|_| opens || is_gone) {
            tracing::warn!(store = %inner.settings.address, %why, "limits store unavailable");
            (self.line, self.told) = (None, Some(why.to_string()));
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
                let mut desk = tenant.desk.lock();
                desk.listed = desk.calling || !desk.waiting.is_empty() || !desk.account.is_quiet();
                desk.listed
            });
        }
        if at.since(self.last_call) >= SILENCE {
            self.last_call = at;
            let Some(line) = self.line.clone().filter(|_| self.breaker.is_closed()) else { return };
            self.calls.push(Box::pin(greeted(inner, line, self.lines)));
        }
    }

    fn begin_trial(&mut self, inner: &Arc<Inner>) {
        if self.breaker.trial_at().is_some_and(|due| due <= inner.clock.now()) {
            self.breaker.trial_begins();
            let inner = Arc::clone(inner);
            self.trial = Some(Box::pin(async move {
                let line = Line::open(&inner.settings).await?;
                greeted(&inner, line.clone(), 0).await.result.map(|answer| (line, answer.begun))
            }));
        }
    }

    fn tried(&mut self, inner: &Inner, result: Result<(Line, u64), Failure>) {
        let at = inner.clock.now();
        self.trial = None;
        self.breaker.trial_ended(result.is_ok(), at);
        match result {
            Ok((line, birth)) => {
                tracing::info!(store = %inner.settings.address, "limits store available");
                (self.line, self.told) = (Some(line), None);
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
            let mut desk = tenant.desk.lock();
            desk.account.came_back();
            desk.listed = true;
            self.in_use.insert(tenant.id.clone(), Arc::clone(&tenant));
        }
    }

    /// Returns everything, as far as possible in a short time.
    async fn leave(mut self, inner: &Arc<Inner>, left: oneshot::Sender<()>) {
        let clock = inner.clock;
        let until = clock.now() + LEAVING.max(inner.settings.timeout);
        inner.counters.turn(false);
        let mut open: Vec<Arc<Tenant>> = self.in_use.values().cloned().collect();
        loop {
            let at = clock.now();
            let line = self.line.clone().filter(|_| self.breaker.is_closed());
            for tenant in open.split_off(0) {
                let mut desk = tenant.desk.lock();
                let unheard = std::mem::take(&mut desk.waiting);
                let Some(line) = line.clone() else { continue };
                if desk.calling {
                    open.push(Arc::clone(&tenant));
                } else if let Some(sent) =
                    desk.account.tidy(true, |model| inner.share.standings(&tenant.id, model, at), at)
                {
                    self.send(inner, line, &tenant, &mut desk, sent, at);
                    open.push(Arc::clone(&tenant));
                }
                drop(desk);
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
    fn over_while_leaving(&mut self, inner: &Inner, Over { call, result, .. }: Over) -> Option<Arc<Tenant>> {
        let at = inner.clock.now();
        let (tenant, sent) = call?;
        let mut desk = tenant.desk.lock();
        desk.calling = false;
        match result {
            Ok(answer) => desk.account.answered_to_nobody(sent, &answer, at),
            // No retry, because its time belongs to the shutdown.
            Err(_) => self.line = None,
        }
        drop(desk);
        Some(tenant)
    }
}

/// Makes one call within its time limit.
async fn made(clock: Clock, limit: Duration, line: Line, number: u64, call: Option<(Arc<Tenant>, Sent)>) -> Over {
    let began = clock.now();
    let empty = Call::default();
    let what = call.as_ref().map_or(&empty, |(_, sent)| &sent.call);
    let result = tokio::select! {
        biased;
        result = line.call(what) => result,
        () = clock.sleep_until(Some(began + limit)) => Err(Failure::Timeout),
    };
    Over { call, result, began, line: number }
}

/// A call without effect on balances, which shows whether the store would accept one.
fn greeted(inner: &Inner, line: Line, number: u64) -> impl Future<Output = Over> + Send + use<> {
    let call = Call {
        key: format!("{}:greeting", inner.settings.key_prefix).into(),
        gateway: Arc::clone(&inner.gateway),
        // Outlives any idle time, because a new key would look like lost data.
        key_life: LONGEST_LIFE,
        ..Call::default()
    };
    let (clock, limit) = (inner.clock, inner.settings.timeout);
    async move {
        let began = clock.now();
        let result = tokio::select! {
            biased;
            result = line.call(&call) => result,
            () = clock.sleep_until(Some(began + limit)) => Err(Failure::Timeout),
        };
        Over { call: None, result, began, line: number }
    }
}

fn ended(result: &Result<Answer, Failure>, asked: bool) -> Ended {
    match result {
        Ok(_) if !asked => Ended::Told,
        Ok(Answer { granted: true, .. }) => Ended::Granted,
        Ok(_) => Ended::Refused,
        Err(Failure::Timeout) => Ended::Timeout,
        Err(Failure::Broken(_)) => Ended::Broken,
        Err(Failure::Error(_)) => Ended::Error,
        Err(Failure::Nonsense(_)) => Ended::Nonsense,
    }
}

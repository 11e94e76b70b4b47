//! The store and its task under many interleavings ([`crate::sync`]).
//!
//! Time stands still, so the time limit of calls cannot hide a lost wake-up: a forgotten request waits
//! forever, which fails the run.

use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::select;

use super::connection::fake::ANSWERS;
use super::lua_call::{LuaCall, LuaReply};
use super::tests::{PlainStore, emptied};
use super::*;
use crate::admit::limit::Used;
use crate::sync::shuttle_locks::{all_end, others, task, tried};
use crate::types::Tokens;

thread_local! {
    static KEPT: RefCell<PlainStore> = RefCell::default();
    static WIDENS: RefCell<Option<Arc<SharedTenant>>> = RefCell::default();
}

fn answers(call: &LuaCall) -> Result<LuaReply, connection::CallError> {
    Ok(KEPT.with_borrow_mut(|store| store.answer(call, Tick::ZERO)))
}

fn acme() -> TenantId {
    TenantId::from("acme")
}

/// A store whose refill within a minute is negligible, and its task.
fn store(concurrent: u64) -> (RedisLimiter, SyncTask) {
    KEPT.set(PlainStore::default());
    ANSWERS.set(Some(answers));
    let clock = Clock::start();
    let address = settings::RedisAddress::read("redis://by-hand").expect("a URL");
    // A call that lets other tasks run first must not time out when time advances.
    let settings = Redis { timeout: Duration::from_secs(3600), ..Redis::at(address) };
    let (store, sync_task) = RedisLimiter::new(settings, clock, 7);
    store.reload(&limits(1600, concurrent), 1, clock.now());
    (store, sync_task)
}

fn limits(burst: u64, concurrent: u64) -> BTreeMap<TenantId, Limits> {
    let whole = Allowance {
        tokens: Rate::new(1, Some(burst)).ok(),
        concurrent_requests: NonZeroU64::new(concurrent),
        ..Allowance::default()
    };
    BTreeMap::from([(acme(), Limits { whole, models: BTreeMap::new() })])
}

/// Another gateway has spent everything; while that is reported, the limit is raised.
fn answers_until_it_is_wider(call: &LuaCall) -> Result<LuaReply, connection::CallError> {
    let Some((bucket, tenant)) = call.buckets.first().and_then(|bucket| Some((bucket, WIDENS.take()?))) else {
        return answers(call);
    };
    let all = u128::from(bucket.burst) * 60_000_000;
    KEPT.with_borrow_mut(|kept| kept.buckets.insert(Arc::clone(&bucket.field), (all, Tick::ZERO)));
    let answer = answers(call);
    tenant.state.lock().tenant_leases.change(&limits(3200, 8)[&acme()], 1, Tick::ZERO);
    answer
}

async fn is_up(store: &RedisLimiter) {
    while !store.numbers().up {
        others().await;
    }
}

/// Totals of all requests.
#[derive(Default)]
struct Sum {
    running: Cell<u64>,
    used: Cell<u64>,
    refused: Cell<u64>,
}

/// One request: reserves, runs for some steps, and settles or is dropped.
async fn visit(store: RedisLimiter, sum: Rc<Sum>, most: u64, steps: usize) {
    let wanted = Wanted { input: Tokens(0), output: Output::Stated(Tokens(50)) };
    is_up(&store).await;
    match store.reserve(&acme(), "m", &wanted, Tick::ZERO).await {
        Err(Denied::Exhausted(_)) => sum.refused.set(sum.refused.get() + 1),
        Err(Denied::Unavailable) => panic!("the store is there"),
        Ok(held) => {
            sum.running.set(sum.running.get() + 1);
            assert!(sum.running.get() <= most, "more at one time than there may be");
            for _ in 0..steps {
                others().await;
            }
            sum.running.set(sum.running.get() - 1);
            if steps.is_multiple_of(2) {
                sum.used.set(sum.used.get() + 40);
                held.settle(Used { input: Tokens(0), output: Tokens(40) }, Tick::ZERO);
            } else {
                drop(held);
            }
        }
    }
}

/// When all have ended the gateway leaves; the store then holds exactly what was used.
fn leaves(store: &RedisLimiter, sync_task: shuttle::future::JoinHandle<()>, sum: &Sum) {
    shuttle::future::block_on(store.leave());
    all_end([sync_task]);
    assert_eq!(store.running(&acme()), 0);
    assert_eq!(store.numbers().requests(GrantSource::Share), 0, "the store was there all the time");
    KEPT.with_borrow(|kept| {
        let spent = kept.buckets.values().map(|(spent, _)| *spent).sum::<u128>();
        assert_eq!(spent, u128::from(sum.used.get()) * 60_000_000, "leases came back, and nothing else");
        assert!(kept.places.values().all(|(count, _)| *count == 0), "places, too");
    });
}

#[test]
fn whoever_asks_the_store_hears_of_it_and_the_books_are_right() {
    tried(|_| {
        let (store, sync_task) = store(2);
        let sync_task = task(sync_task.run());
        let sum = Rc::new(Sum::default());
        all_end((0..4).map(|steps| task(visit(store.clone(), Rc::clone(&sum), 2, steps))));
        assert!(sum.refused.get() <= 2);
        leaves(&store, sync_task, &sum);
    });
}

#[test]
fn a_gateway_that_leaves_gives_back_what_was_granted_to_a_request_that_had_left() {
    tried(|_| {
        let (store, sync_task) = store(8);
        let sync_task = task(sync_task.run());
        shuttle::future::block_on(async {
            is_up(&store).await;
            let (acme, wanted) = (acme(), Wanted { input: Tokens(0), output: Output::Stated(Tokens(50)) });
            select(Box::pin(store.reserve(&acme, "m", &wanted, Tick::ZERO)), Box::pin(others())).await;
        });
        leaves(&store, sync_task, &Sum::default());
    });
}

#[test]
fn who_leaves_while_the_store_is_asked_takes_nothing() {
    tried(|_| {
        let (store, sync_task) = store(8);
        let sync_task = task(sync_task.run());
        let sum = Rc::new(Sum::default());
        let leaves_early = |after: usize| {
            let store = store.clone();
            async move {
                let wanted = Wanted { input: Tokens(0), output: Output::Stated(Tokens(50)) };
                let acme = acme();
                let leaves = async {
                    for _ in 0..after {
                        others().await;
                    }
                };
                is_up(&store).await;
                let asked = store.reserve(&acme, "m", &wanted, Tick::ZERO);
                select(Box::pin(asked), Box::pin(leaves)).await;
            }
        };
        let early = (1..4).map(|after| task(leaves_early(after)));
        let stay = (0..2).map(|steps| task(visit(store.clone(), Rc::clone(&sum), 8, steps)));
        all_end(early.chain(stay));
        assert_eq!(sum.refused.get(), 0);
        leaves(&store, sync_task, &sum);
    });
}

#[test]
fn who_was_refused_by_a_limit_that_was_widened_meanwhile_asks_again() {
    tried(|_| {
        let (store, sync_task) = store(8);
        ANSWERS.set(Some(answers_until_it_is_wider));
        WIDENS.set(store.0.tenants.get(&acme()).map(|tenant| Arc::clone(&tenant)));
        let sync_task = task(sync_task.run());
        let sum = Rc::new(Sum::default());
        all_end((0..3).map(|steps| task(visit(store.clone(), Rc::clone(&sum), 8, steps))));
        assert_eq!((sum.refused.get(), store.numbers().requests(GrantSource::Share)), (0, 0));
        shuttle::future::block_on(store.leave());
        all_end([sync_task]);
    });
}

/// The loss is between the gateway's last call for the tenant and its first idle check after a second, so
/// only the check of the trial knows the old state.
#[test]
fn c114_a_store_that_forgets_before_the_first_silence_is_told() {
    tried(|time| {
        let (store, sync_task) = store(0);
        let sync_task = task(sync_task.run());
        let sum = Sum { used: Cell::new(50), ..Sum::default() };
        let asks = store.clone();
        all_end([task(async move {
            is_up(&asks).await;
            let wanted = Wanted { input: Tokens(0), output: Output::Stated(Tokens(50)) };
            let held = asks.reserve(&acme(), "m", &wanted, Tick::ZERO).await.expect("there is enough");
            // All of it, because returning an idle lease would be a further call.
            held.settle(Used { input: Tokens(0), output: Tokens(50) }, Tick::ZERO);
        })]);
        KEPT.with_borrow_mut(|kept| *kept = emptied(kept));
        while KEPT.with_borrow(|kept| kept.buckets.is_empty()) {
            time.passes(Duration::from_millis(100));
            shuttle::future::block_on(others());
        }
        leaves(&store, sync_task, &sum);
    });
}

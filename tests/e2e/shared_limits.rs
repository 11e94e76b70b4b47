//! Three gateways' stores that share limits in a real Redis, offered three times the limit.
//!
//! Time is measured, not assumed: what may be let in is reckoned from the server's own clock,
//! and from ours where the server is away.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use goodput::admit::limit::settings::{Allowance, Limits, Rate};
use goodput::admit::limit::{LimitExceeded, Output, Used, Wanted};
use goodput::admit::redis::settings::{OnFailure, Redis, RedisAddress};
use goodput::admit::redis::{CallResult, Denied, GrantSource, RedisLimiter};
use goodput::clock::Clock;
use goodput::types::{TenantId, Tokens};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::parts::with_parts;
use crate::redis_server::{Kind, RedisServer, on_each};

const GATEWAYS: u32 = 3;
/// Tokens a second, and at once. A machine that is busy with other things offers three times that, too.
const RATE: u64 = 2000;
const BURST: u64 = 10_000;
/// Of a request.
const TOKENS: u64 = 50;
/// Of each gateway: together three times the limit.
const PACE: Duration = Duration::from_millis(25);

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

fn acme() -> TenantId {
    TenantId::from("acme")
}

fn tokens_limit() -> Allowance {
    Allowance { tokens: Some(Rate::new(RATE * 60, Some(BURST)).unwrap()), ..Allowance::default() }
}

fn wanted(tokens: u64) -> Wanted {
    Wanted { input: Tokens(0), output: Output::Stated(Tokens(tokens)) }
}

/// A gateway's part of the limits: the store, and the task that keeps it.
struct Gateway {
    store: RedisLimiter,
    clock: Clock,
    let_in: AtomicU64,
    keeper: tokio::task::AbortHandle,
}

impl Gateway {
    fn with(settings: Redis, allowance: &Allowance, seed: u64) -> Arc<Gateway> {
        let clock = Clock::start();
        let (store, keeper) = RedisLimiter::new(settings, clock, seed);
        let limits = Limits { whole: allowance.clone(), models: BTreeMap::new() };
        store.reload(&BTreeMap::from([(acme(), limits)]), GATEWAYS, clock.now());
        let keeper = tokio::spawn(keeper.run()).abort_handle();
        Arc::new(Gateway { store, clock, let_in: AtomicU64::new(0), keeper })
    }

    async fn ask(&self, tokens: u64) -> Result<(), Denied> {
        let reservation = self.store.reserve(&acme(), "m", &wanted(tokens), self.clock.now()).await?;
        reservation.settle(Used { input: Tokens(0), output: Tokens(tokens) }, self.clock.now());
        self.let_in.fetch_add(tokens, Ordering::Relaxed);
        Ok(())
    }

    /// Asks and asks, evenly, until it is dropped.
    async fn offer(self: Arc<Self>) {
        let mut ticks = interval(PACE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut asked = JoinSet::new();
        loop {
            ticks.tick().await;
            let gateway = Arc::clone(&self);
            asked.spawn(async move { drop(gateway.ask(TOKENS).await) });
            while asked.try_join_next().is_some() {}
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// Three gateways with a working store.
async fn three(server: &RedisServer, on_failure: OnFailure, allowance: &Allowance) -> Vec<Arc<Gateway>> {
    three_with(|| server.settings(on_failure), allowance).await
}

async fn three_with(settings: impl Fn() -> Redis, allowance: &Allowance) -> Vec<Arc<Gateway>> {
    let gateways: Vec<_> = (1..=GATEWAYS).map(|seed| Gateway::with(settings(), allowance, seed.into())).collect();
    until(|| gateways.iter().all(|gateway| gateway.store.numbers().up)).await;
    gateways
}

/// Waits for a condition of another process, which cannot wake this one. The bound is reached only on an
/// error, whatever the load of the machine.
async fn until(mut what: impl FnMut() -> bool) {
    let mut ticks = interval(Duration::from_millis(5));
    for _ in 0..24_000 {
        if what() {
            return;
        }
        ticks.tick().await;
    }
    panic!("it never came true");
}

fn let_in(gateways: &[Arc<Gateway>]) -> u64 {
    gateways.iter().map(|gateway| gateway.let_in.load(Ordering::Relaxed)).sum()
}

fn requests(gateways: &[Arc<Gateway>], by: GrantSource) -> u64 {
    gateways.iter().map(|gateway| gateway.store.numbers().requests(by)).sum()
}

/// The inflow in this time.
fn flow(time: Duration) -> f64 {
    RATE as f64 * time.as_secs_f64()
}

fn three_gateways_let_in_what_the_limit_allows_and_no_more(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        runtime().block_on(async {
            let gateways = three(&server, OnFailure::Open, &tokens_limit()).await;
            let start = server.time();
            let mut offering = JoinSet::new();
            gateways.iter().for_each(|gateway| drop(offering.spawn(Arc::clone(gateway).offer())));
            // Exactly the limit passes. The server's clock is read after the count, because requests in
            // between must be within the bound.
            let mut passed = Duration::ZERO;
            until(|| {
                let count = let_in(&gateways) as f64;
                passed = server.time() - start;
                let allowed = BURST as f64 + flow(passed);
                assert!(count <= 1.02 * allowed, "{count} of {allowed}");
                passed > Duration::from_secs(6) && count >= 0.97 * allowed
            })
            .await;
            assert_eq!(requests(&gateways, GrantSource::Share), 0, "the store was there all the time");
            let calls: u64 = gateways.iter().map(|gateway| gateway.store.numbers().calls.iter().sum::<u64>()).sum();
            let asked = requests(&gateways, GrantSource::Lease) + requests(&gateways, GrantSource::Store);
            let parts: Vec<u64> = gateways.iter().map(|gateway| gateway.let_in.load(Ordering::Relaxed)).collect();
            let worst = parts.iter().map(|part| part.abs_diff(parts.iter().sum::<u64>() / 3)).max().unwrap_or(0);
            assert!(worst * 5 < parts.iter().sum::<u64>(), "each has about a third: {parts:?}");
            assert!((calls as f64) < passed.as_secs_f64() * 3.0 * 100.0, "{calls} calls for {asked} requests let in");
        });
        Ok(())
    });
}

/// Fault of the server in the middle of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Harm {
    Killed,
    Paused,
}

/// Offers three times the limit before, while and after the server is away.
fn run_with(kind: Kind, harm: Harm, on_failure: OnFailure) {
    with_parts(kind.name(), || {
        let mut server = RedisServer::start(kind)?;
        runtime().block_on(async {
            // One that hangs is noticed by its silence alone.
            let timeout = if harm == Harm::Paused { Duration::from_secs(2) } else { Duration::from_secs(60) };
            let settings = || Redis { timeout, ..server.settings(on_failure) };
            let gateways = three_with(settings, &tokens_limit()).await;
            let clock = Clock::start();
            let mut offering = JoinSet::new();
            gateways.iter().for_each(|gateway| drop(offering.spawn(Arc::clone(gateway).offer())));
            // The limit is used up.
            until(|| clock.now().as_nanos() > 2_000_000_000 && let_in(&gateways) > BURST).await;

            // Most tokens in leases at any time.
            let unspent = BURST / 16 + u64::from(GATEWAYS) * TOKENS;
            let outage = clock.now();
            match harm {
                Harm::Killed => server.kill(),
                Harm::Paused => server.signal("STOP"),
            }
            until(|| gateways.iter().all(|gateway| !gateway.store.numbers().up)).await;
            let (noticed, before) = (clock.now(), let_in(&gateways));
            let (mut meanwhile, mut length) = (0, Duration::ZERO);
            until(|| {
                meanwhile = let_in(&gateways) - before;
                length = clock.now().since(noticed);
                // The shares are served.
                let is_served = on_failure == OnFailure::Closed || meanwhile as f64 >= 0.9 * flow(length);
                length > Duration::from_secs(2) && is_served
            })
            .await;
            match harm {
                Harm::Killed => server.restart(),
                Harm::Paused => server.signal("CONT"),
            }
            until(|| gateways.iter().all(|gateway| gateway.store.numbers().up)).await;
            let away = clock.now().since(outage);
            let (asked, back) = (requests(&gateways, GrantSource::Store), clock.now());
            // It is used again without a restart.
            until(|| clock.now().since(back) > Duration::from_secs(2) && requests(&gateways, GrantSource::Store) > asked).await;

            let count = let_in(&gateways);
            let allowed = BURST as f64 + flow(clock.now().since(goodput::types::Tick::ZERO));
            let beyond = count as f64 - allowed;
            // Only silence distinguishes a hanging server from a slow one, so a busy machine's may be
            // abandoned repeatedly.
            let outages = gateways.iter().map(|gateway| gateway.store.numbers().given_up).max().unwrap_or(1).max(1);
            let bound = outages as f64 * (unspent + BURST) as f64 + flow(away);
            let what = format!(
                "{harm:?} {on_failure:?}: {count} let in, {allowed} allowed, {beyond} beyond, {bound} is the bound; {meanwhile} in {length:?} without the store"
            );
            assert!(beyond <= bound, "{what}");
            match on_failure {
                OnFailure::Open => {
                    let at_most = unspent as f64 + BURST as f64 + flow(length);
                    assert!(meanwhile as f64 <= at_most, "and no more than they hold: {what}");
                    let is_told = outages > 1 || beyond < 0.1 * allowed;
                    assert!(is_told, "what was let in meanwhile is told to the store when it is back: {what}");
                    assert_eq!(requests(&gateways, GrantSource::Nobody), 0);
                }
                OnFailure::Closed => {
                    assert!(meanwhile <= unspent, "nothing but leases: {what}");
                    assert!(beyond <= bound, "{what}");
                    assert_eq!(requests(&gateways, GrantSource::Share), 0);
                    assert!(requests(&gateways, GrantSource::Nobody) > 0);
                }
            }
        });
        Ok(())
    });
}

fn a_server_that_is_killed_and_comes_back_empty_costs_no_second_burst(kind: Kind) {
    run_with(kind, Harm::Killed, OnFailure::Open);
}

fn a_server_that_hangs_holds_nobody_up_and_is_used_again(kind: Kind) {
    run_with(kind, Harm::Paused, OnFailure::Open);
}

fn closed_means_closed_while_the_server_is_killed(kind: Kind) {
    run_with(kind, Harm::Killed, OnFailure::Closed);
}

fn closed_means_closed_while_the_server_hangs(kind: Kind) {
    run_with(kind, Harm::Paused, OnFailure::Closed);
}

fn places_are_shared_and_those_of_a_gateway_that_dies_come_back(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        runtime().block_on(async {
            let allowance = Allowance { concurrent_requests: std::num::NonZeroU64::new(4), ..Allowance::default() };
            let gateways = three(&server, OnFailure::Open, &allowance).await;
            let mut held = Vec::new();
            for gateway in gateways.iter().chain(&gateways).take(4) {
                let now = gateway.clock.now();
                held.push(gateway.store.reserve(&acme(), "m", &wanted(1), now).await.expect("there is room"));
            }
            for gateway in &gateways {
                let fifth = gateway.store.reserve(&acme(), "m", &wanted(1), gateway.clock.now()).await;
                assert!(
                    matches!(fifth, Err(Denied::Exhausted(LimitExceeded::Retryable { retry_after: None, .. }))),
                    "{fifth:?}"
                );
            }
            // Another gateway gets the place of a request that ended.
            drop(held.remove(0));
            let found = loop {
                let gateway = &gateways[2];
                if let Ok(found) = gateway.store.reserve(&acme(), "m", &wanted(1), gateway.clock.now()).await {
                    break found;
                }
                tokio::task::yield_now().await;
            };
            // One gateway dies with its lease: nobody reports it again, and it is forgotten. (The test ages
            // the stored data instead of waiting.)
            gateways[1].keeper.abort();
            until(|| {
                let kept = server.say(&["HGET", "goodput:limits:acme", "all/concurrent_requests"]).expect("an answer");
                let kept = kept.lines().nth(1).unwrap_or_default().to_owned();
                let name = format!("{:016x} ", 2);
                let old: String = kept
                    .split_inclusive(';')
                    .map(|each| if each.starts_with(&name) { format!("{name}1 1;") } else { each.to_owned() })
                    .collect();
                server.say(&["HSET", "goodput:limits:acme", "all/concurrent_requests", &old]).is_ok()
            })
            .await;
            let gateway = &gateways[0];
            let again = loop {
                if let Ok(again) = gateway.store.reserve(&acme(), "m", &wanted(1), gateway.clock.now()).await {
                    break again;
                }
                tokio::task::yield_now().await;
            };
            drop((found, again, held));
        });
        Ok(())
    });
}

fn a_gateway_that_leaves_gives_everything_back(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        runtime().block_on(async {
            // A minute's inflow is one token, so spent tokens stay spent.
            let allowance = Allowance { tokens: Some(Rate::new(1, Some(4800)).unwrap()), ..Allowance::default() };
            let gateways = three(&server, OnFailure::Open, &allowance).await;
            for _ in 0..40 {
                gateways[0].ask(10).await.expect("there is enough");
            }
            let unspent = gateways[0].store.numbers().unspent;
            assert!((1..=100).contains(&unspent), "{unspent} is leased: a sixteenth of the burst by three at most");
            gateways[0].store.leave().await;
            let kept = server.say(&["HGET", "goodput:limits:acme", "all/tokens_per_minute"]).expect("an answer");
            let spent: u64 =
                kept.lines().nth(1).and_then(|value| value.split(' ').next()?.parse().ok()).expect("a bucket");
            assert!((399..=400).contains(&spent), "{kept}");
        });
        Ok(())
    });
}

fn who_leaves_while_the_store_is_asked_takes_nothing(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        runtime().block_on(async {
            let allowance = Allowance {
                tokens: Some(Rate::new(1, Some(4800)).unwrap()),
                concurrent_requests: std::num::NonZeroU64::new(1000),
                ..Allowance::default()
            };
            let gateways = three(&server, OnFailure::Open, &allowance).await;
            let (store, clock) = (&gateways[0].store, gateways[0].clock);
            // With ever more patience, until some were answered; from a lease that is large enough
            // all others are, and the store is not asked any more.
            let granted = || store.numbers().calls(CallResult::Granted);
            for patience in (1..400).take_while(|_| granted() < 20) {
                let (acme, wanted) = (acme(), wanted(400));
                let mut asked = std::pin::pin!(store.reserve(&acme, "m", &wanted, clock.now()));
                // Polled, left alone for a while, and dropped: before, while or after it is answered.
                let early = asked.as_mut().now_or_never();
                for _ in 0..patience * 40 {
                    tokio::task::yield_now().await;
                }
                drop(early);
            }
            assert!(granted() > 0, "the store was asked");
            until(|| store.running(&acme()) == 0).await;
            store.leave().await;
            let kept = |field| server.say(&["HGET", "goodput:limits:acme", field]).expect("an answer");
            let spent = kept("all/tokens_per_minute");
            assert!(spent.lines().nth(1).is_some_and(|value| value.starts_with("0 ")), "{spent}");
            assert_eq!(kept("all/concurrent_requests"), "$0\r\n\r\n");
        });
        Ok(())
    });
}

/// Tokens that the store has as spent.
fn kept(server: &RedisServer) -> u64 {
    let kept = server.say(&["HGET", "goodput:limits:acme", "all/tokens_per_minute"]).expect("an answer");
    kept.lines().nth(1).and_then(|value| value.split(' ').next()?.parse().ok()).unwrap_or(0)
}

/// One gateway has nearly all of the tenant's requests: far more than its share.
fn c114_a_store_that_forgot_is_told_without_being_asked(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        runtime().block_on(async {
            // A minute's inflow is one token, so spent tokens stay spent.
            let allowance = Allowance { tokens: Some(Rate::new(1, Some(4800)).unwrap()), ..Allowance::default() };
            let gateways = three(&server, OnFailure::Open, &allowance).await;
            gateways[1].ask(100).await.expect("there is enough");
            for _ in 0..40 {
                gateways[0].ask(100).await.expect("there is enough");
            }
            // Idle leases have come home.
            until(|| kept(&server) <= 4100 && gateways.iter().all(|gateway| gateway.store.numbers().unspent == 0))
                .await;
            server.say(&["FLUSHALL"]).expect("it is empty");
            // A gateway that did not know the old balances sees new ones, until the others have reported.
            let early = gateways[2].ask(3000).await.is_ok();
            let owed = 4100 + if early { 3000 } else { 0 };
            // However long that takes, a hundred do not flow off meanwhile.
            until(|| kept(&server) + 100 >= owed).await;
            for gateway in &gateways {
                let refused = gateway.ask(4800 - 4000).await;
                assert!(matches!(refused, Err(Denied::Exhausted(LimitExceeded::Retryable { .. }))), "{refused:?}");
            }
            assert!(kept(&server) <= owed + 3, "once: {} of {owed}", kept(&server));
        });
        Ok(())
    });
}

/// A restart from a dump, and no append-only file: what was granted since the dump is unknown to the store.
fn c114_a_store_that_returns_with_older_data_is_told_what_it_granted_since(kind: Kind) {
    with_parts(kind.name(), || {
        let mut server = RedisServer::start(kind)?;
        runtime().block_on(async {
            // A minute's inflow is one token, so spent tokens stay spent.
            let allowance = Allowance { tokens: Some(Rate::new(1, Some(4800)).unwrap()), ..Allowance::default() };
            let gateways = three(&server, OnFailure::Open, &allowance).await;
            let are_home = |spent: u64| {
                let unspent = gateways.iter().all(|gateway| gateway.store.numbers().unspent == 0);
                unspent && (spent - 100..=spent).contains(&kept(&server))
            };
            for gateway in [0, 0, 0, 1, 2] {
                gateways[gateway].ask(200).await.expect("there is enough");
            }
            until(|| are_home(1000)).await;
            assert_eq!(server.say(&["SAVE"]).expect("it is written"), "+OK\r\n");
            for _ in 0..10 {
                gateways[0].ask(200).await.expect("there is enough");
            }
            gateways[1].ask(100).await.expect("there is enough");
            until(|| are_home(3100)).await;
            server.kill();
            until(|| gateways.iter().all(|gateway| !gateway.store.numbers().up)).await;
            server.restart();
            until(|| gateways.iter().all(|gateway| gateway.store.numbers().up)).await;
            // However long that takes, a hundred do not flow off meanwhile.
            until(|| kept(&server) + 100 >= 3100).await;
            for gateway in &gateways {
                let refused = gateway.ask(4800 - 3000).await;
                assert!(matches!(refused, Err(Denied::Exhausted(LimitExceeded::Retryable { .. }))), "{refused:?}");
            }
            // A gateway's last answer may have been from before another one's lease came home.
            assert!(kept(&server) <= 3300, "once: {}", kept(&server));
        });
        Ok(())
    });
}

/// It has no memory left, or has become a replica of nobody: every script fails, and nothing is lost.
fn a_store_that_takes_no_writes_is_away_until_it_does(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        let harms: [[&[&str]; 2]; 2] = [
            [&["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"]],
            [&["REPLICAOF", "127.0.0.1", "1"], &["REPLICAOF", "NO", "ONE"]],
        ];
        for [harm, cure] in harms {
            server.say(&["FLUSHALL"]).expect("it is empty");
            runtime().block_on(async {
                // A minute's inflow is one token, so spent tokens stay spent.
                let allowance = Allowance { tokens: Some(Rate::new(1, Some(4800)).unwrap()), ..Allowance::default() };
                let gateways = three(&server, OnFailure::Open, &allowance).await;
                gateways[0].ask(300).await.expect("there is enough");
                until(|| gateways[0].store.numbers().unspent == 0 && kept(&server).abs_diff(300) < 100).await;
                assert_eq!(server.say(harm).expect("an answer"), "+OK\r\n");
                until(|| gateways.iter().all(|gateway| !gateway.store.numbers().up)).await;
                for _ in 0..5 {
                    gateways[1].ask(100).await.expect("its share holds that");
                }
                assert_eq!(requests(&gateways, GrantSource::Share), 5, "{harm:?}");
                assert_eq!(requests(&gateways, GrantSource::Nobody), 0, "{harm:?}");
                assert_eq!(server.say(cure).expect("an answer"), "+OK\r\n");
                until(|| gateways.iter().all(|gateway| gateway.store.numbers().up)).await;
                until(|| kept(&server) + 100 >= 800).await;
                assert!(kept(&server) <= 800, "{harm:?}: it is told once, {}", kept(&server));
            });
        }
        Ok(())
    });
}

/// Killed with a request running: its tokens stay spent, and the next process has no more than the rest.
fn what_a_killed_gateway_reserved_stays_spent(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        runtime().block_on(async {
            let allowance = Allowance { tokens: Some(Rate::new(1, Some(1000)).unwrap()), ..Allowance::default() };
            let killed = Gateway::with(server.settings(OnFailure::Open), &allowance, 1);
            until(|| killed.store.numbers().up).await;
            let running = killed.store.reserve(&acme(), "m", &wanted(600), killed.clock.now()).await;
            killed.keeper.abort();
            drop((running.expect("there is enough"), killed));
            let next = Gateway::with(server.settings(OnFailure::Open), &allowance, 2);
            until(|| next.store.numbers().up).await;
            let refused = next.ask(500).await;
            assert!(matches!(refused, Err(Denied::Exhausted(LimitExceeded::Retryable { .. }))), "{refused:?}");
            next.ask(300).await.expect("the rest is there");
            assert!(kept(&server) >= 890, "{}", kept(&server));
        });
        Ok(())
    });
}

fn what_is_not_ours_harms_one_tenant_only(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        runtime().block_on(async {
            server.say(&["SET", "goodput:limits:acme", "something else"]).expect("it is set");
            let gateways = three(&server, OnFailure::Open, &tokens_limit()).await;
            let gateway = &gateways[0];
            let now = gateway.clock.now();
            let limits = Limits { whole: tokens_limit(), models: BTreeMap::new() };
            let other = TenantId::from("globex");
            gateway.store.reload(&BTreeMap::from([(acme(), limits.clone()), (other.clone(), limits)]), GATEWAYS, now);
            for _ in 0..5 {
                gateway.ask(50).await.expect("its share is there");
            }
            let numbers = gateway.store.numbers();
            assert!(numbers.calls(CallResult::Nonsense) >= 1 && numbers.up, "{numbers:?}");
            assert_eq!(numbers.requests(GrantSource::Share), 5);
            let held = gateway.store.reserve(&other, "m", &wanted(50), now).await.expect("a tenant of its own");
            assert_eq!(gateway.store.numbers().requests(GrantSource::Store), 1);
            drop(held);
            // Somebody clears it away.
            server.say(&["DEL", "goodput:limits:acme"]).expect("it is gone");
            loop {
                // Until the next trial its share applies, which the test uses at once.
                let _ = gateway.ask(50).await;
                if gateway.store.numbers().requests(GrantSource::Store) > 1 {
                    break;
                }
                tokio::task::yield_now().await;
            }
        });
        Ok(())
    });
}

fn a_store_behind_a_password_wants_it_and_no_log_shows_it(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::with(kind, &["--requirepass", "s3cret"])?;
        runtime().block_on(async {
            let with = |query: &str| {
                let address = RedisAddress::read(&format!("{}{query}", server.url())).expect("a URL of ours");
                Redis { address, ..server.settings(OnFailure::Closed) }
            };
            let wrong = Gateway::with(with("?pass=wr0ng"), &tokens_limit(), 1);
            let none = Gateway::with(with(""), &tokens_limit(), 2);
            let right = Gateway::with(with("?pass=s3cret"), &tokens_limit(), 3);
            until(|| right.store.numbers().up).await;
            right.ask(50).await.expect("it has the password");
            // A user with no more rights than the documentation names.
            let rules = documented_user();
            let rules = rules.split(' ').skip(2).map(|word| if word == ">SECRET" { ">narrow" } else { word });
            let words: Vec<&str> = ["AUTH", "s3cret"].into_iter().collect();
            server.say_all(&[&words, &["ACL", "SETUSER"].into_iter().chain(rules).collect::<Vec<_>>()]);
            let narrow = Gateway::with(with("?user=gateway&pass=narrow"), &tokens_limit(), 4);
            until(|| narrow.store.numbers().up).await;
            narrow.ask(50).await.expect("it may do all that it needs");
            for gateway in [wrong, none] {
                assert_eq!(gateway.ask(50).await, Err(Denied::Unavailable));
                assert!(!format!("{:?}", gateway.store).contains("wr0ng"));
                assert!(!gateway.store.numbers().up);
            }
        });
        Ok(())
    });
}

/// The line of the documentation that makes a user.
pub fn documented_user() -> String {
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/shared-limits.md")).expect("it is there");
    page.lines().find(|line| line.starts_with("ACL SETUSER ")).expect("the page makes a user").to_owned()
}

/// Accepts connections, and responds with something that is not RESP.
#[test]
fn an_invalid_store_url_is_rejected() {
    with_parts("redis", || {
        runtime().block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = format!("redis://{}", listener.local_addr().expect("it is bound"));
            let mut talking = JoinSet::new();
            talking.spawn(async move {
                while let Ok((mut socket, _)) = listener.accept().await {
                    let nonsense = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
                    let _ = tokio::io::AsyncWriteExt::write_all(&mut socket, nonsense).await;
                }
            });
            for on_failure in [OnFailure::Open, OnFailure::Closed] {
                let settings = Redis { on_failure, ..Redis::at(RedisAddress::read(&address).expect("a URL")) };
                let gateway = Gateway::with(settings, &tokens_limit(), 1);
                for _ in 0..3 {
                    let asked = gateway.ask(50).await;
                    match on_failure {
                        OnFailure::Open => assert_eq!(asked, Ok(())),
                        OnFailure::Closed => assert_eq!(asked, Err(Denied::Unavailable)),
                    }
                }
                assert!(!gateway.store.numbers().up);
            }
        });
        Ok(())
    });
}

on_each! {
    three_gateways_let_in_what_the_limit_allows_and_no_more,
    a_server_that_is_killed_and_comes_back_empty_costs_no_second_burst,
    a_server_that_hangs_holds_nobody_up_and_is_used_again,
    closed_means_closed_while_the_server_is_killed,
    closed_means_closed_while_the_server_hangs,
    places_are_shared_and_those_of_a_gateway_that_dies_come_back,
    a_gateway_that_leaves_gives_everything_back,
    who_leaves_while_the_store_is_asked_takes_nothing,
    c114_a_store_that_forgot_is_told_without_being_asked,
    c114_a_store_that_returns_with_older_data_is_told_what_it_granted_since,
    a_store_that_takes_no_writes_is_away_until_it_does,
    what_a_killed_gateway_reserved_stays_spent,
    what_is_not_ours_harms_one_tenant_only,
    a_store_behind_a_password_wants_it_and_no_log_shows_it,
}

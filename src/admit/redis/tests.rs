//! Several gateways over one reference store, in virtual time. A real server is tested
//! elsewhere to do the same.

use std::collections::HashMap;
use std::num::NonZeroU64;

use proptest::prelude::*;

use super::lease::{MEMORY, TURN};
use super::lua_call::{BucketLevel, COUNT_LIFE, ConcurrencyCount, LuaCall, LuaReply};
use super::tenant_leases::{HeldByScope, InFlightCall};
use super::*;
use crate::admit::limit::{LimitKind, Used};
use crate::types::Tokens;
use std::time::Duration;

const MODEL: &str = "m";

/// Spent, in microseconds at one per minute, and the moment.
type Kept = (u128, Tick);

#[derive(Default)]
pub(super) struct PlainStore {
    begun: u64,
    pub(super) buckets: HashMap<Arc<str>, Kept>,
    /// What gateways remembered of lost state.
    lost: HashMap<Arc<str>, Kept>,
    pub(super) places: HashMap<(Arc<str>, Arc<str>), (u64, Tick)>,
    calls: usize,
}

const MINUTE: u128 = 60_000_000;

impl PlainStore {
    pub(super) fn answer(&mut self, call: &LuaCall, at: Tick) -> LuaReply {
        self.calls += 1;
        if self.begun == 0 {
            self.begun = at.as_nanos() + 1;
        }
        let mut granted = true;
        for ask in &call.buckets {
            let (spent, as_of) = self.buckets.get(&ask.field).copied().unwrap_or((0, at));
            let flow = at.since(as_of).as_micros() * u128::from(ask.per_minute);
            let mut forgotten = 0;
            if ask.begun != 0 && ask.begun != self.begun {
                let (known, as_of) = self.lost.get(&ask.field).copied().unwrap_or((0, at));
                let known = known.saturating_sub(at.since(as_of).as_micros() * u128::from(ask.per_minute));
                let remembered = u128::from(ask.remembered) * MINUTE;
                forgotten = remembered.saturating_sub(known.div_ceil(MINUTE) * MINUTE);
                if forgotten > 0 {
                    self.lost.insert(Arc::clone(&ask.field), (remembered, at));
                }
            }
            let spent = spent.saturating_sub(flow) + forgotten + u128::from(ask.unheard) * MINUTE;
            let spent = spent.saturating_sub(u128::from(ask.back) * MINUTE) + u128::from(ask.owed) * MINUTE;
            self.buckets.insert(Arc::clone(&ask.field), (spent, at));
            let fits = spent + u128::from(ask.need) * MINUTE <= u128::from(ask.burst) * MINUTE;
            granted &= ask.need == 0 || fits;
        }
        let mut others = Vec::new();
        for ask in &call.places {
            let theirs = self
                .places
                .iter()
                .filter(|((field, gateway), (_, till))| *field == ask.field && *gateway != call.gateway && *till > at);
            let sum: u64 = theirs.map(|(_, (count, _))| count).sum();
            granted &= ask.need == 0 || sum + ask.running + ask.need <= ask.most;
            others.push(sum);
        }
        let buckets = call.buckets.iter().map(|ask| {
            let (spent, _) = self.buckets[&ask.field];
            let room = (u128::from(ask.burst) * MINUTE).saturating_sub(spent + u128::from(ask.need) * MINUTE) / MINUTE;
            let besides = if granted { ask.besides.min(room as u64) } else { 0 };
            let taken = if granted { u128::from(ask.need + besides) * MINUTE } else { 0 };
            self.buckets.insert(Arc::clone(&ask.field), (spent + taken, at));
            BucketLevel { whole: ((spent + taken) / MINUTE) as u64, micros: ((spent + taken) % MINUTE) as u64, besides }
        });
        let buckets = buckets.collect();
        let places = call.places.iter().zip(others).map(|(ask, others)| {
            let room = ask.most.saturating_sub(others + ask.running);
            let ours = ask.running + if granted { (ask.need + ask.besides).min(room) } else { 0 };
            self.places.insert((Arc::clone(&ask.field), Arc::clone(&call.gateway)), (ours, at + COUNT_LIFE));
            ConcurrencyCount { ours, others }
        });
        let places = places.collect();
        LuaReply { granted, now: at.as_nanos() / 1000, begun: self.begun, buckets, places }
    }

    /// Spent tokens of a limit, rounded up.
    fn spent(&self, field: &str) -> u64 {
        self.buckets.get(field).map_or(0, |(spent, _)| spent.div_ceil(MINUTE) as u64)
    }
}

fn limits(per_minute: u64, burst: u64, most: u64) -> Limits {
    let rate = |a, b| Rate::new(a, Some(b)).unwrap();
    let whole = Allowance {
        tokens: Some(rate(per_minute, burst)),
        requests: Some(rate(per_minute, burst)),
        concurrent_requests: NonZeroU64::new(most),
        ..Allowance::default()
    };
    let of_model = Allowance { output_tokens: Some(rate(per_minute, burst)), ..Allowance::default() };
    Limits { whole, models: [(Arc::from(MODEL), of_model)].into() }
}

fn all_leases(limits: &Limits, gateways: u32) -> Vec<TenantLeases> {
    let tenant_leases =
        |gateway: u32| TenantLeases::new("key".into(), gateway.to_string().into(), limits, gateways, Tick::ZERO);
    (0..gateways).map(tenant_leases).collect()
}

fn wanted(input: u64, output: u64) -> Wanted {
    Wanted { input: Tokens(input), output: Output::Stated(Tokens(output)) }
}

/// A request at a gateway while nothing fails.
fn ask(
    tenant_leases: &mut TenantLeases,
    store: &mut PlainStore,
    model: &str,
    wanted: &Wanted,
    at: Tick,
) -> Result<HeldByScope, LimitExceeded> {
    match tenant_leases.draw(model, wanted, at) {
        DrawResult::Held(held) => Ok(held),
        DrawResult::Refused(exhausted) => Err(exhausted),
        DrawResult::AskStore => {
            let want = LeaseRequest { model: model.into(), wanted: *wanted };
            let sent = tenant_leases.call(want, std::iter::empty(), &[], at);
            let answer = store.answer(&sent.call, at);
            tenant_leases.answered(sent, &answer, at).expect("a request asked")
        }
    }
}

fn look(tenant_leases: &mut TenantLeases, store: &mut PlainStore, everything: bool, at: Tick) {
    while let Some(sent) = tenant_leases.tidy(everything, |_| Vec::new(), at) {
        let answer = store.answer(&sent.call, at);
        assert!(tenant_leases.answered(sent, &answer, at).is_none());
        if !everything {
            break;
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Pass {
        millis: u64,
    },
    Ask {
        gateway: prop::sample::Index,
        input: u64,
        output: u64,
        limited_model: bool,
    },
    End {
        which: prop::sample::Index,
        used: Option<(u64, u64)>,
    },
    Look,
    /// The store loses its data, and every gateway will learn of it.
    Forget,
    /// The next call gets no result; whether it took effect.
    Lose {
        gateway: prop::sample::Index,
        done: bool,
        untouched: bool,
    },
}

fn any_step(can_lose: bool) -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    let lose = (index(), any::<bool>(), any::<bool>()).prop_map(|(gateway, done, untouched)| Step::Lose {
        gateway,
        done,
        untouched: untouched && !done,
    });
    prop_oneof![
        2 => (0..700_u64).prop_map(|millis| Step::Pass { millis }),
        6 => (index(), 0..40_u64, 0..60_u64, any::<bool>())
            .prop_map(|(gateway, input, output, limited_model)| Step::Ask { gateway, input, output, limited_model }),
        5 => (index(), prop::option::of((0..60_u64, 0..80_u64))).prop_map(|(which, used)| Step::End { which, used }),
        2 => Just(Step::Look),
        u32::from(can_lose) => lose,
    ]
}

struct Running {
    gateway: usize,
    model: &'static str,
    held: HeldByScope,
}

/// State of a history.
struct Played {
    all_leases: Vec<TenantLeases>,
    store: PlainStore,
    now: Tick,
    /// Tokens used by ended requests.
    used: u64,
    most_running: u64,
}

fn play(limits: &Limits, steps: &[Step]) -> Played {
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(limits, 3));
    let (mut now, mut used_in_all, mut most_running) = (Tick::ZERO, 0, 0);
    let mut running: Vec<Running> = Vec::new();
    let end =
        |all_leases: &mut Vec<TenantLeases>, Running { gateway, model, held }: Running, used: Option<(u64, u64)>| {
            let used = used.map(|(input, output)| Used { input: Tokens(input), output: Tokens(output) });
            all_leases[gateway].ended(model, Some(&held), used.as_ref(), true);
            used.map_or(0, |used| (used.input + used.output).0)
        };
    for step in steps {
        match step {
            Step::Pass { millis } => now = now + Duration::from_millis(*millis),
            Step::Ask { gateway, input, output, limited_model } => {
                let gateway = gateway.index(all_leases.len());
                let model = if *limited_model { MODEL } else { "other" };
                let asked = ask(&mut all_leases[gateway], &mut store, model, &wanted(*input, *output), now);
                running.extend(asked.map(|held| Running { gateway, model, held }));
                most_running = most_running.max(running.len() as u64);
            }
            Step::End { which, used } if !running.is_empty() => {
                let ended = running.swap_remove(which.index(running.len()));
                used_in_all += end(&mut all_leases, ended, *used);
            }
            Step::End { .. } => {}
            Step::Look => all_leases.iter_mut().for_each(|tenant_leases| look(tenant_leases, &mut store, false, now)),
            Step::Forget => {
                store = emptied(&store);
                all_leases.iter_mut().for_each(TenantLeases::came_back);
            }
            Step::Lose { gateway, done, untouched } => {
                let tenant_leases = &mut all_leases[gateway.index(3)];
                let want = LeaseRequest { model: MODEL.into(), wanted: wanted(1, 1) };
                let sent: InFlightCall = tenant_leases.call(want, std::iter::empty(), &[], now);
                if *done {
                    let _ = store.answer(&sent.call, now);
                }
                tenant_leases.lost(sent, *untouched);
            }
        }
        let here: u64 = all_leases.iter().map(TenantLeases::running).sum();
        assert_eq!(here, running.len() as u64);
    }
    for ended in running.split_off(0) {
        used_in_all += end(&mut all_leases, ended, Some((3, 4)));
    }
    all_leases.iter_mut().for_each(|tenant_leases| look(tenant_leases, &mut store, true, now));
    Played { all_leases, store, now, used: used_in_all, most_running }
}

proptest! {
    /// Grants are used or returned: when all have ended and left, the store has spent exactly what requests
    /// used. (The refill is too slow to matter.)
    #[test]
    fn tokens_are_conserved(burst in 1..4000_u64, most in 1..9_u64, steps in prop::collection::vec(any_step(false), 0..120)) {
        let played = play(&limits(1, burst, most), &steps);
        prop_assert!(played.all_leases.iter().all(TenantLeases::is_quiet));
        prop_assert!(played.most_running <= most);
        let flown = played.now.as_nanos() / 60_000_000_000 + 1;
        let spent = played.store.spent("all/tokens_per_minute");
        prop_assert!(spent <= played.used && played.used <= spent + flown, "{spent} of {}", played.used);
        prop_assert!(played.store.places.values().all(|(count, _)| *count == 0));
    }

    /// Calls without a result may charge a tenant a lease or a debt twice, but never admit
    /// too much.
    #[test]
    fn what_is_uncertain_errs_towards_the_limit(
        burst in 1..4000_u64, steps in prop::collection::vec(any_step(true), 0..120),
    ) {
        let played = play(&limits(1, burst, 1000), &steps);
        let flown = played.now.as_nanos() / 60_000_000_000 + 1;
        prop_assert!(played.store.spent("all/tokens_per_minute") + flown >= played.used);
    }

    /// A request that waits as long as told is admitted by any gateway, if no other comes.
    #[test]
    fn the_promised_moment_is_kept_at_every_gateway(
        per_minute in 60..6000_u64, burst in 100..4000_u64, steps in prop::collection::vec(any_step(false), 0..80),
        asks in 0..3_usize, waits in 0..3_usize, input in 0..40_u64, output in 0..60_u64,
    ) {
        let mut played = play(&limits(per_minute, burst, 1000), &steps);
        // All gateways know of all debts, because one that was told before would trust its result for
        // a while.
        played.now = played.now + MEMORY + TURN;
        // Until exhausted.
        let request = wanted(input, output);
        let refused = (0..5000).find_map(|_| {
            ask(&mut played.all_leases[asks], &mut played.store, MODEL, &request, played.now).err()
        });
        if let Some(LimitExceeded::Retryable { retry_after: Some(seconds), .. }) = refused {
            let later = played.now + Duration::from_secs(seconds);
            prop_assert!(ask(&mut played.all_leases[waits], &mut played.store, MODEL, &request, later).is_ok());
        }
    }
}

/// A step of a history with outages.
#[derive(Clone, Debug)]
enum Hard {
    Pass {
        millis: u64,
    },
    Ask {
        gateway: usize,
        tokens: u64,
        times: usize,
    },
    Look,
    /// The store becomes unavailable, or available with or without its data.
    Turn {
        keeps_books: bool,
    },
}

fn any_hard() -> impl Strategy<Value = Hard> {
    prop_oneof![
        4 => (0..1500_u64).prop_map(|millis| Hard::Pass { millis }),
        8 => (0..3_usize, 1..60_u64, 1..40_usize).prop_map(|(gateway, tokens, times)| Hard::Ask { gateway, tokens, times }),
        2 => Just(Hard::Look),
        1 => any::<bool>().prop_map(|keeps_books| Hard::Turn { keeps_books }),
    ]
}

proptest! {
    /// Whatever happens to the store, and whichever gateway is used: each outage admits at most the leases, one
    /// burst, and the refill meanwhile beyond the limit.
    #[test]
    fn what_passes_in_outages_is_bounded(
        per_minute in 300..60_000_u64, burst in 30..6000_u64, steps in prop::collection::vec(any_hard(), 0..150),
    ) {
        let whole = Allowance { tokens: Some(Rate::new(per_minute, Some(burst)).unwrap()), ..Allowance::default() };
        let limits = Limits { whole, models: BTreeMap::new() };
        let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 3));
        let tenant = TenantId::from("acme");
        let shares = [(); 3].map(|()| LocalLimiter::new());
        let tenants = BTreeMap::from([(tenant.clone(), share_of(&limits, 3))]);
        shares.iter().for_each(|share| share.reload(&tenants, Tick::ZERO));
        let flow = |time: Duration| u128::from(per_minute) * time.as_nanos() / 60_000_000_000;
        let (mut now, mut let_in, mut is_up, mut since) = (Tick::ZERO, 0_u128, true, Tick::ZERO);
        // Allowed excess of past outages, and of the current one.
        let (mut beyond, mut leased) = (0_u128, 0_u128);
        for step in &steps {
            match *step {
                Hard::Pass { millis } => now = now + Duration::from_millis(millis),
                Hard::Look if is_up => all_leases.iter_mut().for_each(|tenant_leases| look(tenant_leases, &mut store, false, now)),
                Hard::Look => {}
                Hard::Turn { keeps_books } => {
                    if is_up {
                        leased = all_leases.iter().map(|tenant_leases| u128::from(tenant_leases.unspent())).sum();
                        since = now;
                    } else {
                        beyond += leased + u128::from(burst) + flow(now.since(since));
                        if !keeps_books {
                            store = PlainStore { begun: now.as_nanos() + 7, ..PlainStore::default() };
                        }
                        // As each gateway does after it reconnects.
                        for (tenant_leases, share) in all_leases.iter_mut().zip(&shares) {
                            tenant_leases.came_back();
                            if let Some(sent) = tenant_leases.tidy(false, |_| share.statuses(&tenant, "m", now), now) {
                                let answer = store.answer(&sent.call, now);
                                tenant_leases.answered(sent, &answer, now);
                            }
                        }
                    }
                    is_up = !is_up;
                }
                Hard::Ask { gateway, tokens, times } => for _ in 0..times {
                    let (tenant_leases, share, wanted) = (&mut all_leases[gateway], &shares[gateway], wanted(0, tokens));
                    let used = Used { input: Tokens(0), output: Tokens(tokens) };
                    let held = match tenant_leases.draw("m", &wanted, now) {
                        DrawResult::Held(held) => Some(held),
                        DrawResult::Refused(_) => continue,
                        DrawResult::AskStore if !is_up => None,
                        DrawResult::AskStore => {
                            let want = LeaseRequest { model: "m".into(), wanted };
                            let sent = tenant_leases.call(want, std::iter::empty(), &share.statuses(&tenant, "m", now), now);
                            let answer = store.answer(&sent.call, now);
                            match tenant_leases.answered(sent, &answer, now) {
                                Some(Ok(held)) => Some(held),
                                _ => continue,
                            }
                        }
                    };
                    let noted = match &held {
                        Some(_) => share.note(&tenant, "m", &wanted, now),
                        None => {
                            let assumed = Wanted { output: Output::Assumed(Tokens(tokens)), ..wanted };
                            let Ok(reserved) = share.reserve(&tenant, "m", &assumed, now) else { continue };
                            tenant_leases.runs("m");
                            reserved
                        }
                    };
                    noted.settle(used, now);
                    tenant_leases.ended("m", held.as_ref(), Some(&used), is_up);
                    let_in += u128::from(tokens);
                },
            }
            let during = if is_up { 0 } else { leased + u128::from(burst) + flow(now.since(since)) };
            // A need that only the whole limit can hold leaves debt at each share.
            let debt = 3 * 60;
            let bound = u128::from(burst) + flow(now.since(Tick::ZERO)) + beyond + during + debt;
            prop_assert!(let_in <= bound, "{let_in} let in, {bound} at most");
        }
    }
}

#[test]
fn a_store_that_lost_its_books_hears_of_every_gateway_that_spent_not_only_of_those_that_ask_again() {
    let limits = limits(1, 900, 1000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 3));
    let tenant = TenantId::from("acme");
    let share = LocalLimiter::new();
    share.reload(&BTreeMap::from([(tenant.clone(), share_of(&limits, 3))]), Tick::ZERO);
    let request = wanted(100, 100);
    let held = ask(&mut all_leases[0], &mut store, MODEL, &request, Tick::ZERO).unwrap();
    share
        .note(&tenant, MODEL, &request, Tick::ZERO)
        .settle(Used { input: Tokens(100), output: Tokens(100) }, Tick::ZERO);
    all_leases[0].ended(MODEL, Some(&held), Some(&Used { input: Tokens(100), output: Tokens(100) }), true);
    store = PlainStore { begun: store.begun + 1, ..PlainStore::default() };
    all_leases[0].came_back();
    assert!(!all_leases[0].is_quiet(), "it is looked at");
    let sent = all_leases[0].tidy(false, |model| share.statuses(&tenant, model, Tick::ZERO), Tick::ZERO).unwrap();
    let answer = store.answer(&sent.call, Tick::ZERO);
    all_leases[0].answered(sent, &answer, Tick::ZERO);
    assert_eq!(store.spent("all/tokens_per_minute"), 200);
    assert_eq!(store.spent("model/output_tokens_per_minute/m"), 100);
    let again = all_leases[0].tidy(false, |model| share.statuses(&tenant, model, Tick::ZERO), Tick::ZERO);
    assert!(again.is_none(), "once: {again:?}");
}

/// A store that lost its data.
pub(super) fn emptied(store: &PlainStore) -> PlainStore {
    PlainStore { begun: store.begun + 1, ..PlainStore::default() }
}

/// Output of a request that ends at once.
fn used_up(
    tenant_leases: &mut TenantLeases,
    store: &mut PlainStore,
    tokens: u64,
    at: Tick,
) -> Result<HeldByScope, LimitExceeded> {
    let held = ask(tenant_leases, store, "other", &wanted(0, tokens), at)?;
    tenant_leases.ended("other", Some(&held), Some(&Used { input: Tokens(0), output: Tokens(tokens) }), true);
    Ok(held)
}

#[test]
fn c114_what_a_store_has_forgotten_is_owed_again() {
    let limits = limits(1, 3000, 1000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 3));
    // One gateway has nearly all of the tenant's requests: many times its share.
    used_up(&mut all_leases[1], &mut store, 100, Tick::ZERO).unwrap();
    for _ in 0..26 {
        used_up(&mut all_leases[0], &mut store, 100, Tick::ZERO).unwrap();
    }
    assert!(store.spent("all/tokens_per_minute") >= 2700);
    store = emptied(&store);
    // A gateway that knows of it rejects.
    assert!(used_up(&mut all_leases[0], &mut store, 400, Tick::ZERO).is_err());

    store = emptied(&store);
    // One that does not admits what it believes is left, and then reports it.
    let let_in = (0..50).filter(|_| used_up(&mut all_leases[2], &mut store, 100, Tick::ZERO).is_ok()).count() as u64;
    assert!(let_in >= 20, "{let_in}");
    all_leases[0].came_back();
    look(&mut all_leases[0], &mut store, false, Tick::ZERO);
    all_leases.iter_mut().for_each(|tenant_leases| look(tenant_leases, &mut store, true, Tick::ZERO));
    let spent = store.spent("all/tokens_per_minute");
    assert!((0..=2).contains(&spent.abs_diff(2700 + 100 * let_in)), "{spent} of 2700 and {let_in} hundred");
    for tenant_leases in &mut all_leases {
        let refused = used_up(tenant_leases, &mut store, 100, Tick::ZERO).unwrap_err();
        assert!(matches!(refused, LimitExceeded::Retryable { retry_after: Some(60..), .. }), "it is debt: {refused:?}");
    }
}

#[test]
fn c114_gateways_that_remember_the_same_tell_it_once() {
    let limits = limits(1, 3000, 1000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 3));
    for tenant_leases in &mut all_leases {
        used_up(tenant_leases, &mut store, 300, Tick::ZERO).unwrap();
        look(tenant_leases, &mut store, true, Tick::ZERO);
    }
    for _ in 0..3 {
        store = emptied(&store);
        for tenant_leases in &mut all_leases {
            tenant_leases.came_back();
            look(tenant_leases, &mut store, false, Tick::ZERO);
        }
        assert!((900..=901).contains(&store.spent("all/tokens_per_minute")));
    }
}

#[test]
fn c114_what_has_flown_off_since_is_not_owed() {
    let limits = limits(600, 3000, 1000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 2));
    used_up(&mut all_leases[0], &mut store, 2000, Tick::ZERO).unwrap();
    let later = Tick::from_millis(100_000);
    look(&mut all_leases[0], &mut store, true, later);
    store = emptied(&store);
    all_leases[0].came_back();
    look(&mut all_leases[0], &mut store, false, Tick::from_millis(150_000));
    let spent = store.spent("all/tokens_per_minute");
    assert!((499..=501).contains(&spent), "ten a second flow off: {spent}");
}

/// The books of one tenant alone are gone (evicted, deleted), so that no connection breaks and no greeting
/// is missing: the gateway that knows of them is held to them and tells them with its next call.
#[test]
fn c114_books_of_one_tenant_that_were_evicted_are_told_with_the_next_call() {
    let limits = limits(1, 3000, 1000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 2));
    for _ in 0..27 {
        used_up(&mut all_leases[0], &mut store, 100, Tick::ZERO).unwrap();
    }
    look(&mut all_leases[0], &mut store, true, Tick::ZERO);
    assert_eq!(store.spent("all/tokens_per_minute"), 2700);
    store = emptied(&store);
    // One that has not heard of them begins new ones.
    let let_in = (0..20).filter(|_| used_up(&mut all_leases[1], &mut store, 100, Tick::ZERO).is_ok()).count() as u64;
    assert_eq!(let_in, 20);
    look(&mut all_leases[1], &mut store, true, Tick::ZERO);
    // Behind what either remembers of an answer; a token a minute flows off.
    let later = Tick::from_millis(5000);
    assert!(used_up(&mut all_leases[0], &mut store, 400, later).is_err(), "2700 of 3000 and 2000 besides");
    let spent = store.spent("all/tokens_per_minute");
    assert!((4699..=4700).contains(&spent), "all of it is debt: {spent}");
    assert!(used_up(&mut all_leases[1], &mut store, 100, later).is_err());
    look(&mut all_leases[0], &mut store, true, later);
    assert_eq!(store.spent("all/tokens_per_minute"), spent, "told once");
}

/// A call that was sent to the old books is answered by new ones.
#[test]
fn c114_a_loss_between_a_call_and_its_answer_is_told_by_that_call() {
    let limits = limits(1, 3000, 1000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 2));
    for _ in 0..27 {
        used_up(&mut all_leases[0], &mut store, 100, Tick::ZERO).unwrap();
    }
    look(&mut all_leases[0], &mut store, true, Tick::ZERO);
    let want = LeaseRequest { model: "other".into(), wanted: wanted(0, 400) };
    let sent = all_leases[0].call(want, std::iter::empty(), &[], Tick::ZERO);
    store = emptied(&store);
    let answer = store.answer(&sent.call, Tick::ZERO);
    assert!(!answer.granted && store.spent("all/tokens_per_minute") == 2700);
    assert!(all_leases[0].answered(sent, &answer, Tick::ZERO).unwrap().is_err());
    assert!(used_up(&mut all_leases[1], &mut store, 400, Tick::ZERO).is_err(), "others are held to it at once");
}

proptest! {
    /// Whatever a store forgets and whichever gateway is used: it finally has at least what was used, possibly
    /// more, because a gateway does not know what others returned after its last call.
    #[test]
    fn c114_a_store_that_forgot_ends_with_all_that_was_used(
        burst in 100..4000_u64,
        before in prop::collection::vec(any_step(false), 0..60),
        after in prop::collection::vec(any_step(false), 0..60),
    ) {
        let steps: Vec<Step> = before.into_iter().chain([Step::Forget]).chain(after).collect();
        let played = play(&limits(1, burst, 1000), &steps);
        let flown = played.now.as_nanos() / 60_000_000_000 + 1;
        let spent = played.store.spent("all/tokens_per_minute");
        prop_assert!(played.used <= spent + flown, "{spent} of {}", played.used);
    }
}

/// What each of three gateways admits within a minute, at three times the limit. Requests come at constant
/// intervals, to each gateway at its own offset.
fn parts_of_a_minute(tokens: u64, every: Duration, offsets: [u64; 3]) -> [u64; 3] {
    let limits = limits(1_200_000, 20_000, 100_000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 3));
    let mut parts = [0; 3];
    let mut asks: Vec<(Tick, usize)> = (0..60_000_000 / every.as_micros() as u64)
        .flat_map(|number| offsets.into_iter().enumerate().map(move |(which, offset)| (number, which, offset)))
        .map(|(number, which, offset)| {
            (Tick::from_nanos(number * every.as_nanos() as u64) + Duration::from_micros(offset), which)
        })
        .collect();
    asks.sort_unstable();
    let mut looked = Tick::ZERO;
    for (at, which) in asks {
        if used_up(&mut all_leases[which], &mut store, tokens, at).is_ok() {
            parts[which] += tokens;
        }
        if at.since(looked) >= Duration::from_millis(100) {
            looked = at;
            all_leases.iter_mut().for_each(|tenant_leases| look(tenant_leases, &mut store, false, at));
        }
    }
    parts
}

#[test]
fn c114_equal_gateways_get_equal_parts_of_a_scarce_limit_within_a_minute() {
    for (tokens, every) in [(50, 2500), (200, 10_000), (1000, 50_000), (5000, 250_000)] {
        for offsets in [[0, 1, 2], [0, 100, 900], [0, 1500, 2400], [700, 0, 650]] {
            let parts = parts_of_a_minute(tokens, Duration::from_micros(every), offsets);
            let all: u64 = parts.iter().sum();
            let allowed = 20_000 + 1_200_000;
            assert!(all <= allowed && all * 100 >= allowed * 95, "{tokens} at a time: {parts:?}");
            let worst = parts.iter().map(|part| part.abs_diff(all / 3)).max().unwrap();
            assert!(worst * 100 <= all / 3 * 25, "{tokens} at a time, {offsets:?}: {parts:?}");
        }
    }
}

#[test]
fn a_hot_tenant_costs_a_few_calls_a_second() {
    let limits = limits(60_000_000, 60_000_000, 100_000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 1));
    // A thousand requests a second for ten seconds, each running for 50 ms.
    let mut open: VecDeque<HeldByScope> = VecDeque::new();
    for step in 0..10_000_u64 {
        let at = Tick::from_millis(step);
        if step >= 50 {
            let held = open.pop_front().unwrap();
            let used = Used { input: Tokens(100), output: Tokens(100) };
            all_leases[0].ended(MODEL, Some(&held), Some(&used), true);
        }
        open.push_back(ask(&mut all_leases[0], &mut store, MODEL, &wanted(100, 100), at).unwrap());
        if step % 100 == 0 {
            look(&mut all_leases[0], &mut store, false, at);
        }
    }
    assert!(store.calls < 150, "{} calls", store.calls);
}

#[test]
fn a_tenant_at_its_limit_costs_a_few_calls_a_second_too() {
    let limits = limits(600_000, 600_000, 100_000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 3));
    let mut let_in = 0;
    // Three times the limit: 150 requests of 200 tokens a second.
    for step in 0..60_000_u64 {
        let at = Tick::from_millis(step);
        if step % 20 == 0 {
            for tenant_leases in &mut all_leases {
                if let Ok(held) = ask(tenant_leases, &mut store, "other", &wanted(100, 100), at) {
                    let_in += 200;
                    tenant_leases.ended(
                        "other",
                        Some(&held),
                        Some(&Used { input: Tokens(100), output: Tokens(100) }),
                        true,
                    );
                }
            }
        }
    }
    assert!(
        (1_195_000..=1_200_000).contains(&let_in),
        "the burst and a minute's flow, but for what is leased: {let_in}"
    );
    assert!(store.calls < 60 * 100, "{} calls", store.calls);
}

#[test]
fn a_limit_changed_during_a_call_refuses_with_its_own_figures_or_asks_again() {
    let narrow = |burst: u64| Limits { models: Default::default(), ..limits(60, burst, 9) };
    let refused_meanwhile = |limits: &Limits| {
        let (mut store, mut tenant_leases) = (PlainStore::default(), all_leases(&narrow(10), 1).remove(0));
        ask(&mut tenant_leases, &mut store, MODEL, &wanted(2, 8), Tick::ZERO).expect("all of it");
        let want = LeaseRequest { model: MODEL.into(), wanted: wanted(2, 8) };
        let sent = tenant_leases.call(want, std::iter::empty(), &[], Tick::ZERO);
        let answer = store.answer(&sent.call, Tick::ZERO);
        assert!(!answer.granted);
        tenant_leases.change(limits, 1, Tick::ZERO);
        let said = tenant_leases.answered(sent, &answer, Tick::ZERO);
        (said, ask(&mut tenant_leases, &mut store, MODEL, &wanted(2, 8), Tick::ZERO))
    };
    // The refusing limit is now large enough or removed, so that nothing is rejected.
    for wide in [narrow(100), Limits::default()] {
        let (said, again) = refused_meanwhile(&wide);
        assert_eq!(said, None);
        assert!(again.is_ok());
    }
    let (said, _) = refused_meanwhile(&narrow(12));
    let Some(Err(LimitExceeded::Retryable { limit_status, retry_after })) = said else { panic!("{said:?}") };
    assert_eq!((limit_status.limit, limit_status.most, limit_status.per_minute), (LimitKind::Tokens, 12, Some(60)));
    assert_eq!((limit_status.remaining, retry_after), (2, Some(8)));
}

#[test]
fn a_share_is_a_part_of_each_limit_and_at_least_one() {
    let part = share_of(&limits(10, 7, 2), 3);
    assert_eq!(part, limits(3, 2, 1));
    assert_eq!(share_of(&limits(2, 2, 1), 3), limits(1, 1, 1));
    assert_eq!(share_of(&limits(Rate::MOST, Rate::MOST, u64::MAX), 1), limits(Rate::MOST, Rate::MOST, u64::MAX));
}

#[test]
fn a_model_beside_its_tenant_and_all_or_nothing() {
    let limits = limits(1, 100, 1000);
    let (mut store, mut all_leases) = (PlainStore::default(), all_leases(&limits, 2));
    let one = &mut all_leases[0];
    assert!(ask(one, &mut store, "other", &wanted(30, 0), Tick::ZERO).is_ok());
    let held = ask(one, &mut store, MODEL, &wanted(0, 60), Tick::ZERO).unwrap();
    assert_eq!(held.map(|held| held.iter().sum::<u64>()), [61, 60]);
    let Err(LimitExceeded::Retryable { limit_status, .. }) = ask(one, &mut store, MODEL, &wanted(0, 50), Tick::ZERO)
    else {
        panic!("both lack 40 tokens or less; the tenant's limit is the one that lacks more")
    };
    assert_eq!(
        (limit_status.limit, limit_status.scope, limit_status.remaining),
        (LimitKind::Tokens, super::super::limit::LimitScope::Tenant, 10)
    );
    assert_eq!(store.spent("model/output_tokens_per_minute/m"), 60, "nothing was taken of either");
    let never = ask(one, &mut store, MODEL, &wanted(0, 101), Tick::ZERO);
    assert!(matches!(never, Err(LimitExceeded::NeverFits { need: 101, most: 100, .. })));
}

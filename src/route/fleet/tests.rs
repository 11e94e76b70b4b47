//! Choice, health and accounting of work.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::route::REMEMBERED;
use crate::route::settings::{
    AddressFamily, Balance, BreakerLimits, Concurrency, DnsName, EngineSource, Retries, Scheme,
};
use crate::route::status::{EngineState, EngineView};

const LATER: Tick = Tick::from_millis(1 << 40);

pub(super) fn address(name: &str) -> EngineAddress {
    EngineAddress { scheme: Scheme::Http, host: name.into(), port: 1, base: "".into(), name: None }
}

pub(super) fn pool(names: &[&str]) -> PoolSettings {
    PoolSettings::with_defaults("p".into(), EngineSource::Static(names.iter().map(|name| address(name)).collect()))
}

fn id() -> PoolId {
    "p".into()
}

fn engine(name: &str) -> EngineId {
    address(name).id()
}

pub(super) fn ms(millis: u64) -> Tick {
    Tick::from_millis(millis)
}

pub(super) fn tokens(prefill: u64, decode: u64) -> WorkEstimate {
    WorkEstimate { prefill: Tokens(prefill), decode: Tokens(decode) }
}

struct Bench {
    fleet: Fleet,
    settings: PoolSettings,
}

impl Bench {
    fn new(settings: PoolSettings) -> Self {
        let fleet = Fleet::new(42);
        fleet.apply_settings(&[Arc::new(settings.clone())], Tick::ZERO);
        Bench { fleet, settings }
    }

    fn attempts(&self) -> Attempts {
        Attempts::new(&self.settings, LATER)
    }

    fn choose(&self, at: Tick) -> Option<PickedEngine> {
        self.fleet.choose(&id(), &mut self.attempts(), tokens(100, 100), at)
    }

    fn name(&self, at: Tick) -> Option<String> {
        self.choose(at).map(|choice| choice.engine.to_string())
    }

    fn effect(&self, effect: EngineEffect, at: Tick) {
        self.fleet.apply(&id(), [effect], TenantKey::default(), at);
    }

    fn cool(&self, name: &str, millis: u64, at: Tick) {
        self.effect(EngineEffect::Cool(engine(name), Duration::from_millis(millis)), at);
    }

    fn state(&self, name: &str, at: Tick) -> EngineState {
        let views = self.fleet.view(at).remove(0).engines;
        views.into_iter().find(|view| view.engine == engine(name)).unwrap().state
    }

    /// Distribution of `count` concurrent requests.
    fn spread(&self, count: usize, at: Tick) -> (HashMap<String, usize>, Vec<PickedEngine>) {
        let choices: Vec<_> = (0..count).map(|_| self.choose(at).unwrap()).collect();
        let mut spread = HashMap::new();
        choices.iter().for_each(|choice| *spread.entry(choice.engine.to_string()).or_default() += 1);
        (spread, choices)
    }
}

#[test]
fn the_engine_with_the_least_prefill_ahead_is_chosen() {
    let bench = Bench::new(pool(&["a", "b", "c"]));
    let (spread, held) = bench.spread(30, ms(0));
    assert_eq!(spread.into_values().collect::<Vec<_>>(), [10, 10, 10]);
    drop(held);
    let big = bench.fleet.choose(&id(), &mut bench.attempts(), tokens(10_000, 0), ms(1)).unwrap();
    let (spread, held) = bench.spread(20, ms(1));
    assert_eq!(spread.get(big.engine.as_str()), None);
    drop((big, held));
    let long = bench.fleet.choose(&id(), &mut bench.attempts(), tokens(100, 10_000), ms(2)).unwrap();
    let (spread, _held) = bench.spread(29, ms(2));
    assert_eq!(spread[long.engine.as_str()], 9, "a long answer is one sequence of a batch as any other");
}

#[test]
fn a_prompt_that_was_read_is_no_more_work() {
    let bench = Bench::new(pool(&["a", "b"]));
    let mut first = bench.fleet.choose(&id(), &mut bench.attempts(), tokens(1_000, 10), ms(0)).unwrap();
    let second = bench.fleet.choose(&id(), &mut bench.attempts(), tokens(500, 10), ms(0)).unwrap();
    assert_ne!(first.engine, second.engine);
    assert_eq!(bench.name(ms(1)).unwrap(), second.engine.to_string());
    first.work.first_token(ms(2));
    first.work.first_token(ms(2));
    assert_eq!(bench.name(ms(2)).unwrap(), first.engine.to_string());
}

#[test]
fn equals_are_parted_by_chance_and_the_chance_is_seeded() {
    let draw = |seed| {
        let fleet = Fleet::new(seed);
        fleet.apply_settings(&[Arc::new(pool(&["a", "b", "c", "d"]))], Tick::ZERO);
        let one = |n| fleet.choose(&id(), &mut Attempts::new(&pool(&[]), LATER), tokens(1, 1), ms(n)).unwrap().engine;
        (0..40).map(one).collect::<Vec<_>>()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    let names: HashSet<_> = draw(1).into_iter().collect();
    assert_eq!(names.len(), 4, "idle engines all get their turn");
}

#[test]
fn round_robin_asks_whoever_was_not_asked_longest() {
    let bench = Bench::new(PoolSettings { balance: Balance::RoundRobin, ..pool(&["a", "b", "c"]) });
    let order: Vec<_> = (0..9).map(|n| bench.name(ms(n)).unwrap()).collect();
    assert_eq!(order[0..3], order[3..6]);
    assert_eq!(order[0..3], order[6..9]);
    assert_eq!(order[0..3].iter().collect::<HashSet<_>>().len(), 3);
}

#[test]
fn what_others_send_to_an_engine_is_seen_in_its_report() {
    let bench = Bench::new(pool(&["a", "b"]));
    let report = EngineMetrics { waiting: Some(0.0), running: Some(8.0), kv_usage: Some(0.1), asleep: false };
    bench.fleet.reported(&id(), &engine("a"), report, ms(0));
    assert_eq!(bench.name(ms(1)).unwrap(), "b:1", "those that run are a little of each step");
    bench.fleet.reported(&id(), &engine("a"), EngineMetrics { waiting: Some(2.0), ..report }, ms(1));
    let (spread, held) = bench.spread(8, ms(2));
    assert_eq!(spread["b:1"], 8, "those that wait there have whole prompts ahead of ours");
    drop(held);
    // Three intervals later the report is ignored.
    let (spread, _held) = bench.spread(4, ms(6_001));
    assert_eq!(spread["b:1"], 2);
}

#[test]
fn our_own_requests_in_a_report_are_not_counted_twice() {
    let bench = Bench::new(pool(&["a", "b"]));
    let (_, _held) = bench.spread(8, ms(0));
    for name in ["a", "b"] {
        let running = if name == "a" { 4.0 } else { 5.0 };
        let report = EngineMetrics { running: Some(running), ..EngineMetrics::default() };
        bench.fleet.reported(&id(), &engine(name), report, ms(1));
    }
    assert_eq!(bench.name(ms(2)).unwrap(), "a:1", "one of b's five is foreign");
}

#[test]
fn a_nearly_full_cache_makes_an_engine_less_wanted() {
    let bench = Bench::new(pool(&["a", "b"]));
    bench.fleet.reported(
        &id(),
        &engine("a"),
        EngineMetrics { kv_usage: Some(0.99), ..EngineMetrics::default() },
        ms(0),
    );
    let (spread, _held) = bench.spread(9, ms(1));
    assert!(spread["b:1"] > spread["a:1"], "{spread:?}");
}

#[test]
fn a_cooling_engine_stands_behind_the_others() {
    let bench = Bench::new(pool(&["a", "b"]));
    bench.cool("a", 1_000, ms(0));
    let (spread, held) = bench.spread(10, ms(999));
    assert_eq!(spread["b:1"], 10);
    assert_eq!(bench.state("a", ms(999)), EngineState::Cooling);
    assert_eq!(bench.name(ms(1_000)).unwrap(), "a:1");
    drop(held);
}

#[test]
fn if_all_cool_the_one_that_is_free_soonest_is_tried() {
    let bench = Bench::new(pool(&["a", "b", "c"]));
    for (name, millis) in [("a", 3_000), ("b", 1_000), ("c", 2_000)] {
        bench.cool(name, millis, ms(0));
    }
    assert_eq!(bench.name(ms(1)).unwrap(), "b:1");
    let mut attempts = bench.attempts();
    let order: Vec<_> = std::iter::from_fn(|| bench.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(1)))
        .map(|choice| choice.engine.to_string())
        .collect();
    assert_eq!(order, ["b:1", "c:1", "a:1"]);
    assert_eq!(bench.fleet.available(&id(), ms(1)), 3);
}

#[test]
fn a_shorter_cooling_does_not_end_a_longer_one() {
    let bench = Bench::new(pool(&["a", "b"]));
    bench.cool("a", 5_000, ms(0));
    bench.cool("a", 1_000, ms(0));
    assert_eq!(bench.state("a", ms(4_999)), EngineState::Cooling);
}

#[test]
fn an_absurd_output_cap_neither_blinds_the_choice_nor_breaks_the_books() {
    let bench = Bench::new(pool(&["a", "b"]));
    let busy = bench.choose(ms(0)).unwrap();
    let absurd: Vec<_> =
        (0..2).map(|_| bench.fleet.choose(&id(), &mut bench.attempts(), tokens(1, u64::MAX), ms(1)).unwrap()).collect();
    drop(absurd);
    let work = |name: &str| {
        let views = bench.fleet.view(ms(2)).remove(0).engines;
        views.iter().find(|view| view.engine == engine(name)).unwrap().work
    };
    let other = if busy.engine == engine("a") { "b" } else { "a" };
    assert_eq!(
        (work(other), bench.fleet.view(ms(2)).remove(0).engines.iter().map(|view| view.work.0).sum()),
        (Tokens::ZERO, 200)
    );
    assert_eq!(bench.name(ms(3)).unwrap(), engine(other).to_string(), "the idle one, by 200 tokens");
}

fn capped(names: &[&str], most: u32) -> PoolSettings {
    PoolSettings { concurrency: Concurrency::Fixed(NonZeroU32::new(most).unwrap()), ..pool(names) }
}

#[test]
fn a_full_engine_stands_behind_the_others_and_before_a_cooling_one() {
    let bench = Bench::new(capped(&["a", "b", "c"], 2));
    bench.cool("c", 10_000, ms(0));
    let (spread, mut held) = bench.spread(4, ms(1));
    assert_eq!((spread["a:1"], spread["b:1"]), (2, 2));
    let over = bench.choose(ms(1)).unwrap();
    assert_ne!(over.engine, engine("c"), "work is never turned away here");
    drop(over);
    let freed = held.pop().unwrap().engine;
    assert_eq!(bench.choose(ms(2)).unwrap().engine, freed, "it has a seat again");
}

#[test]
fn a_full_engine_stands_behind_the_others_in_turn_too() {
    let bench = Bench::new(PoolSettings { balance: Balance::RoundRobin, ..capped(&["a", "b"], 1) });
    let a = bench.choose(ms(0)).unwrap();
    let b = bench.choose(ms(0)).unwrap();
    drop(b);
    let again = bench.choose(ms(0)).unwrap();
    assert_ne!(again.engine, a.engine, "its turn, but it is full");
}

#[test]
fn the_seats_of_a_pool_are_those_of_the_engines_that_take_requests() {
    let bench = Bench::new(capped(&["a", "b", "c"], 8));
    let seats = |at| bench.fleet.seats(&id(), ms(at)).unwrap();
    let changes = || bench.fleet.seat_changes();
    assert_eq!(seats(0), 24);
    let before = changes();
    let _held = bench.choose(ms(0));
    assert_eq!((seats(1), changes()), (24, before), "taking one changes nothing");
    bench.cool("a", 1_000, ms(1));
    assert_eq!(seats(2), 16);
    assert!(changes() > before);
    let _ = bench.fleet.checked(&id(), &engine("b"), ProbeResult::Refused, ms(2));
    assert_eq!(seats(2), 8);
    assert_eq!(seats(1_001), 16, "it cooled down");
    for name in ["a", "c"] {
        let _ = bench.fleet.checked(&id(), &engine(name), ProbeResult::Refused, ms(2_000));
    }
    assert_eq!(seats(2_000), 1, "somebody must find out that nobody is there");
    let _ = bench.fleet.checked(&id(), &engine("a"), ProbeResult::Healthy, ms(3_000));
    assert_eq!(seats(3_000), 1, "a tenth at first");
    assert_eq!(seats(8_000), 4);
    assert_eq!(seats(13_000), 8, "warm");
    bench.fleet.apply_settings(&[Arc::new(pool(&["a"]))], ms(14_000));
    assert_eq!(bench.fleet.seats(&id(), ms(14_000)), None);
    assert_eq!(bench.fleet.seats(&"unknown".into(), ms(14_000)), None);
}

#[test]
fn an_engine_that_joins_others_starts_slowly() {
    let bench = Bench::new(capped(&["a"], 8));
    bench.fleet.apply_settings(&[Arc::new(capped(&["a", "b"], 8))], ms(1_000));
    let seats = [1_000, 6_000, 11_000].map(|at| bench.fleet.seats(&id(), ms(at)).unwrap());
    assert_eq!(seats, [9, 12, 16], "a tenth at first, all after ten seconds");
}

#[test]
fn gateways_share_seats() {
    let bench = Bench::new(pool(&[]));
    bench.fleet.share_among(NonZeroU32::new(3).unwrap());
    bench.fleet.apply_settings(&[Arc::new(capped(&["a", "b"], 4))], ms(0));
    assert_eq!(bench.fleet.seats(&id(), ms(20_000)), Some(2), "8 / 3");
    let (spread, _held) = bench.spread(4, ms(20_000));
    assert_eq!(spread["a:1"], 2, "4 / 3 each, rounded up: all seats have an engine");
    bench.fleet.share_among(NonZeroU32::new(100).unwrap());
    bench.fleet.apply_settings(&[Arc::new(capped(&["a", "b"], 4))], ms(20_000));
    assert_eq!(bench.fleet.seats(&id(), ms(20_000)), Some(1));
}

#[test]
fn seats_that_each_gateway_finds_out_by_itself_are_not_shared_again() {
    let mut settings = pool(&["a"]);
    settings.concurrency = Concurrency::Auto;
    let fleet = Fleet::new(42);
    fleet.share_among(NonZeroU32::new(4).unwrap());
    fleet.apply_settings(&[Arc::new(settings)], Tick::ZERO);
    assert_eq!(fleet.seats(&id(), Tick::ZERO), Some(64), "the first figure of each gateway");
}

#[test]
fn an_open_breaker_takes_nothing_and_then_one_request() {
    let bench = Bench::new(pool(&["a"]));
    for n in 0..5 {
        assert!(bench.choose(ms(n)).is_some());
        bench.effect(EngineEffect::Fault(engine("a")), ms(n));
    }
    assert!(bench.choose(ms(5_003)).is_none());
    assert_eq!(bench.state("a", ms(5_003)), EngineState::BreakerOpen);
    let trying = bench.choose(ms(5_004)).unwrap();
    assert!(bench.choose(ms(5_004)).is_none(), "one request tries, alone");
    drop(trying);
    let trying = bench.choose(ms(5_005)).expect("the first one ended without a result");
    bench.effect(EngineEffect::Well(engine("a")), ms(5_006));
    drop(trying);
    assert_eq!(bench.spread(3, ms(5_007)).0["a:1"], 3);
}

/// C112: a breaker diverts traffic and never drops it.
#[test]
fn where_breakers_are_all_that_holds_engines_back_requests_pass_them_in_the_usual_order() {
    let limits = BreakerLimits { faults: 1, ..BreakerLimits::default() };
    let bench = Bench::new(PoolSettings { breaker: Some(limits), ..capped(&["a", "b", "c"], 4) });
    let pass = |at| {
        let mut attempts = bench.attempts();
        attempts.pass_breakers();
        bench.fleet.choose(&id(), &mut attempts, tokens(100, 100), at)
    };
    let _ = bench.fleet.checked(&id(), &engine("c"), ProbeResult::Refused, ms(0));
    bench.effect(EngineEffect::Fault(engine("b")), ms(1));
    let held: Vec<_> = (0..3).map(|_| pass(ms(2)).unwrap()).collect();
    assert!(held.iter().all(|choice| choice.engine == engine("a")), "there is another one");
    assert_eq!(bench.fleet.seats(&id(), ms(2)), Some(4));
    drop(held);
    bench.effect(EngineEffect::Fault(engine("a")), ms(3));
    assert!(bench.choose(ms(4)).is_none());
    assert_eq!(bench.fleet.seats(&id(), ms(4)), Some(8), "their seats are worth what they were");
    let held: Vec<_> = (0..6).map(|n| pass(ms(4 + n)).unwrap()).collect();
    let at = |name: &str| held.iter().filter(|choice| choice.engine == engine(name)).count();
    assert_eq!((at("a"), at("b"), at("c")), (3, 3, 0), "by work, and never to one that is down");
    assert_eq!(bench.state("a", ms(10)), EngineState::BreakerOpen);
    // Another fault changes nothing; a success closes the breaker, and all requests go there.
    bench.effect(EngineEffect::Fault(engine("b")), ms(11));
    bench.effect(EngineEffect::Well(engine("a")), ms(12));
    drop(held);
    assert_eq!(bench.spread(4, ms(13)).0["a:1"], 4);
    assert_eq!(bench.state("b", ms(13)), EngineState::BreakerOpen);
}

#[test]
fn a_retry_of_a_request_that_passes_breakers_passes_them_too() {
    let limits = BreakerLimits { faults: 1, ..BreakerLimits::default() };
    let bench = Bench::new(PoolSettings { breaker: Some(limits), ..pool(&["a", "b"]) });
    let _ = ["a", "b"].map(|name| bench.effect(EngineEffect::Fault(engine(name)), ms(0)));
    let mut attempts = bench.attempts();
    attempts.pass_breakers();
    let mut tried = Vec::new();
    for (millis, next) in [(1, RetryDecision::Another), (2, RetryDecision::GiveUp)] {
        let choice = bench.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(millis)).unwrap();
        tried.push(choice.engine.clone());
        assert_eq!(bench.fleet.failed(&id(), &mut attempts, AttemptOutcome::Broken, ms(millis)), next);
    }
    tried.sort();
    assert_eq!(tried, [engine("a"), engine("b")]);
}

#[test]
fn a_request_goes_to_engines_that_list_its_model_where_any_does() {
    let bench = Bench::new(pool(&["a", "b", "c"]));
    let list = |name: &str, models: &[&str]| {
        bench.fleet.lists_models(&id(), &engine(name), models.iter().map(|model| Arc::from(*model)).collect());
    };
    list("a", &["m"]);
    list("b", &["m", "lora"]);
    let live_pool = bench.fleet.live_pool(&id()).unwrap();
    let asked = |model: &str, at: Tick| {
        let mut attempts = bench.attempts();
        attempts.keep_off(live_pool.engines_without(model));
        let choice = bench.fleet.choose(&id(), &mut attempts, tokens(1, 1), at);
        (choice.map(|choice| choice.engine.to_string()), attempts)
    };
    for n in 0..20 {
        assert_eq!(asked("lora", ms(n)).0.as_deref(), Some("b:1"));
        assert_ne!(asked("m", ms(n)).0.as_deref(), Some("c:1"), "it has given no list");
    }
    let anybody: std::collections::BTreeSet<_> = (0..60).map(|n| asked("unlisted", ms(n)).0).collect();
    assert_eq!(anybody.len(), 3, "nobody lists it");
    let (_, mut attempts) = asked("lora", ms(100));
    let next = bench.fleet.failed(&id(), &mut attempts, AttemptOutcome::PushBack { retry_after: None }, ms(101));
    assert_eq!(next, RetryDecision::Relay, "nobody else has it");
    let _ = bench.fleet.checked(&id(), &engine("b"), ProbeResult::Refused, ms(102));
    assert_eq!(asked("lora", ms(103)).0, None, "the others would say that there is no such model");
    list("c", &["lora"]);
    assert_eq!(asked("lora", ms(104)).0.as_deref(), Some("c:1"), "loaded there a moment ago");
    bench.fleet.set_engines(&id(), vec![address("a"), address("b")], ms(105));
    list("b", &["m"]);
    assert!(asked("lora", ms(106)).0.is_some(), "nobody of those that are left lists it");
}

#[test]
fn an_attempt_leaves_an_engine_that_departs_where_others_and_the_budget_let_it() {
    let retries = Retries { floor_per_10s: 1, share: 0.0, ..Retries::default() };
    let bench = Bench::new(PoolSettings { retries, ..pool(&["a", "b"]) });
    let live_pool = bench.fleet.live_pool(&id()).unwrap();
    let mut attempts = bench.attempts();
    let choice = bench.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(0)).unwrap();
    let other = if choice.engine == engine("a") { "b" } else { "a" };
    let _ = bench.fleet.checked(&id(), &engine(other), ProbeResult::Refused, ms(1));
    assert!(!live_pool.lets_depart(&attempts, ms(2)), "nobody else is there");
    let _ = bench.fleet.checked(&id(), &engine(other), ProbeResult::Healthy, ms(3));
    assert!(!live_pool.lets_depart(&attempts, LATER), "the limit for first tokens has passed");
    let mut out = attempts.clone();
    out.commit();
    assert!(!live_pool.lets_depart(&out, ms(4)), "the client has been sent something");
    assert!(live_pool.lets_depart(&attempts, ms(4)));
    assert!(!live_pool.lets_depart(&attempts, ms(5)), "the budget is spent");
}

#[test]
fn a_fault_of_the_request_that_tries_opens_the_breaker_again() {
    let bench = Bench::new(PoolSettings {
        breaker: Some(BreakerLimits { faults: 1, ..BreakerLimits::default() }),
        ..pool(&["a"])
    });
    bench.effect(EngineEffect::Fault(engine("a")), ms(0));
    let trying = bench.choose(ms(5_000)).unwrap();
    drop(trying);
    bench.effect(EngineEffect::Fault(engine("a")), ms(5_001));
    assert!(bench.choose(ms(10_000)).is_none());
    assert!(bench.choose(ms(10_001)).is_some());
}

#[test]
fn without_a_breaker_faults_take_nobody_out() {
    let bench = Bench::new(PoolSettings { breaker: None, ..pool(&["a"]) });
    (0..100).for_each(|n| bench.effect(EngineEffect::Fault(engine("a")), ms(n)));
    assert!(bench.choose(ms(100)).is_some());
}

#[test]
fn an_engine_that_is_down_takes_nothing_and_returns_slowly() {
    let bench = Bench::new(pool(&["a", "b"]));
    let _ = bench.fleet.checked(&id(), &engine("a"), ProbeResult::Refused, ms(0));
    assert_eq!(bench.spread(10, ms(1)).0["b:1"], 10);
    assert_eq!(bench.fleet.checked(&id(), &engine("a"), ProbeResult::Healthy, ms(1_000)), Some(HealthChange::CameUp));
    let share = |at| {
        let (spread, _held) = bench.spread(100, at);
        spread.get("a:1").copied().unwrap_or_default()
    };
    let shares: Vec<_> = [1_000, 4_000, 7_000, 11_000].map(|at| share(ms(at))).into();
    assert!(shares[0] < 15 && shares.is_sorted(), "{shares:?}");
    assert_eq!(shares[3], 50);
}

#[test]
fn a_check_that_sees_an_engine_return_ends_the_wait_of_its_breaker() {
    let bench = Bench::new(pool(&["a"]));
    (0..5).for_each(|n| bench.effect(EngineEffect::Fault(engine("a")), ms(n)));
    let _ = bench.fleet.checked(&id(), &engine("a"), ProbeResult::Refused, ms(10));
    assert!(bench.choose(ms(20)).is_none());
    let _ = bench.fleet.checked(&id(), &engine("a"), ProbeResult::Healthy, ms(30));
    assert!(bench.choose(ms(40)).is_some());
}

#[test]
fn all_engines_down_is_no_choice() {
    let bench = Bench::new(pool(&["a", "b"]));
    for name in ["a", "b"] {
        let _ = bench.fleet.checked(&id(), &engine(name), ProbeResult::Unhealthy { status: 503 }, ms(0));
    }
    assert!(bench.choose(ms(1)).is_none());
    assert!(!bench.fleet.view(ms(1))[0].is_available());
    assert!(bench.fleet.choose(&"unknown".into(), &mut bench.attempts(), tokens(1, 1), ms(1)).is_none());
}

#[test]
fn an_engine_that_left_finishes_what_it_has_and_takes_no_more() {
    let bench = Bench::new(pool(&["a"]));
    let held = bench.choose(ms(0)).unwrap();
    bench.fleet.apply_settings(&[Arc::new(pool(&["b"]))], ms(1));
    assert_eq!(bench.spread(5, ms(2)).0["b:1"], 5);
    let view = |at| bench.fleet.view(at).remove(0).engines;
    assert_eq!(
        (view(ms(2))[0].state, view(ms(2))[0].requests, view(ms(2))[0].left),
        (EngineState::Left, 1, Some(ms(1)))
    );
    let long_after = ms(1) + REMEMBERED;
    assert_eq!(view(long_after).len(), 2, "it still has a request");
    drop(held);
    assert_eq!(view(long_after).len(), 1);
}

#[test]
fn a_drained_engine_finishes_what_it_has_and_takes_no_more_until_it_is_put_back() {
    let bench =
        Bench::new(PoolSettings { concurrency: Concurrency::Fixed(4.try_into().unwrap()), ..pool(&["a", "b"]) });
    let held = bench.fleet.choose(&id(), &mut Attempts::new(&bench.settings, LATER), tokens(9, 9), ms(0)).unwrap();
    let (busy, other) = if held.engine == engine("a") { ("a", "b") } else { ("b", "a") };
    let view = bench.fleet.drain(&id(), &engine(busy), None, false, ms(1)).unwrap();
    assert_eq!((view.is_drained, view.drained_for, view.requests, view.state), (true, None, 1, EngineState::Up));
    assert!(!view.takes_requests());
    assert_eq!(bench.fleet.seats(&id(), ms(1)), Some(4), "its seats go with it");
    assert_eq!(bench.spread(3, ms(2)).0[&format!("{other}:1")], 3);
    let year = ms(0) + Duration::from_secs(365 * 24 * 60 * 60);
    assert_eq!(bench.spread(3, year).0[&format!("{other}:1")], 3, "without an end it has none");
    drop(held);
    let back = bench.fleet.put_back(&id(), &engine(busy), year).unwrap();
    assert!(back.takes_requests() && !back.is_drained);
    assert_eq!(bench.fleet.seats(&id(), year), Some(8));
    assert_eq!(bench.spread(4, year).0[&format!("{busy}:1")], 2);
}

#[test]
fn a_drain_survives_reloads_checks_and_an_open_breaker_and_ends_by_itself() {
    let bench = Bench::new(pool(&["a", "b"]));
    bench.fleet.drain(&id(), &engine("a"), Some(Duration::from_secs(60)), false, ms(0)).unwrap();
    bench.fleet.apply_settings(&[Arc::new(pool(&["b", "a", "c"]))], ms(1));
    bench.fleet.apply_settings(&[Arc::new(pool(&["b"]))], ms(2));
    bench.fleet.apply_settings(&[Arc::new(pool(&["a", "b"]))], ms(3));
    for checked in [ProbeResult::Refused, ProbeResult::Healthy] {
        let _ = bench.fleet.checked(&id(), &engine("a"), checked, ms(4));
    }
    (0..20).for_each(|_| bench.effect(EngineEffect::Fault(engine("b")), ms(5)));
    assert_eq!(bench.state("b", ms(5)), EngineState::BreakerOpen);
    let mut attempts = bench.attempts();
    attempts.pass_breakers();
    let choice = bench.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(6)).unwrap();
    assert_eq!(choice.engine, engine("b"), "rather past a breaker than to an engine that was taken out");
    drop(choice);
    let view = bench.fleet.view(ms(10_000)).remove(0).engines.remove(0);
    assert_eq!((view.is_drained, view.drained_for), (true, Some(Duration::from_secs(50))));
    assert_eq!(bench.fleet.available(&id(), ms(59_999)), 1);
    assert_eq!(bench.fleet.available(&id(), ms(60_000)), 2);
}

#[test]
fn the_last_engine_of_a_pool_is_drained_only_on_purpose() {
    let bench = Bench::new(pool(&["a", "b"]));
    let drain = |name: &str, may_empty| bench.fleet.drain(&id(), &engine(name), None, may_empty, ms(1)).map(drop);
    let _ = bench.fleet.checked(&id(), &engine("b"), ProbeResult::Refused, ms(0));
    assert_eq!(drain("b", false), Ok(()), "it takes none anyway");
    assert_eq!(drain("a", false), Err(DrainError::LastEngine));
    assert_eq!(drain("a", true), Ok(()));
    assert!(bench.choose(ms(2)).is_none());
    assert_eq!(drain("a", false), Ok(()), "said twice, it changes nothing");
    assert_eq!(drain("c", true), Err(DrainError::UnknownEngine));
    let elsewhere = bench.fleet.drain(&"q".into(), &engine("a"), None, true, ms(1));
    assert_eq!(elsewhere, Err(DrainError::UnknownPool));
    bench.fleet.apply_settings(&[], ms(3));
    assert_eq!(bench.fleet.put_back(&id(), &engine("a"), ms(4)), Err(DrainError::UnknownPool), "no settings name it");
}

#[test]
fn what_is_known_of_an_engine_survives_a_reload() {
    let bench = Bench::new(pool(&["a", "b"]));
    let _ = bench.fleet.checked(&id(), &engine("a"), ProbeResult::Refused, ms(0));
    let held = bench.choose(ms(1)).unwrap();
    bench.fleet.apply_settings(&[Arc::new(pool(&["b", "a", "c"]))], ms(2));
    assert_eq!(bench.state("a", ms(3)), EngineState::Down);
    let views = bench.fleet.view(ms(3)).remove(0).engines;
    assert_eq!(views.iter().map(|view| view.requests).collect::<Vec<_>>(), [0, 1, 0]);
    drop(held);
}

#[test]
fn an_engine_that_left_and_came_back_is_the_same_engine_anew() {
    let bench = Bench::new(pool(&["a", "b"]));
    let mut attempts = bench.attempts();
    attempts.begin(engine("a"));
    bench.effect(EngineEffect::InjectionSwitchedOff(engine("a")), ms(0));
    bench.fleet.apply_settings(&[Arc::new(pool(&["b"]))], ms(1));
    bench.fleet.apply_settings(&[Arc::new(pool(&["a", "b"]))], ms(2));
    assert_eq!(bench.state("a", ms(2)), EngineState::Up);
    assert!(!bench.fleet.view(ms(2))[0].engines[0].injection_refused);
}

#[test]
fn a_pool_that_went_is_shown_for_ten_minutes_and_no_longer() {
    let bench = Bench::new(pool(&["a"]));
    let held = bench.choose(ms(0)).unwrap();
    bench.fleet.apply_settings(&[], ms(1));
    let long_after = ms(1) + REMEMBERED;
    assert_eq!(bench.fleet.view(long_after).len(), 1, "it still has a request");
    drop(held);
    assert_eq!(bench.fleet.view(ms(0) + REMEMBERED).len(), 1);
    assert!(bench.fleet.view(long_after).is_empty());
}

#[test]
fn engines_that_report_to_a_pool_that_nobody_asks_pile_nothing_up() {
    let bench = Bench::new(pool(&["a"]));
    for second in 0..1000 {
        bench.fleet.reported(&id(), &engine("a"), EngineMetrics::default(), ms(1000 * second));
    }
    let live_pool = bench.fleet.live_pool(&id()).unwrap();
    assert!(live_pool.inner.lock().wakes.len() < 10);
}

#[test]
fn a_pool_that_settings_no_longer_name_still_serves_requests_that_know_it() {
    let bench = Bench::new(pool(&["a"]));
    bench.fleet.apply_settings(&[], ms(1));
    assert!(bench.choose(ms(2)).is_some());
    assert!(!bench.fleet.view(ms(2))[0].is_named);
    bench.fleet.apply_settings(&[], ms(1) + REMEMBERED);
    assert!(bench.fleet.view(ms(2) + REMEMBERED).is_empty());
}

#[test]
fn engines_of_a_dns_name_stay_over_a_reload() {
    let dns = DnsName {
        name: "svc".into(),
        port: 1,
        scheme: Scheme::Http,
        refresh: Duration::from_secs(5),
        family: AddressFamily::Auto,
    };
    let settings = PoolSettings::with_defaults(id(), EngineSource::Dns(dns));
    let bench = Bench::new(settings.clone());
    assert!(bench.choose(ms(0)).is_none());
    bench.fleet.set_engines(&id(), vec![address("a")], ms(1));
    bench.fleet.apply_settings(&[Arc::new(settings)], ms(2));
    assert!(bench.choose(ms(3)).is_some());
}

#[test]
fn injections_are_learned_per_engine() {
    let bench = Bench::new(pool(&["a"]));
    let choice = || bench.choose(ms(70_000)).unwrap();
    assert!(choice().may_inject && !choice().injection_proven);
    bench.effect(EngineEffect::InjectionAccepted(engine("a")), ms(10_001));
    assert!(choice().injection_proven);
    bench.effect(EngineEffect::InjectionAccepted(engine("a")), ms(10_000));
    assert!(!choice().injection_proven, "a minute ago proves nothing");
    bench.fleet.mark_compressed(&id(), &engine("a"));
    assert!(!choice().may_inject);
}

#[test]
fn what_a_pool_has_served_is_remembered_by_path() {
    let bench = Bench::new(pool(&["a"]));
    let chat = ApiPath::relayed("/v1/chat/completions").unwrap();
    let embeddings = ApiPath::relayed("/v1/embeddings").unwrap();
    assert!(!bench.fleet.has_served(&id(), chat, "m"));
    let live_pool = bench.fleet.live_pool(&id()).unwrap();
    live_pool.note_served(chat, "m");
    assert!(bench.fleet.has_served(&id(), chat, "m"));
    assert!(!bench.fleet.has_served(&id(), embeddings, "m"));
    (0..10_000).for_each(|n| live_pool.note_served(chat, &n.to_string()));
    assert!(!bench.fleet.has_served(&id(), chat, "9999"), "bounded");
}

#[test]
fn failing_attempts_walk_through_the_pool() {
    let bench = Bench::new(pool(&["a", "b", "c"]));
    let mut attempts = bench.attempts();
    let mut seen = Vec::new();
    while let Some(choice) = bench.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(1)) {
        seen.push(choice.engine.to_string());
        if bench.fleet.failed(&id(), &mut attempts, AttemptOutcome::ConnectFailed, ms(1)) != RetryDecision::Another {
            break;
        }
    }
    seen.sort();
    assert_eq!(seen, ["a:1", "b:1", "c:1"]);
    let alone = Bench::new(pool(&["a"]));
    let mut attempts = alone.attempts();
    let first = alone.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(1));
    assert_eq!(alone.fleet.failed(&id(), &mut attempts, AttemptOutcome::Broken, ms(1)), RetryDecision::Another);
    assert!(alone.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(1)).is_some());
    drop(first);
}

#[test]
fn with_the_other_engine_down_the_only_one_left_is_asked_again() {
    let bench = Bench::new(pool(&["a", "b"]));
    let _ = bench.fleet.checked(&id(), &engine("b"), ProbeResult::Refused, ms(0));
    let mut attempts = bench.attempts();
    let _first = bench.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(1)).unwrap();
    assert_eq!(bench.fleet.failed(&id(), &mut attempts, AttemptOutcome::Broken, ms(1)), RetryDecision::Another);
    let second = bench.fleet.choose(&id(), &mut attempts, tokens(1, 1), ms(1)).unwrap();
    assert_eq!(second.engine, engine("a"));
}

/// Twenty seconds in which engines get two requests each at once and prefill them one after the other, at
/// this many milliseconds per thousand prompt tokens; a step takes a twentieth of that.
fn teach(bench: &Bench, speeds: &[(&str, u64)], rounds: std::ops::Range<u64>) {
    for round in rounds {
        let at = ms(20_000 * round);
        let size = tokens(500 + round * 37 % 1_000, 100);
        // All engines in turn, whatever the ranking.
        let mut held = Vec::new();
        for _ in 0..2 {
            let mut attempts = bench.attempts();
            held.extend((0..speeds.len()).filter_map(|_| bench.fleet.choose(&id(), &mut attempts, size, at)));
        }
        let millis = |choice: &PickedEngine| speeds.iter().find(|(name, _)| engine(name) == choice.engine).unwrap().1;
        let prefill = |choice: &PickedEngine, prompts: u32| {
            prompts * Duration::from_micros(size.prefill.0 * millis(choice)) + Duration::from_millis(20)
        };
        for (number, choice) in held.iter_mut().enumerate() {
            let prompts = number as u32 / speeds.len() as u32 + 1;
            choice.work.first_token(at + prefill(choice, prompts));
        }
        for (number, choice) in held.into_iter().enumerate() {
            let (first, last) = (prefill(&choice, number as u32 / speeds.len() as u32 + 1), prefill(&choice, 2));
            let end = last + 50 * Duration::from_millis(millis(&choice)) / 20;
            let sample = LatencySample {
                ttft: Some(first),
                tpot: Some((end - first) / 50),
                e2e: None,
                further: 50,
                cached: None,
            };
            choice.work.learned(&sample, at + end);
        }
    }
}

fn auto(names: &[&str]) -> Bench {
    Bench::new(PoolSettings { concurrency: Concurrency::Auto, ..pool(names) })
}

fn hold(bench: &Bench, ttft: Option<u64>, tpot: Option<u64>) {
    let (ttft, tpot) = (ttft.map(Duration::from_millis), tpot.map(Duration::from_millis));
    bench.fleet.set_targets(&id(), PoolTargets { ttft, tpot, ..PoolTargets::default() });
}

fn seats_of(bench: &Bench, name: &str, at: Tick) -> u32 {
    let views = bench.fleet.view(at).remove(0).engines;
    views.iter().find(|view| view.engine == engine(name)).unwrap().seats.unwrap()
}

/// Within 10 %.
fn near(is: f64, ought: f64) -> bool {
    (is / ought).ln().abs() < 0.1
}

#[test]
fn how_much_an_engine_may_have_ahead_follows_its_speed_and_the_strictest_first_token() {
    let bench = auto(&["a", "b"]);
    let at = ms(10_000_000);
    hold(&bench, Some(1_000), None);
    assert_eq!(bench.fleet.update_pace(&id(), at), None, "nothing is known");
    teach(&bench, &[("a", 160), ("b", 320)], 0..100);
    hold(&bench, None, None);
    assert_eq!(bench.fleet.update_pace(&id(), at), None, "nobody is promised anything");
    let pace = |ttft| {
        hold(&bench, Some(ttft), None);
        bench.fleet.update_pace(&id(), at).unwrap()
    };
    // 6,250 and 3,125 tokens a second.
    let (strict, lax, strictest) = (pace(1_000), pace(10_000), pace(10));
    let both = f64::midpoint(6_250.0, 3_125.0);
    assert!(near(strict.most, 0.35 * both) && near(strict.least, 0.25 * both), "{strict:?}");
    assert!(near(lax.most, 3.5 * both) && near(lax.least, 0.35 * both), "more is of no use to an engine: {lax:?}");
    assert_eq!((strictest.most, strictest.least), (512.0, 512.0), "enough to fill a step");
    assert!(near(strict.burst, 0.4 * 2.0 * both) && near(strict.behind, 2.0 * both), "{strict:?}");
    assert!(strict.per_second.is_infinite(), "no class has a time per token that prompts could break");
    let other = Bench::new(pool(&["a", "b"]));
    teach(&other, &[("a", 160), ("b", 320)], 0..100);
    hold(&other, Some(1_000), Some(50));
    assert_eq!(other.fleet.update_pace(&id(), at), None, "nobody waits here");
}

#[test]
fn prompts_come_as_fast_as_the_steps_of_the_engines_leave_time_for_them() {
    let bench = auto(&["a", "b"]);
    teach(&bench, &[("a", 160), ("b", 160)], 0..100);
    let at = ms(2_000_000);
    let per_second = |tpot| {
        hold(&bench, Some(1_000), Some(tpot));
        bench.fleet.update_pace(&id(), at).unwrap().per_second
    };
    // A step takes 8 ms with one or two sequences; the initial pace is 90 % of the objective.
    let (lax, strict, out_of_reach) = (per_second(1_000), per_second(16), per_second(1));
    assert!(near(lax, 0.95 * 2.0 * 6_250.0), "nearly all that they can: {lax}");
    assert!(strict < 0.6 * lax && strict > 0.3 * lax, "{strict} of {lax}");
    assert!(out_of_reach > 0.1 * lax, "an engine that cannot keep it alone goes on: {out_of_reach}");
    // An unknown engine counts like the others.
    bench
        .fleet
        .apply_settings(&[Arc::new(PoolSettings { concurrency: Concurrency::Auto, ..pool(&["a", "b", "new"]) })], at);
    assert!(near(per_second(1_000), 1.5 * lax));
    bench.fleet.apply_settings(&[Arc::new(PoolSettings { concurrency: Concurrency::Auto, ..pool(&["a"]) })], at);
    assert!(near(per_second(1_000), 0.5 * lax), "one that left is not asked");
}

#[test]
fn outcomes_correct_the_pace_within_bounds() {
    let bench = auto(&["a"]);
    teach(&bench, &[("a", 160)], 0..100);
    hold(&bench, Some(1_000), Some(40));
    let answer = |tpot: u64, second: u64| {
        let at = ms(2_000_000 + 1_000 * second);
        let targets = SloTargets { tpot: Some(Duration::from_millis(40)), ..SloTargets::NONE };
        let pick = PickRequest { targets, ..tokens(10, 10).into() };
        let mut choice = bench.fleet.choose(&id(), &mut bench.attempts(), pick, at).unwrap();
        choice.work.first_token(at + Duration::from_millis(10));
        let each = Duration::from_millis(tpot);
        let end = at + 50 * each + Duration::from_millis(10);
        // Judged only; learning of steps is not tested here.
        choice.work.learned(&LatencySample { ttft: None, tpot: Some(each), e2e: None, further: 50, cached: None }, end);
        bench.fleet.update_pace(&id(), end).unwrap().per_second
    };
    let first = answer(41, 0);
    let cut = (1..40).map(|n| answer(41, n)).fold(first, f64::min);
    assert!(cut < 0.98 * first && cut > 0.5 * first, "{first} {cut}");
    let back = (40..900).map(|n| answer(39, n)).fold(cut, f64::max);
    assert!(back > first, "{first} {cut} {back}");
}

#[test]
fn seats_are_as_many_as_the_steps_of_each_engine_allow_and_stay_within_the_bounds_of_the_pool() {
    let bench = auto(&["slow", "quick"]);
    // Steps of 40 and 16 ms, and the default of 0.2 ms per additional sequence.
    teach(&bench, &[("slow", 800), ("quick", 320)], 0..100);
    let at = ms(2_000_000);
    hold(&bench, None, Some(60));
    let _ = bench.fleet.update_pace(&id(), at);
    let (slow, quick) = (seats_of(&bench, "slow", at), seats_of(&bench, "quick", at));
    assert!(slow < quick / 2 && slow >= 5 && quick < 1024, "{slow} {quick}");
    assert_eq!(bench.fleet.seats(&id(), at), Some((slow + quick) as usize));
    hold(&bench, None, None);
    let _ = bench.fleet.update_pace(&id(), at);
    assert_eq!(bench.fleet.seats(&id(), at), Some(2 * 1024), "where nothing is promised nothing is kept back for it");
    let bounds =
        crate::route::settings::SeatBounds { min: NonZeroU32::new(30).unwrap(), max: NonZeroU32::new(40).unwrap() };
    let bounded = PoolSettings { concurrency: Concurrency::Auto, seat_bounds: bounds, ..pool(&["slow", "quick"]) };
    bench.fleet.apply_settings(&[Arc::new(bounded)], at);
    assert!(bench.fleet.seats(&id(), at).is_some_and(|seats| (60..=80).contains(&seats)));
}

#[test]
fn what_a_slower_engine_has_cached_is_no_reason_to_choose_it() {
    for (other, expected) in [(160, "b"), (480, "a")] {
        let bench = auto(&["a", "b"]);
        teach(&bench, &[("a", 160), ("b", other)], 0..100);
        let at = ms(2_000_000);
        hold(&bench, Some(1_000), Some(60));
        let _ = bench.fleet.update_pace(&id(), at);
        let live_pool = bench.fleet.live_pool(&id()).unwrap();
        let mut inner = live_pool.inner.lock();
        let blocks: Vec<u64> = (1..=40).collect();
        let place_of = |name| inner.places[&engine(name)];
        let (holder, expected) = (place_of("b"), place_of(expected));
        inner.note_prefix(holder, &blocks, Tokens::ZERO, at);
        let pick = PickRequest::from(tokens(1_000, 100));
        let best = inner.best_for(&pick, &blocks, &[]).unwrap();
        assert_eq!(best, expected, "{other}");
    }
}

#[test]
fn a_full_cache_takes_seats_and_what_came_in_the_place_of_the_engine_has_them_again() {
    let bench = auto(&["a"]);
    let report = |usage, waiting| EngineMetrics {
        kv_usage: Some(usage),
        running: Some(20.0),
        waiting: Some(waiting),
        asleep: false,
    };
    // Its running sequences are all ours.
    let held: Vec<_> = (0..20).map(|_| bench.choose(ms(0))).collect();
    bench.fleet.reported(&id(), &engine("a"), report(0.99, 4.0), ms(0));
    assert_eq!(seats_of(&bench, "a", ms(1)), 18);
    bench.fleet.reported(&id(), &engine("a"), report(0.5, 0.0), ms(2));
    assert_eq!(seats_of(&bench, "a", ms(3)), 19);
    let _ = bench.fleet.checked(&id(), &engine("a"), ProbeResult::Refused, ms(4));
    let _ = bench.fleet.checked(&id(), &engine("a"), ProbeResult::Healthy, ms(5));
    assert!(seats_of(&bench, "a", ms(6)) < 18, "it starts slowly");
    assert_eq!(seats_of(&bench, "a", ms(10_006)), 64, "the first figure");
    drop(held);
}

#[test]
fn c106_the_batch_of_a_quiet_moment_takes_no_seats() {
    let bench = auto(&["a", "b"]);
    teach(&bench, &[("a", 320), ("b", 320)], 0..100);
    hold(&bench, Some(1_000), Some(60));
    let _ = bench.fleet.update_pace(&id(), ms(2_000_000));
    let before = bench.fleet.seats(&id(), ms(2_000_000)).unwrap();
    assert!(before > 100, "{before}");
    // Half an hour with a response every ten seconds; one in thirty stalls and is late.
    for quiet in 0..180 {
        let at = ms(2_000_000 + 10_000 * quiet);
        let targets = SloTargets { tpot: Some(Duration::from_millis(60)), ..SloTargets::NONE };
        let mut choice = bench
            .fleet
            .choose(&id(), &mut bench.attempts(), PickRequest { targets, ..tokens(600, 50).into() }, at)
            .unwrap();
        let (ttft, each) = (Duration::from_millis(212), Duration::from_millis(if quiet % 30 == 29 { 90 } else { 16 }));
        choice.work.first_token(at + ttft);
        let end = at + ttft + 50 * each;
        choice
            .work
            .learned(&LatencySample { ttft: Some(ttft), tpot: Some(each), e2e: None, further: 50, cached: None }, end);
        let _ = bench.fleet.update_pace(&id(), end);
        let seats = bench.fleet.seats(&id(), end).unwrap();
        assert!(seats * 10 >= before * 7, "{seats} of {before} after {quiet} answers");
    }
}

fn pick(millis: u64) -> PickRequest {
    let targets = SloTargets { ttft: Some(Duration::from_millis(millis)), ..SloTargets::NONE };
    PickRequest { targets, ..tokens(1_000, 100).into() }
}

fn share_of(bench: &Bench, name: &str, pick: PickRequest, at: Tick) -> usize {
    let ask = || bench.fleet.choose(&id(), &mut bench.attempts(), pick, at).unwrap();
    (0..1_000).filter(|_| ask().engine == engine(name)).count()
}

#[test]
fn a_slow_engine_is_asked_for_less_and_one_of_which_little_is_known_is_as_the_quickest() {
    let bench = auto(&["slow", "quick"]);
    assert_eq!(bench.fleet.predict(&id(), tokens(1_000, 100), ms(0)), None);
    teach(&bench, &[("slow", 900), ("quick", 300)], 0..50);
    let at = ms(20_000 * 49 + 6_000);
    hold(&bench, Some(60_000), Some(1_000));
    let _ = bench.fleet.update_pace(&id(), at);
    let (spread, held) = bench.spread(80, at);
    assert!((12..=28).contains(&spread["slow:1"]), "about a quarter: {spread:?}");
    drop(held);
    bench.fleet.apply_settings(
        &[Arc::new(PoolSettings { concurrency: Concurrency::Auto, ..pool(&["slow", "quick", "new"]) })],
        at,
    );
    let at = at + Duration::from_secs(11);
    let _ = bench.fleet.update_pace(&id(), at);
    let (spread, _held) = bench.spread(70, at);
    assert!(spread["new:1"].abs_diff(spread["quick:1"]) <= 1, "{spread:?}");
    assert!(spread["slow:1"] < spread["new:1"] * 2 / 3, "{spread:?}");
}

/// Two equal engines of which one was three times slower for a while, then sequential requests: its share
/// per minute.
#[test]
fn c108_an_engine_that_was_slow_once_is_asked_again_within_two_minutes() {
    let bench = auto(&["a", "b"]);
    hold(&bench, Some(60_000), Some(1_000));
    teach(&bench, &[("a", 300), ("b", 300)], 0..50);
    teach(&bench, &[("a", 900), ("b", 300)], 50..80);
    let begin = 80 * 20_000;
    let mut of_minutes = [0; 6];
    for request in 0..360 {
        let at = ms(begin + 1_000 * request);
        let _ = bench.fleet.update_pace(&id(), at);
        let mut choice = bench.fleet.choose(&id(), &mut bench.attempts(), tokens(1_000, 50), at).unwrap();
        of_minutes[request as usize / 60] += usize::from(choice.engine == engine("a"));
        let (ttft, each) = (Duration::from_millis(320), Duration::from_millis(15));
        choice.work.first_token(at + ttft);
        let sample = LatencySample { ttft: Some(ttft), tpot: Some(each), e2e: None, further: 20, cached: None };
        choice.work.learned(&sample, at + ttft + 20 * each);
    }
    assert_eq!(of_minutes[0], 0, "what was learned just now holds: {of_minutes:?}");
    assert!(of_minutes[..3].iter().sum::<usize>() > 0, "{of_minutes:?}");
    assert!(of_minutes[5] >= 20, "and as it is as quick as the other, it has its part again: {of_minutes:?}");
}

#[test]
fn engines_that_are_equal_within_the_error_of_what_was_learned_share_alike() {
    let bench = auto(&["a", "b"]);
    hold(&bench, Some(60_000), Some(1_000));
    teach(&bench, &[("a", 300), ("b", 340)], 0..50);
    let at = ms(20_000 * 50);
    let _ = bench.fleet.update_pace(&id(), at);
    let slower = share_of(&bench, "b", tokens(1_000, 100).into(), at);
    assert!((400..600).contains(&slower), "{slower}");
}

#[test]
fn the_usual_length_of_answers_is_told_by_the_promise_of_their_class() {
    let bench = auto(&["a"]);
    let limit = Duration::from_secs(20);
    let whole = PickRequest { whole: Some(limit), ..tokens(100, 1_000).into() };
    for further in 0..100 {
        let choice = bench.fleet.choose(&id(), &mut bench.attempts(), whole, ms(further)).unwrap();
        choice.work.learned(&LatencySample { further, e2e: Some(limit / 2), ..LatencySample::default() }, ms(further));
    }
    assert_eq!(bench.fleet.usual_length(&id(), limit), Some(89));
    assert_eq!(bench.fleet.usual_length(&id(), 2 * limit), None);
}

#[test]
fn what_is_predicted_is_shown_with_its_error() {
    let bench = Bench::new(pool(&["a"]));
    teach(&bench, &[("a", 500)], 0..100);
    let at = ms(2_000_000);
    let idle = bench.fleet.predict(&id(), tokens(1_000, 100), at).unwrap();
    assert!(idle.ttft.abs_diff(Duration::from_millis(520)) < Duration::from_millis(60), "{idle:?}");
    let _held = bench.choose(at);
    let busy = bench.fleet.predict(&id(), tokens(1_000, 100), at).unwrap();
    assert!(busy.ttft.abs_diff(idle.ttft) < Duration::from_millis(40), "what it waits for in the queue is not in it");
    let view = bench.fleet.view(at).remove(0).engines.remove(0);
    assert!(view.errors.ttft.unwrap() < 0.1 && view.errors.tpot.is_some());
    assert_eq!(view.seats, None);
}

fn keyed(names: &[&str]) -> Bench {
    Bench::new(PoolSettings { balance: Balance::PrefixAffinity, ..pool(names) })
}

fn homes(bench: &Bench, keys: u64, at: Tick) -> Vec<EngineId> {
    let pick = |key| PickRequest { key: crate::route::key_of(&[key as u8]), ..tokens(100, 100).into() };
    let ask = |key| bench.fleet.choose(&id(), &mut bench.attempts(), pick(key), at).unwrap().engine;
    (0..keys).map(ask).collect()
}

#[test]
fn a_key_meets_its_own_engine_and_other_gateways_agree() {
    let bench = keyed(&["a", "b", "c", "d"]);
    let first = homes(&bench, 100, ms(0));
    assert_eq!(homes(&bench, 100, ms(1)), first);
    assert_eq!(first.iter().collect::<HashSet<_>>().len(), 4);
    let other = Bench { fleet: Fleet::new(7), settings: bench.settings.clone() };
    let shuffled = PoolSettings { balance: Balance::PrefixAffinity, ..pool(&["d", "b", "a", "c"]) };
    other.fleet.apply_settings(&[Arc::new(shuffled)], ms(0));
    assert_eq!(homes(&other, 100, ms(0)), first);
}

#[test]
fn only_the_keys_of_an_engine_that_cannot_take_them_move() {
    let bench = keyed(&["a", "b", "c", "d"]);
    let first = homes(&bench, 200, ms(0));
    let moved = |at| {
        let now = homes(&bench, 200, at);
        let pairs = first.iter().zip(&now).filter(|(old, new)| old != new);
        pairs.map(|(old, _)| old.clone()).collect::<HashSet<_>>()
    };
    let _ = bench.fleet.checked(&id(), &engine("b"), ProbeResult::Refused, ms(1));
    assert_eq!(moved(ms(1)), HashSet::from([engine("b")]));
    let _ = bench.fleet.checked(&id(), &engine("b"), ProbeResult::Healthy, ms(2));
    bench.cool("c", 1_000, ms(2));
    assert_eq!(moved(ms(3)), HashSet::from([engine("c")]));
    assert_eq!(moved(ms(1_002)), HashSet::new());
    (0..5).for_each(|n| bench.effect(EngineEffect::Fault(engine("d")), ms(2_000 + n)));
    assert_eq!(moved(ms(2_010)), HashSet::from([engine("d")]));
}

#[test]
fn a_key_that_everybody_asks_for_is_shared_by_as_many_as_it_takes() {
    let bench = keyed(&["a", "b", "c", "d"]);
    let pick = PickRequest { key: 99, ..tokens(100, 100).into() };
    let mut held = Vec::new();
    let mut most = HashMap::new();
    for n in 1..=100u32 {
        let choice = bench.fleet.choose(&id(), &mut bench.attempts(), pick, ms(0)).unwrap();
        let count = most.entry(choice.engine.clone()).or_insert(0u32);
        *count += 1;
        let bound = (1.25 * f64::from(n) / 4.0).ceil().max(4.0);
        assert!(f64::from(*count) <= bound, "{n} requests, {count} at one");
        held.push(choice);
    }
    assert_eq!(most.len(), 4);
    assert!(most.values().filter(|count| **count >= 28).count() >= 2, "in its own order: {most:?}");
}

#[test]
fn a_retry_of_a_key_goes_to_the_next_of_its_order_and_no_key_goes_by_work() {
    let bench = keyed(&["a", "b", "c"]);
    let pick = PickRequest { key: 5, ..tokens(1, 1).into() };
    let mut attempts = bench.attempts();
    let order: Vec<_> = std::iter::from_fn(|| bench.fleet.choose(&id(), &mut attempts, pick, ms(0)))
        .map(|choice| choice.engine)
        .collect();
    assert_eq!(order.iter().collect::<HashSet<_>>().len(), 3);
    let (spread, _held) = bench.spread(30, ms(1));
    assert_eq!(spread.into_values().collect::<Vec<_>>(), [10, 10, 10]);
}

#[test]
fn a_full_engine_and_one_that_warms_up_take_fewer_of_their_keys() {
    let limited = PoolSettings { balance: Balance::PrefixAffinity, ..capped(&["a", "b"], 2) };
    let bench = Bench::new(limited);
    let pick = PickRequest { key: 5, ..tokens(1, 1).into() };
    let ask = |bench: &Bench, at| bench.fleet.choose(&id(), &mut bench.attempts(), pick, at).unwrap();
    let held: Vec<_> = (0..4).map(|_| ask(&bench, ms(0))).collect();
    assert_eq!(held.iter().filter(|choice| choice.engine == held[0].engine).count(), 2);
    let bench = keyed(&["a", "b"]);
    let home = ask(&bench, ms(0)).engine;
    let _ = bench.fleet.checked(&id(), &home, ProbeResult::Refused, ms(0));
    let _ = bench.fleet.checked(&id(), &home, ProbeResult::Healthy, ms(1));
    let held: Vec<_> = (0..4).map(|_| ask(&bench, ms(2))).collect();
    assert_eq!(held.iter().filter(|choice| choice.engine == home).count(), 1, "a tenth, one at least");
}

#[derive(Clone, Debug)]
enum Act {
    Choose(u64, u64),
    /// With an affinity key and a target.
    ChooseFor(u64, u64),
    Drop(usize),
    Learn(usize, u64),
    FirstToken(usize),
    Fault(usize),
    Well(usize),
    Cool(usize, u64),
    Check(usize, bool),
    Sleep(u64),
    Members(u8),
}

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0u64..2_000, 0u64..2_000).prop_map(|(prefill, decode)| Act::Choose(prefill, decode)),
        4 => (0u64..4, 1u64..2_000).prop_map(|(key, millis)| Act::ChooseFor(key, millis)),
        3 => (0usize..20).prop_map(Act::Drop),
        3 => (0usize..20, 1u64..2_000).prop_map(|(n, millis)| Act::Learn(n, millis)),
        2 => (0usize..20).prop_map(Act::FirstToken),
        3 => (0usize..5).prop_map(Act::Fault),
        1 => (0usize..5).prop_map(Act::Well),
        1 => (0usize..5, 0u64..5_000).prop_map(|(engine, millis)| Act::Cool(engine, millis)),
        1 => (0usize..5, any::<bool>()).prop_map(|(engine, well)| Act::Check(engine, well)),
        2 => (0u64..3_000).prop_map(Act::Sleep),
        1 => (1u8..32).prop_map(Act::Members),
    ]
}

proptest! {
    #[test]
    fn nobody_unfit_is_chosen_and_the_books_return_to_zero(
        acts in proptest::collection::vec(act(), 1..400), by in 0usize..3, finds in any::<bool>(),
    ) {
        let balance = [Balance::LeastWork, Balance::RoundRobin, Balance::PrefixAffinity][by].clone();
        let concurrency = if finds { Concurrency::Auto } else { capped(&[], 3).concurrency };
        let settings = |members: u8| {
            let names: Vec<_> = (0..5).filter(|n| members & (1 << n) != 0).map(|n| NAMES[n]).collect();
            let breaker = Some(BreakerLimits { faults: 2, ..BreakerLimits::default() });
            PoolSettings { breaker, balance: balance.clone(), concurrency, ..pool(&names) }
        };
        let bench = Bench::new(settings(31));
        let mut at = ms(0);
        let mut held: Vec<PickedEngine> = Vec::new();
        for act in acts {
            match act {
                Act::Choose(..) | Act::ChooseFor(..) => {
                    let before = bench.fleet.view(at).remove(0).engines;
                    let pick = match act {
                        Act::Choose(prefill, decode) => tokens(prefill, decode).into(),
                        Act::ChooseFor(key, millis) => PickRequest { key, ..pick(millis) },
                        _ => unreachable!("no other act comes here"),
                    };
                    let chosen = bench.fleet.choose(&id(), &mut bench.attempts(), pick, at);
                    let up = |state| before.iter().any(|view| view.state == state);
                    match &chosen {
                        None => prop_assert!(!up(EngineState::Up) && !up(EngineState::Cooling)),
                        Some(choice) => {
                            let seen = before.iter().find(|view| view.engine == choice.engine).unwrap();
                            prop_assert!(seen.state.takes_requests(), "{:?}", seen.state);
                            prop_assert!(seen.state == EngineState::Up || !up(EngineState::Up));
                            let has_seat = |view: &EngineView| view.seats.is_none_or(|seats| view.requests < seats);
                            let other = before.iter().any(|view| view.state == EngineState::Up && has_seat(view));
                            prop_assert!(has_seat(seen) || !other, "another one has a seat");
                        }
                    }
                    held.extend(chosen);
                }
                Act::Learn(n, millis) if n < held.len() => {
                    let took = Duration::from_millis(millis);
                    let sample = LatencySample { ttft: Some(took), tpot: Some(took / 20), ..LatencySample::default() };
                    held.swap_remove(n).work.learned(&sample, at);
                }
                Act::Drop(n) if n < held.len() => drop(held.swap_remove(n)),
                Act::FirstToken(n) if n < held.len() => held[n].work.first_token(at),
                Act::Fault(n) => bench.effect(EngineEffect::Fault(engine(NAMES[n])), at),
                Act::Well(n) => bench.effect(EngineEffect::Well(engine(NAMES[n])), at),
                Act::Cool(n, millis) => bench.cool(NAMES[n], millis, at),
                Act::Check(n, well) => {
                    let checked = if well { ProbeResult::Healthy } else { ProbeResult::Refused };
                    let _ = bench.fleet.checked(&id(), &engine(NAMES[n]), checked, at);
                }
                Act::Sleep(millis) => at = at + Duration::from_millis(millis),
                Act::Members(members) => bench.fleet.apply_settings(&[Arc::new(settings(members))], at),
                Act::Drop(_) | Act::FirstToken(_) | Act::Learn(..) => {}
            }
            let engines = &bench.fleet.view(at)[0].engines;
            let requests: u32 = engines.iter().map(|view| view.requests).sum();
            prop_assert_eq!(requests as usize, held.len());
            let up = engines.iter().filter(|view| view.state == EngineState::Up).count();
            let seats = bench.fleet.seats(&id(), at).unwrap();
            let most = if finds { 1024 } else { 3 };
            // If none is up, those excluded by breakers alone contribute their seats.
            let give = if up == 0 { engines.len().max(1) } else { up };
            prop_assert!((up.max(1)..=most * give).contains(&seats), "{seats} seats, {up} up");
        }
        held.clear();
        for view in &bench.fleet.view(at)[0].engines {
            prop_assert_eq!((view.requests, view.work), (0, Tokens::ZERO), "{}", view.engine);
        }
    }
}

#[test]
fn the_heap_of_planned_looks_stays_small() {
    let bench = Bench::new(pool(&["a", "b"]));
    for n in 0..20_000 {
        bench.cool("a", 1_000, ms(n));
        drop(bench.choose(ms(n)));
    }
    let live_pool = bench.fleet.live_pool(&id()).unwrap();
    assert!(live_pool.inner.lock().wakes.len() <= 1_002);
}

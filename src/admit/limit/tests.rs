use std::num::NonZeroU64;
use std::time::Duration;

use proptest::prelude::*;

use super::settings::{Allowance, Rate};
use super::*;

const MODEL: &str = "m1";

fn acme() -> TenantId {
    TenantId::from("acme")
}

fn second(seconds: u64) -> Tick {
    Tick::from_millis(seconds * 1000)
}

fn rate(per_minute: u64) -> Option<Rate> {
    Some(Rate::new(per_minute, None).unwrap())
}

fn tokens(per_minute: u64) -> Allowance {
    Allowance { tokens: rate(per_minute), ..Allowance::default() }
}

fn requests(per_minute: u64) -> Allowance {
    Allowance { requests: rate(per_minute), ..Allowance::default() }
}

fn at_once(most: u64) -> Allowance {
    Allowance { concurrent_requests: NonZeroU64::new(most), ..Allowance::default() }
}

fn limits(whole: Allowance, models: &[(&str, Allowance)]) -> Limits {
    let models = models.iter().map(|(model, allowance)| (Arc::from(*model), allowance.clone())).collect();
    Limits { whole, models }
}

/// Settings whose only tenant is `acme`.
fn only_acme(limits: Limits) -> BTreeMap<TenantId, Limits> {
    BTreeMap::from([(acme(), limits)])
}

/// A ledger in which only `acme` has this allowance.
fn limiter(whole: Allowance) -> LocalLimiter {
    with_models(whole, &[])
}

fn with_models(whole: Allowance, models: &[(&str, Allowance)]) -> LocalLimiter {
    let limiter = LocalLimiter::new();
    limiter.reload(&only_acme(limits(whole, models)), Tick::ZERO);
    limiter
}

fn stated(input: u64, output: u64) -> Wanted {
    Wanted { input: Tokens(input), output: Output::Stated(Tokens(output)) }
}

fn assumed(input: u64, output: u64) -> Wanted {
    Wanted { input: Tokens(input), output: Output::Assumed(Tokens(output)) }
}

fn used(input: u64, output: u64) -> Used {
    Used { input: Tokens(input), output: Tokens(output) }
}

fn ask(limiter: &LocalLimiter, wanted: Wanted, at: Tick) -> Result<LocalReservation, LimitExceeded> {
    limiter.reserve(&acme(), MODEL, &wanted, at)
}

/// What is left of the only limit.
fn left(limiter: &LocalLimiter, at: Tick) -> u64 {
    let statuses = limiter.statuses(&acme(), MODEL, at);
    assert_eq!(statuses.len(), 1);
    statuses[0].remaining
}

/// The refusing limit, its scope, and the retry time.
fn refusal(result: Result<LocalReservation, LimitExceeded>) -> (LimitKind, LimitScope, Option<u64>) {
    match result {
        Err(LimitExceeded::Retryable { limit_status, retry_after }) => {
            (limit_status.limit, limit_status.scope, retry_after)
        }
        other => panic!("refused for now: {other:?}"),
    }
}

// ---- the cases ------------------------------------------------------------------------------

#[test]
fn c25_of_ten_calls_at_once_only_those_that_fit_are_let_in() {
    let limiter = limiter(tokens(1000));
    let answers: Vec<_> = (0..10).map(|_| ask(&limiter, stated(10, 300), Tick::ZERO)).collect();
    assert!(answers[..3].iter().all(Result::is_ok) && answers[3..].iter().all(Result::is_err));
    for reservation in answers.into_iter().flatten() {
        reservation.settle(used(10, 20), Tick::ZERO);
    }
    assert_eq!(left(&limiter, Tick::ZERO), 910);
}

#[test]
fn c25_threads_do_not_get_more_than_one_after_the_other() {
    let limiter = limiter(tokens(1000));
    let held = std::thread::scope(|scope| {
        let call = || ask(&limiter, stated(10, 300), Tick::ZERO).ok();
        let calls: Vec<_> = (0..10).map(|_| scope.spawn(call)).collect();
        calls.into_iter().filter_map(|call| call.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(held.len(), 3);
}

#[test]
fn c27_two_hundred_cancels_leave_the_place_free() {
    let limiter = limiter(at_once(1));
    for call in 0..200 {
        let reservation = ask(&limiter, stated(10, 20), second(call)).unwrap();
        let second_call = ask(&limiter, stated(10, 20), second(call));
        assert_eq!(refusal(second_call), (LimitKind::ConcurrentRequests, LimitScope::Tenant, None));
        reservation.cancel(Tokens(1), second(call));
    }
    assert_eq!(limiter.running(&acme()), 0);
    assert!(ask(&limiter, stated(10, 20), second(200)).is_ok());
}

#[test]
fn c29_a_cancel_pays_the_prompt_and_the_tokens_seen() {
    let limiter = limiter(tokens(1000));
    ask(&limiter, stated(30, 500), Tick::ZERO).unwrap().cancel(Tokens(60), Tick::ZERO);
    assert_eq!(left(&limiter, Tick::ZERO), 1000 - 90);
}

#[test]
fn c29_a_prompt_that_was_clipped_is_paid_in_full_at_a_cancel() {
    let limiter = limiter(tokens(100));
    ask(&limiter, assumed(150, 500), Tick::ZERO).unwrap().cancel(Tokens(10), Tick::ZERO);
    assert_eq!(refusal(ask(&limiter, stated(0, 100), Tick::ZERO)).2, Some(96), "160 at 100 a minute");
}

#[test]
fn c32_retry_after_is_when_this_request_fits() {
    let limiter = limiter(tokens(600));
    ask(&limiter, stated(100, 500), Tick::ZERO).unwrap().settle(used(100, 500), Tick::ZERO);
    let Err(refused) = ask(&limiter, stated(10, 40), Tick::ZERO) else { panic!("it is empty") };
    let limit_status = LimitStatus {
        limit: LimitKind::Tokens,
        scope: LimitScope::Tenant,
        most: 600,
        per_minute: Some(600),
        remaining: 0,
        reset: Some(Duration::from_secs(60)),
    };
    assert_eq!(refused, LimitExceeded::Retryable { limit_status, retry_after: Some(5) });
    assert_eq!(refused.to_string(), "tokens_per_minute of the tenant is used up: 0 of 600 left");
    assert!(ask(&limiter, stated(10, 40), Tick::from_millis(4999)).is_err());
    assert!(ask(&limiter, stated(10, 40), second(5)).is_ok());
}

#[test]
fn c32_running_reservations_count_as_spent_in_full() {
    let limiter = limiter(tokens(600));
    let running = ask(&limiter, stated(100, 500), Tick::ZERO).unwrap();
    assert_eq!(refusal(ask(&limiter, stated(10, 40), Tick::ZERO)).2, Some(5));
    let later = ask(&limiter, stated(10, 40), second(5)).unwrap();
    running.settle(used(100, 500), second(6));
    assert_eq!(left(&limiter, second(6)), 10);
    drop(later);
}

#[test]
fn c32_less_than_a_second_is_one() {
    let limiter = limiter(tokens(60_000));
    ask(&limiter, stated(0, 60_000), Tick::ZERO).unwrap().settle(used(0, 60_000), Tick::ZERO);
    assert_eq!(refusal(ask(&limiter, stated(0, 1), Tick::ZERO)).2, Some(1));
}

#[test]
fn c35_what_can_never_fit_is_told_so_and_costs_nothing() {
    let limiter = limiter(tokens(1000));
    let busy = ask(&limiter, stated(0, 1000), Tick::ZERO).unwrap();
    let refused = ask(&limiter, stated(4000, 1000), Tick::ZERO).unwrap_err();
    let expected =
        LimitExceeded::NeverFits { limit: LimitKind::Tokens, scope: LimitScope::Tenant, need: 5000, most: 1000 };
    assert_eq!(refused, expected, "not a moment to wait for, although the bucket is empty too");
    drop(busy);
    assert_eq!(left(&limiter, Tick::ZERO), 1000);
}

#[test]
fn c35_only_a_stated_cap_can_be_too_large() {
    let allowance = Allowance { input_tokens: rate(100), output_tokens: rate(50), ..tokens(120) };
    let limiter = limiter(allowance);
    let all = ask(&limiter, assumed(5000, 5000), Tick::ZERO).unwrap();
    let remaining: Vec<u64> = limiter.statuses(&acme(), MODEL, Tick::ZERO).iter().map(|s| s.remaining).collect();
    assert_eq!(remaining, [0, 0, 0], "a guess takes what there is, and no more");
    drop(all);
    let too_large = |wanted| match ask(&limiter, wanted, Tick::ZERO) {
        Err(LimitExceeded::NeverFits { limit, .. }) => Some(limit),
        _ => None,
    };
    assert_eq!(too_large(stated(5, 51)), Some(LimitKind::OutputTokens));
    assert_eq!(too_large(stated(100, 21)), Some(LimitKind::Tokens));
    assert_eq!(too_large(stated(u64::MAX, u64::MAX)), Some(LimitKind::Tokens));
    assert_eq!(too_large(assumed(u64::MAX, u64::MAX)), None);
}

#[test]
fn c37_what_runs_is_not_cut_and_the_next_one_waits() {
    let limiter = limiter(tokens(100));
    ask(&limiter, stated(0, 20), Tick::ZERO).unwrap().settle(used(0, 300), Tick::ZERO);
    assert_eq!(left(&limiter, Tick::ZERO), 0, "debt is nothing left");
    assert_eq!(refusal(ask(&limiter, stated(0, 20), Tick::ZERO)).2, Some(132), "220 at 100 a minute");
    assert!(ask(&limiter, stated(0, 20), second(131)).is_err());
    assert!(ask(&limiter, stated(0, 20), second(132)).is_ok());
}

#[test]
fn c38_tokens_are_charged_and_not_requests() {
    let limiter = limiter(tokens(30));
    ask(&limiter, stated(0, 20), Tick::ZERO).unwrap().settle(used(50, 100), Tick::ZERO);
    assert_eq!(refusal(ask(&limiter, stated(0, 20), Tick::ZERO)).2, Some(280), "150 spent, 140 too many");
}

#[test]
fn c40_a_reload_keeps_what_was_spent() {
    let limiter = limiter(tokens(1000));
    ask(&limiter, stated(0, 900), Tick::ZERO).unwrap().settle(used(0, 900), Tick::ZERO);
    limiter.reload(&only_acme(limits(tokens(1000), &[])), Tick::ZERO);
    assert_eq!(left(&limiter, Tick::ZERO), 100);
    limiter.reload(&only_acme(limits(tokens(500), &[])), Tick::ZERO);
    assert_eq!(refusal(ask(&limiter, stated(0, 100), Tick::ZERO)).2, Some(60), "900 spent, 500 too many");
    limiter.reload(&only_acme(limits(tokens(2000), &[])), Tick::ZERO);
    assert_eq!(left(&limiter, Tick::ZERO), 1100);
}

#[test]
fn c40_the_old_rate_holds_until_the_reload_and_the_new_one_from_there() {
    let limiter = limiter(tokens(600));
    ask(&limiter, stated(0, 600), Tick::ZERO).unwrap().settle(used(0, 600), Tick::ZERO);
    limiter.reload(&only_acme(limits(tokens(60), &[])), second(30));
    assert_eq!(
        refusal(ask(&limiter, stated(0, 60), second(30))).2,
        Some(300),
        "300 flew off, one a second from now on"
    );
}

#[test]
fn c40_a_removed_tenant_is_gone_and_its_running_requests_end_in_nobodys_books() {
    let limiter = limiter(Allowance { concurrent_requests: NonZeroU64::new(2), ..tokens(1000) });
    let running = ask(&limiter, stated(0, 900), Tick::ZERO).unwrap();
    limiter.reload(&BTreeMap::new(), Tick::ZERO);
    assert!(limiter.statuses(&acme(), MODEL, Tick::ZERO).is_empty());
    limiter.reload(&only_acme(limits(tokens(1000), &[])), Tick::ZERO);
    let fresh = ask(&limiter, stated(0, 700), Tick::ZERO).unwrap();
    running.settle(used(0, 5000), Tick::ZERO);
    assert_eq!((left(&limiter, Tick::ZERO), limiter.running(&acme())), (300, 1));
    drop(fresh);
}

#[test]
fn c40_a_limit_that_comes_by_a_reload_knows_who_runs() {
    let limiter = limiter(Allowance::default());
    let early = ask(&limiter, stated(10, 100), Tick::ZERO).unwrap();
    limiter.reload(&only_acme(limits(at_once(1), &[])), Tick::ZERO);
    assert!(ask(&limiter, stated(10, 100), Tick::ZERO).is_err());
    limiter.reload(&only_acme(limits(tokens(1000), &[])), Tick::ZERO);
    early.settle(used(10, 40), Tick::ZERO);
    assert_eq!(left(&limiter, Tick::ZERO), 950);
}

#[test]
fn c40_a_limit_that_went_and_came_back_gives_no_present() {
    let limiter = limiter(tokens(1000));
    let running = ask(&limiter, stated(0, 800), Tick::ZERO).unwrap();
    limiter.reload(&only_acme(Limits::default()), Tick::ZERO);
    assert!(limiter.statuses(&acme(), MODEL, Tick::ZERO).is_empty());
    drop(ask(&limiter, stated(0, 1_000_000), Tick::ZERO).unwrap());
    limiter.reload(&only_acme(limits(tokens(1000), &[])), Tick::ZERO);
    running.settle(used(0, 500), Tick::ZERO);
    assert_eq!(left(&limiter, Tick::ZERO), 500);
}

#[test]
fn c40_a_models_limit_that_went_refuses_nobody() {
    let limiter = with_models(tokens(1000), &[(MODEL, at_once(1))]);
    let running = ask(&limiter, stated(0, 100), Tick::ZERO).unwrap();
    assert_eq!(refusal(ask(&limiter, stated(0, 100), Tick::ZERO)).1, LimitScope::Model);
    limiter.reload(&only_acme(limits(tokens(1000), &[])), Tick::ZERO);
    assert_eq!(left(&limiter, Tick::ZERO), 900);
    drop((ask(&limiter, stated(0, 100), Tick::ZERO).unwrap(), running));
}

// ---- who was let in by somebody else ----------------------------------------------------------

#[test]
fn a_guest_takes_what_is_left_and_owes_nothing_beyond() {
    let limiter = limiter(tokens(600));
    let host = ask(&limiter, stated(0, 500), Tick::ZERO).unwrap();
    let externally_admitted = limiter.note(&acme(), MODEL, &stated(0, 300), Tick::ZERO);
    assert_eq!((left(&limiter, second(0)), left(&limiter, second(1))), (0, 10), "the other 200 are not owed");
    externally_admitted.settle(used(50, 1000), second(1));
    assert_eq!((left(&limiter, second(1)), left(&limiter, second(2))), (0, 10), "nor what it used beyond");
    host.settle(used(0, 500), second(2));
    assert_eq!(left(&limiter, second(2)), 10);
    let small = limiter.note(&acme(), MODEL, &stated(0, 300), second(2));
    small.settle(used(0, 4), second(2));
    assert_eq!(left(&limiter, second(2)), 6);
}

// ---- several limits -------------------------------------------------------------------------

#[test]
fn a_refusal_by_one_limit_takes_nothing_of_the_others() {
    let whole = Allowance { concurrent_requests: NonZeroU64::new(5), requests: rate(10), ..tokens(1000) };
    let limiter = with_models(whole, &[(MODEL, tokens(100))]);
    let other_model = |at| limiter.statuses(&acme(), "m2", at);
    let before = other_model(Tick::ZERO);
    let first = ask(&limiter, stated(0, 80), Tick::ZERO).unwrap();
    assert_eq!(refusal(ask(&limiter, stated(0, 40), Tick::ZERO)), (LimitKind::Tokens, LimitScope::Model, Some(12)));
    assert_eq!(limiter.running(&acme()), 1);
    drop(first);
    assert_eq!(other_model(Tick::ZERO), before);
}

#[test]
fn the_longest_wait_is_the_one_that_is_told() {
    let whole = Allowance { requests: rate(2), ..tokens(600) };
    let limiter = with_models(whole, &[(MODEL, Allowance { output_tokens: rate(100), ..Allowance::default() })]);
    ask(&limiter, stated(500, 100), Tick::ZERO).unwrap().settle(used(500, 100), Tick::ZERO);
    assert_eq!(
        refusal(ask(&limiter, stated(400, 100), Tick::ZERO)),
        (LimitKind::OutputTokens, LimitScope::Model, Some(60))
    );
    assert_eq!(refusal(ask(&limiter, stated(500, 10), Tick::ZERO)), (LimitKind::Tokens, LimitScope::Tenant, Some(51)));
    ask(&limiter, stated(0, 0), Tick::ZERO).unwrap().settle(used(0, 0), Tick::ZERO);
    assert_eq!(refusal(ask(&limiter, stated(0, 10), Tick::ZERO)), (LimitKind::Requests, LimitScope::Tenant, Some(30)));
    assert!(ask(&limiter, stated(400, 100), second(60)).is_ok());
}

#[test]
fn no_moment_is_promised_while_all_places_are_taken() {
    let limiter = limiter(Allowance { concurrent_requests: NonZeroU64::new(1), ..tokens(100) });
    let running = ask(&limiter, stated(0, 100), Tick::ZERO).unwrap();
    let refused = ask(&limiter, stated(0, 100), Tick::ZERO).unwrap_err();
    let limit_status = LimitStatus {
        limit: LimitKind::ConcurrentRequests,
        scope: LimitScope::Tenant,
        most: 1,
        per_minute: None,
        remaining: 0,
        reset: None,
    };
    assert_eq!(refused, LimitExceeded::Retryable { limit_status, retry_after: None });
    drop(running);
}

#[test]
fn a_model_of_its_own_has_its_own_books_and_other_tenants_too() {
    let globex = TenantId::from("globex");
    let limiter = with_models(tokens(1000), &[(MODEL, requests(1))]);
    let mut tenants = only_acme(limits(tokens(1000), &[(MODEL, requests(1))]));
    tenants.insert(globex.clone(), limits(requests(1), &[]));
    limiter.reload(&tenants, Tick::ZERO);
    ask(&limiter, stated(0, 1), Tick::ZERO).unwrap().settle(used(0, 1), Tick::ZERO);
    assert_eq!(refusal(ask(&limiter, stated(0, 1), Tick::ZERO)), (LimitKind::Requests, LimitScope::Model, Some(60)));
    assert!(limiter.reserve(&acme(), "m2", &stated(0, 1), Tick::ZERO).is_ok());
    assert!(limiter.reserve(&globex, MODEL, &stated(0, 1), Tick::ZERO).is_ok());
    let unnamed = TenantId::from("unnamed");
    assert!(limiter.reserve(&unnamed, MODEL, &stated(u64::MAX, u64::MAX), Tick::ZERO).is_ok());
}

#[test]
fn a_request_that_never_ran_is_no_request() {
    let limiter = limiter(requests(1));
    drop(ask(&limiter, stated(0, 1), Tick::ZERO).unwrap());
    ask(&limiter, stated(0, 1), Tick::ZERO).unwrap().cancel(Tokens::ZERO, Tick::ZERO);
    assert_eq!(refusal(ask(&limiter, stated(0, 1), Tick::ZERO)).2, Some(60));
}

#[test]
fn a_burst_of_its_own_bounds_what_comes_at_once() {
    let of = |burst| Allowance { requests: Some(Rate::new(60, Some(burst)).unwrap()), ..Allowance::default() };
    let let_in = |limiter: &LocalLimiter, at| {
        std::iter::from_fn(|| ask(limiter, stated(0, 1), at).ok())
            .map(|reservation| reservation.settle(used(0, 1), at))
            .count()
    };
    for burst in [1, 5, 300] {
        let limiter = limiter(of(burst));
        assert_eq!(let_in(&limiter, Tick::ZERO) as u64, burst);
        assert_eq!(let_in(&limiter, second(1)), 1);
        assert_eq!(let_in(&limiter, second(1000)) as u64, burst);
    }
}

#[test]
fn limits_at_the_end_of_their_range_do_not_wrap() {
    let most = Allowance {
        tokens: rate(Rate::MOST),
        input_tokens: rate(Rate::MOST),
        output_tokens: rate(Rate::MOST),
        requests: rate(Rate::MOST),
        concurrent_requests: NonZeroU64::new(u64::MAX),
    };
    let limiter = limiter(most);
    let end = Tick::from_nanos(u64::MAX);
    ask(&limiter, stated(0, Rate::MOST), end).unwrap().settle(used(u64::MAX, u64::MAX), end);
    let (_, _, retry_after) = refusal(ask(&limiter, stated(0, 1), end));
    assert_eq!(retry_after, Some(122_820), "2^64 - 2^53 of 2^53 a minute: 2047 minutes");
    assert!(ask(&limiter, stated(1, 1), Tick::ZERO).is_err(), "a moment long ago is none to be let in");
}

// ---- laws -----------------------------------------------------------------------------------

/// How a request ends.
#[derive(Clone, Debug)]
enum End {
    Settled { input: u64, output: u64 },
    Canceled { seen: u64 },
    Dropped,
}

/// A step of a history: time passes, a request asks, a request ends.
#[derive(Clone, Debug)]
enum Step {
    Pass { millis: u64 },
    Ask { wanted: Wanted, limited_model: bool },
    End { which: prop::sample::Index, how: End },
}

fn any_end() -> impl Strategy<Value = End> {
    prop_oneof![
        (0..400_u64, 0..400_u64).prop_map(|(input, output)| End::Settled { input, output }),
        (0..400_u64).prop_map(|seen| End::Canceled { seen }),
        Just(End::Dropped),
    ]
}

fn any_wanted() -> impl Strategy<Value = Wanted> {
    (0..300_u64, 0..700_u64, any::<bool>())
        .prop_map(|(input, output, is_stated)| if is_stated { stated(input, output) } else { assumed(input, output) })
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..20_000_u64).prop_map(|millis| Step::Pass { millis }),
        (any_wanted(), any::<bool>()).prop_map(|(wanted, limited_model)| Step::Ask { wanted, limited_model }),
        (any::<prop::sample::Index>(), any_end()).prop_map(|(which, how)| Step::End { which, how }),
    ]
}

fn any_rate() -> impl Strategy<Value = Option<Rate>> {
    let rate = (1..5000_u64, prop::option::of(1..3000_u64));
    prop::option::of(rate.prop_map(|(per_minute, burst)| Rate::new(per_minute, burst).unwrap()))
}

fn any_allowance() -> impl Strategy<Value = Allowance> {
    (any_rate(), any_rate(), any_rate(), any_rate(), 0..6_u64).prop_map(|(tokens, input, output, requests, most)| {
        let concurrent_requests = NonZeroU64::new(most);
        Allowance { tokens, input_tokens: input, output_tokens: output, requests, concurrent_requests }
    })
}

fn model_name(limited: bool) -> &'static str {
    if limited { MODEL } else { "m2" }
}

fn finish(reservation: LocalReservation, how: &End, at: Tick) {
    match *how {
        End::Settled { input, output } => reservation.settle(used(input, output), at),
        End::Canceled { seen } => reservation.cancel(Tokens(seen), at),
        End::Dropped => drop(reservation),
    }
}

/// Plays a history; returns the running requests and the last moment.
fn play(limiter: &LocalLimiter, steps: &[Step]) -> (Vec<LocalReservation>, Tick) {
    let (mut open, mut now) = (Vec::new(), Tick::ZERO);
    for step in steps {
        match step {
            Step::Pass { millis } => now = now + Duration::from_millis(*millis),
            Step::Ask { wanted, limited_model } => {
                open.extend(limiter.reserve(&acme(), model_name(*limited_model), wanted, now));
            }
            Step::End { which, how } if !open.is_empty() => {
                let reservation = open.swap_remove(which.index(open.len()));
                finish(reservation, how, now);
            }
            Step::End { .. } => {}
        }
        assert_eq!(limiter.running(&acme()), open.len() as u64);
    }
    (open, now)
}

/// Reference implementation of one bucket: a balance that grows by `per_milli` each millisecond up to its
/// burst, and may be negative.
struct Slow {
    balance: i128,
    burst: i128,
    per_milli: i128,
}

impl Slow {
    fn pass(&mut self, millis: u64) {
        for _ in 0..millis {
            self.add(self.per_milli);
        }
    }

    fn add(&mut self, tokens: i128) {
        self.balance = (self.balance + tokens).min(self.burst);
    }
}

proptest! {
    /// Whatever happened: when all have ended and time has passed, every bucket is full.
    #[test]
    fn nothing_leaks_on_any_ending(
        whole in any_allowance(), model in any_allowance(), steps in prop::collection::vec(any_step(), 0..60), last in any_end(),
    ) {
        let limiter = with_models(whole, &[(MODEL, model)]);
        let (open, now) = play(&limiter, &steps);
        open.into_iter().for_each(|reservation| finish(reservation, &last, now));
        prop_assert_eq!(limiter.running(&acme()), 0);
        let resets = limiter.statuses(&acme(), MODEL, now).into_iter().filter_map(|limit_status| limit_status.reset);
        let full = now + resets.max().unwrap_or_default();
        for limit_status in limiter.statuses(&acme(), MODEL, full) {
            prop_assert_eq!(limit_status.remaining, limit_status.most);
        }
    }

    /// Reserved and dropped at the same moment leaves no trace.
    #[test]
    fn what_is_dropped_at_once_leaves_no_trace(
        whole in any_allowance(), model in any_allowance(), steps in prop::collection::vec(any_step(), 0..40), wanted in any_wanted(),
    ) {
        let limiter = with_models(whole, &[(MODEL, model)]);
        let (_open, now) = play(&limiter, &steps);
        let before = limiter.statuses(&acme(), MODEL, now);
        drop(ask(&limiter, wanted, now));
        prop_assert_eq!(limiter.statuses(&acme(), MODEL, now), before);
    }

    /// All limits or none: a request is admitted exactly if each limit has what it needs, and then all are
    /// charged; otherwise none.
    #[test]
    fn all_limits_together_or_not_at_all(
        whole in any_allowance(), model in any_allowance(), steps in prop::collection::vec(any_step(), 0..40), wanted in any_wanted(),
    ) {
        let limiter = with_models(whole, &[(MODEL, model)]);
        let (_open, now) = play(&limiter, &steps);
        let before = limiter.statuses(&acme(), MODEL, now);
        let result = ask(&limiter, wanted, now);
        let after = limiter.statuses(&acme(), MODEL, now);
        match result {
            Err(_) => prop_assert_eq!(after, before),
            Ok(_held) => for (before, after) in before.iter().zip(&after) {
                let (input, output) = (wanted.input.0, wanted.output.tokens().0);
                let need = match before.limit {
                    LimitKind::Tokens => input + output,
                    LimitKind::InputTokens => input,
                    LimitKind::OutputTokens => output,
                    LimitKind::Requests | LimitKind::ConcurrentRequests => 1,
                };
                prop_assert_eq!(after.remaining + need.min(before.most), before.remaining);
            },
        }
    }

    /// A request that waits exactly as long as told is admitted if no other comes, whether running ones end or
    /// not; a whole second less is too early.
    #[test]
    fn the_promised_moment_is_kept_and_is_not_later_than_needed(
        whole in any_allowance(), model in any_allowance(), steps in prop::collection::vec(any_step(), 0..60),
        wanted in any_wanted(), ended in any::<bool>(), behind in 0..5000_u64,
    ) {
        let limiter = with_models(whole, &[(MODEL, model)]);
        let (open, now) = play(&limiter, &steps);
        // The moment of this request may be before that of the buckets.
        let now = Tick::from_nanos(now.as_nanos().saturating_sub(behind * 1_000_000));
        if let Err(LimitExceeded::Retryable { retry_after: Some(seconds), .. }) = ask(&limiter, wanted, now) {
            prop_assert!(seconds >= 1);
            if seconds > 1 {
                prop_assert!(ask(&limiter, wanted, now + Duration::from_secs(seconds - 1)).is_err());
            }
            let open = if ended { Vec::new() } else { open };
            prop_assert!(ask(&limiter, wanted, now + Duration::from_secs(seconds)).is_ok());
            drop(open);
        }
    }

    /// A reload with equal limits changes nothing; one with other limits keeps what was spent.
    #[test]
    fn a_reload_carries_over_what_was_spent(
        whole in any_allowance(), model in any_allowance(), steps in prop::collection::vec(any_step(), 0..60), burst in 1..5000_u64,
    ) {
        let limiter = with_models(whole.clone(), &[(MODEL, model.clone())]);
        let (_open, now) = play(&limiter, &steps);
        let before = limiter.statuses(&acme(), MODEL, now);
        limiter.reload(&only_acme(limits(whole.clone(), &[(MODEL, model.clone())])), now);
        prop_assert_eq!(&limiter.statuses(&acme(), MODEL, now), &before);
        let wider = |rate: Option<Rate>| rate.map(|rate| Rate::new(rate.per_minute(), Some(rate.burst() + burst)).unwrap());
        let changed = Allowance {
            tokens: wider(whole.tokens), input_tokens: wider(whole.input_tokens), output_tokens: wider(whole.output_tokens),
            requests: wider(whole.requests), concurrent_requests: whole.concurrent_requests,
        };
        limiter.reload(&only_acme(limits(changed, &[(MODEL, model)])), now);
        for (before, after) in before.iter().zip(limiter.statuses(&acme(), MODEL, now)) {
            prop_assert_eq!(before.reset, after.reset, "what is spent takes as long to flow off");
        }
    }

    /// The ledger agrees with a reference that adds millisecond by millisecond, and admits exactly what fits
    /// there.
    #[test]
    fn the_books_agree_with_a_slow_ledger(
        per_milli in 1..20_u64, burst in 1..3000_u64, steps in prop::collection::vec(any_step(), 0..60),
    ) {
        let rate = Rate::new(per_milli * 60_000, Some(burst)).unwrap();
        let limiter = limiter(Allowance { tokens: Some(rate), ..Allowance::default() });
        let mut slow = Slow { balance: burst.into(), burst: burst.into(), per_milli: per_milli.into() };
        let (mut open, mut now): (Vec<(LocalReservation, i128, Wanted)>, _) = (Vec::new(), Tick::ZERO);
        for step in &steps {
            match step {
                Step::Pass { millis } => {
                    let millis = millis / 100;
                    slow.pass(millis);
                    now = now + Duration::from_millis(millis);
                }
                Step::Ask { wanted, .. } => {
                    let need = i128::from(wanted.input.0 + wanted.output.tokens().0);
                    let need = if matches!(wanted.output, Output::Assumed(_)) { need.min(slow.burst) } else { need };
                    let result = ask(&limiter, *wanted, now);
                    prop_assert_eq!(result.is_ok(), need <= slow.balance);
                    if let Ok(reservation) = result {
                        slow.add(-need);
                        open.push((reservation, need, *wanted));
                    }
                }
                Step::End { which, how } if !open.is_empty() => {
                    let (reservation, held, wanted) = open.swap_remove(which.index(open.len()));
                    let charged = match how {
                        End::Settled { input, output } => input + output,
                        End::Canceled { seen } => wanted.input.0 + seen,
                        End::Dropped => 0,
                    };
                    finish(reservation, how, now);
                    slow.add(held - i128::from(charged));
                }
                Step::End { .. } => {}
            }
            prop_assert_eq!(i128::from(left(&limiter, now)), slow.balance.max(0));
        }
    }

    /// A tenant that never uses more than it reserves is never charged more than one burst plus the refill
    /// since start, whatever it reserves and refunds.
    #[test]
    fn all_that_is_charged_stays_within_one_burst_and_the_flow(
        per_minute in 1..5000_u64, burst in 1..3000_u64, steps in prop::collection::vec(any_step(), 0..100),
    ) {
        let rate = Rate::new(per_minute, Some(burst)).unwrap();
        let limiter = limiter(Allowance { tokens: Some(rate), ..Allowance::default() });
        let (mut open, mut now, mut charged) = (Vec::new(), Tick::ZERO, 0_u128);
        for step in &steps {
            match step {
                Step::Pass { millis } => now = now + Duration::from_millis(*millis),
                Step::Ask { wanted, .. } => {
                    let wanted = stated(wanted.input.0, wanted.output.tokens().0);
                    open.extend(ask(&limiter, wanted, now).ok().map(|reservation| (reservation, wanted)));
                }
                Step::End { which, how } if !open.is_empty() => {
                    let (reservation, wanted) = open.swap_remove(which.index(open.len()));
                    let seen = match how {
                        End::Settled { output, .. } | End::Canceled { seen: output } => *output,
                        End::Dropped => 0,
                    };
                    let seen = seen.min(wanted.output.tokens().0);
                    charged += u128::from(wanted.input.0 + seen);
                    reservation.cancel(Tokens(seen), now);
                }
                Step::End { .. } => {}
            }
            let flow = u128::from(now.as_nanos()) * u128::from(per_minute) / 60_000_000_000;
            prop_assert!(charged <= u128::from(burst) + flow, "{charged} of {burst} and {flow}");
        }
    }
}

//! The retry table, row by row.

use proptest::prelude::*;

use super::*;
use crate::route::settings::EngineSource;

struct Case {
    attempts: Attempts,
    budget: RetryBudget,
    at: Tick,
}

const UNTIL: Tick = Tick::from_millis(5_000);

fn case_of(retries: Retries) -> Case {
    let mut pool = PoolSettings::with_defaults("p".into(), EngineSource::Static(Vec::new()));
    pool.retries = retries;
    let mut attempts = Attempts::new(&pool, UNTIL);
    attempts.begin("a".into());
    Case { attempts, budget: RetryBudget::new(&retries), at: Tick::from_millis(100) }
}

fn case() -> Case {
    case_of(Retries::default())
}

impl Case {
    fn next(&mut self, outcome: AttemptOutcome, rest: RemainingEngines) -> (RetryDecision, Vec<EngineEffect>) {
        let step = self.attempts.next(outcome, rest, self.at, &mut self.budget);
        (step.next, step.effects)
    }

    fn begin(&mut self, engine: &str) {
        self.attempts.begin(engine.into());
    }
}

fn fault(engine: &str) -> EngineEffect {
    EngineEffect::Fault(engine.into())
}

fn cool(engine: &str, millis: u64) -> EngineEffect {
    EngineEffect::Cool(engine.into(), Duration::from_millis(millis))
}

fn well(engine: &str) -> EngineEffect {
    EngineEffect::Well(engine.into())
}

const PUSH_BACK: AttemptOutcome = AttemptOutcome::PushBack { retry_after: None };
const FAULT: AttemptOutcome = AttemptOutcome::Fault { status: 500 };

#[test]
fn a_stale_line_gives_one_more_try_on_a_fresh_one_and_counts_for_nothing() {
    let mut case = case_of(Retries { floor_per_10s: 0, ..Retries::default() });
    assert_eq!(
        case.next(AttemptOutcome::StaleConnection, RemainingEngines::Others),
        (RetryDecision::SameFresh, vec![])
    );
    assert_eq!(case.attempts.count(), 1);
    // A second time it is the engine's failure.
    assert_eq!(
        case.next(AttemptOutcome::StaleConnection, RemainingEngines::Others),
        (RetryDecision::GiveUp, vec![fault("a")])
    );
}

#[test]
fn where_nobody_is_left_nothing_is_tried_and_the_budget_is_not_touched() {
    let mut case = case_of(Retries { share: 0.0, floor_per_10s: 1, ..Retries::default() });
    assert_eq!(case.next(FAULT, RemainingEngines::Nobody).0, RetryDecision::Relay);
    assert!(case.budget.draw(case.at), "there for somebody else");
}

#[test]
fn each_engine_may_have_a_stale_line() {
    let mut case = case();
    assert_eq!(case.next(AttemptOutcome::StaleConnection, RemainingEngines::Others).0, RetryDecision::SameFresh);
    assert_eq!(case.next(AttemptOutcome::ConnectFailed, RemainingEngines::Others).0, RetryDecision::Another);
    case.begin("b");
    assert_eq!(
        case.next(AttemptOutcome::StaleConnection, RemainingEngines::Nobody),
        (RetryDecision::SameFresh, vec![])
    );
}

#[test]
fn after_a_connect_failure_every_other_engine_is_asked_once() {
    let mut case = case();
    for (engine, next) in [("a", "b"), ("b", "c")] {
        let (step, effects) = case.next(AttemptOutcome::ConnectFailed, RemainingEngines::Others);
        assert_eq!((step, effects), (RetryDecision::Another, vec![fault(engine), cool(engine, 1_000)]));
        case.begin(next);
    }
    assert_eq!(case.attempts.tried().len(), 3);
    assert_eq!(case.next(AttemptOutcome::ConnectFailed, RemainingEngines::Nobody).0, RetryDecision::GiveUp);
}

#[test]
fn after_a_connect_failure_the_only_engine_is_asked_once_more() {
    let mut case = case();
    assert_eq!(case.next(AttemptOutcome::ConnectFailed, RemainingEngines::Alone).0, RetryDecision::Another);
    assert!(case.attempts.tried().is_empty(), "it may be chosen again");
    case.begin("a");
    assert_eq!(case.next(AttemptOutcome::ConnectFailed, RemainingEngines::Alone).0, RetryDecision::GiveUp);
}

#[test]
fn what_the_gateway_lacks_is_no_engine_s_fault_and_no_other_one_is_asked() {
    let mut case = case();
    assert_eq!(case.next(AttemptOutcome::Lacking, RemainingEngines::Others), (RetryDecision::GiveUp, vec![]));
    let mut later = self::case();
    let _ = later.next(FAULT, RemainingEngines::Others);
    later.begin("b");
    assert_eq!(later.next(AttemptOutcome::Lacking, RemainingEngines::Others), (RetryDecision::Relay, vec![fault("a")]));
}

#[test]
fn after_push_back_other_engines_are_asked_without_breaker_effect() {
    let mut case = case();
    for next in ["b", "c", "d"] {
        let engine = case.attempts.engine().unwrap().to_string();
        assert_eq!(
            case.next(PUSH_BACK, RemainingEngines::Others),
            (RetryDecision::Another, vec![cool(&engine, 1_000)])
        );
        case.begin(next);
    }
    // At most three further attempts; then the last response is relayed.
    assert_eq!(case.next(PUSH_BACK, RemainingEngines::Others), (RetryDecision::Relay, vec![cool("d", 1_000)]));
}

#[test]
fn after_push_back_the_only_engine_is_not_asked_again() {
    let mut case = case();
    assert_eq!(case.next(PUSH_BACK, RemainingEngines::Alone), (RetryDecision::Relay, vec![cool("a", 1_000)]));
}

#[test]
fn c46_an_engine_that_pushed_back_cools_for_its_retry_after_clamped() {
    for (said, cooled) in [(Some(30), 30), (Some(100_000), 60), (Some(0), 0), (None, 1)] {
        let outcome = AttemptOutcome::PushBack { retry_after: said.map(Duration::from_secs) };
        assert_eq!(case().next(outcome, RemainingEngines::Alone).1, [cool("a", cooled * 1_000)]);
    }
}

#[test]
fn after_a_fault_one_other_engine_is_asked() {
    let mut case = case();
    assert_eq!(
        case.next(FAULT, RemainingEngines::Others),
        (RetryDecision::Another, vec![]),
        "not yet known whose doing it is"
    );
    case.begin("b");
    assert_eq!(case.attempts.succeeded(Injection::None).collect::<Vec<_>>(), [fault("a"), well("b")]);
}

#[test]
fn after_a_fault_the_only_engine_is_asked_again() {
    let mut case = case();
    assert_eq!(case.next(FAULT, RemainingEngines::Alone).0, RetryDecision::Another);
    assert!(case.attempts.tried().is_empty());
}

#[test]
fn two_different_faults_both_count_and_the_last_answer_is_relayed() {
    let mut case = case();
    let _ = case.next(FAULT, RemainingEngines::Others);
    case.begin("b");
    assert_eq!(
        case.next(AttemptOutcome::Fault { status: 502 }, RemainingEngines::Others),
        (RetryDecision::Relay, vec![fault("a"), fault("b")])
    );
    assert!(!case.attempts.failed_alike());
}

#[test]
fn two_alike_statuses_are_the_requests_doing_and_count_for_no_breaker() {
    let mut case = case_of(Retries { after_fault: 5, ..Retries::default() });
    let _ = case.next(FAULT, RemainingEngines::Others);
    case.begin("b");
    assert_eq!(case.next(FAULT, RemainingEngines::Others), (RetryDecision::Relay, vec![]), "no third try");
    assert!(case.attempts.failed_alike());
    assert_eq!(case.attempts.settled(), None);
}

#[test]
fn two_resets_are_the_requests_doing_but_count() {
    let mut case = case_of(Retries { after_fault: 5, ..Retries::default() });
    assert_eq!(case.next(AttemptOutcome::Broken, RemainingEngines::Others), (RetryDecision::Another, vec![fault("a")]));
    case.begin("b");
    assert_eq!(case.next(AttemptOutcome::Broken, RemainingEngines::Others), (RetryDecision::GiveUp, vec![fault("b")]));
    assert!(case.attempts.failed_alike());
}

#[test]
fn a_fault_and_then_something_else_counts() {
    for (second, also) in [
        (AttemptOutcome::Broken, vec![fault("b")]),
        (PUSH_BACK, vec![cool("b", 1_000)]),
        (AttemptOutcome::ConnectFailed, vec![fault("b"), cool("b", 1_000)]),
    ] {
        let mut case = case();
        let _ = case.next(FAULT, RemainingEngines::Others);
        case.begin("b");
        let (next, effects) = case.next(second, RemainingEngines::Nobody);
        assert_eq!(effects, [vec![fault("a")], also].concat(), "{second:?}");
        assert_eq!(next, RetryDecision::Relay, "the first engine's answer is the only one");
    }
}

#[test]
fn a_fault_counts_where_the_client_leaves_during_the_second_attempt() {
    let mut case = case();
    let _ = case.next(FAULT, RemainingEngines::Others);
    case.begin("b");
    assert_eq!(case.attempts.settled(), Some(fault("a")));
    assert_eq!(case.attempts.settled(), None);
}

#[test]
fn a_refused_injection_is_tried_once_more_without_it_outside_the_budget() {
    let mut case = case_of(Retries { floor_per_10s: 0, ..Retries::default() });
    let outcome = AttemptOutcome::answer(422, None, Injection::Unproven);
    assert_eq!(case.next(outcome, RemainingEngines::Others), (RetryDecision::SameWithoutInjection, vec![]));
    assert!(case.attempts.without_injection());
    assert_eq!(case.attempts.count(), 1);
    let switched_off = EngineEffect::InjectionSwitchedOff("a".into());
    assert_eq!(case.attempts.succeeded(Injection::None).collect::<Vec<_>>(), [switched_off, well("a")]);
}

#[test]
fn a_lowered_cap_that_is_refused_is_lifted_once_outside_the_budget() {
    let refused = |injection| AttemptOutcome::answer(400, None, injection).with_lowered_cap(400);
    let mut case = case_of(Retries { floor_per_10s: 0, ..Retries::default() });
    assert_eq!(
        case.next(refused(Injection::Proven), RemainingEngines::Others),
        (RetryDecision::SameWithoutCap, vec![])
    );
    assert!(case.attempts.without_cap() && !case.attempts.without_injection());
    let injected = AttemptOutcome::answer(400, None, Injection::Unproven);
    assert_eq!(case.next(injected, RemainingEngines::Others), (RetryDecision::SameWithoutInjection, vec![]));
    let clients = AttemptOutcome::answer(400, None, Injection::None);
    assert_eq!(case.next(clients, RemainingEngines::Others), (RetryDecision::Relay, vec![well("a")]));
    for (status, outcome) in [(413, AttemptOutcome::Refused), (429, PUSH_BACK), (500, FAULT)] {
        assert_eq!(AttemptOutcome::answer(status, None, Injection::None).with_lowered_cap(status), outcome);
    }
    let mut late = self::case();
    late.attempts.commit();
    assert_eq!(late.next(refused(Injection::None), RemainingEngines::Others), (RetryDecision::Relay, vec![well("a")]));
}

#[test]
fn a_body_refused_with_and_without_injection_was_the_clients_doing() {
    let mut case = case();
    let _ = case.next(AttemptOutcome::InjectionRefused, RemainingEngines::Others);
    let again = AttemptOutcome::answer(400, None, Injection::None);
    assert_eq!(case.next(again, RemainingEngines::Others), (RetryDecision::Relay, vec![well("a")]));
}

#[test]
fn an_engine_that_accepted_such_an_injection_lately_means_the_clients_body() {
    let outcome = AttemptOutcome::answer(400, None, Injection::Proven);
    assert_eq!(case().next(outcome, RemainingEngines::Others), (RetryDecision::Relay, vec![well("a")]));
    assert_eq!(
        case().attempts.succeeded(Injection::Unproven).collect::<Vec<_>>(),
        [EngineEffect::InjectionAccepted("a".into()), well("a")]
    );
}

#[test]
fn other_answers_are_never_retried() {
    for status in [301, 400, 401, 403, 404, 405, 407, 408, 409, 413, 422, 431, 501] {
        let outcome = AttemptOutcome::answer(status, None, Injection::None);
        assert_eq!(case().next(outcome, RemainingEngines::Others), (RetryDecision::Relay, vec![well("a")]), "{status}");
    }
}

#[test]
fn statuses_are_read_by_the_table() {
    let read = |status| AttemptOutcome::answer(status, None, Injection::Unproven);
    for status in [429, 503, 529] {
        assert_eq!(read(status), PUSH_BACK);
    }
    for status in [500, 502, 504, 505, 599] {
        assert_eq!(read(status), AttemptOutcome::Fault { status });
    }
    assert_eq!(read(501), AttemptOutcome::Refused);
    assert_eq!(read(404), AttemptOutcome::Refused);
}

#[test]
fn an_attempt_whose_engine_departs_goes_on_and_holds_nothing_against_it() {
    let mut case = case_of(Retries { floor_per_10s: 0, after_fault: 0, ..Retries::default() });
    // The caller has already charged the budget.
    assert_eq!(case.next(AttemptOutcome::Departing, RemainingEngines::Others), (RetryDecision::Another, vec![]));
    case.begin("b");
    assert_eq!(
        case.next(AttemptOutcome::Departing, RemainingEngines::Nobody),
        (RetryDecision::GiveUp, vec![]),
        "into a further pool, if at all"
    );
}

#[test]
fn c42_nothing_is_retried_after_the_first_token_and_every_failure_counts() {
    for outcome in [PUSH_BACK, FAULT, AttemptOutcome::Broken, AttemptOutcome::TimedOut, AttemptOutcome::Refused] {
        let mut case = case();
        case.attempts.first_token();
        assert_eq!(
            case.next(outcome, RemainingEngines::Others),
            (RetryDecision::Relay, vec![fault("a")]),
            "{outcome:?}"
        );
    }
}

#[test]
fn nothing_is_retried_after_the_commit() {
    for outcome in
        [PUSH_BACK, FAULT, AttemptOutcome::Broken, AttemptOutcome::ConnectFailed, AttemptOutcome::InjectionRefused]
    {
        let mut case = case();
        case.attempts.commit();
        let (next, _) = case.next(outcome, RemainingEngines::Others);
        assert!(matches!(next, RetryDecision::Relay | RetryDecision::GiveUp), "{outcome:?} {next:?}");
    }
}

#[test]
fn no_retry_starts_once_the_first_token_limit_has_passed() {
    for (at, expected) in [(4_999, RetryDecision::Another), (5_000, RetryDecision::Relay)] {
        let mut case = case();
        case.at = Tick::from_millis(at);
        assert_eq!(case.next(FAULT, RemainingEngines::Others).0, expected);
    }
}

#[test]
fn no_retry_starts_without_budget() {
    let mut case = case_of(Retries { floor_per_10s: 1, ..Retries::default() });
    assert_eq!(case.next(PUSH_BACK, RemainingEngines::Others).0, RetryDecision::Another);
    case.begin("b");
    assert_eq!(case.next(PUSH_BACK, RemainingEngines::Others).0, RetryDecision::Relay);
}

#[test]
fn where_nobody_is_left_to_ask_no_budget_is_spent() {
    let mut case = case_of(Retries { floor_per_10s: 1, ..Retries::default() });
    assert_eq!(case.next(PUSH_BACK, RemainingEngines::Nobody).0, RetryDecision::Relay);
    assert!(case.budget.draw(case.at));
}

#[test]
fn a_time_limit_before_the_first_token_is_no_fault() {
    assert_eq!(case().next(AttemptOutcome::TimedOut, RemainingEngines::Others), (RetryDecision::GiveUp, vec![]));
}

#[test]
fn another_pool_begins_with_untried_engines() {
    let mut case = case();
    let _ = case.next(FAULT, RemainingEngines::Nobody);
    case.attempts.enter(&PoolSettings::with_defaults("q".into(), EngineSource::Static(Vec::new())));
    assert!(case.attempts.tried().is_empty());
    case.begin("a");
    assert_eq!(case.next(FAULT, RemainingEngines::Others), (RetryDecision::Relay, vec![]), "alike over pools too");
}

#[test]
fn in_each_pool_the_only_engine_is_connected_to_once_more() {
    let mut case = case();
    for pool in ["q", "r"] {
        assert_eq!(case.next(AttemptOutcome::ConnectFailed, RemainingEngines::Alone).0, RetryDecision::Another);
        case.begin("a");
        assert_eq!(case.next(AttemptOutcome::ConnectFailed, RemainingEngines::Alone).0, RetryDecision::GiveUp);
        case.attempts.enter(&PoolSettings::with_defaults(pool.into(), EngineSource::Static(Vec::new())));
        case.begin("a");
    }
}

#[test]
fn what_one_engine_refused_may_be_injected_for_the_next() {
    let mut case = case();
    assert_eq!(
        case.next(AttemptOutcome::InjectionRefused, RemainingEngines::Others).0,
        RetryDecision::SameWithoutInjection
    );
    assert!(case.attempts.without_injection());
    assert_eq!(case.next(FAULT, RemainingEngines::Others).0, RetryDecision::Another);
    case.begin("b");
    assert!(!case.attempts.without_injection());
    let effects: Vec<_> = case.attempts.succeeded(Injection::Unproven).collect();
    assert_eq!(effects, [fault("a"), EngineEffect::InjectionAccepted("b".into()), well("b")]);
}

#[test]
fn a_fault_in_a_pool_that_was_left_counts_there() {
    let mut case = case();
    let _ = case.next(FAULT, RemainingEngines::Others);
    case.attempts.enter(&PoolSettings::with_defaults("q".into(), EngineSource::Static(Vec::new())));
    case.begin("b");
    let elsewhere = EngineEffect::FaultElsewhere("p".into(), "a".into());
    assert_eq!(case.attempts.succeeded(Injection::None).collect::<Vec<_>>(), [elsewhere, well("b")]);
}

#[test]
fn retry_after_is_read_as_seconds_or_as_a_date() {
    let read = |text: &'static str| retry_after(&HeaderValue::from_static(text), Duration::from_secs(784_111_770));
    assert_eq!(read("7"), Some(Duration::from_secs(7)));
    assert_eq!(read(" 0 "), Some(Duration::ZERO));
    assert_eq!(read("1.5"), Some(Duration::from_millis(1_500)));
    assert_eq!(read("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::from_secs(7)));
    assert_eq!(read("Sat, 06 Nov 1993 08:49:37 GMT"), Some(Duration::ZERO));
    // C93: the two older formats; a two-digit year is never more than fifty years ahead.
    assert_eq!(read("Sunday, 06-Nov-94 08:49:37 GMT"), Some(Duration::from_secs(7)));
    assert_eq!(read("Sun Nov  6 08:49:37 1994"), Some(Duration::from_secs(7)));
    assert_eq!(read("Saturday, 06-Nov-93 08:49:37 GMT"), Some(Duration::ZERO));
    assert_eq!(read("Sunday, 06-Nov-44 08:49:37 GMT"), Some(Duration::from_secs(1_577_923_207)));
    assert_eq!(read("Monday, 06-Nov-45 08:49:37 GMT"), Some(Duration::ZERO), "that was 1945");
    assert_eq!(read("Tue Nov  6 08:49:37 1900"), Some(Duration::ZERO), "before the epoch");
    for nonsense in [
        "",
        "-1",
        "soon",
        "NaN",
        "1e400",
        "Sunday, 06-Nov-94 08:49:37",
        "Sunday, 06-Nov-1994 08:49:37 GMT",
        "Sunday, 32-Nov-94 08:49:37 GMT",
        "Sun Nov 6 08:49:37",
        "Sun Nov 6 25:49:37 1994",
    ] {
        assert_eq!(read(nonsense), None, "{nonsense}");
    }
}

fn anything() -> impl Strategy<Value = AttemptOutcome> {
    prop_oneof![
        Just(AttemptOutcome::ConnectFailed),
        Just(AttemptOutcome::Lacking),
        Just(AttemptOutcome::StaleConnection),
        Just(PUSH_BACK),
        (500u16..506).prop_map(|status| AttemptOutcome::answer(status, None, Injection::None)),
        Just(AttemptOutcome::Broken),
        Just(AttemptOutcome::InjectionRefused),
        Just(AttemptOutcome::CapRefused),
        Just(AttemptOutcome::TimedOut),
    ]
}

proptest! {
    /// Whatever engines do, a request ends after a bounded number of attempts.
    #[test]
    fn attempts_always_end(happenings in proptest::collection::vec(anything(), 64), alone in any::<bool>()) {
        let mut case = case();
        for (sends, outcome) in happenings.into_iter().enumerate() {
            let rest = if alone { RemainingEngines::Alone } else { RemainingEngines::Others };
            match case.next(outcome, rest).0 {
                RetryDecision::Another => case.begin(&format!("engine {sends}")),
                RetryDecision::SameFresh | RetryDecision::SameWithoutInjection | RetryDecision::SameWithoutCap => {}
                RetryDecision::Relay | RetryDecision::GiveUp => {
                    prop_assert_eq!(case.attempts.settled(), None);
                    return Ok(());
                }
            }
        }
        prop_assert!(false, "still going after 64 sends");
    }
}

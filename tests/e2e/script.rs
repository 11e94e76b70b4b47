//! The script of the shared limits, in a real Redis, against the ledger of one gateway.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use goodput::admit::limit::settings::{Allowance, Limits, Rate};
use goodput::admit::limit::{LimitKind, LocalLimiter, LocalReservation, Output, Used, Wanted};
use goodput::admit::redis::connection::{CallError, RedisConnection};
use goodput::admit::redis::lua_call::{BucketArgs, COUNT_LIFE, ConcurrencyArgs, LuaCall, LuaReply};
use goodput::types::{TenantId, Tick, Tokens};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::parts::with_parts;
use crate::redis_server::{Kind, RedisServer, on_each};

const RATES: [LimitKind; 4] = [LimitKind::Tokens, LimitKind::InputTokens, LimitKind::OutputTokens, LimitKind::Requests];

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn of(limit: LimitKind, input: u64, output: u64) -> u64 {
    match limit {
        LimitKind::Tokens => input.saturating_add(output),
        LimitKind::InputTokens => input,
        LimitKind::OutputTokens => output,
        LimitKind::Requests | LimitKind::ConcurrentRequests => 1,
    }
}

/// A tenant's books in the store, asked without leases: one call for each step.
struct Books<'a> {
    line: &'a RedisConnection,
    server: &'a RedisServer,
    key: String,
    rates: Vec<(LimitKind, Rate)>,
    places: Option<u64>,
    running: u64,
    /// Time that passed by our own doing.
    passed: Duration,
}

impl Books<'_> {
    fn call(&self) -> LuaCall {
        let bucket = |(limit, rate): &(LimitKind, Rate)| BucketArgs {
            field: limit.as_str().into(),
            per_minute: rate.per_minute(),
            burst: rate.burst(),
            ..BucketArgs::default()
        };
        let most = self.places.unwrap_or_default();
        let place =
            ConcurrencyArgs { field: "places".into(), most, running: self.running, ..ConcurrencyArgs::default() };
        LuaCall {
            key: self.key.as_str().into(),
            gateway: "a1".into(),
            key_life: Duration::from_secs(600),
            buckets: self.rates.iter().map(bucket).collect(),
            places: self.places.map(|_| place).into_iter().collect(),
            ..LuaCall::default()
        }
    }

    async fn made(&self, call: &LuaCall) -> (LuaReply, Tick) {
        let answer = self.line.call(call).await.expect("an answer");
        let at = Tick::from_nanos(answer.now * 1000) + self.passed;
        (answer, at)
    }

    async fn ask(&self, needs: &[u64]) -> (LuaReply, Tick) {
        let mut call = self.call();
        call.buckets.iter_mut().zip(needs).for_each(|(bucket, need)| bucket.need = *need);
        call.places.iter_mut().for_each(|place| place.need = 1);
        self.made(&call).await
    }

    async fn end(&self, held: &[u64], used: impl Fn(LimitKind) -> u64) -> (LuaReply, Tick) {
        let mut call = self.call();
        for ((bucket, held), (limit, _)) in call.buckets.iter_mut().zip(held).zip(&self.rates) {
            bucket.back = held.saturating_sub(used(*limit));
            bucket.owed = used(*limit).saturating_sub(*held);
        }
        self.made(&call).await
    }

    /// Advances time: the stored data become older by this much.
    fn pass(&mut self, length: Duration) {
        for (limit, _) in &self.rates {
            let Ok(kept) = self.server.say(&["HGET", &self.key, limit.as_str()]) else { continue };
            let Some(value) = kept.lines().nth(1) else { continue };
            let [whole, micros, as_of] = value.split(' ').collect::<Vec<_>>()[..] else { continue };
            let earlier = as_of.parse::<u64>().expect("a moment") - length.as_micros() as u64;
            let value = format!("{whole} {micros} {earlier}");
            self.server.say(&["HSET", &self.key, limit.as_str(), &value]).expect("it is set");
        }
        self.passed += length;
    }
}

#[derive(Clone, Debug)]
enum Step {
    Pass(u64),
    Ask { input: u64, output: u64, stated: bool },
    End { which: prop::sample::Index, used: Option<(u64, u64)> },
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..20_000_000_u64).prop_map(Step::Pass),
        (0..300_u64, 0..700_u64, any::<bool>()).prop_map(|(input, output, stated)| Step::Ask { input, output, stated }),
        (any::<prop::sample::Index>(), prop::option::of((0..400_u64, 0..400_u64)))
            .prop_map(|(which, used)| Step::End { which, used }),
    ]
}

fn any_rate() -> impl Strategy<Value = Option<Rate>> {
    let number =
        || prop_oneof![4 => 1..5000_u64, 1 => 1..=Rate::MOST, 1 => Just(Rate::MOST), 1 => Rate::MOST - 9..Rate::MOST];
    prop::option::of(
        (number(), prop_oneof![3 => 1..3000_u64, 1 => number()]).prop_map(|(a, b)| Rate::new(a, Some(b)).unwrap()),
    )
}

fn any_allowance() -> impl Strategy<Value = Allowance> {
    (any_rate(), any_rate(), any_rate(), any_rate(), 0..6_u64).prop_map(|(tokens, input, output, requests, most)| {
        let concurrent_requests = NonZeroU64::new(most);
        Allowance { tokens, input_tokens: input, output_tokens: output, requests, concurrent_requests }
    })
}

/// The script admits exactly what the limiter of one gateway admits, with the same remainder.
fn the_script_counts_as_the_ledger_of_one_gateway(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        let runtime = runtime();
        let line = runtime.block_on(server.line());
        let number = std::cell::Cell::new(0);
        let histories = (any_allowance(), prop::collection::vec(any_step(), 0..40));
        let mut runner = TestRunner::new(Config { cases: 96, failure_persistence: None, ..Config::default() });
        let result = runner.run(&histories, |(allowance, steps)| {
            number.set(number.get() + 1);
            let rates = [allowance.tokens, allowance.input_tokens, allowance.output_tokens, allowance.requests];
            let rates = RATES.into_iter().zip(rates).filter_map(|(limit, rate)| Some((limit, rate?))).collect();
            let books = Books {
                line: &line,
                server: &server,
                key: format!("history:{}", number.get()),
                rates,
                places: allowance.concurrent_requests.map(NonZeroU64::get),
                running: 0,
                passed: Duration::ZERO,
            };
            runtime.block_on(play(books, allowance, &steps))
        });
        result.unwrap_or_else(|found| panic!("{found}"));
        Ok(())
    });
}

async fn play(mut books: Books<'_>, allowance: Allowance, steps: &[Step]) -> Result<(), TestCaseError> {
    let (tenant, ledger) = (TenantId::from("acme"), LocalLimiter::new());
    let limits = Limits { whole: allowance, models: BTreeMap::new() };
    let (_, begin) = books.made(&books.call()).await;
    ledger.reload(&BTreeMap::from([(tenant.clone(), limits)]), begin);
    let mut open: Vec<(LocalReservation, Vec<u64>)> = Vec::new();
    for step in steps {
        let (answer, at) = match *step {
            Step::Pass(micros) => {
                books.pass(Duration::from_micros(micros));
                continue;
            }
            Step::Ask { input, output, stated } => {
                let rates = &books.rates;
                let output_wanted = Tokens(output);
                let output_wanted = if stated { Output::Stated(output_wanted) } else { Output::Assumed(output_wanted) };
                let wanted = Wanted { input: Tokens(input), output: output_wanted };
                let needs: Vec<u64> =
                    rates.iter().map(|(limit, rate)| of(*limit, input, output).min(rate.burst())).collect();
                let never = stated
                    && rates.iter().any(|(limit, rate)| {
                        let counts = matches!(limit, LimitKind::Tokens | LimitKind::OutputTokens);
                        counts && of(*limit, input, output) > rate.burst()
                    });
                if never {
                    // The gateway's own matter: the store is not asked.
                    continue;
                }
                let (answer, at) = books.ask(&needs).await;
                let reserved = ledger.reserve(&tenant, "m", &wanted, at);
                prop_assert_eq!(answer.granted, reserved.is_ok(), "{:?}", reserved.err());
                if let Ok(reservation) = reserved {
                    books.running += 1;
                    open.push((reservation, needs));
                }
                (answer, at)
            }
            Step::End { .. } if open.is_empty() => continue,
            Step::End { which, used } => {
                let (reservation, held) = open.swap_remove(which.index(open.len()));
                books.running -= 1;
                let used = used.map(|(input, output)| Used { input: Tokens(input), output: Tokens(output) });
                let (answer, at) =
                    books.end(&held, |limit| used.map_or(0, |used| of(limit, used.input.0, used.output.0))).await;
                match used {
                    Some(used) => reservation.settle(used, at),
                    None => drop(reservation),
                }
                (answer, at)
            }
        };
        let levels = answer.buckets.iter().zip(&books.rates).map(|(level, (_, rate))| {
            rate.burst().saturating_sub(level.whole).saturating_sub(u64::from(level.micros > 0))
        });
        let taken = answer.places.iter().map(|count| books.places.unwrap_or_default() - count.ours);
        let theirs: Vec<u64> = levels.chain(taken).collect();
        let ours: Vec<u64> = ledger.statuses(&tenant, "m", at).iter().map(|standing| standing.remaining).collect();
        prop_assert_eq!(theirs, ours);
    }
    Ok(())
}

fn tokens(per_minute: u64, need: u64) -> BucketArgs {
    BucketArgs { field: "tokens".into(), per_minute, burst: per_minute, need, ..BucketArgs::default() }
}

fn of_tenant(key: &str, gateway: &str, bucket: BucketArgs) -> LuaCall {
    LuaCall {
        key: key.into(),
        gateway: gateway.into(),
        key_life: Duration::from_secs(60),
        buckets: vec![bucket],
        ..LuaCall::default()
    }
}

fn what_is_kept_and_not_ours_is_told_and_left_alone(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        let runtime = runtime();
        let line = runtime.block_on(server.line());
        let places = ConcurrencyArgs { field: "places".into(), most: 9, need: 1, ..ConcurrencyArgs::default() };
        let call = |key: &str| LuaCall { places: vec![places.clone()], ..of_tenant(key, "a", tokens(60, 1)) };
        let ask = |key: &str| runtime.block_on(line.call(&call(key)));
        server.say(&["SET", "text", "hello"]).expect("it is set");
        for (key, field, value) in [
            ("words", "tokens", "many"),
            ("negative", "tokens", "-1 0 0"),
            ("too_fine", "tokens", "1 60000000 0"),
            ("two", "tokens", "1 2"),
            ("layout", "v", "2"),
            ("birth", "b", "yesterday"),
            ("late_birth", "b", "9007199254740994"),
            ("huge", "tokens", "99999999999999999999999 0 1"),
            ("beyond", "tokens", "9007199254740993 0 1"),
            ("far", "tokens", "1 0 99999999999999999999999"),
            ("crowd", "places", "b 99999999999999999999999 1;"),
            ("for_ever", "places", "b 1 9007199254740993;"),
            ("mark", "seen", "b 1"),
            ("late_mark", "seen", "b 9007199254740993 1;"),
        ] {
            server.say(&["HSET", key, field, value]).expect("it is set");
        }
        let keys = ["text", "words", "negative", "too_fine", "two", "layout", "birth", "late_birth"];
        for key in keys.into_iter().chain(["huge", "beyond", "far", "crowd", "for_ever", "mark", "late_mark"]) {
            let before = server.say(&["DUMP", key]).expect("an answer");
            assert!(matches!(ask(key), Err(CallError::Nonsense(_))), "{key}: {:?}", ask(key));
            assert_eq!(server.say(&["DUMP", key]).expect("an answer"), before, "{key} was changed");
        }
        server.say(&["HSET", "most", "tokens", "9007199254740992 0 9007199254740992"]).expect("it is set");
        assert!(!ask("most").expect("the largest numbers that are ours").granted);
        Ok(())
    });
}

fn a_clock_that_steps_neither_locks_out_nor_lets_in_more_than_a_burst(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        let runtime = runtime();
        let line = runtime.block_on(server.line());
        let ask = |need| runtime.block_on(line.call(&of_tenant("k", "a", tokens(60_000, need)))).expect("an answer");
        let first = ask(60_000);
        assert!(first.granted);
        // The clock was an hour ahead when this was written; now it is set right.
        let ahead = first.now + 3_600_000_000;
        server.say(&["HSET", "k", "tokens", &format!("60000 0 {ahead}")]).expect("it is set");
        let back = ask(60_000);
        assert!(!back.granted, "no gift");
        let later = ask(0);
        let flown = (later.now - back.now) / 1000;
        assert_eq!(later.buckets[0].whole + u64::from(later.buckets[0].micros > 0), 60_000 - flown, "and it flows on");
        server.say(&["HSET", "k", "tokens", "60000 0 5"]).expect("it is set");
        assert!(ask(60_000).granted, "a step ahead fills the bucket");
        assert!(!ask(60_000).granted, "once");
        Ok(())
    });
}

fn books_that_were_lost_are_begun_with_what_each_gateway_knows(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        let runtime = runtime();
        let line = runtime.block_on(server.line());
        // A token a minute: nothing to speak of flows off meanwhile.
        let call = |gateway: &str, begun, remembered, need| {
            let unheard = u64::from(gateway == "a") * 5;
            let bucket = BucketArgs { begun, unheard, remembered, burst: 60, ..tokens(1, need) };
            runtime.block_on(line.call(&of_tenant("k", gateway, bucket))).expect("an answer")
        };
        let about = |answer: &LuaReply, tokens: u64| {
            let level = answer.buckets[0];
            let whole = level.whole + u64::from(level.micros > 0);
            assert!((tokens - 1..=tokens).contains(&whole), "about {tokens}: {level:?}");
        };
        let begun = call("a", 0, 40, 0).begun;
        about(&call("a", begun, 40, 0), 10);
        server.say(&["FLUSHALL"]).expect("it is empty");
        // Both knew the same balances, so the later report has the largest amount.
        let first = call("a", begun, 20, 36);
        assert!(!first.granted);
        about(&first, 25);
        about(&call("c", 0, 0, 10), 35);
        about(&call("b", begun, 30, 16), 45);
        about(&call("d", begun, 25, 0), 45);
        // A gateway that has seen the new balances remembers those.
        about(&call("b", first.begun, 45, 0), 45);
        server.say(&["HSET", "k", "lost/tokens", "many"]).expect("it is set");
        let bucket = BucketArgs { begun, remembered: 50, burst: 60, ..tokens(1, 0) };
        let odd = runtime.block_on(line.call(&of_tenant("k", "d", bucket)));
        assert!(matches!(odd, Err(CallError::Nonsense(_))), "{odd:?}");
        Ok(())
    });
}

/// A dump from before, or a replica that lagged.
fn books_that_went_back_are_begun_anew_with_what_each_gateway_knows(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        let runtime = runtime();
        let line = runtime.block_on(server.line());
        // A token a minute: nothing to speak of flows off meanwhile.
        let call = |gateway: &str, (mark, known_mark), begun, remembered, need| {
            let bucket = BucketArgs { begun, remembered, burst: 100, ..tokens(1, need) };
            let call = LuaCall { mark, known_mark, known_begun: begun, ..of_tenant("k", gateway, bucket) };
            runtime.block_on(line.call(&call)).expect("an answer")
        };
        let spent = |answer: &LuaReply| answer.buckets[0].whole + u64::from(answer.buckets[0].micros > 0);
        let copy = |from: &str, to: &str| server.say(&["COPY", from, to, "REPLACE"]).expect("it is copied");
        let first = call("a", (1, 0), 0, 0, 10);
        call("c", (1, 0), first.begun, 10, 0);
        copy("k", "older");
        assert_eq!(call("a", (2, 1), first.begun, 10, 20).begun, first.begun);
        assert_eq!(spent(&call("b", (1, 0), 0, 0, 5)), 35);
        for detects in ["a", "b"] {
            copy("older", "k");
            // A gateway that the older books know of sees nothing wrong.
            let unaware = call("c", (2, 1), first.begun, 10, 3);
            assert_eq!((unaware.begun, spent(&unaware)), (first.begun, 13));
            let (own, other) = (("a", (3, 2), 30), ("b", (2, 1), 35));
            let ((gateway, marks, knows), next) = if detects == "a" { (own, other) } else { (other, own) };
            let found = call(gateway, marks, first.begun, knows, 0);
            assert!(found.begun > first.begun && found.buckets[0].whole <= knows, "{found:?}");
            assert_eq!(spent(&found), knows);
            let (gateway, marks, knows) = next;
            let told = call(gateway, marks, first.begun, knows, 0);
            assert_eq!((told.begun, spent(&told)), (found.begun, 35), "the largest amount, once");
            assert_eq!(spent(&call("c", (3, 2), first.begun, 13, 1)), 36, "and it counts on");
        }
        // A call that was given up comes late.
        let begun = call("a", (6, 0), 0, 0, 0).begun;
        call("a", (5, 0), begun, 0, 0);
        assert_eq!(call("a", (7, 6), begun, 0, 0).begun, begun);
        Ok(())
    });
}

fn places_of_a_gateway_that_is_gone_come_back(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        let runtime = runtime();
        let line = runtime.block_on(server.line());
        let call = |gateway: &str, running, need, besides| {
            let place = ConcurrencyArgs { field: "places".into(), most: 10, running, need, besides };
            let key_life = Duration::from_secs(60);
            let (key, gateway) = ("k".into(), gateway.into());
            let call = LuaCall { key, gateway, key_life, places: vec![place], ..LuaCall::default() };
            runtime.block_on(line.call(&call)).expect("an answer")
        };
        assert_eq!(call("a", 0, 1, 5).places[0].ours, 6);
        let second = call("b", 0, 1, 5);
        assert_eq!((second.granted, second.places[0].ours, second.places[0].others), (true, 4, 6));
        assert!(!call("c", 0, 1, 0).granted);
        assert_eq!(call("a", 2, 0, 0).places[0].ours, 2, "the whole number is said, not a change");
        assert!(call("c", 0, 1, 0).granted);
        // Running requests continue, even beyond the limit.
        assert_eq!(call("b", 12, 0, 0).places[0].ours, 12);
        assert!(!call("c", 1, 1, 0).granted);
        // The life of b's count ends.
        let now = call("c", 1, 0, 0).now;
        let long_ago = format!("b 12 {};a 2 {};", now - 1, now + COUNT_LIFE.as_micros() as u64);
        server.say(&["HSET", "k", "places", &long_ago]).expect("it is set");
        assert_eq!(call("c", 0, 1, 100).places[0].ours, 8);
        // A clock that was set back does not keep a gateway's count forever.
        server.say(&["HSET", "k", "places", &format!("b 12 {};", now * 2)]).expect("it is set");
        call("c", 0, 0, 0);
        let kept = server.say(&["HGET", "k", "places"]).expect("an answer");
        let till: u64 = kept.lines().nth(1).unwrap().trim_end_matches(';').split(' ').nth(2).unwrap().parse().unwrap();
        assert!(till - now <= COUNT_LIFE.as_micros() as u64 + 60_000_000, "{kept}");
        Ok(())
    });
}

fn a_server_that_forgot_the_script_is_given_it_again(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        let runtime = runtime();
        let line = runtime.block_on(server.line());
        for _ in 0..3 {
            server.say(&["SCRIPT", "FLUSH"]).expect("it forgets");
            let call: Arc<LuaCall> = of_tenant("k", "a", tokens(60, 1)).into();
            assert!(runtime.block_on(line.call(&call)).expect("an answer").granted);
        }
        Ok(())
    });
}

on_each! {
    the_script_counts_as_the_ledger_of_one_gateway,
    what_is_kept_and_not_ours_is_told_and_left_alone,
    a_clock_that_steps_neither_locks_out_nor_lets_in_more_than_a_burst,
    books_that_were_lost_are_begun_with_what_each_gateway_knows,
    books_that_went_back_are_begun_anew_with_what_each_gateway_knows,
    places_of_a_gateway_that_is_gone_come_back,
    a_server_that_forgot_the_script_is_given_it_again,
}

//! What gateways tell each other through a real Redis.

use goodput::admit::redis::RedisLimiter;
use goodput::admit::redis::exchange::{GatewayExchange, Heard, LONGEST_RECORD};
use goodput::admit::redis::settings::{OnFailure, Redis, RedisAddress};
use goodput::clock::Clock;

use crate::parts::with_parts;
use crate::redis_server::{Kind, RedisServer, on_each};
use crate::shared_limits::documented_user;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn gateway(settings: Redis, seed: u64) -> (GatewayExchange, RedisLimiter) {
    let (limiter, _sync_task) = RedisLimiter::new(settings, Clock::start(), seed);
    (limiter.exchange().expect("the settings let gateways tell each other"), limiter)
}

async fn heard(exchange: &mut GatewayExchange, record: &str) -> Heard {
    exchange.exchange(|| record.to_owned()).await.expect("the store answers")
}

fn names(heard: &Heard) -> Vec<(u64, &str)> {
    let mut names: Vec<_> = heard.records.iter().map(|told| (told.gateway, told.record.as_str())).collect();
    names.sort_unstable();
    names
}

fn each_gateway_hears_the_last_word_of_the_others(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::start(kind)?;
        runtime().block_on(async {
            let settings = || server.settings(OnFailure::Open);
            let (mut first, limiter) = gateway(settings(), 1);
            let (mut second, _) = gateway(settings(), 2);
            let (mut third, _) = gateway(settings(), 3);
            let alone = heard(&mut first, "a 1").await;
            assert!(alone.records.is_empty());
            let told = heard(&mut second, "b").await;
            assert_eq!(names(&told), [(1, "a 1")]);
            assert_eq!(told.common, alone.common, "the random number is common");
            let _again = heard(&mut first, "a 2").await;
            assert_eq!(names(&heard(&mut third, "").await), [(1, "a 2"), (2, "b")]);
            assert_eq!(names(&heard(&mut first, "a 3").await), [(2, "b")], "who tells nothing is not heard of");
            let too_long = "x".repeat(LONGEST_RECORD + 1);
            let _sends_nothing = heard(&mut second, &too_long).await;
            assert_eq!(names(&heard(&mut first, "a 4").await), [(2, "b")]);
            assert_eq!(limiter.exchanged(), (4, 0, 1));
            // A record from two hours ago, and what no gateway wrote.
            for (field, value) in [("4", "1000000 old"), ("5", "nonsense")] {
                server.say(&["HSET", "goodput:gateways:1", field, value]).expect("an answer");
            }
            assert_eq!(names(&heard(&mut first, "a 5").await), [(2, "b")]);
            let left = server.say(&["HEXISTS", "goodput:gateways:1", "4"]).expect("an answer");
            assert_eq!(left.trim(), ":0", "what is old is removed");
        });
        Ok(())
    });
}

fn a_store_that_is_away_is_left_alone_and_heard_again(kind: Kind) {
    with_parts(kind.name(), || {
        let mut server = RedisServer::start(kind)?;
        runtime().block_on(async {
            let (mut first, limiter) = gateway(server.settings(OnFailure::Open), 1);
            let (mut second, _) = gateway(server.settings(OnFailure::Open), 2);
            let _told = heard(&mut second, "b").await;
            let _told = heard(&mut first, "a").await;
            server.kill();
            assert_eq!(first.exchange(|| "a".to_owned()).await, None);
            let (_, failed, gateways) = limiter.exchanged();
            assert!(failed == 1 && gateways == 0);
            server.restart();
            let again = loop {
                if let Some(heard) = first.exchange(|| "a".to_owned()).await {
                    break heard;
                }
                tokio::task::yield_now().await;
            };
            assert!(again.records.is_empty(), "it lost what it knew");
        });
        Ok(())
    });
}

fn the_documented_user_may_do_all_that_the_exchange_needs(kind: Kind) {
    with_parts(kind.name(), || {
        let server = RedisServer::with(kind, &["--requirepass", "s3cret"])?;
        runtime().block_on(async {
            let rules = documented_user();
            let rules = rules.split(' ').skip(2).map(|word| if word == ">SECRET" { ">narrow" } else { word });
            let auth: &[&str] = &["AUTH", "s3cret"];
            server.say_all(&[auth, &["ACL", "SETUSER"].into_iter().chain(rules).collect::<Vec<_>>()]);
            let url = format!("{}?user=gateway&pass=narrow", server.url());
            let address = RedisAddress::read(&url).expect("a URL of ours");
            let (mut narrow, _) = gateway(Redis { address, ..server.settings(OnFailure::Open) }, 1);
            assert!(heard(&mut narrow, "a").await.records.is_empty());
        });
        Ok(())
    });
}

#[test]
fn settings_switch_the_exchange_off() {
    let address = RedisAddress::read("redis://nowhere").expect("a URL");
    let settings = Redis { share_queues: false, ..Redis::at(address) };
    let (limiter, _sync_task) = RedisLimiter::new(settings, Clock::start(), 1);
    assert!(limiter.exchange().is_none());
}

on_each! {
    each_gateway_hears_the_last_word_of_the_others,
    a_store_that_is_away_is_left_alone_and_heard_again,
    the_documented_user_may_do_all_that_the_exchange_needs,
}

//! What gateways tell each other through a real Redis.

use goodput::admit::redis::RedisLimiter;
use goodput::admit::redis::exchange::{GatewayExchange, Heard, LONGEST_RECORD};
use goodput::admit::redis::settings::{OnFailure, Redis, RedisAddress};
use goodput::clock::Clock;

use crate::gateway::{Gateway, Setup, sum};
use crate::parts::with_parts;
use crate::processes::{CHAT, stream_of};
use crate::redis_server::{Kind, RedisServer, on_each};
use crate::running::{Open, Running, get, post, until};
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

/// Gateways that tell each other through this store, before these engines: one of chat, and one of batch.
fn of_chat_and_batch(server: &RedisServer, engine: &Running) -> [Gateway; 2] {
    let more = format!("replicas: 2\nlimits_store: {{redis: {{url: \"{}\", timeout: 1s}}}}\n", server.url());
    ["priority: high", "priority: batch"].map(|chat| {
        let pool = "max_concurrency_per_engine: 4";
        Gateway::start(&Setup { engines: &[engine], more: &more, chat, pool, ..Setup::default() })
    })
}

fn sum_at(gateway: &Gateway, family: &str) -> f64 {
    sum(&get(&gateway.admin, "/metrics").expect("it runs"), family)
}

/// Waits until this is the sum of a family at every gateway.
fn until_all(gateways: &[Gateway; 2], family: &str, expected: f64) {
    until(&format!("{family} is {expected}"), || {
        gateways.iter().all(|gateway| sum_at(gateway, family) == expected).then_some(())
    });
}

fn serves(gateway: &Gateway) {
    let answer = post(&gateway.running.url, CHAT, "", &stream_of(2)).expect("a 200");
    assert!(answer.contains("[DONE]"), "{answer}");
}

fn two_processes_keep_one_order_and_serve_on_without_the_store_and_without_each_other(kind: Kind) {
    const REQUESTS: usize = 60;
    with_parts(kind.name(), || {
        let mut server = RedisServer::start(kind)?;
        let engine = Running::engine(&["--speed", "1"]);
        let mut gateways = of_chat_and_batch(&server, &engine);
        until_all(&gateways, "goodput_limits_store_gateways", 1.0);

        let open = |gateway: &Gateway, tokens| Open::post(&gateway.running.url, CHAT, &stream_of(tokens));
        let mut sitting: Vec<Open> = gateways.iter().chain(&gateways).map(|gateway| open(gateway, 30_000)).collect();
        sitting.iter_mut().for_each(|sitting| sitting.read_until(r#""content":""#));
        until_all(&gateways, "goodput_engine_elsewhere", 2.0);
        until_all(&gateways, "goodput_seats", 2.0);
        let waiting: Vec<Open> = gateways
            .iter()
            .rev()
            .flat_map(|gateway| std::iter::repeat_n(gateway, REQUESTS))
            .map(|gateway| open(gateway, 5))
            .collect();
        until_all(&gateways, "goodput_queue_depth_elsewhere", REQUESTS as f64);
        let [chat, batch] = &gateways;
        let status = get(&chat.admin, "/").expect("the page");
        assert!(status.contains("60 waiting at other gateways") && status.contains("2 of other gateways"), "{status}");

        // Each gateway alone would give batch half of the seats. With one order batch gets one only where a record is late.
        drop(sitting);
        let met = |gateway: &Gateway| sum_at(gateway, "slo_met_total");
        let of_batch = until("chat is served", || (met(chat) >= REQUESTS as f64).then(|| met(batch)));
        assert!(of_batch < REQUESTS as f64 / 2.0, "{of_batch} of batch before the last of chat");
        for mut answer in waiting {
            answer.read_to_end();
            assert!(answer.read.contains("[DONE]"), "{}", answer.read);
        }

        server.kill();
        until_all(&gateways, "goodput_limits_store_gateways", 0.0);
        until("nobody is heard of", || {
            let page = get(&chat.admin, "/metrics").expect("it runs");
            (!page.contains("\ngoodput_engine_elsewhere{")).then_some(())
        });
        gateways.iter().for_each(serves);
        server.restart();
        until_all(&gateways, "goodput_limits_store_gateways", 1.0);
        gateways.iter().for_each(serves);

        // Killed in mid-answer, it leaves what it had at the engine to the other one.
        let [chat, batch] = &mut gateways;
        let mut cut = open(chat, 30_000);
        cut.read_until(r#""content":""#);
        until("it is told of", || (sum_at(batch, "goodput_engine_elsewhere") == 1.0).then_some(()));
        chat.running.kill();
        until("it is forgotten", || {
            let page = get(&batch.admin, "/metrics").expect("it runs");
            let is_forgotten = !page.contains("\ngoodput_engine_elsewhere{");
            (is_forgotten && sum(&page, "goodput_limits_store_gateways") == 0.0).then_some(())
        });
        serves(batch);
        batch.adds_up();
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
    two_processes_keep_one_order_and_serve_on_without_the_store_and_without_each_other,
}

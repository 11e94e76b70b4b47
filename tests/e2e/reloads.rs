//! Settings that change while streams run, and engines that come and go.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::gateway::{Gateway, Setup, settings, sum, sum_where};
use crate::processes::{CHAT, stream_of};
use crate::running::{Open, Running, ask, get, post, until};

const SLOW: &[&str] = &["--speed", "0.5"];
const QUICK: &[&str] = &["--speed", "4"];
/// A stream that outlasts the test's actions, and ends by itself.
const LONG: u32 = 100;

fn begun(gateway: &Gateway) -> Open {
    let mut answer = Open::post(&gateway.running.url, CHAT, &stream_of(LONG));
    answer.read_until(r#""content":" "#);
    answer
}

fn is_served(gateway: &Gateway) -> Result<(), String> {
    let answer = post(&gateway.running.url, CHAT, "", &stream_of(3))?;
    if answer.contains("[DONE]") { Ok(()) } else { Err(answer) }
}

#[test]
fn a_stream_keeps_the_promise_it_began_with() {
    let engine = Running::engine(SLOW);
    let engines = [&engine];
    let gateway = Gateway::start(&Setup { engines: &engines, ..Setup::default() });
    let mut old = begun(&gateway);
    gateway.reload(&Setup { engines: &engines, ttft: 0.000_001, ..Setup::default() });
    // New requests have an objective that is always missed.
    is_served(&gateway).unwrap();
    old.read_to_end();
    assert!(old.read.contains("[DONE]"), "{}", old.read);
    let page = gateway.adds_up();
    assert_eq!(sum(&page, "slo_met_total"), 1.0, "{page}");
    assert_eq!(sum_where(&page, "goodput_slo_missed_total", "reason=\"ttft\""), 1.0, "{page}");
}

#[test]
fn an_engine_taken_out_of_the_settings_ends_its_streams_and_gets_no_more() {
    let (old, new) = (Running::engine(SLOW), Running::engine(QUICK));
    let gateway = Gateway::start(&Setup { engines: &[&old], ..Setup::default() });
    let mut answer = begun(&gateway);
    gateway.reload(&Setup { engines: &[&new], ..Setup::default() });
    for _ in 0..3 {
        is_served(&gateway).unwrap();
    }
    answer.read_to_end();
    assert!(answer.read.contains("[DONE]"), "{}", answer.read);
    let served = |engine: &Running| sum(&get(&engine.url, "/metrics").unwrap(), "vllm:request_success_total");
    assert_eq!((served(&old), served(&new)), (1.0, 3.0));
    let page = gateway.adds_up();
    assert_eq!((sum(&page, "slo_total"), sum(&page, "slo_met_total")), (4.0, 4.0), "{page}");
}

#[test]
fn a_certificate_that_cannot_be_used_fails_the_whole_reload() {
    let engine = Running::engine(QUICK);
    let engines = [&engine];
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let (certificate, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    let files = [("server.crt", certificate.as_str()), ("server.key", &key), ("bad.crt", "no certificate")];
    let setup = Setup {
        files: &files,
        engines: &engines,
        listen: "tls: {certificate_file: server.crt, private_key_file: server.key}",
        ..Setup::default()
    };
    let gateway = Gateway::start(&setup);
    let bad = Setup {
        listen: "tls: {certificate_file: bad.crt, private_key_file: server.key}",
        files: &files,
        engines: &engines,
        ..Setup::default()
    };
    gateway.reload_text(&settings(&bad), "failure");
    let told = post(&gateway.admin, "/-/reload", "", "");
    assert!(told.as_ref().is_err_and(|told| told.contains("bad.crt")), "{told:?}");
    gateway.reload_text(&settings(&setup), "success");
}

#[test]
fn a_bad_file_changes_nothing_and_shows() {
    let engine = Running::engine(SLOW);
    let setup = Setup { engines: &[&engine], ..Setup::default() };
    let gateway = Gateway::start(&setup);
    let mut answer = begun(&gateway);
    let last = || sum(&get(&gateway.admin, "/metrics").unwrap(), "goodput_config_last_reload_successful");
    assert_eq!(last(), 1.0);
    gateway.reload_text("slo_classes: []\nroutes: [\n", "failure");
    assert_eq!(last(), 0.0);
    is_served(&gateway).unwrap();
    let bad = settings(&setup).replace("default_class: chat", "default_class: chta");
    gateway.reload_text(&bad, "failure");
    let reload = "POST /-/reload HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let told = ask(&gateway.admin, reload).unwrap_err();
    assert!(
        told.starts_with("HTTP/1.1 409") && told.contains("goodput.yaml:") && told.contains("default_class"),
        "{told}"
    );
    is_served(&gateway).unwrap();
    assert_eq!(last(), 0.0);
    gateway.reload(&setup);
    assert_eq!(last(), 1.0);
    is_served(&gateway).unwrap();
    answer.read_to_end();
    assert!(answer.read.contains("[DONE]"), "{}", answer.read);
    let page = gateway.adds_up();
    assert_eq!((sum(&page, "slo_total"), sum(&page, "slo_met_total")), (4.0, 4.0), "{page}");
}

#[test]
fn keys_that_need_a_restart_are_compared_with_the_values_at_start() {
    let engine = Running::engine(QUICK);
    let engines = [&engine];
    let with = |more: &'static str, ttft| Setup { engines: &engines, more, ttft, ..Setup::default() };
    let (began, changed) = ("", "telemetry: {access_log: off}");
    let gateway = Gateway::start(&with(began, 30.0));
    let told = || {
        let line = "a change of this key takes effect after a restart";
        gateway.running.output().lines().filter(|told| told.contains(line) && told.contains("access_log")).count()
    };
    gateway.reload(&with(changed, 30.0));
    assert_eq!(told(), 1);
    // Keys that need a restart are not applied: the process still writes its access lines.
    gateway.reload(&with(changed, 31.0));
    assert_eq!(told(), 2, "said again, for the key still waits for a restart");
    gateway.reload(&with(began, 32.0));
    assert_eq!(told(), 2, "as it began, so there is nothing to wait for");
    is_served(&gateway).unwrap();
    until("its access line is there", || gateway.running.output().contains("\"outcome\":\"met\"").then_some(()));
}

#[test]
fn an_engine_that_comes_back_on_its_port_is_used_again() {
    let mut engine = Running::engine(QUICK);
    let gateway = Gateway::start(&Setup { engines: &[&engine], ..Setup::default() });
    is_served(&gateway).unwrap();
    engine.kill();
    let refused = is_served(&gateway).unwrap_err();
    assert!(refused.starts_with("HTTP/1.1 502") || refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(!refused.contains(engine.address()), "{refused}");
    until("the engine is known to be down", || {
        (sum(&get(&gateway.admin, "/metrics").ok()?, "goodput_engine_up") == 0.0).then_some(())
    });
    let again = Running::engine_on(engine.address(), QUICK);
    until("the engine is used again", || is_served(&gateway).ok());
    let page = gateway.adds_up();
    assert_eq!(sum(&page, "slo_met_total"), 2.0, "{page}");
    let missed = sum(&page, "goodput_slo_missed_total");
    assert_eq!(sum_where(&page, "goodput_slo_missed_total", "reason=\"upstream_unavailable\""), missed, "{page}");
    assert!(sum(&get(&again.url, "/metrics").unwrap(), "vllm:request_success_total") >= 1.0);
}

#[test]
fn clients_feel_nothing_of_engines_that_are_restarted_in_turn() {
    let mut engines = [Running::engine(QUICK), Running::engine(QUICK)];
    let gateway = Gateway::start(&Setup { engines: &engines.each_ref(), ..Setup::default() });
    let over = AtomicBool::new(false);
    let body = r#"{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":4}"#;
    let ask_on = || {
        let mut served = 0_u32;
        while !over.load(Ordering::Relaxed) {
            post(&gateway.running.url, CHAT, "", body).unwrap_or_else(|answer| panic!("after {served}: {answer}"));
            served += 1;
        }
        served
    };
    let served = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3).map(|_| scope.spawn(ask_on)).collect();
        // A panic here must not leave the clients asking for ever.
        let restarts = scope.spawn(|| {
            for engine in &mut engines {
                let successes = |engine: &Running| {
                    let page = get(&engine.url, "/metrics").ok()?;
                    (sum(&page, "vllm:request_success_total") > 0.0).then_some(())
                };
                until("the engine has work", || successes(engine));
                engine.signal("TERM");
                assert_eq!(engine.exit_code(), Some(0));
                *engine = Running::engine_on(engine.address(), QUICK);
                until("the engine has work again", || successes(engine));
            }
        });
        let restarted = restarts.join();
        over.store(true, Ordering::Relaxed);
        let served: u32 = clients.into_iter().map(|client| client.join().expect("every answer was good")).sum();
        restarted.expect("both came back");
        served
    });
    let page = gateway.adds_up();
    assert_eq!(sum(&page, "slo_met_total"), f64::from(served), "{page}");
}

#[test]
fn a_gateway_that_is_killed_leaves_no_work_behind() {
    let engine = Running::engine(SLOW);
    let mut gateway = Gateway::start(&Setup { engines: &[&engine], ..Setup::default() });
    let mut answer = Open::post(&gateway.running.url, CHAT, &stream_of(5000));
    answer.read_until(r#""content":" "#);
    gateway.running.kill();
    answer.read_to_end();
    assert!(!answer.read.contains("[DONE]"), "{}", answer.read);
    until("the engine is idle", || {
        let page = get(&engine.url, "/metrics").ok()?;
        (sum(&page, "vllm:num_requests_running") == 0.0).then_some(())
    });
}

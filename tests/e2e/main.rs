//! The gateway between real parts: official SDKs before it, engines behind it, a real
//! Prometheus beside it. Real processes, real sockets, real time.
//!
//! `tests/e2e/prepare.sh` fetches the parts. A test whose part is missing says so and holds
//! nothing, except where `CI` is set: there it fails. `GOODPUT_E2E_PARTS` names another folder
//! than `target` to look for them in.

mod compose;
mod dashboard;
mod degradation;
mod deploy;
mod exits;
mod fleet_budgets;
mod gateway;
mod gateway_exchange;
mod journal;
mod load_tools;
mod memory;
mod paging;
mod parts;
mod processes;
mod prometheus;
mod redis_server;
mod reloads;
mod rules;
mod running;
mod script;
mod sdks;
mod seats;
mod shared_gateways;
mod shared_limits;
mod slo_state;
mod status_page;
mod tls;
mod top;
mod traces;

use std::process::{Command, Stdio};

use gateway::{Gateway, Setup, sum, sum_where};
use parts::{find, python, scripts, with_parts};
use prometheus::Prometheus;
use running::{Running, get, post, until};
use sdks::Sdk;

#[test]
fn the_simulated_engine_alone_satisfies_the_sdks() {
    with_parts("sdks against the engine", || {
        let engine = Running::engine(&["--speed", "4"]);
        for sdk in [Sdk::openai_python()?, Sdk::anthropic_python()?, Sdk::openai_node()?] {
            sdk.drive(&engine.url, "sim", "");
        }
        Ok(())
    });
}

#[test]
fn openai_python_through_the_gateway() {
    with_parts("openai-python", || {
        Sdk::openai_python().map(|sdk| through_the_gateway(&sdk, &["--reasoning-tokens", "2"]))
    });
}

#[test]
fn anthropic_python_through_the_gateway() {
    with_parts("anthropic-python", || {
        Sdk::anthropic_python().map(|sdk| through_the_gateway(&sdk, &["--reasoning-tokens", "2"]))
    });
}

#[test]
fn openai_node_through_the_gateway() {
    with_parts("openai-node", || Sdk::openai_node().map(|sdk| through_the_gateway(&sdk, &["--speculative", "3"])));
}

/// Two simulated engines behind a gateway: the view of the SDK's users, and then the counters of the gateway.
fn through_the_gateway(sdk: &Sdk, engine: &[&str]) {
    let engine = [engine, &["--speed", "4"]].concat();
    let engines = [Running::engine(&engine), Running::engine(&engine)];
    let gateway = Gateway::start(&Setup { engines: &engines.each_ref(), ..Setup::default() });
    sdk.drive(&gateway.running.url, "sim", "");
    let page = gateway.adds_up();
    assert_eq!(sum(&page, "goodput_slo_missed_total"), 0.0, "the promises are easy: {page}");
    let left = sum_where(&page, "goodput_slo_excluded_total", "reason=\"client_cancel\"");
    assert_eq!(left, 5.0, "the script leaves five streams: {page}");
    for engine in &engines {
        until("the engines are idle: what clients left was left there, too", || {
            let page = get(&engine.url, "/metrics").ok()?;
            (sum(&page, "vllm:num_requests_running") + sum(&page, "vllm:num_requests_waiting") == 0.0).then_some(())
        });
    }
}

#[test]
fn a_real_llama_cpp_server_behind_the_gateway() {
    with_parts("llama.cpp", || {
        let mut command = Command::new(python()?);
        command.arg(scripts().join("llamacpp_engine.py")).stdin(Stdio::piped());
        let engine = Running::start(command, "the llama.cpp server");
        let setup = Setup { engines: &[&engine], engine: "kind: llama_cpp", model: "tiny", ..Setup::default() };
        let gateway = Gateway::start(&setup);
        let lacks = "embeddings,sequence_numbers,strictness,tools";
        for sdk in [Sdk::openai_python()?, Sdk::anthropic_python()?] {
            sdk.drive(&gateway.running.url, "tiny", lacks);
        }
        let page = gateway.adds_up();
        assert_eq!(sum(&page, "goodput_slo_missed_total"), 0.0, "the promises are easy: {page}");
        Ok(())
    });
}

/// A gateway that has served 30 chats, so that series of every kind have values.
fn that_has_served(engine: &Running) -> Gateway {
    let chat = "workload_assumption: {input_tokens: {p50: 5, p95: 9}, output_tokens: {p50: 4, p95: 8}}";
    let gateway = Gateway::start(&Setup { engines: &[engine], chat, ..Setup::default() });
    let ask = r#"{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":4,"stream":true}"#;
    for _ in 0..30 {
        let answer = post(&gateway.running.url, "/v1/chat/completions", "", ask);
        assert!(answer.is_ok_and(|answer| answer.contains("[DONE]")));
    }
    gateway
}

/// Replay of C113: the page of a gateway that has served, series of every kind among them.
#[test]
fn c113_promtool_finds_nothing_wrong_with_the_metrics() {
    with_parts("promtool", || {
        let promtool = find("prometheus", "install it: apt-get install prometheus")?.with_file_name("promtool");
        let engine = Running::engine(&["--speed", "20"]);
        let gateway = that_has_served(&engine);
        let page = gateway.adds_up();
        assert!(page.contains("goodput_workload_drift{"), "{page}");
        let page = page.split_once("\r\n\r\n").map_or(page.as_str(), |(_, page)| page);
        let (told, is_right) = prometheus::check_metrics(&promtool, page);
        assert!(is_right && told.is_empty(), "{told}");
        let wrong = page.replace(",percentile=", ",quantile=");
        assert!(!prometheus::check_metrics(&promtool, &wrong).1, "it would have told");
        Ok(())
    });
}

/// C113: labels that a scrape attaches would push ours of the same name aside.
#[test]
fn c113_no_label_is_pushed_aside_by_those_that_a_scrape_attaches() {
    with_parts("prometheus", || {
        let binary = find("prometheus", "install it: apt-get install prometheus")?;
        let engine = Running::engine(&["--speed", "20"]);
        let gateway = that_has_served(&engine);
        let attached = ["namespace", "pod", "container", "service", "node", "endpoint", "cluster"];
        let labels: Vec<String> = attached.iter().map(|label| format!("{label}: x")).collect();
        let prometheus = Prometheus::labelled(&binary, &gateway.admin, &labels.join(", "));
        prometheus.until(r#"sum(slo_total{class="chat",namespace="x"})"#, 30.0);
        let names = prometheus.ask("/api/v1/labels", |answer| Some(answer["data"].as_array()?.clone()));
        let names: Vec<&str> = names.iter().filter_map(|name| name.as_str()).collect();
        assert!(
            attached.iter().chain(&["job", "instance", "percentile"]).all(|label| names.contains(label)),
            "{names:?}"
        );
        assert!(!names.iter().any(|name| name.starts_with("exported_")), "{names:?}");
        Ok(())
    });
}

#[test]
fn a_real_prometheus_reads_the_true_counts() {
    with_parts("prometheus", || {
        let binary = find("prometheus", "install it: apt-get install prometheus")?;
        let engine = Running::engine(&["--speed", "4"]);
        let gateway = Gateway::start(&Setup { engines: &[&engine], ..Setup::default() });
        let prometheus = Prometheus::of(&binary, &gateway.admin);
        let url = &gateway.running.url;
        let chat = r#"{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":4,"stream":true}"#;
        for _ in 0..5 {
            assert!(post(url, "/v1/chat/completions", "", chat).is_ok_and(|answer| answer.contains("[DONE]")));
        }
        // An objective of a microsecond is always missed.
        for _ in 0..3 {
            let answer = post(url, "/v1/chat/completions", "x-slo-class: strict\r\n", chat);
            assert!(answer.is_ok_and(|answer| answer.contains("[DONE]")));
        }
        let refused = post(url, "/v1/chat/completions", "", r#"{"model":"sim","messages":[],"n":"x"}"#);
        assert!(refused.is_err_and(|answer| answer.starts_with("HTTP/1.1 400")));
        for (query, value) in [
            (r#"sum(slo_total{class="chat"})"#, 5.0),
            (r#"sum(slo_met_total{class="chat"})"#, 5.0),
            (r#"sum(slo_total{class="strict"})"#, 3.0),
            (r#"sum(slo_met_total{class="strict"})"#, 0.0),
            (r#"sum(slo_total)"#, 8.0),
            (r#"sum(goodput_requests_finished_total)"#, 9.0),
            (r#"sum(goodput_slo_excluded_total{reason="invalid_request"})"#, 1.0),
        ] {
            prometheus.until(query, value);
        }
        Ok(())
    });
}

//! Budgets of two gateways together, read from a real Prometheus (`telemetry.prometheus`).

use serde_json::Value;

use crate::gateway::{Gateway, Setup, sum_where};
use crate::parts::{find, with_parts};
use crate::processes::{CHAT, stream_of};
use crate::prometheus::{Prometheus, free_address};
use crate::running::{Running, get, post, until};

fn slo(gateway: &Gateway) -> Value {
    serde_json::from_str(&get(&gateway.admin, "/slo").expect("it runs")).expect("JSON")
}

fn class<'a>(slo: &'a Value, name: &str) -> &'a Value {
    let classes = slo["classes"].as_array().expect("classes");
    classes.iter().find(|class| class["class"] == name).expect("the class")
}

fn ask(gateway: &Gateway, class: &str, times: usize) {
    for _ in 0..times {
        let answer = post(&gateway.running.url, CHAT, &format!("x-slo-class: {class}\r\n"), &stream_of(2));
        assert!(answer.is_ok_and(|answer| answer.contains("[DONE]")));
    }
}

/// Both gateways tell of the requests of both; and of their own alone while Prometheus is away, in words.
#[test]
fn two_gateways_tell_of_one_budget_while_prometheus_answers() {
    with_parts("fleet budgets", || {
        let binary = find("prometheus", "install it: apt-get install prometheus")?;
        let engine = Running::engine(&["--speed", "100"]);
        let address = free_address();
        let more = format!(
            "telemetry: {{prometheus: {{url: \"http://{address}\", every: 1s, timeout: 1s, select: {{job: goodput}}}}}}"
        );
        let setup = Setup { engines: &[&engine], more: &more, ..Setup::default() };
        let gateways = [Gateway::start(&setup), Gateway::start(&setup)];
        let [one, other] = &gateways;
        let before = slo(one);
        assert_eq!(class(&before, "chat")["source"], "process");
        assert!(before["note"].as_str().is_some_and(|note| note.contains("of this process alone")), "{before}");

        let prometheus = Prometheus::at(&binary, &[&one.admin, &other.admin], address);
        // Each counter was seen at nothing before it counts, at both gateways.
        prometheus.until("count(count by (instance) (slo_total{class=\"chat\"}))", 2.0);
        prometheus.until("count(slo_total{class=\"chat\"} == 0) / count(slo_total{class=\"chat\"})", 1.0);
        ask(one, "chat", 3);
        ask(other, "chat", 4);
        ask(other, "strict", 2);
        // A range looks back from its last scrape to its first, and reads what lies between as the whole: some more.
        let both_know = || {
            let told = gateways.each_ref().map(slo);
            let counts = told.each_ref().map(|slo| class(slo, "chat")["total"].as_u64());
            let [Some(a), Some(b)] = counts else { return None };
            ((7..=9).contains(&a) && (7..=9).contains(&b)).then_some(told)
        };
        let [told, _] = until("both tell of seven requests", both_know);
        let (chat, strict) = (class(&told, "chat"), class(&told, "strict"));
        assert_eq!((&chat["source"], &chat["attainment"]), (&"prometheus".into(), &1.0.into()), "{told}");
        assert_eq!(strict["attainment"], 0.0, "{told}");
        assert!(told["note"].as_str().is_some_and(|note| note.contains("sums over all gateways")), "{told}");
        let page = get(&one.admin, "/metrics").expect("it runs");
        assert_eq!(sum_where(&page, "goodput_slo_source", "class=\"chat\",source=\"prometheus\""), 1.0);
        let status = get(&one.admin, "/").expect("the page");
        assert!(status.contains("sums over all gateways"), "the status page says so, too");

        drop(prometheus);
        let alone = until("each tells of its own again", || {
            let now = slo(one);
            (class(&now, "chat")["source"] == "process").then_some(now)
        });
        assert_eq!(class(&alone, "chat")["total"], 3, "{alone}");
        assert!(alone["note"].as_str().is_some_and(|note| note.contains("cannot be read")), "{alone}");
        let page = get(&one.admin, "/metrics").expect("it runs");
        assert!(sum_where(&page, "goodput_prometheus_reads_total", "failure") > 0.0);
        assert!(one.running.output().contains("Prometheus cannot be read"));
        Ok(())
    });
}

//! The dashboard as Grafana reads it, and its queries at a real Prometheus that scrapes the demo.

use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::gateway::{Gateway, Setup};
use crate::parts::{find, python, scripts, with_parts};
use crate::processes::{CHAT, stream_of};
use crate::prometheus::{Prometheus, free_address};
use crate::redis_server::{Kind, RedisServer};
use crate::running::{Running, attempt, get, post, until};

fn file() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/grafana/goodput.json")
}

#[test]
fn the_dashboard_is_as_grafana_writes_one() {
    with_parts("dashboard schema", || {
        let python = python()?;
        let has_sdk =
            Command::new(&python).args(["-c", "import grafana_foundation_sdk"]).stderr(Stdio::null()).status();
        if !has_sdk.is_ok_and(|status| status.success()) {
            return Err("the Python package grafana-foundation-sdk is missing; run tests/e2e/prepare.sh".to_owned());
        }
        let mut script = Command::new(python);
        script.arg(scripts().join("dashboard_schema.py")).arg(file()).env("PYTHONDONTWRITEBYTECODE", "1");
        let done = script.output().expect("the interpreter was found");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Ok(())
    });
}

/// A demo that runs until the test ends.
struct Demo {
    child: Child,
    admin: String,
}

impl Demo {
    fn start() -> Demo {
        let admin = free_address();
        let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
        command.args(["demo", "--listen", "127.0.0.1:0", "--admin", &admin.to_string(), "--rate", "12"]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it is ours");
        let demo = Demo { child, admin: format!("http://{admin}") };
        until("the demo is ready", || get(&demo.admin, "/readyz").ok());
        demo
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A gateway with a tenant's limit in this store, large enough for a test.
fn sharing(engine: &Running, redis: &RedisServer) -> Gateway {
    let hash = blake3::hash(b"sk-acme").to_hex();
    let more = format!(
        r#"
tenants: [{{tenant: acme, keys: [{{blake3: "{hash}"}}], limits: {{requests_per_minute: 60000}}}}]
limits_store: {{redis: {{url: "{}", timeout: 1s}}}}
"#,
        redis.url()
    );
    Gateway::start(&Setup { engines: &[engine], more: &more, ..Setup::default() })
}

/// Every query, with its variables replaced.
fn queries() -> Vec<String> {
    let board: Value = serde_json::from_str(&std::fs::read_to_string(file()).expect("it is there")).expect("JSON");
    let targets = board["panels"].as_array().expect("panels").iter().filter_map(|panel| panel["targets"].as_array());
    let expressions = targets.flatten().map(|target| target["expr"].as_str().expect("a query").to_owned());
    let in_place = |expr: String| {
        let stands_for = [
            ("$__rate_interval", "30s"),
            ("$slo_window", "1h"),
            ("$heatmap_class", "chat_interactive"),
            ("$class", ".*"),
            ("$pool", ".*"),
            ("$tenant", ".*"),
            ("$job", ".*"),
        ];
        stands_for.into_iter().fold(expr, |expr, (name, value)| expr.replace(name, value))
    };
    expressions.map(in_place).collect()
}

#[test]
fn every_query_of_the_dashboard_has_values_under_the_demos_traffic() {
    with_parts("dashboard queries", || {
        let binary = find("prometheus", "install it: apt-get install prometheus")?;
        let redis = RedisServer::start(Kind::Redis)?;
        let engine = Running::engine(&["--speed", "100"]);
        let idle = Gateway::start(&Setup { engines: &[&engine], ..Setup::default() });
        let sharing = sharing(&engine, &redis);
        let demo = Demo::start();
        let prometheus = Prometheus::of_all(&binary, &[&demo.admin, &idle.admin, &sharing.admin], &[]);
        let mut empty = queries();
        assert!(empty.len() > 60, "{}", empty.len());
        // Some series take time: predictions need 33 responses of an engine, tokens a minute of traffic.
        let all_have = attempt(|| {
            let asked = post(&sharing.running.url, CHAT, "authorization: Bearer sk-acme\r\n", &stream_of(1));
            assert!(asked.is_ok(), "{asked:?}");
            empty.retain(|query| prometheus.values(query).is_empty());
            empty.is_empty().then_some(())
        });
        assert!(all_have.is_some(), "without values: {empty:#?}");
        for query in queries() {
            for (labels, value) in prometheus.values(&query) {
                assert!(!value.is_nan(), "{query}: {labels} is not a number");
            }
        }
        // The ratio of a class without requests has no value.
        let kept = "sum by (class) (rate(slo_met_total[30s])) / (sum by (class) (rate(slo_total[30s])) > 0)";
        assert!(queries().iter().any(|query| query.contains("> 0)")));
        let classes: Vec<Value> =
            prometheus.values(kept).into_iter().map(|(labels, _)| labels["class"].clone()).collect();
        assert!(classes.contains(&"voice".into()) && !classes.contains(&"strict".into()), "{classes:?}");
        Ok(())
    });
}

//! The path of a page: slow engines, the gateway's counters, Prometheus rules, Alertmanager, the receiver.
//! Windows are sixty times shorter than in production (`goodput rules --faster 60`).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::Value;

use crate::gateway::{Gateway, Setup};
use crate::parts::{find, with_parts};
use crate::prometheus::{Prometheus, free_address};
use crate::running::{Running, get, post, run, until};

/// Whoever is on call: keeps the alerts that Alertmanager sends, with the path that they came to.
struct Pager {
    address: SocketAddr,
    came: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Pager {
    fn listen() -> Pager {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let came = Arc::new(Mutex::new(Vec::new()));
        let keep = Arc::clone(&came);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if let Some((path, body)) = take(stream) {
                    keep.lock().expect("nobody panics with it").push((path, body));
                }
            }
        });
        Pager { address, came }
    }

    /// The alerts with this name that came to this receiver in this state.
    fn alerts(&self, receiver: &str, name: &str, status: &str) -> Vec<Value> {
        let came = self.came.lock().expect("nobody panics with it");
        let of = came.iter().filter(|(path, _)| path == receiver);
        let alerts = of.flat_map(|(_, body)| body["alerts"].as_array().cloned().unwrap_or_default());
        alerts.filter(|alert| alert["labels"]["alertname"] == name && alert["status"] == status).collect()
    }
}

/// Reads one notification and thanks for it.
fn take(stream: TcpStream) -> Option<(String, Value)> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().to_ascii_lowercase() {
            end if end.is_empty() => break,
            header => length = header.strip_prefix("content-length: ").map_or(length, |text| text.parse().unwrap_or(0)),
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").ok()?;
    Some((path, serde_json::from_slice(&body).ok()?))
}

/// The example of docs/alerts.md.
fn alertmanager_settings() -> String {
    let page =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/alerts.md")).expect("it is there");
    let block = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a block");
    assert!(block.starts_with("# alertmanager.yml\n"), "{block}");
    block.to_owned()
}

/// A real Alertmanager; it ends with the test.
struct Alertmanager {
    child: Child,
    address: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Alertmanager {
    fn start(binary: &Path, pager: &Pager) -> Alertmanager {
        let folder = tempfile::tempdir().expect("a folder for its data");
        let settings = alertmanager_settings().replace("127.0.0.1:9/", &format!("{}/", pager.address));
        let settings = settings.replace("group_wait: 10s", "group_wait: 1s\n  group_interval: 1s");
        let file = folder.path().join("alertmanager.yml");
        std::fs::write(&file, settings).expect("the folder is ours");
        let address = free_address();
        let child = Command::new(binary)
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .args(["--cluster.listen-address=", "--log.level=error"])
            .stdout(Stdio::null())
            .spawn()
            .expect("the program was found");
        let started = Alertmanager { child, address, _folder: folder };
        until("Alertmanager is ready", || get(&format!("http://{address}"), "/-/ready").ok().map(|_| ()));
        started
    }
}

impl Drop for Alertmanager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Clients that ask one thing after the other, until this is dropped.
struct Clients {
    enough: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

const ASK: &str = r#"{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":1,"stream":true}"#;

impl Clients {
    fn of(gateway: &Gateway) -> Clients {
        let enough = Arc::new(AtomicBool::new(false));
        let ask = |_| {
            let (url, enough) = (gateway.running.url.clone(), Arc::clone(&enough));
            std::thread::spawn(move || {
                while !enough.load(Ordering::Relaxed) {
                    let _ = post(&url, "/v1/chat/completions", "", ASK);
                }
            })
        };
        let threads = (0..4).map(ask).collect();
        Clients { enough, threads }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.enough.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The rules of a gateway, for windows sixty times shorter.
fn rules(gateway: &Gateway) -> String {
    let path = gateway.settings_file().display().to_string();
    let ended = run(&["rules", "-c", &path, "--faster", "60"]);
    assert_eq!(ended.code, Some(0), "{}", ended.errors);
    ended.told
}

/// Below the TTFT of the slow engine on any machine, because its step takes 1.5 s.
const TTFT: f64 = 0.75;

#[test]
fn slow_engines_page_and_their_recovery_resolves_it() {
    with_parts("paging", || {
        let prometheus = find("prometheus", "install it: apt-get install prometheus")?;
        let alertmanager = find("prometheus-alertmanager", "install it: apt-get install prometheus-alertmanager")?;
        let (quick, slow) = (Running::engine(&["--speed", "4"]), Running::engine(&["--speed", "0.005"]));
        let of = |engine| Setup {
            ttft: TTFT,
            admin: "token_file: token",
            files: &[("token", "t0ken")],
            ..Setup { engines: engine, ..Setup::default() }
        };
        let (good, bad) = ([&quick], [&slow]);
        let gateway = Gateway::start(&of(&good));
        let pager = Pager::listen();
        let alertmanager = Alertmanager::start(&alertmanager, &pager);
        let rules = rules(&gateway);
        let prometheus =
            Prometheus::with_rules(&prometheus, &gateway.admin, Some("t0ken"), &rules, alertmanager.address);
        let clients = Clients::of(&gateway);
        // Old enough to be judged, and in order.
        prometheus
            .until(r#"count(count_over_time(slo_total{class="chat",length="short",pool="main"}[1s] offset 9s))"#, 1.0);
        assert_eq!(pager.alerts("/pager", "GoodputErrorBudgetBurn", "firing").len(), 0);

        gateway.exchange(&of(&bad));
        let page = until("a page arrives", || pager.alerts("/pager", "GoodputErrorBudgetBurn", "firing").pop());
        assert_eq!((&page["labels"]["class"], &page["labels"]["severity"]), (&"chat".into(), &"page".into()), "{page}");
        assert_eq!(page["labels"]["tier"], "outage", "{page}");
        let summary = page["annotations"]["summary"].as_str().unwrap_or_default();
        assert!(
            summary.starts_with("chat: more than 81 % of the requests of the last 10s missed (95 % within"),
            "{summary}"
        );
        assert_eq!(page["annotations"]["runbook_url"], "docs/runbooks/error-budget-burn.md");

        gateway.exchange(&of(&good));
        until("the page is resolved", || pager.alerts("/pager", "GoodputErrorBudgetBurn", "resolved").pop());
        drop(clients);

        // A drill goes the same way, and nothing else notices.
        let token = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(token.path(), "t0ken\n").expect("it is ours");
        let token = token.path().display().to_string();
        let drilled = run(&["drill", "--url", &gateway.admin, "--token-file", &token, "--json"]);
        assert_eq!(drilled.code, Some(0), "{}{}", drilled.told, drilled.errors);
        let page = until("the drill's page arrives", || pager.alerts("/pager", "GoodputDrill", "firing").pop());
        assert_eq!(page["labels"]["class"], "drill", "{page}");
        let slo = Command::new(env!("CARGO_BIN_EXE_goodput"))
            .args(["drill", "--url", &gateway.admin, "--token-file", "/nowhere"])
            .output();
        assert_eq!(slo.expect("it is ours").status.code(), Some(2));
        Ok(())
    });
}

#[test]
fn amtool_takes_the_example_of_the_documentation() {
    with_parts("amtool", || {
        let amtool = find("amtool", "install it: apt-get install prometheus-alertmanager")?;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("alertmanager.yml");
        std::fs::write(&file, alertmanager_settings()).expect("the folder is ours");
        let checked = Command::new(&amtool).arg("check-config").arg(&file).output().expect("it was found");
        assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
        let route = |labels: &[&str]| {
            let file = format!("--config.file={}", file.display());
            let tried = Command::new(&amtool).args(["config", "routes", "test", &file]).args(labels).output();
            String::from_utf8_lossy(&tried.expect("it was found").stdout).trim().to_owned()
        };
        for (severity, receiver) in [("page", "pager"), ("ticket", "tickets"), ("info", "chat")] {
            assert_eq!(route(&[&format!("severity={severity}"), "class=chat"]), receiver);
        }
        Ok(())
    });
}

/// Both compute the same burn rate over the same requests.
#[test]
fn the_burn_of_the_gateway_is_the_burn_of_prometheus() {
    with_parts("burn", || {
        let prometheus = find("prometheus", "install it: apt-get install prometheus")?;
        let engine = Running::engine(&["--speed", "4"]);
        let engines = [&engine];
        let setup = Setup { engines: &engines, chat: "target_headers: tighten", ..Setup::default() };
        let gateway = Gateway::start(&setup);
        let prometheus = Prometheus::with_rules(&prometheus, &gateway.admin, None, &rules(&gateway), free_address());
        prometheus.until(r#"count(slo_total{class="chat",length="short",pool="main"} == 0)"#, 1.0);
        for number in 0..40 {
            // An objective of a microsecond is always missed.
            let target = if number % 5 == 0 { "x-slo-ttft-ms: 0.001\r\n" } else { "" };
            assert!(post(&gateway.running.url, "/v1/chat/completions", target, ASK).is_ok());
        }
        prometheus.until(r#"sum(slo_total{class="chat"})"#, 40.0);
        // An hour of rules sixty times shorter is a minute, and the test is not a minute old.
        let both =
            r#"class:slo_burn_rate:ratio1m{class="chat"} / on (class) goodput_slo_burn_rate{class="chat",window="5m"}"#;
        prometheus.until(&format!("abs({both} - 1) < bool 0.01"), 1.0);
        prometheus.until(r#"goodput_slo_burn_rate{class="chat",window="5m"} > bool 3.9"#, 1.0);
        Ok(())
    });
}

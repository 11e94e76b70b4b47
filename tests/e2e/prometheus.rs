//! A real Prometheus that scrapes a gateway.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::running::{ask, attempt, authority, get, until};

pub struct Prometheus {
    child: Child,
    url: String,
    _folder: Option<tempfile::TempDir>,
}

impl Prometheus {
    /// A server with its own settings and short intervals.
    pub fn of(binary: &Path, admin: &str) -> Prometheus {
        Prometheus::with(binary, admin, &[])
    }

    /// The same, with more arguments.
    pub fn with(binary: &Path, admin: &str, more: &[&str]) -> Prometheus {
        Prometheus::of_all(binary, &[admin], more)
    }

    /// The same for several gateways.
    pub fn of_all(binary: &Path, admins: &[&str], more: &[&str]) -> Prometheus {
        Prometheus::of_all_at(binary, admins, "", more, free_address())
    }

    /// One that gateways were told of before it was there.
    pub fn at(binary: &Path, admins: &[&str], address: SocketAddr) -> Prometheus {
        Prometheus::of_all_at(binary, admins, "", &[], address)
    }

    /// One whose scrapes attach labels (`a: b, c: d`), as service discovery does.
    pub fn labelled(binary: &Path, admin: &str, labels: &str) -> Prometheus {
        Prometheus::of_all_at(binary, &[admin], labels, &[], free_address())
    }

    fn of_all_at(binary: &Path, admins: &[&str], labels: &str, more: &[&str], address: SocketAddr) -> Prometheus {
        let folder = tempfile::tempdir().expect("a folder for its data");
        let targets: Vec<String> = admins.iter().map(|admin| format!("\"{}\"", authority(admin))).collect();
        let targets = targets.join(", ");
        let settings = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs: [{{job_name: goodput, static_configs: [{{targets: [{targets}], labels: {{{labels}}}}}]}}]\n"
        );
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, settings).expect("the folder is ours");
        let arguments = [
            format!("--config.file={}", file.display()),
            format!("--storage.tsdb.path={}", folder.path().join("data").display()),
        ];
        let arguments: Vec<String> = arguments.into_iter().chain(more.iter().map(|more| (*more).to_owned())).collect();
        let mut started = Prometheus::start(binary, &arguments, address);
        started._folder = Some(folder);
        started
    }

    /// A server with these rules, short intervals and this Alertmanager.
    pub fn with_rules(
        binary: &Path,
        admin: &str,
        token: Option<&str>,
        rules: &str,
        alertmanager: SocketAddr,
    ) -> Prometheus {
        let folder = tempfile::tempdir().expect("a folder for its data");
        let target = authority(admin);
        let bearer = token.map_or(String::new(), |token| format!(", authorization: {{credentials: {token}}}"));
        let settings = format!(
            "global: {{scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 1s}}\n\
             rule_files: [rules.yaml]\n\
             alerting: {{alertmanagers: [{{static_configs: [{{targets: [\"{alertmanager}\"]}}]}}]}}\n\
             scrape_configs: [{{job_name: goodput, static_configs: [{{targets: [\"{target}\"]}}]{bearer}}}]\n"
        );
        std::fs::write(folder.path().join("rules.yaml"), rules).expect("the folder is ours");
        let file = folder.path().join("prometheus.yml");
        std::fs::write(&file, settings).expect("the folder is ours");
        let arguments = [
            format!("--config.file={}", file.display()),
            format!("--storage.tsdb.path={}", folder.path().join("data").display()),
        ];
        let mut started = Prometheus::start(binary, &arguments, free_address());
        started._folder = Some(folder);
        started
    }

    /// Waits until a group of rules of this name is there.
    pub fn until_rules(&self, group: &str) {
        until("the rules are there", || self.get("/api/v1/rules").filter(|told| told.contains(group)));
    }

    /// A server whose arguments name settings and data.
    pub fn start(binary: &Path, arguments: &[String], address: SocketAddr) -> Prometheus {
        let child = Command::new(binary)
            .args(arguments)
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=error")
            .stdout(Stdio::null())
            .spawn()
            .expect("the program was found");
        let started = Prometheus { child, url: format!("http://{address}"), _folder: None };
        until("Prometheus is ready", || get(&started.url, "/-/ready").ok().map(|_| ()));
        started
    }

    /// Waits until a response of its API is as expected.
    pub fn ask<T>(&self, path: &str, look: impl Fn(&Value) -> Option<T>) -> T {
        let mut last = String::new();
        let found = attempt(|| {
            last = self.get(path)?;
            look(&serde_json::from_str(&last).ok()?)
        });
        found.unwrap_or_else(|| panic!("{path} never was as it should be: {last}"))
    }

    /// Waits until a query has this value.
    pub fn until(&self, query: &str, expected: f64) {
        let mut last = String::new();
        let found = attempt(|| {
            last = self.answer(query)?;
            let answer: Value = serde_json::from_str(&last).ok()?;
            let value: f64 = answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()?;
            (value == expected).then_some(())
        });
        assert!(found.is_some(), "{query} never became {expected}: {last}");
    }

    /// The values of a query at this moment, each with its labels.
    pub fn values(&self, query: &str) -> Vec<(Value, f64)> {
        let answer = self.answer(query).unwrap_or_else(|| panic!("no answer to {query}"));
        let answer: Value = serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{query}: {answer}"));
        let results = answer["data"]["result"].as_array().unwrap_or_else(|| panic!("{query}: {answer}"));
        let value = |one: &Value| {
            let text = one["value"][1].as_str().expect("a value is a text");
            (one["metric"].clone(), text.parse().unwrap_or_else(|_| panic!("{query}: {text}")))
        };
        results.iter().map(value).collect()
    }

    fn answer(&self, query: &str) -> Option<String> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        self.get(&format!("/api/v1/query?query={encoded}"))
    }

    /// HTTP/1.0, because a long response would be chunked.
    fn get(&self, path: &str) -> Option<String> {
        ask(&self.url, &format!("GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n")).ok()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Output of `promtool check metrics` for a page, and whether it passed.
pub fn check_metrics(promtool: &Path, page: &str) -> (String, bool) {
    let mut command = Command::new(promtool);
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it stands beside Prometheus");
    let mut input = child.stdin.take().expect("a pipe");
    // It reads all before it writes.
    input.write_all(page.as_bytes()).expect("it reads");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let told = [output.stdout, output.stderr].concat();
    (String::from_utf8_lossy(&told).into_owned(), output.status.success())
}

/// A recently free port, for programs that cannot take port 0.
pub fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound")
}

//! `deploy/compose`, started without containers: the same commands and files, with loopback addresses in
//! place of the names of a container network.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::gateway::{sum, value};
use crate::parts::{find, with_parts};
use crate::prometheus::{Prometheus, free_address};
use crate::running::{Running, authority, get, post, until};

/// Path of the binary in the image.
const BINARY: &str = "/usr/local/bin/goodput";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn words(list: &Value) -> Vec<String> {
    let list = list.as_array().unwrap_or_else(|| panic!("no list of words: {list}"));
    list.iter().map(|word| word.as_str().expect("a text").to_owned()).collect()
}

/// The words of an instruction of the Dockerfile's last stage, written as a JSON list.
fn instruction(name: &str) -> Vec<String> {
    let text = read("Dockerfile").replace("\\\n", " ");
    let last_stage = text.rsplit_once("\nFROM ").expect("two stages").1;
    let line = last_stage.lines().find(|line| line.starts_with(&format!("{name} "))).expect("it is there");
    words(&serde_json::from_str(&line[line.find('[').expect("a list")..]).expect("a JSON list"))
}

/// The services, with replacements for the addresses in their files and commands.
struct Compose {
    services: Value,
    folder: tempfile::TempDir,
    stands_for: BTreeMap<String, String>,
}

impl Compose {
    fn read() -> Compose {
        let file: Value = serde_yaml::from_str(&read("deploy/compose/compose.yaml")).expect("YAML");
        let folder = tempfile::tempdir().expect("a folder");
        Compose { services: file["services"].clone(), folder, stands_for: BTreeMap::new() }
    }

    /// The service's command behind the image's entry point, if any. Mounted files are copied, volumes are
    /// folders, and addresses are replaced everywhere.
    fn command(&self, name: &str) -> Vec<String> {
        let service = &self.services[name];
        let mut mounts = Vec::new();
        for mount in service["volumes"].as_array().into_iter().flatten() {
            let mut parts = mount.as_str().expect("the short form").split(':');
            let (from, to) = (parts.next().expect("a source"), parts.next().expect("a target"));
            mounts.push((to.to_owned(), self.mount(from).display().to_string()));
        }
        let command = words(&service["command"]).into_iter().map(|word| {
            let word = self.in_place(&word);
            // A path is a whole word, or follows the first equals sign of one.
            let (flag, path) = word.split_at(word.find('=').map_or(0, |at| at + 1));
            let mounted = mounts.iter().filter(|(inside, _)| path.starts_with(inside.as_str()));
            match mounted.max_by_key(|(inside, _)| inside.len()) {
                Some((inside, here)) => format!("{flag}{here}{}", &path[inside.len()..]),
                None => word,
            }
        });
        command.collect()
    }

    fn mount(&self, from: &str) -> PathBuf {
        let here = self.folder.path().join(from.trim_start_matches("./"));
        if from.starts_with("./") {
            let text = read(&format!("deploy/compose/{}", from.trim_start_matches("./")));
            std::fs::write(&here, self.in_place(&text)).expect("the folder is ours");
        }
        here
    }

    fn in_place(&self, text: &str) -> String {
        self.stands_for.iter().fold(text.to_owned(), |text, (name, here)| text.replace(name, here))
    }

    /// Starts a service of our image.
    fn start(&self, name: &str, what: &'static str, more: &[&str]) -> Running {
        let [entry] = &instruction("ENTRYPOINT")[..] else { panic!("one word") };
        assert_eq!(entry, BINARY);
        let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
        command.args(self.command(name)).args(more);
        Running::start(command, what)
    }
}

/// Runs a health check with this address in place of its own; returns its exit code.
fn is_well(check: &[String], its_own: &str, here: &str) -> Option<i32> {
    let (program, arguments) = check.split_first().expect("a command");
    assert_eq!(program, BINARY);
    assert!(check.iter().any(|word| word.contains(its_own)), "{check:?} asks nobody at {its_own}");
    let arguments = arguments.iter().map(|word| word.replace(its_own, here));
    let mut command = Command::new(env!("CARGO_BIN_EXE_goodput"));
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().expect("it is ours").code()
}

/// Grafana itself is started by containers only; that its files fit together is seen here.
#[test]
fn grafana_of_compose_finds_its_prometheus_and_its_board() {
    let compose = Compose::read();
    let grafana = &compose.services["grafana"];
    let mounts: BTreeMap<String, String> = words(&grafana["volumes"])
        .iter()
        .map(|mount| {
            let parts: Vec<&str> = mount.split(':').collect();
            let [from, to, "ro"] = parts[..] else { panic!("{mount} can be written") };
            (to.to_owned(), read(&format!("deploy/compose/{from}")))
        })
        .collect();
    let read = |inside: &str| -> Value { serde_yaml::from_str(&mounts[inside]).expect("YAML") };
    let source = read("/etc/grafana/provisioning/datasources/goodput.yaml");
    let [source] = &source["datasources"].as_array().expect("a list")[..] else { panic!("{source}") };
    assert_eq!((&source["type"], &source["isDefault"]), (&"prometheus".into(), &true.into()));
    assert_eq!(source["url"], "http://prometheus:9090", "the name and the port inside the network of containers");
    assert!(compose.services["prometheus"]["ports"][0].as_str().is_some_and(|port| port.ends_with(":9090")));
    let scraped: Value = serde_yaml::from_str(&self::read("deploy/compose/prometheus.yml")).expect("YAML");
    assert_eq!(source["jsonData"]["timeInterval"], scraped["global"]["scrape_interval"]);
    let boards = read("/etc/grafana/provisioning/dashboards/goodput.yaml");
    let folder = boards["providers"][0]["options"]["path"].as_str().expect("a path");
    let board = read(&format!("{folder}/goodput.json"));
    assert_eq!(board["uid"], "goodput", "the URL in compose.yaml names it");
}

#[test]
fn the_services_of_compose_serve_count_and_are_scraped() {
    with_parts("compose", || {
        let prometheus = find("prometheus", "install it: apt-get install prometheus")?;
        let mut compose = Compose::read();
        let names: Vec<&String> = compose.services.as_object().expect("services").keys().collect();
        assert_eq!(
            names,
            ["engine-1", "engine-2", "gateway", "grafana", "prometheus"],
            "a new service is started here, too"
        );
        // Every port of 0.0.0.0 becomes a free one of the loopback.
        for port in ["8000", "8080", "9090"] {
            compose.stands_for.insert(format!("0.0.0.0:{port}"), "127.0.0.1:0".to_owned());
        }
        let mut engines = Vec::new();
        for name in ["engine-1", "engine-2"] {
            let engine = compose.start(name, "an engine of compose", &[]);
            let check = words(&compose.services[name]["healthcheck"]["test"]);
            assert_eq!(check[0], "CMD");
            until("the engine is healthy", || {
                (is_well(&check[1..], "127.0.0.1:8000", engine.address()) == Some(0)).then_some(())
            });
            compose.stands_for.insert(format!("{name}:8000"), engine.address().to_owned());
            engines.push(engine);
        }

        assert_eq!(words(&compose.services["gateway"]["command"]), instruction("CMD"), "the image's own command");
        let mut gateway = compose.start("gateway", "the gateway of compose", &["--json"]);
        let told: Value = serde_json::from_str(&gateway.first_line).expect("one line of JSON");
        let admin = told["admin"].as_str().expect("the operators' port").to_owned();
        let check = instruction("HEALTHCHECK");
        let health = || is_well(&check, "127.0.0.1:9090", authority(&admin));
        until("the gateway is healthy", || (health() == Some(0)).then_some(()));

        compose.stands_for.insert("gateway:9090".to_owned(), authority(&admin).to_owned());
        let prometheus = Prometheus::start(&prometheus, &compose.command("prometheus"), free_address());
        for stream in [true, false, true, false] {
            let body = format!(
                r#"{{"model":"sim","stream":{stream},"max_tokens":8,"messages":[{{"role":"user","content":"hello"}}]}}"#
            );
            let answer = post(&gateway.url, "/v1/chat/completions", "", &body);
            assert!(answer.is_ok(), "{answer:?}");
        }
        prometheus.until(r#"sum(slo_total{class="chat_interactive",pool="interactive",model="sim"})"#, 4.0);
        prometheus.until("sum(slo_total)", 4.0);
        prometheus.until_rules("goodput-fast-burn");
        let served =
            |engine: &Running| sum(&get(&engine.url, "/metrics").expect("it runs"), "vllm:request_success_total");
        assert_eq!(engines.iter().map(served).sum::<f64>(), 4.0);
        let page = get(&admin, "/metrics").expect("it runs");
        let up: Vec<f64> = page.lines().filter(|line| line.starts_with("goodput_engine_up{")).map(value).collect();
        assert_eq!(up, [1.0, 1.0], "{page}");

        // Told to stop, it is unwell before it is gone, and gone within its time.
        gateway.signal("TERM");
        until("the gateway says that it leaves", || (health() == Some(1)).then_some(()));
        assert_eq!(gateway.exit_code(), Some(0));
        Ok(())
    });
}

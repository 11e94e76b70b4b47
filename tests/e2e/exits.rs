//! Exit codes of the commands: 0 success, 1 negative result, 2 usage or an unreadable file, 3 failed start.

use std::net::TcpListener;
use std::path::Path;

use crate::gateway::{Gateway, Setup, settings};
use crate::running::{Ended, Running, run, until};

/// A folder with a good settings file, a bad one, and one whose certificate is missing.
struct Desk(tempfile::TempDir);

impl Desk {
    fn new() -> Desk {
        let engine = Setup::default();
        let good = settings(&engine).replace("engines: []", "engines: [{url: \"http://127.0.0.1:9\"}]");
        let desk = Desk(tempfile::tempdir().expect("a folder"));
        desk.write("good.yaml", &good);
        desk.write("bad.yaml", &good.replace("default_class: chat", "default_class: chta"));
        desk.write("broken.yaml", "pools: [");
        let tls = "\"127.0.0.1:0\", tls: {certificate_file: none.crt, private_key_file: none.key}, ";
        desk.write("tls.yaml", &good.replacen("\"127.0.0.1:0\", ", tls, 1));
        desk.write("body.json", r#"{"model":"sim","messages":[]}"#);
        desk.write("other.json", r#"{"model":"unknown","messages":[]}"#);
        desk
    }

    fn path(&self, name: &str) -> String {
        let path: &Path = self.0.path();
        path.join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("the folder is ours");
    }

    /// Runs a command in which `@name` is a file of the test's folder.
    fn run(&self, line: &str) -> Ended {
        let words = line.split(' ').map(|word| word.strip_prefix('@').map_or(word.to_owned(), |name| self.path(name)));
        let words: Vec<String> = words.collect();
        run(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The command exits with this code, and prints something unless it is 0.
    fn ends(&self, line: &str, code: i32) {
        let Ended { code: found, told, errors } = self.run(line);
        assert_eq!(found, Some(code), "{line}\n{told}\n{errors}");
        assert!(code == 0 || !(told.is_empty() && errors.is_empty()), "{line} says nothing");
    }
}

#[test]
fn check_exits_with_0_1_or_2() {
    let desk = Desk::new();
    desk.ends("check -c @good.yaml", 0);
    desk.ends("check -c @good.yaml --request @body.json", 0);
    desk.ends("check -c @bad.yaml", 1);
    desk.ends("check -c @bad.yaml --json", 1);
    desk.ends("check -c @broken.yaml", 1);
    desk.ends("check -c @tls.yaml", 1);
    desk.ends("check -c @good.yaml --request @other.json", 1);
    desk.ends("check -c @nowhere.yaml", 2);
    desk.ends("check -c @good.yaml --request @nowhere.json", 2);
}

#[test]
fn check_probes_the_engines_and_a_gateway_logs_the_same_at_its_start() {
    let desk = Desk::new();
    desk.ends("check -c @good.yaml --probe", 1);
    let engine = Running::engine(&[]);
    for (model, code) in [("sim", 0), ("simm", 1)] {
        let setup = Setup { engines: &[&engine], model, ..Setup::default() };
        desk.write("there.yaml", &settings(&setup));
        let Ended { code: found, told, errors } = desk.run("check -c @there.yaml --probe");
        assert_eq!(found, Some(code), "{told}\n{errors}");
        let is_there = "(vllm 0.32.0): is there; key none needed, models: sim";
        let is_nowhere = "no engine lists the model \"simm\"";
        assert_eq!((told.contains(is_there), told.contains(is_nowhere)), (true, code == 1), "{told}");
        let gateway = Gateway::start(&setup);
        until("the gateway says what the engine is", || {
            gateway.running.output().contains("engine available").then_some(())
        });
        if code == 1 {
            until("and what is misspelt", || {
                gateway.running.output().contains("no engine lists the model").then_some(())
            });
        }
    }
}

#[test]
fn json_output_is_json_in_every_case() {
    let desk = Desk::new();
    for line in [
        "check --json -c @nowhere.yaml",
        "check --json -c @bad.yaml",
        "check --json -c @good.yaml --request @nowhere.json",
        "health --json --url http://127.0.0.1:9/readyz",
        "health --json --url nonsense",
    ] {
        let Ended { told, errors, .. } = desk.run(line);
        let answer: serde_json::Value =
            serde_json::from_str(&told).unwrap_or_else(|_| panic!("{line}\n{told}\n{errors}"));
        assert!(answer["good"] == false || answer["well"] == false, "{line}\n{told}");
        assert_eq!(errors, "", "{line}");
    }
}

#[test]
fn serve_and_check_tell_a_problem_in_the_same_words() {
    let desk = Desk::new();
    let (checked, served) = (desk.run("check -c @bad.yaml"), desk.run("serve -c @bad.yaml"));
    let first = |text: &str| text.lines().find(|line| line.contains("default_class")).map(str::to_owned);
    assert!(first(&checked.told).is_some_and(|line| line.starts_with(&format!("{}:", desk.path("bad.yaml")))));
    assert_eq!(first(&checked.told), first(&served.errors));
}

#[test]
fn usage_is_2_and_help_is_0() {
    let desk = Desk::new();
    for line in [
        "serve",
        "nothing",
        "check",
        "engine --speed fast",
        "engine --speed 0",
        "engine --output-p95 1",
        "demo --rate 1e9",
        "serve -c @good.yaml --what",
    ] {
        desk.ends(line, 2);
    }
    for line in ["--help", "--version", "serve --help", "schema", "key new"] {
        desk.ends(line, 0);
    }
}

#[test]
fn settings_that_cannot_be_used_start_nothing() {
    let desk = Desk::new();
    desk.ends("serve -c @bad.yaml", 2);
    desk.ends("serve -c @broken.yaml", 2);
    desk.ends("serve -c @nowhere.yaml", 2);
    desk.ends("serve -c @tls.yaml", 2);
}

#[test]
fn a_taken_port_is_3_for_everything_that_listens() {
    let desk = Desk::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("it is bound").to_string();
    let good = std::fs::read_to_string(desk.path("good.yaml")).expect("it was written");
    desk.write("clients.yaml", &good.replacen("127.0.0.1:0", &address, 1));
    let admin = good.replace("admin: {address: \"127.0.0.1:0\"", &format!("admin: {{address: \"{address}\""));
    desk.write("admin.yaml", &admin);
    desk.ends("serve -c @clients.yaml", 3);
    desk.ends("serve -c @admin.yaml", 3);
    desk.ends(&format!("engine --listen {address}"), 3);
    desk.ends(&format!("demo --listen {address} --admin 127.0.0.1:0 --seconds 1 --json"), 3);
}

#[test]
fn health_exits_with_0_or_1() {
    let desk = Desk::new();
    let mut engine = Running::engine(&[]);
    let gateway = Gateway::start(&Setup { engines: &[&engine], ..Setup::default() });
    for (url, path, code) in [
        (&gateway.admin, "/readyz", 0),
        (&gateway.admin, "/livez", 0),
        (&gateway.running.url, "/health", 0),
        (&engine.url, "/health", 0),
        (&gateway.admin, "/nothing", 1),
    ] {
        desk.ends(&format!("health --url {url}{path}"), code);
    }
    let gone = engine.url.clone();
    engine.signal("TERM");
    assert_eq!(engine.exit_code(), Some(0));
    desk.ends(&format!("health --url {gone}/health"), 1);
    desk.ends("health --url nonsense", 1);
}

#[test]
fn an_interrupt_ends_a_gateway_as_a_termination_does() {
    let engine = Running::engine(&[]);
    let mut gateway = Gateway::start(&Setup { engines: &[&engine], ..Setup::default() });
    gateway.running.signal("INT");
    assert_eq!(gateway.running.exit_code(), Some(0));
}

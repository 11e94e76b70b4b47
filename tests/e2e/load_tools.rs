//! `sweep`, `report` and `replay` as a user runs them: exit codes, what is kept when they are interrupted or the engine
//! dies, and files that stand on their own.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::running::{Ended, Running, get, run, until};

/// A folder for what the commands write.
struct Desk(tempfile::TempDir);

/// A command that goes on until it is told to end.
struct Going {
    child: Child,
    errors: tempfile::NamedTempFile,
}

impl Desk {
    fn new() -> Desk {
        Desk(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).expect("JSON")
    }

    /// The words of a line in which `@name` stands for a file of the desk.
    fn words(&self, line: &str) -> Vec<String> {
        let word = |word: &str| match word.strip_prefix('@') {
            Some(name) => self.path(name).display().to_string(),
            None => word.to_owned(),
        };
        line.split_whitespace().map(word).collect()
    }

    fn run(&self, line: &str) -> Ended {
        run(&self.words(line).iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The command ends with this code, and says something on stderr where it did not begin.
    fn ends(&self, line: &str, code: i32) -> Ended {
        let ended = self.run(line);
        assert_eq!(ended.code, Some(code), "{line}\n{}\n{}", ended.told, ended.errors);
        assert!(code < 2 || !ended.errors.is_empty(), "{line} says nothing");
        ended
    }

    fn start(&self, line: &str) -> Going {
        let errors = tempfile::NamedTempFile::new().expect("a file for what it says");
        let child = Command::new(env!("CARGO_BIN_EXE_goodput"))
            .args(self.words(line))
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(self.path("told")).expect("the folder is ours"))
            .stderr(errors.reopen().expect("a second handle"))
            .spawn()
            .expect("it is ours");
        Going { child, errors }
    }

    /// An Azure trace of requests at these seconds.
    fn trace(&self, name: &str, seconds: impl Iterator<Item = f64>) {
        let mut text = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
        for at in seconds {
            let (minutes, seconds) = ((at / 60.0) as u64, at % 60.0);
            let _ = writeln!(text, "2024-05-10 {:02}:{:02}:{seconds:010.7},20,4", minutes / 60, minutes % 60);
        }
        std::fs::write(self.path(name), text).expect("the folder is ours");
    }
}

impl Going {
    fn interrupt(&self) {
        let told = Command::new("kill").arg("-INT").arg(self.child.id().to_string()).status();
        assert!(told.is_ok_and(|status| status.success()));
    }

    /// Its exit code, and what it said on stderr.
    fn ended(&mut self) -> (Option<i32>, String) {
        let status = until("the command has ended", || self.child.try_wait().expect("it was started here"));
        (status.code(), std::fs::read_to_string(self.errors.path()).expect("the file is ours"))
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Requests that an engine has finished.
fn finished(engine: &Running) -> f64 {
    let page = get(&engine.url, "/metrics").unwrap_or_default();
    crate::sum(&page, "vllm:request_success_total")
}

fn has_finished(engine: &Running, count: f64) {
    until("the engine has had requests", || (finished(engine) >= count).then_some(()));
}

/// A sweep of a moment at one rate.
const SHORT: &str = "--input 8 --output 4 --rates 20 --repetitions 1 --warm-up 0.1 --min-seconds 0.5 --max-seconds 2 \
                     --first-look 5 --standard-error 0.2";

/// A sweep that would take an hour.
const LONG: &str =
    "--input 8 --output 4 --rates 20 --repetitions 1 --warm-up 0.1 --min-seconds 3000 --max-seconds 4000";

#[test]
fn a_sweep_says_yes_or_no_or_that_it_did_not_begin() {
    let (desk, engine) = (Desk::new(), Running::engine(&["--speed", "20"]));
    let url = &engine.url;
    desk.ends(&format!("sweep {url} --e2e 60 {SHORT} --out @yes"), 0);
    let no = desk.ends(&format!("sweep {url} --e2e 0.001 {SHORT} --out @no --json"), 1);
    let summary: Value = serde_json::from_str(&no.told).expect("JSON");
    assert_eq!((&summary, summary["complete"].as_bool()), (&desk.json("no/summary.json"), Some(true)));
    for (line, code) in [
        (format!("sweep {url} {SHORT} --out @none"), 2),
        (format!("sweep {url} --e2e 60 {SHORT} --out @yes"), 2),
        (format!("sweep {url} --e2e 60 --out @none"), 2),
        (format!("sweep {url} --e2e 60 {SHORT} --rates 0 --out @none"), 2),
        (format!("sweep {url} --e2e 60 {SHORT} --model other --out @none"), 3),
        (format!("sweep http://127.0.0.1:9 --e2e 60 {SHORT} --out @none"), 3),
    ] {
        desk.ends(&line, code);
        assert!(!desk.path("none").exists(), "{line}: nothing is left where nothing was measured");
    }
}

#[test]
fn a_sweep_that_is_interrupted_keeps_what_it_has_and_so_does_one_whose_engine_dies() {
    let (desk, mut engine) = (Desk::new(), Running::engine(&["--speed", "20"]));
    let mut going = desk.start(&format!("sweep {} --e2e 60 {LONG} --out @cut", engine.url));
    has_finished(&engine, 30.0);
    going.interrupt();
    let (code, errors) = going.ended();
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains("interrupted: what was measured until then is kept"), "{errors}");
    let summary = desk.json("cut/summary.json");
    assert_eq!((summary["complete"].as_bool(), summary["ended_by"].as_str()), (Some(false), Some("interrupted")));
    assert_eq!(summary["results"][0]["points"][0]["verdict"], "partial");
    assert!(desk.read("cut/records.jsonl").lines().count() > 0 && desk.path("cut/report.html").exists());
    let before = finished(&engine);
    let mut going = desk.start(&format!("sweep {} --e2e 60 {LONG} --out @gone", engine.url));
    has_finished(&engine, before + 30.0);
    engine.kill();
    let (code, errors) = going.ended();
    assert_eq!(code, Some(1), "{errors}");
    let summary = desk.json("gone/summary.json");
    let why = summary["ended_by"].as_str().unwrap_or_default();
    assert!(why.starts_with("the service stopped answering: cannot connect"), "{why}");
    assert!(desk.read("gone/records.jsonl").contains("\"outcome\":\"met\""));
}

#[test]
fn a_report_compares_sweeps_of_one_workload_and_refuses_others() {
    let (desk, engine) = (Desk::new(), Running::engine(&["--speed", "20"]));
    for (out, output) in [("one", "4"), ("two", "4"), ("other", "9")] {
        let short = SHORT.replace("--output 4", &format!("--output {output}"));
        desk.ends(&format!("sweep {} --e2e 60 {short} --out @{out}", engine.url), 0);
    }
    let alike = desk.ends("report @one @two --out @page.html --json", 0);
    assert!(serde_json::from_str::<Value>(&alike.told).is_ok_and(|told| told.is_array()), "{}", alike.told);
    let unlike = desk.ends("report @one @other --out @page.html", 1);
    assert!(unlike.told.contains("lengths of class default"), "{}", unlike.told);
    std::fs::write(desk.path("half.json"), &desk.read("one/summary.json")[..200]).expect("the folder is ours");
    std::fs::write(desk.path("else.json"), "{\"format\": \"x\"}").expect("the folder is ours");
    for line in
        ["report @nowhere", "report @half.json", "report @else.json", "report", "report @one --out @no/page.html"]
    {
        desk.ends(line, 2);
    }
}

/// Every number of a table beside the same one of another file.
#[test]
fn what_a_sweep_writes_stands_on_its_own_and_says_the_same_everywhere() {
    let (desk, engine) = (Desk::new(), Running::engine(&["--speed", "20"]));
    let line = format!("sweep {} --e2e 60 {} --out @run", engine.url, SHORT.replace("--rates 20", "--rates 10,20"));
    desk.ends(&line, 0);
    let (summary, page) = (desk.json("run/summary.json"), desk.read("run/report.html"));
    is_self_contained(&page);
    for svg in svgs(&desk.path("run")) {
        let text = std::fs::read_to_string(&svg).expect("it is there");
        is_well_formed(&text);
        is_self_contained(&text);
    }
    assert!(!svgs(&desk.path("run")).is_empty(), "there is a picture");
    let points = summary["results"][0]["points"].as_array().expect("points");
    assert_eq!(points.len(), 2);
    for point in points {
        let class = &point["classes"][0];
        let attained = format!("{:.1} %", class["attainment"].as_f64().expect("a number") * 100.0);
        let rate = format!("<td>{:.1}</td>", point["rate"].as_f64().expect("a number"));
        let flow = format!("<td>{:.2}</td>", point["throughput"]["met_per_second"].as_f64().expect("a number"));
        for told in [attained, rate, flow] {
            assert!(page.contains(&told), "{told} is on the page");
        }
    }
    let records: Vec<Value> =
        desk.read("run/records.jsonl").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let csv = desk.read("run/records.csv");
    let mut rows = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let head = rows.next().expect("a heading");
    let rows: Vec<Vec<&str>> = rows.collect();
    assert_eq!(rows.len(), records.len());
    for (row, record) in rows.iter().zip(&records) {
        assert_eq!(row.len(), head.len());
        for (name, cell) in head.iter().zip(row) {
            let value = &record[*name];
            let same = match value {
                Value::Null => cell.is_empty(),
                // The reader of JSON may be off by the last bit.
                Value::Number(number) => cell
                    .parse::<f64>()
                    .is_ok_and(|cell| number.as_f64().is_some_and(|value| (cell - value).abs() <= 1e-15 * value.abs())),
                Value::Bool(flag) => *cell == flag.to_string(),
                other => other.as_str() == Some(cell),
            };
            assert!(same, "{name}: {cell:?} beside {value}");
        }
    }
    for (point, rate) in points.iter().zip([10.0, 20.0]) {
        let counted = |record: &&Value| record["stretch"] == "counted" && record["rate"].as_f64() == Some(rate);
        let met = records.iter().filter(counted).filter(|record| record["outcome"] == "met").count();
        let class = &point["classes"][0];
        assert_eq!(class["met"].as_u64(), Some(met as u64));
        assert_eq!(class["judged"].as_u64(), Some(records.iter().filter(counted).count() as u64));
    }
}

fn svgs(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("it is there").map(|entry| entry.expect("it is there").path());
    entries.filter(|path| path.extension().is_some_and(|end| end == "svg")).collect()
}

/// Nothing is fetched from anywhere, and no script runs.
fn is_self_contained(text: &str) {
    for fetched in [" src=", "<link", "@import", "url(", "<script", "<iframe", "<object"] {
        assert!(!text.contains(fetched), "{fetched}");
    }
    let links = text.match_indices("href=\"").map(|(at, _)| &text[at + 6..]);
    links.for_each(|link| assert!(link.starts_with('#'), "{}", &link[..link.len().min(60)]));
}

/// Elements close in the order in which they were opened, and ampersands stand for something.
fn is_well_formed(text: &str) {
    let mut open: Vec<&str> = Vec::new();
    for part in text.split('<').skip(1) {
        let (tag, _) = part.split_once('>').expect("a tag ends");
        let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap_or_default();
        if tag.starts_with('?') || tag.starts_with('!') || tag.ends_with('/') {
            continue;
        }
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "it closes what is open");
        } else {
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
    for (at, _) in text.match_indices('&') {
        assert!(text[at..].split(';').next().is_some_and(|entity| entity.len() < 8), "an entity ends");
    }
}

#[test]
fn a_replay_against_an_engine_says_yes_or_no_and_keeps_its_records() {
    let (desk, engine) = (Desk::new(), Running::engine(&["--speed", "20"]));
    let url = &engine.url;
    desk.trace("trace.csv", (0..20).map(|number| f64::from(number) * 0.02));
    let yes = desk.ends(&format!("replay @trace.csv --url {url} --e2e 60 --ttft 60 --records @r.jsonl --json"), 0);
    let result: Value = serde_json::from_str(&yes.told).expect("JSON");
    let class = &result["classes"][0];
    assert_eq!(
        (class["requests"].as_u64(), class["met"].as_u64(), &result["complete"]),
        (Some(20), Some(20), &true.into())
    );
    let records: Vec<Value> =
        desk.read("r.jsonl").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let mut lines: Vec<u64> = records.iter().filter_map(|record| record["tag"].as_u64()).collect();
    lines.sort_unstable();
    assert_eq!(lines, (2..=21).collect::<Vec<_>>(), "the lines of the trace");
    assert!(records.iter().all(|record| record["output_tokens"] == 4 && record["outcome"] == "met"), "{records:?}");
    let no = desk.ends(&format!("replay @trace.csv --url {url} --e2e 0.001"), 1);
    assert!(no.told.contains("FAILS"), "{}", no.told);
    desk.ends("replay @trace.csv --url http://127.0.0.1:9 --e2e 60", 3);
    desk.ends(&format!("replay @trace.csv --url {url} --e2e 60 --model other"), 3);
    desk.ends(&format!("replay @nowhere.csv --url {url} --e2e 60"), 2);
    desk.trace("unsorted.csv", [0.0, 0.1, 0.05, 0.2].into_iter());
    let cut = desk.ends(&format!("replay @unsorted.csv --url {url} --e2e 60"), 2);
    assert!(cut.told.contains("PARTIAL") && cut.told.contains("line 4"), "{}", cut.told);
}

#[test]
fn a_replay_that_is_interrupted_or_loses_its_service_keeps_what_it_has() {
    let (desk, mut engine) = (Desk::new(), Running::engine(&["--speed", "20"]));
    desk.trace("long.csv", (0..60_000).map(|number| f64::from(number) * 0.05));
    let line = format!("replay @long.csv --url {} --e2e 60 --json", engine.url);
    let told = |desk: &Desk| serde_json::from_str::<Value>(&desk.read("told")).expect("JSON");
    let mut going = desk.start(&format!("{line} --records @cut.jsonl"));
    has_finished(&engine, 30.0);
    going.interrupt();
    let (code, errors) = going.ended();
    assert_eq!((code, told(&desk)["ended_by"].as_str()), (Some(1), Some("interrupted")), "{errors}");
    assert!(desk.read("cut.jsonl").lines().count() > 0, "its records are there");
    let before = finished(&engine);
    let mut going = desk.start(&line);
    has_finished(&engine, before + 30.0);
    engine.kill();
    let (code, errors) = going.ended();
    let result = told(&desk);
    let why = result["ended_by"].as_str().unwrap_or_default();
    assert_eq!(code, Some(1), "{errors}");
    assert!(why.starts_with("the service stopped answering"), "{why}");
    assert!(result["classes"][0]["missed"]["upstream_unavailable"].as_u64() >= Some(20), "{result}");
    let mut going =
        desk.start("replay @long.csv --simulate --engines 2 --ttft 60 --rate 1000 --records @sim.jsonl --json");
    let records = || std::fs::metadata(desk.path("sim.jsonl")).map_or(0, |file| file.len());
    until("the simulation has begun", || (records() > 0).then_some(()));
    going.interrupt();
    let (code, errors) = going.ended();
    assert_eq!((code, told(&desk)["ended_by"].as_str()), (Some(1), Some("interrupted")), "{errors}");
    assert!(records() > 0);
}

#[test]
fn a_real_engine_is_killed_and_started_again_in_the_middle_of_a_replay() {
    let desk = Desk::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = free.local_addr().expect("it is bound").to_string();
    drop(free);
    desk.trace("trace.csv", (0..120).map(|number| f64::from(number) * 0.05));
    let engine = format!("{} engine --listen {address} --model sim --speed 20", env!("CARGO_BIN_EXE_goodput"));
    let words = "replay @trace.csv --e2e 60 --json --lose left@2s --return left@3s --recovery-window 1s --url";
    let mut words = desk.words(words);
    words.extend([format!("http://{address}"), "--run".to_owned(), format!("left={engine}")]);
    let ended = run(&words.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(ended.code, Some(1), "{}\n{}", ended.told, ended.errors);
    assert!(
        ended.errors.contains("left was killed") && ended.errors.contains("left was started again"),
        "{}",
        ended.errors
    );
    let result: Value = serde_json::from_str(&ended.told).expect("JSON");
    let class = &result["classes"][0];
    let phase = |number: usize| class["phases"][number].clone();
    assert_eq!(phase(0)["attainment"].as_f64(), Some(1.0), "{class}");
    // How soon after its time the engine is killed, and how long it takes to come back, are the machine's matter.
    assert!(phase(1)["attainment"].as_f64() < Some(1.0), "{class}");
    assert!(class["missed"]["upstream_unavailable"].as_u64() > Some(0), "{class}");
    assert_eq!(result["complete"].as_bool(), Some(true));
}

#[test]
fn an_engine_that_runs_elsewhere_is_lost_and_brought_back_by_commands() {
    let (desk, engine) = (Desk::new(), Running::engine(&["--speed", "20"]));
    desk.trace("trace.csv", (0..60).map(|number| f64::from(number) * 0.05));
    let replay = |more: &[&str]| {
        let line = format!("replay @trace.csv --e2e 60 --json --url {} --lose left@0.2s", engine.url);
        let mut words = desk.words(&line);
        words.extend(more.iter().map(|word| (*word).to_owned()));
        let ended = run(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let result: Value = serde_json::from_str(&ended.told).unwrap_or_else(|_| panic!("{}", ended.errors));
        (ended.code, result, ended.errors)
    };
    let back = desk.path("back").display().to_string();
    let (code, result, errors) = replay(&["--lose-by", "left=true", "--return-by", &format!("left=touch {back}")]);
    assert_eq!((code, result["passes"].as_bool()), (Some(0), Some(true)), "{errors}");
    assert!(errors.contains("the command that loses left was started") && desk.path("back").exists(), "{errors}");

    let (code, result, errors) = replay(&["--lose-by", "left=exit 7"]);
    let problem = result["target"]["problems"][0].as_str().unwrap_or_default();
    assert!(code == Some(1) && problem.contains("the command that loses left ended with exit status: 7"), "{errors}");

    let (code, result, errors) = replay(&["--lose-by", &format!("left=kill -9 {}", engine.id())]);
    let class = &result["classes"][0];
    assert!(code == Some(1) && class["missed"]["upstream_unavailable"].as_u64() > Some(0), "{class} {errors}");
    assert_eq!(result["target"]["problems"].as_array().map(Vec::len), Some(0), "{result}");
}

#[test]
fn a_trace_on_standard_input_is_the_same_trace() {
    let desk = Desk::new();
    desk.trace("trace.csv", (0..50).map(f64::from));
    let of = |trace: &str, input: Stdio| {
        let words = desk.words(&format!("replay {trace} --simulate --engines 1 --ttft 1 --json"));
        let done = Command::new(env!("CARGO_BIN_EXE_goodput")).args(words).stdin(input).output().expect("it is ours");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        serde_json::from_slice::<Value>(&done.stdout).expect("JSON")
    };
    let file = || std::fs::File::open(desk.path("trace.csv")).expect("it was written");
    let (named, piped) = (of("@trace.csv", Stdio::null()), of("-", file().into()));
    assert_eq!(piped["trace"]["file"], "standard input");
    assert_eq!((&piped["classes"], &piped["trace"]["format"]), (&named["classes"], &named["trace"]["format"]));
}

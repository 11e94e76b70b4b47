//! Replays of small traces against simulated fleets, as the command line makes them.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::Value;

use super::*;
use crate::cli::command_line::parse;

/// A folder with traces and settings.
struct Desk(tempfile::TempDir);

impl Desk {
    fn new() -> Desk {
        let desk = Desk(tempfile::tempdir().unwrap());
        desk.write("steady.csv", &azure((0..300).map(|number| (number as f64 * 0.1, 200, 20))));
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// The result of a line in which `@name` is a file of the test's folder.
    fn replay(&self, line: &str) -> Result<(String, u8), NotStarted> {
        let words = line.split_whitespace().map(|word| match word.strip_prefix('@') {
            Some(name) => self.path(name).display().to_string(),
            None => word.to_owned(),
        });
        let args = parse::<ReplayArgs>(std::iter::once("replay".to_owned()).chain(words));
        args.map_err(|error| NotStarted::Usage(anyhow::anyhow!("{error}")))?.replay()
    }

    fn json(&self, line: &str) -> (Value, u8) {
        match self.replay(&format!("{line} --json")) {
            Ok((text, code)) => (serde_json::from_str(&text).unwrap(), code),
            Err(NotStarted::Usage(error) | NotStarted::Start(error)) => panic!("{line}: {error:#}"),
        }
    }

    /// The words of a line that replays nothing.
    fn refused(&self, line: &str) -> String {
        match self.replay(line) {
            Err(NotStarted::Usage(error)) => format!("{error:#}"),
            Err(NotStarted::Start(error)) => panic!("{line}: it did not begin: {error:#}"),
            Ok((text, _)) => panic!("{line}: {text}"),
        }
    }
}

/// Requests at these seconds, with these lengths.
fn azure(requests: impl Iterator<Item = (f64, u64, u64)>) -> String {
    let mut text = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
    for (at, input, output) in requests {
        let (minutes, seconds) = ((at / 60.0) as u64, at % 60.0);
        let _ = writeln!(text, "2024-05-10 {:02}:{:02}:{seconds:010.7},{input},{output}", minutes / 60, minutes % 60);
    }
    text
}

/// An engine that a few requests per second keep busy.
const SLOW: &str = r#"{"max_running": 6, "step_tokens": 512, "kv_tokens": 20000, "max_model_len": 4096, "step": {"base_ms": 20,
    "per_request_ms": 0.5, "per_prefill_token_ms": 0.3, "per_context_token_ms": 0, "attention_doubles_at": 1000000}}"#;

const SETTINGS: &str = "
listen: {address: \"127.0.0.1:0\"}
pools:
  - pool: big
    engines: [{url: \"http://a:8000\"}, {url: \"http://b:8000\"}]
  - pool: small
    engines: [{url: \"http://c:8000\"}]
routes:
  - {model: [\"*\"], class: [voice], pools: [small]}
  - {model: [\"*\"], pools: [big]}
slo_classes:
  - slo_class: chat
    objectives: {ttft_seconds: {threshold: 2, attainment: 0.95}, tpot_seconds: {threshold: 0.1, attainment: 0.95}}
    joint_attainment_target: 0.9
  - slo_class: voice
    priority: critical
    objectives: {ttft_seconds: {threshold: 0.5, attainment: 0.95}, tpot_seconds: {threshold: 0.05, attainment: 0.95}}
    joint_attainment_target: 0.95
default_class: chat
";

/// A journal of requests of these classes, one every 100 ms.
fn journal(classes: &[&str]) -> String {
    journal_of(classes, "m", 100)
}

/// A journal of requests for a model, one every `every` milliseconds.
fn journal_of(classes: &[&str], model: &str, every: u64) -> String {
    let mut text =
        "{\"journal\":\"goodput\",\"version\":1,\"hash_key_id\":\"00\",\"hash_key\":\"random\"}\n".to_owned();
    for (number, class) in classes.iter().enumerate() {
        let at = 1_700_000_000_000_000_000_u64 + number as u64 * every * 1_000_000;
        let _ = writeln!(
            text,
            "{{\"arrival_unix_ns\":{at},\"endpoint\":\"/v1/chat/completions\",\"class\":\"{class}\",\"model\":\"{model}\",\
             \"tenant\":\"ab\",\"stream\":true,\"prompt_tokens\":300,\"output_tokens\":30,\"outcome\":\"met\"}}"
        );
    }
    text
}

#[test]
fn a_fleet_that_is_large_enough_passes_and_one_that_is_too_small_does_not() {
    let desk = Desk::new();
    let (passed, code) = desk.json("@steady.csv --simulate --engines 2 --ttft 1 --tpot 0.05");
    assert_eq!((code, &passed["passes"], &passed["complete"]), (0, &Value::Bool(true), &Value::Bool(true)));
    let class = &passed["classes"][0];
    assert_eq!((class["requests"].as_u64(), class["met"].as_u64()), (Some(300), Some(300)));
    assert_eq!((class["input_tokens"].as_u64(), class["output_tokens"].as_u64()), (Some(60_000), Some(6_000)));
    let (failed, code) = desk.json("@steady.csv --simulate --engines 2 --ttft 0.001");
    assert_eq!((code, failed["classes"][0]["missed"]["ttft"].as_u64()), (1, Some(300)), "{failed}");
    let again = desk.json("@steady.csv --simulate --engines 2 --ttft 1 --tpot 0.05").0;
    assert_eq!(again["classes"], passed["classes"], "the same trace gives the same answer");
}

#[test]
fn windows_speed_and_rate_change_what_is_replayed_and_the_result_says_so() {
    let desk = Desk::new();
    let of = |more: &str| {
        let (result, _) = desk.json(&format!("@steady.csv --simulate --engines 1 --ttft 5 {more}"));
        (
            result["classes"][0]["requests"].as_u64().unwrap(),
            result["seconds"].as_f64().unwrap(),
            result["trace"].clone(),
        )
    };
    let (requests, seconds, trace) = of("--from 10 --to 20s");
    assert_eq!((requests, (seconds * 10.0).round()), (100, 99.0));
    assert_eq!((trace["from_seconds"].as_f64(), trace["to_seconds"].as_f64()), (Some(10.0), Some(20.0)));
    let (requests, seconds, _) = of("--speed 2");
    assert!(requests == 300 && (14.9..15.0).contains(&seconds), "{requests} {seconds}");
    let (requests, seconds, _) = of("--rate 2 --slice 5s");
    assert!(requests == 600 && (29.0..30.1).contains(&seconds), "{requests} {seconds}");
    let (requests, seconds, _) = of("--rate 0.5 --slice 5s");
    assert!((145..=156).contains(&requests) && (29.0..30.1).contains(&seconds), "{requests} {seconds}");
    assert!(desk.refused("@steady.csv --simulate --engines 1 --ttft 5 --from 20 --to 10").contains("window"));
    assert!(desk.refused("@steady.csv --simulate --engines 1 --ttft 5 --from 100").contains("no request lies"));
}

#[test]
fn classes_go_to_the_pools_of_their_routes_and_are_judged_by_their_own_objectives() {
    let desk = Desk::new();
    desk.write("goodput.yaml", SETTINGS);
    let classes: Vec<&str> = ["chat", "voice", "chat", "other"].into_iter().cycle().take(200).collect();
    desk.write("journal.jsonl", &journal(&classes));
    let (result, code) = desk.json("@journal.jsonl --simulate -c @goodput.yaml");
    assert_eq!(code, 0, "{result}");
    let told: Vec<(&str, u64)> = result["classes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|class| (class["class"].as_str().unwrap(), class["requests"].as_u64().unwrap()))
        .collect();
    assert_eq!(told, [("chat", 150), ("voice", 50)]);
    assert_eq!(result["trace"]["unknown_class"].as_u64(), Some(50));
    let pools = result["target"]["pools"].as_array().unwrap();
    let pools: Vec<(&str, u64)> =
        pools.iter().map(|pool| (pool["pool"].as_str().unwrap(), pool["engines"].as_u64().unwrap())).collect();
    assert_eq!(pools, [("big", 2), ("small", 1)]);
    let (more, _) = desk.json("@journal.jsonl --simulate -c @goodput.yaml --engines big=7");
    assert_eq!(more["target"]["pools"][0]["engines"].as_u64(), Some(7));
    assert!(desk.refused("@journal.jsonl --simulate -c @goodput.yaml --engines 7").contains("of which pool?"));
    assert!(desk.refused("@journal.jsonl --simulate -c @goodput.yaml --engines huge=7").contains("no such pool"));
    assert!(desk.refused("@journal.jsonl --simulate -c @goodput.yaml --lose 1@5").contains("no such engine"));
    assert!(desk.refused("@journal.jsonl --simulate -c @goodput.yaml --class nobody").contains("does not exist"));
}

/// A class with a second pool to go on to, and a model that only that pool serves.
const ROUTED: &str = "
listen: {address: \"127.0.0.1:0\"}
pools:
  - {pool: first, engines: [{url: \"http://a:8000\"}], max_concurrency_per_engine: 4}
  - {pool: spare, engines: [{url: \"http://b:8000\"}], max_concurrency_per_engine: 4}
routes:
  - {model: [large], pools: [spare]}
  - {model: [small], pools: [first, spare]}
slo_classes:
  - slo_class: chat
    objectives: {ttft_seconds: {threshold: 2, attainment: 0.95}, tpot_seconds: {threshold: 0.1, attainment: 0.95}}
    joint_attainment_target: 0.9
default_class: chat
";

/// Each pool with its requests, and those of them that came on from an earlier pool.
fn served(result: &Value) -> Vec<(String, u64, u64)> {
    let pool = |pool: &Value| {
        let count = |key: &str| pool[key].as_u64().unwrap();
        (pool["pool"].as_str().unwrap().to_owned(), count("requests"), count("from_earlier_pools"))
    };
    result["target"]["pools"].as_array().unwrap().iter().map(pool).collect()
}

fn named(first: (u64, u64), spare: (u64, u64)) -> Vec<(String, u64, u64)> {
    vec![("first".to_owned(), first.0, first.1), ("spare".to_owned(), spare.0, spare.1)]
}

#[test]
fn a_request_goes_on_along_its_route_only_where_its_pool_is_busy_or_lost() {
    let desk = Desk::new();
    desk.write("slow.json", SLOW);
    desk.write("goodput.yaml", ROUTED);
    desk.write("calm.jsonl", &journal_of(&["chat"; 60], "small", 2000));
    desk.write("busy.jsonl", &journal_of(&["chat"; 600], "small", 100));
    let line = "--simulate --engine @slow.json -c @goodput.yaml";
    let (calm, code) = desk.json(&format!("@calm.jsonl {line}"));
    assert_eq!((served(&calm), code), (named((60, 0), (0, 0)), 0), "{calm}");

    let (busy, _) = desk.json(&format!("@busy.jsonl {line}"));
    let pools = served(&busy);
    assert_eq!(pools[0].1 + pools[1].1, 600, "{busy}");
    assert!(pools[0].1 > 200 && pools[1].2 > 200 && pools[1].1 == pools[1].2, "{pools:?}");
    desk.write("goodput.yaml", &ROUTED.replace("pools: [first, spare]", "pools: [first]"));
    let (alone, _) = desk.json(&format!("@busy.jsonl {line}"));
    let met = |result: &Value| result["classes"][0]["met"].as_u64().unwrap();
    assert!(met(&busy) > 2 * met(&alone), "{} {}", met(&busy), met(&alone));
}

#[test]
fn while_a_pool_is_lost_its_requests_are_served_by_the_next_one() {
    let desk = Desk::new();
    desk.write("slow.json", SLOW);
    desk.write("goodput.yaml", ROUTED);
    desk.write("calm.jsonl", &journal_of(&["chat"; 60], "small", 2000));
    let line = "@calm.jsonl --simulate --engine @slow.json -c @goodput.yaml --lose first/1@41s --return first/1@81s";
    let (lost, _) = desk.json(line);
    let pools = served(&lost);
    assert!((19..=23).contains(&pools[1].2) && pools[0].1 + pools[1].1 == 60, "{pools:?}");
    assert!(lost["classes"][0]["met"].as_u64() >= Some(59), "{lost}");
    assert_eq!(desk.json(line).0["classes"], lost["classes"], "the same trace gives the same answer");
}

#[test]
fn a_model_takes_the_route_that_serves_it() {
    let desk = Desk::new();
    desk.write("slow.json", SLOW);
    desk.write("goodput.yaml", ROUTED);
    let of = |model: &str| {
        desk.write("journal.jsonl", &journal_of(&["chat"; 20], model, 2000));
        let (result, _) = desk.json("@journal.jsonl --simulate --engine @slow.json -c @goodput.yaml");
        (served(&result), result["trace"]["unknown_model"].as_u64().unwrap())
    };
    assert_eq!(of("large"), (named((0, 0), (20, 0)), 0));
    assert_eq!(of("small"), (named((20, 0), (0, 0)), 0));
    assert_eq!(of("other"), (named((0, 0), (20, 0)), 20), "it takes the first route of its class");
}

#[test]
fn engines_that_are_lost_show_before_during_and_after() {
    let desk = Desk::new();
    desk.write("long.csv", &azure((0..3000).map(|number| (number as f64 * 0.1, 400, 40))));
    let line = "@long.csv --simulate --engines 4 --ttft 0.3 --tpot 0.05 --target 0.9 --lose 1-3@100s --return 1-3@2m30s \
                --recovery-window 10s --engine @slow.json";
    desk.write("slow.json", SLOW);
    let (result, code) = desk.json(line);
    let class = &result["classes"][0];
    let phases: Vec<(u64, f64)> = class["phases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|phase| (phase["judged"].as_u64().unwrap(), phase["attainment"].as_f64().unwrap()))
        .collect();
    assert_eq!(phases.iter().map(|(judged, _)| judged).sum::<u64>(), 3000);
    assert!(phases[0].1 > 0.99 && phases[1].1 < 0.5 && phases[2].1 > 0.9, "{phases:?}");
    let recovered = class["recovery"]["seconds"].as_f64().unwrap();
    assert!((40.0..80.0).contains(&recovered), "soon after they are back: {recovered}");
    assert_eq!((code, result["losses"].as_array().unwrap().len()), (1, 2));
    let (text, _) = desk.replay(line).ok().unwrap();
    assert!(text.contains("lose 1-3@100s, return 1-3@150s") && text.contains("recovered after"), "{text}");
    assert!(desk.refused("@long.csv --simulate --engines 4 --ttft 1 --lose 5@1").contains("fleet/1 to 4"));
    assert!(
        desk.refused("@long.csv --simulate --engines 4 --ttft 1 --lose 1@5 --return 1@4").contains("--return 1@4s")
    );
}

#[test]
fn a_bad_trace_is_told_of_with_its_line_and_what_came_before_it_is_kept() {
    let desk = Desk::new();
    let head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    let fleet = "--simulate --engines 1 --ttft 5";
    for (text, expected) in [
        ("", "no requests"),
        (head, "no requests"),
        ("a,b\n1,2\n", "no format that is known"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,1\n", "line 2: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,-5,1\n", "line 2: ContextTokens"),
        ("{\"timestamp\": 0, \"input_length\": 5, \"output", "cut off"),
    ] {
        desk.write("bad.txt", text);
        let said = desk.refused(&format!("@bad.txt {fleet}"));
        assert!(said.contains(expected), "{text:?}: {said}");
    }
    assert!(desk.refused(&format!("@nowhere.csv {fleet}")).contains("cannot open"));
    let unsorted = azure([(0.0, 10, 2), (5.0, 10, 2), (4.0, 10, 2), (6.0, 10, 2)].into_iter());
    desk.write("unsorted.csv", &unsorted);
    let (result, code) = desk.json(&format!("@unsorted.csv {fleet} --records @kept.jsonl"));
    assert_eq!(
        (code, &result["complete"], result["classes"][0]["requests"].as_u64()),
        (2, &Value::Bool(false), Some(2))
    );
    let why = result["ended_by"].as_str().unwrap();
    assert!(why.contains("line 4") && why.contains("sort the trace"), "{why}");
    let kept = std::fs::read_to_string(desk.path("kept.jsonl")).unwrap();
    let lines: Vec<u64> =
        kept.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["tag"].as_u64().unwrap()).collect();
    assert_eq!(lines, [2, 3], "the lines of the trace");
    let (text, _) = desk.replay(&format!("@unsorted.csv {fleet}")).ok().unwrap();
    assert!(text.contains("PARTIAL: the trace cannot be read on"), "{text}");
}

#[test]
fn a_compressed_trace_is_the_same_trace() {
    use std::io::Write as _;
    let desk = Desk::new();
    let plain = std::fs::read(desk.path("steady.csv")).unwrap();
    let file = std::fs::File::create(desk.path("steady.csv.gz")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    gzip.finish().unwrap();
    std::fs::write(desk.path("steady.csv.zst"), zstd::encode_all(&plain[..], 1).unwrap()).unwrap();
    let of = |name: &str| desk.json(&format!("@{name} --simulate --engines 1 --ttft 1")).0["classes"].clone();
    assert_eq!((of("steady.csv.gz"), of("steady.csv.zst")), (of("steady.csv"), of("steady.csv")));
    let cut = std::fs::read(desk.path("steady.csv.gz")).unwrap();
    std::fs::write(desk.path("cut.gz"), &cut[..cut.len() / 2]).unwrap();
    let said = match desk.replay("@cut.gz --simulate --engines 1 --ttft 1") {
        Ok((text, code)) => format!("{code} {text}"),
        Err(NotStarted::Usage(error) | NotStarted::Start(error)) => format!("2 {error:#}"),
    };
    assert!(said.starts_with('2') && said.contains("cannot be read"), "{said}");
}

#[test]
fn a_line_that_does_not_fit_together_says_what_is_missing() {
    let desk = Desk::new();
    for (line, expected) in [
        ("@steady.csv --ttft 1", "against what?"),
        ("@steady.csv --simulate --ttft 1", "how many engines has pool fleet?"),
        ("@steady.csv --simulate --engines 1", "no objectives"),
        ("@steady.csv --simulate --engines 0 --ttft 1", "from 1 to 100,000"),
        ("@steady.csv --simulate --engines 1 --ttft 1 --engine @steady.csv", "describes no engine"),
        ("@steady.csv --url http://a --simulate --ttft 1", "cannot be used with"),
        ("@steady.csv --url http://a --ttft 1 --lose 1@5", "--run NAME=COMMAND"),
        ("@steady.csv --url http://a --ttft 1 --lose a@5 --lose-by b=true", "no --lose-by has this name"),
        (
            "@steady.csv --url http://a --ttft 1 --lose a@5 --return a@6 --lose-by a=true",
            "no --return-by brings it back",
        ),
        (
            "@steady.csv --url http://a --ttft 1 --lose a@5 --lose-by a=true --return-by b=true",
            "no --lose-by has this name",
        ),
        ("@steady.csv --url http://a --ttft 1 --lose a@5 --lose-by a", "write NAME=COMMAND"),
        ("@steady.csv --url http://a --ttft 1 --lose a@5 --lose-by a=true --run a=true", "another engine of this name"),
        ("@steady.csv --url http://a --ttft 1 --tenant-keys @keys", "those of -c FILE"),
        ("@steady.csv --simulate --engines 1 --ttft 1 --return 1@5", "--lose"),
        ("", "required"),
        ("--calibrate @nowhere", "name the folder of a sweep"),
    ] {
        let said = desk.refused(line);
        assert!(said.contains(expected), "{line}: {said}");
    }
}

/// The page of a small replay. `took` is real time and is cut out.
#[test]
fn the_page_is_as_it_was() {
    let desk = Desk::new();
    desk.write("goodput.yaml", SETTINGS);
    let classes: Vec<&str> = ["chat", "chat", "voice"].into_iter().cycle().take(1200).collect();
    desk.write("journal.jsonl", &journal(&classes));
    desk.write("slow.json", SLOW);
    let line = "@journal.jsonl --simulate -c @goodput.yaml --engine @slow.json --recovery-window 10s";
    let (text, _) = desk.replay(&format!("{line} --lose big/1-2@30 --return big/1-2@1m")).ok().unwrap();
    let folder = desk.0.path().display().to_string();
    let took = text.split("simulated in ").nth(1).and_then(|rest| rest.split(':').next()).unwrap();
    let text = text.replace(&format!("{folder}/"), "").replace(took, "0.1 s");
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cli/replay/golden.txt");
    assert_eq!(text, std::fs::read_to_string(golden).unwrap());
}

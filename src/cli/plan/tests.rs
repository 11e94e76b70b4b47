//! The whole command: flags and files to a page.

use std::path::PathBuf;

use super::*;
use crate::capacity::FleetVerdict;
use crate::cli::command_line;

fn args(flags: &str) -> PlanArgs {
    command_line::parse(std::iter::once("plan").chain(flags.split_whitespace())).unwrap()
}

/// The worked example of docs/capacity.md.
const EXAMPLE: &str = "--class chat --peak 30 --input-tokens 1200 --output-tokens 400 --ttft-seconds 0.5 \
    --tpot-seconds 0.035 --goodput 8 --target 0.92 --headroom 0.7 --spare 1";

fn made(flags: &str) -> CapacityPlan {
    args(flags).plan().unwrap_or_else(|problem| panic!("{flags}: {:?}", told(&problem)))
}

fn told(problem: &NoPlan) -> Vec<String> {
    match problem {
        NoPlan::Unreadable(error) => vec![format!("{error:#}")],
        NoPlan::Problems(problems) => problems.iter().map(ToString::to_string).collect(),
    }
}

fn problems(flags: &str) -> Vec<String> {
    told(&args(flags).plan().expect_err("no plan can be made of this"))
}

/// Files of a test in a temporary folder.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    fn with(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

#[test]
fn the_worked_example_reads_as_the_document_shows_it() {
    let document = include_str!("../../../docs/capacity.md");
    let args = args(&format!("{EXAMPLE} --current-replicas 6 --gpus-per-replica 2 --gpu-hour 2.5"));
    let plan = args.plan().unwrap_or_else(|problem| panic!("{:?}", told(&problem)));
    assert_eq!((plan.size.for_peak, plan.size.total), (6, 7));
    let page = args.told(&plan);
    for line in page.lines().take_while(|line| !line.starts_with("When to measure anew")) {
        assert!(document.contains(line), "docs/capacity.md does not show: {line}\nThe whole page:\n{page}");
    }
    assert!(page.contains("435 requests") && page.contains("609,000 tokens"), "{page}");
    assert!(page.contains("the measured sweep decides"), "{page}");
}

#[test]
fn the_file_in_the_document_can_be_read_and_its_keys_have_their_rows() {
    let document = include_str!("../../../docs/capacity.md");
    let example = document.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
    let raw: RawPlan = serde_yaml::from_str(example).unwrap();
    assert_eq!(raw.classes.len(), 2);
    let help = command_line::long_help::<PlanArgs>();
    for key in [
        "headroom",
        "spare",
        "burst",
        "current_replicas",
        "gpu_hour",
        "currency",
        "gpus_per_replica",
        "tensor_parallel",
        "slots_per_replica",
        "model",
        "kv_precision",
        "kv_bytes_per_token",
        "kv_tokens_per_replica",
        "gpu_memory_gib",
        "memory_utilization",
        "weights_gib",
    ] {
        assert!(document.contains(&format!("`{key}`")), "{key}");
        assert!(help.contains(&format!("--{}", key.replace('_', "-"))), "{key}");
    }
}

#[test]
fn the_exit_code_reports_a_fleet_that_is_too_small() {
    let short = |current: u32| made(&format!("{EXAMPLE} --current-replicas {current}")).is_short();
    assert_eq!([5, 6, 7, 8].map(short), [true, true, false, false]);
    assert!(!made(EXAMPLE).is_short());
    let page = |current: u32| args("").told(&made(&format!("{EXAMPLE} --current-replicas {current}")));
    assert!(page(6).contains("SHORT: the fleet of today carries the peak only as long as nothing fails; 1 replica"));
    assert!(page(4).contains("SHORT: the fleet of today does not carry the peak; 3 replicas missing"));
}

#[test]
fn json_and_markdown_say_the_same_and_rules_are_rules() {
    let json = args(&format!("{EXAMPLE} --json"));
    let whole: serde_json::Value = serde_json::from_str(&json.told(&json.plan().ok().unwrap())).unwrap();
    assert_eq!((&whole["size"]["total"], &whole["short"]), (&7.into(), &false.into()));
    assert_eq!(whole["classes"][0]["sensitivity"][0]["name"], "as planned");
    assert_eq!(whole["verdict"]["verdict"], "unknown");
    let markdown = args(&format!("{EXAMPLE} --markdown"));
    let page = markdown.told(&markdown.plan().ok().unwrap());
    assert!(page.contains("\n## Class chat\n") && page.contains("| peak | 30 requests/s | forecast |"), "{page}");
    let rules = args(&format!("{EXAMPLE} --rules"));
    assert!(rules.told(&rules.plan().ok().unwrap()).contains("- alert: GoodputBaselinePeak"));
}

#[test]
fn a_file_is_equivalent_to_flags_and_flags_take_precedence() {
    let files = Files::new();
    files.with(
        "config.json",
        r#"{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "torch_dtype": "bfloat16"}"#,
    );
    let file = files.with(
        "plan.yaml",
        "
headroom: 0.7
model: config.json
gpu_memory_gib: 80
weights_gib: 16
gpu_hour: 2.5
classes:
  - class: chat
    peak_rate: 30
    input_tokens: {mean: 1200, p50: 900, p95: 6000}
    output_tokens: 400
    ttft_seconds: 0.5
    tpot_seconds: 0.035
    goodput: 8
    target: 0.92
    prefill: {seconds: 0.1}
    cache: {hit_rate: 0.4, hit_rate_p10: 0.2, prefill_share: 0.3}
  - class: voice
    priority: critical
    peak_rate: 4
    input_tokens: {p50: 300, p95: 900}
    output_tokens: 60
    ttft_seconds: 0.2
    tpot_seconds: 0.03
    goodput: 12
    target: 0.95
",
    );
    let plan = made(&format!("{} --class voice --peak 6", file.display()));
    assert_eq!(plan.classes[0].live_kv_tokens.round(), 609_000.0);
    assert_eq!((plan.classes[1].peak_rate, plan.classes[1].input_tokens.round()), (6.0, 375.0));
    let kv = plan.classes[0].kv;
    assert_eq!((kv.bytes_per_token, kv.fits), (Some(131_072.0), Some(true)));
    assert!((kv.usage.unwrap() - 609_000.0 * 131_072.0 / (6.0 * (72.0 - 16.0) * 1024f64.powi(3))).abs() < 1e-9);
    let page = args("").told(&plan);
    for part in ["Separate pools or one", "M/G/1", "3.78", "GiB", "cache hit rate at its 10th percentile", "Cobham"] {
        assert!(page.contains(part), "{part} in {page}");
    }
    assert!(problems(&format!("{} --peak 6", file.display()))[0].contains("--class"));
    assert!(problems(&format!("{} --class batch", file.display()))[0].contains("no class batch"));
}

#[test]
fn a_sweep_and_the_settings_fill_in_missing_values() {
    let files = Files::new();
    let sweep = files.with("summary.json", r#"{"goodput": 8, "ttft": 0.5, "tpot": 0.035, "target": 0.9}"#);
    let settings = files.with(
        "goodput.yaml",
        "
slo_classes:
  - slo_class: chat
    objectives: {ttft_seconds: {threshold: 1.2, attainment: 0.95}, tpot_seconds: {threshold: 0.05, attainment: 0.95}}
    joint_attainment_target: 0.92
    workload_assumption: {input_tokens: {p50: 900, p95: 6000}, output_tokens: {p50: 350, p95: 1500}}
default_class: chat
pools: [{pool: main, engines: [{url: 'http://127.0.0.1:8000'}]}]
routes: [{model: ['*'], pools: [main]}]
",
    );
    let flags = format!("--sweep {} --config {} --peak 30 --class", sweep.display(), settings.display());
    let plan = made(&format!("{flags} chat"));
    let chat = &plan.classes[0];
    assert_eq!((chat.goodput, chat.target, chat.ttft), (8.0, 0.9, 0.5), "the sweep goes before the settings");
    assert_eq!(chat.input_tokens.round(), 1750.0);
    assert_eq!(plan.verdict, FleetVerdict::Unknown);
    assert!(problems(&format!("{flags} voice"))[0].contains("no class voice"));
}

#[test]
fn missing_and_invalid_values_are_reported_once_with_advice() {
    let missing = problems("--class chat --goodput 8 --target 0.92");
    for place in ["peak_rate", "input_tokens", "output_tokens", "ttft_seconds", "tpot_seconds"] {
        let told: Vec<_> = missing.iter().filter(|line| line.starts_with(&format!("classes[0].{place}: "))).collect();
        assert_eq!(told.len(), 1, "{missing:?}");
        assert!(told[0].contains("missing; give "), "{told:?}");
    }
    assert_eq!(missing.len(), 5, "{missing:?}");
    assert!(problems(&format!("{EXAMPLE} --burst nan"))[0].starts_with("burst: NaN is not"));
    assert!(problems(&format!("{EXAMPLE} --gpu-memory-gib 80"))[0].starts_with("weights_gib: missing"));
    assert!(problems(&format!("{EXAMPLE} --gpu-memory-gib 80 --weights-gib 160"))[0].contains("leave no room"));
    assert!(problems(&format!("{EXAMPLE} --kv-precision fp8"))[0].contains("no use without `model`"));
    for (from, to, told) in [
        ("--peak 30", "--peak=-3", "-3 is not a positive number"),
        ("--target 0.92", "--target 92", "92 is not above 0 and at most 1"),
        ("--headroom 0.7", "--headroom 1.5", "1.5 is not above 0 and at most 1"),
        ("--input-tokens 1200", "--input-tokens p50=900", "give both percentiles"),
        ("--input-tokens 1200", "--input-tokens p50=900,p95=20", "fit no lognormal law"),
    ] {
        let found = problems(&EXAMPLE.replace(from, to));
        assert!(found.len() == 1 && found[0].contains(told), "{to}: {found:?}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let files = Files::new();
    let gone = files.0.path().join("gone.yaml");
    assert!(problems(&gone.display().to_string())[0].starts_with(&gone.display().to_string()));
    let odd = files.with("odd.yaml", "peek: 3\n");
    let told = problems(&odd.display().to_string());
    assert!(told[0].contains("odd.yaml") && told[0].contains("peek"), "{told:?}");
    let model = files.with("config.json", "{}");
    let told = problems(&format!("{EXAMPLE} --model {}", model.display()));
    assert!(told[0].starts_with("model: num_hidden_layers is missing"), "{told:?}");
    let sweep = files.with("summary.json", r#"{"goodput": null, "reason": "noise"}"#);
    let told = problems(&format!("{} --sweep {}", EXAMPLE.replace("--goodput 8", ""), sweep.display()));
    assert!(told[0].contains("summary.json") && told[0].ends_with("noise"), "{told:?}");
}

#[test]
fn lengths_are_written_as_means_or_percentiles() {
    assert_eq!(RawLength::parse("1200"), Ok(RawLength::Mean(1200.0)));
    let law = RawLaw { mean: Some(1100.0), p50: Some(900.0), p95: Some(6000.0) };
    assert_eq!(RawLength::parse("mean=1100,p50=900,p95=6000"), Ok(RawLength::Law(law)));
    for bad in ["", "p50", "p99=3", "p50=many"] {
        assert!(RawLength::parse(bad).is_err(), "{bad}");
    }
}

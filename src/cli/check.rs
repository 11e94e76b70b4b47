//! `goodput check`: validates a settings file and explains how a request would be handled.
//!
//! Exit codes: 0 no problem, the sample request (if any) would go to an engine, and the engines (if probed)
//! are usable; 1 the file has problems, the request would be rejected, an engine is unusable, or no engine
//! lists a model of the routes; 2 a file cannot be read.

mod explain;
mod probed;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::json;

use super::print;
use crate::config::watch::{LoadError, SettingsFile};
use crate::config::{Problem, Settings};
use explain::{Explanation, Sample};
use probed::Probed;

/// Checks a settings file, and explains how a sample request would be classified and routed.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// The settings file.
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Request body to explain; `-` reads it from stdin.
    #[arg(long, value_name = "FILE")]
    request: Option<PathBuf>,
    /// Path of the request.
    #[arg(long, default_value = "/v1/chat/completions", requires = "request")]
    path: String,
    /// Header of the request; may be repeated. The tenant comes from its key.
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = given, requires = "request")]
    headers: Vec<HeaderArg>,
    /// Probe every engine: connection, kind, version, listed models, acceptance of the pool's key.
    #[arg(long)]
    probe: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A header, or the error in it.
type HeaderArg = Result<(HeaderName, HeaderValue), String>;

/// Never fails, because the parser's message would show the whole text, which may be a secret.
fn given(text: &str) -> Result<HeaderArg, std::convert::Infallible> {
    Ok(header(text))
}

/// Parses `name=value` or `name: value`. No message shows the value, which may be a secret.
fn header(text: &str) -> HeaderArg {
    let (name, value) = text.split_once(['=', ':']).ok_or("write a header as name=value")?;
    let name = HeaderName::try_from(name.trim()).map_err(|_| "the part before = is not a header name")?;
    let mut value = HeaderValue::try_from(value.trim()).map_err(|_| "the value cannot stand in a header")?;
    value.set_sensitive(true);
    Ok((name, value))
}

impl CheckArgs {
    /// Checks, and prints the result.
    #[must_use]
    pub fn run(&self) -> ExitCode {
        match self.outcome() {
            Ok((text, good)) => {
                let code = if good { ExitCode::SUCCESS } else { ExitCode::FAILURE };
                print::last(text.trim_end_matches('\n'), code)
            }
            Err(error) if self.json => {
                let file = self.config.display().to_string();
                let told = json!({"file": file, "good": false, "problems": [], "error": format!("{error:#}")});
                print::last(&told.to_string(), ExitCode::from(2))
            }
            Err(error) => {
                eprintln!("goodput check: {error:#}");
                ExitCode::from(2)
            }
        }
    }

    /// Returns the output, and whether everything is in order.
    ///
    /// # Errors A file cannot be read.
    fn outcome(&self) -> anyhow::Result<(String, bool)> {
        let settings = match SettingsFile::file(&self.config).read() {
            Ok(settings) => settings,
            Err(LoadError::Problems(problems)) => return Ok((self.told_problems(&problems), false)),
            Err(why @ (LoadError::Unreadable(_) | LoadError::Unusable(_))) => {
                anyhow::bail!(why.lines(&self.config).join("\n"));
            }
        };
        let explanation = match &self.request {
            Some(file) => Some(explain::explain(&settings, &self.sample(file)?)),
            None => None,
        };
        let probed = match self.probe {
            true => Some(Probed::of(&settings)?),
            false => None,
        };
        let good = explanation.as_ref().is_none_or(|explanation| explanation.refused.is_none())
            && probed.as_ref().is_none_or(Probed::is_good);
        Ok((self.told(&settings, explanation.as_ref(), probed.as_ref()), good))
    }

    fn sample(&self, file: &Path) -> anyhow::Result<Sample> {
        let mut body = Vec::new();
        let read = if file.as_os_str() == "-" {
            std::io::stdin().read_to_end(&mut body).map(drop)
        } else {
            std::fs::read(file).map(|bytes| body = bytes)
        };
        read.with_context(|| file.display().to_string())?;
        let mut headers = HeaderMap::new();
        for given in &self.headers {
            let (name, value) = given.clone().map_err(anyhow::Error::msg)?;
            headers.append(name, value);
        }
        Ok(Sample { path: self.path.clone(), headers, body })
    }

    fn told_problems(&self, problems: &[Problem]) -> String {
        let file = self.config.display();
        if self.json {
            let list: Vec<_> = problems.iter().map(in_json).collect();
            return lines(&[json!({"file": file.to_string(), "good": false, "problems": list}).to_string()]);
        }
        let mut told: Vec<String> = problems.iter().map(|problem| format!("{file}:{problem}")).collect();
        let many = if problems.len() == 1 { "problem" } else { "problems" };
        told.push(format!("{} {many}", problems.len()));
        lines(&told)
    }

    fn told(&self, settings: &Settings, explanation: Option<&Explanation>, probed: Option<&Probed>) -> String {
        let file = self.config.display();
        if self.json {
            let notes: Vec<_> = settings.notes.iter().map(in_json).collect();
            let mut answer = json!({"file": file.to_string(), "good": true, "problems": [], "notes": notes});
            if let Some(explanation) = explanation {
                answer["request"] = explanation.to_json();
            }
            if let Some(probed) = probed {
                answer["engines"] = probed.to_json();
                answer["unlisted_models"] = probed.unlisted.iter().map(|missing| json!(&*missing.model)).collect();
            }
            return lines(&[answer.to_string()]);
        }
        let mut told: Vec<String> = settings.notes.iter().map(|note| format!("{file}:{note} (a note)")).collect();
        let counts = [(settings.classes.len(), "class", "classes"), (settings.pools.len(), "pool", "pools")];
        let counts = counts.map(|(n, one, many)| format!("{n} {}", if n == 1 { one } else { many }));
        told.push(format!("{file}: no problem ({})", counts.join(", ")));
        if let Some(explanation) = explanation {
            told.push(String::new());
            told.extend(explanation.to_lines());
        }
        if let Some(probed) = probed {
            told.push(String::new());
            told.extend(probed.to_lines());
        }
        lines(&told)
    }
}

fn in_json(problem: &Problem) -> serde_json::Value {
    json!({
        "path": &*problem.path,
        "line": problem.line,
        "column": problem.column,
        "message": problem.message,
        "way_out": problem.way_out,
    })
}

fn lines(all: &[String]) -> String {
    all.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command_line::parse;

    const BODY: &str = r#"{"model":"gpt-4o","stream":true,"messages":[{"role":"user","content":"CANARY4"}]}"#;

    /// A folder with settings and a body.
    fn desk(settings: &str) -> tempfile::TempDir {
        let desk = tempfile::tempdir().unwrap();
        std::fs::write(desk.path().join("g.yaml"), settings).unwrap();
        std::fs::write(desk.path().join("body.json"), BODY).unwrap();
        desk
    }

    fn settings() -> String {
        let hash = blake3::hash(b"sk-CANARY1").to_hex();
        format!(
            "slo_classes:\n\
             \x20 - slo_class: chat\n    objectives: {{ttft_seconds: {{threshold: 1.2, attainment: 0.95}}}}\n    joint_attainment_target: 0.9\n    target_headers: tighten\n    priority: high\n    queue: {{max_wait: 2s}}\n    degrade: [{{action: shed_lower, enter_when: {{burn_rate_above: 2}}}}, {{action: {{cap_output: 200}}, enter_when: {{burn_rate_above: 4}}}}]\n\
             \x20 - {{slo_class: batch, priority: batch, joint_attainment_target: 0.9}}\n\
             default_class: chat\n\
             classify:\n  - {{class: batch, when: {{header: {{x-job: {{present: true}}}}}}}}\n  - {{class: batch, when: {{stream: false, has_tools: true}}}}\n\
             pools: [{{pool: fast, max_concurrency_per_engine: 8, engines: [{{url: http://e:1}}]}}, {{pool: slow, engines: [{{url: http://f:1}}]}}]\n\
             routes: [{{model: llama-*, pools: [fast, slow]}}]\n\
             models: {{aliases: {{gpt-4o: llama-3}}}}\n\
             tenants: [{{tenant: acme, limits: {{requests_per_minute: 600, requests_burst: 5, models: {{llama-3: {{tokens_per_minute: 9000}}}}}}, keys: [{{label: prod, blake3: \"{hash}\"}}]}}]\n"
        )
    }

    fn check(desk: &tempfile::TempDir, more: &[&str]) -> anyhow::Result<(String, bool)> {
        let place = |name: &str| desk.path().join(name).display().to_string();
        let mut line = vec!["check".to_owned(), "-c".to_owned(), place("g.yaml")];
        line.extend(more.iter().map(|word| if word.ends_with(".json") { place(word) } else { (*word).to_owned() }));
        let check: CheckArgs = parse(line).unwrap();
        let outcome = check.outcome();
        outcome.map(|(text, good)| (text.replace(&format!("{}/", desk.path().display()), ""), good))
    }

    const KEY: &str = "authorization=Bearer sk-CANARY1";

    #[test]
    fn a_valid_file_has_no_problem() {
        let (text, good) = check(&desk(&settings()), &[]).unwrap();
        assert_eq!((text.as_str(), good), ("g.yaml: no problem (2 classes, 2 pools)\n", true));
    }

    #[test]
    fn every_problem_is_printed_with_its_place() {
        let (text, good) = check(&desk("slo_classes: []\ndefault_class: x\n"), &[]).unwrap();
        assert!(!good);
        let expected = "g.yaml:1:1: `pools` is missing; add `pools`\n\
                        g.yaml:1:14: slo_classes: is an empty list; add at least one\n\
                        2 problems\n";
        assert_eq!(text, expected);
        let (text, _) = check(&desk("slo_classes: []\ndefault_class: x\n"), &["--json"]).unwrap();
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["good"], false);
        assert_eq!(answer["problems"][1]["path"], "slo_classes");
        assert_eq!(answer["problems"][1]["line"], 1);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        let desk = desk(&settings());
        let told = |path: &str| {
            let check: CheckArgs = parse(["check", "-c", path]).unwrap();
            check.outcome().unwrap_err().to_string()
        };
        assert_eq!(told("/nowhere/g.yaml"), "/nowhere/g.yaml: there is no such file; give the path of a settings file");
        let path = desk.path().display().to_string();
        assert_eq!(told(&path), format!("{path}: this is a directory; give the path of the settings file in it"));
        let path = desk.path().join("bytes").display().to_string();
        std::fs::write(&path, b"\xff\xfe").unwrap();
        assert_eq!(told(&path), format!("{path}: this is not UTF-8; save it as UTF-8 text"));
        assert!(check(&desk, &["--request", "nobody.json"]).is_err());
    }

    #[test]
    fn a_sample_request_is_explained() {
        let desk = desk(&settings());
        let more = ["--request", "body.json", "--header", KEY, "--header", "x-slo-ttft-ms=500"];
        let (text, good) = check(&desk, &more).unwrap();
        assert!(good);
        let expected = "\
g.yaml: no problem (2 classes, 2 pools)

request    POST /v1/chat/completions, 81 bytes, a stream
tenant     acme (key prod)
model      gpt-4o, an alias of llama-3; in metrics: llama-3
prompt     about 2 tokens: short
rule 1     batch: no, header.x-job differs
rule 2     batch: no, stream and has_tools differ
class      chat (default)
promise    TTFT at most 0.5s, 90% all together within 28d
priority   high
limits     600 requests a minute, 5 at once; 9000 tokens for llama-3 a minute, 9000 at once; beyond that: rejected
reserves   about 2 tokens of prompt, 1024 of output (assumed: no cap is stated): 1 of 5 requests_per_minute, 1026 of 9000 tokens_per_minute of the model
pools      fast, then slow
queue      at most 2s; once its promise cannot be kept: behind the others of its priority
overload   shed_lower, then cap_output: 200
";
        assert_eq!(text, expected);
        assert!(!text.contains("CANARY"));
        let (text, _) = check(&desk, &[&more[..], &["--json"]].concat()).unwrap();
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        let request = &answer["request"];
        assert_eq!(request["tenant"], "acme");
        assert_eq!(request["class"], "chat");
        assert_eq!(request["rule"], "default");
        assert_eq!(request["priority"], "high");
        assert_eq!(request["limits"][2], "beyond that: rejected");
        assert_eq!(request["pools"], json!(["fast", "slow"]));
        assert_eq!(request["rules"][1]["differs"], json!(["stream", "has_tools"]));
        assert!(!text.contains("CANARY"));
    }

    #[test]
    fn check_uses_the_gateways_own_limiter() {
        let text = settings().replace("requests_burst: 5,", "requests_burst: 1, concurrent_requests: 1,");
        let desk = desk(&text.replace("requests_per_minute: 600", "requests_per_minute: 1"));
        let body = |rest: &str| {
            let body = format!(r#"{{"model":"llama-3","messages":[{{"role":"user","content":"hello"}}],{rest}}}"#);
            std::fs::write(desk.path().join("body.json"), body).unwrap();
        };
        let asked = || check(&desk, &["--request", "body.json", "--header", KEY]).unwrap();
        body(r#""max_tokens":300,"n":2"#);
        let (text, good) = asked();
        let reserves = "about 2 tokens of prompt, 600 of output (its own cap): 1 of 1 requests_per_minute, \
                        1 of 1 concurrent_requests, 602 of 9000 tokens_per_minute of the model";
        assert!(good && text.contains(reserves), "{text}");
        assert!(text.contains("1 request a minute, 1 at once; 1 request at one time;"), "{text}");
        // The assumed output is clipped to the bucket; a stated one is not.
        body(r#""n":20"#);
        assert!(asked().0.contains("20480 of output (assumed: no cap is stated)"), "{}", asked().0);
        assert!(asked().0.contains("9000 of 9000 tokens_per_minute"), "{}", asked().0);
        body(r#""max_tokens":9000"#);
        let (text, good) = asked();
        assert!(!good && text.contains("400 request_exceeds_limit: This request may need 9002"), "{text}");
        let (text, _) = check(&desk, &["--request", "body.json", "--header", KEY, "--json"]).unwrap();
        assert!(text.contains(r#""code":"request_exceeds_limit""#) && text.contains(r#""reserves":null"#), "{text}");
        body(r#""max_tokens":10"#);
        let (text, _) = check(&desk, &["--request", "body.json", "--header", KEY, "--json"]).unwrap();
        let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
        let reserves = &answer["request"]["reserves"];
        assert_eq!((&reserves["output_tokens"], &reserves["output_is_stated"]), (&json!(10), &json!(true)));
        let of_model = json!({"limit": "tokens_per_minute", "scope": "model", "takes": 12, "most": 9000});
        assert_eq!(reserves["of"][2], of_model);
    }

    #[test]
    fn a_request_that_would_be_refused_is_a_no() {
        let desk = desk(&settings());
        let refused = |more: &[&str]| {
            let (text, good) = check(&desk, &[&["--request", "body.json", "--json"], more].concat()).unwrap();
            assert!(!good);
            assert!(!text.contains("CANARY"), "{text}");
            let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
            (answer["request"]["refused"]["status"].clone(), answer["request"]["refused"]["code"].clone())
        };
        assert_eq!(refused(&[]), (json!(401), json!("missing_key")));
        assert_eq!(refused(&["--header", "x-api-key=sk-CANARY2"]), (json!(401), json!("unknown_key")));
        assert_eq!(refused(&["--header", KEY, "--header", "x-api-key=b"]), (json!(401), json!("two_keys")));
        assert_eq!(refused(&["--header", KEY, "--path", "/v2/x"]), (json!(404), json!("unknown_path")));
        assert_eq!(refused(&["--header", KEY, "--path", "/health"]), (json!(405), json!("method_not_allowed")));
        std::fs::write(desk.path().join("body.json"), r#"{"model":"mistral"}"#).unwrap();
        assert_eq!(refused(&["--header", KEY]), (json!(404), json!("model_not_found")));
        std::fs::write(desk.path().join("body.json"), r#"{"messages":[]}"#).unwrap();
        assert_eq!(refused(&["--header", KEY]), (json!(404), json!("model_missing")));
        std::fs::write(desk.path().join("body.json"), r#"{"model":"a","model":"b"}"#).unwrap();
        assert_eq!(refused(&["--header", KEY]), (json!(400), json!("unreadable_body")));
        std::fs::write(desk.path().join("body.json"), r#"{"model":"llama-1","background":true}"#).unwrap();
        assert_eq!(refused(&["--header", KEY, "--path", "/v1/responses"]), (json!(400), json!("background_refused")));
    }

    #[test]
    fn check_reads_bodies_and_forms_like_the_gateway() {
        let desk = desk(&settings());
        let form = "--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nllama-3\r\n--b--\r\n";
        std::fs::write(desk.path().join("body.json"), form).unwrap();
        let kind = "content-type=multipart/form-data; boundary=b";
        let asked = |path: &str, kind: &str| {
            let line = ["--request", "body.json", "--json", "--header", KEY, "--path", path, "--header", kind];
            let answer: serde_json::Value = serde_json::from_str(&check(&desk, &line).unwrap().0).unwrap();
            (answer["request"]["model"].clone(), answer["request"]["refused"]["code"].clone())
        };
        let audio = "/v1/audio/transcriptions";
        assert_eq!(asked(audio, kind), (json!("llama-3"), json!(null)));
        assert_eq!(asked("/v1/chat/completions", kind), (json!(null), json!("unreadable_body")));
        assert_eq!(asked("/v1/audio/speech", kind), (json!(null), json!("unreadable_body")));
        assert_eq!(asked(audio, "content-type=multipart/form-data"), (json!(null), json!("unreadable_form")));
        std::fs::write(desk.path().join("body.json"), form.replace("llama-3", "gpt-4o")).unwrap();
        assert_eq!(asked(audio, kind), (json!("gpt-4o"), json!("alias_in_form")));
        std::fs::write(desk.path().join("body.json"), zstd::encode_all(BODY.as_bytes(), 1).unwrap()).unwrap();
        assert_eq!(asked("/v1/chat/completions", "content-encoding=zstd"), (json!("gpt-4o"), json!(null)));
        assert_eq!(asked("/v1/chat/completions", "content-encoding=br"), (json!(null), json!("unsupported_coding")));
    }

    #[test]
    fn a_header_needs_its_value() {
        assert!(header("x-a=b=c").is_ok_and(|(_, value)| value == "b=c"));
        assert!(header("x-a").is_err());
        assert!(header("a b=c").is_err());
    }
}

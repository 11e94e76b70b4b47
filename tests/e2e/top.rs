//! `goodput top` and `goodput health -c` beside a running gateway.

use serde_json::Value;

use crate::gateway::{Gateway, Setup, settings};
use crate::running::{Running, authority, post, run};

const TOKEN: &str = "a-token-of-the-test";
const BODY: &str = r#"{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":3,"stream":true}"#;

#[test]
fn top_and_health_ask_a_running_gateway() {
    let engine = Running::engine(&["--speed", "10"]);
    let setup = Setup {
        engines: &[&engine],
        admin: "token_file: admin.token",
        files: &[("admin.token", TOKEN)],
        pool: "max_concurrency_per_engine: 8",
        ..Setup::default()
    };
    let gateway = Gateway::start(&setup);
    for class in ["", "", "x-slo-class: strict\r\n"] {
        let answer = post(&gateway.running.url, "/v1/chat/completions", class, BODY);
        assert!(answer.is_ok_and(|answer| answer.contains("[DONE]")));
    }
    let folder = tempfile::tempdir().expect("a folder for the settings");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("the folder is ours");
        path.display().to_string()
    };
    let token = file("admin.token", TOKEN);
    let admin = format!("admin: {{address: \"{}\"", authority(&gateway.admin));
    let named = file("goodput.yaml", &settings(&setup).replace("admin: {address: \"127.0.0.1:0\"", &admin));

    let told = run(&["top", "--once", "--json", "--admin", &gateway.admin, "--token-file", &token]);
    assert_eq!(told.code, Some(0), "{}", told.errors);
    let status: Value = serde_json::from_str(&told.told).expect("one JSON object");
    let of =
        |class: &str| status["classes"].as_array().unwrap().iter().find(|one| one["class"] == class).unwrap().clone();
    assert_eq!((&of("chat")["met"], &of("strict")["total"]), (&2.into(), &1.into()), "{status}");
    assert_eq!(status["pools"][0]["engines"][0]["last_hour"]["judged"], 3, "{status}");
    assert_eq!(status["misses"][0]["reason"], "ttft", "{status}");

    let table = run(&["top", "--once", "-c", &named]);
    assert_eq!(table.code, Some(0), "{}", table.errors);
    for words in ["ready", "chat", "strict", "0.0 %!", "0/8 seats", engine.address()] {
        assert!(table.told.contains(words), "{words}: {}", table.told);
    }

    let refused = run(&["top", "--once", "--admin", &gateway.admin]);
    assert!(refused.code == Some(1) && refused.errors.contains("--token-file"), "{}", refused.errors);
    let nobody = run(&["top", "--once", "--admin", "http://127.0.0.1:1"]);
    assert!(nobody.code == Some(1) && nobody.errors.contains("cannot connect"), "{}", nobody.errors);

    let well = run(&["health", "-c", &named]);
    assert_eq!((well.code, well.told.trim()), (Some(0), "200 OK"), "{}", well.errors);
    let unnamed = run(&["health", "-c", &file("any.yaml", &settings(&setup))]);
    assert!(unnamed.code == Some(2) && unnamed.errors.contains("give the URL"), "{}", unnamed.errors);
}

//! An operator sets an overload level of a running gateway, and hands it back.

use serde_json::Value;

use crate::gateway::{Gateway, Setup, sum_where};
use crate::processes::{CHAT, stream_of};
use crate::running::{Running, ask, post};

const LEVELS: &str = "degrade: [{action: {cap_output: 3}, enter_when: {queue_wait_above: 1h}}]";

fn degrade(gateway: &Gateway, headers: &str, body: &str) -> Result<String, String> {
    post(&gateway.admin, "/-/degrade", headers, body)
}

#[test]
fn a_level_can_be_set_only_with_the_token() {
    let engine = Running::engine(&["--speed", "4"]);
    let engines = [&engine];
    let wish = r#"{"class": "chat", "level": 1}"#;
    let open = Gateway::start(&Setup { engines: &engines, chat: LEVELS, ..Setup::default() });
    let told = degrade(&open, "", wish).unwrap_err();
    assert!(told.starts_with("HTTP/1.1 403") && told.contains("admin.token_file"), "{told}");
    drop(open);

    let files = [("admin.token", "t0k3n")];
    let admin = "token_file: admin.token";
    let gateway = Gateway::start(&Setup { engines: &engines, chat: LEVELS, admin, files: &files, ..Setup::default() });
    let told = degrade(&gateway, "authorization: Bearer other\r\n", wish).unwrap_err();
    assert!(told.starts_with("HTTP/1.1 401"), "{told}");
    let bearer = "authorization: Bearer t0k3n\r\n";
    let told = degrade(&gateway, bearer, wish).unwrap();
    assert!(told.contains(r#""level":1"#) && told.contains(r#""forced":true"#), "{told}");

    // Ten tokens are asked for, three come.
    let answer = post(&gateway.running.url, CHAT, "", &stream_of(10)).unwrap();
    let contents = answer.split(r#""content":""#).skip(1).filter_map(|rest| rest.split('"').next());
    let words: usize = contents.map(|text| text.split_whitespace().count()).sum();
    assert!((1..=3).contains(&words) && answer.contains(r#""finish_reason":"length""#), "{answer}");
    let look = |path: &str| {
        ask(&gateway.admin, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{bearer}\r\n"))
            .unwrap()
    };
    let page = look("/metrics");
    assert_eq!(sum_where(&page, "goodput_degrade_level", "class=\"chat\""), 1.0, "{page}");
    assert_eq!(sum_where(&page, "goodput_degraded_total", "action=\"cap_output\""), 1.0, "{page}");
    let slo = look("/slo");
    let standing: Value = serde_json::from_str(slo.trim()).unwrap_or_else(|error| panic!("{error}: {slo}"));
    assert_eq!(standing["classes"][0]["degradation"]["actions"][0], "cap_output", "{slo}");

    let told = degrade(&gateway, bearer, r#"{"class": "chat", "level": 1, "for_seconds": 3600}"#).unwrap();
    assert!(told.contains(r#""forced_for_seconds":3600"#), "{told}");
    let told = degrade(&gateway, bearer, r#"{"class": "chat", "level": "auto"}"#).unwrap();
    assert!(told.contains(r#""forced":false"#), "{told}");
}

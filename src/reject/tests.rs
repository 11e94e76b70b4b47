use std::collections::BTreeSet;

use serde_json::Value;

use super::*;

const DIALECTS: [Dialect; 5] =
    [Dialect::Chat, Dialect::Completions, Dialect::Responses, Dialect::Messages, Dialect::Plain];

fn id() -> RequestId {
    RequestId::from("req-\"1\"\n")
}

fn body_of(refusal: &Rejection, shape: Dialect) -> Value {
    serde_json::from_slice(&refusal.body(shape, &id())).unwrap()
}

/// The name and the data of an event, which must be whole.
fn event_of(refusal: &Rejection, dialect: Dialect, last: Option<u64>) -> (Option<String>, Value) {
    let event = refusal.event(dialect, &id(), last);
    let text = std::str::from_utf8(&event).unwrap();
    let lines: Vec<&str> = text.strip_suffix("\n\n").expect("a blank line ends it").split('\n').collect();
    let (data, names) = lines.split_last().unwrap();
    let name = names.first().map(|line| line.strip_prefix("event: ").unwrap().to_owned());
    assert!(names.len() <= 1, "{text}");
    (name, serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap())
}

#[test]
fn every_code_is_unique_snake_case_and_in_the_documentation_with_status_and_outcome() {
    let documented = include_str!("../../docs/errors.md");
    let samples = Rejection::samples();
    assert_eq!(samples.len(), Rejection::CODES.len());
    for (refusal, code) in samples.iter().zip(Rejection::CODES) {
        assert_eq!(refusal.code(), *code);
        assert!(code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{code}");
        let row = format!("| `{code}` | {} | {} |", refusal.status().as_u16(), refusal.outcome());
        assert!(documented.contains(&row), "docs/errors.md lacks: {row}");
    }
    let rows = documented.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(rows, Rejection::CODES.len(), "docs/errors.md lists a code that does not exist");
    assert_eq!(Rejection::CODES.iter().collect::<BTreeSet<_>>().len(), Rejection::CODES.len());
}

#[test]
fn a_code_is_the_name_of_its_refusal() {
    for refusal in Rejection::samples() {
        let name: String = format!("{refusal:?}").chars().take_while(|c| c.is_alphanumeric()).collect();
        let snake = name.chars().enumerate().fold(String::new(), |text, (i, c)| {
            let split = if c.is_uppercase() && i > 0 { "_" } else { "" };
            text + split + &c.to_lowercase().to_string()
        });
        assert_eq!(refusal.code(), snake);
    }
}

#[test]
fn every_body_has_its_dialects_shape_code_and_request_id() {
    for refusal in Rejection::samples() {
        for shape in DIALECTS {
            let body = body_of(&refusal, shape);
            let error = &body["error"];
            assert_eq!(error["code"], refusal.code());
            assert_eq!(error["message"], refusal.message().as_ref());
            assert!(error["type"].as_str().is_some_and(|kind| kind.ends_with("_error") || kind == "request_too_large"));
            if shape == Dialect::Messages {
                assert_eq!((&body["type"], &body["request_id"]), (&Value::from("error"), &Value::from(id().as_str())));
            } else {
                assert!(error.as_object().unwrap().contains_key("param"));
                assert_eq!(error["request_id"], id().as_str());
            }
        }
    }
}

#[test]
fn every_event_is_one_event_in_its_dialects_shape() {
    for refusal in Rejection::samples() {
        for dialect in [Dialect::Chat, Dialect::Completions, Dialect::Plain] {
            let (name, data) = event_of(&refusal, dialect, Some(4));
            assert_eq!((name, &data["error"]["code"]), (None, &Value::from(refusal.code())));
        }
        let (name, data) = event_of(&refusal, Dialect::Messages, Some(4));
        assert_eq!((name.as_deref(), &data["type"]), (Some("error"), &Value::from("error")));
        assert_eq!(data["error"]["message"], refusal.message().as_ref());
        let (name, data) = event_of(&refusal, Dialect::Responses, Some(4));
        assert_eq!((name.as_deref(), &data["type"]), (Some("error"), &Value::from("error")));
        assert_eq!((&data["sequence_number"], &data["param"]), (&Value::from(5), &Value::Null));
        assert_eq!((&data["code"], &data["message"]), (&refusal.code().into(), &refusal.message().as_ref().into()));
    }
    assert_eq!(event_of(&Rejection::Internal, Dialect::Responses, None).1["sequence_number"], 0);
}

#[test]
fn c09_an_incomplete_stream_is_an_upstream_error() {
    let (_, data) = event_of(&Rejection::StreamIncomplete, Dialect::Chat, None);
    assert_eq!(
        (&data["error"]["type"], &data["error"]["code"]),
        (&"upstream_error".into(), &"stream_incomplete".into())
    );
}

#[test]
fn clients_learn_nothing_about_our_insides() {
    for refusal in Rejection::samples() {
        let told = refusal.message();
        for inside in ["pool", "upstream", "replica", "http://", "127.0.0.1", "panic"] {
            assert!(!told.contains(inside), "{told}");
        }
        // Two sentences at least: what happened, what to do next.
        assert!(told.matches(['.', ';']).count() >= 2, "{told}");
        assert!(!refusal.to_string().is_empty());
    }
}

#[test]
fn an_unreadable_body_names_the_field_and_never_quotes_the_body() {
    let why = Unreadable::Repeated { field: "model" };
    let body = body_of(&Rejection::UnreadableBody { why }, Dialect::Chat);
    assert_eq!(body["error"]["param"], "model");
    assert!(body["error"]["message"].as_str().unwrap().contains("stands twice"));
}

#[test]
fn misses_are_server_errors_and_exclusions_are_client_errors() {
    for refusal in Rejection::samples() {
        // The client of a loop is the gateway itself, for which it is a fault of its engine.
        let judged = refusal.outcome().is_judged() || refusal == Rejection::LoopDetected;
        assert_eq!(judged, refusal.status().is_server_error(), "{refusal:?}");
        assert_eq!(!judged, refusal.status().is_client_error(), "{refusal:?}");
    }
}

#[test]
fn retry_after_is_sent_only_if_true() {
    for refusal in Rejection::samples() {
        // The samples' numbers: where nobody can know, there is none.
        let known = match refusal {
            Rejection::Draining => Some(1),
            Rejection::RateLimitExceeded { .. } => Some(5),
            Rejection::QueueFull { .. }
            | Rejection::PushedOut { .. }
            | Rejection::QueueTimeout { .. }
            | Rejection::Hopeless { .. }
            | Rejection::OverloadShed { .. } => Some(3),
            _ => None,
        };
        assert_eq!(refusal.retry_after(), known, "{refusal:?}");
        // Where the rest of the request was not read, no second one can follow it.
        let is_cut_off = matches!(
            refusal,
            Rejection::BadHead { .. }
                | Rejection::BodyTooLarge { .. }
                | Rejection::DecodedTooLarge { .. }
                | Rejection::BodyTimeout { .. }
                | Rejection::BodyBroken
        );
        assert_eq!(refusal.closes(), is_cut_off || refusal == Rejection::Draining, "{refusal:?}");
        let is_method = matches!(refusal, Rejection::MethodNotAllowed { .. });
        assert_eq!(refusal.allow().is_some(), is_method);
    }
}

#[test]
fn c32_a_rate_limit_has_the_type_that_clients_look_for() {
    let refusal = Rejection::samples().into_iter().find(|refusal| refusal.limit().is_some()).expect("a sample");
    let error = &body_of(&refusal, Dialect::Chat)["error"];
    assert_eq!((&error["type"], &error["code"]), (&"rate_limit_error".into(), &"rate_limit_exceeded".into()));
    assert_eq!(body_of(&refusal, Dialect::Messages)["error"]["type"], "rate_limit_error");
    assert!(refusal.message().contains("tokens_per_minute") && refusal.message().contains("in 5 s"));
}

#[test]
fn a_rate_limit_message_has_rate_burst_and_advice() {
    let told = |limit, per_minute, most| {
        let limit_status = LimitStatus { limit, per_minute, most, ..TOKENS_USED_UP };
        Rejection::RateLimitExceeded { limit_status, retry_after: Some(5) }.message().into_owned()
    };
    for (limit, per_minute, most, message) in [
        (
            LimitKind::Requests,
            60,
            3,
            "requests_per_minute is used up (60 a minute, 3 at once, 0 left). Try again in 5 s.",
        ),
        (LimitKind::Requests, 60, 60, "requests_per_minute is used up (60 a minute, 0 left). Try again in 5 s."),
        (
            LimitKind::Tokens,
            600,
            600,
            "tokens_per_minute is used up (600 a minute, 0 left). Try again in 5 s, or ask for fewer tokens.",
        ),
        (
            LimitKind::InputTokens,
            600,
            100,
            "input_tokens_per_minute is used up (600 a minute, 100 at once, 0 left). Try again in 5 s, or shorten the prompt.",
        ),
        (
            LimitKind::OutputTokens,
            600,
            600,
            "output_tokens_per_minute is used up (600 a minute, 0 left). Try again in 5 s, or lower the output cap.",
        ),
    ] {
        assert_eq!(told(limit, Some(per_minute), most), format!("Your limit {message}"));
    }
}

#[test]
fn retry_after_is_omitted_if_unknown() {
    let pool = PoolId::from("chat");
    let limit_status = LimitStatus { limit: LimitKind::ConcurrentRequests, reset: None, ..TOKENS_USED_UP };
    for refusal in [
        Rejection::QueueFull { pool: pool.clone(), retry_after: None },
        Rejection::QueueTimeout { pool, retry_after: None },
        Rejection::RateLimitExceeded { limit_status, retry_after: None },
    ] {
        assert_eq!(refusal.retry_after(), None);
        assert!(!refusal.message().contains("again in"), "{}", refusal.message());
    }
}

#[test]
fn c35_a_request_that_can_never_fit_names_limit_and_need() {
    let limit_status =
        Rejection::RequestExceedsLimit { limit: LimitKind::Tokens, scope: LimitScope::Model, need: 5000, most: 1000 };
    let told = limit_status.message();
    assert!(told.contains("5000") && told.contains("1000") && told.contains("tokens_per_minute for this model"));
    assert_eq!((limit_status.status().as_u16(), limit_status.retry_after()), (400, None));
}

#[test]
fn limits_are_reported_in_seconds() {
    let told = |millis| Rejection::IdleTimeout { limit: Duration::from_millis(millis) }.message().into_owned();
    assert!(told(30_000).contains(" 30 s "));
    assert!(told(300).contains(" 0.300 s "));
}

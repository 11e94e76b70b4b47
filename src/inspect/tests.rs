//! Compares the scanner with a second parser of the same bodies, `serde_json`.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::types::{ApiPath, Dialect};

fn endpoint(path: &str) -> ApiPath {
    ApiPath::relayed(path).unwrap()
}

fn read_in(path: &str, pieces: &[&[u8]]) -> Result<Facts, Unreadable> {
    let mut scanner = Scanner::new(endpoint(path));
    for piece in pieces {
        scanner.push(piece)?;
    }
    scanner.finish().map(|facts| *facts)
}

#[test]
fn without_hashes_everything_else_is_the_same() {
    let text = "a\\nb \\u00e9 \\ud800 ".repeat(100);
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}],"tools":[{{"type":"function","function":{{
            "name":"f","parameters":{{"type":"object"}}}}}}],"prompt":[[1,2],[3]],"n":2}}"#
    );
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let all = read_in(path, &[body.as_bytes()]).unwrap();
        assert!(all.prefix_hash != 0 && !all.prefix_blocks().is_empty());
        for (head, blocks) in [(true, false), (false, true), (false, false)] {
            let mut scanner = Scanner::new(endpoint(path));
            scanner.hash_only(PromptHashes { head, blocks });
            scanner.push(body.as_bytes()).unwrap();
            let mut expected = all.clone();
            expected.prefix_hash *= u64::from(head);
            expected.prefix_blocks.retain(|_| blocks);
            assert_eq!(*scanner.finish().unwrap(), expected);
        }
    }
}

fn chat(body: impl AsRef<[u8]>) -> Result<Facts, Unreadable> {
    read_in("/v1/chat/completions", &[body.as_ref()])
}

fn completion(body: &str) -> Facts {
    read_in("/v1/completions", &[body.as_bytes()]).unwrap()
}

#[test]
fn a_plain_chat_request_is_read_completely() {
    let body = r#"{"model":"m1","messages":[{"role":"system","content":"be nice"},{"role":"user","content":"héllo"}],
        "stream":true,"stream_options":{"include_usage":false,"x":1},"max_tokens":64,"max_completion_tokens":null,
        "n":2,"user":"u","tools":[{"type":"function","function":{"name":"f"}}],"reasoning_effort":"minimal",
        "metadata":{"tier":"gold","n":3,"job":"nightly"}}"#;
    let facts = chat(body).unwrap();
    let text = |range: &std::ops::Range<usize>| &body[range.clone()];
    let model = facts.model.as_ref().unwrap();
    assert_eq!((&*model.value, text(&model.at)), ("m1", "\"m1\""));
    assert_eq!(text(&facts.stream.as_ref().unwrap().at), "true");
    let options = facts.stream_options.as_ref().unwrap();
    assert_eq!(text(&options.at), r#"{"include_usage":false,"x":1}"#);
    assert_eq!(text(&options.include_usage.as_ref().unwrap().at), "false");
    assert!(!options.is_null && !options.is_empty && options.continuous_usage_stats.is_none());
    assert_eq!(text(&facts.caps.max_tokens.as_ref().unwrap().at), "64");
    assert_eq!(facts.caps.largest(), Some(crate::types::Tokens(64)));
    assert_eq!(
        facts.caps.open.iter().map(|(n, r)| (*n, text(r))).collect::<Vec<_>>(),
        [("max_completion_tokens", "null")]
    );
    assert_eq!((facts.n, facts.prompts, facts.choices()), (2, 1, 2));
    assert!(facts.streams() && facts.has_tools && facts.readable && !facts.steers);
    assert_eq!(facts.reasoning, Some(Reasoning::Low));
    let tools = r#"[{"type":"function","function":{"name":"f"}}]"#.len();
    assert_eq!(facts.prompt, PromptSize { bytes: (7 + 6 + tools) as u64, is_known: true, ..PromptSize::default() });
    assert_eq!(facts.metadata, [("tier".to_owned(), "gold".to_owned()), ("job".to_owned(), "nightly".to_owned())]);
    assert_eq!((facts.members_at, facts.members, facts.is_empty, facts.length), (1, 11, false, body.len()));
}

#[test]
fn an_empty_object_is_marked_as_empty() {
    let facts = chat(" {} ").unwrap();
    assert!(facts.is_empty && facts.members == 0 && facts.model.is_none() && facts.readable);
    assert_eq!((facts.members_at, facts.prefix_hash, facts.n), (2, 0, 1));
}

#[test]
fn decisive_fields_stand_once_however_they_are_spelled() {
    for (body, field) in [
        (r#"{"model":"a","model":"b"}"#, "model"),
        (r#"{"model":"a","mod\u0065l":"b"}"#, "model"),
        (r#"{"\u006dodel":"a","model":null}"#, "model"),
        (r#"{"priority":5,"x":1,"priority":-100}"#, "priority"),
        (r#"{"stream":true,"str\u0065am":false}"#, "stream"),
        (r#"{"n":1,"n":1}"#, "n"),
        (r#"{"max_tokens":1,"max_tokens":100000}"#, "max_tokens"),
        (r#"{"user":"a","user":"b"}"#, "user"),
        (r#"{"background":false,"background":true}"#, "background"),
        (r#"{"metadata":{},"metadata":{"tier":"gold"}}"#, "metadata"),
        (r#"{"reasoning_effort":"none","reasoning_effort":"high"}"#, "reasoning_effort"),
        (r#"{"stream_options":{},"stream_options":null}"#, "stream_options"),
        (r#"{"stream_options":{"include_usage":true,"includ\u0065_usage":false}}"#, "stream_options.include_usage"),
        (
            r#"{"stream_options":{"continuous_usage_stats":null,"a":{},"continuous_usage_stats":true}}"#,
            "stream_options.continuous_usage_stats",
        ),
    ] {
        assert_eq!(chat(body), Err(Unreadable::Repeated { field }), "{body}");
    }
}

#[test]
fn repeated_fields_that_decide_nothing_are_accepted() {
    for body in [
        r#"{"model":"a","temperature":1,"temperature":2,"messages":[],"messages":[]}"#,
        r#"{"model":"a","messages":[{"model":"b","model":"c","priority":1,"priority":2}]}"#,
        r#"{"model":"a","model\ud800":"b","modeL\ud800":"c","model ":"d","Temperature":1}"#,
        r#"{"model":"a","extra":{"stream":"x","stream":1}}"#,
    ] {
        let facts = chat(body).unwrap();
        assert_eq!(&*facts.model.unwrap().value, "a", "{body}");
        assert!(facts.readable && facts.priority.is_none());
    }
}

const CAP: &str = "a whole number, zero or more, or -1 for no cap";

#[test]
fn decisive_fields_have_their_json_type() {
    let wrong = [
        ("model", "a string", ["1", "true", "[\"m\"]", "{\"a\":1}"]),
        ("stream", "true or false", ["\"true\"", "1", "[]", "{}"]),
        ("stream_options", "an object", ["true", "1", "[]", "\"x\""]),
        ("max_tokens", CAP, ["-2", "1.5", "\"5\"", "-1e1"]),
        ("max_completion_tokens", CAP, ["true", "5.01", "[5]", "-99999999999999999999999"]),
        ("max_output_tokens", CAP, ["{}", "1e-400", "-1e2", "\"\""]),
        ("n_predict", CAP, ["{}", "-2", "0.5", "\"1\""]),
        ("max_new_tokens", CAP, ["[]", "-2.0", "0.5", "\"1\""]),
        ("n", "a whole number, zero or more", ["\"2\"", "-1", "2.5", "[]"]),
        ("priority", "a whole number", ["\"1\"", "1.5", "true", "[1]"]),
        ("user", "a string", ["1", "false", "[]", "{}"]),
        ("background", "true or false", ["\"true\"", "0", "[]", "{}"]),
    ];
    for (field, expected, values) in wrong {
        for value in values {
            let found = chat(format!("{{\"a\":1,\"{field}\":{value}}}"));
            assert_eq!(found, Err(Unreadable::WrongType { field, expected }), "{field}: {value}");
        }
        assert!(chat(format!("{{\"{field}\":null}}")).unwrap().readable);
    }
    for value in ["\"true\"", "1", "[true]", "{}"] {
        let body = format!("{{\"stream_options\":{{\"include_usage\":{value}}}}}");
        let field = "stream_options.include_usage";
        assert_eq!(chat(body), Err(Unreadable::WrongType { field, expected: "true or false" }));
    }
}

#[test]
fn a_field_of_another_dialect_decides_nothing() {
    let facts = read_in("/v1/messages", &[br#"{"model":"m","n":"x","echo":3}"#]).unwrap();
    assert_eq!((facts.n, facts.echo), (1, false));
    assert!(chat(r#"{"echo":1,"best_of":"x"}"#).is_ok());
    assert!(read_in("/v1/completions", &[br#"{"best_of":"x"}"#]).is_err());
}

#[test]
fn whatever_is_no_object_is_refused_at_its_first_byte() {
    for body in ["[]", "1", "\"a\"", "null", "true", " [1"] {
        assert_eq!(chat(body), Err(Unreadable::NotAnObject), "{body}");
    }
    let deep = "[".repeat(200_000);
    assert_eq!(chat(deep), Err(Unreadable::NotAnObject));
    for body in ["", "  ", "{", "{\"model\":\"m\"", "{} {}", "{'model':1}", "{\"a\":NaN}", "\u{feff}{}"] {
        assert!(matches!(chat(body), Err(Unreadable::Grammar { .. })), "{body}");
    }
}

/// C63: what a strict parser refuses and engines may accept is relayed.
#[test]
fn c63_numbers_depth_and_surrogates_beyond_range_are_read_around() {
    let deep = format!("{}1{}", "[".repeat(50_000), "]".repeat(50_000));
    let digits = "9".repeat(900_000);
    for odd in ["\"\\ud83d\"", "1e400", "-0", &digits, &deep] {
        let facts = chat(format!("{{\"messages\":[{{\"content\":{odd}}}],\"seed\":{odd},\"model\":\"m\"}}")).unwrap();
        assert_eq!(&*facts.model.unwrap().value, "m");
        assert!(facts.readable);
    }
}

#[test]
fn a_decisive_field_that_cannot_be_read_leads_to_the_default_class() {
    let huge = "9".repeat(30);
    for body in [
        r#"{"model":"\ud800"}"#.to_owned(),
        format!("{{\"model\":\"m\",\"max_tokens\":{huge}}}"),
        r#"{"model":"m","user":"\udfff"}"#.to_owned(),
        r#"{"model":"m","reasoning_effort":"\ud83d"}"#.to_owned(),
        format!("{{\"model\":\"{}\"}}", "m".repeat(2000)),
    ] {
        assert!(!chat(&body).unwrap().readable, "{body}");
    }
    let facts = chat(format!("{{\"max_tokens\":{huge},\"priority\":-{huge}}}")).unwrap();
    assert!(facts.priority.is_some());
}

#[test]
fn a_cap_beyond_all_numbers_is_the_largest_there_is() {
    for cap in ["18446744073709551616".to_owned(), format!("1{}", "0".repeat(30)), "9".repeat(1000)] {
        let facts = chat(format!("{{\"max_tokens\":{cap},\"max_completion_tokens\":7}}")).unwrap();
        assert_eq!((facts.caps.largest(), facts.caps.open.len()), (Some(crate::types::Tokens(u64::MAX)), 0));
        assert!(!facts.readable);
    }
}

/// C94: the state kept per prompt, choice or switch is bounded.
#[test]
fn c94_more_prompts_choices_and_switches_than_are_kept_are_refused() {
    let completion = |body: String| read_in("/v1/completions", &[body.as_bytes()]);
    let too_many = |read: Result<Facts, Unreadable>| match read {
        Err(Unreadable::TooMany { what, most }) => format!("{most} {}", what.split(' ').next().unwrap()),
        other => panic!("{other:?}"),
    };
    let list = |item: &str, count: usize| vec![item; count].join(",");
    for echo in [true, false] {
        for item in ["\"\"", "[]", "[1]", "\"\\u0061\""] {
            let of = |count| completion(format!("{{\"echo\":{echo},\"prompt\":[{}]}}", list(item, count)));
            assert_eq!(of(2048).unwrap().prompts, 2048);
            assert_eq!(too_many(of(2049)), "2048 prompts");
            assert_eq!(too_many(of(100_000)), "2048 prompts");
        }
    }
    assert_eq!(completion("{\"n\":2,\"prompt\":[\"\",\"\"]}".to_owned()).unwrap().choices(), 4);
    assert_eq!(completion(format!("{{\"n\":2,\"prompt\":[{}]}}", list("\"\"", 1024))).unwrap().choices(), 2048);
    assert_eq!(too_many(completion(format!("{{\"prompt\":[{}],\"n\":2}}", list("\"\"", 1025)))), "2048 choices");
    assert_eq!(chat("{\"n\":2048}").unwrap().choices(), 2048);
    let most = u64::MAX.to_string();
    for n in ["2049", &most, "18446744073709551616", &"9".repeat(1000)] {
        assert_eq!(too_many(chat(format!("{{\"n\":{n}}}"))), "2048 choices");
    }
    for (switches, what) in [
        ("{\"chat_template_kwargs\":{%}}", "\"thinking\":true"),
        ("{\"chat_template_kwargs\":{%}}", "\"enable_thinking\":1"),
        ("{\"chat_template_kwargs\":{%}}", "\"thinking\":\"x\""),
        ("{\"reasoning\":{%}}", "\"effort\":\"low\""),
        ("{\"reasoning\":{%}}", "\"effort\":null"),
        ("{\"reasoning\":{%}}", "\"effort\":1"),
        ("{\"metadata\":{%}}", "\"k\":\"v\""),
    ] {
        let of = |count| chat(switches.replace('%', &list(what, count)));
        assert!(of(64).is_ok(), "{what}");
        assert!(too_many(of(65)).starts_with("64 "), "{what}");
        assert!(of(64).unwrap().held() < 16 << 10, "{what}");
    }
    let others = list("\"x\":{\"y\":[true,null]}", 10_000);
    for unknown in ["chat_template_kwargs", "reasoning", "metadata", "messages", "stream_options", "nvext", "z"] {
        let body = format!("{{\"{unknown}\":{{{others}}}}}");
        assert_eq!(chat(body).unwrap().held(), 0, "{unknown}: what nobody looks at is not kept");
    }
}

/// C94: the scanner's memory is counted while it reads.
#[test]
fn c94_a_scanners_memory_is_counted_while_it_reads() {
    let mut scanner = Scanner::new(endpoint("/v1/completions"));
    scanner.push(b"{\"prompt\":[\"").unwrap();
    assert_eq!(scanner.held(), 0);
    scanner.push(&[b'x'; 100_000]).unwrap();
    assert!((100_000..300_000).contains(&scanner.held()), "{}", scanner.held());
    scanner.push(b"\"],\"deep\":").unwrap();
    let before = scanner.held();
    scanner.push(&[b'['; 640_000]).unwrap();
    assert!((80_000..200_000).contains(&(scanner.held() - before)), "a bit for each of the open lists");
    let echoed = completion(&format!("{{\"echo\":true,\"prompt\":[\"{}\",\"\"]}}", "x".repeat(100_000)));
    assert!((100_000..200_000).contains(&echoed.held_for_answer()), "{}", echoed.held_for_answer());
}

#[test]
fn cutting_the_priority_out_leaves_the_rest() {
    for (body, left) in [
        (r#"{"priority":1}"#, "{}"),
        (r#"{ "priority" : -1 }"#, "{  }"),
        (r#"{"priority":1,"a":2}"#, r#"{"a":2}"#),
        (r#"{"a":2,"priority":1}"#, r#"{"a":2}"#),
        (r#"{"a":2 , "priority":1 , "b":[3]}"#, r#"{"a":2 , "b":[3]}"#),
        (r#"{"a":{"priority":9},"priority":null,"b":3}"#, r#"{"a":{"priority":9},"b":3}"#),
        (r#"{"priority":0 , "b":"x","c":1}"#, r#"{"b":"x","c":1}"#),
    ] {
        let cut = chat(body).unwrap().priority.unwrap();
        assert_eq!(format!("{}{}", &body[..cut.start], &body[cut.end..]), left);
    }
}

#[test]
fn only_text_read_by_the_model_counts_as_prompt() {
    let bytes = |path: &str, body: &str| read_in(path, &[body.as_bytes()]).unwrap().prompt.bytes;
    let parts = r#"{"messages":[{"role":"user","name":"nobody","content":[{"type":"text","text":"12345"},
        {"type":"image_url","image_url":{"url":"data:image/png;base64,AAAAAAAAAA"}},
        {"type":"input_audio","input_audio":{"data":"AAAAAAAA","format":"wav"}},
        {"type":"file","file":{"file_data":"AAAAA","filename":"x"}}]},
        {"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}]}"#;
    let strings = ["nobody", "12345", "f", "{}"];
    assert_eq!(bytes("/v1/chat/completions", parts), strings.concat().len() as u64);
    let messages = r#"{"system":[{"type":"text","text":"abc"}],"messages":[{"role":"user","content":[
        {"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"defg"}]},
        {"type":"image","source":{"type":"base64","data":"AAAA"}},{"type":"tool_use","input":{"text":"no"}}]}]}"#;
    let strings = ["abc", "t", "defg", "text", "no"];
    assert_eq!(bytes("/v1/messages", messages), strings.concat().len() as u64);
    let responses = r#"{"instructions":"ab","input":[{"role":"user","content":[{"type":"input_text","text":"cde"},
        {"type":"input_image","image_url":"data:AAAA"}]},{"type":"function_call_output","call_id":"x","output":"fg"}]}"#;
    let strings = ["ab", "cde", "x", "fg"];
    assert_eq!(bytes("/v1/responses", responses), strings.concat().len() as u64);
    assert_eq!(bytes("/v1/embeddings", r#"{"input":["ab","\u00e9\ud83d\ude00","\n"]}"#), 2 + 6 + 1);
    assert_eq!(bytes("/v1/chat/completions", r#"{"messages":[{"content":"a"}],"temperature":1}"#), 1);
    assert_eq!(bytes("/v1/chat/completions", r#"{"tools": [ {} ],"functions":[1]}"#), 6 + 3);
    assert!(!chat(r#"{"model":"m","temperature":1}"#).unwrap().prompt.is_known);
}

#[test]
fn c97_tool_call_arguments_count_by_their_raw_bytes() {
    let called = |arguments: &str| {
        let body =
            format!(r#"{{"messages":[{{"content":[{{"type":"tool_use","input":{arguments}}},{{"box":[9,8]}}]}}]}}"#);
        read_in("/v1/messages", &[body.as_bytes()]).unwrap().prompt.bytes
    };
    assert_eq!(called("{}"), 0);
    assert_eq!(called(r#"{"name":"v"}"#), 4 + 1);
    assert_eq!(called(r#"{"n":-12.5,"t":true,"z":null}"#), 3 + 5 + 4 + 4);
    assert_eq!(called(r#"{"n":[[],{"m":[1,22]}]}"#), 1 + 2 + 2 + 2 + 1 + 2 + 1 + 2);
    let long = format!(r#"{{"{}":1}}"#, "k".repeat(400_000));
    assert_eq!(called(&long), 400_001);
    assert_eq!(called(&format!("[{}]", vec!["1234567"; 50_000].join(","))), 350_000);
}

#[test]
fn c97_each_conversation_of_a_batch_has_its_choices() {
    let batch = |body: &str| read_in("/v1/chat/completions/batch", &[body.as_bytes()]);
    let two = r#"{"messages":[[{"role":"user","content":"ab"},{"content":["cd"]}],[{"content":"ef"}]],"n":3}"#;
    let facts = batch(two).unwrap();
    assert_eq!((facts.prompts, facts.choices(), facts.prompt.bytes), (2, 6, 6));
    assert_eq!(batch(r#"{"messages":[]}"#).unwrap().choices(), 1);
    assert_eq!(chat(r#"{"messages":[[{"content":"ab"}],[]]}"#).unwrap().choices(), 1, "no batch");
    let many = format!(r#"{{"messages":[{}[]]}}"#, "[],".repeat(2048));
    assert_eq!(batch(&many), Err(Unreadable::TooMany { what: "prompts", most: 2048 }));
}

#[test]
fn c78_text_members_of_paths_without_output_are_prompt() {
    let bytes = |path: &str, body: &str| read_in(path, &[body.as_bytes()]).unwrap().prompt.bytes;
    for (path, body, expected) in [
        ("/v1/rerank", r#"{"query":"ab","documents":["cde",{"text":"fg"}]}"#, 7),
        ("/score", r#"{"data_1":"ab","data_2":["cde","fg"]}"#, 7),
        ("/v1/score", r#"{"queries":["ab"],"items":["cde",{"content":[{"type":"text","text":"fg"}]}]}"#, 7),
        ("/v2/embed", r#"{"texts":["ab","cde"]}"#, 5),
        (
            "/v2/embed",
            r#"{"inputs":[{"content":[{"type":"text","text":"ab"},{"type":"image_url","image_url":"x"}]}]}"#,
            2,
        ),
        ("/v1/completions", r#"{"prompt":"ab","suffix":"cde"}"#, 5),
        ("/v1/chat/completions", r#"{"suffix":"ab","items":["cd"],"texts":["ef"]}"#, 0),
    ] {
        assert_eq!(bytes(path, body), expected, "{path} {body}");
    }
}

#[test]
fn c97_calls_their_results_and_reasoning_sent_back_are_prompt() {
    let bytes = |path: &str, body: &str| read_in(path, &[body.as_bytes()]).unwrap().prompt.bytes;
    let long = "x".repeat(400_000);
    for (path, body) in [
        (
            "/v1/chat/completions",
            format!(r#"{{"messages":[{{"tool_calls":[{{"function":{{"arguments":"{long}"}}}}]}}]}}"#),
        ),
        (
            "/v1/chat/completions",
            format!(r#"{{"messages":[{{"tool_calls":[{{"function":{{"arguments":{{"file":"{long}"}}}}}}]}}]}}"#),
        ),
        ("/v1/chat/completions", format!(r#"{{"messages":[{{"function_call":{{"arguments":"{long}"}}}}]}}"#)),
        ("/v1/chat/completions", format!(r#"{{"messages":[{{"reasoning_content":"{long}"}}]}}"#)),
        (
            "/v1/chat/completions",
            format!(r#"{{"messages":[{{"content":[{{"type":"thinking","thinking":[{{"text":"{long}"}}]}}]}}]}}"#),
        ),
        ("/v1/chat/completions", format!(r#"{{"messages":[{{"role":"{long}"}}]}}"#)),
        (
            "/v1/messages",
            format!(
                r#"{{"messages":[{{"content":[{{"type":"tool_use","input":{{"image":[{{"data":"{long}"}}]}}}}]}}]}}"#
            ),
        ),
        (
            "/v1/messages",
            format!(
                r#"{{"messages":[{{"content":[{{"type":"document","source":{{"data":"{long}","type":"text"}}}}]}}]}}"#
            ),
        ),
        ("/v1/messages", format!(r#"{{"messages":[{{"content":[{{"type":"thinking","thinking":"{long}"}}]}}]}}"#)),
        ("/v1/responses", format!(r#"{{"input":[{{"type":"function_call","arguments":"{long}"}}]}}"#)),
        ("/v1/responses", format!(r#"{{"input":[{{"type":"reasoning","summary":[{{"text":"{long}"}}]}}]}}"#)),
        ("/v1/responses", format!(r#"{{"prompt":{{"id":"p","variables":{{"a":"{long}"}}}}}}"#)),
        ("/v1/rerank", format!(r#"{{"query":"{long}"}}"#)),
        ("/v1/rerank", format!(r#"{{"query":"","documents":["",{{"text":"{long}"}}]}}"#)),
        ("/v1/score", format!(r#"{{"text_1":"","text_2":["{long}"]}}"#)),
        ("/v1/score", format!(r#"{{"text_1":"{long}"}}"#)),
        ("/v1/score", format!(r#"{{"queries":["{long}"]}}"#)),
        ("/v1/rerank", format!(r#"{{"passages":[{{"text":"{long}"}}]}}"#)),
        (
            "/v1/chat/completions",
            format!(
                r#"{{"response_format":{{"type":"json_schema","json_schema":{{"schema":{{"title":"{long}"}}}}}}}}"#
            ),
        ),
        ("/v1/chat/completions", format!(r#"{{"guided_json":{{"title":"{long}"}}}}"#)),
        ("/v1/chat/completions", format!(r#"{{"guided_regex":"{long}"}}"#)),
        ("/v1/chat/completions", format!(r#"{{"structured_outputs":{{"json":"{long}"}}}}"#)),
        ("/v1/responses", format!(r#"{{"text":{{"format":{{"type":"json_schema","schema":{{"title":"{long}"}}}}}}}}"#)),
        ("/v1/messages", format!(r#"{{"output_config":{{"format":{{"schema":{{"title":"{long}"}}}}}}}}"#)),
        ("/v1/chat/completions", format!(r#"{{"chat_template":"{long}"}}"#)),
        (
            "/v1/chat/completions",
            format!(r#"{{"chat_template_kwargs":{{"enable_thinking":true,"persona":"{long}"}}}}"#),
        ),
        ("/v1/chat/completions", format!(r#"{{"chat_template_kwargs":{{"documents":[{{"text":"{long}"}}]}}}}"#)),
        ("/pooling", format!(r#"{{"data":"{long}"}}"#)),
        ("/pooling", format!(r#"{{"data":{{"text":["{long}"]}},"task":"plugin"}}"#)),
        ("/pooling", format!(r#"{{"messages":[{{"content":"{long}"}}],"chat_template":""}}"#)),
    ] {
        let bytes = bytes(path, &body);
        assert!((400_000..400_100).contains(&bytes), "{bytes}: {path} {}", body.replace(&long, "..."));
    }
    let schema =
        r#"{"messages":[],"response_format":{"type":"json_schema","json_schema":{"a": [1, {}] },"x":{"b":1}}}"#;
    assert_eq!(bytes("/v1/chat/completions", schema), r#"{"a": [1, {}] }"#.len() as u64, "as it stands");
    assert_eq!(bytes("/v1/chat/completions", r#"{"response_format":{"type":"json_object"},"grammar":null}"#), 0);
    assert_eq!(bytes("/v1/chat/completions", r#"{"grammar":"a\n","guided_choice":["a"]}"#), 5 + 5);
    let switches = r#"{"chat_template_kwargs":{"enable_thinking":false,"thinking":null,"x":true,"n":12,"s":"ab"}}"#;
    assert_eq!(bytes("/v1/chat/completions", switches), 2 + 4, "switches are none of it");
    assert_eq!(bytes("/v1/chat/completions", r#"{"chat_template":null,"chat_template_kwargs":null}"#), 0);
    assert_eq!(bytes("/v1/completions", r#"{"data":"not read there"}"#), 0);
}

#[test]
fn media_do_not_count_however_deep_they_stand() {
    let long = "A".repeat(400_000);
    for (path, body) in [
        (
            "/v1/messages",
            format!(
                r#"{{"messages":[{{"content":[{{"type":"tool_result","content":[{{"type":"image","source":{{"type":"base64","data":"{long}"}}}}]}}]}}]}}"#
            ),
        ),
        (
            "/v1/messages",
            format!(
                r#"{{"messages":[{{"content":[{{"type":"document","source":{{"data":"{long}","type":"base64"}}}}]}}]}}"#
            ),
        ),
        (
            "/v1/chat/completions",
            format!(r#"{{"messages":[{{"content":[{{"a":[{{"input_audio":{{"data":"{long}"}}}}]}}]}}]}}"#),
        ),
        ("/v1/chat/completions", format!(r#"{{"messages":[{{"content":[{{"type":"image","data":"{long}"}}]}}]}}"#)),
        ("/v1/chat/completions", format!(r#"{{"messages":[{{"audio":{{"data":"{long}"}}}}]}}"#)),
        (
            "/v1/chat/completions",
            format!(
                r#"{{"messages":[{{"content":[{{"file":{{"x":["{long}",{{"text":"{long}"}}],"file_data":"{long}"}}}}]}}]}}"#
            ),
        ),
        ("/pooling", format!(r#"{{"data":{{"data":"{long}","data_format":"b64_json","image_format":"tiff"}}}}"#)),
        ("/v1/responses", format!(r#"{{"input":[{{"type":"input_file","file_data":"{long}"}}]}}"#)),
        ("/v1/responses", format!(r#"{{"input":[{{"result":"{long}","type":"image_generation_call"}}]}}"#)),
        (
            "/v1/responses",
            format!(r#"{{"input":[{{"type":"computer_call_output","output":{{"image_url":"{long}"}}}}]}}"#),
        ),
    ] {
        let prompt = read_in(path, &[body.as_bytes()]).unwrap().prompt;
        assert!(prompt.bytes < 100 && prompt.has_media, "{} {path} {}", prompt.bytes, body.replace(&long, "..."));
    }
    let text = read_in("/v1/rerank", &[br#"{"documents":[{"data":"12345"},{"type":"x","result":"67"}]}"#]).unwrap();
    assert_eq!((text.prompt.bytes, text.prompt.has_media), (5 + 2, false));
    let numbers = read_in("/v1/responses", &[br#"{"input":[{"box":[1,2,3]}]}"#]).unwrap();
    assert_eq!(numbers.prompt.token_ids, 0, "numbers in an object are no token ids");
}

#[test]
fn c86_references_to_stored_objects_are_found() {
    let names = |path: &str, body: &str| read_in(path, &[body.as_bytes()]).unwrap().names_stored;
    for (body, expected) in [
        (r#"{"previous_response_id":"resp_x"}"#, true),
        (r#"{"conversation":"conv_x"}"#, true),
        (r#"{"conversation":{"id":"conv_x"}}"#, true),
        (r#"{"prompt":{"id":"pmpt_x"}}"#, true),
        (r#"{"prompt":{"variables":{"id":"x"},"i\u0064":"pmpt_x"}}"#, true),
        (r#"{"previous_response_id":null,"conversation":null,"prompt":null}"#, false),
        (r#"{"prompt":{"id":null,"variables":{"id":"x"}}}"#, false),
        (r#"{"input":"previous_response_id"}"#, false),
        (r#"{"input":[{"type":"item_reference","id":"msg_x"}]}"#, true),
        (r#"{"input":[{"id":"msg_x","type":"item_referenc\u0065"}]}"#, true),
        (r#"{"input":[{"role":"user","content":"item_reference"}]}"#, false),
        (r#"{"input":[{"role":"user","content":[{"type":"input_file","file_id":"file_x"}]}]}"#, true),
        (r#"{"input":[{"role":"user","content":[{"type":"input_image","file_id":"file_x"}]}]}"#, true),
        (r#"{"input":[{"role":"user","content":[{"type":"input_file","file_id":null,"file_data":"x"}]}]}"#, false),
        (r#"{"input":[{"type":"function_call","arguments":{"file_id":"x","type":"item_reference"}}]}"#, false),
        (r#"{"input":[{"id":"msg_x","previous_response_id":"x"}]}"#, false),
        (r#"{"input":[{"type":"mcp_approval_response","approval_request_id":"mcpr_x","approve":true}]}"#, true),
        (r#"{"tools":[{"type":"code_interpreter","container":"cntr_x"}]}"#, true),
        (r#"{"tools":[{"type":"code_interpreter","container":{"type":"auto","file_ids":["file_x"]}}]}"#, true),
        (r#"{"tools":[{"type":"code_interpreter","container":{"type":"auto","file_ids":[]}}]}"#, false),
        (r#"{"tools":[{"type":"code_interpreter","container":{"type":"auto","file_ids":null}}]}"#, false),
        (r#"{"tools":[{"type":"function"},{"type":"file_search","vector_store_ids":["vs_x"]}]}"#, true),
        (r#"{"tools":[{"vector_stor\u0065_ids":["vs_x"],"type":"file_search"}]}"#, true),
        (r#"{"tools":[{"type":"image_generation","input_image_mask":{"file_id":"file_x"}}]}"#, true),
        (r#"{"tools":[{"type":"image_generation","input_image_mask":{"image_url":"file_id"}}]}"#, false),
        (r#"{"tools":[{"type":"mcp","connector_id":"connector_x"}]}"#, true),
        (
            r#"{"tools":[{"type":"function","name":"container","parameters":{"type":"object","properties":
                {"container":{"type":"string"},"file_id":{"type":"string"},"vector_store_ids":{"type":"array"}},
                "required":["container","file_id"]}}]}"#,
            false,
        ),
    ] {
        assert_eq!(names("/v1/responses", body), expected, "{body}");
    }
    assert!(!names("/v1/chat/completions", r#"{"previous_response_id":"x"}"#), "nothing is stored there");
    let part = |part: &str| names("/v1/chat/completions", &format!(r#"{{"messages":[{{"content":[{part}]}}]}}"#));
    for (content, expected) in [
        (r#"{"type":"file","file":{"file_id":"file_x"}}"#, true),
        (r#"{"file":{"filename":"a","x":{"y":[1]},"fil\u0065_id":"file_x"},"type":"file"}"#, true),
        (r#"{"type":"image_file","image_file":{"file_id":"file_x"}}"#, true),
        (r#"{"type":"file","file":{"file_data":"x","filename":"file_id"}}"#, false),
        (r#"{"type":"file","file":{"file_id":null}}"#, false),
        (r#"{"type":"file","file":["file_id"]}"#, false),
        (r#"{"type":"text","text":"file_id"},{"file_id":7}"#, false),
        (r#"{"type":"input_audio","input_audio":{"id":"x"}}"#, false),
    ] {
        assert_eq!(part(content), expected, "{content}");
    }
    let said = r#"{"messages":[{"role":"assistant","audio":{"id":"audio_x"}},{"content":"after it text counts"}]}"#;
    let facts = chat(said).unwrap();
    assert!(facts.names_stored && facts.prompt.bytes == "after it text counts".len() as u64);
    let source = r#"{"messages":[{"content":[{"type":"document","source":{"type":"file","file_id":"file_x"}}]}]}"#;
    assert!(names("/v1/messages", source));
    for (container, expected) in [(r#""container_x""#, true), (r#"{"id":"container_x"}"#, true), ("null", false)] {
        assert_eq!(names("/v1/messages", &format!(r#"{{"container":{container}}}"#)), expected, "{container}");
    }
    assert!(!names("/v1/chat/completions", r#"{"container":"x","tools":[{"container":"x"}]}"#));
}

#[test]
fn c88_integer_values_in_any_spelling_are_read_and_minus_one_is_no_cap() {
    let caps = chat(r#"{"max_tokens":100.0,"n":2.0,"priority":-3.0}"#).unwrap();
    assert_eq!((caps.caps.max_tokens.as_ref().unwrap().value, caps.n, caps.readable), (100, 2, true));
    for body in [r#"{"max_tokens":-1}"#, r#"{"max_tokens":-1.0}"#] {
        let none = chat(body).unwrap();
        assert_eq!((none.caps.largest(), none.caps.open.len(), none.readable), (None, 1, true), "{body}");
        assert_eq!(none.caps.open[0].0, "max_tokens");
    }
    let huge = chat(r#"{"max_tokens":1e400}"#).unwrap();
    assert_eq!((huge.caps.largest(), huge.readable), (Some(crate::types::Tokens(u64::MAX)), false));
}

#[test]
fn c100_other_names_of_the_cap_are_caps() {
    let largest = |body: &str| chat(body).unwrap().caps.largest().map(|cap| cap.0);
    assert_eq!(largest(r#"{"max_tokens":10,"n_predict":5000}"#), Some(5000));
    assert_eq!(largest(r#"{"n_predict":5000.0,"max_tokens":null}"#), Some(5000));
    assert_eq!(largest(r#"{"max_new_tokens":7,"num_predict":9,"max_tokens_to_sample":8}"#), Some(9));
    assert_eq!(largest(r#"{"n_predict":-1,"max_tokens":10}"#), Some(10));
    assert_eq!(chat(r#"{"n_predict":1,"n_predict":2}"#), Err(Unreadable::Repeated { field: "n_predict" }));
}

#[test]
fn c100_a_decisive_name_in_other_letters_is_refused() {
    for (name, field) in [
        ("Model", "model"),
        ("MAX_TOKENS", "max_tokens"),
        ("Max_Completion_Tokens", "max_completion_tokens"),
        ("N_Predict", "n_predict"),
        ("N", "n"),
        ("Stream", "stream"),
        ("\u{17F}tream", "stream"),
        ("bac\u{212A}ground", "background"),
        ("\\u004dodel", "model"),
        ("Stream_Options", "stream_options"),
        ("Priority", "priority"),
        ("Messages", "messages"),
        ("KV_transfer_params", "kv_transfer_params"),
        ("Bootstrap_Host", "bootstrap_host"),
        ("nvExt", "nvext"),
    ] {
        let field = field.to_owned();
        assert_eq!(chat(format!("{{\"{name}\":null}}")), Err(Unreadable::Miscased { field }), "{name}");
    }
    let inside = chat(r#"{"stream_options":{"Include_Usage":true}}"#);
    assert_eq!(inside, Err(Unreadable::Miscased { field: "stream_options.include_usage".to_owned() }));
    for body in [
        r#"{"model":"m","Temperature":1,"N1":2,"Best_Of":1,"modèl":1}"#,
        r#"{"model":"m","stream_options":{"X":1},"messages":[{"Role":"a","CONTENT":"b"}],"metadata":{"Model":"x"}}"#,
    ] {
        assert!(chat(body).is_ok(), "{body}");
    }
}

#[test]
fn prompts_with_more_than_text_say_so() {
    for (body, has_media) in [
        (r#"{"messages":[{"role":"user","name":"n","content":[{"type":"text","text":"a"}]}]}"#, false),
        (r#"{"messages":[{"content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#, true),
        (r#"{"messages":[{"content":[{"type":"input_audio","input_audio":{}}]}]}"#, true),
        (r#"{"messages":[{"content":[{"type":"video_url","video_url":{}}]}]}"#, true),
        (r#"{"messages":[{"content":[{"type":"image","source":{}}]}]}"#, true),
        (r#"{"messages":[{"content":[{"source":{"data":"AA","type":"base64"}}]}]}"#, true),
        (r#"{"messages":[{"content":[{"type":"document","source":{"type":"text","data":"a"}}]}]}"#, false),
        (r#"{"messages":[{"content":[{"type":"tool_use","input":{"image":"a","file":"b"}}]}]}"#, false),
        (r#"{"input":[{"content":[{"type":"input_file","file_id":"f"}]}]}"#, true),
        (r#"{"input":"hi","previous_response_id":"r1"}"#, true),
        (r#"{"input":"hi","previous_response_id":null}"#, false),
    ] {
        assert_eq!(chat(body).unwrap().prompt.has_media, has_media, "{body}");
    }
}

#[test]
fn token_ids_count_exactly() {
    for (body, token_ids, prompts) in [
        (r#"{"prompt":[1,2,3]}"#, 3, 1),
        (r#"{"prompt":[[1,2],[3],[]]}"#, 3, 3),
        (r#"{"prompt":["a","b"]}"#, 0, 2),
        (r#"{"prompt":["a",[7,8]]}"#, 2, 2),
        (r#"{"prompt":[]}"#, 0, 1),
        (r#"{"prompt":null}"#, 0, 1),
        (r#"{"suffix":[1,2]}"#, 0, 1),
    ] {
        let facts = completion(body);
        assert_eq!((facts.prompt.token_ids, facts.prompts), (token_ids, prompts), "{body}");
    }
    let facts = read_in("/v1/embeddings", &[br#"{"input":[[1,2],[3]]}"#]).unwrap();
    assert_eq!((facts.prompt.token_ids, facts.prompts), (3, 1));
}

#[test]
fn prompts_are_kept_decoded_only_for_an_echo() {
    let one = completion(r#"{"prompt":"a\u00e9\ud800","echo":true}"#);
    assert_eq!(*one.echo_prompts, ["aé\u{FFFD}"]);
    let two = completion(r#"{"echo":true,"prompt":["x",[1],"yz"],"n":2}"#);
    assert_eq!((&*two.echo_prompts, two.prompts), (&["x".to_owned(), String::new(), "yz".to_owned()][..], 3));
    let nested = completion(r#"{"echo":true,"prompt":[["z"],"y"]}"#);
    assert_eq!(*nested.echo_prompts, ["", "y"], "what stands in a list within is no prompt");
    assert!(completion(r#"{"prompt":"a","echo":false}"#).echo_prompts.is_empty());
    let none = completion(r#"{"prompt":{"content":[],"text":"a","x":[[1]]},"echo":true}"#);
    assert_eq!((none.echo_prompts.len(), none.prompts), (0, 1));
}

#[test]
fn tools_are_there_only_if_the_list_has_one() {
    for (tools, has) in
        [("[]", false), ("[ ]", false), ("null", false), ("[{}]", true), ("[1]", true), ("[null]", true), ("{}", false)]
    {
        for field in ["tools", "functions"] {
            assert_eq!(chat(format!("{{\"{field}\":{tools}}}")).unwrap().has_tools, has, "{tools}");
        }
    }
}

#[test]
fn reasoning_is_one_word_from_any_field() {
    for (body, word) in [
        (r#"{"reasoning_effort":"high"}"#, Some(Reasoning::High)),
        (r#"{"reasoning_effort":null}"#, None),
        (r#"{"reasoning":{"summary":"auto","effort":"medium"}}"#, Some(Reasoning::Medium)),
        (r#"{"reasoning":{"summary":"auto"}}"#, None),
        (r#"{"thinking":{"type":"enabled","budget_tokens":9}}"#, Some(Reasoning::On)),
        (r#"{"thinking":{"type":"disabled"}}"#, Some(Reasoning::None)),
        (r#"{"thinking":{"type":"enabled"},"reasoning_effort":"low"}"#, Some(Reasoning::Low)),
        (r#"{"reasoning_effort":"turbo"}"#, Some(Reasoning::On)),
        (r#"{"reasoning":{"nested":{"effort":"high"}}}"#, None),
    ] {
        assert_eq!(chat(body).unwrap().reasoning, word, "{body}");
    }
}

#[test]
fn metadata_is_kept_under_every_name_that_can_be_read() {
    let (most, more) = ("n".repeat(1024), "n".repeat(1025));
    let body = format!(
        r#"{{"metadata":{{"":"a","\u0062":"b","{most}":"c","{more}":"d","\n{more}":"e","\ud800":"f","g":{{"h":"i"}},"j":1,"k":"l"}}}}"#
    );
    let read = |names: &[(&str, &str)]| names.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect::<Vec<_>>();
    let kept = read(&[("", "a"), ("b", "b"), (&most, "c"), ("k", "l")]);
    assert_eq!(chat(&body).unwrap().metadata, kept);
    let bytes: Vec<&[u8]> = body.as_bytes().chunks(1).collect();
    assert_eq!(read_in("/v1/chat/completions", &bytes).unwrap().metadata, kept);
}

#[test]
fn the_fewest_tokens_that_will_do_are_known() {
    for (body, least) in [
        (r#"{"model":"m"}"#, 0),
        (r#"{"min_tokens":200,"max_tokens":500}"#, 200),
        (r#"{"thinking":{"type":"enabled","budget_tokens":2000}}"#, 2001),
        (r#"{"thinking":{"budget_tokens":2000,"type":"enabled"},"min_tokens":3}"#, 2001),
        (r#"{"min_tokens":3,"min_tokens":200,"min_tokens":4}"#, 200),
        (r#"{"min_tokens":18446744073709551615,"thinking":{"budget_tokens":18446744073709551615}}"#, u64::MAX),
        // Engines refuse these, which is their decision.
        (r#"{"min_tokens":-1}"#, 0),
        (r#"{"min_tokens":7.0}"#, 7),
        (r#"{"min_tokens":1.5,"thinking":{"budget_tokens":1e3}}"#, 1001),
        (r#"{"min_tokens":184467440737095516150}"#, 0),
        (r#"{"min_tokens":null,"thinking":{"budget_tokens":null}}"#, 0),
        (r#"{"min_tokens":"9","thinking":{"budget_tokens":"9"}}"#, 0),
        (r#"{"min_tokens":[9],"thinking":{"budget_tokens":[9],"x":9}}"#, 0),
        (r#"{"x":{"min_tokens":9},"reasoning":{"budget_tokens":9}}"#, 0),
    ] {
        let facts = chat(body).unwrap();
        assert_eq!((facts.least_output, facts.readable), (least, true), "{body}");
    }
}

#[test]
fn members_that_move_caches_or_choose_engines_are_found() {
    const VALUES: [(&str, bool); 8] = [
        ("null", false),
        ("{}", true),
        ("{\"a\":1}", true),
        ("[1]", true),
        ("1", true),
        ("true", true),
        ("\"x\"", true),
        ("\"\\u0078\"", true),
    ];
    for (value, steers) in VALUES {
        for field in [
            "kv_transfer_params",
            "ec_transfer_params",
            "disaggregated_params",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_r\\u006fom",
            "data_parallel_rank",
            "data_parallel_rank_decode",
            "routed_dp_rank",
            "disagg_prefill_dp_rank",
        ] {
            assert_eq!(chat(format!("{{\"{field}\":{value}}}")).unwrap().steers, steers, "{field} {value}");
        }
        for field in [
            "backend_instance_id",
            "decode_worker_id",
            "prefill_worker_id",
            "allowed_worker_ids",
            "dp_rank",
            "prefill_dp_rank",
            "routing_constraints",
            "router",
            "token_data",
        ] {
            let body = format!("{{\"nvext\":{{\"a\":[{{}}],\"{field}\":{value},\"b\":1}}}}");
            assert_eq!(chat(&body).unwrap().steers, steers, "{body}");
        }
        for field in ["kv_transfer_params", "ec_transfer_params", "disaggregated_params", "data_parallel_rank"] {
            for body in [
                format!("{{\"vllm_xargs\":{{\"a\":1,\"{field}\":{value}}}}}"),
                format!("{{\"vllm_xargs\":{{\"extra_args\":{{\"a\":[],\"{field}\":{value},\"b\":2}}}}}}"),
                format!("{{\"extra_body\":[{{\"vllm_xargs\":{{\"{field}\":{value}}}}}]}}"),
                format!("{{\"nvext\":{{\"{field}\":{value}}}}}"),
            ] {
                assert_eq!(chat(&body).unwrap().steers, steers, "{body}");
            }
        }
        for field in ["KV_Transfer_Params", "Data_Parallel_Rank", "\\u004bv_transfer_params"] {
            for outer in ["vllm_xargs", "extra_body", "nvext"] {
                let body = format!("{{\"{outer}\":{{\"a\":[{{\"{field}\":{value}}}]}}}}");
                assert_eq!(chat(&body).unwrap().steers, steers, "{body}");
            }
        }
        for field in ["priority", "latency_sensitivity", "Worker_Id", "Priority"] {
            let body = format!("{{\"nvext\":{{\"agent_hints\":{{\"osl\":9,\"{field}\":{value}}}}},\"model\":\"m\"}}");
            assert_eq!(chat(&body).unwrap().steers, steers, "{body}");
        }
    }
    for body in [
        r#"{"nvext":null}"#,
        r#"{"nvext":{}}"#,
        r#"{"nvext":{"annotations":["dp_rank"],"agent_hints":{"osl":9},"greed_sampling":true,"use_raw_prompt":null}}"#,
        r#"{"metadata":{"dp_rank":"1"},"messages":[{"role":"user","content":"bootstrap_host"}]}"#,
        r#"{"vllm_xargs":{"priority":1,"router":"x","kv":{"transfer_params":1}},"extra_args":null}"#,
        r#"{"x":{"kv_transfer_params":1},"bootstrap":1,"rank":1,"tools":[{"dp_rank":1}]}"#,
    ] {
        assert!(!chat(body).unwrap().steers, "{body}");
    }
}

#[test]
fn equal_prompts_have_equal_hashes_whatever_surrounds_them() {
    let hash = |body: &str| chat(body).unwrap().prefix_hash;
    let one = hash(r#"{"model":"a","messages":[{"role":"user","content":"hi there"}]}"#);
    let other = hash(r#"{ "stream" : true , "messages":[{"content":"hi\u0020there","role":"user"}] }"#);
    assert!(one == other && one != 0);
    assert_ne!(one, hash(r#"{"messages":[{"content":"hi here"}]}"#));
}

// A second parser of the same body: serde_json.

#[derive(Debug, PartialEq)]
struct Reading {
    model: Option<String>,
    stream: Option<bool>,
    include_usage: Option<Option<bool>>,
    caps: [Option<u64>; 3],
    n: u64,
    prompts: u64,
    has_tools: bool,
    bytes: u64,
    token_ids: u64,
    metadata: Vec<(String, String)>,
    echo_prompts: Vec<String>,
    steers: bool,
    has_priority: bool,
    members: usize,
}

fn by_scanner(facts: &Facts) -> Reading {
    let cap = |cap: &Option<Field<u64>>| cap.as_ref().map(|f| f.value);
    let mut metadata = facts.metadata.clone();
    metadata.sort();
    Reading {
        model: facts.model.as_ref().map(|f| f.value.to_string()),
        stream: facts.stream.as_ref().map(|f| f.value),
        include_usage: facts.stream_options.as_ref().and_then(|o| o.include_usage.as_ref().map(|f| f.value)),
        caps: [cap(&facts.caps.max_tokens), cap(&facts.caps.max_completion_tokens), cap(&facts.caps.max_output_tokens)],
        n: facts.n,
        prompts: facts.prompts,
        has_tools: facts.has_tools,
        bytes: facts.prompt.bytes,
        token_ids: facts.prompt.token_ids,
        metadata,
        echo_prompts: facts.echo_prompts.to_vec(),
        steers: facts.steers,
        has_priority: facts.priority.is_some(),
        members: facts.members,
    }
}

/// `Err(())` if a decisive field has a wrong type. Ignores the limit of choices.
fn by_serde(body: &Map<String, Value>, dialect: Dialect) -> Result<Reading, ()> {
    let get = |name: &str| body.get(name).filter(|value| !value.is_null());
    let flag = |name: &str| get(name).map(|v| v.as_bool().ok_or(())).transpose();
    let whole = |v: &Value| v.as_f64().filter(|float| float.fract() == 0.0 && *float >= 0.0).map(|float| float as u64);
    let count = |name: &str| get(name).map(|v| v.as_u64().or_else(|| whole(v)).ok_or(())).transpose();
    let cap = |name: &str| if get(name).and_then(Value::as_f64) == Some(-1.0) { Ok(None) } else { count(name) };
    let text = |name: &str| get(name).map(|v| v.as_str().map(str::to_owned).ok_or(())).transpose();
    let choosy = matches!(dialect, Dialect::Chat | Dialect::Completions);
    let completes = dialect == Dialect::Completions;
    if get("priority").is_some_and(|v| v.as_f64().is_none_or(|float| float.fract() != 0.0))
        || (completes && count("best_of").is_err())
    {
        return Err(());
    }
    text("user")?;
    flag("background")?;
    let options = get("stream_options").map(|v| v.as_object().ok_or(())).transpose()?;
    let mut include_usage = None;
    for name in ["continuous_usage_stats", "include_usage"] {
        include_usage = match options.and_then(|o| o.get(name)) {
            None => None,
            Some(Value::Null) => Some(None),
            Some(value) => Some(Some(value.as_bool().ok_or(())?)),
        };
    }
    let has_items = |name: &str| get(name).and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    let raw_tools: usize = ["tools", "functions"].into_iter().filter_map(get).map(raw_length).sum();
    let mut size = (raw_tools as u64, 0);
    let told = get("chat_template_kwargs").and_then(Value::as_object).into_iter().flatten();
    let told = told.filter(|(name, value)| !name.ends_with("thinking") && !value.is_boolean() && !value.is_null());
    size.0 += told.map(|(_, value)| value.to_string().len() as u64).sum::<u64>();
    for root in ["messages", "content", "system", "instructions", "prompt", "input", "chat_template"] {
        let spot = Spot { ids: matches!(root, "prompt" | "input"), ..Spot::default() };
        get(root).into_iter().for_each(|value| measure(value, spot, &mut size));
    }
    let mut prompts = Vec::new();
    if completes {
        match get("prompt") {
            Some(Value::String(text)) => prompts.push(text.clone()),
            Some(Value::Array(list)) => prompts.extend(list.iter().filter_map(|item| match item {
                Value::String(text) => Some(text.clone()),
                Value::Array(_) => Some(String::new()),
                _ => None,
            })),
            _ => {}
        }
    }
    let metadata = get("metadata").and_then(Value::as_object).into_iter().flatten();
    let mut metadata: Vec<_> = metadata.filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned()))).collect();
    metadata.sort();
    let echo = completes && flag("echo")? == Some(true);
    Ok(Reading {
        model: text("model")?,
        stream: flag("stream")?,
        include_usage,
        caps: [cap("max_tokens")?, cap("max_completion_tokens")?, cap("max_output_tokens")?],
        n: if choosy { count("n")?.unwrap_or(1) } else { 1 },
        prompts: (prompts.len() as u64).max(1),
        has_tools: has_items("tools") || has_items("functions"),
        bytes: size.0,
        token_ids: size.1,
        metadata,
        echo_prompts: if echo { prompts } else { Vec::new() },
        steers: ["kv_transfer_params", "dp_rank"].iter().any(|name| get(name).is_some())
            || body.get("nvext").is_some_and(holds_rank),
        has_priority: body.contains_key("priority"),
        members: body.len(),
    })
}

fn holds_rank(value: &Value) -> bool {
    match value {
        Value::Object(members) => {
            members.iter().any(|(name, value)| (name == "dp_rank" && !value.is_null()) || holds_rank(value))
        }
        Value::Array(list) => list.iter().any(holds_rank),
        _ => false,
    }
}

/// Bodies are written by `to_string`, so a container's length is that of its serialised form.
fn raw_length(value: &Value) -> usize {
    if value.is_array() || value.is_object() { value.to_string().len() } else { 0 }
}

/// Position of a value inside a prompt.
#[derive(Clone, Copy, Default)]
struct Spot {
    ids: bool,
    in_list: bool,
    in_object: bool,
    in_arguments: bool,
}

fn measure(value: &Value, spot: Spot, size: &mut (u64, u64)) {
    match value {
        Value::String(text) => size.0 += text.len() as u64,
        Value::Number(_) if spot.ids && spot.in_list && !spot.in_object => size.1 += 1,
        Value::Array(list) => list.iter().for_each(|item| measure(item, Spot { in_list: true, ..spot }, size)),
        Value::Object(members) => {
            for (key, inner) in members {
                let is_media = ["image_url", "image", "file"].contains(&key.as_str());
                match inner {
                    _ if is_media && !spot.in_arguments => {}
                    // Raw text, because nobody escapes a type.
                    Value::String(text) if matches!(key.as_str(), "type" | "role") && !spot.in_arguments => {
                        let is_word = text.chars().all(|one| one.is_ascii_lowercase());
                        size.0 += if is_word { 0 } else { inner.to_string().len() as u64 - 2 };
                    }
                    _ => {
                        let in_arguments = spot.in_arguments || key == "arguments" && raw_length(inner) > 0;
                        if in_arguments && !spot.in_arguments {
                            size.0 += beside_strings(inner);
                        }
                        measure(inner, Spot { in_object: true, in_arguments, ..spot }, size);
                    }
                }
            }
        }
        _ => {}
    }
}

/// Bytes of a call's arguments outside strings: names, numbers, literals, and containers inside.
fn beside_strings(arguments: &Value) -> u64 {
    let of = |value: &Value| match value {
        Value::String(_) => 0,
        Value::Array(_) | Value::Object(_) => 2 + beside_strings(value),
        word => word.to_string().len() as u64,
    };
    match arguments {
        Value::Array(list) => list.iter().map(of).sum(),
        Value::Object(members) => members.iter().map(|(name, value)| name.len() as u64 + of(value)).sum(),
        _ => 0,
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0u64..2000).prop_map(Value::from),
        (-40..40).prop_map(|eighths| Value::from(f64::from(eighths) / 8.0)),
        "[a-z\"\\\\\n é🌍]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        let key = prop_oneof![
            Just("content"),
            Just("text"),
            Just("type"),
            Just("effort"),
            Just("include_usage"),
            Just("model"),
            Just("continuous_usage_stats"),
            Just("dp_rank"),
            Just("image_url"),
            Just("arguments"),
            Just("file"),
            Just("output"),
            Just("role"),
            Just("stream")
        ];
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::vec((key, inner), 0..4)
                .prop_map(|members| members.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()),
        ]
    })
}

fn likely_value(name: &'static str) -> BoxedStrategy<Value> {
    match name {
        "stream" | "echo" | "background" => any::<bool>().prop_map(Value::from).boxed(),
        "max_tokens" | "max_completion_tokens" | "max_output_tokens" | "best_of" | "priority" => {
            any::<u32>().prop_map(Value::from).boxed()
        }
        // More choices are refused, whatever else the body has.
        "n" => prop_oneof![8 => 0u32..=9, 1 => any::<u32>()].prop_map(Value::from).boxed(),
        "stream_options" => any::<Option<bool>>().prop_map(|b| json!({"x": [1], "include_usage": b})).boxed(),
        "model" | "user" => "[a-z/\\-]{0,9}".prop_map(Value::from).boxed(),
        "metadata" => proptest::collection::hash_map("[a-c]", "[x-z]{0,3}", 0..3).prop_map(|m| json!(m)).boxed(),
        "reasoning_effort" => effort().boxed(),
        "reasoning" => effort().prop_map(|effort| json!({"effort": effort, "x": {"effort": 1}})).boxed(),
        "thinking" => effort().prop_map(|word| json!({"type": word})).boxed(),
        "chat_template_kwargs" => {
            any::<Option<bool>>().prop_map(|flag| json!({"enable_thinking": flag, "y": {"thinking": 1}})).boxed()
        }
        _ => any_value().boxed(),
    }
}

fn effort() -> impl Strategy<Value = Value> {
    let words = ["none", "low", "high", "enabled", "disabled"].map(Value::from);
    proptest::sample::select([&words[..], &[Value::Null]].concat())
}

const NAMES: [&str; 31] = [
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "n",
    "best_of",
    "priority",
    "user",
    "background",
    "echo",
    "metadata",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "functions",
    "kv_transfer_params",
    "dp_rank",
    "nvext",
    "prompt",
    "input",
    "messages",
    "system",
    "instructions",
    "content",
    "temperature",
    "x",
];

pub(crate) fn request() -> impl Strategy<Value = Map<String, Value>> {
    let member = proptest::sample::select(&NAMES[..]).prop_flat_map(|name| {
        let value = prop_oneof![6 => likely_value(name), 1 => any_value()];
        value.prop_map(move |value| (name.to_owned(), value))
    });
    proptest::collection::vec(member, 0..9).prop_map(|members| members.into_iter().collect())
}

const PATHS: [&str; 5] = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"];

proptest! {
    #[test]
    fn the_scanner_reads_what_serde_json_reads(body in request(), path in proptest::sample::select(&PATHS[..])) {
        let text = Value::Object(body.clone()).to_string();
        let scanned = read_in(path, &[text.as_bytes()]);
        match by_serde(&body, endpoint(path).dialect()) {
            Ok(reading) if reading.n.saturating_mul(reading.prompts) > 2048 => {
                prop_assert!(matches!(scanned, Err(Unreadable::TooMany { most: 2048, .. })), "{:?}", scanned);
            }
            Ok(reading) => prop_assert_eq!(by_scanner(&scanned.expect("serde reads it")), reading),
            Err(()) => prop_assert!(matches!(scanned, Err(Unreadable::WrongType { .. })), "{:?}", scanned),
        }
    }

    #[test]
    fn every_cut_gives_the_same_facts(body in request(), path in proptest::sample::select(&PATHS[..]), broken in any::<Option<proptest::sample::Index>>()) {
        let mut text = Value::Object(body).to_string().into_bytes();
        if let Some(index) = broken {
            let at = index.index(text.len());
            text[at] = b'"';
        }
        let whole = read_in(path, &[&text]);
        for cut in 0..=text.len() {
            prop_assert_eq!(&read_in(path, &[&text[..cut], &text[cut..]]), &whole);
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        prop_assert_eq!(&read_in(path, &bytes), &whole);
    }

    #[test]
    fn mutated_bodies_are_accepted_only_if_they_are_json(
        body in request(),
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), 0u8..3, any::<u8>()), 1..3),
    ) {
        let mut text = Value::Object(body).to_string().into_bytes();
        for (index, kind, byte) in edits {
            if text.is_empty() { break; }
            let at = index.index(text.len());
            match kind {
                0 => text[at] = byte,
                1 => { text.remove(at); }
                _ => text.insert(at, b"{}[]\",:\\0-1.e"[usize::from(byte) % 13]),
            }
        }
        let scanned = chat(&text);
        match serde_json::from_slice::<Value>(&text) {
            Ok(value) => {
                let is_grammar = matches!(scanned, Err(Unreadable::Grammar { .. }));
                prop_assert!(!is_grammar);
                prop_assert_eq!(value.is_object(), !matches!(scanned, Err(Unreadable::NotAnObject)));
            }
            Err(error) if error.to_string().contains("out of range") || error.to_string().contains("hex escape") => {}
            Err(_) => prop_assert!(scanned.is_err()),
        }
    }
}

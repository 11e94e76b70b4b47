//! A template match means what a full parse means.

use bytes::Bytes;
use proptest::prelude::*;
use proptest::sample::Index;

use super::super::event_parser::EventParser;
use super::super::tests::{inside, not_streamed, watch};
use super::super::{Ending, Observer, ResponseExpectation, ResponseFormat, Timeline};
use super::*;
use crate::types::{Tick, Tokens};

mod streams;

const VLLM: &str = r#"{"id":"c-1","object":"chat.completion","created":1764432000,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Paris.","refusal":null,"annotations":[],"tool_calls":[],"reasoning":null},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"system_fingerprint":"fp","usage":{"prompt_tokens":10,"total_tokens":18,"completion_tokens":8,"prompt_tokens_details":null},"kv_transfer_params":null}"#;
const TOOL: &str = r#"{"id":"c-1","choices":[{"index":0,"message":{"content":null,"reasoning":"hm","tool_calls":[{"id":"k","type":"function","function":{"name":"look","arguments":"{\"a\":1}"}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":10,"completion_tokens":8,"completion_tokens_details":{"reasoning_tokens":2}}}"#;
const COMPLETION: &str = r#"{"id":"c","object":"text_completion","choices":[{"index":0,"text":"\n\nA","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":4,"completion_tokens":3}}"#;
const RESPONSE: &str = r#"{"id":"r","created_at":1764432000.5,"instructions":"Be kind.","metadata":{},"output":[{"type":"reasoning","summary":[{"type":"summary_text","text":"hm"}]},{"content":[{"annotations":[],"text":"Paris.","type":"output_text"}],"role":"assistant","type":"message"}],"temperature":1.0,"status":"completed","error":null,"incomplete_details":null,"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":0},"output_tokens":7}}"#;
const MESSAGE: &str = r#"{"id":"m","type":"message","role":"assistant","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"Paris."}],"model":"m","stop_reason":"end_turn","usage":{"input_tokens":5,"cache_read_input_tokens":2,"output_tokens":6}}"#;

const BODIES: [(Dialect, &str); 5] = [
    (Dialect::Chat, VLLM),
    (Dialect::Chat, TOOL),
    (Dialect::Completions, COMPLETION),
    (Dialect::Responses, RESPONSE),
    (Dialect::Messages, MESSAGE),
];

fn learned(dialect: Dialect, bodies: &[&str]) -> Arc<TemplateCache> {
    let templates = Arc::new(TemplateCache::new());
    for body in bodies {
        observed(not_streamed(dialect), Some(&templates), &[body.as_bytes()]);
    }
    templates
}

fn observed(expect: ResponseExpectation, templates: Option<&Arc<TemplateCache>>, frames: &[&[u8]]) -> Timeline {
    let mut observer = Observer::new(expect, ResponseFormat::Json, 200, watch());
    templates.into_iter().for_each(|templates| observer.use_templates(templates));
    for (millis, frame) in frames.iter().enumerate() {
        observer.frame(Bytes::copy_from_slice(frame), Tick::from_millis(millis as u64), &mut |_, _| {});
    }
    observer.end(Ending::Clean, Tick::from_millis(99))
}

/// Whether a body matches, and is read as by a full parse.
fn is_known(templates: &Arc<TemplateCache>, dialect: Dialect, body: &str) -> bool {
    let known = templates.recognise(dialect, body.as_bytes(), |_, _| {});
    let (quick, full) =
        [Some(templates), None].map(|templates| observed(not_streamed(dialect), templates, &[body.as_bytes()])).into();
    assert_eq!(quick, full, "{body}");
    known
}

#[test]
fn the_next_response_of_an_engine_matches_a_template() {
    for (dialect, body) in BODIES {
        let templates = learned(dialect, &[body]);
        let other =
            body.replace("Paris.", "R\\u00f6m \\ud83d\\ude00 \\ud83d ist \u{e9}ine Stadt").replace("\"hm\"", "\"\\n\"");
        let other = other.replace(":8,", ":123,").replace("432000", "1").replace("\"id\":\"", "\"id\":\"x-\\\"");
        assert!(is_known(&templates, dialect, body) && is_known(&templates, dialect, &other), "{body}");
        let spaced = [body, "\n"].concat();
        assert!(!is_known(&templates, dialect, &spaced) && is_known(&templates, dialect, &spaced), "{body}");
    }
    let templates = learned(Dialect::Chat, &[VLLM]);
    let cut = VLLM.replace("\"stop\"", "\"length\"");
    assert!(is_known(&templates, Dialect::Chat, &cut));
    let seen = observed(not_streamed(Dialect::Chat), Some(&templates), &[cut.as_bytes()]);
    assert!(seen.cut_by_length && seen.output == Tokens(8));
}

#[test]
fn decisive_bytes_are_not_placeholders() {
    let templates = learned(Dialect::Chat, &[VLLM, TOOL]);
    for (from, to) in [
        ("\"Paris.\"", "\"\""),
        ("\"Paris.\"", "null"),
        ("\"Paris.\"", "\"\\x\""),
        ("\"stop\"", "\"\""),
        ("\"stop\"", "null"),
        (":10,", ":10.5,"),
        (":10,", ":01,"),
        (":10,", ":1234567890123456789,"),
        ("\"object\":\"chat.completion\"", "\"object\":\"error\""),
        ("\"tool_calls\":[]", "\"tool_calls\":[{\"function\":{\"name\":\"f\"}}]"),
        ("\"kv_transfer_params\":null", "\"error\":{\"code\":503}"),
        ("\"logprobs\":null", "\"error\":\"boom\""),
        ("]", "],\"choices\":[]"),
    ] {
        let other = VLLM.replacen(from, to, 1);
        assert_ne!(other, VLLM);
        assert!(!templates.recognise(Dialect::Chat, other.as_bytes(), |_, _| {}), "{other}");
        is_known(&templates, Dialect::Chat, &other);
    }
    assert!(!templates.recognise(Dialect::Completions, VLLM.as_bytes(), |_, _| {}));
    assert!(!templates.recognise(Dialect::Plain, VLLM.as_bytes(), |_, _| {}));
}

#[test]
fn bytes_after_a_template_match_are_parsed() {
    let templates = learned(Dialect::Chat, &[VLLM]);
    for (behind, is_fine) in [(&[&b" "[..], b"\r\n\t"][..], true), (&[b" ", b"x"], false), (&[b"{}", b" "], false)] {
        let frames = [&[VLLM.as_bytes()], behind].concat();
        let quick = observed(not_streamed(Dialect::Chat), Some(&templates), &frames);
        assert_eq!(quick, observed(not_streamed(Dialect::Chat), None, &frames));
        assert_eq!(quick.unparseable, !is_fine);
    }
}

#[test]
fn a_known_shape_does_not_hide_that_the_engine_gave_up() {
    for (dialect, body) in BODIES.into_iter().filter(|(_, body)| !body.contains("\"status\"")) {
        let templates = learned(dialect, &[body]);
        let [failed, fine] = ["abort", "stop"].map(|reason| {
            let reasons = ["stop", "tool_calls", "length", "end_turn"];
            let ends = |body: String, was: &str| body.replace(&format!(":\"{was}\""), &format!(":\"{reason}\""));
            reasons.into_iter().fold(body.to_owned(), ends)
        });
        assert!(is_known(&templates, dialect, &failed), "{failed}");
        let seen = observed(not_streamed(dialect), Some(&templates), &[failed.as_bytes()]);
        assert_eq!((seen.error.map(|error| error.code), seen.finish), (Some(500), None), "{failed}");
        // A failed one does not stand for successful ones either.
        let templates = learned(dialect, &[&failed]);
        is_known(&templates, dialect, &fine);
        is_known(&templates, dialect, &failed);
    }
}

#[test]
fn bodies_with_ambiguous_bytes_leave_no_template() {
    let two = VLLM.replace("}],\"sys", "},{\"index\":1}],\"sys");
    let error = VLLM.replacen('{', "{\"error\":\"boom\",", 1);
    let arguments = TOOL.replace("\"{\\\"a\\\":1}\"", "{\"my secret\":1}");
    let logprobs = VLLM.replace("\"logprobs\":null", "\"logprobs\":{\"content\":[]}");
    let unread = VLLM.replace("\"annotations\":[]", "\"annotations\":[{\"secret\":1}]");
    for body in [two, error, arguments, logprobs, unread] {
        assert!(templates_of(Dialect::Chat, &body).is_empty(), "{body}");
    }
    let named = r#"{"item":{"type":"function_call","name":"secret"},"output":[]}"#;
    assert!(templates_of(Dialect::Responses, named).is_empty());
}

/// The templates left by a body, as text.
fn templates_of(dialect: Dialect, body: &str) -> String {
    let templates = learned(dialect, &[body]);
    let cached_templates = templates.bodies.of(dialect).unwrap().cached_templates.load();
    cached_templates.iter().map(|cached_template| cached_template.template.text()).collect()
}

#[test]
fn of_ever_new_shapes_few_are_kept_and_the_one_that_is_used_stays() {
    let templates = learned(Dialect::Chat, &[VLLM]);
    for number in 0..200 {
        is_known(&templates, Dialect::Chat, &VLLM.replacen('{', &format!("{{\"member{number}\":null,"), 1));
        assert!(is_known(&templates, Dialect::Chat, VLLM));
    }
    assert_eq!(templates.bodies.chat.cached_templates.load().len(), super::BODIES);
}

#[test]
fn an_echo_and_several_choices_are_read_in_full() {
    let templates = learned(Dialect::Completions, &[COMPLETION]);
    let echo =
        ResponseExpectation { echo_prompts: [String::from("\n\nA")].into(), ..not_streamed(Dialect::Completions) };
    let seen = observed(echo, Some(&templates), &[COMPLETION.as_bytes()]);
    assert_eq!((seen.token_events, seen.has_visible), (0, false));
    let two = ResponseExpectation { choices: 2, ..not_streamed(Dialect::Completions) };
    assert_eq!(observed(two, Some(&templates), &[COMPLETION.as_bytes()]).token_events, 1);
}

/// A count, or something in its place.
fn number() -> impl Strategy<Value = String> {
    prop_oneof![8 => "[1-9][0-9]{0,3}", 1 => Just("0".to_owned()), 1 => Just("1.0".to_owned()), 1 => Just("null".to_owned())]
}

/// A finish reason.
fn reason() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec![
        "stop",
        "length",
        "max_tokens",
        "tool_calls",
        "\\u006cength",
        "",
        "abort",
        "insufficient_system_resource",
    ])
}

/// A body with other text, numbers and members than the one it is derived from.
fn body() -> impl Strategy<Value = (Dialect, String)> {
    let (number, reason) = (number(), reason());
    let member = proptest::sample::select(vec![
        "",
        "",
        "",
        "",
        "\"usage\":{\"completion_tokens\":9},",
        "\"finish_reason\":\"\",",
        "\"finish_reason\":null,",
        "\"content\":\"\",",
        "\"content\":[{\"text\":\"a\"},{\"text\":\"\"}],",
        "\"index\":3,",
        "\"error\":null,",
        "\"error\":\"\",",
        "\"error\":{},",
        "\"error\":[],",
        "\"error\":0,",
        "\"error\":{\"status\":400},",
        "\"message\":{\"content\":\"a\"},",
        "\"delta\":{},",
        "\"status\":429,",
        "\"type\":\"reasoning\",",
        "\"status\":\"failed\",",
        "\"stop_reason\":\"\",",
        "\"x\":[],",
        "\"x\":{\"content\":\"a\"},",
    ]);
    let parts = (proptest::sample::select(BODIES.to_vec()), inside(), inside(), number, reason, member, any::<Index>());
    parts.prop_map(|((dialect, body), text, thought, number, reason, member, at)| {
        let body = body.replace("Paris.", &text).replace("hm", &thought).replace("{\\\"a\\\":1}", &text);
        let body = body.replace("10", &number).replace(":7", &format!(":{number}"));
        let body = ["stop", "end_turn", "length"]
            .iter()
            .fold(body, |body, was| body.replace(&format!("\"{was}\""), &format!("\"{reason}\"")));
        let places: Vec<usize> = body.match_indices('{').map(|(place, _)| place + 1).collect();
        let place = places[at.index(places.len())];
        (dialect, [&body[..place], member, &body[place..]].concat())
    })
}

/// Bytes changed, removed, inserted or repeated.
fn mutated(body: &str, changes: &[(Index, u8, u8)]) -> Vec<u8> {
    const ODD: &[u8] = b"\"\\{}[]:,0-.e1a \n\xC3n/u";
    let mut bytes = body.as_bytes().to_vec();
    for (at, how, odd) in changes {
        let (at, odd) = (at.index(bytes.len()), ODD[usize::from(*odd) % ODD.len()]);
        match how % 4 {
            0 => bytes[at] = odd,
            1 => drop(bytes.remove(at)),
            2 => bytes.insert(at, odd),
            _ => bytes.extend_from_within(at..),
        }
        if bytes.is_empty() {
            bytes.push(odd);
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn with_templates_the_timeline_is_that_of_a_full_parse(
        bodies in proptest::collection::vec((body(), proptest::collection::vec((any::<Index>(), any::<u8>(), any::<u8>()), 0..3)), 1..6),
        stream_asked in any::<bool>(),
        cut in any::<Index>(),
    ) {
        let templates = Arc::new(TemplateCache::new());
        let all = bodies.iter().flat_map(|((dialect, body), changes)| {
            [(*dialect, body.clone().into_bytes()), (*dialect, mutated(body, changes)), (*dialect, body.clone().into_bytes())]
        });
        for (dialect, body) in all {
            let expect = ResponseExpectation { stream_asked, ..not_streamed(dialect) };
            let full = observed(expect.clone(), None, &[&body]);
            prop_assert_eq!(observed(expect.clone(), Some(&templates), &[&body]), full.clone(), "{}", String::from_utf8_lossy(&body));
            let (head, rest) = body.split_at(cut.index(body.len()));
            let same_moment = |frames: &[&[u8]], templates| {
                let mut observer = Observer::new(expect.clone(), ResponseFormat::Json, 200, watch());
                Option::into_iter(templates).for_each(|templates| observer.use_templates(templates));
                frames.iter().for_each(|frame| observer.frame(Bytes::copy_from_slice(frame), Tick::ZERO, &mut |_, _| {}));
                observer.end(Ending::Clean, Tick::from_millis(99))
            };
            prop_assert_eq!(same_moment(&[head, rest], Some(&templates)), same_moment(&[&body], None));
        }
    }

    #[test]
    fn no_text_of_a_response_stays_in_a_template(word in "[g-z]{6}", (dialect, body) in body()) {
        let secret = body.replace("assistant", &word).replace("look", &word).replace("Be kind.", &word);
        let mut parser = EventParser::new(dialect, true, 0);
        if crate::json::walk_answer(secret.as_bytes(), &mut parser).is_ok() {
            let left = templates_of(dialect, &secret);
            prop_assert!(!left.contains(&word), "{left}");
        }
        let telling = body.replace("\"text\":\"", "\"text\":\"SECRET").replace("\"content\":\"", "\"content\":\"SECRET");
        let telling = telling.replace("\"id\":\"", "\"id\":\"SECRET").replace("\"arguments\":\"", "\"arguments\":\"SECRET");
        prop_assert!(!templates_of(dialect, &telling).contains("SECRET"));
    }
}

//! A stream with known templates is observed as by a full parse.

use bytes::Bytes;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::super::super::tests::{inside, watch};
use super::super::super::{Ending, InBandError, Observer, PieceInfo, ResponseExpectation, ResponseFormat, Timeline};
use super::super::*;
use super::{mutated, number, reason};
use crate::types::Tick;

const CHAT: &str = r#"
data: {"id":"c-1","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

data: {"id":"c-1","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{"reasoning":"hm"},"logprobs":null,"finish_reason":null}]}

data: {"id":"c-1","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{"content":"Paris."},"logprobs":null,"finish_reason":null}]}

data: {"id":"c-1","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{"content":"Paris."},"logprobs":null,"finish_reason":null}]}

data: {"id":"c-1","object":"chat.completion.chunk","created":17,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}

data: {"id":"c-1","object":"chat.completion.chunk","created":17,"model":"m","choices":[],"usage":{"prompt_tokens":10,"total_tokens":18,"completion_tokens":8}}

data: [DONE]

"#;

const TOOL: &str = r#"
data: {"id":"c-1","choices":[{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"k","type":"function","function":{"name":"look","arguments":""}}]},"finish_reason":null}],"usage":{"prompt_tokens":10,"completion_tokens":1}}

data: {"id":"c-1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"Paris."}}]},"finish_reason":null}],"usage":{"prompt_tokens":10,"completion_tokens":7}}

data: {"id":"c-1","choices":[{"index":0,"delta":{"content":"hm"},"finish_reason":"tool_calls","stop_reason":null}],"usage":{"prompt_tokens":10,"completion_tokens":8}}

data: [DONE]

"#;

const COMPLETION: &str = r#"
data: {"id":"c","object":"text_completion","created":17,"model":"m","choices":[{"index":0,"text":"Paris.","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}

data: {"id":"c","object":"text_completion","created":17,"model":"m","choices":[{"index":0,"text":"hm","logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}

data: {"id":"c","object":"text_completion","created":17,"model":"m","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":3}}

data: [DONE]

"#;

const RESPONSE: &str = r#"
event: response.created
data: {"type":"response.created","sequence_number":0,"response":{"id":"r","object":"response","created_at":17.5,"status":"in_progress","error":null,"incomplete_details":null,"instructions":"Be kind.","metadata":{},"output":[],"usage":null}}

event: response.output_item.added
data: {"type":"response.output_item.added","sequence_number":1,"output_index":0,"item":{"id":"i","type":"message","status":"in_progress","role":"assistant","content":[]}}

event: response.reasoning_summary_text.delta
data: {"type":"response.reasoning_summary_text.delta","sequence_number":2,"item_id":"i","output_index":0,"delta":"hm"}

event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":3,"item_id":"i","output_index":0,"delta":"Paris.","logprobs":[]}

event: response.output_text.delta
data: {"type":"response.output_text.delta","sequence_number":4,"item_id":"i","output_index":0,"delta":"Paris.","logprobs":[]}

event: response.output_text.done
data: {"type":"response.output_text.done","sequence_number":5,"item_id":"i","output_index":0,"text":"Paris.Paris."}

event: response.completed
data: {"type":"response.completed","sequence_number":6,"response":{"id":"r","object":"response","status":"completed","error":null,"incomplete_details":null,"output":[],"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":0},"output_tokens":7}}}

"#;

const MESSAGE: &str = r#"
event: message_start
data: {"type":"message_start","message":{"id":"m","type":"message","role":"assistant","content":[],"model":"m","stop_reason":null,"usage":{"input_tokens":10,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: ping
data: {"type":"ping"}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Paris."}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Paris."}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"input_tokens":10,"output_tokens":6}}

event: message_stop
data: {"type":"message_stop"}

"#;

const STREAMS: [(Dialect, &str); 5] = [
    (Dialect::Chat, CHAT),
    (Dialect::Chat, TOOL),
    (Dialect::Completions, COMPLETION),
    (Dialect::Responses, RESPONSE),
    (Dialect::Messages, MESSAGE),
];

/// Everything an observer reports of a stream: bytes and info of each piece, and its state after each
/// frame.
#[derive(Debug, PartialEq)]
struct Seen {
    pieces: Vec<(Bytes, PieceInfo)>,
    frames: Vec<Told>,
    timeline: Timeline,
}

#[derive(Debug, PartialEq)]
struct Told {
    has_token: bool,
    is_finished: bool,
    error: Option<InBandError>,
    last_sequence_number: Option<u64>,
    last_activity: Option<Tick>,
}

/// The report of a stream; the number of events parsed in full although templates exist; and the template
/// left by the stream's events.
fn observed(mut observer: Observer, frames: &[&[u8]]) -> (Seen, u32, Option<String>) {
    let (mut pieces, mut told) = (Vec::new(), Vec::new());
    for (millis, frame) in frames.iter().enumerate() {
        let at = Tick::from_millis(millis as u64);
        observer.frame(Bytes::copy_from_slice(frame), at, &mut |piece, info| pieces.push((piece, *info)));
        told.push(Told {
            has_token: observer.has_token(),
            is_finished: observer.is_finished(),
            error: observer.error(),
            last_sequence_number: observer.last_sequence_number(),
            last_activity: observer.last_activity(),
        });
    }
    observer.clean_end(Tick::from_millis(99), &mut |piece, info| pieces.push((piece, *info)));
    let (misses, own) = (observer.misses(), observer.own_template());
    let timeline = observer.end(Ending::Clean, Tick::from_millis(99));
    (Seen { pieces, frames: told, timeline }, misses, own)
}

fn observer(dialect: Dialect) -> Observer {
    Observer::new(ResponseExpectation::stream(dialect, Tick::ZERO), ResponseFormat::Events, 200, watch())
}

fn knowing(dialect: Dialect, templates: &Arc<TemplateCache>) -> Observer {
    let mut observer = observer(dialect);
    observer.use_templates(templates);
    observer
}

/// Observes a stream with known templates, with none, and without any shortcut, and checks that the
/// reports are equal. Returns the number of events parsed in full.
fn checked(templates: &Arc<TemplateCache>, dialect: Dialect, frames: &[&[u8]]) -> u32 {
    let (known, misses, own) = observed(knowing(dialect, templates), frames);
    let (alone, _, own_alone) = observed(observer(dialect), frames);
    let (full, ..) = observed(observer(dialect).without_shortcut(), frames);
    let text = || String::from_utf8_lossy(&frames.concat()).into_owned();
    assert_eq!(known, full, "{}", text());
    assert_eq!(alone, full, "{}", text());
    assert_eq!(own, own_alone, "{}", text());
    misses
}

/// The same engine's response to another request.
fn other(stream: &str) -> String {
    let other = stream.replace("Paris.", "R\\u00f6m \\ud83d\\ude00 \u{e9}").replace("\"hm\"", "\"\\n\"");
    let other = other.replace("\"id\":\"", "\"id\":\"x-\\\"").replace(":10", ":123").replace(":17", ":18");
    let other = other.replace("\"index\":0", "\"index\":2");
    other.replace("\"stop\"", "\"length\"").replace("end_turn", "max_tokens").replace("\"m\"", "\"other\"")
}

fn learned(dialect: Dialect, streams: &[&str]) -> Arc<TemplateCache> {
    let templates = Arc::new(TemplateCache::new());
    for stream in streams {
        observed(knowing(dialect, &templates), &[stream.trim_start().as_bytes()]);
    }
    templates
}

/// The templates left by streams, as text.
fn templates_of(dialect: Dialect, stream: &str) -> Vec<String> {
    let templates = learned(dialect, &[stream]);
    let cached_templates = templates.events.of(dialect).unwrap().cached_templates.load();
    cached_templates.iter().map(|cached_template| cached_template.template.text()).collect()
}

#[test]
fn no_event_of_the_next_stream_of_an_engine_is_read_in_full() {
    for (dialect, stream) in STREAMS {
        let templates = Arc::new(TemplateCache::new());
        let stream = stream.trim_start();
        assert!(checked(&templates, dialect, &[stream.as_bytes()]) > 0);
        let next = other(stream);
        assert_ne!(next, stream);
        assert_eq!(checked(&templates, dialect, &[next.as_bytes()]), 0, "{dialect:?}");
        let events: Vec<&[u8]> = next.split_inclusive("\n\n").map(str::as_bytes).collect();
        assert_eq!(checked(&templates, dialect, &events), 0, "{dialect:?}");
        let halves: Vec<&[u8]> = events.iter().flat_map(|event| event.chunks(event.len() / 2)).collect();
        assert_eq!(checked(&templates, dialect, &halves), 0, "{dialect:?}");
        for cut in 0..next.len() {
            let (head, rest) = next.as_bytes().split_at(cut);
            checked(&templates, dialect, &[head, rest]);
        }
        let bytes: Vec<&[u8]> = next.as_bytes().chunks(1).collect();
        checked(&templates, dialect, &bytes);
    }
}

#[test]
fn events_that_match_templates_are_counted() {
    let templates = learned(Dialect::Chat, &[CHAT]);
    let stream = other(CHAT).replace(":8}", ":21}");
    let (seen, misses, _) = observed(knowing(Dialect::Chat, &templates), &[stream.trim_start().as_bytes()]);
    let timeline = seen.timeline;
    assert_eq!((misses, timeline.cut_by_length, timeline.token_events), (0, true, 3));
    let usage = timeline.usage;
    assert_eq!((usage.input.map(|tokens| tokens.0), timeline.output.0), (Some(123), 21));
    let tokens: Vec<(bool, bool)> = seen.pieces.iter().map(|(_, info)| (info.token, info.visible)).collect();
    assert_eq!(tokens[..4], [(false, false), (true, false), (true, true), (true, true)]);
}

#[test]
fn cached_templates_do_not_hide_a_finish_or_a_repetition() {
    let templates = learned(Dialect::Chat, &[CHAT]);
    let failed = CHAT.replace("\"stop\"", "\"insufficient_system_resource\"");
    let (seen, misses, _) = observed(knowing(Dialect::Chat, &templates), &[failed.trim_start().as_bytes()]);
    assert_eq!((misses, seen.timeline.error.map(|error| error.code), seen.timeline.finish), (0, Some(503), None));
    // An empty error has a template; a non-empty one does not match it.
    for (nothing, something) in [("\"\"", "\"boom\""), ("{}", "{\"a\":1}"), ("[]", "[1]"), ("false", "true")] {
        let with = |error: &str| CHAT.replace("\"logprobs\":null", &format!("\"error\":{error}"));
        let templates = learned(Dialect::Chat, &[&with(nothing)]);
        assert_eq!(checked(&templates, Dialect::Chat, &[with(nothing).trim_start().as_bytes()]), 0, "{nothing}");
        checked(&templates, Dialect::Chat, &[with(something).trim_start().as_bytes()]);
        let (seen, ..) = observed(knowing(Dialect::Chat, &templates), &[with(something).trim_start().as_bytes()]);
        assert_eq!(seen.timeline.error.map(|error| error.code), Some(500), "{something}");
    }
    let field = "error: {\"code\":503}\n\n".to_owned() + CHAT.trim_start();
    for stream in
        [field.clone(), CHAT.trim_start().replace("\n\ndata: [DONE]", "\nerror: {\"code\":503}\n\ndata: [DONE]")]
    {
        checked(&templates, Dialect::Chat, &[stream.as_bytes()]);
        let (seen, ..) = observed(knowing(Dialect::Chat, &templates), &[stream.as_bytes()]);
        assert_eq!(seen.timeline.error.map(|error| error.code), Some(503));
    }
    let late = CHAT.replace("\"choices\":[],", "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"}}],");
    for _ in 0..2 {
        let templates = learned(Dialect::Chat, &[CHAT, &late]);
        assert_eq!(checked(&templates, Dialect::Chat, &[late.trim_start().as_bytes()]), 0);
        let (seen, ..) = observed(knowing(Dialect::Chat, &templates), &[late.trim_start().as_bytes()]);
        assert_eq!((seen.timeline.token_events, seen.timeline.output.0), (3, 8));
    }
}

#[test]
fn a_byte_order_mark_and_other_line_ends_are_no_obstacle() {
    for (dialect, stream) in STREAMS {
        let templates = learned(dialect, &[stream]);
        let marked = format!("\u{FEFF}{}", stream.trim_start());
        assert_eq!(checked(&templates, dialect, &[marked.as_bytes()]), 0);
        for end in ["\r\n", "\r"] {
            let (templates, stream) = (learned(dialect, &[stream]), stream.trim_start().replace('\n', end));
            assert!(checked(&templates, dialect, &[stream.as_bytes()]) > 0);
            assert_eq!(checked(&templates, dialect, &[stream.as_bytes()]), 0);
        }
    }
}

#[test]
fn decisive_bytes_are_not_placeholders() {
    let templates = learned(Dialect::Chat, &[CHAT, TOOL]);
    for (from, to) in [
        ("\"content\":\"Paris.\"", "\"content\":\"\""),
        ("\"content\":\"\"", "\"content\":\"a\""),
        ("\"content\":\"Paris.\"", "\"content\":[{\"text\":\"a\"}]"),
        ("\"stop\"", "\"\""),
        ("\"stop\"", "null"),
        ("\"stop\"", "\"\\u006cength\""),
        (":10,", ":10.5,"),
        (":18,", ":018,"),
        ("\"index\":0", "\"index\":0.0"),
        ("chat.completion.chunk", "error"),
        ("\"logprobs\":null", "\"logprobs\":{\"content\":[{\"token\":\"a\"}]}"),
        ("\"model\":\"m\"", "\"error\":{\"code\":503}"),
        ("[]", "[],\"choices\":[{\"delta\":{\"content\":\"a\"}}]"),
        ("data: ", "event: error\ndata: "),
        ("\n\ndata", "\ndata"),
    ] {
        let odd = CHAT.replacen(from, to, 1);
        let all = |stream: &str| stream.trim_start().split_inclusive("\n\n").map(str::to_owned).collect::<Vec<_>>();
        let strange = all(&odd).into_iter().find(|event| !all(CHAT).contains(event)).unwrap();
        let known = TemplateCursor::of(&templates).recognise(Dialect::Chat, strange.as_bytes(), |_, _| ());
        assert!(known.is_none(), "{strange}");
        checked(&templates, Dialect::Chat, &[odd.trim_start().as_bytes()]);
    }
}

#[test]
fn an_echo_and_several_choices_are_read_in_full() {
    let templates = learned(Dialect::Completions, &[COMPLETION]);
    let stream = COMPLETION.trim_start().as_bytes();
    let expect = ResponseExpectation::stream(Dialect::Completions, Tick::ZERO);
    let echo = ResponseExpectation { echo_prompts: [String::from("Paris.")].into(), ..expect.clone() };
    for (expect, token_events) in [(echo, 1), (ResponseExpectation { choices: 2, ..expect }, 2)] {
        let mut observer = Observer::new(expect, ResponseFormat::Events, 200, watch());
        observer.use_templates(&templates);
        assert_eq!(observed(observer, &[stream]).0.timeline.token_events, token_events);
    }
}

#[test]
fn bytes_that_may_vary_leave_no_template() {
    let chat = |from: &str, to: &str| {
        let event = CHAT.split_inclusive("\n\n").nth(2).unwrap();
        assert!(event.contains(from));
        (Dialect::Chat, event.replacen(from, to, 1))
    };
    for (dialect, event) in [
        chat("\"content\":\"Paris.\"", "\"tool_calls\":[{\"function\":{\"arguments\":{\"SECRET\":1}}}]"),
        chat("\"logprobs\":null", "\"logprobs\":{\"content\":[]}"),
        chat("\"logprobs\":null", "\"logprobs\":{\"content\":[{\"SECRET\":1}]}"),
        chat("\"logprobs\":null", "\"unread\":{\"SECRET\":1}"),
        chat("null}]", "{\"type\":\"stop\",\"SECRET\":1}}]"),
        chat("\"content\":\"Paris.\"", "\"content\":1234"),
        chat("\"model\":\"m\"", "\"error\":\"SECRET\""),
        chat("\"model\":\"m\"", "\"code\":\"SECRET\""),
        chat("\"model\":\"m\"", &format!("\"type\":\"{}\"", "SECRET".repeat(9))),
        chat("}]}", "},{\"index\":1,\"delta\":{\"content\":\"a\"}}]}"),
        chat("data: ", ": SECRET\ndata: "),
        chat("data: ", "id: SECRET\ndata: "),
        chat("\n\n", "\nid: SECRET\n\n"),
        chat("\n\n", "\n: SECRET\n\n"),
        chat("data: ", "event: error\ndata: "),
        chat("data: ", &format!("event: {}\ndata: ", "SECRET".repeat(20))),
        chat(",\"created\"", ",\ndata: \"created\""),
        (Dialect::Responses, "data: {\"type\":\"response.output_item.added\",\"item\":{\"type\":\"function_call\",\"name\":\"SECRET\"}}\n\n".to_owned()),
        (Dialect::Responses, "data: {\"type\":\"response.failed\",\"response\":{\"id\":\"r\"}}\n\n".to_owned()),
        (Dialect::Messages, "data: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"tool_use\",\"name\":\"SECRET\",\"input\":{}}}\n\n".to_owned()),
        (Dialect::Messages, "event: error\ndata: {\"type\":\"error\"}\n\n".to_owned()),
    ] {
        assert_eq!(templates_of(dialect, &event), [""; 0], "{event}");
    }
}

#[test]
fn of_ever_new_events_few_are_kept_and_those_that_are_used_stay() {
    let templates = learned(Dialect::Chat, &[CHAT]);
    for number in 0..200 {
        let odd = CHAT.replace("data: {", &format!("data: {{\"member{number}\":null,"));
        checked(&templates, Dialect::Chat, &[odd.trim_start().as_bytes()]);
        assert_eq!(checked(&templates, Dialect::Chat, &[CHAT.trim_start().as_bytes()]), 0);
    }
    assert_eq!(templates.events.chat.cached_templates.load().len(), EVENTS);
    assert_eq!(templates.bodies.chat.cached_templates.load().len(), 0);
}

#[test]
fn a_stream_of_another_kind_asks_for_no_more_shapes() {
    let templates = learned(Dialect::Chat, &[CHAT]);
    let odd: String = (0..100).map(|number| format!("data: {{\"member{number}\":null}}\n\n")).collect();
    let stream = odd + CHAT.trim_start();
    assert_eq!(checked(&templates, Dialect::Chat, &[stream.as_bytes()]), STRANGERS);
}

/// A stream with other text, numbers and members than the one it is derived from.
fn stream() -> impl Strategy<Value = (Dialect, String)> {
    let (number, reason) = (number(), reason());
    let member = select(vec![
        "",
        "",
        "",
        "\"usage\":{\"completion_tokens\":9},",
        "\"finish_reason\":\"stop\",",
        "\"finish_reason\":null,",
        "\"content\":\"\",",
        "\"content\":\"a\",",
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
        "\"type\":\"response.failed\",",
        "\"type\":\"message_stop\",",
        "\"status\":\"failed\",",
        "\"stop_reason\":\"\",",
        "\"delta\":\"\",",
        "\"logprobs\":{\"content\":[{}]},",
        "\"sequence_number\":7,",
        "\"x\":[],",
        "\"x\":{\"content\":\"a\"},",
    ]);
    let end = prop_oneof![8 => Just("\n"), 1 => Just("\r\n"), 1 => Just("\r")];
    let choice = prop_oneof![4 => Just("0"), 1 => Just("1"), 1 => Just("0.0")];
    let parts = (select(STREAMS.to_vec()), inside(), inside(), (number, choice), reason, member, any::<Index>(), end);
    parts.prop_map(|((dialect, stream), text, thought, (number, choice), reason, member, at, end)| {
        let stream = stream.trim_start().replace("Paris.", &text).replace("hm", &thought);
        let stream = stream.replace("10", &number).replace(":7", &format!(":{number}"));
        let stream = stream.replace("\"index\":0", &format!("\"index\":{choice}"));
        let stream = ["stop", "end_turn", "length"]
            .iter()
            .fold(stream, |stream, was| stream.replace(&format!("\"{was}\""), &format!("\"{reason}\"")));
        let places: Vec<usize> = stream.match_indices('{').map(|(place, _)| place + 1).collect();
        let place = places[at.index(places.len())];
        (dialect, [&stream[..place], member, &stream[place..]].concat().replace('\n', end))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn with_templates_the_same_is_observed_of_a_stream(
        streams in proptest::collection::vec((stream(), proptest::collection::vec((any::<Index>(), any::<u8>(), any::<u8>()), 0..3)), 1..6),
        cuts in proptest::collection::vec(any::<Index>(), 0..4),
    ) {
        let templates = Arc::new(TemplateCache::new());
        for ((dialect, stream), changes) in streams {
            for bytes in [stream.clone().into_bytes(), mutated(&stream, &changes), stream.into_bytes()] {
                let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).chain([0, bytes.len()]).collect();
                cuts.sort_unstable();
                let frames: Vec<&[u8]> = cuts.windows(2).map(|ends| &bytes[ends[0]..ends[1]]).collect();
                checked(&templates, dialect, &frames);
            }
        }
    }

    #[test]
    fn no_text_of_a_stream_stays_in_a_template((dialect, stream) in stream()) {
        let telling = ["text", "content", "reasoning", "thinking", "delta", "id", "item_id", "instructions", "model", "arguments", "name", "role"]
            .iter()
            .fold(stream, |stream, key| stream.replace(&format!("\"{key}\":\""), &format!("\"{key}\":\"SECRET")));
        let left = templates_of(dialect, &telling).concat();
        prop_assert!(!left.contains("SECRET"), "{left}");
    }
}

//! Inputs reported by users of streaming gateways with the right results, and laws.

use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;
use proptest::sample::select;

use super::sse::HELD;
use super::*;
use crate::types::{Dialect, Tick, Tokens};

const R: &str = r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
const D: &str = "[DONE]";

fn t(text: &str) -> String {
    delta(&format!(r#"{{"content":"{text}"}}"#))
}

fn delta(delta: &str) -> String {
    of_choice(0, delta, "null")
}

fn of_choice(index: u64, delta: &str, reason: &str) -> String {
    format!(r#"{{"id":"c1","model":"m1","choices":[{{"index":{index},"delta":{delta},"finish_reason":{reason}}}]}}"#)
}

fn f(reason: &str) -> String {
    of_choice(0, "{}", &format!("\"{reason}\""))
}

fn k(arguments: &str) -> String {
    let call = format!(r#"{{"index":0,"id":"k1","function":{{"name":"f","arguments":"{arguments}"}}}}"#);
    delta(&format!(r#"{{"tool_calls":[{call}]}}"#))
}

fn counts(prompt: u64, completion: u64) -> String {
    let total = prompt + completion;
    format!(r#""usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion},"total_tokens":{total}}}"#)
}

fn u(prompt: u64, completion: u64) -> String {
    format!(r#"{{"choices":[],{}}}"#, counts(prompt, completion))
}

/// The event with usage beside its choice.
fn with(event: &str, prompt: u64, completion: u64) -> String {
    format!("{},{}}}", &event[..event.len() - 1], counts(prompt, completion))
}

fn chat() -> ResponseExpectation {
    ResponseExpectation::stream(Dialect::Chat, Tick::ZERO)
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn at(millis: u64) -> Option<Tick> {
    Some(Tick::from_millis(millis))
}

pub(super) fn watch() -> ObserverOptions {
    let edges = [10, 50, 100, 500].map(ms);
    ObserverOptions { gap_edges: edges.into(), itl: Some(ms(100)), ..ObserverOptions::default() }
}

/// An observer that records what it passes on.
struct Seen {
    observer: Observer,
    passed: Vec<u8>,
    notes: Vec<PieceInfo>,
}

impl Seen {
    fn new(expect: ResponseExpectation) -> Seen {
        Seen::of(expect, ResponseFormat::Events)
    }

    fn of(expect: ResponseExpectation, format: ResponseFormat) -> Seen {
        Seen { observer: Observer::new(expect, format, 200, watch()), passed: Vec::new(), notes: Vec::new() }
    }

    fn raw(mut self, millis: u64, bytes: &[u8]) -> Seen {
        let (passed, notes) = (&mut self.passed, &mut self.notes);
        self.observer.frame(Bytes::copy_from_slice(bytes), Tick::from_millis(millis), &mut |piece, info| {
            passed.extend_from_slice(&piece);
            notes.push(*info);
        });
        self
    }

    fn data(self, millis: u64, data: &str) -> Seen {
        self.raw(millis, format!("data: {data}\n\n").as_bytes())
    }

    fn all(mut self, events: &[(u64, &str)]) -> Seen {
        for (millis, data) in events {
            self = self.data(*millis, data);
        }
        self
    }

    fn clean(self, millis: u64) -> Timeline {
        self.observer.end(Ending::Clean, Tick::from_millis(millis))
    }

    fn ends(self, ending: Ending, millis: u64) -> Timeline {
        self.observer.end(ending, Tick::from_millis(millis))
    }
}

fn json(expect: ResponseExpectation, body: &str) -> Timeline {
    Seen::of(expect, ResponseFormat::Json).raw(900, body.as_bytes()).clean(950)
}

pub(super) fn not_streamed(dialect: Dialect) -> ResponseExpectation {
    ResponseExpectation { stream_asked: false, ..ResponseExpectation::stream(dialect, Tick::ZERO) }
}

#[test]
fn c01_all_framings_give_one_timeline() {
    let events = [R.to_owned(), t("ab"), f("stop"), u(5, 2), D.to_owned()];
    let framed =
        |end: &str| -> Vec<u8> { events.iter().flat_map(|e| format!("data: {e}{end}").into_bytes()).collect() };
    let lf = Seen::new(chat()).raw(300, &framed("\n\n")).clean(300);
    assert_eq!((lf.first_token, lf.output, lf.usage.input), (at(300), Tokens(2), Some(Tokens(5))));
    for end in ["\r\n\r\n", "\r\r"] {
        let bytes = framed(end);
        let whole = Seen::new(chat()).raw(300, &bytes);
        assert_eq!(whole.passed, bytes);
        assert_eq!(whole.clean(300), lf);
        for cut in 0..bytes.len() {
            let two = Seen::new(chat()).raw(300, &bytes[..cut]).raw(300, &bytes[cut..]);
            assert_eq!(two.clean(300), lf, "{end:?} cut at {cut}");
        }
    }
}

#[test]
fn c02_no_space_behind_the_colon() {
    let tight = format!("data:{}\n\ndata:{}\n\ndata:[DONE]\n\n", t("a"), f("stop"));
    let seen = Seen::new(chat()).raw(7, tight.as_bytes()).clean(7);
    assert_eq!((seen.first_token, seen.finish), (at(7), at(7)));
}

#[test]
fn c03_one_byte_per_read_the_event_is_that_of_its_last_byte() {
    let event = format!("data: {}\n\n", t("héllo 🌍 漢字"));
    let mut seen = Seen::new(chat());
    for (millis, byte) in event.bytes().enumerate() {
        seen = seen.raw(millis as u64, &[byte]);
    }
    assert_eq!(seen.passed, event.as_bytes());
    assert_eq!(seen.ends(Ending::Left, 999).first_token, at(event.len() as u64 - 1));
}

#[test]
fn c04_comments_and_pings_are_no_tokens_but_activity() {
    let seen = Seen::new(chat()).raw(20, b": k\n\n").raw(200, b": k\n\n").data(400, &t("a")).raw(430, b": k\n\n");
    assert_eq!(seen.observer.last_activity(), at(430));
    let seen = seen.raw(440, b"event: ping\ndata: {\"type\":\"ping\"}\n\n").data(460, &t("b"));
    let seen = seen.all(&[(460, &f("stop")), (460, &u(5, 2))]).clean(470);
    assert_eq!(seen.first_token, at(400));
    assert_eq!(seen.gaps.sum, ms(60));
    assert_eq!(seen.gaps.buckets, [0, 0, 1, 0, 0]);
}

#[test]
fn a_comment_line_counts_before_its_blank_line() {
    let seen = Seen::new(chat()).raw(20, b": k\n");
    assert_eq!(seen.observer.last_activity(), at(20));
    assert_eq!(seen.raw(30, b"data: {").observer.last_activity(), at(20));
}

#[test]
fn c06_an_event_of_3_mib_passes_and_is_read() {
    let event = format!("data: {}\n\n", k(&"x".repeat(3 << 20)));
    let mut seen = Seen::new(chat());
    for (i, frame) in event.as_bytes().chunks(4096).enumerate() {
        seen = seen.raw(i as u64, frame);
        let (left, sent) = (seen.passed.len(), (i + 1) * 4096);
        assert!(sent.min(event.len()) - left <= HELD);
        assert_eq!(seen.observer.long_event_is_out(), left > 0 && left < event.len());
        assert_eq!(seen.observer.last_activity().is_some(), left > 0);
    }
    assert_eq!(seen.passed, event.as_bytes());
    let last = (event.len() - 1) / 4096;
    assert!(seen.notes.last().is_some_and(|info| info.part == PiecePart::Last && info.visible));
    let seen = seen.ends(Ending::Left, 9999);
    assert_eq!((seen.first_visible, seen.token_events), (at(last as u64), 1));
    assert!(!seen.unparseable);
}

#[test]
fn an_event_above_the_limit_passes_unparsed_and_the_next_is_parsed() {
    for size in [100, HELD, 2 * HELD] {
        let watch = ObserverOptions { max_event: size, ..watch() };
        let mut observer = Observer::new(chat(), ResponseFormat::Events, 200, watch);
        let event = format!("data: {}\n\ndata: {}\n\n", k(&"x".repeat(size)), D);
        let mut passed = Vec::new();
        for frame in event.as_bytes().chunks(1000) {
            let frame = Bytes::copy_from_slice(frame);
            observer.frame(frame, Tick::from_millis(5), &mut |piece, _| passed.extend_from_slice(&piece));
        }
        assert_eq!(passed, event.as_bytes());
        let seen = observer.end(Ending::Clean, Tick::from_millis(6));
        assert!(seen.unparseable && seen.token_events == 0 && seen.finish.is_some(), "{size}");
    }
}

#[test]
fn c08_without_done_a_finish_reason_and_a_clean_end_complete() {
    let seen = Seen::new(chat()).all(&[(10, R), (20, &t("a")), (30, &f("stop")), (40, &u(5, 1))]);
    assert!(seen.observer.is_finished());
    let seen = seen.clean(90);
    assert_eq!((seen.finish, seen.output, seen.source), (at(30), Tokens(1), TokenSource::Usage));
}

#[test]
fn c09_a_clean_end_before_any_finish_reason_is_no_finish() {
    let seen = Seen::new(chat()).all(&[(10, R), (20, &t("a")), (30, &t("b"))]).clean(40);
    assert_eq!((seen.finish, seen.output, seen.source), (None, Tokens(2), TokenSource::Events));
    let done = Seen::new(chat()).all(&[(10, R), (20, &t("a")), (30, D)]).clean(40);
    assert_eq!((done.finish, done.has_finish_reason), (at(30), false));
}

#[test]
fn c09_of_two_choices_one_finished_and_a_clean_end() {
    let two = || Seen::new(ResponseExpectation { choices: 2, ..chat() }).all(&[(20, &t("a")), (30, &f("stop"))]);
    assert!(!two().observer.is_finished());
    assert_eq!(two().clean(40).finish, at(40));
    assert_eq!(two().ends(Ending::Broken, 40).finish, None);
    let second = of_choice(1, r#"{"content":"x"}"#, "null");
    assert_eq!(two().data(35, &second).clean(40).finish, None);
}

#[test]
fn c10_an_error_inside_a_200() {
    let error = r#"{"error":{"message":"m","type":"x","code":504}}"#;
    let first = Seen::new(chat()).all(&[(10, error), (11, D)]);
    assert_eq!(first.observer.error(), Some(InBandError { code: 504, after_first_token: false }));
    assert_eq!(first.notes[0].error.map(|error| error.code), Some(504));
    let first = first.clean(12);
    assert_eq!((first.finish, first.first_token), (None, None));
    let late = Seen::new(chat()).all(&[(10, &t("a")), (20, r#"{"error":{"code":"400"}}"#), (21, D)]).clean(22);
    assert_eq!(late.error, Some(InBandError { code: 400, after_first_token: true }));
    assert_eq!(late.finish, None);
}

#[test]
fn the_first_of_two_errors_counts_unless_the_second_follows_text() {
    let of = |code: u16| format!(r#"{{"error":{{"message":"m","code":{code}}}}}"#);
    let told = |events: &[(u64, &str)]| Seen::new(chat()).all(events).clean(90).error;
    let early = |code| Some(InBandError { code, after_first_token: false });
    assert_eq!(told(&[(10, &of(503)), (20, &of(400))]), early(503));
    assert_eq!(told(&[(10, &of(400)), (20, &of(503))]), early(400));
    let late = |code| Some(InBandError { code, after_first_token: true });
    assert_eq!(told(&[(10, &of(400)), (20, &t("a")), (30, &of(503)), (40, &of(500))]), late(503));
}

#[test]
fn usage_inside_a_choice_belongs_to_it_unless_the_event_has_its_own() {
    let told = |index: u64, tokens: u64| {
        format!(r#"{{"index":{index},"delta":{{}},"finish_reason":"stop","usage":{{"completion_tokens":{tokens}}}}}"#)
    };
    let event = |choices: &[String]| format!(r#"{{"choices":[{}]}}"#, choices.join(","));
    let both = of_both();
    let seen = |last: &[&str]| {
        let mut seen = Seen::new(ResponseExpectation { choices: 2, ..chat() }).data(10, &both).data(20, &both);
        for event in last {
            seen = seen.data(30, event);
        }
        let seen = seen.data(40, D).clean(50);
        (seen.output, seen.source)
    };
    assert_eq!(seen(&[&event(&[told(0, 11)]), &event(&[told(1, 7)])]), (Tokens(18), TokenSource::Usage));
    assert_eq!(
        seen(&[&event(&[told(0, 11), told(1, 7)])]),
        (Tokens(4), TokenSource::Events),
        "whose it is is not clear"
    );
}

/// A token of each of two choices.
fn of_both() -> String {
    let token = |index| format!(r#"{{"index":{index},"delta":{{"content":"x"}},"finish_reason":null}}"#);
    format!(r#"{{"choices":[{},{}]}}"#, token(0), token(1))
}

#[test]
fn c10_all_shapes_of_errors() {
    let code = |dialect, raw: &str| {
        let seen = Seen::new(ResponseExpectation::stream(dialect, Tick::ZERO)).raw(1, raw.as_bytes());
        seen.observer.error().map(|error| error.code)
    };
    let cases = [
        (
            Dialect::Chat,
            "event: error\ndata: {\"message\":\"m\",\"type\":\"BadRequestError\",\"code\":400}\n\n",
            Some(400),
        ),
        (Dialect::Chat, "event: error\ndata: something broke\n\n", Some(500)),
        (Dialect::Chat, "event: error\n: only a comment\n\n", Some(500)),
        (Dialect::Chat, "event: error\n\n", Some(500)),
        (Dialect::Chat, "event: ping\n: only a comment\n\n", None),
        (Dialect::Chat, "data: {\"error\":\"text\"}\n\n", Some(500)),
        (Dialect::Chat, "data: {\"error\":null,\"choices\":[]}\n\n", None),
        (Dialect::Chat, "data: {\"error\":{\"http_status_code\":422}}\n\n", Some(422)),
        (Dialect::Chat, "data: {\"error\":{\"code\":\"content_filter\",\"status\":\"400\"}}\n\n", Some(400)),
        (Dialect::Chat, "data: {\"choices\":[{\"error\":{\"code\":502}}]}\n\n", Some(502)),
        (Dialect::Completions, "error: {\"code\":400}\n\n", Some(400)),
        (Dialect::Responses, "error:{\"code\":\"503\"}\n\n", Some(503)),
        (Dialect::Messages, "id: 1\nerror: {\"type\":\"overloaded_error\"}\n\n", Some(529)),
        (Dialect::Chat, "data: {\"object\":\"error\",\"type\":\"BadRequestError\",\"code\":422}\n\n", Some(422)),
        (Dialect::Chat, "data: {\"error\":{\"type\":\"Service Unavailable\"}}\n\n", Some(503)),
        (
            Dialect::Messages,
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n",
            Some(529),
        ),
        (Dialect::Messages, "data: {\"type\":\"error\"}\n\n", Some(500)),
        (Dialect::Responses, "data: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\"}\n\n", Some(429)),
        (
            Dialect::Responses,
            "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}\n\n",
            Some(500),
        ),
        (Dialect::Responses, "data: {\"type\":\"response.failed\",\"response\":{\"error\":null}}\n\n", Some(500)),
        (Dialect::Responses, "data: {\"type\":\"response.created\",\"response\":{\"error\":null}}\n\n", None),
    ];
    for (dialect, raw, expected) in cases {
        assert_eq!(code(dialect, raw), expected, "{raw}");
    }
}

#[test]
fn an_error_after_the_finish_keeps_the_finish() {
    let seen =
        Seen::new(chat()).all(&[(10, &t("a")), (20, &f("stop")), (30, r#"{"error":{"message":"m"}}"#)]).clean(40);
    assert_eq!((seen.finish, seen.error.map(|error| error.code)), (at(20), Some(500)));
}

#[test]
fn an_empty_error_is_ignored() {
    let code = |error: &str| {
        let event = format!("{},\"error\":{error}}}", &t("a")[..t("a").len() - 1]);
        let of_choice = t("a").replace("\"finish_reason\"", &format!("\"error\":{error},\"finish_reason\""));
        let all = [event, of_choice].map(|event| {
            let seen = Seen::new(chat()).data(1, &event);
            assert!(seen.observer.has_token(), "{event}");
            assert_eq!(json(not_streamed(Dialect::Chat), &event).error, seen.observer.error(), "{event}");
            seen.observer.error().map(|error| error.code)
        });
        assert_eq!(all[0], all[1], "{error}");
        all[0]
    };
    for nothing in ["null", "\"\"", "false", "{}", "{ }", "[]", "[ ]", "0", "-0", "0.0", "0e9"] {
        assert_eq!(code(nothing), None, "{nothing}");
    }
    for something in
        ["\"x\"", "\" \"", r#""\ud83d""#, "true", "{\"a\":null}", "[0]", "[{}]", "[[]]", "1", "-1", "1e999"]
    {
        assert_eq!(code(something), Some(500), "{something}");
    }
    let response = |error: &str| {
        let data = format!(r#"{{"type":"response.in_progress","response":{{"error":{error}}}}}"#);
        Seen::new(ResponseExpectation::stream(Dialect::Responses, Tick::ZERO)).data(1, &data).observer.error()
    };
    assert!(response("{}").is_none() && response("\"\"").is_none() && response("\"x\"").is_some());
    // So is one that stands where nothing of a dialect does: the engine meant something by it.
    let half = |event: &str| {
        let events = [(10, R), (20, &t("a")), (30, event), (40, D)];
        let seen = Seen::new(chat()).all(&events).clean(50);
        (seen.error, seen.finish)
    };
    let failed = (Some(InBandError { code: 500, after_first_token: true }), None);
    for nothing in ["\"\"", "false", "{}", "[]", "0"] {
        assert_eq!(half(&format!("{{\"error\":{nothing}}}")), failed, "{nothing}");
        assert_eq!(half(&format!("{{\"id\":\"c1\",\"error\":{nothing},\"choices\":null}}")), failed, "{nothing}");
        assert_eq!(
            json(not_streamed(Dialect::Chat), &format!("{{\"error\":{nothing}}}")).error.map(|e| e.code),
            Some(500)
        );
    }
    assert_eq!(half(r#"{"error":null}"#).0, None);
    assert_eq!(half(r#"{"type":"info","error":false}"#).0, None, "a type says what it is");
    let lines = |lines: &str| Seen::new(chat()).raw(1, lines.as_bytes()).observer.error().map(|error| error.code);
    assert_eq!(lines("error: {}\n\n"), Some(500));
    assert_eq!((lines("error: null\n\n"), lines("error: \n\n")), (None, None));
    assert_eq!(lines(&format!("error: {{}}\ndata: {}\n\n", t("a"))), None, "beside a token it says nothing");
    // What is called an error is one, whatever it says.
    let named =
        Seen::new(ResponseExpectation::stream(Dialect::Messages, Tick::ZERO)).data(1, r#"{"type":"error","error":{}}"#);
    assert_eq!(named.observer.error().map(|error| error.code), Some(500));
}

#[test]
fn an_engine_that_gives_up_by_a_finish_reason_has_failed() {
    let reasons = [("abort", 500), ("error", 500), ("insufficient_system_resource", 503)];
    for (reason, code) in reasons {
        let first = Seen::new(chat()).all(&[(10, R), (20, &f(reason)), (30, D)]);
        assert_eq!(first.notes[1].error, Some(InBandError { code, after_first_token: false }));
        assert!(!first.observer.is_finished() && first.clean(40).finish.is_none());
        let late = Seen::new(chat()).all(&[(10, &t("a")), (20, &f(reason)), (21, &u(5, 1)), (30, D)]).clean(40);
        assert_eq!((late.error, late.finish), (Some(InBandError { code, after_first_token: true }), None));
        let text = r#"{"choices":[{"text":"","finish_reason":"REASON"}]}"#.replace("REASON", reason);
        let stop = r#"{"type":"message_delta","delta":{"stop_reason":"REASON"}}"#.replace("REASON", reason);
        let response = r#"{"type":"response.incomplete","response":{"incomplete_details":{"reason":"REASON"}}}"#
            .replace("REASON", reason);
        let message = r#"{"type":"message","content":[{"type":"text","text":"a"}],"stop_reason":"REASON"}"#
            .replace("REASON", reason);
        let incomplete =
            r#"{"status":"incomplete","incomplete_details":{"reason":"REASON"}}"#.replace("REASON", reason);
        for (dialect, event, body) in [
            (Dialect::Chat, &f(reason), &f(reason)),
            (Dialect::Completions, &text, &text),
            (Dialect::Messages, &stop, &message),
            (Dialect::Responses, &response, &incomplete),
        ] {
            let seen = Seen::new(ResponseExpectation::stream(dialect, Tick::ZERO)).data(5, event);
            assert_eq!(seen.observer.error().map(|error| error.code), Some(code), "{event}");
            let whole = json(not_streamed(dialect), body);
            assert_eq!((whole.error.map(|error| error.code), whole.finish), (Some(code), None), "{body}");
        }
    }
    let said = of_choice(0, "{}", "\"error\"").replace("\"delta\"", "\"error\":{\"code\":429},\"delta\"");
    assert_eq!(Seen::new(chat()).data(1, &said).observer.error().map(|error| error.code), Some(429));
    for other in ["aborted", "errors", "stop", "content_filter"] {
        assert!(Seen::new(chat()).data(1, &f(other)).observer.is_finished(), "{other}");
    }
}

#[test]
fn after_the_finish_of_a_choice_only_text_is_a_token() {
    let finished = || Seen::new(chat()).all(&[(10, &t("a")), (50, &t("b")), (60, &f("stop"))]);
    let logprobs = of_choice(0, r#"{"content":""}"#, "null");
    let logprobs = logprobs.replace("\"delta\"", r#""logprobs":{"content":[{"token":"c"}]},"delta""#);
    for late in [with(R, 9, 3), with(&delta("{}"), 9, 3), logprobs] {
        let seen = finished().data(1260, &late);
        assert!(!seen.notes[3].token && seen.observer.is_finished(), "{late}");
        assert_eq!(seen.notes[3].usage == UsagePosition::WithChoice, late.contains("usage"));
        let seen = seen.ends(Ending::Broken, 1270);
        assert_eq!((seen.last_token, seen.finish, seen.gaps.stalls), (at(50), at(60), 0), "{late}");
    }
    let seen = finished().data(1260, &with(R, 9, 3)).clean(1270);
    assert_eq!((seen.output, seen.source, seen.tpot()), (Tokens(3), TokenSource::Usage, Some(ms(20))));
    // Further text continues the response, and so does usage that rises after it.
    let more = finished().all(&[(70, &t("c")), (80, &with(&t(""), 9, 5))]);
    assert!(more.notes[3].token && more.notes[4].token && !more.observer.is_finished());
    // Another choice continues meanwhile.
    let two = Seen::new(ResponseExpectation { choices: 2, ..chat() }).all(&[(10, &t("a")), (20, &f("stop"))]);
    let rise = with(&of_choice(1, "{}", "null"), 9, 2);
    assert!(two.data(30, &rise).notes[2].token);
}

#[test]
fn a_message_beside_a_delta_is_not_read() {
    let event = |first: &str, second: &str| format!(r#"{{"choices":[{{"index":0,{first},{second}}}]}}"#);
    let (message, call) = (
        r#""message":{"content":"ab"}"#,
        r#""message":{"tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]}"#,
    );
    for message in [message, call] {
        for (delta, is_token) in
            [(r#""delta":{"content":""}"#, false), (r#""delta":{}"#, false), (r#""delta":{"content":"b"}"#, true)]
        {
            for event in [event(message, delta), event(delta, message)] {
                let seen = Seen::new(chat()).all(&[(1, &event), (2, &event), (3, &f("stop"))]);
                let tokens: Vec<bool> = seen.notes.iter().map(|info| info.token).collect();
                assert_eq!(tokens, [is_token, is_token, false], "{event}");
                assert!(!seen.clean(9).has_lumps, "{event}");
            }
        }
        for none in [r#""delta":null"#, r#""x":{}"#] {
            assert!(Seen::new(chat()).data(1, &event(message, none)).notes[0].visible);
            assert!(Seen::new(chat()).data(1, &event(none, message)).notes[0].visible);
        }
        // A whole body is read completely.
        let body = json(not_streamed(Dialect::Chat), &event(message, r#""delta":{}"#));
        assert!(body.has_visible);
    }
    // Each choice has its own.
    let two = r#"{"choices":[{"index":0,"message":{"content":"a"},"delta":{}},{"index":1,"message":{"content":"b"}}]}"#;
    let seen = Seen::new(ResponseExpectation { choices: 2, ..chat() }).data(1, two).clean(9);
    assert_eq!(seen.choices.iter().map(|choice| choice.events).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn a_count_of_zero_beside_tokens_is_ignored() {
    let seen =
        Seen::new(chat()).all(&[(0, &t("a")), (80, &t("b")), (160, &t("c")), (170, &f("stop")), (171, &u(9, 0))]);
    let seen = seen.clean(180);
    assert_eq!((seen.output, seen.source, seen.usage.output), (Tokens(3), TokenSource::Events, None));
    assert_eq!((seen.tpot(), seen.usage.input, seen.plain_events()), (Some(ms(80)), Some(Tokens(9)), None));
    let nothing = Seen::new(chat()).all(&[(0, R), (10, &f("stop")), (20, &u(9, 0))]).clean(30);
    assert_eq!((nothing.output, nothing.source), (Tokens(0), TokenSource::Usage));
    // With several choices one of them says so.
    let two = || Seen::new(ResponseExpectation { choices: 2, ..chat() });
    let of = |index, tokens| with(&of_choice(index, r#"{"content":"x"}"#, "null"), 9, tokens);
    let all = [(0, of(0, 0)), (10, of(1, 1)), (90, of(0, 0)), (100, of(1, 2))];
    let seen = all.iter().fold(two(), |seen, (millis, event)| seen.data(*millis, event));
    let so_far = seen.observer.so_far(Tick::from_millis(110));
    assert_eq!(
        (so_far.output, so_far.source, so_far.choices[0].tpot()),
        (Tokens(4), TokenSource::Events, Some(ms(90)))
    );
    let told = seen.data(110, &u(9, 6)).clean(120);
    assert_eq!((told.output, told.source, told.choices[0].tokens), (Tokens(6), TokenSource::Usage, 3.0));
    let body =
        r#"{"choices":[{"message":{"content":"nine byte"},"finish_reason":"stop"}],"usage":{"completion_tokens":0}}"#;
    assert_eq!((json(not_streamed(Dialect::Chat), body).output, json(chat(), body).output), (Tokens(3), Tokens(3)));
}

#[test]
fn c13_no_choices_are_no_token_and_no_panic() {
    let usage = format!("{{{}}}", counts(5, 1));
    let preamble = r#"{"choices":[],"prompt_filter_results":[{"index":0}]}"#;
    let all = [(50, preamble), (60, R), (300, &*t("a")), (310, &*f("stop")), (320, &*usage), (330, D)];
    let seen = Seen::new(chat()).all(&all);
    assert_eq!(seen.notes[0].usage, UsagePosition::None);
    assert_eq!(seen.notes[4].usage, UsagePosition::Alone);
    let seen = seen.clean(340);
    assert_eq!((seen.first_token, seen.usage.input, seen.output), (at(300), Some(Tokens(5)), Tokens(1)));
}

#[test]
fn c14_cumulative_usage_is_never_summed_and_null_is_nothing() {
    let zero = with(R, 100, 0);
    let events = [zero, with(&t("a"), 100, 1), with(&t("b"), 100, 2)];
    let cut = events.iter().fold(Seen::new(chat()), |seen, event| seen.data(5, event));
    assert!(!cut.notes[0].token);
    let cut = cut.ends(Ending::Left, 9);
    assert_eq!((cut.usage.input, cut.output, cut.source), (Some(Tokens(100)), Tokens(2), TokenSource::Usage));
    let null = format!("{},\"usage\":null}}", &t("c")[..t("c").len() - 1]);
    let rest = [with(&t("c"), 100, 3), null, f("stop"), u(100, 3), D.to_owned()];
    let whole = events.iter().chain(&rest).fold(Seen::new(chat()), |seen, event| seen.data(5, event)).clean(9);
    assert_eq!((whole.usage.input, whole.output, whole.token_events), (Some(Tokens(100)), Tokens(3), 4));
}

#[test]
fn c16_neither_role_nor_empty_content_is_a_token() {
    let seen = Seen::new(chat()).all(&[(10, R), (100, &t("")), (700, &t("a"))]).ends(Ending::Left, 800);
    assert_eq!(seen.ttft(), Some(ms(700)));
}

#[test]
fn c17_reasoning_has_a_clock_of_its_own() {
    for field in ["reasoning_content", "reasoning"] {
        let g = delta(&format!(r#"{{"{field}":"hm"}}"#));
        let seen = Seen::new(chat()).all(&[(200, &g), (230, &g), (2000, &t("a"))]).ends(Ending::Left, 2100);
        assert_eq!((seen.ttft(), seen.ttfvt()), (Some(ms(200)), Some(ms(2000))), "{field}");
        let only = Seen::new(chat()).all(&[(200, &g), (230, &f("length"))]).clean(240);
        assert_eq!((only.first_visible, only.finish, only.cut_by_length), (None, at(230), true));
        assert!(only.token_events > 0 && !only.has_visible);
    }
}

#[test]
fn c18_a_tool_call_is_a_visible_token() {
    let all = [(10, R), (300, &*k("{")), (340, &*k("}")), (340, &*f("tool_calls")), (350, &*u(9, 6)), (350, D)];
    let seen = Seen::new(chat()).all(&all).clean(360);
    assert_eq!((seen.ttfvt(), seen.output), (Some(ms(300)), Tokens(6)));
    let visible = |delta_text: &str| Seen::new(chat()).data(1, &delta(delta_text)).notes[0].visible;
    for some in [
        r#"{"function_call":{"name":"f"}}"#,
        r#"{"tool_calls":[{"function":{"arguments":{"a":1}}}]}"#,
        r#"{"tool_calls":[{"type":"custom","custom":{"name":"c","input":""}}]}"#,
        r#"{"refusal":"no"}"#,
        r#"{"audio":{"id":"a","data":"UklG"}}"#,
        r#"{"audio":{"transcript":"hi"}}"#,
        r#"{"content":[{"type":"text","text":"hi"}]}"#,
    ] {
        assert!(visible(some), "{some}");
    }
    for none in [
        r#"{"tool_calls":[{"index":0,"id":"k1","function":{"name":"","arguments":""}}]}"#,
        r#"{"tool_calls":[]}"#,
        r#"{"tool_calls":[{"function":{"arguments":{}}}]}"#,
        r#"{"audio":{"id":"a","expires_at":17}}"#,
        r#"{"content":null,"refusal":null,"tool_calls":null}"#,
        r#"{"content":[{"type":"thinking","thinking":[{"type":"text","text":"hm"}]}]}"#,
    ] {
        assert!(!visible(none), "{none}");
    }
}

#[test]
fn c19_one_event_has_a_ttft_and_no_tpot() {
    let seen = Seen::new(chat()).all(&[(400, &t("all at once")), (400, &f("stop")), (400, &u(5, 20))]).clean(400);
    assert_eq!((seen.ttft(), seen.tpot(), seen.output), (Some(ms(400)), None, Tokens(20)));
}

#[test]
fn c20_tokens_per_event_do_not_change_tpot() {
    let mut seen = Seen::new(chat());
    for event in 0..10 {
        seen = seen.data(100 + 60 * event, &t("three of them"));
    }
    let seen = seen.all(&[(640, &f("stop")), (640, &u(5, 31)), (640, D)]).clean(640);
    assert_eq!(seen.tpot(), Some(ms(18)));
    assert_eq!((seen.gaps.buckets, seen.gaps.largest), (vec![0, 0, 9, 0, 0], Some(ms(60))));
}

#[test]
fn c21_tpot_and_e2e_end_with_the_tokens_and_the_finish() {
    let all = [(100, &*t("a")), (200, &*t("b")), (200, &*f("stop")), (500, &*u(5, 2)), (600, D)];
    let seen = Seen::new(chat()).all(&all).clean(5600);
    assert_eq!((seen.ttft(), seen.tpot(), seen.e2e()), (Some(ms(100)), Some(ms(100)), Some(ms(200))));
}

#[test]
fn c33_messages_usage_is_split_over_two_events() {
    let messages = |start: &str, end: &str| {
        let start = format!(r#"{{"type":"message_start","message":{{"content":[],"usage":{start}}}}}"#);
        let text = r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}"#;
        let end = format!(r#"{{"type":"message_delta","delta":{{"stop_reason":"end_turn"}},"usage":{end}}}"#);
        let all = [(100, &*start), (300, text), (310, &*end), (320, r#"{"type":"message_stop"}"#)];
        Seen::new(ResponseExpectation::stream(Dialect::Messages, Tick::ZERO)).all(&all).clean(330)
    };
    let plain = messages(r#"{"input_tokens":25,"output_tokens":1}"#, r#"{"output_tokens":15}"#);
    assert_eq!((plain.ttft(), plain.finish), (Some(ms(300)), at(320)));
    assert_eq!((plain.usage.input, plain.output), (Some(Tokens(25)), Tokens(15)));
    assert!(plain.has_finish_reason && !plain.cut_by_length);
    let late = r#"{"input_tokens":4000,"cache_creation_input_tokens":500,"output_tokens":5}"#;
    let late = messages(r#"{"input_tokens":0,"output_tokens":0}"#, late);
    assert_eq!((late.usage.input, late.output), (Some(Tokens(4500)), Tokens(5)));
}

#[test]
fn messages_events_that_are_tokens() {
    let token = |data: &str| {
        let seen = Seen::new(ResponseExpectation::stream(Dialect::Messages, Tick::ZERO)).data(1, data);
        (seen.notes[0].token, seen.notes[0].visible)
    };
    let of_delta = |delta: &str| token(&format!(r#"{{"type":"content_block_delta","index":0,"delta":{delta}}}"#));
    assert_eq!(of_delta(r#"{"type":"text_delta","text":"a"}"#), (true, true));
    assert_eq!(of_delta(r#"{"type":"input_json_delta","partial_json":"{"}"#), (true, true));
    assert_eq!(of_delta(r#"{"type":"thinking_delta","thinking":"hm"}"#), (true, false));
    assert_eq!(of_delta(r#"{"type":"signature_delta","signature":"Eq"}"#), (false, false));
    assert_eq!(of_delta(r#"{"type":"text_delta","text":""}"#), (false, false));
    let start = |block: &str| token(&format!(r#"{{"type":"content_block_start","index":0,"content_block":{block}}}"#));
    assert_eq!(start(r#"{"type":"tool_use","id":"x","name":"f","input":{}}"#), (true, true));
    assert_eq!(start(r#"{"name":"f","input":{},"type":"tool_use"}"#), (true, true));
    assert_eq!(start(r#"{"type":"text","text":"odd"}"#), (false, false));
    assert_eq!(start(r#"{"type":"server_tool_use","name":"f"}"#), (false, false));
    assert_eq!(token(r#"{"type":"ping"}"#), (false, false));
}

#[test]
fn the_event_line_is_the_fallback_for_the_type() {
    let named = Seen::new(ResponseExpectation::stream(Dialect::Messages, Tick::ZERO))
        .raw(5, b"event: content_block_delta\ndata: {\"delta\":{\"text\":\"a\"}}\n\n")
        .raw(6, b"event: message_stop\ndata: {}\n\n")
        .clean(7);
    assert_eq!((named.first_token, named.finish), (at(5), at(6)));
    let lied = b"event: message_stop\ndata: {\"type\":\"ping\"}\n\n";
    assert_eq!(
        Seen::new(ResponseExpectation::stream(Dialect::Messages, Tick::ZERO)).raw(6, lied).clean(7).finish,
        None
    );
}

#[test]
fn responses_events_that_are_tokens_and_the_end() {
    let responses = || Seen::new(ResponseExpectation::stream(Dialect::Responses, Tick::ZERO));
    let info = |data: &str| responses().data(1, data).notes[0];
    let of_kind = |kind: &str| info(&format!(r#"{{"delta":"x","sequence_number":3,"type":"{kind}"}}"#));
    assert!(of_kind("response.output_text.delta").visible);
    assert!(of_kind("response.function_call_arguments.delta").visible);
    assert!(of_kind("response.refusal.delta").visible);
    for reasoning in ["response.reasoning_text.delta", "response.reasoning_summary_text.delta"] {
        let info = of_kind(reasoning);
        assert!(info.token && !info.visible);
    }
    assert!(!of_kind("response.output_text.done").token);
    let added = |item: &str| info(&format!(r#"{{"type":"response.output_item.added","item":{item}}}"#));
    assert!(added(r#"{"type":"function_call","name":"f","arguments":""}"#).visible);
    assert!(!added(r#"{"type":"function_call","name":""}"#).token);
    assert!(!added(r#"{"type":"message","content":[]}"#).token);

    let end = |kind: &str, rest: &str| {
        let usage = r#""usage":{"input_tokens":9,"output_tokens":4,"output_tokens_details":{"reasoning_tokens":1}}"#;
        let data = format!(r#"{{"type":"{kind}","sequence_number":8,"response":{{{rest}{usage}}}}}"#);
        responses().data(20, &data)
    };
    let completed = end("response.completed", r#""status":"completed","#);
    assert_eq!(completed.observer.last_sequence_number(), Some(8));
    let completed = completed.clean(30);
    assert_eq!((completed.finish, completed.output, completed.cut_by_length), (at(20), Tokens(4), false));
    assert_eq!(completed.usage.reasoning, Some(Tokens(1)));
    let cut = end("response.incomplete", r#""incomplete_details":{"reason":"max_output_tokens"},"#).clean(30);
    assert!(cut.cut_by_length && cut.finish == at(20));
    let filtered = end("response.incomplete", r#""incomplete_details":{"reason":"content_filter"},"#).clean(30);
    assert!(!filtered.cut_by_length && filtered.finish == at(20));
}

#[test]
fn a_finish_is_undone_by_a_further_token_or_a_new_choice() {
    let finished = || Seen::new(chat()).all(&[(10, &t("a")), (20, &f("stop"))]);
    assert!(finished().observer.is_finished());
    let more = finished().data(30, &t("b"));
    assert!(!more.observer.is_finished() && !more.notes[2].finished);
    assert_eq!(more.all(&[(40, &f("stop"))]).clean(50).finish, at(40));
    assert_eq!(finished().data(30, &t("b")).clean(50).finish, None);
    let other = finished().data(30, &of_choice(1, r#"{"role":"assistant"}"#, "null"));
    assert!(!other.observer.is_finished());
    assert_eq!(other.data(40, &of_choice(1, "{}", "\"stop\"")).clean(50).finish, at(40));
}

#[test]
fn usage_rises_are_token_events_but_never_visible() {
    let all = [
        (10, with(R, 9, 1)),
        (20, with(&t("a"), 9, 2)),
        (30, with(&t(""), 9, 3)),
        (40, with(&t(""), 9, 3)),
        (50, with(&t(""), 9, 2)),
        (60, with(&t(""), 9, 3)),
        (70, with(&f("stop"), 9, 5)),
        (80, u(9, 7)),
    ];
    let seen = all.iter().fold(Seen::new(chat()), |seen, (millis, event)| seen.data(*millis, event));
    let tokens: Vec<bool> = seen.notes.iter().map(|info| info.token).collect();
    assert_eq!(tokens, [true, true, true, false, false, false, true, false]);
    let seen = seen.clean(90);
    assert_eq!((seen.first_token, seen.first_visible, seen.last_token), (at(10), at(20), at(70)));
    assert_eq!((seen.finish, seen.output), (at(70), Tokens(7)));
    // The first value, on the finish event, is 0.
    let first = Seen::new(chat()).data(10, &with(&f("stop"), 9, 5)).clean(20);
    assert_eq!((first.token_events, first.finish, first.output), (0, at(10), Tokens(5)));
}

#[test]
fn logprobs_beside_empty_text_are_a_token_event() {
    let with_logprobs = |logprobs: &str| {
        let choice = format!(r#"{{"index":0,"delta":{{"content":""}},"logprobs":{logprobs},"finish_reason":null}}"#);
        Seen::new(chat()).data(1, &format!(r#"{{"choices":[{choice}]}}"#)).notes[0]
    };
    let some = with_logprobs(r#"{"content":[{"token":"a","logprob":-0.1,"top_logprobs":[]}]}"#);
    assert!(some.token && !some.visible);
    assert!(!with_logprobs(r#"{"content":[]}"#).token);
    assert!(!with_logprobs("null").token);
    let old = r#"{"choices":[{"text":"","logprobs":{"tokens":["a"],"token_logprobs":[-1.5]}}]}"#;
    assert!(Seen::new(ResponseExpectation::stream(Dialect::Completions, Tick::ZERO)).data(1, old).notes[0].token);
}

#[test]
fn c76_an_error_without_an_error_around_it() {
    let code = |dialect, data: &str| {
        let seen = Seen::new(ResponseExpectation::stream(dialect, Tick::ZERO)).data(1, data);
        seen.observer.error().map(|error| error.code)
    };
    use Dialect::{Chat, Completions, Messages, Responses};
    for dialect in [Chat, Completions, Messages, Responses] {
        for (data, expected) in [
            (r#"{"detail":"Internal Server Error"}"#, Some(500)),
            (r#"{"detail":[{"loc":["body"],"msg":"m"}],"status":422}"#, Some(422)),
            (r#"{"detail":{"a":1}}"#, Some(500)),
            (r#"{"message":"worker died","type":"InternalServerError","code":500}"#, Some(500)),
            (r#"{"type":"overloaded_error","message":"m"}"#, Some(529)),
            (r#"{"message":"m","type":"whatever","status_code":"503"}"#, Some(503)),
            (r#"{"error_code":429}"#, Some(429)),
            (r#"{"error_code":"rate_limit_exceeded","choices":null}"#, Some(429)),
            (r#"{"message":"m","id":"c1","object":"x","usage":null}"#, Some(500)),
            (r#"{"errors":[{"message":"m"}]}"#, Some(500)),
            (r#"{"errors":{"model":["m"]},"status":422,"title":"t"}"#, Some(422)),
            (r#"{"exception":"RuntimeError: CUDA"}"#, Some(500)),
            (r#"{"error_message":"m","code":"503"}"#, Some(503)),
            (r#"{"error_msg":"m","error_code":17}"#, Some(500)),
            (r#"{"timestamp":1,"status":503,"error":"","path":"/v1"}"#, Some(503)),
            (r#"{"errors":[],"exception":null,"error_message":""}"#, None),
            (r#"{"errors":[{"message":"m"}],"choices":[]}"#, None),
            (r#"{"message":""}"#, None),
            (r#"{"detail":null,"message":null,"error_code":null}"#, None),
            (r#"{"detail":[],"error_code":0}"#, None),
            (r#"{"detail":"d","choices":[]}"#, None),
            (r#"{"message":"m","usage":{"completion_tokens":1}}"#, None),
            (r#"{"message":"m","delta":{}}"#, None),
            (r#"{"type":"ping","message":"m"}"#, None),
            (r#"{"data":{"message":"m"}}"#, None),
            (r#"{"status":"ok","code":200}"#, None),
            ("[\"message\"]", None),
        ] {
            assert_eq!(code(dialect, data), expected, "{dialect:?} {data}");
        }
    }
    let named = "event: message_start\ndata: {\"message\":\"m\"}\n\n";
    assert_eq!(
        Seen::new(ResponseExpectation::stream(Messages, Tick::ZERO)).raw(1, named.as_bytes()).observer.error(),
        None
    );
    let plain =
        Seen::new(ResponseExpectation::stream(Dialect::Plain, Tick::ZERO)).data(1, r#"{"message":"m","errors":["m"]}"#);
    assert_eq!(plain.observer.error(), None, "what such paths answer is theirs");

    let half = [(10, R), (20, &t("a")), (30, &t("b")), (40, r#"{"detail":"Internal Server Error"}"#), (50, D)];
    let seen = Seen::new(chat()).all(&half).clean(60);
    assert_eq!((seen.error, seen.finish), (Some(InBandError { code: 500, after_first_token: true }), None));
    for (body, expected) in [
        (r#"{"detail":"m"}"#, Some(500)),
        (r#"{"message":"m","code":"503"}"#, Some(503)),
        (r#"{"message":"m","choices":[]}"#, None),
    ] {
        assert_eq!(json(not_streamed(Dialect::Chat), body).error.map(|error| error.code), expected, "{body}");
    }
    let response = r#"{"object":"response","status":"completed","output":[],"error":null,"metadata":{"message":"m"}}"#;
    assert_eq!(json(not_streamed(Dialect::Responses), response).error, None);
}

#[test]
fn c76_a_shape_without_a_message_does_not_hide_one() {
    let templates = std::sync::Arc::new(TemplateCache::new());
    let error_in = |data: &str| {
        let mut seen = Seen::new(chat());
        seen.observer.use_templates(&templates);
        seen.data(1, data).observer.error().map(|error| error.code)
    };
    for _ in 0..3 {
        assert_eq!(error_in(r#"{"message":"","detail":"","a":"b"}"#), None);
        assert_eq!(error_in(r#"{"message":"m","detail":"","a":"b"}"#), Some(500));
        assert_eq!(error_in(r#"{"message":"","detail":"d","a":"b"}"#), Some(500));
        assert_eq!(error_in(r#"{"type":"info","message":"m"}"#), None);
        assert_eq!(error_in(r#"{"type":"Error","message":"m"}"#), Some(500));
    }
}

#[test]
fn c77_the_type_of_a_part_says_whether_its_text_is_visible() {
    let part = |part: &str| {
        let info = Seen::new(chat()).data(1, &delta(&format!(r#"{{"content":[{part}]}}"#))).notes[0];
        (info.token, info.visible)
    };
    for reasoning in [
        r#"{"type":"reasoning","summary":[{"type":"summary_text","text":"We need"}]}"#,
        r#"{"summary":[{"text":"We need","type":"summary_text"}],"type":"reasoning"}"#,
        r#"{"type":"thinking","thinking":[{"type":"text","text":"We need"}]}"#,
        r#"{"type":"thinking","thinking":"We need"}"#,
        r#"{"type":"reasoning","text":"We need"}"#,
        r#"{"text":"We need","type":"reasoning"}"#,
        r#"{"type":"reasoning","content":[{"type":"reasoning_text","text":"We need"}]}"#,
        r#"{"type":"reasoning","reasoning":"We need"}"#,
    ] {
        assert_eq!(part(reasoning), (true, false), "{reasoning}");
    }
    for visible in [
        r#"{"type":"text","text":"We need"}"#,
        r#"{"text":"We need","type":"output_text"}"#,
        r#"{"type":"refusal","refusal":"no"}"#,
        r#"{"text":"We need"}"#,
        r#"{"type":"reasoning","text":"a"},{"type":"text","text":"b"}"#,
        r#"{"type":"text","text":"b"},{"text":"a","type":"thinking"}"#,
    ] {
        assert_eq!(part(visible), (true, true), "{visible}");
    }
    for nothing in [
        r#"{"type":"reasoning","summary":[]}"#,
        r#"{"type":"reasoning","summary":[{"type":"summary_text","text":""}]}"#,
        r#"{"type":"thinking","thinking":[]}"#,
        r#"{"type":"text","text":""}"#,
        r#"{"type":"reasoning"}"#,
    ] {
        assert_eq!(part(nothing), (false, false), "{nothing}");
    }
    let thought =
        |kind: &str| format!(r#"{{"content":[{{"type":"{kind}","{kind}":[{{"type":"text","text":"x"}}]}}]}}"#);
    for kind in ["reasoning", "thinking"] {
        let text = delta(r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#);
        let mut seen = Seen::new(chat());
        for at in 1..=8 {
            seen = seen.data(at * 100, &delta(&thought(kind)));
        }
        let seen = seen.all(&[(880, &text), (880, &f("stop")), (880, &u(9, 40)), (880, D)]).clean(880);
        assert_eq!((seen.first_token, seen.first_visible, seen.tpot()), (at(100), at(880), Some(ms(20))));
    }
    let body = r#"{"choices":[{"message":{"content":[{"type":"reasoning","text":"12345678"},{"type":"text","text":"1234"}]}}]}"#;
    let whole = json(not_streamed(Dialect::Chat), body);
    assert_eq!((whole.output, whole.has_visible), (Tokens(1), true), "reasoning is no visible text");
    let hidden = r#"{"choices":[{"message":{"content":[{"type":"thinking","thinking":"12345678"}]}}]}"#;
    let whole = json(not_streamed(Dialect::Chat), hidden);
    assert_eq!((whole.has_output, whole.has_visible), (true, false));
}

#[test]
fn c77_a_template_knows_the_type_of_its_part() {
    let templates = std::sync::Arc::new(TemplateCache::new());
    for _ in 0..3 {
        for (kind, visible) in [("text", true), ("reasoning", false), ("thoughts", false), ("output", true)] {
            let mut seen = Seen::new(chat());
            seen.observer.use_templates(&templates);
            let event = delta(&format!(r#"{{"content":[{{"type":"{kind}","text":"abc"}}]}}"#));
            let seen = seen.data(1, &event).data(2, &event);
            assert!(seen.notes.iter().all(|info| info.token && info.visible == visible), "{kind}");
        }
    }
}

#[test]
fn c78_paths_without_output_report_their_input_in_several_forms() {
    let usage = |body: &str| {
        let seen = json(not_streamed(Dialect::Plain), body);
        (seen.usage.input.map(|tokens| tokens.0), seen.output.0)
    };
    for (body, expected) in [
        (r#"{"results":[],"usage":{"total_tokens":4062}}"#, (Some(4062), 0)),
        (r#"{"usage":{"total_tokens":4062},"results":[]}"#, (Some(4062), 0)),
        (r#"{"usage":{"prompt_tokens":9,"total_tokens":11}}"#, (Some(9), 0)),
        (r#"{"usage":{"prompt_tokens":0,"total_tokens":11}}"#, (Some(11), 0)),
        (r#"{"usage":{"prompt_tokens":0,"completion_tokens":11,"total_tokens":11}}"#, (Some(0), 11)),
        (r#"{"usage":{"completion_tokens":2,"total_tokens":11}}"#, (Some(9), 2)),
        (r#"{"usage":{"prompt_tokens":9,"completion_tokens":0,"total_tokens":9}}"#, (Some(9), 0)),
        (r#"{"meta":{"billed_units":{"input_tokens":7,"search_units":1}}}"#, (Some(7), 0)),
        (r#"{"meta":{"tokens":{"input_tokens":8,"output_tokens":1},"billed_units":{"input_tokens":7}}}"#, (Some(8), 1)),
        (r#"{"meta":{"billed_units":{"input_tokens":7},"tokens":{"input_tokens":8}}}"#, (Some(8), 0)),
        (r#"{"meta":{"billed_units":{"search_units":1}},"usage":{"total_tokens":5}}"#, (Some(5), 0)),
        (r#"{"usage":{"total_tokens":100000001}}"#, (None, 0)),
        (r#"{"usage":null,"meta":null}"#, (None, 0)),
    ] {
        assert_eq!(usage(body), expected, "{body}");
    }
    let chat = json(not_streamed(Dialect::Chat), r#"{"choices":[],"usage":{"total_tokens":50}}"#);
    assert_eq!(chat.usage.input, None, "a path that generates says which is which");
}

#[test]
fn c79_usage_in_a_stream_of_another_path() {
    let stream = |events: &[&str]| {
        let mut seen = Seen::of(ResponseExpectation::stream(Dialect::Plain, Tick::ZERO), ResponseFormat::Aside);
        for event in events {
            seen = seen.data(5, event);
        }
        let sent: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        assert_eq!(seen.passed, sent.as_bytes());
        seen.clean(9)
    };
    let chunk = r#"{"object":"transcription.chunk","choices":[{"delta":{"content":"hi"}}]}"#;
    let last = r#"{"choices":[],"usage":{"prompt_tokens":1500,"completion_tokens":400}}"#;
    let seen = stream(&[chunk, chunk, chunk, last, D]);
    assert_eq!((seen.usage.input, seen.output, seen.finish), (Some(Tokens(1500)), Tokens(400), at(5)));
    assert!(!seen.streamed && seen.first_token.is_none(), "it is no stream of tokens");
    let done = r#"{"type":"transcript.text.done","text":"hi","usage":{"type":"tokens","input_tokens":14,"output_tokens":45,"total_tokens":59}}"#;
    let seen = stream(&[r#"{"type":"transcript.text.delta","delta":"hi"}"#, done]);
    assert_eq!((seen.usage.input, seen.output), (Some(Tokens(14)), Tokens(45)));
    let by_the_minute = stream(&[r#"{"type":"transcript.text.done","usage":{"type":"duration","seconds":9}}"#]);
    assert_eq!((by_the_minute.usage.input, by_the_minute.output), (None, Tokens::ZERO));
    let failed = stream(&[chunk, r#"{"error":{"code":503}}"#]);
    assert_eq!(failed.error.map(|error| error.code), Some(503));
    // Bytes pass as they come, also within an event.
    let halves = Seen::of(ResponseExpectation::stream(Dialect::Plain, Tick::ZERO), ResponseFormat::Aside)
        .raw(1, b"data: {\"usage\":");
    assert_eq!(halves.passed, b"data: {\"usage\":");
    let seen = halves.raw(2, b"{\"total_tokens\":7}}").clean(3);
    assert_eq!(seen.usage.input, Some(Tokens(7)));
}

#[test]
fn c87_a_stop_reason_and_a_clean_end_complete_a_message() {
    let text = r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi"}}"#;
    let stop = r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}"#;
    let open = r#"{"type":"message_delta","delta":{"stop_reason":null},"usage":{"output_tokens":5}}"#;
    let ends = |events: &[(u64, &str)], ending| {
        let seen = Seen::new(ResponseExpectation::stream(Dialect::Messages, Tick::ZERO)).all(events);
        assert!(!seen.observer.is_finished(), "not before the end");
        let seen = seen.ends(ending, 50);
        (seen.finish, seen.has_finish_reason)
    };
    assert_eq!(ends(&[(10, text), (20, stop)], Ending::Clean), (at(50), true));
    assert_eq!(ends(&[(20, stop)], Ending::Clean), (at(50), true));
    assert_eq!(ends(&[(10, text), (20, stop), (30, r#"{"type":"ping"}"#)], Ending::Clean), (at(50), true));
    assert_eq!(ends(&[(10, text), (20, stop)], Ending::Broken), (None, true));
    assert_eq!(ends(&[(10, stop), (20, text)], Ending::Clean), (None, true), "a further token came");
    assert_eq!(ends(&[(10, text), (20, open)], Ending::Clean), (None, false));
    assert_eq!(ends(&[(10, text), (20, stop), (30, r#"{"type":"error"}"#)], Ending::Clean), (None, true));
}

#[test]
fn c89_numbers_of_python_are_read_in_answers() {
    for number in ["NaN", "Infinity", "-Infinity"] {
        let event = format!(
            r#"{{"choices":[{{"index":0,"delta":{{"content":"a"}},"logprobs":{{"content":[{{"token":"a","logprob":{number}}}]}}}}]}}"#
        );
        let seen = Seen::new(chat()).all(&[(1, &event), (2, &f("stop")), (3, D)]).clean(4);
        assert_eq!((seen.first_token, seen.token_events), (at(1), 1), "{number}");
        let body = format!(r#"{{"choices":[{{"message":{{"content":"abcd"}},"score":{number}}}]}}"#);
        let whole = json(not_streamed(Dialect::Chat), &body);
        assert_eq!((whole.unparseable, whole.output), (false, Tokens(1)), "{number}");
        let counts = format!(r#"{{"usage":{{"prompt_tokens":{number},"total_tokens":3}}}}"#);
        assert_ne!(json(not_streamed(Dialect::Plain), &counts).usage.input, Some(Tokens(u64::MAX)), "{number}");
    }
    assert!(json(not_streamed(Dialect::Chat), r#"{"choices":[],"a":Nan}"#).unparseable);
}

#[test]
fn c89_a_logprob_of_nothing_is_no_token() {
    let old = |logprobs: &str| {
        let event = format!(r#"{{"choices":[{{"index":0,"text":"","logprobs":{logprobs}}}]}}"#);
        Seen::new(ResponseExpectation::stream(Dialect::Completions, Tick::ZERO)).data(1, &event).notes[0].token
    };
    let new = |entry: &str| {
        let event =
            format!(r#"{{"choices":[{{"index":0,"delta":{{"content":""}},"logprobs":{{"content":[{entry}]}}}}]}}"#);
        Seen::new(chat()).data(1, &event).notes[0].token
    };
    assert!(!old(r#"{"tokens":[""],"token_logprobs":[null],"top_logprobs":[null],"text_offset":[0]}"#));
    assert!(!old(r#"{"tokens":["",""],"token_logprobs":[null,null]}"#));
    assert!(!old(r#"{"tokens":[],"token_logprobs":[]}"#));
    assert!(!old(r#"{"tokens":[""]}"#));
    // Half a character has no text but a probability.
    assert!(old(r#"{"tokens":[""],"token_logprobs":[-0.5]}"#));
    assert!(old(r#"{"token_logprobs":[-Infinity],"tokens":[""]}"#));
    assert!(old(r#"{"tokens":["","a"],"token_logprobs":[null,null]}"#));
    assert!(!new(r#"{"token":"","logprob":null,"bytes":[],"top_logprobs":[]}"#));
    assert!(!new(r#"{}"#));
    assert!(!new("null"));
    assert!(new(r#"{"token":"","logprob":-0.5}"#));
    assert!(new(r#"{"bytes":[97],"token":"a"}"#));
}

#[test]
fn c110_with_swallowed_tokens_the_finish_is_the_last_token() {
    let stream = |expect: ResponseExpectation, tokens: u64| {
        let events =
            [(100, &*t("a")), (120, &t("b")), (140, &t("c")), (190, &f("stop")), (190, &u(9, tokens)), (190, D)];
        Seen::new(expect).all(&events).clean(190)
    };
    // The third token without an event is the stop token; a fourth was swallowed.
    let last = |tokens| {
        let seen = stream(chat(), tokens);
        assert_eq!(seen.last_token, at(140), "the last event stays what it was");
        (seen.choices[0].last_token, seen.tpot())
    };
    assert_eq!(last(3), (at(140), Some(ms(20))));
    assert_eq!(last(4), (at(140), Some(ms(40).div_f64(3.0))));
    assert_eq!(last(6), (at(190), Some(ms(18))));
    // Tokens that events are known to carry were not swallowed.
    let dense = |tokens| stream(ResponseExpectation { tokens_per_event: 3.0, ..chat() }, tokens).choices[0].last_token;
    assert_eq!((dense(10), dense(11)), (at(140), at(190)));
    // Nothing is known of a stream that did not end or report usage.
    let open = Seen::new(chat()).all(&[(100, &t("a")), (120, &with(&t("b"), 9, 30))]).ends(Ending::Left, 200);
    assert_eq!(open.choices[0].last_token, at(120));
    let untold = Seen::new(chat()).all(&[(100, &t("a")), (120, &t("b")), (190, &f("stop"))]).clean(190);
    assert_eq!(untold.choices[0].last_token, at(120));
    // One event has no TPOT.
    let lump = Seen::new(chat()).all(&[(100, &k("{}")), (190, &f("tool_calls")), (190, &u(9, 40))]).clean(190);
    assert_eq!((lump.choices[0].last_token, lump.tpot()), (at(190), None));
}

#[test]
fn c110_of_several_choices_the_one_that_is_short_of_events_ends_with_its_finish() {
    let expect = || ResponseExpectation { choices: 2, ..chat() };
    let told = |index, tokens, reason: &str, text: &str| {
        with(&of_choice(index, &format!(r#"{{"content":"{text}"}}"#), reason), 9, tokens)
    };
    let events = [
        (100, told(0, 1, "null", "a")),
        (100, told(1, 1, "null", "a")),
        (120, told(0, 2, "null", "b")),
        (120, told(1, 2, "null", "b")),
        (150, told(0, 6, "\"stop\"", "")),
        (300, told(1, 2, "\"stop\"", "")),
    ];
    let seen = events.iter().fold(Seen::new(expect()), |seen, (at, event)| seen.data(*at, event)).clean(300);
    let last: Vec<_> = seen.choices.iter().map(|choice| choice.last_token).collect();
    // The finish event reports four more: it is a token event itself, and still two short.
    assert_eq!(last, [at(150), at(120)]);
    let total = [
        (100, of_choice(0, r#"{"content":"a"}"#, "null")),
        (110, of_choice(1, r#"{"content":"a"}"#, "null")),
        (120, of_choice(0, r#"{"content":"b"}"#, "null")),
        (130, of_choice(1, r#"{"content":"b"}"#, "null")),
        (140, of_choice(0, "{}", "\"stop\"")),
        (190, of_choice(1, "{}", "\"stop\"")),
        (191, u(9, 12)),
    ];
    let seen = total.iter().fold(Seen::new(expect()), |seen, (at, event)| seen.data(*at, event)).clean(191);
    let last: Vec<_> = seen.choices.iter().map(|choice| choice.last_token).collect();
    assert_eq!(last, [at(120), at(190)], "the one that went on for longest");
}

#[test]
fn the_info_of_a_piece_marks_the_end_of_a_choice() {
    let seen = Seen::new(chat()).all(&[(1, &t("a")), (2, &f("stop")), (3, &u(9, 1)), (4, D)]);
    let ends: Vec<bool> = seen.notes.iter().map(|info| info.ends_choice).collect();
    assert_eq!(ends, [false, true, false, false]);
}

#[test]
fn usage_only_events_add_up_if_each_follows_a_further_finish() {
    let two = ResponseExpectation { choices: 2, prompts: 2, ..chat() };
    let finish = |index| of_choice(index, "{}", "\"length\"");
    let token = |index| of_choice(index, r#"{"content":"x"}"#, "null");
    let all = [
        (1, token(0)),
        (2, token(1)),
        (3, finish(1)),
        (4, u(3, 4)),
        (5, token(0)),
        (6, finish(0)),
        (7, u(10, 5)),
        (8, D.to_owned()),
    ];
    let seen = all.iter().fold(Seen::new(two.clone()), |seen, (millis, event)| seen.data(*millis, event)).clean(9);
    assert_eq!((seen.usage.input, seen.output), (Some(Tokens(13)), Tokens(9)));
    assert_eq!(seen.choices.iter().map(|choice| choice.tokens).collect::<Vec<_>>(), [6.0, 3.0]);
    // Two choices of one prompt: the prompt counts once.
    let one = ResponseExpectation { prompts: 1, ..two };
    let seen = all.iter().fold(Seen::new(one.clone()), |seen, (millis, event)| seen.data(*millis, event)).clean(9);
    assert_eq!((seen.usage.input, seen.output), (Some(Tokens(10)), Tokens(9)));
    // Without a further finish between them, the last wins.
    let again = [token(0), finish(0), finish(1), u(3, 4), u(3, 6)];
    let seen = again.iter().fold(Seen::new(one), |seen, event| seen.data(5, event)).clean(9);
    assert_eq!((seen.usage.input, seen.output), (Some(Tokens(3)), Tokens(6)));
}

#[test]
fn usage_beside_choices_is_summed_over_them_and_each_keeps_its_own() {
    let two = ResponseExpectation { choices: 2, ..chat() };
    let of = |index, tokens| with(&of_choice(index, r#"{"content":"x"}"#, "null"), 15, tokens);
    let all = [(0, of(0, 1)), (10, of(1, 1)), (20, of(0, 5)), (60, of(1, 2))];
    let seen = all.iter().fold(Seen::new(two), |seen, (millis, event)| seen.data(*millis, event));
    let left = seen.observer.so_far(Tick::from_millis(70));
    assert_eq!((left.usage.input, left.output, left.source), (Some(Tokens(15)), Tokens(7), TokenSource::Usage));
    // The worst choice has 50 ms for one token, not 20 ms for four.
    assert_eq!(left.tpot(), Some(ms(50)));
    let whole = seen.all(&[(80, &u(15, 8))]).ends(Ending::Left, 90);
    assert_eq!((whole.output, whole.choices[0].tokens, whole.choices[1].tokens), (Tokens(8), 5.0, 2.0));
}

#[test]
fn the_first_token_is_that_of_whichever_choice_spoke_first() {
    let of = |index, delta: &str| of_choice(index, delta, "null");
    let all = [
        (100, of(1, r#"{"reasoning":"x"}"#)),
        (200, of(0, r#"{"content":"x"}"#)),
        (300, of(1, r#"{"content":"x"}"#)),
        (400, of(0, r#"{"content":"x"}"#)),
    ];
    let two = Seen::new(ResponseExpectation { choices: 2, ..chat() });
    let seen = all.iter().fold(two, |seen, (millis, event)| seen.data(*millis, event)).ends(Ending::Left, 500);
    assert_eq!((seen.first_token, seen.first_visible, seen.last_token), (at(100), at(200), at(400)));
}

#[test]
fn usage_beside_several_choices_belongs_to_the_response() {
    let both = |reason: &str, tokens| {
        let one = |index| format!(r#"{{"index":{index},"delta":{{"content":"x"}},"finish_reason":{reason}}}"#);
        with(&format!(r#"{{"choices":[{},{}]}}"#, one(0), one(1)), 15, tokens)
    };
    let all = [(10, both("null", 6)), (30, both("null", 12)), (50, both("\"stop\"", 20))];
    let two = Seen::new(ResponseExpectation { choices: 2, ..chat() });
    let seen = all.iter().fold(two, |seen, (millis, event)| seen.data(*millis, event)).clean(60);
    assert_eq!((seen.output, seen.source, seen.usage.input), (Tokens(20), TokenSource::Usage, Some(Tokens(15))));
    assert!(seen.choices.iter().all(|choice| (choice.tokens - 10.0).abs() < 1e-9));
}

#[test]
fn odd_usage_is_not_corrected_and_impossible_counts_are_ignored() {
    let odd = r#"{"choices":[],"usage":{"prompt_tokens":18446744073709551615,"completion_tokens":0,
        "total_tokens":3,"completion_tokens_details":{"reasoning_tokens":77},"prompt_tokens_details":null}}"#;
    let seen = Seen::new(chat()).all(&[(1, &t("a")), (2, &f("stop")), (3, &odd.replace('\n', ""))]).clean(4);
    assert_eq!((seen.output, seen.source), (Tokens(1), TokenSource::Events));
    assert_eq!((seen.usage.input, seen.usage.reasoning), (None, Some(Tokens(77))));
    let float = r#"{"choices":[],"usage":{"prompt_tokens":15.0,"completion_tokens":"6"}}"#;
    let seen = Seen::new(chat()).all(&[(1, &t("a")), (2, &f("stop")), (3, float)]).clean(4);
    assert_eq!((seen.usage.input, seen.source), (Some(Tokens(15)), TokenSource::Events));
}

#[test]
fn an_impossible_count_is_ignored() {
    let largest = 100_000_000;
    for impossible in [largest + 1, (1 << 32) - 1, u64::MAX] {
        let told = |usage: String| {
            let all = [(1, &*t("a")), (2, &*t("b")), (3, &*f("stop")), (4, &*usage)];
            Seen::new(chat()).all(&all).clean(5)
        };
        let usage = |input, output| {
            format!(r#"{{"choices":[],"usage":{{"prompt_tokens":{input},"completion_tokens":{output}}}}}"#)
        };
        let all = told(usage(impossible, impossible));
        assert_eq!((all.usage, all.output, all.source), (Usage::default(), Tokens(2), TokenSource::Events));
        let half = told(usage(7, impossible));
        assert_eq!((half.usage.input, half.output, half.source), (Some(Tokens(7)), Tokens(2), TokenSource::Events));
        let huge = told(usage(largest, largest));
        assert_eq!((huge.usage.input, huge.output), (Some(Tokens(largest)), Tokens(largest)));
        // Beside choices, earlier reports stay valid, and nothing rises.
        let beside = |text: &str, count| {
            format!(
                r#"{{"choices":[{{"index":0,"delta":{{"content":"{text}"}}}}],"usage":{{"prompt_tokens":7,"completion_tokens":{count}}}}}"#
            )
        };
        let all =
            [(1, &*beside("a", 1)), (2, &*beside("b", impossible)), (3, &*beside("", impossible)), (4, &*f("stop"))];
        let seen = Seen::new(chat()).all(&all).clean(5);
        assert_eq!((seen.output, seen.token_events, seen.choices[0].tokens), (Tokens(1), 2, 1.0));
        let json = |count| {
            json(
                not_streamed(Dialect::Chat),
                &format!(
                    r#"{{"choices":[{{"message":{{"content":"12345"}},"finish_reason":"stop"}}],"usage":{{"completion_tokens":{count}}}}}"#
                ),
            )
        };
        assert_eq!((json(impossible).output, json(impossible).source), (Tokens(2), TokenSource::Estimate));
        assert_eq!((json(9).output, json(9).source), (Tokens(9), TokenSource::Usage));
    }
    // A sum of possible counts must not be impossible either.
    let of = |index| with(&of_choice(index, r#"{"content":"x"}"#, "\"stop\""), 7, largest);
    let seen = Seen::new(ResponseExpectation { choices: 2, ..chat() }).all(&[(1, &of(0)), (2, &of(1))]).clean(5);
    assert_eq!((seen.output, seen.source, seen.choices[0].tokens), (Tokens(2), TokenSource::Events, 1.0));
}

/// Verdict and limiter use the same count: for one choice, the last report, wherever it
/// stood.
#[test]
fn the_last_count_of_one_choice_is_the_one_that_is_judged() {
    let counted = |events: &[String]| {
        let all =
            events.iter().zip(1..).fold(Seen::new(chat()), |seen, (event, number)| seen.data(100 * number, event));
        let seen = all.clean(9999);
        assert_eq!(seen.choices.len(), 1);
        assert_eq!(seen.choices[0].tokens, seen.output.0 as f64);
        (seen.output.0, seen.tpot())
    };
    let (a, b, stop) = (t("a"), t("b"), f("stop"));
    // Before the end 0, 1 or far too many; at the end the true count.
    for early in [0, 1, 100] {
        assert_eq!(counted(&[with(&a, 9, early), b.clone(), stop.clone(), u(9, 3)]), (3, Some(ms(50))));
    }
    assert_eq!(counted(&[with(R, 9, 0), a.clone(), b.clone(), stop.clone(), u(9, 3)]), (3, Some(ms(50))));
    // The other order: alone first, beside the choice last.
    assert_eq!(counted(&[u(9, 0), a.clone(), b.clone(), with(&stop, 9, 3)]), (3, Some(ms(50))));
    assert_eq!(counted(&[u(9, 100), with(&a, 9, 1), with(&b, 9, 3), stop.clone()]), (3, Some(ms(50))));
    // Reported beside the last token, and differently after it.
    assert_eq!(counted(&[with(&a, 9, 1), with(&b, 9, 2), stop, u(9, 3)]), (3, Some(ms(50))));
}

#[test]
fn a_total_is_divided_if_tokens_follow_the_usage_of_their_choices() {
    let two = ResponseExpectation { choices: 2, ..chat() };
    let token = |index| of_choice(index, r#"{"content":"x"}"#, "null");
    let all = [with(&token(0), 9, 1), with(&token(1), 9, 1), token(0), token(0), token(1), token(0), u(9, 12)];
    let seen = all.iter().fold(Seen::new(two), |seen, event| seen.data(5, event)).clean(9);
    let counts: Vec<_> = seen.choices.iter().map(|choice| choice.tokens).collect();
    assert_eq!((seen.output, counts), (Tokens(12), vec![8.0, 4.0]));
}

/// Whether an answer's events may be taken for those of any stream.
#[test]
fn only_plain_streams_tell_how_many_tokens_an_event_carries() {
    let plain = |expect: ResponseExpectation, events: &[String]| {
        events.iter().fold(Seen::new(expect), |seen, event| seen.data(5, event)).clean(9).plain_events()
    };
    let (a, stop) = (t("a"), f("stop"));
    assert_eq!(plain(chat(), &[a.clone(), a.clone(), stop.clone(), u(5, 6)]), Some((2, Tokens(6))));
    let call = of_choice(0, r#"{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]}"#, "null");
    let old = of_choice(0, r#"{"function_call":{"arguments":"{}"}}"#, "null");
    let sound = of_choice(0, r#"{"audio":{"data":"AAAA"}}"#, "null");
    for lump in [call, old, sound] {
        assert_eq!(plain(chat(), &[a.clone(), lump.clone(), a.clone(), stop.clone(), u(5, 6)]), None, "{lump}");
    }
    assert_eq!(plain(chat(), &[a.clone(), stop.clone()]), None, "no usage");
    assert_eq!(plain(chat(), &[a.clone(), u(5, 6)]), None, "not whole");
    let two = [a.clone(), of_choice(1, r#"{"content":"x"}"#, "\"stop\""), stop.clone(), u(5, 6)];
    assert_eq!(plain(ResponseExpectation { choices: 2, ..chat() }, &two), None);
    // Counted reasoning that no event carried.
    let usage =
        r#"{"choices":[],"usage":{"completion_tokens":60,"completion_tokens_details":{"reasoning_tokens":50}}}"#;
    assert_eq!(plain(chat(), &[a.clone(), stop.clone(), usage.to_owned()]), None);
    let thought = of_choice(0, r#"{"reasoning":"hm"}"#, "null");
    let events = [thought, a, stop, usage.to_owned()];
    let seen =
        events.iter().zip(5..).fold(Seen::new(chat()), |seen, (event, millis)| seen.data(millis, event)).clean(9);
    assert_eq!(seen.plain_events(), Some((2, Tokens(60))));

    let responses = |delta: &str| {
        let delta = format!(r#"{{"type":"response.{delta}.delta","delta":"x"}}"#);
        let end = r#"{"type":"response.completed","response":{"usage":{"output_tokens":4}}}"#;
        plain(ResponseExpectation::stream(Dialect::Responses, Tick::ZERO), &[delta, end.to_owned()])
    };
    assert_eq!(responses("output_text"), Some((1, Tokens(4))));
    assert_eq!(responses("reasoning_text"), Some((1, Tokens(4))));
    for lump in ["function_call_arguments", "mcp_call_arguments", "custom_tool_call_input", "audio"] {
        assert_eq!(responses(lump), None, "{lump}");
    }
    let messages = |block: &str, delta: &str| {
        let events = [
            format!(r#"{{"type":"content_block_start","index":0,"content_block":{block}}}"#),
            format!(r#"{{"type":"content_block_delta","index":0,"delta":{delta}}}"#),
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":4}}"#.to_owned(),
            r#"{"type":"message_stop"}"#.to_owned(),
        ];
        plain(ResponseExpectation::stream(Dialect::Messages, Tick::ZERO), &events)
    };
    let text = (r#"{"type":"text","text":""}"#, r#"{"type":"text_delta","text":"hi"}"#);
    assert_eq!(messages(text.0, text.1), Some((1, Tokens(4))));
    let tool = (r#"{"type":"tool_use","name":"f","input":{}}"#, r#"{"type":"input_json_delta","partial_json":"{}"}"#);
    assert_eq!(messages(tool.0, tool.1), None);
}

#[test]
fn an_unfinished_response_is_not_counted_by_its_first_usage() {
    let start = r#"{"type":"message_start","message":{"usage":{"input_tokens":25,"output_tokens":1}}}"#;
    let text = r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"hi"}}"#;
    let expect =
        ResponseExpectation { tokens_per_event: 1.5, ..ResponseExpectation::stream(Dialect::Messages, Tick::ZERO) };
    let seen = Seen::new(expect).all(&[(1, start), (2, text), (3, text), (4, text)]).ends(Ending::Left, 9);
    assert_eq!((seen.output, seen.source, seen.usage.input), (Tokens(5), TokenSource::Events, Some(Tokens(25))));
}

#[test]
fn without_usage_events_are_multiplied_by_the_learned_ratio() {
    let expect = ResponseExpectation { tokens_per_event: 2.5, ..chat() };
    let seen = Seen::new(expect).all(&[(0, &t("a")), (100, &t("b")), (200, &t("c")), (200, &f("stop"))]).clean(200);
    assert_eq!((seen.output, seen.source), (Tokens(8), TokenSource::Events));
    assert_eq!(seen.choices[0].tokens, 7.5);
}

fn completion(text: &str) -> String {
    format!(r#"{{"choices":[{{"text":"{text}","index":0,"finish_reason":null}}]}}"#)
}

fn echoing(prompts: &[&str]) -> ResponseExpectation {
    let count = prompts.len() as u64;
    let echo_prompts = prompts.iter().map(|&prompt| prompt.to_owned()).collect();
    ResponseExpectation {
        choices: count,
        prompts: count,
        echo_prompts,
        ..ResponseExpectation::stream(Dialect::Completions, Tick::ZERO)
    }
}

#[test]
fn an_echo_of_the_prompt_is_no_token_and_text_beyond_it_is() {
    let tokens = |prompt: &str, texts: &[&str]| -> Vec<bool> {
        let seen = texts.iter().fold(Seen::new(echoing(&[prompt])), |seen, text| seen.data(1, &completion(text)));
        seen.notes.iter().map(|info| info.token).collect()
    };
    assert_eq!(tokens("the gateway", &["the", " gate", "way", " the", "x"]), [false, false, false, true, true]);
    assert_eq!(tokens("the gateway", &["the gateway 920", " 5"]), [true, true]);
    assert_eq!(tokens("the gateway", &["the gato", "way"]), [true, true]);
    assert_eq!(tokens("a\nä", &["a\\n", "\\u00e4", "b"]), [false, false, true]);
    assert_eq!(tokens("", &["a", "a"]), [true, true]);
    assert_eq!(tokens("aa", &["aa", "aa"]), [false, true]);
}

#[test]
fn each_choice_echoes_its_own_prompt() {
    let event = |index, text: &str| completion(text).replace("\"index\":0", &format!("\"index\":{index}"));
    let all = [event(1, "two"), event(0, "one"), event(1, "!"), event(0, "two"), event(0, "x")];
    let seen = all.iter().fold(Seen::new(echoing(&["one", "two"])), |seen, event| seen.data(1, event));
    let tokens: Vec<bool> = seen.notes.iter().map(|info| info.token).collect();
    assert_eq!(tokens, [false, false, true, true, true]);
}

#[test]
fn a_json_response_has_no_ttft_and_counts_by_usage_or_by_its_text() {
    let body = r#"{"choices":[{"index":0,"message":{"role":"assistant","content":"nine byte"},"finish_reason":"stop"}],
        "usage":{"prompt_tokens":5,"completion_tokens":20},"error":null}"#;
    let seen = json(not_streamed(Dialect::Chat), body);
    assert!(!seen.streamed && !seen.unparseable);
    assert_eq!((seen.first_token, seen.finish, seen.output), (None, at(900), Tokens(20)));
    assert!(seen.token_events == 1 && seen.has_visible && seen.has_finish_reason);
    let bare = r#"{"choices":[{"message":{"content":"nine byte","reasoning":"long thoughts"}}]}"#;
    let bare = json(not_streamed(Dialect::Chat), bare);
    assert_eq!((bare.output, bare.source), (Tokens(3), TokenSource::Estimate));
    let tool = r#"{"choices":[{"message":{"content":null,"tool_calls":[{"function":{"name":"abcd","arguments":"{\"a\":1}"}}]}}]}"#;
    assert_eq!(json(not_streamed(Dialect::Chat), tool).output, Tokens(3));
}

#[test]
fn json_answers_of_the_other_dialects() {
    let messages = r#"{"type":"message","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"abcde"},
        {"type":"tool_use","name":"f","input":{"a":1}}],"stop_reason":"max_tokens","usage":{"input_tokens":1,"cache_read_input_tokens":20,"output_tokens":6}}"#;
    let seen = json(not_streamed(Dialect::Messages), messages);
    assert_eq!((seen.usage.input, seen.usage.cached, seen.output), (Some(Tokens(21)), Some(Tokens(20)), Tokens(6)));
    assert!(seen.cut_by_length && seen.has_visible && seen.has_finish_reason);

    let responses = r#"{"status":"incomplete","error":null,"incomplete_details":{"reason":"max_output_tokens"},
        "output":[{"summary":[{"text":"secret thoughts"}],"type":"reasoning"},
        {"type":"message","content":[{"type":"output_text","text":"abcdefg"}]}]}"#;
    let seen = json(not_streamed(Dialect::Responses), responses);
    assert_eq!((seen.output, seen.source, seen.cut_by_length), (Tokens(2), TokenSource::Estimate, true));
    let thoughts = r#"{"status":"completed","output":[{"content":[{"text":"hm"}],"type":"reasoning"}]}"#;
    let seen = json(not_streamed(Dialect::Responses), thoughts);
    assert!(seen.token_events == 1 && !seen.has_visible && seen.has_finish_reason);
    let failed = json(not_streamed(Dialect::Responses), r#"{"status":"failed","error":{"code":"server_error"}}"#);
    assert_eq!((failed.error.map(|error| error.code), failed.finish), (Some(500), None));

    let echo = ResponseExpectation { stream_asked: false, ..echoing(&["the gateway"]) };
    let seen = json(echo.clone(), r#"{"choices":[{"text":"the gateway 920 5","index":0}]}"#);
    assert_eq!((seen.output, seen.source, seen.token_events), (Tokens(2), TokenSource::Estimate, 1));
    let seen = json(echo, r#"{"choices":[{"text":"the gateway","index":0}]}"#);
    assert_eq!((seen.output, seen.token_events), (Tokens(0), 0));
}

#[test]
fn a_json_body_instead_of_a_stream_arrives_all_at_once() {
    let body = r#"{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"completion_tokens":9}}"#;
    let seen = json(chat(), body);
    assert!(seen.streamed);
    assert_eq!((seen.first_token, seen.first_visible, seen.finish, seen.tpot()), (at(900), at(900), at(900), None));
    let unasked = Seen::new(not_streamed(Dialect::Chat)).all(&[(5, &t("a")), (6, &f("stop"))]).clean(9);
    assert!(unasked.streamed && unasked.first_token == at(5));
}

#[test]
fn no_json_object_is_unparseable() {
    for body in ["", "[1]", "{\"choices\":[", "{} x", "<html>", "\"text\"", "{\"a\":nan}"] {
        let seen = json(not_streamed(Dialect::Chat), body);
        assert!(seen.unparseable && seen.finish.is_none(), "{body}");
    }
    let empty = json(not_streamed(Dialect::Chat), "{}");
    assert!(!empty.unparseable && empty.token_events == 0 && !empty.has_finish_reason && empty.finish.is_some());
    let cut =
        Seen::of(not_streamed(Dialect::Chat), ResponseFormat::Json).raw(5, b"{\"choices\":").ends(Ending::Broken, 6);
    assert!(!cut.unparseable && cut.finish.is_none());
    let failed = Observer::new(chat(), ResponseFormat::Json, 503, watch()).end(Ending::Clean, Tick::ZERO);
    assert!(!failed.unparseable && failed.error.is_none() && failed.finish.is_none());
}

#[test]
fn c58_a_coded_or_foreign_body_cannot_be_read() {
    for (format, dialect, unparseable) in [
        (ResponseFormat::Coded, Dialect::Chat, true),
        (ResponseFormat::Opaque, Dialect::Chat, true),
        (ResponseFormat::Opaque, Dialect::Plain, false),
        (ResponseFormat::Json, Dialect::Plain, false),
    ] {
        let bytes = b"{\"data\":[1]}";
        let seen = Seen::of(not_streamed(dialect), format).raw(5, bytes);
        assert_eq!(seen.passed, bytes);
        let seen = seen.clean(9);
        assert_eq!((seen.unparseable, seen.finish.is_some()), (unparseable, !unparseable), "{format:?} {dialect:?}");
    }
}

#[test]
fn an_error_in_a_200_body() {
    let error = |dialect, body: &str| json(not_streamed(dialect), body).error.map(|error| error.code);
    assert_eq!(error(Dialect::Chat, r#"{"error":{"code":"context","type":"invalid_request_error"}}"#), Some(400));
    assert_eq!(error(Dialect::Plain, r#"{"error":"boom"}"#), Some(500));
    assert_eq!(error(Dialect::Messages, r#"{"type":"error","error":{"type":"rate_limit_error"}}"#), Some(429));
    assert_eq!(error(Dialect::Chat, r#"{"error":null,"choices":[]}"#), None);
}

#[test]
fn c63_text_that_strict_parsers_refuse_is_a_token() {
    let deep =
        format!(r#"{{"x":{}1{},"choices":[{{"delta":{{"content":"a"}}}}]}}"#, "[".repeat(5000), "]".repeat(5000));
    for event in [t(r"\ud83d"), t(r"\u0000"), with(&t("a"), 1, 1).replace("\"id\":\"c1\"", "\"id\":1e400"), deep] {
        let seen = Seen::new(chat()).data(1, &event);
        assert!(seen.notes[0].visible, "{}", &event[..60]);
        assert!(seen.data(2, &t("b")).notes[1].visible);
    }
    let invalid = b"data: {\"choices\":[{\"delta\":{\"content\":\"\xff\xfe\"}}]}\n\n";
    assert!(Seen::new(chat()).raw(1, invalid).notes[0].visible);
}

#[test]
fn data_that_is_no_object_is_no_token_and_no_fault() {
    for data in ["null", "1", "[]", "hello", "{\"choices\":[{\"delta\":{\"content\":\"a\"}}]", "\"[DONE]\""] {
        let seen = Seen::new(chat()).data(1, data);
        assert_eq!(seen.notes, [PieceInfo::default()], "{data}");
        assert!(seen.observer.error().is_none());
    }
}

#[test]
fn a_byte_order_mark_in_front_is_no_part_of_the_first_event() {
    let event = format!("\u{FEFF}data: {}\n\n", t("a"));
    for cut in 0..5 {
        let (head, rest) = event.as_bytes().split_at(cut);
        assert!(Seen::new(chat()).raw(1, head).raw(1, rest).observer.has_token(), "cut at {cut}");
    }
    let later = Seen::new(chat()).raw(1, b"data: {}\n\n").raw(2, event.as_bytes());
    assert!(!later.observer.has_token());
    let long = format!("\u{FEFF}data: {}\n\n", t(&"x".repeat(2 * HELD)));
    assert!(Seen::new(chat()).raw(1, long.as_bytes()).observer.has_token());
}

#[test]
fn a_tail_without_its_blank_line_is_read_at_a_clean_end_only() {
    let tail = || Seen::new(chat()).data(1, &t("a")).raw(2, format!("data: {}", f("stop")).as_bytes());
    assert_eq!(tail().clean(9).finish, at(2));
    assert_eq!(tail().ends(Ending::Broken, 9).finish, None);
    let mut seen = tail();
    let before = seen.passed.len();
    seen.observer.clean_end(Tick::from_millis(9), &mut |piece, info| {
        assert!(info.finished);
        seen.passed.extend_from_slice(&piece);
    });
    assert_eq!(&seen.passed[before..], format!("data: {}", f("stop")).as_bytes());
}

#[test]
fn c54_the_finish_is_known_before_done() {
    let seen = Seen::new(chat()).all(&[(10, &t("a")), (20, &f("stop"))]);
    assert!(seen.notes[1].finished && seen.observer.is_finished());
    assert_eq!(seen.ends(Ending::Left, 25).finish, at(20));
}

#[test]
fn c55_gaps_are_not_observed_while_the_client_does_not_read() {
    let seen = Seen::new(chat()).all(&[(0, &t("a")), (60, &t("b"))]);
    let mut seen = seen;
    seen.observer.limit_gaps(Tick::from_millis(70));
    let seen = seen.all(&[(5000, &t("c")), (5010, &f("stop"))]).clean(5010);
    assert_eq!((seen.gaps.largest, seen.gaps.broke, seen.gaps.stalls), (Some(ms(60)), None, 0));
    let limited = seen.limited.unwrap();
    assert_eq!((limited.at, limited.choices[0].events), (Tick::from_millis(70), 2));
    assert_eq!((seen.last_token, seen.token_events), (at(5000), 3));
}

#[test]
fn the_first_gap_over_the_threshold_is_when_itl_broke() {
    let seen = Seen::new(chat()).all(&[(0, &t("a")), (50, &t("b")), (2050, &t("c")), (4000, &t("d"))]);
    let gaps = seen.ends(Ending::Left, 4001).gaps;
    assert_eq!((gaps.broke, gaps.largest, gaps.stalls), (at(150), Some(ms(2000)), 2));
    assert_eq!((gaps.buckets, gaps.sum), (vec![0, 1, 0, 0, 2], ms(4000)));
}

#[test]
fn a_gap_on_an_edge_or_a_threshold_is_within_it() {
    // 60 ms; 50 ms, the edge below; then the ITL threshold; and the stall.
    let moments = [0, 60, 110, 210, 1210];
    let seen = moments.iter().fold(Seen::new(chat()), |seen, millis| seen.data(*millis, &t("a")));
    let gaps = seen.observer.so_far(Tick::from_millis(1210)).gaps;
    assert_eq!((gaps.buckets, gaps.stalls, gaps.broke), (vec![0, 1, 2, 0, 1], 0, at(310)));
    let seen = moments[..4].iter().fold(Seen::new(chat()), |seen, millis| seen.data(*millis, &t("a")));
    assert_eq!(seen.ends(Ending::Left, 211).gaps.broke, None);
}

#[test]
fn an_open_stream_costs_little() {
    let seen = Seen::new(chat()).all(&[(1, &t("a")), (60, &t("b"))]);
    let heap = seen.observer.heap();
    let own = size_of::<Observer>() + heap;
    assert!(own <= 1536, "{} + {heap} bytes", size_of::<Observer>());
}

/// The inside of a JSON string, often resembling syntax.
pub(super) fn inside() -> impl Strategy<Value = String> {
    let tricky = vec![
        r#"\"finish_reason\":\"stop\""#,
        r#"\",\"content\":\""#,
        r"\\",
        r#"\""#,
        r"\n",
        r"\ud83d",
        r"\u00e9",
        "}]}",
        "漢",
        "🌍",
        "data: [DONE]",
        "usage",
    ];
    let part = prop_oneof![proptest::sample::select(tricky).prop_map(str::to_owned), "[a-z ]{0,3}"];
    proptest::collection::vec(part, 0..4).prop_map(|parts| parts.concat())
}

/// A chat event, mostly of the usual form.
fn chat_event() -> impl Strategy<Value = String> {
    let index = prop_oneof![9 => Just(0u64), 1 => Just(1)];
    let field = prop_oneof![6 => Just("content"), 1 => Just("reasoning"), 1 => Just("role"), 1 => Just("refusal")];
    let reason = prop_oneof![12 => Just("null"), 1 => Just("\"stop\""), 1 => Just("\"\"")];
    let usage = prop_oneof![8 => Just(None), 1 => Just(Some(None)), 1 => (0u64..9).prop_map(|n| Some(Some(n)))];
    let created = prop_oneof![1 => Just("1.5"), 1 => Just("\"7\""), 8 => Just("17"), 4 => Just("18")];
    let chunk =
        (index, field, inside(), reason, usage, created).prop_map(|(index, field, text, reason, usage, created)| {
            let event = of_choice(index, &format!(r#"{{"{field}":"{text}"}}"#), reason);
            let event = event.replace("\"model\"", &format!("\"created\":{created},\"model\""));
            match usage {
                None => event,
                Some(None) => format!("{},\"usage\":null}}", &event[..event.len() - 1]),
                Some(Some(tokens)) => with(&event, 7, tokens),
            }
        });
    let odd = proptest::sample::select(vec![
        D.to_owned(),
        u(7, 3),
        r#"{"error":{"code":503}}"#.to_owned(),
        "null".to_owned(),
        k("x"),
        f("abort"),
        r#"{"error":{},"choices":[{"index":0,"error":"","delta":{"content":"a"}}]}"#.to_owned(),
        r#"{"choices":[{"index":0,"error":{"status":400},"delta":{"content":"a"}}]}"#.to_owned(),
        r#"{"choices":[{"index":0,"message":{"content":"ab"},"delta":{"content":"b"}}]}"#.to_owned(),
        r#"{"choices":[{"index":0,"delta":{"content":""},"message":{"content":"ab"}}]}"#.to_owned(),
    ]);
    prop_oneof![20 => chunk, 3 => odd]
}

fn framed() -> impl Strategy<Value = Vec<u8>> {
    let end = prop_oneof![8 => Just("\n\n"), 1 => Just("\r\n\r\n"), 1 => Just("\r\r")];
    let event = (chat_event(), end).prop_map(|(event, end)| format!("data: {event}{end}"));
    let other = select(vec![": k\n\n", "error: {\"code\":400}\n\n", "error: {}\n\n", "error\n\n"]);
    let piece = prop_oneof![12 => event, 1 => other.prop_map(str::to_owned)];
    proptest::collection::vec(piece, 1..12).prop_map(|pieces| pieces.concat().into_bytes())
}

/// Reference implementation with a JSON tree: token, visible.
fn slowly(data: &str) -> (bool, bool) {
    let Ok(value) = serde_json::from_str::<serde_json::Value>(data) else { return (false, false) };
    let delta = &value["choices"][0]["delta"];
    let is_some = |field: &str| delta[field].as_str().is_some_and(|text| !text.is_empty());
    let visible = is_some("content") || is_some("refusal") || delta["tool_calls"].is_array();
    (visible || is_some("reasoning"), visible)
}

proptest! {
    #[test]
    fn the_template_path_gives_the_result_of_full_parsing(
        events in proptest::collection::vec(chat_event(), 1..20),
        choices in 1u64..3,
    ) {
        let expect = ResponseExpectation { choices, ..chat() };
        let mut quick = Seen::new(expect.clone());
        let mut full = Seen::new(expect);
        full.observer = full.observer.without_shortcut();
        for (millis, event) in events.iter().enumerate() {
            quick = quick.data(millis as u64, event);
            full = full.data(millis as u64, event);
        }
        prop_assert_eq!(&quick.notes, &full.notes);
        prop_assert_eq!(quick.clean(99), full.clean(99));
    }

    #[test]
    fn tokens_equal_those_of_a_tree_parser(event in chat_event()) {
        prop_assume!(!event.contains("\\ud83d") && !event.contains("usage"));
        let info = Seen::new(chat()).data(1, &event).notes[0];
        prop_assert_eq!((info.token, info.visible), slowly(&event));
    }

    #[test]
    fn responses_and_messages_take_the_shortcut_too(texts in proptest::collection::vec(inside(), 1..12)) {
        for dialect in [Dialect::Responses, Dialect::Messages] {
            let expect = ResponseExpectation::stream(dialect, Tick::ZERO);
            let mut quick = Seen::new(expect.clone());
            let mut full = Seen::new(expect);
            full.observer = full.observer.without_shortcut();
            for (number, text) in texts.iter().enumerate() {
                let event = match (dialect, number % 5) {
                    (Dialect::Responses, 4) => format!(r#"{{"type":"response.output_text.done","text":"{text}"}}"#),
                    (Dialect::Responses, _) => format!(r#"{{"type":"response.output_text.delta","delta":"{text}","sequence_number":{number}}}"#),
                    _ => format!(r#"{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":"{text}"}}}}"#),
                };
                quick = quick.data(number as u64, &event);
                full = full.data(number as u64, &event);
                prop_assert_eq!(quick.observer.last_sequence_number(), full.observer.last_sequence_number());
            }
            prop_assert_eq!(&quick.notes, &full.notes);
            prop_assert_eq!(quick.clean(99), full.clean(99));
        }
    }

    #[test]
    fn no_bytes_make_it_panic_and_all_of_them_pass(
        frames in proptest::collection::vec(
            prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..40),
                "(data|event|type|choices|delta|error|usage|item|[:{}\\[\\]\",\n\r 0-9e.-]){0,30}".prop_map(String::into_bytes),
                framed(),
            ],
            0..8,
        ),
        format in proptest::sample::select(vec![ResponseFormat::Events, ResponseFormat::Json, ResponseFormat::Opaque, ResponseFormat::Coded]),
    ) {
        for dialect in [Dialect::Chat, Dialect::Completions, Dialect::Responses, Dialect::Messages, Dialect::Plain] {
            let echo_prompts = [String::from("data")].into();
            let expect = ResponseExpectation { echo_prompts, ..ResponseExpectation::stream(dialect, Tick::ZERO) };
            let mut seen = frames.iter().fold(Seen::of(expect, format), |seen, frame| seen.raw(5, frame));
            seen.observer.clean_end(Tick::from_millis(6), &mut |piece, _| seen.passed.extend_from_slice(&piece));
            prop_assert_eq!(&seen.passed, &frames.concat());
        }
    }

    #[test]
    fn any_split_of_any_stream_gives_the_same_timeline(
        stream in framed(),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6),
    ) {
        let whole = Seen::new(chat()).raw(5, &stream);
        prop_assert_eq!(&whole.passed, &stream);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len())).collect();
        cuts.sort_unstable();
        let (mut split, mut start) = (Seen::new(chat()), 0);
        for cut in cuts {
            split = split.raw(5, &stream[start..cut]);
            start = cut;
        }
        split = split.raw(5, &stream[start..]);
        prop_assert_eq!(&split.passed, &stream);
        prop_assert_eq!(split.clean(9), whole.clean(9));
    }

    #[test]
    fn a_long_event_is_read_as_a_short_one(event in chat_event(), lines in 1usize..4, end in "\n|\r\n|\r", size in 1usize..9000) {
        prop_assume!(event.starts_with('{'));
        // The same object with a member so long that the event is passed on in pieces.
        let pad = format!("{{\"pad\":\"{}\",{}", "x".repeat(HELD + 9000), &event[1..]);
        let at = pad.len() - event.len();
        let broken: Vec<&str> = match lines {
            1 => vec![&pad],
            2 => vec!["{", &pad[1..]],
            _ => vec!["{", &pad[1..at + 1], &pad[at + 1..]],
        };
        let long: String = broken.iter().map(|line| format!("data: {line}{end}")).collect::<String>() + &end;
        let short = Seen::new(chat()).data(5, &event);
        let oversized = long.as_bytes().chunks(size).fold(Seen::new(chat()), |seen, frame| seen.raw(5, frame));
        prop_assert_eq!(&oversized.passed, long.as_bytes());
        let info = oversized.notes.iter().rev().find(|info| info.part != PiecePart::Whole).copied().unwrap();
        prop_assert_eq!(PieceInfo { part: PiecePart::Whole, ..info }, short.notes[0]);
        prop_assert_eq!(oversized.clean(9), short.clean(9));
    }
}

/// A long event means what it would mean if it were short.
#[test]
fn a_long_event_has_the_meaning_of_a_short_one() {
    let pad = "x".repeat(HELD);
    let token = |end: &str| format!("data: {}{end}", t(&pad)).into_bytes();
    let mut no_utf8 = token("\n\n");
    let text_at = no_utf8.windows(3).position(|three| three == b"xxx").unwrap();
    no_utf8[text_at + 5..text_at + 7].copy_from_slice(b"\xff\xe6");
    let said = format!("event: error\ndata: {{\"code\":400,\"message\":\"{pad}\"}}\n\n");
    let field = |rest: &str| format!("error: {{\"code\":400,\"message\":\"{pad}\u{e9}\"}}{rest}\n\n").into_bytes();
    let mut no_utf8_field = field("");
    no_utf8_field[60..62].copy_from_slice(b"\xff\xe6");
    let cases = [
        (field(""), (0, Some(400), false)),
        (no_utf8_field, (0, Some(400), false)),
        (field("\ndata: [DONE]"), (0, Some(400), false)),
        (field("\nerror: {\"code\":503}\ndata: {}"), (0, Some(503), false)),
        (field("\nerror\ndata: [DONE]"), (0, None, true)),
        (format!("error:{{\"a\":1\n:{pad}\ndata: [DONE]\n\n").into_bytes(), (0, None, true)),
        (format!("error: \"{pad}\"\ndata: {}\n\n", t("a")).into_bytes(), (1, None, false)),
        ([b"\xef\xbb\xbf".to_vec(), token("\n\n")].concat(), (1, None, false)),
        (token("\r\r"), (1, None, false)),
        (no_utf8, (1, None, false)),
        (format!("event: error\ndata: {pad}\n\n").into_bytes(), (0, Some(500), false)),
        (said.into_bytes(), (0, Some(400), false)),
        (format!(":{pad}\ndata: [DONE]\n\n").into_bytes(), (0, None, true)),
    ];
    for (number, (bytes, wanted)) in cases.into_iter().enumerate() {
        for size in [1, 1000, HELD + 10, usize::MAX] {
            let seen = bytes.chunks(size).fold(Seen::new(chat()), |seen, frame| seen.raw(7, frame));
            let seen = seen.ends(Ending::Broken, 9);
            let found = (seen.token_events, seen.error.map(|error| error.code), seen.finish.is_some());
            assert_eq!(found, wanted, "case {number} by {size}");
        }
    }
}

#[test]
fn unrequested_choices_use_bounded_memory() {
    let mut seen = Seen::new(chat());
    let mut heap = 0;
    for index in 0..20_000 {
        seen = seen.data(index, &of_choice(index, r#"{"content":"x"}"#, "null"));
        if index == 100 {
            heap = seen.observer.heap();
        }
    }
    assert_eq!(seen.observer.heap(), heap);
    let timeline = seen.all(&[(20_000, &f("stop"))]).clean(20_001);
    assert_eq!((timeline.choices.len(), timeline.token_events, timeline.finish), (16, 20_000, None));
    // As many as were asked for are told apart, and in one event, too.
    let asked = ResponseExpectation { choices: 300, ..chat() };
    let one = |index: u64| format!(r#"{{"index":{index},"delta":{{"content":"x"}},"finish_reason":"stop"}}"#);
    let all = |count: u64| format!(r#"{{"choices":[{}]}}"#, (0..count).map(one).collect::<Vec<_>>().join(","));
    let timeline = Seen::new(asked.clone()).data(1, &all(300)).clean(2);
    assert_eq!((timeline.choices.len(), timeline.finish), (300, at(1)));
    let timeline = Seen::new(asked).data(1, &all(30_000)).clean(2);
    assert_eq!((timeline.choices.len(), timeline.token_events), (300, 4096));
}

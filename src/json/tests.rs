use super::*;
use proptest::prelude::*;
use serde_json::Value;

/// Records every token.
#[derive(Debug, Default, PartialEq, Clone)]
struct Diary {
    lines: Vec<String>,
    text: Vec<u8>,
    lone: usize,
    starts: Vec<usize>,
    spans: Vec<(usize, usize)>,
    skip: Option<&'static str>,
    last_key: String,
}

impl Sink for Diary {
    fn open(&mut self, nest: Nest, at: usize, depth: usize) -> Interest {
        self.lines.push(format!("open {nest:?} {at} {depth}"));
        if self.skip == Some(self.last_key.as_str()) { Interest::Skip } else { Interest::Read }
    }
    fn close(&mut self, nest: Nest, past: usize, depth: usize) {
        self.lines.push(format!("close {nest:?} {past} {depth}"));
    }
    fn begin(&mut self, _: Scalar, at: usize, _: usize) -> Interest {
        self.starts.push(at);
        self.text.clear();
        self.lone = 0;
        Interest::Read
    }
    fn piece(&mut self, decoded: &[u8]) {
        self.text.extend_from_slice(decoded);
    }
    fn lone_surrogate(&mut self) {
        self.lone += 1;
    }
    fn end(&mut self, what: Scalar, past: usize, depth: usize) {
        let text = String::from_utf8(std::mem::take(&mut self.text)).unwrap();
        let at = self.starts.pop().unwrap();
        self.spans.push((at, past));
        self.lines.push(format!("{what:?} {text:?} lone {} {at}..{past} {depth}", self.lone));
        if what == Scalar::Key {
            self.last_key = text;
        }
    }
    fn literal(&mut self, what: Literal, at: usize, depth: usize) {
        self.lines.push(format!("{} {at} {depth}", what.word()));
    }
}

fn told(pieces: &[&[u8]]) -> (Diary, Result<(), SyntaxError>) {
    let (mut diary, mut tokenizer) = (Diary::default(), Tokenizer::new());
    let mut ended = Ok(());
    for piece in pieces {
        ended = ended.and_then(|()| tokenizer.push(piece, &mut diary));
    }
    let ended = ended.and_then(|()| tokenizer.finish(&mut diary));
    (diary, ended)
}

fn is_json(bytes: &[u8]) -> bool {
    walk(bytes, &mut NoopSink).is_ok()
}

#[test]
fn tokens_are_reported_with_offsets_and_depths() {
    let (diary, ended) = told(&[br#" {"a\n":[1,-2.5e+3,"x\u00e9\ud83d\ude00"],"b":{"c":null}} "#]);
    assert_eq!(ended, Ok(()));
    let told: Vec<&str> = diary.lines.iter().map(String::as_str).collect();
    assert_eq!(
        told,
        [
            "open Object 1 0",
            r#"Key "a\n" lone 0 2..7 1"#,
            "open Array 8 1",
            r#"Number "1" lone 0 9..10 2"#,
            r#"Number "-2.5e+3" lone 0 11..18 2"#,
            r#"String "xé😀" lone 0 19..40 2"#,
            "close Array 41 1",
            r#"Key "b" lone 0 42..45 1"#,
            "open Object 46 1",
            r#"Key "c" lone 0 47..50 2"#,
            "null 51 2",
            "close Object 56 1",
            "close Object 57 0",
        ]
    );
}

#[test]
fn deviations_from_rfc_8259_are_errors() {
    let broken: [&[u8]; 40] = [
        b"",
        b"   ",
        b"{",
        b"[",
        b"[1,]",
        b"[,1]",
        b"{\"a\":1,}",
        b"{\"a\"}",
        b"{\"a\":}",
        b"{a:1}",
        b"{'a':1}",
        b"{\"a\":1 \"b\":2}",
        b"[1 2]",
        b"[1}",
        b"{\"a\":1]",
        b"1 x",
        b"{} {}",
        b"{}}",
        b"NaN",
        b"-Infinity",
        b"01",
        b"-01",
        b"1.",
        b".5",
        b"-",
        b"1e",
        b"1e+",
        b"+1",
        b"tru",
        b"True",
        b"truee",
        b"nul",
        b"\"a",
        b"\"a\nb\"",
        b"\"\\x\"",
        b"\"\\u12g4\"",
        b"[1/*c*/]",
        b"\xEF\xBB\xBF{}",
        b"\"\xff\"",
        b"\"\xed\xa0\x80\"",
    ];
    for bytes in broken {
        assert!(!is_json(bytes), "{:?}", String::from_utf8_lossy(bytes));
    }
    let utf16: Vec<u8> = "{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert!(!is_json(&utf16));
    assert_eq!(walk(b"[1,\n 2,x]", &mut NoopSink), Err(SyntaxError { at: 7, what: "a value must stand here" }));
}

#[test]
fn json_beyond_usual_ranges_is_accepted() {
    let digits = [b"9".repeat(100_000), b".0e-".to_vec(), b"7".repeat(1000)].concat();
    let whole: [&[u8]; 8] = [
        b"1e400",
        b"-0",
        b"\"\\ud83d\"",
        b"\"\\ude00\\ud83d\"",
        b"\"\\ud83d\\n\"",
        b"\"\x7f\"",
        b"\"\\u0000\"",
        &digits,
    ];
    for bytes in whole {
        assert!(is_json(bytes), "{:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(40)]));
    }
}

#[test]
fn lone_surrogates_are_reported() {
    let (diary, _) = told(&[br#"["\ud83d","a\ude00b","\ud83d\ud83d\ude00","\ud83dx","\ud83d\n"]"#]);
    let strings: Vec<&str> = diary.lines[1..6].iter().map(|l| &l[..l.rfind(' ').unwrap()]).collect();
    let heard: Vec<&str> = strings.iter().map(|l| &l[..l.rfind(' ').unwrap()]).collect();
    assert_eq!(
        heard,
        [
            r#"String "" lone 1"#,
            r#"String "ab" lone 1"#,
            r#"String "😀" lone 1"#,
            r#"String "x" lone 1"#,
            r#"String "\n" lone 1"#,
        ]
    );
}

#[test]
fn ten_megabytes_of_brackets_cost_a_bit_each() {
    let mut tokenizer = Tokenizer::new();
    let open = b"[{\"a\":".repeat(1000);
    for _ in 0..1000 {
        tokenizer.push(&open, &mut NoopSink).unwrap();
    }
    assert!(tokenizer.memory() <= 512 * 1024, "{} bytes", tokenizer.memory());
    tokenizer.push(b"0", &mut NoopSink).unwrap();
    for _ in 0..1000 {
        tokenizer.push(&b"}]".repeat(1000), &mut NoopSink).unwrap();
    }
    assert_eq!(tokenizer.finish(&mut NoopSink), Ok(()));
}

#[test]
fn a_skipped_subtree_is_checked_and_not_reported() {
    let mut diary = Diary { skip: Some("b"), ..Diary::default() };
    walk(br#"{"b":{"x":["y",1,true,{}]},"c":2}"#, &mut diary).unwrap();
    assert_eq!(diary.lines.len(), 7, "{:#?}", diary.lines);
    let mut diary = Diary { skip: Some("b"), ..Diary::default() };
    assert!(walk(br#"{"b":{"x":["y",01]},"c":2}"#, &mut diary).is_err());
}

#[test]
fn a_broken_text_stays_broken_at_the_same_place() {
    let mut tokenizer = Tokenizer::new();
    let first = tokenizer.push(b"[1,x", &mut NoopSink);
    assert_eq!(tokenizer.push(b"]", &mut NoopSink), first);
    assert_eq!(tokenizer.finish(&mut NoopSink), first);
}

#[test]
fn only_an_object_is_an_object() {
    assert!(is_object(b" \n{\"a\":1} "));
    for other in [&b"[]"[..], b"1", b"", b"{", b"{}x", b"\"{}\""] {
        assert!(!is_object(other));
    }
}

/// JSON text, spelled in more ways than a serializer would.
pub(crate) fn json_text() -> impl Strategy<Value = String> {
    let number = "-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,4})?([eE][+-]?[0-9]{1,2})?";
    let string = "\"([ !#-\\[\\]-~é漢🌍]|\\\\[\"\\\\/bfnrt]|\\\\u00[0-9a-fA-F]{2}|\\\\ud83d\\\\ude0[0-9])*\"";
    let word = prop_oneof![Just("true".to_owned()), Just("false".to_owned()), Just("null".to_owned())];
    let space = || "[ \t\n\r]{0,2}";
    let leaf = prop_oneof![number.prop_map(|n| n), string.prop_map(|s| s), word];
    leaf.prop_recursive(5, 40, 5, move |inner| {
        let item = (space(), inner.clone(), space()).prop_map(|(a, v, b)| format!("{a}{v}{b}"));
        let member = (space(), string, space(), inner, space()).prop_map(|(a, k, b, v, c)| format!("{a}{k}{b}:{v}{c}"));
        prop_oneof![
            proptest::collection::vec(item, 0..5).prop_map(|items| format!("[{}]", items.join(","))),
            proptest::collection::vec(member, 0..5).prop_map(|members| format!("{{{}}}", members.join(","))),
        ]
    })
}

/// serde_json's verdict on whether the bytes are JSON; none for what it cannot represent.
fn is_json_to_serde(bytes: &[u8]) -> Option<bool> {
    match serde_json::from_slice::<Value>(bytes) {
        Ok(_) => Some(true),
        Err(error) => {
            let text = error.to_string();
            let beyond = ["out of range", "surrogate", "recursion", "unexpected end of hex escape"];
            (!beyond.iter().any(|reason| text.contains(reason))).then_some(false)
        }
    }
}

proptest! {
    #[test]
    fn acceptance_is_serde_jsons_also_after_mutations(
        text in json_text(),
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), 0u8..4, any::<u8>()), 0..3),
    ) {
        let mut bytes = text.into_bytes();
        for (index, kind, byte) in edits {
            if bytes.is_empty() { break; }
            let at = index.index(bytes.len());
            let byte = [byte, b"{}[]\",:\\ue0-1.tn \xe9\x00"[usize::from(byte) % 19]][usize::from(kind % 2)];
            match kind {
                0 | 1 => bytes[at] = byte,
                2 => { bytes.remove(at); }
                _ => bytes.insert(at, byte),
            }
        }
        if let Some(theirs) = is_json_to_serde(&bytes) {
            prop_assert_eq!(is_json(&bytes), theirs, "{:?}", String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn a_cut_anywhere_changes_nothing(text in json_text(), cut in any::<proptest::sample::Index>(), junk in any::<Option<u8>>()) {
        let mut bytes = text.into_bytes();
        if let Some(junk) = junk {
            let at = cut.index(bytes.len());
            bytes[at] = junk;
        }
        let whole = told(&[&bytes]);
        let cut = cut.index(bytes.len() + 1);
        let halves = told(&[&bytes[..cut], &bytes[cut..]]);
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        let single = told(&single);
        if whole.1.is_ok() {
            prop_assert_eq!(&whole.0, &halves.0);
            prop_assert_eq!(&whole.0, &single.0);
        }
        prop_assert_eq!(whole.1, halves.1);
        prop_assert_eq!(whole.1, single.1);
    }

    #[test]
    fn skipped_text_can_still_be_decoded(
        parts in proptest::collection::vec(("[ !#-\\[\\]-~é漢🌍]{0,90}", "([\\\\][\"\\\\/bfnrt]){0,5}"), 0..60),
        enough in 1usize..4,
    ) {
        let raw: String = parts.into_iter().flat_map(|(text, escapes)| [text, escapes]).collect();
        let expected: String = serde_json::from_str(&format!("\"{raw}\"")).unwrap();
        let (mut decoded, mut pieces) = (Vec::new(), 0);
        unescape(raw.as_bytes(), |piece| {
            decoded.extend_from_slice(piece);
            pieces += 1;
            true
        });
        prop_assert_eq!(String::from_utf8(decoded).unwrap(), expected.clone());
        let (mut decoded, mut taken) = (Vec::new(), 0);
        unescape(raw.as_bytes(), |piece| {
            decoded.extend_from_slice(piece);
            taken += 1;
            taken < enough
        });
        prop_assert_eq!(taken, enough.min(pieces));
        prop_assert!(expected.as_bytes().starts_with(&decoded));
    }

    #[test]
    fn spans_are_the_literals(text in json_text()) {
        let (diary, ended) = told(&[text.as_bytes()]);
        prop_assert_eq!(ended, Ok(()));
        for (at, past) in diary.spans {
            prop_assert!(serde_json::from_str::<Value>(&text[at..past]).is_ok());
        }
    }
}

#[test]
fn python_numbers_are_read_in_engine_output_only() {
    for text in ["NaN", "[NaN]", "{\"a\":-Infinity,\"b\":Infinity}", "[ NaN , -1 ]"] {
        let strict = told(&[text.as_bytes()]);
        assert!(strict.1.is_err(), "{text}");
        let mut whole = Diary::default();
        walk_answer(text.as_bytes(), &mut whole).unwrap();
        assert!(whole.lines.iter().any(|line| line.starts_with("Number \"")), "{text}");
        for cut in 0..=text.len() {
            let (mut diary, mut tokenizer) = (Diary::default(), Tokenizer::of_answer());
            tokenizer.push(&text.as_bytes()[..cut], &mut diary).unwrap();
            tokenizer.push(&text.as_bytes()[cut..], &mut diary).unwrap();
            tokenizer.finish(&mut diary).unwrap();
            assert_eq!(diary.lines, whole.lines, "{text} cut at {cut}");
        }
    }
    for text in
        ["[nan]", "[Na]", "[NaNN]", "[-NaN]", "[+Infinity]", "[Inf]", "[-Infinit]", "[-I", "[Infinity1]", "{NaN:1}"]
    {
        assert!(walk_answer(text.as_bytes(), &mut NoopSink).is_err(), "{text}");
        assert!(walk(text.as_bytes(), &mut NoopSink).is_err(), "{text}");
    }
}

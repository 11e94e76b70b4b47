//! Synthetic wires (`tests/wire/made`): forms that engines and hosted services are known to send, in every
//! dialect, with their timelines by `docs/semantics.md`. Replayed through observer and judge, and through a
//! whole gateway.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::support::scripted_engine::{Script, event, fixtures};
use bytes::Bytes;
use goodput::judge::{JudgeContext, Objective, Objectives, TtftCounts, judge};
use goodput::observe::{Ending, Observer, ObserverOptions, PieceInfo, ResponseFormat, TemplateCache, Timeline};
use goodput::types::{Tick, Tokens};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::support::{Ask, House, Yaml, ms, stream};
use crate::wire_http::{Wire, table};

const FILES: [(&str, &str); 8] = [
    ("chat", include_str!("../wire/made/chat.wires")),
    ("judged", include_str!("../wire/made/judged.wires")),
    ("framing", include_str!("../wire/made/framing.wires")),
    ("completions", include_str!("../wire/made/completions.wires")),
    ("responses", include_str!("../wire/made/responses.wires")),
    ("messages", include_str!("../wire/made/messages.wires")),
    ("errors", include_str!("../wire/made/errors.wires")),
    ("whole", include_str!("../wire/made/whole.wires")),
];

/// A wire, and the class by which it is judged.
#[derive(Debug)]
struct Made {
    wire: Wire,
    class: String,
    coding: Option<String>,
}

/// The thresholds of the classes, in milliseconds: TTFT, TPOT, ITL, E2E.
fn thresholds(class: &str) -> [Option<u64>; 4] {
    match class {
        "loose" => [Some(60_000), Some(10_000), None, Some(600_000)],
        "chat" | "seen" => [Some(500), Some(50), None, None],
        "gaps" => [Some(500), None, Some(200), None],
        "all" => [Some(500), Some(50), Some(200), Some(1000)],
        "e2e" => [None, None, None, Some(1000)],
        "first" => [Some(500), None, None, None],
        other => panic!("no class {other}"),
    }
}

fn objectives(class: &str) -> Objectives {
    let within = |millis: Option<u64>| {
        millis.map(|millis| Objective { threshold: Duration::from_millis(millis), attainment: 0.95 })
    };
    let [ttft, tpot, itl, e2e] = thresholds(class).map(within);
    let ttft_counts = if class == "seen" { TtftCounts::FirstVisibleToken } else { TtftCounts::FirstToken };
    Objectives { ttft, tpot, itl, e2e, ttft_counts, ..Objectives::default() }
}

fn yaml(class: &str) -> Yaml {
    let names = ["ttft_seconds", "tpot_seconds", "itl_seconds", "e2e_seconds"];
    let named = names.into_iter().zip(thresholds(class));
    let promise: Vec<(&str, f64)> = named.filter_map(|(name, millis)| Some((name, millis? as f64 / 1e3))).collect();
    // Engines of an unknown kind: nothing is injected, and each response is the only one.
    let yaml = Yaml::default().promise(&promise).kind("generic").with("retries: {after_fault: 0}");
    if class == "seen" { yaml.class("ttft_counts: first_visible_token") } else { yaml }
}

fn all() -> Vec<Made> {
    FILES.iter().flat_map(|(group, text)| text.split("\n@ ").map(move |entry| made(group, entry))).collect()
}

/// One entry: `NAME CLASS PATH REQUEST`, `head STATUS TYPE [| CODING]` (`-`: no type), `MS BYTES` per read,
/// and how it ended. `~n`, `~r`, `~xHH` and `~~` stand for bytes.
fn made(group: &str, entry: &str) -> Made {
    let mut lines = entry.trim_start_matches("@ ").lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let mut words = lines.next().unwrap().splitn(4, ' ');
    let mut word = || words.next().unwrap().to_owned();
    let (name, class, path, request) = (word(), word(), word(), word());
    let head = lines.next().and_then(|line| line.strip_prefix("head ")).unwrap();
    let (status, kind) = head.split_once(' ').unwrap();
    let (content_type, coding) = kind.split_once(" | ").map_or((kind, None), |(kind, coding)| (kind, Some(coding)));
    let (mut body, mut reads, mut ending) = (Vec::new(), Vec::new(), None);
    for line in lines {
        let (first, rest) = line.split_once(' ').unwrap();
        let end = match first {
            "clean" => Ending::Clean,
            "reset" => Ending::Broken,
            "left" => Ending::Left,
            millis => {
                let start = body.len();
                unescape(rest, &mut body);
                reads.push((start..body.len(), Tick::from_millis(millis.parse().unwrap())));
                continue;
            }
        };
        ending = Some((end, Tick::from_millis(rest.parse().unwrap())));
    }
    let (ending, end) = ending.unwrap();
    let wire = Wire {
        name: format!("{group}/{name}"),
        path,
        request: serde_json::from_str(&request).unwrap(),
        status: status.parse().unwrap(),
        content_type: content_type.to_owned(),
        body: body.into(),
        reads,
        raw: Bytes::new(),
        raw_reads: Vec::new(),
        ending,
        end,
    };
    Made { wire, class, coding: coding.map(str::to_owned) }
}

fn unescape(text: &str, bytes: &mut Vec<u8>) {
    let mut parts = text.split('~');
    bytes.extend(parts.next().unwrap_or_default().bytes());
    while let Some(part) = parts.next() {
        let rest = match part.as_bytes().first() {
            Some(b'n') => (&part[1..], b'\n'),
            Some(b'r') => (&part[1..], b'\r'),
            Some(b'x') => (&part[3..], u8::from_str_radix(&part[1..3], 16).unwrap()),
            _ => (parts.next().unwrap_or_default(), b'~'),
        };
        bytes.push(rest.1);
        bytes.extend(rest.0.bytes());
    }
}

impl Made {
    /// As the gateway chooses it.
    fn reader(&self) -> ResponseFormat {
        let essence = self.wire.content_type.split(';').next().unwrap().to_ascii_lowercase();
        match essence.as_str() {
            _ if self.coding.is_some() => ResponseFormat::Coded,
            "text/event-stream" => ResponseFormat::Events,
            _ => ResponseFormat::Json,
        }
    }

    /// The timeline, cut further at these places.
    fn replay(&self, cuts: &BTreeSet<usize>) -> Timeline {
        self.replay_knowing(cuts, None).0
    }

    /// The same by an observer with templates of such responses, with the info and length of each piece.
    fn replay_knowing(
        &self,
        cuts: &BTreeSet<usize>,
        templates: Option<&Arc<TemplateCache>>,
    ) -> (Timeline, Vec<(PieceInfo, usize)>) {
        let Made { wire, .. } = self;
        let itl = thresholds(&self.class)[2].map(Duration::from_millis);
        let watch = ObserverOptions {
            gap_edges: [50, 200].map(Duration::from_millis).into(),
            itl,
            ..ObserverOptions::default()
        };
        let mut observer = Observer::new(wire.expect(), self.reader(), wire.status, watch);
        templates.into_iter().for_each(|templates| observer.use_templates(templates));
        let (mut passed, mut notes) = (Vec::new(), Vec::new());
        let mut pass = |piece: Bytes, note: &PieceInfo| {
            passed.extend_from_slice(&piece);
            notes.push((*note, piece.len()));
        };
        for (range, at) in &wire.reads {
            let mut start = range.start;
            for end in cuts.range(range.start + 1..range.end).copied().chain([range.end]) {
                observer.frame(wire.body.slice(start..end), *at, &mut pass);
                start = end;
            }
        }
        if wire.ending == Ending::Clean {
            observer.clean_end(wire.end, &mut pass);
            assert_eq!(passed, wire.body, "{}", wire.name);
        }
        (observer.end(wire.ending, wire.end), notes)
    }

    fn outcome(&self, timeline: &Timeline) -> String {
        let request = &self.wire.request;
        let stated_cap = request["max_tokens"].as_u64().or(request["max_output_tokens"].as_u64()).map(Tokens);
        let case = JudgeContext { stated_cap, ..JudgeContext::of(self.wire.dialect()) };
        judge(timeline, &objectives(&self.class), &case).outcome.to_string()
    }

    /// The columns of the table.
    fn columns(&self, timeline: &Timeline) -> Vec<String> {
        let choices: Vec<String> = timeline.choices.iter().map(|c| format!("{}:{}", c.index, c.events)).collect();
        vec![
            self.wire.name.clone(),
            millis(timeline.first_token),
            millis(timeline.first_visible),
            millis(timeline.last_token),
            millis(timeline.finish),
            timeline.output.0.to_string(),
            timeline.usage.input.map_or("-".to_owned(), |tokens| tokens.0.to_string()),
            timeline.source.as_str().to_owned(),
            if choices.is_empty() { "-".to_owned() } else { choices.join(" ") },
            self.outcome(timeline),
        ]
    }

    /// A request that may get such a response.
    fn ask(&self) -> Ask {
        let mut body = self.wire.request.clone();
        body["model"] = json!("m1");
        let needed: &[(&str, Value)] = match self.wire.path.as_str() {
            "/v1/completions" => &[("prompt", json!("hi"))],
            "/v1/responses" | "/v1/embeddings" => &[("input", json!("hi"))],
            _ => &[("messages", json!([{"role": "user", "content": "hi"}]))],
        };
        for (key, value) in needed {
            if body[key].is_null() {
                body[key] = value.clone();
            }
        }
        Ask::post(&self.wire.path, body)
    }

    /// An engine with this response; `size`: most bytes at a time.
    fn script(&self, size: usize) -> Script {
        let Made { wire, coding, .. } = self;
        let typed = Some(wire.content_type.as_str()).filter(|kind| *kind != "-");
        let mut headers: Vec<(&str, &str)> = typed.map(|kind| ("content-type", kind)).into_iter().collect();
        headers.extend(coding.as_deref().map(|coding| ("content-encoding", coding)));
        let mut script = Script::new().open_with(wire.status, &headers);
        for (range, at) in &wire.reads {
            for piece in wire.body[range.clone()].chunks(size) {
                script = script.at(at.as_nanos() / 1_000_000).put(Bytes::copy_from_slice(piece));
            }
        }
        let script = script.at(wire.end.as_nanos() / 1_000_000);
        match wire.ending {
            Ending::Clean => script.end(),
            Ending::Broken => script.reset(),
            _ => script.silence(),
        }
    }
}

fn millis(at: Option<Tick>) -> String {
    at.map_or("-".to_owned(), |at| (at.as_nanos() as f64 / 1e6).to_string())
}

#[test]
fn timelines_and_verdicts_of_all_wires_match_the_table() {
    let (rows, all) = (table("made/made.tsv"), all());
    assert_eq!(rows.len(), all.len());
    let wrong: Vec<String> = rows
        .iter()
        .zip(&all)
        .map(|(row, made)| (row, made.columns(&made.replay(&BTreeSet::new()))))
        .filter(|(row, seen)| *row != seen)
        .map(|(row, seen)| format!("{row:?}\n  and not {seen:?}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_timeline_does_not_depend_on_the_cuts() {
    let mut chance = StdRng::seed_from_u64(9);
    for made in all() {
        let (whole, length) = (made.replay(&BTreeSet::new()), made.wire.body.len());
        assert_eq!(made.replay(&(0..length).collect()), whole, "{} byte by byte", made.wire.name);
        for cut in 0..length {
            assert_eq!(made.replay(&BTreeSet::from([cut])), whole, "{} cut at {cut}", made.wire.name);
        }
        for _ in 0..if length > 0 { 20 } else { 0 } {
            let cuts = (0..chance.random_range(2..9)).map(|_| chance.random_range(0..length)).collect();
            assert_eq!(made.replay(&cuts), whole, "{} cut at {cuts:?}", made.wire.name);
        }
    }
}

#[test]
fn cached_templates_give_the_same_timeline() {
    // Templates come from all of them, in either order.
    let (all, templates) = (all(), [0, 1].map(|_| Arc::new(TemplateCache::new())));
    for made in &all {
        made.replay_knowing(&BTreeSet::new(), Some(&templates[0]));
    }
    for made in all.iter().rev() {
        made.replay_knowing(&BTreeSet::new(), Some(&templates[1]));
    }
    for made in all {
        let length = made.wire.body.len();
        for cuts in (0..length).map(|cut| BTreeSet::from([cut])).chain([BTreeSet::new(), (0..length).collect()]) {
            let alone = made.replay_knowing(&cuts, None);
            for templates in &templates {
                assert_eq!(made.replay_knowing(&cuts, Some(templates)), alone, "{}", made.wire.name);
            }
        }
    }
}

/// Plays a wire to a gateway. Returns what differs from the row.
async fn through_the_gateway(made: &Made, row: &[String], size: usize) -> Option<String> {
    // The engine's key is the client's to send, so its rejection passes.
    let yaml = yaml(&made.class).engine("forward_authorization: true");
    let (house, _engine) = House::playing_with(&yaml, made.script(size));
    let (limit, left) = (made.wire.end.as_nanos() / 1_000_000, made.wire.ending == Ending::Left);
    let answer = async { house.send(made.ask()).await.whole().await };
    let answer = match left {
        true => tokio::time::timeout(ms(limit), answer).await.ok(),
        false => Some(answer.await),
    };
    let line = house.line().await;
    let number = |at: &str| at.parse::<f64>().ok();
    let is_judged = ["met", "missed(ttft)", "missed(tpot)", "missed(itl)", "missed(e2e)"].contains(&row[9].as_str());
    let mut wrong = Vec::new();
    let mut check = |what: &str, seen: String, wanted: String| {
        if seen != wanted {
            wrong.push(format!("{} at {size}: {what} {seen} and not {wanted}", made.wire.name));
        }
    };
    check("outcome", line.verdict(), row[9].clone());
    check("first token", format!("{:?}", line.ttft()), format!("{:?}", number(&row[1])));
    if is_judged {
        check("finish", format!("{:?}", line.e2e()), format!("{:?}", number(&row[4])));
    }
    if let (_, Some(output)) = line.tokens() {
        check("output", output.to_string(), row[5].clone());
        check("source", line.text("token_source").to_owned(), row[7].clone());
    }
    if let Some(answer) = answer.filter(|_| made.wire.ending == Ending::Clean && !row[9].contains("truncated")) {
        check("body", format!("{:?}", Bytes::from(answer.bytes())), format!("{:?}", made.wire.body));
        check("status", answer.status.as_str().to_owned(), made.wire.status.to_string());
    }
    house.end().await;
    (!wrong.is_empty()).then(|| wrong.join("\n"))
}

async fn all_through_the_gateway(size: usize) {
    let mut wrong = Vec::new();
    for (row, made) in table("made/made.tsv").iter().zip(all()) {
        wrong.extend(through_the_gateway(&made, row, size).await);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(start_paused = true)]
async fn through_a_whole_gateway_each_wire_ends_as_in_the_table() {
    all_through_the_gateway(usize::MAX).await;
}

#[tokio::test(start_paused = true)]
async fn through_a_whole_gateway_in_small_pieces_too() {
    all_through_the_gateway(7).await;
}

#[tokio::test(start_paused = true)]
async fn after_a_long_event_without_its_blank_line_the_error_is_separate() {
    let half = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{}", "x".repeat(200_000));
    let whole = format!("{half}\"}}}}]}}");
    for (tail, tokens) in [(half, 1), (whole, 2)] {
        let script = Script::stream().at(100).say(fixtures::t("a")).at(120).put(tail.clone()).end();
        let (house, _engine) = House::playing(script);
        let answer = house.chat(stream()).await.whole().await;
        let relayed = [event(&fixtures::t("a")), tail, "\n\n".to_owned()].concat();
        let text = answer.text();
        let rest = text.strip_prefix(&relayed).expect("what came, and a blank line");
        assert!(rest.starts_with("data: {\"error\"") && !answer.is_cut, "{rest}");
        let line = house.line().await;
        assert_eq!((line.verdict(), line.tokens().1), ("missed(truncated)".into(), Some(tokens)));
        house.end().await;
    }
}

/// Whether this read is one event of usage without a choice.
fn is_usage_alone(read: &[u8]) -> bool {
    let data = std::str::from_utf8(read).ok().and_then(|text| text.strip_prefix("data:")?.strip_suffix("\n\n"));
    let data: Option<Value> = data.and_then(|data| serde_json::from_str(data).ok());
    data.is_some_and(|data| {
        data["usage"].is_object() && data["error"].is_null() && data["choices"].as_array().is_none_or(Vec::is_empty)
    })
}

#[tokio::test(start_paused = true)]
async fn only_injected_usage_events_are_removed() {
    let rows = table("made/made.tsv");
    for (row, made) in rows.iter().zip(all()).filter(|(_, made)| made.wire.ending == Ending::Clean) {
        let is_stream = made.wire.request["stream"] == true && made.reader() == ResponseFormat::Events;
        let has_choices = matches!(made.wire.path.as_str(), "/v1/chat/completions" | "/v1/completions");
        // A 400 is retried without the injection, a truncated stream gets our error, and an engine's
        // rejection of the pool's key does not concern the client.
        let is_of_our_key = made.wire.body.windows(20).any(|text| text == b"authentication_error");
        let is_answer = !row[9].contains("invalid") && !row[9].contains("truncated") && !is_of_our_key;
        if !(is_stream && has_choices && is_answer) || made.wire.name.starts_with("framing/") {
            continue;
        }
        let reads = made.wire.reads.iter().map(|(range, _)| &made.wire.body[range.clone()]);
        let wanted: Vec<u8> = reads.filter(|read| !is_usage_alone(read)).flatten().copied().collect();
        let (house, _engine) = House::playing_with(&yaml(&made.class).kind("vllm"), made.script(usize::MAX));
        let answer = house.send(made.ask()).await.whole().await;
        assert_eq!(Bytes::from(answer.bytes()), Bytes::from(wanted), "{}", made.wire.name);
        let line = house.line().await;
        assert_eq!(line.verdict(), row[9], "{}", made.wire.name);
        house.end().await;
    }
}

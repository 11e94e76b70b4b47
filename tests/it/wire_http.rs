//! Captured responses of real engines (`tests/wire`), parsed: head, framing, body, and the time of each read.

use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use goodput::observe::{Ending, ResponseExpectation, ResponseFormat, TimeoutKind};
use goodput::types::{Dialect, Tick};
use serde_json::Value;

/// One captured response.
#[derive(Debug)]
pub struct Wire {
    pub name: String,
    pub path: String,
    pub request: Value,
    pub status: u16,
    pub content_type: String,
    pub body: Bytes,
    /// Ranges of the body, one per read that brought some of it, and their moments.
    pub reads: Vec<(Range<usize>, Tick)>,
    pub ending: Ending,
    pub end: Tick,
    /// The capture itself, head and framing included.
    pub raw: Bytes,
    /// Its reads.
    pub raw_reads: Vec<(Range<usize>, Tick)>,
}

/// Content of a `.timing` file.
#[derive(Debug, Default)]
struct Timing {
    request_line: String,
    request_body: String,
    reads: Vec<(Tick, usize)>,
    /// The reads before this one are at the beginning of the file, the others at its end.
    cut_at: Option<usize>,
    end: Option<Tick>,
    timed_out: bool,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/wire")
}

pub fn table(name: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(folder().join(name)).unwrap();
    text.lines().skip(1).map(|line| line.split('\t').map(str::to_owned).collect()).collect()
}

/// All captured responses to a POST, by name.
pub fn posts() -> Vec<Wire> {
    let engines = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let files = engines.filter(|path| path.is_dir()).flat_map(|engine| std::fs::read_dir(engine).unwrap());
    let mut names: Vec<String> = files
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "http"))
        .map(|path| path.strip_prefix(folder()).unwrap().with_extension("").to_str().unwrap().to_owned())
        .collect();
    names.sort();
    names.iter().map(|name| wire(name)).filter(|wire| !wire.path.is_empty()).collect()
}

/// The captured response of this name.
pub fn wire(name: &str) -> Wire {
    let raw = std::fs::read(folder().join(format!("{name}.http"))).unwrap();
    let timing = std::fs::read(folder().join(format!("{name}.timing")));
    let is_timed = timing.is_ok();
    let timing = timing.map(|text| Timing::read(&String::from_utf8_lossy(&text))).unwrap_or_default();
    let moments = timing.moments(raw.len());

    let head_end = raw.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    let head = std::str::from_utf8(&raw[..head_end]).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let header = |name: &str| {
        let of_line = |line: &str| line.split_once(':').map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_owned()));
        head.lines().filter_map(of_line).find(|(n, _)| n == name).map(|(_, value)| value).unwrap_or_default()
    };
    let is_chunked = header("transfer-encoding") == "chunked";
    let whole = head_end..raw.len();
    let (pieces, whole_at) = if is_chunked { chunks(&raw, head_end) } else { (Vec::from([whole]), Some(raw.len())) };

    let (mut body, mut reads) = (Vec::new(), Vec::<(Range<usize>, (Tick, usize))>::new());
    for at in pieces.into_iter().flatten() {
        let moment = moments[at];
        match reads.last_mut() {
            Some((range, last)) if last.1 == moment.1 => range.end += 1,
            _ => reads.push((body.len()..body.len() + 1, moment)),
        }
        body.push(raw[at]);
    }
    let reads = reads.into_iter().map(|(range, (tick, _))| (range, tick)).collect();

    let mut raw_reads = Vec::<(Range<usize>, (Tick, usize))>::new();
    for (at, moment) in moments.iter().enumerate() {
        match raw_reads.last_mut() {
            Some((range, last)) if last.1 == moment.1 => range.end += 1,
            _ => raw_reads.push((at..at + 1, *moment)),
        }
    }
    let raw_reads = raw_reads.into_iter().map(|(range, (tick, _))| (range, tick)).collect();

    let (method, path) = timing.request_line.split_once(' ').unwrap_or_default();
    let last = timing.end.unwrap_or_default();
    let (ending, end) = match whole_at {
        Some(past) => (Ending::Clean, moments[past - 1].0),
        None if timing.timed_out => (Ending::TimedOut(TimeoutKind::Idle), last),
        None => (Ending::Broken, last),
    };
    Wire {
        name: name.to_owned(),
        path: match (method, is_timed) {
            ("POST", _) => path.to_owned(),
            // The one without a timing belongs to a completion.
            (_, false) => "/v1/completions".to_owned(),
            _ => String::new(),
        },
        request: serde_json::from_str(&timing.request_body).unwrap_or_else(|_| serde_json::json!({"stream": true})),
        status,
        content_type: header("content-type"),
        body: body.into(),
        reads,
        ending,
        end,
        raw: raw.into(),
        raw_reads,
    }
}

/// Positions of the chunks' data, and the complete end of the framing, if any.
fn chunks(raw: &[u8], mut at: usize) -> (Vec<Range<usize>>, Option<usize>) {
    let mut pieces = Vec::new();
    while let Some(line) = raw[at..].windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&raw[at..at + line]).unwrap(), 16).unwrap();
        at += line + 2;
        if size == 0 {
            return (pieces, raw[at..].starts_with(b"\r\n").then_some(at + 2));
        }
        pieces.push(at..raw.len().min(at + size));
        if at + size + 2 > raw.len() {
            break;
        }
        at += size + 2;
    }
    (pieces, None)
}

impl Timing {
    fn read(text: &str) -> Timing {
        let mut timing = Timing::default();
        for line in text.lines() {
            if let Some(request) = line.strip_prefix("# request body: ") {
                timing.request_body = request.to_owned();
            } else if line.starts_with("# POST ") || line.starts_with("# GET ") {
                timing.request_line = line[2..].to_owned();
            } else if line.starts_with("# ... cut") {
                timing.cut_at = Some(timing.reads.len());
            } else if let Some(end) = line.strip_prefix("# end ") {
                timing.end = Some(tick(end.split(' ').next().unwrap()));
                timing.timed_out = end.contains("timed out");
            } else if !line.starts_with('#') {
                let mut words = line.split(' ');
                timing.reads.push((tick(words.next().unwrap()), words.next().unwrap().parse().unwrap()));
            }
        }
        timing
    }

    /// For each byte of the capture the moment and the number of its read.
    fn moments(&self, length: usize) -> Vec<(Tick, usize)> {
        let mut moments = vec![(Tick::ZERO, usize::MAX); length];
        let cut_at = self.cut_at.unwrap_or(self.reads.len());
        let mut front = 0;
        for (number, (tick, size)) in self.reads[..cut_at].iter().enumerate() {
            moments[front..front + size].fill((*tick, number));
            front += size;
        }
        let mut back = length;
        for (number, (tick, size)) in self.reads.iter().enumerate().skip(cut_at).rev() {
            let start = back.saturating_sub(*size).max(front);
            moments[start..back].fill((*tick, number));
            back = start;
        }
        assert!(self.reads.is_empty() || front == back, "the reads do not add up to the capture");
        moments
    }
}

/// Milliseconds with two decimals, exactly.
pub fn tick(millis: &str) -> Tick {
    let nanos = millis.parse::<f64>().unwrap() * 1e6;
    Tick::from_nanos(nanos.round() as u64)
}

impl Wire {
    pub fn dialect(&self) -> Dialect {
        match self.path.as_str() {
            "/v1/chat/completions" => Dialect::Chat,
            "/v1/completions" => Dialect::Completions,
            "/v1/responses" => Dialect::Responses,
            "/v1/messages" => Dialect::Messages,
            _ => Dialect::Plain,
        }
    }

    pub fn reader(&self) -> ResponseFormat {
        if self.content_type.starts_with("text/event-stream") { ResponseFormat::Events } else { ResponseFormat::Json }
    }

    /// The request was sent at tick 0.
    pub fn expect(&self) -> ResponseExpectation {
        let prompts = match &self.request["prompt"] {
            Value::Array(prompts) if prompts.iter().any(Value::is_string) => prompts.len() as u64,
            _ => 1,
        };
        let echoes = self.request["echo"] == true;
        let prompts_of = match &self.request["prompt"] {
            Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
            one => one.as_str().into_iter().collect::<Vec<_>>(),
        };
        let echoed = prompts_of.into_iter().filter(|_| echoes);
        ResponseExpectation {
            dialect: self.dialect(),
            stream_asked: self.request["stream"] == true,
            choices: self.request["n"].as_u64().unwrap_or(1) * prompts,
            prompts,
            echo_prompts: echoed.map(str::to_owned).collect(),
            start: Tick::ZERO,
            tokens_per_event: 1.0,
        }
    }
}

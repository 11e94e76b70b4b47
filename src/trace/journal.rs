//! The gateway's own journal.
//!
//! Its lines stand in the order in which requests *ended*: they are held until no line behind them can have come
//! earlier, a window's length of traffic at most.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use super::TraceRequest;
use super::blocks::{PromptBlocks, scrambled};
use super::error::{TraceError, TraceFault};
use super::json_lines::Lines;
use super::rows::{Row, Rows, TraceNotes, nanos};

/// The version of the format that is read.
const VERSION: u64 = 1;

/// Tokens per hash of 512 bytes, at four bytes per token.
pub(super) const BLOCK_TOKENS: u64 = 128;

/// The needed members of a line: a header or a request. Other members are ignored.
#[derive(Deserialize)]
struct RecordedLine {
    /// Header: whose format it is.
    journal: Option<String>,
    version: Option<u64>,
    hash_key_id: Option<String>,
    /// Request.
    arrival_unix_ns: Option<u64>,
    endpoint: Option<String>,
    tenant: Option<String>,
    class: Option<String>,
    #[serde(default)]
    stream: bool,
    choices: Option<u64>,
    max_output_tokens: Option<u64>,
    prompt_tokens: Option<i64>,
    output_tokens: Option<i64>,
    #[serde(default)]
    prefix: Vec<String>,
    reason: Option<String>,
}

/// Output lengths of a class so far.
#[derive(Default)]
struct MeanOutput {
    tokens: u64,
    requests: u64,
}

/// Output that is assumed of the first requests of a class that failed.
const UNKNOWN_OUTPUT: u64 = 256;

/// A request that waits for its turn.
struct Held {
    moment: i128,
    order: u64,
    request: TraceRequest,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        (self.moment, self.order) == (other.moment, other.order)
    }
}

impl Eq for Held {}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.moment, self.order).cmp(&(other.moment, other.order))
    }
}

pub(super) struct JournalLines<R> {
    lines: Lines<R>,
    window: Duration,
    held: BinaryHeap<Reverse<Held>>,
    newest: i128,
    passed: Option<i128>,
    order: u64,
    is_read: bool,
    /// Hashes compare under one key only.
    key: u64,
    classes: HashMap<Arc<str>, MeanOutput>,
}

impl<R: BufRead> JournalLines<R> {
    pub fn new(input: R, window: Duration) -> Self {
        JournalLines {
            lines: Lines::new(input),
            window,
            held: BinaryHeap::new(),
            newest: i128::MIN,
            passed: None,
            order: 0,
            is_read: false,
            key: 0,
            classes: HashMap::new(),
        }
    }

    /// Reads one line. A line that is not JSON may be the rest of a crash.
    fn read(&mut self, notes: &mut TraceNotes) -> Result<(), TraceError> {
        let Some((bytes, number, _)) = self.lines.next()? else {
            self.is_read = true;
            return Ok(());
        };
        let Ok(line) = serde_json::from_slice::<RecordedLine>(bytes) else {
            notes.unreadable += 1;
            return Ok(());
        };
        if line.journal.is_some() {
            let found = line.version.unwrap_or(0);
            if found != VERSION {
                return Err(TraceError { line: number, fault: TraceFault::Version { found, known: VERSION } });
            }
            self.key = line.hash_key_id.map_or(0, |id| hash_of(&id));
            return Ok(());
        }
        self.take(line, number, notes)
    }

    fn take(&mut self, line: RecordedLine, number: u64, notes: &mut TraceNotes) -> Result<(), TraceError> {
        let missing = |field| TraceError { line: number, fault: TraceFault::Missing(field) };
        let moment = i128::from(line.arrival_unix_ns.ok_or(missing("arrival_unix_ns"))?);
        let tokens = |value: Option<i64>, field: &'static str| match value {
            Some(value) if value < 0 => {
                let must = "a number of tokens, 0 or more";
                let fault = TraceFault::BadNumber { field, value: value.to_string(), must };
                Err(TraceError { line: number, fault })
            }
            value => Ok(value.map(|value| value as u64)),
        };
        let input = tokens(line.prompt_tokens, "prompt_tokens")?;
        let output = tokens(line.output_tokens, "output_tokens")?;
        let (Some(input), true) = (input, is_work(&line)) else {
            notes.not_generating += 1;
            return Ok(());
        };
        let class: Option<Arc<str>> = line.class.map(|name| match self.classes.get_key_value(name.as_str()) {
            Some((known, _)) => Arc::clone(known),
            None => Arc::from(name),
        });
        let seen = self.classes.entry(class.clone().unwrap_or_default()).or_default();
        let output = match output.filter(|output| *output > 0) {
            // Several answers to one prompt are computed side by side; one of their length stands for them.
            Some(output) => output.div_ceil(line.choices.unwrap_or(1).max(1)),
            None => {
                notes.guessed_output += 1;
                let mean = seen.tokens.checked_div(seen.requests).unwrap_or(UNKNOWN_OUTPUT);
                mean.min(line.max_output_tokens.unwrap_or(u64::MAX))
            }
        };
        (seen.tokens, seen.requests) = (seen.tokens.saturating_add(output), seen.requests + 1);
        let ids = line.prefix.iter().map(|hash| hash_of(hash) ^ self.key);
        let request = TraceRequest {
            line: number,
            class,
            tenant: line.tenant.map(|tenant| hash_of(&tenant) ^ self.key),
            input: input.max(1),
            output: output.max(1),
            cap: line.max_output_tokens,
            stream: Some(line.stream),
            blocks: PromptBlocks::from_ids(BLOCK_TOKENS, input, ids),
            ..TraceRequest::default()
        };
        if let Some(passed) = self.passed.filter(|passed| *passed > moment) {
            let fault = TraceFault::TooLate { by: nanos(passed - moment), window: self.window };
            return Err(TraceError { line: number, fault });
        }
        self.newest = self.newest.max(moment);
        self.order += 1;
        self.held.push(Reverse(Held { moment, order: self.order, request }));
        Ok(())
    }
}

/// Whether an engine had, or should have had, work with it.
fn is_work(line: &RecordedLine) -> bool {
    let generates = ["chat/completions", "completions", "responses", "messages"];
    let to_a_generating_path = line
        .endpoint
        .as_deref()
        .is_none_or(|path| generates.iter().any(|end| path.trim_end_matches('/').ends_with(end)));
    to_a_generating_path && !matches!(line.reason.as_deref(), Some("invalid_request" | "unauthorized" | "unjudged"))
}

/// The number of the tenant that a journal writes as this hash, under the key with this id.
#[must_use]
pub fn journal_tenant(hash: &str, key_id: &str) -> u64 {
    hash_of(hash) ^ hash_of(key_id)
}

/// A number for a hash that is written as text.
fn hash_of(text: &str) -> u64 {
    u64::from_str_radix(text, 16)
        .unwrap_or_else(|_| text.bytes().fold(0, |hash, byte| scrambled(hash ^ u64::from(byte))))
}

impl<R: BufRead> Rows for JournalLines<R> {
    fn next_row(&mut self, notes: &mut TraceNotes) -> Result<Option<Row>, TraceError> {
        let window = self.window.as_nanos() as i128;
        loop {
            let is_due =
                self.held.peek().is_some_and(|Reverse(held)| self.is_read || self.newest - held.moment > window);
            if is_due {
                let Reverse(Held { moment, request, .. }) = self.held.pop().expect("it was looked at");
                self.passed = Some(moment);
                return Ok(Some((moment, request)));
            }
            if self.is_read {
                return Ok(None);
            }
            self.read(notes)?;
        }
    }
}

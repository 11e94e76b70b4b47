//! The public formats that are JSON lines.

use std::io::{BufRead, Read};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Number;
use serde_json::error::Category;

use super::TraceRequest;
use super::blocks::PromptBlocks;
use super::error::{TraceError, TraceFault};
use super::rows::{Row, Rows, TraceNotes};

/// The longest line of a trace: a prompt of a million tokens has some 62,500 ids.
const LONGEST_LINE: usize = 4 * 1024 * 1024;

/// Lines of a file, one at a time.
pub(super) struct Lines<R> {
    input: R,
    line: Vec<u8>,
    number: u64,
}

/// The text of a line, its number, and whether it had an end.
type RawLine<'a> = (&'a [u8], u64, bool);

impl<R: BufRead> Lines<R> {
    pub fn new(input: R) -> Self {
        Lines { input, line: Vec::new(), number: 0 }
    }

    /// The next line that is not blank.
    pub fn next(&mut self) -> Result<Option<RawLine<'_>>, TraceError> {
        loop {
            self.line.clear();
            self.number += 1;
            let limit = LONGEST_LINE as u64 + 1;
            let read = (&mut self.input).take(limit).read_until(b'\n', &mut self.line);
            match read {
                Err(error) => return Err(TraceError { line: self.number, fault: error.into() }),
                Ok(0) => return Ok(None),
                Ok(read) if read > LONGEST_LINE => {
                    let fault = TraceFault::TooLong { limit: LONGEST_LINE };
                    return Err(TraceError { line: self.number, fault });
                }
                Ok(_) => {}
            }
            let is_whole = self.line.ends_with(b"\n");
            if !self.line.trim_ascii().is_empty() {
                return Ok(Some((self.line.trim_ascii(), self.number, is_whole)));
            }
        }
    }

    /// The next line, read as `T`.
    fn parse<T: DeserializeOwned>(&mut self) -> Result<Option<(T, u64)>, TraceError> {
        let Some((line, number, is_whole)) = self.next()? else { return Ok(None) };
        let parsed = serde_json::from_slice(line).map_err(|error| {
            let fault = match error.classify() {
                Category::Eof if !is_whole => TraceFault::CutOff,
                _ => {
                    // The error counts lines from the given one.
                    let told = error.to_string();
                    let what = told.split(" at line ").next().unwrap_or(&told);
                    TraceFault::Malformed(format!("{what} at column {}", error.column()))
                }
            };
            TraceError { line: number, fault }
        })?;
        Ok(Some((parsed, number)))
    }
}

/// Members that both formats have. Numbers stay as they are written until they are checked.
#[derive(Deserialize)]
struct TraceLine {
    timestamp: Option<Number>,
    input_length: Option<Number>,
    output_length: Option<Number>,
    #[serde(default)]
    hash_ids: Vec<u64>,
    #[serde(default)]
    chat_id: Option<i64>,
    #[serde(default)]
    parent_chat_id: Option<i64>,
}

fn number(value: Option<&Number>, field: &'static str, line: u64, must: &'static str) -> Result<f64, TraceError> {
    let value = value.ok_or(TraceError { line, fault: TraceFault::Missing(field) })?;
    let number = value.as_f64().filter(|number| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| {
        let fault = TraceFault::BadNumber { field, value: value.to_string(), must };
        TraceError { line, fault }
    })
}

impl TraceLine {
    /// The request, with times in units of this many nanoseconds and blocks of this many tokens.
    fn row(self, line: u64, unit: f64, unit_name: &'static str, block: u64) -> Result<Row, TraceError> {
        let moment = (number(self.timestamp.as_ref(), "timestamp", line, unit_name)? * unit).round() as i128;
        let length = |value: Option<&Number>, field| {
            let tokens = number(value, field, line, "a number of tokens, 0 or more")?;
            Ok::<u64, TraceError>((tokens as u64).max(1))
        };
        let input = length(self.input_length.as_ref(), "input_length")?;
        let output = length(self.output_length.as_ref(), "output_length")?;
        let blocks = PromptBlocks::from_ids(block, input, self.hash_ids);
        Ok((moment, TraceRequest { line, input, output, blocks, ..TraceRequest::default() }))
    }
}

/// Milliseconds, blocks of 512 tokens.
pub(super) struct MooncakeLines<R>(Lines<R>);

impl<R: BufRead> MooncakeLines<R> {
    pub fn new(input: R) -> Self {
        MooncakeLines(Lines::new(input))
    }
}

impl<R: BufRead> Rows for MooncakeLines<R> {
    fn next_row(&mut self, _: &mut TraceNotes) -> Result<Option<Row>, TraceError> {
        let Some((line, number)) = self.0.parse::<TraceLine>()? else { return Ok(None) };
        line.row(number, 1e6, "a number of milliseconds, 0 or more", 512).map(Some)
    }
}

/// Seconds, blocks of 16 tokens, conversations by the chat that they go on with.
pub(super) struct BailianLines<R>(Lines<R>);

impl<R: BufRead> BailianLines<R> {
    pub fn new(input: R) -> Self {
        BailianLines(Lines::new(input))
    }
}

impl<R: BufRead> Rows for BailianLines<R> {
    fn next_row(&mut self, _: &mut TraceNotes) -> Result<Option<Row>, TraceError> {
        let Some((line, number)) = self.0.parse::<TraceLine>()? else { return Ok(None) };
        let session = line.parent_chat_id.filter(|parent| *parent >= 0).or(line.chat_id);
        let (moment, mut request) = line.row(number, 1e9, "a number of seconds, 0 or more", 16)?;
        request.session = session.map(|session| super::blocks::scrambled(session.unsigned_abs()));
        Ok(Some((moment, request)))
    }
}

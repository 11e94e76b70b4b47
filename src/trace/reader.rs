//! Formats, and the reader that all of them share.

use std::io::BufRead;
use std::time::Duration;

use super::TraceRequest;
use super::csv_rows::{AzureRows, BurstGptRows};
use super::error::{TraceError, TraceFault};
use super::journal::JournalLines;
use super::json_lines::{BailianLines, MooncakeLines};
use super::rows::{Row, Rows, TraceNotes, nanos};

/// A format of traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TraceFormat {
    /// The gateway's own journal (`docs/journal.md`).
    Journal,
    /// Azure's LLM inference traces: CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`.
    Azure,
    /// BurstGPT: CSV with seconds, request and response tokens.
    BurstGpt,
    /// Mooncake: JSON lines with milliseconds and hash ids of 512-token blocks.
    Mooncake,
    /// Alibaba Bailian (Qwen): JSON lines with seconds and hash ids of 16-token blocks.
    Bailian,
}

impl TraceFormat {
    /// All of them.
    pub const ALL: [TraceFormat; 5] =
        [TraceFormat::Journal, TraceFormat::Azure, TraceFormat::BurstGpt, TraceFormat::Mooncake, TraceFormat::Bailian];

    /// The name on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            TraceFormat::Journal => "journal",
            TraceFormat::Azure => "azure",
            TraceFormat::BurstGpt => "burstgpt",
            TraceFormat::Mooncake => "mooncake",
            TraceFormat::Bailian => "bailian",
        }
    }

    /// Tokens of the blocks by which the format tells that prompts begin alike; `None` where it does not tell.
    #[must_use]
    pub const fn block_tokens(self) -> Option<u64> {
        match self {
            TraceFormat::Journal => Some(super::journal::BLOCK_TOKENS),
            TraceFormat::Azure | TraceFormat::BurstGpt => None,
            TraceFormat::Mooncake => Some(512),
            TraceFormat::Bailian => Some(16),
        }
    }

    /// The format of a trace that begins with this line.
    #[must_use]
    pub fn of_first_line(line: &str) -> Option<TraceFormat> {
        let line = line.trim_start_matches('\u{feff}').trim();
        let has = |member: &str| line.contains(&format!("\"{member}\""));
        if line.starts_with('{') {
            return if has("journal") || has("arrival_unix_ns") {
                Some(TraceFormat::Journal)
            } else if has("chat_id") {
                Some(TraceFormat::Bailian)
            } else if has("timestamp") && has("input_length") {
                Some(TraceFormat::Mooncake)
            } else {
                None
            };
        }
        let columns: Vec<String> = line.split(',').map(|column| column.trim().to_ascii_lowercase()).collect();
        let has = |column: &str| columns.iter().any(|name| name == column);
        if has("contexttokens") {
            Some(TraceFormat::Azure)
        } else if has("request tokens") {
            Some(TraceFormat::BurstGpt)
        } else {
            None
        }
    }
}

impl std::str::FromStr for TraceFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        TraceFormat::ALL.into_iter().find(|format| format.as_str() == text).ok_or_else(|| {
            let names: Vec<&str> = TraceFormat::ALL.iter().map(|format| format.as_str()).collect();
            format!("write one of {}", names.join(", "))
        })
    }
}

/// Reads a trace, request by request, in order of time.
///
/// After an error there is nothing more. A trace without requests is one.
pub struct TraceReader<R> {
    rows: AnyRows<R>,
    notes: TraceNotes,
    origin: Option<i128>,
    last: i128,
    is_over: bool,
}

enum AnyRows<R> {
    Journal(Box<JournalLines<R>>),
    Azure(Box<AzureRows<R>>),
    BurstGpt(Box<BurstGptRows<R>>),
    Mooncake(MooncakeLines<R>),
    Bailian(BailianLines<R>),
}

/// How long the longest request of a journal may take: its lines stand in the order in which requests ended.
const REORDERING_WINDOW: Duration = Duration::from_secs(3600);

impl<R: BufRead> TraceReader<R> {
    /// Reads this format.
    pub fn new(format: TraceFormat, input: R) -> Self {
        let rows = match format {
            TraceFormat::Journal => AnyRows::Journal(Box::new(JournalLines::new(input, REORDERING_WINDOW))),
            TraceFormat::Azure => AnyRows::Azure(Box::new(AzureRows::new(input))),
            TraceFormat::BurstGpt => AnyRows::BurstGpt(Box::new(BurstGptRows::new(input))),
            TraceFormat::Mooncake => AnyRows::Mooncake(MooncakeLines::new(input)),
            TraceFormat::Bailian => AnyRows::Bailian(BailianLines::new(input)),
        };
        TraceReader { rows, notes: TraceNotes::default(), origin: None, last: 0, is_over: false }
    }

    /// What was passed over so far.
    #[must_use]
    pub const fn notes(&self) -> TraceNotes {
        self.notes
    }

    fn row(&mut self) -> Result<Option<Row>, TraceError> {
        let notes = &mut self.notes;
        match &mut self.rows {
            AnyRows::Journal(rows) => rows.next_row(notes),
            AnyRows::Azure(rows) => rows.next_row(notes),
            AnyRows::BurstGpt(rows) => rows.next_row(notes),
            AnyRows::Mooncake(rows) => rows.next_row(notes),
            AnyRows::Bailian(rows) => rows.next_row(notes),
        }
    }

    fn request(&mut self) -> Result<Option<TraceRequest>, TraceError> {
        let Some((moment, mut request)) = self.row()? else {
            return match self.origin {
                Some(_) => Ok(None),
                None => Err(TraceError { line: 1, fault: TraceFault::Empty }),
            };
        };
        let origin = *self.origin.get_or_insert(moment);
        let at = moment - origin;
        if at < self.last {
            let by = nanos(self.last - at);
            return Err(TraceError { line: request.line, fault: TraceFault::Unsorted { by } });
        }
        self.last = at;
        request.at = nanos(at);
        Ok(Some(request))
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let request = self.request().transpose();
        self.is_over = !matches!(request, Some(Ok(_)));
        request
    }
}

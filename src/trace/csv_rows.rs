//! The public formats that are CSV.

use std::io::BufRead;

use csv::{ByteRecord, ErrorKind, ReaderBuilder, Trim};
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use super::TraceRequest;
use super::error::{TraceError, TraceFault};
use super::rows::{Row, Rows, TraceNotes};

/// A table with a head, row by row.
struct CsvTable<R> {
    reader: csv::Reader<R>,
    record: ByteRecord,
    columns: Option<Vec<String>>,
}

impl<R: BufRead> CsvTable<R> {
    fn new(input: R) -> Self {
        let reader = ReaderBuilder::new().trim(Trim::All).from_reader(input);
        CsvTable { reader, record: ByteRecord::new(), columns: None }
    }

    /// Places of columns, by any of their names; the first of each must be there.
    fn columns<const N: usize>(&mut self, names: [&'static str; N]) -> Result<[usize; N], TraceError> {
        if self.columns.is_none() {
            let head = self.reader.byte_headers().map_err(|error| told(&error))?;
            let name =
                |field: &[u8]| String::from_utf8_lossy(field).trim_start_matches('\u{feff}').to_ascii_lowercase();
            let columns: Vec<String> = head.iter().map(name).collect();
            self.columns = Some(columns.iter().map(|name| name.replace([' ', '_'], "")).collect());
        }
        let columns = self.columns.as_deref().unwrap_or_default();
        let mut places = [0; N];
        for (place, name) in places.iter_mut().zip(names) {
            let plain = name.to_ascii_lowercase().replace(' ', "");
            let found = columns.iter().position(|column| *column == plain);
            *place = found.ok_or(TraceError { line: 1, fault: TraceFault::Missing(name) })?;
        }
        Ok(places)
    }

    /// A column that may be missing.
    fn column(&self, name: &str) -> Option<usize> {
        self.columns.as_deref()?.iter().position(|column| column == name)
    }

    fn next(&mut self) -> Result<bool, TraceError> {
        self.reader.read_byte_record(&mut self.record).map_err(|error| told(&error))
    }

    fn line(&self) -> u64 {
        self.record.position().map_or(1, csv::Position::line)
    }

    fn text(&self, place: usize) -> String {
        String::from_utf8_lossy(&self.record[place]).into_owned()
    }

    fn bad(&self, field: &'static str, place: usize, must: &'static str) -> TraceError {
        let fault = TraceFault::BadNumber { field, value: self.text(place), must };
        TraceError { line: self.line(), fault }
    }

    /// A count of tokens; also written as `374.0`.
    fn tokens(&self, field: &'static str, place: usize) -> Result<u64, TraceError> {
        let text = std::str::from_utf8(&self.record[place]).unwrap_or_default();
        let whole = || text.parse::<f64>().ok().filter(|number| number.fract() == 0.0 && (0.0..1e15).contains(number));
        let count = text.parse().ok().or_else(|| whole().map(|number| number as u64));
        count.ok_or_else(|| self.bad(field, place, "a number of tokens, 0 or more"))
    }

    fn seconds(&self, field: &'static str, place: usize) -> Result<i128, TraceError> {
        let number = std::str::from_utf8(&self.record[place]).ok().and_then(|text| text.parse::<f64>().ok());
        let number = number.filter(|number| number.is_finite() && *number >= 0.0);
        let number = number.ok_or_else(|| self.bad(field, place, "a number of seconds, 0 or more"))?;
        Ok((number * 1e9).round() as i128)
    }
}

fn told(error: &csv::Error) -> TraceError {
    let line = error.position().map_or(1, csv::Position::line);
    let fault = match error.kind() {
        ErrorKind::Io(error) => TraceFault::Io(std::io::Error::new(error.kind(), error.to_string())),
        ErrorKind::UnequalLengths { expected_len, len, .. } if len < expected_len => TraceFault::Malformed(format!(
            "there are {len} fields where the head has {expected_len}: half a line? remove it"
        )),
        ErrorKind::UnequalLengths { expected_len, len, .. } => {
            TraceFault::Malformed(format!("there are {len} fields where the head has {expected_len}"))
        }
        _ => TraceFault::Malformed(error.to_string()),
    };
    TraceError { line, fault }
}

/// A request with these lengths; an engine computes at least one token of each.
fn request(line: u64, input: u64, output: u64) -> TraceRequest {
    TraceRequest { line, input: input.max(1), output: output.max(1), ..TraceRequest::default() }
}

/// `TIMESTAMP,ContextTokens,GeneratedTokens`.
pub(super) struct AzureRows<R>(CsvTable<R>);

impl<R: BufRead> AzureRows<R> {
    pub fn new(input: R) -> Self {
        AzureRows(CsvTable::new(input))
    }
}

impl<R: BufRead> Rows for AzureRows<R> {
    fn next_row(&mut self, _: &mut TraceNotes) -> Result<Option<Row>, TraceError> {
        let table = &mut self.0;
        let [time, input, output] = table.columns(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])?;
        if !table.next()? {
            return Ok(None);
        }
        let must = "a time such as 2023-11-16 18:15:46.6805900";
        let moment = moment(&table.text(time)).ok_or_else(|| table.bad("TIMESTAMP", time, must))?;
        let (input, output) = (table.tokens("ContextTokens", input)?, table.tokens("GeneratedTokens", output)?);
        Ok(Some((moment, request(table.line(), input, output))))
    }
}

/// Nanoseconds of a time of day, with or without an offset (default UTC).
fn moment(text: &str) -> Option<i128> {
    let civil = |text: &str| text.parse::<DateTime>().ok()?.to_zoned(TimeZone::UTC).ok();
    let stamp = text.parse::<Timestamp>().ok();
    stamp.or_else(|| civil(text).map(|zoned| zoned.timestamp())).map(Timestamp::as_nanosecond)
}

/// `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, newer ones with `Session ID`.
pub(super) struct BurstGptRows<R>(CsvTable<R>);

impl<R: BufRead> BurstGptRows<R> {
    pub fn new(input: R) -> Self {
        BurstGptRows(CsvTable::new(input))
    }
}

impl<R: BufRead> Rows for BurstGptRows<R> {
    fn next_row(&mut self, notes: &mut TraceNotes) -> Result<Option<Row>, TraceError> {
        let table = &mut self.0;
        let [time, input, output] = table.columns(["Timestamp", "Request tokens", "Response tokens"])?;
        let session = table.column("sessionid");
        while table.next()? {
            let moment = table.seconds("Timestamp", time)?;
            let lengths = (table.tokens("Request tokens", input)?, table.tokens("Response tokens", output)?);
            if lengths.1 == 0 {
                notes.failed += 1;
                continue;
            }
            let mut request = request(table.line(), lengths.0, lengths.1);
            let named = session.map(|place| &table.record[place]).filter(|name| !name.is_empty());
            request.session =
                named.map(|name| name.iter().fold(0, |hash, byte| super::blocks::scrambled(hash ^ u64::from(*byte))));
            return Ok(Some((moment, request)));
        }
        Ok(None)
    }
}

//! The trace: opened, decompressed, its format found, and its requests counted as they are read.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, bail};
use flate2::read::MultiGzDecoder;

use super::classes::ReplayedClasses;
use super::options::ReplayArgs;
use crate::trace::{Reshape, Reshaped, TraceError, TraceFormat, TraceNotes, TraceReader, TraceRequest};

/// Longest first line that is looked at, in bytes: a header, or a request with many blocks.
const LONGEST_FIRST_LINE: u64 = 4 << 20;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// A trace's file.
pub struct TraceSource {
    file: TraceFile,
    /// Its format.
    pub format: TraceFormat,
    reshape: Reshape,
}

/// Where a trace is read from; may be opened several times, one after the other.
enum TraceFile {
    Named(PathBuf),
    /// Standard input, copied into a file that has no name any more.
    Copied(File),
}

/// State of reading the trace.
#[derive(Debug, Default)]
pub struct FeedState {
    /// Why it cannot be read on.
    pub error: Option<TraceError>,
    /// Lines that the reader skipped, and why.
    pub notes: TraceNotes,
    /// Requests of a class that is not known.
    pub unknown_class: u64,
    /// Requests of a model that no route of their class serves.
    pub unknown_model: u64,
    /// Requests longer than a context.
    pub too_long: u64,
    /// Requests given out.
    pub given: u64,
}

type AnyInput = Box<dyn BufRead>;

/// Requests of the trace in the window and at the rate asked for, with the indices of their classes. Ends at an error,
/// which is kept.
pub struct TraceFeed<'a> {
    trace: Reshaped<TraceReader<AnyInput>>,
    classes: &'a ReplayedClasses,
    longest: Option<u64>,
    state: Rc<RefCell<FeedState>>,
}

impl TraceSource {
    /// Finds the trace of a command line and its format.
    ///
    /// # Errors
    /// It cannot be opened, or is of no known format.
    pub fn find(args: &ReplayArgs, path: &Path) -> anyhow::Result<Self> {
        let file = match path.to_str() {
            Some("-") => TraceFile::Copied(copied(&mut std::io::stdin().lock())?),
            _ => TraceFile::Named(path.to_owned()),
        };
        let format = match args.format {
            Some(format) => format,
            None => detected(&file)?,
        };
        Ok(TraceSource { file, format, reshape: args.reshape()? })
    }

    /// The name of the file.
    pub fn name(&self) -> String {
        self.file.to_string()
    }

    /// Window and rate of the trace.
    pub const fn reshape(&self) -> Reshape {
        self.reshape
    }

    /// Its requests from the beginning on. `longest`: requests with more tokens are left out.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn feed<'a>(&self, classes: &'a ReplayedClasses, longest: Option<u64>) -> anyhow::Result<TraceFeed<'a>> {
        let reader = TraceReader::new(self.format, open(&self.file)?);
        Ok(TraceFeed { trace: self.reshape.apply(reader)?, classes, longest, state: Rc::default() })
    }
}

impl TraceFeed<'_> {
    /// The state so far; valid even after the feed is dropped.
    pub fn state(&self) -> Rc<RefCell<FeedState>> {
        Rc::clone(&self.state)
    }
}

impl Iterator for TraceFeed<'_> {
    type Item = (TraceRequest, usize);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let next = self.trace.next();
            let mut state = self.state.borrow_mut();
            state.notes = self.trace.trace().notes();
            match next? {
                Err(error) => {
                    state.error = Some(error);
                    return None;
                }
                Ok(request) if self.longest.is_some_and(|most| request.input + request.output > most) => {
                    state.too_long += 1;
                }
                Ok(request) => {
                    let (class, is_known) = self.classes.index_of(request.class.as_deref());
                    state.unknown_class += u64::from(!is_known);
                    state.given += 1;
                    return Some((request, class));
                }
            }
        }
    }
}

impl std::fmt::Display for TraceFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TraceFile::Named(path) => path.display().fmt(f),
            TraceFile::Copied(_) => f.write_str("standard input"),
        }
    }
}

/// Copies a stream to disk, because requests must not wait for a slow writer, and the trace is read more than once.
fn copied(stream: &mut impl Read) -> anyhow::Result<File> {
    let path = std::env::temp_dir().join(format!("goodput-replay-{}", std::process::id()));
    let shown = path.display();
    let create = File::options().read(true).write(true).create_new(true).open(&path);
    let mut file = create.with_context(|| format!("cannot write {shown}"))?;
    std::fs::remove_file(&path).with_context(|| format!("cannot remove {shown}"))?;
    std::io::copy(stream, &mut file).context("standard input cannot be copied")?;
    Ok(file)
}

/// Opens the file, and decompresses it if its first bytes are those of a compressed file.
fn open(shown: &TraceFile) -> anyhow::Result<AnyInput> {
    let file = match shown {
        TraceFile::Named(path) => File::open(path).with_context(|| format!("cannot open {shown}"))?,
        TraceFile::Copied(copy) => {
            let mut file = copy.try_clone().context("standard input cannot be read")?;
            file.rewind().context("standard input cannot be read")?;
            file
        }
    };
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        bail!("{shown} is a folder; name one file of it");
    }
    let mut input = BufReader::with_capacity(1 << 18, file);
    let begin = input.fill_buf().with_context(|| format!("cannot read {shown}"))?;
    if begin.starts_with(GZIP) {
        return Ok(Box::new(BufReader::new(MultiGzDecoder::new(input))));
    }
    if begin.starts_with(ZSTD) {
        let decoder = zstd::Decoder::with_buffer(input).with_context(|| format!("cannot read {shown}"))?;
        return Ok(Box::new(BufReader::new(decoder)));
    }
    Ok(Box::new(input))
}

fn detected(shown: &TraceFile) -> anyhow::Result<TraceFormat> {
    let mut input = open(shown)?.take(LONGEST_FIRST_LINE);
    let mut line = Vec::new();
    while line.trim_ascii().is_empty() {
        line.clear();
        if input.read_until(b'\n', &mut line).with_context(|| format!("cannot read {shown}"))? == 0 {
            bail!("{shown}: the trace has no requests");
        }
    }
    TraceFormat::of_first_line(&String::from_utf8_lossy(&line)).with_context(|| {
        let names = TraceFormat::ALL.map(TraceFormat::as_str).join(", ");
        format!("{shown}: its first line is that of no format that is known; name it by --format ({names})")
    })
}

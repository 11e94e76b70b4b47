//! Parses a long event while it passes.
//!
//! Same rules as [`EventFields`](super::sse::EventFields) plus a parse of the joined data, but bytes are
//! seen once and not kept: a small state machine splits the lines, and data goes directly to the
//! tokenizer.

use crate::json::Tokenizer;
use crate::types::Dialect;

use super::event_parser::EventParser;
use super::parsed_event::{EventKind, ParsedEvent};

/// An event of which a part was already passed on.
#[derive(Debug)]
pub(super) struct OversizedEvent {
    at: LineState,
    /// The line's field name, or the value of an `event` line. Cut beyond the length of any
    /// known word.
    word: Vec<u8>,
    /// Whether the last byte was a CR, to which a following LF belongs.
    was_cr: bool,
    /// Whether a data line was seen.
    has_data: bool,
    kind: EventKind,
    /// The first bytes of the data, as many as [`DONE`] has.
    start: Vec<u8>,
    data: Object,
    /// The last `error` line.
    error: Option<Box<Object>>,
    dialect: Dialect,
    length: usize,
}

/// An object that passes in pieces.
#[derive(Debug)]
struct Object {
    /// A character cut by the end of a piece.
    cut: Vec<u8>,
    tokenizer: Tokenizer,
    parser: EventParser,
}

/// The meaning of a long event.
#[derive(Debug)]
pub(super) enum OversizedEventEnd {
    /// A JSON object, or an event named as an error.
    Said(Box<ParsedEvent>),
    /// The end of the stream.
    Done,
    /// Neither.
    Nothing,
}

/// The data that ends a stream.
pub(super) const DONE: &[u8] = b"[DONE]";

/// Position of the next byte in its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineState {
    /// In the field name.
    Name,
    /// After the colon of a `data`, `event` or `error` line, where one space may follow.
    BeforeData,
    BeforeEvent,
    BeforeError,
    /// In the value.
    Data,
    Event,
    Error,
    /// In a line of no interest.
    Ignored,
}

const LONGEST_WORD: usize = 64;

const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

impl OversizedEvent {
    pub(super) fn new(dialect: Dialect, keep_text: usize) -> Self {
        OversizedEvent {
            at: LineState::Name,
            word: Vec::new(),
            was_cr: false,
            has_data: false,
            kind: EventKind::Unnamed,
            start: Vec::new(),
            data: Object::of(EventParser::new(dialect, false, keep_text)),
            error: None,
            dialect,
            length: 0,
        }
    }

    /// Bytes of the event so far.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Takes the next piece.
    pub(super) fn push(&mut self, mut piece: &[u8]) {
        self.length += piece.len();
        while let Some(&byte) = piece.first() {
            let is_lf_of_crlf = std::mem::replace(&mut self.was_cr, byte == b'\r') && byte == b'\n';
            if matches!(byte, b'\n' | b'\r') {
                if !is_lf_of_crlf {
                    self.line_ended();
                }
                piece = &piece[1..];
                continue;
            }
            let end = memchr::memchr2(b'\n', b'\r', piece).unwrap_or(piece.len());
            let (line, rest) = piece.split_at(end);
            self.within_line(line);
            piece = rest;
        }
    }

    fn within_line(&mut self, mut line: &[u8]) {
        if self.at == LineState::Name {
            let colon = memchr::memchr(b':', line);
            self.keep_word(&line[..colon.unwrap_or(line.len())]);
            let Some(colon) = colon else { return };
            line = &line[colon + 1..];
            self.at = match self.word.as_slice() {
                b"data" => LineState::BeforeData,
                b"event" => LineState::BeforeEvent,
                b"error" => LineState::BeforeError,
                _ => LineState::Ignored,
            };
            self.word.clear();
            match self.at {
                LineState::BeforeData => self.begin_data(),
                LineState::BeforeError => self.begin_error(),
                _ => {}
            }
        }
        if line.is_empty() {
            return;
        }
        let begun = match self.at {
            LineState::BeforeData => LineState::Data,
            LineState::BeforeEvent => LineState::Event,
            LineState::BeforeError => LineState::Error,
            within => within,
        };
        if begun != self.at {
            line = line.strip_prefix(b" ").unwrap_or(line);
            self.at = begun;
        }
        match self.at {
            LineState::Data => self.data(line),
            LineState::Event => self.keep_word(line),
            LineState::Error => self.error.iter_mut().for_each(|error| error.push(line)),
            _ => {}
        }
    }

    fn keep_word(&mut self, piece: &[u8]) {
        let room = (LONGEST_WORD + 1).saturating_sub(self.word.len()).min(piece.len());
        self.word.extend_from_slice(&piece[..room]);
    }

    /// Begins a data line. Lines are joined by LF, which the tokenizer treats as in the joined
    /// text.
    fn begin_data(&mut self) {
        if std::mem::replace(&mut self.has_data, true) {
            self.data.read(b"\n");
        }
    }

    fn begin_error(&mut self) {
        self.error = Some(Box::new(Object::of(EventParser::of_error(self.dialect))));
    }

    /// Part of a data line.
    fn data(&mut self, piece: &[u8]) {
        let room = DONE.len().saturating_sub(self.start.len()).min(piece.len());
        self.start.extend_from_slice(&piece[..room]);
        self.data.push(piece);
    }

    fn line_ended(&mut self) {
        self.data.end_cut();
        self.error.iter_mut().for_each(|error| error.end_cut());
        match self.at {
            LineState::BeforeEvent | LineState::Event => self.kind = EventKind::of(&self.word),
            LineState::Name if self.word == b"data" => self.begin_data(),
            LineState::Name if self.word == b"event" => self.kind = EventKind::Unnamed,
            LineState::Name if self.word == b"error" => self.begin_error(),
            _ => {}
        }
        self.word.clear();
        self.at = LineState::Name;
    }

    /// Ends the event and returns its meaning.
    pub(super) fn finish(mut self) -> OversizedEventEnd {
        self.line_ended();
        let error = self.error.and_then(|error| error.finish());
        if let Some(mut parsed) = error.filter(|parsed| parsed.has_error || !self.has_data) {
            parsed.has_error = true;
            return OversizedEventEnd::Said(Box::new(parsed));
        }
        if self.start == DONE {
            return OversizedEventEnd::Done;
        }
        match self.data.finish() {
            Some(mut parsed) => {
                parsed.is_called(self.kind);
                OversizedEventEnd::Said(Box::new(parsed))
            }
            None if self.kind == EventKind::Error => {
                OversizedEventEnd::Said(Box::new(ParsedEvent { kind: self.kind, ..ParsedEvent::default() }))
            }
            None => OversizedEventEnd::Nothing,
        }
    }
}

impl Object {
    fn of(parser: EventParser) -> Self {
        Object { cut: Vec::new(), tokenizer: Tokenizer::of_answer(), parser }
    }

    /// Takes the next piece. Invalid UTF-8 is read as the replacement character, as clients do.
    fn push(&mut self, mut piece: &[u8]) {
        while let (Some((first, rest)), false) = (piece.split_first(), self.cut.is_empty()) {
            self.cut.push(*first);
            match std::str::from_utf8(&self.cut) {
                Ok(_) => self.end_cut(),
                Err(error) if error.error_len().is_none() => {}
                // The byte belongs to the next character.
                Err(_) => {
                    self.cut.pop();
                    self.end_cut();
                    continue;
                }
            }
            piece = rest;
        }
        let mut left = piece.len();
        for chunk in piece.utf8_chunks() {
            self.read(chunk.valid().as_bytes());
            let invalid = chunk.invalid();
            left -= chunk.valid().len() + invalid.len();
            let is_cut = left == 0 && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if is_cut {
                self.cut.extend_from_slice(invalid);
            } else if !invalid.is_empty() {
                self.read(REPLACEMENT);
            }
        }
    }

    fn end_cut(&mut self) {
        let cut = std::mem::take(&mut self.cut);
        if !cut.is_empty() {
            self.read(if std::str::from_utf8(&cut).is_ok() { &cut } else { REPLACEMENT });
        }
    }

    fn read(&mut self, text: &[u8]) {
        // The tokenizer keeps an error and reports it at the end.
        let _ = self.tokenizer.push(text, &mut self.parser);
    }

    /// The parsed object, if it was one.
    fn finish(mut self) -> Option<ParsedEvent> {
        let is_json = self.tokenizer.finish(&mut self.parser).is_ok();
        self.parser.parsed().filter(|_| is_json)
    }
}

//! The tokenizer's state machine.

use std::ops::Range;

use super::text::{PlainRun, UNESCAPED, Utf8, plain_run, stretch};
use super::{Interest, Literal, Nest, Scalar, Sink, SyntaxError};

/// Reads one JSON value from bytes cut anywhere.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    state: State,
    /// Bytes of all previous pushes.
    before: usize,
    nests: NestingStack,
    /// Depth of the container that the sink skips.
    muted_at: Option<usize>,
    /// The current string is a key.
    is_key: bool,
    /// The sink wants the current scalar's pieces.
    is_read: bool,
    /// A character cut by the frame's edge.
    utf8: Utf8,
    /// The digits behind `\u` so far, and their number.
    unit: u16,
    digits: u8,
    /// A pending high surrogate; 0 if none.
    high: u16,
    /// Position inside a number.
    number: Digits,
    /// The current literal, and how many of its bytes have come.
    literal: Literal,
    matched: u8,
    /// `NaN`, `Infinity` and `-Infinity` are accepted as numbers.
    takes_words: bool,
    /// The error found, if any.
    broken: Option<SyntaxError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Expects a value.
    Value,
    /// After `[`: expects a value or the end.
    FirstElement,
    /// After `{`: expects a key or the end.
    FirstKey,
    /// After a comma in an object: expects a key.
    NextKey,
    /// After a key: expects the colon.
    Colon,
    /// After a value inside a container: expects a comma or the end.
    Next,
    /// After the top-level value: expects whitespace only.
    Done,
    /// Inside a string.
    Text,
    /// After a backslash.
    Escape,
    /// Inside the four digits behind `\u`.
    Unit,
    /// Inside a number.
    Number,
    /// Inside `true`, `false` or `null`.
    Word,
    /// An error was found; no more input is read.
    Broken,
}

impl State {
    /// Whether a string that begins here is a key or a value, if one may.
    const fn string(self) -> Option<Scalar> {
        match self {
            State::FirstKey | State::NextKey => Some(Scalar::Key),
            State::Value | State::FirstElement => Some(Scalar::String),
            _ => None,
        }
    }
}

/// Position inside a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Digits {
    /// Before the first byte.
    Start,
    /// After `-`.
    Minus,
    /// After a leading `0`: no more integer digits.
    Zero,
    /// In the integer part.
    Integer,
    /// After `.`.
    Point,
    /// In the fraction.
    Fraction,
    /// After `e`.
    Exponent,
    /// After the exponent's sign.
    Sign,
    /// In the exponent's digits.
    Power,
    /// After that many letters of [`NAN`] or [`INFINITY`].
    Nan(u8),
    Infinity(u8),
}

/// Numbers that Python's `json` writes and RFC 8259 lacks.
const NAN: &[u8] = b"NaN";
const INFINITY: &[u8] = b"Infinity";

impl Digits {
    /// The next position, if `byte` continues the number.
    const fn after(self, byte: u8) -> Option<Digits> {
        Some(match (self, byte) {
            (Digits::Start, b'-') => Digits::Minus,
            (Digits::Start | Digits::Minus, b'0') => Digits::Zero,
            (Digits::Start | Digits::Minus | Digits::Integer, b'0'..=b'9') => Digits::Integer,
            (Digits::Zero | Digits::Integer, b'.') => Digits::Point,
            (Digits::Point | Digits::Fraction, b'0'..=b'9') => Digits::Fraction,
            (Digits::Zero | Digits::Integer | Digits::Fraction, b'e' | b'E') => Digits::Exponent,
            (Digits::Exponent, b'+' | b'-') => Digits::Sign,
            (Digits::Exponent | Digits::Sign | Digits::Power, b'0'..=b'9') => Digits::Power,
            _ => return None,
        })
    }

    /// [`after`](Digits::after), also accepting those words.
    fn after_or_word(self, byte: u8) -> Option<Digits> {
        let spells = |word: &[u8], at: u8| word.get(usize::from(at)) == Some(&byte);
        match self {
            Digits::Start if byte == NAN[0] => Some(Digits::Nan(1)),
            Digits::Start | Digits::Minus if byte == INFINITY[0] => Some(Digits::Infinity(1)),
            Digits::Nan(at) if spells(NAN, at) => Some(Digits::Nan(at + 1)),
            Digits::Infinity(at) if spells(INFINITY, at) => Some(Digits::Infinity(at + 1)),
            _ => self.after(byte),
        }
    }

    /// Whether a digit keeps this position.
    const fn repeats(self) -> bool {
        matches!(self, Digits::Integer | Digits::Fraction | Digits::Power)
    }

    /// Whether a number may end here.
    fn is_whole(self) -> bool {
        match self {
            Digits::Zero | Digits::Integer | Digits::Fraction | Digits::Power => true,
            Digits::Nan(letters) => usize::from(letters) == NAN.len(),
            Digits::Infinity(letters) => usize::from(letters) == INFINITY.len(),
            Digits::Start | Digits::Minus | Digits::Point | Digits::Exponent | Digits::Sign => false,
        }
    }
}

/// The open containers, one bit each (1: object). The innermost 64 need no allocation.
#[derive(Clone, Debug, Default)]
struct NestingStack {
    inner: u64,
    outer: Vec<u64>,
    depth: usize,
}

impl NestingStack {
    fn push(&mut self, nest: Nest) {
        if self.depth > 0 && self.depth.is_multiple_of(64) {
            self.outer.push(self.inner);
        }
        self.inner = (self.inner << 1) | u64::from(nest == Nest::Object);
        self.depth += 1;
    }

    fn pop(&mut self) {
        self.inner >>= 1;
        self.depth -= 1;
        if self.depth > 0
            && self.depth.is_multiple_of(64)
            && let Some(word) = self.outer.pop()
        {
            self.inner = word;
        }
    }

    fn innermost(&self) -> Option<Nest> {
        (self.depth > 0).then_some(if self.inner & 1 == 1 { Nest::Object } else { Nest::Array })
    }
}

/// An error was found and stored. Empty, so that the path without errors stays short.
struct Stop;

impl Default for Tokenizer {
    fn default() -> Self {
        Tokenizer::new()
    }
}

impl Tokenizer {
    /// A reader at the first byte of a value.
    #[must_use]
    pub const fn new() -> Self {
        Tokenizer::taking(false)
    }

    const fn taking(takes_words: bool) -> Self {
        Tokenizer {
            state: State::Value,
            before: 0,
            nests: NestingStack { inner: 0, outer: Vec::new(), depth: 0 },
            muted_at: None,
            is_key: false,
            is_read: false,
            utf8: Utf8::WHOLE,
            unit: 0,
            digits: 0,
            high: 0,
            number: Digits::Start,
            literal: Literal::Null,
            matched: 0,
            takes_words,
            broken: None,
        }
    }

    /// A reader of engines' output: accepts `NaN`, `Infinity` and `-Infinity` as numbers.
    #[must_use]
    pub const fn of_answer() -> Self {
        Tokenizer::taking(true)
    }

    /// Heap memory held, bytes: one bit per open container beyond the first 64.
    #[must_use]
    pub fn held(&self) -> usize {
        self.nests.outer.capacity() * size_of::<u64>()
    }

    /// Reads the next bytes and reports tokens to the sink.
    ///
    /// # Errors
    /// [`SyntaxError`] at the first invalid byte, and again on every further call.
    pub fn push<S: Sink>(&mut self, bytes: &[u8], sink: &mut S) -> Result<(), SyntaxError> {
        let mut i = 0;
        while i < bytes.len() {
            let read = match self.state.string() {
                Some(what) if bytes[i] == b'"' => self.strings(what, bytes, i, sink),
                _ => self.step(bytes, i, sink),
            };
            match read {
                Ok(next) => i = next,
                Err(Stop) => return self.broken.map_or(Ok(()), Err),
            }
        }
        self.before += bytes.len();
        Ok(())
    }

    /// Ends the input. Takes the sink because only here a top-level number is known to be complete.
    ///
    /// # Errors
    /// [`SyntaxError`] if the value is incomplete.
    pub fn finish<S: Sink>(&mut self, sink: &mut S) -> Result<(), SyntaxError> {
        match self.state {
            State::Number if self.number.is_whole() && self.nests.depth == 0 => self.end_number(0, sink),
            State::Done | State::Broken => {}
            _ => drop(self.stop(0, "the text ends too early")),
        }
        self.broken.map_or(Ok(()), Err)
    }

    /// Bytes read so far.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.before
    }

    /// Memory held for open containers, bytes.
    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.nests.outer.capacity() * size_of::<u64>()
    }

    /// Stores an error at an index of the current slice.
    #[cold]
    fn stop(&mut self, i: usize, what: &'static str) -> Stop {
        self.state = State::Broken;
        self.broken.get_or_insert(SyntaxError { at: self.before + i, what });
        Stop
    }

    /// Reads on from index `i` at least to the end of one token or piece; returns the new index.
    fn step<S: Sink>(&mut self, bytes: &[u8], i: usize, sink: &mut S) -> Result<usize, Stop> {
        let byte = bytes[i];
        match self.state {
            State::FirstElement if byte == b']' => self.close(Nest::Array, i, sink),
            State::Value | State::FirstElement => self.value(bytes, i, sink),
            State::Next => self.next(byte, i, sink),
            State::Text => self.text(bytes, i, sink),
            State::Number => self.number(self.number, bytes, i, sink),
            State::FirstKey if byte == b'}' => self.close(Nest::Object, i, sink),
            State::FirstKey | State::NextKey => self.no_key(byte, i),
            State::Colon => self.colon(byte, i),
            State::Escape => self.escape(byte, i, sink),
            State::Unit => self.unit(byte, i, sink),
            State::Word => self.word(byte, i, sink),
            State::Done if is_space(byte) => Ok(i + 1),
            State::Done => Err(self.stop(i, "data behind the value")),
            State::Broken => Err(Stop),
        }
    }

    fn next<S: Sink>(&mut self, byte: u8, i: usize, sink: &mut S) -> Result<usize, Stop> {
        match byte {
            b',' => self.behind_comma(),
            b'}' => return self.close(Nest::Object, i, sink),
            b']' => return self.close(Nest::Array, i, sink),
            _ if is_space(byte) => {}
            _ => return Err(self.stop(i, "a comma or a closing bracket must stand here")),
        }
        Ok(i + 1)
    }

    /// The error for a byte other than a quote where a key must begin.
    fn no_key(&mut self, byte: u8, i: usize) -> Result<usize, Stop> {
        match byte {
            _ if is_space(byte) => Ok(i + 1),
            b'}' => Err(self.stop(i, "a comma with nothing behind it")),
            _ => Err(self.stop(i, "a key in double quotes must stand here")),
        }
    }

    fn colon(&mut self, byte: u8, i: usize) -> Result<usize, Stop> {
        match byte {
            b':' => self.state = State::Value,
            _ if is_space(byte) => {}
            _ => return Err(self.stop(i, "a colon must stand here")),
        }
        Ok(i + 1)
    }

    fn value<S: Sink>(&mut self, bytes: &[u8], i: usize, sink: &mut S) -> Result<usize, Stop> {
        let byte = bytes[i];
        match byte {
            b'{' => self.open(Nest::Object, i, sink),
            b'[' => self.open(Nest::Array, i, sink),
            b'-' | b'0'..=b'9' => {
                // Most numbers are short integers that the slice contains whole.
                let Some(past) = whole_integer(bytes, i) else {
                    self.begin(Scalar::Number, i, sink);
                    return self.number(Digits::Start, bytes, i, sink);
                };
                if self.is_heard() {
                    let place = self.before + i..self.before + past;
                    sink.scalar(Scalar::Number, &bytes[i..past], place, self.nests.depth);
                }
                return Ok(self.behind_value_at(bytes, past));
            }
            b't' | b'f' | b'n' => {
                let literal = match byte {
                    b't' => Literal::True,
                    b'f' => Literal::False,
                    _ => Literal::Null,
                };
                return Ok(self.begin_word(literal, bytes, i, sink));
            }
            b'N' | b'I' if self.takes_words => {
                self.begin(Scalar::Number, i, sink);
                return self.number(Digits::Start, bytes, i, sink);
            }
            _ if is_space(byte) => {}
            0xEF | 0xFE | 0xFF if self.before + i == 0 => return Err(self.stop(i, "a byte-order mark")),
            _ => return Err(self.stop(i, "a value must stand here")),
        }
        Ok(i + 1)
    }

    fn is_heard(&self) -> bool {
        self.muted_at.is_none()
    }

    fn open<S: Sink>(&mut self, nest: Nest, i: usize, sink: &mut S) {
        let depth = self.nests.depth;
        if self.is_heard() && sink.open(nest, self.before + i, depth) == Interest::Skip {
            self.muted_at = Some(depth);
        }
        self.nests.push(nest);
        self.state = if nest == Nest::Object { State::FirstKey } else { State::FirstElement };
    }

    fn close<S: Sink>(&mut self, nest: Nest, i: usize, sink: &mut S) -> Result<usize, Stop> {
        if self.nests.innermost() != Some(nest) {
            return Err(self.stop(i, "the wrong closing bracket"));
        }
        self.nests.pop();
        if self.muted_at == Some(self.nests.depth) {
            self.muted_at = None;
        }
        if self.is_heard() {
            sink.close(nest, self.before + i + 1, self.nests.depth);
        }
        self.behind_value();
        Ok(i + 1)
    }

    fn behind_comma(&mut self) {
        let in_object = self.nests.innermost() == Some(Nest::Object);
        self.state = if in_object { State::NextKey } else { State::Value };
    }

    /// A value ended; also consumes a comma directly behind it. Returns where to read on.
    fn behind_value_at(&mut self, bytes: &[u8], past: usize) -> usize {
        self.behind_value();
        if self.state != State::Next || bytes.get(past) != Some(&b',') {
            return past;
        }
        self.behind_comma();
        behind_mark(bytes, past)
    }

    fn behind_value(&mut self) {
        self.state = if self.nests.depth == 0 { State::Done } else { State::Next };
    }

    fn begin<S: Sink>(&mut self, what: Scalar, i: usize, sink: &mut S) {
        self.is_read = self.is_heard() && sink.begin(what, self.before + i, self.nests.depth) == Interest::Read;
    }

    fn end<S: Sink>(&mut self, what: Scalar, past: usize, sink: &mut S) {
        if self.is_heard() {
            sink.end(what, self.before + past, self.nests.depth);
        }
    }

    /// Reads a string from its opening quote, and strings directly behind it, as keys and their values are.
    /// Most are plain and complete in the slice.
    #[inline]
    fn strings<S: Sink>(&mut self, mut what: Scalar, bytes: &[u8], mut at: usize, sink: &mut S) -> Result<usize, Stop> {
        loop {
            let from = at + 1;
            let (len, is_ascii) = plain_run(&bytes[from..]);
            let to = from + len;
            if !is_ascii || bytes.get(to) != Some(&b'"') {
                self.begin(what, at, sink);
                self.is_key = what == Scalar::Key;
                self.high = 0;
                self.state = State::Text;
                return self.runs(bytes, from, (len, is_ascii), sink);
            }
            if self.is_heard() {
                sink.scalar(what, &bytes[from..to], self.before + at..self.before + to + 1, self.nests.depth);
            }
            at = self.behind_string(what == Scalar::Key, bytes, to + 1);
            if what == Scalar::String || self.state != State::Value || bytes.get(at) != Some(&b'"') {
                return Ok(at);
            }
            what = Scalar::String;
        }
    }

    /// After a string: also consumes a colon or comma directly behind it. Returns where to read on.
    fn behind_string(&mut self, is_key: bool, bytes: &[u8], past: usize) -> usize {
        if !is_key {
            return self.behind_value_at(bytes, past);
        }
        if bytes.get(past) != Some(&b':') {
            self.state = State::Colon;
            return past;
        }
        self.state = State::Value;
        behind_mark(bytes, past)
    }

    /// Continues text that an earlier slice began.
    fn text<S: Sink>(&mut self, bytes: &[u8], from: usize, sink: &mut S) -> Result<usize, Stop> {
        let mut i = from;
        if !self.utf8.is_whole() {
            i = self.rest_of_character(bytes, i, sink)?;
        }
        self.runs(bytes, i, plain_run(&bytes[i..]), sink)
    }

    /// Reads text up to its end, the end of the slice, or an escape cut by it, starting with a run that was
    /// already scanned.
    fn runs<S: Sink>(
        &mut self,
        bytes: &[u8],
        from: usize,
        mut run: (usize, bool),
        sink: &mut S,
    ) -> Result<usize, Stop> {
        let mut i = from;
        loop {
            let (len, is_ascii) = run;
            if !is_ascii {
                self.check_utf8(bytes, i..i + len)?;
            }
            if len > 0 && self.is_read {
                self.settle_surrogate(sink);
                sink.piece(&bytes[i..i + len]);
            }
            i += len;
            if bytes.get(i) == Some(&b'\\') && (!self.is_read || !sink.looks()) {
                i = self.unseen(bytes, i, sink)?;
            }
            match bytes.get(i) {
                None => return Ok(i),
                Some(b'"') => return Ok(self.end_string(bytes, i + 1, sink)),
                Some(b'\\') => match self.whole_escape(&bytes[i + 1..], sink) {
                    0 => {
                        self.state = State::Escape;
                        return Ok(i + 1);
                    }
                    length => i += 1 + length,
                },
                Some(_) => return Err(self.stop(i, "a control character inside a string")),
            }
            run = plain_run(&bytes[i..]);
        }
    }

    /// Skips text and two-byte escapes whose content is not needed.
    fn unseen<S: Sink>(&mut self, bytes: &[u8], from: usize, sink: &mut S) -> Result<usize, Stop> {
        let PlainRun { len, decoded, is_ascii } = stretch(&bytes[from..]);
        if !is_ascii {
            self.check_utf8(bytes, from..from + len)?;
        }
        if len > 0 && self.is_read {
            self.settle_surrogate(sink);
            sink.unseen(&bytes[from..from + len], decoded);
        }
        Ok(from + len)
    }

    /// Completes a character that an earlier slice began.
    fn rest_of_character<S: Sink>(&mut self, bytes: &[u8], from: usize, sink: &mut S) -> Result<usize, Stop> {
        let mut i = from;
        while !self.utf8.is_whole() && i < bytes.len() {
            if !self.utf8.step(bytes[i]) {
                return Err(self.stop(i, "invalid UTF-8"));
            }
            i += 1;
        }
        if self.is_read {
            sink.piece(&bytes[from..i]);
        }
        Ok(i)
    }

    /// Checks a run; remembers a character cut by the end of the slice.
    fn check_utf8(&mut self, bytes: &[u8], place: Range<usize>) -> Result<(), Stop> {
        let run = &bytes[place.clone()];
        let Err(error) = std::str::from_utf8(run) else { return Ok(()) };
        for (index, &byte) in run.iter().enumerate().skip(error.valid_up_to()) {
            if !self.utf8.step(byte) {
                return Err(self.stop(place.start + index, "invalid UTF-8"));
            }
        }
        if place.end == bytes.len() { Ok(()) } else { Err(self.stop(place.end, "invalid UTF-8")) }
    }

    /// Length of the escape behind a backslash if it is complete in the slice and valid; else 0, and it is
    /// read byte by byte.
    fn whole_escape<S: Sink>(&mut self, behind: &[u8], sink: &mut S) -> usize {
        match behind {
            [b'u', digits @ ..] => {
                let Some(unit) = digits.first_chunk().and_then(four_digits) else { return 0 };
                if self.is_read {
                    self.unit = unit;
                    self.take_unit(sink);
                }
                5
            }
            [byte, ..] => {
                let decoded = UNESCAPED[usize::from(*byte)];
                if decoded == 0 {
                    return 0;
                }
                self.short_escape(decoded, sink);
                1
            }
            [] => 0,
        }
    }

    fn short_escape<S: Sink>(&mut self, decoded: u8, sink: &mut S) {
        if self.is_read {
            self.settle_surrogate(sink);
            sink.piece(&[decoded]);
        }
    }

    fn end_string<S: Sink>(&mut self, bytes: &[u8], past: usize, sink: &mut S) -> usize {
        if self.is_read {
            self.settle_surrogate(sink);
        }
        self.end(if self.is_key { Scalar::Key } else { Scalar::String }, past, sink);
        self.behind_string(self.is_key, bytes, past)
    }

    fn escape<S: Sink>(&mut self, byte: u8, i: usize, sink: &mut S) -> Result<usize, Stop> {
        if byte == b'u' {
            (self.unit, self.digits) = (0, 0);
            self.state = State::Unit;
            return Ok(i + 1);
        }
        match UNESCAPED[usize::from(byte)] {
            0 => Err(self.stop(i, "an unknown escape")),
            decoded => {
                self.short_escape(decoded, sink);
                self.state = State::Text;
                Ok(i + 1)
            }
        }
    }

    fn unit<S: Sink>(&mut self, byte: u8, i: usize, sink: &mut S) -> Result<usize, Stop> {
        let Some(digit) = digit(byte) else {
            return Err(self.stop(i, "four hexadecimal digits must follow \\u"));
        };
        self.unit = (self.unit << 4) | digit;
        self.digits += 1;
        if self.digits == 4 {
            if self.is_read {
                self.take_unit(sink);
            }
            self.state = State::Text;
        }
        Ok(i + 1)
    }

    /// Handles a complete `\uXXXX`: a character, half of one, or a value that cannot be text.
    fn take_unit<S: Sink>(&mut self, sink: &mut S) {
        let code = match (self.high, self.unit) {
            (0, 0xDC00..=0xDFFF) => return sink.lone_surrogate(),
            (high, low @ 0xDC00..=0xDFFF) => {
                self.high = 0;
                0x1_0000 + ((u32::from(high) - 0xD800) << 10) + (u32::from(low) - 0xDC00)
            }
            (_, high @ 0xD800..=0xDBFF) => {
                self.settle_surrogate(sink);
                self.high = high;
                return;
            }
            (_, other) => {
                self.settle_surrogate(sink);
                u32::from(other)
            }
        };
        if let Some(character) = char::from_u32(code) {
            sink.piece(character.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }

    /// A pending high surrogate was not followed by its other half.
    fn settle_surrogate<S: Sink>(&mut self, sink: &mut S) {
        if self.high != 0 {
            self.high = 0;
            sink.lone_surrogate();
        }
    }

    fn number<S: Sink>(&mut self, mut digits: Digits, bytes: &[u8], from: usize, sink: &mut S) -> Result<usize, Stop> {
        let mut i = from;
        loop {
            if digits.repeats() {
                i += bytes[i..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            }
            let after = |&byte| if self.takes_words { digits.after_or_word(byte) } else { digits.after(byte) };
            let Some(next) = bytes.get(i).and_then(after) else { break };
            digits = next;
            i += 1;
        }
        if self.is_read && from < i {
            sink.piece(&bytes[from..i]);
        }
        match bytes.get(i) {
            None => (self.state, self.number) = (State::Number, digits),
            Some(b'0'..=b'9') => return Err(self.stop(i, "a number with a leading zero")),
            Some(_) if digits.is_whole() => self.end_number(i, sink),
            Some(_) => return Err(self.stop(i, "an unfinished number")),
        }
        Ok(i)
    }

    fn end_number<S: Sink>(&mut self, past: usize, sink: &mut S) {
        self.end(Scalar::Number, past, sink);
        self.behind_value();
    }

    fn begin_word<S: Sink>(&mut self, literal: Literal, bytes: &[u8], i: usize, sink: &mut S) -> usize {
        let is_whole = match literal {
            Literal::True => bytes[i..].first_chunk() == Some(b"true"),
            Literal::False => bytes[i..].first_chunk() == Some(b"false"),
            Literal::Null => bytes[i..].first_chunk() == Some(b"null"),
        };
        if !is_whole {
            (self.literal, self.matched) = (literal, 1);
            self.state = State::Word;
            return i + 1;
        }
        if self.is_heard() {
            sink.literal(literal, self.before + i, self.nests.depth);
        }
        self.behind_value_at(bytes, i + literal.word().len())
    }

    fn word<S: Sink>(&mut self, byte: u8, i: usize, sink: &mut S) -> Result<usize, Stop> {
        let word = self.literal.word().as_bytes();
        if word.get(usize::from(self.matched)) != Some(&byte) {
            return Err(self.stop(i, "an unknown word"));
        }
        self.matched += 1;
        if usize::from(self.matched) == word.len() {
            if self.is_heard() {
                sink.literal(self.literal, self.before + i + 1 - word.len(), self.nests.depth);
            }
            self.behind_value();
        }
        Ok(i + 1)
    }
}

const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// Where to read on behind a comma or colon, which many writers follow by a space.
fn behind_mark(bytes: &[u8], at: usize) -> usize {
    at + 1 + usize::from(bytes.get(at + 1) == Some(&b' '))
}

const fn digit(byte: u8) -> Option<u16> {
    Some(match byte {
        b'0'..=b'9' => (byte - b'0') as u16,
        b'a'..=b'f' => (byte - b'a') as u16 + 10,
        b'A'..=b'F' => (byte - b'A') as u16 + 10,
        _ => return None,
    })
}

fn four_digits(four: &[u8; 4]) -> Option<u16> {
    four.iter().try_fold(0, |unit, &byte| Some((unit << 4) | digit(byte)?))
}

/// End of the number at `from` if it is an unsigned integer with more of the slice behind it; the
/// caller judges the byte that follows.
fn whole_integer(bytes: &[u8], from: usize) -> Option<usize> {
    let digits = match bytes[from] {
        b'0' => 1,
        b'1'..=b'9' => bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count(),
        _ => return None,
    };
    let behind = bytes.get(from + digits)?;
    (!matches!(behind, b'.' | b'e' | b'E' | b'0'..=b'9')).then_some(from + digits)
}

/// Length of the number at the start of `bytes`; 0 if there is none.
pub(super) fn number_run(bytes: &[u8]) -> usize {
    let (mut digits, mut length) = (Digits::Start, 0);
    while let Some(next) = bytes.get(length).and_then(|byte| digits.after(*byte)) {
        digits = next;
        length += 1;
    }
    if digits.is_whole() { length } else { 0 }
}

//! One JSON reader for requests, answers and events: an iterative push tokenizer.
//!
//! [`Tokenizer`] eats bytes in pieces of any size, checks the whole grammar of RFC 8259
//! (UTF-8 included) and tells a [`Sink`] what it met and where. It builds no tree and never
//! recurses: a level of nesting costs one bit, so that ten megabytes of brackets are a
//! megabyte of memory and not a dead process. What a sink does not want to hear of
//! ([`Interest::Skip`]) is checked for grammar only.
//!
//! More lenient than most readers in three places, because engines differ there and the
//! gateway must not judge style: numbers of any size and exponent, nesting of any depth,
//! and escaped surrogates without their other half ([`Sink::lone_surrogate`]). What engines write
//! may have `NaN` and the infinities of Python's writer for numbers, too
//! ([`Tokenizer::of_answer`]); what clients write may not. What a value
//! means, and which members matter, is left to the sinks.

use std::ops::Range;

mod text;
mod tokenizer;

#[cfg(test)]
mod tests;

pub use tokenizer::Tokenizer;

/// What a container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nest {
    /// `{...}`
    Object,
    /// `[...]`
    Array,
}

/// A token that may come in several pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    /// The name of an object's member: a string in front of a colon.
    Key,
    /// A string in the place of a value.
    String,
    /// A number; its pieces are its spelling.
    Number,
}

/// A value that is one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Literal {
    /// `true`
    True,
    /// `false`
    False,
    /// `null`
    Null,
}

impl Literal {
    /// The word as it is spelled.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Literal::True => "true",
            Literal::False => "false",
            Literal::Null => "null",
        }
    }

    /// The boolean, if it is one.
    #[must_use]
    pub const fn as_bool(self) -> Option<bool> {
        match self {
            Literal::True => Some(true),
            Literal::False => Some(false),
            Literal::Null => None,
        }
    }
}

/// Whether a sink wants to hear of what has just begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Tell it.
    Read,
    /// Check its grammar only. Of a container nothing more is told than its `close`, of a
    /// scalar nothing more than its `end`.
    Skip,
}

/// Hears what a [`Tokenizer`] meets, in order. Offsets count from the first byte pushed.
/// `depth` is the number of containers around the thing: 0 for the top-level value, 1 for
/// members of a top-level object.
pub trait Sink {
    /// A container begins; `at` is its bracket.
    fn open(&mut self, nest: Nest, at: usize, depth: usize) -> Interest {
        let _ = (nest, at, depth);
        Interest::Read
    }

    /// A container ended; `past` is just behind its bracket.
    fn close(&mut self, nest: Nest, past: usize, depth: usize) {
        let _ = (nest, past, depth);
    }

    /// A key, string or number begins; `at` is its first byte (a string's quote).
    fn begin(&mut self, what: Scalar, at: usize, depth: usize) -> Interest {
        let _ = (what, at, depth);
        Interest::Skip
    }

    /// The next piece of it: of strings the decoded bytes, of numbers the spelling. Pieces
    /// end anywhere, also inside a character; together they are valid UTF-8.
    fn piece(&mut self, decoded: &[u8]) {
        let _ = decoded;
    }

    /// Whether the sink looks at the pieces of the present scalar, or only wants to know how
    /// long they are. Asked again and again while it is read.
    fn looks(&self) -> bool {
        true
    }

    /// In place of pieces, where the sink does not look: text with escapes of two bytes in it
    /// (see [`unescape`]), and how many bytes it stands for.
    fn unseen(&mut self, raw: &[u8], decoded: usize) {
        let _ = (raw, decoded);
    }

    /// Here stands an escaped surrogate without its other half. No text can hold it, so no
    /// piece comes for it.
    fn lone_surrogate(&mut self) {}

    /// The key, string or number ended; `past` is just behind its last byte.
    fn end(&mut self, what: Scalar, past: usize, depth: usize) {
        let _ = (what, past, depth);
    }

    /// A key, string or number that stands in one piece, without escapes: the same as
    /// [`begin`](Sink::begin), [`piece`](Sink::piece) and [`end`](Sink::end), at once. `place`
    /// is from the first byte (a string's quote) to just behind the last one.
    fn scalar(&mut self, what: Scalar, decoded: &[u8], place: Range<usize>, depth: usize) {
        if self.begin(what, place.start, depth) == Interest::Read && !decoded.is_empty() {
            self.piece(decoded);
        }
        self.end(what, place.end, depth);
    }

    /// `true`, `false` or `null`; `at` is its first byte.
    fn literal(&mut self, what: Literal, at: usize, depth: usize) {
        let _ = (what, at, depth);
    }
}

/// Hears nothing: for checking grammar only.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoopSink;

impl Sink for NoopSink {
    fn open(&mut self, _: Nest, _: usize, _: usize) -> Interest {
        Interest::Skip
    }
}

/// The bytes break the grammar. Never quotes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} at byte {at}")]
pub struct SyntaxError {
    /// Offset of the offending byte.
    pub at: usize,
    /// What was wrong there.
    pub what: &'static str,
}

/// Reads one whole value at once: a small event, say.
///
/// # Errors
/// [`SyntaxError`] where it is not one JSON value with nothing but whitespace around it. The
/// sink has then heard of everything in front of the fault.
pub fn walk<S: Sink>(whole: &[u8], sink: &mut S) -> Result<(), SyntaxError> {
    let mut tokenizer = Tokenizer::new();
    tokenizer.push(whole, sink)?;
    tokenizer.finish(sink)
}

/// The same for what an engine wrote ([`Tokenizer::of_answer`]).
///
/// # Errors
/// [`SyntaxError`] likewise.
pub fn walk_answer<S: Sink>(whole: &[u8], sink: &mut S) -> Result<(), SyntaxError> {
    let mut tokenizer = Tokenizer::of_answer();
    tokenizer.push(whole, sink)?;
    tokenizer.finish(sink)
}

/// How far the text in front of the next quote, backslash or control character reaches, and
/// whether all of it is ASCII.
#[must_use]
pub fn plain_run(bytes: &[u8]) -> (usize, bool) {
    text::plain_run(bytes)
}

/// Decodes text as [`Sink::unseen`] gets it; `take` gets it piece by piece, and says whether it
/// wants more.
pub fn unescape(raw: &[u8], take: impl FnMut(&[u8]) -> bool) {
    text::unescape(raw, take);
}

/// How far the number reaches with which the bytes begin; 0 where they begin with none.
#[must_use]
pub fn number_run(bytes: &[u8]) -> usize {
    tokenizer::number_run(bytes)
}

/// Whether the bytes are one JSON value whose top level is an object.
#[must_use]
pub fn is_object(whole: &[u8]) -> bool {
    let first = whole.iter().find(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
    first == Some(&b'{') && walk(whole, &mut NoopSink).is_ok()
}

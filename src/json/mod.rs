//! One JSON reader for requests, responses and events: an iterative push tokenizer.
//!
//! [`Tokenizer`] consumes bytes in pieces of any size, checks the whole grammar of RFC 8259
//! (UTF-8 included) and reports values and their offsets to a [`Sink`]. It builds no tree and does
//! not recurse: a nesting level costs one bit, so ten megabytes of brackets take about a megabyte of
//! memory instead of overflowing the stack. Values that a sink skips
//! ([`Interest::Skip`]) are only checked for grammar.
//!
//! It is more lenient than most readers in three places, because engines differ there and the
//! gateway must not reject for style: numbers of any size and exponent, nesting of any depth,
//! and lone escaped surrogates ([`Sink::lone_surrogate`]). In engines' output it also accepts Python's
//! `NaN` and infinities ([`Tokenizer::of_answer`]). The meaning of values
//! is left to the sinks.

use std::ops::Range;

mod text;
mod tokenizer;

#[cfg(test)]
mod tests;

pub use tokenizer::Tokenizer;

/// Kind of container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nest {
    /// `{...}`
    Object,
    /// `[...]`
    Array,
}

/// A token whose content may arrive in several pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar {
    /// The name of an object member.
    Key,
    /// A string value.
    String,
    /// A number; its pieces are its spelling.
    Number,
}

/// A literal value.
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
    /// Its spelling.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Literal::True => "true",
            Literal::False => "false",
            Literal::Null => "null",
        }
    }

    /// Its boolean value; none for `null`.
    #[must_use]
    pub const fn as_bool(self) -> Option<bool> {
        match self {
            Literal::True => Some(true),
            Literal::False => Some(false),
            Literal::Null => None,
        }
    }
}

/// Whether a sink wants the content of a value that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Report it.
    Read,
    /// Check grammar only: of a container only `close` is reported, of a scalar only `end`.
    Skip,
}

/// Receives tokens in order. Offsets count from the first byte pushed. `depth` is the number of
/// enclosing containers: 0 for the top-level value, 1 for members of a top-level object.
pub trait Sink {
    /// A container begins; `at` is the offset of its bracket.
    fn open(&mut self, nest: Nest, at: usize, depth: usize) -> Interest {
        let _ = (nest, at, depth);
        Interest::Read
    }

    /// A container ended; `past` is the offset behind its bracket.
    fn close(&mut self, nest: Nest, past: usize, depth: usize) {
        let _ = (nest, past, depth);
    }

    /// A key, string or number begins; `at` is its first byte (a string's quote).
    fn begin(&mut self, what: Scalar, at: usize, depth: usize) -> Interest {
        let _ = (what, at, depth);
        Interest::Skip
    }

    /// The next piece: decoded bytes of a string, or the spelling of a number. Pieces may be cut inside a
    /// character; their concatenation is valid UTF-8.
    fn piece(&mut self, decoded: &[u8]) {
        let _ = decoded;
    }

    /// Whether the sink needs the content of the current scalar rather than only its length. May be
    /// called repeatedly during one scalar.
    fn looks(&self) -> bool {
        true
    }

    /// Called instead of [`piece`](Sink::piece) where [`looks`](Sink::looks) is false: raw text with
    /// two-byte escapes (see [`unescape`]), and its decoded length.
    fn unseen(&mut self, raw: &[u8], decoded: usize) {
        let _ = (raw, decoded);
    }

    /// An escaped surrogate without its other half. It cannot be encoded as text, so no piece follows.
    fn lone_surrogate(&mut self) {}

    /// The key, string or number ended; `past` is the offset behind its last byte.
    fn end(&mut self, what: Scalar, past: usize, depth: usize) {
        let _ = (what, past, depth);
    }

    /// A key, string or number that arrived whole and without escapes, in one call instead of
    /// [`begin`](Sink::begin), [`piece`](Sink::piece) and [`end`](Sink::end). `place` ranges from its first
    /// byte (a string's quote) to behind its last.
    fn scalar(&mut self, what: Scalar, decoded: &[u8], place: Range<usize>, depth: usize) {
        if self.begin(what, place.start, depth) == Interest::Read && !decoded.is_empty() {
            self.piece(decoded);
        }
        self.end(what, place.end, depth);
    }

    /// `true`, `false` or `null`; `at` is the offset of its first byte.
    fn literal(&mut self, what: Literal, at: usize, depth: usize) {
        let _ = (what, at, depth);
    }
}

/// Ignores all tokens; for checking grammar only.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoopSink;

impl Sink for NoopSink {
    fn open(&mut self, _: Nest, _: usize, _: usize) -> Interest {
        Interest::Skip
    }
}

/// The bytes violate the grammar. Never quotes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} at byte {at}")]
pub struct SyntaxError {
    /// Offset of the offending byte.
    pub at: usize,
    /// The error.
    pub what: &'static str,
}

/// Reads one complete value, such as a small event.
///
/// # Errors
/// [`SyntaxError`] unless the bytes are one JSON value surrounded by nothing but whitespace. The sink
/// has then received all tokens before the error.
pub fn walk<S: Sink>(whole: &[u8], sink: &mut S) -> Result<(), SyntaxError> {
    let mut tokenizer = Tokenizer::new();
    tokenizer.push(whole, sink)?;
    tokenizer.finish(sink)
}

/// [`walk`] for engines' output ([`Tokenizer::of_answer`]).
///
/// # Errors
/// [`SyntaxError`] as for [`walk`].
pub fn walk_answer<S: Sink>(whole: &[u8], sink: &mut S) -> Result<(), SyntaxError> {
    let mut tokenizer = Tokenizer::of_answer();
    tokenizer.push(whole, sink)?;
    tokenizer.finish(sink)
}

/// Length of the text before the next quote, backslash or control character, and whether it is all
/// ASCII.
#[must_use]
pub fn plain_run(bytes: &[u8]) -> (usize, bool) {
    text::plain_run(bytes)
}

/// Decodes text as [`Sink::unseen`] receives it. `take` is called per piece and returns whether it wants
/// more.
pub fn unescape(raw: &[u8], take: impl FnMut(&[u8]) -> bool) {
    text::unescape(raw, take);
}

/// Length of the number at the start of `bytes`; 0 if there is none.
#[must_use]
pub fn number_run(bytes: &[u8]) -> usize {
    tokenizer::number_run(bytes)
}

/// Whether the bytes are one JSON value and that value is an object.
#[must_use]
pub fn is_object(whole: &[u8]) -> bool {
    let first = whole.iter().find(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r'));
    first == Some(&b'{') && walk(whole, &mut NoopSink).is_ok()
}

//! Bytes of an answer with their moments -> a [`Timeline`]. Sans-IO.
//!
//! [`Observer`] eats the frames of an answer's body and their moments, hands every piece
//! that may leave on at once, and is consumed when the answer ends. It knows the wire
//! formats of `docs/semantics.md` (section 3) and no transport. [`sse::EventScanner`] cuts a
//! byte stream into whole events without copying; [`PieceInfo`] says what an event carried.
//!
//! How an event is read: the steady state of a stream is events that differ from their
//! predecessor only in the text they carry. Such an event is recognised by comparing all its
//! other bytes with those of an event that was read in full (`mould`), so what is skipped is
//! known to say the same. Whole answers of an engine are alike, too, and so are the other events
//! of its streams: they are recognised in the same way ([`TemplateCache`]). Everything else is read by
//! the push tokenizer of [`crate::json`]: no tree, no recursion, and text that a strict parser
//! refuses is still a token.

pub mod sse;

mod codes;
mod mould;
mod moulds;
mod note;
mod observer;
mod passing;
mod place;
mod reading;
mod sight;
mod tally;
mod timeline;
mod usage;

#[cfg(test)]
mod tests;

pub use moulds::TemplateCache;
pub use note::{Expect, PieceInfo, PiecePart, UsagePosition};
pub use observer::Observer;
pub use timeline::{
    Choice, ClientLimited, Ending, Gaps, InBandError, Reader, Timeline, TimeoutKind, TokenSource, Usage, Watch,
};

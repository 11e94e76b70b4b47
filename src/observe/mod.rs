//! Turns the bytes of a response and their arrival times into a [`Timeline`]. Sans-IO.
//!
//! [`Observer`] takes the frames of a response body with their times, returns every piece that may be
//! forwarded at once, and is consumed when the response ends. It knows the wire formats of
//! `docs/semantics.md` (section 3) and no transport. [`sse::EventScanner`] splits a byte stream into
//! events without copying; [`PieceInfo`] describes what an event carried.
//!
//! Most events of a stream differ from the previous one only in their text. Such an event is recognised
//! by comparing its other bytes with those of an event that was parsed in full (`template`), so the skipped
//! bytes are known to mean the same. Complete responses of one engine, and the other events of its
//! streams, are recognised in the same way ([`TemplateCache`]). Everything else is parsed by
//! the push tokenizer of [`crate::json`]: no tree, no recursion, and text that a strict parser
//! rejects still counts as a token.

pub mod sse;

mod error_code;
mod event_parser;
mod json_path;
mod observer;
mod oversized_event;
mod parsed_event;
mod piece;
mod template;
mod template_cache;
mod timeline;
mod timeline_builder;
mod usage;

#[cfg(test)]
mod tests;

pub use observer::Observer;
pub use piece::{PieceInfo, PiecePart, ResponseExpectation, UsagePosition};
pub use template_cache::TemplateCache;
pub use timeline::{
    Choice, ClientLimited, Ending, Gaps, InBandError, ObserverOptions, ResponseFormat, Timeline, TimeoutKind,
    TokenSource, Usage,
};

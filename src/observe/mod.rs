//! Bytes of an answer with their moments -> a [`Timeline`]. Sans-IO.
//!
//! [`Observer`] eats whole events (or the pieces of a JSON body) and moments, knows the wire
//! formats of SEMANTICS.md 3 and no transport, and is consumed when the answer ends.
//! [`sse::Scanner`] cuts a byte stream into whole events without copying.

pub mod sse;
mod timeline;

pub use timeline::{Choice, Ending, Gaps, InBandError, Limit, Limited, Reader, Timeline, TokenSource, Usage, Watch};

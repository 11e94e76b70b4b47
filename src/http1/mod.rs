//! The rules of HTTP/1.1 messages, without I/O (RFC 9112): where a body ends and which bytes belong
//! to it, which request heads are refused, how a head that repeats is recognised ([`HeadCache`]), and
//! header fields that are added while a head is written ([`ResponseHeaders`]).

mod framing;
mod head_cache;
#[cfg(test)]
pub(crate) mod mutations;
pub(crate) mod request_rules;
mod response_headers;

pub use framing::{ChunkDecoder, Decoded, Framing, FramingError, elements, lists_token, stated_length};
pub use head_cache::{CacheableHead, HeadCache, HeadMatch};
pub use response_headers::{HeaderSink, ResponseHeaders, put_line, with_fields};

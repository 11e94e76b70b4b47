//! The HTTP/1.1 codec, without I/O (RFC 9112): where a body ends and which bytes belong to it, how heads
//! of requests and responses are read and written, and what is refused because two parsers could read
//! it differently. `accept` uses one direction, `forward` the other, and neither has rules of its own.
//!
//! | file | holds |
//! | --- | --- |
//! | `framing` | bodies: bytes in, data out ([`Framing`]) |
//! | `framing_headers` | what fields say of framing and connection, in both directions |
//! | `request_head`, `response_head` | heads at the start of a buffer ([`take_request_head`], [`take_response_head`]) |
//! | `request_rules`, `parsed_head` | heads that no client may send; what is derived of a head once ([`ParsedHead`]) |
//! | `head_cache` | heads that repeat on a connection ([`HeadCache`]) |
//! | `content` | a body's media type and coding ([`Content`]) |
//! | `writer`, `response_headers` | heads and chunks, written; fields that come with a body ([`ResponseHeaders`]) |
//! | `write_buffers` | unused buffers for writing, per thread |

mod content;
mod framing;
mod framing_headers;
mod head_cache;
mod parsed_head;
mod request_head;
mod request_rules;
mod response_head;
mod response_headers;
#[cfg(test)]
mod tests;
mod write_buffers;
mod writer;

pub use content::{Content, Media};
pub use framing::{ChunkDecoder, Decoded, Framing, FramingError, elements, lists_token, stated_length};
pub use head_cache::{CacheableHead, HeadCache, HeadMatch};
pub use parsed_head::{ParsedHead, X_REQUEST_ID};
pub use request_head::{HeadLimits, RequestHead, path_of_unread, take_request_head};
pub use response_head::{ResponseHead, ResponseHeadError, take_response_head};
pub use response_headers::{HeaderSink, ResponseHeaders, with_fields};
pub use write_buffers::{return_write_buffer, take_write_buffer};
pub use writer::{
    CHUNK_END, CHUNK_END_AND_LAST, CONTINUE, LAST_CHUNK, ResponseFraming, ResponseMode, put_chunk_size, put_line,
    put_request_head, put_response_head,
};

//! Listeners, TLS, the limits of HTTP/1 and HTTP/2 connections, and the way out.
//!
//! Promises: no client can hold a connection longer than the limits of [`settings::Listen`]
//! allow, by saying nothing, by saying it slowly, or by not listening; a client that refuses
//! bytes is told apart from an engine that sends none ([`ClientState`], in the body of
//! each request), and does not hold a seat for a short answer by not reading it; an open stream
//! survives renewed certificates and a drain that is long enough; every connection has ended when [`Listener::serve`] has;
//! under load what has begun goes on before more is begun, and who waits for that tells since when.
//!
//! Leaves to others: what a request means. The service is any `tower::Service`; a head that
//! can be read and nobody should serve is refused by it, with [`ParsedHead::check`].
//!
//! How a connection ends:
//!
//! | when | limit | how |
//! | --- | --- | --- |
//! | TLS handshake and first head are not done | `header_timeout` after the accept | closed |
//! | a later HTTP/1 head is not done | `header_timeout` after its first byte | closed |
//! | no request (HTTP/1), no stream (HTTP/2) | `idle_timeout` | closed; GOAWAY first |
//! | the client takes no byte | `write_stall`, or its request's total limit | socket closed, or stream reset |
//! | drain | idle at once; others after their answer, or when the drain limit has passed | closed; GOAWAY first |
//!
//! A client that closes its writing half has left. After our side is closed the client may
//! go on sending for two seconds, unread, so that a refusal reaches it before a reset does.
//!
//! [`ClientState`]: crate::units::ClientState

mod body;
mod connections;
mod date;
mod door;
mod drain;
mod head;
mod http1;
mod id;
mod listener;
mod peer;
pub mod settings;
mod shelf;
mod socket;
mod stall;
mod stream;
mod strict;
#[cfg(test)]
mod tests;
mod tls;
mod turnstile;
mod version;

pub use body::{BodyError, IncomingRequest, RequestBody};
pub use door::{BoxError, ConnectionServer};
pub use drain::{Drain, DrainPhase};
pub use head::ParsedHead;
pub use id::made_id;
pub use listener::{ListenError, Listener};
pub use tls::{Certificates, TlsError};

//! Listeners, TLS, limits of HTTP/1 and HTTP/2 connections, and graceful shutdown.
//!
//! Guarantees: no client can hold a connection beyond the limits of [`settings::Listen`] by sending
//! nothing, sending slowly, or not reading; a client that does not read is distinguished from an engine
//! that sends nothing ([`ClientState`], in the body of each request), and holds no seat for a short
//! response by not reading it; an open stream survives renewed certificates and a long enough drain; when
//! [`Listener::serve`] resolves, every connection has ended; under load, requests in progress continue
//! before new ones are read, and the wait of the new ones is recorded.
//!
//! The meaning of a request is left to the service, any `tower::Service`, which also rejects heads that
//! violate the request rules ([`ParsedHead::check`](crate::http1::ParsedHead::check)).
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
//! send for two more seconds, unread, so that a rejection reaches it before a reset does.
//!
//! [`ClientState`]: crate::types::ClientState

mod body;
mod conn_driver;
mod conn_state;
mod connection;
mod connection_limits;
mod date;
mod detect;
mod drain;
mod h2_send_buffer;
mod http1_connection;
mod listener;
mod read_fairness;
mod request_id;
mod service;
pub mod settings;
mod socket;
#[cfg(test)]
mod tests;
mod tls;
mod write_stall;

pub use body::{BodyError, BoxError, IncomingRequest, RequestBody};
pub use connection::ConnectionServer;
pub use drain::{Drain, DrainPhase};
pub use listener::{ListenError, Listener};
pub use request_id::new_request_id;
pub use tls::{Certificates, TlsError};

//! An engine that plays a script byte for byte and records everything it receives.
//!
//! Tests need engines that misbehave on purpose: split a character over two writes, stop in the middle of a
//! response, reset, never respond. A [`Script`] says what is written when; a [`ScriptedEngine`] plays one per
//! request over any byte stream (in-memory pipes with paused time, or real sockets) and keeps an [`EngineLog`] of
//! raw requests, connections
//! and their closing moments.
//!
//! ```
//! use std::time::Duration;
//! use goodput::clock::Clock;
//! use crate::support::scripted_engine::{fixtures::*, Script, ScriptedEngine};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(async {
//! let script = Script::stream().at(10).say(r()).at(700).say(t("Hi")).say(f("stop")).say(u(5, 1)).say(d()).end();
//! let engine = ScriptedEngine::always(Clock::start(), script);
//! let mut pipe = engine.connect();
//! pipe.write_all(b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
//! let mut byte = [0];
//! pipe.read_exact(&mut byte).await.unwrap();
//! assert_eq!(engine.log().requests()[0].target, "/v1/chat/completions");
//! # });
//! ```
//!
//! It parses HTTP/1.1 only as far as needed to find the end of a request; responses are whatever
//! the script writes.

pub mod fixtures;
mod log;
mod play;
mod request;
mod wire;

pub use log::EngineLog;
pub use play::ScriptedEngine;
pub use request::Received;
pub use wire::{PipeEnd, Wire};

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;

/// One action of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Writes these bytes in one write, and flushes.
    Write(Bytes),
    /// Waits for this long.
    Wait(Duration),
    /// Waits until this long after the request's last byte.
    Until(Duration),
    /// Requires the received request (head and body) to contain this text; otherwise records a complaint in the
    /// ledger and resets the connection.
    Expect(String),
    /// Writes nothing more and keeps the connection until the peer closes it.
    Silence,
    /// Closes the connection (FIN).
    Close,
    /// Resets the connection: RST on a socket, `ConnectionReset` on a [`pipe`].
    Reset,
}

/// Framing of [`Script::say`] and [`Script::put`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BodyWriter {
    /// None.
    #[default]
    Bare,
    /// One chunk per write.
    Chunked,
}

/// Script of one request. After the last step the connection waits for the next request, unless a step has
/// closed it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    steps: Vec<Step>,
    framing: BodyWriter,
}

impl Script {
    /// An empty script: no response, waits for the next request.
    #[must_use]
    pub fn new() -> Self {
        Script::default()
    }

    /// Starts a chunked 200 `text/event-stream` response; end it with [`Script::end`]. The head is written at
    /// once; to delay it, use [`Script::new`], [`Script::at`] and
    /// [`Script::open`].
    #[must_use]
    pub fn stream() -> Self {
        Script::new().open()
    }

    /// Writes the head of a 200 event stream; what follows is chunked.
    #[must_use]
    pub fn open(self) -> Self {
        self.open_with(200, &[("content-type", "text/event-stream; charset=utf-8")])
    }

    /// Writes a head with these headers and `transfer-encoding: chunked`; what follows is
    /// chunked.
    #[must_use]
    pub fn open_with(self, status: u16, headers: &[(&str, &str)]) -> Self {
        let mut script = self.write(head(status, headers, &[("transfer-encoding", "chunked")]));
        script.framing = BodyWriter::Chunked;
        script
    }

    /// Writes a head without framing, so that the body ends with the connection.
    #[must_use]
    pub fn open_until_close(self, status: u16, headers: &[(&str, &str)]) -> Self {
        self.write(head(status, headers, &[("connection", "close")]))
    }

    /// A complete response with `Content-Length`.
    #[must_use]
    pub fn answer(status: u16, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Self {
        Script::new().reply(status, headers, body)
    }

    /// A complete JSON response.
    #[must_use]
    pub fn json(status: u16, body: impl Into<Bytes>) -> Self {
        Script::answer(status, &[("content-type", "application/json")], body)
    }

    /// Writes a complete response with `Content-Length`, head and body in one write.
    #[must_use]
    pub fn reply(self, status: u16, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Self {
        let body = body.into();
        let mut whole = head(status, headers, &[("content-length", &body.len().to_string())]).into_bytes();
        whole.extend_from_slice(&body);
        self.write(whole)
    }

    /// Writes raw bytes in one write.
    #[must_use]
    pub fn write(mut self, bytes: impl Into<Bytes>) -> Self {
        self.steps.push(Step::Write(bytes.into()));
        self
    }

    /// Writes body bytes, as one chunk if chunked.
    #[must_use]
    pub fn put(self, bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        match self.framing {
            BodyWriter::Bare => self.write(bytes),
            BodyWriter::Chunked => self.write(chunk(&bytes)),
        }
    }

    /// Writes one event, `data: ` and a blank line, as one chunk.
    #[must_use]
    pub fn say(self, data: impl AsRef<str>) -> Self {
        self.put(event(data.as_ref()))
    }

    /// Writes several events at given moments.
    #[must_use]
    pub fn say_all<S: AsRef<str>>(self, events: impl IntoIterator<Item = (u64, S)>) -> Self {
        events.into_iter().fold(self, |script, (millis, data)| script.at(millis).say(data))
    }

    /// Writes body bytes in pieces of `size` bytes with a pause before each.
    #[must_use]
    pub fn put_split(self, bytes: &[u8], size: usize, pause: Duration) -> Self {
        bytes.chunks(size.max(1)).fold(self, |script, piece| script.wait(pause).put(piece.to_vec()))
    }

    /// Ends a chunked body.
    #[must_use]
    pub fn end(mut self) -> Self {
        if self.framing == BodyWriter::Chunked {
            self.steps.push(Step::Write(Bytes::from_static(b"0\r\n\r\n")));
            self.framing = BodyWriter::Bare;
        }
        self
    }

    /// Waits until `millis` after the request's last byte.
    #[must_use]
    pub fn at(mut self, millis: u64) -> Self {
        self.steps.push(Step::Until(Duration::from_millis(millis)));
        self
    }

    /// Waits for this long.
    #[must_use]
    pub fn wait(mut self, length: Duration) -> Self {
        self.steps.push(Step::Wait(length));
        self
    }

    /// Requires the request to contain this text.
    #[must_use]
    pub fn expect(mut self, text: impl Into<String>) -> Self {
        self.steps.push(Step::Expect(text.into()));
        self
    }

    /// Writes nothing more until the peer closes.
    #[must_use]
    pub fn silence(mut self) -> Self {
        self.steps.push(Step::Silence);
        self
    }

    /// Closes the connection.
    #[must_use]
    pub fn close(mut self) -> Self {
        self.steps.push(Step::Close);
        self
    }

    /// Resets the connection.
    #[must_use]
    pub fn reset(mut self) -> Self {
        self.steps.push(Step::Reset);
        self
    }

    /// The steps, in order.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }
}

/// One event on the wire: `data: `, the data, and a blank line.
#[must_use]
pub fn event(data: &str) -> String {
    format!("data: {data}\n\n")
}

/// One chunk of a chunked body.
#[must_use]
pub fn chunk(bytes: &[u8]) -> Vec<u8> {
    let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
    framed.extend_from_slice(bytes);
    framed.extend_from_slice(b"\r\n");
    framed
}

fn head(status: u16, headers: &[(&str, &str)], framing: &[(&str, &str)]) -> String {
    let reason = http::StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason()).unwrap_or("Unknown");
    let mut text = format!("HTTP/1.1 {status} {reason}\r\n");
    for (name, value) in headers.iter().chain(framing) {
        write!(text, "{name}: {value}\r\n").expect("a String takes everything");
    }
    text.push_str("\r\n");
    text
}

#[cfg(test)]
mod tests;

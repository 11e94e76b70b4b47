//! Clients that speak to the gateway's own HTTP server over an in-memory pipe: for what only a
//! connection shows (a client that does not read, a reset stream, framing).

use bytes::Bytes;
use goodput::accept::{ConnectionServer, Drain};
use goodput::clock::Clock;
use goodput::types::Tick;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::House;

/// A client of HTTP/1 that sees the bytes.
pub struct Client {
    io: DuplexStream,
    clock: Clock,
}

impl House {
    /// A connection that holds `capacity` bytes in each direction before its writer waits.
    pub fn connect(&self, capacity: usize) -> Client {
        self.connect_at(&self.door(), capacity)
    }

    /// The same, from this address.
    pub fn connect_from(&self, address: &str, capacity: usize) -> Client {
        let (io, theirs) = tokio::io::duplex(capacity);
        let (door, gateway, address) = (self.door(), self.gateway.clone(), address.parse().expect("an address"));
        tokio::spawn(async move { door.serve_from(theirs, Some(address), gateway).await });
        Client { io, clock: self.clock }
    }

    /// The same, at a door that others use too.
    pub fn connect_at(&self, door: &ConnectionServer, capacity: usize) -> Client {
        let (io, theirs) = tokio::io::duplex(capacity);
        self.serve(door, theirs);
        Client { io, clock: self.clock }
    }

    /// A connection server of its own.
    pub fn door(&self) -> ConnectionServer {
        let listen = self.gateway.live.load().settings.listen.clone();
        ConnectionServer::new(&listen, None, self.drain.clone(), self.clock)
            .counting(self.recorder.listener_stats().clone())
    }

    /// A connection of HTTP/2.
    pub async fn connect_h2(&self) -> http2::SendRequest<Full<Bytes>> {
        // The window of browsers and most libraries: the bytes that a client accepts unread.
        self.connect_h2_with_window(64 * 1024).await
    }

    /// A connection of HTTP/2 whose client takes this much of a stream unread.
    pub async fn connect_h2_with_window(&self, window: u32) -> http2::SendRequest<Full<Bytes>> {
        let (io, theirs) = tokio::io::duplex(64 * 1024);
        self.serve(&self.door(), theirs);
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(window);
        let (sender, connection) = builder.handshake(TokioIo::new(io)).await.expect("a handshake");
        tokio::spawn(connection);
        sender
    }

    fn serve(&self, door: &ConnectionServer, io: DuplexStream) {
        let door = door.clone();
        let gateway = self.gateway.clone();
        tokio::spawn(async move { door.serve(io, gateway).await });
    }

    /// The drain that connections hear of.
    pub fn drain(&self) -> &Drain {
        &self.drain
    }
}

impl Client {
    /// Sends these bytes.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.io.write_all(bytes.as_ref()).await.expect("the gateway reads");
    }

    /// Sends a POST of this JSON.
    pub async fn post(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.send(head + &body).await;
    }

    /// Reads until this text has come, and returns the time.
    pub async fn read_until(&mut self, text: &str) -> (String, Tick) {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(text) {
            let mut space = [0; 4096];
            let count = self.io.read(&mut space).await.expect("bytes");
            assert!(count > 0, "the connection ended before {text:?}: {}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&space[..count]);
        }
        (String::from_utf8_lossy(&seen).into_owned(), self.clock.now())
    }

    /// Reads to the end of the connection.
    pub async fn read_to_end(&mut self) -> (Vec<u8>, Tick) {
        let mut seen = Vec::new();
        let _ = self.io.read_to_end(&mut seen).await;
        (seen, self.clock.now())
    }
}

/// An HTTP/2 request of the chat path.
pub fn h2_post(path: &str, body: &Value) -> Request<Full<Bytes>> {
    let request = Request::post(format!("http://g{path}")).header("content-type", "application/json");
    request.body(Full::from(body.to_string())).expect("a request")
}

/// The next bytes of an HTTP/2 response.
pub async fn h2_next(response: &mut Response<Incoming>) -> Option<Bytes> {
    response.body_mut().frame().await?.ok()?.into_data().ok()
}

//! What a scripted engine saw.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Received;
use crate::units::Tick;

/// One connection in an engine's ledger.
#[derive(Clone, Debug)]
pub struct Connection {
    /// It was opened.
    pub opened: Tick,
    /// Requests that arrived whole on it.
    pub requests: usize,
    /// Bytes that its stream took from the engine so far.
    pub written: u64,
    /// The engine saw the peer close it (end of stream, or an error).
    pub closed: Option<Tick>,
    /// The engine ended it itself: the script said so.
    pub ended: Option<Tick>,
}

impl Connection {
    /// Nobody has ended it.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.closed.is_none() && self.ended.is_none()
    }
}

/// Everything an engine saw: shared by its connections, read by the test.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Arc<Book>);

#[derive(Debug, Default)]
struct Book {
    pages: Mutex<Pages>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Pages {
    requests: Vec<Received>,
    connections: Vec<Connection>,
    complaints: Vec<String>,
}

impl Ledger {
    /// All requests, in the order in which their bodies were complete.
    #[must_use]
    pub fn requests(&self) -> Vec<Received> {
        self.0.pages.lock().requests.clone()
    }

    /// All connections, in the order of opening.
    #[must_use]
    pub fn connections(&self) -> Vec<Connection> {
        self.0.pages.lock().connections.clone()
    }

    /// Connections that nobody has ended.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.0.pages.lock().connections.iter().filter(|connection| connection.is_open()).count()
    }

    /// What [`Step::Expect`](super::Step::Expect) did not find.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        self.0.pages.lock().complaints.clone()
    }

    /// Waits until this many requests have arrived, and returns them.
    pub async fn received(&self, count: usize) -> Vec<Received> {
        self.until(|pages| (pages.requests.len() >= count).then(|| pages.requests.clone())).await
    }

    /// Waits until the peer has closed connection `number`, and tells when the engine saw it.
    pub async fn closed(&self, number: usize) -> Tick {
        self.until(|pages| pages.connections.get(number).and_then(|connection| connection.closed)).await
    }

    /// Waits until every connection has ended.
    pub async fn quiet(&self) {
        self.until(|pages| pages.connections.iter().all(|connection| !connection.is_open()).then_some(())).await;
    }

    async fn until<T>(&self, ready: impl Fn(&Pages) -> Option<T>) -> T {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // Enabled before the look, so that a change between look and wait is not lost.
            changed.as_mut().enable();
            if let Some(found) = ready(&self.0.pages.lock()) {
                return found;
            }
            changed.await;
        }
    }

    pub(super) fn opened(&self, at: Tick) -> usize {
        let connection = Connection { opened: at, requests: 0, written: 0, closed: None, ended: None };
        self.change(|pages| {
            pages.connections.push(connection);
            pages.connections.len() - 1
        })
    }

    /// Writes a request down, and numbers it.
    pub(super) fn note(&self, mut received: Received) -> Received {
        self.change(|pages| {
            let connection = &mut pages.connections[received.connection];
            received.on_connection = connection.requests;
            connection.requests += 1;
            received.number = pages.requests.len();
            pages.requests.push(received.clone());
            received
        })
    }

    pub(super) fn peer_closed(&self, number: usize, at: Tick) {
        self.change(|pages| {
            pages.connections[number].closed.get_or_insert(at);
        });
    }

    pub(super) fn ended(&self, number: usize, at: Tick) {
        self.change(|pages| {
            pages.connections[number].ended.get_or_insert(at);
        });
    }

    pub(super) fn wrote(&self, number: usize, bytes: usize) {
        self.0.pages.lock().connections[number].written += bytes as u64;
    }

    pub(super) fn complain(&self, complaint: String) {
        self.change(|pages| pages.complaints.push(complaint));
    }

    fn change<T>(&self, act: impl FnOnce(&mut Pages) -> T) -> T {
        let done = act(&mut self.0.pages.lock());
        self.0.changed.notify_waiters();
        done
    }
}

//! Requests that a scripted engine received.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Received;
use goodput::types::Tick;

/// One connection of an engine.
#[derive(Clone, Debug)]
pub struct Connection {
    /// Complete requests received on it.
    pub requests: usize,
    /// Bytes accepted by its stream so far.
    pub written: u64,
    /// When the engine saw the peer close it (end of stream or error).
    pub closed: Option<Tick>,
    /// When the engine closed it by its script.
    pub ended: Option<Tick>,
}

impl Connection {
    /// Whether neither side has closed it.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.closed.is_none() && self.ended.is_none()
    }
}

/// Everything an engine received; shared by its connections, read by the test.
#[derive(Clone, Debug, Default)]
pub struct EngineLog(Arc<LogShared>);

#[derive(Debug, Default)]
struct LogShared {
    pages: Mutex<LogEntries>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct LogEntries {
    requests: Vec<Received>,
    connections: Vec<Connection>,
    complaints: Vec<String>,
}

impl EngineLog {
    /// All requests, in order of their bodies' ends.
    #[must_use]
    pub fn requests(&self) -> Vec<Received> {
        self.0.pages.lock().requests.clone()
    }

    /// All connections, in order of opening.
    #[must_use]
    pub fn connections(&self) -> Vec<Connection> {
        self.0.pages.lock().connections.clone()
    }

    /// Number of open connections.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.0.pages.lock().connections.iter().filter(|connection| connection.is_open()).count()
    }

    /// Failures of [`Step::Expect`](super::Step::Expect).
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        self.0.pages.lock().complaints.clone()
    }

    /// Waits for this many requests and returns them.
    pub async fn received(&self, count: usize) -> Vec<Received> {
        self.until(|pages| (pages.requests.len() >= count).then(|| pages.requests.clone())).await
    }

    /// Waits until the peer has closed connection `number`; returns when the engine saw it.
    pub async fn closed(&self, number: usize) -> Tick {
        self.until(|pages| pages.connections.get(number).and_then(|connection| connection.closed)).await
    }

    /// Waits until every connection is closed.
    pub async fn quiet(&self) {
        self.until(|pages| pages.connections.iter().all(|connection| !connection.is_open()).then_some(())).await;
    }

    async fn until<T>(&self, ready: impl Fn(&LogEntries) -> Option<T>) -> T {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // Enabled before the check, so that no change in between is lost.
            changed.as_mut().enable();
            if let Some(found) = ready(&self.0.pages.lock()) {
                return found;
            }
            changed.await;
        }
    }

    pub(super) fn opened(&self) -> usize {
        let connection = Connection { requests: 0, written: 0, closed: None, ended: None };
        self.change(|pages| {
            pages.connections.push(connection);
            pages.connections.len() - 1
        })
    }

    /// Records and numbers a request.
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

    fn change<T>(&self, act: impl FnOnce(&mut LogEntries) -> T) -> T {
        let done = act(&mut self.0.pages.lock());
        self.0.changed.notify_waiters();
        done
    }
}

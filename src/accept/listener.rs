//! The listening socket.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::Response;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinError, JoinSet};
use tower::Service;

use super::body::{BoxError, IncomingRequest};
use super::connection::ConnectionServer;
use super::connection_limits::AddressSlot;
use super::drain::{Drain, DrainPhase};
use super::settings::Listen;
use super::tls::{Certificates, TlsError};
use crate::clock::Clock;
use crate::http1::ResponseHeaders;
use crate::types::{ListenerStats, Tick};

/// Why a listener did not start.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address is in use or not available.
    #[error("cannot listen on {address}; name another address, or end what listens there")]
    Address {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// An unusable certificate.
    #[error("no TLS on {address}")]
    Certificate {
        /// The address.
        address: SocketAddr,
        /// The reason.
        source: TlsError,
    },
}

/// File descriptors reserved for purposes other than clients and their engine connections: probes,
/// scrapes, the admin port, the limits store, files.
const KEPT_DESCRIPTORS: u64 = 512;

/// Number of clients for which there are descriptors: each needs one, and one for an engine.
fn clients_of(descriptors: u64) -> usize {
    let free = descriptors - KEPT_DESCRIPTORS.min(descriptors / 2);
    usize::try_from(free / 2).unwrap_or(usize::MAX).max(1)
}

/// A bound listener. Accepts nothing before [`Listener::serve`].
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
    certificates: Option<Arc<Certificates>>,
    door: ConnectionServer,
    most: usize,
}

impl Listener {
    /// Binds `listen.address` and reads the certificate.
    ///
    /// # Errors
    /// [`ListenError`].
    pub async fn bind(listen: &Listen, drain: Drain, clock: Clock) -> Result<Self, ListenError> {
        let asked = listen.address;
        let certificates = listen.tls.as_ref().map(Certificates::load).transpose();
        let certificates = certificates.map_err(|source| ListenError::Certificate { address: asked, source })?;
        let failed = |source| ListenError::Address { address: asked, source };
        let socket = TcpListener::bind(asked).await.map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        let door = ConnectionServer::new(listen, certificates.as_ref(), drain, clock);
        let most = rlimit::Resource::NOFILE.get_soft().map_or(usize::MAX, clients_of);
        if most < listen.max_connections {
            let asked = listen.max_connections;
            tracing::warn!(
                most,
                max_connections = asked,
                "the limit of open files allows fewer connections than the settings (`ulimit -n`, `LimitNOFILE`)"
            );
        }
        Ok(Listener { socket, address, certificates, door, most })
    }

    /// The local address, with the port chosen by the system if it was 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it speaks TLS.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.certificates.is_some()
    }

    /// The certificates, to renew them before the timer does.
    #[must_use]
    pub fn certificates(&self) -> Option<Arc<Certificates>> {
        self.certificates.clone()
    }

    /// The connection server, to change its limits after a reload.
    #[must_use]
    pub fn door(&self) -> ConnectionServer {
        self.door.clone()
    }

    /// Sets the counters of what never becomes a request.
    #[must_use]
    pub fn counting(self, listener_stats: ListenerStats) -> Self {
        Listener { door: self.door.counting(listener_stats), ..self }
    }

    /// Accepts until [`DrainPhase::Draining`], and resolves when the last connection has ended. Dropping it
    /// closes all connections.
    ///
    /// At `max_connections`, or when file descriptors run out, the longest idle connection closes in favour
    /// of a new one. If none is idle, new connections wait in the system's backlog until one ends, which the
    /// time limits ensure; a rejection would first need a TLS handshake when resources are scarce. A new
    /// connection beyond the limit per peer address is closed at
    /// once.
    pub async fn serve<S, B>(self, service: S)
    where
        S: Service<IncomingRequest, Response = Response<B>> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Error: Into<BoxError>,
        B: ResponseHeaders + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let Listener { socket, door, certificates, most, .. } = self;
        let mut connections = JoinSet::new();
        let mut pause = Pause::default();
        let clock = door.clock();
        let drain = door.drain().clone();
        let mut draining = pin!(drain.reached(DrainPhase::Draining));
        // A separate task, because file access may be slow and must not delay accepting.
        let mut beside = JoinSet::new();
        if let Some(certificates) = certificates {
            beside.spawn(async move { certificates.keep_fresh(clock).await });
        }
        let mut newcomer: Option<Newcomer> = None;
        let mut crowded = VecDeque::new();
        loop {
            let most = door.limits().max_connections.min(most);
            if newcomer.is_none() {
                newcomer = relieved(&mut crowded, &door, most);
            }
            if connections.len() < most
                && let Some(Newcomer { stream, from, place }) = newcomer.take()
            {
                door.connections().has_room();
                let (door, service) = (door.clone(), service.clone());
                connections.spawn(async move {
                    let _place = place;
                    door.serve_from(at_once(stream), Some(from), service).await;
                });
                continue;
            }
            tokio::select! {
                biased;
                () = &mut draining => break,
                Some(ended) = connections.join_next() => note(ended),
                // There may be room now.
                () = door.limits_changed() => {}
                () = clock.sleep_until(pause.until), if pause.until.is_some() => pause.until = None,
                () = clock.sleep_until(crowded.front().map(|one: &Crowded| one.until)), if !crowded.is_empty() => {
                    crowded.pop_front();
                    door.listener_stats().refused_connection();
                }
                accepted = socket.accept(), if newcomer.is_none() && pause.until.is_none() => match accepted {
                    Ok((stream, from)) => {
                        pause = Pause::default();
                        let from = from.ip();
                        if let Some(place) = place_of(&door, from, most) {
                            newcomer = Some(Newcomer { stream, from, place });
                            if connections.len() >= most {
                                door.connections().make_room(1 + most / AT_ONCE);
                            }
                        } else if crowded.len() < MOST_CROWDED && door.connections().make_room_of(from, 1) {
                            crowded.push_back(Crowded { stream, from, until: clock.now() + UNTIL_IDLE_ENDS });
                        } else {
                            door.listener_stats().refused_connection();
                        }
                    }
                    Err(error) => pause.after(&error, clock.now()),
                },
            }
        }
        drop((socket, newcomer, crowded));
        while let Some(ended) = connections.join_next().await {
            note(ended);
        }
    }
}

/// TCP_NODELAY, because waiting to fill a packet would delay an event by 40 ms.
fn at_once(stream: TcpStream) -> TcpStream {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY not set");
    }
    stream
}

fn note(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection's task panicked");
    }
}

/// Number of connections above which only one is asked to close at a time, because the search takes 0.4 ms
/// for 20,000.
const AT_ONCE: usize = 256;

/// A place for a connection from this address, if it may have another one.
fn place_of(door: &ConnectionServer, from: IpAddr, most: usize) -> Option<AddressSlot> {
    let limits = door.limits();
    door.connections().place(from, |others| limits.most_of_one_address(most, others))
}

/// The first of those that wait for one of their own address to end, if one has.
fn relieved(crowded: &mut VecDeque<Crowded>, door: &ConnectionServer, most: usize) -> Option<Newcomer> {
    for at in 0..crowded.len() {
        if let Some(place) = place_of(door, crowded[at].from, most) {
            let Crowded { stream, from, .. } = crowded.remove(at)?;
            return Some(Newcomer { stream, from, place });
        }
    }
    None
}

/// Most connections that wait for an idle connection of their own address to close, and the longest wait; no
/// other connection waits for them.
const MOST_CROWDED: usize = 64;
const UNTIL_IDLE_ENDS: Duration = Duration::from_millis(500);

/// An accepted connection of an address that has as many as it may.
struct Crowded {
    stream: TcpStream,
    from: IpAddr,
    until: Tick,
}

/// An accepted connection without a slot.
struct Newcomer {
    stream: TcpStream,
    from: IpAddr,
    place: AddressSlot,
}

/// Pause after a failed accept.
#[derive(Debug, Default)]
struct Pause {
    until: Option<Tick>,
    length: Duration,
}

impl Pause {
    const SHORTEST: Duration = Duration::from_millis(10);
    const LONGEST: Duration = Duration::from_secs(1);

    /// A client that left before it was accepted causes no pause. Other errors (no descriptors, no memory)
    /// persist for a while, and retrying at once would occupy a core.
    fn after(&mut self, error: &io::Error, now: Tick) {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
        if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) {
            return;
        }
        if self.length.is_zero() {
            tracing::error!(%error, "cannot accept connections");
        }
        self.length = (self.length * 2).clamp(Self::SHORTEST, Self::LONGEST);
        self.until = Some(now + self.length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_has_a_descriptor_for_an_engine_too() {
        let clients = [1, 64, 1024, 4096, 1_048_576, u64::MAX].map(clients_of);
        assert_eq!(clients, [1, 16, 256, 1792, 524_032, (u64::MAX as usize - 512) / 2]);
    }

    #[test]
    fn a_lack_of_descriptors_is_waited_for_and_a_lost_newcomer_is_not() {
        let mut pause = Pause::default();
        pause.after(&io::Error::from(io::ErrorKind::ConnectionAborted), Tick::ZERO);
        assert_eq!(pause.until, None);
        let mut lengths = Vec::new();
        for _ in 0..9 {
            pause.after(&io::Error::other("too many open files"), Tick::ZERO);
            lengths.push(pause.length.as_millis());
        }
        assert_eq!(lengths, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(pause.until, Some(Tick::from_millis(1000)));
    }
}

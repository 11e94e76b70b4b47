//! Settings of listeners, client limits, and shutdown.

pub mod pem;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;

/// The client listener, and limits on what clients may send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Address and port. Fixed while the process runs.
    pub address: SocketAddr,
    /// Certificate; cleartext without one. Its files are read again when they change.
    pub tls: Option<Tls>,
    /// Largest request body, decoded, bytes.
    pub max_body: u64,
    /// Memory for all request bodies together beyond 64 KiB each, bytes.
    pub max_bodies: u64,
    /// Largest request head, bytes.
    pub max_head: usize,
    /// Most header lines of a request.
    pub max_header_lines: usize,
    /// From the accepted connection to the first complete request head, TLS handshake included; for later
    /// heads, from their first byte.
    pub header_timeout: Duration,
    /// From a complete head to the last byte of its body.
    pub body_timeout: Duration,
    /// How long a connection without a request (HTTP/1) or stream (HTTP/2) stays open.
    pub idle_timeout: Duration,
    /// Longest stretch in which a client may accept no bytes.
    pub write_stall: Duration,
    /// Most connections at one time.
    pub max_connections: usize,
    /// Most connections per peer address; `None`: nine tenths of all.
    pub max_connections_per_address: Option<usize>,
    /// Most streams at one time on an HTTP/2 connection.
    pub http2_max_streams: u32,
}

impl Default for Listen {
    /// `{address: 0.0.0.0:8080, max_body: 64MiB, max_bodies: 1GiB, max_head: 64KiB,
    /// max_header_lines: 100, header_timeout: 10s, body_timeout: 60s, idle_timeout: 620s, write_stall: 30s,
    /// max_connections: 20000, http2_max_streams: 250}`
    fn default() -> Self {
        Listen {
            address: SocketAddr::from(([0, 0, 0, 0], 8080)),
            tls: None,
            max_body: 64 << 20,
            max_bodies: 1 << 30,
            max_head: 64 << 10,
            max_header_lines: 100,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(60),
            // Longer than clients (90 s) and load balancers (60 to 600 s), because a request must not be sent on a
            // connection that the gateway is closing.
            idle_timeout: Duration::from_secs(620),
            write_stall: Duration::from_secs(30),
            max_connections: 20_000,
            max_connections_per_address: None,
            http2_max_streams: 250,
        }
    }
}

impl Listen {
    /// Most connections of one peer address if `all` may be open. By default a load balancer in front reaches
    /// the limit only when nearly all connections are in use, while a tenth is left for other addresses.
    #[must_use]
    pub fn most_of_one_address(&self, all: usize, others: usize) -> usize {
        let free = others.clamp((all / 100).max(1), (all / 10).max(1));
        // With few connections nothing is reserved: a new one replaces an idle one.
        let by_default = if all < 10 { usize::MAX } else { all.saturating_sub(others + free) };
        self.max_connections_per_address.unwrap_or(by_default).max(1)
    }
}

/// The PEM files of a TLS listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The certificate and its chain.
    pub certificate_file: PathBuf,
    /// Its private key.
    pub private_key_file: PathBuf,
}

/// Shutdown after SIGTERM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shutdown {
    /// From failing readiness to closing the listener.
    pub delay: Duration,
    /// Time for open requests after that.
    pub drain: Duration,
}

impl Default for Shutdown {
    /// `{delay: 5s, drain: 60s}`
    fn default() -> Self {
        Shutdown { delay: Duration::from_secs(5), drain: Duration::from_secs(60) }
    }
}

/// The admin listener.
#[derive(Clone, Debug)]
pub struct Admin {
    /// Address and port. Fixed while the process runs.
    pub address: SocketAddr,
    /// The token required except for probes, from `token_file`.
    pub token: Option<SecretString>,
    /// Host names allowed without a token, beside those of this machine.
    pub hosts: Vec<String>,
}

impl Default for Admin {
    /// `{address: 127.0.0.1:9090}`
    fn default() -> Self {
        Admin { address: SocketAddr::from(([127, 0, 0, 1], 9090)), token: None, hosts: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_may_have_what_others_leave_and_they_always_find_a_place() {
        let most = |all, others| Listen::default().most_of_one_address(all, others);
        let alone = [1, 9, 10, 100, 20_000].map(|all| most(all, 0));
        assert_eq!(alone, [usize::MAX, usize::MAX, 9, 99, 19_800]);
        let beside = [0, 1, 200, 201, 2000, 3000, 19_000, 20_000].map(|others| most(20_000, others));
        assert_eq!(beside, [19_800, 19_799, 19_600, 19_598, 16_000, 15_000, 1, 1]);
        let own = Listen { max_connections_per_address: Some(7), ..Listen::default() };
        assert_eq!((own.most_of_one_address(20_000, 0), own.most_of_one_address(5, 3)), (7, 7));
    }
}

//! What the settings say about listeners, limits on clients, and leaving.

pub mod papers;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;

/// The listener for clients, and the limits on what they may send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Address and port. Fixed while the process runs.
    pub address: SocketAddr,
    /// Certificate; without one, cleartext. Its files are read again when they change.
    pub tls: Option<Tls>,
    /// Largest request body in bytes, decoded.
    pub max_body: u64,
    /// What request bodies may hold in memory together, in bytes, beyond 64 KiB of each.
    pub max_bodies: u64,
    /// Largest request head in bytes.
    pub max_head: usize,
    /// Most header lines of a request.
    pub max_header_lines: usize,
    /// From the accepted connection to the first whole request head, the TLS handshake
    /// included; for a later one, from its first byte.
    pub header_timeout: Duration,
    /// From a whole head to the last byte of its body.
    pub body_timeout: Duration,
    /// How long a connection without a request (HTTP/1) or stream (HTTP/2) stays open.
    pub idle_timeout: Duration,
    /// How long a client may refuse our bytes in one stretch.
    pub write_stall: Duration,
    /// Most connections at one time.
    pub max_connections: usize,
    /// Most connections of one address at one time; `None`: see [`Listen::most_of_one_address`].
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
            // Longer than clients (90 s) and load balancers (60 to 600 s) keep theirs: whoever closes
            // first must not be the one that a request is sent to.
            idle_timeout: Duration::from_secs(620),
            write_stall: Duration::from_secs(30),
            max_connections: 20_000,
            max_connections_per_address: None,
            http2_max_streams: 250,
        }
    }
}

impl Listen {
    /// Most connections of one address where `all` may be open and other addresses have `others`.
    ///
    /// By default so many that a load balancer in front, which is one address, reaches them only where
    /// nobody could have any more: all but what others have, and as many again as they have, which
    /// stay free for them (a hundredth of all at least, a tenth at most).
    #[must_use]
    pub fn most_of_one_address(&self, all: usize, others: usize) -> usize {
        let free = others.clamp((all / 100).max(1), (all / 10).max(1));
        // Of a handful nothing is kept for others: a newcomer takes the place of one that is idle.
        let by_default = if all < 10 { usize::MAX } else { all.saturating_sub(others + free) };
        self.max_connections_per_address.unwrap_or(by_default).max(1)
    }
}

/// The files of a TLS listener, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The certificate and the chain behind it.
    pub certificate_file: PathBuf,
    /// Its private key.
    pub private_key_file: PathBuf,
}

/// How the gateway leaves after SIGTERM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shutdown {
    /// From the failing readiness to the closed listener.
    pub delay: Duration,
    /// How long open requests may go on after that.
    pub drain: Duration,
}

impl Default for Shutdown {
    /// `{delay: 5s, drain: 60s}`
    fn default() -> Self {
        Shutdown { delay: Duration::from_secs(5), drain: Duration::from_secs(60) }
    }
}

/// The listener for operators.
#[derive(Clone, Debug)]
pub struct Admin {
    /// Address and port. Fixed while the process runs.
    pub address: SocketAddr,
    /// The token that all but the probes ask for, from `token_file`.
    pub token: Option<SecretString>,
    /// Names under which it is reached without a token, beside those of this machine.
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

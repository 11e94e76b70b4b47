//! Opens TCP and TLS connections to engines, and resolves names.
//!
//! The one seam that tests replace: [`Sockets`] uses the network, [`PipeDial`] in-memory pipes, so
//! that all layers above run on virtual time. Time limits are the caller's: dropping the future
//! cancels the attempt. Of a name with several addresses the first to connect is used ([`race`](race()))
//! and tried first the next time.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::clock::Clock;
pub use crate::route::settings::{EngineAddress, Scheme};

mod pipe;
mod race;
#[cfg(test)]
mod tests;
pub use pipe::{PipeDial, PipeListener};
pub use race::{NEXT_AFTER, in_order, race};

/// A connection to an engine.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A boxed connection to an engine.
pub type BoxedIo = Box<dyn Io>;

/// Root certificates of a pool's `ca_file`, in place of the system's.
pub type Roots = Arc<[CertificateDer<'static>]>;

/// Opens connections to engines.
pub trait Dial: Send + Sync {
    /// Connects to an engine, including the TLS handshake for `https`. `roots` replace the system's root
    /// certificates.
    fn dial<'a>(&'a self, to: &'a EngineAddress, roots: Option<&'a Roots>) -> BoxFuture<'a, io::Result<BoxedIo>>;

    /// Resolves a name.
    fn look_up<'a>(&'a self, name: &'a str, port: u16) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// Whether the error means that nothing listens there, rather than no reply.
#[must_use]
pub fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused)
}

/// Whether the error means that this process or machine lacks file descriptors or socket memory. It says
/// nothing about the engine.
#[must_use]
pub fn is_lack(error: &io::Error) -> bool {
    let lacks = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| lacks.contains(&code))
}

/// The network.
pub struct Sockets {
    clock: Clock,
    /// For names with several addresses, the one that connected last.
    answered: Mutex<HashMap<(Arc<str>, u16), IpAddr, ahash::RandomState>>,
    /// One TLS configuration per set of roots. Few are kept, oldest evicted first, because a reload may
    /// bring new ones.
    configs: Mutex<Vec<(Option<Roots>, Arc<ClientConfig>)>>,
}

const MOST_CONFIGS: usize = 16;

/// Most names with a remembered address; more than any settings have.
const MOST_NAMES: usize = 4096;

impl Default for Sockets {
    fn default() -> Self {
        Sockets { clock: Clock::start(), answered: Mutex::default(), configs: Mutex::default() }
    }
}

impl Sockets {
    /// The network, without cached state.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    async fn connect(&self, to: &EngineAddress, roots: Option<&Roots>) -> io::Result<BoxedIo> {
        let host = to.host.trim_start_matches('[').trim_end_matches(']');
        let found: Vec<IpAddr> = match host.parse() {
            Ok(address) => vec![address],
            Err(_) => tokio::net::lookup_host((host, to.port)).await?.map(|found| found.ip()).collect(),
        };
        self.connect_to(to, &found, roots).await
    }

    /// Connects to one of an engine's addresses, TLS included, because an address that accepts connections
    /// and then stays silent is no better than one that refuses them.
    async fn connect_to(&self, to: &EngineAddress, found: &[IpAddr], roots: Option<&Roots>) -> io::Result<BoxedIo> {
        let tls = match to.scheme {
            Scheme::Http => None,
            Scheme::Https => {
                let name = ServerName::try_from(to.server_name().to_owned())
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                Some((TlsConnector::from(self.config(roots).await?), name))
            }
        };
        let open = |address| open(SocketAddr::new(address, to.port), tls.clone());
        if let [address] = *found {
            return open(address).await;
        }
        let key = (Arc::clone(&to.host), to.port);
        let known = self.answered.lock().get(&key).copied();
        let (address, connection) = race(self.clock, &in_order(found, known), open).await?;
        if known != Some(address) {
            let mut answered = self.answered.lock();
            if answered.len() >= MOST_NAMES {
                answered.clear();
            }
            answered.insert(key, address);
        }
        Ok(connection)
    }

    async fn config(&self, roots: Option<&Roots>) -> io::Result<Arc<ClientConfig>> {
        let same = |known: &Option<Roots>| match (known.as_ref(), roots) {
            (Some(known), Some(roots)) => Arc::ptr_eq(known, roots) || known == roots,
            (None, None) => true,
            _ => false,
        };
        let known = self.configs.lock().iter().find(|(known, _)| same(known)).map(|(_, config)| config.clone());
        if let Some(config) = known {
            return Ok(config);
        }
        let roots = roots.cloned();
        let for_loading = roots.clone();
        let load = tokio::task::spawn_blocking(move || tls_config(for_loading.as_deref()));
        let config = Arc::new(load.await.map_err(io::Error::other)??);
        let mut configs = self.configs.lock();
        if configs.len() >= MOST_CONFIGS {
            configs.remove(0);
        }
        configs.push((roots, config.clone()));
        Ok(config)
    }
}

impl Dial for Sockets {
    fn dial<'a>(&'a self, to: &'a EngineAddress, roots: Option<&'a Roots>) -> BoxFuture<'a, io::Result<BoxedIo>> {
        Box::pin(self.connect(to, roots))
    }

    fn look_up<'a>(&'a self, name: &'a str, port: u16) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move { Ok(tokio::net::lookup_host((name, port)).await?.map(|address| address.ip()).collect()) })
    }
}

async fn open(to: SocketAddr, tls: Option<(TlsConnector, ServerName<'static>)>) -> io::Result<BoxedIo> {
    let stream = TcpStream::connect(to).await?;
    // A small request must not wait for the response to the previous one.
    stream.set_nodelay(true)?;
    match tls {
        None => Ok(Box::new(stream)),
        Some((connector, name)) => Ok(Box::new(connector.connect(name, stream).await?)),
    }
}

/// HTTP/1.1 over TLS 1.2 or 1.3, verified against `roots`, else the system's. Reads files.
fn tls_config(roots: Option<&[CertificateDer<'static>]>) -> io::Result<ClientConfig> {
    let mut store = RootCertStore::empty();
    match roots {
        Some(roots) => {
            for root in roots {
                store.add(root.clone()).map_err(io::Error::other)?;
            }
        }
        None => {
            // Unparsable certificates in the system's store are skipped, the others are trusted.
            store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().map_err(io::Error::other)?;
    let mut config = builder.with_root_certificates(store).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

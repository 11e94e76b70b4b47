//! In-memory connections in place of sockets, for tests of code that talks to engines.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;

use super::{BoxedIo, Dial, EngineAddress, Roots, in_order, race};
use crate::clock::Clock;

/// Connects through in-memory pipes. Clones share one network; an address without a listener
/// refuses.
///
/// ```
/// # use goodput::dial::{Dial, EngineAddress, PipeDial, Scheme};
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let network = PipeDial::new();
/// let mut engine = network.listen("engine-1:8000");
/// let address = EngineAddress {
///     scheme: Scheme::Http, host: "engine-1".into(), port: 8000, base: "".into(), name: None,
/// };
/// let ours = network.dial(&address, None).await.unwrap();
/// let theirs = engine.accept().await;
/// # drop((ours, theirs));
/// # }
/// ```
#[derive(Clone, Default)]
pub struct PipeDial(Arc<Mutex<Network>>);

#[derive(Default)]
struct Network {
    places: HashMap<String, PipeAddress>,
    names: HashMap<String, Vec<IpAddr>>,
    answered: HashMap<String, IpAddr>,
    dials: HashMap<String, usize>,
    lacks: usize,
}

enum PipeAddress {
    Listens(mpsc::UnboundedSender<DuplexStream>),
    Silent,
    Fails(io::ErrorKind),
}

/// The listening side of an address.
pub struct PipeListener(mpsc::UnboundedReceiver<DuplexStream>);

impl PipeDial {
    /// Capacity of a pipe in each direction, bytes.
    pub const CAPACITY: usize = 64 * 1024;

    /// A network without listeners.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Listens at `host:port`. A dropped listener refuses.
    #[must_use]
    pub fn listen(&self, at: &str) -> PipeListener {
        // Unbounded because a test dials a handful of times and each pipe is bounded.
        let (sender, receiver) = mpsc::unbounded_channel();
        self.set(at, PipeAddress::Listens(sender));
        PipeListener(receiver)
    }

    /// Makes further connections to `host:port` fail with `kind`.
    pub fn fail(&self, at: &str, kind: io::ErrorKind) {
        self.set(at, PipeAddress::Fails(kind));
    }

    /// Makes further connections to `host:port` hang.
    pub fn silence(&self, at: &str) {
        self.set(at, PipeAddress::Silent);
    }

    /// Makes the next `dials` attempts fail for lack of a file descriptor.
    pub fn lack(&self, dials: usize) {
        self.0.lock().lacks = dials;
    }

    /// Sets the addresses of a name; an empty list makes its lookup fail.
    pub fn name(&self, name: &str, addresses: &[IpAddr]) {
        self.0.lock().names.insert(name.to_owned(), addresses.to_vec());
    }

    /// Number of connection attempts to `host:port`.
    #[must_use]
    pub fn dials(&self, at: &str) -> usize {
        self.0.lock().dials.get(at).copied().unwrap_or_default()
    }

    fn set(&self, at: &str, place: PipeAddress) {
        self.0.lock().places.insert(at.to_owned(), place);
    }

    /// Addresses to try for a name, in order; None if the name itself is listened at.
    fn addresses(&self, to: &EngineAddress) -> Option<Vec<IpAddr>> {
        let network = self.0.lock();
        let found = network.names.get(&*to.host).filter(|_| !network.places.contains_key(to.id().as_str()))?;
        Some(in_order(found, network.answered.get(&*to.host).copied()))
    }

    /// `None`: no reply.
    fn reach(&self, at: &str) -> Option<io::Result<BoxedIo>> {
        let mut network = self.0.lock();
        *network.dials.entry(at.to_owned()).or_default() += 1;
        if network.lacks > 0 {
            network.lacks -= 1;
            return Some(Err(io::Error::from_raw_os_error(libc::EMFILE)));
        }
        let refused = || Some(Err(io::ErrorKind::ConnectionRefused.into()));
        match network.places.get(at) {
            None => refused(),
            Some(PipeAddress::Silent) => None,
            Some(PipeAddress::Fails(kind)) => Some(Err((*kind).into())),
            Some(PipeAddress::Listens(listener)) => {
                let (ours, theirs) = tokio::io::duplex(Self::CAPACITY);
                match listener.send(theirs) {
                    Ok(()) => Some(Ok(Box::new(ours))),
                    Err(_) => refused(),
                }
            }
        }
    }
}

impl PipeListener {
    /// The next connection.
    ///
    /// # Panics
    /// If the [`PipeDial`] and its clones are gone, because no connection can come any more.
    pub async fn accept(&mut self) -> DuplexStream {
        self.0.recv().await.expect("somebody may still dial")
    }

    /// A pending connection, if there is one.
    pub fn try_accept(&mut self) -> Option<DuplexStream> {
        self.0.try_recv().ok()
    }
}

impl Dial for PipeDial {
    fn dial<'a>(&'a self, to: &'a EngineAddress, _roots: Option<&'a Roots>) -> BoxFuture<'a, io::Result<BoxedIo>> {
        Box::pin(async move {
            let reach = async |at: String| match self.reach(&at) {
                Some(result) => result,
                None => std::future::pending().await,
            };
            let Some(addresses) = self.addresses(to) else { return reach(to.id().to_string()).await };
            let at = |address: IpAddr| SocketAddr::new(address, to.port).to_string();
            let (address, io) = race(Clock::start(), &addresses, |address| reach(at(address))).await?;
            self.0.lock().answered.insert(to.host.to_string(), address);
            Ok(io)
        })
    }

    fn look_up<'a>(&'a self, name: &'a str, _port: u16) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        let found = self.0.lock().names.get(name).filter(|addresses| !addresses.is_empty()).cloned();
        Box::pin(async move { found.ok_or_else(|| io::ErrorKind::NotFound.into()) })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::dial::{Scheme, is_refusal};

    #[tokio::test]
    async fn an_imaginary_address_listens_fails_or_refuses() {
        let network = PipeDial::new();
        let to = EngineAddress { scheme: Scheme::Http, host: "e".into(), port: 1, base: "".into(), name: None };
        assert!(is_refusal(&network.dial(&to, None).await.err().unwrap()));
        let mut listener = network.listen("e:1");
        let mut ours = network.dial(&to, None).await.unwrap();
        ours.write_all(b"hi").await.unwrap();
        let mut theirs = listener.accept().await;
        let mut bytes = [0; 2];
        theirs.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"hi");
        network.fail("e:1", io::ErrorKind::HostUnreachable);
        assert!(!is_refusal(&network.dial(&to, None).await.err().unwrap()));
        assert_eq!(network.dials("e:1"), 3);
        assert!(network.look_up("svc", 1).await.is_err());
        network.name("svc", &[IpAddr::from([10, 0, 0, 1])]);
        assert_eq!(network.look_up("svc", 1).await.unwrap(), [IpAddr::from([10, 0, 0, 1])]);
    }

    #[tokio::test(start_paused = true)]
    async fn c83_a_name_leads_to_the_address_that_answers_and_to_it_first_the_next_time() {
        let (network, clock) = (PipeDial::new(), Clock::start());
        let to = EngineAddress { scheme: Scheme::Http, host: "svc".into(), port: 1, base: "".into(), name: None };
        network.name("svc", &[IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])]);
        network.silence("10.0.0.1:1");
        let _listener = network.listen("10.0.0.2:1");
        for millis in [250, 250, 250] {
            assert!(network.dial(&to, None).await.is_ok());
            assert_eq!(clock.now(), crate::types::Tick::from_millis(millis), "only the first time takes longer");
        }
        assert_eq!((network.dials("10.0.0.1:1"), network.dials("10.0.0.2:1")), (1, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn c83_an_address_that_answered_once_gives_way_when_it_no_longer_does() {
        let (network, clock) = (PipeDial::new(), Clock::start());
        let to = EngineAddress { scheme: Scheme::Http, host: "svc".into(), port: 1, base: "".into(), name: None };
        let [first, second, third] = [1, 2, 3].map(|last| IpAddr::from([10, 0, 0, last]));
        network.name("svc", &[first, second, third]);
        network.silence("10.0.0.1:1");
        let _listeners = [network.listen("10.0.0.2:1"), network.listen("10.0.0.3:1")];
        let dialed = async |what: &str, millis| {
            assert!(network.dial(&to, None).await.is_ok(), "{what}");
            assert_eq!(clock.now(), crate::types::Tick::from_millis(millis), "{what}");
        };
        dialed("the first is silent", 250).await;
        network.silence("10.0.0.2:1");
        dialed("the second, which is remembered, and the first", 750).await;
        dialed("the third is remembered", 750).await;
        let _first = network.listen("10.0.0.1:1");
        network.name("svc", &[first, second]);
        dialed("what is remembered is no address any more", 750).await;
        network.fail("10.0.0.1:1", io::ErrorKind::ConnectionRefused);
        let _second = network.listen("10.0.0.2:1");
        dialed("a refusal is no reason to wait", 750).await;
    }
}

//! The network of a gateway under test: engines that play scripts, and places without an engine.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use crate::support::scripted_engine::ScriptedEngine;
use futures_util::future::BoxFuture;
use goodput::dial::{BoxedIo, Dial, EngineAddress, Roots};
use goodput::sim::engine::SimEngine;
use parking_lot::Mutex;

/// Connections by host. Clones are one network; an unset host refuses.
#[derive(Clone, Default)]
pub struct Network(Arc<Mutex<Places>>);

#[derive(Default)]
struct Places {
    engines: HashMap<String, Place>,
    dials: HashMap<String, usize>,
    /// Addresses of names.
    names: HashMap<String, Vec<IpAddr>>,
}

#[derive(Clone)]
enum Place {
    Engine(ScriptedEngine),
    Simulated(SimEngine),
    Silent,
    /// There is no file descriptor for a connection.
    Lacking,
}

impl Network {
    pub fn engine(&self, host: &str, engine: &ScriptedEngine) {
        self.0.lock().engines.insert(host.to_owned(), Place::Engine(engine.clone()));
    }

    /// A simulated engine serves this host.
    pub fn simulated(&self, host: &str, engine: &SimEngine) {
        self.0.lock().engines.insert(host.to_owned(), Place::Simulated(engine.clone()));
    }

    /// Nobody listens here any more.
    pub fn refuse(&self, host: &str) {
        self.0.lock().engines.remove(host);
    }

    /// Connections come about neither well nor badly.
    pub fn silence(&self, host: &str) {
        self.0.lock().engines.insert(host.to_owned(), Place::Silent);
    }

    /// Connections to this host find no file descriptor.
    pub fn lack(&self, host: &str) {
        self.0.lock().engines.insert(host.to_owned(), Place::Lacking);
    }

    /// From now on the name has these addresses; with none, its look-up fails.
    pub fn name(&self, name: &str, addresses: &[IpAddr]) {
        self.0.lock().names.insert(name.to_owned(), addresses.to_vec());
    }

    pub fn dials(&self, host: &str) -> usize {
        self.0.lock().dials.get(host).copied().unwrap_or_default()
    }
}

impl Dial for Network {
    fn dial<'a>(&'a self, to: &'a EngineAddress, _roots: Option<&'a Roots>) -> BoxFuture<'a, io::Result<BoxedIo>> {
        let place = {
            let mut places = self.0.lock();
            *places.dials.entry(to.host.to_string()).or_default() += 1;
            places.engines.get(&*to.host).cloned()
        };
        Box::pin(async move {
            match place {
                Some(Place::Engine(engine)) => Ok(Box::new(engine.connect()) as BoxedIo),
                Some(Place::Simulated(engine)) => Ok(Box::new(engine.connect()) as BoxedIo),
                Some(Place::Lacking) => Err(io::Error::from_raw_os_error(libc::EMFILE)),
                Some(Place::Silent) => std::future::pending().await,
                None => Err(io::ErrorKind::ConnectionRefused.into()),
            }
        })
    }

    fn look_up<'a>(&'a self, name: &'a str, _port: u16) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        let found = self.0.lock().names.get(name).cloned().unwrap_or_default();
        Box::pin(async { if found.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(found) } })
    }
}

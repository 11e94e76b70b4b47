//! A simulated engine: vLLM's HTTP API over a scheduler that only counts tokens.
//!
//! For trying the gateway without a GPU, for load tests and for the simulation. The scheduler
//! ([`core`]) is pure; the rest runs it on the clock and adds vLLM's responses, events, errors and metrics.
//! Output is derived from the seed and the request, so equal requests get equal responses. All delays are
//! timers of the runtime: with paused time they take no real
//! time.
//!
//! ```no_run
//! use goodput::clock::Clock;
//! use goodput::sim::engine::{SimSettings, SimEngine};
//!
//! # async fn run() -> std::io::Result<()> {
//! let engine = SimEngine::start(Clock::start(), SimSettings::default());
//! let address = engine.listen("127.0.0.1:0".parse().unwrap()).await?;
//! println!("an engine at http://{address}");
//! # Ok(())
//! # }
//! ```

pub mod core;
mod http;
mod metrics;
mod prefix;
mod protocol;
mod request;
mod response;
mod runner;
mod seed;
mod text;
mod tool_call;

pub use core::{AdmissionOrder, EngineSpec, Gauges};
pub(super) use seed::mix;
pub use text::LengthDistribution;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use self::http::EngineService;
use crate::clock::Clock;

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct SimSettings {
    /// Model names; the first is its own.
    pub models: Vec<String>,
    /// Its properties.
    pub shape: EngineSpec,
    /// Seed of texts, lengths and jitter.
    pub seed: u64,
    /// Output lengths without a cap.
    pub output: LengthDistribution,
    /// Reasoning tokens at medium effort; 0 for a model without reasoning.
    pub reasoning_tokens: u64,
    /// Idle time after which a connection is closed, as by the real server.
    pub keep_alive: Duration,
}

impl Default for SimSettings {
    fn default() -> Self {
        SimSettings {
            models: vec!["sim".to_owned()],
            shape: EngineSpec::default(),
            seed: 1,
            output: LengthDistribution { p50: 160.0, p95: 640.0 },
            reasoning_tokens: 0,
            keep_alive: Duration::from_secs(5),
        }
    }
}

/// A running engine. Clones share it; it ends with all its connections when the last one is
/// dropped.
#[derive(Clone)]
pub struct SimEngine {
    counter: Arc<EngineService>,
    keep_alive: Duration,
    tasks: Arc<Mutex<JoinSet<()>>>,
}

impl SimEngine {
    /// Starts an engine on the current runtime.
    #[must_use]
    pub fn start(clock: Clock, settings: SimSettings) -> Self {
        let keep_alive = settings.keep_alive;
        let counter = Arc::new(EngineService::new(clock, settings));
        let mut tasks = JoinSet::new();
        tasks.spawn(Arc::clone(&counter.runner).run());
        SimEngine { counter, keep_alive, tasks: Arc::new(Mutex::new(tasks)) }
    }

    /// Listens on an address (port 0: a free one) and returns the bound one.
    ///
    /// # Errors
    /// Binding errors.
    pub async fn listen(&self, address: SocketAddr) -> io::Result<SocketAddr> {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        let (counter, keep_alive) = (Arc::clone(&self.counter), self.keep_alive);
        self.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                // A failed accept (no descriptors left) is retried after a while.
                let Ok((socket, _)) = listener.accept().await else {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let _ = socket.set_nodelay(true);
                while connections.try_join_next().is_some() {}
                connections.spawn(converse(Arc::clone(&counter), keep_alive, socket));
            }
        });
        Ok(bound)
    }

    /// Opens an in-memory connection and returns the caller's end.
    #[must_use]
    pub fn connect(&self) -> DuplexStream {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        self.spawn(converse(Arc::clone(&self.counter), self.keep_alive, ours));
        theirs
    }

    /// The engine's gauges.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        self.counter.runner.gauges()
    }

    /// Sets the speed relative to its properties, from the next step on.
    pub fn set_speed(&self, speed: f64) {
        self.counter.runner.set_speed(speed);
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}

async fn converse<S>(counter: Arc<EngineService>, keep_alive: Duration, stream: S)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| Arc::clone(&counter).serve(request));
    // A broken connection is the client's; its request has left the batch by then.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(keep_alive)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

#[cfg(test)]
mod tests;

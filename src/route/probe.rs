//! Goes and looks at engines: health checks, their own metrics, the models they serve, and
//! the addresses behind a DNS name. Tells the [`Fleet`] what it saw and decides nothing.
//!
//! One task per engine, and one per pool whose engines come from DNS. Every look opens a
//! connection of its own: whether the engine still accepts one is part of the question.
//! Looks are spread by a seeded source, so that a large fleet is not asked all at once.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HOST, USER_AGENT};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use secrecy::ExposeSecret;
use tokio::task::{AbortHandle, JoinSet};

use super::scrape::Page;
use super::settings::{EngineAddress, Engines, Pool};
use super::{Checked, Fleet, ModelCard, Report};
use crate::clock::Clock;
use crate::dial::{Dial, is_lack, is_refusal};
use crate::units::{EngineId, PoolId};

/// Looks at all engines of the pools it follows. Dropped, it stops.
pub struct Probes {
    looker: Arc<Looker>,
    tasks: Mutex<Tasks>,
}

#[derive(Default)]
struct Tasks {
    set: JoinSet<()>,
    pools: HashMap<PoolId, (Arc<Pool>, AbortHandle)>,
}

/// What every looking task needs.
struct Looker {
    fleet: Arc<Fleet>,
    dial: Arc<dyn Dial>,
    clock: Clock,
    seed: u64,
}

/// One engine, and what its pool says about asking it.
struct Target {
    pool: Arc<Pool>,
    engine: EngineId,
    address: Arc<EngineAddress>,
}

/// Engines are asked for their models this often.
const MODELS_EVERY: Duration = Duration::from_secs(30);
/// An engine that refuses connections is looked at this often: it is taken out at once, a look
/// costs next to nothing, and one that restarts quickly must not be missed for longer than it was
/// away.
const REFUSED_AGAIN: Duration = Duration::from_millis(250);
/// A list of models may be this large.
const LONGEST_LIST: usize = 1024 * 1024;
/// Models of one engine that are remembered.
const MOST_MODELS: usize = 1000;
/// A name of a model may be this long.
const LONGEST_NAME: usize = 256;
/// A metrics page is read up to this length.
const LONGEST_PAGE: usize = 8 * 1024 * 1024;

impl Probes {
    /// Nothing is looked at yet. `seed` spreads the looks over time.
    #[must_use]
    pub fn new(fleet: Arc<Fleet>, dial: Arc<dyn Dial>, clock: Clock, seed: u64) -> Self {
        Probes { looker: Arc::new(Looker { fleet, dial, clock, seed }), tasks: Mutex::default() }
    }

    /// Looks at these pools from now on, which the fleet follows already; a pool that did not
    /// change is not disturbed. To be called with the settings at the start and at every reload.
    pub fn follow(&self, pools: &[Arc<Pool>]) {
        let mut tasks = self.tasks.lock();
        tasks.pools.retain(|id, (old, task)| {
            let stays = pools.iter().any(|pool| pool.id == *id && is_same(pool, old));
            if !stays {
                task.abort();
            }
            stays
        });
        while tasks.set.try_join_next().is_some() {}
        for pool in pools {
            if !tasks.pools.contains_key(&pool.id) {
                let looks = self.looker.clone().look_at_pool(pool.clone());
                let task = tasks.set.spawn(looks);
                tasks.pools.insert(pool.id.clone(), (pool.clone(), task));
            }
        }
    }
}

/// Whether looks at a pool go on as before.
fn is_same(a: &Arc<Pool>, b: &Arc<Pool>) -> bool {
    let key = |pool: &Pool| pool.api_key.as_ref().map(|key| key.expose_secret().to_owned());
    Arc::ptr_eq(a, b)
        || (a.engines == b.engines
            && a.health == b.health
            && a.metrics == b.metrics
            && a.connect_timeout == b.connect_timeout
            && a.roots == b.roots
            && a.headers == b.headers
            && key(a) == key(b))
}

impl Looker {
    /// Looks at the engines of one pool for ever; their tasks end with this one.
    async fn look_at_pool(self: Arc<Self>, pool: Arc<Pool>) {
        let mut looks = JoinSet::new();
        let mut engines = HashMap::new();
        match &pool.engines {
            Engines::Static(_) => {
                self.attend(&pool, &mut engines, &mut looks);
                std::future::pending().await
            }
            Engines::Dns(dns) => loop {
                let began = self.clock.now();
                let patience = dns.refresh.max(Duration::from_secs(1));
                let found = self.within(patience, self.dial.look_up(&dns.name, dns.port)).await;
                match found {
                    Some(Ok(mut addresses)) if !addresses.is_empty() => {
                        addresses.sort_unstable();
                        addresses.dedup();
                        let addresses = addresses.into_iter().map(|address| dns.engine_at(address)).collect();
                        self.fleet.set_engines(&pool.id, addresses, self.clock.now());
                        self.attend(&pool, &mut engines, &mut looks);
                    }
                    // The last good answer stands: a name server that is down is no reason to
                    // lose engines that work.
                    Some(Ok(_)) => tracing::warn!(pool = %pool.id, "the pool's DNS name has no address"),
                    Some(Err(error)) => {
                        tracing::warn!(pool = %pool.id, %error, "the pool's DNS name cannot be looked up")
                    }
                    None => tracing::warn!(pool = %pool.id, "looking up the pool's DNS name took too long"),
                }
                self.clock.sleep_until(Some(began + dns.refresh)).await;
            },
        }
    }

    /// Starts looks at engines that are new in the fleet, ends those of engines that left.
    fn attend(
        self: &Arc<Self>,
        pool: &Arc<Pool>,
        engines: &mut HashMap<EngineId, (Arc<EngineAddress>, AbortHandle)>,
        looks: &mut JoinSet<()>,
    ) {
        let present = self.fleet.engines(&pool.id);
        engines.retain(|id, (address, task)| {
            let stays = present.iter().any(|(engine, at)| engine == id && at == address);
            if !stays {
                task.abort();
            }
            stays
        });
        while looks.try_join_next().is_some() {}
        for (engine, address) in present {
            engines.entry(engine.clone()).or_insert_with(|| {
                let target = Target { pool: pool.clone(), engine, address: address.clone() };
                (address, looks.spawn(self.clone().look_at_engine(target)))
            });
        }
    }

    /// Looks at one engine for ever. The three looks do not wait for each other: an engine
    /// whose metrics hang is still checked in time.
    async fn look_at_engine(self: Arc<Self>, target: Target) {
        let seed = self.seed ^ fingerprint(&target);
        tokio::join!(
            self.look_at_health(&target, seed),
            self.look_at_metrics(&target, seed.rotate_left(16)),
            self.look_at_models(&target, seed.rotate_left(32)),
        );
    }

    async fn look_at_health(&self, target: &Target, mut chance: u64) {
        let Some(health) = &target.pool.health else { return };
        loop {
            let began = self.clock.now();
            let checked = self.check(target, &health.path, health.timeout).await;
            if let Some(checked) = checked {
                self.tell(target, checked);
            }
            let every = if checked == Some(Checked::Refused) { health.every.min(REFUSED_AGAIN) } else { health.every };
            self.clock.sleep_until(Some(began + spread(every, &mut chance))).await;
        }
    }

    async fn look_at_metrics(&self, target: &Target, mut chance: u64) {
        let Some(scrape) = &target.pool.metrics else { return };
        loop {
            let next = self.clock.now() + spread(scrape.every, &mut chance);
            if let Some(Ok(report)) = self.within(scrape.timeout, self.read_metrics(target, &scrape.path)).await {
                self.fleet.reported(&target.pool.id, &target.engine, report, self.clock.now());
            }
            self.clock.sleep_until(Some(next)).await;
        }
    }

    async fn look_at_models(&self, target: &Target, mut chance: u64) {
        loop {
            let next = self.clock.now() + spread(MODELS_EVERY, &mut chance);
            if let Some(Ok(cards)) = self.within(MODELS_TIMEOUT, self.read_models(target)).await {
                let models = cards.iter().map(|(name, _)| Arc::clone(name)).collect();
                self.fleet.lists_models(&target.pool.id, &target.engine, models);
                self.fleet.describes_models(&target.pool.id, &target.engine, cards);
            }
            self.clock.sleep_until(Some(next)).await;
        }
    }

    fn tell(&self, target: &Target, checked: Checked) {
        let (pool, engine) = (&target.pool.id, &target.engine);
        match self.fleet.checked(pool, engine, checked, self.clock.now()) {
            Some(super::Change::WentDown) => tracing::warn!(%pool, %engine, ?checked, "an engine is down"),
            Some(super::Change::CameUp) => tracing::info!(%pool, %engine, "an engine is up again"),
            None => {}
        }
    }

    /// `None` where the gateway itself could open no connection: that tells nothing of the engine.
    async fn check(&self, target: &Target, path: &str, timeout: Duration) -> Option<Checked> {
        let checked = match self.within(timeout, self.ask(target, path)).await {
            None => Checked::NoAnswer,
            Some(Err(Failed::Dial(error))) if is_lack(&error) => {
                tracing::error!(%error, "an engine cannot be looked at: raise the limit of open files");
                return None;
            }
            Some(Err(Failed::Dial(error))) if is_refusal(&error) => Checked::Refused,
            Some(Err(_)) => Checked::NoAnswer,
            Some(Ok(answer)) if answer.status.is_success() || answer.status.is_redirection() => Checked::Well,
            Some(Ok(answer)) => Checked::Unwell { status: answer.status.as_u16() },
        };
        Some(checked)
    }

    async fn read_metrics(&self, target: &Target, path: &str) -> Result<Report, Failed> {
        let answer = self.ask(target, path).await?;
        if answer.status != StatusCode::OK {
            return Err(Failed::Useless);
        }
        let mut page = Page::default();
        answer.read(LONGEST_PAGE, |piece| page.push(piece)).await?;
        page.end().ok_or(Failed::Useless)
    }

    async fn read_models(&self, target: &Target) -> Result<Vec<(Arc<str>, ModelCard)>, Failed> {
        let answer = self.ask(target, "/v1/models").await?;
        if answer.status != StatusCode::OK {
            return Err(Failed::Useless);
        }
        let mut list = Vec::new();
        answer.read(LONGEST_LIST, |piece| list.extend_from_slice(piece)).await?;
        let list: ModelList = serde_json::from_slice(&list).map_err(|_| Failed::Useless)?;
        let models = list.data.into_iter().map(|model| (model.id, model.card));
        let models = models.filter(|(name, _)| !name.is_empty() && name.len() <= LONGEST_NAME);
        Ok(models.take(MOST_MODELS).map(|(name, card)| (Arc::from(name), card)).collect())
    }

    /// Asks with GET on a connection of its own.
    async fn ask(&self, target: &Target, path: &str) -> Result<Answer, Failed> {
        let (pool, address) = (&*target.pool, &*target.address);
        let dialled = self.within(pool.connect_timeout, self.dial.dial(address, pool.roots.as_ref())).await;
        let io = dialled.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into())).map_err(Failed::Dial)?;
        let handshake = http1::Builder::new().max_buf_size(LONGEST_HEAD).handshake(TokioIo::new(io)).await;
        let (mut sender, connection) = handshake.map_err(|_| Failed::Useless)?;
        let mut task = JoinSet::new();
        task.spawn(async move { drop(connection.await) });
        let answer = sender.send_request(request(pool, address, path)?).await.map_err(|_| Failed::Useless)?;
        Ok(Answer { status: answer.status(), body: answer.into_body(), _line: (sender, task) })
    }

    async fn within<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            done = work => Some(done),
            () = self.clock.sleep_until(Some(self.clock.now() + limit)) => None,
        }
    }
}

const MODELS_TIMEOUT: Duration = Duration::from_secs(5);
const LONGEST_HEAD: usize = 64 * 1024;

enum Failed {
    /// No connection.
    Dial(io::Error),
    /// No answer, or one that says nothing.
    Useless,
}

/// An answer to a look, and the connection it comes on.
struct Answer {
    status: StatusCode,
    body: Incoming,
    _line: (SendRequest<Empty<Bytes>>, JoinSet<()>),
}

impl Answer {
    /// Reads the body piece by piece, up to `most` bytes.
    async fn read(mut self, most: usize, mut take: impl FnMut(&[u8])) -> Result<(), Failed> {
        let mut length = 0;
        while let Some(frame) = self.body.frame().await {
            let Ok(piece) = frame.map_err(|_| Failed::Useless)?.into_data() else { continue };
            length += piece.len();
            if length > most {
                return Err(Failed::Useless);
            }
            take(&piece);
        }
        Ok(())
    }
}

#[derive(serde::Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(serde::Deserialize)]
struct ListedModel {
    id: String,
    #[serde(flatten)]
    card: ModelCard,
}

fn request(pool: &Pool, address: &EngineAddress, path: &str) -> Result<Request<Empty<Bytes>>, Failed> {
    let mut request = Request::get(format!("{}{path}", address.base))
        .header(HOST, address.authority())
        .header(USER_AGENT, "goodput")
        .header(ACCEPT, "*/*")
        .body(Empty::new())
        .map_err(|_| Failed::Useless)?;
    let headers = request.headers_mut();
    if let Some(key) = &pool.api_key
        && let Ok(mut value) = HeaderValue::try_from(format!("Bearer {}", key.expose_secret()))
    {
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    for (name, value) in &pool.headers {
        headers.insert(name.clone(), value.clone());
    }
    Ok(request)
}

/// An interval, longer or shorter by up to a tenth.
fn spread(every: Duration, chance: &mut u64) -> Duration {
    *chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let part = (*chance >> 40) as f64 / (1u64 << 24) as f64;
    every.mul_f64(0.9 + 0.2 * part)
}

/// Differs from engine to engine, and not from start to start.
fn fingerprint(target: &Target) -> u64 {
    let digest = blake3::hash(format!("{} {}", target.pool.id, target.engine).as_bytes());
    u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("a digest is longer than eight bytes"))
}

#[cfg(test)]
mod tests;

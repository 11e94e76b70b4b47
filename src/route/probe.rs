//! Observes engines: health checks, their metrics, their models, and the addresses of a DNS name. Reports
//! to the [`Fleet`] and decides nothing.
//!
//! One task per engine, and one per pool with DNS. Every probe opens its own connection, because whether
//! the engine accepts one is part of the question. Probes are spread by a seeded random source, so that a
//! large fleet is not probed all at once.

mod ask;
mod family;
mod survey;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use parking_lot::Mutex;
use secrecy::ExposeSecret;
use tokio::task::{AbortHandle, JoinSet};

use self::ask::{Asking, Failed};
use self::family::Chosen;
pub use self::survey::{KeyState, Survey, survey};
use super::scrape::Page;
use super::settings::{EngineAddress, Engines, Pool};
use super::{Checked, Fleet, ModelCard, Report};
use crate::clock::Clock;
use crate::dial::{Dial, is_lack, is_refusal};
use crate::units::{EngineId, PoolId};

/// Probes all engines of the pools it follows. Stops when dropped.
pub struct Probes {
    looker: Arc<Looker>,
    tasks: Mutex<Tasks>,
}

#[derive(Default)]
struct Tasks {
    set: JoinSet<()>,
    pools: HashMap<PoolId, (Arc<Pool>, AbortHandle)>,
}

/// Shared by all probing tasks.
struct Looker {
    fleet: Arc<Fleet>,
    asking: Asking,
    seed: u64,
}

/// One engine, with its pool's settings.
struct Target {
    pool: Arc<Pool>,
    engine: EngineId,
    address: Arc<EngineAddress>,
}

/// Interval of model lists for the only engine of a pool, where the list is only shown.
const MODELS_EVERY: Duration = Duration::from_secs(30);
/// Interval of model lists for one of several engines, where the lists guide the choice and an adapter
/// loaded on one engine is requested at once.
const CHOICE_OF_MODELS_EVERY: Duration = Duration::from_secs(1);
/// Interval of checks of an engine that refuses connections: it is taken out at once, a check is cheap, and
/// a quick restart should not be missed for longer than it takes.
const REFUSED_AGAIN: Duration = Duration::from_millis(250);
/// Most bytes read of a metrics page.
const LONGEST_PAGE: usize = 8 * 1024 * 1024;

impl Probes {
    /// Probes nothing yet. `seed` spreads the probes over time.
    #[must_use]
    pub fn new(fleet: Arc<Fleet>, dial: Arc<dyn Dial>, clock: Clock, seed: u64) -> Self {
        let asking = Asking { dial, clock };
        Probes { looker: Arc::new(Looker { fleet, asking, seed }), tasks: Mutex::default() }
    }

    /// Probes these pools, which the fleet already follows; an unchanged pool is not disturbed. Called at start
    /// and at every reload.
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

/// Whether a pool's probes can continue unchanged.
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
    /// Probes the engines of one pool forever; their tasks end with this one.
    async fn look_at_pool(self: Arc<Self>, pool: Arc<Pool>) {
        let mut looks = JoinSet::new();
        let mut engines = HashMap::new();
        match &pool.engines {
            Engines::Static(_) => {
                self.attend(&pool, &mut engines, &mut looks);
                std::future::pending().await
            }
            Engines::Dns(dns) => {
                let mut chosen = Chosen::default();
                loop {
                    let clock = self.asking.clock;
                    let began = clock.now();
                    let patience = dns.refresh.max(Duration::from_secs(1));
                    let found = self.asking.within(patience, self.asking.dial.look_up(&dns.name, dns.port)).await;
                    match found {
                        Some(Ok(addresses)) if !addresses.is_empty() => {
                            let serves = self.fleet.available(&pool.id, clock.now()) > 0;
                            let addresses = chosen.of(addresses, &pool, dns, serves, &self.asking).await;
                            if addresses.is_empty() {
                                tracing::warn!(pool = %pool.id, family = ?dns.family, "the pool's DNS name has no address of its `family`");
                            } else {
                                let engines = addresses.into_iter().map(|address| dns.engine_at(address)).collect();
                                self.fleet.set_engines(&pool.id, engines, clock.now());
                            }
                            self.attend(&pool, &mut engines, &mut looks);
                        }
                        // The last good result stays valid, because a failing name server should not remove working
                        // engines.
                        Some(Ok(_)) => tracing::warn!(pool = %pool.id, "the pool's DNS name has no address"),
                        Some(Err(error)) => {
                            tracing::warn!(pool = %pool.id, %error, "cannot resolve the pool's DNS name")
                        }
                        None => tracing::warn!(pool = %pool.id, "DNS lookup of the pool's name timed out"),
                    }
                    clock.sleep_until(Some(began + dns.refresh)).await;
                }
            }
        }
    }

    /// Starts probes of new engines, and ends those of removed ones.
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

    /// Probes one engine forever. The three kinds of probes are independent: an engine whose metrics hang is
    /// still checked in time.
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
        let clock = self.asking.clock;
        loop {
            let began = clock.now();
            let looked = self.check(target, &health.path, health.timeout).await;
            let every = match looked {
                Some(Look { checked: Checked::Refused, .. }) => health.every.min(REFUSED_AGAIN),
                _ => health.every,
            };
            if let Some(looked) = looked {
                self.tell(target, &looked);
            }
            clock.sleep_until(Some(began + spread(every, &mut chance))).await;
        }
    }

    async fn look_at_metrics(&self, target: &Target, mut chance: u64) {
        let Some(scrape) = &target.pool.metrics else { return };
        let clock = self.asking.clock;
        loop {
            let next = clock.now() + spread(scrape.every, &mut chance);
            if let Some(Ok(report)) = self.asking.within(scrape.timeout, self.read_metrics(target, &scrape.path)).await
            {
                self.fleet.reported(&target.pool.id, &target.engine, report, clock.now());
            }
            clock.sleep_until(Some(next)).await;
        }
    }

    /// The first probe also logs what the engine is.
    async fn look_at_models(&self, target: &Target, mut chance: u64) {
        let clock = self.asking.clock;
        let listed = survey::models(&self.asking, &target.pool, &target.address).await;
        // At once, because the lists guide routing.
        let cards = listed.as_ref().map_or_else(|_| Vec::new(), Clone::clone);
        let listed = listed.map(names);
        self.fleet.lists_models(&target.pool.id, &target.engine, names(cards.clone()));
        self.fleet.describes_models(&target.pool.id, &target.engine, cards);
        Survey::of(&self.asking, &target.pool, &target.address, listed).await.tell();
        loop {
            let every = match self.fleet.engine_count(&target.pool.id) {
                0 | 1 => MODELS_EVERY,
                _ => CHOICE_OF_MODELS_EVERY,
            };
            clock.sleep_until(Some(clock.now() + spread(every, &mut chance))).await;
            if let Ok(cards) = survey::models(&self.asking, &target.pool, &target.address).await {
                let models = names(cards.clone());
                self.fleet.lists_models(&target.pool.id, &target.engine, models);
                self.fleet.describes_models(&target.pool.id, &target.engine, cards);
            }
        }
    }

    fn tell(&self, target: &Target, look: &Look) {
        let (pool, engine) = (&target.pool.id, &target.engine);
        match self.fleet.checked(pool, engine, look.checked, self.asking.clock.now()) {
            Some(super::Change::WentDown) => tracing::warn!(%pool, %engine, cause = %look.cause, "engine down"),
            Some(super::Change::CameUp) => tracing::info!(%pool, %engine, "engine up again"),
            None => {}
        }
    }

    /// `None` if the gateway could open no connection, which says nothing about the engine.
    async fn check(&self, target: &Target, path: &str, timeout: Duration) -> Option<Look> {
        let asked = self.asking.ask(&target.pool, &target.address, path);
        let look = |checked, cause: String| Some(Look { checked, cause });
        match self.asking.within(timeout, asked).await {
            None => look(Checked::NoAnswer, format!("{path} was not answered within {timeout:?}")),
            Some(Err(Failed::Dial(error))) if is_lack(&error) => {
                tracing::error!(%error, "cannot probe an engine: raise the limit of open files");
                None
            }
            Some(Err(failed)) => {
                let refuses = matches!(&failed, Failed::Dial(error) if is_refusal(error));
                look(if refuses { Checked::Refused } else { Checked::NoAnswer }, failed.cause(&target.address))
            }
            Some(Ok(answer)) if answer.status.is_success() || answer.status.is_redirection() => {
                look(Checked::Well, String::new())
            }
            Some(Ok(answer)) => {
                let status = answer.status.as_u16();
                look(Checked::Unwell { status }, format!("{path} answers {status}"))
            }
        }
    }

    async fn read_metrics(&self, target: &Target, path: &str) -> Result<Report, Failed> {
        let answer = self.asking.ask(&target.pool, &target.address, path).await?;
        if answer.status != StatusCode::OK {
            return Err(Failed::Status(answer.status));
        }
        let mut page = Page::default();
        answer.read(LONGEST_PAGE, |piece| page.push(piece)).await?;
        page.end().ok_or(Failed::Useless)
    }
}

/// Model names.
fn names(cards: Vec<(Arc<str>, ModelCard)>) -> Vec<Arc<str>> {
    cards.into_iter().map(|(name, _)| name).collect()
}

/// Result of a health check, and the cause for the log.
struct Look {
    checked: Checked,
    cause: String,
}

/// The interval, varied by up to 10 %.
fn spread(every: Duration, chance: &mut u64) -> Duration {
    *chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let part = (*chance >> 40) as f64 / (1u64 << 24) as f64;
    every.mul_f64(0.9 + 0.2 * part)
}

/// Differs between engines, and is stable over restarts.
fn fingerprint(target: &Target) -> u64 {
    let digest = blake3::hash(format!("{} {}", target.pool.id, target.engine).as_bytes());
    u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("a digest is longer than eight bytes"))
}

#[cfg(test)]
mod tests;

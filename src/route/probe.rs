//! Observes engines: health checks, their metrics, their models, and the addresses of a DNS name. Reports
//! to the [`Fleet`] and decides nothing.
//!
//! One task per engine, and one per pool with DNS. Every probe opens its own connection, because whether
//! the engine accepts one is part of the question. Probes are spread by a seeded random source, so that a
//! large fleet is not probed all at once.

mod address_family;
mod client;
mod survey;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use parking_lot::Mutex;
use secrecy::ExposeSecret;
use tokio::task::{AbortHandle, JoinSet};

use self::address_family::ChosenFamily;
use self::client::{ProbeClient, ProbeFailure};
pub use self::survey::{KeyState, Survey, survey};
use super::engine_metrics::MetricsParser;
use super::settings::{EngineAddress, EngineSource, PoolSettings};
use super::{EngineMetrics, Fleet, ModelCard, ProbeResult};
use crate::clock::Clock;
use crate::dial::{Dial, is_lack, is_refusal};
use crate::types::{EngineId, PoolId};

/// Probes all engines of the pools it follows. Stops when dropped.
pub struct Probes {
    prober: Arc<Prober>,
    tasks: Mutex<ProbeTasks>,
}

#[derive(Default)]
struct ProbeTasks {
    set: JoinSet<()>,
    pools: HashMap<PoolId, (Arc<PoolSettings>, AbortHandle)>,
}

/// Shared by all probing tasks.
struct Prober {
    fleet: Arc<Fleet>,
    client: ProbeClient,
    seed: u64,
}

/// One engine, with its pool's settings.
struct ProbeTarget {
    pool: Arc<PoolSettings>,
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
        let client = ProbeClient { dial, clock };
        Probes { prober: Arc::new(Prober { fleet, client, seed }), tasks: Mutex::default() }
    }

    /// Probes these pools, which the fleet already follows; an unchanged pool is not disturbed. Called at start
    /// and at every reload.
    pub fn apply_settings(&self, pools: &[Arc<PoolSettings>]) {
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
                let looks = self.prober.clone().probe_pool(pool.clone());
                let task = tasks.set.spawn(looks);
                tasks.pools.insert(pool.id.clone(), (pool.clone(), task));
            }
        }
    }
}

/// Whether a pool's probes can continue unchanged.
fn is_same(a: &Arc<PoolSettings>, b: &Arc<PoolSettings>) -> bool {
    let key = |pool: &PoolSettings| pool.api_key.as_ref().map(|key| key.expose_secret().to_owned());
    Arc::ptr_eq(a, b)
        || (a.engines == b.engines
            && a.health == b.health
            && a.metrics == b.metrics
            && a.connect_timeout == b.connect_timeout
            && a.roots == b.roots
            && a.headers == b.headers
            && key(a) == key(b))
}

impl Prober {
    /// Probes the engines of one pool forever; their tasks end with this one.
    async fn probe_pool(self: Arc<Self>, pool: Arc<PoolSettings>) {
        let mut looks = JoinSet::new();
        let mut engines = HashMap::new();
        match &pool.engines {
            EngineSource::Static(_) => {
                self.attend(&pool, &mut engines, &mut looks);
                std::future::pending().await
            }
            EngineSource::Dns(dns) => {
                let mut chosen = ChosenFamily::default();
                loop {
                    let clock = self.client.clock;
                    let began = clock.now();
                    let patience = dns.refresh.max(Duration::from_secs(1));
                    let found = self.client.within(patience, self.client.dial.look_up(&dns.name, dns.port)).await;
                    match found {
                        Some(Ok(addresses)) if !addresses.is_empty() => {
                            let serves = self.fleet.available(&pool.id, clock.now()) > 0;
                            let addresses = chosen.of(addresses, &pool, dns, serves, &self.client).await;
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
        pool: &Arc<PoolSettings>,
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
                let target = ProbeTarget { pool: pool.clone(), engine, address: address.clone() };
                (address, looks.spawn(self.clone().probe_engine(target)))
            });
        }
    }

    /// Probes one engine forever. The three kinds of probes are independent: an engine whose metrics hang is
    /// still checked in time.
    async fn probe_engine(self: Arc<Self>, target: ProbeTarget) {
        let seed = self.seed ^ fingerprint(&target);
        tokio::join!(
            self.probe_health(&target, seed),
            self.probe_metrics(&target, seed.rotate_left(16)),
            self.probe_models(&target, seed.rotate_left(32)),
        );
    }

    async fn probe_health(&self, target: &ProbeTarget, mut chance: u64) {
        let Some(health) = &target.pool.health else { return };
        let clock = self.client.clock;
        loop {
            let began = clock.now();
            let looked = self.check(target, &health.path, health.timeout).await;
            let every = match looked {
                Some(HealthObservation { checked: ProbeResult::Refused, .. }) => health.every.min(REFUSED_AGAIN),
                _ => health.every,
            };
            if let Some(looked) = looked {
                self.tell(target, &looked);
            }
            clock.sleep_until(Some(began + spread(every, &mut chance))).await;
        }
    }

    async fn probe_metrics(&self, target: &ProbeTarget, mut chance: u64) {
        let Some(scrape) = &target.pool.metrics else { return };
        let clock = self.client.clock;
        loop {
            let next = clock.now() + spread(scrape.every, &mut chance);
            if let Some(Ok(report)) = self.client.within(scrape.timeout, self.read_metrics(target, &scrape.path)).await
            {
                self.fleet.reported(&target.pool.id, &target.engine, report, clock.now());
            }
            clock.sleep_until(Some(next)).await;
        }
    }

    /// The first probe also logs what the engine is.
    async fn probe_models(&self, target: &ProbeTarget, mut chance: u64) {
        let clock = self.client.clock;
        let listed = survey::models(&self.client, &target.pool, &target.address).await;
        // At once, because the lists guide routing.
        let cards = listed.as_ref().map_or_else(|_| Vec::new(), Clone::clone);
        let listed = listed.map(names);
        self.fleet.lists_models(&target.pool.id, &target.engine, names(cards.clone()));
        self.fleet.describes_models(&target.pool.id, &target.engine, cards);
        Survey::of(&self.client, &target.pool, &target.address, listed).await.tell();
        loop {
            let every = match self.fleet.engine_count(&target.pool.id) {
                0 | 1 => MODELS_EVERY,
                _ => CHOICE_OF_MODELS_EVERY,
            };
            clock.sleep_until(Some(clock.now() + spread(every, &mut chance))).await;
            if let Ok(cards) = survey::models(&self.client, &target.pool, &target.address).await {
                let models = names(cards.clone());
                self.fleet.lists_models(&target.pool.id, &target.engine, models);
                self.fleet.describes_models(&target.pool.id, &target.engine, cards);
            }
        }
    }

    fn tell(&self, target: &ProbeTarget, look: &HealthObservation) {
        let (pool, engine) = (&target.pool.id, &target.engine);
        match self.fleet.checked(pool, engine, look.checked, self.client.clock.now()) {
            Some(super::HealthChange::WentDown) => tracing::warn!(%pool, %engine, cause = %look.cause, "engine down"),
            Some(super::HealthChange::CameUp) => tracing::info!(%pool, %engine, "engine up again"),
            None => {}
        }
    }

    /// `None` if the gateway could open no connection, which says nothing about the engine.
    async fn check(&self, target: &ProbeTarget, path: &str, timeout: Duration) -> Option<HealthObservation> {
        let asked = self.client.ask(&target.pool, &target.address, path);
        let look = |checked, cause: String| Some(HealthObservation { checked, cause });
        match self.client.within(timeout, asked).await {
            None => look(ProbeResult::NoAnswer, format!("{path} was not answered within {timeout:?}")),
            Some(Err(ProbeFailure::Dial(error))) if is_lack(&error) => {
                tracing::error!(%error, "cannot probe an engine: raise the limit of open files");
                None
            }
            Some(Err(failed)) => {
                let refuses = matches!(&failed, ProbeFailure::Dial(error) if is_refusal(error));
                look(if refuses { ProbeResult::Refused } else { ProbeResult::NoAnswer }, failed.cause(&target.address))
            }
            Some(Ok(answer)) if answer.status.is_success() || answer.status.is_redirection() => {
                look(ProbeResult::Healthy, String::new())
            }
            Some(Ok(answer)) => {
                let status = answer.status.as_u16();
                look(ProbeResult::Unhealthy { status }, format!("{path} answers {status}"))
            }
        }
    }

    async fn read_metrics(&self, target: &ProbeTarget, path: &str) -> Result<EngineMetrics, ProbeFailure> {
        let answer = self.client.ask(&target.pool, &target.address, path).await?;
        if answer.status != StatusCode::OK {
            return Err(ProbeFailure::Status(answer.status));
        }
        let mut page = MetricsParser::default();
        answer.read(LONGEST_PAGE, |piece| page.push(piece)).await?;
        page.end().ok_or(ProbeFailure::Useless)
    }
}

/// Model names.
fn names(cards: Vec<(Arc<str>, ModelCard)>) -> Vec<Arc<str>> {
    cards.into_iter().map(|(name, _)| name).collect()
}

/// Result of a health check, and the cause for the log.
struct HealthObservation {
    checked: ProbeResult,
    cause: String,
}

/// The interval, varied by up to 10 %.
fn spread(every: Duration, chance: &mut u64) -> Duration {
    *chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let part = (*chance >> 40) as f64 / (1u64 << 24) as f64;
    every.mul_f64(0.9 + 0.2 * part)
}

/// Differs between engines, and is stable over restarts.
fn fingerprint(target: &ProbeTarget) -> u64 {
    let digest = blake3::hash(format!("{} {}", target.pool.id, target.engine).as_bytes());
    u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("a digest is longer than eight bytes"))
}

#[cfg(test)]
mod tests;
